"""What a notebook shows of runs: tables, curves and a live display. All words are escaped; there is no script."""

import html
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ascent.runs.display.terminal import Display, Lines, LiveDisplay, board, printable
from ascent.runs.metrics import short_name

CURVES = ("reward", "eval/accuracy", "entropy", "completions/mean_length")
"""The metrics that the live display draws, and the summary of a run."""
SHOWN, WORDS, NOTES = 20, 400, 12
"""Responses of a table, characters of each, and notes below the live display."""
EVERY = 1.0
"""Seconds between two drawings."""


class Picture:
    """A figure that a notebook shows."""

    def __init__(self, figure: Any):
        from matplotlib import pyplot

        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=120)
        pyplot.close(figure)
        self.png = drawn.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png

    def save(self, path: Any) -> None:
        with open(path, "wb") as file:
            file.write(self.png)


class Completions(list[dict[str, Any]]):
    """Responses, one dictionary each: a list that shows well."""

    def _repr_html_(self) -> str:
        return responses_table(self[:SHOWN]) + (f"<p>… and {len(self) - SHOWN} more</p>" if len(self) > SHOWN else "")

    def __repr__(self) -> str:
        lines = [f"{_number(row.get('reward')):>8}  {_words(row, 'response')!r:.100}" for row in self[:SHOWN]]
        return "\n".join([f"{len(self)} responses", *lines])


def responses_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Prompts and responses, with rewards and reasons where there are any."""
    if not any("reward" in row for row in rows):
        return html_table([("prompt", "response"), *((_words(row, "prompt"), _words(row, "response")) for row in rows)])
    head = ("prompt", "response", "reward", "why")
    cells = [
        (
            _words(row, "prompt"),
            _words(row, "response"),
            _number(row.get("reward")),
            _words(row, "reason") if row.get("reason") else "",
        )
        for row in rows
    ]
    return html_table([head, *cells])


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "·"


def _words(row: Mapping[str, Any], name: str) -> str:
    text = row.get(f"{name}_text", row.get(name))
    return printable(str(text))[:WORDS]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head."""

    def line(cells: Sequence[str], tag: str) -> str:
        style = "text-align:left;white-space:pre-wrap;vertical-align:top"
        return "<tr>" + "".join(f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell in cells) + "</tr>"

    return "<table>" + line(rows[0], "th") + "".join(line(row, "td") for row in rows[1:]) + "</table>"


def run_html(folder: Any, info: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """A run in a cell: what it is, how it ended, and its curves."""
    result = info.get("result") if isinstance(info.get("result"), Mapping) else {}
    words = result.get("words") if isinstance(result, Mapping) else None
    rows = [(name, printable(str(info.get(name)))) for name in ("status", "task", "label", "seed", "step", "steps")]
    said = "".join(f"<p>{html.escape(printable(str(word)))}</p>" for word in words or [] if isinstance(words, list))
    table = html_table([("run", str(folder)), *rows])
    return f"<div>{table}{said}{curves(metrics)}</div>"


def curves(lines: Sequence[Mapping[str, Any]]) -> str:
    """Small curves of a few metrics, as SVG."""
    drawn = []
    for name in CURVES:
        points = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
        if points:
            drawn.append(_curve(short_name(name), points))
    return f'<div style="display:flex;flex-wrap:wrap;gap:16px">{"".join(drawn)}</div>'


def _curve(label: str, points: Sequence[tuple[float, float]], width: int = 220, height: int = 70) -> str:
    points = points[:: max(1, len(points) // 400)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    wide, high = max(xs) - min(xs) or 1, max(ys) - min(ys) or 1
    places = " ".join(
        f"{4 + (x - min(xs)) / wide * (width - 8):.1f},{height - 4 - (y - min(ys)) / high * (height - 8):.1f}"
        for x, y in points
    )
    shape = f'<polyline points="{places}" fill="none" stroke="#1f5fa8" stroke-width="1.5"/>'
    if len(points) == 1:
        shape = f'<circle cx="{width / 2}" cy="{height / 2}" r="2" fill="#1f5fa8"/>'
    text = f"{html.escape(label)} {ys[-1]:.3f} (from {min(ys):.3f} to {max(ys):.3f})"
    picture = f'<svg width="{width}" height="{height}" role="img" aria-label="{text}">{shape}</svg>'
    return f'<figure style="margin:0"><figcaption style="font-size:12px">{text}</figcaption>{picture}</figure>'


class Live(Display):
    """One display that is drawn again and again: progress, numbers, curves, the latest completions, and notes."""

    def __init__(self) -> None:
        self.title, self.total, self.done = "", 0, 0
        self.metrics: Mapping[str, Any] = {}
        self.lines: list[dict[str, Any]] = []
        self.rows: Sequence[Mapping[str, Any]] = ()
        self.notes: list[str] = []
        self.drawn = 0.0
        self.handle: Any = None

    def start(self, done: int, total: int, title: str) -> None:
        self.title, self.total, self.done = title, total, done
        self.draw()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.done, self.metrics = step + 1, metrics
        self.lines.append({"step": step, **{name: metrics.get(name) for name in CURVES}})
        if step + 1 == self.total:
            self.draw()

    def responses(self, rows: Callable[[int], Sequence[Mapping[str, Any]]]) -> None:
        if time.monotonic() - self.drawn > EVERY or self.done == self.total:
            self.rows = rows(1)[:4]
            self.draw()

    def say(self, text: str) -> None:
        self.notes.append(printable(text))
        self.draw()

    def close(self) -> None:
        self.draw()

    def html(self) -> str:
        share = 100 * self.done / max(self.total, 1)
        bar = f'<progress value="{self.done}" max="{max(self.total, 1)}" style="width:300px">{share:.0f} %</progress>'
        head = f"<p><b>{html.escape(printable(self.title))}</b> {bar} {self.done} of {self.total} steps</p>"
        numbers = html_table([("", ""), *board(self.metrics)]) if self.metrics else ""
        notes = "".join(f"<pre>{html.escape(note)}</pre>" for note in self.notes[-NOTES:])
        table = responses_table(self.rows) if self.rows else ""
        return f"<div>{head}{curves(self.lines)}{numbers}{table}{notes}</div>"

    def draw(self) -> None:
        from IPython.display import HTML, display

        self.drawn = time.monotonic()
        shown = HTML(self.html())
        if self.handle is None:
            self.handle = display(shown, display_id=True)
        else:
            self.handle.update(shown)


def for_stream() -> Display:
    """A live display in a notebook, a board on a terminal, lines elsewhere."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return Live()
    return LiveDisplay() if sys.stderr.isatty() else Lines()
