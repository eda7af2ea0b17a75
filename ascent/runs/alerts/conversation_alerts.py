"""Alerts about conversations: unparsed or repeated tool calls, truncated turns, more turns without more reward."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ascent.runs.alerts.metric_windows import CERTAIN_SIGMAS, MAX_LEVEL_MOVE, SOLVED_ACCURACY, Alert, WindowComparison

TURNS, CALLS = "turns", "tools/calls"
KEYS = (TURNS, "turns/cut", CALLS, "tools/unparsed", "tools/repeated")
"""The metrics from which these alerts are raised."""
GROWTH_FACTOR, MIN_GROWTH = 1.5, 1.0
"""Turns have grown if they increased by this factor and by this number."""
FALLING_FACTOR = 0.9
"""A fraction is falling if it is below this multiple of its former value."""


class RateAlert(NamedTuple):
    """An alert for a large fraction of the calls or turns that does not fall."""

    name: str
    part: str
    of: str
    minimum: float
    description: str


RATE_ALERTS = (
    RateAlert("unparsed-calls", "tools/unparsed", CALLS, 0.2, "calls that do not parse"),
    RateAlert("repeated-calls", "tools/repeated", CALLS, 0.3, "repeated calls within an episode"),
    RateAlert("truncated-turns", "turns/cut", TURNS, 0.3, "turns truncated by a token limit"),
)


def compare_conversations(
    whole: WindowComparison, late: WindowComparison, moved: Callable[[WindowComparison], float]
) -> Iterator[Alert | None]:
    """Return the alerts of two comparisons; `moved` is the certain change of the reward in standard deviations."""
    for share in RATE_ALERTS:
        yield _large(share, whole) if _large(share, late) else None
    yield _growing(whole, moved) or _growing(late, moved)


def _large(share: RateAlert, change: WindowComparison) -> Alert | None:
    """Return an alert if the fraction is certainly above its minimum and not falling. Solved tasks raise none."""
    part, whole, accuracy = change.of(share.part), change.of(share.of), change.of("accuracy")
    if part is None or whole is None or min(whole) <= 0 or (accuracy is not None and accuracy.now >= SOLVED_ACCURACY):
        return None
    before, now = part.before / whole.before, part.now / whole.now
    if part.now - 2 * part.error < share.minimum * whole.now or now < FALLING_FACTOR * before:
        return None
    name = "turns" if share.of == TURNS else "calls"
    text = f"{share.description}: {change.words} they went from {before:.0%} to {now:.0%} of all {name}"
    return change.alert(share.name, text, share.part, share.of)


def _growing(change: WindowComparison, moved: Callable[[WindowComparison], float]) -> Alert | None:
    """Return an alert if turns have grown while neither reward nor accuracy has risen."""
    turns, reward, accuracy = change.of(TURNS), change.of("reward"), change.of("accuracy")
    if (
        turns is None
        or reward is None
        or turns.rise < max(MIN_GROWTH, CERTAIN_SIGMAS * turns.error)
        or turns.now < GROWTH_FACTOR * turns.before
    ):
        return None
    if moved(change) > MAX_LEVEL_MOVE or (accuracy is not None and not change.flat):
        return None
    text = (
        f"more turns, and no more reward: {change.words} a response went from {turns:.1f} turns, and the reward from "
        f"{reward:.3g}"
    )
    return change.alert("turns-growing", text, TURNS, "reward", "accuracy")
