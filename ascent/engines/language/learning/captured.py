"""A small update is bound by launches: here the host launches a backbone's forward and backward pass once each.

A packed row is padded to one of a few sizes, for which both passes are captured as CUDA graphs, at the size's second
use. The graphs read the parameters where they lie. They add gradients to sums in float32, which become the `.grad` of
what is stepped. Padding is rows that see nothing but padding: their gradients are 0, and so they change no sum. What
lies around the backbone (embedding, head, objective) is launched as always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascent.engines.language.attention import Group, Packed, Spans

SHARE = 1 / 16
"""Of a GPU's memory, what sums and the largest captured row may take."""
SIZES = 16
"""Sizes that are captured, at most."""
STEPS = 4
"""Sizes of rows between a power of two and the next."""


class CudaGraphs:
    """What is captured is launched as one graph. All graphs share their memory: one row is worked on at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


@dataclass(frozen=True)
class Size:
    """What a captured row holds at most."""

    tokens: int
    keys: int
    segments: int
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Size:
        """The smallest one for these groups, with at least one token of padding."""
        used = sum(group.prompt + sum(group.responses) for group in groups)
        tokens = size_above(used + 1)
        again = sum(group.prompt * len(group.responses) for group in groups)
        query = _power(max(max(group.prompt, *group.responses, 1) for group in groups))
        key = _power(max(group.prompt + max(group.responses, default=0) for group in groups))
        segments = sum(1 + len(group.responses) for group in groups) + -(-_step(used + 1) // query)
        return cls(tokens, tokens + _power(again + 1), _power(segments), query, max(query, key))


def size_above(count: int) -> int:
    """The next of `STEPS` numbers between two powers of two."""
    return -(-count // _step(count)) * _step(count)


def _step(count: int) -> int:
    return max(1, _power(count) // (2 * STEPS))


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def padded(ids: Tensor, positions: Tensor, groups: Sequence[Group], size: Size) -> list[Tensor]:
    """Ids, positions, and where segments begin, of a row with padding: all that changes from row to row."""
    used, every = len(ids), list(groups)
    for start in range(used, size.tokens, size.longest_query):
        every.append(Group(start, min(size.longest_query, size.tokens - start), ()))
    spans, missing = Spans.of(every, torch.device("cpu")), size.tokens - used
    filler = spans.own[-1]  # the key of a padding token
    again = torch.full((size.keys - size.tokens,), int(filler))
    again[: len(spans.again)] = spans.again
    ends = [F.pad(x.long(), (0, size.segments + 1 - len(x)), value=int(x[-1])) for x in (spans.queries, spans.keys)]
    seen = F.pad(spans.seen, (0, size.keys - len(spans.seen)))
    return [F.pad(ids, (0, missing)), F.pad(positions, (0, missing)), *ends, seen, spans.own, again]


class CapturedRow:
    """The two passes over rows of one size, with the places that they read and write."""

    def __init__(self, owner: Captured, size: Size, parts: list[Tensor]):
        self.owner, self.size = owner, size
        device, weight = owner.device, owner.embedding.weight
        self.numbers = torch.cat(parts).to(device)
        self.ids, positions, queries, keys, seen, own, again = self.numbers.split([len(part) for part in parts])
        ends = (queries.int(), keys.int())
        self.embedded = torch.zeros(1, size.tokens, weight.shape[1], dtype=owner.dtype, device=device)
        self.embedded.requires_grad_(weight.requires_grad)
        self.slope = torch.zeros_like(self.embedded)
        self.hidden = self.slope
        self.embedded_slope: Tensor | None = None

        def forward() -> None:
            for to, now in zip(ends, (queries, keys), strict=True):
                to.copy_(now)
            spans = Spans(*ends, size.longest_query, size.longest_key, seen, own, again)
            layout = Packed([], fused=owner.fused, _spans=spans)
            with torch.enable_grad():
                out = owner.backbone(
                    inputs_embeds=self.embedded, position_ids=positions[None], use_cache=False, layout=layout
                )
            self.hidden = out.last_hidden_state

        def backward() -> None:
            inputs = [*owner.working, *([self.embedded] if self.embedded.requires_grad else [])]
            grads = list(torch.autograd.grad(self.hidden, inputs, self.slope, allow_unused=True))
            self.embedded_slope = grads.pop() if self.embedded.requires_grad else None
            for total, grad in zip(owner.sums, grads, strict=True):
                if grad is not None:
                    total.add_(grad)

        forward()  # what is compiled or allocated at a first use cannot be captured; the slope is 0, and so are sums
        backward()
        self.forward, self.backward = owner.graphs.capture(forward), owner.graphs.capture(backward)

    def load(self, parts: list[Tensor]) -> None:
        row = torch.cat(parts)
        self.numbers.copy_(row.pin_memory() if self.numbers.is_cuda else row, non_blocking=True)


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedded: Tensor, _anchor: Tensor, row: CapturedRow) -> Tensor:
        ctx.row = row
        with torch.no_grad():
            row.embedded.copy_(embedded)
        row.forward()
        return row.hidden.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        row: CapturedRow = ctx.row
        row.slope.copy_(grads[0])
        row.owner.make_sums_gradients()
        row.backward()
        return row.embedded_slope, None, None


class Captured:
    """The passes of one backbone over rows of up to `tokens` tokens; others are left to the caller."""

    def __init__(
        self, backbone: nn.Module, working: list[Tensor], stepped: list[Tensor], tokens: int, graphs: Any,
        fused: Any = None,
    ):  # fmt: skip
        self.backbone, self.tokens, self.graphs, self.fused = backbone, tokens, graphs, fused
        self.embedding: Any = backbone.get_input_embeddings()  # type: ignore[operator]
        inside = {id(p) for p in backbone.parameters()} - {id(self.embedding.weight)}
        pairs = [(w, s) for w, s in zip(working, stepped, strict=True) if id(w) in inside]
        self.working, self.stepped = [w for w, _ in pairs], [s for _, s in pairs]
        self.sums: list[Tensor] = []
        self.device, self.dtype = self.embedding.weight.device, self.embedding.weight.dtype
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.rows: dict[Size, CapturedRow] = {}
        self.used: Counter[Size] = Counter()
        self.places: list[int] = []
        self.why_not: str | None = None
        """What went wrong with a capture; then there is none."""

    def __call__(self, ids: Tensor, positions: Tensor, groups: Sequence[Group]) -> Tensor | None:
        """Hidden states `[1 token width]` of a packed row and of its padding; None: it is not captured."""
        if len(ids) >= self.tokens or self.why_not is not None or not torch.is_grad_enabled():
            return None
        size = Size.of(groups)
        self.used[size] += 1
        if size.tokens > self.tokens or self.used[size] < 2:
            return None
        row = self._row(size, padded(ids, positions, groups, size))
        if row is None:
            return None
        return _Passes.apply(self.embedding(row.ids[None]), self.anchor, row)

    def _row(self, size: Size, parts: list[Tensor]) -> CapturedRow | None:
        places = [p.data_ptr() for p in self.backbone.parameters()]
        if places != self.places:  # a sampler has laid them elsewhere: graphs would read what was there before
            self.places, self.rows = places, {}
        if size in self.rows:
            self.rows[size].load(parts)
        elif len(self.rows) < SIZES:
            self.sums = self.sums or [torch.zeros_like(p) for p in self.stepped]
            try:
                self.rows[size] = CapturedRow(self, size, parts)
            except RuntimeError as error:  # an architecture that asks the card for numbers, or too little memory
                self.why_not, self.rows, self.sums = str(error).splitlines()[0], {}, []
        return self.rows.get(size)

    @torch.no_grad()
    def make_sums_gradients(self) -> None:
        """What is stepped gets the sums as its gradients, with what they hold already."""
        fresh = [total for total, p in zip(self.sums, self.stepped, strict=True) if p.grad is None]
        if fresh:
            torch._foreach_zero_(fresh)
        for total, p in zip(self.sums, self.stepped, strict=True):
            if p.grad is not total:
                if p.grad is not None:
                    total.copy_(p.grad)
                p.grad = total


def captured_tokens(memory: int, stepped: Sequence[Tensor], per_token: int) -> int:
    """How many tokens a captured row may have on a card: sums and what autograd keeps of it take `SHARE` of it."""
    sums = sum(p.numel() * p.element_size() for p in stepped)
    return max(0, int(SHARE * memory - sums)) // per_token
