"""Agents in processes: one episode at a time in each, forked from a warm one that has loaded the agent.

Whatever an agent does, only its episode ends: it runs under the limits, the clean environment variables and the keeper
that environments have (processes.py). The outcome comes back as JSON and is read here as somebody else's words.

A process whose episode ended well, and of which nothing is left running, plays another: what a client imports and makes
on its first use would cost more than the episode itself.
"""

import itertools
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ascent.environments.agents.agent import AgentResult, Assignment
from ascent.environments.episode_pool import EpisodePool, Reply
from ascent.environments.episode_process import Source
from ascent.processes.reward_calls import (
    MAX_FLOAT32,
    MAX_REASON_CHARS,
    RewardCallError,
    read_number,
    replace_surrogates,
)
from ascent.processes.supervisor import Limits

POLL_SECONDS = 0.2
"""Seconds after which a run that waits lets others have the pool."""
MAX_EPISODES = 64
"""The most episodes at once. Others wait for their turn, outside their deadlines."""
MAX_IDLE_PROCESSES, MAX_EPISODES_PER_PROCESS = 256, 200
"""Processes that wait for another episode, and the most episodes of one."""
MAX_METRICS, MAX_METRIC_NAME_CHARS = 32, 60
"""The most metrics of an episode, and characters of a metric's name."""
CLOSED_ERROR = "its agent was closed"
REUSABLE_SUFFIX = "\n"
"""The end of an outcome whose process may play another episode."""
AGENT_RESULT_FORM = "an agent returns a reward, None (the task scores the answer), or {'reward': …, 'metrics': {…}}"


class PooledAgent:
    """An agent whose episodes are processes."""

    def __init__(self, source: Source, limits: Limits, most: int = MAX_EPISODES):
        self.pool = EpisodePool(source, limits, most, what="agent")
        self.lock, self.numbers = threading.Lock(), itertools.count()
        self.outcomes: dict[int, AgentResult] = {}
        """Of episodes that have ended, until their run takes them."""
        self.idle: dict[int, int] = {}
        """The processes that wait for an episode, and how many more they may play."""
        self.num_left: dict[int, int] = {}
        """The same of those that are playing."""

    def run(self, assignments: Sequence[Assignment]) -> Iterator[tuple[int, AgentResult]]:
        places: dict[int, int] = {}
        with self.lock:
            for place, assignment in enumerate(assignments):
                places[self._begin(assignment)] = place
        try:
            while places:
                for number, outcome in self._ended(places):
                    yield places.pop(number), outcome
        finally:
            with self.lock:
                for number in places:
                    self.pool.end(number)
                    for kept in (self.outcomes, self.num_left, self.idle):
                        kept.pop(number, None)

    def _begin(self, given: Assignment) -> int:
        """The number of the episode, in a process that waits for one or in a new one."""
        for number in [idle for idle in reversed(self.idle) if idle not in self.outcomes]:
            num_left = self.idle.pop(number)
            if num_left and self.pool.again(number, given, given.seed, given.seed, given.seconds):
                self.num_left[number] = num_left - 1
                return number
            self.pool.end(number)
        number = next(self.numbers)
        self.num_left[number] = MAX_EPISODES_PER_PROCESS - 1
        self.pool.begin(number, given, given.seed, given.seed, given.seconds)
        return number

    def _ended(self, numbers: Mapping[int, int]) -> list[tuple[int, AgentResult]]:
        """Those of these episodes that have ended; waits a little for the first."""
        with self.lock:
            if not numbers.keys() & self.outcomes.keys():
                for reply in self.pool.answers(POLL_SECONDS):
                    self._take(reply)
            ended = [(number, self.outcomes.pop(number)) for number in numbers if number in self.outcomes]
            lost = [number for number in numbers if number not in self.pool.episodes] if not ended else []
        if not ended:
            time.sleep(0.001)  # a lock is nobody's turn: without a pause this thread would take it again
        return ended or [(number, AgentResult(error=CLOSED_ERROR)) for number in lost]

    def _take(self, reply: Reply) -> None:
        """Keep the outcome, and the process if it may play another episode."""
        number, num_left = reply.episode, self.num_left.pop(reply.episode, 0)
        if reply.error is not None or reply.step is None:
            outcome, alone = AgentResult(error=(reply.error or "it has no outcome")[: MAX_REASON_CHARS * 2]), False
        else:
            line = str(reply.step.observation)
            outcome, alone = parse_outcome(line), line.endswith(REUSABLE_SUFFIX)
        self.outcomes[number] = outcome
        if alone and num_left and not outcome.error and len(self.idle) < MAX_IDLE_PROCESSES:
            self.idle[number] = num_left
        else:
            self.pool.end(number)

    def close(self) -> None:
        with self.lock:
            self.idle.clear()
            self.num_left.clear()
            self.pool.close()


# ---- outcomes -------------------------------------------------------------------------------------------


def format_outcome(returned: Any) -> str:
    """What an agent returned, as the line that its process sends."""
    reward, metrics = returned, dict[str, Any]()
    if isinstance(returned, Mapping):
        if odd := [name for name in returned if name not in ("reward", "metrics")]:
            raise RewardCallError(f"returned a dict with {odd[0]!r:.40} in it: {AGENT_RESULT_FORM}")
        reward, metrics = returned.get("reward"), returned.get("metrics") or {}
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise RewardCallError(
            f"returned metrics that are not a dict of at most {MAX_METRICS} numbers: {AGENT_RESULT_FORM}"
        )
    for name in metrics:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_METRIC_NAME_CHARS:
            raise RewardCallError(
                f"returned the metric {name!r:.80}: its name is text of at most {MAX_METRIC_NAME_CHARS} characters"
            )
    numbers = {name: read_number(value, f"the metric {name} is one finite number") for name, value in metrics.items()}
    line = json.dumps(
        {"reward": None if reward is None else read_number(reward, AGENT_RESULT_FORM), "metrics": numbers}
    )
    return line + REUSABLE_SUFFIX if _nothing_else_runs() else line


def _nothing_else_runs() -> bool:
    """Is nothing of the episode left but this process? Where that cannot be seen, it is not."""
    mine = str(os.getpid())
    try:
        below = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in (mine, os.getppid())]
    except OSError:
        return False
    return threading.active_count() == 1 and below == [[], [mine]]


def parse_outcome(line: str) -> AgentResult:
    """A line that a process sent, as an outcome."""
    try:
        sent = json.loads(line)
        reward, metrics, error = sent.get("reward"), sent.get("metrics") or {}, sent.get("error", "")
    except (ValueError, RecursionError, AttributeError):
        return AgentResult(error="its process sent what is not an outcome")
    numbers = [*metrics.values(), *([] if reward is None else [reward])] if isinstance(metrics, dict) else [math.nan]
    if any(type(number) not in (int, float) or not abs(number) <= MAX_FLOAT32 for number in numbers):
        return AgentResult(error="its process sent numbers that are not finite")
    if not isinstance(error, str) or len(metrics) > MAX_METRICS:
        return AgentResult(error="its process sent what is not an outcome")
    kept = {replace_surrogates(name)[:MAX_METRIC_NAME_CHARS]: float(value) for name, value in metrics.items()}
    return AgentResult(
        None if reward is None else float(reward), replace_surrogates(error)[: MAX_REASON_CHARS * 2], kept
    )
