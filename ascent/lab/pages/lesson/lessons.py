"""Lessons: Markdown with a figure beside it. Numbers in the text are bound to the figure; links set its state.

---
title: The clip            figure: clip            state: A=0.5&ratio=1.35       (one a line)
---
The objective is {{objective}}. [Put the ratio at 0.65](figure:A=-0.5&ratio=0.65).
> **Predict.** What happens to the gradient?  [See](figure:!A=-0.5&ratio=0.65)
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from markdown_it import MarkdownIt
from markdown_it.token import Token

from ascent.core.menu import nearest
from ascent.core.types import Refused
from ascent.lab.figures import all_figures

FOLDER = Path(__file__).parents[2] / "lessons"
LONG = 5
"""Lines of code that are shown without being asked for."""
CODE = re.compile(r'<pre tabindex="0"><code class="language-python">.*?</code></pre>', re.DOTALL)
BOUND = re.compile(r"\{\{\s*([A-Za-z0-9_.]+)\s*\}\}")


@dataclass(frozen=True)
class Lesson:
    slug: str
    title: str
    figure: str | None
    """The figure beside it; None: text alone."""
    state: str
    """The state in which the figure opens on this page."""
    text: str
    """Markdown."""


def read_lessons(folder: Path = FOLDER) -> list[Lesson]:
    """All lessons, in the order of their file names, NN-slug.md."""
    found = [read_lesson(path) for path in sorted(folder.glob("*.md")) if path.stem != "README"]
    if len({lesson.slug for lesson in found}) != len(found):
        raise Refused(f"{folder}: two lessons have the same name")
    return found


def read_lesson(path: Path) -> Lesson:
    text, head = path.read_text(), {}
    if text.startswith("---\n"):
        above, _, text = text[4:].partition("\n---\n")
        head = {
            k.strip(): v.strip() for k, _, v in (line.partition(":") for line in above.splitlines() if line.strip())
        }
    unknown = set(head) - {"title", "figure", "state"}
    if unknown:
        raise Refused(
            f"{path.name}: {', '.join(sorted(unknown))} does not belong in a lesson's head: title, figure, state"
        )
    figure = head.get("figure")
    known = all_figures()
    if figure is not None and figure not in known:
        raise Refused(f"{path.name}: figure {figure}: there are {', '.join(known)}.{nearest(figure, known)}")
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    title = head.get("title") or (heading[1] if heading else path.stem)
    if heading is not None and not text[: heading.start()].strip():
        text = text[heading.end() :]
    slug = re.sub(r"^\d+[-_]", "", path.stem).replace("_", "-")
    return Lesson(slug, title, figure, head.get("state", ""), text.strip() + "\n")


def render(lesson: Lesson, texts: dict[str, str], slugs: list[str]) -> str:
    """The lesson as HTML: raw HTML in it stays text, numbers are filled in from what the figure says."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(lesson.text)
    for i, token in enumerate(tokens):
        if token.type == "blockquote_open" and _inline(tokens[i:]).startswith("**Predict."):
            token.attrSet("class", "predict")
        for child in token.children or ():
            if child.type == "link_open":
                _link(lesson, child, slugs)
    made = parser.renderer.render(tokens, parser.options, {})
    made = made.replace("<table", '<div class="scroll" role="region" aria-label="table" tabindex="0"><table')
    made = made.replace("</table>", "</table></div>")
    made = made.replace("<pre>", '<pre tabindex="0">')
    made = CODE.sub(_folded, made)

    def bound(match: re.Match[str]) -> str:
        key = match[1]
        if key not in texts:
            raise Refused(f"lesson {lesson.slug}: {{{{{key}}}}} is nothing that the figure says.{nearest(key, texts)}")
        return f'<output class="bound" data-bind="{key}">{html.escape(texts[key])}</output>'

    return BOUND.sub(bound, made)


def _folded(match: re.Match[str]) -> str:
    """Long code stands behind a line that opens it: the text goes on."""
    lines = match[0].count("\n")
    if lines <= LONG:
        return match[0]
    return f'<details class="code"><summary>Python, {lines} lines</summary>{match[0]}</details>'


def _inline(tokens: list[Token]) -> str:
    return next((token.content for token in tokens if token.type == "inline"), "")


def _link(lesson: Lesson, token: Token, slugs: list[str]) -> None:
    """figure:… sets the figure's state, lesson:… goes to another lesson, all else is shown by a page of its own."""
    href = str(token.attrs["href"])
    kind, _, rest = href.partition(":")
    if kind == "figure":
        rest = rest.replace("%7B", "{")
        if lesson.figure is None:
            raise Refused(f"lesson {lesson.slug}: a link to {href}, but the lesson has no figure")
        fresh, rest = rest.startswith("!"), rest.removeprefix("!")
        all_figures()[lesson.figure].read(rest)
        query = urlencode(parse_qsl(rest, keep_blank_values=True))
        token.attrs = {"href": f"?{query}", "class": "set", "data-set": query, "data-fresh": str(fresh).lower()}
    elif kind == "lesson":
        if rest not in slugs:
            raise Refused(f"lesson {lesson.slug}: no lesson {rest}.{nearest(rest, slugs)}")
        token.attrs = {"href": f"/lesson/{rest}"}
    elif kind in ("http", "https"):
        token.attrs = {"href": href, "rel": "noreferrer noopener", "target": "_blank"}
