"""The completions of a report: a few of a first, a middle and the last recorded step, and what flags point at.

Every token has its numbers. Which number colors the tokens is chosen without a script, by radio buttons and a style
sheet that looks at them. A token carries a class for each number: shade and underline follow from it. Greedy answers
are shown as what changed from the first recorded evaluation to the last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from ascent.core.types import Refused
from ascent.lab.pages.completions.completions import LONGEST as LONGEST_SEARCH
from ascent.lab.pages.completions.completions import SHOWS, completions_page, key_of
from ascent.lab.pages.completions.tokens import tokens
from ascent.lab.report.numbers import plural, shown
from ascent.lab.templates import visible
from ascent.records import responses as recorded
from ascent.records.columns import Columns

Row = dict[str, Any]
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
        return f"seen-{self.step}-{self.show}" + (f"-{key_of(self.q)}" if self.q else "")

    @property
    def words(self) -> str:
        return f"{self.show} responses" + (f" that contain “{self.q}”" if self.q else "")


def seen_of(event: Mapping[str, Any]) -> Seen | None:
    """What an event's evidence says to look at, if it does."""
    evidence = event.get("evidence")
    named = evidence.get("rollouts") if isinstance(evidence, Mapping) else None
    if event.get("event") != "flag" or not isinstance(named, Mapping):
        return None
    step, show, q = named.get("step"), named.get("show") or "all", named.get("q") or ""
    if not isinstance(step, int) or isinstance(step, bool) or show not in SHOWS:
        return None
    return Seen(step, show, q) if isinstance(q, str) and len(q) <= LONGEST_SEARCH else None


def flag_anchor(place: int) -> str:
    """Of the flag at a place among all flags."""
    return f"flag-{place}"


def _best_and_worst(responses: Sequence[Row]) -> list[Row]:
    """The best and the worst response of a group, or one if all rewards are equal."""
    known = [r for r in responses if r.get("reward") is not None] or list(responses)
    if not known:
        return []
    ranked = sorted(known, key=lambda r: _rank_of(r.get("reward")))
    if ranked[-1].get("reward") == ranked[0].get("reward"):
        return [ranked[-1] | {"rank": "All rewards are equal; one response:"}]
    return [ranked[-1] | {"rank": "Best:"}, ranked[0] | {"rank": "Worst:"}]


def _rank_of(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value else 0.0


def gather_completions(
    folder: Path, kind: str, events: Iterable[Mapping[str, Any]] = (), columns: Columns | None = None
) -> dict[str, Any]:
    """What flags point at, then the first, a middle and the last recorded step; what went wrong; what to know."""
    steps, parts = list(recorded.recorded_steps(folder, kind)), list[Row]()
    problems, notes, rows = list[str](), list[str](), list[Row]()
    pointed: dict[Seen, list[str]] = {}
    flagged = [event for event in events if event.get("event") == "flag"]
    for place, event in enumerate(flagged[:MOST_FLAGS]):
        if (seen := seen_of(event)) is not None and seen.step in steps:
            pointed.setdefault(seen, []).append(flag_anchor(place))
    if len(pointed) > SEEN:
        notes.append(f"flags point at {len(pointed)} selections of completions, of which {SEEN} are here")
    wanted: list[Seen | int] = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    for one in [*list(pointed)[:SEEN], *wanted]:
        try:
            part = _read_part(folder, kind, one, columns)
        except (Refused, OSError, ValueError) as error:
            problems.append(f"step {one.step if isinstance(one, Seen) else one}: {error}")
            continue
        parts.append(part | {"flags": pointed[one] if isinstance(one, Seen) else []})
        problems += part["problems"]
        notes += part["notes"]
        rows += [r["row"] for group in part["groups"] for r in group["picked"] if r["row"]]
    advantages = (_real(a) for row in rows for a in row.get("advantage") or ())
    largest = max((abs(a) for a in advantages if a is not None), default=0.0)
    for part in parts:
        for group in part["groups"]:
            group["picked"] = [_with_numbers(response, largest) for response in group["picked"]]
    ways = [way for way in WAYS if way[0] == "plain" or any(row.get(way[0]) is not None for row in rows)]
    return {
        "parts": parts,
        "problems": list(dict.fromkeys(problems)),
        "notes": "".join(f"{text[0].upper()}{text[1:]}. " for text in dict.fromkeys(notes)).strip(),
        "ways": ways if len(ways) > 1 else [],
    }


def _read_part(folder: Path, kind: str, one: Seen | int, columns: Columns | None) -> Row:
    """The completions of a step, or of what a flag names; and what to know of the numbers of their tokens."""
    seen = one if isinstance(one, Seen) else None
    if isinstance(one, Seen):
        page = completions_page(folder, kind, one.step, show=one.show, q=one.q, count=SEEN_GROUPS)
    else:
        page = completions_page(folder, kind, one, count=GROUPS)
    notes: list[str] = []
    for group in page["groups"]:
        matches = [response | {"rank": "Matches:"} for response in group["responses"][:SEEN_RESPONSES]]
        group["picked"] = matches if seen else _best_and_worst(group["responses"])
        for response in group["picked"]:
            of_tokens = tokens(folder, kind, page["step"], [group["group"]], response["sample"])
            response["row"] = next(iter(of_tokens["rows"]), None)
            clip = of_tokens["clip"]["words"]
            notes += [*of_tokens["missing"].values(), f"Clipped, {clip}" if clip.startswith("low:") else clip]
    count = columns.at_step(page["step"], "num_responses") if columns is not None else None
    about = {"recorded": _recorded_words(page, count, seen), "seen": seen, "notes": list(filter(None, notes))}
    return about | {name: page[name] for name in ("step", "groups", "problems")}


def _recorded_words(page: Mapping[str, Any], sampled: float | None, seen: Seen | None) -> str:
    """How much of the step is in its file, of what metrics.jsonl says it sampled, and how much of that is here."""
    rows, groups = (page["shares"].get(name) or 0 for name in ("all", "groups"))
    if sampled == rows:
        words = f"All {shown(rows)} responses of the step were recorded, in {plural(groups, 'group')}."
    else:
        of = f" of the {shown(int(sampled))}" if sampled is not None else ""
        words = f"Recorded: {shown(rows)}{of} responses of the step, in {plural(groups, 'group')}."
    return words if seen is None else f"{words} {plural(page['responses'], 'response')} of them match; here are a few."


# ---- responses and their tokens ---------------------------------------------------------------------------

TOKENS = 200
"""Tokens of a response that are shown with their numbers; what follows is text."""
PROBABLE = (0.9, 0.5, 0.1, 0.01)
UNSURE = (0.1, 0.5, 1.0, 2.0)
MOVED = (0.01, 0.05, 0.2, 0.5)
"""Where the shades of probability, entropy (nats) and |log ratio| change."""
WAYS = (
    ("advantage", "advantage", "solid underline: pushed up; dotted: pushed down; thicker: more"),
    ("logp", "log-prob", "a thicker underline and a darker shade: less likely"),
    ("entropy", "entropy", "a thicker underline and a darker shade: less certain"),
    ("ratio", "ratio", "solid underline: likelier than when it was sampled; dotted: less likely; thicker: more"),
    ("clipped", "clipped or not", "boxed: clipped at the last update that saw it"),
    ("plain", "nothing", "text alone"),
)
LABELS = {
    **{"advantage": "δ", "logp": "log-prob", "entropy": "entropy", "ratio": "ratio", "clipped": "clipped"},
    **{"logp_ref": "log-prob of the reference", "value": "value"},
}
"""What is known of a token, and what it is called."""


def _with_numbers(response: Row, largest: float) -> Row:
    """A response as the page shows it: its facts in words, its tokens with their numbers where they were recorded."""
    parts = [f"{name} {shown(value)}" for name, value in response["parts"].items() if value is not None]
    facts = [f"reward {shown(response['reward'])}" if response["reward"] is not None else "no reward"]
    if response["correct"] is not None:
        facts.append("✓ right" if response["correct"] else "✗ not right")
    facts += ["✂ cut off by the limit"] if response["truncated"] else []
    facts += ["⚠ its reward failed"] if response["status"] == "failed" else []
    facts += [f"δ {shown(response['advantage'])}"] if response["advantage"] is not None else []
    facts += [f"{response['length']} tokens"] if response["length"] is not None else []
    made = response | {"facts": ", ".join(facts), "parts": f"Components: {', '.join(parts)}" if parts else ""}
    pieces = (response["row"] or {}).get("pieces")
    if not pieces:
        return made
    spaced = "".join(pieces).split() != response["text"].split() and all(p.strip("-").isdigit() for p in pieces)
    lists = {name: values for name in LABELS if (values := response["row"].get(name)) is not None}
    pieces, rest = pieces[:TOKENS], pieces[TOKENS:]
    known = [{n: v[i] for n, v in lists.items() if i < len(v) and v[i] is not None} for i in range(len(pieces))]
    names = [name for name, *_ in WAYS if any(name in token for token in known)]
    return made | {
        "gap": " " if spaced else "",
        "rest": "".join(rest),
        "tokens": [
            {
                "text": str(piece).replace("\n", "↵\n") or "∅",
                "class": _shades(token, largest),
                "title": ", ".join(f"{LABELS[name]} {shown(value)}" for name, value in token.items()),
            }
            for piece, token in zip(pieces, known, strict=True)
        ],
        "head": ["token", *(LABELS[name] for name in names)] if names else [],
        "rows": [
            [repr(piece)[1:-1], *(shown(token.get(name)) for name in names)]
            for piece, token in zip(pieces, known, strict=True)
        ],
    }


def _real(value: Any) -> float | None:
    """A number that can be shaded; one that is not finite comes as a word."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _shades(token: Mapping[str, Any], largest: float) -> str:
    """A class for each number of a token: which of five shades, and to which side."""
    classes = []
    δ, logp, entropy, ratio = (_real(token.get(name)) for name in ("advantage", "logp", "entropy", "ratio"))
    if δ and largest > 0:
        classes.append(f"{'a' if δ > 0 else 'z'}{min(4, 1 + int(4 * abs(δ) / largest * 0.999))}")
    if logp is not None and (shade := sum(math.exp(min(logp, 0.0)) < p for p in PROBABLE)):
        classes.append(f"l{shade}")
    if entropy is not None and (shade := sum(entropy >= bound for bound in UNSURE)):
        classes.append(f"e{shade}")
    if ratio is not None and ratio > 0 and (shade := sum(abs(math.log(ratio)) >= bound for bound in MOVED)):
        classes.append(f"{'r' if ratio > 1 else 'q'}{shade}")
    return " ".join([*classes, "k"] if token.get("clipped") else classes)


# ---- greedy answers: right at the first recorded evaluation, and at the last ----------------------------

COLUMNS = (*recorded.NEEDED, "valid", "correct", "status")
CHANGES = (("wrong → right", False, True), ("right → wrong", True, False), ("still wrong", False, False))
EACH = 2
"""Answers of each kind of change that are shown."""
LONGEST_ANSWER = 300
"""Characters of an answer that are shown."""


def gather_answers(folder: Path, kind: str, greedy: str) -> dict[str, Any] | None:
    """What became of the answers between two evaluations; None where none were recorded."""
    steps, problems = recorded.recorded_steps(folder, kind, recorded.HELD_OUT), list[str]()
    if not steps:
        return None
    first, last = _readable(folder, steps, problems), _readable(folder, steps[::-1], problems)
    found: dict[str, Any] = {"problems": list(dict.fromkeys(problems))}
    if first is not None and last is not None:
        found |= _changes(first, last, greedy) if first[0] < last[0] else _one(last, greedy)
    return found


def _readable(folder: Path, steps: list[int], problems: list[str]) -> tuple[int, dict[Any, Row]] | None:
    """The first of these steps whose file can be read, with its answers by prompt."""
    for step in steps:
        try:
            rows = recorded.light_rows(folder, "ascent", step, COLUMNS, recorded.HELD_OUT)
        except (Refused, OSError) as error:
            problems.append(str(error))
            continue
        return step, {(row["group"], row["prompt_text"]): row for row in rows}
    return None


def _right(row: Row) -> bool | None:
    """None: its reward failed, or nobody knows."""
    failed = row.get("status") == "failed" or row.get("valid") is False
    return None if failed or not isinstance(row.get("correct"), bool) else row["correct"]


def _changes(first: tuple[int, dict[Any, Row]], last: tuple[int, dict[Any, Row]], greedy: str) -> dict[str, Any]:
    both = [(first[1][key], last[1][key]) for key in first[1] if key in last[1]]
    kinds = itertools.product((False, True), repeat=2)
    changes = {kind: [pair for pair in both if (_right(pair[0]), _right(pair[1])) == kind] for kind in kinds}
    words = (
        f"{plural(len(both), 'prompt')} ({greedy}), at step {shown(first[0])} and at step {shown(last[0])}, the first "
        f"and the last evaluation whose answers can be read: {len(changes[False, True])} went from wrong to right, "
        f"{len(changes[True, False])} from right to wrong, {len(changes[False, False])} stayed wrong and "
        f"{len(changes[True, True])} stayed right"
    )
    unknown = len(both) - sum(map(len, changes.values()))
    words += f"; of {unknown} it is not known." if unknown else "."
    rows = [
        [name, *map(_text, (a["prompt_text"], a["response_text"], b["response_text"]))]
        for name, was, now in CHANGES
        for a, b in changes[was, now][:EACH]
    ]
    head = ["", "prompt", f"answer at step {shown(first[0])}", f"answer at step {shown(last[0])}"]
    return {"words": words, "head": head, "rows": rows, "caption": "A few of them"}


def _one(evaluation: tuple[int, dict[Any, Row]], greedy: str) -> dict[str, Any]:
    step, rows = evaluation[0], list(evaluation[1].values())
    right = sum(_right(row) is True for row in rows)
    words = f"{plural(len(rows), 'prompt')} ({greedy}), at step {shown(step)}: {right} right."
    wrong = [row for row in rows if _right(row) is False][: 2 * EACH]
    examples = [["wrong", _text(row["prompt_text"]), _text(row["response_text"])] for row in wrong]
    return {"words": words, "head": ["", "prompt", "answer"], "rows": examples, "caption": "A few wrong ones"}


def _text(value: Any) -> Markup:
    text = str(value or "")
    cut = text[:LONGEST_ANSWER] + " …" * (len(text) > LONGEST_ANSWER)
    return Markup('<span class="text">{}</span>').format(visible(cut))
