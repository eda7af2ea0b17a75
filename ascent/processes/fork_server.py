"""A process that loads user code once and forks a supervised process for every job.

    owner ── supervisor ── fork server ──┬─ supervisor ── job
                                         └─ supervisor ── job …

The supervisor of a job ends all that the job has started. It outlives the fork server, so jobs continue when the fork
server dies. Python's hash seed is fixed, so that the iteration order of sets is the same in every job.
"""

import functools
import gc
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ascent.processes.channel import (
    Channel,
    ChannelClosedError,
    PolledChannel,
    pickle_line,
    receive_fork_request,
    request_fork,
    unpickle_line,
)
from ascent.processes.reward_calls import RewardCallError, describe_error
from ascent.processes.supervisor import START_SECONDS, Limits, SupervisedProcess, supervise


class ForkServer(SupervisedProcess):
    """A fork server, seen from its owner."""

    def __init__(self, program: str, setup: Any, limits: Limits):
        """Start MODULE:FUNCTION, which calls `serve_forks`."""
        super().__init__(program, limits, is_fork_server=True, PYTHONHASHSEED="0", OMP_NUM_THREADS="1")
        self.channel.send(pickle_line(setup))
        self.deadline = time.monotonic() + START_SECONDS
        self.is_ready = False

    def fork(self) -> PolledChannel | None:
        """Ask for a process and return its channel; None: the server is busy, or it has ended."""
        try:
            return PolledChannel(request_fork(self.channel.socket))
        except (BlockingIOError, ConnectionError):
            self.channel.is_full = True
            return None

    def receive(self) -> str:
        """Read what the server says about its start. Return why it cannot be used, or nothing."""
        for reply in self.channel.receive_objects():
            if reply.keys() != {"ready"}:
                return f"{reply.get('error', 'it sent an unexpected message')!s:.300}"
            self.is_ready, self.deadline = True, math.inf
        return ""


def serve_forks(channel: Channel, end_files: Sequence[int], load: Callable[[Any], Callable[[Channel], None]]) -> None:
    """Load what jobs need, and fork for every request. `load` takes the setup and returns what runs in each job."""
    try:
        run = load(unpickle_line(channel.read_bytes()))
        if others := [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]:
            raise RewardCallError(f"its file starts a thread ({others[0]}) when it is imported: start threads in begin")
    except ChannelClosedError:
        return
    except BaseException as error:
        return channel.write({"error": describe_error(error)})
    gc.collect()
    gc.freeze()  # memory pages that a collection would write to stay shared with the forks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors that end leave no zombies
    channel.write({"ready": True})
    with suppress(ChannelClosedError):
        while True:
            end = receive_fork_request(channel.socket)
            if end is None:
                continue
            with end, suppress(OSError):
                try:
                    child = os.fork()
                except OSError as error:
                    Channel(end).write({"error": f"no process can be made for it: {error}"})
                    continue
                if child == 0:
                    channel.socket.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    job = Channel(end)
                    supervise(functools.partial(run, job), job, end_files)
