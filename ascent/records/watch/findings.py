"""The result of a run in words, from its last metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascent.records.watch.flags import MOSTLY_RIGHT, metric_warnings

ALL_RIGHT, ALL_EQUAL = 0.99, 0.5
"""Accuracy of a solved task; share of groups with equal rewards from which little is learned."""
DETERMINED = 0.1
"""Entropy per token, in nats, below which a policy hardly explores."""


def findings(last: Mapping[str, Any], task: Any, grouped: bool) -> list[str]:
    """The result, from the last value of every metric; `grouped`: does credit compare the responses to a prompt?"""
    words = []
    accuracy, maximum = last.get("eval/accuracy"), task.max_reward
    exact = last.get("exact/reward")
    reward, name = (exact, "E[R], enumerated,") if exact is not None else (last.get("eval/reward"), "Held-out reward")
    of = f" of {maximum:g}" if maximum else ""
    if reward is not None and accuracy is not None:
        words.append(f"{name} is {reward:.3f}{of}; {accuracy:.1%} of the greedy answers are exactly right.")
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
    if accuracy is not None and accuracy >= ALL_RIGHT:
        words.append("Solved.")
    elif accuracy is not None and not warnings:
        words += _standstill(last, accuracy, grouped)
    return words


def _standstill(last: Mapping[str, Any], accuracy: float, grouped: bool) -> list[str]:
    """A policy that hardly explores: stuck if its answers are mostly wrong, settled if they are right."""
    silent, entropy = last.get("frac_reward_zero_std"), last.get("entropy")
    if silent is None or entropy is None or silent < ALL_EQUAL or entropy >= DETERMINED:
        return []
    equal = f"{silent:.0%} of the groups have equal rewards"
    tried = f"at an entropy of {entropy:.3f} nats per token the policy"
    if accuracy >= MOSTLY_RIGHT:
        return [f"Settled at {accuracy:.1%} right: {tried} hardly tries anything else any more; {equal}."]
    if grouped:
        why = "which gives group credit nothing to compare"
        return [f"Stuck: {equal}, {why}, and {tried} no longer tries anything else."]
    return [f"Stuck: {tried} hardly tries anything else any more; {equal}."]
