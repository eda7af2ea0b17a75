"""Answers that are compared as mathematics, and the letters of a multiple choice."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ascent.core.errors import ConfigError
from ascent.explain.explain import explanation
from ascent.rewards.reward_manager import self_test
from ascent.rewards.tokenized_task import TokenizedTask
from ascent.tasks import Jsonl
from ascent.tasks.text.answer_checking import (
    CHECKS,
    MARKS,
    check_choice,
    check_math,
    check_number,
    chosen_option,
    with_decimal_point,
)
from tests.tasks.test_text_tasks import Bytes

# ---- an answer that is identical to its gold ----------------------------------------------------------------

ANY = st.text() | st.text(alphabet="0123456789.,:/()[]{}%$-−+*^=x \\frac\n", max_size=12)


@pytest.mark.long
@given(ANY)
def test_an_answer_identical_to_its_gold_is_right(text: str) -> None:
    assume(text.strip())
    assert check_math(text, text)[:2] == (True, True)
    assert check_math(text, f"  {text}\n")[:2] == (True, True)


@given(ANY)
def test_a_marked_answer_identical_to_its_gold_is_right(text: str) -> None:
    assume("".join(text.split()).strip("*$.") and not MARKS.search(f" {text}"))
    assume(text.strip() == " ".join(text.split()))  # other spacing may be cut by the mark
    assert check_math(text, f"So it is.\nAnswer: {text}")[:2] == (True, True)


def test_an_empty_gold_stays_an_error() -> None:
    for empty in ("", "  \n"):
        with pytest.raises(ValueError, match="cannot read the right answer"):
            check_math(empty, empty)


RIGHT = [
    *[(same, same) for same in ("12:00", "3:0", "1/0", "0/0", "hello world", "(", "1e5")],
    *[("12:00", r"\boxed{12:00}"), ("1/0", "Answer: 1/0"), ("$12:00$", "12:00"), (r"\boxed{12:00}", "12:00")],
    *[("1,22", "1.22"), ("1.22", "1,22"), ("1,22", "1, 22"), ("0,5", "5, 0"), ("0,5", r"\frac{1}{2}")],
    *[("1/8", "0,125"), ("1234.567", "1234,567"), ("1.234,5", "1234.5"), ("1,234.5", "1.234,5"), ("1{,}22", "1.22")],
    *[("1,000", "1000"), ("1000", "1,000"), ("12,345", "12345"), ("10,000,000", "10000000"), ("1.000", "1")],
    *[("1, 2", "2, 1"), ("(1, 2)", "(1,2)"), (r"\left(1,2\right)", "(1, 2)"), ("[1,2]", "[1, 2]"), ("{1,2}", "2,1")],
    *[("-1,5", "−1.5"), ("−3", "-3"), ("12,5%", "12.5%"), ("50%", r"50\%"), ("50%", "0.5"), ("7", "7.")],
    *[("$50", "50"), ("50", r"\$50"), ("$1,50", "1.5"), ("€1,50", "€1.50"), ("1,22 m", r"\boxed{1.22\text{ m}}")],
    *[("5 cm", r"\boxed{5\text{ cm}}"), (r"1,22\text{ m}", "Answer: 1.22 m"), ("3:4", "6:8")],
    *[(r"\frac12", "0.5"), (r"\dfrac{1}{2}", "1/2"), (r"3\frac{1}{2}", "3.5"), ("x=3", "x = 3"), ("x^2", "x^{2}")],
]
WRONG = [
    *[("12:00", "13:00"), ("12:00", "12"), ("3:0", "4:0"), ("1/0", "2/0"), ("1/0", "0/0"), ("1/0", r"\infty")],
    *[("1,22", "1.23"), ("1,22", "122"), ("1,22", "22"), ("1,22", "1"), ("1, 22", "1.22"), ("(1,22)", "1.22")],
    *[("1,000", "1"), ("1,000", "1.000"), ("1.000", "1000"), ("12,345", "12.345"), ("0,125", "125")],
    *[("1.234,5", "1.2345"), ("1,2,3", "1.23"), ("{1,2}", "1.2"), ("(1, 2)", "1.2"), ("5", "5, 6")],
    *[("(1,2)", "[1,2]"), ("(1,2)", "(2,1)"), ("50%", "50.1%"), ("1/2", "1/3"), ("-3", "3"), ("x", "y")],
    *[("12", "1 2"), ("7", ""), ("7", "."), ("7", "$"), ("12:00", "")],
]


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_math_takes_a_right_answer(gold: str, response: str) -> None:
    assert check_math(gold, response)[:2] == (True, True)


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_math_refuses_a_wrong_answer(gold: str, response: str) -> None:
    assert check_math(gold, response)[:2] == (False, False)


def test_math_finds_an_answer_in_free_text_that_has_no_value() -> None:
    assert check_math("12:00", "I think the answer is 12:00.")[:2] == (False, True)
    assert check_math("12:00", "I think the answer is 13:00.")[:2] == (False, False)
    assert check_math("1.22", "It is 1,22 m")[:2] == (False, True)


@given(st.integers(0, 10**6), st.text("0123456789", min_size=1, max_size=6))
def test_a_decimal_comma_is_no_separator_of_thousands(whole: int, decimals: str) -> None:
    thousands = 1 <= whole <= 999 and len(decimals) == 3
    assert with_decimal_point(f"{whole},{decimals}") == (None if thousands else f"{whole}.{decimals}")
    for other in (
        f"({whole},{decimals})",
        f"{whole}, {decimals}",
        f"{whole},{decimals},{decimals}",
        f"{whole}.{decimals}",
    ):
        assert with_decimal_point(other) is None


def test_a_gold_number_with_a_decimal_comma_is_not_its_decimals() -> None:
    assert check_number("1,22", "Answer: 1.22")[0] and check_number("1.22", "Answer: 1,22")[0]
    assert check_number("1,22", "Answer: 22")[:2] == (False, False)
    assert check_number("1,220", "Answer: 1220")[0]


# ---- multiple choice ------------------------------------------------------------------------------------------

STRICT = (
    *("B", "b", "(b)", "(B)", "[B]", "**B**", "B)", "B.", "Answer: B", "**Answer:** (b)", r"\boxed{B}", "Option B"),
    *(
        r"$\boxed{\text{(B)}}$",
        "#### B",
        "<answer>b</answer>",
        "Let me think.\nB",
        "The answer is B.",
        "answer is: (b)",
    ),
    *("So the correct answer is **(B)**.", "Answer: C\nAnswer: B", "The answer is A. No, the answer is B"),
)
LENIENT = (
    *(
        "The answer is B. There is only one.",
        "The answer is B because it is.",
        "B. Paris",
        "B) Paris",
        "(b) Paris it is",
    ),
    *("Answer: B) Paris", "I choose B", "It must be (b).", "The correct option is (B), as A is wrong", "B\n\nIt is."),
)
OTHER = (
    *("", "A", "Answer: A", "Banana", "AB", "the answer is basic", "Bob's", "B's", "B-flat", "The answer is not B"),
    *("The answer is A. B is wrong", "Answer: B\nAnswer: C", "Answer: A, B, C or D", "A B C D", "vitamin b"),
)


@pytest.mark.parametrize("response", [*STRICT, *LENIENT, *OTHER])
def test_a_multiple_choice_is_read_by_its_letter(response: str) -> None:
    expected = (response in STRICT, response in STRICT + LENIENT)
    assert check_choice("B", response)[:2] == expected
    assert check_choice("(b)", response)[:2] == check_choice("B) Paris", response)[:2] == expected


@pytest.mark.parametrize("response", ["A good answer is hard to find", "A man walks", "The answer is a good one", "I"])
def test_an_article_is_no_option(response: str) -> None:
    assert check_choice("A", response)[:2] == (False, False)


def test_option_a_is_read_where_it_is_no_article() -> None:
    assert check_choice("A", "The answer is A")[0] and check_choice("A", "a")[0]
    assert check_choice("A", "The answer is A because it is.")[:2] == (False, True)


@given(st.text())
def test_any_text_chooses_one_option_or_none(text: str) -> None:
    letter = chosen_option(text)
    assert letter is None or (letter.isascii() and letter.isupper() and len(letter) == 1)
    assert sum(check_choice(chr(gold), text)[1] for gold in range(ord("A"), ord("Z") + 1)) == (letter is not None)


HOSTILE = ["answer" + " " * 30_000, "answer is " * 3_000, "a" + " " * 30_000 + "x", "(" * 30_000, r"\text{" * 6_000]


@pytest.mark.parametrize("check", ["exact", "number", "choice"])
def test_hostile_text_is_read_in_time(check: str) -> None:
    started = time.thread_time()
    for text in HOSTILE:
        CHECKS[check]("B", text)
    assert with_decimal_point("1" * 30_000 + "," + "2" * 30_000)
    assert time.thread_time() - started < 2


def choices(folder: Path, *answers: object) -> Jsonl:
    rows = [json.dumps({"prompt": f"Question {i}", "answer": answer}) for i, answer in enumerate(answers)]
    (folder / "choices.jsonl").write_text("\n".join(rows))
    return Jsonl(source=str(folder / "choices.jsonl"), check="choice")


def test_a_file_of_multiple_choices_is_graded_and_tests_itself(tmp_path: Path) -> None:
    task = choices(tmp_path, *["B"] * 12)
    report = self_test(task, 4)
    assert report.ok and report.gold_passed == report.gold == 4
    assert report.corrupted == 8, "nothing, and the next letter"
    assert task.grade(task.train(0), "The answer is B. There is only one.")[:3] == (0.5, False, True)
    bound = TokenizedTask(task, Bytes())
    assert (
        bound.normalize_answer("The answer is B. There is only one.", "B") == bound.normalize_answer("(b)", "B") == "b"
    )


@pytest.mark.parametrize("answer", ["Paris", 2, "A good one", "A or B"])
def test_a_choice_that_is_no_letter_is_refused_with_its_line(answer: object, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"line 2, column answer: --check choice expects the letter of an option, such as B"
    ):
        choices(tmp_path, "B", answer, "C").verify()


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_is_explained(name: str) -> None:
    page = explanation(name)
    assert f"{name}: a check of answers" in page and f"--check {name}" in page
