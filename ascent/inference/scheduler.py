"""Scheduler of sequences over the KV-cache blocks and the indices of the running batch.

The blocks of a prompt are shared by all sequences that sample from it. The tokens of a response are in blocks of the
sequence itself, which are allocated as it grows.

    waiting      no blocks: new, or preempted; a preempted sequence is prefilled again when it is scheduled
    running      has a batch index and decodes one token per step
    suspended    waits for an observation: keeps its blocks while there is room, but not its batch index

When blocks run out, prompts without sequences are freed first; then the sequence that was scheduled last is preempted.
The oldest sequence is never preempted for a younger one, so progress is guaranteed if a single sequence fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as GenericSequence

from ascent.core.errors import ConfigError
from ascent.inference.block_manager import BlockManager
from ascent.inference.sequence import NOT_RUNNING, Sequence

SEQUENCES_PER_SPARE_BLOCK = 8
"""A new sequence is scheduled only if one free block per this many sequences remains for their growth."""


class Scheduler:
    """Decides which sequences run, at which batch index and on which blocks.

    Sequence i belongs to prompt i // samples, except those of `add`. The caller prefills `prompts_to_prefill` and the
    tokens of preempted sequences (`Sequence.num_tokens` > 0), decodes, and reports back with `suspend` and `finish`.
    """

    def __init__(
        self,
        prompt_lengths: GenericSequence[int],
        samples: int,
        max_num_seqs: int,
        max_tokens: int,
        block_manager: BlockManager,
        max_prefill_prompts: int = 1,
        started_lengths: Mapping[int, int] | None = None,
        finished: Collection[int] = (),
    ):
        """`prompt_lengths`: cached tokens of each prompt. `max_tokens`: capacity that a response may need.

        `max_prefill_prompts`: consecutive prompts that get blocks together, if there is room, to be prefilled in one
        forward pass. `started_lengths`: tokens to prefill of sequences that an earlier call started. `finished`:
        sequences that an earlier call finished.
        """
        self.prompt_lengths, self.samples = dict(enumerate(prompt_lengths)), samples
        self.block_manager, self.max_prefill_prompts = block_manager, max_prefill_prompts
        self.seq_prompts: dict[int, int] = {}
        """Prompt ids of the sequences that `add` brought."""
        min_blocks = block_manager.blocks_needed(max(prompt_lengths, default=0))
        min_blocks += block_manager.blocks_needed(max_tokens)
        if block_manager.num_blocks < min_blocks:
            raise ConfigError(
                f"the KV cache has room for {block_manager.num_blocks * block_manager.block_size} tokens, but one "
                f"response may need {min_blocks * block_manager.block_size}: set a lower --max-tokens, or free memory"
            )
        self.max_tokens = max_tokens
        self.waiting = deque(i for i in range(len(prompt_lengths) * samples) if i not in finished)
        self.sequences: dict[int, Sequence] = {}
        """Running and suspended sequences by id, in the order in which they were scheduled."""
        self.resuming: deque[int] = deque()
        """Suspended sequences that have their observations and need a batch index and blocks."""
        self.preempted_idle: set[int] = set()
        """Sequences that were preempted while they were suspended."""
        self.free_batch_indices = list(range(max_num_seqs))[::-1]
        self.prompt_blocks: dict[int, list[int]] = {}
        self.prompts_to_prefill: list[int] = []
        """Prompts whose blocks are still empty. The caller prefills them and clears the list."""
        self.recompute_lengths: dict[int, int] = dict(started_lengths or {})
        """Of sequences without blocks, the number of tokens to prefill when they are scheduled."""
        self.num_unfinished = dict.fromkeys(range(len(prompt_lengths)), samples)
        """Number of unfinished sequences by prompt."""
        for seq_id in finished:
            self.num_unfinished[seq_id // samples] -= 1
        self.ref_counts = dict.fromkeys(range(len(prompt_lengths)), 0)
        """Number of sequences that read the blocks of each prompt."""
        self.num_preemptions = 0

    def prompt_of(self, seq_id: int) -> int:
        return self.seq_prompts.get(seq_id, seq_id // self.samples)

    def add(self, seq_id: int, prompt_id: int, prompt_length: int, num_tokens: int = 0) -> None:
        """Add a waiting sequence, whose prompt may be new. `num_tokens`: tokens to prefill when it is scheduled."""
        self.seq_prompts[seq_id] = prompt_id
        if prompt_id not in self.prompt_lengths:
            self.prompt_lengths[prompt_id] = prompt_length
            self.num_unfinished[prompt_id] = self.ref_counts[prompt_id] = 0
        self.num_unfinished[prompt_id] += 1
        if num_tokens:
            self.recompute_lengths[seq_id] = num_tokens
        self.waiting.append(seq_id)

    @property
    def running(self) -> list[Sequence]:
        return [seq for seq in self.sequences.values() if seq.batch_index != NOT_RUNNING]

    def schedule(self, num_new_tokens: int = 1, max_running: int | None = None) -> list[Sequence]:
        """Return the sequences that start to run: resumed ones first, then waiting ones.

        Each has room for `num_new_tokens` more tokens. `max_running`: limit on running sequences.
        """
        scheduled: list[Sequence] = []
        num_free = len(self.free_batch_indices)
        if max_running is not None:
            num_free = min(num_free, max_running - len(self.running))
        while len(scheduled) < num_free and self.resuming:
            seq = self.sequences[self.resuming[0]]
            if not self._try_resume(seq, num_new_tokens):
                break
            self.resuming.popleft()
            seq.batch_index = self.free_batch_indices.pop()
            scheduled.append(seq)
        while len(scheduled) < num_free and self.waiting:
            new = self._try_start(self.waiting[0], num_new_tokens)
            if new is None:
                break
            self.waiting.popleft()
            new.batch_index = self.free_batch_indices.pop()
            scheduled.append(new)
        return scheduled

    def _missing_blocks(self, seq: Sequence, num_new_tokens: int) -> int:
        length = min(seq.num_tokens + num_new_tokens, self.max_tokens)
        return self.block_manager.blocks_needed(length) - len(seq.block_table)

    def _try_resume(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Allocate blocks for the observation of a suspended sequence.

        Sequences that neither run nor wait for an observation are preempted for it only if no sequence runs.
        """
        missing = self._missing_blocks(seq, num_new_tokens)
        if missing > self.block_manager.num_free:
            self._free_unused_prompts()
            self._preempt_idle(missing, seq.prompt_id)
        while missing > self.block_manager.num_free and not self.running and seq.seq_id in self.sequences:
            self.preempt()
        if missing > self.block_manager.num_free or seq.seq_id not in self.sequences:
            return False
        seq.block_table += self.block_manager.allocate_blocks(max(0, missing))
        return True

    def _try_start(self, seq_id: int, num_new_tokens: int) -> Sequence | None:
        """Allocate blocks for a waiting sequence, and for its prompt if it has none."""
        blocks, num_seqs = self.block_manager, len(self.sequences)
        prompt_id, num_tokens = self.prompt_of(seq_id), self.recompute_lengths.get(seq_id, 0)
        needed = own = blocks.blocks_needed(min(num_tokens + num_new_tokens, self.max_tokens))
        if prompt_id not in self.prompt_blocks:
            needed += blocks.blocks_needed(self.prompt_lengths[prompt_id])
        spare = num_seqs // SEQUENCES_PER_SPARE_BLOCK
        if blocks.num_free < needed + spare:
            used = blocks.num_blocks - blocks.num_free - sum(map(len, self.prompt_blocks.values()))
            max_growth = num_seqs * blocks.blocks_needed(self.max_tokens) - used
            needed += min(spare, max_growth)
            if blocks.num_free < needed:
                self._free_unused_prompts(keep=prompt_id)
                if blocks.num_free < needed and not self._preempt_idle(needed, prompt_id):
                    return None
        self.recompute_lengths.pop(seq_id, None)
        seq = Sequence(seq_id, prompt_id, num_tokens, blocks.allocate_blocks(own))
        if prompt_id not in self.prompt_blocks:
            self._allocate_prompts(prompt_id)
        self.sequences[seq_id] = seq
        self.ref_counts[prompt_id] += 1
        return seq

    def _preempt_idle(self, num_blocks: int, keep_prompt: int) -> bool:
        """Free blocks by preempting suspended conversations of clients, which may never continue."""
        suspended = [
            seq for seq in self.sequences.values() if seq.batch_index == NOT_RUNNING and seq.seq_id not in self.resuming
        ]
        for seq in suspended if self.seq_prompts else []:
            if self.block_manager.num_free >= num_blocks:
                break
            self.preempt(seq)
            self._free_unused_prompts(keep=keep_prompt)
        return self.block_manager.num_free >= num_blocks

    def _allocate_prompts(self, first: int) -> None:
        """Allocate blocks for a prompt, and for the next ones as long as the sequences keep room to grow."""
        for prompt_id in range(first, first + self.max_prefill_prompts):
            if prompt_id not in self.prompt_lengths:
                continue
            needed = self.block_manager.blocks_needed(self.prompt_lengths[prompt_id])
            if prompt_id != first and (
                prompt_id in self.prompt_blocks
                or not self.num_unfinished[prompt_id]
                or self.block_manager.num_free < needed + 2 * len(self.sequences)
            ):
                continue
            self.prompt_blocks[prompt_id] = self.block_manager.allocate_blocks(needed, for_prompt=True)
            self.prompts_to_prefill.append(prompt_id)

    def _free_unused_prompts(self, keep: int | None = None) -> None:
        """Free the blocks of prompts that no sequence reads, except those of `keep`."""
        for prompt_id in [p for p in self.prompt_blocks if self.ref_counts[p] == 0 and p != keep]:
            self._free_prompt(prompt_id)

    def _free_prompt(self, prompt_id: int) -> None:
        self.block_manager.free_blocks(self.prompt_blocks.pop(prompt_id, []))
        self.prompts_to_prefill = [p for p in self.prompts_to_prefill if p != prompt_id]

    def can_append(self, num_new_tokens: int) -> bool:
        """Return whether all running sequences can grow by `num_new_tokens` without preemption."""
        missing = (self._missing_blocks(seq, num_new_tokens) for seq in self.running)
        return sum(max(0, count) for count in missing) <= self.block_manager.num_free

    def reserve(self, num_new_tokens: int, sequences: GenericSequence[Sequence] | None = None) -> list[Sequence]:
        """Allocate room for `num_new_tokens` more tokens per sequence, oldest first. Return preempted sequences.

        `sequences`: default: all that run.
        """
        preempted: list[Sequence] = []
        for seq in self.running if sequences is None else sequences:
            if seq.seq_id not in self.sequences:
                continue
            missing = self._missing_blocks(seq, num_new_tokens)
            while missing > self.block_manager.num_free and seq.seq_id in self.sequences:
                self._free_unused_prompts()
                if missing > self.block_manager.num_free:
                    preempted.append(self.preempt())
            if seq.seq_id in self.sequences and missing > 0:
                seq.block_table += self.block_manager.allocate_blocks(missing)
        return preempted

    def preempt(self, seq: Sequence | None = None) -> Sequence:
        """Free the blocks of a sequence (default: the one scheduled last) and put it first in the waiting queue."""
        seq = seq or self.sequences[next(reversed(self.sequences))]
        self.recompute_lengths[seq.seq_id] = seq.num_tokens
        if seq.batch_index == NOT_RUNNING and seq.seq_id not in self.resuming:
            self.preempted_idle.add(seq.seq_id)
        else:
            self.waiting.appendleft(seq.seq_id)
        self._remove(seq)
        self.num_preemptions += 1
        return seq

    def suspend(self, seq_id: int) -> None:
        """Take a running sequence out of the batch until it gets an observation. It keeps its blocks."""
        seq = self.sequences[seq_id]
        self.free_batch_indices.append(seq.batch_index)
        seq.batch_index = NOT_RUNNING

    def resume(self, seq_id: int, num_tokens: int) -> None:
        """Continue a suspended sequence, which has `num_tokens` tokens with its observation."""
        if seq_id in self.preempted_idle:
            self.preempted_idle.remove(seq_id)
            self.recompute_lengths[seq_id] = num_tokens
            self.waiting.appendleft(seq_id)
        else:
            self.sequences[seq_id].num_tokens = num_tokens
            self.resuming.append(seq_id)

    def finish(self, seq_id: int) -> None:
        """Remove a sequence, and its prompt if it was the last unfinished one."""
        prompt_id = self.prompt_of(seq_id)
        if seq_id in self.sequences:
            self._remove(self.sequences[seq_id])
        elif seq_id in self.preempted_idle:
            self.preempted_idle.remove(seq_id)
        else:
            self.waiting.remove(seq_id)
        self.recompute_lengths.pop(seq_id, None)
        self.num_unfinished[prompt_id] -= 1
        if self.num_unfinished[prompt_id] == 0:
            self._free_prompt(prompt_id)
        if self.seq_prompts.pop(seq_id, None) is not None and self.num_unfinished[prompt_id] == 0:
            del self.prompt_lengths[prompt_id], self.num_unfinished[prompt_id], self.ref_counts[prompt_id]

    def _remove(self, seq: Sequence) -> None:
        del self.sequences[seq.seq_id]
        self.block_manager.free_blocks(seq.block_table)
        self.ref_counts[seq.prompt_id] -= 1
        if seq.batch_index != NOT_RUNNING:
            self.free_batch_indices.append(seq.batch_index)
        elif seq.seq_id in self.resuming:
            self.resuming.remove(seq.seq_id)
