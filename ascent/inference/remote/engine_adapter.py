"""How an engine is spoken to: what a dialect says, and what every one of them is asked for.

A new engine is one file with its `Dialect`, and one line in `ascent/inference/remote/adapters.py`. Which servers there
are, who is asked for what, what is lost and probed is the same for all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from ascent.core.errors import RunError
from ascent.inference.remote.weight_files import WeightManifest


class EngineRequest(NamedTuple):
    """One response that is asked for."""

    prompt: list[int]
    most: int
    """The most tokens that it may have."""
    temperature: float
    """0: greedy."""
    seed: int
    ends: tuple[int, ...]
    """The tokens that end it, and no others do; none: it has `most` tokens."""
    narrow: tuple[int, float, float] = (0, 1.0, 0.0)
    """Top-k, top-p and min-p: what their log-probs are then is not known, so no run has them."""


class EngineResponse(NamedTuple):
    """One response as the server gave it."""

    tokens: list[int]
    logp: list[float]
    """After temperature (greedy: without one), over the whole vocabulary."""
    versions: list[int]
    """Whose weights drew each token."""
    aborted: bool = False
    ended: bool = False
    """By an end token or a stop string, and not by its limit."""

    def then(self, later: "EngineResponse") -> "EngineResponse":
        """This, and what follows it."""
        tokens, logp, versions = self.tokens + later.tokens, self.logp + later.logp, self.versions + later.versions
        return EngineResponse(tokens, logp, versions, later.aborted, later.ended)


EMPTY_RESPONSE = EngineResponse([], [], [])


class ServerConfig(NamedTuple):
    """What a server is to serve."""

    config: dict[str, Any]
    """The model's, as in its config.json. Its weights are sent."""
    dtype: str
    length: int
    """The most tokens of a prompt with its response."""
    rows: int
    """Responses that are decoded at once."""
    cpu: bool


class ServerConnection(Protocol):
    """What a dialect may do with a server."""

    url: str

    def ask(self, path: str, body: Any = None, seconds: float | None = None) -> Awaitable[Any]:
        """POST, or GET without a body; the answer's JSON."""
        ...

    def send(self, path: str, file: Path) -> Awaitable[Any]:
        """PUT a file, in a stream; the answer's JSON, whose `checksum` is that of what was sent."""
        ...


class EngineAdapter(ABC):
    """One engine's words: requests and answers, new weights, and how a server is started."""

    name: ClassVar[str]
    """As `--engine` has it."""
    release: ClassVar[str]
    """The version that this was written for, with the engine's own name."""
    generates: ClassVar[str]
    """The address that answers requests."""
    coldest: ClassVar[float]
    """Below this temperature it draws from something else than it was told."""
    narrowed: ClassVar[str]
    """Why the log-probs over the full vocabulary cannot be known with top-k, top-p or min-p."""
    advice: ClassVar[str]
    """What to look at where an address is missing."""
    by_file: ClassVar[bool] = True
    """Are weights handed over in a file?"""

    @abstractmethod
    def body(self, request: EngineRequest, salt: str) -> dict[str, Any]:
        """The request. `salt` keeps it from the prefix caches of other versions."""

    @abstractmethod
    def read(self, reply: Any) -> EngineResponse:
        """The answer. KeyError, TypeError or ValueError: it is not this engine's."""

    @abstractmethod
    def more(self, before: EngineResponse, event: Any) -> EngineResponse:
        """A response as far as it has come, with the next event of its stream. Errors as in `read`."""

    @abstractmethod
    async def greet(self, server: ServerConnection, serving: ServerConfig) -> None:
        """Before its first weights. RunError where it is not what this dialect is for, or cannot serve this run."""

    @abstractmethod
    async def load(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        """New weights: pause, transfer, compare what arrived, forget the caches of the old ones, continue.

        Responses that are being written wait meanwhile, and continue under the new weights with their cache computed
        anew.
        """

    @abstractmethod
    def arguments(self, serving: ServerConfig, model: Path, port: int) -> list[str]:
        """What the interpreter of its environment is started with, to listen on loopback at this port."""

    @abstractmethod
    def environment(self, serving: ServerConfig) -> tuple[dict[str, str], dict[str, str]]:
        """Environment variables: those that the user may have set otherwise, and those that have to be."""

    def close(self) -> None:  # noqa: B027 (most have nothing)
        """Let go of what it has with the servers."""

    def know(self, url: str, version: str) -> None:
        """RunError where that version is not the one that this was written for."""
        name, _, number = self.release.partition(" ")
        if not f"{version}.".startswith(f"{number}."):
            raise RunError(f"{url} is {name} {version}, and Ascent speaks to {self.release}: install that")

    def fits(self, url: str, most: int, needed: int, flag: str) -> None:
        """RunError where the server takes fewer tokens than a prompt with its response may have."""
        if most < needed:
            raise RunError(
                f"{url} takes {most} tokens, and a prompt with its response may have {needed} here: start it with "
                f"{flag} {needed} or more, and with memory for them"
            )


def token_versions(spans: Any) -> list[int]:
    """The version of each token, from spans of tokens; −1: the server has not got any weights from us."""
    named = {span["version"]: -1 if span["version"] == "default" else int(span["version"]) for span in spans or []}
    return [named[span["version"]] for span in spans or [] for _ in range(int(span["start"]), int(span["end"]))]
