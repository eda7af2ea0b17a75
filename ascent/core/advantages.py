"""Advantages: how rewards become A, the factor on ∇ log π. One frozen dataclass per choice.

A group-relative advantage compares the G responses to a prompt, `[prompt sample]`. A response whose reward failed has
advantage 0 and is not counted in G; a group of one has advantage 0. With a reward per token, R is the reward-to-go
from that token: means are then taken at each token index over the whole group, where responses that have ended count
as 0, and std and maximum are those of the totals.

"Bias:" in a docstring is that of the gradient, with sequence-sum weights and on the policy's own samples.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.types import Batch, State, per_token_reward, reward_to_go

Advantages = Float[Tensor, "prompt sample #token"]
Keep = Bool[Tensor, "prompt sample 1"]


def _group(batch: Batch) -> tuple[Advantages, Keep, Float[Tensor, "prompt 1 1"]]:
    """Return R (0 where the reward failed), the mask of valid responses, and their number in each group."""
    keep = batch.valid.unsqueeze(-1)
    R = torch.where(keep, reward_to_go(batch.reward), 0.0)
    return R, keep, keep.sum(1, keepdim=True).to(R.dtype)


def _total(R: Advantages) -> Float[Tensor, "prompt sample 1"]:
    """Return the reward of the whole response: the reward-to-go of its first token."""
    return R[..., :1]


def all_equal(total: Tensor, keep: Tensor) -> Bool[Tensor, "prompt 1 1"]:
    """Return the groups whose valid rewards are exactly equal: max == min.

    Centering in float32 leaves a rounding error in such a group, and a small ε would amplify it.
    """
    high = torch.where(keep, total, -torch.inf).amax(1, keepdim=True)
    low = torch.where(keep, total, torch.inf).amin(1, keepdim=True)
    return high <= low


def whiten(advantage: Advantages, batch: Batch, eps: float) -> Advantages:
    """Return (A − mean) / (std + ε), both over the batch's loss mask, ddof 1; 0 if all are equal."""
    tokens = advantage.expand_as(batch.loss_mask)[batch.loss_mask]
    if tokens.numel() < 2 or bool(tokens.max() == tokens.min()):
        return torch.zeros_like(advantage)
    return (advantage - tokens.mean()) / (tokens.std() + eps)


class Advantage:
    """An advantage estimator: called with a batch and the loop's state, it returns A."""

    group_relative: ClassVar[bool] = True
    """Whether it compares the responses to the same prompt."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Batch fields that it reads beyond reward, mask and valid."""

    def __call__(self, batch: Batch, state: State) -> Advantages:
        raise NotImplementedError

    def initial_state(self) -> State:
        """Return its state before the first step."""
        return {}

    def update_state(self, batch: Batch, state: State) -> State:
        """Return its state after a step."""
        return state


@dataclass(frozen=True)
class Raw(Advantage):
    """The reward itself (REINFORCE).

    A = R
    Williams 1992. Bias: none, because E[R ∇log π] is ∇E[R]. The variance grows with the size of the
    reward, so adding a constant to every reward makes it worse. A group of one is fine.
    """

    group_relative = False

    def __call__(self, batch: Batch, state: State) -> Advantages:
        return _group(batch)[0]


@dataclass(frozen=True)
class Centered(Advantage):
    """The reward minus its group's mean.

    A_i = R_i − (1/G) Σ_j R_j
    Liu et al. 2025 (Dr. GRPO). Bias: in length only. A response is in its own mean, so the
    expectation is (G−1)/G of the gradient. Degenerate case: a group of one gives 0.
    """

    def __call__(self, batch: Batch, state: State) -> Advantages:
        R, keep, n = _group(batch)
        return torch.where(keep, R - R.sum(1, keepdim=True) / n.clamp(min=1), 0.0)


@dataclass(frozen=True)
class LeaveOneOut(Advantage):
    """The reward minus the mean of the group's other responses (RLOO).

    A_i = R_i − (1/(G−1)) Σ_{j≠i} R_j = G/(G−1) · centered
    Kool et al. 2019, Ahmadian et al. 2024. Bias: none, because the baseline does not see response i.
    At small G on 0/1 rewards its variance can exceed raw's. Degenerate case: a group of one gives 0.
    """

    def __call__(self, batch: Batch, state: State) -> Advantages:
        _, _, n = _group(batch)
        return Centered()(batch, state) * n / (n - 1).clamp(min=1)


@dataclass(frozen=True)
class Normalized(Advantage):
    """The centered reward over its group's standard deviation (GRPO).

    A_i = (R_i − mean) / (std + ε),  std² = Σ (R_j − mean)² / (G − ddof)
    Shao et al. 2024. Bias: in direction. Each group is scaled by its own 1/std, from the same
    samples, so nearly solved and nearly hopeless prompts count more than those in between.
    Degenerate cases: a group of one gives 0, and so does an all-equal one (tested as max == min).
    """

    eps: float = 1e-4
    """Added to the standard deviation."""
    ddof: int = 1
    """Degrees of freedom removed from G in the standard deviation."""

    def __post_init__(self) -> None:
        if not self.eps >= 0 or self.ddof not in (0, 1):
            raise ConfigError(f"--advantage.eps is {self.eps:g}, .ddof {self.ddof}: ε is 0 or more, and ddof 0 or 1")

    def __call__(self, batch: Batch, state: State) -> Advantages:
        R, keep, n = _group(batch)
        total, centered = _total(R), Centered()(batch, state)
        squares = _total(centered).square().sum(1, keepdim=True)
        A = centered / ((squares / (n - self.ddof).clamp(min=1)).sqrt() + self.eps)
        return torch.where(all_equal(total, keep) | (n < 2), 0.0, A)


@dataclass(frozen=True)
class BestOnly(Advantage):
    """The reward, but only for the best responses of the group.

    A_i = R_i if R_i = max_j R_j else 0      (ties kept)
    CS336 lecture 17 calls it "max". Bias: in direction. It maximizes something between the mean and
    the best of G. Degenerate case: an all-equal group keeps every reward; a group of one gives 0.
    """

    def __call__(self, batch: Batch, state: State) -> Advantages:
        R, keep, n = _group(batch)
        total = _total(R)
        best = torch.where(keep, total, -torch.inf).amax(1, keepdim=True)
        return torch.where(keep & (total == best) & (n > 1), R, 0.0)


@dataclass(frozen=True)
class RunningMean(Advantage):
    """The reward minus a mean kept over the steps.

    A = R − b;  afterwards b ← m·b + (1−m)·(mean reward of this step),  b = 0 at first
    Williams 1992's reinforcement baseline. Bias: none, because b was fixed before the samples were
    drawn. Degenerate case: in the first step b = 0 and A = R.
    """

    momentum: float = 0.9
    """m: how much of the old mean stays."""
    group_relative = False

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"--advantage.momentum is {self.momentum:g}: a share of the old mean, from 0 to below 1")

    def initial_state(self) -> State:
        return {"baseline": 0.0}

    def __call__(self, batch: Batch, state: State) -> Advantages:
        R, keep, _ = _group(batch)
        return torch.where(keep, R - state["baseline"], 0.0)

    def update_state(self, batch: Batch, state: State) -> State:
        R, keep, _ = _group(batch)
        if not bool(keep.any()):
            return state
        mean = float(_total(R).sum() / keep.sum())
        return {**state, "baseline": self.momentum * state["baseline"] + (1 - self.momentum) * mean}


@dataclass(frozen=True)
class Greedy(Advantage):
    """The reward minus that of one greedy response to the same prompt (ReMax).

    A = R − R(greedy response)
    Li et al. 2023. Bias: none, because the greedy response is scored and never trained on. It costs
    one more response per prompt. Degenerate case: when sampling has become greedy, A = 0.
    """

    group_relative = False
    needs = frozenset({"reward_greedy"})

    def __call__(self, batch: Batch, state: State) -> Advantages:
        assert batch.reward_greedy is not None
        R, keep, _ = _group(batch)
        return torch.where(keep, R - batch.reward_greedy, 0.0)


@dataclass(frozen=True)
class OptimalBaseline(Advantage):
    """The reward minus the baseline of least variance, estimated from the other responses.

    b* = E[‖∇ log π‖² R] / E[‖∇ log π‖²],  for response i over the j ≠ i of its group
    Greensmith et al. 2004; with the response length for ‖∇ log π‖², Hao et al. 2025 (OPO). Bias:
    none, because the estimate does not see response i. `exact` needs a gradient per response, and is
    for small policies alone; language models take `length`. Degenerate case: a group of one gives 0.
    """

    norm: Literal["exact", "length"] = "exact"
    """‖∇ log π‖² itself, or the number of tokens instead."""

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"score_norm"} if self.norm == "exact" else ())

    def __call__(self, batch: Batch, state: State) -> Advantages:
        R, keep, n = _group(batch)
        norm = batch.score_norm if self.norm == "exact" else batch.length.unsqueeze(-1).to(R.dtype)
        assert norm is not None
        # Sum over the others directly: a total minus the own term loses all precision if one norm dominates.
        other = 1 - torch.eye(R.shape[1], dtype=R.dtype)
        norm = torch.where(keep, norm, 0.0)
        total = other @ norm
        # If all others have norm 0, b* is undefined: their plain mean is just as unbiased.
        plain = (other @ R) / (n - 1).clamp(min=1)
        baseline = torch.where(total > 0, (other @ (norm * R)) / torch.where(total > 0, total, 1.0), plain)
        return torch.where(keep & (n > 1), R - baseline, 0.0)


@dataclass(frozen=True)
class BatchNormalized(Advantage):
    """The reward-to-go of each token, normalized over the whole batch (REINFORCE++).

    A_t = (R_t − mean) / (std + ε),  mean and std (ddof 1) over all unmasked tokens of the batch
    Hu et al. 2025. With a KL penalty per token, R_t contains the penalties of all later tokens.
    Bias: in direction, less with a larger batch: the mean contains the sample itself, and long
    responses weigh more in it. Degenerate case: a batch of equal rewards gives exactly 0.
    """

    eps: float = 1e-8
    """Added to the standard deviation."""
    group_relative = False

    def __call__(self, batch: Batch, state: State) -> Advantages:
        R, keep, _ = _group(batch)
        return torch.where(keep, whiten(R, batch, self.eps), 0.0)


@dataclass(frozen=True)
class ByTurn(Advantage):
    """The reward from here on, minus the mean of the group's other responses from the same turn on.

    A_i,t = R_i,t − (1/(G−1)) Σ_{j≠i} R_j(k),  k the turn of token t, R_j(k) that of turns k, k+1, …
    For conversations: turns are compared with turns, wherever their tokens stand. A response that
    ended before turn k counts as 0. Bias: none, because the baseline does not see response i. (A
    mean over only those that reached turn k is biased: whether i is among them depends on i.)
    Degenerate cases: with one turn it is leave-one-out on the outcome; a group of one gives 0.
    """

    def __call__(self, batch: Batch, state: State) -> Advantages:
        if batch.turn is None:
            return LeaveOneOut()(batch, state)
        R, keep, n = _group(batch)
        reward = torch.where(keep, per_token_reward(batch, batch.reward), 0.0)
        turns = torch.zeros_like(reward).scatter_add(-1, batch.turn, reward)  # no more turns than tokens
        from_turn = reward_to_go(turns)
        others = (from_turn.sum(1, keepdim=True) - from_turn) / (n - 1).clamp(min=1)
        return torch.where(keep & (n > 1), R - others.gather(-1, batch.turn), 0.0)


ADVANTAGES = (
    *(Raw, Centered, LeaveOneOut, Normalized, BestOnly, RunningMean, Greedy, OptimalBaseline, BatchNormalized),
    ByTurn,
)
