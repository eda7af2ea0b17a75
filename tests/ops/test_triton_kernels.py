"""Every Triton kernel against its reference in plain torch, in three precisions, at odd sizes.

On a GPU, or on a CPU by Triton's interpreter (`make kernels-test`; tests/triton_interpreter.py says what that cannot
run). A case names the functions that it runs, and the interpreter counts them: a kernel without a case fails a test
that needs no Triton.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ascent
from ascent.core.sampling_params import SamplingParams
from ascent.models.fused_layers import ElementwiseReference
from ascent.models.lm_head import LMHeadReference
from ascent.ops import decode_ops
from ascent.ops.decode_state import BLOCK_SIZE, FORCED_LENGTH
from ascent.training.compact_adamw import ReferenceOps, join_master, random_keys, split_master
from tests.inference.test_cuda_graph_runner import filled_state, random_attention_params
from tests.triton_interpreter import INSTRUCTIONS, Interpreter, is_interpreted, spans_of

INTERPRETED = is_interpreted() and not torch.cuda.is_available()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_kernels = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE == "cpu" and not INTERPRETED),
    reason="needs Triton and a GPU, or its interpreter: make kernels-test",
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""From 1 to the next number."""
Case = Callable[[torch.dtype, pytest.MonkeyPatch], None]
CASES: dict[str, tuple[Case, frozenset[str]]] = {}
INTERPRETER = Interpreter()
if INTERPRETED:
    INTERPRETER.install()


def case(*functions: str) -> Callable[[Any], Any]:
    """A test of kernels in one precision; `functions`: `module.function` of all that it runs."""

    def add(function: Case) -> Case:
        CASES[function.__name__] = function, frozenset(functions)
        return function

    return add


def noise(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, dtype)


def near(got: Tensor, want: Tensor, places: float = 2.0) -> None:
    """Every number is its reference in float64, but for some units in the last place of it or of a typical number.

    In half precision that is where results are rounded. In float32 sums are rounded, too, and so are exponentials.
    """
    places *= 16 if got.dtype == torch.float32 else 1
    assert got.shape == want.shape and want.dtype == torch.float64
    size = want.abs() + want.pow(2).mean().sqrt()
    excess = (got.double() - want).abs() / (EPSILON[got.dtype] * size.clamp(min=1e-30))
    assert got.isfinite().all() and float(excess.max()) < places, (float(excess.max()), tuple(want.shape))


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.double() for x in tensors]


# ---- which there are ------------------------------------------------------------------------------


def kernels_of(source: str) -> list[str]:
    """The functions that `triton.jit` decorates."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            names = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
            found += [node.name] if {"triton.jit", "jit"} & set(names) else []
    return found


def every_kernel() -> set[str]:
    sources = {path.stem: path.read_text() for path in Path(ascent.__file__).parent.rglob("ops/triton_*.py")}
    elsewhere = [p for p in Path(ascent.__file__).parent.rglob("*.py") if not p.match("ops/triton_*.py")]
    assert not [path for path in elsewhere if "triton.jit" in path.read_text()], (
        "Triton kernels belong into ascent/ops/triton_*.py"
    )
    return {f"{module}.{name}" for module, source in sources.items() for name in kernels_of(source)}


def test_every_kernel_has_a_case() -> None:
    there, tried = every_kernel(), frozenset().union(*(functions for _, functions in CASES.values()))
    assert len(there) > 30
    assert not there - tried, "kernels that no case of this file runs"
    assert not tried - there, "cases of kernels that are not there"


def test_a_kernel_is_found_however_it_is_decorated() -> None:
    source = "@triton.jit\ndef a(): ...\n@triton.jit(do_not_specialize=['x'])\ndef b(): ...\n@cache\ndef c(): ...\n"
    assert kernels_of(source) == ["a", "b"]


# ---- between the matrix products -------------------------------------------------------------------

NORM = ("triton_norms._add_rms_norm", "triton_norms.scale_by_weight", "triton_matmul.wait_for_inputs")
GATED = ("triton_decoding._act_and_mul", "triton_matmul.act_and_mul", "triton_matmul.wait_for_inputs")
ADAPTED = ("triton_decoding._add_lora", "triton_decoding._lora_matmul", "triton_matmul.wait_for_inputs")


@case(*NORM)
def add_norm(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Rows that are apart, sums in parts, residuals in float32, and the three forms of a norm."""
    from ascent.ops.triton_norms import add_rms_norm

    for rows, width in ((5, 48), (1, 1), (3, 77), (2, 300)):
        x, y, weight = noise(dtype, rows, width), noise(dtype, rows, width + 5)[:, :width], noise(dtype, width)
        parts = noise(torch.float32, 3, rows, width)
        for add in (None, 0.0, 1.0):
            for other in (y, None, parts):
                for residual in (x, x.float()):
                    total, normed = add_rms_norm(residual, other, weight, 1e-5, add)
                    more = (
                        None
                        if other is None
                        else other.double()
                        if other.ndim == 2
                        else other.sum(0).to(dtype).double()
                    )
                    want = decode_ops.add_rms_norm(residual.double(), more, weight.double(), 1e-5, add)
                    assert total.dtype == residual.dtype and normed.dtype == dtype
                    near(total, want[0]), near(normed, want[1], 3)


@case(*GATED)
def gated(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    from ascent.ops import triton_decoding

    for rows, width in ((5, 1500), (1, 1), (3, 1025)):
        both = noise(dtype, rows, 2 * width, scale=3)
        for gelu in (False, True):
            near(
                triton_decoding.gated_activation(both, gelu=gelu),
                decode_ops.gated_activation(both.double(), gelu=gelu),
                2,
            )


@case(*ADAPTED)
def adapted(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Adapters beside a matrix, whose rows are apart; a rank above the kernel's goes to torch."""
    from ascent.ops import triton_decoding

    for rows, out, rank in ((5, 67, 3), (70, 96, 16), (1, 1, 1), (3, 9, 136)):
        whole, b = noise(dtype, rows, out + rank + 8), noise(dtype, out, rank, scale=rank**-0.5)
        want = decode_ops.add_lora(*wide(whole, b))
        near(triton_decoding.add_lora(whole.clone(), b), want)


@case("triton_decoding._lora_act_and_mul", "triton_decoding._lora_matmul", *GATED[1:])
def gated_adapted(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:

    from ascent.ops import triton_decoding

    for rows, width, ranks in ((5, 151, (4, 4)), (17, 33, (0, 16)), (1, 5, (13, 0)), (3, 130, (7, 20))):
        rank = sum(ranks)
        whole, b = noise(dtype, rows, 2 * width + rank + 3), noise(dtype, 2 * width, rank, scale=rank**-0.5)
        b[:width, ranks[0] :], b[width:, : ranks[0]] = 0, 0
        for gelu in (False, True):
            got = triton_decoding.gated_activation(whole.clone(), b, ranks, gelu)
            near(got, decode_ops.gated_activation(*wide(whole, b), ranks, gelu), 4)


@case("triton_elementwise._swiglu", "triton_elementwise._swiglu_backward")
def gate_of_an_update(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    from ascent.ops import triton_elementwise

    for shape in ((3, 77), (1, 1), (41, 51)):
        grad, gate, up = (noise(dtype, *shape, scale=3) for _ in range(3))
        near(triton_elementwise.swiglu(gate, up), ElementwiseReference.swiglu(*wide(gate, up)))
        wants = ElementwiseReference.swiglu_backward(*wide(grad, gate, up))
        for got, want in zip(triton_elementwise.swiglu_backward(grad, gate, up), wants, strict=True):
            near(got, want)


@case("triton_elementwise._rope")
def rotary_embedding_of_an_update(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Cosines and sines of both halves may differ; heads and positions may lie in either order."""
    from ascent.ops import triton_elementwise

    for heads, positions, channel in ((9, 5, 64), (17, 3, 24), (1, 1, 2), (20, 2, 96)):
        x, cos, sin = noise(dtype, 1, positions, heads, channel), *(noise(dtype, 1, positions, channel) for _ in "ab")
        for laid in (
            x.transpose(1, 2),
            x.transpose(1, 2).contiguous(),
            x.transpose(2, 3).contiguous().permute(0, 3, 1, 2)[:, :heads],
        ):
            if laid.shape != (1, heads, positions, channel):
                continue
            for back in (False, True):
                got = triton_elementwise.rope(laid, cos, sin, back)
                near(got, ElementwiseReference.rope(*wide(laid, cos, sin), back))


# ---- matrix products -------------------------------------------------------------------------------

PRODUCT = (
    "triton_matmul._matmul",
    "triton_matmul._add_dot",
    "triton_matmul._initial_sums",
    "triton_matmul.wait_for_inputs",
)
TILES = [
    (5, 48, 64, (16, 32, 32)),
    (70, 104, 96, (64, 64, 32, 2)),
    (3, 36, 72, (16, 16, 16, 3)),
    (1, 16, 136, (32, 64, 64, 8)),
]
"""Rows, columns, numbers in a sum; and the tile: rows, columns and numbers of one program, parts of a sum."""


def check_products(dtype: torch.dtype) -> None:
    from ascent.ops.triton_matmul import Tile, tiled_matmul

    for rows, width, depth, sizes in TILES:
        tile = Tile(*sizes)
        x = noise(dtype, rows, depth + 8)[:, :depth]
        weight, bias = noise(dtype, width, depth, scale=depth**-0.5), noise(dtype, width)
        for b in (None, bias):
            got = tiled_matmul(x, weight, b, tile)
            want = decode_ops.linear(x.double(), weight.double(), None if b is None else b.double())
            assert (got.ndim == 3) == (tile.splits > 1)
            near(got.sum(0) if tile.splits > 1 else got, want)
            for gate in (None, "silu", "gelu") if tile.splits == 1 else ():
                if gate is not None:
                    got = tiled_matmul(x, weight, b, tile, gate)
                    near(got, decode_ops.gated_activation(want, gelu=gate == "gelu"), 4)


@case(*PRODUCT, "triton_matmul.act_and_mul")
def products_with_few_rows(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    check_products(dtype)


# ---- a decoding step -------------------------------------------------------------------------------

ATTEND = (
    *("_load_rope", "_attend_range", "_write_new_token", "_attend_cached", "_norm_and_rope", "_empty_softmax"),
    *("_write_output", "head_dim_mask"),
)  # fmt: skip
ATTEND = (
    *(f"triton_paged_attention.{name}" for name in ATTEND),
    "triton_norms.scale_by_weight",
    "triton_matmul.wait_for_inputs",
)


def check_attention(dtype: torch.dtype, patch: pytest.MonkeyPatch, cuts: Iterable[Any]) -> list[Tensor]:
    """Lanes at all sorts of lengths; head dimensions that are no powers of 2; shared heads; norms of all forms."""
    from ascent.ops import triton_paged_attention

    caches = []
    for cut, (normed, repeat, add, channel) in zip(
        cuts, ((False, 3, None, 32), (True, 1, None, 16), (True, 2, 1.0, 24), (True, 17, 0.0, 8)), strict=True
    ):
        patch.setattr(triton_paged_attention, "MANY_PROGRAMS", 1 if repeat == 3 else 1000)
        mine, plain = filled_state(dtype, DEVICE, channel), filled_state(torch.float64, DEVICE, channel)
        for ours, theirs in zip(mine.cache.layers[0], plain.cache.layers[0], strict=True):
            theirs.copy_(ours)
        turn = random_attention_params(dtype, DEVICE, normed, channel, add)
        exact_norms = (
            None if turn.qk_norms is None else tuple(n._replace(weight=n.weight.double()) for n in turn.qk_norms)
        )
        exact = decode_ops.AttentionParams(turn.cos.double(), turn.sin.double(), exact_norms, turn.scale)  # type: ignore[arg-type]
        qkv = noise(dtype, 6, (2 * repeat + 4) * channel + 16)[:, :-16]
        caches += mine.cache.layers[0]
        parts = None if cut is None else triton_paged_attention.split_long_rows(mine, 6, *cut)
        near(
            triton_paged_attention.paged_attention(qkv, turn, mine, 0, parts),
            decode_ops.paged_attention(qkv.double(), exact, plain, 0),
            8,
        )
        assert not mine.finished_splits.any()
        for ours, theirs in zip(mine.cache.layers[0], plain.cache.layers[0], strict=True):
            near(ours, theirs, 4)
    return caches


@case("triton_paged_attention._attend_rows", *ATTEND)
def attention_over_blocks(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    check_attention(dtype, patch, [None] * 4)


@case(
    "triton_paged_attention._attend_splits",
    "triton_paged_attention._merge_splits",
    "triton_paged_attention._split_long_rows",
    *ATTEND,
)
def attention_over_parts_of_rows(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    check_attention(dtype, patch, [(BLOCK_SIZE, 99), (BLOCK_SIZE, 2), (2 * BLOCK_SIZE, 99), (BLOCK_SIZE, 5)])


@case(
    "triton_decoding._rotate_and_write_kv",
    "triton_decoding._gather_kv",
    "triton_paged_attention.head_dim_mask",
    "triton_matmul.wait_for_inputs",
)
def given_tokens(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:

    from ascent.ops import triton_decoding

    for tokens, heads, shared, channel in ((7, 9, 3, 64), (1, 1, 1, 2), (5, 20, 8, 24), (3, 3, 1, 96)):
        blocks = 3
        qkv = noise(dtype, tokens, (heads + 2 * shared) * channel + 8)[:, :-8]
        cos, sin = noise(dtype, tokens, channel), noise(dtype, tokens, channel)
        where = torch.randperm(blocks * BLOCK_SIZE)[:tokens].to(DEVICE)
        mine = tuple(torch.zeros(blocks, shared, BLOCK_SIZE, channel, device=DEVICE, dtype=dtype) for _ in range(2))
        plain = tuple(x.double() for x in mine)
        got = triton_decoding.rotate_and_write_kv(qkv, cos, sin, where // BLOCK_SIZE, where % BLOCK_SIZE, mine)
        near(got, decode_ops.rotate_and_write_kv(*wide(qkv, cos, sin), where // BLOCK_SIZE, where % BLOCK_SIZE, plain))
        near(mine[0], plain[0])
        assert torch.equal(mine[1].double(), plain[1]), "values are not rotated"
        seen = torch.randint(blocks * BLOCK_SIZE, (33,)).to(DEVICE)
        for a, b in zip(
            triton_decoding.gather_kv(mine, seen // BLOCK_SIZE, seen % BLOCK_SIZE),
            decode_ops.gather_kv(mine, seen // BLOCK_SIZE, seen % BLOCK_SIZE),
            strict=True,
        ):
            assert torch.equal(a, b)


@case(
    "triton_decoding._block_sums",
    "triton_decoding._sample_next_tokens",
    "triton_decoding._invert_cdf",
    "triton_decoding._uniform_from_seed",
    "triton_matmul.wait_for_inputs",
)
def draws(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Tokens, their log-probs, and what becomes of a lane: ended, at its limit, given tokens, already done."""
    from ascent.ops import triton_decoding

    for vocab, greedy in ((37, False), (37, True), (1, False), (257, False), (9001, False), (9001, True)):
        mine, plain = filled_state(torch.float32, DEVICE), filled_state(torch.float32, DEVICE)
        for board in (mine, plain):
            board.temperature.fill_(0.7)
            board.stop_tokens[0] = 5
            board.state[FORCED_LENGTH, 2], board.tokens[2, 5:7] = 7, 5
        for _ in range(3):
            logits = noise(dtype, 6, vocab, scale=3)
            logits[:, vocab // 2] = float("-inf") if vocab > 1 else 0.0
            triton_decoding.sample_next_tokens(logits, mine, SamplingParams(), greedy)
            decode_ops.sample_next_tokens(logits, plain, SamplingParams(), greedy)
        assert torch.equal(mine.state, plain.state) and torch.equal(mine.tokens, plain.tokens)
        assert float((mine.logp - plain.logp).abs().max()) < 1e-5


# ---- the head and the optimizer --------------------------------------------------------------------


@case("triton_lm_head._logprobs_and_entropy", "triton_lm_head._logits_grad")
def log_probs_and_entropy(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Logits are float32 in every precision; their gradient is written in the precision of the head."""
    from ascent.ops import triton_lm_head

    for rows, vocab in ((3, 1000), (2, 4097), (1, 2), (2, 9001)):
        z, target = noise(torch.float32, rows, vocab, scale=3), torch.randint(vocab, (rows,)).to(DEVICE)
        exact = LMHeadReference.logprobs_and_entropy(z.double(), target, 0.7)
        found = triton_lm_head.logprobs_and_entropy(z, target, 0.7)
        for got, want in zip(found, exact, strict=True):
            assert float((got - want).abs().max()) < 1e-5
        g_logp, g_entropy = noise(torch.float32, rows), noise(torch.float32, rows)
        for bent in (None, (g_entropy, exact[1].float())):
            got = triton_lm_head.logits_grad(z, target, exact[2].float(), g_logp, bent, 0.7, dtype)
            exact_bent = None if bent is None else (g_entropy.double(), exact[1])
            want = LMHeadReference.logits_grad(
                z.double(), target, exact[2], g_logp.double(), exact_bent, 0.7, torch.float64
            )
            assert got.dtype == dtype
            near(got, want)


@case("triton_adamw._add", "triton_adamw._step", "triton_adamw._random", "triton_adamw._round_to_bfloat16")
def steps_of_adamw_in_bfloat16(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """To the bit, but for numbers on the edge between two roundings. Gradients may have any type."""
    from ascent.ops import triton_adamw

    group = {"betas": (0.9, 0.999), "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8}
    for count in (1, 1023, 5001):
        sides, master, keys = (
            [],
            noise(torch.float32, count, scale=0.02),
            (random_keys(5, 1, 9, 0), random_keys(5, 1, 9, 1)),
        )
        m, v = noise(torch.bfloat16, count, scale=1e-2), noise(torch.bfloat16, count, scale=1e-4).abs()
        grad = noise(dtype, count, scale=1e-2)
        for ops in (ReferenceOps, triton_adamw):
            p, low = split_master(master)
            state, total = (p, low, m.clone(), v.clone()), v.clone()
            ops.step(*state, grad, torch.tensor(0.7, device=DEVICE), keys[0], 9, group)  # type: ignore[attr-defined]
            ops.add(total, grad, keys[1])  # type: ignore[attr-defined]
            sides.append((join_master(p, low), *state[2:], total))
        (wanted, *others), (found, *rest) = sides
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
        for got, want in zip(rest, others, strict=True):
            assert float((got != want).float().mean()) <= 0.01 and torch.allclose(got, want, rtol=2e-2, atol=0)
    bits = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000, 0x3F807FFF, 0x00008000], dtype=torch.int32, device=DEVICE)
    p, low = split_master(bits.view(torch.float32))  # masters half way between two parameters, which do not move
    want, zeros = (p.clone(), low.clone()), [torch.zeros_like(p) for _ in range(2)]
    still = group | {"lr": 0.0, "weight_decay": 0.0}
    triton_adamw.step(
        p, low, *zeros, torch.zeros(5, device=DEVICE, dtype=dtype), torch.ones((), device=DEVICE), keys[0], 1, still
    )
    assert torch.equal(p, want[0]) and torch.equal(low, want[1])


# ---- what only a GPU does: prefetches and pdl_options launches -------------------------------------------


def launch_early(patch: pytest.MonkeyPatch) -> None:
    """As on Hopper, where a kernel starts before the one before it has ended, and asks for memory meanwhile."""
    from ascent.ops import triton_decoding, triton_matmul, triton_norms, triton_paged_attention

    for module in (triton_decoding, triton_norms, triton_paged_attention, triton_matmul):
        patch.setattr(module, "pdl_options", lambda: {"PDL": True})
    patch.setattr(triton_matmul, "gdc_wait", lambda: INTERPRETER.record("griddepcontrol.wait"))
    patch.setattr(
        triton_matmul, "gdc_launch_dependents", lambda: INTERPRETER.record("griddepcontrol.launch_dependents")
    )


@case(
    *PRODUCT,
    "triton_matmul.act_and_mul",
    "triton_matmul.prefetch_l2",
    "triton_paged_attention._prefetch_blocks",
    "triton_paged_attention._attend_rows",
    *ATTEND,
)
def prefetches(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Results stay the same, and what is asked for lies in the matrix or in the cache, aligned as the GPU wants it."""
    from ascent.ops.triton_matmul import Tile, tiled_matmul

    if not INTERPRETED:
        return
    launch_early(patch)
    if dtype != torch.float32:  # `choose_tile`: float32 has no such products
        for rows, width, depth, sizes in TILES:
            x, weight = noise(dtype, rows, depth), noise(dtype, width, depth, scale=depth**-0.5)
            got = tiled_matmul(x, weight, None, tile := Tile(*sizes))
            near(got.sum(0) if tile.splits > 1 else got, decode_ops.linear(*wide(x, weight), None))
            near(
                tiled_matmul(x, weight, None, tile._replace(splits=1), "silu"),
                decode_ops.gated_activation(decode_ops.linear(*wide(x, weight), None)),
                4,
            )
            asked_for(weight)
    else:
        check_products(dtype)
        INTERPRETER.prefetched.clear()
    asked_for(*check_attention(dtype, patch, [None] * 4))
    assert set(INTERPRETER.instructions) == set(INSTRUCTIONS)


def asked_for(*tensors: Tensor) -> None:
    asked, spans = INTERPRETER.prefetched.copy(), spans_of(*tensors)
    INTERPRETER.prefetched.clear()
    assert asked
    for address, size in asked:
        assert address % 16 == 0 and size % 16 == 0 and size > 0
        assert any(first <= address and address + size <= end for first, end in spans), "memory of something else"


@runs_kernels
@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_is_its_reference(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    check, functions = CASES[name]
    torch.manual_seed(0)
    INTERPRETER.clear()
    check(dtype, monkeypatch)
    if INTERPRETED:
        assert INTERPRETER.functions == functions, "a case names exactly what it runs"


# ---- the corrections of the interpreter ------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter: make kernels-test")
def test_the_interpreter_rounds_and_multiplies_bfloat16_as_torch_does() -> None:
    from tests.triton_kernels import multiply, round_to_bfloat16

    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 3.4e38, 1e-40, 1.00390625, 1.01171875])
    x = torch.cat([special, torch.randn(1024 - len(special))])
    y = torch.empty(1024, dtype=torch.bfloat16)
    round_to_bfloat16[(1,)](x, y, 1024)
    assert torch.equal(y.view(torch.int16), x.bfloat16().view(torch.int16))
    a, b, out = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16(), torch.empty(16, 16)
    multiply[(1,)](a, b, out, 16)
    assert (out - a.float() @ b.float()).abs().max() < 1e-5
