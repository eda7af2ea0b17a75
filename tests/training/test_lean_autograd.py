"""Backward passes and Adam steps by the kernel alone: torch's own bits."""

import copy

import pytest
import torch

from ascent.core.update import Adam
from ascent.training.lean_autograd import run_backward, use_fused_adamw


def parameters(dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator).to(dtype).requires_grad_() for dtype in dtypes]


@pytest.mark.parametrize("update", [Adam(), Adam(lr=0.1, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.1)])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float64,) * 3, (torch.float32, torch.float64)])
def test_lean_optimizer_step_is_bitwise_equal_to_torch(update: Adam, dtypes: tuple[torch.dtype, ...]) -> None:
    """Over rates that change, gradients that are missing, and moments that are put in place of the old ones."""
    ours, theirs = parameters(dtypes), parameters(dtypes)
    light, whole = use_fused_adamw(update.optimizer(ours)), update.optimizer(theirs)
    assert light is not None
    for step in range(6):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = None if i == 1 and step in (0, 3) else torch.full_like(one, 0.3 - 0.1 * step)
            other.grad = None if one.grad is None else one.grad.clone()
        light.param_groups[0]["lr"] = whole.param_groups[0]["lr"] = update.lr / (1 + step)
        light.step()
        whole.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            assert all(torch.equal(value, whole.state[other][key]) for key, value in light.state[one].items())
        if step == 3:
            for one in ours:
                light.state[one].update(copy.deepcopy(light.state[one]))


def test_step_without_gradient_changes_nothing() -> None:
    (one,) = ours = parameters((torch.float32,))
    light, before = use_fused_adamw(Adam().optimizer(ours)), one.detach().clone()
    assert light is not None
    light.step()
    assert torch.equal(one, before)


def test_other_optimizers_are_unchanged() -> None:
    plain = torch.optim.AdamW(parameters((torch.float32,)), fused=False)
    use_fused_adamw(plain)
    assert "step" not in vars(plain)
    assert use_fused_adamw(None) is None


def test_lean_backward_is_bitwise_equal_to_torch() -> None:
    ours, theirs = parameters((torch.float32,) * 2), parameters((torch.float32,) * 2)
    for one, other in (ours, theirs):
        for _ in range(2):  # gradients add up
            output = (one.exp() * other).log_softmax(-1).sum()
            if one is ours[0]:
                run_backward(output, -torch.ones(()))
            else:
                output.backward(-torch.ones(()))
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))
