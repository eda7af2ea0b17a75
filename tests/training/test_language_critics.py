"""Critics of language models on the fast road: packed, fused, in the policy's precision, stepped in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascent.core.algorithms import ALGORITHMS
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.core.types import Batch
from ascent.models import LanguageModel, fused_layers
from ascent.models.packed_attention import PackedLayout
from ascent.training import packing
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from tests.flash_formulas import FlashFormulas
from tests.language import model_of
from tests.training.test_language_learner import awkward, credited

PPO = {
    False: replace(ALGORITHMS["ppo"], critic=OwnCritic(lr=1e-3, clip=0.2)),
    True: replace(ALGORITHMS["ppo"], critic=SharedCritic(clip=0.2)),
}


def learner_of(lm: LanguageModel, shared: bool, budget: int = 0) -> LanguageLearner:
    critic, algorithm = LanguageCritic(lm, shared), PPO[shared]
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    more = (algorithm.outputs, budget, False, critic, algorithm.critic.update)
    return LanguageLearner(lm, algorithm.update, False, *more)


def trained(learner: LanguageLearner, batch: Batch, shared: bool) -> tuple[Tensor, list[Tensor]]:
    """The value loss of a batch, and the gradient of all that it reaches."""
    if shared:
        loss = learner.gradient(batch, PPO[True].objective).sums["value/loss"]
    else:
        loss = PPO[False].critic(learner, batch)["value/loss"]
    moved = learner.trainable() if shared else learner.critic.trained()
    return loss, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in moved]


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma"])
def test_packed_critic_matches_plain_values_and_gradients(
    kind: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On padded prompts and responses, an empty one among them, in segments as on a GPU and in micro-batches."""
    want: tuple[Tensor, Tensor, list[Tensor]] | None = None
    for shares, fused, budget in ((False, None, 0), (True, None, 0), (True, FlashFormulas, 30)):
        monkeypatch.setattr(packing, "PackedLayout", lambda groups, fused=fused: PackedLayout(groups, fused=fused))
        lm = model_of(kind)
        lm.can_share_prompts = shares
        batch = awkward(lm)
        learner = learner_of(lm, shared, budget)
        ready = credited(batch.add(logp_old=batch.logp_sampler), PPO[shared], learner)
        loss, gradients = trained(learner, ready, shared)
        assert ready.value is not None
        want = want or (ready.value, loss, gradients)
        exact = 1e-10 if kind in ("Llama", "Qwen2") else 1e-5  # the others' norms go through float32
        assert (ready.value - want[0]).abs().max() < exact and (loss - want[1]).abs() < exact * want[1]
        for got, expected in zip(gradients, want[2], strict=True):
            assert (got - expected).abs().max() < exact * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["GPT2", "OPT"])
def test_shared_critic_without_shared_prompts(kind: str) -> None:
    lm = model_of(kind)
    lm.can_share_prompts = False
    learner, batch = learner_of(lm, True), awkward(lm)
    ready = credited(batch.add(logp_old=batch.logp_sampler), PPO[True], learner)
    loss, gradients = trained(learner, ready, True)
    want = PPO[True].critic.loss(ready, learner.values(ready))[0]
    assert (loss - want).abs() < 1e-10 * want and all(torch.isfinite(g).all() for g in gradients)


def test_shared_critic_is_scored_in_the_logprob_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model_of()
    learner, batch = learner_of(lm, True), awkward(lm)
    both = frozenset({"logp_old", "value"})
    apart = {name: learner.score(batch, frozenset({name}))[name] for name in both}
    calls, plain = [], lm.hidden
    monkeypatch.setattr(lm, "hidden", lambda *args: calls.append(1) or plain(*args))
    together = learner.score(batch, both)
    assert len(calls) == 1
    for name in both:
        assert (together[name] - apart[name]).abs().max() < 1e-10


def half(finer: bool = False) -> LanguageModel:
    """In bfloat16, with the parameters that were rounded if they are finer."""
    lm = model_of(dtype=torch.float32)
    lm.full_precision_params = {name: p.detach().clone() for name, p in lm.trained().items()} if finer else {}
    lm.model.to(torch.bfloat16)
    return lm


def rounded(critic: LanguageCritic) -> bool:
    pairs = zip(critic.compute_params, critic.master_params, strict=True)
    return all(torch.equal(p, wide.bfloat16()) for p, wide in pairs)


@pytest.mark.parametrize("finer", [False, True])
def test_bfloat16_critic_has_float32_master_weights(finer: bool) -> None:
    """A step below the rounding is not lost; the copies begin with what was stored, and are not the policy's own."""
    lm = half(finer)
    stored = dict(lm.full_precision_params)
    learner = learner_of(lm, False)
    critic: Any = learner.critic
    assert critic.head.weight.dtype == torch.float32 and {p.dtype for p in critic.compute_params} == {torch.bfloat16}
    if finer:
        first = dict(critic.state_dict())
        assert all(
            torch.equal(first[f"separate_backbone.{n.removeprefix('model.')}"], p)
            for n, p in stored.items()
            if "lm_head" not in n
        )
        assert not {p.data_ptr() for p in critic.master_params} & {p.data_ptr() for p in learner.trainable()}
    learner.critic_update = replace(learner.critic_update, lr=1e-6)  # type: ignore[type-var]
    batch = awkward(lm)
    ready = credited(batch.add(logp_old=batch.logp_sampler), PPO[False], learner)
    before = [p.clone() for p in critic.master_params]
    policy = [p.detach().clone() for p in lm.model.parameters()]
    trained(learner, ready, False)
    assert all(not torch.equal(a, b) for a, b in zip(before, critic.master_params, strict=True)) and rounded(critic)
    assert all(torch.equal(a, b) for a, b in zip(policy, lm.model.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_critic_of_a_bfloat16_policy_resumes_bitwise(shared: bool) -> None:
    one, two = learner_of(half(), shared), learner_of(half(), shared)
    batch = awkward(one.lm)
    ready = credited(batch.add(logp_old=batch.logp_sampler), PPO[shared], one)

    def step(learner: LanguageLearner) -> None:
        learner.step(ready, PPO[shared].objective, PPO[shared].update)
        PPO[shared].critic(learner, ready)

    step(one)
    two.restore({group: {k: v.clone() for k, v in own.items()} for group, own in one.state().items()})
    assert rounded(two.critic)
    for learner in (one, two):
        step(learner)
    for a, b in zip(one.state().values(), two.state().values(), strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_float32_critic_checkpoint_resumes_in_bfloat16() -> None:
    """As a run that began with a float32 policy left it: the same names, every number in float32."""
    saved = learner_of(model_of(dtype=torch.float32), False).critic.state_dict()
    critic = learner_of(half(), False).critic
    critic.load_state_dict({name: p + 1e-4 for name, p in saved.items()})
    assert all(torch.equal(p, saved[name] + 1e-4) for name, p in critic.state_dict().items()) and rounded(critic)


def test_separate_critic_backbone_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norms and gates compute what the policy's do; a copy of a fused model does not compute with the model's."""
    lm = half()
    fused_layers.fuse_layers(lm.model, fused_layers.ElementwiseReference)
    critic = LanguageCritic(lm, False)
    assert (
        critic.separate_backbone is not None
        and fused_layers.fuse_layers(critic.separate_backbone, fused_layers.ElementwiseReference) > 0
    )
    for p in lm.model.parameters():
        p.data.zero_()
    assert critic.separate_backbone(torch.arange(5)[None]).last_hidden_state.abs().max() > 0
