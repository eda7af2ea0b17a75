"""The lab without a browser: the guard, what may be asked, the figures and their snippets, streams, what is shipped."""

from __future__ import annotations

import asyncio
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from ascent.build.trained_run import Run
from ascent.core.advantages import Normalized
from ascent.core.errors import ConfigError, RunError
from ascent.core.exploration import NoBonus
from ascent.core.kl import InLoss, NoKL
from ascent.core.losses import Clipped
from ascent.lab import server
from ascent.lab.figures import all_figures
from ascent.lab.figures.training import figure as training
from ascent.lab.figures.training import routes, trainings
from ascent.lab.figures.training.trainings import MAX_TRAININGS, GatedDisplay, Trainings, read_gate
from ascent.lab.figures.variance import figure as variance_figure
from ascent.lab.page_base import MAX_BODY_BYTES, FiniteJSONResponse, json_route
from ascent.lab.pages.lesson import page as lessons
from ascent.runs.run_folder import RunFolder, write_json
from ascent.server.guard import Guard, host_name, host_names
from tests.cases import mostly_smokes

PORT = 8321
BASE = f"http://127.0.0.1:{PORT}"
ROOT = Path(__file__).parents[2]
LAB = ROOT / "ascent" / "lab"
FIGURES = all_figures()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def guard(folder: Path) -> Guard:
    return Guard(server.application(folder), host_names("127.0.0.1", PORT), b"s" * 32, BASE)


@pytest.fixture
def stranger(guard: Guard) -> TestClient:
    """Knows where the server is, even its prefix, and nothing else."""
    return TestClient(guard, base_url=BASE + guard.root, follow_redirects=False)


@pytest.fixture
def client(guard: Guard) -> Iterator[TestClient]:
    """Has been let in."""
    with TestClient(guard, base_url=BASE + guard.root, follow_redirects=False, headers={"origin": BASE}) as found:
        assert found.get(guard.address).status_code == 200
        yield found


# ---- the guard ------------------------------------------------------------------------------------------


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def every_path() -> list[str]:
    """Of each route, and some that there are not."""
    paths = []
    for route in server.application(Path("runs")).routes:
        assert isinstance(route, Route | Mount)
        path = f"{route.path}/app.js" if isinstance(route, Mount) else route.path
        paths.append(re.sub(r"\{\w+\}", "clip", path))
    return [*paths, "/nowhere", "/api/nowhere"]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_answers_without_the_cookie(guard: Guard, method: str) -> None:
    with TestClient(guard, base_url=BASE + guard.root, follow_redirects=False) as stranger:
        for path in every_path():
            answer = stranger.request(method, path, headers={"origin": BASE, "sec-fetch-site": "same-origin"})
            assert answer.status_code == (403 if method in ("GET", "HEAD", "POST") else 405), path
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"], path
            assert "set-cookie" not in answer.headers, path


@pytest.mark.long
@pytest.mark.parametrize("method", mostly_smokes(METHODS, "GET", "POST", "DELETE"))
def test_no_route_answers_to_another_name_or_another_site(client: TestClient, method: str) -> None:
    others = (
        {"host": f"attacker.example:{PORT}"},
        {"host": "127.0.0.1"},
        {"host": f"127.0.0.1:{PORT + 1}"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://attacker.example"},
        {"origin": f"http://127.0.0.1:{PORT + 1}"},
        {"origin": "null"},
    )
    for path, headers in itertools.product(every_path(), others):
        assert client.request(method, path, headers=headers).status_code in (403, 405), (path, headers)


def test_a_command_needs_an_origin(guard: Guard, client: TestClient) -> None:
    bare = TestClient(guard, base_url=BASE + guard.root, cookies=dict(client.cookies))
    assert bare.get("/").status_code == 200
    assert bare.post("/api/trainings", json={}).status_code == 403
    assert client.post("/api/trainings", json={}).status_code == 400


def test_nothing_is_said_outside_of_the_prefix(guard: Guard, client: TestClient) -> None:
    """Neither that there is a lab, nor which of its checks failed; though the cookie is right."""
    cookie = {"cookie": f"{guard.cookie_name}={guard.cookie}"}
    paths = ["", "/", "/figure/clip", "/api/figure/clip", "/static/app.js", guard.root[:-1], f"{guard.root}x/", "/%2e"]
    for path in [*paths, f"/x{guard.root}/", f"/{guard.root}/", guard.root.upper() + "/", "/?Token=1", "/favicon.ico"]:
        for method in ("GET", "HEAD", "POST", "DELETE"):
            answer = client.request(method, BASE + path, headers=cookie)
            assert (answer.status_code, answer.text) == (404, "" if method == "HEAD" else "Not found.\n")
            assert "ascent" not in str(answer.headers).lower() and "location" not in answer.headers
    assert client.get(BASE + guard.root, follow_redirects=True).status_code == 200


def test_two_labs_share_neither_prefix_nor_cookie(guard: Guard, tmp_path: Path) -> None:
    app = server.application(tmp_path)
    others = [Guard(app, host_names("127.0.0.1", PORT), b"t" * 32, BASE)]
    others += [Guard(app, host_names("127.0.0.1", PORT + 1), b"s" * 32, BASE)]  # the same folder, on another port
    for name in ("root", "cookie", "cookie_name", "token"):
        assert len({getattr(one, name) for one in (guard, *others)}) == 3
    again = Guard(app, host_names("127.0.0.1", PORT), b"s" * 32, BASE)  # started again: an open page goes on
    assert (again.root, again.cookie, again.cookie_name) == (guard.root, guard.cookie, guard.cookie_name)
    assert again.token != guard.token


def test_the_token_is_exchanged_for_a_cookie_that_scripts_cannot_read(guard: Guard, stranger: TestClient) -> None:
    token = guard.token
    answer = stranger.get(f"{guard.address}&b=1&c=%22%3E")
    assert answer.status_code == 200 and f'content="0; url={guard.root}/?b=1&amp;c=%22%3E"' in answer.text
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and f"path={guard.root};" in cookie
    assert token.lower() not in cookie and token not in answer.text
    assert stranger.get("/").status_code == 200


def test_a_token_is_good_for_one_exchange(guard: Guard, stranger: TestClient) -> None:
    used, heard = guard.address, []
    guard.opened = lambda: heard.append(guard.address)
    try:
        assert stranger.get(used).status_code == 200
        for _ in range(2):
            again = TestClient(guard, base_url=BASE).get(used)
            assert again.status_code == 403 and "set-cookie" not in again.headers
            assert "opens the lab once" in again.text and "prints another one" in again.text
        assert heard == [guard.address] and guard.address != used
        assert TestClient(guard, base_url=BASE).get(heard[0]).status_code == 200
    finally:
        guard.opened = lambda: None


@pytest.mark.parametrize(
    ("dest", "site", "method", "status"),
    [
        ("document", "cross-site", "GET", 200),  # from the file that opens the browser
        ("document", "none", "GET", 200),
        (None, None, "GET", 200),
        ("empty", "cross-site", "GET", 403),
        ("iframe", "cross-site", "GET", 403),
        ("image", "same-site", "GET", 403),
        ("document", "cross-site", "HEAD", 404),
        ("document", "cross-site", "POST", 404),
    ],
)
def test_an_exchange_may_come_from_a_file_and_nothing_else_may(
    guard: Guard, client: TestClient, dest: str | None, site: str | None, method: str, status: int
) -> None:
    given = {"sec-fetch-dest": dest, "sec-fetch-site": site}
    headers = {name: value for name, value in given.items() if value is not None}
    assert TestClient(guard, base_url=BASE).request(method, guard.address, headers=headers).status_code == status
    assert client.get("/", headers=headers).status_code == (200 if site in (None, "none") else 403)


@pytest.mark.parametrize(
    "change", [lambda _: "", lambda _: "wrong", lambda t: t[:-1], lambda t: t + "2", lambda _: "é"]
)
def test_another_token_is_refused(guard: Guard, stranger: TestClient, change: Callable[[str], str]) -> None:
    token = guard.token
    answer = stranger.get(BASE, params={"token": change(token)})
    assert answer.status_code == (403 if change(token) else 404) and "set-cookie" not in answer.headers
    assert stranger.get("/").status_code == 403 and guard.token == token


def test_a_cookie_is_found_among_those_of_other_servers(guard: Guard, stranger: TestClient) -> None:
    ours = f"{guard.cookie_name}={guard.cookie}"
    for cookies in (ours, f'prefs={{"a":1}}; {ours}', f"a b=[1,2]; {ours}; =; x"):
        assert stranger.get("/", headers={"cookie": cookies}).status_code == 200, cookies


@pytest.mark.parametrize("value", ["", "wrong", "é", '"\\351"'])
def test_another_cookie_is_refused(guard: Guard, stranger: TestClient, value: str) -> None:
    given = f"{guard.cookie_name}={value}".encode("latin-1")
    assert stranger.get("/", headers={b"cookie": given}).status_code == 403


@pytest.mark.parametrize(
    ("host", "port", "said", "status"),
    [
        ("MyBox", 8321, "mybox:8321", 200),
        ("MyBox", 8321, "MyBox:8321", 200),
        ("MyBox", 8321, "mybox", 403),
        ("MyBox", 80, "mybox", 200),
        ("127.0.0.1", 80, "127.0.0.1", 200),
        ("127.0.0.1", 80, "127.0.0.1:80", 200),
        ("127.0.0.1", 80, "127.0.0.1:8080", 403),
        ("127.0.0.1", 8080, "127.0.0.1", 403),
        ("::1", 80, "[::1]", 200),
    ],
)
def test_a_host_is_called_as_browsers_call_it(tmp_path: Path, host: str, port: int, said: str, status: int) -> None:
    guard = Guard(server.application(tmp_path), host_names(host, port), b"secret", BASE)
    found = TestClient(guard, base_url=BASE, follow_redirects=False)
    headers = {"host": said, "origin": f"http://{said}"}
    assert found.get(guard.address, headers=headers).status_code == status


def test_a_token_opens_nothing_but_the_first_page(guard: Guard, stranger: TestClient) -> None:
    assert stranger.get(f"/api/figure/clip?token={guard.token}").status_code == 403
    assert stranger.post(f"/?token={guard.token}", headers={"origin": BASE}).status_code == 403


def test_only_self_is_added_to_a_policy_of_nothing(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'none'"
    assert {part.split(" ", 1)[1] for part in policy} == {"'none'", "'self'"}
    page = client.get("/figure/clip").text
    assert "<style" not in page and " style=" not in page and "<script>" not in page and " onclick" not in page


def test_a_web_socket_is_closed(client: TestClient) -> None:
    with pytest.raises(WebSocketDisconnect) as closed, client.websocket_connect("/"):
        pass
    assert closed.value.code == 1008


# ---- what may be asked ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2fguard.py",
        "/static/%2e%2e/guard.py",
        "/static/vendor/..%2f..%2f..%2fcli.py",
        "/api/runs/..%2f..%2fetc/events",
        "/api/runs/%2e%2e/events",
        "/api/runs/.lab/events",
        "/api/runs/%2e%2e/responses",
        "/api/runs/link/events",
        "/lesson/..%2f..%2fREADME",
        "/figure/..%2fclip",
    ],
)
def test_no_path_leads_out(client: TestClient, folder: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "run.json").write_text("{}")
    link = folder / "link"
    if not link.is_symlink():
        link.symlink_to(tmp_path)
    answer = client.get(path)
    assert answer.status_code in (400, 404)
    assert "secret" not in answer.text and "import" not in answer.text


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("a.reward=python:evil.py:f", "there are inclusion-ordering"),
        ("a.advantage=python:evil.py:F", "there are raw"),
        ("a.loss=nothing", "there are log-prob"),
        ("a.lr=1e9", "one of"),
        ("a.samples=100000", "one of"),
        ("a.seed=-1", "between"),
        ("steps=100000", "no such control"),
        ("out=/tmp/x", "no such control"),
        ("a.run=../../x", "a name has letters"),
    ],
)
def test_a_training_that_cannot_be_is_refused_before_it_starts(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, state: str, why: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    asked = {"state": state, "sides": ["a", "b"], "steps": 1}
    answer = client.post("/api/trainings", json=asked)
    assert answer.status_code == 400
    assert why in answer.json()["error"]


@pytest.mark.parametrize(
    "asked",
    [[], {}, {"sides": "a", "steps": 1}, {"sides": ["c"], "steps": 1}, {"sides": ["a"], "steps": 0}, "x" * 30_000],
)
def test_a_command_that_is_none_is_refused(client: TestClient, asked: Any) -> None:
    assert client.post("/api/trainings", json=asked).status_code == 400


def test_a_command_without_end_is_not_read(client: TestClient) -> None:
    answer = client.post("/api/trainings", content=b" " * (MAX_BODY_BYTES + 1))
    assert answer.status_code == 400 and f"longer than {MAX_BODY_BYTES} bytes" in answer.json()["error"]
    answer = client.post("/api/trainings", content=b" " * MAX_BODY_BYTES)
    assert "the request body must be a JSON object" in answer.json()["error"]


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    content = {"a": [1.5, math.nan, (math.inf, "inf")], "b": {"c": -math.inf, "d": 2}, "e": None}
    assert json.loads(FiniteJSONResponse(content).body) == {
        "a": [1.5, None, [None, "inf"]],
        "b": {"c": None, "d": 2},
        "e": None,
    }


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), OverflowError("int too large")])
def test_numbers_that_cannot_be_computed_with_are_refused(error: ArithmeticError) -> None:
    def compute(_: Any) -> None:
        raise error

    with pytest.raises(ConfigError, match=f"too large to compute with: {error}"):
        json_route(compute)(None)


def test_a_run_that_is_not_there_or_not_ours_is_refused(client: TestClient) -> None:
    assert client.post("/api/trainings/nowhere/play").status_code == 400
    assert client.post("/api/trainings/nowhere/delete").status_code == 400
    assert client.get("/api/runs/nowhere/events").status_code == 400
    assert client.get("/api/runs/nowhere/responses").status_code == 400


@pytest.mark.parametrize("given", ["²", "-1", "1.0", "9" * 16, "9" * 5000])
def test_a_number_that_is_none_is_refused(tmp_path: Path, given: str) -> None:
    (tmp_path / ".lab" / "one").mkdir(parents=True)
    bare = TestClient(server.application(tmp_path))
    for path in ("events?after=", "responses?step="):
        answer = bare.get(f"/api/runs/one/{path}{given}")
        assert answer.status_code == 400 and "set a" in answer.json()["error"]
    answer = bare.get("/api/runs/one/events", headers={b"last-event-id": given.encode("latin-1")})
    assert answer.status_code == 400 and "set a" in answer.json()["error"]


@pytest.mark.parametrize("name", FIGURES)
def test_an_unknown_control_or_value_is_refused_with_what_there_is(client: TestClient, name: str) -> None:
    control = FIGURES[name].controls[0]
    for query in ("nothing=1", f"{control.name}=x", f"{control.name}=1e99", f"{control.name}=nan"):
        answer = client.get(f"/api/figure/{name}?{query}")
        assert answer.status_code == 400, query
        assert query.split("=")[0] in answer.json()["error"]
    page = client.get(f"/figure/{name}?nothing=1")  # the page itself says so, and shows its first state
    assert page.status_code == 200
    assert "no such control" in page.text


# ---- the figures ----------------------------------------------------------------------------------------

STATES = {
    "trajectory": ["", "step=4", "step=4&advantage=gae&lam=0.5&seed=3", "step=2&prompt=2&temperature=2"]
    + [f"step={step}&prompt={prompt}&advantage=by-turn&seed=3" for step, prompt in ((2, 4), (3, 4), (3, 5), (4, 6))],
    "variance": ["", "baseline=raw&samples=2&rewarded=1", "baseline=optimal-baseline&samples=8", "baseline=greedy"],
    "baselines": ["", "b1=10&b2=1", "b1=20&b2=-9&p=0.8"],
    "clip": ["", "A=-0.5&ratio=0.65", "A=0", "A=-0.5&ratio=1.5", "A=1&low=0.9&high=0.02"],
}


@pytest.mark.parametrize(("name", "state"), [(name, state) for name, all_ in STATES.items() for state in all_])
def test_the_snippet_runs_and_says_the_same(name: str, state: str) -> None:
    look = FIGURES[name].look(state)
    said, out = look["texts"], io.StringIO()
    with redirect_stdout(out):
        exec(look["snippet"], {})
    lines = dict(line.rsplit(" ", 1) for line in out.getvalue().splitlines() if "[" not in line)
    number = {key: float(said[key].replace("−", "-")) for key in said if re.fullmatch(r"−?\d+(\.\d+)?", said[key])}
    if name == "clip":
        assert float(lines["objective"]) == number["objective"]
        assert float(lines["gradient by log π"]) == number["gradient"]
    elif name == "baselines":
        assert float(lines["standard deviation of the weights"]) == number["std"]
        pushes = re.findall(r"expected push (\S+) variance (\S+)", out.getvalue())
        assert [round(float(push), 2) for push, _ in pushes] == [number["expected1"], number["expected2"]]
        assert sum(float(v) for _, v in pushes) == pytest.approx(number["variance"], abs=0.011)
    elif name == "variance":
        assert float(lines["measured variance"]) == number["variance_measured"]
        assert float(lines["measured bias"]) == number["bias_measured"]
        assert ("exact variance" in lines) == ("variance" in number)
        if "variance" in number:
            assert (float(lines["exact variance"]), float(lines["exact bias"])) == (number["variance"], number["bias"])
    else:
        drawn = look["drawing"]
        assert f"response {drawn['tokens']}" in out.getvalue()
        assert f"log-probs {[round(x, 3) for x in drawn['logp']]}" in out.getvalue()
        if drawn["advantages"] is not None:
            assert f"advantages {[round(x, 3) for x in drawn['advantages']]}" in out.getvalue()


def test_the_spec_numbers() -> None:
    clip, baselines = FIGURES["clip"], FIGURES["baselines"]
    up, down = clip.look("A=0.5&ratio=1.35")["texts"], clip.look("A=-0.5&ratio=0.65")["texts"]
    assert (up["objective"], up["unclipped"], up["gradient"]) == ("0.600", "0.675", "0.000")
    assert (down["objective"], down["unclipped"], down["gradient"]) == ("−0.400", "−0.325", "0.000")
    assert baselines.look("")["texts"]["std"] == "5.323"
    assert baselines.look("b1=10&b2=1")["texts"]["std"] == "1.155"


def test_the_dead_zone_is_where_autograd_says_so() -> None:
    for state in ("A=0.5", "A=-0.5", "A=1&high=0.5", "A=-1&low=0.7"):
        drawn = FIGURES["clip"].look(state)["drawing"]
        low, high = drawn["zone"]
        inside = [g for r, g in zip(drawn["ratio"], drawn["gradient"], strict=True) if low + 1e-6 < r < high - 1e-6]
        outside = [g for r, g in zip(drawn["ratio"], drawn["gradient"], strict=True) if not low <= r <= high]
        assert len(inside) > 5 and len(outside) > 5
        assert all(g == 0 for g in inside) and all(g != 0 for g in outside)


def test_the_words_of_the_clip_are_those_of_its_gradient() -> None:
    said = {state: FIGURES["clip"].look(state)["texts"]["zone"] for state in ("", "A=-0.5", "A=0.5&ratio=0.5", "A=0")}
    assert said[""].startswith("Dead zone: above 1.2")
    assert said["A=-0.5"].startswith("Outside the bounds, yet alive")
    assert said["A=0.5&ratio=0.5"].startswith("Outside the bounds, yet alive")
    assert said["A=0"].startswith("Without advantage")


def test_no_baseline_moves_the_expected_push_and_the_far_one_raises_the_variance() -> None:
    looks = [FIGURES["baselines"].look(f"b1={b1}&b2={b2}&p=0.3") for b1, b2 in ((0, 0), (10, 1), (20, -9), (-10, 20))]
    assert len({(look["texts"]["expected1"], look["texts"]["expected2"]) for look in looks}) == 1
    for state in looks[0]["drawing"]["states"]:
        assert state["expected"] == pytest.approx(state["exact"], abs=1e-12)
    variances = [float(look["texts"]["variance"]) for look in looks]
    assert variances[1] < variances[0] < variances[2]
    assert float(looks[0]["texts"]["variance_optimal"]) == 0  # two actions: the best baseline leaves nothing
    assert float(looks[0]["texts"]["variance_value"]) > 0


def test_the_dots_of_variance_scatter_as_the_oracle_says() -> None:
    from ascent.core.algorithms import Algorithm
    from ascent.lab.figures.variance import figure as variance

    table = variance.exact_oracle(3)
    for name in ("raw", "leave-one-out", "normalized"):
        algorithm = Algorithm(variance.BASELINES[name]())
        dots = variance.sampled_gradients(table, algorithm, 4, {}, seed=1, count=20_000)
        exact = variance.exact_estimate(3, name, 4)
        assert exact is not None
        assert float(dots.var(0).sum()) == pytest.approx(exact.variance, rel=0.05)
        assert float((dots.mean(0) - exact.mean).norm()) < 4 * (exact.variance / 20_000) ** 0.5


def test_a_reward_comes_at_the_end_and_not_before() -> None:
    for step in range(4):
        look = FIGURES["trajectory"].look(f"step={step}")
        assert look["drawing"]["reward"] is None and look["drawing"]["advantages"] is None
        assert look["texts"]["reward"].startswith("not yet")
    look = FIGURES["trajectory"].look("step=4&advantage=gae&lam=1")
    td = FIGURES["trajectory"].look("step=4&advantage=gae&lam=0")
    values = look["drawing"]["values"]
    assert look["drawing"]["advantages"][0] == pytest.approx(look["drawing"]["reward"] - values[0])
    assert td["drawing"]["advantages"][0] == pytest.approx(values[1] - values[0])


def test_a_turn_is_paid_when_it_is_answered_and_observations_have_no_advantage() -> None:
    looks = [FIGURES["trajectory"].look(f"prompt=4&seed=3&advantage=by-turn&step={step}") for step in range(4)]
    assert [look["texts"]["reward"].split(":")[0] for look in looks] == ["0 so far", "0 so far", "1 so far", "2 of 2"]
    assert [look["drawing"]["answered"] for look in looks] == [0, 0, 1, 2]
    assert len(looks[3]["drawing"]["advantages"]) == len(looks[3]["drawing"]["logp"]) == 2
    assert looks[1]["texts"]["sum"] == looks[2]["texts"]["sum"], "an observation has no log-prob"
    ways = looks[1]["drawing"]["next"]["ways"]
    assert {way["label"]: round(way["p"], 9) for way in ways} == {"[0 2 1]": 0.8, "[2 0 1]": 0.2}
    for step, prompt in ((3, 4), (3, 5), (4, 6)):
        look = FIGURES["trajectory"].look(f"prompt={prompt}&seed=1&advantage=gae&lam=1&step={step}")
        assert look["drawing"]["advantages"][0] == pytest.approx(
            look["drawing"]["reward"] - look["drawing"]["values"][0]
        )


def test_the_command_and_the_snippet_of_a_training_are_its_settings() -> None:
    from ascent.cli.run_flags import parse_train
    from ascent.settings import configure

    state = "world=sort&a.advantage=gae&a.kl=0.1&a.entropy=0.3&b.loss=sequence-ratio&b.reward=exact"
    look, parsed = FIGURES["training"].look(state), training.FIGURE.read(state)
    for line, side in zip(look["command"].splitlines(), training.SIDES, strict=True):
        config, _ = parse_train(line.split()[2:], "ascent train")
        assert config == training.config_of(parsed, side)
    calls: list[Any] = []
    code = look["snippet"].replace("import ascent\n", "").replace("ascent.train(", "train(")
    code = re.sub(r"^print.*$", "", code, flags=re.MULTILINE)
    exec(code, {"train": lambda task, **settings: calls.append(configure(task, settings))})
    assert calls == [training.config_of(parsed, side) for side in training.SIDES]


def test_every_control_of_a_training_is_the_setting_that_it_says() -> None:
    state = "a.advantage=normalized&a.eps=0.3&a.kl=0.1&a.entropy=0.7&a.samples=16&a.epochs=3&a.lr=0.03&a.seed=8"
    config = training.config_of(training.FIGURE.read(state + "&a.reward=exact"), "a")
    algorithm = config.algorithm
    assert algorithm.advantage == Normalized(1e-5) and algorithm.loss == Clipped(0.3, 0.3)
    assert algorithm.kl == InLoss("k3", 0.1) and algorithm.exploration.start == 0.7  # type: ignore[attr-defined]
    assert (config.samples, config.epochs, config.seed, algorithm.update.lr) == (16, 3, 8, 0.03)
    assert config.task.reward == "exact"
    bare = training.config_of(training.FIGURE.read(""), "a").algorithm
    assert bare.kl == NoKL() and bare.exploration == NoBonus()


@pytest.mark.parametrize("world", list(training.SMALL_TASKS))
@pytest.mark.parametrize("advantage", training.ADVANTAGE_LABELS)
def test_every_choice_of_the_training_figure_can_be_a_run(world: str, advantage: str) -> None:
    for loss in training.LOSS_LABELS:
        state = training.FIGURE.read({"world": world, "a.advantage": advantage, "a.loss": loss, "a.kl": "0.1"})
        assert training.config_of(state, "a").threads == 1


# ---- runs as streams ------------------------------------------------------------------------------------


def test_offsets_neither_lose_nor_repeat_a_line(tmp_path: Path) -> None:
    path, lines = tmp_path / "metrics.jsonl", [{"step": i, "reward": 1.5 * i} for i in range(7)]
    assert routes.read_from(path, 0) == []
    whole = "".join(json.dumps(line) + "\n" for line in lines).encode()
    seen, offset = [], 0
    for cut in range(len(whole) + 1):  # the file as a reader may find it: torn anywhere
        path.write_bytes(whole[:cut])
        fresh = routes.read_from(path, offset)
        assert fresh is not None
        seen += [line for _, line in fresh]
        offset = fresh[-1][0] if fresh else offset
    assert seen == lines and offset == len(whole)
    assert routes.read_from(path, len(whole) - 1) is None and routes.read_from(path, len(whole) + 1) is None


def test_a_stream_goes_on_from_an_id_and_starts_over_where_a_file_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known:
        def __init__(self, _: Path):
            self.max_reward = 5.0

    monkeypatch.setattr(routes, "Run", Known)
    text = "".join(json.dumps({"step": i, "reward": 2.0, "entropy": 1.0}) + "\n" for i in range(4))
    (tmp_path / "metrics.jsonl").write_text(text)
    ends = [m.end() for m in re.finditer("\n", text)]

    async def told(after: int) -> list[str]:
        return [part async for part in routes.stream(tmp_path, after, lambda: {"status": "finished"})]

    def ids(parts: list[str], kind: str = "metrics") -> list[int]:
        return [int(m[1]) for part in parts if (m := re.match(rf"id: (\d+)\nevent: {kind}\n", part))]

    monkeypatch.setattr(routes, "MIN_POLL_SECONDS", 0.001)
    assert ids(asyncio.run(told(0))) == ends
    assert ids(asyncio.run(told(ends[1]))) == ends[2:]
    assert ids(asyncio.run(told(ends[3]))) == []
    for wrong in (ends[3] + 100, ends[0] - 3):
        parts = asyncio.run(told(wrong))
        assert ids(parts, "reset") == [0] and ids(parts) == ends
    assert asyncio.run(told(0))[-1].startswith("event: end")


class Heard(GatedDisplay):
    def __init__(self, gate: Path) -> None:
        super().__init__(gate)
        self.said: list[str] = []

    def show_message(self, text: str) -> None:
        self.said.append(text)


def test_a_gate_lets_so_many_steps_through_and_a_stop_interrupts(tmp_path: Path) -> None:
    gate, caught = tmp_path / "gate", []
    assert read_gate(gate) == sys.maxsize
    display = Heard(gate)
    display.start(0, 3, "")
    write_json(gate, 3)
    display.step(0, {})
    display.step(1, {})
    write_json(gate, -1)
    before = signal.signal(signal.SIGINT, lambda *_: caught.append(1))
    try:
        display.step(1, {})
    finally:
        signal.signal(signal.SIGINT, before)
    display.step(2, {})  # the last step never waits
    assert [text.partition("/")[0] for text in display.said[1:]] == ["1", "2", "2", "3"] and caught == [1]


def test_a_shut_gate_holds_the_run_until_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, waits = tmp_path / "gate", []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            write_json(gate, 2)

    monkeypatch.setattr(trainings.time, "sleep", sleep)
    display = Heard(gate)
    display.start(0, 9, "")
    write_json(gate, 1)
    display.step(0, {})
    assert len(waits) == 3


def test_a_training_that_was_killed_before_it_began_has_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "WAIT_SCRIPT", "sleep 60")  # a library that is loading
    state, first = training.FIGURE.read(""), Trainings(tmp_path)
    names = [first.start(state, "a", 1) for _ in range(MAX_TRAININGS)]
    again = Trainings(tmp_path)  # a server that was started again
    try:
        assert {lab.status(name)["status"] for lab in (first, again) for name in names} == {"starting"}
        with pytest.raises(ConfigError, match="the maximum: wait"):
            again.start(state, "a", 1)
    finally:
        for child in first._children:
            os.killpg(child.pid, signal.SIGKILL)
    until = time.monotonic() + 120
    while first.status(names[0])["status"] == "starting" and time.monotonic() < until:  # it waits for its children
        time.sleep(0.01)
    for child in first._children:
        child.wait()
    assert {lab.status(name)["status"] for lab in (first, again) for name in names} == {"died"}
    assert again.status(names[0])["words"] == "died after step 0 (no exit code)"
    (again.control_folder(names[1]) / "exit").write_text("2\n")
    assert again.status(names[1])["status"] == "failed"
    (again.control_folder(names[2]) / "process").unlink()
    assert again.status(names[2])["status"] == "died"
    monkeypatch.setattr(trainings, "WAIT_SCRIPT", ":")
    assert again.start(state, "a", 1) not in names


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only /proc tells when a process began")
def test_another_process_with_the_pid_of_a_training_is_not_it(tmp_path: Path) -> None:
    found = Trainings(tmp_path)
    found.control_folder("one").mkdir(parents=True)
    note, began = (
        found.control_folder("one") / "process",
        Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19],
    )
    for ticks, status in ((int(began), "starting"), (int(began) - 1, "died")):
        note.write_text(f"{os.getpid()} {ticks}")
        assert found.status("one")["status"] == status


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only /proc tells when a process began")
def test_a_training_has_died_when_its_shell_has_said_how(tmp_path: Path) -> None:
    """Else a page that looks in between would never hear of the exit code."""
    found = Trainings(tmp_path)
    RunFolder.create(tmp_path / "one", {}, {"step": 2, "steps": 9}).close()  # left running, and nobody holds it
    found.control_folder("one").mkdir(parents=True)
    (found.control_folder("one") / "gate").write_text("9")
    began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    (found.control_folder("one") / "process").write_text(f"{os.getpid()} {began}")
    assert found.status("one")["status"] == "running"
    (found.control_folder("one") / "exit").write_text("137\n")
    assert found.status("one")["words"] == "died after step 0 (exit code 137, killed by signal 9)"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only /proc tells a process from what is left of one")
def test_a_process_that_nobody_waited_for_is_gone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert trainings._process_start_time(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert trainings._process_start_time(child.pid) is None
    child.wait()


def test_without_proc_a_pid_alone_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings.Path, "exists", lambda _: False)
    with subprocess.Popen(["sleep", "60"]) as child:
        assert trainings._process_start_time(child.pid) == ""
        child.kill()
    assert trainings._process_start_time(child.pid) is None


@pytest.mark.parametrize(
    ("command", "gate"), [("play", sys.maxsize), ("pause", 4), ("step", 5), ("stop", -1), ("reset", None)]
)
def test_a_command_moves_the_gate(tmp_path: Path, command: str, gate: int | None) -> None:
    """The run has done four steps."""
    found = Trainings(tmp_path)
    begun = RunFolder.create(tmp_path / "one", {}, {"step": 4, "steps": 9})
    begun.run["status"] = "interrupted"
    begun.close("interrupted")
    (tmp_path / "one" / "metrics.jsonl").write_text(json.dumps({"step": 3}) + "\n")
    found.control_folder("one").mkdir(parents=True)
    write_json(found.control_folder("one") / "gate", 7)
    if gate is None:
        with pytest.raises(ConfigError, match="reset: there are play, pause, step, stop"):
            found.command("one", command)
        assert read_gate(found.control_folder("one") / "gate") == 7
        return
    status = found.command("one", command)
    assert read_gate(found.control_folder("one") / "gate") == gate
    assert status["words"] == "stopped and saved after step 4 of 9"
    (found.control_folder("one") / "gate").unlink()
    with pytest.raises(ConfigError, match=f"this run was not started on this page, so {command} does not apply"):
        found.command("one", command)


@pytest.mark.long
def test_a_gated_training_has_the_exit_status_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    settings = {"length": 2, "numbers": 3, "policy.width": 8, "prompts": 2, "samples": 2, "eval_prompts": 2, "steps": 2}

    def train(out: str, **more: Any) -> int:
        return trainings.train_gated(str(gate), str(tmp_path / out), "sort", json.dumps(settings | more))

    assert train("finished") == 0
    assert Run(tmp_path / "finished").status == "finished" and (tmp_path / "finished" / "plot.png").exists()
    assert train("finished") == 2 and "ascent: " in capsys.readouterr().err
    write_json(gate, -1)
    assert train("stopped") == 130
    assert Run(tmp_path / "stopped").status == "interrupted" and not (tmp_path / "stopped" / "plot.png").exists()
    monkeypatch.setattr(trainings, "start", lambda *_: (_ for _ in ()).throw(RunError("out of memory")))
    assert train("failed") == 1 and capsys.readouterr().err.endswith("\nascent: out of memory\n")


def test_both_sides_are_started(
    guard: Guard, client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainings, "WAIT_SCRIPT", ":")
    answer = client.post("/api/trainings", json={"state": "", "sides": ["a", "b"], "steps": 3})
    names = answer.json()
    assert answer.status_code == 200 and list(names) == ["a", "b"]
    assert all(name.endswith(f"-{side}") for side, name in names.items())
    assert [read_gate(folder / ".lab" / name / "gate") for name in names.values()] == [3, 3]


def test_a_run_without_recorded_responses_has_an_empty_grid(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "one", {}, {"step": 0, "steps": 9}).close()
    assert routes.response_grid(tmp_path / "one", None) == {"step": None, "prompts": []}


# ---- lessons as pages -----------------------------------------------------------------------------------


def lesson(text: str, figure: str | None = "clip") -> lessons.Lesson:
    return lessons.Lesson("one", "One", figure, "", text)


def test_numbers_are_bound_and_links_set_the_figure() -> None:
    text = "It is {{objective}}. [x](figure:A=-0.5&ratio=0.65) [y](figure:!A=1) [z](lesson:two) [w](https://a.b)"
    made = lessons.render(lesson(text), {"objective": "<0.6>"}, ["two"])
    assert '<output class="bound" data-bind="objective">&lt;0.6&gt;</output>' in made
    assert 'data-set="A=-0.5&amp;ratio=0.65" data-fresh="false"' in made
    assert 'data-set="A=1" data-fresh="true"' in made
    assert 'href="../lesson/two"' in made
    assert 'rel="noreferrer noopener"' in made


def test_raw_html_in_a_lesson_stays_text() -> None:
    made = lessons.render(lesson("<script>alert(1)</script> <b onclick=x>", None), {}, [])
    assert "<script" not in made and "<b " not in made and "&lt;script&gt;" in made


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{nothing}}", "nothing that the figure says"),
        ("[x](figure:B=1)", "no such control"),
        ("[x](figure:A=9)", "between"),
        ("[x](lesson:nowhere)", "no lesson nowhere"),
    ],
)
def test_a_lesson_that_speaks_of_what_is_not_there_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        lessons.render(lesson(text), {"objective": "1"}, ["two"])


def test_a_link_to_a_figure_needs_a_figure() -> None:
    with pytest.raises(ConfigError, match=r"a link to figure:A=1, but the lesson has no figure"):
        lessons.render(lesson("[x](figure:A=1)", None), {}, [])


def test_a_heading_is_the_title_and_is_not_repeated(tmp_path: Path) -> None:
    for name, text in {
        "01-first_one.md": "# The title\n\nText.",
        "02-second.md": "---\ntitle: Own\nfigure: clip\nstate: A=1\n---\nAbove.\n\n# Below\n",
        "03-third.md": "Text alone.",
        "README.md": "No lesson.",
    }.items():
        (tmp_path / name).write_text(text)
    assert lessons.read_lessons(tmp_path) == [
        lessons.Lesson("first-one", "The title", None, "", "Text.\n"),
        lessons.Lesson("second", "Own", "clip", "A=1", "Above.\n\n# Below\n"),
        lessons.Lesson("third", "03-third", None, "", "Text alone.\n"),
    ]


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ("titel: One\nauthor: X", "author, titel does not belong in a lesson's head"),
        ("figure: clop", r"figure clop: there are .*clip.*Did you mean clip"),
    ],
)
def test_a_wrong_head_of_a_lesson_is_refused(tmp_path: Path, head: str, why: str) -> None:
    (tmp_path / "01-one.md").write_text(f"---\n{head}\n---\nText.")
    with pytest.raises(ConfigError, match=rf"01-one\.md: {why}"):
        lessons.read_lessons(tmp_path)


def test_two_lessons_have_two_names(tmp_path: Path) -> None:
    for name in ("01-same.md", "02-same.md"):
        (tmp_path / name).write_text("Text.")
    with pytest.raises(ConfigError, match="two lessons have the same name"):
        lessons.read_lessons(tmp_path)


def test_a_lesson_leads_to_those_around_it(client: TestClient, guard: Guard) -> None:
    found = lessons.read_lessons()
    pages = [client.get(f"/lesson/{one.slug}").text for one in found]
    before = [re.findall(r'<a class="back" href="([^"]*)">', page) for page in pages]
    after = [re.findall(r'<a class="on" href="([^"]*)">', page) for page in pages]
    addresses = [[f"{guard.root}/lesson/{one.slug}"] for one in found]
    assert before == [[], *addresses[:-1]] and after == [*addresses[1:], []]
    home = client.get("/").text
    assert all(address in home for (address,) in addresses)


@pytest.mark.parametrize("path", ["/figure/nowhere", "/api/figure/nowhere"])
def test_a_figure_that_is_not_there_is_refused(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (400, 404) and "there is no figure nowhere" in answer.text


def test_every_page_is_there_with_its_figure(client: TestClient) -> None:
    found = lessons.read_lessons()
    assert {lesson.figure for lesson in found} >= set(FIGURES)
    for path in ["/", *(f"/figure/{name}" for name in FIGURES), *(f"/lesson/{lesson.slug}" for lesson in found)]:
        page = client.get(path)
        assert page.status_code == 200, path
        assert "{{" not in re.sub(r'data-given="[^"]*"', "", page.text), path
    predicts = [client.get(f"/lesson/{x.slug}").text.count('class="predict"') for x in found if x.figure]
    assert all(predicts), "every lesson with a figure ends in a prediction"


# ---- adding one -----------------------------------------------------------------------------------------

OWN_FIGURE = """
from ascent.lab.figure_base import Figure, Look, Slider

FIGURE = Figure(
    name="doubling",
    title="Doubling",
    about="Twice a number.",
    controls=(Slider("n", "number", 2, 0, 9, 1),),
    compute=lambda state, runs: Look({"twice": str(2 * state["n"])}, {}, [], "print(2)"),
)
"""
OWN_PAGE = """
from starlette.responses import PlainTextResponse
from starlette.routing import Route

def routes(lab):
    return [Route("/hello", lambda request: PlainTextResponse("hello"))]
"""


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A lab to which a folder was added as a figure, and another one as a page: no file of the package is changed."""
    from ascent.lab import figures, pages

    for package, kind, name, code in ((figures, "figure", "doubling", OWN_FIGURE), (pages, "page", "hello", OWN_PAGE)):
        folder = tmp_path / f"{kind}s" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / f"{kind}.py").write_text(code)
        (folder / f"{kind}.js").write_text("export const own = 1;\n")
        (folder / f"{kind}.css").write_text("i { color: red; }\n")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder.parent)])
    all_figures.cache_clear()
    yield TestClient(server.application(tmp_path / "runs"))
    all_figures.cache_clear()
    for name in ("figures.doubling", "figures.doubling.figure", "pages.hello", "pages.hello.page"):
        sys.modules.pop(f"ascent.lab.{name}", None)


def test_a_figure_is_added_by_one_folder(added: TestClient) -> None:
    assert list(all_figures()) == [*FIGURES, "doubling"]
    assert '<a href="/figure/doubling">' in added.get("/").text, "every page lists it"
    page = added.get("/figure/doubling?n=4").text
    assert "/static/figures/doubling/figure.css" in page and "/static/figures/doubling/figure.js" in page
    assert added.get("/api/figure/doubling?n=4").json()["texts"] == {"twice": "8"}
    for name in ("figure.js", "figure.css"):
        assert added.get(f"/static/figures/doubling/{name}").status_code == 200
    for name in ("figure.py", "__init__.py", "", "../doubling/figure.py"):
        assert added.get(f"/static/figures/doubling/{name}").status_code == 404, "code is not served"


def test_a_page_is_added_by_one_folder(added: TestClient) -> None:
    assert added.get("/hello").text == "hello"
    assert added.get("/static/pages/hello/page.js").status_code == 200
    assert added.get("/static/pages/hello/page.py").status_code == 404


# ---- what is shipped ------------------------------------------------------------------------------------


def test_vendored_files_are_those_of_their_packages() -> None:
    vendor = LAB / "static" / "vendor"
    listed = json.loads((vendor / "vendored.json").read_text())
    licences = {entry["text"] for entry in listed.values()}
    assert {path.name for path in vendor.iterdir()} == {*listed, *licences, "vendored.json"}
    for name, entry in listed.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == entry["sha256"], name
        assert entry["version"] and entry["licence"] and (vendor / entry["text"]).stat().st_size > 500


def test_nothing_in_the_page_names_another_host() -> None:
    for path in LAB.rglob("*"):
        if path.suffix in (".js", ".css", ".svg") and "vendor" not in path.parts:
            text = path.read_text()

            assert not re.search(r"https?://(?!www\.w3\.org)", text), path


def test_every_address_in_a_page_lies_below_the_prefix(guard: Guard, client: TestClient) -> None:
    absolute = re.compile(r"""(from |import\(?|href=|src=|url\(|fetch\(|EventSource\(|assign\()["'`]/""")
    for path in LAB.rglob("*"):
        if path.suffix in (".js", ".css", ".html") and "vendor" not in path.parts:
            assert not absolute.search(path.read_text()), f"{path}: relative, {{{{ root }}}} or inLab(…)"
    for path in ("/", "/figure/clip", "/lesson/which-method", "/runs", "/run?id=x"):
        leading = re.findall(r'(?:href|src)="([^"]*)"', client.get(path).text)
        elsewhere = [link for link in leading if not link.startswith((guard.root + "/", "#", "?", "../", "https://"))]
        assert len(leading) > 10 and not elsewhere, path


@pytest.mark.long
def test_the_wheel_holds_the_lab(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("ascent", "lessons"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    held = set(zipfile.ZipFile(source / done.stdout.split()[-1]).namelist())
    files = (path for path in LAB.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    pages = {f"ascent/lab/lessons/{path.name}" for path in (ROOT / "lessons").glob("*.md")}
    assert held >= pages | {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    assert not [name for name in held if name.startswith(("lessons/", "tests/"))]


# ---- the command ----------------------------------------------------------------------------------------


def lab(*args: str) -> tuple[int, str]:
    from ascent.cli.main import main

    out = io.StringIO()
    with redirect_stderr(out), redirect_stdout(out):
        status = main(["lab", *args])
    return status, out.getvalue()


def test_the_command_says_what_is_missing_and_what_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    status, said = lab("--port", "99999", "--no-open")
    assert status == 2 and "set 0 to 65535" in said
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, said = lab("--port", str(taken.getsockname()[1]), "--no-open", "--runs", str(tmp_path))
    assert status == 2 and "another --port" in said
    status, said = lab("--no-open", "--runs", "/proc/nowhere")
    assert status == 2 and "Choose another folder" in said
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "starlette" else real(n, *a))
    status, said = lab("--no-open")
    assert status == 2 and "pip install 'ascent-rl[lab]'" in said


@pytest.mark.parametrize(("host", "told"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_command_says_when_other_machines_are_listened_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, told: bool
) -> None:
    monkeypatch.setattr(server.uvicorn.Server, "run", lambda _, sockets: sockets[0].close())
    monkeypatch.setattr(server, "_compute_figures", lambda: None)  # a thread that would outlive the test
    monkeypatch.setattr(server.torch, "set_num_threads", lambda _: None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        status, said = lab("--host", host, "--port", "0", "--no-open", "--runs", str(tmp_path))
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert status == 0 and "The lab is at http://" in said
    assert (f"It listens on {host}: other machines can reach it, unencrypted" in said) == told


def test_the_printed_address_is_a_name_that_is_answered_to() -> None:
    for host in ("127.0.0.1", "0.0.0.0", "::", "::1", "10.0.0.5", "localhost", "MyBox"):
        assert f"{host_name(host)}:1" in host_names(host, 1) and len(host_names(host, 1)) <= 4
    assert host_name("::1") == "[::1]" and host_name("10.0.0.5") == "10.0.0.5"
    assert host_name("0.0.0.0") == socket.gethostname().lower()


@pytest.mark.parametrize("rewarded", [1, 2, 3, 18])
def test_the_axes_of_the_variance_figure_are_orthogonal_and_do_not_depend_on_rounding(rewarded: int) -> None:
    """With one rewarded response the gradients of all responses are parallel, and an eigenvector is arbitrary."""
    along, across, _ = variance_figure._frame(rewarded)
    assert abs(float(along @ across)) < 1e-12 and float(across.norm()) == pytest.approx(1.0)
    first, second = across.abs().topk(2).values
    assert float(across[across.abs().argmax()]) > 0 and float(first - second) > 1e-3, "rounding cannot flip the sign"
