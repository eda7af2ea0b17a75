"""What is said of each credit: of a group, of the batch, and from a critic."""

from __future__ import annotations

from typing import Any

from ascent.core import advantages, values
from ascent.explain.about import About, Gradient

GROUP = "over the G scored responses to the same prompt"


def _from_critic(total: str, words: str, bias: str, gradient: Gradient = "critic", **texts: Any) -> About:
    """A credit from a critic: a sum of TD errors, discounted or not, whitened or not."""

    def definitions(c: Any) -> str:
        discount = "" if c.gamma == 1 else f"{c.gamma:g}·"
        sums = total.format(**vars(c) | {"decay": c.gamma * c.lam})
        return f"d_t = r_t + {discount}V_(t+1) − V_t;   A_t = {sums}"

    def in_words(c: Any) -> str:
        discounted = "" if c.gamma == 1 else f", discounted by {c.gamma:g} per token"
        return words.format_map(vars(c)) + discounted + (", whitened over the batch's tokens" if c.whitened else "")

    return About(
        formula=lambda c: "(A_t − mean) / (std + 1e-08), ddof 1" if c.whitened else "A_t",
        definitions=definitions,
        statistics="V_t is the critic's value of the state before token t, 0 after the end; an outcome reward is on "
        "the last token; mean and std, where there are any, are over all unmasked tokens of the batch",
        words=in_words,
        gradient=lambda c: "other" if c.gamma != 1 or c.whitened or c.bootstrap else gradient,
        bias=f"{bias} Whitening adds a bias in scale, and one from the shift, which includes the sample itself.",
        **{"trl": "none: TRL 1.16 has no critic."} | texts,
    )


ABOUT_ADVANTAGES: dict[type, About] = {
    advantages.Raw: About(
        formula="R_i",
        words="the reward",
        label="raw reward",
        gradient="exact",
        bias="None: E[R ∇log π] is ∇E[R]. The price is variance.",
        trl="no such credit: GRPOTrainer and RLOOTrainer both subtract a group's mean.",
        verl="no such estimator is registered.",
    ),
    advantages.Centered: About(
        formula="R_i − mean",
        statistics=f"mean is {GROUP}",
        words="the reward minus its group's mean",
        label="group mean (centered)",
        gradient="scaled",
        bias="In length only: a response is in its own mean, so the expectation is (G−1)/G of the gradient.",
        trl='GRPOTrainer with scale_rewards="none".',
        verl="grpo with norm_adv_by_std_in_grpo=False; a group of one keeps its raw reward (here 0).",
    ),
    advantages.LeaveOneOut: About(
        formula="R_i − mean_others",
        statistics=f"mean_others is {GROUP}, without response i",
        words="the reward minus the mean of its group's other responses",
        label="mean of the others (RLOO)",
        gradient="exact",
        bias="None. But at small G on sparse 0/1 rewards its variance can exceed that of the raw reward.",
        trl="RLOOTrainer's baseline; a group with one scored response gives 0, as here.",
        verl="rloo: the same, but a group of one keeps its raw reward; rloo_vectorized gives 0.",
    ),
    advantages.Normalized: About(
        formula="(R_i − mean) / (std + {eps:g}), ddof {ddof}",
        statistics=f"mean and std are {GROUP}; where all are equal δ_i = 0",
        words="the reward normalized within its group of responses (std + {eps:g})",
        label="mean and std (GRPO)",
        bias="In direction: each prompt is scaled by its own 1/std, so nearly solved and nearly hopeless prompts count "
        "more than those in between; and the std comes from the same samples.",
        paper="Shao et al. divide by std and name neither ε nor ddof.",
        trl='std + 1e-4, ddof 1, per group; scale_rewards="batch" takes the batch\'s std, "none" leaves it out.',
        verl="std + 1e-6, ddof 1; a group of one keeps its raw reward (here 0).",
        others="OpenRLHF adds 1e-9; open-instruct has ddof 0.",
    ),
    advantages.BestOnly: About(
        formula="R_i where R_i = max_j R_j, else 0",
        statistics=f"max is {GROUP}",
        words="the reward, kept only by the best of its group",
        label="best of the group only",
        bias="In direction: it maximises something between the mean and the best of G; ties are all reinforced.",
        verl="grpo_passk is similar: only the best response gets credit, best minus second best (over std).",
    ),
    advantages.RunningMean: About(
        formula=lambda c: f"R_i − b,  then b ← {c.momentum:g}·b + {1 - c.momentum:g}·(the step's mean reward)",
        statistics="b is 0 in the first step",
        words="the reward minus its running mean (momentum {momentum:g})",
        label="running mean",
        gradient="exact",
        bias="None: b was fixed before these samples were drawn.",
    ),
    advantages.Greedy: About(
        formula="R_i − R_greedy",
        statistics="R_greedy is the reward of one greedy response to the same prompt",
        words="the reward minus that of a greedy response to the same prompt",
        label="greedy response (ReMax)",
        gradient="exact",
        bias="None: the greedy response does not depend on the samples.",
        verl="remax: reward-to-go minus the greedy response's reward, the same for an outcome reward.",
    ),
    advantages.OptimalBaseline: About(
        formula=lambda c: (
            "R_i − Σ_(j≠i) n_j·R_j / Σ_(j≠i) n_j,  n_j = " + ("‖∇log π_j‖²" if c.norm == "exact" else "L_j")
        ),
        statistics=f"sums are {GROUP}",
        words="the reward minus the baseline of least variance, estimated from its group's other responses",
        label="optimal, from the others",
        gradient="exact",
        bias="None: response i is not in its own baseline. With norm=length the baseline is only an approximation.",
        paper="OPO's b is the length-weighted mean reward of the whole group, response i included: slightly biased.",
        verl="opo: as the paper; a group of one keeps its raw reward.",
    ),
    advantages.BatchNormalized: About(
        formula="(R_t − mean) / (std + {eps:g}), ddof 1",
        statistics="mean and std are over all unmasked tokens of the batch, R_t the reward from token t on",
        words="the reward-to-go normalized over all tokens of the batch (std + {eps:g})",
        label="over the batch (REINFORCE++)",
        bias="In direction, less with a larger batch: the mean includes the sample, and long responses weigh more.",
        trl="none per token; RLOOTrainer's normalize_advantages whitens responses over the batch (std + 1e-4).",
        verl="reinforce_plus_plus: over √(var + 1e-8), ddof 1, over the unmasked tokens of the batch.",
    ),
    values.TD: _from_critic(
        "d_t",
        "the one-step TD error of a critic",
        "None with the exact V and γ = 1. Otherwise all of V's error: only one token's reward does not come from V.",
        verl="gae with lam=0.",
    ),
    values.KStep: _from_critic(
        "Σ_(j<{k}) {gamma:g}^j·d_(t+j)",
        "the {k}-step advantage of a critic",
        "None with the exact V and γ = 1. Otherwise V's error k tokens later; none where the response ends before.",
    ),
    values.GAE: _from_critic(
        "Σ_(j≥0) {decay:g}^j·d_(t+j)",
        "the generalized advantage (λ {lam:g}) of a critic",
        "None with the exact V and γ = 1. Otherwise V's error enters, less as λ approaches 1, and not at all at λ = 1.",
        label="GAE(0.95), own critic",
        verl="gae: γ 1, λ 1 unless set, always whitened (ddof 1, + 1e-8 under the root).",
        paper="Schulman et al. 2016: the same, not whitened.",
    ),
    values.MonteCarlo: _from_critic(
        "Σ_(j≥0) {decay:g}^j·d_(t+j)",
        "the return minus a critic's value",
        "None at γ = 1, for any V: the baseline does not depend on the token. With `bootstrap`, V's error at the cut.",
        gradient="exact",
        verl="gae with lam=1, its default.",
    ),
}
