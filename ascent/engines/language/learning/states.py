"""A language model's forward pass over a batch: its hidden states, packed with shared prompts or plain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ascent.core.types import Batch, Rollouts
from ascent.engines.language.attention import Packed
from ascent.engines.language.learning.flash import Group, send
from ascent.engines.language.learning.head import Head
from ascent.policies.causal_lm import LanguageModel

Read = TypeVar("Read")


def parts_of(batch: Batch, budget: int) -> Iterator[Batch]:
    """Parts of about `budget` tokens at most and of much the same size, prompts counted once.

    Whole groups where they fit, else parts of one. What was not sampled, a pair, is never cut.
    """
    prompts, responses = (batch.prompt >= 0).sum(-1).tolist(), batch.present.sum(-1).tolist()
    costs = [prompt + sum(own) for prompt, own in zip(prompts, responses, strict=True)]
    even = sum(costs) / max(1, -(-sum(costs) // budget)) + max(costs) / 2
    start, used = 0, 0
    for i, cost in enumerate(costs):
        if i > start and used + cost > min(budget, even):
            yield batch.share(slice(start, i))
            start, used = i, 0
        if cost > budget and len(responses[i]) > 1 and batch.sampled:
            yield from _parts_of_group(batch, i, prompts[i], responses[i], budget)
            start, used = i + 1, 0
        else:
            used += cost
    if start < len(costs):
        yield batch if start == 0 else batch.share(slice(start, len(costs)))


def _parts_of_group(batch: Batch, i: int, prompt: int, responses: list[int], budget: int) -> Iterator[Batch]:
    start, used = 0, prompt
    for s, length in enumerate(responses):
        if s > start and used + length > budget:
            yield batch.share(slice(i, i + 1), slice(start, s))
            start, used = s, prompt
        used += length
    yield batch.share(slice(i, i + 1), slice(start, len(responses)))


@dataclass(frozen=True)
class Placed(Batch):
    """A part of a batch on the model's device, with the same part on the host, where its lengths can be read.

    Asking a GPU for a length would mean waiting until it has done everything that was queued before.
    """

    host: Batch | None = None

    def select(self, prompts: Tensor | slice, samples: slice = slice(None)) -> Placed:
        host = None if self.host is None else self.host.select(prompts, samples)
        return replace(super().select(prompts, samples), host=host)


def place(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is. Nobody waits for it."""
    if device.type == "cpu":
        return batch
    own = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    moved: dict[str, Any] = {name: send(v, device) if isinstance(v, Tensor) else v for name, v in own.items()}
    return Placed(**moved, host=batch)


def host_of(batch: Rollouts) -> Rollouts:
    return batch.host if isinstance(batch, Placed) and batch.host is not None else batch


def targets(batch: Rollouts, device: torch.device) -> Int[Tensor, "state"]:
    """The actions, in the order of the mask."""
    host = host_of(batch)
    return send(host.response[host.mask], device)


def spread(values: Tensor, where: Bool[Tensor, "prompt sample place"]) -> Float[Tensor, "prompt sample place"]:
    """Numbers of the places that are True, back where they belong; 0 elsewhere."""
    values = values.to(where.device)
    return values.new_zeros(where.shape).masked_scatter(where, values)


States = Bool[Tensor, "prompt sample state"]
"""Which of the T + 1 states of each response are asked for; state t stands behind the tokens before t."""


def before_actions(batch: Rollouts) -> States:
    """The states in which the policy acted, on the host."""
    return F.pad(host_of(batch).mask, (0, 1))


def after_actions(batch: Rollouts) -> States:
    """The states that actions led to, on the host."""
    return F.pad(host_of(batch).mask, (1, 0))


def last_states(batch: Rollouts) -> States:
    """The state behind the last token of each response, on the host."""
    host = host_of(batch)
    return torch.arange(host.mask.shape[-1] + 1) == host.extent.unsqueeze(-1)


@dataclass(frozen=True)
class Row:
    """A batch as one row of tokens, [prompt, response 1, …, response G] for each group, with no padding."""

    ids: Int[Tensor, "token"]
    positions: Int[Tensor, "token"]
    places: Int[Tensor, "asked"]
    """The tokens behind which the states stand that are asked for, in the order of the batch."""
    groups: list[Group]


def pack(batch: Rollouts, states: States) -> Row:
    """The state before a response's first token is the prompt's last; tokens behind the last state are left out."""
    prompt, width = batch.prompt, batch.mask.shape[2]
    t = torch.arange(width + 1)
    last = torch.where(states, t, 0).amax(-1, keepdim=True)
    inside = batch.present & (t[:-1] < last)
    before = F.pad(inside.cumsum(-1), (1, 0))  # tokens of the response before each state
    inner, is_prompt = before[..., -1], prompt >= 0
    size = is_prompt.sum(-1)
    kept = torch.cat([is_prompt, inside.flatten(1)], 1)
    ids = torch.cat([prompt, batch.response.flatten(1)], 1)[kept]
    later = (size[:, None, None] + before[..., :-1]).flatten(1)
    positions = torch.cat([is_prompt.cumsum(-1) - 1, later], 1)[kept]
    start = (size + inner.sum(-1)).cumsum(0) - (size + inner.sum(-1))
    begin = (start + size).unsqueeze(-1) + inner.cumsum(-1) - inner
    place = torch.where(before == 0, (start + size - 1)[:, None, None], begin.unsqueeze(-1) + before - 1)
    shapes = zip(start.tolist(), size.tolist(), inner.tolist(), strict=True)
    return Row(ids, positions, place[states], [Group(a, n, tuple(m for m in own if m > 0)) for a, n, own in shapes])


def packed_states(
    lm: LanguageModel, batch: Rollouts, states: States | None = None, backbone: nn.Module | None = None
) -> Float[Tensor, "asked width"]:
    """Hidden states from one packed row: prompts are encoded once for their groups, and nothing is padded."""
    row, device = pack(host_of(batch), before_actions(batch) if states is None else states), lm.device
    ids, positions = send(row.ids, device)[None], send(row.positions, device)[None]
    hidden = lm.hidden(ids, positions, Packed(row.groups), backbone)[0]
    return hidden[send(row.places, device)]


def padded_states(
    lm: LanguageModel, batch: Rollouts, states: States | None = None, backbone: nn.Module | None = None
) -> Float[Tensor, "asked width"]:
    """The plain form, for any architecture: one row per response, its prompt repeated, padded on the right."""
    batch, states = host_of(batch), before_actions(batch) if states is None else states
    rows: list[Tensor] = []
    places: list[Tensor] = []
    for prompt, *group in zip(batch.prompt, batch.response, batch.present, states, strict=True):
        prompt = prompt[prompt >= 0]
        for response, present, wanted in zip(*group, strict=True):
            before = F.pad(present.cumsum(-1), (1, 0))[wanted]
            rows.append(torch.cat([prompt, response[present][: int(before.max()) if len(before) else 0]]))
            places.append(len(prompt) - 1 + before)
    width = max(map(len, rows))
    device = lm.device
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    inside = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], inside[i, : len(row)] = row, 1
    out = (backbone or lm.backbone)(
        input_ids=ids.to(device), attention_mask=inside.to(device), use_cache=False
    ).last_hidden_state
    index = torch.cat([i * width + place for i, place in enumerate(places)])
    return out.flatten(0, 1)[index.to(device)]


class Forward(nn.Module):
    """Every forward pass of a learner: hidden states and what is read off them, in one call of one module.

    So sharding can wrap it; and the same call with other parameters (`instead`) is the reference, or the policy
    before an update. The model's own parameters stay in their place.
    """

    def __init__(self, lm: LanguageModel):
        super().__init__()
        self.model = lm.model
        self._lm = (lm,)  # in a tuple, so that it does not become a submodule: the model is one already

    @cached_property
    def _names(self) -> list[list[str]]:
        """Of each trained parameter all its names in this module: tied ones have more than one."""
        names: dict[int, list[str]] = defaultdict(list)
        for module, owner in self.named_modules():  # a module that is there twice has its slots once
            for name, parameter in owner._parameters.items():
                names[id(parameter)].append(f"{module}.{name}" if module else name)
        return [names[id(parameter)] for parameter in self._lm[0].trained().values()]

    def forward(self, batch: Rollouts, read: Callable[[Head, Tensor], Read], states: States | None = None) -> Read:
        """What `read` makes of the head and the hidden states `[state width]`, in the order of the batch."""
        lm = self._lm[0]
        hidden = (packed_states if lm.shares else padded_states)(lm, batch, states)
        return read(Head.of(lm.model), hidden)

    def instead(self, params: Iterable[Tensor], batch: Rollouts, read: Callable[[Head, Tensor], Read]) -> Read:
        """The same with these values for the trained parameters."""
        pairs = zip(self._names, params, strict=True)
        named = {name: value for names, value in pairs for name in names}
        return torch.func.functional_call(self, named, (batch, read), tie_weights=False)
