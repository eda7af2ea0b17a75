"""Reward models and process rewards on the backbone of a language model.

A reward model scores the state after the last token of a response, a process reward the state after each action.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ascent.build.backend import LearnedReward
from ascent.build.model_verification import verify_model
from ascent.core.config import Config
from ascent.core.types import Rollouts
from ascent.models.causal_lm import LanguageModel
from ascent.models.packed_attention import packed_attention_enabled, to_device_async
from ascent.training.packing import ForwardModule, States, last_states, scatter_tokens, states_after_actions

HEAD = "rating"
"""The head's name in the model and in checkpoints."""
Chat = list[dict[str, str]]


def add_head(lm: LanguageModel, bias: bool = False) -> LanguageModel:
    """Add a rating head, initialized to 0, and freeze the LM head; return the model.

    A reward model has no bias, because a constant in every reward cancels in a pair. A process reward has one.
    """
    weight = lm.model.get_output_embeddings().weight
    if weight is not lm.model.get_input_embeddings().weight:
        weight.requires_grad_(False)
    head = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(head.weight)
    if bias:
        head.bias = nn.Parameter(torch.zeros_like(head.weight[:, 0]))
    setattr(lm.model, HEAD, head)
    return lm


def response_scores(
    lm: LanguageModel, batch: Rollouts, forward: ForwardModule | None = None
) -> Float[Tensor, "prompt sample 1"]:
    """Return the score of the state after the last token of each response."""
    return _ratings(lm, batch, last_states(batch), forward).view(*batch.mask.shape[:2], 1)


def step_scores(
    lm: LanguageModel, batch: Rollouts, forward: ForwardModule | None = None
) -> Float[Tensor, "prompt sample token"]:
    """Return the score of the state after each action; 0 at other tokens."""
    states = states_after_actions(batch)
    return scatter_tokens(_ratings(lm, batch, states, forward), to_device_async(states, batch.mask.device))[..., 1:]


def _ratings(
    lm: LanguageModel, batch: Rollouts, states: States, forward: ForwardModule | None
) -> Float[Tensor, "asked"]:
    """Return the score of each of these states, in float32 or better. `forward`: a learner's forward module."""

    def read(_: object, hidden: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        head = getattr(lm.model, HEAD)
        bias = None if head.bias is None else head.bias.to(dtype)
        return functional.linear(hidden.to(dtype), head.weight.to(dtype), bias).squeeze(-1)

    return (forward or ForwardModule(lm))(batch, read, states)


class LanguageRewardModel(LearnedReward):
    """A reward model loaded from a run: call it with rollouts in its own tokens, or let it rate texts."""

    read = staticmethod(response_scores)

    def __init__(self, lm: LanguageModel, config: Config, batch: int):
        self.model, self.config, self.batch = lm, config, batch
        self.limit: int = config.task.max_tokens
        self.verified_length: int = config.task.max_prompt + config.task.max_tokens
        """The longest sequence for which the model was verified."""

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Float[Tensor, "prompt sample #token"]:
        with packed_attention_enabled(self.model.model, self.model.can_share_prompts):
            return self.read(self.model, rollouts).cpu()

    def rate(self, responses: Sequence[tuple[Chat | str, str]]) -> list[float]:
        """Return a score per (chat or prompt, response), tokenized as in the reward model's training."""
        chats = [[{"role": "user", "content": chat}] if isinstance(chat, str) else chat for chat, _ in responses]
        tokens = [[*self.model.tokenize(words), self.model.eos_token_id][: self.limit] for _, words in responses]
        return [float(score) for score in self._scores(chats, tokens)]

    def _scores(self, chats: list[Chat], responses: list[list[int]]) -> Iterator[Float[Tensor, "#token"]]:
        """Yield the scores of one response per chat, computed in batches."""
        for start in range(0, len(chats), self.batch):
            part = slice(start, start + self.batch)
            yield from self(self._rollouts(chats[part], responses[part]))[:, 0]

    def _rollouts(self, chats: list[Chat], responses: list[list[int]]) -> Rollouts:
        """Return rollouts without log-probs, because the responses were not sampled."""
        prompts = [self.model.encode(chat) for chat in chats]
        longest, width = max(map(len, prompts)), max(map(len, responses))
        if longest + width > self.verified_length:  # another task may have longer prompts than its own training
            self.verified_length = longest + width
            verify_model(self.model, self.verified_length, self.model.can_share_prompts, sampled=False)
        mask = torch.arange(width) < torch.tensor([[len(ids)] for ids in responses]).unsqueeze(-1)
        return Rollouts(
            prompt=torch.tensor([ids + [-1] * (longest - len(ids)) for ids in prompts]),
            response=torch.tensor([[ids + [0] * (width - len(ids))] for ids in responses]),
            mask=mask,
            logp_sampler=torch.zeros(mask.shape),
            limit=self.limit,
            truncated=torch.zeros(mask.shape[:2], dtype=torch.bool),
            sampled=False,
        )


class LanguageProcessReward(LanguageRewardModel):
    """A process reward loaded from a run: scores every step of a response."""

    read = staticmethod(step_scores)

    def __init__(self, lm: LanguageModel, config: Config, batch: int):
        super().__init__(lm, config, batch)
        self.separator: str = config.task.separator

    def rate(self, responses: Sequence[tuple[Chat, list[str], bool]]) -> list[list[float]]:  # type: ignore[override]
        """Return a score per step of each (chat, steps of a response, whether it has ended).

        Texts are tokenized as in its own training; its tokenizer may differ from the policy's.
        """
        pieces = [self.model.tokenize_steps(steps, self.separator, ended) for _, steps, ended in responses]
        tokens = [[token for step in steps for token in step] for steps in pieces]
        scores = []
        for row, steps in zip(self._scores([chat for chat, _, _ in responses], tokens), pieces, strict=True):
            ends = torch.tensor([len(step) for step in steps]).cumsum(0)
            scores.append(torch.where(ends > 0, row[(ends - 1).clamp(min=0)], 0.0).tolist())
        return scores
