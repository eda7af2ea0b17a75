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

NAMESPACE_PREFIX = "ascent-"
POLL_INTERVAL = 0.2
"""Seconds between two polls of the learners."""
PLACEMENT_TIMEOUT = 120.0
"""Timeout in seconds to place the actors."""
MAX_ADDED_SAMPLERS = 64
"""Maximum number of samplers that can be added on a local cluster, where only GPUs are counted."""
MAX_SAMPLER_RESTARTS = 100
"""Maximum number of restarts of a sampler."""
CONFIG_ERROR_STATUS = 2
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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    if address is None and not actors:
        address = "auto"
    try:
        if address not in (None, "auto"):
            _check_reachable(str(address))
        if address is not None:
            ray.init(address=address, **quiet)
            return False
        ray.init(address="local", num_cpus=actors + MAX_ADDED_SAMPLERS, include_dashboard=False, **quiet)
        return True
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"--address {address}: no Ray cluster answers there ({str(error).splitlines()[0]}). If it asks for a "
            "token: `ray get-auth-token` prints it where it was started, and ~/.ray/auth_token holds it here"
        ) from None


def _check_reachable(address: str) -> None:
    """Raise if nothing listens at the address; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()


# ---- actors


class LearnerProcess:
    """An actor that runs one rank in a separate process, with the signals and main thread of a torchrun rank."""

    def __init__(self, rank: int, size: int, run: str):
        self.rank, self.size, self.run = rank, size, run
        self.process: subprocess.Popen[bytes] | None = None
        self.output: list[tuple[str, bytes]] = []
        """The output of the rank since the last poll: the name of a stream and data."""
        self.readers: list[threading.Thread] = []
        self.requested_samplers = 0
        """Number of samplers requested since the launcher last polled."""

    def master_address(self) -> tuple[str, int]:
        """Return the address of this machine and a free port, where rank 0 accepts the other ranks."""
        with socket.socket() as free:
            free.bind(("", 0))
            return import_ray().util.get_node_ip_address(), free.getsockname()[1]

    def start(self, args: Sequence[str], master: tuple[str, int], address: str, folder: str, attempt: int) -> int:
        """Start the rank with the arguments of a command and return its process id."""
        variables = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.size, "MASTER_ADDR": master[0]}
        variables |= {"MASTER_PORT": master[1], "TORCHELASTIC_RUN_ID": self.run, "TORCHELASTIC_RESTART_COUNT": attempt}
        variables[CLUSTER_VARIABLE] = f"{address} {self.run}"
        env = os.environ | {name: str(value) for name, value in variables.items()}
        command = [sys.executable, "-m", "ascent", *args]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=env, cwd=folder, preexec_fn=_prepare_rank_process, **pipes)
        streams = [(name, getattr(self.process, name)) for name in ("stdout", "stderr")]
        self.readers = [threading.Thread(target=self._read_output, args=stream, daemon=True) for stream in streams]
        for reader in self.readers:
            reader.start()
        return self.process.pid

    def _read_output(self, name: str, pipe: Any) -> None:
        while data := pipe.read1():
            self.output.append((name, data))

    def poll(self) -> tuple[list[tuple[str, bytes]], int | None, int]:
        """Return the output since the last call, the exit status if the rank has ended, and requested samplers.

        An actor that replaces a lost one has no rank, which counts as ended.
        """
        status = self.process.poll() if self.process else 1
        for reader in self.readers if status is not None else ():
            reader.join(5)  # read its last output
        count, requested = len(self.output), self.requested_samplers
        output, self.output, self.requested_samplers = self.output[:count], self.output[count:], 0
        return output, status, requested

    def request_samplers(self, samplers: int) -> None:
        """Request more samplers (`ascent cluster add`). The launcher starts them, so that they end with it."""
        self.requested_samplers += samplers

    def interrupt(self, signal_number: int) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal_number)

    def about(self) -> dict[str, Any]:
        return {"pid": self.process.pid if self.process else None}


def _prepare_rank_process() -> None:
    """Unblock Ctrl-C, which Ray blocks in its workers, and end the rank with its actor."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def build_replica_engines(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the rollout engine of a replica and the local engine for its probes, with one copy of the model.

    The first load brings the trained parameters and starts the server of a remote engine.
    """
    import torch

    config = config_from(settings)
    torch.set_num_threads(config.threads or 1)
    backend: Any = backend_of(config)
    model, _ = backend.model(config, Streams(config.seed), None)
    local = backend.local_engine(config, model, torch.Generator())
    if config.policy.engine == "local":
        return local, local
    return backend.remote_engine(config, model, torch.Generator()), local


class SamplerActor(Replica):
    def __init__(self) -> None:
        super().__init__(build_replica_engines, import_ray().util.get_node_ip_address())


# ---- the launcher


@dataclass
class ClusterLaunch:
    """The actors and the command to start on a cluster."""

    args: Sequence[str]
    """The arguments of `ascent train` or `ascent resume` for every rank."""
    learners: int
    samplers: int
    gpus: bool
    restarts: int
    """Maximum number of restarts of the learners after one was lost."""
    forward: Callable[[str, bytes], None]
    """Receives the name of a stream and output of a rank."""

    def __call__(self, address: str | None) -> int:
        """Place actors, run the command on every learner, and return the exit status of rank 0."""
        count = self.learners + self.samplers
        started = connect(address, count)
        ray = self.ray = import_ray()
        self.run, self.pending_signals = f"{NAMESPACE_PREFIX}{uuid.uuid4().hex[:8]}", list[int]()
        resources: dict[str, Any] = {"CPU": 1, "GPU": 1} if self.gpus else {"CPU": 1}
        group = ray.util.placement_group([resources] * count, strategy="PACK")
        try:
            if not group.wait(PLACEMENT_TIMEOUT):
                free = ray.available_resources()
                raise ConfigError(
                    f"--learners {self.learners} --samplers {self.samplers}: the cluster has no room for {count} "
                    f"actors with {' and '.join(f'1 {name}' for name in resources)} each; it has "
                    f"{free.get('CPU', 0):g} CPU and {free.get('GPU', 0):g} GPU"
                )
            self.scheduling_strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            self.sampler_actors = [self._sampler(i, group, self.learners + i) for i in range(self.samplers)]
            self.ranks = [self._learner(i, group) for i in range(self.learners)]
            where = ray.get_runtime_context().gcs_address
            self.forward("stderr", f"ascent: {self.run} begins on the Ray cluster at {where}\n".encode())
            with self._forward_signals():
                return self._run_with_restarts(where)
        finally:
            ray.util.remove_placement_group(group)
            ray.shutdown()
            if started:
                os.environ.pop("RAY_ADDRESS", None)

    def _actor(self, cls: type, name: str, restarts: int, *args: Any, **options: Any) -> Any:
        options |= {"num_cpus": 1, "num_gpus": int(self.gpus), "max_restarts": restarts}
        return self.ray.remote(cls).options(name=name, namespace=self.run, **options).remote(*args)

    def _sampler(self, number: int, group: Any = None, index: int = -1) -> Any:
        """Start a sampler: initial ones in the placement group, added ones wherever there is room."""
        options = {}
        if group is not None:
            options["scheduling_strategy"] = self.scheduling_strategy(group, placement_group_bundle_index=index)
        return self._actor(SamplerActor, f"sampler-{number}", MAX_SAMPLER_RESTARTS, **options)

    def _learner(self, rank: int, group: Any) -> Any:
        where = self.scheduling_strategy(group, placement_group_bundle_index=rank)
        args = (rank, self.learners, self.run)
        return self._actor(LearnerProcess, f"learner-{rank}", self.restarts, *args, scheduling_strategy=where)

    def _run_with_restarts(self, where: str) -> int:
        for attempt in range(self.restarts + 1):
            master = self._wait_for_learners()
            args, here = [*self.args, *(f"--trust={digest}" for digest in TRUSTED)], os.getcwd()
            starts = [rank.start.remote(args, master, where, here, attempt) for rank in self.ranks]
            self.ray.get(starts, timeout=PLACEMENT_TIMEOUT)
            status = self._forward_outputs()
            if status in (0, CONFIG_ERROR_STATUS) or self.was_interrupted or attempt == self.restarts:
                break
            message = f"ascent: the learners ended with status {status} and are restarted ({attempt + 1} of "
            self.forward("stderr", f"{message}{self.restarts})\n".encode())
        return status

    def _wait_for_learners(self) -> tuple[str, int]:
        """Wait for every learner and return the address where the ranks meet; Ray restarts lost learners."""
        until = time.monotonic() + PLACEMENT_TIMEOUT
        while True:
            try:
                addresses = [rank.master_address.remote() for rank in self.ranks]
                return self.ray.get(addresses, timeout=PLACEMENT_TIMEOUT)[0]
            except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError) as error:
                if time.monotonic() > until:
                    raise RunError(f"a learner did not restart: {str(error).splitlines()[0]}") from None
            time.sleep(POLL_INTERVAL)

    @contextmanager
    def _forward_signals(self) -> Iterator[None]:
        """Forward Ctrl-C and SIGTERM to rank 0, which saves and stops."""
        self.pending_signals, self.was_interrupted = [], False
        ends = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, lambda got, _: self.pending_signals.append(got)) for number in ends}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _forward_outputs(self) -> int:
        """Forward the output of the ranks until all have ended."""
        statuses: dict[int, int] = {}
        while len(statuses) < len(self.ranks):
            for number in [n for n in range(len(self.ranks)) if n not in statuses]:
                status = self._poll_learner(self.ranks[number])
                if status is not None:
                    statuses[number] = status if status >= 0 else 128 - status
            time.sleep(POLL_INTERVAL)
        return statuses[0] or max(statuses.values())

    def _poll_learner(self, rank: Any) -> int | None:
        """Forward the output of one rank; return its exit status if it has ended."""
        try:
            while self.pending_signals and rank is self.ranks[0]:
                self.was_interrupted = True
                self.ray.get(rank.interrupt.remote(self.pending_signals.pop()), timeout=PLACEMENT_TIMEOUT)
            output, status, requested = self.ray.get(rank.poll.remote(), timeout=PLACEMENT_TIMEOUT)
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.GetTimeoutError):
            return 1
        for stream, data in output:
            self.forward(stream, data)
        for _ in range(requested):
            self.sampler_actors.append(self._sampler(len(self.sampler_actors)))
        return status


# ---- running clusters


@contextmanager
def connected_cluster(address: str | None) -> Iterator[Any]:
    """Connect to a running Ray cluster."""
    connect(address)
    ray = import_ray()
    try:
        yield ray
    finally:
        ray.shutdown()


def cluster_status(address: str | None) -> list[dict[str, Any]]:
    """Return the state of every actor of every run on the cluster."""
    with connected_cluster(address) as ray:
        named = [
            a for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"].startswith(NAMESPACE_PREFIX)
        ]
        actors = []
        for actor in sorted(named, key=lambda a: (a["namespace"], a["name"])):
            line: dict[str, Any] = {"run": actor["namespace"], "name": actor["name"]}
            try:
                call = ray.get_actor(actor["name"], namespace=actor["namespace"]).status.remote()
                actors.append(line | ray.get(call, timeout=5) | {"state": "ready"})
            except ray.exceptions.GetTimeoutError:
                actors.append(line | {"state": "no answer"})
            except (ray.exceptions.RayActorError, ValueError):
                actors.append(line | {"state": "restarting"})
        return actors


def add_samplers(address: str | None, run: str | None, count: int) -> str:
    """Request more samplers; return the name of the run."""
    with connected_cluster(address) as ray:
        run = _resolve_run(ray, run)
        ray.get(ray.get_actor("learner-0", namespace=run).request_samplers.remote(count), timeout=PLACEMENT_TIMEOUT)
        return run


def remove_sampler(address: str | None, run: str | None, name: str) -> str:
    """Let a sampler finish its work and stop; return the name of the run."""
    with connected_cluster(address) as ray:
        run = _resolve_run(ray, run)
        names = replica_names(ray, run)
        if name not in names:
            raise ConfigError(f"{name}: {run} has no sampler of this name. It has {', '.join(names)}")
        if len(names) == 1:
            raise ConfigError(f"{name} is the last sampler of {run}. To end the run, press Ctrl-C where it was started")
        actor = ray.get_actor(name, namespace=run)
        with suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(actor.drain.remote(), timeout=PLACEMENT_TIMEOUT)
        ray.kill(actor, no_restart=True)
        return run


def _resolve_run(ray: Any, run: str | None) -> str:
    named = ray.util.list_named_actors(all_namespaces=True)
    runs = sorted({a["namespace"] for a in named if a["namespace"].startswith(NAMESPACE_PREFIX)})
    if run in runs or (run is None and len(runs) == 1):
        return run or runs[0]
    raise ConfigError(f"--run {run}: on this cluster are {', '.join(runs) or 'no runs'}. Name one of them")
