"""`ascent sft`, `dpo`, `reward-model` and `process-reward`: what is learned from what somebody wrote or labelled."""

from __future__ import annotations

from pathlib import Path

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

PROCESS_REWARD = """usage: ascent process-reward FILE --model NAME_OR_FOLDER …
       ascent process-reward sort --labels FILE …

Train a process reward, a head that scores every step of a response, on a
JSONL file of labelled steps, {"prompt": …, "steps": […], "labels": […]}:
people's, or those of `ascent label-steps`. It takes the options of
`ascent train` (`ascent train steps --help`).
Then it is a reward per token: ascent train TASK --reward own 0.5*process:RUN
(for sort: --reward process:RUN, or positions+0.5*process:RUN)"""


def sft(args: list[str]) -> int:
    return _learn(args, "sft")


def dpo(args: list[str]) -> int:
    return _learn(args, "dpo")


def reward_model(args: list[str]) -> int:
    return _learn(args, "reward-model")


def _learn(args: list[str], row: str) -> int:
    """One of the three: FILE for a language model, or TASK for what a task shows itself."""
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
    from ascent.learned.assess import write_assessment

    print(write_assessment(run))


def process_reward(args: list[str]) -> int:
    from ascent.cli import train

    asks = bool({"-h", "--help"} & set(args))
    if asks or not args or args[0].startswith("-"):
        print(PROCESS_REWARD)
        return 0 if asks else 2
    task = [args[0], "--algorithm", "process-reward"] if is_task(args[0]) else [f"steps:{args[0]}"]
    return train([*task, *args[1:]], "ascent process-reward")
