"""`ascent play`: a person takes the policy's part in a conversation, or the environment's, in the terminal."""

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
from ascent.cli.runs import LENGTHS, PolicyCommand
from ascent.core.errors import ConfigError, RunError
from ascent.core.types import Prompts
from ascent.environments.episode_pool import EpisodePool, InProcessEpisodePool
from ascent.environments.episode_process import Source
from ascent.environments.tool_chat import tool_instruction
from ascent.environments.tools import Tools, load_tool, parse_tool_counts, schemas_of
from ascent.processes.supervisor import Limits
from ascent.rewards.grading import Grading
from ascent.rollout.conversations import GLANCE, EnvironmentPool, make_environment_source, problem_seed
from ascent.runs.display.terminal import printable, wrapped
from ascent.runs.recorded_conversation import ENVIRONMENT, POLICY, TOOL, calls_words, colour_wanted, speech_lines
from ascent.settings import find_task
from ascent.tasks.environment import Environment, Step
from ascent.tasks.text.text_task import Problem
from ascent.workflows.loaded_policy import LoadedPolicy, conversations, unscored

CHOSEN_FROM = 64
"""Held-out problems that one is chosen from."""
YOU = "you"


@dataclass(kw_only=True)
class PlayCommand(PolicyCommand):
    """Play in a conversation yourself, in the policy's part or in the environment's.

      ascent play guess
      ascent play textarena:Nim
      ascent play jsonl:problems.jsonl --environment python:worlds.py:World
      ascent play gsm8k --tools calculator
      ascent play RUN --as environment
      ascent play gsm8k --model FOLDER --as environment

    A line is a turn, and you see what it earns. The problem is a held-out one of
    the task. In the environment's part a line is what the policy reads next;
    /reward X pays for its turn, and /end ends the episode. Ctrl-D leaves it.
    """

    source: Annotated[str, "RUN|TASK"]
    """A run's folder, or a task with its own settings as flags. It comes first."""
    as_: Literal["policy", "environment"] = "policy"
    """Whose part you take. The environment's needs a policy: a run, or --model."""
    seed: Annotated[int | None, "N"] = None  # type: ignore[assignment]
    """Decides the problem and all luck. Default: another one each time."""

    def execute(self) -> None:
        seed = secrets.randbelow(2**31) if self.seed is None else self.seed
        terminal, of_run = Terminal(colour_wanted()), self.model is None and Path(self.source).is_dir()
        if self.json:
            raise ConfigError("--json: a game is for people. For scripts, `ascent sample --json` has conversations")
        if self.as_ == "policy":
            if self.model is not None:
                raise ConfigError(
                    f"--model {self.model}: you take the policy's part. Leave it out, or --as environment"
                )
            if of_run and (self.other_args or self.task):
                raise ConfigError(
                    f"{' '.join(self.other_args) or '--task'}: a run has its task and its settings. Name a task first"
                )
            config = Run(self.source).config if of_run else self._config(self.source, self.other_args)
            config.task.verify()
            game = (text_game if backend_of(config).words else small_game)(config.task, seed)
            return play_policy(game, seed, terminal)
        if not of_run and self.model is None:
            policy = "--model FOLDER" if find_task(self.source)[0].kind == "text" else "its folder in place of the task"
            raise ConfigError(f"--as environment with {self.source}: name the policy to play with, {policy}")
        run, task = (self.source, self.task) if of_run else (None, self.source)
        play_environment(self.load(run, task, self.other_args, ("temperature", *LENGTHS, "device")), seed, terminal)


class PlayerLeftError(KeyboardInterrupt):
    """The input is over. No environment and no sampler catches it."""


class Terminal:
    """Where a person reads and types. What comes from a pipe is shown too, so that the game can be read."""

    def __init__(self, colour: bool):
        self.colour, self.turns, self.typed_here = colour, 0, sys.stdin is not None and sys.stdin.isatty()
        if self.typed_here:
            import readline  # noqa: F401 (lines can be edited)

    def say(self, who: str, text: str) -> None:
        self.turns += who == POLICY
        print("\n".join(speech_lines(who, text, self.colour)), flush=True)

    def note(self, text: str) -> None:
        print("  " + wrapped(printable(text), 2), flush=True)

    def ask(self, who: str) -> str:
        try:
            line = input(f"  {who:<11}  ")
        except (EOFError, RuntimeError):  # RuntimeError: there is no input at all
            print(flush=True)
            raise PlayerLeftError from None
        except KeyboardInterrupt:
            print(flush=True)
            raise
        except UnicodeDecodeError as error:
            raise ConfigError(f"what was typed is not text: {error}") from None
        if not self.typed_here:
            print(printable(line), flush=True)
        return line


# ---- the policy's part ------------------------------------------------------------------------------------------


class SmallGame(NamedTuple):
    """What a person plays: a problem, who answers, and how turns and answers are written."""

    problem: Problem
    chat: str
    """What stands before the first turn."""
    pool: EnvironmentPool | None
    """None: a response is one turn."""
    read: Callable[[str], str]
    """A line as the environment reads it; refused where it is no turn."""
    show: Callable[[Any], str]
    """An observation in words."""
    answers: str = ENVIRONMENT
    max_turns: int = 0
    grade: Callable[[str], tuple[float, str]] | None = None
    """What the task gives for the last turn, and why."""


def play_policy(game: SmallGame, seed: int, terminal: Terminal) -> None:
    rewards: list[float] = []
    with ExitStack() as stack:
        if game.pool is not None:
            stack.enter_context(closing(game.pool))
        try:
            last = take_turns(game, seed, terminal, rewards)
        except PlayerLeftError:
            return terminal.note(f"The input is over: the episode was left after {_earned(rewards)}.")
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the episode was left after {_earned(rewards)}") from None
    own, why = game.grade(last) if game.grade is not None else (0.0, "")
    terminal.note(f"Total reward {sum(rewards) + own:.4g}: {_earned(rewards)}{f', {why}' if why else ''}.")


def _earned(rewards: list[float]) -> str:
    turns = f"{len(rewards)} {'turn' if len(rewards) == 1 else 'turns'}"
    return f"{turns} ({', '.join(f'{reward:.3g}' for reward in rewards)})" if rewards else turns


def take_turns(game: SmallGame, seed: int, terminal: Terminal, rewards: list[float]) -> str:
    """Play until the episode is over, and add what every turn earned to `rewards`. Returns the last turn."""
    pool = game.pool
    terminal.say("prompt", game.chat)
    if pool is not None:
        pool.begin(0, game.problem, problem_seed(game.problem), seed)
        if opening := game.show(_answer(pool, 0).observation):
            terminal.say(game.answers, opening)
    while True:
        line = terminal.ask(YOU)
        try:
            action = game.read(line)
        except ConfigError as wrong:
            terminal.note(f"{wrong}. Nothing was sent")
            continue
        if pool is None:
            return action
        pool.step(0, action)
        step = _answer(pool, len(rewards) + 1)
        rewards.append(step.reward)
        if observation := game.show(step.observation):
            terminal.say(game.answers, observation)
        counts = parse_tool_counts(step.reason)
        about = f", {calls_words(counts)}" if counts else f", {step.reason}" if step.reason else ""
        terminal.note(f"· turn {len(rewards)}: reward {step.reward:.3g}{about}")
        if step.done or len(rewards) == game.max_turns:
            limit = "" if step.done else f": the limit of {game.max_turns} turns"
            terminal.note(f"The episode is over{limit}.")
            return action


def _answer(pool: EnvironmentPool, turn: int) -> Step:
    while not (replies := pool.answers(GLANCE)):
        pass  # its own deadline is a reply too
    if replies[0].step is None:
        when = f"in turn {turn}" if turn else "when it began"
        raise RunError(f"the environment failed {when}: {replies[0].error}. In a run, such a response is not valid")
    return replies[0].step


def small_game(task: Any, seed: int) -> SmallGame:
    if task.episode() is None:
        raise ConfigError(f"{type(task).__name__.lower()} has one turn, and nobody answers it. Try guess or swaps")
    prompts, tokens = task.held_out(CHOSEN_FROM), tokens_of(task)
    problem = task.problem(prompts, random.Random(seed).randrange(len(prompts)))

    rule = f"a turn is {task.turn_tokens} of {spelled(tokens)}"

    def read(line: str) -> str:
        numbers = read_tokens(line, tokens)
        if len(numbers) != task.turn_tokens:
            raise ConfigError(f"{line!r:.60}: {rule}")
        return " ".join(map(str, numbers))

    def show(words: str) -> str:
        return task.text(list(map(int, words.split()))) if words else ""

    return SmallGame(problem, f"{problem.prompt}\n({rule})", InProcessEpisodePool(task.episode), read, show)


def tokens_of(task: Any) -> dict[str, int]:
    """How the tokens of a small task are spelled; the number of a token will do too."""
    every = range(task.space.vocab)
    return {task.text([i]).strip("[]"): i for i in every} | {str(i): i for i in every}


def spelled(tokens: Mapping[str, int]) -> str:
    return ", ".join(list(tokens)[: len(set(tokens.values()))])


def read_tokens(line: str, tokens: Mapping[str, int]) -> list[int]:
    """The tokens of a line; refused where one is unknown."""
    words = [line.strip()] if line.strip() in tokens else line.replace(",", " ").strip("[] \t").split()
    unknown = [word for word in words if word not in tokens]
    if unknown or not words:
        raise ConfigError(f"{line!r:.60}: write some of {spelled(tokens)}")
    return [tokens[word] for word in words]


def text_game(task: Any, seed: int) -> SmallGame:
    problem = random.Random(seed).choice(task.test(CHOSEN_FROM))
    chat, limits = task.messages(problem), Limits(task.turn_seconds, task.reward_memory, task.reward_env)
    pool, answers = None, ENVIRONMENT
    if task.tools:
        schemas, answers = schemas_of([load_tool(source) for source in task.tools]), TOOL
        chat.insert(0, {"role": "system", "content": tool_instruction(schemas)})
        settings = {"sources": list(task.tools), "schemas": schemas, "form": "plain", "sandbox": task.tool_sandbox}
        pool = EpisodePool(Source("ascent.environments.tools:make_tools", settings), limits)
    elif task.environment:
        pool = EpisodePool(make_environment_source(task.environment), limits)

    def read(line: str) -> str:
        if not line.strip():
            raise ConfigError("a turn has words")
        return line

    words = "\n\n".join(message["content"] for message in chat)
    return SmallGame(
        problem, words, pool, read, observation_words, answers, task.max_turns, partial(grade, task, problem)
    )


def observation_words(observation: Any) -> str:
    """Words, or those of the messages."""
    return observation if isinstance(observation, str) else "\n".join(message["content"] for message in observation)


def grade(task: Any, problem: Problem, words: str) -> tuple[float, str]:
    """What the task gives for an answer, and why. Judges and reward models are not asked."""
    absent = [reward.name for reward in task.rewards if reward.kind in ("judge", "model", "process")]
    with closing(Grading(replace(task, reward_workers=1), partial=True)) as grading:
        (mark,) = grading([(problem, words)])
    if mark.error is not None:
        raise RunError(mark.error)
    said = [f"and {mark.value:g} for the answer ({mark.reason or ('right' if mark.strict else 'wrong')})"]
    if problem.answer is None and not mark.value:
        said = []
    return mark.value, ", ".join([*said, *(f"{name} was not asked" for name in absent)])


# ---- the environment's part -------------------------------------------------------------------------------------


class Person(Environment):
    """An environment that is a person at a terminal."""

    def __init__(self, terminal: Terminal, show: Callable[[str], str], read: Callable[[str], str]):
        self.terminal, self.show, self.read = terminal, show, read

    def step(self, action: str) -> Step:
        self.terminal.say(POLICY, self.show(action))
        reward = 0.0
        while True:
            line = self.terminal.ask(YOU)
            command, _, number = line.strip().partition(" ")
            try:
                if command in ("/reward", "/end"):
                    paid = _number(number) if number or command == "/reward" else reward
                    if command == "/end":
                        return Step(reward=paid, done=True, reason="you ended it")
                    reward = paid
                elif line.startswith("/") and not line.startswith("//"):
                    raise ConfigError(f"{command}: there are /reward X and /end [X]; // begins an answer with /")
                else:
                    return Step(self.read(line.removeprefix("/")), reward)
            except ConfigError as wrong:
                self.terminal.note(f"{wrong}. Nothing was sent")


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{text!r:.40}: a reward is a number")
    return number


def play_environment(loaded: LoadedPolicy, seed: int, terminal: Terminal) -> None:
    task, words = loaded.config.task, loaded.backend.words
    if not words and task.episode() is None:
        raise ConfigError(f"{type(task).__name__.lower()} has one turn: the policy takes no answer to it")
    if words and not task.has_environment:  # anybody may be answered; the class is never made in a process
        answered = replace(task, environment=f"python:{__file__}:Person")
        loaded = replace(loaded, config=replace(loaded.config, task=answered))
    bound: Any = loaded.unscored_task()
    with closing(bound):
        bound.player.pool = InProcessEpisodePool(_stand_in(task, bound, words, terminal))
        try:
            tools = words and bool(task.tools)
            prompts = _first_words(bound, words and not tools, tools, seed, terminal)
            rollouts = loaded.sampler(prompts, seed).generate(prompts, 1)
        except PlayerLeftError:
            return terminal.note("The input is over: the episode was left.")
        batch = unscored(rollouts)
        (talk,) = conversations(bound, batch)
    said = [speech for speech in talk["turns"] if speech["who"] == POLICY]
    if len(said) > terminal.turns:  # a limit of tokens cut off the last turn, which was not answered
        terminal.say(POLICY, said[-1]["text"])
    if not bool(batch.valid.all()):
        raise RunError(f"the episode failed: {talk['ended']}")
    rewards = [speech["reward"] or 0.0 for speech in said]
    terminal.note(f"The episode is over: {talk['ended']}.")
    terminal.note(f"Total reward {sum(rewards):.4g}: {_earned(rewards)}.")


def _stand_in(task: Any, bound: Any, words: bool, terminal: Terminal) -> Callable[[], Environment]:
    """What makes the environment: a person, or tools that a person answers for."""
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
                raise ConfigError("an answer has words; /end ends the episode")
            return line

        return lambda: Person(terminal, lambda action: action, read)
    settings = bound.player.pool.setup[1]

    def tool(name: str) -> Callable[..., str]:
        def answer(**arguments: Any) -> str:
            terminal.say(TOOL, f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
            return terminal.ask(YOU)

        return answer

    class AskedTools(Tools):
        def step(self, action: str) -> Step:
            terminal.say(POLICY, action)
            return super().step(action)

    names = [schema["function"]["name"] for schema in settings["schemas"]]
    return lambda: AskedTools([tool(name) for name in names], settings["schemas"], settings["form"])


def _first_words(bound: Any, opens: bool, tools: bool, seed: int, terminal: Terminal) -> Prompts:
    """One held-out prompt, with what the environment says before the first turn if it `opens` the episode."""
    if opens:
        bound.task.opening = None
    prompts = bound.held_out(CHOSEN_FROM)
    place = random.Random(seed).randrange(len(prompts))
    question = bound.question(prompts, place)
    problem = bound.player.problem(prompts, place)
    terminal.say("prompt", question.words)
    if problem.answer is not None:
        terminal.note(f"The right answer: {problem.answer}")
    hint = "Type what the policy reads next. /reward X pays for its turn; /end [X] ends the episode."
    terminal.note("Type what each call returns. A turn without a call ends the episode." if tools else hint)
    if opens:
        terminal.note("Before its first turn (empty: nothing):")
        first = terminal.ask(YOU)
        bound.task.opening = lambda _: first
        prompts = bound.held_out(CHOSEN_FROM)
    return prompts[torch.tensor([place])]


COMMANDS = {"look at a run": (PlayCommand,)}
