"""Write a run as one self-contained HTML file: no scripts, no external resources."""

import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from ascent.core.errors import ConfigError
from ascent.lab.curves import ColumnCache, curves
from ascent.lab.page_base import TEMPLATES, displayable
from ascent.lab.pages.compare.run_comparison import dotted, setting_text
from ascent.lab.pages.completions.completions import CHOICES, LONGEST, Row, completions_page, groups_of, key_of, tokens
from ascent.lab.pages.run.page import run_page
from ascent.lab.pages.runs.page import part_of
from ascent.lab.report.svg_chart import Series, chart, number, plural, real, shown
from ascent.runs import rollout_files as recorded
from ascent.runs.metric_columns import MetricColumns
from ascent.runs.metrics import FRACTION_METRICS, RESULT_METRICS, evaluation_label, metric_title
from ascent.runs.run_list import RunEntry, run_kind
from ascent.runs.untrusted_files import READ_ERRORS, naming_file, open_regular
from ascent.tasks.base import error_line

POINTS = 300
"""Maximum number of points per curve."""
LINES = 30
"""Rows of the table behind each chart."""
GENERATOR = "ascent report"
HEAD = 4096
"""Bytes at the start of a file that are searched for the generator tag of a report."""
MOST_EVENTS = 60
HEADED = 5
OF_REWARD = ("exact/reward", "eval/reward", "reward")
STATUSES = ("running", "finished", "interrupted", "failed", "died", "unreadable")


def write_report(run: Path, out: Path | None, force: bool) -> tuple[Path, int]:
    """Write the report of a run; return its path and its size in bytes. `force` overwrites any file."""
    if not run.is_dir():
        what = "that is a file" if run.exists() else "there is no such folder"
        raise ConfigError(f"{run}: {what}. A run is a folder: ascent report runs/NAME")
    kind = run_kind(run)
    if kind is None:
        raise ConfigError(
            f"{run}: there is no run.json here, nor completions of TRL or verl, so this is not a run. "
            "Name the folder of one run"
        )
    out = out or run / "report.html"
    if out.is_dir():
        raise ConfigError(f"--out {out}: that is a folder. Name a file in it: --out {out / 'report.html'}")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}. Make it first, or choose another file")
    if out.exists() and not force and not _is_ours(out):
        raise ConfigError(
            f"--out {out}: already there, and no report of ours. Choose another file, or --force to replace it"
        )
    data = report_of(RunEntry(run.resolve().name, run, kind)).encode("utf-8", "replace")
    write_aside(out, data)
    return out, len(data)


def _is_ours(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return f'name="generator" content="{GENERATOR}"'.encode() in file.read(HEAD)
    except OSError:
        return False


def write_aside(out: Path, data: bytes) -> None:
    """Write a temporary file and rename it, so that a reader never sees half of a report."""
    aside = out.with_name(f".{out.name}.new")
    try:
        aside.unlink(missing_ok=True)  # what a kill left, or a link that would lead elsewhere
        with open(aside, "xb") as file:
            file.write(data)
        os.replace(aside, out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(
            f"--out {out}: cannot write there ({error.strerror}). Choose a file of yours with --out"
        ) from None


def report_of(place: RunEntry) -> str:
    column_cache = ColumnCache()
    about = run_page(place, column_cache)
    metrics = [one["metric"] for chart in about["charts"] for one in chart["series"]]
    with column_cache.columns(place) as columns:
        drawn = curves(columns, metrics, points=POINTS)
        rows = {c["key"]: columns.sample_lines([one["metric"] for one in c["series"]], LINES) for c in about["charts"]}
        last = {metric: value for metric in metrics if (value := columns.last(metric))}
        completions = gather_completions(place.folder, place.kind, about["events"], columns)
    status, seed = str(about["status"]), f"seed {about['seed']}" if about["seed"] is not None else ""
    system = about["versions"] | about["machine"]
    history = []
    for event in (event for event in about["history"][-MOST_EVENTS:] if isinstance(event, Mapping)):
        more = ", ".join(f"{k} {setting_text(v)}" for k, v in event.items() if k not in ("event", "time"))
        history.append([event.get("time", ""), event.get("event", ""), more])
    writer = "Ascent"
    with suppress(PackageNotFoundError):
        writer = f"Ascent {version('ascent-rl')}"
    page = TEMPLATES.get_template("report/report.html").render(
        about=about,
        title=", ".join(filter(None, [about["task"], about["label"], seed])) or str(about["id"]),
        status_class=status if status in STATUSES else "other",
        status_words=about["said"].removeprefix(f"{status}, ").removeprefix(f"{status} "),
        headlines=_headlines(about, last),
        **_events(about["events"], completions),
        charts=[_chart(one, drawn, rows[one["key"]], last) for one in about["charts"]],
        bucket=drawn["bucket"],
        completions=completions,
        answers=gather_answers(place.folder, place.kind, about["greedy"]),
        settings={name: setting_text(value) for name, value in dotted(about["config"]).items()},
        system={name: setting_text(value) for name, value in system.items() if value is not None},
        history=history,
        generator=GENERATOR,
        writer=writer,
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        longest=4_000,  # characters of a text
    )
    return page.lstrip()


def _headlines(about: Mapping[str, Any], last: Mapping[str, tuple[Any, Any]]) -> list[tuple[Any, ...]]:
    """Return name, last value, maximum and step of the main metrics."""
    greedy, headlines = evaluation_label(about["task"]), []
    for metric in [metric for metric in RESULT_METRICS if metric in last][:HEADED]:
        value, step = last[metric]
        most = about["max_reward"] if metric in OF_REWARD else None
        headlines.append((metric_title(metric, greedy)[0], number(value, metric in FRACTION_METRICS), most, step))
    return headlines


def _chart(
    about: Mapping[str, Any], curves: Mapping[str, Any], rows: Sequence[Sequence[Any]], last: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a chart, its legend, and a table with some lines of metrics.jsonl."""
    series = []
    for one in about["series"]:
        metric = one["metric"]
        line = curves["metrics"].get(metric, {"mean": [None] * len(curves["x"])})
        bad, (end, _) = curves["nonfinite"].get(metric, []), last.get(metric, (None, None))
        bands = line.get("low"), line.get("high")
        share, color = metric in FRACTION_METRICS, one["colour"]
        series.append(Series(one["label"], curves["x"], line["mean"], *bands, bad, end, share, color))
    ends = (curves["first"], curves["last"]) if curves["first"] is not None else None
    needed = len(series) > 1 or any(s.label.lower() not in about["title"].lower() for s in series)
    return {
        "title": about["title"],
        "unit": about["unit"],
        "picture": chart(about["title"], series, about["share"], ends),
        "legend": series if needed else [],
        "nonfinite": sum(len(s.nonfinite) for s in series),
        "head": ["step", *(s.label for s in series)],
        "rows": [
            [shown(step), *(number(value, s.share) for value, s in zip(values, series, strict=True))]
            for step, *values in rows
        ],
    }


def _events(events: Sequence[Mapping[str, Any]], completions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the alerts with their evidence, and the other events."""
    alerted = [event for event in events if event.get("event") == "alert"]
    others = [event for event in events if event.get("event") != "alert"]
    left = max(0, len(alerted) - MOST_ALERTS) + max(0, len(others) - MOST_EVENTS)
    here = [part["seen"] for part in completions["parts"]]
    return {
        "alerts": [_alert(event, f"alert-{i}", here) for i, event in enumerate(alerted[:MOST_ALERTS])],
        "other_events": [[shown(e.get("step")), e.get("event", ""), e.get("text", "")] for e in others[:MOST_EVENTS]],
        "more_events": f"{left:,} more are in events.jsonl." if left else "",
    }


def _alert(event: Mapping[str, Any], anchor: str, here: Sequence[Any]) -> dict[str, Any]:
    evidence, rows = part_of(event, "evidence", dict), []
    for name, pair in part_of(evidence, "metrics", dict).items():
        values = pair if isinstance(pair, list) else [pair]
        before, now = (None, *values)[-2:] if values else (None, None)  # one number: at this step
        rows.append([name, number(before, name in FRACTION_METRICS), number(now, name in FRACTION_METRICS)])
    steps, span = part_of(evidence, "steps", list), ""
    if len(steps) == 2:
        several = f" over steps {shown(steps[0])} to {shown(steps[1])}"
        span = f" at step {shown(steps[0])}" if steps[0] == steps[1] else several
    seen = seen_of(event)
    return {
        "anchor": anchor,
        "title": f"{str(event.get('name', 'alert')).replace('-', ' ')}, step {shown(event.get('step'))}",
        "text": event.get("text", ""),
        "rows": rows,
        "caption": f"Evidence{span}",
        "seen": seen,
        "here": seen in here,
    }


# ---- completions: a few of three recorded steps, and what alerts point at ----------------------------------

GROUPS = 3
"""Maximum number of groups per step."""
MOST_ALERTS = 60
"""Maximum number of alerts."""
SEEN, SEEN_GROUPS, SEEN_RESPONSES = 24, 2, 2
"""Maximum numbers of alerts with completions, groups per alert, and responses per group."""
TOKENS = 200
"""Tokens of a response that are shown with their numbers; the rest is plain text."""
PROBABLE = (0.9, 0.5, 0.1, 0.01)
UNSURE = (0.1, 0.5, 1.0, 2.0)
MOVED = (0.01, 0.05, 0.2, 0.5)
"""Thresholds between the shades of probability, entropy (nats) and |log ratio|."""
WAYS = (
    ("advantage", "advantage", "solid underline: pushed up; dotted: pushed down; thicker: more"),
    ("logp", "log-prob", "a thicker underline and a darker shade: less likely"),
    ("entropy", "entropy", "a thicker underline and a darker shade: less certain"),
    ("ratio", "ratio", "solid underline: likelier than when it was sampled; dotted: less likely; thicker: more"),
    ("clipped", "clipped or not", "boxed: clipped at the last update that saw it"),
    ("plain", "nothing", "text alone"),
)
"""Quantities that can color the tokens. Radio buttons and CSS choose one, without a script."""
LABELS = {
    **{"advantage": "A", "logp": "log-prob", "entropy": "entropy", "ratio": "ratio", "clipped": "clipped"},
    **{"logp_ref": "log-prob of the reference", "value": "value"},
}
"""Per-token quantities and their labels."""


class Seen(NamedTuple):
    """Return the completions that the evidence of an alert names."""

    step: int
    show: str = "all"
    q: str = ""

    @property
    def anchor(self) -> str:
        return f"seen-{self.step}-{self.show}" + (f"-{key_of(self.q)}" if self.q else "")

    @property
    def words(self) -> str:
        return f"{self.show} responses" + (f" that contain “{self.q}”" if self.q else "")


def seen_of(event: Mapping[str, Any]) -> Seen | None:
    """Return the completions to look at, if the evidence names some."""
    named = part_of(part_of(event, "evidence", dict), "rollouts", dict)
    step, show, q = named.get("step"), named.get("show") or "all", named.get("q") or ""
    if not isinstance(step, int) or isinstance(step, bool) or show not in CHOICES["show"]:
        return None
    return Seen(step, show, q) if isinstance(q, str) and len(q) <= LONGEST else None


def gather_completions(
    folder: Path, kind: str, events: Iterable[Mapping[str, Any]], columns: MetricColumns
) -> dict[str, Any]:
    """Return completions of alerts and of the first, a middle and the last recorded step, with problems and notes."""
    steps, parts = recorded.recorded_steps(folder, kind), list[Row]()
    problems, notes, rows = list[str](), list[str](), list[Row]()
    pointed: dict[Seen, list[str]] = {}
    alerted = [event for event in events if event.get("event") == "alert"]
    for place, event in enumerate(alerted[:MOST_ALERTS]):
        if (seen := seen_of(event)) is not None and seen.step in steps:
            pointed.setdefault(seen, []).append(f"alert-{place}")
    if len(pointed) > SEEN:
        notes.append(f"alerts point at {len(pointed)} selections of completions, of which {SEEN} are here")
    some = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    for one, alerts in [*list(pointed.items())[:SEEN], *((Seen(step), list[str]()) for step in some)]:
        try:
            part = _read_part(folder, kind, one, alerts, columns)
        except READ_ERRORS as error:
            problems.append(f"step {one.step}: {error_line(error)}")
            continue
        parts.append(part)
        problems += part["problems"]
        notes += part["notes"]
        rows += [r["row"] for group in part["groups"] for r in group["picked"] if r["row"]]
    advantages = (real(a) for row in rows for a in row.get("advantage") or ())
    largest = max((abs(a) for a in advantages if a is not None), default=0.0)
    for group in (group for part in parts for group in part["groups"]):
        group["picked"] = [_with_numbers(response, largest) for response in group["picked"]]
    ways = [way for way in WAYS if way[0] == "plain" or any(row.get(way[0]) is not None for row in rows)]
    return {
        "parts": parts,
        "problems": list(dict.fromkeys(problems)),
        "notes": "".join(f"{text[0].upper()}{text[1:]}. " for text in dict.fromkeys(filter(None, notes))).strip(),
        "ways": ways if len(ways) > 1 else [],
    }


def _read_part(folder: Path, kind: str, seen: Seen, alerts: list[str], columns: MetricColumns) -> Row:
    """Return the completions of a step, or those that alerts name, with notes on their token data."""
    page = completions_page(folder, kind, seen.step, show=seen.show, q=seen.q, count=SEEN_GROUPS if alerts else GROUPS)
    notes: list[str] = []
    for group in page["groups"]:
        matches = [response | {"rank": "Matches:"} for response in group["responses"][:SEEN_RESPONSES]]
        group["picked"] = matches if alerts else _best_and_worst(group["responses"])
        for response in group["picked"]:
            of_tokens = tokens(folder, kind, page["step"], [group["group"]], response["sample"])
            response["row"] = next(iter(of_tokens["rows"]), None)
            clip = of_tokens["clip"]["words"]
            notes += [*of_tokens["missing"].values(), f"Clipped, {clip}" if clip.startswith("low:") else clip]
    sampled = columns.at_step(page["step"], "num_responses")
    rows, groups = (page["shares"].get(name) or 0 for name in ("all", "groups"))
    if sampled == rows:
        words = f"All {shown(rows)} responses of the step were recorded, in {plural(groups, 'group')}."
    else:
        of = f" of the {shown(int(sampled))}" if sampled is not None else ""
        words = f"Recorded: {shown(rows)}{of} responses of the step, in {plural(groups, 'group')}."
    words += f" {plural(page['responses'], 'response')} of them match; here are a few." if alerts else ""
    about = {"recorded": words, "seen": seen if alerts else None, "alerts": alerts, "notes": notes}
    return about | {name: page[name] for name in ("step", "groups", "problems")}


def _best_and_worst(responses: Sequence[Row]) -> list[Row]:
    """Return the best and the worst response of a group, or one if all rewards are equal."""
    known = [r for r in responses if r["reward"] is not None] or responses
    ranked = sorted(known, key=lambda r: real(r["reward"]) or 0.0)
    if ranked[-1]["reward"] == ranked[0]["reward"]:
        return [ranked[-1] | {"rank": "All rewards are equal; one response:"}]
    return [ranked[-1] | {"rank": "Best:"}, ranked[0] | {"rank": "Worst:"}]


def _with_numbers(response: Row, largest: float) -> Row:
    """Return a response as the page shows it: facts as text, and tokens with recorded numbers."""
    parts = [f"{name} {shown(value)}" for name, value in response["parts"].items() if value is not None]
    facts = [f"reward {shown(response['reward'])}" if response["reward"] is not None else "no reward"]
    if response["correct"] is not None:
        facts.append("✓ right" if response["correct"] else "✗ not right")
    facts += ["✂ cut off by the limit"] if response["truncated"] else []
    facts += ["⚠ its reward failed"] if response["status"] == "failed" else []
    facts += [f"A {shown(response['advantage'])}"] if response["advantage"] is not None else []
    facts += [f"{response['length']} tokens"] if response["length"] is not None else []
    made = response | {"facts": ", ".join(facts), "parts": f"Components: {', '.join(parts)}" if parts else ""}
    pieces = (response["row"] or {}).get("pieces")
    if not pieces:
        return made
    spaced = "".join(pieces).split() != response["text"].split() and all(p.strip("-").isdigit() for p in pieces)
    lists = {name: values for name in LABELS if (values := response["row"].get(name)) is not None}
    pieces, rest = pieces[:TOKENS], pieces[TOKENS:]
    known = [{n: v[i] for n, v in lists.items() if v[i] is not None} for i in range(len(pieces))]
    names = [name for name, *_ in WAYS if any(name in token for token in known)]
    both = list(zip(pieces, known, strict=True))
    mask, messages = response["row"].get("mask"), response["row"].get("messages") or []
    begins = accumulate((message["tokens"] for message in messages), initial=0)
    heads = {at: f"{message['role']}, {message['description']}" for at, message in zip(begins, messages, strict=False)}
    return made | {
        "gap": " " if spaced else "",
        "rest": "".join(rest),
        "tokens": [
            {
                "text": str(piece).replace("\n", "↵\n") or "∅",
                "class": "o" if mask and not mask[i] else _shades(token, largest),
                "head": heads.get(i, ""),
                "title": ", ".join(f"{LABELS[name]} {shown(value)}" for name, value in token.items()),
            }
            for i, (piece, token) in enumerate(both)
        ],
        "head": ["token", *(LABELS[name] for name in names)] if names else [],
        "rows": [[repr(piece)[1:-1], *(shown(token.get(name)) for name in names)] for piece, token in both],
    }


def _shades(token: Mapping[str, Any], largest: float) -> str:
    """Return the CSS classes of a token: a shade and a sign per quantity."""
    classes = []
    advantage, logp, entropy, ratio = (real(token.get(name)) for name in ("advantage", "logp", "entropy", "ratio"))
    if advantage and largest > 0:
        classes.append(f"{'a' if advantage > 0 else 'z'}{min(4, 1 + int(4 * abs(advantage) / largest * 0.999))}")
    if logp is not None and (shade := sum(math.exp(min(logp, 0.0)) < p for p in PROBABLE)):
        classes.append(f"l{shade}")
    if entropy is not None and (shade := sum(entropy >= bound for bound in UNSURE)):
        classes.append(f"e{shade}")
    if ratio is not None and ratio > 0 and (shade := sum(abs(math.log(ratio)) >= bound for bound in MOVED)):
        classes.append(f"{'r' if ratio > 1 else 'q'}{shade}")
    return " ".join([*classes, "k"] if token.get("clipped") else classes)


# ---- greedy answers: right at the first recorded evaluation, and at the last ----------------------------

COLUMNS = (*recorded.REQUIRED_COLUMNS, "valid", "correct", "status")
CHANGES = {(0, 1): "wrong → right", (1, 0): "right → wrong", (0, 0): "still wrong"}
EACH = 2
"""Maximum number of answers per kind of change."""
LONGEST_ANSWER = 300
"""Maximum number of characters of an answer."""


def gather_answers(folder: Path, kind: str, greedy: str) -> dict[str, Any] | None:
    """Return how the answers changed between two evaluations; None if none were recorded."""
    steps, problems = recorded.recorded_steps(folder, kind, recorded.HELD_OUT), list[str]()
    if not steps:
        return None

    def readable(steps: Sequence[int]) -> tuple[int, dict[Any, Row]] | None:
        """Return the first of these steps with a readable file, and its answers by prompt."""
        for step in steps:
            try:
                with naming_file(recorded.rollout_path(folder, step, recorded.HELD_OUT)):
                    groups = groups_of(recorded.summary_rows(folder, kind, step, COLUMNS, recorded.HELD_OUT))
                    return step, {(group["group"], group["prompt"]): group for group in groups}
            except (ConfigError, OSError) as error:
                problems.append(str(error))
        return None

    first, last = readable(steps), readable(steps[::-1])
    about: dict[str, Any] = {"problems": list(dict.fromkeys(problems))}
    if first is None or last is None:
        return about
    return about | (_changes(*first, *last, greedy) if first[0] < last[0] else _one(*last, greedy))


def _changes(first: int, before: dict[Any, Row], last: int, after: dict[Any, Row], greedy: str) -> dict[str, Any]:
    both = [(before[key], after[key]) for key in before if key in after]
    counts = Counter((a["right"], b["right"]) for a, b in both)
    unknown = sum(count for kind, count in counts.items() if None in kind)
    words = (
        f"{plural(len(both), 'prompt')} ({greedy}), at step {shown(first)} and at step {shown(last)}, the first "
        f"and the last evaluation whose answers can be read: {counts[0, 1]} went from wrong to right, "
        f"{counts[1, 0]} from right to wrong, {counts[0, 0]} stayed wrong and {counts[1, 1]} stayed right"
    )
    words += f"; of {unknown} it is not known." if unknown else "."
    rows = []
    for change, name in CHANGES.items():
        for a, b in [(a, b) for a, b in both if (a["right"], b["right"]) == change][:EACH]:
            rows.append([name, _text(a["prompt"]), _answer(a), _answer(b)])
    head = ["", "prompt", f"answer at step {shown(first)}", f"answer at step {shown(last)}"]
    return {"words": words, "head": head, "rows": rows, "caption": "A few of them"}


def _one(step: int, answers: dict[Any, Row], greedy: str) -> dict[str, Any]:
    right = sum(group["right"] or 0 for group in answers.values())
    words = f"{plural(len(answers), 'prompt')} ({greedy}), at step {shown(step)}: {right} right."
    wrong = [group for group in answers.values() if group["right"] == 0][: 2 * EACH]
    examples = [["wrong", _text(group["prompt"]), _answer(group)] for group in wrong]
    return {"words": words, "head": ["", "prompt", "answer"], "rows": examples, "caption": "A few wrong ones"}


def _answer(group: Row) -> Markup:
    return _text(group["responses"][0]["text"])


def _text(text: str) -> Markup:
    cut = text[:LONGEST_ANSWER] + " …" * (len(text) > LONGEST_ANSWER)
    return Markup('<span class="text">{}</span>').format(displayable(cut))
