"""Short trials: what they predict by hand, and that they leave a run as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from language import model_of, prompts_of, sampler_of

from ascent.build import trial_timings
from ascent.build.trial_timings import (
    TimedCall,
    format_duration,
    sampling_costs,
    sampling_seconds,
    update_rate,
    update_seconds,
)
from ascent.core.algorithms import ALGORITHMS
from ascent.core.types import Prompts
from ascent.settings import configure
from ascent.training.language_learner import LanguageLearner
from ascent.training.micro_batches import update_operations

cost = st.floats(1e-5, 10)


@given(cost, cost, cost)
def test_the_costs_of_sampling_are_those_that_the_calls_had(e: float, a: float, b: float) -> None:
    shapes = [(4, 200, 4 * 8 * 90), (1, 16, 8 * 16), (32, 16, 32 * 8 * 16)]
    calls = [TimedCall(e * p + a * s + b * t, p, s, t) for p, s, t in shapes]
    for (p, s, t), call in zip(shapes, calls, strict=True):
        found = sampling_costs(calls)
        assert min(found) >= 0 and sum(x * y for x, y in zip(found, (p, s, t), strict=True)) == pytest.approx(
            call.seconds, rel=1e-3
        )


def test_no_cost_is_below_zero_whatever_the_clock_says() -> None:
    """The short calls alone would say that a prompt costs less than nothing."""
    found = sampling_costs([TimedCall(10.0, 4, 100, 3200), TimedCall(0.1, 1, 16, 128), TimedCall(0.05, 32, 16, 4096)])
    assert min(found) >= 0 < max(found)
    assert min(sampling_costs([TimedCall(1.0, 1, 8, 8)] * 3)) >= 0, "one group of one response: all calls are the same"


def test_responses_of_a_lane_follow_on_each_other() -> None:
    """2 s per prompt, 3 s per step, 5 s per token: 4 prompts × 2 responses of 10 tokens on 8 lanes, then on 2."""
    assert sampling_seconds([2, 3, 5], 4, 2, 8, 10.0, 12) == 2 * 4 + 3 * 12 + 5 * 80
    assert sampling_seconds([2, 3, 5], 4, 2, 2, 10.0, 12) == 2 * 4 + 3 * 40 + 5 * 80


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_the_trial_of_an_update_leaves_the_learner_as_it_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, algorithm = model_of(kind, dtype=torch.float32), ALGORITHMS["grpo"]
    learner = LanguageLearner(lm, algorithm.update, True, algorithm.outputs)
    before, random = [p.clone() for p in learner.trainable()], torch.get_rng_state()
    times = iter([10.0, 12.0])
    monkeypatch.setattr(trial_timings.time, "perf_counter", lambda: next(times))
    rate = update_rate(learner, 5, 100)
    assert rate == update_operations(lm, [5], [[64] * 4])[0] / 2, "responses of at most 64 tokens, 256 in all"
    assert all(p.grad is None for p in learner.trainable()) and torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(p, old) for p, old in zip(learner.trainable(), before, strict=True))


def test_an_update_counts_its_epochs_its_critic_and_what_is_scored(tiny_folder: Any, tmp_path: Any) -> None:
    lm = model_of(dtype=torch.float32)
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "1", "answer": "1"}\n' * 4)

    def seconds(**more: Any) -> float:
        given = {"model": str(tiny_folder), "prompts": 3, "samples": 2, "old_logp": "sampler", **more}
        config = configure(f"jsonl:{file}", given)
        learner = LanguageLearner(lm, config.algorithm.update, False, frozenset())
        return update_seconds(config, learner, 1e6, 7, 20)

    once = update_operations(lm, [7] * 3, [[20] * 2] * 3)[0] / 1e6
    assert seconds(algorithm="dr-grpo") == pytest.approx(once)
    assert seconds(algorithm="dr-grpo", epochs=3, old_logp="learner") == pytest.approx((3 + 1 / 3) * once)
    assert seconds(algorithm="grpo") == pytest.approx(4 / 3 * once), "the reference is scored"
    assert seconds(algorithm="ppo") == pytest.approx((2 + 1 / 3) * once), "the critic is trained too"
    shared = seconds(algorithm="ppo", critic="shared-critic")
    assert shared == pytest.approx((1 + 1 / 3) * once), "one backward pass for both"


def test_a_call_counts_prompts_steps_and_tokens() -> None:
    rollouts, call = trial_timings.time_generation(sampler_of(model_of(), rows=5), Prompts.of(prompts_of()), 4, 6)
    length = rollouts.mask.sum(-1)
    assert call[1:] == (3, int(length.max()), int(length.sum())) and call.seconds > 0 and call.steps == 6


def test_durations_are_said_in_their_own_unit() -> None:
    assert [format_duration(x) for x in (0.0123, 4.56, 99, 150, 7200)] == ["0.012 s", "4.6 s", "99 s", "2 min", "2.0 h"]
