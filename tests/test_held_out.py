"""Greedy answers to held-out prompts: what is recorded of them at an evaluation, and that a resume keeps it so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ascent
from ascent.records import Run, rollouts
from ascent.tasks.sort import Sort
from ascent.types import Refused, Rollouts, Scores

WORLD = {"length": 3, "numbers": 4, "prompts": 2, "samples": 2, "eval_every": 2, "eval_prompts": 7, "show": False}


def trained(out: Path, **more: Any) -> Run:
    return ascent.train("sort", out=out, **(WORLD | {"steps": 5} | more))


def test_every_evaluation_leaves_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "ANSWERS", 5)
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
    with pytest.raises(Refused, match=r"no held-out answers of that step\. Recorded are 1, 3, 4"):
        run.held_out(2)


@pytest.mark.parametrize(("which", "expected"), [("none", None), ("1", 5), ("all", 7)])
def test_how_many_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, expected: int | None) -> None:
    monkeypatch.setattr(rollouts, "ANSWERS", 5)
    run = trained(tmp_path / "run", steps=1, record_rollouts=which)
    if expected is None:
        assert list((run.folder / "held_out").iterdir()) == []
        return
    rows = run.held_out(0)
    assert len(rows) == expected
    if which == "all":
        assert sum(row["correct"] for row in rows) / len(rows) == run.metrics[0]["eval/accuracy"]
        assert sum(row["reward"] for row in rows) / len(rows) == pytest.approx(run.metrics[0]["eval/reward"])


def test_recording_changes_no_number(tmp_path: Path) -> None:
    def numbers(which: str) -> list[Any]:
        lines = trained(tmp_path / which, record_rollouts=which).metrics
        return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]

    assert numbers("none") == numbers("all")


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


def test_a_folder_of_before_is_read_and_gone_on_with(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", checkpoint_every=2, keep=5)
    for path in (run.folder / "held_out").iterdir():
        path.unlink()
    (run.folder / "held_out").rmdir()
    with pytest.raises(Refused, match="None were recorded"):
        run.held_out(1)
    ascent.resume(run.folder, from_step=2)
    assert {p.name for p in (run.folder / "held_out").iterdir()} == {"step_000003.parquet", "step_000004.parquet"}
