"""Notebook output: tables, curves and a live display. All text is escaped, and there are no scripts."""

import html
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ascent.runs.display.terminal import Display, LineDisplay, TerminalDisplay, metric_lines, printable
from ascent.runs.metrics import short_name

CURVE_METRICS = ("reward", "eval/accuracy", "entropy", "completions/mean_length")
"""The metrics whose curves are drawn by the live display and the summary of a run."""
MAX_RESPONSES, MAX_TEXT_LENGTH, MAX_MESSAGES = 20, 400, 12
"""Maximum responses in a table, characters of each text, and messages below the live display."""
UPDATE_INTERVAL = 1.0
"""Minimum seconds between two updates of the completions."""


class Picture:
    """A figure as a PNG image, which a notebook displays."""

    def __init__(self, figure: Any):
        from matplotlib import pyplot

        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        pyplot.close(figure)
        self.png = buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png

    def save(self, path: Any) -> None:
        with open(path, "wb") as file:
            file.write(self.png)


class Completions(list[dict[str, Any]]):
    """A list of responses, one dictionary each, which a notebook displays as a table."""

    def _repr_html_(self) -> str:
        return responses_table(self[:MAX_RESPONSES]) + (
            f"<p>… and {len(self) - MAX_RESPONSES} more</p>" if len(self) > MAX_RESPONSES else ""
        )

    def __repr__(self) -> str:
        lines = [f"{_number(row.get('reward')):>8}  {_words(row, 'response')!r:.100}" for row in self[:MAX_RESPONSES]]
        return "\n".join([f"{len(self)} responses", *lines])


def responses_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format prompts and responses, with rewards and reasons if any, as an HTML table."""
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
    return printable(str(text))[:MAX_TEXT_LENGTH]


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as an HTML table. The first row is the header."""

    def line(cells: Sequence[str], tag: str) -> str:
        style = "text-align:left;white-space:pre-wrap;vertical-align:top"
        return "<tr>" + "".join(f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell in cells) + "</tr>"

    return "<table>" + line(rows[0], "th") + "".join(line(row, "td") for row in rows[1:]) + "</table>"


def run_html(folder: Any, info: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Format a run for a notebook cell: its description, result and curves."""
    result = info.get("result") if isinstance(info.get("result"), Mapping) else {}
    words = result.get("words") if isinstance(result, Mapping) else None
    rows = [(name, printable(str(info.get(name)))) for name in ("status", "task", "label", "seed", "step", "steps")]
    sentences = "".join(
        f"<p>{html.escape(printable(str(word)))}</p>" for word in words or [] if isinstance(words, list)
    )
    table = html_table([("run", str(folder)), *rows])
    return f"<div>{table}{sentences}{curves(metrics)}</div>"


def curves(lines: Sequence[Mapping[str, Any]]) -> str:
    """Draw small curves of `CURVE_METRICS` as SVG."""
    figures = []
    for name in CURVE_METRICS:
        points = [(line["step"], line[name]) for line in lines if isinstance(line.get(name), int | float)]
        if points:
            figures.append(_curve(short_name(name), points))
    return f'<div style="display:flex;flex-wrap:wrap;gap:16px">{"".join(figures)}</div>'


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


class NotebookDisplay(Display):
    """A notebook output that is updated in place: progress, metrics, curves, the latest completions, and messages."""

    def __init__(self) -> None:
        self.title, self.total, self.done = "", 0, 0
        self.metrics: Mapping[str, Any] = {}
        self.lines: list[dict[str, Any]] = []
        self.rows: Sequence[Mapping[str, Any]] = ()
        self.messages: list[str] = []
        self.updated_at = 0.0
        self.handle: Any = None

    def start(self, done: int, total: int, title: str) -> None:
        self.title, self.total, self.done = title, total, done
        self.draw()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.done, self.metrics = step + 1, metrics
        self.lines.append({"step": step, **{name: metrics.get(name) for name in CURVE_METRICS}})
        if step + 1 == self.total:
            self.draw()

    def responses(self, rows: Callable[[int], Sequence[Mapping[str, Any]]]) -> None:
        if time.monotonic() - self.updated_at > UPDATE_INTERVAL or self.done == self.total:
            self.rows = rows(1)[:4]
            self.draw()

    def show_message(self, text: str) -> None:
        self.messages.append(printable(text))
        self.draw()

    def close(self) -> None:
        self.draw()

    def html(self) -> str:
        share = 100 * self.done / max(self.total, 1)
        bar = f'<progress value="{self.done}" max="{max(self.total, 1)}" style="width:300px">{share:.0f} %</progress>'
        head = f"<p><b>{html.escape(printable(self.title))}</b> {bar} {self.done} of {self.total} steps</p>"
        numbers = html_table([("", ""), *metric_lines(self.metrics)]) if self.metrics else ""
        messages = "".join(f"<pre>{html.escape(text)}</pre>" for text in self.messages[-MAX_MESSAGES:])
        table = responses_table(self.rows) if self.rows else ""
        return f"<div>{head}{curves(self.lines)}{numbers}{table}{messages}</div>"

    def draw(self) -> None:
        from IPython.display import HTML, display

        self.updated_at = time.monotonic()
        content = HTML(self.html())
        if self.handle is None:
            self.handle = display(content, display_id=True)
        else:
            self.handle.update(content)


def default_display() -> Display:
    """Return a display for this process: for a notebook, for a terminal, or lines for a pipe."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return NotebookDisplay()
    return TerminalDisplay() if sys.stderr.isatty() else LineDisplay()
