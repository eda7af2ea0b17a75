"""Waits end: for a lock that another process keeps, and for actors of a cluster that do not answer."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ascent.core.errors import RunError
from ascent.processes import user_state
from ascent.rewards.judge.judge_client import AnswerCache
from ascent.server import lab_secret
from ascent.workflows import ray_cluster


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_state, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(ray_cluster, "PLACEMENT_TIMEOUT", 0.1)


def test_a_lab_whose_secret_is_locked_starts_with_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    kept, why = lab_secret.load_secret(tmp_path)
    assert not why and lab_secret.load_secret(tmp_path) == (kept, "")
    with open(tmp_path / "ascent" / "lab" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other, why = lab_secret.load_secret(tmp_path)
    assert other != kept and "another process has locked it" in why
    assert lab_secret.load_secret(tmp_path) == (kept, "")


def test_a_judges_cache_that_stays_locked_is_an_error_and_loses_nothing(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "answers.jsonl")
    cache.put("a", {"text": "1"})
    with open(tmp_path / "answers.jsonl", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process has locked it"):
            cache.put("b", {"text": "2"})
    cache.put("b", {"text": "2"})
    again = AnswerCache(tmp_path / "answers.jsonl")
    assert [again.get(key) for key in ("a", "b")] == [{"text": "1"}, {"text": "2"}]


class SilentRay:
    """A cluster whose actors are there and never answer: a call without a deadline would wait for good."""

    class exceptions:
        class RayActorError(Exception): ...

        class GetTimeoutError(TimeoutError): ...

    def get(self, call: Any, timeout: float | None = None) -> Any:
        assert timeout is not None, "a wait without a deadline"
        raise self.exceptions.GetTimeoutError("Get timed out")


def silent_actor() -> Any:
    return SimpleNamespace(
        **{name: SimpleNamespace(remote=lambda *_: None) for name in ("master_address", "poll", "interrupt")}
    )


def test_learners_of_a_cluster_that_do_not_answer_end_the_run() -> None:
    run: Any = SimpleNamespace(
        ray=SilentRay(), ranks=[silent_actor()], pending_signals=[], samplers=[], was_interrupted=False
    )
    with pytest.raises(RunError, match="a learner did not restart"):
        ray_cluster.ClusterLaunch._wait_for_learners(run)
    assert ray_cluster.ClusterLaunch._poll_learner(run, run.ranks[0]) == 1
