"""Tasks with conversations: binds environments and tools to a task, and measures turns and tool calls."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ascent.core.types import Prompts, Rollouts, Scores
from ascent.environments.chat_templates import ChatTemplate
from ascent.environments.episode_pool import EpisodePool, InProcessEpisodePool
from ascent.environments.episode_process import Source
from ascent.environments.tool_chat import ToolChat
from ascent.environments.tools import TOOL_COUNT_NAMES, Tools, load_tool, parse_tool_counts, prepare_tools, schemas_of
from ascent.processes.supervisor import Limits
from ascent.rollout.conversations import TRUNCATED_PREFIX, TURN_LIMIT_PATTERN, ConversationFactory
from ascent.sandbox.sandboxed_reward import SandboxSettings
from ascent.tasks.base import TaskWrapper
from ascent.tasks.python_objects import OBJECT_PREFIX, pickle_object
from ascent.tasks.text.text_task import TEXTARENA, Message, Problem


class ConversationTask(TaskWrapper):
    """A bound task whose responses are conversations."""

    def __init__(self, task: Any, conversations: Any, is_text: bool):
        """`conversations`: starts those of some prompts, as `ConversationFactory` does."""
        self.task, self.conversations, self.is_text = task, conversations, is_text

    def draw(self, count: int, generator: Any) -> Prompts:
        return replace(self.task.draw(count, generator), start_episodes=self.conversations)

    def step_prompts(self, step: int, count: int, seed: int, generator: Any) -> Prompts:
        return replace(self.task.step_prompts(step, count, seed, generator), start_episodes=self.conversations)

    def held_out(self, count: int) -> Prompts:
        return replace(self.task.held_out(count), start_episodes=self.conversations)

    def encode_prompts(self, typed: Sequence[str], plain: bool) -> tuple[Prompts, list[str]]:
        """Return prompts that a user typed; each is a whole problem."""
        prompts, texts = self.task.encode_prompts(typed, plain)
        problems = [Problem(text) for text in typed] if self.is_text else None
        return replace(prompts, start_episodes=functools.partial(self.conversations, problems=problems)), texts

    def score(self, rollouts: Rollouts) -> Scores:
        """Return the task's scores with measures of turns and tool calls.

        Without a reference answer, a response with a total reward of 1 is correct: a game that was won.
        """
        scores = self.task.score(rollouts)
        if rollouts.turn is None:
            return scores
        num_turns = count_turns(rollouts).to(scores.reward.dtype)
        measures = {**scores.measures, "turns": num_turns, **count_tool_calls(rollouts.notes, num_turns)}
        correct = scores.correct
        if self.is_text:
            measures |= measure_turns(rollouts)
        if self.is_text and correct is not None and rollouts.reward is not None:
            indices = range(len(rollouts.prompt))
            has_no_answer = [self.conversations.problem(rollouts, index).answer is None for index in indices]
            has_full_reward = scores.reward.sum(-1) + rollouts.reward.sum(-1) > 1 - 1e-5
            correct = correct | (torch.tensor(has_no_answer).unsqueeze(-1) & has_full_reward)
            measures["lenient"] = torch.maximum(measures["lenient"], correct.to(num_turns.dtype))
        return replace(scores, measures=measures, correct=correct)

    def close(self) -> None:
        self.conversations.close()
        self.task.close()


def count_turns(rollouts: Rollouts) -> torch.Tensor:
    assert rollouts.turn is not None
    return torch.where(rollouts.mask, rollouts.turn + 1, 0).amax(-1)


def measure_turns(rollouts: Rollouts) -> dict[str, torch.Tensor]:
    """Return the number of truncated turns and the time in environments, where the rollouts have them."""
    if rollouts.notes is None or rollouts.environment_seconds is None:
        return {}
    return {
        "turns/cut": count_truncated_turns(rollouts),
        "time/environment": rollouts.environment_seconds.sum(-1),
    }


def count_truncated_turns(rollouts: Rollouts) -> torch.Tensor:
    """Count the turns that a token limit truncated: those in notes, and the last turn of a truncated response."""
    assert rollouts.notes is not None
    notes, truncated = list(rollouts.notes.flat), rollouts.truncated.flatten().tolist()
    counts = [
        note.count(TRUNCATED_PREFIX) + (is_truncated and not TURN_LIMIT_PATTERN.search(note))
        for note, is_truncated in zip(notes, truncated, strict=True)
    ]
    return torch.tensor(counts, dtype=torch.float32).view(rollouts.truncated.shape)


def count_tool_calls(notes: Any, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Count the tool calls of each response, and the failed ones, if its notes have such counts."""
    if notes is None:
        return {}
    counts = [Counter[str]() for _ in notes.flat]
    for counter, note in zip(counts, notes.flat, strict=True):
        for part in note.split("; "):
            counter.update(parse_tool_counts(part.partition(": ")[2]))
    names = [name for name in TOOL_COUNT_NAMES if any(name in counter for counter in counts)]
    return {f"tools/{name}": like.new_tensor([c[name] for c in counts]).view(like.shape) for name in names}


def bind_small_environment(task: Any) -> Any:
    """Add the environment of a bound small task, if it has one. Actions and observations are numbers as text."""
    if task.make_environment() is None:
        return task
    conversations = ConversationFactory(
        InProcessEpisodePool(task.make_environment),
        task.problem,
        decode_turn=lambda turn, _: " ".join(map(str, turn)),
        render_observation=lambda step, *_: [int(number) for number in str(step.observation).split()],
        turn_tokens=task.turn_tokens,
    )
    return ConversationTask(task, conversations, is_text=False)


def bind_text_environment(task: Any, model: Any, bind: Callable[[Any], Any]) -> Any:
    """Bind a text task with its tools or environment to a language model.

    `bind` binds the task to an encoder. With tools, the encoder writes them into the prompt.
    """
    if not (task.tools or task.environment):
        return bind(model)
    limits = Limits(task.turn_seconds, task.reward_memory, task.reward_env)
    if task.tools:
        functions = [load_tool(source) for source in task.tools]
        chat = ToolChat(model.tokenizer, schemas_of(functions), model.stop_token_ids)
        bound, template = bind(PromptEncoder(model, chat.render_prompt)), chat.template
        source = make_tools_source(task.tools, functions, chat, task.tool_sandbox)
    else:
        bound, template = bind(model), ChatTemplate(model.tokenizer, (), model.stop_token_ids)
        source = make_environment_source(task.environment)

    def find_problem(prompts: Any, index: int) -> Problem:
        return bound.problem(int(prompts.problem[index]))

    def make_messages(problem: Problem) -> list[Message]:
        messages: list[Message] = bound.messages(problem)
        return chat.add_instruction(messages) if task.tools else messages

    conversations = ConversationFactory(
        EpisodePool(source, limits, task.turn_workers),
        find_problem,
        decode_turn=chat.decode_turn if task.tools else lambda turn, _: bound.response_text(turn),
        render_observation=lambda step, turn, history: template.render_observation(turn, step.observation, history),
        messages=make_messages,
        turn_tokens=task.turn_tokens,
        stop_ids=model.stop_token_ids,
        max_turns=task.max_turns,
        has_step_rewards=not task.tools,
    )
    if task.environment:
        bound.first_observation = conversations.opening
    return ConversationTask(bound, conversations, is_text=True)


class PromptEncoder:
    """A model's encoder that renders prompts with another function."""

    def __init__(self, encoder: Any, encode: Callable[[Sequence[Message]], list[int]]):
        self.encoder, self.encode = encoder, encode

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)


def make_tools_source(
    sources: Sequence[str], functions: Sequence[Any], chat: ToolChat, sandbox: SandboxSettings
) -> Source:
    """Return where environment processes load the tools from: their files, or pickled functions."""
    schemas, format_name = list(chat.schemas), chat.format.name
    if any(source.startswith(OBJECT_PREFIX) for source in sources):
        import cloudpickle

        make = functools.partial(Tools, functions, schemas, format_name, sandbox=tuple(sandbox))
        make.prepare = functools.partial(prepare_tools, list(sources), tuple(sandbox))  # type: ignore[attr-defined]
        return Source("", {}, cloudpickle.dumps(make))
    settings = {"sources": list(sources), "schemas": schemas, "format_name": format_name, "sandbox": tuple(sandbox)}
    return Source("ascent.environments.tools:make_tools", settings)


def make_environment_source(source: str) -> Source:
    """Return where environment processes load an environment from: a textarena game, or the user's own."""
    if source.startswith(TEXTARENA):
        return Source("ascent.environments.textarena_games:TextarenaGame", {"game": source.removeprefix(TEXTARENA)})
    return Source(source, {}, pickle_object(source, "environment") if source.startswith(OBJECT_PREFIX) else None)
