"""An agent that runs an environment of verifiers in a supervised process of the virtual environment of verifiers.

The process (inside/verifiers_bridge.py) runs all episodes concurrently. An episode that misses its deadline is given
up. If the process dies or no longer answers, its episodes are invalid and the next ones get a new process. A row's
column `task` is the number of its task in the taskset.
"""

import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.environments.agents.agent import AgentResult, Assignment
from ascent.environments.agents.agent_pool import CLOSED_ERROR, POLL_SECONDS, parse_outcome
from ascent.processes.channel import Channel, poll_channels
from ascent.processes.reward_calls import MAX_REASON_CHARS
from ascent.processes.supervisor import START_SECONDS, Limits, SupervisedProcess
from ascent.tasks.agent_sources import split_verifiers

BRIDGE = Path(__file__).parent / "inside" / "verifiers_bridge.py"
GRACE_SECONDS = 10.0
"""Time after an episode's deadline until its process is killed because it has not reported the timeout."""


class VerifiersAgent:
    """An agent that runs the episodes of a taskset."""

    def __init__(self, where: str, limits: Limits, max_active: int):
        self.taskset, self.folder = split_verifiers(where)
        self.limits, self.max_active, self.owner = limits, max_active, os.getpid()
        self.lock, self.numbers = threading.Lock(), itertools.count()
        self.processes: list[VerifiersProcess] = []
        """The process, if it is running."""
        self.deadlines: dict[int, tuple[float, float]] = {}
        """Time limit and deadline of each running episode."""
        self.results: dict[int, AgentResult] = {}
        """Results of episodes that have ended, until their run takes them."""
        weakref.finalize(self, _end, self.processes, self.owner)

    def run(self, assignments: Sequence[Assignment]) -> Iterator[tuple[int, AgentResult]]:
        places: dict[int, int] = {}
        with self.lock:
            process = self._process()
            for place, assignment in enumerate(assignments):
                number = next(self.numbers)
                job = {"id": number, "url": assignment.url, "key": assignment.key, "seconds": assignment.seconds}
                process.channel.send(json.dumps(job | {"task": assignment.problem.columns.get("task")}).encode())
                places[number], self.deadlines[number] = place, (assignment.seconds, float("inf"))
        try:
            while places:
                for number, result in self._wait_for_results(places):
                    yield places.pop(number), result
        finally:
            with self.lock:
                for number in places:
                    self.deadlines.pop(number, None)
                    self.results.pop(number, None)
                    if self.processes:
                        self.processes[0].channel.send(json.dumps({"cancel": number}).encode())

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Return the first tasks of the taskset, as rows to train on."""
        with self.lock:
            process, until = self._process(), time.monotonic() + START_SECONDS
            process.channel.send(json.dumps({"rows": count}).encode())
            while time.monotonic() < until and self.processes:
                for reply in process.receive(POLL_SECONDS):
                    if isinstance(reply.get("rows"), list):
                        return reply["rows"]
                    if isinstance(reply.get("error"), str):
                        raise ConfigError(
                            f"--agent verifiers:{self.taskset}: it cannot be loaded: {reply['error']:.300}"
                        )
                if process.channel.ended:
                    break
            self._end()
        raise ConfigError(f"--agent verifiers:{self.taskset}: the process of verifiers ended without an answer")

    def close(self) -> None:
        with self.lock:
            self.deadlines.clear()
            self._end()

    # ---- the process

    def _process(self) -> "VerifiersProcess":
        if self.owner != os.getpid():  # a fork: the process belongs to its parent
            self.processes[:], self.owner = [], os.getpid()
        if not self.processes:
            self.processes.append(VerifiersProcess(self.folder, self.taskset, self.max_active, self.limits))
        return self.processes[0]

    def _end(self) -> None:
        _end(self.processes, os.getpid())

    def _wait_for_results(self, places: dict[int, int]) -> list[tuple[int, AgentResult]]:
        """Return the results of these episodes that have ended; wait a little for the first."""
        with self.lock:
            if not places.keys() & self.results.keys() and self.processes:
                self._read(self.processes[0])
            ended = [(number, self.results.pop(number)) for number in places if number in self.results]
            lost = [number for number in places if number not in self.deadlines] if not ended else []
        if not ended:
            time.sleep(0.001)  # locks are not fair: without a pause this thread would take it again
        return ended or [(number, AgentResult(error=CLOSED_ERROR)) for number in lost]

    def _read(self, process: "VerifiersProcess") -> None:
        for reply in process.receive(POLL_SECONDS):
            number = reply.get("began")
            if isinstance(number, int) and number in self.deadlines:
                seconds, _ = self.deadlines[number]
                self.deadlines[number] = seconds, time.monotonic() + seconds + GRACE_SECONDS
            elif "error" in reply and "id" not in reply:
                return self._drop_process(f"its taskset cannot be loaded: {reply['error']!s:.300}")
            elif self.deadlines.pop(reply.get("id", -1), None) is not None:
                self.results[reply["id"]] = parse_outcome(json.dumps(reply))
        now = time.monotonic()
        if process.channel.ended:
            self._drop_process(f"the process of verifiers ended: {process.channel.ended}")
        elif not process.is_ready and now > process.deadline:
            self._drop_process(f"the process of verifiers did not start within {START_SECONDS:g} s")
        elif any(now > deadline for _, deadline in self.deadlines.values()):
            self._drop_process("the process of verifiers no longer answers")

    def _drop_process(self, why: str) -> None:
        """End the process. Its episodes have failed; the next ones get another process."""
        self.results |= {number: AgentResult(error=why[: MAX_REASON_CHARS * 2]) for number in self.deadlines}
        self.deadlines.clear()
        self._end()


def _end(processes: "list[VerifiersProcess]", owner: int) -> None:
    while processes and os.getpid() == owner:
        processes.pop().end()


class VerifiersProcess(SupervisedProcess):
    """The process of verifiers."""

    def __init__(self, folder: str, taskset: str, max_active: int, limits: Limits):
        command = [str(Path(folder, "bin", "python")), str(BRIDGE), taskset, str(max_active)]
        program = "ascent.environments.agents.verifiers_agent:exec_bridge"
        super().__init__(program, limits, ASCENT_BRIDGE=json.dumps(command))
        self.is_ready, self.deadline = False, time.monotonic() + START_SECONDS

    def receive(self, wait: float) -> list[dict[str, Any]]:
        """Return its replies; wait at most `wait` seconds for the first."""
        replies = self.channel.receive_objects() if poll_channels([self.channel], wait) else []
        self.is_ready = self.is_ready or any("ready" in reply for reply in replies)
        return replies


def exec_bridge(channel: Channel) -> None:
    """Become the process of verifiers: the channel is its stdin and stdout."""
    command = json.loads(os.environ["ASCENT_BRIDGE"])
    os.dup2(channel.socket.fileno(), 0)
    os.dup2(channel.socket.fileno(), 1)
    hidden = ("ASCENT_BRIDGE", "VIRTUAL_ENV")
    names = [name for name in os.environ if name not in hidden and not name.startswith("PYTHON")]
    with suppress(OSError):
        os.execve(command[0], command, {name: os.environ[name] for name in names})
