"""Messages over a socket between two processes, one per line.

A line of JSON can be read whatever the process at the other end wrote before it: a reader that finds nonsense continues
with the next line. Python objects are sent as base64 (`pickle_line`), and only to processes that may run our code.

`Channel` is the blocking end, of a process that answers. `PolledChannel` is the end of its owner, who waits for several
processes with a deadline and never blocks. The sandbox imports this module, so it imports little.
"""

import base64
import json
import os
import pickle
import select
import signal
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

CHUNK_BYTES = 1 << 16
"""Bytes that are read at once."""
MAX_MESSAGE_BYTES = 4 << 20
"""Bytes of a message that an owner reads, unless it sets another limit."""


CLOSED = "it closed its pipe"
"""How a process ended that sent no report."""


class ChannelClosedError(BaseException):
    """The other end of the channel is closed.

    It derives from BaseException so that user code which catches every Exception does not catch it.
    """


class Channel:
    """The blocking end of a channel. Reading raises ChannelClosedError when the other end is closed."""

    def __init__(self, end: socket.socket):
        self.socket, self.unread = end, b""

    def read(self) -> Any:
        return json.loads(self.read_bytes())

    def read_bytes(self) -> bytes:
        parts = [self.unread]
        while b"\n" not in parts[-1]:
            parts.append(self.socket.recv(CHUNK_BYTES))
            if not parts[-1]:
                raise ChannelClosedError
        line, _, self.unread = b"".join(parts).partition(b"\n")
        return line

    def write(self, value: Any, prefix: bytes = b"") -> None:
        self.socket.sendall(prefix + json.dumps(value).encode() + b"\n")

    def report_exit(self, exit_code: int | None) -> None:
        """Send how the process of this channel ended, as the last message. Never blocks and never raises."""
        with suppress(OSError):
            self.socket.setblocking(False)
            # The process may have died in the middle of a message, so the report begins a new line.
            self.socket.sendall(b"\n" + json.dumps({"ended": describe_exit(exit_code)}).encode() + b"\n")


class PolledChannel:
    """The owner's end of a channel. No method blocks."""

    def __init__(self, end: socket.socket, max_bytes: int = MAX_MESSAGE_BYTES):
        end.setblocking(False)
        self.socket, self.max_bytes = end, max_bytes
        self.unsent = memoryview(b"")
        self.unread = b""
        """The beginning of a message that is not complete yet."""
        self.is_full = False
        """The socket took no more; `poll_channels` resets it when there is room again."""
        self.ended = ""
        """How the process ended, once it has: its exit status or signal, or that it closed the channel."""

    def send(self, line: bytes) -> None:
        """Send a message, now or in `poll_channels`. A process that ended does not raise: reading shows it."""
        self.unsent = memoryview(bytes(self.unsent) + line + b"\n")
        self.flush()

    def flush(self) -> None:
        self.is_full = False
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            self.is_full = True
        except OSError:
            self.unsent = memoryview(b"")

    def wait_until_sent(self, until: float) -> bool:
        """Wait until everything is sent, or the process has ended; False: not until this moment."""
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        while self.is_full and poll.poll(1000 * max(0.0, until - time.monotonic())):
            self.flush()
        return not self.is_full

    @property
    def is_too_long(self) -> bool:
        """Whether the message that is being read is longer than `max_bytes`."""
        return len(self.unread) > self.max_bytes

    @property
    def is_silent(self) -> bool:
        """Whether the channel is open and nothing has arrived."""
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived completely."""
        parts, is_closed = [self.unread], False
        try:
            while not is_closed and sum(map(len, parts)) <= self.max_bytes:
                parts.append(self.socket.recv(CHUNK_BYTES))
                is_closed = not parts[-1]
        except BlockingIOError:
            pass
        except OSError:
            is_closed = True
        *lines, self.unread = b"".join(parts).split(b"\n")
        messages = []
        for line in lines:
            if line.startswith(b'{"ended": '):
                self.ended = self.ended or f"{parse_object(line).get('ended')!s:.40}"
            elif line:
                messages.append(line)
        if is_closed:
            self.ended = self.ended or CLOSED
        return messages

    def receive_objects(self) -> list[dict[str, Any]]:
        """Return the messages as JSON objects; what is not one is an empty object."""
        return [parse_object(line) for line in self.receive()]

    def hang_up(self) -> None:
        """Close the channel, also for forks of this process that hold it too."""
        hang_up(self.socket)


def poll_channels(channels: Iterable[PolledChannel], seconds: float) -> list[PolledChannel]:
    """Wait for messages on any of these channels; send what was unsent. Return the channels that can be read."""
    poll, by_file = select.poll(), dict[int, PolledChannel]()
    for channel in channels:
        by_file[channel.socket.fileno()] = channel
        poll.register(channel.socket, select.POLLIN | (select.POLLOUT if channel.is_full else 0))
    readable = []
    for file, event in poll.poll(1000 * max(0.0, seconds)):
        if event & select.POLLOUT:
            by_file[file].flush()
        if event & ~select.POLLOUT:
            readable.append(by_file[file])
    return readable


def hang_up(end: socket.socket) -> None:
    """Shut the socket down and close it. A fork of this process may hold it too, so closing alone is not enough."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def describe_exit(code: int | None) -> str:
    """How a process ended, by its exit code."""
    if code is None or code >= 0:
        return CLOSED if code is None else f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # real-time signals have no name
        return f"signal {-code}"


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object in this line, or an empty one."""
    with suppress(ValueError, RecursionError):
        value = json.loads(line)
        if isinstance(value, dict):
            return value
    return {}


def pickle_line(value: Any) -> bytes:
    return base64.b64encode(pickle.dumps(value))


def unpickle_line(line: bytes) -> Any:
    return pickle.loads(base64.b64decode(line))


def request_fork(control: socket.socket) -> socket.socket:
    """Ask a fork server for a process and return our end of its channel. OSError: the server ended or is busy."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(control, [b"."], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours


def receive_fork_request(control: socket.socket) -> socket.socket | None:
    """Wait, in a fork server, for the channel of the next process; None: it did not arrive."""
    byte, files, *_ = socket.recv_fds(control, 1, 1)
    if not byte:
        raise ChannelClosedError
    if not files:
        return None
    os.set_inheritable(files[0], False)
    return socket.socket(fileno=files[0])
