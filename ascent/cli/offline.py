"""Offline data: `ascent pairs`, `label` and `label-steps` write it; `sft`, `dpo`, … train on it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from ascent.build.reward_loading import write_assessment
from ascent.build.trained_run import Run
from ascent.cli.flags import Command
from ascent.cli.run_flags import is_task, parse_train
from ascent.cli.train import run_training
from ascent.rewards.judge.judge_settings import Judge, read_judge
from ascent.settings import settings_of
from ascent.tasks.text.table_tasks import SEPARATOR
from ascent.workflows.labels import label_pairs, label_steps, make_pairs


@dataclass
class PairsCommand(Command):
    """Make preference pairs from a run's policy and the task's true reward.

      ascent pairs RUN pairs.jsonl --count 2000
      ascent reward-model pairs.jsonl --model FOLDER
      ascent reward-model sort --pairs pairs.jsonl

    The policy gives two responses to each training prompt. The one with the
    higher reward is chosen, the other rejected. Ties are left out.
    """

    run: Path
    """The run whose policy samples the responses."""
    file: Path
    """The JSONL file to write."""
    count: int = 1000
    """Number of pairs."""
    reward: Annotated[tuple[str, ...], "REWARD …"] = ()
    """Reward that labels the pairs, instead of the run's. For policies trained on a learned reward."""
    step: Annotated[int | None, "N"] = None
    """The checkpoint of this step. Default: the newest."""
    seed: int = 0
    """Seed of prompts and responses."""

    def execute(self) -> None:
        file = make_pairs(self.run, self.file, self.count, self.seed, reward=self.reward or None, step=self.step)
        print(f"{self.count} pairs: {file}")


@dataclass
class LabelCommand(Command):
    """Label preference pairs with a judge: a language model behind an OpenAI-compatible API (RLAIF).

      ascent label candidates.jsonl pairs.jsonl --judge judge.toml
      ascent label RUN pairs.jsonl --prompts 200 --judge judge.toml
      ascent dpo pairs.jsonl --model MODEL

    A line of CANDIDATES has a prompt and two or more responses; every two
    responses are compared. Lines with chosen and rejected are labelled again.
    For a RUN, its policy samples the responses. The judge sees each pair in both
    orders; if its verdicts disagree, the pair is a tie. Answers are saved next to
    FILE as they arrive, so the same command continues after an interruption. The
    key is read from an environment variable.
    """

    extra_settings = Judge
    only_in_help_all = frozenset(settings_of(Judge)) - {"url", "model", "criteria", "concurrency"}
    source: Annotated[Path, "CANDIDATES|RUN"]
    """A JSONL file, or the folder of a run."""
    out: Annotated[Path, "FILE"]
    """The file to write."""
    judge: Annotated[Path | None, "FILE"] = None
    """A judge's settings as TOML (url, model, criteria, …). Flags override the file."""
    prompts: int = 64
    """For a run: number of training prompts."""
    samples: int = 2
    """For a run: responses per prompt; every two of them are compared."""
    seed: int = 0
    """For a run: seed of the samples."""
    ties: Literal["keep", "drop"] = "keep"
    """Pairs without a winner. keep: write them to FILE.ties.jsonl. drop: discard them. They are counted either way."""
    max_failed: float = 0.1
    """Share of pairs that the judge may fail on; if more fail, only FILE.failed.jsonl is written."""

    def execute(self) -> None:
        judge = replace(Judge() if self.judge is None else read_judge(self.judge), **self.extra_values)
        names = ("prompts", "samples", "seed", "ties", "max_failed")
        labelled = label_pairs(self.source, self.out, judge, **{name: getattr(self, name) for name in names})
        then = [f"ascent {command} {labelled.file} --model MODEL" for command in ("reward-model", "dpo")]
        print(f"{labelled.text()}\nThen: {', or '.join(then)}")


@dataclass
class LabelStepsCommand(Command):
    """Label the steps of responses with rollouts of a run's policy.

      ascent label-steps RUN steps.jsonl --prompts 200 --rollouts 8
      ascent process-reward steps.jsonl --model MODEL

    Each response is cut into steps (lines; in small tasks, numbers). Each prefix
    is continued --rollouts times, and the mean reward is its label. The same
    command continues after an interruption.
    """

    run: Path
    """The run's folder."""
    out: Annotated[Path, "FILE"]
    """The file to write."""
    prompts: int = 64
    """Number of training prompts."""
    samples: int = 1
    """Responses per prompt."""
    rollouts: int = 8
    """Continuations of each prefix."""
    seed: int = 0
    """Seed of the samples."""
    separator: str = SEPARATOR
    """The text between two steps. Default: a newline."""

    def execute(self) -> None:
        names = ("prompts", "samples", "rollouts", "seed", "separator")
        out = label_steps(self.run, self.out, **{name: getattr(self, name) for name in names})
        print(f"Written: {out}\nThen: ascent process-reward {out} --model MODEL")
        print(f"For a small task: ascent process-reward sort --labels {out}")


# ---- training on them -----------------------------------------------------------------------------------------


@dataclass
class OfflineCommand(Command):
    """Train on FILE, or on the offline data of a task."""

    accepts_other_flags = True
    under_torchrun = True
    task_of_file: ClassVar[str]
    """The task that reads FILE."""
    source: Annotated[str, "FILE|TASK"]
    """A JSONL file, or a task with such data. It comes first."""

    def execute(self) -> int | None:
        row = self.prog().removeprefix("ascent ")
        if is_task(self.source):
            words = [self.source, "--algorithm", row]
        else:
            words = [f"{self.task_of_file}:{self.source}", *(["--preset", row] if row == "reward-model" else [])]
        return run_training(*parse_train([*words, *self.other_args], self.prog()), self.after)

    def after(self, run: Run) -> None:
        """Do something with the finished run."""


class SftCommand(OfflineCommand):
    """Supervised fine-tuning: train on demonstrations, as a warm start.

      ascent sft FILE --model NAME_OR_FOLDER
      ascent sft sort

    FILE is JSONL with prompts and responses, {"prompt": …, "response": …}. A TASK
    comes with demonstrations: sort, and text tasks that know a right response.
    All flags of `ascent train` apply (`ascent train demonstrations --help`).
    Then: ascent train TASK --init RUN
    """

    task_of_file = "demonstrations"


class DpoCommand(OfflineCommand):
    """Train on preference pairs (chosen and rejected responses).

      ascent dpo FILE --model NAME_OR_FOLDER
      ascent dpo sort

    FILE is JSONL, {"prompt": …, "chosen": …, "rejected": …}. A prompt is text or the
    messages of a chat; TRL's data sets work unchanged. All flags of `ascent train`
    apply (`ascent train preferences --help`; `ascent explain dpo`). Start from an
    SFT run: --init RUN. sort makes its pairs from its true reward, or reads them
    from --pairs FILE.
    """

    task_of_file = "preferences"


class RewardModelCommand(OfflineCommand):
    """Train a reward model on preference pairs; reports accuracy and calibration.

      ascent reward-model FILE --model NAME_OR_FOLDER
      ascent reward-model sort

    FILE is JSONL, {"prompt": …, "chosen": …, "rejected": …}; the model is
    Bradley–Terry, and the report is on held-out pairs. All flags of `ascent train`
    apply (`ascent explain reward-model`).
    Then it is a reward like any other: ascent train TASK --reward own 0.5*model:RUN
    (for sort: --reward positions 0.5*model:RUN)
    """

    task_of_file = "preferences"

    def after(self, run: Run) -> None:
        print(write_assessment(run))


class ProcessRewardCommand(OfflineCommand):
    """Train a process reward model on labelled steps; it scores each step of a response.

      ascent process-reward FILE --model NAME_OR_FOLDER
      ascent process-reward sort --labels FILE

    FILE is JSONL, {"prompt": …, "steps": […], "labels": […]}: labels by people, or
    those of `ascent label-steps`. It trains a head that scores every step of a
    response. All flags of `ascent train` apply (`ascent train steps --help`).
    Then it is a reward per token: ascent train TASK --reward own 0.5*process:RUN
    (for sort: --reward positions 0.5*process:RUN)
    """

    task_of_file = "steps"


COMMANDS = {
    "train on offline data": (SftCommand, DpoCommand, RewardModelCommand, ProcessRewardCommand),
    "make data": (PairsCommand, LabelCommand, LabelStepsCommand),
}
