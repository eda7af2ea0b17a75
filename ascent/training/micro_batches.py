"""How much of a batch goes through at once, by the memory that it takes; and how much an update computes.

    bytes(part) = tokens · per_token + repeats · per_repeat

A token costs what autograd keeps of it. A prompt that is encoded once is still read once per response: each repeat of
one of its tokens is a key and a value of one layer, with their gradients, for as long as that layer works. What stays
the same whatever the batch is (parameters, gradients, moments, logits of a chunk) is taken off the card's memory first.
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
"""Of a GPU's memory beside what is always there, what activations may take; the sampler's caches take a quarter."""
CPU_TOKENS = 8192
"""In a micro-batch on a CPU, which gains nothing from more."""
STATE_BYTES_PER_PARAM = 18
"""A trained parameter's: itself in bfloat16, and its copy, gradient and two moments in float32."""
COMPACT_BYTES_PER_PARAM = 10
"""The same in the form that takes less (compact.py): the low half of its copy, gradient and moments in bfloat16."""
COMPACT_THRESHOLD = 0.9
"""Of a GPU's memory, what may be taken whatever the batch is before state takes that form by itself."""
PROBE = (32, 96)
"""Tokens of the two forward passes that measure what a token takes."""


@dataclass(frozen=True)
class Plan:
    """What a micro-batch may hold."""

    tokens: int
    """The most tokens at once."""
    repeat: float = 0.0
    """What a further response costs for each token of its prompt, as a share of a token."""
    padded: bool = False
    """Are responses of a group padded to its longest where attention is computed?"""
    checkpointed_tokens: int = 0
    """The most tokens at once if layers are computed again; a response above `tokens` is computed so. 0: never."""

    def tight(self, tokens: int) -> bool:
        """Is a part so long, which cannot be cut any more, that its layers have to be computed again?"""
        return bool(self.checkpointed_tokens) and tokens > self.tokens


def plan_micro_batches(
    lm: LanguageModel, checkpointing: bool, reference: bool = False, critic: Any = None, shards: int = 0,
    per: int = STATE_BYTES_PER_PARAM,
) -> Plan:  # fmt: skip
    """For a GPU, what its memory should hold; a CPU takes a fixed number of tokens.

    From the size of the card and not from what is free on it, so that the same run is cut in the same way. A critic
    takes the same micro-batches. `shards`: of how many the trained state has one here, beside the whole model. `per`:
    bytes of a trained parameter.
    """
    if lm.device.type != "cuda":
        return Plan(CPU_TOKENS)
    state = static_bytes(lm, reference, critic, shards, per)
    free = ACTIVATION_FRACTION * max(0, lm.gpu_memory - state)
    every, again = (bytes_per_token(lm, flag) for flag in (False, True))
    own = again if checkpointing else every
    flash = varlen_kernel(lm.model.get_output_embeddings().weight.new_empty(0, head_dim_of(lm))) is not None
    repeat = repeat_bytes(lm, flash) / own if lm.shares else 0.0
    return Plan(max(1, int(free / own)), repeat, lm.shares and not flash, 0 if checkpointing else int(free / again))


def static_bytes(
    lm: LanguageModel, reference: bool, critic: Any, shards: int = 0, per: int = STATE_BYTES_PER_PARAM
) -> int:
    """What is taken whatever the batch is."""
    kept = sum(p.numel() * p.element_size() for p in lm.trained().values()) if reference else 0
    return state_bytes(lm, shards, per) + (kept + critic_bytes(critic)) // (shards or 1) + head_bytes(lm)


def state_bytes(lm: LanguageModel, shards: int = 0, per: int = STATE_BYTES_PER_PARAM) -> int:
    """Parameters, gradients and Adam: of everything; or of one of these shards, beside the whole model."""
    every = list(lm.model.parameters())
    own = sum(p.numel() * (per if p.requires_grad else p.element_size()) for p in every)
    return own // shards + sum(p.numel() * p.element_size() for p in every) if shards else own


# ---- what a token takes ------------------------------------------------------------------------------


def bytes_per_token(lm: LanguageModel, checkpointing: bool) -> int:
    """What autograd keeps of a token, and what the layer that works takes beside it: measured on a GPU, else about.

    With checkpointing the inputs of all layers are kept, and one layer is there twice, in its two passes.
    """
    config = lm.config
    layers, width = config.num_hidden_layers, config.hidden_size
    size = 4 if is_mixed_precision(lm.model) else lm.model.dtype.itemsize  # of the residual stream
    kept = activation_bytes_per_token(lm) if lm.device.type == "cuda" else layers * _layer_bytes(lm)
    layer = kept // layers
    return 2 * layer + size * width * layers if checkpointing else kept + layer


def _layer_bytes(lm: LanguageModel) -> int:
    """Of width w and inner width i, a layer keeps 11·w + 4·i numbers of a token, about.

    They are the norms' inputs (in float32), queries, keys, values, what they mix, and four tensors of the gated MLP.
    """
    config = lm.config
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return lm.model.dtype.itemsize * (11 * config.hidden_size + 4 * inner)


def activation_bytes_per_token(lm: LanguageModel) -> int:
    """What autograd keeps of one more token, measured: by forward passes over two short responses."""
    if not hasattr(lm, "activation_bytes_per_token"):
        few, more = (_kept(lm, tokens) for tokens in PROBE)
        lm.activation_bytes_per_token = max(0, more - few) // (PROBE[1] - PROBE[0])  # type: ignore[assignment]
    return lm.activation_bytes_per_token  # type: ignore[return-value]


def _kept(lm: LanguageModel, tokens: int) -> int:
    mine = {p.untyped_storage().data_ptr() for p in lm.model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # itself, it would keep the pass that made it, and that pass would keep it, for good

    ids = torch.arange(tokens + 1) % lm.vocab
    mask = torch.ones(1, 1, tokens, dtype=torch.bool)
    batch = Rollouts(ids[None, :1], ids[None, None, 1:], mask, torch.zeros(mask.shape), tokens, mask.any(-1))
    with (
        torch.enable_grad(),
        packed_attention_enabled(lm.model, lm.shares),
        saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        hidden = hidden_states(lm, batch)
    del hidden
    return sum(kept.values())


def repeat_bytes(lm: LanguageModel, flash: bool) -> int:
    """What a prompt's token takes for each further response that reads it.

    Flash attention: its key and value and their gradients, a gradient per query head, and their sums in float32, in one
    layer at a time; in float32 also key and value per query head. Otherwise every layer keeps those.
    """
    heads, shared, channel = heads_of(lm)
    size = lm.model.dtype.itemsize
    if not flash:
        return lm.config.num_hidden_layers * 2 * heads * channel * size
    return shared * channel * (5 * size + 4) + (2 if size < 4 else 4) * heads * channel * size + 24


def heads_of(lm: LanguageModel) -> tuple[int, int, int]:
    """Query heads, key-value heads and the channels of each."""
    config = lm.config
    heads = getattr(config, "num_attention_heads", 1)
    return heads, getattr(config, "num_key_value_heads", None) or heads, head_dim_of(lm)


def head_dim_of(lm: LanguageModel) -> int:
    config = lm.config
    return getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)


def head_bytes(lm: LanguageModel) -> int:
    """Two chunks of logits and their slopes, and the gradient of a trained head in float32 and as it is rounded."""
    weight = lm.model.get_output_embeddings().weight
    return 3 * chunk_bytes(lm.device) + 6 * weight.numel() * weight.requires_grad


def critic_bytes(critic: Any) -> int:
    """A critic's parameters beside the policy's, and the float32 copy, gradient and two moments of what is trained."""
    if critic is None:
        return 0
    copies = [] if critic.stepped is critic.working else critic.stepped
    held = [*critic.parameters(), *copies, *(3 * critic.trained())]
    return sum(p.numel() * p.element_size() for p in held)


# ---- what an update computes -------------------------------------------------------------------------


def update_operations(lm: LanguageModel, prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Operations of a forward and a backward pass over these lengths: of all, and of attention alone.

    6 per weight and token, 8 of the head and action (its logits are computed twice), and 12 per query channel and pair
    of tokens of which one sees the other, in each layer. With checkpointing a third is added to all but the head's.
    """
    heads, _, channel = heads_of(lm)
    head = lm.model.get_output_embeddings().weight.numel()
    embedding = lm.model.get_input_embeddings().weight
    blocks = parameter_count(lm.backbone) - embedding.numel()
    repeats = [1 if lm.shares else max(1, len(own)) for own in responses]
    tokens = sum(n * r + sum(own) for n, r, own in zip(prompts, repeats, responses, strict=True))
    pairs = sum(
        r * n * (n + 1) // 2 + sum(m * n + m * (m + 1) // 2 for m in own)
        for n, r, own in zip(prompts, repeats, responses, strict=True)
    )
    attention = 12 * lm.config.num_hidden_layers * heads * channel * pairs
    return 6 * blocks * tokens + 8 * head * sum(map(sum, responses)) + attention, attention
