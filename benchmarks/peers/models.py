"""The models and prompts of the language benchmarks."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

TINY: dict[str, Any] = {
    "vocab_size": 16_384,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
"""Llama's shape: 8.4 million parameters, half of them in the tied embedding."""
SMOKE = TINY | {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}


GPU_SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "kind": "Llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "kind": "Qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "kind": "Qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
"""SmolLM2-135M's shape, Qwen2.5-1.5B's and Qwen2.5-7B's."""


def random_model(folder: Path, shape: dict[str, Any] = TINY, device: str = "cpu") -> str:
    """A random Llama (or a similar model) whose tokens are the words w2, w3, …; saved as an ordinary folder."""
    for part in random_parts(shape, device):
        part.save_pretrained(folder)
    return str(folder)


def random_parts(shape: dict[str, Any] = TINY, device: str = "cpu") -> tuple[Any, Any]:
    """Such a model and its tokenizer."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    kind, own = shape.get("kind", "Llama"), {k: v for k, v in shape.items() if k != "kind"}
    config = getattr(transformers, f"{kind}Config")(**own, eos_token_id=0, pad_token_id=1, bos_token_id=None)
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.to(torch.float32 if device == "cpu" else torch.bfloat16)
    words = ["<end>", "<pad>", *(f"w{i}" for i in range(2, shape["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def random_prompts(count: int, tokens: int, vocab: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(f"w{rng.randrange(2, vocab)}" for _ in range(tokens)) for _ in range(count)]


def smollm2() -> str:
    """The folder of SmolLM2-135M-Instruct, converted if it does not exist."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "smollm2.py"], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def sums(count: int) -> list[str]:
    """Questions of the kind that reasoning-gym's chain_sum asks; some 50 tokens with SmolLM2's chat template."""
    rng = random.Random(0)
    numbers = [[rng.randrange(10, 100) for _ in range(3)] for _ in range(count)]
    return [f"State the final answer to the following arithmetic problem: {a} + {b} - {c} =" for a, b, c in numbers]
