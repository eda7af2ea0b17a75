"""The trainer's side of `ascent engine`, a relay beside an engine on another machine.

The relay exposes a few operations (generate, upload, load) rather than the engine's own HTTP API. Its paths and limits
are defined here because both sides need them; the server is `ascent/server/engine_relay.py`.
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
"""Minimum number of characters of a relay key."""


class RelayAdapter(EngineAdapter):
    """The adapter of a relay, for any engine behind it."""

    generate_path, setup_hint = GENERATE_PATH, "Is it `ascent engine`, of this version of Ascent"

    def __init__(self, engine: EngineAdapter):
        self.engine = engine
        self.name, self.release = engine.name, f"`ascent engine {engine.name}`"  # type: ignore[misc]
        self.min_temperature, self.truncation_note = engine.min_temperature, engine.truncation_note  # type: ignore[misc]

    def request_body(self, request: EngineRequest, salt: str) -> dict[str, Any]:
        return {"request": request._asdict(), "salt": salt}

    def parse_response(self, reply: Any) -> EngineResponse:
        tokens, versions = ([int(number) for number in reply[name]] for name in ("tokens", "versions"))
        return EngineResponse(tokens, [float(number) for number in reply["logp"]], versions, bool(reply["aborted"]))

    def parse_event(self, before: EngineResponse, event: Any) -> EngineResponse:
        """Append the new tokens of an event. The last event contains the whole response."""
        return self.parse_response(event) if event["whole"] else before.concat(self.parse_response(event))

    async def check_server(self, server: ServerConnection, config: ServerConfig) -> None:
        engine = (await server.call(ABOUT_PATH))["engine"]
        if engine != self.name:
            raise RunError(f"{server.url} is `ascent engine {engine}`, and this run has --engine {self.name}")
        architectures = {"architectures": config.model_config["architectures"]}
        await server.call(CHECK_PATH, config._replace(model_config=architectures)._asdict())

    async def load_weights(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        uploaded = await server.upload(WEIGHTS_PATH, weights.path)
        await server.call(LOAD_PATH, {"upload": uploaded["upload"], "version": version, "tensors": weights.checksums})

    def server_arguments(self, config: ServerConfig, model: Path, port: int) -> list[str]:
        return self.engine.server_arguments(config, model, port)

    def server_environment(self, config: ServerConfig) -> tuple[dict[str, str], dict[str, str]]:
        return self.engine.server_environment(config)


def read_key(variable: str, file: str, flag: str = "--") -> str:
    """Read the key of a relay from a file that only its owner can read, or from an environment variable.

    `flag` is the prefix of the two flags in error messages.
    """
    source, key = f"${variable}", os.environ.get(variable, "").strip()
    if file:
        source, path = f"{flag}key-file {file}", Path(file).expanduser()
        try:
            mode = path.stat().st_mode
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: cannot be read ({type(error).__name__})") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(f"{source}: other users can read this file: chmod 600 {file}")
    if len(key) < MIN_KEY_LENGTH or not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"{source} has no key of at least {MIN_KEY_LENGTH} ASCII characters. Create one for both machines, for "
            "example by (umask 077; openssl rand -hex 32 > FILE), and set "
            f"{flag}key-file FILE, or put it in an environment variable and set {flag}key-env NAME"
        )
    return key
