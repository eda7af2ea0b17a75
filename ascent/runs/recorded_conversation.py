"""Read recorded multi-turn responses as conversations: messages, and the reward of each turn.

A recorded row has tokens with their texts (`pieces`), the mask of sampled tokens, the turn of each token, the reward
and the waiting time of every turn. Rows may come from untrusted files: lists of the wrong length are ignored.
"""

import math
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ascent.environments.tools import TOOL_COUNT_NAMES, parse_tool_counts
from ascent.rewards.tokenized_task import observed_words
from ascent.rollout.conversations import FAILED_PREFIX, TRUNCATED_PREFIX, TURN_LIMIT_PATTERN
from ascent.runs.display.terminal import printable, width

TURN_REWARD, TURN_SECONDS = TURN_COLUMNS = ("turn_reward", "time/turns")
"""The columns with a number per turn: its reward, and the seconds that the environment took to answer."""
POLICY, ENVIRONMENT, TOOL = ROLES = ("policy", "environment", "tool")
MIN_SHOWN_WAIT = 0.01
"""Minimum seconds of waiting to show."""
_NOTE = re.compile(r"(?:^|; )turn (\d{1,9}): ")
_ROLE_COLORS = {POLICY: "", ENVIRONMENT: "36", TOOL: "35"}
_DIM = "2"


class ConversationMessage(NamedTuple):
    """One message of a conversation. Only turns of the policy have rewards and waiting times."""

    role: str
    turn: int
    """The turn, from 1; an observation has the number of the turn before it."""
    text: str
    tokens: int
    reward: float | None = None
    advantage: float | None = None
    """Mean over the tokens."""
    seconds: float | None = None
    note: str = ""
    """Notes about the turn: its tool calls, why the episode ended."""


def sampled_tokens(row: Mapping[str, Any]) -> list[bool] | None:
    """Return which tokens the policy sampled; None: all of them, or unknown."""
    return _fitting(row, "mask", bool)


def turn_numbers(row: Mapping[str, Any]) -> list[int] | None:
    """Return the turn of each token, from 0; None: unknown."""
    return _fitting(row, "turn", int)


def _fitting(row: Mapping[str, Any], name: str, kind: type) -> Any:
    values, tokens = row.get(name), row.get("response") or []
    fits = isinstance(values, list) and len(values) == len(tokens) and all(type(value) is kind for value in values)
    return values if fits else None


def conversation(row: Mapping[str, Any]) -> list[ConversationMessage]:
    """Return the messages of a recorded response in order; empty if it is not a conversation."""
    turn, pieces = turn_numbers(row), row.get("pieces")
    if turn is None or not isinstance(pieces, list) or len(pieces) != len(turn):
        return []
    mask, notes = sampled_tokens(row) or [True] * len(turn), notes_by_turn(row)
    advantage = row.get("advantage") or []
    advantage = advantage * len(turn) if len(advantage) == 1 else advantage
    observation_role = TOOL if any(parse_tool_counts(note) for note in notes.values()) else ENVIRONMENT
    messages, start = list[ConversationMessage](), 0
    for end in range(1, len(turn) + 1):
        if end < len(turn) and mask[end] == mask[start] and (turn[end] == turn[start] or not mask[start]):
            continue
        texts = [str(piece) for piece in pieces[start:end]]
        if mask[start]:
            place, advantages = turn[start], [x for x in advantage[start:end] if isinstance(x, float)]
            message = ConversationMessage(POLICY, place + 1, "".join(texts), end - start, _at(row, TURN_REWARD, place))
            mean = (
                math.fsum(advantages) / len(advantages) if advantages and all(map(math.isfinite, advantages)) else None
            )
            seconds, note = _at(row, TURN_SECONDS, place), notes.get(place + 1, "")
            messages.append(message._replace(advantage=mean, seconds=seconds, note=note))
        else:
            number = messages[-1].turn if messages else 0
            messages.append(ConversationMessage(observation_role, number, observed_words(texts), end - start))
        start = end
    return messages


def _at(row: Mapping[str, Any], name: str, place: int) -> float | None:
    """Return the finite number of a turn, or None."""
    values = row.get(name)
    value = values[place] if isinstance(values, list) and 0 <= place < len(values) else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def notes_by_turn(row: Mapping[str, Any]) -> dict[int, str]:
    """Return the notes in the reason of a response, by turn; the last one includes the rest of the reason."""
    _, *parts = _NOTE.split(str(row.get("reason") or ""))
    return {int(number): note for number, note in zip(parts[::2], parts[1::2], strict=True)}


def environment_failed(reason: str) -> bool:
    """Return whether the reason says that the environment of a response failed."""
    return any(note.startswith(FAILED_PREFIX) for note in notes_by_turn({"reason": reason}).values())


def ending(row: Mapping[str, Any], messages: Sequence[ConversationMessage]) -> str:
    """Return why a conversation ended."""
    last = next((message for message in reversed(messages) if message.role == POLICY), None)
    notes = last.note.split("; ") if last and last.note else []
    reasons = [part for part in notes if not (parse_tool_counts(part) or part.startswith(TRUNCATED_PREFIX))]
    out_of_turns = any(TURN_LIMIT_PATTERN.search(part) for part in reasons)
    if row.get("truncated") is True and row.get("status") != "failed" and not out_of_turns:
        reasons.insert(0, "a limit of tokens")
    return "; ".join(reasons) or "its environment ended it"


# ---- in a terminal ----------------------------------------------------------------------------------------------


def use_color() -> bool:
    """Return whether the terminal shows colors; NO_COLOR disables them (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colorize(text: str, code: str, color: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if color and code and text else text


def message_lines(role: str, text: str, color: bool) -> list[str]:
    """Format a message as printable lines, with the speaker's name before the first line."""
    text_width = max(20, min(width(), 120) - 15)
    lines = [part for line in printable(text).strip().split("\n") for part in textwrap.wrap(line, text_width) or [""]]
    lines = lines if any(lines) else ["(no words)"]
    names = [f"  {role:<11}  ", *[" " * 15] * (len(lines) - 1)]
    return [
        colorize((name + line).rstrip(), _ROLE_COLORS.get(role, ""), color)
        for name, line in zip(names, lines, strict=True)
    ]


def tool_counts(note: str) -> dict[str, int]:
    """Return the tool calls of a turn from its note; empty if there are none."""
    return parse_tool_counts(note.split("; ")[0])


def format_tool_calls(counts: Mapping[str, int]) -> str:
    """Format counts of calls: 3 calls (1 unparsed)."""
    calls = counts.get("calls", 0)
    wrong = [f"{counts[name]} {name}" for name in TOOL_COUNT_NAMES[1:] if counts.get(name)]
    return f"{calls} {'call' if calls == 1 else 'calls'}" + (f" ({', '.join(wrong)})" if wrong else "")


def describe_message(message: ConversationMessage) -> str:
    """Describe a turn with its reward and advantage, or the turn that an observation answers."""
    parts = [f"turn {message.turn}"] if message.role == POLICY else [f"to turn {message.turn}"]
    parts += [f"reward {message.reward:.3g}"] if message.reward is not None else []
    parts += [f"A {message.advantage:+.3f}"] if message.advantage is not None else []
    parts += (
        [f"answered in {message.seconds:.2g} s"]
        if message.seconds is not None and message.seconds >= MIN_SHOWN_WAIT
        else []
    )
    parts += [part for part in message.note.split("; ") if part.startswith(TRUNCATED_PREFIX)]
    parts += [format_tool_calls(counts)] if (counts := tool_counts(message.note)) else []
    return ", ".join(parts)


def conversation_lines(messages: Sequence[ConversationMessage], ended: str, color: bool) -> list[str]:
    """Format a conversation for a terminal: every turn with its reward, and why it ended."""
    lines: list[str] = []
    for message in messages:
        texts, numbers = message_lines(message.role, message.text, color), f"· {describe_message(message)}"
        if message.role != POLICY:
            numbers = ""
        elif (
            len(texts) == 1 and len(texts[0]) + 2 + len(numbers) <= width()
        ):  # a short turn and its numbers in one line
            texts[0] += "  "
        else:
            texts.append(" " * 15)
        lines += [*texts[:-1], texts[-1] + colorize(numbers, _DIM, color)]
    waited = math.fsum(message.seconds or 0.0 for message in messages)
    waiting_text = f"; {waited:.2g} s of waiting" if waited >= MIN_SHOWN_WAIT else ""
    return [*lines, colorize(f"  ended: {printable(' '.join(ended.split()))}{waiting_text}", _DIM, color)]
