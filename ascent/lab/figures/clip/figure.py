"""Figure 4: the clipped surrogate, its gradient by autograd, and where the gradient is 0."""

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.losses import Clipped, Ratio
from ascent.lab.figure_base import ControlState, DataTable, Figure, Look, Slider, short, signed
from ascent.runs.rollout_files import read_rollouts, recorded_files, rollout_path
from ascent.runs.untrusted_files import modified_at, naming_file

_MOST_TRIED = 20
"""Maximum number of recorded batches that are tried."""
_WIDEST = 2.0
"""The largest ratio on the axis."""

_SNIPPET = """\
import torch
from ascent.core.losses import Clipped

ratio, advantage = torch.tensor([[[{ratio}]]], dtype=torch.float64), torch.tensor([[[{A}]]], dtype=torch.float64)
logp = ratio.log().requires_grad_()
logp_old, mask = torch.zeros_like(logp), torch.ones_like(logp, dtype=torch.bool)
objective = Clipped(low={low}, high={high})(logp, logp_old, advantage, mask)
gradient, = torch.autograd.grad(objective.sum(), logp)
print("objective", round(objective.item(), 3))
print("gradient by log π", round(gradient.item(), 3))
"""


def _surrogate(loss: Any, ratio: Float[Tensor, "n"], advantage: float) -> tuple[Tensor, Tensor]:
    """Return the surrogate at these ratios and its gradient with respect to logp, by autograd."""
    logp = ratio.log().view(1, 1, -1).requires_grad_()
    A = torch.full_like(logp, advantage).detach()
    value = loss(logp, torch.zeros_like(logp), A, torch.ones_like(logp, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    return value.detach().flatten(), gradient.flatten()


def _compute(state: ControlState, runs: Path | None) -> Look:
    A, low, high, ratio = (state[name] for name in ("A", "low", "high", "ratio"))
    loss = Clipped(low, high)
    grid = torch.linspace(0.01, _WIDEST, 200, dtype=torch.float64)
    edges = [1 - low - 1e-9, 1 - low, 1 + high, 1 + high + 1e-9]
    grid = torch.cat([grid, grid.new_tensor([*edges, ratio])]).unique()
    objective, gradient = _surrogate(loss, grid, A)
    free, _ = _surrogate(Ratio(), grid, A)
    here = int((grid == ratio).nonzero()[0, 0])
    value, grad, unclipped = (float(x[here]) for x in (objective, gradient, free))
    held = torch.tensor([ratio], dtype=torch.float64).clamp(1 - low, 1 + high) * A
    zone, words = _dead_zone(loss, A, ratio, grad)
    rug = _ratios(runs, loss)
    texts = {
        "A": signed(A, 2),
        **{name: short(state[name]) for name in ("low", "high", "ratio")},
        "lower": short(1 - low),
        "upper": short(1 + high),
        "objective": signed(value),
        "unclipped": signed(unclipped),
        "clipped": signed(float(held)),
        "gradient": signed(grad),
        "zone": words,
        "rug_total": str(len(rug["ratios"])),
        "rug_clipped": str(sum(rug["clipped"])),
        "rug_from": rug["from"],
    }
    drawing = {
        "ratio": grid.tolist(),
        "objective": objective.tolist(),
        "unclipped": free.tolist(),
        "gradient": gradient.tolist(),
        "zone": zone,
        "point": [ratio, value, grad, unclipped],
        "rug": rug,
    }
    return Look(texts, drawing, [_table(loss, A, ratio)], _SNIPPET.format(**state))


def _dead_zone(loss: Clipped, A: float, ratio: float, gradient: float) -> tuple[list[float], str]:
    """Return the interval in which the gradient is 0, and its meaning for this token."""
    if A == 0:
        return [0.0, _WIDEST], "Without advantage there is nothing to learn from this token, wherever the ratio is."
    if A > 0:
        edge, side, kind, moved = 1 + loss.high, "above", "a good token", "raised"
        zone, wrong_way = [edge, _WIDEST], ratio < 1 - loss.low
    else:
        edge, side, kind, moved = 1 - loss.low, "below", "a bad token", "lowered"
        zone, wrong_way = [0.0, edge], ratio > 1 + loss.high
    if gradient == 0:
        return zone, f"Dead zone: {side} {short(edge)} {kind} has been {moved} enough, and its gradient is exactly 0."
    if wrong_way:
        words = f"Outside the bounds, yet alive: it moved the wrong way for {kind}, and the gradient pulls it back."
        return zone, words
    words = f"Alive: the gradient is ρ·A. It falls silent {side} {short(edge)}, once {kind} has been {moved} enough."
    return zone, words


def _table(loss: Clipped, A: float, ratio: float) -> DataTable:
    at = torch.tensor(sorted({0.25, 0.5, 0.75, 1 - loss.low, 1.0, 1 + loss.high, 1.25, 1.5, 1.75, ratio})).double()
    free, _ = _surrogate(Ratio(), at, A)
    columns = torch.stack([free, *_surrogate(loss, at, A)], 1)
    rows = [[short(ρ), *map(signed, numbers)] for ρ, numbers in zip(at.tolist(), columns.tolist(), strict=True)]
    head = ("ratio ρ", "unclipped ρ·A", "objective", "gradient ∂/∂log π")
    return DataTable("The surrogate at some ratios", head, rows)


def _ratios(runs: Path | None, loss: Clipped) -> dict[str, Any]:
    """Return ρ of every token at the last update of the newest recorded batch, and which tokens are clipped."""
    logs, advantages, where = _newest(runs) or (*_sampled_now(), "a batch of the lecture, trained on just now")
    ρ, A = torch.tensor(logs).exp().view(1, 1, -1), torch.tensor(advantages).view(1, 1, -1)
    clips = loss.clipped(ρ.log(), torch.zeros_like(ρ), A, torch.ones_like(ρ, dtype=torch.bool))
    assert clips is not None
    return {
        "ratios": ρ.flatten().tolist(),
        "good": (A > 0).flatten().tolist(),
        "clipped": (clips[0] | clips[1]).flatten().tolist(),
        "from": where,
    }


def _newest(runs: Path | None) -> tuple[list[float], list[float], str] | None:
    """Return the log ratios and advantages of the newest readable batch."""
    folders = [] if runs is None else [path.parent for path in runs.glob("*/rollouts") if not path.parent.is_symlink()]
    files = [(modified_at(p) or 0.0, run, step) for run in folders for step, p in recorded_files(run, "ascent").items()]
    for _, run, step in sorted(files, reverse=True)[:_MOST_TRIED]:
        with suppress(ConfigError):
            return *_recorded(run, step), f"step {step} of {run.name}"
    return None


@lru_cache(maxsize=8)
def _recorded(run: Path, step: int) -> tuple[list[float], list[float]]:
    logs, advantages = list[float](), list[float]()
    with naming_file(rollout_path(run, step)):
        for row in read_rollouts(run, step):
            if row["logp"] and row["valid"]:
                logs += [float(now - old) for now, old in zip(row["logp"][-1], row["logp_old"], strict=True)]
                given = row["advantage"]
                advantages += map(
                    float, given if len(given) == len(row["logp_old"]) else given[:1] * len(row["logp_old"])
                )
    return logs[:300], advantages[:300]


@lru_cache(maxsize=1)
def _sampled_now() -> tuple[list[float], list[float]]:
    """Run one step with the default settings of lecture in memory, if there is no recorded run."""
    from ascent.build.assemble import assemble
    from ascent.core.loop import PhaseTimer, collect
    from ascent.settings import configure

    config = configure("lecture", {"threads": 1})
    parts, algorithm = assemble(config), config.algorithm
    batch, _ = collect(parts.task, parts.engine, algorithm, config, parts.streams.prompts, PhaseTimer())
    batch, state = algorithm.compute_advantages(batch.add(logp_old=batch.logp_sampler), algorithm.initial_state())
    batch = batch.add(**algorithm.scalars(state, 0.0))
    mini = batch.add(weight=algorithm.weights(batch))
    for _ in range(config.epochs):
        stepped = parts.learner.step(mini, algorithm.objective, algorithm.update)
    assert batch.advantage is not None
    logs = (stepped.logp - batch.logp_sampler).flatten()
    return logs.tolist(), batch.advantage.expand_as(stepped.logp).flatten().tolist()


FIGURE = Figure(
    name="clip",
    place=4,
    title="The clip",
    about="What PPO and GRPO maximise for one token, and where its gradient is exactly 0.",
    controls=(
        Slider("A", "advantage A", 0.5, -1.0, 1.0, 0.05, "How much better than expected the token was."),
        Slider("ratio", "ratio ρ", 1.35, 0.05, _WIDEST, 0.05, "Its probability now over that when it was sampled."),
        Slider("low", "ε low", 0.2, 0.02, 0.9, 0.02, "How far below 1 a bad token may be pushed."),
        Slider("high", "ε high", 0.2, 0.02, 0.9, 0.02, "How far above 1 a good token may be pushed."),
    ),
    compute=_compute,
    keys=(("←  →", "move the ratio"), ("↑  ↓", "change the advantage"), ("r", "back to the start")),
)
