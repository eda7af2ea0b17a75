"""The base of figures: controls, and a function from their state to all numbers and texts of the figure."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest

ControlState = dict[str, Any]
Real = int | float


@dataclass(frozen=True)
class Slider:
    """A number between two bounds, in steps."""

    name: str
    label: str
    default: Real
    low: Real
    high: Real
    step: Real
    help: str = ""
    values: tuple[Real, ...] = ()
    """The allowed values, if they are not evenly spaced."""
    kind: str = "slider"

    def read(self, text: str) -> Real:
        whole = float(self.step).is_integer() and float(self.low).is_integer()
        try:
            value: Real = int(text) if whole else float(text)
        except ValueError:
            raise ConfigError(f"{self.name}={text}: set a {'whole ' if whole else ''}number") from None
        if self.values and value not in self.values:
            raise ConfigError(f"{self.name}={text}: set one of {', '.join(f'{v:g}' for v in self.values)}")
        if not (math.isfinite(value) and self.low <= value <= self.high):
            raise ConfigError(f"{self.name}={text}: set a number between {self.low:g} and {self.high:g}")
        return value


@dataclass(frozen=True)
class Choice:
    """One of several names."""

    name: str
    label: str
    default: str
    options: tuple[tuple[str, str], ...]
    """Names and their labels."""
    help: str = ""
    kind: str = "choice"

    def read(self, text: str) -> str:
        known = [name for name, _ in self.options]
        if text not in known:
            raise ConfigError(f"{self.name}={text}: there are {', '.join(known)}.{nearest(text, known)}")
        return text


@dataclass(frozen=True)
class Name:
    """The name of something on this machine, such as a run. It is part of the address and has no control."""

    name: str
    label: str
    default: str = ""
    help: str = ""
    kind: str = "name"

    def read(self, text: str) -> str:
        if text and not NAME.fullmatch(text):
            raise ConfigError(
                f"{self.name}={text}: a name has letters, digits, dots, dashes, plus signs and underscores"
            )
        return text


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,120}")
Control = Slider | Choice | Name


@dataclass(frozen=True)
class DataTable:
    """The numbers behind a chart."""

    caption: str
    head: tuple[str, ...]
    rows: list[list[str]]


@dataclass(frozen=True)
class Look:
    """Everything that a figure shows in one state."""

    texts: dict[str, str]
    """Every number as text, by the name that lessons use."""
    drawing: dict[str, Any]
    """The data that the script draws, in the coordinates of its axes."""
    tables: list[DataTable]
    snippet: str
    """Python that computes the same."""
    command: str = ""
    """The same on the command line, if possible."""


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    about: str
    """One sentence that describes the figure."""
    controls: tuple[Control, ...]
    compute: Callable[[ControlState, Path | None], Look]
    keys: tuple[tuple[str, str], ...] = ()
    """Keyboard shortcuts, besides those of every page."""
    place: int = 100
    """Position among the figures; ties are sorted by name."""

    def read(self, query: str | Mapping[str, str]) -> ControlState:
        """Parse the state of a query string, with defaults for missing controls. Unknown names are refused."""
        values = dict(parse_qsl(query, keep_blank_values=True)) if isinstance(query, str) else dict(query)
        known = {control.name: control for control in self.controls}
        for key in values:
            if key not in known:
                raise ConfigError(f"{key}: the figure {self.name} has no such control.{nearest(key, known)}")
        return {n: c.read(values[n]) if n in values else c.default for n, c in known.items()}

    def look(self, query: str | Mapping[str, str] = "", runs: Path | None = None) -> dict[str, Any]:
        state = self.read(query)
        return {"figure": self.name, "state": state, **asdict(self.compute(state, runs))}

    def about_itself(self) -> dict[str, Any]:
        """Return what the page needs to draw the controls."""
        about = {name: getattr(self, name) for name in ("name", "title", "about", "keys")}
        controls = [asdict(control) for control in self.controls]
        return about | {"controls": controls, "script": f"/static/figures/{self.name}/figure.js"}


def signed(value: Real, digits: int = 3) -> str:
    """Format a number with a minus sign (not a hyphen) and without −0."""
    text = f"{value:.{digits}f}"
    return "0" + text[2:] if float(text) == 0 and text.startswith("-") else text.replace("-", "−")


def short(value: Real) -> str:
    """Format a number with at most four significant digits."""
    return f"{value:.4g}".replace("-", "−")
