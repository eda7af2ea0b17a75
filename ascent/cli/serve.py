"""`ascent serve`: serve a policy over an OpenAI-compatible API."""

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ascent.cli.flags import Command
from ascent.core.errors import ConfigError
from ascent.inference.remote.relay_client import read_key
from ascent.server.requirements import check_packages
from ascent.settings import settings_of
from ascent.workflows.loaded_policy import resolve_policy
from ascent.workflows.policy_server import ServeSettings, serve_policy


@dataclass(frozen=True)
class EngineOptions:
    """Server of --engine vllm or sglang: address, or how to start it (docs/serving.md)."""

    python: str = ""
    """Virtual environment of the engine, from which a server is started."""
    url: Annotated[tuple[str, ...], "URL…"] = ()
    """Running servers on this machine, or `ascent engine` on others."""
    args: str = ""
    """More arguments for the server, quoted: "--tensor-parallel-size 2"."""
    key_env: str = ""
    """Environment variable with the key of `ascent engine`."""
    key_file: str = ""
    """File with that key."""
    deadline: float = 600.0
    """Seconds that a response may take, and that a lost server may take to come back."""


@dataclass(kw_only=True)
class ServeCommand(Command):
    """Serve the policy of a run, or a model, over an OpenAI-compatible API.

      ascent serve RUN
      ascent serve FOLDER --port 9000 --rows 128
      ascent serve RUN --engine vllm --engine.python .engines/vllm

    Endpoints: /v1/models, /v1/chat/completions, /v1/completions and
    /inference/v1/generate. Clients always need a key, which is printed or read from
    --key-file. The server listens on this machine only, unless --host is set.
    """

    extra_settings, extra_prefix = EngineOptions, "engine"
    only_in_help_all = frozenset(s.name for s in settings_of(EngineOptions, "engine").values()) | {
        "max_context",
        "cache",
    }
    source: Annotated[str, "RUN|MODEL"]
    """A run's folder, or a model: a folder or a name on the hub."""
    step: Annotated[int | None, "N"] = None
    """The run's checkpoint of this step. Default: the newest."""
    best: bool = False
    """The run's best checkpoint, if it kept one."""
    host: str = "127.0.0.1"
    """Address to listen on; one that other machines reach needs a certificate."""
    port: int = 8000
    """Port to listen on; 0: a free one."""
    key_file: str = ""
    """File with the key, for its owner alone. Default: a new key, which is printed."""
    tls_cert: str = ""
    """File with the certificate for https (PEM)."""
    tls_key: str = ""
    """File with the certificate's private key (PEM)."""
    rows: int = 0
    """Maximum batch size of decoding; 0: chosen for the device."""
    queue: int = 0
    """Maximum number of waiting requests; more are refused with 429. 0: three times --rows."""
    max_context: int = 0
    """Maximum number of tokens of a conversation; 0: the model's limit, at most 4,096."""
    cache: float = 4.0
    """GiB of KV cache on a CPU; on a GPU, what fits."""
    temperature: Annotated[float | None, "T"] = None
    """Sampling temperature of requests that set none. Default: the run's."""
    device: Annotated[str | None, "DEVICE"] = None
    """cpu, cuda, cuda:1, …"""
    engine: Literal["local", "vllm", "sglang"] = "local"
    """Inference engine: this process, or a server of vLLM or SGLang."""

    def execute(self) -> int:
        check_packages("ascent serve")
        from ascent.server.connections import is_local

        if bool(self.tls_cert) != bool(self.tls_key) or not (is_local(self.host) or self.tls_cert):
            raise ConfigError(
                f"--host {self.host}: the key and all messages would be sent unencrypted. Set --tls-cert "
                "and --tls-key, or listen on 127.0.0.1 behind a tunnel (ssh -L) or a proxy that has a certificate"
            )
        for name in ("rows", "queue", "max_context", "cache"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}: set 0 or more")
        key = read_key("", self.key_file) if self.key_file else ""
        of_run = (Path(self.source) / "run.json").exists()
        changes = {"temperature": self.temperature, "device": self.device}
        run, model = (self.source, None) if of_run else (None, self.source)
        loaded = resolve_policy(run, model, None, {}, self.step, self.best, **changes)
        listening = (self.host, self.port, key, self.tls_cert, self.tls_key)
        engine = {name.replace(".", "_"): value for name, value in self.extra_values.items()}
        sizes = (self.rows, self.queue, self.max_context, self.cache)
        serving = ServeSettings(*listening, *sizes, self.engine, engine)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        serve_policy(loaded, serving, Path(self.source).name, not key)
        return 0


COMMANDS = {"look at a run": (ServeCommand,)}
