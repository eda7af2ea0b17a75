"""Everything that the lab, the commands and a notebook show of four recorded runs, and every figure, is pinned."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from starlette.testclient import TestClient

import ascent
from ascent.cli import main as cli
from ascent.lab.figures import all_figures
from ascent.lab.server import application
from ascent.runs.display.notebook import Completions, run_html
from tests.pinned import DATA, difference, page_text, pinned_values, shortened, write_pinned

NAME = "views.json"
RUNS = ("grpo-1", "grpo-3", "ppo", "guess")
TIME = 1_795_000_000
REVISION = r'("revision":"\d+-\d+)-\w+'
FIGURES = all_figures()
QUERIES = (
    "/api/view/runs",
    "/api/view/spark?id=grpo-1&id=ppo&id=guess",
    *(f"/api/view/run?id={run}" for run in RUNS),
    *(f"/api/view/curves?id={run}" for run in RUNS),
    *("/api/view/curves?id=grpo-1&points=2&from=1&to=4", "/api/view/curves?id=grpo-1&id=grpo-3&id=ppo"),
    *(f"/api/view/completions?id={run}" for run in RUNS),
    "/api/view/completions?id=grpo-1&step=2&sort=reward",
    "/api/view/completions?id=guess&set=held-out",
    "/api/view/completions?id=grpo-1&step=0&show=wrong",
    *("/api/view/tokens?id=grpo-1&step=2&group=0", "/api/view/tokens?id=ppo&step=4&group=1"),
    *("/api/view/tokens?id=guess&step=2&group=3", "/api/view/tokens?id=guess&step=3&group=1&set=held-out"),
    *("/api/view/prompts?id=grpo-1", "/api/view/prompts?id=guess"),
    "/api/view/compare?id=grpo-1&id=grpo-3&id=ppo",
    "/api/view/compare?id=grpo-1&id=guess&metric=reward",
    *(f"/api/view/compare.csv?id=grpo-1&id=grpo-3&id=ppo&table={table}" for table in ("finals", "settings", "x")),
    *("/api/runs/grpo-1/responses?step=2", "/api/runs/guess/responses", "/api/view/occupancy?id=guess"),
    *("/api/view/run?id=none", "/api/view/tokens?id=grpo-1&step=1&group=0", "/api/view/curves?id=grpo-1&points=x"),
)
COMMANDS = (
    *(f"show {run}" for run in ("grpo-1", "ppo", "guess")),
    *("show grpo-1 --json", "show grpo-1 --step 2", "show guess --step 2", "show ppo --step 4 --json"),
    *("show grpo-1 --step 1", "report grpo-1", "report guess"),
)
STATES = {
    "trajectory": (
        "",
        "step=4&advantage=gae&lam=0.5&seed=3",
        "step=2&prompt=2&temperature=2",
        "step=3&prompt=5&seed=3",
    ),
    "variance": ("", "baseline=raw&samples=2&rewarded=1", "baseline=optimal-baseline&samples=8", "baseline=greedy"),
    "baselines": ("", "b1=10&b2=1", "b1=20&b2=-9&p=0.8"),
    "clip": ("", "A=-0.5&ratio=0.65", "A=0", "A=-0.5&ratio=1.5", "A=1&low=0.9&high=0.02"),
    "training": ("",),
}


def copied(root: Path) -> Path:
    """The recorded runs in a folder of the test, with the same times."""
    shutil.copytree(DATA / "runs", root)
    for path in root.rglob("*"):
        os.utime(path, (TIME, TIME))
    return root


def steady(text: str, root: Path) -> str:
    """A text without what differs between two runs of the tests: folders, sizes, times, and the state of a file."""
    for pattern, new in (
        (r"\(\d+ kB", "(SIZE"),
        (r"Written [-0-9]+ [:0-9]+ [-+\d]+", "Written TIME"),
        (REVISION, r"\1"),
    ):
        text = re.sub(pattern, new, text)
    return text.replace(str(root), "ROOT")


def answered(client: TestClient, query: str, root: Path) -> Any:
    answer = client.get(query)
    text = steady(answer.text, root)
    return shortened([answer.status_code, json.loads(text) if "json" in answer.headers["content-type"] else text])


def printed(command: str, root: Path) -> Any:
    name, run, *rest = command.split()
    out, err = io.StringIO(), io.StringIO()
    extra = ["--out", str(root / "report.html")] if name == "report" else []
    with redirect_stdout(out), redirect_stderr(err):
        status = cli.main([name, str(root / run), *rest, *extra])
    words = [steady(text.getvalue(), root) for text in (out, err)]
    made = page_text((root / "report.html").read_text()) if name == "report" else []
    parsed = json.loads(words[0]) if "--json" in rest else words[0].splitlines()
    return shortened([status, parsed, words[1].splitlines(), [steady(line, root) for line in made]])


def looks(name: str, state: str, root: Path) -> Any:
    look = FIGURES[name].look(state, root)
    return json.loads(json.dumps(shortened({part: look[part] for part in ("texts", "drawing", "tables", "command")})))


def noted(root: Path, run: str) -> Any:
    opened = ascent.Run(root / run)
    html = run_html(Path(run), opened.info, opened.metrics)
    return shortened([page_text(html), html.count("<svg"), page_text(Completions(opened.rollouts(0))._repr_html_())])


def cases() -> dict[str, tuple[Any, ...]]:
    states = {f"figure {name}?{state}": (name, state) for name, all_ in STATES.items() for state in all_}
    return {q: (q,) for q in QUERIES} | {c: (c,) for c in COMMANDS} | states | {f"notebook {r}": (r,) for r in RUNS}


def value_of(case: str, root: Path, client: TestClient) -> Any:
    given = cases()[case]
    if case.startswith("/"):
        return answered(client, case, root)
    if case.startswith("figure"):
        return looks(*given, root)
    return noted(root, given[0]) if case.startswith("notebook") else printed(case, root)


@pytest.mark.parametrize("case", cases())
def test_what_is_shown_is_what_was_pinned(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    root = copied(tmp_path / "runs")
    with TestClient(application(root)) as client:
        value = json.loads(json.dumps(value_of(case, root, client)))
    assert not difference(value, pinned_values(NAME)[case], case)


if __name__ == "__main__":
    import tempfile

    os.environ["COLUMNS"] = "80"
    with tempfile.TemporaryDirectory() as folder:
        made = copied(Path(folder) / "runs")
        with TestClient(application(made)) as client:
            write_pinned(NAME, {case: value_of(case, made, client) for case in cases()})
