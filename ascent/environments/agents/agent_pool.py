"""Agents in processes, forked from a fork server that has loaded the agent; one episode at a time in each.

A failing agent ends only its episode: it has the limits, the environment variables and the supervisor of environments
(`episode_pool.py`). Its outcome comes back as JSON, which is untrusted.

A process whose episode ended well, and that left no thread or child running, is reused for another episode: what a
client imports and opens on its first use would cost more than the episode itself.
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
"""Time after which a waiting run releases the pool for other runs."""
MAX_EPISODES = 64
"""Limit of concurrent episodes. Others are queued, and their time limit starts later."""
MAX_IDLE_PROCESSES, MAX_EPISODES_PER_PROCESS = 256, 200
"""Limits of the processes that wait for another episode, and of the episodes of one process."""
MAX_METRICS, MAX_METRIC_NAME_CHARS = 32, 60
"""Limits of the metrics of an episode, and of the characters of a metric's name."""
CLOSED_ERROR = "its agent was closed"
REUSABLE_SUFFIX = "\n"
"""Ends an outcome whose process can be reused."""
AGENT_RESULT_FORM = "an agent returns a reward, None (the task scores the answer), or {'reward': …, 'metrics': {…}}"


class PooledAgent:
    """An agent whose episodes run in processes."""

    def __init__(self, source: Source, limits: Limits, max_active: int = MAX_EPISODES):
        self.pool = EpisodePool(source, limits, max_active, kind="agent")
        self.lock, self.numbers = threading.Lock(), itertools.count()
        self.results: dict[int, AgentResult] = {}
        """Results of episodes that have ended, until their run takes them."""
        self.idle: dict[int, int] = {}
        """Waiting processes by their last episode, and how many more episodes each may play."""
        self.num_left: dict[int, int] = {}
        """The same for processes that are playing."""

    def run(self, assignments: Sequence[Assignment]) -> Iterator[tuple[int, AgentResult]]:
        places: dict[int, int] = {}
        with self.lock:
            for place, assignment in enumerate(assignments):
                places[self._begin(assignment)] = place
        try:
            while places:
                for number, result in self._wait_for_results(places):
                    yield places.pop(number), result
        finally:
            with self.lock:
                for number in places:
                    self.pool.end(number)
                    for container in (self.results, self.num_left, self.idle):
                        container.pop(number, None)

    def _begin(self, assignment: Assignment) -> int:
        """Begin an episode, in a waiting process or in a new one. Return its number."""
        seed, seconds = assignment.seed, assignment.seconds
        for number in [idle for idle in reversed(self.idle) if idle not in self.results]:
            num_left = self.idle.pop(number)
            if num_left and self.pool.reuse_process(number, assignment, seed, seed, seconds):
                self.num_left[number] = num_left - 1
                return number
            self.pool.end(number)
        number = next(self.numbers)
        self.num_left[number] = MAX_EPISODES_PER_PROCESS - 1
        self.pool.begin(number, assignment, seed, seed, seconds)
        return number

    def _wait_for_results(self, numbers: Mapping[int, int]) -> list[tuple[int, AgentResult]]:
        """Return the results of these episodes that have ended; wait a little for the first."""
        with self.lock:
            if not numbers.keys() & self.results.keys():
                for reply in self.pool.wait_for_replies(POLL_SECONDS):
                    self._store_result(reply)
            ended = [(number, self.results.pop(number)) for number in numbers if number in self.results]
            lost = [number for number in numbers if number not in self.pool.episodes] if not ended else []
        if not ended:
            time.sleep(0.001)  # locks are not fair: without a pause this thread would take it again
        return ended or [(number, AgentResult(error=CLOSED_ERROR)) for number in lost]

    def _store_result(self, reply: Reply) -> None:
        """Store the result of an episode, and keep its process if it can be reused."""
        number, num_left = reply.episode, self.num_left.pop(reply.episode, 0)
        if reply.error is not None or reply.step is None:
            result, is_reusable = AgentResult(error=(reply.error or "it has no outcome")[: MAX_REASON_CHARS * 2]), False
        else:
            line = str(reply.step.observation)
            result, is_reusable = parse_outcome(line), line.endswith(REUSABLE_SUFFIX)
        self.results[number] = result
        if is_reusable and num_left and not result.error and len(self.idle) < MAX_IDLE_PROCESSES:
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
    """Return what an agent returned as the message of its process."""
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
    """Whether the episode left no thread or child process. False where that cannot be seen."""
    pid = str(os.getpid())
    try:
        children = [
            Path(f"/proc/{parent}/task/{parent}/children").read_text().split() for parent in (pid, os.getppid())
        ]
    except OSError:
        return False
    return threading.active_count() == 1 and children == [[], [pid]]


def parse_outcome(line: str) -> AgentResult:
    """Parse the untrusted message of a process."""
    try:
        message = json.loads(line)
        reward, metrics, error = message.get("reward"), message.get("metrics") or {}, message.get("error", "")
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
