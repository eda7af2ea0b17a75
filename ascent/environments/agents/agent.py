"""Agents: programs that talk to the policy over HTTP, one per response, with whatever client and harness they like.

An agent is given the address of the run's endpoint, a key that is its session's own, and a problem. What it says to
the endpoint and what the policy answers becomes the response; what the agent returns becomes its reward.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ascent.tasks.text.text_task import Message, Problem

MODEL = "policy"
"""What the endpoint of a run calls its model; it takes any other name too."""


@dataclass(frozen=True)
class Assignment:
    """What the agent of one episode is given."""

    url: str
    """Where the endpoint is; ends in /v1."""
    key: str
    """The session's own: a bearer key that reaches this episode's record, and no other."""
    problem: Problem
    messages: Sequence[Message]
    """The problem as the task asks it: with its system message and its instruction."""
    seed: int
    seconds: float
    """The deadline of the whole episode."""


@dataclass(frozen=True)
class AgentResult:
    """How an episode ended."""

    reward: float | None = None
    """None: the task scores the final answer."""
    error: str = ""
    """Why the episode is invalid: it is then in no statistic, whatever it has earned."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """More that was measured of it, by name."""


class Agent(Protocol):
    """Runs episodes."""

    def run(self, assignments: Sequence[Assignment]) -> Iterator[tuple[int, AgentResult]]:
        """Run these side by side; each place comes back once, as its episode ends, within its deadline.

        An agent that dies, hangs or raises is an outcome with an error, never an exception of this iterator. It is
        consumed in a thread of its own; closing it ends what is still running.
        """

    def close(self) -> None:
        """End all that was started."""
