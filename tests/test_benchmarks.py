"""Every benchmark imports, and runs small (`make smokes`) to close with the line that scripts read.

No test here asserts a time: that is for the benchmark itself, on a quiet machine.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import Here

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LANGUAGE = (
    "step_cpu_tiny",
    "step_cpu_smollm2",
    "rollouts_cpu",
    "ragged_cpu",
    "memory_cpu",
    "critic_memory",
    "endpoint",
    "rounding",
)
SMALL = (
    "lecture_logs",
    "lecture_solve",
    "sort",
    "loophole",
    "course_grid",
    "reuse",
    "ahead",
    "overhead",
    "import_cost",
    "size",
    "house",
)
SMALL = (
    *SMALL,
    "advantage_variance",
    "sort_samples",
    "trpo",
    "rlhf",
    "ceiling",
    "map",
    "lab_latency",
    "lab_overlay",
    "lab_large",
    "attacks",
    "mutants",
    "first_minutes",
    "plan",
)
ON_GPU = (
    "rollouts_gpu",
    "pages_gpu",
    "ragged_gpu",
    "attention_gpu",
    "step_gpu",
    "lora_gpu",
    "memory_gpu",
    "update_gpu",
    "critic_gpu",
    "seven_gpu",
    "small_cards_gpu",
    "small_gpu",
    "rounding_gpu",
    "plan_gpu",
    "scaling_gpu",
    "mismatch",
    "learn",
    "tools",
    "programs",
    "turns_gpu",
    "ahead_gpu",
    "ranks_gpu",
)
NAMES = (*SMALL, *LANGUAGE, *ON_GPU, "side_by_side", "ahead_engine", "ranks", "ranks_memory", "cluster")
KEYS = {"name", "value", "peer", "ratio", "target", "ok"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A benchmark that takes two threads leaves none to the next test, which may fork."""
    yield
    torch.set_num_threads(1)


def run(name: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, Any], list[str]]:
    """A benchmark's closing line and what it printed before."""
    status = importlib.import_module(f"benchmarks.{name}").main(list(flags))
    *before, last = capsys.readouterr().out.splitlines()
    closing = json.loads(last)
    assert closing.keys() >= KEYS
    assert closing["name"] == name
    assert status == (0 if closing["ok"] else 1)
    return closing, before


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_main_and_says_what_it_measures(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    assert callable(module.main)
    assert f"python -m benchmarks.{name}" in module.__doc__
    assert f"`python -m benchmarks.{name}" in (ROOT / "docs" / "benchmarks.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", [name for name in ON_GPU if name.endswith("_gpu") or name == "learn"])
def test_without_a_gpu_those_for_one_say_so_before_any_work(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main([])
    assert "this measures a GPU of NVIDIA's, and there is none here" in capsys.readouterr().err


@pytest.mark.smoke
def test_the_published_run_is_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    closing, before = run("lecture_logs", capsys, "--advantage", "normalized")
    assert closing["ok"]
    lines = [json.loads(text) for text in before]
    assert [(line["epoch"], line["step"]) for line in lines] == [(e, s) for e in range(100) for s in (0, 5)]
    assert torch.tensor(lines[0]["responses"]).shape == torch.tensor(lines[0]["log_probs"]).shape == (3, 10, 3)
    assert torch.tensor(lines[0]["rewards"]).shape == torch.tensor(lines[0]["deltas"]).shape == (3, 10)


def test_the_published_run_is_told_from_another() -> None:
    """The comparison sees another advantage, another response, a loss that is off by 0.002 and a NaN."""
    from benchmarks.lecture_logs import TOLERANCE, difference, straight_line

    first = next(straight_line("centered"))
    assert difference(first, first) == 0
    assert difference(first, next(straight_line("raw"))) > TOLERANCE
    assert difference(first, first | {"loss": first["loss"] + 0.002}) > TOLERANCE
    assert difference(first, first | {"loss": float("nan")}) > TOLERANCE
    assert difference(first, first | {"responses": [[[0, 0, 0]]]}) == float("inf")


@pytest.mark.smoke
def test_a_lecture_that_is_not_solved_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten steps of a hundred; that a hundred are enough is for tests/cli/test_demo.py."""
    closing, before = run("lecture_solve", capsys, "--seeds", "1", "--steps", "10")
    assert not closing["ok"] and 2 < closing["peer"] < closing["value"] < 4.9
    assert any("no" in line.split() for line in before)


@pytest.mark.smoke
def test_the_loophole_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    closing, before = run("loophole", capsys, "--steps", "25")
    assert closing["ok"]
    assert any("reward without accuracy" in line for line in before)


def test_the_core_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    closing, before = run("size", capsys)
    assert closing["ok"], before[-1]


@pytest.mark.long
def test_the_house_is_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    closing, _ = run("house", capsys)
    assert closing["cycles"] == closing["unlisted_folders"] == closing["kinds_asked"] == closing["wrong_imports"] == 0


@pytest.mark.smoke
def test_advantages_are_unbiased_where_they_have_to_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    closing, before = run("advantage_variance", capsys)
    assert closing["ok"] and closing["variance_td"] < closing["variance_gae"] < closing["variance_monte_carlo"]
    assert closing["bias_td_crude"] > closing["bias_gae_crude"] > 1e-3 > closing["bias_monte_carlo_crude"]
    assert (tmp_path / "advantage_variance.png").exists() and len(before) == 17


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "flags"), [("sort_samples", ["--steps", "2", "--eval-prompts", "50"]), ("trpo", ["--updates", "2"])]
)
def test_the_long_ones_run(name: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of one seed: nothing is reached, and the KL of two updates is within the region."""
    closing, _ = run(name, capsys, "--seeds", "1", "--jobs", "1", *flags)
    if name == "trpo":
        assert closing["ok"] and closing["value"] <= 1 and closing["accepted"] == 1
    else:
        assert not closing["ok"] and len(closing["samples_ppo"]) == 1


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("rlhf", ["--sft", "2", "--pairs", "40", "--rewards", "2", "--ppo", "1", "--dpo", "1", "--prompts", "20"]),
        ("ceiling", ["--sft", "2", "--grpo", "1"]),
        ("map", ["--steps", "1", "--eval-prompts", "20"]),
    ],
)
def test_the_learned_ones_run(
    name: str, flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of each part. After so few nothing is reached but what `map` asks for: that labels are counted right."""
    monkeypatch.setattr("ascent.workflows.seed_comparison.ProcessPoolExecutor", Here)
    closing, before = run(name, capsys, "--jobs", "1", "--no-page", *flags)
    assert closing["ok"] == (name == "map") and before
    if name == "rlhf":
        assert closing["seconds"] > 0 and 0 <= closing["pair_accuracy"] <= 1
    elif name == "ceiling":
        assert closing["ceiling"] == pytest.approx(0.7, abs=0.03)
    else:
        assert (closing["labels_sft"], closing["labels_dpo"], closing["labels_grpo"]) == (64, 64, 512)


@pytest.mark.smoke
def test_the_first_minutes_are_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, warm_python: Any
) -> None:
    monkeypatch.setattr("benchmarks.first_minutes.sys", warm_python)
    closing, _ = run("first_minutes", capsys, "--smoke")
    assert closing["ok"] and closing["value"] < closing["peer"] and closing["seconds"].keys() == {"ascent"}


@pytest.mark.smoke
def test_import_cost_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    closing, _ = run("import_cost", capsys, "--repeats", "1")
    assert closing["value"] > 0 and closing["peer"] > 0


@pytest.mark.smoke
def test_the_latency_of_every_figure_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, warm_python: Any
) -> None:
    monkeypatch.setattr("benchmarks.labs.sys", warm_python)
    closing, _ = run("lab_latency", capsys, "--states", "3")
    assert closing["value"] == max(
        closing[name] for name in ("clip", "baselines", "variance", "trajectory", "training")
    )


@pytest.mark.smoke
def test_a_few_attacks_are_held_and_are_real(capsys: pytest.CaptureFixture[str]) -> None:
    closing, before = run("attacks", capsys, "--trial")
    assert closing["ok"] and closing["held"] == closing["tried"] >= 9, before
    assert closing["real"] == 7, "with its defence switched off, each attack succeeds"


@pytest.mark.long
def test_an_attack_that_is_not_held_is_told(tmp_path: Path) -> None:
    """One that gets something, one that hangs, one that crashes; and one that is none even without a defence."""
    from benchmarks import attacks
    from benchmarks.attacks import attempt

    gets = attempt.Attack("kind", "gets", lambda _: "a secret", lambda: None)
    assert attacks.try_attack(gets) == ("kind", "gets", "a secret", "a secret")
    assert attempt.Fork(lambda: os.kill(os.getpid(), 9), 5.0).result() == "it ended: SIGKILL"
    assert attempt.Fork(lambda: time.sleep(9), 0.2).result() == "it hung for 0.2 s"
    none = attempt.Attack("kind", "none", lambda _: None, lambda: None)
    assert "not even without its defence" in str(attacks.try_attack(none).armed)
    assert attacks.tally([attacks.try_attack(none)]) == {"kind": [1, 0, 0]}
    failed = attempt.Attack("kind", "fails", lambda _: str(1 / 0), lambda: None)
    assert attempt.BROKEN in str(attacks.try_attack(failed).armed)


@pytest.mark.smoke
@pytest.mark.browser
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("lab_overlay", ["--runs", "4", "--points", "50", "--repeats", "1"]),
        ("lab_large", ["--steps", "3000", "--grow", "1"]),
    ],
)
def test_pages_are_measured_in_a_browser(
    name: str,
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    warm_python: Any,
) -> None:
    from tests.browser import chromium

    chromium()
    monkeypatch.setattr("benchmarks.labs.sys", warm_python)
    closing, _ = run(name, capsys, *flags)
    assert closing["value"] > 0


@pytest.mark.long
def test_stacked_runs_are_the_runs_alone(tmp_path: Path) -> None:
    """Three seeds in one loop end where `ascent.train` ends on the last of them.

    The steps are too few for rounding to change a sample. The entropy bonus, a KL and a clip are among them.
    """
    import ascent
    from ascent.oracle.exact import expected_reward, reward_table
    from benchmarks.many import train_many

    settings = {"steps": 6, "kl": "in-loss", "reference": "every", "reference.n": 2}
    stacked = train_many((3, 8, 5), **settings)
    alone = ascent.train("lecture", out=tmp_path / "run", show=False, seed=5, **settings)
    task, prompt = alone.config.task, alone.config.task.held_out(3).prompt
    expected = expected_reward(alone.policy, prompt, reward_table(task, prompt))
    assert float(stacked.expected[2]) == pytest.approx(float(expected), abs=1e-4)
    assert float(stacked.expected[0]) != pytest.approx(float(expected), abs=1e-2)
    assert (stacked.responses, stacked.updates) == (180, 60)


def test_the_plain_loop_is_the_same_run(tmp_path: Path) -> None:
    """What `overhead` compares with does the library's mathematics (here on a few epochs)."""
    import ascent
    from benchmarks import overhead

    alone = ascent.train(
        "lecture", out=tmp_path / "run", show=False, preset="course", advantage="centered", seed=5, steps=5
    )
    embedding = overhead.plain(epochs=5)
    torch.testing.assert_close(alone.policy.embedding.detach(), embedding, rtol=0, atol=1e-5)


@pytest.fixture
def threads() -> Iterator[None]:
    """The language benchmarks set the number of threads for the process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.smoke
@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.usefixtures("threads")
def test_language_benchmarks_run_without_their_peers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    closing, _ = run(name, capsys, "--smoke", "--repeats", "1")
    assert closing["ok"] and closing["smoke"]
    assert closing["value"] is None, "nothing was compared"


@pytest.mark.smoke
def test_two_runs_at_once_take_their_share_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    closing, _ = run("side_by_side", capsys, "--smoke")
    cases = closing["cases"]
    assert closing["ok"] and [len(cases[name]) for name in ("alone", "together", "later")] == [1, 2, 2]
    assert all(side["seconds"] > 0 for sides in cases.values() for side in sides)
    fewest = min(side["threads"] for side in cases["later"])
    assert fewest < closing["cores"] or closing["cores"] == 1  # one of them left a core to others


@pytest.mark.smoke
def test_sampling_ahead_takes_fewer_decoding_steps(capsys: pytest.CaptureFixture[str]) -> None:
    closing, _ = run("ahead", capsys, "--smoke")
    alone, ahead = (each["passes"] for each in closing["batches"])
    assert closing["ok"] and closing["schedules"] == 5 and ahead < alone


@pytest.mark.smoke
@pytest.mark.usefixtures("threads")
def test_memory_is_compared_only_between_equal_updates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import memory_cpu

    right = memory_cpu.Materialised.evaluate

    def wrong(self: Any, batch: Any) -> Any:
        out = right(self, batch)
        return replace(out, logp=1.01 * out.logp)

    monkeypatch.setattr(memory_cpu.Materialised, "evaluate", wrong)
    closing, _ = run("memory_cpu", capsys, "--smoke")
    assert not closing["ok"]


def test_a_peer_takes_turns_and_its_end_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import peers

    shutil.copy(peers.HERE / "turns.py", tmp_path)
    lines = ["from turns import WORK, answer, wait", "answer(ready=True)", "wait()", "print('chatter')"]
    lines += ["answer(double=2.0 * WORK['number'])", "wait()", "raise ValueError('no more')"]
    (tmp_path / "doubles.py").write_text("\n".join(lines))
    monkeypatch.setattr(peers, "HERE", tmp_path)
    monkeypatch.setattr(peers, "environment", lambda _: Path(sys.executable))
    peer = peers.Peer("doubles", "doubles", {"number": 21})
    assert peer.about == {"ready": True}
    assert peer() == {"double": 42.0}
    with pytest.raises(RuntimeError, match=r"(?s)status 1.*no more"):
        peer()
    peer.close()


@pytest.mark.smoke
def test_plans_are_near_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    closing, _ = run("plan", capsys)
    assert closing["ok"] and closing["held_out"] >= 20 and closing["value"] <= 0.25 and closing["memory"] <= 0.25


@pytest.mark.smoke
def test_two_ranks_hold_what_a_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    closing, _ = run("ranks_memory", capsys, "--smoke")
    held = {
        how: [own["held"] / about["parameters"] for own in about["ranks"]] for how, about in closing["found"].items()
    }
    assert {how: [round(each, 1) for each in own] for how, own in held.items()} == {
        "replicate": [20, 20],
        "shard": [12, 12],
    }


@pytest.mark.smoke
@pytest.mark.parametrize("name", ON_GPU)
def test_a_gpu_benchmark_runs_small_on_a_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    closing, _ = run(name, capsys, "--smoke")
    assert closing["ok"] and closing["smoke"]
