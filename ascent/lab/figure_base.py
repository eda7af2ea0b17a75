"""A figure: controls, and a function from their state, a query string, to every number and text that the page draws."""

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
    """Where only some numbers make sense: exactly these."""
    kind: str = "slider"

    def read(self, text: str) -> Real:
        whole = float(self.step).is_integer() and float(self.low).is_integer()
        try:
            value: Real = int(text) if whole else float(text)
        except ValueError:
            raise ConfigError(f"{self.name}={text}: a {'whole ' if whole else ''}number is needed") from None
        if self.values and value not in self.values:
            raise ConfigError(f"{self.name}={text}: one of {', '.join(f'{v:g}' for v in self.values)}")
        if not (math.isfinite(value) and self.low <= value <= self.high):
            raise ConfigError(f"{self.name}={text}: it lies between {self.low:g} and {self.high:g}")
        return value


@dataclass(frozen=True)
class Choice:
    """One of a few names."""

    name: str
    label: str
    default: str
    options: tuple[tuple[str, str], ...]
    """Names, and how they are shown."""
    help: str = ""
    kind: str = "choice"

    def read(self, text: str) -> str:
        known = [name for name, _ in self.options]
        if text not in known:
            raise ConfigError(f"{self.name}={text}: there are {', '.join(known)}.{nearest(text, known)}")
        return text


@dataclass(frozen=True)
class Name:
    """The name of something on this machine, such as a run; it is part of the address and has no control."""

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
    """All that a figure shows in one state."""

    texts: dict[str, str]
    """Every number in words, by the name that a lesson binds to."""
    drawing: dict[str, Any]
    """What the script draws, in the coordinates of its axes."""
    tables: list[DataTable]
    snippet: str
    """Python that computes the same."""
    command: str = ""
    """The same on the command line, where there is one."""


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    about: str
    """One sentence: what is seen here."""
    controls: tuple[Control, ...]
    compute: Callable[[ControlState, Path | None], Look]
    keys: tuple[tuple[str, str], ...] = ()
    """What keys do here, beside those of every page."""
    place: int = 100
    """Where it stands among the figures; those with the same place are sorted by name."""

    def read(self, query: str | Mapping[str, str]) -> ControlState:
        """The state of a query string; what it does not name is at its default. Unknown names are refused."""
        given = dict(parse_qsl(query, keep_blank_values=True)) if isinstance(query, str) else dict(query)
        known = {control.name: control for control in self.controls}
        for key in given:
            if key not in known:
                raise ConfigError(f"{key}: the figure {self.name} has no such control.{nearest(key, known)}")
        return {n: c.read(given[n]) if n in given else c.default for n, c in known.items()}

    def look(self, query: str | Mapping[str, str] = "", runs: Path | None = None) -> dict[str, Any]:
        state = self.read(query)
        return {"figure": self.name, "state": state, **asdict(self.compute(state, runs))}

    def about_itself(self) -> dict[str, Any]:
        """What the page has to know to draw the controls."""
        about = {name: getattr(self, name) for name in ("name", "title", "about", "keys")}
        controls = [asdict(control) for control in self.controls]
        return about | {"controls": controls, "script": f"/static/figures/{self.name}/figure.js"}


def signed(value: Real, digits: int = 3) -> str:
    """A number with a true minus sign, and no −0."""
    text = f"{value:.{digits}f}"
    return "0" + text[2:] if float(text) == 0 and text.startswith("-") else text.replace("-", "−")


def short(value: Real) -> str:
    """As many digits as it needs, at most four that count."""
    return f"{value:.4g}".replace("-", "−")
