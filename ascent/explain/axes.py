"""What is said of the choices of weights, exploration, correction, groups, shaping, critic and update."""

from __future__ import annotations

from typing import Any

from ascent.core import correction, critics, exploration, groups, trust_region, update, weights
from ascent.explain.about import About, off

COUNTED = "counted over the mini-batch of one optimizer step, however it is split into micro-batches"


def _importance(c: Any) -> str:
    return f"w = {'' if c.level == 'token' else 'Π_t '}exp(logp_old_t − logp_sampler_t)·m_t"


ABOUT_AXES: dict[type, About] = {
    weights.TokenMean: About(
        formula="1/ΣL",
        response_formula="L_i/ΣL",
        words="mean over tokens of",
        response_words="length-weighted mean over responses of",
        denominator=f"ΣL, the unmasked tokens of all scored responses, {COUNTED}.",
        bias="In direction where lengths differ: ΣL depends on what was sampled (cosine with ∇E[R] 0.99 on a "
        "three-token policy with an end token, even for raw credit).",
        trl='loss_type="dapo" (the default): tokens of the whole generation batch; "bnpo": of the local micro-batch.',
        verl="token-mean (the default), over the tokens of the global mini-batch.",
    ),
    weights.SequenceMean: About(
        formula="1/(N·L_i)",
        response_formula="1/N",
        words="mean over responses of the token mean of",
        response_words="mean over responses of",
        denominator=f"N responses, and for each its own L_i unmasked tokens; N is {COUNTED}.",
        bias="In direction where lengths differ: 1/L_i makes a token of a long response count less (cosine with ∇E[R] "
        "0.97 on a three-token policy with an end token, even for raw credit).",
        trl='loss_type="grpo"; the mean is taken in each micro-batch, so their sizes matter.',
        verl="seq-mean-token-mean.",
    ),
    weights.SequenceSum: About(
        formula="1/N",
        response_formula="L_i/N",
        words="mean over responses of the token sum of",
        response_words="mean over responses of the length times",
        denominator=f"N, the scored responses, {COUNTED}. No length divides.",
        gradient="exact",
        bias="None: it is ∇E[R] itself.",
        trl='loss_type="luspo" sums tokens and averages responses.',
        verl="seq-mean-token-sum.",
    ),
    weights.FixedLength: About(
        formula="1/(N·L_max)",
        response_formula="L_i/(N·L_max)",
        words="mean over responses of the token sum over the length limit of",
        response_words="mean over responses of the length over its limit times",
        denominator=f"N responses times L_max, the generation limit (never the padded width); N is {COUNTED}.",
        gradient="scaled",
        bias="In length only: ∇E[R] over the constant L_max.",
        trl='loss_type="dr_grpo", over max_completion_length.',
        verl="seq-mean-token-sum-norm, over loss_scale_factor; that is unset by default, and then the padded width.",
    ),
    exploration.NoBonus: off(trl="the default.", verl="the default."),
    exploration.Constant: About(
        formula="{coef:g}·H",
        words="{coef:g} × the entropy",
        bias="It moves the optimum while it is on; the entropy is that of visited states, which are held fixed.",
        trl="entropy_coef, times the token mean of the entropy whatever the loss_type.",
        verl="entropy_coeff, aggregated as the loss is.",
    ),
    exploration.Annealed: About(
        formula="c·H",
        statistics="c = {start:g} + ({end:g} − {start:g}) · min(1, p / {until:g}), p from 0 to 1 over the run",
        words="c × the entropy, c falling from {start:g} to {end:g} over {until:.0%} of the run",
        bias="It moves the optimum until it has fallen to 0. The task `lecture` needs it: without it even the exact "
        "gradient stops at E[R] ≈ 3.9 of 5.",
        trl="none; use_adaptive_entropy steers the coefficient to a target entropy instead.",
    ),
    correction.NoCorrection: off(
        bias="As much as sampler and trainer differ; it is measured.", trl="", verl="the default (rollout_is null)."
    ),
    correction.Truncated: About(
        formula="min(w, {cap:g})·",
        statistics=_importance,
        words="weighted by how much likelier the trainer finds it, at most {cap:g}",
        bias="Where w > c; per token also because the sampler chose the earlier tokens. The product is exact up to c.",
        trl="with vLLM: token_truncate or sequence_truncate, up to 3.0.",
        verl="rollout_is token or sequence, up to 2.0.",
    ),
    correction.Masked: About(
        formula="w·1[{low:g} ≤ w ≤ {high:g}]·",
        statistics=_importance,
        words="weighted by how much likelier the trainer finds it, and by 0 outside {low:g} to {high:g}",
        bias="What is outside the band is dropped; per token also because the sampler chose the earlier tokens.",
        trl="with vLLM the default: sequence_mask, 0 where the response's weight exceeds 3.0, no lower bound.",
        verl='a threshold "low_high" sets weights outside the band to 0.',
    ),
    groups.All: off(trl="always.", verl="the default."),
    groups.WithSignal: About(
        words="Groups of equal rewards are replaced by new prompts, in at most {rounds} draws per step",
        bias="Prompts of medium difficulty are trained on more often. Where δ is 0 on an all-equal group anyway, only "
        "the denominator changes: the other groups weigh more.",
        trl="none in GRPOTrainer.",
        verl="algorithm.filter_groups, off by default, on a metric of choice; draws are not limited unless set.",
    ),
    groups.NoShaping: off(trl="the default.", verl="the default."),
    groups.Overlong: About(
        formula="overlong(L_i)",
        statistics="overlong: with limit L and c = {margin}: 0 up to L − c tokens, then (L − c − length)/c, −1 if "
        "truncated",
        words="falls by up to 1 over the last {margin} tokens before the length limit",
        bias="It changes the reward: responses near the limit earn less, even right ones.",
        trl="a reward function, get_soft_overlong_punishment.",
        verl="the DAPO reward manager's overlong_buffer, times a penalty_factor.",
    ),
    critics.NoCritic: off(trl="GRPOTrainer and RLOOTrainer.", verl="every estimator except gae."),
    critics.OwnCritic: About(
        words="The critic, on a backbone of its own, is fitted to the returns by least squares",
        bias="None of its own: see the credit.",
        trl="none: TRL 1.16 has no critic.",
        verl="a separate critic: ½·max of both squares, cliprange_value 0.5, learning rate 1e-5.",
    ),
    critics.SharedCritic: About(
        words="The critic, on the policy's backbone, is fitted to the returns by least squares",
        bias="The critic's steps move the policy too, and not along ∇E[R].",
        trl="none: TRL 1.16 has no critic.",
        verl="none: the critic is a separate worker.",
    ),
    update.Adam: About(
        bias="The step is not along the gradient: each coordinate is scaled by its own history, and max_norm shortens "
        "large gradients.",
        trl="learning rate 1e-6.",
        verl="learning rate 1e-6, weight decay 0.01, gradient norm at most 1.",
    ),
    trust_region.TrustRegion: About(
        words="A step keeps the KL to the policy that sampled within {delta:g} nats per token",
        bias="The step is along F⁻¹g, not along the gradient; its length is set by the trust region, not by the "
        "gradient.",
        paper="Schulman et al. 2015: the same; the line search there also tests KL and gain.",
        others="none of the language-model trainers we looked at has one.",
    ),
}
