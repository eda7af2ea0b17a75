"""Small updates: the same gradients from padded rows whose passes are captured. On a CPU they are computed anew."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from ascent.build.language_backend import LanguageBackend
from ascent.core.algorithms import ALGORITHMS
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.models import LanguageModel
from ascent.models.packed_attention import PackedGroup
from ascent.ops.cuda_graphs import EagerGraphs, round_up_to_bucket
from ascent.rewards.tokenized_task import TokenizedTask
from ascent.settings import configure
from ascent.training import captured_updates as module
from ascent.training.captured_updates import CapturedBackbone, CapturedRow, RowSize, captured_tokens, pad_row
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from benchmarks.peers.fixed_prompts import FixedPrompts
from benchmarks.peers.steps import Ours, Work
from tests.flash_formulas import FlashFormulas
from tests.language import batch_of, model_of, sampler_of
from tests.training.test_language_learner import awkward, credited
from tests.training.test_update_gpu import on_gpu


class Anew(EagerGraphs):
    """In place of CUDA graphs: a replay computes again. As torch's pool, it ends with the last of its graphs."""

    def __init__(self) -> None:
        self.captured = 0
        self.reset()

    def warm_up(self, work: Any) -> None:
        work()

    def capture(self, work: Any) -> Any:
        gc.collect()  # graphs that nobody can reach end here
        if self.pool and not any(graph() for graph in self.pool):
            raise RuntimeError("use_count > 0")
        self.captured += 1
        self.pool.append(ref(work))
        return super().capture(work)

    def reset(self) -> None:
        self.pool: list[Any] = []


def capturing(learner: LanguageLearner, tokens: int = 10_000) -> LanguageLearner:
    """With captured passes, as on a GPU."""
    both = (learner._compute_params, learner._trainable)
    learner._captured_backbone = CapturedBackbone(learner.lm.backbone, *both, tokens, Anew(), FlashFormulas)
    if learner.critic is not None and learner.critic.separate_backbone is not None:
        critic = learner.critic
        critic.captured = CapturedBackbone(
            critic.separate_backbone, critic.compute_params, critic.master_params, tokens, Anew(), FlashFormulas
        )
    return learner


def learner_of(lm: LanguageModel, row: str, budget: int = 0) -> tuple[LanguageLearner, Any]:
    choice = {"own": OwnCritic(lr=1e-3), "shared": SharedCritic()}.get(row)
    algorithm = ALGORITHMS["dr-grpo"] if choice is None else replace(ALGORITHMS["ppo"], critic=choice)
    critic = None if choice is None else LanguageCritic(lm, choice.shared)
    more = (algorithm.outputs, budget, False, critic, algorithm.critic.update)
    return LanguageLearner(lm, algorithm.update, False, *more), algorithm


def gradients(learner: LanguageLearner, batch: Any, algorithm: Any) -> list[Tensor]:
    learner.gradient(batch, algorithm.objective)
    found = list(learner.trainable())
    if learner.critic_optimizer is not None:
        algorithm.critic(learner, batch)
        found += learner.critic.trained()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in found]


def test_row_sizes() -> None:
    assert [round_up_to_bucket(n) for n in (1, 2, 9, 17, 100, 4577, 5121)] == [1, 2, 10, 20, 112, 5120, 6144]
    size = RowSize.of([PackedGroup(0, 3, (2, 1)), PackedGroup(6, 2, ())])
    assert size == RowSize(tokens=10, keys=18, segments=8, longest_query=4, longest_key=8)
    assert captured_tokens(1600, [torch.zeros(5)], 10) == 8 and captured_tokens(16, [torch.zeros(5)], 10) == 0


def test_padding_attends_only_to_padding() -> None:
    """Every token is a key to itself, padding is keys behind the others, and what is left over is nobody's."""
    groups = [PackedGroup(0, 3, (2, 1)), PackedGroup(6, 2, ())]
    size = RowSize.of(groups)
    ids, positions, queries, keys, seen, own, again = pad_row(torch.arange(8), torch.arange(8), groups, size)
    assert ids.tolist() == [*range(8), 0, 0] and positions.tolist() == [*range(8), 0, 0]
    assert queries.tolist() == [0, 3, 5, 6, 8, 10, 10, 10, 10] and keys.tolist() == [0, 3, 8, 12, 14, 16, 16, 16, 16]
    assert seen.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 0, 0]
    assert own.tolist() == [0, 1, 2, 6, 7, 11, 12, 13, 14, 15]
    assert again.tolist() == [3, 4, 5, 8, 9, 10, 15, 15], "the rest adds a padding token's 0 to itself"


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "row", "budget"),
    [
        ("Llama", "policy", 0),
        ("Llama", "policy", 30),
        ("Qwen2", "own", 30),
        ("Qwen2", "shared", 0),
        ("Phi3", "policy", 0),
    ],
)
def test_captured_passes_match_eager_gradients(kind: str, row: str, budget: int) -> None:
    """In one piece or several, more than once, with tied embeddings; and each size is captured at its second use."""
    lm = model_of(kind)
    learner, algorithm = learner_of(lm, row, budget)
    batch = awkward(lm)
    ready = credited(batch.add(logp_old=batch.logp_sampler), algorithm, learner)
    if learner.critic_optimizer is not None:
        learner.critic_update = replace(learner.critic_update, lr=1e-30)  # type: ignore[type-var]
    want = gradients(learner, ready, algorithm)
    captured: Any = capturing(learner)._captured_backbone
    for again in range(3):
        got = gradients(learner, ready, algorithm)
        assert again == 0 or (captured.rows and captured.graphs.captured == 2 * len(captured.rows))
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() < 1e-9 * max(1.0, float(b.abs().max()))
    assert captured.capture_error is None and sum(captured.num_uses.values()) >= 3


def test_gradients_from_before_capture_are_kept() -> None:
    """Two micro-batches of one size: the first is launched, and the second is captured."""
    lm = model_of()
    learner, algorithm = learner_of(lm, "policy", budget=30)
    batch = batch_of(lm).select(torch.tensor([0, 0]))
    ready = credited(batch.add(logp_old=batch.logp_sampler), algorithm, learner)
    assert len(list(learner.split(ready))) == 2
    want = gradients(learner, ready, algorithm)
    captured: Any = capturing(learner)._captured_backbone
    got = gradients(learner, ready, algorithm)
    assert list(captured.num_uses.values()) == [2] and len(captured.rows) == 1
    assert all((a - b).abs().max() < 1e-9 * max(1.0, float(b.abs().max())) for a, b in zip(got, want, strict=True))


@pytest.mark.long
def test_captured_passes_use_updated_parameters_and_skip_frozen_ones() -> None:
    """Steps through float32 copies; layers that are not trained; parameters that were laid elsewhere meanwhile."""
    found = []
    for small in (False, True):
        lm = model_of()
        for name, p in lm.model.named_parameters():
            p.requires_grad_("layers.1." in name)
        learner, algorithm = learner_of(lm, "policy")
        batch = awkward(lm)
        ready = credited(batch.add(logp_old=batch.logp_sampler), algorithm, learner)
        captured: Any = capturing(learner)._captured_backbone if small else None
        for step in range(4):
            learner.step(ready, algorithm.objective, algorithm.update)
            if step == 2:
                for p in lm.model.parameters():
                    p.data = p.data.clone()
        assert captured is None or captured.graphs.captured == 4, "once more after the move"
        found.append([p.detach().clone() for p in learner.trainable()])
    assert all((a - b).abs().max() < 1e-9 for a, b in zip(*found, strict=True))


def test_cases_that_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows, sizes for which there is no room, passes without gradients, and what cannot be captured."""
    lm = model_of()
    learner, algorithm = learner_of(lm, "policy")
    batch = batch_of(lm)
    ready = credited(batch.add(logp_old=batch.logp_sampler), algorithm, learner)
    want = gradients(learner, ready, algorithm)
    for tokens, most, broken in ((20, 16, False), (10_000, 0, False), (10_000, 16, True)):
        captured: Any = capturing(learner, tokens)._captured_backbone
        monkeypatch.setattr(module, "MAX_CAPTURED_SIZES", most)
        if broken:
            monkeypatch.setattr(captured.graphs, "capture", lambda _: (_ for _ in ()).throw(RuntimeError("no\nmore")))
        learner.score(ready, frozenset({"logp_old"}))
        assert not captured.num_uses
        for _ in range(2):
            got = gradients(learner, ready, algorithm)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert not captured.rows and captured.capture_error == ("no" if broken else None)


def counting(captured: Any) -> list[Any]:
    """The forward passes that its rows compute from here on."""
    passes: list[Any] = []
    for row in captured.rows.values():
        own = row.forward
        row.forward = lambda own=own: (passes.append(own), own())[1]
    return passes


def test_early_forward_is_used_once_and_only_for_its_row_and_parameters() -> None:
    """Then no pass is computed again, and no number is another."""
    lm = model_of()
    learner, algorithm = learner_of(lm, "policy")
    learner.begin(batch_of(lm))  # nothing is captured, and nothing happens
    captured: Any = capturing(learner)._captured_backbone
    batch = batch_of(lm)
    other = batch.add(response=batch.response.flip(1))
    ready, beside = (credited(one.add(logp_old=one.logp_sampler), algorithm, learner) for one in (batch, other))
    learner.begin(ready)
    assert captured.early_forward is None, "its size has no graphs yet"
    want, differs = ([gradients(learner, one, algorithm) for _ in range(2)][1] for one in (ready, beside))
    assert len(captured.rows) == 1 and not torch.equal(want[0], differs[0])
    passes = counting(captured)

    def check(begun: Any, trained: Any, count: int, expected: list[Tensor]) -> None:
        passes.clear()
        if begun is not None:
            learner.begin(begun)
        got = gradients(learner, trained, algorithm)
        assert len(passes) == count and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    check(ready, ready, 1, want)
    check(None, ready, 1, want)  # the pass that began was used up
    check(beside, ready, 2, want)
    learner.begin(ready)
    with torch.no_grad():
        for p in captured.parameters:
            p.mul_(1.0)
    check(None, ready, 1, want)  # a step lies between
    learner.micro_batch = 10_000
    check(ready, ready, 1, want)


def test_run_starts_the_forward_pass_before_rewards_are_known(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs: the pass of the second is computed after the step of the first. No number is another for it."""
    events: list[str] = []
    for owner, name, event in ((CapturedRow, "run_forward", "pass"), (TokenizedTask, "score", "score")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, own=own, event=event: (events.append(event), own(*a))[1])
    found = []
    for early in (True, False):
        ours = Ours(Work(str(tiny_folder), ["one two", "three"], samples=3, tokens=6), {"epochs": 2})
        try:
            sampler, learner = ours.parts.engine, ours.parts.learner
            assert sampler.on_rollouts == learner.begin  # type: ignore[attr-defined]
            capturing(learner)  # type: ignore[arg-type]
            if not early:
                sampler.on_rollouts = None  # type: ignore[attr-defined]
            ours()
            events.clear()
            ours()
            assert events == (["pass", "score", "pass"] if early else ["score", "pass", "pass"])
            found.append([p.detach().clone() for p in learner.trainable()])
        finally:
            ours.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_filtered_or_split_updates_do_not_start_early() -> None:
    lm, backend = model_of(), LanguageBackend()
    learner, _ = learner_of(lm, "policy")
    for settings in ({"minibatches": 2}, {"groups": "with-signal"}, {}):
        sampler = sampler_of(lm)
        backend.enable_early_training(
            configure(FixedPrompts(words=("one",)), {"model": "none"} | settings), sampler, learner
        )
        assert (sampler.on_rollouts is None) == bool(settings)


@on_gpu
@pytest.mark.parametrize("row", ["policy", "own", "shared"])
def test_cuda_graphs_match_eager_gradients_on_gpu(row: str) -> None:
    """bfloat16 with float32 copies: the third update is captured, the fourth begins early, and neither is another."""
    lm = model_of(dtype=torch.float32)
    lm.model.to("cuda", torch.bfloat16)
    learner, algorithm = learner_of(lm, row)
    batch = batch_of(lm)
    ready = credited(batch.add(logp_old=batch.logp_sampler), algorithm, learner)
    if learner.critic_optimizer is not None:
        learner.critic_update = replace(learner.critic_update, lr=1e-30)  # type: ignore[type-var]
    first, _, third = (gradients(learner, ready, algorithm) for _ in range(3))
    captured: Any = learner._captured_backbone
    assert captured is not None and captured.rows and captured.capture_error is None
    learner.begin(batch)
    assert captured.early_forward is not None
    fourth = gradients(learner, ready, algorithm)
    assert captured.early_forward is None
    for p in captured.parameters:
        p.data = p.data.clone()
    fifth = gradients(learner, ready, algorithm)
    assert captured.rows and captured.capture_error is None, "captured anew"
    for a, *others in zip(first, third, fourth, fifth, strict=True):
        assert all((a - b).norm() <= 0.02 * a.norm() for b in others)
