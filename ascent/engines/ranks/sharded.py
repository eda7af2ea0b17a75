"""A language model whose trained state is spread over the ranks by FSDP2: parameters, gradients, moments, reference.

Beside its shards every rank has a whole copy of the model, in the type that is computed with. Its sampler draws from
that copy, which is gathered anew when the sampler loads. FSDP2 gathers the parameters of a layer while the layer works,
and sums its gradients into shards. Sums, never means: the weights of a batch were computed over all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ascent.core.protocols import Learner, Objective, Stepped, TakeStep
from ascent.core.types import Batch, Rollouts, Terms
from ascent.core.update import Update
from ascent.engines.language.learning.head import Head
from ascent.engines.language.learning.learner import LanguageLearner, layers_of, load_params
from ascent.engines.language.learning.plan import plan_of
from ascent.engines.language.learning.states import Forward, place
from ascent.engines.ranks.ranks import Ranks
from ascent.policies.causal_lm import LanguageModel

Groups = dict[str, dict[str, Tensor]]


class ShardedForward(Forward):
    """Every forward pass, in shards.

    FSDP2 holds on to a module's own parameters, so others in their place would not be seen: the current policy would
    pass for its reference. Other values are copied into the shards, and the own ones back.
    """

    own: list[Any]
    """The shards of the trained parameters. Between passes the model itself may hold what was gathered of them."""

    def instead(self, params: Iterable[Tensor], batch: Rollouts, read: Callable[[Head, Tensor], Any]) -> Any:
        own = self.own
        now = [p.detach().clone() for p in own]
        self.fill(own, params)
        try:
            with torch.no_grad():
                return _kept(self(batch, read))
        finally:
            self.fill(own, now)

    @torch.no_grad()
    def fill(self, own: Iterable[Any], values: Iterable[Any]) -> None:
        """These values into the shards; what was gathered of the old ones is forgotten."""
        for p, value in zip(own, values, strict=True):
            p.to_local().copy_(value.to_local())
        self.reshard()  # type: ignore[operator]


def _kept(found: Any) -> Any:
    """A head that stays whole when the model's is in shards again."""
    if not (isinstance(found, tuple) and isinstance(found[0], Head)):
        return found
    head, hidden = found
    bias = None if head.bias is None else head.bias.detach().clone()
    return Head(head.weight.detach().clone(), bias, head.scale, head.cap), hidden


class ShardedLearner(LanguageLearner):
    """Trains a language model in shards; every rank calls every operation, in the same order."""

    placement = "each trains a part of the parameters, in shards, and samples from a whole copy"
    alone = False

    def __init__(
        self, whole: LanguageModel, update: Update, reference: bool, outputs: frozenset[str], micro_batch: int,
        checkpointing: bool, ranks: Ranks,
    ):  # fmt: skip
        self.whole_lm, narrow = whole, whole.model.dtype
        lm = widened(whole)
        forward = shard(lm, narrow, ranks.size)
        super().__init__(lm, update, reference, outputs, 1, checkpointing)  # 1: how much fits is asked below
        self.ranks, self.spread = ranks, ranks.size
        self._forward: Any = forward
        self.micro_batch = micro_batch
        self._room = None if micro_batch else plan_of(whole, checkpointing, reference)

    def params(self) -> dict[str, Tensor]:
        """Those of the whole copy, as they were when the sampler last loaded."""
        return self.whole_lm.trained()

    @torch.no_grad()
    def refresh(self) -> None:
        whole = self.whole_lm.trained()
        for name, p in self._params.items():
            whole[name].copy_(_full(p))

    def mine(self, batch: Batch) -> Iterable[Batch]:
        """As many micro-batches as any rank has, because ranks meet inside of each: the last ones may be empty."""
        parts = list(super().mine(batch))
        empty = place(batch.share(slice(0, 0)), self.lm.device)
        return parts + [empty] * (self.ranks.most(len(parts)) - len(parts))

    def sum_gradients(self, parameters: list[Tensor]) -> None:
        """FSDP2 has summed them already."""

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> Stepped:
        def plain(learner: Learner, mini: Batch, objective: Objective) -> tuple[Terms, dict[str, Tensor]]:
            terms, report = update(learner, mini, objective)
            return terms, {name: _full(value) for name, value in report.items()}

        return super().step(mini, objective, plain)

    def state(self) -> Groups:
        """As one process writes it: whole tensors, in the type of the model, and in float32 beside it."""
        groups = {group: {name: _full(t) for name, t in own.items()} for group, own in super().state().items()}
        narrow = self.whole_lm.model.dtype
        if narrow != next(iter(groups["params"].values())).dtype:
            groups["wide"] = groups["params"]
            groups["params"] = {name: t.to(narrow) for name, t in groups["wide"].items()}
        return groups

    @torch.no_grad()
    def restore(self, state: Groups) -> None:
        load_params(self.whole_lm.trained(), state["params"])
        own, values = self._params, state.get("wide", state["params"])
        self._forward.fill(own.values(), [_cut(values[name], p) for name, p in own.items()])
        if "reference" in state and self.kept is not None:
            self.moved = True
            self.kept = [_cut(state["reference"][name], p) for name, p in own.items()]
        assert self.optimizer is not None
        moved = list(own.values())
        for name, value in state["optimizer"].items():
            index, key = name.split(".", 1)
            p = moved[int(index)]
            self.optimizer.state[p][key] = _cut(value, p) if value.shape == p.shape and value.dim() else value.clone()


def _full(value: Any) -> Tensor:
    """A tensor that is in shards, in one piece: every rank has to ask for it."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _cut(value: Tensor, like: Any) -> Any:
    """A whole tensor, in shards as another one is; every rank has all of it."""
    from torch.distributed.tensor import distribute_tensor

    value = value.to(like.device, like.dtype)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def widened(whole: LanguageModel) -> LanguageModel:
    """A copy whose parameters are in float32 or better, as they were stored where that was finer."""
    stored, whole.exact = whole.exact, {}
    lm = copy.deepcopy(whole, {id(whole.tokenizer): whole.tokenizer})
    for name, p in lm.model.named_parameters():
        exact = stored.get(name)
        same = exact is not None and torch.equal(exact.to(p.dtype), p)
        p.data = (exact if exact is not None and same else p.data).to(torch.promote_types(p.dtype, torch.float32))
    return lm


def shard(lm: LanguageModel, narrow: torch.dtype, size: int) -> Any:
    """Cut the model's parameters into shards, layer by layer; what is returned has to be called for every pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh, policy = init_device_mesh(lm.device.type, (size,)), MixedPrecisionPolicy()
    if torch.finfo(narrow).bits < 32:
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32, cast_forward_inputs=False)
    forward = ShardedForward(lm)
    for part in (*layers_of(lm.backbone), forward):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in forward.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
    forward.own = list(lm.trained().values())
    return forward
