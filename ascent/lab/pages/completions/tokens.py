"""A response token by token, with its numbers, and whether the run's own loss clipped it.

ρ = exp(logp − logp_old) at the last update that saw the response. What is clipped is asked of the loss object that the
run's config.json names. A loss of the user's own is code, and is not run by whoever looks at a folder.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.lab.pages.completions.completions import check_choices, json_number
from ascent.records import responses as recorded
from ascent.records.reading import read_object

Row = dict[str, Any]
OLD = "this file was written before the trainer recorded it"
ABSENT = {
    "pieces": f"The texts of the tokens are not there ({OLD}): their numbers in the vocabulary are shown",
    "entropy": f"No entropy: {OLD}, or the engine does not know it",
    "ratio": "No ratio: no update saw these responses",
}
UNSEEN = "No update saw these answers"
FOREIGN = "This run's files hold texts, rewards and advantages, and nothing about single tokens"


def tokens(
    folder: Path,
    kind: str,
    step: int,
    groups: Iterable[int],
    sample: int | None = None,
    which: str = recorded.SAMPLED,
) -> dict[str, Any]:
    """The tokens of some groups of a step, in columns; `missing` says what no row has, and why."""
    check_choices(set=which)
    held = which == recorded.HELD_OUT
    rows = recorded.whole_rows(folder, kind, step, groups, sample, which)
    if kind != "ascent":
        return {"step": step, "missing": {"tokens": FOREIGN}, "clip": {"words": FOREIGN}, "rows": []}
    loss, clip = (None, {"words": UNSEEN}) if held else loss_of(folder)
    made = [of_answer(row) if held else of_row(row, loss) for row in rows]
    absent = {"pieces": ABSENT["pieces"]} if held else ABSENT
    missing = {name: words for name, words in absent.items() if made and all(row[name] is None for row in made)}
    for row in made:
        row["pieces"] = row["pieces"] if row["pieces"] is not None else [f"⟨{i}⟩" for i in row["ids"]]
    return {"step": step, "missing": missing, "clip": clip, "rows": made}


def of_answer(row: Row) -> Row:
    """One greedy answer: nothing but the log-prob of its tokens is known, and that is the sampler's."""
    made = of_row({k: row.get(k) for k in ("group", "sample", "response", "pieces", "mask", "logp_sampler")}, None)
    return made | {"logp": made["logp_sampler"], "logp_sampler": None}


def of_row(row: Row, loss: Any) -> Row:
    """One response. A list of another length than its tokens is not shown: it would sit beside the wrong ones."""
    ids, updates, credit = (row.get(name) or [] for name in ("response", "logp", "advantage"))
    mask = row.get("mask")
    if not (isinstance(mask, list) and len(mask) == len(ids) and all(isinstance(drawn, bool) for drawn in mask)):
        row = row | {"mask": None}

    def per_token(values: list[Any] | None) -> list[float] | None:
        """A number per token; what the file has no number for is NaN."""
        if values is None or len(values) != len(ids):
            return None
        return [math.nan if v is None else v for v in values]

    lists = {name: per_token(row.get(name)) for name in ("logp_sampler", "logp_ref", "entropy")}
    lists["logp"] = logp = per_token(row.get("logp_old"))
    lists["advantage"] = advantage = per_token(credit * len(ids) if len(credit) == 1 else credit)
    lists["value"] = per_token(row["value"][: len(ids)]) if row.get("value") and ids else None
    pieces, last = row.get("pieces"), per_token(updates[-1]) if updates else None
    made: Row = {"group": row["group"], "sample": row["sample"], "ids": ids}
    made["pieces"] = pieces if pieces is not None and len(pieces) == len(ids) else None
    made |= {name: None if values is None else [json_number(v) for v in values] for name, values in lists.items()}
    made |= {"ratio": None, "clipped": None, "sequence_ratio": None, "updates": len(updates)}
    if logp is not None and last is not None:
        made["ratio"] = [json_number(_exp(now - old)) for now, old in zip(last, logp, strict=True)]
        if loss is not None and advantage is not None:
            made |= _clips(row, loss, last, logp, advantage)
    return made if row.get("mask") is None else _of_actions(made, row["mask"])


def _of_actions(made: Row, mask: list[bool]) -> Row:
    """The row without numbers at observations: the policy did not write those tokens."""
    for name, values in made.items():
        if isinstance(values, list) and name not in ("ids", "pieces") and len(values) == len(mask):
            made[name] = [value if drawn else None for value, drawn in zip(values, mask, strict=True)]
    return made | {"mask": mask}


def _exp(log: float) -> float:
    try:
        return math.exp(log)
    except OverflowError:
        return math.inf


def _clips(row: Row, loss: Any, logp: list[float], logp_old: list[float], advantage: list[float]) -> Row:
    """On which side each token is clipped, by the loss itself; and the ratio of a whole response where it uses one."""
    import torch

    now, old, δ = (torch.tensor([[values]], dtype=torch.float32) for values in (logp, logp_old, advantage))
    drawn = torch.tensor([[row.get("mask") or [True] * len(logp)]], dtype=torch.bool)
    counted = drawn & (row.get("valid") is not False)
    if loss.sequence:
        δ = δ[..., :1]
    made: Row = {}
    if hasattr(loss, "log_ratio") and len(logp):
        made["sequence_ratio"] = json_number(float(torch.exp(loss.log_ratio(now - old, counted))))
    clips = loss.clipped(now, old, δ, counted) if len(logp) else None
    if clips is None:
        return made
    low, high = ((side & counted)[0, 0].tolist() for side in clips)
    ρ = torch.exp(now - old)[0, 0].tolist()
    dual = getattr(loss, "dual", None)
    far = [dual is not None and r > dual and a < 0 for r, a in zip(ρ, advantage, strict=True)]
    made["clipped"] = [
        "low" if is_low else "high" if is_high else "dual" if is_far else None
        for is_low, is_high, is_far in zip(low, high, far, strict=True)
    ]
    return made


def clip_ratios(rows: list[Row], loss: Any) -> dict[str, float]:
    """The shares of clipped tokens that the learner reports of a step, from all its rows: means over the updates."""
    sums: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        if row.get("valid") is False:
            continue
        logp_old = row["logp_old"]
        credit = row["advantage"] * len(logp_old) if len(row["advantage"]) == 1 else row["advantage"]
        for update, logp in zip(row["logp_update"], row["logp"], strict=True):
            sides = _clips(row, loss, logp, logp_old, credit).get("clipped") or []
            tokens = sum(row.get("mask") or [True] * len(logp_old))
            for i, found in enumerate((sides.count("low"), sides.count("high"), tokens)):
                sums[update][i] += found
    low, high = ([part[i] / max(part[2], 1) for part in sums.values()] for i in (0, 1))
    return {"low": sum(low) / max(len(low), 1), "high": sum(high) / max(len(high), 1)}


# ---- the loss of a run -----------------------------------------------------------------------------


def loss_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The loss that config.json names, and what clipping means for it in words; None where it cannot be made here."""
    try:
        given = read_object(folder / "config.json")[0]["loss"]
        name, fields = str(given["name"]), {k: v for k, v in given.items() if k != "name"}
    except (KeyError, TypeError, AttributeError):
        return None, {"words": "config.json names no loss, so nobody knows here what was clipped"}
    if ":" in name:
        return None, {"words": f"the loss is the user's own ({name}): what it clips is not computed here"}
    from ascent.core.algorithms import MENU
    from ascent.core.menu import name_of
    from ascent.settings import build

    cls = next((cls for cls in MENU["loss"] if name_of(cls) == name), None)
    try:
        loss = build("loss", cls, fields) if cls is not None else None
    except (Refused, TypeError):
        loss = None
    if loss is None:
        return None, {"words": f"config.json names a loss that this version does not know: {name[:80]}"}
    return loss, {"name": name, "sequence": loss.sequence, **_bounds(loss), "words": _words(loss, name)}


def _bounds(loss: Any) -> dict[str, float | None]:
    return {side: getattr(loss, side, None) for side in ("low", "high", "dual")}


def _words(loss: Any, name: str) -> str:
    low, high, dual = _bounds(loss).values()
    if low is None or high is None:
        return f"{name} never clips"
    what = "the response's ratio" if loss.sequence else "ρ"
    words = f"low: {what} < {1 - low:.6g} and the advantage is below 0; high: {what} > {1 + high:.6g} and it is above 0"
    if name == "cispo":
        return f"{words}. The weight of such a token is capped; it still learns"
    words += ". " + ("All tokens of such a response have" if loss.sequence else "Such a token has") + " no gradient"
    if dual is not None:
        words += f". dual: ρ > {dual:g} and the advantage is below 0 (not counted in clip_ratio)"
    return words
