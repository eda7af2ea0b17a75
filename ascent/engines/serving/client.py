"""The HTTP side of one server of vLLM 0.32: token ids in and out, and new weights. Every wait has a deadline."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from ascent.core.types import Refused, Trouble
from ascent.engines.serving.weights import Manifest

GLANCE = 30.0
"""Seconds in which a living server says that it lives, if its deadline is not shorter."""
EXCERPT = 300
"""Characters of a server's words in an error."""
Some = TypeVar("Some")


class Lost(Exception):
    """The server is gone, or does not answer: what it was asked may be asked again."""


class Answer(NamedTuple):
    """One response as the server gave it."""

    tokens: list[int]
    logp: list[float]
    """After temperature, over the whole vocabulary."""
    versions: list[int]
    """Whose weights drew each token."""
    aborted: bool = False
    ended: bool = False
    """By an end token or a stop string, and not by its limit."""


class Calls:
    """A thread with an event loop: requests run there while the run computes."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="ascent-engine", daemon=True)
        self.thread.start()

    def start(self, call: Coroutine[Any, Any, Some]) -> "Future[Some]":
        return asyncio.run_coroutine_threadsafe(call, self.loop)

    def together(self, calls: list[Coroutine[Any, Any, Some]]) -> list[Some]:
        """All of them at once, to their end: each has its own deadline."""

        async def every() -> list[Some]:
            return await asyncio.gather(*calls)

        return self.start(every()).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class Client:
    """What is asked of one server. It knows nothing of tickets."""

    def __init__(self, url: str, at_once: int, deadline: float):
        try:
            import httpx
        except ImportError:
            raise Refused("--engine vllm needs httpx: pip install 'ascent-rl[judge]'") from None
        self.url, self.deadline, self._httpx = url.rstrip("/"), deadline, httpx
        limits = httpx.Limits(max_connections=at_once + 4)
        self._http = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)  # no proxy to loopback
        self._lanes = asyncio.Semaphore(at_once)

    async def ask(self, path: str, body: Any = None, seconds: float | None = None) -> Any:
        """POST, or GET without a body; the answer's JSON. Lost: no answer in time, or the server itself has failed."""
        seconds = seconds or self.deadline
        method = "GET" if body is None else "POST"
        try:
            async with asyncio.timeout(seconds):
                reply = await self._http.request(method, self.url + path, json=body)
        except TimeoutError:
            raise Lost(f"{self.url}{path} has not answered within {seconds:g} seconds") from None
        except self._httpx.TransportError as error:
            raise Lost(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from None
        words = reply.text[:EXCERPT]
        if reply.status_code >= 500:
            raise Lost(f"{self.url}{path} said {reply.status_code}: {words}")
        if reply.status_code >= 400:
            raise Trouble(f"the engine refused {self.url}{path} with {reply.status_code}: {words}{_advice(reply)}")
        try:
            return reply.json() if reply.content else None
        except ValueError:
            raise Trouble(f"{self.url}{path} did not answer in JSON: {words}") from None

    async def alive(self) -> bool:
        try:
            await self.ask("/health", seconds=min(GLANCE, self.deadline))
        except (Lost, Trouble):
            return False
        return True

    async def generate(self, body: dict[str, Any]) -> Answer:
        """One response. Its deadline begins when it is sent."""
        async with self._lanes:
            reply = await self.ask("/inference/v1/generate", body)
        try:
            (choice,) = reply["choices"]
            tokens = [int(token) for token in choice["token_ids"] or []]
            content = (choice["logprobs"] or {}).get("content") or []
            versions = [int(span["version"]) for span in choice["weight_versions"] or [] for _ in _places(span)]
            logp = [float(entry["logprob"]) for entry in content]
        except (KeyError, TypeError, ValueError) as error:
            raise Trouble(f"{self.url}: its answer is not that of vLLM 0.32: {type(error).__name__} {error}") from None
        aborted = choice.get("finish_reason") == "abort"
        if not (len(tokens) == len(logp) == len(versions)) or not (tokens or aborted):
            raise Trouble(
                f"{self.url}: a response of {len(tokens)} tokens came with {len(logp)} log-probs and {len(versions)} "
                "versions; is it vLLM 0.32?"
            )
        return Answer(tokens, logp, versions, aborted)

    async def load(self, weights: Manifest, version: int) -> None:
        """New weights: pause, transfer, compare what arrived, forget the caches of the old ones, continue.

        Responses that are being written wait meanwhile, and continue under the new weights with their cache computed
        anew.
        """
        await self.ask("/init_weight_transfer_engine", {"init_info": {}})
        await self.ask("/pause?mode=keep&clear_cache=false", {})
        await self.ask("/start_weight_update", {})
        await self.ask("/update_weights", {"update_info": {"path": str(weights.path)}})
        await self.ask("/finish_weight_update", {"weight_version": str(version)})
        self._compare(weights, await self.ask("/collective_rpc", {"method": "ascent_received"}))
        await self.ask("/reset_prefix_cache?reset_running_requests=true", {})
        await self.ask("/resume", {})

    def _compare(self, weights: Manifest, reply: Any) -> None:
        """Trouble where a worker has not read just these tensors, or has parameters that none of them reached."""
        for worker in reply["results"]:
            received, untouched = worker["tensors"], worker["untouched"]
            every = weights.tensors.keys() | received.keys()
            odd = sorted(name for name in every if weights.tensors.get(name) != received.get(name))
            if odd or untouched:
                what = f"{odd[0]} differs from what was sent" if odd else f"nothing was loaded into {untouched[0]}"
                raise Trouble(
                    f"{self.url}: of {len(weights.tensors)} tensors, {len(odd)} arrived wrong and {len(untouched)} "
                    f"parameters were left alone: {what}. Does the server serve this model?"
                )

    async def close(self) -> None:
        await self._http.aclose()


def _places(span: dict[str, Any]) -> range:
    return range(int(span["start"]), int(span["end"]))


def _advice(reply: Any) -> str:
    if reply.status_code != 404:
        return ""
    return ". Was it started with --enable-scale-out and VLLM_SERVER_DEV_MODE=1? docs/serving.md has the command"
