"""README, docs, lessons and CONTRIBUTING name only what exists: files, links, modules and names."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LESSONS = sorted((ROOT / "lessons").glob("*.md"))
FILE = re.compile(r"`((?:ascent|benchmarks|tests|lessons|docs)/[\w./-]+|tools/[\w-]+\.\w+)`")  # tools/calls is a metric
LINK = re.compile(r"\]\((?!https?:|figure:|lesson:|#)([^)#\s]+)(?:#[\w-]+)?\)")


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def missing_files(text: str) -> list[str]:
    return [name for name in FILE.findall(text) if not re.search("NAME|NN", name) and not (ROOT / name).exists()]


@pytest.mark.parametrize("path", PAGES, ids=by_name)
def test_every_file_that_a_page_names_exists(path: Path) -> None:
    assert missing_files(path.read_text()) == []


def test_a_missing_file_is_found() -> None:
    assert missing_files("`ascent/nowhere.py` and `ascent/core/loop.py`") == ["ascent/nowhere.py"]


@pytest.mark.parametrize("path", [*PAGES, *LESSONS], ids=by_name)
def test_every_link_between_pages_leads_somewhere(path: Path) -> None:
    assert [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()] == []


def imported(page: str) -> list[tuple[str, str]]:
    """(module, name) of every import of Ascent in a page's Python blocks."""
    names = []
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ascent":
                names += [(node.module or "", alias.name) for alias in node.names]
    return names


def exists(module: str, name: str) -> bool:
    return find_spec(module) is not None and (
        hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None
    )


@pytest.mark.parametrize("path", [*PAGES, *LESSONS], ids=by_name)
def test_every_name_that_a_page_imports_exists(path: Path) -> None:
    assert [(module, name) for module, name in imported(path.read_text()) if not exists(module, name)] == []


def test_a_name_that_is_not_there_is_found() -> None:
    page = "```python\nfrom ascent import Advantage, Nothing\n```\n"
    assert [exists(*pair) for pair in imported(page)] == [True, False]
