"""SGLang 0.5.23's side of every call, written from its source: nobody has run it here.

The contract tests of test_remote_engine.py run against a stand-in of it too. Here are the exchanges themselves.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ascent.core.errors import RunError
from ascent.inference.remote.engine_adapter import EngineRequest, EngineResponse, ServerConfig
from ascent.inference.remote.relay_client import RelayAdapter
from ascent.inference.remote.sglang import SGLang
from ascent.inference.remote.weight_files import WeightManifest

SERVING = ServerConfig({"architectures": ["LlamaForCausalLM"]}, "bfloat16", 512, 64, False)
NOTHING_ELSE = {
    **{"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "n": 1},
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
}


class Recorded:
    """A server that is asked just these things, in this order."""

    url = "http://127.0.0.1:30000"

    def __init__(self, *exchanges: tuple[str, Any, Any]):
        self.left = list(exchanges)

    async def call(self, path: str, body: Any = None, seconds: float | None = None) -> Any:
        expected, sent, answer = self.left.pop(0)
        assert (path, body) == (expected, sent)
        return answer


def test_request_has_the_fields_of_generate_req_input_and_sampling_params() -> None:
    body = SGLang().request_body(EngineRequest([5, 6], 7, 0.7, 2**62 - 1, (3, 9)), "run-4")
    drawn = NOTHING_ELSE | {"temperature": 0.7, "max_new_tokens": 7, "sampling_seed": 2**62 - 1}
    assert body == {
        "input_ids": [5, 6],
        "sampling_params": drawn | {"stop_token_ids": [3, 9]},  # with ignore_eos these would not count either
        "return_logprob": True,
        "cache_salt": "run-4",
    }
    probe = SGLang().request_body(EngineRequest([5, 6], 7, 0.7, 0, ()), "run-4")["sampling_params"]
    assert probe["ignore_eos"] and "stop_token_ids" not in probe
    assert "sampling_seed" not in SGLang().request_body(EngineRequest([5], 7, 0.0, 0, (3,)), "x")["sampling_params"]


def replied(tokens: list[int], reason: dict[str, Any], spans: list[tuple[str, int, int]] | None, **more: Any) -> Any:
    """An answer of `/generate` (managers/tokenizer_manager.py) of a server without a tokenizer."""
    about = {"id": "x", "finish_reason": reason, "prompt_tokens": 2, "weight_version": "4", "num_retractions": 0}
    about |= {"output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(tokens)]}
    about |= {"reasoning_tokens": 0, "completion_tokens": len(tokens), "cached_tokens": 0}
    if spans is not None:
        about["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return {"output_ids": tokens, "meta_info": about | more}


def test_responses_that_stop_are_truncated_cross_a_load_or_are_aborted() -> None:
    read = SGLang().parse_response
    stopped = replied([8, 3], {"type": "stop", "matched": 3}, [("4", 0, 2)])
    assert read(stopped) == EngineResponse([8, 3], [-0.5, -1.5], [4, 4])
    crossed = replied([8, 8, 8], {"type": "length", "length": 3}, [("4", 0, 1), ("5", 1, 3)])
    assert read(crossed).versions == [4, 5, 5]
    waited = replied([], {"type": "abort", "message": "Abort in waiting queue"}, None)
    assert read(waited) == EngineResponse([], [], [], aborted=True)
    with pytest.raises(ValueError, match="other tokens"):
        read(stopped | {"output_ids": [8, 8]})


def test_weights_load_from_a_folder_while_running_requests_are_retracted() -> None:
    weights = WeightManifest(Path("/dev/shm/x/weights.safetensors"), {})
    update = {"model_path": "/dev/shm/x", "load_format": "safetensors", "weight_version": "4"}
    paused = ("/pause_generation", {"mode": "retract"}, {"message": "Generation paused successfully.", "status": "ok"})
    sent = update | {"flush_cache": True, "abort_all_requests": False}
    loaded = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    went_on = ("/continue_generation", {}, {"message": "Generation continued successfully.", "status": "ok"})
    server = Recorded(paused, ("/update_weights_from_disk", sent, loaded), went_on)
    asyncio.run(SGLang().load_weights(server, weights, 4))
    assert not server.left
    failed = loaded | {"success": False, "message": "Failed to update weights: x"}
    with pytest.raises(RunError, match=r"has not loaded version 4: Failed to update weights: x"):
        asyncio.run(SGLang().load_weights(Recorded(paused, ("/update_weights_from_disk", sent, failed)), weights, 4))


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({}, ""),
        ({"version": "0.5.2"}, r"runs SGLang 0\.5\.2, but Ascent supports SGLang 0\.5\.23"),
        ({"version": "0.5.23.post1"}, ""),
        ({"enable_deterministic_inference": False}, "ignores seeds"),
        ({"incremental_streaming_output": False}, ""),
        ({"incremental_streaming_output": True}, "streams only new tokens: start SGLang without --incremental-stream"),
        ({"max_req_input_len": 513}, "context length of 519 tokens, but a prompt with its response may have 520"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "serves Qwen2ForCausalLM, and this run trains LlamaForCausalLM"),
    ],
)
def test_unsuitable_server_is_rejected_before_its_first_weights(about: dict[str, Any], words: str) -> None:
    model = {"architectures": about.pop("architectures", ["LlamaForCausalLM"]), "weight_version": "default"}
    info = {"version": "0.5.23", "enable_deterministic_inference": True, "max_req_input_len": 514} | about
    greeted = SGLang().check_server(Recorded(("/server_info", None, info), ("/model_info", None, model)), SERVING)
    if not words:
        asyncio.run(greeted)
        return
    with pytest.raises(RunError, match=words):
        asyncio.run(greeted)


def test_server_command() -> None:
    arguments = SGLang().server_arguments(SERVING, Path("model"), 30000)
    values = dict(pairwise(arguments))
    assert arguments[:2] == ["-m", "sglang.launch_server"] and "--enable-deterministic-inference" in arguments
    assert (values["--host"], values["--port"], values["--load-format"]) == ("127.0.0.1", "30000", "dummy")
    assert values["--context-length"] == "520", "its scheduler keeps some for itself"
    assert SGLang().server_environment(SERVING)[1]["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


def test_stream_events_are_cumulative_and_the_last_is_the_response() -> None:
    parse_event, before = SGLang().parse_event, EngineResponse([1], [-1.0], [])
    so_far = replied([8, 9, 3], None, None)  # type: ignore[arg-type]
    assert parse_event(before, so_far) == EngineResponse([8, 9, 3], [-0.5, -1.5, -2.5], [])
    so_far["output_ids"] = [8, 9]
    assert parse_event(before, so_far) == EngineResponse([8, 9], [-0.5, -1.5], []), "one list may be longer"
    so_far["meta_info"]["output_token_logprobs"] = None
    assert parse_event(before, so_far) == EngineResponse([], [], [])
    stopped = replied([8, 3], {"type": "stop", "matched": 3}, [("4", 0, 2)])
    assert parse_event(before, stopped) == EngineResponse([8, 3], [-0.5, -1.5], [4, 4])


def test_relay_server_has_the_engine_arguments() -> None:
    relayed, engine = RelayAdapter(SGLang()), SGLang()
    assert relayed.server_arguments(SERVING, Path("model"), 7) == engine.server_arguments(SERVING, Path("model"), 7)
    assert relayed.server_environment(SERVING) == engine.server_environment(SERVING)
