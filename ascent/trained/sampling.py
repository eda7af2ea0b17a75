"""`ascent sample`: what a policy says to a prompt, to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascent.policies import LanguageModel
from ascent.settings import configure
from ascent.tasks import Task
from ascent.tasks.text import Problem
from ascent.tasks.text.tokenized import padded
from ascent.trained.asked import Row, rows_of, scored_rows
from ascent.trained.loaded import Loaded, of_model, of_run
from ascent.types import Refused

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
        raise Refused("a run or a model is asked: give one of them")
    if task is None and settings:
        raise Refused(f"{', '.join(settings)}: settings of a task, and none was named")
    if model is not None:
        loaded = of_model(str(model), task, settings, **changes)
    else:
        assert run is not None
        other = None if task is None or task == OWN else configure(task, settings).task
        loaded = of_run(run, step, best, other, **changes)
    if task is not None:
        return problems(loaded, count or 4, greedy, seed)
    return ask(loaded, [prompts] if isinstance(prompts, str) else prompts, count or 1, greedy, plain, seed)


def ask(loaded: Loaded, prompts: Sequence[str], count: int, greedy: bool, plain: bool, seed: int) -> list[Row]:
    """`count` responses to each prompt. Those of a small world have scores too: its prompt says all that is needed."""
    if not prompts:
        raise Refused("nothing to ask: give a prompt, or several")
    if count < 1 or (greedy and count > 1):
        raise Refused(f"--count {count}{' with --greedy: all would be the same' if greedy else ': 1 or more'}")
    lm, task = loaded.policy, loaded.config.task
    if not isinstance(lm, LanguageModel):
        given = torch.tensor([_numbers(text, task) for text in prompts])
        return scored_rows(lm, task, loaded.sampler(given, seed).generate(given, count, greedy))[0]
    system = {"role": "system", "content": task.system}
    chats = []
    for text in prompts:
        chat = [{"role": "user", "content": text}] if plain else task.messages(Problem(text))
        chats.append([system, *chat] if plain and task.system is not None else chat)
    given = padded([lm.encode(chat) for chat in chats])
    rollouts = loaded.sampler(given, seed).generate(given, count, greedy)
    said = ["\n\n".join(message["content"] for message in chat) for chat in chats]
    return [row for i, words in enumerate(said) for row in rows_of(lm, words, rollouts, i)]


def problems(loaded: Loaded, count: int, greedy: bool, seed: int) -> list[Row]:
    """One response to each of so many held-out problems, with its score and reason."""
    if count < 1:
        raise Refused(f"--count is {count}: it has to be at least 1")
    task: Task = loaded.task()
    try:
        given: Tensor = task.held_out(count)
        return scored_rows(loaded.policy, task, loaded.sampler(given, seed).generate(given, 1, greedy))[0]
    finally:
        getattr(task, "close", lambda: None)()


def _numbers(text: str, task: Task) -> list[int]:
    """A prompt of a small world: as many numbers as it takes, each one that it knows."""
    space = task.space
    largest = space.vocab - 1 - (space.end is not None)
    found = [int(number) for number in re.findall(r"-?\d+", text)]
    if (
        re.sub(r"[-\d\s,\[\]]", "", text)
        or len(found) != space.prompt_length
        or not all(0 <= n <= largest for n in found)
    ):
        example = " ".join(str(n) for n in range(space.prompt_length - 1, -1, -1))
        raise Refused(
            f"the prompt {text!r}: this run's prompts are {space.prompt_length} numbers from 0 to {largest}, "
            f'for example "{example}"'
        )
    return found


# ---- as text ----------------------------------------------------------------------------------------


def text(rows: list[Row], policy: Any, logp: bool = False) -> str:
    """Responses below their prompts, for a terminal."""
    lines: list[str] = []
    for row in rows:
        if row["sample"] == 0:
            lines += ["", *_titled("prompt", row["prompt"])]
            if row.get("gold") is not None:
                lines += _titled("answer", row["gold"])
        ended = "cut off at the limit" if row["truncated"] else "ended"
        head = f"{row['length']} tokens, {ended}, log-prob {sum(row['logp']):.3f}"
        lines += ["", f"response {row['sample'] + 1}: {head}", printable(row["response"])]
        if "valid" in row:
            lines += ["", *_titled("score", _score(row))]
        if logp:
            lines += ["", *_tokens(row, policy)]
    return "\n".join(lines).strip()


def _titled(title: str, words: str) -> list[str]:
    first, *more = printable(words).split("\n")
    return [f"{title:<8} {first}", *(f"{'':<8} {line}".rstrip() for line in more)]


def _score(row: Row) -> str:
    why = f" ({row['reason']})" if row["reason"] else ""
    if not row["valid"]:
        return f"the reward failed{why}"
    form = "right" if row["strict"] else "right, but not in the form that was asked for" if row["lenient"] else "wrong"
    return f"{form}, reward {row['reward']:g}{why}"


def _tokens(row: Row, policy: Any) -> list[str]:
    """One line a token: its log-prob, its id and itself."""
    piece = policy.piece if isinstance(policy, LanguageModel) else str
    return [f"{logp:9.3f}  {i:>6}  {piece(i)!r}" for logp, i in zip(row["logp"], row["ids"], strict=True)]


def printable(words: str) -> str:
    """Words that cannot move the cursor or ring the bell: control characters as their escapes."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: repr(m[0])[1:-1], words)
