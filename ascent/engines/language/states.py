"""The hidden states before a batch's tokens: packed with shared prompts, or plain."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ascent.engines.language.attention import Group, Packed
from ascent.policies.causal_lm import LanguageModel
from ascent.types import Batch, Rollouts


def lengths_of(mask: Tensor) -> list[list[int]]:
    """Tokens of each response up to its last unmasked one; masked ones between are context."""
    width = mask.shape[-1]
    last = width - mask.flip(-1).int().argmax(-1)
    return torch.where(mask.any(-1), last, 0).tolist()


def parts_of(batch: Batch, budget: int) -> Iterator[Batch]:
    """Parts of about so many tokens, prompts counted once: whole groups where they fit, else parts of one.

    What was not sampled, a pair, is never cut.
    """
    prompts = (batch.prompt >= 0).sum(-1).tolist()
    start, used = 0, 0
    for i, (prompt, responses) in enumerate(zip(prompts, lengths_of(batch.mask), strict=True)):
        cost = prompt + sum(responses)
        if i > start and used + cost > budget:
            yield batch.select(slice(start, i))
            start, used = i, 0
        if cost > budget and len(responses) > 1 and batch.sampled:
            yield from _parts_of_group(batch, i, prompt, responses, budget)
            start, used = i + 1, 0
        else:
            used += cost
    if start < len(prompts):
        yield batch if start == 0 else batch.select(slice(start, len(prompts)))


def _parts_of_group(batch: Batch, i: int, prompt: int, responses: list[int], budget: int) -> Iterator[Batch]:
    start, used = 0, prompt
    for s, length in enumerate(responses):
        if s > start and used + length > budget:
            yield batch.select(slice(i, i + 1), slice(start, s))
            start, used = s, prompt
        used += length
    yield batch.select(slice(i, i + 1), slice(start, len(responses)))


def spread(values: Tensor, where: Bool[Tensor, "prompt sample place"]) -> Float[Tensor, "prompt sample place"]:
    """Numbers of the places that are True, back where they belong; 0 elsewhere."""
    values = values.to(where.device)
    return values.new_zeros(where.shape).masked_scatter(where, values)


def state_mask(batch: Rollouts) -> Bool[Tensor, "prompt sample state"]:
    """Which of the T + 1 states are asked for: those before unmasked tokens, and the one after the last token."""
    where = torch.nn.functional.pad(batch.mask, (0, 1))
    return where.scatter(-1, torch.tensor(lengths_of(batch.mask)).unsqueeze(-1), True)


def packed_states(
    lm: LanguageModel, batch: Rollouts, final: bool = False, backbone: nn.Module | None = None
) -> Float[Tensor, "state width"]:
    """Hidden states from one packed row, [prompt, response 1, …, response G] a group, with no padding.

    The state before token 0 is the prompt's last; the last token of a response is nobody's context, unless the
    `final` state is asked for too, behind the others of its response.
    """
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    places: list[Tensor] = []
    groups: list[Group] = []
    start = 0
    for row, responses, masks, lengths in zip(
        batch.prompt, batch.response, batch.mask, lengths_of(batch.mask), strict=True
    ):
        prompt = row[row >= 0]
        size = len(prompt)
        ids.append(prompt)
        positions.append(torch.arange(size))
        end = start + size
        for response, mask, length in zip(responses, masks, lengths, strict=True):
            inner = length if final else max(length - 1, 0)
            ids.append(response[:inner])
            positions.append(torch.arange(size, size + inner))
            place = torch.arange(end - 1, end + length)
            place[0] = start + size - 1
            places.append(place[:length][mask[:length]])
            if final:
                places.append(place[-1:])
            end += inner
        inner_lengths = (n if final else n - 1 for n in lengths)
        groups.append(Group(start, size, tuple(n for n in inner_lengths if n > 0)))
        start = end
    device = lm.device
    row_ids, row_positions = torch.cat(ids)[None].to(device), torch.cat(positions)[None].to(device)
    hidden = lm.hidden(row_ids, row_positions, Packed(groups), backbone)[0]
    return hidden[torch.cat(places).to(device)]


def padded_states(
    lm: LanguageModel, batch: Rollouts, final: bool = False, backbone: nn.Module | None = None
) -> Float[Tensor, "state width"]:
    """The plain form, for any architecture: one row a response, its prompt repeated, padded on the right."""
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
