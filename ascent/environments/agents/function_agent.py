"""An agent that is a Python function: what runs in the process of its episode."""

import asyncio
import functools
import inspect
import random
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ascent.environments.agents.agent import Assignment
from ascent.environments.agents.agent_pool import format_outcome
from ascent.environments.episode_process import Source
from ascent.processes.user_code import load_code
from ascent.tasks.agent_sources import AgentSignature, read_agent_signature
from ascent.tasks.environment import Environment
from ascent.tasks.python_objects import OBJECT_PREFIX, pickle_object


def function_source(source: str) -> Source:
    """Return where the processes find the function."""
    sent = pickle_object(source, "agent") if source.startswith(OBJECT_PREFIX) else None
    return Source("ascent.environments.agents.function_agent:make_function", {"source": source, "sent": sent})


class FunctionAgent(Environment):
    """One episode of a function; it is over when `begin` returns."""

    def __init__(self, call: AgentSignature):
        self.call = call

    def begin(self, problem: Any, rng: random.Random) -> str:
        assignment: Assignment = problem
        returned = self.call(
            base_url=assignment.url,
            key=assignment.key,
            problem=assignment.problem,
            messages=[dict(message) for message in assignment.messages],
            seed=assignment.seed,
            seconds=assignment.seconds,
        )
        return format_outcome(_run(returned) if inspect.isawaitable(returned) else returned)


_loop: list[asyncio.AbstractEventLoop] = []
"""The event loop of this process: clients of the user's file keep their connections between episodes."""


def _run(awaited: Awaitable[Any]) -> Any:
    """Return the awaited value. Then no task and no thread of the episode continues."""
    if not _loop:
        _loop.append(asyncio.new_event_loop())
    (loop,) = _loop
    with ThreadPoolExecutor() as executor:
        loop.set_default_executor(executor)
        return loop.run_until_complete(_await_and_cancel_rest(awaited))


async def _await_and_cancel_rest(awaited: Awaitable[Any]) -> Any:
    try:
        return await awaited
    finally:
        unfinished = asyncio.all_tasks() - {asyncio.current_task()}
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


@functools.lru_cache
def _load(source: str, sent: bytes | None) -> AgentSignature:
    return read_agent_signature(load_code(source, sent))


def make_function(source: str, sent: bytes | None) -> FunctionAgent:
    return FunctionAgent(_load(source, sent))


make_function.prepare = _load  # type: ignore[attr-defined]
