"""Credit from a critic: recursions against direct sums, ends and masks, the exact oracle, and others' code."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ENDED, F64, TINY, batch_of, close, critic_of, f64, learner_of, policy_of, rollouts_of, with_rewards
from hypothesis import given
from hypothesis import strategies as st
from pin_estimators import INDEPENDENT, RAGGED, SPACES, Tiny, a_point_each, moved, positions, prompt_of, space_name
from pin_estimators import policy_of as oracle_policy
from torch import Tensor

from ascent.core.advantages import Centered, LeaveOneOut, whiten
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.correction import Correction, Truncated, log_weight
from ascent.core.critics import OwnCritic, SharedCritic
from ascent.core.errors import ConfigError
from ascent.core.kl import InReward
from ascent.core.losses import Clipped
from ascent.core.reference import Frozen
from ascent.core.types import Batch, Space
from ascent.core.update import Adam, TrustRegion
from ascent.core.values import GAE, TD, VALUES, KStep, MonteCarlo, Valued, VTrace
from ascent.core.weights import SequenceSum, TokenMean
from ascent.models import Policy
from ascent.oracle.estimator import estimate
from ascent.oracle.exact import ResponseTable


def random_batch(seed: int, per_token: bool, holes: bool, prompts: int = 2, samples: int = 3, width: int = 6) -> Batch:
    """Ragged responses, some cut off; with holes, masks as those of tool calls. One reward failed."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (prompts, samples), generator=g)
    reward = torch.randn(prompts, samples, width if per_token else 1, generator=g, dtype=F64)
    batch = batch_of(reward, lengths, width=width)
    mask = batch.mask & (torch.rand(batch.mask.shape, generator=g) < 0.6) if holes else batch.mask
    valid = torch.ones(prompts, samples, dtype=torch.bool)
    valid[0, 0] = False
    return batch.add(
        mask=mask,
        valid=valid,
        truncated=torch.rand(prompts, samples, generator=g) < 0.5,
        reward=batch.reward if not per_token else torch.where(mask, batch.reward, 0.0),
        value=torch.randn(prompts, samples, width + 1, generator=g, dtype=F64),
    )


def by_hand(batch: Batch, credit: Any) -> Tensor:
    """A_t response by response, with Python lists: the unmasked tokens alone, and the sum written out."""
    A = torch.zeros(batch.mask.shape, dtype=F64)
    for p, s in itertools.product(*map(range, batch.valid.shape)):
        at = batch.mask[p, s].nonzero().flatten().tolist()
        if not at:
            continue
        r = [float(batch.reward[p, s, t if batch.reward.shape[-1] > 1 else 0]) for t in at]
        if batch.reward.shape[-1] == 1:
            r = [0.0] * (len(at) - 1) + [r[-1]]
        V = [float(batch.value[p, s, t]) for t in at]
        cut = bool(batch.truncated[p, s]) and credit.bootstrap
        V.append(float(batch.value[p, s, int(batch.present[p, s].nonzero().max()) + 1]) if cut else 0.0)
        d = [r[i] + credit.gamma * V[i + 1] - V[i] for i in range(len(at))]
        for i, t in enumerate(at):
            terms = range(min(credit.k, len(at) - i)) if isinstance(credit, KStep) else range(len(at) - i)
            A[p, s, t] = sum((credit.gamma * credit.lam) ** j * d[i + j] for j in terms)
    return A


CREDITS = st.one_of(
    st.builds(TD, st.floats(0, 1), bootstrap=st.booleans()),
    st.builds(KStep, st.floats(0, 1), st.integers(1, 8), bootstrap=st.booleans()),
    st.builds(GAE, st.floats(0, 1), st.floats(0, 1), bootstrap=st.booleans()),
    st.builds(MonteCarlo, st.floats(0, 1), bootstrap=st.booleans()),
)


@pytest.mark.long
@given(CREDITS, st.integers(0, 10_000), st.booleans(), st.booleans())
def test_every_credit_is_its_direct_sum(credit: Any, seed: int, per_token: bool, holes: bool) -> None:
    """Padding, holes, truncated responses with and without bootstrapping, outcome rewards and rewards per token."""
    batch = random_batch(seed, per_token, holes)
    expected = by_hand(batch, credit)
    close(credit.advantage(batch), expected)
    close(credit(batch, {}), torch.where(batch.valid.unsqueeze(-1), expected, 0.0))
    close(credit.returns(batch)[batch.mask], (expected + batch.value[..., :-1])[batch.mask])


@pytest.mark.long
@given(st.integers(0, 10_000), st.floats(0, 1), st.booleans(), st.booleans())
def test_the_ends_of_lambda(seed: int, gamma: float, bootstrap: bool, per_token: bool) -> None:
    """λ = 0 is TD, λ = 1 Monte Carlo; k = 1 is TD, and k beyond every length Monte Carlo."""
    batch, more = random_batch(seed, per_token, holes=True), {"bootstrap": bootstrap}
    td, mc = TD(gamma, **more)(batch, {}), MonteCarlo(gamma, **more)(batch, {})
    close(GAE(gamma, 0.0, **more)(batch, {}), td)
    close(GAE(gamma, 1.0, **more)(batch, {}), mc)
    close(KStep(gamma, 1, **more)(batch, {}), td)
    close(KStep(gamma, 6, **more)(batch, {}), mc)


def test_a_response_by_hand() -> None:
    """γ = 0.5, λ = 0.5, r = (0, 0, 2), V = (1, 2, 4), then the end.

    d = (0 + 0.5·2 − 1, 0 + 0.5·4 − 2, 2 + 0 − 4) = (0, 0, −2); A_3 = −2, A_2 = 0.25·−2 = −0.5, A_1 = −0.125.
    Cut off with V(s_L) = 6 and bootstrapping: d_3 = 2 + 3 − 4 = 1, A = (0.0625, 0.25, 1).
    """
    batch = batch_of([[2.0]], [[3]], value=f64([[[1.0, 2, 4, 6]]]))
    close(GAE(0.5, 0.5)(batch, {}), [[[-0.125, -0.5, -2]]])
    close(GAE(0.5, 0.5).returns(batch), [[[0.875, 1.5, 2]]])
    cut = batch.add(truncated=torch.tensor([[True]]))
    close(GAE(0.5, 0.5)(cut, {}), [[[-0.125, -0.5, -2]]])
    close(GAE(0.5, 0.5, bootstrap=True)(cut, {}), [[[0.0625, 0.25, 1]]])
    close(GAE(0.5, 0.5, bootstrap=True)(batch, {}), [[[-0.125, -0.5, -2]]])


def test_a_masked_token_is_stepped_over() -> None:
    """The middle token is a tool's: the state after the first is the one before the third.

    V of the tool's token, and what stands in the padding, is never read.
    """
    value = f64([[[1.0, math.nan, 4, math.nan, math.nan]]])
    batch = batch_of([[2.0]], [[3]], width=4, value=value).add(mask=torch.tensor([[[True, False, True, False]]]))
    close(TD()(batch, {}), [[[4 - 1, 0, 2 - 4, 0]]])
    close(MonteCarlo()(batch, {}), [[[2 - 1, 0, 2 - 4, 0]]])


@given(st.integers(0, 10_000), st.integers(2, 5))
def test_with_the_groups_mean_for_v_it_is_the_centered_credit(seed: int, samples: int) -> None:
    """An outcome reward, γ = λ = 1, V the same in every state: the reward minus its group's mean."""
    batch = random_batch(seed, per_token=False, holes=False, samples=samples)
    batch = batch.add(valid=torch.ones_like(batch.valid))
    mean = batch.reward.mean(1, keepdim=True).expand(-1, samples, 7)
    δ = GAE(1.0, 1.0)(batch.add(value=mean), {})
    close(δ[batch.mask], Centered()(batch, {}).expand_as(δ)[batch.mask])


def test_a_process_reward_lands_on_the_tokens_that_earned_it() -> None:
    """V = 0: TD gives each token its own point, Monte Carlo each token what is still to come."""
    points = f64([[[1.0, 0, 1], [0, 0, 1]]])
    batch = batch_of(points, value=torch.zeros(1, 2, 4, dtype=F64))
    close(TD()(batch, {}), points)
    close(MonteCarlo()(batch, {}), [[[2, 1, 1], [1, 1, 1]]])


def off_policy(seed: int, per_token: bool = False, holes: bool = False) -> Batch:
    """A batch whose sampler was another policy."""
    g = torch.Generator().manual_seed(seed)
    batch = random_batch(seed, per_token, holes)
    old = -torch.rand(batch.mask.shape, generator=g, dtype=F64)
    return batch.add(logp_old=old, logp_sampler=old + 0.7 * torch.randn(batch.mask.shape, generator=g, dtype=F64))


def test_v_trace_by_hand() -> None:
    """γ = 0.5, λ = 1, ρ̄ = 1, c̄ = ¾, r = (0, 0, 2), V = (1, 2, 4), weights w = (3, ½, 2): ρ = (1, ½, 1), c = (¾, ½, ¾).

    d = (0 + 1 − 1, 0 + 2 − 2, 2 − 4) = (0, 0, −2). e_3 = −2, e_2 = ½·0 + ½·½·(−2) = −½, e_1 = 0 + ½·¾·(−½) = −0.1875.
    A = d_t + ½·e_{t+1} = (−0.25, −1, −2); returns V + e = (0.8125, 1.5, 2).
    """
    batch = batch_of([[2.0]], [[3]], value=f64([[[1.0, 2, 4, 6]]]), logp_old=f64([[[3.0, 0.5, 2.0]]]).log())
    credit = VTrace(0.5, 1.0, 1.0, 0.75)
    close(credit(batch, {}), [[[-0.25, -1.0, -2.0]]])
    close(credit.returns(batch), [[[0.8125, 1.5, 2.0]]])


@pytest.mark.long
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 3), st.floats(0.1, 3), st.booleans())
def test_v_trace_is_its_direct_sum(seed: int, gamma: float, lam: float, rho: float, c: float, holes: bool) -> None:
    """Σ_t γ^(t−s) λ^(t−s) (Π_{s≤i<t} c_i) ρ_t d_t over the actions alone, written out; and with w = 1 it is GAE."""
    batch = off_policy(seed, per_token=True, holes=holes)
    batch = batch.add(valid=torch.ones_like(batch.valid))
    credit = VTrace(gamma, lam, rho, c, bootstrap=seed % 2 == 0)
    d = replace(TD(gamma), bootstrap=credit.bootstrap).advantage(batch)
    w = torch.exp(batch.logp_old - batch.logp_sampler)
    found, returns = credit.advantage(batch), credit.returns(batch)
    for p, s in itertools.product(*map(range, batch.valid.shape)):
        at = batch.mask[p, s].nonzero().flatten().tolist()
        e = [0.0] * (len(at) + 1)
        for i in range(len(at)):
            reach = 1.0
            for j in range(i, len(at)):
                e[i] += reach * min(float(w[p, s, at[j]]), rho) * float(d[p, s, at[j]])
                reach *= gamma * lam * min(float(w[p, s, at[j]]), c)
        for i, t in enumerate(at):
            assert float(found[p, s, t]) == pytest.approx(float(d[p, s, t]) + gamma * lam * e[i + 1], abs=1e-9)
            assert float(returns[p, s, t]) == pytest.approx(float(batch.value[p, s, t]) + e[i], abs=1e-9)
    assert not found[~batch.mask].any()
    same, plain = batch.add(logp_old=batch.logp_sampler), GAE(gamma, lam, bootstrap=credit.bootstrap)
    bounds = replace(credit, rho=1.0, c=1.0)
    close(bounds(same, {}), plain(same, {}))
    close(bounds.returns(same), plain.returns(same))


def test_v_trace_per_turn_decays_at_the_ends_of_turns_alone() -> None:
    batch = off_policy(4, holes=True)
    turns = batch.add(turn=torch.arange(6).expand_as(batch.response), valid=torch.ones_like(batch.valid))
    close(VTrace(0.5, 0.5, per="turn")(turns, {}), VTrace(0.5, 0.5)(turns, {}))
    one = turns.add(turn=torch.zeros_like(batch.response))
    close(VTrace(0.5, 0.5, per="turn").advantage(one), VTrace(1.0, 1.0).advantage(one))


@pytest.mark.long
def test_v_trace_is_torchrls() -> None:
    """Torchrl 0.14's functional form at λ = 1: the same returns; its advantage has min(w, ρ̄) as a factor."""
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    batch = off_policy(3, per_token=True)
    batch = batch.add(valid=torch.ones_like(batch.valid))
    credit = VTrace(0.9, 1.0, 1.3, 0.8)
    ours, returns = credit.advantage(batch), credit.returns(batch)
    for p, s in itertools.product(*map(range, batch.valid.shape)):
        length = int(batch.mask[p, s].sum())

        def column(values: Tensor, length: int = length, p: int = p, s: int = s) -> Tensor:
            return values[p, s, :length].unsqueeze(-1)

        done = torch.zeros(length, 1, dtype=torch.bool)
        done[-1] = True
        following = torch.nn.functional.pad(batch.value[p, s, 1:length], (0, 1)).unsqueeze(-1)
        logps = column(batch.logp_old), column(batch.logp_sampler)
        theirs, target = functional.vtrace_advantage_estimate(
            0.9, *logps, column(batch.value), following, column(batch.reward), done, done, 1.3, 0.8
        )
        close(column(ours) * torch.exp(logps[0] - logps[1]).clamp(max=1.3), theirs, 1e-6)
        close(column(returns), target, 1e-6)


# ---- whitening, the value loss and the critic's worth: by hand ----------------------------------------


def test_whitening_by_hand() -> None:
    """A = 1, 2, 6 counted, 100 failed, 7 masked: mean 3, squares 4 + 1 + 9 = 14, std √7."""
    batch = batch_of([[0.0, 0, 0]], [[2, 1, 1]], valid=[[True, True, False]])
    A = f64([[[1.0, 2], [6, 7], [100, 7]]])
    std = math.sqrt(7) + 1e-8
    close(whiten(A, batch, 1e-8)[batch.loss_mask], [-2 / std, -1 / std, 3 / std])
    close(whiten(torch.full_like(A, 0.1), batch, 1e-8), torch.zeros_like(A))
    one = batch.add(valid=torch.tensor([[False, True, False]]))
    close(whiten(A, one, 1e-8), torch.zeros_like(A))


def test_value_loss_by_hand() -> None:
    """V_old = (0, 0, 0), returns (1, 1, −1), V = (0.5, 2, 0.5), ε_v = 0.2.

    Unclipped: ½·(0.25 + 1 + 2.25) = 1.75. Held to ±0.2: 0.2, 0.2, 0.2, errors 0.64, 0.64, 1.44; the larger of each:
    0.64, 1, 2.25, half their sum 1.945. The second token moves away from a return that it has passed: not clipped.
    One token of the three counts in the clip fraction; those of a failed response and without a clip do not.
    """
    batch = batch_of([[0.0, 0]], [[3, 3]], valid=[[True, False]], value=torch.zeros(1, 2, 4, dtype=F64))
    batch = batch.add(returns=f64([[[1.0, 1, -1], [9, 9, 9]]]))
    V = f64([[[0.5, 2, 0.5, 77], [1, 1, 1, 1]]]).requires_grad_()
    close(OwnCritic().loss(batch, V).detach(), [1.75, 0])
    loss, clipped = OwnCritic(clip=0.2).loss(batch, V)
    close(loss.detach(), 1.945)
    assert clipped == 1
    (slope,) = torch.autograd.grad(loss, V)
    close(slope, [[[0, 1, 1.5, 0], [0, 0, 0, 0]]])  # the first has moved further than it may: no gradient


def test_explained_variance_by_hand() -> None:
    """Returns 0, 2, 4 (variance 4), errors 0, 1, −1 (variance 1): 0.75. A failed response is not among them."""
    batch = batch_of([[0.0, 0]], [[3, 3]], valid=[[True, False]])
    value = f64([[[0.0, 1, 5, 9], [50, 60, 70, 80]]])
    returns = f64([[[0.0, 2, 4], [1, 2, 3]]])
    measure = OwnCritic().measure
    close(measure(batch.add(value=value, returns=returns))["value/explained_variance"], 0.75)
    close(measure(batch.add(value=value, returns=torch.ones_like(returns)))["value/explained_variance"], 0.0)
    empty = batch.add(value=value, returns=returns, valid=torch.zeros(1, 2, dtype=torch.bool))
    assert float(measure(empty)["value/explained_variance"]) == 0


# ---- the exact oracle ---------------------------------------------------------------------------------


def of(credit: Any) -> Algorithm:
    return Algorithm(credit, critic=OwnCritic())


SPREAD = [TD(), KStep(k=2), GAE(1.0, 0.3), GAE(), MonteCarlo()]


@pytest.mark.long
@pytest.mark.parametrize("space", SPACES, ids=space_name)
@pytest.mark.parametrize("reward", [positions, a_point_each])
def test_with_the_exact_v_every_credit_is_unbiased_and_with_a_wrong_one_only_monte_carlo(
    space: Space, reward: Any
) -> None:
    policy, prompt, task = oracle_policy(space), prompt_of(space), Tiny(space, reward)
    exact = ResponseTable(policy, prompt, task)
    for credit in [*SPREAD, MonteCarlo(bootstrap=True)]:
        torch.testing.assert_close(estimate(exact, of(credit), 1).mean, exact.gradient, rtol=0, atol=1e-10)
    # A wrong value is still one of a state: it depends on the tokens so far, and on nothing after them.
    so_far = torch.nn.functional.pad(exact.batch.response[0].cumsum(-1), (1, 0)).double()
    wrong = ResponseTable(policy, prompt, task, value=0.5 * exact.exact_value + torch.sin(1 + so_far))
    credits = SPREAD if space is RAGGED else [c for c in SPREAD if c != KStep(k=2)]  # which is Monte Carlo there
    biases = {repr(credit): estimate(wrong, of(credit), 1).bias(exact.gradient) for credit in credits}
    assert biases.pop(repr(MonteCarlo())) < 1e-10
    assert min(biases.values()) > 1e-3, biases
    assert biases[repr(TD())] > biases[repr(GAE(1.0, 0.3))] > biases[repr(GAE())]
    if space is RAGGED:
        assert estimate(wrong, of(MonteCarlo(bootstrap=True)), 1).bias(exact.gradient) > 1e-3


def test_v_trace_follows_the_trainer_where_gae_follows_the_sampler() -> None:
    """Unbounded, λ = 1, for any V: V-trace is unbiased, and GAE is that of the behavior policy.

    Given a state and a token, the mean of A_t over the tokens that follow is
    Q^π(s_t, a_t) − V(s_t), Q^π of the policy that trains; GAE's is that of the sampler. Enumerated, token by token.
    """
    policy = oracle_policy(RAGGED)
    exact = ResponseTable(policy, prompt_of(RAGGED), Tiny(RAGGED, a_point_each))
    found = ResponseTable(
        policy, prompt_of(RAGGED), Tiny(RAGGED, a_point_each), old=policy, behavior_policy=moved(policy, 1.0, 0.5)
    )
    response, mask = found.batch.response[0], found.batch.mask[0]
    so_far = torch.nn.functional.pad(response.cumsum(-1), (1, 0)).double()
    batch = found.batch_with_fields(frozenset({"value", "logp_old"})).add(value=torch.sin(1 + so_far).unsqueeze(0))
    to_go = batch.reward[0].flip(-1).cumsum(-1).flip(-1)
    off = {}
    for credit in (VTrace(1.0, 1.0, 1e9, 1e9), GAE(1.0, 1.0)):
        A, gaps = credit.advantage(batch)[0], []
        for row, t in itertools.product(range(len(response)), range(mask.shape[1])):
            if mask[row, t]:
                same = (response[:, : t + 1] == response[row, : t + 1]).all(-1) & mask[:, t]
                p, q = found.probability * same, exact.probability * same
                gaps.append((p @ A[:, t]) / p.sum() - ((q @ to_go[:, t]) / q.sum() - batch.value[0, row, t]))
        off[type(credit)] = float(torch.stack(gaps).abs().max())
    assert off[VTrace] < 1e-10 and off[GAE] > 1e-2


@dataclass(frozen=True)
class UpToHere(Correction):
    """The product of the token weights up to each token, never cut: it makes up for the sampler's earlier tokens."""

    on = True

    def __call__(self, batch: Batch) -> Tensor:
        return log_weight(batch.logp_old, batch).cumsum(-1).exp()


def test_v_trace_is_exact_where_nothing_is_cut_and_states_are_weighted_too() -> None:
    """On another policy's samples with any V. With token weights, as in the paper, the states stay the sampler's."""
    policy, prompt, task = oracle_policy(RAGGED), prompt_of(RAGGED), Tiny(RAGGED, a_point_each)
    gradient = ResponseTable(policy, prompt, task).gradient
    so_far = torch.nn.functional.pad(ResponseTable(policy, prompt, task).batch.response[0].cumsum(-1), (1, 0)).double()
    found = ResponseTable(
        policy, prompt, task, old=policy, behavior_policy=moved(policy, 1.0, 0.5), value=torch.sin(1 + so_far)
    )

    def bias(credit: Any, correction: Any) -> float:
        return estimate(found, Algorithm(credit, critic=OwnCritic(), correction=correction), 1).bias(gradient)

    assert bias(VTrace(1.0, 1.0, 1e9, 1e9), UpToHere()) < 1e-10
    assert bias(MonteCarlo(), UpToHere()) > 1e-2, "the rewards to come are the sampler's"
    assert bias(VTrace(1.0, 1.0, 1e9, 1e9), Truncated("token", 1e9)) > 1e-2, "and so are the states here"
    assert bias(VTrace(1.0, 1.0, 0.9, 0.9), UpToHere()) > 1e-2, "returns between the two policies"


def test_the_exact_v_by_hand() -> None:
    """Two independent positions, one point each: before the first token P(right) of both, then what is still open."""
    found = ResponseTable(oracle_policy(INDEPENDENT), prompt_of(INDEPENDENT), Tiny(INDEPENDENT, positions))
    p, response = found.probability, found.batch.response[0]
    target = prompt_of(INDEPENDENT).sort().values
    chance = [float(p[response[:, i] == target[i]].sum()) for i in range(2)]
    right = (response == target).double()
    V = found.exact_value
    close(V[:, 0], torch.full((9,), sum(chance), dtype=F64))
    close(V[:, 1], right[:, 0] + chance[1])  # an outcome reward: what is earned already is still to be paid
    close(V[:, 2], torch.zeros(9, dtype=F64))
    assert found.expected_reward == pytest.approx(sum(chance))


@pytest.mark.long
def test_values_lower_the_variance() -> None:
    found = ResponseTable(oracle_policy(RAGGED), prompt_of(RAGGED), Tiny(RAGGED, positions))
    variance = {
        name: estimate(found, a, 2).variance
        for name, a in {
            "td": of(TD()),
            "gae": of(GAE()),
            "mc": of(MonteCarlo()),
            "loo": Algorithm(LeaveOneOut()),
        }.items()
    }
    assert variance["td"] < variance["gae"] < variance["mc"] < variance["loo"]


# ---- parity -------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("bootstrap", [True, False])
def test_gae_is_torchrls(bootstrap: bool) -> None:
    """Torchrl 0.14's functional form, on float32, to 1e-6.

    Intended difference: torchrl has no masks and no padding, so each response is given alone; a truncated one is
    `done` but not `terminated` there, which always bootstraps: here that is a choice.
    """
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    batch = random_batch(3, per_token=True, holes=False, prompts=4, samples=4)
    batch = batch.add(reward=batch.reward.float(), value=batch.value.float(), valid=torch.ones_like(batch.valid))
    credit = GAE(0.9, 0.8, bootstrap=bootstrap)
    ours, returns = credit(batch, {}), credit.returns(batch)
    for p, s in itertools.product(range(4), range(4)):
        length = int(batch.mask[p, s].sum())
        value, reward = batch.value[p, s, : length + 1].unsqueeze(-1), batch.reward[p, s, :length].unsqueeze(-1)
        done = torch.zeros(length, 1, dtype=torch.bool)
        done[-1] = True
        ended = done & ~(batch.truncated[p, s] & bootstrap)
        theirs, target = functional.generalized_advantage_estimate(0.9, 0.8, value[:-1], value[1:], reward, done, ended)
        close(ours[p, s, :length], theirs.squeeze(-1), 1e-6)
        close(returns[p, s, :length], target.squeeze(-1), 1e-6)


@pytest.mark.long
def test_the_clipped_loss_is_trls() -> None:
    """TRL 1.16's GRPOTrainer on the same tensors, with credit per token, token mean and no KL; loss and gradient.

    Intended difference: `dual` there (`delta`) caps ρ before the minimum; it is off here and there.
    """
    trainer = pytest.importorskip("trl").GRPOTrainer
    g = torch.Generator().manual_seed(0)
    batch = random_batch(5, per_token=True, holes=False, prompts=2, samples=3)
    batch = batch.add(valid=torch.ones_like(batch.valid))
    δ = torch.where(batch.mask, GAE()(batch, {}), 0.0).float()
    old = -torch.rand(2, 3, 6, generator=g)
    logp = (old + 0.4 * torch.randn(2, 3, 6, generator=g)).requires_grad_()
    weight = TokenMean()(batch).float()
    ours = -(weight * Clipped(0.2, 0.28)(logp, old, δ, batch.mask)).sum()

    rows = {"completion_mask": batch.mask.flatten(0, 1).long(), "advantages": δ.flatten(0, 1)}
    ids = torch.zeros(6, 6, dtype=torch.long)
    inputs = {
        **rows,
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "old_per_token_logps": old.flatten(0, 1),
    }
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp.flatten(0, 1), torch.zeros(6, 6), None),
        **{"aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0},
        **{"importance_sampling_level": "token", "loss_type": "bnpo", "epsilon_low": 0.2, "epsilon_high": 0.28},
        **{"use_vllm": False, "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False},
        args=SimpleNamespace(delta=None),
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    theirs = trainer._compute_loss(stand_in, None, inputs)
    close(ours.detach(), theirs.detach(), 1e-6)
    one, other = (torch.autograd.grad(x, logp, retain_graph=True)[0] for x in (ours, theirs))
    assert one.abs().max() > 1e-3 and bool((one[batch.mask] == 0).any()), "some tokens are clipped"
    close(one, other, 1e-6)


# ---- the critic ---------------------------------------------------------------------------------------


def credited(algorithm: Algorithm, learner: Any, policy: Any) -> Batch:
    batch = with_rewards(rollouts_of(policy, 3, 4))
    batch = batch.add(logp_old=batch.logp_sampler)
    batch = batch.add(**learner.score(batch, algorithm.needs))
    batch, _ = algorithm.compute_advantages(batch, algorithm.initial_state())
    return batch.add(weight=algorithm.weights(batch))


def test_a_critic_sees_the_state_and_nothing_after_it(policy: Any) -> None:
    """V(s_t) does not change with token t or any later one; it does with an earlier one."""
    critic, rollouts = critic_of(policy), rollouts_of(policy, 2, 3)
    V = critic.values(rollouts.prompt, rollouts.response)
    assert V.shape == (2, 3, rollouts.response.shape[-1] + 1)
    for t in range(rollouts.response.shape[-1]):
        changed = rollouts.response.clone()
        changed[..., t] = (changed[..., t] + 1) % 3
        moved_to = critic.values(rollouts.prompt, changed)
        close(moved_to[..., : t + 1], V[..., : t + 1].detach())
        assert (moved_to[..., t + 1] - V[..., t + 1]).abs().max() > 1e-6


@pytest.mark.long
@pytest.mark.unchecked
@pytest.mark.parametrize("shared", [False, True])
def test_a_new_critic_says_0_and_learns_its_returns(policy: Any, shared: bool) -> None:
    """Fitted for long enough, it knows the returns of a batch; its own backbone leaves the policy alone."""
    choice = SharedCritic() if shared else OwnCritic(lr=0.05, steps=40)
    algorithm = Algorithm(MonteCarlo(), weights=SequenceSum(), critic=choice, update=Adam(0.05))
    learner = learner_of(policy, algorithm)
    assert learner.critic is not None
    for head in set(learner.critic.parameters()) - set(learner.critic.backbone.parameters()):
        torch.nn.init.zeros_(head)
    batch = credited(algorithm, learner, policy)
    assert not batch.value.any()
    before = [p.detach().clone() for p in policy.parameters()]

    def fitted() -> Tensor:
        if not shared:
            return choice(learner, batch)["value/loss"]
        still = batch.add(weight=torch.zeros_like(batch.weight))  # nothing but the value loss
        first, *_ = [learner.step(still, algorithm.objective, algorithm.update) for _ in range(40)]
        return first.sums["value/loss"]

    first = fitted()
    close(first, 0.5 * (batch.returns[batch.loss_mask] ** 2).sum())
    assert fitted() < 0.25 * first
    same = all(torch.equal(p, q) for p, q in zip(policy.parameters(), before, strict=True))
    assert same is not shared


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_shared_critic_is_in_the_objective(policy: Policy, clip: float | None) -> None:
    """−∇ is that of the policy alone plus c_v times the token mean of the value loss, whatever the micro-batches."""
    choice = SharedCritic(coef=0.7, clip=clip)
    algorithm = Algorithm(GAE(), weights=SequenceSum(), critic=choice)
    learner = learner_of(policy, algorithm)
    batch = credited(algorithm, learner, policy)
    found = []
    for micro_batch in (0, 1):
        learner.micro_batch = micro_batch
        terms = learner.gradient(batch, algorithm.objective)
        found.append([p.grad.clone() for p in learner.trainable()])
    loss = choice.loss(batch, learner.values(batch))[0] / batch.tokens
    value = torch.autograd.grad(loss, learner.trainable(), materialize_grads=True)
    close(terms.sums["value/loss"] / batch.tokens, loss)
    learner.outputs = frozenset()  # the policy alone
    alone = learner.gradient(batch, algorithm.objective)
    close(terms.objective, alone.objective - 0.7 * loss)
    for whole, parts, p, v in zip(*found, learner.trainable(), value, strict=True):
        close(whole, (0 if p.grad is None else p.grad) + 0.7 * v)
        close(parts, whole)
    assert max(v.abs().max() for v in value) > 1e-3


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_one_optimizer_moves_a_shared_critic_and_its_policy(policy: Policy, micro_batch: int) -> None:
    """At the update's rate, and with one bound on the norm of both gradients together."""
    algorithm = Algorithm(GAE(), critic=SharedCritic(), update=Adam(0.01, max_norm=0.02, schedule="linear"))
    learner = learner_of(policy, algorithm, micro_batch)
    batch = credited(algorithm, learner, policy)
    for progress, rate in ((0.0, 0.01), (0.5, 0.005)):
        before = [p.detach().clone() for p in learner.trainable()]
        learner.step(batch.add(progress=progress), algorithm.objective, algorithm.update)
        assert not algorithm.critic(learner, batch), "there is no step of its own"
        close(torch.cat([p.grad.flatten() for p in learner.trainable()]).norm(), 0.02, 1e-6)
        steps = [float((p - q).abs().max()) for p, q in zip(learner.trainable(), before, strict=True)]
        assert all(0.1 * rate < step < 2 * rate for step in steps), "the head moves as the policy does"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_value_loss_is_a_token_mean_whatever_the_weights_and_the_split(size: int) -> None:
    policy = policy_of(TINY, ENDED)
    gradients = []
    for micro_batch, weights in ((0, TokenMean()), (size, SequenceSum())):
        algorithm = Algorithm(GAE(), weights=weights, critic=OwnCritic(clip=0.1))
        learner = learner_of(policy, algorithm, micro_batch)
        batch = credited(algorithm, learner, policy)
        learner.fit_critic(batch, algorithm.critic.loss)
        gradients.append(torch.cat([p.grad.flatten() for p in learner.critic.trained() if p.grad is not None]))
        mean = algorithm.critic.loss(batch, learner.values(batch))[0] / batch.tokens
    assert mean > 0 and gradients[0].abs().max() > 1e-4
    close(gradients[1], gradients[0])


def test_returns_hold_the_kl_of_the_reward_and_are_not_whitened() -> None:
    policy = policy_of(TINY, ENDED)
    plain = Algorithm(MonteCarlo(whitened=True), critic=OwnCritic())
    with_kl = replace(plain, kl=InReward("k1", 0.5, "token"), reference=Frozen())
    learner = learner_of(policy, with_kl)
    learner.reference = moved(policy, 1.0, 0.3)
    batch = credited(with_kl, learner, policy)
    to_go = (torch.where(batch.mask, batch.logp_old - batch.logp_ref, 0.0)).flip(-1).cumsum(-1).flip(-1)
    close(batch.returns[batch.mask], (batch.reward - 0.5 * to_go)[batch.mask])
    assert not torch.allclose(batch.advantage[batch.mask], (batch.returns - batch.value[..., :-1])[batch.mask])


# ---- what cannot be ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Algorithm(GAE()), "an advantage from values needs a critic"),
        (lambda: Algorithm(Centered(), critic=OwnCritic()), "others do not use one"),
        (lambda: Algorithm(GAE(), critic=SharedCritic(), update=TrustRegion()), "out of the region"),
        (lambda: GAE(1.5), "between 0 and 1"),
        (lambda: GAE(1.0, -0.1), "between 0 and 1"),
        (lambda: KStep(k=0), "k must be 1 or more"),
        (lambda: OwnCritic(lr=0.0), "lr > 0"),
        (lambda: OwnCritic(clip=0.0), "clip and max-norm > 0"),
        (lambda: OwnCritic(max_norm=0.0), "clip and max-norm > 0"),
        (lambda: OwnCritic(warmup=1.0), "0 ≤ warmup < 1"),
        (lambda: OwnCritic(steps=0), "steps ≥ 1"),
        (lambda: SharedCritic(coef=0.0), "coef > 0"),
        (lambda: SharedCritic(clip=-1.0), "clip > 0"),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_rows_are_the_specs() -> None:
    assert ALGORITHMS["actor-critic"] == Algorithm(GAE(1.0, 0.95), weights=TokenMean(), critic=OwnCritic())
    ppo = ALGORITHMS["ppo"]
    assert (ppo.advantage, ppo.loss) == (GAE(1.0, 0.95, whitened=True), Clipped(0.2, 0.2))
    assert all(isinstance(cls(), Valued) for cls in VALUES) and not Algorithm().critic.enabled


def test_a_critics_rate_follows_its_schedule_and_its_gradient_is_clipped(policy: Policy) -> None:
    choice = OwnCritic(lr=0.01, max_norm=0.02, schedule="linear", warmup=0.5)
    algorithm = Algorithm(GAE(), critic=choice)
    learner = learner_of(policy, algorithm)
    batch = with_rewards(rollouts_of(policy))
    batch, _ = algorithm.compute_advantages(batch.add(**learner.score(batch, algorithm.needs)), {})

    def flat() -> Tensor:
        return torch.cat([p.detach().flatten() for p in learner.critic.trained()])

    for progress, rate in ((0.0, 0.0), (0.25, 0.005), (0.5, 0.01), (0.75, 0.005)):
        before = flat()
        choice(learner, batch.add(progress=progress))
        gradient = torch.cat([p.grad.flatten() for p in learner.critic.trained() if p.grad is not None])
        close(gradient.norm(), 0.02, 1e-6)
        moved = float((flat() - before).abs().max())
        assert 0.1 * rate < moved < 2 * rate if rate else moved == 0
