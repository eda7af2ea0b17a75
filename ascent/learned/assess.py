"""What a reward model is worth: accuracy and calibration on its held-out pairs, in words, numbers and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ascent.diagnose import calibration as by
from ascent.learned.rewards import SmallRater, load_reward_model
from ascent.preferences import margin_of
from ascent.records import Run
from ascent.records.folder import write_json
from ascent.types import Rollouts


def held_out_pairs(rater: Any, count: int) -> Rollouts:
    """The pairs that a reward model's run has held out."""
    config = rater.config
    if isinstance(rater, SmallRater):
        from ascent.engines.given import Given
        from ascent.tasks.examples import Exhibited

        shown = Exhibited(config.task, "pairs", torch.Generator())
        return Given(shown.space, shown.show).generate(shown.held_out(count), 2)
    from ascent.engines.language import Demonstrator
    from ascent.tasks.text.shown import Shown

    task = Shown(config.task, rater.lm, pairs=True)
    return Demonstrator(rater.lm, config.task.max_tokens, task.responses).generate(task.held_out(count), 2)


def assess(run: str | Path, pairs: int | None = None) -> by.Calibration:
    """Accuracy, log-loss and calibration of a reward model on the pairs that its run held out."""
    rater = load_reward_model(run)
    shown = held_out_pairs(rater, pairs or rater.config.eval_prompts)
    parts = []
    for rows in torch.arange(len(shown.prompt)).split(getattr(rater, "batch", len(shown.prompt))):
        parts.append(margin_of(rater(_part(shown, rows))).flatten())
    return by.calibration(torch.cat(parts))


def _part(shown: Rollouts, rows: torch.Tensor) -> Rollouts:
    from dataclasses import replace

    names = ("prompt", "response", "mask", "logp_sampler", "truncated")
    return replace(shown, **{name: getattr(shown, name)[rows] for name in names})


def write_assessment(run: Run) -> str:
    """calibration.json and calibration.png into the run's folder; the figures as text."""
    from ascent.records.plot import figure

    found = assess(run.folder)
    write_json(run.folder / "calibration.json", found.to_dict())
    fig, axes = figure(1, 1, (5.2, 4.2))
    by.draw(axes[0][0], found)
    axes[0][0].set_title(f"{found.pairs} held-out pairs, {found.accuracy:.1%} right")
    fig.savefig(run.folder / "calibration.png", dpi=130)
    from matplotlib import pyplot

    pyplot.close(fig)
    return f"{by.text(found)}\nCalibration: {run.folder / 'calibration.png'}"
