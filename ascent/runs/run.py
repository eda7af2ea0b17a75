"""A run: written into its folder step by step, and read back from there."""

import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, contiguous_format

from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of
from ascent.core.protocols import Learner, PendingRollout, Task, UpdateResult
from ascent.core.types import Batch, Metrics, State, Streams
from ascent.inference.occupancy import Timeline
from ascent.models.causal_lm import KEPT_MODEL
from ascent.runs import checkpoint, rollout_files
from ascent.runs.alerts import alerts
from ascent.runs.alerts.metric_windows import Alert
from ascent.runs.batch_files import take_apart
from ascent.runs.display.notebook import Completions, Picture, run_html
from ascent.runs.display.plots import draw_runs
from ascent.runs.display.terminal import Display
from ascent.runs.held_out import Evaluate
from ascent.runs.journal import Journal
from ascent.runs.metrics import ALWAYS_WRITTEN
from ascent.runs.recorded_conversation import environment_failed
from ascent.runs.rollout_files import Pieces
from ascent.runs.run_folder import LINES, RunFolder, finite_line, is_locked, refuse_ways_out, vacated
from ascent.runs.trackers.trackers import Sinks
from ascent.runs.trust import DESCRIPTION, check_trust, code_hashes
from ascent.runs.untrusted_files import finite_number, naming, read_json, read_lines, read_metrics
from ascent.settings import config_from, name_given, row_label
from ascent.tasks.python_objects import about_objects, label_of, match_objects, renamed
from ascent.training.async_checkpoint import Saver, on_host
from ascent.training.sharded_checkpoint import PARTS

CLIPS = ("clip_ratio/low_mean", "clip_ratio/high_mean")
"""On every line of updates.jsonl where the loss clips."""
PATIENCE = 60.0
"""Seconds for which a run that failed waits for the checkpoint that is being written."""
FORMAT = 2
"""The format of config.json, checkpoints and the journal. A run of another format is neither loaded nor resumed."""
HEARTBEAT = 2.0
"""Seconds between two signs of life in run.json."""


class RunRecord:
    """A finished, running or dead run: `run.folder`, `run.metrics`, `run.policy`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.changed: dict[str, str] = {}
        """Objects of Python that it was made with, and those that were given in their place, by their names."""
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder}: there is no such folder")
        if (self.folder / "config.json").exists() and not (self.folder / "run.json").exists():
            raise ConfigError(
                f"{self.folder}: this run was killed before it began. Start it again: ascent train --config "
                f"{self.folder / 'config.json'} --out {self.folder}"
            )
        info = self.info
        kinds = {"status": str, "result": dict | None, "history": list}
        if not isinstance(info, dict) or not all(isinstance(info.get(k, 0), kind) for k, kind in kinds.items()):
            raise ConfigError(f"{self.folder / 'run.json'} is not a run's: it has no status, result and history")

    def __repr__(self) -> str:
        return f"RunRecord({str(self.folder)!r}, {self.status})"

    def _repr_html_(self) -> str:
        return run_html(self.folder, self.info | {"status": self.status}, self.metrics)

    def __fspath__(self) -> str:
        """A run stands for its folder: ascent.sample(run, …), ascent.resume(run)."""
        return str(self.folder)

    @property
    def info(self) -> dict[str, Any]:
        return read_json(self.folder / "run.json")

    @property
    def status(self) -> str:
        """finished, interrupted, failed, running, or died: left running by a process that is gone."""
        status = self.info["status"]
        return "died" if status == "running" and not is_locked(self.folder) else status

    @property
    def result(self) -> dict[str, Any] | None:
        return self.info["result"]

    @cached_property
    def config(self) -> Config:
        """Its settings, ready to load or to continue it; the code that they name is run. To look at it, use `info`."""
        if self.info.get("format") != FORMAT:
            raise ConfigError(
                f"{self.folder} was written by another version of Ascent (format {self.info.get('format', 'unknown')}; "
                f"this version reads {FORMAT}): it can be shown, and not loaded or resumed. Train it again"
            )
        settings = self._trusted_settings()
        with naming(self.folder / "config.json"):
            here = {KEPT_MODEL: str(self.folder.resolve() / "model")}
            return config_from(renamed(settings, self.changed | here))

    def _trusted_settings(self, trusted: bool = False) -> dict[str, Any]:
        """Its settings, refused unless they are plain data, known on this machine or trusted."""
        settings = read_settings(self.folder / "config.json", people=True)
        with naming(self.folder / "config.json"):
            check_trust(self.folder, settings, self.info.get("code"), trusted)
        return {key: value for key, value in settings.items() if key not in DESCRIPTION}

    def take_objects(self, objects: Mapping[str, Any], anyway: bool = False, needed: bool = True) -> None:
        """Find the objects of Python that it was made with among those given, or those of this process; or refuse.

        `needed=False`: of a run that does not go on, only those that are given are compared.
        """
        recorded, given = self.info.get("objects"), name_given(objects)
        recorded = recorded if isinstance(recorded, dict) else {}
        if not needed:
            recorded = {
                n: was for n, was in recorded.items() if isinstance(was, dict) and was.get("setting") in objects
            }
        self.changed = match_objects(recorded, given, anyway)

    @property
    def max_reward(self) -> float | None:
        """The largest reward of its task, as far as its records say."""
        return finite_number(self.info.get("max_reward", (self.result or {}).get("max_reward")))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per step."""
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def last(self) -> dict[str, Any]:
        """The last known value of every metric."""
        return {name: value for line in self.metrics for name, value in line.items() if value is not None}

    def frame(self) -> Any:
        """The metrics as a DataFrame of pandas, one row per step."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise ConfigError("run.frame() needs pandas: pip install pandas. Without it: run.metrics") from None
        return DataFrame(self.metrics).set_index("step")

    def plot(self) -> Picture:
        """The curves, as a picture that a notebook shows; `run.plot().save(path)` writes it."""
        title = f"{self.info['task']}, {self.info['label']}, seed {self.info['seed']}"
        return Picture(draw_runs([(self.folder.name, self.metrics, self.max_reward)], title))

    def completions(self, step: int | None = None) -> Completions:
        """The recorded responses of a step, one dictionary each; by default those of the last recorded step."""
        recorded = rollout_files.recorded_steps(self.folder)
        if step is None and not recorded:
            raise ConfigError(f"{self.folder}: no responses were recorded (--record-rollouts)")
        return Completions(self.rollouts(recorded[-1] if step is None else step))

    @property
    def updates(self) -> list[dict[str, Any]]:
        """One dictionary per optimizer update."""
        return read_metrics(self.folder / "updates.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "events.jsonl")

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """The recorded responses of a step, one dictionary each."""
        return rollout_files.read_rollouts(self.folder, step)

    def held_out(self, step: int) -> list[dict[str, Any]]:
        """The recorded greedy answers of the evaluation in a step, one dictionary each."""
        return rollout_files.read_rollouts(self.folder, step, rollout_files.HELD_OUT)

    @property
    def checkpoints(self) -> list[Path]:
        refuse_ways_out(self.folder, "checkpoints")
        return checkpoint.complete(self.folder / "checkpoints")

    def checkpoint(self, step: int | None = None, best: bool = False, flag: str = "--step") -> Path:
        """The newest checkpoint, that of a step, or that of the best evaluation; refused with what there is."""
        if step is not None and best:
            raise ConfigError(f"{flag} {step} and --best name two checkpoints: give one of them")
        there = {checkpoint.step_of(path): path for path in self.checkpoints}
        if not there:
            raise ConfigError(f"{self.folder}: no checkpoint yet, so there is no policy to load")
        wanted, why = f"{flag} {step}", ""
        if best:
            found = best_of(self.metrics)
            if found is None:
                raise ConfigError(f"--best: {self.folder} was never evaluated, so no checkpoint is its best")
            step, wanted = found[0], "--best"
            why = f": its best evaluation is that of step {step}, which was not kept (--keep-best does)"
        if step is None:
            return there[max(there)]
        if step not in there:
            listed = ", ".join(map(str, there))
            raise ConfigError(f"{wanted}: {self.folder} has no such checkpoint{why}. There are: {listed}")
        return there[step]


def trust(run: str | Path) -> None:
    """Let this process use all that the settings of a run name: code, programs, addresses, files. On the command line:
    --trust."""
    RunRecord(run)._trusted_settings(trusted=True)


def init_folder(init: str | Path) -> Path:
    """The folder with the params.safetensors that --init names: a run's newest checkpoint, or this very folder."""
    folder = Path(init)
    if (folder / "run.json").exists():
        if not RunRecord(folder).checkpoints:
            raise ConfigError(f"--init {init}: that run has no checkpoint yet")
        folder = RunRecord(folder).checkpoints[-1]
    if not (folder / "params.safetensors").exists() and not any(folder.glob(PARTS)):
        raise ConfigError(f"--init {init}: neither a run nor a folder with params.safetensors")
    return folder.resolve()


def check_trains_policy(config: Config, folder: Path) -> None:
    """Refuse a run that trained a reward model or a process reward."""
    trains = config.algorithm.loss.trains
    if trains != "policy":
        what, kind = ("process reward", "process") if trains == "steps" else ("reward model", "model")
        raise ConfigError(
            f"{folder} trained a {what} and not a policy: it rates responses and writes none. Its figures: ascent show "
            f"{folder}; as a reward: --reward {kind}:{folder}; in Python: ascent.build.reward_loading.load_"
            f"{what.replace(' ', '_')}"
        )


def read_settings(path: Path, people: bool = False) -> dict[str, Any]:
    """A config.json as it stands, without what is there only for people, unless told."""
    settings = read_json(path)
    if not isinstance(settings, dict) or "task" not in settings:
        raise ConfigError(f"{path} is not a config: it has to be an object with a `task`, as a run's config.json is")
    return {key: value for key, value in settings.items() if people or key not in DESCRIPTION}


def task_name(config: Config) -> str:
    """sort, reasoning-gym:chain_sum, jsonl:problems."""
    source = getattr(config.task, "source", "")
    name = name_of(config.task)
    name = Path(name.split(":")[1]).stem if name.startswith("python:") else name
    name = label_of(name) if name.startswith("object:") else name
    if source.startswith("object:"):
        return name
    return f"{name}:{Path(source).stem if '/' in source else source}" if source else name


def run_label(config: Config) -> str:
    """The nearest row, and what was changed on it; demonstrations are SFT whatever the row."""
    return "sft" if config.task.data == "demonstrations" else row_label(config.algorithm)


@cache
def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def about(config: Config, packages: Sequence[str]) -> dict[str, Any]:
    """What run.json says of where and with what the run was made."""
    packages = ["ascent-rl", "torch", "numpy", "safetensors", "pyarrow", *packages]
    return {
        "format": FORMAT,
        "task": task_name(config),
        "label": run_label(config),
        "seed": config.seed,
        "step": 0,
        "steps": config.steps,
        "data": config.data,
        "max_reward": config.task.max_reward,
        "code": code_hashes(config.to_dict()),
        "objects": about_objects(config.to_dict()),
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in packages}},
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "threads": config.threads,
            "host": platform.node(),
        },
    }


def default_folder(config: Config) -> Path:
    """runs/<date>-<task>-<algorithm>-s<seed>, numbered where that is taken."""
    task, label = re.sub(r"[^A-Za-z0-9_.-]+", "-", task_name(config)), run_label(config)
    row = label.split("+")[0] if not label.startswith("reinforce++") else "reinforce++"
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{task}-{row}-s{config.seed}"
    paths = (Path("runs") / (base if n == 1 else f"{base}-{n}") for n in count(1))
    return next(path for path in paths if not path.exists())


class Writer:
    """The records of one run: lines flushed every step, rollouts, checkpoints."""

    def __init__(self, folder: RunFolder, config: Config, task: Task, display: Display):
        self.folder, self.config, self.task, self.display = folder, config, task, display
        self.sinks: Sinks | None = None
        self.journal: Journal | None = None
        self.timeline: Timeline | None = None
        """Where the sampler notes how many responses it decodes at once."""
        self.pieces = Pieces(task)
        self.files = {name: open(folder.path / name, "a") for name in LINES}  # noqa: SIM115 (open as long as the run)
        self.flagged = {str(event["name"]) for event in read_lines(folder.path / "events.jsonl") if "name" in event}
        lines = read_metrics(folder.path / "metrics.jsonl")
        self.watch = (
            alerts.RunAlerts(task.max_reward, alerts.reward_weights(task)) if config.data == "samples" else None
        )
        if self.watch is not None:
            for line in lines:
                self.watch.see(line)
        self.stop = False
        self.best_step, self._fresh_best = best_of(lines), False
        self.last: dict[str, Any] = {}
        """The last known value of every metric."""
        self.newest: tuple[dict[str, Any], Batch] | None = None
        """The metrics and the batch of the last step."""
        self.saver = Saver()
        self._answers: tuple[Task, Batch] | None = None
        self._beat = time.monotonic()

    def held_out(self, task: Task, answers: Batch) -> None:
        """Keep greedy answers to held-out prompts, to be written with the step whose line has their metrics."""
        if self.config.record_rollouts != "none":
            self._answers = task, answers

    def journalled(self, evaluate: Evaluate) -> Evaluate:
        """This evaluation; where there is a journal, it is written there and read from there."""
        journal = self.journal
        if journal is None:
            return evaluate
        made = lambda: None if self._answers is None else self._answers[1]  # noqa: E731
        return lambda: journal.evaluation(evaluate, made, lambda answers: self.held_out(self.task, answers))

    def step(self, step: int, metrics: Metrics, batch: Batch, minis: list[Batch], updates: list[UpdateResult]) -> None:
        self.saver.poll()
        for i, update in enumerate(updates):
            report = update.report
            names = ("loss", "grad_norm", *(CLIPS if CLIPS[0] in report else ()))
            self._line("updates.jsonl", {"step": step, "update": i} | {name: report[name] for name in names})
        loss = metrics.pop("loss", None)
        line: dict[str, Any] = dict.fromkeys(ALWAYS_WRITTEN) | metrics
        line |= self._tail(step) | {"step": step, "loss": loss}
        self._line("metrics.jsonl", line)
        if self.sinks is not None:
            self.sinks.step(step, line)
        self._fresh_best = False
        if self.config.keep_best and (now := quality(line)) is not None:
            self._fresh_best = self.best_step is None or now > self.best_step[1]
            self.best_step = (step + 1, now) if self._fresh_best else self.best_step
        for flag in self._flags(step, line, batch):
            if flag.name not in self.flagged:
                self.flagged.add(flag.name)
                newest = step if self._recorded(step) else step - step % self.config.record_every
                recorded = None if self.config.record_rollouts == "none" else newest
                self._line("events.jsonl", flag.event(step, recorded))
                self.display.say(f"step {step}: {flag.text}")
        path, most = self.folder.path, self.config.record_rollouts
        if self._recorded(step):
            rollout_files.write_rollouts(path, step, batch, minis, updates, most, self.pieces)
        if self._answers is not None:
            (task, answers), self._answers = self._answers, None
            rollout_files.write_answers(path, step, answers, most, self.pieces if task is self.task else Pieces(task))
        for file in self.files.values():
            file.flush()
        self.last = self.last | {k: v for k, v in line.items() if v is not None}
        self.newest = line, batch
        self.display.step(step, self.last)
        self.display.responses(lambda groups: rollout_files.sampled_rows(step, batch, groups, self.pieces))
        if time.monotonic() - self._beat > HEARTBEAT:
            self._beat = time.monotonic()
            self.folder.run["step"] = step + 1
            self.folder.save()

    def _tail(self, step: int) -> Metrics:
        """Write how many responses were decoded at once, over the time of the step; its tail is a metric."""
        seen = Timeline() if self.timeline is None else self.timeline.take()
        if not seen.spans:
            return {}
        times = {"time/seconds": seen.seconds, "time/tail": seen.tail, "time/running": seen.running()}
        self._line("lanes.jsonl", {"step": step, "lanes": seen.lanes, **times})
        return {"time/tail": seen.tail}

    def best(self) -> bool:
        return self._fresh_best

    def _flags(self, step: int, line: dict[str, Any], batch: Batch) -> list[Alert]:
        """The flags of this step, with their evidence."""
        first = self.watch.first if self.watch is not None else {}
        warnings = alerts.metric_warnings(line, self.task)
        worlds = [error for error in batch.errors if environment_failed(error)]
        for name, what, errors in (
            ("environment-errors", "environment", worlds),
            ("reward-errors", "reward", [error for error in batch.errors if error not in worlds]),
        ):
            if errors:
                text = (
                    f"the {what} failed on {len(errors)} of {line['num_responses']} responses, which are left out of "
                    f"credit and means; above a share of {self.config.max_reward_errors:g} the run stops "
                    f"(--max-reward-errors). The first: {errors[0]}"
                )
                warnings.append((name, text))
        flags = [alerts.with_evidence(name, text, line, first) for name, text in warnings]
        if self.watch is None:
            return flags
        flags += self.watch.see(line)
        if self._due(step) and "one-answer" not in self.flagged:
            given = alerts.batch_responses(batch)
            flags += alerts.one_answer(step, given, lambda tokens: self.task.text(list(tokens)))
        return flags

    def _recorded(self, step: int) -> bool:
        which = self.config.record_rollouts
        return which == "all" or (which != "none" and self._due(step))

    def _due(self, step: int) -> bool:
        return step % self.config.record_every == 0 or step + 1 == self.config.steps

    def _line(self, name: str, values: dict[str, Any]) -> None:
        self.files[name].write(json.dumps(finite_line(values)) + "\n")

    def checkpoint(
        self, step: int, learner: Learner, streams: Streams, state: State, ahead: tuple[PendingRollout, ...]
    ) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self.files.items()}
        self.saver.wait()
        folder = self.folder.path / "checkpoints"
        parts = learner.stage_parts(checkpoint.aside_of(checkpoint.step_folder(folder, step)))
        groups = {**(learner.state() if parts is None else {}), "rng": streams.state()}
        saved = {"step": step, "state": state, "records": sizes}
        if ahead:
            groups["ahead"], saved["ahead"] = take_apart(ahead)
        best = self.best_step[0] if self.best_step is not None and self.config.keep_best else None
        groups, apart = on_host(groups)
        saved = json.loads(json.dumps(saved))  # as the rest: what it is now
        save = partial(checkpoint.save, folder, step, groups, saved, self.config.keep, best, parts)
        self.saver.begin(save, partial(self._saved, step, best))
        if not apart:
            self.saver.wait()

    def _saved(self, step: int, best: int | None) -> None:
        """What a checkpoint makes superfluous, once it is complete."""
        self.folder.run["best"] = best
        if self.journal is not None:
            self.journal.keep(step)
        if not self._needs_start():
            checkpoint.drop_start(self.folder.path / "checkpoints")

    def settle(self) -> None:
        """Wait for the checkpoint that is being written."""
        self.saver.wait()

    def keep_start(self, source: Path) -> None:
        """Hold what the run starts from, as long as a resume needs it: the source may vanish."""
        if self._needs_start():
            checkpoint.keep_start(source, self.folder.path / "checkpoints")

    def _needs_start(self) -> bool:
        """Before the first checkpoint; afterwards for the reference, if a checkpoint does not hold it."""
        saved = checkpoint.complete(self.folder.path / "checkpoints")
        held = all((path / "reference.safetensors").exists() or any(path.glob(PARTS)) for path in saved)
        return not saved or (self.config.algorithm.reference.kept and not held)

    def dump(self, step: int, batch: Batch) -> str:
        path: Path = self.folder.path / f"trouble_step_{step:06d}.safetensors"
        own = {k: v.clone(memory_format=contiguous_format) for k, v in vars(batch).items() if isinstance(v, Tensor)}
        save_file(own, vacated(path))
        if self.journal is not None:  # a resume draws it anew
            self.journal.keep(0, step)
        return str(path)

    def trouble(self, text: str) -> None:
        self._event("trouble", text)

    def say(self, text: str) -> None:
        """Write a note to the display and to events.jsonl."""
        self.display.say(text)
        self._event("note", text)

    def _event(self, kind: str, text: str) -> None:
        with suppress(OSError):
            self._line("events.jsonl", {"step": self.last.get("step", -1) + 1, "event": kind, "text": text})

    def stopping(self) -> bool:
        return self.stop

    def close(self) -> None:
        with suppress(Exception):  # a run that failed has its reason; what was complete stays
            self.saver.wait(PATIENCE)
        for file in self.files.values():
            with suppress(OSError):  # a full disk has been reported by now
                file.close()


def quality(line: dict[str, Any]) -> tuple[float, float] | None:
    """The quality of an evaluation: held-out accuracy, then reward; without them log-prob or log-loss."""
    if line.get("eval/logp") is not None:
        return line["eval/logp"], 0.0
    if line.get("eval/accuracy") is None and line.get("eval/reward") is not None:  # nobody can say what is right
        return line["eval/reward"], 0.0
    if line.get("eval/accuracy") is None:
        loss = line.get("eval/pairs/log_loss", line.get("eval/steps/error"))
        return None if loss is None else (-loss, 0.0)
    return line["eval/accuracy"], line.get("eval/reward") or 0.0


def best_of(lines: list[dict[str, Any]]) -> tuple[int, tuple[float, float]] | None:
    """The step after which the best evaluation was made, and its quality; the first among equals."""
    evaluated = [(line["step"] + 1, now) for line in lines if (now := quality(line)) is not None]
    return max(evaluated, key=lambda pair: (pair[1], -pair[0]), default=None)
