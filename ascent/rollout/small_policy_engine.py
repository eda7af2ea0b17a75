"""Sample from small policies in this process."""

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
    """Draws from a policy in this process. With the learner's own module, loading copies nothing."""

    provides = frozenset({"reward_greedy"})

    def __init__(self, policy: Policy, temperature: float, generator: torch.Generator):
        self.policy, self.temperature, self.generator = policy, temperature, generator
        self.version, self.limit = -1, policy.space.limit
        self._own = dict(policy.named_parameters())

    def load(self, params: dict[str, Tensor], version: int) -> None:
        if any(self._own[name].data_ptr() != tensor.data_ptr() for name, tensor in params.items()):
            self.policy.load_state_dict(params)
        self.version = version

    def generate(
        self, prompts: Prompts, samples: int, greedy: bool = False, *, limit: int | None = None, seed: int | None = None
    ) -> Rollouts:
        if limit not in (None, self.limit):
            raise ValueError(f"a limit of {limit} tokens: a small policy draws up to {self.limit}, as its task says")
        stream = self.generator if seed is None else torch.Generator().manual_seed(seed)
        if prompts.start_episodes is not None:
            return self._conversations(prompts, samples, stream, greedy)
        drawn = self.policy.sample(prompts.prompt, samples, self.temperature, None if greedy else stream)
        end = self.policy.space.end
        if end is None:
            mask = torch.ones(drawn.response.shape, dtype=torch.bool)
            truncated = torch.zeros(drawn.length.shape, dtype=torch.bool)
        else:
            mask = torch.arange(drawn.response.shape[2]) < drawn.length.unsqueeze(-1)
            truncated = drawn.response.gather(-1, drawn.length.unsqueeze(-1) - 1).squeeze(-1) != end
        return self._rollouts(prompts, drawn, mask=mask, present=mask, truncated=truncated, can_end=end is not None)

    def _rollouts(self, prompts: Prompts, drawn: Sampled, mask: Tensor, **more: Any) -> Rollouts:
        return Rollouts(
            prompt=prompts.prompt,
            problem=prompts.problem,
            response=drawn.response,
            mask=mask,
            logp_sampler=torch.where(mask, drawn.logp, 0.0),
            limit=self.limit,
            temperature=self.temperature,
            version=torch.full((*mask.shape[:2], 1), self.version),
            **more,
        )

    def _conversations(self, prompts: Prompts, samples: int, stream: torch.Generator, greedy: bool) -> Rollouts:
        """Responses of several turns. A greedy answer has the same luck every time."""
        assert prompts.start_episodes is not None
        shape = len(prompts), samples
        count = shape[0] * shape[1]
        seeds = torch.arange(count) if greedy else torch.randint(2**62, (count,), generator=stream)
        with closing(prompts.start_episodes(prompts, samples, seeds.tolist())) as episodes:
            turns = EnvironmentTurns(episodes, torch.full((count,), self.limit), self.limit)
            follow = Conversation(turns, count, self.policy.space.end)
            random = None if greedy else stream
            drawn = self.policy.sample_turns(prompts.prompt, samples, self.temperature, random, follow)
        present = torch.arange(drawn.response.shape[2]) < drawn.length.unsqueeze(-1)
        cut = torch.tensor([i not in turns.terminated for i in range(count)]).view(shape)
        return self._rollouts(prompts, drawn, truncated=cut, **turns.fields(shape, present))


class Conversation:
    """Small policies in step with their environments: every token of every response at once, drawn or observed."""

    def __init__(self, turns: EnvironmentTurns, count: int, end: int | None):
        self.turns, self.end = turns, end
        self.latest: list[list[int]] = [[] for _ in range(count)]
        """The tokens of each response's latest turn."""
        self.observed: list[list[int]] = [[] for _ in range(count)]
        """What each response has still to be given."""
        self.running = [True] * count

    def __call__(self, drawn: Int[Tensor, "row"]) -> tuple[Int[Tensor, "row"], Tensor]:
        tokens, turns = drawn.tolist(), self.turns
        most = turns.episodes.turn_tokens
        for i, token in enumerate(tokens):
            if self.observed[i]:
                tokens[i] = self.observed[i].pop(0)
            elif self.running[i]:
                self.latest[i].append(token)
                if token == self.end or len(self.latest[i]) == most:
                    turns.submit_turn(i, self.latest[i])
                    self.latest[i] = []
        while turns.pending:
            for i, observation in turns.poll_observations(wait=True):
                self.observed[i], self.running[i] = list(observation), bool(observation)
        return torch.tensor(tokens), torch.tensor(self.running)
