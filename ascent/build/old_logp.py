"""Decide, before step 0, whether logp_old is the rollout engine's log-probs or the learner's.

Engine and learner compute the same log-probs in different orders. In float32 they agree to about 1e-6. In half
precision they differ by about 0.01, so with the engine's logp_old the ratio ρ = exp(logp − logp_old) starts at 1 plus
noise. A few responses are generated to measure this noise, and the loss is evaluated with and without it: a ratio per
token, clipped at 1 ± 0.2, hardly changes; GSPO's ratio per response, clipped at 1 ± 3e-4, is clipped by noise alone.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ascent.core.config import Config
from ascent.core.correction import log_weight
from ascent.core.losses import Loss
from ascent.core.menu import name_of
from ascent.core.protocols import Learner, RolloutEngine
from ascent.core.types import Batch, Prompts, to_batch

MAX_PROMPTS, MAX_SAMPLES, MAX_TOKENS = 4, 8, 256
"""Maximum numbers of prompts, samples and tokens to measure the gap. Bounds on whole responses need whole responses."""
GAP_MARGIN = 2.0
"""Approximate ratio of the largest gap in a training run to that of a few responses."""
MAX_GRAD_CHANGE = 0.005
"""Largest relative change of the gradient by noise at which logp_old still comes from the engine."""


@dataclass(frozen=True)
class Effect:
    """The effect of noise in logp_old on a loss before the first update."""

    grad_change: float
    """Relative change of the gradient with respect to logp."""
    clipped_fraction: float
    """Fraction of tokens that noise alone clips."""

    @classmethod
    def of(cls, loss: Loss, logp: Tensor, noise: Tensor, loss_mask: Tensor) -> "Effect":
        """Evaluate the loss for advantages of 1 and of −1, because the sign decides which bound applies."""
        grad_change, clipped = 0.0, torch.zeros_like(loss_mask)
        for sign in (1.0, -1.0):
            advantage = torch.full((*loss_mask.shape[:2], 1), sign, dtype=logp.dtype)
            true, noisy = (_surrogate_grad(loss, logp, old, advantage, loss_mask) for old in (logp, logp + noise))
            grad_change = max(grad_change, float((noisy - true).norm() / true.norm().clamp(min=1e-30)))
            for side in loss.clipped(logp, logp + noise, advantage, loss_mask) or ():
                clipped |= side & loss_mask
        return cls(grad_change, float(clipped.sum() / loss_mask.sum().clamp(min=1)))


def _surrogate_grad(loss: Loss, logp: Tensor, logp_old: Tensor, advantage: Tensor, loss_mask: Tensor) -> Tensor:
    """∂ surrogate / ∂ logp at the tokens of the loss mask."""
    with torch.enable_grad():
        logp = logp.detach().requires_grad_()
        (grad,) = torch.autograd.grad(loss(logp, logp_old, advantage, loss_mask).sum(), logp)
    return grad[loss_mask]


def needs_measurement(config: Config, dtype: torch.dtype) -> bool:
    """Return whether the gap can matter: in float32, or for a loss without a ratio, it cannot.

    A correction is measured in any precision, because its bounds also apply to the probability mass kept by top-p,
    top-k or min-p.
    """
    if config.data != "samples" or config.algorithm.loss.trains != "policy":
        return False
    if getattr(config.policy, "engine", "local") != "local":  # it starts with the first step, which probes it
        return False
    one = torch.zeros(1, 1, 1)
    has_ratio = Effect.of(config.algorithm.loss, one, one - 1, one == 0).grad_change > 0
    return "logp_old" in config.algorithm.needs or (has_ratio and torch.finfo(dtype).bits < 32)


def measure_gap(config: Config, learner: Learner, engine: RolloutEngine, prompts: Prompts) -> Batch:
    """Generate a few responses; return them with the learner's log-probs as logp_old."""
    needs_whole_responses = config.algorithm.loss.sequence or config.algorithm.correction.enabled
    engine.load(learner.params(), version=0)
    limit = engine.limit if needs_whole_responses else min(engine.limit, MAX_TOKENS)
    rollouts = engine.generate(prompts, min(config.samples, MAX_SAMPLES), limit=limit)
    shape = rollouts.mask.shape[:2]
    batch = to_batch(rollouts, reward=torch.zeros(*shape, 1), valid=torch.ones(shape, dtype=torch.bool))
    return batch.add(**learner.score(batch, frozenset({"logp_old"})))


def resolve(config: Config, batch: Batch) -> tuple[Config, tuple[str, ...]]:
    """Return the config with old_logp decided, and notes about every bound that the gap reaches."""
    assert batch.logp_old is not None
    loss, loss_mask, noise = config.algorithm.loss, batch.loss_mask, batch.logp_sampler - batch.logp_old
    large, usual = (Effect.of(loss, batch.logp_old, scale * noise, loss_mask) for scale in (GAP_MARGIN, 1.0))
    apart = f"the log-probs of sampler and learner are {float(noise[loss_mask].abs().mean()):.2g} apart on average"
    share = f"{usual.clipped_fraction:.0%} of the tokens are" if usual.clipped_fraction else "some ratios are soon"
    outside = f"{apart}, so that {share} outside the bounds of --loss {name_of(loss)} before the policy has moved"
    notes = [] if (cut := _correction_warning(config, batch)) is None else [cut]
    if config.old_logp == "auto":
        config = replace(
            config, old_logp="learner" if large.clipped_fraction or large.grad_change > MAX_GRAD_CHANGE else "sampler"
        )
        if config.old_logp == "learner":
            why = (
                outside
                if large.clipped_fraction
                else f"{apart}, which would change about {usual.grad_change:.1%} of the gradient"
            )
            notes.append(f"--old-logp learner was chosen: {why}")
    elif config.old_logp == "sampler" and large.clipped_fraction:
        notes.append(f"warning: {outside}. Set --old-logp learner, or leave it out")
    return config, tuple(notes)


def _correction_warning(config: Config, batch: Batch) -> str | None:
    """Warn if the bounds of the correction change weights before any update; None: they do not."""
    correction, factor = config.algorithm.correction, config.algorithm.correction(batch)
    if factor is None or batch.logp_old is None or correction.normalized:
        return None
    if correction.geometric is not None:
        factor = factor.masked_fill(correction.rejected(batch).unsqueeze(-1), 0.0)
    what, log_w, loss_mask = "tokens", log_weight(batch.logp_old, batch), batch.loss_mask
    if correction.level == "sequence":
        what, log_w, loss_mask = "responses", log_w.sum(-1, keepdim=True), batch.valid.unsqueeze(-1)
    cut, dropped = (float(which[loss_mask].double().mean()) for which in (factor != log_w.exp(), factor == 0))
    if not cut:
        return None
    kept = "" if batch.kept_mass is None else "; the weights include the mass kept by --top-p, --top-k or --min-p"
    per_token = correction.level == "sequence" and not config.algorithm.loss.sequence
    return (
        f"warning: --correction {name_of(correction)} cuts the weights of {cut:.0%} of the {what} and drops "
        f"{dropped:.0%}, before the policy has moved{kept}. Widen its bounds"
        f"{', or set --correction.level token' if per_token else ''}"
    )
