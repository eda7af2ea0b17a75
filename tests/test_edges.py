"""Edges that a reviewer found: each was a bug once."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import batch_of

import ascent
from ascent.cli.runs import responses
from ascent.core.advantages import Advantage, Raw
from ascent.core.algorithms import Algorithm
from ascent.core.errors import ConfigError, RunError
from ascent.core.groups import Overlong
from ascent.core.kl import KL
from ascent.core.loop import rollout_metrics, score_rollouts
from ascent.core.reference import Frozen
from ascent.core.types import Scores
from ascent.core.update import Adam
from ascent.models import PerPosition
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.runs import checkpoint
from ascent.runs.display import plots
from ascent.runs.display.plots import POLICY_PANELS, panels_for
from ascent.tasks.small.lecture import Lecture
from ascent.tasks.small.sorting import Sort
from ascent.workflows.loaded_policy import responses_text


def small(tmp_path: Path, **settings: Any) -> ascent.Run:
    return ascent.train("lecture", out=tmp_path / "run", show=False, **{"steps": 4, "epochs": 1, **settings})


def test_fewer_prompts_are_held_out_than_asked_for() -> None:
    """7! distinct prompts, of which about a fifth is held out: all of them, and no endless search for more."""
    found = Sort(length=7, numbers=7, distinct=True).held_out(5000).prompt
    assert 900 < len(found) < 1100
    assert len(found.unique(dim=0)) == len(found)
    assert (found.sort(-1).values == torch.arange(7)).all()


def test_a_million_steps_are_more_than_nine_hundred_thousand(tmp_path: Path) -> None:
    for step in (999_900, 999_950, 1_000_000):
        checkpoint.save(tmp_path, step, {"params": {"x": torch.zeros(1)}}, {"step": step}, keep=2)
    (tmp_path / "step_000200_best").mkdir()
    assert [checkpoint.step_of(p) for p in checkpoint.complete_checkpoints(tmp_path)] == [999_950, 1_000_000]


def test_going_back_keeps_what_it_cuts_and_what_is_not_ours(tmp_path: Path) -> None:
    run = small(tmp_path, checkpoint_every=2, keep=5, record_rollouts="all")
    for name in ("notes.md", "mine.parquet"):
        (run.folder / "rollouts" / name).write_text("my own")
    before = (run.folder / "metrics.jsonl").read_text()
    ascent.resume(run.folder, from_step=2)
    assert {p.name for p in (run.folder / "rollouts").iterdir()} >= {"notes.md", "mine.parquet"}
    (kept,) = run.folder.glob("replaced-*")
    assert (kept / "metrics.jsonl").read_text() == before
    assert {p.name for p in kept.glob("*.parquet")} == {"step_000002.parquet", "step_000003.parquet"}
    assert run.status == "finished" and len(run.metrics) == 4


@dataclass(frozen=True)
class Mine(Advantage):
    """A credit of this file."""

    group = False

    def __call__(self, batch: Any, state: Any) -> Any:
        return batch.reward


def test_a_run_with_a_credit_of_ones_own_finds_it_again_in_its_file(tmp_path: Path) -> None:
    run = small(tmp_path, advantage=Mine(), checkpoint_every=2)
    before = run.metrics
    again = ascent.resume(run.folder, from_step=2)
    assert [line["reward"] for line in again.metrics] == [line["reward"] for line in before]


@pytest.mark.long
def test_a_step_without_signal_teaches_nothing(tmp_path: Path) -> None:
    """The same reward for all: dynamic sampling finds no group, and raw credit must not train on the dropped ones."""
    (tmp_path / "same.py").write_text("def same(prompt, response):\n    return 3.0\n")
    settings = {"algorithm": "reinforce", "groups": "with-signal", "reward": f"python:{tmp_path / 'same.py'}:same"}
    run = small(tmp_path, **settings)
    fresh = run.config.policy(Lecture().space, torch.Generator().manual_seed(5))
    for now, then in zip(run.policy.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(now, then)
    assert run.metrics[-1]["frac_reward_zero_std"] == 1 and run.metrics[-1]["grad_norm"] is None
    assert not run.updates and run.result is not None and "No signal" in (words := " ".join(run.result["words"]))
    assert "Stuck" not in words and "entropy" not in words


SILENT = """
from dataclasses import dataclass, replace
import torch
from ascent.tasks.small.lecture import Lecture


@dataclass(frozen=True)
class Silent(Lecture):
    failing: bool = False

    def score(self, rollouts):
        scores = super().score(rollouts)
        silent = rollouts.version[:, :1] == 2  # what step 2 samples
        same = torch.where(silent, 1.0, scores.reward.sum(-1, keepdim=True))
        valid = scores.valid & ~(silent[..., 0] & self.failing)
        return replace(scores, reward=same, valid=valid, errors=("no verdict",) * int((~valid).sum()))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "dapo", "kl": "in-loss", "kl.target": 0.05, "reference": "moving-average", "epochs": 2},
        {"algorithm": "dapo", "update.weight_decay": 0.1, "minibatches": 3},
        {"algorithm": "ppo", "groups": "with-signal", "critic": "shared-critic"},
        {"algorithm": "ppo", "critic": "own-critic", "failing": True, "max_reward_errors": 1.0},
    ],
)
def test_a_step_without_signal_is_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """No group of step 2 has signal, or all its rewards failed: nothing moves, what was not measured is null."""
    (tmp_path / "silent.py").write_text(SILENT)
    always = {"steps": 5, "shaping": "no-shaping", "checkpoint_every": 1, "keep": 9, "eval_every": 9, "samples": 8}
    always |= {"record_rollouts": "all", "epochs": 1, "lr": 1e-3}
    task = f"python:{tmp_path / 'silent.py'}:Silent"
    run = ascent.train(task, out=tmp_path / "run", show=False, **always | settings)
    (before, at), (after, later), (_, end) = map(checkpoint.load_checkpoint, run.checkpoints[1:4])
    before, after = ({name: t for name, t in groups.items() if name != "rng"} for groups in (before, after))
    for group in before:
        assert all(torch.equal(value, after[group][name]) for name, value in before[group].items()), group
    assert at["state"] == later["state"] and ("kl_coef" not in at["state"] or later["state"] != end["state"])
    line, other = run.metrics[2], run.metrics[3]
    assert line["frac_reward_zero_std"] == 1 and "nonfinite" not in line
    for name in ("loss", "grad_norm", "entropy", "kl", "value/loss", "value/explained_variance"):
        assert line.get(name) is None and (name == "kl" or name not in other or other[name] is not None)
    failing = settings.get("failing", False)
    assert (line["reward"] is None) == (line["accuracy"] is None) == failing
    assert {update["step"] for update in run.updates} == {0, 1, 3, 4}
    assert ("no-signal" in {event.get("name") for event in run.events}) == (not failing)
    assert all(row["logp"] == [] for row in run.rollouts(2)) and ("failed" in responses(run.rollouts(2))) == failing
    whole = (run.folder / "metrics.jsonl").read_text(), checkpoint.load_checkpoint(run.checkpoints[-1])[0]
    ascent.resume(run.folder, from_step=3)
    again = checkpoint.load_checkpoint(run.checkpoints[-1])[0]
    assert all(torch.equal(value, again[group][name]) for group in again for name, value in whole[1][group].items())
    lines = [[x for x in line.items() if "time/" not in x[0]] for line in map(json.loads, whole[0].splitlines())]
    assert [[x for x in line.items() if "time/" not in x[0]] for line in run.metrics] == lines


def test_a_step_without_signal_in_a_plot_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds are averaged at the steps that all of them have measured, and not by their order."""
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "draw_line", lambda *a: drawn.append(a))
    steps = [np.array([1, 2, 4]), np.array([1, 3, 4])]
    plots._draw_band(None, [(s, 10.0 * s) for s in steps], 0, False, lambda _, common: common)
    ((_, x, y, *_),) = drawn
    assert x.tolist() == [1, 4] and y.tolist() == [10, 40]


def test_a_reward_that_is_not_finite_is_an_error_whatever_the_task_says() -> None:
    class Careless(Lecture):
        def score(self, rollouts: Any) -> Scores:
            scores = super().score(rollouts)
            return replace(scores, reward=torch.where(torch.arange(3).view(3, 1, 1) == 1, torch.inf, scores.reward))

    sampler = SmallPolicyEngine(PerPosition()(Lecture().space, torch.Generator()), 1.0, torch.Generator())
    found, errors = score_rollouts(Careless(), sampler.generate(Lecture().held_out(3), 2))
    assert found.valid.tolist() == [[True, True], [False, False], [True, True]]
    assert len(errors) == 2 and found.reward.isfinite().all()


def test_failed_responses_are_in_no_share() -> None:
    """Group 0: right, failed; group 1: both failed; group 2: wrong, failed."""
    batch = batch_of([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]).add(
        valid=torch.tensor([[True, False], [False, False], [True, False]]),
        correct=torch.tensor([[True, False], [False, False], [False, True]]),
    )
    metrics = rollout_metrics(batch)
    assert metrics["frac_all_right"] == pytest.approx(1 / 3)
    assert metrics["frac_all_wrong"] == pytest.approx(1 / 3)
    assert metrics["accuracy"] == pytest.approx(0.5)


def test_no_response_is_too_long_where_none_can_end() -> None:
    batch = batch_of([[1.0, 2.0]])
    assert Overlong(margin=1)(batch.add(can_end=False)) is None
    assert Overlong(margin=1)(batch.add(can_end=True)) is not None


def test_a_kl_of_ones_own_in_the_reward_is_applied() -> None:
    class Own(KL):
        where = "reward"
        coef = 0.5

        def shaped(self, batch: Any, kl: Any, coef: float) -> Any:
            return batch.reward - coef * 10

    batch = batch_of([[1.0, 2.0]])
    batch = batch.add(logp_ref=batch.logp_sampler, logp_old=batch.logp_sampler)
    algorithm = Algorithm(Raw(), kl=Own(), reference=Frozen())
    credited, _ = algorithm.compute_advantages(batch, algorithm.initial_state())
    assert credited.advantage is not None and credited.advantage.flatten().tolist() == [-4.0, -3.0]


def test_credit_of_a_wrong_shape_is_refused_with_the_right_one(tmp_path: Path) -> None:
    (tmp_path / "wide.py").write_text(
        "from dataclasses import dataclass\nfrom ascent.core.advantages import Advantage\n\n\n"
        "@dataclass(frozen=True)\nclass Wide(Advantage):\n    group = False\n\n"
        "    def __call__(self, batch, state):\n        return batch.reward.unsqueeze(-1)\n"
    )
    with pytest.raises((ConfigError, RunError), match=r"returned \[3, 10, 1, 1\].*\[3, 10, 1\]"):
        small(tmp_path, advantage=f"python:{tmp_path / 'wide.py'}:Wide")


@pytest.mark.parametrize("wrong", [{"max_norm": -1.0}, {"max_norm": 0.0}, {"beta1": 1.5}, {"weight_decay": -1.0}])
def test_adam_refuses_what_would_walk_downhill(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--update"):
        Adam(**wrong)


def test_a_task_that_cannot_say_what_is_right_is_trained_evaluated_and_sampled(tmp_path: Path) -> None:
    (tmp_path / "open.py").write_text(
        "from dataclasses import dataclass, replace\nfrom ascent.tasks.small.lecture import Lecture\n\n\n"
        "@dataclass(frozen=True)\nclass Open(Lecture):\n"
        "    def score(self, rollouts):\n        return replace(super().score(rollouts), correct=None)\n"
    )
    settings = {"steps": 2, "epochs": 1, "eval_every": 1, "keep_best": True, "record_every": 1}
    run = ascent.train(f"python:{tmp_path / 'open.py'}:Open", out=tmp_path / "run", show=False, **settings)
    assert run.last["eval/reward"] > 0 and run.metrics[-1]["eval/accuracy"] is None
    assert run.result is not None and "exactly right" not in "".join(run.result["words"])
    best = max(run.metrics, key=lambda line: (line["eval/reward"], -line["step"]))
    assert run.info["best"] == best["step"] + 1, "the best is that of the highest reward"
    assert panels_for(run.metrics) == POLICY_PANELS
    assert "right" not in responses(run.rollouts(0))
    assert ascent.evaluate(run.folder, samples=2, show=False).results["mean"].keys() == {"reward"}
    answer, *_ = ascent.sample(run.folder, task="own", count=1)
    assert answer["strict"] is None and "score    reward" in responses_text([answer])
