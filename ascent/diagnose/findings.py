"""What a run's numbers mean, in words: flags while it runs, findings when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEARLY_ALL = 0.95
"""Share of the largest reward from which a reward counts as earned."""
HALF, SOLVED = 0.5, 0.99
DETERMINED = 0.1
"""Entropy per token, in nats, below which a policy hardly explores."""


def flags(metrics: Mapping[str, Any], task: Any) -> list[tuple[str, str]]:
    """Warnings with their evidence, each a name and a sentence."""
    found = []
    share = reward_share(metrics, task)
    accuracy = metrics.get("eval/accuracy")
    if share is not None and accuracy is not None and share >= NEARLY_ALL and accuracy < HALF:
        how = f" Known of this task: {task.loophole}." if task.loophole else ""
        found.append(
            (
                "reward-without-accuracy",
                f"reward without accuracy: held-out reward is {share:.0%} of its maximum, and {accuracy:.0%} of the "
                f"answers are exactly right.{how}",
            )
        )
    if metrics.get("trust_region/accepted") == 0 and metrics.get("grad_norm"):
        beyond, flat = metrics["trust_region/too_far"], metrics["trust_region/no_gain"]
        found.append(
            (
                "trust-region-refused",
                f"the line search took no step: {beyond:.0f} trials had a KL beyond Δ, and {flat:.0f} within it gained "
                "nothing. The parameters stay as they were; --update.backtracks is how often a step is shortened",
            )
        )
    return found


def reward_share(metrics: Mapping[str, Any], task: Any) -> float | None:
    """Held-out reward as a share of the largest there is."""
    reward = metrics.get("eval/reward")
    return reward / task.max_reward if task.max_reward and reward is not None else None


def findings(last: Mapping[str, Any], task: Any, grouped: bool) -> list[str]:
    """The result in words, from the last value of every metric; `grouped`: does credit compare a prompt's responses?"""
    words = []
    accuracy, maximum = last.get("eval/accuracy"), task.max_reward
    exact = last.get("exact/reward")
    reward, name = (exact, "E[R], enumerated,") if exact is not None else (last.get("eval/reward"), "Held-out reward")
    of = f" of {maximum:g}" if maximum else ""
    if reward is not None and accuracy is not None:
        words.append(f"{name} is {reward:.3f}{of}; {accuracy:.1%} of the greedy answers are exactly right.")
    if last.get("eval/logp") is not None:
        words.append(f"Held-out demonstrations have a log-prob of {last['eval/logp']:.3f} a token.")
    if last.get("eval/pairs/accuracy") is not None:
        figures = {name: last[f"eval/pairs/{name}"] for name in ("accuracy", "log_loss", "ece")}
        words.append(
            f"{figures['accuracy']:.1%} of held-out pairs are rated right, at a log-loss of {figures['log_loss']:.3f} "
            f"(knowing nothing: 0.693) and a calibration error of {figures['ece']:.3f}."
        )
    if last.get("eval/steps/explained") is not None:
        words.append(f"The scores explain {last['eval/steps/explained']:.1%} of the variance of held-out labels.")
    flagged = [text for _, text in flags(last, task)]
    words += [text[0].upper() + text[1:] for text in flagged]
    if accuracy is not None and accuracy >= SOLVED:
        words.append("Solved.")
    elif accuracy is not None and not flagged:
        words += standstill(last, accuracy, grouped)
    return words


def standstill(last: Mapping[str, Any], accuracy: float, grouped: bool) -> list[str]:
    """That a policy hardly tries anything else: stuck where what it does is mostly wrong, settled where it is right."""
    silent, entropy = last.get("frac_reward_zero_std"), last.get("entropy")
    if silent is None or entropy is None or silent < HALF or entropy >= DETERMINED:
        return []
    equal = f"{silent:.0%} of the groups have equal rewards"
    tried = f"at an entropy of {entropy:.3f} nats a token the policy"
    if accuracy >= HALF:
        return [f"Settled at {accuracy:.1%} right: {tried} hardly tries anything else any more; {equal}."]
    if grouped:
        why = "which gives group credit nothing to compare"
        return [f"Stuck: {equal}, {why}, and {tried} no longer tries anything else."]
    return [f"Stuck: {tried} hardly tries anything else any more; {equal}."]
