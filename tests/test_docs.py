"""The documentation site: every page is there, no link is broken, all of it is local, and the search works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.core.errors import ConfigError
from tests.browser import chromium, until
from tools import docs

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    docs.write_pages(folder, live=False)
    return folder


@pytest.mark.long
def test_no_link_of_the_documentation_is_broken(pages: Path) -> None:
    assert docs.broken_links(pages) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# One two\n[x](b.md) [y](a.md#one-two) [z](#three) `[code](c.md)` [w](https://w.org/d.md)"
    )
    assert docs.broken_links(tmp_path) == ["a.md: b.md", "a.md: #three"]


@pytest.mark.long
def test_every_name_that_explain_knows_and_every_public_name_has_its_place(pages: Path) -> None:
    index = (pages / "menu" / "index.md").read_text()
    names = [name for names in docs.names_of_the_menu().values() for name, _ in names]
    assert len(names) > 80 and not [
        n for n in names if f"[{n}]({n}.md)" not in index or not (pages / "menu" / f"{n}.md").exists()
    ]
    reference = "\n".join(path.read_text() for path in (pages / "reference").glob("*.md"))
    assert not [
        name for name in ascent.__all__ if not re.search(rf"^::: ascent\.[\w.]+\.{name}$", reference, re.MULTILINE)
    ]


@pytest.mark.long
def test_the_page_of_a_choice_says_what_explain_says(pages: Path) -> None:
    page = (pages / "menu" / "grpo.md").read_text()
    assert "[normalized](normalized.md)(eps=0.0001, ddof=1)" in page and "<mfrac>" in page and "$" not in page
    for text in (
        "Biased even on the policy's own samples",
        'GRPOTrainer is not this by default: loss_type="dapo"',
        "sort --algorithm grpo",
    ):
        assert text in page
    both = (pages / "menu" / "cispo.md").read_text()
    assert "A named algorithm." in both and r"A choice of \--loss." in both
    lesson = (pages / "lessons" / "09-trust-region.md").read_text()
    assert "{{" not in lesson and "figure:" not in lesson and "](12-which-method.md)" in lesson and "<math" in lesson


def test_a_guide_without_a_place_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"docs/new\.md has no place in the documentation: add it to GUIDES"):
        docs._order({"docs/new.md": ""}, [], {}, {})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return docs.build(tmp_path_factory.mktemp("site"), live=False).parent


@pytest.fixture
def screen(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    yield page
    page.close()


@pytest.mark.smoke
@pytest.mark.browser
def test_the_site_builds_strictly_and_its_search_works_as_a_file(site: Path, screen: Any) -> None:
    """Mkdocs ends at a warning. Then the site is opened without a server; whatever it asks for is a file of its own."""
    chromium()
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]* (?:src|href)="?(https?:[^">\s]+)', path.read_text())
        assert not loaded, path
    asked: list[str] = []
    screen.on("request", lambda request: asked.append(request.url))
    for page in ("lessons/05-values", "lessons/06-gae", "docs/runs"):
        screen.goto(f"file://{site}/{page}.html")
        alone = """all => all.filter(e => !e.closest("p, li, td, th, h1, h2, h3, em")).map(e => e.textContent)"""
        assert screen.locator("article math[display=inline]").count() > 5
        assert screen.locator("article math[display=inline]").evaluate_all(alone) == [], "formulas stay in their text"
    screen.goto(f"file://{site}/menu/grpo.html")
    assert screen.locator("math").count() > 5
    screen.click(".md-search__input")
    screen.keyboard.insert_text("leave-one-ou")
    screen.keyboard.press("t")  # every key that is released begins a search
    found = screen.locator(".md-search-result__item")
    until(lambda: found.count() > 3, 20)
    found.first.locator("a").first.click()
    until(lambda: "h=leave" in screen.url or "leave" in screen.title(), 20)
    assert not [url for url in asked if not url.startswith(f"file://{site}/")]
