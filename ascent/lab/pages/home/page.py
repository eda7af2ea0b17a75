"""The first page: the figures, each with its lessons, and the lessons without one."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from ascent.lab.page import Lab, html_route, page_html
from ascent.lab.pages.lesson.lessons import Lesson, read_lessons


def routes(_: Lab) -> list[BaseRoute]:
    def contents(_: Request) -> str:
        lessons: dict[str | None, list[Lesson]] = {}
        for lesson in read_lessons():
            lessons.setdefault(lesson.figure, []).append(lesson)
        return page_html("home", "Contents", "pages/home/page.html", lessons=lessons)

    return [Route("/", html_route(contents))]
