"""The shape of a language model, from its config alone: no weight is loaded or allocated."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ascent.core.errors import ConfigError
from ascent.models.causal_lm import MODEL_LOAD_ERRORS, backbone_of
from ascent.models.decoder_model import UnsupportedArchitectureError, check_supported
from ascent.models.quantization import QUANTIZATION_BLOCK

EXPERT_COUNT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config fields of mixture-of-experts models."""

MAX_LAYERS = 1000


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that decide its costs."""

    kind: str
    """The model_type of transformers: llama, qwen2, …"""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    block_parameters: int
    """Parameters of the transformer blocks, without embedding and output head."""
    num_parameters: int
    """All parameters; tied ones are counted once."""
    lora_dims: int
    """Sum of the input and output dimensions of all matrices: LoRA trains `rank` parameters for each dimension."""
    max_positions: int | None
    eager_reason: str | None
    """Why the model decodes without CUDA graphs; None if it uses them."""
    quantizable: int = 0
    """Parameters in matrices that can be quantized to 4 bits."""
    has_qk_norm: bool = False
    """Whether queries and keys are normalized."""

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values per token in bfloat16."""
        return 4 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def activation_bytes(self) -> int:
        """Approximate bytes that autograd keeps per token in bfloat16 (fused norms and gates, flash attention)."""
        layer = (
            4 * self.hidden_size + 2 * (self.num_heads + self.num_kv_heads) * self.head_dim + 3 * self.intermediate_size
        )
        norms = (self.num_heads + self.num_kv_heads) * (2 * self.head_dim + 8) if self.has_qk_norm else 0
        return self.num_layers * (2 * layer + 4 * self.num_heads + 8 + norms)

    def trained_parameters(self, lora: int, last_layers: int) -> int:
        """Return the number of trained parameters."""
        if lora:
            return lora * self.lora_dims
        return (
            min(last_layers, self.num_layers) * self.block_parameters // self.num_layers
            if last_layers
            else self.num_parameters
        )


def read_shape(model: str) -> ModelShape:
    """Read the shape of a model from its folder, its config.json, or the Hugging Face hub."""
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
            json.loads(path.read_text())  # a shorter error than that of transformers
        config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        config = config.get_text_config(decoder=True)
        check_architecture_supported(model, config)
        with torch.device("meta"):
            model_on_meta: Any = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return shape_of(model_on_meta.to(torch.bfloat16))
    except ConfigError:
        raise
    except (*MODEL_LOAD_ERRORS, RecursionError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
        raise ConfigError(f"--model {model}: its config cannot be read: {type(error).__name__}: {first}") from None


def check_architecture_supported(model: str, config: Any) -> None:
    """Raise ConfigError for an architecture whose costs the model does not cover."""
    experts = next((name for name in EXPERT_COUNT_FIELDS if (getattr(config, name, None) or 0) > 1), None)
    if experts is not None:
        reason = f"it is a mixture of experts ({experts} {getattr(config, experts)})"
    elif not getattr(config, "num_attention_heads", None):
        reason = f"{config.model_type} has no attention heads"
    elif not 0 < config.num_hidden_layers <= MAX_LAYERS:
        reason = f"it has {config.num_hidden_layers} layers"
    else:
        return
    raise ConfigError(
        f"--model {model}: {reason}. Such models were not measured, so `ascent plan` does not support them"
    )


def shape_of(model: Any) -> ModelShape:
    """Return the shape of a model, which may be on the meta device."""
    config, backbone = model.config, backbone_of(model)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    heads = getattr(config, "num_attention_heads", None) or 1
    matrices = [m.weight for m in backbone.modules() if m.__class__.__name__ in ("Linear", "Conv1D")]
    try:
        check_supported(model)
        eager_reason = None
    except UnsupportedArchitectureError as error:
        eager_reason = str(error)
    return ModelShape(
        kind=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None)
        or getattr(config, "ffn_dim", None)
        or 4 * config.hidden_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=head.shape[0],
        block_parameters=sum(p.numel() for p in backbone.parameters()) - embedding.numel(),
        num_parameters=sum(p.numel() for p in model.parameters()),
        lora_dims=sum(sum(weight.shape) for weight in matrices),
        max_positions=getattr(config, "max_position_embeddings", None),
        eager_reason=eager_reason,
        quantizable=sum(w.numel() for w in matrices if w.shape[-1] % QUANTIZATION_BLOCK == 0),
        has_qk_norm=any(hasattr(module, "q_norm") for module in backbone.modules()),
    )
