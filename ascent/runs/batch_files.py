"""Tickets and batches as files: tensors go into a safetensors file, everything else into JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.protocols import PendingRollout, RolloutRequest
from ascent.core.types import Prompts, Rollouts

Plain = dict[str, Any]
REQUEST_FIELDS = ("step", "samples", "greedy", "seed")


def take_apart(pending: Sequence[PendingRollout]) -> tuple[dict[str, Tensor], list[Plain]]:
    """Open tickets as named tensors, and what of each is no tensor. `play` is left out: the task brings it again."""
    tensors: dict[str, Tensor] = {}
    plain: list[Plain] = []
    for i, one in enumerate(pending):
        own: Plain = {name: getattr(one.request, name) for name in REQUEST_FIELDS}
        for part, value in (("prompts", one.request.prompts), ("rollouts", one.rollouts)):
            own[part] = None if value is None else split(value, f"{i}.{part}.", tensors)
        tensors |= {
            f"{i}.{name}": value for name in ("unfinished", "seeds") if (value := getattr(one, name)) is not None
        }
        plain.append(own)
    return tensors, plain


def put_together(tensors: dict[str, Tensor], plain: Sequence[Plain], play: Any = None) -> tuple[PendingRollout, ...]:
    """The open tickets that `take_apart` took apart. `play`: what answers the turns of their responses, if any."""
    pending = []
    for i, own in enumerate(plain):
        if type(own["step"]) is not int:
            raise ValueError(f"a ticket of step {own['step']!r}")
        prompts = Prompts(**together(own["prompts"], f"{i}.prompts.", tensors) | {"play": play})
        drawn = None if own["rollouts"] is None else Rollouts(**together(own["rollouts"], f"{i}.rollouts.", tensors))
        ticket = RolloutRequest(prompts=prompts, **{name: own[name] for name in REQUEST_FIELDS})
        pending.append(PendingRollout(ticket, drawn, tensors.get(f"{i}.unfinished"), tensors.get(f"{i}.seeds")))
    return tuple(pending)


def check_ahead(pending: Sequence[PendingRollout], first: int, ahead: int) -> None:
    """Refuse tickets that another --ahead has begun: their tokens may be older than this one allows."""
    last = max([one.request.step for one in pending], default=-1)
    if last >= first + ahead:
        raise ConfigError(
            f"the checkpoint of step {first} holds responses for step {last}, too early for --ahead {ahead}: "
            f"they may be older than it allows. Set it to {last - first + 1} or more in config.json"
        )


def split(value: Prompts | Rollouts, prefix: str, tensors: dict[str, Tensor]) -> Plain:
    """Its tensors into `tensors`; returned is the rest, words as lists."""
    plain: Plain = {}
    for field in fields(value):
        one = getattr(value, field.name)
        if isinstance(one, Tensor):
            tensors[prefix + field.name] = one.clone()  # no two of them may share memory
        elif isinstance(one, np.ndarray):
            plain[field.name] = one.tolist()
        elif not callable(one):
            plain[field.name] = one
    return plain


def together(plain: Plain, prefix: str, tensors: dict[str, Tensor]) -> Plain:
    """The fields that `split` split: a list of lists is an array of words, and any other list a tuple."""
    found = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    lists = {name: value for name, value in plain.items() if isinstance(value, list)}
    words = {
        name: np.array(value, dtype=object) for name, value in lists.items() if value and isinstance(value[0], list)
    }
    return plain | {name: tuple(value) for name, value in lists.items()} | words | found
