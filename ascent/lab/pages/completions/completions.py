"""Recorded responses of a run: groups of a step, a prompt over the steps, and tokens with their numbers."""

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.runs import rollout_files as recorded
from ascent.runs.metric_columns import evenly_spaced
from ascent.runs.recorded_conversation import TURN_COLUMNS, conversation, describe_message, sampled_tokens, turn_numbers
from ascent.runs.untrusted_files import FileCache, naming_file, read_object

Row = dict[str, Any]
IS: dict[str, Callable[[Row], bool]] = {
    "all": lambda _: True,
    "right": lambda r: r["correct"] is True and r["status"] == "ok",
    "wrong": lambda r: r["correct"] is False and r["status"] == "ok",
    "truncated": lambda r: r["truncated"] is True,
    "failed": lambda r: r["status"] == "failed",
    "mixed": lambda _: True,
}
"""Filters of the responses of a step."""
CHOICES = {"sort": ("reward", "advantage", "length", "sample"), "show": tuple(IS), "set": recorded.SETS}
COUNT, MOST_GROUPS = 8, 32
"""Default and maximum number of groups per page."""
LONGEST = 1000
"""Maximum length of a search text."""
NONE = {
    recorded.SAMPLED: "No responses were recorded. `--record-rollouts 4` (the default) keeps four groups every "
    "--record-every steps",
    recorded.HELD_OUT: "No answers to held-out prompts were recorded. Every evaluation records them, but for "
    "`--record-rollouts none`",
}
PLAIN = {"step", "group", "sample", "prompt_text", "response_text", "reward", "valid", "correct", "truncated"}
PLAIN |= {"length", "advantage", "status", "reason", "parts", "extra", "answer"}
"""Columns that are not components of the reward."""


def key_of(prompt: str) -> str:
    """Return a short hash of a prompt, the same in every run and step."""
    return hashlib.blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def json_number(value: Any) -> float | int | str | None:
    """Return a number for JSON with six digits; as text if it is not finite; None if it is unknown."""
    if not isinstance(value, float):
        return value if isinstance(value, bool | int) else None
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def check_choices(**choices: str) -> None:
    """Raise ConfigError for an unknown sort, filter or set."""
    for name, value in choices.items():
        if value not in CHOICES[name]:
            raise ConfigError(f"{name}={value[:40]}: there are {', '.join(CHOICES[name])}")


def completions_page(
    folder: Path,
    kind: str = "ascent",
    step: int | None = None,
    sort: str = "reward",
    show: str = "all",
    q: str = "",
    offset: int = 0,
    count: int = COUNT,
    which: str = recorded.SAMPLED,
) -> dict[str, Any]:
    """Return a page of the groups of a step: the newest by default, the nearest if it was not recorded."""
    check_choices(sort=sort, show=show, set=which)
    if len(q) > LONGEST:
        raise ConfigError(f"q: at most {LONGEST} characters are searched for, here are {len(q)}")
    sets = {name: recorded.recorded_steps(folder, kind, name) for name in recorded.SETS}
    steps, chosen, groups, problems = sets[which], None, list[Row](), list[str]()
    if steps:
        chosen = steps[-1] if step is None else min(steps, key=lambda s: (abs(s - step), s))
        try:
            with naming_file(recorded.recorded_files(folder, kind, which)[chosen]):
                groups = groups_of(recorded.summary_rows(folder, kind, chosen, which=which))
        except ConfigError as error:
            problems.append(str(error))
    else:
        problems.append(NONE[which])
    around = [None, *steps, None]
    at = around.index(chosen)
    matching = [group for group in (_kept(group, show, q.casefold()) for group in groups) if group["responses"]]
    count = max(1, min(count, MOST_GROUPS))
    offset = max(0, min(offset, (len(matching) - 1) // count * count))
    shown = matching[offset : offset + count]
    for group in shown:
        group["responses"].sort(key=lambda r: _order(r, sort))
    return {
        **{"kind": kind, "set": which, "sets": {name: len(steps) for name, steps in sets.items()}},
        **{"recorded": steps, "asked": step, "step": chosen, "previous": around[at - 1], "next": around[at + 1]},
        **{"sort": sort, "show": show, "q": q, "offset": offset, "count": count, "total": len(matching)},
        "responses": sum(len(group["responses"]) for group in matching),
        "shares": _shares(groups) if groups else {},
        "groups": [{k: json_number(v) if isinstance(v, float) else v for k, v in group.items()} for group in shown],
        "problems": problems,
    }


def groups_of(rows: list[Row]) -> list[Row]:
    """Group the rows, in recorded order."""
    groups, first = dict[int, list[Row]](), rows[0] if rows else {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    parts = [k for k, v in first.items() if k not in PLAIN and not isinstance(v, str | list | dict)]
    parts += dict.fromkeys(name for row in rows for name in row.get("parts", {}))
    return [_group(number, members, parts) for number, members in sorted(groups.items())]


def _group(number: int, members: list[Row], parts: list[str]) -> Row:
    """Return a prompt and its responses, with mean and spread of the rewards that did not fail."""
    prompt = members[0]["prompt_text"] or ""
    responses = [_response(row, parts) for row in members]
    scored = [r for r in responses if r["status"] == "ok"]
    rewards = [r["reward"] for r in scored if isinstance(r["reward"], int | float)]
    strict = [r["correct"] for r in scored if r["correct"] is not None]
    kind = "" if not rewards else "equal" if min(rewards) == max(rewards) else "mixed"
    if strict:
        kind = "all right" if all(strict) else "mixed" if any(strict) else "all wrong"
    group: Row = {"group": number, "key": key_of(prompt), "prompt": prompt, "size": len(members)}
    if members[0].get("answer") is not None:
        group["answer"] = members[0]["answer"]
    group |= {"mean": None, "std": None}
    with suppress(OverflowError):  # rewards so large that they have no sum
        if rewards:
            group |= {"mean": statistics.fmean(rewards), "std": statistics.stdev(rewards) if len(rewards) > 1 else None}
    return group | {
        **{"low": min(rewards, default=None), "high": max(rewards, default=None), "kind": kind},
        **{"right": sum(strict) if strict else None, "of": len(strict)},
        "failed": sum(map(IS["failed"], responses)),
        "responses": responses,
    }


def _response(row: Row, parts: list[str]) -> Row:
    status = row.get("status") or ("failed" if row.get("valid") is False else "ok")
    return {
        "sample": row["sample"],
        "text": row["response_text"] or "",
        "reward": json_number(row["reward"]) if status != "failed" else None,
        "advantage": json_number(row.get("advantage")),
        **{name: row.get(name) for name in ("length", "correct", "truncated")},
        "status": status,
        "reason": row.get("reason") or None,
        "parts": {name: json_number(row.get("parts", {}).get(name, row.get(name))) for name in parts},
        **({"extra": row["extra"]} if row.get("extra") else {}),
    }


def _kept(group: Row, show: str, q: str) -> Row:
    """Return the group with the matching responses; all of them if the prompt contains the search text."""
    responses = [r for r in group["responses"] if IS[show](r) and (show != "mixed" or group["kind"] == "mixed")]
    if q and q not in group["prompt"].casefold():
        responses = [r for r in responses if q in r["text"].casefold()]
    return group | {"responses": responses, "shown": len(responses)}


def _order(response: Row, sort: str) -> tuple[float, int]:
    """Sort in descending order, with unknown numbers last; samples stay in their order."""
    value = response[sort] if sort != "sample" else None
    return -value if isinstance(value, int | float) else math.inf, response["sample"]


def _shares(groups: list[Row]) -> dict[str, int | None]:
    """Count the responses of each kind, the groups, and the mixed groups; None if unknown."""
    every = [r for group in groups for r in group["responses"]]
    counts: dict[str, int | None] = {show: sum(map(test, every)) for show, test in IS.items()}
    for show, field in (("right", "correct"), ("wrong", "correct"), ("truncated", "truncated")):
        if all(r[field] is None for r in every):
            counts[show] = None
    return counts | {"mixed": sum(group["kind"] == "mixed" for group in groups), "groups": len(groups)}


# ---- one prompt over the steps: only prompts are read of most files, and each file once ----------------------

MOST = 200
"""Maximum number of steps of a prompt, and of prompts of a set."""
LONG, SHORT = 600, 300
"""Maximum number of characters of a response and of a prompt in lists."""
_indexes = FileCache(100_000_000)
"""Cache of the prompts of each file, limited in characters."""
_summaries = FileCache(50_000)
Index = dict[str, tuple[int, str]]
"""Prompts of a step: key to group and first characters; the first group if a prompt occurs twice."""


def _indexed(folder: Path, kind: str, which: str) -> tuple[dict[int, Index], list[str]]:
    """Return the prompts of every recorded step, and the problems of unreadable files."""

    def read(step: int) -> Index:
        rows = recorded.summary_rows(folder, kind, step, ("group", "prompt_text"), which)
        index: Index = {}
        for group, prompt in sorted({row["group"]: row["prompt_text"] or "" for row in rows}.items()):
            index.setdefault(key_of(prompt), (group, prompt[:SHORT]))
        return index

    indexes, problems = {}, []
    for step, path in recorded.recorded_files(folder, kind, which).items():
        try:
            with naming_file(path):
                indexes[step] = _indexes(path, partial(read, step), weight=lambda index: 100 + len(str(index)))
        except ConfigError as error:
            problems.append(str(error))
    return indexes, problems


def prompt_history(folder: Path, kind: str, key: str, which: str = recorded.SAMPLED) -> dict[str, Any]:
    """Return a summary of the groups of a prompt over the steps; `sets`: number of steps per set with the prompt."""
    check_choices(set=which)
    indexed, problems = _indexed(folder, kind, which)
    steps = [step for step, keys in indexed.items() if key in keys]
    if not steps:
        raise ConfigError("this prompt is in none of the recorded steps")
    told, prompt, paths = [], "", recorded.recorded_files(folder, kind, which)
    for step in evenly_spaced(steps, MOST):
        group, _ = indexed[step][key]
        try:
            with naming_file(paths[step]):
                made = _summaries(paths[step], partial(_summary, folder, kind, step, group, which), group)
        except ConfigError as error:
            problems.append(str(error))
            continue
        prompt = made["prompt"]
        told.append({k: v for k, v in made.items() if k != "prompt"})
    other = recorded.SETS[1 - recorded.SETS.index(which)]
    elsewhere = sum(key in keys for keys in _indexed(folder, kind, other)[0].values())
    return {
        **{"set": which, "sets": {which: len(steps), other: elsewhere}},
        **{"key": key, "prompt": prompt, "recorded": len(indexed), "found": len(steps), "steps": told},
        **{"left_out": len(steps) - len(told), "problems": problems},
    }


def _summary(folder: Path, kind: str, step: int, number: int, which: str) -> Row:
    """Return a summary of a group."""
    columns = (*recorded.REQUIRED_COLUMNS, "valid", "correct", "truncated", "status")
    rows = [row for row in recorded.summary_rows(folder, kind, step, columns, which) if row["group"] == number]
    group = groups_of(rows)[0]
    responses = group["responses"]
    scored = [r for r in responses if r["status"] == "ok" and isinstance(r["reward"], int | float)]
    best = max(scored, key=lambda r: (r["reward"], -r["sample"]), default=None)
    (text, count), *_ = Counter(r["text"] for r in responses).most_common(1)
    common = next(r for r in responses if r["text"] == text)
    return {
        "step": step,
        **{k: group[k] for k in ("prompt", "group", "size", "mean", "std", "right", "of", "failed", "kind")},
        "best": None if best is None else _told(best),
        "common": _told(common) | {"count": count},
    }


def _told(r: Row) -> Row:
    text = r["text"][:LONG] + " …" * (len(r["text"]) > LONG)
    return {"text": text, **{k: r[k] for k in ("sample", "reward", "correct", "truncated")}}


def all_prompts(folder: Path, kind: str) -> dict[str, Any]:
    """Return the prompts of a run: held-out ones first, then by how often they were recorded."""
    listed, total, problems = list[Row](), 0, list[str]()
    for which in (recorded.HELD_OUT, recorded.SAMPLED):
        indexed, unread = _indexed(folder, kind, which)
        steps: dict[str, list[int]] = {}
        for step, keys in indexed.items():
            for key in keys:
                steps.setdefault(key, []).append(step)
        total += len(steps)
        problems += unread
        for key, where in sorted(steps.items(), key=lambda item: (-len(item[1]), item[1][0]))[:MOST]:
            about = {"set": which, "key": key, "prompt": indexed[where[0]][key][1]}
            listed.append(about | {"steps": len(where), "first": where[0], "last": where[-1]})
    return {"prompts": listed, "total": total, "problems": problems}


# ---- tokens with their numbers: ρ = exp(logp − logp_old) is that at the last update that saw the response ----

OLD = "this file was written before the trainer recorded it"
ABSENT = {
    "pieces": f"The texts of the tokens are not there ({OLD}): their numbers in the vocabulary are shown",
    "entropy": f"No entropy: no update saw these responses, {OLD}, or the engine does not know it",
    "ratio": "No ratio: no update saw these responses",
}
OF_ANSWERS = ("group", "sample", "response", "pieces", "logp_sampler", "mask", "turn", *TURN_COLUMNS, "reason")
"""The columns of a greedy answer, whose only log-prob is the sampler's."""
FOREIGN = "This run's files hold texts, rewards and advantages, and nothing about single tokens"


def tokens(
    folder: Path, kind: str, step: int, groups: Iterable[int], sample: int | None = None, which: str = recorded.SAMPLED
) -> dict[str, Any]:
    """Return the tokens of some groups of a step in columns; `missing` lists absent columns with the reason."""
    check_choices(set=which)
    rows = recorded.full_rows(folder, kind, step, groups, sample, which)
    if kind != "ascent":
        return {"step": step, "missing": {"tokens": FOREIGN}, "clip": {"words": FOREIGN}, "rows": []}
    with naming_file(recorded.rollout_path(folder, step, which)):
        return _tokens(folder, step, rows, which)


def _tokens(folder: Path, step: int, rows: list[Row], which: str) -> dict[str, Any]:
    absent = ABSENT
    if which == recorded.HELD_OUT:
        clip, absent = {"words": "No update saw these answers"}, {"pieces": ABSENT["pieces"]}
        made = [of_row({k: row.get(k) for k in OF_ANSWERS}, None) for row in rows]
        made = [row | {"logp": row["logp_sampler"], "logp_sampler": None} for row in made]
    else:
        loss, clip = loss_of(folder)
        made = [of_row(row, loss) for row in rows]
    missing = {name: words for name, words in absent.items() if made and all(row[name] is None for row in made)}
    for row in made:
        row["pieces"] = row["pieces"] if row["pieces"] is not None else [f"⟨{i}⟩" for i in row["ids"]]
    return {"step": step, "missing": missing, "clip": clip, "rows": made}


def of_row(row: Row, loss: Any) -> Row:
    """Return one response. Columns whose length differs from the number of tokens are left out."""
    ids, updates, advantages = (row.get(name) or [] for name in ("response", "logp", "advantage"))

    def per_token(values: list[Any] | None) -> list[float] | None:
        """Return a number per token, NaN if unknown."""
        if values is None or len(values) != len(ids):
            return None
        return [math.nan if v is None else v for v in values]

    lists = {name: per_token(row.get(name)) for name in ("logp_sampler", "logp_ref", "entropy")}
    lists["logp"] = logp = per_token(row.get("logp_old"))
    lists["advantage"] = advantage = per_token(advantages * len(ids) if len(advantages) == 1 else advantages)
    lists["value"] = per_token(row["value"][: len(ids)]) if row.get("value") and ids else None
    pieces, last = row.get("pieces"), per_token(updates[-1]) if updates else None
    made: Row = {"group": row["group"], "sample": row["sample"], "ids": ids}
    whole = isinstance(pieces, list) and len(pieces) == len(ids) and all(isinstance(piece, str) for piece in pieces)
    made["pieces"] = pieces if whole else None
    made |= {name: None if values is None else [json_number(v) for v in values] for name, values in lists.items()}
    made |= {"ratio": None, "clipped": None, "sequence_ratio": None, "updates": len(updates)}
    mask = sampled_tokens(row)
    if logp is not None and last is not None:
        moved = [now - old for now, old in zip(last, logp, strict=True)]
        made["ratio"] = [json_number(math.inf if log > 709 else math.exp(log)) for log in moved]
        if loss is not None and advantage is not None and ids:
            drawn = [row.get("valid") is not False and acted for acted in mask or [True] * len(ids)]
            made |= _clips(loss, last, logp, advantage, drawn)
    if mask is None:
        return made
    if (turn := turn_numbers(row)) is not None:
        made["turn"] = turn
        made["messages"] = [
            {"role": message.role, "tokens": message.tokens, "description": describe_message(message)}
            for message in conversation(row)
        ]
    for name, values in made.items():  # at observations there are no numbers: the policy did not write those tokens
        if isinstance(values, list) and name not in ("ids", "pieces", "turn", "messages"):
            made[name] = [value if acted else None for value, acted in zip(values, mask, strict=True)]
    return made | {"mask": mask}


def _clips(loss: Any, logp: list[float], logp_old: list[float], advantage: list[float], drawn: list[bool]) -> Row:
    """Return on which side the loss clips each token, and the ratio of the whole response if it uses one."""
    import torch

    now, old, A = (torch.tensor([[values]], dtype=torch.float32) for values in (logp, logp_old, advantage))
    counted = torch.tensor([[drawn]])
    made: Row = {}
    if loss.sequence:
        made["sequence_ratio"] = json_number(float(torch.exp(loss.log_ratio(now - old, counted))))
    clips = loss.clipped(now, old, A, counted)
    if clips is None:
        return made
    low, high = (side & counted for side in clips)
    dual = getattr(loss, "dual", None)
    far = (torch.exp(now - old) > (math.inf if dual is None else dual)) & (A < 0)
    sides = torch.where(low, 1, torch.where(high, 2, torch.where(far, 3, 0)))
    return made | {"clipped": [(None, "low", "high", "dual")[side] for side in sides[0, 0].tolist()]}


def loss_of(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The loss that config.json names, and what clipping means for it in words; None where it cannot be made here.

    A loss of the user's own is code, and is not run by whoever looks at a folder.
    """
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
    except (ConfigError, TypeError):
        loss = None
    if loss is None:
        return None, {"words": f"config.json names a loss that this version does not know: {name[:80]}"}
    bounds = {side: getattr(loss, side, None) for side in ("low", "high", "dual")}
    return loss, {"name": name, "sequence": loss.sequence, **bounds, "words": _words(loss, name, **bounds)}


def _words(loss: Any, name: str, low: float | None, high: float | None, dual: float | None) -> str:
    if low is None or high is None:
        return f"{name} never clips"
    what = "the response's ratio" if loss.sequence else "ρ"
    if name == "cispo":
        return (
            f"low: ρ < {1 - low:.6g}; high: ρ > {1 + high:.6g}. The weight of such a token is capped; it still learns"
        )
    words = f"low: {what} < {1 - low:.6g} and the advantage is below 0; high: {what} > {1 + high:.6g} and it is above 0"
    words += ". " + ("All tokens of such a response have" if loss.sequence else "Such a token has") + " no gradient"
    if dual is not None:
        words += f". dual: ρ > {dual:g} and the advantage is below 0 (not counted in clip_ratio)"
    return words
