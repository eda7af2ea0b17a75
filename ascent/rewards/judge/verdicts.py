"""What a judge is asked, and how its answers are read: the score of one response, or a preference between two."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ascent.rewards.judge.cache import Answer
from ascent.rewards.judge.client import JudgeClient, JudgeError, Question, Unparsed
from ascent.rewards.judge.settings import Prompt, read_judge
from ascent.tasks.text.grading.workers import Outcome
from ascent.tasks.text.problems import Problem

REASON = 300
"""Characters of an answer that are kept as the reason."""


class Scored(NamedTuple):
    """A response's score, from 0 to 1."""

    value: float
    reason: str


class Preference(NamedTuple):
    """Which of two responses is better; None where the two orders disagree, or neither is better."""

    winner: int | None
    verdicts: tuple[str, str]
    """The verdict with the first response first, and with it second: A, B or tie."""


def score_responses(
    client: JudgeClient, responses: Sequence[tuple[Prompt, str, str | None]]
) -> list[Scored | JudgeError]:
    """A score, or the reason why there is none, for each (prompt, response, right answer if known)."""
    judge = client.judge

    def parse(answer: Answer) -> Scored:
        value = float(_verdict(answer, judge.score_pattern, "score").replace("−", "-"))
        if not judge.low <= value <= judge.high:
            why = f"its score is {value:g}, and scores go from {judge.low:g} to {judge.high:g}"
            raise Unparsed(why, answer["text"])
        reason = " ".join(_without_thoughts(answer["text"]).split())
        return Scored((value - judge.low) / (judge.high - judge.low), reason[-REASON:])

    return client.ask(
        [
            Question(judge.messages(judge.score_prompt, prompt, answer, response=response), parse)
            for prompt, response, answer in responses
        ]
    )


def compare_responses(
    client: JudgeClient,
    pairs: Sequence[tuple[Prompt, str, str, str | None]],
    done: Callable[[int], None] = lambda _: None,
) -> list[Preference | JudgeError]:
    """The better one for each (prompt, response, other response, right answer if known). Both orders are asked.

    A judge that prefers whatever comes first answers A twice. The two answers then disagree, and neither wins.
    """
    judge = client.judge

    def parse(answer: Answer) -> str:
        verdict = _verdict(answer, judge.pair_pattern, "verdict").strip().lower()
        if verdict not in ("a", "b", "tie"):
            raise Unparsed(f"its verdict is {verdict!r}, and it has to be A, B or tie", answer["text"])
        return verdict.upper() if verdict != "tie" else verdict

    def preference(straight: Any, swapped: Any) -> Preference | JudgeError:
        for verdict in (straight, swapped):
            if isinstance(verdict, JudgeError):
                return verdict
        return Preference({("A", "B"): 0, ("B", "A"): 1}.get((straight, swapped)), (straight, swapped))

    answered = [0] * len(pairs)

    def one_order_done(i: int) -> None:
        answered[i // 2] += 1
        if answered[i // 2] == 2:
            done(i // 2)

    questions = [
        Question(judge.messages(judge.pair_prompt, prompt, answer, first=first, second=second), parse)
        for prompt, one, other, answer in pairs
        for first, second in ((one, other), (other, one))
    ]
    verdicts = client.ask(questions, one_order_done)
    return [preference(*both) for both in zip(verdicts[::2], verdicts[1::2], strict=True)]


def _without_thoughts(text: str) -> str:
    """The answer without the thoughts that some models write before it."""
    return text.rpartition("</think>")[2]


def _verdict(answer: Answer, pattern: str, what: str) -> str:
    """The last match of the pattern in an answer. One that was cut off has to end with it, outside of thoughts."""
    text, cut = answer["text"], answer.get("finish") == "length"
    spoken = _without_thoughts(text)
    matches = list(re.finditer(pattern, spoken))
    if matches and not (cut and ("<think>" in spoken or "\n" in spoken[matches[-1].end(1) :].rstrip())):
        return matches[-1][1] or ""
    if cut:
        raise Unparsed(f"the answer was cut off before its {what}: raise --max-tokens (max_tokens)", text)
    raise Unparsed(f"the answer is empty, and has no {what}" if not text else f"the answer has no {what}", text)


# ---- as a reward: --reward judge:FILE ---------------------------------------------------------------------------


class JudgeGrader:
    """Asks a judge to score each response. Its settings are checked at once; nothing is asked before a call."""

    def __init__(self, file: str):
        self.judge = read_judge(file).insist()
        self.client: JudgeClient | None = None

    def __call__(self, responses: Sequence[tuple[Problem, str]]) -> list[Outcome]:
        self.client = self.client or JudgeClient(self.judge)
        verdicts = score_responses(self.client, [(p.prompt, response, p.answer) for p, response in responses])
        return [Outcome(v.value, reason=v.reason) if isinstance(v, Scored) else Outcome(error=str(v)) for v in verdicts]
