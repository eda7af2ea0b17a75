"""The explanation of every choice, axis by axis."""

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

from ascent.core import (
    advantages,
    correction,
    critics,
    exploration,
    groups,
    kl,
    losses,
    preferences,
    reference,
    update,
    values,
    weights,
)
from ascent.explain.about import OFF, About, Gradient, fill
from ascent.explain.latex import unicode_of

GROUP = "over the G scored responses to the same prompt"
TOKEN_RATIO = r"\rho_t = \exp(\text{logp}_t - \text{logp\_old}_t)"
PREFIX_RATIO = r"\rho_t = \exp(\sum_{u\le{t}} (\text{logp}_u - \text{logp\_old}_u))"
W_T = r"\exp(\text{logp\_old}_t - \text{logp\_sampler}_t)\cdot{m_t}"
ONE_PER_PAIR = " The one term of a pair takes the sum of its responses' weights, which is 1/pairs."
CHOSEN = "$w$ is the chosen and $l$ the rejected response to a prompt"
LOG_RATIO = r"$\ell = \log \pi - \log \pi_{\text{ref}}$"
DDOF = r"\text{ddof }"
TOOL_COUNT_NAMES = "counted over the mini-batch of one optimizer step, however it is split into micro-batches"


def _from_critic(
    total: str, words: str, gradient: Gradient = "critic", more: str = "", trace: str = "", **texts: Any
) -> About:
    """Return the About of an advantage from a critic: a sum of TD errors, maybe discounted and whitened."""

    def filled(text: str, c: Any) -> str:
        return fill(text, vars(c) | {"decay": c.gamma * c.lam})

    def definitions(c: Any) -> str:
        discount = "" if c.gamma == 1 else rf"{c.gamma:g}\cdot"
        error = rf"\delta_t = r_t + {discount}{{V_{{t+1}}}} - V_t"
        terms = [error] + [filled(trace, c)] * bool(trace)
        return r";\quad ".join(terms + [rf"\hat{{A}}_t = {filled(total, c)}"] * c.whitened)

    def in_words(c: Any) -> str:
        discounted = "" if c.gamma == 1 else f", discounted by {c.gamma:g} per token"
        return words.format_map(vars(c)) + discounted + (", whitened over the batch's tokens" if c.whitened else "")

    whitened = rf"\frac{{\hat{{A}}_t - \text{{mean}}}}{{\text{{std}} + 1e-08}}, {DDOF}1"
    return About(
        formula=lambda c: whitened if c.whitened else filled(total, c),
        definitions=definitions,
        statistics="$V_t$ is the critic's value of the state before token $t$, 0 after the end; an outcome reward "
        "is on the last token; mean and std, where there are any, are over all unmasked tokens of the batch" + more,
        words=in_words,
        gradient=lambda c: "other" if c.gamma != 1 or c.whitened or c.bootstrap else gradient,
        **{"trl": "none: TRL 1.16 has no critic."} | texts,
    )


def _bounded(c: Any) -> str:
    return rf"\operatorname{{clip}}(\rho, {1 - c.low:g}, {1 + c.high:g})"


def _clip(c: Any) -> str:
    if c.low is None:
        return r"\rho\cdot{A}"
    return rf"\min(\rho\cdot{{A}}, {_bounded(c)}\cdot{{A}})"


def _clipped_words(c: Any) -> str:
    dual = "" if c.dual is None else f"; where the advantage is negative at least {c.dual:g} times it"
    return f"the clipped ratio ({1 - c.low:g} to {1 + c.high:g}{dual}) times"


def _sequence_words(c: Any) -> str:
    kind = "product of token ratios" if c.form == "product" else "length-normalized ratio"
    bounds = "never clipped" if c.low is None else f"clipped, {1 - c.low:g} to {1 + c.high:g}"
    return f"the response's {kind} ({bounds}) times"


class Estimator(NamedTuple):
    """An estimator of KL(π ‖ π_ref), and what its gradient is on the policy's own samples."""

    formula: str
    loss: str
    """Its gradient as a penalty in the loss."""
    reward: str
    """Its gradient as a penalty in the reward."""


ABOUT_ESTIMATORS = {
    "k1": Estimator(
        r"$\ell$",
        loss="its expected gradient is 0: the penalty only adds noise",
        reward="its gradient is exactly −β ∇KL(π ‖ π_ref), at any length: use this one in the reward",
    ),
    "abs": Estimator(
        r"$|\ell|$",
        loss="its gradient is that of Σ_v |π(v) − π_ref(v)| at each visited state, held fixed",
        reward="its gradient is not the KL's; it can even raise the KL",
    ),
    "k2": Estimator(
        r"$\tfrac{1}{2} \ell^2$",
        loss="its gradient is ∇KL(π ‖ π_ref) for one token or a whole response; per token on an autoregressive "
        "policy it misses what a token does to the KL of later ones and is 4.6 % off",
        reward="its gradient is not the KL's; it can even raise the KL (cosine with ∇KL −0.34)",
    ),
    "k3": Estimator(
        r"$e^{-\ell} + \ell - 1$",
        loss="its gradient is that of the other direction, ∇KL(π_ref ‖ π), for one token or a whole response; per "
        "token on an autoregressive policy it is 30 % off even that",
        reward="its gradient is not the KL's; it can even raise the KL (cosine with ∇KL −0.55)",
    ),
    "exact": Estimator(
        r"$\sum_v \pi(v)\cdot(\log \pi(v) - \log \pi_{\text{ref}}(v))$, over the whole vocabulary at each state",
        loss="its gradient is ∇KL(π ‖ π_ref) at each visited state, held fixed; on an autoregressive policy it is "
        "4.6 % off",
        reward="its gradient is not the KL's; it can even raise the KL (cosine with ∇KL −0.36)",
    ),
}


def coefficient(c: Any) -> str:
    """β of a penalty in a formula: its number, or the letter if it is adaptive; times ρ with `importance`."""
    return (f"{c.coef:g}" if c.target is None else r"\beta") + (r"\cdot\rho" if c.importance else "")


def _statistics(c: Any) -> str:
    estimate = f"{c.estimator} = {ABOUT_ESTIMATORS[c.estimator].formula}, with {LOG_RATIO}"
    if c.target is None:
        return estimate
    return f"{estimate}\n{str(inspect.getdoc(kl.adapt)).rstrip('.')}, from {c.coef:g}, with the target {c.target:g}"


def _words(c: Any) -> str:
    steered = "" if c.target is None else f" (from {c.coef:g}, steered to a KL of {c.target:g} per token)"
    estimate = "the exact KL" if c.estimator == "exact" else f"the {c.estimator} estimate of the KL"
    return f"{unicode_of(coefficient(c))}{steered} × {estimate}"


def _importance(c: Any) -> str:
    product, over = ("", "tokens") if c.level == "token" else (r"\prod_t ", "responses")
    mean = f"\n$\\text{{mean}}_w$ is over the {over} of the rollout batch" if c.normalized else ""
    outside = "\nresponses whose weights per token have a geometric mean outside 1/g to g are not trained on, g = "
    return rf"$w = {product}{W_T}$" + mean + (f"{outside}{c.geometric:g}" if c.geometric is not None else "")


def _weight(c: Any, w: str) -> str:
    return (rf"\frac{{{w}}}{{\text{{mean}}_w}}" if c.normalized else w) + r"\cdot{}"


ABOUTS: dict[type, About] = {
    advantages.Raw: About(
        formula="R_i",
        words="the reward",
        label="raw reward",
        gradient="exact",
        trl="no such advantage: GRPOTrainer and RLOOTrainer both subtract a group's mean.",
        verl="no such estimator is registered.",
    ),
    advantages.Centered: About(
        formula=r"R_i - \text{mean}",
        statistics=f"mean is {GROUP}",
        words="the reward minus its group's mean",
        label="group mean (centered)",
        gradient="scaled",
        trl='GRPOTrainer with scale_rewards="none".',
        verl="grpo with norm_adv_by_std_in_grpo=False; a group of one keeps its raw reward (here 0).",
    ),
    advantages.LeaveOneOut: About(
        formula=r"R_i - \text{mean}_{\text{others}}",
        statistics=rf"$\text{{mean}}_{{\text{{others}}}}$ is {GROUP}, without response $i$",
        words="the reward minus the mean of its group's other responses",
        label="mean of the others (RLOO)",
        gradient="exact",
        trl="RLOOTrainer's baseline; a group with one scored response gives 0, as here.",
        verl="rloo: the same, but a group of one keeps its raw reward; rloo_vectorized gives 0.",
    ),
    advantages.Normalized: About(
        formula=r"\frac{R_i - \text{mean}}{\text{std} + {eps:g}}, " + DDOF + "{ddof}",
        statistics=f"mean and std are {GROUP}; where all are equal $A_i = 0$",
        words="the reward normalized within its group of responses (std + {eps:g})",
        label="mean and std (GRPO)",
        paper="Shao et al. divide by std and name neither ε nor ddof.",
        trl='std + 1e-4, ddof 1, per group; scale_rewards="batch" takes the batch\'s std, "none" leaves it out.',
        verl="std + 1e-6, ddof 1; a group of one keeps its raw reward (here 0).",
        others="OpenRLHF adds 1e-9; open-instruct has ddof 0.",
    ),
    advantages.BestOnly: About(
        formula=r"R_i\text{ where }R_i = \max_j R_j,\text{ else }0",
        statistics=f"max is {GROUP}",
        words="the reward, kept only by the best of its group",
        label="best of the group only",
        verl="grpo_passk is similar: only the best response has an advantage, best minus second best (over std).",
    ),
    advantages.RunningMean: About(
        formula=lambda c: (
            rf"R_i - b,\quad\text{{then }}b \gets {c.momentum:g}\cdot{{b}} + {1 - c.momentum:g}"
            r"\cdot(\text{the step's mean reward})"
        ),
        statistics="$b$ is 0 in the first step",
        words="the reward minus its running mean (momentum {momentum:g})",
        label="running mean",
        gradient="exact",
    ),
    advantages.Greedy: About(
        formula=r"R_i - R_{\text{greedy}}",
        statistics=r"$R_{\text{greedy}}$ is the reward of one greedy response to the same prompt",
        words="the reward minus that of a greedy response to the same prompt",
        label="greedy response (ReMax)",
        gradient="exact",
        verl="remax: reward-to-go minus the greedy response's reward, the same for an outcome reward.",
    ),
    advantages.OptimalBaseline: About(
        formula=lambda c: (
            r"R_i - \frac{\sum_{j\ne{i}} n_j\cdot{R_j}}{\sum_{j\ne{i}} n_j},\quad{n_j} = "
            + (r"\Vert\nabla\log \pi_j\Vert^2" if c.norm == "exact" else "L_j")
        ),
        statistics=f"sums are {GROUP}",
        words="the reward minus the baseline of least variance, estimated from its group's other responses",
        label="optimal, from the others",
        gradient="exact",
        paper="OPO's b is the length-weighted mean reward of the whole group, response i included: slightly biased.",
        verl="opo: as the paper; a group of one keeps its raw reward.",
    ),
    advantages.ByTurn: About(
        formula=r"R_t - \text{others}_k",
        statistics="others_k is the mean, over the group's other responses, of what they earned from turn k on, k the "
        "turn of token t; one that has ended counts as 0",
        words="the reward from here on minus what the group's other responses earned from the same turn on",
        label="others, turn by turn",
        gradient="exact",
        others="Code for multi-turn GRPO often takes, at each turn, the mean (and std) over only those responses that "
        "reached it. Whether a response gets there depends on its own actions, so that baseline is biased: by 10 to "
        "24 % of the gradient on small worlds that can be enumerated (lesson 15), beside the share that any mean "
        "takes off which includes the response itself.",
    ),
    advantages.BatchNormalized: About(
        formula=r"\frac{R_t - \text{mean}}{\text{std} + {eps:g}}, " + DDOF + "1",
        statistics="mean and std are over all unmasked tokens of the batch, $R_t$ the reward from token $t$ on",
        words="the reward-to-go normalized over all tokens of the batch (std + {eps:g})",
        label="over the batch (REINFORCE++)",
        trl="none per token; RLOOTrainer's normalize_advantages whitens responses over the batch (std + 1e-4).",
        verl="reinforce_plus_plus: over √(var + 1e-8), ddof 1, over the unmasked tokens of the batch.",
    ),
    values.TD: _from_critic(r"\delta_t", "the one-step TD error of a critic", verl="gae with lam=0."),
    values.KStep: _from_critic(r"\sum_{j<{k}} {gamma:g}^j\cdot{\delta_{t+j}}", "the {k}-step advantage of a critic"),
    values.GAE: _from_critic(
        r"\sum_{j\ge0} {decay:g}^j\cdot{\delta_{t+j}}",
        "the generalized advantage (λ {lam:g}) of a critic",
        label="GAE(0.95), own critic",
        verl="gae: γ 1, λ 1 unless set, always whitened (ddof 1, + 1e-8 under the root).",
        paper="Schulman et al. 2016: the same, not whitened.",
    ),
    values.MonteCarlo: _from_critic(
        r"\sum_{j\ge0} {decay:g}^j\cdot{\delta_{t+j}}",
        "the return minus a critic's value",
        gradient="exact",
        verl="gae with lam=1, its default.",
    ),
    values.VTrace: _from_critic(
        r"\delta_t + {decay:g}\cdot{e_{t+1}}",
        "the V-trace advantage (λ {lam:g}, weights up to {rho:g} and {c:g}) of a critic",
        trace=r"e_t = \min(w_t, {rho:g})\cdot{\delta_t} + {decay:g}\cdot\min(w_t, {c:g})\cdot{e_{t+1}}",
        more=rf"; $w_t = {W_T}$, $e_t$ is the return minus $V_t$",
        paper="Espeholt et al. 2018: λ 1, both bounds 1, and min(w, ρ̄) on the gradient too: --correction truncated.",
    ),
    losses.LogProb: About(
        formula=r"A\cdot\text{logp}",
        words="log π times",
        label="log-prob (naive)",
        trl="none by name; at one update per batch ρ = 1, and the clipped loss has this gradient.",
        verl='loss_mode "gpg" is −A·log π.',
    ),
    losses.Ratio: About(
        formula=lambda c: r"\rho\cdot{A}" if c.form == "token" else r"(\rho_t - \rho_{t-1})\cdot{A}",
        definitions=lambda c: TOKEN_RATIO if c.form == "token" else PREFIX_RATIO,
        words=lambda c: (
            f"the ratio of new to old probability{'' if c.form == 'token' else ', up to each token,'} times"
        ),
        label="ratio, never clipped",
        trl="not alone: its losses clip the ratio or gate it.",
        verl='not alone: "vanilla" clips; "kl_cov" leaves it unclipped but adds a KL on some tokens.',
    ),
    losses.Clipped: About(
        formula=lambda c: _clip(c) if c.dual is None else rf"\max({_clip(c)}, -{c.dual:g}\cdot|A|)",
        definitions=TOKEN_RATIO,
        words=_clipped_words,
        label="clipped ratio (PPO, GRPO)",
        trl="ε 0.2 both ways; the optional `delta` caps ρ before the minimum, for A < 0 a dual clip.",
        verl="ε 0.2 both ways, and a dual clip at 3 that is always on; log ρ is clamped to ±20.",
    ),
    losses.SequenceRatio: About(
        formula=lambda c: _clip(c) + ("/L_i" if c.form == "product" else ""),
        definitions=lambda c: (
            r"\rho_i = \exp(" + (r"\sum" if c.form == "product" else r"\text{mean}") + "_t "
            r"(\text{logp}_t - \text{logp\_old}_t))"
        ),
        words=_sequence_words,
        label="sequence ratio (GSPO)",
        denominator=" The one term of a response takes the sum of its tokens' weights.",
        trl='importance_sampling_level="sequence" is the length-normalized form, ε 0.2 unless set; RLOOTrainer has the '
        "product, clipped at 0.2.",
        verl='loss_mode "gspo": length-normalized, always in the form for one A per token; ε 0.2 unless set.',
    ),
    losses.Cispo: About(
        formula=lambda c: rf"\operatorname{{sg}}[{_bounded(c)}]\cdot{{A}}\cdot\text{{logp}}",
        definitions=TOKEN_RATIO,
        words=lambda c: f"log π times the ratio as a constant (clipped, {1 - c.low:g} to {1 + c.high:g}) times",
        label="CISPO",
        trl="min(ρ, epsilon_high): the bound is epsilon_high itself, so 5 there is high=4 here; unset it is 0.2.",
        verl="clip(ρ, 1−ε_low, 1+ε_high), both 0.2 unless set, so with a lower bound.",
    ),
    preferences.Likelihood: About(
        formula=r"A\cdot\text{logp}",
        statistics="$R_i = 1$ for every demonstration",
        words="log π of what was demonstrated",
        trl='SFTTrainer with loss_type="nll" and completion_only_loss: the token mean over the optimizer step.',
        verl="has an SFT trainer, which was not read.",
    ),
    preferences.Dpo: About(
        formula=lambda c: (
            rf"[ {1 - c.smoothing:g}\cdot\log \sigma(m) + {c.smoothing:g}\cdot\log \sigma(-m) ]"
            if c.smoothing
            else r"\log \sigma(m)"
        ),
        definitions=r"\Delta_i = \sum_t (\text{logp}_t - \text{logp\_ref}_t);\quad "
        r"m = {beta:g}\cdot(\Delta_w - \Delta_l)",
        statistics=rf"{CHOSEN}; $\Delta$ is over all of its tokens, the end token included",
        words=lambda c: (
            f"Maximize the mean over pairs of log σ({c.beta:g} × how much more the chosen response gained in "
            "log-probability over the reference than the rejected one)"
            + (f", {c.smoothing:.0%} of the labels taken to be wrong" if c.smoothing else "")
        ),
        denominator=ONE_PER_PAIR,
        trl='DPOTrainer with loss_type="sigmoid": the same. There only other loss types read label_smoothing, such as '
        '"robust" (which divides by 1 − 2ε); here it is cDPO\'s.',
    ),
    preferences.BradleyTerry: About(
        formula=lambda c: rf"[ \log \sigma(m) - {c.center:g}\cdot(r_w + r_l)^2 ]" if c.center else r"\log \sigma(m)",
        definitions="m = r_w - r_l",
        statistics=f"$r$ is the head's value after the last token; {CHOSEN}",
        words=lambda c: (
            "Maximize the mean over pairs of log σ(reward of the chosen − reward of the rejected response)"
            + (f", minus {c.center:g} × the square of their sum" if c.center else "")
        ),
        denominator=ONE_PER_PAIR,
        trl="RewardTrainer: the same, with center_rewards_coefficient for c, and with a margin per pair where the data "
        "has one, which is not read here. Its head starts at random and is read at the last token; ours starts at 0.",
        verl="none: it takes a trained reward model.",
    ),
    preferences.StepValue: About(
        formula=r"-\sum_i \sum_t w\,\cdot\,\tfrac{1}{2} (v_t - y_t)^2",
        statistics="$w$ is the weight of a token, $v_t$ the head's value after it, $y_t$ the label of the token's step",
        words="Minimise half the squared distance between the score after each token and the label of its step",
        trl="none in 1.16.",
        others="papers mostly have a cross-entropy of two classes at the last token of each step; here it is a squared "
        "error at every token of the step, because any number can be a label.",
    ),
    weights.TokenMean: About(
        formula=r"\frac{1}{\sum{L}}",
        response_formula=r"\frac{L_i}{\sum{L}}",
        words="mean over tokens of",
        response_words="length-weighted mean over responses of",
        denominator=f"ΣL, the unmasked tokens of all scored responses, {TOOL_COUNT_NAMES}.",
        trl='loss_type="dapo" (the default): tokens of the whole generation batch; "bnpo": of the local micro-batch.',
        verl="token-mean (the default), over the tokens of the global mini-batch.",
    ),
    weights.SequenceMean: About(
        formula=r"\frac{1}{N\cdot{L_i}}",
        response_formula=r"\frac{1}{N}",
        words="mean over responses of the token mean of",
        response_words="mean over responses of",
        denominator=f"N responses, and for each its own L_i unmasked tokens; N is {TOOL_COUNT_NAMES}.",
        trl='loss_type="grpo"; the mean is taken in each micro-batch, so their sizes matter.',
        verl="seq-mean-token-mean.",
    ),
    weights.SequenceSum: About(
        formula=r"\frac{1}{N}",
        response_formula=r"\frac{L_i}{N}",
        words="mean over responses of the token sum of",
        response_words="mean over responses of the length times",
        denominator=f"N, the scored responses, {TOOL_COUNT_NAMES}. No length divides.",
        gradient="exact",
        trl='loss_type="luspo" sums tokens and averages responses.',
        verl="seq-mean-token-sum.",
    ),
    weights.FixedLength: About(
        formula=r"\frac{1}{N\cdot{L_{\max}}}",
        response_formula=r"\frac{L_i}{N\cdot{L_{\max}}}",
        words="mean over responses of the token sum over the length limit of",
        response_words="mean over responses of the length over its limit times",
        denominator="N responses times L_max, the generation limit (never the padded width, and one for all rows, even "
        f"where --limit-column gives them limits of their own); N is {TOOL_COUNT_NAMES}.",
        gradient="scaled",
        trl='loss_type="dr_grpo", over max_completion_length.',
        verl="seq-mean-token-sum-norm, over loss_scale_factor; that is unset by default, and then the padded width.",
    ),
    kl.NoKL: replace(OFF, trl="GRPOTrainer's default (beta=0)."),
    kl.InLoss: About(
        formula=lambda c: rf"{coefficient(c)}\cdot\text{{{c.estimator}}}",
        statistics=_statistics,
        words=_words,
        trl="k3 with `importance` by default (use_bias_correction_kl): at ρ = 1 that has k2's gradient. beta is 0.",
        verl="use_kl_loss, off by default; 0.001; k1, abs, k2 (mse) or k3 clamped to ±10 (low_var_kl); no ρ, but `k3+` "
        "has k3's value and k2's gradient.",
    ),
    kl.InReward: About(
        formula=lambda c: (
            rf"{coefficient(c)}\cdot" + (r"\sum_t " if c.per == "response" else "") + rf"\text{{{c.estimator}}}"
        ),
        statistics=_statistics,
        words=_words,
        gradient=lambda c: "exact" if c.estimator == "k1" else "other",
        trl="RLOOTrainer: k1 summed over the response, 0.05, fixed.",
        verl="use_kl_in_reward, off by default; k1 per token, 0.001; adapted by batch size / 10000 (here 0.1).",
    ),
    reference.NoReference: replace(OFF, trl="none is loaded at beta=0.", verl=""),
    reference.Frozen: About(words="the frozen start", trl="the default with beta > 0.", verl="the reference model."),
    reference.Every: About(
        words="the policy as it was at the last multiple of {n} steps",
        trl="sync_ref_model with ref_model_mixup_alpha=1 and ref_model_sync_steps=n; by default 0.6 every 512 steps.",
        verl="none in its settings.",
        paper="iterative GRPO renews the reference in its outer loop.",
    ),
    reference.MovingAverage: About(
        words="a moving average of the policy (rate {rate:g})",
        trl="sync_ref_model with ref_model_sync_steps=1; its alpha is the rate here.",
        verl="none in its settings.",
    ),
    exploration.NoBonus: OFF,
    exploration.Constant: About(
        formula=r"{coef:g}\cdot{H}",
        words="{coef:g} × the entropy",
        trl="entropy_coef, times the token mean of the entropy whatever the loss_type.",
        verl="entropy_coeff, aggregated as the loss is.",
    ),
    exploration.Annealed: About(
        formula=r"c\cdot{H}",
        statistics=r"$c = {start:g} + ({end:g} - {start:g}) \cdot \min(1, p / {until:g})$, "
        "$p$ from 0 to 1 over the run",
        words="c × the entropy, c falling from {start:g} to {end:g} over {until:.0%} of the run",
        trl="none; use_adaptive_entropy steers the coefficient to a target entropy instead.",
    ),
    correction.NoCorrection: replace(OFF, trl="", verl="the default (rollout_is null)."),
    correction.Truncated: About(
        formula=lambda c: _weight(c, rf"\max({c.floor:g}, \min(w, {c.cap:g}))" if c.floor else rf"\min(w, {c.cap:g})"),
        statistics=_importance,
        words="weighted by how much likelier the trainer finds it, at most {cap:g}",
        trl="with vLLM: token_truncate or sequence_truncate, up to 3.0; clip_min is `floor`. No mean, no rejection.",
        verl="rollout_is token or sequence, up to 2.0, no floor; rollout_is_batch_normalize is `normalized`, and "
        "rollout_rs=seq_mean_k1 is `geometric`, there with any two bounds.",
    ),
    correction.Masked: About(
        formula=lambda c: _weight(c, rf"w\cdot\mathbf{{1}}[{c.low:g} \le w \le {c.high:g}]"),
        statistics=_importance,
        words="weighted by how much likelier the trainer finds it, and by 0 outside {low:g} to {high:g}",
        trl="with vLLM the default: sequence_mask, 0 where the response's weight exceeds 3.0, no lower bound.",
        verl='a threshold "low_high" sets weights outside the band to 0.',
    ),
    groups.All: replace(OFF, trl="always; mask_truncated_completions masks, but N stays.", verl="always; masks none."),
    groups.WithSignal: About(
        words="Groups of equal rewards are replaced by new prompts, in at most {rounds} draws per step",
        trl="none in GRPOTrainer.",
        verl="algorithm.filter_groups, off by default, on a metric of choice; draws are not limited unless set.",
    ),
    groups.NoShaping: OFF,
    groups.Overlong: About(
        formula=r"\operatorname{overlong}(L_i)",
        statistics=r"overlong: with the response's limit $L$ and $c = {margin}$: 0 up to $L - c$ drawn tokens, then "
        r"$(L - c - \text{length})/c$, $-1$ if truncated",
        words="falls by up to 1 over the last {margin} tokens before the length limit",
        trl="a reward function, get_soft_overlong_punishment.",
        verl="the DAPO reward manager's overlong_buffer, times a penalty_factor.",
    ),
    critics.NoCritic: replace(OFF, trl="GRPOTrainer and RLOOTrainer.", verl="every estimator except gae."),
    critics.OwnCritic: About(
        words="The critic, on a backbone of its own, is fitted to the returns by least squares",
        trl="none: TRL 1.16 has no critic.",
        verl="a separate critic: ½·max of both squares, cliprange_value 0.5, learning rate 1e-5.",
    ),
    critics.SharedCritic: About(
        words="The critic, on the policy's backbone, is fitted to the returns by least squares, "
        "with {coef:g} times its loss taken off the objective",
        trl="none: TRL 1.16 has no critic.",
        verl="none: the critic is a separate worker.",
    ),
    update.Adam: About(
        trl="learning rate 1e-6.", verl="learning rate 1e-6, weight decay 0.01, gradient norm at most 1."
    ),
    update.TrustRegion: About(
        words="A step keeps the KL to the policy that sampled within {delta:g} nats per token",
        paper="Schulman et al. 2015: the same; the line search there also tests KL and gain.",
        others="none of the language-model trainers we looked at has one.",
    ),
}
