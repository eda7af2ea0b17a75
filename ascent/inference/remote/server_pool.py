"""The servers of a run: load balancing, weight updates with a probe after each, and recovery of lost servers."""

import asyncio
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from ascent.core.errors import RunError
from ascent.inference.remote.adapters import get_adapter
from ascent.inference.remote.engine_adapter import EngineAdapter, EngineRequest, EngineResponse, ServerConfig
from ascent.inference.remote.nccl_transfer import NcclVLLM
from ascent.inference.remote.relay_client import RelayAdapter, read_key
from ascent.inference.remote.server_client import EventLoopThread, OnProgress, ServerClient, ServerLostError
from ascent.inference.remote.server_process import ServerProcess
from ascent.inference.remote.weight_files import WeightManifest, checkpoint_tensors, prepare_weights
from ascent.inference.remote.weight_probe import WeightProbe
from ascent.models.causal_lm import CausalLM, LanguageModel

EARLY_START_FRACTION = 0.25
"""How long before a load a response is started that has to continue after it, as a fraction of a probe's duration."""
READMIT_TIMEOUT = 2.0
"""Seconds that a health check of a server that is down may take."""
MAX_CONSECUTIVE_FAILURES = 3
"""How often a server may be lost without a response in between, before the run stops."""


@dataclass(eq=False)
class Server:
    """One server and its requests in flight."""

    client: ServerClient
    process: ServerProcess | None = None
    """None: Ascent has not started it."""
    in_flight: "set[Future[EngineResponse]]" = field(default_factory=set)
    failures: int = 0
    """How often it was lost since its last response."""
    incarnation: int = 0
    """Incremented at each load and each loss. Requests to an earlier incarnation that failed are sent again."""
    checked: bool = False
    """Has it passed `check_server` since it was started or recovered?"""
    probe_responses: list[EngineResponse] = field(default_factory=list)
    """Its responses to the latest probe."""
    probe_seconds: float = 0.0
    """The duration of the latest probe."""
    continued_response: EngineResponse | None = None
    """The response that was started just before the latest load, if there was one."""
    is_down: bool = False
    """Is it unused until the next load, because other servers are available?"""

    def log_tail(self) -> str:
        return "" if self.process is None else f". {self.process.log_tail()}"


class ServerPool:
    """One server that Ascent starts, or servers that run already."""

    def __init__(self, policy: CausalLM, lm: LanguageModel, max_num_seqs: int, max_model_len: int, temperature: float):
        self.lm, self.max_num_seqs, self.deadline = lm, max_num_seqs, policy.engine_deadline
        self.probe, self.version, self._served_version = WeightProbe(lm, temperature), -1, -1
        self.event_loop, self._pool_id = EventLoopThread(), uuid.uuid4().hex
        self._policy = policy
        self._adapter: EngineAdapter = get_adapter(policy.engine)
        if policy.engine_transport == "nccl":
            self._adapter = NcclVLLM(lm.device, self.deadline)
        self.servers: list[Server] = []
        self.on_status: Callable[[str], None] = lambda _: None
        """Called with messages about servers that start or are recovered."""
        self._key = ""
        model_config = lm.model.config.to_dict() | {"architectures": [type(lm.model).__name__]}
        model_config["eos_token_id"] = sorted(lm.stop_token_ids)
        dtype = str(lm.model.dtype).removeprefix("torch.")
        length = max(max_model_len, self.probe.length)
        num_seqs = max_num_seqs + len(self.probe.prompts) + 1  # a probe runs beside all other responses
        self._config = ServerConfig(model_config, dtype, length, num_seqs, lm.device.type == "cpu")

    def start(self, folder: Path) -> None:
        """Create the servers. A server that Ascent starts writes its log and its model config to `folder`."""
        policy = self._policy
        if policy.engine_key_env or policy.engine_key_file:
            self._key = read_key(policy.engine_key_env, policy.engine_key_file, "--engine.")
            self._adapter = RelayAdapter(self._adapter)
        if policy.engine_url:
            self.servers = [Server(self._client(url)) for url in policy.engine_url]
            return
        process = ServerProcess(policy.engine_python, self._adapter, self._config, policy.engine_args, folder)
        self.servers = [Server(self._client(process.url), process)]

    def _client(self, url: str) -> ServerClient:
        return ServerClient(url, self._adapter, self.max_num_seqs, self.deadline, self._key)

    # ---- requests

    def submit(
        self, step: int, prompt_index: int, request: EngineRequest, on_progress: OnProgress | None = None
    ) -> "tuple[Server, Future[EngineResponse]]":
        """Send a request. All samples of a prompt go to one server, whose prefix cache then holds the prompt.

        The deadline starts when the request is sent. `on_progress` is called on the event-loop thread.
        """
        available = [server for server in self.servers if not server.is_down]
        server = available[prompt_index % len(available)]
        client = server.client

        async def generate() -> EngineResponse:
            async with client.slots(step):
                return await client.generate(request, self._cache_salt, on_progress)

        future = self.event_loop.submit(generate())
        server.in_flight.add(future)
        return server, future

    @property
    def _cache_salt(self) -> str:
        """Makes the prefix cache of other versions unreachable, even if the server has kept it."""
        return f"{self._pool_id}-{self._served_version}"

    # ---- weights

    def load_weights(self, version: int) -> None:
        """Send the model's weights to all servers that answer, and probe each of them."""
        self.version = version
        down = [server for server in self.servers if server.is_down]
        for server, is_healthy in zip(down, self._are_healthy(down), strict=True):
            server.is_down = not is_healthy
        for server in self.servers:
            if server.process is not None and not server.process.is_running:
                self._start_process(server)
        self._send_weights([server for server in self.servers if not server.is_down])

    def _are_healthy(self, servers: list[Server], *timeout: float) -> list[bool]:
        return self.event_loop.run_all([server.client.is_healthy(*timeout) for server in servers])

    def _send_weights(self, servers: list[Server]) -> None:
        """Load the weights of this version on these servers and probe them. Servers lost meanwhile are recovered."""
        with prepare_weights(checkpoint_tensors(self.lm), self._adapter.uses_weight_file) as weights:
            remaining = servers
            while remaining:
                failures = self.event_loop.run_all([self._load_and_probe(server, weights) for server in remaining])
                lost = [(server, why) for server, why in zip(remaining, failures, strict=True) if why]
                remaining = [server for server, why in lost if self._bring_back(server, why)]
        self._served_version = self.version
        for server in servers:
            server.incarnation += 1
            if not server.is_down:
                self.probe.check(server.probe_responses, server.client.url, self.version)
                if server.continued_response is not None:
                    self.probe.check_continued(server.continued_response, server.client.url, self.version)

    async def _load_and_probe(self, server: Server, weights: WeightManifest) -> str:
        """Load weights on a server and collect its probe responses. Return why it was lost, or an empty string."""
        client, requests, salt = server.client, self.probe.requests(), f"{self._pool_id}-{self.version}"
        continued: asyncio.Task[EngineResponse] | None = None
        try:
            if not server.checked:
                await client.check_server(self._config)
                server.checked = True
            elif server.in_flight and server.probe_seconds:  # check that responses in progress change to the new policy
                continued = asyncio.ensure_future(client.generate(requests[0], self._cache_salt))
                await asyncio.sleep(EARLY_START_FRACTION * server.probe_seconds)
            await client.load_weights(weights, self.version)
            begun = time.monotonic()
            server.probe_responses = await asyncio.gather(*(client.generate(request, salt) for request in requests))
            server.probe_seconds = time.monotonic() - begun
        except ServerLostError as error:
            return str(error)
        finally:
            server.continued_response = await self._finish(continued)
        return ""

    async def _finish(self, continued: "asyncio.Task[EngineResponse] | None") -> EngineResponse | None:
        """Return the response, or None if the server lost it before it got the new weights."""
        try:
            return None if continued is None else await continued
        except ServerLostError:
            return None

    def readmit_servers(self) -> None:
        """Send the present weights to servers that were down and answer again."""
        down = [server for server in self.servers if server.is_down]
        healthy = self._are_healthy(down, READMIT_TIMEOUT)
        readmitted = [server for server, is_healthy in zip(down, healthy, strict=True) if is_healthy]
        for server in readmitted:
            server.is_down = False
        if readmitted:
            self._send_weights(readmitted)

    # ---- lost servers

    def unresponsive_servers(self) -> list[Server]:
        """Return the servers that have requests in flight and fail a health check."""
        busy = [server for server in self.servers if server.in_flight]
        return [server for server, is_healthy in zip(busy, self._are_healthy(busy), strict=True) if not is_healthy]

    def recover(self, server: Server, why: str) -> None:
        """Bring a lost server back and send it the weights, or mark it as down if other servers are available."""
        if self._bring_back(server, why):
            self._send_weights([server])

    def _bring_back(self, server: Server, why: str) -> bool:
        """Restart our own server; mark another one as down, or wait until it answers. Return whether it is back."""
        server.incarnation, server.checked = server.incarnation + 1, False
        if server.process is None and any(not other.is_down for other in self.servers if other is not server):
            server.is_down = True
            return False
        self._count_failure(server, why)
        self.on_status(f"the engine is lost and is restarted: {why}")
        if server.process is not None:
            self._start_process(server)
            return True
        deadline = time.monotonic() + self.deadline
        while not self._are_healthy([server])[0]:
            if time.monotonic() > deadline:
                raise RunError(
                    f"the engine is gone: {why}. It has not come back within {self.deadline:g} seconds "
                    "(--engine.deadline). Start it again, and then: ascent resume RUN"
                )
            time.sleep(0.2)
        return True

    def _count_failure(self, server: Server, why: str) -> None:
        server.failures += 1
        if server.failures > MAX_CONSECUTIVE_FAILURES:
            raise RunError(
                f"the engine was lost {server.failures} times in a row. The last time: {why}{server.log_tail()}"
            )

    def _start_process(self, server: Server) -> None:
        """Start our own server; start it again if it is killed before it answers."""
        assert server.process is not None
        server.process.terminate()
        server.process.start()
        old, server.client = server.client, self._client(server.process.url)
        self.event_loop.run_all([old.close()])
        try:
            server.process.wait_until_ready(lambda: self._are_healthy([server])[0], self.on_status)
        except ServerLostError as error:
            self._count_failure(server, str(error))
            self._start_process(server)

    def close(self) -> None:
        if self.event_loop.loop.is_closed():
            return
        for server in self.servers:
            for future in list(server.in_flight):
                future.cancel()
            if server.process is not None:
                server.process.terminate()
        self.event_loop.run_all([server.client.close() for server in self.servers])
        self._adapter.close()
        self.servers = []
        self.event_loop.close()
