"""Weights from rank 0 to a replica by torch.distributed: NCCL from GPU to GPU, gloo elsewhere.

Each load is a process group of two, rank 0 and the replica, which meet at a store of rank 0. It lives for one load. So
whoever dies, hangs or comes late takes nobody else along, there is no group to be mended, and no buffers of NCCL stay
on the GPU. Rank 0 sends every replica its own copy, on a thread for each.

A replica that lives and is not reached twice in a row gets its weights through Ray's object store from then on.
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

PIECE = 2**24
"""Numbers that are sent at once, if a parameter does not have more."""
JOIN = 30.0
"""Seconds that the two have to meet, once the replica has its model."""
POLL = 0.01
"""Seconds between two looks whether the replica is ready."""
TRIES = 2
"""How often in a row a replica that lives may not be reached before it gets its weights in another way."""


class WeightBucket(NamedTuple):
    """Parameters of one type, one after the other in a flat tensor."""

    dtype: torch.dtype
    parts: tuple[tuple[str, torch.Size], ...]
    """Names and shapes."""

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters, as views."""
        each = flat.split([shape.numel() for _, shape in self.parts])
        return {name: part.view(shape) for (name, shape), part in zip(self.parts, each, strict=True)}

    @property
    def numbers(self) -> int:
        return sum(shape.numel() for _, shape in self.parts)


class WeightSnapshot:
    """The trained parameters of one version in the host's memory, whatever the learner does with its own."""

    def __init__(self, params: dict[str, Tensor]):
        self.pieces: list[WeightBucket] = []
        self.flat: list[Tensor] = []
        self.stored: Any = None
        """A reference to these parameters in the object store, if anybody needed it."""
        kinds: dict[torch.dtype, list[str]] = defaultdict(list)
        for name, tensor in params.items():
            kinds[tensor.dtype].append(name)
        for dtype, names in kinds.items():
            for chosen in _pieces(names, params):
                self.pieces.append(WeightBucket(dtype, tuple((name, params[name].shape) for name in chosen)))
                self.flat.append(torch.cat([params[name].detach().reshape(-1) for name in chosen]).cpu())

    def params(self) -> dict[str, Tensor]:
        each = zip(self.pieces, self.flat, strict=True)
        return {name: tensor for piece, flat in each for name, tensor in piece.split(flat).items()}


def _pieces(names: list[str], params: dict[str, Tensor]) -> Iterator[list[str]]:
    chosen, numbers = list[str](), 0
    for name in names:
        if chosen and numbers + params[name].numel() > PIECE:
            yield chosen
            chosen, numbers = [], 0
        chosen.append(name)
        numbers += params[name].numel()
    yield chosen


class TransferOffer(NamedTuple):
    """Where a replica gets its weights."""

    host: str
    port: int
    key: str
    """Of the two who meet: no other load has it."""
    gpu: str
    """Rank 0's, if it has one: NCCL needs another."""
    seconds: float
    """That the transfer of a piece may take."""
    pieces: list[WeightBucket]


class WeightSender:
    """Rank 0's side. `host`: the address of this machine that replicas reach."""

    def __init__(self, host: str, device: torch.device, deadline: float):
        self.host, self.device, self.deadline = host, device, deadline
        listening = socket.create_server((host, 0))
        self.port, self.run, self.count = listening.getsockname()[1], uuid.uuid4().hex, 0
        wait = timedelta(seconds=JOIN)
        self.store: Any = dist.TCPStore(
            host, self.port, None, True, wait, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.missed: dict[str, int] = defaultdict(int)
        """How often in a row a replica was not reached."""

    def offer(self, weights: WeightSnapshot) -> TransferOffer:
        self.count += 1
        key = f"{self.run}/{self.count}"
        return TransferOffer(self.host, self.port, key, gpu_name(self.device), self.deadline, weights.pieces)

    def begin(self, offer: TransferOffer, weights: WeightSnapshot, call: Future[Any]) -> threading.Thread:
        """Send them as soon as the replica is there. `call`: what the replica does meanwhile."""
        thread = threading.Thread(target=self._send, args=(offer, weights, call), name="ascent-weights", daemon=True)
        thread.start()
        return thread

    def _send(self, offer: TransferOffer, weights: WeightSnapshot, call: Future[Any]) -> None:
        try:
            store = dist.PrefixStore(offer.key, self.store.clone())  # a wait of one thread would hold up all others
            while not store.check(["ready"]):
                if call.done():
                    return
                time.sleep(POLL)
            backend = store.get("ready").decode()
            if backend == "nccl":
                torch.cuda.set_device(self.device)
            group = make_process_group(store, 0, 2, backend, _patience(backend, self.deadline), self.host)
            for flat in weights.flat:
                own = flat.to(self.device) if backend == "nccl" else flat
                group.send([own.view(torch.uint8)], 1, 0).wait(timedelta(seconds=self.deadline))
        except (RuntimeError, ValueError):  # the replica is gone; or it says why it was not reached
            pass

    def reaches(self, name: str) -> bool:
        """Is this replica to get its weights by a process group?"""
        return self.missed[name] < TRIES

    def heed(self, name: str, error: BaseException | None) -> None:
        """How a load has ended."""
        if not isinstance(error, ReplicaUnreachableError):
            self.missed[name] = 0 if error is None else self.missed[name]
            return
        self.missed[name] += 1
        if not self.reaches(name):
            say_stored(name, str(error))


def say_stored(name: str, why: str) -> None:
    sys.stderr.write(f"ascent: weights go to {name} through Ray's object store ({why})\n")


def receive_weights(offer: TransferOffer, device: torch.device, host: str) -> Iterator[dict[str, Tensor]]:
    """The replica's side: the parameters, piece by piece. `host`: the address of its machine."""
    other_gpu = device.type == "cuda" and offer.gpu not in ("", gpu_name(device))
    backend, seconds = "nccl" if other_gpu else "gloo", timedelta(seconds=offer.seconds)
    try:
        if other_gpu:
            torch.cuda.set_device(device)
        wait = timedelta(seconds=JOIN)
        store = dist.PrefixStore(offer.key, dist.TCPStore(offer.host, offer.port, None, False, wait))
        store.set("ready", backend)
        group = make_process_group(store, 1, 2, backend, _patience(backend, offer.seconds), host)
        for piece in offer.pieces:
            flat = torch.empty(piece.numbers, dtype=piece.dtype, device=device if other_gpu else "cpu")
            group.recv([flat.view(torch.uint8)], 0, 0).wait(seconds)
            yield piece.split(flat)
    except (RuntimeError, ValueError) as error:
        words = str(error).strip().partition("\n")[0]
        raise ReplicaUnreachableError(f"weights did not arrive by {backend}: {words}") from None


def _patience(backend: str, seconds: float) -> timedelta:
    """What a group is made with. NCCL's is for every transfer; gloo's for the meeting alone."""
    return timedelta(seconds=seconds if backend == "nccl" else JOIN)


def gpu_name(device: torch.device) -> str:
    """The same for two processes on one GPU, on whatever machine; nothing, if it is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
