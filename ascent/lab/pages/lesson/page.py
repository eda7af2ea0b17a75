r"""A lesson with its figure beside it, in the state that the address names.

A lesson is Markdown with formulas in LaTeX. Numbers in its text are bound to the figure; links set the figure's state.

---
title: The clip            figure: clip            state: A=0.5&ratio=1.35       (one a line)
---
The objective is {{objective}}, at $\rho = {{ratio}}$. [Put the ratio at 0.65](figure:A=-0.5&ratio=0.65).
> **Predict.** What happens to the gradient?  [See](figure:!A=-0.5&ratio=0.65)
"""

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.lab import assets_of
from ascent.lab.figure_base import Figure
from ascent.lab.figures import all_figures
from ascent.lab.mathml import with_mathematics
from ascent.lab.page_base import Lab, json_route, render_page

FOLDER = Path(__file__).parents[2] / "lessons"
LONG = 5
"""Maximum number of lines of code that are not folded."""
CODE = re.compile(r'<pre tabindex="0"><code class="language-python">.*?</code></pre>', re.DOTALL)
BOUND = re.compile(r"\{\{\s*([A-Za-z0-9_.]+)\s*\}\}")


@dataclass(frozen=True)
class Lesson:
    slug: str
    title: str
    figure: str | None
    """The figure beside the text; None: text only."""
    state: str
    """The initial state of the figure."""
    text: str
    """Markdown."""


def routes(lab: Lab) -> list[BaseRoute]:
    def lesson_page(request: Request) -> Response:
        slug, lessons = request.path_params["slug"], read_lessons()
        lesson = next((lesson for lesson in lessons if lesson.slug == slug), None)
        if lesson is None:
            raise ConfigError(f"there is no lesson {slug[:80]}")
        return _lesson_with_figure(request, lesson, lessons, lab)

    def figure_page(request: Request) -> Response:
        """Return the first lesson with this figure, or a page with the figure only."""
        figure, lessons = figure_of(request), read_lessons()
        alone = Lesson(figure.name, figure.title, figure.name, "", figure.about + "\n")
        first = next((lesson for lesson in lessons if lesson.figure == figure.name), alone)
        return _lesson_with_figure(request, first, lessons, lab)

    return [
        Route("/lesson/{slug}", lesson_page),
        Route("/figure/{name}", figure_page),
        Route("/api/figure/{name}", json_route(lambda request: figure_of(request).look(request.url.query, lab.runs))),
    ]


def figure_of(request: Request) -> Figure:
    name = request.path_params["name"]
    if name not in all_figures():
        raise ConfigError(f"there is no figure {name[:80]}")
    return all_figures()[name]


def _lesson_with_figure(request: Request, lesson: Lesson, lessons: list[Lesson], lab: Lab) -> Response:
    """Render a lesson with its figure. An invalid state is ignored, and the page shows the error."""
    look, slugs, values, styles = {}, [other.slug for other in lessons], dict[str, Any](), []
    if lesson.slug in slugs:
        around = [None, *lessons, None]
        here = 1 + slugs.index(lesson.slug)
        values = {"before": around[here - 1], "after": around[here + 1]}
    if lesson.figure is not None:
        figure, error = all_figures()[lesson.figure], ""
        try:
            look = figure.look(request.url.query or lesson.state, lab.runs)
        except ConfigError as refused:
            look, error = figure.look(lesson.state, lab.runs), str(refused)
        start = {"about": figure.about_itself(), "look": look, "start": figure.read(lesson.state), "error": error}
        values |= {"figure": figure, "start": json.dumps(start), "current": figure.name}
        own = [asset for asset in assets_of("figures", figure.name) if asset.endswith(".css")]
        styles = ["/static/figures.css", *own]
    text = Markup(render(lesson, look.get("texts", {}), slugs))
    return render_page(request, "lesson", lesson.title, "pages/lesson/page.html", styles, text=text, **values)


def read_lessons(folder: Path = FOLDER) -> list[Lesson]:
    """Return all lessons in the order of their file names, NN-slug.md."""
    found = [read_lesson(path) for path in sorted(folder.glob("*.md")) if path.stem != "README"]
    if len({lesson.slug for lesson in found}) != len(found):
        raise ConfigError(f"{folder}: two lessons have the same name")
    return found


def read_lesson(path: Path) -> Lesson:
    text, head = path.read_text(), {}
    if text.startswith("---\n"):
        above, _, text = text[4:].partition("\n---\n")
        pairs = (line.partition(":") for line in above.splitlines() if line.strip())
        head = {key.strip(): value.strip() for key, _, value in pairs}
    unknown = set(head) - {"title", "figure", "state"}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ConfigError(f"{path.name}: {names} does not belong in a lesson's head: title, figure, state")
    figure, known = head.get("figure"), all_figures()
    if figure is not None and figure not in known:
        raise ConfigError(f"{path.name}: figure {figure}: there are {', '.join(known)}.{nearest(figure, known)}")
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    title = head.get("title") or (heading[1] if heading else path.stem)
    if heading is not None and not text[: heading.start()].strip():
        text = text[heading.end() :]
    slug = re.sub(r"^\d+[-_]", "", path.stem).replace("_", "-")
    return Lesson(slug, title, figure, head.get("state", ""), text.strip() + "\n")


def render(lesson: Lesson, texts: dict[str, str], slugs: list[str]) -> str:
    """Return the lesson as HTML: raw HTML is escaped, and live numbers come from the figure."""
    parser = with_mathematics(MarkdownIt("commonmark", {"html": False}).enable("table"))
    tokens = parser.parse(lesson.text)
    for i, token in enumerate(tokens):
        if token.type == "blockquote_open":
            quoted = next((inner.content for inner in tokens[i:] if inner.type == "inline"), "")
            if quoted.startswith("**Predict."):
                token.attrSet("class", "predict")
        for child in token.children or ():
            if child.type == "link_open":
                _link(lesson, child, slugs)
    made = parser.renderer.render(tokens, parser.options, {})
    made = made.replace("<table", '<div class="scroll" role="region" aria-label="table" tabindex="0"><table')
    made = made.replace("</table>", "</table></div>")
    made = made.replace("<pre>", '<pre tabindex="0">')

    def folded(match: re.Match[str]) -> str:
        """Fold long code."""
        lines, code = match[0].count("\n"), match[0]
        opening = f'<details class="code"><summary>Python, {lines} lines</summary>{code}</details>'
        return opening if lines > LONG else code

    def bound(match: re.Match[str]) -> str:
        key = match[1]
        if key not in texts:
            raise ConfigError(
                f"lesson {lesson.slug}: {{{{{key}}}}} is nothing that the figure says.{nearest(key, texts)}"
            )
        return f'<output class="bound" data-bind="{key}">{html.escape(texts[key])}</output>'

    return BOUND.sub(bound, CODE.sub(folded, made))


def _link(lesson: Lesson, token: Token, slugs: list[str]) -> None:
    """Resolve a link: figure:… sets the state of the figure, lesson:… opens a lesson, others open a new page."""
    href = str(token.attrs["href"])
    kind, _, rest = href.partition(":")
    if kind == "figure":
        rest = rest.replace("%7B", "{")
        if lesson.figure is None:
            raise ConfigError(f"lesson {lesson.slug}: a link to {href}, but the lesson has no figure")
        fresh, rest = rest.startswith("!"), rest.removeprefix("!")
        all_figures()[lesson.figure].read(rest)
        query = urlencode(parse_qsl(rest, keep_blank_values=True))
        token.attrs = {"href": f"?{query}", "class": "set", "data-set": query, "data-fresh": str(fresh).lower()}
    elif kind == "lesson":
        if rest not in slugs:
            raise ConfigError(f"lesson {lesson.slug}: no lesson {rest}.{nearest(rest, slugs)}")
        token.attrs = {"href": f"../lesson/{rest}"}  # from /lesson/… and /figure/… alike
    elif kind in ("http", "https"):
        token.attrs = {"href": href, "rel": "noreferrer noopener", "target": "_blank"}
