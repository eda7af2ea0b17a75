"""`ascent rounds`: its flags, and what it prints."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ascent.cli.flags import Command, parse_train, take
from ascent.core.types import Refused
from ascent.records.text_tables import cell_text, table
from ascent.settings import Setting


@dataclass
class RoundsCommand(Command):
    """Iterative GRPO: rounds of pairs, a reward model and a policy, each an ordinary run.

      ascent rounds sort --rounds 3 --pairs 256 --steps 100 --rm.steps 200
      ascent rounds gsm8k --model MODEL --init SFT_RUN --judge judge.toml
      ascent rounds FOLDER

    The task's own reward labels the pairs and is hidden from the policy; with
    --judge, a judge labels them. All other flags are those of `ascent train TASK`
    and apply to the policies (default: --algorithm grpo). With the prefix --rm.
    they apply to the reward models. `ascent rounds FOLDER` resumes unfinished
    rounds.
    """

    takes_more = True
    source: Annotated[str, "TASK|FOLDER"]
    """A task, or the folder of rounds to resume. It comes first."""
    out: Annotated[Path | None, "FOLDER"] = None
    """The folder. Default: runs/<date>-rounds."""
    json: bool = False
    """The table as JSON lines, for scripts."""

    @classmethod
    def part(cls) -> type:
        from ascent.workflows.rounds import RoundsPlan

        return RoundsPlan

    def execute(self) -> None:
        from ascent.workflows.rounds import ROUNDS_FILE, RoundsPlan, begin_rounds, reopen_rounds, run_rounds

        reward_model, rest = reward_model_settings(self.rest)
        if (Path(self.source) / ROUNDS_FILE).exists():
            if self.rest:
                raise Refused(
                    f"{' '.join(self.rest)}: the rounds in {self.source} already have their settings. "
                    f"Leave this out: ascent rounds {self.source}"
                )
            rounds = reopen_rounds(Path(self.source))
        else:
            row = [] if any(arg.partition("=")[0] == "--algorithm" for arg in rest) else ["--algorithm", "grpo"]
            config, _ = parse_train([self.source, *row, *rest], self.prog())
            folder = self.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-rounds"
            rounds = begin_rounds(folder, config, RoundsPlan(**self.of_part), reward_model)
        rows = run_rounds(rounds)
        if self.json:
            print("\n".join(json.dumps(row) for row in rows))
            return
        print("\n".join(table(list(rows[0]), [[cell_text(value) for value in row.values()] for row in rows])))
        print(f"Look closer: ascent show {rounds.part(len(rows), 'policy')}")


def reward_model_settings(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """--rm.steps 200 -> {"steps": 200} (values are read as JSON where they are JSON), and the words that are left."""
    flags = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--rm.")}
    values, rest = take(args, [Setting(flag, str, metavar="VALUE") for flag in flags])
    return {flag.removeprefix("rm."): _json_or_text(value) for flag, value in values.items()}, rest


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


COMMANDS = {"train": (RoundsCommand,)}
