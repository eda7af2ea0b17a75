"""Connections that nobody can hold open for nothing.

uvicorn ends a connection that is idle after an answer, and waits without end for the rest of a request, or for a
peer that does not read. Here a peer that owes something (a request, its rest, or reading the answer) has a deadline;
and a peer, and all of them together, have a limited number of connections. Beyond it, the connection that has owed
something for the longest time makes room: slow peers cannot keep out the others.
"""

import asyncio
import ipaddress
import itertools
import math
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ascent.core.errors import ConfigError

PATIENCE = 10.0
"""Seconds that a peer has for a whole request, from the connection or the last answer on; or to go on reading."""
NUMBERS = itertools.count()
MOST_OF_PEER, MOST_OPEN = 64, 512
"""Connections of one peer, and of all. A browser opens six to a server."""


class Connection(H11Protocol):
    """HTTP/1.1 with these limits, for `uvicorn.Config(http=Connection)`."""

    most_of_peer, most_open = MOST_OF_PEER, MOST_OPEN
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._number = next(NUMBERS)
        self._watch()
        make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def _watch(self) -> None:
        """The deadline begins when something is owed, and ends when nothing is."""
        owes = self.flow.write_paused or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if owes and self._deadline is None:
            self._deadline = self.loop.call_later(PATIENCE, self.transport.abort)
        elif not owes:
            self._forget()

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @property
    def due(self) -> tuple[float, int]:
        """When the deadline is over (never, if nothing is owed); and among equals, who came first."""
        return math.inf if self._deadline is None else self._deadline.when(), self._number


def make_room(newcomer: Connection) -> None:
    """End one connection where there are too many: the one that has owed something longest, or else the newcomer."""
    everyone = [one for one in newcomer.connections if isinstance(one, Connection) and not one.transport.is_closing()]
    peers = [one for one in everyone if one.client and newcomer.client and one.client[0] == newcomer.client[0]]
    crowd = peers if len(peers) > newcomer.most_of_peer else everyone if len(everyone) > newcomer.most_open else []
    if crowd:
        min(crowd, key=lambda one: one.due).transport.abort()


def configure(application: Any, http: type[Connection], **more: Any) -> uvicorn.Config:
    """How every server of ours runs: HTTP alone, without a log, and with these limits on its connections."""
    return uvicorn.Config(
        application,
        http=http,
        ws="none",
        lifespan="off",
        proxy_headers=False,  # a peer does not say who it is
        server_header=False,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
        **more,
    )


def is_local(host: str) -> bool:
    """Is that the loopback address?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """It listens at once: a browser that comes before the server is ready waits, and is not refused."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(where, family=family, dualstack_ipv6=both)
    except OSError as error:
        why = str(error.strerror).partition(" (while")[0]
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({why}). Another server may have it: choose another "
            "--port, or 0 for a free one"
        ) from None
