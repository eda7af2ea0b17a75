"""A language model's forward pass over a batch: its hidden states, packed with shared prompts or plain.

`proof.prove` compares both with the model's own forward pass before a model is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ascent.core.types import Batch, Rollouts
from ascent.models.causal_lm import LanguageModel
from ascent.models.lm_head import LMHead
from ascent.models.packed_attention import PackedGroup, PackedLayout, to_device_async
from ascent.training.captured_updates import Captured

Read = TypeVar("Read")
Cost = int | float
"""What something takes, in tokens."""


def split_batch(
    batch: Batch, budget: int, shared: bool = True, repeat: float = 0.0, padded: bool = False
) -> Iterator[Batch]:
    """Parts of about `budget` tokens at most and of much the same size, in the tokens that are really computed.

    A shared prompt counts once, and for each response that reads it `repeat` times; `padded`: a group's responses count
    as its longest. Not shared, every response is a row with its prompt, as wide as the widest of its part. Whole groups
    where they fit, else parts of one. What was not sampled, a pair, is never cut. A share without rows is one part,
    whose gradient is 0.
    """
    prompts, responses = (batch.prompt >= 0).sum(-1).tolist(), batch.present.sum(-1).tolist()
    together = _rectangle if padded or not shared else sum
    read = repeat if shared else 1
    rows = [[n + read * prompt for n in own] for prompt, own in zip(prompts, responses, strict=True)]
    costs = [shared * prompt + together(own) for prompt, own in zip(prompts, rows, strict=True)]
    even = sum(costs) / max(1, -(-sum(costs) // budget)) + max(costs, default=0) / 2
    for part in _runs(costs, min(budget, even), sum if shared else _rectangle):
        first = part.start
        if batch.sampled and len(costs) and costs[first] > budget:  # then it is alone in its part
            room = budget - shared * prompts[first]
            yield from (batch.sub_batch(part, own) for own in _runs(rows[first], room, together))
        else:
            yield batch if part == slice(0, len(costs)) else batch.sub_batch(part)


def _runs(costs: Sequence[Cost], most: Cost, together: Callable[[Sequence[Cost]], Cost]) -> Iterator[slice]:
    """Neighbours that cost `most` together, if they can."""
    start = 0
    for i in range(1, len(costs)):
        if together(costs[start : i + 1]) > most:
            yield slice(start, i)
            start = i
    yield slice(start, len(costs))


def _rectangle(costs: Sequence[Cost]) -> Cost:
    """What rows cost that are padded to the widest."""
    return len(costs) * max(costs, default=0)


def computed_tokens(batch: Rollouts, shared: bool) -> int:
    """The tokens of one forward pass over a batch, without padding."""
    host = host_batch(batch)
    prompts, responses = (host.prompt >= 0).sum(-1), host.present.sum()
    return int(prompts.sum() * (1 if shared else host.mask.shape[1]) + responses)


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """A part of a batch on the model's device, with the same part on the host, where its lengths can be read.

    Asking a GPU for a length would mean waiting until it has done everything that was queued before.
    """

    host: Batch = field(default=None)  # type: ignore[assignment]

    def select(self, prompts: Tensor | slice, samples: slice = slice(None)) -> DeviceBatch:
        return replace(super().select(prompts, samples), host=self.host.select(prompts, samples))


HOST_ONLY = frozenset({"prompt", "problem", "index", "measures"})
"""Fields that no objective has a use for; a forward pass takes its tokens from the host."""


def place(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is. Nobody waits for it."""
    if device.type == "cpu":
        return batch
    own: dict[str, Any] = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    tensors = {name: v for name, v in own.items() if isinstance(v, Tensor) and name not in HOST_ONLY}
    return DeviceBatch(**own | {name: to_device_async(v, device) for name, v in tensors.items()}, host=batch)


def host_batch(batch: Rollouts) -> Rollouts:
    return batch.host if isinstance(batch, DeviceBatch) else batch


def targets(batch: Rollouts, device: torch.device) -> Int[Tensor, "state"]:
    """The actions, in the order of the mask."""
    host = host_batch(batch)
    return to_device_async(host.response[host.mask], device)


def scatter_tokens(values: Tensor, where: Bool[Tensor, "prompt sample place"]) -> Float[Tensor, "prompt sample place"]:
    """Numbers of the places that are True, back where they belong; 0 elsewhere."""
    values = values.to(where.device)
    return values.new_zeros(where.shape).masked_scatter(where, values)


States = Bool[Tensor, "prompt sample state"]
"""Which of the T + 1 states of each response are asked for; state t stands behind the tokens before t."""


def action_states(batch: Rollouts) -> States:
    """The states in which the policy acted, on the host."""
    return F.pad(host_batch(batch).mask, (0, 1))


def states_after_actions(batch: Rollouts) -> States:
    """The states that actions led to, on the host."""
    return F.pad(host_batch(batch).mask, (1, 0))


def last_states(batch: Rollouts) -> States:
    """The state behind the last token of each response, on the host."""
    host = host_batch(batch)
    return torch.arange(host.mask.shape[-1] + 1) == host.extent.unsqueeze(-1)


def value_states(batch: Rollouts) -> States:
    """The states that a critic is asked for: before every action, and behind the last token of each response."""
    return action_states(batch) | last_states(batch)


def hidden_states(
    lm: LanguageModel, batch: Rollouts, states: States | None = None, backbone: nn.Module | None = None,
    captured: Captured | None = None,
) -> Float[Tensor, "asked width"]:  # fmt: skip
    """Last hidden states at these states (those before actions), of the model or of another backbone like its own."""
    states = action_states(batch) if states is None else states
    if lm.shares:
        return packed_hidden_states(lm, host_batch(batch), states, backbone or lm.backbone, captured)
    return padded_hidden_states(lm, host_batch(batch), states, backbone or lm.backbone)


def packed_hidden_states(
    lm: LanguageModel, batch: Rollouts, states: States, backbone: nn.Module, captured: Captured | None = None
) -> Float[Tensor, "asked width"]:
    """From one row, [prompt, response 1, …, response G] for each group: no prompt is there twice, nothing is padded."""
    row = pack_batch(batch, states)
    hidden = None if captured is None else captured(row.ids, row.positions, row.groups)
    places = to_device_async(row.place[states], lm.device)
    if hidden is None:
        ids, positions = to_device_async(row.ids, lm.device), to_device_async(row.positions, lm.device)
        hidden = lm.hidden(ids[None], positions[None], PackedLayout(row.groups), backbone)
    return rows_of(hidden[0], places)


def rows_of(hidden: Float[Tensor, "token width"], places: Int[Tensor, "asked"]) -> Float[Tensor, "asked width"]:
    """These rows, of which one may be asked for many times, as the last of a prompt is by its responses.

    The gradients of such a row are added up. Indexing does so in any order where several threads of a CPU share the
    work, and `index_select` on a GPU.
    """
    return hidden[places] if hidden.is_cuda else hidden.index_select(0, places)


class PackedBatch(NamedTuple):
    """The tokens of a batch in one row, on the host."""

    ids: Int[Tensor, "token"]
    positions: Int[Tensor, "token"]
    groups: list[PackedGroup]
    place: Int[Tensor, "prompt sample state"]
    """Behind which token of the row each state lies."""


def pack_batch(batch: Rollouts, states: States) -> PackedBatch:
    """The state before a response's first token is the prompt's last; tokens behind the last state are left out.

    A batch without rows is one token of which nothing is asked: so every parameter has a gradient, 0.
    """
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
    groups = [PackedGroup(a, n, tuple(m for m in own if m > 0)) for a, n, own in shapes]
    if not groups:
        ids, positions, groups = ids.new_zeros(1), positions.new_zeros(1), [PackedGroup(0, 1, ())]
    return PackedBatch(ids, positions, groups, place)


def padded_hidden_states(
    lm: LanguageModel, batch: Rollouts, states: States, backbone: nn.Module
) -> Float[Tensor, "asked width"]:
    """The plain form, for any architecture: one row per response, its prompt repeated, padded on the right."""
    rows: list[Tensor] = []
    places: list[Tensor] = []
    for prompt, *group in zip(batch.prompt, batch.response, batch.present, states, strict=True):
        prompt = prompt[prompt >= 0]
        for response, present, wanted in zip(*group, strict=True):
            before = F.pad(present.cumsum(-1), (1, 0))[wanted]
            rows.append(torch.cat([prompt, response[present][: int(before.max()) if len(before) else 0]]))
            places.append(len(prompt) - 1 + before)
    if not rows:  # as in a packed row
        rows, places = [torch.zeros(1, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]
    ids = pad_sequence(rows, batch_first=True)
    inside = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    out = backbone(input_ids=ids.to(lm.device), attention_mask=inside.to(lm.device), use_cache=False)
    index = torch.cat([i * ids.shape[1] + place for i, place in enumerate(places)])
    return rows_of(out.last_hidden_state.flatten(0, 1), index.to(lm.device))


class ForwardModule(nn.Module):
    """Every forward pass of a learner: hidden states and what is read off them, in one call of one module.

    So sharding can wrap it; and the same call with other parameters (`instead`) is the reference, or the policy
    before an update. The model's own parameters stay in their place.
    """

    def __init__(self, lm: LanguageModel):
        super().__init__()
        self.model = lm.model
        self._lm = (lm,)  # in a tuple, so that it does not become a submodule: the model is one already
        self.captured: Captured | None = None
        """What small rows go through, while gradients are computed."""

    @cached_property
    def _names(self) -> list[list[str]]:
        """Of each trained parameter all its names in this module: tied ones have more than one."""
        names: dict[int, list[str]] = defaultdict(list)
        for module, owner in self.named_modules():  # a module that is there twice has its slots once
            for name, parameter in owner._parameters.items():
                names[id(parameter)].append(f"{module}.{name}" if module else name)
        return [names[id(parameter)] for parameter in self._lm[0].trained().values()]

    def forward(self, batch: Rollouts, read: Callable[[LMHead, Tensor], Read], states: States | None = None) -> Read:
        """What `read` makes of the head and the hidden states `[state width]`, in the order of the batch."""
        lm = self._lm[0]
        return read(LMHead.of(lm.model), hidden_states(lm, batch, states, captured=self.captured))

    def instead(self, params: Iterable[Tensor], batch: Rollouts, read: Callable[[LMHead, Tensor], Read]) -> Read:
        """The same with these values for the trained parameters."""
        pairs = zip(self._names, params, strict=True)
        named = {name: value for names, value in pairs for name in names}
        return torch.func.functional_call(self, named, (batch, read), tie_weights=False)
