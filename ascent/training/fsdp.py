"""A learner whose state is sharded over the ranks by FSDP2: parameters, gradients, moments, reference.

In addition every rank has a whole copy of the model, in the compute dtype, for its rollout engine. It is gathered when
the engine loads. FSDP2 gathers the parameters of a layer while the layer runs, and reduces its gradients to shards by
sums rather than means, because the weights of a batch are computed over all of it. LoRA adapters are replicated on
every rank; the frozen model below them is sharded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from ascent.core.errors import ConfigError
from ascent.core.protocols import Objective, TakeStep, UpdateResult, ValueLoss
from ascent.core.types import Batch, Outputs, Rollouts, Terms
from ascent.core.update import Update, global_norm
from ascent.distributed.rank_group import make_buckets
from ascent.distributed.ranks import Ranks, RankZeroOnly
from ascent.models.causal_lm import LanguageModel
from ascent.models.fused_layers import fuse_layers
from ascent.models.lm_head import LMHead
from ascent.models.packed_attention import to_device_async
from ascent.training.compact_adamw import to_float32_state
from ascent.training.language_learner import (
    LanguageCritic,
    LanguageLearner,
    check_params,
    checkpointable_layers,
    most_precise,
)
from ascent.training.learner import check_restored
from ascent.training.micro_batches import critic_bytes, plan_micro_batches, state_bytes
from ascent.training.packing import ForwardModule, action_states, last_states, scatter_tokens, to_device
from ascent.training.sharded_checkpoint import ShardedWrite, ShardWriter

Groups = dict[str, dict[str, Tensor]]
LORA_PREFIX = "lora_"
"""In the name of every parameter that peft adds."""
BUCKET_NUMEL = 2**24
"""Minimum number of parameters of the layers that are gathered at once."""
MAX_UNSHARDED_FRACTION = 0.1
"""Fraction of the GPU memory that float32 parameters may need to stay gathered until the backward pass."""


class ShardedForward(ForwardModule):
    """The forward pass of a sharded model.

    FSDP2 ignores parameters that functional_call substitutes. So other values are copied into the shards for a pass,
    and the present ones are copied back afterwards.
    """

    shards: dict[str, Any]
    """The shards of the trained parameters. Between passes the modules may hold gathered parameters."""

    def forward(self, batch: Rollouts, read: Callable[[LMHead, Tensor], Any], states: Any = None) -> Any:
        """Run the forward pass. The outputs are cloned if they are views, which FSDP2 does not support."""
        output = super().forward(batch, read, states)
        return tuple(map(_without_view, output)) if isinstance(output, tuple) else _without_view(output)

    def with_params(self, params: Iterable[Tensor], batch: Rollouts, read: Callable[[LMHead, Tensor], Any]) -> Any:
        present = [p.detach().clone() for p in self.shards.values()]
        self.fill(params)
        try:
            with torch.no_grad():
                return _clone_head(self(batch, read))
        finally:
            self.fill(present)

    @torch.no_grad()
    def fill(self, values: Iterable[Any]) -> None:
        """Copy values into the shards and free the gathered old ones."""
        for p, value in zip(self.shards.values(), values, strict=True):
            _local(p).copy_(_local(value))
        self.reshard()  # type: ignore[operator]

    @torch.no_grad()
    def gather_into(self, whole: dict[str, Tensor], size: int) -> None:
        """Gather the trained parameters of all ranks into whole tensors, in the compute dtype."""
        if size == 1:
            torch._foreach_copy_([whole[name] for name in self.shards], [_local(p) for p in self.shards.values()])
            return
        for bucket in make_buckets([ParameterShard(p, whole[name], size) for name, p in self.shards.items()]):
            lengths = [shard.length for shard in bucket]
            local = whole[next(iter(whole))].new_zeros(sum(lengths))
            slots = zip(local.split(lengths), bucket, strict=True)
            used = [slot[: shard.local.numel()] for slot, shard in slots]
            torch._foreach_copy_(used, [shard.local.reshape(-1) for shard in bucket])
            gathered = local.new_empty(size * len(local)).split(len(local))
            dist.all_gather(list(gathered), local)
            targets, sources = [], []
            for rank, buffer in enumerate(gathered):
                for slot, shard in zip(buffer.split(lengths), bucket, strict=True):
                    targets.append(shard.whole[rank * shard.length : (rank + 1) * shard.length])
                    sources.append(slot[: len(targets[-1])])
            torch._foreach_copy_(targets, sources)


class ParameterShard:
    """The local shard of a parameter and the whole tensor. Ranks have equal numbers of rows, the last ones fewer."""

    def __init__(self, shard: Any, whole: Tensor, world_size: int):
        self.local, self.whole = _local(shard), whole.view(-1)
        self.length = whole.numel()
        if _is_sharded(shard):
            self.length = -(-len(whole) // world_size) * whole[0].numel()

    def numel(self) -> int:
        return self.length


def _without_view(output: Any) -> Any:
    return output.clone() if isinstance(output, Tensor) and output._is_view() else output


def _clone_head(output: Any) -> Any:
    """Clone a head, so that it stays valid after the model is resharded."""
    if not (isinstance(output, tuple) and isinstance(output[0], LMHead)):
        return output
    head, hidden = output
    bias = None if head.bias is None else head.bias.detach().clone()
    return LMHead(head.weight.detach().clone(), bias, head.scale, head.cap), hidden


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
        self.local_params = [_local(p).detach() if _is_sharded(p) else p for p in parameters]
        self.optimizer = update.optimizer(self.local_params)
        if self.optimizer is not None:
            self.optimizer.norm = self.norm  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def take_gradients(self) -> None:
        """Take the gradients that FSDP2 has reduced."""
        for local, p in zip(self.local_params, self.params, strict=True):
            local.grad = None if p.grad is None else _local(p.grad)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the whole gradient."""
        pairs = [(local.grad, p) for local, p in zip(self.local_params, self.params, strict=True)]
        sharded_grads = [grad for grad, p in pairs if grad is not None and _is_sharded(p)]
        replicated_grads = [grad for grad, p in pairs if grad is not None and not _is_sharded(p)]
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
        return _from_local_like(value, p) if value.dim() and _is_sharded(p) else value

    def local_shard(self, name: str, value: Any) -> Any:
        """Return this rank's shard of optimizer state."""
        p = self.params[int(name.split(".", 1)[0])]
        return value if _is_sharded(value) else _shard_like(value, p) if value.dim() else value.to(p.device, copy=True)

    def restore(self, name: str, value: Any) -> None:
        assert self.optimizer is not None
        index, key = name.split(".", 1)
        self.optimizer.state[self.local_params[int(index)]][key] = _local(self.local_shard(name, value))


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
        if replicated := [p for p in optimizer.params if not _is_sharded(p)]:
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
                full = _gather_full(value)  # a collective
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
                _local(params[name]).copy_(_local(self.local_shard("critic", name, value)))
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
                check_restored({name: _local(p)}, {name: _local(self.local_shard(group, name, full[name]))})
        if not any(map(_is_sharded, state["params"].values())):  # other ranks hold shards only
            check_restored(self.params(), state["params"])

    def local_shard(self, group: str, name: str, value: Any) -> Any:
        """Return this rank's shard of a tensor of a checkpoint."""
        if _is_sharded(value) or group == "loss_scale":
            return value
        if group == "optimizer":
            return self._sharded.local_shard(name, value)
        if group == "critic_optimizer":
            return value if self._critic_sharded is None else self._critic_sharded.local_shard(name, value)
        return _shard_like(value, self.critic.state_dict()[name] if group == "critic" else self._params[name])


def zero_objective(out: Outputs) -> Terms:
    """The objective of a rank with an empty share."""
    return Terms((out.logp if out.rating is None else out.rating).sum(), {})


def _gather_full(value: Any) -> Tensor:
    """Gather a sharded tensor. A collective."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "to_local")


def _local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _from_local_like(value: Tensor, like: Any) -> Any:
    """Make a DTensor from a local shard, with the sharding of another tensor."""
    from torch.distributed.tensor import DTensor

    mesh, how = like.device_mesh, like.placements
    return DTensor.from_local(value, mesh, how, run_check=False, shape=like.shape, stride=like.stride())


def _shard_like(value: Tensor, like: Any) -> Any:
    """Shard a whole tensor, which every rank has, like another one."""
    from torch.distributed.tensor import distribute_tensor

    if not _is_sharded(like):
        return value.to(like.device, like.dtype, copy=True)
    value = value.to(like.device, like.dtype)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


# ---- sharding a model -----------------------------------------------------------------------------------


class MetaDeviceCopy:
    """Copies a model to be sharded layer by layer, so that memory never holds two whole copies."""

    def __init__(self, whole: LanguageModel):
        self.stored, self.device = whole.full_precision_params, whole.device
        self.has_adapters = any(LORA_PREFIX in name for name in whole.trained())
        self.names = {id(p): name for name, p in whole.model.named_parameters()}
        self.originals: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """By the id of an empty parameter: itself and the original."""

    def copy_to_meta(self, module: Any, **memo: Any) -> Any:
        """Copy a module with parameters on the meta device. Trained ones are in float32 or better."""
        empty = {}
        for p in module.parameters():
            dtype = torch.promote_types(p.dtype, torch.float32) if p.requires_grad else p.dtype
            empty[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), p.requires_grad)
            self.originals[id(empty[id(p)])] = empty[id(p)], p
        return copy.deepcopy(module, empty | {id(value): value for value in memo.values()})

    @torch.no_grad()
    def fill(self, part: nn.Module) -> None:
        """Fill empty parameters with their values, from the stored checkpoint if that is more precise."""
        filled: dict[int, nn.Parameter] = {}
        for module in part.modules():
            for name, p in module._parameters.items():
                if p is None or id(p) not in self.originals:
                    continue
                if id(p) not in filled:
                    original = self.originals[id(p)][1]
                    value = most_precise(self.stored, self.names[id(original)], original)
                    filled[id(p)] = nn.Parameter(value.to(original.device, p.dtype, copy=True), p.requires_grad)
                module._parameters[name] = filled[id(p)]


def shard_layers(root: Any, layers: Iterable[Any], source: MetaDeviceCopy, dtype: torch.dtype, size: int) -> None:
    """Shard a module on the meta device layer by layer, with a compute dtype. Adapters are replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if torch.finfo(dtype).bits < 32:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh, reshard = init_device_mesh(source.device.type, (size,)), reshards_after_forward(root, source.device)
    for group in (*layer_groups(layers), [root]):
        for part in group:
            source.fill(part)
        adapters = {p for part in group for p in part.parameters() if source.has_adapters and p.requires_grad}
        reshard_after = None if group == [root] else reshard
        fully_shard(group, mesh=mesh, mp_policy=policy, ignored_params=adapters, reshard_after_forward=reshard_after)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def layer_groups(layers: Iterable[Any]) -> Iterator[list[Any]]:
    """Group layers that are gathered at once, with at least `BUCKET_NUMEL` parameters per group."""
    group: list[Any] = []
    for layer in layers:
        group.append(layer)
        if sum(p.numel() for part in group for p in part.parameters()) >= BUCKET_NUMEL:
            yield group
            group = []
    if group:
        yield group


def reshards_after_forward(module: nn.Module, device: torch.device) -> bool:
    """Return whether gathered parameters are freed before the backward pass; not if the GPU has enough memory."""
    if device.type != "cuda":
        return True
    max_bytes = MAX_UNSHARDED_FRACTION * torch.cuda.get_device_properties(device).total_memory
    return sum(p.numel() * 4 for p in module.parameters()) > max_bytes


def shard_model(whole: LanguageModel, size: int) -> Any:
    """Shard a model. The returned module has to be called for every pass."""
    source = MetaDeviceCopy(whole)
    lm = source.copy_to_meta(whole, tokenizer=whole.tokenizer)
    forward, layers = ShardedForward(lm), checkpointable_layers(lm.backbone)
    shard_layers(forward, layers, source, whole.model.dtype, size)
    whole.full_precision_params = {}
    forward.shards = lm.trained()
    return forward
