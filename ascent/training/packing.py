"""A language model's forward pass: hidden states of packed sequences with shared prompts, or of padded sequences.

`model_verification.verify_model` compares both with the model's own forward pass before a model is used.
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
from ascent.training.captured_updates import CapturedBackbone

Read = TypeVar("Read")
Cost = int | float
"""A cost in tokens."""


def split_batch(
    batch: Batch, budget: int, shared: bool = True, repeat: float = 0.0, padded: bool = False
) -> Iterator[Batch]:
    """Split a batch into micro-batches of similar size with at most about `budget` computed tokens.

    A shared prompt counts once, plus `repeat` times for each response that reads it. With `padded`, a group's responses
    count as its longest. Without sharing, every response is a row with its prompt, padded to the widest row of its
    micro-batch. Groups stay whole if they fit, and are split otherwise. Pairs are never split. An empty batch gives one
    empty micro-batch, whose gradient is 0.
    """
    prompts, responses = (batch.prompt >= 0).sum(-1).tolist(), batch.present.sum(-1).tolist()
    group_cost = _padded_cost if padded or not shared else sum
    prompt_cost = repeat if shared else 1
    rows = [[n + prompt_cost * prompt for n in own] for prompt, own in zip(prompts, responses, strict=True)]
    costs = [shared * prompt + group_cost(own) for prompt, own in zip(prompts, rows, strict=True)]
    even = sum(costs) / max(1, -(-sum(costs) // budget)) + max(costs, default=0) / 2
    for part in _slices(costs, min(budget, even), sum if shared else _padded_cost):
        first = part.start
        if batch.sampled and len(costs) and costs[first] > budget:  # then it is alone in its part
            room = budget - shared * prompts[first]
            yield from (batch.sub_batch(part, own) for own in _slices(rows[first], room, group_cost))
        else:
            yield batch if part == slice(0, len(costs)) else batch.sub_batch(part)


def _slices(costs: Sequence[Cost], max_cost: Cost, total: Callable[[Sequence[Cost]], Cost]) -> Iterator[slice]:
    """Yield slices of consecutive items that cost at most `max_cost` together, if each of them does."""
    start = 0
    for i in range(1, len(costs)):
        if total(costs[start : i + 1]) > max_cost:
            yield slice(start, i)
            start = i
    yield slice(start, len(costs))


def _padded_cost(costs: Sequence[Cost]) -> Cost:
    """Return the cost of rows padded to the widest."""
    return len(costs) * max(costs, default=0)


def computed_tokens(batch: Rollouts, shared: bool) -> int:
    """Return the number of tokens of a forward pass over a batch, without padding."""
    host = host_batch(batch)
    prompts, responses = (host.prompt >= 0).sum(-1), host.present.sum()
    return int(prompts.sum() * (1 if shared else host.mask.shape[1]) + responses)


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """A batch on the model's device, with a copy on the host, from which lengths are read without a GPU sync."""

    host: Batch = field(default=None)  # type: ignore[assignment]

    def select(self, prompts: Tensor | slice, samples: slice = slice(None)) -> DeviceBatch:
        return replace(super().select(prompts, samples), host=self.host.select(prompts, samples))


HOST_ONLY = frozenset({"prompt", "problem", "index", "measures"})
"""Fields that objectives do not need on the device. A forward pass takes its tokens from the host."""


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the model's device without a sync."""
    if device.type == "cpu":
        return batch
    own: dict[str, Any] = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    tensors = {name: v for name, v in own.items() if isinstance(v, Tensor) and name not in HOST_ONLY}
    return DeviceBatch(**own | {name: to_device_async(v, device) for name, v in tensors.items()}, host=batch)


def host_batch(batch: Rollouts) -> Rollouts:
    return batch.host if isinstance(batch, DeviceBatch) else batch


def targets(batch: Rollouts, device: torch.device) -> Int[Tensor, "state"]:
    """Return the sampled tokens in the order of the mask."""
    host = host_batch(batch)
    return to_device_async(host.response[host.mask], device)


def scatter_tokens(values: Tensor, where: Bool[Tensor, "prompt sample state"]) -> Float[Tensor, "prompt sample state"]:
    """Scatter values to the True positions of `where`; 0 elsewhere."""
    values = values.to(where.device)
    return values.new_zeros(where.shape).masked_scatter(where, values)


States = Bool[Tensor, "prompt sample state"]
"""Which of the T + 1 states of each response are asked for; state t stands behind the tokens before t."""


def action_states(batch: Rollouts) -> States:
    """Return which states are before a sampled token, on the host."""
    return F.pad(host_batch(batch).mask, (0, 1))


def states_after_actions(batch: Rollouts) -> States:
    """Return which states are after a sampled token, on the host."""
    return F.pad(host_batch(batch).mask, (1, 0))


def last_states(batch: Rollouts) -> States:
    """Return which states are after the last token of each response, on the host."""
    host = host_batch(batch)
    return torch.arange(host.mask.shape[-1] + 1) == host.extent.unsqueeze(-1)


def value_states(batch: Rollouts) -> States:
    """Return the states of which a critic computes values: before every sampled token and after the last one."""
    return action_states(batch) | last_states(batch)


def hidden_states(
    lm: LanguageModel, batch: Rollouts, states: States | None = None, backbone: nn.Module | None = None,
    captured: CapturedBackbone | None = None,
) -> Float[Tensor, "asked width"]:  # fmt: skip
    """Return the last hidden states at these states (by default before actions), of the model or another backbone."""
    states = action_states(batch) if states is None else states
    if lm.can_share_prompts:
        return packed_hidden_states(lm, host_batch(batch), states, backbone or lm.backbone, captured)
    return padded_hidden_states(lm, host_batch(batch), states, backbone or lm.backbone)


def packed_hidden_states(
    lm: LanguageModel, batch: Rollouts, states: States, backbone: nn.Module, captured: CapturedBackbone | None = None
) -> Float[Tensor, "asked width"]:
    """Compute one packed row: [prompt, response 1, …, response G] for each group, with shared prompts, no padding."""
    row = pack_batch(batch, states)
    hidden = None if captured is None else captured(row.ids, row.positions, row.groups)
    indices = to_device_async(row.state_index[states], lm.device)
    if hidden is None:
        ids, positions = to_device_async(row.ids, lm.device), to_device_async(row.positions, lm.device)
        hidden = lm.hidden(ids[None], positions[None], PackedLayout(row.groups), backbone)
    return gather_rows(hidden[0], indices)


def gather_rows(hidden: Float[Tensor, "token width"], indices: Int[Tensor, "asked"]) -> Float[Tensor, "asked width"]:
    """Select rows; the last row of a prompt is selected by all of its responses.

    The backward pass has to add up gradients of repeated rows in a fixed order. On a CPU with several threads only
    `index_select` does so, on a GPU only indexing.
    """
    return hidden[indices] if hidden.is_cuda else hidden.index_select(0, indices)


class PackedBatch(NamedTuple):
    """The tokens of a batch, packed in one row, on the host."""

    ids: Int[Tensor, "token"]
    positions: Int[Tensor, "token"]
    groups: list[PackedGroup]
    state_index: Int[Tensor, "prompt sample state"]
    """Index of the token in the row whose hidden state is this state."""


def pack_batch(batch: Rollouts, states: States) -> PackedBatch:
    """Pack a batch. The state before the first token of a response is the last of its prompt.

    Tokens after the last requested state are omitted. An empty batch is packed as one token without requested states,
    so that every parameter gets a gradient of 0.
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
    state_index = torch.where(before == 0, (start + size - 1)[:, None, None], begin.unsqueeze(-1) + before - 1)
    shapes = zip(start.tolist(), size.tolist(), inner.tolist(), strict=True)
    groups = [PackedGroup(a, n, tuple(m for m in own if m > 0)) for a, n, own in shapes]
    if not groups:
        ids, positions, groups = ids.new_zeros(1), positions.new_zeros(1), [PackedGroup(0, 1, ())]
    return PackedBatch(ids, positions, groups, state_index)


def padded_hidden_states(
    lm: LanguageModel, batch: Rollouts, states: States, backbone: nn.Module
) -> Float[Tensor, "asked width"]:
    """Compute one padded row per response, with its prompt repeated. This works for any architecture."""
    rows: list[Tensor] = []
    indices: list[Tensor] = []
    for prompt, *group in zip(batch.prompt, batch.response, batch.present, states, strict=True):
        prompt = prompt[prompt >= 0]
        for response, present, wanted in zip(*group, strict=True):
            before = F.pad(present.cumsum(-1), (1, 0))[wanted]
            rows.append(torch.cat([prompt, response[present][: int(before.max()) if len(before) else 0]]))
            indices.append(len(prompt) - 1 + before)
    if not rows:  # as in a packed row
        rows, indices = [torch.zeros(1, dtype=torch.long)], [torch.zeros(0, dtype=torch.long)]
    ids = pad_sequence(rows, batch_first=True)
    inside = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    out = backbone(input_ids=ids.to(lm.device), attention_mask=inside.to(lm.device), use_cache=False)
    index = torch.cat([i * ids.shape[1] + positions for i, positions in enumerate(indices)])
    return gather_rows(out.last_hidden_state.flatten(0, 1), index.to(lm.device))


class ForwardModule(nn.Module):
    """The forward pass of a learner as one module: hidden states and the outputs computed from them.

    FSDP2 wraps this module. `with_params` runs the same pass with other parameters: those of the reference, or those of
    the policy before an update.
    """

    def __init__(self, lm: LanguageModel):
        super().__init__()
        self.model = lm.model
        self._lm = (lm,)  # in a tuple, so that it does not become a submodule: the model is one already
        self.captured: CapturedBackbone | None = None
        """The CUDA graphs for small rows, while gradients are computed."""

    @cached_property
    def _names(self) -> list[list[str]]:
        """The names of each trained parameter in this module; tied ones have more than one."""
        names: dict[int, list[str]] = defaultdict(list)
        for module, owner in self.named_modules():  # a module that is there twice has its slots once
            for name, parameter in owner._parameters.items():
                names[id(parameter)].append(f"{module}.{name}" if module else name)
        return [names[id(parameter)] for parameter in self._lm[0].trained().values()]

    def forward(self, batch: Rollouts, read: Callable[[LMHead, Tensor], Read], states: States | None = None) -> Read:
        """Return `read(head, hidden states)`, in the order of the batch."""
        lm = self._lm[0]
        return read(LMHead.of(lm.model), hidden_states(lm, batch, states, captured=self.captured))

    def with_params(self, params: Iterable[Tensor], batch: Rollouts, read: Callable[[LMHead, Tensor], Read]) -> Read:
        """Run the forward pass with these values of the trained parameters."""
        pairs = zip(self._names, params, strict=True)
        named = {name: value for names, value in pairs for name in names}
        return torch.func.functional_call(self, named, (batch, read), tie_weights=False)
