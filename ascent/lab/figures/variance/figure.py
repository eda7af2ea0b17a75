"""Figure 2: 200 estimates of one gradient as dots, with bias and variance, measured and exact (by enumeration)."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ascent.core.advantages import ADVANTAGES, BatchNormalized
from ascent.core.algorithms import Algorithm
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of
from ascent.core.types import Rollouts, Scores, Space
from ascent.explain.explain import menu_label
from ascent.lab.figure_base import Choice, ControlState, DataTable, Figure, Look, Slider, signed
from ascent.models.small_policies import Policy, Sampled, draw_next
from ascent.oracle.estimator import Estimate, estimate, pick
from ascent.oracle.exact import EnumerableTask, all_responses
from ascent.oracle.exact import ResponseTable as Oracle

PROMPT = (2, 0, 1)
"""[0 1 2] is right."""
_ESTIMATES = 200
BASELINES = {name_of(cls): cls for cls in ADVANTAGES if cls is not BatchNormalized}
"""Advantages of one group at a time; a batch statistic would depend on all 200 groups."""
_LABELS = {name: menu_label(cls) for name, cls in BASELINES.items()}

_SNIPPET = """\
import torch
from ascent.core.algorithms import Algorithm
from ascent.oracle.estimator import estimate
from ascent.oracle.exact import ResponseTable
from ascent.lab.figures.variance.figure import BASELINES, PROMPT, Rewarded, Tabular, sampled_gradients

task = Rewarded({rewarded})
table = ResponseTable(Tabular(task.space), torch.tensor(PROMPT), task)
algorithm = Algorithm(BASELINES["{baseline}"]())
state = {{"baseline": table.expected_reward}}  # what a running mean has settled to
size = table.gradient @ table.gradient
dots = sampled_gradients(table, algorithm, {samples}, state, seed={seed})
print("measured variance", round((dots.var(0).sum() / size).item(), 2))
print("measured bias", round(((dots.mean(0) - table.gradient).norm() / size.sqrt()).item(), 3))
"""
_EXACT = """\
found = estimate(table, algorithm, samples={samples}, state=state)
print("exact variance", round(found.variance / size.item(), 2))
print("exact bias", round(found.bias(table.gradient), 3))
"""


@dataclass(frozen=True)
class Rewarded(EnumerableTask):
    """Three positions, three numbers: the `rewarded` best of 27 responses (by positions right) have reward 1."""

    rewarded: int = 3

    @property
    def space(self) -> Space:
        return Space(prompt_length=3, vocab=3, limit=3)

    def score(self, rollouts: Rollouts) -> Scores:
        every = all_responses(self.space).response
        target = rollouts.prompt.sort(-1).values[0]
        code = torch.tensor([9, 3, 1])  # of a response: its place among all of them
        best = ((every * code).sum(-1) - 100 * (every == target).sum(-1)).argsort()[: self.rewarded]
        reward = torch.isin((rollouts.response * code).sum(-1), best).double()
        correct = (rollouts.response == target).all(-1)
        return Scores(reward.unsqueeze(-1), torch.ones_like(correct), correct)


class Tabular(Policy):
    """A logit for each number at each position, independent of the prompt: nine parameters."""

    def __init__(self, space: Space):
        super().__init__()
        self.space = space
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(space.limit, space.vocab, generator=generator, dtype=torch.float64)
        self.table = nn.Parameter(0.5 * logits)

    def logits(self, prompt: Tensor, response: Tensor) -> Float[Tensor, "prompt 1 token vocab"]:
        return self.table.expand(len(prompt), 1, -1, -1)

    @torch.no_grad()
    def sample(self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None) -> Sampled:
        rows = len(prompt) * samples
        drawn = [draw_next(logits.expand(rows, -1), temperature, generator) for logits in self.table]
        response, logp = (torch.stack(part, -1).view(len(prompt), samples, -1) for part in zip(*drawn, strict=True))
        return Sampled(response, logp, torch.full(response.shape[:2], response.shape[-1]))


@lru_cache(maxsize=32)
def exact_oracle(rewarded: int) -> Oracle:
    task = Rewarded(rewarded)
    return Oracle(Tabular(task.space), torch.tensor(PROMPT), task)


def sampled_gradients(
    table: Oracle, algorithm: Algorithm, samples: int, state: dict[str, float], seed: int, count: int = _ESTIMATES
) -> Float[Tensor, "estimate parameter"]:
    """Return `count` gradients of the algorithm, each from a separate group of samples."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.multinomial(table.probability, count * samples, replacement=True, generator=generator)
    index = rows.view(count, samples)
    batch = pick(table.batch_with_fields(algorithm.needs), index)
    batch, _ = algorithm.compute_advantages(batch, state)
    mini = batch.add(weight=algorithm.weights(batch) * count)  # each group is a separate batch
    outputs = table.outputs(algorithm.outputs)
    logp = outputs.logp.detach()[0][index].requires_grad_()
    entropy = outputs.entropy.detach()[0][index]
    objective = algorithm.objective(mini, type(outputs)(logp, entropy)).objective
    (grad,) = torch.autograd.grad(objective, logp)
    return torch.einsum("gst,gstd->gd", grad, table.jacobian("logp")[index])


@lru_cache(maxsize=512)
def exact_estimate(rewarded: int, baseline: str, samples: int) -> Estimate | None:
    """Return expectation and variance by enumeration; None if there are too many groups."""
    table = exact_oracle(rewarded)
    try:
        return estimate(table, Algorithm(BASELINES[baseline]()), samples, {"baseline": table.expected_reward})
    except ConfigError:
        return None


def _widest_direction(vectors: Tensor, probability: Tensor, along: Tensor) -> Tensor | None:
    """Return the direction of greatest variance orthogonal to `along`; None if the vectors do not leave `along`.

    An eigenvector has an arbitrary sign, which depends on the processor: its largest component is made positive.
    """
    orthogonal = vectors - (vectors @ along)[:, None] * along
    values, directions = torch.linalg.eigh(torch.einsum("y,yd,ye->de", probability, orthogonal, orthogonal))
    if float(values[-1]) < 1e-9 * float((probability @ vectors.square()).sum()):
        return None
    direction = directions[:, -1]
    return direction * direction[direction.abs().argmax()].sign()


@lru_cache(maxsize=32)
def _frame(rewarded: int) -> tuple[Tensor, Tensor, float]:
    """Return the two axes of the plot and its half width, which are the same for all baselines.

    The first axis is the direction of the gradient. The second is the direction of greatest variance orthogonal to it,
    over the gradients of single responses. With one rewarded response these are all parallel to the gradient, so the
    directions ∇ log π of all responses are used instead.
    """
    table = exact_oracle(rewarded)
    along = table.gradient / table.gradient.norm()
    score = torch.einsum("yt,ytd->yd", table.batch.mask[0].double(), table.jacobian("logp"))
    gradients = table.batch.reward[0] * score
    across = _widest_direction(gradients - table.gradient, table.probability, along)
    if across is None:
        across = _widest_direction(score, table.probability, along)
    assert across is not None
    farthest = float(gradients.norm(dim=-1).max() / table.gradient.norm())
    return along, across, float(2 ** math.ceil(math.log2(max(2.0, 0.6 * farthest))))  # half of it from two samples


def _compute(state: ControlState, _: Path | None) -> Look:
    samples, rewarded, baseline = state["samples"], state["rewarded"], state["baseline"]
    table, (along, across, reach) = exact_oracle(rewarded), _frame(rewarded)
    size = float(table.gradient @ table.gradient)
    algorithm, unit = Algorithm(BASELINES[baseline]()), math.sqrt(size)
    dots = sampled_gradients(table, algorithm, samples, {"baseline": table.expected_reward}, state["seed"])
    mean, variance = dots.mean(0), float(dots.var(0).sum()) / size
    exact, raw = exact_estimate(rewarded, baseline, samples), exact_estimate(rewarded, "raw", samples)
    assert raw is not None
    texts = {
        "samples": str(samples),
        "rewarded": str(rewarded),
        "baseline": _LABELS[baseline],
        "chance": f"{float(table.expected_reward):.1%}".replace("%", " %"),
        "bias_measured": f"{float((mean - table.gradient).norm()) / unit:.3f}",
        "noise": f"{math.sqrt(variance / _ESTIMATES):.3f}",
        "variance_measured": f"{variance:.2f}",
        "variance_raw": f"{raw.variance / size:.2f}",
        **dict.fromkeys(("bias", "variance", "scale", "cosine"), "not enumerated"),
        "why": "The optimal baseline tells all 27 responses apart: too many groups to enumerate.",
        "silent": str(int((dots == 0).all(1).sum())),
    }

    def seen(gradients: Tensor) -> Any:
        return (torch.stack([gradients @ along, gradients @ across], -1) / unit).tolist()

    drawing: dict[str, Any] = {"dots": seen(dots), "mean": seen(mean), "reach": reach}
    snippet = _SNIPPET
    if exact is not None:
        texts |= {name: f"{getattr(exact, name)(table.gradient):.3f}" for name in ("bias", "scale", "cosine")}
        texts |= {"variance": f"{exact.variance / size:.2f}", "why": ""}
        drawing["expected"] = seen(exact.mean)
        snippet += _EXACT
    return Look(texts, drawing, [_every(rewarded, samples, baseline)], snippet.format(**state))


def _every(rewarded: int, samples: int, chosen: str) -> DataTable:
    """Return a table of every baseline by enumeration; the expensive one only if it is chosen."""
    gradient, rows = exact_oracle(rewarded).gradient, []
    for name in BASELINES:
        if name == "optimal-baseline" != chosen:
            continue
        exact, numbers = exact_estimate(rewarded, name, samples), ["too many groups"] * 3
        if exact is not None:
            variance = exact.variance / float(gradient @ gradient)
            numbers = [f"{exact.bias(gradient):.3f}", signed(exact.cosine(gradient)), f"{variance:.2f}"]
        rows.append([_LABELS[name], *numbers])
    caption = "Every baseline here, exactly; in units of the gradient's length"
    return DataTable(caption, ("baseline", "bias", "cosine with ∇E[R]", "variance"), rows)


_HELP = "Subtracted from the reward; a running mean is at E[R]."
FIGURE = Figure(
    name="variance",
    place=2,
    title="Variance",
    about="Each dot is one estimate of the gradient from one group of samples; the exact gradient is enumerated.",
    controls=(
        Slider("samples", "samples in a group", 4, 2, 16, 1, "G: responses behind each dot.", (2, 4, 8, 16)),
        Slider("rewarded", "rewarded responses of 27", 3, 1, 18, 1, "Fewer is sparser."),
        Choice("baseline", "baseline", "leave-one-out", tuple(_LABELS.items()), _HELP),
        Slider("seed", "seed", 0, 0, 99, 1, "Other dots from the same policy."),
    ),
    compute=_compute,
    keys=(("space", "draw again"), ("←  →", "more or fewer samples"), ("r", "back to the start")),
)
