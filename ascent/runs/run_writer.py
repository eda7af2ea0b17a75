"""Write a run's folder step by step: metrics, updates, alerts, rollouts and checkpoints."""

import json
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, contiguous_format

from ascent.core.config import Config
from ascent.core.protocols import Learner, PendingRollout, Task, UpdateResult
from ascent.core.types import Batch, Metrics, State, Streams
from ascent.inference.occupancy import OccupancyTimeline
from ascent.runs import checkpoint, rollout_files
from ascent.runs.alerts import step_alerts
from ascent.runs.alerts.metric_windows import Alert
from ascent.runs.alerts.trend_alerts import RunAlerts
from ascent.runs.batch_files import take_apart
from ascent.runs.display.terminal import Display
from ascent.runs.held_out import Evaluate
from ascent.runs.journal import Journal
from ascent.runs.metrics import ALWAYS_WRITTEN, best_evaluation, evaluation_score
from ascent.runs.recorded_conversation import environment_failed
from ascent.runs.rollout_files import Pieces
from ascent.runs.run_folder import JSONL_FILES, RunFolder, mark_nonfinite, unlinked
from ascent.runs.trackers.tracker_threads import Trackers
from ascent.runs.untrusted_files import read_lines, read_metrics
from ascent.training.async_checkpoint import BackgroundWriter, copy_to_host
from ascent.training.sharded_checkpoint import SHARD_FILES

CLIPS = ("clip_ratio/low_mean", "clip_ratio/high_mean")
"""On every line of updates.jsonl where the loss clips."""


PATIENCE = 60.0
"""Seconds for which a run that failed waits for the checkpoint that is being written."""


HEARTBEAT = 2.0
"""Seconds between two signs of life in run.json."""


class RunWriter:
    """The records of one run: lines flushed every step, rollouts, checkpoints."""

    def __init__(self, folder: RunFolder, config: Config, task: Task, display: Display):
        self.folder, self.config, self.task, self.display = folder, config, task, display
        self.trackers: Trackers | None = None
        self.journal: Journal | None = None
        self.timeline: OccupancyTimeline | None = None
        """Where the sampler notes how many responses it decodes at once."""
        self.pieces = Pieces(task)
        self.files = {name: open(folder.path / name, "a") for name in JSONL_FILES}  # noqa: SIM115 (open as long as the run)
        self.alerted = {str(event["name"]) for event in read_lines(folder.path / "events.jsonl") if "name" in event}
        lines = read_metrics(folder.path / "metrics.jsonl")
        self.watch = RunAlerts(task.max_reward, step_alerts.reward_weights(task)) if config.data == "samples" else None
        if self.watch is not None:
            for line in lines:
                self.watch.see(line)
        self.stop = False
        self.best_step, self._fresh_best = best_evaluation(lines), False
        self.last: dict[str, Any] = {}
        """The last known value of every metric."""
        self.newest: tuple[dict[str, Any], Batch] | None = None
        """The metrics and the batch of the last step."""
        self.saver = BackgroundWriter()
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
        if self.trackers is not None:
            self.trackers.step(step, line)
        self._fresh_best = False
        if self.config.keep_best and (now := evaluation_score(line)) is not None:
            self._fresh_best = self.best_step is None or now > self.best_step[1]
            self.best_step = (step + 1, now) if self._fresh_best else self.best_step
        for alert in self._alerts(step, line, batch):
            if alert.name not in self.alerted:
                self.alerted.add(alert.name)
                newest = step if self._recorded(step) else step - step % self.config.record_every
                recorded = None if self.config.record_rollouts == "none" else newest
                self._line("events.jsonl", alert.event(step, recorded))
                self.display.say(f"step {step}: {alert.text}")
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
        seen = OccupancyTimeline() if self.timeline is None else self.timeline.drain()
        if not seen.spans:
            return {}
        times = {"time/seconds": seen.seconds, "time/tail": seen.tail_seconds, "time/running": seen.mean_running()}
        self._line("lanes.jsonl", {"step": step, "lanes": seen.capacity, **times})
        return {"time/tail": seen.tail_seconds}

    def best(self) -> bool:
        return self._fresh_best

    def _alerts(self, step: int, line: dict[str, Any], batch: Batch) -> list[Alert]:
        """The alerts of this step, with their evidence."""
        first = self.watch.first if self.watch is not None else {}
        warnings = step_alerts.metric_warnings(line, self.task)
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
        alerts = [step_alerts.with_evidence(name, text, line, first) for name, text in warnings]
        if self.watch is None:
            return alerts
        alerts += self.watch.see(line)
        if self._due(step) and "one-answer" not in self.alerted:
            given = step_alerts.batch_responses(batch)
            alerts += step_alerts.one_answer(step, given, lambda tokens: self.task.text(list(tokens)))
        return alerts

    def _recorded(self, step: int) -> bool:
        which = self.config.record_rollouts
        return which == "all" or (which != "none" and self._due(step))

    def _due(self, step: int) -> bool:
        return step % self.config.record_every == 0 or step + 1 == self.config.steps

    def _line(self, name: str, values: dict[str, Any]) -> None:
        self.files[name].write(json.dumps(mark_nonfinite(values)) + "\n")

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
        groups, apart = copy_to_host(groups)
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
        held = all((path / "reference.safetensors").exists() or any(path.glob(SHARD_FILES)) for path in saved)
        return not saved or (self.config.algorithm.reference.kept and not held)

    def dump(self, step: int, batch: Batch) -> str:
        path: Path = self.folder.path / f"failed_step_{step:06d}.safetensors"
        own = {k: v.clone(memory_format=contiguous_format) for k, v in vars(batch).items() if isinstance(v, Tensor)}
        save_file(own, unlinked(path))
        if self.journal is not None:  # a resume draws it anew
            self.journal.keep(0, step)
        return str(path)

    def record_error(self, text: str) -> None:
        self._event("error", text)

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
