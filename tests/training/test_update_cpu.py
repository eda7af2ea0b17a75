"""The update on a CPU: groups of the same lengths at once, and norms and rotations with fewer passes."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.core.algorithms import ALGORITHMS
from ascent.core.update import TrustRegion
from ascent.models import fused_layers
from ascent.models.fused_layers import ElementwiseReference, RMSNormFunction, SwiGLUFunction
from ascent.models.packed_attention import PackedGroup, PackedLayout
from ascent.training.language_learner import LanguageLearner
from tests.language import batch_of, gradient_of, model_of
from tests.training.test_language_learner import credited, learner_of


def seen_by(lengths: list[tuple[int, tuple[int, ...]]]) -> Tensor:
    """Which tokens of a row each of them sees, written out: its prompt, and itself and what is before it."""
    owner, response = [], []
    for group, (prompt, responses) in enumerate(lengths):
        for number, count in enumerate((prompt, *responses)):
            owner += [group] * count
            response += [number] * count
    at = range(len(owner))
    rows = [
        [owner[i] == owner[j] and j <= i and (response[j] == 0 or response[j] == response[i]) for j in at] for i in at
    ]
    return torch.tensor(rows)


@pytest.mark.parametrize(
    "lengths",
    [
        [(3, (2, 2))] * 3,
        [(3, (4, 1, 2))] * 2 + [(3, (4, 2, 1))],
        [(2, ()), (2, ()), (5, (1,)), (1, (3, 3)), (1, (3, 3))],
    ],
    ids=["all alike", "uneven", "mixed"],
)
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2)])
def test_batched_groups_match_separate_attention(
    lengths: list[tuple[int, tuple[int, ...]]], heads: int, shared: int
) -> None:
    """Outputs and gradients, against one mask over the whole row."""
    generator, groups, start = torch.Generator().manual_seed(0), [], 0
    for prompt, responses in lengths:
        groups.append(PackedGroup(start, prompt, responses))
        start += prompt + sum(responses)
    rows = [torch.randn(1, n, start, 8, generator=generator, dtype=torch.float64) for n in (heads, shared, shared)]
    q, k, v = (x.requires_grad_() for x in rows)
    wide_k, wide_v = (x.repeat_interleave(heads // shared, 1) for x in (k, v))
    want = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=seen_by(lengths), scale=0.3).transpose(1, 2)
    got = PackedLayout(groups).attend(0, q, k, v, 0.3)
    slope = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    wants, found = (torch.autograd.grad(out, rows, slope) for out in (want, got))
    for a, b in zip((want, *wants), (got, *found), strict=True):
        assert (a - b).abs().max() < 1e-12


def test_groups_of_equal_lengths_share_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, *x, **how: calls.append(len(q)) or plain(q, *x, **how)
    )
    groups = [PackedGroup(7 * i, 3, (2, 2)) for i in range(4)]
    PackedLayout(groups).attend(0, *(torch.randn(1, 2, 28, 8) for _ in range(3)), 0.3)
    assert calls == [4, 8], "four prompts, and eight responses"


@pytest.mark.parametrize("frozen", [False, True])
def test_rms_norm_matches_autograd(frozen: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=not frozen)
    assert torch.autograd.gradcheck(lambda *both: RMSNormFunction.apply(*both, 1e-3), (x, weight))
    want = weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    assert (RMSNormFunction.apply(x, weight, 1e-3) - want).abs().max() < 1e-12
    (slope,) = torch.autograd.grad(RMSNormFunction.apply(x, weight, 1e-3).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_swiglu_matches_autograd() -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(SwiGLUFunction.apply, (gate, up))
    assert (SwiGLUFunction.apply(gate, up) - F.silu(gate) * up).abs().max() < 1e-12


def test_rope_matches_transformers_and_its_gradient_rotates_back() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.randn(1, 5, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).transpose(1, 2)
    angle = torch.linspace(0, 3, 20, dtype=torch.float64).view(1, 5, 4).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    turned = ElementwiseReference.rope(x, cos, sin, False)
    assert (turned - apply_rotary_pos_emb(x, x, cos, sin)[0]).abs().max() < 1e-12
    assert (ElementwiseReference.rope(turned, cos, sin, True) - x).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma", "GPT2"])
def test_float32_gradient_matches_float64(kind: str) -> None:
    """The model in float64 computes as transformers wrote it."""
    algorithm, found = ALGORITHMS["dr-grpo"], []
    for dtype in (torch.float64, torch.float32):
        learner = learner_of(model_of(kind, dtype=dtype), algorithm)
        batch = credited(batch_of(model_of(kind)), algorithm, learner)
        learner.gradient(batch, algorithm.objective)
        found.append(gradient_of(learner).double())
    assert (found[0] - found[1]).abs().max() < 2e-5 * found[0].abs().max()


def replaced(learner: LanguageLearner) -> int:
    return sum("forward" in vars(module) for module in learner.lm.model.modules())


def test_layers_are_fused_in_float32_without_double_backward() -> None:
    algorithm = ALGORITHMS["dr-grpo"]
    for dtype, count in ((torch.float32, 5 + 2), (torch.bfloat16, 0), (torch.float64, 0)):
        assert replaced(learner_of(model_of(dtype=dtype), algorithm)) == count
    twice = LanguageLearner(model_of(dtype=torch.float32), TrustRegion(), False, algorithm.outputs)
    assert replaced(twice) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_trained_model_can_be_copied_to_another_dtype(dtype: torch.dtype) -> None:
    ids, lm = torch.arange(6)[None], model_of(dtype=torch.float32)
    with torch.no_grad():
        want = lm.model(input_ids=ids).logits
        learner_of(lm, ALGORITHMS["dr-grpo"])
        got = copy.deepcopy(lm.model).to(dtype)(input_ids=ids).logits
    bound = 1e-5 if dtype == torch.float64 else 0.1
    assert got.dtype == dtype and (got - want).abs().max() < bound * want.abs().max()


def test_nested_forward_uses_the_same_rope_function() -> None:
    """As of a critic that is fitted: what was found out about a model's own function is not found out again."""
    model = model_of(dtype=torch.float32).model
    checked = fused_layers._rope_matches.cache_info().currsize
    where = sys.modules[type(model.get_decoder()).__module__]
    own: Any = where.apply_rotary_pos_emb  # type: ignore[attr-defined]
    for _ in range(3):
        with fused_layers.fused_rope(model):
            outer = where.apply_rotary_pos_emb  # type: ignore[attr-defined]
            with fused_layers.fused_rope(model):
                assert where.apply_rotary_pos_emb is outer is not own  # type: ignore[attr-defined]
        assert where.apply_rotary_pos_emb is own  # type: ignore[attr-defined]
    assert fused_layers._rope_matches.cache_info().currsize <= checked + 1
