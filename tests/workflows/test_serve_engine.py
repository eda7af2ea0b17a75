"""`ascent serve --engine`: fake vLLM and SGLang servers behind the endpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from ascent.cli.main import main
from ascent.core.errors import ConfigError, RunError
from ascent.inference.remote import request_forwarder, weight_probe
from ascent.models import CausalLM
from ascent.workflows.loaded_policy import LoadedPolicy, model_policy
from ascent.workflows.policy_server import PolicyServer, ServeSettings, running_service, with_engine
from tests.inference.remote.test_remote_engine import every_engine, fake_environment, group_of, wait_for_end
from tests.stand_in import serving
from tests.workflows.test_serve import HELLO, LONG, post, until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedPolicy:
    return model_policy(str(tiny_folder))


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    (
        monkeypatch.setattr(weight_probe, "MAX_PROMPT_TOKENS", 24),
        monkeypatch.setattr(weight_probe, "MAX_RESPONSE_TOKENS", 8),
    )


@contextmanager
def behind(loaded: LoadedPolicy, engine: str = "vllm", servers: int = 1, **more: Any) -> Iterator[tuple[Any, Any]]:
    """Start a policy server with fake engine servers; yield both."""
    from copy import deepcopy

    stand_ins = [serving(deepcopy(loaded.policy.model), engine) for _ in range(servers)]
    made = [each.__enter__() for each in stand_ins]
    settings = {"engine_url": tuple(each.url for each in made), "engine_deadline": float(LONG)}
    how = {"port": 0, "rows": 4, "context": 300, "engine": engine, "engine_settings": settings} | more
    try:
        with running_service(loaded, ServeSettings(**how)) as service:
            service.sampler.health_check_interval = 0.05
            thread = threading.Thread(target=service.run)
            thread.start()
            try:
                yield service, made if servers > 1 else made[0]
            finally:
                service.close()
                thread.join(LONG)
                assert not thread.is_alive()
    finally:
        [each.__exit__(None, None, None) for each in stand_ins]


def client_of(service: PolicyServer, **headers: str) -> httpx.Client:
    return httpx.Client(
        base_url=service.url, headers={"authorization": f"Bearer {service.key}", **headers}, timeout=LONG
    )


def say(client: httpx.Client, messages: Any = HELLO, **more: Any) -> Any:
    answer = client.post("/chat/completions", json={"messages": messages, "max_tokens": 12, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(client: httpx.Client, **more: Any) -> list[Any]:
    body = {"messages": HELLO, "max_tokens": 12, "stream": True, **more}
    with client.stream("POST", "/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c.get("choices"))


@torch.no_grad()
def true_logp(loaded: LoadedPolicy, ids: list[int]) -> torch.Tensor:
    logits = loaded.policy.model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)


@every_engine
def test_an_engine_answers_streams_and_continues_sessions_on_recorded_ids(loaded: LoadedPolicy, engine: str) -> None:
    with behind(loaded, engine) as (service, server), client_of(service, **{"x-session-id": "mine"}) as client:
        first = client.post(
            "/chat/completions", json={"messages": HELLO, "max_tokens": 12, "seed": 3, "return_token_ids": True}
        )
        said = first.json()["choices"][0]
        messages = [*HELLO, said["message"], {"role": "user", "content": "and then?"}]
        second = client.post(
            "/chat/completions",
            json={"messages": messages, "max_tokens": 8, "logprobs": True, "return_token_ids": True},
        )
        assert [first.headers["x-ascent-session"], second.headers["x-ascent-session"]] == ["new", "extended"]
        before, choice = second.json()["prompt_token_ids"], second.json()["choices"][0]
        recorded = first.json()["prompt_token_ids"] + said["token_ids"]
        assert before[: len(recorded)] == recorded, "the ids that were drawn, as they were drawn"
        truth = true_logp(loaded, before + choice["token_ids"])[-len(choice["token_ids"]) :]
        logp = [each["logprob"] for each in choice["logprobs"]["content"]]
        assert torch.allclose(torch.tensor(logp, dtype=torch.float64), truth, atol=1e-4)
        with client_of(service) as alone:
            for seed in range(3):
                whole = say(alone, seed=seed, logprobs=True)["choices"][0]
                chunks = streamed(alone, seed=seed, logprobs=True)
                assert text_of(chunks) == whole["message"]["content"]
                told = [c["choices"][0] for c in chunks]
                logp = [each for part in told if part["logprobs"] for each in part["logprobs"]["content"]]
                assert logp == whole["logprobs"]["content"]
                assert told[-1]["finish_reason"] == whole["finish_reason"]
            assert len([part for part in told if part["delta"].get("content")]) > 2 and server.streamed >= 3
            cold = [say(alone, temperature=0, seed=seed)["choices"] for seed in (1, 2)]
            assert cold[0] == cold[1] == say(alone, top_k=1, temperature=0)["choices"]


@every_engine
def test_stop_strings_end_turns_of_remote_engines(loaded: LoadedPolicy, engine: str) -> None:
    with behind(loaded, engine, context=4000) as (service, server), client_of(service) as client:
        free = say(client, seed=5, max_tokens=60)["choices"][0]["message"]["content"]
        stop = free[5:8]
        for stream in (False, True):
            more = {"seed": 5, "stop": [stop], "max_tokens": 3000}
            if stream:
                chunks = streamed(client, **more)
                text, reason = text_of(chunks), chunks[-1]["choices"][0]["finish_reason"]
            else:
                choice = say(client, **more)["choices"][0]
                text, reason = choice["message"]["content"], choice["finish_reason"]
            assert (text, reason) == (free.split(stop)[0], "stop")
        until(lambda: server.left == server.streamed == 2)  # nobody waited for three thousand tokens


def test_unsupported_requests_are_rejected_and_restricted_sampling_has_no_log_probs(loaded: LoadedPolicy) -> None:
    with behind(loaded) as (service, server), client_of(service) as client:
        for body, word in (
            ({"temperature": 0.001}, "temperature"),
            ({"top_p": 0.5, "logprobs": True}, "over the kept tokens"),
            ({"presence_penalty": 1.0}, "presence_penalty"),
        ):
            answer = client.post("/chat/completions", json={"messages": HELLO, **body})
            assert answer.status_code == 400 and word in answer.json()["error"]["message"]
        say(client, top_p=0.5, top_k=3, min_p=0.1)
        asked = server.asked[-1]["sampling_params"]
        assert (asked["top_p"], asked["top_k"], asked["min_p"]) == (0.5, 3, 0.1)
        say(client, top_p=1.0, logprobs=True)
        assert not {"top_p", "top_k", "min_p"} & server.asked[-1]["sampling_params"].keys()


@every_engine
def test_stream_continues_on_another_server_after_a_loss(loaded: LoadedPolicy, engine: str) -> None:
    with behind(loaded, engine) as (service, server), client_of(service) as client:
        whole = say(client, seed=4)["choices"][0]["message"]["content"]
        server.kills = [5]  # tokens until it dies, and comes back without weights
        assert text_of(streamed(client, seed=4)) == whole and not server.kills
        server.abort_once = True
        assert text_of(streamed(client, seed=4)) == whole


def test_stream_that_would_change_tokens_ends_with_an_error(loaded: LoadedPolicy) -> None:
    with behind(loaded) as (service, server), client_of(service) as client:
        real = server.draw

        def other(ids: Any, salt: Any, temperature: float, seed: int, *more: Any) -> Any:
            return real(ids, salt, temperature, seed + (server.life > 0), *more)

        server.draw = other
        server.kills = [5]
        chunks = streamed(client, seed=4)
        assert "generated other tokens" in chunks[-1]["error"]["message"]
        assert say(client, seed=4)["choices"]


def test_full_queue_rejects_and_disconnected_clients_cancel_requests(loaded: LoadedPolicy) -> None:
    with behind(loaded, rows=1, queue=1) as (service, server), client_of(service) as client:
        server.hold_at = 2
        body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 60}).encode()
        peers = [socket.create_connection(("127.0.0.1", service.server.port)) for _ in range(2)]
        for count, peer in enumerate(peers, 1):
            peer.sendall(post(service, body))
            until(lambda count=count: len(service.queue.active) == count)
        busy = client.post("/chat/completions", json={"messages": HELLO})
        assert busy.status_code == 429 and busy.headers["retry-after"]
        [peer.close() for peer in peers]
        until(lambda: not service.queue.active)
        with server.lock:
            server.hold_at = -1
            server.lock.notify_all()
        assert say(client)["choices"]
        assert service.endpoint.counts["cancelled"] == 2 and not service.sampler.server_pool.servers[0].in_flight


def test_rejected_request_fails_one_turn_and_a_lost_server_all(
    loaded: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with behind(loaded) as (service, server), client_of(service) as client:
        real = server.respond
        server.respond = lambda *_: (400, {"error": "no"})
        answer = client.post("/chat/completions", json={"messages": HELLO})
        assert answer.status_code == 503 and "rejected" in answer.json()["error"]["message"]
        server.respond = real
        assert say(client)["choices"]
        service.sampler.server_pool.deadline = 0.2
        server.dead = True
        answer = client.post("/chat/completions", json={"messages": HELLO})
        assert answer.status_code == 503
        server.dead = False
        assert say(client)["choices"]


def test_recovered_server_is_used_again(loaded: LoadedPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_forwarder, "READMIT_INTERVAL", 0.05)
    with behind(loaded, servers=2) as (service, servers), client_of(service) as client:
        first = service.sampler.server_pool.servers[0]
        servers[0].kill()
        for seed in range(2, 6, 2):  # an even seed is asked of the first
            say(client, seed=seed)
        assert first.is_down
        servers[0].revive()
        until(lambda: servers[0].version == "0" and not first.is_down)  # it has weights again
        before = len(servers[0].asked)
        say(client, seed=8)
        assert len(servers[0].asked) > before


# ---- settings, and the command ----------------------------------------------------------------------------------


def test_engine_of_a_run_is_used_only_on_request() -> None:
    of_run = CausalLM("m", engine="vllm", engine_url=("http://127.0.0.1:1",), engine_transport="nccl")

    def engine(name: str, policy: CausalLM = of_run, **settings: Any) -> CausalLM:
        return with_engine(policy, ServeSettings(engine=name, engine_settings=settings))

    assert engine("local") == CausalLM("m") and engine("vllm") == of_run
    other = engine("vllm", engine_python="x")
    assert (other.engine_url, Path(other.engine_python).name, other.engine_transport) == ((), "x", "file")
    assert engine("sglang", engine_url=("http://127.0.0.1:2",)).engine == "sglang"
    for name, settings, why in (
        ("sglang", {}, "say where it is"),
        ("local", {"engine_url": ("http://127.0.0.1:2",)}, "are for --engine"),
        ("vllm", {"engine_url": ("http://10.0.0.7:2",)}, "must not be reachable"),
    ):
        with pytest.raises(ConfigError, match=why):
            engine(name, **settings)


def test_missing_or_failing_engine_is_an_error_and_leaves_nothing(
    tiny_folder: Path, tmp_path: Path, capsys: Any, loaded: LoadedPolicy
) -> None:
    serve = ["serve", str(tiny_folder), "--port", "0", "--engine", "vllm"]
    assert main(serve) == 2 and "say where it is" in capsys.readouterr().err
    assert main([*serve, "--engine.python", str(tmp_path)]) == 2 and "bin/python" in capsys.readouterr().err
    assert main([*serve, "--temperature", "0.001", "--engine.url", "http://127.0.0.1:1"]) == 2
    assert "another distribution" in capsys.readouterr().err
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho no module named vllm >&2\nexit 3\n")
    python.chmod(0o755)
    settings = {"engine_python": str(tmp_path)}
    told: list[str] = []
    before = threading.enumerate()
    with (
        pytest.raises(RunError, match="no module named vllm"),
        running_service(loaded, ServeSettings(port=0, engine="vllm", engine_settings=settings), "x", told.append),
    ):
        raise AssertionError("it started")
    assert "vllm is starting: 0 of at most 600 seconds" in told[0]
    assert not set(threading.enumerate()) - set(before)


@pytest.mark.smoke
def test_the_command_starts_an_engine_and_ends_it_with_ctrl_c(
    tiny_folder: Path, tmp_path: Path, warm_python: Any
) -> None:
    venv = fake_environment(tmp_path, warm_python.executable)
    command = [sys.executable, "-m", "ascent", "serve", str(tiny_folder), "--port", "0", "--max-context", "100"]
    command += ["--engine", "vllm", "--engine.python", str(venv), "--engine.deadline", "120", "--device", "cpu"]
    more = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=more) as served:
        assert served.stdout is not None and served.stderr is not None
        lines = []
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append(served.stdout.readline())
            assert lines[-1], served.stderr.read()
        assert "served by vllm" in lines[0]
        url, key = lines[0].split(" at ")[1].split(": ")[0], lines[1].split(": ")[1].strip()
        with openai.OpenAI(base_url=url, api_key=key) as client:
            assert client.chat.completions.create(model="x", messages=HELLO, max_tokens=4).choices
        children = Path(f"/proc/{served.pid}/task/{served.pid}/children").read_text().split()
        groups = [int(child) for child in children if group_of(int(child))]
        assert groups
        served.send_signal(signal.SIGINT)
        assert served.wait(LONG) == 130
    wait_for_end(*groups)
