"""C kernels for language models on a CPU (cpu_kernels.c).

Decoding: matmuls with few rows, RMSNorm, paged attention, token sampling. Updates: SwiGLU, RoPE, RMSNorm and log-probs.

They are compiled at the first use, which takes seconds once per machine. They need float32, GCC, and Linux on x86 with
AVX2 or on 64-bit Arm, where they were tested under emulation and never timed; elsewhere PyTorch computes the same, more
slowly. ASCENT_NATIVE=0 disables them. They use the thread count of PyTorch and its OpenMP library.
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
"""Compiler flags by machine.

Every 64-bit Arm has vectors of 4 floats; `native` would only add code that no test has run. Without -fno-schedule-insns
GCC on Arm schedules instructions before it allocates registers, and spills the 24 accumulators of a matmul.
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
"""Seconds."""
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
    """Return the compiled kernels; None if they are not available."""
    return _load(COMPILER_FLAGS)


def can_compile() -> bool:
    """Return whether the kernels can be compiled on this machine and are enabled."""
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
        library = _compile(flags)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()[:300]
        warnings.warn(
            f"the C kernels for this CPU cannot be compiled ({why}): using PyTorch instead, which is slower",
            stacklevel=3,
        )
        return None
    for name, arguments in ARGUMENT_TYPES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None if arguments else c_long
    return library


def _openmp_library() -> str:
    """Return the path of the OpenMP library that PyTorch has loaded if it is GCC's, else an empty string."""
    paths = {line.split(maxsplit=5)[5] for line in _read_lines("/proc/self/maps") if "/libgomp" in line}
    site_packages = str(Path(torch.__file__).parent.parent)  # wheels have it in torch/lib or in torch.libs
    return min(paths, key=lambda path: (not path.startswith(f"{site_packages}/torch"), path), default="")


def _processor_info() -> str:
    """Return the processor's model and features; an empty string except on Linux."""
    kinds = ("model name", "flags", "CPU ", "Features")  # on x86 the first two, on Arm the others
    lines = [line for line in _read_lines("/proc/cpuinfo") if line.startswith(kinds)]
    return "\n".join(sorted({f"{line} " for line in lines}))


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _compile(flags: Sequence[str]) -> ctypes.CDLL:
    """Compile the library, or load it from the cache for the same source, flags, compiler and processor."""
    openmp = _openmp_library()
    inputs = [SOURCE.read_text(), *flags, _run("gcc", "--version"), Path(openmp).name, _processor_info()]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ascent" / "kernels"
    name = f"cpu-{_digest(chr(10).join(inputs).encode())}"
    for path in folder.glob(f"{name}-*.so"):
        is_own = path.stat().st_uid == os.getuid()
        if is_own and path.stem.endswith(_digest(path.read_bytes())):  # loading a damaged file would crash the process
            return ctypes.CDLL(str(path))
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    can_cache = folder.is_dir() and os.access(folder, os.W_OK)
    with tempfile.TemporaryDirectory(dir=folder if can_cache else None) as scratch:
        made = f"{scratch}/cpu.so"
        _run("gcc", *flags, "-c", str(SOURCE), "-o", f"{scratch}/cpu.o")
        _run("gcc", "-shared", f"{scratch}/cpu.o", openmp, "-lm", "-o", made)
        if can_cache:  # atomically: other processes may compile at the same time
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
    """Return whether the kernels support these tensors: plain (not sharded) float32 tensors on a CPU."""
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.is_cpu for x in tensors)
    return plain and load_library() is not None


class PackedWeight:
    """Weight matrices `[out in]` with the same input, merged and packed for matmuls with few rows."""

    def __init__(self, weights: Sequence[Tensor], gated: bool = False):
        """`gated`: the weights are gate and up; their panels are interleaved, and the result is act(gate)·up."""
        width, columns = _library().panel_width(), sum(map(len, weights))
        self.gated, self.out = gated, columns // 2 if gated else columns
        self.packed = weights[0].new_zeros(-(-self.out // width) * (1 + gated), weights[0].shape[1], width)
        self.pack(weights)

    def pack(self, weights: Sequence[Tensor]) -> None:
        """Replace the packed weights by others of the same shapes."""
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


def add_rms_norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Add y to x in place; return x and its RMSNorm (weight_offset + weight)·x/√(mean x² + ε). All are contiguous."""
    out = torch.empty_like(x)
    _library().add_rms_norm(
        _pointer(x), _pointer(y), _pointer(weight), eps, weight_offset, len(x), x.shape[1], _pointer(out), _threads()
    )
    return x, out


def supports_attention(head_dim: int, block_size: int) -> bool:
    """Return whether `paged_attention` supports this head_dim and block size."""
    return head_dim % 16 == 0 and head_dim <= 512 and block_size <= 1024


def paged_attention(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    scale: float,
    cache: tuple[Tensor, Tensor],
    block_table: Tensor,
    lengths: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Attention `[row head·head_dim]` of one new token per row, after writing its key and value to the cache.

    `rope`: cosines and sines `[row head_dim]`, the first half of the sines negated. `cache`: keys and values `[block
    head token head_dim]`. `block_table`: int64 `[row block]`, the blocks of the prompt first. `lengths`: for each row
    the number of prompt blocks, of prompt keys, and of response keys.
    """
    (_, heads, size, head_dim), count = cache[0].shape, len(qkv)
    queries = qkv.shape[1] // (heads * head_dim) - 2
    qkv = qkv.contiguous()
    out = qkv.new_empty(count, heads * queries * head_dim)
    pages = (*map(_pointer, cache), size, _pointer(block_table), block_table.shape[1], *map(_pointer, lengths))
    _library().paged_attention(
        _pointer(qkv), *map(_pointer, rope), count, heads, queries, head_dim, scale, *pages, _pointer(out), _threads()
    )
    return out


def sample_rows(logits: Tensor, temperature: float, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverse CDF at u, in float64; return the tokens and their log-probs."""
    logits = logits.contiguous()
    token, logp = torch.empty(len(logits), dtype=torch.long), logits.new_empty(len(logits))
    _library().sample(_pointer(logits), *logits.shape, temperature, *map(_pointer, (u, token, logp)), _threads())
    return token, logp


# ---- training: forward and backward kernels; models/fused_layers.py and models/lm_head.py have the references


class ElementwiseKernels:
    """SwiGLU, its backward pass, and RoPE."""

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
        grads = torch.empty_like(gate), torch.empty_like(up)
        _library().swiglu_backward(*map(_pointer, (grad, gate, up)), gate.numel(), *map(_pointer, grads), _threads())
        return grads

    @staticmethod
    def rope(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
        """Return RoPE of x `[1 head position head_dim]`; its memory layout is `[position head head_dim]`."""
        _check_same_shape(x.shape[2:], cos.shape[1:], sin.shape[1:])
        x, cos, sin = x if x.stride(3) == 1 else x.contiguous(), cos.contiguous(), sin.contiguous()
        _, heads, positions, head_dim = x.shape
        out = x.new_empty(1, positions, heads, head_dim)
        shape = (positions, heads, head_dim, x.stride(2), x.stride(1))
        _library().rope(_pointer(x), *shape, _pointer(cos), _pointer(sin), backward, _pointer(out), _threads())
        return out.transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm weight·x·r of rows `[... width]`, and r = 1/√(mean x² + ε) `[row]`."""
    _check_same_shape(x.shape[-1:], weight.shape)
    x, weight, width = x.contiguous(), weight.contiguous(), len(weight)
    out, r = torch.empty_like(x), x.new_empty(x.numel() // width)
    _library().rms_norm(_pointer(x), _pointer(weight), eps, len(r), width, _pointer(out), _pointer(r), _threads())
    return out, r


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight."""
    _check_same_shape(grad.shape, x.shape)
    grad, x, weight, width = grad.contiguous(), x.contiguous(), weight.contiguous(), len(weight)
    sums = x.new_empty(-(-len(r) // _library().norm_block_rows()), width)
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    inputs, outputs = map(_pointer, (grad, x, weight, r)), map(_pointer, (grad_x, sums, grad_weight))
    _library().rms_norm_backward(*inputs, len(r), width, *outputs, _threads())
    return grad_x, grad_weight


def softmax_logprobs_(z: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of logits `[token vocab]` in place; return log p of the targets and the entropies."""
    if len(target) != len(z) or not z.is_contiguous():
        raise ValueError(f"{len(target)} targets for {len(z)} rows of logits, which must be contiguous")
    if len(target) and not 0 <= int(target.min()) <= int(target.max()) < z.shape[1]:
        raise IndexError(f"a target is outside the vocabulary of {z.shape[1]}")
    target = target.to(torch.long).contiguous()
    logp, entropy = z.new_empty(len(z)), z.new_empty(len(z))
    _library().softmax_logprobs(_pointer(z), _pointer(target), *z.shape, _pointer(logp), _pointer(entropy), _threads())
    return logp, entropy


def _check_same_shape(*shapes: torch.Size) -> None:
    if len(set(shapes)) > 1:
        raise ValueError(f"shapes must be equal: {', '.join(str(list(shape)) for shape in shapes)}")


def _library() -> ctypes.CDLL:
    kernels = load_library()
    assert kernels is not None
    return kernels


def _threads() -> int:
    return torch.get_num_threads()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
