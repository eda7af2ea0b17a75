"""Agents: programs that talk to the policy over HTTP, one per response, with whatever client and harness they like."""

import math

from ascent.environments.agents.agent import MODEL, Agent, AgentResult, Assignment
from ascent.processes.supervisor import Limits
from ascent.tasks.agent_sources import agent_source, verify_agent

__all__ = ["MODEL", "Agent", "AgentResult", "Assignment", "make_agent"]
NO_LIMITS = Limits(math.inf)
"""No limit of memory, and no environment variables beyond the usual ones."""


def make_agent(text: str, limits: Limits = NO_LIMITS, most: int = 64) -> Agent:
    """The agent that a setting names: python:FILE:NAME, command:WORDS, verifiers:NAME, openenv:URL.

    ConfigError if it is not there; nothing is started before it runs. At most `most` episodes are run at once. The
    episode's
    seconds are its assignment's; memory and environment variables are those of `limits`.
    """
    from ascent.environments.agents.agent_pool import PooledAgent
    from ascent.environments.agents.function_agent import function_source
    from ascent.environments.agents.verifiers_agent import VerifiersAgent
    from ascent.environments.episode_process import Source

    source = agent_source(text)
    verify_agent(source)
    kind, _, where = source.partition(":")
    if kind == "verifiers":
        return VerifiersAgent(where, limits, most)
    if kind == "command":
        return PooledAgent(
            Source("ascent.environments.agents.command_agent:CommandAgent", {"command": where}), limits, most
        )
    if kind == "openenv":
        return PooledAgent(
            Source("ascent.environments.agents.openenv_agent:make_openenv", {"url": where}), limits, most
        )
    return PooledAgent(function_source(source), limits, most)
