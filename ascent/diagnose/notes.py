"""What `ascent explain` knows beyond the docstrings: where a choice is biased, and what others do under its name.

Read in the sources of TRL 1.16.0 and verl 0.9.1 and in the papers; figures are those of a small policy whose
gradient is enumerated. "Unbiased" means: with sequence-sum weights, on the policy's own samples.
"""

from __future__ import annotations

from ascent import advantages, correction, exploration, groups, kl, losses, reference, weights
from ascent.diagnose import notes_critic, notes_preferences
from ascent.diagnose.notes_critic import Note
from ascent.policies import critics

_BATCH = "counted over the mini-batch of one optimizer step, whatever its split into micro-batches"
DENOMINATOR: dict[type, str] = {
    weights.TokenMean: f"ΣL, the unmasked tokens of all scored responses, {_BATCH}.",
    weights.SequenceMean: f"N responses, and for each its own L_i unmasked tokens; N is {_BATCH}.",
    weights.SequenceSum: f"N, the scored responses, {_BATCH}. No length divides.",
    weights.FixedLength: f"N responses times L_max, the generation limit (never the padded width); N is {_BATCH}.",
}

_OFF = (kl.NoKL, reference.NoReference, exploration.NoBonus, correction.NoCorrection, groups.All, groups.NoShaping)
OFF = (*_OFF, critics.NoCritic)
"""Choices that do nothing: a row that has one does not speak of that axis."""

NOTES: dict[type, Note] = {
    advantages.Raw: Note(
        "None: E[R ∇log π] is ∇E[R]. The price is variance.",
        trl="no such credit: GRPOTrainer and RLOOTrainer both subtract a group's mean.",
        verl="no such estimator is registered.",
    ),
    advantages.Centered: Note(
        "In length only: a response is in its own mean, so the expectation is (G−1)/G of the gradient.",
        trl='GRPOTrainer with scale_rewards="none".',
        verl="grpo with norm_adv_by_std_in_grpo=False; a group of one keeps its raw reward (here 0).",
    ),
    advantages.LeaveOneOut: Note(
        "None. Yet at small G on sparse 0/1 rewards its variance can exceed raw's: a baseline is not always a gain.",
        trl="RLOOTrainer's baseline; a group with one scored response gives 0, as here.",
        verl="rloo: the same, but a group of one keeps its raw reward; rloo_vectorized gives 0.",
    ),
    advantages.Normalized: Note(
        "In direction: each prompt is scaled by its own 1/std, so nearly solved and nearly hopeless prompts count more "
        "than those in between; and std is made of the same samples.",
        paper="Shao et al. divide by std and name neither ε nor ddof.",
        trl='std + 1e-4, ddof 1, per group; scale_rewards="batch" takes the batch\'s std, "none" leaves it out.',
        verl="std + 1e-6, ddof 1; a group of one keeps its raw reward (here 0).",
        others="OpenRLHF adds 1e-9; open-instruct has ddof 0.",
    ),
    advantages.BestOnly: Note(
        "In direction: it maximises something between the mean and the best of G; equal rewards are all pushed up.",
        trl="none.",
        verl="grpo_passk is a relative: the best response alone gets credit, best minus second best (over std).",
    ),
    advantages.RunningMean: Note("None: b was fixed before these samples were drawn.", trl="none.", verl="none."),
    advantages.Greedy: Note(
        "None: the greedy response does not depend on the samples.",
        trl="none.",
        verl="remax: reward-to-go minus the greedy response's reward, the same for an outcome reward.",
    ),
    advantages.OptimalBaseline: Note(
        "None: response i is not in its own baseline. With norm=length the baseline is merely not the best one.",
        paper="OPO's b is the length-weighted mean reward of the whole group, response i included: slightly biased.",
        trl="none.",
        verl="opo: as the paper; a group of one keeps its raw reward.",
    ),
    advantages.BatchNormalized: Note(
        "In direction, less with a larger batch: the mean holds the sample itself; long responses weigh more in it.",
        trl="none per token; RLOOTrainer's normalize_advantages whitens responses over the batch (std + 1e-4).",
        verl="reinforce_plus_plus: over √(var + 1e-8), ddof 1, over the unmasked tokens of the batch.",
    ),
    losses.LogProb: Note(
        "None on fresh samples. In later updates on the same batch nothing corrects for the policy having moved: at a "
        "KL of 0.03 about 27 % of the gradient is bias.",
        trl="none by name; at one update a batch ρ = 1, and the clipped loss has this gradient.",
        verl='loss_mode "gpg" is −δ·log π.',
    ),
    losses.Ratio: Note(
        "None at ρ = 1. After that a token ratio ignores that earlier tokens came from the old policy: at a KL of 0.03 "
        "27 % of the gradient is bias, as much as with no ratio at all.",
        trl="not alone: its losses clip the ratio or gate it.",
        verl='not alone: "vanilla" clips; "kl_cov" leaves it unclipped but adds a KL on some tokens.',
    ),
    losses.Clipped: Note(
        "None at ρ = 1. After that as the token ratio (27 % at a KL of 0.03), and where the bound binds, gradient 0.",
        trl="ε 0.2 both ways; the optional `delta` caps ρ before the minimum, for δ < 0 a dual clip.",
        verl="ε 0.2 both ways, and a dual clip at 3 that is always on; log ρ is clamped to ±20.",
    ),
    losses.SequenceRatio: Note(
        "Length-normalised: after the first update 17 % of the gradient at a KL of 0.03. The product is exact while "
        "unclipped, at a variance that grows with length. A response's one term takes the sum of its tokens' weights, "
        "the product's over L_i: so with sequence-sum either form starts at ∇E[R].",
        trl='importance_sampling_level="sequence" is the length-normalised form, ε 0.2 unless set; RLOOTrainer has the '
        "product, clipped at 0.2.",
        verl='loss_mode "gspo": length-normalised, with the gradient taken token by token; ε 0.2 unless set.',
    ),
    losses.Cispo: Note(
        "None at ρ = 1. After that as the token ratio, and weights are cut at the bounds; no token is silenced.",
        trl="min(ρ, epsilon_high): the bound is epsilon_high itself, so 5 there is high=4 here; unset it is 0.2.",
        verl="clip(ρ, 1−ε_low, 1+ε_high), both 0.2 unless set, so with a lower bound.",
    ),
    weights.TokenMean: Note(
        "In direction where lengths differ: ΣL depends on what was sampled (cosine with ∇E[R] 0.99 on a three-token "
        "policy with an end token, even for raw credit).",
        trl='loss_type="dapo" (the default): tokens of the whole generation batch; "bnpo": of the local micro-batch.',
        verl="token-mean (the default), over the tokens of the global mini-batch.",
    ),
    weights.SequenceMean: Note(
        "In direction where lengths differ: 1/L_i makes a token of a long response count less (cosine with ∇E[R] 0.97 "
        "on a three-token policy with an end token, even for raw credit).",
        trl='loss_type="grpo"; the mean is taken in each micro-batch, so their sizes matter.',
        verl="seq-mean-token-mean.",
    ),
    weights.SequenceSum: Note(
        "None: it is ∇E[R] itself.",
        trl='loss_type="luspo" sums tokens and averages responses.',
        verl="seq-mean-token-sum.",
    ),
    weights.FixedLength: Note(
        "In length only: ∇E[R] over the constant L_max.",
        trl='loss_type="dr_grpo", over max_completion_length.',
        verl="seq-mean-token-sum-norm, over loss_scale_factor; that is unset by default, and then the padded width.",
    ),
    kl.NoKL: Note("None.", trl="GRPOTrainer's default (beta=0).", verl="the default."),
    kl.InLoss: Note(
        "The penalty's gradient is not that of the KL (below), and it moves the optimum from E[R] to E[R] − β·KL.",
        trl="k3, times ρ by default (use_bias_correction_kl): at ρ = 1 that has k2's gradient, not k3's. beta is 0.",
        verl="use_kl_loss, off by default; 0.001, k3 clamped to ±10; `k3+` has k3's value and k2's gradient.",
    ),
    kl.InReward: Note(
        "With k1 none but the intended one: the objective is E[R] − β·KL(π ‖ π_ref). With the others see below.",
        trl="RLOOTrainer: k1 summed over the response, 0.05, fixed.",
        verl="use_kl_in_reward, off by default; k1 per token, 0.001; adaptive by batch size / 10000 a step (here 0.1).",
    ),
    reference.NoReference: Note("None.", trl="none is loaded at beta=0."),
    reference.Frozen: Note(
        "None of its own: see the KL.", trl="the default with beta > 0.", verl="the reference model."
    ),
    reference.Every: Note(
        "The KL's target moves, so the penalty bounds the speed and not the distance from the start.",
        trl="sync_ref_model with ref_model_mixup_alpha=1 and ref_model_sync_steps=n; by default 0.6 every 512 steps.",
        verl="none in its settings.",
        paper="iterative GRPO renews the reference in its outer loop.",
    ),
    reference.MovingAverage: Note(
        "As with every: the penalty bounds the speed and not the distance.",
        trl="sync_ref_model with ref_model_sync_steps=1; its alpha is the rate here.",
        verl="none in its settings.",
    ),
    exploration.NoBonus: Note("None.", trl="the default.", verl="the default."),
    exploration.Constant: Note(
        "It moves the optimum, for as long as it is on; the entropy is that of visited states, which are held fixed.",
        trl="entropy_coef, times the token mean of the entropy whatever the loss_type.",
        verl="entropy_coeff, aggregated as the loss is.",
    ),
    exploration.Annealed: Note(
        "It moves the optimum until it has fallen to 0. The lecture's sort needs it: ascent on the exact gradient "
        "stops at E[R] ≈ 3.9 of 5.",
        trl="none; use_adaptive_entropy steers the coefficient to a target entropy instead.",
        verl="none.",
    ),
    correction.NoCorrection: Note(
        "As much as sampler and trainer differ; it is measured.", verl="the default (rollout_is null)."
    ),
    correction.Truncated: Note(
        "Where w > c; per token also because the sampler reached the states. The product is exact but for the cut.",
        trl="with vLLM: token_truncate or sequence_truncate, up to 3.0.",
        verl="rollout_is token or sequence, up to 2.0.",
    ),
    correction.Masked: Note(
        "What falls outside the band is not learned from; per token also because the sampler reached the states.",
        trl="with vLLM the default: sequence_mask, 0 where the response's weight exceeds 3.0, no lower bound.",
        verl='a threshold "low_high" sets weights outside the band to 0.',
    ),
    groups.All: Note("None.", trl="always.", verl="the default."),
    groups.WithSignal: Note(
        "Prompts of middling difficulty are trained on more often. Where δ is 0 on an all-equal group anyway, what "
        "changes is the denominator: the other groups weigh more.",
        trl="none in GRPOTrainer.",
        verl="algorithm.filter_groups, off by default, on a metric of choice; without a limit of rounds unless set.",
    ),
    groups.NoShaping: Note("None.", trl="the default.", verl="the default."),
    groups.Overlong: Note(
        "The reward is another: it is lowered near the limit, for right answers too.",
        trl="a reward function, get_soft_overlong_punishment.",
        verl="the DAPO reward manager's overlong_buffer, times a penalty_factor.",
    ),
    **notes_critic.NOTES,
    **notes_preferences.NOTES,
}

ESTIMATORS: dict[str, tuple[str, str]] = {
    "k1": (
        "its gradient is 0 in expectation: the penalty does nothing but add noise",
        "its gradient is exactly −β ∇KL(π ‖ π_ref), at any length: the one to take there",
    ),
    "k2": (
        "its gradient is ∇KL(π ‖ π_ref) for one token or a whole response; per token on an autoregressive policy it "
        "misses what a token does to the KL of later ones and is 4.6 % off",
        "its gradient is not the KL's; it can even raise the KL (cosine with ∇KL −0.34)",
    ),
    "k3": (
        "its gradient is that of the other direction, ∇KL(π_ref ‖ π), for one token or a whole response; per token on "
        "an autoregressive policy it is 30 % off even that",
        "its gradient is not the KL's; it can even raise the KL (cosine with ∇KL −0.55)",
    ),
    "exact": (
        "its gradient is ∇KL(π ‖ π_ref) at each visited state, held fixed; on an autoregressive policy it is 4.6 % off",
        "its gradient is not the KL's; it can even raise the KL (cosine with ∇KL −0.36)",
    ),
}
"""What autograd makes of an estimator: in the loss, and in the reward. Both on the policy's own samples."""

_ONLY = "only the credit; the loss stays verl's clipped token ratio with dual clip 3 and token-mean, KL off by default"
ROWS: dict[str, Note] = {
    "reinforce": Note(
        "The policy-gradient theorem as it stands.",
        paper="Williams 1992 allows a baseline; this row has none.",
        trl="no trainer of this name.",
        verl="no estimator of this name; reinforce_plus_plus is another method.",
    ),
    "reinforce-baseline": Note(
        "REINFORCE with the mean reward of earlier steps as its baseline.",
        paper="Williams 1992's reinforcement baseline.",
        trl="no trainer of this name.",
        verl="reinforce_plus_plus_baseline is another: group mean, then whitened over the batch's tokens.",
    ),
    "best-only": Note(
        "REINFORCE on the best responses of each group alone.",
        paper='CS336 (lecture 17) calls it "max".',
        trl="none.",
        verl="grpo_passk is a relative: the best response alone gets credit, best minus second best (over std).",
    ),
    "rloo": Note(
        "REINFORCE whose baseline is the mean of the other responses; the KL is part of the reward.",
        paper="Ahmadian et al. 2024: a response is one action, no clipping, k1 in the reward: as here.",
        trl="RLOOTrainer: same credit and KL (0.05), but the ratio of whole responses, clipped at 0.2, mean over "
        "responses. At one update a batch the gradient is the same.",
        verl=f"adv_estimator=rloo is {_ONLY}.",
    ),
    "reinforce++": Note(
        "PPO's clipped loss with the reward-to-go normalized over the batch in a critic's place.",
        paper="Hu et al. 2025; no ε is named. A variant with the group mean taken off first is not this row.",
        trl="no trainer of this name.",
        verl="reinforce_plus_plus: over √(var + 1e-8), dual clip 3; the KL in the reward is off, or 0.001.",
        others="OpenRLHF is the authors' own code.",
    ),
    "grpo": Note(
        "PPO's clipped loss with the reward normalized within its group in a critic's place, and a KL in the loss.",
        paper="Shao et al. 2024: the same, no ε beside std.",
        trl='GRPOTrainer is not this by default: loss_type="dapo" (token mean over the generation batch) and beta=0. '
        'With loss_type="grpo" and beta=0.04 credit (ε 1e-4, ddof 1) and denominator are these, but the KL is '
        "ρ·k3 unless use_bias_correction_kl=False.",
        verl="ε 1e-6, a group of one keeps its raw reward, dual clip 3 always on, token-mean by default; the KL is off "
        "by default, then k3 clamped to ±10 at 0.001.",
        others="OpenRLHF adds 1e-9 to std; open-instruct has ddof 0.",
    ),
    "dr-grpo": Note(
        "GRPO without its two biases: no division by std, a constant in place of lengths; and no KL.",
        paper="Liu et al. 2025: the same.",
        trl='loss_type="dr_grpo" changes the denominator only: the division by std stays until scale_rewards="none".',
        verl="norm_adv_by_std_in_grpo=False and loss_agg_mode=seq-mean-token-sum-norm; its constant is the padded "
        "width until loss_scale_factor is set. Dual clip 3.",
    ),
    "dapo": Note(
        "GRPO with a higher upper bound, a token mean, groups with signal only, and a soft length penalty; no KL.",
        paper="Yu et al. 2025 divide by the tokens of each prompt's group; here by those of the whole mini-batch.",
        trl='loss_type="dapo" is the denominator alone (over the generation batch): epsilon_high=0.28 and the overlong '
        "reward are set apart, and there is no dynamic sampling.",
        verl="clip_ratio_high=0.28, filter_groups and the DAPO reward manager, each set apart; dual clip 3.",
    ),
    "gspo": Note(
        "GRPO with one length-normalised ratio a response, and no KL.",
        paper="Zheng et al. 2025: the same bounds, 3e-4 and 4e-4; no ε beside std.",
        trl='importance_sampling_level="sequence" with loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4 (else 0.2).',
        verl='loss_mode "gspo": token-mean unless loss_agg_mode=seq-mean-token-mean, bounds 0.2 unless set.',
    ),
    "cispo": Note(
        "The log-prob loss, each token weighted by a ratio that is clipped and carries no gradient; no KL.",
        paper="MiniMax 2025 divide by the tokens of each prompt's group; here by those of the whole mini-batch.",
        trl='loss_type="cispo": min(ρ, epsilon_high), so epsilon_high=5 is high=4 here; unset it is 0.2.',
        verl='loss_mode "cispo": clip(ρ, 0.8, 1.2) unless set, so with a lower bound.',
    ),
    **notes_critic.ROWS,
    **notes_preferences.ROWS,
}
