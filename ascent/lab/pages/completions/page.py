"""Recorded responses: the groups of a step, their tokens, and one prompt over the steps."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from ascent.core.types import Refused
from ascent.lab.page import Lab, html_route, json_route, many_values, read_whole, viewer_page, whole_value
from ascent.lab.pages.completions.completions import MOST_GROUPS, completions_page, sampled_in_step
from ascent.lab.pages.completions.prompts import all_prompts, prompt_history, prompt_key
from ascent.lab.pages.completions.tokens import tokens
from ascent.records.metrics import greedy_of
from ascent.records.places import Place
from ascent.records.reading import read_object
from ascent.records.responses import SAMPLED

LONGEST_PROMPT = 50_000


def routes(lab: Lab) -> list[BaseRoute]:
    def groups(request: Request) -> dict[str, Any]:
        place, query = lab.place(request), request.query_params
        choices: dict[str, Any] = {name: query[name] for name in ("sort", "show", "q") if query.get(name)}
        choices |= {name: n for name in ("offset", "count") if (n := whole_value(request, name)) is not None}
        page = completions_page(
            place.folder, place.kind, whole_value(request, "step"), **choices, which=which_set(request)
        )
        sampled = sampled_in_step(place, lab.library, page["step"]) if page["set"] == SAMPLED else None
        return {"id": place.id, **page, "of": sampled, "greedy": _greedy(place)}

    def numbers(request: Request) -> dict[str, Any]:
        place, step = lab.place(request), whole_value(request, "step")
        if step is None:
            raise Refused("step= is missing")
        wanted = [read_whole("group", text) for text in many_values(request, "group", MOST_GROUPS)]
        one = (step, wanted, whole_value(request, "sample"), which_set(request))
        return {"id": place.id, **tokens(place.folder, place.kind, *one)}

    def prompt(request: Request) -> dict[str, Any]:
        place, query = lab.place(request), request.query_params
        if len(query.get("prompt", "")) > LONGEST_PROMPT:
            raise Refused(f"prompt: at most {LONGEST_PROMPT:,} characters")
        where = (whole_value(request, "step"), whole_value(request, "group") or 0, which_set(request))
        key = prompt_key(place.folder, place.kind, query.get("key", ""), query.get("prompt", ""), *where)
        history = prompt_history(place.folder, place.kind, key, which_set(request))
        return {"id": place.id, **history, "greedy": _greedy(place)}

    def prompts(request: Request) -> dict[str, Any]:
        place, query = lab.place(request), request.query_params
        listed = all_prompts(place.folder, place.kind, query.get("q", ""), query.get("set", ""))
        return {"id": place.id, **listed, "greedy": _greedy(place)}

    return [
        Route("/completions", html_route(lambda _: viewer_page("completions", "Completions"))),
        Route("/api/view/completions", json_route(groups)),
        Route("/api/view/tokens", json_route(numbers)),
        Route("/api/view/prompt", json_route(prompt)),
        Route("/api/view/prompts", json_route(prompts)),
    ]


def which_set(request: Request) -> str:
    """The set of responses that the address names: what was sampled, or greedy answers to held-out prompts."""
    return request.query_params.get("set") or SAMPLED


def _greedy(place: Place) -> str:
    """What the run's evaluation is called."""
    return greedy_of(read_object(place.folder / "run.json")[0].get("task") if place.kind == "ascent" else None)
