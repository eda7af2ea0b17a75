"""Attacks on the lab: by other names, sites, servers and users of this machine, along paths, and with connections."""

from __future__ import annotations

import http.client
import os
import resource
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.testclient import TestClient

from ascent.core.errors import ConfigError
from ascent.lab import page_base, server
from ascent.lab.figures.training import figure, routes, trainings
from ascent.lab.pages.compare import run_comparison
from ascent.lab.pages.runs import page as runs_page
from ascent.lab.server import application, lab_server
from ascent.runs.run_list import RunEntry
from ascent.server import connections, guard, lab_secret
from ascent.server.guard import Guard, host_names
from benchmarks.attacks.attempt import Attack

GUARD, SECRET, PATHS, CROWDS = "the lab's guard", "the lab's secret", "paths out of the lab", "crowds at the lab"
PORT = 8321
BASE = f"http://127.0.0.1:{PORT}"
NAMES = {"run": "r", "command": "stop", "slug": "1", "name": "clip"}
REACHED = "REACHED"


def every_route(runs: Path) -> list[tuple[str, str]]:
    """The method and path of every route of the lab, and of a script."""
    found = [
        (method, route.path.format(**{name: NAMES[name] for name in route.param_convertors}))
        for route in application(runs).routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
    ]
    return [*found, ("GET", "/static/app.js")]


# ---- the guard --------------------------------------------------------------------------------------------


def guarded() -> tuple[Guard, TestClient]:
    """Return a guard in front of an application that answers every request, and a client without its cookie."""
    door = Guard(PlainTextResponse(REACHED), host_names("127.0.0.1", PORT), secrets.token_bytes(32), BASE)
    return door, TestClient(door, base_url=BASE, raise_server_exceptions=False, follow_redirects=False)


def knocking(prefix: str | None = None, method: str | None = None, **headers: str) -> Callable[[Path], str | None]:
    """Every route is asked for as the lab's own page would, but for these: an empty header is left out.

    {name} and {value} in a header are those of the guard's cookie.
    """

    def attempt(folder: Path) -> str | None:
        door, client = guarded()
        own = {"cookie": "{name}={value}", "origin": BASE, "host": f"127.0.0.1:{PORT}"}
        changed = own | {name.replace("_", "-"): words for name, words in headers.items()}
        sent = {
            name: words.format(name=door.cookie_name, value=door.cookie) for name, words in changed.items() if words
        }
        for usual, path in every_route(folder):
            verb = method or usual
            answer = client.request(verb, (door.root if prefix is None else prefix) + path, headers=sent)
            if REACHED in answer.text or (verb == "HEAD" and answer.status_code == 200):
                return f"{verb} {path} got through"
        return None

    return attempt


def any_host() -> None:
    class All(frozenset):  # type: ignore[type-arg]
        def __contains__(self, _: object) -> bool:
            return True

    whole = Guard.__init__

    def init(door: Guard, *args: Any, **more: Any) -> None:
        whole(door, *args, **more)
        door.hosts = All(door.hosts)

    Guard.__init__ = init  # type: ignore[method-assign]


def any_digest() -> None:
    guard.hmac = type(os)("hmac")
    vars(guard.hmac).update(vars(__import__("hmac")) | {"compare_digest": lambda *_: True})


def any_place() -> None:
    Guard._is_below_prefix = lambda *_: True  # type: ignore[method-assign]


def any_site() -> None:
    Guard._cross_site_reason = lambda *_: None  # type: ignore[method-assign]


def any_method() -> None:
    guard.METHODS = ("GET", "HEAD", "POST", *OTHERS)


OTHERS = ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "QUERY")


def guessed_tokens(_: Path) -> str | None:
    door, client = guarded()
    for token in ("", "x", door.token[:-1], f"{door.token}x", door.token.swapcase(), "é", " "):
        if "set-cookie" in client.get("/", params={"token": token}).headers:
            return f"the token {token!r} opened the lab"
    return None


def replayed_token(_: Path) -> str | None:
    door, client = guarded()
    token = door.token
    assert "set-cookie" in client.get("/", params={"token": token}).headers
    return "a token opened the lab twice" if "set-cookie" in client.get("/", params={"token": token}).headers else None


def never_spent() -> None:
    guard.new_token = lambda: "the-one-token"


def cookie_for_another_port(_: Path) -> str | None:
    """Visit another server on this machine in a browser that has opened the lab."""
    door, client = guarded()
    client.get("/", params={"token": door.token})
    assert door.cookie in client.cookies.values()
    for address in ("http://127.0.0.1:9999/", "http://127.0.0.1:9999/evil?x=1", "http://127.0.0.1/"):
        request = httpx.Request("GET", address)
        client.cookies.set_cookie_header(request)
        if door.cookie in request.headers.get("cookie", ""):
            return f"{address} was sent the cookie"
    return None


def cookie_everywhere() -> None:
    whole = Response.set_cookie
    Response.set_cookie = lambda *a, **k: whole(*a, **k | {"path": "/"})  # type: ignore[method-assign]


# ---- the secret --------------------------------------------------------------------------------------------


def two_first_starts(folder: Path) -> str | None:
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    rounds, at_once = 60, 4
    barrier = threading.Barrier(at_once)

    def start(_: int) -> list[bytes]:
        found = []
        for i in range(rounds):
            barrier.wait(20)
            found.append(lab_secret.load_secret(folder / f"runs{i}")[0])
        return found

    with ThreadPoolExecutor(at_once) as pool:
        told = list(pool.map(start, range(at_once)))
    differing = sum(len(set(secrets)) > 1 for secrets in zip(*told, strict=True))
    return f"two secrets in {differing} of {rounds} starts" if differing else None


def no_lock() -> None:
    lab_secret.lock_file = trainings.lock_file = lambda *_: None


def secret_of_the_folder(folder: Path) -> str | None:
    """A folder from elsewhere brings a secret that its maker knows."""
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    known, runs = b"k" * 32, folder / "runs"
    (runs / ".lab").mkdir(parents=True)
    (runs / ".lab" / "secret").write_bytes(known)
    (runs / ".lab" / "secret").chmod(0o600)
    return "its maker knows the secret" if lab_secret.load_secret(runs)[0] == known else None


def trust_the_folder() -> None:
    lab_secret.load_secret = lambda runs: ((runs / ".lab" / "secret").read_bytes(), "")


def token_on_a_command_line(folder: Path) -> str | None:
    """What every user of the machine sees when the lab opens a browser."""
    door, _ = guarded()
    seen: list[str] = []
    server.webbrowser = type(os)("webbrowser")
    server.webbrowser.open = seen.append  # type: ignore[attr-defined]
    server.BROWSER_DELAY_SECONDS = 0.0
    with server.open_in_browser(door, folder):
        for thread in threading.enumerate():
            if thread is not threading.current_thread():
                thread.join(5)
        loose = [path for path in folder.iterdir() if path.stat().st_mode & 0o077]
    if not seen:
        return "the attempt itself failed: no browser was opened"
    return "the token is there to be read" if door.token in seen[0] or loose else None


def open_the_address() -> None:
    class Bare(str):
        def as_uri(self) -> str:
            return str(self)

        def unlink(self, missing_ok: bool = False) -> None: ...

    server.write_redirect_page = lambda address, _: Bare(address)  # type: ignore[assignment]


# ---- paths -------------------------------------------------------------------------------------------------

UP = (
    "../outside",
    "..%2foutside",
    "%2e%2e/outside",
    "%2e%2e%2foutside",
    "..\\outside",
    "link",
    "link/",
    "./link",
    ".lab",
)
UP = (
    *UP,
    "good/../../outside",
    "good%2f..%2f..%2foutside",
    "//outside",
    "{outside}",
    "%2e%2e%252foutside",
    "..;/outside",
)
BY_ID = (
    "run",
    "curves",
    "spark",
    "completions",
    "prompts",
    "prompt",
    "tokens",
    "compare",
    "compare.csv",
    "compare.svg",
)
BY_PATH = ("/api/runs/{}/events", "/api/runs/{}/responses", "/api/figure/training?a.run={}", "/lesson/{}", "/figure/{}")
STATIC = (
    "../server.py",
    "%2e%2e/server.py",
    "..%2fserver.py",
    "vendor/..%2f..%2fserver.py",
    "%2e%2e%2f%2e%2e%2fapi.py",
)
STATIC = (*STATIC, "..%2f..%2f..%2fpyproject.toml", "%2fetc%2fpasswd", "/etc/passwd", "figures/training/trainings.py")


def outside_of(stage: Path, folder: Path) -> tuple[Path, Path]:
    """A folder of runs with a link, and a run outside of it that says SECRET everywhere."""
    runs, outside = folder / "runs", folder / "outside"
    shutil.copytree(stage / "good", runs / "good")
    shutil.copytree(stage / "good", outside)
    (runs / "link").symlink_to(outside)
    (outside / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5, "SECRET": 1}\n{"step": 1, "SECRET": 2}\n')
    config = (outside / "config.json").read_text().replace('"objective": "', '"objective": "SECRET ')
    (outside / "config.json").write_text(config)
    (outside / "run.json").write_text((outside / "run.json").read_text().replace('"label": "', '"label": "SECRET '))
    for path in outside.glob("*/*.parquet"):
        import pyarrow.parquet as pq

        from ascent.runs.rollout_files import write_parquet

        rows = [row | {"prompt_text": "SECRET", "response_text": "SECRET"} for row in pq.read_table(path).to_pylist()]
        write_parquet(path, rows, len(rows))
    return runs, outside


def out_by(stage: Path, paths: Iterable[str]) -> Callable[[Path], str | None]:
    def attempt(folder: Path) -> str | None:
        runs, outside = outside_of(stage, folder)
        with TestClient(application(runs), base_url=BASE, raise_server_exceptions=False) as client:
            for path in paths:
                answer = client.get(path.replace("{outside}", str(outside)))
                if "SECRET" in answer.text or (path.startswith("/static") and answer.status_code == 200):
                    return f"{path} led out"
        return None

    return attempt


def any_path() -> None:
    def find(root: Path, id: str) -> RunEntry:
        return RunEntry(id, (root / id).resolve(), "ascent")

    page_base.find_run = run_comparison.find_run = runs_page.find_run = find
    for module in (figure, routes, trainings):
        module.run_folder = lambda runs, name: (runs / name).resolve()  # type: ignore[attr-defined]
    figure.NAME = page_base.re.compile(".*")


def any_file() -> None:
    def lookup(assets: Any, path: str) -> tuple[str, os.stat_result | None]:
        for folder in assets.all_directories:
            with suppress(OSError):
                return str(folder / path), os.stat(folder / path)
        return "", None

    server.Assets.lookup_path = lookup  # type: ignore[method-assign]
    StaticFiles.lookup_path = lookup  # type: ignore[method-assign,assignment]


# ---- crowds ------------------------------------------------------------------------------------------------


@contextmanager
def serving(runs: Path) -> Any:
    app, listening, door = lab_server(runs, "127.0.0.1", 0, secrets.token_bytes(32))
    thread = threading.Thread(target=lambda: app.run(sockets=[listening]), daemon=True)
    thread.start()
    yield listening.getsockname()[1], door
    app.should_exit = True


def held_connections(folder: Path) -> str | None:
    """Hold many connections with half a request each in another process: are other clients still answered?"""
    (folder / "runs").mkdir()
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    with serving(folder / "runs") as (port, _):
        ready, go = os.pipe()
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
            held = []
            with suppress(OSError):
                for _ in range(180):
                    held.append(socket.create_connection(("127.0.0.1", port), 2))
                    held[-1].sendall(b"GET / HTTP/1.1\r\nHost: ")
            os.write(go, b"x")
            signal.pause()
        os.read(ready, 1)
        try:
            asked = http.client.HTTPConnection("127.0.0.1", port, timeout=8)
            asked.request("GET", "/")
            answered = asked.getresponse().status == 404
        except OSError:
            answered = False
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return None if answered else "other clients are not answered"


def room_for_all() -> None:
    connections.make_room = lambda _: None
    connections.PEER_SECONDS = 1e6


def many_trainings(folder: Path) -> str | None:
    trainings.WAIT_SCRIPT = "sleep 60"
    labs, settings = [trainings.Trainings(folder), trainings.Trainings(folder)], figure.FIGURE.read("")
    barrier = threading.Barrier(10)

    def start(i: int) -> bool:
        barrier.wait(20)
        with suppress(ConfigError, OSError):
            labs[i % 2].start(settings, "a", 1)
            return True
        return False

    try:
        with ThreadPoolExecutor(10) as pool:
            started = sum(pool.map(start, range(10)))
    finally:
        for child in (child for one in labs for child in one._children):
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return f"{started} trainings at once" if started > trainings.MAX_TRAININGS else None


def attacks(stage: Path) -> list[Attack]:
    hosts = (
        "evil.test",
        f"evil.test:{PORT}",
        "127.0.0.1",
        "127.0.0.1:80",
        f"127.0.0.1.evil.test:{PORT}",
        f"0.0.0.0:{PORT}",
    )
    sites = ("cross-site", "same-site", "Same-Origin", "x")
    origins = ("http://evil.test", "null", "https://127.0.0.1:8321", "http://127.0.0.1:9999", "file://")
    cookies = ("", "{name}=", "{name}=x", "{name}={value}x", "other={value}")
    below = ("", "/x", "/" + "0" * 32)
    by_id = [f"/api/view/{kind}?id={up}&step=0&group=0&key=x" for kind in BY_ID for up in UP]
    by_path = [path.format(up) for path in BY_PATH for up in UP]
    return [
        *(Attack(GUARD, f"the name {host}", knocking(host=host), any_host) for host in hosts),
        *(Attack(GUARD, f"the cookie {cookie}", knocking(cookie=cookie), any_digest) for cookie in cookies),
        *(Attack(GUARD, f"the origin {origin}", knocking(origin=origin), any_site) for origin in origins),
        *(Attack(GUARD, f"the site {site}", knocking(sec_fetch_site=site), any_site) for site in sites),
        Attack(GUARD, "a command without an origin", knocking(method="POST", origin=""), any_site),
        *(Attack(GUARD, f"the method {method}", knocking(method=method), any_method) for method in OTHERS),
        *(Attack(GUARD, f"the prefix {place!r}", knocking(prefix=place), any_place) for place in below),
        Attack(SECRET, "guessed tokens", guessed_tokens, any_digest),
        Attack(SECRET, "a token that was used", replayed_token, never_spent),
        Attack(SECRET, "a server on another port", cookie_for_another_port, cookie_everywhere),
        Attack(SECRET, "two first starts at once", two_first_starts, no_lock),
        Attack(SECRET, "a secret that came with the folder", secret_of_the_folder, trust_the_folder),
        Attack(SECRET, "the arguments of the browser", token_on_a_command_line, open_the_address),
        Attack(PATHS, f"{len(by_id)} ids", out_by(stage, by_id), any_path),
        Attack(PATHS, f"{len(by_path)} names", out_by(stage, by_path), any_path),
        Attack(PATHS, f"{len(STATIC)} scripts", out_by(stage, [f"/static/{path}" for path in STATIC]), any_file),
        Attack(CROWDS, "connections that say nothing", held_connections, room_for_all),
        Attack(CROWDS, "ten trainings at once", many_trainings, no_lock),
    ]
