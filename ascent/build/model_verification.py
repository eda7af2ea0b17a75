"""Do the engines compute a model's own log-probs? Proven on a probe of random tokens, before the model is used.

The model's own log-probs are those of its plain forward pass over one unpadded sequence. Compared with them are all the
passes that a run takes: the learner's, plain or with shared prompts, and the sampler's decoding with a cache.
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
"""How far two log-probs of one token may be apart by rounding alone; in half precision, on average over tokens."""
MAX_ERROR_RATIO = 2.0
"""In half precision, how many times farther from float32 log-probs may be than those of the model's own forward."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
PROBE_TOKENS = 5
"""Of the longest response of a probe."""


@torch.no_grad()
def verify_model(
    lm: LanguageModel, longest: int = 0, share: bool = True, sampled: bool = True, fused: bool = False
) -> str | None:
    """Set `lm.can_share_prompts`; None where a group can share its prompt (if `share` asks for it), else why not.

    `longest`: the tokens that a prompt and its response may have together. `sampled`: are responses drawn from it?
    `fused`: will it be trained with fused parts? Then they are fused here, and left alone where log-probs change.
    The probe has a dozen tokens. Where `longest` passes an attention window or chunk, it has a few more than the
    largest of these, so it costs no more than the run's own texts. A model is refused if its log-prob of a token
    depends on later tokens or on the texts beside it, or if even the plain passes do not give its log-probs.
    """
    _check_rotary(lm, longest)
    windows = [size for size in attention_windows(lm) if size < longest]
    batch, dtype, head = _make_probe(lm, longest, windows), next(lm.model.parameters()).dtype, LMHead.of(lm.model)
    action = targets(batch, lm.device)[:, None]
    own, early = (torch.log_softmax(logits, -1) for logits in _reference_logits(lm, batch))
    exact = _float32_logprobs(lm, batch) if dtype in HALF_DTYPES else None

    def gap(logits: Tensor) -> float:
        found = torch.log_softmax(logits, -1)
        apart = _relative_gap(found.gather(-1, action), own.gather(-1, action), dtype)
        return apart if exact is None else max(apart, _relative_error(found, own, exact))

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
        except Exception as error:  # whatever an architecture of any kind does with a layout that it does not know
            return f"{type(error).__name__}: {error}"
        return None if shared < 1 else f"log-probs would be {shared:.2g} times as far off as rounding explains"

    kind = type(lm.model).__name__
    if not _relative_gap(own[0], early[0], dtype) < 1:
        raise ConfigError(f"{kind}: the log-prob of a token depends on the tokens behind it, so it cannot be sampled")
    lm.can_share_prompts = False
    if fused:
        _try_fusing(lm, learned)
    _require_equal(learned, f"{kind}: Ascent cannot train it: its logits are not its head times its hidden states")
    lm.can_share_prompts = True
    why = why_not() if share else "nobody asked for it"
    lm.can_share_prompts = why is None
    if sampled and not lm.can_share_prompts:
        fault = f"{kind}: Ascent cannot sample from it: decoding with a cache does not give its log-probs"
        _require_equal(lambda: decoded(EagerRunner), fault)
    return why


def _relative_gap(a: Tensor, b: Tensor, dtype: torch.dtype) -> float:
    """How far log-probs of the same tokens are apart; 1 is what rounding explains."""
    off = (a - b).abs()
    return float(off.mean() if dtype in HALF_DTYPES else off.max()) / TOLERANCE.get(dtype, 2e-3)


def _relative_error(found: Tensor, own: Tensor, exact: Tensor) -> float:
    """How much farther from float32 log-probs are than the model's own; 1 is what rounding explains.

    At the median of the tokens, because a router that rounds to other experts moves all log-probs of a few.
    """
    packed_attention_enabled, theirs = ((one - exact).square().mean(-1).sqrt().median() for one in (found, own))
    return float(packed_attention_enabled / (theirs + 1e-4)) / MAX_ERROR_RATIO


def _try_fusing(lm: LanguageModel, compare: Callable[[], float]) -> None:
    """Fuse a model's parts; undo it where the log-probs of the whole model are no longer its own."""
    before = {module: module.__dict__.get("forward") for module in lm.model.modules()}
    fuse_layers(lm.model)
    lm.can_fuse_layers = compare() < 1
    for module, forward in () if lm.can_fuse_layers else before.items():
        module.__dict__.pop("forward", None)
        if forward is not None:
            module.forward = forward


def _require_equal(compare: Callable[[], float], fault: str) -> None:
    try:
        apart = compare()
    except Exception as error:  # whatever an architecture of any kind does with what is asked of it
        raise ConfigError(f"{fault} ({type(error).__name__}: {error})") from None
    if not apart < 1:
        raise ConfigError(f"{fault} (they are {apart:.2g} times as far apart as rounding explains)")


class ForcedGeneration(GenerationState):
    """The probe's tokens are drawn, whatever their probability, and the logits are kept."""

    def __init__(self, batch: Rollouts, head: LMHead):
        rows = zip(batch.response.flatten(0, 1), batch.mask.flatten(0, 1), strict=True)
        self.forced = [row[mask].tolist() for row, mask in rows]
        lengths = torch.tensor([len(row) for row in self.forced])
        super().__init__(
            len(lengths), batch.mask.shape[2], frozenset(), head, None, 1.0, SamplingParams(), limits=lengths
        )
        self.logits: dict[tuple[int, int], Tensor] = {}
        """By response and token."""

    def sample(self, hidden: Tensor, row: list[int]) -> Tensor:
        token = []
        for response, t, logits in zip(row, self.lengths[row].tolist(), self.head.logits(hidden), strict=True):
            self.logits[response, t] = logits
            token.append(self.forced[response][t])
        self.lengths[row] += 1
        return torch.tensor(token, device=hidden.device)


def _float32_logprobs(lm: LanguageModel, batch: Rollouts) -> Tensor | None:
    """The log-probs of its own forward pass with every parameter in float32; None where that is not possible.

    A GPU may have no room for it, and some architectures mix types themselves.
    """
    narrow: list[Any] = [(p, "data", p.data) for p in unquantized_parameters(lm.model)]
    narrow += [(module, "dtype", module.dtype) for module in lm.model.modules() if is_quantized(module)]
    mixed = is_mixed_precision(lm.model)
    set_mixed_precision(lm.model, False)
    try:
        for owner, name, value in narrow:
            setattr(owner, name, value.float() if name == "data" else torch.float32)
        return torch.log_softmax(_reference_logits(lm, batch)[0], -1)
    except Exception:
        return None
    finally:
        for owner, name, value in narrow:
            setattr(owner, name, value)
        set_mixed_precision(lm.model, mixed)


# ---- what a model says of itself ---------------------------------------------------------------------


def attention_windows(lm: LanguageModel) -> set[int]:
    """How many tokens each layer sees that does not see all: its sliding window or its chunk.

    transformers' cache knows it of every layer of most architectures; older ones have a setting of their own.
    """
    from transformers import DynamicCache

    layers = DynamicCache(config=lm.model.config).layers
    sizes = [getattr(layer, "sliding_window", None) for layer in layers]
    sizes += [getattr(lm.config, name, None) for name in ("window_size", "attention_window_size")]
    return {size for size in sizes if isinstance(size, int)}


def _check_rotary(lm: LanguageModel, longest: int) -> None:
    """Angles of rotary positions that depend on the longest text of a forward pass: then log-probs do, past a length.

    Cached keys were turned by the angles of shorter texts, and a packed or padded text by those of its neighbours.
    """
    for kind, room in _length_dependent_rope(lm):
        if room < longest:
            raise ConfigError(
                f"{type(lm.model).__name__}: its rotary positions ({kind}) turn by other angles in texts of more than "
                f"{room} tokens, so the log-probs of a token depend on what follows it; there may be {longest}. Set "
                f"--max-prompt and --max-tokens to {room} together, or less"
            )


def _length_dependent_rope(lm: LanguageModel) -> Iterator[tuple[str, int]]:
    """The kind of rotary positions, and the length past which their angles depend on the length."""
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
    """Two groups of random tokens, ragged in every way. The responses of the first pass the largest of the windows."""
    long = max(7, min(max(windows, default=0) - 1, longest - PROBE_TOKENS))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(lm.vocab_size, (2, long), generator=generator)
    prompt[1, 4:] = -1
    response = torch.randint(lm.vocab_size, (2, 2, PROBE_TOKENS), generator=generator)
    mask = torch.arange(PROBE_TOKENS) < torch.tensor([[PROBE_TOKENS, 3], [1, 4]]).unsqueeze(-1)
    return Rollouts(prompt, response, mask, torch.zeros(mask.shape), PROBE_TOKENS, torch.zeros(2, 2, dtype=torch.bool))


def _reference_logits(lm: LanguageModel, batch: Rollouts) -> tuple[Tensor, Tensor]:
    """The model's own logits in float32 or better, one unpadded sequence at a time.

    Before each action of the probe; and behind its first prompt alone, when nothing follows.
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
