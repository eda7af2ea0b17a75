"""Figure 2: 200 estimates of one gradient as dots, with bias and variance, exact and measured."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.advantages import ADVANTAGES, BatchNormalized
from ascent.algorithms import Algorithm
from ascent.diagnose.estimator import Estimate, estimate, pick
from ascent.diagnose.exact import Table as Oracle
from ascent.lab.look import Choice, Figure, Look, Slider, State, Table, signed
from ascent.lab.worlds import PROMPT, Rewarded, Tabular
from ascent.menu import name_of
from ascent.types import Refused

ESTIMATES = 200
CREDITS = {name_of(cls): cls for cls in ADVANTAGES if cls is not BatchNormalized}
"""Credit that sees one group at a time; over a batch of 200 groups a batch statistic would see all of them."""
WORDS = {
    "raw": "none (raw reward)",
    "centered": "group mean (centered)",
    "leave-one-out": "mean of the others (RLOO)",
    "normalized": "mean and std (GRPO)",
    "best-only": "best of the group only",
    "running-mean": "running mean, at E[R]",
    "greedy": "greedy response (ReMax)",
    "optimal-baseline": "optimal, from the others",
}

SNIPPET = """\
import torch
from ascent.algorithms import Algorithm
from ascent.diagnose.estimator import estimate
from ascent.diagnose.exact import Table
from ascent.lab.figures.variance import CREDITS, sampled
from ascent.lab.worlds import PROMPT, Rewarded, Tabular

task = Rewarded({rewarded})
table = Table(Tabular(task.space), torch.tensor(PROMPT), task)
algorithm = Algorithm(CREDITS["{baseline}"]())
state = {{"baseline": table.expected_reward}}  # what a running mean has settled to
size = table.gradient @ table.gradient
dots = sampled(table, algorithm, {samples}, state, seed={seed})
print("measured variance", round((dots.var(0).sum() / size).item(), 2))
print("measured bias", round(((dots.mean(0) - table.gradient).norm() / size.sqrt()).item(), 3))
"""
EXACT = """\
found = estimate(table, algorithm, samples={samples}, state=state)
print("exact variance", round(found.variance / size.item(), 2))
print("exact bias", round(found.bias(table.gradient), 3))
"""


@lru_cache(maxsize=32)
def oracle(rewarded: int) -> Oracle:
    task = Rewarded(rewarded)
    return Oracle(Tabular(task.space), torch.tensor(PROMPT), task)


def sampled(
    table: Oracle, algorithm: Algorithm, samples: int, state: dict[str, float], seed: int, count: int = ESTIMATES
) -> Float[Tensor, "estimate parameter"]:
    """`count` gradients of the algorithm, each on a group of its own drawn from the policy."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(table.probability, count * samples, replacement=True, generator=generator)
    index = drawn.view(count, samples)
    batch = pick(table.filled(algorithm.needs), index)
    batch, _ = algorithm.credit(batch, state)
    mini = batch.add(weight=algorithm.weights(batch) * count)  # each group is a batch of its own
    outputs = table.outputs(algorithm.outputs)
    logp = outputs.logp.detach()[0][index].requires_grad_()
    entropy = outputs.entropy.detach()[0][index]
    objective = algorithm.objective(mini, type(outputs)(logp, entropy)).objective
    (slope,) = torch.autograd.grad(objective, logp)
    return torch.einsum("gst,gstd->gd", slope, table.jacobian("logp")[index])


@lru_cache(maxsize=512)
def exact(rewarded: int, baseline: str, samples: int) -> Estimate | str:
    """Expectation and variance by enumeration, or why there are too many groups for it."""
    table = oracle(rewarded)
    try:
        return estimate(table, Algorithm(CREDITS[baseline]()), samples, {"baseline": table.expected_reward})
    except Refused as error:
        return str(error)


@lru_cache(maxsize=32)
def frame(rewarded: int) -> tuple[Tensor, Tensor, float]:
    """Two directions to look along, the gradient's and the widest one orthogonal to it, and how far to look.

    The same for every baseline and group size, so that clouds can be compared.
    """
    table = oracle(rewarded)
    along = table.gradient / table.gradient.norm()
    score = torch.einsum("yt,ytd->yd", table.batch.mask[0].double(), table.jacobian("logp"))
    each = table.batch.reward[0] * score - table.gradient
    flat = each - (each @ along)[:, None] * along
    _, vectors = torch.linalg.eigh(torch.einsum("y,yd,ye->de", table.probability, flat, flat))
    across = vectors[:, -1] * vectors[:, -1].sum().sign()
    farthest = float((table.batch.reward[0] * score).norm(dim=-1).max() / table.gradient.norm())
    return along, across, float(2 ** math.ceil(math.log2(max(2.0, 0.6 * farthest))))  # half of it from two samples


def compute(state: State, runs: Path | None) -> Look:
    del runs
    samples, rewarded, baseline = state["samples"], state["rewarded"], state["baseline"]
    table, (along, across, reach) = oracle(rewarded), frame(rewarded)
    size = float(table.gradient @ table.gradient)
    algorithm = Algorithm(CREDITS[baseline]())
    dots = sampled(table, algorithm, samples, {"baseline": table.expected_reward}, state["seed"])
    mean, unit = dots.mean(0), math.sqrt(size)
    variance = float(dots.var(0).sum()) / size
    found, raw = exact(rewarded, baseline, samples), exact(rewarded, "raw", samples)
    assert isinstance(raw, Estimate)
    known = isinstance(found, Estimate)
    said = {
        "samples": str(samples),
        "rewarded": str(rewarded),
        "baseline": WORDS[baseline],
        "chance": f"{float(table.expected_reward):.1%}".replace("%", " %"),
        "bias": f"{found.bias(table.gradient):.3f}" if isinstance(found, Estimate) else "not enumerated",
        "bias_measured": f"{float((mean - table.gradient).norm()) / unit:.3f}",
        "noise": f"{math.sqrt(variance / ESTIMATES):.3f}",
        "variance": f"{found.variance / size:.2f}" if isinstance(found, Estimate) else "not enumerated",
        "variance_measured": f"{variance:.2f}",
        "variance_raw": f"{raw.variance / size:.2f}",
        "scale": f"{found.scale(table.gradient):.3f}" if isinstance(found, Estimate) else "not enumerated",
        "cosine": f"{found.cosine(table.gradient):.3f}" if isinstance(found, Estimate) else "not enumerated",
        "why": "" if known else "The optimal baseline tells all 27 responses apart: too many groups to enumerate.",
        "silent": str(int((dots == 0).all(1).sum())),
    }
    drawn: dict[str, Any] = {
        "dots": torch.stack([dots @ along, dots @ across], 1).div(unit).tolist(),
        "mean": [float(mean @ along) / unit, float(mean @ across) / unit],
        "reach": reach,
    }
    if isinstance(found, Estimate):
        drawn["expected"] = [float(found.mean @ along) / unit, float(found.mean @ across) / unit]
    snippet = SNIPPET + (EXACT if known else "")
    return Look(said, drawn, [_every(rewarded, samples, baseline)], snippet.format(**state))


def _every(rewarded: int, samples: int, chosen: str) -> Table:
    """Every baseline at this group size and sparsity, by enumeration; the costly one only where it is asked for."""
    size, rows = float(oracle(rewarded).gradient @ oracle(rewarded).gradient), []
    for name in CREDITS:
        if name == "optimal-baseline" != chosen:
            continue
        found = exact(rewarded, name, samples)
        if isinstance(found, Estimate):
            gradient = oracle(rewarded).gradient
            numbers = [f"{found.bias(gradient):.3f}", signed(found.cosine(gradient)), f"{found.variance / size:.2f}"]
        else:
            numbers = ["too many groups"] * 3
        rows.append([WORDS[name], *numbers])
    caption = "Every baseline here, exactly; in units of the gradient's length"
    return Table(caption, ("baseline", "bias", "cosine with ∇E[R]", "variance"), rows)


FIGURE = Figure(
    name="variance",
    title="Variance",
    about="Each dot is one estimate of the gradient from one group of samples; the exact gradient is enumerated.",
    controls=(
        Slider("samples", "samples in a group", 4, 2, 16, 1, "G: responses behind each dot.", (2, 4, 8, 16)),
        Slider("rewarded", "rewarded responses of 27", 3, 1, 18, 1, "Fewer is sparser."),
        Choice("baseline", "baseline", "leave-one-out", tuple(WORDS.items()), "What is taken off the reward."),
        Slider("seed", "seed", 0, 0, 99, 1, "Other dots from the same policy."),
    ),
    compute=compute,
    keys=(("space", "draw again"), ("←  →", "more or fewer samples"), ("r", "back to the start")),
)
