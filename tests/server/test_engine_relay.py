"""`ascent engine`: training through a relay, and requests that the relay refuses."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import socket
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from starlette.exceptions import HTTPException
from transformers import AutoModelForCausalLM

import ascent
from ascent.cli.engine import EngineCommand
from ascent.core.errors import ConfigError, RunError
from ascent.inference.remote import weight_files, weight_probe
from ascent.inference.remote.adapters import get_adapter
from ascent.inference.remote.engine_adapter import EngineRequest, EngineResponse
from ascent.inference.remote.relay_client import read_key
from ascent.inference.remote.server_client import ServerClient, ServerLostError
from ascent.models import CausalLM
from ascent.server import engine_relay as relay_module
from ascent.server.engine_relay import Relay, relay_server
from ascent.settings import configure
from tests.inference.remote.test_remote_engine import (
    EngineSetup,
    assert_same_tokens,
    every_engine,
    max_logprob_error,
    stack,
)
from tests.language import write_tiny
from tests.processes import ascent_process
from tests.stand_in import StandIn, serving

__all__ = ["stack"]  # a fixture
KEY = "correct-horse-battery-staple"
PATHS = ("/health", "/about", "/greet", "/generate", "/weights", "/load", "/collective_rpc", "/", "/nothing")


class Relaying:
    """A relay in a thread of this process, and its URL."""

    def __init__(self, url: str, engine: str, limit: int):
        self.client = ServerClient(url, get_adapter(engine), 8, 20.0)
        self.relay = Relay(self.client, KEY, limit)
        self.server, self.listening = relay_server(self.relay, "127.0.0.1", 0)
        self.port = self.listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(timeout=60, trust_env=False, verify=False)

    def ask(self, method: str, path: str, key: str = KEY, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} | more.pop("headers", {})
        return self.http.request(method, self.url + path, headers=headers, **more)


@contextmanager
def relaying(url: str, engine: str = "vllm", limit: int = 2**30) -> Iterator[Relaying]:
    one = Relaying(url, engine, limit)
    thread = threading.Thread(target=one.server.run, kwargs={"sockets": [one.listening]})
    thread.start()
    try:
        until(lambda: one.server.started)
        yield one
    finally:
        one.server.should_exit = True
        thread.join()
        one.relay.close(), one.http.close()


def until(happened: Any) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="module")
def quiet() -> Iterator[Relaying]:
    """A relay whose engine must not receive requests."""
    with relaying("http://127.0.0.1:9") as one:

        async def never(*_: Any, **__: Any) -> Any:
            raise AssertionError("the engine was reached")

        one.client.call = never  # type: ignore[method-assign]
        yield one


# ---- what it does ------------------------------------------------------------------------------------


@every_engine
@pytest.mark.long
def test_rollouts_and_weights_go_through_a_relay(
    stack: ExitStack, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setenv("A_KEY", KEY)
    relays: list[Relaying] = []

    def through(server: StandIn) -> str:
        relays.append(stack.enter_context(relaying(server.url, engine)))
        return relays[-1].url + "/"

    setup = EngineSetup(stack, servers=2, engine=engine, through=through, policy={"engine_key_env": "A_KEY"})
    for version in (0, 1):
        setup.load(version)
        rollouts = setup.generate(samples=4)
        assert max_logprob_error(setup.lm, rollouts) < 1e-5 and (rollouts.version == version).all()
        setup.perturb_weights()
    assert_same_tokens(setup.generate(samples=4), rollouts)
    assert not list(tmp_path.iterdir()), "weights take memory: none are left on either side"
    assert all(server.received for server in setup.servers)
    setup.server.forget = "lm_head.weight"
    with pytest.raises(RunError, match="does not sample from this policy"):
        setup.load(2)


@every_engine
@pytest.mark.long
def test_a_response_is_streamed_through_a_relay(stack: ExitStack, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)

    relays: list[Relaying] = []

    def through(server: StandIn) -> str:
        relays.append(stack.enter_context(relaying(server.url, engine)))
        return relays[-1].url

    setup = EngineSetup(stack, engine=engine, through=through, policy={"engine_key_env": "A_KEY"})
    setup.load(0)
    request, server_pool = EngineRequest([5, 6, 7], 8, 0.7, 3, (0,), (5, 0.9, 0.01)), setup.engine.server_pool
    whole, pieces = server_pool.submit(0, 0, request)[1].result(60), list[EngineResponse]()
    answer = server_pool.submit(0, 0, request, pieces.append)[1].result(60)
    assert answer == whole and pieces[-1].tokens == whole.tokens and len(pieces) > 2
    for piece in pieces:
        assert piece.tokens == whole.tokens[: len(piece.tokens)] and piece.logp == whole.logp[: len(piece.tokens)]
    setup.server.kills = [3]
    with pytest.raises(ServerLostError):
        server_pool.submit(0, 0, request, pieces.append)[1].result(60)
    setup.load(1)
    setup.server.hold_at = 2
    slots = relays[0].client.slots
    free, asked = slots.free, server_pool.submit(0, 0, request, pieces.append)[1]
    until(lambda: setup.server.held == 1 and slots.free == free - 1)
    asked.cancel()  # nobody waits any more, and so the relay does not
    until(lambda: slots.free == free)
    with setup.server.lock:
        setup.server.hold_at = -1
        setup.server.lock.notify_all()


@pytest.mark.long
def test_a_run_is_trained_through_a_relay(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (
        monkeypatch.setattr(weight_probe, "MAX_PROMPT_TOKENS", 24),
        monkeypatch.setattr(weight_probe, "MAX_RESPONSE_TOKENS", 8),
    )
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    model = write_tiny(tmp_path / "tiny", max_position_embeddings=128)
    rows = [{"prompt": f"{i}+{i}", "answer": str(2 * i)} for i in range(8)]
    server = stack.enter_context(serving(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)))
    url = stack.enter_context(relaying(server.url)).url
    engine = {"engine": "vllm", "engine.url": url, "engine.key_file": str(tmp_path / "key"), "policy.device": "cpu"}
    size = {"steps": 1, "prompts": 2, "samples": 2, "max_tokens": 4, "eval_prompts": 2, "max_prompt": 64, "threads": 1}
    run = ascent.train(rows, model=str(model), out=tmp_path / "run", show=False, **engine, **size)
    assert run.status == "finished" and run.metrics[0]["sampling/sampling_logp_difference/mean"] < 1e-5
    assert server.calls.count("/update_weights") == 2
    assert not any(KEY in path.read_text(errors="replace") for path in run.folder.rglob("*") if path.is_file())


@pytest.mark.long
def test_an_engine_that_dies_behind_its_relay_loses_nothing(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    through = lambda server: stack.enter_context(relaying(server.url)).url  # noqa: E731
    setup = EngineSetup(stack, servers=2, through=through, policy={"engine_key_env": "A_KEY"})
    setup.load(0)
    expected = setup.generate(samples=4)
    setup.server.die_after = len(setup.server.asked) + 3
    assert_same_tokens(setup.generate(samples=4), expected)
    assert setup.engine.server_pool.servers[0].is_down


@pytest.mark.long
def test_wrong_key_or_engine_is_reported(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY + "x")
    through = lambda server: stack.enter_context(relaying(server.url)).url  # noqa: E731
    setup = EngineSetup(stack, through=through, policy={"engine_key_env": "A_KEY"})
    with pytest.raises(RunError, match=r"401.*Is the key the one of that `ascent engine`") as error:
        setup.load(0)
    assert KEY not in str(error.value)
    monkeypatch.setenv("A_KEY", KEY)
    setup = EngineSetup(stack, engine="sglang", through=through, policy={"engine_key_env": "A_KEY"})
    with pytest.raises(RunError, match="is `ascent engine vllm`, and this run has --engine sglang"):
        setup.load(0)
    assert not setup.server.received


@pytest.mark.long
def test_damaged_weights_are_sent_again(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)
    through = lambda server: stack.enter_context(relaying(server.url)).url  # noqa: E731
    setup = EngineSetup(stack, through=through, policy={"engine_key_env": "A_KEY"})
    whole, wrong = relay_module.write_upload, [1]

    async def damaged(*args: Any) -> int:
        return await whole(*args) + (wrong.pop() if wrong else 0)

    monkeypatch.setattr(relay_module, "write_upload", damaged)
    setup.load(0)
    assert not wrong and max_logprob_error(setup.lm, setup.generate()) < 1e-5
    wrong += [1] * 9
    with pytest.raises(RunError, match="the checksum of the received file differs"):
        setup.load(1)


def test_generation_is_cancelled_when_the_trainer_disconnects(quiet: Relaying, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def long(*_: Any) -> Any:
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    monkeypatch.setattr(quiet.client, "generate", long)
    body = {
        "request": {"prompt": [1], "max_tokens": 2, "temperature": 1.0, "seed": 0, "stop_token_ids": []},
        "salt": "",
    }
    sent = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(sent)}\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", quiet.port))) as trainer:
        trainer.sendall(head.encode() + sent)
        assert begun.wait(60)
    assert ended.wait(60)


# ---- what it does not do -----------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["x", KEY[:-1], KEY + "x", KEY.upper(), "ä"])
def test_requests_without_the_key_are_refused(quiet: Relaying, key: str) -> None:
    for path in PATHS:
        for method in ("GET", "POST", "PUT", "DELETE"):
            headers = {"Authorization": f"Bearer {key}".encode()}  # type: ignore[dict-item]
            reply = quiet.ask(method, path, headers=headers, content=b"{}" if method != "GET" else None)
            assert reply.status_code == 401 and "connection" in reply.headers
    assert quiet.ask("GET", "/about", headers={"Authorization": KEY}).status_code == 401
    assert quiet.http.get(f"{quiet.url}/about").status_code == 401


@pytest.mark.parametrize(
    "target",
    [
        *("/collective_rpc", "/update_weights", "/inference/v1/generate", "/generate/", "//generate", "/Generate"),
        *(
            "/about?x=1",
            "/generate?x=1",
            "/health/../collective_rpc",
            "/generate%2f..%2fcollective_rpc",
            "/weights/../../etc/passwd",
        ),
        *("http://127.0.0.1:9/collective_rpc", "/health#/collective_rpc", "/\\collective_rpc"),
    ],
)
def test_no_other_address_is_reached(quiet: Relaying, target: str) -> None:
    for method in ("GET", "POST", "PUT"):
        with closing(socket.create_connection(("127.0.0.1", quiet.port))) as peer:
            head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 0\r\n\r\n"
            peer.sendall(head.encode())
            assert peer.recv(100).split()[1] in (b"404", b"400")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", []),
        ("/generate", {"request": {"prompt": "abc"}, "salt": ""}),
        (
            "/generate",
            {
                "request": {"prompt": [1], "max_tokens": None, "temperature": 1, "seed": 0, "stop_token_ids": []},
                "salt": "",
            },
        ),
        ("/greet", {"config": {}, "more": 1}),
        ("/load", {"upload": "../x"}),
        ("/load", {"upload": "x", "version": "../../x", "tensors": {}}),
    ],
)
def test_invalid_bodies_are_refused(quiet: Relaying, path: str, body: Any) -> None:
    assert quiet.ask("POST", path, json=body).status_code == 400
    assert quiet.ask("POST", path, content=b"[" * 100_000).status_code == 400


def test_weights_that_never_arrived_are_not_loaded(quiet: Relaying) -> None:
    reply = quiet.ask("POST", "/load", json={"upload": "x", "version": 1, "tensors": {}})
    assert reply.status_code == 409 and "have not arrived" in reply.text


def test_sizes_are_bounded_before_anything_is_written(
    quiet: Relaying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(relay_module, "MAX_BODY_BYTES", 1000)
    assert quiet.ask("POST", "/generate", content=b"x" * 1001).status_code == 413
    head = f"PUT /weights HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {2**30 + 1}\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", quiet.port))) as peer:
        peer.sendall(head.encode())
        assert peer.recv(100).split()[1] == b"413", "it is not read"
    assert quiet.ask("PUT", "/weights", content=iter([b"x"])).status_code == 411

    class Full:
        f_bavail, f_frsize = 1, 1

    monkeypatch.setattr("ascent.server.engine_relay.os.statvfs", lambda _: Full())
    assert quiet.ask("PUT", "/weights", content=b"xx").status_code == 507
    assert not list(tmp_path.iterdir())


def test_an_upload_that_is_cut_off_leaves_nothing_and_the_next_one_is_taken(
    quiet: Relaying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path)
    head = f"PUT /weights HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", quiet.port))) as peer:
        peer.sendall(head.encode() + b"x" * 500)
        until(lambda: list(tmp_path.iterdir()))
        assert quiet.ask("PUT", "/weights", content=b"y").status_code == 409, "one at a time"
    until(lambda: not list(tmp_path.iterdir()))
    until(lambda: (reply := quiet.ask("PUT", "/weights", content=b"y" * 9)).status_code == 200 or reply.close())
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["weights.safetensors"]
    assert quiet.ask("POST", "/load", json={"upload": "other", "version": 1, "tensors": {}}).status_code == 409
    assert quiet.ask("PUT", "/weights", content=b"z").status_code == 200
    assert len(list(tmp_path.iterdir())) == 1, "it has replaced the last one"
    quiet.relay.close()
    assert not list(tmp_path.iterdir())


# ---- settings ----------------------------------------------------------------------------------------


def test_key_has_to_be_long_ascii_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    assert read_key("", str(file)) == KEY
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users can read this file"):
        read_key("", str(file), "--engine.")
    monkeypatch.setenv("A_KEY", "short")
    with pytest.raises(ConfigError, match=r"\$A_KEY has no key of at least 16 ASCII characters"):
        read_key("A_KEY", "")
    with pytest.raises(ConfigError, match=r"--engine\.key-file .*: cannot be read"):
        read_key("", str(tmp_path / "none"), "--engine.")


RELAYED: dict[str, dict[str, Any]] = {
    "everyone on the way": {"engine.url": "http://10.0.0.7:8443", "engine.key_env": "A"},
    "run `ascent engine` there": {"engine.url": "https://10.0.0.7:8443"},
    "set that one": {"engine.url": "https://h:1", "engine.key_env": "A", "engine.key_file": "b"},
    "that runs, by --engine.url": {"engine.python": "x", "engine.key_file": "b"},
    "and no more": {"engine.url": "https://u:p@h:1", "engine.key_env": "A"},
    "Port out of range": {"engine.url": "https://h:99999", "engine.key_env": "A"},
    "the same server twice": {"engine.url": ("https://h:1/", "https://h:1"), "engine.key_env": "A"},
}


@pytest.mark.parametrize("words", RELAYED)
def test_relays_that_cannot_be_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        configure("countdown", {"model": "tiny", "engine": "vllm"} | RELAYED[words])


@pytest.mark.parametrize(
    "url", ["https://h:1/engines/a/", "http://[::1]:8443", "https://[2001:db8::1]:1", "http://127.0.0.9:1"]
)
def test_relays_may_be_behind_a_path_a_tunnel_or_an_ipv6_address(url: str) -> None:
    assert CausalLM("tiny", engine="vllm", engine_url=(url,), engine_key_env="A").engine_url == (url,)


def test_the_command_listens_to_other_machines_only_with_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCENT_ENGINE_KEY", raising=False)
    with pytest.raises(ConfigError, match="unencrypted"):
        EngineCommand.read(["vllm", "--host", "0.0.0.0"]).execute()
    with pytest.raises(ConfigError, match=r"--url http://10\.0\.0\.1:1"):
        EngineCommand.read(["vllm", "--url", "http://10.0.0.1:1"]).execute()
    with pytest.raises(ConfigError, match=r"\$ASCENT_ENGINE_KEY has no key"):
        EngineCommand.read(["sglang"]).execute()


def test_the_command_names_the_packages_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("uvicorn", "httpx") else find(name))
    with pytest.raises(
        ConfigError, match=r"ascent engine needs uvicorn and httpx: pip install 'ascent-rl\[lab,judge\]'"
    ):
        EngineCommand.read(["vllm"]).execute()


def test_the_command_hands_its_flags_to_the_relay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, closed = list[Relay](), list[Relay]()

    def serve(relay: Relay, *where: Any) -> Any:
        made.append(relay)
        assert where == ("127.0.0.1", 0, "", "")
        return relay_server(relay, *where)

    def interrupted(_: Any, sockets: list[socket.socket]) -> None:
        sockets[0].close()
        raise KeyboardInterrupt

    monkeypatch.setenv("A_KEY", KEY)
    monkeypatch.setattr(relay_module, "relay_server", serve)
    monkeypatch.setattr("uvicorn.Server.run", interrupted)
    monkeypatch.setattr(Relay, "close", lambda relay: closed.append(relay))
    words = ["sglang", "--url", "http://127.0.0.1:9", "--key-env", "A_KEY", "--port", "0"]
    command = EngineCommand.read([*words, "--rows", "5", "--limit", "3", "--deadline", "7"])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            command.execute()
        with pytest.raises(SystemExit, match="143"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, handler)
    (relay,) = made
    assert closed == made, "weights that it holds are removed"
    assert relay.max_upload_bytes == 3 * 2**30 and relay.client.slots.free == 5 and relay.client.deadline == 7
    said = capsys.readouterr().out
    assert said.startswith("sglang at http://127.0.0.1:9 is available at http://127.0.0.1:") and KEY not in said


@pytest.mark.slow
def test_the_command_relays_until_it_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    words = ["engine", "sglang", "--port", "0", "--key-file", str(tmp_path / "key"), "--url", "http://[::1]:9/"]
    relay = ascent_process(tmp_path / "output", *words)
    until = time.monotonic() + 60
    while "Ctrl-C" not in (said := relay.stdout):
        assert relay.poll() is None and time.monotonic() < until, said + relay.stderr
        time.sleep(0.01)
    url = said.split("available at ")[1].split(". Stop")[0]
    about = httpx.get(f"{url}/about", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=60)
    relay.send_signal(signal.SIGTERM)
    assert relay.wait(60) == 143
    assert about.json() == {"engine": "sglang"} and KEY not in said


# ---- rare answers ------------------------------------------------------------------------------------


def test_an_engine_that_is_silent_is_not_healthy(quiet: Relaying, monkeypatch: pytest.MonkeyPatch) -> None:
    async def alive(answer: bool) -> bool:
        return answer

    monkeypatch.setattr(quiet.client, "is_healthy", lambda: alive(False))
    reply = quiet.ask("GET", "/health")
    assert (reply.status_code, reply.json()) == (503, {"error": "the engine does not respond"})
    assert reply.headers["connection"] == "close"
    monkeypatch.setattr(quiet.client, "is_healthy", lambda: alive(True))
    assert quiet.ask("GET", "/health").status_code == 200


def test_weights_that_are_late_leave_nothing(quiet: Relaying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(quiet.client, "deadline", 0.05)
    head = f"PUT /weights HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", quiet.port))) as peer:
        peer.sendall(head.encode() + b"x" * 500)
        reply = b"".join(iter(lambda: peer.recv(1000), b""))
    assert reply.split()[1] == b"408" and b"the weights have not arrived within 0.05 seconds" in reply
    assert not list(tmp_path.iterdir())


def test_weights_come_in_pieces_and_are_loaded_once(
    quiet: Relaying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(relay_module, "CHUNK_BYTES", 10)
    content = bytes(range(256)) * 300
    upload = quiet.ask("PUT", "/weights", content=content).json()
    assert upload["checksum"] == zlib.crc32(content)
    entered, release, seen = threading.Event(), threading.Event(), list[Any]()

    async def load(manifest: Any, version: int) -> None:
        seen.append((manifest.path.read_bytes(), version))
        entered.set()
        await asyncio.to_thread(release.wait, 60)
        raise RunError("the engine takes other weights")

    monkeypatch.setattr(quiet.client, "load_weights", load)
    body = {"upload": upload["upload"], "version": 3, "tensors": {}}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(quiet.ask, "POST", "/load", json=body)
        assert entered.wait(60)
        second = httpx.post(f"{quiet.url}/load", json=body, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
        release.set()
        assert (second.status_code, second.json()) == (409, {"error": "other weights are being received or loaded"})
        assert (first.result().status_code, first.result().json()) == (422, {"error": "the engine takes other weights"})
    assert seen == [(content, 3)] and not list(tmp_path.iterdir())


def test_incomplete_uploads_are_refused(tmp_path: Path) -> None:
    class Upload:
        async def stream(self) -> AsyncIterator[bytes]:
            yield b"abc"
            yield b"de"

    assert asyncio.run(relay_module.write_upload(Upload(), tmp_path / "a", 5)) == zlib.crc32(b"abcde")
    assert (tmp_path / "a").read_bytes() == b"abcde"
    with pytest.raises(HTTPException, match="5 bytes of weights arrived, and the Content-Length is 6") as error:
        asyncio.run(relay_module.write_upload(Upload(), tmp_path / "b", 6))
    assert error.value.status_code == 400
