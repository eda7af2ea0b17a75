"""HTML in which every text is escaped: only what `tag` itself made is markup."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable
from typing import Any

VOID = frozenset({"br", "input", "meta"})
DRAWN = frozenset({"circle", "path"})
"""Parts of an SVG, which close themselves where they hold nothing."""
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
"""Control characters, each as the sign that stands for it."""


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *inner: Any, **attributes: Any) -> Markup:
    """<name attribute="…">inner</name>. `class_` is class and `data_x` data-x; None and False leave one out."""
    head = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        head.append(key if value is True else f'{key}="{escaped(value)}"')
    opened = " ".join(head)
    if name in VOID or (name in DRAWN and not inner):
        return Markup(f"<{opened}>" if name in VOID else f"<{opened}/>")
    return Markup(f"<{opened}>{joined(inner)}</{name}>")


def joined(parts: Iterable[Any]) -> Markup:
    """Parts one after the other: markup as it is, lists opened, all else as text."""
    found: list[str] = []
    for part in parts:
        if isinstance(part, Markup):
            found.append(part)
        elif isinstance(part, list | tuple):
            found.append(joined(part))
        elif part is not None and part is not False:
            found.append(escaped(part))
    return Markup("".join(found))


def escaped(value: Any) -> str:
    """Any text as HTML shows it, with signs for control characters and for halves of a character."""
    text = str(value).replace("\r\n", "\n").translate(VISIBLE)
    return html.escape(text.encode("utf-8", "replace").decode())


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


def number(value: Any, share: bool = False) -> Markup:
    """A number as people read it, with exactly what the file holds in its `value`."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return joined([shown(value)])
    return tag("data", percent(value) if share else shown(value), value=exact(value))


def exact(value: Any) -> str:
    """A number as JSON has it; one that is whole without its point."""
    whole = isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) < 1e15
    return json.dumps(int(value) if whole else value)


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]], caption: str | None = None, class_: str = "") -> Markup:
    """A table that scrolls within itself where it is too wide; the first cell of a row is its head."""
    body = [
        tag("tr", *(tag("th", cell, scope="row") if i == 0 else tag("td", cell) for i, cell in enumerate(row)))
        for row in rows
    ]
    names = list(head)
    top = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in names))) if names else None
    made = tag("table", caption and tag("caption", caption), top, tag("tbody", *body), class_=class_ or None)
    return tag("div", made, class_="scroll", role="region", tabindex="0", aria_label=caption or "table")
