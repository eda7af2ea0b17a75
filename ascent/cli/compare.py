"""`ascent compare`, and the table that it prints."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from ascent.cli.flags import Command, parse_train
from ascent.core.config import Config
from ascent.core.types import Refused
from ascent.records.text_tables import table, width, wrapped


@dataclass
class CompareCommand(Command):
    """Compare algorithms or settings over several seeds: one table, one picture.

      ascent compare lecture --algorithms reinforce,rloo,grpo
      ascent compare sort --setting "--algorithm grpo --loss.high 0.28" --setting
          "--algorithm dapo" --seeds 8 --steps 200

    Every other flag of `ascent train TASK` applies to all of them.
    """

    takes_more = True
    task: str
    """It comes first: ascent compare lecture --algorithms reinforce,rloo,grpo."""
    algorithms: Annotated[str, "NAME,NAME,…"] = ""
    """Named algorithms, separated by commas."""
    setting: Annotated[list[str], '"FLAGS"'] = field(default_factory=list)
    """Flags of `ascent train`, quoted as one argument; may be repeated: --setting "--algorithm grpo --lr 0.01"."""
    seeds: Annotated[str, "N|N,N,…"] = "5"
    """How many seeds (0, 1, …), or which ones, separated by commas: 3,5,8."""
    out: Path | None = None
    """Folder of the comparison. Default: runs/<date>-compare-<task>."""
    jobs: int = 0
    """Runs in parallel; 0: one per core."""

    def execute(self) -> None:
        seeds, configs = parse_seeds(self.seeds), self._configs()
        from ascent.records.folder import write_json
        from ascent.workflows.compare import draw_comparison, run_all, summarize_runs

        out = self.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare-{self.task}"
        runs = run_all(configs, seeds, out, self.jobs or os.cpu_count() or 1)
        result = summarize_runs(runs)
        print("\n".join(comparison_table(result, len(seeds))))
        write_json(out / "compare.json", result)
        print(f"\nCurves: {draw_comparison(runs, out / 'compare.png', len(seeds))}\nNumbers: {out / 'compare.json'}")

    def _configs(self) -> dict[str, Config]:
        """The config of every setting that is compared, by its name in the table."""
        settings = [["--algorithm", name.strip()] for name in self.algorithms.split(",") if name.strip()]
        for text in self.setting:
            try:
                settings.append(shlex.split(text))
            except ValueError as error:
                raise Refused(f"--setting {text}: {error}") from None
        if self.jobs < 0:
            raise Refused(f"--jobs {self.jobs}: set the number of parallel runs, 1 or more, or 0 for one per core")
        if not settings:
            raise Refused('nothing to compare: set --algorithms reinforce,rloo,grpo, or --setting "…" twice')
        configs: dict[str, Config] = {}
        for flags in settings:
            name = " ".join(flags).removeprefix("--algorithm ").replace("--", "")
            if name in configs:
                raise Refused(f"{name!r} is given twice: each setting is compared once")
            configs[name], _ = parse_train([self.task, *self.rest, *flags], self.prog(), check_samples=False)
        return configs


def parse_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise Refused(f"--seeds {text}: give a number of seeds, or a list such as 3,5,8") from None
    if len(seeds) == 1 and "," not in text:
        seeds = list(range(seeds[0]))
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise Refused(f"--seeds {text}: seeds must be distinct and not negative, and there must be at least one")
    return seeds


def comparison_table(result: Mapping[str, Any], seeds: int) -> list[str]:
    """The table, in words that a person reads."""
    from ascent.workflows.compare import COSTS

    titles = {"exact/reward": "E[R]", "eval/reward": "held-out reward", "eval/accuracy": "exactly right"}
    shown = [m for m in titles if all(m in row for row in result.values())]
    shown = [m for m in shown if not (m == "eval/reward" and "exact/reward" in shown)]
    head = ["setting", *(title for m in shown for title in (titles[m], "to the first")), "silent groups", *COSTS]
    rows = []
    for name, row in result.items():
        cells = [name]
        for cell in (row[measure] for measure in shown):
            gap = _pair(cell["difference"], cell["difference_half"], sign=True) if "difference" in cell else "—"
            cells += [_pair(cell["mean"], cell["half"]), gap]
        cells.append(f"{row['frac_reward_zero_std']['mean']:.0%}" if "frac_reward_zero_std" in row else "—")
        rows.append([*cells, *(_cost(row[cost], row[f"{cost}_half"]) for cost in COSTS)])
    text = table(head, rows)
    if len(text[0]) > width():  # two tables below each other: measures, and costs
        cut = 1 + 2 * len(shown)
        text = [*table(head[:cut], [row[:cut] for row in rows]), ""]
        text += table([head[0], *head[cut:]], [[row[0], *row[cut:]] for row in rows])
    note = f"Means over {seeds} seeds ± half of the 95 % interval (Student's t); differences are paired by seed."
    return [*text, "", wrapped(note if seeds > 1 else "One seed: no interval. Use --seeds 5 or more.")]


def _cost(mean: float, half: float | None) -> str:
    """1,536, or 12.3 ± 0.4: what differs from seed to seed has an interval."""
    number = f"{mean:,.0f}" if mean == int(mean) else f"{mean:,.1f}"
    return f"{number} ± {half:,.1f}" if half else number


def _pair(mean: float, half: float | None, sign: bool = False) -> str:
    number = f"{mean:+.3f}" if sign else f"{mean:.3f}"
    return number if half is None else f"{number} ± {half:.3f}"


COMMANDS = {"train": (CompareCommand,)}
