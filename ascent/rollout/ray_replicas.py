"""The replicas of a run on a Ray cluster, as seen from the learner. Ray is imported on first use."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from ascent.core.errors import ConfigError, RunError
from ascent.distributed.ranks import CLUSTER_VARIABLE, in_ray_cluster
from ascent.distributed.replica_errors import ReplicaLostError
from ascent.distributed.weight_transfer import WeightSender, WeightSnapshot, report_object_store
from ascent.inference.remote.server_process import STARTUP_TIMEOUT
from ascent.rollout.replica_engine import ReplicaEngine, check_cluster


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("ascent cluster needs Ray: pip install 'ascent-rl[cluster]'") from None
    return ray


class RayReplicas:
    """The replicas of a run, by the names of their Ray actors. `device`: that of the policy on rank 0."""

    def __init__(self, run: str, device: torch.device, deadline: float):
        self.ray, self.run = import_ray(), run
        self.actors: dict[str, Any] = {}
        self.sender: WeightSender | None = None
        try:
            self.sender = WeightSender(self.ray.util.get_node_ip_address(), device, deadline)
        except (OSError, RuntimeError) as error:
            report_object_store("all samplers", f"rank 0 cannot listen for them: {error}")

    def names(self) -> list[str]:
        return replica_names(self.ray, self.run)

    def put(self, params: dict[str, Tensor]) -> WeightSnapshot:
        return WeightSnapshot(params)

    def load(self, name: str, weights: WeightSnapshot, version: int, config: dict[str, Any]) -> Future[Any]:
        sender = self.sender
        if sender is None or not sender.is_reachable(name):
            weights.object_ref = weights.object_ref or self.ray.put(weights.params())
            return self.call(name, "load", weights.object_ref, version, config)
        offer = sender.offer(weights)
        call = self.call(name, "receive", offer, version, config)
        sender.start(offer, weights, call)
        call.add_done_callback(lambda done: sender.record_result(name, getattr(e := done.exception(), "cause", e)))
        return call

    def call(self, name: str, method: str, *args: Any) -> Future[Any]:
        try:
            if name not in self.actors:
                self.actors[name] = self.ray.get_actor(name, namespace=self.run)
            return getattr(self.actors[name], method).remote(*args).future()
        except (ValueError, self.ray.exceptions.RayActorError) as error:  # it has ended since it was listed
            failed: Future[Any] = Future()
            failed.set_exception(ReplicaLostError(str(error), is_permanent=True))
            return failed

    def result(self, call: Future[Any]) -> Any:
        errors = self.ray.exceptions
        try:
            return call.result()
        except errors.RayActorError as error:
            raise ReplicaLostError(
                str(error), is_permanent=not isinstance(error, errors.ActorUnavailableError)
            ) from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, ReplicaLostError):
                raise error.cause from None
            raise RunError(f"a sampler failed: {type(error.cause).__name__}: {error.cause}") from None

    def restart(self, name: str) -> None:
        self.ray.kill(self.actors[name], no_restart=False)


def replica_names(ray: Any, run: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(a["name"] for a in named if a["namespace"] == run and a["name"].startswith("sampler"))


def cluster_replicas(device: torch.device, deadline: float) -> RayReplicas | None:
    """Return the replicas of the run that this learner belongs to; None: it is not part of a cluster."""
    if not in_ray_cluster():
        return None
    address, run = os.environ[CLUSTER_VARIABLE].split(" ")
    ray = import_ray()
    if not ray.is_initialized():
        ray.init(address=address, namespace=run, log_to_driver=False, logging_level="error")
    return RayReplicas(run, device, deadline)


def join_cluster(parts: Any) -> Any:
    """Replace the engine of a run on rank 0 by its replicas, if the run is part of a cluster."""
    config, local_engine = parts.config, getattr(parts.engine, "inner", parts.engine)
    replicas = cluster_replicas(getattr(parts.policy, "device", torch.device("cpu")), config.ranks.deadline)
    if replicas is None:
        return parts
    check_cluster(config)
    count, engine = len(replicas.names()), getattr(config.policy, "engine", "local")
    server_startup = None if engine == "local" else STARTUP_TIMEOUT
    parts.engine = ReplicaEngine(
        parts.engine, local_engine, replicas, config.to_dict(), config.ranks.deadline, server_startup
    )
    parts.evaluation.engine = parts.engine
    with_engine = "" if engine == "local" else f", each with {engine}"
    parts.notes += (f"{count} {'samplers draw' if count > 1 else 'sampler draws'} on the cluster{with_engine}",)
    if config.ahead:
        parts.notes += (f"on a cluster, --ahead {config.ahead} is exact: the policy of {config.ahead} steps before",)
    return parts
