"""Surrogates: golden values, gradients against finite differences, the dead zone, and what masks hide."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import F64, SAMPLED, batch_of, close, f64
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.correction import Masked
from ascent.core.errors import ConfigError
from ascent.core.kl import InLoss
from ascent.core.losses import LOSSES, Cispo, Clipped, LogProb, Ratio, SequenceRatio
from ascent.core.reference import Frozen
from ascent.core.types import Outputs
from ascent.core.weights import WEIGHTS, SequenceSum


def one(loss: Any, ratio: float, advantage: float, logp_old: float = -1.5) -> tuple[float, float]:
    """Value and ∂/∂logp of a single token whose ratio is this."""
    old = f64([[[logp_old]]])
    logp = (old + math.log(ratio)).requires_grad_()
    value = loss(logp, old, f64([[[advantage]]]), torch.ones(1, 1, 1, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    return value.item(), gradient.item()


# ---- goldens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "value", "gradient"),
    [
        # SPEC section 5, figure 4: min(0.675, 0.6) and min(−0.325, −0.4), both in the dead zone.
        (Clipped(0.2, 0.2), 1.35, 0.5, 0.6, 0.0),
        (Clipped(0.2, 0.2), 0.65, -0.5, -0.4, 0.0),
        # Past the bound against δ's direction nothing is clipped: min(0.325, 0.4), min(−0.675, −0.6).
        (Clipped(0.2, 0.2), 0.65, 0.5, 0.325, 0.325),
        (Clipped(0.2, 0.2), 1.35, -0.5, -0.675, -0.675),
        # Asymmetric: 1.25 is inside 1 + 0.28 but outside 1 + 0.2; 0.75 is inside 1 − 0.3 but outside 1 − 0.2.
        (Clipped(0.2, 0.28), 1.25, 2.0, 2.5, 2.5),
        (Clipped(0.2, 0.2), 1.25, 2.0, 2.4, 0.0),
        (Clipped(0.3, 0.2), 0.75, -2.0, -1.5, -1.5),
        (Clipped(0.2, 0.2), 0.75, -2.0, -1.6, 0.0),
        # Dual clip, c = 3: an exploded ratio of a bad token costs 3·δ and no more; a good one is not touched.
        (Clipped(0.2, 0.2, dual=3.0), 5.0, -0.5, -1.5, 0.0),
        (Clipped(0.2, 0.2, dual=3.0), 2.0, -0.5, -1.0, -1.0),
        (Clipped(0.2, 0.2), 5.0, -0.5, -2.5, -2.5),
        (Clipped(0.2, 0.2, dual=3.0), 5.0, 0.5, 0.6, 0.0),
        (Clipped(0.2, 0.2, dual=3.0), 0.65, -0.5, -0.4, 0.0),
        (Ratio(), 1.35, 0.5, 0.675, 0.675),
        # Log-prob: δ·logp with logp = −1.5 + log ρ, whatever ρ is.
        (LogProb(), 1.35, 0.5, 0.5 * (-1.5 + math.log(1.35)), 0.5),
        # CISPO: the weight min(ρ, 1 + 4) is a constant, so the gradient is weight·δ and never 0.
        (Cispo(1.0, 4.0), 2.0, 0.5, 2.0 * 0.5 * (-1.5 + math.log(2)), 1.0),
        (Cispo(1.0, 4.0), 8.0, 0.5, 5.0 * 0.5 * (-1.5 + math.log(8)), 2.5),
        (Cispo(1.0, 4.0), 0.1, -0.5, 0.1 * -0.5 * (-1.5 + math.log(0.1)), -0.05),
        (Cispo(0.2, 0.28), 0.1, -0.5, 0.8 * -0.5 * (-1.5 + math.log(0.1)), -0.4),
    ],
)
def test_golden(loss: Any, ratio: float, advantage: float, value: float, gradient: float) -> None:
    assert one(loss, ratio, advantage) == (pytest.approx(value, abs=1e-12), pytest.approx(gradient, abs=1e-12))


# Two tokens with log-ratios 0.3 and 0.1, and a third that is masked: Σ = 0.4, mean = 0.2.
LOG_RATIO = [[[0.3, 0.1, 9.0]]]
TWO = torch.tensor([[[True, True, False]]])


def sequence(loss: SequenceRatio, advantage: float) -> tuple[float, list[float]]:
    logp = f64(LOG_RATIO).requires_grad_()
    value = loss(logp, torch.zeros(1, 1, 3, dtype=F64), f64([[[advantage]]]), TWO)
    assert value.shape == (1, 1, 1)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    return value.item(), gradient.flatten().tolist()


@pytest.mark.parametrize(
    ("loss", "advantage", "value", "gradient"),
    [
        # Product: ρ = e^0.4; the term is ρδ/L and ∂ρ/∂logp_t = ρ, so each of the two tokens has ρδ/2.
        (SequenceRatio("product", None, None), 2.0, math.exp(0.4), [math.exp(0.4)] * 2 + [0]),
        # Mean: ρ = e^0.2; the term is ρδ and ∂ρ/∂logp_t = ρ/L.
        (SequenceRatio("mean", None, None), 2.0, 2 * math.exp(0.2), [math.exp(0.2)] * 2 + [0]),
        (SequenceRatio("mean", 0.1, 0.1), 2.0, 2 * 1.1, [0, 0, 0]),
        (SequenceRatio("mean", 0.1, 0.3), 2.0, 2 * math.exp(0.2), [math.exp(0.2)] * 2 + [0]),
        (SequenceRatio("product", 0.1, 0.3), 2.0, 1.3, [0, 0, 0]),
        (SequenceRatio("product", 0.1, 0.3), -2.0, -math.exp(0.4), [-math.exp(0.4)] * 2 + [0]),
    ],
)
def test_sequence_ratio_golden(loss: SequenceRatio, advantage: float, value: float, gradient: list[float]) -> None:
    assert sequence(loss, advantage) == (pytest.approx(value), pytest.approx(gradient))


@pytest.mark.parametrize(
    ("loss", "ratio"),
    [(SequenceRatio("mean", None, None), math.exp(0.2)), (SequenceRatio("product", None, None), math.exp(0.4))],
)
def test_gspo_token_golden(loss: SequenceRatio, ratio: float) -> None:
    """δ = 2 and −3 on the two tokens: each has the value ρδ_t, and only its own log-prob has a gradient, also ρδ_t.

    Clipped at 1 ± 0.1, ρ > 1.1 leaves the first no gradient; the second, whose δ is below 0, keeps its own.
    """
    δ, old = f64([[[2.0, -3.0, 5.0]]]), torch.zeros(1, 1, 3, dtype=F64)
    for bounds in ({}, {"low": 0.1, "high": 0.1}):
        logp = f64(LOG_RATIO).requires_grad_()
        value = replace(loss, **bounds)(logp, old, δ, TWO)
        (gradient,) = torch.autograd.grad(value[..., :2].sum(), logp)
        first = (2 * 1.1, 0.0) if bounds else (2 * ratio, 2 * ratio)
        close(value.detach()[..., :2], [[[first[0], -3 * ratio]]])
        close(gradient, [[[first[1], -3 * ratio, 0]]])


@pytest.mark.parametrize("form", ["product", "mean"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_one_credit_per_response_has_the_same_gradient_token_by_token(form: Any, weights: type) -> None:
    """Through the objective, clipped and not: spreading δ over the tokens changes no gradient."""
    logp, old, δ = drawn(3, 0.2)
    for bounds in (None, 0.1):
        found = []
        for credit in (δ, δ.expand(-1, -1, 3)):
            batch = batch_of(δ.squeeze(-1), LENGTHS, logp_old=old, advantage=credit)
            x = logp.clone().requires_grad_()
            terms = Algorithm(loss=SequenceRatio(form, bounds, bounds)).objective(
                batch.add(weight=weights()(batch)), Outputs(x, torch.zeros_like(x))
            )
            found.append(torch.autograd.grad(terms.objective, x)[0])
            sums = {name: float(value) for name, value in terms.sums.items()}
            found.append(f64(list(sums.values())))
        close(found[0], found[2])
        close(found[1], found[3])


def test_per_decision_golden() -> None:
    """Ratios 2, ½, 3 on three tokens with a hole between the second and the third: ρ_t = 2, 1, 3, after ρ_0 = 1.

    Values (ρ_t − ρ_{t−1})·δ_t = (2 − 1)·2, (1 − 2)·4, (3 − 1)·1. Their sum is Σ_t ρ_t·r_t − δ_1 with the rewards
    r = δ_t − δ_{t+1} = −2, 3, 1: −4 + 3 + 3 − 2 = 0. ∂/∂logp_u = Σ_{t≥u} ρ_t·r_t = 2, 6, 3.
    """
    mask = torch.tensor([[[True, True, False, True]]])
    logp = f64([[[math.log(2), -math.log(2), 9.0, math.log(3)]]]).requires_grad_()
    loss, δ = Ratio("per-decision"), f64([[[2.0, 4.0, 7.0, 1.0]]])
    value = loss(logp, torch.zeros_like(logp), δ, mask)
    close(value.detach(), [[[2.0, -4.0, 0.0, 2.0]]])
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    close(gradient, [[[2.0, 6.0, 0.0, 3.0]]])
    close(loss(logp, torch.zeros_like(logp), f64([[[2.0]]]), mask).sum().detach(), 2 * 3 - 2)  # an outcome: δ·ρ_L − δ


# ---- gradients ------------------------------------------------------------------------------------


def variants() -> list[Any]:
    """Every surrogate on the menu, and the forms that its fields make of it."""
    more = [Clipped(0.2, 0.28), Clipped(0.2, 0.2, dual=3.0), SequenceRatio("product", 0.2, 0.2), Cispo(0.2, 0.28)]
    more += [SequenceRatio(form, None, None) for form in ("product", "mean")]  # type: ignore[arg-type]
    more += [Ratio("per-decision")]
    return [cls() for cls in LOSSES] + more


LENGTHS = torch.tensor([[3, 2, 1], [1, 3, 2]])
MASK = torch.arange(3) < LENGTHS.unsqueeze(-1)


def drawn(seed: int, spread: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(2, 3, 3, generator=generator, dtype=F64) - 0.1
    logp = old + spread * torch.randn(2, 3, 3, generator=generator, dtype=F64)
    return logp, old, torch.randn(2, 3, 1, generator=generator, dtype=F64)


@pytest.mark.parametrize("loss", variants(), ids=repr)
@pytest.mark.parametrize("seed", range(5))
def test_autograd_is_the_derivative_of_the_value(loss: Any, seed: int) -> None:
    """Central differences in float64; CISPO's is the derivative with its weight held fixed."""
    logp, old, δ = drawn(seed, 0.5)
    x = logp.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x, old, δ, MASK)[MASK.any(-1)].sum(), x)

    def value(at: Tensor) -> float:
        if isinstance(loss, Cispo):
            held = torch.exp(logp - old).clamp(1 - loss.low, 1 + loss.high)
            return (held * δ * at).sum().item()
        return loss(at, old, δ, MASK).sum().item()

    h = 1e-6
    for index in itertools.product(range(2), range(3), range(3)):
        step = torch.zeros_like(logp)
        step[index] = h
        numeric = (value(logp + step) - value(logp - step)) / (2 * h)
        assert gradient[index].item() == pytest.approx(numeric, abs=1e-7)


@pytest.mark.parametrize("loss", variants(), ids=repr)
def test_at_ratio_one_the_gradient_is_log_probs(loss: Any) -> None:
    """δ at every token; a sequence ratio, one term per response, hands each of its L tokens δ/L instead.

    That 1/L meets the sum of the response's L weights, so that with weights the two are the same: the next test.
    """
    logp, _, δ = drawn(0, 0.0)
    x = logp.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(x, logp, δ, MASK).sum(), x)
    expected = δ.expand_as(gradient)
    if loss.sequence:
        close(gradient, torch.where(MASK, expected / LENGTHS.unsqueeze(-1), 0.0))
        assert not torch.allclose(gradient, torch.where(MASK, expected, 0.0))
    else:
        close(gradient[MASK], expected[MASK])


@pytest.mark.parametrize("loss", variants(), ids=repr)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_first_update_is_reinforces_whatever_the_surrogate(loss: Any, weights: type) -> None:
    """Through the objective, weights and all: on fresh samples of any lengths the gradient is log-prob's."""
    logp, _, δ = drawn(1, 0.0)
    batch = batch_of(δ.squeeze(-1), LENGTHS, logp_old=logp, advantage=δ)
    batch = batch.add(weight=weights()(batch))

    def gradient(algorithm: Algorithm) -> Tensor:
        x = logp.clone().requires_grad_()
        terms = algorithm.objective(batch, Outputs(x, torch.zeros_like(x)))
        return torch.autograd.grad(terms.objective, x)[0]

    close(gradient(Algorithm(loss=loss)), gradient(Algorithm(loss=LogProb())))


@given(st.floats(1.2001, 50), st.floats(0.01, 5))
def test_the_dead_zone_is_exactly_zero(ratio: float, size: float) -> None:
    assert one(Clipped(0.2, 0.2), ratio, size)[1] == 0.0
    assert one(Clipped(0.2, 0.2), 1 / (ratio + 0.05), -size)[1] == 0.0
    assert one(SequenceRatio("mean", 0.2, 0.2), ratio, size)[1] == 0.0
    assert one(Clipped(0.2, 0.2, dual=3.0), 3 + ratio, -size)[1] == 0.0


@given(st.floats(0.02, 50), st.floats(-5, 5))
def test_clipping_never_raises_the_objective(ratio: float, advantage: float) -> None:
    """min(ρδ, …) is a lower bound, and the dual clip lies between it and 0's side of it."""
    plain, clipped = one(Ratio(), ratio, advantage)[0], one(Clipped(0.2, 0.28), ratio, advantage)[0]
    dual = one(Clipped(0.2, 0.28, dual=3.0), ratio, advantage)[0]
    assert clipped <= plain + 1e-12
    assert clipped <= dual + 1e-12


@pytest.mark.parametrize("loss", variants(), ids=repr)
@pytest.mark.parametrize("logp", [0.0, -1e-9, -100.0, -800.0])
def test_saturated_tokens_stay_finite(loss: Any, logp: float) -> None:
    value, gradient = one(loss, 1.0, 1.5, logp_old=logp)
    assert math.isfinite(value)
    assert gradient == pytest.approx(1.5)


# ---- clip fractions -------------------------------------------------------------------------------


def test_clip_fractions_need_ratio_and_sign() -> None:
    """SPEC section 4. Low: ρ < 1−ε_low and δ < 0. High: ρ > 1+ε_high and δ > 0. The masked token is in neither."""
    log_ratio = torch.log(f64([[[0.7, 1.3, 1.25, 0.7], [0.7, 1.3, 1.25, 1.3]]]))
    batch = batch_of([[1, 1]], [[3, 4]], advantage=f64([[[-1.0], [1.0]]]), logp_old=torch.zeros(1, 2, 4, dtype=F64))
    batch = batch.add(weight=SequenceSum()(batch))
    terms = Algorithm(loss=Clipped(0.2, 0.28)).objective(batch, Outputs(log_ratio, torch.zeros_like(log_ratio)))
    # δ < 0: only the first of 0.7 1.3 1.25 (the second 0.7 is masked). δ > 0: both 1.3, not 1.25 and not 0.7.
    assert terms.sums["clip_ratio/low_mean"].item() == 1
    assert terms.sums["clip_ratio/high_mean"].item() == 2


def test_a_clipped_response_counts_all_its_tokens() -> None:
    """Responses with mean log-ratios log 1.5 (δ > 0, 3 tokens) and log 0.5 (δ < 0, 2 tokens)."""
    log_ratio = torch.log(f64([[[1.5, 1.5, 1.5], [0.5, 0.5, 9.0]]]))
    batch = batch_of([[1, 1]], [[3, 2]], advantage=f64([[[1.0], [-1.0]]]), logp_old=torch.zeros(1, 2, 3, dtype=F64))
    batch = batch.add(weight=SequenceSum()(batch))
    terms = Algorithm(loss=SequenceRatio("mean", 0.2, 0.2)).objective(batch, Outputs(log_ratio, log_ratio))
    assert terms.sums["clip_ratio/high_mean"].item() == 3
    assert terms.sums["clip_ratio/low_mean"].item() == 2


@pytest.mark.parametrize("loss", [LogProb(), Ratio(), SequenceRatio("product", None, None)], ids=repr)
def test_what_does_not_clip_has_no_fraction(loss: Any) -> None:
    logp, old, δ = drawn(0, 1.0)
    assert loss.clipped(logp, old, δ, MASK) is None


@pytest.mark.parametrize("cls", LOSSES)
def test_nothing_is_clipped_at_ratio_one(cls: type) -> None:
    _, old, δ = drawn(0, 0.0)
    clips = cls().clipped(old, old, δ, MASK)
    assert clips is None or not bool((clips[0] | clips[1]).any())


# ---- masked tokens --------------------------------------------------------------------------------

FIELDS = ("logp_old", "logp_ref", "logp_sampler", "kept_mass", "logp", "entropy", "kl_full", "value")


def objective_with(algorithm: Algorithm, garbage: dict[str, float]) -> tuple[float, Tensor, dict[str, float]]:
    """The objective, its gradient and its sums, with garbage at the masked positions of these tensors."""
    logp, old, δ = drawn(4, 0.3)

    def spoiled(name: str, tensor: Tensor) -> Tensor:
        return torch.where(MASK, tensor, garbage.get(name, 0.0))

    batch = batch_of(
        δ.squeeze(-1),
        LENGTHS,
        logp_old=spoiled("logp_old", old),
        logp_ref=spoiled("logp_ref", old + 0.1) if algorithm.reference.enabled else None,
        logp_sampler=spoiled("logp_sampler", old - 0.05),
        kept_mass=spoiled("kept_mass", torch.full_like(old, 0.9)),
        valid=torch.tensor([[True, True, True], [True, False, True]]),
        value=torch.nn.functional.pad(spoiled("value", old**2), (0, 1)) if algorithm.critic.enabled else None,
    )
    batch, state = algorithm.compute_advantages(batch, algorithm.initial_state())
    batch = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
    x = spoiled("logp", logp).requires_grad_()
    out = Outputs(x, spoiled("entropy", logp**2), spoiled("kl_full", logp**2))
    terms = algorithm.objective(batch, out)
    (gradient,) = torch.autograd.grad(terms.objective, x)
    return terms.objective.item(), torch.where(MASK, gradient, 0.0), {k: v.item() for k, v in terms.sums.items()}


def objectives() -> dict[str, Algorithm]:
    rows = {name: ALGORITHMS[name] for name in SAMPLED}
    rows["ratio"] = Algorithm(loss=Ratio())
    rows["exact KL"] = Algorithm(kl=InLoss("exact", 0.1), reference=Frozen())
    rows["unclipped product"] = Algorithm(loss=SequenceRatio("product", None, None))
    rows["per-decision"] = Algorithm(
        loss=Ratio("per-decision"), kl=InLoss("k3", 0.1, importance=True), reference=Frozen()
    )
    rows["absolute KL"] = Algorithm(kl=InLoss("abs", 0.1, importance=True), reference=Frozen())
    return rows


@pytest.mark.parametrize("name", objectives())
@pytest.mark.parametrize("field", FIELDS)
def test_masked_tokens_never_matter(name: str, field: str) -> None:
    """No value, gradient or sum depends on masked tokens. Non-finite values are rejected where rollouts come in."""
    algorithm = objectives()[name]
    clean = objective_with(algorithm, {})
    assert math.isfinite(clean[0])
    for value in (7.0, -7.0, 30.0):
        spoiled = objective_with(algorithm, {field: value})
        assert spoiled[0] == clean[0], f"the objective sees {value} at masked positions of {field}"
        assert torch.equal(spoiled[1], clean[1]), f"the gradient sees {value} at masked positions of {field}"
        assert spoiled[2] == clean[2], f"the sums see {value} at masked positions of {field}"


def test_masked_tokens_have_no_gradient() -> None:
    for algorithm in objectives().values():
        logp, old, δ = drawn(4, 0.3)
        batch = batch_of(δ.squeeze(-1), LENGTHS, logp_old=old, advantage=δ, logp_ref=old, kl_coef=0.1)
        batch = batch.add(
            weight=algorithm.weights(batch), valid=torch.tensor([[True, True, True], [True, False, True]])
        )
        batch = batch.add(weight=algorithm.weights(batch))
        x = logp.clone().requires_grad_()
        terms = algorithm.objective(batch, Outputs(x, torch.zeros_like(x), x**2))
        (gradient,) = torch.autograd.grad(terms.objective, x)
        assert torch.equal(gradient[~batch.loss_mask], torch.zeros(int((~batch.loss_mask).sum()), dtype=F64))
        assert bool((gradient[batch.loss_mask] != 0).any())


@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_an_infinite_ratio_of_an_invalid_response_changes_nothing(level: Any) -> None:
    """0 · ∞ would be no number: neither the objective nor its gradient may see what does not count."""
    for algorithm in objectives().values():
        if level == "token" and algorithm.loss.sequence:
            continue
        if level is not None:
            algorithm = replace(algorithm, correction=Masked(level))
        logp, old, δ = drawn(4, 0.3)
        results = []
        for far in (0.0, 1e4):
            batch = batch_of(δ.squeeze(-1), LENGTHS, advantage=δ, kl_coef=0.1)
            off = torch.zeros_like(old)
            off[1, 1] = far
            batch = batch.add(logp_old=old - off, logp_ref=old + off, logp_sampler=old - 2 * off)
            batch = batch.add(valid=torch.tensor([[True, True, True], [True, False, True]]))
            batch = batch.add(correction=algorithm.correction(batch), weight=algorithm.weights(batch))
            x = logp.clone().requires_grad_()
            terms = algorithm.objective(batch, Outputs(x, torch.zeros_like(x), x**2))
            (gradient,) = torch.autograd.grad(terms.objective, x)
            results.append([terms.objective.detach(), gradient, *terms.sums.values()])
        assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*results, strict=True))


def test_cispo_counts_a_clipped_weight_for_either_sign_of_credit() -> None:
    """Its bounds cap the weight of good and bad tokens alike; where δ is 0 there is no weight to cap."""
    logp = torch.log(torch.tensor([[[3.0, 0.1, 1.0, 3.0, 0.1, 1.0, 3.0]]]))
    δ = torch.tensor([[[1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 0.0]]])
    low, high = Cispo(0.2, 0.2).clipped(logp, torch.zeros_like(logp), δ, torch.ones_like(logp, dtype=torch.bool))
    assert low.int().tolist() == [[[0, 1, 0, 0, 1, 0, 0]]]
    assert high.int().tolist() == [[[1, 0, 0, 1, 0, 0, 0]]]


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Clipped, SequenceRatio, Cispo])
@pytest.mark.parametrize("field", ["low", "high"])
@pytest.mark.parametrize("value", [0.0, -0.1, math.nan])
def test_a_bound_is_above_zero(cls: type, field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"--loss\.{field} is .*above 0"):
        replace(cls(), **{field: value})


def test_a_dual_clip_is_above_one() -> None:
    with pytest.raises(ConfigError, match=r"--loss\.dual is 1.*above 1"):
        Clipped(dual=1.0)


def test_sequence_bounds_come_in_pairs() -> None:
    with pytest.raises(ConfigError, match="set both"):
        SequenceRatio("mean", None, 0.1)
