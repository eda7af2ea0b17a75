"""What is said of the KL penalty: where it goes, how it is estimated, and the reference that it is measured to."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from ascent.core import kl, reference
from ascent.explain.about import About, off


class Estimator(NamedTuple):
    """An estimator of KL(π ‖ π_ref), and what its gradient is on the policy's own samples."""

    formula: str
    loss: str
    """Its gradient as a penalty in the loss."""
    reward: str
    """Its gradient as a penalty in the reward."""


ABOUT_ESTIMATORS = {
    "k1": Estimator(
        "ℓ",
        loss="its expected gradient is 0: the penalty only adds noise",
        reward="its gradient is exactly −β ∇KL(π ‖ π_ref), at any length: use this one in the reward",
    ),
    "k2": Estimator(
        "½ ℓ²",
        loss="its gradient is ∇KL(π ‖ π_ref) for one token or a whole response; per token on an autoregressive "
        "policy it misses what a token does to the KL of later ones and is 4.6 % off",
        reward="its gradient is not the KL's; it can even raise the KL (cosine with ∇KL −0.34)",
    ),
    "k3": Estimator(
        "e^−ℓ + ℓ − 1",
        loss="its gradient is that of the other direction, ∇KL(π_ref ‖ π), for one token or a whole response; per "
        "token on an autoregressive policy it is 30 % off even that",
        reward="its gradient is not the KL's; it can even raise the KL (cosine with ∇KL −0.55)",
    ),
    "exact": Estimator(
        "Σ_v π(v)·(log π(v) − log π_ref(v)), over the whole vocabulary at each state",
        loss="its gradient is ∇KL(π ‖ π_ref) at each visited state, held fixed; on an autoregressive policy it is "
        "4.6 % off",
        reward="its gradient is not the KL's; it can even raise the KL (cosine with ∇KL −0.36)",
    ),
}


def coefficient(c: Any) -> str:
    """β of a penalty in a formula: its number, or the letter if it is adaptive."""
    return f"{c.coef:g}" if c.target is None else "β"


def _statistics(c: Any) -> str:
    estimate = f"{c.estimator} = {ABOUT_ESTIMATORS[c.estimator].formula}, with ℓ = log π − log π_ref"
    if c.target is None:
        return estimate
    return f"{estimate}\n{inspect.getdoc(kl.adapt)}, from {c.coef:g}, with the target {c.target:g}"


def _words(c: Any) -> str:
    steered = "" if c.target is None else f" (from {c.coef:g}, steered to a KL of {c.target:g} per token)"
    estimate = "the exact KL" if c.estimator == "exact" else f"the {c.estimator} estimate of the KL"
    return f"{coefficient(c)}{steered} × {estimate}"


ABOUT_KL: dict[type, About] = {
    kl.NoKL: off(trl="GRPOTrainer's default (beta=0).", verl="the default."),
    kl.InLoss: About(
        formula=lambda c: f"{coefficient(c)}·{c.estimator}",
        statistics=_statistics,
        words=_words,
        bias="The penalty's gradient is not that of the KL (below), and it moves the optimum from E[R] to E[R] − β·KL.",
        trl="k3, times ρ by default (use_bias_correction_kl): at ρ = 1 that has k2's gradient, not k3's. beta is 0.",
        verl="use_kl_loss, off by default; 0.001, k3 clamped to ±10; `k3+` has k3's value and k2's gradient.",
    ),
    kl.InReward: About(
        formula=lambda c: f"{coefficient(c)}·{'Σ_t ' if c.per == 'response' else ''}{c.estimator}",
        statistics=_statistics,
        words=_words,
        gradient=lambda c: "exact" if c.estimator == "k1" else "other",
        bias="With k1 only the intended one: the objective is E[R] − β·KL(π ‖ π_ref). For the others see below.",
        trl="RLOOTrainer: k1 summed over the response, 0.05, fixed.",
        verl="use_kl_in_reward, off by default; k1 per token, 0.001; adapted by batch size / 10000 (here 0.1).",
    ),
    reference.NoReference: off(trl="none is loaded at beta=0.", verl=""),
    reference.Frozen: About(
        words="the frozen start",
        bias="None of its own: see the KL.",
        trl="the default with beta > 0.",
        verl="the reference model.",
    ),
    reference.Every: About(
        words="the policy as it was at the last multiple of {n} steps",
        bias="The reference moves, so the penalty limits the speed, not the distance from the start.",
        trl="sync_ref_model with ref_model_mixup_alpha=1 and ref_model_sync_steps=n; by default 0.6 every 512 steps.",
        verl="none in its settings.",
        paper="iterative GRPO renews the reference in its outer loop.",
    ),
    reference.MovingAverage: About(
        words="a moving average of the policy (rate {rate:g})",
        bias="As with `every`, the penalty limits the speed, not the distance from the start.",
        trl="sync_ref_model with ref_model_sync_steps=1; its alpha is the rate here.",
        verl="none in its settings.",
    ),
}
