"""HTTP connections with deadlines and limited numbers.

uvicorn closes a connection that is idle after a response, but waits indefinitely for the rest of a request and for a
peer that does not read. Here a peer has a deadline whenever the server waits for it (to send a request or to read the
response), and the number of connections is limited per peer and in total. Beyond the limit, the connection with the
earliest deadline is closed, so that slow peers cannot keep out the others.
"""

import asyncio
import ipaddress
import itertools
import math
import socket
from typing import Any

import h11
import uvicorn
from starlette.types import Receive
from uvicorn.protocols.http.h11_impl import H11Protocol

from ascent.core.errors import ConfigError

PEER_SECONDS = 10.0
"""Seconds that a peer has to send a whole request, from the connection or the last response on, or to go on reading."""
CONNECTION_NUMBERS = itertools.count()


class Connection(H11Protocol):
    """An HTTP/1.1 connection with these limits, for `uvicorn.Config(http=Connection)`."""

    max_peer_connections, max_connections = 64, 512
    """Connections of one peer and in total. A browser opens six connections to a server."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._number = next(CONNECTION_NUMBERS)
        self._update_deadline()
        make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_deadline()

    def _update_deadline(self) -> None:
        """Start the deadline when the server begins to wait for the peer; cancel it when it no longer waits."""
        is_waiting = self.flow.write_paused or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_waiting and self._deadline is None:
            self._deadline = self.loop.call_later(PEER_SECONDS, self.transport.abort)
        elif not is_waiting:
            self._cancel_deadline()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    @property
    def due(self) -> tuple[float, int]:
        """The time of the deadline (infinite without one), then the order of arrival."""
        return math.inf if self._deadline is None else self._deadline.when(), self._number


def make_room(newcomer: Connection) -> None:
    """Close the connection with the earliest deadline if there are too many: the newcomer if no other has one."""
    connections = [each for each in newcomer.connections if isinstance(each, Connection)]
    connections = [each for each in connections if not each.transport.is_closing()]
    peers = [each for each in connections if each.client and newcomer.client and each.client[0] == newcomer.client[0]]
    if len(peers) > newcomer.max_peer_connections:
        connections = peers
    elif len(connections) <= newcomer.max_connections:
        return
    min(connections, key=lambda each: each.due).transport.abort()


def configure(application: Any, http: type[Connection], **options: Any) -> uvicorn.Config:
    """Return the uvicorn settings of all servers: HTTP only, without a log, and with limits on connections."""
    return uvicorn.Config(
        application,
        http=http,
        ws="none",
        lifespan="off",
        proxy_headers=False,  # headers of a peer do not decide its address
        server_header=False,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
        **options,
    )


def is_local(host: str) -> bool:
    """Return whether a host is the loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket: a browser that connects before the server is ready waits and is not refused."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen at this address ({reason}). Another server may use it: "
            "choose another --port, or 0 for a free one"
        ) from None


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
