"""Incremental parsing of turns: reasoning, content, stop strings and tool calls."""

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
    """Return the parsed parts of a text that is fed in pieces of these sizes."""
    parser = TurnParser(**how)
    parts, at = [], 0
    while at < len(text):
        size = sizes[len(parts) % len(sizes)]
        parts.append(parser.feed(text[at : at + size]))
        at += size
    parts.append(parser.end())
    assert join_parts(parts) == parser.turn
    return parts


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
def test_incremental_parsing_equals_parsing_at_once(
    text: str, how: dict[str, Any], content: str, reasoning: str, calls: list[int]
) -> None:
    rng = random.Random(text)
    for sizes in [(len(text),), (1,), *([rng.randint(1, 9) for _ in range(7)] for _ in range(8))]:
        read = join_parts(pieces(text, sizes, **how))
        assert (read.content, read.reasoning) == (content, reasoning), sizes
        assert [call.arguments["a"] for call in read.calls] == calls and not any(call.error for call in read.calls)


@pytest.mark.parametrize("name", FORMATS)
def test_incremental_parsing_of_every_format(name: str) -> None:
    made = FORMATS[name]
    for sizes in [(1,), (2, 5), (400,)]:
        read = join_parts(pieces(made.example, sizes, format=made, schemas=TYPES))
        assert [(call.name, call.arguments) for call in read.calls] == [("add", {"a": 1})] and not read.content


def test_only_possible_markers_are_held_back() -> None:
    def parts(text: str, **how: Any) -> list[str]:
        return [piece.content or piece.reasoning or ("CALL" if piece.calls else "") for piece in pieces(text, **how)]

    assert parts("ab END"[:5], stops=("END",)) == ["a", "b", " ", "", "", "EN"]
    assert parts("EEND", stops=("END",)) == ["", "E", "", "", ""]
    assert parts("a<b<", **HERMES) == ["a", "", "<b", "", "<"]
    assert parts("<x", in_reasoning=False) == ["", "<x", ""]
    closing = [*parts(CALL + "x", **HERMES)]
    assert closing[len(CALL) - 1] == "CALL" and set(closing) == {"", "CALL"}, "when it is closed, and not at the end"
    assert parts("hm </think>\nx", in_reasoning=True)[:2] == ["h", "m"]
    assert parts("{x", format=FORMATS["llama"]) == ["", "", "{x"], "only the whole turn says that it is no call"
    assert parts("x{", format=FORMATS["llama"]) == ["x", "{", ""]
    assert (
        partial_match_length("aab", ("abc", "bcd")) == 2
        and partial_match_length("", ("a",)) == 0
        and partial_match_length("x", ()) == 0
    )


def test_special_tokens_are_not_part_of_content_or_stop_strings() -> None:
    parser = TurnParser(("im", "ab"), format=FORMATS["hermes"])
    assert parser.feed("<|im_end|>", special=True).content == "" and parser.feed("x").content == "x"
    assert parser.feed("a").content == "", "it may become a stop string"
    parser.feed("<|im_end|>", special=True)
    assert parser.feed("b").content == "" and parser.ended and parser.turn.content == "x"


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
@pytest.mark.parametrize("template", ["qwen3", "llama3_1", "mistral", "lfm2", "deepseekv3", "gemma3"])
def test_token_by_token_parsing_with_many_tokenizers(template: str, kind: str) -> None:
    tokenizer = chat_tokenizer(template, kind)
    renderer = ChatRenderer(tokenizer, stop_ids(template, tokenizer))
    rng = random.Random(template)
    form = renderer.make_parser(TOOLS).parser.format
    assert form is not None
    texts = ["naïve 漢字 🙂 so", f"naïve 漢 {form.example}", f"{form.example}", "<think>hm</think> 🙂"]
    for text in texts:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], min(renderer.stop_ids)]
        for tools, stops in (([], ()), (TOOLS, ()), (TOOLS, ("字 🙂", "zz")), ([], ("字",))):
            parser = renderer.make_parser(tools, stops)
            at, parts = 0, []
            while at < len(ids):
                size = rng.choice((1, 1, 1, 2, 5))
                parts.append(parser.feed(ids[at : at + size]))
                assert parser.num_parsed <= at + size
                at += size
            parts.append(parser.end())
            read = renderer.parse_turn(ids, tools, stops)
            assert join_parts(parts) == parser.turn == read and parser.num_parsed == len(ids)
            assert not any("\N{REPLACEMENT CHARACTER}" in piece.content for piece in parts)
            assert not any(stop in read.content for stop in stops)
            calls = form.example in text and (form.blocks.opening or text == form.example)  # a bare one is all
            assert [call.arguments for call in read.calls] == ([{"a": 1}] if tools and calls else [])


@pytest.mark.parametrize(
    ("template", "opened"), [("qwen3_5_think", True), ("deepseek_r1_distill", True), ("qwen3", False)]
)
def test_prompt_that_opens_reasoning(template: str, opened: bool) -> None:
    tokenizer = chat_tokenizer(template)
    renderer = ChatRenderer(tokenizer, stop_ids(template, tokenizer))
    turn = tokenizer("hm</think>\n\nyes", add_special_tokens=False)["input_ids"]
    prompt = renderer.render_prompt([{"role": "user", "content": "hello"}], [])
    read = renderer.parse_turn(turn, [], (), prompt)
    assert (read.content, read.reasoning) == (("yes", "hm") if opened else ("hm</think>\n\nyes", ""))
    closed = [*prompt, *tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]]
    assert renderer.parse_turn(turn, [], (), closed).content == "hm</think>\n\nyes"


def test_incomplete_characters_are_held_back_until_the_end() -> None:
    letters = "🙂".encode()

    def words(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    parser = TokenParser(TurnParser(), words, {}, ())
    assert [parser.feed([letter]).content for letter in letters] == ["", "", "", "🙂"] and parser.num_parsed == 4
    assert parser.feed(list(letters[:2])).content == "" and parser.num_parsed == 4
    assert parser.end().content == "\N{REPLACEMENT CHARACTER}" and parser.num_parsed == 6
