"""Products of a decoding step on Hopper cards, in CUDA C++ (product.cu): those of products.py, for more rows.

A program may compute any multiple of 8 columns, so there is one on nearly every multiprocessor; it has all of its tiles
under way from the beginning, or as many as there is memory for; and it reads those of the matrix before the kernels
before it are complete. Triton's programs compute powers of two, and read nothing into their memory before they wait.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from ascent.engines.language.kernels.nvrtc import TYPES, Kernel, TensorMap

BLOCK = 64
"""Numbers of a sum in one tile."""
MEMORY = 227 * 1024
"""Bytes of shared memory that a program may take."""
WIDEST = {64: 192, 128: 192, 256: 136}
"""Rows of a program, and rows of the matrix that it has at most: sums are in registers."""
MOST_STAGES = 9
"""Tiles that are under way at once."""
SHARE, MOST_PARTS = 512, 4
"""Least numbers in a part of a sum, and most parts."""
SOME, MANY, READ = 64, 1024, 27_500_000
"""Rows, and bytes that all programs read (but for gate and up), within which these products are shorter than others."""


class Tiling(NamedTuple):
    """What one program computes."""

    rows: int
    wide: int
    """Rows of the matrix, those of gate and up together."""
    blocks: int
    """Of `BLOCK` numbers, in its part of the sum."""
    splits: int
    """Programs among which a sum is shared out."""
    stages: int

    @property
    def high(self) -> int:
        """Times 64 rows, of each warpgroup."""
        return 2 if self.rows == 256 else 1

    @property
    def threads(self) -> int:
        """One warpgroup or two, and a warp that reads."""
        return self.rows // self.high * 2 + 32

    @property
    def read(self) -> int:
        """Bytes of x and of the matrix."""
        return self.blocks * self.tile

    @property
    def tile(self) -> int:
        return (self.rows + self.wide) * BLOCK * 2

    def memory(self, gate: bool) -> int:
        """Bytes of shared memory: tiles with two barriers each, and results that are put in order."""
        ordered = min(self.rows, 128) * (self.wide if gate else 2 * self.wide + 16) if self.splits == 1 else 0
        return 1024 + self.stages * (self.tile + 16) + 16 + ordered

    def with_stages(self, gate: bool) -> Tiling:
        """As many as there is memory for."""
        tilings = (self._replace(stages=n) for n in range(min(self.blocks, MOST_STAGES), 0, -1))
        return next(tiling for tiling in tilings if tiling.memory(gate) <= MEMORY)


def tiling_of(rows: int, width: int, depth: int, gate: bool, parts: bool, places: int) -> Tiling | None:
    """Programs that all run at once: of the ways to cut the product, the one with the fewest bytes for each program.

    None: others are faster. `width`: rows of the matrix; with `gate` its first half is the gate. `parts`: the sum may
    be left in parts.
    """
    found, blocks = [], -(-depth // BLOCK)
    for splits in range(1, max(1, min(MOST_PARTS, depth // SHARE)) + 1 if parts else 2):
        share = -(-blocks // splits)
        for high, widest in WIDEST.items():
            beside = -(-rows // high) * -(-blocks // share)
            wide = -(-width // (8 * max(1, places // beside))) * 8
            if beside <= places and wide <= widest:
                tiling = Tiling(high, wide, share, -(-blocks // share), 1).with_stages(gate)
                written = high * wide * (8 if tiling.splits > 1 else 2)
                found.append((tiling.read + written, tiling.splits, -(-width // wide) * beside * tiling.read, tiling))
    *_, read, best = min(found, default=(0, 0, None))
    return best if gate or read <= READ else None


def tiling_for(x: Tensor, weight: Tensor, gate: bool = False, parts: bool = False) -> Tiling | None:
    """How to compute this product; None: others do it as fast, or these tensors cannot be read in tiles."""
    if not SOME < len(x) <= MANY or x.dtype not in TYPES or not x.is_cuda or not works():
        return None
    if any(t.stride(1) != 1 or t.stride(0) % 8 or t.data_ptr() % 16 for t in (x, weight)) or len(weight) % 8:
        return None
    places = torch.cuda.get_device_properties().multi_processor_count
    return tiling_of(ceiling(len(x)), weight.shape[0], weight.shape[1], gate, parts, places)


def ceiling(rows: int) -> int:
    """The next power of two, or three quarters of it: each tiling is compiled, so there are few."""
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power


@cache
def works() -> bool:
    """Is this a Hopper card, and can a product be compiled and computed on it?"""
    if torch.cuda.get_device_capability() != (9, 0):
        return False
    try:
        ones = torch.ones(BLOCK, BLOCK, device="cuda", dtype=torch.bfloat16)
        return bool((hopper_product(ones, ones, None, Tiling(64, 64, 1, 1, 1)) == BLOCK).all())
    except Exception as error:  # whatever it says: Triton computes the same
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        warnings.warn(f"CUDA C++ cannot be compiled here ({why}): Triton computes the same, slower", stacklevel=2)
        return False


def hopper_product(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, gate: str | None = None) -> Tensor:
    """x·Wᵀ + b, or act(gate)·up. With several splits, what is to be added up: float32 `[split row column]`."""
    (rows, depth), width = x.shape, len(weight) // (2 if gate else 1)
    out = x.new_empty(rows, width)
    if tiling.splits > 1:
        out = x.new_empty(tiling.splits, rows, width, dtype=torch.float32)
    of_x = TensorMap(x, [rows, depth], [x.stride(0), 1], [tiling.rows, BLOCK])
    of_weight = TensorMap(weight, [width, depth], [weight.stride(0), 1], [tiling.wide, BLOCK])
    if gate:
        of_weight = TensorMap(weight, *in_turns(weight), [tiling.wide // 8, 2, 4, BLOCK])
    kernel = _kernel(tiling, bias is not None, {None: 0, "silu": 1, "gelu": 2}[gate], x.dtype, x.device)
    grid = -(-width // (tiling.wide // (2 if gate else 1))), -(-rows // tiling.rows), tiling.splits
    kernel(grid, of_x, of_weight, weight if bias is None else bias, out, rows, width, -(-depth // BLOCK))
    return out


def in_turns(both: Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of gate and up in turns: four rows of the gate, the same four of up, and so on."""
    width, line = len(both) // 2, both.stride(0)
    return [width // 4, 2, 4, both.shape[1]], [4 * line, width * line, line, 1]


@cache
def _kernel(tiling: Tiling, bias: bool, gate: int, dtype: torch.dtype, _device: torch.device) -> Kernel:
    return Kernel(source_of(tiling, bias, gate, dtype), "product", tiling.threads, tiling.memory(gate > 0))


def source_of(tiling: Tiling, bias: bool, gate: int, dtype: torch.dtype) -> str:
    """product.cu with its names defined. A thread has `wide`/2 sums of each 64 rows."""
    sums = tiling.wide // 2
    names = {
        "FLOAT16": int(dtype == torch.float16),
        "TYPE": '"f16"' if dtype == torch.float16 else '"bf16"',
        "GROUPS": tiling.rows // tiling.high // 64,
        "HIGH": tiling.high,
        "WIDE": tiling.wide,
        "STAGES": tiling.stages,
        "BLOCKS": tiling.blocks,
        "BIAS": int(bias),
        "GATE": gate,
        "PARTS": int(tiling.splits > 1),
        "COLUMNS": f'"{tiling.wide}"',
        "SUMS": '"' + ", ".join(f"%{i}" for i in range(sums)) + '"',
        "OUTPUTS": ", ".join(f'"+f"(sum[{i}])' for i in range(sums)),
        "A": f'"{sums}"',
        "B": f'"{sums + 1}"',
        "ADD": f'"{sums + 2}"',
    }
    text = files(__package__).joinpath("product.cu").read_text(encoding="utf-8")
    return "".join(f"#define {name} {value}\n" for name, value in names.items()) + text
