"""The interface of a serving-engine adapter, and the types that adapters exchange with the rest of the package.

An adapter translates requests, responses and weight updates to the HTTP API of one engine. A new engine needs one file
with its `EngineAdapter` and one entry in `ascent/inference/remote/adapters.py`. The list of servers, load balancing,
failure recovery and probing are the same for all engines.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from ascent.core.errors import RunError
from ascent.inference.remote.weight_files import WeightManifest


class EngineRequest(NamedTuple):
    """A request for one response."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    """0: greedy."""
    seed: int
    stop_token_ids: tuple[int, ...]
    """The only tokens that end the response; empty: it has exactly `max_tokens` tokens."""
    truncation: tuple[int, float, float] = (0, 1.0, 0.0)
    """Top-k, top-p and min-p. Training runs never set them, because the engines' log-probs are then ambiguous."""


class EngineResponse(NamedTuple):
    """A response, or a part of one, as the server returned it."""

    tokens: list[int]
    logp: list[float]
    """Log-probs over the whole vocabulary, after temperature (without temperature if greedy)."""
    versions: list[int]
    """The version of the weights that generated each token."""
    aborted: bool = False
    stopped: bool = False
    """Did it end at an end token or a stop string, rather than at its token limit?"""

    def concat(self, later: "EngineResponse") -> "EngineResponse":
        """Return this response followed by `later`."""
        tokens, logp, versions = self.tokens + later.tokens, self.logp + later.logp, self.versions + later.versions
        return EngineResponse(tokens, logp, versions, later.aborted, later.stopped)


EMPTY_RESPONSE = EngineResponse([], [], [])


class ServerConfig(NamedTuple):
    """The model that a server loads, and its limits."""

    model_config: dict[str, Any]
    """The contents of config.json. The weights are transferred later."""
    dtype: str
    max_model_len: int
    """Maximum number of tokens of a prompt with its response."""
    max_num_seqs: int
    """Maximum number of responses decoded at once."""
    on_cpu: bool


class ServerConnection(Protocol):
    """The HTTP operations that an adapter may use."""

    url: str

    def call(self, path: str, body: Any = None, seconds: float | None = None) -> Awaitable[Any]:
        """POST `body`, or GET if there is none, and return the JSON of the reply."""
        ...

    def upload(self, path: str, file: Path) -> Awaitable[Any]:
        """PUT a file as a stream and return the JSON of the reply, whose `checksum` is that of the file."""
        ...


class EngineAdapter(ABC):
    """Translates requests, responses, weight updates and the server's command line for one engine."""

    name: ClassVar[str]
    """The value of `--engine`."""
    release: ClassVar[str]
    """The supported engine and version."""
    generate_path: ClassVar[str]
    """The path of the endpoint that generates responses."""
    min_temperature: ClassVar[float]
    """The engine changes the sampling distribution below this temperature."""
    truncation_note: ClassVar[str]
    """Why full-vocabulary log-probs are unavailable with top-k, top-p or min-p."""
    setup_hint: ClassVar[str]
    """What to check if an endpoint is missing."""
    uses_weight_file: ClassVar[bool] = True
    """Are weights transferred through a file?"""

    @abstractmethod
    def request_body(self, request: EngineRequest, salt: str) -> dict[str, Any]:
        """Return the JSON of a request. `salt` separates the prefix caches of different versions."""

    @abstractmethod
    def parse_response(self, reply: Any) -> EngineResponse:
        """Parse a reply. KeyError, TypeError or ValueError mean that this engine did not send it."""

    @abstractmethod
    def parse_event(self, before: EngineResponse, event: Any) -> EngineResponse:
        """Return the response so far, extended by the next event of its stream. Errors as in `parse_response`."""

    @abstractmethod
    async def check_server(self, server: ServerConnection, config: ServerConfig) -> None:
        """Raise RunError if the server is not the supported engine or cannot serve this run."""

    @abstractmethod
    async def load_weights(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        """Load new weights: pause, transfer, verify, drop the prefix cache and the KV cache, resume.

        Unfinished responses are paused meanwhile. They continue under the new weights with a recomputed KV cache.
        """

    @abstractmethod
    def server_arguments(self, config: ServerConfig, model: Path, port: int) -> list[str]:
        """Return the arguments of the Python interpreter that start the server on a loopback port."""

    @abstractmethod
    def server_environment(self, config: ServerConfig) -> tuple[dict[str, str], dict[str, str]]:
        """Return two sets of environment variables: defaults that the user may override, and required ones."""

    def close(self) -> None:  # noqa: B027 (most adapters hold no resources)
        """Release the resources that are shared with the servers."""

    def check_version(self, url: str, version: str) -> None:
        """Raise RunError if the server has another version than the supported one."""
        name, _, number = self.release.partition(" ")
        if not f"{version}.".startswith(f"{number}."):
            raise RunError(f"{url} runs {name} {version}, but Ascent supports {self.release}: install that version")

    def check_context_length(self, url: str, context_length: int, needed: int, flag: str) -> None:
        """Raise RunError if a prompt with its response may exceed the context length of the server."""
        if context_length < needed:
            raise RunError(
                f"{url} has a context length of {context_length} tokens, but a prompt with its response may have "
                f"{needed}: start the server with {flag} {needed} or more"
            )


def token_versions(spans: Any) -> list[int]:
    """Expand spans of tokens to the weight version of each token. −1: the server has no weights of this run yet."""
    versions = {span["version"]: -1 if span["version"] == "default" else int(span["version"]) for span in spans or []}
    return [versions[span["version"]] for span in spans or [] for _ in range(int(span["start"]), int(span["end"]))]
