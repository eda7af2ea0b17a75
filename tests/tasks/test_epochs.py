"""Passes over the data: every row once before any comes again, whatever the task, and also after a kill."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ascent
from ascent.build.assemble import assemble
from ascent.build.trained_run import Run
from ascent.cli.run_flags import parse_train
from ascent.core.errors import ConfigError
from ascent.runs.display.terminal import Display
from ascent.runs.run_writer import RunWriter
from ascent.settings import config_from, configure
from ascent.tasks.epochs import EpochSampler
from ascent.workflows.seed_comparison import run_one
from tests.runs.test_resume import bits, differing

SMALL: dict[str, Any] = {"length": 3, "numbers": 4, "policy.width": 8, "policy.layers": 1, "policy.heads": 2}
QUICK: dict[str, Any] = {"eval_every": 100, "eval_prompts": 2, "threads": 1, "checkpoint_every": 3}


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Settings of small runs on files of 30 rows, of which some are held out."""
    prompts = [[a, b, c] for a in range(4) for b in range(4) for c in range(4)][:30]
    columns = {
        "demonstrations": ("sft", lambda p: {"response": sorted(p)}),
        "pairs": ("dpo", lambda p: {"chosen": sorted(p), "rejected": [3, 3, 3]}),
        "labels": ("process-reward", lambda p: {"steps": sorted(p), "labels": [1, 0, 1]}),
    }
    made = {}
    for setting, (row, more) in columns.items():
        file = tmp_path / f"{setting}.jsonl"
        file.write_text("".join(json.dumps({"prompt": p} | more(p)) + "\n" for p in prompts))
        made[row] = {"algorithm": row, setting: str(file), **SMALL, **QUICK}
    made["reward-model"] = made["dpo"] | {"algorithm": "reward-model"}
    return made


def stopping_after(step: int) -> Any:
    return lambda self: self.stop or self.last.get("step", -1) >= step


# ---- the order ---------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.sets(st.integers(0, 11), max_size=6), st.integers(0, 3))
def test_every_row_comes_once_before_any_comes_again(size: int, count: int, left_out: set[int], seed: int) -> None:
    """Across steps no two rows are ever apart by more than one; inside a step none comes twice if it can be helped."""
    usable = set(range(size)) - left_out
    passes, seen = EpochSampler(size, usable.__contains__), Counter[int](dict.fromkeys(usable, 0))
    for step in range(8):
        rows, epoch = passes.rows(step, count, seed)
        if not usable:
            assert rows == []
            continue
        seen.update(rows)
        assert len(rows) == count and seen.keys() == usable
        assert max(seen.values()) - min(seen.values()) <= 1
        most = Counter(rows).values()
        assert max(most) <= -(-count // len(usable)), "no row twice in a step, if there are enough of them"
        whole, rest = divmod((step + 1) * count, len(usable))
        assert whole <= epoch < whole + 1 and (rest > 0 or epoch == whole)
        assert EpochSampler(size, usable.__contains__).rows(step, count, seed) == (rows, epoch), (
            "a function of the step"
        )


def test_passes_have_orders_of_their_own() -> None:
    passes = EpochSampler(50, lambda _: True)
    first, second = (passes.rows(step, 50, 0)[0] for step in range(2))
    assert first != second and sorted(first) == sorted(second)
    assert first != EpochSampler(50, lambda _: True).rows(0, 50, 1)[0]


def test_the_steps_of_some_passes() -> None:
    usable = EpochSampler(1000, lambda row: row % 10 > 0)
    assert [usable.steps(n, 16) for n in (1, 2, 0.5, 0.001)] == [57, 113, 29, 1], "900 / 16, 1800 / 16, 450 / 16"


# ---- runs --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("row", ["sft", "dpo", "reward-model", "process-reward"])
def test_offline_data_are_gone_through_in_passes_and_resumed_in_the_middle(
    row: str, offline: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """27 rows in steps of 8, two passes: 7 steps, the fourth of which reaches over the border."""
    given = offline[row] | {"prompts": 8, "data_epochs": 2, "record_rollouts": "all"}
    whole = ascent.train("sort", out=tmp_path / "whole", show=False, **given)
    rows = len(assemble(whole.config).task.file.train)  # type: ignore[attr-defined]
    steps = -(-2 * rows // 8)
    assert whole.config.steps == len(whole.metrics) == whole.info["steps"] == steps
    assert [line["epoch"] for line in whole.metrics] == [8 * (step + 1) / rows for step in range(steps)]
    prompts = [group["prompt"] for step in range(steps) for group in whole.rollouts(step) if group["sample"] == 0]
    times = Counter(map(str, prompts))
    assert set(times.values()) <= {2, 3} and len(times) == rows == 27
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "should_stop", stopping_after(3))
        ascent.train("sort", out=tmp_path / "again", show=False, **given)
    assert Run(tmp_path / "again").status == "interrupted"
    ascent.resume(tmp_path / "again", Display())
    assert differing(tmp_path / "again", bits(tmp_path / "whole")) == []


@pytest.mark.long
def test_a_text_task_is_gone_through_in_passes(tiny_folder: Path, tmp_path: Path) -> None:
    """Some of the 20 prompts are too long, and some are held out. What dynamic sampling draws again moves no pass."""
    rows = [{"prompt": f"{i} + 1" if i % 4 else f"{i}" + " + 1" * 200, "answer": str(i + 1)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "model": str(tiny_folder),
        "prompts": 3,
        "samples": 2,
        "max_tokens": 4,
        "max_prompt": 60,
        "data_epochs": 2,
    }
    more: dict[str, Any] = QUICK | {
        "eval_prompts": 20,
        "record_rollouts": "all",
        "show": False,
        "preflight": False,
        "reward_workers": 1,
    }
    runs = {}
    choices: list[tuple[str, dict[str, Any]]] = [
        ("all", {}),
        ("dynamic", {"groups": "with-signal", "groups.rounds": 2}),
    ]
    for name, groups in choices:
        run = runs[name] = ascent.train(
            f"jsonl:{tmp_path / 'rows.jsonl'}", out=tmp_path / name, **given, **more, **groups
        )
        table: Any = run.config.task
        fit = sum(len(problem.prompt) < 60 for problem in table.table.train)
        assert fit < table.size and run.config.steps == len(run.metrics) == -(-2 * fit // 3)
        assert run.metrics[-1]["epoch"] >= 2 > run.metrics[-2]["epoch"]
    drawn = [{str(row["prompt"]) for row in runs["all"].rollouts(step)} for step in range(len(runs["all"].metrics))]
    assert all(len(prompts) == 3 for prompts in drawn)
    assert set(Counter(prompt for prompts in drawn for prompt in prompts).values()) <= {2, 3}
    assert [line["epoch"] for line in runs["dynamic"].metrics] == [line["epoch"] for line in runs["all"].metrics]


def test_endless_prompts_have_no_passes(tmp_path: Path) -> None:
    run = ascent.train("sort", out=tmp_path / "run", show=False, steps=1, prompts=2, samples=2, **SMALL, **QUICK)
    assert "epoch" not in run.metrics[0]
    for task in ("sort", "lecture"):
        with pytest.raises(ConfigError, match=r"--data-epochs 2: .*so it has no epochs.*Set --steps"):
            ascent.train(task, out=tmp_path / "none", show=False, data_epochs=2.0)
    assert not (tmp_path / "none").exists()


def test_a_comparison_finds_its_run_of_some_passes_again(offline: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """The config asks for passes, and the run has decided how many steps those are."""
    config = configure("sort", offline["sft"] | {"prompts": 8, "data_epochs": 0.5})
    for _ in range(2):
        run_one(config.to_dict(), str(tmp_path / "one"))
    run = Run(tmp_path / "one")
    assert run.status == "finished" and run.config.steps != config.steps
    with pytest.raises(ConfigError, match="has a run with other settings"):
        run_one(config.to_dict() | {"seed": 5}, str(tmp_path / "one"))


def test_the_later_of_steps_and_data_epochs_counts(offline: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--steps 5 and --data-epochs 2\.0 both set the length of the run"):
        parse_train(["sort", "--steps", "5", "--data-epochs", "2"], "ascent train")
    with pytest.raises(ConfigError, match="both set the length of the run"):
        ascent.train("sort", show=False, steps=5, data_epochs=2.0)
    with pytest.raises(ConfigError, match="--data-epochs is 'two'"):
        ascent.train("sort", show=False, data_epochs="two")
    for wrong in ("0", "-1", "inf", "nan"):
        with pytest.raises(ConfigError, match=r"--data-epochs is .* above 0"):
            parse_train(["sort", "--data-epochs", wrong], "ascent train")
    config = assemble(configure("sort", offline["sft"] | {"prompts": 4, "data_epochs": 1})).config
    assert config_from(config.to_dict()) == config and config.data_epochs == 1
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict()))
    other, _ = parse_train(["--config", str(file), "--steps", "5"], "ascent train")
    assert (other.steps, other.data_epochs) == (5, None)
    wider, _ = parse_train(["--config", str(file), "--prompts", "8"], "ascent train")
    assert assemble(wider).config.steps == -(-config.steps // 2), "as many passes, in steps of twice the size"
