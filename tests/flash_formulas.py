"""Attention over segments in plain PyTorch: what the kernels of attention.py are compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.models.packed_attention import VarlenSegments


class FlashFormulas:
    """What `Flash` and `Efficient` compute, a segment at a time and in any precision."""

    supports_cuda_graphs = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spans: VarlenSegments, scale: float) -> tuple[Tensor, list[Tensor]]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        parts = []
        ends = zip(
            spans.cu_seqlens_q[:-1],
            spans.cu_seqlens_q[1:],
            spans.cu_seqlens_k[:-1],
            spans.cu_seqlens_k[1:],
            strict=True,
        )
        for q_from, q_to, k_from, k_to in ends:
            queries, keys = int(q_to - q_from), int(k_to - k_from)
            seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            own_q, own_k, own_v = (x.transpose(0, 1) for x in (q[q_from:q_to], k[k_from:k_to], v[k_from:k_to]))
            own = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=seen, scale=scale)
            parts.append(own.transpose(0, 1))
        return torch.cat(parts), []

    @classmethod
    def backward(
        cls,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        _out: Tensor,
        _more: Any,
        spans: VarlenSegments,
        scale: float,
    ) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            return torch.autograd.grad(cls.forward(q, k, v, spans, scale)[0], (q, k, v), grad)
