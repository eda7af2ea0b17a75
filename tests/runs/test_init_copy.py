"""A run with --init copies what it needs from the source, which may be deleted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.build.trained_run import Run
from ascent.core.errors import ConfigError, RunError
from ascent.runs import checkpoint
from ascent.runs.display.terminal import Display
from ascent.runs.run_writer import RunWriter
from ascent.settings import configure
from ascent.workflows import seed_comparison as comparison
from tests.cases import mostly_smokes
from tests.runs.test_resume import bits, differing

SMALL: dict[str, Any] = {"length": 3, "numbers": 4, "policy.width": 8, "policy.layers": 1, "policy.heads": 2}
QUICK: dict[str, Any] = {
    **{"prompts": 2, "eval_every": 50, "eval_prompts": 2, "threads": 1, "checkpoint_every": 1, "keep": 3, "steps": 3},
    **{"record_rollouts": "none", "keep_best": False, "show": False, "preflight": False},
}
CASES: dict[str, dict[str, Any]] = {
    "no reference": {"algorithm": "reinforce"},
    "a frozen reference": {"algorithm": "grpo"},
    "a reference that moves later": {"algorithm": "grpo", "reference": "every", "reference.n": 2},
    "a reference that moves at once": {"algorithm": "grpo", "reference": "moving-average"},
    "a critic": {"algorithm": "ppo"},
    "LoRA": {"algorithm": "grpo", "policy.lora": 2},
    "the last layer": {"algorithm": "grpo", "policy.last_layers": 1},
    "bfloat16": {"algorithm": "grpo", "policy.dtype": "bfloat16"},
    "preference pairs": {"algorithm": "dpo"},
    "a reward model": {"algorithm": "reward-model"},
}
OFFLINE = ("dpo", "reward-model")


def stopped(patch: pytest.MonkeyPatch, task: str, out: Path, after: int, **settings: Any) -> None:
    """Start a run that stops after a step with a checkpoint."""
    with patch.context() as inside:
        inside.setattr(RunWriter, "should_stop", lambda self: self.last.get("step", -1) >= after)
        ascent.train(task, out=out, **settings)
    assert Run(out).status == "interrupted"


def world(kind: str, tmp_path: Path, model: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return tasks of a small or a language run by kind of data, and settings."""
    if kind == "small":
        return {"samples": "sort", "pairs": "sort"}, SMALL | QUICK
    rows = [{"prompt": f"{i} + 1", "answer": str(i), "chosen": str(i), "rejected": "no"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = {"samples": f"jsonl:{tmp_path / 'rows.jsonl'}", "pairs": f"preferences:{tmp_path / 'rows.jsonl'}"}
    return tasks, QUICK | {"model": str(model), "max_tokens": 4, "reward_workers": 1}


SOME = ("no reference", "a frozen reference", "a reward model")


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return a function that writes a source run. Runs with equal settings are trained once."""
    made: dict[str, Path] = {}

    def write(kind: str, task: str, folder: Path, settings: dict[str, Any], own: dict[str, Any]) -> None:
        key = repr((kind, own))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("source") / "run"
            ascent.train(task, out=made[key], **settings | own)
        shutil.copytree(made[key], folder)

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    mostly_smokes(
        [*(("small", case) for case in SOME), *(("language", case) for case in CASES)],
        ("small", "a frozen reference"),
    ),
)
def test_run_resumes_after_its_init_was_deleted(
    kind: str, case: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source_of: Any
) -> None:
    (tasks, settings), own = world(kind, tmp_path, tiny_folder), CASES[case]
    first = {key: value for key, value in own.items() if key.startswith("policy.")}
    first |= {"algorithm": "reinforce", "samples": 2, "lr": 0.01}
    source_of(kind, tasks["samples"], tmp_path / "source", settings, first)
    settings = (
        settings | own | {"init": str(tmp_path / "source")} | ({} if own["algorithm"] in OFFLINE else {"samples": 2})
    )
    task = tasks["pairs" if own["algorithm"] in OFFLINE else "samples"]
    if task.startswith("preferences") and own["algorithm"] == "reward-model":
        settings["preset"] = "reward-model"
    ascent.train(task, out=tmp_path / "whole", **settings)
    stopped(monkeypatch, task, tmp_path / "again", 0, **settings)
    kept = checkpoint.initial_params_folder(tmp_path / "again/checkpoints")
    if case in ("no reference", "a critic", "a reward model") or task == "sort" or "at once" in case:
        assert kept is None, "nothing is kept that no resume needs"
    else:
        source = Run(tmp_path / "source").checkpoints[-1] / "params.safetensors"
        assert kept is not None and (kept / "params.safetensors").samefile(source), "a link: not stored twice"
    shutil.rmtree(tmp_path / "source")
    run = ascent.resume(tmp_path / "again", Display())
    assert run.status == "finished" and not (tmp_path / "source").exists()
    assert differing(tmp_path / "again", bits(tmp_path / "whole")) == []
    if own["algorithm"] != "reward-model":
        assert run.policy is not None


@pytest.mark.long
def test_run_killed_before_its_first_checkpoint_keeps_its_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SMALL | QUICK | {"samples": 2}
    ascent.train("sort", out=tmp_path / "source", **settings)
    settings |= {"init": str(tmp_path / "source"), "checkpoint_every": 4, "steps": 2}
    ascent.train("sort", out=tmp_path / "whole", **settings)

    def killed(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "checkpoint", killed)
        with pytest.raises(RunError, match="MemoryError"):
            ascent.train("sort", out=tmp_path / "again", **settings)
    assert not Run(tmp_path / "again").checkpoints
    shutil.rmtree(tmp_path / "source")
    assert ascent.resume(tmp_path / "again", Display()).status == "finished"
    one, two = (checkpoint.params(Run(tmp_path / name).checkpoint()) for name in ("whole", "again"))
    assert all(bool((one[name] == two[name]).all()) for name in one)
    assert checkpoint.initial_params_folder(tmp_path / "again/checkpoints") is None


def test_init_that_is_no_checkpoint_is_copied(tmp_path: Path) -> None:
    """Such a folder may be overwritten, while a checkpoint never changes."""
    (tmp_path / "params.safetensors").write_bytes(b"some")
    checkpoint.keep_initial_params(tmp_path, tmp_path / "checkpoints")
    kept = checkpoint.initial_params_folder(tmp_path / "checkpoints")
    assert kept is not None and not (kept / "params.safetensors").samefile(tmp_path / "params.safetensors")
    assert [path.name for path in kept.iterdir()] == ["params.safetensors"]
    checkpoint.remove_initial_params(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.long
def test_comparison_with_init_is_resumed(tmp_path: Path) -> None:
    settings = SMALL | {key: QUICK[key] for key in ("prompts", "eval_prompts", "threads", "steps")} | {"samples": 2}
    ascent.train("sort", out=tmp_path / "source", show=False, **settings)
    config = configure("sort", settings | {"init": str(tmp_path / "source")})
    for _ in range(2):
        comparison.run_one(config.to_dict(), str(tmp_path / "one"))
    with pytest.raises(ConfigError, match="has a run with other settings"):
        comparison.run_one(config.to_dict() | {"init": None}, str(tmp_path / "one"))
