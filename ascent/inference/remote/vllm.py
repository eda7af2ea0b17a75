"""vLLM 0.32: token ids in and out, and weights by its own transfer life cycle, from a file in shared memory."""

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

INSIDE = Path(__file__).parent / "inside"
"""The folder that vLLM finds its worker extension in; nothing else is in it."""
FLAGS = (
    *("--skip-tokenizer-init", "--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
    *("--generation-config", "vllm", "--load-format", "dummy"),
    *("--worker-extension-cls", "ascent_worker.Worker", "--weight-transfer-config"),
)
"""What a server for Ascent is started with, whatever it serves; how weights come follows."""


class VLLM(EngineAdapter):
    name, release, generates = "vllm", "vLLM 0.32", "/inference/v1/generate"
    coldest = 0.01
    """It raises every lower one to this."""
    narrowed = "its log-probs are then over what is left, and it does not say which probability they kept"
    transfer = "file"
    """Its name among vLLM's ways to transfer weights; `inside/ascent_worker.py` has registered it."""
    advice = "Is it vLLM 0.32, started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1"

    def body(self, request: EngineRequest, salt: str) -> dict[str, Any]:
        drawn: dict[str, Any] = {"temperature": 0.0}
        if request.temperature:
            drawn = {"temperature": request.temperature, "seed": request.seed}
        k, p, least = request.narrow
        drawn |= {"top_k": k} if k else {}
        drawn |= ({"top_p": p} if p < 1.0 else {}) | ({"min_p": least} if least else {})
        drawn |= {"max_tokens": request.most, "logprobs": 0, "detokenize": False, "ignore_eos": True}
        if request.ends:  # just these, whatever the server knows
            drawn["stop_token_ids"] = list(request.ends)
        return {"token_ids": request.prompt, "sampling_params": drawn, "cache_salt": salt}

    def read(self, reply: Any) -> EngineResponse:
        (choice,) = reply["choices"]
        content = (choice["logprobs"] or {}).get("content") or []
        return EngineResponse(
            [int(token) for token in choice["token_ids"] or []],
            [float(entry["logprob"]) for entry in content],
            token_versions(choice["weight_versions"]),
            aborted=choice.get("finish_reason") == "abort",
        )

    def more(self, before: EngineResponse, event: Any) -> EngineResponse:
        """Each event has the new tokens, and the last one the versions of all."""
        piece = self.read(event)
        return before._replace(versions=[]).then(piece)

    async def greet(self, server: ServerConnection, serving: ServerConfig) -> None:
        self.know(server.url, (await server.ask("/version"))["version"])
        (served,) = (await server.ask("/v1/models"))["data"]
        self.fits(server.url, served["max_model_len"], serving.length, "--max-model-len")

    async def load(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        await self.begin(server)
        await server.ask("/pause?mode=keep&clear_cache=false", {})
        await server.ask("/start_weight_update", {})
        await self.update(server, weights)
        await server.ask("/finish_weight_update", {"weight_version": str(version)})
        compare(server.url, weights, await server.ask("/collective_rpc", {"method": "ascent_received"}))
        await server.ask("/reset_prefix_cache?reset_running_requests=true", {})
        await server.ask("/resume", {})

    async def begin(self, server: ServerConnection) -> None:
        """Before weights: what both sides agree upon."""
        await server.ask("/init_weight_transfer_engine", {"init_info": {}})

    async def update(self, server: ServerConnection, weights: WeightManifest) -> None:
        """The weights themselves."""
        await server.ask("/update_weights", {"update_info": {"path": str(weights.path)}})

    def arguments(self, serving: ServerConfig, model: Path, port: int) -> list[str]:
        own = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
        own += ["--port", str(port), "--dtype", serving.dtype, "--max-model-len", str(serving.length)]
        backend = json.dumps({"backend": self.transfer})
        return [
            *own,
            "--max-num-seqs",
            str(serving.rows),
            *(["--enforce-eager"] if serving.cpu else []),
            *FLAGS,
            backend,
        ]

    def environment(self, serving: ServerConfig) -> tuple[dict[str, str], dict[str, str]]:
        on_cpu = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        always = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(INSIDE)}
        return on_cpu if serving.cpu else {}, always


def compare(url: str, weights: WeightManifest, reply: Any) -> None:
    """RunError where a worker has not read just these tensors, or has parameters that none of them reached."""
    for worker in reply["results"]:
        received, untouched = worker["tensors"], worker["untouched"]
        every = weights.tensors.keys() | received.keys()
        odd = sorted(name for name in every if weights.tensors.get(name) != received.get(name))
        if odd or untouched:
            what = f"{odd[0]} differs from what was sent" if odd else f"nothing was loaded into {untouched[0]}"
            raise RunError(
                f"{url}: of {len(weights.tensors)} tensors, {len(odd)} arrived wrong and {len(untouched)} "
                f"parameters were left alone: {what}. Does the server serve this model?"
            )
