"""What a person sees while a run goes on: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ascent.core.metric_names import MISMATCH
from ascent.records.metrics import PHASES

SHOWN = (
    ("reward", "reward"),
    ("exact/reward", "E[R]"),
    ("accuracy", "right"),
    ("eval/accuracy", "greedy"),
    ("eval/logp", "held-out log-prob"),
    ("rewards/accuracies", "pairs right"),
    ("eval/pairs/accuracy", "held-out pairs"),
    ("steps/error", "squared error"),
    ("eval/steps/error", "held-out error"),
    ("entropy", "entropy"),
    ("reward_errors", "reward errors"),
)


class Display:
    """Says nothing; the base of those that do."""

    def start(self, done: int, total: int, title: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class Board(Display):
    """A progress bar, and below it everything that a step reports; the loss comes last."""

    def start(self, done: int, total: int, title: str) -> None:
        from rich.console import Console
        from rich.live import Live
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
        self.metrics: Mapping[str, Any] = {}
        self.live = Live(console=self.console, get_renderable=self._drawn, refresh_per_second=4)
        self.live.start()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self.shown > 0.1 or step + 1 == self.total:
            self.shown, self.metrics = now, metrics
            self.progress.update(self.task, completed=step + 1, numbers=numbers(metrics, self.room))

    def _drawn(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines = [Text(f"{name:<9}{words}", no_wrap=True, overflow="ellipsis") for name, words in board(self.metrics)]
        return Group(self.progress, *lines)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self.live.stop()


BOARD: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    ("reward", (("reward", "", ".3f"), ("reward_std", "± ", ".3f"), ("accuracy", "right ", ".1%"))),
    ("", (("lenient", "right in any form ", ".1%"), ("eval/accuracy", "held-out ", ".1%"))),
    ("groups", (("frac_reward_zero_std", "without signal ", ".0%"), ("frac_all_right", "all right ", ".0%"))),
    ("", (("frac_all_wrong", "all wrong ", ".0%"),)),
    ("pairs", (("rewards/accuracies", "right ", ".1%"), ("rewards/margins", "margin ", ".3f"))),
    ("", (("eval/pairs/accuracy", "held-out ", ".1%"), ("eval/pairs/log_loss", "log-loss ", ".3f"))),
    ("steps", (("steps/error", "error ", ".3f"), ("eval/steps/error", "held-out ", ".3f"))),
    ("length", (("completions/mean_length", "", ".1f"), ("completions/clipped_ratio", "cut off ", ".0%"))),
    ("policy", (("entropy", "entropy ", ".3f"), ("kl", "KL ", ".4f"), ("clip_ratio/low_mean", "clipped low ", ".2%"))),
    ("", (("clip_ratio/high_mean", "high ", ".2%"), ("value/explained_variance", "V explains ", ".0%"))),
    ("update", (("grad_norm", "‖∇‖ ", ".3g"), (MISMATCH, "sampler mismatch ", ".1e"))),
    ("seconds", tuple((f"time/{phase}", f"{phase} ", ".2f") for phase in PHASES)),
    ("", (("time/tokens_per_second", "tokens/s ", ".0f"),)),
    ("loss", (("loss", "", ".4f"),)),
)
"""What the board shows: a line's name, and its numbers. A line without a name goes on with the one before it."""


def board(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of the board; what was not measured is left out."""
    lines: list[tuple[str, str]] = []
    for name, cells in BOARD:
        words = [f"{head}{metrics[key]:{form}}" for key, head, form in cells if metrics.get(key) is not None]
        if name:
            lines.append((name, "  ".join(words)))
        elif words:
            lines[-1] = (lines[-1][0], "  ".join(filter(None, (lines[-1][1], *words))))
    return [(name, words) for name, words in lines if words]


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
    return Board() if sys.stderr.isatty() else Lines()
