"""Exact bias and variance of advantages from a critic, compared with group-relative advantages.

    python -m benchmarks.advantage_variance

A small transformer sorts three numbers out of three. Each right position earns one point, paid at the end. Every
response is enumerated in float64, so the gradient estimate of an advantage has an exact expectation and an exact
variance (the trace of its covariance). Here they are for one prompt with four samples and sequence-sum weights. The
critic is the exact V, a crude one (half of V plus a wave over the tokens so far), or a useless one (V = 0).

`value` is the largest bias among those that must be 0: every advantage with the exact V, Monte Carlo with any V,
leave-one-out and raw. The table has the biases of the others. The exact V is not the baseline of least variance:
under Monte Carlo the crude one has less.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor

from ascent.core.advantages import Centered, LeaveOneOut, Normalized, Raw
from ascent.core.algorithms import Algorithm
from ascent.core.critics import OwnCritic
from ascent.core.values import GAE, TD, KStep, MonteCarlo
from ascent.models import Transformer
from ascent.oracle.estimator import estimate
from ascent.oracle.exact import ResponseTable
from ascent.settings import spell
from ascent.tasks.small.sorting import Sort
from benchmarks.common import COLORS, close, figure, markdown, save_picture, show, write_page

SAMPLES, LARGEST_BIAS = 4, 1e-9
ADVANTAGES = (TD(), KStep(k=2), GAE(1.0, 0.95), MonteCarlo())
GROUPS = (Raw(), Centered(), LeaveOneOut(), Normalized())
PROMPT = (2, 0, 1)


def critics() -> tuple[Any, dict[str, Tensor]]:
    """The task, and the value that each critic gives to every state of every response."""
    task = Sort(length=3, numbers=3)
    policy = Transformer(width=8, layers=1, heads=2)(task.space, torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        policy.head.weight.mul_(8)
    exact = ResponseTable(policy, torch.tensor(PROMPT), task)
    so_far = torch.nn.functional.pad(exact.batch.response[0].cumsum(-1), (1, 0)).double()
    V = exact.exact_value
    values = {"exact V": V, "crude V": 0.5 * V + 0.5 * torch.sin(1 + so_far), "V = 0": torch.zeros_like(V)}
    return (policy, task, exact), values


def measure(found: ResponseTable, advantage: Any, gradient: Tensor) -> tuple[float, float]:
    """Bias over the gradient's length, and variance over its square, at four samples.

    An advantage from a critic uses no other sample: its estimate is a mean of independent ones, and one is enumerated.
    """
    alone = not advantage.group_relative
    algorithm = Algorithm(advantage, critic=OwnCritic()) if advantage.needs else Algorithm(advantage)
    e = estimate(found, algorithm, 1 if alone else SAMPLES)
    return e.bias(gradient), e.variance / (SAMPLES if alone else 1) / float(gradient @ gradient)


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    torch.set_num_threads(1)
    (policy, task, exact), values = critics()
    tables = {name: ResponseTable(policy, torch.tensor(PROMPT), task, value=V) for name, V in values.items()}
    g = exact.gradient
    found = {(spell(advantage), "—"): measure(exact, advantage, g) for advantage in GROUPS}
    for name, table in tables.items():
        found |= {(spell(advantage), name): measure(table, advantage, g) for advantage in ADVANTAGES}
    head = ["advantage", "critic", "bias / ‖∇E[R]‖", "variance / ‖∇E[R]‖²"]
    rows = [
        [advantage, name, f"{bias:.2g}", f"{variance:.3f}"] for (advantage, name), (bias, variance) in found.items()
    ]
    show(head, rows)
    sweep = [i / 20 for i in range(21)]
    curves = {n: [measure(t, GAE(1.0, lam), g) for lam in sweep] for n, t in tables.items()}
    picture = draw(sweep, curves, found)
    text = f"# Advantages from a critic: bias and variance\n\n{__doc__}\n\n{markdown(head, rows)}\n\n"
    write_page("advantage_variance", text + f"![Bias and variance over λ]({picture.name})")
    due = {
        k: bias
        for k, (bias, _) in found.items()
        if k[1] == "exact V" or k[0] in ("monte-carlo", "raw", "leave-one-out")
    }
    wrong = {k: bias for k, (bias, _) in found.items() if k[1] == "crude V" and k[0] != "monte-carlo"}
    ok = max(due.values()) <= LARGEST_BIAS and min(wrong.values()) > 1e-3
    names = (("td", spell(TD())), ("gae", spell(GAE())), ("monte_carlo", spell(MonteCarlo())))
    more = {f"variance_{n}": found[s, "exact V"][1] for n, s in names}
    more |= {f"bias_{n}_crude": found[s, "crude V"][0] for n, s in names}
    more |= {"variance_leave_one_out": found["leave-one-out", "—"][1], "variance_raw": found["raw", "—"][1]}
    return close("advantage_variance", max(due.values()), None, LARGEST_BIAS, ok, **more)[1]


def draw(
    sweep: list[float], curves: dict[str, list[tuple[float, float]]], found: dict[Any, tuple[float, float]]
) -> Any:
    """Bias and variance of GAE over λ for each critic, with the group-relative advantages as lines."""
    fig, axes = figure(1, 2, (9.6, 3.8))
    for panel, (axis, title) in enumerate(zip(axes.flat, ("Bias / ‖∇E[R]‖", "Variance / ‖∇E[R]‖²"), strict=True)):
        for i, (name, points) in enumerate(curves.items()):
            axis.plot(sweep, [p[panel] for p in points], color=COLORS[i], label=f"GAE, {name}", linewidth=1.8)
        for i, advantage in enumerate(("raw", "centered", "leave-one-out", "normalized")):
            level = found[advantage, "—"][panel]
            axis.axhline(level, color=COLORS[4 + i], linestyle=":", linewidth=1.4, label=advantage)
        axis.set_title(title)
        axis.set_xlabel("λ   (0: TD, 1: Monte Carlo)")
        axis.set_ylim(bottom=-0.03)
    axes.flat[0].legend(frameon=False, fontsize=7.5, loc="upper right")
    fig.suptitle(f"One prompt, {SAMPLES} samples, everything enumerated", x=0.01, ha="left", fontsize=11)
    return save_picture(fig, "advantage_variance")


if __name__ == "__main__":
    sys.exit(main())
