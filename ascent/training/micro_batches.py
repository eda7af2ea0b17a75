"""Micro-batch sizes by the GPU memory that they need, and the number of operations of an update.

    bytes(micro-batch) = tokens · per_token + repeats · per_repeat

A token costs the activations that autograd keeps. A shared prompt is computed once but read once per response: each
repeat of one of its tokens costs a key and a value of one layer, with their gradients, while that layer runs. Memory
that does not depend on the batch (parameters, gradients, moments, logits of a chunk) is subtracted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ascent.core.types import Rollouts
from ascent.models.causal_lm import LanguageModel, is_mixed_precision
from ascent.models.lm_head import chunk_bytes
from ascent.models.packed_attention import packed_attention_enabled, varlen_kernel
from ascent.models.quantization import parameter_count
from ascent.training.packing import hidden_states

ACTIVATION_FRACTION = 0.6
"""Fraction of the remaining GPU memory for activations; the KV cache of the rollout engine takes a quarter."""
CPU_TOKENS = 8192
"""Tokens of a micro-batch on a CPU, which gains nothing from more."""
STATE_BYTES_PER_PARAM = 18
"""Bytes per trained parameter: itself in bfloat16; master weight, gradient and two moments in float32."""
COMPACT_BYTES_PER_PARAM = 10
"""The same with `CompactAdamW`: low 16 bits of the master weight; gradient and moments in bfloat16."""
COMPACT_THRESHOLD = 0.9
"""`--policy.optimizer-state auto` uses bfloat16 if float32 state exceeds this fraction of the GPU memory."""
PROBE_LENGTHS = (32, 96)
"""Tokens of the two forward passes that measure the activation bytes of a token."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """The limits of a micro-batch."""

    tokens: int
    """Maximum number of tokens."""
    repeat: float = 0.0
    """Cost of a further response per token of its prompt, relative to a token."""
    padded: bool = False
    """Does attention pad the responses of a group to the longest one?"""
    checkpointed_tokens: int = 0
    """Maximum number of tokens with activation checkpointing, which longer responses than `tokens` use. 0: never."""

    def needs_recompute(self, tokens: int) -> bool:
        """Return whether a micro-batch that cannot be split any further needs activation checkpointing."""
        return bool(self.checkpointed_tokens) and tokens > self.tokens


def plan_micro_batches(
    lm: LanguageModel, checkpointing: bool, reference: bool = False, critic: Any = None, shards: int = 0,
    per: int = STATE_BYTES_PER_PARAM,
) -> MicroBatchPlan:  # fmt: skip
    """Return the limits of a micro-batch: by the GPU memory, or a fixed number of tokens on a CPU.

    They depend on the total GPU memory rather than on the free memory, so that the same run is always split alike. A
    critic uses the same micro-batches. `shards`: number of shards of the trained state; this GPU holds one of them
    and a whole copy of the model. `per`: bytes per trained parameter.
    """
    if lm.device.type != "cuda":
        return MicroBatchPlan(CPU_TOKENS)
    state = static_bytes(lm, reference, critic, shards, per)
    free = ACTIVATION_FRACTION * max(0, lm.gpu_memory - state)
    every, again = (bytes_per_token(lm, flag) for flag in (False, True))
    own = again if checkpointing else every
    flash = varlen_kernel(lm.model.get_output_embeddings().weight.new_empty(0, head_dim_of(lm))) is not None
    repeat = repeat_bytes(lm, flash) / own if lm.can_share_prompts else 0.0
    return MicroBatchPlan(
        max(1, int(free / own)), repeat, lm.can_share_prompts and not flash, 0 if checkpointing else int(free / again)
    )


def static_bytes(
    lm: LanguageModel, reference: bool, critic: Any, shards: int = 0, per: int = STATE_BYTES_PER_PARAM
) -> int:
    """Return the memory that does not depend on the batch."""
    kept = sum(p.numel() * p.element_size() for p in lm.trained().values()) if reference else 0
    return state_bytes(lm, shards, per) + (kept + critic_bytes(critic)) // (shards or 1) + head_bytes(lm)


def state_bytes(lm: LanguageModel, shards: int = 0, per: int = STATE_BYTES_PER_PARAM) -> int:
    """Return the bytes of parameters, gradients and Adam: of the whole model, or of one shard plus a whole copy."""
    every = list(lm.model.parameters())
    own = sum(p.numel() * (per if p.requires_grad else p.element_size()) for p in every)
    return own // shards + sum(p.numel() * p.element_size() for p in every) if shards else own


# ---- memory per token ------------------------------------------------------------------------------


def bytes_per_token(lm: LanguageModel, checkpointing: bool) -> int:
    """Return the bytes of a token: what autograd keeps, plus one running layer. Measured on a GPU, else estimated.

    With activation checkpointing the inputs of all layers are kept, and one layer is recomputed at a time.
    """
    config = lm.config
    layers, width = config.num_hidden_layers, config.hidden_size
    size = 4 if is_mixed_precision(lm.model) else lm.model.dtype.itemsize  # of the residual stream
    kept = activation_bytes_per_token(lm) if lm.device.type == "cuda" else layers * _layer_bytes(lm)
    layer = kept // layers
    return 2 * layer + size * width * layers if checkpointing else kept + layer


def _layer_bytes(lm: LanguageModel) -> int:
    """Estimate the bytes that a layer keeps per token: 11·hidden_size + 4·intermediate_size numbers.

    They are the inputs of the norms (in float32), queries, keys, values, the attention output, and four tensors of the
    gated MLP.
    """
    config = lm.config
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return lm.model.dtype.itemsize * (11 * config.hidden_size + 4 * inner)


def activation_bytes_per_token(lm: LanguageModel) -> int:
    """Measure the bytes that autograd keeps per token, by forward passes over two short responses."""
    if not hasattr(lm, "activation_bytes_per_token"):
        short, long = (_saved_bytes(lm, tokens) for tokens in PROBE_LENGTHS)
        lm.activation_bytes_per_token = max(0, long - short) // (PROBE_LENGTHS[1] - PROBE_LENGTHS[0])  # type: ignore[assignment]
    return lm.activation_bytes_per_token  # type: ignore[return-value]


def _saved_bytes(lm: LanguageModel, tokens: int) -> int:
    mine = {p.untyped_storage().data_ptr() for p in lm.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would form a reference cycle with its graph

    ids = torch.arange(tokens + 1) % lm.vocab_size
    mask = torch.ones(1, 1, tokens, dtype=torch.bool)
    batch = Rollouts(ids[None, :1], ids[None, None, 1:], mask, torch.zeros(mask.shape), tokens, mask.any(-1))
    with (
        torch.enable_grad(),
        packed_attention_enabled(lm.model, lm.can_share_prompts),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        hidden = hidden_states(lm, batch)
    del hidden
    return sum(kept.values())


def repeat_bytes(lm: LanguageModel, flash: bool) -> int:
    """Return the bytes of a prompt token for each further response that reads it.

    With flash attention, one layer at a time holds its key and value with their gradients, a gradient per query head,
    and their sums in float32; in float32 also key and value per query head. Without it, every layer keeps the latter.
    """
    heads, kv_heads, head_dim = heads_of(lm)
    size = lm.model.dtype.itemsize
    if not flash:
        return lm.config.num_hidden_layers * 2 * heads * head_dim * size
    return kv_heads * head_dim * (5 * size + 4) + (2 if size < 4 else 4) * heads * head_dim * size + 24


def heads_of(lm: LanguageModel) -> tuple[int, int, int]:
    """Return the number of query heads, the number of key-value heads, and `head_dim`."""
    config = lm.config
    heads = getattr(config, "num_attention_heads", 1)
    return heads, getattr(config, "num_key_value_heads", None) or heads, head_dim_of(lm)


def head_dim_of(lm: LanguageModel) -> int:
    config = lm.config
    return getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)


def head_bytes(lm: LanguageModel) -> int:
    """Return the bytes of two chunks of logits with gradients, and of a trained head's gradient in two dtypes."""
    weight = lm.model.get_output_embeddings().weight
    return 3 * chunk_bytes(lm.device) + 6 * weight.numel() * weight.requires_grad


def critic_bytes(critic: Any) -> int:
    """Return the bytes of a critic: parameters, and float32 master weights, gradients and moments of trained ones."""
    if critic is None:
        return 0
    copies = [] if critic.master_params is critic.compute_params else critic.master_params
    held = [*critic.parameters(), *copies, *(3 * critic.trained())]
    return sum(p.numel() * p.element_size() for p in held)


# ---- operations of an update -------------------------------------------------------------------------


def update_operations(lm: LanguageModel, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the operations of a forward and a backward pass over these lengths: in total, and of attention alone.

    There are 6 per weight and token, 8 per weight of the head and action (its logits are computed twice), and in each
    layer 12 per query head, element of `head_dim` and pair of tokens of which one attends to the other. Activation
    checkpointing adds a third to all but the head's.
    """
    heads, _, head_dim = heads_of(lm)
    head = lm.model.get_output_embeddings().weight.numel()
    embedding = lm.model.get_input_embeddings().weight
    blocks = parameter_count(lm.backbone) - embedding.numel()
    repeats = [1 if lm.can_share_prompts else max(1, len(own)) for own in responses]
    tokens = sum(n * r + sum(own) for n, r, own in zip(prompts, repeats, responses, strict=True))
    pairs = sum(
        r * n * (n + 1) // 2 + sum(m * n + m * (m + 1) // 2 for m in own)
        for n, r, own in zip(prompts, repeats, responses, strict=True)
    )
    attention = 12 * lm.config.num_hidden_layers * heads * head_dim * pairs
    return 6 * blocks * tokens + 8 * head * sum(map(sum, responses)) + attention, attention
