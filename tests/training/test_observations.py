"""Observations in the middle of responses: context for what follows, but neither actions nor credited nor weighed.

Every number is held to the truth of a plain forward pass over prompt and tokens, one response at a time, or to the
same batch with its observations taken out.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import F64, TINY, close, critic_of, f64, gradient_of, learner_of, policy_of
from torch import Tensor

from ascent.build.language_reward_model import HEAD, add_head, response_scores, step_scores
from ascent.core.advantages import ADVANTAGES, Greedy
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.correction import mismatch
from ascent.core.groups import Overlong
from ascent.core.loop import score_rollouts
from ascent.core.metric_names import MISMATCH
from ascent.core.protocols import Task, UpdateResult
from ascent.core.types import (
    Batch,
    Prompts,
    Rollouts,
    Scores,
    Space,
    join,
    per_token_reward,
    rewards_on_actions,
    to_batch,
)
from ascent.core.values import GAE, VALUES
from ascent.core.weights import WEIGHTS, FixedLength
from ascent.inference.runners.cuda_graph import cuda_graph_runner
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner
from ascent.lab.pages.completions.completions import of_row
from ascent.models.packed_attention import packed_attention_enabled
from ascent.runs import rollout_files as records
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from ascent.training.small_learner import action_logprobs, log_probs, values_of
from tests.language import END, VOCAB, AtOnce, model_of, prompts_of, sampler_of
from tests.language import gradient_of as language_gradient

SPACE = Space(prompt_length=3, vocab=5, limit=8, end=4)
LAYOUTS = {
    "in the middle": (("aaooaa..", "aoa.....", "aaaaaaaa"), ("oaaoa...", "aaoooooa", "a.......")),
    "with gaps": (("aa.oo.aa", ".a..o.a.", "aaaaaaaa"), ("o.aao..a", "aa.....o", "...a....")),
}
"""By token: a, an action; o, an observation; a dot, nothing."""


def marked(layout: tuple[tuple[str, ...], ...], which: str) -> Tensor:
    return torch.tensor([[[token in which for token in row] for row in group] for group in layout])


def observed(name: str, vocab: int = 5, prompt: Tensor | None = None, **more: Any) -> Batch:
    """A batch of this layout, with random tokens (0 where there is none) and rewards."""
    g = torch.Generator().manual_seed(0)
    layout = LAYOUTS[name]
    mask, present = marked(layout, "a"), marked(layout, "ao")
    response = torch.where(present, torch.randint(vocab - 1, present.shape, generator=g), 0)
    reward = torch.randn(*mask.shape[:2], 1, generator=g, dtype=F64)
    fields: dict[str, Any] = {
        "prompt": torch.randint(vocab - 1, (2, 3), generator=g) if prompt is None else prompt,
        "response": response,
        "mask": mask,
        "present": present,
        "logp_sampler": torch.where(mask, -torch.rand(mask.shape, generator=g, dtype=F64), 0.0),
        "limit": 8,
        "truncated": torch.zeros(mask.shape[:2], dtype=torch.bool),
        "reward": reward,
        "valid": torch.ones(mask.shape[:2], dtype=torch.bool),
        "correct": reward.squeeze(-1) > 0,
        "score_norm": torch.rand(*mask.shape[:2], 1, generator=g, dtype=F64),
        "reward_greedy": torch.randn(2, 1, 1, generator=g, dtype=F64),
        "value": torch.randn(*mask.shape[:2], 9, generator=g, dtype=F64),
        "logp_old": torch.where(mask, -torch.rand(mask.shape, generator=g, dtype=F64), 0.0),
    }
    return Batch(**fields | more)


def actions_alone(batch: Batch) -> Batch:
    """The same responses without their observations: actions at the front, and the states that they stood in."""
    order = (~batch.mask).to(torch.uint8).argsort(dim=-1, stable=True)
    assert batch.value is not None
    value = torch.zeros_like(batch.value)
    value[..., :-1] = batch.value.gather(-1, order)
    value = value.scatter(-1, batch.length.unsqueeze(-1), batch.value.gather(-1, batch.extent.unsqueeze(-1)))
    reward = batch.reward if batch.reward.shape[-1] == 1 else batch.reward.gather(-1, order)
    mask = batch.mask.gather(-1, order)
    return batch.add(
        mask=mask,
        present=mask,
        response=batch.response.gather(-1, order),
        logp_sampler=batch.logp_sampler.gather(-1, order),
        logp_old=None if batch.logp_old is None else batch.logp_old.gather(-1, order),
        value=value,
        reward=reward,
    )


def same_at_actions(numbers: Tensor, alone: Tensor, batch: Batch) -> None:
    """Numbers of a batch at its actions are those of the batch without observations, in their order."""
    numbers, alone = numbers.expand(batch.mask.shape), alone.expand(batch.mask.shape)
    close(numbers[batch.mask], alone[actions_alone(batch).mask])


# ---- the core -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_length_extent_and_last_action(name: str) -> None:
    batch = observed(name)
    rows = list(itertools.chain(*LAYOUTS[name]))
    assert batch.length.flatten().tolist() == [row.count("a") for row in rows]
    assert batch.extent.flatten().tolist() == [len(row.rstrip(".")) for row in rows]
    assert batch.has_gaps == any("." in row.rstrip(".") for row in rows)
    last = per_token_reward(batch, batch.reward)
    for row, numbers, reward in zip(rows, last.flatten(0, 1), batch.reward.flatten(), strict=True):
        assert numbers[row.rindex("a")] == reward and int((numbers != 0).sum()) == 1


def test_present_defaults_to_mask() -> None:
    mask = torch.tensor([[[True, True, False]]])
    rollouts = Rollouts(torch.zeros(1, 1, dtype=torch.long), mask.long(), mask, mask.double(), 3, mask.any(-1))
    assert torch.equal(rollouts.present, mask) and not rollouts.has_gaps
    assert rollouts.version.shape == (1, 1, 1)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("credit", [*ADVANTAGES, *VALUES], ids=lambda c: c.__name__)
def test_advantages_ignore_observations(credit: Any, name: str) -> None:
    batch, state = observed(name), {"baseline": 0.3}
    same_at_actions(credit()(batch, state), credit()(actions_alone(batch), state), batch)


@pytest.mark.parametrize("credit", [c for c in (*ADVANTAGES, *VALUES) if c is not Greedy], ids=lambda c: c.__name__)
def test_advantages_of_per_token_rewards(credit: Any) -> None:
    """Where all responses of a group are observed at the same places, so that means at an index mean the same."""
    mask = marked((("aooaa.oa",) * 3,) * 2, "a")
    batch = observed("in the middle", mask=mask, present=marked((("aooaa.oa",) * 3,) * 2, "ao"))
    g = torch.Generator().manual_seed(1)
    batch = batch.add(reward=torch.where(mask, torch.randn(mask.shape, generator=g, dtype=F64), 0.0))
    same_at_actions(credit()(batch, {"baseline": 0.3}), credit()(actions_alone(batch), {"baseline": 0.3}), batch)


@pytest.mark.parametrize("name", LAYOUTS)
def test_truncated_response_bootstraps_from_the_value_after_its_last_token(name: str) -> None:
    batch = observed(name)
    batch = batch.add(truncated=torch.ones_like(batch.truncated))
    credit = GAE(0.9, 0.8, bootstrap=True)
    same_at_actions(credit(batch, {}), credit(actions_alone(batch), {}), batch)
    close(credit.returns(batch)[batch.mask], (credit(batch, {}) + batch.value[..., :-1])[batch.mask])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_ignore_observations(weights: Any, name: str) -> None:
    batch = observed(name)
    weight = weights()(batch)
    same_at_actions(weight, weights()(actions_alone(batch)), batch)
    assert (weight[~batch.mask] == 0).all()
    if weights is FixedLength:  # 6 responses, a limit of 8
        close(weight[batch.mask], torch.full_like(weight[batch.mask], 1 / 48))


def test_overlong_penalty_counts_actions_only() -> None:
    """Margin 6 of 8: the penalty begins at 2 drawn tokens. Drawn are 4, 2, 8 and 3, 3, 1."""
    close(Overlong(6)(observed("in the middle")).squeeze(-1), f64([[-1 / 3, 0, -1], [-1 / 6, -1 / 6, 0]]))


def test_reward_at_an_observation_belongs_to_the_last_action() -> None:
    """1 before any action goes to the first one, 8 and 16 come with observations behind the second."""
    batch = observed("in the middle").select(slice(1, 2), slice(0, 1))
    assert LAYOUTS["in the middle"][1][0] == "oaaoa..."
    reward = f64([[[1, 2, 4, 8, 16, 99, 99, 99]]])
    close(rewards_on_actions(batch, reward), f64([[[0, 3, 12, 0, 16, 0, 0, 0]]]))


def test_response_without_actions_has_no_token_reward() -> None:
    """Nothing that the policy did earned it; what is paid for the other response stays whole."""
    batch = observed("in the middle").select(slice(1, 2), slice(0, 2))
    mask = batch.mask.clone()
    mask[0, 1] = False
    batch = batch.add(mask=mask, present=batch.present.clone())
    assert batch.present[0, 1].any()
    reward = torch.where(batch.present, 3.0, 0.0).double()
    moved = rewards_on_actions(batch, reward)
    assert not moved[0, 1].any() and moved[0, 0].sum() == reward[0, 0].sum()


def test_join_keeps_present_tokens_and_versions() -> None:
    first = observed("in the middle", version=torch.full((2, 3, 1), 4), turn=torch.ones(2, 3, 8, dtype=torch.long))
    wide = observed("with gaps", version=torch.arange(48).view(2, 3, 8), turn=torch.zeros(2, 3, 8, dtype=torch.long))
    pad = {n: torch.nn.functional.pad(getattr(wide, n), (0, 2)) for n in ("response", "mask", "present")}
    more = {n: torch.nn.functional.pad(getattr(wide, n), (0, 2)) for n in ("logp_sampler", "turn", "version", "value")}
    both = join([first, wide.add(**pad, **more)])
    assert both.mask.shape == both.present.shape == both.version.shape == (4, 3, 10)
    assert torch.equal(both.present[:2, :, :8], first.present) and not both.present[:2, :, 8:].any()
    assert (both.version[:2, :, :8] == 4).all() and torch.equal(both.version[2:, :, :8], wide.version)
    assert torch.equal(both.select(torch.tensor([2])).version[..., :8], wide.version[:1])
    assert torch.equal(join([first, first]).version, torch.full((4, 3, 1), 4)), "of whole responses, it stays so"


class Pays(Task):
    """A task that pays one for each action, and says so."""

    space = SPACE
    presets: dict = {}  # noqa: RUF012

    def score(self, rollouts: Rollouts) -> Scores:
        shape = rollouts.mask.shape[:2]
        notes = np.full(shape, "by the task", dtype=object)
        return Scores(rollouts.length.double().unsqueeze(-1), torch.ones(shape, dtype=torch.bool), None, notes=notes)

    def text(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_task_score_is_added_to_environment_rewards() -> None:
    made = observed("in the middle")
    notes = np.array([["by the game", "", ""], ["", "", ""]], dtype=object)
    valid = torch.tensor([[True, True, True], [True, False, True]])
    paid = torch.where(made.present, 0.25, 0.0).double()
    turn = made.present.cumsum(-1)
    rollouts = Rollouts(
        made.prompt, made.response, made.mask, made.logp_sampler, 8, made.truncated,
        present=made.present, reward=paid, valid=valid, notes=notes, turn=turn,
    )  # fmt: skip
    batch, errors = score_rollouts(Pays(), rollouts)
    close(batch.reward, per_token_reward(made, made.length.double().unsqueeze(-1)) + rewards_on_actions(made, paid))
    close(batch.reward.sum(-1), made.length + 0.25 * made.present.sum(-1))
    assert torch.equal(batch.valid, valid) and torch.equal(batch.turn, turn)
    assert errors == ["by the task"], "what is said of the response that failed"
    assert batch.notes[0].tolist() == ["by the game; by the task", "by the task", "by the task"]
    outcome = replace(rollouts, reward=torch.ones(2, 3, 1, dtype=F64))
    close(score_rollouts(Pays(), outcome)[0].reward.squeeze(-1), made.length + 1.0)


def test_staleness_is_not_counted_as_mismatch() -> None:
    """Tokens of step 5 differ by 0.01 (two engines); those of steps 3 and 4 by 0.5 (two versions)."""
    batch = observed("in the middle")
    version = torch.where(torch.arange(8) < 2, 5, torch.where(torch.arange(8) < 5, 4, 3)).expand(2, 3, 8)
    batch = batch.add(version=version)
    apart = torch.where(version == 5, f64(0.01), f64(0.5))
    measured = mismatch(torch.where(batch.mask, batch.logp_sampler + apart, 0.0), batch, 5)
    now, before, long_ago = (int((batch.mask & (version == v)).sum()) for v in (5, 4, 3))
    close(measured[MISMATCH], 0.01)
    close(measured["sampling/sampling_logp_difference/max"], 0.01)
    close(measured["sampling/lag"], (before + 2 * long_ago) / (now + before + long_ago))
    close(measured["sampling/lag/logp_difference"], 0.5)
    close(torch.stack([measured[f"sampling/lag/logp_difference/{age}"] for age in (1, 2)]), [0.5, 0.5])
    fresh = mismatch(batch.logp_sampler, batch.add(version=torch.full((2, 3, 1), 5)), 5)
    assert not any("lag" in name for name in fresh), "reported only where versions differ"
    unknown = mismatch(batch.logp_sampler, batch.add(version=torch.full((2, 3, 1), -1)), 5)
    assert not any("lag" in name for name in unknown)


# ---- small policies -------------------------------------------------------------------------------


def plain_logp(policy: Any, batch: Batch) -> Tensor:
    """Log π of every action, from one forward pass per response over exactly the tokens that are there."""
    logp = torch.zeros(batch.mask.shape, dtype=F64)
    for p, s in itertools.product(*map(range, batch.valid.shape)):
        there = batch.present[p, s]
        tokens = batch.response[p, s][there]
        every = torch.log_softmax(policy.logits(batch.prompt[p : p + 1], tokens[None, None])[0, 0], -1)
        every = every.gather(-1, tokens[:, None])[:, 0]
        logp[p, s, there] = every
    return torch.where(batch.mask, logp, 0.0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_small_transformer_reads_observations_and_scores_actions(name: str) -> None:
    policy, batch = policy_of(TINY, SPACE), observed(name)
    close(action_logprobs(log_probs(policy, batch), batch).detach(), plain_logp(policy, batch).detach())
    other = batch.add(response=torch.where(batch.present & ~batch.mask, (batch.response + 1) % 4, batch.response))
    moved = (
        action_logprobs(log_probs(policy, other), other) - action_logprobs(log_probs(policy, batch), batch)
    ).abs() > 1e-6
    assert moved[batch.mask].any(), "what an observation says changes the probability of later actions"


@pytest.mark.parametrize("name", LAYOUTS)
def test_small_critic_values_at_every_state(name: str) -> None:
    policy = policy_of(TINY, SPACE)
    critic, batch = critic_of(policy), observed(name)
    values = values_of(critic, batch)
    for p, s in itertools.product(range(2), range(3)):
        tokens = batch.response[p, s][batch.present[p, s]]
        want = critic.values(batch.prompt[p : p + 1], tokens[None, None])[0, 0]
        before = torch.nn.functional.pad(batch.present[p, s].cumsum(-1), (1, 0))
        until = int(batch.extent[p, s]) + 1
        close(values[p, s, :until].detach(), want[before[:until]].detach())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("row", ["reinforce", "grpo", "gspo", "ppo"])
def test_gradient_comes_from_actions_only(row: str, name: str) -> None:
    """∇ Σ weight · surrogate, with log-probs from plain forward passes, is the learner's own."""
    algorithm = ALGORITHMS[row]
    policy = policy_of(TINY, SPACE)
    learner = learner_of(policy, algorithm)
    batch = observed(name)
    batch = batch.add(logp_old=plain_logp(policy, batch).detach() - torch.where(batch.mask, 0.02, 0.0))
    batch = batch.add(**learner.score(batch, algorithm.needs))
    batch, state = algorithm.compute_advantages(batch, algorithm.initial_state())
    mini = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
    learner.gradient(mini, algorithm.objective)
    got = gradient_of(learner)
    logp = plain_logp(policy, mini)
    out = learner.evaluate(mini)
    objective = algorithm.objective(mini, type(out)(logp, out.entropy.detach(), None)).objective
    want = torch.autograd.grad(-objective, learner.trainable(), allow_unused=True)
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(learner.trainable(), want, strict=True)]
    close(got, torch.cat([g.flatten() for g in flat]), 1e-10)


# ---- language models ------------------------------------------------------------------------------


def language_batch(name: str) -> Batch:
    return observed(name, VOCAB, prompts_of((5, 2)))


def sequence(batch: Batch, p: int, s: int) -> tuple[Tensor, int]:
    """Prompt and all tokens of a response, observations too; and the prompt's length."""
    prompt = batch.prompt[p][batch.prompt[p] >= 0]
    return torch.cat([prompt, batch.response[p, s][batch.present[p, s]]]), len(prompt)


def language_logp(lm: Any, batch: Batch) -> Tensor:
    logp = torch.zeros(batch.mask.shape, dtype=F64)
    for p, s in itertools.product(*map(range, batch.valid.shape)):
        ids, start = sequence(batch, p, s)
        every = torch.log_softmax(lm.model(ids[None]).logits[0, start - 1 : -1], -1)
        logp[p, s, batch.present[p, s]] = every.gather(-1, ids[start:, None])[:, 0]
    return torch.where(batch.mask, logp, 0.0)


@pytest.mark.long
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_language_model_reads_observations_and_scores_actions(name: str, shares: bool) -> None:
    lm, batch = model_of(), language_batch(name)
    lm.can_share_prompts = shares
    learner = LanguageLearner(lm, ALGORITHMS["grpo"].update, True, frozenset())
    scores = learner.score(batch, frozenset({"logp_old", "logp_ref"}))
    want = language_logp(lm, batch).detach()
    assert (scores["logp_old"] - want).abs().max() < 1e-10
    assert (scores["logp_ref"] - want).abs().max() < 1e-10
    algorithm = Algorithm()
    mini, _ = algorithm.compute_advantages(batch.add(logp_old=scores["logp_old"]), {})
    mini = mini.add(weight=algorithm.weights(mini))
    objective = (mini.weight * mini.advantage * language_logp(lm, mini)).sum()
    want_grad = torch.autograd.grad(-objective, learner.trainable(), materialize_grads=True)
    for tokens in (0, 12):
        learner.micro_batch = tokens
        learner.gradient(mini, algorithm.objective)
        got = language_gradient(learner)
        assert (got - torch.cat([g.flatten() for g in want_grad])).abs().max() < 1e-9, tokens


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_language_critic_values(name: str, shares: bool) -> None:
    """Before every action, and behind the last token."""
    lm, batch = model_of(), language_batch(name)
    lm.can_share_prompts = shares
    critic = LanguageCritic(lm, shared=False)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    learner = LanguageLearner(
        lm, ALGORITHMS["ppo"].update, False, frozenset(), 0, False, critic, ALGORITHMS["ppo"].critic.update
    )
    value = learner.score(batch, frozenset({"value"}))["value"]
    for p, s in itertools.product(range(2), range(3)):
        ids, start = sequence(batch, p, s)
        every = critic.head(critic.separate_backbone(ids[None]).last_hidden_state[0, start - 1 :])[:, 0]
        before = torch.nn.functional.pad(batch.present[p, s].cumsum(-1), (1, 0))
        asked = torch.nn.functional.pad(batch.mask[p, s], (0, 1))
        asked[batch.extent[p, s]] = True
        assert (value[p, s][asked] - every[before][asked]).abs().max() < 1e-10
        assert (value[p, s][~asked] == 0).all()


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ratings_are_read_after_the_last_token_and_after_actions(name: str, shares: bool) -> None:
    batch = language_batch(name)
    for reads_steps in (False, True):
        lm = add_head(model_of(), bias=reads_steps)
        lm.can_share_prompts = shares
        head = getattr(lm.model, HEAD)
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
        with packed_attention_enabled(lm.model) if shares else torch.no_grad():
            got = step_scores(lm, batch) if reads_steps else response_scores(lm, batch)
        for p, s in itertools.product(range(2), range(3)):
            ids, start = sequence(batch, p, s)
            every = head(lm.backbone(ids[None]).last_hidden_state[0, start - 1 :])[:, 0]
            if not reads_steps:
                assert (got[p, s, 0] - every[-1]).abs() < 1e-6
                continue
            after = batch.present[p, s].cumsum(-1)[batch.mask[p, s]]
            assert (got[p, s][batch.mask[p, s]] - every[after]).abs().max() < 1e-6
            assert (got[p, s][~batch.mask[p, s]] == 0).all()


@pytest.mark.long
@pytest.mark.parametrize("decoder", [PagedRunner, EagerRunner, "graphs"])
def test_observation_that_does_not_fit_ends_the_response(decoder: Any) -> None:
    """The response counts as cut off; nothing is drawn behind its end token."""
    lm = model_of()
    sampler = sampler_of(lm, limit=24, rows=5)
    sampler.runner = cuda_graph_runner(lm)[0] if decoder == "graphs" else decoder
    asked: list[int] = []

    def observe(response: int, tokens: list[int]) -> list[int]:
        asked.append(response)
        return [7] * 24

    rollouts = sampler.generate(replace(Prompts.of(prompts_of()), start_episodes=AtOnce(observe)), 4)
    assert asked and len(asked) == len(set(asked)), "each is asked once"
    for response, mask in zip(rollouts.response.flatten(0, 1), rollouts.mask.flatten(0, 1), strict=True):
        assert END not in response[mask][:-1].tolist()
    assert rollouts.truncated.all()


@pytest.mark.long
@pytest.mark.parametrize("decoder", [PagedRunner, EagerRunner, "graphs"])
def test_decoder_extends_a_response(decoder: Any) -> None:
    """A turn that ends is answered, twice at most; log-probs are those of one plain forward pass over everything."""
    lm = model_of()
    sampler = sampler_of(lm, limit=24, rows=5)
    sampler.runner = cuda_graph_runner(lm)[0] if decoder == "graphs" else decoder
    turns: dict[int, int] = {}

    def observe(response: int, tokens: list[int]) -> list[int]:
        assert tokens[-1] == END
        turns[response] = turns.get(response, 0) + 1
        return [7, 8 + response % 5, 9] if turns[response] <= 2 else []

    rollouts = sampler.generate(replace(Prompts.of(prompts_of()), start_episodes=AtOnce(observe)), 4)
    batch = to_batch(rollouts, reward=torch.zeros(3, 4, 1), valid=torch.ones(3, 4, dtype=torch.bool))
    observed_tokens = batch.present & ~batch.mask
    assert observed_tokens.any(-1).sum() > 3 and max(turns.values()) >= 2
    for p, s in itertools.product(range(3), range(4)):
        given = batch.response[p, s][observed_tokens[p, s]].tolist()
        assert given == [7, 8 + (4 * p + s) % 5, 9] * (len(given) // 3)
        assert bool(batch.truncated[p, s]) == (turns.get(4 * p + s, 0) < 3), "over only if nothing followed"
    with torch.no_grad():
        assert (batch.logp_sampler - language_logp(lm, batch)).abs().max() < 5e-6
    assert (batch.logp_sampler[~batch.mask] == 0).all()


# ---- records and what is shown --------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_records_hold_observations_and_the_viewer_reads_actions(name: str, tmp_path: Path) -> None:
    batch = observed(name)
    turn = torch.arange(8).expand(batch.mask.shape)
    batch = batch.add(turn=turn, logp_old=batch.logp_sampler, prompt_index=torch.arange(2))
    batch, _ = Algorithm(GAE(), critic=ALGORITHMS["ppo"].critic).compute_advantages(batch, {})
    entropy = torch.rand(batch.mask.shape, dtype=F64)
    update = UpdateResult({}, {}, torch.where(batch.mask, batch.logp_sampler + 0.1, 0.0), entropy)
    (tmp_path / "rollouts").mkdir()
    records.write_rollouts(tmp_path, 3, batch, [batch], [update], "all", records.TokenTexts(Pays()))
    rows = records.read_rollouts(tmp_path, 3)
    for row, (p, s) in zip(rows, itertools.product(range(2), range(3)), strict=True):
        there, acted = batch.present[p, s], batch.mask[p, s]
        assert row["response"] == batch.response[p, s][there].tolist()
        assert row["mask"] == acted[there].tolist() and row["turn"] == turn[p, s][there].tolist()
        close(row["logp_sampler"], batch.logp_sampler[p, s][there])
        close(row["advantage"], batch.advantage[p, s][there])
        close(row["value"], batch.value[p, s, :-1][there])
        close(row["logp"][0], update.logp[p, s][there])
        close(row["entropy"], entropy[p, s][there])
        assert row["reward"] == pytest.approx(batch.reward[p, s].sum().item())
        shown = of_row(row, ALGORITHMS["ppo"].loss)
        assert shown["ids"] == row["response"] and len(shown["pieces"]) == len(row["response"])
        for column in ("logp", "logp_sampler", "advantage", "value", "entropy", "ratio"):
            assert [v is None for v in shown[column]] == [not drawn for drawn in row["mask"]], column
        close([r for r in shown["ratio"] if r is not None], [round(float(np.exp(0.1)), 5)] * int(acted.sum()), 1e-5)


def test_single_turn_rollout_file_has_no_observation_columns(tmp_path: Path) -> None:
    """Without observations there is no column for them."""
    batch = actions_alone(observed("in the middle")).add(prompt_index=torch.arange(2), advantage=torch.zeros(2, 3, 1))
    batch = batch.add(logp_old=batch.logp_sampler)
    (tmp_path / "rollouts").mkdir()
    records.write_rollouts(tmp_path, 0, batch, [], [], "all", records.TokenTexts(Pays()))
    assert not {"mask", "turn"} & records.read_rollouts(tmp_path, 0)[0].keys()
