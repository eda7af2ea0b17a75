"""The viewer's pages, as HTML: a head, an empty place, and the script that fills it from `/api/view/…`."""

from __future__ import annotations

from ascent.lab.pages import FOOT, head

PAGES = {"runs": "Runs", "run": "A run", "completions": "Completions", "compare": "Compare runs"}
"""The path of each page and the name of its script in static/viewer/, with its title until the script knows it."""

MORE = """<link rel="stylesheet" href="/static/viewer.css">
<link rel="stylesheet" href="/static/viewer/{name}.css">
<script type="module" src="/static/viewer/{name}.js"></script>
"""


def shell(name: str) -> str:
    """The page of that path. What it shows is in its address, which its script reads."""
    place = f'<main id="main" class="view view-{name}"><p class="note">This page needs JavaScript.</p></main>'
    return head(PAGES[name], "runs", MORE.format(name=name)) + place + FOOT
