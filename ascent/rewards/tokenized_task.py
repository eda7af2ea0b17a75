"""Text tasks bound to a tokenizer, for the training loop; with offline data, responses are read, not graded."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ascent.core.errors import ConfigError, RunError
from ascent.core.types import Prompts, Rollouts, Scores, Space
from ascent.rewards.reward_manager import RewardManager, StartedRewards
from ascent.tasks import scoring
from ascent.tasks.base import ReadablePrompt, TaskWrapper
from ascent.tasks.epochs import EpochSampler, StreamSampler
from ascent.tasks.text.answer_checking import lenient_answer, number_value, sole_number, strip_decoration
from ascent.tasks.text.python_rows import STREAM_BUFFER_SIZE
from ascent.tasks.text.text_task import Message, Problem, TextTask

PADDING = -1
"""Padding of prompts; not a token id."""
ROLES = frozenset({"user", "tool", "assistant", "model", "system", "ipython", "environment", "observation", "function"})
"""Names of roles in chat templates. After a control token they are not part of the message."""
_MAX_CACHED_PROBLEMS = 100_000
"""Size of the cache of problems, so that unlimited tasks do not generate them again for grading."""
_MAX_COUNTED_PROMPTS = 10_000
"""Maximum number of distinct prompts that are counted as left out; unlimited tasks may have any number."""
_MAX_DRAW_ROUNDS = 64
"""Rounds in which `draw` searches an unlimited task for prompts that are short enough."""


class Encoder(Protocol):
    """A policy's tokenizer and chat template."""

    vocab_size: int
    eos_token_id: int
    """The end token."""
    stop_token_ids: frozenset[int]
    """Every token that ends a response, the end token among them."""

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the prompt tokens of a chat, up to the beginning of the response."""

    def tokenize(self, words: str) -> list[int]:
        """Tokenize text without adding special tokens."""

    def tokenize_steps(self, steps: list[str], separator: str, ended: bool) -> list[list[int]]:
        """Tokenize each step with its separator separately; the end token is last if the response ended."""

    def decode(self, ids: list[int] | np.ndarray) -> str:
        """Decode tokens without special tokens."""

    def token_text(self, token: int) -> str:
        """Return the text of one token, including special tokens."""


class TokenizedTask(TaskWrapper):
    """A `TextTask` whose prompts and responses are tokens. Prompts are padded on the right with −1.

    `draw` depends only on the generator; the prompts of a step depend only on the seed and the step. `graders` are the
    loaded judges, reward models and process rewards of the task, by source.
    """

    def __init__(self, task: TextTask, encoder: Encoder, graders: Mapping[str, Any] | None = None):
        self.task, self.encoder, self.graders = task, encoder, graders or {}
        self.space = Space(task.max_prompt, encoder.vocab_size, task.max_response_tokens, encoder.eos_token_id)
        self.stop_token_ids, self.token_text = encoder.stop_token_ids, encoder.token_text
        self.reward_sources = task.rewards
        """The rewards, which are measured separately, with their weights."""
        self.train = lru_cache(_MAX_CACHED_PROBLEMS)(task.train)
        self.test_problems: list[Problem] = []
        """The held-out problems that were requested so far."""
        self.encoded_prompts: dict[int, list[int] | None] = {}
        """Prompt tokens by row, for tasks with rows; None: left out."""
        self.too_long: set[int] = set()
        self.empty: set[int] = set()
        """Hashes of the prompts without tokens."""
        self.first_observation: Callable[[Problem], str] | None = None
        """Returns the first observation of an environment for a problem; None: there is no environment."""
        self.grading: RewardManager | None = None
        self.early: dict[tuple[int, str], list[StartedRewards]] = {}
        """Rewards that `score_early` started, by problem and response. Equal responses are interchangeable."""

    @cached_property
    def epoch_sampler(self) -> EpochSampler | StreamSampler | None:
        size = self.task.size
        if self.task.is_stream:
            return StreamSampler(lambda row: self._training_prompt(row) is not None)
        return None if size is None else EpochSampler(size, lambda row: self._training_prompt(row) is not None)

    def step_prompts(self, step: int, count: int, seed: int, generator: torch.Generator) -> Prompts:
        if self.epoch_sampler is None:
            return self.draw(count, generator)
        rows, epoch = self.epoch_sampler.rows(step, count, seed)
        if not rows:
            raise self._too_few(0, count)
        return replace(self._prompts([(row, self._training_prompt(row) or []) for row in rows]), epoch=epoch)

    def draw(self, count: int, generator: torch.Generator) -> Prompts:
        """Return random training prompts, without repeats if there are enough."""
        size = self.task.size
        rows: list[tuple[int, list[int]]] = []
        for _ in range(_MAX_DRAW_ROUNDS if size is None else max(_MAX_DRAW_ROUNDS, count)):
            before = len(rows)
            if size is None:
                indices = torch.randint(*self._index_range(count), (count,), generator=generator)
            else:
                indices = torch.randperm(size, generator=generator)
            for index in indices.tolist():
                ids = self._training_prompt(index)
                if ids is not None:
                    rows.append((index, ids))
                if len(rows) == count:
                    return self._prompts(rows)
            if len(rows) == before and size is not None:
                break
        raise self._too_few(len(rows), count)

    def _index_range(self, count: int) -> tuple[int, int]:
        """Return the range of indices to draw from; in a stream, the rows that were read recently."""
        if not self.task.is_stream:
            return 0, 2**62
        read = max(getattr(self.epoch_sampler, "position", 0), 4 * count)
        return max(0, read - STREAM_BUFFER_SIZE), read

    def _too_few(self, drawn: int, count: int) -> ConfigError:
        usable = f"{drawn} of the drawn prompts are usable, but a step needs {count}"
        if not self.too_long:
            return ConfigError(f"{usable}: the others have no tokens. Check the prompts and the tokenizer")
        left_out = f"{len(self.too_long)} are longer" + (f", {len(self.empty)} have no tokens" if self.empty else "")
        return ConfigError(f"--max-prompt {self.task.max_prompt}: {usable}; {left_out}. Raise --max-prompt")

    def _training_prompt(self, index: int) -> list[int] | None:
        """Return the prompt tokens of a problem; None if there are too many, or none."""
        if self.task.size is None:
            return self._encode(self.train(index))
        if index not in self.encoded_prompts:
            self.encoded_prompts[index] = self._encode(self.train(index))
        return self.encoded_prompts[index]

    def held_out(self, count: int) -> Prompts:
        problems = list(self.task.test(count))
        if len(problems) > len(self.test_problems):
            self.test_problems = problems
        rows = [(-1 - i, ids) for i, problem in enumerate(problems) if (ids := self._encode(problem)) is not None]
        if not rows:
            if not any(self.encoder.encode(self.task.messages(problem)) for problem in problems):
                raise ConfigError("the test prompts have no tokens: check the prompts and the tokenizer")
            raise ConfigError(f"--max-prompt {self.task.max_prompt}: all test prompts are longer. Raise --max-prompt")
        return self._prompts(rows)

    def _prompts(self, rows: list[tuple[int, list[int]]]) -> Prompts:
        identities = [identity for identity, _ in rows]
        limits = torch.tensor([self.task.token_limit(self.problem(identity)) for identity in identities])
        return Prompts(pad_prompts([ids for _, ids in rows]), torch.tensor(identities), limits=limits)

    def problem(self, identity: int) -> Problem:
        """Return the training problem with this index, or the held-out problem i for −1 − i."""
        if identity >= 0:
            return self.train(identity)
        if len(self.test_problems) < -identity:
            self.test_problems = self.task.test(-identity)
        return self.test_problems[-1 - identity]

    def messages(self, problem: Problem) -> list[Message]:
        """Return the chat that the policy reads, including the first observation of an environment."""
        return self._with_first_observation(self.task.messages(problem), problem)

    def _with_first_observation(self, chat: list[Message], problem: Problem) -> list[Message]:
        if self.first_observation is not None and (words := self.first_observation(problem)):
            chat[-1] = {**chat[-1], "content": "\n\n".join(filter(None, [chat[-1]["content"], words]))}
        return chat

    def _encode(self, problem: Problem) -> list[int] | None:
        ids = self.encoder.encode(self.messages(problem))
        if 0 < len(ids) <= self.task.max_prompt:
            return ids
        left_out = self.too_long if ids else self.empty
        if len(left_out) < _MAX_COUNTED_PROMPTS:
            left_out.add(hash(str(problem.prompt)))
        return None

    def score_early(self, problems: list[int], responses: list[list[int]]) -> None:
        """Start the rewards of responses to the problems with these identities, before `score` is called."""
        self.grading = self.grading or RewardManager(self.task, self.graders)
        if len(self.early) > _MAX_CACHED_PROBLEMS:  # `score` was not called for them
            self.early.clear()
        words = [self.response_text(np.asarray(ids)) for ids in responses]
        pairs = [(self.problem(identity), text) for identity, text in zip(problems, words, strict=True)]
        for identity, text, begun in zip(problems, words, self.grading.start(pairs), strict=True):
            self.early.setdefault((identity, text), []).append(begun)

    def _take_started(
        self, rollouts: Rollouts, responses: list[tuple[Problem, str]]
    ) -> list[StartedRewards | None] | None:
        """Return the started rewards of each response; None: `score_early` started none."""
        if not self.early or rollouts.problem is None:
            return None
        identities = rollouts.problem.repeat_interleave(rollouts.mask.shape[1]).tolist()
        keys = [(identity, words) for identity, (_, words) in zip(identities, responses, strict=True)]
        begun = [self.early[key].pop() if self.early.get(key) else None for key in keys]
        for key in set(keys) & self.early.keys():
            if not self.early[key]:
                del self.early[key]
        return begun

    def score(self, rollouts: Rollouts) -> Scores:
        shape = rollouts.mask.shape[:2]
        self.grading = self.grading or RewardManager(self.task, self.graders)
        responses = self._responses(rollouts)
        marks = self.grading(responses, self._take_started(rollouts, responses))

        def grid(values: Sequence[Any], kind: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=kind).view(shape)

        notes = np.empty(len(marks), dtype=object)
        notes[:] = [mark.error or mark.reason for mark in marks]
        measures = {"lenient": grid([mark.lenient for mark in marks])}
        if len(self.task.rewards) > 1:
            names = [reward.name for reward in self.task.rewards]
            measures |= {f"rewards/{name}": grid([mark.parts.get(name, math.nan) for mark in marks]) for name in names}
        scores = Scores(
            reward=grid([mark.value for mark in marks]).unsqueeze(-1),
            valid=grid([mark.error is None for mark in marks], torch.bool),
            correct=grid([mark.strict for mark in marks], torch.bool),
            errors=tuple(mark.error for mark in marks if mark.error is not None),
            measures=measures,
            notes=notes.reshape(tuple(shape)),
        )
        process = [reward for reward in self.task.rewards if reward.kind in scoring.PROCESS_KINDS]
        parts = [(reward, *self._step_scores(self.graders[reward.source], rollouts)) for reward in process]
        return scoring.add_process_rewards(scores, rollouts, parts)

    def _step_scores(self, model: Any, rollouts: Rollouts) -> tuple[scoring.PerToken, Tensor]:
        """Return the scores of a process reward at the last tokens of steps, and the mask of these tokens.

        Each turn of a conversation is rated after the preceding chat, in which observations are user messages.
        """
        score, ends = torch.zeros(rollouts.mask.shape), torch.zeros_like(rollouts.mask)
        responses: list[tuple[list[Message], list[str], bool]] = []
        places: list[tuple[int, int, Tensor]] = []
        for p, (group, masks) in enumerate(zip(rollouts.response, rollouts.mask, strict=True)):
            chat = self.readable_prompt(rollouts, p).messages
            for s, (response, mask) in enumerate(zip(group, masks, strict=True)):
                before, is_drawn = list(chat), mask.tolist().__getitem__
                for drawn, run in groupby(rollouts.present[p, s].nonzero().flatten().tolist(), is_drawn):
                    tokens = torch.tensor(list(run))
                    ids = response[tokens].tolist()
                    if drawn:
                        steps, last = self.split_steps(ids, model.separator)
                        responses.append((before, steps, ids[-1] in self.stop_token_ids))
                        places.append((p, s, tokens[last]))
                        before = [*before, {"role": "assistant", "content": self.response_text(ids)}]
                    elif len(before) > len(chat):  # the rest of a prompt comes before the first turn
                        before = [*before, {"role": "user", "content": self._observation(ids)}]
        for (p, s, tokens), values in zip(places, model.rate(responses), strict=True):
            score[p, s, tokens], ends[p, s, tokens] = torch.tensor(values), True
        return score, ends

    def _observation(self, ids: list[int]) -> str:
        """Return the text of an observation, without control tokens."""
        runs = groupby(ids, key=lambda token: bool(self.encoder.decode([token])))
        return observed_words([self.encoder.decode(list(run)) if words else "" for words, run in runs])

    def _responses(self, rollouts: Rollouts) -> list[tuple[Problem, str]]:
        """Return the text of every response, with its problem. In conversations it is that of the last turn."""
        if rollouts.problem is None:
            raise RunError("these rollouts have no problem indices, so they cannot be graded")
        pairs, answer = [], rollouts.mask
        if rollouts.turn is not None:  # of a conversation the last turn is graded
            last = torch.where(rollouts.mask, rollouts.turn, -1).amax(-1, keepdim=True)
            answer = rollouts.mask & (rollouts.turn == last)
        for identity, group, masks in zip(
            rollouts.problem.tolist(), rollouts.response.numpy(), answer.numpy(), strict=True
        ):
            problem = self.problem(identity)
            pairs += [(problem, self.response_text(tokens[mask])) for tokens, mask in zip(group, masks, strict=True)]
        return pairs

    def response_text(self, ids: list[int] | np.ndarray) -> str:
        """Return the text of a response, without the token that ended it."""
        return self.encoder.decode(ids[:-1] if len(ids) and int(ids[-1]) in self.stop_token_ids else ids)

    response_record = response_text

    def text(self, ids: list[int]) -> str:
        return self.encoder.decode([i for i in ids if i != PADDING])

    def readable_prompt(self, prompts: Prompts | Rollouts, index: int) -> ReadablePrompt:
        assert prompts.problem is not None, "prompts of a text task carry the identity of their problems"
        problem = self.problem(int(prompts.problem[index]))
        chat = self.messages(problem)
        return ReadablePrompt(_words(chat), chat if len(chat) > 1 else chat[0]["content"], chat, problem.answer)

    def normalize_answer(self, response: str, answer: str | None) -> str:
        """Extract the answer of a response in a normal form: numbers by value, text without case, markup and spacing.

        The task's method `answer(response)` extracts it if defined; otherwise it is extracted as for the lenient score.
        """
        hook = getattr(self.task, "answer", None)
        given = lenient_answer(response, answer) if hook is None else hook(response) or ""
        value = number_value(sole_number(given))
        return str(value) if value is not None else " ".join(strip_decoration(given).casefold().split())

    def encode_prompts(self, texts: Sequence[str], plain: bool) -> tuple[Prompts, list[str]]:
        """Encode prompts that a user typed, as in training. Their responses cannot be scored."""
        task = replace(self.task, instruction="") if plain else self.task
        chats = [self._with_first_observation(task.messages(Problem(text)), Problem(text)) for text in texts]
        return Prompts.of(pad_prompts([self.encoder.encode(chat) for chat in chats])), [_words(chat) for chat in chats]

    def split_steps(self, ids: list[int], separator: str) -> tuple[list[str], list[int]]:
        """Split a response into steps; the token that ends it has no text."""
        ended = bool(ids) and ids[-1] in self.stop_token_ids
        pieces = [self.token_text(token) for token in ids[: len(ids) - ended]]
        return split_steps([*pieces, *[""] * ended], separator)

    def data_notes(self) -> list[str]:
        left_out = {f"more than {self.task.max_prompt} tokens": self.too_long, "no tokens": self.empty}
        counts = {
            what: f"{len(them)}{' or more' * (len(them) >= _MAX_COUNTED_PROMPTS)}"
            for what, them in left_out.items()
            if them
        }
        notes = [f"{count} prompts drawn so far have {what} and are left out" for what, count in counts.items()]
        return [*self.task.data_notes(), *notes]

    def close(self) -> None:
        self.early.clear()
        if self.grading is not None:
            self.grading.close()
            self.grading = None


class OfflineTextTask(TokenizedTask):
    """A text task with offline data: demonstrations, preference pairs or labeled steps."""

    def __init__(self, task: TextTask, encoder: Encoder, data: str):
        super().__init__(task, encoder)
        self.data = data

    def offline_rollouts(self, prompts: Prompts) -> Rollouts:
        """Return the tokenized responses of the data set to these prompts."""
        groups = [self._tokens(self.problem(identity)) for identity in prompts.problem.tolist()]
        limit = self.space.limit
        response, mask = scoring.pad_responses([[ids[:limit] for ids in group] for group in groups])
        cut = torch.tensor([[len(ids) > limit for ids in group] for group in groups])
        return scoring.offline_rollouts(prompts, response, mask, self.space, None if self.data == "steps" else cut)

    def _tokens(self, problem: Problem) -> list[list[int]]:
        """Tokenize the responses to a problem, each with the end token."""
        if self.data == "steps":
            return [[token for step in self._steps(problem) for token in step]]
        responses = [self.task.gold(problem)]
        if self.data == "pairs":
            responses = [problem.answer or "", problem.columns["rejected"]]
        if None in responses:
            raise ConfigError("--algorithm sft: the task has no gold responses to learn. Use ascent sft FILE")
        return [[*self.encoder.tokenize(words), self.encoder.eos_token_id] for words in responses]

    def _steps(self, problem: Problem) -> list[list[int]]:
        """Tokenize each step with its separator separately, so that each token belongs to one step."""
        columns = problem.columns
        return self.encoder.tokenize_steps(columns["steps"], self.task.separator, not columns["cut"])

    def score(self, rollouts: Rollouts) -> Scores:
        """Score offline data; every token of a labeled step has the step's label as its reward."""
        scores = scoring.offline_scores(rollouts, self.data == "pairs")
        if self.data != "steps":
            return scores
        assert rollouts.problem is not None
        reward = torch.zeros(rollouts.mask.shape)
        for row, identity in enumerate(rollouts.problem.tolist()):
            problem, tokens = self.problem(identity), rollouts.mask[row, 0]
            steps = zip(self._steps(problem), problem.columns["labels"], strict=True)
            labels = torch.tensor([label for step, label in steps for _ in step])
            reward[row, 0, tokens] = labels[: int(tokens.sum())]
        return replace(scores, reward=reward)


def pad_prompts(rows: list[list[int]]) -> Int[Tensor, "prompt position"]:
    """Pad prompts on the right with −1."""
    width = max(map(len, rows))
    return torch.tensor([row + [PADDING] * (width - len(row)) for row in rows])


def _words(chat: list[Message]) -> str:
    return "\n\n".join(message["content"] for message in chat)


def observed_words(pieces: Sequence[str]) -> str:
    """Return the text of an observation without the markup of the chat template.

    Control tokens have no text. The text between two of them may begin with a line that names the role.
    """
    parts: list[str] = [""]
    for piece in pieces:
        if piece:
            parts[-1] += piece
        elif parts[-1]:
            parts.append("")
    if len(parts) > 1:
        for i, part in enumerate(parts):
            first, _, rest = part.lstrip().partition("\n")
            parts[i] = rest if first.strip() in ROLES else part
    return "".join(parts).strip() or "".join(pieces).strip()


def split_steps(pieces: list[str], separator: str) -> tuple[list[str], list[int]]:
    """Split a response, given the text of its tokens, into steps; also return the indices of their last tokens.

    It is split after every separator; empty steps are merged with a neighbor. The last step ends with the last token. A
    response without text is one empty step.
    """
    text, ends = "".join(pieces), list(accumulate(map(len, pieces)))
    steps: list[str] = []
    last: list[int] = []
    start = 0
    while start < len(text):
        at = text.find(separator, start)
        stop, following = (len(text), len(text)) if at < 0 else (at, at + len(separator))
        token = bisect_left(ends, following)
        if stop > start:
            steps.append(text[start:stop])
            last.append(token)
        elif steps:
            last[-1] = token
        start = following
    if not steps:
        return ([""], [len(pieces) - 1]) if pieces else ([], [])
    return steps, [*last[:-1], len(pieces) - 1]
