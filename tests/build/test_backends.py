"""The contract of every backend in the list: what assemble, the loop and the workflows rely on."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import ENDED, TINY, close, policy_of, prompts_of

import ascent
from ascent.build import backends
from ascent.build.assemble import RunParts, assemble
from ascent.build.backend import Backend, BoundTask, OfflineEngine
from ascent.build.backends import BACKENDS, backend_of
from ascent.build.reward_loading import load_process_reward, load_reward_model
from ascent.build.small_backend import SmallBackend
from ascent.build.trained_run import load_policy
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.loop import PhaseTimer, collect, score_rollouts
from ascent.core.protocols import RolloutRequest
from ascent.core.types import Prompts
from ascent.inference.occupancy import OccupancyTimeline
from ascent.models import Transformer
from ascent.rewards.small_task import BoundSmallTask
from ascent.rollout.delegating_engine import DelegatingEngine
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.runs.run_info import run_label
from ascent.settings import configure
from ascent.tasks.small.sorting import Sort
from ascent.workflows.loaded_policy import sampling_config

QUICK = {"steps": 2, "prompts": 3, "samples": 4, "eval_every": 2, "eval_prompts": 4, "threads": 1, "seed": 3}
NAMES = [backend.name for backend in BACKENDS]
SMALL = {"length": 3, "numbers": 4, "policy": "transformer", "policy.width": 16, "policy.layers": 1, "policy.heads": 2}


@dataclass(frozen=True)
class ToyChoice(Transformer):
    """A policy of a third engine, which stands on the small one."""

    backend: ClassVar[str] = "toy"


class ToyBackend(SmallBackend):
    """A whole engine: one class, and one line in the list."""

    name = "toy"


class World:
    """Settings of a tiny run of one backend: on samples, on pairs and on labelled steps."""

    def __init__(self, name: str, folder: Path, model: Path):
        self.name, self.folder, self.model = name, folder, model
        text = name == "language"
        prompts = [f"{i} + 1" for i in range(12)] if text else [[i % 4, (i + 1) % 4, i % 3] for i in range(12)]
        answers = [f"Answer: {i + 1}" for i in range(12)] if text else [sorted(prompt) for prompt in prompts]  # type: ignore[type-var]
        wrong = [f"Answer: {i}" for i in range(12)] if text else [[0, 0, 0] for _ in prompts]
        self.problems = self._write("problems", [{"prompt": p, "answer": str(i + 1)} for i, p in enumerate(prompts)])
        rows = zip(prompts, answers, wrong, strict=True)
        pairs = [{"prompt": p, "chosen": a, "rejected": w} for p, a, w in rows if a != w]
        self.pairs = self._write("pairs", pairs)
        steps = [["one", "two"] if text else answer for answer in answers]
        rows = zip(prompts, steps, strict=True)
        self.steps = self._write("steps", [{"prompt": p, "steps": s, "labels": [0.5] * len(s)} for p, s in rows])

    def _write(self, name: str, rows: list[dict[str, Any]]) -> Path:
        path = self.folder / f"{self.name}-{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def config(self, what: str = "samples", **more: Any) -> Config:
        quick = QUICK if what == "samples" else {k: v for k, v in QUICK.items() if k != "samples"}
        if self.name != "language":
            task = (
                {"pairs": str(self.pairs)}
                if what == "pairs"
                else {"labels": str(self.steps)}
                if what == "steps"
                else {}
            )
            row = {"pairs": {"algorithm": "reward-model"}, "steps": {"algorithm": "process-reward"}}.get(what, {})
            return configure("sort", SMALL | quick | task | row | self.policy() | more)
        source = {
            "samples": f"jsonl:{self.problems}",
            "pairs": f"preferences:{self.pairs}",
            "steps": f"steps:{self.steps}",
        }
        row = {"preset": "reward-model"} if what == "pairs" else {}
        limits = {"max_tokens": 8, "policy.model": str(self.model), "policy.device": "cpu"}
        return configure(source[what], quick | row | limits | more)

    def policy(self) -> dict[str, Any]:
        return {"policy": ToyChoice(16, 1, 2)} if self.name == "toy" else {}

    def parts(self, what: str = "samples", **more: Any) -> RunParts:
        return assemble(self.config(what, **more))


@pytest.fixture(params=[*NAMES, "toy"])
def world(request: pytest.FixtureRequest, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Every backend of the list; and a third one, which a test adds to the list as an engine would be."""
    if request.param == "toy":
        monkeypatch.setattr(backends, "BACKENDS", [*BACKENDS, ToyBackend()])
    return World(request.param, tmp_path, tiny_folder)


# ---- chosen once -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_policy_names_its_backend(world: World) -> None:
    assert backend_of(world.config()).name == world.name


def test_a_policy_of_no_backend_is_refused() -> None:
    config = replace(configure("sort", SMALL | QUICK), policy=ToyChoice(16, 1, 2))
    with pytest.raises(ConfigError, match="toy"):
        backend_of(config)


def test_a_task_of_another_kind_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="its prompts are not text"):
        assemble(configure("sort", {"policy": "causal-lm", "model": str(tiny_folder)}))
    with pytest.raises(ConfigError, match="needs a language model"):
        assemble(configure("countdown", {"policy": "transformer"}))


# ---- sampler and learner -----------------------------------------------------------------------------------


def test_sampler_and_learner_have_the_same_log_probs(world: World) -> None:
    parts = world.parts()
    parts.engine.load(parts.learner.params(), 0)
    prompts = parts.task.draw(3, torch.Generator().manual_seed(0))
    batch, _ = score_rollouts(parts.task, parts.engine.generate(prompts, 4))
    logp = parts.learner.score(batch, frozenset({"logp_old"}))["logp_old"]
    close(logp[batch.mask], batch.logp_sampler[batch.mask], 1e-4)
    parts.close()


@pytest.mark.long
def test_the_seed_decides_what_is_drawn(world: World) -> None:
    def drawn(seed: int) -> torch.Tensor:
        parts = world.parts(seed=seed)
        parts.engine.load(parts.learner.params(), 0)
        batch, _ = collect(
            parts.task, parts.engine, parts.config.algorithm, parts.config, parts.streams.prompts, PhaseTimer()
        )
        parts.close()
        return batch.response

    one, again, other = drawn(3), drawn(3), drawn(4)
    assert torch.equal(one, again)
    assert one.shape != other.shape or not torch.equal(one, other)


@pytest.mark.long
def test_a_new_version_is_seen_after_load(world: World) -> None:
    parts = world.parts(**{"algorithm": "grpo", "lr": 0.5})
    algorithm = parts.config.algorithm
    prompts = parts.task.held_out(4)
    parts.engine.load(parts.learner.params(), 0)
    before = parts.engine.generate(prompts, 1, greedy=True)
    assert bool((torch.as_tensor(before.version) == 0).all())
    batch, _ = score_rollouts(parts.task, parts.engine.generate(prompts, 4))
    reward = torch.linspace(0, 1, batch.reward.numel()).view(batch.reward.shape)
    batch, state = algorithm.compute_advantages(
        batch.add(reward=reward, logp_old=batch.logp_sampler), algorithm.initial_state()
    )
    batch = batch.add(**parts.learner.score(batch, algorithm.needs), **algorithm.scalars(state, 0.0))
    parts.learner.step(batch.add(weight=algorithm.weights(batch)), algorithm.objective, algorithm.update)
    parts.engine.load(parts.learner.params(), 1)
    after = parts.engine.generate(prompts, 1, greedy=True)
    assert bool((torch.as_tensor(after.version) == 1).all())
    gap = before.logp_sampler.sum() - after.logp_sampler.sum()
    assert before.response.shape != after.response.shape or float(gap.abs()) > 1e-4
    parts.close()


def test_no_group_is_lost_or_comes_twice(world: World) -> None:
    parts = world.parts()
    parts.engine.load(parts.learner.params(), 0)
    ticket = RolloutRequest(0, parts.task.draw(5, torch.Generator().manual_seed(0)), 4)
    parts.engine.submit([ticket])
    done = list(parts.engine.iter_finished(0, deadline=60.0))
    places = torch.cat([each.prompt_indices for each in done])
    assert sorted(places.tolist()) == list(range(5))
    for each in done:
        assert torch.equal(each.rollouts.prompt, ticket.prompts.prompt[each.prompt_indices])
        assert each.rollouts.mask.shape[1] == 4
    assert list(parts.engine.iter_finished(0, deadline=60.0)) == []
    parts.close()


@pytest.mark.long
def test_state_and_restore_go_on_with_the_same_numbers(world: World) -> None:
    def step(parts: RunParts, version: int) -> torch.Tensor:
        algorithm, config = parts.config.algorithm, replace(parts.config, seed=one.config.seed)  # it is a resume's own
        parts.engine.load(parts.learner.params(), version)
        batch, _ = collect(parts.task, parts.engine, algorithm, config, parts.streams.prompts, PhaseTimer())
        reward = torch.linspace(0, 1, batch.valid.numel()).view(*batch.valid.shape, 1)
        batch, state = algorithm.compute_advantages(
            batch.add(reward=reward, logp_old=batch.logp_sampler), algorithm.initial_state()
        )
        batch = batch.add(**parts.learner.score(batch, algorithm.needs), **algorithm.scalars(state, 0.0))
        parts.learner.step(batch.add(weight=algorithm.weights(batch)), algorithm.objective, algorithm.update)
        return torch.cat([p.detach().flatten() for p in parts.learner.params().values()])

    one, two = world.parts(), world.parts(seed=8)
    step(one, 0)
    state = {group: {k: v.clone() for k, v in tensors.items()} for group, tensors in one.learner.state().items()}
    two.learner.restore(state)
    two.streams.restore({name: value.clone() for name, value in one.streams.state().items()})
    assert torch.equal(step(one, 1), step(two, 1))
    one.close()
    two.close()


# ---- bound tasks -------------------------------------------------------------------------------------------


def test_a_bound_task_has_words_for_people_and_rows_for_files(world: World) -> None:
    parts = world.parts()
    task: BoundTask = parts.task
    parts.engine.load(parts.learner.params(), 0)
    prompts = task.draw(2, torch.Generator().manual_seed(0))
    rollouts = parts.engine.generate(prompts, 2)
    ids = rollouts.response[0, 0][rollouts.mask[0, 0]].tolist()
    question = task.readable_prompt(rollouts, 0)
    assert question.text and question.content and isinstance(task.response_text(ids), str)
    assert json.loads(json.dumps([question.content, question.messages, task.response_record(ids)]))
    assert isinstance(task.normalize_answer(task.response_text(ids), question.answer), str) and isinstance(
        task.token_text(ids[0]), str
    )
    steps, last = task.split_steps(ids, "\n")
    assert len(steps) == len(last) and last[-1] == len(ids) - 1
    assert task.data_notes() == [] or all(isinstance(line, str) for line in task.data_notes())
    parts.close()
    parts.close()  # closing twice does no harm


def test_responses_are_continued_from_their_prefixes(world: World) -> None:
    parts = world.parts()
    parts.engine.load(parts.learner.params(), 0)
    prompts = parts.task.draw(2, torch.Generator().manual_seed(0))
    whole = parts.engine.generate(prompts, 1)
    prefixes = [row[0][mask[0]].tolist()[:1] for row, mask in zip(whole.response, whole.mask, strict=True)]
    sampler = parts.backend.engine_for_prompts(parts.config, parts.policy, prompts, 5, 0)
    groups = parts.backend.continue_responses(parts.config, parts.policy, prompts, prefixes, 3, sampler)
    assert [len(group) for group in groups] == [3, 3]
    for prefix, group in zip(prefixes, groups, strict=True):
        for ids in group:
            assert ids[:1] == prefix and 1 <= len(ids) <= parts.task.space.limit
    parts.close()


# ---- what is loaded from a run -----------------------------------------------------------------------------


def train(world: World, what: str, out: Path, **more: Any) -> ascent.Run:
    from ascent.api import start
    from ascent.runs.display.terminal import Display

    return start(world.config(what, **more), out, Display(), preflight=False)


@pytest.fixture
def saved(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The toy's policy is an object of this file, which config.json cannot hold."""
    if world.name == "toy":
        pytest.skip("a policy that lives in a test is in no config.json")
    return world


@pytest.mark.long
def test_a_policy_is_loaded_as_it_was_trained(saved: World) -> None:
    run = train(saved, "samples", saved.folder / "run")
    config = run.config
    again = load_policy(config, run.checkpoint())
    prompts_task = backend_of(config).bind(config.task, again, {})
    prompts = prompts_task.held_out(4)
    sampler = backend_of(config).engine_for_prompts(config, again, prompts, 0, 2)
    recorded = {row["group"]: row for row in run.held_out(1)}
    answers = sampler.generate(prompts, 1, greedy=True)
    for group, row in recorded.items():
        assert answers.response[group, 0][answers.mask[group, 0]].tolist() == row["response"]


@pytest.mark.long
@pytest.mark.parametrize(("what", "load"), [("pairs", load_reward_model), ("steps", load_process_reward)])
def test_a_reward_is_trained_loaded_and_handed_to_a_task(saved: World, what: str, load: Any) -> None:
    run = train(saved, what, saved.folder / what)
    model = load(run.folder)
    kind = "model" if what == "pairs" else "process"
    reward: Any = backend_of(run.config).reward_setting([f"{kind}:{run.folder}"])
    parts = saved.parts(reward=reward)
    parts.engine.load(parts.learner.params(), 0)
    rollouts = parts.engine.generate(parts.task.draw(3, torch.Generator().manual_seed(0)), 2)
    rated = parts.task.score(rollouts).reward.sum(-1)
    direct = model(rollouts)
    tokens = rollouts.mask.sum(-1, keepdim=True) - 1
    expected = direct.squeeze(-1) if direct.shape[-1] == 1 else direct.gather(-1, tokens).squeeze(-1)
    if saved.name == "small":
        close(rated, expected, 1e-5)
    assert bool(rated.isfinite().all())
    parts.close()
    with pytest.raises(ConfigError, match="and not a policy"):
        load_policy(run.config, run.checkpoint())


def test_the_list_is_the_only_place_to_add_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run: with its line the toy engine is assembled and trained; without it, it is refused."""
    config = replace(configure("sort", SMALL | QUICK), policy=ToyChoice(16, 1, 2))
    with pytest.raises(ConfigError):
        assemble(config)
    monkeypatch.setattr(backends, "BACKENDS", [*BACKENDS, ToyBackend()])
    parts = assemble(config)
    assert isinstance(parts.backend, ToyBackend) and isinstance(parts.backend, Backend)
    batch, metrics = collect(parts.task, parts.engine, config.algorithm, config, parts.streams.prompts, PhaseTimer())
    assert batch.prompt.shape[0] == 3 and "reward" in metrics
    assert parts.evaluator()().keys() >= {"eval/accuracy", "eval/reward"}


# ---- beside the contract ------------------------------------------------------------------------


def test_a_shorter_limit_may_be_asked_for_whatever_the_run_was_trained_with() -> None:
    """Its margin for long responses is about training, and no longer in the way."""
    config = configure("countdown", {"algorithm": "dapo", "shaping.margin": 64, "policy.model": "unused"})
    assert sampling_config(config, max_tokens=32).task.max_tokens == 32


def test_a_bound_small_task_closes_and_reports_for_its_task() -> None:
    closed = []

    class Owned(Sort):
        def close(self) -> None:
            closed.append(self)

        def data_notes(self) -> list[str]:
            return ["one row left out"]

    bound = BoundSmallTask(Owned(length=2, numbers=4))
    assert bound.data_notes() == ["one row left out"]
    bound.close()
    assert len(closed) == 1


def test_a_task_that_shows_its_own_demonstrations_keeps_its_changes_in_the_label() -> None:
    assert run_label(configure("sort", {"algorithm": "sft", "weights": "sequence-mean"})) == "sft+sequence-mean"


def test_a_task_of_ones_own_that_is_not_derived_from_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "duck.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass(frozen=True)\nclass Duck:\n    presets = {'default': {}}\n"
    )
    with pytest.raises(ConfigError, match=r"derives from ascent\.SmallTask or ascent\.TextTask"):
        configure(f"python:{tmp_path / 'duck.py'}:Duck", {})


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_small_policy_draws_from_all_its_tokens(settings: dict[str, Any]) -> None:
    config = configure("sort", SMALL | settings)
    with pytest.raises(ConfigError) as refusal:
        SmallBackend().check(config)
    assert str(refusal.value) == "--top-k, --top-p and --min-p are for language models: leave them out here"
    SmallBackend().check(configure("sort", SMALL))


def test_a_small_policy_is_asked_about_tasks_of_its_shape_alone() -> None:
    config, backend = configure("sort", SMALL), SmallBackend()
    backend.check_task(config, Sort(length=3, numbers=4), "--task")
    with pytest.raises(ConfigError) as refusal:
        backend.check_task(config, Sort(length=4, numbers=4), "--task")
    message = "--task: its prompts or responses have other shapes than those that the policy was trained on"
    assert str(refusal.value) == message


def test_a_reward_model_of_a_small_policy_learns_from_the_pairs_of_its_task(tmp_path: Path) -> None:
    kind, settings = SmallBackend().reward_model_task(configure("sort", SMALL), tmp_path / "pairs.jsonl")
    assert kind is Sort and settings["pairs"] == str(tmp_path / "pairs.jsonl")
    assert (settings["algorithm"], settings["length"], settings["numbers"]) == ("reward-model", 3, 4)
    with pytest.raises(
        ConfigError, match=r"^a reward model learns from pairs, and the task lecture has none; sort has$"
    ):
        SmallBackend().reward_model_task(configure("lecture", {}), tmp_path / "pairs.jsonl")


def test_offline_data_has_its_own_number_of_responses_and_the_version_that_was_loaded() -> None:
    policy = policy_of(TINY, ENDED)
    prompts = Prompts.of(prompts_of(ENDED, 3))
    sampler = OfflineEngine(lambda asked: SmallPolicyEngine(policy, 1.0, torch.Generator()).generate(asked, 2))
    sampler.load({}, 5)
    rollouts = sampler.generate(prompts, 2)
    assert rollouts.version.shape == (3, 2, 1) and bool((rollouts.version == 5).all())
    with pytest.raises(ValueError, match=r"^the data has 2 responses per prompt, not 4$"):
        sampler.generate(prompts, 4)


def test_a_wrapped_sampler_shares_the_timeline_of_the_one_inside_and_closes_it() -> None:
    class Inner:
        deterministic, provides, limit, rows, note = True, frozenset({"kept_mass"}), 7, 8, "slow"
        timeline, closed = OccupancyTimeline(3), 0

        def close(self) -> None:
            self.closed += 1

    class Outer(DelegatingEngine):
        def load(self, params: Any, version: int) -> None: ...
        def generate(self, *_: Any, **__: Any) -> Any: ...

    inner = Inner()
    outer = Outer(inner)
    assert (outer.deterministic, outer.provides, outer.limit, outer.rows, outer.note) == (
        True,
        {"kept_mass"},
        7,
        8,
        "slow",
    )
    assert outer.timeline is inner.timeline
    outer.timeline = later = OccupancyTimeline(4)
    assert inner.timeline is later is outer.timeline
    outer.close()
    assert inner.closed == 1
