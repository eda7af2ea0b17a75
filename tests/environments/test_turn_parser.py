"""Turns that are read piece by piece: thoughts, words, stop strings and calls, as soon as they are certain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from ascent.environments.chat_session import ChatRenderer
from ascent.environments.tool_call_formats import FORMATS
from ascent.environments.turn_parser import AssistantTurn, TokenParser, TurnParser, join_parts, partial_match_length
from tests.chats import chat_tokenizer, stop_ids

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
TYPES = {"add": {"a": {"type": "integer"}}}
CALL, OTHER = (f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}}}}}\n</tool_call>' for a in (1, 2))


QUOTED = '"a"'


def pieces(text: str, sizes: Sequence[int] = (1,), **how: Any) -> list[AssistantTurn]:
    """What is told when a text comes in pieces of these sizes, and at its end."""
    parser = TurnParser(**how)
    told, at = [], 0
    while at < len(text):
        size = sizes[len(told) % len(sizes)]
        told.append(parser.feed(text[at : at + size]))
        at += size
    told.append(parser.end())
    assert join_parts(told) == parser.turn
    return told


def whole(text: str, **how: Any) -> AssistantTurn:
    return join_parts(pieces(text, (len(text),), **how)) if text else AssistantTurn()


HERMES = {"format": FORMATS["hermes"], "schemas": TYPES}


@pytest.mark.parametrize(
    ("text", "how", "content", "reasoning", "calls"),
    [
        ("hello", {}, "hello", "", []),
        ("<think>\n hm \n</think>\n\nyes\n", {}, "yes\n", "hm", []),
        (" hm </think>yes", {"in_reasoning": True}, "yes", "hm", []),
        ("<think>hm</think>yes", {"in_reasoning": True}, "yes", "hm", []),
        ("<think>never closed ", {}, "", "never closed", []),
        ("<think>hm</think>yes", {"in_reasoning": None}, "<think>hm</think>yes", "", []),
        ("words </think> and more", {}, "words </think> and more", "", []),
        ("<thin", {}, "<thin", "", []),
        ("abENDcd", {"stops": ("END",)}, "ab", "", []),
        ("abENcd", {"stops": ("END",)}, "abENcd", "", []),
        ("abEN", {"stops": ("END", "N!")}, "abEN", "", []),
        ("<think>ab</th END</think>", {"stops": ("END",)}, "", "ab</th", []),
        (f"So {CALL} and {OTHER} bye", HERMES, "So ", "", [1, 2]),
        (f"<think>{CALL}</think>{OTHER}", HERMES, "", CALL, [2]),
        (f"So {CALL} <tool_call>oh", HERMES, "So <tool_call>oh", "", [1]),
        (f"So <tool_call>oh</tool_call>{CALL}", HERMES, f"So <tool_call>oh</tool_call>{CALL}", "", []),
        (f"So {CALL[:-4]}", HERMES, f"So {CALL[:-4]}", "", []),
        (f"So {CALL}", HERMES | {"stops": (QUOTED,)}, f"So {CALL.split(QUOTED)[0]}", "", []),
        ("a < b <tool", HERMES, "a < b <tool", "", []),
        ('{"name": "add", "parameters": {"a": 1}}', {"format": FORMATS["llama"]}, "", "", [1]),
        ('{"nothing": 1}', {"format": FORMATS["llama"]}, '{"nothing": 1}', "", []),
        ('no {"name": "add"}', {"format": FORMATS["llama"]}, 'no {"name": "add"}', "", []),
        ('So[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', {"format": FORMATS["mistral"]}, "So", "", [1]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 2}', {"format": FORMATS["mistral"]}, "", "", [1, 2]),
    ],
)
def test_a_turn_is_read_the_same_in_any_pieces(
    text: str, how: dict[str, Any], content: str, reasoning: str, calls: list[int]
) -> None:
    luck = random.Random(text)
    for sizes in [(len(text),), (1,), *([luck.randint(1, 9) for _ in range(7)] for _ in range(8))]:
        read = join_parts(pieces(text, sizes, **how))
        assert (read.content, read.reasoning) == (content, reasoning), sizes
        assert [call.arguments["a"] for call in read.calls] == calls and not any(call.error for call in read.calls)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_of_every_format_is_read_in_any_pieces(name: str) -> None:
    made = FORMATS[name]
    for sizes in [(1,), (2, 5), (400,)]:
        read = join_parts(pieces(made.example, sizes, format=made, schemas=TYPES))
        assert [(call.name, call.arguments) for call in read.calls] == [("add", {"a": 1})] and not read.content


def test_what_is_certain_is_told_at_once_and_only_what_may_become_a_mark_is_held() -> None:
    def told(text: str, **how: Any) -> list[str]:
        return [piece.content or piece.reasoning or ("CALL" if piece.calls else "") for piece in pieces(text, **how)]

    assert told("ab END"[:5], stops=("END",)) == ["a", "b", " ", "", "", "EN"]
    assert told("EEND", stops=("END",)) == ["", "E", "", "", ""]
    assert told("a<b<", **HERMES) == ["a", "", "<b", "", "<"]
    assert told("<x", in_reasoning=False) == ["", "<x", ""]
    closing = [*told(CALL + "x", **HERMES)]
    assert closing[len(CALL) - 1] == "CALL" and set(closing) == {"", "CALL"}, "when it is closed, and not at the end"
    assert told("hm </think>\nx", in_reasoning=True)[:2] == ["h", "m"]
    assert told("{x", format=FORMATS["llama"]) == ["", "", "{x"], "only the whole turn says that it is no call"
    assert told("x{", format=FORMATS["llama"]) == ["x", "{", ""]
    assert (
        partial_match_length("aab", ("abc", "bcd")) == 2
        and partial_match_length("", ("a",)) == 0
        and partial_match_length("x", ()) == 0
    )


def test_special_tokens_are_neither_words_nor_part_of_a_stop_string() -> None:
    parser = TurnParser(("im", "ab"), format=FORMATS["hermes"])
    assert parser.feed("<|im_end|>", special=True).content == "" and parser.feed("x").content == "x"
    assert parser.feed("a").content == "", "it may become a stop string"
    parser.feed("<|im_end|>", special=True)
    assert parser.feed("b").content == "" and parser.ended and parser.turn.content == "x"


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
@pytest.mark.parametrize("template", ["qwen3", "llama3_1", "mistral", "lfm2", "deepseekv3", "gemma3"])
def test_tokens_of_any_tokenizer_are_read_the_same_one_by_one(template: str, kind: str) -> None:
    tokenizer = chat_tokenizer(template, kind)
    renderer = ChatRenderer(tokenizer, stop_ids(template, tokenizer))
    luck = random.Random(template)
    form = renderer.make_parser(TOOLS).parser.format
    assert form is not None
    texts = ["naïve 漢字 🙂 so", f"naïve 漢 {form.example}", f"{form.example}", "<think>hm</think> 🙂"]
    for text in texts:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], min(renderer.stop_ids)]
        for tools, stops in (([], ()), (TOOLS, ()), (TOOLS, ("字 🙂", "zz")), ([], ("字",))):
            parser = renderer.make_parser(tools, stops)
            at, told = 0, []
            while at < len(ids):
                size = luck.choice((1, 1, 1, 2, 5))
                told.append(parser.feed(ids[at : at + size]))
                assert parser.num_parsed <= at + size
                at += size
            told.append(parser.end())
            read = renderer.parse_turn(ids, tools, stops)
            assert join_parts(told) == parser.turn == read and parser.num_parsed == len(ids)
            assert not any("\N{REPLACEMENT CHARACTER}" in piece.content for piece in told)
            assert not any(stop in read.content for stop in stops)
            calls = form.example in text and (form.blocks.opening or text == form.example)  # a bare one is all
            assert [call.arguments for call in read.calls] == ([{"a": 1}] if tools and calls else [])


@pytest.mark.parametrize(
    ("template", "opened"), [("qwen3_5_think", True), ("deepseek_r1_distill", True), ("qwen3", False)]
)
def test_a_prompt_that_opens_the_thoughts_is_seen(template: str, opened: bool) -> None:
    tokenizer = chat_tokenizer(template)
    renderer = ChatRenderer(tokenizer, stop_ids(template, tokenizer))
    turn = tokenizer("hm</think>\n\nyes", add_special_tokens=False)["input_ids"]
    prompt = renderer.render_prompt([{"role": "user", "content": "hello"}], [])
    read = renderer.parse_turn(turn, [], (), prompt)
    assert (read.content, read.reasoning) == (("yes", "hm") if opened else ("hm</think>\n\nyes", ""))
    closed = [*prompt, *tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]]
    assert renderer.parse_turn(turn, [], (), closed).content == "hm</think>\n\nyes"


def test_a_torn_character_waits_and_one_that_never_comes_is_told_at_the_end() -> None:
    letters = "🙂".encode()

    def words(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    parser = TokenParser(TurnParser(), words, {}, ())
    assert [parser.feed([letter]).content for letter in letters] == ["", "", "", "🙂"] and parser.num_parsed == 4
    assert parser.feed(list(letters[:2])).content == "" and parser.num_parsed == 4
    assert parser.end().content == "\N{REPLACEMENT CHARACTER}" and parser.num_parsed == 6
