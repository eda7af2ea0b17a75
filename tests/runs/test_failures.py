"""Errors that stop a run name the phase and keep the batch; the best checkpoint is kept."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.core.errors import RunError
from ascent.core.loop import raise_if_diverged
from ascent.core.types import Rollouts
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.runs import checkpoint
from ascent.runs.metrics import best_evaluation
from ascent.training.small_learner import SmallLearner
from benchmarks.common import NoRecords, random_batch

SMALL: dict[str, Any] = {
    "steps": 4,
    "prompts": 4,
    "samples": 2,
    "length": 2,
    "numbers": 4,
    "eval_prompts": 8,
    "threads": 1,
}


def run(out: Path, **more: Any) -> ascent.Run:
    return ascent.train("sort", out=out, show=False, **SMALL | more)


def shifted(gap: float) -> Any:
    """Return a `generate` that reports log-probs other than those it sampled with."""
    generate = SmallPolicyEngine.generate

    def wrong(self: SmallPolicyEngine, *args: Any, **named: Any) -> Rollouts:
        rollouts = generate(self, *args, **named)
        return replace(rollouts, logp_sampler=torch.where(rollouts.mask, rollouts.logp_sampler + gap, 0.0))

    return wrong


def test_sampler_mismatch_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallPolicyEngine, "generate", shifted(0.5))
    with pytest.raises(RunError, match=r"step 0: .* differ by 0\.5 on average.*--max-mismatch 0\.3"):
        run(tmp_path / "a")
    assert (tmp_path / "a" / "failed_step_000000.safetensors").exists()
    assert not list((tmp_path / "a" / "checkpoints").iterdir()), "what was learned from it is not saved"
    assert run(tmp_path / "b", max_mismatch=0.6).status == "finished"


def test_nan_log_prob_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallPolicyEngine, "generate", shifted(float("nan")))
    with pytest.raises(RunError, match="the sampler's log-probs"):
        run(tmp_path / "a")
    assert (tmp_path / "a" / "failed_step_000000.safetensors").exists()


class Kept(NoRecords):
    def step(self, *_: Any) -> None: ...


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e30, -1e30])
def test_non_finite_parameters_stop_the_run(value: float) -> None:
    """Finite parameters whose squares overflow do not stop the run."""
    learner: Any = object.__new__(SmallLearner)
    learner.params = lambda: {"a": torch.ones(3), "b": torch.tensor([[0.0, value]])}
    batch, records = random_batch(5, 1, 2, 2, 2), Kept()
    with nullcontext() if abs(value) == 1e30 else pytest.raises(RunError, match="NaN values in the parameters"):
        raise_if_diverged(3, {"loss": 0.0}, batch, learner, records, 0.3)


@pytest.mark.parametrize(
    ("owner", "method", "words"),
    [
        (SmallPolicyEngine, "generate", "in the phase generate: lower --policy.rows or --max-tokens"),
        (SmallLearner, "step", "in the phase update: lower --micro-batch"),
    ],
)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_out_of_memory_names_the_phase(
    owner: type, method: str, words: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error("tried to allocate 99 GiB")

    monkeypatch.setattr(owner, method, full)
    with pytest.raises(RunError, match=words) as caught:
        run(tmp_path / "a")
    assert "99 GiB" in str(caught.value)


def test_keep_best_keeps_the_best_and_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accuracy 0.2, 0.9, 0.5, 0.9, 0.1: the second is the best, as the first of two equal ones."""
    scores = iter([0.2, 0.9, 0.5, 0.9, 0.1])
    monkeypatch.setattr("ascent.build.assemble.sample_evaluator", lambda *_: lambda: {"eval/accuracy": next(scores)})
    done = run(tmp_path / "a", steps=5, eval_every=1, keep=1, keep_best=True, checkpoint_every=2)
    assert [checkpoint.step_of(path) for path in done.checkpoints] == [2, 5]
    assert done.info["best"] == 2


def test_without_keep_best_only_the_newest_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path / "a", eval_every=1, keep=1)
    assert [checkpoint.step_of(path) for path in done.checkpoints] == [4]


def test_best_step_is_read_from_the_records() -> None:
    """A resumed run does not depend on run.json, which may be out of date after a kill."""
    lines = [{"step": i, "eval/accuracy": a, "eval/reward": 0.0} for i, a in enumerate((0.1, None, 0.7, 0.7, 0.3))]
    assert best_evaluation(lines) == (3, (0.7, 0.0))
    assert best_evaluation([{"step": 0, "eval/accuracy": None}]) is None
    assert best_evaluation([{"step": 0, "eval/logp": -2.0}, {"step": 1, "eval/logp": -1.0}]) == (2, (-1.0, 0.0))
