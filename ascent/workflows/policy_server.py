"""`ascent serve`: a policy that OpenAI's clients can ask, on this machine or another."""

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

CONTEXT = 4096
"""Tokens of a conversation where nobody says otherwise, and the model can read as many."""
RESTARTS = 3
"""Failures of the sampler in a row after which the server ends."""


@dataclass(frozen=True)
class ServeSettings:
    """How a policy is served."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str = ""
    """Of the server; empty: one is made."""
    certificate: str = ""
    private_key: str = ""
    rows: int = 0
    """Requests that are decoded at once; 0: as many as suit the device."""
    queue: int = 0
    """Requests that wait beside them before others are told to come back; 0: three times as many."""
    context: int = 0
    """Tokens of a conversation; 0: what the model reads, at most 4,096."""
    cache: float = 4.0
    """GiB of keys and values on a CPU."""
    engine: str = "local"
    """Who decodes: this process, or vllm or sglang."""
    engine_settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of `CausalLM` whose names begin with `engine_`: where the engine is, and how it is started."""


class Service:
    """A policy behind an endpoint. `start` it; then `run` decodes in the calling thread until `close`."""

    def __init__(self, loaded: LoadedPolicy, serving: ServeSettings, name: str):
        check_packages("ascent serve")
        from ascent.rollout.agents import ServerThread
        from ascent.server.endpoint import Endpoint
        from ascent.server.open_sessions import SessionSettings

        if not loaded.backend.words:
            loaded.backend.serving_engine(loaded.config, loaded.policy, serving.context, 0)  # which says why not
        lm = loaded.policy
        if not lm.tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: set one, so that messages can be written")
        reads = getattr(lm.config, "max_position_embeddings", None) or CONTEXT
        self.context, self.version = serving.context or min(reads, CONTEXT), loaded.step or 0
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
        renderer = ChatRenderer(copy.deepcopy(lm.tokenizer), lm.ends)  # the decode thread uses lm.tokenizer
        self.endpoint = Endpoint(self.queue, renderer, settings, lm.vocab, name, self.key)
        how = (serving.host, serving.port, serving.certificate, serving.private_key)
        self.server = ServerThread(self.endpoint, *how)
        scheme = "https" if serving.certificate else "http"
        host = f"[{serving.host}]" if ":" in serving.host else serving.host
        self.url = f"{scheme}://{host}:{self.server.port}/v1"

    def start(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Start the engine, if there is one, and then answer."""
        if not self.here:
            self.sampler.server_pool.on_status = say
            self.sampler.load({}, self.version)
        self.server.start()

    def run(self, say: Callable[[str], None] = lambda _: None) -> None:
        """Decode what is asked for. A failure is told to whoever waits, and the sampler begins anew."""
        failed = 0
        while not self.queue.closed:
            before = self.endpoint.counts["requests"]
            try:
                if self.here:
                    serve_requests(self.sampler, self.queue, self.slots, self.context, self.context, self.room)
                else:
                    forward_requests(self.sampler, self.queue)
            except Exception as error:
                failed = failed + 1 if self.endpoint.counts["requests"] - before <= self.slots else 1
                self.queue.fail(f"the sampler failed: {type(error).__name__}")
                say(f"the sampler failed and begins anew: {type(error).__name__}: {error}")
                if failed >= RESTARTS:
                    raise RunError(f"the sampler failed {failed} times in a row: {error}") from error

    def close(self) -> None:
        """The engine that was started here is ended, with all that it has started."""
        try:
            self.queue.close()
            self.server.close()
        finally:
            if not self.here:
                self.sampler.close()


def with_engine(policy: Any, serving: ServeSettings) -> Any:
    """The policy with the engine that is asked for. One that a run was sampled with keeps its place if none is said."""
    own = policy.engine == serving.engine and not {"engine_url", "engine_python"} & serving.engine_settings.keys()
    names = ("engine_url", "engine_python", "engine_args", "engine_key_env", "engine_key_file", "engine_transport")
    if not own or serving.engine == "local":
        fields = type(policy).__dataclass_fields__
        policy = replace(policy, engine="local", **{name: fields[name].default for name in names})
    return replace(policy, engine=serving.engine, **serving.engine_settings)


@contextmanager
def running_service(
    loaded: LoadedPolicy, serving: ServeSettings, name: str = "policy", say: Callable[[str], None] = lambda _: None
) -> Iterator[Service]:
    service = Service(loaded, serving, name)
    try:
        service.start(say)
        yield service
    finally:
        service.close()


def cpu_cache_tokens(lm: Any, gib: float, context: int) -> int:
    """Tokens whose keys and values fit into so much memory; 0: the decoder sees for itself what fits on its card."""
    if lm.device.type != "cpu":
        return 0
    shape, size = lm.config.get_text_config(), next(lm.model.parameters()).element_size()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    channel = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    tokens = int(gib * 2**30 / (2 * shape.num_hidden_layers * heads * channel * size))
    if tokens < 3 * context:
        raise ConfigError(
            f"--cache {gib:g} holds {tokens} tokens of this model, and {3 * context} are needed for a context of "
            f"{context}: raise it, or lower --max-context"
        )
    return tokens


def serve_policy(loaded: LoadedPolicy, serving: ServeSettings, name: str, key_shown: bool) -> None:
    """Serve until Ctrl-C."""

    def say(words: str) -> None:
        print(words, file=sys.stderr, flush=True)

    with running_service(loaded, serving, name, say) as service:
        by = "" if service.here else f" by {serving.engine}"
        sizes = f"{service.sampler.rows} requests at once, {service.context} tokens each"
        print(f"{name} is served{by} at {service.url}: {sizes}.")
        print(f"key: {service.key}" if key_shown else "The key is the one in your file.")
        print(f"export OPENAI_BASE_URL={service.url}" + (f" OPENAI_API_KEY={service.key}" if key_shown else ""))
        print("Ctrl-C ends it.", flush=True)
        service.run(say)
