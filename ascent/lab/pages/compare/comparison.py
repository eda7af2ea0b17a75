"""Runs beside one another: what differs in their settings, which are seeds of one setting, and how they ended.

Of how they ended: last values over seeds, differences to one setting, and what keeps them from being subtracted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascent.core.menu import nearest
from ascent.core.types import Refused
from ascent.lab.curves import POINTS, Library, measured_metrics
from ascent.lab.pages.compare.overlay import AXES, EVERYTHING, View, overlay
from ascent.lab.pages.run.about import DESCRIPTION
from ascent.lab.pages.runs.rows import run_row
from ascent.records.columns import Columns
from ascent.records.metrics import COSTS, DRAWN, GREEDY, HEADLINES, charts_of, greedy_of
from ascent.records.places import Place, find_run
from ascent.records.reading import finite_number, read_object
from ascent.records.seeds import over_seeds

MOST_COMPARED = 50
"""Runs that are compared at once."""
BRIEF = ("id", "kind", "task", "label", "seed", "status", "said", "step", "steps", "max_reward")
NAMED = 3
"""Settings or runs that a name or a sentence spells out, at most."""
LONGEST = 40
LEGEND = 32
"""Characters of a setting's name beyond which a legend shortens it."""
SPENT = {"responses": COSTS["samples"], "tokens": COSTS["tokens"], "seconds": COSTS["seconds"]}
"""What a run has cost, and the metric that says it."""
DIFFERENCE = ("difference", "difference_half", "pairs")
ENDED = ("finished", "foreign")
"""What a run is whose last values may be its end."""


@dataclass
class Side:
    """One run of a comparison."""

    place: Place
    row: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.place.id

    @property
    def setting(self) -> str:
        """All settings but the seed, as one string; a run whose settings are unknown is like no other."""
        if not self.config:
            return f"unknown: {self.id}"
        return json.dumps({k: v for k, v in self.config.items() if k != "seed"}, sort_keys=True)


def sides(root: Path, ids: Sequence[str]) -> list[Side]:
    """The runs of some ids, each once."""
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        raise Refused("nothing to compare: name at least one run, id=…")
    if len(wanted) > MOST_COMPARED:
        raise Refused(f"{len(wanted)} runs: at most {MOST_COMPARED} are compared at once. Leave some out")
    found = []
    for id in wanted:
        place = find_run(root, id)
        config, _ = read_object(place.folder / "config.json") if place.kind == "ascent" else ({}, "")
        row = {key: value for key, value in run_row(place).items() if key in BRIEF}
        if row["seed"] is None:  # run.json may be damaged where config.json is not
            row["seed"] = finite_number(config.get("seed"))
        found.append(Side(place, row, {k: v for k, v in config.items() if k not in DESCRIPTION}))
    return found


def dotted(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """{"loss": {"name": "clipped", "low": 0.2}} -> loss: clipped, loss.low: 0.2."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= {f"{above}{key}": value["name"]} if "name" in value else {}
            found |= dotted({k: v for k, v in value.items() if k != "name"}, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def differing_settings(runs: Sequence[Side]) -> list[dict[str, Any]]:
    """The settings that are not the same in all runs: a name, and one value per run (None: it has no such setting)."""
    flat = [dotted(run.config) for run in runs]
    found = list(dict.fromkeys(name for one in flat for name in one))
    axes = list(dict.fromkeys(name.split(".")[0] for name in found))
    names = sorted(found, key=lambda name: axes.index(name.split(".")[0]))  # what belongs to one choice stands together
    rows = []
    for name in names:
        if len({repr(one[name]) if name in one else None for one in flat}) > 1:
            rows.append({"name": name, "values": [setting_text(one[name]) if name in one else None for one in flat]})
    return rows


def setting_text(value: Any) -> str:
    """A setting as config.json has it; a word without its quotes."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def setting_groups(runs: Sequence[Side]) -> dict[str, list[Side]]:
    """Runs that are the same but for their seed, under a name that tells them from the others."""
    by_setting: dict[str, list[Side]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, []).append(run)
    groups = list(by_setting.values())
    heads = [group[0] for group in groups]
    labels = [str(head.row.get("label") or "") or head.id for head in heads]
    tasks = [str(head.row.get("task") or "") for head in heads]
    apart = [row for row in differing_settings(heads) if row["name"] not in ("seed", "task")]
    found: dict[str, list[Side]] = {}
    for i, group in enumerate(groups):
        alike = [j for j, label in enumerate(labels) if label == labels[i] and tasks[j] == tasks[i]]
        words = own_settings(i, alike, apart)
        name = [tasks[i]] if len(set(tasks)) > 1 else []
        name += [labels[i]] if len(set(labels)) > 1 or not words else []
        title = " ".join(filter(None, [*name, *words]))
        found[f"{title} ({group[0].id})" if title in found else title] = group
    return found


def own_settings(i: int, alike: Sequence[int], apart: Sequence[Mapping[str, Any]]) -> list[str]:
    """What sets a group apart from those of the same label: update.lr 0.01, loss.high 0.28, …"""
    rows = [row for row in apart if len({row["values"][j] for j in alike}) > 1]
    words = [f"{row['name']} {_short(row['values'][i])}" for row in rows if row["values"][i] is not None]
    return [*words[:NAMED], "…"] if len(words) > NAMED else words


def _short(text: str) -> str:
    """0.009000000000000001 as 0.009, and no more than a few words."""
    try:
        return f"{float(text):g}"
    except ValueError:
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def final(columns: Columns) -> dict[str, Any]:
    """The last value of every measure, and what the run has cost."""
    ends: dict[str, Any] = {m: last[0] for m in HEADLINES if (last := columns.last(m)) is not None}
    costs = {name: columns.total(metric) for name, metric in SPENT.items()}
    return ends | costs | {"steps": int(columns.steps[-1]) + 1 if columns.kept else 0}


def finals(
    groups: Mapping[str, Sequence[Side]], columns: Mapping[str, Columns], base: str | None = None
) -> dict[str, Any]:
    """A row per group: mean, interval, paired difference to the group that holds the run `base` (else to the first).

    Between groups whose task or reward differ there is no difference: their numbers do not measure the same.
    """
    held = {name: {seed_of(run): final(columns[run.id]) for run in group} for name, group in groups.items()}
    first = next((name for name, group in groups.items() if base in [run.id for run in group]), next(iter(groups)))
    measures = (*HEADLINES, "steps", *SPENT)
    rows = over_seeds({first: held[first]} | held, dict.fromkeys(held, measures))
    reasons = {name: why for name in groups if (why := unlike(groups[first], groups[name]))}
    for name in reasons:
        rows[name] = {m: {k: v for k, v in one.items() if k not in DIFFERENCE} for m, one in rows[name].items()}
    apart = [f"No difference is taken between {first} and {name}: {why}." for name, why in reasons.items()]
    alone = [name for name, ends in held.items() if len(ends) == 1]
    which = "" if len(alone) == len(held) else f": {', '.join(alone)}"
    return {
        "measures": [m for m in measures if any(m in row for row in rows.values())],
        "rows": rows,
        "base": first,
        "apart": reasons,
        "cautions": [*apart, *budgets(first, held), *unfinished(groups)],
        "notes": [f"One seed has no interval{which}."] if alone else [],
    }


def seed_of(run: Side) -> Any:
    """By its seed a run is paired; without one it is like no other."""
    seed = run.row.get("seed")
    return run.id if seed is None else seed


# ---- what cannot be subtracted --------------------------------------------------------------------------


def unlike(first: Sequence[Side], other: Sequence[Side]) -> str:
    """Why the numbers of two groups do not measure the same; "" where they do."""
    if first is other:
        return ""
    runs, held = (first[0], other[0]), (first[0].config, other[0].config)
    settings = [as_mapping(config.get("task")) for config in held]
    tasks = [str(run.row.get("task") or own.get("name") or "") for run, own in zip(runs, settings, strict=True)]
    if tasks[0] != tasks[1]:
        return f"another task ({tasks[1] or 'unknown'}, not {tasks[0] or 'unknown'})"
    if not all(held) and any(held):
        return "the settings of one of them are not known"
    names = [n for n in dict.fromkeys([*settings[0], *settings[1]]) if settings[0].get(n) != settings[1].get(n)]
    if names:
        words = [f"task.{n} {settings[1].get(n, '–')}, not {settings[0].get(n, '–')}" for n in names[:NAMED]]
        return f"another task or reward ({'; '.join(words)}{'; …' if len(names) > NAMED else ''})"
    most = [
        next((m for run in group if (m := run.row.get("max_reward")) is not None), None) for group in (first, other)
    ]
    if None not in most and most[0] != most[1]:
        return f"another reward (its largest is {most[1]}, not {most[0]})"
    return ""


def as_mapping(held: Any) -> Mapping[str, Any]:
    """What a file holds where an object should be."""
    return held if isinstance(held, Mapping) else {} if held is None else {"name": held}


def budgets(first: str, held: Mapping[str, Mapping[Any, Mapping[str, Any]]]) -> list[str]:
    """That seeds of a group, or groups, have done more steps than others."""
    done = {name: sorted({end["steps"] for end in ends.values()}) for name, ends in held.items()}
    found = [
        f"{name}: its runs have {steps[0]:,} to {steps[-1]:,} steps, and each is taken at its own end."
        for name, steps in done.items()
        if len(steps) > 1
    ]
    other = [name for name, steps in done.items() if steps[-1] != done[first][-1]]
    if other:
        words = ", ".join(f"{name} {done[name][-1]:,}" for name in other[:NAMED])
        more = f" and {len(other) - NAMED} more" if len(other) > NAMED else ""
        found.append(
            f"Steps done differ: {first} {done[first][-1]:,}, {words}{more}. "
            "A difference is then also one of budget: compare the curves at a step that all have."
        )
    return found


def unfinished(groups: Mapping[str, Sequence[Side]]) -> list[str]:
    """Runs that have not ended, or that ended earlier than planned: their last values are not final."""
    found: dict[str, list[str]] = {}
    for run in (run for group in groups.values() for run in group):
        if (status := str(run.row.get("status"))) not in ENDED:
            found.setdefault(status, []).append(run.id)
    ends = {"running": "still running, so this is not yet how it ended", "died": "died before its end"}
    ends |= {"failed": "failed before its end", "interrupted": "stopped before its end"}
    return [
        f"{', '.join(ids[:NAMED])}{f' and {len(ids) - NAMED} more' if len(ids) > NAMED else ''}: {ends.get(s, s)}."
        for s, ids in found.items()
    ]


# ---- all of it ----------------------------------------------------------------------------------------


class Comparison:
    """Some runs of a folder. Their curves are read when it is entered, and stay as they are until it is left."""

    def __init__(self, root: Path, ids: Sequence[str], library: Library):
        self.runs = sides(root, ids)
        self.groups = distinct(setting_groups(self.runs), [run.id for run in self.runs])
        self.library, self.columns = library, dict[str, Columns]()
        self._held = ExitStack()

    def __enter__(self) -> Comparison:
        """In the order of their folders, so that two comparisons never wait for one another."""
        with ExitStack() as stack:
            for run in sorted(self.runs, key=lambda run: run.place.folder):
                self.columns[run.id] = stack.enter_context(self.library.columns(run.place))
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._held.close()
        self.columns = {}

    def curves(
        self,
        metrics: Sequence[str],
        axis: str = "step",
        points: int = POINTS,
        drawn: bool = True,
        view: View = EVERYTHING,
    ) -> dict[str, Any]:
        """As they are drawn; or with all digits, and intervals that go where they go. Of a view, its exact points."""
        if axis not in AXES:
            raise Refused(f"x={axis[:20]}: there are {', '.join(AXES)}")
        ids = {name: [run.id for run in group] for name, group in self.groups.items()}
        known = {*DRAWN, *(name for columns in self.columns.values() for name in columns.names)}
        for metric in metrics:
            if metric not in known:
                raise Refused(f"metric={metric[:80]}: none of these runs has it.{nearest(metric, known)}")
        return {metric: overlay(ids, self.columns, metric, axis, points, drawn, view) for metric in metrics}

    def charts(self) -> list[dict[str, Any]]:
        """What there is to draw, in order."""
        called = {greedy_of(run.row["task"]) for run in self.runs}
        have = set().union(*(measured_metrics(columns) for columns in self.columns.values()))
        return charts_of(have, called.pop() if len(called) == 1 else GREEDY)

    def summary(self) -> dict[str, Any]:
        """Everything but the curves, and how they ended."""
        have = list(self.columns.values())
        return {
            "runs": {run.id: dict(run.row) for run in self.runs},
            "order": [run.id for run in self.runs],
            "groups": [about_group(i, name, group) for i, (name, group) in enumerate(self.groups.items(), 1)],
            "difference": differing_settings(self.runs),
            "charts": self.charts(),
            "axes": [axis for axis, metric in AXES.items() if metric is None or any(metric in one for one in have)],
        }

    def ends(self, base: str | None = None) -> dict[str, Any]:
        return finals(self.groups, self.columns, base)


def about_group(i: int, name: str, group: Sequence[Side]) -> dict[str, Any]:
    title = f"{name} × {len(group)} seeds" if len(group) > 1 else name
    ids, seeds = [run.id for run in group], [run.row.get("seed") for run in group]
    return {"name": name, "short": brief_name(i, name), "title": title, "ids": ids, "seeds": seeds}


def brief_name(i: int, name: str) -> str:
    """A name for a legend: a long one as its number and its first words."""
    if len(name) <= LEGEND:
        return name
    words = name[: LEGEND - 4].rsplit(" ", 1)[0].rstrip(" ,…")
    return f"{i}: {words} …"


def distinct(groups: Mapping[str, list[Side]], order: Sequence[str]) -> dict[str, list[Side]]:
    """Two runs with the same setting and the same seed do not count as two seeds: the second is a group of its own.

    Groups come in the order in which their first runs were named.
    """
    found: dict[str, list[Side]] = {}
    for name, group in groups.items():
        seen: dict[Any, int] = {}
        for run in group:
            again = seen[seed_of(run)] = seen.get(seed_of(run), 0) + 1
            found.setdefault(name if again == 1 else f"{name}, again {again}", []).append(run)
    return dict(sorted(found.items(), key=lambda one: order.index(one[1][0].id)))
