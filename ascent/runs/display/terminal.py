"""What a person sees in a terminal: how a run goes on, paragraphs and tables."""

import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ascent.core.metric_names import MISMATCH
from ascent.runs.metrics import PHASES, short_name

SHOWN = (
    *("reward", "exact/reward", "accuracy", "eval/accuracy", "eval/logp", "rewards/accuracies", "eval/pairs/accuracy"),
    *("steps/error", "eval/steps/error", "entropy", "reward_errors"),
)
"""The metrics of a single line, the first to go last."""
BOARD = {
    "reward": {"reward": ".3f", "reward_std": ".3f", "accuracy": ".1%", "lenient": ".1%", "eval/accuracy": ".1%"},
    "groups": {"frac_reward_zero_std": ".0%", "frac_all_right": ".0%", "frac_all_wrong": ".0%"},
    "pairs": {
        **{"rewards/accuracies": ".1%", "rewards/margins": ".3f"},
        **{"eval/pairs/accuracy": ".1%", "eval/pairs/log_loss": ".3f"},
    },
    "steps": {"steps/error": ".3f", "eval/steps/error": ".3f"},
    "length": {"completions/mean_length": ".1f", "completions/clipped_ratio": ".0%"},
    "turns": {"turns": ".2f", "turns/cut": ".2f", "time/environment": ".2f"},
    "tools": {f"tools/{name}": ".2f" for name in ("calls", "unparsed", "failed", "repeated")},
    "policy": {"entropy": ".3f", "kl": ".4f", "clip_ratio/low_mean": ".2%", "clip_ratio/high_mean": ".2%"},
    "critic": {"value/explained_variance": ".0%"},
    "update": {"grad_norm": ".3g", MISMATCH: ".1e"},
    "seconds": {f"time/{phase}": ".2f" for phase in PHASES} | {"time/tokens_per_second": ".0f"},
    "loss": {"loss": ".4f"},
}
"""What the board shows: the lines, and the metrics of each with their formats."""


class Display:
    """Says nothing; the base of those that do."""

    def start(self, done: int, total: int, title: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def responses(self, rows: Callable[[int], Sequence[Mapping[str, Any]]]) -> None:
        """What was sampled in this step: called with a number of groups, it gives a row per response."""

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


class LiveDisplay(Display):
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
        self.console.print(printable(text), markup=False, highlight=False)

    def close(self) -> None:
        self.live.stop()


def board(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The lines of the board, each its name and its numbers; what was not measured is left out."""
    lines = {
        name: [
            f"{short_name(key).removeprefix(name)} {metrics[key]:{form}}".strip()
            for key, form in cells.items()
            if metrics.get(key) is not None
        ]
        for name, cells in BOARD.items()
    }
    return [(name, "  ".join(words)) for name, words in lines.items() if words]


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
            print(printable(text), file=sys.stderr, flush=True)


def numbers(metrics: Mapping[str, Any], room: int = 200) -> str:
    """What to show of a step, as much as there is room for; how many rewards failed only where some did."""
    shown = {key: metrics[key] for key in SHOWN if metrics.get(key) is not None}
    words = [f"{short_name(key)} {cell_text(v)}" for key, v in shown.items() if v or key != "reward_errors"]
    while words and len("  ".join(words)) > room:
        words.pop()
    return "  ".join(words)


def printable(words: str) -> str:
    """Words that a terminal shows and does not obey: controls, marks of direction and broken characters escaped."""
    odd = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(odd, lambda m: ascii(m[0])[1:-1], words)


def width() -> int:
    """Columns of the terminal; plenty where there is none."""
    return shutil.get_terminal_size(fallback=(160, 24)).columns


def wrapped(text: str, indent: int = 0) -> str:
    """A paragraph, its later lines set in."""
    return textwrap.fill(text, min(width(), 120), subsequent_indent=" " * indent, break_long_words=False)


def cell_text(value: Any) -> str:
    """A cell of a table: 0.250, 12, or a dot where there is nothing."""
    return "·" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns set flush right (the first one left if it holds words)."""
    words = any(row[0] and not row[0].replace(".", "").lstrip("-").isdigit() for row in rows)
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "  ".join(
            c.ljust(w) if i == 0 and words else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )

    return [line(head), *(line(row) for row in rows)]


@contextmanager
def progress(total: int, what: str, show: bool = True) -> Iterator[Callable[[int], None]]:
    """For work other than a run: a bar on a terminal, ten lines elsewhere. Call it with how many more are done."""
    if show and not sys.stderr.isatty():
        done = 0

        def line(more: int) -> None:
            nonlocal done
            done += more
            if done == total or done * 10 // total > (done - more) * 10 // total:
                print(f"{done}/{total} {what}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task("", total=total)
        yield lambda more: bar.advance(task, more)
