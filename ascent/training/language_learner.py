"""The learner of language models: packed sequences, shared prompts, chunked logits."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ascent.core.errors import ConfigError
from ascent.core.protocols import Objective, TakeStep, UpdateResult, ValueLoss
from ascent.core.types import Batch, Outputs, Rollouts, Terms
from ascent.core.update import Adam, Update
from ascent.distributed.ranks import SINGLE_PROCESS
from ascent.models.causal_lm import LanguageModel
from ascent.models.fused_layers import fuse_layers
from ascent.models.lm_head import LMHead, token_stats
from ascent.models.packed_attention import FlashVarlen, packed_attention_enabled, to_device_async, varlen_kernel
from ascent.ops.cuda_graphs import CudaGraphs
from ascent.training.captured_updates import CapturedBackbone, captured_tokens
from ascent.training.compact_adamw import CompactAdamW, to_compact_state, to_float32_state
from ascent.training.learner import InProcessLearner, check_restored
from ascent.training.loss_scale import LossScale
from ascent.training.master_weights import (
    accumulate_into,
    copy_to_compute_params,
    float32_copies,
    is_half,
    load_params,
    most_precise,
    stored_precision,
)
from ascent.training.micro_batches import (
    COMPACT_BYTES_PER_PARAM,
    STATE_BYTES_PER_PARAM,
    MicroBatchPlan,
    bytes_per_token,
    head_dim_of,
    plan_micro_batches,
)
from ascent.training.packing import (
    ForwardModule,
    action_states,
    computed_tokens,
    hidden_states,
    pack_batch,
    scatter_tokens,
    split_batch,
    targets,
    to_device,
    value_states,
)


class LanguageCritic(nn.Module):
    """V(prompt, tokens so far) = head · hidden, initially 0. The head is in float32 or better.

    A separate backbone is a copy of the policy's initial one. It has the same precision, master weights and trained
    parameters (all, adapters, or the last layers). With a shared backbone, only the head is added.
    """

    def __init__(self, lm: LanguageModel, shared: bool, copy_backbone: Callable[[Any], Any] = copy.deepcopy):
        """`copy_backbone` copies the policy's backbone."""
        super().__init__()
        weight = lm.model.get_output_embeddings().weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._lm = [lm]  # in a list, so that a checkpoint of the critic does not hold the policy
        self.separate_backbone = None if shared else copy_backbone(lm.backbone)
        self.head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        named = () if self.separate_backbone is None else self.separate_backbone.named_parameters()
        trained: dict[str, Tensor] = {name: p for name, p in named if p.requires_grad}
        self.compute_params = list(trained.values())
        has_masters = any(map(is_half, self.compute_params))
        self.master_params = (
            float32_copies(stored_precision(lm, trained), trained) if has_masters else self.compute_params
        )
        """The trained parameters of the backbone, or their float32 master weights."""
        self.captured: CapturedBackbone | None = None

    @property
    def backbone(self) -> nn.Module:
        return self._lm[0].backbone if self.separate_backbone is None else self.separate_backbone

    def trained(self) -> list[Tensor]:
        """Return the parameters that the optimizer steps."""
        return [*self.head.parameters(), *self.master_params]

    def _by_name(self) -> dict[str, Tensor]:
        names = [name for name, p in self.named_parameters() if p.requires_grad and not name.startswith("head.")]
        return dict(self.head.named_parameters(prefix="head")) | dict(zip(names, self.master_params, strict=True))

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the trained parameters; the others are loaded with the model."""
        return {name: p.detach() for name, p in self._by_name().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # type: ignore[override]
        load_params(self._by_name(), state)
        copy_to_compute_params(self.compute_params, self.master_params)

    def attention(self) -> AbstractContextManager[None]:
        """Enable packed attention in its layers."""
        lm, backbone = self._lm[0], self.separate_backbone
        return packed_attention_enabled(lm.model if backbone is None else backbone, lm.can_share_prompts)

    def forward(self, batch: Rollouts) -> Float[Tensor, "prompt sample state"]:
        """Return V before every action and after the last token of each response; 0 at other states."""
        states = value_states(batch)
        hidden = hidden_states(self._lm[0], batch, states, self.backbone, self.captured)
        return scatter_tokens(self.read(hidden), to_device_async(states, batch.mask.device))

    def read(self, hidden: Float[Tensor, "state width"]) -> Float[Tensor, "state"]:
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


class LanguageLearner(InProcessLearner):
    """Trains a language model in this process.

    bfloat16 parameters have float32 master weights, because steps of 1e-6 would be rounded away. Their gradients are
    accumulated over micro-batches in float32 as well. On a GPU the host syncs once, at the end of an update. The
    reference is a copy of the trained parameters only: the same module is called with them.

    `rounding` is the seed of stochastic rounding; with it, the state has the compact form of `CompactAdamW`.
    """

    captures = True
    """Whether small rows are computed by CUDA graphs on a GPU."""

    def __init__(
        self,
        lm: LanguageModel,
        update: Update,
        reference: bool,
        outputs: frozenset[str],
        micro_batch: int = 0,
        checkpointing: bool = False,
        critic: LanguageCritic | None = None,
        critic_update: Adam | None = None,
        rounding: int | None = None,
    ):
        self.lm, self.outputs, self.micro_batch, self.checkpointing = lm, outputs, micro_batch, checkpointing
        self.unsharded_lm = lm
        """The model with whole parameters; the trained one may be sharded."""
        self._params, self._forward = lm.trained(), ForwardModule(lm)
        self._compute_params = list(self._params.values())
        stored, lm.full_precision_params = lm.full_precision_params, {}
        self._is_half = any(map(is_half, self._compute_params))
        """Whether the parameters are in half precision."""
        has_masters = self._is_half and rounding is None
        self._trainable = float32_copies(stored, self._params) if has_masters else self._compute_params
        self.train_critic(critic, critic_update)
        self.loss_scale = self._next_scale = self.critic_scale = LossScale()
        self.optimizer = update.optimizer(self.trainable())
        self.compact: CompactAdamW | None = None
        if rounding is not None:
            masters = (most_precise(stored, name, p).to(p.device, torch.float32) for name, p in self._params.items())
            self.optimizer = self.compact = CompactAdamW(self.trainable(), masters, self.optimizer, rounding)
        self.reference_params = [p.detach().clone() for p in self._compute_params] if reference else None
        self.reference_moved = False
        self._float32_reference: list[Tensor] | None = None
        """A moving-average reference in float32, if parameters are in half precision."""
        exact = self._compute_params[0].dtype == torch.float64
        self._loss_grad = -torch.ones((), dtype=torch.float64 if exact else torch.float32, device=lm.device)
        if update.full_batch and any(map(is_half, lm.model.parameters())):
            raise ConfigError(  # adapters are in float32 and do not help: log-probs are those of the whole model
                "--update trust-region with parameters in half precision: their rounding is larger than its steps. Set "
                "--policy.dtype float32"
            )
        if checkpointing and not checkpointable_layers(lm.backbone):
            raise ConfigError(
                f"--policy.checkpointing: {type(lm.model).__name__} has no layers to compute again; unset it"
            )
        can_fuse = lm.can_fuse_layers and (lm.device.type == "cuda" or lm.model.dtype == torch.float32)
        if can_fuse and self.computes_alone and not update.full_batch:  # Fisher products differentiate twice
            fuse_layers(lm.model)
            if critic is not None and critic.separate_backbone is not None:
                fuse_layers(critic.separate_backbone)
        per = STATE_BYTES_PER_PARAM if rounding is None else COMPACT_BYTES_PER_PARAM
        self._memory_plan = None if micro_batch else plan_micro_batches(lm, checkpointing, reference, critic, per=per)
        self._captured_backbone = self._capture_backbone(lm.backbone, self._compute_params, self._trainable)
        if critic is not None and critic.separate_backbone is not None:
            critic.captured = self._capture_backbone(
                critic.separate_backbone, critic.compute_params, critic.master_params
            )

    def _capture_backbone(
        self, backbone: nn.Module, compute_params: list[Tensor], master_params: list[Tensor]
    ) -> CapturedBackbone | None:
        """Return the CUDA graphs of small rows, if flash attention is available."""
        lm = self.lm
        if not self.computes_alone or self.compact is not None:  # FSDP2 gathers layers as they run; graphs sum floats
            return None
        flash = varlen_kernel(lm.model.get_input_embeddings().weight.new_empty(0, head_dim_of(lm))) is FlashVarlen
        if not (self.captures and flash and lm.can_share_prompts) or self.checkpointing:
            return None
        tokens = captured_tokens(int(lm.gpu_memory), master_params, bytes_per_token(lm, False))
        tokens = min(tokens, self._memory_plan.tokens if self._memory_plan else tokens)
        return CapturedBackbone(backbone, compute_params, master_params, tokens, CudaGraphs())

    # ---- forward passes -------------------------------------------------------------------------

    @property
    def forward_module(self) -> ForwardModule:
        """The module of all forward passes."""
        return self._forward

    @property
    def plan(self) -> MicroBatchPlan:
        """The limits of a micro-batch."""
        plan = None if self.micro_batch else self._memory_plan
        return MicroBatchPlan(self.micro_batch) if plan is None else plan

    def split(self, batch: Batch) -> Iterator[Batch]:
        plan = self.plan
        parts = split_batch(batch, plan.tokens, self.lm.can_share_prompts, plan.repeat, plan.padded)
        return (to_device(part, self.lm.device) for part in parts)

    def _needs_recompute(self, micro: Batch) -> bool:
        """Return whether a micro-batch that cannot be split further needs activation checkpointing."""
        return self.plan.needs_recompute(computed_tokens(micro, self.lm.can_share_prompts))

    def begin(self, rollouts: Rollouts) -> None:
        """Run the forward pass of an update before the rewards are known, if it is captured.

        The GPU computes it while the host scores responses. It does not change results.
        """
        if self._captured_backbone is not None and not self.micro_batch and self.ranks is SINGLE_PROCESS:
            row = pack_batch(rollouts, action_states(rollouts))
            with self._attention():
                self._captured_backbone.begin(row.ids, row.positions, row.groups)

    def forward(self, micro: Batch) -> Outputs:
        with activation_checkpointing(self.lm.backbone, self._needs_recompute(micro)):
            return super().forward(micro)

    def evaluate(self, batch: Batch) -> Outputs:
        reference = None
        if "kl_full" in self.outputs:
            with torch.no_grad():
                reference = self._reference(batch)
        stats = self._stats(batch, reference=reference, entropy_gradient="entropy" in self.outputs)
        read = partial(_with_values, self.critic, stats) if "value" in self.outputs else stats
        logp, entropy, kl, *values = self._forward(batch, read)
        kl = None if kl is None else scatter_tokens(kl, batch.mask)
        value = F.pad(scatter_tokens(values[0], batch.mask), (0, 1)) if values else None
        return Outputs(scatter_tokens(logp, batch.mask), scatter_tokens(entropy, batch.mask), kl, value=value)

    def _stats(self, batch: Batch, **options: Any) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
        """Return a function from head and hidden states to log-probs, entropies and the KL to another policy."""
        return partial(token_stats, target=targets(batch, self.lm.device), temperature=batch.temperature, **options)

    def _reference(self, batch: Batch) -> tuple[LMHead, Tensor]:
        assert self.reference_params is not None
        return self._forward.with_params(self.reference_params, batch, _head_and_hidden)

    def scored(self, micro: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        stats, reference, value = self._stats(micro), None, None
        scores: dict[str, Any] = {}
        with self._attention():
            if needs & {"logp_ref", "kl_full"}:
                reference = self._reference(micro)
                scores["logp_ref"] = stats(*reference)[0]
            if needs & {"logp_old", "kl_full"}:
                stats = partial(stats, reference=reference if "kl_full" in needs else None)
                shared = "value" in needs and self.critic.separate_backbone is None
                (scores["logp_old"], _, scores["kl_full"]), value = self._policy_scores(micro, stats, shared)
        scores = {name: scatter_tokens(scores[name], micro.mask) for name in needs & scores.keys()}
        if "value" in needs:
            scores["value"] = self.values(micro) if value is None else value
        return scores

    def _policy_scores(self, micro: Batch, stats: Callable[..., Any], shared: bool) -> tuple[Any, Tensor | None]:
        """Return the policy's statistics and, if the critic shares its hidden states, the values of the same pass."""
        if not shared:
            return self._forward(micro, stats), None
        states = value_states(micro)
        acted = to_device_async(action_states(micro)[states], self.lm.device)

        def read(head: LMHead, hidden: Tensor) -> tuple[Any, Tensor]:
            return stats(head, hidden[acted]), self.critic.read(hidden)

        scores, values = self._forward(micro, read, states)
        return scores, scatter_tokens(values, to_device_async(states, micro.mask.device))

    def values(self, batch: Batch) -> Float[Tensor, "prompt sample state"]:
        with self.critic.attention(), activation_checkpointing(self.critic.backbone, self._needs_recompute(batch)):
            return self.critic(batch)

    # ---- steps ----------------------------------------------------------------------------------

    def gradient(self, mini: Batch, objective: Objective) -> Terms:
        """Compute the gradient; in float16 with loss scaling. Only `step` changes the scale of the next update."""
        if self.lm.model.dtype != torch.float16:
            return self._gradient(mini, objective)
        terms, self._next_scale = self.loss_scale.compute(
            lambda scale: self._gradient(mini, objective, scale), self.trainable()
        )
        return terms

    def _gradient(self, mini: Batch, objective: Objective, scale: float = 1.0) -> Terms:
        checkpointing = activation_checkpointing(self.lm.backbone, self.checkpointing)
        # Gradients are accumulated in a precision that keeps small ones.
        compact, params = self.compact, self._compute_params
        accumulation = compact.accumulating() if compact is not None else accumulate_into(self._trainable, params)
        self._forward.captured, unscaled = self._captured_backbone, self._loss_grad
        self._loss_grad = unscaled if scale == 1.0 else unscaled * scale
        try:
            with self._attention(), checkpointing, accumulation:
                return super().gradient(mini, objective)
        finally:
            self._forward.captured, self._loss_grad = None, unscaled

    def step(self, mini: Batch, objective: Objective, update: TakeStep) -> UpdateResult:
        result = super().step(mini, objective, update)
        self.loss_scale = self._next_scale
        self._update_compute_params()
        return result if self.lm.device.type == "cpu" else fetch_result(result, self.lm.device)

    def _update_compute_params(self) -> None:
        """Copy the master weights to the parameters of the model."""
        copy_to_compute_params(self._compute_params, self._trainable)

    def evaluate_objective(self, mini: Batch, objective: Objective) -> Tensor:
        with self._attention():
            return super().evaluate_objective(mini, objective)

    def set_trainable(self, params: list[Tensor]) -> None:
        super().set_trainable(params)
        self._update_compute_params()

    def kl(self, micro: Batch, params: list[Tensor]) -> Float[Tensor, "prompt sample token"]:
        with self._attention():
            policy = self._forward(micro, _head_and_hidden)
            _, _, kl = self._forward.with_params(params, micro, self._stats(micro, reference=policy))
        assert kl is not None
        return scatter_tokens(kl, micro.mask)

    def distributions(self, micro: Batch) -> tuple[Tensor, Tensor]:
        """Return whole distributions at the states before actions; feasible for few tokens only."""
        with self._attention():
            logits = self._forward(micro, LMHead.logits)
        return torch.log_softmax(logits / micro.temperature, -1), micro.loss_mask[micro.mask].unsqueeze(-1)

    def fit_critic(self, mini: Batch, loss: ValueLoss) -> tuple[Tensor, Tensor]:
        critic = self.critic
        checkpointing = activation_checkpointing(critic.backbone, self.checkpointing)
        with critic.attention(), checkpointing, accumulate_into(critic.master_params, critic.compute_params):
            total, norm = super().fit_critic(mini, loss)
        copy_to_compute_params(critic.compute_params, critic.master_params)
        return total.cpu(), norm.cpu()

    def value_gradient(self, mini: Batch, loss: ValueLoss, scale: float = 1.0) -> Tensor:
        if self.lm.model.dtype != torch.float16:
            return super().value_gradient(mini, loss, scale)
        total, self.critic_scale = self.critic_scale.compute(
            lambda scale: super(LanguageLearner, self).value_gradient(mini, loss, scale), self.critic.trained()
        )
        return total

    def _attention(self) -> AbstractContextManager[None]:
        return packed_attention_enabled(self.lm.model, self.lm.can_share_prompts)

    # ---- reference and checkpoints ---------------------------------------------------------------

    @torch.no_grad()
    def mix_reference(self, rate: float) -> None:
        assert self.reference_params is not None
        self.reference_moved = True
        if self._is_half and self._float32_reference is None:
            self._float32_reference = [p.float() for p in self.reference_params]
        average = self._float32_reference or self.reference_params
        masters = self._trainable if self.compact is None else self.compact.masters()
        for mean, master in zip(average, masters, strict=False):  # a value head may follow the parameters
            mean.lerp_(master, rate)
        if average is not self.reference_params:
            torch._foreach_copy_(self.reference_params, average)

    def state(self) -> dict[str, dict[str, Tensor]]:
        groups = super().state()
        if self._trainable is not self._compute_params:
            groups["wide"] = self._masters()
        if self.reference_params is not None and self.reference_moved:
            groups["reference"] = dict(zip(self._params, self._float32_reference or self.reference_params, strict=True))
        if self.lm.model.dtype == torch.float16:
            scales = {"policy": self.loss_scale, "critic": self.critic_scale}
            groups["loss_scale"] = {name: torch.tensor(scale, dtype=torch.float64) for name, scale in scales.items()}
        return groups

    @torch.no_grad()
    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        names = list(self._params)
        state = to_float32_state(state, names) if self.compact is None else to_compact_state(state, names, self.compact)
        exact = state.get("wide", state["params"])
        load_params(self._masters(), exact)
        self._update_compute_params()
        if "reference" in state and self.reference_params is not None:
            self.reference_moved = True
            load_params(dict(zip(self._params, self.reference_params, strict=True)), state["reference"])
            if self._is_half:
                saved, device = state["reference"], self.lm.device
                self._float32_reference = [saved[name].to(device, torch.float32) for name in self._params]
        super().restore(state)
        if scales := state.get("loss_scale"):
            self.loss_scale, self.critic_scale = (LossScale(*scales[name].tolist()) for name in ("policy", "critic"))
            self._next_scale = self.loss_scale
        check_restored(self._masters(), exact)

    def _masters(self) -> dict[str, Tensor]:
        """Return the parameters that the optimizer steps, by name: master weights if there are any."""
        return dict(zip(self._params, self._trainable, strict=True))


def fetch_result(result: UpdateResult, device: torch.device) -> UpdateResult:
    """Copy the report of a step to the host: all scalars in one copy and all per-token values in another."""
    named = result.metrics | result.sums
    numbers = torch.stack([value.to(device) for value in named.values()]).cpu()  # sync
    by_name = dict(zip(named, numbers, strict=True))
    tokens = [result.logp] if result.entropy is None else [result.logp, result.entropy]
    logp, *entropy = torch.stack(tokens).cpu()
    metrics, sums = ({name: by_name[name] for name in names} for names in (result.metrics, result.sums))
    return UpdateResult(metrics, sums, logp, *entropy)


def _with_values(critic: LanguageCritic, stats: Callable[..., Any], head: LMHead, hidden: Tensor) -> tuple[Any, ...]:
    """Return the statistics of the policy and the values of the critic."""
    return *stats(head, hidden), critic.read(hidden)


def _head_and_hidden(head: LMHead, hidden: Tensor) -> tuple[LMHead, Tensor]:
    return head, hidden


# ---- parameters ----------------------------------------------------


@contextmanager
def activation_checkpointing(backbone: nn.Module, on: bool = True) -> Iterator[None]:
    """Enable activation checkpointing of the layers, if `on`.

    The switch of transformers works in training mode only, which also enables dropout, layer dropping or router noise.
    Log-probs have to be those of the policy, so models are never in training mode.
    """
    layers = checkpointable_layers(backbone) if on else []
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def checkpointable_layers(backbone: nn.Module) -> list[Any]:
    """Return the layers that support activation checkpointing."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
