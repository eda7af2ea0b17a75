"""Answers to reasoning-gym that are code: data sets that evaluate answers never run them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascent.core.errors import ConfigError
from ascent.tasks.text.reasoning_gym import ReasoningGym, is_plain_expression

factory = pytest.importorskip("reasoning_gym.factory")

EVALUATING = sorted(
    name
    for name, (cls, _) in factory.DATASETS.items()
    if any(word in inspect.getsource(sys.modules[cls.__module__]) for word in ("eval(", "parse_expr(", "exec("))
)
CODE = (
    "__import__('pathlib').Path({path!r}).touch()",
    "[__import__('pathlib').Path({path!r}).touch()]",
    "['a', open({path!r}, 'w')]",
    "sqrt({code!r})",
    "sin({code!r}) + 1",
    "S({code!r})",
    "[f({code!r}) for f in [eval]]",
    "(lambda: open({path!r}, 'w'))()",
    "[exp := eval, exp({code!r})]",
    "Symbol('x').func.__globals__",
    "__import__('os').system('touch {path}')!",
    "1 + __import__('os').system('touch {path}')",
    "\t[__import__('os').system('touch {path}')]",
)


def test_data_sets_that_evaluate_answers_are_known() -> None:
    assert {"countdown", "puzzle24", "n_queens", "spiral_matrix", "simple_integration"} <= set(EVALUATING)


def test_a_composite_of_data_sets_cannot_be_made_from_options() -> None:
    """It forwards answers to its parts, whose modules are not looked at."""
    task = ReasoningGym(source="composite", options='{"datasets": [{"name": "countdown", "weight": 1, "config": {}}]}')
    with pytest.raises(ConfigError, match="reasoning-gym:composite cannot be made"):
        task.verify()


@pytest.mark.parametrize("name", EVALUATING)
def test_code_in_an_answer_does_not_run_and_right_answers_keep_their_score(name: str, tmp_path: Path) -> None:
    task = ReasoningGym(source=name)
    mark = tmp_path / "ran"
    for index in range(6):
        problem = task.make(index)
        gold = task.gold(problem)
        if gold is not None:
            assert task.grade(problem, gold)[0] == 1.0, (name, gold)
    code = f"open({str(mark)!r}, 'w')"
    for text in CODE:
        answer = text.format(path=str(mark), code=code)
        for response in (f"Answer: {answer}", answer):
            assert task.grade(problem, response)[0] < 1
        assert not mark.exists(), (name, answer)


@given(st.recursive(st.integers(-99, 99).map(str), lambda part: st.tuples(part, st.sampled_from("+-*/"), part).map(
    lambda three: f"({three[0]} {three[1]} {three[2]})")))  # fmt: skip
def test_arithmetic_is_plain(expression: str) -> None:
    assert is_plain_expression(expression, parsed=True)
    assert is_plain_expression(f"[{expression}, {expression}]", parsed=False)
    assert not is_plain_expression(f"f({expression})", parsed=False)
    assert not is_plain_expression(f"({expression}).real", parsed=True)


def test_text_is_plain_only_where_nothing_is_called() -> None:
    assert is_plain_expression("['A', 'B']", parsed=False)
    assert not is_plain_expression("['A', 'B']", parsed=True)
    assert not is_plain_expression("['A', sqrt(2)]", parsed=False)
    assert is_plain_expression("sqrt(2) + 3*x**2", parsed=True)
    assert is_plain_expression("_ Q _\nQ _ _", parsed=False)
    assert not is_plain_expression("5!", parsed=True)
