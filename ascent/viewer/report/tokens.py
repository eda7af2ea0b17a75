"""Completions in a report: a few groups of a few steps, best and worst response, every token with its numbers.

Which number colours the tokens is chosen without a script: radio buttons, and a style sheet that looks at them.
A token carries a class for each number, so shade and underline follow from the classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ascent.viewer.report.html import Markup, joined, shown, table, tag
from ascent.viewer.report.steps import Gathered, Part

TOKENS = 200
"""Tokens of a response that are shown with their numbers; what follows is text."""
LONGEST = 4_000
"""Characters of a text that are shown."""
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


def numbers(row: Mapping[str, Any], i: int) -> dict[str, Any]:
    """What is known of a token."""
    names = ("advantage", "logp", "entropy", "ratio", "clipped", "logp_ref", "value")
    return {name: row[name][i] for name in names if row.get(name) is not None and i < len(row[name])}


def real(value: Any) -> float | None:
    """A number that can be shaded; one that is not finite comes as a word."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def above(value: float, bounds: Sequence[float]) -> int:
    return sum(value >= bound for bound in bounds)


def classes(known: Mapping[str, Any], largest: float) -> str:
    """One class a number: which of five shades, and to which side."""
    found = []
    δ, logp, entropy, ratio = (real(known.get(name)) for name in ("advantage", "logp", "entropy", "ratio"))
    if δ and largest > 0:
        found.append(f"{'a' if δ > 0 else 'z'}{min(4, 1 + int(4 * abs(δ) / largest * 0.999))}")
    if logp is not None and (shade := sum(math.exp(min(logp, 0.0)) < p for p in PROBABLE)):
        found.append(f"l{shade}")
    if entropy is not None and (shade := above(entropy, UNSURE)):
        found.append(f"e{shade}")
    if ratio is not None and ratio > 0 and (shade := above(abs(math.log(ratio)), MOVED)):
        found.append(f"{'r' if ratio > 1 else 'q'}{shade}")
    if known.get("clipped"):
        found.append("k")
    return " ".join(found)


def told(known: Mapping[str, Any]) -> str:
    """The numbers of a token in words."""
    names = {"advantage": "δ", "logp_ref": "log-prob of the reference", "logp": "log-prob"}
    said = [f"{names.get(name, name)} {shown(value)}" for name, value in known.items() if value is not None]
    return ", ".join(said)


def cut(text: Any) -> list[Any]:
    text = str(text)
    more = tag("em", f" … {len(text) - LONGEST:,} more characters") if len(text) > LONGEST else None
    return [text[:LONGEST], more]


def coloured(text: str, row: Mapping[str, Any] | None, largest: float) -> Markup:
    """A response: its tokens with their numbers where they were recorded, else its text."""
    pieces = (row or {}).get("pieces")
    if not pieces or row is None:
        return tag("pre", cut(text), class_="text")
    spaced = "".join(pieces).split() != text.split() and all(p.strip("-").isdigit() for p in pieces)
    spans = []
    for i, piece in enumerate(pieces[:TOKENS]):
        known = numbers(row, i)
        look = str(piece).replace("\n", "↵\n") or "∅"
        spans.append(tag("span", look, class_=classes(known, largest) or None, title=told(known) or None))
        spans += [Markup(" ")] if spaced else []
    rest = "".join(pieces[TOKENS:])
    return tag("pre", *spans, cut(rest) if rest else None, class_="text tokens")


def every_number(row: Mapping[str, Any] | None) -> Markup | None:
    """The same numbers as a table, for paper, for fingers and for who does not see colours."""
    if row is None or not row.get("pieces"):
        return None
    pieces = row["pieces"][:TOKENS]
    known = [numbers(row, i) for i in range(len(pieces))]
    names = [
        n for n in ("advantage", "logp", "entropy", "ratio", "clipped") if any(k.get(n) is not None for k in known)
    ]
    if not names:
        return None
    head = ["token", *("δ" if name == "advantage" else "log-prob" if name == "logp" else name for name in names)]
    rows = (
        [repr(piece)[1:-1], *(shown(k.get(name)) for name in names)] for piece, k in zip(pieces, known, strict=True)
    )
    return tag("details", tag("summary", "Numbers of its tokens"), table(head, rows, class_="small"))


def marks(response: Mapping[str, Any]) -> str:
    """right, cut off, failed: what is known of a response beside its reward."""
    words = []
    if response.get("correct") is not None:
        words.append("✓ right" if response["correct"] else "✗ not right")
    words += ["✂ cut off by the limit"] if response.get("truncated") else []
    words += ["⚠ its reward failed"] if response.get("status") == "failed" else []
    return ", ".join(words)


def response(found: Mapping[str, Any], row: Mapping[str, Any] | None, rank: str, largest: float) -> Markup:
    reward = found.get("reward")
    parts = ", ".join(
        f"{name} {shown(value)}" for name, value in (found.get("parts") or {}).items() if value is not None
    )
    facts = [f"reward {shown(reward)}" if reward is not None else "no reward", marks(found)]
    if found.get("advantage") is not None:
        facts.append(f"δ {shown(found['advantage'])}")
    facts += [f"{found['length']} tokens"] if found.get("length") is not None else []
    return tag(
        "div",
        tag("p", tag("b", rank), " ", ", ".join(filter(None, facts)), class_="facts"),
        coloured(str(found.get("text", "")), row, largest),
        tag("p", f"Components: {parts}", class_="quiet") if parts else None,
        tag("p", "Reason: ", cut(found["reason"]), class_="quiet") if found.get("reason") else None,
        every_number(row),
        class_="response",
    )


def step_section(part: Part, largest: float) -> Markup:
    """Some groups of one step."""
    groups, seen = [], part.seen
    for group in part.page["groups"]:
        size = group.get("size") or len(group["responses"])
        spread = f"{size} responses" if size != 1 else "1 response"
        if group.get("mean") is not None and group.get("std") is not None:
            spread += f", mean reward {shown(group['mean'])}, spread {shown(group['std'])} (standard deviation)"
        spread += f"; {group['shown']} match" if seen is not None else ""
        picked = [
            response(one, part.rows.get((group["group"], one["sample"])), rank, largest)
            for rank, one in part.picked[group["group"]]
        ]
        head = [tag("h4", f"Group {group['group']}: {spread}"), tag("pre", cut(group["prompt"]), class_="text prompt")]
        groups.append(tag("article", *head, *picked, class_="group"))
    title = f"Step {shown(part.page['step'])}" + (f", to which a flag points: {seen.words}" if seen else "")
    none = tag("p", "None of the recorded responses is so.", class_="quiet") if seen and not groups else None
    back = [[" ", tag("a", "back to the flag", href=f"#{flag}")] for flag in part.flags]
    about = tag("p", kept(part), back, class_="quiet")
    return tag(
        "section", tag("h3", title), about, none, *groups, id=seen.anchor if seen else f"step-{part.page['step']}"
    )


def kept(part: Part) -> str:
    """How much of the step is in its file, and how much of that is here."""
    shares = part.page.get("shares") or {}
    rows, groups = shares.get("all") or 0, shares.get("groups") or 0
    of = f" of the {shown(part.sampled)} responses" if part.sampled is not None else " responses"
    if part.sampled == rows:
        words = f"All {shown(rows)} responses of the step were recorded, in {plural(groups, 'group')}."
    else:
        words = f"Recorded: {shown(rows)}{of} of the step, in {plural(groups, 'group')}."
    if part.seen is not None:
        words += f" {plural(part.page.get('responses') or 0, 'response')} of them match; here are a few."
    return words


def plural(number: int, one: str) -> str:
    return f"{shown(number)} {one}{'s' * (number != 1)}"


def choice(ways: Iterable[str]) -> Markup:
    """Radio buttons for the number that colours tokens, of those that there are."""
    have = {"plain", *ways}
    buttons = []
    for name, label, legend in WAYS:
        if name in have:
            first = name == next(w for w, *_ in WAYS if w in have)
            button = tag("input", type="radio", name="by", id=f"by-{name}", checked=first)
            buttons.append(tag("label", button, " ", label, title=legend))
    legends = [tag("span", legend, class_=f"legend-{name}") for name, _, legend in WAYS if name in have]
    return tag(
        "fieldset", tag("legend", "Tokens are coloured by"), *buttons, tag("p", *legends, class_="quiet"), class_="by"
    )


def section(made: Gathered) -> Markup:
    found, problems = made.parts, made.problems
    rows = [row for part in found for row in part.rows.values()]
    largest = max(
        (abs(v) for row in rows for a in row.get("advantage") or () if (v := real(a)) is not None), default=0.0
    )
    names = [name for name, *_ in WAYS[:-1] if any(row.get(name) is not None for row in rows)]
    steps = [step_section(part, largest) for part in found]
    none = tag("p", "No completions were recorded.", class_="quiet") if not found and not problems else None
    trouble = tag("ul", *(tag("li", text) for text in problems), class_="problems") if problems else None
    notes = ". ".join(text[0].upper() + text[1:] for text in made.notes)
    known = tag("p", f"{notes}.", class_="quiet") if notes else None
    return joined([none, trouble, choice(names) if names else None, known, *steps])
