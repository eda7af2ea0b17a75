"""Every row of the menu trains a language model through the same loop, and resumes to the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import SAMPLED

import ascent
from tests.cases import mostly_smokes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("problems") / "sums.jsonl"
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(6) for b in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Longer is better: a reward that a random model can earn."""
    file = tmp_path_factory.mktemp("rewards") / "mine.py"
    file.write_text("def long(prompt, response, answer, **columns):\n    return len(response) / 10, 'counted'\n")
    return file


def settings(folder: Path, rewards: Path, **more: Any) -> dict[str, Any]:
    few = {"steps": 2, "prompts": 3, "samples": 3, "max_tokens": 6, "max_prompt": 64, "eval_prompts": 2}
    few |= {"threads": 1, "reward_workers": 1}
    return {"policy.model": str(folder), "reward": (f"python:{rewards}:long",), "show": False, **few, **more}


@pytest.mark.parametrize("row", SAMPLED)
def test_every_row_trains_a_language_model(
    row: str, problems: Path, rewards: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    more = {"algorithm": row, "shaping.margin": 2} if row == "dapo" else {"algorithm": row}
    given = settings(tiny_folder, rewards, **more)
    run = ascent.train(f"jsonl:{problems}", out=tmp_path / "run", preflight=False, **given)
    assert run.status == "finished"
    assert all(0 < line["sampling/sampling_logp_difference/mean"] < 1e-4 for line in run.metrics)
    assert run.metrics[0]["grad_norm"] > 0
    rows = run.rollouts(0) + run.held_out(1)
    assert all("counted" in row["reason"] for row in rows)
    assert all(row["response_text"] is not None and "lenient" in row for row in rows)


CASES: dict[str, dict[str, Any]] = {
    "grpo, lora, mini-batches": {"algorithm": "grpo", "policy.lora": 2, "minibatches": 3, "epochs": 2},
    "ppo": {"algorithm": "ppo"},
    "a moving reference": {"algorithm": "grpo", "reference": "moving-average"},
    "trpo, last layer": {"algorithm": "trpo", "policy.last_layers": 1},
    "top-p, checkpointing": {"top_p": 0.8, "policy.checkpointing": True, "micro_batch": 40},
}


@pytest.mark.parametrize("case", mostly_smokes(CASES, "grpo, lora, mini-batches"))
def test_a_language_model_resumes_to_the_same_bits(
    case: str, problems: Path, rewards: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """From its third step on; one that was started again from nothing is the same too."""
    more = {"steps": 3, "checkpoint_every": 2, "keep": 9, "record_rollouts": "all", **CASES[case]}
    given = settings(tiny_folder, rewards, **more)
    whole = ascent.train(f"jsonl:{problems}", out=tmp_path / "a", preflight=False, **given)
    if case == "ppo":
        ascent.train(f"jsonl:{problems}", out=tmp_path / "b", preflight=False, **given)
    else:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    again = ascent.api.resume(tmp_path / "b", from_step=2)
    for a, b in zip(whole.metrics, again.metrics, strict=True):
        assert {k: v for k, v in a.items() if "time" not in k} == {k: v for k, v in b.items() if "time" not in k}
    assert whole.rollouts(2) == again.rollouts(2) and whole.held_out(2) == again.held_out(2)
    for name in ("params", "optimizer"):
        one, two = (p / "checkpoints" / "step_000003" / f"{name}.safetensors" for p in (tmp_path / "a", tmp_path / "b"))
        assert one.read_bytes() == two.read_bytes()
