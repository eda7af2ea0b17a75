"""Text set for a terminal: paragraphs and tables."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any


def width() -> int:
    """Columns of the terminal; plenty where there is none."""
    return shutil.get_terminal_size(fallback=(160, 24)).columns


def wrapped(text: str, indent: int = 0) -> str:
    """A paragraph, its later lines set in."""
    return textwrap.fill(text, min(width(), 120), subsequent_indent=" " * indent, break_long_words=False)


def cell_text(value: Any) -> str:
    """A cell of a table: 0.250, 12, or a dot where there is nothing."""
    return "·" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns set flush right (the first one left if it holds words)."""
    words = any(row[0] and not row[0].replace(".", "").lstrip("-").isdigit() for row in rows)
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "  ".join(
            c.ljust(w) if i == 0 and words else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )

    return [line(head), *(line(row) for row in rows)]
