"""The lessons run: every Python block, every command, every printed table, and every number that their text quotes."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascent.lab.figures import all_figures
from ascent.lab.pages.lesson.page import read_lesson, render

FIGURES = all_figures()
LESSONS = Path(__file__).parents[1] / "lessons"
spec = importlib.util.spec_from_file_location("lessons_run", LESSONS / "run.py")
assert spec is not None and spec.loader is not None
lessons_run = sys.modules["lessons_run"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lessons_run)
PAGES, blocks, run_page = lessons_run.PAGES, lessons_run.blocks, lessons_run.run_page


@pytest.mark.smoke
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom in one namespace and one folder, as a reader would; what is printed is what is shown."""
    run_page(path, tmp_path)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("```python\nassert 0.119 == 0.12\n```\n", None),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "the code prints"),
        ("```python\nprint('| 1 |')\n```\n\n| 2 |\n", "the code prints"),
        ("```python\nprint(1)\n```\n\nWords.\n", "the code prints"),
        ("```console\nascent explain nothing\n```\n", "this command failed"),
        ("```console\nls\n```\n", "this command failed"),
        ("```console\nascent explain raw\n```\n\n```text\nδ = 2 R\n```\n", "does not print"),
    ],
)
def test_a_wrong_page_is_found(tmp_path: Path, page: str, why: str | None) -> None:
    path = tmp_path / "00-wrong.md"
    path.write_text(page)
    with pytest.raises(AssertionError, match=why):
        run_page(path, tmp_path)


# ---- every number in the text --------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])[-−+]?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w]|\.\d)")
YEAR = re.compile(r"(19|20)\d\d")


def plain(number: str) -> str:
    return number.replace("−", "-").lstrip("+-")


def quoted(page: str) -> Iterator[str]:
    """Numbers that the prose states: all decimals, and whole numbers from 10 on."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL)
    for block in re.finditer(
        r"^```(?:python|console).*?^```$(\n\n\|[^\n]*(?:\n\|[^\n]*)*)?", text, re.MULTILINE | re.DOTALL
    ):
        text = text.replace(block[0], "")
    text = re.sub(r"^```math\n(.*?)^```$", r"\1", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for number in map(plain, NUMBER.findall(text)):
        if ("." in number or "e" in number or len(number) > 1) and not YEAR.fullmatch(number):
            yield number


def checked(page: str) -> set[str]:
    """Numbers in the code that runs (its literals, strings among them), in its commands and in what it prints."""
    found = set()
    for block in blocks(page):
        found |= set(map(plain, NUMBER.findall(block.shown)))
        if block.kind == "console":
            found |= set(map(plain, NUMBER.findall(block.text)))
        elif block.kind == "python":
            for node in ast.walk(ast.parse(block.text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= set(map(plain, NUMBER.findall(node.value)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
                    found |= {repr(node.value), f"{node.value:g}"}
    return found


def unchecked(page: str) -> list[str]:
    known = checked(page)
    return [number for number in quoted(page) if number not in known and f"{float(number):g}" not in known]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_number_in_the_text_is_in_code_that_runs(path: Path) -> None:
    assert unchecked(path.read_text()) == []


def test_a_number_from_nowhere_is_found() -> None:
    page = "It is 0.119, not 0.2, of 125.\n\n```python\nassert f'{x:.3f}' == '0.119'\n```\n"
    assert unchecked(page) == ["0.2", "125"]


# ---- beside the figures --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_lab_can_show_it(path: Path) -> None:
    """Every bound number is one that the figure says, every link one that it can follow, and a prediction is there."""
    lesson = read_lesson(path)
    said = FIGURES[lesson.figure].look(lesson.state)["texts"] if lesson.figure else {}
    shown = render(lesson, said, [read_lesson(page).slug for page in PAGES])
    assert 'class="predict"' in shown and "{{" not in shown
    if lesson.figure:
        assert "data-set=" in shown[shown.index('class="predict"') :], "its prediction is answered by the figure"
    else:
        assert re.search(r"```(python|console)\n", lesson.text[lesson.text.index("**Predict.**") :]), "or by a command"


def test_every_figure_has_a_lesson() -> None:
    assert {read_lesson(path).figure for path in PAGES} - {None} == set(FIGURES)


@pytest.mark.parametrize(
    ("figure", "state", "said"),
    [
        ("baselines", "b1=0&b2=0", {"std": "5.323", "expected1": "0.50", "expected2": "−0.50"}),
        ("baselines", "b1=10&b2=1", {"std": "1.155", "expected1": "0.50", "expected2": "−0.50"}),
        ("baselines", "b1=0&b2=0", {"variance_state1": "25.00", "variance_state2": "0.25"}),
        ("baselines", "b1=10&b2=1", {"variance_state1": "0.00", "variance_state2": "0.00"}),
        ("baselines", "b1=20&b2=-9", {"expected1": "0.50", "expected2": "−0.50"}),
        ("clip", "A=0.5&ratio=1.35", {"unclipped": "0.675", "objective": "0.600", "gradient": "0.000"}),
        ("clip", "A=-0.5&ratio=0.65", {"unclipped": "−0.325", "objective": "−0.400", "gradient": "0.000"}),
        ("clip", "A=0.5&ratio=0.65", {"gradient": "0.325"}),
        ("clip", "A=-0.5&ratio=1.35", {"gradient": "−0.675"}),
        ("trajectory", "step=4&advantage=raw", {"advantages": "2.00, 2.00, 2.00, 2.00"}),
        ("trajectory", "step=4&advantage=gae&lam=0", {"value0": "3.65", "advantages": "0.11, 0.13, −0.98, −0.90"}),
        ("variance", "samples=2&baseline=leave-one-out", {"scale": "1.000", "cosine": "1.000"}),
        ("variance", "samples=2&baseline=centered", {"scale": "0.500", "cosine": "1.000"}),
        ("variance", "samples=2&rewarded=1&baseline=raw", {"bias": "0.000", "variance": "15.38"}),
        ("variance", "samples=2&rewarded=1&baseline=leave-one-out", {"bias": "0.000", "variance": "28.16"}),
    ],
)
def test_the_figure_says_what_the_lesson_promises(figure: str, state: str, said: dict[str, str]) -> None:
    found = FIGURES[figure].look(state)["texts"]
    assert {key: found[key] for key in said} == said


# ---- the index ------------------------------------------------------------------------------------------


def test_the_index_has_every_page_in_order_with_its_title() -> None:
    index = (LESSONS / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| \[(.+?)\]\((.+?)\) \| (\w*) ?\| (\d+) \|$", index, re.MULTILINE)
    expected = []
    for i, path in enumerate(PAGES):
        lesson = read_lesson(path)
        expected.append((str(i + 1), lesson.title, path.name, lesson.figure or ""))
    assert [row[:4] for row in rows] == expected


@pytest.mark.parametrize("path", [*PAGES, LESSONS / "README.md"], ids=lambda path: path.stem)
def test_pages_are_short(path: Path) -> None:
    lines = path.read_text().splitlines()
    prose = [line for line in lines if not line.startswith(("|", "ascent "))]
    assert len(lines) <= 175 and max(map(len, prose)) <= 130
