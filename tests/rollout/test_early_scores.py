"""Scoring of finished responses while others are still sampled, which does not change the results."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import ascent
from ascent.build.trained_run import Run
from ascent.core.protocols import RolloutRequest
from ascent.core.types import Prompts, Rollouts
from ascent.inference.engine import LocalEngine
from ascent.inference.runners.cuda_graph import cuda_graph_runner
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner
from ascent.processes.reward_calls import RewardJob
from ascent.rewards.tokenized_task import TokenizedTask
from ascent.tasks.reward_worker import RewardSpec
from ascent.tasks.reward_worker_pool import Limits, PendingCall, RewardOutcome, RewardWorkerPool
from tests.language import model_of, prompts_of, sampler_of

REWARDS = """
import os, time, zlib


def gate(prompt, response, answer, **columns):
    "Waits until there is a file of the response's name, and is worth what it says."
    while not os.path.exists(f"{prompt}/{response}"):
        time.sleep(0.005)
    return float(open(f"{prompt}/{response}").read())


def odd(prompt, response, answer, **columns):
    if response == "die":
        os._exit(3)
    if response == "raise":
        raise ValueError("no reward")
    return float(len(response))


def noise(prompt, response, answer, **columns):
    worth = zlib.crc32(response.encode())
    if worth % 11 == 0:
        raise ValueError("not this one")
    if worth % 13 == 0:
        os._exit(5)
    return worth % 7 / 7


def whole(prompts, completions, **columns):
    return [len(words) / 100 for words in completions]
"""
DECODERS = [PagedRunner, EagerRunner, "graphs"]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    file = tmp_path_factory.mktemp("early") / "r.py"
    file.write_text(REWARDS)
    return lambda name: f"python:{file}:{name}"


def calls(folder: Path, *responses: str) -> list[list[RewardJob]]:
    return [[RewardJob(0, str(folder), response, None, {})] for response in responses]


def put(folder: Path, name: str, worth: float) -> None:
    (folder / f".{name}").write_text(str(worth))
    (folder / f".{name}").rename(folder / name)


def soon(state: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not state():
        assert time.monotonic() < until, "it did not come about within a minute"
        time.sleep(0.005)


# ---- the processes --------------------------------------------------------------------------------


def test_rewards_are_computed_in_the_background(own: Callable[[str], str], tmp_path: Path) -> None:
    with closing(RewardWorkerPool([RewardSpec(own("gate"))], 2, Limits(60.0))) as pool:
        slow, quick = pool.submit(calls(tmp_path, "slow", "quick"))
        put(tmp_path, "quick", 2)
        soon(lambda: quick.outcomes)
        (more,) = pool.submit(calls(tmp_path, "more"))
        put(tmp_path, "more", 3)
        soon(lambda: more.outcomes)
        assert slow.outcomes is None, "nobody has waited for it yet"
        put(tmp_path, "now", 4)
        assert pool.run_calls(calls(tmp_path, "now")) == [[RewardOutcome(4.0)]], "and a call beside it does not either"
        assert slow.outcomes is None
        put(tmp_path, "slow", 1)
        assert pool.wait_for_results([slow, more, quick]) == [
            [RewardOutcome(1.0)],
            [RewardOutcome(3.0)],
            [RewardOutcome(2.0)],
        ]
        soon(lambda: pool.thread is None)
        assert pool.wait_for_results([slow]) == [[RewardOutcome(1.0)]], "it may be asked for again"


def test_failing_rewards_give_the_same_errors_in_the_background(own: Callable[[str], str]) -> None:
    asked = ["a", "die", "bb", "raise", "die", "ccc", "raise", "dddd"] * 3
    with closing(RewardWorkerPool([RewardSpec(own("odd"))], 2, Limits(60.0))) as pool:
        pool.seconds_per_call = 1e-4
        early = [outcome for call in asked for outcome in pool.submit(calls(Path(), call))]
        found = [outcome for (outcome,) in pool.wait_for_results(early)]
        for response, outcome in zip(asked, found, strict=True):
            error = {"die": "exit status 3", "raise": "no reward"}.get(response)
            assert error in str(outcome.error) if error else outcome == RewardOutcome(float(len(response))), response
        assert found == pool.run([job for (job,) in calls(Path(), *asked)])


def test_hanging_reward_in_the_background_is_ended(own: Callable[[str], str], tmp_path: Path) -> None:
    with closing(RewardWorkerPool([RewardSpec(own("gate"))], 1, Limits(0.3))) as pool:
        (hanging,) = pool.submit(calls(tmp_path, "never"))
        soon(lambda: hanging.outcomes)
        assert "took longer than 0.3 s" in str(hanging.outcomes and hanging.outcomes[0].error)


def test_closed_pool_leaves_no_thread_or_process(own: Callable[[str], str], tmp_path: Path) -> None:
    pool = RewardWorkerPool([RewardSpec(own("gate"))], 1, Limits(60.0))
    begun = pool.submit(calls(tmp_path, "never", "nor this"))
    soon(lambda: pool.workers and pool.workers[0].calls)
    pids = [worker.process.pid for worker in pool.workers]
    pool.close()
    assert all("were ended" in str(outcome.error) for (outcome,) in pool.wait_for_results(begun))
    soon(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    soon(lambda: "ascent-rewards" not in {thread.name for thread in threading.enumerate()})


def test_error_of_the_background_thread_is_raised_in_results(
    own: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with closing(RewardWorkerPool([RewardSpec(own("gate"))], 1, Limits(60.0))) as pool:
        monkeypatch.setattr(pool, "_send_waiting", broken)
        begun = pool.submit(calls(tmp_path, "never"))
        with pytest.raises(OSError, match="no more processes"):
            pool.wait_for_results(begun)


# ---- the decoders ---------------------------------------------------------------------------------


def sampler_for(decoder: Any, **more: Any) -> LocalEngine:
    lm = model_of()
    sampler = sampler_of(lm, **{"limit": 12, "rows": 4} | more)
    sampler.runner = cuda_graph_runner(lm)[0] if decoder == "graphs" else decoder
    return sampler


def listening(sampler: LocalEngine) -> list[tuple[int, list[int]]]:
    told: list[tuple[int, list[int]]] = []
    sampler.on_responses = lambda problems, tokens: told.extend(zip(problems, tokens, strict=True))
    return told


def responses_of(rollouts: Rollouts) -> list[tuple[int, list[int]]]:
    assert rollouts.problem is not None
    return [
        (problem, tokens[mask].tolist())
        for problem, group, masks in zip(rollouts.problem.tolist(), rollouts.response, rollouts.mask, strict=True)
        for tokens, mask in zip(group, masks, strict=True)
    ]


def problems(offset: int = 0) -> Prompts:
    return Prompts(prompts_of(), torch.tensor([7, 8, 9]) + offset)


@pytest.mark.parametrize("decoder", DECODERS)
def test_finished_responses_are_delivered_early(decoder: Any) -> None:
    sampler = sampler_for(decoder, rows=6)  # of two problems, so that responses to both end together
    quiet = sampler.generate_from_seeds(problems(), 4, torch.arange(12).view(3, 4))
    told = listening(sampler)
    loud = sampler.generate_from_seeds(problems(), 4, torch.arange(12).view(3, 4))
    assert torch.equal(quiet.response, loud.response) and torch.equal(quiet.logp_sampler, loud.logp_sampler)
    every = responses_of(loud)
    assert len(told) >= 6, "some before the last one is over"
    for one in told:
        every.remove(one)  # each is told once, and as the rollouts have it


@pytest.mark.parametrize("decoder", [PagedRunner, "graphs"])
def test_finished_responses_of_later_steps_are_delivered_early(decoder: Any) -> None:
    sampler = sampler_for(decoder)
    told, drawn = listening(sampler), []
    for step in range(3):
        sampler.load({}, version=step)
        begun = {one.request.step for one in sampler.pending}
        later = [s for s in range(step, min(step + 2, 3)) if s not in begun]
        sampler.submit([RolloutRequest(s, problems(10 * s), 4) for s in later])
        drawn += [one for done in sampler.iter_finished(step, 60.0) for one in responses_of(done.rollouts)]
    assert len(told) >= 12
    for one in told:
        drawn.remove(one)


def test_finished_conversations_are_scored_early() -> None:
    from dataclasses import replace

    from tests.language import AtOnce

    sampler = sampler_for(PagedRunner)
    told = listening(sampler)
    sampler.generate(replace(problems(), start_episodes=AtOnce(lambda _, tokens: [5] if len(tokens) < 4 else [])), 2)
    assert not told


# ---- whole runs -----------------------------------------------------------------------------------

KEPT = ("reward", "reward_std", "accuracy", "loss", "grad_norm", "reward_errors", "eval/reward", "rewards/noise")


def train(folder: Path, model: Path, reward: tuple[str, ...], **more: Any) -> Run:
    file = folder.parent / "rows.jsonl"
    rows = [{"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in range(3) for b in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = {"prompts": 3, "samples": 3, "max_tokens": 12, "steps": 3, "eval_every": 2, "eval_prompts": 4, "lr": 1e-3}
    few |= {"max_reward_errors": 1.0, "policy.rows": 4, "reward": reward, "reward_workers": 2, "threads": 1}
    return ascent.train(f"jsonl:{file}", check="number", model=str(model), out=folder, preflight=False, **few, **more)


@pytest.mark.long
@pytest.mark.parametrize(
    ("names", "more"),
    [
        pytest.param(("noise",), {}, marks=pytest.mark.smoke),
        (("noise", "whole"), {"algorithm": "dapo", "shaping": "no-shaping", "ahead": 1}),
    ],
    ids=["one reward", "two rewards, redraws, ahead"],
)
def test_early_scores_do_not_change_a_run(
    names: tuple[str, ...], more: dict[str, Any], own: Callable[[str], str], tmp_path: Path, tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    begun: list[int] = []
    begin = RewardWorkerPool.submit

    def counted(pool: RewardWorkerPool, some: Any) -> list[PendingCall]:
        begun.append(len(some))
        return begin(pool, some)

    monkeypatch.setattr(RewardWorkerPool, "submit", counted)
    reward = tuple(own(name) for name in names)
    early = train(tmp_path / "early", tiny_folder, reward, **more)
    assert sum(begun) > 10
    monkeypatch.setattr(TokenizedTask, "score_early", lambda *_: None)
    late = train(tmp_path / "late", tiny_folder, reward, **more)
    numbers = [
        [{k: v for k, v in line.items() if not k.startswith("time/")} for line in run.metrics] for run in (early, late)
    ]
    assert numbers[0] == numbers[1]
    assert any(line["reward_errors"] for line in early.metrics), "some rewards fail, and some processes die"
    kept = [(run.checkpoints[-1] / "params.safetensors").read_bytes() for run in (early, late)]
    assert kept[0] == kept[1]
