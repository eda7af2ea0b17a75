"""`ascent sft`, `dpo`, `reward-model` and `process-reward`: training on offline data instead of samples.

Each is `ascent train` under another name: FILE is the data of a language model, TASK brings its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from ascent.cli.flags import Command, is_task, parse_train
from ascent.cli.train import run_training

if TYPE_CHECKING:
    from ascent.records import Run


@dataclass
class OfflineCommand(Command):
    """A training on FILE, or on the offline data that a task has."""

    takes_more = True
    task_of_file: ClassVar[str]
    """The task that reads FILE."""
    source: Annotated[str, "FILE|TASK"]
    """A JSONL file, or a task that has such data itself. It comes first."""

    def execute(self) -> int | None:
        row = self.prog().removeprefix("ascent ")
        if is_task(self.source):
            words = [self.source, "--algorithm", row]
        else:
            words = [f"{self.task_of_file}:{self.source}", *(["--preset", row] if row == "reward-model" else [])]
        return run_training(*parse_train([*words, *self.rest], self.prog()), self.after)

    def after(self, run: Run) -> None:
        """What follows a finished training."""


class SftCommand(OfflineCommand):
    """Supervised fine-tuning: train on demonstrations, as a warm start.

      ascent sft FILE --model NAME_OR_FOLDER
      ascent sft sort

    FILE is JSONL with prompts and responses, {"prompt": …, "response": …}. A TASK
    has demonstrations of its own: sort, and text tasks that know a right response.
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
    (for sort: --reward model:RUN)
    """

    task_of_file = "preferences"

    def after(self, run: Run) -> None:
        from ascent.rewards.assessment import write_assessment

        print(write_assessment(run))


class ProcessRewardCommand(OfflineCommand):
    """Train a process reward on labelled steps; it gives a reward per step.

      ascent process-reward FILE --model NAME_OR_FOLDER
      ascent process-reward sort --labels FILE

    FILE is JSONL, {"prompt": …, "steps": […], "labels": […]}: labels by people, or
    those of `ascent label-steps`. It trains a head that scores every step of a
    response. All flags of `ascent train` apply (`ascent train steps --help`).
    Then it is a reward per token: ascent train TASK --reward own 0.5*process:RUN
    (for sort: --reward process:RUN, or positions+0.5*process:RUN)
    """

    task_of_file = "steps"


COMMANDS = {"train on offline data": (SftCommand, DpoCommand, RewardModelCommand, ProcessRewardCommand)}
