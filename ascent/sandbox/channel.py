"""A job's own end of its line: one JSON value per line of text, both ways."""

import json
import socket
from typing import Any

PART = 1 << 16


class ChannelClosedError(BaseException):
    """The other end is gone, and so the job is over. No code in a job catches it by catching what goes wrong."""


class Line:
    """Reads and writes, one value after the other; `Closed` at the end."""

    def __init__(self, end: socket.socket):
        self.socket, self.rest = end, b""

    def read(self) -> Any:
        return json.loads(self.read_bytes())

    def read_bytes(self) -> bytes:
        parts = [self.rest]
        while b"\n" not in parts[-1]:
            parts.append(self.socket.recv(PART))
            if not parts[-1]:
                raise ChannelClosedError
        whole, _, self.rest = b"".join(parts).partition(b"\n")
        return whole

    def write(self, value: Any, prefix: bytes = b"") -> None:
        self.socket.sendall(prefix + json.dumps(value).encode() + b"\n")
