"""The lab's doors, attacked: its secret and who can know it, connections held open, more trainings than allowed."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import unquote, urlsplit

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from ascent import settings
from ascent.core.errors import ConfigError
from ascent.lab import server
from ascent.lab.figures.training import figure as training
from ascent.lab.figures.training import routes, trainings
from ascent.lab.figures.training.trainings import MAX_TRAININGS, Trainings
from ascent.processes.user_state import state_folder
from ascent.runs.run_folder import RunFolder
from ascent.server import connections
from ascent.server.connections import Connection
from ascent.server.guard import Guard, host_names
from ascent.server.lab_secret import load_secret
from tests.browser import ThreadLab, until

BASE = "http://127.0.0.1:8321"
IN = PlainTextResponse("inside")
"""An application behind a guard."""


# ---- the secret -----------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ascent" / "lab"


def test_the_secret_is_kept_for_its_owner_alone_and_by_its_folder(state: Path, tmp_path: Path) -> None:
    first, why = load_secret(tmp_path / "runs")
    assert load_secret(tmp_path / "runs") == (first, "") and len(first) == 32 and not why
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    assert load_secret(tmp_path / "link")[0] == first, "the same folder by another name"
    assert load_secret(tmp_path / "other")[0] != first
    assert not (tmp_path / "runs").exists(), "nothing is written there"
    modes = {path.relative_to(state.parent): path.stat().st_mode & 0o777 for path in state.parent.rglob("*")}
    assert modes.pop(state.relative_to(state.parent)) == 0o700 and set(modes.values()) == {0o600} and len(modes) == 3


@pytest.mark.parametrize("spoil", [lambda p: p.chmod(0o644), lambda p: p.write_bytes(b""), lambda p: p.unlink()])
def test_a_secret_that_others_could_know_is_made_anew(state: Path, spoil: Callable[[Path], Any]) -> None:
    first, _ = load_secret(Path("runs"))
    (path,) = (path for path in state.iterdir() if path.name != "lock")
    spoil(path)
    again, why = load_secret(Path("runs"))
    assert again != first and len(again) == 32 and not why and path.stat().st_mode & 0o777 == 0o600
    assert load_secret(Path("runs"))[0] == again


def test_a_secret_that_came_with_a_folder_is_not_used(state: Path, tmp_path: Path) -> None:
    known = b"k" * 32
    (tmp_path / "runs" / ".lab").mkdir(parents=True)
    (tmp_path / "runs" / ".lab" / "secret").write_bytes(known)
    (tmp_path / "runs" / ".lab" / "secret").chmod(0o600)
    secret, _ = load_secret(tmp_path / "runs")
    ours = Guard(IN, host_names("127.0.0.1", 8321), secret, BASE)
    theirs = Guard(IN, host_names("127.0.0.1", 8321), known, BASE)
    attacker = TestClient(ours, base_url=BASE)
    for root in (ours.root, theirs.root):
        for name in (ours.cookie_name, theirs.cookie_name):
            answer = attacker.get(f"{root}/", headers={"cookie": f"{name}={theirs.cookie}"})
            assert answer.status_code == (403 if root == ours.root else 404)
    assert attacker.get(f"{ours.root}/", headers={"cookie": f"{ours.cookie_name}={ours.cookie}"}).text == "inside"


def test_two_first_starts_at_once_make_one_secret(state: Path) -> None:
    rounds, at_once = 40, 4
    barrier = threading.Barrier(at_once)

    def start(_: int) -> list[tuple[bytes, str]]:
        found = []
        for i in range(rounds):
            barrier.wait(20)
            found.append(load_secret(Path(f"runs{i}")))
        return found

    with ThreadPoolExecutor(at_once) as pool:
        told = list(pool.map(start, range(at_once)))
    assert not {why for starts in told for _, why in starts} - {""}
    assert [len(set(secrets)) for secrets in zip(*told, strict=True)] == [1] * rounds
    assert len({secret for secret, _ in told[0]}) == rounds


def test_without_a_home_the_secret_holds_for_this_start_and_the_lab_says_so(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("no folder")
    (first, why), (second, _) = load_secret(tmp_path), load_secret(tmp_path)
    assert first != second and len(first) == 32 and "state" in why
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda *_, **__: None)
    monkeypatch.setattr(server, "_compute_figures", lambda: None)
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    assert server.serve_lab(tmp_path / "runs", "127.0.0.1", 0, open_browser=False) == 0
    assert "will not work after a restart" in capsys.readouterr().out


def test_a_state_folder_of_someone_else_is_not_used(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state_folder("lab")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="not a folder of yours"):
        state_folder("lab")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # which the standard wants ignored
    monkeypatch.setenv("HOME", str(state))
    assert state_folder("lab") == state / ".local" / "state" / "ascent" / "lab"


# ---- opening a browser ----------------------------------------------------------------------------------


def test_the_browser_is_opened_by_a_private_file_that_is_gone_after_the_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(server, "BROWSER_DELAY_SECONDS", 0.0)
    guard = Guard(IN, host_names("127.0.0.1", 8321), b"s" * 32, BASE)
    with server.open_in_browser(guard, tmp_path):
        until(lambda: opened)
        page = Path(unquote(urlsplit(opened[0]).path))
        assert urlsplit(opened[0]).scheme == "file" and guard.token not in opened[0]
        assert page.stat().st_mode & 0o777 == 0o600 and f"url={guard.address}" in page.read_text()
        used = guard.address
        assert TestClient(guard, base_url=BASE).get(used).status_code == 200
        assert not page.exists() and guard.address in capsys.readouterr().out
        assert used != guard.address
    with pytest.raises(KeyboardInterrupt), server.open_in_browser(guard, tmp_path):  # never exchanged
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_leaves_the_page_among_the_temporary_files(tmp_path: Path) -> None:
    page = server.write_redirect_page(BASE, tmp_path / "nowhere")
    assert page is not None and page.stat().st_mode & 0o777 == 0o600 and page.parent != tmp_path
    page.unlink()


# ---- connections ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadLab]:
    """A lab that has little patience, and takes few connections."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "PEER_SECONDS", 0.25)
        patch.setattr(Connection, "max_peer_connections", 8)
        found = ThreadLab(tmp_path_factory.mktemp("runs"))
        yield found
        found.kill()


def connect(lab: ThreadLab, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", lab.port), timeout=60)
    made.sendall(sent)
    return made


def held(lab: ThreadLab, sent: bytes, drip: bytes = b"") -> float:
    """Seconds, 30 at most, for which a peer can hold a connection that it opens with these bytes and keeps up."""
    with connect(lab, sent) as made:
        began = time.monotonic()
        made.settimeout(0.02)
        while time.monotonic() - began < 30:
            with suppress(TimeoutError):
                try:
                    if not made.recv(4096):
                        break
                    continue
                except ConnectionResetError:
                    break
            with suppress(OSError):
                made.sendall(drip)
    return time.monotonic() - began


HEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "drip"),
    [
        (b"", b""),
        (b"G", b""),
        (HEAD, b"x: y\r\n"),
        (POST, b"z"),
        (HEAD + b"\r\n" + HEAD, b"x: y\r\n"),
        (b"\r\n", b"\r\n"),
    ],
)
def test_a_request_that_does_not_arrive_holds_no_connection(lab: ThreadLab, sent: bytes, drip: bytes) -> None:
    assert held(lab, sent, drip) < 30


@pytest.mark.long
def test_a_peer_that_does_not_read_holds_no_connection(lab: ThreadLab) -> None:
    head = f"GET {lab.guard.root}/static/vendor/uplot.mjs HTTP/1.1\r\nHost: 127.0.0.1:{lab.port}\r\n"
    asked = f"{head}Cookie: {lab.guard.cookie_name}={lab.guard.cookie}\r\n\r\n".encode()
    with connect(lab, 100 * asked) as made:  # 20 MB, more than the buffers in between hold
        assert made.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: not lab.server.server_state.connections)


def test_slow_peers_do_not_keep_others_out(lab: ThreadLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PEER_SECONDS", 60.0)
    slow = [connect(lab, HEAD) for _ in range(40)]
    asking = http.client.HTTPConnection("127.0.0.1", lab.port, timeout=120)
    for _ in range(3):  # on one connection, which stays open
        asking.request("GET", lab.guard.root + "/")
        assert asking.getresponse().read()
    until(lambda: len(lab.server.server_state.connections) <= 8)
    for one in (*slow, asking):
        one.close()


@pytest.mark.long
def test_a_stream_outlives_the_deadline_and_makes_no_room(lab: ThreadLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is owed while an answer goes on, so neither time nor others end it."""
    monkeypatch.setattr(connections, "PEER_SECONDS", 2.0)  # until it begins, which takes a while on a busy machine
    folder = RunFolder.create(lab.runs / "one", {}, {"step": 0, "steps": 9})
    cookie = f"Cookie: {lab.guard.cookie_name}={lab.guard.cookie}\r\n".encode()
    asked = f"GET {lab.guard.root}/api/runs/one/events HTTP/1.1\r\nHost: 127.0.0.1:{lab.port}\r\n".encode()
    streams = [connect(lab, asked + cookie + b"\r\n") for _ in range(8)]
    try:
        assert all(b"200 OK" in one.recv(4096) for one in streams)
        for _ in range(8):  # more than there may be
            with connect(lab) as other, suppress(ConnectionResetError):
                assert other.recv(1) == b""
        time.sleep(2.4)
        (lab.runs / "one" / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0}\n')
        for one in streams:
            one.settimeout(60)
            told = b""
            while b"event: metrics" not in told:
                told += (more := one.recv(4096))
                assert more, "it was ended"
    finally:
        folder.close()
        for one in streams:
            one.close()


def test_all_peers_together_have_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "max_connections", 5)
    everyone: set[Any] = set()
    for i in range(6):
        one: Any = Connection.__new__(Connection)
        one.connections, one.client = everyone, (f"10.0.0.{i}", 1)
        one.transport = Mock(is_closing=lambda: False)
        one._number, one._deadline = i, None if i == 0 else Mock(when=lambda i=i: 10.0 - i)
        everyone.add(one)
        connections.make_room(one)
    ended = [one.client[0] for one in everyone if one.transport.abort.called]
    assert ended == ["10.0.0.5"], "the one whose time is over first; the first is being answered"


# ---- trainings ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_no_more_trainings_are_started_at_once_than_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainings, "WAIT_SCRIPT", "sleep 60")
    labs, state = [Trainings(tmp_path), Trainings(tmp_path)], training.FIGURE.read("")
    barrier = threading.Barrier(12)

    def start(i: int) -> str:
        barrier.wait(20)
        try:
            return labs[i % 2].start(state, "a", 1)
        except ConfigError as refused:
            return str(refused)

    try:
        with ThreadPoolExecutor(12) as pool:
            told = list(pool.map(start, range(12)))
    finally:
        for child in (child for one in labs for child in one._children):
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    refused = [text for text in told if "the maximum: wait" in text]
    assert len(told) - len(refused) == MAX_TRAININGS and len(set(told) - set(refused)) == MAX_TRAININGS


def test_requests_at_once_do_not_parse_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python 3.11 some of them failed with a SystemError, when a lab was new."""
    inside, most, real = 0, 0, settings.ast.parse

    def parse(source: str) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1
        return real(source)

    monkeypatch.setattr(settings, "ast", SimpleNamespace(parse=parse, AnnAssign=settings.ast.AnnAssign))
    read = settings.field_docs.__wrapped__
    monkeypatch.setattr(settings.inspect, "getsource", lambda _: "class A:\n    x: int\n")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, [training.Look] * 8)) == [{}] * 8
    assert most == 1


def test_a_training_is_not_kept_where_a_link_leads_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs" / ".lab").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="is a link"):
        Trainings(tmp_path / "runs").start(training.FIGURE.read(""), "a", 1)
    assert not list((tmp_path / "outside").iterdir())
    (tmp_path / "runs" / ".lab").unlink()
    (tmp_path / "runs" / ".lab").mkdir()
    (tmp_path / "runs" / ".lab" / "one").symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / "gate").write_text("1")
    with pytest.raises(ConfigError, match="is a link"):
        Trainings(tmp_path / "runs").command("one", "stop")
    assert (tmp_path / "outside" / "gate").read_text() == "1"
    monkeypatch.setattr(trainings.subprocess, "Popen", lambda *_, **__: SimpleNamespace(pid=1, poll=lambda: 0))
    assert Trainings(tmp_path / "runs").start(training.FIGURE.read(""), "a", 1), "the others are not kept from it"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write trainings there"):
        Trainings(tmp_path / "file").start(training.FIGURE.read(""), "a", 1)


def test_steps_are_counted_by_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert trainings.steps_done(path) == 0
    for text, steps in (("", 0), ('{"step": 0}', 0), ('{"step": 0}\n', 1), ('{"step": 0}\n{"step": 1}\n{"st', 2)):
        path.write_text(text)
        assert trainings.steps_done(path) == steps
    path.write_text("".join(json.dumps({"step": i, "reward": 0.5}) + "\n" for i in range(2_000)) + "{]\n[1]\n")
    assert trainings.steps_done(path) == 2_000


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="only /proc tells what was read")
def test_an_idle_stream_reads_next_to_nothing_of_a_long_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """50,000 lines were read again ten times a second."""
    folder = RunFolder.create(tmp_path / "long", {}, {"step": 0, "steps": 60_000})
    line = json.dumps({"step": 49_999, "reward": 0.5} | {f"metric/{i}": 0.123456789 for i in range(20)}) + "\n"
    size = (tmp_path / "long" / "metrics.jsonl").write_text(line * 50_000)
    looks, pauses, read = 30, list[float](), list[int]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        read.append(int(Path("/proc/self/io").read_text().split()[1]))
        if len(pauses) > looks:
            raise asyncio.CancelledError

    monkeypatch.setattr(routes, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    status = Trainings(tmp_path)

    async def listen() -> list[str]:
        told = []
        with suppress(asyncio.CancelledError):
            async for part in routes.stream(tmp_path / "long", size, lambda: status.status("long")):
                told.append(part)
        return told

    told = asyncio.run(listen())
    folder.close()
    assert len(told) == 2 and '"step": 50000' in told[1], "nothing but its status is told"
    assert (read[-1] - read[0]) / looks < 50_000 < size / 100
    assert pauses[-1] == routes.MAX_POLL_SECONDS and pauses == sorted(pauses)
