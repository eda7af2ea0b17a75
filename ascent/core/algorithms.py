"""An algorithm is one choice per axis of the menu; the named algorithms are rows of a table."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.core.advantages import (
    ADVANTAGES,
    Advantage,
    BatchNormalized,
    BestOnly,
    Centered,
    LeaveOneOut,
    Normalized,
    Raw,
    RunningMean,
)
from ascent.core.correction import CORRECTIONS, Correction, NoCorrection
from ascent.core.critics import CRITICS, VALUE_SUMS, Critic, NoCritic, OwnCritic
from ascent.core.errors import ConfigError
from ascent.core.exploration import EXPLORATIONS, Exploration, NoBonus
from ascent.core.groups import GROUPS, SHAPINGS, All, Groups, NoShaping, Overlong, Shaping, WithSignal
from ascent.core.kl import KL, KLS, InLoss, InReward, NoKL, adapt, estimate_kl
from ascent.core.losses import LOSSES, Cispo, Clipped, LogProb, Loss, Ratio, SequenceRatio
from ascent.core.menu import name_of
from ascent.core.preferences import PREFERENCES, BradleyTerry, Dpo, Likelihood, StepValue
from ascent.core.reference import REFERENCES, Frozen, NoReference, Reference
from ascent.core.types import Batch, Metrics, Outputs, State, Terms, add_outcome
from ascent.core.update import UPDATES, Adam, TrustRegion, Update
from ascent.core.values import GAE, VALUES, Valued
from ascent.core.weights import WEIGHTS, FixedLength, SequenceMean, SequenceSum, TokenMean, Weights

MENU = {
    "advantage": (*ADVANTAGES, *VALUES),
    "loss": (*LOSSES, *PREFERENCES),
    "weights": WEIGHTS,
    "kl": KLS,
    "reference": REFERENCES,
    "exploration": EXPLORATIONS,
    "correction": CORRECTIONS,
    "groups": GROUPS,
    "shaping": SHAPINGS,
    "critic": CRITICS,
    "update": UPDATES,
}
"""Every axis with its choices, in the order in which a step uses them."""


@dataclass(frozen=True)
class Algorithm:
    """One choice per axis. By default an axis is off."""

    advantage: Advantage = Raw()
    """How rewards become advantages A."""
    loss: Loss = LogProb()
    """The surrogate: what is maximized per token, given A."""
    weights: Weights = SequenceSum()
    """Aggregation: the weight of each token."""
    kl: KL = NoKL()
    """The penalty for leaving the reference."""
    reference: Reference = NoReference()
    """The policy that the KL is measured to."""
    exploration: Exploration = NoBonus()
    """The entropy bonus."""
    correction: Correction = NoCorrection()
    """Importance weights between sampler and trainer."""
    groups: Groups = All()
    """Which groups are trained on."""
    shaping: Shaping = NoShaping()
    """What a response's length does to its reward."""
    critic: Critic = NoCritic()
    """The value function from which advantages are computed."""
    update: Update = Adam()
    """How a step is taken."""

    def __post_init__(self) -> None:
        if self.kl.where != "nowhere" and not self.reference.enabled:
            raise ConfigError(
                f"--kl {name_of(self.kl)} with --reference {name_of(self.reference)}: a KL needs a "
                "reference policy. Set --reference frozen (or every, moving-average), or --kl no-kl"
            )
        if self.sequence and self.correction.enabled and self.correction.level == "token":
            raise ConfigError(
                f"--loss {name_of(self.loss)} has one term per response, but --correction {name_of(self.correction)} "
                "weighs single tokens. Set --correction.level sequence"
            )
        valued = "value" in self.advantage.needs
        critic = f"with --critic {name_of(self.critic)}"
        if valued != self.critic.enabled:
            raise ConfigError(
                f"--advantage {name_of(self.advantage)} {critic}: an advantage from values needs a critic, and "
                "others do not use one. Set --advantage gae and --critic own-critic, or neither"
            )
        if self.update.full_batch and self.critic.shared:
            why = "what the critic learns would move the policy out of the region. Set --critic own-critic"
            raise ConfigError(f"--update {name_of(self.update)} {critic}: {why}")
        self.loss.check(self)

    @property
    def sequence(self) -> bool:
        """Return whether the surrogate has one term per response; advantages per token make it one per token."""
        per_token = "value" in self.advantage.needs or (self.kl.where == "reward" and self.kl.per == "token")
        return self.loss.sequence and not per_token

    @property
    def needs(self) -> frozenset[str]:
        """Return the batch fields that these choices read beyond tokens, mask, reward and logp."""
        exact = self.kl.where == "reward" and self.kl.estimator == "exact"
        old = ["logp_old"] * self.correction.enabled
        return self.advantage.needs.union(["logp_ref"] * self.reference.enabled, ["kl_full"] * exact, old)

    @property
    def outputs(self) -> frozenset[str]:
        """Return what the training forward pass must compute with gradients, besides logp."""
        exact = ["kl_full"] * (self.kl.where == "loss" and self.kl.estimator == "exact")
        bonus = ["entropy"] * (not isinstance(self.exploration, NoBonus))
        return frozenset(exact + bonus + ["value"] * self.critic.shared)

    def initial_state(self) -> State:
        """Return the state of the choices before the first step."""
        return self.advantage.initial_state() | ({} if self.kl.where == "nowhere" else {"kl_coef": self.kl.coef})

    def exclude_responses(self, batch: Batch) -> Batch:
        """Mark the responses that are not trained on: truncated ones, and those that the correction rejects."""
        excluded = [batch.truncated] if self.groups.mask_truncated else []
        excluded += [self.correction.rejected(batch)] if self.correction.geometric is not None else []
        return batch.add(excluded=excluded[0] | excluded[-1]) if excluded else batch

    def shape_rewards(self, batch: Batch, state: State) -> Batch:
        """Return the batch with the reward from which advantages are computed: shaped by length, minus the KL."""
        extra = self.shaping(batch)
        if extra is not None:
            batch = batch.add(reward=add_outcome(batch, extra))
        if self.kl.where == "reward":
            assert batch.logp_old is not None
            penalty = estimate_kl(self.kl.estimator, batch.logp_old, batch.logp_ref, batch.kl_full)
            batch = batch.add(reward=self.kl.shaped(batch, penalty, state["kl_coef"]))
        return batch

    def compute_advantages(self, batch: Batch, state: State) -> tuple[Batch, State]:
        """Add advantages, returns and importance weights to the batch; return it and the choices' next state."""
        correction, batch = self.correction(batch), self.exclude_responses(batch)
        shaped = self.shape_rewards(batch, state)
        A = self.advantage(shaped, state)
        if A.shape[:-1] != batch.valid.shape or A.shape[-1] not in (1, batch.mask.shape[-1]):
            raise ConfigError(
                f"--advantage {name_of(self.advantage)} returned {list(A.shape)}: an advantage is [prompt sample 1] or "
                f"[prompt sample token], here {[*batch.valid.shape, 1]} or {list(batch.mask.shape)}"
            )
        returns = self.advantage.returns(shaped) if isinstance(self.advantage, Valued) else None
        batch = batch.add(advantage=A, returns=returns, correction=correction)
        return batch, self.advantage.update_state(shaped, state)

    def scalars(self, state: State, progress: float) -> dict[str, float]:
        """Return the numbers of this step that losses and updates read."""
        return {"entropy_coef": self.exploration(progress), "kl_coef": state.get("kl_coef", 0.0), "progress": progress}

    def objective(self, mini: Batch, out: Outputs) -> Terms:
        """Return Σ weight · (surrogate − β·KL + c·entropy) − c_v · value loss, to be maximized, with sums to report.

        A pure function of a mini-batch and of what the learner computed for it.
        """
        assert mini.advantage is not None and mini.weight is not None
        if (whole := self.loss.terms(mini, out)) is not None:
            return whole
        mask, now = mini.loss_mask, out.logp.detach()
        logp_old = now if mini.logp_old is None else mini.logp_old.where(mask, now)  # 0·∞ would be NaN
        surrogate = self.loss(out.logp, logp_old, mini.advantage, mask)
        if mini.correction is not None:
            surrogate = surrogate * mini.correction
        objective = _total(mini.weight, surrogate)
        sums = {"entropy": (out.entropy.detach() * mask).sum()}
        if mini.logp_ref is not None:
            full = out.kl_full if out.kl_full is not None else mini.kl_full
            kl = estimate_kl(self.kl.estimator, out.logp, mini.logp_ref.where(mask, now), full)
            if self.kl.importance:
                kl = torch.exp(self.loss.log_ratio(out.logp - logp_old, mask)) * kl
            if self.kl.where == "loss":
                objective = objective - mini.kl_coef * _total(mini.weight, kl)
            sums["kl"] = (kl.detach() * mask).sum()
        if mini.entropy_coef:
            objective = objective + mini.entropy_coef * _total(mini.weight, out.entropy)
        if out.value is not None:
            values = self.critic.loss(mini, out.value).flatten()
            objective = objective - self.critic.coef / max(mini.tokens, 1) * values[0]
            sums |= zip(VALUE_SUMS, values.detach(), strict=False)
        clips = self.loss.clipped(now, logp_old, mini.advantage, mask)
        if clips is not None:
            sums["clip_ratio/low_mean"] = (clips[0] & mask).sum()
            sums["clip_ratio/high_mean"] = (clips[1] & mask).sum()
        return Terms(objective, sums)

    def update_state(self, state: State, metrics: Metrics) -> State:
        """Adapt the KL coefficient to the step's KL; a step without an update has none."""
        if self.kl.target is None or "kl" not in metrics:
            return state
        return {**state, "kl_coef": adapt(state["kl_coef"], metrics["kl"], self.kl.target)}


def _total(weight: Float[Tensor, "prompt sample token"], term: Float[Tensor, "prompt sample #token"]) -> Tensor:
    """Return Σ weight · term; a term per response is weighted by the sum of its tokens' weights."""
    if term.shape[-1] != weight.shape[-1]:
        weight = weight.sum(-1, keepdim=True)
    return (weight * term).sum()


_CLIP = Clipped(0.2, 0.2)
GRPO = Algorithm(Normalized(1e-4), _CLIP, SequenceMean(), InLoss("k3", 0.04), Frozen())

ALGORITHMS = {
    "reinforce": Algorithm(Raw(), LogProb(), SequenceSum()),
    "reinforce-baseline": Algorithm(RunningMean(), LogProb(), SequenceSum()),
    "best-only": Algorithm(BestOnly(), LogProb(), SequenceSum()),
    "rloo": Algorithm(LeaveOneOut(), LogProb(), SequenceSum(), InReward("k1", 0.05, "response"), Frozen()),
    "reinforce++": Algorithm(BatchNormalized(), _CLIP, TokenMean(), InReward("k1", 0.01, "token"), Frozen()),
    "grpo": GRPO,
    "dr-grpo": replace(GRPO, advantage=Centered(), weights=FixedLength(), kl=NoKL(), reference=NoReference()),
    "dapo": Algorithm(Normalized(), Clipped(0.2, 0.28), TokenMean(), groups=WithSignal(), shaping=Overlong()),
    "gspo": Algorithm(Normalized(), SequenceRatio("mean", 3e-4, 4e-4), SequenceMean()),
    "cispo": Algorithm(Normalized(), Cispo(low=1.0, high=4.0), TokenMean()),
    "actor-critic": Algorithm(GAE(1.0, 0.95), LogProb(), TokenMean(), critic=OwnCritic()),
    "ppo": Algorithm(GAE(1.0, 0.95, whitened=True), _CLIP, TokenMean(), critic=OwnCritic()),
    "trpo": Algorithm(LeaveOneOut(), Ratio(), TokenMean(), update=TrustRegion(0.01)),
    "sft": Algorithm(Raw(), Likelihood(), TokenMean()),
    "dpo": Algorithm(Raw(), Dpo(0.1), SequenceMean(), reference=Frozen()),
    "reward-model": Algorithm(Raw(), BradleyTerry(), SequenceMean()),
    "process-reward": Algorithm(Raw(), StepValue(), TokenMean()),
}
"""The named algorithms, as in their papers. `ascent explain NAME` says what other libraries compute."""
