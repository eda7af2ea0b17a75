"""Is a reward model right about pairs, and does it know how sure it may be?

With the margin m = r_w − r_l of a held-out pair, σ(|m|) is the confidence that the higher rated response is the one
that was chosen. Calibration compares that confidence with how often it is right.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ascent.core.types import Metrics

BINS = 10


@dataclass(frozen=True)
class Bin:
    """The pairs whose confidence lies in a range."""

    low: float
    high: float
    pairs: int
    confidence: float
    """Mean σ(|m|)."""
    accuracy: float
    """The share of them that is right."""


@dataclass(frozen=True)
class Calibration:
    """How good a reward model is on held-out pairs."""

    pairs: int
    accuracy: float
    """Share of pairs whose chosen response is rated higher; a tie counts half."""
    log_loss: float
    """Mean −log σ(m): log 2 = 0.693 is what knowing nothing costs."""
    margin: float
    """Mean m."""
    ece: float
    """Expected calibration error, Σ_bins (pairs in it / pairs)·|accuracy − confidence| (Guo et al. 2017)."""
    bins: tuple[Bin, ...]
    """Those that hold pairs, of equal width from 0.5 to 1."""

    def metrics(self) -> Metrics:
        names = ("accuracy", "log_loss", "margin", "ece")
        return {f"eval/pairs/{name}": getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def calibration(margin: Float[Tensor, "pair"], bins: int = BINS) -> Calibration:
    """From the margins of held-out pairs. A pair of margin 0 is half right, at a confidence of one half."""
    margin = margin.double()
    right = (margin > 0).double() + 0.5 * (margin == 0).double()
    confidence = torch.sigmoid(margin.abs())
    place = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    filled = []
    for i in range(bins):
        inside = place == i
        if bool(inside.any()):
            edges = (0.5 + 0.5 * i / bins, 0.5 + 0.5 * (i + 1) / bins)
            filled.append(Bin(*edges, int(inside.sum()), float(confidence[inside].mean()), float(right[inside].mean())))
    ece = sum(b.pairs * abs(b.accuracy - b.confidence) for b in filled) / len(margin)
    loss = float(-F.logsigmoid(margin).mean())
    return Calibration(len(margin), float(right.mean()), loss, float(margin.mean()), ece, tuple(filled))


def calibration_text(result: Calibration) -> str:
    """The figures and the bins, as a person reads them."""
    from ascent.records.text_tables import table

    head = (
        f"{result.pairs} held-out pairs: {result.accuracy:.1%} right, log-loss {result.log_loss:.3f} (knowing nothing: "
        f"0.693), expected calibration error {result.ece:.3f}."
    )
    rows = [
        [f"{b.low:.2f} to {b.high:.2f}", str(b.pairs), f"{b.confidence:.3f}", f"{b.accuracy:.3f}"] for b in result.bins
    ]
    return "\n".join([head, "", *table(["confidence", "pairs", "mean", "right"], rows)])


def draw_calibration(axis: Any, result: Calibration) -> None:
    """A reliability diagram: what it was sure of against how often it was right."""
    axis.plot([0.5, 1], [0.5, 1], color="#999999", linewidth=1, linestyle="--", label="perfectly calibrated")
    size = [20 + 200 * b.pairs / result.pairs for b in result.bins]
    axis.scatter([b.confidence for b in result.bins], [b.accuracy for b in result.bins], s=size, color="#1f5fa8")
    axis.plot([b.confidence for b in result.bins], [b.accuracy for b in result.bins], color="#1f5fa8", linewidth=1.2)
    axis.set_xlabel("confidence, σ(|margin|)")
    axis.set_ylabel("share of pairs that is right")
    axis.set_ylim(-0.03, 1.03)
    axis.legend(frameon=False, fontsize=7.5)
