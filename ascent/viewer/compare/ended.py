"""How runs ended: last values over seeds, differences to one setting, and what keeps them from being subtracted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ascent.diagnose.seeds import over_seeds
from ascent.viewer.digest import Digest
from ascent.viewer.exact import Exact

if TYPE_CHECKING:
    from ascent.viewer.compare.comparison import Side

FINALS = (
    "eval/accuracy",
    "accuracy",
    "eval/pairs/accuracy",
    "eval/logp",
    "exact/reward",
    "eval/reward",
    "reward",
    "entropy",
    "kl",
    "completions/mean_length",
    "frac_reward_zero_std",
)
"""What the last table has, where it was measured."""
COSTS = {"steps": None, "responses": "num_responses", "tokens": "num_tokens", "seconds": "time/step"}
DIFFERENCE = ("difference", "difference_half", "pairs")
ENDED = ("finished", "foreign")
"""What a run is whose last values may be its end."""
NAMED = 3
"""Settings, or runs, that a sentence names at most."""
Groups = Mapping[str, "Sequence[Side]"]


def final(digest: Digest) -> dict[str, Any]:
    """The last value of every measure, and what the run has cost."""
    exact = Exact(digest)
    found: dict[str, Any] = {m: last[0] for m in FINALS if (last := exact.last(m)) is not None}
    costs = {name: exact.total(metric) for name, metric in COSTS.items() if metric}
    return found | costs | {"steps": int(digest.last[-1]) + 1 if len(digest.last) else 0}


def finals(groups: Groups, digests: Mapping[str, Digest], base: str | None = None) -> dict[str, Any]:
    """A row a group: mean, interval, paired difference to the group that holds the run `base` (else to the first).

    Between groups whose task or reward differ there is no difference: their numbers do not measure the same.
    """
    held = {name: {seed_of(run): final(digests[run.id]) for run in group} for name, group in groups.items()}
    first = next((name for name, group in groups.items() if base in [run.id for run in group]), next(iter(groups)))
    measures = (*FINALS, *COSTS)
    rows = over_seeds({first: held[first]} | held, dict.fromkeys(held, measures))
    reasons = {name: why for name in groups if (why := unlike(groups[first], groups[name]))}
    for name in reasons:
        rows[name] = {m: {k: v for k, v in one.items() if k not in DIFFERENCE} for m, one in rows[name].items()}
    alone = [name for name, ends in held.items() if len(ends) == 1]
    which = "" if len(alone) == len(held) else f": {', '.join(alone)}"
    return {
        "measures": [m for m in measures if any(m in row for row in rows.values())],
        "rows": rows,
        "base": first,
        "apart": reasons,
        "cautions": [*told_apart(first, reasons), *budgets(first, held), *unfinished(groups)],
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
    tasks, held = [task_of(group[0]) for group in (first, other)], [group[0].config for group in (first, other)]
    if tasks[0] != tasks[1]:
        return f"another task ({tasks[1] or 'unknown'}, not {tasks[0] or 'unknown'})"
    if not all(held) and any(held):
        return "the settings of one of them are not known"
    settings = [flat(config.get("task")) for config in held]
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


def task_of(run: Side) -> str:
    return str(run.row.get("task") or flat(run.config.get("task")).get("name") or "")


def flat(held: Any) -> Mapping[str, Any]:
    """What a file holds where an object should be."""
    return held if isinstance(held, Mapping) else {} if held is None else {"name": held}


def told_apart(first: str, reasons: Mapping[str, str]) -> list[str]:
    return [f"No difference is taken between {first} and {name}: {why}." for name, why in reasons.items()]


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


def unfinished(groups: Groups) -> list[str]:
    """Runs whose last values are not their end, or are no end that was meant."""
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
