"""`ascent play`: play the policy or the environment of a conversation in the terminal."""

import math
import random
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch

from ascent.build.backends import backend_of
from ascent.build.trained_run import Run
from ascent.cli.runs import LENGTH_FLAGS, PolicyCommand
from ascent.core.errors import ConfigError, RunError
from ascent.core.types import Prompts
from ascent.environments.episode_pool import EpisodePool, InProcessEpisodePool
from ascent.environments.episode_process import Source
from ascent.environments.tool_chat import tool_instruction
from ascent.environments.tools import Tools, load_tool, parse_tool_counts, schemas_of
from ascent.processes.supervisor import Limits
from ascent.rewards.reward_manager import RewardManager
from ascent.rollout.conversation_task import make_environment_source
from ascent.rollout.conversations import POLL_SECONDS, EnvironmentPool, problem_seed
from ascent.runs.display.terminal import printable, wrapped
from ascent.runs.recorded_conversation import ENVIRONMENT, POLICY, TOOL, format_tool_calls, message_lines, use_color
from ascent.settings import find_task
from ascent.tasks.environment import Environment, Step
from ascent.tasks.text.text_task import Problem
from ascent.workflows.loaded_policy import LoadedPolicy, conversations, unscored

NUM_PROBLEMS = 64
"""Held-out problems, one of which is chosen at random."""
YOU = "you"


@dataclass(kw_only=True)
class PlayCommand(PolicyCommand):
    """Play the policy or the environment of a conversation yourself.

      ascent play guess
      ascent play textarena:Nim
      ascent play jsonl:problems.jsonl --environment python:worlds.py:World
      ascent play gsm8k --tools calculator
      ascent play RUN --as environment
      ascent play gsm8k --model FOLDER --as environment

    The problem is a held-out one of the task. As the policy, each line that you
    type is a turn, and you see its reward. As the environment, each line is the
    observation that the policy reads next; /reward X sets the reward of its turn,
    and /end ends the episode. Ctrl-D leaves it.
    """

    source: Annotated[str, "RUN|TASK"]
    """A run's folder, or a task with its own settings as flags. It comes first."""
    as_: Literal["policy", "environment"] = "policy"
    """What you play. The environment needs a policy: a run, or --model."""
    seed: Annotated[int | None, "N"] = None  # type: ignore[assignment]
    """Seed of the problem and of the episode. Default: a new one each time."""

    def execute(self) -> None:
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        terminal, of_run = Terminal(use_color()), self.model is None and Path(self.source).is_dir()
        if self.json:
            raise ConfigError("--json: `ascent play` is interactive. `ascent sample --json` prints conversations")
        if self.as_ == "policy":
            if self.model is not None:
                raise ConfigError(f"--model {self.model}: you play the policy. Leave it out, or set --as environment")
            if of_run and (self.other_args or self.task):
                raise ConfigError(f"{' '.join(self.other_args) or '--task'}: a run already has a task and settings")
            config = Run(self.source).config if of_run else self._config(self.source, self.other_args)
            config.task.verify()
            make_episode = text_episode if backend_of(config).uses_text else small_episode
            return play_policy(make_episode(config.task, seed), seed, terminal)
        if not of_run and self.model is None:
            policy = "--model FOLDER" if find_task(self.source)[0].kind == "text" else "its folder in place of the task"
            raise ConfigError(f"--as environment with {self.source}: name the policy to play with, {policy}")
        run, task = (self.source, self.task) if of_run else (None, self.source)
        play_environment(
            self.load(run, task, self.other_args, ("temperature", *LENGTH_FLAGS, "device")), seed, terminal
        )


class EndOfInputError(KeyboardInterrupt):
    """The input has ended. A KeyboardInterrupt, so that no environment or engine catches it."""


class Terminal:
    """The terminal at which a person plays. Lines from a pipe are echoed."""

    def __init__(self, color: bool):
        self.color, self.policy_turns = color, 0
        self.is_interactive = sys.stdin is not None and sys.stdin.isatty()
        if self.is_interactive:
            import readline  # noqa: F401 (lines can be edited)

    def show_turn(self, who: str, text: str) -> None:
        self.policy_turns += who == POLICY
        print("\n".join(message_lines(who, text, self.color)), flush=True)

    def note(self, text: str) -> None:
        print("  " + wrapped(printable(text), 2), flush=True)

    def ask(self, who: str) -> str:
        try:
            line = input(f"  {who:<11}  ")
        except (EOFError, RuntimeError):  # RuntimeError: stdin is closed
            print(flush=True)
            raise EndOfInputError from None
        except KeyboardInterrupt:
            print(flush=True)
            raise
        except UnicodeDecodeError as error:
            raise ConfigError(f"the input is not text: {error}") from None
        if not self.is_interactive:
            print(printable(line), flush=True)
        return line


# ---- playing the policy -----------------------------------------------------------------------------------------


class PlayedEpisode(NamedTuple):
    """An episode that a person plays: the problem, the environment, and the format of actions and observations."""

    problem: Problem
    chat: str
    """The prompt."""
    pool: EnvironmentPool | None
    """The environment; None if a response has one turn."""
    parse_action: Callable[[str], str]
    """Convert a typed line to an action; raises ConfigError."""
    show_observation: Callable[[Any], str]
    """Convert an observation to text."""
    answered_by: str = ENVIRONMENT
    max_turns: int = 0
    grade: Callable[[str], tuple[float, str]] | None = None
    """Return the reward of the last turn, and the reason."""


def play_policy(episode: PlayedEpisode, seed: int, terminal: Terminal) -> None:
    rewards: list[float] = []
    with ExitStack() as stack:
        if episode.pool is not None:
            stack.enter_context(closing(episode.pool))
        try:
            last = take_turns(episode, seed, terminal, rewards)
        except EndOfInputError:
            return terminal.note(f"The input has ended. The episode was left after {_summary(rewards)}.")
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the episode was left after {_summary(rewards)}") from None
    final, reason = episode.grade(last) if episode.grade is not None else (0.0, "")
    terminal.note(f"Total reward {sum(rewards) + final:.4g}: {_summary(rewards)}{f', {reason}' if reason else ''}.")


def _summary(rewards: list[float]) -> str:
    turns = f"{len(rewards)} {'turn' if len(rewards) == 1 else 'turns'}"
    return f"{turns} ({', '.join(f'{reward:.3g}' for reward in rewards)})" if rewards else turns


def take_turns(episode: PlayedEpisode, seed: int, terminal: Terminal, rewards: list[float]) -> str:
    """Play until the episode ends, append the reward of each turn to `rewards`, and return the last action."""
    pool = episode.pool
    terminal.show_turn("prompt", episode.chat)
    if pool is not None:
        pool.begin(0, episode.problem, problem_seed(episode.problem), seed)
        if opening := episode.show_observation(_next_step(pool, 0).observation):
            terminal.show_turn(episode.answered_by, opening)
    while True:
        line = terminal.ask(YOU)
        try:
            action = episode.parse_action(line)
        except ConfigError as error:
            terminal.note(f"{error}. Nothing was sent")
            continue
        if pool is None:
            return action
        pool.step(0, action)
        step = _next_step(pool, len(rewards) + 1)
        rewards.append(step.reward)
        if observation := episode.show_observation(step.observation):
            terminal.show_turn(episode.answered_by, observation)
        counts = parse_tool_counts(step.reason)
        about = f", {format_tool_calls(counts)}" if counts else f", {step.reason}" if step.reason else ""
        terminal.note(f"· turn {len(rewards)}: reward {step.reward:.3g}{about}")
        if step.done or len(rewards) == episode.max_turns:
            limit = "" if step.done else f": the limit of {episode.max_turns} turns"
            terminal.note(f"The episode is over{limit}.")
            return action


def _next_step(pool: EnvironmentPool, turn: int) -> Step:
    while not (replies := pool.wait_for_replies(POLL_SECONDS)):
        pass  # a deadline of the pool is a reply too
    if replies[0].step is None:
        when = f"in turn {turn}" if turn else "when it began"
        raise RunError(f"the environment failed {when}: {replies[0].error}. In a run, such a response is masked")
    return replies[0].step


def small_episode(task: Any, seed: int) -> PlayedEpisode:
    if task.make_environment() is None:
        raise ConfigError(
            f"{type(task).__name__.lower()} has no environment: a response is one turn. Try guess or swaps"
        )
    prompts, tokens = task.held_out(NUM_PROBLEMS), tokens_of(task)
    problem = task.problem(prompts, random.Random(seed).randrange(len(prompts)))

    rule = f"a turn is {task.turn_tokens} of {spelled(tokens)}"

    def read(line: str) -> str:
        numbers = read_tokens(line, tokens)
        if len(numbers) != task.turn_tokens:
            raise ConfigError(f"{line!r:.60}: {rule}")
        return " ".join(map(str, numbers))

    def show(words: str) -> str:
        return task.text(list(map(int, words.split()))) if words else ""

    return PlayedEpisode(
        problem, f"{problem.prompt}\n({rule})", InProcessEpisodePool(task.make_environment), read, show
    )


def tokens_of(task: Any) -> dict[str, int]:
    """Return the tokens of a small task by their spelling, and by their number."""
    vocab = range(task.space.vocab)
    return {task.text([i]).strip("[]"): i for i in vocab} | {str(i): i for i in vocab}


def spelled(tokens: Mapping[str, int]) -> str:
    return ", ".join(list(tokens)[: len(set(tokens.values()))])


def read_tokens(line: str, tokens: Mapping[str, int]) -> list[int]:
    """Parse the tokens of a line; raise ConfigError if one is unknown."""
    words = [line.strip()] if line.strip() in tokens else line.replace(",", " ").strip("[] \t").split()
    unknown = [word for word in words if word not in tokens]
    if unknown or not words:
        raise ConfigError(f"{line!r:.60}: write some of {spelled(tokens)}")
    return [tokens[word] for word in words]


def text_episode(task: Any, seed: int) -> PlayedEpisode:
    problem = random.Random(seed).choice(task.test(NUM_PROBLEMS))
    chat, limits = task.messages(problem), Limits(task.turn_seconds, task.reward_memory, task.reward_env)
    pool, answers = None, ENVIRONMENT
    if task.tools:
        schemas, answers = schemas_of([load_tool(source) for source in task.tools]), TOOL
        chat.insert(0, {"role": "system", "content": tool_instruction(schemas)})
        settings = {
            "sources": list(task.tools),
            "schemas": schemas,
            "format_name": "plain",
            "sandbox": task.tool_sandbox,
        }
        pool = EpisodePool(Source("ascent.environments.tools:make_tools", settings), limits)
    elif task.environment:
        pool = EpisodePool(make_environment_source(task.environment), limits)

    def read(line: str) -> str:
        if not line.strip():
            raise ConfigError("a turn must not be empty")
        return line

    words = "\n\n".join(message["content"] for message in chat)
    return PlayedEpisode(
        problem, words, pool, read, observation_text, answers, task.max_turns, partial(grade, task, problem)
    )


def observation_text(observation: Any) -> str:
    """Return the text of an observation, which may be messages."""
    return observation if isinstance(observation, str) else "\n".join(message["content"] for message in observation)


def grade(task: Any, problem: Problem, words: str) -> tuple[float, str]:
    """Return the reward of an answer and the reason. Judges and reward models are left out."""
    skipped = [reward.name for reward in task.rewards if reward.kind in ("judge", "model", "process")]
    with closing(RewardManager(replace(task, reward_workers=1), partial=True)) as grading:
        (mark,) = grading([(problem, words)])
    if mark.error is not None:
        raise RunError(mark.error)
    reasons = [f"and {mark.value:g} for the answer ({mark.reason or ('right' if mark.strict else 'wrong')})"]
    if problem.answer is None and not mark.value:
        reasons = []
    return mark.value, ", ".join([*reasons, *(f"without {name}" for name in skipped)])


# ---- playing the environment ------------------------------------------------------------------------------------


class Person(Environment):
    """An environment played by a person at a terminal."""

    def __init__(self, terminal: Terminal, show: Callable[[str], str], read: Callable[[str], str]):
        self.terminal, self.show, self.read = terminal, show, read

    def step(self, action: str) -> Step:
        self.terminal.show_turn(POLICY, self.show(action))
        reward = 0.0
        while True:
            line = self.terminal.ask(YOU)
            command, _, number = line.strip().partition(" ")
            try:
                if command in ("/reward", "/end"):
                    value = _parse_reward(number) if number or command == "/reward" else reward
                    if command == "/end":
                        return Step(reward=value, done=True, reason="you ended it")
                    reward = value
                elif line.startswith("/") and not line.startswith("//"):
                    raise ConfigError(f"{command}: use /reward X or /end [X]; // starts an observation with /")
                else:
                    return Step(self.read(line.removeprefix("/")), reward)
            except ConfigError as error:
                self.terminal.note(f"{error}. Nothing was sent")


def _parse_reward(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{text!r:.40}: a reward must be a number")
    return number


def play_environment(loaded: LoadedPolicy, seed: int, terminal: Terminal) -> None:
    task, words = loaded.config.task, loaded.backend.uses_text
    if not words and task.make_environment() is None:
        raise ConfigError(f"{type(task).__name__.lower()} has one turn: the policy reads no observation")
    if words and not task.has_environment:  # the class is only named: no process creates it
        with_person = replace(task, environment=f"python:{__file__}:Person")
        loaded = replace(loaded, config=replace(loaded.config, task=with_person))
    bound: Any = loaded.unscored_task()
    with closing(bound):
        bound.conversations.pool = InProcessEpisodePool(_person_factory(task, bound, words, terminal))
        try:
            tools = words and bool(task.tools)
            prompts = _first_prompt(bound, words and not tools, tools, seed, terminal)
            rollouts = loaded.sampler(prompts, seed).generate(prompts, 1)
        except EndOfInputError:
            return terminal.note("The input has ended. The episode was left.")
        batch = unscored(rollouts)
        (conversation,) = conversations(bound, batch)
    policy_turns = [turn for turn in conversation["turns"] if turn["role"] == POLICY]
    if len(policy_turns) > terminal.policy_turns:  # max_tokens truncated the last turn, which got no observation
        terminal.show_turn(POLICY, policy_turns[-1]["text"])
    if not bool(batch.valid.all()):
        raise RunError(f"the episode failed: {conversation['ended']}")
    rewards = [turn["reward"] or 0.0 for turn in policy_turns]
    terminal.note(f"The episode is over: {conversation['ended']}.")
    terminal.note(f"Total reward {sum(rewards):.4g}: {_summary(rewards)}.")


def _person_factory(task: Any, bound: Any, words: bool, terminal: Terminal) -> Callable[[], Environment]:
    """Return a factory of the environment: a person, or tools whose results a person types."""
    if not words:
        tokens = tokens_of(task)
        return lambda: Person(
            terminal,
            lambda action: task.text(list(map(int, action.split()))),
            lambda line: " ".join(map(str, read_tokens(line, tokens))),
        )
    if not task.tools:

        def read(line: str) -> str:
            if not line.strip():
                raise ConfigError("an observation must not be empty; /end ends the episode")
            return line

        return lambda: Person(terminal, lambda action: action, read)
    settings = bound.conversations.pool.setup[1]

    def tool(name: str) -> Callable[..., str]:
        def answer(**arguments: Any) -> str:
            terminal.show_turn(TOOL, f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
            return terminal.ask(YOU)

        return answer

    class TypedTools(Tools):
        def step(self, action: str) -> Step:
            terminal.show_turn(POLICY, action)
            return super().step(action)

    names = [schema["function"]["name"] for schema in settings["schemas"]]
    return lambda: TypedTools([tool(name) for name in names], settings["schemas"], settings["format_name"])


def _first_prompt(bound: Any, has_opening: bool, has_tools: bool, seed: int, terminal: Terminal) -> Prompts:
    """Return one held-out prompt, with the first observation that the person types if `has_opening`."""
    if has_opening:
        bound.task.first_observation = None
    prompts = bound.held_out(NUM_PROBLEMS)
    place = random.Random(seed).randrange(len(prompts))
    question = bound.readable_prompt(prompts, place)
    problem = bound.conversations.problem(prompts, place)
    terminal.show_turn("prompt", question.text)
    if problem.answer is not None:
        terminal.note(f"The right answer: {problem.answer}")
    hint = "Type what the policy reads next. /reward X sets the reward of its turn; /end [X] ends the episode."
    terminal.note("Type what each call returns. A turn without a call ends the episode." if has_tools else hint)
    if has_opening:
        terminal.note("First observation (empty: none):")
        first = terminal.ask(YOU)
        bound.task.first_observation = lambda _: first
        prompts = bound.held_out(NUM_PROBLEMS)
    return prompts[torch.tensor([place])]


COMMANDS = {"look at a run": (PlayCommand,)}
