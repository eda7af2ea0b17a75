"""Triton's interpreter, corrected where it computes otherwise than a GPU.

Differences of Triton 3.6, all of them about bfloat16, which it stores as unsigned integers:
- float32 is truncated to bfloat16; a GPU rounds to nearest, ties to even;
- `tl.dot` multiplies the integers; a GPU multiplies the numbers that they stand for.
Inline assembly is not interpreted at all. The two kinds that kernels use (`INSTRUCTIONS`) compute nothing, so they are
recorded for the tests instead.
"""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

INSTRUCTIONS = {
    "cp.async.bulk.prefetch.L2.global": "reads memory into the L2 cache of a GPU, which changes no result",
    "griddepcontrol.launch_dependents": "lets a GPU launch the next kernel; the interpreter runs one after the other",
    "griddepcontrol.wait": "waits for the kernels before it; the interpreter runs one after the other",
}
"""What the interpreter cannot run, and why leaving it out changes no number."""


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


class Interpreter:
    """What ran in the interpreter since `clear`."""

    def __init__(self) -> None:
        self.functions: set[str] = set()
        """`module.function` of every kernel and of every function that it called."""
        self.instructions: list[str] = []
        self.prefetched: list[tuple[int, int]] = []
        """Address and bytes of every prefetch."""

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def install(self) -> None:
        """Correct the interpreter of this process, and record what it runs from now on."""
        from triton.runtime import interpreter

        builder, function = interpreter.InterpreterBuilder, interpreter.InterpretedFunction
        rewrite = function.rewrite

        def recorded(kernel: Any) -> Any:
            module = kernel.fn.__module__
            if module.startswith("ascent."):
                self.functions.add(f"{module.rpartition('.')[2]}.{kernel.fn.__name__}")
            return rewrite(kernel)

        def inline_asm(_: Any, text: str, constraints: str, values: list[Any], *how: Any) -> Any:
            self.record(text, values)
            shape = values[0].data.shape if values else (1,)
            zeros = interpreter.TensorHandle(np.zeros(shape, np.int32), interpreter.tl.int32)
            return SimpleNamespace(get_result=lambda _: zeros)

        function.rewrite = recorded
        builder.create_inline_asm = inline_asm
        _correct_bfloat16(interpreter)

    def record(self, text: str, values: Any = ()) -> None:
        known = [name for name in INSTRUCTIONS if text.startswith(name)]
        if not known:
            raise NotImplementedError(f"a test has to say what this instruction does to a result: {text}")
        self.instructions += known
        if "prefetch" in text:
            addresses, sizes = (np.broadcast_to(x.data, values[0].data.shape).ravel().tolist() for x in values)
            self.prefetched += zip(addresses, sizes, strict=True)


def _correct_bfloat16(interpreter: Any) -> None:
    builder, tl = interpreter.InterpreterBuilder, interpreter.tl
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded(self: Any, x: Any, to: Any) -> Any:
        pair = x.dtype.scalar, to.scalar
        if pair == (tl.float32, tl.bfloat16):
            bits = torch.from_numpy(np.array(x.data)).bfloat16().view(torch.uint16)
            return interpreter.TensorHandle(bits.numpy(), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(widened(x), tl.float32)
        if tl.bfloat16 in pair and pair[0] != pair[1]:
            raise NotImplementedError(f"the interpreter has no right conversion from {pair[0]} to {pair[1]}")
        return cast(self, x, to)

    def multiplied(self: Any, a: Any, b: Any, total: Any, *how: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (interpreter.TensorHandle(widened(x), tl.float32) for x in (a, b))
        return dot(self, a, b, total, *how)

    def widened(x: Any) -> Any:
        return (x.data.astype(np.uint32) << 16).view(np.float32)

    builder.create_dot = multiplied
    builder.cast_impl = rounded
    builder.create_fp_to_fp = lambda self, x, to, _mode: rounded(self, x, to)


def spans_of(*tensors: Tensor) -> list[tuple[int, int]]:
    """Where the memory of tensors begins and ends."""
    return [(start := x.untyped_storage().data_ptr(), start + x.untyped_storage().nbytes()) for x in tensors]
