"""Adapter for SGLang 0.5.23, written from its source and tested against a stand-in (test_sglang.py).

Facts from its source that this adapter relies on:

- Log-probs are those of the temperature-scaled logits over the whole vocabulary, before top-k and top-p. Greedy
  responses have log-probs at temperature 1 (layers/sampler.py). Ascent uses the same convention.
- Seeds work in deterministic inference only; otherwise they are ignored silently. A server without it is rejected. The
  noise of a token is a hash of the seed, the position and the index in the vocabulary, or, while a greedy response is
  decoded in the same batch, the index in the sorted vocabulary. So a seed's tokens depend on the rest of the batch.
- `ignore_eos` also turns off `stop_token_ids` (managers/schedule_batch.py). So the end tokens of the server's model
  config count as well, and a response that ends at any other token than the requested ones is rejected.
- The scheduler truncates a response silently if prompt and response come within two tokens of the context length, and
  rejects a prompt within six. So the context is `CONTEXT_MARGIN` tokens longer.
- Weights are loaded from a folder, in place, on every worker; tied embeddings stay tied. A pause in mode `retract`
  frees the KV caches of running responses, so that the update can flush the cache, and recomputes them afterwards. The
  server cannot report which tensors arrived: only the probe verifies the weights.
- Each event of a stream contains all tokens so far, unless the server has `--incremental-streaming-output`
  (managers/tokenizer_manager.py). The lists of tokens and log-probs may differ in length while an event is written.
"""

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

CONTEXT_MARGIN = 8
"""Tokens of the context that the scheduler reserves."""
SERVER_FLAGS = ("--skip-tokenizer-init", "--load-format", "dummy", "--enable-deterministic-inference")
"""Flags of every server."""
NEUTRAL_PARAMS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "n": 1}
NEUTRAL_PARAMS |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Sent with each request, because a server may have other defaults (`--preferred-sampling-params`)."""


class SGLang(EngineAdapter):
    name, release, generate_path = "sglang", "SGLang 0.5.23", "/generate"
    min_temperature = 1e-6
    """Below it, SGLang decodes greedily."""
    truncation_note = "SGLang's log-probs cover the full vocabulary, but Ascent does not request the kept mass yet"
    setup_hint = "Is it SGLang 0.5.23, started by python -m sglang.launch_server"

    def request_body(self, request: EngineRequest, salt: str) -> dict[str, Any]:
        params: dict[str, Any] = {"temperature": request.temperature, "max_new_tokens": request.max_tokens}
        params = NEUTRAL_PARAMS | params
        if request.temperature:
            params["sampling_seed"] = request.seed
            top_k, params["top_p"], params["min_p"] = request.truncation
            params["top_k"] = top_k or -1
        stop_token_ids = list(request.stop_token_ids)
        params |= {"stop_token_ids": stop_token_ids} if stop_token_ids else {"ignore_eos": True}
        return {"input_ids": request.prompt, "sampling_params": params, "return_logprob": True, "cache_salt": salt}

    def parse_response(self, reply: Any) -> EngineResponse:
        meta = reply["meta_info"]
        tokens, logprobs = [int(token) for token in reply["output_ids"]], meta.get("output_token_logprobs") or []
        if [int(entry[1]) for entry in logprobs] != tokens:
            raise ValueError("its log-probs are of other tokens")
        aborted = meta["finish_reason"]["type"] == "abort"  # a request aborted in the waiting queue has no versions
        versions = token_versions(meta.get("weight_versions"))
        return EngineResponse(tokens, [float(entry[0]) for entry in logprobs], versions, aborted)

    def parse_event(self, before: EngineResponse, event: Any) -> EngineResponse:
        if event["meta_info"].get("finish_reason"):
            return self.parse_response(event)
        logprobs = event["meta_info"].get("output_token_logprobs") or []
        pairs = list(zip(event["output_ids"], logprobs, strict=False))
        return EngineResponse([int(token) for token, _ in pairs], [float(entry[0]) for _, entry in pairs], [])

    async def check_server(self, server: ServerConnection, config: ServerConfig) -> None:
        info, model = await server.call("/server_info"), await server.call("/model_info")
        self.check_version(server.url, info["version"])
        if not info["enable_deterministic_inference"]:
            raise RunError(
                f"{server.url} ignores seeds: start SGLang with --enable-deterministic-inference (docs/serving.md has "
                "the command)"
            )
        if info.get("incremental_streaming_output"):
            raise RunError(f"{server.url} streams only new tokens: start SGLang without --incremental-streaming-output")
        served, needed = model["architectures"], config.model_config.get("architectures")
        if served and needed and served != needed:
            raise RunError(
                f"{server.url} serves {served[0]}, and this run trains {needed[0]}: start it with this model"
            )
        context_length, needed_length = info["max_req_input_len"] + 6, config.max_model_len + CONTEXT_MARGIN
        self.check_context_length(server.url, context_length, needed_length, "--context-length")

    async def load_weights(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        await server.call("/pause_generation", {"mode": "retract"})
        update: dict[str, Any] = {"model_path": str(weights.path.parent), "load_format": "safetensors"}
        update |= {"weight_version": str(version), "flush_cache": True, "abort_all_requests": False}
        reply = await server.call("/update_weights_from_disk", update)
        if not reply["success"]:
            raise RunError(f"{server.url} has not loaded version {version}: {reply['message']}")
        await server.call("/continue_generation", {})

    def server_arguments(self, config: ServerConfig, model: Path, port: int) -> list[str]:
        return [
            *("-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", config.dtype, "--context-length", str(config.max_model_len + CONTEXT_MARGIN)),
            *("--max-running-requests", str(config.max_num_seqs)),
            *SERVER_FLAGS,
            *(["--device", "cpu"] if config.on_cpu else []),
        ]

    def server_environment(self, config: ServerConfig) -> tuple[dict[str, str], dict[str, str]]:
        margin = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # no position beyond the model's own is used
        return {}, margin | {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "PYTHONPATH": ""}
