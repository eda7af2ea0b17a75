"""Before a model is used: do our forward passes give what the model's own gives?"""

from __future__ import annotations

import torch
from torch import Tensor

from ascent.core.types import Refused, Rollouts
from ascent.engines.language.attention import ours
from ascent.engines.language.learning.head import Head
from ascent.engines.language.learning.states import packed_states, padded_states
from ascent.policies.causal_lm import LanguageModel

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""How far two log-probs of one token may be apart by rounding alone; in half precision, on average over tokens.

There a single token of a real model is easily 0.3 off, whichever way its sums are ordered.
"""


def apart(a: Tensor, b: Tensor, dtype: torch.dtype) -> float:
    gap = (a - b).abs()
    return float(gap.mean() if dtype in (torch.bfloat16, torch.float16) else gap.max())


@torch.no_grad()
def prove(lm: LanguageModel, longest: int = 0) -> str | None:
    """Compare, on a few random tokens; None where prompts can be shared, else why not (`lm.shares` says the same).

    `longest`: the tokens that a prompt and its response may have together; an attention window has to hold them.
    A model whose logits are not those of its head on its last hidden states is refused.
    """
    batch = _probe(lm)
    dtype = next(lm.model.parameters()).dtype
    tolerance = TOLERANCE.get(dtype, 2e-3)
    own = _own(lm, batch)
    plain = _log_probs(lm, padded_states(lm, batch), batch)
    if not apart(plain, own, dtype) < tolerance:
        raise Refused(
            f"{type(lm.model).__name__}: its logits are not its head times its last hidden states (log-probs are "
            f"{apart(plain, own, dtype):.2g} apart), so Ascent cannot train it"
        )
    try:
        with ours(lm.model):
            shared = _log_probs(lm, packed_states(lm, batch), batch)
    except Exception as error:  # whatever an architecture of any kind does with a layout that it does not know
        why: str | None = f"{type(error).__name__}: {error}"
    else:
        window = getattr(lm.model.config, "sliding_window", None) or longest
        gap = apart(shared, own, dtype)
        why = None if gap < tolerance else f"log-probs would be {gap:.2g} off"
        why = f"its attention sees {window} tokens, and there may be {longest}" if window < longest else why
    lm.shares = why is None
    return why


def _probe(lm: LanguageModel) -> Rollouts:
    """Two groups of random tokens, ragged in every way."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(lm.vocab, (2, 7), generator=generator)
    prompt[1, 4:] = -1
    response = torch.randint(lm.vocab, (2, 3, 5), generator=generator)
    length = torch.tensor([[5, 1, 3], [2, 5, 4]])
    mask = torch.arange(5) < length.unsqueeze(-1)
    nothing = torch.zeros(2, 3, 5)
    return Rollouts(prompt, response, mask, nothing, limit=5, truncated=torch.zeros(2, 3, dtype=torch.bool))


def _log_probs(lm: LanguageModel, hidden: Tensor, batch: Rollouts) -> Tensor:
    logp = torch.log_softmax(Head.of(lm.model).logits(hidden), -1)
    return logp.gather(-1, batch.response[batch.mask].to(lm.device)[:, None])[:, 0]


def _own(lm: LanguageModel, batch: Rollouts) -> Tensor:
    """What the model itself says, one unpadded sequence at a time."""
    found = []
    for row, responses, masks in zip(batch.prompt, batch.response, batch.mask, strict=True):
        prompt = row[row >= 0]
        for response, mask in zip(responses, masks, strict=True):
            ids = torch.cat([prompt, response[mask]]).to(lm.device)
            logits = lm.model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            logp = torch.log_softmax(logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32), -1)
            found.append(logp.gather(-1, response[mask].to(lm.device)[:, None])[:, 0])
    return torch.cat(found)
