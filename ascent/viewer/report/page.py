"""One run as one HTML page: no script, nothing loaded from anywhere."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ascent.viewer.charts import GREEDY, greedy_of
from ascent.viewer.compare.bounds import SHARES
from ascent.viewer.report.html import Markup, joined, number, shown, table, tag
from ascent.viewer.report.steps import MOST_FLAGS, Seen, flag_anchor, seen_of
from ascent.viewer.report.style import style
from ascent.viewer.report.svg import Series, chart, swatch

GENERATOR = "ascent report"
"""By this a file is known as ours, which may be written over."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MOST_EVENTS = 60
HEADLINES = (
    ("eval/accuracy", f"exactly right, {GREEDY}"),
    ("accuracy", "exactly right, sampled"),
    ("eval/pairs/accuracy", "held-out pairs right"),
    ("exact/reward", "E[R], enumerated"),
    ("eval/reward", f"reward, {GREEDY}"),
    ("reward", "sampled reward"),
    ("entropy", "entropy, nats a token"),
    ("completions/mean_length", "tokens a response"),
)
HEADED = 5
OF_REWARD = ("exact/reward", "eval/reward", "reward")


@dataclass
class Facts:
    """All that a report says. `rows` has for each chart some lines of the file: step, and a number a series."""

    about: Mapping[str, Any]
    curves: Mapping[str, Any]
    rows: Mapping[str, Sequence[Sequence[Any]]]
    last: Mapping[str, tuple[Any, Any]]
    """Of each metric the last value, and its step."""
    completions: Markup
    seen: Mapping[Seen, str] = field(default_factory=dict)
    """Of what flags point at, the anchor at which it is shown."""
    answers: Markup | None = None
    written: float = field(default_factory=time.time)
    version: str | None = None


def page(facts: Facts) -> str:
    about = facts.about
    name = title(about)
    sections = [
        ("flags", "Flags and events", flags(about, facts.seen)),
        ("curves", "Curves", charts(facts)),
        ("objective", "Objective", objective(about)),
        ("answers", "Greedy answers, first and last", facts.answers),
        ("completions", "Completions", facts.completions),
        ("settings", "Settings", settings(mapping(about.get("config")))),
        ("system", "Versions, machine and history", system(about)),
    ]
    links = [tag("li", tag("a", head, href=f"#{key}")) for key, head, inner in sections if inner]
    body = [tag("section", tag("h2", head), inner, id=key) for key, head, inner in sections if inner]
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=GENERATOR),
        tag("title", f"{name} · Ascent"),
        tag("style", Markup(style())),
    ]
    main = tag(
        "main",
        top(facts, name),
        tag("nav", tag("ul", *links, class_="contents"), aria_label="Contents"),
        *body,
        foot(facts),
    )
    return "<!doctype html>\n" + tag("html", tag("head", *head), tag("body", main), lang="en") + "\n"


def mapping(held: Any) -> Mapping[str, Any]:
    """What should be an object, of a file that may hold anything."""
    return held if isinstance(held, Mapping) else {}


def sequence(held: Any) -> Sequence[Any]:
    return held if isinstance(held, list | tuple) else []


def title(about: Mapping[str, Any]) -> str:
    words = [about.get("task"), about.get("label")]
    words += [f"seed {about['seed']}"] if about.get("seed") is not None else []
    return ", ".join(str(word) for word in words if word) or str(about.get("id", "a run"))


def top(facts: Facts, name: str) -> Markup:
    about = facts.about
    status = str(about.get("status", "unreadable"))
    known = status if status in ("running", "finished", "interrupted", "failed", "died", "unreadable") else "other"
    note = mapping(about.get("notes"))
    tags = f"Tags: {', '.join(note['tags'])}" if note.get("tags") else None
    problems, words = sequence(about.get("problems")), sequence(about.get("words"))
    return tag(
        "header",
        tag("h1", name),
        tag("p", about.get("id", ""), class_="where"),
        tag(
            "p",
            tag("span", status, class_=f"status {known}"),
            " ",
            str(about.get("said", "")).removeprefix(f"{status}, ").removeprefix(f"{status} "),
        ),
        tag("ul", *(tag("li", word) for word in words), class_="words") if words else None,
        headlines(facts),
        tag("p", tag("b", "Note. "), note["text"], class_="noted") if note.get("text") else None,
        tag("p", tags, class_="quiet") if tags else None,
        tag("ul", *(tag("li", text) for text in problems), class_="problems") if problems else None,
    )


def headlines(facts: Facts) -> Markup | None:
    found: list[Markup] = []
    greedy = greedy_of(facts.about.get("task"))
    for metric, label in HEADLINES:
        if metric in facts.last and len(found) < HEADED:
            value, step = facts.last[metric]
            most = facts.about.get("max_reward") if metric in OF_REWARD else None
            more = f" of {shown(most)}" if most is not None else ""
            inner = tag(
                "dd",
                number(value, metric in SHARES),
                tag("small", more) if more else None,
                tag("small", f" · step {shown(step)}"),
            )
            found.append(tag("div", tag("dt", label.replace(GREEDY, greedy)), inner))
    return tag("dl", *found, class_="numbers") if found else None


# ---- curves -------------------------------------------------------------------------------------------


def charts(facts: Facts) -> Markup:
    made = [one_chart(facts, about) for about in facts.about.get("charts") or []]
    if not made:
        return tag("p", "There are no numbers to draw.", class_="quiet")
    bucket = facts.curves.get("bucket", 1)
    how = (
        f"A point is the mean of {bucket:,} steps, and the band goes from their smallest value to their largest. "
        if bucket > 1
        else "Every step is drawn. "
    )
    from_zero = "Steps count from 0." if facts.about.get("kind") == "ascent" else "Steps are those of its files."
    rest = "The number beside a line is its last. Behind each chart are the numbers of single steps."
    note = tag("p", f"{how}{from_zero} {rest}", class_="quiet")
    return joined([note, tag("div", *made, class_="charts")])


def one_chart(facts: Facts, about: Mapping[str, Any]) -> Markup:
    curves, series = facts.curves, []
    for one in about["series"]:
        found = curves["metrics"].get(one["metric"], {"mean": [None] * len(curves["x"])})
        bad = curves.get("nonfinite", {}).get(one["metric"], [])
        end, _ = facts.last.get(one["metric"], (None, None))
        drawn = Series(one["label"], curves["x"], found["mean"], found.get("low"), found.get("high"), bad, end)
        series.append(replace(drawn, share=one["metric"] in SHARES))
    ends = (curves["first"], curves["last"]) if curves.get("first") is not None else None
    picture = chart(about["title"], series, bool(about.get("share")), ends)
    unit = about.get("unit")
    told = len(series) > 1 or any(s.label.lower() not in about["title"].lower() for s in series)
    legend = [tag("li", swatch(i), s.label) for i, s in enumerate(series)] if told else []
    bad = sum(len(s.nonfinite) for s in series)
    wrong = (
        tag("p", f"✕ marks {bad} step{'s' * (bad > 1)} whose number was not finite.", class_="quiet") if bad else None
    )
    rows = [
        [shown(step), *(number(value, s.share) for value, s in zip(values, series, strict=True))]
        for step, *values in facts.rows.get(about["key"], [])
    ]
    numbers = table(["step", *(s.label for s in series)], rows)
    return tag(
        "figure",
        tag("figcaption", about["title"], " ", tag("span", unit) if unit else None),
        tag("ul", *legend, class_="legend") if legend else None,
        picture,
        wrong,
        tag("details", tag("summary", f"Numbers of {len(rows)} step{'s' * (len(rows) != 1)}"), numbers),
    )


# ---- words --------------------------------------------------------------------------------------------


def flags(about: Mapping[str, Any], seen: Mapping[Seen, str]) -> Markup | None:
    """Flags with their evidence, then whatever else was noted down."""
    events = [event for event in sequence(about.get("events")) if isinstance(event, Mapping)]
    flagged = [event for event in events if event.get("event") == "flag"]
    others = [event for event in events if event.get("event") != "flag"]
    cards = [one_flag(event, flag_anchor(i), seen) for i, event in enumerate(flagged[:MOST_FLAGS])]
    rows = [[shown(e.get("step")), e.get("event", ""), e.get("text", "")] for e in others[:MOST_EVENTS]]
    left = max(0, len(flagged) - MOST_FLAGS) + max(0, len(others) - MOST_EVENTS)
    if not events:
        return None
    first = (
        tag("p", "A flag is something to look at, with its evidence. It is no verdict.", class_="quiet")
        if cards
        else None
    )
    more = tag("p", f"{left:,} more are in events.jsonl.", class_="quiet") if left else None
    return joined([first, *cards, table(["step", "event", "what was said"], rows) if rows else None, more])


def one_flag(event: Mapping[str, Any], anchor: str, seen: Mapping[Seen, str]) -> Markup:
    evidence = mapping(event.get("evidence"))
    metrics = mapping(evidence.get("metrics"))
    rows = []
    for name, pair in metrics.items():
        values = pair if isinstance(pair, list | tuple) else [pair]
        before, now = (None, *values)[-2:] if values else (None, None)  # one number: at this step
        rows.append([name, number(before, name in SHARES), number(now, name in SHARES)])
    steps = evidence.get("steps")
    span = ""
    if isinstance(steps, list | tuple) and len(steps) == 2:
        several = f"over steps {shown(steps[0])} to {shown(steps[1])}"
        span = f"at step {shown(steps[0])}" if steps[0] == steps[1] else several
    return tag(
        "article",
        tag("h3", f"{str(event.get('name', 'flag')).replace('-', ' ')}, step {shown(event.get('step'))}"),
        tag("p", event.get("text", "")),
        table(["", "before", "now"], rows, f"Evidence {span}".strip()) if rows else None,
        where(event, seen),
        class_="flag",
        id=anchor,
    )


def where(event: Mapping[str, Any], seen: Mapping[Seen, str]) -> Markup | None:
    """Which completions a flag points at: a link to them where they are in this file."""
    named = seen_of(event)
    if named is None:
        return None
    words = f"completions of step {shown(named.step)}: {named.words}"
    if named in seen:
        return tag("p", "Seen in the ", tag("a", words, href=f"#{seen[named]}"), ".", class_="quiet")
    return tag("p", f"Seen in the {words}, which are not in this file.", class_="quiet")


def objective(about: Mapping[str, Any]) -> Markup | None:
    words, formula = about.get("objective"), about.get("formula")
    if not words and not formula:
        return None
    return joined(
        [tag("p", words) if words else None, tag("pre", formula, class_="formula", tabindex="0") if formula else None]
    )


def settings(config: Mapping[str, Any]) -> Markup | None:
    from ascent.viewer.compare.comparison import dotted

    found = dotted(config)
    return pairs({name: plain(value) for name, value in found.items()}) if found else None


def pairs(found: Mapping[str, Any]) -> Markup:
    return tag(
        "dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in found.items()), class_="settings"
    )


def plain(value: Any) -> str:
    """A setting as config.json has it; a word without its quotes."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def system(about: Mapping[str, Any]) -> Markup | None:
    held = {**mapping(about.get("versions")), **mapping(about.get("machine"))}
    found = {str(name): plain(value) for name, value in held.items() if value is not None}
    history = [event for event in sequence(about.get("history")) if isinstance(event, Mapping)]
    rows = []
    for event in history[-MOST_EVENTS:]:
        more = ", ".join(f"{k} {plain(v)}" for k, v in event.items() if k not in ("event", "time"))
        rows.append([event.get("time", ""), event.get("event", ""), more])
    if not found and not rows:
        return None
    return joined([pairs(found) if found else None, table(["time", "event", ""], rows, "History") if rows else None])


def foot(facts: Facts) -> Markup:
    when = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(facts.written))
    who = f"Ascent {facts.version}" if facts.version else "Ascent"
    return tag("footer", f"Written {when} by `{GENERATOR}`, {who}, from the files of the run. Numbers are theirs.")
