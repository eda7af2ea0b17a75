"""Which completions a report shows: a few of a first, a middle and the last recorded step, and what flags point at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ascent.types import Refused
from ascent.viewer import completions, recorded, tokens
from ascent.viewer.digest import Digest

GROUPS = 3
"""Groups of a step."""
MOST_FLAGS = 60
"""Flags that a report shows."""
SEEN, SEEN_GROUPS, SEEN_RESPONSES = 24, 2, 2
"""Pieces of evidence with completions of their own; groups of each, and responses of a group."""


class Seen(NamedTuple):
    """The completions that a flag's evidence names."""

    step: int
    show: str
    q: str

    @property
    def anchor(self) -> str:
        return f"seen-{self.step}-{self.show}" + (f"-{completions.key_of(self.q)}" if self.q else "")

    @property
    def words(self) -> str:
        return f"{self.show} responses" + (f" that contain “{self.q}”" if self.q else "")


Picked = list[tuple[str, Mapping[str, Any]]]


@dataclass
class Part:
    """Some groups of a step, with the responses of each that are shown, and the numbers of their tokens."""

    page: Mapping[str, Any]
    picked: dict[int, Picked]
    rows: dict[tuple[int, int], Any]
    seen: Seen | None = None
    sampled: int | None = None
    """Responses that the step sampled, of which those in the file are a part."""
    flags: list[str] = field(default_factory=list)
    """Anchors of the flags that point here."""


@dataclass
class Gathered:
    parts: list[Part] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def anchors(self) -> dict[Seen, str]:
        return {part.seen: part.seen.anchor for part in self.parts if part.seen is not None}


def seen_of(event: Mapping[str, Any]) -> Seen | None:
    """What an event's evidence says to look at, if it does."""
    evidence = event.get("evidence")
    named = evidence.get("rollouts") if isinstance(evidence, Mapping) else None
    if event.get("event") != "flag" or not isinstance(named, Mapping):
        return None
    step, show, q = named.get("step"), named.get("show") or "all", named.get("q") or ""
    if not isinstance(step, int) or isinstance(step, bool) or show not in completions.SHOWS:
        return None
    return Seen(step, show, q) if isinstance(q, str) and len(q) <= completions.LONGEST else None


def flag_anchor(place: int) -> str:
    """Of the flag at a place among all flags."""
    return f"flag-{place}"


def ends(responses: Sequence[Mapping[str, Any]]) -> Picked:
    """The best and the worst response of a group, or its only kind."""
    known = [r for r in responses if r.get("reward") is not None] or list(responses)
    if not known:
        return []
    ranked = sorted(known, key=lambda r: rank_of(r.get("reward")))
    if ranked[-1].get("reward") == ranked[0].get("reward"):
        return [("All rewards are equal; one response:", ranked[-1])]
    return [("Best:", ranked[-1]), ("Worst:", ranked[0])]


def rank_of(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0


def matching(responses: Sequence[Mapping[str, Any]]) -> Picked:
    """Some of the responses that a filter has left."""
    return [("Matches:", one) for one in responses[:SEEN_RESPONSES]]


def gather(folder: Path, kind: str, events: Iterable[Mapping[str, Any]] = (), digest: Digest | None = None) -> Gathered:
    """What flags point at, then the first, a middle and the last recorded step; what went wrong; what to know."""
    steps, made = list(recorded.steps(folder, kind)), Gathered()
    pointed: dict[Seen, list[str]] = {}
    flagged = [event for event in events if event.get("event") == "flag"]
    for place, event in enumerate(flagged[:MOST_FLAGS]):
        if (seen := seen_of(event)) is not None:
            pointed.setdefault(seen, []).append(flag_anchor(place))
    there = {seen: flags for seen, flags in pointed.items() if seen.step in steps}
    if len(there) > SEEN:
        made.notes.append(f"flags point at {len(there)} selections of completions, of which {SEEN} are here")
    wanted: list[Seen | int] = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    for one in [*list(there)[:SEEN], *wanted]:
        try:
            part, notes = read(folder, kind, one)
        except (Refused, OSError, ValueError) as error:
            made.problems.append(f"step {one.step if isinstance(one, Seen) else one}: {error}")
            continue
        part.sampled = sampled(digest, part.page["step"])
        part.flags = there[one] if isinstance(one, Seen) else []
        made.parts.append(part)
        made.problems += part.page.get("problems") or []
        made.notes += notes
    made.problems, made.notes = list(dict.fromkeys(made.problems)), list(dict.fromkeys(made.notes))
    return made


def read(folder: Path, kind: str, one: Seen | int) -> tuple[Part, list[str]]:
    """The completions of a step, or of what a flag names; and what to know of the numbers of their tokens."""
    seen = one if isinstance(one, Seen) else None
    if seen is not None:
        page = completions.page(folder, kind, seen.step, show=seen.show, q=seen.q, count=SEEN_GROUPS)
    else:
        page = completions.page(folder, kind, one if isinstance(one, int) else None, count=GROUPS)
    picked = {g["group"]: (matching if seen else ends)(g["responses"]) for g in page["groups"]}
    wanted = [(group, response["sample"]) for group, held in picked.items() for _, response in held]
    found = [tokens.tokens(folder, kind, page["step"], [group], sample) for group, sample in wanted]
    rows = {(row["group"], row["sample"]): row for one in found for row in one["rows"]}
    notes = [text for one in found for text in [*one["missing"].values(), clip_words(one)] if text]
    return Part(page, picked, rows, seen), notes


def clip_words(found: Mapping[str, Any]) -> str:
    words = str((found.get("clip") or {}).get("words", ""))
    return f"Clipped, {words}" if words.startswith("low:") else words


def sampled(digest: Digest | None, step: Any) -> int | None:
    """How many responses metrics.jsonl says that a step sampled."""
    if digest is None or not isinstance(step, int):
        return None
    column = digest.part(step, step).columns.get("num_responses")
    return int(column[-1]) if column is not None and len(column) and column[-1] == column[-1] else None
