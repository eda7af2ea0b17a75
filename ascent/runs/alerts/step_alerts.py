"""Alerts about a single step, and the findings at the end of a run."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress
from typing import Any

from ascent.runs.alerts.metric_windows import Alert

MIN_PROMPTS, SAME_TEXT_FRACTION, SAME_TEXT_FRACTION_UNSCORED = 8, 2 / 3, 0.9
"""Minimum number of different prompts; fraction of equal responses; that fraction if correctness is unknown."""


MAX_RIGHT_FRACTION, MAX_QUOTED_CHARACTERS = 0.6, 120
"""Fraction of right answers above which one text may answer many prompts; maximum characters to quote."""


EARNED_FRACTION, UNSOLVED = 0.95, 0.5
"""Fraction of the maximum reward that counts as earned; accuracy below which answers are mostly wrong."""


SOLVED_EXACTLY, EQUAL_GROUPS_FRACTION = 0.99, 0.5
"""Accuracy of a solved task; fraction of groups with equal rewards above which little is learned."""


LOW_ENTROPY = 0.1
"""Entropy per token, in nats, below which a policy hardly explores."""


ScoredResponse = tuple[Any, Any, bool | None]
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
    """Return the warnings about one line of metrics, each with a name and a text."""
    warnings = []
    reward, accuracy = metrics.get("eval/reward"), metrics.get("eval/accuracy")
    share = reward / task.max_reward if task.max_reward and reward is not None else None
    if share is not None and accuracy is not None and share >= EARNED_FRACTION and accuracy < UNSOLVED:
        how = f" A known loophole of this task: {task.loophole}." if task.loophole else ""
        text = (
            f"reward without accuracy: held-out reward is {share:.0%} of its maximum, and {accuracy:.0%} of the "
            f"answers are exactly right.{how}"
        )
        warnings.append(("reward-without-accuracy", text))
    measured = metrics.get("reward") is not None and metrics.get("frac_reward_zero_std") == 1
    if measured and metrics.get("grad_norm") is None:
        text = (
            "no signal: all rewards are equal in every sampled group, so this step has no update and learns "
            "nothing. Try easier or harder prompts, more --samples, or more --groups.rounds"
        )
        warnings.append(("no-signal", text))
    if metrics.get("trust_region/accepted") == 0 and metrics.get("grad_norm"):
        beyond, flat = metrics["trust_region/too_far"], metrics["trust_region/no_gain"]
        text = (
            f"the line search took no step: {beyond:.0f} trials exceeded the KL bound Δ, and {flat:.0f} within it did "
            "not improve the objective. The parameters did not change; --update.backtracks sets the number of trials"
        )
        warnings.append(("trust-region-refused", text))
    return warnings


def with_evidence(name: str, text: str, line: Mapping[str, Any], first: Mapping[str, Any]) -> Alert:
    """Return a warning as an alert with its metrics of this line, and of the `first` line if it has them."""
    keys, show = EVIDENCE.get(name, ((), "all"))
    measured = [key for key in keys if isinstance(line.get(key), int | float) and math.isfinite(line[key])]
    lines = [first, line] if measured and first.keys() >= set(measured) else [line]
    numbers = {key: [float(each[key]) for each in lines] for key in measured}
    return Alert(name, text, numbers, (lines[0]["step"], line["step"]), show)


def one_answer(step: int, responses: Iterable[ScoredResponse], text_of: Callable[[Any], str]) -> list[Alert]:
    """Return an alert if one response is given to most prompts of a step and is not mostly right."""
    responses = list(responses)
    prompts, total = len({prompt for prompt, _, _ in responses}), len(responses)
    if prompts < MIN_PROMPTS:
        return []
    answer, count = Counter(response for _, response, _ in responses).most_common(1)[0]
    known = all(correct is not None for _, _, correct in responses)
    alike = [(prompt, correct) for prompt, response, correct in responses if response == answer]
    share, many = sum(bool(correct) for _, correct in alike) / count, len({prompt for prompt, _ in alike})
    if min(count / total, many / prompts) < (SAME_TEXT_FRACTION if known else SAME_TEXT_FRACTION_UNSCORED) or (
        known and share > MAX_RIGHT_FRACTION
    ):
        return []
    text = text_of(answer)
    words, longest = " ".join(text.split()), max(text.splitlines() or [""], key=len)
    quoted = (
        repr(words if len(words) <= MAX_QUOTED_CHARACTERS else f"{words[:MAX_QUOTED_CHARACTERS]}…")
        if words
        else "an empty response"
    )
    message = f"one answer for many prompts: {quoted} is {count} of {total} responses, to {many} of {prompts} prompts"
    numbers = {"share of one text": [count / total]}
    if known:
        message += f", {share:.0%} of them exactly right"
        numbers["right among them"] = [share]
    return [Alert("one-answer", message, numbers, (step, step), q=longest[:MAX_QUOTED_CHARACTERS].strip())]


def batch_responses(batch: Any) -> Iterator[ScoredResponse]:
    """Yield the responses of a batch as tokens."""
    right = batch.correct.tolist() if batch.correct is not None else None
    groups = zip(batch.prompt.tolist(), batch.response.tolist(), batch.mask.tolist(), strict=True)
    for p, (prompt, responses, masks) in enumerate(groups):
        for s, (response, mask) in enumerate(zip(responses, masks, strict=True)):
            yield tuple(prompt), tuple(compress(response, mask)), None if right is None else right[p][s]


def reward_weights(task: Any) -> dict[str, float]:
    """Return the weight of each part of a task's reward, by the name of its metric."""
    return {f"rewards/{part.name}": part.weight for part in getattr(task, "reward_sources", ())}


def findings(last: Mapping[str, Any], task: Any, grouped: bool) -> list[str]:
    """Describe the result of a run from the last value of every metric.

    `grouped`: whether the advantage compares the responses to a prompt.
    """
    sentences = []
    accuracy, maximum = last.get("eval/accuracy"), task.max_reward
    exact = last.get("exact/reward")
    reward, name = (exact, "E[R], enumerated,") if exact is not None else (last.get("eval/reward"), "Held-out reward")
    of = f" of {maximum:g}" if maximum else ""
    if reward is not None:
        right = "" if accuracy is None else f"; {accuracy:.1%} of the greedy answers are exactly right"
        sentences.append(f"{name} is {reward:.3f}{of}{right}.")
    if last.get("eval/logp") is not None:
        sentences.append(f"Held-out demonstrations have a log-prob of {last['eval/logp']:.3f} per token.")
    if last.get("eval/pairs/accuracy") is not None:
        share, loss, ece = (last[f"eval/pairs/{name}"] for name in ("accuracy", "log_loss", "ece"))
        sentences.append(
            f"{share:.1%} of held-out pairs are ranked correctly, with a log-loss of {loss:.3f} (chance: 0.693) and "
            f"a calibration error of {ece:.3f}."
        )
    if last.get("eval/steps/explained") is not None:
        sentences.append(f"The scores explain {last['eval/steps/explained']:.1%} of the variance of held-out labels.")
    warnings = [text for _, text in metric_warnings(last, task)]
    sentences += [text[0].upper() + text[1:] for text in warnings]
    equal_groups, entropy = last.get("frac_reward_zero_std"), last.get("entropy")
    if accuracy is not None and accuracy >= SOLVED_EXACTLY:
        sentences.append("Solved.")
    elif accuracy is None or warnings or equal_groups is None or entropy is None:
        return sentences
    elif (
        equal_groups >= EQUAL_GROUPS_FRACTION and entropy < LOW_ENTROPY
    ):  # stuck if answers are mostly wrong, else converged
        equal = f"{equal_groups:.0%} of the groups have equal rewards"
        entropy_text = f"at an entropy of {entropy:.3f} nats per token the policy"
        if accuracy < UNSOLVED and grouped:
            why = "so group advantages are zero"
            sentences.append(f"Stuck: {equal}, {why}, and {entropy_text} no longer explores.")
        else:
            how = "Stuck" if accuracy < UNSOLVED else f"Converged at {accuracy:.1%} right"
            sentences.append(f"{how}: {entropy_text} hardly explores any more; {equal}.")
    return sentences
