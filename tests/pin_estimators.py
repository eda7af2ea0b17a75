"""The tiny worlds of the oracle tests, and the pinned table of what every estimator is worth in them.

    python tests/pin_estimators.py          adds what is new on the menus to tests/data/estimators.json
    python tests/pin_estimators.py --anew   writes all of it anew

A changed row is a change of results: say so in the change log. A new choice needs no row to be merged: its own test
has its golden, and what its About says of its gradient is held to the exact one.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ascent.core.advantages import ADVANTAGES, LeaveOneOut, OptimalBaseline, Raw
from ascent.core.algorithms import Algorithm
from ascent.core.correction import Masked, NoCorrection, Truncated
from ascent.core.critics import OwnCritic
from ascent.core.groups import All
from ascent.core.losses import LOSSES, LogProb, Ratio, SequenceRatio
from ascent.core.types import Rollouts, Scores, Space
from ascent.core.values import GAE, TD, KStep, MonteCarlo, Valued, VTrace
from ascent.core.weights import WEIGHTS, SequenceSum, TokenMean
from ascent.models import PerPosition, Policy, Transformer
from ascent.oracle.estimator import enumerate_groups, estimate
from ascent.oracle.exact import ResponseTable
from ascent.settings import spell
from ascent.tasks.base import SmallTask
from ascent.tasks.small import sorting

PINS = Path(__file__).parent / "data" / "estimators.json"
SAMPLES = 3
STATE = {"baseline": 0.7}


@dataclass(frozen=True)
class Tiny(SmallTask):
    """A space with a reward, which is all that the oracle asks of a task."""

    space: Space
    reward: Callable[[Rollouts, Space], Tensor]

    def score(self, rollouts: Rollouts) -> Scores:
        return replace(sorting.score_sorting("exact", rollouts, self.space), reward=self.reward(rollouts, self.space))


def positions(rollouts: Rollouts, space: Space) -> Tensor:
    """The number of positions right, for the whole response."""
    return sorting.score_sorting("positions", rollouts, space).reward


def a_point_each(rollouts: Rollouts, space: Space) -> Tensor:
    """The same, each point on its token; and half a point on the token that ends the response."""
    target = torch.nn.functional.pad(rollouts.prompt.sort(-1).values, (0, space.limit - space.prompt_length), value=-1)
    right = rollouts.response == target[:, None, : rollouts.response.shape[-1]]
    ends = rollouts.response == (-1 if space.end is None else space.end)
    return torch.where(rollouts.mask, right + 0.5 * ends, 0.0)


def exactly(rollouts: Rollouts, space: Space) -> Tensor:
    """1 for the sorted prompt, else 0."""
    return sorting.score_sorting("exact", rollouts, space).reward


def nothing(rollouts: Rollouts, space: Space) -> Tensor:
    """0 for everything, so that a penalty is all that pushes."""
    return torch.zeros(*rollouts.truncated.shape, 1)


@torch.no_grad()
def moved(policy: Policy, phase: float, size: float) -> Policy:
    """The policy in float64 with a fixed wave added to its parameters: no random numbers in a pinned table."""
    policy = copy.deepcopy(policy).double()
    for i, p in enumerate(policy.parameters()):
        wave = torch.sin(phase + 1.7 * i + 2.3 * torch.arange(p.numel(), dtype=torch.float64))
        p.add_(size * wave.view_as(p))
    return policy


@torch.no_grad()
def blank(policy: Policy) -> Policy:
    for p in policy.parameters():
        p.zero_()
    return policy


INDEPENDENT = Space(prompt_length=2, vocab=3, limit=2)
RAGGED = Space(prompt_length=2, vocab=3, limit=3, end=2)
SHORT = Space(prompt_length=2, vocab=3, limit=2, end=2)
"""Ragged too, with seven responses only."""
SPACES = [INDEPENDENT, RAGGED]


def space_name(value: object) -> str | None:
    """How a test names a space."""
    return None if not isinstance(value, Space) else "independent" if value.end is None else "ragged"


def policy_of(space: Space) -> Policy:
    """Independent positions, or autoregressive with an end token, so that lengths differ."""
    shape = PerPosition(4) if space.end is None else Transformer(width=8, layers=1, heads=2)
    return moved(blank(shape(space, torch.Generator())), 1.0 if space.end is None else 3.0, 0.5)


def prompt_of(space: Space) -> Tensor:
    return torch.tensor([2, 0] if space.end is None else [1, 0])[: space.prompt_length]


@cache
def table(space: Space, reward: Callable[[Rollouts, Space], Tensor] = positions, stale: bool = False) -> ResponseTable:
    """Every response; stale: drawn by a policy that is a little way off, with the reference further off.

    Nobody changes it, and its gradients take long: there is one of each.
    """
    policy = policy_of(space)
    old = moved(policy, 1.0, 0.1 if space.end is None else 0.25) if stale else None
    return ResponseTable(policy, prompt_of(space), Tiny(space, reward), old=old, reference=moved(policy, 2.0, 0.2))


def credits() -> list:
    """Every credit; those from a critic with the exact V, two steps of k being fewer than the longest response has."""
    valued = [TD(), KStep(k=2), GAE(), MonteCarlo(), VTrace()]
    return [choice() for choice in ADVANTAGES] + [OptimalBaseline("length"), *valued]


def losses() -> list:
    more = [SequenceRatio("product", None, None), SequenceRatio("mean", None, None), Ratio("per-decision")]
    return [choice() for choice in LOSSES] + more


def corrections() -> list:
    """Every way to weigh or to reject what another policy drew, with bounds that cut some of it."""
    token = [Truncated(cap=1.2), Truncated(cap=1.2, floor=0.8), Masked(low=0.8, high=1.2)]
    whole = [Truncated("sequence", 1e9), Truncated("sequence", 1.2, 0.8), Masked("sequence", 0.8, 1.2)]
    none = Truncated(cap=1.0, floor=1.0, geometric=1.05)
    normalized = [replace(choice, normalized=True) for choice in (token[0], token[2], whole[0])]
    return [
        *token,
        *whole,
        *normalized,
        none,
        replace(token[0], geometric=1.05),
        replace(normalized[2], geometric=1.05),
    ]


def corrected() -> dict[str, Algorithm]:
    """Algorithms on samples of another policy, and without truncated responses; by name."""
    rows = {}
    for credit, choice in itertools.product((Raw(), LeaveOneOut()), (NoCorrection(), *corrections())):
        rows[f"{spell(credit)} / {spell(choice)}"] = Algorithm(credit, correction=choice)
    for credit, choice in itertools.product((GAE(), VTrace(), VTrace(rho=1e9, c=1e9)), (Truncated(cap=1e9),)):
        rows[f"{spell(credit)} / {spell(choice)}"] = Algorithm(credit, correction=choice, critic=OwnCritic())
    for credit, weights in itertools.product((Raw(), LeaveOneOut()), (SequenceSum(), TokenMean())):
        name = f"{spell(credit)} / {spell(weights)} / {spell(All(mask_truncated=True))}"
        rows[name] = Algorithm(credit, weights=weights, groups=All(mask_truncated=True))
    return rows


@cache
def sampled_elsewhere() -> ResponseTable:
    """Every response of short ragged ones, drawn by another policy than the one that is trained, which is `old`."""
    policy = policy_of(SHORT)
    return ResponseTable(
        policy, prompt_of(SHORT), Tiny(SHORT, positions), old=policy, behavior_policy=moved(policy, 1.0, 0.3)
    )


WORLDS = {
    "independent, stale": lambda: table(INDEPENDENT, stale=True),
    "ragged, stale": lambda: table(RAGGED, stale=True),
    "ragged, fresh": lambda: table(RAGGED),
}
"""On fresh samples every surrogate has the gradient of the first, which a test shows; so only that is pinned."""


def measure(world: str, every: bool = True) -> dict[str, list[float]]:
    """Scale, cosine and variance of every credit × surrogate × weights on the menus, by name.

    Not `every`: each pair of the three is there, with one of the third.
    """
    enumerated = WORLDS[world]()
    rows = {}
    for (i, credit), (j, weights) in itertools.product(enumerate(credits()), enumerate(WEIGHTS)):
        valued = isinstance(credit, Valued)
        critic = {"critic": OwnCritic()} if valued else {}
        state = credit.initial_state() | STATE
        groups = enumerate_groups(enumerated, Algorithm(credit, weights=weights(), **critic), SAMPLES, state)
        for k, loss in enumerate(losses() if "stale" in world else [LogProb()]):
            if not (every or (i + k) % len(WEIGHTS) == j or "fresh" in world):
                continue
            e = estimate(enumerated, Algorithm(credit, loss, weights(), **critic), SAMPLES, state, groups=groups)
            name = f"{spell(credit)} / {spell(loss)} / {spell(weights())}"
            rows[name] = [e.scale(enumerated.gradient), e.cosine(enumerated.gradient), e.variance]
    return rows


ELSEWHERE = "short, sampled by another policy"


def measure_corrected() -> dict[str, list[float]]:
    """Scale, cosine and variance of the algorithms of `corrected`, with groups of two."""
    enumerated, rows = sampled_elsewhere(), {}
    for name, algorithm in corrected().items():
        e = estimate(enumerated, algorithm, 2)
        rows[name] = [e.scale(enumerated.gradient), e.cosine(enumerated.gradient), e.variance]
    return rows


def main(anew: bool) -> None:
    torch.set_num_threads(1)
    pinned = {} if anew else json.loads(PINS.read_text())
    lines = []
    for world in (*WORLDS, ELSEWHERE):
        known = pinned.get(world, {})
        measured = measure_corrected() if world == ELSEWHERE else measure(world)
        rows = known | {name: row for name, row in measured.items() if name not in known}
        written = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        lines.append(f"{json.dumps(world)}: {{\n{written}\n}}")
        print(f"{world}: {len(rows)} rows, {len(rows) - len(known)} of them new")
    PINS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main("--anew" in sys.argv)
