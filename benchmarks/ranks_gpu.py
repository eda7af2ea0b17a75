"""A GRPO step through torch.distributed on one GPU, against the plain learner: the overhead of ranks.

    python -m benchmarks.ranks_gpu [--shape 135m --shape 1.5b] [--repeats 3] [--smoke]

A group of one rank (NCCL) trains the shapes of benchmarks/step_gpu.py: plain, that is without torch.distributed;
replicated; and sharded (FSDP2). Each is created from the same random parameters, in bfloat16. First, all compute
log-probs and the gradient of one batch. Their distance to the plain learner's in float32, in the norm, has to be the
plain learner's in bfloat16; for the smallest shape all are in float32 too, and have to be equal to 1e-5. Then follow
whole steps, after a warm-up step. `value` is the largest ratio of a median to the plain one, and the target
1.10. `--smoke`: a tiny model on the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascent.core.types import Rollouts, to_batch
from ascent.distributed.rank_group import RankGroup
from ascent.distributed.ranks import SINGLE_PROCESS
from ascent.training.model_sharding import gather_full
from benchmarks.common import close, options_with_gpu, show
from benchmarks.peers import Answer, in_turns, middle, raw
from benchmarks.peers.models import GPU_SHAPES, SMOKE, random_model, random_prompts
from benchmarks.peers.steps import Ours, Work
from benchmarks.step_gpu import PROMPT_TOKENS, PROMPTS, SAMPLES, TOKENS

OVERHEAD = 1.10
FAR, ALIKE = 1e-5, 1.1
"""How far numbers in float32 may be apart, in the norm; and how much further off in bfloat16 than the plain ones."""
SIDES = ("plain", "replicate", "shard")


def numbers(side: Ours) -> dict[str, Tensor]:
    """Log-probs and the gradient of one batch of random tokens, at the first parameters."""
    parts, algorithm = side.parts, side.parts.config.algorithm
    learner: Any = getattr(parts.learner, "inner", parts.learner)
    generator = torch.Generator().manual_seed(5)
    mask = torch.ones(4, 8, 64, dtype=torch.bool)
    prompt, response = (
        torch.randint(learner.lm.vocab_size, shape, generator=generator) for shape in ((4, 30), mask.shape)
    )
    none = torch.zeros(mask.shape)
    drawn = Rollouts(prompt, response, mask, none, 64, torch.zeros(4, 8, dtype=torch.bool))
    reward = torch.randn(4, 8, 1, generator=generator)
    batch = to_batch(drawn, reward=reward, valid=torch.ones(4, 8, dtype=torch.bool), logp_old=none)
    logp = learner.score(batch, frozenset({"logp_old"}))["logp_old"]
    batch, state = algorithm.compute_advantages(batch.add(logp_old=logp, logp_sampler=logp), algorithm.initial_state())
    mini = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
    learner.gradient(mini, algorithm.objective)
    gradient = torch.cat(
        [gather_full(p.grad).flatten().float().cpu() for p in learner.trainable() if p.grad is not None]
    )
    for p in learner.trainable():
        p.grad = None
    return {"log-probs": logp, "gradient": gradient}


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The norm of the difference, as a share of the norm."""
    return {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted}


def side_of(work: Work, name: str, group: RankGroup, **more: Any) -> Ours:
    how = {} if name == "plain" else {"ranks.shard": name}
    return Ours(work, how | more, SINGLE_PROCESS if name == "plain" else group)


def let_go(side: Ours) -> None:
    for part in (side.parts.task, side.parts.engine):
        part.close()
    del side.parts
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(work: Work, repeats: int, group: RankGroup, every: bool) -> tuple[dict[str, list[Answer]], dict[str, Any]]:
    """The seconds of every side; and how far its numbers are from those in float32, and its peak memory.

    `every`: compare all sides in float32, and not only the plain one.
    """
    answers: dict[str, list[Answer]] = {}
    about: dict[str, Any] = {"float32": {}, "apart": {}, "peak_gib": {}}
    exact: dict[str, Tensor] = {}
    for name in SIDES if every else SIDES[:1]:
        side = side_of(work, name, group, **{"policy.dtype": "float32"})
        found = numbers(side)
        let_go(side)
        exact = exact or found
        about["float32"][name] = apart(found, exact)
    for name in SIDES:
        if work.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        side = side_of(work, name, group)
        about["apart"][name] = apart(numbers(side), exact)
        answers[name] = in_turns({name: side}, repeats)[name]
        if work.device == "cuda":
            about["peak_gib"][name] = torch.cuda.max_memory_allocated() / 2**30
        let_go(side)
    return answers, about


def wrong(about: dict[str, Any]) -> bool:
    """Are numbers further from those of the plain learner than rounding explains?"""
    far = any(value > FAR for values in about["float32"].values() for value in values.values())
    plain = about["apart"]["plain"]
    return far or any(v > ALIKE * plain[k] + FAR for found in about["apart"].values() for k, v in found.items())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SAMPLES), action="append", default=[])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="try a tiny model on the CPU")
    options = options_with_gpu(parser, argv)
    device, results = "cpu" if options.smoke else "cuda", {}
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    group = RankGroup(60.0, device, (store, 0, 1))
    try:
        for name in options.shape or (["135m"] if options.smoke else ["135m", "1.5b"]):
            shape, tokens = (SMOKE, 8) if options.smoke else (GPU_SHAPES[name] | {"kind": "Llama"}, TOKENS)
            prompts = random_prompts(2 if options.smoke else PROMPTS, PROMPT_TOKENS, shape["vocab_size"])
            with tempfile.TemporaryDirectory() as folder:
                model = random_model(Path(folder), shape, device)
                work = Work(model, prompts, 4 if options.smoke else SAMPLES[name], tokens, device)
                answers, about = measure(work, options.repeats, group, name == "135m")
            plain = middle(answers["plain"])
            about |= {"ratio": {side: middle(answers[side]) / plain for side in SIDES}, "seconds": raw(answers)}
            results[name] = about
            print(f"in float32, apart from the plain learner: {about['float32']}", flush=True)
            show(
                ["shape", "side", "seconds", "of plain", "peak GiB", "log-probs off", "gradient off"],
                [[name, side, f"{middle(answers[side]):.3f}", f"{about['ratio'][side]:.3f}",
                  f"{about['peak_gib'].get(side, 0):.1f}", *(f"{v:.1e}" for v in about["apart"][side].values())]
                 for side in SIDES],
            )  # fmt: skip
    finally:
        group.heartbeat.close()
        dist.destroy_process_group()
    worst = max(found["ratio"][side] for found in results.values() for side in SIDES)
    right = not any(map(wrong, results.values()))
    more = {"shapes": results, "torch": torch.__version__}
    if options.smoke:
        return close("ranks_gpu", None, None, OVERHEAD, right, smoke=True, **more)[1]
    more["device"] = torch.cuda.get_device_name()
    return close("ranks_gpu", worst, 1.0, OVERHEAD, worst <= OVERHEAD and right, **more)[1]


if __name__ == "__main__":
    sys.exit(main())
