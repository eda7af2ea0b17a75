"""Formulas are written once, in LaTeX: a terminal prints Unicode, the lab shows MathML, GitHub renders the source."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from ascent.core.algorithms import ALGORITHMS, MENU
from ascent.core.errors import ConfigError
from ascent.core.menu import name_of
from ascent.explain.about import fill, fill_in
from ascent.explain.choices import ABOUT_ESTIMATORS, ABOUTS
from ascent.explain.explain import formula, latex, meanings
from ascent.explain.latex import INLINE, unicode_in, unicode_of
from ascent.lab.figures import all_figures
from ascent.lab.mathml import mathml
from ascent.lab.pages.lesson.page import Lesson, read_lesson, render

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "formulas.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "lessons").glob("*.md"))]
MATH = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def written() -> dict[str, list[str]]:
    """Every formula of `explain`, in LaTeX: rows, choices at their defaults, estimators; what their symbols mean."""
    found = {f"algorithm {name}": [*latex(row), *meanings(row)] for name, row in ALGORITHMS.items()}
    for axis, menu in MENU.items():
        for cls in menu:
            about = fill_in(ABOUTS[cls], cls())
            texts = (about.formula, about.response_formula, about.definitions, *str(about.statistics).splitlines())
            found[f"{axis} {name_of(cls)}"] = [str(text) for text in texts if text]
    return found | {f"estimator {name}": [known.formula] for name, known in ABOUT_ESTIMATORS.items()}


def printed(text: str) -> str:
    """A text with dollars, or a formula without."""
    return unicode_in(text) if "$" in text else unicode_of(text)


def prose(path: Path) -> str:
    """A page without its code and its blocks of mathematics."""
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL))


def formulas(path: Path) -> list[str]:
    """Every formula of a page, within its text and in blocks of its own."""
    return [*INLINE.findall(prose(path)), *MATH.findall(path.read_text())]


def left_over(made: str) -> list[str]:
    """Parts of LaTeX that a conversion did not understand."""
    made = re.sub(r"<mo[^>]*>[\^ˆ]</mo>", "", made)  # a hat
    return re.findall(r"\\\w*|[{}$&^](?!\w*#?\w*;)", re.sub(r"\{\{\w+\}\}", "", made))


def test_the_terminal_prints_every_formula_as_it_always_has() -> None:
    """tests/data/formulas.json is what `ascent explain` printed before its formulas were LaTeX."""
    now = {name: [printed(text) for text in texts] for name, texts in written().items()}
    assert now == json.loads(GOLDEN.read_text())
    assert not [text for texts in now.values() for text in texts if re.search(r"[\\{}$]", text)]
    assert formula(ALGORITHMS["grpo"]).splitlines() == now["algorithm grpo"][: len(latex(ALGORITHMS["grpo"]))]


def test_every_formula_of_a_choice_becomes_mathml() -> None:
    for name, texts in written().items():
        for text in texts:
            for one in INLINE.findall(text) if "$" in text else [text]:
                assert not left_over(mathml(one, block=True)), (name, one)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_formula_of_a_page_becomes_mathml_and_is_untouched_by_markdown(path: Path) -> None:
    """Plain Markdown must not read emphasis or an escape into a formula: GitHub starts from that."""
    found = formulas(path)
    for one in found:
        assert not left_over(mathml(one.strip(), block="\n" in one)), one
    text = prose(path)
    assert text.count("$") == 2 * len(INLINE.findall(text)), "a dollar without its other"
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    inline = [token for token in parser.parse(text) if token.type == "inline"]
    seen = "\n".join("".join(child.content or "\n" for child in token.children or ()) for token in inline)
    assert [one for one in INLINE.findall(text) if f"${one}$" not in seen] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_mathematics_is_not_written_as_letters(path: Path) -> None:
    """No line of a page is a formula in an indented block, or one in Unicode; printed tables say what was printed."""
    text = re.sub(r"<!-- menu.*end of the menu -->", "", prose(path), flags=re.DOTALL)
    if path.parent.name == "lessons":
        lines = [line for line in text.splitlines() if not line.startswith("|")]
        assert not re.findall(r"^    .*[=Σ].*$|.*[Σ∇πρλγβσ‖²½].*", "\n".join(lines), re.MULTILINE)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (r"\frac{R_i - \text{mean}}{\text{std} + 1e-08}", "(R_i − mean) / (std + 1e-08)"),
        (r"\frac{1}{N\cdot{L_{\max}}}", "1/(N·L_max)"),
        (r"\frac{1}{2} x^2 + e^{-x} + y^{a+1}_{j\ge0}", "½ x² + e^−x + y^(a+1)_(j≥0)"),
        (r"\text{a-b and logp\_old}_t \le -1", "a-b and logp_old_t ≤ −1"),
        ("R_i − mean, with 3·x_max", "R_i − mean, with 3·x_max"),  # somebody's own About, in Unicode
        (r"\unknown{x} and an open {brace", r"\unknownx and an open brace"),
        ("", ""),
    ],
)
def test_the_printer(source: str, shown: str) -> None:
    assert unicode_of(source) == shown


def test_fields_are_filled_in_between_the_braces_of_latex() -> None:
    facts = {"eps": 1e-4, "k": 3, "name": "Own"}
    assert fill(r"\frac{R}{\text{std} + {eps:g}} \sum_{j<{k}}", facts) == r"\frac{R}{\text{std} + 0.0001} \sum_{j<3}"
    assert fill(r"\text{{name}}(R) {other} {eps:.0e}", facts) == r"\text{Own}(R) {other} 1e-04"


# ── in the lab ──────────────────────────────────────────────────────────────────────────────────


def shown(text: str, said: dict[str, str]) -> str:
    return render(Lesson("a", "A", "clip", "", text), said, ["a"])


def test_a_live_number_in_a_formula_follows_the_figure() -> None:
    made = shown("At $\\rho = {{ratio}}$ and\n\n```math\nx = {{A}}\n```\n", {"ratio": "1.35", "A": "<0.5>"})
    assert '<mtext><output class="bound" data-bind="ratio">1.35</output></mtext>' in made
    assert 'data-bind="A">&lt;0.5&gt;</output></mtext></mrow></math></div>' in made
    lesson = read_lesson(ROOT / "lessons" / "09-trust-region.md")
    page = render(lesson, all_figures()["clip"].look("A=0.5&ratio=1.35")["texts"], ["which-method", "one-walk", "kl"])
    assert '<mo>=</mo><mtext><output class="bound" data-bind="ratio">1.35<' in page.replace("&#x0003D;", "=")


@pytest.mark.parametrize(
    "text",
    [
        r"$\text{<img src=x onerror=alert(1)>}$",
        r"$<script>alert(1)</script>$",
        "```math\n\\text{</math><script>alert(1)</script>}\n```",
        r"$\href{javascript:alert(1)}{x}$",
        r"$\style{background:url(//evil.example)}{x}$",
    ],
)
def test_a_formula_cannot_bring_markup(text: str) -> None:
    made = shown(text, {})
    tags = set(re.findall(r"<\s*/?\s*([a-zA-Z]+)", made))
    assert tags <= {"p", "div", "math", "mrow", "mtext", "mi", "mo", "mn", "mspace", "mstyle", "mpadded"}, made
    assert not re.search(r"<[^>]*(href|style|onerror)=", made)


@pytest.mark.parametrize("text", ["It costs $5, or 6.", "`$x$` is code", "$$", "$", "$ $", "a $ b $ c"])
def test_a_dollar_that_is_no_formula_stays_a_dollar(text: str) -> None:
    assert "<math" not in shown(text, {}) and "$" in shown(text, {})


def test_a_formula_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match="the formula 'a_b_c' cannot be read"):
        shown("x $a_b_c$ y", {})
