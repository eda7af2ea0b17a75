"""`ascent sample`: what a policy answers to a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ascent.core.types import Refused
from ascent.settings import configure
from ascent.workflows.policy import LoadedPolicy, Row, model_policy, response_rows, run_policy, scored_rows

OWN = "own"
"""Names a run's own task."""


def sample(
    run: str | Path | None = None,
    prompts: str | Sequence[str] = (),
    *,
    model: str | Path | None = None,
    task: Any = None,
    step: int | None = None,
    best: bool = False,
    count: int | None = None,
    greedy: bool = False,
    plain: bool = False,
    seed: int = 0,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    max_tokens: int | None = None,
    system: str | None = None,
    device: str | None = None,
    **settings: Any,
) -> list[Row]:
    """Responses of a run or a bare model to prompts, or with scores to the held-out problems of a task.

    ascent.sample("runs/mine", "What is 3 + 4?", count=4)
    ascent.sample(model="folder", prompts=["What is 3 + 4?"], greedy=True)
    ascent.sample("runs/mine", task="own", count=8)

    A run is asked as in training, with its system message and instruction, unless `plain`.
    """
    changes: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "max_tokens": max_tokens,
    }
    changes |= {"system": system, "device": device}
    if (run is None) == (model is None):
        raise Refused("name a run or a model to ask, and not both")
    if task is None and settings:
        raise Refused(f"{', '.join(settings)}: settings of a task, and no task was named")
    if model is not None:
        loaded = model_policy(str(model), task, settings, **changes)
    else:
        assert run is not None
        other = None if task is None or task == OWN else configure(task, settings).task
        loaded = run_policy(run, step, best, other, **changes)
    if task is not None:
        return problems(loaded, count or 4, greedy, seed)
    return ask(loaded, [prompts] if isinstance(prompts, str) else prompts, count or 1, greedy, plain, seed)


def ask(loaded: LoadedPolicy, prompts: Sequence[str], count: int, greedy: bool, plain: bool, seed: int) -> list[Row]:
    """`count` responses to each prompt, with scores where the prompt says all that is needed for one."""
    if not prompts:
        raise Refused("nothing to ask: give a prompt, or several")
    if count < 1 or (greedy and count > 1):
        raise Refused(f"--count {count}{' with --greedy: all would be the same' if greedy else ': 1 or more'}")
    task = loaded.unscored_task()
    typed, words = task.read_prompts(prompts, plain)
    rollouts = loaded.sampler(typed, seed).generate(typed, count, greedy)
    if loaded.backend.typed_prompts_score:
        return scored_rows(task, rollouts)[0]
    return [row for i, prompt in enumerate(words) for row in response_rows(task, prompt, rollouts, i)]


def problems(loaded: LoadedPolicy, count: int, greedy: bool, seed: int) -> list[Row]:
    """One response to each of `count` held-out problems, with its score and reason."""
    if count < 1:
        raise Refused(f"--count is {count}: it has to be at least 1")
    task = loaded.task()
    try:
        prompts = task.held_out(count)
        return scored_rows(task, loaded.sampler(prompts, seed).generate(prompts, 1, greedy))[0]
    finally:
        task.close()


# ---- as text ----------------------------------------------------------------------------------------


def responses_text(rows: list[Row], piece: Callable[[int], str] | None = None) -> str:
    """Responses below their prompts, for a terminal. With `piece`, which spells a token, every token's log-prob."""
    lines: list[str] = []
    for row in rows:
        if row["sample"] == 0:
            lines += ["", *_titled("prompt", row["prompt"])]
            if row.get("gold") is not None:
                lines += _titled("answer", row["gold"])
        ended = "cut off at the limit" if row["truncated"] else "ended"
        head = f"{row['length']} tokens, {ended}, log-prob {sum(row['logp']):.3f}"
        lines += ["", f"response {row['sample'] + 1}: {head}", escape_controls(row["response"])]
        if "valid" in row:
            lines += ["", *_titled("score", _score(row))]
        if piece is not None:
            tokens = zip(row["logp"], row["ids"], strict=True)
            lines += ["", *(f"{logp:9.3f}  {i:>6}  {piece(i)!r}" for logp, i in tokens)]
    return "\n".join(lines).strip()


def _titled(title: str, words: str) -> list[str]:
    first, *more = escape_controls(words).split("\n")
    return [f"{title:<8} {first}", *(f"{'':<8} {line}".rstrip() for line in more)]


def _score(row: Row) -> str:
    why = f" ({row['reason']})" if row["reason"] else ""
    if not row["valid"]:
        return f"the reward failed{why}"
    form = "right" if row["strict"] else "right, but not in the form that was asked for" if row["lenient"] else "wrong"
    return f"{form}, reward {row['reward']:g}{why}"


def escape_controls(words: str) -> str:
    """Words that cannot move the cursor or ring the bell: control characters as their escapes."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: repr(m[0])[1:-1], words)
