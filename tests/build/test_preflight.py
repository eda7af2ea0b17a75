"""What is reported before a run: memory, the self-test of the reward, and rewards that fail in the first sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ascent.build import preflight
from ascent.build.backend import PreflightReport
from ascent.build.preflight import EXACT_PARTS, memory_bytes, report_memory, report_reward, report_sample
from ascent.core.config import Config
from ascent.core.protocols import Task
from ascent.core.types import Prompts, Rollouts, Scores, Space
from ascent.rewards.reward_manager import SelfTest
from ascent.settings import configure
from ascent.training.language_learner import LanguageLearner
from tests.language import model_of, prompts_of, sampler_of

MESSAGE = "Parameters, gradients and optimizer state alone take {sure}, and there are {there}: "
FITS = "this may not fit: lower --micro-batch or --policy.rows, or set --policy.checkpointing"


def config_of(**settings: Any) -> Config:
    return configure("reasoning-gym:chain_sum", {"model": "any", "prompts": 3, "samples": 4} | settings)


def learner_of(config: Config, dtype: torch.dtype = torch.float32) -> LanguageLearner:
    algorithm = config.algorithm
    return LanguageLearner(model_of(dtype=dtype), algorithm.update, False, algorithm.outputs)


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


def reported(config: Config, learner: LanguageLearner, meminfo: Path, patch: pytest.MonkeyPatch) -> PreflightReport:
    """The report on a host that says this of its memory."""
    report = PreflightReport()
    patch.setattr(preflight, "Path", lambda path: meminfo if path == "/proc/meminfo" else Path(path))
    report_memory(config, learner, 2, report)
    return report


def test_memory_of_a_host_that_does_not_say_how_much_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of()
    learner, silent = learner_of(config), tmp_path / "silent"
    silent.write_text("MemTotal: 100 kB\nMemFree: 100 kB\n")
    total = sum(memory_bytes(config, learner, 2).values())
    for meminfo in (silent, tmp_path / "missing"):
        report = reported(config, learner, meminfo, monkeypatch)
        assert report.lines == [
            f"memory     about {mebibytes(total)}; how much is there is not known",
            "           computed in float32 (--policy.dtype)",
        ]
        assert not report.errors and not report.warnings


@pytest.mark.parametrize(
    ("settings", "dtype", "advice"),
    [
        ({}, torch.float32, "take a smaller model, or --policy.lora 16."),
        ({"policy.lora": 4}, torch.float32, "take a smaller model, or --policy.bits 4."),
        ({"policy.lora": 4, "policy.bits": 4}, torch.float32, "take a smaller model."),
        (
            {"policy.optimizer_state": "float32"},
            torch.bfloat16,
            "leave out --policy.optimizer-state, take a smaller model, or --policy.lora 16.",
        ),
        ({"policy.optimizer_state": "float32"}, torch.float32, "take a smaller model, or --policy.lora 16."),
        ({}, torch.bfloat16, "take a smaller model, or --policy.lora 16."),
    ],
)
def test_a_run_whose_state_does_not_fit_is_refused_with_what_helps(
    settings: dict[str, Any], dtype: torch.dtype, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, meminfo = config_of(**settings), tmp_path / "meminfo"
    learner = learner_of(config, dtype)
    parts = memory_bytes(config, learner, 2)
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 1 kB\n")
    report = reported(config, learner, meminfo, monkeypatch)
    sure = sum(parts[name] for name in EXACT_PARTS)
    there = parts["parameters"] + 1024
    assert sure > there
    assert report.errors == [MESSAGE.format(sure=mebibytes(sure), there=mebibytes(there)) + advice]
    assert not report.warnings


@pytest.mark.parametrize(
    ("settings", "advice"),
    [({}, ", or --policy.lora 16"), ({"policy.lora": 4}, ", or --policy.bits 4")],
)
def test_a_run_whose_activations_may_not_fit_is_warned_of(
    settings: dict[str, Any], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, meminfo = config_of(**settings), tmp_path / "meminfo"
    learner = learner_of(config)
    parts = memory_bytes(config, learner, 2)
    total, sure = sum(parts.values()), sum(parts[name] for name in EXACT_PARTS)
    for there, warnings in ((sure, [FITS + advice]), (total, [])):
        needed = -(-(there - parts["parameters"]) // 1024)
        meminfo.write_text(f"MemAvailable: {needed} kB\n")
        report = reported(config, learner, meminfo, monkeypatch)
        assert (report.warnings, report.errors) == (warnings, [])


# ---- the reward


def self_test_of(**found: Any) -> SelfTest:
    right: dict[str, Any] = {"gold": 4, "gold_passed": 4, "corrupted": 4, "corrupted_passed": 0, "gold_reward": 1.0}
    return SelfTest(**right | {"corrupted_reward": 0.0, "errors": 0, "failures": ()} | found)


@pytest.mark.parametrize(
    ("found", "refused", "warned"),
    [
        ({}, False, False),
        ({"corrupted_passed": 1, "corrupted_reward": 0.25, "failures": ("7 passes for 8",)}, False, True),
        ({"errors": 7, "failures": ("it fails",)}, False, True),
        ({"errors": 8, "failures": ("it fails",)}, True, False),
        ({"gold_reward": 0.5, "corrupted_reward": 0.5, "failures": ("all alike",)}, True, False),
        ({"gold_reward": 0.5, "corrupted_reward": 0.5, "failures": ("all alike",), "compares": False}, False, True),
    ],
)
def test_a_reward_that_fails_its_self_test_is_warned_of_or_refused(
    found: dict[str, Any], refused: bool, warned: bool
) -> None:
    report, test = PreflightReport(), self_test_of(**found)
    report_reward(test, report)
    head, *failures = test.lines()
    assert report.lines == [f"reward     {head}", *(f"           {line}" for line in failures)]
    assert report.warnings == ["the reward failed part of its self-test, above"] * warned
    noise = "The reward failed its self-test, so training would learn from noise. "
    assert report.errors == [noise + line for line in failures[:1]] * refused


class PartlyFailing(Task):
    """A task whose rewards fail for the first responses."""

    space = Space(prompt_length=4, vocab=37, limit=4)

    def __init__(self, failed: int):
        self.failed = failed

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        return Prompts.of(prompts_of()[:count])

    def score(self, rollouts: Rollouts) -> Scores:
        shape = rollouts.mask.shape[:2]
        reward = torch.arange(float(shape[0] * shape[1])).view(*shape, 1)
        errors = tuple(f"reward {i} failed" for i in range(self.failed))
        return Scores(reward, reward[..., 0] >= self.failed, None, errors)


@pytest.mark.parametrize(("failed", "silent"), [(0, 0), (1, 0), (3, 1)])
def test_rewards_that_fail_in_the_sample_are_counted_and_the_first_is_shown(failed: int, silent: int) -> None:
    config, report = config_of(prompts=2), PreflightReport()
    report_sample(config, PartlyFailing(failed), sampler_of(model_of(), limit=4), report)
    expected = [f"{failed} rewards failed. The first: reward 0 failed"] if failed else []
    assert [warning for warning in report.warnings if "failed" in warning] == expected
    assert report.lines[0].startswith(f"sample     2 groups of 4: {silent} of 2 groups without signal,")
