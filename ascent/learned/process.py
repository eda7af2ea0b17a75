"""A learned process reward: a run of `ascent process-reward`, loaded, and bound to the task that names it.

    process:RUN         what each step adds: its score less that of the step before it. The sum is the last score,
                        so that a response earns nothing by having more steps
    process-score:RUN   the score of each step itself

A step's reward lies on its last token. With --reward own 0.5*process:RUN the other rewards lie on the last token of
the response; sort has them joined by +: --reward positions+0.5*process:RUN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.config import Config
from ascent.engines.stepwise import score_steps as score_small
from ascent.policies import CausalLM, LanguageModel
from ascent.policies.base import ValueFunction
from ascent.records import Run, checkpoint
from ascent.tasks import sorting
from ascent.tasks.text.base import Message, Text
from ascent.tasks.text.stepped import pieces_of
from ascent.tasks.text.tokenized import Tokenized, padded
from ascent.types import Batch, Metrics, Outputs, Refused, Rollouts, Scores, Terms, to_batch

PerToken = Float[Tensor, "prompt sample token"]
KINDS = ("process", "process-score")
BATCH = 16


class Step(NamedTuple):
    """A step of a response: its words, and the place of its last token."""

    text: str
    last: int


def cut(pieces: list[str], separator: str) -> list[Step]:
    """A response, given its tokens as words, cut after every separator; empty steps go to the one beside them.

    The last step ends with the last token, whatever that is. A response without any words is one empty step.
    """
    text, ends = "", []
    for piece in pieces:
        text += piece
        ends.append(len(text))
    steps: list[Step] = []
    start = 0
    while start < len(text):
        found = text.find(separator, start)
        stop = len(text) if found < 0 else found + len(separator)
        words = text[start : len(text) if found < 0 else found]
        last = next(i for i, end in enumerate(ends) if end >= stop)
        if words:
            steps.append(Step(words, last))
        elif steps:
            steps[-1] = Step(steps[-1].text, last)
        start = stop
    if not steps:
        return [Step("", len(pieces) - 1)] if pieces else []
    return [*steps[:-1], Step(steps[-1].text, len(pieces) - 1)]


# ---- models -----------------------------------------------------------------------------------------


class SmallProcess:
    """A process reward of a small world, where every token is a step."""

    def __init__(self, model: ValueFunction, config: Config):
        self.model, self.config = model.eval().requires_grad_(False), config

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> PerToken:
        return torch.where(rollouts.mask, score_small(self.model, rollouts), 0.0)


Asked = tuple[list[Message], list[str], bool]
"""A chat, the steps of a response to it, and whether it has ended."""


class WordProcess:
    """A process reward of language: chats and steps in, a number for each step, so many responses at a time."""

    def __init__(self, lm: LanguageModel, config: Config, batch: int = BATCH):
        self.lm, self.config, self.batch = lm, config, batch
        self.separator: str = config.task.separator

    @torch.no_grad()
    def rate(self, asked: Sequence[Asked]) -> list[list[float]]:
        """Tokenised as in its own training: it need not share the policy's tokens."""
        from ascent.engines.language.attention import ours
        from ascent.engines.language.demonstrator import shown
        from ascent.engines.language.stepwise import score_steps, words_to_ids

        found: list[list[float]] = []
        for start in range(0, len(asked), self.batch):
            part = asked[start : start + self.batch]
            pieces = [
                pieces_of(
                    lambda words: words_to_ids(self.lm, words), steps, self.separator, self.lm.end if ended else None
                )
                for _, steps, ended in part
            ]
            groups = [[([token for piece in made for token in piece], False)] for made in pieces]
            rollouts = shown(padded([self.lm.encode(chat) for chat, _, _ in part]), groups, self.config.task.max_tokens)
            with ours(self.lm.model) if self.lm.shares else nullcontext():
                scores = score_steps(self.lm, rollouts).cpu()
            for row, made in zip(scores[:, 0], pieces, strict=True):
                ends = torch.tensor([len(piece) for piece in made]).cumsum(0)
                found.append(torch.where(ends > 0, row[(ends - 1).clamp(min=0)], 0.0).tolist())
        return found


def load_process(run: str | Path, device: str | None = None, batch: int = BATCH) -> SmallProcess | WordProcess:
    """The process reward of a run: of its best held-out evaluation where that was kept, else its newest."""
    from ascent.learned.rewards import _best, reward_model

    found = Run(run)
    config = found.config
    if getattr(config.algorithm.loss, "trains", "") != "steps":
        raise Refused(f"{run} trained no process reward; `ascent process-reward` does")
    if isinstance(config.policy, CausalLM) and device is not None:
        config = replace(config, policy=replace(config.policy, device=device))
    given = checkpoint.params(_best(found))
    if not isinstance(config.policy, CausalLM):
        model = reward_model(config, torch.Generator())
        model.load_state_dict(given)
        return SmallProcess(model, config)
    from ascent.engines.language import load_params, prove
    from ascent.engines.language.stepwise import add_step_head

    lm = add_step_head(config.policy.load(config.seed))
    load_params(lm.trained(), given)
    lm.model.requires_grad_(False)
    prove(lm, config.task.max_prompt + config.task.max_tokens)
    lm.shares &= config.policy.share_prompts
    return WordProcess(lm, config, batch)


# ---- bound to a task ----------------------------------------------------------------------------------


def gains(score: PerToken, where: Tensor) -> PerToken:
    """What each step adds to the score before it; the first adds all of its own. `where`: the last tokens of steps."""
    total, found = torch.zeros_like(score[..., 0]), []
    for value, here in zip(score.unbind(-1), where.unbind(-1), strict=True):
        found.append(torch.where(here, value - total, 0.0))
        total = torch.where(here, value, total)
    return torch.stack(found, -1)


class Part(NamedTuple):
    """One process reward among a task's rewards."""

    name: str
    kind: str
    weight: float
    model: SmallProcess | WordProcess


def laid_on(base: Scores, rollouts: Rollouts, parts: Sequence[tuple[Part, PerToken, Tensor]]) -> Scores:
    """Scores with process rewards added to them, each given by its scores and by where steps end."""
    reward = base.reward
    if reward.shape[-1] == 1:
        last = (rollouts.mask.cumsum(-1) == rollouts.mask.sum(-1, keepdim=True)) & rollouts.mask
        reward = torch.where(last, reward, 0.0)
    measures = dict(base.measures)
    for part, score, where in parts:
        earned = gains(score, where) if part.kind == "process" else torch.where(where, score, 0.0)
        reward = reward + part.weight * earned
        measures[f"rewards/{part.name}"] = earned.sum(-1)
    return replace(base, reward=reward, measures=measures)


class SteppedNumbers:
    """A small world rewarded step by step, beside one of its own rewards if wanted. Positions right are measured."""

    def __init__(self, task: Any, own: str, part: Part):
        self.task, self.own, self.part = task, own, part
        if part.model.config.task.space != task.space:
            raise Refused(f"--reward {task.reward}: it scores other prompts and responses than this task has")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def score(self, rollouts: Rollouts) -> Scores:
        base = sorting.score(self.own or "positions", rollouts, self.task.space)
        right = sorting.positions_right(rollouts.prompt, sorting.numbers(rollouts, self.task.space))
        reward = base.reward if self.own else torch.zeros_like(base.reward)
        base = replace(base, reward=reward, measures={"positions": right})
        return laid_on(base, rollouts, [(self.part, self.part.model(rollouts), rollouts.mask)])  # type: ignore[operator]


class SteppedWords(Tokenized):
    """A task in words some of whose rewards come step by step. What else it rewards lies on the last token."""

    parts: Sequence[Part] = ()

    def score(self, rollouts: Rollouts) -> Scores:
        parts = [(part, *self._scores(part.model, rollouts)) for part in self.parts]
        return laid_on(super().score(rollouts), rollouts, parts)

    def _scores(self, model: Any, rollouts: Rollouts) -> tuple[PerToken, Tensor]:
        """The scores at the last tokens of steps, and where those are."""
        score, where = torch.zeros(rollouts.mask.shape), torch.zeros_like(rollouts.mask)
        asked: list[Asked] = []
        places: list[tuple[int, int, list[Step]]] = []
        for p, (ids, group, masks) in enumerate(
            zip(rollouts.prompt.tolist(), rollouts.response, rollouts.mask, strict=True)
        ):
            problem = self.problem(ids)
            assert problem is not None
            for s, (response, mask) in enumerate(zip(group, masks, strict=True)):
                pieces, ended = pieces_in(self, response[mask].tolist())
                steps = cut(pieces, model.separator)
                asked.append((self.task.messages(problem), [step.text for step in steps], ended))
                places.append((p, s, steps))
        for (p, s, steps), values in zip(places, model.rate(asked), strict=True):
            for step, value in zip(steps, values, strict=True):
                score[p, s, step.last], where[p, s, step.last] = value, True
        return score, where


def pieces_in(task: Tokenized, ids: list[int]) -> tuple[list[str], bool]:
    """The tokens of a response as words, an end token as none; and whether it has ended."""
    ended = bool(ids) and ids[-1] in task.encoder.ends
    piece = getattr(task.encoder, "piece", lambda token: task.encoder.decode([token]))
    words = [piece(token) for token in ids[: len(ids) - ended]]
    return [*words, *[""] * ended], ended


def stepped_words(task: Text, lm: LanguageModel, raters: Any) -> Tokenized:
    """The task bound to its model, with the process rewards that it names."""
    parts = []
    for entry in task.rewards:
        if entry.kind in KINDS:
            model = load_process(entry.source.partition(":")[2], task.reward_device, task.reward_batch)
            if not isinstance(model, WordProcess):
                raise Refused(f"--reward {entry.source}: that process reward is of the task sort, and reads no words")
            parts.append(Part(entry.name, entry.kind, entry.weight, model))
    if not parts:
        return Tokenized(task, lm, raters)
    made = SteppedWords(task, lm, raters)
    made.parts = parts
    return made


def stepped_numbers(task: Any) -> Any:
    """A small world with the process reward that it names; itself where it names none."""
    own, entry = sorting.process_part(getattr(task, "reward", ""))
    if entry is None:
        return task
    model = load_process(entry.source.partition(":")[2])
    if not isinstance(model, SmallProcess):
        raise Refused(f"--reward {task.reward}: that process reward reads words, and the task has none")
    return SteppedNumbers(task, own, Part(entry.name, entry.kind, entry.weight, model))


# ---- held out ---------------------------------------------------------------------------------------------


def steps_evaluator(learner: Any, rollouts: Rollouts, label: PerToken) -> Callable[[], Metrics]:
    """The mean squared error on held-out steps, and how much of the labels' variance the scores explain."""
    shape = rollouts.mask.shape[:2]
    batch = to_batch(rollouts, reward=label, valid=torch.ones(shape, dtype=torch.bool))

    def evaluate() -> Metrics:
        found: list[Tensor] = []

        def collect(micro: Batch, out: Outputs) -> Terms:
            assert out.rating is not None
            found.append((out.rating - micro.reward).cpu()[micro.mask.cpu()])
            return Terms(torch.zeros(()), {})

        learner.total(batch, collect)
        error = torch.cat(found).double().square().mean()
        spread = label[rollouts.mask].double().var(correction=0)
        metrics = {"eval/steps/error": float(error)}
        return metrics | ({"eval/steps/explained": float(1 - error / spread)} if spread > 0 else {})

    return evaluate
