"""Float32 master weights of half-precision parameters, and loading trained parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.models.causal_lm import LanguageModel


@torch.no_grad()
def load_params(params: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Load trained parameters from a checkpoint. ConfigError if they are another model's."""
    check_params(params, saved)
    for name, value in saved.items():
        params[name].copy_(value)


def check_params(params: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raise ConfigError if parameters are another model's."""
    if params.keys() != saved.keys() or any(params[k].shape != saved[k].shape for k in saved):
        raise ConfigError(
            "these parameters are not this model's: set the --model and --policy.lora that they were made with"
        )


def is_half(p: Tensor) -> bool:
    return p.dtype in (torch.bfloat16, torch.float16)


def float32_copies(stored: dict[str, Tensor], params: dict[str, Tensor]) -> list[Tensor]:
    """Return float32 master weights: from the stored checkpoint if that is more precise, else from the parameters.

    A master weight that starts at its rounded value has to change by half a rounding step before the parameter does.
    """
    master_params = []
    for name, p in params.items():
        value = most_precise(stored, name, p)
        master_params.append(value.to(p.device, torch.float32, copy=value.data_ptr() == p.data_ptr()))
    return master_params


def stored_precision(lm: LanguageModel, backbone_params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the stored values of the parameters that the model has rounded, for a copy of the backbone."""
    names = {id(p): name for name, p in lm.model.named_parameters()}
    pairs = (
        (name, lm.full_precision_params.get(names[id(p)]))
        for name, p in lm.backbone.named_parameters()
        if name in backbone_params
    )
    return {name: exact.clone() for name, exact in pairs if exact is not None}


@torch.no_grad()
def copy_to_compute_params(compute_params: list[Tensor], master_params: list[Tensor]) -> None:
    """Copy master weights, if there are any, to the parameters of the model."""
    if compute_params is not master_params:
        torch._foreach_copy_(compute_params, master_params)


def most_precise(stored: dict[str, Tensor], name: str, p: Tensor) -> Tensor:
    """Return the stored value of a parameter if it is more precise and the parameter has not changed since."""
    exact = stored.get(name)
    same = exact is not None and torch.equal(exact.to(p.dtype).to(p.device), p)
    return exact if exact is not None and same else p.detach()


@contextmanager
def accumulate_into(master_params: list[Tensor], compute_params: list[Tensor]) -> Iterator[None]:
    """Accumulate the gradients of half-precision parameters in the `.grad` of their master weights."""

    def add(master: Tensor, p: Tensor) -> None:
        assert p.grad is not None
        master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
        p.grad = None

    pairs = [] if master_params is compute_params else zip(compute_params, master_params, strict=True)
    hooks = [p.register_post_accumulate_grad_hook(partial(add, master)) for p, master in pairs]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
