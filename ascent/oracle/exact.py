"""Exact expectations and gradients: enumerate all responses of a small policy instead of sampling them.

    E[R] = Σ_y π(y) R(y),    ∇E[R] = Σ_y R(y) ∇π(y)

`expected_reward` is cheap enough for every step of a run. A `ResponseTable` has every response to one prompt,
with the batch fields of a training step; `estimator.py` uses it to compute an algorithm's expected gradient.
"""

import copy
import itertools
import random
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.loop import total_reward
from ascent.core.types import Batch, Outputs, Prompts, Rollouts, Scores, Space, per_token_reward, reward_to_go, to_batch
from ascent.core.update import Adam
from ascent.models.small_policies import Policy
from ascent.rollout.small_policy_engine import SmallPolicyEngine
from ascent.training.small_learner import SmallLearner, action_logprobs, log_probs

MAX_RESPONSES = 50_000
"""Maximum number of responses to one prompt."""
NO_END_TOKEN = -1
"""Stands for the end token in a space without an end token."""
MAX_JACOBIAN_SIZE = 100_000_000
"""Maximum size of a Jacobian: responses × tokens × parameters."""
JACOBIAN_CHUNK = 100_000
"""Rows of a Jacobian that are computed at once, times its number of tokens."""


class EnumerableTask(Protocol):
    """Interface of a task that can be enumerated. A multi-turn task also has `make_environment`."""

    @property
    def space(self) -> Space: ...

    def score(self, rollouts: Rollouts) -> Scores: ...


class Responses(NamedTuple):
    """Every possible response, each once, padded with the end token."""

    response: Int[Tensor, "response token"]
    mask: Bool[Tensor, "response token"]
    truncated: Bool[Tensor, "response"]


def count_responses(space: Space) -> int:
    """Return the number of responses: vocab^limit, or with an end token Σ_{l<limit} (vocab−1)^l + (vocab−1)^limit."""
    if space.end is None:
        return space.vocab**space.limit
    return sum((space.vocab - 1) ** before for before in range(space.limit + 1))


@lru_cache(maxsize=16)
def all_responses(space: Space) -> Responses:
    """Return all responses of a space; with an end token they have different lengths."""
    count = count_responses(space)
    if count > MAX_RESPONSES:
        raise ConfigError(
            f"{space.vocab} tokens at up to {space.limit} positions make {count:,} responses, but at most "
            f"{MAX_RESPONSES:,} can be enumerated: lower the vocabulary or the length limit"
        )
    other_tokens = [token for token in range(space.vocab) if token != space.end]
    rows = [list(row) for row in itertools.product(other_tokens, repeat=space.limit)]
    if space.end is not None:
        shorter = (row for before in range(space.limit) for row in itertools.product(other_tokens, repeat=before))
        rows += [[*row, *[space.end] * (space.limit - len(row))] for row in shorter]
    tokens = torch.tensor(rows)
    ends = tokens == (NO_END_TOKEN if space.end is None else space.end)
    mask = ends.cumsum(-1) - ends.long() == 0
    return Responses(tokens, mask, ~ends.any(-1) & (space.end is not None))


def enumerate_responses(space: Space, prompt: Int[Tensor, "prompt position"], temperature: float = 1.0) -> Rollouts:
    """Return rollouts in which each prompt has every response, with log-probs of 0."""
    response, mask, truncated = all_responses(space)
    shape = (len(prompt), *response.shape)
    return Rollouts(
        prompt=prompt,
        response=response.expand(shape),
        mask=mask.expand(shape),
        logp_sampler=torch.zeros(()).expand(shape),
        truncated=truncated.expand(shape[:2]),
        limit=space.limit,
        temperature=temperature,
        can_end=space.end is not None,
    )


def enumerate_episodes(
    task: Any, prompts: Prompts, temperature: float = 1.0
) -> tuple[Rollouts, Float[Tensor, "episode"]]:
    """Return all conversations on the first of these prompts, and the probability of the environment's part in each.

    The task's environment has `state` and `outcomes`; a turn has `turn_tokens` tokens.
    """
    space, turn = task.space, task.turn_tokens
    environment = task.make_environment()
    environment.begin(task.problem(prompts, 0), random.Random(0))
    actions = [list(ids) for ids in itertools.product(range(space.vocab), repeat=turn)]
    going = [Episode([], [], [], [], 1.0, environment.state)]
    ended: list[Episode] = []
    while going:
        after = [e.extend(turn, action, outcome) for turn, e, action, outcome in _outcomes(environment, going, actions)]
        ended += [e for e in after if e.over]
        going = [e for e in after if not e.over]
        if len(ended) + len(going) > MAX_RESPONSES:
            raise ConfigError(f"more than {MAX_RESPONSES:,} conversations: lower the vocabulary or the number of turns")
    width = max(len(e.tokens) for e in ended)

    def rows(values: list[list[Any]], kind: torch.dtype) -> Tensor:
        return torch.tensor([row + [0] * (width - len(row)) for row in values], dtype=kind).unsqueeze(0)

    mask = rows([e.mask for e in ended], torch.bool)
    present = torch.arange(width) < torch.tensor([len(e.tokens) for e in ended]).unsqueeze(-1)
    rollouts = Rollouts(
        prompt=prompts.prompt[:1],
        problem=prompts.problem[:1],
        response=rows([e.tokens for e in ended], torch.long),
        mask=mask,
        present=present.unsqueeze(0),
        turn=rows([e.turn for e in ended], torch.long),
        reward=rows([e.reward for e in ended], torch.float64),
        logp_sampler=torch.zeros(mask.shape),
        truncated=torch.zeros(mask.shape[:2], dtype=torch.bool),
        limit=space.limit,
        temperature=temperature,
    )
    return rollouts, torch.tensor([e.probability for e in ended], dtype=torch.float64)


class Episode(NamedTuple):
    """A conversation so far."""

    tokens: list[int]
    mask: list[bool]
    turn: list[int]
    reward: list[float]
    probability: float
    """Probability of the environment's outcomes in it."""
    state: Any
    over: bool = False

    def extend(self, turn: int, action: list[int], outcome: tuple[float, Any, Any]) -> "Episode":
        """Return the conversation after one more action and this outcome of the environment."""
        probability, state, step = outcome
        observation = [] if step.done else [int(token) for token in str(step.observation).split()]
        return Episode(
            self.tokens + action + observation,
            self.mask + [True] * len(action) + [False] * len(observation),
            self.turn + [turn] * len(action + observation),
            self.reward + [0.0] * (len(action) - 1) + [step.reward] + [0.0] * len(observation),
            self.probability * probability,
            state,
            step.done,
        )


def _outcomes(
    environment: Any, going: list[Episode], actions: list[list[int]]
) -> Iterator[tuple[int, Episode, Any, Any]]:
    """Yield all continuations of these conversations: turn index, conversation, action, outcome of the environment."""
    for episode in going:
        turn = episode.turn[-1] + 1 if episode.turn else 0
        for action in actions:
            for outcome in environment.outcomes(episode.state, " ".join(map(str, action))):
                yield turn, episode, action, outcome


def reward_table(task: EnumerableTask, prompt: Int[Tensor, "prompt position"]) -> Float[Tensor, "prompt response"]:
    """Return R(y) of every response to these prompts, NaN where the reward failed. It does not depend on a policy."""
    scores = task.score(enumerate_responses(task.space, prompt))
    return torch.where(scores.valid, scores.reward.sum(-1), torch.nan)


def probability(policy: Policy, rollouts: Rollouts) -> Float[Tensor, "prompt sample"]:
    """Return π(y) of whole responses at the rollouts' temperature; differentiable."""
    return action_logprobs(log_probs(policy, rollouts), rollouts).sum(-1).exp()


@torch.no_grad()
def expected_reward(
    policy: Policy,
    prompt: Int[Tensor, "prompt position"],
    reward: Float[Tensor, "prompt response"],
    temperature: float = 1.0,
) -> float:
    """Return E[R] = Σ_y π(y) R(y), the mean over these prompts, with R from `reward_table`; NaN if any R is NaN."""
    every = enumerate_responses(policy.space, prompt, temperature)
    return (probability(policy, every) * reward).sum().item() / len(prompt)


class ResponseTable:
    """Every response to one prompt under the policies of a training step, computed in float64.

    `policy` is trained; `old` gave logp_old (default: the same policy); `behavior_policy` sampled the responses
    (default: `old`); the KL is measured to `reference`; `value` has a critic's value of every state (default: the exact
    V); `problem` identifies the problem of the prompt in a multi-turn task. For a task with an environment, all
    conversations with all outcomes of the environment are enumerated. Gradients are with respect to the trainable
    parameters of `policy`, flattened.
    """

    def __init__(
        self,
        policy: Policy,
        prompt: Int[Tensor, "position"],
        task: EnumerableTask,
        temperature: float = 1.0,
        old: Policy | None = None,
        behavior_policy: Policy | None = None,
        reference: Policy | None = None,
        value: Float[Tensor, "response state"] | None = None,
        problem: int = 0,
    ):
        self.policy, self.task = _double(policy), task
        self.old = self.policy if old is None else _double(old)
        for p, trained in zip(self.old.parameters(), self.policy.parameters(), strict=True):
            p.requires_grad_(trained.requires_grad)
        self.behavior_policy = self.old if behavior_policy is None else _double(behavior_policy)
        self.reference = None if reference is None else _double(reference)
        if getattr(task, "make_environment", lambda: None)() is None:
            rollouts = enumerate_responses(policy.space, prompt.unsqueeze(0), temperature)
            self.environment_probability = torch.ones(rollouts.mask.shape[1], dtype=torch.float64)
        else:
            prompts = Prompts(prompt.unsqueeze(0), torch.tensor([problem]))
            rollouts, self.environment_probability = enumerate_episodes(task, prompts, temperature)
        with torch.no_grad():
            logp_sampler = action_logprobs(log_probs(self.behavior_policy, rollouts), rollouts)
            logp_old = action_logprobs(log_probs(self.old, rollouts), rollouts)
        scores = _scored(task, rollouts)
        self.batch = to_batch(
            rollouts,
            logp_sampler=logp_sampler,
            reward=total_reward(rollouts, scores.reward).to(logp_old.dtype),
            valid=scores.valid,
            correct=scores.correct,
            logp_old=logp_old,
        )
        self._fields: dict[str, Tensor] = {} if value is None else {"value": value.unsqueeze(0)}
        self._jacobians: dict[str, Tensor] = {}
        self._learners: dict[tuple[bool, frozenset[str]], SmallLearner] = {}

    @property
    def probability(self) -> Float[Tensor, "response"]:
        """p(y) under the behavior policy, times the probability of the environment's outcomes."""
        return self.batch.logp_sampler.sum(-1).exp()[0] * self.environment_probability

    @cached_property
    def expected_reward(self) -> float:
        """E[R] under the trained policy."""
        return float(self._expected().detach())

    @cached_property
    def gradient(self) -> Float[Tensor, "parameter"]:
        """∇E[R], by differentiating the sum."""
        return self.differentiate(self._expected())

    def _expected(self) -> Float[Tensor, ""]:
        return (probability(self.policy, self.batch) * self.environment_probability * self.batch.reward.sum(-1)).sum()

    @cached_property
    def exact_value(self) -> Float[Tensor, "response state"]:
        """V(s_t) = E[Σ_{u ≥ t} r_u | the first t tokens] under the behavior policy; 0 after the end."""
        mask, p = self.batch.mask[0], self.probability
        reward = per_token_reward(self.batch, self.batch.reward)
        to_go = torch.nn.functional.pad(reward_to_go(reward)[0], (0, 1))
        tokens = torch.where(self.batch.present[0], self.batch.response[0], NO_END_TOKEN)
        values = []
        for t in range(mask.shape[-1] + 1):
            _, which = tokens[:, :t].unique(dim=0, return_inverse=True) if t else (None, torch.zeros(len(p)).long())
            share = torch.zeros_like(p).index_add_(0, which, p)
            total = torch.zeros_like(p).index_add_(0, which, p * to_go[:, t])
            values.append((total / share.clamp(min=torch.finfo(p.dtype).tiny))[which])
        return torch.stack(values, -1)

    def differentiate(self, value: Float[Tensor, ""]) -> Float[Tensor, "parameter"]:
        """Return ∂value/∂θ, flattened."""
        return _flat(torch.autograd.grad(value, self._parameters, materialize_grads=True))[0]

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for p in self.policy.parameters() if p.requires_grad]

    def _learner(self, old: bool, outputs: frozenset[str] = frozenset()) -> SmallLearner:
        """Return a cached learner of the old or the trained policy, because creating an optimizer is slow."""
        if (old, outputs) not in self._learners:
            learner = SmallLearner(self.old if old else self.policy, Adam(), reference=False, outputs=outputs)
            learner.reference = self.reference
            self._learners[old, outputs] = learner
        return self._learners[old, outputs]

    def outputs(self, names: frozenset[str] = frozenset()) -> Outputs:
        """Run the training forward on all responses; the outputs in `names` get a gradient, like logp."""
        return self._learner(False, names).evaluate(self.batch)

    def jacobian(self, name: str) -> Float[Tensor, "response token parameter"]:
        """Return ∂/∂θ of every token's `logp` (its score), `entropy` or `kl_full`."""
        if name not in self._jacobians:
            size, parameters = self.batch.mask.numel(), sum(p.numel() for p in self._parameters)
            if size * parameters > MAX_JACOBIAN_SIZE:
                raise ConfigError(
                    f"the gradients of {size:,} tokens by {parameters:,} parameters are {size * parameters:,} numbers, "
                    f"but at most {MAX_JACOBIAN_SIZE:,} are allowed: use a smaller policy, vocabulary or length limit"
                )
            values: Tensor = getattr(self.outputs(frozenset({name})), name)
            parts = torch.arange(size).split(max(1, JACOBIAN_CHUNK // size))
            options = {"retain_graph": True, "is_grads_batched": True, "materialize_grads": True}
            rows = []
            for part in parts:
                one_hot = torch.nn.functional.one_hot(part, size).to(values.dtype).view(-1, *values.shape)
                rows.append(_flat(torch.autograd.grad(values, self._parameters, one_hot, **options), len(part)))
            self._jacobians[name] = torch.cat(rows).unflatten(0, values.shape[1:])
        return self._jacobians[name]

    def batch_with_fields(self, needs: frozenset[str]) -> Batch:
        """Return the batch with the fields that an algorithm needs, computed by the library's engine and learner."""
        if needs & {"logp_ref", "kl_full"} and self.reference is None:
            raise ConfigError(
                "the algorithm needs a reference policy, but the table has none: pass ResponseTable(reference=...)"
            )
        missing = needs.difference(self._fields)
        if "reward_greedy" in missing:
            engine = SmallPolicyEngine(self.behavior_policy, self.batch.temperature, torch.Generator())
            reward = _scored(self.task, engine.generate(Prompts.of(self.batch.prompt), 1, greedy=True)).reward
            self._fields["reward_greedy"] = reward.sum(-1, keepdim=True).to(self.batch.reward.dtype)
        if "value" in missing:
            self._fields["value"] = self.exact_value.unsqueeze(0)
        self._fields |= self._learner(True).score(self.batch, missing)
        unknown = sorted(needs.difference(self._fields))
        if unknown:
            raise ConfigError(f"the algorithm needs {', '.join(unknown)}, which the exact oracle cannot compute")
        return self.batch.add(**{name: self._fields[name] for name in needs})


def _scored(task: EnumerableTask, rollouts: Rollouts) -> Scores:
    scores = task.score(rollouts)
    if not bool(scores.valid.all()):
        raise ConfigError(
            f"the exact gradient is a sum over all responses, but the reward failed on {int((~scores.valid).sum())} of "
            f"{scores.valid.numel()}; the first: {' '.join(scores.errors[:1])}. Fix the reward"
        )
    return scores


def _double(policy: Policy) -> Policy:
    return copy.deepcopy(policy).double()


def _flat(gradients: tuple[Tensor, ...], rows: int = 1) -> Float[Tensor, "row parameter"]:
    return torch.cat([g.reshape(rows, -1) for g in gradients], 1)
