"""`ascent train`, `ascent resume` and `ascent preflight`: a run is begun, continued or only checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from ascent.cli.flags import Command, TrainOptions, parse_train
from ascent.core.config import Config
from ascent.records.text_tables import wrapped
from ascent.settings import row_label, spell

if TYPE_CHECKING:
    from ascent.records import Run


@dataclass
class TrainCommand(Command):
    """Train a policy; any axis of the menu is a flag."""

    words = "TASK"
    config: Config
    options: TrainOptions

    @classmethod
    def read(cls, args: list[str]) -> Self:
        return cls(*parse_train(args, cls.prog()))

    def execute(self) -> int | None:
        return run_training(self.config, self.options)


class PreflightCommand(TrainCommand):
    """Check a training before it starts: batch sizes, memory, a self-test of the reward, a first sample."""

    def execute(self) -> None:
        from ascent.assemble import assemble

        parts = assemble(self.config)
        try:
            report = parts.preflight()
        finally:
            parts.close()
        print(plan(self.config, self.options.out or Path("runs")) if report is None else report.text())
        if report is not None:
            report.insist()


@dataclass
class ResumeCommand(Command):
    """Resume a run; the result has the same bits as without the interruption."""

    run: Path
    """The run's folder."""
    from_: Annotated[int | None, "STEP"] = None
    """Go back to the checkpoint of this step. Default: the newest."""

    def execute(self) -> int | None:
        from ascent.api import resume
        from ascent.records import Run

        if self.from_ is None and Run(self.run).status == "finished":
            print(f"{self.run} is finished: there is nothing to resume. Look closer: ascent show {self.run}")
            return None
        return report_end(resume(self.run, from_step=self.from_))


def run_training(config: Config, options: TrainOptions, then: Callable[[Run], None] | None = None) -> int | None:
    """Train, and `then` do something with the finished run; the exit status, where it is not 0."""
    from ascent.api import start
    from ascent.records.display import for_stream

    if not options.dry_run:
        return report_end(start(config, options.out, for_stream(), options.preflight), then)
    from ascent.assemble import assemble
    from ascent.records.folder import refuse_taken
    from ascent.records.naming import default_folder

    folder = options.out or default_folder(config)
    refuse_taken(folder)
    assemble(config).close()
    print(plan(config, folder))
    return None


def report_end(run: Run, then: Callable[[Run], None] | None = None) -> int | None:
    """Print how a run ended and what to type next; the exit status, where it is not 0."""
    for words in (run.result or {}).get("words", []):
        print(wrapped(words))
    if run.status != "finished":
        print(f"Interrupted after {run.info['step']} of {run.info['steps']} steps, and saved.")
        print(f"Resume it: ascent resume {run.folder}")
        return 130
    if plot(run):
        print(f"Curves: {run.folder / 'plot.png'}")
    print(f"Look closer: ascent show {run.folder}")
    if then is not None:
        then(run)
    return None


def plan(config: Config, folder: Path) -> str:
    """What `ascent train` would do."""
    from ascent.explain.explain import formula, objective_in_words

    sampled, updates = config.prompts * config.samples, config.epochs * config.minibatches
    rounds = config.algorithm.groups.rounds
    more = f", up to {rounds} times where groups have no signal" if rounds > 1 else ""
    return "\n".join(
        [
            f"task       {spell(config.task)}",
            f"policy     {spell(config.policy)}",
            f"algorithm  {row_label(config.algorithm)}",
            f"update     {spell(config.algorithm.update)}",
            wrapped(f"objective  {objective_in_words(config.algorithm)}", 11),
            *(f"           {line}" for line in formula(config.algorithm).splitlines()),
            f"a step     {config.prompts} prompts × {config.samples} samples = {sampled} responses{more};",
            f"           epochs {config.epochs} × mini-batches {config.minibatches} = updates {updates}",
            f"the run    {config.steps} steps = {config.steps * sampled:,} responses and "
            f"{config.steps * updates:,} updates, seed {config.seed}",
            f"folder     {folder}",
        ]
    )


def plot(run: Run) -> Path:
    from ascent.records.plot import plot_runs

    title = f"{run.info['task']}, {run.info['label']}, seed {run.info['seed']}"
    return plot_runs([(run.folder.name, run.metrics, run.config.task.max_reward)], run.folder / "plot.png", title)


COMMANDS = {"train": (TrainCommand, ResumeCommand, PreflightCommand)}
