"""A language model whose trained state is spread over the ranks by FSDP2: parameters, gradients, moments, reference.

Beside its shards every rank has a whole copy of the model, in the type that is computed with. Its sampler draws from
that copy, which is gathered anew when the sampler loads. FSDP2 gathers the parameters of a layer while the layer works,
and sums its gradients into shards. Sums, never means: the weights of a batch were computed over all of it. Adapters
(LoRA) are few: they are whole on every rank, and the frozen model below them is in shards.
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
"""Parameters of layers that are gathered at once, at least."""
MAX_UNSHARDED_FRACTION = 0.1
"""Of a GPU's memory: what parameters in float32 may take to stay there, in their own type, until the backward pass."""


class ShardedForward(ForwardModule):
    """Every forward pass, in shards.

    FSDP2 holds on to a module's own parameters, so others in their place would not be seen: the current policy would
    pass for its reference. Other values are copied into the shards, and the own ones back.
    """

    own: dict[str, Any]
    """The shards of the trained parameters. Between passes the model itself may hold what was gathered of them."""

    def forward(self, batch: Rollouts, read: Callable[[LMHead, Tensor], Any], states: Any = None) -> Any:
        """FSDP2 cannot follow a view of something else, so what is returned is none."""
        found = super().forward(batch, read, states)
        return tuple(map(_without_view, found)) if isinstance(found, tuple) else _without_view(found)

    def with_params(self, params: Iterable[Tensor], batch: Rollouts, read: Callable[[LMHead, Tensor], Any]) -> Any:
        now = [p.detach().clone() for p in self.own.values()]
        self.fill(params)
        try:
            with torch.no_grad():
                return _kept(self(batch, read))
        finally:
            self.fill(now)

    @torch.no_grad()
    def fill(self, values: Iterable[Any]) -> None:
        """These values into the shards; what was gathered of the old ones is forgotten."""
        for p, value in zip(self.own.values(), values, strict=True):
            _local(p).copy_(_local(value))
        self.reshard()  # type: ignore[operator]

    @torch.no_grad()
    def gather_into(self, whole: dict[str, Tensor], size: int) -> None:
        """The trained parameters, in one piece: all ranks' parts at once, in the type that is computed with."""
        if size == 1:
            torch._foreach_copy_([whole[name] for name in self.own], [_local(p) for p in self.own.values()])
            return
        for bucket in make_buckets([ParameterShard(p, whole[name], size) for name, p in self.own.items()]):
            mine = whole[next(iter(whole))].new_zeros(sum(piece.length for piece in bucket))
            places = list(mine.split([piece.length for piece in bucket]))
            own = [its[: piece.local.numel()] for its, piece in zip(places, bucket, strict=True)]
            torch._foreach_copy_(own, [piece.local.reshape(-1) for piece in bucket])
            every = mine.new_empty(size * len(mine))
            dist.all_gather(list(every.split(len(mine))), mine)
            to, of = [], []
            for rank, part in enumerate(every.split(len(mine))):
                for its, piece in zip(part.split([piece.length for piece in bucket]), bucket, strict=True):
                    to.append(piece.whole[rank * piece.length : (rank + 1) * piece.length])
                    of.append(its[: len(to[-1])])
            torch._foreach_copy_(to, of)


class ParameterShard:
    """A parameter's shard here, and the whole of it: of each rank as many rows, and of the last ones fewer."""

    def __init__(self, shard_model: Any, whole: Tensor, size: int):
        self.local, self.whole = _local(shard_model), whole.view(-1)
        self.length = whole.numel()
        if _is_sharded(shard_model):
            self.length = -(-len(whole) // size) * whole[0].numel()

    def numel(self) -> int:
        return self.length


def _without_view(found: Any) -> Any:
    return found.clone() if isinstance(found, Tensor) and found._is_view() else found


def _kept(found: Any) -> Any:
    """A head that stays whole when the model's is in shards again."""
    if not (isinstance(found, tuple) and isinstance(found[0], LMHead)):
        return found
    head, hidden = found
    bias = None if head.bias is None else head.bias.detach().clone()
    return LMHead(head.weight.detach().clone(), bias, head.scale, head.cap), hidden


class ShardedCritic(LanguageCritic):
    """A critic whose own backbone is in shards as the policy's is, or which reads the policy's. Its head is whole."""

    def __init__(self, whole: LanguageModel, shared: bool, size: int):
        source = HollowModel(whole)
        super().__init__(whole, shared, source.hollow)
        self._policy: list[Any] = []
        if self.own is not None:
            shard_layers(self.own, checkpointable_layers(self.own), source, whole.model.dtype, size)
            self.working = self.stepped = [p for p in self.own.parameters() if p.requires_grad]

    def follow(self, forward: ShardedForward) -> None:
        """Read values off this policy's hidden states, if it has no backbone of its own."""
        if self.own is None:
            self._policy, self._lm = [forward], list(forward._lm)

    def forward(self, batch: Rollouts) -> Float[Tensor, "prompt sample state"]:
        if self.own is not None:
            return super().forward(batch)
        states = action_states(batch) | last_states(batch)
        hidden = self._policy[0](batch, lambda _, hidden: hidden, states)
        return scatter_tokens(self.read(hidden), to_device_async(states, batch.mask.device))


class ShardedOptimizer:
    """What an optimizer moves: on this rank's part of each parameter, as plain tensors. That takes the host no time."""

    def __init__(self, parameters: list[Any], update: Update, ranks: Ranks):
        self.every, self.ranks = parameters, ranks
        self.own = [_local(p).detach() if _is_sharded(p) else p for p in parameters]
        self.optimizer = update.optimizer(self.own)
        if self.optimizer is not None:
            self.optimizer.norm = self.norm  # type: ignore[attr-defined]

    def forget(self) -> None:
        for p in self.every:
            p.grad = None

    def take(self) -> None:
        """The gradients that FSDP2 has left."""
        for own, p in zip(self.own, self.every, strict=True):
            own.grad = None if p.grad is None else _local(p.grad)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of the whole gradient, of which every rank has a part."""
        flags = [(own.grad, _is_sharded(p)) for own, p in zip(self.own, self.every, strict=True)]
        parts, whole = ([g for g, cut in flags if g is not None and cut is kind] for kind in (True, False))
        if self.ranks.world_size == 1 or not parts:
            return global_norm(gradients)
        square = global_norm(parts).double().square()
        self.ranks.all_reduce([square])
        return (square + (global_norm(whole).double().square() if whole else 0.0)).sqrt().to(gradients[0].dtype)

    def shard_state(self, name: str, value: Tensor) -> Any:
        """What the optimizer keeps of a parameter, in shards as that one is."""
        p = self.every[int(name.split(".", 1)[0])]
        return _from_local_like(value, p) if value.dim() and _is_sharded(p) else value

    def local_shard(self, name: str, value: Any) -> Any:
        """What this rank holds of that."""
        p = self.every[int(name.split(".", 1)[0])]
        return value if _is_sharded(value) else _shard_like(value, p) if value.dim() else value.to(p.device, copy=True)

    def restore(self, name: str, value: Any) -> None:
        assert self.optimizer is not None
        index, key = name.split(".", 1)
        self.optimizer.state[self.own[int(index)]][key] = _local(self.local_shard(name, value))


class ShardedLearner(LanguageLearner):
    """Trains a language model in shards; every rank calls every operation, in the same order."""

    placement = "each trains a part of the parameters, in shards, and samples from a whole copy"
    computes_alone = False

    def __init__(
        self, whole: LanguageModel, update: Update, reference: bool, outputs: frozenset[str], micro_batch: int,
        checkpointing: bool, ranks: Ranks, choice: Any = None, gather: float = math.inf,
    ):  # fmt: skip
        """`choice`: the critic of the algorithm, where there is one. `gather`: bytes that rank 0 may write alone."""
        if whole.model.dtype == torch.float16:  # the shards are in float32
            raise ConfigError(
                "--policy.dtype float16 with shards: its gradients are not scaled. Set float32 or bfloat16"
            )
        on = choice is not None and choice.enabled
        if whole.device.type == "cuda" and whole.fuses:
            fuse_layers(whole.model)
        critic, step = (ShardedCritic(whole, choice.shared, ranks.world_size), choice.update) if on else (None, None)
        forward = shard_model(whole, ranks.world_size)
        if critic is not None:
            critic.follow(forward)
        super().__init__(forward._lm[0], update, reference, outputs, 1, checkpointing, critic, step)
        self.ranks, self.num_shards = ranks, ranks.world_size
        self._sharded = ShardedOptimizer(self.trainable(), update, ranks)
        self.optimizer = self._sharded.optimizer
        self._critic_sharded = None if step is None else ShardedOptimizer(self.critic.trained(), step, ranks)
        self.critic_optimizer = None if self._critic_sharded is None else self._critic_sharded.optimizer
        self.whole_lm = whole
        self._forward: Any = forward
        self._stale = False
        """Have the parameters moved since the whole copy was gathered?"""
        self.writing = ShardWriter(ranks)
        self.writes_shards = state_bytes(whole) + critic_bytes(critic) > gather
        self.micro_batch = micro_batch
        self._room = (
            None if micro_batch else plan_micro_batches(whole, checkpointing, reference, critic, ranks.world_size)
        )

    def params(self) -> dict[str, Tensor]:
        """Those of the whole copy, as they were when the sampler last loaded."""
        return self.whole_lm.trained()

    def refresh_params(self) -> None:
        if self._stale:
            self._forward.gather_into(self.params(), self.num_shards)
            self._stale = False

    def local_microbatches(self, batch: Batch) -> Iterable[Batch]:
        """As many micro-batches as any rank has, because ranks meet inside of each: the last ones may be empty."""
        parts = list(super().local_microbatches(batch))
        empty = to_device(batch.sub_batch(slice(0, 0)), self.lm.device)
        return parts + [empty] * (self.ranks.all_reduce_max(len(parts)) - len(parts))

    def all_reduce_gradients(self, parameters: list[Tensor]) -> None:
        """FSDP2 has summed those in shards already."""
        critic = self._critic_sharded
        moved = critic if critic is not None and parameters[0] is critic.own[0] else self._sharded
        if whole := [p for p in moved.every if not _is_sharded(p)]:
            super().all_reduce_gradients(whole)
        moved.take()

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> UpdateResult:
        self._stale = True
        return super().step(mini, objective, update)

    def fit_critic(self, mini: Batch, loss: ValueLoss) -> tuple[Tensor, Tensor]:
        assert self._critic_sharded is not None
        self._critic_sharded.forget()
        return super().fit_critic(mini, loss)

    def on_rank_zero(self, name: str, mini: Batch, objective: Objective = lambda _, out: zero_objective(out)) -> Any:
        """Rank 0 computes the whole batch; the others go through as many passes, with nothing in them."""
        ranks, self.ranks = self.ranks, RankZeroOnly(self.ranks)
        try:
            return getattr(self, name)(mini, objective)
        finally:
            self.ranks = ranks

    def state(self) -> Groups:
        """As one process writes it: whole tensors, in the type of the model, and in float32 beside it. On rank 0."""
        groups: Groups = {}
        for group, own in self._in_shards().items():
            groups[group] = {}
            for name, value in own.items():
                whole = _gather_full(value)  # every rank has to ask
                if self.ranks.rank == 0:
                    groups[group][name] = whole.cpu()
        if self._rounded:
            groups["wide"] = groups["params"]
            groups["params"] = {name: t.to(self.whole_lm.model.dtype) for name, t in groups["wide"].items()}
        return groups

    def _in_shards(self) -> Groups:
        """The state as it is held here. What an optimizer keeps is cut as the parameters are."""
        groups = super().state()
        for which, moved in (
            ("optimizer", self._sharded),
            ("critic_optimizer", self._critic_sharded),
        ):
            if moved is not None:
                groups[which] = {name: moved.shard_state(name, value) for name, value in groups[which].items()}
        return groups

    def stage_parts(self, aside: Path) -> ShardedWrite | None:
        """Copy what this rank holds to the host, and write it there: on rank 0 whoever asks, on others a thread."""
        own = self._in_shards()
        if self._rounded:
            own["wide"] = own.pop("params")
        return self.writing.stage(own, aside, str(self.whole_lm.model.dtype).removeprefix("torch."))

    def wait_for_writes(self) -> None:
        self.writing.saver.wait()

    @property
    def _rounded(self) -> bool:
        """Does the model compute with rounded copies of the trained parameters?"""
        return self.whole_lm.model.dtype.itemsize < 4 and not self._adapters

    @property
    def _adapters(self) -> bool:
        return any(LORA_PREFIX in name for name in self._params)

    @torch.no_grad()
    def restore(self, state: Groups) -> None:
        own = self._params
        state = to_float32_state(state, list(own))
        check_params(own, state["params"])
        values = state.get("wide", state["params"])
        self._forward.fill([self.local_shard("params", name, values[name]) for name in own])
        self._stale = True
        self.refresh_params()
        if "reference" in state and self.reference_params is not None:
            self.reference_moved = True
            self.reference_params = [self.local_shard("reference", name, state["reference"][name]) for name in own]
        if self.critic is not None:
            own = self.critic.state_dict()
            check_params(own, state["critic"])
            for name, value in state["critic"].items():
                _local(own[name]).copy_(_local(self.local_shard("critic", name, value)))
            if self.critic.own is not None:
                self.critic.own.reshard()
        for name, value in state["optimizer"].items():
            self._sharded.restore(name, value)
        for name, value in state.get("critic_optimizer", {}).items():
            assert self._critic_sharded is not None
            self._critic_sharded.restore(name, value)
        saved = {"params": (self._params, values)}
        saved |= {} if self.critic is None else {"critic": (self.critic.state_dict(), state["critic"])}
        for group, (own, whole) in saved.items():
            for name, p in own.items():
                check_restored({name: _local(p)}, {name: _local(self.local_shard(group, name, whole[name]))})
        if not any(map(_is_sharded, state["params"].values())):  # other ranks keep their shards alone
            check_restored(self.params(), state["params"])

    def local_shard(self, group: str, name: str, value: Any) -> Any:
        """What this rank holds of a tensor of a checkpoint."""
        if _is_sharded(value) or group == "loss_scale":
            return value
        if group == "optimizer":
            return self._sharded.local_shard(name, value)
        if group == "critic_optimizer":
            return value if self._critic_sharded is None else self._critic_sharded.local_shard(name, value)
        return _shard_like(value, self.critic.state_dict()[name] if group == "critic" else self._params[name])


def zero_objective(out: Outputs) -> Terms:
    """The objective of a rank that has none of a batch, and goes along."""
    return Terms((out.logp if out.rating is None else out.rating).sum(), {})


def _gather_full(value: Any) -> Tensor:
    """A tensor that is in shards, in one piece: every rank has to ask for it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "to_local")


def _local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _from_local_like(value: Tensor, like: Any) -> Any:
    """A rank's part of a tensor that is in shards as another one is."""
    from torch.distributed.tensor import DTensor

    mesh, how = like.device_mesh, like.placements
    return DTensor.from_local(value, mesh, how, run_check=False, shape=like.shape, stride=like.stride())


def _shard_like(value: Tensor, like: Any) -> Any:
    """A whole tensor, in shards as another one is; every rank has all of it."""
    from torch.distributed.tensor import distribute_tensor

    if not _is_sharded(like):
        return value.to(like.device, like.dtype, copy=True)
    value = value.to(like.device, like.dtype)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


# ---- cutting a model -----------------------------------------------------------------------------------


class HollowModel:
    """A model whose parameters are copied layer by layer, so that it is never there twice as a whole."""

    def __init__(self, whole: LanguageModel):
        self.stored, self.device = whole.exact, whole.device
        self.adapted = any(LORA_PREFIX in name for name in whole.trained())
        self.names = {id(p): name for name, p in whole.model.named_parameters()}
        self.own: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """By the identity of an empty parameter: itself, and the one that it stands for."""

    def hollow(self, module: Any, **memo: Any) -> Any:
        """A copy whose parameters are on no device yet. The trained ones are in float32 or better."""
        made = {}
        for p in module.parameters():
            dtype = torch.promote_types(p.dtype, torch.float32) if p.requires_grad else p.dtype
            made[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=dtype, device="meta"), p.requires_grad)
            self.own[id(made[id(p)])] = made[id(p)], p
        return copy.deepcopy(module, made | {id(value): value for value in memo.values()})

    @torch.no_grad()
    def fill(self, part: nn.Module) -> None:
        """Give its empty parameters their values: as they were stored where that was finer, or as they are."""
        made: dict[int, nn.Parameter] = {}
        for module in part.modules():
            for slot, p in module._parameters.items():
                if p is None or id(p) not in self.own:
                    continue
                if id(p) not in made:
                    old = self.own[id(p)][1]
                    value = most_precise(self.stored, self.names[id(old)], old)
                    made[id(p)] = nn.Parameter(value.to(old.device, p.dtype, copy=True), p.requires_grad)
                module._parameters[slot] = made[id(p)]


def shard_layers(root: Any, layers: Iterable[Any], source: HollowModel, narrow: torch.dtype, size: int) -> None:
    """Cut a hollow module into shards, layer by layer: FSDP2 gathers each by itself. Adapters stay whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if torch.finfo(narrow).bits < 32:
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh, again = init_device_mesh(source.device.type, (size,)), reshards_after_forward(root, source.device)
    for group in (*layer_groups(layers), [root]):
        for part in group:
            source.fill(part)
        whole = {p for part in group for p in part.parameters() if source.adapted and p.requires_grad}
        keep = None if group == [root] else again
        fully_shard(group, mesh=mesh, mp_policy=policy, ignored_params=whole, reshard_after_forward=keep)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def layer_groups(layers: Iterable[Any]) -> Iterator[list[Any]]:
    """Layers that are gathered at once: as many as have a bucket of parameters, because every gathering takes time."""
    group: list[Any] = []
    for layer in layers:
        group.append(layer)
        if sum(p.numel() for part in group for p in part.parameters()) >= BUCKET_NUMEL:
            yield group
            group = []
    if group:
        yield group


def reshards_after_forward(module: nn.Module, device: torch.device) -> bool:
    """Is what was gathered let go between a forward and a backward pass? Not where a GPU can spare the memory."""
    if device.type != "cuda":
        return True
    room = MAX_UNSHARDED_FRACTION * torch.cuda.get_device_properties(device).total_memory
    return sum(p.numel() * 4 for p in module.parameters()) > room


def shard_model(whole: LanguageModel, size: int) -> Any:
    """The model with its parameters in shards; what is returned has to be called for every pass."""
    source = HollowModel(whole)
    lm = source.hollow(whole, tokenizer=whole.tokenizer)
    forward, layers = ShardedForward(lm), checkpointable_layers(lm.backbone)
    shard_layers(forward, layers, source, whole.model.dtype, size)
    whole.exact = {}
    forward.own = lm.trained()
    return forward
