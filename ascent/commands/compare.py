"""`ascent compare`: several settings over several seeds on all cores, paired by seed.

Every run is an ordinary run in a folder of its own; a comparison that was stopped goes on where it was.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import tyro

from ascent.commands.flags import COMPARE, parse_train
from ascent.config import Config
from ascent.diagnose.seeds import known, over_seeds
from ascent.diagnose.statistics import interval
from ascent.menu import name_of
from ascent.records import Run
from ascent.records.folder import write_json
from ascent.settings import configure, flatten
from ascent.types import Refused


@dataclass
class Options:
    algorithms: str = ""
    """Named rows, with commas between them."""
    setting: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Flags of `ascent train` as one word; may be given again: --setting "--algorithm grpo --loss.high 0.28"."""
    seeds: str = "5"
    """How many seeds (0, 1, …), or which, with commas between them: 3,5,8."""
    out: Path | None = None
    """Folder of the comparison. Default: runs/<date>-compare-<task>."""
    jobs: int = 0
    """Runs at a time; 0: one a core."""


ABOUT = (
    "Several algorithms or settings over several seeds, in one table and one picture.\n\n"
    "Every other flag of `ascent train TASK` applies to all of them."
)


def command(args: list[str]) -> int:
    """Parse, run, print the table, draw the picture."""
    named = bool(args) and not args[0].startswith("-")
    parsed, rest = tyro.cli(
        Options, prog="ascent compare TASK", args=_joined(args[named:]), return_unknown_args=True, description=ABOUT
    )
    if not named:
        raise Refused("which TASK? It comes first: ascent compare lecture --algorithms reinforce,rloo,grpo")
    task, seeds = args[0], parse_seeds(parsed.seeds)
    settings = [["--algorithm", name.strip()] for name in parsed.algorithms.split(",") if name.strip()]
    settings += [_split(text) for text in parsed.setting]
    if parsed.jobs < 0:
        raise Refused(f"--jobs {parsed.jobs}: runs at a time are 1 or more, or 0 for one a core")
    if not settings:
        raise Refused('nothing to compare: name --algorithms reinforce,rloo,grpo, or give --setting "…" twice')
    configs: dict[str, Config] = {}
    for flags in settings:
        config, _ = parse_train([task, *rest, *flags], COMPARE)
        name = " ".join(flags).removeprefix("--algorithm ").replace("--", "")
        if name in configs:
            raise Refused(f"{name!r} is given twice: each setting is compared once")
        configs[name] = config
    out = parsed.out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-compare-{task}"
    runs = run_all(configs, seeds, out, parsed.jobs or os.cpu_count() or 1)
    result = summarize(runs)
    print("\n".join(lines(result, len(seeds))))
    write_json(out / "compare.json", result)
    print(f"\nCurves: {draw(runs, out / 'compare.png', len(seeds))}\nNumbers: {out / 'compare.json'}")
    return 0


def _joined(args: list[str]) -> list[str]:
    """--setting "--lr 1" as --setting="--lr 1": alone, a word that begins with dashes would be taken for a flag."""
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1] == "--setting":
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Refused(f"--setting {text}: {error}") from None


def parse_seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise Refused(f"--seeds {text}: a number of seeds, or a list such as 3,5,8") from None
    if len(seeds) == 1 and "," not in text:
        seeds = list(range(seeds[0]))
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise Refused(f"--seeds {text}: at least one, none twice, none below 0")
    return seeds


def run_all(configs: Mapping[str, Config], seeds: list[int], out: Path, jobs: int) -> dict[str, list[Run]]:
    """Every setting under every seed, `jobs` at a time on one thread each; seed by seed, so that pairs end together."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"--out {out}: cannot write there ({error.strerror})") from None
    folders = {(name, seed): out / f"{_slug(name)}-s{seed}" for seed in seeds for name in configs}
    with (
        Progress(
            *Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)
        ) as bar,
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
    ):
        task = bar.add_task("runs", total=len(folders))
        # Workers start deaf to Ctrl-C, and hear it only inside a run, which then saves and ends.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        waiting = []
        for (name, seed), folder in folders.items():
            config = replace(configs[name], seed=seed, threads=1)
            waiting.append(pool.submit(run_one, config.to_dict(), str(folder)))
        signal.signal(signal.SIGINT, before)
        try:
            for future in as_completed(waiting):
                future.result()
                bar.advance(task)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(f"what has run is kept. Go on with the same command and --out {out}") from None
            raise
    return {name: [Run(folders[name, seed]) for seed in seeds] for name in configs}


def run_one(settings: dict[str, Any], folder: str) -> None:
    """One run in a process of its own: started, gone on with, or left alone if it is finished."""
    from ascent.api import resume, start
    from ascent.records.display import Display

    flat = flatten(settings)
    config = configure(flat.pop("task"), flat)
    if (Path(folder) / "run.json").exists():
        run = Run(folder)
        if run.config.to_dict() != config.to_dict():
            raise Refused(f"{folder} holds a run of other settings; choose another --out")
        if run.status != "finished":
            resume(folder, Display())
    else:
        start(config, folder, Display())


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() or c in ".+-" else " " for c in name).split())


COSTS = ("responses", "labels", "updates", "seconds")
MEASURES = ("exact/reward", "eval/reward", "eval/accuracy", "frac_reward_zero_std")
"""The last one only where groups are sampled."""


def summarize(runs: Mapping[str, list[Run]]) -> dict[str, Any]:
    """For each setting and measure: mean, half-width of its 95 % interval, paired difference to the first."""
    finals = {name: [_final(run) for run in group] for name, group in runs.items()}
    measures = {
        name: MEASURES if group[0].config.algorithm.loss.data == "samples" else MEASURES[:-1]
        for name, group in runs.items()
    }
    rows = over_seeds({name: dict(enumerate(group)) for name, group in finals.items()}, measures)
    for name, group in finals.items():
        for cost in COSTS:
            rows[name][cost], half = interval([float(final[cost]) for final in group])
            rows[name][f"{cost}_half"] = known(half)
    return rows


def _final(run: Run) -> dict[str, Any]:
    """The last value of every metric, and what the run has cost; a label is a reward, a demonstration or a pair."""
    metrics = run.metrics
    last = {k: v for line in metrics for k, v in line.items() if v is not None}
    responses = sum(line["num_responses"] for line in metrics)
    costs = {
        "responses": responses if run.config.algorithm.loss.data == "samples" else 0,
        "labels": responses // (2 if run.config.algorithm.loss.data == "pairs" else 1),
        "updates": len(run.updates),
        "seconds": sum(line["time/step"] for line in metrics),
    }
    return last | costs


def lines(result: Mapping[str, Any], seeds: int) -> list[str]:
    """The table, in words that a person reads."""
    from ascent.layout import table, width, wrapped

    titles = {"exact/reward": "E[R]", "eval/reward": "held-out reward", "eval/accuracy": "exactly right"}
    shown = [m for m in titles if all(m in row for row in result.values())]
    shown = [m for m in shown if not (m == "eval/reward" and "exact/reward" in shown)]
    names, measures = [["setting"]], [[t for m in shown for t in (titles[m], "to the first")]]
    costs = [["silent groups", *COSTS]]
    for name, row in result.items():
        cells = []
        for measure in shown:
            cell = row[measure]
            gap = _pair(cell["difference"], cell["difference_half"], sign=True) if "difference" in cell else "—"
            cells += [_pair(cell["mean"], cell["half"]), gap]
        names.append([name])
        measures.append(cells)
        costs.append([f"{row['frac_reward_zero_std']['mean']:.0%}" if "frac_reward_zero_std" in row else "—"])
        costs[-1] += [_cost(row[c], row[f"{c}_half"]) for c in COSTS]
    head, *rows = [n + m + c for n, m, c in zip(names, measures, costs, strict=True)]
    text = table(head, rows)
    if len(text[0]) > width():
        parts = [[n + x for n, x in zip(names, part, strict=True)] for part in (measures, costs)]
        text = [*table(parts[0][0], parts[0][1:]), "", *table(parts[1][0], parts[1][1:])]
    note = f"Means over {seeds} seeds ± half of the 95 % interval (Student's t); differences are paired by seed."
    return [*text, "", wrapped(note if seeds > 1 else "One seed: no interval. Use --seeds 5 or more.")]


def _cost(mean: float, half: float | None) -> str:
    """1,536, or 12.3 ± 0.4: what differs from seed to seed has an interval."""
    number = f"{mean:,.0f}" if mean == int(mean) else f"{mean:,.1f}"
    return f"{number} ± {half:,.1f}" if half else number


def _pair(mean: float, half: float | None, sign: bool = False) -> str:
    number = f"{mean:+.3f}" if sign else f"{mean:.3f}"
    return number if half is None else f"{number} ± {half:.3f}"


def draw(runs: Mapping[str, list[Run]], path: Path, seeds: int) -> Path:
    from ascent.records.plot import plot_bands, series

    read = {name: [run.metrics for run in group] for name, group in runs.items()}
    exact = all(m[-1].get("exact/reward") is not None for group in read.values() for m in group)
    sampled = all(run.config.algorithm.loss.data == "samples" for group in runs.values() for run in group)
    first = "exact/reward" if exact else "reward" if sampled else "eval/reward"
    names = [first, "eval/accuracy", "entropy", "frac_reward_zero_std"]
    curves = {name: {n: [series(m, n) for m in group] for n in names} for name, group in read.items()}
    for name, group in runs.items():  # what is shown is no group
        if group[0].config.algorithm.loss.data != "samples":
            curves[name]["frac_reward_zero_std"] = [series([], "frac_reward_zero_std")]
    spent = {name: [_spent(run, "samples" if sampled else "labels") for run in group] for name, group in runs.items()}
    title = f"{name_of(next(iter(runs.values()))[0].config.task)}, {seeds} seeds, 95 % intervals"
    return plot_bands(curves, path, title, spent)


def _spent(run: Run, labels: str) -> dict[str, list[Any]]:
    """What a run had cost after each of its steps: labels (rewards, demonstrations, pairs), updates and seconds."""
    data = run.config.algorithm.loss.data
    per_step = Counter(update["step"] for update in run.updates)
    costs = {
        labels: [line["num_responses"] // (2 if data == "pairs" else 1) for line in run.metrics],
        "updates": [per_step[line["step"]] for line in run.metrics],
        "seconds": [line["time/step"] for line in run.metrics],
    }
    return {name: list(itertools.accumulate(values)) for name, values in costs.items()}


__all__ = ["command", "interval", "run_all", "summarize"]
