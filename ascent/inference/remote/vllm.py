"""Adapter for vLLM 0.32: token ids in and out, and weights through its weight-transfer API, from shared memory."""

import json
from pathlib import Path
from typing import Any

from ascent.core.errors import RunError
from ascent.inference.remote.engine_adapter import (
    EngineAdapter,
    EngineRequest,
    EngineResponse,
    ServerConfig,
    ServerConnection,
    token_versions,
)
from ascent.inference.remote.weight_files import WeightManifest

WORKER_EXTENSION_FOLDER = Path(__file__).parent / "inside"
"""Added to vLLM's PYTHONPATH; it contains only the worker extension."""
SERVER_FLAGS = (
    *("--skip-tokenizer-init", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm", "--load-format", "dummy"),
    *("--worker-extension-cls", "ascent_worker.Worker", "--weight-transfer-config"),
)
"""Flags of every server. The JSON of the weight transfer follows the last one."""


class VLLM(EngineAdapter):
    name, release, generate_path = "vllm", "vLLM 0.32", "/inference/v1/generate"
    min_temperature = 0.01
    """vLLM raises lower temperatures to this value."""
    truncation_note = "vLLM normalizes its log-probs over the kept tokens and does not report the kept mass"
    transfer = "file"
    """The weight-transfer backend of vLLM, registered by `inside/ascent_worker.py`."""
    setup_hint = "Is it vLLM 0.32, started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1"

    def request_body(self, request: EngineRequest, salt: str) -> dict[str, Any]:
        params: dict[str, Any] = {"temperature": 0.0}
        if request.temperature:
            params = {"temperature": request.temperature, "seed": request.seed}
        top_k, top_p, min_p = request.truncation
        params |= {"top_k": top_k} if top_k else {}
        params |= ({"top_p": top_p} if top_p < 1.0 else {}) | ({"min_p": min_p} if min_p else {})
        params |= {"max_tokens": request.max_tokens, "logprobs": 0, "detokenize": False, "ignore_eos": True}
        if request.stop_token_ids:  # ignore_eos: the end tokens of the server's model config do not count
            params["stop_token_ids"] = list(request.stop_token_ids)
        return {"token_ids": request.prompt, "sampling_params": params, "cache_salt": salt}

    def parse_response(self, reply: Any) -> EngineResponse:
        (choice,) = reply["choices"]
        content = (choice["logprobs"] or {}).get("content") or []
        return EngineResponse(
            [int(token) for token in choice["token_ids"] or []],
            [float(entry["logprob"]) for entry in content],
            token_versions(choice["weight_versions"]),
            aborted=choice.get("finish_reason") == "abort",
        )

    def parse_event(self, before: EngineResponse, event: Any) -> EngineResponse:
        """Append the new tokens of an event. The last event contains the versions of all tokens."""
        return before._replace(versions=[]).concat(self.parse_response(event))

    async def check_server(self, server: ServerConnection, config: ServerConfig) -> None:
        self.check_version(server.url, (await server.call("/version"))["version"])
        (served,) = (await server.call("/v1/models"))["data"]
        self.check_context_length(server.url, served["max_model_len"], config.max_model_len, "--max-model-len")

    async def load_weights(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        await self.init_transfer(server)
        await server.call("/pause?mode=keep&clear_cache=false", {})
        await server.call("/start_weight_update", {})
        await self.transfer_weights(server, weights)
        await server.call("/finish_weight_update", {"weight_version": str(version)})
        check_received(server.url, weights, await server.call("/collective_rpc", {"method": "ascent_received"}))
        await server.call("/reset_prefix_cache?reset_running_requests=true", {})
        await server.call("/resume", {})

    async def init_transfer(self, server: ServerConnection) -> None:
        """Initialize the weight transfer on both sides."""
        await server.call("/init_weight_transfer_engine", {"init_info": {}})

    async def transfer_weights(self, server: ServerConnection, weights: WeightManifest) -> None:
        """Transfer the weights."""
        await server.call("/update_weights", {"update_info": {"path": str(weights.path)}})

    def server_arguments(self, config: ServerConfig, model: Path, port: int) -> list[str]:
        return [
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"),
            *("--port", str(port), "--dtype", config.dtype, "--max-model-len", str(config.max_model_len)),
            *("--max-num-seqs", str(config.max_num_seqs)),
            *(["--enforce-eager"] if config.on_cpu else []),
            *SERVER_FLAGS,
            json.dumps({"backend": self.transfer}),
        ]

    def server_environment(self, config: ServerConfig) -> tuple[dict[str, str], dict[str, str]]:
        cpu_defaults = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        required = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(WORKER_EXTENSION_FOLDER)}
        return cpu_defaults if config.on_cpu else {}, required


def check_received(url: str, weights: WeightManifest, reply: Any) -> None:
    """Raise RunError if a worker received other tensors, or if a parameter was not loaded."""
    for worker in reply["results"]:
        received, untouched = worker["tensors"], worker["untouched"]
        names = weights.checksums.keys() | received.keys()
        wrong = sorted(name for name in names if weights.checksums.get(name) != received.get(name))
        if wrong or untouched:
            example = f"{wrong[0]} differs from what was sent" if wrong else f"{untouched[0]} was not loaded"
            raise RunError(
                f"{url}: of {len(weights.checksums)} tensors, {len(wrong)} arrived wrong, and {len(untouched)} "
                f"parameters were not loaded: {example}. Does the server serve this model?"
            )
