"""Whose log-probs logp_old is: rounding between sampler and learner must reach no bound of a loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SAMPLED, batch_of

import ascent as library
from ascent import api
from ascent.build.assemble import assemble
from ascent.build.old_logp import Effect, needs_measurement, resolve
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.config import Config
from ascent.core.types import Batch
from ascent.runs.display.terminal import Display
from ascent.settings import configure

HALF = 0.012
"""The standard deviation of what bfloat16 leaves between sampler and learner: 0.0096 on average."""


def gap_of(spread: float, tokens: int = 32, mass: float | None = None) -> Batch:
    """Four groups of eight responses, with the learner's log-probs and a sampler's that are this far from them."""
    rng = torch.Generator().manual_seed(0)
    shape = (4, 8, tokens)
    logp = -2 * torch.rand(shape, generator=rng)
    batch = batch_of(torch.zeros(shape[:2]), torch.full(shape[:2], tokens))
    noise = spread * torch.randn(shape, generator=rng)
    kept = None if mass is None else torch.full(shape, mass)
    return batch.add(logp_old=logp, logp_sampler=logp + noise, kept_mass=kept)


def resolved(spread: float, mass: float | None = None, tokens: int = 32, **settings: Any) -> tuple[Config, str]:
    config, notes = resolve(configure("sort", settings), gap_of(spread, tokens, mass))
    return config, " | ".join(notes)


def test_gspo_does_not_clip_rounding_noise() -> None:
    """Its bounds of 3e-4 are far inside bfloat16's noise, so logp_old is the learner's. They are wide for float32's."""
    config, why = resolved(HALF, algorithm="gspo")
    assert config.old_logp == "learner"
    assert "--old-logp learner was chosen" in why and "outside the bounds of --loss sequence-ratio" in why
    config, why = resolved(1e-6, algorithm="gspo")
    assert (config.old_logp, why) == ("sampler", "")


@pytest.mark.parametrize(("name", "spread", "old"), [("grpo", 1e-3, "sampler"), ("grpo", HALF, "learner")])
def test_a_ratio_per_token_bears_more_noise(name: str, spread: float, old: str) -> None:
    """A gradient that noise changes by more than half a percent is not the policy's, though nothing is clipped."""
    config, why = resolved(spread, algorithm=name)
    assert config.old_logp == old and ("of the gradient" in why) == (old == "learner")


def test_the_effect_on_a_loss_is_measured_on_the_loss_itself() -> None:
    """By hand: ρ is e^0.1 everywhere, so the slope of ρ·δ is 10.5 % too large; clipped at 1.05 it is 0 for δ > 0."""
    logp = torch.zeros(1, 2, 3)
    noise, counted = torch.full_like(logp, -0.1), torch.ones_like(logp, dtype=torch.bool)
    free = Effect.of(ALGORITHMS["trpo"].loss, logp, noise, counted)
    assert free.grad_change == pytest.approx(0.10517, abs=1e-4) and free.clipped_fraction == 0
    clipped = Effect.of(configure("sort", {"loss": "clipped", "loss.high": 0.05}).algorithm.loss, logp, noise, counted)
    assert (clipped.grad_change, clipped.clipped_fraction) == (1.0, 1.0)
    assert Effect.of(ALGORITHMS["reinforce"].loss, logp, noise, counted) == Effect(0.0, 0.0)


@pytest.mark.parametrize("old", ["sampler", "learner"])
def test_an_explicit_old_logp_is_honored_with_a_warning(old: str) -> None:
    config, why = resolved(HALF, algorithm="gspo", old_logp=old)
    assert config.old_logp == old
    assert ("warning: the log-probs of sampler and learner" in why) == (old == "sampler")


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo"])
def test_every_bound_that_the_gap_reaches_is_warned_of(name: str) -> None:
    near = {"algorithm": name, "old_logp": "sampler", "shaping": "no-shaping"}
    assert resolved(HALF, **near)[1] == ""
    assert "outside the bounds of --loss clipped" in resolved(0.2, **near)[1]


def test_a_sequence_level_correction_warns_where_top_p_makes_it_drop_responses() -> None:
    """A kept mass of 0.9 per token is 0.03 over 32 tokens: below the band of `masked`, whatever the policy does."""
    masked = {"algorithm": "grpo", "correction": "masked", "correction.level": "sequence"}
    config, why = resolved(1e-6, mass=0.9, **masked)
    assert config.old_logp == "learner" and "drops 100%" in why and "--top-p" in why
    assert resolved(1e-6, mass=0.9, **masked | {"correction.level": "token"})[1] == ""
    assert resolved(1e-6, **masked)[1] == ""
    assert "cuts the weights" in resolved(0.03, tokens=2000, **masked)[1], "rounding alone, over a long response"


def test_a_correction_that_rejects_responses_by_their_geometric_mean_is_warned_of() -> None:
    """No mean of 32 noises is exactly 0, so a bound of 1 drops every response; one of 2 drops none."""
    settings = {"algorithm": "grpo", "correction": "truncated"}
    narrow = resolved(HALF, **settings, **{"correction.geometric": 1.0})[1]
    assert "warning: --correction truncated cuts the weights of 100% of the tokens and drops 100%" in narrow
    assert "cuts the weights" not in resolved(HALF, **settings, **{"correction.geometric": 2.0})[1]


@pytest.mark.long
def test_float32_has_no_gap_to_measure() -> None:
    def asked(dtype: torch.dtype, **settings: Any) -> bool:
        return needs_measurement(configure("sort", settings), dtype)

    ratio = [name for name in SAMPLED if asked(torch.bfloat16, algorithm=name)]
    assert set(SAMPLED) - set(ratio) == {"reinforce", "reinforce-baseline", "best-only", "rloo", "actor-critic"}
    assert not any(asked(dtype, algorithm=name) for name in SAMPLED for dtype in (torch.float32, torch.float64))
    assert asked(torch.float32, correction="truncated") and asked(torch.float16, algorithm="gspo")
    assert not asked(torch.bfloat16, algorithm="sft")


@pytest.mark.long
def test_the_resolved_old_logp_is_in_config_json(tmp_path: Path) -> None:
    small = {"length": 3, "numbers": 4, "prompts": 3, "samples": 3, "steps": 1, "eval_prompts": 4}
    for name, extra in {"plain": {}, "corrected": {"correction": "truncated"}}.items():
        run = library.train("sort", out=tmp_path / name, show=False, **small, **extra)
        written = json.loads((run.folder / "config.json").read_text())["old_logp"]
        assert written == run.config.old_logp == {"plain": "sampler", "corrected": "learner"}[name]


@pytest.mark.long
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_one_update_needs_no_forward_pass_for_the_learners_old_logp(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own log-probs are those of a pass before it: the same parameters and records, without the pass."""
    small = {"length": 3, "numbers": 4, "prompts": 3, "samples": 3, "steps": 2, "eval_prompts": 4}
    runs, needs = [], Algorithm.needs.fget
    for passes in (False, True):
        if passes:
            monkeypatch.setattr(Algorithm, "needs", property(lambda row: needs(row) | {"logp_old"}))
        settings = {"algorithm": name, "old_logp": "learner", **small}
        runs.append(library.train("sort", out=tmp_path / str(passes), show=False, **settings))
    first, second = ((run.checkpoint() / "params.safetensors").read_bytes() for run in runs)
    assert first == second
    for key in ("logp_old", "logp", "advantage"):
        assert [row[key] for row in runs[0].rollouts(0)] == [row[key] for row in runs[1].rollouts(0)]
    kept = [{k: v for k, v in line.items() if not k.startswith("time/")} for run in runs for line in run.metrics]
    assert kept[:2] == kept[2:]


# ---- a language model in bfloat16 -----------------------------------------------------------------


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """A task with short prompts: products in bfloat16 are slow on a CPU that has none."""
    rows = [{"prompt": f"{i} + 1", "answer": str(i + 1)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{tmp_path / 'rows.jsonl'}"


def settings_of(model: Path, **more: Any) -> dict[str, Any]:
    shape = {
        "prompts": 2,
        "samples": 2,
        "steps": 2,
        "max_tokens": 4,
        "eval_prompts": 1,
        "checkpoint_every": 1,
        "reward_workers": 1,
    }
    return {"model": str(model), "algorithm": "gspo", "policy.dtype": "bfloat16", **shape, **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"policy.lora": 2, "temperature": 0.7, "top_p": 0.9}, marks=pytest.mark.smoke),
        pytest.param({"algorithm": "ppo", "steps": 1}, marks=pytest.mark.smoke),
    ],
    ids=["every parameter", "LoRA and top-p", "a critic"],
)
def test_a_run_in_bfloat16_resolves_its_old_logp_and_moves_no_stream(
    more: dict[str, Any], tiny_folder: Path, tmp_path: Path, questions: str
) -> None:
    """Nothing is clipped in its first update, and it draws what a run draws that was told."""
    settings = settings_of(tiny_folder, **more)
    auto = library.train(questions, out=tmp_path / "auto", show=False, preflight=False, **settings)
    assert auto.config.old_logp == "learner"
    assert auto.metrics[0]["sampling/sampling_logp_difference/mean"] > 1e-3
    assert auto.metrics[0]["clip_ratio/low_mean"] == auto.metrics[0]["clip_ratio/high_mean"] == 0
    told = library.train(questions, out=tmp_path / "told", show=False, preflight=False, old_logp="learner", **settings)
    for one, other in zip(auto.checkpoints, told.checkpoints, strict=True):
        assert (one / "params.safetensors").read_bytes() == (other / "params.safetensors").read_bytes()
    assert [row["response"] for row in auto.rollouts(0)] == [row["response"] for row in told.rollouts(0)]


@pytest.mark.slow
def test_a_resume_keeps_the_old_logp_that_was_resolved(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, questions: str
) -> None:
    settings = settings_of(tiny_folder)
    whole = library.train(questions, out=tmp_path / "run", show=False, preflight=False, **settings)
    monkeypatch.setattr("ascent.build.old_logp.measure_gap", None)
    again = api.resume(whole.folder, Display(), from_step=1)
    assert again.config.old_logp == "learner"
    assert again.metrics[1]["clip_ratio/high_mean"] == 0


@pytest.mark.slow
def test_the_gap_is_measured_once_and_said(tiny_folder: Path, questions: str) -> None:
    parts = assemble(configure(questions, settings_of(tiny_folder)))
    before = {name: state.clone() for name, state in parts.streams.state().items()}
    parts.resolve_old_logp()
    assert parts.config.old_logp == "learner" and "--old-logp learner was chosen" in parts.notes[-1]
    assert all(torch.equal(state, before[name]) for name, state in parts.streams.state().items())
    said = len(parts.notes)
    parts.resolve_old_logp()
    assert len(parts.notes) == said
    parts.close()
