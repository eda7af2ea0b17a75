"""Alerts of conversations: calls that do not parse or are made again, turns that are cut off or grow in vain."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ascent.runs.alerts.metric_windows import LEVEL, SOLVED, SURE, Alert, Change

TURNS, CALLS = "turns", "tools/calls"
KEYS = (TURNS, "turns/cut", CALLS, "tools/unparsed", "tools/repeated")
"""The metrics that these alerts are raised from."""
GROWN, MORE = 1.5, 1.0
"""Turns have grown if there are this many times as many, and this many more."""
FALLING = 0.9
"""A share is falling if it is below this multiple of its former value."""


class Share(NamedTuple):
    """An alert for a share of the calls, or of the turns, that is large and does not fall."""

    name: str
    part: str
    of: str
    least: float
    words: str


SHARES = (
    Share("unparsed-calls", "tools/unparsed", CALLS, 0.2, "calls that do not parse"),
    Share("repeated-calls", "tools/repeated", CALLS, 0.3, "calls that were made before in their episode"),
    Share("truncated-turns", "turns/cut", TURNS, 0.3, "turns that a limit of tokens cut off"),
)


def raised(whole: Change, late: Change, moved: Callable[[Change], float]) -> Iterator[Alert | None]:
    """The alerts of two comparisons; `moved`: how far the reward has surely moved, in standard deviations."""
    for share in SHARES:
        yield _large(share, whole) if _large(share, late) else None
    yield _growing(whole, moved) or _growing(late, moved)


def _large(share: Share, change: Change) -> Alert | None:
    """Is the share surely above its bound, and not falling? A task that is solved all the same is left alone."""
    part, whole, accuracy = change.of(share.part), change.of(share.of), change.of("accuracy")
    if part is None or whole is None or min(whole) <= 0 or (accuracy is not None and accuracy.now >= SOLVED):
        return None
    before, now = part.before / whole.before, part.now / whole.now
    if part.now - 2 * part.error < share.least * whole.now or now < FALLING * before:
        return None
    name = "turns" if share.of == TURNS else "calls"
    text = f"{share.words}: {change.words} they went from {before:.0%} to {now:.0%} of all {name}"
    return change.alert(share.name, text, share.part, share.of)


def _growing(change: Change, moved: Callable[[Change], float]) -> Alert | None:
    """Have turns grown, while neither the reward nor the accuracy has risen?"""
    turns, reward, accuracy = change.of(TURNS), change.of("reward"), change.of("accuracy")
    if (
        turns is None
        or reward is None
        or turns.rise < max(MORE, SURE * turns.error)
        or turns.now < GROWN * turns.before
    ):
        return None
    if moved(change) > LEVEL or (accuracy is not None and not change.flat):
        return None
    text = (
        f"more turns, and no more reward: {change.words} a response went from {turns:.1f} turns, and the reward from "
        f"{reward:.3g}"
    )
    return change.alert("turns-growing", text, TURNS, "reward", "accuracy")
