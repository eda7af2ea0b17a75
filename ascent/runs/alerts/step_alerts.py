"""Alerts about a single step, and the findings at the end of a run."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from typing import Any

from ascent.runs.alerts.metric_windows import Alert

PROMPTS, SAME, UNKNOWN = 8, 2 / 3, 0.9
"""Least number of different prompts; share of responses with the same text; that share if correctness is unknown."""


RIGHT, CHARACTERS = 0.6, 120
"""Share of right answers above which one text may be the answer to many prompts; characters of it that are quoted."""


EARNED_ALL, MOSTLY_RIGHT = 0.95, 0.5
"""Share of the maximum reward that counts as earned; accuracy below which answers are mostly wrong."""


ALL_RIGHT, ALL_EQUAL = 0.99, 0.5
"""Accuracy of a solved task; share of groups with equal rewards from which little is learned."""


DETERMINED = 0.1
"""Entropy per token, in nats, below which a policy hardly explores."""


Answer = tuple[Any, Any, bool | None]
"""A prompt, a response, and whether it is right; None: not known."""


EVIDENCE: dict[str, tuple[tuple[str, ...], str]] = {
    "reward-without-accuracy": (("eval/reward", "eval/accuracy"), "wrong"),
    "reward-errors": (("reward_errors",), "failed"),
    "environment-errors": (("reward_errors",), "failed"),
    "no-signal": (("frac_reward_zero_std", "reward"), "all"),
    "trust-region-refused": (("trust_region/too_far", "trust_region/no_gain"), "all"),
}
"""For alerts from a single line of metrics: the metrics to show, and which completions to look at."""


def metric_warnings(metrics: Mapping[str, Any], task: Any) -> list[tuple[str, str]]:
    """The warnings of one line of metrics, each with a name and a sentence."""
    warnings = []
    reward, accuracy = metrics.get("eval/reward"), metrics.get("eval/accuracy")
    share = reward / task.max_reward if task.max_reward and reward is not None else None
    if share is not None and accuracy is not None and share >= EARNED_ALL and accuracy < MOSTLY_RIGHT:
        how = f" Known of this task: {task.loophole}." if task.loophole else ""
        text = (
            f"reward without accuracy: held-out reward is {share:.0%} of its maximum, and {accuracy:.0%} of the "
            f"answers are exactly right.{how}"
        )
        warnings.append(("reward-without-accuracy", text))
    measured = metrics.get("reward") is not None and metrics.get("frac_reward_zero_std") == 1
    if measured and metrics.get("grad_norm") is None:
        text = (
            "no signal: in every group that was sampled all rewards are equal, so there is no update and nothing is "
            "learned from this step. Try easier or harder prompts, more --samples, or more --groups.rounds"
        )
        warnings.append(("no-signal", text))
    if metrics.get("trust_region/accepted") == 0 and metrics.get("grad_norm"):
        beyond, flat = metrics["trust_region/too_far"], metrics["trust_region/no_gain"]
        text = (
            f"the line search took no step: {beyond:.0f} trials had a KL beyond Δ, and {flat:.0f} within it gained "
            "nothing. The parameters stay as they were; --update.backtracks is how often a step is shortened"
        )
        warnings.append(("trust-region-refused", text))
    return warnings


def with_evidence(name: str, text: str, line: Mapping[str, Any], first: Mapping[str, Any]) -> Alert:
    """A warning as an alert with its numbers: those of this line, and of the `first` line if it has them."""
    keys, show = EVIDENCE.get(name, ((), "all"))
    measured = [key for key in keys if isinstance(line.get(key), int | float) and math.isfinite(line[key])]
    lines = [first, line] if measured and first.keys() >= set(measured) else [line]
    numbers = {key: [float(each[key]) for each in lines] for key in measured}
    return Alert(name, text, numbers, (lines[0]["step"], line["step"]), show)


def one_answer(step: int, responses: Iterable[Answer], text_of: Callable[[Any], str]) -> list[Alert]:
    """An alert if one response is given to most of a step's prompts and is not mostly right."""
    responses = list(responses)
    prompts, total = len({prompt for prompt, _, _ in responses}), len(responses)
    if prompts < PROMPTS:
        return []
    answer, count = Counter(response for _, response, _ in responses).most_common(1)[0]
    known = all(correct is not None for _, _, correct in responses)
    alike = [(prompt, correct) for prompt, response, correct in responses if response == answer]
    share, many = sum(bool(correct) for _, correct in alike) / count, len({prompt for prompt, _ in alike})
    if min(count / total, many / prompts) < (SAME if known else UNKNOWN) or (known and share > RIGHT):
        return []
    text = text_of(answer)
    words, longest = " ".join(text.split()), max(text.splitlines() or [""], key=len)
    quoted = repr(words if len(words) <= CHARACTERS else f"{words[:CHARACTERS]}…") if words else "an empty response"
    said = f"one answer for many prompts: {quoted} is {count} of {total} responses, to {many} of {prompts} prompts"
    numbers = {"share of one text": [count / total]}
    if known:
        said += f", {share:.0%} of them exactly right"
        numbers["right among them"] = [share]
    return [Alert("one-answer", said, numbers, (step, step), q=longest[:CHARACTERS].strip())]


def batch_responses(batch: Any) -> Iterator[Answer]:
    """The responses of a batch, as tokens."""
    right = batch.correct.tolist() if batch.correct is not None else None
    groups = zip(batch.prompt.tolist(), batch.response.tolist(), batch.mask.tolist(), strict=True)
    for p, (prompt, responses, masks) in enumerate(groups):
        for s, (response, mask) in enumerate(zip(responses, masks, strict=True)):
            yield tuple(prompt), tuple(compress(response, mask)), None if right is None else right[p][s]


def reward_weights(task: Any) -> dict[str, float]:
    """The weight of each part of a task's reward, by the name of its metric."""
    return {f"rewards/{part.name}": part.weight for part in getattr(task, "reward_parts", ())}


def findings(last: Mapping[str, Any], task: Any, grouped: bool) -> list[str]:
    """The result, from the last value of every metric; `grouped`: does credit compare the responses to a prompt?"""
    words = []
    accuracy, maximum = last.get("eval/accuracy"), task.max_reward
    exact = last.get("exact/reward")
    reward, name = (exact, "E[R], enumerated,") if exact is not None else (last.get("eval/reward"), "Held-out reward")
    of = f" of {maximum:g}" if maximum else ""
    if reward is not None:
        right = "" if accuracy is None else f"; {accuracy:.1%} of the greedy answers are exactly right"
        words.append(f"{name} is {reward:.3f}{of}{right}.")
    if last.get("eval/logp") is not None:
        words.append(f"Held-out demonstrations have a log-prob of {last['eval/logp']:.3f} per token.")
    if last.get("eval/pairs/accuracy") is not None:
        share, loss, ece = (last[f"eval/pairs/{name}"] for name in ("accuracy", "log_loss", "ece"))
        words.append(
            f"{share:.1%} of held-out pairs are ranked correctly, with a log-loss of {loss:.3f} (chance: 0.693) and "
            f"a calibration error of {ece:.3f}."
        )
    if last.get("eval/steps/explained") is not None:
        words.append(f"The scores explain {last['eval/steps/explained']:.1%} of the variance of held-out labels.")
    warnings = [text for _, text in metric_warnings(last, task)]
    words += [text[0].upper() + text[1:] for text in warnings]
    silent, entropy = last.get("frac_reward_zero_std"), last.get("entropy")
    if accuracy is not None and accuracy >= ALL_RIGHT:
        words.append("Solved.")
    elif accuracy is None or warnings or silent is None or entropy is None:
        return words
    elif silent >= ALL_EQUAL and entropy < DETERMINED:  # stuck if the answers are mostly wrong, settled if right
        equal = f"{silent:.0%} of the groups have equal rewards"
        tried = f"at an entropy of {entropy:.3f} nats per token the policy"
        if accuracy < MOSTLY_RIGHT and grouped:
            why = "which gives group credit nothing to compare"
            words.append(f"Stuck: {equal}, {why}, and {tried} no longer tries anything else.")
        else:
            how = "Stuck" if accuracy < MOSTLY_RIGHT else f"Settled at {accuracy:.1%} right"
            words.append(f"{how}: {tried} hardly tries anything else any more; {equal}.")
    return words
