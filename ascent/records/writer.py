"""The records of a run, written step by step."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, contiguous_format

from ascent.core.config import Config
from ascent.core.protocols import Learner, Stepped, Task
from ascent.core.types import Batch, Metrics, State, Streams
from ascent.records import checkpoint, rollouts
from ascent.records.display import Display
from ascent.records.folder import LINES, RunFolder, read_lines
from ascent.records.metrics import ALWAYS_WRITTEN
from ascent.records.pieces import Pieces
from ascent.records.reading import finite_line
from ascent.records.sinks import Sinks
from ascent.records.watch.flags import Flag, batch_responses, metric_warnings, one_answer, reward_weights, with_evidence
from ascent.records.watch.trends import watch_from

CLIPS = ("clip_ratio/low_mean", "clip_ratio/high_mean")
"""On every line of updates.jsonl where the loss clips."""

HEARTBEAT = 2.0
"""Seconds between two signs of life in run.json."""


class Writer:
    """The records of one run: lines flushed every step, rollouts, checkpoints."""

    def __init__(self, folder: RunFolder, config: Config, task: Task, display: Display):
        self.folder, self.config, self.task, self.display = folder, config, task, display
        self.sinks: Sinks | None = None
        self.pieces = Pieces(task)
        self.files = {name: open(folder.path / name, "a") for name in LINES}  # noqa: SIM115 (open as long as the run)
        self.flagged = {event["name"] for event in read_lines(folder.path / "events.jsonl") if "name" in event}
        lines = read_lines(folder.path / "metrics.jsonl")
        sampled = config.algorithm.loss.data == "samples"
        self.watch = watch_from(lines, task.max_reward, reward_weights(task)) if sampled else None
        self.stop = False
        self.best_step, self._fresh_best = best_of(lines), False
        self.last: dict[str, Any] = {}
        """The last known value of every metric."""
        self._answers: tuple[Task, Batch] | None = None
        self._beat = time.monotonic()

    def held_out(self, task: Task, answers: Batch) -> None:
        """Keep greedy answers to held-out prompts, to be written with the step whose line has their metrics."""
        if self.config.record_rollouts != "none":
            self._answers = task, answers

    def step(self, step: int, metrics: Metrics, batch: Batch, minis: list[Batch], updates: list[Stepped]) -> None:
        for i, update in enumerate(updates):
            report = update.report
            names = ("loss", "grad_norm", *(CLIPS if CLIPS[0] in report else ()))
            self._line("updates.jsonl", {"step": step, "update": i} | {name: report[name] for name in names})
        loss = metrics.pop("loss", None)
        line: dict[str, Any] = (
            {name: metrics.get(name) for name in ALWAYS_WRITTEN} | metrics | {"step": step, "loss": loss}
        )
        self._line("metrics.jsonl", line)
        if self.sinks is not None:
            self.sinks.step(step, line)
        self._judge(step, line)
        for flag in self._flags(step, line, batch):
            if flag.name not in self.flagged:
                self.flagged.add(flag.name)
                self._line("events.jsonl", flag.event(step, self._last_recorded(step)))
                self.display.say(f"step {step}: {flag.text}")
        if self._recorded(step):
            which = self.config.record_rollouts
            rollouts.write_rollouts(self.folder.path, step, batch, minis, updates, which, self.task, self.pieces)
        if self._answers is not None:
            (task, answers), self._answers = self._answers, None
            own = self.pieces if task is self.task else None
            rollouts.write_answers(self.folder.path, step, answers, self.config.record_rollouts, task, own)
        for file in self.files.values():
            file.flush()
        self.last = {**self.last, **{k: v for k, v in line.items() if v is not None}}
        self.display.step(step, self.last)
        if time.monotonic() - self._beat > HEARTBEAT:
            self._beat = time.monotonic()
            self.folder.run["step"] = step + 1
            self.folder.save()

    def _judge(self, step: int, line: dict[str, Any]) -> None:
        """Is this the best evaluation so far?"""
        self._fresh_best = False
        if self.config.keep_best and (now := quality(line)) is not None:
            best = None if self.best_step is None else self.best_step[1]
            if best is None or now > best:
                self.best_step, self._fresh_best = (step + 1, now), True

    def best(self) -> bool:
        return self._fresh_best

    def _flags(self, step: int, line: dict[str, Any], batch: Batch) -> list[Flag]:
        """The flags of this step, with their evidence."""
        first = self.watch.first if self.watch is not None else {}
        warnings = [*metric_warnings(line, self.task), *self._failed_rewards(line, batch.errors)]
        flags = [with_evidence(name, text, line, first) for name, text in warnings]
        if self.watch is None:
            return flags
        flags += self.watch.see(line)
        if self._due(step) and "one-answer" not in self.flagged:
            flags += one_answer(step, batch_responses(batch), lambda tokens: self.task.text(list(tokens)))
        return flags

    def _failed_rewards(self, line: dict[str, Any], reasons: tuple[str, ...]) -> list[tuple[str, str]]:
        if not reasons:
            return []
        text = (
            f"the reward failed on {len(reasons)} of {line['num_responses']} responses, which are left out of credit "
            f"and means; above a share of {self.config.max_reward_errors:g} the run stops (--max-reward-errors). "
            f"The first: {reasons[0]}"
        )
        return [("reward-errors", text)]

    def _recorded(self, step: int) -> bool:
        which = self.config.record_rollouts
        return which == "all" or (which != "none" and self._due(step))

    def _due(self, step: int) -> bool:
        return step % self.config.record_every == 0 or step + 1 == self.config.steps

    def _last_recorded(self, step: int) -> int | None:
        """The newest step whose responses are recorded, this one included."""
        if self.config.record_rollouts == "none":
            return None
        return step if self._recorded(step) else step - step % self.config.record_every

    def _line(self, name: str, values: dict[str, Any]) -> None:
        self.files[name].write(json.dumps(finite_line(values)) + "\n")

    def checkpoint(self, step: int, learner: Learner, streams: Streams, state: State) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self.files.items()}
        groups = {**learner.state(), "rng": streams.state()}
        saved = {"step": step, "state": state, "records": sizes}
        best = self.best_step[0] if self.best_step is not None and self.config.keep_best else None
        checkpoint.save(self.folder.path / "checkpoints", step, groups, saved, self.config.keep, best)
        self.folder.run["best"] = best

    def dump(self, step: int, batch: Batch) -> str:
        path: Path = self.folder.path / f"trouble_step_{step:06d}.safetensors"
        own = {k: v.clone(memory_format=contiguous_format) for k, v in vars(batch).items() if isinstance(v, Tensor)}
        save_file(own, path)
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
        for file in self.files.values():
            with suppress(OSError):  # a full disk has been reported by now
                file.close()


def quality(line: dict[str, Any]) -> tuple[float, float] | None:
    """The quality of an evaluation: held-out accuracy, then reward; without them log-prob or log-loss."""
    if line.get("eval/logp") is not None:
        return line["eval/logp"], 0.0
    if line.get("eval/accuracy") is None:
        loss = line.get("eval/pairs/log_loss", line.get("eval/steps/error"))
        return None if loss is None else (-loss, 0.0)
    return line["eval/accuracy"], line.get("eval/reward") or 0.0


def best_of(lines: list[dict[str, Any]]) -> tuple[int, tuple[float, float]] | None:
    """The step after which the best evaluation was made, and its quality; the first among equals."""
    evaluated = [(line["step"] + 1, now) for line in lines if (now := quality(line)) is not None]
    return max(evaluated, key=lambda pair: (pair[1], -pair[0]), default=None)
