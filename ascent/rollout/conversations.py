"""Playing: turns of a policy go to their environments as words, and come back as tokens.

An episode begins with the first turn that it is asked about, so that responses which wait for their turn to be sampled
hold no process. Answers are handed on in the order in which they come.
"""

import functools
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from ascent.core.errors import ConfigError
from ascent.core.types import Prompts, Rollouts, Scores
from ascent.environments.chat_templates import ChatTemplate, as_messages
from ascent.environments.episode_pool import EpisodePool, InProcessEpisodePool, Reply
from ascent.environments.episode_process import Source
from ascent.environments.tool_chat import ToolChat
from ascent.environments.tools import TOOL_COUNT_NAMES, Tools, load_tool, parse_tool_counts, prepare_tools, schemas_of
from ascent.processes.supervisor import Limits
from ascent.sandbox.sandboxed_reward import SandboxSettings
from ascent.tasks.base import BoundBase
from ascent.tasks.environment import Step
from ascent.tasks.python_objects import PREFIX, pickled
from ascent.tasks.text.text_task import TEXTARENA, Message, Problem

TRUNCATED_PREFIX, FAILED_PREFIX = "cut off at ", "failed: "
"""How notes begin: of a turn that its limit of tokens ended, and of one whose environment failed."""
TURN_LIMIT_PATTERN = re.compile(r"the limit of \d+ turns")
"""What the note on a response says that --max-turns truncated."""
GLANCE = 1.0
"""Seconds of one wait for environments; those that miss their own deadline answer with an error."""
OPENINGS = 10_000
"""Openings of environments that are remembered."""


class EnvironmentPool(Protocol):
    """Where environments run: in this process, or each in its own."""

    def begin(self, episode: int, problem: Problem, shared: int, own: int) -> None: ...
    def step(self, episode: int, action: str) -> None: ...
    def answers(self, wait: float) -> Sequence[Reply]: ...
    def end(self, episode: int) -> None: ...
    def close(self) -> None: ...


@dataclass
class ConversationFactory:
    """Everything that the episodes of a task share. Called, it begins those of some prompts."""

    pool: EnvironmentPool
    problem: Callable[[Any, int], Problem]
    """The problem at a place of a batch of prompts."""
    words: Callable[[list[int], list[int]], str]
    """A turn as its environment reads it, given the tokens before it: the prompt, or the latest observation."""
    tokens: Callable[[Step, list[int], list[Message]], list[int]]
    """What the policy is given of an answer to the turn with these tokens, behind these messages."""
    messages: Callable[[Problem], list[Message]] = lambda problem: [{"role": "user", "content": str(problem.prompt)}]
    """The messages of a prompt."""
    turn_tokens: int = 0
    ends: Collection[int] = ()
    """Tokens that end a turn; none: a turn always has as many tokens as it may."""
    max_turns: int = 0
    """The most turns of an episode; 0: as many as its environment wants."""
    pays: bool = True
    """Tools answer, and pay nothing."""
    numbered: int = 0
    """Episodes so far: each has a number of its own."""
    mail: list[Reply] = field(default_factory=list)
    """Replies that nobody has asked for yet: several calls may be under way."""
    unopened: dict[str, str] = field(default_factory=dict)
    """Problems that the environment could not begin with, and why: their prompts lack what it would have said."""
    opened: dict[str, str] = field(default_factory=dict)
    """What it said before the first turn, by problem."""

    def replies(self, episodes: range, wait: float) -> list[Reply]:
        """What was replied to these episodes; waits so long for the first reply, if there is none."""
        here = any(reply.episode in episodes for reply in self.mail)
        self.mail += self.pool.answers(0.0 if here else wait)
        theirs = [reply for reply in self.mail if reply.episode in episodes]
        self.mail = [reply for reply in self.mail if reply.episode not in episodes]
        return theirs

    def end(self, episodes: Iterable[int]) -> None:
        """These episodes are over: nothing of them is left."""
        gone = set(episodes)
        for episode in gone:
            self.pool.end(episode)
        self.mail = [reply for reply in self.mail if reply.episode not in gone]

    def opening(self, problem: Problem) -> str:
        """What the environment says before the first turn, to every response alike.

        Nothing, if it cannot begin with this problem: then all responses to it have failed, in this run for good.
        """
        if (known := self.opened.get(repr(problem))) is not None:
            return known
        episode = self.numbered
        self.numbered += 1
        self.pool.begin(episode, problem, problem_seed(problem), 0)
        while not (replies := self.replies(range(episode, episode + 1), GLANCE)):
            pass  # its own deadline is a reply too
        self.end([episode])
        if replies[0].step is None:
            why = f"its environment cannot begin with the problem {problem.prompt!r:.80}: {replies[0].error}"
            self.unopened.setdefault(repr(problem), why)
            return ""
        if len(self.opened) >= OPENINGS:
            self.opened.clear()
        return self.opened.setdefault(repr(problem), str(replies[0].step.observation))

    def __call__(
        self, prompts: Prompts, samples: int, seeds: list[int], problems: Sequence[Problem] | None = None
    ) -> "Conversations":
        """`problems`: those of the prompts, where the task does not know them."""
        first = self.numbered
        self.numbered += len(seeds)
        every = problems or [self.problem(prompts, place) for place in range(len(prompts))]
        return Conversations(self, every, prompts, seeds, first)

    def close(self) -> None:
        self.pool.close()


def problem_seed(problem: Problem) -> int:
    """The seed of what all responses to a problem have in common: the same in every run."""
    return int.from_bytes(hashlib.sha256(repr((problem.prompt, problem.answer)).encode()).digest()[:8])


class TurnReply(NamedTuple):
    """What follows a turn, in tokens (`engines.turns.Answer`)."""

    tokens: list[int]
    reward: float = 0.0
    error: str | None = None
    note: str = ""
    seconds: float = 0.0
    truncated: bool = False


class Conversations:
    """The episodes of one call of a sampler (`engines.turns.Episodes`)."""

    def __init__(
        self, player: ConversationFactory, problems: Sequence[Problem], prompts: Prompts, seeds: list[int], first: int
    ):
        self.player, self.problems, self.seeds, self.first = player, problems, seeds, first
        self.samples = len(seeds) // len(problems)
        self.episodes = range(first, first + len(seeds))
        self.turn_tokens, self.has_step_rewards = player.turn_tokens, player.pays
        self.turns: dict[int, int] = {}
        """Turns of each response that has begun."""
        self.latest: dict[int, list[int]] = {}
        """The turn that each response waits with."""
        self.before = [row[row >= 0].tolist() for row in prompts.prompt for _ in range(self.samples)]
        """The tokens before the latest turn of each response: its prompt, or what it was given last."""
        self.history: dict[int, list[Message]] = {}
        """All messages before the latest turn of each response that has had another."""
        self.beginning: set[int] = set()
        self.seconds: dict[int, float] = {}
        """How long the environment of each response has worked on its latest turn."""

    def submit_turn(self, response: int, turn: list[int]) -> None:
        self.latest[response] = turn
        if response in self.turns:
            return self._step(response)
        self.turns[response] = 0
        self.beginning.add(response)
        problem, episode = self.problems[response // self.samples], self.first + response
        if (why := self.player.unopened.get(repr(problem))) is not None:
            return self.player.mail.append(Reply(episode, None, why, 0.0))
        self.player.pool.begin(episode, problem, problem_seed(problem), self.seeds[response])

    def _step(self, response: int) -> None:
        words = self.player.words(self.latest[response], self.before[response])
        self.player.pool.step(self.first + response, words)

    def poll(self, wait: bool) -> list[tuple[int, TurnReply]]:
        arrived: list[tuple[int, TurnReply]] = []
        while not arrived:
            replies = self.player.replies(self.episodes, GLANCE if wait else 0.0)
            for reply in replies:
                response = reply.episode - self.first
                self.seconds[response] = self.seconds.get(response, 0.0) + reply.seconds
                if response in self.beginning and reply.error is None:
                    self.beginning.remove(response)
                    self._step(response)
                else:
                    arrived.append((response, self._answer(response, reply)))
            if not wait and not replies:
                break
        return arrived

    def _answer(self, response: int, reply: Reply) -> TurnReply:
        """An episode that failed, is over, or has had all its turns needs no process any more."""
        turn, most, step = self.latest.pop(response), self.player.max_turns, reply.step
        self.turns[response] += 1
        tokens, reward, error, note, cut = list[int](), 0.0, reply.error, "", False
        if step is not None:
            reward, more, limit = step.reward, not step.done, self.player.turn_tokens
            notes = [step.reason] if step.reason else []
            if self.player.ends and 0 < limit <= len(turn) and turn[-1] not in self.player.ends:
                notes.append(f"{TRUNCATED_PREFIX}{limit} tokens")
            if more and self.turns[response] == most:
                more, cut, notes = False, True, [*notes, f"the limit of {most} turns"]
            note = "; ".join(notes)
            try:
                tokens = self._observe(response, step, turn) if more else []
            except (ConfigError, ValueError) as refused:  # a template that does not take such messages
                error = f"its observation cannot be shown: {refused}"
            if more and not tokens and error is None:
                error = "its environment answered nothing, and was not over"
        if not tokens:
            self.player.end([reply.episode])
        name = f"turn {self.turns[response]}: "
        error = None if error is None else f"{name}{FAILED_PREFIX}{error}"
        return TurnReply(tokens, reward, error, f"{name}{note}" if note else "", self.seconds.pop(response), cut)

    def _observe(self, response: int, step: Step, turn: list[int]) -> list[int]:
        """The tokens of an observation, which goes to the history."""
        if response not in self.history:
            self.history[response] = list(self.player.messages(self.problems[response // self.samples]))
        tokens = self.before[response] = self.player.tokens(step, turn, self.history[response])
        self.history[response] += [{"role": "assistant", "content": ""}, *as_messages(step.observation)]
        return tokens

    def close(self) -> None:
        self.player.end([self.first + response for response in self.turns])


class ConversationTask(BoundBase):
    """A bound task whose prompts bring what answers the turns of their responses."""

    def __init__(self, task: Any, player: Any, words: bool):
        """`player`: from prompts to their episodes, as `Player`. `words`: its prompts are words, and not numbers."""
        self.task, self.player, self.in_words = task, player, words

    def draw(self, count: int, generator: Any) -> Prompts:
        return replace(self.task.draw(count, generator), start_episodes=self.player)

    def step_prompts(self, step: int, count: int, seed: int, generator: Any) -> Prompts:
        return replace(self.task.step_prompts(step, count, seed, generator), start_episodes=self.player)

    def held_out(self, count: int) -> Prompts:
        return replace(self.task.held_out(count), start_episodes=self.player)

    def read_prompts(self, typed: Sequence[str], plain: bool) -> tuple[Prompts, list[str]]:
        """Words that were typed are the whole problem."""
        prompts, words = self.task.read_prompts(typed, plain)
        problems = [Problem(text) for text in typed] if self.in_words else None
        return replace(prompts, start_episodes=functools.partial(self.player, problems=problems)), words

    def score(self, rollouts: Rollouts) -> Scores:
        """The task's own score, with the number of turns, and what was called in them.

        Where there is no answer to compare with, what earns the full point is right: a game that was won.
        """
        scores = self.task.score(rollouts)
        if rollouts.turn is None:
            return scores
        turns = torch.where(rollouts.mask, rollouts.turn + 1, 0).amax(-1).to(scores.reward.dtype)
        measures, correct = (
            {**scores.measures, "turns": turns, **count_tool_calls(rollouts.notes, turns)},
            scores.correct,
        )
        if self.in_words and rollouts.notes is not None and rollouts.environment_seconds is not None:
            measures |= {
                "turns/cut": count_truncated_turns(rollouts),
                "time/environment": rollouts.environment_seconds.sum(-1),
            }
        if self.in_words and correct is not None and rollouts.reward is not None:
            unanswered = [self.player.problem(rollouts, place).answer is None for place in range(len(rollouts.prompt))]
            earned = scores.reward.sum(-1) + rollouts.reward.sum(-1) > 1 - 1e-5
            correct = correct | (torch.tensor(unanswered).unsqueeze(-1) & earned)
            measures["lenient"] = torch.maximum(measures["lenient"], correct.to(turns.dtype))
        return replace(scores, measures=measures, correct=correct)

    def close(self) -> None:
        self.player.close()
        self.task.close()


def count_truncated_turns(rollouts: Rollouts) -> torch.Tensor:
    """Turns of each response that a limit of tokens cut off: those that notes name, and the last of a truncated one."""
    assert rollouts.notes is not None
    notes, last = list(rollouts.notes.flat), rollouts.truncated.flatten().tolist()
    cut = [
        note.count(TRUNCATED_PREFIX) + (end and not TURN_LIMIT_PATTERN.search(note))
        for note, end in zip(notes, last, strict=True)
    ]
    return torch.tensor(cut, dtype=torch.float32).view(rollouts.truncated.shape)


def count_tool_calls(notes: Any, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Calls of tools in each response, and those of them that went wrong, where its notes have such counts."""
    if notes is None:
        return {}
    counted = [Counter[str]() for _ in notes.flat]
    for counts, note in zip(counted, notes.flat, strict=True):
        for part in note.split("; "):
            counts.update(parse_tool_counts(part.partition(": ")[2]))
    names = [name for name in TOOL_COUNT_NAMES if any(name in counts for counts in counted)]
    return {f"tools/{name}": like.new_tensor([counts[name] for counts in counted]).view(like.shape) for name in names}


def bind_small_environment(task: Any) -> Any:
    """A bound small task with its environment, if it has one: actions and observations are numbers in words."""
    if task.episode() is None:
        return task
    player = ConversationFactory(
        InProcessEpisodePool(task.episode),
        task.problem,
        words=lambda turn, _: " ".join(map(str, turn)),
        tokens=lambda step, *_: [int(number) for number in str(step.observation).split()],
        turn_tokens=task.turn_tokens,
    )
    return ConversationTask(task, player, words=False)


def bind_text_environment(task: Any, model: Any, bind: Callable[[Any], Any]) -> Any:
    """A text task bound to a language model by `bind`, which takes an encoder; with its tools or its environment.

    Tools are in the prompt, so that it is the encoder's to write them there.
    """
    if not (task.tools or task.environment):
        return bind(model)
    limits = Limits(task.turn_seconds, task.reward_memory, task.reward_env)
    if task.tools:
        functions = [load_tool(source) for source in task.tools]
        chat = ToolChat(model.tokenizer, schemas_of(functions), model.ends)
        bound, template = bind(PromptEncoder(model, chat.render_prompt)), chat.template
        source = make_tools_source(task.tools, functions, chat, task.tool_sandbox)
    else:
        bound, template = bind(model), ChatTemplate(model.tokenizer, (), model.ends)
        source = make_environment_source(task.environment)

    def problem(prompts: Any, place: int) -> Problem:
        return bound.problem(int(prompts.problem[place]))

    player = ConversationFactory(
        EpisodePool(source, limits, task.turn_workers),
        problem,
        words=chat.decode_turn if task.tools else lambda turn, _: bound.words(turn),
        tokens=lambda step, turn, history: template.render_observation(turn, step.observation, history),
        messages=lambda problem: (
            chat.add_instruction(bound.messages(problem)) if task.tools else bound.messages(problem)
        ),
        turn_tokens=task.turn_tokens,
        ends=model.ends,
        max_turns=task.max_turns,
        pays=not task.tools,
    )
    if task.environment:
        bound.opening = player.opening
    return ConversationTask(bound, player, words=True)


class PromptEncoder:
    """A model's encoder, but for how it writes a prompt."""

    def __init__(self, encoder: Any, encode: Callable[[Sequence[Message]], list[int]]):
        self.encoder, self.encode = encoder, encode

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)


def make_tools_source(
    sources: Sequence[str], functions: Sequence[Any], chat: ToolChat, sandbox: SandboxSettings
) -> Source:
    """Where the processes of episodes find the tools: in their files, or sent with what they hold."""
    schemas, form = list(chat.schemas), chat.format.name
    if any(source.startswith(PREFIX) for source in sources):
        import cloudpickle

        made = functools.partial(Tools, functions, schemas, form, sandbox=tuple(sandbox))
        made.prepare = functools.partial(prepare_tools, list(sources), tuple(sandbox))  # type: ignore[attr-defined]
        return Source("", {}, cloudpickle.dumps(made))
    settings = {"sources": list(sources), "schemas": schemas, "form": form, "sandbox": tuple(sandbox)}
    return Source("ascent.environments.tools:make_tools", settings)


def make_environment_source(source: str) -> Source:
    """Where they find an environment: a game of textarena, or one of the user's own."""
    if source.startswith(TEXTARENA):
        return Source("ascent.environments.textarena_games:TextarenaGame", {"game": source.removeprefix(TEXTARENA)})
    return Source(source, {}, pickled(source, "environment") if source.startswith(PREFIX) else None)
