"""An algorithm as a formula and in words, both assembled from its choices with their own numbers.

The objective is written so that it can be evaluated as it stands: a test does, against the code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ascent.advantages import (
    BatchNormalized,
    BestOnly,
    Centered,
    Greedy,
    LeaveOneOut,
    Normalized,
    OptimalBaseline,
    Raw,
    RunningMean,
)
from ascent.algorithms import Algorithm
from ascent.correction import Masked, NoCorrection, Truncated
from ascent.diagnose import notes_preferences as shown
from ascent.diagnose.notes import NOTES
from ascent.exploration import Annealed, Constant, NoBonus
from ascent.groups import All, NoShaping, Overlong, WithSignal
from ascent.kl import InReward, NoKL
from ascent.losses import Cispo, Clipped, LogProb, Ratio, SequenceRatio
from ascent.policies.critics import NoCritic
from ascent.preferences import BradleyTerry, Dpo, Likelihood, StepValue
from ascent.reference import Every, Frozen, MovingAverage
from ascent.trust_region import TrustRegion
from ascent.values import GAE, TD, KStep, MonteCarlo, Valued
from ascent.weights import FixedLength, SequenceMean, SequenceSum, TokenMean

Says = Callable[[Any], tuple[str, ...]]
"""A choice with its numbers: as a formula, and in words."""

CREDIT: dict[type, Says] = {
    Raw: lambda _: ("R_i", "the reward"),
    Centered: lambda _: ("R_i − mean", "the reward minus its group's mean"),
    LeaveOneOut: lambda _: ("R_i − mean_others", "the reward minus the mean of its group's other responses"),
    Normalized: lambda c: (
        f"(R_i − mean) / (std + {c.eps:g}), ddof {c.ddof}",
        f"the reward normalized within its group of responses (std + {c.eps:g})",
    ),
    BestOnly: lambda _: ("R_i where R_i = max_j R_j, else 0", "the reward, kept only by the best of its group"),
    RunningMean: lambda c: (
        f"R_i − b,  then b ← {c.momentum:g}·b + {1 - c.momentum:g}·(the step's mean reward)",
        f"the reward minus its running mean (momentum {c.momentum:g})",
    ),
    Greedy: lambda _: ("R_i − R_greedy", "the reward minus that of a greedy response to the same prompt"),
    OptimalBaseline: lambda c: (
        f"R_i − Σ_(j≠i) n_j·R_j / Σ_(j≠i) n_j,  n_j = {'‖∇log π_j‖²' if c.norm == 'exact' else 'L_j'}",
        "the reward minus the baseline of least variance, estimated from its group's other responses",
    ),
    BatchNormalized: lambda c: (
        f"(R_t − mean) / (std + {c.eps:g}), ddof 1",
        f"the reward-to-go normalized over all tokens of the batch (std + {c.eps:g})",
    ),
}
_WORDS: dict[type, str] = {
    TD: "the one-step TD error of a critic",
    KStep: "the {c.k}-step advantage of a critic",
    GAE: "the generalized advantage (λ {c.lam:g}) of a critic",
    MonteCarlo: "the return minus a critic's value",
}


def _advantage(c: Any) -> str:
    """The line that says what A_t is."""
    total = f"Σ_(j<{c.k}) {c.gamma:g}^j·d_(t+j)" if isinstance(c, KStep) else f"Σ_(j≥0) {c.gamma * c.lam:g}^j·d_(t+j)"
    known = isinstance(c, TD | KStep | GAE | MonteCarlo)
    error = f"d_t = r_t + {'' if c.gamma == 1 else f'{c.gamma:g}·'}V_(t+1) − V_t"
    return f"{error};   A_t = {('d_t' if isinstance(c, TD) else total) if known else f'{type(c).__name__}(d)'}"


def _valued(c: Any) -> tuple[str, str]:
    words = _WORDS[type(c)].format(c=c) + ("" if c.gamma == 1 else f", discounted by {c.gamma:g} a token")
    if c.whitened:
        return "(A_t − mean) / (std + 1e-08), ddof 1", f"{words}, whitened over the batch's tokens"
    return "A_t", words


CREDIT |= dict.fromkeys((TD, KStep, GAE, MonteCarlo), _valued)


def _clip(c: Any) -> str:
    return "ρ·δ" if c.low is None else f"min(ρ·δ, clip(ρ, {1 - c.low:g}, {1 + c.high:g})·δ)"


def _sequence(c: Any) -> tuple[str, str]:
    kind = "product of token ratios" if c.form == "product" else "length-normalised ratio"
    bounds = "never clipped" if c.low is None else f"clipped, {1 - c.low:g} to {1 + c.high:g}"
    return _clip(c) + ("/L_i" if c.form == "product" else ""), f"the response's {kind} ({bounds}) times"


SURROGATE: dict[type, Says] = {
    LogProb: lambda _: ("δ·logp", "log π times"),
    Ratio: lambda _: ("ρ·δ", "the ratio of new to old probability times"),
    Clipped: lambda c: (
        _clip(c) if c.dual is None else f"max({_clip(c)}, −{c.dual:g}·|δ|)",
        f"the clipped ratio ({1 - c.low:g} to {1 + c.high:g}"
        + ("" if c.dual is None else f"; where the credit is negative at least {c.dual:g} times it")
        + ") times",
    ),
    SequenceRatio: _sequence,
    Likelihood: lambda _: ("δ·logp", "log π of what was demonstrated"),
    **dict.fromkeys((Dpo, BradleyTerry, StepValue), lambda c: (shown.formula(c), "")),
    Cispo: lambda c: (
        f"sg[clip(ρ, {1 - c.low:g}, {1 + c.high:g})]·δ·logp",
        f"log π times the ratio as a constant (clipped, {1 - c.low:g} to {1 + c.high:g}) times",
    ),
}
WEIGHT: dict[type, tuple[str, str, str, str]] = {
    TokenMean: ("1/ΣL", "L_i/ΣL", "mean over tokens of", "length-weighted mean over responses of"),
    SequenceMean: ("1/(N·L_i)", "1/N", "mean over responses of the token mean of", "mean over responses of"),
    SequenceSum: ("1/N", "L_i/N", "mean over responses of the token sum of", "mean over responses of the length times"),
    FixedLength: (
        "1/(N·L_max)",
        "L_i/(N·L_max)",
        "mean over responses of the token sum over the length limit of",
        "mean over responses of the length over its limit times",
    ),
}
"""The weight of a token, the weight of a term of a whole response (the sum of its tokens'), and both in words."""
FACTOR: dict[type, Says] = {
    Truncated: lambda c: (
        f"min(w, {c.cap:g})·",
        f"weighted by how much likelier the trainer finds it, at most {c.cap:g}",
    ),
    Masked: lambda c: (
        f"w·1[{c.low:g} ≤ w ≤ {c.high:g}]·",
        f"weighted by how much likelier the trainer finds it, and by 0 outside {c.low:g} to {c.high:g}",
    ),
}
BONUS: dict[type, Says] = {
    Constant: lambda c: (f"{c.coef:g}·H", f"{c.coef:g} × the entropy"),
    Annealed: lambda c: (
        "c·H",
        f"c × the entropy, c falling from {c.start:g} to {c.end:g} over {c.until:.0%} of the run",
    ),
}
ANCHOR: dict[type, Says] = {
    Frozen: lambda _: ("the frozen start",),
    Every: lambda c: (f"the policy as it was at the last multiple of {c.n} steps",),
    MovingAverage: lambda c: (f"a moving average of the policy (rate {c.rate:g})",),
}
_GROUP = "over the G scored responses to the same prompt"
_STATES = (
    "V_t is the critic's value of the state before token t, 0 after the end; an outcome reward is on the last token; "
    "mean and std, where there are any, are over all unmasked tokens of the batch"
)
STATISTICS: dict[type, str] = {
    Centered: f"mean is {_GROUP}",
    LeaveOneOut: f"mean_others is {_GROUP}, without response i",
    Normalized: f"mean and std are {_GROUP}; where all are equal δ_i = 0",
    BestOnly: f"max is {_GROUP}",
    RunningMean: "b is 0 in the first step",
    Greedy: "R_greedy is the reward of one greedy response to the same prompt",
    OptimalBaseline: f"sums are {_GROUP}",
    BatchNormalized: "mean and std are over all unmasked tokens of the batch, R_t the reward from token t on",
    **dict.fromkeys((TD, KStep, GAE, MonteCarlo), _STATES),
}
UNBIASED = (Raw, LeaveOneOut, RunningMean, Greedy, OptimalBaseline)


def first_line(thing: Any) -> str:
    """The first line of a docstring, or nothing where dataclass or object wrote it."""
    doc = inspect.getdoc(thing) or ""
    written = not doc.startswith(f"{getattr(thing, '__name__', '')}(")
    return doc.splitlines()[0] if doc and written else "no description"


def said(table: dict[type, Any], choice: Any, *own: str) -> tuple[str, ...]:
    """What a table says of a choice; of a user's own, its name and the first line of its docstring."""
    if type(choice) in table:
        entry = table[type(choice)]
        return entry if isinstance(entry, tuple) else entry(choice)
    return tuple(text.format(name=type(choice).__name__, line=first_line(type(choice))) for text in own)


def _credit(algorithm: Algorithm) -> tuple[str, ...]:
    rhs, words = said(CREDIT, algorithm.advantage, "{name}(R)", "the credit of {name} ({line})")
    if isinstance(algorithm.kl, InReward) and algorithm.kl.per == "token":
        rhs = rhs.replace("R_i", "R_t")
    per_token = "R_t" in rhs or isinstance(algorithm.advantage, Valued)
    return f"{'δ_t' if per_token else 'δ_i'} = {rhs}", words


def _coef(kl: Any) -> str:
    return f"{kl.coef:g}" if kl.target is None else "β"


def formula(algorithm: Algorithm) -> str:
    """What is computed, on two or three lines: the reward if it is changed, δ (and ρ), and the objective."""
    kl, loss, lines = algorithm.kl, algorithm.loss, []
    if loss.data in ("pairs", "steps"):
        return shown.formula(loss)
    shaped = "" if isinstance(algorithm.shaping, NoShaping) else f" + {type(algorithm.shaping).__name__.lower()}(L_i)"
    if isinstance(kl, InReward) and kl.per == "token":
        lines.append(f"r_t ← r_t − {_coef(kl)}·{kl.estimator},  R_t = Σ_(u≥t) r_u")
        if shaped:
            lines[0] = f"R_i ← R_i{shaped} on the last token;  " + lines[0]
    elif isinstance(kl, InReward) or shaped:
        lines.append(f"R_i ← R_i{shaped}" + (f" − {_coef(kl)}·Σ_t {kl.estimator}" if isinstance(kl, InReward) else ""))
    if isinstance(algorithm.advantage, Valued):
        lines.append(_advantage(algorithm.advantage))
    factor = "" if isinstance(algorithm.correction, NoCorrection) else said(FACTOR, algorithm.correction, "{name}·")[0]
    main = factor + said(SURROGATE, loss, "{name}(logp, logp_old, δ)", "")[0]
    ratio = "ρ_t = exp(logp_t − logp_old_t)" if "ρ" in main else ""
    if isinstance(loss, SequenceRatio):
        ratio = f"ρ_i = exp({'Σ' if loss.form == 'product' else 'mean'}_t (logp_t − logp_old_t))"
    lines.append(_credit(algorithm)[0] + (f";   {ratio}" if ratio else ""))
    weight = said(WEIGHT, algorithm.weights, "weight_t", "Σ_t weight_t", "", "")
    terms = f" − {_coef(kl)}·{kl.estimator}" if kl.where == "loss" else ""
    if not isinstance(algorithm.exploration, NoBonus):
        terms += " + " + said(BONUS, algorithm.exploration, "{name}·H", "")[0]
    if loss.sequence:
        objective = f"Σ_i {weight[1]} · {main}" + (f" + Σ_i Σ_t {weight[0]} · [{terms} ]" if terms else "")
    else:
        objective = f"Σ_i Σ_t {weight[0]} · " + (f"[ {main}{terms} ]" if terms else main)
    return "\n".join([*lines, f"objective = {objective}"])


def _kl_words(algorithm: Algorithm) -> str:
    kl = algorithm.kl
    coef = f"{kl.coef:g}" if kl.target is None else f"β (from {kl.coef:g}, steered to a KL of {kl.target:g} a token)"
    anchor = said(ANCHOR, algorithm.reference, "the reference of {name} ({line})")[0]
    what = "the exact KL" if kl.estimator == "exact" else f"the {kl.estimator} estimate of the KL"
    return f"{coef} × {what} to {anchor}"


def objective_in_words(algorithm: Algorithm) -> str:
    """Two or three sentences: what is maximised, what the reward is, which samples count."""
    kl, loss = algorithm.kl, algorithm.loss
    if loss.data in ("pairs", "steps"):
        return shown.in_words(loss)
    weight = said(WEIGHT, algorithm.weights, "", "", *["sum, with the weights of {name} ({line}), of"] * 2)
    surrogate = said(SURROGATE, loss, "", "the surrogate of {name} ({line}) for")[1]
    credit = f" {_credit(algorithm)[1]}" if loss.data == "samples" else ""
    first = f"Maximise the {weight[3 if loss.sequence else 2]} {surrogate}{credit}"
    if kl.where == "loss":
        first += f", minus {_kl_words(algorithm)}"
    if not isinstance(algorithm.exploration, NoBonus):
        first += f", plus {said(BONUS, algorithm.exploration, '', 'the entropy bonus of {name} ({line})')[1]}"
    told, reward = [first], []
    if isinstance(algorithm.update, TrustRegion):
        told.append(f"A step keeps the KL to the policy that sampled within {algorithm.update.delta:g} nats a token")
    if not isinstance(algorithm.critic, NoCritic):
        where = "on the policy's backbone" if algorithm.critic.shared else "on a backbone of its own"
        told.append(f"The critic, {where}, is fitted to the returns by least squares")
    if kl.where == "reward":
        reward.append(
            f"has {_kl_words(algorithm)} taken off, {getattr(kl, 'per', 'token')} by {getattr(kl, 'per', 'token')}"
        )
    if isinstance(algorithm.shaping, Overlong):
        reward.append(f"falls by up to 1 over the last {algorithm.shaping.margin} tokens before the length limit")
    elif not isinstance(algorithm.shaping, NoShaping):
        reward += said({}, algorithm.shaping, "is shaped by {name} ({line})")
    if reward:
        told.append("The reward " + " and ".join(reward))
    if not isinstance(algorithm.correction, NoCorrection):
        each = "response" if getattr(algorithm.correction, "level", "token") == "sequence" else "token"
        told.append(f"Each {each} is {said(FACTOR, algorithm.correction, '', 'weighted by {name} ({line})')[1]}")
    if isinstance(algorithm.groups, WithSignal):
        told.append(
            f"Groups of equal rewards give way to new prompts, in at most {algorithm.groups.rounds} draws a step"
        )
    elif not isinstance(algorithm.groups, All):
        told += said({}, algorithm.groups, "Groups are chosen by {name} ({line})")
    return ". ".join(told) + "."


def verdict(algorithm: Algorithm) -> str:
    """Whether the first update on a fresh batch is along the true gradient, as the choices alone decide it."""
    kl = algorithm.kl
    goal = "∇E[R]" if isinstance(kl, NoKL) else "∇(E[R] − β·KL(π ‖ π_ref))"
    parts = (algorithm.advantage, algorithm.loss, algorithm.weights, kl, algorithm.groups, algorithm.exploration)
    own = [type(part).__name__ for part in parts if type(part) not in NOTES]
    if algorithm.loss.data != "samples" and not own:
        return NOTES[type(algorithm.loss)].bias
    if own:
        return f"Not known: {', '.join(own)} is not of this library. The exact oracle can tell."
    fine = isinstance(kl, NoKL) or (isinstance(kl, InReward) and kl.estimator == "k1")
    fine &= isinstance(algorithm.exploration, NoBonus) and isinstance(algorithm.groups, All)
    if fine and isinstance(algorithm.advantage, UNBIASED) and isinstance(algorithm.weights, SequenceSum):
        return f"Unbiased: on the policy's own samples the expected gradient is {goal} itself."
    credit = algorithm.advantage
    if fine and isinstance(credit, Valued) and isinstance(algorithm.weights, SequenceSum) and credit.gamma == 1:
        if isinstance(credit, MonteCarlo) and not (credit.whitened or credit.bootstrap):
            return f"Unbiased: on the policy's own samples the expected gradient is {goal} itself, whatever V is."
        if not (credit.whitened or credit.bootstrap):
            return f"As biased as V is wrong: with the exact V the expected gradient is {goal} itself. Axis by axis:"
    straight = isinstance(algorithm.weights, SequenceSum | FixedLength)
    if fine and straight and isinstance(algorithm.advantage, (*UNBIASED, Centered)):
        return f"Right direction: on the policy's own samples the expected gradient is {goal} times a constant."
    return f"Biased even on the policy's own samples: the expected gradient is not along {goal}. Axis by axis:"
