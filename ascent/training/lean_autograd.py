"""Backward passes and Adam steps without the Python overhead of torch, which dominates small updates."""

import torch
from torch import Tensor


def run_backward(output: Tensor, gradient: Tensor) -> None:
    """Run `output.backward(gradient)` without its argument checks."""
    torch.autograd.Variable._execution_engine.run_backward(
        (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def use_fused_adamw(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
    """Make each step of a fused AdamW, from the second on, one kernel call. Other optimizers are unchanged."""
    kinds = {(p.dtype, p.device) for group in optimizer.param_groups for p in group["params"]} if optimizer else {}
    if type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"] and len(kinds) == 1:
        whole = optimizer.step
        optimizer.step = lambda: _step(optimizer) or whole()  # type: ignore[assignment, method-assign, misc]
    return optimizer


@torch.no_grad()
def _step(optimizer: torch.optim.AdamW) -> bool:
    """Take a step and return True; return False if there are no moments yet."""
    (group,) = optimizer.param_groups
    moved = [p for p in group["params"] if p.grad is not None]
    kept = [optimizer.state[p] for p in moved]
    if not kept or not all(kept):
        return False
    steps = [state["step"] for state in kept]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        moved,
        [p.grad for p in moved],
        [state["exp_avg"] for state in kept],
        [state["exp_avg_sq"] for state in kept],
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    return True
