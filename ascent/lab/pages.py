"""The lab's pages, as HTML. What comes from elsewhere is escaped; there is no inline script or style."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from ascent.lab.figures import FIGURES
from ascent.lab.lessons_page import Lesson, read_lessons, render
from ascent.types import Refused

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · Ascent lab</title>
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/static/vendor/uplot.css">
<link rel="stylesheet" href="/static/base.css">
{more}<script type="module" src="/static/app.js"></script>
</head>
<body>
<a class="skip" href="#main">Skip to the text</a>
<header class="top">
<a class="brand" href="/"><img src="/static/icon.svg" alt="" width="22" height="22">Ascent lab</a>
<nav aria-label="Figures"><ol>{figures}</ol></nav>
<a class="to-runs" href="/runs"{here}>Runs</a>
<div class="tools"><button type="button" id="theme" aria-label="Light or dark"></button>
<button type="button" id="help" aria-label="Keys">?</button></div>
</header>
"""
FOOT = """<dialog id="keys" aria-labelledby="keys-title"></dialog>
</body>
</html>
"""


SHEET = '<link rel="stylesheet" href="/static/figures.css">\n'


def head(title: str, current: str | None, more: str = SHEET) -> str:
    """The top of a page; `current` is the figure that it shows, or "runs"; `more` is HTML for its head."""
    links = []
    for number, (name, figure) in enumerate(FIGURES.items(), 1):
        here = ' aria-current="page"' if name == current else ""
        links.append(f'<li><a href="/figure/{name}"{here}><span>{number}</span> {html.escape(figure.title)}</a></li>')
    here = ' aria-current="page"' if current == "runs" else ""
    return HEAD.format(title=html.escape(title), figures="".join(links), more=more, here=here)


def contents() -> str:
    """The first page: the five figures, each with its lessons."""
    lessons, cards = read_lessons(), []
    for number, (name, figure) in enumerate(FIGURES.items(), 1):
        own = "".join(_item(lesson) for lesson in lessons if lesson.figure == name)
        cards.append(
            f'<section class="card"><h2><a href="/figure/{name}"><span class="number">{number}</span>'
            f"{html.escape(figure.title)}</a></h2><p>{html.escape(figure.about)}</p>"
            + (f'<ul class="lessons">{own}</ul>' if own else "")
            + "</section>"
        )
    rest = "".join(_item(lesson) for lesson in lessons if lesson.figure is None)
    more = f'<section class="reading"><h2>To read</h2><ul class="lessons">{rest}</ul></section>'
    return (
        head("Contents", None)
        + '<main id="main" class="contents"><h1>See policy gradients work</h1>'
        + '<p class="lead">Five live figures with short lessons beside them. Every number is computed by the library '
        + "on this machine, as you move a control; every state has an address, and Python that does the same.</p>"
        + f'<div class="cards">{"".join(cards)}</div>{more if rest else ""}</main>'
        + FOOT
    )


def _item(lesson: Lesson) -> str:
    return f'<li><a href="/lesson/{lesson.slug}">{html.escape(lesson.title)}</a></li>'


def home_of(figure: str) -> Lesson | None:
    """The lesson that a figure opens with: the first that names it."""
    return next((lesson for lesson in read_lessons() if lesson.figure == figure), None)


def lesson_page(slug: str, query: str, runs: Path) -> str:
    lessons = read_lessons()
    lesson = next((lesson for lesson in lessons if lesson.slug == slug), None)
    if lesson is None:
        raise Refused(f"there is no lesson {slug[:80]}")
    return page(lesson, lessons, query, runs)


def figure_page(name: str, query: str, runs: Path) -> str:
    if name not in FIGURES:
        raise Refused(f"there is no figure {name[:80]}")
    about = FIGURES[name]
    return page(home_of(name) or Lesson(name, about.title, name, "", about.about + "\n"), read_lessons(), query, runs)


def page(lesson: Lesson, lessons: list[Lesson], query: str, runs: Path) -> str:
    """A lesson with its figure, in the state of the address; a state that cannot be is said, and left out."""
    slugs, look, error = [other.slug for other in lessons], {}, ""
    if lesson.figure is not None:
        figure = FIGURES[lesson.figure]
        try:
            look = figure.look(query or lesson.state, runs)
        except Refused as refused:
            look, error = figure.look(lesson.state, runs), str(refused)
    article = (
        f'<article class="lesson" id="main" aria-label="Lesson"><h1>{html.escape(lesson.title)}</h1>'
        f"{render(lesson, look.get('said', {}), slugs)}{_onward(lesson, lessons)}</article>"
    )
    if lesson.figure is None:
        return head(lesson.title, None) + f'<main class="page alone">{article}</main>' + FOOT
    given = {"about": FIGURES[lesson.figure].about_itself(), "look": look, "start": _start(lesson), "error": error}
    figure_box = (
        f'<section class="figure" id="figure" aria-label="Figure: {html.escape(FIGURES[lesson.figure].title)}" '
        f'data-given="{html.escape(json.dumps(given))}"><p class="note">The figure needs JavaScript.</p></section>'
    )
    return head(lesson.title, lesson.figure) + f'<main class="page">{article}{figure_box}</main>' + FOOT


def _start(lesson: Lesson) -> dict[str, Any]:
    assert lesson.figure is not None
    return FIGURES[lesson.figure].read(lesson.state)


def _onward(lesson: Lesson, lessons: list[Lesson]) -> str:
    """Links to the lessons before and after this one."""
    slugs = [other.slug for other in lessons]
    if lesson.slug not in slugs:
        return ""
    here, links = slugs.index(lesson.slug), ""
    if here:
        links += f'<a class="back" href="/lesson/{slugs[here - 1]}">{html.escape(lessons[here - 1].title)}</a>'
    if here + 1 < len(slugs):
        links += f'<a class="on" href="/lesson/{slugs[here + 1]}">{html.escape(lessons[here + 1].title)}</a>'
    return f'<nav class="onward" aria-label="Lessons">{links}</nav>'


def address(path: str, state: dict[str, Any]) -> str:
    return f"{path}?{urlencode(state)}"
