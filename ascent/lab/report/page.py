"""One run as one HTML page: no script, nothing loaded from anywhere. The page is report.html, its style report.css."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ascent.lab.pages.compare.comparison import dotted, setting_text
from ascent.lab.report.chart import Series, chart
from ascent.lab.report.completions import MOST_FLAGS, flag_anchor, seen_of
from ascent.lab.report.numbers import number, shown
from ascent.lab.templates import TEMPLATES
from ascent.records.metrics import HEADLINES, SHARES, greedy_of, title_of

GENERATOR = "ascent report"
"""By this a file is known as ours, which may be written over."""
MOST_EVENTS = 60
HEADED = 5
OF_REWARD = ("exact/reward", "eval/reward", "reward")
STATUSES = ("running", "finished", "interrupted", "failed", "died", "unreadable")


def report_page(
    about: Mapping[str, Any],
    curves: Mapping[str, Any],
    rows: Mapping[str, Sequence[Sequence[Any]]],
    last: Mapping[str, tuple[Any, Any]],
    completions: Mapping[str, Any],
    answers: Mapping[str, Any] | None,
) -> str:
    """All that is known of a run.

    `rows` has for each chart some lines of metrics.jsonl: the step, and a number per series. `last` has the last value
    of each metric, and its step.
    """
    status = str(about["status"])
    system = {**_mapping(about["versions"]), **_mapping(about["machine"])}
    try:
        writer = f"Ascent {version('ascent-rl')}"
    except PackageNotFoundError:
        writer = "Ascent"
    return (
        TEMPLATES.get_template("report/report.html")
        .render(
            about=about,
            title=_title(about),
            status_class=status if status in STATUSES else "other",
            status_words=about["said"].removeprefix(f"{status}, ").removeprefix(f"{status} "),
            words=_sequence(about["words"]),
            headlines=_headlines(about, last),
            **_events(about["events"], completions),
            charts=[_chart(one, curves, rows[one["key"]], last) for one in about["charts"]],
            bucket=curves["bucket"],
            completions=completions,
            answers=answers,
            settings={name: setting_text(value) for name, value in dotted(about["config"]).items()},
            system={name: setting_text(value) for name, value in system.items() if value is not None},
            history=[_history_row(event) for event in _sequence(about["history"])[-MOST_EVENTS:] if _mapping(event)],
            generator=GENERATOR,
            writer=writer,
            written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            longest=4_000,  # characters of a text
        )
        .lstrip()
    )


def _mapping(held: Any) -> Mapping[str, Any]:
    """What should be an object, of a file that may hold anything."""
    return held if isinstance(held, Mapping) else {}


def _sequence(held: Any) -> Sequence[Any]:
    return held if isinstance(held, list | tuple) else []


def _title(about: Mapping[str, Any]) -> str:
    seed = f"seed {about['seed']}" if about["seed"] is not None else ""
    return ", ".join(filter(None, [about["task"], about["label"], seed])) or str(about["id"])


def _headlines(about: Mapping[str, Any], last: Mapping[str, tuple[Any, Any]]) -> list[tuple[Any, ...]]:
    """Name, last value, the most that it can be, and its step, of the metrics that matter most."""
    greedy, headlines = greedy_of(about["task"]), []
    for metric in [metric for metric in HEADLINES if metric in last][:HEADED]:
        value, step = last[metric]
        most = about["max_reward"] if metric in OF_REWARD else None
        headlines.append((title_of(metric, greedy)[0], number(value, metric in SHARES), most, step))
    return headlines


def _chart(
    about: Mapping[str, Any], curves: Mapping[str, Any], rows: Sequence[Sequence[Any]], last: Mapping[str, Any]
) -> dict[str, Any]:
    """A chart with its legend, and the numbers behind it."""
    series = []
    for one in about["series"]:
        metric = one["metric"]
        line = curves["metrics"].get(metric, {"mean": [None] * len(curves["x"])})
        bad, (end, _) = curves["nonfinite"].get(metric, []), last.get(metric, (None, None))
        bands = line.get("low"), line.get("high")
        share, color = metric in SHARES, one["colour"]
        series.append(Series(one["label"], curves["x"], line["mean"], *bands, bad, end, share, color))
    ends = (curves["first"], curves["last"]) if curves["first"] is not None else None
    needed = len(series) > 1 or any(s.label.lower() not in about["title"].lower() for s in series)
    return {
        "title": about["title"],
        "unit": about.get("unit"),
        "picture": chart(about["title"], series, bool(about.get("share")), ends),
        "legend": series if needed else [],
        "nonfinite": sum(len(s.nonfinite) for s in series),
        "head": ["step", *(s.label for s in series)],
        "rows": [
            [shown(step), *(number(value, s.share) for value, s in zip(values, series, strict=True))]
            for step, *values in rows
        ],
    }


def _events(events: Sequence[Mapping[str, Any]], completions: Mapping[str, Any]) -> dict[str, Any]:
    """Flags with their evidence, then whatever else was noted down."""
    flagged = [event for event in events if event.get("event") == "flag"]
    others = [event for event in events if event.get("event") != "flag"]
    left = max(0, len(flagged) - MOST_FLAGS) + max(0, len(others) - MOST_EVENTS)
    here = [part["seen"] for part in completions["parts"]]
    return {
        "flags": [_flag(event, flag_anchor(i), here) for i, event in enumerate(flagged[:MOST_FLAGS])],
        "other_events": [[shown(e.get("step")), e.get("event", ""), e.get("text", "")] for e in others[:MOST_EVENTS]],
        "more_events": f"{left:,} more are in events.jsonl." if left else "",
    }


def _flag(event: Mapping[str, Any], anchor: str, here: Sequence[Any]) -> dict[str, Any]:
    evidence, rows = _mapping(event.get("evidence")), []
    for name, pair in _mapping(evidence.get("metrics")).items():
        values = pair if isinstance(pair, list | tuple) else [pair]
        before, now = (None, *values)[-2:] if values else (None, None)  # one number: at this step
        rows.append([name, number(before, name in SHARES), number(now, name in SHARES)])
    steps, span = evidence.get("steps"), ""
    if isinstance(steps, list | tuple) and len(steps) == 2:
        several = f" over steps {shown(steps[0])} to {shown(steps[1])}"
        span = f" at step {shown(steps[0])}" if steps[0] == steps[1] else several
    seen = seen_of(event)
    return {
        "anchor": anchor,
        "title": f"{str(event.get('name', 'flag')).replace('-', ' ')}, step {shown(event.get('step'))}",
        "text": event.get("text", ""),
        "rows": rows,
        "caption": f"Evidence{span}",
        "seen": seen,
        "here": seen in here,
    }


def _history_row(event: Mapping[str, Any]) -> list[Any]:
    more = ", ".join(f"{k} {setting_text(v)}" for k, v in event.items() if k not in ("event", "time"))
    return [event.get("time", ""), event.get("event", ""), more]
