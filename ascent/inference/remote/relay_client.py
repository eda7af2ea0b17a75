"""An engine on another machine, through `ascent engine` beside it: the trainer's side of that relay.

The relay is told what a response or a version is, never which address of the engine to call. The paths and limits are
here, because both sides need them; the other side is `ascent/server/engine_relay.py`.
"""

import os
import stat
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError, RunError
from ascent.inference.remote.engine_adapter import (
    EngineAdapter,
    EngineRequest,
    EngineResponse,
    ServerConfig,
    ServerConnection,
)
from ascent.inference.remote.weight_files import WeightManifest

ABOUT_PATH, CHECK_PATH, GENERATE_PATH, WEIGHTS_PATH, LOAD_PATH = "/about", "/greet", "/generate", "/weights", "/load"
MIN_KEY_LENGTH = 16
"""Characters of a key that nobody guesses."""


class RelayAdapter(EngineAdapter):
    """What is asked of a relay, whichever engine is behind it."""

    generates, advice = GENERATE_PATH, "Is it `ascent engine`, of this version of Ascent"

    def __init__(self, engine: EngineAdapter):
        self.engine = engine
        self.name, self.release = engine.name, f"`ascent engine {engine.name}`"  # type: ignore[misc]
        self.coldest, self.narrowed = engine.coldest, engine.narrowed  # type: ignore[misc]

    def body(self, request: EngineRequest, salt: str) -> dict[str, Any]:
        return {"request": request._asdict(), "salt": salt}

    def read(self, reply: Any) -> EngineResponse:
        tokens, versions = ([int(number) for number in reply[name]] for name in ("tokens", "versions"))
        return EngineResponse(tokens, [float(number) for number in reply["logp"]], versions, bool(reply["aborted"]))

    def more(self, before: EngineResponse, event: Any) -> EngineResponse:
        """Events have new tokens, and the last one the whole answer."""
        return self.read(event) if event["whole"] else before.then(self.read(event))

    async def greet(self, server: ServerConnection, serving: ServerConfig) -> None:
        engine = (await server.ask(ABOUT_PATH))["engine"]
        if engine != self.name:
            raise RunError(f"{server.url} is `ascent engine {engine}`, and this run has --engine {self.name}")
        needed = {"architectures": serving.config["architectures"]}
        await server.ask(CHECK_PATH, serving._replace(config=needed)._asdict())

    async def load(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        sent = await server.send(WEIGHTS_PATH, weights.path)
        await server.ask(LOAD_PATH, {"upload": sent["upload"], "version": version, "tensors": weights.tensors})

    def arguments(self, serving: ServerConfig, model: Path, port: int) -> list[str]:
        return self.engine.arguments(serving, model, port)

    def environment(self, serving: ServerConfig) -> tuple[dict[str, str], dict[str, str]]:
        return self.engine.environment(serving)


def read_key(variable: str, file: str, flag: str = "--") -> str:
    """The key of a relay, from a file for its owner alone or from an environment variable. `flag`: in front of both."""
    source, key = f"${variable}", os.environ.get(variable, "").strip()
    if file:
        source, path = f"{flag}key-file {file}", Path(file).expanduser()
        try:
            about = path.stat()
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: it cannot be read ({type(error).__name__})") from None
        if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{source}: others on this machine can read it. chmod 600 {file}")
    if len(key) < MIN_KEY_LENGTH or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{source} has no key of {MIN_KEY_LENGTH} plain characters or more. Make one for both machines, as by "
            "(umask 077; openssl rand -hex 32 > FILE), and set "
            f"{flag}key-file FILE, or put it in an environment variable and set {flag}key-env NAME"
        )
    return key
