"""CUDA C++ compiled on the spot by NVRTC, which torch brings along, and launched through the driver.

For what Triton cannot say. A launch may be captured. It begins while the kernel before it runs: a kernel waits itself
(`griddepcontrol.wait`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARED_MEMORY, EARLY = 8, 6
"""The driver's numbers for an attribute of a function and one of a launch."""
TYPES, SWIZZLE_128, PROMOTE_256 = {torch.float16: 6, torch.bfloat16: 9}, 3, 3
"""Its numbers for tiles: their types, rows of 128 bytes in an order without conflicts, and reads of 256 bytes."""


class _Value(ctypes.Union):
    _fields_ = (("flag", c_int), ("room", c_char * 64))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("gap", c_int), ("value", _Value))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("memory", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    )


class TensorMap:
    """How the card's copy engine reads a tensor of one of TYPES in boxes of this shape, with zeros past its ends."""

    def __init__(self, tensor: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]):
        """`strides` in numbers; the last one is 1."""
        self.room, count = ctypes.create_string_buffer(128 + 64), len(shape)
        self.address = -(-ctypes.addressof(self.room) // 64) * 64
        apart = [2 * n for n in strides[-2::-1]]
        _check(
            _driver().cuTensorMapEncodeTiled(
                *(c_void_p(self.address), TYPES[tensor.dtype], c_uint32(count), c_void_p(tensor.data_ptr())),
                *((c_uint64 * count)(*shape[::-1]), (c_uint64 * len(apart))(*apart), (c_uint32 * count)(*box[::-1])),
                *((c_uint32 * count)(*[1] * count), 0, SWIZZLE_128, PROMOTE_256, 0),
            )
        )


class Kernel:
    """A function of a source, compiled for a Hopper card."""

    def __init__(self, source: str, name: str, threads: int, memory: int):
        self.threads, self.memory = threads, memory
        self.module, self.function = c_void_p(), c_void_p()
        _check(_driver().cuModuleLoadData(byref(self.module), compiled(source)))
        _check(_driver().cuModuleGetFunction(byref(self.function), self.module, name.encode()))
        _check(_driver().cuFuncSetAttribute(self.function, SHARED_MEMORY, memory))

    def __call__(self, grid: tuple[int, int, int], *arguments: TensorMap | Tensor | int) -> None:
        attribute = _Attribute(EARLY, 0, _Value(1))
        config = _Config(
            *(grid, (self.threads, 1, 1), self.memory, torch.cuda.current_stream().cuda_stream),
            *(ctypes.pointer(attribute), 1),
        )
        values = [_value(a) for a in arguments]
        places = [a.address if isinstance(a, TensorMap) else ctypes.addressof(a) for a in values]
        _check(_driver().cuLaunchKernelEx(byref(config), self.function, (c_void_p * len(places))(*places), None))


def _value(argument: TensorMap | Tensor | int) -> TensorMap | c_void_p | c_int:
    if isinstance(argument, Tensor):
        return c_void_p(argument.data_ptr())
    return c_int(argument) if isinstance(argument, int) else argument


def compiled(source: str) -> bytes:
    """The machine code of a source. Raises RuntimeError with what the compiler says."""
    library, program = _library(), c_void_p()
    library.nvrtcCreateProgram(byref(program), source.encode(), b"source.cu", 0, None, None)
    options = (c_char_p * 2)(b"--gpu-architecture=sm_90a", b"--std=c++17")
    failed = library.nvrtcCompileProgram(program, len(options), options)
    result = _result(program, "ProgramLog" if failed else "CUBIN")
    library.nvrtcDestroyProgram(byref(program))
    if failed:
        raise RuntimeError(result.rstrip(b"\0").decode())
    return result


def _result(program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    getattr(_library(), f"nvrtcGet{what}Size")(program, byref(size))
    room = ctypes.create_string_buffer(size.value)
    getattr(_library(), f"nvrtcGet{what}")(program, room)
    return room.raw


@cache
def _library() -> Any:
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    beside = Path(torch.__file__).parent.parent.glob(f"nvidia/*/lib/{name}")
    for place in (name, *map(str, beside)):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise RuntimeError(f"there is no {name}")


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(failed: int) -> None:
    if failed:
        text = c_char_p()
        _driver().cuGetErrorString(failed, byref(text))
        raise RuntimeError(f"the driver says {(text.value or b'?').decode()}")
