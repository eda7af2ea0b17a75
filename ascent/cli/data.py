"""`ascent pairs`, `ascent label` and `ascent label-steps`: files of preference pairs and of labelled steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from ascent.cli.flags import Command
from ascent.tasks.text.offline.files import SEPARATOR


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
    """The run whose policy answers."""
    file: Path
    """The JSONL file to make."""
    count: int = 1000
    """How many pairs."""
    reward: Annotated[tuple[str, ...], "REWARD …"] = ()
    """A reward that labels instead of the run's own, for a policy that was trained on a learned reward."""
    step: Annotated[int | None, "N"] = None
    """The checkpoint of this step. Default: the newest."""
    seed: int = 0
    """Decides prompts and responses."""

    def execute(self) -> None:
        from ascent.workflows.pairs import make_pairs

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
    """For a run: decides what is sampled."""
    ties: Literal["keep", "drop"] = "keep"
    """Pairs without a winner. keep: write them to FILE.ties.jsonl. drop: discard them. They are counted either way."""
    max_failed: float = 0.1
    """If the judge fails on a larger share of pairs, nothing is written. They are kept in FILE.failed.jsonl."""

    @classmethod
    def part(cls) -> type:
        from ascent.rewards.judge.settings import Judge

        return Judge

    def execute(self) -> None:
        from ascent.rewards.judge.settings import Judge, read_judge
        from ascent.workflows.labels import label_pairs

        judge = replace(Judge() if self.judge is None else read_judge(self.judge), **self.of_part)
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
    """Decides what is sampled."""
    separator: str = SEPARATOR
    """The text between two steps. Default: a newline."""

    def execute(self) -> None:
        from ascent.workflows.step_labels import label_steps

        names = ("prompts", "samples", "rollouts", "seed", "separator")
        out = label_steps(self.run, self.out, **{name: getattr(self, name) for name in names})
        print(f"Written: {out}\nThen: ascent process-reward {out} --model MODEL")
        print(f"For a small task: ascent process-reward sort --labels {out}")


COMMANDS = {"make data": (PairsCommand, LabelCommand, LabelStepsCommand)}
