"""Model runner with captured CUDA graphs: one replay is a decode step, which samples a token of every running sequence.

All state of decoding is on the GPU (`DecodeState`); `DecodeLoop` enqueues the replays. On a CPU the same steps run
without graphs, for the tests.

The last token of a prompt is fed as the first token of each of its responses. So the first token of a response is
sampled by the same decode step as all others, and a prompt is prefilled without its last token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascent.core.sampling_params import SamplingParams
from ascent.inference.attention_layouts import PrefillSegment, prefill_segments
from ascent.inference.block_manager import BlockManager
from ascent.inference.generation_state import GenerationState
from ascent.inference.prefill import MAX_GRAPH_WORK, PrefillGraphs, PrefillModel
from ascent.inference.runners.decode_loop import DecodeLoop
from ascent.inference.scheduler import Scheduler
from ascent.models.causal_lm import LanguageModel
from ascent.models.decoder_model import MAX_HIDDEN_ERROR, DecoderModel, UnsupportedArchitectureError
from ascent.models.lora import randomized_adapters
from ascent.models.packed_attention import PackedGroup, PackedLayout, packed_attention_enabled, to_device_async
from ascent.models.quantization import parameter_count
from ascent.ops import decode_ops as formulas
from ascent.ops import load_kernels
from ascent.ops.cuda_graphs import CudaGraphs, EagerGraphs
from ascent.ops.decode_state import BLOCK_SIZE, LAST_TOKEN, MAX_STOP_TOKENS, PROMPT_LENGTH, RESPONSE_LENGTH, DecodeState

GRAPH_BATCH_SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Batch sizes that graphs are captured for, besides the maximum batch size."""
KV_CACHE_MEMORY_FRACTION = 0.25
"""Maximum share of the free GPU memory for KV-cache blocks, which stay allocated during training."""
MAX_PREFILL_PROMPTS = 16
"""Maximum number of new prompts prefilled in one forward pass."""
MIN_SPLIT_KV_LENGTH = 512
"""Minimum length of the longest sequence for split-KV attention."""
MAX_SPLIT_KV_ROWS, MIN_LENGTH_RATIO = 256, 1.5
"""Split-KV attention is used below this many (sequence, KV head) pairs, or above this ratio of longest to mean."""
SLOW_RUNNER_NOTE = "rollouts take 20 to 40 times as long as with CUDA graphs, which do not support this model: {why}"
"""Note of a run without CUDA graphs. Measured on an H200 with 135 million and 1.5 billion parameters."""


def cuda_graph_runner(lm: LanguageModel) -> tuple[CudaGraphRunner | None, str | None]:
    """Return the runner of a model, which all its engines share; or None and the reason why it is not supported."""
    if hasattr(lm, "cuda_graph_runner"):
        return lm.cuda_graph_runner, None  # type: ignore[return-value]
    if len(lm.stop_token_ids) > MAX_STOP_TOKENS:
        return None, f"it has {len(lm.stop_token_ids)} end tokens, and there is room for {MAX_STOP_TOKENS}"
    try:
        runner = CudaGraphRunner(lm)
        error, bound = runner.hidden_error(), MAX_HIDDEN_ERROR.get(lm.model.dtype, 1e-3)
    except UnsupportedArchitectureError as unsupported:
        return None, str(unsupported)
    if not error < bound:
        return None, f"its layers compute something that Llama's do not (relative error of hidden states: {error:.2g})"
    lm.cuda_graph_runner = runner  # type: ignore[assignment]
    return runner, None


class CudaGraphRunner:
    """Runs models of the Llama family with CUDA graphs. It is called like `PagedRunner`.

    Buffers and graphs outlive a call. They are rebuilt when a call needs more room or the parameters have moved.
    """

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.on_gpu = lm.device.type == "cuda"
        self.model = DecoderModel.of(lm.model)
        self.parameters = list(lm.model.parameters())
        self.addresses = self._parameter_addresses()
        """Addresses of the parameters that `model` was built from."""
        plain = not self.on_gpu or lm.model.dtype == torch.float64
        self.ops = formulas if plain else load_kernels("triton_decoding") or formulas
        self.decode_state: DecodeState = None  # type: ignore[assignment]
        """Allocated by `prepare`."""
        self.drop_graphs()
        self.current_batch_indices: list[int] = []
        self.memory_full = False
        """Whether the KV cache cannot grow."""
        self.was_idle = False
        """Whether the GPU idled during the last call because all sequences waited for observations."""

    def __call__(
        self,
        lm: LanguageModel,
        prompts: list[list[int]],
        samples: int,
        max_num_seqs: int,
        generation: GenerationState,
        cache_tokens: int = 0,
    ) -> DecodeLoop:
        max_num_seqs = min(max_num_seqs, len(generation.lengths))
        prompt_lengths = [len(p) - 1 for p in prompts]
        seq_blocks = -(-generation.max_tokens // BLOCK_SIZE)
        prompt_blocks = -(-max(prompt_lengths, default=generation.max_prompt_tokens) // BLOCK_SIZE)
        active_prompts = min(len(prompts) or max_num_seqs, 4 * -(-max_num_seqs // samples) + MAX_PREFILL_PROMPTS)
        num_blocks = self._num_blocks(
            max_num_seqs * seq_blocks + active_prompts * prompt_blocks, seq_blocks + prompt_blocks
        )
        num_blocks = min(num_blocks, -(-cache_tokens // BLOCK_SIZE)) if cache_tokens else num_blocks
        self.prepare(max_num_seqs, num_blocks, -(-(seq_blocks + prompt_blocks) // 8) * 8, generation.max_tokens)
        state, stop_tokens = self.decode_state, generation.stop_tokens
        state.max_tokens.fill_(generation.max_tokens)
        state.stop_tokens.copy_(torch.cat([stop_tokens, torch.full((MAX_STOP_TOKENS - len(stop_tokens),), -1)]))
        generation.timeline.capacity = max_num_seqs
        scheduler = Scheduler(
            prompt_lengths,
            samples,
            max_num_seqs,
            generation.max_tokens,
            BlockManager(num_blocks, BLOCK_SIZE),
            MAX_PREFILL_PROMPTS,
            started_lengths=generation.started_lengths,
            finished=generation.already_finished,
        )
        return DecodeLoop(self, prompts, scheduler, generation)

    def _num_blocks(self, wanted: int, minimum: int) -> int:
        """Return the number of blocks for a call: all that it can need, or as many as fit in memory."""
        allocated = 0 if self.decode_state is None else self.decode_state.capacity[1]
        if allocated >= wanted or (self.memory_full and allocated >= minimum):
            return min(wanted, allocated)
        wanted += wanted // 8  # later prompts may be longer
        if self.on_gpu:
            self.decode_state = None  # type: ignore[assignment]
            self.drop_graphs()
            available = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
            free = min(self.lm.gpu_memory_limit, available) - torch.cuda.memory_allocated()
            model = self.model
            head_bytes = BLOCK_SIZE * model.head_dim * model.embedding.element_size()
            block_bytes = 2 * len(model.layers) * model.num_kv_heads * head_bytes
            max_blocks = int(KV_CACHE_MEMORY_FRACTION * free) // block_bytes
            self.memory_full, wanted = max_blocks < wanted, max(minimum, min(wanted, max_blocks))
        return wanted

    def drop_graphs(self) -> None:
        """Drop all captured graphs, because buffers or parameters have moved."""
        self.graphs: dict[Any, Callable[[], None]] = {}
        size = parameter_count(self.lm.model)
        self.prefill_graphs = PrefillGraphs(CudaGraphs() if self.on_gpu else EagerGraphs(), int(MAX_GRAPH_WORK / size))

    def prepare(self, max_num_seqs: int, num_blocks: int, max_blocks_per_seq: int, max_tokens: int) -> None:
        """Allocate buffers of at least this size, and rebuild `model` if the parameters have moved."""
        if self.addresses == self._parameter_addresses():
            self.model.copies.refresh()
        else:
            previous, self.model = self.model, DecoderModel.of(self.lm.model)
            self.addresses = self._parameter_addresses()
            if self.model.addresses() != previous.addresses():
                self.drop_graphs()
        model, size = self.model, (max_num_seqs, num_blocks, max_blocks_per_seq, max_tokens)
        if self.decode_state is not None and self.decode_state.fits(*size):
            return
        if self.decode_state is not None:
            size = tuple(map(max, self.decode_state.capacity, size))  # type: ignore[assignment]
        self.decode_state = None  # type: ignore[assignment]  # frees its memory before the new one is allocated
        self.drop_graphs()
        self.decode_state = DecodeState.allocate(
            len(model.layers), model.num_kv_heads, model.head_dim, *size, model.embedding.detach()
        )
        self.tables = model.rotary_cache(size[2] * BLOCK_SIZE)
        self.current_batch_indices = []

    def _parameter_addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.parameters]

    @property
    def prefill(self) -> PrefillModel:
        """The model for prefills."""
        return PrefillModel(self.model, self.ops, self.tables, self.prefill_graphs)

    def decode_step(self, rows: int, split_kv: bool, params: SamplingParams, greedy: bool) -> None:
        """Decode one step: forward pass, and sample a token, for `rows` entries of `DecodeState.batch_indices`."""
        hidden = self.model.hidden(self.ops, self.decode_state, self.tables, rows, split_kv)
        self.ops.sample_next_tokens(self.model.head.logits(hidden), self.decode_state, params, greedy)

    def get_graph(self, rows: int, params: SamplingParams, greedy: bool, split_kv: bool = False) -> Callable[[], None]:
        """Return the graph of a decode step. It is captured at its first use, with all rows at the padding index."""
        step = partial(self.decode_step, rows, split_kv, params, greedy)
        key = (rows, split_kv, params.min_tokens if greedy else params)
        if key not in self.graphs:
            self.decode_state.batch_indices.fill_(self.decode_state.max_num_seqs)
            self.current_batch_indices = []
            self.prefill_graphs.graphs.warm_up(step)
            self.graphs[key] = self.prefill_graphs.graphs.capture(step)
        return self.graphs[key]

    def select_batch(self, indices: list[int]) -> int:
        """Set the batch indices of the next decode steps. Return the batch size, with padding."""
        rows = min([self.decode_state.max_num_seqs, *(n for n in GRAPH_BATCH_SIZES if n >= len(indices))])
        indices = indices + [self.decode_state.max_num_seqs] * (rows - len(indices))
        if indices != self.current_batch_indices:
            self.decode_state.batch_indices[:rows].copy_(self.to_device(indices), non_blocking=True)
            self.current_batch_indices = indices
        return rows

    def should_split_kv(self, lengths: list[int]) -> bool:
        """Return whether attention over sequences of these lengths is faster with split KV."""
        longest, few = max(lengths), len(lengths) * self.model.num_kv_heads < MAX_SPLIT_KV_ROWS
        return longest > MIN_SPLIT_KV_LENGTH and (few or longest > MIN_LENGTH_RATIO * sum(lengths) / len(lengths))

    def to_device(self, numbers: list[Any]) -> Tensor:
        return to_device_async(torch.tensor(numbers, dtype=torch.long), self.lm.device)

    @torch.no_grad()
    def hidden_error(self) -> float:
        """Return the maximum relative error of the hidden states of two random texts, against the model itself.

        The texts share prompt blocks. Their prompts are prefilled, and their other tokens are decoded one by one.
        """
        num_prompt, num_decoded, device = 5, 7, self.lm.device
        length = num_prompt + num_decoded
        ids = torch.randint(self.lm.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
        prompt_blocks, seq_blocks = -(-num_prompt // BLOCK_SIZE), -(-(num_decoded + 1) // BLOCK_SIZE)
        blocks, width = list(range(prompt_blocks + 2 * seq_blocks)), prompt_blocks + seq_blocks
        block_tables = [blocks[:width], blocks[:prompt_blocks] + blocks[width:]]
        errors = []
        with randomized_adapters(self.lm.model), packed_attention_enabled(self.lm.model):
            self.prepare(2, len(blocks), width, num_decoded + 1)
            state = self.decode_state
            layout = PackedLayout([PackedGroup(0, length, ()), PackedGroup(length, length, ())])
            positions = torch.arange(length, device=device).repeat(2)[None]
            expected = self.lm.hidden(ids.to(device).view(1, -1), positions, layout).view(2, length, -1)[:, num_prompt:]
            for i in range(2):  # the other row decodes the same token; the prompt blocks are prefilled again
                segment = PrefillSegment(blocks, num_prompt)
                prefill_segments(self.prefill, state.cache, [ids[i, :num_prompt].tolist()], [segment])
                state.block_tables[:2, :width] = torch.tensor(block_tables, dtype=torch.int32)
                self.select_batch([0, 1])
                for t in range(num_decoded):
                    state.state[PROMPT_LENGTH, :2], state.state[RESPONSE_LENGTH, :2] = num_prompt, t
                    state.state[LAST_TOKEN, :2] = ids[i, num_prompt + t]
                    hidden = self.model.hidden(self.ops, state, self.tables, 2)[1]
                    errors.append((hidden - expected[i, t]).double().norm() / expected[i, t].double().norm())
        self.decode_state = None  # type: ignore[assignment]
        return float(torch.stack(errors).max())
