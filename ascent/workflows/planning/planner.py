"""A plan before the bill: what a run will take on cards that are not there yet, and how its work is best shared."""

from __future__ import annotations

import heapq
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ascent.build.language_backend import never_in_shards
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.update import Adam
from ascent.inference.engine import ROWS
from ascent.training.micro_batches import (
    ACTIVATION_FRACTION,
    COMPACT_BYTES_PER_PARAM,
    COMPACT_THRESHOLD,
    STATE_BYTES_PER_PARAM,
)
from ascent.workflows.planning.cost_model import OneCard, Tokens, forward_passes
from ascent.workflows.planning.gpus import Cluster
from ascent.workflows.planning.model_shapes import ModelShape
from ascent.workflows.planning.schedule_simulation import Decoder, simulate

HOST = 2.7e9
"""Bytes per second of the connection over which rank 0 hands out batches and collects responses (gloo), at most."""
REWARD = 6e-5
"""Seconds of rank 0 for the text and the reward of a response."""
TOKEN_BYTES, SCORED_BYTES = 13, 4
"""Of a response's token: its id, its mask and its log-prob; and each further number about it."""
FULL = 0.95
"""Of a card's memory, what a plan may fill: the rest is the driver's, the graphs' and lost between blocks."""
SIMULATED = 16
"""Cards that are simulated at most: the slowest of them stands for the slowest of all."""


@dataclass(frozen=True)
class Lengths:
    """What is assumed of prompts and responses, in tokens."""

    prompt: int
    mean: float
    spread: float
    """σ of the logarithm of the lengths; 0: all are equal."""
    limit: int

    def draw(self, seed: tuple[int, ...], prompts: int, samples: int) -> list[list[int]]:
        """Lengths of responses, log-normal, by prompt."""
        drawn = np.random.default_rng(seed).standard_normal((prompts, samples))
        lengths = self.mean * np.exp(self.spread * drawn - self.spread**2 / 2)
        return lengths.clip(1, self.limit).astype(int).tolist()


@dataclass(frozen=True)
class Way:
    """One way to share the work, and what it gives."""

    samplers: int
    """Cards that only sample; 0: every card samples and trains."""
    ahead: int
    seconds: float
    """Of a step."""
    tokens_per_second: float
    idle: float
    """Share of the cards' time in which they neither decode nor train."""
    phases: dict[str, float]
    untried: str | None
    """Why Ascent does not do this today; None: it does."""


@dataclass(frozen=True)
class Forecast:
    """What is predicted of a run."""

    shape: ModelShape
    cluster: Cluster
    answers: Lengths
    config: Config
    shard: bool
    fits: bool
    memory: dict[str, int]
    """Bytes per rank, by what takes them."""
    micro_tokens: int
    needed: int
    """Cards from which on the trained state fits."""
    asked: Way
    ways: list[Way]
    notes: list[str]

    @property
    def best(self) -> Way:
        return max(self.ways, key=lambda way: way.tokens_per_second)

    @property
    def best_today(self) -> Way:
        return max((way for way in self.ways if way.untried is None), key=lambda way: way.tokens_per_second)

    def to_dict(self) -> dict[str, Any]:
        """For `--json`: every number in seconds, bytes or tokens."""
        config, card = self.config, self.cluster.card
        hours = config.steps * self.asked.seconds / 3600
        return {
            "model": {**asdict(self.shape), "head": self.shape.head},
            "cards": {"gpu": card.name, "gpus": self.cluster.gpus, "nodes": self.cluster.nodes}
            | {"network": self.cluster.network, "memory": card.memory, "measured": card.measured},
            "step": {"prompts": config.prompts, "samples": config.samples, **asdict(self.answers)},
            "memory": {"parts": self.memory, "total": sum(self.memory.values()), "fits": self.fits},
            "micro_tokens": self.micro_tokens,
            "placement": "shard" if self.shard else "replicate",
            "cards_needed": self.needed,
            "asked": asdict(self.asked),
            "best": asdict(self.best),
            "best_today": asdict(self.best_today),
            "ways": [asdict(way) for way in self.ways],
            "run": {"steps": config.steps, "hours": hours, "gpu_hours": hours * self.cluster.size},
            "notes": self.notes,
        }


class Planner:
    """Predicts one run; its parts share what they know of it."""

    def __init__(self, config: Config, shape: ModelShape, cluster: Cluster, answers: Lengths):
        if limit := config.policy.gpu_memory * 2**30:
            cluster = replace(cluster, card=replace(cluster.card, memory=int(min(limit, cluster.card.memory))))
        self.config, self.shape, self.cluster, self.answers = config, shape, cluster, answers
        policy = config.policy
        self.one = OneCard(shape, cluster.card, bits=policy.bits, mixed=policy.dtype == "mixed")
        self.trained = shape.trained(policy.lora, policy.last_layers)
        self.critic = self._critic()
        """Bytes of a critic."""
        self.shard = self._shards()
        self.per = self._bytes()
        """Bytes of a trained parameter."""
        self.batch = answers.draw((config.seed,), config.prompts, config.samples)
        """One step's responses."""
        self.longest = max(map(max, self.batch))
        self._slowest: dict[int, Tokens] = {}

    def _critic(self) -> int:
        """A head alone, or a backbone that trains what the policy's does."""
        critic, shape = self.config.algorithm.critic, self.shape
        if not critic.on or critic.shared:
            return STATE_BYTES_PER_PARAM * shape.width * critic.on
        frozen = (
            self.one.parameters * (1 - self.trained / shape.every)
            if not self.config.policy.lora
            else self.one.parameters
        )
        return int(frozen) + STATE_BYTES_PER_PARAM * self.trained

    def _shards(self) -> bool:
        wanted, size = self.config.ranks.shard, self.cluster.size
        if size == 1 or wanted == "replicate":
            if wanted == "shard":
                raise ConfigError("--ranks.shard shard: one card has nothing to share. Set --gpus, or leave it out")
            return False
        if wanted == "shard":
            return True
        state = STATE_BYTES_PER_PARAM * self.trained + 2 * (self.shape.every - self.trained)
        return state > ACTIVATION_FRACTION * self.cluster.card.memory and never_in_shards(self.config) is None

    def _bytes(self) -> int:
        policy, able = self.config.policy, isinstance(self.config.algorithm.update, Adam) and self.cluster.size == 1
        if policy.optimizer_state == "bfloat16" and not able:
            raise ConfigError("--policy.optimizer-state bfloat16 is for one card and Adam's moments. Leave it out")
        if policy.optimizer_state != "auto" or policy.lora or not able:
            return COMPACT_BYTES_PER_PARAM if policy.optimizer_state == "bfloat16" else STATE_BYTES_PER_PARAM
        wide = self.one.state(self.trained, self.config.algorithm.reference.kept, self.critic)
        return (
            COMPACT_BYTES_PER_PARAM
            if sum(wide.values()) > COMPACT_THRESHOLD * self.cluster.card.memory
            else STATE_BYTES_PER_PARAM
        )

    # ---- memory

    def state(self, learners: int) -> dict[str, int]:
        kept = self.config.algorithm.reference.kept
        return self.one.state(self.trained, kept, self.critic, learners if self.shard else 1, self.per)

    def needed(self) -> int:
        """The fewest cards on which the state fits with something left to work with; 0: however many there are."""
        for count in range(1, 4097):
            per = self.per if count == 1 else STATE_BYTES_PER_PARAM
            parts = self.one.state(self.trained, self.config.algorithm.reference.kept, self.critic, count, per)
            if sum(parts.values()) < FULL**2 * self.cluster.card.memory:
                return count
            if never_in_shards(self.config) is not None:
                return 0
        return 0

    def memory(self, learners: int, samples: bool = True) -> tuple[dict[str, int], float]:
        """Bytes of a rank by what takes them, and the tokens of its micro-batches."""
        parts = self.state(learners)
        state, checkpointing = sum(parts.values()), self.config.policy.checkpointing
        room = self.one.micro(state, checkpointing)
        room = min(room, self.config.micro_batch) if self.config.micro_batch else room
        slowest = self.slowest(learners)
        micro = slowest.tokens / max(1, math.ceil(slowest.tokens / room))
        rows = -(-self.config.prompts // learners) * self.config.samples
        live = min(rows, self.config.policy.rows or ROWS["cuda"]) * (self.longest + self.answers.prompt)
        parts["activations"] = int(micro * self.one.per_token(checkpointing))
        if samples:
            parts["caches"] = int(min(9 / 8 * live, self.one.cached(state)) * self.shape.cache)
        return parts, room

    # ---- seconds

    def slowest(self, ranks: int) -> Tokens:
        """The share of a mini-batch that is largest: whole prompts, the longest first to whoever has least."""
        if ranks in self._slowest:
            return self._slowest[ranks]
        groups = self.batch[: -(-len(self.batch) // self.config.minibatches)]
        loads: list[tuple[int, int]] = [(0, rank) for rank in range(min(ranks, len(groups)))]
        own: list[list[list[int]]] = [[] for _ in loads]
        for group in sorted(groups, key=sum, reverse=True):
            load, rank = heapq.heappop(loads)
            own[rank].append(group)
            heapq.heappush(loads, (load + sum(group) + self.answers.prompt, rank))
        self._slowest[ranks] = Tokens.of(self.answers.prompt, own[max(loads)[1]])
        return self._slowest[ranks]

    def learning(self, learners: int, room: float) -> dict[str, float]:
        """Seconds of each phase from the last response of a step to its new weights."""
        config, one, shape, cluster = self.config, self.one, self.shape, self.cluster
        responses, updates = config.prompts * config.samples, config.epochs * config.minibatches
        slowest = self.slowest(learners)
        micro = max(1, math.ceil(slowest.tokens / room))
        every = Tokens(*(getattr(slowest, name) * config.minibatches for name in ("tokens", "loss", "pairs")))
        data = responses * self.longest * (TOKEN_BYTES + SCORED_BYTES * (1 + forward_passes(config)))
        update = one.update(slowest, room, self.trained, config.policy.checkpointing, self.per, learners == 1)
        critic = update if config.algorithm.critic.on and not config.algorithm.critic.shared else 0.0
        moved = 2 * cluster.gathered(2 * shape.every, learners) + cluster.gathered(4 * self.trained, learners)
        wait = max(0.0, micro * moved - update) if self.shard else cluster.summed(4 * self.trained, learners)
        several, host = learners > 1, min(HOST, cluster.network if cluster.nodes > 1 else HOST)
        return {
            "collect": responses * self.longest * TOKEN_BYTES / host if several else 0.0,
            "reward": responses * REWARD,
            "score": forward_passes(config) * one.score(every, room),
            "hand out": config.epochs * data / host * math.log2(learners) if several else 0.0,
            "update": updates * (update + critic),
            "sum gradients": updates * wait,
            "sync": cluster.gathered(4 * shape.every, learners) if self.shard else 0.0,
        }

    def way(self, samplers: int, ahead: int) -> Way:
        """A step where so many cards only sample, and sampling may be so many steps ahead."""
        config, size, together = self.config, self.cluster.size, samplers == 0
        learners, drawing = size - samplers, samplers or size
        room = self.memory(learners, together)[1]
        phases = self.learning(learners, room)
        state = sum(self.state(learners).values()) if together else 2 * self.shape.every
        mean = sum(map(sum, self.batch)) / (config.prompts * config.samples)
        fitting = self.one.cached(state) / (mean + self.answers.prompt / config.samples)
        rows = max(1, int(min(config.policy.rows or ROWS["cuda"], fitting)))
        count = min(drawing, SIMULATED, config.prompts)
        cards = [Decoder(self.one, rows, self.answers.prompt) for _ in range(count)]
        base, more = divmod(config.prompts, drawing)

        def draw(card: int, step: int) -> list[list[int]]:
            return self.answers.draw((config.seed, card, step), max(1, base + (card < more)), config.samples)

        if not together:
            phases["sync"] += 2 * self.shape.every / self.cluster.across(size)
        sync, learn = phases["sync"], sum(phases.values()) - phases["sync"]
        found = simulate(cards, draw, ahead, learn, sync, together)
        busy_learning = phases["score"] + phases["update"]
        used = min(1.0, config.prompts / drawing) * found.busy * drawing
        used += busy_learning * min(learners, config.prompts)
        tokens = mean * config.prompts * config.samples
        return Way(
            samplers, ahead, found.step, tokens / found.step, max(0.0, 1 - used / (size * found.step)),
            {"sample": found.sample, **phases}, self.untried(samplers, ahead),
        )  # fmt: skip

    def untried(self, samplers: int, ahead: int) -> str | None:
        if samplers:
            return "samplers of their own (ascent cluster) on GPUs"
        if ahead and self.cluster.size > 1:
            return "--ahead on several ranks"
        return None

    def ways(self) -> list[Way]:
        """Several that differ enough to choose from."""
        size = self.cluster.size
        found = [self.way(0, ahead) for ahead in sorted({0, 1, 4, self.config.ahead})]
        for samplers in sorted({max(1, size * part // 8) for part in (2, 4, 6, 7)} if size > 1 else ()):
            if samplers < size and self.holds(size - samplers):
                found += [self.way(samplers, ahead) for ahead in (1, 4)]
        return found

    def holds(self, learners: int) -> bool:
        return sum(self.state(learners).values()) < FULL * self.cluster.card.memory


def forecast(config: Config, shape: ModelShape, cluster: Cluster, answers: Lengths) -> Forecast:
    """What the run will take. Nothing is loaded, and nothing of it runs."""
    if shape.positions is not None and answers.prompt + answers.limit > shape.positions:
        raise ConfigError(
            f"--max-tokens {answers.limit} and prompts of {answers.prompt} tokens make "
            f"{answers.prompt + answers.limit} positions, and the model has {shape.positions}: lower one of them"
        )
    planner = Planner(config, shape, cluster, answers)
    cluster = planner.cluster
    parts, room = planner.memory(cluster.size)
    ways = planner.ways()
    asked = next(way for way in ways if way.samplers == 0 and way.ahead == config.ahead)
    return Forecast(
        shape, cluster, answers, config, planner.shard, sum(parts.values()) < FULL * cluster.card.memory, parts,
        int(room),
        planner.needed(), asked, ways, notes(config, shape, cluster),
    )  # fmt: skip


def notes(config: Config, shape: ModelShape, cluster: Cluster) -> list[str]:
    """What is assumed beside the model of costs."""
    card, found = cluster.card, list[str]()
    if not card.measured:
        found.append(
            f"{card.name}: published rates, times the share of them that an H200 reaches (90 % of its bandwidth, 80 % "
            "of its operations). Nothing was measured on it"
        )
    if cluster.size > 1:
        found.append(
            f"several cards were never measured: {card.link / 1e9:.0f} GB/s between the cards of a node"
            + (f", {cluster.network / 1e9:.3g} GB/s between nodes" if cluster.nodes > 1 else "")
            + f", {HOST / 1e9:.1f} GB/s for what rank 0 hands out and collects"
        )
    if shape.unlike is not None:
        found.append(f"decoding without captured graphs ({shape.unlike}) takes 20 to 40 times as long as is said here")
    elif config.policy.lora:
        found.append("sampling with LoRA takes 1.1 to 1.2 times as long as is said here; an update was about as long")
    if config.policy.bits:
        found.append("matrices in 4 bits are made again for every product: reckoned by their bytes, not measured")
    if config.policy.engine != "local":
        found.append(f"sampling is that of Ascent's own sampler: {config.policy.engine} was not measured for plans")
    if config.task.has_environment:
        found.append("turns with an environment are counted as one answer, and its seconds are not counted")
    if cluster.size > SIMULATED:
        found.append(f"{SIMULATED} cards are simulated: the slowest of them stands for the slowest of {cluster.size:,}")
    if config.prompts < cluster.size:
        found.append(
            f"--prompts {config.prompts} for {cluster.size:,} cards: a prompt's responses are sampled and trained by "
            "one card, so the others have no work. Set more prompts per step"
        )
    return found
