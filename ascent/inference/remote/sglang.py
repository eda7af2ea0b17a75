"""Adapter for SGLang 0.5.23, written from its source and tested against a stand-in (test_sglang.py).


What its source says, and what follows:

- Log-probs are of the temperature-scaled logits over the whole vocabulary, before top-k and top-p; those of greedy
  answers are at temperature 1 (layers/sampler.py). They are ours.
- Seeds count in deterministic inference only; elsewhere they are ignored without a word. So a server without it is
  refused. The noise of a token is a hash of seed, position and place in the vocabulary, or, while a greedy answer is
  decoded in the same batch, in the sorted vocabulary. So a seed's tokens depend on who is decoded with it.
- `ignore_eos` turns off `stop_token_ids` too (managers/schedule_batch.py). So the model's own end tokens count as well;
  a response that ends at another one than ours is refused.
- The scheduler cuts a response without a word where a prompt with its response comes within two tokens of the context,
  and refuses a prompt within six. So the context has `MARGIN` tokens more.
- Weights are loaded from a folder, in place, on every worker; tied embeddings are one tensor and stay one. A pause in
  mode `retract` gives back the caches of what is being written, so that the update can empty the cache, and they are
  computed anew afterwards. Which tensors arrived it cannot say: the probe alone checks that.
- Each event of a stream has all tokens so far, unless the server has `--incremental-streaming-output`
  (managers/tokenizer_manager.py). Tokens and log-probs are lists that grow while the event is written, so that one of
  them may be longer.
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

MARGIN = 8
"""Tokens of context that no prompt with its response may use."""
FLAGS = ("--skip-tokenizer-init", "--load-format", "dummy", "--enable-deterministic-inference")
"""What a server for Ascent is started with, whatever it serves."""
PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "n": 1}
PLAIN |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Said in each request, because a server may have defaults of its own (`--preferred-sampling-params`)."""


class SGLang(EngineAdapter):
    name, release, generates = "sglang", "SGLang 0.5.23", "/generate"
    coldest = 1e-6
    """Below it, it is greedy."""
    narrowed = "its log-probs stay those of the full vocabulary, but which probability was kept is not asked of it yet"
    advice = "Is it SGLang 0.5.23, started by python -m sglang.launch_server"

    def body(self, request: EngineRequest, salt: str) -> dict[str, Any]:
        drawn: dict[str, Any] = PLAIN | {"temperature": request.temperature, "max_new_tokens": request.most}
        if request.temperature:
            drawn["sampling_seed"] = request.seed
            k, drawn["top_p"], drawn["min_p"] = request.narrow
            drawn["top_k"] = k or -1
        drawn |= {"stop_token_ids": list(request.ends)} if request.ends else {"ignore_eos": True}
        return {"input_ids": request.prompt, "sampling_params": drawn, "return_logprob": True, "cache_salt": salt}

    def read(self, reply: Any) -> EngineResponse:
        about = reply["meta_info"]
        tokens, drawn = [int(token) for token in reply["output_ids"]], about.get("output_token_logprobs") or []
        if [int(entry[1]) for entry in drawn] != tokens:
            raise ValueError("its log-probs are of other tokens")
        aborted = about["finish_reason"]["type"] == "abort"  # one that only waited has no versions
        versions = token_versions(about.get("weight_versions"))
        return EngineResponse(tokens, [float(entry[0]) for entry in drawn], versions, aborted)

    def more(self, before: EngineResponse, event: Any) -> EngineResponse:
        if event["meta_info"].get("finish_reason"):
            return self.read(event)
        drawn = event["meta_info"].get("output_token_logprobs") or []
        pairs = list(zip(event["output_ids"], drawn, strict=False))
        return EngineResponse([int(token) for token, _ in pairs], [float(entry[0]) for _, entry in pairs], [])

    async def greet(self, server: ServerConnection, serving: ServerConfig) -> None:
        about, model = await server.ask("/server_info"), await server.ask("/model_info")
        self.know(server.url, about["version"])
        if not about["enable_deterministic_inference"]:
            raise RunError(
                f"{server.url} ignores seeds: start SGLang with --enable-deterministic-inference (docs/serving.md has "
                "the command)"
            )
        if about.get("incremental_streaming_output"):
            raise RunError(f"{server.url} streams only new tokens: start SGLang without --incremental-streaming-output")
        served, needed = model["architectures"], serving.config.get("architectures")
        if served and needed and served != needed:
            raise RunError(
                f"{server.url} serves {served[0]}, and this run trains {needed[0]}: start it with this model"
            )
        self.fits(server.url, about["max_req_input_len"] + 6, serving.length + MARGIN, "--context-length")

    async def load(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        await server.ask("/pause_generation", {"mode": "retract"})
        update: dict[str, Any] = {"model_path": str(weights.path.parent), "load_format": "safetensors"}
        update |= {"weight_version": str(version), "flush_cache": True, "abort_all_requests": False}
        loaded = await server.ask("/update_weights_from_disk", update)
        if not loaded["success"]:
            raise RunError(f"{server.url} has not loaded version {version}: {loaded['message']}")
        await server.ask("/continue_generation", {})

    def arguments(self, serving: ServerConfig, model: Path, port: int) -> list[str]:
        own = ["-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
        own += ["--dtype", serving.dtype, "--context-length", str(serving.length + MARGIN)]
        return [
            *own,
            "--max-running-requests",
            str(serving.rows),
            *FLAGS,
            *(["--device", "cpu"] if serving.cpu else []),
        ]

    def environment(self, serving: ServerConfig) -> tuple[dict[str, str], dict[str, str]]:
        longer = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # no position beyond the model's own is used
        return {}, longer | {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "PYTHONPATH": ""}
