"""Default precision of a new run on a GPU: the fastest one that loses no accuracy per sample.

Measured with all parameters trained (benchmarks/results/rounding_gpu.md): float16 and mixed learn as float32 does, and
bfloat16 loses a point. float16 is faster but has a smaller range: the model is tried first, and mixed is used where
its activations are too large. Where nothing was measured, the default is bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascent.core.config import Config
from ascent.core.update import Adam
from ascent.distributed.ranks import in_ray_cluster, is_torchrun_process
from ascent.models.causal_lm import PYTHON_MODELS, LanguageModel, pick_device
from ascent.training.micro_batches import COMPACT_THRESHOLD, static_bytes

FLOAT16_MARGIN = 2
"""Safety factor: the largest activation of a probe times this must fit into the range of float16."""
PROBE_SHAPE = (64, 8)
"""Number of sequences and of tokens. Most models have their largest activations at the first token of any text."""


def float16_obstacle(config: Config) -> str | None:
    """Return why float16 is not the default of this config on this GPU; None: the model itself decides."""
    policy, algorithm = config.policy, config.algorithm
    reasons = {
        "--policy.dtype says it": policy.dtype != "auto",
        "the model was given, with its own precision": policy.model in PYTHON_MODELS,
        "it was measured on policies alone": config.data != "samples" or algorithm.loss.trains != "policy",
        "it was measured with every parameter, and not with adapters": bool(policy.lora or policy.last_layers),
        "it was not measured with a critic": algorithm.critic.enabled,
        "gradients are scaled for Adam": not isinstance(algorithm.update, Adam),
        "bfloat16 state is for parameters in bfloat16": policy.optimizer_state == "bfloat16",
        "an engine has the precision that it was started with": policy.engine != "local",
        "it was not measured on several ranks": is_torchrun_process() or in_ray_cluster(),
    }
    return next((why for why, holds in reasons.items() if holds), None) or _device_obstacle(pick_device(policy.device))


def _device_obstacle(device: torch.device) -> str | None:
    """Return why float16 is not the default on this device."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return "it was measured on a GPU of NVIDIA's that has bfloat16 too"
    return None


def choose_precision(config: Config, lm: LanguageModel) -> tuple[str, str | None]:
    """Return the dtype for a run whose model was loaded in float16, and the reason if it is not float16."""
    if (
        lm.device.type == "cuda"
        and static_bytes(lm, config.algorithm.reference.enabled, None) > COMPACT_THRESHOLD * lm.gpu_memory
    ):
        return "auto", "bfloat16 state, which fits the GPU, is for parameters in bfloat16"
    largest = max_activation(lm)
    if largest < torch.finfo(torch.float16).max / FLOAT16_MARGIN:
        return "float16", None
    return "mixed", f"float16 has not enough range: activations of a few random tokens are as large as {largest:.3g}"


@torch.no_grad()
def max_activation(lm: LanguageModel) -> float:
    """Return the largest absolute output of any module for random tokens; infinite if one is NaN."""
    maxima: list[Tensor] = []

    def record_maximum(_module: Any, _args: Any, out: Any) -> None:
        for part in out if isinstance(out, tuple) else (out,):
            if isinstance(part, Tensor) and part.is_floating_point() and part.numel():
                maxima.append(part.abs().amax().nan_to_num(torch.inf, torch.inf).double())

    ids = torch.randint(lm.vocab_size, PROBE_SHAPE, generator=torch.Generator().manual_seed(0))
    ids[0, 0] = lm.eos_token_id
    hooks = [module.register_forward_hook(record_maximum) for module in lm.backbone.modules()]
    try:
        lm.backbone(input_ids=ids.to(lm.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return float(torch.stack(maxima).max())
