"""The routes of completions: the groups of a step, their tokens, and one prompt over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from ascent.lab.viewer import answer, many, number, one
from ascent.types import Refused
from ascent.viewer import completions, prompts, recorded, sampled, tokens
from ascent.viewer.charts import greedy_of
from ascent.viewer.curves import Library
from ascent.viewer.places import Place, find
from ascent.viewer.reading import read_object

MOST_GROUPS = completions.MOST
LONGEST_PROMPT = 50_000


def routes(runs: Path, library: Library) -> list[BaseRoute]:
    def place(request: Request) -> Place:
        return find(runs, one(request, "id"))

    def page(request: Request) -> dict[str, Any]:
        where, given = place(request), request.query_params
        choices: dict[str, Any] = {name: given[name] for name in ("sort", "show", "q") if given.get(name)}
        numbers: dict[str, Any] = {name: n for name in ("offset", "count") if (n := whole(request, name)) is not None}
        found = completions.page(
            where.folder, where.kind, whole(request, "step"), **choices, **numbers, which=which(request)
        )
        of = sampled.of_step(where, library, found["step"]) if found["set"] == recorded.SAMPLED else None
        return {"id": where.id, **found, "of": of, "greedy": greedy_of(task_of(where))}

    def token(request: Request) -> dict[str, Any]:
        where, step = place(request), whole(request, "step")
        if step is None:
            raise Refused("step= is missing")
        groups = [_whole("group", given) for given in many(request, "group", MOST_GROUPS)]
        given = (step, groups, whole(request, "sample"), which(request))
        return {"id": where.id, **tokens.tokens(where.folder, where.kind, *given)}

    def prompt(request: Request) -> dict[str, Any]:
        where, given = place(request), request.query_params
        if len(given.get("prompt", "")) > LONGEST_PROMPT:
            raise Refused(f"prompt: at most {LONGEST_PROMPT:,} characters")
        place_of = (given.get("key", ""), given.get("prompt", ""), whole(request, "step"), whole(request, "group") or 0)
        key = prompts.find(where.folder, where.kind, *place_of, which(request))
        found = prompts.same(where.folder, where.kind, key, which(request))
        return {"id": where.id, **found, "greedy": greedy_of(task_of(where))}

    def every(request: Request) -> dict[str, Any]:
        where, given = place(request), request.query_params
        found = prompts.every(where.folder, where.kind, given.get("q", ""), given.get("set", ""))
        return {"id": where.id, **found, "greedy": greedy_of(task_of(where))}

    return [
        Route("/api/view/completions", answer(page)),
        Route("/api/view/tokens", answer(token)),
        Route("/api/view/prompt", answer(prompt)),
        Route("/api/view/prompts", answer(every)),
    ]


def which(request: Request) -> str:
    """The set of responses that the address names: what was sampled, or greedy answers to held-out prompts."""
    return request.query_params.get("set") or recorded.SAMPLED


def task_of(place: Place) -> Any:
    return read_object(place.folder / "run.json")[0].get("task") if place.kind == "ascent" else None


def whole(request: Request, name: str) -> int | None:
    """A whole number of the address, 0 or more."""
    found = number(request, name)
    return None if found is None else _whole(name, str(found))


def _whole(name: str, given: str) -> int:
    try:
        found = float(given)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1e15 or found != int(found):
        raise Refused(f"{name}={given[:20]}: a whole number, 0 or more, is needed")
    return int(found)
