"""Agents: programs that call the policy over HTTP with any client and harness, one episode per response."""

import math

from ascent.environments.agents.agent import MODEL, Agent, AgentResult, Assignment
from ascent.processes.supervisor import Limits
from ascent.tasks.agent_sources import agent_source, verify_agent

__all__ = ["MODEL", "Agent", "AgentResult", "Assignment", "make_agent"]
NO_LIMITS = Limits(math.inf)
"""No limit of memory, and no environment variables beyond the usual ones."""


def make_agent(text: str, limits: Limits = NO_LIMITS, max_active: int = 64) -> Agent:
    """Return the agent that a setting names: python:FILE:NAME, command:WORDS, verifiers:NAME, openenv:URL.

    Raises ConfigError if it does not exist. No process starts before it runs. At most `max_active` episodes run at
    once. The time limit of an episode is that of its assignment; `limits` has its memory and environment variables.
    """
    from ascent.environments.agents.agent_pool import PooledAgent
    from ascent.environments.agents.function_agent import function_source
    from ascent.environments.agents.verifiers_agent import VerifiersAgent
    from ascent.environments.episode_process import Source

    source = agent_source(text)
    verify_agent(source)
    kind, _, where = source.partition(":")
    if kind == "verifiers":
        return VerifiersAgent(where, limits, max_active)
    if kind == "command":
        program = Source("ascent.environments.agents.command_agent:CommandAgent", {"command": where})
    elif kind == "openenv":
        program = Source("ascent.environments.agents.openenv_agent:make_openenv", {"url": where})
    else:
        program = function_source(source)
    return PooledAgent(program, limits, max_active)
