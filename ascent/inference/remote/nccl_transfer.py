"""Weight transfer to vLLM by a broadcast between GPUs rather than through a file: `--engine.transport nccl`.

All tensors are gathered before the broadcast starts, so that the servers wait as briefly as possible. The broadcast
runs on a separate thread, and the HTTP request that has the servers take part enforces the deadline. A process group
whose broadcast failed is discarded, and the next load creates another one.

On a CPU the broadcast uses gloo, which the tests exercise. NCCL is untested, because it needs two GPUs.
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
NCCL_TIMEOUT_FACTOR = 4
"""NCCL terminates its process after its timeout. This multiple of the deadline lets the deadline come first."""


class WeightGroup:
    """A process group of this process (rank 0) and the workers of one server, which meet at a TCP store on loopback."""

    def __init__(self, world_size: int, device: torch.device, seconds: float):
        self.world_size, self.device = world_size, device
        self.timeout = timedelta(seconds=seconds * (NCCL_TIMEOUT_FACTOR if self.backend == "nccl" else 1))
        listening = socket.create_server((LOOPBACK, 0))
        self.port = listening.getsockname()[1]
        self.store = dist.TCPStore(
            *(LOOPBACK, self.port, world_size, True, self.timeout),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        self._group: Any = None

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    def join(self) -> None:
        """Create the process group. It blocks until all workers have joined."""
        if self.backend == "nccl":
            torch.cuda.set_device(self.device)
        self._group = make_process_group(self.store, 0, self.world_size, self.backend, self.timeout, LOOPBACK)

    def broadcast(self, tensors: dict[str, Tensor]) -> None:
        """Broadcast all tensors, in order."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group = self._group  # a local reference: destroying a group during a broadcast would block
        for tensor in tensors.values():
            group.broadcast([tensor], options).wait()
        if self.backend == "nccl":
            torch.cuda.synchronize(self.device)

    def abort(self) -> None:
        """Abort pending operations on both sides. This may take a while, so it runs on a separate thread."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.abort, name="ascent-weights-abort", daemon=True).start()


class NcclVLLM(VLLM):
    """vLLM with weights by broadcast. Each server has a process group, which is kept from load to load."""

    uses_weight_file, transfer = False, "collective"

    def __init__(self, device: torch.device, seconds: float):
        self.device, self.seconds = device, seconds
        self._groups: dict[str, WeightGroup] = {}
        self._lock = asyncio.Lock()
        """Two concurrent broadcasts on one GPU may deadlock."""

    async def check_server(self, server: ServerConnection, config: ServerConfig) -> None:
        self._abort(server)
        await super().check_server(server, config)

    async def load_weights(self, server: ServerConnection, weights: WeightManifest, version: int) -> None:
        async with self._lock:
            try:
                await super().load_weights(server, weights, version)
            except BaseException:
                self._abort(server)
                raise

    async def init_transfer(self, server: ServerConnection) -> None:
        if server.url in self._groups:
            return
        num_workers = int((await server.call("/get_world_size"))["world_size"])
        group = WeightGroup(1 + num_workers, self.device, self.seconds)
        self._groups[server.url] = group
        init_info: dict[str, Any] = {"port": group.port, "size": group.world_size, "backend": group.backend}
        init_info["seconds"] = group.timeout.total_seconds()
        await run_together(server.call("/init_weight_transfer_engine", {"init_info": init_info}), group.join)

    async def transfer_weights(self, server: ServerConnection, weights: WeightManifest) -> None:
        group, tensors = self._groups[server.url], weights.tensors or {}
        info: dict[str, Any] = {"names": list(tensors), "shapes": [list(tensor.shape) for tensor in tensors.values()]}
        info["dtypes"] = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
        await run_together(server.call("/update_weights", {"update_info": info}), lambda: group.broadcast(tensors))

    def _abort(self, server: ServerConnection) -> None:
        group = self._groups.pop(server.url, None)
        if group is not None:
            group.abort()

    def close(self) -> None:
        for group in self._groups.values():
            group.abort()
        self._groups = {}


async def run_together(request: Awaitable[Any], work: Callable[[], None]) -> None:
    """Await a request with a deadline while a thread runs this process's part of it. Raise the first error.

    After an error the thread is abandoned: it may be waiting for workers that never join.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        failure: Exception | None = None
        try:
            work()
        except Exception as error:
            failure = ServerLostError(f"the broadcast of weights has failed: {type(error).__name__} {error}")
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(_settle, done, failure)

    threading.Thread(target=run, name="ascent-weights", daemon=True).start()
    pending_request = asyncio.ensure_future(request)
    try:
        await asyncio.wait({pending_request, done}, return_when=asyncio.FIRST_EXCEPTION)
        for future in (pending_request, done):
            if future.done():
                future.result()
    finally:
        pending_request.cancel(), done.cancel()


def _settle(future: "asyncio.Future[None]", failure: Exception | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)
