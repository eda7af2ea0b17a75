"""Memory of each of two ranks after a step, against the prediction of `ascent plan`: over gloo on the CPU.

    python -m benchmarks.ranks_memory [--ranks 2] [--smoke]

A model of 2.5M random parameters in bfloat16 takes a step of GRPO with a KL to a reference, in processes that replicate
all state and in processes that shard it. Then every rank counts the bytes of its tensors, each storage once,
without the matrices that the engine repacks on a CPU. The plan's figure is that of
`GpuCostModel.state_bytes` without the logits: parameters, float32 copy, gradients, Adam and the reference. `value` is
the largest |planned / held − 1|; the target is 0.05. `--smoke` uses a tiny model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascent.distributed.rank_group import RankGroup
from ascent.rollout.rank_leader import run_follower
from ascent.workflows.planning.cost_model import GpuCostModel
from ascent.workflows.planning.gpus import GPUS
from ascent.workflows.planning.model_shapes import shape_of
from benchmarks.common import ROOT, close, show
from benchmarks.peers.models import SMOKE, random_model, random_prompts
from benchmarks.peers.steps import Ours, Work
from benchmarks.ranks import free_port

WITHIN = 0.05
SHAPE = {
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "tie_word_embeddings": True,
}  # fmt: skip
"""Small: matmuls in bfloat16 are slow on a CPU."""
PLACEMENTS = ("replicate", "shard")
MIB = 2**20


def held_bytes() -> int:
    """Of all tensors of this process, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    for one in gc.get_objects():
        with suppress(Exception):  # of what objects to being asked
            if issubclass(type(one), Tensor):
                for tensor in (one, one.grad if one.is_leaf else None):
                    local = getattr(tensor, "_local_tensor", tensor)
                    if local is not None and local.device.type == "cpu":
                        storage = local.untyped_storage()
                        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def laid_out(sampler: Any) -> int:
    """What the sampler holds on a CPU and not on a GPU."""
    while hasattr(sampler, "inner"):
        sampler = sampler.inner
    copies = [matmul.copy for matmul in sampler.packed_model.matmuls]
    return sum(tensor.numel() * tensor.element_size() for tensor in copies)


def work(rank: int, size: int, port: int, folder: Path) -> None:
    """One rank: a step in each placement, and what is held after it."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    ranks = RankGroup(600.0, "cpu", (store, rank, size))
    task = json.loads((folder / "work.json").read_text())
    found: dict[str, Any] = {}
    for placement in PLACEMENTS:
        before = held_bytes()
        settings = {
            "ranks.shard": placement,
            "policy.dtype": "bfloat16",
            "kl": "in-loss",
            "kl.coef": 0.1,
            "reference": "frozen",
        }
        side = Ours(Work(**task), settings, ranks)
        learner: Any = getattr(side.parts.learner, "inner", side.parts.learner)
        if rank:
            run_follower(side.parts, ranks)
        else:
            side()
            ranks.send_command("", "end")
        one = GpuCostModel(shape_of(side.parts.policy.model), GPUS["h200"])
        shards = size if placement == "shard" else 1
        state = one.state_bytes(one.shape.num_parameters, True, 0, shards)
        held, layout = held_bytes() - before, laid_out(side.parts.engine)
        own = {"held": held - layout, "layout": layout, "planned": sum(state.values()) - state["head"]}
        every = ranks.gather(own)
        if rank == 0:
            found[placement] = {"ranks": every, "parameters": one.shape.num_parameters, "placed": learner.placement}
        side.parts.task.close(), side.parts.engine.close()
        del side, learner
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    ranks.heartbeat.close()
    dist.destroy_process_group()


def measure(size: int, smoke: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder, port = Path(made), free_port()
        shape = SMOKE if smoke else SHAPE
        prompts = random_prompts(2 * size, 8, shape["vocab_size"])
        task = {"model": random_model(folder / "model", shape), "prompts": prompts, "samples": 2, "tokens": 4}
        (folder / "work.json").write_text(json.dumps(task))
        words = [sys.executable, "-m", "benchmarks.ranks_memory", "--ranks", str(size), "--port", str(port)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        each = [[*words, "--folder", made, "--rank", str(rank)] for rank in range(size)]
        running = [subprocess.Popen(one, env=env, cwd=ROOT) for one in each]
        try:
            for process in running:
                process.wait(1800)
        finally:
            for process in running:
                process.kill()
        return json.loads((folder / "found.json").read_text())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="a tiny model, only to see that it runs")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(argv)
    if args.rank is not None:
        work(args.rank, args.ranks, args.port, args.folder)
        return 0
    found, rows, errors = measure(args.ranks, args.smoke), [], []
    for placement, about in found.items():
        for rank, own in enumerate(about["ranks"]):
            errors.append(own["planned"] / own["held"] - 1)
            sizes = [f"{own[name] / MIB:.2f} MiB" for name in ("held", "planned")]
            per = [f"{own[name] / about['parameters']:.2f}" for name in ("held", "planned")]
            rows.append([placement, str(rank), *sizes, f"{errors[-1]:+.1%}", *per])
    show(["placement", "rank", "held", "planned", "error", "bytes per parameter", "planned"], rows)
    worst = max(map(abs, errors))
    if args.smoke:
        return close("ranks_memory", None, None, WITHIN, True, smoke=True, found=found)[1]
    return close("ranks_memory", worst, None, WITHIN, worst <= WITHIN, found=found)[1]


if __name__ == "__main__":
    sys.exit(main())
