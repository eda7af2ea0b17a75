"""Runs that are driven from Python, and what a terminal and a notebook show of them."""

# ruff: noqa: ARG005

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.core.errors import ConfigError, RunError
from ascent.runs.display.notebook import Completions, NotebookDisplay, default_display
from ascent.runs.display.terminal import Display, LineDisplay
from tests.runs.test_resume import bits, differing

SMALL: dict[str, Any] = {"length": 3, "numbers": 4, "policy.width": 8, "policy.layers": 1, "policy.heads": 2}
QUICK: dict[str, Any] = {**SMALL, "steps": 6, "prompts": 4, "eval_every": 3, "checkpoint_every": 100, "threads": 1}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ascent.Run:
    return ascent.train("sort", **QUICK, show=False, out=tmp_path_factory.mktemp("whole") / "run")


# ---- step by step -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_driven_run_has_the_bits_of_one_that_is_trained(whole: ascent.Run, tmp_path: Path) -> None:
    """Also with evaluations in between, which move no random stream."""
    driven = ascent.steps("sort", **QUICK, out=tmp_path / "run")
    seen = [(step.number, step.metrics["reward"], step.evaluate()["eval/accuracy"]) for step in driven]
    assert [(number, reward) for number, reward, _ in seen] == [(m["step"], m["reward"]) for m in whole.metrics]
    assert seen[-1][2] == whole.metrics[-1]["eval/accuracy"] == driven.run.metrics[-1]["eval/accuracy"]
    assert driven.run.status == "finished" and not differing(driven.folder, bits(whole.folder))


@pytest.mark.long
@pytest.mark.parametrize("how", ["stop", "break", "close", "error"])
def test_a_run_that_is_left_early_is_saved_and_resumes_to_the_same_bits(
    how: str, whole: ascent.Run, tmp_path: Path
) -> None:
    driven = ascent.steps("sort", **QUICK, out=tmp_path / "run")
    try:
        for step in driven:
            if step.number == 2 and how == "stop":
                step.stop()
            elif step.number == 2 and how == "error":
                raise ZeroDivisionError
            elif step.number == 2:
                break
    except ZeroDivisionError:
        pass
    if how == "close":
        driven.close()
    if how in ("stop", "close"):
        assert driven.run.status == "interrupted" and len(driven.run.checkpoints) == 1
    run = ascent.resume(driven.folder, Display())  # it ends what this process has left open
    assert run.status == "finished" and not differing(run.folder, bits(whole.folder))
    assert [e["event"] for e in run.info["history"]] == ["started", "interrupted", "resumed", "finished"]


def test_a_run_can_be_resumed_step_by_step(whole: ascent.Run, tmp_path: Path) -> None:
    for step in ascent.steps("sort", **QUICK, out=tmp_path / "run"):
        if step.number == 2:
            step.stop()
    again = ascent.steps(ascent.load(tmp_path / "run"))
    assert [step.number for step in again] == [3, 4, 5]
    assert not differing(again.folder, bits(whole.folder))
    with pytest.raises(ConfigError, match="is finished: there is no step left"):
        ascent.steps(again.run)


def test_a_step_shows_its_batch_and_its_completions(tmp_path: Path) -> None:
    driven = ascent.steps("sort", **QUICK | {"steps": 1}, out=tmp_path / "run")
    step = next(driven)
    assert step.batch.reward.shape[:2] == (4, 8) and repr(step).startswith("Step(0, reward ")
    rows = step.completions(2)
    assert len(rows) == 16 and rows[0].keys() >= {"prompt_text", "response_text", "reward"}
    assert not list(driven) and driven.run.status == "finished"


def test_what_decides_no_number_may_be_changed_and_is_written_down(whole: ascent.Run, tmp_path: Path) -> None:
    driven = ascent.steps("sort", **QUICK, out=tmp_path / "run")
    for step in driven:
        if step.number == 0:
            step.change(eval_every=1, record_every=1)
            with pytest.raises(ConfigError, match="temperature: it affects results"):
                step.change(temperature=0.5)
            with pytest.raises(ConfigError, match="--eval-every is 'x'"):
                step.change(eval_every="x")
    assert [m["eval/accuracy"] is not None for m in driven.run.metrics] == [False, True, True, True, True, True]
    assert [m["reward"] for m in driven.run.metrics] == [m["reward"] for m in whole.metrics]
    assert json.loads((driven.folder / "config.json").read_text())["eval_every"] == 1
    assert driven.run.info["history"][1]["settings"] == {"eval_every": 1, "record_every": 1}
    assert len(list((driven.folder / "rollouts").iterdir())) == 6


def test_a_driven_run_that_fails_says_so(tmp_path: Path) -> None:
    driven = ascent.steps("sort", **QUICK | {"lr": 1e38, "update.max_norm": None}, out=tmp_path / "run")
    with pytest.raises(RunError):
        list(driven)
    assert driven.run.status == "failed" and list(driven) == []


# ---- what is shown ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_gives_frames_pictures_and_completions(whole: ascent.Run, tmp_path: Path) -> None:
    frame = whole.frame()
    assert list(frame.index) == list(range(6)) and frame["reward"].tolist() == [m["reward"] for m in whole.metrics]
    picture = whole.plot()
    assert picture._repr_png_().startswith(b"\x89PNG")
    picture.save(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes() == picture.png
    assert whole.completions() == whole.rollouts(5) and whole.completions(0) == whole.rollouts(0)
    assert ascent.sample(whole, ["1 0 2"]), "a run stands for its folder"
    assert ascent.resume(whole).folder == whole.folder
    asked = whole.sample("1 0 2", count=3, seed=1)
    rows = ascent.sample(whole, ["1 0 2"], count=3, seed=1)
    assert [row["response"] for row in asked] == [row["response"] for row in rows], "the same draws"
    assert len(whole.sample(["1 0 2", "0 0 1"], greedy=True)) == 2 and "reward" not in asked._repr_html_()
    html = whole._repr_html_()
    assert html.count("<svg") >= 2 and "finished" in html and "<script" not in html


HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e"


def test_words_of_a_model_are_escaped() -> None:
    rows = Completions([{"prompt_text": HOSTILE, "response_text": HOSTILE, "reward": 1.0, "reason": HOSTILE}])
    html = rows._repr_html_()
    assert "<script" not in html and "&lt;script&gt;" in html and "\x1b" not in html + repr(rows)
    live = NotebookDisplay()
    live.draw = lambda: None  # type: ignore[method-assign]
    live.start(0, 3, HOSTILE)
    live.show_message(HOSTILE)
    live.responses(lambda groups: rows)
    live.step(0, {"reward": 0.5, "entropy": 1.0})
    assert "<script" not in live.html() and "\x1b" not in live.html() and "0.500" in live.html()


class Shown:
    """IPython, as far as a display needs it."""

    def __init__(self) -> None:
        self.drawn: list[str] = []

    def display(self, value: Any, display_id: bool = False) -> Any:
        self.drawn.append(value)
        return types.SimpleNamespace(update=self.drawn.append)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    display: Any = types.ModuleType("IPython.display")
    display.HTML, display.display = str, shown.display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_in_a_notebook_a_run_is_one_display(notebook: Shown, tmp_path: Path, capsys: Any) -> None:
    ascent.train("sort", **QUICK, out=tmp_path / "run")
    assert len(notebook.drawn) < 12 and "6 of 6 steps" in notebook.drawn[-1]
    assert "<polyline" in notebook.drawn[-1] and "[" in notebook.drawn[-1], "curves and completions"
    assert capsys.readouterr() == ("", ""), "and no lines"


def test_elsewhere_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert type(default_display()) is LineDisplay
