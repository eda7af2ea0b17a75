"""What is asked of a judge, and how its answers are read: a score of one response, a preference between two."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ascent.judge.ask import Asker, Question
from ascent.judge.cache import Answer
from ascent.judge.errors import JudgeError, Unparsed
from ascent.judge.settings import Judge

Prompt = str | list[dict[str, str]]
REASON = 300
"""Characters of an answer that are kept as the reason."""


class Scored(NamedTuple):
    """A response's score, from 0 to 1."""

    value: float
    reason: str


class Preference(NamedTuple):
    """Which of two responses is better; None where two orders of asking do not agree, or neither is."""

    winner: int | None
    verdicts: tuple[str, str]
    """What was said when the first stood first, and when it stood second: A, B or tie."""


def score(
    asker: Asker, asked: Sequence[tuple[Prompt, str, str | None]], heard: Callable[[int], None] | None = None
) -> list[Scored | JudgeError]:
    """A score, or why there is none, for each (prompt, response, right answer if known)."""
    judge = asker.judge

    def read(answer: Answer) -> Scored:
        value = float(_verdict(answer, judge.score_pattern, "score").replace("−", "-"))
        if not judge.low <= value <= judge.high:
            raise Unparsed(
                f"its score is {value:g}, and scores go from {judge.low:g} to {judge.high:g}", answer["text"]
            )
        reason = " ".join(_spoken(answer["text"]).split())
        return Scored((value - judge.low) / (judge.high - judge.low), reason[-REASON:])

    questions = [
        Question(_filled(judge, judge.score_prompt, prompt, answer, response=response), read)
        for prompt, response, answer in asked
    ]
    return asker(questions, heard)


def compare(
    asker: Asker, asked: Sequence[tuple[Prompt, str, str, str | None]], heard: Callable[[int], None] | None = None
) -> list[Preference | JudgeError]:
    """For each (prompt, response, other response, right answer if known) the better one. Both orders are asked.

    A judge that likes what stands first says A twice: its two answers then contradict each other, and neither wins.
    """
    judge = asker.judge

    def read(answer: Answer) -> str:
        word = _verdict(answer, judge.pair_pattern, "verdict").strip().lower()
        if word not in ("a", "b", "tie"):
            raise Unparsed(f"its verdict is {word!r}, and it has to be A, B or tie", answer["text"])
        return word.upper() if word != "tie" else word

    questions = []
    for prompt, one, other, answer in asked:
        for first, second in ((one, other), (other, one)):
            made = _filled(judge, judge.pair_prompt, prompt, answer, first=first, second=second)
            questions.append(Question(made, read))
    half: dict[int, int] = {}

    def both(i: int) -> None:
        half[i // 2] = half.get(i // 2, 0) + 1
        if half[i // 2] == 2 and heard is not None:
            heard(i // 2)

    found = asker(questions, both)
    return [_preference(*found[i : i + 2]) for i in range(0, len(found), 2)]


def _preference(straight: Any, swapped: Any) -> Preference | JudgeError:
    for verdict in (straight, swapped):
        if isinstance(verdict, JudgeError):
            return verdict
    winner = {("A", "B"): 0, ("B", "A"): 1}.get((straight, swapped))
    return Preference(winner, (straight, swapped))


def _filled(judge: Judge, template: str, prompt: Prompt, answer: str | None, **words: str) -> list[dict[str, str]]:
    known = answer if answer is not None else "(not known)"
    return judge.messages(template, prompt=words_of(prompt), answer=known, **words)


def words_of(prompt: Prompt) -> str:
    """A prompt as a judge reads it: its words, or the messages of a chat with their roles."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _spoken(text: str) -> str:
    """The answer without the thoughts that some models put before it."""
    return text.rpartition("</think>")[2]


def _verdict(answer: Answer, pattern: str, what: str) -> str:
    """The last match of the pattern in an answer. One that was cut off has to end with it, outside of thoughts."""
    text, cut = answer["text"], answer.get("finish") == "length"
    spoken = _spoken(text)
    found = list(re.finditer(pattern, spoken))
    if found and not (cut and ("<think>" in spoken or "\n" in spoken[found[-1].end(1) :].rstrip())):
        return found[-1][1] or ""
    if cut:
        raise Unparsed(f"the answer was cut off before its {what}: raise --max-tokens (max_tokens)", text)
    raise Unparsed(f"the answer is empty, and has no {what}" if not text else f"the answer has no {what}", text)
