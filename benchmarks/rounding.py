"""Which rounding moves a model's log-probs and its gradient? SmolLM2-135M-Instruct on the CPU, one kind at a time.

    python -m benchmarks.rounding [--repeats 4] [--smoke]

The model is computed in float32, and numbers are rounded to bfloat16 (or float16) only where they are of the kind that
is named, in both passes:

    weights     every parameter
    residual    the residual stream, after each sum
    norms       the output of a norm, the input of a matmul
    matmuls     the output of a matmul, and the gated activation
    attention   rotated queries and keys, attention probabilities and output
    logits      the logits from which tokens are sampled

`mixed` is all but residual and logits, `bfloat16` all but logits, `drawn` all, as an earlier sampler did. `--repeats`
prompts, four answers each, drawn in float32. Two figures: the mean of Σ p·|Δ log p| over the states before tokens, and
the relative error ‖Δg‖/‖g‖ of a policy gradient with advantages of ±1. rounding_gpu measures their cost in samples.

`value` is the log-prob error of mixed, `peer` that of bfloat16: ok if mixed has less. `--smoke`: a tiny random model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.models import CausalLM, LanguageModel
from benchmarks.common import close, show
from benchmarks.peers.models import SMOKE, random_model, random_prompts, smollm2, sums

KINDS = ("weights", "residual", "norms", "matmuls", "attention", "logits")
SIDES: dict[str, tuple[set[str], torch.dtype]] = {
    **{f"only {kind}": ({kind}, torch.bfloat16) for kind in KINDS},
    "mixed": ({*KINDS} - {"residual", "logits"}, torch.bfloat16),
    "bfloat16": ({*KINDS} - {"logits"}, torch.bfloat16),
    "drawn": ({*KINDS}, torch.bfloat16),
    "float16": ({*KINDS} - {"logits"}, torch.float16),
}
SAMPLES, TOKENS = 4, 16
Round = Callable[[str, Tensor], Tensor]


class Rounded(torch.autograd.Function):
    """Through another type and back, and so its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].to(ctx.dtype).to(grads[0].dtype), None


def logits_of(model: Any, ids: Tensor, r: Round) -> Tensor:
    """Logits `[row position vocab]` of rows that are all as long; the model is Llama's like."""
    body, config = model.model, model.config
    x = r("residual", F.embedding(ids, body.embed_tokens.weight))
    cos, sin = (part[:, None] for part in body.rotary_emb(x, torch.arange(ids.shape[1])[None]))

    def turned(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1)
        return r("attention", y * cos + torch.cat([-second, first], -1) * sin)

    def normed(norm: Any, y: Tensor) -> Tensor:
        return r("norms", norm.weight * y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))

    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    for layer in body.layers:
        own, mlp, h = layer.self_attn, layer.mlp, normed(layer.input_layernorm, x)
        parts = (r("matmuls", m(h)).unflatten(-1, (-1, own.head_dim)) for m in (own.q_proj, own.k_proj, own.v_proj))
        q, k, v = (part.transpose(1, 2) for part in parts)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (turned(k), v))
        scores = (turned(q) @ k.transpose(-1, -2) * own.scaling).masked_fill(later, float("-inf"))
        mixed = r("attention", r("attention", torch.softmax(scores, -1)) @ v)
        x = r("residual", x + r("matmuls", own.o_proj(mixed.transpose(1, 2).flatten(2))))
        h = normed(layer.post_attention_layernorm, x)
        gate, up = r("matmuls", mlp.gate_proj(h)), r("matmuls", mlp.up_proj(h))
        x = r("residual", x + r("matmuls", mlp.down_proj(r("matmuls", F.silu(gate) * up))))
    assert not config.attention_bias
    return r("logits", model.lm_head(normed(body.norm, x)))


def plainly(_kind: str, x: Tensor) -> Tensor:
    return x


@torch.no_grad()
def answers(lm: LanguageModel, prompt: list[int]) -> Tensor:
    """Four answers drawn in float32, `[row prompt+tokens]`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([prompt] * SAMPLES)
    for _ in range(TOKENS):
        p = torch.softmax(logits_of(lm.model, ids, plainly)[:, -1], -1)
        ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
    return ids


def measured(lm: LanguageModel, rows: list[tuple[int, Tensor]], r: Round) -> tuple[list[Tensor], Tensor]:
    """Log-probs over the vocabulary before each drawn token, and the gradient of Σ ±log π, in one vector."""
    lm.model.zero_grad()
    found = []
    for known, ids in rows:
        log_p = torch.log_softmax(logits_of(lm.model, ids, r)[:, known - 1 : -1], -1)
        own = log_p.gather(-1, ids[:, known:, None])[..., 0].sum(-1)
        (own * torch.tensor([1.0, -1.0, -1.0, 1.0])).sum().backward()
        found.append(log_p.detach())
    return found, torch.cat([p.grad.flatten() for p in lm.model.parameters() if p.grad is not None])


def compared(lm: LanguageModel, rows: list[tuple[int, Tensor]]) -> dict[str, tuple[float, float]]:
    """By what is rounded: the error of log-probs, and of the gradient."""
    want, grad = measured(lm, rows, plainly)
    exact = [p.detach().clone() for p in lm.model.parameters()]
    found = {}
    for name, (kinds, dtype) in SIDES.items():

        def r(kind: str, x: Tensor, kinds: set[str] = kinds, dtype: torch.dtype = dtype) -> Tensor:
            return Rounded.apply(x, dtype) if kind in kinds else x

        with torch.no_grad():
            for p, value in zip(lm.model.parameters(), exact, strict=True):
                p.copy_(value.to(dtype) if "weights" in kinds else value)
        got, rounded_grad = measured(lm, rows, r)
        apart = [(w.exp() * (g - w).abs()).sum(-1).mean() for g, w in zip(got, want, strict=True)]
        found[name] = (float(torch.stack(apart).mean()), float((rounded_grad - grad).norm() / grad.norm()))
        print(f"{name:16} log-probs {found[name][0]:.5f}   gradient {found[name][1]:.4f}", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4, help="prompts")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), SMOKE) if options.smoke else smollm2()
        lm = CausalLM(model=model, dtype="float32", device="cpu").load()
    texts = random_prompts(options.repeats, 6, SMOKE["vocab_size"]) if options.smoke else sums(options.repeats)
    prompts = [lm.encode([{"role": "user", "content": text}]) for text in texts]
    found = compared(lm, [(len(prompt), answers(lm, prompt)) for prompt in prompts])
    show(["rounded", "log-probs", "gradient"], [[n, f"{a:.4f}", f"{b:.1%}"] for n, (a, b) in found.items()])
    ours, peer = (None, None) if options.smoke else (found["mixed"][0], found["bfloat16"][0])
    ok = options.smoke or found["mixed"][0] < found["bfloat16"][0]
    return close("rounding", ours, peer, 1.0, ok, smoke=options.smoke, errors=found)[1]


if __name__ == "__main__":
    sys.exit(main())
