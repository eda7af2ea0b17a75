"""Many `lecture` runs for the price of one: the library's own loop on all seeds at once, in memory.

The tensors of `lecture` are so small that a step costs Python time, not arithmetic. So S policies are stacked into one
module. Run s owns its slice of every parameter and prompts 3s … 3s+2 of the batch, and uses the generator of its own
seed. The runs do not affect each other: group-relative advantages see one prompt, and Adam works number by number. The
weights divide by the size of the whole batch, so every gradient is 1/S of what it would be alone. Adam does not notice,
because its ε is divided by S too. The result is what `ascent.train` gives seed by seed, except for the last bits of
float32, which may change a sample after hundreds of updates (a test compares the two). A choice that looks across
prompts (batch-normalized advantages, a bound on the gradient norm) is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ascent.build.assemble import assemble
from ascent.core.advantages import BatchNormalized, RunningMean
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.core.groups import groups_without_signal
from ascent.core.loop import train as loop
from ascent.core.protocols import UpdateResult
from ascent.core.types import Batch, Prompts, Space
from ascent.models import PerPosition, Policy
from ascent.models.small_policies import Sampled
from ascent.oracle.exact import enumerate_responses, probability, reward_table
from ascent.settings import configure
from ascent.tasks.small.lecture import LECTURE_PROMPTS, Lecture
from benchmarks.common import NoRecords

LAST = 10
"""Steps at the end of a run over which the share of groups without signal is taken."""


class Stack(Policy):
    """S of the lecture's policies side by side, each drawn from, and drawing with, its own generator."""

    def __init__(self, space: Space, generator: torch.Generator, seeds: tuple[int, ...], dim: int = 10):
        super().__init__()
        self.space = space
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        each = [PerPosition(dim)(space, own) for own in self.generators]
        self.embedding = nn.Parameter(torch.stack([p.embedding.detach() for p in each]))
        self.encode = nn.Parameter(torch.stack([p.encode.detach() for p in each]))
        self.decode = nn.Parameter(torch.stack([p.decode.detach() for p in each]))

    def all_logits(self, prompt: Tensor) -> Tensor:
        """[run·prompt token vocab]."""
        runs, _, dim = self.embedding.shape
        own = prompt.view(runs, -1)
        embedded = self.embedding.gather(1, own.unsqueeze(-1).expand(-1, -1, dim))
        encoded = embedded.view(runs, -1, self.space.prompt_length * dim) @ self.encode.flatten(1, 2)
        decoded = torch.einsum("rbd,rpde->rbpe", encoded, self.decode)
        return torch.einsum("rbpe,rve->rbpv", decoded, self.embedding).flatten(0, 1)

    def logits(self, prompt: Tensor, response: Tensor) -> Tensor:
        return self.all_logits(prompt).unsqueeze(1)

    @torch.no_grad()
    def sample(self, prompt: Tensor, samples: int, temperature: float, generator: torch.Generator | None) -> Sampled:
        logits = self.all_logits(prompt) / temperature
        prompts, tokens, vocab = logits.shape
        if generator is None:
            response = logits.argmax(-1).unsqueeze(1).expand(-1, samples, -1)
        else:
            rows = torch.softmax(logits, -1).view(len(self.generators), -1, vocab)
            drawn = [
                torch.multinomial(row, samples, replacement=True, generator=own)
                for row, own in zip(rows, self.generators, strict=True)
            ]
            response = torch.stack(drawn).view(prompts, tokens, samples).transpose(1, 2)
        logp = torch.log_softmax(logits, -1).unsqueeze(1).expand(-1, samples, -1, -1)
        chosen = logp.gather(-1, response.unsqueeze(-1)).squeeze(-1)
        return Sampled(response, chosen, torch.full((prompts, samples), tokens))


@dataclass(frozen=True)
class Stacked:
    """The choice that builds a `Stack`."""

    seeds: tuple[int, ...]

    def __call__(self, space: Space, generator: torch.Generator) -> Stack:
        return Stack(space, generator, self.seeds)


@dataclass(frozen=True)
class Lectures(Lecture):
    """The lecture's three prompts, once for every run."""

    runs: int = 1

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        return Prompts.of(torch.tensor(LECTURE_PROMPTS).repeat(self.runs, 1))

    def check_prompts(self, prompts: int) -> None:
        assert prompts == 3 * self.runs

    def held_out(self, count: int) -> Prompts:
        return Prompts.of(torch.tensor(LECTURE_PROMPTS).repeat(self.runs, 1))


@dataclass
class Memory(NoRecords):
    """Records that keep, for every run, what the benchmarks report; nothing is written."""

    runs: int
    silent: list[Tensor] = field(default_factory=list)
    responses: int = 0
    updates: int = 0

    def step(self, step: int, metrics: Any, batch: Batch, minis: list[Batch], updates: list[UpdateResult]) -> None:
        self.silent.append(groups_without_signal(batch).view(self.runs, -1).double().mean(1))
        self.responses += batch.valid.numel() // self.runs
        self.updates += len(updates)


@dataclass(frozen=True)
class Outcome:
    """How each of the runs ended."""

    expected: Tensor
    """E[R], enumerated; [run]."""
    sorted: Tensor
    """Share of the greedy answers that are exactly right; [run]."""
    silent: Tensor
    """Share of groups without signal over the last steps; [run]."""
    responses: int
    updates: int


def train_many(seeds: int | tuple[int, ...], **settings: Any) -> Outcome:
    """`ascent.train("lecture", seed=s, **settings)` for every seed, in one loop; only the end is evaluated."""
    config = stack(configure("lecture", settings), tuple(range(seeds)) if isinstance(seeds, int) else seeds)
    parts, records = assemble(config), Memory(config.task.runs)
    list(loop(config, config.task, parts.engine, parts.learner, records, parts.streams, evaluate=dict))
    expected, right = outcome(parts.policy, config.task)
    silent = torch.stack(records.silent[-LAST:]).mean(0)
    return Outcome(expected, right, silent, records.responses, records.updates)


def stack(one: Config, seeds: tuple[int, ...]) -> Config:
    """The config of one run made that of all."""
    update = one.algorithm.update
    if isinstance(one.algorithm.advantage, BatchNormalized | RunningMean) or update.max_norm is not None:
        raise ConfigError(
            "stacked runs must not see one another: no batch-normalized or running-mean advantages, no max-norm"
        )
    algorithm = replace(one.algorithm, update=replace(update, eps=update.eps / len(seeds)))
    task = Lectures(one.task.reward, runs=len(seeds))
    sizes = {"prompts": 3 * len(seeds), "eval_every": one.steps, "threads": 1}
    return replace(one, task=task, policy=Stacked(seeds), algorithm=algorithm, **sizes)


@torch.no_grad()
def outcome(policy: Stack, task: Lectures) -> tuple[Tensor, Tensor]:
    """E[R] and the share of exactly sorted greedy answers of each run."""
    prompt = task.held_out(0).prompt
    expected = (probability(policy, enumerate_responses(task.space, prompt)) * reward_table(task, prompt)).sum(-1)
    greedy = policy.all_logits(prompt).argmax(-1)
    right = (greedy == prompt.sort(-1).values).all(-1)
    return expected.view(task.runs, -1).double().mean(1), right.view(task.runs, -1).double().mean(1)
