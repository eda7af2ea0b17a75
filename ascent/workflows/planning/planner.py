"""Predict memory, speed and the best placement of a run on GPUs that need not exist on this machine."""

from __future__ import annotations

import heapq
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ascent.build.language_backend import sharding_obstacle
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.update import Adam
from ascent.inference.engine import DEFAULT_MAX_NUM_SEQS
from ascent.training.micro_batches import (
    ACTIVATION_FRACTION,
    COMPACT_BYTES_PER_PARAM,
    COMPACT_THRESHOLD,
    STATE_BYTES_PER_PARAM,
)
from ascent.workflows.planning.cost_model import GpuCostModel, TokenCounts, forward_passes
from ascent.workflows.planning.gpus import Cluster
from ascent.workflows.planning.model_shapes import ModelShape
from ascent.workflows.planning.schedule_simulation import SimulatedGpu, simulate

HOST_BANDWIDTH = 2.7e9
"""Maximum bytes per second at which rank 0 scatters batches and gathers responses (gloo)."""
REWARD_SECONDS = 6e-5
"""Seconds of rank 0 to decode and score a response."""
TOKEN_BYTES, SCORED_BYTES = 13, 4
"""Bytes per response token: id, mask and log-prob; and each further value."""
MAX_MEMORY_FRACTION = 0.95
"""Fraction of a GPU's memory that a plan may use. The driver, CUDA graphs and fragmentation take the rest."""
MAX_SIMULATED_GPUS = 16
"""The slowest simulated GPU stands for the slowest of all."""


@dataclass(frozen=True)
class ResponseLengths:
    """Assumed lengths of prompts and responses, in tokens."""

    prompt: int
    mean: float
    spread: float
    """Standard deviation of the logarithm of the lengths; 0: all are equal."""
    limit: int

    def draw(self, seed: tuple[int, ...], prompts: int, samples: int) -> list[list[int]]:
        """Draw log-normal lengths of responses, by prompt."""
        normal = np.random.default_rng(seed).standard_normal((prompts, samples))
        lengths = self.mean * np.exp(self.spread * normal - self.spread**2 / 2)
        return lengths.clip(1, self.limit).astype(int).tolist()


@dataclass(frozen=True)
class Placement:
    """A placement of sampling and training on the GPUs, and its predicted speed."""

    samplers: int
    """GPUs that only sample; 0: every GPU samples and trains."""
    ahead: int
    seconds: float
    """Seconds of a step."""
    tokens_per_second: float
    idle: float
    """Fraction of GPU time without decoding or training."""
    phases: dict[str, float]
    unsupported: str | None
    """Why Ascent does not support this placement; None: it does."""


@dataclass(frozen=True)
class Forecast:
    """The prediction for a run."""

    shape: ModelShape
    cluster: Cluster
    lengths: ResponseLengths
    config: Config
    shard: bool
    fits: bool
    memory: dict[str, int]
    """Bytes per rank, by part."""
    micro_tokens: int
    needed: int
    """The smallest number of GPUs on which the training state fits; 0: none."""
    requested: Placement
    placements: list[Placement]
    notes: list[str]

    @property
    def best(self) -> Placement:
        return max(self.placements, key=lambda placement: placement.tokens_per_second)

    @property
    def best_supported(self) -> Placement:
        return max(
            (placement for placement in self.placements if placement.unsupported is None),
            key=lambda placement: placement.tokens_per_second,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON of `ascent plan --json`, in seconds, bytes and tokens."""
        config, gpu = self.config, self.cluster.gpu
        hours = config.steps * self.requested.seconds / 3600
        return {
            "model": {**asdict(self.shape), "head": self.shape.head_parameters},
            "cluster": {"gpu": gpu.name, "gpus": self.cluster.gpus_per_node, "nodes": self.cluster.nodes}
            | {"network": self.cluster.network, "memory": gpu.memory, "measured": gpu.measured},
            "step": {"prompts": config.prompts, "samples": config.samples, **asdict(self.lengths)},
            "memory": {"parts": self.memory, "total": sum(self.memory.values()), "fits": self.fits},
            "micro_tokens": self.micro_tokens,
            "sharding": "shard" if self.shard else "replicate",
            "gpus_needed": self.needed,
            "requested": asdict(self.requested),
            "best": asdict(self.best),
            "best_supported": asdict(self.best_supported),
            "placements": [asdict(placement) for placement in self.placements],
            "run": {"steps": config.steps, "hours": hours, "gpu_hours": hours * self.cluster.size},
            "notes": self.notes,
        }


class Planner:
    """Predicts memory and speed of one run."""

    def __init__(self, config: Config, shape: ModelShape, cluster: Cluster, lengths: ResponseLengths):
        if limit := config.policy.gpu_memory * 2**30:
            cluster = replace(cluster, gpu=replace(cluster.gpu, memory=int(min(limit, cluster.gpu.memory))))
        self.config, self.shape, self.cluster, self.lengths = config, shape, cluster, lengths
        policy = config.policy
        self.cost = GpuCostModel(shape, cluster.gpu, bits=policy.bits, mixed=policy.dtype == "mixed")
        self.trained = shape.trained_parameters(policy.lora, policy.last_layers)
        self.critic = self._critic()
        """Bytes of a critic."""
        self.shard = self._shards()
        self.bytes_per_param = self._bytes()
        """Bytes per trained parameter."""
        self.batch_lengths = lengths.draw((config.seed,), config.prompts, config.samples)
        """Lengths of the responses of one step."""
        self.longest = max(map(max, self.batch_lengths))
        self._largest_shares: dict[int, TokenCounts] = {}

    def _critic(self) -> int:
        """Return the bytes of the critic: a head, or a backbone that trains the same parameters as the policy."""
        critic, shape = self.config.algorithm.critic, self.shape
        if not critic.enabled or critic.shared:
            return STATE_BYTES_PER_PARAM * shape.hidden_size * critic.enabled
        frozen = (
            self.cost.parameter_bytes * (1 - self.trained / shape.num_parameters)
            if not self.config.policy.lora
            else self.cost.parameter_bytes
        )
        return int(frozen) + STATE_BYTES_PER_PARAM * self.trained

    def _shards(self) -> bool:
        requested, size = self.config.ranks.shard, self.cluster.size
        if size == 1 or requested == "replicate":
            if requested == "shard":
                raise ConfigError("--ranks.shard shard needs several GPUs: set --gpus, or leave it out")
            return False
        if requested == "shard":
            return True
        state = STATE_BYTES_PER_PARAM * self.trained + 2 * (self.shape.num_parameters - self.trained)
        return state > ACTIVATION_FRACTION * self.cluster.gpu.memory and sharding_obstacle(self.config) is None

    def _bytes(self) -> int:
        policy, can_be_compact = (
            self.config.policy,
            isinstance(self.config.algorithm.update, Adam) and self.cluster.size == 1,
        )
        if policy.optimizer_state == "bfloat16" and not can_be_compact:
            raise ConfigError("--policy.optimizer-state bfloat16 needs one GPU and Adam: leave it out")
        if policy.optimizer_state != "auto" or policy.lora or not can_be_compact:
            return COMPACT_BYTES_PER_PARAM if policy.optimizer_state == "bfloat16" else STATE_BYTES_PER_PARAM
        float32_state = self.cost.state_bytes(self.trained, self.config.algorithm.reference.enabled, self.critic)
        return (
            COMPACT_BYTES_PER_PARAM
            if sum(float32_state.values()) > COMPACT_THRESHOLD * self.cluster.gpu.memory
            else STATE_BYTES_PER_PARAM
        )

    # ---- memory

    def state(self, learners: int) -> dict[str, int]:
        has_reference = self.config.algorithm.reference.enabled
        return self.cost.state_bytes(
            self.trained, has_reference, self.critic, learners if self.shard else 1, self.bytes_per_param
        )

    def needed(self) -> int:
        """Return the smallest number of GPUs on which the training state fits; 0: it never fits."""
        for count in range(1, 4097):
            bytes_per_param = self.bytes_per_param if count == 1 else STATE_BYTES_PER_PARAM
            parts = self.cost.state_bytes(
                self.trained, self.config.algorithm.reference.enabled, self.critic, count, bytes_per_param
            )
            if sum(parts.values()) < MAX_MEMORY_FRACTION**2 * self.cluster.gpu.memory:
                return count
            if sharding_obstacle(self.config) is not None:
                return 0
        return 0

    def memory(self, learners: int, samples: bool = True) -> tuple[dict[str, int], float]:
        """Return the bytes of a rank by part, and the maximum tokens of its micro-batches."""
        parts = self.state(learners)
        state, checkpointing = sum(parts.values()), self.config.policy.checkpointing
        room = self.cost.micro_batch_tokens(state, checkpointing)
        room = min(room, self.config.micro_batch) if self.config.micro_batch else room
        largest = self.largest_share(learners)
        micro = largest.tokens / max(1, math.ceil(largest.tokens / room))
        rows = -(-self.config.prompts // learners) * self.config.samples
        live = min(rows, self.config.policy.rows or DEFAULT_MAX_NUM_SEQS["cuda"]) * (self.longest + self.lengths.prompt)
        parts["activations"] = int(micro * self.cost.bytes_per_token(checkpointing))
        if samples:
            parts["caches"] = int(min(9 / 8 * live, self.cost.max_cached_tokens(state)) * self.shape.kv_bytes)
        return parts, room

    # ---- seconds

    def largest_share(self, ranks: int) -> TokenCounts:
        """Return the largest part of a mini-batch: groups go, longest first, to the rank with the fewest tokens."""
        if ranks in self._largest_shares:
            return self._largest_shares[ranks]
        groups = self.batch_lengths[: -(-len(self.batch_lengths) // self.config.minibatches)]
        loads: list[tuple[int, int]] = [(0, rank) for rank in range(min(ranks, len(groups)))]
        groups_of_rank: list[list[list[int]]] = [[] for _ in loads]
        for group in sorted(groups, key=sum, reverse=True):
            load, rank = heapq.heappop(loads)
            groups_of_rank[rank].append(group)
            heapq.heappush(loads, (load + sum(group) + self.lengths.prompt, rank))
        self._largest_shares[ranks] = TokenCounts.of(self.lengths.prompt, groups_of_rank[max(loads)[1]])
        return self._largest_shares[ranks]

    def learning_phases(self, learners: int, room: float) -> dict[str, float]:
        """Return the seconds of each phase between the last response of a step and its new weights."""
        config, cost, shape, cluster = self.config, self.cost, self.shape, self.cluster
        responses, updates = config.prompts * config.samples, config.epochs * config.minibatches
        largest = self.largest_share(learners)
        micro = max(1, math.ceil(largest.tokens / room))
        whole_batch = TokenCounts(
            *(getattr(largest, name) * config.minibatches for name in ("tokens", "loss", "pairs"))
        )
        data = responses * self.longest * (TOKEN_BYTES + SCORED_BYTES * (1 + forward_passes(config)))
        update = cost.update_seconds(
            largest, room, self.trained, config.policy.checkpointing, self.bytes_per_param, learners == 1
        )
        critic = update if config.algorithm.critic.enabled and not config.algorithm.critic.shared else 0.0
        moved = 2 * cluster.all_gather_seconds(2 * shape.num_parameters, learners) + cluster.all_gather_seconds(
            4 * self.trained, learners
        )
        wait = (
            max(0.0, micro * moved - update) if self.shard else cluster.all_reduce_seconds(4 * self.trained, learners)
        )
        several, host = learners > 1, min(HOST_BANDWIDTH, cluster.network if cluster.nodes > 1 else HOST_BANDWIDTH)
        return {
            "gather": responses * self.longest * TOKEN_BYTES / host if several else 0.0,
            "reward": responses * REWARD_SECONDS,
            "score": forward_passes(config) * cost.score_seconds(whole_batch, room),
            "scatter": config.epochs * data / host * math.log2(learners) if several else 0.0,
            "update": updates * (update + critic),
            "sum gradients": updates * wait,
            "sync": cluster.all_gather_seconds(4 * shape.num_parameters, learners) if self.shard else 0.0,
        }

    def placement(self, samplers: int, ahead: int) -> Placement:
        """Predict a step with `samplers` GPUs that only sample, and sampling up to `ahead` steps ahead."""
        config, size, together = self.config, self.cluster.size, samplers == 0
        learners, sampling = size - samplers, samplers or size
        room = self.memory(learners, together)[1]
        phases = self.learning_phases(learners, room)
        state = sum(self.state(learners).values()) if together else 2 * self.shape.num_parameters
        mean = sum(map(sum, self.batch_lengths)) / (config.prompts * config.samples)
        fitting = self.cost.max_cached_tokens(state) / (mean + self.lengths.prompt / config.samples)
        rows = max(1, int(min(config.policy.rows or DEFAULT_MAX_NUM_SEQS["cuda"], fitting)))
        count = min(sampling, MAX_SIMULATED_GPUS, config.prompts)
        simulated_gpus = [SimulatedGpu(self.cost, rows, self.lengths.prompt) for _ in range(count)]
        base, remainder = divmod(config.prompts, sampling)

        def draw(gpu: int, step: int) -> list[list[int]]:
            return self.lengths.draw((config.seed, gpu, step), max(1, base + (gpu < remainder)), config.samples)

        if not together:
            phases["sync"] += 2 * self.shape.num_parameters / self.cluster.bandwidth_per_rank(size)
        sync, learn = phases["sync"], sum(phases.values()) - phases["sync"]
        timing = simulate(simulated_gpus, draw, ahead, learn, sync, together)
        busy_learning = phases["score"] + phases["update"]
        used = min(1.0, config.prompts / sampling) * timing.busy * sampling
        used += busy_learning * min(learners, config.prompts)
        tokens = mean * config.prompts * config.samples
        return Placement(
            samplers, ahead, timing.step, tokens / timing.step, max(0.0, 1 - used / (size * timing.step)),
            {"sample": timing.sample, **phases}, self.unsupported(samplers, ahead),
        )  # fmt: skip

    def unsupported(self, samplers: int, ahead: int) -> str | None:
        if samplers:
            return "separate samplers (ascent cluster) were not tested on GPUs"
        if ahead and self.cluster.size > 1:
            return "--ahead is not supported on several ranks"
        return None

    def placements(self) -> list[Placement]:
        """Predict several placements to choose from."""
        size = self.cluster.size
        placements = [self.placement(0, ahead) for ahead in sorted({0, 1, 4, self.config.ahead})]
        for samplers in sorted({max(1, size * part // 8) for part in (2, 4, 6, 7)} if size > 1 else ()):
            if samplers < size and self.state_fits(size - samplers):
                placements += [self.placement(samplers, ahead) for ahead in (1, 4)]
        return placements

    def state_fits(self, learners: int) -> bool:
        return sum(self.state(learners).values()) < MAX_MEMORY_FRACTION * self.cluster.gpu.memory


def forecast(config: Config, shape: ModelShape, cluster: Cluster, lengths: ResponseLengths) -> Forecast:
    """Predict memory and speed of a run. No model is loaded and nothing is executed."""
    if shape.max_positions is not None and lengths.prompt + lengths.limit > shape.max_positions:
        raise ConfigError(
            f"--max-tokens {lengths.limit} and prompts of {lengths.prompt} tokens make "
            f"{lengths.prompt + lengths.limit} positions, and the model has {shape.max_positions}: lower one of them"
        )
    planner = Planner(config, shape, cluster, lengths)
    cluster = planner.cluster
    parts, room = planner.memory(cluster.size)
    placements = planner.placements()
    requested = next(
        placement for placement in placements if placement.samplers == 0 and placement.ahead == config.ahead
    )
    return Forecast(
        shape, cluster, lengths, config, planner.shard,
        sum(parts.values()) < MAX_MEMORY_FRACTION * cluster.gpu.memory, parts, int(room),
        planner.needed(), requested, placements, notes(config, shape, cluster),
    )  # fmt: skip


def notes(config: Config, shape: ModelShape, cluster: Cluster) -> list[str]:
    """Return the assumptions that the cost model does not cover."""
    gpu, assumptions = cluster.gpu, list[str]()
    if not gpu.measured:
        assumptions.append(
            f"{gpu.name}: published rates, scaled as on an H200, which reaches 90 % of its bandwidth and 80 % of its "
            "FLOP/s. It was not measured"
        )
    if cluster.size > 1:
        assumptions.append(
            f"several GPUs were not measured: {gpu.link / 1e9:.0f} GB/s between the GPUs of a node"
            + (f", {cluster.network / 1e9:.3g} GB/s between nodes" if cluster.nodes > 1 else "")
            + f", {HOST_BANDWIDTH / 1e9:.1f} GB/s to scatter batches and gather responses"
        )
    if shape.eager_reason is not None:
        assumptions.append(
            f"decoding without captured graphs ({shape.eager_reason}) takes 20 to 40 times as long as predicted"
        )
    elif config.policy.lora:
        assumptions.append(
            "sampling with LoRA takes 1.1 to 1.2 times as long as predicted; updates take about as long as predicted"
        )
    if config.policy.bits:
        assumptions.append("4-bit matrices are dequantized for every matmul: estimated from their bytes, not measured")
    if config.policy.engine != "local":
        assumptions.append(f"sampling is predicted for --engine local: {config.policy.engine} was not measured")
    if config.task.has_environment:
        assumptions.append("a conversation is counted as one response, without the time of its environment")
    if cluster.size > MAX_SIMULATED_GPUS:
        assumptions.append(
            f"{MAX_SIMULATED_GPUS} GPUs are simulated: the slowest of them stands for the slowest of {cluster.size:,}"
        )
    if config.prompts < cluster.size:
        assumptions.append(
            f"--prompts {config.prompts} for {cluster.size:,} GPUs: the responses to a prompt are sampled and trained "
            "on one GPU, so the other GPUs have no work. Set more prompts per step"
        )
    return assumptions
