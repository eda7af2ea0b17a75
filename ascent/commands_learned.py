"""`ascent sft`, `ascent dpo`, `ascent reward-model` and `ascent pairs`: what is learned from what somebody wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ascent.records import Run
from ascent.types import Refused

SFT = """usage: ascent sft FILE --model NAME_OR_FOLDER …
       ascent sft TASK …

Learn from a JSONL file of prompts and responses, {"prompt": …, "response": …}, on the learner of
`ascent train`, whose options it takes (`ascent train demonstrations --help`); or from what a task
demonstrates itself: sort does, and tasks in words that know a right response.
Then: ascent train TASK --init RUN"""

DPO = """usage: ascent dpo FILE --model NAME_OR_FOLDER …
       ascent dpo sort …

Learn from a JSONL file of pairs, {"prompt": …, "chosen": …, "rejected": …}: prompts are words or
messages of a chat, TRL's datasets do as they are. It takes the options of `ascent train`
(`ascent train preferences --help`; `ascent explain dpo`). Start it from an SFT run: --init RUN.
sort makes its pairs from its true reward, or reads them from --pairs FILE."""

REWARD_MODEL = """usage: ascent reward-model FILE --model NAME_OR_FOLDER …
       ascent reward-model sort …

Train a reward model (Bradley–Terry) on a JSONL file of pairs, {"prompt": …, "chosen": …,
"rejected": …}, and say how right and how well calibrated it is on pairs that were held out. It
takes the options of `ascent train` (`ascent explain reward-model`).
Then it is a reward like any other: ascent train TASK --reward own 0.5*model:RUN
(for sort: --reward model:RUN)"""


def learn(args: list[str], row: str) -> int:
    """One of the three commands: FILE for a language model, or TASK for what a task shows itself."""
    from ascent.cli import train

    about = {"sft": SFT, "dpo": DPO, "reward-model": REWARD_MODEL}[row]
    if "-h" in args or "--help" in args or not args or args[0].startswith("-"):
        print(about)
        return 0 if {"-h", "--help"} & set(args) else 2
    given, rest = args[0], args[1:]
    if is_task(given):
        settings = [given, "--algorithm", row]
    else:
        name = "demonstrations" if row == "sft" else "preferences"
        settings = [f"{name}:{given}", "--preset", "reward-model" if row == "reward-model" else "default"]
    return train([*settings, *rest], f"ascent {row}", _assessed if row == "reward-model" else None)


def is_task(given: str) -> bool:
    """Does this name a task rather than a file?"""
    from ascent.settings import find_task

    if Path(given).exists() or given.endswith((".jsonl", ".json")):
        return False
    try:
        find_task(given)
    except Refused:
        return False
    return True


def _assessed(run: Run) -> None:
    from ascent.assess import write_assessment

    print(write_assessment(run))


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
    from ascent.pairing import make_pairs
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
