"""Several settings over several seeds on all cores, paired by seed.

Every run is an ordinary run in a folder of its own. A comparison that was stopped resumes where it was.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ascent.api import resume, start
from ascent.core.config import Config
from ascent.core.menu import name_of
from ascent.core.types import Refused
from ascent.records import Run
from ascent.records.display import Display
from ascent.records.seeds import known, over_seeds
from ascent.records.statistics import interval
from ascent.settings import configure, flatten


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
        # Workers ignore Ctrl-C except inside a run, which then saves and ends.
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
                raise KeyboardInterrupt(f"what has run is kept. To resume, repeat it with --out {out}") from None
            raise
    return {name: [Run(folders[name, seed]) for seed in seeds] for name in configs}


def run_one(settings: dict[str, Any], folder: str) -> None:
    """One run in a process of its own: started, resumed, or left alone if it is finished."""
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


def summarize_runs(runs: Mapping[str, list[Run]]) -> dict[str, Any]:
    """For each setting and measure: mean, half-width of its 95 % interval, paired difference to the first."""
    finals = {name: [_final(run) for run in group] for name, group in runs.items()}
    measures = {name: MEASURES if group[0].config.data == "samples" else MEASURES[:-1] for name, group in runs.items()}
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
        "responses": responses if run.config.data == "samples" else 0,
        "labels": responses // (2 if run.config.data == "pairs" else 1),
        "updates": len(run.updates),
        "seconds": sum(line["time/step"] for line in metrics),
    }
    return last | costs


def draw_comparison(runs: Mapping[str, list[Run]], path: Path, seeds: int) -> Path:
    from ascent.records.plot import plot_bands, series

    read = {name: [run.metrics for run in group] for name, group in runs.items()}
    exact = all(m[-1].get("exact/reward") is not None for group in read.values() for m in group)
    sampled = all(run.config.data == "samples" for group in runs.values() for run in group)
    first = "exact/reward" if exact else "reward" if sampled else "eval/reward"
    metrics = [first, "eval/accuracy", "entropy", "frac_reward_zero_std"]
    curves = {name: {n: [series(m, n) for m in group] for n in metrics} for name, group in read.items()}
    for name, group in runs.items():  # offline data have no groups
        if group[0].config.data != "samples":
            curves[name]["frac_reward_zero_std"] = [series([], "frac_reward_zero_std")]
    costs = {
        name: [costs_by_step(run, "samples" if sampled else "labels") for run in group] for name, group in runs.items()
    }
    title = f"{name_of(next(iter(runs.values()))[0].config.task)}, {seeds} seeds, 95 % intervals"
    return plot_bands(curves, path, title, costs)


def costs_by_step(run: Run, labels: str) -> dict[str, list[Any]]:
    """What a run had cost after each of its steps: labels (rewards, demonstrations, pairs), updates and seconds."""
    data = run.config.data
    per_step = Counter(update["step"] for update in run.updates)
    costs = {
        labels: [line["num_responses"] // (2 if data == "pairs" else 1) for line in run.metrics],
        "updates": [per_step[line["step"]] for line in run.metrics],
        "seconds": [line["time/step"] for line in run.metrics],
    }
    return {name: list(itertools.accumulate(values)) for name, values in costs.items()}
