"""Sampling ahead: each token records its policy version, and responses do not depend on when they are generated."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, close, shake
from torch import Tensor

import ascent
from ascent.build.trained_run import Run
from ascent.core.errors import ConfigError
from ascent.core.protocols import FinishedRollouts, RolloutRequest
from ascent.core.types import Prompts, Rollouts
from ascent.inference.engine import LocalEngine
from ascent.inference.runners.cuda_graph import cuda_graph_runner
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.runs.batch_serialization import pack_rollouts, unpack_rollouts
from ascent.runs.untrusted_files import naming_file
from ascent.settings import configure
from ascent.tasks.small.sorting import Sort
from benchmarks.ahead import try_schedule
from tests.language import VOCAB, model_of, sampler_of

STEPS, SAMPLES = 4, 2
Params = dict[str, Tensor]


def prompts_of_step(step: int) -> Prompts:
    """The prompts of a step, of several lengths."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 8, (4,), generator=generator)
    prompt = torch.randint(VOCAB, (4, 8), generator=generator)
    return Prompts.of(torch.where(torch.arange(8) < lengths[:, None], prompt, -1))


def run_steps(
    sampler: LocalEngine, ahead: int, moving: bool = False, first: int = 0, greedy: bool = False
) -> tuple[list[Rollouts], list[Params]]:
    """Return the rollouts of each step and the parameters of each version. `moving`: they change between steps."""
    found, versions = [], []
    for step in range(first, STEPS):
        if moving and step > first:
            shake(sampler.lm.model, 0.02, seed=step)
        params = dict(sampler.lm.model.named_parameters())
        versions.append({name: p.detach().clone() for name, p in params.items()})
        sampler.load({}, version=step)
        begun = {one.request.step for one in sampler.pending}
        for later in range(step, min(step + ahead + 1, STEPS)):
            ticket = RolloutRequest(later, prompts_of_step(later), SAMPLES)
            if later not in begun:
                sampler.submit([ticket, replace(ticket, samples=1, greedy=True)] if greedy else [ticket])
        done = list(sampler.iter_finished(step, 60.0))
        assert [one.request.greedy for one in done] == [False, True][: 1 + greedy]
        found.append(done[0].rollouts)
    assert not sampler.pending
    return found, versions


def engine_for(runner: Any, **more: Any) -> LocalEngine:
    lm, room = model_of(), more.pop("room", 0)
    sampler = sampler_of(lm, **{"limit": 10, "rows": 4} | more)
    sampler.runner, sampler.cache_tokens = cuda_graph_runner(lm)[0] if runner == "graphs" else runner, room
    return sampler


RUNNERS = [pytest.param(PagedRunner, id="groups"), "graphs"]


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("ahead", "more"),
    [
        pytest.param(1, {}, id="one", marks=pytest.mark.smoke),
        pytest.param(9, {}, id="more than the number of steps"),
        pytest.param(3, {"rows": 100, "top_p": 0.7, "min_tokens": 2}, id="many rows and top-p"),
        pytest.param(2, {"room": 128}, id="few blocks"),
    ],
)
def test_sampling_ahead_does_not_change_the_responses_of_a_step(runner: Any, ahead: int, more: dict[str, Any]) -> None:
    """Nothing is dropped or reordered, so long responses are trained on as often as they are sampled."""
    more = more | ({"room": 2 * more["room"]} if "room" in more and runner == "graphs" else {})
    whole, _ = run_steps(engine_for(runner, **more), 0)
    early, _ = run_steps(engine_for(runner, **more), ahead)
    for step, (one, other) in enumerate(zip(whole, early, strict=True)):
        assert torch.equal(one.mask, other.mask) and torch.equal(one.truncated, other.truncated)
        assert torch.equal(one.response.where(one.mask, -1), other.response.where(other.mask, -1))
        close(other.logp_sampler.double(), one.logp_sampler.double(), 1e-5)
        if one.kept_mass is not None:
            close(other.kept_mass.double(), one.kept_mass.double(), 1e-5)
        drawn_by = other.version.expand(other.mask.shape)[other.mask]
        assert int(drawn_by.max()) <= step and int(drawn_by.min()) >= step - ahead
    assert any((one.version.expand(one.mask.shape)[one.mask] < step).any() for step, one in enumerate(early))


@torch.no_grad()
def model_logp(sampler: LocalEngine, params: Params, rollouts: Rollouts) -> Tensor:
    """Return the log-prob of each token by one whole forward pass per response."""
    model, found = sampler.lm.model, torch.zeros(rollouts.mask.shape, dtype=torch.float64)
    model.load_state_dict(params, strict=False)
    for p, prompt in enumerate(rollouts.prompt):
        ids = prompt[prompt >= 0]
        for s in range(rollouts.mask.shape[1]):
            response = rollouts.response[p, s][rollouts.mask[p, s]]
            logits = model(torch.cat([ids, response])[None]).logits[0, len(ids) - 1 : -1]
            found[p, s, : len(response)] = torch.log_softmax(logits, -1).gather(-1, response[:, None])[:, 0]
    return found


@pytest.mark.long
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_token_has_the_log_prob_of_the_version_that_sampled_it(runner: Any) -> None:
    """Keys and values of earlier tokens are recomputed with the new parameters; otherwise later tokens would differ."""
    sampler = engine_for(runner)
    found, versions = run_steps(sampler, 2, moving=True)
    mixed, off = 0, 0.0
    for rollouts in found:
        version = rollouts.version.expand(rollouts.mask.shape)
        for v in version[rollouts.mask].unique().tolist():
            own = rollouts.mask & (version == v)
            close(rollouts.logp_sampler[own].double(), model_logp(sampler, versions[v], rollouts)[own], 1e-5)
            other = model_logp(sampler, versions[max(0, v - 1)], rollouts)[own]
            off = max(off, float((rollouts.logp_sampler[own] - other).abs().max()))
        ends = rollouts.length.clamp(min=1).unsqueeze(-1) - 1
        mixed += int((version.gather(-1, ends) != version[..., :1]).sum())
    assert mixed > 1, "some responses were begun by one version and ended by another"
    assert off > 0.01, "versions differ by far more than the bound"


@pytest.mark.long
@pytest.mark.unchecked
def test_dynamic_sampling_and_a_greedy_baseline_work_beside_sampling_ahead() -> None:
    sampler = engine_for(PagedRunner)
    with_greedy, _ = run_steps(sampler, 2, greedy=True)
    alone, _ = run_steps(engine_for(PagedRunner), 0)
    for one, other in zip(with_greedy, alone, strict=True):
        assert torch.equal(one.response.where(one.mask, -1), other.response.where(other.mask, -1))
    again = RolloutRequest(0, prompts_of_step(0), SAMPLES, seed=5)
    sampler.submit([RolloutRequest(1, prompts_of_step(1), SAMPLES)])
    sampler.submit([again])
    (done,) = sampler.iter_finished(0, 60.0)
    assert done.request is again and [one.request.step for one in sampler.pending] == [1]
    fresh = engine_for(PagedRunner).generate(prompts_of_step(0), SAMPLES, seed=5)
    assert torch.equal(fresh.response.where(fresh.mask, -1), done.rollouts.response.where(done.rollouts.mask, -1))


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize("runner", [*RUNNERS, pytest.param(EagerRunner, id="plain")])
def test_pending_rollouts_survive_a_checkpoint_bit_for_bit(runner: Any) -> None:
    """Saved after the second step and restored into a new engine: later tokens and log-probs are the same."""
    whole, versions = run_steps(engine_for(runner), 2, moving=True)
    sampler, at = engine_for(runner), 2
    sampler.lm.can_share_prompts = runner is not EagerRunner
    if not sampler.lm.can_share_prompts:
        plain = engine_for(runner)
        plain.lm.can_share_prompts = False
        whole, versions = run_steps(plain, 2, moving=True)
    first = engine_for(runner)
    first.lm.can_share_prompts = sampler.lm.can_share_prompts
    stopped: list[Any] = []

    class Stop(Exception):
        pass

    real = first.iter_finished

    def iter_finished(step: int, deadline: float) -> Iterator[FinishedRollouts]:
        if step == at:
            stopped.append((pack_rollouts(first.pending), first.generator.get_state()))
            raise Stop
        yield from real(step, deadline)

    first.iter_finished = iter_finished  # type: ignore[method-assign]
    with pytest.raises(Stop):
        run_steps(first, 2, moving=True)
    (tensors, plain_parts), state = stopped[0]
    sampler.pending = unpack_rollouts({k: v.clone() for k, v in tensors.items()}, plain_parts)
    sampler.generator.set_state(state)
    sampler.lm.model.load_state_dict(versions[at], strict=False)
    rest, _ = run_steps(sampler, 2, moving=True, first=at)
    for one, other in zip(whole[at:], rest, strict=True):
        assert torch.equal(one.version, other.version)
        assert torch.equal(one.response, other.response) and torch.equal(one.logp_sampler, other.logp_sampler)


# ---- rollout requests of the loop, by a simulated clock --------------------------------------------------------


@pytest.mark.long
@pytest.mark.unchecked
def test_staleness_is_bounded_in_any_schedule() -> None:
    """Random lengths, speeds, kills and resumes; `benchmarks.ahead` runs a thousand."""
    rng = random.Random(0)
    tried = [try_schedule(rng) for _ in range(40)]
    assert sum(oldest == ahead > 0 for oldest, ahead, _ in tried) > 10 and sum(resumes for *_, resumes in tried) > 5


# ---- whole runs -----------------------------------------------------------------------------------------------


ROWS = [{"prompt": f"{a} plus {b}", "answer": str(a + b)} for a in range(5) for b in range(4)]


def brevity(prompt: str, response: str) -> float:
    return float(len(response) % 7)


def language(folder: Path, model: Path, **more: Any) -> Run:
    given = {"algorithm": "grpo", "samples": 4, "prompts": 3, "steps": 4, "max_tokens": 8, "lr": 0.01, "threads": 1}
    given |= {
        "policy.rows": 7,
        "eval_every": 4,
        "eval_prompts": 2,
        "checkpoint_every": 2,
        "keep": 9,
        "reward_workers": 1,
    }
    plain = {"out": folder, "show": False, "preflight": False}
    reward = folder.with_name("brevity.py")  # a process that rates loads this file alone
    reward.write_text("def brevity(response):\n    return float(len(response) % 7)\n")
    return ascent.train(ROWS, model=str(model), reward=f"python:{reward}:brevity", **plain, **given | more)


def numbers(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in run.metrics]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "more",
    [
        {"ahead": 2},
        {"ahead": 1, "algorithm": "dapo", "shaping": "no-shaping", "top_p": 0.9, "epochs": 2},
        {"ahead": 3, "algorithm": "ppo", "policy.lora": 4, "correction": "masked", "record_rollouts": "all"},
    ],
    ids=["grpo", "dapo", "ppo with LoRA"],
)
def test_a_run_that_samples_ahead_resumes_to_the_same_bits(
    more: dict[str, Any], tmp_path: Path, tiny_folder: Path
) -> None:
    whole = language(tmp_path / "run", tiny_folder, **more)
    lines, params = numbers(whole), whole.checkpoints[-1] / "params.safetensors"
    kept = params.read_bytes()
    assert max(line.get("sampling/lag") or 0 for line in lines) > 0
    assert whole.config.old_logp == "learner" and whole.config.algorithm.correction.enabled
    again = ascent.resume(whole, from_step=2, rows=ROWS)
    assert numbers(again) == lines and params.read_bytes() == kept


@pytest.mark.long
def test_a_small_policy_samples_whole_responses_ahead_and_resumes(tmp_path: Path) -> None:
    """Also conversations: the checkpoint has their turns, so that no environment runs again."""
    given = {"steps": 6, "prompts": 4, "samples": 2, "checkpoint_every": 3, "keep": 9, "eval_every": 6, "ahead": 2}
    for task in ("sort", "guess"):
        run = ascent.train(task, out=tmp_path / task, show=False, algorithm="dr-grpo", **given)
        lines, kept = numbers(run), (run.checkpoints[-1] / "params.safetensors").read_bytes()
        assert [line.get("sampling/lag") or 0 for line in lines] == [0, 1, 2, 2, 2, 2]
        again = ascent.resume(run, from_step=3)
        assert numbers(again) == lines and (again.checkpoints[-1] / "params.safetensors").read_bytes() == kept


def test_a_resume_rejects_responses_that_are_staler_than_ahead_allows(tmp_path: Path) -> None:
    """With --ahead 2 the checkpoint of step 3 holds responses for steps 3 and 4. With --ahead 1 step 4 is too early."""
    given = {"steps": 5, "prompts": 2, "samples": 2, "checkpoint_every": 3, "keep": 9, "eval_every": 5, "ahead": 2}
    run = ascent.train("sort", out=tmp_path / "run", show=False, algorithm="dr-grpo", **given)
    config = json.loads((run.folder / "config.json").read_text())
    (run.folder / "config.json").write_text(json.dumps(config | {"ahead": 1}))
    with pytest.raises(ConfigError, match=r"step 3 holds responses for step 4.*--ahead 1.*Set it to 2 or more"):
        ascent.resume(run.folder, from_step=3)
    (run.folder / "config.json").write_text(json.dumps(config))
    assert numbers(ascent.resume(run.folder, from_step=3)) == numbers(run)


def test_without_sampling_ahead_a_checkpoint_has_no_pending_rollouts(tmp_path: Path) -> None:
    run = ascent.train("sort", out=tmp_path / "run", show=False, steps=2, prompts=2, samples=2)
    assert {path.name for path in run.checkpoints[-1].iterdir()}.isdisjoint({"ahead.safetensors"})
    assert "ahead" not in (run.checkpoints[-1] / "state.json").read_text()


@pytest.mark.parametrize(
    "odd",
    [{"step": "x"}, {"rollouts": {"more": 1}}, {"rollouts": 5}],
    ids=["step", "field", "kind"],
)
def test_a_damaged_pending_rollout_is_rejected(odd: dict[str, Any]) -> None:
    sampler = SmallPolicyEngine(
        TINY(Sort().space, torch.Generator().manual_seed(0)), 1.0, torch.Generator().manual_seed(1)
    )
    sampler.submit([RolloutRequest(3, Sort().held_out(2), 2)])
    list(sampler.iter_finished(2, 1.0))
    tensors, plain = pack_rollouts(sampler.pending)
    (one,) = unpack_rollouts(tensors, plain)
    assert one.request.step == 3 and torch.equal(one.rollouts.response, sampler.pending[0].rollouts.response)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="ahead cannot be read"), naming_file(Path("ahead")):
        unpack_rollouts(tensors, [plain[0] | odd])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"algorithm": "reinforce"}, "--ahead 1 with --loss log-prob: nothing bounds.*--correction truncated"),
        ({"algorithm": "trpo"}, "--ahead 1 with --loss ratio"),
        ({"algorithm": "grpo", "old_logp": "learner"}, "its ratio begins at 1 whoever drew the tokens"),
        ({"algorithm": "sft"}, "learns from demonstrations, and samples nothing"),
        ({"algorithm": "grpo", "ahead": -1}, "--ahead is -1"),
    ],
)
def test_algorithms_without_an_off_policy_correction_are_rejected(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configure("sort", {"ahead": 1} | settings)


def test_sampling_ahead_enables_a_correction_by_default() -> None:
    text = configure(ROWS, {"reward": brevity, "model": "none", "ahead": 1})
    assert text.algorithm.correction.enabled and text.old_logp == "learner"
    clipped = configure(ROWS, {"reward": brevity, "model": "none", "ahead": 1, "old_logp": "sampler"})
    assert not clipped.algorithm.correction.enabled
    small = configure("sort", {"algorithm": "grpo", "ahead": 1})
    assert not small.algorithm.correction.enabled and small.old_logp == "sampler"
    assert not configure(ROWS, {"reward": brevity, "model": "none"}).algorithm.correction.enabled
