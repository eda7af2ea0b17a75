"""Key-value caches of running responses: one a prompt, shared by its group, and one a response."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.engines.language.attention import Packed
from ascent.engines.language.learning.flash import Group

BLOCK = 64
"""Tokens by which a response's cache grows."""


class Cached:
    """The layout of a decoding step: each row is one running response and brings one new token.

    Row i belongs to the prompt in slot `slot[i]` and has `length[i]` tokens in its own cache, the new
    one not yet among them. A prompt's keys and values are read once for all its rows.
    """

    def __init__(self, slots: int, prompt_width: int, rows: int, limit: int, device: torch.device):
        self.slots, self.prompt_width, self.limit, self.device = slots, prompt_width, limit, device
        self.prompt_length = torch.zeros(slots, dtype=torch.long, device=device)
        self.slot = torch.zeros(rows, dtype=torch.long, device=device)
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.prompts: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer, `[slot head position channel]`."""
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer, `[row head token channel]`."""

    def prefill(self, slots: list[int], lengths: list[int]) -> Packed:
        """The layout of a forward pass over new prompts, packed into one row, that fills these slots."""
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        for slot, length in zip(slots, lengths, strict=True):
            self.prompt_length[slot] = length

        def keep(layer: int, k: Tensor, v: Tensor) -> None:
            if layer not in self.prompts:
                shape = (self.slots, k.shape[1], self.prompt_width, k.shape[3])
                self.prompts[layer] = (k.new_zeros(shape), k.new_zeros(shape))
            for cache, new in zip(self.prompts[layer], (k, v), strict=True):
                for slot, start, length in zip(slots, starts, lengths, strict=True):
                    cache[slot, :, :length] = new[0, :, start : start + length]

        return Packed([Group(s, n, ()) for s, n in zip(starts, lengths, strict=True)], keep)

    def enter(self, row: int, slot: int) -> None:
        """A new response of the prompt in this slot begins in this row."""
        self.slot[row], self.length[row] = slot, 0

    def move(self, source: int, target: int) -> None:
        """The response of one row goes on in another."""
        for tensor in (self.slot, self.length):
            tensor[target] = tensor[source]
        used = int(self.length[source])
        for caches in self.own.values():
            for cache in caches:
                cache[target, :, :used] = cache[source, :, :used]

    def begin(self, rows: int) -> Tensor:
        """Work out what every layer of a step over the first `rows` rows needs; return the tokens' positions."""
        self.count = rows
        slot, length = self.slot[:rows], self.length[:rows]
        index = torch.arange(rows, device=self.device)
        per_slot = torch.bincount(slot, minlength=self.slots)
        self.used = per_slot.nonzero().flatten()
        self.most = int(per_slot.max())
        order = torch.argsort(slot, stable=True)
        rank = torch.empty_like(order)
        rank[order] = index - (per_slot.cumsum(0) - per_slot)[slot[order]]
        place = torch.zeros_like(per_slot)
        place[self.used] = torch.arange(len(self.used), device=self.device)
        self.cell = place[slot] * self.most + rank
        """Where each row stands in a table of [prompts in use, most rows of any]."""
        self.aligned = rows == len(self.used) * self.most and bool((self.cell == index).all())
        lengths = self.prompt_length[self.used]
        self.seen = int(lengths.max())
        self.prompt_bias = _bias(lengths, self.seen)
        self.width = int(length.max()) + 1
        self.own_bias = _bias(length + 1, self.width)
        return self.prompt_length[slot] + length

    def end(self) -> None:
        self.length[: self.count] += 1

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        rows, heads, _, channel = q.shape
        shared = k.shape[1]
        q = q.reshape(rows, shared, heads // shared, channel)
        own_k, own_v = self._append(layer, k, v)
        own, own_log = _attend(q, own_k, own_v, self.own_bias, scale)
        prompt_k, prompt_v = (x[:, :, : self.seen] for x in self.prompts[layer])
        if len(self.used) < self.slots:
            prompt_k, prompt_v = prompt_k[self.used], prompt_v[self.used]
        past, past_log = self._from_prompts(q, prompt_k, prompt_v, scale)
        share = torch.sigmoid(own_log - past_log).unsqueeze(-1).to(q.dtype)  # of the softmax that is its own
        return torch.lerp(past, own, share).reshape(rows, 1, heads, channel)

    def _from_prompts(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Every row's attention to its group's prompt, `[row head repeat channel]`, with its log-sum-exp."""
        _, shared, repeat, channel = q.shape
        groups, most = len(self.used), self.most
        table = q
        if not self.aligned:
            table = q.new_zeros(groups * most, shared, repeat, channel)
            table[self.cell] = q
        table = table.view(groups, most, shared, repeat, channel).transpose(1, 2)
        out, log = _attend(table.reshape(groups, shared, most * repeat, channel), k, v, self.prompt_bias, scale)
        out = out.reshape(groups, shared, most, repeat, channel).transpose(1, 2).reshape(-1, shared, repeat, channel)
        log = log.reshape(groups, shared, most, repeat).transpose(1, 2).reshape(-1, shared, repeat)
        return (out, log) if self.aligned else (out[self.cell], log[self.cell])

    def _append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new tokens' keys and values behind those of their rows; return all of them."""
        if layer not in self.own:
            shape = (len(self.slot), k.shape[1], min(BLOCK, self.limit), k.shape[3])
            self.own[layer] = (k.new_zeros(shape), k.new_zeros(shape))
        have = self.own[layer][0].shape[2]
        if self.width > have:
            more = min(2 * have, self.limit) - have
            self.own[layer] = tuple(F.pad(cache, (0, 0, 0, more)) for cache in self.own[layer])  # type: ignore[assignment]
        own = self.own[layer]
        for cache, new in zip(own, (k, v), strict=True):
            if self.own_bias is None:
                cache[: self.count, :, self.width - 1] = new[:, :, 0]
            else:
                index = torch.arange(self.count, device=self.device)
                cache[index, :, self.length[: self.count]] = new[:, :, 0]
        return own[0][: self.count, :, : self.width], own[1][: self.count, :, : self.width]


def _bias(length: Tensor, width: int) -> Tensor | None:
    """0 for the first `length` of `width` keys and −∞ beyond, `[row 1 1 key]`; None where there is no beyond."""
    if bool((length == width).all()):
        return None
    beyond = torch.arange(width, device=length.device) >= length[:, None]
    return torch.zeros_like(beyond, dtype=torch.float32).masked_fill(beyond, float("-inf"))[:, None, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(q·kᵀ + bias)·v, and the log-sum-exp of its scores in float32."""
    if q.device.type == "cpu" and q.dtype == torch.float32:
        bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if bias is not None:
        scores = scores + bias
    log = torch.logsumexp(scores, -1)
    return torch.exp(scores - log.unsqueeze(-1)).to(v.dtype) @ v, log
