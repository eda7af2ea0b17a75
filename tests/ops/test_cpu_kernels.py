"""Kernels in C for language models on a CPU, of every width of vectors, against float64; what happens without them."""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ascent.core.algorithms import ALGORITHMS
from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Prompts
from ascent.inference.engine import LocalEngine
from ascent.inference.runners.packed_cpu_model import RowwiseDecodeLayout
from ascent.inference.runners.paged import PagedRunner
from ascent.models.fused_layers import ElementwiseReference, fuse_layers, fused_rope
from ascent.models.lm_head import LMHead, token_stats
from ascent.ops import cpu_kernels
from ascent.ops.token_sampling import sample_tokens
from tests.inference.test_cuda_graph_runner import same
from tests.language import batch_of, gradient_of, model_of, prompts_of, sampler_of
from tests.training.test_language_learner import credited, learner_of

pytestmark = pytest.mark.skipif(
    not cpu_kernels.can_compile(), reason="needs GCC, and Linux on 64-bit Arm or x86 with AVX2"
)

WIDTHS = {"8 numbers": "-march=haswell", "4 numbers": "-march=x86-64"} if platform.machine() == "x86_64" else {}
"""By how wide vectors are, what is compiled for besides what is here. On Arm they have 4 numbers."""


@pytest.fixture(params=["as here", *WIDTHS])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    flags = tuple(
        WIDTHS.get(request.param, flag) if flag.startswith("-march") else flag for flag in cpu_kernels.COMPILER_FLAGS
    )
    found = cpu_kernels._load(flags)
    assert found is not None
    monkeypatch.setattr(cpu_kernels, "load_library", lambda: found)
    return found


NANS = [0x7FC00000, 0x7FFFFFFF, -1]
"""The bits of what is not a number: as a CPU makes it, as a GPU does, and with a sign."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor, tolerance: float = 3e-6) -> None:
    assert got.shape == want.shape and got.dtype == torch.float32
    want = want.detach()
    assert float((got.double() - want).abs().max()) <= tolerance * max(1.0, float(want.abs().max()))


# ---- products -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 64, 65, 131])
@pytest.mark.parametrize(
    ("outs", "depth"), [((1,), 1), ((47,), 3), ((48, 16, 17), 64), ((100,), 513), ((5, 300), 1030)]
)
def test_products(kernels: ctypes.CDLL, rows: int, outs: tuple[int, ...], depth: int) -> None:
    weights = [randn(out, depth, seed=i) / depth**0.5 for i, out in enumerate(outs)]
    x, bias = randn(rows, depth, seed=7), randn(sum(outs), seed=8)
    panels, want = cpu_kernels.PackedWeight(weights), x.double() @ torch.cat(weights).double().t()
    close(panels(x, None), want)
    close(panels(x, bias), want + bias.double())
    weights = [2 * weight for weight in weights]
    panels.pack(weights)
    close(panels(x, None), 2 * want)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("rows", "out", "biased"), [(1, 48, False), (9, 5, True), (70, 130, True)])
def test_gate_and_up(kernels: ctypes.CDLL, rows: int, out: int, biased: bool, joined: bool, gelu: bool) -> None:
    gate, up, x = randn(out, 40, seed=1), randn(out, 40, seed=2), randn(rows, 40, seed=3)
    bias = randn(2 * out, seed=4) if biased else None
    panels = cpu_kernels.PackedWeight([torch.cat([gate, up])] if joined else [gate, up], gated=True)
    both = F.linear(x.double(), torch.cat([gate, up]).double(), None if bias is None else bias.double())
    g, u = both.chunk(2, -1)
    close(panels(x, bias, gelu), (F.gelu(g, approximate="tanh") if gelu else F.silu(g)) * u)


def test_gates_far_from_0(kernels: ctypes.CDLL) -> None:
    """e^x neither overflows nor leaves a gate open, and what is not a number stays none."""
    numbers = torch.tensor([-1e30, -200.0, -88.5, -87.5, 0.0, 87.5, 89.0, 1e30, float("inf")])
    x = torch.cat([numbers, torch.tensor(NANS, dtype=torch.int32).view(torch.float32)])[:, None]
    got = cpu_kernels.PackedWeight([torch.ones(1, 1), torch.ones(1, 1)], gated=True)(x, torch.tensor([0.0, 1.0]))
    want = F.silu(x.double()) * (x.double() + 1)
    assert torch.allclose(got.double(), want.float().double(), rtol=1e-6, atol=1e-30, equal_nan=True)


def test_a_row_has_the_same_bits_alone_and_beside_others_with_any_threads(kernels: ctypes.CDLL) -> None:
    weights, x, before = [randn(3 * 48 + 5, 700)], randn(150, 700, seed=1), torch.get_num_threads()
    panels = cpu_kernels.PackedWeight(weights)
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [panels(x, None), torch.cat([panels(part, None) for part in x.split([1, 6, 8, 20, 115])])]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


# ---- norms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 15, 64, 577])
@pytest.mark.parametrize("add", [0.0, 1.0])
def test_norms(kernels: ctypes.CDLL, width: int, add: float) -> None:
    x, y, weight = randn(20, width), randn(20, width, seed=1), randn(width, seed=2)
    for other in (None, y):
        total = x.double() + (0 if other is None else y.double())
        want = (add + weight.double()) * total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        into = x.clone()
        sums, normed = cpu_kernels.add_rms_norm(into, other, weight, 1e-5, add)
        assert sums is into
        close(sums, total)
        close(normed, want)


# ---- attention ----------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([second, first], -1) * sin


@pytest.mark.parametrize(
    ("channel", "heads", "queries", "size"),
    [(16, 2, 1, 32), (64, 3, 3, 64), (64, 1, 9, 32), (80, 2, 4, 32), (128, 2, 6, 64), (256, 1, 2, 64), (64, 2, 2, 7)],
)
def test_attention(kernels: ctypes.CDLL, channel: int, heads: int, queries: int, size: int) -> None:
    """Of rows of all lengths, with and without a prompt; memory that nobody has written to is not a number."""
    known, length = [0, 1, 50, size, 2 * size + 3, 0, 40, 1500], [1, 0, size - 1, size, 5, 3 * size, 0, 2 * size + 7]
    rows = len(known)
    before, own = [-(-n // size) for n in known], [n // size + 1 for n in length]
    pages = torch.randperm(sum(before) + sum(own), generator=torch.Generator().manual_seed(0)).tolist()
    keys, values = torch.full((2, len(pages), heads, size, channel), float("nan"))
    table = torch.zeros(rows, max(map(sum, zip(before, own, strict=True))), dtype=torch.long)
    held = [a + b for a, b in zip(known, length, strict=True)]
    k, v = ([randn(n, heads, channel, seed=seed + i) for i, n in enumerate(held)] for seed in (1, 50))
    for i in range(rows):
        mine = [pages.pop() for _ in range(before[i] + own[i])]
        table[i, : len(mine)] = torch.tensor(mine)
        for t in range(held[i]):
            place = t if t < known[i] else before[i] * size + t - known[i]
            keys[mine[place // size], :, place % size] = k[i][t]
            values[mine[place // size], :, place % size] = v[i][t]
    qkv, cos, sin = randn(rows, heads * (queries + 2) * channel, seed=99), randn(rows, channel), randn(rows, channel)
    about = tuple(torch.tensor(numbers) for numbers in (before, known, length))
    got = cpu_kernels.paged_attention(qkv, (cos, sin), 0.2, (keys, values), table, about)
    q, new_k, new_v = qkv.double().view(rows, -1, channel).split([heads * queries, heads, heads], 1)
    q, new_k = (rotated(x, cos.double()[:, None], sin.double()[:, None]) for x in (q, new_k))
    for i in range(rows):
        all_k, all_v = (
            torch.cat([a.double(), b[i : i + 1]]).transpose(0, 1) for a, b in ((k[i], new_k), (v[i], new_v))
        )
        weights = torch.softmax(0.2 * q[i].view(heads, queries, channel) @ all_k.transpose(1, 2), -1)
        close(got[i], (weights @ all_v).flatten(), 1e-5)
        last = table[i, before[i] + length[i] // size]
        close(keys[last, :, length[i] % size], new_k[i])
        close(values[last, :, length[i] % size], new_v[i])


@pytest.mark.parametrize("bits", NANS)
@pytest.mark.parametrize("where", ["query", "key", "value", "old key"])
def test_what_is_not_a_number_stays_in_its_row_whatever_its_bits(kernels: ctypes.CDLL, where: str, bits: int) -> None:
    keys, values = torch.zeros(2, 3, 1, 32, 16)
    qkv, nan = randn(3, 48), torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    if where == "old key":
        keys[1, 0, 1, 4] = nan
    else:
        qkv[1, {"query": 4, "key": 20, "value": 36}[where]] = nan
    turn, one = (torch.ones(3, 16), torch.zeros(3, 16)), torch.ones(3, dtype=torch.long)
    got = cpu_kernels.paged_attention(
        qkv, turn, 1.0, (keys, values), torch.arange(3)[:, None], (0 * one, 0 * one, 3 * one)
    )
    assert got.isnan().any(-1).tolist() == [False, True, False]


# ---- drawing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [1, 7, 256, 1000, 4099])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_draws(kernels: ctypes.CDLL, words: int, temperature: float) -> None:
    z, u = 3 * randn(40, words), torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z[:, ::3] = float("-inf") if words > 1 else 0.0
    u[:2] = torch.tensor([0.0, 1 - 2.0**-53])
    word, logp = cpu_kernels.sample_rows(z, temperature, u)
    p = torch.softmax(z.double() / temperature, -1)
    upper = p.cumsum(-1).gather(-1, word[:, None])[:, 0]
    own = p.gather(-1, word[:, None])[:, 0]
    assert bool((own > 0).all()) and bool(((upper - own - 1e-5 <= u) & (u <= upper + 1e-5)).all())
    assert torch.allclose(logp.double(), own.log(), atol=1e-5)


def test_a_draw_at_0_passes_over_blocks_without_probability(kernels: ctypes.CDLL) -> None:
    """Words are added up in blocks of 256. Where the first ones have no probability, u = 0 draws the first that has."""
    z = torch.full((3, 1000), float("-inf"))
    z[0, 300:], z[1, 999], z[2, 256:] = 0.0, 1.0, torch.linspace(0, 1, 744)
    word, logp = cpu_kernels.sample_rows(z, 1.0, torch.zeros(3, dtype=torch.float64))
    assert word.tolist() == [300, 999, 256]
    assert torch.allclose(logp, torch.log_softmax(z, -1).gather(-1, word[:, None])[:, 0], atol=1e-5)


def test_logits_that_are_no_numbers_draw_a_word_whose_log_prob_is_none(kernels: ctypes.CDLL) -> None:
    z = torch.zeros(3, 300)
    z[0, 5], z[1] = float("nan"), float("-inf")
    word, logp = cpu_kernels.sample_rows(z, 1.0, torch.full((3,), 0.5, dtype=torch.float64))
    assert bool(((word >= 0) & (word < 300)).all()) and logp.isnan().tolist() == [True, True, False]


def test_all_words_are_drawn_here_and_some_by_torch(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    z, u = randn(30, 500), torch.rand(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours = sample_tokens(z, 0.7, SamplingParams(), u)
    some = sample_tokens(z, 0.7, SamplingParams(top_k=3), u)
    monkeypatch.setattr(cpu_kernels, "load_library", lambda: None)
    theirs = sample_tokens(z, 0.7, SamplingParams(), u)
    assert torch.equal(ours[0], theirs[0]) and torch.allclose(ours[1], theirs[1], atol=1e-5)
    assert ours[2] is None and some[2] is not None


# ---- updates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 16, 17, 1000, 9001])
def test_gates_and_their_slopes(kernels: ctypes.CDLL, count: int) -> None:
    gate, up, grad = (3 * randn(count, seed=i) for i in range(3))
    wide = [x.double().requires_grad_() for x in (gate, up)]
    want = F.silu(wide[0]) * wide[1]
    close(cpu_kernels.ElementwiseKernels.swiglu(gate, up), want)
    for got, slope in zip(
        cpu_kernels.ElementwiseKernels.swiglu_backward(grad, gate, up),
        torch.autograd.grad(want, wide, grad.double()),
        strict=True,
    ):
        close(got, slope)


def test_slopes_of_gates_far_from_0(kernels: ctypes.CDLL) -> None:
    """Open, shut, and not a number."""
    gate = torch.tensor([-1e30, -200.0, -88.5, 0.0, 89.0, 1e30, float("nan")])
    ones = torch.ones(7)
    to_gate, to_up = cpu_kernels.ElementwiseKernels.swiglu_backward(ones, gate, ones)
    assert torch.allclose(to_gate, torch.tensor([0, 0, 0, 0.5, 1, 1, float("nan")]), atol=1e-30, equal_nan=True)
    assert torch.allclose(to_up, torch.tensor([0, 0, 0, 0, 89, 1e30, float("nan")]), atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(("heads", "positions", "channel"), [(1, 1, 2), (3, 5, 10), (4, 70, 64)])
def test_turns_and_back(kernels: ctypes.CDLL, heads: int, positions: int, channel: int) -> None:
    """As a model has queries, `[position head channel]` in memory; and with gaps between channels."""
    cos, sin = randn(1, positions, channel, seed=1), randn(1, positions, channel, seed=2)
    plain = randn(1, positions, heads, channel)
    for x in (plain.transpose(1, 2), plain.repeat_interleave(2, -1)[..., ::2].transpose(1, 2)):
        for back in (False, True):
            got = cpu_kernels.ElementwiseKernels.rope(x, cos, sin, back)
            close(got, ElementwiseReference.rope(x.double(), cos.double(), sin.double(), back))
            assert got.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("width", [1, 15, 64, 577])
@pytest.mark.parametrize("rows", [1, 64, 130])
def test_norms_and_their_slopes(kernels: ctypes.CDLL, width: int, rows: int) -> None:
    x, weight, grad = randn(rows, width), randn(width, seed=1), randn(rows, width, seed=2)
    wide = [one.double().requires_grad_() for one in (x, weight)]
    want = wide[1] * wide[0] / (wide[0].square().mean(-1, keepdim=True) + 1e-3).sqrt()
    out, r = cpu_kernels.rms_norm(x, weight, 1e-3)
    close(out, want)
    slopes = torch.autograd.grad(want, wide, grad.double())
    for got, slope in zip(cpu_kernels.rms_norm_backward(grad, x, weight, r), slopes, strict=True):
        close(got, slope, 1e-5)


def test_slopes_have_the_same_bits_with_any_threads(kernels: ctypes.CDLL) -> None:
    x, weight, grad, before = randn(300, 90), randn(90, seed=1), randn(300, 90, seed=2), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            z = randn(40, 3000, seed=3)
            out, r = cpu_kernels.rms_norm(x, weight, 1e-5)
            found.append(
                [
                    out,
                    *cpu_kernels.rms_norm_backward(grad, x, weight, r),
                    *cpu_kernels.softmax_logprobs_(z, torch.arange(40)),
                    z,
                ]
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("words", [1, 7, 256, 1000, 4099])
def test_probabilities_log_probs_and_entropies(kernels: ctypes.CDLL, words: int) -> None:
    logits, target = 4 * randn(9, words), torch.arange(9) * 37 % words
    if words > 7:
        logits[1, 3], logits[2, :5] = float("-inf"), -300.0  # words that cannot be drawn, or hardly
    want = torch.log_softmax(logits.double(), -1)
    p = logits.clone()
    logp, entropy = cpu_kernels.softmax_logprobs_(p, target)
    close(p, want.exp(), 1e-6)
    close(logp, want.gather(-1, target[:, None])[:, 0], 1e-6)
    close(entropy, torch.special.entr(want.exp()).sum(-1), 1e-5)


def test_logits_that_are_no_numbers_have_no_entropy_and_targets_are_words(kernels: ctypes.CDLL) -> None:
    z = torch.zeros(4, 300)
    z[0, 5], z[1], z[2, 7] = float("nan"), float("-inf"), float("inf")
    logp, entropy = cpu_kernels.softmax_logprobs_(z, torch.zeros(4, dtype=torch.long))
    assert logp.isnan().tolist() == entropy.isnan().tolist() == [True, True, True, False]
    for odd in (-1, 300):
        with pytest.raises(IndexError, match="outside the vocabulary of 300"):
            cpu_kernels.softmax_logprobs_(torch.zeros(1, 300), torch.tensor([odd]))


def test_targets_of_every_type_and_shapes_that_do_not_belong_together(kernels: ctypes.CDLL) -> None:
    """C would read beyond what is there."""
    want = cpu_kernels.softmax_logprobs_(randn(5, 9), torch.arange(5))
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert all(map(torch.equal, cpu_kernels.softmax_logprobs_(randn(5, 9), torch.arange(5, dtype=dtype)), want))
    for z, target in (
        (randn(5, 9), torch.arange(4)),
        (randn(2, 9), torch.arange(0)),
        (randn(9, 5).t(), torch.arange(5)),
    ):
        with pytest.raises(ValueError, match="targets for"):
            cpu_kernels.softmax_logprobs_(z, target)
    for call in (
        lambda: cpu_kernels.rms_norm(randn(3, 8), randn(4), 1e-5),
        lambda: cpu_kernels.rms_norm_backward(randn(2, 8), randn(3, 8), randn(8), randn(3)),
        lambda: cpu_kernels.ElementwiseKernels.swiglu(randn(8), randn(4)),
        lambda: cpu_kernels.ElementwiseKernels.swiglu_backward(randn(8), randn(8), randn(4)),
        lambda: cpu_kernels.ElementwiseKernels.rope(randn(1, 2, 5, 8), randn(1, 1, 8), randn(1, 1, 8), False),
    ):
        with pytest.raises(ValueError, match="shapes must be equal"):
            call()


def test_numbers_that_lie_elsewhere_are_not_for_them() -> None:
    with FakeTensorMode():
        assert not cpu_kernels.is_supported(torch.empty(3))
    assert cpu_kernels.is_supported(
        torch.empty(3), torch.nn.Parameter(torch.empty(3))
    ) and not cpu_kernels.is_supported(torch.empty(3).double())


def test_log_probs_beside_an_exact_kl_have_the_bits_of_those_alone(kernels: ctypes.CDLL) -> None:
    """So ratios of a first update are exactly 1, with a reference too; and the KL is that of float64."""
    hidden, weight, target = randn(40, 12), randn(300, 12, seed=1), torch.arange(40) * 7
    alone = token_stats(LMHead(weight), hidden, target, 0.7)
    reference = (LMHead(randn(300, 12, seed=2)), hidden)
    beside = token_stats(LMHead(weight), hidden, target, 0.7, reference)
    assert torch.equal(alone[0], beside[0]) and torch.equal(alone[1], beside[1])
    p, q = (torch.log_softmax(hidden.double() @ w.double().t() / 0.7, -1) for w in (weight, reference[0].weight))
    assert beside[2] is not None
    close(beside[2], (p.exp() * (p - q)).sum(-1), 1e-5)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_a_gradient_takes_them_and_is_that_without_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, found, called = ALGORITHMS["dr-grpo"], [], set()
    turning = [(cpu_kernels.ElementwiseKernels, name) for name in ("swiglu", "swiglu_backward", "rope")]
    for where, name in [
        *turning,
        *((cpu_kernels, name) for name in ("rms_norm", "rms_norm_backward", "softmax_logprobs_")),
    ]:
        plain = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *x, name=name, plain=plain: called.add(name) or plain(*x))
    for _ in range(2):
        learner = learner_of(model_of(kind, dtype=torch.float32), algorithm)
        learner.gradient(credited(batch_of(model_of(kind)), algorithm, learner), algorithm.objective)
        found.append(gradient_of(learner))
        assert len(called) == (0 if found[1:] else 6)
        monkeypatch.setattr(cpu_kernels, "load_library", lambda: None)
        called.clear()
    assert (found[0] - found[1]).abs().max() < 1e-5 * found[0].abs().max()


@pytest.mark.parametrize("native", [True, False])
def test_a_fused_model_computes_under_a_cast_too(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its products are in half precision, and what lies between them as torch has it."""
    if not native:
        monkeypatch.setattr(cpu_kernels, "load_library", lambda: None)
    plain, fused = (model_of(dtype=torch.float32).model for _ in range(2))
    assert fuse_layers(fused)
    ids = torch.arange(1, 9)[None]
    with torch.autocast("cpu", torch.bfloat16):
        want, got = (model(ids).logits.float() for model in (plain, fused))
    assert (got - want).abs().max() < 2e-2 * want.abs().max()


@pytest.mark.parametrize("native", [True, False])
def test_positions_that_rows_share_are_turned_as_the_model_turns_them(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cosines `[1 1 channel]`, which are spread over positions: no kernel takes them."""
    if not native:
        monkeypatch.setattr(cpu_kernels, "load_library", lambda: None)
    model = model_of(dtype=torch.float32).model
    where = sys.modules[type(model.get_decoder()).__module__]
    q, k, cos, sin = randn(1, 4, 5, 16), randn(1, 2, 5, 16, seed=1), randn(1, 1, 16, seed=2), randn(1, 1, 16, seed=3)
    want = where.apply_rotary_pos_emb(q, k, cos, sin)
    with fused_rope(model):
        assert where.apply_rotary_pos_emb.is_fused
        assert all(map(torch.equal, where.apply_rotary_pos_emb(q, k, cos, sin), want))


# ---- the sampler with and without them ----------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 96])
def test_responses_are_those_of_torch(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model_of(dtype=torch.float32, head_dim=16)
    prompts = Prompts.of(prompts_of())

    def in_room() -> LocalEngine:
        sampler = sampler_of(lm, rows=5)
        sampler.cache_tokens = room
        return sampler

    with monkeypatch.context() as context:
        seen: list[object] = []
        plain = PagedRunner.__call__
        context.setattr(PagedRunner, "__call__", lambda self: (seen.append(self.decode_layout), plain(self))[1])
        ours = in_room().generate(prompts, 4)
        assert seen and all(isinstance(layout, RowwiseDecodeLayout) for layout in seen)
    monkeypatch.setattr(cpu_kernels, "load_library", lambda: None)
    same(ours, in_room().generate(prompts, 4), 2e-5)


# ---- how they are made --------------------------------------------------------------------------------


def on_machine(monkeypatch: pytest.MonkeyPatch, machine: str, cpuinfo: str) -> None:
    lines = cpu_kernels._read_lines
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(
        cpu_kernels, "_read_lines", lambda path: cpuinfo.splitlines() if path == "/proc/cpuinfo" else lines(path)
    )


ARM = """processor\t: {number}
BogoMIPS\t: 50.00
Features\t: fp asimd{more}
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: {part}

"""


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "used", "own"),
    [
        ("x86_64", "model name\t: A\nflags\t\t: fpu avx2 fma\n", True, {"-march=native", "-mprefer-vector-width=512"}),
        ("x86_64", "flags\t\t: fpu avx2", True, {"-march=native", "-mprefer-vector-width=512"}),
        ("x86_64", "flags\t\t: fpu avx\n", False, {"-march=native", "-mprefer-vector-width=512"}),
        ("aarch64", ARM.format(number=0, more="", part="0xd0c"), True, {"-march=armv8-a", "-fno-schedule-insns"}),
        ("aarch64", "", True, {"-march=armv8-a", "-fno-schedule-insns"}),
        ("riscv64", "flags\t\t: avx2 \n", False, set()),
    ],
)
def test_which_machines_have_them_and_what_they_compile_for(
    machine: str, cpuinfo: str, used: bool, own: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_machine(monkeypatch, machine, cpuinfo)
    assert cpu_kernels.can_compile() is used
    flags = runpy.run_path(cpu_kernels.__file__)["COMPILER_FLAGS"]
    assert {flag for flag in flags if flag.startswith(("-m", "-fno-sched"))} == own and "-O3" in flags
    monkeypatch.setenv("ASCENT_NATIVE", "0")
    assert not cpu_kernels.can_compile()


def test_processors_of_arm_differ_by_part_and_features_and_not_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def processor(*cores: dict[str, object]) -> str:
        on_machine(monkeypatch, "aarch64", "".join(ARM.format(**core) for core in cores))
        return cpu_kernels._processor_info()

    one, two, other = (
        {"number": n, "more": "", "part": part} for n, part in ((0, "0xd0c"), (1, "0xd0c"), (1, "0xd40"))
    )
    assert processor(one) == processor(one, two) != processor(other)
    assert processor(one, other) == processor(other, one) != processor(one)
    assert processor(one | {"more": " sve"}) != processor(one) and "0xd0c" in processor(one)


def loaded_in(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from ascent.ops import cpu_kernels; print(cpu_kernels.load_library())"
    env = (
        os.environ
        | {"XDG_CACHE_HOME": str(folder), "PYTHONPATH": str(Path(cpu_kernels.__file__).parents[2])}
        | environment
    )
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_it_is_compiled_once_and_again_if_the_file_is_damaged(tmp_path: Path) -> None:
    assert "CDLL" in loaded_in(tmp_path).stdout
    (made,) = (tmp_path / "ascent" / "kernels").iterdir()
    before = made.stat().st_mtime_ns
    assert "CDLL" in loaded_in(tmp_path).stdout and made.stat().st_mtime_ns == before
    made.write_bytes(made.read_bytes()[:1000])
    again = loaded_in(tmp_path)
    assert "CDLL" in again.stdout and made.stat().st_size > 1000 and not again.stderr
    assert "CDLL" in loaded_in(tmp_path).stdout and [made] == list(made.parent.iterdir())


def test_without_a_compiler_torch_is_used_and_without_a_cache_it_is_compiled_every_time(tmp_path: Path) -> None:
    for environment in ({"ASCENT_NATIVE": "0"}, {"PATH": str(tmp_path)}):
        done = loaded_in(tmp_path, **environment)
        assert done.stdout == "None\n" and not done.stderr
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho it is broken >&2; exit 1\n")
    compiler.chmod(0o755)
    broken = loaded_in(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert broken.stdout == "None\n" and "cannot be compiled (it is broken)" in broken.stderr
    compiler.unlink()
    (tmp_path / "file").write_text("")
    nowhere = loaded_in(tmp_path / "file")
    assert "CDLL" in nowhere.stdout and not nowhere.stderr  # for this process alone
