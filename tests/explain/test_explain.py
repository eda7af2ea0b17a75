"""`ascent explain` says what the code does: printed formulas are evaluated as they stand, against the code."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ascent.core.advantages import (
    ADVANTAGES,
    Centered,
    Greedy,
    LeaveOneOut,
    Normalized,
    OptimalBaseline,
    Raw,
    RunningMean,
)
from ascent.core.algorithms import ALGORITHMS, MENU, Algorithm
from ascent.core.correction import Masked, Truncated
from ascent.core.critics import OwnCritic
from ascent.core.errors import ConfigError
from ascent.core.exploration import Annealed, Constant
from ascent.core.groups import Overlong, WithSignal
from ascent.core.kl import InLoss, InReward, NoKL
from ascent.core.losses import LOSSES, Cispo, Clipped, LogProb, Ratio, SequenceRatio
from ascent.core.menu import name_of
from ascent.core.reference import Frozen, MovingAverage
from ascent.core.types import Batch, Outputs
from ascent.core.update import Adam
from ascent.core.values import GAE, TD, VALUES, KStep, MonteCarlo, Valued, VTrace
from ascent.core.weights import WEIGHTS, FixedLength, SequenceMean, SequenceSum, TokenMean
from ascent.explain import explain as module
from ascent.explain.about import ABOUT_ALGORITHMS, bias_of
from ascent.explain.choices import ABOUT_ESTIMATORS, ABOUTS
from ascent.explain.explain import explanation, formula, menu_text, objective_in_words, verdict
from ascent.settings import configure
from ascent.tasks.user_files import load_python
from tools.menu import with_menu

WITH_FORMULA = ("advantage", "loss", "weights", "kl", "exploration", "correction")
WITH_WORDS = (*WITH_FORMULA, "reference", "groups", "shaping", "critic")
EVERY_CHOICE = [(axis, cls) for axis, menu in MENU.items() for cls in menu]


# ── the printed formula, evaluated ──────────────────────────────────────────────────────────────


def a_batch() -> Batch:
    """Two prompts, four responses of one to six tokens; one reward failed, one response was cut off."""
    g = torch.Generator().manual_seed(0)
    length = torch.tensor([[1, 3, 6, 2], [5, 4, 6, 3]])
    mask = torch.arange(6) < length.unsqueeze(-1)

    def logp() -> Tensor:
        return -torch.rand(2, 4, 6, generator=g, dtype=torch.float64) * 2 - 0.1

    sampler = logp()
    return Batch(
        prompt=torch.zeros(2, 3, dtype=torch.long),
        response=torch.zeros(2, 4, 6, dtype=torch.long),
        mask=mask,
        logp_sampler=sampler,
        limit=6,
        truncated=torch.tensor([[False, False, True, False], [False] * 4]),
        reward=torch.tensor([[1.0, 0.0, 2.5, 1.0], [3.0, 3.0, 0.5, 2.0]], dtype=torch.float64).unsqueeze(-1),
        valid=torch.tensor([[True] * 4, [True, True, False, True]]),
        logp_old=sampler + 0.3 * torch.randn(2, 4, 6, generator=g, dtype=torch.float64),
        logp_ref=logp(),
        kl_full=torch.rand(2, 4, 6, generator=g, dtype=torch.float64),
        score_norm=torch.rand(2, 4, 1, generator=g, dtype=torch.float64) + 0.5,
        reward_greedy=torch.tensor([1.5, 2.0], dtype=torch.float64).reshape(2, 1, 1),
        kept_mass=torch.rand(2, 4, 6, generator=g, dtype=torch.float64) * 0.3 + 0.7,
        value=torch.randn(2, 4, 7, generator=g, dtype=torch.float64),
    )


def python(text: str) -> str:
    """The mathematics of a printed formula as a Python expression, symbol by symbol."""
    text = re.sub(r"1\[(\S+) ≤ w ≤ (\S+)\]", r"band(w, \1, \2)", text)
    text = text.replace("ρ_(t−1)", "before").replace("ρ_t", "ρ")
    text = re.sub(r"\|(\w+)\|", r"size(\1)", text)
    text = re.sub(r"Σ_t (\w+)", r"tokens(\1)", text)
    text = re.sub(r"Σ_\(j≠i\) n_j·R_j / Σ_\(j≠i\) n_j", "weighted_others", text)
    text = re.sub(r"(R_[it]) where (R_[it]) = max_j R_j, else 0", r"where(\1, total)", text)
    swaps = {"ΣL": "SL", "−": "-", "·": "*", "[": "(", "]": ")"}
    for symbol, code in swaps.items():
        text = text.replace(symbol, code)
    return text


def symbols(algorithm: Algorithm, batch: Batch, logp: Tensor, entropy: Tensor) -> dict[str, Any]:
    """What each symbol of a formula stands for, computed by hand and not by the library's choices."""
    counted = batch.mask & batch.valid.unsqueeze(-1)
    length = counted.sum(-1, keepdim=True)
    kl = algorithm.kl
    ell = (batch.logp_old if kl.where == "reward" else logp) - batch.logp_ref
    log_w = torch.where(batch.mask, batch.logp_old - batch.logp_sampler + batch.kept_mass.log(), 0.0)
    if getattr(algorithm.correction, "level", "token") == "sequence":
        log_w = log_w.sum(-1, keepdim=True)
    bonus = algorithm.exploration
    return {
        "N": int(batch.valid.sum()),
        "SL": int(counted.sum()),
        "L_i": length.clamp(min=1),
        "L_max": batch.limit,
        "logp": logp,
        "H": entropy,
        "w": log_w.exp(),
        "k1": ell,
        "abs": ell.abs(),
        "k2": ell**2 / 2,
        "k3": torch.exp(-ell) - 1 + ell,
        "exact": batch.kl_full,
        "c": bonus.start if isinstance(bonus, Annealed) else None,
        "β": kl.coef,
        "b": 0.7,
        "tokens": lambda term: torch.where(batch.mask, term, 0.0).sum(-1, keepdim=True),
        "min": lambda x, y: torch.minimum(x, torch.as_tensor(y)),
        "max": lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
        "clip": torch.clamp,
        "sg": torch.detach,
        "size": torch.abs,
        "band": lambda w, low, high: ((w >= low) & (w <= high)).double(),
        "overlong": lambda _: soft_penalty(algorithm.shaping.margin, batch),
    }


def soft_penalty(margin: int, batch: Batch) -> Tensor:
    rows = []
    for length, cut in zip(batch.mask.sum(-1).flatten().tolist(), batch.truncated.flatten().tolist(), strict=True):
        rows.append(-1.0 if cut else max(-1.0, min(0.0, (batch.limit - margin - length) / margin)))
    return torch.tensor(rows, dtype=torch.float64).reshape(2, 4, 1)


def printed_reward(line: str, names: dict[str, Any], batch: Batch) -> Tensor:
    """The reward (outcome, or reward-to-go per token) that the printed first line makes of the task's."""
    if "r_t ←" in line:
        last = batch.mask & ~torch.cat([batch.mask[..., 1:], torch.zeros_like(batch.mask[..., :1])], -1)
        outcome = batch.reward
        if line.startswith("R_i ←"):
            outcome = eval(python(line.split(" on the last")[0].split("← ")[1]), {}, {**names, "R_i": outcome})
        step = re.search(r"r_t ← (.*?),", line)
        assert step is not None and "R_t = Σ_(u≥t) r_u" in line
        r = eval(python(step[1]), {}, {**names, "r_t": torch.where(last, outcome, 0.0)})
        r = torch.where(batch.mask, r, 0.0)
        return torch.stack([r[..., t:].sum(-1) for t in range(r.shape[-1])], -1)
    return eval(python(line.split("← ")[1]), {}, {**names, "R_i": batch.reward})


def printed_advantage_of_rewards(line: str, R: Tensor, names: dict[str, Any], batch: Batch, choice: Any) -> Tensor:
    """A from its printed line, prompt by prompt over the scored responses."""
    rhs = re.split(r", ", line.split(";")[0].split(" = ", 1)[1] + ", ")[0]
    if " where " in rhs:
        rhs = line.split(";")[0].split(" = ", 1)[1]
    A = torch.zeros_like(R)
    scored = torch.where(batch.mask, R, 0.0)[batch.mask & batch.valid.unsqueeze(-1)]  # every counted token's R
    for p in range(2):
        keep = batch.valid[p].nonzero().flatten().tolist()
        for i in keep:
            others = [j for j in keep if j != i]
            n = batch.score_norm[p] if getattr(choice, "norm", "") == "exact" else batch.mask[p].sum(-1, keepdim=True)
            local = {"R_i": R[p, i], "R_t": R[p, i], "R_greedy": batch.reward_greedy[p, 0], "b": names["b"]}
            local["mean"] = R[p, keep].mean(0) if choice.group_relative else scored.mean()
            local["std"] = (
                R[p, keep, 0].std(correction=getattr(choice, "ddof", 1)) if choice.group_relative else scored.std()
            )
            local["mean_others"] = R[p, others].mean(0)
            local["others_k"] = local["mean_others"]  # without turns
            local["weighted_others"] = (n[others] * R[p, others]).sum(0) / n[others].sum()
            local["total"] = bool(R[p, i, 0] == R[p, keep, 0].max())
            local["where"] = lambda reward, best: reward if best else torch.zeros_like(reward)
            A[p, i] = eval(python(rhs), {}, local)
    return A


def printed_advantage(error: str, line: str, R: Tensor, batch: Batch) -> Tensor:
    """A of a critic from its two printed lines: δ_t token by token, its direct sum, then A_t. R is to go."""
    rhs = line.split(";")[0].split(" = ", 1)[1]
    error, _, whitened = error.partition(";   Â_t = ")
    error, _, trace = error.partition(";   e_t = ")
    A = (
        printed_trace(error, whitened or rhs, trace, R, batch)
        if trace
        else printed_sum(error, whitened or rhs, R, batch)
    )
    counted = A[batch.loss_mask]
    names = {"Â_t": A, "mean": counted.mean(), "std": counted.std()}
    return eval(python(rhs.split(", ddof 1")[0]), {}, names) if whitened else A


def printed_sum(error: str, total: str, R: Tensor, batch: Batch) -> Tensor:
    """A_t before whitening, from its printed sum of TD errors."""
    sums = re.fullmatch(r"Σ_\(j(≥0|<(\d+))\) ([\d.]+)\^j·δ_\(t\+j\)", total)
    A = torch.zeros(2, 4, 6, dtype=torch.float64)
    for p, s in itertools.product(range(2), range(4)):
        length = int(batch.mask[p, s].sum())
        to_go = [*R[p, s].expand(6)[:length].tolist(), 0.0] if R.shape[-1] == 1 else [*R[p, s, :length].tolist(), 0.0]
        r = [to_go[t] - to_go[t + 1] for t in range(length)]
        V = [*batch.value[p, s, :length].tolist(), 0.0]
        rule = (
            python(error.split(" = ")[1]).replace("V_(t+1)", "V[t + 1]").replace("V_t", "V[t]").replace("r_t", "r[t]")
        )
        d = [eval(rule, {}, {"r": r, "V": V, "t": t}) for t in range(length)]
        for t in range(length):
            terms = min(length - t, int(sums[2])) if sums and sums[2] else length - t
            A[p, s, t] = sum(float(sums[3]) ** j * d[t + j] for j in range(terms)) if sums else d[t]
    return A


def printed_trace(error: str, advantage: str, trace: str, R: Tensor, batch: Batch) -> Tensor:
    """A_t of V-trace from its printed line, from the last token back."""
    w = torch.exp(batch.logp_old - batch.logp_sampler) * batch.kept_mass
    A = torch.zeros(2, 4, 6, dtype=torch.float64)
    for p, s in itertools.product(range(2), range(4)):
        length, e = int(batch.mask[p, s].sum()), 0.0
        to_go = [*R[p, s].expand(6)[:length].tolist(), 0.0]
        if R.shape[-1] == 1:
            to_go = [0.0] * (length - 1) + [float(R[p, s, 0]), 0.0]
            rewards = to_go
        else:
            rewards = [to_go[t] - to_go[t + 1] for t in range(length)]
        V = [*batch.value[p, s, :length].tolist(), 0.0]
        for t in reversed(range(length)):
            names = {"r_t": rewards[t], "V_t": V[t], "V_next": V[t + 1], "w_t": float(w[p, s, t]), "e_next": e}
            names["δ_t"] = eval(python(error.split(" = ")[1]).replace("V_(t+1)", "V_next"), {}, names)
            A[p, s, t] = eval(python(advantage).replace("e_(t+1)", "e_next"), {}, names)
            e = eval(python(trace).replace("e_(t+1)", "e_next"), {"min": min}, names)
    return A


def printed_objective(line: str, names: dict[str, Any], counted: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for piece in re.split(r" \+ (?=Σ_i)", line.removeprefix("objective = ")):
        kind = "Σ_i Σ_t " if piece.startswith("Σ_i Σ_t ") else "Σ_i "
        value = eval(python(piece.removeprefix(kind)), {}, names)
        mask = counted if kind == "Σ_i Σ_t " else counted.any(-1, keepdim=True)
        total = total + torch.where(mask, value, 0.0).sum()
    return total


def check_against_code(algorithm: Algorithm) -> None:
    batch = a_batch()
    g = torch.Generator().manual_seed(1)
    logp = (batch.logp_old + 0.4 * torch.randn(2, 4, 6, generator=g, dtype=torch.float64)).requires_grad_()
    entropy = torch.rand(2, 4, 6, generator=g, dtype=torch.float64)
    names = symbols(algorithm, batch, logp, entropy)
    lines = formula(algorithm).splitlines()
    valued = isinstance(algorithm.advantage, Valued)
    assert 2 <= len(lines) <= 3 + valued and max(map(len, lines)) <= 120

    state = algorithm.initial_state() | ({"baseline": 0.7} if isinstance(algorithm.advantage, RunningMean) else {})
    credited, _ = algorithm.compute_advantages(batch, state)
    R = printed_reward(lines[0], names, batch) if len(lines) == 3 + valued else batch.reward
    if valued:
        A = printed_advantage(lines[-3], lines[-2], R, batch)
    else:
        A = printed_advantage_of_rewards(lines[-2], R, names, batch, algorithm.advantage)
    counted = batch.loss_mask if A.shape[-1] > 1 else batch.valid.unsqueeze(-1)
    assert credited.advantage is not None
    torch.testing.assert_close(torch.where(counted, A, 0.0), torch.where(counted, credited.advantage, 0.0))

    mini = credited.add(weight=algorithm.weights(credited), **algorithm.scalars(state, 0.0))
    computed = algorithm.objective(mini, Outputs(logp, entropy, batch.kl_full)).objective
    ratio = re.search(r"ρ_[ti] = (?:sg\[)?exp\((.*?)\)(\]·exp\(logp_t − sg\[logp_t\]\))?$", lines[-2])
    if ratio is not None:
        gap = torch.where(batch.loss_mask, logp - batch.logp_old, 0.0)
        by_hand = {
            "logp_t − logp_old_t": logp - batch.logp_old,
            "Σ_t (logp_t − logp_old_t)": gap.sum(-1, keepdim=True),
            "mean_t (logp_t − logp_old_t)": gap.sum(-1, keepdim=True) / names["L_i"],
            "Σ_(u≤t) (logp_u − logp_old_u)": gap.cumsum(-1),
        }
        names["ρ"] = by_hand[ratio[1]].exp()
        names["before"] = torch.exp(by_hand[ratio[1]] - gap)  # where ρ is a product up to a token
        if ratio[2]:
            names["ρ"] = names["ρ"].detach() * torch.exp(logp - logp.detach())
    weight = torch.as_tensor(names["w"])
    if getattr(algorithm.correction, "normalized", False):
        bounded = replace(algorithm.correction, normalized=False)(batch)
        names["mean_w"] = bounded[batch.loss_mask if weight.shape[-1] > 1 else batch.valid.unsqueeze(-1)].mean()
    printed = printed_objective(lines[-1], {**names, "A": credited.advantage}, batch.loss_mask)
    torch.testing.assert_close(printed, computed)
    grads = [torch.autograd.grad(value, logp, retain_graph=True)[0] for value in (printed, computed)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", [name for name, row in ALGORITHMS.items() if row.loss.data not in ("pairs", "steps")])
def test_the_printed_formula_of_a_row_is_what_the_code_computes(name: str) -> None:
    algorithm = ALGORITHMS[name]
    check_against_code(replace(algorithm, shaping=Overlong(4)) if name == "dapo" else algorithm)


MORE_LOSSES = [Clipped(0.1, 0.3, dual=1.5), SequenceRatio("product", None, None), Ratio("per-decision")]


@pytest.mark.parametrize("loss", [*LOSSES, *MORE_LOSSES], ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_surrogate_with_every_weight(loss: Any, weights: type) -> None:
    loss = loss() if isinstance(loss, type) else loss
    check_against_code(Algorithm(Normalized(), loss, weights(), InLoss("k2", 0.3), Frozen(), Constant(0.2)))
    with_ratio = InLoss("abs", 0.3, importance=True)
    check_against_code(Algorithm(Normalized(), loss, weights(), with_ratio, Frozen(), Constant(0.2)))


@pytest.mark.parametrize(
    "loss", [SequenceRatio(), SequenceRatio("mean", 0.1, 0.2), SequenceRatio("product", None, None)]
)
@pytest.mark.parametrize("credit", [VTrace(), VTrace(0.9, 0.8, 1.3, 0.7), GAE(whitened=True)])
def test_gspo_with_advantages_per_token(loss: Any, credit: Any) -> None:
    check_against_code(Algorithm(credit, loss, SequenceMean(), InLoss("k3", 0.2), Frozen(), critic=OwnCritic()))
    per_token = InReward("k1", 0.5, "token")
    check_against_code(Algorithm(Raw(), loss, TokenMean(), per_token, Frozen(), correction=Truncated("token", 1.1)))


@pytest.mark.parametrize("credit", [*ADVANTAGES, OptimalBaseline("length"), Normalized(0.1, ddof=0)], ids=str)
@pytest.mark.parametrize(
    "kl", [NoKL(), InReward("k1", 0.5, "token"), InReward("exact", 0.5), InReward("k3", 0.2)], ids=str
)
def test_every_credit_with_the_kl_in_the_reward(credit: Any, kl: Any) -> None:
    credit = credit() if isinstance(credit, type) else credit
    check_against_code(Algorithm(credit, Ratio(), TokenMean(), kl, Frozen(), shaping=Overlong(3)))


@pytest.mark.parametrize(
    "credit",
    [
        *(cls() for cls in VALUES),
        KStep(0.7, 2),
        GAE(0.8, 0.5),
        MonteCarlo(0.9),
        TD(0.6, whitened=True),
        GAE(whitened=True),
        KStep(k=3, whitened=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("kl", [NoKL(), InReward("k1", 0.5, "token"), InReward("k3", 0.2)], ids=str)
def test_every_credit_from_a_critic(credit: Any, kl: Any) -> None:
    check_against_code(Algorithm(credit, Ratio(), TokenMean(), kl, Frozen(), shaping=Overlong(3), critic=OwnCritic()))


@pytest.mark.parametrize(
    "correction",
    [
        *(Truncated("token", 1.1), Masked("token", 0.8, 1.2), Truncated("sequence", 1.3)),
        *(Truncated("token", 1.1, 0.9), Truncated("sequence", 1.3, 0.7, normalized=True)),
        *(Masked("token", 0.8, 1.2, normalized=True), Truncated("token", 1.1, normalized=True)),
    ],
)
def test_corrections_an_annealed_bonus_and_an_adaptive_kl(correction: Any) -> None:
    check_against_code(
        Algorithm(Centered(), LogProb(), FixedLength(), InLoss("k3", 0.3, target=0.1), Frozen(), Annealed(), correction)
    )


def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation above can fail: a printed number, sign or denominator that the code does not have."""
    wrong: list[tuple[type, str]] = [
        (Clipped, "min(ρ·A, clip(ρ, 0.8, 1.3)·A)"),
        (Normalized, "(R_i − mean) / std"),
        (Normalized, "(R_i + mean) / (std + 0.0001)"),
        (SequenceMean, "1/ΣL"),
    ]
    for cls, text in wrong:
        with monkeypatch.context() as patch:
            patch.setitem(ABOUTS, cls, replace(ABOUTS[cls], formula=text))
            with pytest.raises(AssertionError):
                check_against_code(ALGORITHMS["grpo"])
    check_against_code(ALGORITHMS["grpo"])


def test_advantage_of_a_small_group_by_hand() -> None:
    """R = 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, std √(14/3); A_4 = 3 / (√(14/3) + 0.0001)."""
    line = formula(ALGORITHMS["grpo"]).splitlines()[0]
    assert line.startswith("A_i = (R_i − mean) / (std + 0.0001), ddof 1")
    batch = a_batch()
    batch = batch.add(
        reward=torch.tensor([1.0, 2, 3, 6]).double().expand(2, 4).unsqueeze(-1), valid=torch.ones(2, 4) > 0
    )
    A = printed_advantage_of_rewards(line, batch.reward, {"b": 0.0}, batch, Normalized())
    assert float(A[0, 3]) == pytest.approx(3 / ((14 / 3) ** 0.5 + 1e-4))


# ── completeness: nothing on the menu can be forgotten ──────────────────────────────────────────


@pytest.mark.parametrize(("axis", "cls"), EVERY_CHOICE, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_every_choice_has_its_bias_and_who_differs(axis: str, cls: type) -> None:
    assert cls in ABOUTS, f"there is no About of {cls.__name__} in ascent/explain: its formula and words"
    about = ABOUTS[cls]
    assert about.off or cls is Frozen or bias_of(cls), f"{cls.__name__} has no bias"
    assert about.off or (about.trl and about.verl)
    assert axis != "weights" or (about.denominator and about.response_formula and about.response_words)
    for part in {"formula": WITH_FORMULA, "words": WITH_WORDS}.items():
        assert about.off or axis not in part[1] or getattr(about, part[0]), f"{cls.__name__} has no {part[0]}"
    text = explanation(name_of(cls))
    assert (cls.__doc__ or "").strip().splitlines()[0] in text
    for field in dataclasses.fields(cls):
        assert re.search(rf"^  {field.name} \(", text, re.M), f"the field {field.name} is not explained"
    for row, algorithm in ALGORITHMS.items():
        if type(getattr(algorithm, axis)) is cls and not about.off:
            assert row in text


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_is_explained(name: str) -> None:
    about, text = ABOUT_ALGORITHMS[name], explanation(name)
    assert about.words and about.paper and about.trl and about.verl
    for title in ("CHOICES", "IN WORDS", "FORMULA", "DENOMINATOR", "BIAS", "ELSEWHERE", "TRL 1.16", "verl 0.9", "TRY"):
        assert title in text
    assert all(line in text for line in formula(ALGORITHMS[name]).splitlines())
    assert ("WHAT THE KL'S GRADIENT IS" in text) == (ALGORITHMS[name].kl.where != "nowhere")
    for axis in MENU:
        assert (
            isinstance(getattr(ALGORITHMS[name], axis), Adam)
            or name_of(getattr(ALGORITHMS[name], axis)) in text
            or axis in text.split("off")[1]
        )


def test_no_about_is_left_over() -> None:
    assert set(ABOUTS) == {cls for _, cls in EVERY_CHOICE} and set(ABOUT_ALGORITHMS) == set(ALGORITHMS)


@pytest.mark.parametrize(
    "name", [*ALGORITHMS, *(name_of(cls) for _, cls in EVERY_CHOICE), *ABOUT_ESTIMATORS, "exact", "lecture"]
)
def test_the_command_to_try_is_a_valid_one(name: str) -> None:
    for command in re.findall(r"^  ascent train (.*)$", explanation(name), re.M):
        task, *flags = command.split()
        settings = {flag.removeprefix("--"): value for flag, value in zip(flags[::2], flags[1::2], strict=True)}
        configure(task, settings)


def test_menu_text_has_every_name_with_a_line() -> None:
    text = menu_text()
    for name in [
        *ALGORITHMS,
        *(name_of(cls) for _, cls in EVERY_CHOICE),
        *ABOUT_ESTIMATORS,
        "lecture",
        "sort",
        "transformer",
    ]:
        assert re.search(rf"^  {re.escape(name)} +\S", text, re.M), name
    assert all(f"--{axis}" in text for axis in MENU) and "no description" not in text


def test_the_page_of_the_menu_has_the_menu_of_today() -> None:
    text = (Path(__file__).parents[2] / "docs" / "menu.md").read_text()
    assert with_menu(text) == text, "run python -m tools.menu docs/menu.md"
    with pytest.raises(ConfigError, match="no place for the menu"):
        with_menu("a page without markers")


def test_a_long_label_has_a_line_of_its_own() -> None:
    """A page is 96 characters wide: from half of it on, the text starts below its label."""
    for length, shared in ((44, True), (45, False)):
        label = "x" * length
        page = module.MenuPage("one", "kind", sections=[module.Section("Title", [(label, "words about it")])])
        lines = page.printed().splitlines()
        assert (
            lines[-1] == f"  {label}  words about it"
            if shared
            else lines[-2:] == [f"  {label}", f"{'':14}words about it"]
        )


def test_lines_fit_a_terminal() -> None:
    for text in [
        menu_text(),
        *(explanation(n) for n in ALGORITHMS),
        *(explanation(name_of(c)) for _, c in EVERY_CHOICE),
    ]:
        assert max(map(len, text.splitlines())) <= 100


# ── what it says ────────────────────────────────────────────────────────────────────────────────


def test_grpo_golden() -> None:
    text = explanation("grpo")
    flat = " ".join(text.split())
    assert "  A_i = (R_i − mean) / (std + 0.0001), ddof 1;   ρ_t = exp(logp_t − logp_old_t)\n" in text
    assert "  objective = Σ_i Σ_t 1/(N·L_i) · [ min(ρ·A, clip(ρ, 0.8, 1.2)·A) − 0.04·k3 ]\n" in text
    assert "k3 = e^−ℓ + ℓ − 1, with ℓ = log π − log π_ref" in text
    assert "N responses, and for each its own L_i unmasked tokens" in flat
    assert "k3 in the loss: its gradient is that of the other direction, ∇KL(π_ref ‖ π)" in flat
    assert "ε 1e-6, a group of one keeps its raw reward, dual clip 3 always on" in flat
    assert 'not this by default: loss_type="dapo"' in flat and "use_bias_correction_kl=False" in flat
    assert "OpenRLHF adds 1e-9 to std; open-instruct has ddof 0." in flat
    assert objective_in_words(ALGORITHMS["grpo"]) == (
        "Maximize the mean over responses of the token mean of the clipped ratio (0.8 to 1.2) times the reward "
        "normalized within its group of responses (std + 0.0001), minus 0.04 × the k3 estimate of the KL to the "
        "frozen start."
    )


def test_numbers_come_from_the_object() -> None:
    grpo = ALGORITHMS["grpo"]
    changed = replace(grpo, advantage=Normalized(1e-6, ddof=0), loss=Clipped(0.1, 0.28, 3.0), kl=InLoss("k1", 0.5))
    assert "max(min(ρ·A, clip(ρ, 0.9, 1.28)·A), −3·|A|) − 0.5·k1" in formula(changed)
    assert "(std + 1e-06), ddof 0" in formula(changed)
    words = objective_in_words(changed)
    assert "0.9 to 1.28" in words and "1e-06" in words and "0.5 × the k1 estimate" in words
    moved = replace(grpo, kl=InLoss("exact", 0.2, target=0.07), reference=MovingAverage(0.3))
    assert (
        "β (from 0.2, steered to a KL of 0.07 per token) × the exact KL to a moving average of the policy (rate 0.3)"
        in (objective_in_words(moved))
    )


def test_words_of_everything_at_once() -> None:
    everything = Algorithm(
        LeaveOneOut(),
        Cispo(),
        TokenMean(),
        InReward("k1", 0.05),
        Frozen(),
        Annealed(0.5, 0.0, 0.9),
        Truncated(),
        WithSignal(3),
        Overlong(8),
    )
    assert objective_in_words(everything) == (
        "Maximize the mean over tokens of log π times the ratio as a constant (clipped, 0 to 5) times the reward minus "
        "the mean of its group's other responses, plus c × the entropy, c falling from 0.5 to 0 over 90% of the run. "
        "The reward has 0.05 × the k1 estimate of the KL to the frozen start taken off, response by response and falls "
        "by up to 1 over the last 8 tokens before the length limit. Each token is weighted by how much likelier the "
        "trainer finds it, at most 2. Groups of equal rewards are replaced by new prompts, in at most 3 draws per step."
    )


@pytest.mark.parametrize(
    ("algorithm", "word"),
    [
        (ALGORITHMS["reinforce"], "Unbiased"),
        (ALGORITHMS["rloo"], "Unbiased"),
        (ALGORITHMS["dr-grpo"], "Right direction"),
        (ALGORITHMS["grpo"], "Biased"),
        (Algorithm(Greedy(), Ratio(), SequenceMean()), "Biased"),
        (Algorithm(Raw(), SequenceRatio("product", None, None), SequenceMean()), "Biased"),
        (Algorithm(Raw(), SequenceRatio("product", None, None), SequenceSum()), "Unbiased"),
        (Algorithm(Raw(), SequenceRatio("mean"), SequenceSum()), "Unbiased"),
        (replace(ALGORITHMS["rloo"], kl=InReward("k3", 0.05)), "Biased"),
        (replace(ALGORITHMS["reinforce"], exploration=Constant()), "Biased"),
        (ALGORITHMS["ppo"], "Biased"),
        (Algorithm(MonteCarlo(), critic=OwnCritic()), "Unbiased"),
        (Algorithm(MonteCarlo(bootstrap=True), critic=OwnCritic()), "Biased"),
        (Algorithm(MonteCarlo(0.9), critic=OwnCritic()), "Biased"),
        (Algorithm(GAE(), critic=OwnCritic()), "As biased as V is wrong"),
        (Algorithm(GAE(whitened=True), critic=OwnCritic()), "Biased"),
    ],
)
def test_verdict(algorithm: Algorithm, word: str) -> None:
    assert verdict(algorithm).startswith(word)


@pytest.mark.parametrize("form", ["product", "mean"])
def test_which_weights_give_a_sequence_ratio_the_policy_gradient(form: Any) -> None:
    """At ρ = 1 its gradient is A_i/N on every token with sequence-sum, and not with sequence-mean."""
    batch = a_batch().add(advantage=a_batch().reward)
    for choice, same in ((SequenceSum(), True), (SequenceMean(), False)):
        logp = batch.logp_old.clone().requires_grad_()
        algorithm = Algorithm(Raw(), SequenceRatio(form, None, None), choice)
        mini = batch.add(weight=choice(batch))
        algorithm.objective(mini, Outputs(logp, torch.zeros_like(logp))).objective.backward()
        wanted = torch.where(batch.loss_mask, batch.reward / batch.valid.sum(), 0.0)
        assert torch.allclose(logp.grad, wanted) is same


def test_trl_kl_has_the_gradient_that_notes_claim() -> None:
    """ρ·k3 at ρ = 1 has k2's gradient: k3 + k3' = (e^−ℓ + ℓ − 1) + (1 − e^−ℓ) = ℓ."""
    ell = torch.linspace(-2, 2, 9, dtype=torch.float64)
    logp = ell.clone().requires_grad_()
    ρ = torch.exp(logp - ell)
    (ρ * (torch.exp(-logp) + logp - 1)).sum().backward()
    torch.testing.assert_close(logp.grad, ell)


def test_names_are_found_in_any_spelling_and_unknown_ones_refused() -> None:
    assert explanation("DR_GRPO") == explanation("dr-grpo")
    assert "a named algorithm" in explanation("cispo") and "a choice of --loss" in explanation("cispo")
    assert "an estimator of KL" in explanation("exact") and "a reward of the sorting tasks" in explanation("exact")
    assert "adjacent pair" in explanation("inclusion-ordering") and "positions that are right" in explanation(
        "positions"
    )
    with pytest.raises(ConfigError, match=r"leave-on-out.*Did you mean leave-one-out\?"):
        explanation("leave-on-out")
    with pytest.raises(ConfigError, match="ascent list"):
        explanation("xyzzy")


def test_a_users_own_choice_reads_well(tmp_path: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from ascent.core.losses import Clipped\n"
        "@dataclass(frozen=True)\n"
        "class Squared:\n"
        '    """The square of the reward."""\n'
        "    scale: float = 2.0\n"
        "    group_relative = False\n"
        "    needs = frozenset()\n"
        "@dataclass(frozen=True)\n"
        "class Odd(Clipped):\n"
        "    pass\n"
    )
    own, odd = (load_python("--x", f"python:{path}:{name}") for name in ("Squared", "Odd"))
    algorithm = object.__new__(Algorithm)  # the checks of a test run know the library's own choices only
    algorithm.__dict__.update(vars(Algorithm()) | {"advantage": own(), "loss": odd()})
    assert objective_in_words(algorithm) == (
        "Maximize the mean over responses of the token sum of the surrogate of Odd (no description) for the advantage "
        "of Squared (The square of the reward.)."
    )
    assert formula(algorithm).startswith("A_i = Squared(R)") and "Odd(logp, logp_old, A)" in formula(algorithm)
    assert verdict(algorithm).startswith("Not known: Odd, Squared")
    assert "The square of the reward." in explanation(f"python:{path}:Squared")


def test_explain_exports_what_the_command_line_needs() -> None:
    assert {"explanation", "formula", "menu_text", "objective_in_words"} < set(module.__all__)
