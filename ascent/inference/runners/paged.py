"""Decode with blocks and without CUDA graphs, on a CPU or a GPU."""

import torch
from torch import Tensor

from ascent.inference.attention_layouts import DecodeLayout, HiddenStateModel, PrefillSegment, prefill_segments
from ascent.inference.block_manager import BlockManager
from ascent.inference.generation_state import GenerationState
from ascent.inference.runners.packed_cpu_model import PackedCpuModel
from ascent.inference.scheduler import Scheduler
from ascent.inference.sequence import Sequence
from ascent.models.causal_lm import LanguageModel
from ascent.models.packed_attention import packed_attention_enabled
from ascent.ops.paged_kv_cache import PagedKVCache

BLOCK_SIZE, WIDE_BLOCK_SIZE = 32, 64
"""Tokens per block; and per block where the cache has room for everything that the sequences can need."""


class PagedRunner:
    """Decodes with a paged KV cache of `cache_tokens` tokens and a batch of at most `max_num_seqs` sequences.

    Prompts are prefilled together when their first sequences are scheduled. A waiting sequence takes the place of a
    finished one at once.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompts: list[list[int]],
        samples: int,
        max_num_seqs: int,
        generation: GenerationState,
        cache_tokens: int = 0,
        hidden_model: HiddenStateModel | None = None,
    ):
        """`cache_tokens`: 0: all that the sequences can need. `hidden_model`: a faster implementation of the model."""
        self.lm, self.prompts, self.generation = lm, dict(enumerate(prompts)), generation
        self.hidden_model = hidden_model or lm
        max_num_seqs, prompt_lengths = min(max_num_seqs, len(generation.lengths)), [len(p) for p in prompts]
        active_prompts = min(len(prompts) or max_num_seqs, -(-max_num_seqs // samples) + 1)
        block_size = BLOCK_SIZE if cache_tokens else WIDE_BLOCK_SIZE
        seq_blocks = max_num_seqs * -(-generation.max_tokens // block_size)
        max_prompt = max(prompt_lengths, default=generation.max_prompt_tokens)
        num_blocks = seq_blocks + active_prompts * -(-max_prompt // block_size)
        if cache_tokens:
            block_manager = BlockManager(min(num_blocks, -(-cache_tokens // block_size)), block_size)
        else:
            block_manager = BlockManager(num_blocks, block_size, prompt_region=seq_blocks)
        cached_lengths = {response: length - 1 for response, length in generation.started_lengths.items()}
        self.scheduler = Scheduler(
            prompt_lengths,
            samples,
            max_num_seqs,
            generation.max_tokens,
            block_manager,
            started_lengths=cached_lengths,
            finished=generation.already_finished,
        )
        generation.timeline.capacity = max_num_seqs
        self.decode_layout = (
            hidden_model.decode_layout(block_manager.num_blocks, block_size)
            if isinstance(hidden_model, PackedCpuModel)
            else DecodeLayout(PagedKVCache(block_manager.num_blocks, block_size), lm.device)
        )
        self.cache = self.decode_layout.cache
        self.prompt_hidden: dict[int, Tensor] = {}
        """The last hidden state of each prompt, from which the first tokens of its responses are sampled."""
        self.last_tokens = {i: int(generation.tokens[i, length]) for i, length in cached_lengths.items()}
        """The token that each sequence feeds next: the one sampled last, or the last of an observation."""
        self.uncached_tokens: dict[int, list[int]] = {}
        """Tokens before that one that are not in the KV cache yet, of sequences with an observation."""

    def __call__(self) -> None:
        scheduler, device = self.scheduler, self.lm.device
        previous: list[tuple[Sequence, int]] = []
        with packed_attention_enabled(self.lm.model):
            while self.generation.unfinished:
                self._poll(wait=False)
                self._start_sequences()
                scheduler.reserve(1)
                seqs = scheduler.running
                self.generation.timeline.record(len(seqs))
                if not seqs:
                    if self.generation.waits_for_input:
                        self._poll(wait=True)
                    continue
                # compares objects: a preempted sequence returns as a new one
                current = [(seq, len(seq.block_table)) for seq in seqs]
                if current != previous:
                    self.decode_layout.set_sequences(seqs, scheduler)
                previous = current
                input_ids = torch.tensor([self.last_tokens[seq.seq_id] for seq in seqs], device=device)
                positions = self.decode_layout.begin_step(seqs)
                hidden = self.hidden_model.hidden(input_ids[:, None], positions[:, None], self.decode_layout)
                for seq in seqs:
                    seq.num_tokens += 1
                self._sample(hidden[:, 0], [seq.seq_id for seq in seqs])
        self.generation.timeline.stop()

    def _finish(self, response: int) -> None:
        prompt = self.scheduler.prompt_of(response)
        self.scheduler.finish(response)
        self.generation.unfinished.discard(response)
        self.last_tokens.pop(response, None), self.uncached_tokens.pop(response, None)
        if prompt not in self.scheduler.prompt_lengths:
            del self.prompts[prompt]
            self.prompt_hidden.pop(prompt, None)

    def _sample(self, hidden: Tensor, responses: list[int]) -> None:
        """Sample a token for each of these sequences. Remove finished ones; suspend those that wait for input."""
        tokens = self.generation.sample(hidden, responses).tolist()
        self.last_tokens |= dict(zip(responses, tokens, strict=True))
        for response in self.generation.finish_turns(responses):
            self._finish(response)
        if self.generation.turns is not None:
            for response in responses:
                if response in self.generation.turns.pending:
                    self.scheduler.suspend(response)

    def _poll(self, wait: bool) -> None:
        """Resume sequences with new observations, and add new requests.

        An observation is prefilled except for its last token, which is fed next.
        """
        for response, tokens in self.generation.poll_observations(wait):
            if not tokens:
                self._finish(response)
                continue
            self.uncached_tokens[response] = [self.last_tokens[response], *tokens[:-1]]
            self.last_tokens[response] = tokens[-1]
            self.scheduler.resume(response, int(self.generation.lengths[response]) - 1)
        for response, prompt, ids in self.generation.new_requests():
            self.prompts[prompt], length = ids, int(self.generation.lengths[response])
            if length:
                self.last_tokens[response] = int(self.generation.tokens[response, length - 1])
            self.scheduler.add(response, prompt, len(ids), max(length - 1, 0))

    def _prefill(self, seqs: list[Sequence], tokens: list[list[int]]) -> None:
        """Prefill the last tokens of these sequences."""
        blocks, lengths = self.scheduler.prompt_blocks, self.scheduler.prompt_lengths
        segments = [
            PrefillSegment(
                seq.block_table, len(new), seq.num_tokens - len(new), blocks[seq.prompt_id], lengths[seq.prompt_id]
            )
            for seq, new in zip(seqs, tokens, strict=True)
        ]
        if segments:
            prefill_segments(self.hidden_model, self.cache, tokens, segments)

    def _start_sequences(self) -> None:
        """Schedule sequences while there is room, and sample the first tokens of new ones."""
        scheduler = self.scheduler
        while True:
            previous = set(scheduler.sequences.values())
            if not (scheduled := scheduler.schedule()):
                return
            self._prefill_prompts()
            resumed = [seq for seq in scheduled if seq.num_tokens]  # suspended or preempted before
            tokens = [self.uncached_tokens.pop(seq.seq_id, []) for seq in resumed]
            for i, seq in enumerate(resumed):
                if seq not in previous:  # it was preempted, and its new blocks are empty
                    tokens[i] = self.generation.tokens[seq.seq_id, : seq.num_tokens].tolist()
            self._prefill(resumed, tokens)
            new = [seq.seq_id for seq in scheduled if seq.seq_id not in self.last_tokens]
            if new:
                self._sample(torch.stack([self.prompt_hidden[scheduler.prompt_of(i)] for i in new]), new)

    def _prefill_prompts(self) -> None:
        scheduler, new = self.scheduler, self.scheduler.prompts_to_prefill
        if not new:
            return
        segments = [PrefillSegment(scheduler.prompt_blocks[p], scheduler.prompt_lengths[p]) for p in new]
        hidden = prefill_segments(self.hidden_model, self.cache, [self.prompts[p] for p in new], segments)
        self.prompt_hidden |= dict(zip(new, hidden, strict=True))
        scheduler.prompts_to_prefill = []
