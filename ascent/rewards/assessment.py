"""How good a reward model is: accuracy and calibration on its held-out pairs, in words, numbers and a picture."""

from __future__ import annotations

from pathlib import Path

import torch

from ascent.core.preferences import margin_of
from ascent.engines.backends import backend_of
from ascent.records import Run
from ascent.records.calibration import Calibration, calibration, calibration_text, draw_calibration
from ascent.records.evaluation import offline_batch
from ascent.records.folder import write_json
from ascent.rewards.reward_models import load_reward_model


def assess(run: str | Path, pairs: int | None = None) -> Calibration:
    """Accuracy, log-loss and calibration of a reward model on the pairs that its run held out."""
    model = load_reward_model(run)
    task, sampler = backend_of(model.config).offline(model.config, model.model, torch.Generator())
    held_out = offline_batch(sampler.generate(task.held_out(pairs or model.config.eval_prompts), 2))
    parts = torch.arange(len(held_out.prompt)).split(model.batch)
    return calibration(torch.cat([margin_of(model(held_out.select(rows))).flatten() for rows in parts]))


def write_assessment(run: Run) -> str:
    """calibration.json and calibration.png into the run's folder; the figures as text."""
    from matplotlib import pyplot

    from ascent.records.plot import figure

    result = assess(run.folder)
    write_json(run.folder / "calibration.json", result.to_dict())
    fig, axes = figure(1, 1, (5.2, 4.2))
    draw_calibration(axes[0][0], result)
    axes[0][0].set_title(f"{result.pairs} held-out pairs, {result.accuracy:.1%} right")
    fig.savefig(run.folder / "calibration.png", dpi=130)
    pyplot.close(fig)
    return f"{calibration_text(result)}\nCalibration: {run.folder / 'calibration.png'}"
