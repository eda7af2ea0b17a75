"""`ascent pairs`, `ascent label` and `ascent label-steps`: files of what one response is worth beside another."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ascent.judge import Judge, read_judge
from ascent.learned.labelling import label as label_pairs
from ascent.learned.stepping import label_steps as labelled_steps
from ascent.records import Run
from ascent.tasks.text.steps import SEPARATOR
from ascent.types import Refused

# ---- pairs, labelled by the true reward -----------------------------------------------------------------------


@dataclass
class PairsOptions:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run whose policy answers."""
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The JSONL file to make."""
    count: int = 1000
    """How many pairs."""
    reward: Annotated[tuple[str, ...], tyro.conf.arg(metavar="REWARD …", help_behavior_hint="")] = ()
    """Whose labels: a reward in place of the run's own, for a policy that was trained on a learned one."""
    step: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """The checkpoint of this step. Default: the newest."""
    seed: int = 0
    """Decides prompts and responses."""


PAIRS = """Preference pairs from a run's policy, labelled by the true reward.

  ascent pairs RUN pairs.jsonl --count 2000
  ascent reward-model pairs.jsonl --model FOLDER
  ascent reward-model sort --pairs pairs.jsonl

  Two responses to each training prompt: the one with the higher reward is
  chosen, the other rejected. Pairs that earn the same are left out."""


def pairs(args: list[str]) -> int:
    from ascent.learned.pairing import make_pairs
    from ascent.tasks.text import Text

    options = tyro.cli(PairsOptions, prog="ascent pairs", description=PAIRS, args=args)
    reward: Any = options.reward or None
    if reward is not None and not isinstance(Run(options.run).config.task, Text):
        if len(reward) > 1:
            raise Refused(f"--reward {' '.join(reward)}: sort has one reward; name one")
        reward = reward[0]
    file = make_pairs(options.run, options.file, options.count, options.seed, reward=reward, step=options.step)
    print(f"{options.count} pairs: {file}")
    return 0


# ---- pairs, labelled by a judge -------------------------------------------------------------------------------

LABEL = """Pairs of responses, labelled by a language model (RLAIF).

  ascent label candidates.jsonl pairs.jsonl --judge judge.toml
  ascent label RUN pairs.jsonl --prompts 200 --judge judge.toml
  ascent dpo pairs.jsonl --model MODEL

  A line of candidates has a prompt and responses, of which every two are
  compared; pairs (chosen, rejected) are labelled anew. A RUN's policy draws
  its own. Each pair is asked in both orders: where the verdicts disagree it is
  a tie. Answers are kept beside FILE as they come, so that the same command
  goes on after an interruption. The key is read from an environment variable."""


Flat = tyro.conf.OmitArgPrefixes[Judge]
"""A judge's settings as flags of their own: --url and not --by.url."""


@dataclass
class LabelOptions:
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CANDIDATES|RUN")]
    """A JSONL file, or the folder of a run."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The file to write."""
    judge: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A judge's settings as TOML (url, model, criteria, …); flags count more."""
    prompts: int = 64
    """Of a run: training prompts to draw."""
    samples: int = 2
    """Of a run: responses to each, every two of which are compared."""
    seed: int = 0
    """Of a run: decides what is drawn."""
    ties: Literal["keep", "drop"] = "keep"
    """Pairs without a winner: in a file of their own (FILE.ties.jsonl), or nowhere. They are counted either way."""
    max_failed: float = 0.1
    """Share of pairs on which the judge may fail before nothing is written. They are kept in FILE.failed.jsonl."""


def label(args: list[str]) -> int:
    kind = dataclasses.make_dataclass("Options", [("by", Flat, field(default=judge_of(args)))], bases=(LabelOptions,))
    options: Any = tyro.cli(kind, prog="ascent label", description=LABEL, args=args)
    names = ("prompts", "samples", "seed", "ties", "max_failed")
    done = label_pairs(options.source, options.out, options.by, **{name: getattr(options, name) for name in names})
    print(
        f"{done.text()}\nThen: ascent reward-model {done.file} --model MODEL, or ascent dpo {done.file} --model MODEL"
    )
    return 0


def judge_of(args: list[str]) -> Judge:
    """The judge of --judge FILE, before anything else is parsed: its settings are the flags' defaults."""
    for i, arg in enumerate(args):
        if arg.startswith("--judge="):
            return read_judge(arg.partition("=")[2])
        if arg == "--judge" and i + 1 < len(args):
            return read_judge(args[i + 1])
    return Judge()


# ---- steps, labelled by what follows them ---------------------------------------------------------------------

STEPS = """What a response is worth after each of its steps, from roll-outs of a run's own policy.

  ascent label-steps RUN steps.jsonl --prompts 200 --rollouts 8
  ascent process-reward steps.jsonl --model MODEL

  Each response is cut into steps (lines; in the small worlds, numbers), and
  every prefix is continued so many times: the mean reward is its label. The
  same command goes on after an interruption."""


@dataclass
class StepsOptions:
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run's folder."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The file to write."""
    prompts: int = 64
    """Training prompts to draw."""
    samples: int = 1
    """Responses to each."""
    rollouts: int = 8
    """Continuations of each prefix."""
    seed: int = 0
    """Decides what is drawn."""
    separator: str = SEPARATOR
    """What stands between two steps, in words. Default: a newline."""


def label_steps(args: list[str]) -> int:
    options = tyro.cli(StepsOptions, prog="ascent label-steps", description=STEPS, args=args)
    names = ("prompts", "samples", "rollouts", "seed", "separator")
    out = labelled_steps(options.run, options.out, **{name: getattr(options, name) for name in names})
    print(
        f"Written: {out}\nThen: ascent process-reward {out} --model MODEL; or ascent process-reward sort --labels {out}"
    )
    return 0
