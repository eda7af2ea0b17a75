"""Whole runs of choices that other tests hold to their formulas: recorded, configured anew, stopped and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.runs.display.terminal import Display
from ascent.settings import configure
from tests.runs.test_resume import bits

TINY = {"prompts": 4, "samples": 4, "steps": 4, "eval_prompts": 4, "checkpoint_every": 2, "threads": 1}
SORT = {"length": 3, "numbers": 3, "end": True, "policy.width": 8, "policy.layers": 1, "policy.heads": 2, **TINY}
TURNS = {"policy.width": 8, "policy.layers": 1, "policy.heads": 2, **TINY}
TWICE = {"epochs": 2, "minibatches": 2}
OWN = {"advantage": "v-trace", "critic": "own-critic", "critic.clip": 0.01}
SHARED = {"advantage": "v-trace", "advantage.rho": 2.0, "critic": "shared-critic", "critic.clip": 0.01}
GEOMETRIC = {"correction": "truncated", "correction.geometric": 1.2, "correction.normalized": True}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "ratio on the KL, masked": ("sort", {"algorithm": "grpo", "kl.importance": True, "groups.mask_truncated": True}),
    "absolute KL, adaptive": ("sort", {"algorithm": "grpo", "kl.estimator": "abs", "kl.target": 0.1, **TWICE}),
    "absolute KL in the reward": ("sort", {"algorithm": "reinforce++", "kl.estimator": "abs", **TWICE}),
    "floor, normalized": (
        "sort",
        {"correction": "truncated", "correction.floor": 0.9, "correction.normalized": True, **TWICE},
    ),
    "rejection, DAPO": (
        "sort",
        {"algorithm": "dapo", "shaping.margin": 1, "groups.mask_truncated": True, **GEOMETRIC},
    ),
    "per-decision": ("sort", {"loss": "ratio", "loss.form": "per-decision", "reward": "process", **TWICE}),
    "v-trace, GSPO-token": ("sort", {"loss": "sequence-ratio", **OWN, **GEOMETRIC, **TWICE}),
    "v-trace, shared critic": ("sort", {"loss": "clipped", **SHARED, **TWICE}),
    "GSPO-token, process reward": ("sort", {"algorithm": "gspo", "reward": "process", **TWICE}),
    "turns, per-decision": ("swaps", {"loss": "ratio", "loss.form": "per-decision", **GEOMETRIC, **TWICE}),
    "turns, v-trace per turn": ("swaps", {"loss": "sequence-ratio", **OWN, "advantage.per": "turn", **TWICE}),
    "turns, ratio on the KL": (
        "guess",
        {"algorithm": "grpo", "kl.importance": True, "kl.estimator": "k1", "groups.mask_truncated": True},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_its_config_and_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    task, settings = RUNS[name]
    settings = {**(SORT if task == "sort" else TURNS), **settings}
    whole = ascent.train(task, out=tmp_path / "whole", show=False, **settings)
    assert ascent.load(tmp_path / "whole").config.algorithm == configure(task, settings).algorithm
    lines = whole.metrics
    assert len(lines) == 4 and all(line["loss"] is not None for line in lines)
    if "critic.clip" in settings:
        shares = [line["value/clip_ratio"] for line in lines]
        assert all(0 <= share <= 1 for share in shares) and max(shares) > 0
    if "groups.mask_truncated" in settings or "correction.geometric" in settings:
        assert all(0 <= line["frac_masked"] <= 1 for line in lines)
    for step in ascent.steps(task, out=tmp_path / "part", **settings):
        if step.number == 1:
            step.stop()
    ascent.resume(tmp_path / "part", Display())
    one, two = bits(tmp_path / "whole"), bits(tmp_path / "part")
    assert one.keys() == two.keys() and not [key for key in one if str(one[key]) != str(two[key])]
