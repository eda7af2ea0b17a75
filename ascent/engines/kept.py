"""What an optimizer keeps between steps, for checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def remembered(optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """What an optimizer keeps of each parameter, by the parameter's place in its list."""
    parameters = [] if optimizer is None else optimizer.param_groups[0]["params"]
    state = {} if optimizer is None else optimizer.state
    return {f"{i}.{key}": v for i, p in enumerate(parameters) for key, v in state.get(p, {}).items()}


def remind(optimizer: torch.optim.Optimizer | None, kept: dict[str, Tensor]) -> None:
    """Give an optimizer back what it kept."""
    for name, value in kept.items():
        assert optimizer is not None
        index, key = name.split(".", 1)
        parameter = optimizer.param_groups[0]["params"][int(index)]
        optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
