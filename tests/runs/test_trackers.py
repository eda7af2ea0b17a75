"""Trackers store the metrics that were sent (read back with their tools), and their failures do not affect a run."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ascent.core.errors import ConfigError
from ascent.runs.metrics import CHARTS
from ascent.runs.trackers import tracker_threads
from ascent.runs.trackers.tracker import StepMetrics, Tracker, flatten_config
from ascent.runs.trackers.tracker_threads import TRACKERS, Trackers, finite_metrics

CONFIG = {"task": {"name": "sort", "length": 3}, "loss": {"name": "clipped", "high": 0.28}, "steps": 3}
METRICS = {"step": 1, "reward": 0.5, "clip_ratio/low_mean": 0.25, "kl": None, "loss": float("nan"), "time/step": 2}


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


def opened(folder: Path, *names: str, resume_step: int = 0) -> tuple[Trackers, Said]:
    said = Said()
    return Trackers(names, folder, CONFIG, "a-run", resume_step, said), said


def run(folder: Path, name: str, steps: range, status: str = "finished", resume_step: int = 0) -> Said:
    """Log steps whose reward is the step."""
    tracked, said = opened(folder, name, resume_step=resume_step)
    for step in steps:
        tracked.step(step, METRICS | {"step": step, "reward": float(step)})
    tracked.close(status)
    return said


# ---- with the real libraries ----------------------------------------------------------------------


def test_tensorboard_has_finite_numbers_and_hides_repeated_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(tmp_path, "tensorboard", range(5), status="interrupted") == []
    assert run(tmp_path, "tensorboard", range(3, 6), resume_step=3) == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"reward", "clip_ratio/low_mean", "time/step"}
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(step, float(step)) for step in range(6)]
    assert b"clipped" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_has_the_charts_of_the_table_of_metrics(tmp_path: Path) -> None:
    """Charts have the order and the titles of the table, and each chart matches exactly its metrics."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    run(tmp_path, "tensorboard", range(1))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (held,) = events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val
    (category,) = Layout.FromString(held).category
    assert [chart.title for chart in category.chart] == [chart.title for chart in CHARTS]
    names = [metric.name for chart in CHARTS for metric in chart.series]
    for drawn, chart in zip(category.chart, CHARTS, strict=True):
        matched = [name for name in names if any(re.match(tag, name) for tag in drawn.multiline.tag)]
        assert matched == [metric.name for metric in chart.series]


@pytest.mark.smoke
def test_mlflow_writes_into_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracker_threads.Mlflow, "max_metrics_per_call", 2)
    monkeypatch.setattr(tracker_threads, "CLOSE_TIMEOUT", 60.0)
    assert run(tmp_path, "mlflow", range(3), status="interrupted") == []
    assert run(tmp_path, "mlflow", range(3, 5), resume_step=3) == []
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "ascent"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == "a-run" and found.info.status == "FINISHED"
    assert found.data.params["loss.high"] == "0.28"
    assert set(found.data.metrics) == {"reward", "clip_ratio/low_mean", "time/step"}
    history = client.get_metric_history(found.info.run_id, "reward")
    assert sorted((m.step, m.value) for m in history) == [(step, float(step)) for step in range(5)]


@pytest.mark.slow
@pytest.mark.smoke
def test_wandb_offline_writes_into_the_folder_and_continues_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an API key and WANDB_MODE, nothing is asked or sent."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "300")  # its process may take long to start on a busy machine
    monkeypatch.setattr(tracker_threads, "CLOSE_TIMEOUT", 300.0)
    (said,) = run(tmp_path, "wandb", range(3))
    assert "wandb sync" in said
    (said,) = run(tmp_path, "wandb", range(3, 5), resume_step=3)
    assert "wandb sync" in said
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    identity = (tmp_path / "wandb" / "id").read_text()
    assert len(files) == 2 and {file.stem for file in files} == {f"run-{identity}"}
    written = [(s, float(s)) for s in range(5)]  # by a process of its own, which may take its time
    until(lambda: [step for file in files for step in wandb_rewards(file)] == written, 120)


def wandb_rewards(file: Path) -> list[tuple[int, float]]:
    """Return the steps and rewards in a run's file: protocol buffers in a LevelDB log with 7-byte headers."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + size > len(data):
            break
        whole = (whole if kind in (3, 4) else b"") + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            values = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            assert not {"kl", "loss"} & set(values)
            found += [(values["step"], values["reward"])] if values else []
    return found


@pytest.mark.smoke
def test_trackio_logs_the_run_without_printing(tmp_path: Path) -> None:
    """This runs in a separate process, because Trackio reads TRACKIO_DIR at import."""
    code = f"""
from pathlib import Path
from ascent.runs.trackers.tracker_threads import Trackers
for steps, first in ((range(3), 0), (range(3, 5), 3)):
    tracked = Trackers(("trackio",), Path({str(tmp_path)!r}), {CONFIG!r}, "a-run", first, print)
    for step in steps:
        tracked.step(step, {{"reward": float(step)}})
    tracked.close("finished")
import trackio.run, trackio.utils
assert not any("print" in vars(module) for module in (trackio, trackio.run, trackio.utils)), "undone"
"""
    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path), "PATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    with sqlite3.connect(tmp_path / "trackio" / "ascent.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [("a-run", step) for step in range(5)]


# ---- refused before work --------------------------------------------------------------------------


def test_unknown_tracker_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--track tensorbord: no such tracker.*Did you mean tensorboard"):
        opened(tmp_path, "tensorbord")


def test_missing_tracker_package_is_rejected_before_any_tracker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Missing(Fake):
        package = "no_such_tracker"

    monkeypatch.setitem(TRACKERS, "missing", Missing)
    with pytest.raises(ConfigError, match=r"--track missing.*pip install 'ascent-rl\[track\]'"):
        opened(tmp_path, "tensorboard", "missing")
    assert not (tmp_path / "tensorboard").exists()


# ---- trackers that misbehave ----------------------------------------------------------------------


class Fake(Tracker):
    """A tracker that keeps the metrics it gets, and fails or hangs on request."""

    package = "json"
    made: list[Fake]
    failing = 0
    """Number of calls of `log` that fail."""
    hanging: threading.Event | None = None
    """`log` waits for it."""

    def start(self) -> str | None:
        self.rows: list[StepMetrics] = []
        self.ended: str | None = None
        self.threads = {threading.get_ident()}
        type(self).made.append(self)
        return None

    def log(self, rows: list[StepMetrics]) -> None:
        self.threads.add(threading.get_ident())
        if self.hanging is not None:
            self.hanging.wait()
        if self.failing > 0:
            self.failing -= 1
            raise OSError("the server is down")
        self.rows += rows

    def end(self, status: str) -> None:
        self.ended = status


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    """A new tracker class for each test, named `fake`, with short retry delays."""
    made = type("Fake", (Fake,), {"made": []})
    monkeypatch.setitem(TRACKERS, "fake", made)
    monkeypatch.setattr(tracker_threads, "RETRY_DELAYS", (0.01, 0.01))
    return made


def until(true: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def test_every_step_arrives_in_order_from_one_thread(fake: type[Fake], tmp_path: Path) -> None:
    said = run(tmp_path, "fake", range(200))
    (tracker,) = fake.made
    assert [step for step, _ in tracker.rows] == list(range(200)) and tracker.ended == "finished" and said == []
    assert len(tracker.threads) == 1 and threading.get_ident() not in tracker.threads


def test_transient_failure_is_reported_once_and_loses_nothing(fake: type[Fake], tmp_path: Path) -> None:
    fake.failing = 2
    said = run(tmp_path, "fake", range(3))
    assert len(said) == 1 and "OSError: the server is down" in said[0] and "The run continues" in said[0]
    assert [step for step, _ in fake.made[0].rows] == [0, 1, 2]


def test_three_consecutive_failures_drop_only_that_tracker(fake: type[Fake], tmp_path: Path) -> None:
    fake.failing = 10**9
    tracked, said = opened(tmp_path, "fake", "tensorboard")
    tracked.step(0, {"reward": 0.0})
    until(lambda: not tracked.threads[0].thread.is_alive())
    for step in range(1, 50):
        tracked.step(step, {"reward": 0.0})
    tracked.close("finished")
    assert [("failed" in text, "dropped" in text) for text in said] == [(True, False), (False, True)]
    assert tracked.threads[0].failures == 3 and fake.made[0].ended is None
    assert list((tmp_path / "tensorboard").iterdir())


def test_tracker_that_cannot_start_is_reported_and_dropped(
    fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Fake) -> str | None:
        raise SystemExit("no key")

    monkeypatch.setattr(fake, "start", start)
    said = run(tmp_path, "fake", range(3))
    assert "SystemExit: no key" in said[0] and "dropped" in said[1] and len(said) == 2


def test_hanging_tracker_blocks_neither_steps_nor_the_end(
    fake: type[Fake], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.hanging = threading.Event()
    monkeypatch.setattr(tracker_threads, "QUEUE_SIZE", 8)
    monkeypatch.setattr(tracker_threads, "CLOSE_TIMEOUT", 0.2)
    said = run(tmp_path, "fake", range(1000))  # or it would never come back
    assert len(said) == 2 and "too slow or hangs" in said[0] and "did not finish in 0.2 s" in said[1]
    fake.hanging.set()
    until(lambda: fake.made[0].ended == "finished")
    assert len(fake.made[0].rows) <= 2 * 8 + 1, "those in the call that hung, and those that waited behind it"


def test_tracker_messages_are_reported_in_the_thread_of_the_run(fake: type[Fake], tmp_path: Path) -> None:
    """The caller may write the messages to a file without a lock."""
    fake.failing = 10**9
    spoke: list[int] = []
    tracked = Trackers(("fake",), tmp_path, CONFIG, "a-run", 0, lambda _: spoke.append(threading.get_ident()))
    tracked.step(0, {"reward": 1.0})
    tracked.close("failed")
    assert set(spoke) == {threading.get_ident()} and spoke


def test_without_trackers_there_is_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    tracked, said = opened(tmp_path)
    tracked.step(0, METRICS)
    tracked.close("finished")
    assert threading.active_count() == before and said == []


def test_only_finite_metrics_are_sent_and_config_is_flattened() -> None:
    given = {**METRICS, "inf": float("inf"), "flag": True, "text": "x", "list": [1.0]}
    assert finite_metrics(given) == {"reward": 0.5, "clip_ratio/low_mean": 0.25, "time/step": 2.0}
    assert flatten_config(CONFIG) == {
        "task.name": "sort",
        "task.length": 3,
        "loss.name": "clipped",
        "loss.high": 0.28,
        "steps": 3,
    }
