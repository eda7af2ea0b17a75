"""Conversations between a policy and its environments: turns are decoded to text, observations encoded to tokens.

An episode begins with its first turn, so that responses that have not been sampled yet hold no process. Replies are
returned in the order in which they arrive.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ascent.core.errors import ConfigError
from ascent.core.types import Prompts
from ascent.environments.chat_templates import as_messages
from ascent.environments.episode_pool import Reply
from ascent.tasks.environment import Step
from ascent.tasks.text.text_task import Message, Problem

TRUNCATED_PREFIX, FAILED_PREFIX = "cut off at ", "failed: "
"""Beginnings of notes: of a turn that reached its token limit, and of a turn whose environment failed."""
TURN_LIMIT_PATTERN = re.compile(r"the limit of \d+ turns")
"""Found in the note of a response that --max-turns truncated."""
POLL_SECONDS = 1.0
"""Maximum time of one wait for replies. An environment that misses its deadline replies with an error."""
MAX_CACHED_OPENINGS = 10_000


class EnvironmentPool(Protocol):
    """Runs environments: in this process, or each in its own process."""

    def begin(self, episode: int, problem: Problem, shared: int, own: int) -> None: ...
    def step(self, episode: int, action: str) -> None: ...
    def wait_for_replies(self, wait: float) -> Sequence[Reply]: ...
    def end(self, episode: int) -> None: ...
    def close(self) -> None: ...


@dataclass
class ConversationFactory:
    """Starts the conversations of a task's prompts, and holds what they share."""

    pool: EnvironmentPool
    problem: Callable[[Any, int], Problem]
    """Returns the problem at an index of a batch of prompts."""
    decode_turn: Callable[[list[int], list[int]], str]
    """Decodes a turn for the environment, given the tokens before it: the prompt, or the last observation."""
    render_observation: Callable[[Step, list[int], list[Message]], list[int]]
    """Encodes an environment's step, given the turn before it and the messages before the turn."""
    messages: Callable[[Problem], list[Message]] = lambda problem: [{"role": "user", "content": str(problem.prompt)}]
    """Returns the messages of a prompt."""
    turn_tokens: int = 0
    """Maximum number of tokens per turn; 0: no limit."""
    stop_ids: Collection[int] = ()
    """Tokens that end a turn; none: every turn has the maximum number of tokens."""
    max_turns: int = 0
    """Maximum number of turns of an episode; 0: the environment decides."""
    has_step_rewards: bool = True
    """Whether steps carry rewards. Those of tools do not."""
    num_episodes: int = 0
    """Episodes so far; the next one has this index."""
    unclaimed: list[Reply] = field(default_factory=list)
    """Replies to episodes of other calls: several calls may run at once."""
    failed_openings: dict[str, str] = field(default_factory=dict)
    """Errors of environments that could not begin, by problem. The prompts of these problems have no opening."""
    openings: dict[str, str] = field(default_factory=dict)
    """First observations, by problem."""

    def replies(self, episodes: range, wait: float) -> list[Reply]:
        """Return the replies to these episodes. If there are none, wait at most `wait` seconds for the first."""
        has_replies = any(reply.episode in episodes for reply in self.unclaimed)
        self.unclaimed += self.pool.wait_for_replies(0.0 if has_replies else wait)
        replies = [reply for reply in self.unclaimed if reply.episode in episodes]
        self.unclaimed = [reply for reply in self.unclaimed if reply.episode not in episodes]
        return replies

    def end(self, episodes: Iterable[int]) -> None:
        """End these episodes and discard their replies."""
        ended = set(episodes)
        for episode in ended:
            self.pool.end(episode)
        self.unclaimed = [reply for reply in self.unclaimed if reply.episode not in ended]

    def opening(self, problem: Problem) -> str:
        """Return the first observation, which is the same for all responses to a problem.

        It is empty if the environment cannot begin with this problem. All responses to it then fail, during the whole
        run.
        """
        if (opening := self.openings.get(repr(problem))) is not None:
            return opening
        episode = self.num_episodes
        self.num_episodes += 1
        self.pool.begin(episode, problem, problem_seed(problem), 0)
        while not (replies := self.replies(range(episode, episode + 1), POLL_SECONDS)):
            pass  # a missed deadline is a reply, too
        self.end([episode])
        if replies[0].step is None:
            error = f"its environment cannot begin with the problem {problem.prompt!r:.80}: {replies[0].error}"
            self.failed_openings.setdefault(repr(problem), error)
            return ""
        if len(self.openings) >= MAX_CACHED_OPENINGS:
            self.openings.clear()
        return self.openings.setdefault(repr(problem), str(replies[0].step.observation))

    def __call__(
        self, prompts: Prompts, samples: int, seeds: list[int], problems: Sequence[Problem] | None = None
    ) -> "Conversations":
        """Start conversations. `problems`: the problems of the prompts, if they are not those of the task."""
        first = self.num_episodes
        self.num_episodes += len(seeds)
        problems = problems or [self.problem(prompts, index) for index in range(len(prompts))]
        return Conversations(self, problems, prompts, seeds, first)

    def close(self) -> None:
        self.pool.close()


def problem_seed(problem: Problem) -> int:
    """Return the seed that all responses to a problem share, which is the same in every run."""
    return int.from_bytes(hashlib.sha256(repr((problem.prompt, problem.answer)).encode()).digest()[:8])


class TurnReply(NamedTuple):
    """The reply to a turn (`inference.environment_turns.EnvironmentReply`)."""

    tokens: list[int]
    reward: float = 0.0
    error: str | None = None
    note: str = ""
    seconds: float = 0.0
    truncated: bool = False


class Conversations:
    """The conversations of one generation call (`inference.environment_turns.EpisodeBatch`)."""

    def __init__(
        self, factory: ConversationFactory, problems: Sequence[Problem], prompts: Prompts, seeds: list[int], first: int
    ):
        """`first`: the index of the first episode."""
        self.factory, self.problems, self.seeds, self.first = factory, problems, seeds, first
        self.samples = len(seeds) // len(problems)
        self.episodes = range(first, first + len(seeds))
        self.turn_tokens, self.has_step_rewards = factory.turn_tokens, factory.has_step_rewards
        self.num_turns: dict[int, int] = {}
        """Turns of each response that has begun."""
        self.pending_turns: dict[int, list[int]] = {}
        """The turn of each response that waits for a reply."""
        self.tokens_before = [row[row >= 0].tolist() for row in prompts.prompt for _ in range(self.samples)]
        """The tokens before the last turn of each response: its prompt, or the last observation."""
        self.history: dict[int, list[Message]] = {}
        """All messages before the last turn of each response with several turns."""
        self.beginning: set[int] = set()
        """Responses whose environment has not begun yet."""
        self.seconds: dict[int, float] = {}
        """Time that the environment of each response has taken for its last turn."""

    def submit_turn(self, response: int, turn: list[int]) -> None:
        self.pending_turns[response] = turn
        if response in self.num_turns:
            return self._step(response)
        self.num_turns[response] = 0
        self.beginning.add(response)
        problem, episode = self.problems[response // self.samples], self.first + response
        if (error := self.factory.failed_openings.get(repr(problem))) is not None:
            return self.factory.unclaimed.append(Reply(episode, None, error, 0.0))
        self.factory.pool.begin(episode, problem, problem_seed(problem), self.seeds[response])

    def _step(self, response: int) -> None:
        text = self.factory.decode_turn(self.pending_turns[response], self.tokens_before[response])
        self.factory.pool.step(self.first + response, text)

    def poll(self, wait: bool) -> list[tuple[int, TurnReply]]:
        finished: list[tuple[int, TurnReply]] = []
        while not finished:
            replies = self.factory.replies(self.episodes, POLL_SECONDS if wait else 0.0)
            for reply in replies:
                response = reply.episode - self.first
                self.seconds[response] = self.seconds.get(response, 0.0) + reply.seconds
                if response in self.beginning and reply.error is None:
                    self.beginning.remove(response)
                    self._step(response)
                else:
                    finished.append((response, self._turn_reply(response, reply)))
            if not wait and not replies:
                break
        return finished

    def _turn_reply(self, response: int, reply: Reply) -> TurnReply:
        """Convert an environment's reply. End the episode if it failed, is done or has reached its turn limit."""
        turn, max_turns, step = self.pending_turns.pop(response), self.factory.max_turns, reply.step
        self.num_turns[response] += 1
        tokens, reward, error, note, truncated = list[int](), 0.0, reply.error, "", False
        if step is not None:
            reward, continues, max_tokens = step.reward, not step.done, self.factory.turn_tokens
            notes = [step.reason] if step.reason else []
            if self.factory.stop_ids and 0 < max_tokens <= len(turn) and turn[-1] not in self.factory.stop_ids:
                notes.append(f"{TRUNCATED_PREFIX}{max_tokens} tokens")
            if continues and self.num_turns[response] == max_turns:
                continues, truncated, notes = False, True, [*notes, f"the limit of {max_turns} turns"]
            note = "; ".join(notes)
            try:
                tokens = self._observe(response, step, turn) if continues else []
            except (ConfigError, ValueError) as template_error:
                error = f"its observation cannot be rendered: {template_error}"
            if continues and not tokens and error is None:
                error = "its environment returned an empty observation without being done"
        if not tokens:
            self.factory.end([reply.episode])
        name = f"turn {self.num_turns[response]}: "
        error = None if error is None else f"{name}{FAILED_PREFIX}{error}"
        note = f"{name}{note}" if note else ""
        return TurnReply(tokens, reward, error, note, self.seconds.pop(response), truncated)

    def _observe(self, response: int, step: Step, turn: list[int]) -> list[int]:
        """Return the tokens of an observation and append it to the history."""
        if response not in self.history:
            self.history[response] = list(self.factory.messages(self.problems[response // self.samples]))
        tokens = self.factory.render_observation(step, turn, self.history[response])
        self.tokens_before[response] = tokens
        self.history[response] += [{"role": "assistant", "content": ""}, *as_messages(step.observation)]
        return tokens

    def close(self) -> None:
        self.factory.end([self.first + response for response in self.num_turns])
