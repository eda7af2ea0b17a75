"""What a judge is asked, and how its answers are read: the score of one response, or a preference between two."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ascent.rewards.judge.judge_client import EXCERPT, Answer, JudgeClient, JudgeError, JudgeParseError
from ascent.rewards.judge.judge_settings import PAIR_LINE, SCORE_LINE, Prompt, read_judge
from ascent.rewards.judge.pattern_search import last_match
from ascent.tasks.reward_worker_pool import RewardOutcome
from ascent.tasks.text.text_task import Problem

Pair = tuple[Prompt, str, str, str | None]
"""A prompt, two responses to compare, and the right answer if it is known."""
REASON = 300
"""Characters of an answer that are kept as the reason."""


class JudgeScore(NamedTuple):
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
) -> list[JudgeScore | JudgeError]:
    """A score, or the reason why there is none, for each (prompt, response, right answer if known)."""
    judge = client.judge

    def parse(answer: Answer, end: float) -> JudgeScore:
        score = _verdict(client, answer, judge.score_pattern, "score", end)
        try:
            value = float(score.replace("−", "-"))
        except ValueError:
            raise JudgeParseError(f"its score is {score[:EXCERPT]!r}, which is not a number", answer["text"]) from None
        if not judge.low <= value <= judge.high:
            why = f"its score is {value:g}, and scores go from {judge.low:g} to {judge.high:g}"
            raise JudgeParseError(why, answer["text"])
        reason = " ".join(_without_thoughts(answer["text"]).split())
        return JudgeScore((value - judge.low) / (judge.high - judge.low), reason[-REASON:])

    questions = [
        judge.messages(judge.score_prompt, prompt, answer, response=response) for prompt, response, answer in responses
    ]
    return client.ask(questions, parse)


def compare_responses(
    client: JudgeClient, pairs: Sequence[Pair], done: Callable[[int], None] = lambda _: None
) -> list[Preference | JudgeError]:
    """The better one of each pair. Both orders are asked.

    A judge that prefers whatever comes first answers A twice. The two answers then disagree, and neither wins.
    """
    judge = client.judge

    def parse(answer: Answer, end: float) -> str:
        verdict = _verdict(client, answer, judge.pair_pattern, "verdict", end).strip().lower()
        if verdict not in ("a", "b", "tie"):
            raise JudgeParseError(f"its verdict is {verdict[:EXCERPT]!r}, and it has to be A, B or tie", answer["text"])
        return verdict.upper() if verdict != "tie" else verdict

    answered = [0] * len(pairs)

    def one_order_done(i: int) -> None:
        answered[i // 2] += 1
        if answered[i // 2] == 2:
            done(i // 2)

    questions = [
        judge.messages(judge.pair_prompt, prompt, answer, first=first, second=second)
        for prompt, one, other, answer in pairs
        for first, second in ((one, other), (other, one))
    ]
    verdicts = client.ask(questions, parse, one_order_done)
    winners = {("A", "B"): 0, ("B", "A"): 1}
    return [
        next((verdict for verdict in both if isinstance(verdict, JudgeError)), Preference(winners.get(both), both))
        for both in zip(verdicts[::2], verdicts[1::2], strict=True)
    ]


def _without_thoughts(text: str) -> str:
    """The answer without the thoughts that some models write before it."""
    return text.rpartition("</think>")[2]


def _verdict(client: JudgeClient, answer: Answer, pattern: str, what: str, end: float) -> str:
    """The last match of the pattern in an answer. The patterns of Ascent take linear time; others end in time.

    One that was cut off has to end with it, outside of thoughts, its line closed: "Score: 1" may be half of 10.
    """
    text, cut = answer["text"], answer.get("finish") == "length"
    spoken = _without_thoughts(text)
    try:
        own = pattern in (SCORE_LINE, PAIR_LINE)
        match = last_match(pattern, spoken) if own else client.searches.last_match(pattern, spoken, end)
    except TimeoutError as error:
        raise JudgeParseError(f"it could not be searched for {pattern}: {error}", text) from None
    after = spoken[match[1] :] if match else ""
    whole = "\n" in after and "\n" not in after.rstrip() and "<think>" not in spoken
    if match and (whole or not cut):
        return match[0]
    if cut:
        raise JudgeParseError(
            f"the answer was cut off before its {what} was whole: raise --max-tokens (max_tokens)", text
        )
    raise JudgeParseError(f"the answer is empty, and has no {what}" if not text else f"the answer has no {what}", text)


class JudgeScorer:
    """Asks a judge to score each response. Its settings are checked at once; nothing is asked before a call."""

    def __init__(self, file: str):
        self.judge = read_judge(file).validated()
        self.client: JudgeClient | None = None

    def __call__(self, responses: Sequence[tuple[Problem, str]]) -> list[RewardOutcome]:
        self.client = self.client or JudgeClient(self.judge)
        verdicts = score_responses(self.client, [(p.prompt, response, p.answer) for p, response in responses])
        return [
            RewardOutcome(v.value, reason=v.reason) if isinstance(v, JudgeScore) else RewardOutcome(error=str(v))
            for v in verdicts
        ]
