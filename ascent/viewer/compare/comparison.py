"""Runs beside one another: what differs in their settings, which are seeds of one setting, and how they ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascent.menu import nearest
from ascent.types import Refused
from ascent.viewer import about
from ascent.viewer.charts import DRAWN, GREEDY, charts_of, greedy_of
from ascent.viewer.compare.ended import finals, seed_of
from ascent.viewer.compare.overlay import AXES, EVERYTHING, View, overlay
from ascent.viewer.curves import POINTS, Library, measured
from ascent.viewer.digest import Digest
from ascent.viewer.exact import Exact
from ascent.viewer.places import Place, find
from ascent.viewer.reading import number, read_object

MOST = 50
"""Runs that are compared at once."""
BRIEF = ("id", "kind", "task", "label", "seed", "status", "said", "step", "steps", "max_reward")
NAMED = 3
"""Settings that a group's name spells out, at most."""
LONGEST = 40
LEGEND = 32
"""Characters of a setting's name beyond which a legend shortens it."""


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
    if len(wanted) > MOST:
        raise Refused(f"{len(wanted)} runs: at most {MOST} are compared at once. Leave some out")
    found = []
    for id in wanted:
        place = find(root, id)
        config, _ = read_object(place.folder / "config.json") if place.kind == "ascent" else ({}, "")
        row = {key: value for key, value in about.row(place).items() if key in BRIEF}
        if row["seed"] is None:  # run.json may be damaged where config.json is not
            row["seed"] = number(config.get("seed"))
        found.append(Side(place, row, {k: v for k, v in config.items() if k not in about.SAID}))
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


def difference(runs: Sequence[Side]) -> list[dict[str, Any]]:
    """The settings that are not the same in all runs: a name, and one value a run (None: it has no such setting)."""
    flat = [dotted(run.config) for run in runs]
    found = list(dict.fromkeys(name for one in flat for name in one))
    axes = list(dict.fromkeys(name.split(".")[0] for name in found))
    names = sorted(found, key=lambda name: axes.index(name.split(".")[0]))  # what belongs to one choice stands together
    rows = []
    for name in names:
        if len({repr(one[name]) if name in one else None for one in flat}) > 1:
            rows.append({"name": name, "values": [spelled(one[name]) if name in one else None for one in flat]})
    return rows


def spelled(value: Any) -> str:
    """A setting as config.json has it; a word without its quotes."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def grouped(runs: Sequence[Side]) -> dict[str, list[Side]]:
    """Runs that are the same but for their seed, under a name that tells them from the others."""
    by_setting: dict[str, list[Side]] = {}
    for run in runs:
        by_setting.setdefault(run.setting, []).append(run)
    groups = list(by_setting.values())
    heads = [group[0] for group in groups]
    labels = [str(head.row.get("label") or "") or head.id for head in heads]
    tasks = [str(head.row.get("task") or "") for head in heads]
    apart = [row for row in difference(heads) if row["name"] not in ("seed", "task")]
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
    words = [f"{row['name']} {short(row['values'][i])}" for row in rows if row["values"][i] is not None]
    return [*words[:NAMED], "…"] if len(words) > NAMED else words


def short(text: str) -> str:
    """0.009000000000000001 as 0.009, and no more than a few words."""
    try:
        return f"{float(text):g}"
    except ValueError:
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


# ---- all of it ----------------------------------------------------------------------------------------


class Comparison:
    """Some runs of a folder. Their curves are read when it is entered, and stay as they are until it is left."""

    def __init__(self, root: Path, ids: Sequence[str], library: Library):
        self.runs = sides(root, ids)
        self.groups = distinct(grouped(self.runs), [run.id for run in self.runs])
        self.library, self.digests = library, dict[str, Digest]()
        self._held = ExitStack()

    def __enter__(self) -> Comparison:
        """In the order of their folders, so that two comparisons never wait for one another."""
        with ExitStack() as stack:
            for run in sorted(self.runs, key=lambda run: run.place.folder):
                self.digests[run.id] = stack.enter_context(self.library.digest(run.place))
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._held.close()
        self.digests = {}

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
        known = {*DRAWN, *(name for digest in self.digests.values() for name in digest.metrics)}
        for metric in metrics:
            if metric not in known:
                raise Refused(f"metric={metric[:80]}: none of these runs has it.{nearest(metric, known)}")
        exacts = {id: Exact(digest) for id, digest in self.digests.items()}
        return {metric: overlay(ids, exacts, metric, axis, points, drawn, view) for metric in metrics}

    def charts(self) -> list[dict[str, Any]]:
        """What there is to draw, in order."""
        called = {greedy_of(run.row["task"]) for run in self.runs}
        have = set().union(*(measured(digest) for digest in self.digests.values()))
        return charts_of(have, called.pop() if len(called) == 1 else GREEDY)

    def told(self) -> dict[str, Any]:
        """Everything but the curves, and how they ended."""
        have = [digest.metrics for digest in self.digests.values()]
        return {
            "runs": {run.id: dict(run.row) for run in self.runs},
            "order": [run.id for run in self.runs],
            "groups": [about_group(i, name, group) for i, (name, group) in enumerate(self.groups.items(), 1)],
            "difference": difference(self.runs),
            "charts": self.charts(),
            "axes": [axis for axis, metric in AXES.items() if metric is None or any(metric in one for one in have)],
        }

    def ends(self, base: str | None = None) -> dict[str, Any]:
        return finals(self.groups, self.digests, base)


def about_group(i: int, name: str, group: Sequence[Side]) -> dict[str, Any]:
    seeds = [run.row.get("seed") for run in group]
    title = f"{name} × {len(group)} seeds" if len(group) > 1 else name
    return {
        "name": name,
        "short": brief_name(i, name),
        "title": title,
        "ids": [run.id for run in group],
        "seeds": seeds,
    }


def brief_name(i: int, name: str) -> str:
    """A name for a legend: a long one as its number and its first words."""
    if len(name) <= LEGEND:
        return name
    words = name[: LEGEND - 4].rsplit(" ", 1)[0].rstrip(" ,…")
    return f"{i}: {words} …"


def distinct(groups: Mapping[str, list[Side]], order: Sequence[str]) -> dict[str, list[Side]]:
    """Two runs of one setting and one seed are no two seeds: the second is a group of its own.

    Groups come in the order in which their first runs were named.
    """
    found: dict[str, list[Side]] = {}
    for name, group in groups.items():
        seen: dict[Any, int] = {}
        for run in group:
            again = seen[seed_of(run)] = seen.get(seed_of(run), 0) + 1
            found.setdefault(name if again == 1 else f"{name}, again {again}", []).append(run)
    return dict(sorted(found.items(), key=lambda one: order.index(one[1][0].id)))
