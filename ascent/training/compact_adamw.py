"""A bfloat16 parameter that is trained in 10 bytes, where a float32 copy, gradient and moments make them 18.

    master     its float32 bits are (bits of the parameter << 16) + low, with low in 16 bits: nothing of a step is lost
    moments    in bfloat16, rounded at random so that E[rounded x] = x: to nearest, 0.999·v + 0.001·g² would stay v
    gradient   summed over micro-batches in bfloat16, rounded at random too

A parameter is its master rounded to nearest, ties away from 0: ties to even would give two masters the same parameter
and the same low bits. A step is AdamW's in float32, on the master and on moments that are rounded only when they are
put away. Random bits are a hash of the seed, the parameter's place, its step and the position in it, so a resumed run
draws the same ones and none are stored. `ReferenceOps` is what the kernels compute, and what runs without Triton.
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

CHUNK = 2**22
"""Numbers that `ReferenceOps` work on at a time, because they need many times the memory of these."""
MOMENTS = ("exp_avg", "exp_avg_sq")
MASK, FIRST, SECOND = 2**32 - 1, 0x7FEB352D, 0x846CA68B
Keys = tuple[int, int]
"""Of a stream of random bits: two numbers of 32 bits."""


# ---- bits ------------------------------------------------------------------------------------------


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor as the nearest bfloat16 one and the low bits that give it back."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    high = (bits + 0x8000) >> 16
    return high.short().view(torch.bfloat16), (bits - high * 2**16).short()


def join_master(high: Tensor, low: Tensor) -> Tensor:
    """The float32 tensor that was split."""
    return (high.view(torch.int16).int() * 2**16 + low.int()).view(torch.float32)


def random_keys(seed: int, *numbers: int) -> Keys:
    """The stream of these numbers. (Steele, Lea and Flood 2014: splitmix64's mixing, once for each.)"""
    x = seed
    for number in numbers:
        x = (x + 0x9E3779B97F4A7C15 * (number + 1)) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
    return x & MASK, x >> 32


def random_bits(keys: Keys, start: int, count: int, device: torch.device) -> Tensor:
    """32 random bits for each position, as int64: a hash whose every input bit moves about half of all output bits."""
    x = torch.arange(start, start + count, device=device) + keys[0] & MASK
    x = (x ^ x >> 16) * FIRST & MASK
    x = ((x ^ x >> 15) + keys[1]) * SECOND & MASK
    return x ^ x >> 16


def stochastic_round(x: Tensor, random: Tensor) -> Tensor:
    """float32 to one of its two neighbours in bfloat16, with 16 random bits: to the nearer one more often."""
    bits = (x.view(torch.int32) + random.int()) >> 16
    return torch.where(x.isnan(), 0x7FC0, bits).short().view(torch.bfloat16)


# ---- a step ----------------------------------------------------------------------------------------


def adamw(master: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], step: int, group: dict[str, Any]) -> None:
    """torch's own step, in place, on float32 tensors."""
    beta1, beta2 = group["betas"]
    how = {name: group[name] for name in ("lr", "weight_decay", "eps")}
    torch._fused_adamw_(
        [master], [grad], [moments[0]], [moments[1]], [], [torch.tensor(float(step), device=master.device)],
        beta1=beta1, beta2=beta2, amsgrad=False, maximize=False, **how,
    )  # fmt: skip


class ReferenceOps:
    """What the kernels compute, in plain torch. All tensors are flat."""

    @staticmethod
    def add(total: Tensor, grad: Tensor, keys: Keys) -> None:
        """total += grad, rounded at random."""
        for at in range(0, len(total), CHUNK):
            here = slice(at, at + CHUNK)
            both = total[here].float() + grad[here]
            total[here] = stochastic_round(both, random_bits(keys, at, len(both), total.device) & 0xFFFF)

    @staticmethod
    def step(
        p: Tensor, low: Tensor, m: Tensor, v: Tensor, grad: Tensor, scale: Tensor, keys: Keys, step: int, group: Any
    ) -> None:
        """One step of AdamW with scale·grad."""
        for at in range(0, len(p), CHUNK):
            here = slice(at, at + CHUNK)
            master, moments = join_master(p[here], low[here]), (m[here].float(), v[here].float())
            adamw(master, grad[here].float() * scale, moments, step, group)
            random = random_bits(keys, at, len(master), p.device)
            p[here], low[here] = split_master(master)
            m[here], v[here] = (
                stochastic_round(moments[0], random & 0xFFFF),
                stochastic_round(moments[1], random >> 16),
            )


class CompactAdamW(torch.optim.Optimizer):
    """AdamW whose bfloat16 parameters take 10 bytes each. Others, such as a value head, have float32 state."""

    def __init__(self, parameters: list[Tensor], masters: Iterable[Tensor], made: Any, seed: int, ops: Any = None):
        """`masters`: of the first parameters, in float32; `made`: an AdamW with the settings of this one."""
        if not isinstance(made, torch.optim.AdamW):
            raise ConfigError(
                f"--policy.optimizer-state bfloat16 is for Adam, and this update steps by {type(made).__name__}: set "
                "float32"
            )
        super().__init__(parameters, made.defaults)
        self.seed = seed
        self.scaled: Tensor | None = None
        self.ops: Any = ops or (load_kernels("triton_adamw") if parameters[0].is_cuda else None) or ReferenceOps
        with torch.no_grad():
            for p, master in zip_longest(parameters, masters):
                if p.dtype == torch.bfloat16:  # only that has the upper half of the bits of float32
                    high, self.state[p]["low"] = split_master(master)
                    p.copy_(high)
                for name in MOMENTS:  # now, so that a sampler's caches take none of their room
                    self.state[p][name] = torch.zeros_like(p, memory_format=torch.contiguous_format)

    def masters(self) -> Iterator[Tensor]:
        """Every parameter in float32, one after the other."""
        for p in self.param_groups[0]["params"]:
            yield join_master(p.detach(), self.state[p]["low"]) if "low" in self.state[p] else p.detach()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """‖g‖ in float32."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)))

    def scale(self, gradients: list[Tensor], factor: Tensor) -> None:
        """Multiply the gradients in the next step, in float32."""
        self.scaled = factor

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group, scale, self.scaled = self.param_groups[0], self.scaled, None
        scale = torch.ones((), device=group["params"][0].device) if scale is None else scale
        for index, p in enumerate(group["params"]):
            if p.grad is None:
                continue
            kept = self.state[p]
            step = self._steps(p) + 1
            kept["step"] = torch.tensor(float(step))
            if "low" in kept:
                flat = [x.detach().view(-1) for x in (p, kept["low"], *(kept[name] for name in MOMENTS), p.grad)]
                self.ops.step(*flat, scale, random_keys(self.seed, index, step, 0), step, group)
            else:
                adamw(p.detach(), p.grad * scale, (kept[MOMENTS[0]], kept[MOMENTS[1]]), step, group)

    def _steps(self, p: Tensor) -> int:
        return int(self.state[p].get("step", 0))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Inside, gradients of bfloat16 parameters are summed here; at the end they are the parameters' own."""
        own = [(index, p) for index, p in enumerate(self.param_groups[0]["params"]) if "low" in self.state[p]]
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

        hooks = [p.register_post_accumulate_grad_hook(partial(add, index)) for index, p in own]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for index, p in own:
            p.grad = totals.get(index)


# ---- checkpoints: both forms are read --------------------------------------------------------------


def to_float32_state(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A checkpoint of this form in the form of float32 state: the same numbers."""
    kept, params = state["optimizer"], state["params"]
    if not any(name.endswith(".low") for name in kept):
        return state
    lows = {name: kept.get(f"{index}.low") for index, name in enumerate(names)}
    wide = {name: params[name] if low is None else join_master(params[name], low) for name, low in lows.items()}
    stepped = (name for name in kept if f"{name.split('.')[0]}.step" in kept)
    others = {name: kept[name] for name in stepped if not name.endswith(".low")}
    return state | {"wide": wide, "optimizer": {name: value.float() for name, value in others.items()}}


def to_compact_state(state: dict[str, Any], names: list[str], optimizer: CompactAdamW) -> dict[str, Any]:
    """A checkpoint in this form, with every tensor as large as its parameter. Of float32 state moments are rounded."""
    kept, params = dict(state["optimizer"]), dict(state["params"])
    wide = not any(name.endswith(".low") for name in kept)
    for index, name in enumerate(names):
        p = optimizer.param_groups[0]["params"][index]
        if "low" not in optimizer.state[p]:
            continue
        if wide:
            params[name], kept[f"{index}.low"] = split_master(state.get("wide", params)[name].float())
        for key in MOMENTS:
            if f"{index}.{key}" in kept:
                kept[f"{index}.{key}"] = kept[f"{index}.{key}"].bfloat16()
        for key, dtype in {"low": torch.int16, **dict.fromkeys(MOMENTS, torch.bfloat16)}.items():
            value = kept.get(f"{index}.{key}")
            if value is None and wide:  # it was never stepped
                continue
            if value is None or value.shape != p.shape or value.dtype != dtype:
                there = "missing" if value is None else f"{tuple(value.shape)} in {value.dtype}"
                raise ConfigError(f"the checkpoint's optimizer state is not this model's: {key} of {name} is {there}")
    others = {group: own for group, own in state.items() if group != "wide"}
    return others | {"params": params, "optimizer": kept}
