"""Actor-critic, PPO and TRPO learn, on both policies; what a run says of its critic; records hold its values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.build.assemble import assemble
from ascent.cli.main import main
from ascent.core.critics import OwnCritic
from ascent.settings import configure

TINY_SORT = {"length": 3, "numbers": 4, "policy.width": 32, "policy.layers": 1, "policy.heads": 2, "prompts": 16}
TINY_SORT |= {"samples": 8, "eval_every": 30, "eval_prompts": 50, "record_every": 1000, "threads": 1}
REGION = {"steps": 14, "prompts": 8, "update.delta": 0.1}


def rise(run: Any) -> tuple[float, float]:
    """The sampled reward at first and in the end, as shares of the largest there is."""
    rewards, most = [line["reward"] for line in run.metrics], run.config.task.max_reward
    return sum(rewards[:3]) / 3 / most, sum(rewards[-3:]) / 3 / most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "more"),
    [
        ("actor-critic", {}),
        ("ppo", {"reward": "process", "advantage.lam": 0.5, "minibatches": 2}),
        ("ppo", {"end": True, "advantage.bootstrap": True, "minibatches": 2, "critic.clip": 0.5}),
        ("trpo", {}),
    ],
    ids=str,
)
def test_the_transformer_learns(row: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Three numbers out of four, in a few steps: the reward rises by far more than chance would have it."""
    sizes = {
        "trpo": {"steps": 8, "prompts": 8, "update.delta": 0.2},
        "ppo": {"steps": 12, "lr": 15e-3},
        "actor-critic": {"steps": 18, "lr": 2e-2},
    }
    run = ascent.train("sort", out=tmp_path / "r", show=False, algorithm=row, **TINY_SORT | sizes[row] | more)
    before, after = rise(run)
    assert after > before + 0.2, (before, after)
    if row == "trpo":
        assert max(line["trust_region/kl"] for line in run.metrics) <= 0.2
        assert all(line["trust_region/accepted"] == 1 for line in run.metrics if line["frac_reward_zero_std"] < 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "more"),
    [
        ("ppo", {"minibatches": 2, "steps": 30, "lr": 7e-3}),
        pytest.param(
            "ppo", {"critic": "shared-critic", "minibatches": 2, "steps": 30, "lr": 7e-3}, marks=pytest.mark.smoke
        ),
        pytest.param(
            "trpo", {"advantage": "gae", "critic": "own-critic", "critic.steps": 5, **REGION}, marks=pytest.mark.smoke
        ),
    ],
    ids=str,
)
def test_the_critic_learns_with_the_policy(row: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Slowly enough for it to follow, though the rewards that it predicts rise meanwhile."""
    run = ascent.train("sort", out=tmp_path / "r", show=False, algorithm=row, **TINY_SORT | more)
    before, after = rise(run)
    assert after > before + 0.2, (before, after)
    assert run.metrics[-1]["value/loss"] < run.metrics[0]["value/loss"]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "more"), [("ppo", {}), ("trpo", {"epochs": 1, "update.delta": 0.1})])
@pytest.mark.smoke
def test_the_per_position_policy_learns(row: str, more: dict[str, Any], tmp_path: Path) -> None:
    more = {"exploration": "annealed", **more}
    run = ascent.train("lecture", out=tmp_path / "r", show=False, algorithm=row, steps=30, **more)
    before, after = rise(run)
    assert after > before + 0.15, (before, after)
    if row == "ppo":
        assert max(line["value/explained_variance"] for line in run.metrics) > 0.3


@pytest.mark.long
def test_what_a_run_with_a_critic_writes_down(tmp_path: Path) -> None:
    settings = {**TINY_SORT, "steps": 2, "minibatches": 2, "record_every": 1, "end": True}
    run = ascent.train("sort", out=tmp_path / "r", show=False, algorithm="ppo", **settings)
    for line in run.metrics:
        assert line["value/loss"] > 0 and line["value/explained_variance"] <= 1
        assert line["sampling/sampling_logp_difference/mean"] < 1e-5
    assert run.metrics[0]["value/explained_variance"] == 0, "a new critic says 0 everywhere"
    row = run.rollouts(1)[0]
    assert len(row["value"]) == len(row["response"]) == len(row["advantage"])
    held = {path.stem for path in (run.checkpoints[-1]).glob("*.safetensors")}
    assert held == {"params", "optimizer", "critic", "critic_optimizer", "rng"}
    assert main(["show", str(run.folder)]) == 0


def test_a_critic_draws_from_a_stream_of_its_own() -> None:
    """The policy's first parameters and its first samples are those of a run without a critic."""
    policies, drawn = [], []
    for row in ("reinforce", "ppo"):
        config = configure("sort", {"algorithm": row, "length": 3, "numbers": 4})
        parts = assemble(config)
        parts.engine.load(parts.learner.params(), 0)
        policies.append([p.detach().clone() for p in parts.policy.parameters()])
        drawn.append(parts.engine.generate(config.task.held_out(4), 3).response)
    assert all(torch.equal(p, q) for p, q in zip(*policies, strict=True))
    assert torch.equal(*drawn)
    critic = parts.learner.critic
    assert critic is not None
    assert not torch.equal(critic.backbone.token.weight, parts.policy.token.weight)


def test_a_shared_critic_saves_no_backbone_twice() -> None:
    config = configure("sort", {"algorithm": "ppo", "critic": "shared-critic", "length": 3, "numbers": 4})
    learner = assemble(config).learner
    assert set(learner.state()["critic"]) == {"head.weight", "head.bias"}
    assert learner.critic is not None and learner.critic.backbone is learner.policy
    assert len(learner.critic.trained()) == 2 and learner.critic_optimizer is None
    assert len(learner.trainable()) == len(list(learner.policy.parameters())) + 2


@pytest.mark.parametrize("broken", [1, 2])
def test_a_critic_whose_gradient_is_not_finite_ends_the_run_before_a_checkpoint(
    broken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is finite, in the first or in the second of its steps per update."""
    whole, calls = OwnCritic.loss, []

    def loss(own: OwnCritic, mini: Any, value: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        bad = (value.sum() * 0).sqrt() if len(calls) >= 2 + broken else 0  # the derivative of √0 is infinite
        return whole(own, mini, value) + bad

    monkeypatch.setattr(OwnCritic, "loss", loss)
    small = {"steps": 4, "prompts": 3, "samples": 2, "epochs": 1, "minibatches": 1, "threads": 1, "eval_every": 9}
    with pytest.raises(ascent.RunError, match=r"step 1: .* values in value/grad_norm\. .* --critic\.max-norm"):
        ascent.train(
            "lecture",
            algorithm="ppo",
            out=tmp_path / "r",
            show=False,
            checkpoint_every=1,
            **small,
            **{"critic.steps": 2},
        )
    run = ascent.load(tmp_path / "r")
    assert [path.name for path in run.checkpoints] == ["step_000001"] and run.status == "failed"
    assert run.metrics[-1]["value/grad_norm"] > 0
