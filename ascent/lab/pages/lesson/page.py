"""A lesson with its figure beside it, in the state that the address names."""

from __future__ import annotations

import json
from typing import Any

from markupsafe import Markup
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from ascent.core.types import Refused
from ascent.lab.figure import Figure
from ascent.lab.figures import all_figures
from ascent.lab.folders import assets_of
from ascent.lab.page import Lab, html_route, json_route, page_html
from ascent.lab.pages.lesson.lessons import Lesson, read_lessons, render


def routes(lab: Lab) -> list[BaseRoute]:
    def lesson_page(request: Request) -> str:
        slug, lessons = request.path_params["slug"], read_lessons()
        lesson = next((lesson for lesson in lessons if lesson.slug == slug), None)
        if lesson is None:
            raise Refused(f"there is no lesson {slug[:80]}")
        return _lesson_with_figure(lesson, lessons, request.url.query, lab)

    def figure_page(request: Request) -> str:
        """The first lesson that names the figure, or else the figure alone."""
        figure, lessons = figure_of(request), read_lessons()
        alone = Lesson(figure.name, figure.title, figure.name, "", figure.about + "\n")
        first = next((lesson for lesson in lessons if lesson.figure == figure.name), alone)
        return _lesson_with_figure(first, lessons, request.url.query, lab)

    def look(request: Request) -> dict[str, Any]:
        return figure_of(request).look(request.url.query, lab.runs)

    return [
        Route("/lesson/{slug}", html_route(lesson_page)),
        Route("/figure/{name}", html_route(figure_page)),
        Route("/api/figure/{name}", json_route(look)),
    ]


def figure_of(request: Request) -> Figure:
    name = request.path_params["name"]
    if name not in all_figures():
        raise Refused(f"there is no figure {name[:80]}")
    return all_figures()[name]


def _lesson_with_figure(lesson: Lesson, lessons: list[Lesson], query: str, lab: Lab) -> str:
    """A lesson with its figure; a state that cannot be is left out, and the page says why."""
    figure = None if lesson.figure is None else all_figures()[lesson.figure]
    look, error = {}, ""
    if figure is not None:
        try:
            look = figure.look(query or lesson.state, lab.runs)
        except Refused as refused:
            look, error = figure.look(lesson.state, lab.runs), str(refused)
    slugs, values = [other.slug for other in lessons], dict[str, Any]()
    text = render(lesson, look.get("texts", {}), slugs)
    if lesson.slug in slugs:
        here = slugs.index(lesson.slug)
        values = {"before": lessons[here - 1] if here else None, "after": dict(enumerate(lessons)).get(here + 1)}
    styles = []
    if figure is not None:
        start = {"about": figure.about_itself(), "look": look, "start": figure.read(lesson.state), "error": error}
        values |= {"figure": figure, "start": json.dumps(start), "current": figure.name}
        own = [asset for asset in assets_of("figures", figure.name) if asset.endswith(".css")]
        styles = ["/static/figures.css", *own]
    return page_html("lesson", lesson.title, "pages/lesson/page.html", styles, text=Markup(text), **values)
