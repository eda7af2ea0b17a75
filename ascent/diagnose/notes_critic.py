"""The notes on credit from a critic, on critics and on updates: notes.py has the rest.

Read in the sources of TRL 1.16.0, which has no PPO any more, and of verl, and in the papers.
"""

from __future__ import annotations

from typing import NamedTuple

from ascent import trust_region, update, values
from ascent.policies import critics


class Note(NamedTuple):
    bias: str
    """Where the gradient departs from that of E[R], and why. For a row: what it is, in a line."""
    trl: str = ""
    verl: str = ""
    paper: str = ""
    others: str = ""


_WHITE = " Whitened, also in scale and by the shift, which holds the sample itself."
NOTES: dict[type, Note] = {
    values.TD: Note(
        "None with the exact V and γ = 1. Else all of V's error: credit stands on V alone but for one token's reward."
        + _WHITE,
        trl="none: TRL 1.16 has no critic.",
        verl="gae with lam=0.",
    ),
    values.KStep: Note(
        "None with the exact V and γ = 1. Else V's error at the state k tokens on; none where the end is nearer."
        + _WHITE,
        trl="none.",
        verl="none.",
    ),
    values.GAE: Note(
        "None with the exact V and γ = 1. Else V's error, less of it the nearer λ is to 1; at λ = 1 none." + _WHITE,
        trl="none: TRL 1.16 has no critic.",
        verl="gae: γ 1, λ 1 unless set, always whitened (ddof 1, + 1e-8 under the root).",
        paper="Schulman et al. 2016: the same, not whitened.",
    ),
    values.MonteCarlo: Note(
        "None at γ = 1, whatever V is: a baseline that does not know the token. With `bootstrap`, V's error at the cut."
        + _WHITE,
        trl="none: TRL 1.16 has no critic.",
        verl="gae with lam=1, its default.",
    ),
    critics.NoCritic: Note("None.", trl="GRPOTrainer and RLOOTrainer.", verl="every estimator but gae."),
    critics.OwnCritic: Note(
        "None of its own: see the credit.",
        trl="none: TRL 1.16 has no critic.",
        verl="a critic of its own: ½·max of both squares, cliprange_value 0.5, learning rate 1e-5.",
    ),
    critics.SharedCritic: Note(
        "The critic's steps move the policy along no gradient of E[R].",
        trl="none: TRL 1.16 has no critic.",
        verl="none: the critic is another worker.",
    ),
    update.Adam: Note(
        "The step is not along the gradient: each coordinate is scaled by its own history, and max_norm, where set, "
        "shortens large gradients.",
        trl="learning rate 1e-6.",
        verl="learning rate 1e-6, weight decay 0.01, gradient norm at most 1.",
    ),
    trust_region.TrustRegion: Note(
        "The step is along F⁻¹g and not along the gradient, and its length is the region's and not the gradient's.",
        trl="none.",
        verl="none.",
        paper="Schulman et al. 2015: the same; the line search there also tests KL and gain.",
        others="no trainer of language models that we read has one.",
    ),
}

ROWS: dict[str, Note] = {
    "actor-critic": Note(
        "REINFORCE whose credit comes from a learned value function, token by token.",
        paper="Sutton et al. 2000; with GAE, Schulman et al. 2016. A3C adds an entropy bonus, this row none.",
        trl="no trainer of this name.",
        verl="adv_estimator=gae, but always with the clipped ratio.",
    ),
    "ppo": Note(
        "The clipped ratio with credit from a learned value function, whitened over the batch.",
        paper="Schulman et al. 2017: one network with two heads, no whitening, an entropy bonus on Atari.",
        trl="no trainer of this name in 1.16; GRPOTrainer has the clipped loss, with group credit.",
        verl="adv_estimator=gae: λ 1 unless set, dual clip 3 always on, token-mean, value clip 0.5.",
    ),
    "trpo": Note(
        "A step as long as a bound on the KL to the sampling policy allows, along the natural gradient.",
        paper="Schulman et al. 2015 take credit from a value function or from rollouts (vine); ten CG iterations.",
        trl="no trainer of this name.",
        verl="no update of this name.",
        others="none of twelve trainers of language models has it.",
    ),
}
