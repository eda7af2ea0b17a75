"""Records of runs: unusual files, errors, and the numbers that are read back."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import batch_of
from safetensors import SafetensorError
from safetensors.torch import save_file

import ascent
from ascent.core.errors import ConfigError
from ascent.distributed.replica import REPLICA_LOG
from ascent.processes.user_state import state_folder
from ascent.runs import checkpoint, foreign_runs, metric_columns, parquet_reader, run_list
from ascent.runs.alerts.metric_windows import StepBlock, WindowComparison, sums
from ascent.runs.confidence_intervals import compare_over_seeds
from ascent.runs.display.plots import PAIRS, POLICY_PANELS, PROCESS_REWARD_PANELS, REWARD_MODEL_PANELS, panels_for
from ascent.runs.journal import Journal
from ascent.runs.metric_columns import MetricColumns, nonfinite_values
from ascent.runs.parquet_reader import open_parquet, parse_thrift_struct
from ascent.runs.replica_log import replica_events, replicas_of
from ascent.runs.rollout_files import summary_rows
from ascent.runs.run_folder import RunFolder
from ascent.runs.run_reader import init_folder
from ascent.runs.sharded_reader import read_parts
from ascent.runs.untrusted_files import naming_file, read_lines, read_regular

RUNS = Path(__file__).parents[1] / "data" / "runs"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A recorded run that has no checkpoint."""
    return shutil.copytree(RUNS / "grpo-1", tmp_path / "run")


# ---- files -------------------------------------------------------------------------------------------------


def test_read_regular_bounds_the_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * (1 << 20))
    assert len(read_regular(tmp_path / "a", 1 << 20)) == 1 << 20
    with pytest.raises(OSError, match="a has more than 0 MiB"):
        read_regular(tmp_path / "a", (1 << 20) - 1)


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "events.jsonl") == []
    with (
        pytest.raises(ConfigError, match=r"^a is gone: it was removed, or the run was resumed from an earlier step$"),
        naming_file(tmp_path / "a"),
    ):
        (tmp_path / "a").read_bytes()


def test_state_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "ascent" / "trusted").mkdir(parents=True, mode=0o755)
    assert stat.S_IMODE(state_folder("trusted").stat().st_mode) == 0o700


# ---- metrics -----------------------------------------------------------------------------------------------


def test_long_metrics_file_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 lines of two columns are 80 numbers: every fourth line has 20, which is below the bound of 30."""
    monkeypatch.setattr(metric_columns, "MAX_NUMBERS", 30)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "reward": float(s)}) + "\n" for s in range(39)))
    found = MetricColumns(path)
    found.update()
    assert (found.num_lines, found.stride, found.problem) == (39, 4, "a very long file: one of 4 lines is shown")
    assert found.steps.tolist() == found["reward"].tolist() == [*range(0, 39, 4)]
    with path.open("a") as file:
        file.writelines(json.dumps({"step": s, "reward": float(s)}) + "\n" for s in range(39, 46))
    found.update()
    assert found.steps.tolist() == found["reward"].tolist() == [*range(0, 46, 4)], "it goes on with the same lines"
    assert found.total("reward") == 4 * sum(range(0, 46, 4))
    assert found.sample_lines(["missing"], 9) == [] and len(found.sample_lines(["reward"], 3)) == 3


@pytest.mark.parametrize(
    ("line", "odd"),
    [
        ([1], []),
        ({"reward": float("nan")}, []),
        ({"step": "3", "reward": float("nan")}, []),
        ({"step": 3, "reward": float("inf"), "loss": 1.0}, [("reward", 3.0, "inf")]),
        ({"step": 3, "nonfinite": {"loss": "nan"}}, [("loss", 3.0, "nan")]),
    ],
)
def test_non_finite_values_of_a_line(line: Any, odd: list[Any]) -> None:
    assert nonfinite_values(line) == odd


@pytest.mark.parametrize(
    ("metrics", "panels"),
    [
        ({}, POLICY_PANELS),
        ({"accuracy": 1.0, "loss": 1.0}, POLICY_PANELS),
        ({"loss": 1.0, "rewards/accuracies": 0.5}, REWARD_MODEL_PANELS),
        ({"loss": 1.0, "steps/error": 0.5}, PROCESS_REWARD_PANELS),
        (
            {"loss": 1.0, "entropy": 1.0},
            (("eval/reward", "exact/reward"), ("eval/accuracy",), ("entropy",), ("eval/logp", "loss")),
        ),
        (
            {"entropy": 1.0, "rewards/accuracies": 0.5},
            (("eval/reward", "exact/reward"), ("eval/accuracy",), ("entropy",), PAIRS),
        ),
    ],
)
def test_the_panels_of_a_run(metrics: dict[str, float], panels: Any) -> None:
    assert panels_for([{"step": 0}, {"step": 1, **metrics}]) == panels


def test_non_finite_measures_are_omitted_over_seeds() -> None:
    finals = {"a": {0: {"reward": 1.0}, 1: {"reward": 3.0}}, "b": {0: {"reward": float("nan")}, 1: {"reward": 4.0}}}
    rows = compare_over_seeds(finals, {"a": ["reward"], "b": ["reward"]})
    assert rows["a"]["reward"]["mean"] == 2.0 and rows["b"] == {}


# ---- heartbeats, and replicas ---------------------------------------------------------------------------


def test_age_of_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_list, "_last_heartbeats", {})
    monkeypatch.setattr(run_list, "MAX_SEEN_HEARTBEATS", 1)
    assert run_list.heartbeat_age(tmp_path / "a", {}, 5.0) is None
    assert run_list.heartbeat_age(tmp_path / "a", {"time": 1.0}, 10.0) == 9.0
    assert run_list.heartbeat_age(tmp_path / "a", {"time": 2.0}, 20.0) == 0.0
    assert run_list.heartbeat_age(tmp_path / "a", {"time": 2.0}, 25.0) == 5.0, "since it was seen to change"
    assert run_list.heartbeat_age(tmp_path / "b", {"time": 1.0}, 30.0) == 29.0
    assert run_list.heartbeat_age(tmp_path / "a", {"time": 2.0}, 30.0) == 28.0, "bounded memory"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "in the future: the clocks of the two machines differ"),
        (0, "0 s ago"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (7200, "2 h ago"),
        (172_800, "2 days ago"),
    ],
)
def test_ago_formats_durations(seconds: float, words: str) -> None:
    assert run_list.ago(seconds) == words


def test_replica_log_with_a_lost_replica_and_invalid_lines(tmp_path: Path) -> None:
    def line(version: int, **replicas: Any) -> dict[str, Any]:
        return {"time": 1.0, "seconds": 10.0, "waited": 2.0, "version": version, "replicas": replicas}

    def one(**more: Any) -> dict[str, Any]:
        return {"version": 3, "tokens": 100, "drawing": 4.0, "loading": 1.0, "lost": 1, "away": False, **more}

    lines = [line(3, **{"sampler-0": one(), "sampler-1": one()}), line(4, **{"sampler-1": one(version=4, tokens=60)})]
    lines.append(line(9, **{"sampler-1": one(away="no")}))
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / REPLICA_LOG).write_text("".join(json.dumps(each) + "\n" for each in lines))
    learners, left, there = replicas_of(tmp_path)
    assert learners == {"name": "learners", "state": "train", "version": 4, "idle": 0.2}
    assert left == {"name": "sampler-0", "tokens": 100, "lost": 1, "state": "left", "version": 3}
    assert there == {
        **{"name": "sampler-1", "tokens": 160, "lost": 2, "state": "ready", "version": 4},
        **{"rate": 20.0, "loading": 0.1, "idle": 0.5},
    }
    assert replica_events(tmp_path) == []


# ---- checkpoints and folders -------------------------------------------------------------------------------


def test_failed_checkpoint_write_reports_the_disk_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=os.strerror(errno.ENOENT)):
        checkpoint.write_atomically(tmp_path / "a", {"no/such/folder": {"x": torch.zeros(1)}}, {}, {})

    def fail(words: str) -> None:
        def save(*_: Any) -> None:
            raise SafetensorError(words)

        monkeypatch.setattr(checkpoint, "save_file", save)

    for words, code in (("Error: Io(Os { code: 28, kind: StorageFull })", errno.ENOSPC), ("other", errno.EIO)):
        fail(words)
        with pytest.raises(OSError, match=os.strerror(code)) as error:
            checkpoint.write_atomically(tmp_path / "a", {"params": {"x": torch.zeros(1)}}, {}, {})
        assert error.value.errno == code
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"step": 2, "records": {"metrics": -1}, "state": {}}, "state.json does not say where the records ended"),
        ({"step": 2, "records": {"metrics": 1.5}, "state": {}}, "state.json does not say where the records ended"),
        ({"step": None, "records": {}, "state": {}}, "state.json does not say where the records ended"),
        ({"step": 2, "records": {"metrics": 7}, "state": {"a": 1}}, ""),
    ],
)
def test_checkpoint_needs_the_sizes_of_the_records(tmp_path: Path, state: dict[str, Any], why: str) -> None:
    checkpoint.save(tmp_path / "checkpoints", 2, {"params": {"x": torch.ones(1)}}, state, 1)
    path = tmp_path / "checkpoints" / "step_000002"
    if why:
        with pytest.raises(ConfigError, match=f"is corrupt: {why}. There is no older one for --from"):
            checkpoint.load_checkpoint(path)
    else:
        assert checkpoint.load_checkpoint(path)[1] == state


def test_params_of_a_folder_without_manifest(tmp_path: Path) -> None:
    save_file({"x": torch.arange(3)}, tmp_path / "params.safetensors")
    assert checkpoint.params(tmp_path)["x"].tolist() == [0, 1, 2]


def test_invalid_shards_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float12 is not a dtype of parameters"):
        read_parts(tmp_path, "float12")
    save_file({"params/x": torch.arange(3)}, tmp_path / "part.safetensors", {"DCP_SHARDING_INFO": "{}"})
    with pytest.raises(ValueError, match="its shards cannot be assembled: 'params/x'"):
        read_parts(tmp_path, "float32")


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: cannot write there \(No such file or directory\)"):
        RunFolder.reopen(tmp_path / "nowhere")


@pytest.mark.parametrize("greedy", [True, False])
def test_an_evaluation_is_replayed_from_the_journal(tmp_path: Path, greedy: bool) -> None:
    journal, kept = Journal(tmp_path), []
    (tmp_path / "journal").mkdir()
    answers = batch_of([[1.0, 2.0]]) if greedy else None
    told = journal.evaluation(lambda: {"eval/reward": 1.5}, lambda: answers, kept.append)
    assert told == {"eval/reward": 1.5} and kept == []
    again = Journal(tmp_path).evaluation(lambda: pytest.fail("it was evaluated"), lambda: None, kept.append)
    assert again == told and len(kept) == greedy
    assert not greedy or kept[0].reward.tolist() == [[[1.0], [2.0]]]


# ---- a run -------------------------------------------------------------------------------------------------


def test_missing_parts_of_a_run_are_errors(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ascent.Run(run)
    for ask in (found.checkpoint, lambda: found.checkpoint(best=True)):
        with pytest.raises(ConfigError, match=r"run: no checkpoint yet, so there is no policy to load"):
            ask()
    with pytest.raises(ConfigError, match=r"--init .*run: that run has no checkpoint yet"):
        init_folder(run)
    with pytest.raises(ConfigError, match="77"):
        summary_rows(run, "ascent", 77)
    assert len(found.completions()) == len(found.rollouts(5)) > 0
    (run / "checkpoints" / "step_000002").mkdir(parents=True)
    assert found.checkpoint().name == "step_000002"
    (run / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0}\n')
    with pytest.raises(ConfigError, match=r"--best: .*run was never evaluated, so it has no best checkpoint"):
        found.checkpoint(best=True)
    shutil.rmtree(run / "rollouts")
    with pytest.raises(ConfigError, match=r"run: no responses were recorded \(--record-rollouts\)"):
        found.completions()
    assert found.frame().index.tolist() == [0]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"run.frame\(\) needs pandas: pip install pandas. Without it: run.metrics"):
        found.frame()


# ---- Parquet -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        ("15 06 00", {1: 3}),
        ("15 05 00", {1: -3}),
        ("15 80 08 00", {1: 512}),
        ("05 0e 06 00", {7: 3}),
        ("11 12 00", {1: True, 2: False}),
        ("19 25 02 04 15 06 00", {1: None, 2: 3}),
        ("19 f5 10" + " 02" * 16 + " 15 06 00", {1: None, 2: 3}),
        ("1a 31 01 02 01 15 06 00", {1: None, 2: 3}),
        ("18 02 ff ff 15 06 00", {1: None, 2: 3}),
        ("13 ff 17 01 02 03 04 05 06 07 08 15 06 00", {1: None, 2: None, 3: 3}),
        ("1c 15 06 00 15 02 00", {1: {1: 3}, 2: 1}),
    ],
)
def test_thrift_header_is_parsed(data: str, fields: dict[int, Any]) -> None:
    """A field starts with a byte of the increment of its number and its type; integers are zigzag varints."""
    whole = bytes.fromhex(data)
    assert parse_thrift_struct(whole + b"rest") == (fields, len(whole))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("15" + " ff" * 12, "a number in the header of a page is too long"),
        ("1c" * 9 + "00" * 10, "the header of a page is nested too deeply"),
    ],
)
def test_invalid_thrift_header_is_an_error(data: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_thrift_struct(bytes.fromhex(data))


def test_deepest_allowed_header_is_parsed() -> None:
    assert parse_thrift_struct(bytes.fromhex("1c" * 8 + "00" * 9))[1] == 17


FIXED = pa.array([b"x" * 100, b"y" * 100] * 500, pa.binary(100))
NESTED = pa.array([{"a": "x" * 500}] * 1000)
LISTED = pa.array([["x" * 500]] * 1000)


@pytest.mark.parametrize(
    ("array", "small", "large"),
    [
        (pa.array(np.zeros(10_000)), 150_000, 200_000),
        (FIXED, 200_000, 250_000),
        (NESTED, 450_000, 600_000),
        (LISTED, 450_000, 600_000),
    ],
)
def test_parquet_file_that_expands_too_much_is_rejected(
    array: Any, small: int, large: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes: 8 per row and number, 100 per fixed-length value, and the length of every text, counting repetitions."""
    pq.write_table(pa.table({"a": array}), tmp_path / "a.parquet", compression="zstd")
    monkeypatch.setattr(parquet_reader, "MAX_EXPANSION", 1)
    monkeypatch.setattr(parquet_reader, "MIN_SIZE_LIMIT", large)
    with open_parquet(tmp_path / "a.parquet") as file:
        assert file.read(["a"]).num_rows == len(array)
    monkeypatch.setattr(parquet_reader, "MIN_SIZE_LIMIT", small)
    why = r"a\.parquet would take more than 0 MiB of memory"
    with pytest.raises(ConfigError, match=why), open_parquet(tmp_path / "a.parquet") as file:
        file.read(["a"])


# ---- runs of other libraries -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, "b"]}], "ab"),
        ([{"role": "user", "content": None}], ""),
        ([{"role": "user", "content": None, "name": None}, "b"], "user: \n: b"),
    ],
)
def test_the_text_of_messages(value: Any, text: str) -> None:
    assert foreign_runs.message_text(value) == text


def test_a_message_without_content_shows_the_rest() -> None:
    shown = foreign_runs.message_text([{"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}])
    assert "add" in shown and "role" not in shown and "None" not in shown


def test_missing_trl_completions_are_errors(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    path = tmp_path / "completions" / "completions_00002.parquet"
    pq.write_table(pa.table({"step": [2], "prompt": ["p"], "completion": ["c"], "right": [1.0]}), path)
    assert [row["response_text"] for row in foreign_runs.foreign_rows(tmp_path, 2)] == ["c"]
    with pytest.raises(ConfigError, match="step 3: there are no completions of that step"):
        foreign_runs.foreign_rows(tmp_path, 3)
    pq.write_table(pa.table({"step": [2], "words": ["p"]}), path)
    with pytest.raises(ConfigError, match=r"has no column completion and prompt: these are not TRL's completions"):
        foreign_runs.READERS["trl"].rows(path)


def test_deleted_file_is_not_in_the_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("a")
    files = [tmp_path / "a"]
    monkeypatch.setattr(foreign_runs, "foreign_files", lambda _: files)
    alone = foreign_runs.fingerprint(tmp_path)
    files.insert(0, tmp_path / "gone")
    assert foreign_runs.fingerprint(tmp_path) == alone
    files.pop()
    assert foreign_runs.fingerprint(tmp_path) != alone


@pytest.mark.parametrize(
    ("before", "now", "flat"),
    [([0.5], [0.5, 0.5], False), ([0.5] * 9, [0.5] * 9, True), ([0.1] * 9, [0.9] * 9, False)],
)
def test_accuracy_is_flat_only_if_measured(before: list[float], now: list[float], flat: bool) -> None:
    """Two measurements on either side are needed; a rise of at most 0.05 is flat."""
    windows = StepBlock(0, 8, [*sums(before)]), StepBlock(9, 17, [*sums(now)])
    assert WindowComparison(["accuracy"], *windows).flat is flat
