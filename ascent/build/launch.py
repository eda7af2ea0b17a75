"""A run on every rank that torchrun has started: each assembles its parts; rank 0 leads, and the others follow it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ascent.build.assemble import RunParts, assemble
from ascent.build.backends import backend_of
from ascent.core.config import Config
from ascent.core.errors import ConfigError
from ascent.distributed.rank_group import RankGroup, join_ranks
from ascent.distributed.ranks import training_world_size
from ascent.models.causal_lm import PYTHON_MODELS, pick_device
from ascent.rollout.rank_leader import run_follower, wrap_for_ranks
from ascent.rollout.ray_replicas import join_cluster


def assemble_ranks(config: Config, groups: Collection[str] = (), kept: Path | None = None) -> RunParts:
    """The parts of a run, as rank 0 has them. Another rank works for it until the run ends, and then exits."""
    size = training_world_size(config.ranks.shard)
    backend_of(config).check_ranks(config, size)
    ranks = join_ranks(config.ranks.deadline, pick_device(getattr(config.policy, "device", "cpu")).type, size)
    if not isinstance(ranks, RankGroup):
        return join_cluster(assemble(config, groups, kept))
    with ranks.failing_together():
        first, groups, kept = ranks.broadcast((launch_settings(config), list(groups), kept))
        check_same_settings(first, launch_settings(config), ranks.rank)
        parts = assemble(config, groups, kept, ranks)
        check_same_parameters(parts.policy, ranks)
        wrap_for_ranks(parts, ranks)
    if ranks.rank == 0:
        return join_cluster(parts)
    try:
        run_follower(parts, ranks)
    finally:
        ranks.close()
        parts.close()
    raise SystemExit(0)


def launch_settings(config: Config) -> dict[str, Any]:
    """What every rank has to be started with."""
    own = config.to_dict()
    if own["policy"].get("model") in PYTHON_MODELS:  # its name is this process's own
        own["policy"] = own["policy"] | {"model": ""}
    return {name: value for name, value in own.items() if name != "threads"}


def check_same_settings(first: dict[str, Any], own: dict[str, Any], rank: int) -> None:
    odd = next((name for name in first if first[name] != own.get(name)), None)
    if odd is not None:
        raise ConfigError(
            f"rank {rank} was started with {odd} = {own.get(odd)}, and rank 0 with {first[odd]}: give every rank the "
            "same command"
        )


def check_same_parameters(model: Any, ranks: RankGroup) -> None:
    """Refuse to start from other parameters than rank 0: they would never agree again."""
    own = {name: float(p.detach().sum(dtype=torch.float64)) for name, p in model.named_parameters()}
    for rank, other in enumerate(ranks.gather(own)):
        odd = next((name for name in own if abs(own[name] - other.get(name, 1e9)) > 1e-6 * (1 + abs(own[name]))), None)
        if odd is not None:
            raise ConfigError(
                f"rank {rank} has loaded other parameters than rank 0 ({odd}): give every rank the same model"
            )
