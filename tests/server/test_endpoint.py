"""The endpoint: responses to OpenAI's client, recorded sessions, and refused requests."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import openai
import pytest
import torch
from starlette.exceptions import HTTPException

from ascent.core.errors import ConfigError
from ascent.core.sampling_params import SamplingParams
from ascent.environments.chat_session import ChatRenderer, HistoryMismatchError, InvalidMessageError, Session
from ascent.environments.tool_call_formats import FORMATS
from ascent.environments.tool_chat import ToolChat
from ascent.inference.continuous_batching import serve_requests
from ascent.inference.engine import LocalEngine
from ascent.inference.request_queue import Completion, CompletionDelta, FinishReason, RequestQueue
from ascent.models import LanguageModel
from ascent.server import open_sessions
from ascent.server.connections import is_local
from ascent.server.endpoint import Endpoint
from ascent.server.open_sessions import OpenSessions, SessionSettings
from ascent.server.openai_requests import MAX_BODY_BYTES, ChatRequest
from ascent.server.requirements import check_packages
from ascent.server.session_turns import EventDispatcher, Events
from tests.chats import chat_tokenizer, stop_ids
from tests.language import config_of, tiny_tokenizer

KEY, LONG = "sk-of-the-server", 60
HELLO = [{"role": "user", "content": "hello"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "a sum",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


PLAIN: dict[int, Any] = {}
"""Copies of the models that no decode thread uses."""
pytestmark = pytest.mark.long


@cache
def language_model(template: str = "", dtype: torch.dtype = torch.float32) -> LanguageModel:
    """Return a random model with a chat template, cached."""
    import transformers

    tokenizer: Any = chat_tokenizer(template) if template else tiny_tokenizer()
    ends = stop_ids(template, tokenizer) if template else tokenizer.eos_token_id
    shape = {"vocab_size": len(tokenizer), "eos_token_id": ends, "max_position_embeddings": 4096}
    model = transformers.AutoModelForCausalLM.from_config(config_of("Llama", **shape)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.25)
    model = model.to(dtype)
    PLAIN[id(made := LanguageModel(model, tokenizer))] = copy.deepcopy(model)
    return made


def settings_of(**more: Any) -> SessionSettings:
    defaults = {
        "context_length": 400,
        "max_prompt_tokens": 300,
        "max_response_tokens": 300,
        "max_turn_tokens": 24,
        "make_sampling_params": SamplingParams,
    }
    return SessionSettings(**defaults | more)


WIDE = settings_of(context_length=4000, max_prompt_tokens=3000, fixed=True)


@contextmanager
def served(
    settings: SessionSettings | None = None, key: str = KEY, most: int = 64, template: str = "", **more: Any
) -> Iterator[Any]:
    """Run an endpoint of a tiny model with a decode thread."""
    lm, settings = language_model(template, more.pop("dtype", torch.float32)), settings or settings_of()
    support = SamplingParams(min_tokens=more.pop("min_tokens", 0))
    sampler = LocalEngine(lm, 300, 1.0, torch.Generator(), support, more.pop("rows", 4))
    sampler.version = 7
    queue = RequestQueue(most)
    endpoint = Endpoint(queue, ChatRenderer(lm.tokenizer, lm.stop_token_ids), settings, lm.vocab_size, key=key)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            serve_requests(sampler, queue, 8, 300, settings.max_prompt_tokens)
        except BaseException as error:
            failed.append(error)
            queue.fail(repr(error))

    thread = threading.Thread(target=work)
    if not more.pop("asleep", False):
        thread.start()
    try:
        yield SimpleNamespace(app=endpoint, queue=queue, lm=lm, start=thread.start)
    finally:
        queue.close()
        if thread.ident is not None:
            thread.join(LONG)
    assert not failed, failed


def client_of(app: Any, key: str = KEY, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(
        transport=transport,
        base_url="http://endpoint",
        headers={"authorization": f"Bearer {key}", **headers},
        timeout=LONG,
    )


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    return await client.post(path, json=body)


async def chat(client: httpx.AsyncClient, messages: Any = HELLO, **more: Any) -> Any:
    answer = await post(client, "/v1/chat/completions", model="policy", messages=messages, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(client: httpx.AsyncClient, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
    answer = await client.post(path, json={"stream": True, **body})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def template_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message.for_template() for message in ChatRequest.model_validate({"messages": messages}).messages]


def true_logp(lm: LanguageModel, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return the log-prob of each token after the first by a plain forward pass."""
    with torch.no_grad():
        logits = PLAIN[id(lm)](input_ids=torch.tensor([ids])).logits[0, :-1].double() / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)


def check_record(lm: LanguageModel, session: Session) -> None:
    """Check the recorded log-probs of sampled tokens against a forward pass."""
    truth = true_logp(lm, session.prompt + session.response)[len(session.prompt) - 1 :]
    mask = torch.tensor(session.sampled)
    assert mask.any() and len(session.sampled) == len(session.response)
    assert torch.allclose(torch.tensor(session.logp, dtype=torch.float64)[mask], truth[mask], atol=1e-5)


# ---- what a client gets -----------------------------------------------------------------------------------------


def test_chat_completion_has_usage_finish_reason_and_logprobs() -> None:
    async def go(made: Any) -> None:
        async with client_of(made.app) as client:
            models = (await client.get("/v1/models")).json()
            assert models["data"][0]["id"] == "policy"
            said = await chat(client, seed=5, logprobs=True, return_token_ids=True)
            again = await chat(client, seed=5)
            other = await chat(client, seed=6)
            whole = await chat(client, seed=5, max_tokens=3)
        choice, usage = said["choices"][0], said["usage"]
        ids = choice["token_ids"]
        assert said["prompt_token_ids"] == made.lm.encode(HELLO)
        assert usage == {"prompt_tokens": len(said["prompt_token_ids"]), "completion_tokens": len(ids)} | {
            "total_tokens": len(said["prompt_token_ids"]) + len(ids)
        }
        logp = [each["logprob"] for each in choice["logprobs"]["content"]]
        truth = true_logp(made.lm, said["prompt_token_ids"] + ids)[-len(ids) :]
        assert torch.allclose(torch.tensor(logp, dtype=torch.float64), truth, atol=1e-5)
        assert choice["finish_reason"] == ("stop" if ids[-1] in made.lm.stop_token_ids else "length")
        assert again["choices"][0]["message"] == choice["message"] != other["choices"][0]["message"]
        assert whole["usage"]["completion_tokens"] == 3 and whole["choices"][0]["finish_reason"] == "length"

    with served() as made:
        asyncio.run(go(made))


def test_stream_equals_whole_response() -> None:
    async def go(made: Any) -> None:
        async with client_of(made.app) as client:
            for seed in range(3):
                whole = await chat(client, seed=seed)
                chunks = await streamed(client, messages=HELLO, seed=seed, stream_options={"include_usage": True})
                deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
                assert deltas[0]["role"] == "assistant"
                text = "".join(delta.get("content") or "" for delta in deltas)
                assert text == whole["choices"][0]["message"]["content"]
                assert chunks[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
                assert chunks[-1]["usage"] == whole["usage"]
                plain = (await post(client, "/v1/completions", prompt="ab", seed=seed)).json()
                parts = await streamed(client, "/v1/completions", prompt="ab", seed=seed)
                assert "".join(part["choices"][0]["text"] for part in parts) == plain["choices"][0]["text"]
            assert len(chunks) > 4

    with served() as made:
        asyncio.run(go(made))


def test_token_ids_as_prompt_and_completion() -> None:
    async def go(made: Any) -> None:
        prompt = made.lm.encode(HELLO)
        async with client_of(made.app) as client:
            said = (await post(client, "/v1/completions", prompt=prompt, seed=5, logprobs=0, max_tokens=9)).json()
            settings = {"seed": 5, "max_tokens": 9, "temperature": 1.0}
            path, plain = "/inference/v1/generate", {"token_ids": prompt, "sampling_params": settings}
            bare = (await post(client, path, **plain)).json()["choices"][0]
            settings["logprobs"] = 0
            ids = (await post(client, path, **plain)).json()
            text = (await post(client, "/v1/completions", prompt="hello", seed=1, max_tokens=4)).json()
        choice = ids["choices"][0]
        named = [int(each["token"].removeprefix("token_id:")) for each in choice["logprobs"]["content"]]
        assert named == choice["token_ids"] == bare["token_ids"] and bare["logprobs"] is None
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == (
            said["choices"][0]["logprobs"]["token_logprobs"]
        )
        assert made.app.renderer.decode(choice["token_ids"]) == said["choices"][0]["text"]
        assert text["usage"]["prompt_tokens"] == 5

    with served() as made:
        asyncio.run(go(made))


def test_sampling_settings_of_clients_are_used_when_serving_and_ignored_in_training() -> None:
    async def go(made: Any) -> None:
        async with client_of(made.app) as client:
            cold = [await chat(client, temperature=0, seed=seed) for seed in (1, 2)]
            assert cold[0]["choices"] == cold[1]["choices"]
            narrow = [await chat(client, top_k=1, seed=seed) for seed in (1, 2)]
            assert narrow[0]["choices"] == narrow[1]["choices"] == cold[0]["choices"]
            stopped = await chat(client, seed=5)
            letter = stopped["choices"][0]["message"]["content"][2]
            cut = await chat(client, seed=5, stop=[letter])
            assert (
                cut["choices"][0]["message"]["content"] == stopped["choices"][0]["message"]["content"].split(letter)[0]
            )
            assert cut["choices"][0]["finish_reason"] == "stop"
            parts = await streamed(client, messages=HELLO, seed=5, stop=letter)
            text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
            assert text == cut["choices"][0]["message"]["content"]

    async def trained(made: Any) -> None:
        keys = [made.app.open(Session(9), settings_of(fixed=True)) for _ in range(2)]
        async with client_of(made.app, keys[0][0]) as first, client_of(made.app, keys[1][0]) as second:
            plain, asked = await chat(first), await chat(second, temperature=0, seed=4, top_p=0.1, presence_penalty=1)
        assert plain["choices"] == asked["choices"]
        assert keys[1][1].session.ignored_settings == {"temperature": 0, "seed": 4, "top_p": 0.1, "presence_penalty": 1}

    with served() as made:
        asyncio.run(go(made))
    with served(key="") as made:
        asyncio.run(trained(made))


# ---- sessions ---------------------------------------------------------------------------------------------------


async def converse(client: httpx.AsyncClient, turns: int, **more: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = list(HELLO)
    for turn in range(turns):
        said = await chat(client, messages, **more)
        messages = [*messages, said["choices"][0]["message"], {"role": "user", "content": f"and then {turn}"}]
    return messages


def test_sessions_continue_their_record_and_concurrency_changes_nothing() -> None:
    def sessions(made: Any, settings: SessionSettings) -> list[tuple[str, Any]]:
        return [made.app.open(Session(seed), settings) for seed in range(10, 16)]

    async def go(made: Any, together: bool) -> list[Session]:
        keys = sessions(made, settings_of(fixed=True))

        async def one(key: str) -> None:
            async with client_of(made.app, key) as client:
                await converse(client, 3)

        if together:
            await asyncio.gather(*(one(key) for key, _ in keys))
        else:
            for key, _ in keys:
                await one(key)
        return [open_session.session for _, open_session in keys]

    with served(key="", dtype=torch.float64) as made:  # so that no draw falls within rounding
        together = asyncio.run(go(made, together=True))
        alone = asyncio.run(go(made, together=False))
    for a, b in zip(together, alone, strict=True):
        assert (a.prompt, a.response, a.sampled, a.turn) == (b.prompt, b.response, b.sampled, b.turn)
        assert a.num_turns == 3 and not a.mismatch and a.turn[-1] == 2 and a.seed == b.seed
        check_record(made.lm, a)
        tail = made.app.renderer.decode(a.response, special=True)
        assert "<|im_end|>\n<|im_start|>user\nand then 0" in tail


def test_history_mismatch_ignores_json_spacing_ids_and_reasoning() -> None:
    renderer = ChatRenderer(chat_tokenizer("qwen3"), stop_ids("qwen3", chat_tokenizer("qwen3")))
    words = '<think>\nhm\n</think>\n\nSo <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    turn = [*renderer.tokenizer(words, add_special_tokens=False)["input_ids"], renderer.tokenizer.eos_token_id]
    reply = renderer.parse_turn(turn, [ADD])
    assert (reply.content.strip(), reply.reasoning, reply.calls[0].arguments) == ("So", "hm", {"a": 1, "b": "é"})

    def history(**change: Any) -> list[dict[str, Any]]:
        call = {"id": "mine", "function": {"name": "add", "arguments": '{ "b":"\\u00e9",   "a": 1}'}}
        said = {"role": "assistant", "content": "So", "tool_calls": [call]} | change
        return template_messages([*HELLO, said, {"role": "tool", "tool_call_id": "mine", "content": "2"}])

    def recorded() -> Session:
        session = Session(0)
        read = session.extend_with_messages(HELLO, [ADD], renderer)
        session.record_turn(read, turn, [0.0] * len(turn), [1.0] * len(turn), 0.0)
        session.record_messages(HELLO, [ADD], reply)
        return session

    tail = recorded().extend_with_messages(history(), [ADD], renderer)
    assert "2" in renderer.decode(tail, special=True) and tail == renderer.render_suffix(
        turn, reply.calls, history()[2:], [ADD]
    )
    for change, why in {
        "content": ({"content": "So!"}, "content differs"),
        "call": (
            {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": "é"}'}}]},
            "tool calls differ",
        ),
        "no call": ({"tool_calls": None}, "tool calls differ"),
        "role": ({"role": "user", "tool_calls": None}, "its role was assistant"),
    }.values():
        with pytest.raises(HistoryMismatchError, match=why):
            recorded().extend_with_messages(history(**change), [ADD], renderer)
    with pytest.raises(HistoryMismatchError, match="tools differ"):
        recorded().extend_with_messages(history(), [], renderer)
    with pytest.raises(HistoryMismatchError, match="no message follows"):
        recorded().extend_with_messages(HELLO, [ADD], renderer)
    with pytest.raises(HistoryMismatchError, match="did not write"):
        recorded().extend_with_messages([*history(), {"role": "assistant", "content": "x"}, *HELLO], [ADD], renderer)


def test_tool_results_are_matched_to_calls_by_id() -> None:
    renderer = ChatRenderer(chat_tokenizer("mistral"), stop_ids("mistral", chat_tokenizer("mistral")))
    words = '[TOOL_CALLS] [{"name": "add", "id": "number001"}, {"name": "add", "id": "number002"}]'
    turn = [*renderer.tokenizer(words, add_special_tokens=False)["input_ids"], renderer.tokenizer.eos_token_id]
    reply, session = renderer.parse_turn(turn, [ADD]), Session(0)
    session.record_turn(
        session.extend_with_messages(HELLO, [ADD], renderer), turn, [0.0] * len(turn), [1.0] * len(turn), 0.0
    )
    session.record_messages(HELLO, [ADD], reply)
    calls = [{"id": name, "function": {"name": "add", "arguments": "{}"}} for name in ("mine", "yours")]
    said = {"role": "assistant", "tool_calls": calls}
    for order, called in ((("yours", "mine"), (2, 1)), (("mine", "yours"), (1, 2)), (("", "who"), (1, 2))):
        results = [{"role": "tool", "tool_call_id": name, "content": f"[{name}]"} for name in order]
        read = session.extend_with_messages(template_messages([*HELLO, said, *results]), [ADD], renderer)
        text = "".join(renderer.decode(read, special=True).split())
        for name, number in zip(order, called, strict=True):
            assert f'"content":[{name}],"call_id":"number00{number}"' in text, text


def test_history_mismatch_invalidates_an_episode_and_restarts_a_served_session() -> None:
    async def trained(made: Any) -> None:
        key, open_session = made.app.open(Session(9), settings_of(fixed=True))
        async with client_of(made.app, key) as client:
            messages = await converse(client, 1)
            messages[1] = messages[1] | {"content": "what it never said"}
            refused = await post(client, "/v1/chat/completions", messages=messages)
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "rewritten"
            again = await post(client, "/v1/chat/completions", messages=HELLO)
            assert again.status_code == 400
        assert "content differs" in open_session.session.mismatch and made.app.counts["rewritten"] == 1
        assert open_session.session.num_turns == 1

    async def asked(made: Any) -> None:
        async with client_of(made.app, **{"x-session-id": "mine"}) as client:
            messages = await converse(client, 1, seed=3)
            on = await client.post("/v1/chat/completions", json={"messages": messages})
            assert on.headers["x-ascent-session"] == "extended"
            *messages, last = [*messages, on.json()["choices"][0]["message"], *HELLO]
            said, messages[1] = messages[1], messages[1] | {"content": "what it never said"}
            long = {"messages": [*messages, last | {"content": "x" * 310}]}
            assert (await client.post("/v1/chat/completions", json=long)).status_code == 400
            true = {"messages": [messages[0], said, *messages[2:], last]}
            on = await client.post("/v1/chat/completions", json=true)
            assert on.headers["x-ascent-session"] == "extended", "a refused request changes nothing"
            new = await client.post("/v1/chat/completions", json={"messages": messages})
            assert (new.status_code, new.headers["x-ascent-session"]) == (200, "rewritten")
        async with client_of(made.app, **{"x-session-id": "yours"}) as client:
            first = await client.post("/v1/chat/completions", json={"messages": HELLO})
            assert first.headers["x-ascent-session"] == "new"

    with served(key="") as made:
        asyncio.run(trained(made))
    with served() as made:
        asyncio.run(asked(made))


def test_history_without_a_new_message_is_refused() -> None:
    """The last message is the policy's, so there is nothing to respond to."""

    async def go(made: Any) -> None:
        key, open_session = made.app.open(Session(9), settings_of(fixed=True))
        async with client_of(made.app, key) as client:
            *said, _ = await converse(client, 1)
            again = await post(client, "/v1/chat/completions", messages=said)
        assert again.status_code == 400 and again.json()["error"]["code"] == "rewritten"
        assert open_session.session.num_turns == 1 and open_session.session.mismatch

    with served(key="") as made:
        asyncio.run(go(made))


def test_token_history_has_to_match_the_record() -> None:
    async def go(made: Any) -> None:
        key, open_session = made.app.open(Session(9), settings_of(fixed=True))
        async with client_of(made.app, key) as client:
            first = (await post(client, "/inference/v1/generate", token_ids=[5, 6, 7])).json()
            ids = [5, 6, 7, *first["choices"][0]["token_ids"], 8, 9]
            await post(client, "/inference/v1/generate", token_ids=ids)
            assert open_session.session.num_turns == 2 and open_session.session.sampled[-1]
            check_record(made.lm, open_session.session)
            odd = await post(client, "/inference/v1/generate", token_ids=[5, 6, 8, *ids[3:], 4])
            assert odd.status_code == 400 and "token 2" in open_session.session.mismatch

    with served(key="") as made:
        asyncio.run(go(made))


# ---- keys, limits, invalid requests -----------------------------------------------------------------------------


def test_wrong_keys_and_closed_sessions_are_refused() -> None:
    async def go(made: Any) -> None:
        key, open_session = made.app.open(Session(1), settings_of(fixed=True))
        other, untouched = made.app.open(Session(2), settings_of(fixed=True))
        for wrong in ("", "sk-nothing", key[:-1], key + "x", KEY, "é"):
            async with client_of(made.app, "x") as client:
                answer = await client.post(
                    "/v1/chat/completions",
                    json={"messages": HELLO},
                    headers={"authorization": f"Bearer {wrong}".encode(), "x-session-id": key},
                )
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        async with client_of(made.app, key, **{"x-session-id": other}) as client:
            await chat(client)
            page = await client.post("/v1/chat/completions", json={}, headers={"origin": "http://evil"})
            assert page.status_code == 403
            made.app.close(key, "over")
            assert (await post(client, "/v1/chat/completions", messages=HELLO)).status_code == 401
        assert (
            open_session.session.num_turns == 1 and not untouched.session.num_turns and not untouched.session.response
        )

    with served(key="") as made:
        asyncio.run(go(made))


INVALID_REQUESTS: dict[str, Any] = {
    "no messages": {},
    "messages": {"messages": "hello"},
    "none": {"messages": []},
    "a role": {"messages": [{"role": "king", "content": "x"}]},
    "a picture": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    "calls of a user": {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
    "a call": {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": 3}]}]},
    "arguments": {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
    "temperature": {"messages": HELLO, "temperature": "hot"},
    "temperature below": {"messages": HELLO, "temperature": -1},
    "top_p": {"messages": HELLO, "top_p": 2},
    "max_tokens": {"messages": HELLO, "max_tokens": -3},
    "max_tokens true": {"messages": HELLO, "max_tokens": True},
    "max_tokens 0": {"messages": HELLO, "max_tokens": 0},
    "n": {"messages": HELLO, "n": 3},
    "stop": {"messages": HELLO, "stop": [""]},
    "stop 3": {"messages": HELLO, "stop": 3},
    "seed": {"messages": HELLO, "seed": "x"},
    "stream": {"messages": HELLO, "stream": "yes"},
    "tools": {"messages": HELLO, "tools": [{"function": {}}]},
    "tools 2": {"messages": HELLO, "tools": 5},
    "forced": {"messages": HELLO, "tools": [ADD], "tool_choice": "required"},
    "penalty": {"messages": HELLO, "presence_penalty": 1.0},
    "alternatives": {"messages": HELLO, "logprobs": True, "top_logprobs": 3},
    "too long": {"messages": [{"role": "user", "content": "x" * 310}]},
    "far too long": {"messages": [{"role": "user", "content": "x" * 100_000}]},
    "too many": {"messages": HELLO * 3000},
    "n true": {"messages": HELLO, "n": True},
    "a huge temperature": {"messages": HELLO, "temperature": 10**400},
    "a huge top_k": {"messages": HELLO, "top_k": 10**400},
    "half a top_k": {"messages": HELLO, "top_k": 1.5},
    "logprobs": {"messages": HELLO, "logprobs": "yes"},
    "one call at most": {"messages": HELLO, "tools": [ADD], "parallel_tool_calls": "no"},
    "functions": {"messages": HELLO, "functions": [{"name": "f"}]},
    "sound": {"messages": HELLO, "modalities": ["text", "audio"]},
    "json alone": {"messages": HELLO, "response_format": {"type": "json_object"}},
    "bias": {"messages": HELLO, "logit_bias": {"5": 1}},
    "not finite": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}]}]
    },
    "half a character": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}
        ]
    },
    "many calls": {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 2000}]},
    "a custom tool": {"messages": HELLO, "tools": [{"type": "custom", "custom": {"name": "f"}}]},
    **{
        f"a schema {i}": {"messages": HELLO, "tools": [{"function": {"name": "f", "parameters": schema}}]}
        for i, schema in enumerate(
            (
                None,
                {"properties": {"a": {"anyOf": 5}}},
                {"properties": {"a": {"type": [{"x": 1}]}}},
                {"properties": {"a": {"type": [1]}}},
                {"properties": {"a": {"enum": 5}}},
                {"properties": {"a": [1]}},
                {"properties": [1]},
                {"properties": {"a": {}}, "required": 5},
            )
        )
    },
}


def test_invalid_requests_are_refused_with_a_message() -> None:
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"messages": [' * 5000,
        b'{"x": NaN}',
        b'"\\ud800"',
        b'{"a": "\\ud800"}',
        b"\xff",
    ]
    tokens: list[Any] = [None, [], "x", [1.5], [-1], [10**9], [True], [[1, 2], [3]], list(range(2)) * 300]

    async def go(made: Any) -> None:
        async with client_of(made.app) as client:
            for name, body in INVALID_REQUESTS.items():
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 400 and answer.json()["error"]["message"], name
            for raw in bodies:
                answer = await client.post("/v1/chat/completions", content=raw)
                assert answer.status_code == 400, raw[:20]
            for ids in tokens:
                answer = await post(client, "/inference/v1/generate", token_ids=ids)
                assert answer.status_code == 400, ids
            answer = await post(client, "/inference/v1/generate", token_ids=[1], sampling_params=3)
            assert answer.status_code == 400
            assert (await client.post("/v1/chat/completions", content=b" " * (MAX_BODY_BYTES + 1))).status_code == 413
            nothing = await client.get("/v1/chat/completions")
            assert nothing.status_code == 405 and nothing.headers["allow"] == "POST"
            for method in ("HEAD", "OPTIONS", "DELETE", "FOO"):
                assert (await client.request(method, "/v1/models")).status_code == 405
            for odd in ({"logprobs": -1}, {"logprobs": "x"}, {"echo": True}, {"best_of": 2}, {"suffix": "x"}):
                assert (await post(client, "/v1/completions", prompt="a", **odd)).status_code == 400
            assert (await client.get("/etc/passwd")).status_code == 404
            await chat(client)  # and it still answers
        assert not made.queue.active

    with served() as made:
        asyncio.run(go(made))


def test_common_optional_fields_are_accepted() -> None:
    async def go(made: Any) -> None:
        async with client_of(made.app) as client:
            for more in (
                {
                    "n": 1,
                    "logit_bias": {},
                    "response_format": {"type": "text"},
                    "parallel_tool_calls": True,
                    "tools": [],
                },
                {"user": "me", "store": False, "metadata": {}, "service_tier": "auto"},
                {"max_tokens": 10**400, "max_completion_tokens": None, "stop": None, "seed": -(10**30)},
                {"temperature": 1e-300, "logprobs": True, "top_logprobs": 0, "top_p": 1, "stream": None},
                {"tools": [ADD, ADD], "tool_choice": "none"},
                {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}], "tool_choice": "auto"},
            ):
                await chat(client, **{"max_tokens": 3} | more)
            part = {"type": "text", "text": "x"}
            for message in (
                {"content": ""},
                {"content": None},
                {"content": [part, part]},
                {"content": []},
                {"name": "me"},
            ):
                await chat(
                    client, [{"role": "developer", "content": "be good"}, {"role": "user", **message}], max_tokens=3
                )
            assert (await client.get("/v1/models/policy")).json()["id"] == "policy"
            lower = await client.get("/v1/models", headers={"authorization": f"bearer  {KEY}"})
            assert lower.status_code == 200
            for header in ("", KEY, f"Basic {KEY}", "Bearer"):
                assert (await client.get("/v1/models", headers={"authorization": header})).status_code == 401
            cold, greedy = [(await chat(client, temperature=t, logprobs=True))["choices"] for t in (1e-300, 0)]
            assert cold == greedy

    with served() as made:
        asyncio.run(go(made))


def test_recorded_settings_are_short_and_the_body_limit_follows_the_context_length() -> None:
    async def go(made: Any) -> None:
        key, open_session = made.app.open(Session(9), settings_of(fixed=True))
        async with client_of(made.app, key) as client:
            await chat(client, response_format={"type": "json_schema", "x": "y" * 10_000}, seed=5)
            large = await client.post(
                "/v1/chat/completions", content=b'{"x": "' + b"y" * made.app.max_body_bytes + b'"}'
            )
        assert (
            open_session.session.ignored_settings["seed"] == 5
            and len(open_session.session.ignored_settings["response_format"]) < 200
        )
        assert large.status_code == 413 and made.app.max_body_bytes < MAX_BODY_BYTES

    with served(key="") as made:
        asyncio.run(go(made))


def test_too_many_requests_get_429_and_concurrent_turns_of_a_session_409() -> None:
    async def go(made: Any) -> None:
        async with client_of(made.app) as client, client_of(made.app, **{"x-session-id": "one"}) as session:
            waiting = [asyncio.ensure_future(post(session, "/v1/chat/completions", messages=HELLO))]
            while len(made.queue.active) < 1:
                await asyncio.sleep(0)
            busy = await post(session, "/v1/chat/completions", messages=HELLO)
            assert busy.status_code == 409
            waiting += [asyncio.ensure_future(post(client, "/v1/chat/completions", messages=HELLO)) for _ in range(2)]
            while len(made.queue.active) < 3:
                await asyncio.sleep(0)
            flood = [await post(client, "/v1/chat/completions", messages=HELLO) for _ in range(8)]
            assert {answer.status_code for answer in flood} == {429} and flood[0].headers["retry-after"]
            made.start()
            assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
            await chat(client)
        assert not made.queue.active

    with served(most=3, asleep=True) as made:
        asyncio.run(go(made))


def test_limits_of_turns_or_tokens_truncate_an_episode() -> None:
    async def go(made: Any) -> None:
        for settings, turns in (
            (settings_of(fixed=True, max_turns=2), 2),
            (settings_of(fixed=True, max_sampled_tokens=5), 1),
        ):
            key, open_session = made.app.open(Session(9), settings)
            async with client_of(made.app, key) as client:
                messages = await converse(client, turns)
                answer = await post(client, "/v1/chat/completions", messages=messages)
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
            assert open_session.limit_reached.startswith("the limit of") and open_session.session.num_turns == turns
        key, open_session = made.app.open(Session(9), settings_of(fixed=True))
        async with client_of(made.app, key) as client:
            *messages, last = await converse(client, 1)
            long = [*messages, last | {"content": "x" * 300}]
            assert (
                await post(client, "/v1/chat/completions", messages=long)
            ).status_code == 400 and open_session.limit_reached
            await chat(client, [*messages, last])
        assert not open_session.limit_reached and open_session.session.num_turns == 2, (
            "a session that continues is not truncated"
        )

    with served(key="", min_tokens=24) as made:
        asyncio.run(go(made))


@pytest.mark.parametrize("template", ["qwen3", "llama3_1", "mistral", "gemma3"])
def test_tool_calls_are_parsed_and_continued_from_recorded_tokens(template: str) -> None:
    """The sampled turn is replaced by a call in the format of the template."""

    async def go(made: Any) -> None:
        renderer = made.app.renderer
        made_of = ToolChat(renderer.tokenizer, [ADD], made.lm.stop_token_ids)
        words = made_of.format.example if made_of.format.name != "plain" else FORMATS["plain"].example
        ids = renderer.tokenizer(words, add_special_tokens=False)["input_ids"]
        turn = [*ids, min(made.lm.stop_token_ids)]
        said = forced(made, turn)
        key, open_session = made.app.open(Session(9), WIDE)
        async with client_of(made.app, key) as client:
            first = await chat(client, tools=[ADD])
            choice = first["choices"][0]
            call = choice["message"]["tool_calls"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
            messages = [*HELLO, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "2 it is"}]
            said.clear()
            await chat(client, messages, tools=[ADD])
        assert open_session.session.num_turns == 2 and not open_session.session.mismatch
        assert open_session.session.response[: len(turn)] == turn
        observed = [
            i for i, drawn in zip(open_session.session.response, open_session.session.sampled, strict=True) if not drawn
        ]
        assert "2 it is" in renderer.decode(observed)

    with served(WIDE, key="", template=template) as made:
        asyncio.run(go(made))


def test_turn_is_not_recorded_after_its_client_disconnected() -> None:
    async def go(made: Any) -> None:
        key, open_session = made.app.open(Session(9), settings_of(fixed=True))
        gone, body, sent = asyncio.Event(), [json.dumps({"messages": HELLO}).encode()], []

        async def receive() -> dict[str, Any]:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        def submit(request: Any) -> None:
            def over() -> None:
                gone.set()
                request.on_output(Completion([5, 6], [-1.0, -1.0], [1.0, 1.0], "stop", 7))

            asyncio.get_running_loop().call_later(0.01, over)

        made.queue.submit = submit
        head = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": head, "query_string": b""}
        await made.app(scope, receive, send)
        assert (
            not sent
            and not open_session.session.num_turns
            and not open_session.session.response
            and open_session.active_request is None
        )

    with served(key="") as made:
        asyncio.run(go(made))


@pytest.mark.parametrize("when", ["before its request is known", "when its end is told and not heard"])
def test_closing_a_session_during_a_turn_keeps_its_record(when: str) -> None:
    """Another thread closes the session: the result of an episode refers to the record until then."""

    async def go(made: Any) -> None:
        key, open_session = made.app.open(Session(9), settings_of(fixed=True))
        submit = made.queue.submit

        def over(request: Any) -> None:
            request.on_output(Completion([5, 6], [-1.0, -1.0], [1.0, 1.0], "stop", 7))
            made.app.close(key, "its episode is over")

        def replaced(request: Any) -> None:
            submit(request)
            if when.startswith("before"):
                made.app.close(key, "its episode is over")
            else:
                asyncio.get_running_loop().call_soon(over, request)

        made.queue.submit = replaced
        async with client_of(made.app, key) as client:
            answer = await post(client, "/v1/chat/completions", messages=HELLO)
        assert answer.status_code == 403 and "its episode is over" in answer.text
        assert (
            not open_session.session.num_turns
            and not open_session.session.response
            and open_session.active_request is None
            and not made.queue.active
        )

    with served(key="", asleep=True) as made:
        asyncio.run(go(made))


def forced(made: Any, turn: list[int], ended: bool = True) -> list[list[int]]:
    """Replace the next sampled turn by this one, token by token, with artificial log-probs."""
    left = [turn]
    submit: Callable[..., None] = made.queue.submit

    def replaced(request: Any) -> None:
        if left:
            for i, token in enumerate(turn[:-1] if request.stream else ()):
                request.on_output(CompletionDelta([token], [-float(i)]))
            reason: FinishReason = "stop" if ended else "length"
            logp = [-float(i) for i in range(len(turn))]
            request.on_output(Completion(turn, logp, [1.0] * len(turn), reason, 7))
        else:
            submit(request)

    made.queue.submit = replaced
    return left


async def assembled(client: Any, **body: Any) -> tuple[Any, list[Any]]:
    """Return the completion that OpenAI's client assembles from a stream, and the chunks."""
    key = client.headers["authorization"].removeprefix("Bearer ")
    stock = openai.AsyncOpenAI(base_url="http://endpoint/v1", api_key=key, http_client=client, max_retries=0)
    chunks = []
    async with stock.chat.completions.stream(model="policy", **body) as stream:
        async for event in stream:
            if event.type == "chunk":
                chunks.append(event.chunk)
        try:
            return await stream.get_final_completion(), chunks
        except openai.LengthFinishReasonError as error:
            return error.completion, chunks


CALLED = '{{"name": "add", "arguments": {{"a": {a}, "b": "é 🙂"}}}}'
TURNS = {
    "words": "a naïve 🙂 answer",
    "calls": "<think>\nhm\n</think>\n\nSo <tool_call>\n"
    + CALLED.format(a=1)
    + "\n</tool_call> and <tool_call>\n"
    + CALLED.format(a=2)
    + "\n</tool_call>",
    "not closed": "So <tool_call>\n" + CALLED.format(a=1),
    "then not closed": "So <tool_call>" + CALLED.format(a=1) + "</tool_call> <tool_call>{oh",
    "no json": "<tool_call>no</tool_call> words",
    "thoughts alone": "<think> and on and on",
    "cut in a mark": "words <tool_",
    "half a character": 'So <tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call>',
}


@pytest.mark.parametrize("name", TURNS)
def test_openai_client_assembles_streamed_tool_calls_and_logprobs(name: str) -> None:
    async def go(made: Any) -> None:
        renderer = made.app.renderer
        turn = renderer.tokenizer(TURNS[name], add_special_tokens=False)["input_ids"]
        turn = [*turn, min(made.lm.stop_token_ids)] if "cut" not in name else turn
        ways = {}
        for stream in (False, True):
            forced(made, turn, ended="cut" not in name)
            key, open_session = made.app.open(Session(9), WIDE)
            more: Any = {"messages": HELLO, "tools": [ADD], "logprobs": True}
            async with client_of(made.app, key) as client:
                if not stream:
                    ways[stream] = openai.types.chat.ChatCompletion.model_validate(await chat(client, **more)), []
                else:
                    more |= {"stream_options": {"include_usage": True}, "extra_body": {"return_token_ids": True}}
                    ways[stream] = await assembled(client, **more)
            assert open_session.session.response == turn and open_session.session.history is not None
            ways[stream] += (open_session.session.history,)
        (plain, _, said), (built, chunks, also) = ways[False], ways[True]
        one, two = plain.choices[0], built.choices[0]
        assert said == also and one.finish_reason == two.finish_reason and built.usage == plain.usage
        assert (one.message.content or "") == (two.message.content or "")
        assert getattr(one.message, "reasoning_content", "") == getattr(two.message, "reasoning_content", "")
        calls = [[each.function for each in way.message.tool_calls or ()] for way in (one, two)]
        assert [(f.name, f.arguments) for f in calls[0]] == [(f.name, f.arguments) for f in calls[1]]
        assert len(calls[0]) == {"calls": 2, "then not closed": 1}.get(name, 0)
        logp = [[t.logprob for t in way.logprobs.content] for way in (one, two)]
        assert logp[0] == logp[1] == [-float(i) for i in range(len(turn))]
        parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert [token for part in parts for token in part.model_extra.get("token_ids") or ()] == turn
        told = [part for part in parts if part.delta.content or part.delta.tool_calls]
        assert len(told) >= {"words": 10, "calls": 5, "no json": 3, "cut in a mark": 4}.get(name, 0), "as it comes"
        assert all(chunk.usage is None for chunk in chunks[:-1])

    with served(WIDE, key="", template="qwen3") as made:
        asyncio.run(go(made))


def test_streams_with_stop_strings_and_logprobs_are_incremental() -> None:
    async def go(made: Any) -> None:
        async with client_of(made.app) as client:
            seed = 0
            free = (await chat(client, seed=seed))["choices"][0]["message"]["content"]
            for stop in ([free[6:9]], [free[3], free[5:9]], ["never said", "🙂"], [free[4:12] + "!"]):
                more = {"seed": seed, "stop": stop, "logprobs": True}
                whole = (await chat(client, **more))["choices"][0]
                parts = [part["choices"][0] for part in await streamed(client, messages=HELLO, **more)]
                assert "".join(part["delta"].get("content") or "" for part in parts) == whole["message"]["content"]
                assert parts[-1]["finish_reason"] == whole["finish_reason"]
                logp = [each for part in parts if part["logprobs"] for each in part["logprobs"]["content"]]
                assert logp == whole["logprobs"]["content"]
                assert not any(string in whole["message"]["content"] for string in stop)
                assert len([part for part in parts if part["delta"].get("content")]) > 1
                plain = {"prompt": "ab", "seed": seed, "stop": stop, "logprobs": 0}
                text = (await post(client, "/v1/completions", **plain)).json()["choices"][0]
                bits = [part["choices"][0] for part in await streamed(client, "/v1/completions", **plain)]
                assert "".join(bit["text"] for bit in bits) == text["text"]
                spelled = [token for bit in bits if bit["logprobs"] for token in bit["logprobs"]["tokens"]]
                assert spelled == text["logprobs"]["tokens"]

    with served(settings_of(max_turn_tokens=20), min_tokens=20) as made:
        asyncio.run(go(made))


def test_event_loop_is_woken_once_for_several_events() -> None:
    post = EventDispatcher()

    async def hear(count: int) -> list[Any]:
        loop, events = asyncio.get_running_loop(), Events()
        told = [CompletionDelta([number], [0.0]) for number in range(count)]
        with patch.object(loop, "call_soon_threadsafe", wraps=loop.call_soon_threadsafe) as woken:
            for event in told:
                post.send(loop, events, event)
        assert woken.call_count == 1
        assert [await events.get() for _ in told] == told
        post.send(loop, events, told[0])  # not delivered before the loop ends
        return told

    for count in (3, 2):  # a loop that has ended does not block the next one
        assert len(asyncio.run(hear(count))) == count


# ---- one client cannot keep out the others, over real connections


async def ask_by_socket(port: int, key: str, body: bytes, announced: int | None = None) -> tuple[int, dict[str, Any]]:
    """Send one request over a new connection; return its status and JSON."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    length = len(body) if announced is None else announced
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n"
    )
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), LONG)
    writer.close()
    head_bytes, _, content = answer.partition(b"\r\n\r\n")
    return int(head_bytes.split()[1]), json.loads(content)


@contextmanager
def listening(app: Any) -> Iterator[int]:
    from ascent.rollout.agents import ServerThread

    server = ServerThread(app).start()
    try:
        yield server.port
    finally:
        server.close()


def test_incomplete_requests_of_one_session_do_not_block_another() -> None:
    small = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()

    async def go(made: Any, port: int) -> None:
        attacker, _ = made.app.open(Session(1), settings_of(fixed=True))
        other, _ = made.app.open(Session(2), settings_of(fixed=True))
        half_sent = [asyncio.ensure_future(ask_by_socket(port, attacker, b"{", 500)) for _ in range(40)]
        refused, _ = await asyncio.wait(half_sent, return_when=asyncio.FIRST_COMPLETED, timeout=LONG)
        assert {task.result()[0] for task in refused} == {429}
        for _ in range(4):
            status, answer = await ask_by_socket(port, other, small)
            assert status == 200, answer
            other, _ = made.app.open(Session(3), settings_of(fixed=True))
        for task in half_sent:
            task.cancel()
        await asyncio.gather(*half_sent, return_exceptions=True)

    with served(key="", most=2) as made, listening(made.app) as port:
        asyncio.run(go(made, port))


@pytest.mark.parametrize("kind", ["chat", "tools", "text"])
def test_large_requests_do_not_block_other_clients(kind: str) -> None:
    long, begun, go_on = "hello " * 5000, threading.Event(), threading.Event()
    tool = ADD | {"function": ADD["function"] | {"description": long}}
    bodies = {
        "chat": ("chat/completions", {"messages": [{"role": "user", "content": long}]}),
        "tools": ("chat/completions", {"messages": HELLO, "tools": [tool]}),
        "text": ("completions", {"prompt": long}),
    }
    path, body = bodies[kind]

    async def go(made: Any) -> None:
        tokenizer = type(made.lm.tokenizer)
        encode = tokenizer.__call__

        def slow(self: Any, text: Any, *args: Any, **more: Any) -> Any:
            if len(text) > 16_384 and not go_on.is_set():
                begun.set()
                assert go_on.wait(LONG), "nobody else was answered"
            return encode(self, text, *args, **more)

        with patch.object(tokenizer, "__call__", slow):
            async with client_of(made.app, **{"x-session-id": "large"}) as one, client_of(made.app) as other:
                large = asyncio.ensure_future(post(one, f"/v1/{path}", max_tokens=2, **body))
                while not begun.is_set():
                    await asyncio.sleep(0.001)
                assert (await post(one, "/v1/chat/completions", messages=HELLO)).status_code == 409
                await chat(other, max_tokens=2)
                go_on.set()
                answer = await large
                assert answer.status_code == 400 and "tokens" in answer.json()["error"]["message"]
                assert (await chat(one, max_tokens=2))["choices"], (
                    "the session goes on after a request that was refused"
                )

    with served(settings_of(context_length=1000), template="qwen3") as made:
        asyncio.run(go(made))


@pytest.mark.parametrize("announced", [True, False])
def test_an_oversized_body_gets_an_error_that_its_client_can_read(announced: bool) -> None:
    """The client of the standard library sends the whole body before it reads the response."""
    with served() as made, listening(made.app) as port:
        body = b" " * (24 * 2**20)  # more than the buffers of a connection hold
        client = HTTPConnection("127.0.0.1", port, timeout=LONG)
        sent: Any = body if announced else iter([body[:65_536]] * (len(body) // 65_536))
        headers = {"authorization": f"Bearer {KEY}"}
        client.request("POST", "/v1/chat/completions", sent, headers, encode_chunked=not announced)
        answer = client.getresponse()
        error = json.loads(answer.read())["error"]
        assert answer.status == 413 and str(made.app.max_body_bytes) in error["message"]


# ---- rare requests ----------------------------------------------------------------------------------------------


def called(**call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "x", **call}]}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", called(tool_calls="f"), 'messages[0].tool_calls: should be a valid list, got "f"'),
        (
            "/v1/chat/completions",
            called(tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]),
            'messages[0].tool_calls[0].function.arguments: should be a JSON object, got "[1]"',
        ),
        (
            "/v1/chat/completions",
            called(tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            'messages[0].tool_calls[0].function.arguments: should be a JSON object, got "{"',
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "stop": ["a", "\ufffd"]},
            'stop[1]: should be text without U+FFFD, got "\ufffd"',
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "stream": True},
            "stream: should be False, got true. This route returns whole responses",
        ),
        (
            "/v1/completions",
            {"prompt": ["a", "b"]},
            'prompt: should be one prompt per request, got ["a", "b"]. Text or token ids',
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "n": 2},
            "n: should be less than or equal to 1, got 2. A request has one completion",
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "temperature": "hot"},
            'temperature: should be a valid number, got "hot"',
        ),
        ("/v1/chat/completions", {}, "messages: Field required"),
        (
            "/v1/completions",
            {"prompt": [1, "x"]},
            'prompt: should be one prompt per request, got [1, "x"]. Text or token ids',
        ),
        ("/v1/completions", {"prompt": [1.5]}, "prompt[0]: should be a valid integer, got 1.5. Text or token ids"),
        (
            "/v1/completions",
            {"prompt": [[1], [2]]},
            "prompt: should be one prompt per request, got [[1], [2]]. Text or token ids",
        ),
    ],
)
def test_validation_error_names_the_field(path: str, body: dict[str, Any], words: str) -> None:
    async def go(made: Any) -> None:
        async with client_of(made.app) as client:
            answer = await post(client, path, **body)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, words)

    with served(asleep=True) as made:
        asyncio.run(go(made))


def test_list_of_one_prompt_is_accepted() -> None:
    async def go(made: Any) -> None:
        async with client_of(made.app) as client:
            said = [
                (await post(client, "/v1/completions", prompt=prompt, seed=5, max_tokens=6)).json()["choices"]
                for prompt in ("hello", ["hello"], made.lm.tokenize("hello"), [made.lm.tokenize("hello")])
            ]
            (first, *_) = await streamed(
                client, "/v1/completions", prompt=["hello"], seed=5, max_tokens=6, return_token_ids=True
            )
        assert said[0] == said[1] and said[2] == said[3]
        assert first["prompt_token_ids"] == made.lm.tokenize("hello") and first["choices"][0]["text"] == ""

    with served() as made:
        asyncio.run(go(made))


def test_failed_engine_gives_503() -> None:
    async def go(made: Any) -> None:
        async with client_of(made.app) as client:
            asked = asyncio.create_task(post(client, "/v1/chat/completions", messages=HELLO))
            while not made.queue.active:
                await asyncio.sleep(0.001)
            made.queue.fail("the engine is gone")
            answer = await asked
        assert answer.status_code == 503 and "the engine is gone" in answer.json()["error"]["message"]

    with served(asleep=True) as made:
        asyncio.run(asyncio.wait_for(go(made), LONG))


def test_named_sessions_replace_the_least_recently_used_idle_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_sessions, "MAX_NAMED_SESSIONS", 2)
    forgotten: list[Any] = []
    sessions = OpenSessions(settings_of(), KEY, forgotten.append)

    def find(name: str) -> Any:
        return sessions.find({"authorization": f"Bearer {KEY}", "x-session-id": name})

    assert find("") is None
    one, two = find("one"), find("two")
    assert find("one") is one is not two and not forgotten
    three = find("three")
    assert forgotten == [two] and find("three") is three, "the least recently used idle session"
    one.active_request = object()
    four = find("four")
    assert forgotten == [two, three] and find("one") is one
    four.active_request = object()
    with pytest.raises(HTTPException, match="too many sessions at once") as denied:
        find("five")
    assert denied.value.status_code == 429 and find("four") is four and len(forgotten) == 2
    long = "x" * open_sessions.MAX_NAME_CHARACTERS
    four.active_request = None
    assert find(long) is not None
    with pytest.raises(HTTPException, match=f"X-Session-ID: at most {len(long)} characters") as denied:
        find(long + "x")
    assert denied.value.status_code == 400


def test_exceptions_of_a_chat_template_are_client_errors() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = (
        "{% if messages[0]['content'] == 'no' %}{{ raise_exception('say something else') }}{% endif %}"
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    )
    renderer = ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    assert renderer.render_prompt(HELLO, [])
    with pytest.raises(InvalidMessageError, match="the chat template refuses these messages: say something else"):
        renderer.render_prompt([{"role": "user", "content": "no"}], [])


def test_session_that_began_with_token_ids_refuses_messages() -> None:
    tokenizer = chat_tokenizer("qwen3")
    renderer, session = ChatRenderer(tokenizer, stop_ids("qwen3", tokenizer)), Session(0)
    session.record_turn(session.extend_with_tokens([1, 2]), [3], [0.0], [1.0], 0.0)
    session.record_messages(None, (), renderer.parse_turn([3], []))
    with pytest.raises(HistoryMismatchError, match="the session began with token ids, and this request has messages"):
        session.extend_with_messages(HELLO, [], renderer)


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("host.example", False)],
)
def test_loopback_hosts(host: str, local: bool) -> None:
    assert is_local(host) == local


@pytest.mark.parametrize(
    ("missing", "words"), [(("uvicorn",), "uvicorn"), (("starlette", "uvicorn"), "starlette and uvicorn")]
)
def test_missing_packages_of_servers_are_named(
    missing: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_packages("ascent serve")
    for name in missing:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"^ascent serve needs {words}: pip install 'ascent-rl\[lab\]'$"):
        check_packages("ascent serve")
