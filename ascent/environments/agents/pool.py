"""Agents in processes: each episode in one of its own, forked from a warm one that has loaded the agent.

Whatever an agent does, only its episode ends: it runs under the limits, the clean environment variables and the keeper
that environments have (processes.py). The outcome comes back as JSON and is read here as somebody else's words.
"""

import itertools
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ascent.environments.agents.base import Assignment, Outcome
from ascent.environments.episode import Source
from ascent.environments.processes import Episodes, Reply
from ascent.tasks.calls import LARGEST, REASON, Wrong, read_number, whole_text
from ascent.tasks.keeper import Limits

GLANCE = 0.2
"""Seconds after which a run that waits lets others have the pool."""
MOST = 64
"""The most episodes at once. Others wait for their turn, outside their deadlines."""
METRICS, NAME = 32, 60
"""The most metrics of an episode, and characters of a metric's name."""
CLOSED = "its agent was closed"
FORM = "an agent returns a reward, None (the task scores the last answer), or {'reward': …, 'metrics': {…}}"


class PooledAgent:
    """An agent whose episodes are processes."""

    def __init__(self, source: Source, limits: Limits, most: int = MOST):
        self.pool = Episodes(source, limits, most, what="agent")
        self.lock, self.numbers = threading.Lock(), itertools.count()
        self.replies: dict[int, Reply] = {}
        """Of episodes that have ended, until their run takes them."""

    def run(self, assignments: Sequence[Assignment]) -> Iterator[tuple[int, Outcome]]:
        places: dict[int, int] = {}
        with self.lock:
            for place, assignment in enumerate(assignments):
                number = next(self.numbers)
                self.pool.begin(number, assignment, assignment.seed, assignment.seed, assignment.seconds)
                places[number] = place
        try:
            while places:
                for reply in self._ended(places):
                    yield places.pop(reply.episode), _outcome(reply)
        finally:
            with self.lock:
                for number in places:
                    self.pool.end(number)
                    self.replies.pop(number, None)

    def _ended(self, numbers: Mapping[int, int]) -> list[Reply]:
        """The replies of these that are there; waits a little for the first."""
        with self.lock:
            if not numbers.keys() & self.replies.keys():
                for reply in self.pool.answers(GLANCE):
                    self.pool.end(reply.episode)
                    self.replies[reply.episode] = reply
            ended = [self.replies.pop(number) for number in numbers if number in self.replies]
            lost = [number for number in numbers if number not in self.pool.rows] if not ended else []
        if not ended:
            time.sleep(0.001)  # a lock is nobody's turn: without a pause this thread would take it again
        return ended or [Reply(number, None, CLOSED, 0.0) for number in lost]

    def close(self) -> None:
        with self.lock:
            self.pool.close()


# ---- outcomes -------------------------------------------------------------------------------------------


def written_outcome(returned: Any) -> str:
    """What an agent returned, as the line that its process sends."""
    reward, metrics = returned, dict[str, Any]()
    if isinstance(returned, Mapping):
        if odd := [name for name in returned if name not in ("reward", "metrics")]:
            raise Wrong(f"returned a dict with {odd[0]!r:.40} in it: {FORM}")
        reward, metrics = returned.get("reward"), returned.get("metrics") or {}
    if not isinstance(metrics, Mapping) or len(metrics) > METRICS:
        raise Wrong(f"returned metrics that are not a dict of at most {METRICS} numbers: {FORM}")
    for name in metrics:
        if not isinstance(name, str) or not 0 < len(name) <= NAME:
            raise Wrong(f"returned the metric {name!r:.80}: its name is text of at most {NAME} characters")
    numbers = {name: read_number(value, f"the metric {name} is one finite number") for name, value in metrics.items()}
    return json.dumps({"reward": None if reward is None else read_number(reward, FORM), "metrics": numbers})


def _outcome(reply: Reply) -> Outcome:
    if reply.error is not None or reply.step is None:
        return Outcome(error=(reply.error or "it has no outcome")[: REASON * 2])
    return read_outcome(str(reply.step.observation))


def read_outcome(line: str) -> Outcome:
    """A line that a process sent, as an outcome."""
    try:
        sent = json.loads(line)
        reward, metrics, error = sent.get("reward"), sent.get("metrics") or {}, sent.get("error", "")
    except (ValueError, RecursionError, AttributeError):
        return Outcome(error="its process sent what is not an outcome")
    numbers = [*metrics.values(), *([] if reward is None else [reward])] if isinstance(metrics, dict) else [math.nan]
    if any(type(number) not in (int, float) or not abs(number) <= LARGEST for number in numbers):
        return Outcome(error="its process sent numbers that are not finite")
    if not isinstance(error, str) or len(metrics) > METRICS:
        return Outcome(error="its process sent what is not an outcome")
    kept = {whole_text(name)[:NAME]: float(value) for name, value in metrics.items()}
    return Outcome(None if reward is None else float(reward), whole_text(error)[: REASON * 2], kept)
