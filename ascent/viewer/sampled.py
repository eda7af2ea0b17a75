"""How much a step had, of which only a part was recorded."""

from __future__ import annotations

import math

from ascent.viewer.about import read_object
from ascent.viewer.curves import Library
from ascent.viewer.places import Place


def of_step(place: Place, library: Library, step: int | None) -> dict[str, int] | None:
    """All responses of a step by metrics.jsonl, and its groups, if config.json says how many responses make one.

    None: nobody knows. What other trainers leave is all that is known of their steps.
    """
    if place.kind != "ascent" or step is None:
        return None
    with library.digest(place) as digest:
        counts = digest.part(step, step).columns.get("num_responses")
    if counts is None or not len(counts) or not math.isfinite(counts[-1]) or counts[-1] < 1:
        return None
    responses = int(counts[-1])
    samples = read_object(place.folder / "config.json")[0].get("samples")
    if not isinstance(samples, int) or samples < 1 or responses % samples:
        return {"responses": responses}
    return {"responses": responses, "groups": responses // samples}
