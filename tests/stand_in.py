"""A small server that speaks as vLLM 0.32 does to a trainer, with a tiny model of ours behind it.

It can be told to misbehave: to die, to hang, to answer late, to forget a tensor, to keep an old cache.

    python tests/stand_in.py … --model FOLDER --port PORT      as a process, with vLLM's own arguments
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class StandIn:
    """The state of a server, and what each address does."""

    def __init__(self, model: Any):
        self.model = model.eval().requires_grad_(False)
        for p in self.model.parameters():  # as vLLM's dummy weights: nothing works before a load
            p.data = torch.zeros_like(p)
        self.version, self.paused, self.received = "none", False, {}
        self.untouched: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.cache: dict[Any, dict[str, torch.Tensor]] = {}
        """By the prompt (and its salt), the weights that it was encoded with."""
        self.lock = threading.RLock()
        self.url, self.dead = "", False
        # how it misbehaves
        self.die_after = self.hang_after = -1
        """Requests until it drops every connection, or answers none, until it is told otherwise."""
        self.late = 0.0
        self.forget = self.corrupt = ""
        """A tensor that it does not load though it says so; one that does not arrive as it was sent."""
        self.keep_cache = self.ignore_salt = self.raw_logprobs = self.old_version = self.abort_once = False
        self.refuse_weights = 0

    # ---- weights

    def update(self, path: str) -> None:
        own = dict(self.model.named_parameters())
        self.received = {name: [list(t.shape), zlib.crc32(t.numpy().tobytes())] for name, t in load_file(path).items()}
        if self.corrupt:
            self.received[self.corrupt][1] += 1
        for name, tensor in load_file(path).items():
            if name != self.forget:
                own[name].data = tensor.clone()
        self.untouched = sorted(own.keys() - self.received.keys())

    # ---- responses

    def weights_for(self, body: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The present weights; those of an earlier time for a prompt whose cache was kept. Short prompts have none."""
        ids = body["token_ids"]
        now = {name: p.data for name, p in self.model.named_parameters()}
        if len(ids) < 16:
            return now
        return self.cache.setdefault((tuple(ids), "" if self.ignore_salt else body.get("cache_salt")), now)

    @torch.no_grad()
    def respond(self, body: dict[str, Any]) -> dict[str, Any]:
        how, ids, tokens, logp = body["sampling_params"], list(body["token_ids"]), [], []
        greedy, weights = how["temperature"] == 0.0, self.weights_for(body)
        generator = torch.Generator().manual_seed(how.get("seed", 0))
        while len(tokens) < how["max_tokens"]:
            out = torch.func.functional_call(self.model, weights, (torch.tensor([ids + tokens]),), tie_weights=True)
            z = out.logits[0, -1].float()
            log_p = torch.log_softmax(z if greedy else z / how["temperature"], -1)
            token = int(log_p.argmax()) if greedy else int(torch.multinomial(log_p.exp(), 1, generator=generator))
            tokens.append(token)
            logp.append(float((torch.log_softmax(z, -1) if self.raw_logprobs else log_p)[token]))
            if token in how.get("stop_token_ids", []):
                break
        version = "0" if self.old_version else self.version
        finish = "abort" if self.abort_once else "stop"
        self.abort_once = False
        return {
            "choices": [
                {
                    "token_ids": tokens,
                    "logprobs": {"content": [{"token_id": t, "logprob": x} for t, x in zip(tokens, logp, strict=True)]},
                    "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
                    "finish_reason": finish,
                }
            ]
        }

    # ---- addresses

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        where = path.partition("?")[0]
        probe = where == "/inference/v1/generate" and "stop_token_ids" not in body["sampling_params"]
        self.calls.append("probe" if probe else where)
        with self.lock:
            if where == "/inference/v1/generate":
                return 200, self.respond(body)
            if where == "/update_weights":
                if self.refuse_weights:
                    self.refuse_weights -= 1
                    return 500, {"error": "no such file"}
                self.update(body["update_info"]["path"])
            elif where == "/finish_weight_update":
                self.version = body["weight_version"]
            elif where == "/reset_prefix_cache" and not self.keep_cache:
                self.cache = {}
            elif where == "/collective_rpc":
                return 200, {"results": [{"tensors": self.received, "untouched": self.untouched}]}
            elif where in ("/pause", "/resume"):
                self.paused = where == "/pause"
        return 200, {"message": where}

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        size = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(size) or b"{}")
        if handler.path == "/inference/v1/generate":
            self.asked.append(body)
            if 0 <= self.die_after < len(self.asked):
                self.dead = True
            while 0 <= self.hang_after < len(self.asked):  # whoever asks, /health too, waits
                time.sleep(0.01)
            time.sleep(self.late)
        while handler.path == "/health" and 0 <= self.hang_after < len(self.asked):
            time.sleep(0.01)
        if self.dead:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        status, reply = self.answer(handler.path, body)
        sent = json.dumps(reply).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(sent)))
        handler.end_headers()
        with suppress(OSError):
            handler.wfile.write(sent)


def handler_of(take: Callable[[BaseHTTPRequestHandler], None]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        do_GET = do_POST = lambda self: take(self)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class Listening(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def serving(model: Any) -> Iterator[StandIn]:
    """A stand-in on a thread of this process."""
    stand_in = StandIn(model)
    server = Listening(("127.0.0.1", 0), handler_of(stand_in.handle))
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.hang_after = -1
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """As a process, started with vLLM's arguments: it reads the model's config and dies where a file tells it to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--port", type=int)
    known, _ = parser.parse_known_args()
    import transformers

    torch.set_num_threads(1)
    config = transformers.AutoConfig.from_pretrained(known.model)
    stand_in = StandIn(transformers.AutoModelForCausalLM.from_config(config))
    print("the stand-in listens", flush=True)
    Listening(("127.0.0.1", known.port), handler_of(stand_in.handle)).serve_forever()


if __name__ == "__main__":
    main()
