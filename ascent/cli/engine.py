"""`ascent engine`: relay requests of a trainer on another machine to a serving engine."""

import importlib.util
import signal
import sys
from dataclasses import dataclass
from typing import Literal

from ascent.cli.flags import Command
from ascent.core.errors import ConfigError
from ascent.inference.remote.adapters import get_adapter
from ascent.inference.remote.relay_client import read_key
from ascent.inference.remote.server_client import ServerClient


@dataclass
class EngineCommand(Command):
    """Make a serving engine on this machine available to a trainer on another one, with a key.

    The engine itself listens on loopback only. Set --engine.url https://HOST:PORT and
    --engine.key-file for the trainer. docs/serving.md describes each step.
    """

    engine: Literal["vllm", "sglang"]
    """The engine that runs here: vllm or sglang."""
    url: str = "http://127.0.0.1:8000"
    """Address at which the engine listens."""
    key_file: str = ""
    """File with the key, for its owner alone: (umask 077; openssl rand -hex 32 > FILE)."""
    key_env: str = "ASCENT_ENGINE_KEY"
    """Environment variable with the key, if there is no file."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs a certificate."""
    port: int = 8443
    """Port to listen on; 0: a free one."""
    tls_cert: str = ""
    """File with the certificate for https (PEM)."""
    tls_key: str = ""
    """File with the certificate's private key (PEM)."""
    rows: int = 1024
    """Maximum number of concurrent requests to the engine."""
    limit: int = 64
    """Maximum size of the weights that the trainer sends, in GiB."""
    deadline: float = 600.0
    """Seconds that the engine may take for a response or for loading weights, and the trainer for sending them."""

    def execute(self) -> int:
        missing = [
            name for name in ("pydantic", "starlette", "uvicorn", "httpx") if importlib.util.find_spec(name) is None
        ]
        if missing:
            raise ConfigError(f"ascent engine needs {' and '.join(missing)}: pip install 'ascent-rl[lab,judge]'")
        from ascent.models.causal_lm import check_address
        from ascent.server.connections import is_local
        from ascent.server.engine_relay import Relay, relay_server

        check_address(self.url, relayed=False, flag="--url")
        if bool(self.tls_cert) != bool(self.tls_key) or not (is_local(self.host) or self.tls_cert):
            raise ConfigError(
                f"--host {self.host}: the key and the weights would be sent unencrypted. Set --tls-cert and "
                "--tls-key, or listen on 127.0.0.1 behind a tunnel (ssh -L) or a proxy that has a certificate"
            )
        key = read_key(self.key_env, self.key_file)
        client = ServerClient(self.url, get_adapter(self.engine), self.rows, self.deadline)
        relay = Relay(client, key, self.limit * 2**30)
        server, listening = relay_server(relay, self.host, self.port, self.tls_cert, self.tls_key)
        address = f"{'https' if self.tls_cert else 'http'}://{self.host}:{listening.getsockname()[1]}"
        print(f"{self.engine} at {self.url} is available at {address}. Stop with Ctrl-C.", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            server.run(sockets=[listening])
        finally:
            relay.close()
        return 0


COMMANDS = {"train": (EngineCommand,)}
