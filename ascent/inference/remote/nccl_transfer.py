"""vLLM with weights by a broadcast from GPU to GPU, and not through a file: `--engine.transport nccl`.

All tensors are gathered first, so that nothing but the broadcast happens while the servers wait in it. It runs on a
thread of its own; the HTTP request that has the servers take part holds the deadline. A group whose broadcast failed is
of no use any more: the next load makes another.

On a CPU the same is done over gloo, which is how the tests run it. Over NCCL it is untested: no machine of ours has two
GPUs.
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ascent.distributed.process_group import make_process_group
from ascent.inference.remote.engine_adapter import ServerConfig, ServerConnection
from ascent.inference.remote.server_client import ServerLostError
from ascent.inference.remote.vllm import VLLM
from ascent.inference.remote.weight_files import WeightManifest

LOOPBACK = "127.0.0.1"
PATIENCE = 4
"""NCCL ends its whole process when its own time is over. So that is this many times the deadline, which comes first."""


class WeightGroup:
    """A process group of this process, rank 0, and the workers of one server. They meet at a store on loopback."""

    def __init__(self, size: int, device: torch.device, seconds: float):
        self.size, self.device = size, device
        self.wait = timedelta(seconds=seconds * (PATIENCE if self.backend == "nccl" else 1))
        listening = socket.create_server((LOOPBACK, 0))
        self.port = listening.getsockname()[1]
        self.store = dist.TCPStore(
            LOOPBACK, self.port, size, True, self.wait, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self._group: Any = None

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def join(self) -> None:
        """Meet the workers. It takes as long as they do."""
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
        self._group = make_process_group(self.store, 0, self.size, self.backend, self.wait, LOOPBACK)

    def send(self, tensors: dict[str, Tensor]) -> None:
        """Broadcast all of them, in order."""
        options, group = (
            dist.BroadcastOptions(),
            self._group,
        )  # held: to take one apart at work stops all
        options.rootRank, options.rootTensor = 0, 0
        for tensor in tensors.values():
            group.broadcast([tensor], options).wait()
        if self.backend == "nccl":
            torch.cuda.synchronize(self.device)

    def end(self) -> None:
        """Whoever still waits in it, on either side, gets an error. That may take a while, and nobody waits for it."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.abort, name="ascent-weights-end", daemon=True).start()


class NcclVLLM(VLLM):
    """The life cycle of weights is vLLM's, as with a file; a group per server stays from load to load."""

    by_file, transfer = False, "collective"

    def __init__(self, device: torch.device, seconds: float):
        self.device, self.seconds = device, seconds
        self._groups: dict[str, WeightGroup] = {}
        self._one_at_a_time = asyncio.Lock()
        """Two broadcasts at once on one GPU may wait for one another."""

    async def greet(self, server: ServerConnection, serving: ServerConfig) -> None:
        self._end(server)
        await super().greet(server, serving)

    async def load(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        async with self._one_at_a_time:
            try:
                await super().load(server, weights, version)
            except BaseException:
                self._end(server)
                raise

    async def begin(self, server: ServerConnection) -> None:
        if server.url in self._groups:
            return
        workers = int((await server.ask("/get_world_size"))["world_size"])
        group = WeightGroup(1 + workers, self.device, self.seconds)
        self._groups[server.url] = group
        about: dict[str, Any] = {"port": group.port, "size": group.size, "backend": group.backend}
        about["seconds"] = group.wait.total_seconds()
        await both(server.ask("/init_weight_transfer_engine", {"init_info": about}), group.join)

    async def update(self, server: ServerConnection, weights: WeightManifest) -> None:
        group, held = self._groups[server.url], weights.held or {}
        about: dict[str, Any] = {"names": list(held), "shapes": [list(tensor.shape) for tensor in held.values()]}
        about["dtypes"] = [str(tensor.dtype).removeprefix("torch.") for tensor in held.values()]
        await both(server.ask("/update_weights", {"update_info": about}), lambda: group.send(held))

    def _end(self, server: ServerConnection) -> None:
        group = self._groups.pop(server.url, None)
        if group is not None:
            group.end()

    def close(self) -> None:
        for group in self._groups.values():
            group.end()
        self._groups = {}


async def both(request: Awaitable[Any], work: Callable[[], None]) -> None:
    """A request, which has a deadline, and the part of this process in what it asks for. What fails first is raised.

    The thread is not waited for then: it may be waiting for workers that never come.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        why: Exception | None = None
        try:
            work()
        except Exception as error:
            why = ServerLostError(f"the broadcast of weights has failed: {type(error).__name__} {error}")
        with suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(_settle, done, why)

    threading.Thread(target=run, name="ascent-weights", daemon=True).start()
    asked = asyncio.ensure_future(request)
    try:
        await asyncio.wait({asked, done}, return_when=asyncio.FIRST_EXCEPTION)
        for one in (asked, done):
            if one.done():
                one.result()
    finally:
        asked.cancel(), done.cancel()


def _settle(future: "asyncio.Future[None]", why: Exception | None) -> None:
    if future.done():
        return
    if why is None:
        future.set_result(None)
    else:
        future.set_exception(why)
