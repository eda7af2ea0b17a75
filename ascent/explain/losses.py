"""What is said of each loss: surrogates of the policy's own samples, then losses of demonstrations, pairs and steps."""

from __future__ import annotations

from typing import Any

from ascent.core import losses, preferences
from ascent.explain.about import About

TOKEN_RATIO = "ρ_t = exp(logp_t − logp_old_t)"
NOT_SAMPLED = "Not a policy gradient, because nothing is sampled. "
ONE_PER_PAIR = " The one term of a pair takes the sum of its responses' weights, which is 1/pairs."
CHOSEN = "w is the chosen and l the rejected response to a prompt"


def _clip(c: Any) -> str:
    return "ρ·δ" if c.low is None else f"min(ρ·δ, clip(ρ, {1 - c.low:g}, {1 + c.high:g})·δ)"


def _clipped_words(c: Any) -> str:
    dual = "" if c.dual is None else f"; where the credit is negative at least {c.dual:g} times it"
    return f"the clipped ratio ({1 - c.low:g} to {1 + c.high:g}{dual}) times"


def _sequence_words(c: Any) -> str:
    kind = "product of token ratios" if c.form == "product" else "length-normalised ratio"
    bounds = "never clipped" if c.low is None else f"clipped, {1 - c.low:g} to {1 + c.high:g}"
    return f"the response's {kind} ({bounds}) times"


ABOUT_LOSSES: dict[type, About] = {
    losses.LogProb: About(
        formula="δ·logp",
        words="log π times",
        label="log-prob (naive)",
        bias="None on fresh samples. Later updates on the same batch do not correct for the policy having moved: at a "
        "KL of 0.03 about 27 % of the gradient is bias.",
        trl="none by name; at one update per batch ρ = 1, and the clipped loss has this gradient.",
        verl='loss_mode "gpg" is −δ·log π.',
    ),
    losses.Ratio: About(
        formula="ρ·δ",
        definitions=TOKEN_RATIO,
        words="the ratio of new to old probability times",
        label="ratio, never clipped",
        bias="None at ρ = 1. After that a token ratio ignores that earlier tokens came from the old policy: at a KL of "
        "0.03 27 % of the gradient is bias, as much as with no ratio at all.",
        trl="not alone: its losses clip the ratio or gate it.",
        verl='not alone: "vanilla" clips; "kl_cov" leaves it unclipped but adds a KL on some tokens.',
    ),
    losses.Clipped: About(
        formula=lambda c: _clip(c) if c.dual is None else f"max({_clip(c)}, −{c.dual:g}·|δ|)",
        definitions=TOKEN_RATIO,
        words=_clipped_words,
        label="clipped ratio (PPO, GRPO)",
        bias="None at ρ = 1. After that the same as the token ratio (27 % at a KL of 0.03); where the clip is active "
        "the gradient is 0.",
        trl="ε 0.2 both ways; the optional `delta` caps ρ before the minimum, for δ < 0 a dual clip.",
        verl="ε 0.2 both ways, and a dual clip at 3 that is always on; log ρ is clamped to ±20.",
    ),
    losses.SequenceRatio: About(
        formula=lambda c: _clip(c) + ("/L_i" if c.form == "product" else ""),
        definitions=lambda c: f"ρ_i = exp({'Σ' if c.form == 'product' else 'mean'}_t (logp_t − logp_old_t))",
        words=_sequence_words,
        label="sequence ratio (GSPO)",
        denominator=" The one term of a response takes the sum of its tokens' weights.",
        bias="Length-normalised: after the first update 17 % of the gradient at a KL of 0.03. The product is exact "
        "while unclipped, but its variance grows with length. With sequence-sum the first update of either form is "
        "along ∇E[R].",
        trl='importance_sampling_level="sequence" is the length-normalised form, ε 0.2 unless set; RLOOTrainer has the '
        "product, clipped at 0.2.",
        verl='loss_mode "gspo": length-normalised, with the gradient taken token by token; ε 0.2 unless set.',
    ),
    losses.Cispo: About(
        formula=lambda c: f"sg[clip(ρ, {1 - c.low:g}, {1 + c.high:g})]·δ·logp",
        definitions=TOKEN_RATIO,
        words=lambda c: f"log π times the ratio as a constant (clipped, {1 - c.low:g} to {1 + c.high:g}) times",
        label="CISPO",
        bias="None at ρ = 1. After that as the token ratio, with weights clipped; every token keeps its gradient.",
        trl="min(ρ, epsilon_high): the bound is epsilon_high itself, so 5 there is high=4 here; unset it is 0.2.",
        verl="clip(ρ, 1−ε_low, 1+ε_high), both 0.2 unless set, so with a lower bound.",
    ),
    preferences.Likelihood: About(
        formula="δ·logp",
        statistics="R_i = 1 for every demonstration",
        words="log π of what was demonstrated",
        bias=NOT_SAMPLED + "The gradient is that of −KL(demonstrator ‖ π), so π converges to the demonstrator.",
        trl='SFTTrainer with loss_type="nll" and completion_only_loss: the token mean over the optimizer step.',
        verl="has an SFT trainer, which was not read.",
    ),
    preferences.Dpo: About(
        formula=lambda c: (
            f"[ {1 - c.smoothing:g}·log σ(m) + {c.smoothing:g}·log σ(−m) ]" if c.smoothing else "log σ(m)"
        ),
        definitions="Δ_i = Σ_t (logp_t − logp_ref_t);   m = {beta:g}·(Δ_w − Δ_l)",
        statistics=f"{CHOSEN}; Δ is over all of its tokens, the end token included",
        words=lambda c: (
            f"Maximise the mean over pairs of log σ({c.beta:g} × how much more the chosen response gained in "
            "log-probability over the reference than the rejected one)"
            + (f", {c.smoothing:.0%} of the labels taken to be wrong" if c.smoothing else "")
        ),
        denominator=ONE_PER_PAIR,
        bias=NOT_SAMPLED + "The optimum is that of E[R] − β·KL(π ‖ π_ref) if pairs follow Bradley–Terry with this R "
        "and cover what π may say; on finitely many pairs the log-ratios grow without bound.",
        trl='DPOTrainer with loss_type="sigmoid": the same. There only other loss types read label_smoothing, such as '
        '"robust" (which divides by 1 − 2ε); here it is cDPO\'s.',
    ),
    preferences.BradleyTerry: About(
        formula=lambda c: f"[ log σ(m) − {c.center:g}·(r_w + r_l)² ]" if c.center else "log σ(m)",
        definitions="m = r_w − r_l",
        statistics=f"r is the head's value after the last token; {CHOSEN}",
        words=lambda c: (
            "Maximise the mean over pairs of log σ(reward of the chosen − reward of the rejected response)"
            + (f", minus {c.center:g} × the square of their sum" if c.center else "")
        ),
        denominator=ONE_PER_PAIR,
        bias=NOT_SAMPLED + "It is a maximum likelihood fit, and only as good as its pairs. Away from those pairs it "
        "extrapolates, and a policy trained on it will exploit that.",
        trl="RewardTrainer: the same, with center_rewards_coefficient for c, and with a margin per pair where the data "
        "has one, which is not read here. Its head starts at random and is read at the last token; ours starts at 0.",
        verl="none: it takes a trained reward model.",
    ),
    preferences.StepValue: About(
        formula="−Σ_i Σ_t w · ½ (v_t − y_t)²",
        statistics="w is the weight of a token, v_t the head's value after it, y_t the label of the token's step",
        words="Minimise half the squared distance between the score after each token and the label of its step",
        bias=NOT_SAMPLED + "The optimum is the mean label given the tokens so far. With labels from k rollouts it is "
        "the value function of the policy that made them, for any k, and not of a later policy.",
        trl="none in 1.16.",
        others="papers mostly have a cross-entropy of two classes at the last token of each step; here it is a squared "
        "error at every token of the step, because any number can be a label.",
    ),
}
