"""Pending rollouts and batches as files: tensors go into a safetensors file, everything else into JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.protocols import PendingRollout, RolloutRequest
from ascent.core.types import Prompts, Rollouts

JsonDict = dict[str, Any]
REQUEST_FIELDS = ("step", "samples", "greedy", "seed")


def pack_rollouts(pending: Sequence[PendingRollout]) -> tuple[dict[str, Tensor], list[JsonDict]]:
    """Split pending rollouts into named tensors and JSON, without `start_episodes`, which the task provides."""
    tensors: dict[str, Tensor] = {}
    entries: list[JsonDict] = []
    for i, rollout in enumerate(pending):
        entry: JsonDict = {name: getattr(rollout.request, name) for name in REQUEST_FIELDS}
        for part, value in (("prompts", rollout.request.prompts), ("rollouts", rollout.rollouts)):
            entry[part] = None if value is None else to_json_and_tensors(value, f"{i}.{part}.", tensors)
        state = {name: getattr(rollout, name) for name in ("unfinished", "seeds")}
        tensors |= {f"{i}.{name}": value for name, value in state.items() if value is not None}
        entries.append(entry)
    return tensors, entries


def unpack_rollouts(
    tensors: dict[str, Tensor], entries: Sequence[JsonDict], start_episodes: Any = None
) -> tuple[PendingRollout, ...]:
    """Restore the rollouts that `pack_rollouts` packed. `start_episodes` starts the environments."""
    pending = []
    for i, entry in enumerate(entries):
        if type(entry["step"]) is not int:
            raise ValueError(f"a rollout request of step {entry['step']!r}")
        prompts = Prompts(**from_json_and_tensors(entry["prompts"], f"{i}.prompts.", tensors))
        prompts = replace(prompts, start_episodes=start_episodes)
        saved = entry["rollouts"]
        rollouts = None if saved is None else Rollouts(**from_json_and_tensors(saved, f"{i}.rollouts.", tensors))
        request = RolloutRequest(prompts=prompts, **{name: entry[name] for name in REQUEST_FIELDS})
        pending.append(PendingRollout(request, rollouts, tensors.get(f"{i}.unfinished"), tensors.get(f"{i}.seeds")))
    return tuple(pending)


def check_ahead(pending: Sequence[PendingRollout], first: int, ahead: int) -> None:
    """Raise ConfigError for rollouts that were begun with a larger --ahead: their tokens may be too stale."""
    last = max([rollout.request.step for rollout in pending], default=-1)
    if last >= first + ahead:
        raise ConfigError(
            f"the checkpoint of step {first} holds responses for step {last}, too early for --ahead {ahead}: "
            f"they may be older than it allows. Set it to {last - first + 1} or more in config.json"
        )


def to_json_and_tensors(value: Prompts | Rollouts, prefix: str, tensors: dict[str, Tensor]) -> JsonDict:
    """Add the tensors of a value to `tensors` and return its other fields, with arrays of strings as lists."""
    plain: JsonDict = {}
    for field in fields(value):
        content = getattr(value, field.name)
        if isinstance(content, Tensor):
            tensors[prefix + field.name] = content.clone()  # safetensors rejects tensors that share memory
        elif isinstance(content, np.ndarray):
            plain[field.name] = content.tolist()
        elif not callable(content):
            plain[field.name] = content
    return plain


def from_json_and_tensors(plain: JsonDict, prefix: str, tensors: dict[str, Tensor]) -> JsonDict:
    """Undo `to_json_and_tensors`: a list of lists becomes an array of strings, any other list a tuple."""
    own_tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    lists = {name: value for name, value in plain.items() if isinstance(value, list)}
    arrays = {
        name: np.array(value, dtype=object) for name, value in lists.items() if value and isinstance(value[0], list)
    }
    return plain | {name: tuple(value) for name, value in lists.items()} | arrays | own_tensors
