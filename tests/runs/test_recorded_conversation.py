"""Recorded conversations: messages with their roles, the reward of each turn, and why the conversation ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascent.cli.runs import responses
from ascent.core.types import Batch, Rollouts, to_batch
from ascent.lab.pages.completions.completions import of_row
from ascent.runs.recorded_conversation import conversation, conversation_lines, ending, observed_words
from ascent.runs.rollout_files import TokenTexts, sampled_rows
from ascent.workflows.loaded_policy import responses_text

ANSWER = ["", "\n", "", "user", "\n", "4", "2", "", "\n", "", "assistant", "\n"]
"""What ChatML writes around `42`: control tokens have no text."""


def row_of(**more: Any) -> dict[str, Any]:
    pieces = ["call", " it", "", *ANSWER, "so", " 42", ""]
    turn = [0] * (3 + len(ANSWER)) + [1] * 3
    row = {"group": 0, "sample": 0, "prompt_text": "6 · 7?", "response_text": "".join(pieces), "status": "ok"}
    row |= {"response": list(range(len(pieces))), "pieces": pieces, "turn": turn, "valid": True, "reward": 1.25}
    row |= {"mask": [True] * 3 + [False] * len(ANSWER) + [True] * 3, "advantage": [0.5] * len(pieces)}
    row |= {"turn_reward": [0.25, 1.0], "time/turns": [0.5, 0.0], "truncated": False}
    row |= {"reason": "turn 1: calls=2 unparsed=1 failed=0 repeated=0; turn 2: a turn without a call; answered 42"}
    return row | more


def test_messages_with_the_reward_and_the_seconds_of_each_turn() -> None:
    one, two, three = conversation(row_of())
    assert (one.role, one.turn, one.text, one.reward, one.seconds, one.advantage) == (
        "policy",
        1,
        "call it",
        0.25,
        0.5,
        0.5,
    )
    assert (two.role, two.turn, two.text, two.reward) == ("tool", 1, "42", None)
    assert (three.role, three.turn, three.text, three.reward) == ("policy", 2, "so 42", 1.0)
    assert ending(row_of(), [one, two, three]) == "a turn without a call; answered 42"
    assert [said.role for said in conversation(row_of(reason="turn 2: found"))] == ["policy", "environment", "policy"]


def test_conversation_lines_with_and_without_colors() -> None:
    messages = conversation(row_of())
    plain = conversation_lines(messages, "over", color=False)
    assert plain == [
        "  policy       call it  · turn 1, reward 0.25, A +0.500, answered in 0.5 s, 2 calls (1 unparsed)",
        "  tool         42",
        "  policy       so 42  · turn 2, reward 1, A +0.500",
        "  ended: over; 0.5 s of waiting",
    ]
    bright = conversation_lines(messages, "over", color=True)
    assert bright[1] == "\x1b[35m  tool         42\x1b[0m" and "\x1b[2m· turn 2" in bright[2]
    shown = responses([row_of(correct=True)])
    assert "response 0: reward 1.25, 2 turns, right" in shown and plain[1] in shown


def test_control_characters_of_an_environment_are_escaped() -> None:
    row = row_of(pieces=["\x1b[2Jcall", " it", "", *ANSWER, "so", "\x1b]0;x\x07", ""], prompt_text="\x1b[31m")
    assert "\x1b" not in responses([row])
    assert conversation_lines([], "over\n  policy  a forged line", False) == ["  ended: over policy a forged line"]


def test_empty_turn_is_labeled() -> None:
    row = row_of(
        response=[0], pieces=[""], turn=[0], mask=[True], advantage=[0.5], turn_reward=[0.0], reason="turn 1: x"
    )
    shown = responses([row])
    assert "response 0: reward 1.25, 1 turn\n  policy       (no words)  · turn 1, reward 0, A +0.500" in shown


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"truncated": True, "reason": ""}, "a limit of tokens"),
        ({"reason": "turn 2: cut off at 3 tokens; the limit of 2 turns"}, "the limit of 2 turns"),
        (
            {"reason": "turn 2: failed: ValueError: fell", "status": "failed", "truncated": True},
            "failed: ValueError: fell",
        ),
        ({"reason": None}, "its environment ended it"),
    ],
)
def test_ending_of_a_conversation(more: dict[str, Any], words: str) -> None:
    assert ending(row_of(**more), conversation(row_of(**more))) == words


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (["", "user", "", "\n\n", "hi", "", "", "assistant", "", "\n\n"], "hi"),  # Llama 3
        (["", "user", "\n", "user", "", "\n", "", "model", "\n"], "user"),  # Gemma, and a word that is a role's
        (["", " hi ", ""], "hi"),  # Mistral: roles are control tokens
        (["user", ": ", "higher"], "user: higher"),  # no control tokens: as it stands
        (["a ", "", "", "🙂", " user"], "a 🙂 user"),  # parts of a character have no text either
        (["", "user", ""], "user"),  # nothing else: better that than nothing
    ],
)
def test_chat_template_markup_is_removed_from_observations(pieces: list[str], words: str) -> None:
    assert observed_words(pieces) == words


@pytest.mark.parametrize("name", ["turn", "mask", "pieces", "turn_reward", "time/turns", "advantage", "reason"])
@pytest.mark.parametrize("value", [None, [], [None] * 18, ["x"] * 18, [float("nan")] * 18])
def test_malformed_rows_are_ignored(name: str, value: Any) -> None:
    row = row_of(**{name: value})
    responses([row | {"logp_old": [0.0], "advantage": row["advantage"] or [0.0]}])
    assert (conversation(row) == []) == (name in ("turn", "pieces") and (name == "turn" or value in (None, [])))
    of_row(row | {"advantage": None}, None)


class Words:
    def text(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_recorded_rows_have_the_reward_and_the_seconds_of_each_turn() -> None:
    """Two turns with an observation in between, and a single turn. An outcome reward belongs to the last turn."""
    mask = torch.tensor([[[True, True, False, True], [True, False, False, False]]])
    there = torch.tensor([[[True] * 4, [True, False, False, False]]])
    turn = torch.tensor([[[0, 0, 0, 1], [0, 0, 0, 0]]])
    paid, waited = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    paid[0, 0, 1], paid[0, 0, 3], waited[0, 0, 1] = 0.25, 1.0, 0.5
    drawn = Rollouts(
        torch.tensor([[7]]), torch.arange(8).view(1, 2, 4), mask, torch.zeros(1, 2, 4), 4, torch.zeros(1, 2).bool(),
        present=there, turn=turn, environment_seconds=waited,
    )  # fmt: skip

    def rows(reward: torch.Tensor) -> list[dict[str, Any]]:
        batch: Batch = to_batch(drawn, reward=reward, valid=torch.ones(1, 2).bool())
        return sampled_rows(0, batch, 1, TokenTexts(Words()))

    one, two = rows(paid)
    assert one["turn_reward"] == [0.25, 1.0] and one["time/turns"] == [0.5, 0.0] and two["turn_reward"] == [0.0]
    assert [row["turn_reward"] for row in rows(torch.ones(1, 2, 1))] == [[0.0, 1.0], [1.0]]


def test_a_sampled_conversation_is_shown_turn_by_turn() -> None:
    turns = [speech._asdict() for speech in conversation(row_of())]
    row = {
        "sample": 0,
        "prompt": "6 · 7?",
        "truncated": False,
        "length": 6,
        "logp": [-1.0],
        "ids": [1],
        "response": "x",
    }
    row |= {
        "turns": turns,
        "ended": "over",
        "valid": True,
        "strict": True,
        "lenient": True,
        "reward": 1.25,
        "reason": "r",
    }
    shown = responses_text([row])
    assert "  tool         42" in shown and "ended: over" in shown and "score    right, reward 1.25" in shown
    assert "(r)" not in shown, "the conversation has said why"
