"""Train several settings under several seeds in parallel processes and compare them, paired by seed."""

import itertools
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ascent.api import interruptible, resume, start, trust_settings
from ascent.build.backends import backend_of
from ascent.build.trained_run import Run
from ascent.core.config import Config
from ascent.core.errors import ConfigError, RunError
from ascent.core.menu import name_of
from ascent.runs.confidence_intervals import compare_over_seeds, finite_or_none, mean_and_half_width
from ascent.runs.display.terminal import Display, progress
from ascent.settings import config_from


def run_all(configs: Mapping[str, Config], seeds: list[int], out: Path, jobs: int) -> dict[str, list[Run]]:
    """Train every setting under every seed, `jobs` runs at a time with one thread each; skip finished runs."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot write there ({error.strerror})") from None
    configs = backend_of(next(iter(configs.values()))).align_precision(configs)
    slugs = {name: "-".join(re.sub(r"[^\w.+-]|_", " ", name).split()) for name in configs}
    folders = {(name, seed): out / f"{slugs[name]}-s{seed}" for seed in seeds for name in configs}
    workers = ProcessPoolExecutor(jobs, get_context("spawn"), end_with_parent)
    with progress(len(folders), "runs") as advance, workers as pool:
        # Workers ignore Ctrl-C except during a run, which then saves and stops. They ignore a closed terminal.
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
        waiting = [
            pool.submit(run_one, replace(configs[name], seed=seed, threads=1).to_dict(), str(folder))
            for (name, seed), folder in folders.items()
        ]
        for number, handler in before.items():
            signal.signal(number, handler)
        try:
            for future in as_completed(waiting):
                future.result()
                advance(1)
        except BaseException as error:
            for worker in active_children() if isinstance(error, KeyboardInterrupt) and error.args else ():
                worker.terminate()  # Ctrl-C has already reached them
            ended = isinstance(error, KeyboardInterrupt | BrokenProcessPool)
            pool.shutdown(wait=ended, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise RunError(
                    f"a worker was killed (out of memory?). To resume, repeat the command with --out {out}"
                ) from None
            if isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt(
                    f"finished runs are kept. To resume, repeat the command with --out {out}"
                ) from None
            raise
    for (name, _), folder in folders.items():
        trust_settings(folder, configs[name])
    return {name: [Run(folders[name, seed]) for seed in seeds] for name in configs}


STOPPED = threading.Event()
"""Set in a worker that must stop, so that queued calls start no run."""


def end_with_parent() -> None:
    """Exit this worker when its parent process dies, and start no further run after SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: STOPPED.set())
    parent = parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_one(settings: dict[str, Any], folder: str) -> None:
    """Start or resume one run in this worker; do nothing if it is finished."""
    try:
        if STOPPED.is_set():
            raise KeyboardInterrupt
        with interruptible(SimpleNamespace(stop=True)):
            config = config_from(settings)
            if not (Path(folder) / "run.json").exists():
                run = start(config, folder, Display())
            else:
                trust_settings(Path(folder), config)
                if not _is_run_of(config, Run(folder).config):
                    raise ConfigError(f"{folder} has a run with other settings: choose another --out")
                run = resume(folder, Display())
        if run.status != "finished":
            raise KeyboardInterrupt(f"{folder} is saved")
    except KeyboardInterrupt:
        STOPPED.set()
        raise


def _is_run_of(requested: Config, run: Config) -> bool:
    """Whether a run has the requested settings, except those that it has resolved (init, steps, old_logp, dtype)."""
    init = None if run.init is None or requested.init is None else Path(run.init)
    if init is not None and Path(requested.init or "").resolve() in (init, *init.parents):
        requested = replace(requested, init=run.init)
    if run.data_epochs is not None:
        requested = replace(requested, steps=run.steps)
    if requested.old_logp == "auto":
        requested = replace(requested, old_logp=run.old_logp)
    if getattr(requested.policy, "dtype", None) == "auto":
        requested = replace(requested, policy=replace(requested.policy, dtype=getattr(run.policy, "dtype", "auto")))
    return run.to_dict() == requested.to_dict()


COSTS = ("responses", "labels", "updates", "seconds")
MEASURES = ("exact/reward", "eval/reward", "eval/accuracy", "frac_reward_zero_std")
"""The last one only for runs that sample groups."""


def summarize_runs(runs: Mapping[str, list[Run]]) -> dict[str, Any]:
    """Return mean, half-width of the 95 % interval and paired difference to the first setting, for every measure."""
    finals = {name: [_final(run) for run in group] for name, group in runs.items()}
    measures = {name: MEASURES if group[0].config.data == "samples" else MEASURES[:-1] for name, group in runs.items()}
    rows = compare_over_seeds({name: dict(enumerate(group)) for name, group in finals.items()}, measures)
    for name, group in finals.items():
        for cost in COSTS:
            rows[name][cost], half = mean_and_half_width([float(final[cost]) for final in group])
            rows[name][f"{cost}_half"] = finite_or_none(half)
    return rows


def _final(run: Run) -> dict[str, Any]:
    """Return the last value of every metric and the total costs; a label is a reward, a demonstration or a pair."""
    costs = {name: values[-1] for name, values in costs_by_step(run, "labels").items()}
    return run.last | costs | {"responses": costs["labels"] if run.config.data == "samples" else 0}


def draw_comparison(runs: Mapping[str, list[Run]], path: Path, seeds: int) -> Path:
    from ascent.runs.display.plots import plot_bands, series

    read = {name: [run.metrics for run in group] for name, group in runs.items()}
    exact = all(lines[-1].get("exact/reward") is not None for group in read.values() for lines in group)
    sampled = all(run.config.data == "samples" for group in runs.values() for run in group)
    first = "exact/reward" if exact else "reward" if sampled else "eval/reward"
    metrics = (first, "eval/accuracy", "entropy", "frac_reward_zero_std")
    curves = {name: {m: [series(lines, m) for lines in group] for m in metrics} for name, group in read.items()}
    for name, group in runs.items():  # offline data have no groups
        if group[0].config.data != "samples":
            curves[name]["frac_reward_zero_std"] = [series([], "frac_reward_zero_std")]
    labels = "samples" if sampled else "labels"
    costs = {name: [costs_by_step(run, labels) for run in group] for name, group in runs.items()}
    title = f"{name_of(next(iter(runs.values()))[0].config.task)}, {seeds} seeds, 95 % intervals"
    return plot_bands(curves, path, title, costs)


def costs_by_step(run: Run, labels: str) -> dict[str, list[Any]]:
    """Return the cumulative costs after each step: labels (rewards, demonstrations, pairs), updates and seconds."""
    metrics, responses_per_label = run.metrics, 2 if run.config.data == "pairs" else 1
    updates = Counter(update["step"] for update in run.updates)
    costs = {
        labels: [line["num_responses"] // responses_per_label for line in metrics],
        "updates": [updates[line["step"]] for line in metrics],
        "seconds": [line["time/step"] for line in metrics],
    }
    return {name: list(itertools.accumulate(values)) for name, values in costs.items()}
