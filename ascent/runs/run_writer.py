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
from ascent.runs.batch_serialization import pack_rollouts
from ascent.runs.display.terminal import Display
from ascent.runs.held_out_evaluation import Evaluate
from ascent.runs.journal import Journal
from ascent.runs.metrics import ALWAYS_WRITTEN, best_evaluation, evaluation_score
from ascent.runs.recorded_conversation import environment_failed
from ascent.runs.rollout_files import TokenTexts
from ascent.runs.run_folder import JSONL_FILES, RunFolder, mark_nonfinite, unlinked
from ascent.runs.trackers.tracker_threads import Trackers
from ascent.runs.untrusted_files import read_lines, read_metrics
from ascent.training.async_checkpoint import BackgroundWriter, copy_to_host
from ascent.training.sharded_checkpoint import SHARD_FILES

CLIP_RATIOS = ("clip_ratio/low_mean", "clip_ratio/high_mean")
"""On every line of updates.jsonl if the loss clips."""
CHECKPOINT_TIMEOUT = 60.0
"""Seconds for which a failed run waits for the checkpoint that is being written."""
HEARTBEAT = 2.0
"""Seconds between two updates of the step and the heartbeat in run.json."""


class RunWriter:
    """Writes the records of one run: lines that are flushed every step, rollouts and checkpoints."""

    def __init__(self, folder: RunFolder, config: Config, task: Task, display: Display):
        self.folder, self.config, self.task, self.display = folder, config, task, display
        self.trackers: Trackers | None = None
        self.journal: Journal | None = None
        self.timeline: OccupancyTimeline | None = None
        """Where the engine records how many responses it decodes at once."""
        self.token_texts = TokenTexts(task)
        self.files = {name: open(folder.path / name, "a") for name in JSONL_FILES}  # noqa: SIM115 (closed by `close`)
        self.raised = {str(event["name"]) for event in read_lines(folder.path / "events.jsonl") if "name" in event}
        """The names of the alerts that were raised so far."""
        lines = read_metrics(folder.path / "metrics.jsonl")
        samples = config.data == "samples"
        self.alerts = RunAlerts(task.max_reward, step_alerts.reward_weights(task)) if samples else None
        if self.alerts is not None:
            for line in lines:
                self.alerts.see(line)
        self.stop = False
        self.best_step, self._is_new_best = best_evaluation(lines), False
        self.last: dict[str, Any] = {}
        """The last known value of every metric."""
        self.newest: tuple[dict[str, Any], Batch] | None = None
        """The metrics and the batch of the last step."""
        self.checkpoint_writer = BackgroundWriter()
        self._answers: tuple[Task, Batch] | None = None
        self._last_heartbeat = time.monotonic()

    def keep_answers(self, task: Task, answers: Batch) -> None:
        """Keep greedy answers to held-out prompts until the step that has their metrics is written."""
        if self.config.record_rollouts != "none":
            self._answers = task, answers

    def with_journal(self, evaluate: Evaluate) -> Evaluate:
        """Return an evaluation that is written to the journal, or replayed from it; without a journal, `evaluate`."""
        journal = self.journal
        if journal is None:
            return evaluate
        kept_answers = lambda: None if self._answers is None else self._answers[1]  # noqa: E731
        return lambda: journal.evaluation(evaluate, kept_answers, lambda answers: self.keep_answers(self.task, answers))

    def step(self, step: int, metrics: Metrics, batch: Batch, minis: list[Batch], updates: list[UpdateResult]) -> None:
        self.checkpoint_writer.poll()
        line = self._write_metrics(step, metrics, updates)
        self._is_new_best = False
        if self.config.keep_best and (score := evaluation_score(line)) is not None:
            self._is_new_best = self.best_step is None or score > self.best_step[1]
            self.best_step = (step + 1, score) if self._is_new_best else self.best_step
        self._write_alerts(step, line, batch)
        path, groups = self.folder.path, self.config.record_rollouts
        if self._is_recorded(step):
            rollout_files.write_rollouts(path, step, batch, minis, updates, groups, self.token_texts)
        if self._answers is not None:
            (task, answers), self._answers = self._answers, None
            texts = self.token_texts if task is self.task else TokenTexts(task)
            rollout_files.write_answers(path, step, answers, groups, texts)
        for file in self.files.values():
            file.flush()
        self.last = self.last | {k: v for k, v in line.items() if v is not None}
        self.newest = line, batch
        self.display.step(step, self.last)
        self.display.responses(lambda groups: rollout_files.sampled_rows(step, batch, groups, self.token_texts))
        if time.monotonic() - self._last_heartbeat > HEARTBEAT:
            self._last_heartbeat = time.monotonic()
            self.folder.run["step"] = step + 1
            self.folder.save()

    def _write_metrics(self, step: int, metrics: Metrics, updates: list[UpdateResult]) -> dict[str, Any]:
        """Write the lines of metrics.jsonl and updates.jsonl; return the former."""
        for i, update in enumerate(updates):
            report = update.report
            names = ("loss", "grad_norm", *(CLIP_RATIOS if CLIP_RATIOS[0] in report else ()))
            self._line("updates.jsonl", {"step": step, "update": i} | {name: report[name] for name in names})
        loss = metrics.pop("loss", None)
        line: dict[str, Any] = dict.fromkeys(ALWAYS_WRITTEN) | metrics
        line |= self._write_occupancy(step) | {"step": step, "loss": loss}
        self._line("metrics.jsonl", line)
        if self.trackers is not None:
            self.trackers.step(step, line)
        return line

    def _write_occupancy(self, step: int) -> Metrics:
        """Write how many responses were decoded at once during the step; return the length of its tail as a metric."""
        seen = OccupancyTimeline() if self.timeline is None else self.timeline.drain()
        if not seen.spans:
            return {}
        times = {"time/seconds": seen.seconds, "time/tail": seen.tail_seconds, "time/running": seen.mean_running()}
        self._line("occupancy.jsonl", {"step": step, "max_num_seqs": seen.capacity, **times})
        return {"time/tail": seen.tail_seconds}

    def is_best(self) -> bool:
        return self._is_new_best

    def _write_alerts(self, step: int, line: dict[str, Any], batch: Batch) -> None:
        """Write and show the alerts of a step that were not raised before."""
        for alert in self._step_alerts(step, line, batch):
            if alert.name not in self.raised:
                self.raised.add(alert.name)
                newest = step if self._is_recorded(step) else step - step % self.config.record_every
                recorded = None if self.config.record_rollouts == "none" else newest
                self._line("events.jsonl", alert.event(step, recorded))
                self.display.show_message(f"step {step}: {alert.text}")

    def _step_alerts(self, step: int, line: dict[str, Any], batch: Batch) -> list[Alert]:
        """Return all alerts of a step with their evidence."""
        first = self.alerts.first if self.alerts is not None else {}
        warnings = step_alerts.metric_warnings(line, self.task)
        environment_errors = [error for error in batch.errors if environment_failed(error)]
        for name, source, errors in (
            ("environment-errors", "environment", environment_errors),
            ("reward-errors", "reward", [error for error in batch.errors if error not in environment_errors]),
        ):
            if errors:
                text = (
                    f"the {source} failed on {len(errors)} of {line['num_responses']} responses, which are left out of "
                    f"advantages and means. The run stops if more than {self.config.max_reward_errors:g} of the "
                    f"responses fail (--max-reward-errors). The first error: {errors[0]}"
                )
                warnings.append((name, text))
        alerts = [step_alerts.with_evidence(name, text, line, first) for name, text in warnings]
        if self.alerts is None:
            return alerts
        alerts += self.alerts.see(line)
        if self._is_recording_step(step) and "one-answer" not in self.raised:
            responses = step_alerts.batch_responses(batch)
            alerts += step_alerts.one_answer(step, responses, lambda tokens: self.task.text(list(tokens)))
        return alerts

    def _is_recorded(self, step: int) -> bool:
        which = self.config.record_rollouts
        return which == "all" or (which != "none" and self._is_recording_step(step))

    def _is_recording_step(self, step: int) -> bool:
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
        self.checkpoint_writer.wait()
        folder = self.folder.path / "checkpoints"
        sharded_write = learner.stage_shards(checkpoint.temporary_path(checkpoint.step_folder(folder, step)))
        groups = {**(learner.state() if sharded_write is None else {}), "rng": streams.state()}
        saved = {"step": step, "state": state, "records": sizes}
        if ahead:
            groups["ahead"], saved["ahead"] = pack_rollouts(ahead)
        best = self.best_step[0] if self.best_step is not None and self.config.keep_best else None
        groups, in_background = copy_to_host(groups)
        saved = json.loads(json.dumps(saved))  # a copy: training continues while it is written
        save = partial(checkpoint.save, folder, step, groups, saved, self.config.keep, best, sharded_write)
        self.checkpoint_writer.begin(save, partial(self._after_checkpoint, step, best))
        if not in_background:
            self.checkpoint_writer.wait()

    def _after_checkpoint(self, step: int, best: int | None) -> None:
        """Remove what a complete checkpoint replaces: older journal entries and the initial parameters."""
        self.folder.run["best"] = best
        if self.journal is not None:
            self.journal.keep(step)
        if not self._needs_initial_params():
            checkpoint.remove_initial_params(self.folder.path / "checkpoints")

    def wait_for_checkpoint(self) -> None:
        self.checkpoint_writer.wait()

    def keep_initial_params(self, source: Path) -> None:
        """Copy the initial parameters while a resume would need them, because `source` may be deleted."""
        if self._needs_initial_params():
            checkpoint.keep_initial_params(source, self.folder.path / "checkpoints")

    def _needs_initial_params(self) -> bool:
        """Return True before the first checkpoint, and afterwards if the checkpoints lack the reference policy."""
        saved = checkpoint.complete_checkpoints(self.folder.path / "checkpoints")
        have_reference = all((path / "reference.safetensors").exists() or any(path.glob(SHARD_FILES)) for path in saved)
        return not saved or (self.config.algorithm.reference.enabled and not have_reference)

    def dump(self, step: int, batch: Batch) -> str:
        path: Path = self.folder.path / f"failed_step_{step:06d}.safetensors"
        tensors = {k: v.clone(memory_format=contiguous_format) for k, v in vars(batch).items() if isinstance(v, Tensor)}
        save_file(tensors, unlinked(path))
        if self.journal is not None:  # a resumed run samples the step again
            self.journal.keep(0, step)
        return str(path)

    def record_error(self, text: str) -> None:
        self._event("error", text)

    def note(self, text: str) -> None:
        """Show a note and write it to events.jsonl."""
        self.display.show_message(text)
        self._event("note", text)

    def _event(self, kind: str, text: str) -> None:
        with suppress(OSError):
            self._line("events.jsonl", {"step": self.last.get("step", -1) + 1, "event": kind, "text": text})

    def should_stop(self) -> bool:
        return self.stop

    def close(self) -> None:
        with suppress(Exception):  # a failed run reports its own error, and complete checkpoints stay
            self.checkpoint_writer.wait(CHECKPOINT_TIMEOUT)
        for file in self.files.values():
            with suppress(OSError):  # a full disk was reported before
                file.close()
