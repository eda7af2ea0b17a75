"""Figure 3: two states, two actions each, and baselines to drag: what moves, and the expectation that does not."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ascent.core.algorithms import Algorithm
from ascent.lab.figure import ControlState, DataTable, Figure, Look, Slider, short, signed
from ascent.lab.figures.baselines.two_states import REWARDS, LogOdds, Minus, TwoStates
from ascent.oracle.estimator import estimate
from ascent.oracle.exact import Table as Oracle

_FAR = (20.0, -9.0)

_SNIPPET = """\
import torch
from ascent.core.algorithms import Algorithm
from ascent.oracle.estimator import estimate
from ascent.oracle.exact import Table
from ascent.lab.figures.baselines.two_states import REWARDS, LogOdds, Minus, TwoStates

weights = torch.tensor([R - b for rewards, b in zip(REWARDS, ({b1}, {b2})) for R in rewards])
print("standard deviation of the weights", round(weights.std().item(), 3))
for state, b in enumerate(({b1}, {b2})):
    table = Table(LogOdds({p}), torch.tensor([state]), TwoStates())
    found = estimate(table, Algorithm(Minus(b)), samples=1)
    print("state", state + 1, "expected push", round(found.mean.item(), 3), "variance", round(found.variance, 3))
"""


@lru_cache(maxsize=64)
def _oracle(state: int, probability: float) -> Oracle:
    return Oracle(LogOdds(probability), torch.tensor([state]), TwoStates())


@lru_cache(maxsize=4096)
def _arrows(index: int, baseline: float, probability: float) -> dict[str, Any]:
    """The arrows of a state: what drawing each action does to the log-odds of the first, and on average."""
    table = _oracle(index, probability)
    score = table.jacobian("logp")[:, 0, 0]
    reward = table.batch.reward[0, :, 0]
    weight = Minus(baseline)(table.batch, {})[0, :, 0]
    found = estimate(table, Algorithm(Minus(baseline)), samples=1)
    p, norm = table.probability, score**2
    return {
        "rewards": reward.tolist(),
        "weights": weight.tolist(),
        "chances": p.tolist(),
        "arrows": (weight * score).tolist(),
        "expected": float(found.mean),
        "variance": max(0.0, found.variance),
        "exact": float(table.gradient),
        "value": float(p @ reward),
        "best": float((p * norm) @ reward / (p @ norm)),
        "baseline": baseline,
    }


def _compute(state: ControlState, runs: Path | None) -> Look:
    del runs
    p, chosen = state["p"], (state["b1"], state["b2"])
    states = [_arrows(i, b, p) for i, b in enumerate(chosen)]
    values, best = [s["value"] for s in states], [s["best"] for s in states]
    presets = {"none": (0.0, 0.0), "value": values, "optimal": best, "far": _FAR}
    total = {name: _variance(b, p) for name, b in presets.items()}
    texts = {f"{key}{i + 1}": signed(s[name], 2) for i, s in enumerate(states) for key, name in _STATE_TEXTS}
    texts |= {
        "b1": short(chosen[0]),
        "b2": short(chosen[1]),
        "p": short(p),
        "std": _std(chosen),
        "std_none": _std(presets["none"]),
        "std_value": _std(presets["value"]),
        "std_optimal": _std(presets["optimal"]),
        "std_far": _std(_FAR),
        "variance": signed(sum(s["variance"] for s in states), 2),
        **{f"variance_{name}": signed(v, 2) for name, v in total.items()},
    }
    pushes = [[*s["arrows"], s["expected"]] for s in states]
    texts |= {f"push{i + 1}{j}": signed(x, 2) for i, row in enumerate(pushes) for j, x in enumerate(row)}
    rows = [
        [
            *(str(i + 1), f"a{a + 1}", short(s["rewards"][a]), short(s["baseline"])),
            *(signed(s["weights"][a], 2), signed(s["arrows"][a]), signed(s["expected"])),
        ]
        for i, s in enumerate(states)
        for a in range(2)
    ]
    head = ("state", "action", "reward R", "baseline b", "weight R − b", "push on θ", "expected push")
    buttons = {name: [round(float(x), 4) for x in b] for name, b in presets.items()}
    drawing = {"states": states, "presets": buttons, "stds": {name: _std(b) for name, b in presets.items()}}
    table = DataTable("What drawing each action does", head, rows)
    return Look(texts, drawing, [table], _SNIPPET.format(b1=chosen[0], b2=chosen[1], p=p))


_STATE_TEXTS = (("expected", "expected"), ("value", "value"), ("best", "best"), ("variance_state", "variance"))


def _variance(baselines: Any, probability: float) -> float:
    return sum(_arrows(i, float(b), probability)["variance"] for i, b in enumerate(baselines))


def _std(baselines: Any) -> str:
    """The sample standard deviation of the four weights R − b."""
    weights = [R - float(b) for rewards, b in zip(REWARDS, baselines, strict=True) for R in rewards]
    return f"{torch.tensor(weights, dtype=torch.float64).std():.3f}"


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
