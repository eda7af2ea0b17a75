"""Responses with all that is known of them, one dictionary each: what `ascent eval` and `ascent sample` work on."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ascent.policies import LanguageModel, Policy
from ascent.tasks import Task
from ascent.tasks.text import Problem
from ascent.tasks.text.answers import loosely, tidy, value_of, whole_number
from ascent.tasks.text.tokenized import Tokenized
from ascent.train import scored
from ascent.types import Rollouts

Row = dict[str, Any]


def rows_of(policy: Policy | LanguageModel, prompt: str, rollouts: Rollouts, group: int) -> list[Row]:
    """The responses to one prompt, in words and tokens with their log-probs."""
    rows = []
    for sample, mask in enumerate(rollouts.mask[group]):
        ids = rollouts.response[group, sample][mask].tolist()
        rows.append(
            {
                "prompt": prompt,
                "sample": sample,
                "response": _words(policy, ids),
                "truncated": bool(rollouts.truncated[group, sample]),
                "length": len(ids),
                "ids": ids,
                "logp": rollouts.logp_sampler[group, sample][mask].tolist(),
            }
        )
    return rows


def _words(policy: Policy | LanguageModel, ids: list[int]) -> str:
    """A response as it is graded: without the token that ended it."""
    if isinstance(policy, LanguageModel):
        return policy.decode(ids[:-1] if ids and ids[-1] in policy.ends else ids)
    return " ".join(str(i) for i in ids if i != policy.space.end)


def scored_rows(policy: Policy | LanguageModel, task: Task, rollouts: Rollouts) -> tuple[list[Row], list[str]]:
    """Every response with its score and the reason for it, and why rewards failed.

    strict      right, and in the form that was asked for
    lenient     right, in whatever form (None for the small worlds)
    reward      None where it failed, and then `valid` is False
    answer      what it votes for in a majority, see `vote_of`
    """
    batch, errors = scored(task, rollouts, None)
    assert batch.correct is not None
    lenient = batch.measured.index("lenient") if "lenient" in batch.measured else None
    found: list[Row] = []
    for group, ids in enumerate(rollouts.prompt):
        problem = task.problem(ids.tolist()) if isinstance(task, Tokenized) else None
        rows = rows_of(policy, prompt_of(task, ids, problem), rollouts, group)
        for sample, row in enumerate(rows):
            valid = bool(batch.valid[group, sample])
            row |= {
                "gold": None if problem is None else problem.answer,
                "answer": vote_of(task, problem, row["response"]),
                "strict": bool(batch.correct[group, sample]) if valid else None,
                "lenient": None,
                "reward": float(batch.reward[group, sample].sum()) if valid else None,
                "valid": valid,
                "reason": "" if batch.notes is None else str(batch.notes[group, sample] or ""),
            }
            if lenient is not None and valid and batch.measures is not None:
                row["lenient"] = bool(batch.measures[group, sample, lenient])
        found += rows
    return found, errors


def prompt_of(task: Task, ids: Tensor, problem: Problem | None) -> str:
    """The prompt in words: what its messages say."""
    if problem is None or not isinstance(task, Tokenized):
        return task.text([i for i in ids.tolist() if i >= 0])
    return "\n\n".join(message["content"] for message in task.task.messages(problem))


def vote_of(task: Task, problem: Problem | None, response: str) -> str:
    """The answer that a response gives, in one spelling, so that equal answers are counted together.

    A task may have a method `answer(response)` that finds it. If not: what stands behind the last mark (Answer:,
    ####, \\boxed, <answer>) or behind "the answer is", else the last number, word or line, whichever kind the right
    answer is, as for the lenient score. Numbers are compared by value, words without case, quotation marks and
    spacing. For the small worlds it is the response itself.
    """
    if not isinstance(task, Tokenized):
        return response
    gold = None if problem is None else problem.answer
    hook = getattr(task.task, "answer", None)
    found = loosely(response, gold) if hook is None else hook(response) or ""
    value = value_of(whole_number(found))
    return str(value) if value is not None else " ".join(tidy(found).casefold().split())
