"""Curves as SVG, drawn here: a line for the mean, a band from smallest to largest, ticks, values at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ascent.viewer.report.html import Markup, percent, shown, tag

WIDTH, HEIGHT = 480, 210
LEFT, RIGHT, TOP, BOTTOM = 50, 66, 12, 26
GAP = 14.0
"""The least distance of two labels."""
FEW = 40
"""Up to so many measured points each has a dot of its own."""
HUGE = 1e150
"""Beyond this a curve is drawn at the edge: differences must stay finite."""
Number = int | float
STYLES = 8
"""Colours and dashes that the style sheet has."""


@dataclass
class Series:
    """One curve. None is not measured; low and high are there where a point stands for several steps."""

    label: str
    x: Sequence[Number]
    mean: Sequence[Number | None]
    low: Sequence[Number | None] | None = None
    high: Sequence[Number | None] | None = None
    nonfinite: Sequence[Sequence[Any]] = field(default_factory=list)
    """(step, "nan" or "inf") where a number was not finite."""
    end: Number | None = None
    """The last value, where the last point is a mean."""
    share: bool = False
    """Its numbers lie between 0 and 1, and are said in percent."""

    def say(self, value: Any) -> str:
        return percent(value) if self.share else shown(value, 3)

    def points(self) -> list[tuple[float, float]]:
        return [(float(x), bounded(y)) for x, y in zip(self.x, self.mean, strict=True) if y is not None]

    def band(self) -> list[tuple[float, float, float]]:
        if self.low is None or self.high is None:
            return []
        found = zip(self.x, self.low, self.high, strict=True)
        return [(float(x), bounded(a), bounded(b)) for x, a, b in found if a is not None and b is not None]


def bounded(value: Number) -> float:
    return max(-HUGE, min(HUGE, float(value)))


def ticks(low: Number, high: Number, most: int = 5, whole: bool = False) -> list[float]:
    """Round numbers between two others: multiples of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0:
        return [float(low)]
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * m for m in (1, 2, 5, 10, 20) if span / (size * m) <= most)
    step = max(1.0, step) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(math.floor(high / step + 1e-9) - first + 1)]


def reach(series: Sequence[Series], share: bool) -> tuple[float, float]:
    """The part of the y axis that is drawn: from 0 where that is near, and never far beyond 1 for shares."""
    values = [y for s in series for _, y in s.points()] + [y for s in series for _, *ys in s.band() for y in ys]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if share and low >= 0 and high <= 1:
        return 0.0, 1.12 * high if 0 < high <= 0.5 else 1.02
    if 0 <= low <= 0.6 * high or low == high > 0:
        low = 0.0
    pad = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    return (low if low == 0.0 else low - pad), high + pad


def chart(
    title: str, series: Sequence[Series], share: bool = False, ends: tuple[Number, Number] | None = None
) -> Markup:
    """The picture of some curves over steps."""
    xs = [x for s in series for x, _ in s.points()] or [0.0]
    left, right = ends or (min(xs), max(xs))
    low, high = reach(series, share)

    def sx(x: Number) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((x - left) / (right - left) if right > left else 0.5)

    def sy(y: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)

    parts: list[Any] = [tag("title", said(title, series))]
    shares = bool(series) and all(s.share for s in series)
    base, edge = HEIGHT - BOTTOM, WIDTH - RIGHT
    for y in ticks(low, high):
        at = round(sy(y), 1)
        parts.append(tag("path", d=f"M{LEFT} {at}H{edge}", class_="grid"))
        parts.append(
            tag("text", percent(round(y, 12)) if shares else label(y), x=LEFT - 7, y=at, dy="0.33em", class_="tick end")
        )
    for x in ticks(left, right, 6, whole=True):
        parts.append(tag("text", label(x), x=round(sx(x), 1), y=base + 17, class_="tick middle"))
    parts += [tag("path", d=outline(s, sx, sy), class_=f"band c{i % STYLES}") for i, s in enumerate(series) if s.band()]
    for i, s in enumerate(series):
        points = [(round(sx(x), 1), round(sy(y), 1)) for x, y in s.points()]
        parts.append(tag("path", d=through(points), class_=f"line c{i % STYLES}"))
        if len(points) <= FEW:
            parts += [tag("circle", cx=x, cy=y, r=2.6, class_=f"dot c{i % STYLES}") for x, y in points]
        for x, text in s.nonfinite:
            if left <= x <= right:
                cross = f"M{sx(x) - 4:.1f} {TOP}l8 8m-8 0l8 -8"
                parts.append(tag("path", tag("title", f"step {x:g}: {s.label} is {text}"), d=cross, class_="bad"))
    parts += [
        tag("text", text, x=edge + 6, y=round(y, 1), dy="0.33em", class_=f"value c{i}")
        for i, y, text in labels(series, sy)
    ]
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="chart", xmlns=None)


def through(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points) if points else ""


def outline(series: Series, sx: Any, sy: Any) -> str:
    """Along the largest values, and back along the smallest."""
    found = series.band()
    there = [(round(sx(x), 1), round(sy(b), 1)) for x, _, b in found]
    back = [(round(sx(x), 1), round(sy(a), 1)) for x, a, _ in reversed(found)]
    return through([*there, *back]) + "Z"


def labels(series: Sequence[Series], sy: Any) -> list[tuple[int, float, str]]:
    """The last value of each curve beside its end, none upon another."""
    found = []
    for i, s in enumerate(series):
        if points := s.points():
            found.append([i % STYLES, sy(points[-1][1]), s.say(last(s))])
    found.sort(key=lambda one: one[1])
    for above, one in pairwise(found):
        one[1] = max(one[1], above[1] + GAP)
    lowest = float(HEIGHT - BOTTOM)
    for one in reversed(found):
        one[1] = min(one[1], lowest)
        lowest = one[1] - GAP
    return [(i, y, text) for i, y, text in found]


def last(series: Series) -> Number | None:
    return series.end if series.end is not None else next((y for y in reversed(series.mean) if y is not None), None)


def said(title: str, series: Sequence[Series]) -> str:
    """The picture in words, for who does not see it."""
    words = []
    for s in series:
        known = [y for y in s.mean if y is not None]
        if known:
            words.append(f"{s.label} from {s.say(known[0])} to {s.say(last(s))}")
    return f"{title}: {'; '.join(words)}" if words else f"{title}: nothing was measured"


def label(value: Number) -> str:
    """A tick: 20k for 20,000."""
    if abs(value) < 1e-12:
        return "0"
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < size * 1e3 and (size > 1e3 or abs(value) >= 1e4):
            return shown(round(value / size, 6), 4) + sign
    return shown(float(f"{value:.6g}"), 4)


def swatch(i: int) -> Markup:
    """The line of a series, for its legend."""
    style = f"line c{i % STYLES}"
    return tag("svg", tag("path", d="M0 5H26", class_=style), viewBox="0 0 26 10", class_="swatch", aria_hidden="true")
