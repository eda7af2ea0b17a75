"""Assemble a run on every torchrun rank: rank 0 runs the training loop, the others execute its commands."""

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


def assemble_ranks(config: Config, groups: Collection[str] = (), start_folder: Path | None = None) -> RunParts:
    """Return the parts of a run on rank 0. Other ranks execute commands until the run ends, and then exit."""
    size = training_world_size(config.ranks.shard)
    backend_of(config).check_ranks(config, size)
    ranks = join_ranks(config.ranks.deadline, pick_device(getattr(config.policy, "device", "cpu")).type, size)
    if not isinstance(ranks, RankGroup):
        return join_cluster(assemble(config, groups, start_folder))
    with ranks.failing_together():
        first, groups, start_folder = ranks.broadcast((launch_settings(config), list(groups), start_folder))
        check_same_settings(first, launch_settings(config), ranks.rank)
        parts = assemble(config, groups, start_folder, ranks)
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
    """Return the settings that must be equal on every rank."""
    settings = config.to_dict()
    if settings["policy"].get("model") in PYTHON_MODELS:  # its name is specific to this process
        settings["policy"] = settings["policy"] | {"model": ""}
    return {name: value for name, value in settings.items() if name != "threads"}


def check_same_settings(first: dict[str, Any], own: dict[str, Any], rank: int) -> None:
    """Raise ConfigError if this rank was started with other settings than rank 0."""
    odd = next((name for name in first if first[name] != own.get(name)), None)
    if odd is not None:
        raise ConfigError(
            f"rank {rank} was started with {odd} = {own.get(odd)}, and rank 0 with {first[odd]}: give every rank the "
            "same command"
        )


def check_same_parameters(model: Any, ranks: RankGroup) -> None:
    """Raise ConfigError if a rank loaded other parameters than rank 0."""
    own = {name: float(p.detach().sum(dtype=torch.float64)) for name, p in model.named_parameters()}
    for rank, other in enumerate(ranks.gather(own)):
        odd = next((name for name in own if abs(own[name] - other.get(name, 1e9)) > 1e-6 * (1 + abs(own[name]))), None)
        if odd is not None:
            raise ConfigError(
                f"rank {rank} has loaded other parameters than rank 0 ({odd}): give every rank the same model"
            )
