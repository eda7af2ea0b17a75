"""Alerts are raised if there is evidence, and only then: a false alarm is worse than a missed alert."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ascent
from ascent.core.metric_names import MISMATCH
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.runs.alerts import trend_alerts
from ascent.runs.alerts.step_alerts import MIN_PROMPTS, findings, one_answer, reward_weights, with_evidence
from ascent.runs.alerts.trend_alerts import KEYS, LENGTH, MAX_BLOCKS, RunAlerts, alert_events
from ascent.runs.recorded_conversation import environment_failed
from ascent.tasks.small import sorting
from ascent.tasks.small.multi_turn import Swapping, Swaps
from ascent.tasks.small.sorting import Sort
from tests.cases import mostly_smokes

Line = dict[str, Any]
Shape = Callable[[float], float]
"""A metric as a function of the share of the run."""


def rising(low: float, high: float, begin: float = 0.0, end: float = 1.0) -> Shape:
    return lambda t: low + (high - low) * min(1.0, max(0.0, (t - begin) / (end - begin)))


def flat(value: float) -> Shape:
    return lambda _: value


def curve(steps: int = 200, responses: int = 128, seed: int = 0, spread: float = 0.4, **shapes: Shape) -> list[Line]:
    """Return metric lines that follow these shapes, with the noise of `responses` responses per step."""
    rng = np.random.default_rng(seed)
    given = {
        "reward": flat(0.5),
        "accuracy": flat(0.1),
        "entropy": flat(1.0),
        LENGTH: flat(100.0),
        MISMATCH: flat(0.004),
    }
    given |= {LENGTH if name == "length" else MISMATCH if name == "mismatch" else name: s for name, s in shapes.items()}
    lines = []
    for step in range(steps):
        line: Line = {"step": step, "reward_std": spread}
        for name, shape in given.items():
            mean = shape(step / steps)
            noise = {"accuracy": 0.0, "entropy": 0.05 * mean, MISMATCH: 0.2 * mean, LENGTH: 3.0}.get(
                name, spread / math.sqrt(responses)
            )
            line[name] = float(mean + noise * rng.standard_normal())
        line["accuracy"] = rng.binomial(responses, min(1.0, max(0.0, given["accuracy"](step / steps)))) / responses
        lines.append(line)
    return lines


def names(lines: list[Line], maximum: float | None = None, weights: dict[str, float] | None = None) -> set[str]:
    watch = RunAlerts(maximum, weights)
    return {alert.name for line in lines for alert in watch.see(line)}


FIRES: dict[str, list[tuple[dict[str, Any], float | None, dict[str, float] | None]]] = {
    "reward-up-accuracy-flat": [
        ({"reward": rising(0.3, 1.0)}, 1.0, {}),
        ({"reward": rising(0.3, 1.0)}, None, {}),
        ({"reward": rising(0.3, 1.0), "accuracy": rising(0.2, 0.1)}, 1.0, {}),
        ({"reward": rising(0.3, 1.0, 0.6), "accuracy": rising(0.0, 0.4, 0.0, 0.3), "steps": 2000}, 1.0, {}),
        ({"reward": rising(0.2, 2.0, 0.0, 0.4), "accuracy": flat(0.0)}, None, {}),
    ],
    "reward-up-accuracy-flat, though right answers begin": [
        (
            {"reward": rising(7.4, 8.95, 0, 0.3), "accuracy": rising(0.02, 0.1, 0, 0.3), "spread": 1.0, "steps": 64},
            9.0,
            {},
        )
    ],
    "length-drift": [
        ({"length": rising(100, 250)}, None, {}),
        ({"length": rising(100, 30)}, None, {}),
        ({"length": rising(100, 250, 0.5), "accuracy": rising(0.1, 0.6, 0.0, 0.4), "steps": 1000}, None, {}),
    ],
    "component-dominates": [
        (
            {"reward": rising(0.3, 0.9), "rewards/form": rising(0.4, 3.4), "rewards/own": flat(0.1)},
            None,
            {"rewards/form": 0.2, "rewards/own": 1.0},
        ),
        (
            {"reward": rising(0.5, 1.1), "rewards/form/mean": rising(0.4, 1.0), "rewards/own/mean": flat(0.1)},
            None,
            None,
        ),
    ],
    "entropy-collapse": [({"entropy": rising(1.0, 0.02, 0.0, 0.3)}, None, {})],
    "mismatch-rising": [
        ({"mismatch": rising(0.004, 0.06)}, None, {}),
        ({"mismatch": rising(0.002, 0.2, 0.6, 0.65)}, None, {}),
    ],
    "unparsed-calls": [
        ({"tools/calls": flat(1.5), "tools/unparsed": flat(0.6)}, None, {}),
        ({"tools/calls": rising(0.5, 2.0), "tools/unparsed": rising(0.1, 1.2)}, None, {}),
    ],
    "repeated-calls": [({"tools/calls": rising(1.0, 4.0), "tools/repeated": rising(0.1, 3.0)}, None, {})],
    "truncated-turns": [({"turns": flat(3.0), "turns/cut": rising(0.2, 2.0)}, None, {})],
    "turns-growing": [
        ({"turns": rising(2.0, 6.0)}, None, {}),
        ({"turns": rising(2.0, 6.0), "reward": rising(0.6, 0.4)}, 1.0, {}),
    ],
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "case"), [(name, i) for name, cases in FIRES.items() for i in range(len(cases))])
def test_alert_is_raised_for_its_evidence(name: str, case: int, seed: int) -> None:
    shapes, maximum, weights = FIRES[name][case]
    assert name.split(",")[0] in names(curve(seed=seed, **shapes), maximum, weights)


SILENT: dict[str, tuple[dict[str, Any], float | None, dict[str, float] | None]] = {
    "nothing moves": ({}, 1.0, {}),
    "nothing moves, few responses": ({"responses": 6}, 1.0, {}),
    "a long run": ({"steps": 3000, "responses": 16}, 1.0, {}),
    "it learns": (
        {"reward": rising(0.1, 1.0), "accuracy": rising(0.02, 0.95), "entropy": rising(1.0, 0.03)},
        1.0,
        {},
    ),
    "it learns to think longer": (
        {"reward": rising(0.2, 0.6), "accuracy": rising(0.2, 0.6), "length": rising(100, 400)},
        1.0,
        {},
    ),
    "it is solved early, then grows short": (
        {"reward": rising(0.2, 1, 0, 0.2), "accuracy": rising(0.2, 0.97, 0, 0.2), "length": rising(100, 40, 0.3)},
        1.0,
        {},
    ),
    "solved, the reward still creeps up": (
        {"reward": rising(0.5, 1.0), "accuracy": flat(0.96), "entropy": rising(1.0, 0.01)},
        1.0,
        {},
    ),
    "a reward in small parts, before the first right answer": (
        {"reward": rising(0.1, 0.5), "accuracy": rising(0.0, 0.02, 0.8), "spread": 0.1},
        1.0,
        {},
    ),
    "the lecture: a third of what there is to gain, before the first right answer": (
        {"reward": rising(2.6, 3.6, 0, 0.5), "accuracy": flat(0.0), "spread": 0.5, "steps": 100},
        5.0,
        {},
    ),
    "nearly all is earned, and right answers follow late": (
        {"reward": rising(0.6, 4.9, 0, 0.5), "accuracy": rising(0.0, 0.9, 0.25, 1.0), "spread": 0.7},
        5.0,
        {},
    ),
    "the same, with a reward of one's own": (
        {"reward": rising(0.1, 0.5), "accuracy": flat(0.0), "spread": 0.1},
        None,
        {},
    ),
    "the form is learned, and the answers with it": (
        {"reward": rising(0.3, 1.4), "rewards/form": rising(0.3, 0.9, 0, 0.3), "accuracy": rising(0.1, 0.7)},
        None,
        {"rewards/form": 0.5},
    ),
    "what is right moves the reward": (
        {
            "reward": rising(0.3, 0.9),
            "rewards/own": rising(0.1, 0.7),
            "rewards/form": flat(0.2),
            "accuracy": rising(0.1, 0.7),
        },
        None,
        {"rewards/own": 1.0, "rewards/form": 1.0},
    ),
    "two parts share the movement": (
        {"reward": rising(0.2, 0.8), "rewards/a": rising(0.1, 0.4), "rewards/b": rising(0.1, 0.4)},
        2.0,
        {"rewards/a": 1.0, "rewards/b": 1.0},
    ),
    "parts of unknown weight": (
        {"reward": rising(0.2, 0.8), "rewards/a": rising(0.1, 0.2), "rewards/b": flat(0.5)},
        2.0,
        None,
    ),
    "solved, and ever shorter": ({"reward": flat(1.0), "accuracy": flat(0.97), "length": rising(100, 40)}, 1.0, {}),
    "certain, and mostly right": ({"accuracy": flat(0.7), "entropy": rising(1.0, 0.02, 0, 0.3)}, 1.0, {}),
    "parts that do not add up to the reward": (
        {"reward": rising(0.2, 0.8), "rewards/a": rising(0.1, 0.7), "rewards/b": flat(5.0)},
        2.0,
        None,
    ),
    "the entropy falls by half": ({"entropy": rising(1.0, 0.4)}, 1.0, {}),
    "the entropy is low, and the accuracy rises": (
        {"entropy": rising(1.0, 0.02, 0, 0.3), "accuracy": rising(0.05, 0.45), "reward": rising(0.05, 0.45)},
        1.0,
        {},
    ),
    "a mismatch of rounding": ({"mismatch": rising(1e-8, 1e-5)}, 1.0, {}),
    "a mismatch that is large from the start": ({"mismatch": flat(0.08)}, 1.0, {}),
    "calls are learned: fewer and fewer do not parse": (
        {"tools/calls": rising(0.5, 1.5), "tools/unparsed": rising(0.45, 0.3, 0, 0.9), "turns": rising(1.5, 2.4)},
        None,
        {},
    ),
    "few calls do not parse, or are made again": (
        {"tools/calls": flat(2.0), "tools/unparsed": flat(0.2), "tools/repeated": flat(0.3), "turns": flat(3.0)},
        None,
        {},
    ),
    "many calls are made again, and the task is solved": (
        {"tools/calls": flat(2.0), "tools/repeated": flat(1.2), "accuracy": flat(0.96), "reward": flat(0.96)},
        1.0,
        {},
    ),
    "more turns, and more reward": (
        {"turns": rising(1.2, 4.0), "reward": rising(0.2, 0.7), "accuracy": rising(0.2, 0.7)},
        1.0,
        {},
    ),
    "fewer turns: numbers are found sooner": (
        {"turns": rising(6.0, 3.3), "reward": rising(-0.5, 0.66), "accuracy": rising(0.3, 1.0)},
        1.0,
        {},
    ),
    "a few more turns": ({"turns": rising(3.0, 3.8), "turns/cut": flat(0.3)}, 1.0, {}),
    "one step far off": ({"mismatch": lambda t: 2.0 if t == 0.5 else 0.004}, 1.0, {}),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", SILENT)
def test_ordinary_run_raises_no_alert(case: str, seed: int) -> None:
    shapes, maximum, weights = SILENT[case]
    assert names(curve(seed=seed, **shapes), maximum, weights) == set()


def test_noise_raises_no_alert() -> None:
    """Thirty runs without a trend, with few responses and slow oscillations, raise no alert."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        wave, turn = rng.uniform(0.01, 0.05), rng.uniform(0, 6)
        lines = curve(
            400,
            responses=int(rng.integers(4, 64)),
            seed=seed,
            reward=lambda t, w=wave, x=turn: 0.5 + w * math.sin(9 * t + x),
            accuracy=lambda t, w=wave, x=turn: 0.3 + w * math.sin(9 * t + x),
        )
        assert names(lines, 1.0, {}) == set(), seed


def test_evidence_of_unparsed_calls_is_their_count_before_and_now() -> None:
    watch = RunAlerts()
    lines = curve(**{"tools/calls": flat(2.0), "tools/unparsed": rising(0.5, 1.5)})  # type: ignore[arg-type]
    alert = next(alert for line in lines for alert in watch.see(line))
    assert alert.name == "unparsed-calls" and alert.metrics.keys() == {"tools/unparsed", "tools/calls"}
    before, now = alert.metrics["tools/unparsed"]
    assert before < now and "calls that do not parse: from steps 0–" in alert.text and "of all calls" in alert.text


class Slippery(Swapping):
    def step(self, action: str) -> ascent.Step:
        step = super().step(action)
        if "slipped" in step.reason:
            raise ValueError("fell over")
        return step


class Falls(Swaps):
    def make_environment(self) -> Slippery:
        return Slippery(self.turns, self.slip, self.outcome)


def test_environment_and_reward_failures_raise_separate_alerts(tmp_path: Path) -> None:
    how: dict[str, Any] = {"steps": 1, "prompts": 8, "samples": 4, "max_reward_errors": 1.0, "show": False}
    (event,) = ascent.train(Falls(), out=tmp_path / "falls", **how).events
    assert event["name"] == "environment-errors" and event["evidence"]["rollouts"]["show"] == "failed"
    assert 0 < event["evidence"]["metrics"]["reward_errors"][0] < 32
    assert re.search(r"the environment failed on \d+ of 32 responses.*failed: ValueError: fell over", event["text"])
    assert not environment_failed("RuntimeError: failed: no") and environment_failed("turn 1: a; turn 2: failed: no")


# ---- what the watch remembers -----------------------------------------------------------------------


def test_run_alerts_cover_the_run_in_bounded_memory() -> None:
    watch = RunAlerts()
    for line in curve(3000):
        watch.see(line)
        assert len(watch.blocks) < MAX_BLOCKS and len(watch._waiting) < watch._size
    assert watch.blocks[0].first == 0 and watch.blocks[-1].last >= 3000 - 1 - watch._size
    for one, other in zip(watch.blocks, watch.blocks[1:], strict=False):
        assert one.last + 1 == other.first and one.last - one.first == other.last - other.first
    assert sum(block.sums[0] for block in watch.blocks) == watch.blocks[-1].last + 1


def test_run_alerts_are_rebuilt_from_lines_after_a_resume() -> None:
    """The lines of the file restore the state at any step, also in the middle of a block."""
    shapes = {"reward": rising(0.3, 1.0), "entropy": rising(1.0, 0.02, 0, 0.3), "length": rising(100, 300)}
    lines = curve(300, **shapes)
    lines[20]["reward"] = float("nan")
    lines[21] |= {"eval/accuracy": 0.25, "eval/reward": 0.5}
    lines[30]["entropy"] = None
    lines[40]["kl"], lines[250]["grad_norm"] = 1e16, float("inf")
    kept = [json.loads(json.dumps(line).replace("NaN", "null")) for line in lines]
    whole = RunAlerts(1.0, {})
    said = [[alert.event(line["step"], 0) for alert in whole.see(line)] for line in lines]
    assert sum(map(len, said)) > 3
    for cut in (1, 37, 63, 128, 130, 299):
        again = RunAlerts(1.0, {})
        for line in kept[:cut]:
            again.see(line)
        assert [[alert.event(line["step"], 0) for alert in again.see(line)] for line in lines[cut:]] == said[cut:]
        assert vars(again) == vars(whole)


def test_unmeasured_metrics_are_no_evidence() -> None:
    for missing in KEYS:
        lines = [
            {k: v for k, v in line.items() if k != missing}
            for line in curve(reward=rising(0.3, 1), length=rising(9, 99))
        ]
        assert names(lines, 1.0, {}) <= {"reward-up-accuracy-flat", "length-drift"}
    assert names([{"step": i} for i in range(100)]) == set()
    odd = [{"step": i, "reward": "1", "accuracy": None, "entropy": float("inf")} for i in range(100)]
    assert names(odd) == set()


def test_evidence_is_before_and_now() -> None:
    watch = RunAlerts(1.0, {})
    found = [
        (line["step"], alert)
        for line in curve(reward=rising(0.3, 1.0), accuracy=flat(0.1))
        for alert in watch.see(line)
        if alert.name == "reward-up-accuracy-flat"
    ]
    step, alert = found[0]
    event = json.loads(json.dumps(alert.event(step, 40)))
    assert (event["step"], event["event"], event["name"]) == (step, "alert", "reward-up-accuracy-flat")
    evidence = event["evidence"]
    before, now = evidence["metrics"]["reward"]
    assert 0.25 < before < now < 1.05 and evidence["steps"][1] == step
    assert evidence["metrics"]["accuracy"] == pytest.approx([0.1, 0.1], abs=0.02)
    assert evidence["rollouts"] == {"step": 40, "show": "wrong", "q": ""}
    assert "rollouts" not in alert.event(step, None)["evidence"]
    assert "hack" not in event["text"] and f"{now:.3g}" in event["text"]


def test_alerts_use_metric_names_and_do_not_import_torch() -> None:
    assert trend_alerts.MISMATCH == MISMATCH
    code = "import sys, ascent.runs.alerts.trend_alerts; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---- out of scale ------------------------------------------------------------------------------------


def said_at(key: str, values: list[Any]) -> list[int]:
    """Return the steps at which a metric with these values is out of scale."""
    watch = RunAlerts()
    seen = [watch.see({"step": step, key: value}) for step, value in enumerate(values)]
    return [step for step, alerts in enumerate(seen) if any(alert.name == "out-of-scale" for alert in alerts)]


@pytest.mark.parametrize(
    ("key", "values", "steps"),
    [
        ("kl", [1e16, 1e16], [0, 1]),
        ("grad_norm", [1e16], [0]),
        ("grad_norm", [0.3] * 20 + [4e5, 0.3], [20]),
        ("kl", [1e-5] * 20 + [12.0], [20]),
        ("grad_norm", [0.3] * 10 + [4e5], []),  # too early to know what is usual
        ("grad_norm", [0.3] * 20 + [4e3], []),  # a spike, as there are many
        ("grad_norm", [1e-9] * 20 + [30.0], []),  # solved, then moved again
        ("grad_norm", [2e4] * 40, []),  # large rewards
        ("kl", [1e-9] * 20 + [0.5], []),
        ("kl", [0.0, -1.0, None, float("nan"), float("inf"), "1e16"], []),
    ],
)
def test_out_of_scale_values_raise_an_alert(key: str, values: list[Any], steps: list[int]) -> None:
    assert said_at(key, values) == steps


def test_a_run_out_of_scale_has_its_evidence() -> None:
    (alert,) = RunAlerts().see({"step": 0, "kl": 1.5e16, "grad_norm": 0.1})
    assert alert.metrics == {"kl": [1.5e16]} and alert.steps == (0, 0)
    assert alert.text == "out of scale: the KL in nats per token is 1.5e+16 in this step"


# ---- one answer -------------------------------------------------------------------------------------


def answers(prompts: int, same: float, right: float | None, samples: int = 8) -> list[tuple[str, str, bool | None]]:
    """Return responses of which a fraction `same` are one text, and a fraction `right` of those are right."""
    found = []
    for i in range(prompts * samples):
        one = i < same * prompts * samples
        correct = None if right is None else (i < right * same * prompts * samples if one else False)
        found.append((f"prompt {i % prompts}", "42" if one else f"other {i}", correct))
    return found


@pytest.mark.parametrize(
    ("given", "fires"),
    [
        ((16, 0.8, 0.0), True),
        ((16, 0.8, 0.5), True),
        ((16, 1.0, None), True),
        ((16, 0.8, 0.9), False),  # it is the answer to most of them
        ((16, 0.5, 0.0), False),
        ((16, 0.8, None), False),
        ((MIN_PROMPTS - 1, 1.0, 0.0), False),
    ],
)
def test_one_answer_for_many_prompts(given: tuple[int, float, float | None], fires: bool) -> None:
    assert bool(one_answer(3, answers(*given), str)) == fires


def test_one_repeated_prompt_is_no_evidence() -> None:
    assert one_answer(3, [("the same", "42", False)] * 64, str) == []


def test_one_answer_alert_quotes_the_text_and_has_a_search() -> None:
    given = answers(16, 1.0, 0.0)
    (alert,) = one_answer(3, given, lambda _: "the answer {is}\n\n<b>42</b>")
    assert "'the answer {is} <b>42</b>' is 128 of 128 responses, to 16 of 16 prompts, 0% of them" in alert.text
    assert alert.q == "the answer {is}" and alert.steps == (3, 3)
    assert alert.metrics == {"share of one text": [1.0], "right among them": [0.0]}, "no name of a metric"
    (alert,) = one_answer(3, given, lambda _: "long " * 100)
    assert len(alert.q) <= 120 and "…" in alert.text
    (alert,) = one_answer(3, given, lambda _: "")
    assert "an empty response is 128 of 128" in alert.text and alert.q == ""


# ---- runs -------------------------------------------------------------------------------------------


SMALL = {"threads": 1, "policy.width": 16, "policy.layers": 1, "policy.heads": 2, "prompts": 16, "lr": 1e-2}


def alerts_in(run: Any) -> dict[str, dict[str, Any]]:
    return {event["name"]: event for event in run.events if event["event"] == "alert"}


def own(folder: Path, body: str) -> str:
    (folder / "own.py").write_text(f"def own(prompt, response):\n    return {body}\n")
    return f"python:{folder / 'own.py'}:own"


@pytest.fixture(scope="module")
def nines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """A run whose reward counts nines, and its terminal output."""
    folder = tmp_path_factory.mktemp("nines")
    reward = own(folder, "sum(x == 9 for x in response)")
    more = {**SMALL, "reward": reward, "steps": 44, "checkpoint_every": 18, "keep": 9, "record_every": 10, "lr": 2e-2}
    more |= {"eval_prompts": 20}
    said = io.StringIO()
    with redirect_stderr(said):
        run = ascent.train("sort", out=folder / "run", **more)
    return run, said.getvalue()


@pytest.mark.long
@pytest.mark.smoke
def test_reward_hacking_with_nines_raises_an_alert(nines: tuple[Any, str]) -> None:
    """One text for every prompt earns a rising reward without accuracy. The terminal shows the alert once."""
    run, said = nines
    found = alerts_in(run)
    assert {"one-answer", "reward-up-accuracy-flat"} <= set(found)
    answer = found["one-answer"]
    assert answer["evidence"]["rollouts"] == {"step": answer["step"], "show": "all", "q": "[9 9 9 9 9]"}
    rows = run.rollouts(answer["step"])
    assert any("[9 9 9 9 9]" in row["response_text"] for row in rows)
    up = found["reward-up-accuracy-flat"]
    assert up["evidence"]["rollouts"]["step"] == up["step"] - up["step"] % 10
    assert run.rollouts(up["evidence"]["rollouts"]["step"])
    for event in found.values():
        assert said.count(f"step {event['step']}: {event['text']}") == 1


@pytest.mark.smoke
def test_length_drift_raises_an_alert(tmp_path: Path) -> None:
    more = {"length": 20, "end": True, "steps": 40, "eval_prompts": 20, **SMALL, "lr": 4e-3}
    run = ascent.train("sort", out=tmp_path / "run", show=False, reward=own(tmp_path, "len(response)"), **more)
    before, now = alerts_in(run)["length-drift"]["evidence"]["metrics"][LENGTH]
    assert now > 1.5 * before


@pytest.mark.slow
@pytest.mark.parametrize(("other", "fires"), mostly_smokes([("exact", True), ("large", False)], ("exact", True)))
def test_dominating_reward_part_raises_an_alert(
    other: str, fires: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a reward for right answers and for nines, nines dominate; if large numbers also pay, two parts rise."""

    def score(task: Sort, rollouts: Any) -> Any:
        right = sorting.score_sorting("exact", rollouts, task.space)
        nines = (rollouts.response == 9).sum(-1).float()
        beside = right.reward.sum(-1) if other == "exact" else (rollouts.response > 4).sum(-1).float()
        parts = {"rewards/nines": nines, f"rewards/{other}": beside}
        return replace(right, reward=(nines + beside).unsqueeze(-1), measures=parts)

    monkeypatch.setattr(Sort, "score", score)
    given = {**SMALL, "steps": 80, "eval_every": 80, "eval_prompts": 9, "record_rollouts": "none", "prompts": 8}
    run = ascent.train("sort", out=tmp_path / "run", show=False, **given)
    nines = [line["rewards/nines"] for line in run.metrics]
    assert nines[-1] > 4 > 1 > nines[0], "it was hacked"
    found = alerts_in(run)
    assert ("component-dominates" in found) == fires
    if fires:
        before, now = found["component-dominates"]["evidence"]["metrics"]["rewards/nines"]
        assert now > before and "rewards/nines went from" in found["component-dominates"]["text"]


class Stale(SmallPolicyEngine):
    """An engine that ignores new parameters after a few versions."""

    def __init__(self, policy: Any, *more: Any):
        super().__init__(copy.deepcopy(policy), *more)

    def load(self, params: Any, version: int) -> None:
        if version < 4:
            super().load(params, version)
        self.version = version


class Rounded(Stale):
    """An engine that loads parameters rounded to 16 bits."""

    def load(self, params: Any, version: int) -> None:
        self.policy.load_state_dict({name: p.bfloat16().to(p.dtype) for name, p in params.items()})
        self.version = version


@pytest.mark.long
@pytest.mark.parametrize("sampler", [Stale, Rounded])
def test_stale_sampler_raises_an_alert(sampler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascent.build.small_backend.SmallPolicyEngine", sampler)
    given = {**SMALL, "length": 3, "numbers": 4, "steps": 44, "eval_prompts": 20, "max_mismatch": 9.0}
    run = ascent.train("sort", out=tmp_path / "run", show=False, **given)
    assert run.metrics[-1][MISMATCH] > 0, "it is another policy"
    found = alerts_in(run)
    assert ("mismatch-rising" in found) == (sampler is Stale)
    if found:
        before, now = found["mismatch-rising"]["evidence"]["metrics"][MISMATCH]
        assert now > 0.02 and now > 9 * before


SOLVES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("lecture", {"algorithm": "grpo", "seed": 2, "reference": "every", "steps": 40}),
    "three numbers": ("sort", {"length": 3, "numbers": 4, "steps": 80, "eval_prompts": 200, **SMALL}),
    "all or nothing": ("sort", {"length": 2, "numbers": 4, "steps": 100, "reward": "exact", **SMALL}),
    "a reward of one's own": (
        "sort",
        {"length": 3, "numbers": 4, "steps": 40, "eval_prompts": 200, "reward": "own", **SMALL, "lr": 2e-2},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_smokes(SOLVES, "grpo"))
def test_learning_run_raises_no_alert(name: str, tmp_path: Path) -> None:
    """For the task `lecture`, see tests/cli/test_demo.py."""
    task, given = SOLVES[name]
    if given.get("reward") == "own":
        given = {**given, "reward": own(tmp_path, "sum(a == b for a, b in zip(sorted(prompt), response))")}
    run = ascent.train(task, out=tmp_path / "run", show=False, **{"threads": 1} | given)
    assert alerts_in(run) == {}
    if name != "grpo":
        assert run.result["eval/accuracy"] > (0.6 if run.config.steps > 40 else 0.25)


@pytest.mark.long
@pytest.mark.smoke
def test_resumed_run_raises_the_same_alerts(nines: tuple[Any, str], tmp_path: Path) -> None:
    shutil.copytree(nines[0].folder, tmp_path / "again")
    again = ascent.resume(tmp_path / "again", from_step=18)
    assert again.events == nines[0].events and any(event["step"] > 18 for event in again.events)


@pytest.mark.long
def test_offline_runs_have_no_alerts_about_trends(tmp_path: Path) -> None:
    """Demonstrations have a reward and an entropy, too, but they do not depend on the policy."""
    given = {"algorithm": "sft", "length": 3, "numbers": 4, "steps": 40, **SMALL}
    assert ascent.train("sort", out=tmp_path / "run", show=False, **given).events == []


@pytest.mark.long
def test_alerts_about_one_step_have_evidence(tmp_path: Path) -> None:
    given = {"length": 5, "numbers": 3, "reward": "inclusion-ordering", "steps": 20, "eval_every": 2, "record_every": 5}
    run = ascent.train("sort", out=tmp_path / "run", show=False, **SMALL, **given)
    event = alerts_in(run)["reward-without-accuracy"]
    assert event["text"].startswith("reward without accuracy: held-out reward is ") and "hack" not in event["text"]
    evidence = event["evidence"]
    assert evidence["metrics"]["eval/reward"][-1] >= 0.95 * 9 and evidence["metrics"]["eval/accuracy"][-1] < 0.5
    for name, numbers in evidence["metrics"].items():
        steps = list(dict.fromkeys(evidence["steps"]))
        assert numbers == [run.metrics[step][name] for step in steps], "the metric's own numbers at its steps"
    assert evidence["rollouts"] == {"step": event["step"] - event["step"] % 5, "show": "wrong", "q": ""}
    failed = ascent.train(
        "lecture",
        out=tmp_path / "failed",
        show=False,
        steps=1,
        reward=own(tmp_path, "1 / response[0]"),
        max_reward_errors=1.0,
    )
    event = alerts_in(failed)["reward-errors"]
    assert event["evidence"]["rollouts"]["show"] == "failed" and event["evidence"]["steps"] == [0, 0]
    assert event["evidence"]["metrics"] == {"reward_errors": [failed.metrics[0]["reward_errors"]]}


@pytest.mark.long
def test_alerts_without_recorded_responses_link_to_none(tmp_path: Path) -> None:
    given = {"length": 5, "numbers": 3, "reward": "inclusion-ordering", "steps": 20, "eval_every": 2}
    run = ascent.train("sort", out=tmp_path / "run", show=False, record_rollouts="none", **SMALL, **given)
    assert set(alerts_in(run)["reward-without-accuracy"]["evidence"]) == {"metrics", "steps"}


def test_null_metrics_are_no_evidence() -> None:
    alert = with_evidence(
        "reward-without-accuracy", "words", {"step": 3, "eval/reward": float("nan"), "eval/accuracy": 0.1}, {}
    )
    assert alert.metrics == {"eval/accuracy": [0.1]} and alert.steps == (3, 3)
    assert with_evidence("another", "words", {"step": 3}, {}).event(3, 0)["evidence"]["metrics"] == {}


@pytest.mark.parametrize("grouped", [True, False])
def test_only_group_advantages_mention_groups(grouped: bool) -> None:
    last = {"eval/accuracy": 0.1, "eval/reward": 0.2, "frac_reward_zero_std": 1.0, "entropy": 0.01}
    words = findings(last, SimpleNamespace(max_reward=1.0, loophole=""), grouped)[-1]
    assert words.startswith("Stuck: ") and "100% of the groups have equal rewards" in words
    assert "entropy of 0.010 nats" in words and ("group advantages" in words) == grouped


@pytest.mark.parametrize(
    ("accuracy", "entropy", "silent", "words"),
    [
        (0.0, 0.01, 1.0, "Stuck: "),
        (0.49, 0.01, 0.5, "Stuck: "),
        (0.5, 0.01, 1.0, "Converged at 50.0% right: "),
        (0.95, 0.06, 0.9, "Converged at 95.0% right: at an entropy of 0.060 nats per token the policy hardly explores"),
        (0.99, 0.01, 1.0, "Solved."),
        (0.95, 0.2, 0.9, ""),
        (0.1, 0.01, 0.4, ""),
        (0.1, None, 1.0, ""),
    ],
)
def test_findings_name_a_stuck_run_only_if_mostly_wrong(
    accuracy: float, entropy: Any, silent: float, words: str
) -> None:
    last = {"eval/accuracy": accuracy, "eval/reward": 0.6, "frac_reward_zero_std": silent, "entropy": entropy}
    for grouped in (True, False):
        found = findings(last, SimpleNamespace(max_reward=1.0, loophole=""), grouped)[1:]
        assert len(found) == bool(words) and all(one.startswith(words) for one in found)


# ---- runs of others ---------------------------------------------------------------------------------


def test_alerts_of_a_foreign_run() -> None:
    lines = curve(reward=rising(0.3, 1.0), length=rising(100, 250))
    rows = [
        {"prompt_text": f"prompt {i % 16}", "response_text": "42", "reward": 1.0, "correct": False} for i in range(64)
    ]
    events = alert_events(lines, [10, 100], lambda _: rows)
    assert events[0]["name"] == "one-answer"
    assert {event["name"] for event in events} == {"one-answer", "reward-up-accuracy-flat", "length-drift"}
    assert events == sorted(events, key=lambda event: event["step"])
    assert events[0]["evidence"]["rollouts"] == {"step": 10, "show": "all", "q": "42"}
    for event in events[1:]:
        assert event["evidence"]["rollouts"]["step"] == (10 if event["step"] < 55 else 100)
    assert alert_events([{k: v for k, v in line.items() if k != "step"} for line in lines], [], lambda _: []) != []
    assert alert_events([], [], lambda _: []) == []


def test_weights_of_reward_parts() -> None:
    parts = [SimpleNamespace(name="own", weight=1.0), SimpleNamespace(name="form", weight=0.2)]
    assert reward_weights(SimpleNamespace(reward_sources=parts)) == {"rewards/own": 1.0, "rewards/form": 0.2}
    assert reward_weights(SimpleNamespace()) == {}, "an offline task"
