"""Runs as the viewer reads them: which there are, what became of them, and their curves, whole and in parts."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

import ascent
from ascent.core.errors import ConfigError
from ascent.lab.curves import ColumnCache, curves, measured_metrics, spark
from ascent.lab.pages.run.page import occupancy_at, run_page
from ascent.lab.pages.runs.page import read_note, run_row, run_row_or_reason, write_note
from ascent.lab.server import application
from ascent.runs import metric_columns
from ascent.runs.metric_columns import MetricColumns, parse_lines
from ascent.runs.metrics import CHARTS, charts_with_data, evaluation_label
from ascent.runs.run_folder import RunFolder
from ascent.runs.run_list import RunEntry, find_run, how_to_resume, run_status, runs_below, status_reason
from ascent.server.guard import Guard, host_names


def written(path: Path, lines: list[dict[str, Any]], mode: str = "w") -> Path:
    with open(path, mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


def walk(count: int, start: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    """Lines as a trainer writes them: one metric on every line, one now and then, one from the middle on."""
    draw = random.Random(seed)
    lines = []
    for step in range(start, start + count):
        line: dict[str, Any] = {"step": step, "reward": draw.gauss(0, 1), "eval/accuracy": None, "loss": draw.random()}
        if step % 7 == 0:
            line["eval/accuracy"] = draw.random()
        if step >= 50:
            line["late"] = step / 2
        lines.append(line)
    return lines


def read(path: Path) -> MetricColumns:
    found = MetricColumns(path)
    found.update()
    return found


# ---- curves ----


def test_few_lines_are_points_as_they_were_written(tmp_path: Path) -> None:
    lines = walk(100)
    found = curves(read(written(tmp_path / "m", lines)), ["reward", "eval/accuracy", "late", "absent"])
    assert found["bucket"] == 1 and found["x"] == list(range(100)) and (found["first"], found["last"]) == (0, 99)
    assert found["metrics"]["reward"] == {"mean": [line["reward"] for line in lines]}
    assert found["metrics"]["eval/accuracy"]["mean"] == [line["eval/accuracy"] for line in lines]
    assert found["metrics"]["late"]["mean"] == [line.get("late") for line in lines]
    assert "absent" not in found["metrics"]


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 700), points=st.integers(2, 40), cut=st.integers(0, 700))
def test_buckets_hold_what_numpy_computes_whatever_was_read_when(
    tmp_path_factory: pytest.TempPathFactory, count: int, points: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("m") / "m"
    lines = walk(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metric_columns, "READ_CHUNK_BYTES", 1000)
        found = read(written(path, lines[:cut]))
        written(path, lines[cut:], "a")
        found.update()
        assert found.num_kept == found.num_lines == count
        drawn = curves(found, ["reward", "eval/accuracy"], points=points)
    size = drawn["bucket"]
    assert len(drawn["x"]) == -(-count // size) <= max(points, 1)
    for name in ("reward", "eval/accuracy"):
        if name not in drawn["metrics"]:
            assert all(line[name] is None for line in lines)
            continue
        for i, x in enumerate(drawn["x"]):
            part = lines[i * size : (i + 1) * size]
            values = [line[name] for line in part if line[name] is not None]
            assert x == (part[0]["step"] + part[-1]["step"]) / 2
            mean = drawn["metrics"][name]["mean"][i]
            assert (mean is None) == (not values)
            if values:
                assert mean == pytest.approx(float(np.mean(values)), rel=1e-6, abs=1e-12)
            if values and size > 1:
                low, high = drawn["metrics"][name]["low"][i], drawn["metrics"][name]["high"][i]
                assert (low, high) == pytest.approx((min(values), max(values)), rel=1e-6)


def test_a_part_of_a_long_run_is_exact(tmp_path: Path) -> None:
    lines = walk(9000)
    found = read(written(tmp_path / "m", lines))
    assert curves(found, ["reward"])["bucket"] > 1
    near = curves(found, ["reward", "eval/accuracy"], (4_321, 4_700))
    assert near["bucket"] == 1 and near["x"] == list(range(4_321, 4_701))
    assert near["metrics"]["reward"]["mean"] == [line["reward"] for line in lines[4_321:4_701]]
    assert near["metrics"]["eval/accuracy"]["mean"] == [line["eval/accuracy"] for line in lines[4_321:4_701]]
    assert curves(found, ["reward"], (8_990, 1e9))["x"] == list(range(8_990, 9_000))
    assert curves(found, ["reward"], (20_000, 30_000))["x"] == []


def test_a_torn_last_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "m", walk(3))
    whole = json.dumps({"step": 3, "reward": 9.0}) + "\n"
    with open(path, "a") as file:
        file.write(whole[:10])
    found = read(path)
    assert found.num_lines == 3 and not found.bad_lines
    with open(path, "a") as file:
        file.write(whole[10:])
    found.update()
    assert curves(found, ["reward"])["metrics"]["reward"]["mean"][3] == 9.0


def test_a_file_that_was_cut_back_and_went_on_is_read_anew(tmp_path: Path) -> None:
    """As a resume does: cut to a checkpoint, then other lines, until the file is longer than it was."""
    path = written(tmp_path / "m", walk(50))
    found = read(path)
    kept = walk(20)
    written(path, kept + walk(60, start=20, seed=1))
    found.update()
    assert curves(found, ["loss"])["metrics"]["loss"]["mean"][20:] == [x["loss"] for x in walk(60, start=20, seed=1)]
    path.unlink()
    found.update()
    assert found.num_lines == 0 and curves(found, ["loss"])["x"] == []


def test_what_is_not_finite_is_marked_and_never_drawn(tmp_path: Path) -> None:
    lines = walk(10)
    lines[4] |= {"loss": None, "nonfinite": {"loss": "nan"}}
    path = written(tmp_path / "m", lines)
    with open(path, "a") as file:
        file.write('{"step": 10, "reward": NaN, "loss": -Infinity}\n')  # as other programs write it
    drawn = curves(read(path), ["loss", "reward"])
    assert drawn["nonfinite"] == {"loss": [(4.0, "nan"), (10.0, "-inf")], "reward": [(10.0, "nan")]}
    assert drawn["metrics"]["loss"]["mean"][4] is None and drawn["metrics"]["reward"]["mean"][10] is None
    json.dumps(drawn, allow_nan=False)


def test_lines_that_cannot_be_read_are_named_and_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "m", walk(2))
    with open(path, "a") as file:
        file.write('{"step": 2, "rew\n[1]\n{"reward": 1}\n\n')
    written(path, walk(2, start=3), "a")
    found = read(path)
    assert found.num_lines == 4 and found.num_bad_lines == 4
    assert found.bad_lines[0].startswith("line 3 is no JSON") and found.bad_lines[1] == "line 4 has no step"
    assert curves(found, ["reward"])["x"] == [0, 1, 3, 4]


def test_a_metric_that_is_a_word_in_one_line_does_not_cost_the_others(tmp_path: Path) -> None:
    lines = [*walk(3), {"step": 3, "reward": "high", "loss": True, "more": [1, 2]}]
    drawn = curves(read(written(tmp_path / "m", lines)), ["reward", "loss"])
    assert drawn["metrics"]["reward"]["mean"][3] is None and drawn["metrics"]["loss"]["mean"][3] is None
    assert drawn["metrics"]["reward"]["mean"][:3] == [line["reward"] for line in lines[:3]]


@pytest.mark.long
@pytest.mark.smoke
def test_memory_does_not_grow_with_a_run_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_columns, "MAX_NUMBERS", 50_000)
    path, sizes = tmp_path / "m", []
    found = MetricColumns(path)
    for part in range(20):
        written(path, walk(2_500, start=2_500 * part), "a")
        found.update()
        sizes.append(found.size)
    assert found.num_lines == 50_000 and max(sizes) <= 8 * metric_columns.MAX_NUMBERS and found.stride == 8
    assert "one of 8 lines is shown" in found.problem and found.steps.tolist() == list(range(0, 50_000, 8))
    drawn = curves(found, ["reward", "late"], points=100)
    assert drawn["first"] == 0 and drawn["bucket"] == 500
    assert drawn["metrics"]["late"]["mean"][50] == pytest.approx(drawn["x"][50] / 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(50):
        curves(found, ["reward", "loss"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_the_library_forgets_what_was_asked_for_longest_ago(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascent.lab.curves.MAX_CACHE_BYTES", 60_000)
    column_cache = ColumnCache()
    for i in range(12):
        folder = tmp_path / str(i)
        folder.mkdir()
        written(folder / "metrics.jsonl", walk(300))
        with column_cache.columns(RunEntry(str(i), folder, "ascent")) as found:
            assert found.num_lines == 300
    assert 1 <= len(column_cache._cached) < 12 and tmp_path / "11" in column_cache._cached


def test_a_sparkline_is_of_the_first_metric_with_a_curve(tmp_path: Path) -> None:
    assert spark(read(written(tmp_path / "a", walk(400))))["metric"] == "eval/accuracy"
    only = [{"step": i, "reward": float(i), "eval/accuracy": None} for i in range(400)]
    found = spark(read(written(tmp_path / "b", only)))
    assert found["metric"] == "reward" and 2 <= len(found["points"]) <= 60
    assert found["points"] == sorted(found["points"])
    assert spark(read(tmp_path / "missing")) == {"metric": None, "points": []}


def test_charts_come_in_order_with_the_loss_last() -> None:
    keys = [chart.key for chart in CHARTS]
    first = [
        "accuracy",
        "reward",
        "spread",
        "length",
        "truncated",
        "entropy",
        "kl",
        "clip",
        "signal",
        "extremes",
        "grad",
        "mismatch",
    ]
    assert [key for key in keys if key in first] == first
    assert keys.index("mismatch") < keys.index("speed") < keys.index("time") < keys.index("loss") == len(keys) - 1
    found = charts_with_data({"loss", "reward"})
    assert [chart["key"] for chart in found] == ["reward", "loss"] and len(found[0]["series"]) == 1


def test_series_are_named_and_coloured_for_what_they_are() -> None:
    names = {
        "eval/accuracy",
        "accuracy",
        "eval/reward",
        "reward",
        "eval/lenient",
        "frac_reward_zero_std",
        "frac_all_right",
    }
    charts = {c["key"]: c for c in charts_with_data(names, evaluation_label("sort"))}
    colours = {key: {s["label"]: s["colour"] for s in charts[key]["series"]} for key in ("accuracy", "reward")}
    assert colours["accuracy"] == {"held out, greedy": 0, "sampled": 1, "held out, greedy, any form": 3}
    assert colours["reward"] == {"held out, greedy": 0, "sampled": 1}
    assert [s["metric"] for s in charts["signal"]["series"]] == ["frac_reward_zero_std"], "all right may have signal"
    assert [s["metric"] for s in charts["extremes"]["series"]] == ["frac_all_right"]
    assert evaluation_label("lecture") == "greedy", "it holds nothing out"
    assert evaluation_label("my.py:Task") == evaluation_label(None) == evaluation_label({"a": 1}) == "greedy answers", (
        "nobody knows"
    )


def test_a_list_does_not_say_status_and_steps_twice_and_a_page_says_how_to_go_on(tmp_path: Path) -> None:
    said = "died after 7 of 12 steps: no process here writes it, last heartbeat 3 h ago"
    assert status_reason("died", said) == "no process here writes it, last heartbeat 3 h ago"
    assert status_reason("running", "running, 7 of 12 steps, last heartbeat 3 s ago") == "last heartbeat 3 s ago"
    assert status_reason("interrupted", "stopped and saved after 7 of 12 steps") == "stopped and saved"
    assert status_reason("failed", "failed after 7 of ? steps") == ""
    assert how_to_resume(tmp_path, "finished") is None and how_to_resume(tmp_path, "running") is None
    assert "command" not in (how_to_resume(tmp_path, "died") or {})
    (tmp_path / "a run" / "checkpoints" / "step_000004").mkdir(parents=True)
    assert (how_to_resume(tmp_path / "a run", "died") or {})["command"] == f"ascent resume '{tmp_path}/a run'"


def test_parsing_many_lines_at_once_is_parsing_each(tmp_path: Path) -> None:
    """Pyarrow's reader against json's, through the one path and the other."""
    data = written(tmp_path / "m", walk(300)).read_bytes()
    fast, slow = parse_lines(data), parse_lines(data + b'{"step": 300, "reward": NaN}\n')
    for name in ("reward", "eval/accuracy", "late"):
        np.testing.assert_array_equal(fast.columns[name], slow.columns[name][:300])
    np.testing.assert_array_equal(fast.steps, slow.steps[:300])


# ---- which runs there are, and what became of them ----


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, one within a comparison, and things that are no runs."""
    root = tmp_path_factory.mktemp("runs")
    ascent.train("lecture", steps=4, record_every=1, show=False, out=root / "plain")
    ascent.train("lecture", steps=2, seed=1, show=False, out=root / "many" / "grpo-s1")
    (root / "empty").mkdir()
    (root / ".lab").mkdir()
    (root / "file").write_text("x")
    outside = tmp_path_factory.mktemp("outside")
    ascent.train("lecture", steps=1, show=False, out=outside / "secret")
    (root / "link").symlink_to(outside / "secret")
    return root


@pytest.mark.long
def test_every_run_below_a_folder_is_found(root: Path) -> None:
    assert [(p.id, p.kind) for p in runs_below(root)] == [("many/grpo-s1", "ascent"), ("plain", "ascent")]
    assert find_run(root, "many/grpo-s1").folder == (root / "many" / "grpo-s1").resolve()


@pytest.mark.parametrize(
    "id",
    [
        *("", ".", "..", "../x", "plain/..", "plain/../plain", "/etc", "plain//", "a\0b", "many\\grpo-s1", ".lab"),
        *("x" * 600, "empty", "file", "missing", "link", "plain/checkpoints", "many"),
    ],
)
def test_nothing_but_runs_inside_the_folder_is_opened(root: Path, id: str) -> None:
    with pytest.raises(ConfigError):
        find_run(root, id)


def test_a_row_and_a_page_say_what_the_files_say(root: Path) -> None:
    place = find_run(root, "plain")
    run, last = ascent.Run(place.folder), ascent.Run(place.folder).metrics[-1]
    found = run_page(place, ColumnCache())
    assert (found["status"], found["said"]) == ("finished", "finished, 4 of 4 steps")
    assert (found["task"], found["step"], found["steps"], found["seed"]) == ("lecture", 4, 4, 5)
    assert found["accuracy"] == last["eval/accuracy"] and found["words"] == run.result["words"]  # type: ignore[index]
    assert found["objective"].startswith("Maximize") and "objective" not in found["config"]
    assert found["config"]["steps"] == 4 and found["versions"]["torch"] and found["problems"] == []
    assert found["recorded"] == [0, 1, 2, 3]
    assert found["charts"][0]["key"] == "accuracy" and found["charts"][-1]["key"] == "loss"
    json.dumps(found, allow_nan=False)


def test_missing_and_torn_files_are_said_and_cost_nothing_else(tmp_path: Path) -> None:
    run = ascent.train("lecture", steps=3, show=False, out=tmp_path / "runs" / "r").folder
    (run / "metrics.jsonl").unlink()
    (run / "config.json").write_text("{")
    with open(run / "events.jsonl", "a") as file:
        file.write('{"step": 1, "event": "alert", "name": "x", "text": "y"}\nnonsense\n{"step"')
    found = run_page(find_run(tmp_path / "runs", "r"), ColumnCache())
    assert any("metrics.jsonl is missing" in text for text in found["problems"])
    assert any("config.json cannot be read" in text for text in found["problems"])
    assert found["alerts"] == ["x"] and found["charts"] == [] and found["status"] == "finished"
    (run / "run.json").write_text("[]")
    row = run_row(find_run(tmp_path / "runs", "r"))
    assert row["status"] == "unreadable" and "run.json is not a JSON object" in row["said"]


def test_many_bad_lines_are_counted_and_a_few_shown(tmp_path: Path) -> None:
    run = ascent.train("lecture", steps=1, show=False, out=tmp_path / "runs" / "r").folder
    place = find_run(tmp_path / "runs", "r")
    for bad, counted in ((3, False), (2, True)):
        with open(run / "metrics.jsonl", "a") as file:
            file.write("nonsense\n" * bad)
        problems = run_page(place, ColumnCache())["problems"]
        assert len(problems) == 3 + counted
        assert ("metrics.jsonl: 5 lines in all cannot be read, and are left out" in problems) == counted


def test_a_run_that_breaks_its_row_is_in_the_list_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(_: Any) -> None:
        raise ZeroDivisionError("x" * 500)

    ascent.train("lecture", steps=1, show=False, out=tmp_path / "runs" / "r")
    place = find_run(tmp_path / "runs", "r")
    assert run_row_or_reason(place) == run_row(place)
    monkeypatch.setattr("ascent.lab.pages.runs.page.run_row", breaks)
    found = run_row_or_reason(place)
    assert found["said"].startswith("its files cannot be read: ZeroDivisionError: xxx") and len(found["said"]) == 300
    assert (found["id"], found["kind"], found["tags"], found["alerts"]) == ("r", "ascent", [], [])


def test_a_run_killed_before_it_began_is_in_the_list(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / ".lock").touch()
    assert run_row(find_run(tmp_path, "r"))["status"] == "died"


def test_status_is_what_is_heard_of_a_run(tmp_path: Path) -> None:
    run = {"status": "running", "step": 3, "steps": 9, "heartbeat": 1000.0}

    def status(sign: dict[str, Any] | None, now: float) -> tuple[str, str]:
        (tmp_path / ".alive").unlink(missing_ok=True)
        if sign is not None:
            (tmp_path / ".alive").write_text(json.dumps(sign))
        return run_status(tmp_path, run, now)

    here, there = {"host": socket.gethostname(), "pid": 1}, {"host": "elsewhere", "pid": 1}
    assert status(here | {"time": 1000.0}, 1001.0)[0] == "died", "on this machine the lock decides"
    assert status(there | {"time": 1000.0}, 1003.0) == (
        "running",
        "running on elsewhere, 3 of 9 steps, last heartbeat 3 s ago",
    )
    assert status(there | {"time": 1000.0}, 1000.0 + 7200)[0] == "died"
    assert "2 h ago" in status(there | {"time": 1000.0}, 1000.0 + 7200)[1]
    assert status(None, 1001.0)[0] == "died"
    run["machine"] = {"host": "elsewhere"}
    assert status(None, 1001.0) == ("running", "running on elsewhere, 3 of 9 steps, last heartbeat 1 s ago")
    assert "died" in status(None, 1000.0 + 7200)[0]
    run["machine"] = {"host": ["no", "name"]}
    assert status(None, 1001.0)[0] == "died"
    (tmp_path / ".alive").write_text("torn")
    assert run_status(tmp_path, run, 1001.0)[0] == "died"
    folder = RunFolder(tmp_path)
    folder.lock()
    try:
        assert status(here | {"time": 1000.0}, 1002.0)[0] == "running"
    finally:
        folder.close()
    assert run_status(tmp_path, run | {"status": "interrupted"})[1] == "stopped and saved after 3 of 9 steps"


# ---- notes ----


def test_notes_are_kept_beside_the_run_and_never_written_over_unseen(root: Path) -> None:
    folder = find_run(root, "plain").folder
    first = write_note(folder, "mine <b>", ["good", " good ", "", "λ"], "")
    assert json.loads((folder / "notes.json").read_text()) == {"text": "mine <b>", "tags": ["good", "λ"]}
    with pytest.raises(ConfigError, match="It says now: mine <b>"):
        write_note(folder, "another's", [], "")
    second = write_note(folder, "changed", [], first["revision"])
    assert second["text"] == "changed" and read_note(folder) == second
    for text, tags in (("x" * 30_000, []), ("x", ["y" * 50]), ("x", [str(i) for i in range(30)]), (3, []), ("x", "y")):
        with pytest.raises(ConfigError):
            write_note(folder, text, tags, second["revision"])
    assert read_note(folder) == second
    (folder / "notes.json").unlink()


def test_a_note_in_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("ascent.lab.pages.runs.page.write_json", denied)
    with pytest.raises(ConfigError, match=r"the note cannot be written \(Permission denied\): is the folder yours"):
        write_note(tmp_path, "mine", [], "")


def test_responses_decoded_at_once_are_those_of_the_step_or_the_last_before_it(tmp_path: Path) -> None:
    assert occupancy_at(tmp_path, None) == {}
    good = {"max_num_seqs": 8, "time/seconds": 4.0, "time/tail": 1.5, "time/running": [8, 3.25]}
    lines = [good | {"step": 0}, good | {"step": 2, "time/tail": 2.5}, good | {"step": 3, "time/running": [1, "x"]}]
    odd = [
        [],
        {"step": 4},
        good | {"step": "5"},
        good | {"step": 6, "time/seconds": 0},
        good | {"step": 7, "max_num_seqs": -1},
    ]
    odd += [good | {"step": 8, "time/running": running} for running in ("12", {"0": 1}, None, [math.nan], [1e300])]
    text = "\n".join([json.dumps(line) for line in lines + odd]) + '\nnonsense\n{"step": 9'
    (tmp_path / "occupancy.jsonl").write_text(text)
    first = {"step": 0, "max_num_seqs": 8, "seconds": 4.0, "tail": 1.5, "running": [8, 3.25]}
    assert occupancy_at(tmp_path, 0) == occupancy_at(tmp_path, 1) == first
    last = first | {"step": 2, "tail": 2.5}
    assert occupancy_at(tmp_path, 2) == occupancy_at(tmp_path, 9) == occupancy_at(tmp_path, None) == last


# ---- the routes ----


@pytest.fixture(scope="module")
def client(root: Path) -> TestClient:
    guard = Guard(application(root), host_names("127.0.0.1", 8321), b"s" * 32, base := "http://127.0.0.1:8321")
    client = TestClient(guard, base_url=base + guard.root, headers={"origin": base})
    client.get(guard.address)
    return client


def test_the_routes_answer_as_the_functions_do(client: TestClient, root: Path) -> None:
    assert [row["id"] for row in client.get("/api/view/runs").json()["runs"]] == ["many/grpo-s1", "plain"]
    assert client.get("/api/view/run", params={"id": "plain"}).json()["step"] == 4
    one = client.get("/api/view/curves", params={"id": "plain", "from": 1, "to": 2}).json()
    rewards = [line["reward"] for line in ascent.Run(root / "plain").metrics]
    assert one["runs"]["plain"]["metrics"]["reward"]["mean"] == rewards[1:3] and one["runs"]["plain"]["x"] == [1, 2]
    assert "loss" in one["runs"]["plain"]["metrics"]
    have = {"id": "plain", "have": one["runs"]["plain"]["revision"]}
    assert client.get("/api/view/curves", params=have).json() == {"unchanged": True, "status": "finished"}
    sparks = client.get("/api/view/spark", params={"id": ["plain", "gone"]}).json()
    assert list(sparks) == ["plain"] and sparks["plain"]["points"]
    wrote = client.post("/api/view/notes", json={"id": "plain", "text": "a", "tags": ["b"], "revision": ""})
    assert wrote.status_code == 200 and client.get("/api/view/runs").json()["runs"][1]["tags"] == ["b"]
    (root / "plain" / "notes.json").unlink()
    for page in ("runs", "run?id=plain", "compare?id=plain", "completions?id=plain"):
        assert client.get(f"/{page}").status_code == 200


@pytest.mark.parametrize(
    "query",
    [
        *("run", "run?id=missing", "run?id=../x", "curves"),
        *("occupancy", "occupancy?id=plain&step=x", "occupancy?id=../x"),
        *(
            "curves?id=plain&from=x",
            "curves?id=plain&to=nan",
            "spark",
            "spark?" + "&".join(f"id={i}" for i in range(60)),
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(client: TestClient, query: str) -> None:
    answer = client.get(f"/api/view/{query}")
    assert answer.status_code == 400 and answer.json()["error"]


def test_notes_from_elsewhere_are_refused(client: TestClient, root: Path) -> None:
    for asked in ({}, {"id": "plain"}, {"id": "../x", "text": "", "tags": [], "revision": ""}, {"id": 3}):
        assert client.post("/api/view/notes", json=asked).status_code == 400
    answer = client.post(
        "/api/view/notes",
        json={"id": "plain", "text": "x", "tags": [], "revision": ""},
        headers={"origin": "http://evil.test"},
    )
    assert answer.status_code == 403 and not (root / "plain" / "notes.json").exists()


def test_a_run_that_is_being_written_is_followed(tmp_path: Path) -> None:
    """Another process appends while this one reads: every look is a whole number of lines, and the last has all."""
    path = tmp_path / "m"
    lines = walk(2000)
    if (pid := os.fork()) == 0:
        with open(path, "w") as file:
            for line in lines:
                text = json.dumps(line) + "\n"
                file.write(text[:7])
                file.flush()
                file.write(text[7:])
                file.flush()
        os._exit(0)
    found, seen = MetricColumns(path), []
    while found.num_lines < 2000:
        found.update()
        seen.append(found.num_lines)
        assert not found.bad_lines
        if os.waitpid(pid, os.WNOHANG)[0]:
            found.update()
            break
        time.sleep(0.001)
    assert found.num_lines == 2000 and seen == sorted(seen) and measured_metrics(found) >= {"reward", "loss"}
    total = sum(line["reward"] for line in lines)
    assert math.isclose(found.total("reward") or 0.0, total, rel_tol=1e-9)
