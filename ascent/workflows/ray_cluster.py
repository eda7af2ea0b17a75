"""Run learners and samplers as actors of a Ray cluster. Ray is imported on use.

Each learner is an actor that starts one rank, like torchrun; ranks communicate by torch.distributed. Each sampler is an
actor with a copy of the policy, which rank 0 calls through Ray. Weights are sent by torch.distributed.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascent.build.backends import backend_of
from ascent.core.errors import ConfigError, RunError
from ascent.core.types import Streams
from ascent.distributed.ranks import CLUSTER_VARIABLE
from ascent.distributed.replica import Replica
from ascent.rollout.ray_replicas import import_ray, replica_names
from ascent.runs.trust import TRUSTED
from ascent.settings import config_from

PREFIX = "ascent-"
POLL = 0.2
"""Seconds between two polls of the learners."""
PLACED = 120.0
"""Timeout in seconds to place the actors."""
MORE = 64
"""Maximum number of samplers that can be added on a local cluster, where only GPUs are counted."""
RESTARTS = 100
"""Maximum number of restarts of a sampler."""
REFUSED = 2
"""Exit status of a command with invalid settings, which is not restarted."""


def connect(address: str | None, actors: int = 0) -> bool:
    """Connect to a Ray cluster, or start a local one; return True if one was started."""
    # Ray itself looks for a token only if no address is given.
    has_token = any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if has_token or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # before Ray is imported
    ray = import_ray()
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
        ray.init(address="local", num_cpus=actors + MORE, include_dashboard=False, **quiet)
        return True
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"--address {address}: no Ray cluster answers there ({str(error).splitlines()[0]}). If it asks for a "
            "token: `ray get-auth-token` prints it where it was started, and ~/.ray/auth_token holds it here"
        ) from None


def _answers(address: str) -> None:
    """Raise if nothing listens at the address; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()


# ---- actors


class LearnerProcess:
    """An actor that runs one rank in a separate process, with the signals and main thread of a torchrun rank."""

    def __init__(self, rank: int, size: int, run: str):
        self.rank, self.size, self.run = rank, size, run
        self.process: subprocess.Popen[bytes] | None = None
        self.said: list[tuple[str, bytes]] = []
        self.readers: list[threading.Thread] = []
        self.wanted = 0
        """Number of samplers requested since the launcher last polled."""

    def place(self) -> tuple[str, int]:
        """Return the address of this machine and a free port, for the ranks to meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            return import_ray().util.get_node_ip_address(), free.getsockname()[1]

    def start(self, args: Sequence[str], meet: tuple[str, int], address: str, folder: str, attempt: int) -> int:
        own = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_ADDR": meet[0]}
        own |= {"MASTER_PORT": meet[1], "TORCHELASTIC_RUN_ID": self.run, "TORCHELASTIC_RESTART_COUNT": attempt}
        env = (
            os.environ | {name: str(value) for name, value in own.items()} | {CLUSTER_VARIABLE: f"{address} {self.run}"}
        )
        command = [sys.executable, "-m", "ascent", *args]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=env, cwd=folder, preexec_fn=_before_rank, **pipes)
        streams = [(name, getattr(self.process, name)) for name in ("stdout", "stderr")]
        self.readers = [threading.Thread(target=self._listen, args=stream, daemon=True) for stream in streams]
        for reader in self.readers:
            reader.start()
        return self.process.pid

    def _listen(self, name: str, pipe: Any) -> None:
        while data := pipe.read1():
            self.said.append((name, data))

    def poll(self) -> tuple[list[tuple[str, bytes]], int | None, int]:
        """Return the output since the last call, the exit status if the rank has ended, and requested samplers.

        An actor that replaces a lost one has no rank, which counts as ended.
        """
        status = self.process.poll() if self.process else 1
        for reader in self.readers if status is not None else ():
            reader.join(5)  # read its last output
        count, wanted = len(self.said), self.wanted
        words, self.said, self.wanted = self.said[:count], self.said[count:], 0
        return words, status, wanted

    def want(self, samplers: int) -> None:
        """Request more samplers (`ascent cluster add`); the launcher starts them, so that they end with it."""
        self.wanted += samplers

    def interrupt(self, number: int) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(number)

    def about(self) -> dict[str, Any]:
        return {"pid": self.process.pid if self.process else None}


def _before_rank() -> None:
    """Unblock Ctrl-C, which Ray blocks in its workers, and end the rank with its actor."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def sampler_from(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the rollout engine of a replica and the local engine for its probes, with one copy of the model.

    The first load brings the trained parameters and starts the server of a remote engine.
    """
    import torch

    config = config_from(settings)
    torch.set_num_threads(config.threads or 1)
    backend: Any = backend_of(config)
    model, _ = backend.model(config, Streams(config.seed), None)
    own = backend.local_engine(config, model, torch.Generator())
    if config.policy.engine == "local":
        return own, own
    return backend.remote_engine(config, model, torch.Generator()), own


class SamplerActor(Replica):
    def __init__(self) -> None:
        super().__init__(sampler_from, import_ray().util.get_node_ip_address())


# ---- the launcher


@dataclass
class Launch:
    """The actors and the command to start on a cluster."""

    args: Sequence[str]
    """The arguments of `ascent train` or `ascent resume` for every rank."""
    learners: int
    samplers: int
    gpus: bool
    restarts: int
    """Maximum number of restarts of the learners after one was lost."""
    say: Callable[[str, bytes], None]
    """Receives the name of a stream and the output of a rank."""

    def __call__(self, address: str | None) -> int:
        """Place actors, run the command on every learner, and return the exit status of rank 0."""
        count = self.learners + self.samplers
        started = connect(address, count)
        ray = self.ray = import_ray()
        self.run, self.asked = f"{PREFIX}{uuid.uuid4().hex[:8]}", list[int]()
        each: dict[str, Any] = {"CPU": 1, "GPU": 1} if self.gpus else {"CPU": 1}
        group = ray.util.placement_group([each] * count, strategy="PACK")
        try:
            if not group.wait(PLACED):
                free = ray.available_resources()
                raise ConfigError(
                    f"--learners {self.learners} --samplers {self.samplers}: the cluster has no room for {count} "
                    f"actors with {' and '.join(f'1 {name}' for name in each)} each; it has "
                    f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU"
                )
            self.place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            self.drawing = [self._sampler(i, group, self.learners + i) for i in range(self.samplers)]
            self.ranks = [self._learner(i, group) for i in range(self.learners)]
            where = ray.get_runtime_context().gcs_address
            self.say("stderr", f"ascent: {self.run} begins on the Ray cluster at {where}\n".encode())
            with self._hearing():
                return self._attempts(where)
        finally:
            ray.util.remove_placement_group(group)
            ray.shutdown()
            if started:
                os.environ.pop("RAY_ADDRESS", None)

    def _actor(self, cls: type, name: str, restarts: int, *own: Any, **more: Any) -> Any:
        more |= {"num_cpus": 1, "num_gpus": int(self.gpus), "max_restarts": restarts}
        return self.ray.remote(cls).options(name=name, namespace=self.run, **more).remote(*own)

    def _sampler(self, number: int, group: Any = None, index: int = -1) -> Any:
        """Start a sampler: initial ones in the placement group, added ones wherever there is room."""
        where = {} if group is None else {"scheduling_strategy": self.place(group, placement_group_bundle_index=index)}
        return self._actor(SamplerActor, f"sampler-{number}", RESTARTS, **where)

    def _learner(self, rank: int, group: Any) -> Any:
        where = self.place(group, placement_group_bundle_index=rank)
        own = (rank, self.learners, self.run)
        return self._actor(LearnerProcess, f"learner-{rank}", self.restarts, *own, scheduling_strategy=where)

    def _attempts(self, where: str) -> int:
        for attempt in range(self.restarts + 1):
            meet = self._ready()
            words, here = [*self.args, *(f"--trust={digest}" for digest in TRUSTED)], os.getcwd()
            self.ray.get([rank.start.remote(words, meet, where, here, attempt) for rank in self.ranks], timeout=PLACED)
            status = self._follow()
            if status in (0, REFUSED) or self.heard or attempt == self.restarts:
                break
            again = f"ascent: the learners ended with status {status}, and are started again ({attempt + 1} of "
            self.say("stderr", f"{again}{self.restarts})\n".encode())
        return status

    def _ready(self) -> tuple[str, int]:
        """Wait for every learner and return the address where the ranks meet; Ray restarts lost learners."""
        until = time.monotonic() + PLACED
        while True:
            try:
                return self.ray.get([rank.place.remote() for rank in self.ranks], timeout=PLACED)[0]
            except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError) as error:
                if time.monotonic() > until:
                    raise RunError(f"a learner did not restart: {str(error).splitlines()[0]}") from None
            time.sleep(POLL)

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Forward Ctrl-C and SIGTERM to rank 0, which saves and stops."""
        self.asked, self.heard = [], False
        ends = (signal.SIGINT, signal.SIGTERM)
        kept = {number: signal.signal(number, lambda got, _: self.asked.append(got)) for number in ends}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)

    def _follow(self) -> int:
        """Forward the output of the ranks until all have ended."""
        statuses: dict[int, int] = {}
        while len(statuses) < len(self.ranks):
            for number in [n for n in range(len(self.ranks)) if n not in statuses]:
                status = self._hear(self.ranks[number])
                if status is not None:
                    statuses[number] = status if status >= 0 else 128 - status
            time.sleep(POLL)
        return statuses[0] or max(statuses.values())

    def _hear(self, rank: Any) -> int | None:
        """Forward the output of one rank; return its exit status if it has ended."""
        try:
            while self.asked and rank is self.ranks[0]:
                self.heard = True
                self.ray.get(rank.interrupt.remote(self.asked.pop()), timeout=PLACED)
            words, status, wanted = self.ray.get(rank.poll.remote(), timeout=PLACED)
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError):
            return 1
        for stream, data in words:
            self.say(stream, data)
        for _ in range(wanted):
            self.drawing.append(self._sampler(len(self.drawing)))
        return status


# ---- running clusters


@contextmanager
def joined(address: str | None) -> Iterator[Any]:
    """Connect to a running Ray cluster."""
    connect(address)
    ray = import_ray()
    try:
        yield ray
    finally:
        ray.shutdown()


def cluster_status(address: str | None) -> list[dict[str, Any]]:
    """Return the state of every actor of every run on the cluster."""
    with joined(address) as ray:
        named = [a for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"].startswith(PREFIX)]
        found = []
        for one in sorted(named, key=lambda a: (a["namespace"], a["name"])):
            line: dict[str, Any] = {"run": one["namespace"], "name": one["name"]}
            try:
                call = ray.get_actor(one["name"], namespace=one["namespace"]).status.remote()
                found.append(line | ray.get(call, timeout=5) | {"state": "ready"})
            except ray.exceptions.GetTimeoutError:
                found.append(line | {"state": "no answer"})
            except (ray.exceptions.RayActorError, ValueError):
                found.append(line | {"state": "restarting"})
        return found


def add_samplers(address: str | None, run: str | None, count: int) -> str:
    """Request more samplers; return the name of the run."""
    with joined(address) as ray:
        run = _only_run(ray, run)
        ray.get(ray.get_actor("learner-0", namespace=run).want.remote(count), timeout=PLACED)
        return run


def remove_sampler(address: str | None, run: str | None, name: str) -> str:
    """Let a sampler finish its work and stop; return the name of the run."""
    with joined(address) as ray:
        run = _only_run(ray, run)
        names = replica_names(ray, run)
        if name not in names:
            raise ConfigError(f"{name}: {run} has no sampler of this name. It has {', '.join(names)}")
        if len(names) == 1:
            raise ConfigError(f"{name} is the last sampler of {run}. To end the run, press Ctrl-C where it was started")
        actor = ray.get_actor(name, namespace=run)
        with suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(actor.drain.remote(), timeout=PLACED)
        ray.kill(actor, no_restart=True)
        return run


def _only_run(ray: Any, run: str | None) -> str:
    named = ray.util.list_named_actors(all_namespaces=True)
    runs = sorted({a["namespace"] for a in named if a["namespace"].startswith(PREFIX)})
    if run in runs or (run is None and len(runs) == 1):
        return run or runs[0]
    raise ConfigError(f"--run {run}: on this cluster are {', '.join(runs) or 'no runs'}. Name one of them")
