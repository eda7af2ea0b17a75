"""The rollout engine of small policies: vectorized sampling in this process."""

from contextlib import closing
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ascent.core.protocols import RolloutEngine
from ascent.core.types import Prompts, Rollouts
from ascent.inference.environment_turns import EnvironmentTurns
from ascent.models.small_policies import Policy, Sampled


class SmallPolicyEngine(RolloutEngine):
    """Samples from a policy in this process. If it is the learner's module, loading copies nothing."""

    provides = frozenset({"reward_greedy"})

    def __init__(self, policy: Policy, temperature: float, generator: torch.Generator):
        self.policy, self.temperature, self.generator = policy, temperature, generator
        self.version, self.limit = -1, policy.space.limit
        self._params = dict(policy.named_parameters())

    def load(self, params: dict[str, Tensor], version: int) -> None:
        if any(self._params[name].data_ptr() != tensor.data_ptr() for name, tensor in params.items()):
            self.policy.load_state_dict(params)
        self.version = version

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if limit not in (None, self.limit):
            raise ValueError(
                f"a limit of {limit} tokens is not supported: the task of this small policy sets {self.limit}"
            )
        generator = self.generator if seed is None else torch.Generator().manual_seed(seed)
        if prompts.start_episodes is not None:
            return self._generate_conversations(prompts, samples, generator, greedy)
        sampled = self.policy.sample(prompts.prompt, samples, self.temperature, None if greedy else generator)
        end = self.policy.space.end
        if end is None:
            mask = torch.ones(sampled.response.shape, dtype=torch.bool)
            truncated = torch.zeros(sampled.length.shape, dtype=torch.bool)
        else:
            mask = torch.arange(sampled.response.shape[2]) < sampled.length.unsqueeze(-1)
            truncated = sampled.response.gather(-1, sampled.length.unsqueeze(-1) - 1).squeeze(-1) != end
        return self._rollouts(prompts, sampled, mask=mask, present=mask, truncated=truncated, can_end=end is not None)

    def _rollouts(self, prompts: Prompts, sampled: Sampled, mask: Tensor, **fields: Any) -> Rollouts:
        return Rollouts(
            prompt=prompts.prompt,
            problem=prompts.problem,
            response=sampled.response,
            mask=mask,
            logp_sampler=torch.where(mask, sampled.logp, 0.0),
            limit=self.limit,
            temperature=self.temperature,
            version=torch.full((*mask.shape[:2], 1), self.version),
            **fields,
        )

    def _generate_conversations(
        self, prompts: Prompts, samples: int, generator: torch.Generator, greedy: bool
    ) -> Rollouts:
        """Generate responses of several turns. Environments of greedy responses get the same seeds every time."""
        assert prompts.start_episodes is not None
        shape = len(prompts), samples
        count = shape[0] * shape[1]
        seeds = torch.arange(count) if greedy else torch.randint(2**62, (count,), generator=generator)
        with closing(prompts.start_episodes(prompts, samples, seeds.tolist())) as episodes:
            turns = EnvironmentTurns(episodes, torch.full((count,), self.limit), self.limit)
            loop = VectorizedConversations(turns, count, self.policy.space.end)
            sampled = self.policy.sample_turns(
                prompts.prompt, samples, self.temperature, None if greedy else generator, loop
            )
        present = torch.arange(sampled.response.shape[2]) < sampled.length.unsqueeze(-1)
        truncated = torch.tensor([i not in turns.terminated for i in range(count)]).view(shape)
        return self._rollouts(prompts, sampled, truncated=truncated, **turns.fields(shape, present))


class VectorizedConversations:
    """Advances all conversations by one token per call: the sampled token, or the next token of an observation."""

    def __init__(self, turns: EnvironmentTurns, count: int, end: int | None):
        self.turns, self.end = turns, end
        self.current_turn: list[list[int]] = [[] for _ in range(count)]
        """The tokens of each response's turn so far."""
        self.observations: list[list[int]] = [[] for _ in range(count)]
        """The observation tokens that each response still has to read."""
        self.running = [True] * count

    def __call__(self, sampled: Int[Tensor, "row"]) -> tuple[Int[Tensor, "row"], Tensor]:
        tokens, turns = sampled.tolist(), self.turns
        max_turn_tokens = turns.episodes.turn_tokens
        for i, token in enumerate(tokens):
            if self.observations[i]:
                tokens[i] = self.observations[i].pop(0)
            elif self.running[i]:
                self.current_turn[i].append(token)
                if token == self.end or len(self.current_turn[i]) == max_turn_tokens:
                    turns.submit_turn(i, self.current_turn[i])
                    self.current_turn[i] = []
        while turns.pending:
            for i, observation in turns.poll_observations(wait=True):
                self.observations[i], self.running[i] = list(observation), bool(observation)
        return torch.tensor(tokens), torch.tensor(self.running)
