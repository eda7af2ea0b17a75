"""The command `ascent` as a user and a script meet it: every command, what is fixed for scripts, bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import ascent as library
from ascent import api
from ascent.build.trained_run import Run
from ascent.cli import train as cli
from ascent.cli.dispatch import commands, exit_status
from ascent.cli.main import main
from ascent.core.algorithms import ALGORITHMS
from ascent.core.menu import name_of
from ascent.runs.display import plots
from ascent.runs.display.terminal import Display
from ascent.settings import CHOICES, configure
from tests.cases import mostly_smokes
from tests.processes import ascent_process

ON_EVERY_LINE = [
    "step",
    "reward",
    "reward_std",
    "accuracy",
    "eval/accuracy",
    "eval/reward",
    "exact/reward",
    "entropy",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "frac_reward_zero_std",
    "frac_all_right",
    "frac_all_wrong",
    "completions/mean_length",
    "completions/clipped_ratio",
    "sampling/sampling_logp_difference/mean",
    "grad_norm",
    "reward_errors",
    "loss",
]
"""Fixed for scripts."""
BESIDES = {
    "num_tokens",
    "num_responses",
    "sampling/sampling_logp_difference/max",
    "sampling/effective_sample_size",
    "sampling/kl",
}
TINY = ("--length", 3, "--numbers", 3, "--prompts", 4, "--samples", 2, "--eval-prompts", 4, "--policy.width", 8)
PLOT = cli.plot
"""The real one, which is replaced while tests run."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Said:
    """How a command ended, and what it said."""

    def __init__(self, status: int, out: str, err: str):
        self.status, self.out, self.err = status, out, err
        self.text = ANSI.sub("", out + err)


@pytest.fixture
def ascent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*args: Any) -> Said:
        capsys.readouterr()
        status = main([str(arg) for arg in args])
        return Said(status, *capsys.readouterr())

    return call


def numbers(run: str | Path) -> list[dict[str, Any]]:
    """Every record line of a run, without times."""
    lines = [*Run(run).metrics, *Run(run).updates]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


# Every command says what it is.


def test_no_command_is_bad_input_and_shows_what_there_is(ascent: Any) -> None:
    said = ascent()
    assert said.status == 2
    assert all(f"ascent {command}" in said.out for command in commands())
    assert ascent("--help").status == 0


@pytest.mark.parametrize("command", commands())
@pytest.mark.parametrize("width", ["80", "120"])
def test_help_of_every_command_fits_the_terminal(
    command: str, width: str, ascent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    said = ascent(command, "--help")
    assert said.status == 0 and f"usage: ascent {command}" in said.text and said.err == ""
    assert [line for line in said.text.splitlines() if len(line) > max(int(width), 100)] == []
    assert list(Path().iterdir()) == []


def flags_in(text: str) -> list[str]:
    """The flags that a help text lists."""
    return re.findall(r"^  (--[\w.-]+)", text, re.MULTILINE)


@pytest.mark.parametrize("task", ["lecture", "sort", "gsm8k", "jsonl", "preferences"])
def test_help_of_train_has_the_usual_flags_and_help_all_the_rest(task: str, ascent: Any) -> None:
    usual, every = (flags_in(ascent("train", task, flag).text) for flag in ("--help", "--help-all"))
    assert len(usual) <= 28 and usual[-1] == "--dry-run"
    assert [flag for flag in ("--algorithm", "--steps", "--lr", "--out") if flag not in usual] == []
    assert set(usual) <= set(every) and len(every) == len(set(every)), "no flag twice"
    assert f"`ascent train {task} --help-all` shows {len(every) - len(usual)} more" in " ".join(
        ascent("train", task, "--help").text.split()
    )


def test_help_all_of_a_text_task_ends_with_engine_and_sandbox(ascent: Any) -> None:
    text = ascent("train", "gsm8k", "--help-all").text
    headings = [line for line in text.splitlines() if line and not line.startswith((" ", "usage", "The flags"))]
    assert headings[-2:] == ["inference engine", "sandbox for untrusted code"]
    flags = flags_in(text)
    assert flags[0] == "--path" and flags[-1] == "--sandbox-packages"
    assert {"--model", "--lr", "--engine.url"} <= set(flags) and "--policy.engine-url" not in flags
    assert ascent("train", "gsm8k", "--policy.engine-url", "x", "--engine", "vllm").status == 2, "still a flag"


def test_a_dry_run_reads_neither_model_nor_data(ascent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("a dry run connects to the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    said = ascent("train", "gsm8k", "--model", "nobody/nothing", "--data-epochs", 2, "--dry-run")
    assert said.status == 0 and "precision  auto" in said.out and "the run    auto steps: 2 epochs" in said.out
    assert ascent("train", "gsm8k", "--model", "nobody/nothing", "--reward", "python:no.py:f", "--dry-run").status == 2


def test_help_of_train_has_every_axis_and_choice(ascent: Any) -> None:
    text = " ".join(ascent("train", "sort", "--help-all").text.replace("│", " ").split())
    for axis, menu in CHOICES.items():
        assert f"--{axis} NAME" in text
        assert " | ".join(name_of(cls) for cls in menu) in text
    assert " | ".join(ALGORITHMS) in text
    flags = "steps prompts samples epochs minibatches lr temperature seed policy reward length numbers preset"
    for flag in [*flags.split(), "record-rollouts", "config", "init", "out", "dry-run"]:
        assert f"--{flag} " in text
    assert "--loss.high" in text and "--loss.length-normalized" not in text, "only the fields of what is chosen"


def test_list_and_explain(ascent: Any) -> None:
    listed = ascent("list")
    assert listed.status == 0
    names = [*ALGORITHMS, *(name_of(cls) for menu in CHOICES.values() for cls in menu), "lecture", "sort"]
    assert [name for name in names if name not in listed.out] == []
    explained = ascent("explain", "grpo")
    assert explained.status == 0 and "clip" in explained.out and "TRL" in explained.out and "verl" in explained.out
    assert ascent("explain", "grop").status == 2


# Training.


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The first 20 epochs of the course's run with normalized advantages, every response recorded."""
    settings = {"preset": "course", "advantage": "normalized", "record_rollouts": "all", "threads": 1}
    settings |= {"steps": 20, "checkpoint_every": 10, "eval_every": 5}
    return api.start(configure("lecture", settings), tmp_path_factory.mktemp("course") / "run", Display())


LANDMARKS = {
    "raw": (1.164, 1.061, 2.333, 2.667, 2.667),
    "centered": (0.029, -0.235, 2.333, 3.333, 3.333),
}
"""SPEC, section 3: the loss at updates 0 and 9; the mean reward in epochs 0, 50 and 99. Those of the third advantage,
normalized, are for tests/test_benchmarks.py (`make smokes`), which looks at the same run more closely."""


@pytest.mark.slow
@pytest.mark.parametrize("credit", mostly_smokes(LANDMARKS, "raw"))
def test_the_course_run_has_its_published_landmarks(credit: str, ascent: Any) -> None:
    assert ascent("train", "lecture", "--preset", "course", "--advantage", credit, "--out", "run").status == 0
    run = Run("run")
    assert len(run.updates) == 1000
    found = [run.updates[i]["loss"] for i in (0, 9)] + [run.metrics[i]["reward"] for i in (0, 50, 99)]
    assert found == pytest.approx(LANDMARKS[credit], abs=0.001)


@pytest.mark.long
def test_metrics_and_updates_have_the_fixed_keys(course: Run) -> None:
    for line in course.metrics:
        keys = [key for key in line if not key.startswith("time/")]
        assert keys[:19] == ON_EVERY_LINE[:19] and keys[-1] == "loss"
        assert set(keys) == {*ON_EVERY_LINE, *BESIDES}
        assert {"time/step", "time/generate", "time/update"} <= line.keys()
    assert [line["step"] for line in course.metrics] == list(range(20))
    assert {tuple(line) for line in course.updates} == {("step", "update", "loss", "grad_norm")}
    assert [(u["step"], u["update"]) for u in course.updates] == [(s, u) for s in range(20) for u in range(10)]
    for line in course.metrics:
        of_step = [u for u in course.updates if u["step"] == line["step"]]
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(sum(u[key] for u in of_step) / 10, rel=1e-12)


def test_the_folder_holds_what_design_says(course: Run) -> None:
    info = json.loads((course.folder / "run.json").read_text())
    assert info["status"] == "finished" and info["seed"] == 5 and "torch" in info["versions"]
    assert info["result"]["steps"] == 20 and info["result"]["exact/reward"] == course.metrics[-1]["exact/reward"]
    config = json.loads((course.folder / "config.json").read_text())
    assert config["advantage"] == {"name": "normalized", "eps": 1e-5, "ddof": 1}
    assert config["objective"].startswith("Maximize") and "logp" in config["formula"]
    assert len(list((course.folder / "rollouts").glob("step_*.parquet"))) == 20
    assert [path.name for path in (course.folder / "checkpoints").iterdir()] == [
        "step_000050",
        "step_000100",
    ] or sorted(path.name for path in (course.folder / "checkpoints").iterdir()) == ["step_000010", "step_000020"]


def test_every_fixed_flag_of_train(ascent: Any) -> None:
    flags = "--steps 2 --prompts 6 --samples 3 --epochs 2 --minibatches 3 --lr 0.01 --temperature 1.5 --seed 7"
    more = "--policy per-position --reward exact --length 4 --numbers 6 --record-rollouts all --out there/run"
    assert ascent("train", "sort", *flags.split(), *more.split()).status == 0
    config = Run("there/run").config
    assert (config.steps, config.prompts, config.samples, config.epochs, config.minibatches) == (2, 6, 3, 2, 3)
    assert (config.algorithm.update.lr, config.temperature, config.seed) == (0.01, 1.5, 7)
    assert name_of(config.policy) == "per-position"
    assert (config.task.reward, config.task.length, config.task.numbers) == ("exact", 4, 6)
    assert len(Run("there/run").updates) == 2 * 2 * 3
    assert [len(Run("there/run").rollouts(step)) for step in (0, 1)] == [18, 18]


@pytest.mark.long
def test_a_finished_run_is_drawn(
    course: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "plot", PLOT)
    assert cli.report_end(course) is None
    path = course.folder / "plot.png"
    assert f"Curves: {path}\n" in capsys.readouterr().out and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
@pytest.mark.parametrize("size", [1.0, -1.2345e-4, -9.8765e4, 1e-12, 3e17])
def test_no_label_of_a_plot_is_cut_off_or_upon_its_neighbor(
    size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda fig, path: figures.append(fig) or path)
    metrics = [
        {"step": i, "accuracy": 0.5} | dict.fromkeys(("reward", "eval/reward", "entropy"), size * (1 + 1e-3 * i))
        for i in range(5)
    ]
    plots.plot_runs([("run", metrics, None)], tmp_path / "plot.png", "sort, grpo, seed 0")
    (figure,) = figures
    figure.draw_without_rendering()
    boxes = [axis.get_tightbbox() for axis in figure.axes]
    for i, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])


def test_the_folder_is_named_after_the_run(ascent: Any) -> None:
    for _ in range(2):
        assert ascent("train", "lecture", "--steps", 1, "--algorithm", "reinforce++", "--seed", 3).status == 0
    names = sorted(path.name for path in Path("runs").iterdir())
    assert len(names) == 2
    assert all(re.match(r"\d{8}-\d{6}-lecture-reinforce\+\+-s3(-2)?$", name) for name in names)


def test_a_dry_run_writes_nothing(ascent: Any) -> None:
    said = ascent("train", "sort", "--algorithm", "grpo", "--steps", 7, "--dry-run")
    assert said.status == 0
    for words in ("grpo", "64 prompts × 8 samples", "3,584 responses", "clip(ρ, 0.8, 1.2)", "runs/"):
        assert words in said.out
    assert list(Path().iterdir()) == []


def test_a_dry_run_refuses_what_the_run_would(ascent: Any, course: Run) -> None:
    assert ascent("train", "lecture", "--dry-run", "--out", course.folder).status == 2
    assert ascent("train", "lecture", "--dry-run", "--init", "nowhere").status == 2


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize("task", ["lecture", "sort"])
def test_a_config_reproduces_its_run_bit_for_bit(task: str, ascent: Any) -> None:
    flags = {
        "lecture": ("--algorithm", "grpo", "--loss.high", 0.3, "--kl.target", 0.02, "--minibatches", 3, "--lr", 0.02),
        "sort": (*TINY, "--end", "--exploration", "constant", "--update.schedule", "cosine", "--temperature", 1.2),
    }[task]
    assert ascent("train", task, *flags, "--steps", 4, "--seed", 11, "--out", "first").status == 0
    assert ascent("train", "--config", "first/config.json", "--out", "again").status == 0
    assert numbers("first") == numbers("again")
    assert Run("first").config == Run("again").config
    assert ascent("train", task, "--config", "first/config.json", "--seed", 12, "--out", "other").status == 0
    assert Run("other").config.seed == 12 and numbers("other") != numbers("first")


@pytest.mark.long
def test_init_starts_from_a_run_or_a_folder(ascent: Any) -> None:
    tiny = ("sort", *TINY, "--steps", 2)
    assert ascent("train", *tiny, "--out", "first").status == 0
    last = Run("first").checkpoints[-1]
    for given, out in (("first", "from-run"), (last, "from-folder")):
        assert ascent("train", *tiny, "--lr", 1e-12, "--init", given, "--out", out).status == 0
        before, after = Run("first").policy.state_dict(), Run(out).policy.state_dict()
        assert all((before[name] - after[name]).abs().max() < 1e-6 for name in before)
        assert Run(out).config.init == str(last.resolve()), "pinned, so that a later run of `first` changes nothing"
    assert numbers("from-run") == numbers("from-folder")
    refused = ascent("train", "sort", *TINY, "--policy.width", 16, "--init", "first", "--out", "wrong")
    assert refused.status == 2 and "do not fit" in refused.err and not Path("wrong").exists()


@pytest.mark.long
def test_a_run_with_init_resumes_without_its_source(ascent: Any) -> None:
    assert ascent("train", "lecture", "--steps", 1, "--out", "first").status == 0
    flags = ("lecture", "--steps", 4, "--checkpoint-every", 2, "--init", "first")
    assert ascent("train", *flags, "--out", "whole").status == 0
    assert ascent("train", *flags, "--out", "run").status == 0
    Path("first").rename("elsewhere")
    assert ascent("resume", "run", "--from", 2).status == 0
    assert numbers("run") == numbers("whole")


# Showing.


def test_show_prints_the_run_as_it_was(ascent: Any, course: Run) -> None:
    said = ascent("show", course.folder)
    assert said.status == 0
    assert f"{course.folder}: finished, 20 of 20 steps" in said.out and "seed 5" in said.out
    rows = [line.split() for line in said.out.splitlines() if line.strip() and line.split()[0].isdigit()]
    assert [int(row[0]) for row in rows] == [0, *range(1, 20, 2)]
    head = next(line.split() for line in said.out.splitlines() if line.strip().startswith("step"))
    last = dict(zip(head, rows[-1], strict=True))
    assert last["reward"] == f"{course.metrics[-1]['reward']:.3f}"
    assert last["E[R]"] == f"{course.metrics[-1]['exact/reward']:.3f}"
    assert all(word in " ".join(said.out.split()) for word in (course.result or {})["words"])


@pytest.mark.parametrize("width", [80, 120])
def test_show_fits_the_terminal(width: int, ascent: Any, course: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = ascent("show", course.folder).out.splitlines()
    assert max(len(line) for line in lines[1:]) <= width


def test_show_json_is_one_object(ascent: Any, course: Run) -> None:
    shown = json.loads(ascent("show", course.folder, "--json").out)
    assert shown["run"]["status"] == "finished" and shown["run"]["folder"] == str(course.folder)
    assert shown["metrics"] == course.metrics and shown["events"] == course.events
    assert shown["config"]["steps"] == 20


def test_show_step_prints_what_was_sampled(ascent: Any, course: Run) -> None:
    said = ascent("show", course.folder, "--step", 15)
    rows = pq.read_table(course.folder / "rollouts" / "step_000015.parquet").to_pylist()
    assert len(rows) == 30
    groups = said.out.strip().split("\n\n")
    assert [text.splitlines()[0].split(": ")[1] for text in groups] == [
        f"prompt {p}" for p in ("[1 0 2]", "[3 2 4]", "[1 2 3]")
    ]
    printed = [line for text in groups for line in text.splitlines()[1:]]
    for line, row in zip(printed, rows, strict=True):
        pattern = r"  (\[.*?\])  reward (\S+)  A (\S+)  logp ([-\d. ]+)"
        response, reward, advantage, logp = re.match(pattern, line).groups()  # type: ignore[union-attr]
        assert response == "[" + " ".join(map(str, row["response"])) + "]"
        assert float(reward) == row["reward"]
        assert float(advantage) == pytest.approx(row["advantage"][0], abs=5e-4)
        assert [float(x) for x in logp.split()] == pytest.approx(row["logp_old"], abs=5e-4)
    assert json.loads(ascent("show", course.folder, "--step", 15, "--json").out) == rows
    for group in range(3):
        rewards = [row["reward"] for row in rows if row["group"] == group]
        assert sum(row["advantage"][0] for row in rows if row["group"] == group) == pytest.approx(0, abs=1e-5)
        assert len(rewards) == 10


def test_recorded_log_probs_are_those_of_each_update(course: Run) -> None:
    """The naive loss of every update, from the Parquet alone, is the one in updates.jsonl."""
    rows = course.rollouts(3)
    assert [row["logp_update"] for row in rows] == [list(range(10))] * 30
    for update in range(10):
        terms = [row["advantage"][0] * logp for row in rows for logp in row["logp"][update]]
        loss = next(u["loss"] for u in course.updates if (u["step"], u["update"]) == (3, update))
        assert -sum(terms) / len(terms) == pytest.approx(loss, abs=1e-6)


def test_a_step_that_was_not_recorded(ascent: Any) -> None:
    assert ascent("train", "lecture", "--steps", 3, "--record-every", 5, "--out", "run").status == 0
    said = ascent("show", "run", "--step", 1)
    assert said.status == 2 and "Recorded are 0, 2" in said.err
    assert ascent("train", "lecture", "--steps", 1, "--record-rollouts", "none", "--out", "none").status == 0
    assert "None were recorded" in ascent("show", "none", "--step", 0).err


def test_a_config_of_another_task_gives_what_is_not_of_its_task(ascent: Any) -> None:
    settings = configure("sort", {"length": 3, "numbers": 4, "steps": 7, "algorithm": "rloo", "lr": 0.25}).to_dict()
    Path("sort.json").write_text(json.dumps(settings))
    plan = ascent("train", "lecture", "--config", "sort.json", "--prompts", 3, "--dry-run")
    assert plan.status == 0, plan.text
    assert "task       lecture" in plan.out and "the run    7 steps" in plan.out and "rloo" in plan.out
    assert "length" not in plan.out and "0.25" in plan.out
    same = ascent("train", "sort", "--config", "sort.json", "--dry-run")
    assert same.status == 0 and "length 3" in same.out.replace("=", " "), same.text


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_that_of_the_package(flag: str, ascent: Any) -> None:
    said = ascent(flag)
    assert (said.status, said.out) == (0, f"ascent {library.__version__}\n")


def test_one_process_commands_are_refused_under_torchrun(ascent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    said = ascent("list")
    assert said.status == 2 and "ascent list does not run under torchrun" in said.err
    assert "These commands do: train and resume" in said.err


def test_a_reader_that_left_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise BrokenPipeError

    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert exit_status(broken) == 0
        print("lost", flush=True)
    assert (tmp_path / "out").read_text() == "", "what is still printed goes nowhere"


def test_a_preflight_of_a_small_task_is_its_plan(ascent: Any) -> None:
    said = ascent("preflight", "lecture", "--steps", 7)
    assert said.status == 0 and "the run    7 steps" in said.out and "folder     runs\n" in said.out
    assert ascent("preflight", "lecture", "--out", "other").out.endswith("folder     other\n")
    assert not list(Path().iterdir())


def test_an_interrupted_run_is_resumed_by_the_same_launch_and_by_no_other(
    ascent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun --max-restarts starts the same command again; another launch finds the folder taken."""
    from ascent.runs.run_writer import RunWriter

    step = RunWriter.step

    def interrupted(self: Any, number: int, *more: Any) -> None:
        step(self, number, *more)
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)

    environment = {"TORCHELASTIC_RUN_ID": "one", "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    command = ("train", "lecture", "--steps", 4, "--out", "run")
    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "step", interrupted)
        said = ascent(*command)
    assert said.status == 130
    assert "Interrupted after 2 of 4 steps, and saved.\nResume it: ascent resume run" in said.out
    assert ascent(*command).status == 2, "it was not started again"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for other in ("two", "none"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", other)
        assert ascent(*command).status == 2, "another launch"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    said = ascent(*command)
    assert said.status == 0 and "Look closer: ascent show run" in said.out
    assert [line["step"] for line in Run("run").metrics] == [0, 1, 2, 3]


# Bad input: status 2, one clear message, no traceback, nothing left behind.

BROKEN = "def f(:\n"
BAD: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "no such command": (("trian", "lecture"), ("trian", "train")),
    "no task": (("train",), ("TASK", "lecture, sort")),
    "flags before the task": (("train", "--steps", 3, "lecture"), ("TASK",)),
    "no such task": (("train", "lectrue"), ("lectrue", "lecture, sort", "Did you mean lecture?")),
    "no such row": (("train", "sort", "--algorithm", "grpoo"), ("--algorithm grpoo", "Did you mean grpo?")),
    "no such choice": (("train", "sort", "--advantage", "centred"), ("--advantage centred", "Did you mean centered?")),
    "unknown reward": (("train", "sort", "--reward", "exactly"), ("--reward exactly", "Did you mean exact?")),
    "no such preset": (("train", "sort", "--preset", "course"), ("--preset course", "default")),
    "no such field": (("train", "sort", "--loss.hihg", 0.3), ("--loss.hihg", "--loss.high")),
    "a field of another choice": (("train", "sort", "--loss", "log-prob", "--loss.high", 0.3), ("--loss.high",)),
    "no such flag": (("train", "sort", "--stpes", 3), ("--stpes", "--steps")),
    "a flag without its value": (("train", "sort", "--algorithm"), ("--algorithm needs a value", "--algorithm NAME")),
    "an int that is none": (("train", "sort", "--steps", "many"), ("--steps", "many")),
    "a float for an int": (("train", "sort", "--steps", 2.5), ("--steps", "2.5")),
    "a float that is none": (("train", "sort", "--lr", "small"), ("--lr", "small")),
    "a number out of range": (("train", "sort", "--samples", 0), ("--samples is 0", "at least 1")),
    "a negative rate": (("train", "sort", "--lr", -1), ("--lr is -1", "above 0")),
    "a temperature of 0": (("train", "sort", "--temperature", 0), ("--temperature is 0", "above 0")),
    "a group of one": (("train", "sort", "--samples", 1), ("--samples 1", "--samples 2")),
    "a KL without a reference": (("train", "lecture", "--kl", "in-loss"), ("--kl in-loss", "--reference")),
    "more mini-batches than prompts": (("train", "lecture", "--minibatches", 4), ("--minibatches 4", "--prompts 3")),
    "four prompts of three": (("train", "lecture", "--prompts", 4), ("--prompts 4", "--prompts 3")),
    "distinct numbers that are not there": (
        ("train", "sort", "--distinct", "--numbers", 3),
        ("--distinct", "--numbers 3"),
    ),
    "a correction of nothing": (
        ("train", "sort", "--correction", "truncated", "--old-logp", "sampler"),
        ("--correction", "--old-logp learner"),
    ),
    "heads that do not divide": (("train", "sort", "--policy.heads", 3), ("--policy.heads", "64")),
    "out under a file": (("train", "lecture", "--out", "file/run"), ("--out file/run", "cannot write")),
    "out that is a file": (("train", "lecture", "--out", "file"), ("--out file",)),
    "out that is not empty": (("train", "lecture", "--out", "full"), ("--out full", "not empty", "another folder")),
    "a name too long": (("train", "lecture", "--out", "x" * 300), ("cannot write",)),
    "rollouts that are no number": (("train", "lecture", "--record-rollouts", "some"), ("--record-rollouts some",)),
    "no such config": (("train", "--config", "nowhere.json"), ("nowhere.json",)),
    "a config that is none": (("train", "--config", "broken.py"), ("broken.py",)),
    "a config without a task": (("train", "--config", "empty.json"), ("empty.json", "task")),
    "no such TOML": (("train", "--config", "nowhere.toml"), ("--config nowhere.toml: No such file",)),
    "a TOML that is none": (("train", "--config", "broken.toml"), ("--config broken.toml is not TOML",)),
    "no such init": (("train", "lecture", "--init", "nowhere"), ("--init nowhere",)),
    "a choice in a broken file": (
        ("train", "lecture", "--advantage", "python:broken.py:f"),
        ("broken.py", "SyntaxError"),
    ),
    "a choice in no file": (("train", "lecture", "--advantage", "python:no.py:f"), ("no.py",)),
    "a choice by half a name": (("train", "lecture", "--advantage", "python:broken.py"), ("python:FILE:NAME",)),
    "a choice that is not there": (("train", "lecture", "--loss", "python:own.py:fucntion"), ("own.py", "function?")),
    "a choice that is none": (("train", "lecture", "--loss", "python:own.py:function"), ("--loss", "own.py")),
    "a choice that is a number": (("train", "lecture", "--loss", "python:own.py:NUMBER"), ("--loss", "own.py")),
    "a reward in a broken file": (("train", "lecture", "--reward", "python:broken.py:f"), ("broken.py", "SyntaxError")),
    "a reward that is a number": (("train", "lecture", "--reward", "python:own.py:NUMBER"), ("--reward", "own.py")),
    "list of something": (("list", "tasks"), ("tasks",)),
    "a demo of something": (("demo", "sort"), ("sort",)),
    "explain nothing": (("explain",), ("NAME",)),
    "explain the unknown": (("explain", "ppoo"), ("ppoo",)),
    "show nothing": (("show",), ("RUN",)),
    "show what is no run": (("show", "full"), ("full", "not a run")),
    "resume what is no run": (("resume", "nowhere"), ("nowhere", "no such folder")),
    "a step that is none": (("show", "full", "--step", "first"), ("--step", "first")),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_gets_one_clear_message(what: str, ascent: Any) -> None:
    args, words = BAD[what]
    Path("file").write_text("")
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    Path("broken.py").write_text(BROKEN)
    Path("own.py").write_text("NUMBER = 3\ndef function(a, b):\n    return 0\n")
    Path("empty.json").write_text("{}")
    Path("broken.toml").write_text("steps = = 3")
    before = sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)
    said = ascent(*args)
    assert said.status == 2, said.text
    assert said.out == "", "messages go where errors go"
    assert "Traceback" not in said.text
    message = " ".join(said.text.replace("│", " ").split())
    assert [word for word in words if word not in message] == [], message
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts) == before


def test_an_unwritable_folder_is_refused(ascent: Any, tmp_path: Path) -> None:
    """A closed folder, or, for root whom that does not stop, a place where the kernel lets nobody write."""
    (tmp_path / "closed").mkdir(mode=0o500)
    closed = tmp_path / "closed" if os.geteuid() else Path("/proc")
    said = ascent("train", "lecture", "--out", closed / "ascent-run")
    assert said.status == 2 and "cannot write there" in said.err


def test_an_existing_run_is_never_overwritten(ascent: Any, course: Run) -> None:
    said = ascent("train", "lecture", "--out", course.folder)
    assert said.status == 2 and f"ascent resume {course.folder}" in said.err
    assert Run(course.folder).status == "finished"


# The real thing: processes of their own.


@pytest.mark.slow
def test_the_command_as_a_process(tmp_path: Path) -> None:
    """`make wheel` starts them anew, as installed."""
    good = ascent_process(tmp_path / "good", "train", "lecture", "--steps", 2, "--out", tmp_path / "run")
    assert good.wait() == 0 and "Look closer: ascent show" in good.stdout and "2/2" in good.stderr
    bad = ascent_process(tmp_path / "bad", "train", "lecture", "--steps", "no", cwd=tmp_path)
    assert bad.wait() == 2 and bad.stdout == "" and "Traceback" not in bad.stderr
    trouble = ascent_process(tmp_path / "trouble", "train", "lecture", "--steps", 2, "--lr", 1e30, cwd=tmp_path)
    assert trouble.wait() == 1 and trouble.stderr.count("ascent: stopped:") == 1


@pytest.mark.slow
@pytest.mark.smoke
def test_a_reader_who_leaves_early_is_no_error(tmp_path: Path) -> None:
    pipe = f"{sys.executable} -m ascent list | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", pipe], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


# Python.


def test_five_lines_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = library.train("lecture", algorithm="grpo", steps=3, seed=1, show=False, **{"loss.high": 0.28})
    assert run.folder.parent == Path("runs") and run.status == "finished"
    assert [line["step"] for line in run.metrics] == [0, 1, 2]
    assert run.config.algorithm.loss.high == 0.28 and run.config.algorithm.kl.coef == 0.04
    again = library.load(run.folder)
    assert again.metrics == run.metrics
    assert sum(p.numel() for p in again.policy.parameters()) == 5 * 10 + 2 * 3 * 10 * 10
    with pytest.raises(library.ConfigError, match="Did you mean grpo"):
        library.train("lecture", algorithm="grpoo")
    with pytest.raises(library.ConfigError, match="--samples is 'many'"):
        library.train("lecture", samples="many")
