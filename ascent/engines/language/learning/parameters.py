"""What a learner does to a model's parameters, and how much of a batch fits beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ascent.core.types import Refused
from ascent.policies.causal_lm import LanguageModel

SHARE = 0.6
"""Of a GPU's memory beside the learner's own state, what activations may take."""
CPU_TOKENS = 8192
"""In a micro-batch on a CPU, which gains nothing from more."""
STATE_BYTES = 18
"""A trained parameter's: itself in bfloat16, and its copy, gradient and two moments in float32."""


@torch.no_grad()
def load_params(own: dict[str, Tensor], given: dict[str, Tensor], partly: bool = False) -> None:
    """Trained parameters from a checkpoint; refused where they are another model's."""
    same = own.keys() >= given.keys() if partly else own.keys() == given.keys()
    if not same or any(own[k].shape != given[k].shape for k in given):
        raise Refused(
            "these parameters are not this model's: set the --model and --policy.lora that they were made with"
        )
    for name, value in given.items():
        own[name].copy_(value)


def begin_with(lm: LanguageModel, params: dict[str, Tensor]) -> list[Tensor]:
    """The float32 copies of half-precision parameters: as they were stored, where that was finer, or as they are.

    A copy that begins at its rounded value has to move by half of the rounding before the model moves at all.
    """
    stored, lm.exact = lm.exact, {}
    found = []
    for name, p in params.items():
        exact = stored.get(name)
        same = exact is not None and torch.equal(exact.to(p.dtype), p)  # not if it was started from another run
        found.append(exact.float() if exact is not None and same else p.detach().float().clone())
    return found


@contextmanager
def gradients_into(wide: list[Tensor], narrow: list[Tensor]) -> Iterator[None]:
    """Inside, a gradient that comes to a narrow parameter is added to that of its wide copy, and not kept."""

    def adding(to: Tensor) -> Callable[[Tensor], None]:
        def add(p: Tensor) -> None:
            assert p.grad is not None
            to.grad = p.grad.float() if to.grad is None else to.grad.add_(p.grad)
            p.grad = None

        return add

    pairs = [] if wide is narrow else zip(narrow, wide, strict=True)
    hooks = [p.register_post_accumulate_grad_hook(adding(to)) for p, to in pairs]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def without_dropout(lm: LanguageModel) -> None:
    """Log-probs are the policy's own only without dropout; then training mode is nothing but checkpointing."""
    for module in lm.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def bytes_per_token(lm: LanguageModel, checkpointing: bool) -> int:
    """What autograd keeps of a token, about.

    Of width w and inner width i, a layer keeps 11·w + 4·i numbers: the norms' inputs (in float32), queries, keys,
    values, what they mix, and the four tensors of the gated MLP. With checkpointing that of one layer, and w of each.
    """
    config: Any = lm.model.config
    size, layers, width = lm.model.dtype.itemsize, config.num_hidden_layers, config.hidden_size
    layer = size * (11 * width + 4 * (getattr(config, "intermediate_size", None) or 4 * width))
    return layer + size * width * layers if checkpointing else layer * layers


def room(lm: LanguageModel, checkpointing: bool, reference: bool = False, critic: nn.Module | None = None) -> int:
    """Tokens in a micro-batch where nobody says how many: on a GPU what its memory should hold.

    From the size of the card and not from what is free on it, so that the same run is cut in the same way. A critic is
    in float32, with gradient and moments, and takes the same micro-batches.
    """
    if lm.device.type != "cuda":
        return CPU_TOKENS
    state = sum(p.numel() * (STATE_BYTES if p.requires_grad else p.element_size()) for p in lm.model.parameters())
    state += sum(p.numel() * p.element_size() for p in lm.trained().values()) if reference else 0
    state += 0 if critic is None else sum(4 * p.numel() * p.element_size() for p in critic.parameters())
    free = torch.cuda.get_device_properties(lm.device).total_memory - state
    wider = 1 if critic is None else max(1, 4 // lm.model.dtype.itemsize)
    return max(1, int(SHARE * free / (wider * bytes_per_token(lm, checkpointing))))
