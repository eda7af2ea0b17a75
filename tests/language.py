"""Tiny language models in float64, and rollouts of them, for the tests of the language engines."""

from __future__ import annotations

from typing import Any

import torch

from ascent.engines.language import LanguageLearner, LanguageSampler, Support
from ascent.policies import LanguageModel
from ascent.types import Batch, Rollouts, to_batch

VOCAB, END = 37, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": END,
    "eos_token_id": END,
}


class ExactNorm(torch.nn.Module):
    """transformers' RMS norms go through float32 whatever they are given; this one stays in float64."""

    def __init__(self, norm: Any):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Tokens:
    """A tokenizer that engines never ask for words."""

    eos_token_id = END
    chat_template = None


def model_of(kind: str = "Llama", seed: int = 0, dtype: torch.dtype = torch.float64, **more: Any) -> LanguageModel:
    """A random model of this architecture whose next token is far from uniform."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SHAPE | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.25)
    for name, module in list(model.named_modules()):
        if hasattr(module, "variance_epsilon") and dtype == torch.float64:
            model.set_submodule(name, ExactNorm(module))
    return LanguageModel(model, Tokens())


def prompts_of(lengths: tuple[int, ...] = (5, 2, 7), seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCAB, (len(lengths), max(lengths)), generator=generator)
    return torch.where(torch.arange(max(lengths)) < torch.tensor(lengths)[:, None], prompt, -1)


def sampler_of(lm: LanguageModel, limit: int = 9, seed: int = 0, rows: int = 0, **more: Any) -> LanguageSampler:
    temperature, support = more.pop("temperature", 1.0), Support(**more)
    return LanguageSampler(lm, limit, temperature, torch.Generator().manual_seed(seed), support, rows)


def batch_of(lm: LanguageModel, samples: int = 4, **more: Any) -> Batch:
    """Sampled groups with random rewards, ready for credit."""
    return rewarded(sampler_of(lm, **more).generate(prompts_of(), samples))


def rewarded(rollouts: Rollouts) -> Batch:
    generator = torch.Generator().manual_seed(9)
    reward = torch.randn(*rollouts.mask.shape[:2], 1, generator=generator, dtype=torch.float64)
    valid = torch.ones(rollouts.mask.shape[:2], dtype=torch.bool)
    return to_batch(
        rollouts, reward=reward, valid=valid, correct=reward.squeeze(-1) > 0, logp_old=rollouts.logp_sampler
    )


def gradient_of(learner: LanguageLearner) -> torch.Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in learner.trainable()]
    )
