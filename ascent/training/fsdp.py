"""A learner whose state is sharded over the ranks by FSDP2: parameters, gradients, moments, reference.

In addition every rank has a whole copy of the model, in the compute dtype, for its rollout engine. It is gathered when
the engine loads. FSDP2 gathers the parameters of a layer while the layer runs, and reduces its gradients to shards by
sums rather than means, because the weights of a batch are computed over all of it. LoRA adapters are replicated on
every rank; the frozen model below them is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.protocols import Objective, TakeStep, UpdateResult, ValueLoss
from ascent.core.types import Batch, Outputs, Rollouts, Terms
from ascent.core.update import Update, global_norm
from ascent.distributed.ranks import Ranks, RankZeroOnly
from ascent.models.causal_lm import LanguageModel
from ascent.models.fused_layers import fuse_layers
from ascent.models.packed_attention import to_device_async
from ascent.training.compact_adamw import to_float32_state
from ascent.training.language_learner import LanguageCritic, LanguageLearner, checkpointable_layers
from ascent.training.learner import check_restored
from ascent.training.master_weights import check_params
from ascent.training.micro_batches import critic_bytes, plan_micro_batches, state_bytes
from ascent.training.model_sharding import (
    LORA_PREFIX,
    MetaDeviceCopy,
    ShardedForward,
    dtensor_like,
    gather_full,
    is_sharded,
    local_tensor,
    shard_layers,
    shard_like,
    shard_model,
)
from ascent.training.packing import action_states, last_states, scatter_tokens, to_device
from ascent.training.sharded_checkpoint import ShardedWrite, ShardWriter

Groups = dict[str, dict[str, Tensor]]


class ShardedCritic(LanguageCritic):
    """A critic with a sharded backbone, or on the policy's backbone. Its head is replicated."""

    def __init__(self, whole: LanguageModel, shared: bool, size: int):
        source = MetaDeviceCopy(whole)
        super().__init__(whole, shared, source.copy_to_meta)
        self._policy: list[Any] = []
        if self.separate_backbone is not None:
            backbone = self.separate_backbone
            shard_layers(backbone, checkpointable_layers(backbone), source, whole.model.dtype, size)
            self.compute_params = self.master_params = [p for p in backbone.parameters() if p.requires_grad]

    def use_policy_backbone(self, forward: ShardedForward) -> None:
        """Use the hidden states of this policy, if the critic has no backbone."""
        if self.separate_backbone is None:
            self._policy, self._lm = [forward], list(forward._lm)

    def forward(self, batch: Rollouts) -> Float[Tensor, "prompt sample state"]:
        if self.separate_backbone is not None:
            return super().forward(batch)
        states = action_states(batch) | last_states(batch)
        hidden = self._policy[0](batch, lambda _, hidden: hidden, states)
        return scatter_tokens(self.read(hidden), to_device_async(states, batch.mask.device))


class ShardedOptimizer:
    """An optimizer on the local shards as plain tensors, which avoids the host overhead of DTensor."""

    def __init__(self, parameters: list[Any], update: Update, ranks: Ranks):
        self.params, self.ranks = parameters, ranks
        self.local_params = [local_tensor(p).detach() if is_sharded(p) else p for p in parameters]
        self.optimizer = update.optimizer(self.local_params)
        if self.optimizer is not None:
            self.optimizer.norm = self.norm  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def take_gradients(self) -> None:
        """Take the gradients that FSDP2 has reduced."""
        for local, p in zip(self.local_params, self.params, strict=True):
            local.grad = None if p.grad is None else local_tensor(p.grad)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient."""
        pairs = [(local.grad, p) for local, p in zip(self.local_params, self.params, strict=True)]
        sharded_grads = [grad for grad, p in pairs if grad is not None and is_sharded(p)]
        replicated_grads = [grad for grad, p in pairs if grad is not None and not is_sharded(p)]
        if self.ranks.world_size == 1 or not sharded_grads:
            return global_norm(gradients)
        square = global_norm(sharded_grads).double().square()
        self.ranks.all_reduce([square])
        if replicated_grads:
            square = square + global_norm(replicated_grads).double().square()
        return square.sqrt().to(gradients[0].dtype)

    def shard_state(self, name: str, value: Tensor) -> Any:
        """Return optimizer state as a DTensor that is sharded like its parameter."""
        p = self.params[int(name.split(".", 1)[0])]
        return dtensor_like(value, p) if value.dim() and is_sharded(p) else value

    def local_shard(self, name: str, value: Any) -> Any:
        """Return this rank's shard of optimizer state."""
        p = self.params[int(name.split(".", 1)[0])]
        return value if is_sharded(value) else shard_like(value, p) if value.dim() else value.to(p.device, copy=True)

    def restore(self, name: str, value: Any) -> None:
        assert self.optimizer is not None
        index, key = name.split(".", 1)
        self.optimizer.state[self.local_params[int(index)]][key] = local_tensor(self.local_shard(name, value))


class ShardedLearner(LanguageLearner):
    """Trains a sharded language model. Every rank calls every operation, in the same order."""

    placement = "each trains a part of the parameters, in shards, and samples from a whole copy"
    computes_alone = False

    def __init__(
        self, whole: LanguageModel, update: Update, reference: bool, outputs: frozenset[str], micro_batch: int,
        checkpointing: bool, ranks: Ranks, choice: Any = None, gather: float = math.inf,
    ):  # fmt: skip
        """`choice`: the critic of the algorithm, if any. `gather`: maximum size of a checkpoint that rank 0 writes."""
        if whole.model.dtype == torch.float16:  # the shards are in float32
            raise ConfigError(
                "--policy.dtype float16 with shards: its gradients are not scaled. Set float32 or bfloat16"
            )
        has_critic = choice is not None and choice.enabled
        if whole.device.type == "cuda" and whole.can_fuse_layers:
            fuse_layers(whole.model)
        critic = ShardedCritic(whole, choice.shared, ranks.world_size) if has_critic else None
        step = choice.update if has_critic else None
        forward = shard_model(whole, ranks.world_size)
        if critic is not None:
            critic.use_policy_backbone(forward)
        super().__init__(forward._lm[0], update, reference, outputs, 1, checkpointing, critic, step)
        self.ranks, self.num_shards = ranks, ranks.world_size
        self._sharded = ShardedOptimizer(self.trainable(), update, ranks)
        self.optimizer = self._sharded.optimizer
        self._critic_sharded = None if step is None else ShardedOptimizer(self.critic.trained(), step, ranks)
        self.critic_optimizer = None if self._critic_sharded is None else self._critic_sharded.optimizer
        self.unsharded_lm = whole
        self._forward: Any = forward
        self._stale = False
        """Whether the parameters have changed since the whole copy was gathered."""
        self.writing = ShardWriter(ranks)
        self.writes_shards = state_bytes(whole) + critic_bytes(critic) > gather
        self.micro_batch = micro_batch
        self._memory_plan = (
            None if micro_batch else plan_micro_batches(whole, checkpointing, reference, critic, ranks.world_size)
        )

    def params(self) -> dict[str, Tensor]:
        """Return those of the whole copy, as of the last `refresh_params`."""
        return self.unsharded_lm.trained()

    def refresh_params(self) -> None:
        if self._stale:
            self._forward.gather_into(self.params(), self.num_shards)
            self._stale = False

    def local_microbatches(self, batch: Batch) -> Iterable[Batch]:
        """Return as many micro-batches as any rank has, because each contains collectives; the last may be empty."""
        parts = list(super().local_microbatches(batch))
        empty = to_device(batch.sub_batch(slice(0, 0)), self.lm.device)
        return parts + [empty] * (self.ranks.all_reduce_max(len(parts)) - len(parts))

    def all_reduce_gradients(self, parameters: list[Tensor]) -> None:
        """Sum the gradients of replicated parameters. FSDP2 has summed those of sharded ones."""
        critic = self._critic_sharded
        optimizer = critic if critic is not None and parameters[0] is critic.local_params[0] else self._sharded
        if replicated := [p for p in optimizer.params if not is_sharded(p)]:
            super().all_reduce_gradients(replicated)
        optimizer.take_gradients()

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> UpdateResult:
        self._stale = True
        return super().step(mini, objective, update)

    def fit_critic(self, mini: Batch, loss: ValueLoss) -> tuple[Tensor, Tensor]:
        assert self._critic_sharded is not None
        self._critic_sharded.zero_grad()
        return super().fit_critic(mini, loss)

    def on_rank_zero(self, name: str, mini: Batch, objective: Objective = lambda _, out: zero_objective(out)) -> Any:
        """Compute the whole batch on rank 0; the others run as many passes with empty micro-batches."""
        ranks, self.ranks = self.ranks, RankZeroOnly(self.ranks)
        try:
            return getattr(self, name)(mini, objective)
        finally:
            self.ranks = ranks

    def state(self) -> Groups:
        """Return whole tensors on rank 0, in the dtype of the model and in float32, like a single process."""
        groups: Groups = {}
        for group, values in self._local_state().items():
            groups[group] = {}
            for name, value in values.items():
                full = gather_full(value)  # a collective
                if self.ranks.rank == 0:
                    groups[group][name] = full.cpu()
        if self._has_rounded_copies:
            groups["wide"] = groups["params"]
            groups["params"] = {name: t.to(self.unsharded_lm.model.dtype) for name, t in groups["wide"].items()}
        return groups

    def _local_state(self) -> Groups:
        """Return the local state; optimizer state is sharded like the parameters."""
        groups = super().state()
        for group, sharded in {"optimizer": self._sharded, "critic_optimizer": self._critic_sharded}.items():
            if sharded is not None:
                groups[group] = {name: sharded.shard_state(name, value) for name, value in groups[group].items()}
        return groups

    def stage_shards(self, aside: Path) -> ShardedWrite | None:
        """Copy the local shards to the host. Rank 0 returns the write; the other ranks start it on a thread."""
        state = self._local_state()
        if self._has_rounded_copies:
            state["wide"] = state.pop("params")
        return self.writing.stage(state, aside, str(self.unsharded_lm.model.dtype).removeprefix("torch."))

    def wait_for_writes(self) -> None:
        self.writing.saver.wait()

    @property
    def _has_rounded_copies(self) -> bool:
        """Whether the model computes with rounded copies of float32 parameters."""
        return self.unsharded_lm.model.dtype.itemsize < 4 and not self._has_adapters

    @property
    def _has_adapters(self) -> bool:
        return any(LORA_PREFIX in name for name in self._params)

    @torch.no_grad()
    def restore(self, state: Groups) -> None:
        params = self._params
        state = to_float32_state(state, list(params))
        check_params(params, state["params"])
        values = state.get("wide", state["params"])
        self._forward.fill([self.local_shard("params", name, values[name]) for name in params])
        self._stale = True
        self.refresh_params()
        if "reference" in state and self.reference_params is not None:
            self.reference_moved = True
            self.reference_params = [self.local_shard("reference", name, state["reference"][name]) for name in params]
        if self.critic is not None:
            params = self.critic.state_dict()
            check_params(params, state["critic"])
            for name, value in state["critic"].items():
                local_tensor(params[name]).copy_(local_tensor(self.local_shard("critic", name, value)))
            if self.critic.separate_backbone is not None:
                self.critic.separate_backbone.reshard()
        for name, value in state["optimizer"].items():
            self._sharded.restore(name, value)
        for name, value in state.get("critic_optimizer", {}).items():
            assert self._critic_sharded is not None
            self._critic_sharded.restore(name, value)
        saved = {"params": (self._params, values)}
        saved |= {} if self.critic is None else {"critic": (self.critic.state_dict(), state["critic"])}
        for group, (params, full) in saved.items():
            for name, p in params.items():
                check_restored({name: local_tensor(p)}, {name: local_tensor(self.local_shard(group, name, full[name]))})
        if not any(map(is_sharded, state["params"].values())):  # other ranks hold shards only
            check_restored(self.params(), state["params"])

    def local_shard(self, group: str, name: str, value: Any) -> Any:
        """Return this rank's shard of a tensor of a checkpoint."""
        if is_sharded(value) or group == "loss_scale":
            return value
        if group == "optimizer":
            return self._sharded.local_shard(name, value)
        if group == "critic_optimizer":
            return value if self._critic_sharded is None else self._critic_sharded.local_shard(name, value)
        return shard_like(value, self.critic.state_dict()[name] if group == "critic" else self._params[name])


def zero_objective(out: Outputs) -> Terms:
    """The objective of a rank with an empty share."""
    return Terms((out.logp if out.rating is None else out.rating).sum(), {})


# ---- sharding a model -----------------------------------------------------------------------------------
