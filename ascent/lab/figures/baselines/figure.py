"""Figure 3: baselines of two states with two actions each, and the exact expectation, which they do not change."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ascent.core.advantages import Advantage, Advantages
from ascent.core.algorithms import Algorithm
from ascent.core.types import Batch, Rollouts, Scores, Space, State
from ascent.lab.figure_base import ControlState, DataTable, Figure, Look, Slider, short, signed
from ascent.models.small_policies import Policy
from ascent.oracle.estimator import estimate
from ascent.oracle.exact import EnumerableTask
from ascent.oracle.exact import ResponseTable as Oracle

REWARDS = ((11.0, 9.0), (0.0, 2.0))
"""Of the two actions in state 1, and in state 2."""

_SNIPPET = """\
import torch
from ascent.core.algorithms import Algorithm
from ascent.oracle.estimator import estimate
from ascent.oracle.exact import EnumerableTask, ResponseTable
from ascent.lab.figures.baselines.figure import REWARDS, LogOdds, Minus, TwoStates

weights = torch.tensor([R - b for rewards, b in zip(REWARDS, ({b1}, {b2})) for R in rewards])
print("standard deviation of the weights", round(weights.std().item(), 3))
for state, b in enumerate(({b1}, {b2})):
    table = ResponseTable(LogOdds({p}), torch.tensor([state]), TwoStates())
    found = estimate(table, Algorithm(Minus(b)), samples=1)
    print("state", state + 1, "expected push", round(found.mean.item(), 3), "variance", round(found.variance, 3))
"""


@dataclass(frozen=True)
class Minus(Advantage):
    """The reward minus a fixed number.

    A = R − b
    Unbiased whatever b is, as long as it does not see the response; the variance may be anything.
    """

    baseline: float = 0.0
    """b"""
    group = False

    def __call__(self, batch: Batch, state: State) -> Advantages:
        return batch.reward - self.baseline


@dataclass(frozen=True)
class TwoStates(EnumerableTask):
    """A prompt is state 0 or 1, a response one of two actions."""

    @property
    def space(self) -> Space:
        return Space(prompt_length=1, vocab=2, limit=1)

    def score(self, rollouts: Rollouts) -> Scores:
        table = torch.tensor(REWARDS, dtype=torch.float64)
        reward = table[rollouts.prompt].expand(-1, rollouts.response.shape[1], -1).gather(-1, rollouts.response)
        best = table.argmax(-1)[rollouts.prompt]
        return Scores(reward, torch.ones_like(rollouts.truncated), rollouts.response[..., 0] == best)


class LogOdds(Policy):
    """Two actions with log-odds θ: π(first) = 1/(1 + exp(−θ)), the same in every state. One parameter."""

    def __init__(self, probability: float):
        super().__init__()
        self.space = TwoStates().space
        self.theta = nn.Parameter(torch.logit(torch.tensor(probability, dtype=torch.float64)))

    def logits(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt 1 token vocab"]:
        return torch.stack([self.theta, torch.zeros_like(self.theta)]).expand(len(prompt), 1, 1, 2)


@lru_cache(maxsize=64)
def _oracle(state: int, probability: float) -> Oracle:
    return Oracle(LogOdds(probability), torch.tensor([state]), TwoStates())


@lru_cache(maxsize=4096)
def _arrows(index: int, baseline: float, probability: float) -> dict[str, Any]:
    """Return the arrows of a state: the effect of sampling each action on the log-odds of the first, and its mean."""
    table = _oracle(index, probability)
    score = table.jacobian("logp")[:, 0, 0]
    reward = table.batch.reward[0, :, 0]
    weight = Minus(baseline)(table.batch, {})[0, :, 0]
    found = estimate(table, Algorithm(Minus(baseline)), samples=1)
    p, norm = table.probability, score**2
    return {
        "rewards": reward.tolist(),
        "weights": weight.tolist(),
        "arrows": (weight * score).tolist(),
        "expected": float(found.mean),
        "variance": max(0.0, found.variance),
        "exact": float(table.gradient),
        "value": float(p @ reward),
        "best": float((p * norm) @ reward / (p @ norm)),
    }


def _compute(state: ControlState, _: Path | None) -> Look:
    p, chosen = state["p"], (state["b1"], state["b2"])
    states = [_arrows(i, b, p) for i, b in enumerate(chosen)]
    values, best = [s["value"] for s in states], [s["best"] for s in states]
    presets = {"none": (0.0, 0.0), "value": values, "optimal": best, "far": (20.0, -9.0)}
    stds = {name: _std(baselines) for name, baselines in presets.items()}
    texts = {"b1": short(chosen[0]), "b2": short(chosen[1]), "p": short(p), "std": _std(chosen)}
    texts |= {"variance": _variance(chosen, p), **{f"std_{name}": std for name, std in stds.items()}}
    texts |= {f"variance_{name}": _variance(baselines, p) for name, baselines in presets.items()}
    rows = []
    for i, (s, b) in enumerate(zip(states, chosen, strict=True), 1):
        texts |= {f"{name}{i}": signed(s[name], 2) for name in ("expected", "value", "best")}
        texts[f"variance_state{i}"] = signed(s["variance"], 2)
        texts |= {f"push{i}{j}": signed(push, 2) for j, push in enumerate([*s["arrows"], s["expected"]])}
        for a, (R, weight, push) in enumerate(zip(s["rewards"], s["weights"], s["arrows"], strict=True), 1):
            numbers = (short(R), short(b), signed(weight, 2), signed(push), signed(s["expected"]))
            rows.append([str(i), f"a{a}", *numbers])
    head = ("state", "action", "reward R", "baseline b", "weight R − b", "push on θ", "expected push")
    buttons = {name: [round(float(b), 4) for b in baselines] for name, baselines in presets.items()}
    table = DataTable("What drawing each action does", head, rows)
    return Look(texts, {"states": states, "presets": buttons, "stds": stds}, [table], _SNIPPET.format(**state))


def _variance(baselines: Sequence[float], probability: float) -> str:
    """Return the variance of the gradient from one sample, summed over the states."""
    return signed(sum(_arrows(i, b, probability)["variance"] for i, b in enumerate(baselines)), 2)


def _std(baselines: Sequence[float]) -> str:
    """Return the sample standard deviation of the four weights R − b."""
    return f"{stdev(R - b for rewards, b in zip(REWARDS, baselines, strict=True) for R in rewards):.3f}"


FIGURE = Figure(
    name="baselines",
    place=3,
    title="Baselines",
    about="Subtract a number from every reward of a state: each push changes, their mean does not.",
    controls=(
        Slider("b1", "baseline of state 1", 0.0, -10.0, 20.0, 0.5, "Subtracted from the rewards 11 and 9."),
        Slider("b2", "baseline of state 2", 0.0, -10.0, 20.0, 0.5, "Subtracted from the rewards 0 and 2."),
        Slider("p", "π(first action)", 0.5, 0.1, 0.9, 0.05, "How often the first action is drawn, in both states."),
    ),
    compute=_compute,
    keys=(("←  →", "move the first baseline"), ("↑  ↓", "move the second"), ("r", "back to the start")),
)
