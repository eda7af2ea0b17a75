"""AdamW for bfloat16 parameters in 10 bytes per parameter; float32 master weights, gradients and moments take 18.

    master     its float32 bits are (bits of the parameter << 16) + low, with 16 low bits: steps are exact
    moments    in bfloat16 with stochastic rounding, E[rounded x] = x; to nearest, 0.999·v + 0.001·g² would stay v
    gradient   summed over micro-batches in bfloat16, with stochastic rounding

A parameter is its master weight rounded to nearest, ties away from 0; with ties to even, two master weights would have
the same parameter and low bits. Each step is AdamW in float32, on the master weights and on moments that are rounded
when they are stored. Random bits are a hash of the seed, the index of the parameter, its step and the position in it:
a resumed run gets the same bits. `ReferenceOps` defines what the kernels compute and runs without Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.ops import load_kernels

CHUNK_NUMEL = 2**22
"""Number of elements that `ReferenceOps` process at a time, to limit temporary memory."""
MOMENTS = ("exp_avg", "exp_avg_sq")
UINT32_MASK, HASH_MULTIPLIER_1, HASH_MULTIPLIER_2 = 2**32 - 1, 0x7FEB352D, 0x846CA68B
Keys = tuple[int, int]
"""The two 32-bit keys of a stream of random bits."""


# ---- bits ------------------------------------------------------------------------------------------


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 tensor into the nearest bfloat16 tensor and the low bits that restore it."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    high = (bits + 0x8000) >> 16
    return high.short().view(torch.bfloat16), (bits - high * 2**16).short()


def join_master(high: Tensor, low: Tensor) -> Tensor:
    """Restore the float32 tensor from its two parts."""
    return (high.view(torch.int16).int() * 2**16 + low.int()).view(torch.float32)


def random_keys(seed: int, *numbers: int) -> Keys:
    """Return the keys of the stream of these numbers, by splitmix64 (Steele, Lea and Flood 2014)."""
    x = seed
    for number in numbers:
        x = (x + 0x9E3779B97F4A7C15 * (number + 1)) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
    return x & UINT32_MASK, x >> 32


def random_bits(keys: Keys, start: int, count: int, device: torch.device) -> Tensor:
    """Return 32 random bits per position, as int64, by a hash in which each input bit flips half of the output bits."""
    x = torch.arange(start, start + count, device=device) + keys[0] & UINT32_MASK
    x = (x ^ x >> 16) * HASH_MULTIPLIER_1 & UINT32_MASK
    x = ((x ^ x >> 15) + keys[1]) * HASH_MULTIPLIER_2 & UINT32_MASK
    return x ^ x >> 16


def stochastic_round(x: Tensor, random: Tensor) -> Tensor:
    """Round float32 to bfloat16 stochastically, with 16 random bits."""
    bits = (x.view(torch.int32) + random.int()) >> 16
    return torch.where(x.isnan(), 0x7FC0, bits).short().view(torch.bfloat16)


# ---- a step ----------------------------------------------------------------------------------------


def adamw(master: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], step: int, group: dict[str, Any]) -> None:
    """Take torch's AdamW step in place, on float32 tensors."""
    beta1, beta2 = group["betas"]
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    torch._fused_adamw_(
        [master], [grad], [moments[0]], [moments[1]], [], [torch.tensor(float(step), device=master.device)],
        beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, **settings,
    )  # fmt: skip


class ReferenceOps:
    """The reference implementation of the kernels in PyTorch. All tensors are flat."""

    @staticmethod
    def add(total: Tensor, grad: Tensor, keys: Keys) -> None:
        """Compute total += grad with stochastic rounding."""
        for start in range(0, len(total), CHUNK_NUMEL):
            chunk = slice(start, start + CHUNK_NUMEL)
            exact = total[chunk].float() + grad[chunk]
            total[chunk] = stochastic_round(exact, random_bits(keys, start, len(exact), total.device) & 0xFFFF)

    @staticmethod
    def step(
        p: Tensor, low: Tensor, m: Tensor, v: Tensor, grad: Tensor, scale: Tensor, keys: Keys, step: int, group: Any
    ) -> None:
        """Take one step of AdamW with scale·grad."""
        for start in range(0, len(p), CHUNK_NUMEL):
            chunk = slice(start, start + CHUNK_NUMEL)
            master, moments = join_master(p[chunk], low[chunk]), (m[chunk].float(), v[chunk].float())
            adamw(master, grad[chunk].float() * scale, moments, step, group)
            random = random_bits(keys, start, len(master), p.device)
            p[chunk], low[chunk] = split_master(master)
            m[chunk], v[chunk] = (
                stochastic_round(moments[0], random & 0xFFFF),
                stochastic_round(moments[1], random >> 16),
            )


class CompactAdamW(torch.optim.Optimizer):
    """AdamW with 10 bytes per bfloat16 parameter. Other parameters, such as a value head, have float32 state."""

    def __init__(self, parameters: list[Tensor], masters: Iterable[Tensor], template: Any, seed: int, ops: Any = None):
        """`masters`: float32 values of the first parameters; `template`: an AdamW with the settings to use."""
        if not isinstance(template, torch.optim.AdamW):
            raise ConfigError(
                f"--policy.optimizer-state bfloat16 requires Adam, but this update uses {type(template).__name__}: set "
                "float32"
            )
        super().__init__(parameters, template.defaults)
        self.seed = seed
        self.pending_scale: Tensor | None = None
        self.ops: Any = ops or (load_kernels("triton_adamw") if parameters[0].is_cuda else None) or ReferenceOps
        with torch.no_grad():
            for p, master in zip_longest(parameters, masters):
                if p.dtype == torch.bfloat16:  # other dtypes are not the upper half of float32 bits
                    high, self.state[p]["low"] = split_master(master)
                    p.copy_(high)
                for name in MOMENTS:  # allocated now, before the KV cache takes the free memory
                    self.state[p][name] = torch.zeros_like(p, memory_format=torch.contiguous_format)

    def masters(self) -> Iterator[Tensor]:
        """Yield every parameter in float32."""
        for p in self.param_groups[0]["params"]:
            yield join_master(p.detach(), self.state[p]["low"]) if "low" in self.state[p] else p.detach()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return ‖g‖ in float32."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)))

    def scale(self, gradients: list[Tensor], factor: Tensor) -> None:
        """Scale the gradients in the next step, in float32."""
        self.pending_scale = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group, scale, self.pending_scale = self.param_groups[0], self.pending_scale, None
        scale = torch.ones((), device=group["params"][0].device) if scale is None else scale
        for index, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            state = self.state[p]
            step = self._steps(p) + 1
            state["step"] = torch.tensor(float(step))
            if "low" in state:
                flat = [x.detach().view(-1) for x in (p, state["low"], *(state[name] for name in MOMENTS), p.grad)]
                self.ops.step(*flat, scale, random_keys(self.seed, index, step, 0), step, group)
            else:
                adamw(p.detach(), p.grad * scale, (state[MOMENTS[0]], state[MOMENTS[1]]), step, group)

    def _steps(self, p: Tensor) -> int:
        return int(self.state[p].get("step", 0))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Sum bfloat16 gradients with stochastic rounding, and assign the sums to `.grad` on exit."""
        compact = [(index, p) for index, p in enumerate(self.param_groups[0]["params"]) if "low" in self.state[p]]
        totals: dict[int, Tensor] = {}
        sum_terms: dict[int, int] = {}

        def add(index: int, p: Tensor) -> None:
            assert p.grad is not None
            grad, p.grad = p.grad.contiguous(), None
            if index not in totals:
                totals[index] = grad
                return
            sum_terms[index] = sum_terms.get(index, 0) + 1
            keys = random_keys(self.seed, index, self._steps(p) + 1, sum_terms[index])
            self.ops.add(totals[index].view(-1), grad.view(-1), keys)

        hooks = [p.register_post_accumulate_grad_hook(partial(add, index)) for index, p in compact]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for index, p in compact:
            p.grad = totals.get(index)


# ---- checkpoints: conversion between both forms --------------------------------------------------------------


def to_float32_state(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Convert a checkpoint with compact state to float32 state, without loss."""
    saved, params = state["optimizer"], state["params"]
    if not any(name.endswith(".low") for name in saved):
        return state
    lows = {name: saved.get(f"{index}.low") for index, name in enumerate(names)}
    masters = {name: params[name] if low is None else join_master(params[name], low) for name, low in lows.items()}
    stepped_names = (name for name in saved if f"{name.split('.')[0]}.step" in saved)
    optimizer = {name: saved[name] for name in stepped_names if not name.endswith(".low")}
    return state | {"wide": masters, "optimizer": {name: value.float() for name, value in optimizer.items()}}


def to_compact_state(state: dict[str, Any], names: list[str], optimizer: CompactAdamW) -> dict[str, Any]:
    """Convert a checkpoint to compact state and check its shapes. The moments of float32 state are rounded."""
    saved, params = dict(state["optimizer"]), dict(state["params"])
    is_float32 = not any(name.endswith(".low") for name in saved)
    for index, name in enumerate(names):
        p = optimizer.param_groups[0]["params"][index]
        if "low" not in optimizer.state[p]:
            continue
        if is_float32:
            params[name], saved[f"{index}.low"] = split_master(state.get("wide", params)[name].float())
        for key in MOMENTS:
            if f"{index}.{key}" in saved:
                saved[f"{index}.{key}"] = saved[f"{index}.{key}"].bfloat16()
        for key, dtype in {"low": torch.int16, **dict.fromkeys(MOMENTS, torch.bfloat16)}.items():
            value = saved.get(f"{index}.{key}")
            if value is None and is_float32:  # it was never stepped
                continue
            if value is None or value.shape != p.shape or value.dtype != dtype:
                mismatch = "missing" if value is None else f"{tuple(value.shape)} in {value.dtype}"
                raise ConfigError(
                    f"the optimizer state of the checkpoint does not match this model: {key} of {name} is {mismatch}"
                )
    others = {group: values for group, values in state.items() if group != "wide"}
    return others | {"params": params, "optimizer": saved}
