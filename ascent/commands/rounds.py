"""`ascent rounds`: its flags, and what it prints."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ascent.commands.flags import parse_train
from ascent.layout import table
from ascent.learned.rounds import PLAN, Plan, begin, carry_out, reopen
from ascent.types import Refused

ABOUT = """Iterative GRPO: rounds of pairs, a reward model on them, and a policy on its reward.

  ascent rounds sort --rounds 3 --pairs 256 --steps 100 --rm.steps 200
  ascent rounds gsm8k --model MODEL --init SFT_RUN --judge judge.toml
  ascent rounds FOLDER

  The task's own reward labels the pairs and is hidden from the policy; or a
  judge labels them. Every other flag is one of `ascent train TASK`, for the
  policies (--algorithm grpo unless it says otherwise); behind --rm. it is for
  the reward models. Each part is an ordinary run in the folder; FOLDER alone
  goes on with what is not finished."""


@dataclass(frozen=True)
class Options(Plan):
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = None
    """The folder. Default: runs/<date>-rounds."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The table as JSON lines, for scripts."""


def command(args: list[str]) -> int:
    asks = bool({"-h", "--help"} & set(args))
    if not asks and (not args or args[0].startswith("-")):
        raise Refused("which TASK, or which FOLDER of rounds? It comes first: ascent rounds sort; ascent rounds FOLDER")
    source, rest = ("TASK", args) if asks else (args[0], args[1:])
    rater, rest = rater_settings(rest)
    options, rest = tyro.cli(
        Options, prog=f"ascent rounds {source}", description=ABOUT, args=rest, return_unknown_args=True
    )
    if (Path(source) / PLAN).exists():
        if rest or rater:
            raise Refused(
                f"{' '.join(rest) or '--rm.…'}: {source} has its settings; ascent rounds {source} goes on with them"
            )
        rounds = reopen(Path(source))
    else:
        row = [] if any(arg.partition("=")[0] == "--algorithm" for arg in rest) else ["--algorithm", "grpo"]
        config, _ = parse_train([source, *row, *rest], "ascent rounds")
        plan = Plan(options.rounds, options.pairs, options.replay, options.judge)
        folder = options.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-rounds"
        rounds = begin(folder, config, plan, rater)
    rows = carry_out(rounds)
    if options.json:
        print("\n".join(json.dumps(row) for row in rows))
        return 0
    print("\n".join(table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows])))
    print(f"Look closer: ascent show {rounds.part(len(rows), 'policy')}")
    return 0


def _cell(value: Any) -> str:
    return "·" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def rater_settings(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """--rm.steps 200 -> {"steps": 200}, and the flags that are left."""
    found: dict[str, Any] = {}
    left: list[str] = []
    words = iter(args)
    for word in words:
        if not word.startswith("--rm."):
            left.append(word)
            continue
        name, equals, value = word.removeprefix("--rm.").partition("=")
        value = value if equals else next(words, "")
        if not value:
            raise Refused(f"--rm.{name} needs a value after it")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = value
    return found, left
