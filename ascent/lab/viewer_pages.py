"""The viewer's pages, as HTML: a head, an empty place, and the script that fills it from `/api/view/…`."""

from __future__ import annotations

from pathlib import Path

from ascent.lab.pages import FOOT, head

STATIC = Path(__file__).parent / "static" / "viewer"
PAGES = {"runs": "Runs", "run": "A run", "completions": "Completions", "compare": "Compare runs"}
"""The path of each page, which is also the name of its script and style sheet, with its title until these know."""


def shell(name: str) -> str:
    """The page of that path. What it shows is in its address, which its script reads."""
    sheets = ["/static/viewer.css", *(f"/static/viewer/{path.name}" for path in STATIC.glob(f"{name}.css"))]
    more = "".join(f'<link rel="stylesheet" href="{sheet}">\n' for sheet in sheets)
    more += f'<script type="module" src="/static/viewer/{name}.js"></script>\n'
    place = f'<main id="main" class="view view-{name}"><p class="note">This page needs JavaScript.</p></main>'
    return head(PAGES[name], "runs", more) + place + FOOT
