"""Attention of a decode step alone on one GPU: µs per layer, against the time to read the KV cache.

    python -m benchmarks.attention_gpu [--shape 1.5b 135m] [--smoke]

Sequence lengths are those of `benchmarks.ragged_gpu` at several stages of its schedule (512 sequences, log-normal
lengths), in a graph with that batch size or a larger one; and equal lengths. Blocks are scattered. All layers of a step
are one captured graph, each with its own KV cache, so that the GPU's L2 cache holds none of it. The peer is the time in
which the memory (4.3 TB/s) moves the keys and values of all sequences. `whole_us` is the time with one program per
sequence instead of split sequences, and `apart` the difference between the two results. `value` is the first row of the
table: 512 ragged sequences of 1.5B.

`--smoke` computes the reference on a CPU, for a few short sequences.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascent.ops import decode_ops as formulas
from ascent.ops import load_kernels
from ascent.ops.cuda_graphs import CudaGraphs, EagerGraphs
from ascent.ops.decode_ops import AttentionParams
from ascent.ops.decode_state import BLOCK_SIZE, RESPONSE_LENGTH, DecodeState
from benchmarks.common import close, options_with_gpu, show
from benchmarks.ragged_gpu import LIMIT, MEAN, lengths_of
from benchmarks.rollouts_gpu import BANDWIDTH, SHAPES

MOST = 1.1
"""The figure to reach, over the time of the bytes."""
MAX_NUM_SEQS, RESPONSES, STEP = 512, 2048, 2000
"""Those of `benchmarks.ragged_gpu`, and the step at which the full batch is measured."""
RAGGED = ((512, 512), (256, 256), (128, 128), (48, 64), (24, 32), (12, 16), (3, 8))
"""Responses that run, and the rows of their graph."""
EQUAL = {"1.5b": ((256, 190), (512, 825)), "135m": ((512, 190), (256, 190), (512, 1000))}
"""Rows and their keys."""
REPEATS = 5
TIMES = ("us", "whole_us", "bytes_us")


def running_at(rows: int) -> list[int]:
    """Return the lengths of the running sequences when at most `rows` are left; of a full batch, at step STEP."""
    limits, lengths = lengths_of(RESPONSES, MEAN, LIMIT).tolist(), dict[int, int]()
    waiting, steps = list(range(RESPONSES))[::-1], 0
    while True:
        while waiting and len(lengths) < MAX_NUM_SEQS:
            lengths[waiting.pop()] = 0
        stride = min(limits[r] - n for r, n in lengths.items())
        lengths = {r: n + stride for r, n in lengths.items() if n + stride < limits[r]}
        steps += stride
        if len(lengths) <= rows < MAX_NUM_SEQS or (rows >= MAX_NUM_SEQS and steps >= STEP):
            return list(lengths.values())[:rows]


class Rows:
    """Decode state with sequences of these lengths in a batch of `count` rows, for all layers of this shape."""

    def __init__(self, shape: dict[str, Any], lengths: list[int], count: int, layers: int, device: str):
        self.shared, heads = shape["num_key_value_heads"], shape["num_attention_heads"]
        head_dim = shape["hidden_size"] // heads
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        need = [n // BLOCK_SIZE + 1 for n in lengths]
        like = torch.zeros((), dtype=dtype, device=device)
        self.decode_state = DecodeState.allocate(
            layers, self.shared, head_dim, count, sum(need), max(need), max(lengths) + 1, like
        )
        blocks = torch.randperm(sum(need)).split(need)
        for batch_index, own in enumerate(blocks):
            self.decode_state.block_tables[batch_index, : len(own)] = own.int()
        for cache in (x for pair in self.decode_state.cache.layers.values() for x in pair):
            cache.normal_()
        self.decode_state.state[RESPONSE_LENGTH, : len(lengths)] = torch.tensor(lengths, device=device)
        self.decode_state.batch_indices[: len(lengths)] = torch.arange(len(lengths), device=device)
        angle = torch.rand(max(lengths) + 1, head_dim // 2).repeat(1, 2).to(device) * 6
        self.params = AttentionParams(angle.cos().to(dtype), angle.sin().to(dtype), None, head_dim**-0.5)
        self.qkv = torch.randn(count, (heads + 2 * self.shared) * head_dim, device=device).to(dtype)
        self.count, self.layers, self.live = count, layers, len(lengths)
        self.bytes = sum(lengths) * 2 * self.shared * head_dim * like.element_size()
        self.out: Tensor = like

    def attend(self, ops: Any, cut: bool) -> None:
        parts = ops.split_long_rows(self.decode_state, self.count) if cut else None
        for layer in range(self.layers):
            self.out = ops.paged_attention(self.qkv, self.params, self.decode_state, layer, parts)

    def found(self) -> Tensor:
        return self.out[: self.live].double().clone()


def seconds_of(replay: Callable[[], None], on_gpu: bool) -> float:
    """The median of a few replays."""
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(REPEATS):
            replay()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / REPEATS)
    return statistics.median(times)


@torch.no_grad()
def measure(name: str, lengths: list[int], count: int, cut: bool, smoke: bool) -> dict[str, Any]:
    shape, device = SHAPES[name], "cpu" if smoke else "cuda"
    torch.manual_seed(0)
    rows = Rows(shape, lengths, count, 2 if smoke else shape["num_hidden_layers"], device)
    ops = formulas if smoke else load_kernels("triton_decoding") or formulas
    graphs = EagerGraphs() if smoke else CudaGraphs()
    took, results = {}, {}
    for how in {cut, False}:
        graphs.warm_up(lambda how=how: rows.attend(ops, how))  # type: ignore[misc]
        replay = graphs.capture(lambda how=how: rows.attend(ops, how))  # type: ignore[misc]
        replay()
        took[how], results[how] = seconds_of(replay, not smoke), rows.found()
    assert not rows.decode_state.finished_splits.any()
    return {
        "shape": name,
        "rows": len(lengths),
        "keys": sum(lengths) // len(lengths),
        "longest": max(lengths),
        "us": took[cut] / rows.layers * 1e6,
        "whole_us": took[False] / rows.layers * 1e6,
        "bytes_us": rows.bytes / BANDWIDTH * 1e6,
        "apart": float((results[cut] - results[False]).norm() / results[False].norm()),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=sorted(EQUAL), default=list(EQUAL))
    parser.add_argument("--smoke", action="store_true", help="a few short rows on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    found = []
    for shape in options.shape:
        if options.smoke:
            found += [measure(shape, [3, 70, 130], 4, True, True)]
            continue
        found += [measure(shape, running_at(rows), count, True, False) for rows, count in RAGGED]
        found += [measure(shape, [keys] * rows, rows, False, False) for rows, keys in EQUAL[shape]]
    table = [
        [
            f["shape"],
            *(str(f[k]) for k in ("rows", "keys", "longest")),
            *(f"{f[k]:.1f}" for k in TIMES),
            f"{f['us'] / f['bytes_us']:.2f}",
        ]
        for f in found
    ]
    show(["shape", "rows", "mean keys", "longest", *TIMES, "µs / bytes"], table)
    first, more = found[0], {"found": found, "torch": torch.__version__}
    if options.smoke:
        return close("attention_gpu", None, None, MOST, True, smoke=True, **more)[1]
    more["device"] = torch.cuda.get_device_name()
    ok = first["us"] <= MOST * first["bytes_us"] and all(f["apart"] < 0.01 for f in found)
    return close("attention_gpu", first["us"], first["bytes_us"], MOST, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())
