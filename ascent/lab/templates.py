"""Pages as Jinja templates, in which every text is escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
"""Control characters, each as the sign that stands for it."""


def visible(value: Any) -> str:
    """Any text as it can be shown, with signs for control characters and for halves of a character."""
    if value is None or isinstance(value, Markup):
        return value or ""
    text = str(value).replace("\r\n", "\n").translate(VISIBLE)
    return text.encode("utf-8", "replace").decode()


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    finalize=visible,
    trim_blocks=True,
    lstrip_blocks=True,
)
