"""Terminal output: the progress of a run, paragraphs and tables."""

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

SUMMARY_METRICS = (
    *("reward", "exact/reward", "accuracy", "eval/accuracy", "eval/logp", "rewards/accuracies", "eval/pairs/accuracy"),
    *("steps/error", "eval/steps/error", "entropy", "reward_errors"),
)
"""The metrics of a one-line summary, most important first: if the line is too long, the last ones are dropped."""
METRIC_LINES = {
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
"""The lines below the progress bar: the metrics of each line with their formats."""


class Display:
    """A display that shows nothing; the base class of the others."""

    def start(self, done: int, total: int, title: str) -> None: ...

    def step(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def responses(self, rows: Callable[[int], Sequence[Mapping[str, Any]]]) -> None:
        """Show responses of this step. `rows` takes a number of groups and returns one row per response."""

    def show_message(self, text: str) -> None: ...

    def close(self) -> None: ...


class TerminalDisplay(Display):
    """A progress bar with the metrics of the last step below it. The loss comes last."""

    def start(self, done: int, total: int, title: str) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = Console(stderr=True)
        self.show_message(title)
        self.progress = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self.summary_width = self.console.width - (20 + 2 * len(str(total)) + 1 + 5 + 4)
        self.task = self.progress.add_task("", total=total, completed=done, summary="")
        self.total, self.updated_at = total, 0.0
        self.metrics: Mapping[str, Any] = {}
        self.live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)
        self.live.start()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self.updated_at > 0.1 or step + 1 == self.total:
            self.updated_at, self.metrics = now, metrics
            self.progress.update(self.task, completed=step + 1, summary=summary_text(metrics, self.summary_width))

    def _render(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines = [
            Text(f"{name:<9}{words}", no_wrap=True, overflow="ellipsis") for name, words in metric_lines(self.metrics)
        ]
        return Group(self.progress, *lines)

    def show_message(self, text: str) -> None:
        self.console.print(printable(text), markup=False, highlight=False)

    def close(self) -> None:
        self.live.stop()


def metric_lines(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the name and the formatted metrics of each line. Metrics that were not measured are omitted."""
    lines = {
        name: [
            f"{short_name(key).removeprefix(name)} {metrics[key]:{form}}".strip()
            for key, form in cells.items()
            if metrics.get(key) is not None
        ]
        for name, cells in METRIC_LINES.items()
    }
    return [(name, "  ".join(words)) for name, words in lines.items() if words]


class LineDisplay(Display):
    """About ten lines per run, for logs and pipes."""

    def start(self, done: int, total: int, title: str) -> None:
        self.total = total
        self.show_message(f"{title}: {total - done} steps{f' from step {done} on' if done else ''}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        interval = max(1, self.total // 10)
        if (step + 1) % interval == 0 or step + 1 == self.total:
            self.show_message(f"{step + 1:>{len(str(self.total))}}/{self.total}  {summary_text(metrics)}")

    def show_message(self, text: str) -> None:
        with suppress(OSError):  # the pipe is closed, which does not stop the run
            print(printable(text), file=sys.stderr, flush=True)


def summary_text(metrics: Mapping[str, Any], max_width: int = 200) -> str:
    """Format the summary metrics of a step in at most `max_width` characters. Zero reward errors are omitted."""
    measured = {key: metrics[key] for key in SUMMARY_METRICS if metrics.get(key) is not None}
    words = [f"{short_name(key)} {cell_text(v)}" for key, v in measured.items() if v or key != "reward_errors"]
    while words and len("  ".join(words)) > max_width:
        words.pop()
    return "  ".join(words)


def printable(text: str) -> str:
    """Escape control characters, bidirectional marks and unpaired surrogates, which a terminal would interpret."""
    unsafe = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    return re.sub(unsafe, lambda m: ascii(m[0])[1:-1], text)


def width() -> int:
    """Return the number of columns of the terminal, or 160 without a terminal."""
    return shutil.get_terminal_size(fallback=(160, 24)).columns


def wrapped(text: str, indent: int = 0) -> str:
    """Wrap a paragraph and indent all lines but the first."""
    return textwrap.fill(text, min(width(), 120), subsequent_indent=" " * indent, break_long_words=False)


def cell_text(value: Any) -> str:
    """Format a value for a table: 0.250, 12, or a dot for None."""
    return "·" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Format a table with right-aligned columns. The first column is left-aligned if it contains text."""
    has_text = any(row[0] and not row[0].replace(".", "").lstrip("-").isdigit() for row in rows)
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "  ".join(
            c.ljust(w) if i == 0 and has_text else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )

    return [line(head), *(line(row) for row in rows)]


@contextmanager
def progress(total: int, unit: str, show: bool = True) -> Iterator[Callable[[int], None]]:
    """Show the progress of work other than a run: a bar on a terminal, ten lines elsewhere.

    Yields a function to call with the number of further items that are done.
    """
    if show and not sys.stderr.isatty():
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            if done == total or done * 10 // total > (done - count) * 10 // total:
                print(f"{done}/{total} {unit}", file=sys.stderr, flush=True)

        yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (SpinnerColumn(), TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)
