"""Exact expectation and variance of an algorithm's gradient for a group size G.

It calls the library's own advantages, weights and objective on enumerated batches and repeats none of
their formulas. An advantage sees only a few numbers of each other sample in a group: its reward, its length,
and what the advantage names in its `needs`. Responses that agree in those form a class, and a group is a
multiset of G classes: C(K+G−1, G) of them for K classes, instead of Mᴳ groups of M responses. Given the
classes c of a group, its responses are independent: response y of class k has probability p(y | k). The
gradient is a sum over responses, g = Σ_i g(y_i, c). So

    E[g | c]    = Σ_k n_k A_k                                        A_k = Σ_y p(y | k) g(y, c)
    E[‖g‖² | c] = ‖Σ_k n_k A_k‖² + Σ_k n_k (B_k − ‖A_k‖²)            B_k = Σ_y p(y | k) ‖g(y, c)‖²

and both are summed over c with its multinomial probability.
"""

import itertools
import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ascent.core.algorithms import Algorithm
from ascent.core.errors import ConfigError
from ascent.core.types import Batch, Outputs, State
from ascent.oracle.exact import ResponseTable

MAX_GROUPS = 50_000
"""Maximum number of groups."""
NUM_PROBED_GROUPS = 12
"""Number of groups whose advantages are computed separately to detect dependence between groups."""
MAX_NUMBERS_IN_MEMORY = 200_000_000
"""Maximum of groups × (tokens of all responses + parameters), the numbers held in memory."""


@dataclass(frozen=True)
class Estimate:
    """An estimator of ∇E[R]: its expectation, and its variance as the trace of its covariance.

    variance = E‖g‖² − ‖E[g]‖²
    """

    mean: Float[Tensor, "parameter"]
    variance: float
    coupled: bool = False
    """Whether the groups of a batch depend on each other (batch-wide advantages, token mean over different lengths)."""

    def scale(self, gradient: Float[Tensor, "parameter"]) -> float:
        """Return the expectation's component along the gradient, as a multiple of the gradient: 1 if unbiased."""
        return float(self.mean @ gradient / (gradient @ gradient))

    def cosine(self, gradient: Float[Tensor, "parameter"]) -> float:
        """Return the cosine of expectation and gradient: 1 if they have the same direction, NaN if either is 0."""
        return float(self.mean @ gradient / (self.mean.norm() * gradient.norm()))

    def bias(self, gradient: Float[Tensor, "parameter"]) -> float:
        """Return ‖E[g] − ∇E[R]‖ / ‖∇E[R]‖."""
        return float((self.mean - gradient).norm() / gradient.norm())


def average_over_prompts(estimates: list[Estimate]) -> Estimate:
    """Return the estimator on a batch with one group for each of P prompts: the mean of their estimators.

    E[g] = (1/P) Σ_p E[g_p],  Var = (1/P²) Σ_p Var_p, for independent groups.
    """
    if len(estimates) > 1 and any(e.coupled for e in estimates):
        raise ConfigError(
            f"a batch of {len(estimates)} prompts with statistics across groups (batch-normalized, "
            "token-mean where lengths differ) is not a mean of single groups: use one prompt, or other choices"
        )
    mean = torch.stack([e.mean for e in estimates]).mean(0)
    return Estimate(mean, sum(e.variance for e in estimates) / len(estimates) ** 2)


@dataclass(frozen=True)
class EnumeratedGroups:
    """Every multiset of G classes, with its probability, advantages and weights."""

    members: Int[Tensor, "group sample"]
    """The class of each sample, in ascending order."""
    probability: Float[Tensor, "group"]
    class_of: Int[Tensor, "response"]
    advantage: Float[Tensor, "group sample #token"]
    weight: Float[Tensor, "group sample token"]
    coupled: bool

    @cached_property
    def classes(self) -> list[tuple[Tensor, Tensor, tuple[Tensor, Tensor], Tensor]]:
        """Per class: its responses, the groups that contain it, one of its samples in each, and their number."""
        classes = []
        for k in range(int(self.class_of.max()) + 1):
            of_class = self.members == k
            here = of_class.any(1).nonzero().flatten()
            one = here, of_class[here].long().argmax(1)
            classes.append(((self.class_of == k).nonzero().flatten(), here, one, of_class[here].sum(1).to(self.weight)))
        return classes


def estimate(
    table: ResponseTable,
    algorithm: Algorithm,
    samples: int,
    state: State | None = None,
    progress: float = 0.0,
    groups: EnumeratedGroups | None = None,
) -> Estimate:
    """Compute expectation and variance of an algorithm's gradient on a group of responses to the table's prompt.

    `state` is the state of its choices (a running mean, an adaptive β) and `progress` the completed fraction of the
    run. With dynamic sampling only the groups that are kept count. Pass `groups` from
    `enumerate_groups` to save time when algorithms are compared that differ only in their surrogate.
    """
    state = algorithm.initial_state() if state is None else state
    groups = enumerate_groups(table, algorithm, samples, state) if groups is None else groups
    batch = table.batch_with_fields(algorithm.needs)
    correction = None if algorithm.correction.normalized else algorithm.correction(batch)  # else in the advantages
    batch = algorithm.exclude_responses(batch).add(correction=correction, **algorithm.scalars(state, progress))
    outputs = table.outputs(algorithm.outputs)
    total = groups.weight.new_zeros(len(groups.probability), table.gradient.numel())
    scatter = groups.weight.new_zeros(len(groups.probability))
    for members, here, one, n in groups.classes:
        A, B = class_moments(table, algorithm, batch, outputs, members, groups.advantage[one], groups.weight[one])
        total.index_add_(0, here, n[:, None] * A)
        scatter.index_add_(0, here, n * (B - (A**2).sum(-1)))
    mean = groups.probability @ total
    second = groups.probability @ ((total**2).sum(-1) + scatter)
    return Estimate(mean, float(second - mean @ mean), groups.coupled)


def enumerate_groups(table: ResponseTable, algorithm: Algorithm, samples: int, state: State) -> EnumeratedGroups:
    """Enumerate all multisets of G classes, with P(c) = G!/Π n_k! · Π p_k^n_k, its advantages and its weights."""
    batch = table.batch_with_fields(algorithm.needs)
    fields_read = sorted(algorithm.advantage.needs - {"reward_greedy"})
    if "logp_old" in fields_read or algorithm.correction.normalized:
        fields_read += ["logp_old", "logp_sampler"]
    key = [batch.reward, algorithm.shape_rewards(batch, state).reward, batch.length.unsqueeze(-1)]
    key += [] if batch.turn is None else [batch.turn, batch.mask]
    key += [getattr(batch, name) for name in fields_read] + (
        [batch.truncated.unsqueeze(-1)] if "value" in fields_read else []
    )
    excluded = algorithm.exclude_responses(batch).excluded
    key += [] if excluded is None else [excluded.unsqueeze(-1)]
    _, class_of = torch.cat([x[0].to(batch.reward.dtype) for x in key], -1).unique(dim=0, return_inverse=True)
    classes = int(class_of.max()) + 1
    if samples < 1:
        raise ConfigError(f"the group size is {samples}: set 1 or more")
    groups = math.comb(classes + samples - 1, samples)
    numbers = groups * (table.batch.mask.numel() + sum(p.numel() for p in table.policy.parameters()))
    if groups > MAX_GROUPS or numbers > MAX_NUMBERS_IN_MEMORY:
        raise ConfigError(
            f"{table.batch.mask.shape[1]:,} responses in {classes:,} classes that the advantages can tell apart make "
            f"{groups:,} groups of {samples} ({numbers:,} numbers in memory); the limit is {MAX_GROUPS:,} groups and "
            f"{MAX_NUMBERS_IN_MEMORY:,} numbers. Lower the group size or the length limit, or use a reward "
            "with fewer levels"
        )
    members = torch.tensor(list(itertools.combinations_with_replacement(range(classes), samples)))
    share = table.probability.new_zeros(classes).index_add_(0, class_of, table.probability)
    factorial = share.new_tensor([math.factorial(n) for n in range(samples + 1)])
    counts = torch.nn.functional.one_hot(members, classes).sum(1)
    probability = factorial[samples] / factorial[counts].prod(-1) * share[members].prod(-1)
    example = torch.stack([(class_of == k).nonzero()[0, 0] for k in range(classes)])
    everything = pick(batch, example[members])
    keep = algorithm.groups(everything)
    if not bool(keep.any()):
        raise ConfigError(
            "no group is ever kept, because all responses earn the same. Set --groups all, or another reward"
        )
    if not bool(keep.all()):
        probability = torch.where(keep, probability, 0.0) / probability[keep].sum()
    return EnumeratedGroups(members, probability, class_of, *compute_group_advantages(algorithm, everything, state))


def compute_group_advantages(
    algorithm: Algorithm, everything: Batch, state: State
) -> tuple[Float[Tensor, "group sample #token"], Float[Tensor, "group sample token"], bool]:
    """Return A and the token weights of each group as a separate batch, and whether groups depend on one another.

    The advantages of all groups are first computed as one batch. If a few groups alone have the same advantages, and
    the same weights up to 1/groups, groups are independent and the result holds for all. Otherwise the weights, and
    where they differ the advantages too, are computed for each group alone.
    """

    def agree(single: list[Tensor], whole: Tensor) -> bool:
        return torch.allclose(torch.cat(single), whole, rtol=1e-9, atol=1e-12)

    def with_advantages(some: Batch, which: list[int]) -> list[Batch]:
        return [algorithm.compute_advantages(some.select(slice(c, c + 1)), state)[0] for c in which]

    def advantage_of(one: Batch) -> Tensor:
        """Return A times a weight that depends on the whole group: surrogates are proportional to A."""
        return one.advantage * one.correction if algorithm.correction.normalized else one.advantage  # type: ignore

    count = len(everything.mask)
    probed = sorted({round(x) for x in torch.linspace(0, count - 1, min(count, NUM_PROBED_GROUPS)).tolist()})
    alone, (whole, _) = with_advantages(everything, probed), algorithm.compute_advantages(everything, state)
    weight = algorithm.weights(whole) * count
    if agree([advantage_of(one) for one in alone], advantage_of(whole)[probed]):
        if agree([algorithm.weights(one) for one in alone], weight[probed]):
            return advantage_of(whole), weight, False
        single = [whole.select(slice(c, c + 1)) for c in range(count)]
    else:
        single = with_advantages(everything, list(range(count)))
    return torch.cat([advantage_of(one) for one in single]), torch.cat([algorithm.weights(one) for one in single]), True


def class_moments(
    table: ResponseTable,
    algorithm: Algorithm,
    batch: Batch,
    outputs: Outputs,
    members: Int[Tensor, "response"],
    advantage: Float[Tensor, "group #token"],
    weight: Float[Tensor, "group token"],
) -> tuple[Float[Tensor, "group parameter"], Float[Tensor, "group"]]:
    """Return A = Σ_y p(y | k) g(y) and B = Σ_y p(y | k) ‖g(y)‖² over the members y of a class, per group that has it.

    g(y) = Σ_t Σ_x ∂objective/∂x_t ∂x_t/∂θ, x the outputs of the training forward: logp and, where the
    objective asks for them, entropy and the full-vocabulary KL.
    """
    index = members.expand(len(advantage), -1)
    mini = pick(batch, index).add(
        advantage=advantage.unsqueeze(1).expand(-1, len(members), -1),
        weight=weight.unsqueeze(1).expand(-1, len(members), -1),
    )
    names = ["logp", *sorted(algorithm.outputs)]
    forward = {name: x for name, x in vars(outputs).items() if x is not None}
    leaves = {name: x.detach()[0][index].requires_grad_() for name, x in forward.items()}
    objective = algorithm.objective(mini, Outputs(**leaves)).objective
    grads = torch.autograd.grad(objective, [leaves[name] for name in names], materialize_grads=True)
    grad = torch.cat(grads, -1)
    jacobian = torch.cat([table.jacobian(name)[members] for name in names], 1)
    p = table.probability[members]
    p = p / p.sum().clamp(min=torch.finfo(p.dtype).tiny)
    A = torch.einsum("y,gyt,ytd->gd", p, grad, jacobian)
    B = torch.einsum("y,gyt,gyt->g", p, grad, torch.einsum("gyu,yut->gyt", grad, jacobian @ jacobian.mT))
    return A, B


def pick(batch: Batch, index: Int[Tensor, "group sample"]) -> Batch:
    """Return a batch of groups that consist of these responses of a one-prompt batch."""
    picked: dict[str, Any] = {}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Tensor):
            whole = f.name in ("prompt", "problem", "limits", "reward_greedy", "index")
            picked[f.name] = value.expand(len(index), *value.shape[1:]) if whole else value[0][index]
    return replace(batch, **picked)
