"""Multinomial sampling of tokens by inverse CDF, from one reproducible uniform number per token.

The uniform number for token t of a response is a hash of (seed of the response, t). So a response does not depend on
which responses are decoded in the same batch, with one exception: matmuls of other batch sizes round differently, and
where the uniform number lies within that rounding (about 1e-6) of the boundary between two tokens, the sampled token
may change.
"""

import torch
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.ops import cpu_kernels


def uniform_from_seed(seed: Tensor, t: Tensor) -> Tensor:
    """Return a float64 in [0, 1) for token t of the response with this seed: a hash by splitmix64."""
    x = seed + (t + 1) * -7046029254386353131  # 2⁶⁴ divided by the golden ratio, as a signed number
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() * 2.0**-53


def _shift_right(x: Tensor, bits: int) -> Tensor:  # unsigned
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample_tokens(
    logits: Tensor,
    temperature: float,
    params: SamplingParams,
    u: Tensor | None,
    forbidden: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample one token per row: torch.multinomial, but from given uniform numbers.

    Returns the tokens, their log-probs over the full vocabulary, and the kept mass: the probability of all tokens that
    could be sampled (None: 1).

    Args:
        logits: `[row vocab]`
        temperature: divides the logits
        params: top-k, top-p and min-p; its other fields are ignored
        u: one uniform number per row; None: greedy decoding (argmax)
        forbidden: a mask `[row]` and the token ids that these rows must not sample (stop tokens before min_tokens)
    """
    if u is not None and params.unrestricted and forbidden is None and cpu_kernels.is_supported(logits):
        return *cpu_kernels.sample_rows(logits, temperature, u), None
    z = logits if temperature == 1.0 else logits / temperature
    if forbidden is not None:
        return _sample_without_forbidden(z, params, u, *forbidden)
    p, kept_mass = torch.softmax(z, -1), None
    if u is None:
        token = z.argmax(-1, keepdim=True)
    elif params.unrestricted:
        token = _invert_cdf(p, u)
    else:
        kept = torch.where(params.allowed_tokens(p), p, 0.0)
        token, kept_mass = _invert_cdf(kept, u), kept.sum(-1)
    return token.squeeze(-1), torch.log(p.gather(-1, token)).squeeze(-1), kept_mass


def _sample_without_forbidden(
    z: Tensor, params: SamplingParams, u: Tensor | None, rows: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample from q, which is p without the forbidden tokens, renormalized; log-probs and kept mass are those of p."""
    masked = z.clone()
    masked[:, tokens] = torch.where(rows[:, None], float("-inf"), z[:, tokens])
    log_total = torch.logsumexp(z, -1, keepdim=True)
    if u is None:
        token, kept_mass = masked.argmax(-1, keepdim=True), None
    else:
        q = torch.softmax(masked, -1)
        kept = torch.where(params.allowed_tokens(q), q, 0.0)
        permitted_mass = torch.exp(torch.logsumexp(masked, -1) - log_total.squeeze(-1))
        token = _invert_cdf(kept, u)
        kept_mass = (kept.sum(-1) * permitted_mass).clamp(torch.finfo(z.dtype).tiny, 1.0)
    return token.squeeze(-1), (z.gather(-1, token) - log_total).squeeze(-1), kept_mass


def _invert_cdf(p: Tensor, u: Tensor) -> Tensor:
    """Return the first token at which the cumulative sum of p exceeds u · Σp: first find its block, then the token."""
    rows, vocab = p.shape
    block_size = 256
    padding = -vocab % block_size
    blocks = (torch.nn.functional.pad(p, (0, padding)) if padding else p).view(rows, -1, block_size)
    block_cdf = blocks.sum(-1).double().cumsum(-1)
    target = u[:, None] * block_cdf[:, -1:] * (1 - 1e-12)  # below the total in spite of rounding
    block = (block_cdf <= target).sum(-1, keepdim=True)
    sum_before = torch.where(block > 0, block_cdf.gather(-1, (block - 1).clamp(min=0)), 0.0)
    p_block = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, block_size)).squeeze(1)
    offset = (sum_before + p_block.double().cumsum(-1) <= target).sum(-1, keepdim=True)
    possible = p_block > 0  # rounding must not select a token of probability 0
    first = possible.float().argmax(-1, keepdim=True)
    last = block_size - 1 - possible.flip(-1).float().argmax(-1, keepdim=True)
    return block * block_size + torch.minimum(torch.maximum(offset, first), last)


def response_seeds(prompts: int, samples: int, generator: torch.Generator, seed: int | None) -> Tensor:
    """Return one seed per response, `[prompt sample]`: from `generator`, or from a new one if `seed` is given."""
    stream = generator if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(2**62, (prompts, samples), generator=stream)
