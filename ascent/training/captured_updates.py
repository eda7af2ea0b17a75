"""CUDA graphs of the backbone's forward and backward pass, because small updates are bound by kernel launches.

A packed row is padded to one of a few sizes. Both passes of a size are captured as CUDA graphs at its second use. The
graphs read the parameters in place and add gradients to float32 sums, which become the `.grad` of the master weights.
Padding tokens attend only to padding, so their gradients are 0. Embedding, head and objective are not captured.

A forward pass does not need rewards, so it may run while responses are still being scored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from ascent.models.packed_attention import PackedGroup, PackedLayout, VarlenSegments
from ascent.ops.cuda_graphs import GraphBackend, bucket_step, next_power_of_2, round_up_to_bucket

MAX_CAPTURE_FRACTION = 1 / 16
"""Fraction of the GPU memory for gradient sums and the largest captured row."""
MAX_CAPTURED_SIZES = 16
"""Maximum number of captured sizes."""


@dataclass(frozen=True)
class RowSize:
    """The capacity of a captured row."""

    tokens: int
    keys: int
    segments: int
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, groups: Sequence[PackedGroup]) -> RowSize:
        """Return the smallest size for these groups, with at least one token of padding."""
        num_tokens = sum(group.prompt + sum(group.responses) for group in groups)
        tokens = round_up_to_bucket(num_tokens + 1)
        num_repeated_keys = sum(group.prompt * len(group.responses) for group in groups)
        query = next_power_of_2(max(max(group.prompt, *group.responses, 1) for group in groups))
        key = next_power_of_2(max(group.prompt + max(group.responses, default=0) for group in groups))
        segments = sum(1 + len(group.responses) for group in groups) + -(-bucket_step(num_tokens + 1) // query)
        keys = tokens + next_power_of_2(num_repeated_keys + 1)
        return cls(tokens, keys, next_power_of_2(segments), query, max(query, key))


def pad_row(ids: Tensor, positions: Tensor, groups: Sequence[PackedGroup], size: RowSize) -> list[Tensor]:
    """Return the inputs of the graphs for a padded row: ids, positions and segment boundaries."""
    num_tokens, padded_groups = len(ids), list(groups)
    for start in range(num_tokens, size.tokens, size.longest_query):
        padded_groups.append(PackedGroup(start, min(size.longest_query, size.tokens - start), ()))
    spans, padding = VarlenSegments.of(padded_groups, torch.device("cpu")), size.tokens - num_tokens
    filler = spans.own_keys[-1]  # the key of a padding token
    repeated_keys = torch.full((size.keys - size.tokens,), int(filler))
    repeated_keys[: len(spans.repeated_keys)] = spans.repeated_keys
    ends = [
        F.pad(x.long(), (0, size.segments + 1 - len(x)), value=int(x[-1]))
        for x in (spans.cu_seqlens_q, spans.cu_seqlens_k)
    ]
    key_tokens = F.pad(spans.key_tokens, (0, size.keys - len(spans.key_tokens)))
    return [F.pad(ids, (0, padding)), F.pad(positions, (0, padding)), *ends, key_tokens, spans.own_keys, repeated_keys]


class CapturedRow:
    """The graphs of both passes over rows of one size, with their static input and output buffers."""

    def __init__(self, owner: CapturedBackbone, size: RowSize, parts: list[Tensor]):
        self.owner, self.size = owner, size
        device, weight = owner.device, owner.embedding.weight
        self.inputs = torch.cat(parts).to(device)
        self.ids, positions, queries, keys, *indices = self.inputs.split([len(part) for part in parts])
        ends = (queries.int(), keys.int())
        self.embedded = torch.zeros(1, size.tokens, weight.shape[1], dtype=owner.dtype, device=device)
        self.hidden_grad = torch.zeros_like(self.embedded, dtype=weight.dtype)
        self.hidden = self.hidden_grad
        self.leaves: list[Tensor] = []
        """Aliases of the parameters and embeddings as separate leaves: autograd ties a leaf to a stream."""
        self.embedded_grad: Tensor | None = None
        trains_embedding = weight.requires_grad

        def forward() -> None:
            for buffer, boundaries in zip(ends, (queries, keys), strict=True):
                buffer.copy_(boundaries)
            spans = VarlenSegments(*ends, size.longest_query, size.longest_key, *indices)
            layout = PackedLayout([], fused=owner.fused, _spans=spans)
            embedded = self.embedded.detach().requires_grad_(trains_embedding)
            parameters = [p.detach().requires_grad_() for p in owner.compute_params]
            self.leaves = [*parameters, *([embedded] if trains_embedding else [])]
            kwargs = {"position_ids": positions[None], "use_cache": False, "layout": layout}
            with torch.enable_grad():
                by_name = dict(zip(owner.names, parameters, strict=True))
                out = functional_call(owner.backbone, by_name, kwargs={"inputs_embeds": embedded, **kwargs})
            self.hidden = out.last_hidden_state

        def backward() -> None:
            grads = list(torch.autograd.grad(self.hidden, self.leaves, self.hidden_grad, allow_unused=True))
            self.embedded_grad = grads.pop() if trains_embedding else None
            for total, grad in zip(owner.sums, grads, strict=True):
                if grad is not None:
                    total.add_(grad)

        def forward_and_backward() -> None:
            forward()
            backward()

        owner.graphs.warm_up(forward_and_backward)  # the gradient is 0, and so are the sums
        self.forward, self.backward = owner.graphs.capture(forward), owner.graphs.capture(backward)

    def load(self, parts: list[Tensor]) -> None:
        row = torch.cat(parts)
        self.inputs.copy_(row.pin_memory() if self.inputs.is_cuda else row, non_blocking=True)

    @torch.no_grad()
    def run_forward(self, embedded: Tensor) -> None:
        self.embedded.copy_(embedded)
        self.forward()


class EarlyForward(NamedTuple):
    """A forward pass that ran ahead of the update: its row, its tokens, and the versions of its parameters."""

    row: CapturedRow
    ids: Tensor
    positions: Tensor
    groups: Sequence[PackedGroup]
    versions: list[int]


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedded: Tensor, _anchor: Tensor, row: CapturedRow, has_run: bool) -> Tensor:
        ctx.row = row
        if not has_run:
            row.run_forward(embedded)
        return row.hidden.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        row: CapturedRow = ctx.row
        row.hidden_grad.copy_(grads[0])
        row.owner.assign_gradients()
        row.backward()
        return row.embedded_grad, None, None, None


class CapturedBackbone:
    """The captured passes of one backbone, for rows of up to `tokens` tokens."""

    def __init__(
        self, backbone: nn.Module, compute_params: list[Tensor], master_params: list[Tensor], tokens: int,
        graphs: GraphBackend, fused: Any = None,
    ):  # fmt: skip
        self.backbone, self.tokens, self.graphs, self.fused = backbone, tokens, graphs, fused
        self.embedding: Any = backbone.get_input_embeddings()  # type: ignore[operator]
        names = {id(p): name for name, p in backbone.named_parameters() if p is not self.embedding.weight}
        pairs = [(p, master) for p, master in zip(compute_params, master_params, strict=True) if id(p) in names]
        self.compute_params, self.master_params = [p for p, _ in pairs], [master for _, master in pairs]
        self.names = [names[id(p)] for p in self.compute_params]
        self.sums: list[Tensor] = []
        self.parameters = list(backbone.parameters())
        self.device = self.embedding.weight.device
        self.dtype = self.embedding(torch.zeros(1, dtype=torch.long, device=self.device)).dtype
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)
        self.rows: dict[RowSize, CapturedRow] = {}
        self.num_uses: Counter[RowSize] = Counter()
        self.addresses: list[int] = []
        self.early_forward: EarlyForward | None = None
        self.capture_error: str | None = None
        """The error of a failed capture, after which nothing is captured."""

    @torch.no_grad()
    def begin(self, ids: Tensor, positions: Tensor, groups: Sequence[PackedGroup]) -> None:
        """Run the forward pass over a packed row ahead of the update, if its size is captured."""
        size = RowSize.of(groups)
        if size in self.rows and self._addresses_unchanged():
            row = self.rows[size]
            row.load(pad_row(ids, positions, groups, size))
            row.run_forward(self.embedding(row.ids[None]))
            self.early_forward = EarlyForward(row, ids, positions, groups, self._versions())

    def _take_early_forward(self, ids: Tensor, positions: Tensor, groups: Sequence[PackedGroup]) -> CapturedRow | None:
        """Return the row of the early forward pass, if its tokens and parameters are the present ones."""
        early, self.early_forward = self.early_forward, None  # it can be used once: rows share their memory
        if early is None or early.versions != self._versions() or not self._addresses_unchanged():
            return None
        same = torch.equal(early.ids, ids) and torch.equal(early.positions, positions) and early.groups == groups
        return early.row if same else None

    def _addresses_unchanged(self) -> bool:
        return self.addresses == [p.data_ptr() for p in self.parameters]

    def _versions(self) -> list[int]:
        return [p._version for p in self.parameters]

    def __call__(self, ids: Tensor, positions: Tensor, groups: Sequence[PackedGroup]) -> Tensor | None:
        """Return the hidden states `[1 token width]` of a padded row; None: it is not captured."""
        if len(ids) >= self.tokens or self.capture_error is not None or not torch.is_grad_enabled():
            return None
        size = RowSize.of(groups)
        self.num_uses[size] += 1
        if size.tokens > self.tokens or self.num_uses[size] < 2:
            return None
        early = self._take_early_forward(ids, positions, groups)
        row = early or self._row(size, pad_row(ids, positions, groups, size))
        if row is None:
            return None
        return _Passes.apply(self.embedding(row.ids[None]), self.anchor, row, early is not None)

    def _row(self, size: RowSize, parts: list[Tensor]) -> CapturedRow | None:
        if not self._addresses_unchanged():  # a rollout engine moved them: graphs use old addresses
            self.addresses, self.rows = [p.data_ptr() for p in self.parameters], {}
            self.graphs.reset()
        if size in self.rows:
            self.rows[size].load(parts)
        elif len(self.rows) < MAX_CAPTURED_SIZES:
            self.sums = self.sums or [torch.zeros_like(p) for p in self.master_params]
            try:
                self.rows[size] = CapturedRow(self, size, parts)
            except RuntimeError as error:  # the architecture syncs with the GPU, or there is too little memory
                self.capture_error, self.rows, self.sums = str(error).splitlines()[0], {}, []
        return self.rows.get(size)

    @torch.no_grad()
    def assign_gradients(self) -> None:
        """Make the sums the gradients of the master weights, and add the present gradients to them."""
        unset = [total for total, p in zip(self.sums, self.master_params, strict=True) if p.grad is None]
        if unset:
            torch._foreach_zero_(unset)
        for total, p in zip(self.sums, self.master_params, strict=True):
            if p.grad is not total:
                if p.grad is not None:
                    total.copy_(p.grad)
                p.grad = total


def captured_tokens(memory: int, master_params: Sequence[Tensor], per_token: int) -> int:
    """Return how many tokens a captured row may have, by `MAX_CAPTURE_FRACTION` of the GPU memory.

    Gradient sums and the activations that autograd keeps count.
    """
    sums = sum(p.numel() * p.element_size() for p in master_params)
    return max(0, int(MAX_CAPTURE_FRACTION * memory - sums)) // per_token
