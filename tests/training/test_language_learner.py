"""The engines for language models: exact against the plain form, whatever is packed, shared, chunked or cached."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ascent.build.model_verification import verify_model
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.core.errors import ConfigError
from ascent.core.exploration import Constant
from ascent.core.kl import InLoss
from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Batch, Prompts
from ascent.core.update import Adam
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner
from ascent.models import CausalLM, LanguageModel, lm_head
from ascent.models.lm_head import LMHead, token_stats
from ascent.models.packed_attention import packed_attention_enabled
from ascent.ops.token_sampling import sample_tokens, uniform_from_seed
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from ascent.training.packing import hidden_states, host_batch, to_device
from tests.language import END, batch_of, gradient_of, model_of, prompts_of, rewarded, sampler_of

SHARING = ("Llama", "Qwen2", "Qwen3", "Phi3", "Olmo", "Granite", "Cohere", "Mistral")


def learner_of(lm: LanguageModel, algorithm: Algorithm, micro_batch: int = 0, **more: bool) -> LanguageLearner:
    kept = algorithm.reference.enabled
    return LanguageLearner(lm, algorithm.update, kept, algorithm.outputs, micro_batch, **more)


def credited(batch: Batch, algorithm: Algorithm, learner: LanguageLearner) -> Batch:
    batch = batch.add(**learner.score(batch, algorithm.needs))
    batch, state = algorithm.compute_advantages(batch, algorithm.initial_state())
    return batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))


@torch.no_grad()
def plain_log_probs(lm: LanguageModel, batch: Batch) -> Tensor:
    """Whole distributions at the states before actions, by the plain form."""
    lm.can_share_prompts = False
    logits = LMHead.of(lm.model).logits(hidden_states(lm, batch))
    lm.can_share_prompts = True
    return torch.log_softmax(logits, -1)


# ---- architectures --------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", SHARING)
def test_architecture_supports_shared_prompts(kind: str) -> None:
    lm = model_of(kind)
    assert verify_model(lm, 16) is None
    assert lm.can_share_prompts


def test_sliding_window_disables_shared_prompts_with_a_note() -> None:
    lm = model_of("Mistral", sliding_window=16)
    assert verify_model(lm, 16) is None
    assert "sees 16 tokens" in str(verify_model(lm, 17))
    assert not lm.can_share_prompts


def test_soft_capped_attention_disables_shared_prompts_with_a_note() -> None:
    lm = model_of("Gemma2", dtype=torch.float32)
    assert "cap" in str(verify_model(lm, 16))
    assert not lm.can_share_prompts


def test_soft_capped_head_is_supported() -> None:
    assert (
        verify_model(
            model_of("Gemma2", attn_logit_softcapping=None, final_logit_softcapping=2.0, sliding_window=64), 16
        )
        is None
    )


def test_unknown_head_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LMHead, "logits", lambda self, hidden: 1.1 * hidden @ self.weight.t())
    with pytest.raises(ConfigError, match="cannot train it"):
        verify_model(model_of())


def test_model_whose_forward_fails_is_rejected_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits(self: LMHead, hidden: Tensor) -> Tensor:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(LMHead, "logits", logits)
    message = r"its logits are not the product of its LM head and hidden states \(RuntimeError: no such thing\)$"
    with pytest.raises(ConfigError, match=r"^LlamaForCausalLM: Ascent cannot train it: " + message):
        verify_model(model_of())


def test_checkpointing_requires_checkpointable_layers() -> None:
    lm, algorithm = model_of(), ALGORITHMS["reinforce"]
    lm.model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ConfigError) as refusal:
        learner_of(lm, algorithm, 64, checkpointing=True)
    message = "--policy.checkpointing: LlamaForCausalLM has no layers to compute again; unset it"
    assert str(refusal.value) == message
    assert learner_of(model_of(), algorithm, 64, checkpointing=True).checkpointing


def test_host_only_fields_stay_on_the_host() -> None:
    batch = batch_of(model_of())
    assert to_device(batch, torch.device("cpu")) is batch
    meta = torch.device("meta")
    placed = to_device(batch, meta)
    assert host_batch(placed) is batch and host_batch(batch) is batch
    for name in ("response", "mask", "logp_sampler", "reward", "valid", "logp_old"):
        assert getattr(placed, name).device == meta and getattr(placed, name).shape == getattr(batch, name).shape
    assert placed.prompt is batch.prompt and placed.problem is batch.problem
    assert (placed.limit, placed.temperature) == (batch.limit, batch.temperature)


# ---- shared prompts -------------------------------------------------------------------------------


def awkward(lm: LanguageModel) -> Batch:
    """Lengths from 0 to the limit, and observations between actions."""
    batch = batch_of(lm)
    batch.mask[:] = (
        torch.arange(batch.mask.shape[2]) < torch.tensor([[9, 1, 4, 0], [2, 2, 2, 2], [1, 1, 9, 7]])[..., None]
    )
    batch = batch.add(present=batch.mask.clone())
    batch.mask[0, 0, 3:5] = False
    batch.mask[2, 3, 0] = False
    return batch


@pytest.mark.parametrize("kind", SHARING)
def test_shared_prompts_match_separate_rows(kind: str) -> None:
    """Hidden states, and their gradient in every parameter, are those of the plain form."""
    lm = model_of(kind)
    batch = awkward(lm)
    found = []
    for shares in (False, True):
        lm.can_share_prompts = shares
        lm.model.zero_grad()
        with packed_attention_enabled(lm.model, shares):
            hidden = hidden_states(lm, batch)
        torch.sin(3 * hidden).sum().backward()
        found.append((hidden.detach(), [p.grad.clone() for p in lm.model.parameters() if p.grad is not None]))
    (plain, plain_grads), (shared, shared_grads) = found
    assert plain.shape[0] == int(batch.mask.sum())
    bound = 1e-4 if kind in ("Olmo", "Cohere") else 1e-10  # their own norms go through float32
    assert (plain - shared).abs().max() < bound
    for a, b in zip(plain_grads, shared_grads, strict=True):
        assert (a - b).abs().max() < bound * max(1.0, float(a.abs().max()))


def test_response_does_not_attend_to_other_responses() -> None:
    lm = model_of()
    batch = batch_of(lm)
    with packed_attention_enabled(lm.model), torch.no_grad():
        before = hidden_states(lm, batch.select(slice(0, 1)))
        other = batch.select(slice(0, 1))
        other.response[0, 1:] = (other.response[0, 1:] + 1) % 7
        after = hidden_states(lm, other)
    own = int(batch.mask[0, 0].sum())
    assert torch.equal(before[:own], after[:own])
    assert not torch.allclose(before, after)


# ---- the head -------------------------------------------------------------------------------------


def dense(head: LMHead, hidden: Tensor, target: Tensor, temperature: float, ref: Tensor | None) -> list[Tensor]:
    logp_all = torch.log_softmax(head.logits(hidden) / temperature, -1)
    p = logp_all.exp()
    kl = torch.zeros(len(hidden), dtype=hidden.dtype)
    if ref is not None:
        kl = (p * (logp_all - torch.log_softmax(ref, -1))).sum(-1)
    return [logp_all.gather(-1, target[:, None])[:, 0], -(p * logp_all).sum(-1), kl]


@pytest.mark.parametrize("keep", [0, 2**30], ids=["computed again", "kept"])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.7, 1.5)])
def test_chunked_head_matches_dense_head(
    keep: int, cap: float | None, temperature: float, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log-prob, entropy and KL, and the gradients of all three in hidden states, weight and bias."""
    monkeypatch.setattr(lm_head, "MAX_KEPT_BYTES", keep)
    monkeypatch.setattr(LMHead, "chunk", lambda _: 4)
    torch.manual_seed(0)
    h, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((11, 6), (19, 6), (19,)))
    h_ref, w_ref = torch.randn(11, 6, dtype=torch.float64), torch.randn(19, 6, dtype=torch.float64)
    target, mix = torch.randint(19, (11,)), torch.randn(3, 11, dtype=torch.float64)
    ours_, ref = LMHead(w, b, scale, cap), LMHead(w_ref, None, scale, cap)
    found = []
    for values in (
        token_stats(ours_, h, target, temperature, (ref, h_ref), entropy_gradient=True),
        dense(ours_, h, target, temperature, ref.logits(h_ref) / temperature),
    ):
        grads = torch.autograd.grad(sum((m * v).sum() for m, v in zip(mix, values, strict=True)), (h, w, b))
        found.append([*(v.detach() for v in values), *grads])
    for a, c in zip(*found, strict=True):
        assert (a - c).abs().max() < 1e-12


def test_entropy_without_requested_gradient_is_detached() -> None:
    h, w = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4)
    logp, entropy, kl = token_stats(LMHead(w), h, torch.zeros(5, dtype=torch.long))
    assert logp.requires_grad
    assert not entropy.requires_grad
    assert kl is None


# ---- sampling -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12, 64])
def test_samples_do_not_depend_on_batch_size(rows: int) -> None:
    """Rows are shared, replaced and moved; every response is the one that it would be alone."""
    lm = model_of()
    want = sampler_of(lm, rows=64).generate(Prompts.of(prompts_of()), 4)
    assert len(want.mask.sum(-1).unique()) > 3, "lengths have to differ for rows to be replaced"
    got = sampler_of(lm, rows=rows).generate(Prompts.of(prompts_of()), 4)
    assert torch.equal(got.mask, want.mask)
    assert torch.equal(got.response[got.mask], want.response[want.mask])
    assert (got.logp_sampler - want.logp_sampler).abs().max() < 5e-6


@pytest.mark.long
@pytest.mark.parametrize("kind", SHARING)
def test_both_decoders_sample_the_same_tokens(kind: str) -> None:
    lm, found = model_of(kind), []
    for decoder in (PagedRunner, EagerRunner):
        sampler = sampler_of(lm, rows=5)
        sampler.runner = decoder
        found.append(sampler.generate(Prompts.of(prompts_of()), 4))
    assert torch.equal(found[0].mask, found[1].mask)
    assert torch.equal(found[0].response, found[1].response)
    assert (found[0].logp_sampler - found[1].logp_sampler).abs().max() < 5e-6


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.6}])
def test_logprobs_of_engine_and_learner_agree(cut: dict[str, float]) -> None:
    """Over the full vocabulary, at the sampling temperature, whatever was cut from the support."""
    lm = model_of()
    batch = batch_of(lm, **cut)
    lm.can_share_prompts = "top_k" not in cut  # the plain form agrees too
    scored = learner_of(lm, ALGORITHMS["reinforce"]).score(batch, frozenset({"logp_old"}))["logp_old"]
    assert (scored - batch.logp_sampler).abs().max() < 5e-6
    assert (batch.kept_mass is not None) == bool(set(cut) - {"temperature"})


def test_kept_mass_is_that_of_the_kept_tokens() -> None:
    """Four tokens of probability 0.5, 0.3, 0.15, 0.05: top-p 0.7 keeps two of them, min-p 0.2 three, top-k 1 one."""
    logits = torch.tensor([[0.05, 0.5, 0.15, 0.3]], dtype=torch.float64).log()
    for support, mass in (
        (SamplingParams(top_p=0.7), 0.8),
        (SamplingParams(min_p=0.2), 0.95),
        (SamplingParams(top_k=1), 0.5),
    ):
        found = sample_tokens(logits, 1.0, support, torch.tensor([0.5], dtype=torch.float64))[2]
        assert found is not None
        assert abs(float(found[0]) - mass) < 1e-12


@pytest.mark.long
@pytest.mark.parametrize("support", [SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.75)])
def test_tokens_are_sampled_in_proportion_to_their_probabilities(support: SamplingParams) -> None:
    """Every u on a fine grid: the share of each token is its probability among the allowed, to the grid."""
    torch.manual_seed(0)
    logits = torch.randn(1, 300, dtype=torch.float64) * 3
    grid = 10_000
    u = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    token, logp, _ = sample_tokens(logits.expand(grid, -1), 1.0, support, u)
    p = torch.softmax(logits, -1)
    allowed = torch.where(support.allowed_tokens(p), p, 0.0) if not support.unrestricted else p
    share = torch.bincount(token, minlength=300) / grid
    assert (share - allowed[0] / allowed.sum()).abs().max() < 1.01 / grid
    assert torch.allclose(logp, p[0].log()[token])


def test_random_streams_of_responses_are_uniform_and_independent() -> None:
    seeds = torch.randint(2**62, (400,), generator=torch.Generator().manual_seed(0))
    u = uniform_from_seed(seeds[:, None], torch.arange(400)[None])
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 100, 0, 1)
    assert float(((counts - 1600) ** 2 / 1600).sum()) < 150  # chi-squared with 99 degrees of freedom: p < 0.001
    near = uniform_from_seed(torch.arange(1000), torch.zeros(1000, dtype=torch.long)) - 0.5
    assert abs(float((near[1:] * near[:-1]).mean())) < 0.01
    again = u - 0.5
    assert abs(float((again[:, 1:] * again[:, :-1]).mean())) < 0.002


def test_end_token_is_in_the_mask_even_if_it_is_the_pad_token() -> None:
    rollouts = sampler_of(model_of()).generate(Prompts.of(prompts_of()), 8)
    ended = ~rollouts.truncated
    assert ended.any()
    last = rollouts.response.gather(-1, rollouts.mask.sum(-1, keepdim=True) - 1).squeeze(-1)
    assert (last[ended] == END).all()
    assert (last[rollouts.truncated] != END).all()


def test_greedy_takes_the_argmax() -> None:
    lm = model_of()
    rollouts = sampler_of(lm).generate(Prompts.of(prompts_of((5,))), 1, greedy=True)
    ids = torch.cat([prompts_of((5,))[0], rollouts.response[0, 0][rollouts.mask[0, 0]]])
    best = lm.model(ids[None]).logits[0, 4:-1].argmax(-1)
    assert torch.equal(best, ids[5:])


@pytest.mark.parametrize("bad", [{"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"min_p": 1.0}])
def test_impossible_sampling_params_are_rejected(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="top-p"):
        SamplingParams(**bad)  # type: ignore[arg-type]


# ---- steps ----------------------------------------------------------------------------------------


ROWS = ["reinforce", "grpo", "dr-grpo", "dapo", "gspo", "rloo", "cispo"]
EXACT = replace(ALGORITHMS["grpo"], kl=InLoss("exact", 0.3), exploration=Constant(0.1))


@pytest.mark.long
@pytest.mark.parametrize("algorithm", [*(ALGORITHMS[r] for r in ROWS), EXACT], ids=[*ROWS, "exact KL and entropy"])
def test_memory_settings_do_not_change_the_gradient(algorithm: Algorithm) -> None:
    """Any token budget, checkpointed or not, shared or plain: the same objective and the same gradient."""
    knobs = [(0, False, True), (7, False, True), (12, True, False)]  # no row is split in a way of its own
    if algorithm in (ALGORITHMS["grpo"], EXACT):
        knobs += [*((n, False, True) for n in (1, 12, 20, 33)), (12, True, True), (0, False, False)]
    lm = model_of()
    batch = awkward(lm)
    whole = None
    for budget, checkpointing, share in knobs:
        lm.can_share_prompts = share
        learner = learner_of(lm, algorithm, budget, checkpointing=checkpointing)
        terms = learner.gradient(credited(batch, algorithm, learner), algorithm.objective)
        now = torch.cat([gradient_of(learner), terms.objective.view(1)])
        whole = now if whole is None else whole
        assert whole.abs().max() > 1e-4
        assert (now - whole).abs().max() < 1e-12 * max(1.0, float(whole.abs().max()))


def test_micro_batches_hold_every_response_once_within_the_budget() -> None:
    lm = model_of()
    batch = awkward(lm).add(prompt_index=torch.arange(3))
    number = torch.arange(12.0, dtype=torch.float64).view(3, 4, 1)
    for budget in (1, 7, 12, 20, 33, 0):
        parts = list(learner_of(lm, ALGORITHMS["reinforce"], budget).split(batch.add(reward=number)))
        assert [x for part in parts for x in part.reward.flatten().tolist()] == list(range(12))
        for part in parts:
            tokens = int((part.prompt >= 0).sum() + part.mask.shape[2] * 0 + part.mask.any(-1).sum())
            assert budget == 0 or part.mask.shape[:2].numel() == 1 or tokens <= max(budget, 0) + part.mask.shape[2]


def test_first_update_has_ratio_one_and_no_clipping() -> None:
    lm = model_of()
    algorithm = ALGORITHMS["grpo"]
    learner = learner_of(lm, algorithm)
    stepped = learner.step(credited(batch_of(lm), algorithm, learner), algorithm.objective, algorithm.update)
    assert float(stepped.sums["clip_ratio/low_mean"]) == 0
    assert float(stepped.sums["clip_ratio/high_mean"]) == 0


def test_reference_is_the_initial_policy() -> None:
    lm = model_of()
    algorithm = ALGORITHMS["grpo"]
    learner = learner_of(lm, algorithm)
    batch = batch_of(lm)
    before = learner.score(batch, frozenset({"logp_old"}))["logp_old"]
    for _ in range(3):
        learner.step(credited(batch, algorithm, learner), algorithm.objective, algorithm.update)
    after = learner.score(batch, frozenset({"logp_old", "logp_ref"}))
    assert torch.equal(after["logp_ref"], before)
    assert (after["logp_old"] - before).abs().max() > 1e-3
    learner.mix_reference(1.0)
    assert torch.equal(learner.score(batch, frozenset({"logp_ref"}))["logp_ref"], after["logp_old"])


@pytest.mark.long
def test_bfloat16_has_float32_master_weights() -> None:
    """A rate of 1e-6 would be lost in bfloat16: many such steps have to add up."""
    lm = model_of(dtype=torch.bfloat16)
    algorithm = replace(ALGORITHMS["reinforce"], update=replace(ALGORITHMS["reinforce"].update, lr=12e-5))
    learner = learner_of(lm, algorithm)
    batch = rewarded(sampler_of(lm).generate(Prompts.of(prompts_of()), 4))
    first = [p.detach().clone() for p in lm.model.parameters()]
    mini = credited(batch, algorithm, learner)
    mini = mini.add(advantage=mini.advantage.float())
    for _ in range(6):
        learner.step(mini, algorithm.objective, algorithm.update)
    assert all(p.dtype == torch.float32 for p in learner.trainable())
    for wide, p, start in zip(learner.trainable(), lm.model.parameters(), first, strict=True):
        assert torch.equal(wide.to(torch.bfloat16), p)
        assert float((wide - start.float()).abs().max()) > 3e-4


def test_checkpoint_restores_bitwise(tmp_path: object) -> None:
    algorithm = ALGORITHMS["grpo"]
    lm = model_of()
    learner = learner_of(lm, algorithm)
    mini = credited(batch_of(lm), algorithm, learner)
    learner.step(mini, algorithm.objective, algorithm.update)
    learner.mix_reference(0.5)
    saved = {g: {k: v.clone() for k, v in t.items()} for g, t in learner.state().items()}
    learner.step(mini, algorithm.objective, algorithm.update)
    other_lm = model_of(seed=5)
    other = learner_of(other_lm, algorithm)
    other.restore(saved)
    other.step(mini, algorithm.objective, algorithm.update)
    for a, b in zip(learner.state().values(), other.state().values(), strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_parameters_of_another_model_are_rejected() -> None:
    learner = learner_of(model_of(), ALGORITHMS["reinforce"])
    state = learner.state()
    state["params"].popitem()
    with pytest.raises(ConfigError, match="not this model's"):
        learner.restore(state)


# ---- critics and trust regions --------------------------------------------------------------------


def with_critic(lm: LanguageModel, algorithm: Algorithm, budget: int = 0) -> LanguageLearner:
    critic = LanguageCritic(lm, algorithm.critic.shared)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    kept, outputs, update = algorithm.reference.enabled, algorithm.outputs, algorithm.critic.update
    return LanguageLearner(lm, algorithm.update, kept, outputs, budget, False, critic, update)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_value_is_the_head_on_the_state_before_a_token(shared: bool, share_prompts: bool) -> None:
    """At every state, the last one too, against the model itself on each sequence alone."""
    lm = model_of()
    lm.can_share_prompts = share_prompts
    algorithm = replace(ALGORITHMS["ppo"], critic=SharedCritic() if shared else OwnCritic())
    learner, batch = with_critic(lm, algorithm), batch_of(lm)
    batch.mask[1, 2, 1:] = False
    value = learner.score(batch, frozenset({"value"}))["value"]
    assert value.shape[-1] == batch.mask.shape[-1] + 1
    head = learner.critic.head
    for p in range(3):
        prompt = batch.prompt[p][batch.prompt[p] >= 0]
        for s in range(4):
            tokens = batch.response[p, s][batch.mask[p, s]]
            hidden = lm.backbone(torch.cat([prompt, tokens])[None]).last_hidden_state[0, len(prompt) - 1 :]
            want = head(hidden).squeeze(-1)
            assert (value[p, s, : len(tokens) + 1] - want).abs().max() < 1e-10
            assert (value[p, s, len(tokens) + 1 :] == 0).all()


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_critic_learns_and_only_a_shared_one_changes_the_policy(shared: bool) -> None:
    lm = model_of()
    choice = SharedCritic() if shared else OwnCritic(lr=5e-3)
    algorithm = replace(ALGORITHMS["ppo"], critic=choice, update=Adam(5e-3))
    learner = with_critic(lm, algorithm, budget=60)
    batch = credited(batch_of(lm), algorithm, learner)
    if shared:
        batch = batch.add(weight=torch.zeros_like(batch.weight))  # nothing but the value loss
    first = [p.detach().clone() for p in lm.model.parameters()]

    def loss() -> float:
        sums = learner.step(batch, algorithm.objective, algorithm.update).sums if shared else choice(learner, batch)
        return float(sums["value/loss"])

    losses = [loss() for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]
    assert any(not torch.equal(a, b) for a, b in zip(first, lm.model.parameters(), strict=True)) == shared


@pytest.mark.long
def test_critic_is_in_the_checkpoint() -> None:
    algorithm = ALGORITHMS["ppo"]
    lm = model_of()
    learner = with_critic(lm, algorithm)
    mini = credited(batch_of(lm), algorithm, learner)
    algorithm.critic(learner, mini)
    saved = {g: {k: v.clone() for k, v in t.items()} for g, t in learner.state().items()}
    other = with_critic(model_of(seed=4), algorithm)
    other.restore(saved)
    for one in (learner, other):
        algorithm.critic(one, mini)
    for a, b in zip(learner.state().values(), other.state().values(), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.long
@pytest.mark.parametrize("share_prompts", [False, True])
def test_micro_batch_counts_computed_tokens(share_prompts: bool) -> None:
    """Prompts that are not shared are encoded with every response and padded: policy, critic and pairs keep the budget.

    A row is never cut, and neither is a pair. The gradient is that of the whole batch at once.
    """
    algorithm, seen, gradients = ALGORITHMS["ppo"], list[tuple[int, int]](), list[Tensor]()
    longest = 60 + 6

    def most_computed() -> int:
        tokens, seen[:] = [rows * width for rows, width in seen], []
        return max(tokens)

    for budget in (10_000, 150, 20):
        lm = model_of(num_hidden_layers=1)
        lm.can_share_prompts = share_prompts
        batch = rewarded(sampler_of(lm, limit=6).generate(Prompts.of(prompts_of((40, 12, 60, 3))), 6))
        learner = with_critic(lm, algorithm, budget)
        for backbone in (lm.backbone, learner.critic.separate_backbone):
            backbone.register_forward_pre_hook(lambda *a: seen.append(a[2]["input_ids"].shape), with_kwargs=True)
        mini = credited(batch, algorithm, learner)
        learner.gradient(mini, algorithm.objective)
        gradients.append(gradient_of(learner))
        algorithm.critic(learner, mini)
        assert most_computed() <= max(budget, longest)
        learner.score(batch.select(slice(None), slice(0, 2)).add(sampled=False), frozenset({"logp_old"}))
        assert share_prompts or all(rows % 2 == 0 for rows, _ in seen), "a pair stays whole"
        assert most_computed() <= max(budget, 2 * longest)
        assert (gradients[-1] - gradients[0]).norm() < 1e-12 * gradients[0].norm()


def test_fisher_vector_product_matches_definition() -> None:
    """vᵀFv = the mean over states of Var_π(∂ log π along v), by finite differences of the model itself."""
    lm = model_of(num_hidden_layers=2)
    algorithm = ALGORITHMS["trpo"]
    learner, batch = learner_of(lm, algorithm), batch_of(lm, samples=2)
    generator = torch.Generator().manual_seed(0)
    v = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in learner.trainable()]
    product = learner.fisher_product(batch)(v)
    found = float(sum((a * b).sum() for a, b in zip(v, product, strict=True)))
    step, logs = 1e-5, []
    start = [p.detach().clone() for p in learner.trainable()]
    for sign in (1, -1):
        learner.set_trainable([a + sign * step * b for a, b in zip(start, v, strict=True)])
        logs.append(plain_log_probs(lm, batch))
    learner.set_trainable(start)
    slope, p = (logs[0] - logs[1]) / (2 * step), (0.5 * (logs[0] + logs[1])).exp()
    assert found == pytest.approx(float((p * slope**2).sum() / batch.tokens), rel=1e-4)


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize(("seed", "delta"), [(0, 1e-4), (2, 0.01), (1, 0.3)])
def test_trust_region_satisfies_its_bound_on_a_language_model(seed: int, delta: float) -> None:
    """The KL is measured here by another way: whole distributions of the plain form."""
    lm = model_of(seed=seed)
    algorithm = replace(ALGORITHMS["trpo"], update=replace(ALGORITHMS["trpo"].update, delta=delta))
    learner = learner_of(lm, algorithm, micro_batch=60)
    batch = credited(batch_of(lm), algorithm, learner)
    old = plain_log_probs(lm, batch)
    stepped = learner.step(batch, algorithm.objective, algorithm.update)
    new = plain_log_probs(lm, batch)
    kl = float((old.exp() * (old - new)).sum() / batch.tokens)
    assert float(stepped.metrics["trust_region/accepted"]) == 1
    assert kl == pytest.approx(float(stepped.metrics["trust_region/kl"]), rel=1e-4)
    assert 0.1 * delta < kl <= delta


@pytest.mark.parametrize("lora", [0, 4])
def test_trust_region_in_bfloat16_is_rejected_also_with_adapters(lora: int, tiny_folder: Path) -> None:
    """Adapters are in float32, and the model around them is not."""
    lm = CausalLM(str(tiny_folder), dtype="bfloat16", device="cpu", lora=lora).load()
    with pytest.raises(ConfigError, match=r"--policy\.dtype float32"):
        learner_of(lm, ALGORITHMS["trpo"])


def test_engine_that_shares_parameters_sees_every_step() -> None:
    """Held-out answers beside offline data are drawn with one. A fused optimizer does not count its changes."""
    lm, row = model_of(), ALGORITHMS["reinforce"]
    sampler, prompts = sampler_of(lm, limit=6), Prompts.of(prompts_of())
    sampler.generate(prompts, 1, greedy=True)
    learner = LanguageLearner(lm, Adam(lr=0.05), False, frozenset())
    learner.step(credited(batch_of(lm), row, learner), row.objective, Adam(lr=0.05))
    again = sampler.generate(prompts, 1, greedy=True)
    fresh = sampler_of(lm, limit=6).generate(prompts, 1, greedy=True)
    assert torch.equal(again.response, fresh.response) and torch.equal(again.logp_sampler, fresh.logp_sampler)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("row", ["grpo", "ppo", "trpo"])
def test_empty_share_has_zero_gradient(row: str, shares: bool) -> None:
    """As a rank has it that got no prompt: every sum is 0, and every parameter has a gradient."""
    lm, algorithm = model_of(), ALGORITHMS[row]
    lm.can_share_prompts = shares
    critic = LanguageCritic(lm, False) if algorithm.critic.enabled else None
    kept, update = algorithm.reference.enabled, algorithm.critic.update
    learner = LanguageLearner(lm, algorithm.update, kept, algorithm.outputs, critic=critic, critic_update=update)
    empty = credited(batch_of(lm), algorithm, learner).sub_batch(slice(0, 0))
    assert all(value.shape[:2] == (0, 4) for value in learner.score(empty, learner.provides & algorithm.needs).values())
    terms = learner.gradient(empty, algorithm.objective)
    gradients = [p.grad for p in learner.trainable()]
    assert float(terms.objective) == 0 and all(g is not None and not g.any() for g in gradients)
    if algorithm.critic.enabled:
        assert not any(bool(value.any()) for value in learner.fit_critic(empty, algorithm.critic.loss))
    if row == "trpo":
        vector = [p.detach().clone() for p in learner.trainable()]
        assert float(learner.kl_from(empty, vector)) == 0
        assert not any(part.any() for part in learner.fisher_product(empty)(vector))
