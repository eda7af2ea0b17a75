"""What a person sees while a run goes on: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

SHOWN = (
    ("reward", "reward"),
    ("exact/reward", "E[R]"),
    ("accuracy", "right"),
    ("eval/accuracy", "greedy"),
    ("eval/logp", "held-out log-prob"),
    ("entropy", "entropy"),
    ("reward_errors", "reward errors"),
)


class Display:
    """Says nothing; the base of those that do."""

    def start(self, done: int, total: int, title: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class Bar(Display):
    """A progress bar with the numbers that matter, the loss not among them."""

    def start(self, done: int, total: int, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        self.say(title)
        self.progress = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self.room = self.console.width - (20 + 2 * len(str(total)) + 1 + 5 + 4)
        self.task = self.progress.add_task("", total=total, completed=done, numbers="")
        self.total, self.shown = total, 0.0
        self.progress.start()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self.shown > 0.1 or step + 1 == self.total:
            self.shown = now
            self.progress.update(self.task, completed=step + 1, numbers=numbers(metrics, self.room))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.progress.stop()


class Lines(Display):
    """Ten lines over a run, for logs and pipes."""

    def start(self, done: int, total: int, title: str) -> None:
        self.total = total
        self.say(f"{title}: {total - done} steps{f' from step {done} on' if done else ''}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        every = max(1, self.total // 10)
        if (step + 1) % every == 0 or step + 1 == self.total:
            self.say(f"{step + 1:>{len(str(self.total))}}/{self.total}  {numbers(metrics)}")

    def say(self, text: str) -> None:
        with suppress(OSError):  # nobody listens any more: no reason to stop
            print(text, file=sys.stderr, flush=True)


def numbers(metrics: Mapping[str, Any], room: int = 200) -> str:
    """What to show of a step, as much as there is room for; how many rewards failed only where some did."""
    shown = [(name, metrics[key]) for key, name in SHOWN if metrics.get(key) is not None]
    words = [f"{name} {_short(value)}" for name, value in shown if value or name != "reward errors"]
    while words and len("  ".join(words)) > room:
        words.pop()
    return "  ".join(words)


def _short(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def for_stream() -> Display:
    return Bar() if sys.stderr.isatty() else Lines()
