"""The replicas of a run on a Ray cluster, as its learner calls them. Ray is imported when it is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ascent.core.types import Refused, Trouble
from ascent.engines.cluster.sampler import ClusterSampler, Gone, check_cluster

CLUSTER = "ASCENT_CLUSTER"
"""The environment variable that names the cluster and the run that a learner belongs to."""


def ray_here() -> Any:
    try:
        import ray
    except ImportError:
        raise Refused("ascent cluster needs Ray: pip install 'ascent-rl[cluster]'") from None
    return ray


class RayCrew:
    """The samplers of a run, by the names under which its cluster knows them."""

    def __init__(self, run: str):
        self.ray = ray_here()
        named = self.ray.util.list_named_actors(all_namespaces=True)
        self.names = tuple(
            sorted(a["name"] for a in named if a["namespace"] == run and a["name"].startswith("sampler"))
        )
        self.actors = {name: self.ray.get_actor(name, namespace=run) for name in self.names}

    def put(self, value: Any) -> Any:
        return self.ray.put(value)

    def begin(self, name: str, method: str, *args: Any) -> Any:
        return getattr(self.actors[name], method).remote(*args)

    def wait(self, calls: Sequence[Any], seconds: float) -> list[Any]:
        return self.ray.wait(list(calls), num_returns=1, timeout=seconds)[0]

    def result(self, call: Any) -> Any:
        try:
            return self.ray.get(call)
        except self.ray.exceptions.RayActorError as error:
            gone = Gone(str(error).partition("\n")[0])
            gone.over = not isinstance(error, self.ray.exceptions.ActorUnavailableError)
            raise gone from None
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Gone):
                raise Gone(str(error.cause)) from None
            raise Trouble(f"a sampler failed: {type(error.cause).__name__}: {error.cause}") from None

    def restart(self, name: str) -> None:
        self.ray.kill(self.actors[name], no_restart=False)


def crew_here() -> RayCrew | None:
    """The samplers of the run that this learner belongs to; None: it is not part of a cluster."""
    if CLUSTER not in os.environ:
        return None
    address, run = os.environ[CLUSTER].split(" ")
    ray = ray_here()
    if not ray.is_initialized():
        ray.init(address=address, namespace=run, log_to_driver=False, logging_level="error")
    return RayCrew(run)


def join_cluster(parts: Any) -> Any:
    """The parts of a run on its first rank: where it is part of a cluster, replicas draw for it."""
    crew = crew_here()
    if crew is None:
        return parts
    check_cluster(parts.config)
    own = getattr(parts.sampler, "inner", parts.sampler)
    config = parts.config
    parts.sampler = ClusterSampler(parts.sampler, own, crew, config.to_dict(), config.ranks.deadline)
    parts.judged = parts.judged[0], parts.sampler
    parts.notes += (f"{len(crew.names)} {'samplers draw' if len(crew.names) > 1 else 'sampler draws'} on the cluster",)
    return parts
