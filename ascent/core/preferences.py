"""Losses on offline data, with the same learner as RL: demonstrations, preference pairs and labelled steps.

A demonstration is one response to its prompt, with reward 1. A pair is two: sample 0 was chosen (reward 1),
sample 1 rejected (reward 0). A term of a pair has sample length 1 and takes the sum of its tokens' weights, which
with sequence-mean is 1/pairs. The policy did not sample these responses, so there is no ratio to an old policy.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ascent.core.advantages import Raw
from ascent.core.correction import NoCorrection
from ascent.core.errors import ConfigError
from ascent.core.exploration import NoBonus
from ascent.core.groups import All, NoShaping
from ascent.core.kl import NoKL
from ascent.core.losses import LogProb, Loss
from ascent.core.menu import name_of
from ascent.core.reference import NoReference
from ascent.core.types import Batch, Outputs, Terms
from ascent.core.update import Adam
from ascent.core.weights import SequenceMean

Rating = Float[Tensor, "prompt sample 1"]
Margin = Float[Tensor, "prompt 1 1"]


def _refuse_others(row: Any, loss: Loss, **wanted: type) -> None:
    """Refuse choices that have no effect or no meaning for data that the policy did not sample."""
    always = {"advantage": Raw, "correction": NoCorrection, "groups": All, "shaping": NoShaping}
    for axis, kind in (always | wanted).items():
        if type(getattr(row, axis)) is not kind:
            raise ConfigError(
                f"--loss {name_of(loss)} with --{axis} {name_of(getattr(row, axis))}: it learns from {loss.data}, "
                f"which the policy did not sample, so --{axis} has no effect. Set --{axis} {name_of(kind)}"
            )
    given = {f"--critic {name_of(row.critic)}": row.critic.enabled, f"--kl {name_of(row.kl)}": row.kl.where == "reward"}
    given |= {"--kl.importance": row.kl.importance, "--groups.mask-truncated": row.groups.mask_truncated}
    for what in (what for what, on in given.items() if on):
        raise ConfigError(f"--loss {name_of(loss)} with {what}: {loss.data} have no reward; leave it at its default")


@dataclass(frozen=True)
class Likelihood(LogProb):
    """Log-probability of demonstrations: supervised fine-tuning (SFT).

    A · log π, with A = 1 on a demonstrator's responses
    The log-prob surrogate, and maximum likelihood. Bias: the gradient is that of −KL(demonstrator ‖
    π), so π converges to the demonstrator, mistakes and all. On π's own samples its mean is 0.
    """

    data = "demonstrations"

    def check(self, row: Any) -> None:
        _refuse_others(row, self)


class PairLoss(Loss):
    """A loss on pairs: log σ of how much higher the chosen response scores than the rejected one."""

    data = "pairs"

    def rating(self, mini: Batch, out: Outputs) -> Rating:
        """What a response is worth."""
        raise NotImplementedError

    def value(self, rating: Rating) -> Margin:
        """What is maximized for each pair."""
        return functional.logsigmoid(margin_of(rating))

    def check(self, row: Any) -> None:
        _refuse_others(row, self, weights=SequenceMean, kl=NoKL, exploration=NoBonus)

    def terms(self, mini: Batch, out: Outputs) -> Terms:
        """Σ over pairs of weight · value, with the four metrics that TRL reports for pairs."""
        assert mini.weight is not None
        if mini.mask.shape[1] != 2:
            raise ConfigError(f"--loss {name_of(self)}: a pair has two responses, but there are {mini.mask.shape[1]}")
        weight = mini.weight.sum((1, 2), keepdim=True)
        rating = self.rating(mini, out)
        fixed = rating.detach()
        margin = margin_of(fixed)
        figures = {
            "rewards/chosen": fixed[:, :1],
            "rewards/rejected": fixed[:, 1:],
            "rewards/margins": margin,
            "rewards/accuracies": (margin > 0).to(margin.dtype),
        }
        sums = {"entropy": (out.entropy.detach() * mini.loss_mask).sum()} if self.trains == "policy" else {}
        means = {name: (weight * figure).sum() for name, figure in figures.items()}
        return Terms((weight * self.value(rating)).sum(), sums, means)


def margin_of(rating: Rating) -> Margin:
    """How much higher the chosen response scores."""
    return rating[:, :1] - rating[:, 1:]


@dataclass(frozen=True)
class Dpo(PairLoss):
    """Direct preference optimization: the policy's log-ratio is the reward that explains the pairs.

    log σ(β(Δ_w − Δ_l)),  Δ = Σ_t (logp_t − logp_ref_t) over the response
    Rafailov et al. 2023; smoothing ε, Mitchell 2023 (cDPO): (1−ε)·log σ(m) + ε·log σ(−m). Only
    differences count: both log-probs may fall. Bias: the optimum is that of E[R] − β·KL(π ‖ π_ref)
    if pairs follow Bradley–Terry with this R and cover what π may say; on finitely many pairs the
    log-ratios grow without bound. Degenerate case: at π = π_ref every margin is 0 and the loss log 2.
    """

    beta: float = 0.1
    """β: how strongly the policy is held to the reference; a reward is β times a log-ratio."""
    smoothing: float = 0.0
    """ε: the share of labels that are taken to be the wrong way round, below 0.5."""

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ConfigError(f"--loss.beta is {self.beta:g}: a reward is β times a log-ratio, so set it above 0")
        if not 0 <= self.smoothing < 0.5:
            raise ConfigError(
                f"--loss.smoothing is {self.smoothing:g}: a share of wrong labels lies from 0 to below 0.5"
            )

    def check(self, row: Any) -> None:
        super().check(row)
        if not row.reference.enabled:
            raise ConfigError(
                f"--loss dpo with --reference {name_of(row.reference)}: it compares the policy with a reference. Set "
                "--reference frozen"
            )

    def rating(self, mini: Batch, out: Outputs) -> Rating:
        assert mini.logp_ref is not None
        return self.beta * torch.where(mini.mask, out.logp - mini.logp_ref, 0.0).sum(-1, keepdim=True)

    def value(self, rating: Rating) -> Margin:
        margin = margin_of(rating)
        if not self.smoothing:
            return functional.logsigmoid(margin)
        return (1 - self.smoothing) * functional.logsigmoid(margin) + self.smoothing * functional.logsigmoid(-margin)


@dataclass(frozen=True)
class BradleyTerry(PairLoss):
    """A reward model: a head on a backbone, read after the last token of a response.

    log σ(r_w − r_l) − c·(r_w + r_l)²
    Bradley and Terry 1952; Ouyang et al. 2022; the second term, Eisenstein et al. 2023, is off by
    default. Assumes that a response is preferred with probability σ(r_w − r_l). r is known up to a
    constant only, which c fixes. Bias: it is a maximum likelihood fit, and only as good as its
    pairs. Away from those pairs it extrapolates, and a policy trained on it will exploit that.
    Degenerate case: where every pair is right r grows without bound, so hold pairs out and look at
    the calibration.
    """

    center: float = 0.0
    """c: pulls the mean reward to 0. TRL's center_rewards_coefficient, usually 0.01 there."""
    trains = "rewards"

    def __post_init__(self) -> None:
        if not self.center >= 0:
            raise ConfigError(f"--loss.center is {self.center:g}: it pulls rewards to 0, so it is 0 or more")

    def check(self, row: Any) -> None:
        super().check(row)
        if row.reference.enabled or row.update.full_batch:
            axis = "reference" if row.reference.enabled else "update"
            what = f"--{axis} {name_of(getattr(row, axis))}"
            raise ConfigError(
                f"--loss bradley-terry with {what}: a reward model has neither a reference nor a trust region. Set "
                "--reference no-reference --update adam"
            )

    def rating(self, mini: Batch, out: Outputs) -> Rating:
        if out.rating is None:
            raise ConfigError("--loss bradley-terry trains a reward model, but this learner has a policy")
        return out.rating

    def value(self, rating: Rating) -> Margin:
        value = functional.logsigmoid(margin_of(rating))
        return value - self.center * rating.sum(1, keepdim=True) ** 2 if self.center else value


@dataclass(frozen=True)
class StepValue(Loss):
    """A process reward: a head on a backbone, read after every token of a response in steps.

    −½ (v_t − y_t)²,  y_t the label of the step that token t is part of
    Lightman et al. 2023; labels from rollouts, Wang et al. 2024. Bias: the optimum is the mean
    label given the tokens so far. With labels from k rollouts it is the value function of the
    policy that made them, for any k, and not of a later policy. Degenerate case: within a step v
    foresees the label of its end, on average.
    """

    data = "steps"
    trains = "steps"

    def check(self, row: Any) -> None:
        _refuse_others(row, self, kl=NoKL, exploration=NoBonus, reference=NoReference, update=Adam)

    def terms(self, mini: Batch, out: Outputs) -> Terms:
        assert mini.weight is not None
        if out.rating is None:
            raise ConfigError("--loss step-value trains a process reward, but this learner has a policy")
        error = torch.where(mini.loss_mask, out.rating - mini.reward, 0.0) ** 2
        return Terms(-0.5 * (mini.weight * error).sum(), {"steps/error": error.detach().sum()})


PREFERENCES = (Likelihood, Dpo, BradleyTerry, StepValue)
RESPONSES_PER_PROMPT = {"demonstrations": 1, "pairs": 2, "steps": 1}
"""Responses per prompt."""
