"""Texts of `ascent explain` about named algorithms (here) and choices (choices.py), in addition to their docstrings.

Statements about TRL 1.16.0, verl 0.9.1 and papers are based on their sources. The docstring of a choice describes the
bias of its gradient; percentages and cosines there are computed exactly, for a small policy.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Text = str | Callable[[Any], str]
"""A text with the choice's fields in braces, or a function from the choice to its text."""
Gradient = Literal["exact", "scaled", "critic", "other"]
"""The expected gradient on the policy's own samples: ∇E[R], a constant times it, ∇E[R] if V is exact, or another."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What a choice computes, and what other libraries and papers compute under the same name."""

    formula: Text = ""
    """Its part of the objective, in LaTeX. A test evaluates what `ascent explain` prints of it against the code."""
    definitions: Text = ""
    """Definitions that the formula needs, in LaTeX: a critic's advantage, a ratio, the margin of a pair."""
    statistics: Text = ""
    """The other symbols, and the range of means and sums; one line for each, LaTeX between dollar signs."""
    words: Text = ""
    """Its part of the sentence that describes the objective. For a named algorithm: a summary."""
    response_formula: str = ""
    response_words: str = ""
    """For weights: the texts for a loss with one term per response."""
    denominator: str = ""
    """The denominator of a token's weight."""
    gradient: Gradient | Callable[[Any], Gradient] = "other"
    """Not used for a loss: at ρ = 1 every surrogate has the gradient of the log-prob."""
    label: str = ""
    """A short label for menus, if the name alone is unclear."""
    off: bool = False
    """Whether the choice does nothing. Explanations of algorithms leave its axis out."""
    paper: str = ""
    trl: str = "none."
    verl: str = "none."
    """What TRL and verl compute under this name, or offer instead."""
    others: str = ""


OFF = About(off=True, gradient="exact", trl="the default.", verl="the default.")
"""The About of a choice that does nothing."""
_FIELD = re.compile(r"\{(\w+)(?::([^{}]*))?\}")
TEXTS = ("formula", "definitions", "statistics", "words", "response_words", "gradient")
OWN = {
    "advantage": About(formula=r"\text{{name}}(R)", words="the advantage of {name} ({line})"),
    "loss": About(
        formula=r"\text{{name}}(\text{logp}, \text{logp\_old}, A)", words="the surrogate of {name} ({line}) for"
    ),
    "pairs": About(
        formula=r"\text{{name}}(m)",
        definitions=r"m = \text{the margin of the pair}",
        words="Maximize the mean over pairs of the value of {name} ({line})",
    ),
    "weights": About(
        formula=r"\text{weight}_t",
        response_formula=r"\sum_t \text{weight}_t",
        words="sum, with the weights of {name} ({line}), of",
        response_words="sum, with the weights of {name} ({line}), of",
    ),
    "reference": About(words="the reference of {name} ({line})"),
    "exploration": About(formula=r"\text{{name}}\cdot{H}", words="the entropy bonus of {name} ({line})"),
    "correction": About(formula=r"\text{{name}}\cdot{}", words="weighted by {name} ({line})"),
    "groups": About(words="Groups are chosen by {name} ({line})"),
    "shaping": About(formula=r"\text{{name}}(L_i)", words="is shaped by {name} ({line})"),
    "critic": About(words="The critic is {name} ({line})"),
    "update": About(words="A step is taken by {name} ({line})"),
}
"""Texts for a user's choice without an About, from its class name and the first line of its docstring."""


def first_line(thing: Any) -> str:
    """Return the first line of a docstring, or "no description" if @dataclass generated it."""
    doc = inspect.getdoc(thing) or ""
    generated = doc.startswith(f"{getattr(thing, '__name__', '')}(")
    return doc.splitlines()[0] if doc and not generated else "no description"


def bias_of(cls: type) -> str:
    """Return the text after "Bias:" in the docstring of a choice: where and why its gradient differs from ∇E[R]."""
    match = re.search(r"Bias:\s+(.*?)(?=\s+Degenerate case|\Z)", inspect.getdoc(cls) or "", re.DOTALL)
    text = " ".join(match[1].split()) if match else ""
    return text[:1].upper() + text[1:]


def fill_in(about: About, choice: Any) -> About:
    """Fill an About with the fields of a choice, its class name and the first line of its docstring."""
    facts = {"name": type(choice).__name__, "line": first_line(type(choice)), **vars(choice)}
    texts: dict[str, Any] = {}
    for name in TEXTS:
        text = getattr(about, name)
        texts[name] = text(choice) if callable(text) else fill(text, facts)
    return replace(about, **texts)


def fill(text: str, facts: Mapping[str, Any]) -> str:
    """Replace the names of facts in braces, such as {eps:g}, by their values. Other braces of LaTeX are kept."""
    known = (match for match in _FIELD.finditer(text) if match[1] in facts)
    for match in reversed(list(known)):
        text = text[: match.start()] + format(facts[match[1]], match[2] or "") + text[match.end() :]
    return text


# ---- named algorithms: a summary, and what others compute under the same name ------------------------

_ADVANTAGE_ONLY = (
    "only the advantage; the loss stays verl's clipped token ratio with dual clip 3 and token-mean, KL off by default"
)
ABOUT_ALGORITHMS: dict[str, About] = {
    "reinforce": About(
        words="The plain policy gradient.",
        paper="Williams 1992 allows a baseline; this row has none.",
        verl="none; reinforce_plus_plus is another method.",
    ),
    "reinforce-baseline": About(
        words="REINFORCE with the mean reward of earlier steps as its baseline.",
        paper="Williams 1992's reinforcement baseline.",
        verl="reinforce_plus_plus_baseline is another: group mean, then whitened over the batch's tokens.",
    ),
    "best-only": About(
        words="REINFORCE on only the best responses of each group.",
        paper='CS336 (lecture 17) calls it "max".',
        verl="grpo_passk is similar: only the best response has an advantage, best minus second best (over std).",
    ),
    "rloo": About(
        words="REINFORCE whose baseline is the mean of the other responses; the KL is part of the reward.",
        paper="Ahmadian et al. 2024: a response is one action, no clipping, k1 in the reward: as here.",
        trl="RLOOTrainer: same advantage and KL (0.05), but the ratio of whole responses, clipped at 0.2, mean over "
        "responses. At one update per batch the gradient is the same.",
        verl=f"adv_estimator=rloo is {_ADVANTAGE_ONLY}.",
    ),
    "reinforce++": About(
        words="PPO's clipped loss with the reward-to-go normalized over the batch instead of a critic.",
        paper="Hu et al. 2025; no ε is named. A variant that first subtracts the group mean is not this row.",
        verl="reinforce_plus_plus: over √(var + 1e-8), dual clip 3; the KL in the reward is off, or 0.001.",
        others="OpenRLHF is the authors' own code.",
    ),
    "grpo": About(
        words="PPO's clipped loss with the reward normalized within its group instead of a critic; a KL in the loss.",
        paper="Shao et al. 2024: the same, no ε beside std.",
        trl='GRPOTrainer is not this by default: loss_type="dapo" (token mean over the generation batch) and beta=0. '
        'With loss_type="grpo" and beta=0.04 advantage (ε 1e-4, ddof 1) and denominator are these, but the KL is '
        "ρ·k3 unless use_bias_correction_kl=False.",
        verl="ε 1e-6, a group of one keeps its raw reward, dual clip 3 always on, token-mean by default; the KL is off "
        "by default, then k3 clamped to ±10 at 0.001.",
        others="OpenRLHF adds 1e-9 to std; open-instruct has ddof 0.",
    ),
    "dr-grpo": About(
        words="GRPO without its two biases: no division by std, a constant instead of lengths, and no KL.",
        paper="Liu et al. 2025: the same.",
        trl='loss_type="dr_grpo" changes the denominator only: the division by std stays until scale_rewards="none".',
        verl="norm_adv_by_std_in_grpo=False and loss_agg_mode=seq-mean-token-sum-norm; its constant is the padded "
        "width until loss_scale_factor is set. Dual clip 3.",
    ),
    "dapo": About(
        words="GRPO with a higher upper bound, a token mean, only groups with signal, a soft length penalty; no KL.",
        paper="Yu et al. 2025 divide by the tokens of each prompt's group; here by those of the whole mini-batch.",
        trl='loss_type="dapo" is the denominator alone (over the generation batch): epsilon_high=0.28 and the overlong '
        "reward are set separately, and there is no dynamic sampling.",
        verl="clip_ratio_high=0.28, filter_groups and the DAPO reward manager, each set separately; dual clip 3.",
    ),
    "gspo": About(
        words="GRPO with one length-normalized ratio per response, and no KL.",
        paper="Zheng et al. 2025: the same bounds, 3e-4 and 4e-4; no ε beside std.",
        trl='importance_sampling_level="sequence" with loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4 (else 0.2).',
        verl='loss_mode "gspo": token-mean unless loss_agg_mode=seq-mean-token-mean, bounds 0.2 unless set.',
    ),
    "cispo": About(
        words="The log-prob loss, each token weighted by a ratio that is clipped and carries no gradient; no KL.",
        paper="MiniMax 2025 divide by the tokens of each prompt's group; here by those of the whole mini-batch.",
        trl='loss_type="cispo": min(ρ, epsilon_high), so epsilon_high=5 is high=4 here; unset it is 0.2.',
        verl='loss_mode "cispo": clip(ρ, 0.8, 1.2) unless set, so with a lower bound.',
    ),
    "actor-critic": About(
        words="REINFORCE whose advantage comes from a learned value function, token by token.",
        paper="Sutton et al. 2000; with GAE, Schulman et al. 2016. A3C adds an entropy bonus; this row has none.",
        verl="adv_estimator=gae, but always with the clipped ratio.",
    ),
    "ppo": About(
        words="The clipped ratio with advantages from a learned value function, whitened over the batch.",
        paper="Schulman et al. 2017: one network with two heads, no whitening, an entropy bonus on Atari.",
        trl="no trainer of this name in 1.16; GRPOTrainer has the clipped loss, with group-relative advantages.",
        verl="adv_estimator=gae: λ 1 unless set, dual clip 3 always on, token-mean, value clip 0.5.",
    ),
    "trpo": About(
        words="A step as long as a bound on the KL to the sampling policy allows, along the natural gradient.",
        paper="Schulman et al. 2015 take advantages from a value function or from rollouts (vine); ten CG iterations.",
        others="none of the twelve language-model trainers we looked at has it.",
    ),
    "sft": About(
        words="Supervised fine-tuning: maximum likelihood of demonstrations.",
        paper="As old as language models; Ouyang et al. 2022 as the first stage of RLHF.",
        trl="SFTTrainer; it also trains on the prompt unless completion_only_loss is set.",
        verl="has an SFT trainer.",
    ),
    "dpo": About(
        words="Direct preference optimization: from pairs to a policy without a reward model in between.",
        paper="Rafailov et al. 2023: the same, β 0.1 to 0.5.",
        trl='DPOTrainer, loss_type="sigmoid", beta 0.1: the same loss on the same tensors to rounding.',
    ),
    "reward-model": About(
        words="A reward model from pairs. It trains a reward, not a policy: use it as --reward model:RUN.",
        paper="Ouyang et al. 2022, with pairs instead of rankings, and any backbone.",
        trl="RewardTrainer: the same loss on the same tensors to rounding.",
    ),
    "process-reward": About(
        words="A process reward from labelled steps. It trains a reward per token: use it as --reward process:RUN.",
        paper="Lightman et al. 2023 with labels by people; Wang et al. 2024 with labels from rollouts.",
        trl="none in 1.16.",
    ),
}
