"""Attacks by a judge: replies that are endless, deeply nested or slow to parse, and leaks of its key."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError, RunError
from ascent.rewards.judge import judge_client, judge_rewards, pattern_search
from ascent.rewards.judge.judge_client import JudgeClient
from ascent.rewards.judge.judge_rewards import JudgeScore, score_responses
from ascent.rewards.judge.judge_settings import Judge
from benchmarks.attacks.attempt import Attack

KIND = "judges"
KEY = "sk-attacks-8c31f0aa97"
QUADRATIC = r"(?im)^\W*score\W*?[:=]\W*?([-−]?\d+(?:\.\d+)?)(?:\s*/\s*\d+)?\W*$"
"""A score pattern with quadratic matching time."""


def chat(text: str, **more: Any) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}], **more}).encode()


class Server:
    """Answers with `reply` where a prompt says BAD, and with a score of 7 otherwise."""

    def __init__(self, reply: bytes, status: int = 200, endless: bool = False):
        self.keys: list[str | None] = []
        self.sent = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                asked = self.rfile.read(int(self.headers["Content-Length"]))
                server.keys.append(self.headers.get("Authorization"))
                bad = b"BAD" in asked
                body = reply if bad else chat("Score: 7")
                self.send_response(status if bad else 200)
                self.send_header("Connection" if bad and endless else "Content-Length", str(len(body)))
                self.end_headers()
                while True:
                    server.sent += self.wfile.write(body)
                    if not (bad and endless) or server.sent > 1 << 27:
                        break

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:  # the client is gone
                    self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@contextmanager
def scored_evaluation(folder: Path, server: Server, **settings: Any) -> Iterator[list[Any]]:
    """The scores of a response that the judge answers badly, and of one beside it."""
    os.environ["ATTACKS_JUDGE_KEY"] = KEY
    about = {"url": f"http://127.0.0.1:{server.port}/v1", "model": "m", "cache": str(folder / "cache.jsonl")}
    about |= {"key_env": "ATTACKS_JUDGE_KEY", "retries": 0, "again": 0, "timeout": 2.0, "deadline": 2.0, **settings}
    try:
        yield score_responses(JudgeClient(Judge(**about)), [("p", "BAD", None), ("p", "good", None)])
    except (ConfigError, RunError):
        raise
    except Exception as error:  # one bad answer ends all questions
        yield [error, error]


def neighbour_unharmed(
    reply: bytes, seconds: float = 5.0, status: int = 200, **settings: Any
) -> Callable[[Path], str | None]:
    """A bad answer may fail its own question and cost a little time; other questions are unaffected."""

    def attempt(folder: Path) -> str | None:
        began = time.monotonic()
        with scored_evaluation(folder, Server(reply, status), **settings) as (bad, good):
            if not isinstance(good, JudgeScore):
                return f"the question beside it has no score: {type(good).__name__}"
            if isinstance(bad, JudgeScore):
                return "it counts as a score"
        took = time.monotonic() - began
        return f"it took {took:.0f} s" if took > seconds else None

    return attempt


def endless(folder: Path) -> str | None:
    server = Server(b" " * 50_000, endless=True)
    with scored_evaluation(folder, server, max_tokens=10, timeout=5.0, deadline=5.0):
        return f"{server.sent >> 20} MiB were read" if server.sent > 20_000_000 else None


def key_recorded(text: str, usage: dict[str, Any], status: int = 200) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        with scored_evaluation(folder, Server(chat(text, usage=usage), status)) as found:
            said = (folder / "cache.jsonl").read_text() + "".join(map(str, found))
        parts = {KEY[i : i + 8] for i in range(len(KEY) - 7)}
        return "a part of the key is recorded" if any(part in said for part in parts) else None

    return attempt


def key_in_the_open(folder: Path) -> str | None:
    """0.0.0.0 is not a name of this machine, so far as names go, and yet the key would arrive here."""
    server = Server(chat("Score: 7"))
    try:
        with scored_evaluation(folder, server, url=f"http://0.0.0.0:{server.port}/v1"):
            pass
    except ConfigError:
        pass
    return "the key was sent over plain http" if any(key and KEY in key for key in server.keys) else None


# ---- without the defence ------------------------------------------------------------------------------------


def quadratic_pattern() -> None:
    judge_rewards.last_match = lambda _, text: pattern_search.last_match(QUADRATIC, text)


def search_here() -> None:
    pattern_search.PatternSearcher.last_match = lambda _, pattern, text, __: pattern_search.last_match(pattern, text)  # type: ignore


class Deep(Exception):
    """An exception that no code catches."""


def deep_json() -> None:
    loads = json.loads

    def uncaught(text: Any, **more: Any) -> Any:
        try:
            return loads(text, **more)
        except RecursionError:
            raise Deep from None

    judge_client.json = type(json)("json")
    vars(judge_client.json).update(vars(json) | {"loads": uncaught})


def any_size() -> None:
    judge_client.largest_reply = lambda _: 1 << 40


def echo_all() -> None:
    JudgeClient._masked = lambda _, text: text  # type: ignore[method-assign]
    judge_client.USAGE = (*judge_client.USAGE, KEY, KEY[:12])


def not_exposed() -> None:
    Judge.exposed = property(lambda _: False)  # type: ignore[assignment,method-assign]


def attacks(_: Path) -> list[Attack]:
    newlines, catastrophe = chat("\n" * 40_000), chat("1" * 60 + "x")
    own = {"score_pattern": r"^(?:Score: )?((?:\d+)+)$", "timeout": 2.0, "deadline": 1.0}
    deep = [
        (f"{status}, {word[:12]}", word, status)
        for status in (200, 400, 500)
        for word in ("[", '{"choices":[', '{"error":{"a":')
    ]
    echoes = {
        "in the answer": (f"you sent {KEY}. Score: 5", {}, 200),
        "cut in half": (f"you sent {KEY[:12]} and {KEY[12:]}. Score: 5", {}, 200),
        "in the names of a usage": ("Score: 5", {KEY: 3, KEY[:12]: 4}, 200),
        "in an error": (KEY, {}, 400),
    }
    return [
        Attack(KIND, "40,000 newlines", neighbour_unharmed(newlines), quadratic_pattern, hangs=True),
        Attack(KIND, "a pattern of one's own", neighbour_unharmed(catastrophe, **own), search_here, hangs=True),
        *(
            Attack(KIND, f"deep JSON: {name}", neighbour_unharmed((word * 5000).encode(), status=status), deep_json)
            for name, word, status in deep
        ),
        Attack(KIND, "an endless reply", endless, any_size),
        *(Attack(KIND, f"its key {where}", key_recorded(*words), echo_all) for where, words in echoes.items()),
        Attack(KIND, "its key over plain http", key_in_the_open, not_exposed),
    ]
