"""The five figures, by name, in the order of the lessons."""

from __future__ import annotations

from ascent.lab.figures import baselines, clip, training, trajectory, variance
from ascent.lab.look import Figure

FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (trajectory.FIGURE, variance.FIGURE, baselines.FIGURE, clip.FIGURE, training.FIGURE)
}
