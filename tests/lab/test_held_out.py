"""Greedy answers to held-out prompts: what is recorded of them, that a resume keeps it so, and how they are shown."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient
from viewed import answer, write_run, write_step
from viewed import row as response

import ascent
from ascent.build.trained_run import Run
from ascent.core.errors import ConfigError
from ascent.core.types import Rollouts, Scores
from ascent.lab import server
from ascent.lab.pages.completions.completions import key_of
from ascent.lab.report import run_report as report
from ascent.runs import rollout_files
from ascent.runs.run_list import RunEntry
from ascent.tasks.small.sorting import Sort

WORLD = {"length": 3, "numbers": 4, "prompts": 2, "samples": 2, "eval_every": 2, "eval_prompts": 7, "show": False}


def trained(out: Path, **more: Any) -> Run:
    return ascent.train("sort", out=out, **(WORLD | {"steps": 5} | more))


@pytest.mark.long
def test_every_evaluation_leaves_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_files, "NUM_RECORDED_ANSWERS", 5)
    plain = Sort.score

    def measured(self: Sort, given: Rollouts) -> Scores:
        found = plain(self, given)
        notes = np.full(given.mask.shape[:2], "as it is")
        return replace(found, measures={"lenient": found.reward.sum(-1) / 2}, notes=notes)

    monkeypatch.setattr(Sort, "score", measured)
    run = trained(tmp_path / "run", end=True)
    evaluated = [line["step"] for line in run.metrics if line["eval/accuracy"] is not None]
    assert evaluated == [1, 3, 4]
    assert sorted(p.name for p in (run.folder / "held_out").iterdir()) == [f"step_{s:06d}.parquet" for s in evaluated]
    first, last = run.held_out(1), run.held_out(4)
    assert [row["prompt_text"] for row in first] == [row["prompt_text"] for row in last], "the same prompts every time"
    assert [(r["step"], r["group"], r["sample"]) for r in last] == [(4, i, 0) for i in range(5)]
    for row in last:
        assert "".join(row["pieces"]) == row["response_text"] and row["status"] == "ok" and row["valid"]
        assert len(row["logp_sampler"]) == len(row["response"]) and max(row["logp_sampler"]) <= 0
        assert row["lenient"] == row["reward"] / 2 and row["reason"] == "as it is" and "truncated" in row
        assert not {"advantage", "logp_old", "logp", "entropy"} & row.keys(), "no update has seen them"
    with pytest.raises(ConfigError, match=r"no held-out answers of that step\. Recorded are 1, 3, 4"):
        run.held_out(2)


@pytest.mark.parametrize(("which", "expected"), [("none", None), ("1", 5), ("all", 7)])
def test_how_many_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, expected: int | None) -> None:
    monkeypatch.setattr(rollout_files, "NUM_RECORDED_ANSWERS", 5)
    run = trained(tmp_path / "run", steps=1, record_rollouts=which)
    if expected is None:
        assert list((run.folder / "held_out").iterdir()) == []
        return
    rows = run.held_out(0)
    assert len(rows) == expected
    if which == "all":
        assert sum(row["correct"] for row in rows) / len(rows) == run.metrics[0]["eval/accuracy"]
        assert sum(row["reward"] for row in rows) / len(rows) == pytest.approx(run.metrics[0]["eval/reward"])


@pytest.mark.long
def test_recording_changes_no_number(tmp_path: Path) -> None:
    def numbers(which: str) -> list[Any]:
        lines = trained(tmp_path / which, record_rollouts=which).metrics
        return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]

    assert numbers("none") == numbers("all")


@pytest.mark.long
def test_a_reward_that_fails_is_said_and_is_in_no_mean(tmp_path: Path) -> None:
    """Where a prompt begins with 0 the reward raises, where with 1 it is no number."""
    (tmp_path / "own.py").write_text(
        "def own(prompt, response):\n    assert prompt[0] > 0\n    return float('nan') if prompt[0] == 1 else 2.0\n"
    )
    given = {"reward": f"python:{tmp_path / 'own.py'}:own", "max_reward_errors": 1.0, "record_rollouts": "all"}
    run = trained(tmp_path / "run", steps=1, eval_prompts=40, **given)
    rows, line = run.held_out(0), run.metrics[0]
    assert {row["status"] for row in rows if row["prompt"][0] < 2} == {"failed"}
    assert {row["status"] for row in rows if row["prompt"][0] >= 2} == {"ok"}
    assert line["eval/reward"] == 2.0 and line["eval/reward_errors"] == sum(row["prompt"][0] < 2 for row in rows)


def test_learning_from_demonstrations_is_judged_by_answers_too(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", steps=1, algorithm="sft", samples=1)
    (row, *_) = run.held_out(0)
    assert "".join(row["pieces"]) == row["response_text"] and max(row["logp_sampler"]) < 0


def test_a_reward_model_answers_nothing(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", steps=1, algorithm="reward-model")
    assert run.metrics[0]["eval/pairs/accuracy"] is not None and list((run.folder / "held_out").iterdir()) == []


@pytest.mark.long
def test_going_back_sets_answers_aside_beside_the_rollouts(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", checkpoint_every=2, keep=5, record_rollouts="all")
    before = {step: run.held_out(step) for step in (1, 3, 4)}
    (run.folder / "held_out" / "mine.parquet").write_text("my own")
    (run.folder / "held_out" / ".step_000099.parquet").write_text("half of one, left by a kill")
    ascent.resume(run.folder, from_step=2)
    (kept,) = run.folder.glob("replaced-*")
    assert {p.name for p in (kept / "held_out").iterdir()} >= {"step_000003.parquet", "step_000004.parquet"}
    assert not (kept / "held_out" / "step_000001.parquet").exists()
    assert len(list(kept.glob("step_*.parquet"))) == 3, "the rollouts of the same steps are not written over"
    assert {step: run.held_out(step) for step in before} == before
    assert not list((run.folder / "held_out").glob(".*")) and (run.folder / "held_out" / "mine.parquet").exists()


@pytest.mark.long
def test_a_folder_of_before_is_read_and_gone_on_with(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", checkpoint_every=2, keep=5)
    for path in (run.folder / "held_out").iterdir():
        path.unlink()
    (run.folder / "held_out").rmdir()
    with pytest.raises(ConfigError, match="None were recorded"):
        run.held_out(1)
    ascent.resume(run.folder, from_step=2)
    assert {p.name for p in (run.folder / "held_out").iterdir()} == {"step_000003.parquet", "step_000004.parquet"}


# ---- in the viewer --------------------------------------------------------------------------------------


def evaluated(folder: Path, **answers: list[tuple[float, str]]) -> Path:
    """A run with one sampled step, and greedy answers (reward and text) to the prompts 0, 1, … at some steps."""
    write_run(folder, {3: [response(g, s, float(s), "a b") for g in (1, 9) for s in (0, 1)]})
    for step, given in answers.items():
        write_step(folder, int(step[1:]), [answer(i, *one) for i, one in enumerate(given)], "held_out")
    return folder


@pytest.fixture
def some(tmp_path: Path) -> Path:
    first, last = [(0.0, "no"), (1.0, "yes"), (0.0, "hm")], [(1.0, "yes"), (0.0, "why"), (0.0, "hm")]
    return evaluated(tmp_path / "some", s4=first, s9=last)


@pytest.fixture
def ask(some: Path) -> Callable[..., Any]:
    client = TestClient(server.application(some.parent))

    def call(path: str, code: int = 200, **given: Any) -> Any:
        answer = client.get(f"/api/view/{path}", params={"id": "some"} | given)
        assert answer.status_code == code, answer.text
        return answer.json()

    return call


def test_a_page_of_held_out_answers(ask: Callable[..., Any]) -> None:
    page = ask("completions", set="held-out", step=8)
    assert (page["set"], page["step"], page["recorded"], page["asked"]) == ("held-out", 9, [4, 9], 8)
    assert page["sets"] == {"sampled": 1, "held-out": 2} and page["of"] is None
    group = page["groups"][0]
    assert (group["size"], group["mean"], group["std"]) == (1, 1.0, None), "one number has no spread"
    assert group["responses"][0]["advantage"] is None and page["shares"]["right"] == 1
    wrong = ask("completions", set="held-out", step=4, show="wrong")
    assert [g["group"] for g in wrong["groups"]] == [0, 2]
    sampled = ask("completions")
    assert (sampled["set"], sampled["recorded"], sampled["sets"]) == ("sampled", [3], page["sets"])
    for path in ("completions", "prompt", "tokens"):
        said = ask(path, 400, set="greedy", step=4, group=0, key=key_of("prompt 0"))
        assert said["error"] == "set=greedy: there are sampled, held-out"


def test_tokens_of_a_greedy_answer_have_their_log_prob_alone(ask: Callable[..., Any]) -> None:
    found = ask("tokens", set="held-out", step=9, group=1)
    (one,) = found["rows"]
    assert one["pieces"] == ["why"] and one["logp"] == [-1.0] and found["missing"] == {}
    assert not [name for name in ("logp_sampler", "advantage", "entropy", "ratio", "clipped") if one[name] is not None]
    assert ask("tokens", 400, set="held-out", step=3, group=1)["error"].startswith("step 3: nothing was recorded")


def test_prompts_of_both_sets(ask: Callable[..., Any]) -> None:
    listed = ask("prompts")
    assert [(p["set"], p["prompt"], p["steps"]) for p in listed["prompts"]] == [
        *(("held-out", f"prompt {i}", 2) for i in range(3)),
        *(("sampled", f"prompt {i}", 1) for i in (1, 9)),
    ]
    assert listed["total"] == 5
    found = ask("prompt", set="held-out", key=key_of("prompt 1"))
    assert [(s["step"], s["right"], s["common"]["text"]) for s in found["steps"]] == [(4, 1, "yes"), (9, 0, "why")]
    assert found["sets"] == {"held-out": 2, "sampled": 1} and found["prompt"] == "prompt 1"
    assert [s["step"] for s in ask("prompt", key=found["key"])["steps"]] == [3]


def test_a_run_says_where_its_answers_are_and_what_they_are(ask: Callable[..., Any], some: Path) -> None:
    about = ask("run")
    assert (about["recorded"], about["held_out"], about["greedy"]) == ([3], [4, 9], "greedy answers")
    about = json.loads((some / "run.json").read_text())
    for task, said in (("sort", "held out, greedy"), ("lecture", "greedy")):
        (some / "run.json").write_text(json.dumps(about | {"task": task}))
        assert ask("completions", set="held-out")["greedy"] == ask("prompts")["greedy"] == said


def test_damaged_answers_cost_nothing_else(ask: Callable[..., Any], some: Path) -> None:
    write_step(some, 5, [answer(0, 1.0, "x") | {"prompt_text": 5}], "held_out")
    write_step(some, 6, [{k: [v] if k == "group" else v for k, v in answer(0, 1.0, "x").items()}], "held_out")
    (some / "held_out" / "step_000007.parquet").write_text("torn")
    for step, said in ((5, "column prompt_text of the type int64"), (6, "column group of"), (7, "not a whole Parquet")):
        assert said in ask("completions", set="held-out", step=step)["problems"][0]
    listed = ask("prompts")
    assert len(listed["prompts"]) == 5 and len(listed["problems"]) == 3
    assert [s["step"] for s in ask("prompt", set="held-out", key=key_of("prompt 0"))["steps"]] == [4, 9]
    assert len(ask("prompt", key=key_of("prompt 1"))["problems"]) == 0
    shutil.rmtree(some / "held_out")
    (some / "held_out").write_text("a file")
    assert "No answers to held-out prompts" in ask("completions", set="held-out")["problems"][0]
    assert ask("completions")["sets"] == {"sampled": 1, "held-out": 0} and ask("run")["held_out"] == []


def report_of(folder: Path) -> str:
    text = report.report_of(RunEntry("some", folder, "ascent"))
    found = re.search(r'<section id="answers">.*?</section>|<section[^>]*id="answers".*?</section>', text, re.S)
    return re.sub(r"<[^>]+>", " ", found[0]) if found else ""


def test_a_report_says_what_changed(some: Path) -> None:
    said = report_of(some)
    assert "3 prompts" in said and "at step 4 and at step 9" in said
    assert "1 went from wrong to right, 1 from right to wrong, 1 stayed wrong and 0 stayed right." in said
    assert [said.count(name) for name in ("wrong → right", "right → wrong", "still wrong")] == [1, 1, 1]
    (some / "held_out" / "step_000009.parquet").write_text("torn")
    said = report_of(some)
    assert "step_000009.parquet is not a whole Parquet file" in said and "at step 4: 1 right." in said
    shutil.rmtree(some / "held_out")
    assert report_of(some) == ""
