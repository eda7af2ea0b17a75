"""`ascent serve`: a policy over real sockets, with standard and with misbehaving clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ascent.cli.main import main
from ascent.core.errors import ConfigError, RunError
from ascent.settings import configure
from ascent.workflows import policy_server
from ascent.workflows.loaded_policy import LoadedPolicy, model_policy, untrained_policy
from ascent.workflows.policy_server import PolicyServer, ServeSettings, running_service

pytestmark = pytest.mark.long
LONG = 60
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedPolicy:
    return model_policy(str(tiny_folder))


@contextmanager
def running(loaded: LoadedPolicy, **more: Any) -> Iterator[PolicyServer]:
    with running_service(
        loaded, ServeSettings(**{"port": 0, "rows": 4, "context": 1000, "cache": 1.0} | more)
    ) as service:
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            yield service
        finally:
            service.close()
            thread.join(LONG)
            assert not thread.is_alive()


def until(state: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not state():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def post(service: PolicyServer, body: bytes, path: str = "/v1/chat/completions", key: str | None = None) -> bytes:
    """Send raw bytes of an HTTP request and return the response."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key or service.key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def test_openai_client_chats_streams_and_calls_tools(loaded: LoadedPolicy) -> None:
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    with running(loaded) as service, openai.OpenAI(base_url=service.url, api_key=service.key) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        more: Any = {"model": "policy", "messages": HELLO, "seed": 3, "max_tokens": 30}
        said = client.chat.completions.create(**more, logprobs=True)
        assert said.usage and said.choices[0].logprobs and said.choices[0].logprobs.content
        assert said.usage.completion_tokens == len(said.choices[0].logprobs.content)
        text = ""
        for chunk in client.chat.completions.create(**more, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == said.choices[0].message.content
        tooled = client.chat.completions.create(**more, tools=[tool])
        assert tooled.usage and tooled.usage.prompt_tokens > said.usage.prompt_tokens
        plain = client.completions.create(model="policy", prompt="ab", max_tokens=5, seed=1)
        assert plain.usage and 1 <= plain.usage.completion_tokens <= 5
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(**more, temperature=-1)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=service.url, api_key="wrong", max_retries=0).models.list()


def test_disconnected_clients_free_their_batch_slots(loaded: LoadedPolicy) -> None:
    body = {"messages": HELLO, "max_tokens": 900, "stop": ["never to be said"], "seed": 2}
    with running(loaded, rows=1, queue=3) as service:
        with httpx.Client(headers={"authorization": f"Bearer {service.key}"}, timeout=LONG) as client:
            alone = client.post(f"{service.url}/chat/completions", json=body | {"max_tokens": 20}).json()
        port = service.server.port
        for stream in (False, True, False, True):
            with socket.create_connection(("127.0.0.1", port)) as leaving:
                leaving.sendall(post(service, json.dumps(body | {"stream": stream}).encode()))
                if stream:
                    assert leaving.recv(64)
                else:
                    until(lambda: bool(service.queue.active))
            until(lambda: not service.queue.active)
        with httpx.Client(headers={"authorization": f"Bearer {service.key}"}, timeout=LONG) as client:
            again = client.post(f"{service.url}/chat/completions", json=body | {"max_tokens": 20}).json()
        assert again["choices"] == alone["choices"]
        until(lambda: service.endpoint.counts["cancelled"] >= 1)


def test_misbehaving_clients_do_not_block_others(loaded: LoadedPolicy) -> None:
    with running(loaded, rows=2, queue=2) as service:
        stalled = [socket.create_connection(("127.0.0.1", service.server.port)) for _ in range(20)]
        try:
            for i, peer in enumerate(stalled):
                peer.sendall(
                    [b"POST /v1/chat", b"\x16\x03\x01\x00", post(service, b"{}" * 10)[:-5], b"GET / HTTP/9\r\n\r\n"][
                        i % 4
                    ]
                )

            async def flood() -> list[int]:
                headers = {"authorization": f"Bearer {service.key}"}
                async with httpx.AsyncClient(headers=headers, timeout=LONG) as client:
                    body = {"messages": HELLO, "max_tokens": 60}
                    asked = [client.post(f"{service.url}/chat/completions", json=body) for _ in range(40)]
                    return [answer.status_code for answer in await asyncio.gather(*asked)]

            codes = asyncio.run(flood())
            assert set(codes) <= {200, 429} and codes.count(200) >= 4
            with openai.OpenAI(base_url=service.url, api_key=service.key, max_retries=5) as client:
                assert client.chat.completions.create(model="policy", messages=HELLO, max_tokens=4).choices
        finally:
            [peer.close() for peer in stalled]


def test_session_continues_as_a_new_one_after_a_restart(loaded: LoadedPolicy) -> None:
    key, port = "k" * 40, 0
    messages = list(HELLO)
    kinds = []
    for _ in range(2):
        with running(loaded, key=key, port=port) as service:
            port = service.server.port
            headers = {"authorization": f"Bearer {key}", "x-session-id": "mine"}
            with httpx.Client(headers=headers, timeout=LONG) as client:
                for _ in range(2):
                    answer = client.post(
                        f"{service.url}/chat/completions", json={"messages": messages, "max_tokens": 5}
                    )
                    kinds.append(answer.headers["x-ascent-session"])
                    messages += [answer.json()["choices"][0]["message"], *HELLO]
    assert kinds == ["new", "extended", "new", "extended"]


def test_failed_engine_reports_an_error_and_restarts(loaded: LoadedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = policy_server.serve_requests, [0]

    def failing(sampler: Any, queue: Any, *more: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            until(lambda: bool(queue.active))
            raise RuntimeError("out of luck")
        return real(sampler, queue, *more)

    monkeypatch.setattr(policy_server, "serve_requests", failing)
    with running(loaded) as service, httpx.Client(headers={"authorization": f"Bearer {service.key}"}) as client:
        codes = [
            client.post(f"{service.url}/chat/completions", json={"messages": HELLO}, timeout=LONG).status_code
            for _ in range(2)
        ]
    assert codes == [503, 200]


def test_impossible_servers_are_rejected(tiny_folder: Path, tmp_path: Path, capsys: Any) -> None:
    open_file = tmp_path / "key"
    open_file.write_text("k" * 40)
    open_file.chmod(0o644)
    for words, why in (
        (["--host", "0.0.0.0"], "unencrypted"),
        (["--key-file", str(open_file)], "other users can read this file"),
        (["--rows", "-1"], "--rows"),
        (["--max-context", "100000"], "positions"),
        (["--cache", "0.0001"], "--cache"),
    ):
        assert main(["serve", str(tiny_folder), "--port", "0", *words]) == 2
        assert why in capsys.readouterr().err
    small = untrained_policy(configure("sort", {"length": 3}))
    with pytest.raises(ConfigError, match="numbers"):
        PolicyServer(small, ServeSettings(port=0), "x")


def test_three_consecutive_engine_failures_end_the_server(
    loaded: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(policy_server, "serve_requests", failing)
    said: list[str] = []
    failed = pytest.raises(RunError, match="the engine failed 3 times in a row: out of luck")
    with running_service(loaded, ServeSettings(port=0, rows=2, context=100, cache=1.0)) as service, failed:
        service.run(said.append)
    assert said == 3 * ["the engine failed and restarts: RuntimeError: out of luck"]


def test_model_without_a_chat_template_is_rejected(tiny_folder: Path) -> None:
    bare = model_policy(str(tiny_folder))
    bare.policy.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        PolicyServer(bare, ServeSettings(port=0), "x")


@pytest.mark.parametrize("own_key", [False, True])
def test_the_command_prints_where_the_policy_is_served(
    tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, own_key: bool
) -> None:
    def interrupted(service: PolicyServer, say: Callable[[str], None]) -> None:
        said.append(service)
        say("one line")
        raise KeyboardInterrupt

    said: list[PolicyServer] = []
    key, handler = tmp_path / "key", signal.getsignal(signal.SIGTERM)
    key.write_text("k" * 40)
    key.chmod(0o600)
    monkeypatch.setattr(PolicyServer, "run", interrupted)
    more = ["--key-file", str(key)] if own_key else []
    try:
        assert main(["serve", str(tiny_folder), "--port", "0", "--rows", "2", "--max-context", "100", *more]) == 130
    finally:
        signal.signal(signal.SIGTERM, handler)
    out, err = capsys.readouterr()
    (service,) = said
    lines = [f"{tiny_folder.name} is served at {service.url}: 2 requests at once, 100 tokens each."]
    if own_key:
        lines += ["The key is that of --key-file.", f"export OPENAI_BASE_URL={service.url}"]
        assert service.key == "k" * 40
    else:
        lines += [f"key: {service.key}", f"export OPENAI_BASE_URL={service.url} OPENAI_API_KEY={service.key}"]
    assert out.splitlines() == [*lines, "Press Ctrl-C to stop."] and err.startswith("one line\n")
    assert service.queue.closed


@pytest.mark.smoke
def test_the_command_serves_until_it_is_interrupted(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ascent", "serve", str(tiny_folder), "--port", "0", "--rows", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as served:
        assert served.stdout is not None
        lines = []
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append(served.stdout.readline())
            assert lines[-1], "it ended"
        url, key = lines[0].split(" at ")[1].split(": ")[0], lines[1].split(": ")[1].strip()
        with openai.OpenAI(base_url=url, api_key=key) as client:
            assert client.chat.completions.create(model="x", messages=HELLO, max_tokens=4).choices
        served.send_signal(signal.SIGINT)
        assert served.wait(LONG) == 130
