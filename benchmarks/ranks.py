"""Several ranks against one process, in float64 over gloo: the largest difference.

    python -m benchmarks.ranks

A tiny Llama with random parameters. Every rank computes its share of one batch; scores, gradient, terms, parameters
after a step, critic and Fisher-vector products are compared with those of one process, for every named algorithm and
the hard cases: tied embeddings, adapters, a rank without work, ranks with unequal numbers of micro-batches. Then
five steps of sampling and training, and checkpoints that 2 ranks write and 1 and 3 read. `value` is the largest gap.
Last, `torchrun` starts runs with a rank killed at a random moment, 20 times (`--kills N`): see
benchmarks/killed_ranks.py.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascent.build.language_reward_model import add_head, response_scores, step_scores
from ascent.core.algorithms import ALGORITHMS, Algorithm
from ascent.core.critics import SharedCritic
from ascent.core.kl import InLoss
from ascent.core.preferences import RESPONSES_PER_PROMPT
from ascent.core.types import Batch, Prompts, Terms
from ascent.distributed.rank_group import RankGroup
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks
from ascent.rollout.rank_leader import RankedEngine, RankZeroLearner, run_follower
from ascent.training.fsdp import ShardedLearner
from ascent.training.language_learner import LanguageCritic, LanguageLearner
from ascent.training.model_sharding import gather_full, local_tensor, shard_like
from benchmarks.common import ROOT, close, show
from benchmarks.killed_ranks import kills
from tests.language import model_of, prompts_of, rewarded, sampler_of

TARGET = 1e-12
DEADLINE = 60.0
SIZES = (3, 2)
LENGTHS = (5, 2, 7, 11, 3, 6, 9)
STEPS = 5
Case = Callable[[Ranks, bool], float | None]


# ---- one batch ---------------------------------------------------------------------------------------


def learner_of(algorithm: Algorithm, micro: int = 0, **shape: Any) -> LanguageLearner:
    """A learner whose reference is another policy than its own, and whose critic says something."""
    lora, checkpointing = shape.pop("lora", 0), shape.pop("checkpointing", False)
    lm = model_of(**shape)
    trains = algorithm.loss.trains
    if trains != "policy":
        add_head(lm, trains == "steps")
    if lora:
        adapt(lm.model, lora)
    critic = LanguageCritic(lm, algorithm.critic.shared) if algorithm.critic.enabled else None
    made = LanguageLearner(
        lm, algorithm.update, algorithm.reference.enabled, algorithm.outputs, micro, checkpointing, critic,
        algorithm.critic.update,
    )  # fmt: skip
    if trains != "policy":
        made.train_reward(partial(step_scores if trains == "steps" else response_scores, lm))
    return made


def adapt(model: Any, rank: int) -> None:
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    get_peft_model(model, LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, p in model.named_parameters():
        if "lora" in name:
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
            p.data = 0.1 * noise


@torch.no_grad()
def shake(learner: LanguageLearner, size: float = 0.03) -> None:
    """Move the policy away from its reference, and the critic from 0."""
    generator = torch.Generator().manual_seed(7)
    moved = [*learner.trainable(), *([] if learner.critic is None else learner.critic.head.parameters())]
    for p in moved:
        p.add_(size * torch.randn(p.shape, generator=generator, dtype=p.dtype))


def batch_of(algorithm: Algorithm, lengths: tuple[int, ...]) -> Batch:
    """What the loss learns from: sampled groups, demonstrations, pairs or labelled steps."""
    data = algorithm.loss.data
    batch = rewarded(
        sampler_of(model_of(), limit=14, seed=3).generate(
            Prompts.of(prompts_of(lengths, 4)), RESPONSES_PER_PROMPT.get(data, 4)
        )
    )
    if algorithm.advantage.__class__.__name__ == "Greedy":
        batch = batch.add(reward_greedy=batch.reward[:, :1] * 0.3)
    if data == "samples":
        noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return batch.add(logp_old=batch.logp_sampler + 0.1 * noise * batch.mask)
    reward = batch.reward.expand(batch.mask.shape) * batch.mask if data == "steps" else torch.ones_like(batch.reward)
    return batch.add(sampled=False, reward=reward, logp_sampler=torch.zeros_like(batch.logp_sampler))


def with_advantages(learner: Any, algorithm: Algorithm, batch: Batch) -> tuple[Batch, dict[str, Tensor]]:
    scores = learner.score(batch, algorithm.needs | (learner.provides & {"logp_old"}))
    batch, state = algorithm.compute_advantages(
        batch.add(**{k: v for k, v in scores.items() if k != "logp_old"}), algorithm.initial_state()
    )
    return batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0)), scores


def numbers(learner: Any, algorithm: Algorithm, batch: Batch) -> dict[str, Tensor]:
    """Everything that a learner computes of a batch; what is joined is whole on rank 0 alone."""
    mini, scores = batch, learner.score(batch, algorithm.needs | (learner.provides & {"logp_old"}))
    terms = learner.gradient(mini, algorithm.objective)
    found = {f"score {k}": v for k, v in scores.items()} | {"objective": terms.objective}
    found |= {f"sum {k}": v for k, v in terms.sums.items()} | {f"mean {k}": v for k, v in terms.means.items()}
    found["gradient"] = flat(learner, [p.grad for p in learner.trainable()])
    found["total"] = learner.evaluate_objective(mini, algorithm.objective)
    stepped = learner.step(mini, algorithm.objective, algorithm.update)
    found |= {"logp": stepped.logp, "grad_norm": stepped.metrics["grad_norm"]}
    if learner.critic_optimizer is not None:
        found["value loss"], found["value norm"] = learner.fit_critic(mini, algorithm.critic.loss)  # type: ignore[attr-defined]
    if learner.critic is not None:
        found["critic"] = torch.cat([gather_full(p).flatten() for p in learner.critic.state_dict().values()])
    found["parameters"] = flat(learner, learner.trainable())
    return found


def flat(learner: Any, tensors: list[Any]) -> Tensor:
    """All of them in one row; those in shards are gathered."""
    parts = [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, learner.trainable(), strict=True)]
    return torch.cat([(t.full_tensor() if hasattr(t, "full_tensor") else t).detach().flatten() for t in parts])


def gap(
    ranks: Ranks, sharded: bool, algorithm: Algorithm, lengths: tuple[int, ...] = LENGTHS,
    micro: tuple[int, ...] = (0,), **shape: Any,
) -> float | None:  # fmt: skip
    """The largest difference to one process, on this rank, of anything; what only rank 0 has counts there."""
    if sharded and algorithm.update.full_batch:
        return None  # refused
    one = learner_of(algorithm, **shape)
    shake(one)
    mini, _ = with_advantages(one, algorithm, batch_of(algorithm, lengths))
    wanted = numbers(one, algorithm, mini)
    several = learner_of(algorithm, micro[ranks.rank % len(micro)], **shape)
    shake(several)
    several.ranks = ranks
    if sharded:
        several = sharded_like(several, algorithm)
    found = numbers(several, algorithm, mini)
    concat_micro_batches = ("score", "logp")
    names = [name for name in wanted if ranks.rank == 0 or not name.startswith(concat_micro_batches)]
    assert float(wanted["gradient"].abs().max()) > 1e-6, "a gradient of 0 would prove nothing"
    gaps = {name: float((found[name].double() - wanted[name].double()).abs().max()) for name in names}
    return max(gaps.values())


@torch.no_grad()
def sharded_like(made: LanguageLearner, algorithm: Algorithm) -> ShardedLearner:
    """The same learner in shards; its reference is the policy from before it was shaken."""
    memory = (made.micro_batch, made.checkpointing, made.ranks)
    kept, outputs, choice = algorithm.reference.enabled, algorithm.outputs, algorithm.critic
    several = ShardedLearner(made.lm, algorithm.update, kept, outputs, *memory, choice)
    if made.reference_params is not None:
        several.reference_params = [
            shard_like(old, p) for old, p in zip(made.reference_params, several._trainable, strict=True)
        ]
    for name, value in ({} if made.critic is None else made.critic.state_dict()).items():
        to = several.critic.state_dict()[name]
        local_tensor(to).copy_(local_tensor(shard_like(value, to)))
    if algorithm.loss.trains != "policy":
        read = step_scores if algorithm.loss.trains == "steps" else response_scores
        several.train_reward(partial(read, several.lm, forward=several.forward_module))
    return several


def cases() -> dict[str, Case]:
    """By name: every row of the menu, and what is hard about sharing a batch."""
    grpo, dapo = ALGORITHMS["grpo"], ALGORITHMS["dapo"]
    exact = replace(grpo, kl=InLoss("exact", 0.3))
    made: dict[str, Any] = {name: partial(gap, algorithm=row) for name, row in ALGORITHMS.items()}
    made |= {
        "tied embeddings": partial(gap, algorithm=grpo, tie_word_embeddings=True),
        "adapters (LoRA)": partial(gap, algorithm=grpo, lora=4),
        "a rank without work": partial(gap, algorithm=dapo, lengths=(6,)),
        "unequal passes": partial(gap, algorithm=dapo, micro=(40, 4000)),
        "checkpointing": partial(gap, algorithm=dapo, checkpointing=True, micro=(90,)),
        "exact KL in the loss": partial(gap, algorithm=exact),
        "padded (GPT-2)": partial(gap, algorithm=grpo, kind="GPT2"),
        "adapters and a critic": partial(gap, algorithm=ALGORITHMS["ppo"], lora=4),
        "a critic on the policy": partial(gap, algorithm=replace(ALGORITHMS["ppo"], critic=SharedCritic())),
        "adapters, a critic on the policy": partial(
            gap, algorithm=replace(ALGORITHMS["ppo"], critic=SharedCritic()), lora=4
        ),
    }
    return made


# ---- five steps, checkpoints ---------------------------------------------------------------------


def drive(learner: Any, sampler: Any, algorithm: Algorithm, first: int = 0, last: int = STEPS) -> list[Tensor]:
    """The loop's own order of things; the reward is a fixed function of the tokens. Returned is what was drawn."""
    tokens = []
    for step in range(first, last):
        sampler.load(learner.params(), step)
        drawn = sampler.generate(Prompts.of(prompts_of(LENGTHS, seed=step)), 4, seed=100 + step)
        tokens.append(torch.where(drawn.mask, drawn.response, -1))
        reward = (drawn.response * drawn.mask).sum(-1, keepdim=True).double() % 7
        batch = rewarded(drawn).add(reward=reward)
        scores = learner.score(batch, algorithm.needs | {"logp_old"})
        batch, state = algorithm.compute_advantages(batch.add(**scores), algorithm.initial_state())
        mini = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
        learner.step(mini, algorithm.objective, algorithm.update)
        algorithm.reference(learner, step)
    return tokens


def parts_of(ranks: Ranks, sharded: bool, algorithm: Algorithm) -> Any:
    learner = learner_of(algorithm)
    learner.ranks = ranks
    lm = learner.lm
    if sharded:
        learner = sharded_like(learner, algorithm)
    sampler: Any = sampler_of(lm, limit=14)
    if isinstance(ranks, RankGroup):
        sampler = RankedEngine(sampler, ranks, learner, True)
    config = SimpleNamespace(algorithm=algorithm)
    return SimpleNamespace(config=config, learner=learner, engine=sampler, evaluation=None)


def led(ranks: Ranks, sharded: bool, algorithm: Algorithm, work: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """What `work` gives with the learner and the sampler of rank 0, which the others follow; and this rank's parts."""
    parts = parts_of(ranks, sharded, algorithm)
    if not isinstance(ranks, RankGroup):
        return work(parts.learner, parts.engine), parts
    if ranks.rank:
        keep = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        run_follower(parts, ranks)
        for number, handler in keep.items():
            signal.signal(number, handler)
        return None, parts
    found = work(RankZeroLearner(parts.learner, ranks), parts.engine)
    ranks.send_command("", "end")
    return found, parts


ALGORITHM = replace(ALGORITHMS["grpo"], update=replace(ALGORITHMS["grpo"].update, lr=1e-2, max_norm=0.5))  # type: ignore[type-var]


def parameters(learner: Any) -> Tensor:
    return flat(learner, learner.trainable())


def five_steps(ranks: Ranks, sharded: bool) -> float:
    """Tokens must be equal, the ranks' parameters bit for bit; the gap is that of the parameters to one process."""
    wanted, alone = led(SINGLE_PROCESS, False, ALGORITHM, partial(drive, algorithm=ALGORITHM))
    found, parts = led(ranks, sharded, ALGORITHM, partial(drive, algorithm=ALGORITHM))
    own = parameters(parts.learner)
    marks = ranks.gather(hashlib.sha256(own.numpy().tobytes()).hexdigest())
    if ranks.rank == 0:
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True)), "other tokens were drawn"
        assert len(set(marks)) == 1, "the ranks have other parameters"
    return float((own - parameters(alone.learner)).abs().max())


def checkpoints(ranks: Ranks, sharded: bool) -> float:
    """Two steps here, two more in one process, the last here again: from learner's state to learner's state."""
    _, alone = led(SINGLE_PROCESS, False, ALGORITHM, partial(drive, algorithm=ALGORITHM))

    def begin(learner: Any, sampler: Any) -> Any:
        drive(learner, sampler, ALGORITHM, 0, 2)
        return copy.deepcopy(learner.state())

    def go_on(state: Any, first: int, last: int, learner: Any, sampler: Any) -> Any:
        learner.restore(state)
        drive(learner, sampler, ALGORITHM, first, last)
        return copy.deepcopy(learner.state())

    state, _ = led(ranks, sharded, ALGORITHM, begin)
    if ranks.rank == 0:
        state, _ = led(SINGLE_PROCESS, False, ALGORITHM, partial(go_on, state, 2, 4))
    _, parts = led(ranks, sharded, ALGORITHM, partial(go_on, state, 4, STEPS))
    return float((parameters(parts.learner) - parameters(alone.learner)).abs().max())


def of_rank_0(ranks: Ranks, sharded: bool) -> float:
    """Before a run and in evaluations rank 0 has objectives of its own, which may keep what they are shown."""

    def look(learner: Any, _: Any) -> Tensor:
        batch, shown = batch_of(ALGORITHM, LENGTHS).sub_batch(slice(None)), []

        def keep(micro: Batch, out: Any) -> Terms:
            shown.append(out.logp.detach().flatten())
            return Terms(torch.where(micro.mask, out.logp, 0.0).sum(), {})

        total, terms = learner.evaluate_objective(batch, keep), learner.gradient(batch, keep)
        return torch.cat([*shown, total.view(1), terms.objective.view(1)])

    wanted, _ = led(SINGLE_PROCESS, False, ALGORITHM, look)
    found, _ = led(ranks, sharded, ALGORITHM, look)
    return 0.0 if found is None else float((found - wanted).abs().max())


# ---- the processes -------------------------------------------------------------------------------


def work(rank: int, port: int, only: list[str], out: Path, sharded: tuple[bool, ...], sizes: tuple[int, ...]) -> None:
    """One process of the largest group, which takes part in every smaller one too."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, max(sizes), rank == 0)
    found: dict[str, Any] = {}
    every = cases() | {"five steps": five_steps, "checkpoints": checkpoints, "of rank 0 alone": of_rank_0}
    for size in sizes:
        if rank < size:
            ranks = RankGroup(DEADLINE, "cpu", (dist.PrefixStore(str(size), store), rank, size))
            for shards in sharded:
                for name, case in every.items():
                    if only and name not in only:
                        continue
                    result: Any
                    try:
                        result = case(ranks, shards)
                    except Exception as error:
                        result = f"{type(error).__name__}: {error}"
                    results = ranks.gather(result)
                    if rank == 0:
                        words = [r for r in results if isinstance(r, str)]
                        largest = (
                            None
                            if None in results
                            else max([r for r in results if not isinstance(r, str)], default=None)
                        )
                        placed = "sharded" if shards else "replicated"
                        found[f"{name} | {size} ranks | {placed}"] = words[0] if words else largest
            ranks.heartbeat.close()
            dist.destroy_process_group()
    if rank == 0:
        out.write_text(json.dumps(found))
    store.set(f"done {rank}", "")
    store.wait([f"done {r}" for r in range(max(sizes))], timedelta(seconds=600))


def measure(
    only: list[str] | None = None, sharded: tuple[bool, ...] = (False,), sizes: tuple[int, ...] = SIZES
) -> dict[str, Any]:
    """Every case in one group of processes: the gap, by case, number of ranks and placement."""
    with tempfile.TemporaryDirectory() as folder:
        out, port = Path(folder) / "found.json", free_port()
        words = [sys.executable, "-m", "benchmarks.ranks", "--port", str(port), "--out", str(out)]
        words += [f"--only={name}" for name in only or []] + [
            f"--placement={'shard' if s else 'replicate'}" for s in sharded
        ]
        words += [f"--size={size}" for size in sizes]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        running = [subprocess.Popen([*words, "--rank", str(r)], env=env, cwd=ROOT) for r in range(max(sizes))]
        try:
            for process in running:
                process.wait(3600)  # a busy machine takes its time
        finally:
            for process in running:
                process.kill()
        return json.loads(out.read_text())


def free_port() -> int:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--placement", action="append", default=[])
    parser.add_argument("--size", action="append", type=int, default=[])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    placements = tuple(p == "shard" for p in args.placement) or (False, True)
    sizes = tuple(args.size) or SIZES
    if args.rank is not None:
        work(args.rank, args.port, args.only, args.out, placements, sizes)
        return 0
    gaps = measure(args.only, placements, sizes)
    columns = sorted({key.split(" | ", 1)[1] for key in gaps})
    names = list(dict.fromkeys(key.split(" | ")[0] for key in gaps))
    rows = [[name, *(cell(gaps.get(f"{name} | {column}")) for column in columns)] for name in names]
    show(["largest gap to one process", *columns], rows)
    values = [value if isinstance(value, float) else float("inf") for value in gaps.values() if value is not None]
    wrong = kills(args.kills) if args.kills else []
    ok = bool(values) and max(values) <= TARGET and not wrong
    return close("ranks", max(values, default=None), None, TARGET, ok, kills=args.kills, wrong=wrong)[1]


def cell(value: Any) -> str:
    return f"{value:.1e}" if isinstance(value, float) else str(value or "refused")


if __name__ == "__main__":
    sys.exit(main())
