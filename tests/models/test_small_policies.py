"""Policies and the local engine: what the sampler says of a token is what the trainer says of it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from conftest import ENDED, F64, FIXED, TINY, close, learner_of, policy_of, prompts_of, rollouts_of, shake, with_rewards
from torch import Tensor

from ascent.core.algorithms import Algorithm
from ascent.core.errors import ConfigError
from ascent.core.reference import Frozen
from ascent.core.types import Prompts, Space
from ascent.models import POLICIES, CausalLM, PerPosition, Policy, Transformer
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.training.small_learner import action_logprobs, log_probs


def trained_logp(policy: Policy, rollouts: Any) -> Tensor:
    return action_logprobs(log_probs(policy, rollouts), rollouts)


# ---- log-prob parity ------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_sampler_and_trainer_agree(policy: Policy, temperature: float) -> None:
    rollouts = rollouts_of(policy, count=5, samples=6, temperature=temperature)
    assert rollouts.temperature == temperature
    close(trained_logp(policy, rollouts), rollouts.logp_sampler)
    assert bool((rollouts.logp_sampler[rollouts.mask] < 0).all())


def test_agreement_in_float32(policy: Policy) -> None:
    policy = policy.float()
    rollouts = rollouts_of(policy, count=5, samples=6, temperature=0.8)
    torch.testing.assert_close(trained_logp(policy, rollouts), rollouts.logp_sampler, rtol=0, atol=2e-6)


def test_temperature_divides_the_logits(policy: Policy) -> None:
    rollouts = rollouts_of(policy, temperature=0.5)
    logits = policy.logits(rollouts.prompt, rollouts.response)
    close(log_probs(policy, rollouts).detach(), torch.log_softmax(2 * logits, -1).detach())


def test_greedy_log_probs_agree_too(policy: Policy) -> None:
    sampler = SmallPolicyEngine(policy, 0.7, torch.Generator())
    rollouts = sampler.generate(Prompts.of(prompts_of(policy.space, 4)), 1, greedy=True)
    close(trained_logp(policy, rollouts), rollouts.logp_sampler)


# ---- sampling -------------------------------------------------------------------------------------


def uncached(policy: Policy, prompt: list[int], samples: list[list[int]], lengths: list[int]) -> list[list[float]]:
    """Log-probs of one prompt's responses, the whole text encoded again for every token and every sample."""
    assert isinstance(policy.space.prompt_length, int)
    found = []
    for response, length in zip(samples, lengths, strict=True):
        row = []
        for t in range(length):
            text = torch.tensor([[*prompt, policy.space.vocab, *response[:t]]])
            hidden, _ = policy._forward(text, 0, None)
            row.append(torch.log_softmax(policy.head(hidden[0, -1]), -1)[response[t]].item())
        found.append(row)
    return found


@pytest.mark.parametrize("space", [FIXED, ENDED], ids=["fixed", "ended"])
def test_cached_sampling_and_shared_prompts_equal_encoding_everything_anew(space: Space) -> None:
    """The key-value cache, and the prompt that a group shares, are only savings."""
    policy = policy_of(Transformer(width=8, layers=2, heads=2), space)
    rollouts = rollouts_of(policy, count=3, samples=4)
    for i, prompt in enumerate(rollouts.prompt.tolist()):
        lengths = rollouts.mask[i].sum(-1).tolist()
        expected = uncached(policy, prompt, rollouts.response[i].tolist(), lengths)
        for j, row in enumerate(expected):
            close(rollouts.logp_sampler[i, j, : len(row)], row, 1e-10)


def test_a_group_equals_its_samples_one_by_one(policy: Policy) -> None:
    rollouts = rollouts_of(policy, count=3, samples=4)
    whole = policy.logits(rollouts.prompt, rollouts.response).expand(3, 4, -1, -1)
    for i, j in itertools.product(range(3), range(4)):
        alone = policy.logits(rollouts.prompt[i : i + 1], rollouts.response[i : i + 1, j : j + 1])
        close(alone[0, 0].detach(), whole[i, j].detach(), 1e-10)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    """Causality: what stands after a position, padding above all, is not seen there."""
    policy = policy_of(TINY, ENDED)
    rollouts = rollouts_of(policy)
    other = rollouts.response.clone()
    other[..., -1] = (other[..., -1] + 1) % ENDED.vocab
    one, two = policy.logits(rollouts.prompt, rollouts.response), policy.logits(rollouts.prompt, other)
    close(one.detach(), two.detach())
    other[..., 0] = (other[..., 0] + 1) % ENDED.vocab
    assert not torch.allclose(one[:, :, 1:], policy.logits(rollouts.prompt, other)[:, :, 1:])


def test_a_seed_decides_the_responses(policy: Policy) -> None:
    one, two, other = (rollouts_of(policy, count=6, samples=6, seed=seed) for seed in (4, 4, 5))
    assert torch.equal(one.response, two.response)
    assert torch.equal(one.logp_sampler, two.logp_sampler)
    assert one.response.shape != other.response.shape or not torch.equal(one.response, other.response)


def test_sampling_leaves_the_global_generator_alone(policy: Policy) -> None:
    state = torch.random.get_rng_state()
    rollouts_of(policy)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_generator_moves_on(policy: Policy) -> None:
    sampler = SmallPolicyEngine(policy, 1.0, torch.Generator().manual_seed(0))
    prompt = prompts_of(policy.space, 6)
    one, two = sampler.generate(Prompts.of(prompt), 6), sampler.generate(Prompts.of(prompt), 6)
    assert one.response.shape != two.response.shape or not torch.equal(one.response, two.response)


def test_frequencies_are_the_probabilities(policy: Policy) -> None:
    """20,000 first tokens of one prompt, at temperature 0.7: within four standard errors of softmax(logits/0.7)."""
    sampler = SmallPolicyEngine(policy, 0.7, torch.Generator().manual_seed(0))
    prompt = prompts_of(policy.space, 1)
    n = 20_000
    first = sampler.generate(Prompts.of(prompt), n).response[0, :, 0]
    seen = first.bincount(minlength=policy.space.vocab) / n
    p = torch.softmax(policy.logits(prompt, torch.zeros(1, 1, 1, dtype=torch.long))[0, 0, 0] / 0.7, -1)
    assert bool(((seen - p).abs() < 4 * (p * (1 - p) / n).sqrt() + 1e-9).all())
    assert p.max() - p.min() > 0.05, "a uniform policy would not show a forgotten temperature"


def test_greedy_is_the_likeliest_token_at_every_state(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    rollouts = SmallPolicyEngine(policy, 0.7, generator).generate(
        Prompts.of(prompts_of(policy.space, 5)), 2, greedy=True
    )
    logits = policy.logits(rollouts.prompt, rollouts.response).expand(-1, 2, -1, -1)
    assert torch.equal(logits.argmax(-1)[rollouts.mask], rollouts.response[rollouts.mask])
    assert torch.equal(rollouts.response[:, 0][rollouts.mask[:, 0]], rollouts.response[:, 1][rollouts.mask[:, 1]])
    assert torch.equal(generator.get_state(), state), "greedy draws nothing"


# ---- ends -----------------------------------------------------------------------------------------


def test_the_end_token_is_an_action_and_in_the_mask() -> None:
    rollouts = rollouts_of(policy_of(TINY, ENDED), count=20, samples=8)
    ends = (rollouts.response == ENDED.end) & rollouts.mask
    assert ends.any(), "some responses end"
    assert rollouts.truncated.any(), "and some are cut off"
    length = rollouts.mask.sum(-1)
    assert len(length.unique()) > 2
    last = rollouts.response.gather(-1, length.unsqueeze(-1) - 1).squeeze(-1)
    assert torch.equal(last == ENDED.end, ~rollouts.truncated)
    assert torch.equal(ends.sum(-1), (~rollouts.truncated).long()), "exactly one end in each finished response"
    assert torch.equal(rollouts.mask, torch.arange(rollouts.mask.shape[2]) < length.unsqueeze(-1))
    assert bool((length[rollouts.truncated] == ENDED.limit).all())
    assert torch.equal(rollouts.logp_sampler[~rollouts.mask], torch.zeros(int((~rollouts.mask).sum()), dtype=F64))
    assert rollouts.limit == ENDED.limit


def test_a_policy_that_ends_at_once_gives_responses_of_one_token() -> None:
    policy = policy_of(TINY, ENDED)
    with torch.no_grad():
        policy.head.bias[ENDED.end] = 50.0
    rollouts = rollouts_of(policy)
    assert rollouts.response.shape == (3, 4, 1)
    assert rollouts.limit == ENDED.limit, "the limit is the task's and not the width of the tensor"
    assert not rollouts.truncated.any()
    close(trained_logp(policy, rollouts), rollouts.logp_sampler)


def test_without_an_end_token_every_response_has_the_limit() -> None:
    for choice in (PerPosition(dim=4), TINY):
        rollouts = rollouts_of(policy_of(choice, FIXED))
        assert rollouts.mask.all()
        assert rollouts.mask.shape[2] == FIXED.limit
        assert not rollouts.truncated.any()


def test_per_position_refuses_an_end_token() -> None:
    with pytest.raises(ConfigError, match="--policy transformer"):
        PerPosition()(ENDED, torch.Generator())


def test_positions_are_independent_in_the_per_position_policy() -> None:
    policy = policy_of(PerPosition(dim=4), FIXED)
    prompt = prompts_of(FIXED, 2)
    one = policy.logits(prompt, torch.zeros(2, 3, 3, dtype=torch.long))
    assert one.shape == (2, 1, 3, 4), "one distribution for all samples"
    assert torch.equal(one, policy.logits(prompt, torch.ones(2, 3, 3, dtype=torch.long)))


def test_the_lectures_policy_by_hand() -> None:
    """SPEC section 3: encoded = Σ emb[prompt]·E_pos, decoded_pos = encoded·D_pos, logits = decoded·embᵀ."""
    torch.manual_seed(5)
    embedding = torch.randn(5, 10)
    encode, decode = torch.randn(3, 10, 10) / 10**0.5, torch.randn(3, 10, 10) / 10**0.5
    policy = PerPosition()(Space(3, 5, 3), torch.Generator().manual_seed(5))
    assert [tuple(p.shape) for p in policy.parameters()] == [(5, 10), (3, 10, 10), (3, 10, 10)]
    for mine, theirs in zip(policy.parameters(), (embedding, encode, decode), strict=True):
        torch.testing.assert_close(mine.detach(), theirs)
    prompt = [1, 0, 2]
    encoded = sum(embedding[n] @ encode[i] for i, n in enumerate(prompt))
    expected = torch.stack([encoded @ decode[i] @ embedding.T for i in range(3)])
    got = policy.logits(torch.tensor([prompt]), torch.zeros(1, 1, 3, dtype=torch.long))[0, 0]
    torch.testing.assert_close(got.detach(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choice", [cls() for cls in POLICIES if cls is not CausalLM], ids=repr)
def test_the_generator_decides_the_first_parameters(choice: Any) -> None:
    def params(seed: int) -> Tensor:
        return torch.cat([p.flatten() for p in choice(FIXED, torch.Generator().manual_seed(seed)).parameters()])

    torch.manual_seed(0)
    one = params(1)
    torch.manual_seed(1)
    assert torch.equal(one, params(1))
    assert not torch.equal(one, params(2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Transformer(width=10, heads=4), "--policy.width 10 is not a multiple of --policy.heads 4"),
        (lambda: Transformer(layers=0), "1 or more"),
    ],
)
def test_transformer_refusals(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ---- the contract of sampler and learner ----------------------------------------------------------


def test_the_new_version_is_visible_after_load(policy: Policy) -> None:
    learner = learner_of(policy, Algorithm())
    sampler = SmallPolicyEngine(policy, 1.0, torch.Generator().manual_seed(0))
    for version in (0, 1, 7):
        sampler.load(learner.params(), version)
        assert (sampler.generate(Prompts.of(prompts_of(policy.space, 2)), 2).version == version).all()


def test_loading_other_parameters_takes_effect(policy: Policy) -> None:
    """The sampler has a module of its own: after `load` it draws with the learner's parameters, and not before."""
    own = copy.deepcopy(policy)
    sampler = SmallPolicyEngine(own, 1.0, torch.Generator().manual_seed(0))
    learner = learner_of(policy, Algorithm())
    shake(policy, 0.5)
    before = sampler.generate(Prompts.of(prompts_of(policy.space, 4)), 4)
    assert not torch.allclose(trained_logp(policy, before), before.logp_sampler)
    sampler.load(learner.params(), 1)
    after = sampler.generate(Prompts.of(prompts_of(policy.space, 4)), 4)
    close(trained_logp(policy, after), after.logp_sampler)
    shake(policy, 0.5)
    later = sampler.generate(Prompts.of(prompts_of(policy.space, 4)), 4)
    assert not torch.allclose(trained_logp(policy, later), later.logp_sampler), "loading copied, it did not tie"


def test_a_shared_module_is_always_current(policy: Policy) -> None:
    learner = learner_of(policy, Algorithm())
    sampler = SmallPolicyEngine(policy, 1.0, torch.Generator().manual_seed(0))
    sampler.load(learner.params(), 0)
    shake(policy, 0.5)
    sampler.load(learner.params(), 1)
    after = sampler.generate(Prompts.of(prompts_of(policy.space, 4)), 4)
    close(trained_logp(policy, after), after.logp_sampler)


def test_rollouts_are_neither_lost_nor_mixed_up(policy: Policy) -> None:
    """Prompts come back in order with their own responses: scoring each alone gives the same log-probs."""
    prompt = prompts_of(policy.space, 5)
    rollouts = SmallPolicyEngine(policy, 1.0, torch.Generator().manual_seed(0)).generate(Prompts.of(prompt), 3)
    assert torch.equal(rollouts.prompt, prompt)
    batch = with_rewards(rollouts)
    for i in range(5):
        one = batch.select(slice(i, i + 1))
        close(trained_logp(policy, one), rollouts.logp_sampler[i : i + 1])


def test_score_fills_what_it_says_it_fills(policy: Policy) -> None:
    learner = learner_of(policy, Algorithm(reference=Frozen()))
    batch = with_rewards(rollouts_of(policy, temperature=0.8))
    shake(learner.reference, 0.3)
    found = learner.score(batch, learner.provides)
    assert set(found) == learner.provides
    close(found["logp_old"], batch.logp_sampler)
    close(found["logp_ref"], trained_logp(learner.reference, batch))
    logp, ref = log_probs(policy, batch), log_probs(learner.reference, batch)
    close(found["kl_full"], (logp.exp() * (logp - ref)).sum(-1).expand(batch.mask.shape).detach())
    assert bool((found["kl_full"] > 0).all())
    assert learner.score(batch, frozenset({"reward_greedy"})) == {}


def test_score_norm_is_the_squared_norm_of_the_score(policy: Policy) -> None:
    learner = learner_of(policy, Algorithm())
    batch = with_rewards(rollouts_of(policy, temperature=0.8))
    found = learner.score(batch, frozenset({"score_norm"}))["score_norm"]
    assert found.shape == (3, 4, 1)
    for i, j in itertools.product(range(3), range(4)):
        total = trained_logp(policy, batch.select(slice(i, i + 1), slice(j, j + 1))).sum()
        gradients = torch.autograd.grad(total, learner.trainable(), allow_unused=True)
        close(found[i, j, 0], sum(float((g**2).sum()) for g in gradients if g is not None), 1e-9)


def test_a_learners_state_comes_back(policy: Policy) -> None:
    """Parameters, optimizer and reference, as a checkpoint holds them."""
    algorithm = Algorithm(reference=Frozen())
    learner = learner_of(policy, algorithm)
    batch, _ = algorithm.compute_advantages(
        with_rewards(rollouts_of(policy)).add(logp_old=rollouts_of(policy).logp_sampler), {}
    )
    mini = batch.add(weight=algorithm.weights(batch), **learner.score(batch, algorithm.needs))
    learner.step(mini, algorithm.objective, algorithm.update)
    saved = {group: {k: v.clone() for k, v in tensors.items()} for group, tensors in learner.state().items()}
    learner.step(mini, algorithm.objective, algorithm.update)
    expected = [p.clone() for p in learner.trainable()]
    other = learner_of(copy.deepcopy(policy), algorithm)
    shake(other.policy, 1.0)
    other.restore(saved)
    other.step(mini, algorithm.objective, algorithm.update)
    assert all(torch.equal(a, b) for a, b in zip(expected, other.trainable(), strict=True))


def test_a_small_policy_draws_as_many_tokens_as_its_task_says(policy: Policy) -> None:
    sampler, limit = SmallPolicyEngine(policy, 1.0, torch.Generator()), policy.space.limit
    prompts = Prompts.of(prompts_of(policy.space, 2))
    want = sampler.generate(prompts, 2, seed=1)
    assert torch.equal(sampler.generate(prompts, 2, seed=1, limit=limit).response, want.response)
    with pytest.raises(ValueError, match=rf"^a limit of 1 tokens is not supported: .* sets {limit}$"):
        sampler.generate(prompts, 2, limit=1)
