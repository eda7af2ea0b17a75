"""Run folders that anyone may have written: whatever they hold, every page answers, and no run costs another."""

# ruff: noqa: UP031 (JSON is full of braces)
from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

import ascent
from ascent.cli.train import plot as draw_plot
from ascent.core.errors import ConfigError
from ascent.lab.curves import ColumnCache, curves
from ascent.lab.pages.compare import page as compare
from ascent.lab.pages.compare.run_comparison import Comparison
from ascent.lab.pages.runs.page import read_note, write_note
from ascent.lab.report import run_report as report
from ascent.lab.server import application
from ascent.runs.metric_columns import MetricColumns, bucket_starts, bucket_width, parse_lines
from ascent.runs.run_folder import RunFolder, is_locked
from ascent.runs.run_list import run_status
from ascent.server.guard import Guard, host_names
from tests.cases import mostly_smokes

NEWEST = "rollouts/step_000001.parquet"
DEEP = "[" * 30_000 + "]" * 30_000
BIG = "9" * 400


def metrics(text: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        with open(run / "metrics.jsonl", "a") as file:
            file.write(text + "\n")

    return damage


def replaced(name: str, text: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).write_text(text)

    return damage


def edited(**changes: object) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        known = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(known | changes))

    return damage


def pipes(*names: str) -> Callable[[Path], None]:
    """Pipes that nobody writes: whoever opens one waits forever."""

    def damage(run: Path) -> None:
        for name in names:
            (run / name).unlink(missing_ok=True)
            os.mkfifo(run / name)

    return damage


def written(name: str, data: bytes) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).write_bytes(data)

    return damage


def columns(name: str, **changes: list[Any] | None) -> Callable[[Path], None]:
    """A file of responses with other columns; None: without this one."""

    def damage(run: Path) -> None:
        table = pq.read_table(run / name)
        held = {column: table[column] for column in table.column_names} | {
            column: pa.array((values * table.num_rows)[: table.num_rows])
            for column, values in changes.items()
            if values
        }
        pq.write_table(pa.table({column: held[column] for column in held if changes.get(column, True)}), run / name)

    return damage


def bomb(run: Path) -> None:
    """A few kilobytes that would be a gigabyte of text."""
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(500_000, np.int32)), ["x" * 2_000])
    count = pa.array(np.zeros(500_000, np.int64))
    table = pa.table({"group": count, "sample": count, "reward": count, "prompt_text": text, "response_text": text})
    pq.write_table(table, run / NEWEST, store_schema=False)
    assert (run / NEWEST).stat().st_size < 300_000


def with_a_lie(path: Path, truth: int, lie: int) -> None:
    """Let the footer of a Parquet file say another number, in as many bytes."""
    data, wanted = path.read_bytes(), _varint(2 * truth)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    told = _varint(2 * lie)
    told = bytes(byte | 128 for byte in told) + b"\x80" * (len(wanted) - len(told) - 1) + b"\0"
    assert data.count(wanted, footer) and len(told) == len(wanted)
    path.write_bytes(data[:footer] + data[footer:].replace(wanted, told))


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def lying_page(run: Path) -> None:
    """A page that becomes 40 MiB of text in a file of a few kilobytes, whose footer speaks of a hundred bytes."""
    table = pa.table(
        {"group": [0], "sample": [0], "reward": [1.0], "prompt_text": ["p"], "response_text": ["x" * (5 << 23)]}
    )
    pq.write_table(table, run / NEWEST, compression="zstd", use_dictionary=False, write_statistics=False)
    size = pq.ParquetFile(run / NEWEST).metadata.row_group(0).column(4).total_uncompressed_size
    with_a_lie(run / NEWEST, size, 100)


def lying_count(run: Path) -> None:
    """One response with a million tokens, of which the footer knows five."""
    table = pa.table({"group": [0], "sample": [0], "reward": [1.0], "prompt_text": ["p"], "response_text": ["r"]})
    tokens = pa.ListArray.from_arrays([0, 1_000_000], pa.array(np.zeros(1_000_000, np.int32)))
    pq.write_table(table.append_column("response", tokens), run / NEWEST, write_statistics=False)
    assert (run / NEWEST).stat().st_size < 100_000
    with_a_lie(run / NEWEST, 1_000_000, 5)


def linked_files(run: Path) -> None:
    """Files and a folder of responses that lie outside."""
    outside = run.parent.parent / "outside"
    shutil.copytree(run, outside)
    (outside / "metrics.jsonl").write_text('{"step": 7, "SECRET": 1}\n')
    (outside / "events.jsonl").write_text('{"step": 1, "event": "alert", "name": "SECRET", "text": "SECRET"}\n')
    columns(NEWEST, response_text=["SECRET"])(outside)
    shutil.rmtree(run / "rollouts")
    for name in ("rollouts", "metrics.jsonl", "events.jsonl"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / name)


def folder_for_metrics(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()


def odd_rollouts(run: Path) -> None:
    (run / "rollouts" / "step_².parquet").write_text("x")
    (run / "rollouts" / "step_000001.parquet").write_text("torn")


def link_outside(run: Path) -> None:
    (run.parent.parent / "secret.json").write_text('{"objective": "SECRET"}')
    (run / "config.json").unlink()
    (run / "config.json").symlink_to(run.parent.parent / "secret.json")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "nan": metrics('{"step": 2, "reward": NaN, "eval/accuracy": Infinity}'),
    "step-word": metrics('{"step": "x", "reward": 1}'),
    "step-list": metrics('{"step": [1], "reward": 1}'),
    "step-huge": metrics('{"step": 1e308, "reward": 1}'),
    "step-long": metrics('{"step": %s, "reward": %s}' % (BIG, BIG)),
    "whole-64": metrics('{"step": 2, "seed": 18446744073709551615, "reward": 9007199254740993}'),
    "overflow": metrics("\n".join('{"step": %d, "reward": 1.5e308}' % step for step in range(2, 3000))),
    "deep": metrics('{"step": 2, "a": %s}' % DEEP),
    "bytes": metrics("\udcff\udcfe".encode("utf-8", "surrogateescape").decode("latin-1")),
    "deep-among-many": metrics('{"step": 2}\n' * 4_000 + '{"step": 3, "a": %s}' % DEEP),
    "deep-400": replaced("config.json", '{"task": "lecture", "loss": %s}' % ("[" * 400 + "]" * 400)),
    "byte-in-name": lambda run: written("metrics.jsonl", b'{"step": 0, "reward": 1, "\xff": 1}\n')(run),
    "byte-in-run": written("run.json", b'{"status": "finished", "result": null, "history": [], "task": "\xff"}'),
    "pipe": pipes("metrics.jsonl"),
    "pipes": pipes("config.json", "events.jsonl", "notes.json", ".alive", ".lock", "rollouts/step_000001.parquet"),
    "pipe-run": pipes("run.json", "rollouts/step_000000.parquet"),
    "links": linked_files,
    "bomb": bomb,
    "lying-page": lying_page,
    "lying-count": lying_count,
    "parquet-empty": written(NEWEST, b""),
    "parquet-torn": lambda run: written(NEWEST, (run / NEWEST).read_bytes()[:-30])(run),
    "parquet-bytes": columns(NEWEST, response_text=[b"\xff"], reason=[b"\xff"]),
    "parquet-none": columns(NEWEST, group=[0, None], sample=[None, 1]),
    "parquet-odd": columns(
        NEWEST, valid=["x"], correct=["y", None], status=[3], advantage=[["z"]], logp=["q"], parts=[5]
    ),
    "parquet-lists": columns(NEWEST, response=[[None], []], pieces=[[1]], logp_old=[[[1.0]]], mask=[[3]], value=["v"]),
    "parquet-without": columns(NEWEST, logp=None, logp_old=None, advantage=None, valid=None),
    "folder": folder_for_metrics,
    "run-list": replaced("run.json", "[]"),
    "run-deep": replaced("run.json", DEEP),
    "run-empty": replaced("run.json", ""),
    "run-words": edited(status="running", heartbeat="soon", steps="many", seed=float("nan"), history=3, result=[1]),
    "run-surrogate": replaced(
        "run.json", '{"status": "finished", "task": "\\ud800", "result": null, "history": [], "label": {"a": 1}}'
    ),
    "config-odd": replaced("config.json", '{"loss": {"name": 5}, "seed": NaN, "task": null}'),
    "events-odd": replaced(
        "events.jsonl",
        '{"step": 1, "event": "alert", "name": ["x"], "text": 5}\n{"step": NaN, "event": "alert", "name": "a"}\n'
        '{"step": 1, "event": "alert", "name": "\\ud800", "evidence": {"metrics": {"a": [%s, null]}, "steps": "x"}}\n'
        '{"step": 1, "event": "alert", "name": "b", "evidence": [1]}\n[]\n' % BIG,
    ),
    "notes-odd": replaced("notes.json", '{"text": 5, "tags": ["\\ud800", 3, null]}'),
    "rollouts-odd": odd_rollouts,
    "link": link_outside,
    "alive-odd": replaced(".alive", '{"host": 5, "time": %s}' % BIG),
}
SOME_DAMAGES = (
    *("nan", "step-long", "deep", "byte-in-run", "pipes", "links", "lying-page", "parquet-torn", "parquet-odd"),
    *("run-words", "config-odd", "events-odd", "verl-odd"),
)
"""Of each file of a run one or two, for what takes long."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile") / "runs"
    ascent.train("lecture", steps=2, record_every=1, show=False, out=root / "good")
    for name, damage in DAMAGES.items():
        shutil.copytree(root / "good", root / name)
        damage(root / name)
    verl = root / "verl-odd"
    verl.mkdir()
    (verl / "1.jsonl").write_text('{"input": "a", "output": "b", "score": 1e308, "step": 1}\n' * 2)
    (verl / "2.jsonl").symlink_to(verl / "missing")
    (verl / "3.jsonl").mkdir()
    (verl / "4.jsonl").write_text('{"input": "a", "output": "b", "score": %s, "step": 4}\n' % BIG)
    return root


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[TestClient]:
    guard = Guard(application(root), host_names("127.0.0.1", 8321), b"s" * 32, base := "http://127.0.0.1:8321")
    client = TestClient(guard, base_url=base + guard.root, headers={"origin": base}, raise_server_exceptions=False)
    with client:  # one event loop for all requests
        client.get(guard.address)
        yield client


@pytest.fixture(scope="module", autouse=True)
def each_picture_once() -> Iterator[None]:
    """Most damages are not in the curves: a chart of lines that were drawn before is not drawn again."""
    drawn: dict[str, Any] = {}

    def chart(*given: Any) -> Any:
        return kept(repr(given), lambda: draw_chart(*given))

    def picture(found: Comparison, chosen: Any, *more: Any) -> bytes:
        seen = repr((found.curves(*chosen), list(found.groups), chosen, more)) if chosen.metrics else ""
        return kept(seen, lambda: draw(found, chosen, *more))

    def kept(key: str, make: Callable[[], Any]) -> Any:
        if key not in drawn:
            drawn[key] = make()
        return drawn[key]

    draw, draw_chart = compare.picture, report.chart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "chart", chart)
        patch.setattr(compare, "picture", picture)
        yield


def test_one_damaged_run_costs_no_other_its_row(client: TestClient) -> None:
    rows = {row["id"]: row for row in client.get("/api/view/runs").json()["runs"]}
    assert set(rows) == {"good", *DAMAGES, "verl-odd"}
    assert rows["good"]["status"] == "finished" and rows["good"]["step"] == 2
    assert rows["nan"]["step"] == 3 and rows["step-word"]["step"] == 2
    sparks = client.get("/api/view/spark", params={"id": ["good", "pipe", "folder"]}).json()
    assert len(sparks["good"]["points"]) >= 1


PATHS = (
    *("run", "curves", "curves?points=2&from=0&to=1", "spark", "completions", "completions?step=1", "prompts"),
    *("tokens?step=1&group=0", "compare?id=good", "compare.csv?id=good", "compare.csv?table=settings"),
    "compare.svg",
)


@pytest.mark.long
@pytest.mark.parametrize("name", [*DAMAGES, "verl-odd"])
def test_every_page_of_a_damaged_run_answers(client: TestClient, name: str) -> None:
    for path in PATHS:
        answer = client.get(f"/api/view/{path}{'&' if '?' in path else '?'}id={name}")
        assert answer.status_code in (200, 400), (path, answer.text[:300])
        if answer.status_code == 400:
            assert answer.json()["error"], path


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_smokes([*DAMAGES, "verl-odd"], *SOME_DAMAGES))
def test_a_damaged_run_has_a_report_or_a_reason(root: Path, name: str, tmp_path: Path) -> None:
    from ascent.cli import main as cli

    code = cli.main(["report", str(root / name), "--out", str(tmp_path / "r.html")])
    assert code in (0, 2) and (code == 2) != (tmp_path / "r.html").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_smokes([*DAMAGES, "verl-odd"], *SOME_DAMAGES))
def test_every_figure_that_reads_a_damaged_run_answers(client: TestClient, name: str) -> None:
    of_run = [f"runs/{name}/{path}" for path in ("responses", "responses?step=1", "events")]
    for path in (*of_run, f"figure/training?a.run={name}"):
        answer = client.get(f"/api/{path}")
        assert answer.status_code in (200, 400), (path, answer.text[:300])


@pytest.mark.long
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_is_shown_or_refused(root: Path, name: str) -> None:
    from ascent.cli import main as cli

    for flags in ([], ["--json"], ["--step", "1"]):
        assert cli.main(["show", str(root / name), *flags]) in (0, 2), flags


def test_the_clip_is_drawn_from_a_batch_that_can_be_read(client: TestClient, root: Path) -> None:
    for name in ("bomb", "pipes", "parquet-odd"):
        os.utime(root / name / NEWEST, (2e9, 2e9))
    answer = client.get("/api/figure/clip")
    assert answer.status_code == 200 and "SECRET" not in answer.text


@pytest.mark.parametrize(
    "name", ["bomb", "lying-page", "lying-count", "parquet-empty", "parquet-torn", "parquet-none", "parquet-bytes"]
)
def test_a_file_that_cannot_be_read_is_named_and_the_page_stands(client: TestClient, name: str) -> None:
    page = client.get("/api/view/completions", params={"id": name, "step": 1}).json()
    assert page["recorded"] == [0, 1] and page["groups"] == [] and "step_000001.parquet" in page["problems"][0]
    assert client.get("/api/view/completions", params={"id": name, "step": 0}).json()["groups"]


def test_no_page_reads_through_a_link(client: TestClient) -> None:
    for path in ("run", "curves", "spark", "completions", "prompts", "tokens?step=1&group=0", "compare"):
        assert "SECRET" not in client.get(f"/api/view/{path}{'&' if '?' in path else '?'}id=links").text
    for path in ("responses", "events"):
        assert "SECRET" not in client.get(f"/api/runs/links/{path}").text
    page = client.get("/api/view/completions", params={"id": "links"}).json()
    assert page["problems"] == ["step_000001.parquet cannot be read: rollouts is a link, and links are not followed"]


def test_nothing_is_read_through_a_link(client: TestClient) -> None:
    assert "SECRET" not in client.get("/api/view/run", params={"id": "link"}).text


def test_nothing_is_written_through_a_link(root: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    run = shutil.copytree(root / "good", tmp_path / "run")
    (run / ".notes.json.new").symlink_to(victim)
    write_note(run, "mine", [], "")
    assert victim.read_text() == "precious" and not (run / "notes.json").is_symlink()


WAYS_OUT = (
    "metrics.jsonl",
    ".lock",
    ".alive.new",
    "rollouts",
    "checkpoints",
    "tensorboard",
    "rollouts/.step_000003.parquet",
)


@pytest.mark.parametrize("name", WAYS_OUT)
def test_a_resume_writes_nothing_through_a_link(root: Path, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(root / "good", tmp_path / "run")
    outside = tmp_path / "outside"
    if (run / name).is_dir():
        (run / name).rename(outside)
    else:
        outside.write_text("precious\n" * 1000)
        (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside)
    before = {path: path.read_bytes() for path in (outside, *outside.glob("**/*")) if path.is_file()}
    with pytest.raises(ConfigError, match=r"is a link"):
        ascent.resume(run, from_step=2)
    assert {path: path.read_bytes() for path in (outside, *outside.glob("**/*")) if path.is_file()} == before


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", ".alive.new", "error.txt", ".plot.png", "run.json"])
def test_a_resume_writes_over_no_file_that_has_a_second_name(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup of hard links, or a trap: the other name keeps its bytes, and the run goes on all the same."""
    from ascent.cli import main as cli

    run, other = shutil.copytree(root / "good", tmp_path / "run"), tmp_path / "other"
    (run / name).touch()
    if name not in ("metrics.jsonl", "run.json"):
        (run / name).write_text("precious\n" * 100)
    os.link(run / name, other)
    before = other.read_bytes()
    if name == "error.txt":
        monkeypatch.setattr("ascent.api.loop", lambda *_: 1 / 0)
    if name == ".plot.png":
        monkeypatch.setattr("ascent.cli.train.plot", draw_plot)
    assert cli.main(["resume", str(run), "--from", "2"]) == (name == "error.txt")
    assert other.read_bytes() == before
    assert name == ".lock" or not (run / name).exists() or (run / name).stat().st_nlink == 1


@pytest.mark.parametrize(
    "name", ["checkpoints", "checkpoints/step_000002", "checkpoints/step_000002/params.safetensors"]
)
@pytest.mark.parametrize("how", ["sample", "eval", "--init"])
def test_no_policy_is_loaded_through_a_link(
    root: Path, tmp_path: Path, name: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from ascent.cli import main as cli

    run = shutil.copytree(root / "good", tmp_path / "run")
    (run / name).rename(tmp_path / "outside")
    (run / name).symlink_to(tmp_path / "outside")
    init = ["train", "lecture", "--steps", "1", "--init", str(run), "--out", str(tmp_path / "new")]
    assert cli.main({"sample": ["sample", str(run), "1 0 2"], "eval": ["eval", str(run)], "--init": init}[how]) == 2
    assert f"{run / name} is a link that leads out of the run's folder" in capsys.readouterr().err


def test_half_a_character_in_the_records_does_not_stop_a_resume(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "good", tmp_path / "run")
    (run / "run.json").write_text((run / "run.json").read_text().replace('"label": "', '"label": "\\ud800 '))
    assert ascent.resume(run, from_step=2).status == "finished"
    assert ascent.load(run).info["label"].startswith("\ud800 ")


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock", "checkpoints/step_000002/params.safetensors"])
def test_a_resume_does_not_wait_for_a_pipe(root: Path, tmp_path: Path, name: str) -> None:
    run = shutil.copytree(root / "good", tmp_path / "run")
    pipes(name)(run)
    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        ascent.resume(run, from_step=2)


def test_what_a_tracker_links_is_its_own_affair(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "good", tmp_path / "run")
    (run / "wandb").mkdir()
    (run / "wandb" / "debug.log").symlink_to(tmp_path / "cache")
    (run / "best").symlink_to("checkpoints")
    assert ascent.resume(run, from_step=2).status == "finished"


def test_a_run_folder_may_itself_be_a_link(root: Path, tmp_path: Path) -> None:
    from ascent.cli import main as cli

    shutil.copytree(root / "good", tmp_path / "disk")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    assert cli.main(["show", str(tmp_path / "run"), "--step", "1"]) == 0
    assert cli.main(["report", str(tmp_path / "run")]) == 0 and (tmp_path / "disk" / "report.html").exists()
    assert ascent.resume(tmp_path / "run", from_step=2).status == "finished"


@pytest.mark.parametrize("text", ['{"sha256": {"/dev/zero": ""}}', '{"sha256": 5}', '{"sha256": {"../x": ""}}', DEEP])
def test_an_odd_manifest_is_a_corrupt_checkpoint(root: Path, tmp_path: Path, text: str) -> None:
    run = shutil.copytree(root / "good", tmp_path / "run")
    (run / "checkpoints" / "step_000002" / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match="step_000002 is corrupt"):
        ascent.resume(run, from_step=2)


def test_a_report_is_written_through_no_link_and_waits_for_no_pipe(root: Path, tmp_path: Path) -> None:
    from ascent.cli import main as cli

    run, victim = shutil.copytree(root / "good", tmp_path / "run"), tmp_path / "victim"
    victim.write_text("precious")
    (run / ".report.html.new").symlink_to(victim)
    assert cli.main(["report", str(run)]) == 0
    assert victim.read_text() == "precious" and not (run / "report.html").is_symlink()
    pipes("report.html")(run)
    assert cli.main(["report", str(run)]) == 2


def test_a_note_that_cannot_be_read_is_not_written_over(root: Path, tmp_path: Path) -> None:
    run = shutil.copytree(root / "good", tmp_path / "run")
    (run / "notes.json").write_text('{"text": "my long careful note", "tags": ["x"],}')
    for revision in ("", read_note(run)["revision"]):
        with pytest.raises(ConfigError, match="mend or move"):
            write_note(run, "new", [], revision)
    assert "careful" in (run / "notes.json").read_text()


@pytest.mark.long
def test_one_run_under_two_names_is_compared_and_two_comparisons_do_not_wait_for_one_another(root: Path) -> None:
    for name, target in (("latest", "good"), ("a-first", "nan")):
        (root / name).symlink_to(root / target)
    column_cache, done = ColumnCache(), []

    def compare(ids: list[str]) -> None:
        for _ in range(30):
            with Comparison(root, ids, column_cache) as found:
                found.summary()
        done.append(ids)

    pairs = (["good", "latest"], ["good", "nan"], ["a-first", "latest"], ["nan", "latest"])
    threads = [threading.Thread(target=compare, args=(pair,), daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name in ("latest", "a-first"):
        (root / name).unlink()
    assert len(done) == len(pairs), "they wait for one another"


def test_lines_that_nest_deeply_are_bad_lines_and_no_crash() -> None:
    found = parse_lines(('{"step": 0, "a": %s}\n{"step": 1, "reward": 2}\n' % DEEP).encode())
    assert found.steps.tolist()[-1] == 1 and found.columns["reward"].tolist()[-1] == 2


@pytest.mark.long
def test_one_deep_line_among_many_is_a_bad_line_and_no_crash() -> None:
    found = parse_lines(b'{"step": 0}\n' * 100_000 + b'{"step": 1, "x": ' + b"[" * 190_000 + b"]" * 190_000 + b"}\n")
    assert len(found.steps) == 100_000 and len(found.bad_lines) == 1 and "line 100001" in found.bad_lines[0]


def test_buckets_of_two_runs_hold_the_same_steps_though_one_lacks_a_line(tmp_path: Path) -> None:
    for name, missing in (("a", None), ("b", 5)):
        with open(tmp_path / name, "w") as file:
            file.writelines(json.dumps({"step": s, "reward": s}) + "\n" for s in range(5_000) if s != missing)
    one, other = (MetricColumns(tmp_path / name) for name in "ab")
    one.update()
    other.update()
    drawn, lacking = curves(one, ["reward"]), curves(other, ["reward"])
    assert drawn["bucket"] == lacking["bucket"] > 1
    assert sum(a != b for a, b in zip(drawn["x"], lacking["x"], strict=True)) <= 1


def test_many_metrics_take_no_more_memory_than_some(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with open(path, "w") as file:
        file.writelines(json.dumps({"step": s, "reward": 1.0, f"m{s}": 1.0}) + "\n" for s in range(3_000))
    found = MetricColumns(path)
    found.update()
    assert len(found.names) <= 400 and "left out" in found.problem and found.num_lines == 3_000


def test_a_metric_of_its_own_in_every_line_makes_no_column_of_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        "ascent.runs.metric_columns._parse_with_pyarrow", lambda data, lines: made.append(lines * data.count(b'":'))
    )
    (tmp_path / "m").write_text("".join('{"step": %d, "m%d": 1}\n' % (s, s) for s in range(3_000)))
    found = MetricColumns(tmp_path / "m")
    found.update()
    assert found.num_lines == 3_000 and max(made) <= 1_000_000, "numbers that one call may have to hold"


def test_a_line_without_end_is_no_reason_to_read_it_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascent.runs.metric_columns.READ_CHUNK_BYTES", 1000)
    path = tmp_path / "m"
    path.write_text('{"step": 0, "reward": 1}\n{"step": 1, "text": "' + "x" * 5_000)
    found = MetricColumns(path)
    found.update()
    assert found.num_lines == 1 and "a line of more than" in found.problem


def test_a_sign_of_life_is_one_that_changes_whatever_the_clock_there_says(tmp_path: Path) -> None:
    run = {"status": "running", "step": 1, "steps": 9}

    def look(said: float, now: float) -> str:
        (tmp_path / ".alive").write_text(json.dumps({"host": "elsewhere", "pid": 1, "time": said}))
        os.utime(tmp_path / ".alive", (now - 500, now - 500))
        return run_status(tmp_path, run, now)[0]

    assert look(1e9 + 3600, 1e9) == "died", "a clock that is ahead proves nothing: the file is old"
    assert look(1e9 + 3605, 1e9 + 5) == "running", "it was renewed since the last look"
    assert look(1e9 + 3605, 1e9 + 60) == "died"
    assert look(1e9 - 3600, 1e9 + 65) == "running", "renewed again, by a clock that is behind"


@pytest.mark.long
def test_looking_whether_a_run_is_locked_does_not_keep_it_from_being_resumed(tmp_path: Path) -> None:
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            is_locked(tmp_path)

    (tmp_path / ".lock").touch()
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        for _ in range(100):
            folder = RunFolder(tmp_path)
            folder.lock()
            folder.close()
    finally:
        stop.set()
        watcher.join()


def test_a_line_that_one_seed_lacks_costs_a_comparison_one_point(tmp_path: Path, root: Path) -> None:
    for seed, missing in ((0, None), (1, 5)):
        run = shutil.copytree(root / "good", tmp_path / f"s{seed}")
        for name in ("run.json", "config.json"):
            (run / name).write_text(json.dumps(json.loads((run / name).read_text()) | {"seed": seed}))
        with open(run / "metrics.jsonl", "w") as file:
            file.writelines(json.dumps({"step": s, "reward": s + seed}) + "\n" for s in range(3_000) if s != missing)
    with Comparison(tmp_path, ["s0", "s1"], ColumnCache()) as found:
        (line,) = found.curves(["reward"], points=300)["reward"]["groups"].values()
    assert line["seeds"] == 2 and 180 <= len(line["mean"]) <= 300
    assert line["mean"][10] == pytest.approx(line["x"][10] + 0.5)


def test_steps_that_lie_far_apart_end_the_search_for_a_width() -> None:
    steps = np.cumsum(np.random.default_rng(0).integers(1, 6 * 10**10, 1_802)).astype(float)
    assert len(bucket_starts(steps, bucket_width(steps, 600))) <= 600
