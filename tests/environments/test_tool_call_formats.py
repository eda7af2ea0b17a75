"""Tool-call formats: parsing, error messages, and the choice of a model's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascent.core.errors import ConfigError
from ascent.environments import tool_chat
from ascent.environments.calculator import calculator
from ascent.environments.tool_call_formats import FORMATS, MAX_CALL_CHARACTERS, PLAIN, ToolCall, parameter_schemas
from ascent.environments.tool_chat import ToolChat, choose_format, tool_instruction
from ascent.environments.tools import Tools, schemas_of
from tests.chats import NAMES, chat_tokenizer, stop_ids

TOOLS = tool_chat._PROBE_TOOLS
TYPES = parameter_schemas(TOOLS)
WRITTEN = {
    "deepseek_r1_distill": "plain",
    "deepseekv3": "plain",  # it writes calls, and does not show tools
    "gemma4_v2": "gemma",
    "gemma4_v5": "gemma",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "lfm2_2_5": "pythonic",
    "lfm2_v2": "pythonic",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "mistral": "mistral",
    "muse_glimmer": "atem",
    "nemotron_3_nano": "qwen3-coder",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3-coder",
    "qwen3_8": "qwen3-coder",
    "qwen3_instruct_2507": "hermes",
}
"""The format of each template; the others get the plain format."""


@pytest.mark.parametrize("name", NAMES)
def test_chosen_format_parses_calls_of_the_models_template(name: str) -> None:
    tokenizer = chat_tokenizer(name)
    assert choose_format(tokenizer, TOOLS, stop_ids(name, tokenizer)).name == WRITTEN.get(name, "plain")


def test_calls_are_parsed_if_the_prompt_opens_reasoning() -> None:
    call = ToolCall("find_known", {"words": "x"})
    assert FORMATS["deepseek"].parse_turn(
        tool_chat._render_calls(chat_tokenizer("deepseekv3"), [call, call]) or ""
    ) == [
        call,
        call,
    ]


def test_generation_prompt_is_removed_up_to_a_token_boundary() -> None:
    assert tool_chat._without_generation_prompt("assistant\n<tool_call>x", "assistant\n<think>\n") == "<tool_call>x"
    assert tool_chat._without_generation_prompt("assistant\n</think>x", "assistant\n") == "</think>x"


@pytest.mark.parametrize("name", FORMATS)
def test_examples_of_formats_are_parsed(name: str) -> None:
    form = FORMATS[name]
    call = [ToolCall("add", {"a": 1})]
    assert form.parse_turn(form.example) == call
    assert form.parse_turn(f"<think>{form.example}</think>{form.example}") == call  # thoughts are no calls
    assert form.parse_turn(f"<think>{form.example}") == []
    assert form.parse_turn("The answer is 12.<|im_end|>") == form.parse_turn("") == []


TEXT = st.text("ab \\\"'{}:,/0é漢🙂\t", max_size=9)
LEAVES = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | TEXT
NESTED = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "mistral", "gptoss", "glm4moe", "qwen3_8"])
@settings(max_examples=10, deadline=None)
@given(words=TEXT, deep=NESTED)
def test_any_arguments_survive_the_template(name: str, words: str, deep: Any) -> None:
    call = ToolCall("find_known", {"words": words, "deep": {"value": deep}})
    text = tool_chat._render_calls(chat_tokenizer(name), [call])
    assert text is not None
    assert [each._replace(id="") for each in FORMATS[WRITTEN[name]].parse_turn(text, TYPES)] == [call]


SEVERAL = {
    "hermes": 'Let me see.\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> and\n'
    '<tool_call>\n{"name": "g", "arguments": "{\\"y\\": null}"}\n</tool_call><|im_end|>',
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    "<tool_call><function=g><parameter=y>None</parameter></function></tool_call>",
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "<tool_call>g<arg_key>y</arg_key><arg_value>null</arg_value></tool_call><|observation|>",
    "llama": '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "arguments": {"y": null}}<|eom_id|>',
    "mistral": '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": null}</s>',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```'
    '<｜tool▁call▁end｜><｜tool▁call▁begin｜>g\n{"y": null}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
    '<|message|>{"x": 1}<|call|><|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>'
    '{"y": null}<|call|>',
    "pythonic": "<|tool_call_start|>[f(x=1), g(y=null)]<|tool_call_end|>",
    "gemma": "<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:g{y:null}<tool_call|><|tool_response>",
    "atem": '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="x">1</atem:parameter>\n</atem:invoke>'
    '\n<atem:invoke name="g"><atem:parameter name="y">null</atem:parameter></atem:invoke></atem:function_calls>',
    "plain": 'I ask. <call>f {"x": 1}</call> <call>\ng\n{"y": null}\n</call>',
}


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_in_one_turn(name: str) -> None:
    calls = FORMATS[name].parse_turn(SEVERAL[name])
    assert calls == [ToolCall("f", {"x": 1}), ToolCall("g", {"y": None})]


@pytest.mark.parametrize(
    ("name", "words", "error"),
    [
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "not JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "not followed by </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no name"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "not an object"),
        ("hermes", "<tool_call>12</tool_call>", "a call is an object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is not valid JSON"),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {"[" * 9000}</tool_call>', "nested too deeply"),
        ("hermes", f"<tool_call>{'x' * (MAX_CALL_CHARACTERS + 1)}</tool_call>", "20,001 characters"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "unpaired surrogate"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": -1e999}}</tool_call>', "too large"),
        ("pythonic", f"<|tool_call_start|>[f(x=0x{'f' * 9000})]<|tool_call_end|>", "too large"),
        ("qwen3-coder", "<tool_call><function=f><parameter=x>1e999</parameter></function></tool_call>", "too large"),
        ("qwen3-coder", "<tool_call>f</tool_call>", "no name"),
        ("qwen3-coder", "<tool_call><function=f><parameter=x>1</function></tool_call>", "<parameter= is not closed"),
        ("glm", "<tool_call>f<arg_key>x</arg_key></tool_call>", "<arg_key> is not closed"),
        ("llama", '{"name": "f", "parameters": {"x": }}', "not JSON"),
        ("llama", "<|python_tag|>f(1)", "not JSON"),
        ("llama", f'<|python_tag|>{{"name": "f", "parameters": {"[" * 9000}', "nested too deeply"),
        ("llama", "<|python_tag|><|eom_id|>", "there is nothing after"),
        ("mistral", "[TOOL_CALLS]</s>", "no name"),
        ("mistral", '[TOOL_CALLS] [{"name": "f"', "not JSON"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>\n{}<｜tool▁call▁end｜>", "no name"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>12<|call|>", "not an object"),
        ("pythonic", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "need names"),
        ("pythonic", "<|tool_call_start|>[f(x=g())]<|tool_call_end|>", "g() is not a value"),
        ("pythonic", "<|tool_call_start|>[f(x=1]<|tool_call_end|>", "not a list of calls"),
        ("pythonic", "<|tool_call_start|>f<|tool_call_end|>", "not a list of calls"),
        ("pythonic", "<|tool_call_start|>[f(x=\x00)]<|tool_call_end|>", "not a list of calls"),
        ("pythonic", f"<|tool_call_start|>[f(x={'-' * 9000}1)]<|tool_call_end|>", "not a list of calls"),
        ("gemma", "<|tool_call>f{x:1}<tool_call|>", "call:NAME"),
        ("gemma", '<|tool_call>call:f{x:<|"|>a}<tool_call|>', "not JSON"),
        ("atem", "<atem:invoke >x</atem:invoke>", "no name"),
        ("plain", "<call>f {x: 1}</call>", "not JSON"),
        ("plain", "<call>two words</call>", "not one word"),
        ("plain", "<call></call>", "no name"),
        ("plain", "<call>f {}", "not followed by </call>"),
    ],
)
def test_a_call_that_does_not_parse_says_why(name: str, words: str, error: str) -> None:
    (call,) = FORMATS[name].parse_turn(words)
    assert error in call.error and call.name == "" and len(call.error) < 300


def test_valid_calls_next_to_an_invalid_one_are_parsed() -> None:
    calls = PLAIN.parse_turn('<call>f {"x": 1}</call><call>g {</call><call>h {}</call><call>i')
    assert [call.name for call in calls] == ["f", "", "h", ""]
    assert [bool(call.error) for call in calls] == [False, True, False, True]


def test_json_without_a_name_is_not_a_call() -> None:
    assert FORMATS["llama"].parse_turn('{"answer": 12}') == FORMATS["llama"].parse_turn("{not JSON") == []


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "string"}, "7"),
        ('"7"', {"type": "string"}, '"7"'),
        ("7", {"type": "integer"}, 7),
        ("7", None, 7),
        ("7", {"type": ["integer", "string"]}, 7),
        ("[7]", {"type": ["integer", "string"]}, "[7]"),
        ("7", {"anyOf": [{"type": "string"}, {"type": "array"}]}, "7"),
        ("b", {"enum": ["a", "b"]}, "b"),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "boolean"}, True),
        ("maybe", {"type": "boolean"}, "maybe"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("a\nb", None, "a\nb"),
    ],
)
def test_tagged_arguments_are_converted_by_the_schema(text: str, schema: Any, value: Any) -> None:
    words = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert FORMATS["qwen3-coder"].parse_turn(words, {"f": {"x": schema}}) == [ToolCall("f", {"x": value})]


PIECES = [text[i:j] for text in SEVERAL.values() for i, j in ((0, 30), (10, 25), (0, -9), (-40, None), (-12, None))]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(PIECES) | TEXT, max_size=6).map("".join))
def test_any_text_gives_calls_or_none_or_an_error(words: str) -> None:
    for form in FORMATS.values():
        for call in form.parse_turn(words, TYPES):
            assert bool(call.error) != bool(call.name)
            json.dumps(call.arguments)


def test_parsing_long_text_is_fast() -> None:
    """Parsing must not take quadratic time."""
    import time

    start = time.process_time()
    for piece in (
        "<tool_call>",
        "[",
        '{"name":',
        " ",
        "<call>",
        "<parameter=x>",
        "<arg_key>",
        "-",
        '<|"|>',
        "((",
        ",a:",
    ):
        for opening in (
            "",
            "<tool_call><function=f>",
            "<tool_call>f",
            "<|tool_call_start|>",
            "<|tool_call>call:f{",
            "{",
        ):
            words = opening + piece * (4000 // len(piece))
            for form in FORMATS.values():
                form.parse_turn(words + "</tool_call><|tool_call_end|><tool_call|></call>")
    assert time.process_time() - start < 5


# ---- the plain format ---------------------------------------------------------------------------------------


def test_the_plain_format_is_explained_in_the_prompt() -> None:
    tokenizer = chat_tokenizer("cohere")
    chat = ToolChat(tokenizer, TOOLS)
    text = tokenizer.decode(chat.render_prompt([{"role": "user", "content": "Begin."}]))
    assert chat.format is PLAIN and chat.has_system_role
    assert (
        "- find_known(words: string (words), most?: integer (count), deep?: object (more)): A known function." in text
    )
    assert '<call>find_known {"words": "…"}</call>' in text
    assert text.index("find_known") < text.index("<|USER_TOKEN|>Begin.")
    assert PLAIN.parse_turn(text.partition("end your turn:")[2]) == [ToolCall("find_known", {"words": "…"})]
    own = tokenizer.decode(
        chat.render_prompt([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi."}])
    )
    assert "<|SYSTEM_TOKEN|>Be kind.\n\nYou can call" in own


def test_the_documents_show_the_formats_and_the_instruction() -> None:
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    assert tool_instruction(schemas_of([calculator])) in text
    table = text.partition("| format |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == list(FORMATS)
    for name, call, *_ in rows:
        form, written = FORMATS[name.strip("| `")], call.split("`")[1].replace("\\|", "|")
        if form.name != "deepseek":  # its line breaks do not fit into a table
            assert form.parse_turn(written) == [ToolCall("add", {"a": 1})]


def test_a_template_without_a_system_message_has_it_above_the_question() -> None:
    tokenizer = chat_tokenizer("gemma")
    chat = ToolChat(tokenizer, TOOLS, stop_ids("gemma", tokenizer))
    text = tokenizer.decode(chat.render_prompt([{"role": "user", "content": "Begin."}]))
    assert (
        not chat.has_system_role
        and "<start_of_turn>user\nYou can call" in text
        and "answer.\n\nBegin.<end_of_turn>" in text
    )


def test_tools_are_explained_once() -> None:
    tokenizer = chat_tokenizer("lfm2")  # it shows tools, and no calls
    text = tokenizer.decode(ToolChat(tokenizer, TOOLS).render_prompt([{"role": "user", "content": "Begin."}]))
    assert "You can call these functions" in text and "List of tools" not in text


def test_a_template_with_tools_of_its_own_gets_no_instruction() -> None:
    tokenizer = chat_tokenizer("qwen3")
    chat = ToolChat(tokenizer, TOOLS)
    text = tokenizer.decode(chat.render_prompt([{"role": "user", "content": "Begin."}]))
    assert chat.format.name == "hermes" and "<tools>" in text and "<call>" not in text


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "mistral", "gptoss", "lfm2_v2", "cohere"])
def test_a_turn_of_tokens_is_read_and_answered(name: str) -> None:
    """Check the way from the tokens of a turn to the tokens of the results, for each template."""
    tokenizer = chat_tokenizer(name)
    chat = ToolChat(tokenizer, schemas_of([calculator]), stop_ids(name, tokenizer))
    call = ToolCall("calculator", {"expression": "6 * 7"})
    text = tool_chat._render_calls(tokenizer, [call]) if chat.format is not PLAIN else None
    text = text or '<call>calculator {"expression": "6 * 7"}</call><|END_OF_TURN_TOKEN|>'
    turn = tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]
    step = Tools([calculator], schemas_of([calculator]), chat.format.name).step(chat.decode_turn(turn))
    answer = tokenizer.decode(chat.template.render_observation(turn, step.observation))
    assert "42" in answer and "error" not in answer
    assert not answer.startswith(chat.decode_turn(turn[-1:]))


def test_models_that_cannot_talk_with_tools_are_refused() -> None:
    tokenizer = chat_tokenizer.__wrapped__("qwen3")
    with pytest.raises(ConfigError, match="no tools"):
        choose_format(tokenizer, [])
    tokenizer.chat_template = "{{ messages[0].content }}<|im_end|>"
    with pytest.raises(ConfigError, match="neither tools nor a second message"):
        choose_format(tokenizer, TOOLS)
