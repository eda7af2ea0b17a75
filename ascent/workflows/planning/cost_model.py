"""Seconds and bytes of one GPU's work: a roofline with a few fitted constants.

    decode step     layer_seconds · layers + matmul_factor · max(weights / bandwidth, 2 · weights · rows / rate)
                    + kv_read_factor · cached bytes / bandwidth
    update          update_seconds + Adam's bytes / bandwidth
                    + Σ over micro-batches of max(launch_seconds · layers, work)
    work            update_matmul_factor · FLOPs / rate + update_attention_factor · attention FLOPs / rate
                    + activation_passes · activation bytes / bandwidth
    score           a third of an update's work and launches: its forward pass
    4-bit weights   for every matmul, read once and written once more in bfloat16

Memory follows the rules of the learner and the engine: 18 or 10 bytes per trained parameter, micro-batches that fill
60 % of the remaining memory, and a KV cache of at most a quarter of the free memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascent.core.config import Config
from ascent.inference.runners.cuda_graph import GRAPH_BATCH_SIZES, KV_CACHE_MEMORY_FRACTION, MAX_PREFILL_PROMPTS
from ascent.models.lm_head import CHUNK_BYTES
from ascent.models.quantization import BYTES_PER_PARAMETER
from ascent.training.captured_updates import MAX_CAPTURE_FRACTION
from ascent.training.micro_batches import ACTIVATION_FRACTION, COMPACT_BYTES_PER_PARAM, STATE_BYTES_PER_PARAM
from ascent.workflows.planning.gpus import FITTED, FittedConstants, Gpu
from ascent.workflows.planning.model_shapes import ModelShape

ADAM_BYTES_MOVED = {STATE_BYTES_PER_PARAM: 28, COMPACT_BYTES_PER_PARAM: 20}
"""Bytes that Adam moves per trained parameter, by the bytes of its state."""
PADDED_ROW_FACTOR = 1.125
"""Approximate length of a captured update's packed row, relative to its tokens."""


@dataclass(frozen=True)
class GpuCostModel:
    """The costs of a model on one GPU."""

    shape: ModelShape
    gpu: Gpu
    fit: FittedConstants = FITTED
    bits: int = 0
    """4 if the matrices are quantized to 4 bits, 0 otherwise."""
    mixed: bool = False
    """Whether the residual stream is in float32."""

    @property
    def residual_bytes(self) -> int:
        """Bytes of the residual stream per token."""
        return (4 if self.mixed else 2) * self.shape.hidden_size

    @property
    def activation_bytes(self) -> int:
        """Bytes that autograd keeps per token. Two norms per layer keep the residual stream."""
        return self.shape.activation_bytes + 2 * self.shape.num_layers * (
            self.residual_bytes - 2 * self.shape.hidden_size
        )

    @property
    def quantized_parameters(self) -> int:
        """Number of parameters in 4 bits."""
        return self.shape.quantizable if self.bits else 0

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the model's parameters."""
        return 2 * (self.shape.num_parameters - self.quantized_parameters) + int(
            BYTES_PER_PARAMETER * self.quantized_parameters
        )

    @property
    def dequantize_seconds(self) -> float:
        """Seconds to dequantize all 4-bit matrices once."""
        return (BYTES_PER_PARAMETER + 2) * self.quantized_parameters / self.gpu.bandwidth

    # ---- seconds

    def decode_seconds(self, rows: int, live: float) -> float:
        """Return the seconds of a decode step of `rows` sequences with `live` cached tokens in total."""
        shape, gpu, weights = self.shape, self.gpu, self.shape.block_parameters + self.shape.head_parameters
        graph_rows = next((bucket for bucket in GRAPH_BATCH_SIZES if bucket >= rows), rows)
        matmuls = max(2 * weights / gpu.bandwidth, 2 * weights * graph_rows / gpu.rate)
        caches = live * shape.kv_bytes / gpu.bandwidth
        return (
            self.fit.layer_seconds * shape.num_layers
            + self.fit.matmul_factor * matmuls
            + self.fit.kv_read_factor * caches
            + self.dequantize_seconds
        )

    def prefill_seconds(self, prompts: int, tokens: float) -> float:
        """Return the seconds to prefill prompts, or to compute the KV cache again after an update."""
        launches = self.fit.layer_seconds * self.shape.num_layers * -(-prompts // MAX_PREFILL_PROMPTS)
        return launches + self.fit.update_matmul_factor * 2 * self.shape.block_parameters * tokens / self.gpu.rate

    def update_seconds(
        self,
        batch: TokenCounts,
        micro_tokens: float,
        trained: int,
        checkpointing: bool = False,
        bytes_per_param: int = STATE_BYTES_PER_PARAM,
        single_rank: bool = True,
    ) -> float:
        """Return the seconds of an update with micro-batches of at most `micro_tokens` tokens.

        `checkpointing`: gradient checkpointing; `bytes_per_param`: bytes per trained parameter.
        """
        num_micro_batches = max(1, -(-batch.tokens // max(1, micro_tokens)))
        work = self._work_seconds(batch, checkpointing)
        launched = 0.0
        if (
            checkpointing
            or not single_rank
            or bytes_per_param != STATE_BYTES_PER_PARAM
            or not self._is_captured(batch, num_micro_batches, trained)
        ):
            launched = (
                self.fit.launch_seconds * self.shape.num_layers * num_micro_batches * (4 / 3 if checkpointing else 1)
            )
        passes = max(launched, work)
        passes += 2 * num_micro_batches * self.dequantize_seconds  # forward and back
        return self.fit.update_seconds + ADAM_BYTES_MOVED[bytes_per_param] * trained / self.gpu.bandwidth + passes

    def _is_captured(self, batch: TokenCounts, num_micro_batches: float, trained: int) -> bool:
        """Whether the update is captured as CUDA graphs, so that the host launches little."""
        graph_bytes = PADDED_ROW_FACTOR * batch.tokens * self.activation_bytes + 4 * trained
        return num_micro_batches == 1 and graph_bytes < MAX_CAPTURE_FRACTION * self.gpu.memory

    def score_seconds(self, batch: TokenCounts, micro_tokens: float) -> float:
        """Return the seconds to compute the log-probs of a batch (forward passes)."""
        num_micro_batches = max(1, -(-batch.tokens // max(1, micro_tokens)))
        return max(
            self.fit.launch_seconds / 3 * self.shape.num_layers * num_micro_batches,
            self._work_seconds(batch, False, forward_only=True),
        )

    def _work_seconds(self, batch: TokenCounts, checkpointing: bool, forward_only: bool = False) -> float:
        """Return GPU seconds of a forward and a backward pass. Checkpointing repeats the forward pass."""
        shape, fit = self.shape, self.fit
        blocks, head = 6.0 * shape.block_parameters * batch.tokens, 8.0 * shape.head_parameters * batch.loss
        pairs = 12 * shape.num_layers * shape.num_heads * shape.head_dim * batch.pairs
        activations = fit.activation_passes * self.activation_bytes * batch.tokens / self.gpu.bandwidth
        if forward_only:
            blocks, head, pairs, activations = blocks / 3, head / 4, pairs / 3, activations / 3
        layers = (fit.update_matmul_factor * blocks + fit.update_attention_factor * pairs) / self.gpu.rate + activations
        return layers * (4 / 3 if checkpointing else 1) + fit.update_matmul_factor * head / self.gpu.rate

    # ---- bytes

    def state_bytes(
        self, trained: int, reference: bool, critic: int, ranks: int = 1, bytes_per_param: int = STATE_BYTES_PER_PARAM
    ) -> dict[str, int]:
        """Return the bytes that do not depend on the batch, by part; `critic`: bytes of a critic.

        `ranks`: over how many ranks the state is sharded; `bytes_per_param`: bytes per trained parameter.
        """
        name = (
            "float32 copy, gradients, Adam"
            if bytes_per_param == STATE_BYTES_PER_PARAM
            else "gradients and Adam in bfloat16"
        )
        parts = {"parameters": self.parameter_bytes, name: (bytes_per_param - 2) * trained // ranks}
        if reference:
            parts["reference"] = (4 if ranks > 1 else 2) * trained // ranks
        if critic:
            parts["critic"] = critic // ranks
        frozen = trained < self.shape.head_parameters
        parts["head"] = 3 * CHUNK_BYTES["cuda"] + (0 if frozen else 6 * self.shape.head_parameters)
        return parts

    def bytes_per_token(self, checkpointing: bool) -> int:
        """Return the bytes per token of a micro-batch."""
        layer = self.activation_bytes // self.shape.num_layers
        return (
            2 * layer + self.residual_bytes * self.shape.num_layers if checkpointing else self.activation_bytes + layer
        )

    def micro_batch_tokens(self, state: int, checkpointing: bool) -> float:
        """Return the tokens of the largest micro-batch that fits."""
        return max(1.0, ACTIVATION_FRACTION * max(0, self.gpu.memory - state) / self.bytes_per_token(checkpointing))

    def max_cached_tokens(self, state: int) -> float:
        """Return the maximum number of tokens in the KV cache."""
        return KV_CACHE_MEMORY_FRACTION * max(0, self.gpu.memory - state) / self.shape.kv_bytes


@dataclass(frozen=True)
class TokenCounts:
    """The numbers of tokens that a learner trains on."""

    tokens: int
    """Tokens of prompts (once per group) and responses."""
    loss: int
    """Tokens of responses."""
    pairs: float
    """Pairs of tokens of which one attends to the other."""

    @classmethod
    def of(cls, prompt: int, groups: list[list[int]]) -> TokenCounts:
        """Count the tokens of groups of responses with these lengths; all prompts have one length."""
        loss = sum(map(sum, groups))
        pairs = sum(prompt * (prompt + 1) / 2 + sum(n * prompt + n * (n + 1) / 2 for n in group) for group in groups)
        return cls(len(groups) * prompt + loss, loss, pairs)


def forward_passes(config: Config) -> int:
    """Return the number of forward passes over a batch before its updates: old policy, reference, critic.

    In bfloat16 the old log-probs are assumed to come from the learner, unless the config says otherwise.
    """
    algorithm = config.algorithm
    return int(config.old_logp != "sampler") + int(algorithm.reference.enabled) + int(algorithm.critic.enabled)
