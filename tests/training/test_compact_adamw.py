"""Optimizer state in bfloat16: masters are exact, roundings are unbiased, and a resumed run draws the same bits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascent import ops as kernels
from ascent.build import language_backend
from ascent.build.language_backend import LanguageBackend, uses_bfloat16_state
from ascent.core.algorithms import ALGORITHMS
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.core.errors import ConfigError
from ascent.core.update import Adam, TrustRegion
from ascent.distributed.ranks import SINGLE_PROCESS
from ascent.models import CausalLM, LanguageModel
from ascent.settings import configure
from ascent.training import compact_adamw
from ascent.training.compact_adamw import (
    CompactAdamW,
    ReferenceOps,
    join_master,
    random_bits,
    random_keys,
    split_master,
    stochastic_round,
    to_compact_state,
)
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from tests.language import batch_of, model_of
from tests.training.test_language_learner import credited

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")
CPU = torch.device("cpu")
PINNED = (119773889, 3283056247), [2229170906, 3739749960, 157106009]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def stepped_by(p: Tensor, master: Tensor, update: Adam, seed: int = 0) -> CompactAdamW:
    return CompactAdamW([p], [master], update.optimizer([p]), seed)


# ---- bits -----------------------------------------------------------------------------------------


def test_master_weight_is_parameter_plus_16_low_bits() -> None:
    """All low halves at several exponents and signs, ties among them, and random bits; numbers that are none too."""
    heads = torch.tensor([0x3F80, 0x3F81, -0x4080, 0x0000, -0x8000, 0x7F7F, 0x0001, 0x7F7E], dtype=torch.int32)
    every = (heads[:, None] * 2**16 + torch.arange(2**16, dtype=torch.int32)).flatten()
    drawn = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).int()
    for bits in (every, drawn):
        master = bits.view(torch.float32)
        master = torch.where(master.isnan(), 1.0, master)
        high, low = split_master(master)
        assert torch.equal(join_master(high, low).view(torch.int32), master.view(torch.int32))
        nearest, tie = master.bfloat16(), (master.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(high[~tie], nearest[~tie])
        assert (high[tie].float().abs() >= nearest[tie].float().abs()).all(), "ties go away from 0"
    odd = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    assert split_master(odd)[0].isnan().tolist() == [True, True, False, False]
    assert (
        torch.equal(join_master(*split_master(odd))[2:], odd[2:])
        and stochastic_round(odd, torch.tensor(65535)).isnan()[:2].all()
    )


def test_random_bits_depend_on_seed_position_and_step() -> None:
    """Pinned: runs that are resumed draw them again. 2¹⁶ of them spread evenly, and streams have nothing in common."""
    keys = random_keys(1, 2, 3, 0)
    assert keys == PINNED[0] and random_bits(keys, 5, 3, CPU).tolist() == PINNED[1]
    assert torch.equal(random_bits(keys, 0, 100, CPU)[40:], random_bits(keys, 40, 60, CPU))
    streams = [
        random_bits(random_keys(*numbers), 0, 2**16, CPU) for numbers in ((1, 2, 3), (1, 2, 4), (1, 3, 2), (2, 2, 3))
    ]
    for at, bits in enumerate(streams):
        for half in (bits & 0xFFFF, bits >> 16):
            counts = torch.bincount(half >> 8, minlength=256).double()
            assert float(((counts - 256) ** 2 / 256).sum()) < 350, "χ² with 255 degrees of freedom"
        for other in streams[at + 1 :]:
            both = torch.stack([bits.double(), other.double()])
            assert abs(float(torch.corrcoef(both)[0, 1])) < 0.02 and not (bits == other).sum() > 5


def test_stochastic_rounding_is_unbiased_and_rounds_to_a_neighbor() -> None:
    x = noise(500)
    low, high = (split_master(x)[0].float() + way * x.abs() * 2**-7 for way in (-1, 1))
    draws = torch.stack(
        [stochastic_round(x, random_bits(random_keys(0, k), 0, 500, CPU) & 0xFFFF).float() for k in range(1000)]
    )
    assert ((draws >= low) & (draws <= high)).all()
    ulp = x.abs() * 2**-7
    off = (draws.double().mean(0) - x.double()) / ulp
    assert float(off.abs().max()) < 0.07, "4 standard deviations of ½ / √1000"
    assert abs(float(off.mean())) < 0.003
    exact = x.bfloat16().float()
    assert torch.equal(stochastic_round(exact, torch.tensor(65535)).float(), exact)


# ---- steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_master_weights_equal_float32_adamw(max_norm: float | None) -> None:
    """Bit for bit, on the same gradients and with moments that begin every step where ours do."""
    update = Adam(lr=1e-3, weight_decay=0.1, max_norm=max_norm)
    wide = noise(700, scale=0.02)
    p = split_master(wide)[0].clone()
    ours, theirs = stepped_by(p, wide.clone(), update), update.optimizer([wide])
    for step in range(6):
        p.grad = noise(700, seed=step + 1).bfloat16()
        wide.grad = p.grad.float()
        norms = [update.step(optimizer, 0.5) for optimizer in (ours, theirs)]
        assert torch.equal(*norms)
        master = next(ours.masters())
        assert torch.equal(master, wide) and torch.equal(p, split_master(master)[0])
        for name in ("exp_avg", "exp_avg_sq"):
            exact, kept = theirs.state[wide][name], ours.state[p][name]
            assert kept.dtype == torch.bfloat16 and (kept.float() - exact).abs().max() <= exact.abs().max() * 2**-7
            exact.copy_(kept)


def test_mean_over_many_steps_equals_adamw() -> None:
    """200 copies with random bits of their own, against float64: to nearest, the second moment would never move."""
    copies, count, update = 200, 40, Adam(lr=1e-3)
    begin = noise(count, scale=0.02).double()
    exact = begin.clone()
    oracle = torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.0)
    p = begin.float().bfloat16().repeat(copies, 1)
    ours = stepped_by(p, begin.float().repeat(copies, 1), update)
    for step in range(60):
        exact.grad = noise(count, seed=step, scale=0.3 if step else 1.0).bfloat16().double()
        p.grad = exact.grad.bfloat16().repeat(copies, 1)
        ours.step(), oracle.step()
    state = oracle.state[exact]
    for name in ("exp_avg", "exp_avg_sq"):
        drawn, want = ours.state[p][name].double(), state[name]
        off = (drawn.mean(0) - want) / (drawn.std(0) / copies**0.5)
        assert float(off.abs().max()) < 4.5 and abs(float(off.mean())) < 1, name
    moved = exact - begin
    got = (next(ours.masters()).double().mean(0) - begin - moved) / moved.abs().mean()
    assert float(got.abs().max()) < 0.02
    v = torch.tensor(1.0)
    assert (0.999 * v + 0.001 * 0.3**2).bfloat16() == v, "what rounding to nearest does"


def test_gradient_sums_are_unbiased() -> None:
    total, parts = noise(300, scale=1.0), [noise(300, seed=k + 1, scale=0.01).bfloat16() for k in range(20)]
    want = total.bfloat16().double() + sum(part.double() for part in parts)
    sums = []
    for turn in range(100):
        one = total.bfloat16()
        for number, part in enumerate(parts):
            ReferenceOps.add(one, part, random_keys(turn, 0, 1, number + 1))
        sums.append(one.double())
    drawn = torch.stack(sums)
    off = (drawn.mean(0) - want) / (drawn.std(0) / 100**0.5).clamp(min=1e-6)
    assert float(off.abs().max()) < 4.5 and abs(float(off.mean())) < 0.3


def test_moments_and_micro_batches_use_different_random_bits() -> None:
    """With m = v = g the exact moments are equal, so that the same bits would round them alike everywhere."""
    p = torch.zeros(4000, dtype=torch.bfloat16)
    optimizer = CompactAdamW([p], [p.float()], torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.9)), 0)
    m, v = (optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq"))
    m.fill_(1.0), v.fill_(1.0)
    p.grad = torch.full_like(p, 1.0078125)  # 1 + 2⁻⁷: m becomes 1 + 2⁻⁷/10, and v 1 + 2⁻⁷/5 + 2⁻¹⁴/10
    optimizer.step()
    up = [moment > 1 for moment in (m, v)]
    assert [float(x.float().mean()) for x in up] == pytest.approx([0.1, 0.2], abs=0.03)
    assert float((up[0] & up[1]).float().mean()) == pytest.approx(0.1 * 0.2, abs=0.012), "independent, and not nested"

    q = torch.ones(4000, dtype=torch.bfloat16, requires_grad=True)
    accumulating = CompactAdamW([q], [q.detach().float()], torch.optim.AdamW([q], lr=1e-3), 0)
    part = torch.full((4000,), 2.0**-9, dtype=torch.bfloat16)  # a quarter of the distance from 1 to the next number
    with accumulating.accumulating():
        (q * torch.ones_like(part)).sum().backward()
        for _ in range(3):
            (q * part).sum().backward()
    steps = ((q.grad - 1) * 128).int()  # type: ignore[operator]
    counts = torch.bincount(steps.flatten(), minlength=4).double() / 4000
    assert counts.tolist() == pytest.approx([27 / 64, 27 / 64, 9 / 64, 1 / 64], abs=0.04), "three independent draws"


def test_chunk_size_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for chunk in (2**22, 7):
        monkeypatch.setattr(compact_adamw, "CHUNK_NUMEL", chunk)
        p = noise(50).bfloat16()
        optimizer = stepped_by(p, noise(50), Adam(), seed=3)
        p.grad = noise(50, seed=1).bfloat16()
        optimizer.step()
        ReferenceOps.add(p, p.clone(), random_keys(0))
        made.append([p, *optimizer.state[p].values()])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@on_gpu
def test_triton_kernels_match_reference_ops_on_gpu() -> None:
    triton: Any = kernels.load_kernels("triton_adamw")
    group = {"betas": (0.9, 0.999), "lr": 1e-4, "weight_decay": 0.1, "eps": 1e-8}
    sides = []
    for ops in (ReferenceOps, triton):
        p, low = (x.cuda() for x in split_master(noise(70_001, scale=0.02)))
        m, v = (
            noise(70_001, seed=1, scale=1e-4).cuda().bfloat16(),
            noise(70_001, seed=2, scale=1e-8).abs().cuda().bfloat16(),
        )
        grad = noise(70_001, seed=3, scale=1e-4).cuda().bfloat16()
        ops.step(p, low, m, v, grad, torch.tensor(0.7, device="cuda"), random_keys(5, 1, 9, 0), 9, group)
        ops.add(grad, m, random_keys(5, 1, 9, 1))
        sides.append((join_master(p, low), m, v, grad))
    (master, *rest), (wanted, *others) = sides
    assert torch.allclose(master, wanted, rtol=1e-5, atol=1e-6)
    for got, want in zip(rest, others, strict=True):  # an odd one is rounded the other way
        assert float((got != want).float().mean()) < 0.01 and torch.allclose(got, want, rtol=2e-2, atol=0)


# ---- learners -------------------------------------------------------------------------------------


def learner_of(lm: LanguageModel, row: Any = ALGORITHMS["grpo"], rounding: int | None = 3, **more: Any) -> Any:
    critic = LanguageCritic(lm, row.critic.shared) if row.critic.enabled else None
    return LanguageLearner(
        lm, row.update, row.reference.enabled, row.outputs, critic=critic, critic_update=row.critic.update,
        rounding=rounding, **more,
    )  # fmt: skip


def step_of(learner: Any, row: Any, batch: Any) -> Any:
    ready = credited(batch, row, learner)
    stepped = learner.step(ready, row.objective, row.update)
    row.critic(learner, ready)
    return stepped


def tensors_of(learner: Any) -> list[Tensor]:
    return [value.clone() for group in learner.state().values() for value in group.values()]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "more"), [("Llama", {"tie_word_embeddings": True}), ("GPT2", {}), ("Gemma2", {})])
def test_compact_step_matches_float32_state(kind: str, more: dict[str, Any]) -> None:
    """With clipping and decay, in one micro-batch: then gradients are the same and the first step is exact."""
    row = replace(ALGORITHMS["grpo"], update=Adam(lr=1e-2, weight_decay=0.1, max_norm=0.1))
    sides = []
    for rounding in (None, 3):
        lm = model_of(kind, dtype=torch.bfloat16, **more)
        lm.can_share_prompts = kind == "Llama"
        learner = learner_of(lm, row, rounding)
        stepped = step_of(learner, row, batch_of(lm))
        masters = learner.trainable() if rounding is None else learner.compact.masters()
        sides.append(([m.detach().clone() for m in masters], float(stepped.metrics["grad_norm"])))
    (wide, norm), (ours, same) = sides
    assert norm == pytest.approx(same, rel=1e-6)
    for a, b in zip(wide, ours, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=2e-6)


@pytest.mark.long
def test_resume_with_micro_batches_is_bitwise_equal() -> None:
    """Weights, low bits, moments and steps, after more epochs than were resumed; a moving reference too."""
    row = ALGORITHMS["grpo"]
    lm = model_of(dtype=torch.bfloat16)
    batch = batch_of(lm)
    learner = learner_of(lm, row, micro_batch=12)
    assert len(list(learner.split(batch))) > 3
    ready, plain = credited(batch, row, learner), learner_of(model_of(dtype=torch.bfloat16), row, None, micro_batch=12)
    for one in (learner, plain):
        one.gradient(ready, row.objective)
    for p, wide in zip(learner.trainable(), plain.trainable(), strict=True):
        assert p.grad.dtype == torch.bfloat16 and (p.grad - wide.grad).norm() < 0.02 * wide.grad.norm()
    for _ in range(2):
        step_of(learner, row, batch)
        learner.mix_reference(0.1)
    state = {group: {name: v.clone() for name, v in own.items()} for group, own in learner.state().items()}
    other = learner_of(model_of(dtype=torch.bfloat16, seed=5), row, micro_batch=12)
    other.restore(state)
    for one in (learner, other):
        step_of(one, row, batch)
        one.mix_reference(0.1)
    assert learner.state().keys() == other.state().keys() and "wide" not in state
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(learner), tensors_of(other), strict=True))
    elsewhere = learner_of(model_of(dtype=torch.bfloat16), row, rounding=4, micro_batch=12)
    elsewhere.restore(state)
    step_of(elsewhere, row, batch)
    assert not torch.equal(elsewhere.state()["optimizer"]["0.exp_avg"], learner.state()["optimizer"]["0.exp_avg"])


@pytest.mark.long
@pytest.mark.parametrize("critic", [OwnCritic(lr=1e-3), SharedCritic()])
def test_critics_train_with_compact_state(critic: Any) -> None:
    """A shared one's head is stepped in float32 with the policy; one of its own keeps its float32 state."""
    row = replace(ALGORITHMS["ppo"], critic=critic)
    lm = model_of(dtype=torch.bfloat16)
    learner, batch = learner_of(lm, row), batch_of(lm)
    step_of(learner, row, batch)
    assert learner.critic.head.weight.dtype == torch.float32 and learner.critic.head.weight.any()
    other = learner_of(model_of(dtype=torch.bfloat16, seed=5), row)
    other.restore(learner.state())
    for one in (learner, other):
        step_of(one, row, batch)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(learner), tensors_of(other), strict=True))


def test_checkpoints_convert_between_compact_and_float32_state() -> None:
    """To float32 nothing is lost. From float32 masters are exact, and moments are rounded."""
    row = ALGORITHMS["reinforce"]
    batch = batch_of(model_of(dtype=torch.bfloat16))
    ours, wide = (learner_of(model_of(dtype=torch.bfloat16), row, rounding) for rounding in (3, None))
    ours.restore(wide.state())
    wide.restore(ours.state())  # before the first step there are no moments
    for learner in (ours, wide):
        step_of(learner, row, batch)
    narrow, as_wide = (learner_of(model_of(dtype=torch.bfloat16, seed=4), row, rounding) for rounding in (3, None))
    as_wide.restore(ours.state())
    for master, copy in zip(ours.compact.masters(), as_wide.trainable(), strict=True):
        assert torch.equal(master, copy)
    moments = as_wide.state()["optimizer"]
    assert torch.equal(moments["0.exp_avg"], ours.state()["optimizer"]["0.exp_avg"].float())
    narrow.restore(wide.state())
    for master, copy in zip(narrow.compact.masters(), wide.trainable(), strict=True):
        assert torch.equal(master, copy)
    for learner in (narrow, as_wide):
        step_of(learner, row, batch)
    assert float(narrow.state()["optimizer"]["0.step"]) == 2


def test_state_of_another_shape_is_rejected() -> None:
    """A kernel would read behind its end."""
    row = ALGORITHMS["reinforce"]
    learner = learner_of(model_of(dtype=torch.bfloat16), row)
    state = learner.state()
    good = state["optimizer"]["1.low"]
    for bad in (good[:1], good.float(), None):
        state["optimizer"].pop("1.low", None)
        state["optimizer"] |= {} if bad is None else {"1.low": bad}
        with pytest.raises(ConfigError, match="does not match this model: low of"):
            learner.restore(state)


def test_parameters_without_gradient_are_not_stepped() -> None:
    a, b = noise(4).bfloat16(), noise(4).bfloat16()
    optimizer = CompactAdamW([a, b], [a.float(), b.float()], Adam().optimizer([a, b]), 0)
    before, a.grad = b.clone(), torch.ones_like(a)
    optimizer.step()
    assert torch.equal(b, before) and "step" not in optimizer.state[b] and not torch.equal(a, before)


def test_compact_state_requires_adam() -> None:
    a = noise(4).bfloat16()
    with pytest.raises(ConfigError) as refusal:
        CompactAdamW([a], [a.float()], torch.optim.SGD([a]), 0)
    message = "--policy.optimizer-state bfloat16 requires Adam, but this update uses SGD: set float32"
    assert str(refusal.value) == message


def test_checkpoint_keeps_other_dtypes_unchanged() -> None:
    a, head = noise(4).bfloat16(), noise(3)
    optimizer = CompactAdamW([a, head], [a.float()], Adam().optimizer([a, head]), 0)
    wide, moment = noise(4), noise(3)
    state = {"params": {"a": a, "head": head}, "wide": {"a": wide, "head": head}, "optimizer": {"1.exp_avg": moment}}
    found = to_compact_state(state, ["a", "head"], optimizer)
    assert torch.equal(join_master(found["params"]["a"], found["optimizer"]["0.low"]), wide)
    assert found["params"]["head"] is head and found["optimizer"]["1.exp_avg"] is moment
    assert set(found["optimizer"]) == {"0.low", "1.exp_avg"}


# ---- which form -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"lora": 4}, "adapters are few"), ({"dtype": "float32"}, "--policy.dtype is float32")],
)
def test_bfloat16_state_requires_bfloat16_parameters(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CausalLM("m", optimizer_state="bfloat16", **settings)


def fake_config(form: str = "auto", update: Any = None, reference: bool = False) -> Any:
    algorithm = SimpleNamespace(update=update or Adam(), reference=SimpleNamespace(enabled=reference))
    return SimpleNamespace(policy=SimpleNamespace(optimizer_state=form), algorithm=algorithm)


def test_auto_uses_float32_state_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 18 bytes per parameter and the head's, and 2 of a reference, against nine tenths of the card."""
    lm = model_of(dtype=torch.bfloat16)
    assert not uses_bfloat16_state(fake_config(), lm, None, SINGLE_PROCESS), "a CPU is not asked"
    assert uses_bfloat16_state(fake_config("bfloat16"), lm, None, SINGLE_PROCESS)
    monkeypatch.setattr(type(lm), "device", torch.device("cuda"))
    taken = language_backend.static_bytes(lm, False, None)
    assert taken - language_backend.static_bytes(lm, False, None, per=10) == 8 * sum(
        p.numel() for p in lm.model.parameters()
    )
    card = SimpleNamespace(total_memory=int(taken / 0.9) + 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    assert not uses_bfloat16_state(fake_config(), lm, None, SINGLE_PROCESS)
    assert uses_bfloat16_state(fake_config(reference=True), lm, None, SINGLE_PROCESS)
    card.total_memory -= 10
    assert uses_bfloat16_state(fake_config(), lm, None, SINGLE_PROCESS)
    assert not uses_bfloat16_state(fake_config("float32"), lm, None, SINGLE_PROCESS)
    assert not uses_bfloat16_state(fake_config(update=TrustRegion()), lm, None, SINGLE_PROCESS)
    assert not uses_bfloat16_state(fake_config(), lm, None, SimpleNamespace(world_size=2)), "ranks sum in float32"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="they are in float64"):
        uses_bfloat16_state(fake_config("bfloat16"), model_of(), None, SINGLE_PROCESS)


def test_compact_state_rejects_ranks_and_trust_region() -> None:
    policy = CausalLM("m", dtype="bfloat16", optimizer_state="bfloat16")
    base = configure("gsm8k", {"model": "m"})
    with pytest.raises(ConfigError, match="on several ranks"):
        LanguageBackend().check_ranks(replace(base, policy=policy), 2)
    algorithm = replace(base.algorithm, update=TrustRegion())
    with pytest.raises(ConfigError, match="it is for Adam's moments"):
        LanguageBackend().check(replace(base, policy=policy, algorithm=algorithm))


def test_kernels_that_fail_to_compile_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old card, or no C compiler: Triton can be imported there, and no kernel runs."""

    def add(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler\nat all")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(16))
    monkeypatch.setattr(kernels, "import_module", lambda _: SimpleNamespace(add=add))
    for cached in (kernels.load_kernels, kernels._triton_works):
        cached.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"does not work here \(Failed to find C compiler\)"):
            assert kernels.load_kernels("triton_lm_head") is None
    finally:
        for cached in (kernels.load_kernels, kernels._triton_works):
            cached.cache_clear()


# ---- float16, where there is no bfloat16 ----------------------------------------------------------


def test_gpu_without_bfloat16_uses_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, dtype = torch.device("cuda"), CausalLM("m").dtype_on
    for capability, want in (((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((12, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, own=capability: own)
        assert dtype(cuda) == want
    assert dtype(CPU) == torch.float32 and CausalLM("m", dtype="float16").dtype_on(CPU) == torch.float16
