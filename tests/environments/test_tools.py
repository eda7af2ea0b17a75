"""Tools: schemas of functions, execution of calls, and error messages for the model."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascent.core.errors import ConfigError
from ascent.environments.calculator import calculator
from ascent.environments.tool_call_formats import FORMATS
from ascent.environments.tools import Tools, check_arguments, load_tool, parse_tool_counts, schema_of, schemas_of
from ascent.tasks.text.text_task import Problem
from ascent.tasks.tool_sources import tool_sources


def search(words: str, most: int = 3, order: Literal["new", "old"] = "new") -> list[str]:
    """Finds pages.

    It looks everywhere.

    Args:
        words: What to look for.
        most: How many pages
            at most.
        order: Which come first.
    """
    return [f"{words} {order}"] * most


def bare(x, y=2):  # type: ignore[no-untyped-def]
    return x


def fails(kind: str) -> Any:
    """Fails in some way."""
    if kind == "exit":
        sys.exit(3)
    if kind == "circle":
        circle: list[Any] = []
        circle.append(circle)
        return circle
    if kind == "silent":
        raise ValueError
    raise KeyError(kind)


async def slow(x: float) -> float:
    await asyncio.sleep(0)
    return x * 2


FUNCTIONS = (search, bare, fails, slow, calculator)
schemas = cache(lambda: schemas_of(FUNCTIONS))


def tools(form: str = "plain", **more: Any) -> Tools:
    made = Tools(FUNCTIONS, schemas(), form, **more)
    made.begin(Problem("x"), random.Random(0))
    return made


def answer(call: str, **more: Any) -> str:
    (message,) = tools(**more).step(f"<call>{call}</call>").observation
    assert message["role"] == "user"  # type: ignore[index]
    return message["content"]  # type: ignore[index]


def test_a_schema_is_that_of_transformers() -> None:
    from transformers.utils import get_json_schema

    whole = get_json_schema(search)
    del whole["function"]["return"]
    assert schema_of(search) == whole


def test_a_function_without_a_docstring_has_a_schema_of_what_is_there() -> None:
    parameters = {"type": "object", "properties": {"x": {}, "y": {}}, "required": ["x"]}
    assert schema_of(bare)["function"] == {"name": "bare", "description": "bare", "parameters": parameters}
    part = schema_of(partial(search, most=2))["function"]
    assert part["name"] == "search" and part["parameters"]["required"] == ["words"]


def unknown_type(x: Nowhere) -> str:  # type: ignore[name-defined]
    """Takes what is not defined."""
    return x


class Shop:
    def buy(self, what: str) -> str:
        """Buys it."""
        return what


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x, "a named function"),
        (Shop, "a named function"),
        (print, "cannot be given by name"),
        (dict.get, "cannot be given by name|cannot be read"),
        (max, r"--tools max: its signature cannot be read \("),
        (unknown_type, r"--tools unknown_type: its signature cannot be read \(.*Nowhere"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(function: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        schema_of(function)


def test_a_method_is_a_tool_and_two_of_a_name_are_refused() -> None:
    assert list(schema_of(Shop().buy)["function"]["parameters"]["properties"]) == ["what"]
    with pytest.raises(ConfigError, match="two tools have the name search"):
        schemas_of([search, search])


def test_tools_are_named_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(x: int):\n    return x + 1\n\n\ndef g(x: int):\n    return x + 2\n\n\nh = 3\n")
    sources = tool_sources(["calculator", f"python:{file}:f", "g"])
    assert sources == ("calculator", f"python:{file}:f", f"python:{file}:g") == tool_sources([",".join(sources)])
    assert [load_tool(source)(1) for source in sources[1:]] == [2, 3] and load_tool("calculator") is calculator
    for entries, why in ((["calculater"], "Did you mean calculator"), ([""], "a tool is"), (["f"], "a tool is")):
        with pytest.raises(ConfigError, match=why):
            tool_sources(entries)
    with pytest.raises(ConfigError, match="a tool has to be a function, and this is int"):
        load_tool(f"python:{file}:h")


def test_calls_are_run_in_order_and_each_has_a_message() -> None:
    step = tools("hermes").step(
        '<tool_call>{"name": "search", "arguments": {"words": "é", "most": 1}}</tool_call>'
        '<tool_call>{"name": "slow", "arguments": {"x": 4}}</tool_call><|im_end|>'
    )
    assert step.observation == [
        {"role": "tool", "name": "search", "content": '["é new"]'},
        {"role": "tool", "name": "slow", "content": "8"},
    ]
    assert not step.done and step.reward == 0


def test_a_turn_without_a_call_ends_the_episode() -> None:
    step = tools().step("It is 12.")
    assert step.done and step.observation == "" and parse_tool_counts(step.reason) == {}


def test_ids_of_calls_come_back() -> None:
    words = '[TOOL_CALLS] [{"name": "slow", "arguments": {"x": 1}, "id": "abcdefghi"}]'
    assert tools("mistral").step(words).observation[0]["tool_call_id"] == "abcdefghi"  # type: ignore[index]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("search {", "error: this call does not parse: it is not JSON"),
        ("look {}", "look: error: there is no function 'look'. There are: search, bare, fails, slow, calculator"),
        ("search {}", "search: error: the argument words is missing"),
        ('search {"words": "x", "moist": 1}', "there is no argument 'moist'. There are: words, most, order"),
        ('search {"words": 3}', "the argument words has to be string, and 3 is integer"),
        ('search {"words": "x", "most": 2.0}', "the argument most has to be integer, and 2.0 is number"),
        ('search {"words": "x", "most": true}', "the argument most has to be integer, and true is boolean"),
        ('search {"words": "x", "order": "odd"}', 'has to be one of "new", "old", and is "odd"'),
        ('fails {"kind": "exit"}', "fails: error: SystemExit: 3"),
        ('fails {"kind": "key"}', "fails: error: KeyError: 'key'"),
        ('fails {"kind": "silent"}', "fails: error: ValueError"),
        ('fails {"kind": "circle"}', "fails: error: ValueError: Circular reference detected"),
        ('calculator {"expression": "1/0"}', "calculator: error: ZeroDivisionError: division by zero"),
        ('slow {"x": 3}', "slow: 6"),
        ('bare {"x": null}', "bare: null"),
        (f'bare {{"x": {"[" * 900}{"]" * 900}}}', "bare: "),
        (
            'bare {"x": "\\ud800"}',
            "this call does not parse: it has a number that is too large or an unpaired surrogate",
        ),
    ],
)
def test_results_and_errors_as_the_model_reads_them(call: str, said: str) -> None:
    assert said in answer(call)


def test_a_long_result_is_cut_and_says_so() -> None:
    said = answer('search {"words": "xxxxxxxxxx", "most": 1000}', max_result_characters=50)
    assert said.endswith("… (cut: 50 of 18,000 characters)") and len(said) < 120
    assert "… (cut" in answer(f'fails {{"kind": "{"x" * 9000}"}}')


def test_several_results_of_the_plain_format_are_one_message() -> None:
    step = tools().step('<call>slow {"x": 1}</call><call>slow {"x": 2}</call><call>slow {</call>')
    (message,) = step.observation
    assert message["content"].startswith("slow: 2\nslow: 4\nerror: this call does not parse")  # type: ignore[index]


def test_calls_are_counted() -> None:
    episode = tools()
    first = episode.step('<call>slow {"x": 1}</call><call>slow {"x": 1}</call><call>slow {}</call><call>slow {</call>')
    assert parse_tool_counts(first.reason) == {"calls": 4, "unparsed": 1, "failed": 1, "repeated": 1}
    second = episode.step('<call>slow { "x" : 1 }</call>')
    assert parse_tool_counts(second.reason)["repeated"] == 1
    assert dict(episode.counts) == {"calls": 5, "unparsed": 1, "failed": 1, "repeated": 2}
    episode.begin(Problem("x"), random.Random(0))
    assert not episode.counts and parse_tool_counts(episode.step('<call>slow {"x": 1}</call>').reason)["repeated"] == 0
    assert parse_tool_counts("a turn without a call") == {}
    episode.close()


def test_async_tools_share_a_loop_for_the_episode() -> None:
    loops = []

    async def which() -> int:
        loops.append(asyncio.get_running_loop())
        return 1

    episode = Tools([which], schemas_of([which]))
    for _ in range(2):
        episode.step("<call>which</call>")
    assert loops[0] is loops[1]
    episode.close()
    assert loops[0].is_closed()


@pytest.mark.parametrize(
    ("value", "schema", "wrong"),
    [
        ([1, "a"], {"type": "array", "items": {"type": "integer"}}, r"x\[1\] has to be integer"),
        ([1], {"type": "array", "prefixItems": [{"type": "integer"}] * 2}, "has to have 2 entries"),
        ({"a": 1}, {"type": "object", "additionalProperties": {"type": "string"}}, r"x\.a has to be string"),
        (None, {"type": "integer"}, "has to be integer, and null is null"),
        (None, {"type": "integer", "nullable": True}, ""),
        (3, {"type": "number"}, ""),
        (3, {}, ""),
        ("a", {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, ""),
        ([1], {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}, "x"),
    ],
)
def test_arguments_are_held_to_their_schema(value: Any, schema: Any, wrong: str) -> None:
    import re

    said = check_arguments({"x": value}, {"properties": {"x": schema}})
    assert bool(said) == bool(wrong) and re.search(wrong, said)


@settings(max_examples=40, deadline=None)
@given(st.text("1+-*/()e. \"'{}[]<|>,:x漢", max_size=60), st.sampled_from(sorted(FORMATS)))
def test_no_turn_is_an_exception(words: str, form: str) -> None:
    tools(form).step(FORMATS[form].example.replace("add", "calculator").replace("a", words[:9]) + words)


def test_tools_import_neither_torch_nor_transformers() -> None:
    code = "import sys, ascent.environments.tools; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- the calculator -----------------------------------------------------------------------------------------

NUMBERS = st.integers(-(10**12), 10**12)


@settings(max_examples=30, deadline=None)
@given(NUMBERS, NUMBERS, NUMBERS, st.sampled_from("+-*"), st.sampled_from("+-*"))
def test_integers_are_exact(a: int, b: int, c: int, first: str, second: str) -> None:
    text = f"({a} {first} {b}) {second} {c}"
    assert calculator(text) == str(eval(text))


@settings(max_examples=30, deadline=None)
@given(NUMBERS, st.integers(1, 10**6))
def test_quotients_are_right_to_twelve_digits(a: int, b: int) -> None:
    found, exact = Fraction(calculator(f"{a} / {b}")), Fraction(a, b)
    assert abs(found - exact) <= abs(exact) * Fraction(1, 10**11)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(3 + 4) * 12 / 5", "16.8"),
        ("0.1 + 0.2", "0.3"),
        ("5 × 3 − 1 ÷ 2", "14.5"),
        ("2**100", "1267650600228229401496703205376"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("2**-2", "0.25"),
        ("1/3", "0.333333333333"),
        ("-1/3", "-0.333333333333"),
        ("2/3000000", "6.66666666667e-7"),
        ("1/65", "0.0153846153846"),
        ("12345678901234567890/7", "1763668414462081127"),
        ("1/1024", "0.0009765625"),
        ("-1.50", "-1.5"),
        ("1_000 * 2", "2000"),
        ("1e3", "1000"),
        ("(-1)**999999999", "-1"),
        ("0**0", "1"),
    ],
)
def test_the_calculator(text: str, value: str) -> None:
    assert calculator(text) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9**9**9", "more than 1,000 digits"),
        ("2**99999", "the power has more than 1,000 digits"),
        ("10**900 * 10**500", "the numbers have more than 1,000 digits"),
        ("0**-1", "division by zero"),
        ("1 / 0", "division by zero"),
        ("1e999999999", "more than 1,000 digits"),
        ("*".join(["99999999"] * 50) + "**2" * 9, "more than 1,000 digits|at most 500"),
        ("(" * 60 + "1" + ")" * 60 + "+1" * 60, "nested more than 50"),
        ("1" * 501, "the limit is 500"),
        ("2**0.5", "a whole number"),
        ("2^3", "a power is written"),
        ("1,000 + 1", "not a number"),
        ("__import__('os')", "not a number"),
        ("True + 1", "not a number"),
        ("'a' * 9", "not a number"),
        ("1j", "not a number"),
        ("1 if 2 else 3", "not a number"),
        ("3 +", "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("1\x00", "not an arithmetic expression"),
    ],
)
def test_what_the_calculator_does_not_compute(text: str, why: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError), match=why):
        calculator(text)
