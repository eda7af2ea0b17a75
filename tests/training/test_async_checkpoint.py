"""Checkpoints are written while training goes on, whole or not at all; large ones by every rank, each its part."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ascent
from ascent.core.algorithms import ALGORITHMS
from ascent.core.errors import ConfigError, RunError
from ascent.core.update import Adam
from ascent.distributed.rank_group import RankGroup
from ascent.runs import checkpoint
from ascent.runs.display.terminal import Display
from ascent.runs.run_writer import RunWriter
from ascent.training import async_checkpoint
from ascent.training.async_checkpoint import BackgroundWriter, copy_to_host
from ascent.training.fsdp import ShardedLearner
from tests.language import model_of

SETTINGS: dict[str, Any] = {"steps": 6, "checkpoint_every": 2, "eval_every": 6, "show": False}


# ---- in the background


def test_background_writer_returns_immediately_and_reports_when_asked() -> None:
    saver, free, seen = BackgroundWriter(), threading.Event(), []
    saver.begin(free.wait, lambda: seen.append(threading.current_thread()))
    saver.poll()
    assert not seen, "it is being written"
    free.set()
    saver.wait()
    assert seen == [threading.current_thread()]
    saver.wait()
    assert len(seen) == 1, "once"


def test_background_error_is_raised_on_wait() -> None:
    saver, seen = BackgroundWriter(), []

    def fail() -> None:
        raise OSError(28, "No space left on device")

    saver.begin(fail, lambda: seen.append(1))
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    assert not seen
    saver.begin(lambda: None, lambda: seen.append(2))
    saver.wait()
    assert seen == [2], "the next one is not the last one's"


def test_host_copy_is_independent_and_skipped_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.ones(3)
    copied, apart = copy_to_host({"params": {"x": own}})
    own.zero_()
    assert apart and copied["params"]["x"].tolist() == [1, 1, 1]
    monkeypatch.setattr(async_checkpoint, "free_memory", lambda: 20.0)
    same, apart = copy_to_host({"params": {"x": own}})
    assert not apart and same["params"]["x"] is own


def test_unknown_free_memory_copies_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(async_checkpoint, "Path", lambda _: meminfo)
    assert async_checkpoint.free_memory() == float("inf") and copy_to_host({"params": {"x": torch.ones(3)}})[1]
    meminfo.write_text("MemTotal: 9 kB\n")
    assert async_checkpoint.free_memory() == float("inf")
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       3 kB\n")
    assert async_checkpoint.free_memory() == 3072.0


@pytest.mark.long
def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits here until the next step is over. What it holds is its own step's, and the end waits for it."""
    whole = ascent.train("lecture", out=tmp_path / "whole", **SETTINGS)
    stepped, begun, real, step = threading.Event(), [], checkpoint.save, RunWriter.step

    def late(folder: Path, number: int, *more: Any) -> None:
        begun.append(number)
        if number < 6:
            assert stepped.wait(60)
        stepped.clear()
        real(folder, number, *more)

    def stepping(self: RunWriter, *args: Any) -> None:
        step(self, *args)
        if begun and args[0] == begun[-1]:
            stepped.set()

    monkeypatch.setattr(checkpoint, "save", late)
    monkeypatch.setattr(RunWriter, "step", stepping)
    run = ascent.train("lecture", out=tmp_path / "late", **SETTINGS)
    assert begun == [2, 4, 6] and run.status == "finished"
    assert [p.name for p in run.checkpoints] == [p.name for p in whole.checkpoints]
    for one, two in zip(run.checkpoints, whole.checkpoints, strict=True):
        found, wanted = checkpoint.params(one), checkpoint.params(two)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.long
def test_full_disk_ends_the_run_and_keeps_complete_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ascent.train("lecture", out=tmp_path / "whole", **SETTINGS)
    real = checkpoint.write_atomically

    def full(final: Path, *more: Any) -> None:
        if final.name == "step_000004":
            raise OSError(28, "No space left on device")
        real(final, *more)

    monkeypatch.setattr(checkpoint, "write_atomically", full)
    with pytest.raises(RunError, match="cannot be written: No space left on device"):
        ascent.train("lecture", out=tmp_path / "run", **SETTINGS)
    monkeypatch.undo()
    run = ascent.load(tmp_path / "run")
    assert run.status == "failed" and [p.name for p in run.checkpoints] == ["step_000002"]
    resumed = ascent.resume(run, Display())
    found, wanted = ([(m["loss"], m["reward"]) for m in one.metrics] for one in (resumed, whole))
    assert found == wanted


# ---- parts


@pytest.fixture
def learner() -> Iterator[ShardedLearner]:
    """In shards, of which there is one; every rank writes its part."""
    group = RankGroup(60.0, "cpu", (dist.TCPStore("127.0.0.1", 0, 1, True), 0, 1))
    grpo = ALGORITHMS["grpo"]
    made = ShardedLearner(
        model_of(dtype=torch.bfloat16), Adam(), False, grpo.outputs, 0, False, group, grpo.critic, gather=0.0
    )
    assert made.optimizer is not None
    for p in made._sharded.local_params:
        p.grad = torch.ones_like(p)
    made.optimizer.step()
    yield made
    group.heartbeat.close()
    dist.destroy_process_group()


def written(learner: ShardedLearner, folder: Path) -> Path:
    final = checkpoint.step_folder(folder, 7)
    parts = learner.stage_shards(checkpoint.temporary_path(final)) if learner.writes_shards else None
    saved = {"step": 7, "state": {}, "records": {}}
    checkpoint.save(folder, 7, {"rng": {"x": torch.zeros(1)}}, saved, 2, None, parts)
    return final


@pytest.mark.long
def test_sharded_checkpoint_reads_like_a_gathered_one(learner: ShardedLearner, tmp_path: Path) -> None:
    final, gathered = written(learner, tmp_path), learner.state()
    assert [p.name for p in final.glob("*.safetensors") if p.name != "rng.safetensors"] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]
    found, saved = checkpoint.load_checkpoint(final)
    assert saved["step"] == 7 and found.keys() == {*gathered, "rng"}
    for group, own in gathered.items():
        assert found[group].keys() == own.keys()
        assert all(torch.equal(found[group][name], own[name]) for name in own), group
        assert {t.dtype for t in found[group].values()} == {t.dtype for t in own.values()}
    assert all(torch.equal(value, gathered["params"][name]) for name, value in checkpoint.params(final).items())
    learner.restore(found)
    checkpoint.keep_initial_params(final, tmp_path / "other")
    assert checkpoint.params(tmp_path / "other" / "start").keys() == gathered["params"].keys()


@pytest.mark.long
def test_incomplete_shards_are_rejected(learner: ShardedLearner, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    final = written(learner, tmp_path)
    part = next(final.glob("shard-*"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + b"x")
    with pytest.raises(ConfigError, match="does not match its checksum"):
        checkpoint.load_checkpoint(final)
    about = '{"wide/x": {"saved_offsets": [9999999999]}}'
    save_file({"wide/x": torch.zeros(2)}, part, {"DCP_SHARDING_INFO": about})
    manifest = json.loads((final / "manifest.json").read_text())
    manifest["sha256"][part.name] = checkpoint._checksum(part)
    (final / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="its shards do not cover its tensors"):
        checkpoint.load_checkpoint(final)
    (final / "manifest.json").write_text(json.dumps(manifest | {"narrow": "load"}))
    with pytest.raises(ConfigError, match="load is not a dtype of parameters"):
        checkpoint.load_checkpoint(final)
