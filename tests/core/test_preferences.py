"""Losses of pairs: goldens by hand, finite differences, DPO's optimum, and splits that never cut a pair."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import ENDED, F64, TINY, batch_of, close, f64, gradient_of, learner_of, policy_of, prompts_of, shake
from torch import Tensor

from ascent.core.advantages import Centered
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.critics import OwnCritic
from ascent.core.errors import ConfigError
from ascent.core.exploration import Constant
from ascent.core.kl import InLoss, InReward
from ascent.core.preferences import BradleyTerry, Dpo, Likelihood, PairLoss, margin_of
from ascent.core.reference import Frozen, NoReference
from ascent.core.types import Batch, Outputs
from ascent.core.update import TrustRegion
from ascent.core.values import GAE
from ascent.core.weights import SequenceMean, TokenMean
from ascent.explain.explain import formula, objective_in_words
from ascent.models.small_policies import TransformerValue
from ascent.training.small_learner import SmallLearner, score_small_responses

DPO, RATER = ALGORITHMS["dpo"], ALGORITHMS["reward-model"]


def paired(lengths: list[list[int]], **more: Any) -> Batch:
    """Pairs whose responses have these lengths, weighted as a step would."""
    batch = batch_of([[1.0, 0.0]] * len(lengths), lengths, **more)
    batch = batch.add(sampled=False, advantage=batch.reward)
    return batch.add(weight=SequenceMean()(batch))


def outputs(logp: Tensor, rating: Tensor | None = None) -> Outputs:
    return Outputs(logp, torch.zeros_like(logp), rating=rating)


# ---- by hand --------------------------------------------------------------------------------------


def test_dpo_by_hand() -> None:
    """Chosen gained (−1 + 1.5) + (−2 + 2.5) = 1, rejected lost 0.5: m = 0.1·1.5, loss = log(1 + e^−0.15)."""
    logp = f64([[[-1.0, -2.0], [-1.0, 9.0]]]).requires_grad_()
    batch = paired([[2, 1]], logp_ref=f64([[[-1.5, -2.5], [-0.5, -7.0]]]))
    terms = DPO.objective(batch, outputs(logp))
    close(terms.objective, -math.log1p(math.exp(-0.15)))
    (gradient,) = torch.autograd.grad(terms.objective, logp)
    pull = 0.1 / (1 + math.exp(0.15))
    close(gradient, [[[pull, pull], [-pull, 0.0]]])
    close(terms.means["rewards/chosen"], 0.1)
    close(terms.means["rewards/rejected"], -0.05)
    close(terms.means["rewards/margins"], 0.15)
    close(terms.means["rewards/accuracies"], 1.0)


class FirstLogProb(PairLoss):
    """A pair loss of a user: a response is worth the log-prob of its first token."""

    def rating(self, mini: Batch, out: Outputs) -> Tensor:
        return out.logp[..., :1]


def test_a_pair_loss_of_ones_own_maximizes_the_log_sigmoid_of_its_margin() -> None:
    """M = −1 + 1.5 = 0.5: log σ(0.5)."""
    close(FirstLogProb().value(f64([[[-1.0], [-1.5]]])), [[[-math.log1p(math.exp(-0.5))]]])
    algorithm = replace(DPO, loss=FirstLogProb(), reference=NoReference())
    terms = algorithm.objective(paired([[1, 1]]), outputs(f64([[[-1.0], [-1.5]]])))
    close(terms.objective, -math.log1p(math.exp(-0.5)))
    close(terms.means["rewards/margins"], 0.5)


def test_a_pair_weighs_one_over_pairs_whatever_its_length() -> None:
    batch = paired([[1, 5], [4, 4], [2, 3]], logp_ref=torch.zeros(3, 2, 5))
    terms = DPO.objective(batch, outputs(torch.zeros(3, 2, 5, dtype=F64)))
    close(terms.objective, -math.log(2))
    close(batch.weight.sum((1, 2)), [1 / 3] * 3)


def test_smoothing_by_hand() -> None:
    """M = 0.2: (1 − ε)·log σ(0.2) + ε·log σ(−0.2)."""
    batch = paired([[1, 1]], logp_ref=torch.zeros(1, 2, 1))
    logp = f64([[[1.0], [-1.0]]])
    terms = replace(DPO, loss=Dpo(0.1, smoothing=0.25)).objective(batch, outputs(logp))
    close(terms.objective, -0.75 * math.log1p(math.exp(-0.2)) - 0.25 * math.log1p(math.exp(0.2)))


def test_bradley_terry_by_hand() -> None:
    """Ratings (2, 0.5) and (−1, 1): log σ(1.5) and log σ(−2); centring takes off c·2.5² and 0."""
    rating = f64([[[2.0], [0.5]], [[-1.0], [1.0]]]).requires_grad_()
    batch = paired([[1, 1], [1, 1]])
    plain = -(math.log1p(math.exp(-1.5)) + math.log1p(math.exp(2.0))) / 2
    terms = RATER.objective(batch, outputs(torch.zeros(2, 2, 1, dtype=F64), rating))
    close(terms.objective, plain)
    close(terms.means["rewards/accuracies"], 0.5)
    centered = replace(RATER, loss=BradleyTerry(center=0.01)).objective(batch, outputs(torch.zeros(2, 2, 1), rating))
    close(centered.objective, plain - 0.01 * 2.5**2 / 2)
    (gradient,) = torch.autograd.grad(terms.objective, rating)
    pull = [1 / (1 + math.exp(1.5)) / 2, 1 / (1 + math.exp(-2.0)) / 2]
    close(gradient, [[[pull[0]], [-pull[0]]], [[pull[1]], [-pull[1]]]])


def test_the_gradient_is_that_of_the_loss_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=F64)

    batch = paired([[2, 3], [1, 3]], logp_ref=noise(2, 2, 3))
    for loss in (Dpo(0.3), Dpo(0.3, smoothing=0.2)):
        row = replace(DPO, loss=loss)
        assert torch.autograd.gradcheck(
            lambda x, row=row: row.objective(batch, outputs(x)).objective, noise(2, 2, 3).requires_grad_()
        )
    for loss in (BradleyTerry(), BradleyTerry(0.1)):
        row, idle = replace(RATER, loss=loss), torch.zeros(2, 2, 3, dtype=F64)
        assert torch.autograd.gradcheck(
            lambda r, row=row, idle=idle: row.objective(batch, outputs(idle, r)).objective,
            noise(2, 2, 1).requires_grad_(),
        )


def test_dpo_rests_at_the_optimum_of_the_reward_less_the_kl() -> None:
    """Every pair of five responses, labelled by Bradley–Terry with reward r: there π ∝ π_ref·e^(r/β) has no gradient.

    And the reward's gradient is that of r itself: a step away it is not 0.
    """
    β, generator = 0.5, torch.Generator().manual_seed(1)
    reward, logits_ref = (torch.randn(5, generator=generator, dtype=F64) for _ in range(2))
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    chosen, rejected = (torch.tensor(side) for side in zip(*pairs, strict=True))
    logp_ref = torch.log_softmax(logits_ref, 0)
    seen = (logp_ref[chosen] + logp_ref[rejected]).exp() * torch.sigmoid(reward[chosen] - reward[rejected])

    def slope(logits: Tensor) -> Tensor:
        logits = logits.clone().requires_grad_()
        logp = torch.log_softmax(logits, 0)
        both = torch.stack([logp[chosen], logp[rejected]], 1).unsqueeze(-1)
        batch = paired(
            [[1, 1]] * len(pairs), logp_ref=torch.stack([logp_ref[chosen], logp_ref[rejected]], 1)[..., None]
        )
        batch = batch.add(weight=(seen / 2)[:, None, None].expand(-1, 2, 1))
        terms = replace(DPO, loss=Dpo(β)).objective(batch, outputs(both))
        return torch.autograd.grad(terms.objective, logits)[0]

    assert float(slope(logits_ref + reward / β).abs().max()) < 1e-12
    assert float(slope(logits_ref + 0.9 * reward / β).abs().max()) > 1e-3


def test_on_its_own_samples_the_likelihood_has_no_gradient_and_on_a_demonstrators_it_has() -> None:
    """Σ_y π(y) ∇log π(y) = 0; with the demonstrator's q in place of π it is q − π."""
    logits = f64([0.3, -1.0, 0.7]).requires_grad_()
    logp = torch.log_softmax(logits, 0)
    batch = batch_of([[1.0, 1.0, 1.0]], advantage=torch.ones(1, 3, 1))
    q = f64([0.2, 0.5, 0.3])
    for shown, expected in ((logp.detach().exp(), torch.zeros(3)), (q, q - logp.detach().exp())):
        mini = batch.add(weight=shown.view(1, 3, 1))
        terms = ALGORITHMS["sft"].objective(mini, outputs(logp.view(1, 3, 1)))
        close(torch.autograd.grad(terms.objective, logits, retain_graph=True)[0], expected)


# ---- splits ---------------------------------------------------------------------------------------


def pairs_of(space: Any, count: int = 5) -> Batch:
    """Random pairs in a space whose responses end by themselves, so that lengths differ."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, space.limit + 1, (count, 2), generator=generator)
    response = torch.randint(space.vocab, (count, 2, space.limit), generator=generator)
    batch = paired(lengths.tolist(), width=space.limit, limit=space.limit)
    return batch.add(prompt=prompts_of(space, count), response=response)


@pytest.mark.parametrize("budget", [1, 20, 40, 0])
def test_dpo_is_the_same_for_any_micro_batch(budget: int) -> None:
    found = []
    for micro_batch in (0, budget):
        policy = policy_of(TINY, ENDED)
        learner = learner_of(policy, DPO, micro_batch)
        shake(policy, 0.2)
        batch = pairs_of(ENDED)
        batch = batch.add(**learner.score(batch, DPO.needs))
        terms = learner.gradient(batch, DPO.objective)
        found.append((terms.objective, gradient_of(learner), terms.means))
    (one, g1, m1), (two, g2, m2) = found
    close(one, two, 1e-12)
    close(g1, g2, 1e-12)
    assert float(g1.abs().max()) > 1e-4
    for name in m1:
        close(m1[name], m2[name], 1e-12)


def rater_of(micro_batch: int = 0) -> SmallLearner:
    model = TransformerValue(policy_of(TINY, ENDED), shared=False).double()
    shake(model, 0.3)
    learner = SmallLearner(model, RATER.update, False, frozenset(), micro_batch)
    learner.train_reward(partial(score_small_responses, model))
    return learner


def test_a_reward_model_is_the_same_for_any_micro_batch() -> None:
    found = []
    for micro_batch in (0, 1, 25):
        learner = rater_of(micro_batch)
        terms = learner.gradient(pairs_of(ENDED), RATER.objective)
        found.append((terms.objective, gradient_of(learner)))
    for objective, gradient in found[1:]:
        close(objective, found[0][0], 1e-12)
        close(gradient, found[0][1], 1e-12)
    assert float(found[0][1].abs().max()) > 1e-4


def test_a_micro_batch_never_cuts_a_pair() -> None:
    batch = pairs_of(ENDED)
    for learner in (learner_of(policy_of(TINY, ENDED), DPO, 1), rater_of(1)):
        parts = list(learner.split(batch))
        assert [part.mask.shape[1] for part in parts] == [2] * 5
    sampled = batch.add(sampled=True)
    assert {part.mask.shape[1] for part in rater_of(1).split(sampled)} == {1}, "a group of samples may be cut"


def test_a_rating_is_read_after_the_last_token() -> None:
    """What stands behind a response does not matter; its last token does."""
    learner, batch = rater_of(), pairs_of(ENDED)
    before = score_small_responses(learner.policy, batch)
    padding = torch.where(batch.mask, batch.response, 0)
    close(score_small_responses(learner.policy, batch.add(response=padding)), before)
    last = batch.mask & (torch.arange(1, ENDED.limit + 1) == batch.length.unsqueeze(-1))
    other = torch.where(last, (batch.response + 1) % ENDED.vocab, batch.response)
    assert bool((score_small_responses(learner.policy, batch.add(response=other)) != before).all())


# ---- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "changes", "words"),
    [
        ("dpo", {"reference": NoReference()}, "--reference frozen"),
        ("dpo", {"advantage": Centered()}, "--advantage raw"),
        ("dpo", {"weights": TokenMean()}, "--weights sequence-mean"),
        ("dpo", {"kl": InLoss()}, "--kl no-kl"),
        ("dpo", {"exploration": Constant()}, "--exploration no-bonus"),
        ("reward-model", {"reference": Frozen()}, "neither a reference nor"),
        ("reward-model", {"update": TrustRegion()}, "neither a reference nor"),
        ("sft", {"advantage": Centered()}, "--advantage raw"),
        ("sft", {"kl": InReward(), "reference": Frozen()}, "have no reward"),
        ("sft", {"advantage": GAE(), "critic": OwnCritic()}, "--advantage raw"),
    ],
)
def test_what_such_a_loss_does_not_read_is_refused(row: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(ALGORITHMS[row], **changes)


@pytest.mark.parametrize("make", [lambda: Dpo(0.0), lambda: Dpo(smoothing=0.5), lambda: BradleyTerry(-1.0)])
def test_a_number_that_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match="--loss"):
        make()


def test_a_policy_cannot_stand_in_for_a_reward_model() -> None:
    batch = paired([[1, 1]])
    with pytest.raises(ConfigError, match="trains a reward model"):
        RATER.objective(batch, outputs(torch.zeros(1, 2, 1)))
    with pytest.raises(ConfigError, match="two responses"):
        RATER.objective(batch.select(slice(0, 1), slice(0, 1)), outputs(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)))


def test_sft_may_be_held_to_a_reference() -> None:
    row = Algorithm(loss=Likelihood(), kl=InLoss("k3", 0.1), reference=Frozen())
    assert row.needs == {"logp_ref"}
    assert margin_of(torch.tensor([[[1.0], [3.0]]])).item() == -2.0


# ---- what is printed is what is computed ----------------------------------------------------------


@pytest.mark.parametrize("loss", [Dpo(0.1), Dpo(0.4, smoothing=0.25), BradleyTerry(), BradleyTerry(0.05)], ids=str)
def test_the_printed_formula_is_what_the_code_computes(loss: Any) -> None:
    row = replace(DPO if isinstance(loss, Dpo) else RATER, loss=loss)
    generator = torch.Generator().manual_seed(5)
    logp, logp_ref = (-torch.rand(3, 2, 4, generator=generator, dtype=F64) for _ in range(2))
    rating = torch.randn(3, 2, 1, generator=generator, dtype=F64)
    batch = paired([[4, 1], [2, 3], [1, 1]], logp_ref=logp_ref)
    first, last = formula(row).splitlines()
    names: dict[str, Any] = {"pairs": 3, "r_w": rating[:, 0, 0], "r_l": rating[:, 1, 0]}
    if isinstance(loss, Dpo):
        assert first.startswith("Δ_i = Σ_t (logp_t − logp_ref_t);   ")
        Δ = torch.where(batch.mask, logp - logp_ref, 0.0).sum(-1)
        names |= {"Δ_w": Δ[:, 0], "Δ_l": Δ[:, 1]}
    names["m"] = eval(python(first.split("m = ")[1]), {}, names)
    names["logσ"] = torch.nn.functional.logsigmoid
    printed = eval(python(last.removeprefix("objective = Σ_pairs ")), {}, names).sum()
    close(row.objective(batch, outputs(logp, rating)).objective, printed)
    assert "pairs" in objective_in_words(row)


def python(text: str) -> str:
    for symbol, code in {"−": "-", "·": "*", "[": "(", "]": ")", "²": "**2", "log σ": "logσ"}.items():
        text = text.replace(symbol, code)
    return text
