"""Kernels in C for language models on a CPU (cpu.c): products with few rows, norms, attention row by row, the draw,
and what lies between the products of an update.

They are compiled on first use, which takes seconds once per machine. They need float32, GCC, and Linux on x86 with AVX2
or on 64-bit Arm, where they were tested under emulation and never timed; elsewhere torch computes the same, slower.
ASCENT_NATIVE=0 turns them off. Threads are those of torch: the library is linked against the OpenMP that torch has
loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

SOURCE = Path(__file__).with_name("cpu_kernels.c")
TARGETS = {
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "aarch64": ("-march=armv8-a", "-fno-schedule-insns"),
}
"""By machine, what GCC compiles for.

Vectors of 4 numbers are part of every 64-bit Arm. `native` would add nothing to them, but code that no test has run.
There GCC also moves instructions before it gives out registers, unless it is told not to, and then a product's 24 sums
do not stay in theirs.
"""
FLAGS = ("-O3", *TARGETS.get(platform.machine(), ()), "-fno-math-errno", "-fopenmp", "-fPIC", "-std=gnu11")
PATIENCE = 120
"""Seconds that the compiler may take."""
ARGUMENTS = {
    "panel": (),
    "norms": (),
    "pack": (c_void_p, *[c_long] * 5, c_void_p, c_int),
    "product": (c_void_p, c_long, c_long, c_void_p, c_long, c_void_p, c_int, c_int, c_void_p, c_int),
    "add_norm": (c_void_p, c_void_p, c_void_p, c_float, c_float, c_long, c_long, c_void_p, c_int),
    "attend": (
        *[c_void_p] * 3, *[c_long] * 4, c_float, c_void_p, c_void_p, c_long, c_void_p, c_long, *[c_void_p] * 4, c_int
    ),
    "draw": (c_void_p, c_long, c_long, c_float, *[c_void_p] * 3, c_int),
    "gate": (c_void_p, c_void_p, c_long, c_void_p, c_int),
    "gate_slope": (*[c_void_p] * 3, c_long, c_void_p, c_void_p, c_int),
    "rotate": (c_void_p, *[c_long] * 5, c_void_p, c_void_p, c_int, c_void_p, c_int),
    "norm": (c_void_p, c_void_p, c_float, c_long, c_long, c_void_p, c_void_p, c_int),
    "norm_slope": (*[c_void_p] * 4, c_long, c_long, *[c_void_p] * 3, c_int),
    "measure": (c_void_p, c_void_p, c_long, c_long, c_void_p, c_void_p, c_int),
}  # fmt: skip


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there are none."""
    return _loaded(FLAGS)


def possible() -> bool:
    """Can they be compiled here, and are they wanted?"""
    machine = platform.machine()
    fits = machine in TARGETS and (machine != "x86_64" or " avx2 " in _processor()) and bool(_openmp())
    return fits and shutil.which("gcc") is not None and os.environ.get("ASCENT_NATIVE") != "0"


@cache
def _loaded(flags: tuple[str, ...]) -> ctypes.CDLL | None:
    if not possible():
        return None
    try:
        found = _compiled(flags)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()[:300]
        warnings.warn(f"the kernels for this CPU cannot be compiled ({why}): torch is used, slower", stacklevel=3)
        return None
    for name, arguments in ARGUMENTS.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None if arguments else c_long
    return found


def _openmp() -> str:
    """The OpenMP library that torch has loaded, if it is GCC's; else nothing."""
    found = {line.split(maxsplit=5)[5] for line in _lines("/proc/self/maps") if "/libgomp" in line}
    around = str(Path(torch.__file__).parent.parent)  # some wheels have it in torch/lib, and some in torch.libs beside
    return min(found, key=lambda path: (not path.startswith(f"{around}/torch"), path), default="")


def _processor() -> str:
    """What it is and can do; nothing elsewhere than on Linux."""
    kinds = ("model name", "flags", "CPU ", "Features")  # on x86 the first two, on Arm the others
    lines = [line for line in _lines("/proc/cpuinfo") if line.startswith(kinds)]
    return "\n".join(sorted({f"{line} " for line in lines}))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _compiled(flags: Sequence[str]) -> ctypes.CDLL:
    """The library, from the cache if the same compiler has made it of the same source for the same processor."""
    openmp = _openmp()
    made_of = [SOURCE.read_text(), *flags, _run("gcc", "--version"), Path(openmp).name, _processor()]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ascent" / "kernels"
    name = f"cpu-{_digest(chr(10).join(made_of).encode())}"
    for path in folder.glob(f"{name}-*.so"):
        mine = path.stat().st_uid == os.getuid()
        if mine and path.stem.endswith(_digest(path.read_bytes())):  # a damaged one would end the process
            return ctypes.CDLL(str(path))
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = folder.is_dir() and os.access(folder, os.W_OK)
    with tempfile.TemporaryDirectory(dir=folder if kept else None) as scratch:
        made = f"{scratch}/cpu.so"
        _run("gcc", *flags, "-c", str(SOURCE), "-o", f"{scratch}/cpu.o")
        _run("gcc", "-shared", f"{scratch}/cpu.o", openmp, "-lm", "-o", made)
        if kept:  # at once: others may do the same at the same time
            path = folder / f"{name}-{_digest(Path(made).read_bytes())}.so"
            os.replace(made, path)
            made = str(path)
        return ctypes.CDLL(made)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    return done.stdout


def fits(*tensors: Tensor) -> bool:
    """Are there kernels for these? Not for shards and other kinds of tensors, whose numbers lie elsewhere."""
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.is_cpu for x in tensors)
    return plain and library() is not None


class Panels:
    """Matrices `[out in]` that read the same x, packed for products with few rows."""

    def __init__(self, weights: Sequence[Tensor], gated: bool = False):
        """`gated`: they are gate and up, whose panels take turns, and a product is act(gate)·up."""
        width, columns = _kernels().panel(), sum(map(len, weights))
        self.gated, self.out = gated, columns // 2 if gated else columns
        self.packed = weights[0].new_zeros(-(-self.out // width) * (1 + gated), weights[0].shape[1], width)
        self.pack(weights)

    def pack(self, weights: Sequence[Tensor]) -> None:
        """Matrices of the same shapes, in place of those before."""
        if self.gated:
            halves = list(weights) if len(weights) == 2 else weights[0].chunk(2)
            places = [(half, 0, i) for i, half in enumerate(halves)]
        else:
            places = [(weight, sum(map(len, weights[:i])), 0) for i, weight in enumerate(weights)]
        for weight, first, skip in places:
            shape, own = weight.shape, weight.contiguous()
            _kernels().pack(_at(own), *shape, first, 1 + self.gated, skip, _at(self.packed), _threads())

    def __call__(self, x: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
        x, (rows, depth) = x.contiguous(), x.shape
        y = x.new_empty(rows, self.out)
        how = (self.out, _at(bias), self.gated, gelu, _at(y), _threads())
        _kernels().product(_at(x), rows, depth, _at(self.packed), *how)
        return y


def norm_rows(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, add: float = 0.0) -> tuple[Tensor, Tensor]:
    """x ← x + y, in place, and its norm (add + weight)·x/√(mean x² + ε). All are contiguous."""
    out = torch.empty_like(x)
    _kernels().add_norm(_at(x), _at(y), _at(weight), eps, add, len(x), x.shape[1], _at(out), _threads())
    return x, out


def attends(channel: int, size: int) -> bool:
    """Is there attention for so many channels and pages of this size?"""
    return channel % 16 == 0 and channel <= 512 and size <= 1024


def attend_rows(
    qkv: Tensor,
    turn: tuple[Tensor, Tensor],
    scale: float,
    cache: tuple[Tensor, Tensor],
    table: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Attention `[row head·channel]` of one new token per row, whose key and value join its last page.

    `turn`: cosines and sines `[row channel]`, the first half of these negative. `cache`: pages `[page head token
    channel]`. `table`: int64 `[row page]`, the pages of the row's prompt first. `rows`: the number of those, the keys
    on them, and those on the row's own pages.
    """
    (_, heads, size, channel), count = cache[0].shape, len(qkv)
    queries = qkv.shape[1] // (heads * channel) - 2
    qkv = qkv.contiguous()
    out = qkv.new_empty(count, heads * queries * channel)
    pages = (*map(_at, cache), size, _at(table), table.shape[1], *map(_at, rows))
    _kernels().attend(_at(qkv), *map(_at, turn), count, heads, queries, channel, scale, *pages, _at(out), _threads())
    return out


def draw_rows(logits: Tensor, temperature: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """One word per row by the inverse of the CDF at u, in float64, and its log-prob."""
    logits = logits.contiguous()
    word, logp = torch.empty(len(logits), dtype=torch.long), logits.new_empty(len(logits))
    _kernels().draw(_at(logits), *logits.shape, temperature, *map(_at, (u, word, logp)), _threads())
    return word, logp


# ---- updates: what lies between the products, and its slopes (elementwise.py and head.py say what they compute)


class Elementwise:
    """Gates, their slopes, and turns."""

    @staticmethod
    def gate(gate: Tensor, up: Tensor) -> Tensor:
        _same(gate.shape, up.shape)
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _kernels().gate(_at(gate), _at(up), gate.numel(), _at(out), _threads())
        return out

    @staticmethod
    def gate_slope(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        _same(grad.shape, gate.shape, up.shape)
        grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
        slopes = torch.empty_like(gate), torch.empty_like(up)
        _kernels().gate_slope(*map(_at, (grad, gate, up)), gate.numel(), *map(_at, slopes), _threads())
        return slopes

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        """`[1 head position channel]` in; out the same, laid out `[position head channel]` in memory."""
        _same(x.shape[2:], cos.shape[1:], sin.shape[1:])
        x, cos, sin = x if x.stride(3) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
        _, heads, positions, channel = x.shape
        out = x.new_empty(1, positions, heads, channel)
        shape = (positions, heads, channel, x.stride(2), x.stride(1))
        _kernels().rotate(_at(x), *shape, _at(cos), _at(sin), back, _at(out), _threads())
        return out.transpose(1, 2)


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """weight·x·r of rows `[... width]`, and r `[row]`."""
    _same(x.shape[-1:], weight.shape)
    x, weight, width = x.contiguous(), weight.contiguous(), len(weight)
    out, r = torch.empty_like(x), x.new_empty(x.numel() // width)
    _kernels().norm(_at(x), _at(weight), eps, len(r), width, _at(out), _at(r), _threads())
    return out, r


def norm_slope(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and of the weight."""
    _same(grad.shape, x.shape)
    grad, x, weight, width = grad.contiguous(), x.contiguous(), weight.contiguous(), len(weight)
    sums = x.new_empty(-(-len(r) // _kernels().norms()), width)
    to_x, to_weight = torch.empty_like(x), torch.empty_like(weight)
    inputs, outputs = map(_at, (grad, x, weight, r)), map(_at, (to_x, sums, to_weight))
    _kernels().norm_slope(*inputs, len(r), width, *outputs, _threads())
    return to_x, to_weight


def measure_rows(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `[token word]` become probabilities, in place; log p of the targets, and the entropies."""
    if len(target) != len(z) or not z.is_contiguous():
        raise ValueError(f"{len(target)} targets of {len(z)} rows, which have to lie one behind the other")
    if len(target) and not 0 <= int(target.min()) <= int(target.max()) < z.shape[1]:
        raise IndexError(f"a target is no word of {z.shape[1]}")
    target = target.to(torch.long).contiguous()
    logp, entropy = z.new_empty(len(z)), z.new_empty(len(z))
    _kernels().measure(_at(z), _at(target), *z.shape, _at(logp), _at(entropy), _threads())
    return logp, entropy


def _same(*shapes: torch.Size) -> None:
    if len(set(shapes)) > 1:
        raise ValueError(f"these shapes have to be the same: {', '.join(str(list(shape)) for shape in shapes)}")


def _kernels() -> ctypes.CDLL:
    found = library()
    assert found is not None
    return found


def _threads() -> int:
    return torch.get_num_threads()


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
