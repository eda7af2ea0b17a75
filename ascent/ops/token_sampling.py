"""Drawing tokens: one uniform number per token from a stream of the response's own, and the inverse of the CDF.

The number that decides token t of a response is a hash of (the response's seed, t). So what is drawn does not
depend on which responses were decoded together. Floating point limits that in one place: matrix products over
batches of other sizes round differently, and where the uniform number falls within that rounding (about 1e-6)
of a boundary between two tokens, the other one is drawn.
"""

import torch
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.ops import cpu_kernels


def uniform(seed: Tensor, t: Tensor) -> Tensor:
    """A number in [0, 1) from a response's seed and a token's index: splitmix64, in float64."""
    x = seed + (t + 1) * -7046029254386353131  # the golden ratio's 64 bits, as a signed number
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    x = x ^ _shift(x, 31)
    return _shift(x, 11).double() * 2.0**-53


def _shift(x: Tensor, by: int) -> Tensor:  # unsigned, to the right
    return (x >> by) & ((1 << (64 - by)) - 1)


def draw_tokens(
    logits: Tensor,
    temperature: float,
    support: SamplingParams,
    u: Tensor | None,
    barred: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One token per row, its log-prob over the full vocabulary, and the mass of what could be drawn (None: all).

    Without `u` the likeliest token is taken. `barred`: rows, as `[row]` of booleans, and tokens that they cannot draw.
    """
    if u is not None and support.whole and barred is None and cpu_kernels.fits(logits):
        return *cpu_kernels.draw_rows(logits, temperature, u), None
    z = logits if temperature == 1.0 else logits / temperature
    if barred is not None:
        return _draw_unbarred(z, support, u, *barred)
    p, mass = torch.softmax(z, -1), None
    if u is None:
        token = z.argmax(-1, keepdim=True)
    elif support.whole:
        token = _invert(p, u)
    else:
        allowed = torch.where(support.allowed(p), p, 0.0)
        token, mass = _invert(allowed, u), allowed.sum(-1)
    return token.squeeze(-1), torch.log(p.gather(-1, token)).squeeze(-1), mass


def _draw_unbarred(
    z: Tensor, support: SamplingParams, u: Tensor | None, rows: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """With q = p without the barred tokens, renormalized: drawn from q's support, with log p and the mass under p."""
    left = z.clone()
    left[:, tokens] = torch.where(rows[:, None], float("-inf"), z[:, tokens])
    whole = torch.logsumexp(z, -1, keepdim=True)
    if u is None:
        token, mass = left.argmax(-1, keepdim=True), None
    else:
        q = torch.softmax(left, -1)
        allowed = torch.where(support.allowed(q), q, 0.0)
        share = torch.exp(torch.logsumexp(left, -1) - whole.squeeze(-1))
        token = _invert(allowed, u)
        mass = (allowed.sum(-1) * share).clamp(torch.finfo(z.dtype).tiny, 1.0)
    return token.squeeze(-1), (z.gather(-1, token) - whole).squeeze(-1), mass


def _invert(p: Tensor, u: Tensor) -> Tensor:
    """The first token at which the running sum of p exceeds u times its total: first the block, then the token."""
    rows, vocab = p.shape
    block = 256
    cells = (torch.nn.functional.pad(p, (0, -vocab % block)) if vocab % block else p).view(rows, -1, block)
    sums = cells.sum(-1).double().cumsum(-1)
    point = u[:, None] * sums[:, -1:] * (1 - 1e-12)  # below the total, whatever the rounding
    which = (sums <= point).sum(-1, keepdim=True)
    before = torch.where(which > 0, sums.gather(-1, (which - 1).clamp(min=0)), 0.0)
    inside = cells.gather(1, which.unsqueeze(-1).expand(-1, -1, block)).squeeze(1)
    place = (before + inside.double().cumsum(-1) <= point).sum(-1, keepdim=True)
    possible = inside > 0  # rounding must not pass what may be drawn
    first = possible.float().argmax(-1, keepdim=True)
    last = block - 1 - possible.flip(-1).float().argmax(-1, keepdim=True)
    return which * block + torch.minimum(torch.maximum(place, first), last)


def response_seeds(prompts: int, samples: int, own: torch.Generator, seed: int | None) -> Tensor:
    """One per response, `[prompt sample]`, from the stream of this seed, or from the sampler's own."""
    stream = own if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(2**62, (prompts, samples), generator=stream)
