"""Recorded responses: the groups of a step, their tokens, and one prompt over the steps."""

from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from ascent.lab.page_base import (
    Lab,
    integer_param,
    json_route,
    parse_nonnegative_int,
    repeated_param,
    required_param,
    viewer_page,
)
from ascent.lab.pages.completions.completions import MOST_GROUPS, all_prompts, completions_page, prompt_history, tokens
from ascent.runs.metrics import evaluation_label
from ascent.runs.rollout_files import SAMPLED
from ascent.runs.run_list import RunEntry
from ascent.runs.untrusted_files import read_object


def routes(lab: Lab) -> list[BaseRoute]:
    def groups(request: Request) -> dict[str, Any]:
        place, query = lab.place(request), request.query_params
        choices: dict[str, Any] = {name: query[name] for name in ("sort", "show", "q") if query.get(name)}
        choices |= {name: n for name in ("step", "offset", "count") if (n := integer_param(request, name)) is not None}
        page = completions_page(place.folder, place.kind, **choices, which=which_set(request))
        sampled = sampled_in_step(lab, place, page["step"]) if page["set"] == SAMPLED else None
        return {"id": place.id, **page, "of": sampled, "greedy": _greedy(place)}

    def numbers(request: Request) -> dict[str, Any]:
        place, step = lab.place(request), parse_nonnegative_int("step", required_param(request, "step"))
        wanted = [parse_nonnegative_int("group", text) for text in repeated_param(request, "group", MOST_GROUPS)]
        one = (step, wanted, integer_param(request, "sample"), which_set(request))
        return {"id": place.id, **tokens(place.folder, place.kind, *one)}

    def prompt(request: Request) -> dict[str, Any]:
        place = lab.place(request)
        history = prompt_history(place.folder, place.kind, required_param(request, "key"), which_set(request))
        return {"id": place.id, **history, "greedy": _greedy(place)}

    def prompts(request: Request) -> dict[str, Any]:
        place = lab.place(request)
        return {"id": place.id, **all_prompts(place.folder, place.kind), "greedy": _greedy(place)}

    return [
        Route("/completions", viewer_page(lab, "completions", "Completions")),
        Route("/api/view/completions", json_route(groups)),
        Route("/api/view/tokens", json_route(numbers)),
        Route("/api/view/prompt", json_route(prompt)),
        Route("/api/view/prompts", json_route(prompts)),
    ]


def which_set(request: Request) -> str:
    """Return the requested set of responses: sampled ones, or greedy answers to held-out prompts."""
    return request.query_params.get("set") or SAMPLED


def _greedy(place: RunEntry) -> str:
    """Return the label of the run's evaluation."""
    return evaluation_label(read_object(place.folder / "run.json")[0].get("task") if place.kind == "ascent" else None)


def sampled_in_step(lab: Lab, place: RunEntry, step: int | None) -> dict[str, int] | None:
    """Return the numbers of responses and groups of a step from metrics.jsonl and config.json; None if unknown."""
    if place.kind != "ascent" or step is None:
        return None
    with lab.column_cache.columns(place) as columns:
        count = int(columns.at_step(step, "num_responses") or 0)
    if count < 1:
        return None
    samples: Any = read_object(place.folder / "config.json")[0].get("samples")
    known = isinstance(samples, int) and samples >= 1 and count % samples == 0
    return {"responses": count, "groups": count // samples} if known else {"responses": count}
