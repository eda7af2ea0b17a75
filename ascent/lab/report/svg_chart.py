"""Number formats, and charts as SVG. Shapes have CSS classes instead of colors, for light and dark themes."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import IdentityTransform

from ascent.lab.page_base import TEMPLATES, displayable
from ascent.runs.display.plots import draw_line

WIDTH, HEIGHT = 480, 210
LEFT, RIGHT, TOP, BOTTOM = 50, 66, 12, 26
GAP = 14.0
"""Minimum distance between two labels."""
FEW = 40
"""Maximum number of points for which each gets a dot."""
HUGE, TINY = 1e150, 1e-290
"""Limits of plotted values, within which differences stay finite."""
STYLES = 8
"""Numbers of colors and dashes in the style sheet."""
PATH = Markup('<path d="{}" class="{}"/>')
TEXT = Markup('<text x="{:.1f}" y="{:.1f}" dy="{}" class="{}">{}</text>')
CROSS = Markup('<path d="M{:.1f} {}l8 8m-8 0l8 -8" class="bad"><title>{}</title></path>')
SVG = Markup('<svg viewBox="0 0 {} {}" role="img" class="chart"><title>{}</title>{}</svg>')
LETTERS = {1: "M", 2: "L", 3: "Q", 4: "C", 79: "Z"}
ANCHORS = {"right": ["end"], "center": ["middle"]}
Number = int | float


def real(value: Any) -> Number | None:
    """Return the value if it is a finite number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def shown(value: Any, digits: int = 4) -> str:
    """Format a number with four significant digits, thousands separators and a minus sign."""
    if real(value) is None:
        return "·" if value is None else str(value)
    size = abs(value)
    if size and (size < 1e-4 or size >= 1e7):
        text = f"{value:.2e}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    elif value == int(value) or size >= 1000 or float(f"{size:.{digits}g}") >= 1000:
        text = f"{round(value):,}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "−")


def percent(value: Any) -> str:
    """Format a share: 0.123 as 12.3%."""
    return shown(value) if real(value) is None else shown(float(f"{100 * value:.3g}"), 3) + "%"


def number(value: Any, share: bool = False) -> str:
    """Return a number as HTML; its `value` attribute has the exact number of the file."""
    if real(value) is None:
        return shown(value)
    return Markup('<data value="{}">{}</data>').format(exact(value), percent(value) if share else shown(value))


def exact(value: Number) -> str:
    """Format a number as JSON does, whole numbers without a decimal point."""
    return json.dumps(int(value) if float(value).is_integer() and abs(value) < 1e15 else value)


def plural(count: int, one: str) -> str:
    """3 groups, 1 group."""
    return f"{shown(count)} {one}{'s' * (count != 1)}"


TEMPLATES.filters |= {"shown": shown, "number": number, "plural": plural}


# ---- charts -----------------------------------------------------------------------------------------------


@dataclass
class Series:
    """One curve. None means not measured; low and high are set if a point aggregates several steps."""

    label: str
    x: Sequence[Number]
    mean: Sequence[Number | None]
    low: Sequence[Number | None] | None = None
    high: Sequence[Number | None] | None = None
    nonfinite: Sequence[Sequence[Any]] = field(default_factory=list)
    """Pairs (step, "nan" or "inf") of numbers that were not finite."""
    end: Number | None = None
    """The last value, if the last point is a mean."""
    share: bool = False
    """Whether the values are between 0 and 1 and are shown in percent."""
    color: int = 0
    """Index of its color and dash in the table of metrics."""

    @property
    def style(self) -> str:
        return f"c{self.color % STYLES}"

    @cached_property
    def measured(self) -> np.ndarray:
        """Return [x, mean, low, high] of the measured points."""
        rows = (self.x, self.mean, self.low or self.mean, self.high or self.mean)
        table = np.array([[np.nan if v is None else v for v in row] for row in rows], float).reshape(4, -1)
        return np.clip(table[:, ~np.isnan(table[1])], -HUGE, HUGE)

    def ends(self) -> list[str]:
        """Return the first and the last value as text; empty if nothing was measured."""
        known = [y for y in self.mean if y is not None]
        values = [known[0], known[-1] if self.end is None else self.end] if known else []
        return [percent(value) if self.share else shown(value, 3) for value in values]


class StyledSvg(RendererBase):
    """A matplotlib renderer that writes paths and texts as SVG elements with CSS classes."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Markup] = []
        self.classes = [""]

    def open_group(self, s: str, gid: str | None = None) -> None:
        self.classes.append(gid or self.classes[-1])

    def close_group(self, s: str) -> None:
        self.classes.pop()

    def get_canvas_width_height(self) -> tuple[float, float]:
        return WIDTH, HEIGHT

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        return 6.5 * len(s), 9.0, 2.0

    def draw_path(self, gc: Any, path: Any, transform: Any, rgbFace: Any = None) -> None:
        steps = []
        for points, code in path.iter_segments(transform, simplify=False, curves=True):
            pairs = [f"{x:.1f} {HEIGHT - y:.1f}" for x, y in points.reshape(-1, 2)] if code != 79 else []
            steps.append(LETTERS[code] + " ".join(pairs))
        if steps and self.classes[-1]:
            self.parts.append(PATH.format("".join(steps), self.classes[-1]))

    def draw_text(self, *given: Any, mtext: Any, **_: Any) -> None:  # type: ignore[override]
        """Draw a text at its anchor, because the browser's font has another width than matplotlib's."""
        x, y = mtext.get_transform().transform(mtext.get_unitless_position())
        class_ = " ".join([self.classes[-1] or "tick", *ANCHORS.get(mtext.get_ha(), ())])
        dy = "0.33em" if mtext.get_va() != "top" else "0.9em"
        self.parts.append(TEXT.format(x, HEIGHT - y, dy, class_, given[3]))


def y_limits(series: Sequence[Series], share: bool) -> tuple[float, float]:
    """Return the limits of the y axis: from 0 if that is near, and at most slightly above 1 for shares."""
    values = np.concatenate([np.empty(0), *(s.measured[1:].ravel() for s in series)])
    values = values[~np.isnan(values)]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if share and low >= 0 and high <= 1:
        return 0.0, 1.12 * high if TINY < high <= 0.5 else 1.02
    if 0 <= low <= 0.6 * high or low == high > 0:
        low = 0.0
    span = high - low
    pad = 0.06 * span if span > TINY else max(0.5 * abs(high), TINY) if abs(high) > TINY else 1.0
    return (low if low == 0.0 else low - pad), high + pad


def chart(
    title: str, series: Sequence[Series], share: bool = False, ends: tuple[Number, Number] | None = None
) -> Markup:
    """Return the SVG of some curves over steps: lines, bands from minimum to maximum, and last values."""
    axis = _axes()
    xs = [float(x) for s in series for x in s.measured[0]] or [0.0]
    left, right = ends or (min(xs), max(xs))
    axis.set_xlim(*((left, right) if right > left else (left - 0.5, left + 0.5)))
    axis.set_ylim(*y_limits(series, share))
    shares = bool(series) and all(s.share for s in series)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda y, _: percent(round(y, 12)) if shares else tick_label(y)))
    for s in series:
        x, mean, low, high = s.measured
        draw_line(axis, x, mean, {"color": "k", "marker": "", "gid": f"line {s.style}"}, (low, high))
        if len(x):
            axis.collections[-1].set_gid(f"band {s.style}")
            axis.collections[-1].set_visible(s.low is not None)
        if len(x) <= FEW:
            axis.scatter(x, mean, s=20, gid=f"dot {s.style}")
    _last_values(axis, series)
    renderer = StyledSvg()
    axis.figure.draw(renderer)
    crosses = [  # at the upper edge where a number was not finite
        CROSS.format(
            axis.transData.transform((step, 0.0))[0] - 4,
            TOP,
            displayable(f"step {step:g}: {s.label} is {kind}"),
        )
        for s in series
        for step, kind in s.nonfinite
        if axis.get_xlim()[0] <= step <= axis.get_xlim()[1]
    ]
    for artist in [*axis.lines, *axis.collections, *axis.texts]:
        artist.remove()
    words = [f"{s.label} from {' to '.join(s.ends())}" for s in series if s.ends()] or ["nothing was measured"]
    in_words = displayable(f"{title}: {'; '.join(words)}")
    return SVG.format(WIDTH, HEIGHT, in_words, Markup("").join([*renderer.parts, *crosses]))


@lru_cache(maxsize=1)
def _axes() -> Any:
    """Return axes, which all charts reuse because making them is slow."""
    fig = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)
    axis = fig.add_axes((LEFT / WIDTH, BOTTOM / HEIGHT, 1 - (LEFT + RIGHT) / WIDTH, 1 - (TOP + BOTTOM) / HEIGHT))
    axis.patch.set_visible(False)
    axis.figure.patch.set_visible(False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0, pad=7)
    axis.grid(axis="y", gid="grid")
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tick_label(x)))
    return axis


def _last_values(axis: Any, series: Sequence[Series]) -> None:
    """Draw the last value of each curve at its end, without overlap."""
    known = [s for s in series if s.measured.size]
    heights = {n: float(axis.transData.transform((0.0, s.measured[1][-1]))[1]) for n, s in enumerate(known)}
    order = sorted(heights, key=lambda n: heights[n])
    for below, n in pairwise(order):
        heights[n] = max(heights[n], heights[below] + GAP)
    highest = float(HEIGHT - TOP)
    for n in reversed(order):
        heights[n] = min(heights[n], highest)
        highest = heights[n] - GAP
    for n, s in enumerate(known):
        beside = {"transform": IdentityTransform(), "va": "center", "gid": f"value {s.style}"}
        axis.text(WIDTH - RIGHT + 6, heights[n], s.ends()[-1], **beside)


def tick_label(value: Number) -> str:
    """Format a tick label: 20k for 20,000."""
    if abs(value) < 1e-12:
        return "0"
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < size * 1e3 and (size > 1e3 or abs(value) >= 1e4):
            return shown(round(value / size, 6), 4) + sign
    return shown(float(f"{value:.6g}"), 4)
