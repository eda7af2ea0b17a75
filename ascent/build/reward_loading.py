"""Load the reward models, process rewards and judges that a task names, and assess reward models.

--reward own 0.5*model:RUN 0.1*judge:FILE     for text tasks, with --reward-batch and --reward-device
--reward positions 0.5*model:RUN              for sort
--reward positions 0.5*process:RUN            for sort, step by step
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ascent.build.backend import Backend, BoundTask
from ascent.build.backends import backend_of
from ascent.build.trained_run import Run
from ascent.core.errors import ConfigError
from ascent.core.preferences import margin_of
from ascent.rewards.judge.judge_rewards import JudgeScorer
from ascent.rewards.judge.judge_settings import read_judge
from ascent.runs import checkpoint
from ascent.runs.held_out_evaluation import Calibration, calibration, calibration_text, draw_calibration, offline_batch
from ascent.runs.metrics import best_evaluation
from ascent.runs.run_folder import write_json
from ascent.server.requirements import check_packages

BATCH = 16


def load_reward_model(
    run: str | Path, device: str | None = None, batch: int = BATCH, what: str = "reward model"
) -> Any:
    """Load the reward model of a run's best evaluation, else its newest: call it with rollouts or `rate` texts.

    device: None means the device of its training. batch: responses per batch. what: reward model, or process reward.
    """
    existing = Run(run)
    config = existing.config
    if config.algorithm.loss.trains != {"reward model": "rewards", "process reward": "steps"}[what]:
        raise ConfigError(f"{run} did not train a {what}; `ascent {what.replace(' ', '-')}` does")
    best = best_evaluation(existing.metrics) if config.keep_best else None
    kept = [path for path in existing.checkpoints if best is not None and checkpoint.step_of(path) == best[0]]
    params = checkpoint.params(kept[0] if kept else existing.checkpoint())
    return backend_of(config).learned_reward(config, params, device, batch)


def load_process_reward(run: str | Path, device: str | None = None, batch: int = BATCH) -> Any:
    """Load the process reward of a run as `load_reward_model` does. Call it with rollouts or `rate` steps of texts."""
    return load_reward_model(run, device, batch, "process reward")


def check_rewards(backend: Backend, task: Any, reads_data: bool = True) -> None:
    """Raise ConfigError for a task that cannot be trained on, or for judges with wrong settings.

    Without `reads_data` the task's data, which may be on the hub, are not read.
    """
    if reads_data:
        task.verify()
    else:
        for entry in task.rewards:
            entry.verify()
    for source in backend.reward_sources(task):
        if source.startswith("judge:"):
            read_judge(source.removeprefix("judge:")).validated()


def bind_task(backend: Backend, task: Any, model: Any, scores: bool = True) -> BoundTask:
    """Bind a task to the policy's tokenizer, to its rewards and to its agent.

    Without `scores`, as on ranks other than 0, the models of its rewards are not loaded.
    """
    rewards = {source: _reward(backend, task, source) for source in backend.reward_sources(task) if scores}
    bound = backend.bind(task, model, rewards)
    if not (backend.uses_text and task.agent):
        return bound
    check_packages("--agent")
    from ascent.rollout.agents import bind_agents

    return bind_agents(task, model, bound)


def _reward(backend: Backend, task: Any, source: str) -> Any:
    kind, _, path = source.partition(":")
    if kind == "judge":
        return JudgeScorer(path)
    load = load_reward_model if kind == "model" else load_process_reward
    model = load(path, *backend.reward_placement(task))
    other = backend_of(model.config)
    if other.task_kind != backend.task_kind:
        raise ConfigError(
            f"--reward {source}: it was trained for a {other.task_kind} task, and this is a {backend.task_kind} task. "
            "Train one for this kind of task"
        )
    return model


def assess(run: str | Path, pairs: int | None = None) -> Calibration:
    """Compute accuracy, log-loss and calibration of a reward model on the held-out pairs of its run."""
    model = load_reward_model(run)
    task, engine = backend_of(model.config).offline(model.config, model.model, torch.Generator())
    held_out = offline_batch(engine.generate(task.held_out(pairs or model.config.eval_prompts), 2))
    parts = torch.arange(len(held_out.prompt)).split(model.batch)
    return calibration(torch.cat([margin_of(model(held_out.select(rows))).flatten() for rows in parts]))


def write_assessment(run: Run) -> str:
    """Write calibration.json and calibration.png to the run folder; return the numbers as text."""
    from ascent.runs.display.plots import figure, save_figure

    result = assess(run.folder)
    write_json(run.folder / "calibration.json", asdict(result))
    fig, axes = figure(1, 1, (5.2, 4.2))
    draw_calibration(axes[0][0], result)
    axes[0][0].set_title(f"{result.pairs} held-out pairs, {result.accuracy:.1%} right")
    return f"{calibration_text(result)}\nCalibration: {save_figure(fig, run.folder / 'calibration.png')}"
