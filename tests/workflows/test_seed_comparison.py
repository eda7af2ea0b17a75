"""`ascent compare`: settings over paired seeds, with intervals that are computed by hand."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from ascent.build.trained_run import Run
from ascent.cli import train as training
from ascent.cli.main import main
from ascent.core.errors import ConfigError
from ascent.runs.confidence_intervals import mean_and_half_width, t_quantile
from ascent.runs.run_folder import is_locked
from ascent.settings import configure
from ascent.workflows import seed_comparison as comparison
from tests.processes import Forked, Here, ascent_process, wait_after, write_sigint
from tests.runs.test_resume import bits, differing

pytestmark = pytest.mark.unchecked  # whole trainings, whose shapes other tests check

DRAW = comparison.draw_comparison
FLAGS = ("lecture", "--steps", 3, "--samples", 4, "--epochs", 2)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(comparison, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(training, "draw_comparison", lambda _, path, __: path)

    def call(*args: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["compare", *map(str, args)])
        return (status, *capsys.readouterr())

    return call


def ends(folder: Path, seeds: list[int], name: str, metric: str) -> list[float]:
    return [Run(folder / f"{name}-s{seed}").metrics[-1][metric] for seed in seeds]


def by_hand(values: list[float]) -> tuple[float, float]:
    """Return the mean and the half-width of the 95 % interval, by the formula."""
    n = len(values)
    mean = sum(values) / n
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    return mean, float(stats.t.ppf(0.975, n - 1)) * math.sqrt(variance / n)


@pytest.mark.long
def test_table_by_hand(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "draw_comparison", DRAW)
    seeds = [3, 5, 8]
    status, out, _ = said(*FLAGS, "--algorithms", "reinforce,grpo", "--seeds", "3,5,8", "--out", "c")
    assert status == 0
    result = json.loads(Path("c/compare.json").read_text())
    assert list(result) == ["reinforce", "grpo"]
    for metric in ("exact/reward", "eval/accuracy", "frac_reward_zero_std"):
        first, second = (ends(Path("c"), seeds, name, metric) for name in result)
        for name, values in (("reinforce", first), ("grpo", second)):
            mean, half = by_hand(values)
            assert result[name][metric]["values"] == values
            assert result[name][metric]["mean"] == pytest.approx(mean)
            assert result[name][metric]["half"] == pytest.approx(half, rel=3e-4)
        gap, half = by_hand([b - a for a, b in zip(first, second, strict=True)])
        assert result["grpo"][metric]["difference"] == pytest.approx(gap)
        assert result["grpo"][metric]["difference_half"] == pytest.approx(half, rel=3e-4)
        assert "difference" not in result["reinforce"][metric]
    assert result["grpo"]["responses"] == 3 * 12 and result["grpo"]["updates"] == 6
    spent = [sum(line["time/step"] for line in Run(f"c/grpo-s{seed}").metrics) for seed in seeds]
    assert (result["grpo"]["seconds"], result["grpo"]["seconds_half"]) == pytest.approx(by_hand(spent), rel=3e-4)
    row = next(line for line in out.splitlines() if line.startswith("grpo"))
    wanted = result["grpo"]["exact/reward"]
    assert f"{wanted['mean']:.3f} ± {wanted['half']:.3f}" in row
    assert f"{wanted['difference']:+.3f} ± {wanted['difference_half']:.3f}" in row
    assert "3 seeds" in out and "c/compare.png" in out
    assert Path("c/compare.png").read_bytes().startswith(b"\x89PNG")


def test_equal_settings_have_a_paired_difference_of_zero(said: Any) -> None:
    """The same setting under another name has a difference of exactly 0 ± 0."""
    settings = ("--setting", "--algorithm rloo", "--setting", "--algorithm rloo --loss log-prob")
    assert said(*FLAGS, *settings, "--seeds", 3, "--out", "c")[0] == 0
    again = json.loads(Path("c/compare.json").read_text())["rloo loss log-prob"]["exact/reward"]
    assert again["half"] > 0 and again["difference"] == 0 and again["difference_half"] == 0


def test_flags_beside_the_settings_apply_to_all(said: Any) -> None:
    assert (
        said(*FLAGS, "--lr", 0.05, "--setting", "--advantage raw", "--setting", "--advantage centered", "--seeds", 2)[0]
        == 0
    )
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-compare-lecture")
    runs = [Run(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    assert [run.config.algorithm.update.lr for run in runs] == [0.05] * 4
    assert [run.config.seed for run in runs] == [0, 1, 0, 1]
    assert [run.config.threads for run in runs] == [1] * 4


@pytest.mark.long
def test_algorithm_settings_are_applied_and_shown_in_the_table(said: Any) -> None:
    """`lecture` has ten epochs by default, and a trust region needs one."""
    few = ("lecture", "--steps", 1, "--eval-every", 1)
    status, out, err = said(*few, "--algorithms", "reinforce,grpo,trpo", "--seeds", 1, "--out", "c")
    assert status == 0, err
    assert [Run(f"c/{row}-s0").config.epochs for row in ("reinforce", "grpo", "trpo")] == [10, 10, 1]
    assert "trpo requires --epochs 1 (others: 10)." in out and out.count("requires") == 1
    status, out, _ = said(*few, "--epochs", 4, "--algorithms", "grpo,trpo", "--seeds", 1, "--out", "d")
    assert status == 0 and "trpo requires --epochs 1 (others: 4)" in out
    status, _, err = said(*few, "--setting", "--algorithm trpo --epochs 4", "--seeds", 1, "--out", "e")
    assert status == 2 and "--epochs 4" in err and "set both to 1" in err


def test_offline_algorithms_set_their_number_of_responses(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: dict[str, Any] = {}
    monkeypatch.setattr(training, "run_all", lambda made, *_: configs.update(made) or {})
    monkeypatch.setattr(training, "summarize_runs", lambda _: {})
    monkeypatch.setattr(training, "comparison_table", lambda *_: [])
    Path("c").mkdir()
    status, out, err = said("sort", "--samples", 3, "--algorithms", "sft,dpo,grpo", "--seeds", 1, "--out", "c")
    assert status == 0, err
    assert {row: config.samples for row, config in configs.items()} == {"sft": 1, "dpo": 2, "grpo": 3}
    assert "dpo requires --samples 2" in out and "sft requires --samples 1" in out
    status, _, err = said("sort", "--setting", "--algorithm dpo --samples 3", "--algorithms", "grpo", "--seeds", 1)
    assert status == 2 and "--samples 3: dpo samples nothing" in err


def test_a_narrow_terminal_gets_two_tables(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = said(*FLAGS, "--algorithms", "reinforce,grpo", "--seeds", 2, "--out", "c")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert out.count("setting") == 2


def test_one_seed_has_no_interval(said: Any) -> None:
    _, out, _ = said(*FLAGS, "--algorithms", "reinforce,grpo", "--seeds", 1, "--out", "c")
    assert "One seed: no interval" in out and "±" not in out
    assert json.loads(Path("c/compare.json").read_text())["grpo"]["exact/reward"]["half"] is None


@pytest.mark.long
def test_stopped_comparison_is_resumed(said: Any) -> None:
    command = (*FLAGS, "--algorithms", "reinforce,grpo", "--seeds", 2, "--out", "c")
    assert said(*command)[0] == 0
    whole = json.loads(Path("c/compare.json").read_text())
    kept = Path("c/reinforce-s0/run.json").stat().st_mtime_ns
    shutil.rmtree("c/grpo-s1")
    info = json.loads(Path("c/grpo-s0/run.json").read_text())
    Path("c/grpo-s0/run.json").write_text(json.dumps(info | {"status": "running"}))
    shutil.rmtree("c/grpo-s0/checkpoints")
    assert said(*command)[0] == 0
    after = json.loads(Path("c/compare.json").read_text())
    for name in whole:
        for clock in ("seconds", "seconds_half"):
            whole[name].pop(clock), after[name].pop(clock)
    assert after == whole
    assert Path("c/reinforce-s0/run.json").stat().st_mtime_ns == kept, "what was finished is left alone"
    status, _, err = said(*command, "--lr", 0.5)
    assert status == 2 and "other settings" in err and "--out" in err


BAD: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "nothing at all": ((), ("TASK", "ascent compare TASK")),
    "no task": (("--algorithms", "grpo"), ("TASK",)),
    "no such task": (("sotr", "--algorithms", "grpo"), ("sotr", "sort")),
    "nothing to compare": (("lecture",), ("nothing to compare", "--algorithms")),
    "no such row": (("lecture", "--algorithms", "reinforce,grpoo"), ("grpoo", "grpo")),
    "a setting given twice": (("lecture", "--algorithms", "grpo,grpo"), ("twice",)),
    "a bad flag in a setting": (("lecture", "--setting", "--loss.hgih 1"), ("--loss.hgih",)),
    "a bad flag for all": (("lecture", "--algorithms", "grpo", "--stpes", 3), ("--stpes",)),
    "seeds that are none": (("lecture", "--algorithms", "grpo", "--seeds", "few"), ("--seeds few",)),
    "no seeds": (("lecture", "--algorithms", "grpo", "--seeds", 0), ("--seeds 0",)),
    "a seed twice": (("lecture", "--algorithms", "grpo", "--seeds", "1,1"), ("--seeds 1,1", "distinct")),
    "out under a file": (("lecture", "--algorithms", "grpo", "--out", "file/c"), ("--out file/c", "cannot write")),
    "jobs that are none": (("lecture", "--algorithms", "grpo", "--jobs", "all"), ("--jobs", "all")),
    "jobs below one": (("lecture", "--algorithms", "grpo", "--jobs", -1), ("--jobs -1",)),
    "a quote left open": (("lecture", "--setting", "--algorithm 'grpo"), ("--setting", "quotation")),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_input_is_rejected_before_any_run(what: str, said: Any) -> None:
    args, words = BAD[what]
    Path("file").write_text("")
    status, out, err = said(*args)
    assert status == 2 and out == "" and "Traceback" not in err
    assert [word for word in words if word not in err] == [], err
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_failed_run_ends_the_comparison_with_its_error(said: Any) -> None:
    status, _, err = said(*FLAGS, "--setting", "--lr 0.1", "--setting", "--lr 1e30", "--seeds", 1, "--out", "c")
    assert status == 1 and "stopped: " in err and "loss" in err
    assert Run("c/lr-0.1-s0").status == "finished"


def test_t_quantiles_match_students_t() -> None:
    for freedom in range(1, 500):
        off = 5.1e-4 if freedom <= 30 else 1e-4  # a table of three decimals, then a formula
        assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=off), freedom


def test_interval_of_known_numbers() -> None:
    """2, 4, 6: mean 4, s = 2, t(2) = 4.303, half = 4.303 · 2 / √3."""
    mean, half = mean_and_half_width([2.0, 4.0, 6.0])
    assert mean == 4 and half == pytest.approx(4.303 * 2 / math.sqrt(3))
    assert mean_and_half_width([3.0])[0] == 3 and math.isnan(mean_and_half_width([3.0])[1])


def test_an_interrupted_comparison_says_how_to_resume_it(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "as_completed", interrupted)
    status, _, err = said("lecture", "--steps", 1, "--algorithms", "reinforce", "--seeds", 1, "--out", "c")
    assert status == 130 and "finished runs are kept. To resume, repeat the command with --out c" in err
    assert Run("c/reinforce-s0").status == "finished" and not Path("c/compare.json").exists()


@pytest.mark.smoke
def test_workers_ignore_ctrl_c_outside_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in a worker handles Ctrl-C. An idle worker ignores it, without a traceback; the command handles it."""
    monkeypatch.setattr(comparison, "run_one", write_sigint)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ConfigError, match="not a run folder"):  # it left no run
        comparison.run_all({"only": configure("lecture", {})}, [0], tmp_path, jobs=1)
    assert (tmp_path / "only-s0" / "sigint").read_text() == repr(signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
@pytest.mark.smoke
def test_interrupt_of_all_processes_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches the command and its workers, as in a terminal. Workers are forks, which start fast."""
    monkeypatch.setattr(comparison, "get_context", lambda _: multiprocessing.get_context("fork"))
    command = ["compare", "lecture", "--algorithms", "reinforce,grpo"]
    command += ["--seeds", "1", "--steps", "12", "--jobs", "2", "--out", "c"]
    with monkeypatch.context() as patch:
        wait_after(patch, 5)
        process = ascent_process(tmp_path / "output", *command, cwd=tmp_path)
    deadline = time.monotonic() + 180
    runs = [tmp_path / "c" / f"{name}-s0" / "metrics.jsonl" for name in ("reinforce", "grpo")]
    while not all(run.exists() and run.read_bytes().count(b"\n") >= 5 for run in runs):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 130, process.stderr
    text = process.stdout + process.stderr
    assert "--out c" in text and "Traceback" not in text
    assert Run(tmp_path / "c" / "reinforce-s0").status == "interrupted"
    assert not (tmp_path / "c" / "compare.json").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "ProcessPoolExecutor", Here)
    monkeypatch.setattr("ascent.runs.display.plots.save_figure", lambda _, path: path)
    assert main([*command, "--jobs", "1"]) == 0 and "grpo" in capsys.readouterr().out
    statuses = {path.name: Run(path).status for path in (tmp_path / "c").iterdir() if path.is_dir()}
    assert set(statuses.values()) == {"finished"} and len(statuses) == 2


@pytest.mark.slow
@pytest.mark.smoke
def test_a_killed_comparison_leaves_no_workers_and_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL reaches only the command. Its workers exit, and the runs can be resumed immediately."""
    monkeypatch.setattr(comparison, "get_context", lambda _: multiprocessing.get_context("fork"))
    monkeypatch.setattr("ascent.runs.display.plots.save_figure", lambda _, path: path)
    command = ["compare", "lecture", "--algorithms", "reinforce,grpo", "--checkpoint-every", "3"]
    command += ["--seeds", "1", "--steps", "12", "--jobs", "2", "--out"]
    with monkeypatch.context() as patch:
        wait_after(patch, 5)
        process = ascent_process(tmp_path / "output", *command, tmp_path / "c")
    runs = [tmp_path / "c" / f"{name}-s0" for name in ("reinforce", "grpo")]
    deadline = time.monotonic() + 180
    while not all((run / "metrics.jsonl").exists() and Run(run).metrics for run in runs):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    workers = [int((run / ".lock").read_text()) for run in runs]
    process.kill()
    process.wait()
    while any(is_locked(run) for run in runs):
        assert time.monotonic() < deadline, f"its workers {workers} go on without it"
        time.sleep(0.01)
    monkeypatch.setattr(comparison, "ProcessPoolExecutor", Here)
    for out in ("c", "whole"):
        assert main([*command, str(tmp_path / out)]) == 0
    for run in runs:
        assert not differing(run, bits(tmp_path / "whole" / run.name))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.smoke)])
def test_a_signal_to_the_command_alone_saves_the_runs_of_its_workers(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "get_context", lambda _: multiprocessing.get_context("fork"))
    command = ["compare", "lecture", "--algorithms", "reinforce,grpo", "--seeds", "2", "--steps", "12", "--jobs", "2"]
    wait_after(monkeypatch, 5)
    process = ascent_process(tmp_path / "output", *command, "--out", tmp_path / "c")
    runs = [tmp_path / "c" / f"{name}-s0" for name in ("reinforce", "grpo")]
    wait_for_steps(process, runs, 5)
    process.send_signal(number)
    assert process.wait() == 130, process.stderr
    assert f"--out {tmp_path / 'c'}" in process.stderr and "Traceback" not in process.stderr
    assert [Run(run).status for run in runs] == ["interrupted"] * 2
    assert {path.parent for path in (tmp_path / "c").rglob("run.json")} == set(runs), "no other run begins"
    assert all(len(Run(run).metrics) == Run(run).info["step"] for run in runs) and all(
        Run(run).checkpoints for run in runs
    )


@pytest.mark.slow
def test_killed_worker_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "get_context", lambda _: multiprocessing.get_context("fork"))
    command = ["compare", "lecture", "--algorithms", "reinforce,grpo", "--seeds", "1", "--steps", "12", "--jobs", "2"]
    wait_after(monkeypatch, 5)
    process = ascent_process(tmp_path / "output", *command, "--out", tmp_path / "c")
    runs = [tmp_path / "c" / f"{name}-s0" for name in ("reinforce", "grpo")]
    wait_for_steps(process, runs, 5)
    os.kill(int((runs[0] / ".lock").read_text()), signal.SIGKILL)
    assert process.wait() == 1, process.stderr
    assert "a worker was killed" in process.stderr and f"--out {tmp_path / 'c'}" in process.stderr
    assert "Traceback" not in process.stderr


def wait_for_steps(process: Forked, runs: list[Path], steps: int) -> None:
    deadline = time.monotonic() + 180
    while not all((run / "metrics.jsonl").exists() and len(Run(run).metrics) >= steps for run in runs):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr
        time.sleep(0.005)
