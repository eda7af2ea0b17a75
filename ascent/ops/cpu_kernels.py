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
COMPILER_TARGETS = {
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "aarch64": ("-march=armv8-a", "-fno-schedule-insns"),
}
"""By machine, what GCC compiles for.

Vectors of 4 numbers are part of every 64-bit Arm. `native` would add nothing to them, but code that no test has run.
There GCC also moves instructions before it gives out registers, unless it is told not to, and then a product's 24 sums
do not stay in theirs.
"""
COMPILER_FLAGS = (
    "-O3",
    *COMPILER_TARGETS.get(platform.machine(), ()),
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-std=gnu11",
)
COMPILER_TIMEOUT = 120
"""Seconds that the compiler may take."""
ARGUMENT_TYPES = {
    "panel_width": (),
    "norm_block_rows": (),
    "pack_weight": (c_void_p, *[c_long] * 5, c_void_p, c_int),
    "matmul": (c_void_p, c_long, c_long, c_void_p, c_long, c_void_p, c_int, c_int, c_void_p, c_int),
    "add_rms_norm": (c_void_p, c_void_p, c_void_p, c_float, c_float, c_long, c_long, c_void_p, c_int),
    "paged_attention": (
        *[c_void_p] * 3, *[c_long] * 4, c_float, c_void_p, c_void_p, c_long, c_void_p, c_long, *[c_void_p] * 4, c_int
    ),
    "sample": (c_void_p, c_long, c_long, c_float, *[c_void_p] * 3, c_int),
    "swiglu": (c_void_p, c_void_p, c_long, c_void_p, c_int),
    "swiglu_backward": (*[c_void_p] * 3, c_long, c_void_p, c_void_p, c_int),
    "rope": (c_void_p, *[c_long] * 5, c_void_p, c_void_p, c_int, c_void_p, c_int),
    "rms_norm": (c_void_p, c_void_p, c_float, c_long, c_long, c_void_p, c_void_p, c_int),
    "rms_norm_backward": (*[c_void_p] * 4, c_long, c_long, *[c_void_p] * 3, c_int),
    "softmax_logprobs": (c_void_p, c_void_p, c_long, c_long, c_void_p, c_void_p, c_int),
}  # fmt: skip


def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there are none."""
    return _load(COMPILER_FLAGS)


def can_compile() -> bool:
    """Can they be compiled here, and are they wanted?"""
    machine = platform.machine()
    is_supported = (
        machine in COMPILER_TARGETS
        and (machine != "x86_64" or " avx2 " in _processor_info())
        and bool(_openmp_library())
    )
    return is_supported and shutil.which("gcc") is not None and os.environ.get("ASCENT_NATIVE") != "0"


@cache
def _load(flags: tuple[str, ...]) -> ctypes.CDLL | None:
    if not can_compile():
        return None
    try:
        found = _compile(flags)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()[:300]
        warnings.warn(f"the kernels for this CPU cannot be compiled ({why}): torch is used, slower", stacklevel=3)
        return None
    for name, arguments in ARGUMENT_TYPES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None if arguments else c_long
    return found


def _openmp_library() -> str:
    """The OpenMP library that torch has loaded, if it is GCC's; else nothing."""
    found = {line.split(maxsplit=5)[5] for line in _read_lines("/proc/self/maps") if "/libgomp" in line}
    around = str(Path(torch.__file__).parent.parent)  # some wheels have it in torch/lib, and some in torch.libs beside
    return min(found, key=lambda path: (not path.startswith(f"{around}/torch"), path), default="")


def _processor_info() -> str:
    """What it is and can do; nothing elsewhere than on Linux."""
    kinds = ("model name", "flags", "CPU ", "Features")  # on x86 the first two, on Arm the others
    lines = [line for line in _read_lines("/proc/cpuinfo") if line.startswith(kinds)]
    return "\n".join(sorted({f"{line} " for line in lines}))


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _compile(flags: Sequence[str]) -> ctypes.CDLL:
    """The library, from the cache if the same compiler has made it of the same source for the same processor."""
    openmp = _openmp_library()
    made_of = [SOURCE.read_text(), *flags, _run("gcc", "--version"), Path(openmp).name, _processor_info()]
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
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=COMPILER_TIMEOUT
    )
    return done.stdout


def is_supported(*tensors: Tensor) -> bool:
    """Are there kernels for these? Not for shards and other kinds of tensors, whose numbers lie elsewhere."""
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.is_cpu for x in tensors)
    return plain and load_library() is not None


class PackedWeight:
    """Matrices `[out in]` that read the same x, packed for products with few rows."""

    def __init__(self, weights: Sequence[Tensor], gated: bool = False):
        """`gated`: they are gate and up, whose panels take turns, and a product is act(gate)·up."""
        width, columns = _library().panel_width(), sum(map(len, weights))
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
            _library().pack_weight(
                _pointer(own), *shape, first, 1 + self.gated, skip, _pointer(self.packed), _threads()
            )

    def __call__(self, x: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
        x, (rows, depth) = x.contiguous(), x.shape
        y = x.new_empty(rows, self.out)
        how = (self.out, _pointer(bias), self.gated, gelu, _pointer(y), _threads())
        _library().matmul(_pointer(x), rows, depth, _pointer(self.packed), *how)
        return y


def add_rms_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, add: float = 0.0) -> tuple[Tensor, Tensor]:
    """x ← x + y, in place, and its norm (add + weight)·x/√(mean x² + ε). All are contiguous."""
    out = torch.empty_like(x)
    _library().add_rms_norm(
        _pointer(x), _pointer(y), _pointer(weight), eps, add, len(x), x.shape[1], _pointer(out), _threads()
    )
    return x, out


def supports_attention(channel: int, size: int) -> bool:
    """Is there attention for so many channels and pages of this size?"""
    return channel % 16 == 0 and channel <= 512 and size <= 1024


def paged_attention(
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
    pages = (*map(_pointer, cache), size, _pointer(table), table.shape[1], *map(_pointer, rows))
    _library().paged_attention(
        _pointer(qkv), *map(_pointer, turn), count, heads, queries, channel, scale, *pages, _pointer(out), _threads()
    )
    return out


def sample_rows(logits: Tensor, temperature: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """One word per row by the inverse of the CDF at u, in float64, and its log-prob."""
    logits = logits.contiguous()
    word, logp = torch.empty(len(logits), dtype=torch.long), logits.new_empty(len(logits))
    _library().sample(_pointer(logits), *logits.shape, temperature, *map(_pointer, (u, word, logp)), _threads())
    return word, logp


# ---- updates: what lies between the products, and its slopes (elementwise.py and head.py say what they compute)


class ElementwiseKernels:
    """Gates, their slopes, and turns."""

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        _check_same_shape(gate.shape, up.shape)
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        _library().swiglu(_pointer(gate), _pointer(up), gate.numel(), _pointer(out), _threads())
        return out

    @staticmethod
    def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        _check_same_shape(grad.shape, gate.shape, up.shape)
        grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
        slopes = torch.empty_like(gate), torch.empty_like(up)
        _library().swiglu_backward(*map(_pointer, (grad, gate, up)), gate.numel(), *map(_pointer, slopes), _threads())
        return slopes

    @staticmethod
    def rope(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        """`[1 head position channel]` in; out the same, laid out `[position head channel]` in memory."""
        _check_same_shape(x.shape[2:], cos.shape[1:], sin.shape[1:])
        x, cos, sin = x if x.stride(3) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
        _, heads, positions, channel = x.shape
        out = x.new_empty(1, positions, heads, channel)
        shape = (positions, heads, channel, x.stride(2), x.stride(1))
        _library().rope(_pointer(x), *shape, _pointer(cos), _pointer(sin), back, _pointer(out), _threads())
        return out.transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """weight·x·r of rows `[... width]`, and r `[row]`."""
    _check_same_shape(x.shape[-1:], weight.shape)
    x, weight, width = x.contiguous(), weight.contiguous(), len(weight)
    out, r = torch.empty_like(x), x.new_empty(x.numel() // width)
    _library().rms_norm(_pointer(x), _pointer(weight), eps, len(r), width, _pointer(out), _pointer(r), _threads())
    return out, r


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and of the weight."""
    _check_same_shape(grad.shape, x.shape)
    grad, x, weight, width = grad.contiguous(), x.contiguous(), weight.contiguous(), len(weight)
    sums = x.new_empty(-(-len(r) // _library().norm_block_rows()), width)
    to_x, to_weight = torch.empty_like(x), torch.empty_like(weight)
    inputs, outputs = map(_pointer, (grad, x, weight, r)), map(_pointer, (to_x, sums, to_weight))
    _library().rms_norm_backward(*inputs, len(r), width, *outputs, _threads())
    return to_x, to_weight


def softmax_logprobs_(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `[token word]` become probabilities, in place; log p of the targets, and the entropies."""
    if len(target) != len(z) or not z.is_contiguous():
        raise ValueError(f"{len(target)} targets of {len(z)} rows, which have to lie one behind the other")
    if len(target) and not 0 <= int(target.min()) <= int(target.max()) < z.shape[1]:
        raise IndexError(f"a target is no word of {z.shape[1]}")
    target = target.to(torch.long).contiguous()
    logp, entropy = z.new_empty(len(z)), z.new_empty(len(z))
    _library().softmax_logprobs(_pointer(z), _pointer(target), *z.shape, _pointer(logp), _pointer(entropy), _threads())
    return logp, entropy


def _check_same_shape(*shapes: torch.Size) -> None:
    if len(set(shapes)) > 1:
        raise ValueError(f"these shapes have to be the same: {', '.join(str(list(shape)) for shape in shapes)}")


def _library() -> ctypes.CDLL:
    found = load_library()
    assert found is not None
    return found


def _threads() -> int:
    return torch.get_num_threads()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
