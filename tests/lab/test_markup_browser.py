"""No text of a run becomes markup: every string of a run folder is poisoned in turn, and every page is opened.

The text would make an `x-mark` element and an event handler if any page took it for HTML. Which strings are poisoned is
drawn from a seed, so that files whose names and statuses have to stay readable are covered by some of the folders.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ascent
from tests.browser import Lab, Screen, chromium

pytestmark = [pytest.mark.slow, pytest.mark.browser]
MARKUP = (
    """"'></title></script></textarea><x-mark onclick="x" style="width:9px"></x-mark>"""
    '<img src=x onerror="window.hacked=1">'
)
FOLDERS = 5
PAGES = ("/run?id={id}", "/completions?id={id}", "/compare?id={id}&id=plain", "/figure/training?a.run={id}")
FOUND = """() => [
  document.querySelectorAll("x-mark").length, window.hacked ?? null,
  [...document.querySelectorAll("*")].filter((e) => [...e.attributes].some((a) => a.name.startsWith("on"))).length,
  document.documentElement.outerHTML.includes("x-mark") ||
    [...document.querySelectorAll("*")].some((e) => [...e.attributes].some((a) => a.value.includes("x-mark"))),
]"""


class Poison:
    """Appends markup to a share of all strings, keys included, of JSON and Parquet files."""

    def __init__(self, seed: int, share: float):
        self.rng, self.share = random.Random(seed), share

    def of(self, value: Any) -> Any:
        if isinstance(value, str):
            return value + MARKUP if self.rng.random() < self.share else value
        if isinstance(value, list):
            return [self.of(one) for one in value]
        if isinstance(value, dict):
            return {self.key(name): self.of(one) for name, one in value.items()}
        return value

    def key(self, name: str) -> str:
        return name + MARKUP if self.rng.random() < self.share / 10 else name

    def folder(self, run: Path) -> None:
        for path in sorted(run.rglob("*")):
            if path.suffix == ".json" and "checkpoints" not in path.parts:
                path.write_text(json.dumps(self.of(json.loads(path.read_text()))))
            elif path.suffix == ".jsonl":
                lines = [self.of(json.loads(line)) for line in path.read_text().splitlines()]
                path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            elif path.suffix == ".parquet":
                table = pq.read_table(path)
                rows = [{name: self.of(value) for name, value in row.items()} for row in table.to_pylist()]
                pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chromium()
    root = tmp_path_factory.mktemp("markup") / "runs"
    settings = {"length": 3, "numbers": 4, "policy.width": 8, "policy.layers": 1, "policy.heads": 2, "prompts": 3}
    ascent.train("sort", steps=4, record_every=1, eval_prompts=3, show=False, out=root / "plain", **settings)
    alert = {
        "step": 1,
        "event": "alert",
        "name": "entropy_collapse",
        "text": "low",
        "evidence": {"metrics": {"x": [1]}},
    }
    with open(root / "plain" / "events.jsonl", "a") as file:
        file.write(json.dumps(alert) + "\n")
    (root / "plain" / "notes.json").write_text(json.dumps({"text": "mine", "tags": ["a"], "revision": ""}))
    for seed in range(FOLDERS):
        shutil.copytree(root / "plain", root / f"run{seed}")
        Poison(seed, (0.15, 0.3, 0.5, 0.8, 1.0)[seed]).folder(root / f"run{seed}")
    shutil.copytree(root / "plain", root / "run<x-mark onclick=x>")
    return root


@pytest.fixture(scope="module")
def screen(browser: Any, lab: Lab) -> Iterator[Screen]:
    page = browser.new_page()
    yield Screen(page, lab).enter()
    page.close()


def test_no_text_of_a_run_becomes_markup(screen: Screen, runs: Path) -> None:
    shown = 0
    names = [path.name for path in runs.iterdir() if path.is_dir() and path.name not in ("plain", ".lab")]
    assert len(names) == FOLDERS + 1
    for address in ("/runs", *(page.format(id=name) for name in names for page in PAGES)):
        screen.page.goto(screen.lab.base + address)
        screen.page.wait_for_load_state("networkidle")
        elements, hacked, handlers, text = screen.page.evaluate(FOUND)
        assert (elements, hacked, handlers) == (0, None, 0), address
        shown += text
    assert shown >= len(names), "the poisoned text is hardly on any page: this test would notice nothing"


def test_no_text_of_a_run_becomes_markup_in_a_report(browser: Any, runs: Path, tmp_path: Path) -> None:
    from ascent.cli.main import main

    page = browser.new_page()
    shown = 0
    for seed in range(FOLDERS):
        out = tmp_path / f"{seed}.html"
        if main(["report", str(runs / f"run{seed}"), "--out", str(out)]) != 0:
            continue  # a folder that cannot be read any more is refused in one line
        page.goto(out.as_uri())
        elements, hacked, handlers, text = page.evaluate(FOUND)
        assert (elements, hacked, handlers) == (0, None, 0), seed
        shown += text
    page.close()
    assert shown >= 1
