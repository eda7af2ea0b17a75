"""Sharding a model by FSDP2, layer by layer, and the forward pass of a sharded model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ascent.core.types import Rollouts
from ascent.distributed.rank_group import make_buckets
from ascent.models.causal_lm import LanguageModel
from ascent.models.lm_head import LMHead
from ascent.training.language_learner import checkpointable_layers
from ascent.training.master_weights import most_precise
from ascent.training.packing import ForwardModule

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
            local_tensor(p).copy_(local_tensor(value))
        self.reshard()  # type: ignore[operator]

    @torch.no_grad()
    def gather_into(self, whole: dict[str, Tensor], size: int) -> None:
        """Gather the trained parameters of all ranks into whole tensors, in the compute dtype."""
        if size == 1:
            torch._foreach_copy_([whole[name] for name in self.shards], [local_tensor(p) for p in self.shards.values()])
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
        self.local, self.whole = local_tensor(shard), whole.view(-1)
        self.length = whole.numel()
        if is_sharded(shard):
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


def gather_full(value: Any) -> Tensor:
    """Gather a sharded tensor. A collective."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def is_sharded(value: Any) -> bool:
    return hasattr(value, "to_local")


def local_tensor(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def dtensor_like(value: Tensor, like: Any) -> Any:
    """Make a DTensor from a local shard, with the sharding of another tensor."""
    from torch.distributed.tensor import DTensor

    mesh, how = like.device_mesh, like.placements
    return DTensor.from_local(value, mesh, how, run_check=False, shape=like.shape, stride=like.stride())


def shard_like(value: Tensor, like: Any) -> Any:
    """Shard a whole tensor, which every rank has, like another one."""
    from torch.distributed.tensor import distribute_tensor

    if not is_sharded(like):
        return value.to(like.device, like.dtype, copy=True)
    value = value.to(like.device, like.dtype)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


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
