"""Caches in pages: who runs, who waits, and who gets which page.

A cache is a number of pages, each with room for the keys and values of `size` tokens. A prompt's pages are held once,
by all rows of its group; a row's own tokens lie in pages of its own behind them. So a row takes what it uses, and
not what it might.

    waiting   no pages yet, or none any more: the row was evicted, and is encoded again when it comes back
    running   has a lane, and draws one token per step
    parked    keeps its pages as long as there is room, but not its lane: its environment is at work

Where room runs out, prompts that nobody reads are dropped first, then the row that entered last is evicted. The oldest
row is never evicted for a younger one. So something always finishes, as long as one row alone fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as GenericSequence

from ascent.core.errors import ConfigError
from ascent.inference.block_manager import BlockManager
from ascent.inference.sequence import NOT_RUNNING, Sequence

SPARE = 8
"""Running rows per page that is kept free for their growth when another row enters."""


class Scheduler:
    """Which responses run in which lane, on which pages.

    Response i belongs to prompt i // samples. The caller encodes `fresh` prompts and the tokens of rows that come back
    (`Row.length` > 0), draws, and says what came of it.
    """

    def __init__(
        self,
        prompts: GenericSequence[int],
        samples: int,
        lanes: int,
        limit: int,
        pages: BlockManager,
        together: int = 1,
        begun: Mapping[int, int] | None = None,
        over: Collection[int] = (),
    ):
        """`prompts`: keys of each prompt. `limit`: tokens that a row's own pages must be able to hold.

        `together`: prompts that get pages at once, where there is room, because they are encoded together. `begun`: of
        responses that an earlier call began, the tokens to encode when they come back; `over`: those that it ended.
        """
        self.prompt_lengths, self.samples, self.block_manager, self.max_prefill_prompts = (
            dict(enumerate(prompts)),
            samples,
            pages,
            together,
        )
        self.seq_prompts: dict[int, int] = {}
        """The prompts of responses that came while the others ran (`add`)."""
        least = pages.blocks_needed(max(prompts, default=0)) + pages.blocks_needed(limit)
        if pages.num_blocks < least:
            raise ConfigError(
                f"the cache has room for {pages.num_blocks * pages.block_size} tokens, and one response may take "
                f"{least * pages.block_size}: set a lower --max-tokens, or free memory"
            )
        self.max_tokens = limit
        self.waiting = deque(i for i in range(len(prompts) * samples) if i not in over)
        self.sequences: dict[int, Sequence] = {}
        """Running and parked rows, by response, in the order in which they entered."""
        self.resuming: deque[int] = deque()
        """Parked rows that want a lane, and pages for what they were given."""
        self.preempted_idle: set[int] = set()
        """Rows that were evicted while they were parked."""
        self.free_batch_indices = list(range(lanes))[::-1]
        self.prompt_blocks: dict[int, list[int]] = {}
        """The pages of each prompt that is encoded."""
        self.prompts_to_prefill: list[int] = []
        """Prompts that have pages and nothing on them: the caller encodes them and empties this list."""
        self.recompute_lengths: dict[int, int] = dict(begun or {})
        """Of responses that were evicted, the tokens to encode when they come back."""
        self.num_unfinished = dict.fromkeys(range(len(prompts)), samples)
        """Responses of each prompt that have not ended."""
        for response in over:
            self.num_unfinished[response // samples] -= 1
        self.ref_counts = dict.fromkeys(range(len(prompts)), 0)
        """Rows on each prompt's pages."""
        self.num_preemptions = 0

    def prompt_of(self, response: int) -> int:
        return self.seq_prompts.get(response, response // self.samples)

    def add(self, response: int, prompt: int, keys: int, kept: int = 0) -> None:
        """One more response waits, to a prompt that may be new. `kept`: tokens to encode when it enters."""
        self.seq_prompts[response] = prompt
        if prompt not in self.prompt_lengths:
            self.prompt_lengths[prompt], self.num_unfinished[prompt], self.ref_counts[prompt] = keys, 0, 0
        self.num_unfinished[prompt] += 1
        if kept:
            self.recompute_lengths[response] = kept
        self.waiting.append(response)

    @property
    def running(self) -> list[Sequence]:
        return [row for row in self.sequences.values() if row.batch_index != NOT_RUNNING]

    def schedule(self, ahead: int = 1, most: int | None = None) -> list[Sequence]:
        """Rows that now get a lane, parked ones that are ready and then waiting ones, with room for `ahead` tokens.

        `most`: how many may run then, if fewer than there are lanes.
        """
        entering: list[Sequence] = []
        lanes = (
            len(self.free_batch_indices)
            if most is None
            else min(len(self.free_batch_indices), most - len(self.running))
        )
        while (
            len(entering) < lanes and self.resuming and self._try_resume(row := self.sequences[self.resuming[0]], ahead)
        ):
            self.resuming.popleft()
            row.batch_index = self.free_batch_indices.pop()
            entering.append(row)
        while len(entering) < lanes and self.waiting and (new := self._try_start(self.waiting[0], ahead)) is not None:
            self.waiting.popleft()
            new.batch_index = self.free_batch_indices.pop()
            entering.append(new)
        return entering

    def _try_resume(self, row: Sequence, ahead: int) -> bool:
        """Pages for what a parked row was given; others that do not run are evicted for it only if nobody runs."""
        want = self.block_manager.blocks_needed(min(row.num_tokens + ahead, self.max_tokens)) - len(row.block_table)
        if want > len(self.block_manager):
            self._free_unused_prompts()
            self._preempt_idle(want, row.prompt_id)
        while want > len(self.block_manager) and not self.running and row.seq_id in self.sequences:
            self.preempt()
        if want > len(self.block_manager) or row.seq_id not in self.sequences:
            return False
        row.block_table += self.block_manager.allocate(max(0, want))
        return True

    def _try_start(self, response: int, ahead: int) -> Sequence | None:
        prompt, length = self.prompt_of(response), self.recompute_lengths.get(response, 0)
        own = self.block_manager.blocks_needed(min(length + ahead, self.max_tokens))
        new = 0 if prompt in self.prompt_blocks else self.block_manager.blocks_needed(self.prompt_lengths[prompt])
        if len(self.block_manager) < own + new + len(self.sequences) // SPARE:
            held = self.block_manager.num_blocks - len(self.block_manager) - sum(map(len, self.prompt_blocks.values()))
            growth = (
                len(self.sequences) * self.block_manager.blocks_needed(self.max_tokens) - held
            )  # what the rows may still come to need
            want = own + new + min(len(self.sequences) // SPARE, growth)
            if len(self.block_manager) < want:
                self._free_unused_prompts(keep=prompt)
                if len(self.block_manager) < want and not self._preempt_idle(want, prompt):
                    return None
        self.recompute_lengths.pop(response, None)
        row = Sequence(response, prompt, length, self.block_manager.allocate(own))
        if prompt not in self.prompt_blocks:
            self._allocate_prompts(prompt)
        self.sequences[response] = row
        self.ref_counts[prompt] += 1
        return row

    def _preempt_idle(self, pages: int, prompt: int) -> bool:
        """This many free pages, at the cost of rows that wait for a turn which may never be asked for."""
        parked = [
            row for row in self.sequences.values() if row.batch_index == NOT_RUNNING and row.seq_id not in self.resuming
        ]
        for row in parked if self.seq_prompts else []:
            if len(self.block_manager) >= pages:
                break
            self.preempt(row)
            self._free_unused_prompts(keep=prompt)
        return len(self.block_manager) >= pages

    def _allocate_prompts(self, prompt: int) -> None:
        """Pages for this prompt, and for those behind it as far as they leave room for the rows to grow."""
        for p in (p for p in range(prompt, prompt + self.max_prefill_prompts) if p in self.prompt_lengths):
            need = self.block_manager.blocks_needed(self.prompt_lengths[p])
            if p != prompt and (
                p in self.prompt_blocks
                or not self.num_unfinished[p]
                or len(self.block_manager) < need + 2 * len(self.sequences)
            ):
                continue
            self.prompt_blocks[p] = self.block_manager.allocate(need, high=True)
            self.prompts_to_prefill.append(p)

    def _free_unused_prompts(self, keep: int | None = None) -> None:
        for prompt in [p for p in self.prompt_blocks if self.ref_counts[p] == 0 and p != keep]:
            self.block_manager.free(self.prompt_blocks.pop(prompt))
            self.prompts_to_prefill = [p for p in self.prompts_to_prefill if p != prompt]

    def can_append(self, ahead: int) -> bool:
        """Is there room for `ahead` more tokens in all rows that run, with nobody evicted?"""
        size, free = self.block_manager.block_size, len(self.block_manager)
        short = (row for row in self.running if row.num_tokens + ahead > len(row.block_table) * size)
        return (
            sum(
                self.block_manager.blocks_needed(min(row.num_tokens + ahead, self.max_tokens)) - len(row.block_table)
                for row in short
            )
            <= free
        )

    def reserve(self, ahead: int, rows: GenericSequence[Sequence] | None = None) -> list[Sequence]:
        """Room for `ahead` more tokens in these rows (all that run), oldest first; those that were evicted for it."""
        evicted: list[Sequence] = []
        for row in self.running if rows is None else rows:
            if (
                row.num_tokens + ahead <= len(row.block_table) * self.block_manager.block_size
                or row.seq_id not in self.sequences
            ):
                continue
            want = self.block_manager.blocks_needed(min(row.num_tokens + ahead, self.max_tokens)) - len(row.block_table)
            while want > len(self.block_manager) and row.seq_id in self.sequences:
                self._free_unused_prompts()
                if want > len(self.block_manager):
                    evicted.append(self.preempt())
            if row.seq_id in self.sequences and want > 0:
                row.block_table += self.block_manager.allocate(want)
        return evicted

    def preempt(self, row: Sequence | None = None) -> Sequence:
        """This row, or the one that entered last, gives up its pages and waits, first in line."""
        row = row or self.sequences[next(reversed(self.sequences))]
        self.recompute_lengths[row.seq_id] = row.num_tokens
        if row.batch_index == NOT_RUNNING and row.seq_id not in self.resuming:
            self.preempted_idle.add(row.seq_id)
        else:
            self.waiting.appendleft(row.seq_id)
        self._remove(row)
        self.num_preemptions += 1
        return row

    def suspend(self, response: int) -> None:
        """This row waits for its environment: another takes its lane, its pages stay."""
        row = self.sequences[response]
        self.free_batch_indices.append(row.batch_index)
        row.batch_index = NOT_RUNNING

    def resume(self, response: int, length: int) -> None:
        """A parked row may continue with so many tokens; one that was evicted meanwhile waits for pages first."""
        if response in self.preempted_idle:
            self.preempted_idle.remove(response)
            self.recompute_lengths[response] = length
            self.waiting.appendleft(response)
        else:
            self.sequences[response].num_tokens = length
            self.resuming.append(response)

    def finish(self, response: int) -> None:
        """This response is over; with its prompt's last one the prompt's pages are free too."""
        prompt = self.prompt_of(response)
        if response in self.sequences:
            self._remove(self.sequences[response])
        elif response in self.preempted_idle:
            self.preempted_idle.remove(response)
        else:
            self.waiting.remove(response)
        self.recompute_lengths.pop(response, None)
        self.num_unfinished[prompt] -= 1
        if self.num_unfinished[prompt] == 0:
            self.block_manager.free(self.prompt_blocks.pop(prompt, []))
            self.prompts_to_prefill = [p for p in self.prompts_to_prefill if p != prompt]
        if self.seq_prompts.pop(response, None) is not None and self.num_unfinished[prompt] == 0:
            del self.prompt_lengths[prompt], self.num_unfinished[prompt], self.ref_counts[prompt]

    def _remove(self, row: Sequence) -> None:
        del self.sequences[row.seq_id]
        self.block_manager.free(row.block_table)
        self.ref_counts[row.prompt_id] -= 1
        if row.batch_index != NOT_RUNNING:
            self.free_batch_indices.append(row.batch_index)
        elif row.seq_id in self.resuming:
            self.resuming.remove(row.seq_id)
