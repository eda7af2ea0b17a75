"""A run that is killed at any point and resumed ends bitwise equal to a run that was never killed.

Importing torch takes seconds, so a run lives in a fork of this process. The fork numbers the moments of its
life, one before and one after every touch of a file, and kills itself at the one that it was told; other kills
come from outside, at a random time. All choices are drawn from fixed seeds.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from ascent import api
from ascent.build.trained_run import Run
from ascent.cli import train as train_command
from ascent.cli.main import main
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.types import Streams
from ascent.runs import checkpoint, rollout_files, run_folder, run_list, run_writer
from ascent.runs.display.terminal import Display
from ascent.runs.run_folder import RunFolder
from ascent.runs.run_writer import RunWriter
from ascent.runs.untrusted_files import read_lines
from ascent.settings import configure
from ascent.training.small_learner import SmallLearner
from tests.cases import mostly_smokes
from tests.processes import Forked, ascent_process, wait_after

LECTURE = {"samples": 4, "epochs": 2, "minibatches": 3, "steps": 8, "checkpoint_every": 3, "record_every": 2}
SHORT = LECTURE | {"steps": 5, "checkpoint_every": 2}
"""Three checkpoints too, the last one at the end."""
SORT = {"length": 3, "numbers": 4, "end": True, "prompts": 4, "samples": 3, "minibatches": 2, "eval_prompts": 5}
SMALL = {"policy.width": 8, "policy.layers": 1, "policy.heads": 2, "steps": 5, "checkpoint_every": 2, "record_every": 3}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "running mean": ("lecture", {**SHORT, "algorithm": "reinforce-baseline", "keep": 1}),
    "adaptive KL in the loss, moving average": (
        "lecture",
        {**LECTURE, "algorithm": "grpo", "kl": "in-loss", "kl.target": 0.01, "reference": "moving-average"},
    ),
    "adaptive KL in the reward, renewed reference": (
        "lecture",
        {**SHORT, "algorithm": "rloo", "kl.target": 0.02, "reference": "every", "reference.n": 3},
    ),
    "PPO with a critic of its own": (
        "lecture",
        {**SHORT, "algorithm": "ppo", "critic.clip": 0.2, "critic.steps": 2, "reward": "process"},
    ),
    "actor-critic on one backbone": ("sort", {**SORT, **SMALL, "algorithm": "actor-critic", "critic": "shared-critic"}),
    "a trust region with a critic": (
        "lecture",
        {**SHORT, "epochs": 1, "minibatches": 1, "algorithm": "trpo", "advantage": "gae", "critic": "own-critic"},
    ),
    "a conversation": (
        "swaps",
        {
            **SMALL,
            "prompts": 3,
            "samples": 3,
            "advantage": "gae",
            "critic": "own-critic",
            "epochs": 2,
            "eval_prompts": 5,
        },
    ),
    "transformer that sorts": (
        "sort",
        {
            **SORT,
            **SMALL,
            "algorithm": "dapo",
            "shaping.margin": 1,
            "old_logp": "learner",
            "correction": "truncated",
            "exploration": "annealed",
        },
    ),
}


def config_of(name: str, **more: Any) -> Config:
    task, settings = SETTINGS[name]
    return configure(task, {**settings, "threads": 1, **more})


def bits(run: Path) -> dict[str, Any]:
    """Return everything that must be equal: all records without times, and all tensors of the last checkpoint."""
    found: dict[str, Any] = {}
    for name in run_folder.JSONL_FILES:
        lines = read_lines(run / name)
        found[name] = [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]
    last = checkpoint.complete_checkpoints(run / "checkpoints")[-1]
    for path in last.glob("*.safetensors"):
        found |= {
            f"{path.stem} {k}": v.flatten().view(torch.uint8).numpy().tobytes() for k, v in load_file(path).items()
        }
    state = json.loads((last / "state.json").read_text())
    found["state"] = (last.name, state["step"], state["state"])
    for where in run_folder.STEP_FOLDERS:
        for path in (run / where).iterdir():
            table = pq.read_table(path)
            times = [name for name in table.column_names if name.startswith("time/")]
            found[f"{where} {path.name}"] = table.drop_columns(times).to_pylist()
    return found


def differing(run: Path, other: dict[str, Any]) -> list[str]:
    mine = bits(run)
    return sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))


class Moments:
    """Numbers the points of a process at which it can be killed, and kills it at one of them."""

    TOUCHED: tuple[tuple[Any, str], ...] = (
        (os, "replace"),
        (os, "fsync"),
        (os, "truncate"),
        (shutil, "rmtree"),
        (Path, "mkdir"),
        (Path, "write_text"),
        (Path, "unlink"),
        (Path, "rename"),
        (checkpoint, "save"),
        (checkpoint, "save_file"),
        (rollout_files, "write_rollouts"),
        (rollout_files, "write_answers"),
        (RunWriter, "_line"),
    )

    def __init__(self, last: int | None):
        self.last, self.names = last, []
        run_writer.HEARTBEAT = math.inf  # saves that depend on the clock would make every life another one
        for owner, name in self.TOUCHED:
            setattr(owner, name, self.watched(getattr(owner, name), name))

    def watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.moment(f"before {name}")
            result = function(*args, **more)
            if name == "save_file":
                self.moment("inside save_file", lambda: os.truncate(args[1], os.path.getsize(args[1]) // 2))
            if name == "_line":
                self.moment("inside _line", lambda: _tear(args[0].files[args[1]]))
            self.moment(f"after {name}")
            return result

        return call

    def moment(self, name: str, first: Callable[[], None] = lambda: None) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self.last:
            first()
            os.kill(os.getpid(), signal.SIGKILL)


def _tear(file: Any) -> None:
    """Truncate the file in the middle of its last line."""
    file.flush()
    os.ftruncate(file.fileno(), file.tell() - 20)


def in_a_fork(work: Callable[[], Any], kill_after: float | None = None) -> bool:
    """Call `work` in a fork of this process; return False if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(70)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"the fork ended with {status}"
    return status == 0


def go_on(path: Path, config: Config) -> Run:
    """Do what a user does after a kill: resume, or start a run that had not begun."""
    if (path / "run.json").exists():
        return api.resume(path, Display())
    return api.start(config, path, Display())


def live(path: Path, config: Config, moment: int | None = None, seconds: float | None = None) -> bool:
    """Start or continue a run up to a kill point or a time; return False if it was killed."""

    def work() -> None:
        if moment is not None:
            Moments(moment)
        go_on(path, config)

    return in_a_fork(work, seconds)


@pytest.fixture(scope="module", autouse=True)
def no_fsync() -> Iterator[None]:
    """Kill points are counted over two threads: how long the disk takes must not change their order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], list[str], float]]:
    """Return, by setting: the results of an uninterrupted run, its kill points, and its duration."""
    known: dict[str, tuple[dict[str, Any], list[str], float]] = {}

    def of(name: str) -> tuple[dict[str, Any], list[str], float]:
        if name not in known:
            path = tmp_path_factory.mktemp("unharmed")

            def work() -> None:
                moments = Moments(None)
                api.start(config_of(name), path / "run", Display())
                names = list(moments.names)
                (path / "moments.json").write_text(json.dumps(names))

            api.start(config_of(name, steps=1), path / "warm", Display())  # here, and so not again in every fork
            began = time.monotonic()
            assert in_a_fork(work)
            took = time.monotonic() - began
            known[name] = bits(path / "run"), json.loads((path / "moments.json").read_text()), took
        return known[name]

    return of


def kills(names: list[str], took: float, rng: random.Random, turn: int) -> list[list[dict[str, Any]]]:
    """Return the kills of two scenarios: one between the first and the last checkpoint, and one of seven in turn.

    What a setting remembers is lost in the first, if at all. What a kill leaves behind before the first checkpoint, in
    the middle of one or at the end of a run is the same under all settings.
    """
    begins = [i for i, name in enumerate(names) if name == "before save"]
    ends = [i for i, name in enumerate(names) if name == "after save"]
    torn = [i for i, name in enumerate(names) if name == "inside save_file"]
    inside = [{"moment": rng.randrange(b, e)} for b, e in zip(begins, ends, strict=True)]
    anywhere = {"moment": rng.randrange(len(names) // 2)}
    in_turn = [
        [{"moment": rng.choice(torn)}, {"moment": rng.randrange(len(names))}],
        [inside[-1]],
        [{"moment": len(names) - 2}],
        [{"moment": len(names) - 1}],
        [{"moment": rng.randrange(begins[0])}, anywhere],
        [inside[0], inside[0]],
        [{"seconds": rng.uniform(0.1, 0.9) * took} for _ in range(3)],
    ]
    return [[{"moment": rng.randrange(ends[0], begins[-1])}, anywhere], in_turn[turn % len(in_turn)]]


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_smokes(SETTINGS, "running mean"))
def test_killed_run_ends_bitwise_equal(name: str, tmp_path: Path, unharmed: Any) -> None:
    expected, names, took = unharmed(name)
    for i, story in enumerate(kills(names, took, random.Random(name), list(SETTINGS).index(name))):
        path = tmp_path / f"story-{i}"
        for life, kill in enumerate(story):
            dead = not live(path, config_of(name), **kill)
            assert dead or life or "seconds" in kill, "a moment of a whole first life is never missed"
        assert go_on(path, config_of(name)).status == "finished", story
        assert differing(path, expected) == [], story
        assert not [p for p in path.rglob(".*") if p.name != ".lock"], "litter of a kill"


Spoil = Callable[[pytest.MonkeyPatch], None]


def without_stream(stream: str) -> Spoil:
    def spoil(patch: pytest.MonkeyPatch) -> None:
        restore = Streams.restore
        patch.setattr(Streams, "restore", lambda now, s: restore(now, {**s, stream: getattr(now, stream).get_state()}))

    return spoil


def without_group(group: str) -> Spoil:
    def spoil(patch: pytest.MonkeyPatch) -> None:
        restore = SmallLearner.restore
        patch.setattr(SmallLearner, "restore", lambda now, s: restore(now, {**s, group: now.state().get(group, {})}))

    return spoil


def without_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoint, "load_checkpoint", lambda path: (loaded(path)[0], {**loaded(path)[1], "state": None}))


loaded = checkpoint.load_checkpoint


def without_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunFolder, "cut", lambda *_: None)


FORGETS: dict[str, tuple[str, Spoil]] = {
    "which samples come next": ("running mean", without_stream("sampling")),
    "which prompts come next": ("transformer that sorts", without_stream("prompts")),
    "the order of mini-batches": ("running mean", without_stream("order")),
    "the parameters": ("running mean", without_group("params")),
    "the optimizer": ("running mean", without_group("optimizer")),
    "the reference": ("adaptive KL in the loss, moving average", without_group("reference")),
    "the running mean": ("running mean", without_state),
    "the adaptive coefficient": ("adaptive KL in the reward, renewed reference", without_state),
    "to cut the records back": ("running mean", without_cut),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    mostly_smokes(FORGETS, "which samples come next", "the optimizer", "the running mean", "to cut the records back"),
)
def test_incomplete_resume_is_detected(
    what: str, tmp_path: Path, unharmed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, spoil = FORGETS[what]
    expected, names, _ = unharmed(setting)
    assert not live(tmp_path / "run", config_of(setting), names.index("after save") + 30)
    spoil(monkeypatch)
    assert live(tmp_path / "run", config_of(setting))
    assert differing(tmp_path / "run", expected) != []


# One run that was killed after its second checkpoint, for everything that can be wrong with a folder.


@pytest.fixture(scope="module")
def _killed(tmp_path_factory: pytest.TempPathFactory, unharmed: Any) -> Path:
    path = tmp_path_factory.mktemp("killed") / "run"
    name = "adaptive KL in the loss, moving average"
    saved = [i for i, moment in enumerate(unharmed(name)[1]) if moment == "after save"]
    assert not live(path, config_of(name), saved[1] + 25)
    return path


@pytest.fixture
def killed(_killed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_killed, tmp_path / "killed"))


@pytest.fixture(scope="module")
def expected(unharmed: Any) -> dict[str, Any]:
    return unharmed("adaptive KL in the loss, moving average")[0]


def said(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str]:
    """Return the exit status and the output of a command."""
    status = main([str(arg) for arg in args])
    out = capsys.readouterr()
    assert "Traceback" not in out.out + out.err
    return status, out.out + out.err


def test_killed_run_reports_how_to_resume(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Run(killed).status == "died"
    status, text = said(capsys, "show", killed)
    assert status == 0
    assert f"{killed}: died, " in text and f"ascent resume {killed}" in text


@pytest.mark.long
@pytest.mark.parametrize("file", ["manifest.json", "state.json", *(f"{n}.safetensors" for n in ("params", "rng"))])
def test_corrupt_checkpoint_is_rejected(
    file: str, killed: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    newest = Run(killed).checkpoints[-1] / file
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    ours = {path for path in killed.rglob("*") if path.is_file() and path.name not in (".lock", ".alive")}
    before = {path: path.read_bytes() for path in ours}
    status, text = said(capsys, "resume", killed)
    assert status == 2
    assert str(newest.parent) in text and "corrupt" in text and "--from 3" in text
    assert {path: path.read_bytes() for path in before} == before, "a refused resume has changed something"
    assert said(capsys, "resume", killed, "--from", 3)[0] == 0
    assert differing(killed, expected) == []


def test_corrupt_only_checkpoint_offers_no_older_one(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (Run(killed).checkpoints[0] / "params.safetensors").write_bytes(b"nothing")
    status, text = said(capsys, "resume", killed, "--from", 3)
    assert status == 2
    assert "There is no older one" in text and "params.safetensors" in text


def test_resume_from_a_missing_checkpoint_is_an_error(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "resume", killed, "--from", 4)
    assert status == 2 and "steps 3, 6" in text


@pytest.mark.slow
@pytest.mark.parametrize("moment", mostly_smokes(range(3, 13), 3, 5, 7, 9, 11))
def test_kill_during_a_resume_from_an_older_checkpoint(moment: int, killed: Path, expected: dict[str, Any]) -> None:
    """A kill between removing newer checkpoints and truncating the records leaves no dangling references."""

    def back() -> None:
        Moments(moment)
        api.resume(killed, Display(), from_step=3)

    assert not in_a_fork(back)
    assert live(killed, config_of("running mean"))
    assert differing(killed, expected) == []


def test_incomplete_last_line_is_ignored(
    killed: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Run(killed).metrics
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "rewa')
    assert Run(killed).metrics == whole
    assert said(capsys, "show", killed)[0] == 0
    assert said(capsys, "resume", killed)[0] == 0
    assert differing(killed, expected) == []


def test_invalid_line_is_named(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    (killed / "metrics.jsonl").write_text("\n".join([lines[0], "nonsense", *lines[2:]]) + "\n")
    status, text = said(capsys, "show", killed)
    assert status == 2 and "metrics.jsonl, line 2" in text


def test_truncated_records_are_rejected(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(killed / "metrics.jsonl", 100)
    status, text = said(capsys, "resume", killed)
    assert status == 2 and "metrics.jsonl has 100 bytes" in text
    assert [checkpoint.step_of(p) for p in Run(killed).checkpoints] == [3, 6]


def test_running_run_is_not_resumed(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holder = RunFolder.reopen(killed)
    assert Run(killed).status == "running"
    status, text = said(capsys, "resume", killed)
    assert status == 2 and f"pid {os.getpid()}" in text
    holder.close()
    assert Run(killed).status == "died"


@pytest.mark.long
def test_oom_killed_run_is_reported(
    killed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel does not notify a process of an OOM kill, but counts it in /proc/vmstat."""
    sign = json.loads((killed / ".alive").read_text())
    assert sign["killed"] is None or re.fullmatch(r"\S+ \d+", sign["killed"])
    for before, now, told in (("boot 3", "boot 4", True), ("boot 3", "boot 3", False), ("other 3", "boot 4", False)):
        copy = Path(shutil.copytree(killed, killed.with_name(f"{before} {now}")))
        (copy / ".alive").write_text(json.dumps(sign | {"killed": before}))
        monkeypatch.setattr(run_list, "oom_kill_count", lambda now=now: now)
        assert ("killed a process because memory ran out" in said(capsys, "show", copy)[1]) is told
        assert ("killed a process because memory ran out" in said(capsys, "resume", copy)[1]) is told


def test_finished_run_is_not_resumed(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    api.resume(killed, Display())
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in killed.rglob("*") if p.is_file()}
    status, text = said(capsys, "resume", killed)
    assert status == 0 and "finished" in text
    assert api.resume(killed, Display()).status == "finished"
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in killed.rglob("*") if p.is_file()} == before


def test_run_that_finishes_while_reopened_is_not_resumed(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = api.resume(Path(shutil.copytree(killed, killed.with_name("ended"))), Display())
    lock = RunFolder.lock

    def lock_late(folder: RunFolder) -> None:
        if ended.folder != folder.path:  # until now another process had it, and finished it
            shutil.rmtree(killed)
            shutil.copytree(ended.folder, killed)
        lock(folder)

    monkeypatch.setattr(RunFolder, "lock", lock_late)
    before = (ended.folder / "run.json").read_text(), (ended.folder / "metrics.jsonl").read_text()
    assert api.resume(killed, Display()).status == "finished"
    assert ((killed / "run.json").read_text(), (killed / "metrics.jsonl").read_text()) == before


@pytest.mark.parametrize("number", [None, 1, 3])
def test_run_of_another_format_is_shown_but_not_resumed(
    killed: Path, number: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    info = json.loads((killed / "run.json").read_text())
    assert info.pop("format") == 2
    (killed / "run.json").write_text(json.dumps(info | ({"format": number} if number else {})))
    assert said(capsys, "show", killed)[0] == 0
    status, text = said(capsys, "resume", killed)
    assert status == 2 and f"another version of Ascent (format {number or 'unknown'}; this version reads 2)" in text


def test_folder_without_a_run_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"name": "another tool\'s"}')
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "run.json").write_bytes(b"\xff\xfe\x00")
    for name in ("", "file", "missing", "other", "binary"):
        for command in ("resume", "show"):
            status, text = said(capsys, command, tmp_path / name)
            assert status == 2 and str(tmp_path / name) in text


def test_run_killed_before_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a kill leaves no complete run folder. The error has the command that starts the run, and it works."""
    path = tmp_path / "run"
    config = config_of("running mean", steps=1)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "note", interrupted)
        with pytest.raises(KeyboardInterrupt):
            api.start(config, path, Display())
    status, text = said(capsys, "resume", path)
    assert status == 2
    command = text.strip().partition("ascent train ")[2].split()
    assert said(capsys, "train", *command)[0] == 0
    assert Run(path).config == replace(config, old_logp="sampler")


def test_resumed_run_keeps_its_history(killed: Path) -> None:
    api.resume(killed, Display())
    assert [entry["event"] for entry in Run(killed).info["history"]] == ["started", "resumed", "finished"]
    assert Run(killed).info["history"][1]["step"] == 6


# RunError: counted, shown, kept.


def strict(line: str) -> dict[str, Any]:
    """Parse standard JSON, without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def test_non_finite_numbers_become_null_with_a_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"eval/accuracy": math.nan, "eval/reward": -math.inf, "exact/reward": 1.0}
    monkeypatch.setattr("ascent.build.assemble.sample_evaluator", lambda *_: lambda: dict(measured))
    run = api.start(config_of("running mean", steps=1), tmp_path / "run", Display())
    line = strict((run.folder / "metrics.jsonl").read_text())
    assert line["eval/accuracy"] is None and line["eval/reward"] is None and line["exact/reward"] == 1.0
    assert line["nonfinite"] == {"eval/accuracy": "nan", "eval/reward": "-inf"}
    strict((run.folder / "run.json").read_text())


FAILING = """
def reward(prompt, response):
    if response[0] == 4:
        raise KeyError("no such answer")
    return float("nan") if response[1] == 4 else response[2]
"""


@pytest.fixture
def failing(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(FAILING)
    return f"python:{tmp_path / 'own.py'}:reward"


@pytest.mark.long
def test_failing_rewards_are_counted_and_shown(
    failing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps", 6, "--reward", failing, "--max-reward-errors", 1, "--record-rollouts", "all")
    status, text = said(capsys, "train", "lecture", *flags, "--out", tmp_path / "run")
    assert status == 0 and "the reward failed on" in text
    run = Run(tmp_path / "run")
    counted = [line["reward_errors"] for line in run.metrics]
    assert sum(counted) > 0
    for line in run.metrics:
        rows = run.rollouts(line["step"])
        failed = [row for row in rows if not row["valid"]]
        assert len(failed) == line["reward_errors"]
        assert all(4 in row["response"][:2] for row in failed)
        assert line["reward"] == pytest.approx(sum(r["response"][2] for r in rows if r["valid"]) / (30 - len(failed)))
    shown = said(capsys, "show", run.folder)[1]
    assert "errors" in shown and f"Alert at step {next(i for i, n in enumerate(counted) if n)}" in shown


def test_too_many_failing_rewards_stop_the_run(
    failing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps", 6, "--reward", failing, "--max-reward-errors", 0.01)
    status, text = said(capsys, "train", "lecture", *flags, "--out", tmp_path / "run")
    assert status == 1
    assert "the reward failed on" in text and "--max-reward-errors 0.01" in text and "prompt [" in text
    run = Run(tmp_path / "run")
    assert run.status == "failed" and "the reward failed on" in run.info["reason"]
    assert [event["event"] for event in run.events] == ["error"]
    assert "Stopped: the reward failed on" in said(capsys, "show", run.folder)[1]


@pytest.mark.filterwarnings("ignore")
def test_non_finite_loss_stops_the_run_and_keeps_its_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said(capsys, "train", "lecture", "--steps", 3, "--lr", 1e30, "--out", tmp_path / "run")
    kept = tmp_path / "run" / "failed_step_000000.safetensors"
    assert status == 1 and "loss" in text and str(kept) in text.replace("\n", "")
    batch = load_file(kept)
    assert batch["response"].shape == (3, 10, 3) and {"reward", "advantage", "logp_old"} <= batch.keys()
    assert Run(tmp_path / "run").status == "failed"
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 0


def test_unexpected_error_is_recorded_and_reported_in_one_line(
    killed: Path, expected: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("of all things")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streams, "state", fail)
        status, text = said(capsys, "resume", killed)
    assert status == 1 and "ZeroDivisionError: of all things" in text
    assert "in fail" in (killed / "error.txt").read_text()
    assert Run(killed).status == "failed"
    assert said(capsys, "resume", killed)[0] == 0
    assert differing(killed, expected) == []
    assert "reason" not in Run(killed).info


@pytest.mark.slow
@pytest.mark.parametrize("room", [5000, 10_500])
def test_a_full_disk_loses_nothing(room: int, tmp_path: Path, unharmed: Any) -> None:
    """Files may not grow beyond a few kilobytes: writes fail as on a full disk.

    Once while records are written, once in the middle of a checkpoint.
    """
    path = tmp_path / "run"

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        with pytest.raises(api.RunError, match=r"cannot be written: .*File too large\. Make room"):
            api.start(config_of("running mean"), path, Display())
        if room > 5000:
            assert list((path / "checkpoints").glob(".writing-*")), "it ended in the middle of one"

    assert in_a_fork(work)
    assert 0 < len(Run(path).metrics) < 11
    assert live(path, config_of("running mean"))
    assert differing(path, unharmed("running mean")[0]) == []


# The real command, in processes of its own.


def wait_for_steps(process: Forked, run: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes().count(b"\n") < steps:
        assert process.poll() is None, f"it ended too early: {process.stdout}{process.stderr}"
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.slow
def test_the_command_interrupted_then_killed_then_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["lecture", "--steps", 25, "--epochs", 2, "--minibatches", 3, "--checkpoint-every", 5]
    flags += ["--threads", 1, "--seed", 3]
    run = tmp_path / "run"

    with monkeypatch.context() as patch:
        wait_after(patch, 8)
        process = ascent_process(tmp_path / "output", "train", *flags, "--out", run)
    wait_for_steps(process, run, 9)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    text = process.stdout + process.stderr
    assert f"Resume it: ascent resume {run}" in text and "Traceback" not in text
    stopped = Run(run)
    assert stopped.status == "interrupted" and stopped.info["step"] == 9
    assert checkpoint.step_of(stopped.checkpoints[-1]) == stopped.info["step"] == len(stopped.metrics)

    with monkeypatch.context() as patch:
        wait_after(patch, 17)
        process = ascent_process(tmp_path / "output", "resume", run)
    wait_for_steps(process, run, 18)
    process.kill()
    process.wait()
    assert Run(run).status == "died"
    assert "died" in said(capsys, "show", run)[1]

    code, text = said(capsys, "resume", run)[:2]
    assert code == 0 and "Look closer" in text
    assert said(capsys, "train", *flags, "--out", tmp_path / "whole")[0] == 0
    assert differing(run, bits(tmp_path / "whole")) == []


@pytest.mark.slow
def test_second_interrupt_stops_at_once_and_reports_how_to_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    slow = ("sort", "--steps", 1, "--prompts", 4000, "--eval-prompts", 20000)
    process = ascent_process(tmp_path / "output", "train", *slow, "--out", run)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(0.3)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert process.wait() == 130
    text = process.stdout + process.stderr
    assert f"ascent resume {run}" in text and "Traceback" not in text


def test_config_errors_are_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        Run("/nowhere")
    assert "\n" not in str(error.value)


def test_resume_draws_curves_that_a_kill_prevented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = api.train("lecture", steps=1, show=False, out=tmp_path / "run")
    monkeypatch.setattr(train_command, "plot", lambda drawn: (drawn.folder / "plot.png").write_bytes(b"curves"))
    for _ in range(2):
        assert main(["resume", str(run.folder)]) == 0
        assert (run.folder / "plot.png").read_bytes() == b"curves"
        monkeypatch.setattr(train_command, "plot", None)  # they are drawn once


def test_run_killed_right_after_its_start_is_trusted(tmp_path: Path) -> None:
    """Its settings name a file outside its folder, so a resume needs the run to be trusted."""
    pairs = [{"prompt": [i, 0], "chosen": [0, i], "rejected": [i, i]} for i in (1, 2, 3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = {"length": 2, "numbers": 4, "pairs": str(tmp_path / "pairs.jsonl"), "algorithm": "dpo", "steps": 2}
    real = RunFolder.create.__func__  # type: ignore[attr-defined]

    def die() -> None:
        def create(cls: type[RunFolder], *args: Any) -> None:
            real(cls, *args)
            os.kill(os.getpid(), signal.SIGKILL)

        RunFolder.create = classmethod(create)  # type: ignore[assignment, arg-type]
        api.train("sort", show=False, out=tmp_path / "run", **settings)

    assert not in_a_fork(die) and (tmp_path / "run" / "run.json").exists()
    assert in_a_fork(lambda: main(["resume", str(tmp_path / "run")])) and Run(tmp_path / "run").status == "finished"
