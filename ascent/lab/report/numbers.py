"""Numbers as people read them."""

from __future__ import annotations

import json
import math
from typing import Any

from markupsafe import Markup

from ascent.lab.templates import TEMPLATES


def shown(value: Any, digits: int = 4) -> str:
    """A number as the pages show it: four digits that matter, 15,100 with its comma, and a minus that is one."""
    if value is None:
        return "·"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and (size < 1e-4 or size >= 1e7):
        text = f"{value:.2e}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    elif value == int(value) or size >= 1000 or float(f"{size:.{digits}g}") >= 1000:
        text = f"{round(value):,}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "−")


def percent(value: Any) -> str:
    """A share: 0.123 as 12.3%."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return shown(value)
    return shown(float(f"{100 * value:.3g}"), 3) + "%"


def number(value: Any, share: bool = False) -> str:
    """A number as people read it, with exactly what the file holds in its `value`."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return shown(value)
    return Markup('<data value="{}">{}</data>').format(exact(value), percent(value) if share else shown(value))


def exact(value: Any) -> str:
    """A number as JSON has it; one that is whole without its point."""
    whole = isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e15
    return json.dumps(int(value) if whole else value)


def plural(count: int, one: str) -> str:
    """3 groups, 1 group."""
    return f"{shown(count)} {one}{'s' * (count != 1)}"


TEMPLATES.filters |= {"shown": shown, "number": number, "plural": plural}
