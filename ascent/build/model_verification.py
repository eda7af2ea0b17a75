"""Verify that engine and learner compute a model's own log-probs, on random tokens, before the model is used.

The reference is the model's plain forward pass over one unpadded sequence. All forward passes of a run are compared
with it: the learner's, with and without shared prompts, and the engine's decoding with a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.sampling_params import SamplingParams
from ascent.core.types import Rollouts
from ascent.inference.generation_state import GenerationState
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner
from ascent.models.causal_lm import LanguageModel, is_mixed_precision, set_mixed_precision
from ascent.models.fused_layers import fuse_layers
from ascent.models.lm_head import LMHead
from ascent.models.packed_attention import packed_attention_enabled
from ascent.models.quantization import is_quantized, unquantized_parameters
from ascent.training.packing import hidden_states, targets

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest difference of a token's log-probs by rounding; in half precision, of the mean over tokens."""
MAX_ERROR_RATIO = 2.0
"""In half precision, largest ratio of the error against float32 log-probs to that of the model's own forward pass."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
PROBE_TOKENS = 5
"""Length of the longest response of a probe."""


@torch.no_grad()
def verify_model(
    lm: LanguageModel, longest: int = 0, share: bool = True, sampled: bool = True, fused: bool = False
) -> str | None:
    """Verify a model and set `lm.can_share_prompts`; return why prompts cannot be shared, or None if they can.

    Prompts are shared only with `share`. `longest` is the maximum length of a prompt with its response, and `sampled`
    says whether responses are sampled from the model. With `fused` the layers are fused for training, unless that
    changes log-probs. The probe has a dozen tokens; if `longest` exceeds an attention window or chunk, it is slightly
    longer than the largest of these. ConfigError is raised if the log-prob of a token depends on later tokens or on
    other sequences of the batch, or if even the plain passes do not reproduce the model's log-probs.
    """
    _check_rotary(lm, longest)
    windows = [size for size in attention_windows(lm) if size < longest]
    batch, dtype, head = _make_probe(lm, longest, windows), next(lm.model.parameters()).dtype, LMHead.of(lm.model)
    action = targets(batch, lm.device)[:, None]
    own, early = (torch.log_softmax(logits, -1) for logits in _reference_logits(lm, batch))
    exact = _float32_logprobs(lm, batch) if dtype in HALF_DTYPES else None

    def gap(logits: Tensor) -> float:
        logprobs = torch.log_softmax(logits, -1)
        error = _relative_gap(logprobs.gather(-1, action), own.gather(-1, action), dtype)
        return error if exact is None else max(error, _relative_error(logprobs, own, exact))

    def learned() -> float:
        return gap(head.logits(hidden_states(lm, batch)))

    def decoded(decoder: Callable[..., Any]) -> float:
        forced = ForcedGeneration(batch, head)
        prompts = [row[row >= 0].tolist() for row in batch.prompt]
        decoder(lm, prompts, batch.mask.shape[1], 3, forced)()
        return gap(torch.stack([forced.logits[place] for place in sorted(forced.logits)]))

    def why_not() -> str | None:
        if windows:
            return f"its attention sees {min(windows)} tokens, and there may be {longest}"
        try:
            with packed_attention_enabled(lm.model):
                shared = max(learned(), decoded(PagedRunner) if sampled else 0.0)
        except NotImplementedError as error:
            return str(error)
        except Exception as error:  # an architecture may fail in any way with a layout that it does not support
            return f"{type(error).__name__}: {error}"
        return None if shared < 1 else f"log-probs would be {shared:.2g} times as far off as rounding explains"

    kind = type(lm.model).__name__
    if not _relative_gap(own[0], early[0], dtype) < 1:
        raise ConfigError(f"{kind}: the log-prob of a token depends on later tokens, so it cannot be sampled")
    lm.can_share_prompts = False
    if fused:
        _try_fusing(lm, learned)
    untrainable = f"{kind}: Ascent cannot train it: its logits are not the product of its LM head and hidden states"
    _require_equal(learned, untrainable)
    lm.can_share_prompts = True
    why = why_not() if share else "share_prompts is off"
    lm.can_share_prompts = why is None
    if sampled and not lm.can_share_prompts:
        fault = f"{kind}: Ascent cannot sample from it: decoding with a cache does not give its log-probs"
        _require_equal(lambda: decoded(EagerRunner), fault)
    return why


def _relative_gap(a: Tensor, b: Tensor, dtype: torch.dtype) -> float:
    """Return the difference of two log-probs of the same tokens, relative to the tolerance for rounding."""
    difference = (a - b).abs()
    return float(difference.mean() if dtype in HALF_DTYPES else difference.max()) / TOLERANCE.get(dtype, 2e-3)


def _relative_error(logprobs: Tensor, own: Tensor, exact: Tensor) -> float:
    """Return the error against float32 log-probs, relative to the tolerated multiple of the model's own error.

    The median over tokens is taken, because a router that rounds to other experts changes a few tokens.
    """
    error, own_error = ((x - exact).square().mean(-1).sqrt().median() for x in (logprobs, own))
    return float(error / (own_error + 1e-4)) / MAX_ERROR_RATIO


def _try_fusing(lm: LanguageModel, compare: Callable[[], float]) -> None:
    """Fuse a model's layers; undo it if the log-probs of the whole model change."""
    before = {module: module.__dict__.get("forward") for module in lm.model.modules()}
    fuse_layers(lm.model)
    lm.can_fuse_layers = compare() < 1
    for module, forward in () if lm.can_fuse_layers else before.items():
        module.__dict__.pop("forward", None)
        if forward is not None:
            module.forward = forward


def _require_equal(compare: Callable[[], float], fault: str) -> None:
    try:
        relative_gap = compare()
    except Exception as error:  # an architecture may fail in any way
        raise ConfigError(f"{fault} ({type(error).__name__}: {error})") from None
    if not relative_gap < 1:
        raise ConfigError(f"{fault} (they are {relative_gap:.2g} times as far apart as rounding explains)")


class ForcedGeneration(GenerationState):
    """Generation that returns the probe's tokens, whatever their probability, and keeps the logits."""

    def __init__(self, batch: Rollouts, head: LMHead):
        rows = zip(batch.response.flatten(0, 1), batch.mask.flatten(0, 1), strict=True)
        self.forced = [row[mask].tolist() for row, mask in rows]
        lengths = torch.tensor([len(row) for row in self.forced])
        super().__init__(
            len(lengths), batch.mask.shape[2], frozenset(), head, None, 1.0, SamplingParams(), limits=lengths
        )
        self.logits: dict[tuple[int, int], Tensor] = {}
        """Logits by response and token index."""

    def sample(self, hidden: Tensor, row: list[int]) -> Tensor:
        token = []
        for response, t, logits in zip(row, self.lengths[row].tolist(), self.head.logits(hidden), strict=True):
            self.logits[response, t] = logits
            token.append(self.forced[response][t])
        self.lengths[row] += 1
        return torch.tensor(token, device=hidden.device)


def _float32_logprobs(lm: LanguageModel, batch: Rollouts) -> Tensor | None:
    """Return log-probs of the model's forward pass with all parameters in float32, or None if it fails.

    The GPU may have too little memory for it, and some architectures mix dtypes themselves.
    """
    originals: list[Any] = [(p, "data", p.data) for p in unquantized_parameters(lm.model)]
    originals += [(module, "dtype", module.dtype) for module in lm.model.modules() if is_quantized(module)]
    mixed = is_mixed_precision(lm.model)
    set_mixed_precision(lm.model, False)
    try:
        for owner, name, value in originals:
            setattr(owner, name, value.float() if name == "data" else torch.float32)
        return torch.log_softmax(_reference_logits(lm, batch)[0], -1)
    except Exception:
        return None
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)
        set_mixed_precision(lm.model, mixed)


# ---- properties of a model's config ---------------------------------------------------------------------


def attention_windows(lm: LanguageModel) -> set[int]:
    """Return the sizes of sliding windows and attention chunks.

    The cache of transformers has them for every layer of most architectures; older ones have a config field.
    """
    from transformers import DynamicCache

    layers = DynamicCache(config=lm.model.config).layers
    sizes = [getattr(layer, "sliding_window", None) for layer in layers]
    sizes += [getattr(lm.config, name, None) for name in ("window_size", "attention_window_size")]
    return {size for size in sizes if isinstance(size, int)}


def _check_rotary(lm: LanguageModel, longest: int) -> None:
    """Raise ConfigError if RoPE angles, and so log-probs, depend on the longest sequence of a forward pass.

    Cached keys have the angles of shorter sequences, and a packed or padded sequence those of other sequences.
    """
    for kind, room in _length_dependent_rope(lm):
        if room < longest:
            raise ConfigError(
                f"{type(lm.model).__name__}: its rotary embedding ({kind}) has other angles in texts of more than "
                f"{room} tokens, so the log-probs of a token depend on what follows it; there may be {longest}. Set "
                f"--max-prompt and --max-tokens to {room} together, or less"
            )


def _length_dependent_rope(lm: LanguageModel) -> Iterator[tuple[str, int]]:
    """Yield the RoPE types whose angles depend on the sequence length, with the length from which on they do."""
    for module in lm.backbone.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "longrope":
                parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
                parameters = parameters if layer is None else parameters[layer]
                yield kind, parameters["original_max_position_embeddings"]
            elif "dynamic" in str(kind):
                yield kind, module.original_max_seq_len  # type: ignore[misc]


# ---- the probe -----------------------------------------------------------------------------------------


def _make_probe(lm: LanguageModel, longest: int, windows: list[int]) -> Rollouts:
    """Return two groups of random tokens of different lengths. Responses of the first exceed the largest window."""
    prompt_tokens = max(7, min(max(windows, default=0) - 1, longest - PROBE_TOKENS))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(lm.vocab_size, (2, prompt_tokens), generator=generator)
    prompt[1, 4:] = -1
    response = torch.randint(lm.vocab_size, (2, 2, PROBE_TOKENS), generator=generator)
    mask = torch.arange(PROBE_TOKENS) < torch.tensor([[PROBE_TOKENS, 3], [1, 4]]).unsqueeze(-1)
    return Rollouts(prompt, response, mask, torch.zeros(mask.shape), PROBE_TOKENS, torch.zeros(2, 2, dtype=torch.bool))


def _reference_logits(lm: LanguageModel, batch: Rollouts) -> tuple[Tensor, Tensor]:
    """Return the model's own logits in float32 or better, computed one unpadded sequence at a time.

    The first tensor has the logits before each action of the probe, the second those after its first prompt alone.
    """

    def last(ids: Tensor, count: int) -> Tensor:
        logits = lm.model(ids[None].to(lm.device), use_cache=False, logits_to_keep=count).logits[0, -count:]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    prompts = [row[row >= 0] for row in batch.prompt]
    rows = zip(prompts, batch.response, batch.mask, strict=True)
    logits = [
        last(torch.cat([prompt, response[mask][:-1]]), int(mask.sum()))
        for prompt, responses, masks in rows
        for response, mask in zip(responses, masks, strict=True)
    ]
    return torch.cat(logits), last(prompts[0], 1)
