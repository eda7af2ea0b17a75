"""The home page: the figures with their lessons, and the other lessons."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ascent.lab.page_base import Lab, render_page
from ascent.lab.pages.lesson.page import Lesson, read_lessons


def routes(_: Lab) -> list[BaseRoute]:
    def contents(request: Request) -> Response:
        lessons: dict[str | None, list[Lesson]] = {}
        for lesson in read_lessons():
            lessons.setdefault(lesson.figure, []).append(lesson)
        return render_page(request, "home", "Contents", "pages/home/page.html", lessons=lessons)

    return [Route("/", contents)]
