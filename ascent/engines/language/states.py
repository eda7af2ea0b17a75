"""The hidden states before a batch's tokens: packed with shared prompts, or plain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ascent.engines.language.attention import Group, Packed
from ascent.engines.language.flash import send
from ascent.policies.causal_lm import LanguageModel
from ascent.types import Batch, Rollouts


def lengths_of(mask: Tensor) -> list[list[int]]:
    """Tokens of each response up to its last unmasked one; masked ones between are context."""
    width = mask.shape[-1]
    last = width - mask.flip(-1).int().argmax(-1)
    return torch.where(mask.any(-1), last, 0).tolist()


def parts_of(batch: Batch, budget: int) -> Iterator[Batch]:
    """Parts of at most about so many tokens and of much the same size, prompts counted once.

    Whole groups where they fit, else parts of one. What was not sampled, a pair, is never cut.
    """
    prompts, responses = (batch.prompt >= 0).sum(-1).tolist(), lengths_of(batch.mask)
    costs = [prompt + sum(own) for prompt, own in zip(prompts, responses, strict=True)]
    even = sum(costs) / max(1, -(-sum(costs) // budget)) + max(costs) / 2
    start, used = 0, 0
    for i, cost in enumerate(costs):
        if i > start and used + cost > min(budget, even):
            yield batch.select(slice(start, i))
            start, used = i, 0
        if cost > budget and len(responses[i]) > 1 and batch.sampled:
            yield from _parts_of_group(batch, i, prompts[i], responses[i], budget)
            start, used = i + 1, 0
        else:
            used += cost
    if start < len(costs):
        yield batch if start == 0 else batch.select(slice(start, len(costs)))


def _parts_of_group(batch: Batch, i: int, prompt: int, responses: list[int], budget: int) -> Iterator[Batch]:
    start, used = 0, prompt
    for s, length in enumerate(responses):
        if s > start and used + length > budget:
            yield batch.select(slice(i, i + 1), slice(start, s))
            start, used = s, prompt
        used += length
    yield batch.select(slice(i, i + 1), slice(start, len(responses)))


@dataclass(frozen=True)
class Placed(Batch):
    """A part of a batch on the model's device, with the same part on the host, where its lengths can be read.

    Asking a GPU for a length would mean to wait until it has done all that it was told before.
    """

    host: Batch | None = None

    def select(self, prompts: Tensor | slice, samples: slice = slice(None)) -> Batch:
        host = None if self.host is None else self.host.select(prompts, samples)
        return replace(super().select(prompts, samples), host=host)  # type: ignore[call-arg]


def place(batch: Batch, device: torch.device) -> Batch:
    """The batch where the model is. Nobody waits for it."""
    if device.type == "cpu":
        return batch
    given = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    moved: dict[str, Any] = {name: send(v, device) if isinstance(v, Tensor) else v for name, v in given.items()}
    return Placed(**moved, host=batch)


def host_of(batch: Rollouts) -> Rollouts:
    return batch.host if isinstance(batch, Placed) and batch.host is not None else batch


def targets(batch: Rollouts, device: torch.device) -> Int[Tensor, "state"]:
    """The unmasked tokens, in the order of the mask."""
    host = host_of(batch)
    return send(host.response[host.mask], device)


def spread(values: Tensor, where: Bool[Tensor, "prompt sample place"]) -> Float[Tensor, "prompt sample place"]:
    """Numbers of the places that are True, back where they belong; 0 elsewhere."""
    values = values.to(where.device)
    return values.new_zeros(where.shape).masked_scatter(where, values)


def state_mask(batch: Rollouts) -> Bool[Tensor, "prompt sample state"]:
    """Which of the T + 1 states are asked for: those before unmasked tokens, and the one after the last token."""
    host = host_of(batch)
    where = torch.nn.functional.pad(host.mask, (0, 1))
    where = where.scatter(-1, torch.tensor(lengths_of(host.mask)).unsqueeze(-1), True)
    return send(where, batch.mask.device)


@dataclass(frozen=True)
class Row:
    """A batch as one row of tokens, [prompt, response 1, …, response G] a group, with no padding."""

    ids: Int[Tensor, "token"]
    positions: Int[Tensor, "token"]
    places: Int[Tensor, "state"]
    """The tokens after which the states stand that are asked for, in the order of the mask."""
    groups: list[Group]


def pack(batch: Rollouts, final: bool) -> Row:
    """The state before token 0 is the prompt's last; the last token of a response is nobody's context.

    Unless the `final` state is asked for too, which then stands behind the others of its response.
    """
    prompt, length = batch.prompt, torch.tensor(lengths_of(batch.mask))  # length: [prompt sample]
    inner = length if final else (length - 1).clamp(min=0)
    is_prompt, t = prompt >= 0, torch.arange(batch.mask.shape[2])
    size = is_prompt.sum(-1)
    kept = torch.cat([is_prompt, (t < inner.unsqueeze(-1)).flatten(1)], 1)
    ids = torch.cat([prompt, batch.response.flatten(1)], 1)[kept]
    later = (size[:, None, None] + t).expand_as(batch.response).flatten(1)
    positions = torch.cat([is_prompt.cumsum(-1) - 1, later], 1)[kept]
    start = (size + inner.sum(-1)).cumsum(0) - (size + inner.sum(-1))
    begin = (start + size).unsqueeze(-1) + inner.cumsum(-1) - inner
    t = torch.arange(batch.mask.shape[2] + 1)
    place = torch.where(t == 0, (start + size - 1)[:, None, None], begin.unsqueeze(-1) + t - 1)
    asked = torch.nn.functional.pad(batch.mask, (0, 1))
    asked = asked.scatter(-1, length.unsqueeze(-1), True) if final else asked
    shapes = zip(start.tolist(), size.tolist(), inner.tolist(), strict=True)
    return Row(ids, positions, place[asked], [Group(a, n, tuple(m for m in own if m > 0)) for a, n, own in shapes])


def packed_states(
    lm: LanguageModel, batch: Rollouts, final: bool = False, backbone: nn.Module | None = None
) -> Float[Tensor, "state width"]:
    """Hidden states from one packed row: prompts are encoded once for their groups, and nothing is padded."""
    row, device = pack(host_of(batch), final), lm.device
    ids, positions = send(row.ids, device)[None], send(row.positions, device)[None]
    hidden = lm.hidden(ids, positions, Packed(row.groups), backbone)[0]
    return hidden[send(row.places, device)]


def padded_states(
    lm: LanguageModel, batch: Rollouts, final: bool = False, backbone: nn.Module | None = None
) -> Float[Tensor, "state width"]:
    """The plain form, for any architecture: one row a response, its prompt repeated, padded on the right."""
    batch = host_of(batch)
    prompts = [row[row >= 0] for row in batch.prompt]
    rows: list[Tensor] = []
    places: list[tuple[int, Tensor]] = []
    for prompt, responses, masks, lengths in zip(
        prompts, batch.response, batch.mask, lengths_of(batch.mask), strict=True
    ):
        for response, mask, length in zip(responses, masks, lengths, strict=True):
            tokens = mask[:length].nonzero().flatten()
            tokens = torch.cat([tokens, torch.tensor([length])]) if final else tokens
            places.append((len(prompt), tokens))
            rows.append(torch.cat([prompt, response[: length if final else max(length - 1, 0)]]))
    width = max(map(len, rows))
    device = lm.device
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    inside = torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], inside[i, : len(row)] = row, 1
    out = (backbone or lm.backbone)(
        input_ids=ids.to(device), attention_mask=inside.to(device), use_cache=False
    ).last_hidden_state
    index = torch.cat([i * width + prompt - 1 + tokens for i, (prompt, tokens) in enumerate(places)])
    return out.flatten(0, 1)[index.to(device)]
