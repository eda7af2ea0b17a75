"""A small server that speaks as an OpenAI-compatible address does, and misbehaves as it is told to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the server does with one request."""

    text: str | None = "Score: 7"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """The body itself, in place of a chat's."""
    delay: float = 0.0
    drop: bool = False
    """Close the connection without a word."""
    trickle: float = 0.0
    """Seconds between single bytes."""
    finish: str = "stop"
    endless: bool = False
    """Send the body again and again, until nobody reads it."""


class FakeJudge:
    """Answers each request with `behave(prompt, number)`, numbers counting the requests from 0."""

    def __init__(self, behave: Callable[[str, int], Reply]):
        self.behave = behave
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.peak = self.sent = 0
        self.lock = threading.Lock()
        self.url = ""

    @property
    def count(self) -> int:
        return len(self.bodies)

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self.busy += 1
            self.peak = max(self.peak, self.busy)
        try:
            reply = self.behave(body["messages"][-1]["content"], number)
            time.sleep(reply.delay)
        finally:
            with self.lock:
                self.busy -= 1
        if reply.drop:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        choice = {"index": 0, "message": {"role": "assistant", "content": reply.text}, "finish_reason": reply.finish}
        usage = {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
        about = {"id": f"chat-{number}", "object": "chat.completion", "created": 0, "model": body.get("model")}
        chat = about | {"choices": [choice], "usage": usage}
        sent = reply.raw if reply.raw is not None else json.dumps(chat).encode()
        handler.send_response(reply.status)
        if reply.endless:
            handler.send_header("Connection", "close")
            handler.end_headers()
            while True:
                self.sent += handler.wfile.write(sent)
        for name, value in {"Content-Length": str(len(sent)), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        for byte in [sent] if not reply.trickle else [sent[i : i + 1] for i in range(len(sent))]:
            handler.wfile.write(byte)
            handler.wfile.flush()
            time.sleep(reply.trickle)


@contextmanager
def serving(behave: Callable[[str, int], Reply]) -> Iterator[FakeJudge]:
    judge = FakeJudge(behave)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            try:
                judge.take(self)
            except (OSError, ValueError):  # whoever asked has gone
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=lambda: server.serve_forever(0.01), daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
