"""Agents: programs that call the policy over HTTP with any client and harness, one episode per response.

An agent receives the URL of the run's endpoint, the API key of its session, and a problem. Its conversation with the
endpoint becomes the response; its return value becomes the reward.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ascent.tasks.text.text_task import Message, Problem

MODEL = "policy"
"""Name of the model at the endpoint of a run; any other name is accepted too."""


@dataclass(frozen=True)
class Assignment:
    """The input of an agent for one episode."""

    url: str
    """URL of the endpoint; ends in /v1."""
    key: str
    """Bearer key of the session: it gives access to this episode only."""
    problem: Problem
    messages: Sequence[Message]
    """The problem as the task asks it, with its system message and instruction."""
    seed: int
    seconds: float
    """The deadline of the whole episode."""


@dataclass(frozen=True)
class AgentResult:
    """How an episode ended."""

    reward: float | None = None
    """None: the task scores the final answer."""
    error: str = ""
    """Why the episode is invalid; it is then excluded from all statistics."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other measures of the episode, by name."""


class Agent(Protocol):
    """Runs episodes."""

    def run(self, assignments: Sequence[Assignment]) -> Iterator[tuple[int, AgentResult]]:
        """Run these concurrently; yield each index with its result when its episode ends, within its deadline.

        An agent that dies, hangs or raises yields a result with an error; the iterator itself does not raise. It is
        consumed in a separate thread; closing it ends what is still running.
        """

    def close(self) -> None:
        """End all processes of the agent."""
