"""What `ascent explain` says of demonstrations, pairs and reward models: formulas, words, and who differs.

Read in the sources of TRL 1.16.0 (SFTTrainer, DPOTrainer, RewardTrainer) and in the papers; verl has none of them
but an SFT trainer.
"""

from __future__ import annotations

from typing import Any

from ascent import preferences
from ascent.diagnose.notes_critic import Note
from ascent.preferences import BradleyTerry, Dpo, StepValue

_NO_GRADIENT = "No policy gradient: nothing is sampled. "
NOTES: dict[type, Note] = {
    preferences.Likelihood: Note(
        _NO_GRADIENT + "The expected gradient is that of −KL(demonstrator ‖ π): it ends at the demonstrator.",
        trl='SFTTrainer with loss_type="nll" and completion_only_loss: the token mean over the optimizer step.',
        verl="an SFT trainer of its own, which was not read.",
    ),
    preferences.Dpo: Note(
        _NO_GRADIENT + "The optimum is that of E[R] − β·KL(π ‖ π_ref) if pairs follow Bradley–Terry with this R and "
        "cover what π may say; on finitely many pairs log-ratios grow beyond all bounds.",
        trl='DPOTrainer with loss_type="sigmoid": the same. There label_smoothing is read by other loss types only, '
        '"robust" (which divides by 1 − 2ε) among them; here it is cDPO\'s.',
        verl="none.",
    ),
    preferences.BradleyTerry: Note(
        _NO_GRADIENT + "It is a maximum likelihood fit, and so as good as its pairs: off their distribution it is "
        "extrapolation, which a policy that is trained on it will find.",
        trl="RewardTrainer: the same, with center_rewards_coefficient for c and a margin for each pair where the data "
        "has one, which is not read here. Its head is drawn at random and read at the last token; ours is 0 at first.",
        verl="none: it takes a trained reward model.",
    ),
    preferences.StepValue: Note(
        _NO_GRADIENT + "The optimum is the mean label given the tokens so far. With labels from k roll-outs it is the "
        "value function of the policy that made them, whatever k is, and of no later policy.",
        trl="none in 1.16. Papers mostly have a cross-entropy of two classes at the last token of each step; here a "
        "squared error, for any number can be a label, at every token of the step.",
        verl="none was found.",
    ),
}

ROWS: dict[str, Note] = {
    "sft": Note(
        "Supervised fine-tuning: maximum likelihood of demonstrations.",
        paper="As old as language models; Ouyang et al. 2022 for what follows on it.",
        trl="SFTTrainer; it also takes loss on the prompt unless completion_only_loss says otherwise.",
        verl="an SFT trainer of its own.",
    ),
    "dpo": Note(
        "Direct preference optimization: from pairs to a policy without a reward model in between.",
        paper="Rafailov et al. 2023: the same, β 0.1 to 0.5.",
        trl='DPOTrainer, loss_type="sigmoid", beta 0.1: the same loss on the same tensors to rounding.',
        verl="none.",
    ),
    "reward-model": Note(
        "A reward model from pairs. What it trains is no policy: it is a reward, model:RUN, for the rows above.",
        paper="Ouyang et al. 2022, with pairs in place of rankings, and any backbone.",
        trl="RewardTrainer: the same loss on the same tensors to rounding.",
        verl="none.",
    ),
    "process-reward": Note(
        "A process reward from labelled steps. What it trains is no policy: it is a reward per token, process:RUN.",
        paper="Lightman et al. 2023 with labels by people; Wang et al. 2024 with labels from roll-outs.",
        trl="none in 1.16.",
        verl="none was found.",
    ),
}


def formula(loss: Any) -> str:
    """A loss of pairs, on two lines, or of steps, on one."""
    if isinstance(loss, StepValue):
        return "objective = −Σ_i Σ_t w · ½ (v_t − y_t)²"
    if isinstance(loss, Dpo):
        value = "log σ(m)"
        if loss.smoothing:
            value = f"[ {1 - loss.smoothing:g}·log σ(m) + {loss.smoothing:g}·log σ(−m) ]"
        margin = f"Δ_i = Σ_t (logp_t − logp_ref_t);   m = {loss.beta:g}·(Δ_w − Δ_l)"
    elif isinstance(loss, BradleyTerry):
        value = f"[ log σ(m) − {loss.center:g}·(r_w + r_l)² ]" if loss.center else "log σ(m)"
        margin = "m = r_w − r_l"
    else:
        value, margin = f"{type(loss).__name__}(m)", "m = the margin of the pair"
    return f"{margin}\nobjective = Σ_pairs 1/pairs · {value}"


WHERE = {
    "policy": "w is the chosen and l the rejected response to a prompt; Δ is over all of its tokens, the end too",
    "steps": "w is the weight of a token, v_t the head's value after it, y_t the label of the step that it is part of",
    "rewards": "r is the head's value after the last token; w is the chosen and l the rejected response to a prompt",
}
DENOMINATOR = " The one term of a pair takes the sum of its responses' weights, which is 1/pairs."


def in_words(loss: Any) -> str:
    """What is maximised, in a sentence."""
    if isinstance(loss, Dpo):
        smooth = f", {loss.smoothing:.0%} of the labels taken to be wrong" if loss.smoothing else ""
        return (
            f"Maximise the mean over pairs of log σ({loss.beta:g} × how much more the chosen response gained in "
            f"log-probability over the reference than the rejected one){smooth}."
        )
    if isinstance(loss, BradleyTerry):
        pull = f", minus {loss.center:g} × the square of their sum" if loss.center else ""
        return f"Maximise the mean over pairs of log σ(reward of the chosen − reward of the rejected response){pull}."
    if isinstance(loss, StepValue):
        return "Minimise half the squared distance between the score after each token and the label of its step."
    return f"Maximise the mean over pairs of the value of {type(loss).__name__}."
