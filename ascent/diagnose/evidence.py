"""What a flag says: a name, a sentence, the numbers that show it, and which completions to look at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

PROMPTS, SAME, UNKNOWN = 8, 2 / 3, 0.9
"""Different prompts; the share of responses that are one text; that share where nobody knows what is right."""
RIGHT, SHOWN = 0.6, 120
"""Share of right answers above which one text may well be the answer to many; characters of it that are shown."""
SHOWS: dict[str, tuple[tuple[str, ...], str]] = {
    "reward-without-accuracy": (("eval/reward", "eval/accuracy"), "wrong"),
    "reward-errors": (("reward_errors",), "failed"),
    "trust-region-refused": (("trust_region/too_far", "trust_region/no_gain"), "all"),
}
"""Of flags that a single line shows: the metrics that do, and which completions to look at."""


@dataclass(frozen=True)
class Flag:
    """What was seen, and where to look."""

    name: str
    text: str
    metrics: dict[str, list[float]]
    """Of each metric that shows it: before, and now; or a single number, where a single step does."""
    steps: tuple[int, int]
    """First and last of what is compared; twice the same for a single step."""
    show: str = "all"
    q: str = ""

    def event(self, step: int, recorded: int | None) -> dict[str, Any]:
        """As it stands in events.jsonl, `recorded` being the step whose completions show it."""
        evidence: dict[str, Any] = {"metrics": self.metrics, "steps": list(self.steps)}
        if recorded is not None:
            evidence["rollouts"] = {"step": recorded, "show": self.show, "q": self.q}
        return {"step": step, "event": "flag", "name": self.name, "text": self.text, "evidence": evidence}


def one_answer(step: int, responses: Iterable[tuple[Any, Any, bool | None]]) -> tuple[Any, Flag] | None:
    """The one response to most of a step's different prompts, unless it is mostly right; to be told with its text.

    Each response comes with its prompt and with whether it is right, None where nobody can say.
    """
    prompts: dict[Any, set[Any]] = {}
    counts: Counter[Any] = Counter()
    right: Counter[Any] = Counter()
    asked, known = set(), True
    for prompt, response, correct in responses:
        asked.add(prompt)
        prompts.setdefault(response, set()).add(prompt)
        counts[response] += 1
        right[response] += bool(correct)
        known = known and correct is not None
    if len(asked) < PROMPTS:
        return None
    (answer, count), total = counts.most_common(1)[0], counts.total()
    numbers = {"share of one text": [count / total]}
    many, share = len(prompts[answer]), right[answer] / count
    if min(count / total, many / len(asked)) < (SAME if known else UNKNOWN) or (known and share > RIGHT):
        return None
    if known:
        numbers["right among them"] = [share]
    how = f", {share:.0%} of them exactly right" if known else ""
    text = f"one answer for many prompts: {{}} is {count} of {total} responses, to {many} of {len(asked)} prompts{how}"
    return answer, Flag("one-answer", text, numbers, (step, step))


def answers_in(batch: Any) -> Iterator[tuple[Any, Any, bool | None]]:
    """The prompt of each response of a batch, its tokens, and whether it is right."""
    if len(batch.prompt) < PROMPTS:
        return
    right = batch.correct.tolist() if batch.correct is not None else None
    groups = zip(batch.prompt.tolist(), batch.response.tolist(), batch.length.tolist(), strict=True)
    for p, (prompt, responses, lengths) in enumerate(groups):
        for s, (response, length) in enumerate(zip(responses, lengths, strict=True)):
            yield tuple(prompt), tuple(response[:length]), None if right is None else right[p][s]


def told(found: tuple[Any, Flag] | None, text: str) -> list[Flag]:
    """A flag of `one_answer` with that answer in words, which are also what to search for."""
    if found is None:
        return []
    words = " ".join(text.split())
    shown = repr(words if len(words) <= SHOWN else f"{words[:SHOWN]}…") if words else "an empty response"
    line = max(text.splitlines() or [""], key=len)
    return [replace(found[1], text=found[1].text.replace("{}", shown, 1), q=line[:SHOWN].strip())]


def noted(name: str, text: str, line: Mapping[str, Any], first: Mapping[str, Any]) -> Flag:
    """A flag that one line of metrics shows, with its evidence: since the `first` that has them too, if any does."""
    keys, show = SHOWS.get(name, ((), "all"))
    values = {key: line[key] for key in keys if isinstance(line.get(key), int | float) and math.isfinite(line[key])}
    if values and first.keys() >= values.keys():
        numbers = {k: [float(first[k]), float(v)] for k, v in values.items()}
        return Flag(name, text, numbers, (first["step"], line["step"]), show)
    return Flag(name, text, {k: [float(v)] for k, v in values.items()}, (line["step"], line["step"]), show)


def weights_of(task: Any) -> dict[str, float]:
    """What each part of a task's reward counts, by the name of its metric."""
    parts = [*getattr(getattr(task, "task", None), "rewards", ()), *filter(None, [getattr(task, "part", None)])]
    return {f"rewards/{part.name}": part.weight for part in parts}
