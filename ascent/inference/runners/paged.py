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
    """Decodes with a paged KV cache of at most `room` tokens and a batch of at most `rows` sequences.

    Prompts are prefilled together when their first sequences are scheduled. A waiting sequence takes the place of a
    finished one at once.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompts: list[list[int]],
        samples: int,
        rows: int,
        drawn: GenerationState,
        room: int = 0,
        net: HiddenStateModel | None = None,
    ):
        """`net`: a faster implementation of the model."""
        self.lm, self.prompts, self.generation, self.hidden_model = lm, dict(enumerate(prompts)), drawn, net or lm
        rows, lengths = min(rows, len(drawn.lengths)), [len(p) for p in prompts]
        slots = min(len(prompts) or rows, -(-rows // samples) + 1)
        size = BLOCK_SIZE if room else WIDE_BLOCK_SIZE
        own = rows * -(-drawn.max_tokens // size)
        most = own + slots * -(-max(lengths, default=drawn.max_prompt_tokens) // size)
        pages = BlockManager(min(most, -(-room // size)), size) if room else BlockManager(most, size, own)
        begun = {response: length - 1 for response, length in drawn.started_lengths.items()}
        self.scheduler = Scheduler(
            lengths, samples, rows, drawn.max_tokens, pages, started_lengths=begun, finished=drawn.already_finished
        )
        drawn.timeline.capacity = rows
        self.decoding = (
            net.decoding(pages.num_blocks, size)
            if isinstance(net, PackedCpuModel)
            else DecodeLayout(PagedKVCache(pages.num_blocks, size), lm.device)
        )
        self.cache = self.decoding.cache
        self.prompt_hidden: dict[int, Tensor] = {}
        """The last hidden state of each prompt, from which the first tokens of its responses are sampled."""
        self.last_tokens = {response: int(drawn.tokens[response, before]) for response, before in begun.items()}
        """The token that each sequence feeds next: the one sampled last, or the last of an observation."""
        self.uncached_tokens: dict[int, list[int]] = {}
        """Tokens before that one that are not in the KV cache yet, of sequences with an observation."""

    def __call__(self) -> None:
        schedule, before, device = self.scheduler, None, self.lm.device
        with packed_attention_enabled(self.lm.model):
            while self.generation.unfinished:
                self._poll(wait=False)
                self._start_sequences()
                schedule.reserve(1)
                rows = schedule.running
                self.generation.timeline.record(len(rows))
                if not rows:
                    if self.generation.waits_for_input:
                        self._poll(wait=True)
                    continue
                now = [
                    (row, len(row.block_table)) for row in rows
                ]  # compares objects: a preempted sequence returns as a new one
                if now != before:
                    self.decoding.set_sequences(rows, schedule)
                before = now
                last = torch.tensor([self.last_tokens[row.seq_id] for row in rows], device=device)
                positions = self.decoding.begin_step(rows)
                hidden = self.hidden_model.hidden(last[:, None], positions[:, None], self.decoding)
                for row in rows:
                    row.num_tokens += 1
                self._sample(hidden[:, 0], [row.seq_id for row in rows])
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
        """Sample the next token of these sequences. Remove finished ones; suspend those that wait for input."""
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
            self.prompts[prompt], begun = ids, int(self.generation.lengths[response])
            if begun:
                self.last_tokens[response] = int(self.generation.tokens[response, begun - 1])
            self.scheduler.add(response, prompt, len(ids), max(begun - 1, 0))

    def _prefill(self, rows: list[Sequence], tokens: list[list[int]]) -> None:
        """Prefill the last tokens of these sequences."""
        prompts, keys = self.scheduler.prompt_blocks, self.scheduler.prompt_lengths
        segments = [
            PrefillSegment(
                row.block_table, len(own), row.num_tokens - len(own), prompts[row.prompt_id], keys[row.prompt_id]
            )
            for row, own in zip(rows, tokens, strict=True)
        ]
        if segments:
            prefill_segments(self.hidden_model, self.cache, tokens, segments)

    def _start_sequences(self) -> None:
        """Schedule sequences while there is room, and sample the first tokens of new ones."""
        schedule = self.scheduler
        while True:
            there = set(schedule.sequences.values())
            if not (entering := schedule.schedule()):
                return
            self._prefill_prompts()
            back = [row for row in entering if row.num_tokens]  # they were suspended or preempted
            given = [self.uncached_tokens.pop(row.seq_id, []) for row in back]
            for i, row in enumerate(back):
                if row not in there:  # it was preempted, and its new blocks are empty
                    given[i] = self.generation.tokens[row.seq_id, : row.num_tokens].tolist()
            self._prefill(back, given)
            new = [row.seq_id for row in entering if row.seq_id not in self.last_tokens]
            if new:
                self._sample(torch.stack([self.prompt_hidden[schedule.prompt_of(i)] for i in new]), new)

    def _prefill_prompts(self) -> None:
        schedule, fresh = self.scheduler, self.scheduler.prompts_to_prefill
        if not fresh:
            return
        segments = [PrefillSegment(schedule.prompt_blocks[p], schedule.prompt_lengths[p]) for p in fresh]
        hidden = prefill_segments(self.hidden_model, self.cache, [self.prompts[p] for p in fresh], segments)
        self.prompt_hidden |= dict(zip(fresh, hidden, strict=True))
        schedule.prompts_to_prefill = []
