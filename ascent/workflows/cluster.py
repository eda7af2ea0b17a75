"""Learners and samplers on the machines of a Ray cluster. Ray is imported when it is used.

Each learner is an actor that starts one rank, as torchrun would; ranks find each other by torch.distributed. Each
sampler is an actor with a copy of the policy, which rank 0 calls over Ray. Weights go through Ray's object store.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ascent.core.types import Refused, Streams
from ascent.engines.backends import backend_of
from ascent.engines.cluster.crew import CLUSTER, ray_here
from ascent.engines.cluster.sampler import Replica
from ascent.settings import config_from

PREFIX = "ascent-"
POLL = 0.2
"""Seconds between two looks at what the learners say."""
PLACED = 120.0
"""Seconds that the cluster may take to find room."""
RESTARTS = 100
"""Times that a sampler may be started again."""


def connect(address: str | None, actors: int = 0) -> bool:
    """Join the Ray cluster there, or start one on this machine; True: it was started."""
    if token_here():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # before Ray is imported
    ray = ray_here()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    if address is None and not actors:
        address = "auto"
    try:
        if address not in (None, "auto"):
            _answers(str(address))
        if address is not None:
            ray.init(address=address, **quiet)
            return False
        ray.init(num_cpus=max(os.cpu_count() or 1, actors), include_dashboard=False, **quiet)
        return True
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise Refused(
            f"--address {address}: no Ray cluster answers there ({str(error).splitlines()[0]}). If it asks for a "
            "token: `ray get-auth-token` prints it where it was started, and ~/.ray/auth_token holds it here"
        ) from None


def _answers(address: str) -> None:
    """Raise if nobody listens there: Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()


def token_here() -> bool:
    """Has this user a token for Ray clusters? Ray itself looks for one only if no address is given."""
    named = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    return any(os.environ.get(name) for name in named) or (Path.home() / ".ray" / "auth_token").exists()


# ---- actors


class LearnerProcess:
    """One rank, as a process of its own: signals and the main thread are as torchrun would leave them."""

    def __init__(self, rank: int, size: int, run: str):
        self.rank, self.size, self.run = rank, size, run
        self.process: subprocess.Popen[bytes] | None = None
        self.said: list[tuple[str, bytes]] = []
        self.readers: list[threading.Thread] = []

    def place(self) -> tuple[str, int]:
        """Where ranks can meet: this machine, and a free port of it."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray_here().util.get_node_ip_address(), free.getsockname()[1]

    def start(self, args: Sequence[str], host: str, port: int, address: str, folder: str) -> int:
        own = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_ADDR": host}
        own |= {"MASTER_PORT": port, "TORCHELASTIC_RUN_ID": self.run, CLUSTER: f"{address} {self.run}"}
        env = os.environ | {name: str(value) for name, value in own.items()}
        command = [sys.executable, "-m", "ascent", *args]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=env, cwd=folder, preexec_fn=_before_rank, **pipes)
        for name in ("stdout", "stderr"):
            pipe = getattr(self.process, name)
            self.readers.append(threading.Thread(target=self._listen, args=(name, pipe), daemon=True))
            self.readers[-1].start()
        return self.process.pid

    def _listen(self, name: str, pipe: Any) -> None:
        while data := pipe.read1():
            self.said.append((name, data))

    def poll(self) -> tuple[list[tuple[str, bytes]], int | None]:
        """What it has said since the last call, and its exit status once it has ended."""
        status = self.process.poll() if self.process else None
        for reader in self.readers if status is not None else ():
            reader.join(5)  # its last words
        count = len(self.said)
        words, self.said = self.said[:count], self.said[count:]
        return words, status

    def interrupt(self, number: int) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)

    def about(self) -> dict[str, Any]:
        return {"pid": self.process.pid if self.process else None}


def _before_rank() -> None:
    """A rank hears of Ctrl-C, which Ray blocks in its workers; and it does not outlive its actor."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def sampler_from(settings: dict[str, Any]) -> Any:
    """The sampler of a replica: its own copy of the model, whose trained parameters come with the first load."""
    import torch

    config = config_from(settings)
    torch.set_num_threads(config.threads or 1)
    backend = backend_of(config)
    model, _ = backend.model(config, Streams(config.seed), None)
    return backend.sampler(config, model, torch.Generator())


class SamplerActor(Replica):
    def __init__(self) -> None:
        super().__init__(sampler_from)


# ---- the launcher


def launch_cluster(
    args: Sequence[str],
    learners: int,
    samplers: int,
    gpus: bool,
    address: str | None,
    say: Callable[[str, bytes], None],
) -> int:
    """Place actors, run the command on every learner, and return the exit status of rank 0."""
    started = connect(address, learners + samplers)
    ray = ray_here()
    run = f"{PREFIX}{uuid.uuid4().hex[:8]}"
    each: dict[str, Any] = {"CPU": 1, "GPU": 1} if gpus else {"CPU": 1}
    group = ray.util.placement_group([each] * (learners + samplers), strategy="PACK")
    try:
        if not group.wait(PLACED):
            raise Refused(
                f"--learners {learners} --samplers {samplers}: the cluster has no room for {learners + samplers} "
                f"actors with {' and '.join(f'1 {name}' for name in each)} each; it has {_resources(ray)}"
            )
        place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy

        def actor(cls: type, index: int, name: str, restarts: int, *own: Any) -> Any:
            how = {"num_cpus": 1, "num_gpus": int(gpus), "name": name, "namespace": run, "max_restarts": restarts}
            where = place(group, placement_group_bundle_index=index)
            return ray.remote(cls).options(**how, scheduling_strategy=where).remote(*own)

        drawing = [actor(SamplerActor, learners + i, f"sampler-{i}", RESTARTS) for i in range(samplers)]
        ranks = [actor(LearnerProcess, i, f"learner-{i}", 0, i, learners, run) for i in range(learners)]
        host, port = ray.get(ranks[0].place.remote())
        where = ray.get_runtime_context().gcs_address
        ray.get([rank.start.remote(list(args), host, port, where, os.getcwd()) for rank in ranks])
        status = _follow(ray, ranks, say)
        del drawing
        return status
    finally:
        ray.util.remove_placement_group(group)
        ray.shutdown()
        if started:
            os.environ.pop("RAY_ADDRESS", None)


def _follow(ray: Any, ranks: list[Any], say: Callable[[str, bytes], None]) -> int:
    """Pass on what the ranks say until all have ended. Ctrl-C and SIGTERM go to rank 0, which saves and ends."""
    statuses: dict[int, int] = {}
    asked: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM)
    kept = {number: signal.signal(number, lambda got, _: asked.append(got)) for number in ends}
    try:
        while len(statuses) < len(ranks):
            while asked:
                ray.get(ranks[0].interrupt.remote(asked.pop()))
            for number in [n for n in range(len(ranks)) if n not in statuses]:
                try:
                    words, status = ray.get(ranks[number].poll.remote())
                except ray.exceptions.RayActorError:
                    words, status = [], 1
                for stream, data in words:
                    say(stream, data)
                if status is not None:
                    statuses[number] = status if status >= 0 else 128 - status
            time.sleep(POLL)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return statuses[0] or max(statuses.values())


def _resources(ray: Any) -> str:
    there = ray.available_resources()
    return f"{there.get('CPU', 0):g} CPU and {there.get('GPU', 0):g} GPU"


def cluster_status(address: str | None) -> list[dict[str, Any]]:
    """Of every cluster run there, who does what."""
    connect(address)
    ray = ray_here()
    try:
        named = [a for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"].startswith(PREFIX)]
        found = []
        for one in sorted(named, key=lambda a: (a["namespace"], a["name"])):
            line: dict[str, Any] = {"run": one["namespace"], "name": one["name"]}
            try:
                call = ray.get_actor(one["name"], namespace=one["namespace"]).about.remote()
                found.append(line | ray.get(call, timeout=5) | {"state": "ready"})
            except ray.exceptions.GetTimeoutError:
                found.append(line | {"state": "busy"})
            except (ray.exceptions.RayActorError, ValueError):
                found.append(line | {"state": "restarting"})
        return found
    finally:
        ray.shutdown()
