"""The shape of a language model, from its config alone: no weight is loaded or allocated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ascent.core.errors import ConfigError
from ascent.models.causal_lm import UNREADABLE, backbone_of
from ascent.models.decoder_model import UnsupportedArchitectureError, check_like
from ascent.models.quantization import BLOCK

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a config that say that a token passes through a part of the weights only."""

MOST_LAYERS = 1000


@dataclass(frozen=True)
class ModelShape:
    """What a model costs is decided by these numbers."""

    kind: str
    """transformers' name of the architecture: llama, qwen2, …"""
    layers: int
    width: int
    inner: int
    """Width inside of an MLP."""
    heads: int
    shared: int
    """Key-value heads."""
    channel: int
    """Channels of a head."""
    vocab: int
    blocks: int
    """Parameters that every token is multiplied with, but the head's."""
    every: int
    """All parameters; tied ones count once."""
    sides: int
    """Inputs and outputs of all matrices in the blocks: LoRA trains `rank` parameters for each."""
    positions: int | None
    unlike: str | None
    """Why it decodes without captured graphs, if it does."""
    packable: int = 0
    """Parameters in matrices that can be kept in 4 bits."""
    normed: bool = False
    """Have queries and keys norms of their own?"""

    @property
    def head(self) -> int:
        return self.vocab * self.width

    @property
    def cache(self) -> int:
        """Bytes of a token's keys and values in bfloat16."""
        return 4 * self.layers * self.shared * self.channel

    @property
    def kept(self) -> int:
        """Bytes that autograd keeps of a token in bfloat16, about: fused norms and gates, flash attention."""
        layer = 4 * self.width + 2 * (self.heads + self.shared) * self.channel + 3 * self.inner
        norms = (self.heads + self.shared) * (2 * self.channel + 8) if self.normed else 0
        return self.layers * (2 * layer + 4 * self.heads + 8 + norms)

    def trained(self, lora: int, last_layers: int) -> int:
        """Parameters that are trained."""
        if lora:
            return lora * self.sides
        return min(last_layers, self.layers) * self.blocks // self.layers if last_layers else self.every


def read_shape(model: str) -> ModelShape:
    """The shape of the model in a folder, of a config.json, or of a name on the hub."""
    if not model:
        raise ConfigError(
            "--model is missing: set the folder of a model, its config.json alone, or its name on the hub"
        )
    try:
        import transformers
    except ImportError:
        raise ConfigError("language models need transformers: pip install 'ascent-rl[lm]'") from None
    path = Path(model)
    if not path.exists() and (path.is_absolute() or model.startswith((".", "~"))):
        raise ConfigError(f"--model {model}: there is no such folder or file")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"--model {model}: the folder has no config.json")
    transformers.utils.logging.set_verbosity_error()
    try:
        if path.is_file():
            json.loads(path.read_text())  # transformers' own words for a broken file are long
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        config = config.get_text_config(decoder=True)
        refuse_unmeasured(model, config)
        with torch.device("meta"):
            made: Any = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return shape_of(made.to(torch.bfloat16))
    except ConfigError:
        raise
    except (*UNREADABLE, RecursionError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no words"
        raise ConfigError(f"--model {model}: its config cannot be read: {type(error).__name__}: {first}") from None


def refuse_unmeasured(model: str, config: Any) -> None:
    """There is no plan for architectures whose costs are others than those that were measured."""
    experts = next((name for name in EXPERTS if (getattr(config, name, None) or 0) > 1), None)
    if experts is not None:
        why = f"it is a mixture of experts ({experts} {getattr(config, experts)})"
    elif not getattr(config, "num_attention_heads", None):
        why = f"{config.model_type} has no attention heads"
    elif not 0 < config.num_hidden_layers <= MOST_LAYERS:
        why = f"it has {config.num_hidden_layers} layers"
    else:
        return
    raise ConfigError(f"--model {model}: {why}. Nothing of the kind was measured, so there is no plan for it")


def shape_of(model: Any) -> ModelShape:
    """Of a model, which may lie on the meta device."""
    config, backbone = model.config, backbone_of(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    heads = getattr(config, "num_attention_heads", None) or 1
    matrices = [m.weight for m in backbone.modules() if m.__class__.__name__ in ("Linear", "Conv1D")]
    try:
        check_like(model)
        unlike = None
    except UnsupportedArchitectureError as error:
        unlike = str(error)
    return ModelShape(
        kind=config.model_type,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        inner=getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size,
        heads=heads,
        shared=getattr(config, "num_key_value_heads", None) or heads,
        channel=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=head.shape[0],
        blocks=sum(p.numel() for p in backbone.parameters()) - embedding.numel(),
        every=sum(p.numel() for p in model.parameters()),
        sides=sum(sum(weight.shape) for weight in matrices),
        positions=getattr(config, "max_position_embeddings", None),
        unlike=unlike,
        packable=sum(w.numel() for w in matrices if w.shape[-1] % BLOCK == 0),
        normed=any(hasattr(module, "q_norm") for module in backbone.modules()),
    )
