"""Small servers that speak as the engines do to a trainer, with a tiny model of ours behind them.

It can be told to misbehave: to die, to hang, to answer late, to forget a tensor, to keep an old cache.

    python tests/stand_in.py … --model FOLDER --port PORT      as a process, with vLLM's own arguments

What SGLang says and refuses is written from its source, version 0.5.23: nobody has run it here.
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
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

Drawn = tuple[list[int], list[float], list[dict[str, Any]]]
"""Tokens, their log-probs and their versions."""
Each = Callable[[list[int], list[float]], None]
"""Called after each token of a stream, with all so far."""


class StandIn:
    """The state of a server, and how it draws. What each address does is its engine's."""

    generates: str
    context = 4096
    """Tokens that it takes."""
    release: str

    def __init__(self, model: Any):
        self.model = model.eval().requires_grad_(False)
        for p in self.model.parameters():  # as vLLM's dummy weights: nothing works before a load
            p.data = torch.zeros_like(p)
        self.version, self.paused, self.received = "default", False, {}
        self.untouched: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.cache: dict[Any, dict[str, torch.Tensor]] = {}
        """By the prompt (and its salt), the weights that it was encoded with."""
        self.lock = threading.Condition(threading.RLock())
        self.url, self.dead, self.life = "", False, 0
        self.running: dict[int, dict[str, torch.Tensor]] = {}
        """The weights of the keys and values of each response that is being written."""
        self.hold_at, self.held = -1, 0
        """The token before which every response waits, until it is another; and how many wait there."""
        self.hold_probe_at, self.probe_held = -1, False
        """The token before which a probe waits for the next weights; and whether one does."""
        self.kills: list[int] = []
        """After how many tokens and calls, each time, it is killed and at once started again."""
        # how it misbehaves
        self.die_after = self.hang_after = -1
        """Requests until it drops every connection, or answers none, until it is told otherwise."""
        self.late = 0.0
        self.forget = self.corrupt = ""
        """A tensor that it does not load though it says so; one that does not arrive as it was sent."""
        self.keep_cache = self.ignore_salt = self.raw_logprobs = self.old_version = self.abort_once = False
        self.keep_running = False
        """Does it go on with the old keys and values after new weights?"""
        self.refuse_weights = 0
        self.streamed = self.left = 0
        """Responses that were streamed, and those of them that nobody waited for to the end."""

    # ---- life

    def kill(self) -> None:
        """As kill -9 does: whoever waits loses the connection, and nothing is left."""
        with self.lock:
            self.dead, self.life, self.paused, self.version = True, self.life + 1, False, "default"
            self.cache, self.running = {}, {}
            for p in self.model.parameters():
                p.data = torch.zeros_like(p)
            self.lock.notify_all()

    def live(self) -> None:
        """One more token or call, unless it dies of it."""
        with self.lock:
            if self.kills and not self.kills[0]:
                self.kills.pop(0)
                self.kill()
                self.revive()
                raise ConnectionError
            if self.kills:
                self.kills[0] -= 1

    def revive(self) -> None:
        self.die_after, self.dead = -1, False

    # ---- weights

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        own = dict(self.model.named_parameters())
        self.received = {name: [list(t.shape), zlib.crc32(_bytes(t))] for name, t in tensors.items()}
        if self.corrupt:
            self.received[self.corrupt][1] += 1
        for name, tensor in tensors.items():
            if name != self.forget:
                own[name].data = tensor.clone()
        self.untouched = sorted(own.keys() - self.received.keys())

    # ---- responses

    def weights_for(self, ids: list[int], salt: str | None) -> dict[str, torch.Tensor]:
        """The present weights; those of an earlier time for a prompt whose cache was kept. Short prompts have none."""
        now = {name: p.data for name, p in self.model.named_parameters()}
        if len(ids) < 16:
            return now
        return self.cache.setdefault((tuple(ids), "" if self.ignore_salt else salt), now)

    @torch.no_grad()
    def draw(
        self,
        ids: list[int],
        salt: str | None,
        temperature: float,
        seed: int,
        most: int,
        ends: list[int],
        each: Each | None = None,
    ) -> Drawn:
        """Token by token: in between weights may change, or the server may die. A probe, without ends, is not held."""
        greedy, life, me = temperature == 0.0, self.life, threading.get_ident()
        tokens, logp, versions = [], [], []
        generator = torch.Generator().manual_seed(seed)
        while len(tokens) < most:
            with self.lock:
                self._wait(len(tokens) if ends else -2)
                if not ends:
                    self.probe_held = len(tokens) == self.hold_probe_at
                    self.lock.wait_for(lambda: len(tokens) != self.hold_probe_at and not self.paused)
                if life != self.life:
                    raise ConnectionError
                self.live()
                weights = self.running.setdefault(me, self.weights_for(ids, salt))
                out = torch.func.functional_call(self.model, weights, (torch.tensor([ids + tokens]),), tie_weights=True)
                z = out.logits[0, -1].float()
                log_p = torch.log_softmax(z if greedy else z / temperature, -1)
                token = int(log_p.argmax()) if greedy else int(torch.multinomial(log_p.exp(), 1, generator=generator))
                tokens.append(token)
                logp.append(float((torch.log_softmax(z, -1) if self.raw_logprobs else log_p)[token]))
                versions.append("0" if self.old_version else self.version)
            if each is not None:
                each(tokens, logp)
            if token in ends:
                break
        with self.lock:
            self.running.pop(me, None)
        return tokens, logp, [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions)]

    def _wait(self, token: int) -> None:
        """Until this token may be drawn."""
        life = self.life
        while (self.paused or token == self.hold_at) and life == self.life:
            held = token == self.hold_at
            self.held += held
            self.lock.notify_all()
            self.lock.wait()
            self.held -= held

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self.lock.notify_all()

    def forget_caches(self) -> None:
        self.hold_probe_at = -1
        if not self.keep_cache:
            self.cache = {}
        if not self.keep_running:
            self.running = {}

    def aborts(self) -> bool:
        with self.lock:
            once, self.abort_once = self.abort_once, False
        return once

    def refuses_weights(self) -> bool:
        refused = self.refuse_weights > 0
        self.refuse_weights -= refused
        return refused

    # ---- addresses

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        where = path.partition("?")[0]
        probe = where == self.generates and "stop_token_ids" not in body["sampling_params"]
        self.calls.append("probe" if probe else where)
        if where == self.generates:
            return self.respond(body)
        with self.lock:
            if where != "/health":
                self.live()
            return self.say(where, body)

    def respond(self, body: dict[str, Any], each: Each | None = None) -> tuple[int, Any]:
        raise NotImplementedError

    def event(self, tokens: list[int], logp: list[float], reply: Any = None) -> Any:
        """An event of a stream: these tokens so far, or the whole reply at its end."""
        raise NotImplementedError

    def say(self, where: str, body: dict[str, Any]) -> tuple[int, Any]:
        raise NotImplementedError

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        size = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(size) or b"{}")
        spared = False
        if handler.path == self.generates:
            with self.lock:
                self.asked.append(body)
                spared = len(self.asked) <= self.die_after  # it came before the one that finds the server dead
                if 0 <= self.die_after < len(self.asked):
                    self.dead = True
            while 0 <= self.hang_after < len(self.asked):  # whoever asks, /health too, waits
                time.sleep(0.01)
            time.sleep(self.late)
        while handler.path == "/health" and 0 <= self.hang_after < len(self.asked):
            time.sleep(0.01)
        if self.dead and not spared:
            return self._hang_up(handler)
        try:
            if body.get("stream"):
                return self._stream(handler, body)
            status, reply = self.answer(handler.path, body)
        except ConnectionError:
            return self._hang_up(handler)
        sent = b"" if reply is None else json.dumps(reply).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(sent)))
        handler.end_headers()
        with suppress(OSError):
            handler.wfile.write(sent)

    def _stream(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.streamed += 1

        def put(words: bytes) -> None:
            try:
                handler.wfile.write(b"%x\r\n%s\r\n" % (len(words), words))
            except OSError:
                self.left += 1
                raise ConnectionError from None

        def event(*of: Any) -> None:
            put(b"data: " + json.dumps(self.event(*of)).encode() + b"\n\n")

        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        _, reply = self.respond(body, event)
        event([], [], reply)
        put(b"data: [DONE]\n\n")
        handler.wfile.write(b"0\r\n\r\n")

    def _hang_up(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        with suppress(OSError):
            handler.connection.shutdown(socket.SHUT_RDWR)


class VllmStandIn(StandIn):
    generates, release = "/inference/v1/generate", "0.32.0+cpu"
    group: Any = None
    cut_off_after = -1
    """Tensors of a broadcast after which it is gone."""

    def join(self, about: dict[str, Any]) -> None:
        """As the worker inside vLLM does, with gloo."""
        wait, gloo = timedelta(seconds=about["seconds"]), dist.ProcessGroupGloo
        store = dist.TCPStore("127.0.0.1", about["port"], about["size"], False, wait)
        over = gloo._Options()  # type: ignore[attr-defined]
        over._timeout, over._devices = wait, [gloo.create_device(hostname="127.0.0.1")]
        self.group = gloo(store, 1, about["size"], over)

    def receive(self, about: dict[str, Any]) -> dict[str, torch.Tensor]:
        options, tensors = dist.BroadcastOptions(), {}
        options.rootRank, options.rootTensor = 0, 0
        for place, (name, dtype, shape) in enumerate(
            zip(about["names"], about["dtypes"], about["shapes"], strict=True)
        ):
            if place == self.cut_off_after:
                self.cut_off_after = -1
                self.group.abort()
                raise ConnectionError
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([tensors[name]], options).wait()
        return tensors

    def event(self, tokens: list[int], logp: list[float], reply: Any = None) -> Any:
        """The new token, one late; at the end the last one, and the versions of all."""
        if reply is not None:
            (choice,) = reply["choices"]
            content = choice["logprobs"]["content"][-1:]
            return {"choices": [choice | {"token_ids": choice["token_ids"][-1:], "logprobs": {"content": content}}]}
        content = [{"token_id": t, "logprob": x} for t, x in zip(tokens[-2:-1], logp[-2:-1], strict=True)]
        about = {"token_ids": tokens[-2:-1], "weight_versions": None, "finish_reason": None}
        return {"choices": [about | {"logprobs": {"content": content}}]}

    def respond(self, body: dict[str, Any], each: Each | None = None) -> tuple[int, Any]:
        how = body["sampling_params"]
        drawn = how["temperature"], how.get("seed", 0), how["max_tokens"], how.get("stop_token_ids", [])
        tokens, logp, spans = self.draw(list(body["token_ids"]), body.get("cache_salt"), *drawn, each)
        return 200, {
            "choices": [
                {
                    "token_ids": tokens,
                    "logprobs": {"content": [{"token_id": t, "logprob": x} for t, x in zip(tokens, logp, strict=True)]},
                    "weight_versions": spans,
                    "finish_reason": "abort" if self.aborts() else "stop",
                }
            ]
        }

    def say(self, where: str, body: dict[str, Any]) -> tuple[int, Any]:
        if where == "/version":
            return 200, {"version": self.release}
        if where == "/v1/models":
            return 200, {"data": [{"max_model_len": self.context}]}
        if where == "/update_weights":
            if self.refuses_weights():
                return 500, {"error": "no such file"}
            about = body["update_info"]
            self.take(load_file(about["path"]) if "path" in about else self.receive(about))
        elif where == "/init_weight_transfer_engine" and body["init_info"]:
            self.join(body["init_info"])
        elif where == "/get_world_size":
            return 200, {"world_size": 1}
        elif where == "/finish_weight_update":
            self.version = body["weight_version"]
        elif where == "/reset_prefix_cache":
            self.forget_caches()
        elif where == "/collective_rpc":
            return 200, {"results": [{"tensors": self.received, "untouched": self.untouched}]}
        elif where in ("/pause", "/resume"):
            self.pause(where == "/pause")
        return 200, {"message": where}


class SglangStandIn(StandIn):
    """SGLang 0.5.23, from its source. It is stricter than that: a field that it does not know is refused."""

    generates, release = "/generate", "0.5.23"
    deterministic = True
    FIELDS = frozenset({"input_ids", "sampling_params", "return_logprob", "cache_salt", "stream"})
    SAMPLING = frozenset(
        {"max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "sampling_seed"}
        | {"frequency_penalty", "presence_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos"}
    )

    def event(self, tokens: list[int], logp: list[float], reply: Any = None) -> Any:
        """All so far; tokens and log-probs are written one after the other while more come."""
        entries = [[x, t, None] for t, x in zip(tokens, logp, strict=True)]
        about = {"finish_reason": None, "output_token_logprobs": entries[: len(tokens) - len(tokens) % 2]}
        return reply or {"output_ids": tokens, "meta_info": about}

    def respond(self, body: dict[str, Any], each: Each | None = None) -> tuple[int, Any]:
        how, ids = body["sampling_params"], body["input_ids"]
        odd, most = (body.keys() - self.FIELDS) | (how.keys() - self.SAMPLING), how["max_new_tokens"]
        if odd or how["min_new_tokens"] or len(ids) + most > self.context or len(ids) >= self.context - 6:
            return 400, {"error": {"message": f"{sorted(odd)} or {len(ids)} + {most} tokens"}}
        most = min(most, self.context - 1 - len(ids) - 1)  # managers/scheduler.py, without a word
        own = self.model.generation_config.eos_token_id
        known = [*how.get("stop_token_ids", []), *(own if isinstance(own, list) else [] if own is None else [own])]
        ends = [] if how.get("ignore_eos") else known  # managers/schedule_batch.py: both kinds, or neither
        seed = how.get("sampling_seed", 42) if self.deterministic else len(self.asked)
        tokens, logp, spans = self.draw(list(ids), body.get("cache_salt"), how["temperature"], seed, most, ends, each)
        reason: dict[str, Any] = {"type": "length", "length": len(tokens)}
        reason = {"type": "stop", "matched": tokens[-1]} if tokens[-1] in ends else reason
        if self.aborts():
            tokens, logp, reason = [], [], {"type": "abort", "message": "Abort in waiting queue"}
        about = {"finish_reason": reason, "weight_version": self.version, "completion_tokens": len(tokens)}
        about |= {"output_token_logprobs": [[x, t, None] for t, x in zip(tokens, logp, strict=True)]}
        about |= {"weight_versions": spans} if tokens else {}
        return 200, {"output_ids": tokens, "meta_info": about}

    def say(self, where: str, body: dict[str, Any]) -> tuple[int, Any]:
        if where == "/health":
            return 200, None
        if where == "/server_info":
            able = {"enable_deterministic_inference": self.deterministic, "max_req_input_len": self.context - 6}
            return 200, {"version": self.release, "frontend": "python"} | able
        if where == "/model_info":
            return 200, {"architectures": [type(self.model).__name__], "weight_version": self.version}
        if where == "/pause_generation":
            assert body == {"mode": "retract"}, "in any other mode old caches stay, or answers are aborted"
            self.pause(True)
        elif where == "/update_weights_from_disk":
            return self.load(body)
        elif where == "/continue_generation":
            self.pause(False)
        else:
            return 404, {"detail": "Not Found"}
        return 200, {"message": "…", "status": "ok"}

    def load(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.paused and body["load_format"] == "safetensors", "its own format is that of its start: dummy"
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if self.refuses_weights() or not files:
            return 400, {
                "success": False,
                "message": "Failed to update weights: no such file",
                "num_paused_requests": 0,
            }
        (file,) = files
        self.take(load_file(file))
        self.version = body["weight_version"]
        if body["flush_cache"]:
            self.forget_caches()
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


STAND_INS: dict[str, type[StandIn]] = {"vllm": VllmStandIn, "sglang": SglangStandIn}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


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
def serving(model: Any, engine: str = "vllm") -> Iterator[StandIn]:
    """A stand-in on a thread of this process."""
    stand_in = STAND_INS[engine](model)
    server = Listening(("127.0.0.1", 0), handler_of(stand_in.handle))
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.hang_after = -1
        stand_in.kill()
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
    stand_in = VllmStandIn(transformers.AutoModelForCausalLM.from_config(config))
    print("the stand-in listens", flush=True)
    Listening(("127.0.0.1", known.port), handler_of(stand_in.handle)).serve_forever()


if __name__ == "__main__":
    main()
