"""GPUs, networks, and the fitted constants of the cost model.

Only the H200 was measured (benchmarks/results/plan.md). Any other GPU is assumed to reach the same fraction of its
published bandwidth and FLOP/s as an H200, with the overheads of an H200's host.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, with the bandwidth (bytes/s) and the bfloat16 FLOP/s that it reaches in practice."""

    name: str
    memory: int
    bandwidth: float
    rate: float
    link: float
    """Bytes per second between two GPUs of a node, in one direction."""
    measured: bool = False


def _unmeasured_gpu(name: str, gigabytes: float, terabytes: float, teraflops: float, link: float) -> Gpu:
    """Derive the rates from published ones: an H200 reaches 4.3 of 4.8 TB/s and 790 of 989 TFLOP/s."""
    memory = int(0.985 * gigabytes * 1e9) if gigabytes > 100 else int(0.985 * gigabytes * GIB)
    return Gpu(name, memory, terabytes * 1e12 * 4.3 / 4.8, teraflops * 1e12 * 790 / 989, link)


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 150_109_880_320, 4.3e12, 790e12, 300e9, measured=True),
        _unmeasured_gpu("h100", 80, 3.35, 989, 300e9),
        _unmeasured_gpu("b200", 180, 8.0, 2250, 600e9),
        _unmeasured_gpu("a100", 80, 2.04, 312, 200e9),
        _unmeasured_gpu("mi300x", 192, 5.3, 1307, 300e9),
        _unmeasured_gpu("l40s", 48, 0.864, 362, 20e9),
        _unmeasured_gpu("rtx4090", 24, 1.01, 165, 20e9),
    )
}


@dataclass(frozen=True)
class FittedConstants:
    """Constants of the cost model, fitted to one H200. `python -m benchmarks.plan` repeats the fit and compares."""

    layer_seconds: float = 3.30e-5
    """Minimum seconds of a layer in a decode step."""
    matmul_factor: float = 1.42
    """Matmuls of a decode step, relative to the roofline."""
    kv_read_factor: float = 1.12
    """Attention of a decode step, relative to reading the KV cache at full bandwidth."""
    update_matmul_factor: float = 1.0
    """Matmuls of an update, relative to their FLOPs at the full rate."""
    update_attention_factor: float = 2.93
    """Attention of an update, relative to its FLOPs at the full rate."""
    activation_passes: float = 13.1
    """How often an update moves the activations that autograd keeps."""
    launch_seconds: float = 3.65e-3
    """Host seconds per layer and micro-batch, forward and backward; the GPU works at the same time."""
    update_seconds: float = 1.38e-2
    """Seconds of an update in addition to its micro-batches."""


FITTED = FittedConstants()


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    network: float
    """Bytes per second that a node sends to other nodes."""

    @property
    def size(self) -> int:
        return self.gpus_per_node * self.nodes

    def bandwidth_per_rank(self, ranks: int) -> float:
        """Return the bytes per second of each rank in a ring of `ranks`; a ring crosses each node's network once."""
        return self.gpu.link if ranks <= self.gpus_per_node else min(self.gpu.link, self.network)

    def all_reduce_seconds(self, data: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce of `data` bytes."""
        return 0.0 if ranks == 1 else 2 * (ranks - 1) / ranks * data / self.bandwidth_per_rank(ranks)

    def all_gather_seconds(self, data: float, ranks: int) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of `data` bytes."""
        return self.all_reduce_seconds(data, ranks) / 2


def gpu_named(name: str) -> Gpu:
    if name.lower() not in GPUS:
        raise ConfigError(f"--gpu {name}: no such GPU. There are {', '.join(GPUS)}.{nearest(name.lower(), GPUS)}")
    return GPUS[name.lower()]


def bytes_per_second(text: str) -> float:
    """Parse a rate such as 40GB/s, 400Gb/s or 5e9."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kMGT]?)(b|B|bit)(?:/s|ps))?\s*", text)
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        value = 0.0
    if match is None or not 0 < value < 1e18:
        raise ConfigError(f"--network {text}: set the rate of a node in bytes (40GB/s) or bits (400Gb/s)")
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(match[2] or "", 1.0)
    return value * scale / (1 if match[3] in (None, "B") else 8)
