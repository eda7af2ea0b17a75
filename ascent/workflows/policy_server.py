"""`ascent serve`: an OpenAI-compatible server for a policy."""

import copy
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from ascent.core.errors import ConfigError, RunError
from ascent.core.sampling_params import SamplingParams
from ascent.environments.chat_session import ChatRenderer
from ascent.inference.continuous_batching import serve_requests
from ascent.inference.remote.adapters import get_adapter
from ascent.inference.remote.request_forwarder import forward_requests
from ascent.inference.request_queue import RequestQueue
from ascent.server.requirements import check_packages
from ascent.workflows.loaded_policy import LoadedPolicy

DEFAULT_CONTEXT = 4096
"""Default maximum length of a conversation, if the model supports it."""
MAX_FAILURES = 3
"""Consecutive failures of the engine after which the server stops."""


@dataclass(frozen=True)
class ServeSettings:
    """Settings of the server."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str = ""
    """API key of the server; empty: generate one."""
    certificate: str = ""
    private_key: str = ""
    rows: int = 0
    """Maximum number of running requests; 0: choose by device."""
    queue: int = 0
    """Maximum number of waiting requests before the server returns 429; 0: three times `rows`."""
    context: int = 0
    """Maximum tokens of a conversation; 0: the limit of the model, at most 4,096."""
    cache: float = 4.0
    """GiB of KV cache on a CPU."""
    engine: str = "local"
    """The engine: local (this process), vllm or sglang."""
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `CausalLM` that begin with `engine_`: address and start command of the engine."""


class PolicyServer:
    """An HTTP endpoint for a policy. After `start`, `run` decodes in the calling thread until `close`."""

    def __init__(self, loaded: LoadedPolicy, serving: ServeSettings, name: str):
        check_packages("ascent serve")
        from ascent.rollout.agents import ServerThread
        from ascent.server.endpoint import Endpoint
        from ascent.server.open_sessions import SessionSettings

        if not loaded.backend.uses_text:
            loaded.backend.serving_engine(
                loaded.config, loaded.policy, serving.context, 0
            )  # raises a ConfigError with the reason
        lm = loaded.policy
        if not lm.tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: set one to format messages")
        max_positions = lm.max_positions or DEFAULT_CONTEXT
        self.context, self.version = serving.context or min(max_positions, DEFAULT_CONTEXT), loaded.step or 0
        policy = replace(with_engine(loaded.config.policy, serving), rows=serving.rows)
        config = replace(loaded.config, policy=policy)
        self.here = policy.engine == "local"
        self.sampler = loaded.backend.serving_engine(config, lm, self.context, self.version)
        self.slots = self.sampler.rows + (serving.queue or 3 * self.sampler.rows)
        self.room = cpu_cache_tokens(lm, serving.cache, self.context) if self.here else 0
        self.key, self.queue = serving.key or secrets.token_urlsafe(32), RequestQueue(self.slots)
        adapter = None if self.here else get_adapter(policy.engine)
        settings = SessionSettings(
            context_length=self.context,
            max_prompt_tokens=self.context - 1,
            max_response_tokens=self.context - 1,
            temperature=config.temperature,
            sampling_params=SamplingParams(config.top_k, config.top_p, config.min_p),
            make_sampling_params=SamplingParams,
            min_temperature=0.0 if adapter is None else adapter.min_temperature,
            no_logprobs_reason="" if adapter is None else f"with --engine {adapter.name} {adapter.truncation_note}",
        )
        renderer = ChatRenderer(copy.deepcopy(lm.tokenizer), lm.stop_token_ids)  # the decode thread uses lm.tokenizer
        self.endpoint = Endpoint(self.queue, renderer, settings, lm.vocab_size, name, self.key)
        how = (serving.host, serving.port, serving.certificate, serving.private_key)
        self.server = ServerThread(self.endpoint, *how)
        scheme = "https" if serving.certificate else "http"
        host = f"[{serving.host}]" if ":" in serving.host else serving.host
        self.url = f"{scheme}://{host}:{self.server.port}/v1"

    def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Start the engine, if it is remote, and the HTTP server."""
        if not self.here:
            self.sampler.server_pool.on_status = say
            self.sampler.load({}, self.version)
        self.server.start()

    def run(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Serve requests. If the engine fails, fail the pending requests and restart the engine."""
        failures = 0
        while not self.queue.closed:
            before = self.endpoint.counts["requests"]
            try:
                if self.here:
                    serve_requests(self.sampler, self.queue, self.slots, self.context, self.context, self.room)
                else:
                    forward_requests(self.sampler, self.queue)
            except Exception as error:
                failures = failures + 1 if self.endpoint.counts["requests"] - before <= self.slots else 1
                self.queue.fail(f"the engine failed: {type(error).__name__}")
                say(f"the engine failed and restarts: {type(error).__name__}: {error}")
                if failures >= MAX_FAILURES:
                    raise RunError(f"the engine failed {failures} times in a row: {error}") from error

    def close(self) -> None:
        """Stop the server and the engine that it started."""
        try:
            self.queue.close()
            self.server.close()
        finally:
            if not self.here:
                self.sampler.close()


def with_engine(policy: Any, serving: ServeSettings) -> Any:
    """Return the policy with the requested engine; keep the address of the run's engine unless another one is set."""
    is_same = policy.engine == serving.engine and not {"engine_url", "engine_python"} & serving.engine_settings.keys()
    names = ("engine_url", "engine_python", "engine_args", "engine_key_env", "engine_key_file", "engine_transport")
    if not is_same or serving.engine == "local":
        fields = type(policy).__dataclass_fields__
        policy = replace(policy, engine="local", **{name: fields[name].default for name in names})
    return replace(policy, engine=serving.engine, **serving.engine_settings)


@contextmanager
def running_service(
    loaded: LoadedPolicy, serving: ServeSettings, name: str = "policy", say: Callable[[str], None] = lambda _: None
) -> Iterator[PolicyServer]:
    server = PolicyServer(loaded, serving, name)
    try:
        server.start(say)
        yield server
    finally:
        server.close()


def cpu_cache_tokens(lm: Any, gib: float, context: int) -> int:
    """Return the number of tokens whose KV cache fits into `gib`; 0 on a GPU, where the engine measures it."""
    if lm.device.type != "cpu":
        return 0
    shape, size = lm.config.get_text_config(), next(lm.model.parameters()).element_size()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    tokens = int(gib * 2**30 / (2 * shape.num_hidden_layers * heads * head_dim * size))
    if tokens < 3 * context:
        raise ConfigError(
            f"--cache {gib:g} holds {tokens} tokens of this model, but a context of {context} needs {3 * context}: "
            "raise it, or lower --max-context"
        )
    return tokens


def serve_policy(loaded: LoadedPolicy, serving: ServeSettings, name: str, key_shown: bool) -> None:
    """Serve until Ctrl-C."""

    def say(message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    with running_service(loaded, serving, name, say) as server:
        by = "" if server.here else f" by {serving.engine}"
        sizes = f"{server.sampler.rows} requests at once, {server.context} tokens each"
        print(f"{name} is served{by} at {server.url}: {sizes}.")
        print(f"key: {server.key}" if key_shown else "The key is that of --key-file.")
        print(f"export OPENAI_BASE_URL={server.url}" + (f" OPENAI_API_KEY={server.key}" if key_shown else ""))
        print("Press Ctrl-C to stop.", flush=True)
        server.run(say)
