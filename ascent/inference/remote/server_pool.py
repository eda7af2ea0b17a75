"""The servers of a run. They get each version's weights and a probe before any request; a lost one is brought back."""

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
from ascent.inference.remote.weight_files import WeightManifest, checkpoint_tensors, prepared
from ascent.inference.remote.weight_probe import WeightProbe
from ascent.models.causal_lm import CausalLM, LanguageModel

BEGUN = 0.25
"""Of a probe's time, what the response has that is begun just before a load: it shall be neither new nor over."""
QUICK = 2.0
"""Seconds in which a server that was left alone says that it lives."""
TRIES = 3
"""How often in a row a server may be lost, with no response in between, before the run stops."""


@dataclass(eq=False)
class Server:
    """One server, and what it owes."""

    client: ServerClient
    process: ServerProcess | None = None
    """None: somebody else has started it."""
    owed: "set[Future[EngineResponse]]" = field(default_factory=set)
    lost: int = 0
    """How often in a row it was lost."""
    life: int = 0
    """How often it got weights or was given up: what an earlier life owed and lost is asked for again."""
    known: bool = False
    """Was it asked what it is, since it was started or came back?"""
    probed: list[EngineResponse] = field(default_factory=list)
    """What it answered to the latest probe."""
    seconds: float = 0.0
    """How long that took."""
    continued: EngineResponse | None = None
    """The response that was begun just before the latest load, if any was."""
    down: bool = False
    """Is it left alone until the next load, because others serve?"""

    def words(self) -> str:
        return "" if self.process is None else f". {self.process.last_words()}"


class ServerPool:
    """One server that Ascent starts, or those that run already."""

    def __init__(self, policy: CausalLM, lm: LanguageModel, rows: int, length: int, temperature: float):
        self.lm, self.rows, self.deadline = lm, rows, policy.engine_deadline
        self.probe, self.version, self._served = WeightProbe(lm, temperature), -1, -1
        self.calls, self._run = EventLoopThread(), uuid.uuid4().hex
        self._policy = policy
        self._dialect: EngineAdapter = get_adapter(policy.engine)
        if policy.engine_transport == "nccl":
            self._dialect = NcclVLLM(lm.device, self.deadline)
        self.servers: list[Server] = []
        self.tell: Callable[[str], None] = lambda _: None
        """What becomes of them, for whoever waits."""
        self._key = ""
        described = lm.model.config.to_dict() | {"architectures": [type(lm.model).__name__]}
        described["eos_token_id"] = sorted(lm.ends)
        dtype = str(lm.model.dtype).removeprefix("torch.")
        rows += len(self.probe.prompts) + 1  # a probe finds room, however many responses are under way
        self._serving = ServerConfig(described, dtype, max(length, self.probe.length), rows, lm.device.type == "cpu")

    def start(self, folder: Path) -> None:
        """Know the servers; `folder` is for what belongs to one that Ascent starts, its log above all."""
        policy = self._policy
        if policy.engine_key_env or policy.engine_key_file:
            self._key = read_key(policy.engine_key_env, policy.engine_key_file, "--engine.")
            self._dialect = RelayAdapter(self._dialect)
        if policy.engine_url:
            self.servers = [Server(self._client(url)) for url in policy.engine_url]
            return
        process = ServerProcess(policy.engine_python, self._dialect, self._serving, policy.engine_args, folder)
        self.servers = [Server(self._client(process.url), process)]

    def _client(self, url: str) -> ServerClient:
        return ServerClient(url, self._dialect, self.rows, self.deadline, self._key)

    # ---- requests

    def ask(
        self, step: int, place: int, request: EngineRequest, hear: OnProgress | None = None
    ) -> "tuple[Server, Future[EngineResponse]]":
        """One response. All samples of a prompt, which share its place, go to the server that has encoded it.

        Its deadline begins when it is sent. `hear` is told how far it has come; the thread of the calls tells it.
        """
        up = [server for server in self.servers if not server.down]
        server = up[place % len(up)]
        client = server.client

        async def generate() -> EngineResponse:
            async with client.lanes(step):
                return await client.generate(request, self._salt, hear)

        future = self.calls.start(generate())
        server.owed.add(future)
        return server, future

    @property
    def _salt(self) -> str:
        """The prefix cache of another version is then out of reach, even if the server has kept it."""
        return f"{self._run}-{self._served}"

    # ---- weights

    def load(self, version: int) -> None:
        self.version = version
        left = [server for server in self.servers if server.down]
        alive = self.calls.together([server.client.alive() for server in left])
        for server, answers in zip(left, alive, strict=True):
            server.down = not answers
        for server in self.servers:
            if server.process is not None and not server.process.running:
                self._start(server)
        self._send([server for server in self.servers if not server.down])

    def _send(self, servers: list[Server]) -> None:
        """This version's weights to these servers, and a probe of each. One that is lost meanwhile is brought back."""
        with prepared(checkpoint_tensors(self.lm), self._dialect.by_file) as weights:
            left = servers
            while left:
                lost = zip(left, self.calls.together([self._equip(server, weights) for server in left]), strict=True)
                left = [server for server, why in lost if why and self._bring_back(server, why)]
        self._served = self.version
        for server in servers:
            server.life += 1
            if not server.down:
                self.probe.check(server.probed, server.client.url, self.version)
                if server.continued is not None:
                    self.probe.check_continued(server.continued, server.client.url, self.version)

    async def _equip(self, server: Server, weights: WeightManifest) -> str:
        """Weights for a server, and its answers to the probe, which end at no token; how it was lost, if it was."""
        client, requests, salt = server.client, self.probe.requests(), f"{self._run}-{self.version}"
        continued: asyncio.Task[EngineResponse] | None = None
        try:
            if not server.known:
                await client.greet(self._serving)
                server.known = True
            elif server.owed and server.seconds:  # responses are under way: one more is, which is looked at
                continued = asyncio.ensure_future(client.generate(requests[0], self._salt))
                await asyncio.sleep(BEGUN * server.seconds)
            await client.load(weights, self.version)
            begun = time.monotonic()
            server.probed = await asyncio.gather(*(client.generate(each, salt) for each in requests))
            server.seconds = time.monotonic() - begun
        except ServerLostError as error:
            return str(error)
        finally:
            server.continued = await self._rest(continued)
        return ""

    async def _rest(self, continued: "asyncio.Task[EngineResponse] | None") -> EngineResponse | None:
        """What came of it; nothing, if the server had lost it before it got these weights."""
        try:
            return None if continued is None else await continued
        except ServerLostError:
            return None

    def take_back(self) -> None:
        """Servers that were left alone and answer again get the present weights."""
        left = [server for server in self.servers if server.down]
        alive = self.calls.together([server.client.alive(QUICK) for server in left])
        back = [server for server, answers in zip(left, alive, strict=True) if answers]
        for server in back:
            server.down = False
        if back:
            self._send(back)

    # ---- servers that are lost

    def silent(self) -> list[Server]:
        """Servers that owe responses and do not say that they live."""
        busy = [server for server in self.servers if server.owed]
        alive = self.calls.together([server.client.alive() for server in busy])
        return [server for server, answers in zip(busy, alive, strict=True) if not answers]

    def recover(self, server: Server, why: str) -> None:
        """Bring a lost server back, with this version's weights and a probe; or leave it alone, if others serve."""
        if self._bring_back(server, why):
            self._send([server])

    def _bring_back(self, server: Server, why: str) -> bool:
        """Start it again if it is ours; else leave it to the others, or wait until it answers. True: it is back."""
        server.life, server.known = server.life + 1, False
        if server.process is None and any(not other.down for other in self.servers if other is not server):
            server.down = True
            return False
        self._count(server, why)
        self.tell(f"the engine is lost and is brought back: {why}")
        if server.process is not None:
            self._start(server)
            return True
        until = time.monotonic() + self.deadline
        while not self.calls.together([server.client.alive()])[0]:
            if time.monotonic() > until:
                raise RunError(
                    f"the engine is gone: {why}. It has not come back within {self.deadline:g} seconds "
                    "(--engine.deadline). Start it again, and then: ascent resume RUN"
                )
            time.sleep(0.2)
        return True

    def _count(self, server: Server, why: str) -> None:
        server.lost += 1
        if server.lost > TRIES:
            raise RunError(f"the engine was lost {server.lost} times in a row. The last time: {why}{server.words()}")

    def _start(self, server: Server) -> None:
        """Start our server, and once more where it is killed before it answers."""
        assert server.process is not None
        server.process.end()
        server.process.start()
        old, server.client = server.client, self._client(server.process.url)
        self.calls.together([old.close()])
        try:
            server.process.wait(lambda: self.calls.together([server.client.alive()])[0], self.tell)
        except ServerLostError as error:
            self._count(server, str(error))
            self._start(server)

    def close(self) -> None:
        if self.calls.loop.is_closed():
            return
        for server in self.servers:
            for future in list(server.owed):
                future.cancel()
            if server.process is not None:
                server.process.end()
        self.calls.together([server.client.close() for server in self.servers])
        self._dialect.close()
        self.servers = []
        self.calls.close()
