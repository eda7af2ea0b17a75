"""Weight transfer from rank 0 to a replica over torch.distributed: NCCL between GPUs, gloo otherwise.

Each load uses a new process group of two, rank 0 and the replica, which meet at a store of rank 0. The group lives for
one load. So a replica that dies, hangs or is late affects no other one, no group has to be repaired, and no buffers of
NCCL stay on the GPU. Rank 0 sends every replica a separate copy, each on its own thread.

A replica that is alive but not reached twice in a row gets its weights through Ray's object store from then on.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ascent.distributed.process_group import make_process_group
from ascent.distributed.replica_errors import ReplicaUnreachableError

BUCKET_NUMEL = 2**24
"""Number of elements that are sent at once, if no parameter has more."""
JOIN_TIMEOUT = 30.0
"""Seconds that the two sides have to join the group, once the replica has its model."""
READY_POLL_INTERVAL = 0.01
"""Seconds between two checks whether the replica is ready."""
MAX_FAILED_TRANSFERS = 2
"""Failed transfers in a row after which a replica gets its weights through the object store."""


class WeightBucket(NamedTuple):
    """Parameters of one dtype, concatenated in a flat tensor."""

    dtype: torch.dtype
    shapes: tuple[tuple[str, torch.Size], ...]
    """Names and shapes of the parameters."""

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parameters as views of the flat tensor."""
        parts = flat.split([shape.numel() for _, shape in self.shapes])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes, parts, strict=True)}

    @property
    def numel(self) -> int:
        return sum(shape.numel() for _, shape in self.shapes)


class WeightSnapshot:
    """A copy of the trained parameters of one version in host memory."""

    def __init__(self, params: dict[str, Tensor]):
        self.buckets: list[WeightBucket] = []
        self.flat: list[Tensor] = []
        self.object_ref: Any = None
        """A reference to these parameters in Ray's object store, if a replica needed it."""
        by_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
        for name, tensor in params.items():
            by_dtype[tensor.dtype].append(name)
        for dtype, all_names in by_dtype.items():
            for names in _bucket_names(all_names, params):
                self.buckets.append(WeightBucket(dtype, tuple((name, params[name].shape) for name in names)))
                self.flat.append(torch.cat([params[name].detach().reshape(-1) for name in names]).cpu())

    def params(self) -> dict[str, Tensor]:
        pairs = zip(self.buckets, self.flat, strict=True)
        return {name: tensor for bucket, flat in pairs for name, tensor in bucket.split(flat).items()}


def _bucket_names(names: list[str], params: dict[str, Tensor]) -> Iterator[list[str]]:
    bucket, numel = list[str](), 0
    for name in names:
        if bucket and numel + params[name].numel() > BUCKET_NUMEL:
            yield bucket
            bucket, numel = [], 0
        bucket.append(name)
        numel += params[name].numel()
    yield bucket


class TransferOffer(NamedTuple):
    """Where a replica receives its weights."""

    host: str
    port: int
    key: str
    """A unique prefix in the store for this transfer."""
    gpu: str
    """The UUID of rank 0's GPU, if it has one: NCCL needs two different GPUs."""
    seconds: float
    """The deadline of each bucket."""
    buckets: list[WeightBucket]


class WeightSender:
    """The side of rank 0. `host`: the address of this machine that replicas reach."""

    def __init__(self, host: str, device: torch.device, deadline: float):
        self.host, self.device, self.deadline = host, device, deadline
        listening = socket.create_server((host, 0))
        self.port, self.run_id, self.num_transfers = listening.getsockname()[1], uuid.uuid4().hex, 0
        timeout = timedelta(seconds=JOIN_TIMEOUT)
        self.store: Any = dist.TCPStore(
            host, self.port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.failed_transfers: dict[str, int] = defaultdict(int)
        """Number of failed transfers to each replica since the last successful one."""

    def offer(self, weights: WeightSnapshot) -> TransferOffer:
        self.num_transfers += 1
        key = f"{self.run_id}/{self.num_transfers}"
        return TransferOffer(self.host, self.port, key, gpu_uuid(self.device), self.deadline, weights.buckets)

    def start(self, offer: TransferOffer, weights: WeightSnapshot, call: Future[Any]) -> threading.Thread:
        """Send the weights on a thread as soon as the replica is ready. `call`: the replica's `receive` call."""
        thread = threading.Thread(target=self._send, args=(offer, weights, call), name="ascent-weights", daemon=True)
        thread.start()
        return thread

    def _send(self, offer: TransferOffer, weights: WeightSnapshot, call: Future[Any]) -> None:
        try:
            store = dist.PrefixStore(offer.key, self.store.clone())  # a wait on a shared client would block all threads
            while not store.check(["ready"]):
                if call.done():
                    return
                time.sleep(READY_POLL_INTERVAL)
            backend = store.get("ready").decode()
            if backend == "nccl":
                torch.cuda.set_device(self.device)
            group = make_process_group(store, 0, 2, backend, _group_timeout(backend, self.deadline), self.host)
            for flat in weights.flat:
                data = flat.to(self.device) if backend == "nccl" else flat
                group.send([data.view(torch.uint8)], 1, 0).wait(timedelta(seconds=self.deadline))
        except (RuntimeError, ValueError):  # the result of the replica's call reports the failure
            pass

    def is_reachable(self, name: str) -> bool:
        """Return whether this replica gets its weights by a process group."""
        return self.failed_transfers[name] < MAX_FAILED_TRANSFERS

    def record_result(self, name: str, error: BaseException | None) -> None:
        """Record the outcome of a transfer."""
        if not isinstance(error, ReplicaUnreachableError):
            self.failed_transfers[name] = 0 if error is None else self.failed_transfers[name]
            return
        self.failed_transfers[name] += 1
        if not self.is_reachable(name):
            report_object_store(name, str(error))


def report_object_store(name: str, reason: str) -> None:
    sys.stderr.write(f"ascent: weights go to {name} through Ray's object store ({reason})\n")


def receive_weights(offer: TransferOffer, device: torch.device, host: str) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters on the side of the replica, bucket by bucket. `host`: the address of its machine."""
    uses_nccl = device.type == "cuda" and offer.gpu not in ("", gpu_uuid(device))
    backend, timeout = "nccl" if uses_nccl else "gloo", timedelta(seconds=offer.seconds)
    try:
        if uses_nccl:
            torch.cuda.set_device(device)
        join_timeout = timedelta(seconds=JOIN_TIMEOUT)
        store = dist.PrefixStore(offer.key, dist.TCPStore(offer.host, offer.port, None, False, join_timeout))
        store.set("ready", backend)
        group = make_process_group(store, 1, 2, backend, _group_timeout(backend, offer.seconds), host)
        for bucket in offer.buckets:
            flat = torch.empty(bucket.numel, dtype=bucket.dtype, device=device if uses_nccl else "cpu")
            group.recv([flat.view(torch.uint8)], 0, 0).wait(timeout)
            yield bucket.split(flat)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ReplicaUnreachableError(f"weights did not arrive by {backend}: {reason}") from None


def _group_timeout(backend: str, seconds: float) -> timedelta:
    """Return the timeout of a group: for NCCL that of every transfer, for gloo that of joining only."""
    return timedelta(seconds=seconds if backend == "nccl" else JOIN_TIMEOUT)


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, which is the same in all processes; an empty string for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
