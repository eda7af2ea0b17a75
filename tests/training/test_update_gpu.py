"""The update on a GPU: fused attention, fused head, gradients in float32, a batch that lives on the card.

On a CPU the same code runs on the formulas that the kernels stand for; the kernels themselves need a GPU.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ascent.build.language_reward_model import add_head, response_scores
from ascent.core.algorithms import ALGORITHMS
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.core.types import Batch
from ascent.models import CausalLM, fused_layers
from ascent.models import lm_head as head_module
from ascent.models.causal_lm import set_mixed_precision
from ascent.models.fused_layers import fuse_layers
from ascent.models.lm_head import FusedTokenStats, LMHead, LMHeadReference, token_stats
from ascent.models.packed_attention import (
    PackedGroup,
    PackedLayout,
    VarlenAttention,
    VarlenSegments,
    packed_attention_enabled,
    varlen_kernel,
)
from ascent.ops import load_kernels
from ascent.training import packing
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from ascent.training.micro_batches import activation_bytes_per_token
from ascent.training.packing import DeviceBatch, hidden_states, host_batch, to_device
from tests.flash_formulas import FlashFormulas
from tests.language import batch_of, model_of
from tests.training.test_language_learner import awkward, credited, dense, learner_of

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# ---- attention in segments ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Phi3"])
def test_varlen_segments_match_groups(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states, and their gradient in every parameter, are those of a group at a time."""
    lm = model_of(kind)
    batch, found = awkward(lm), []
    for fused in (None, FlashFormulas):
        monkeypatch.setattr(packing, "PackedLayout", lambda groups, fused=fused: PackedLayout(groups, fused=fused))
        lm.model.zero_grad()
        with packed_attention_enabled(lm.model):
            hidden = hidden_states(lm, batch)
        torch.sin(3 * hidden).sum().backward()
        found.append((hidden.detach(), [p.grad.clone() for p in lm.model.parameters() if p.grad is not None]))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-10
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert (a - b).abs().max() < 1e-10 * max(1.0, float(a.abs().max()))


def test_varlen_segments_of_a_row() -> None:
    """A prompt of 3 with responses of 2 and 1, then a prompt of 2 alone: derived by hand."""
    spans = VarlenSegments.of([PackedGroup(0, 3, (2, 1)), PackedGroup(6, 2, ())], torch.device("cpu"))
    assert spans.cu_seqlens_q.tolist() == [0, 3, 5, 6, 8]
    assert spans.cu_seqlens_k.tolist() == [0, 3, 8, 12, 14]
    assert spans.key_tokens.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert spans.own_keys.tolist() == [0, 1, 2, 6, 7, 11, 12, 13]
    assert spans.repeated_keys.tolist() == [3, 4, 5, 8, 9, 10]
    assert (spans.max_seqlen_q, spans.max_seqlen_k) == (3, 5)


@on_gpu
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("heads", "shared", "channel"), [(9, 3, 64), (12, 2, 128)])
def test_flash_varlen_matches_reference(
    heads: int, shared: int, channel: int, dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(0)
    groups = [PackedGroup(0, 37, (130, 1, 64)), PackedGroup(232, 5, (300,)), PackedGroup(537, 3, ())]
    spans = VarlenSegments.of(groups, torch.device("cuda"))
    rows = [torch.randn(540, n, channel, device="cuda", dtype=dtype) for n in (heads, shared, shared)]
    grad = torch.randn(540, heads, channel, device="cuda", dtype=dtype)
    exact = [x.double().cpu().requires_grad_() for x in rows]
    copy_to_host = VarlenSegments.of(groups, torch.device("cpu"))
    want = VarlenAttention.apply(*exact, copy_to_host, 0.1, FlashFormulas)
    wants = [want, *torch.autograd.grad(want, exact, grad.double().cpu())]
    rows = [x.requires_grad_() for x in rows]
    got = VarlenAttention.apply(*rows, spans, 0.1, varlen_kernel(rows[0]))
    gots = [got, *torch.autograd.grad(got, rows, grad)]
    for a, b in zip(gots, wants, strict=True):
        assert (a.double().cpu() - b).norm() / b.norm() < bound


# ---- the head in few passes -----------------------------------------------------------------------


def numbers(entropy_gradient: bool, *values: Tensor, mix: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    used = values if entropy_gradient else values[:1]
    total = sum((m * v).sum() for m, v in zip(mix, used, strict=False))
    return [*(v.detach() for v in values), *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.7, 1.5)])
def test_fused_head_matches_reference(entropy_gradient: bool, temperature: float, scale: float) -> None:
    torch.manual_seed(0)
    h, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((11, 6), (19, 6), (19,)))
    target, mix = torch.randint(19, (11,)), torch.randn(2, 11, dtype=torch.float64)
    got = FusedTokenStats.apply(h, w, b, target, 4, scale / temperature, entropy_gradient, LMHeadReference)
    want = dense(LMHead(w, b, scale), h, target, temperature, None)[:2]
    found = [numbers(entropy_gradient, *values, mix=mix, inputs=(h, w, b)) for values in (got, want)]
    for a, c in zip(*found, strict=True):
        assert (a - c).abs().max() < 1e-12
    assert got[1].requires_grad == entropy_gradient


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [{}, {"scale": 0.5}, {"cap": 30.0}], ids=str)
def test_logits_are_float32_before_the_softmax_without_kernels(
    dtype: torch.dtype, more: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits as large as 36, which bfloat16 would round by 0.125."""
    monkeypatch.setattr(head_module, "lm_head_kernels", lambda _: None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    h, w = (torch.randn(*s, generator=generator).to(device, dtype) for s in ((16, 64), (203, 64)))
    target = torch.randint(203, (16,), generator=generator).to(device)
    other = torch.randn(16, 64, generator=generator).to(device, dtype)
    found = token_stats(LMHead(w, **more), h, target, reference=(LMHead(w, **more), other))
    exact = LMHead(w.double(), **more)
    want = token_stats(exact, h.double(), target, reference=(exact, other.double()))
    for near, wide in zip(found, want, strict=True):
        assert near is not None and wide is not None
        assert float((near - wide).abs().max()) < 1e-3
    logp, _, _ = token_stats(LMHead(w, **more), h.requires_grad_(), target)
    slope, wide_slope = (torch.autograd.grad(out.sum(), x) for out, x in ((logp, h), _exact_logp(exact, h, target)))
    assert float((slope[0] - wide_slope[0]).norm() / wide_slope[0].norm()) < 1e-2


def _exact_logp(head: LMHead, h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    wide = h.detach().double().requires_grad_()
    return token_stats(head, wide, target)[0], wide


@on_gpu
def test_mixed_precision_memory_matches_the_plan() -> None:
    """The residual stream in float32, at the two norms of each layer."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    kept = {}
    for mixed in (False, True):
        lm = model_of(dtype=torch.bfloat16, **shape)
        lm.model.cuda()
        set_mixed_precision(lm.model, mixed)
        fuse_layers(lm.model)
        kept[mixed] = activation_bytes_per_token(lm)
    assert kept[True] - kept[False] == pytest.approx(2 * 4 * 2 * 256, rel=0.25)


@on_gpu
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("vocab", [1000, 49_152])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_head_kernels_match_reference(entropy_gradient: bool, vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = ((70, 64), (vocab, 64), (vocab,))
    h, w, b = (torch.randn(*s, device="cuda", dtype=dtype).requires_grad_() for s in shapes)
    target, mix = torch.randint(vocab, (70,), device="cuda"), torch.randn(2, 70, device="cuda")
    got = FusedTokenStats.apply(h, w, b, target, 32, 0.8, entropy_gradient)
    exact = [x.detach().double().requires_grad_() for x in (h, w, b)]
    want = FusedTokenStats.apply(*exact, target, 32, 0.8, entropy_gradient, LMHeadReference)
    assert (got[0] - want[0]).abs().max() < 1e-3, "float32 log-probs, whatever the parameters are"
    assert (got[1] - want[1]).abs().max() < 1e-3
    gots = numbers(entropy_gradient, *got, mix=mix, inputs=(h, w, b))[2:]
    wants = numbers(entropy_gradient, *want, mix=mix.double(), inputs=tuple(exact))[2:]
    for a, c in zip(gots, wants, strict=True):
        assert (a.double() - c).norm() / c.norm() < 1e-2


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_head_gradient_is_accumulated_over_chunks_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a sum over 85 chunks is 0.85 % off, because each addition is rounded; a chunk alone is 0.15 %."""
    torch.manual_seed(0)
    weight, bias = (torch.randn(64, 32) * 0.2).bfloat16(), torch.randn(64).bfloat16()
    hidden, target = (torch.randn(4096, 32) + 0.5).bfloat16(), torch.randint(0, 8, (4096,))
    monkeypatch.setattr(LMHead, "chunk", lambda _: 48)

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_() for x in (weight, bias)]
        logp, _, _ = token_stats(LMHead(*inputs), hidden.to(dtype), target)
        return [g.float() for g in torch.autograd.grad(logp.mean(), inputs)]

    for narrow, exact in zip(gradients(torch.bfloat16), gradients(torch.float32), strict=True):
        assert (narrow - exact).norm() / exact.norm() < 2.5e-3


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_exact_kl_uses_the_same_logits_in_update_and_scoring(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reference (the update) as without one (scoring), logits come out of the product unrounded."""
    if device == "cpu":
        monkeypatch.setattr(head_module, "lm_head_kernels", lambda _: LMHeadReference)
    torch.manual_seed(0)
    head = LMHead(torch.randn(50, 32, device=device).bfloat16())
    hidden, target = torch.randn(40, 32, device=device).bfloat16(), torch.randint(50, (40,), device=device)
    scored, entropy, _ = token_stats(head, hidden, target)
    updated, again, kl = token_stats(head, hidden, target, reference=(head, hidden))
    assert kl is not None and kl.abs().max() < 1e-5
    assert (scored - updated).abs().max() < 1e-4 and (entropy - again).abs().max() < 1e-4


# ---- a batch on the card --------------------------------------------------------------------------


def placed(batch: Batch) -> DeviceBatch:
    """As on a card: the tensors of the device say nothing of lengths, and must not be asked."""
    from dataclasses import fields

    return DeviceBatch(**{f.name: getattr(batch, f.name) for f in fields(Batch)}, host=batch)


@pytest.mark.parametrize("shares", [True, False])
def test_packed_batch_matches_batch(shares: bool) -> None:
    lm = model_of()
    lm.can_share_prompts = shares
    algorithm = ALGORITHMS["grpo"]
    learner = learner_of(lm, algorithm)
    batch = credited(awkward(lm), algorithm, learner)
    with learner._attention():
        want, got = learner.evaluate(batch), learner.evaluate(placed(batch))
    assert torch.equal(want.logp, got.logp)
    assert host_batch(placed(batch)) is batch
    assert to_device(batch, torch.device("cpu")) is batch


def test_packed_batch_has_the_same_values() -> None:
    lm = model_of()
    critic = LanguageCritic(lm, shared=False)
    torch.nn.init.normal_(critic.head.weight)
    batch = awkward(lm)
    with critic.attention():
        assert torch.equal(critic(batch), critic(placed(batch)))


# ---- gradients of bfloat16 parameters -------------------------------------------------------------


@pytest.mark.long
def test_micro_batch_gradients_are_accumulated_in_float32() -> None:
    """Each part's gradient is bfloat16's, and their sum is float32's: small parts are not lost in it."""
    lm = model_of(dtype=torch.bfloat16)
    algorithm = ALGORITHMS["dr-grpo"]
    learner = LanguageLearner(lm, algorithm.update, False, algorithm.outputs, micro_batch=8)
    batch = credited(batch_of(lm), algorithm, learner)
    want = [torch.zeros_like(p) for p in learner.trainable()]
    for micro in learner.split(batch):
        single = LanguageLearner(lm, algorithm.update, False, algorithm.outputs)
        single.gradient(micro, algorithm.objective)
        for total, p in zip(want, single.trainable(), strict=True):
            total += p.grad
    learner.gradient(batch, algorithm.objective)
    assert all(p.grad is None for p in lm.model.parameters()), "no second gradient is kept"
    for total, p in zip(want, learner.trainable(), strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(total, p.grad)
    assert any(not torch.equal(p.grad, p.grad.bfloat16().float()) for p in learner.trainable())


def test_training_starts_from_stored_precision(tiny_folder: Path) -> None:
    """Not from their rounded values, from which a small step would not move the model at all."""
    stored = CausalLM(str(tiny_folder), dtype="float32", device="cpu").load().trained()
    lm = CausalLM(str(tiny_folder), dtype="bfloat16", device="cpu").load(keep_full_precision=True)
    learner = LanguageLearner(lm, ALGORITHMS["reinforce"].update, False, frozenset())
    rounded = 0.0
    for (name, p), wide in zip(lm.trained().items(), learner.trainable(), strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(wide, stored[name])
        assert torch.equal(wide.bfloat16(), p)
        rounded += float((wide != p.float()).float().mean())
    assert rounded > 0
    assert lm.model.model.rotary_emb.inv_freq.dtype == torch.float32, "positions are not rounded"
    assert not lm.full_precision_params, "they are kept once"


def test_training_from_another_run_starts_from_its_parameters(tiny_folder: Path) -> None:
    lm = CausalLM(str(tiny_folder), dtype="bfloat16", device="cpu").load(keep_full_precision=True)
    with torch.no_grad():
        for p in lm.trained().values():
            p.mul_(2)
    learner = LanguageLearner(lm, ALGORITHMS["reinforce"].update, False, frozenset())
    for p, wide in zip(lm.trained().values(), learner.trainable(), strict=True):
        assert torch.equal(wide, p.float())


def test_moving_average_reference_works_in_bfloat16() -> None:
    """A step of 1 % of a small gap is lost in bfloat16; the average is kept in float32, also by a checkpoint."""
    lm = model_of(dtype=torch.bfloat16)
    learner = LanguageLearner(lm, ALGORITHMS["grpo"].update, True, frozenset())
    begin = [kept.clone() for kept in learner.reference_params or []]
    with torch.no_grad():
        for wide in learner.trainable():
            wide.mul_(1.01)
    for _ in range(400):
        learner.mix_reference(0.01)
    for kept, wide, first in zip(learner.reference_params or [], learner.trainable(), begin, strict=True):
        assert torch.allclose(kept.float(), wide, rtol=1e-2, atol=1e-6)
        assert not torch.equal(kept, first)
    other = LanguageLearner(lm, ALGORITHMS["grpo"].update, True, frozenset())
    other.restore(learner.state())
    for a, b in ((learner, other), (other, learner)):
        a.mix_reference(0.3), b.mix_reference(0.3)
        assert all(
            torch.equal(x, y) for x, y in zip(a._float32_reference or [], b._float32_reference or [], strict=True)
        )


def test_fused_model_can_be_copied() -> None:
    lm = model_of(dtype=torch.bfloat16)
    fuse_layers(lm.model, fused_layers.ElementwiseReference)
    ids = torch.arange(6)[None]
    assert torch.equal(copy.deepcopy(lm.model)(ids).logits, lm.model(ids).logits)


def test_sub_batch_of_a_packed_batch_has_its_lengths() -> None:
    lm = model_of()
    batch = awkward(lm)
    part = placed(batch).select(slice(1, 3))
    assert torch.equal(host_batch(part).mask, batch.mask[1:3])


# ---- what lies between the products ---------------------------------------------------------------


def test_fused_layers_match_originals() -> None:
    """Against float64 the fused norm is at least as near as the one that rounds twice."""
    lm = model_of(dtype=torch.bfloat16)
    norm, x = lm.model.model.norm, torch.randn(64, 32).bfloat16()
    torch.nn.init.normal_(norm.weight)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight
    before = (norm(x) - exact).abs().mean()
    assert fuse_layers(lm.model, fused_layers.ElementwiseReference) == 5 + 2, (
        "two norms and an MLP a layer, and the last norm"
    )
    assert (norm(x) - exact).abs().mean() <= before
    assert "partial" in str(norm.forward)


def test_unsupported_layers_are_not_fused() -> None:
    gemma = model_of("Gemma2", dtype=torch.bfloat16).model
    assert fuse_layers(gemma, fused_layers.ElementwiseReference) == 0, (
        "its norms add 1 to the weight, its gate is a GELU"
    )
    assert fuse_layers(model_of(dtype=torch.float64).model, fused_layers.ElementwiseReference) == 0


def test_fused_swiglu_matches_autograd() -> None:
    g, u = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    want = torch.nn.functional.silu(g) * u
    got = fused_layers._SwiGLUKernelFunction.apply(g, u, fused_layers.ElementwiseReference)
    assert torch.allclose(got, want)
    grad = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad(y, (g, u), grad) for y in (got, want)), strict=True):
        assert (a - b).abs().max() < 1e-12


def test_fused_rope_and_gradient_match_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, angle = torch.randn(1, 3, 5, 8, dtype=torch.float64, requires_grad=True), torch.randn(1, 5, 4).double()
    cos, sin = angle.cos().repeat(1, 1, 2), angle.sin().repeat(1, 1, 2)
    want = apply_rotary_pos_emb(x, x, cos, sin)[0]
    got = fused_layers._RopeFunction.apply(x, cos, sin, fused_layers.ElementwiseReference)
    grad = torch.randn_like(want)
    assert (got - want).abs().max() < 1e-12
    assert (torch.autograd.grad(got, x, grad)[0] - torch.autograd.grad(want, x, grad)[0]).abs().max() < 1e-12


def test_rope_functions_are_restored() -> None:
    from transformers.models.llama import modeling_llama

    before = modeling_llama.apply_rotary_pos_emb
    with fused_layers.fused_rope(model_of(dtype=torch.bfloat16).model, fused_layers.ElementwiseReference):
        assert modeling_llama.apply_rotary_pos_emb is not before
    assert modeling_llama.apply_rotary_pos_emb is before
    with fused_layers.fused_rope(model_of(dtype=torch.float64).model, fused_layers.ElementwiseReference):
        assert modeling_llama.apply_rotary_pos_emb is before


@on_gpu
def test_elementwise_kernels_match_reference() -> None:
    kernels, torch_ = load_kernels("triton_elementwise"), fused_layers.ElementwiseReference
    g, u, d = (torch.randn(300, 77, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    pairs = [(kernels.swiglu(g, u), torch_.swiglu(g.double(), u.double()))]
    pairs += zip(
        kernels.swiglu_backward(d, g, u), torch_.swiglu_backward(d.double(), g.double(), u.double()), strict=True
    )
    for heads, channel in ((9, 64), (12, 128), (20, 96)):
        x = torch.randn(1, 41, heads, channel, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        cos, sin = torch.randn(2, 1, 41, channel, device="cuda").bfloat16()
        for back in (False, True):
            pairs.append((kernels.rope(x, cos, sin, back), torch_.rope(x.double(), cos.double(), sin.double(), back)))
    for got, want in pairs:
        assert got.shape == want.shape
        assert (got.double() - want).norm() / want.norm() < 5e-3


# ---- a whole update, on a GPU ---------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("row", ["grpo", "dr-grpo"])
@pytest.mark.parametrize(
    ("dtype", "least"), [("bfloat16", 0.98), ("mixed", 0.98), ("float16", 0.999), ("float32", 0.999999)]
)
def test_gpu_update_matches_cpu_gradient(row: str, dtype: str, least: float) -> None:
    """In any precision on the card, fused, in micro-batches, against float64 on the host in one piece."""
    algorithm, cosine = replace(ALGORITHMS[row]), []
    host, card = model_of(), model_of(dtype=torch.float32)
    for a, b in zip(host.model.parameters(), card.model.parameters(), strict=True):
        a.data.copy_(b.data.bfloat16())
    for p in card.model.parameters():
        p.data = p.data.bfloat16().to("cuda", CausalLM(dtype=dtype).dtype_on(torch.device("cuda")))
    card.model.to("cuda")
    set_mixed_precision(card.model, dtype == "mixed")
    batch = batch_of(host)
    grads = []
    for lm, micro_batch in ((host, 0), (card, 30)):
        learner = LanguageLearner(lm, algorithm.update, algorithm.reference.enabled, algorithm.outputs, micro_batch)
        ready = credited(batch, algorithm, learner)
        learner.gradient(ready, algorithm.objective)
        grads.append([p.grad.double().cpu() for p in learner.trainable()])
        stepped = learner.step(ready, algorithm.objective, algorithm.update)
        assert stepped.logp.device.type == "cpu"
    for a, b in zip(*grads, strict=True):
        cosine.append(float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-30)))
    assert min(cosine) > least


@on_gpu
@pytest.mark.parametrize("shared", [False, True])
def test_gpu_critic_matches_cpu_values_and_gradient(shared: bool) -> None:
    """bfloat16 on the card, fused, in micro-batches, against float64 on the host; the head is in float32."""
    algorithm = replace(ALGORITHMS["ppo"], critic=SharedCritic() if shared else OwnCritic())
    host, card = model_of(), model_of(dtype=torch.float32)
    for a, b in zip(host.model.parameters(), card.model.parameters(), strict=True):
        a.data.copy_(b.data.bfloat16())
    card.model.to("cuda", torch.bfloat16)
    batch, values, grads = batch_of(host), [], []
    for lm, budget in ((host, 0), (card, 30)):
        critic = LanguageCritic(lm, shared)
        critic.head.weight.data.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(0)))
        more = (algorithm.outputs, budget, False, critic, algorithm.critic.update)
        learner = LanguageLearner(lm, algorithm.update, False, *more)
        ready = credited(batch, algorithm, learner)
        values.append(ready.value.double())
        if shared:
            learner.gradient(ready, algorithm.objective)
        else:
            algorithm.critic(learner, ready)
        moved = learner.trainable() if shared else critic.trained()
        grads.append([p.grad.double().cpu() for p in moved])
        assert all(p.dtype != torch.bfloat16 for p in moved)
    assert (values[0] - values[1]).norm() < 0.02 * values[0].norm()
    cosine = [float((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-30)) for a, b in zip(*grads, strict=True)]
    assert min(cosine) > 0.98


def test_packed_batch_has_the_same_ratings() -> None:
    lm = add_head(model_of())
    torch.nn.init.normal_(lm.model.rating.weight)
    batch = awkward(lm)
    with packed_attention_enabled(lm.model):
        assert torch.equal(response_scores(lm, batch), response_scores(lm, placed(batch)))
