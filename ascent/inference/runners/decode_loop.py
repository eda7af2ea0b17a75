"""The decode loop of a generation call on captured CUDA graphs.

The host enqueues a few decode steps, schedules waiting sequences into free batch indices, and only then reads which
sequences had finished before. So the GPU never waits for the host, and a finished sequence occupies its batch index for
at most two such rounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascent.inference.attention_layouts import PrefillSegment, prefill_segments
from ascent.inference.generation_state import GenerationState
from ascent.inference.scheduler import Scheduler
from ascent.inference.sequence import NOT_RUNNING, Sequence
from ascent.models.packed_attention import packed_attention_enabled
from ascent.ops.decode_state import FINISHED_LENGTH

STEPS_PER_LAUNCH = 4
"""Decode steps between two checks for finished sequences."""
PREFILL_BREAK_EVEN_STEPS = 6
"""Break-even, in decode steps, between prefilling observation tokens and feeding them one per step."""
MAX_IDLE_FRACTION = 0.2
"""If the GPU idled for more than this share of a multi-turn call, the next call starts with half of its batch."""
OBSERVATION_POLL_SECONDS, MAX_DELAY_SECONDS = 0.002, 0.05
"""Observations that arrive within this interval of each other are prefilled together; the maximum delay for that."""
REQUEST_POLL_SECONDS = 0.003
"""The same interval for requests of clients, which arrive further apart."""


class DecodeLoop:
    """A generation call: writes what the scheduler decides to the decode state, and reads back what was sampled."""

    def __init__(self, runner: Any, prompts: list[list[int]], scheduler: Scheduler, generation: GenerationState):
        """`runner`: a `CudaGraphRunner` (its module imports this one)."""
        self.runner, self.decode_state, self.max_tokens = runner, runner.decode_state, generation.max_tokens
        self.length_limits: list[int] = generation.length_limits.tolist()
        self.prompts, self.scheduler, self.generation = dict(enumerate(prompts)), scheduler, generation
        self.seeds = [0] * len(generation.lengths) if generation.seeds is None else generation.seeds.tolist()
        self.entry_launch: dict[int, int] = {}
        """By sequence id, `num_launches` when it entered the batch or was suspended."""
        self.num_launches = 0
        self.in_flight: Callable[[], None] | None = None
        """Processes the results of the decode steps that were launched last."""
        multi_turn = generation.turns is not None and not generation.accepts_requests
        half = -(-min(len(scheduler.free_batch_indices), len(scheduler.waiting)) // 2)
        self.max_running = max(1, half) if runner.was_idle and multi_turn else None
        """Limit on running sequences until a turn or a response has finished; None: no limit.

        If all sequences wait for observations at once, the GPU idles. So half of the batch starts first.
        """
        self.delay_start = math.inf
        """Time since which requests have been delayed, to be prefilled together with the next ones."""
        self.idle_seconds = 0.0
        """Time in which no sequence ran because all waited for observations."""
        self.suspended_lengths: dict[int, int] = {}
        """Lengths of suspended sequences at the end of their turns."""
        self.forced_lengths: dict[int, int] = {}
        """Lengths, including the observation, of sequences whose observation is fed one token per step."""
        self.entry_length: dict[int, int] = {}
        """By sequence id, its length when it entered the batch. Earlier tokens are only in `generation`."""
        self.finished_outputs: list[tuple[list[int], list[int], list[Tensor]]] = []
        """Finished sequences: ids, lengths, and copies of their tokens, log-probs and kept masses."""
        self.host_copies: list[tuple[list[int], list[int], Tensor, Any]] = []
        """Finished sequences for `on_finished`: ids, lengths, tokens on their way to the host, and the CUDA event."""

    def __call__(self) -> None:
        start = time.perf_counter()
        with packed_attention_enabled(self.runner.lm.model):
            while self.generation.unfinished:
                if not self._should_delay(self._poll(wait=False)):
                    self._start_sequences()
                launched = self._launch()
                previous, self.in_flight = self.in_flight, launched
                if previous is not None:
                    previous()
                elif launched is None and self.generation.waits_for_input:
                    self._wait_for_input()
                    if not self.generation.accepts_requests:  # preempted sequences are not counted
                        self.max_running = max(1, -(-len(self.scheduler.sequences) // 2))
            self._synchronize()
        self.runner.was_idle = self.idle_seconds > MAX_IDLE_FRACTION * (time.perf_counter() - start)
        self.generation.timeline.stop()
        self._collect()

    def _should_delay(self, num_new: int) -> bool:
        """Return whether to delay new requests while others run, because more may be about to arrive.

        A prefill costs the host as much as several rounds of decode steps, whatever its size.
        """
        now, is_waiting = time.perf_counter(), bool(self.scheduler.resuming or self.scheduler.waiting)
        start = min(self.delay_start, now)
        can_wait = self.generation.accepts_requests and self.in_flight is not None
        delay = bool(num_new) and is_waiting and can_wait and now - start < MAX_DELAY_SECONDS
        self.delay_start = start if delay else math.inf
        return delay

    def _wait_for_input(self) -> None:
        """Wait for input, and for what follows closely: sequences that resume together stay in phase."""
        start = time.perf_counter()
        num_new = self._poll(wait=True)
        deadline = time.perf_counter() + MAX_DELAY_SECONDS
        self.idle_seconds += deadline - MAX_DELAY_SECONDS - start
        while (
            num_new
            and self.generation.waits_for_input
            and not self._turn_group_complete
            and time.perf_counter() < deadline
        ):
            time.sleep(REQUEST_POLL_SECONDS if self.generation.accepts_requests else OBSERVATION_POLL_SECONDS)
            num_new = self._poll(wait=False)

    @property
    def _turn_group_complete(self) -> bool:
        """Whether all sequences whose turns ended together with those of the resuming ones have their observations."""
        launches = {self.entry_launch[seq_id] for seq_id in self.scheduler.resuming}
        pending = () if self.generation.turns is None else self.generation.turns.pending
        return (
            bool(launches)
            and not self.generation.accepts_requests
            and not any(self.entry_launch[seq_id] in launches for seq_id in pending)
        )

    def _synchronize(self) -> None:
        """Wait for the steps in flight and process their results."""
        previous, self.in_flight = self.in_flight, None
        if previous is not None:
            previous()

    @property
    def output_buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.decode_state.tokens, self.decode_state.logp, self.decode_state.kept_mass

    def _start_sequences(self) -> None:
        """Schedule sequences, prefill them, and write their decode state."""
        scheduler, resumable = self.scheduler, set(self.scheduler.sequences.values())
        scheduled = scheduler.schedule(STEPS_PER_LAUNCH, self.max_running)
        if new_prompts := [p for p in scheduler.prompts_to_prefill if scheduler.prompt_lengths[p]]:
            segments = [PrefillSegment(scheduler.prompt_blocks[p], scheduler.prompt_lengths[p]) for p in new_prompts]
            tokens = [self.prompts[p][:-1] for p in new_prompts]
            prefill_segments(self.runner.prefill, self.decode_state.cache, tokens, segments)
        scheduler.prompts_to_prefill = []
        if not scheduled:
            return
        # Steps in flight have overwritten the last position of a suspended sequence, so it is written again.
        starts = {
            seq.seq_id: self.suspended_lengths.pop(seq.seq_id) - 1 if seq in resumable else 0 for seq in scheduled
        }
        inputs = {seq.seq_id: self._input_tokens(seq, starts[seq.seq_id]) for seq in scheduled}
        resumed = [seq for seq in scheduled if seq in resumable]
        num_steps = sum(seq.num_tokens - starts[seq.seq_id] for seq in resumed)
        break_even = PREFILL_BREAK_EVEN_STEPS * len(scheduler.running)
        if resumed and num_steps <= break_even and not self.generation.needs_tokens:
            cells = [
                (seq.batch_index, starts[seq.seq_id] + i, token)
                for seq in resumed
                for i, token in enumerate(inputs[seq.seq_id][1:])
            ]
            batch_index, position, token = self.runner.to_device(cells).t()
            self.decode_state.tokens[batch_index, position] = token
            for seq in resumed:
                self.forced_lengths[seq.seq_id], seq.num_tokens = seq.num_tokens, starts[seq.seq_id]
        if prefilled := [seq for seq in scheduled if seq.num_tokens > starts[seq.seq_id]]:
            self._prefill(prefilled, [starts[s.seq_id] for s in prefilled], [inputs[s.seq_id][:-1] for s in prefilled])
        self._write_decode_state([(seq, inputs[seq.seq_id][seq.num_tokens - starts[seq.seq_id]]) for seq in scheduled])
        for seq in scheduled:
            self.entry_launch[seq.seq_id] = self.num_launches
            self.entry_length[seq.seq_id] = self._total_length(seq)
        self._write_block_tables([(seq, 0) for seq in scheduled])

    def _input_tokens(self, seq: Sequence, start: int) -> list[int]:
        """Return the tokens to feed to a sequence from position `start` of its blocks, up to its last token."""
        before = [] if start else [self.prompts[seq.prompt_id][-1]]
        return before + self.generation.tokens_of(seq.seq_id, max(start - 1, 0), seq.num_tokens)

    def _total_length(self, seq: Sequence) -> int:
        """Return the length of a response, including an observation that is being fed step by step."""
        return max(seq.num_tokens, self.forced_lengths.get(seq.seq_id, 0))

    def _poll(self, wait: bool) -> int:
        """Take new observations and requests. Return how many arrived, without requests of clients that left."""
        observed = self.generation.poll_observations(wait)
        limits = self.generation.length_limits[[seq_id for seq_id, _ in observed]].tolist() if observed else []
        for (seq_id, tokens), limit in zip(observed, limits, strict=True):
            self.length_limits[seq_id] = limit
            if tokens:
                self.seeds[seq_id] = self.generation.seed_of(seq_id)
                self.scheduler.resume(seq_id, self.suspended_lengths[seq_id] + len(tokens))
            else:
                self._finish(seq_id)
        new = self.generation.new_requests()
        for seq_id, prompt_id, prompt in new:
            self.prompts[prompt_id], num_tokens = prompt, int(self.generation.lengths[seq_id])
            self.length_limits[seq_id] = int(self.generation.length_limits[seq_id])
            self.seeds[seq_id] = self.generation.seed_of(seq_id)
            self.scheduler.add(seq_id, prompt_id, len(prompt) - 1, num_tokens)
        return len(new) + sum(bool(tokens) or not self.generation.accepts_requests for _, tokens in observed)

    def _prefill(self, seqs: list[Sequence], starts: list[int], tokens: list[list[int]]) -> None:
        """Prefill tokens behind the first `starts` tokens of these sequences."""
        blocks, lengths = self.scheduler.prompt_blocks, self.scheduler.prompt_lengths
        segments = [
            PrefillSegment(seq.block_table, len(new), start, blocks[seq.prompt_id], lengths[seq.prompt_id])
            for seq, start, new in zip(seqs, starts, tokens, strict=True)
        ]
        prefill_segments(self.runner.prefill, self.decode_state.cache, tokens, segments)

    def _write_block_tables(self, grown: list[tuple[Sequence, int]]) -> None:
        """Write the blocks of sequences to the decode state, from the given index of their block tables on."""
        cells: list[tuple[int, int, int]] = []
        for seq, start in grown:
            prompt_blocks = self.scheduler.prompt_blocks[seq.prompt_id]
            blocks = [*prompt_blocks, *seq.block_table] if start == 0 else seq.block_table[start:]
            first = 0 if start == 0 else len(prompt_blocks) + start
            cells += [(seq.batch_index, first + i, block) for i, block in enumerate(blocks)]
        if cells:
            batch_index, column, block = self.runner.to_device(cells).t()
            self.decode_state.block_tables[batch_index, column] = block.int()

    def _launch(self) -> Callable[[], None] | None:
        """Launch the next decode steps. Return a function that processes their results; None: no sequence runs."""
        if not self.scheduler.can_append(STEPS_PER_LAUNCH):
            self._synchronize()  # finished sequences free their blocks
        running = self.scheduler.running
        num_blocks = {seq.seq_id: len(seq.block_table) for seq in running}
        preempted = [seq for seq in self.scheduler.reserve(STEPS_PER_LAUNCH, running) if seq.batch_index != NOT_RUNNING]
        self.scheduler.recompute_lengths |= {seq.seq_id: self._total_length(seq) for seq in preempted}
        self._save_sequences(preempted, [self._total_length(seq) for seq in preempted])
        live = [seq for seq in self.scheduler.running if seq.num_tokens < self.length_limits[seq.seq_id]]
        self.generation.timeline.record(len(live))
        if not live:
            return None
        self._write_block_tables(
            [(seq, num_blocks[seq.seq_id]) for seq in live if len(seq.block_table) > num_blocks[seq.seq_id]]
        )
        live.sort(key=lambda seq: seq.batch_index)
        num_steps = min(STEPS_PER_LAUNCH, max(self.length_limits[seq.seq_id] - seq.num_tokens for seq in live))
        self._replay(live, num_steps)
        steps = [(seq, seq.num_tokens, min(seq.num_tokens + num_steps, self.max_tokens)) for seq in live]
        for seq, _, after in steps:
            seq.num_tokens = after
        self.num_launches += 1
        results = [self.decode_state.state[FINISHED_LENGTH]]
        if self.generation.needs_tokens:
            positions = [[min(start + i, self.max_tokens - 1) for i in range(num_steps)] for _, start, _ in steps]
            batch_indices = self.runner.to_device([seq.batch_index for seq in live])
            index = batch_indices[:, None], self.runner.to_device(positions)
            results.append(self.decode_state.tokens[index])
            results += [self.decode_state.logp[index]] if self.generation.needs_logprobs else []
        if not self.runner.on_gpu:
            return partial(self._process_results, self.num_launches, steps, [x.clone() for x in results], None)
        copies, event = _copy_to_host(results)
        return partial(self._process_results, self.num_launches, steps, copies, event)

    def _replay(self, live: list[Sequence], num_steps: int) -> None:
        """Enqueue decode steps, one graph per group of sequences with the same sampling parameters."""
        batch_indices, lengths = [seq.batch_index for seq in live], self.scheduler.prompt_lengths
        split_kv = self.runner.should_split_kv([seq.num_tokens + lengths[seq.prompt_id] for seq in live])
        groups = self.generation.group_by_sampling([seq.seq_id for seq in live])
        for (temperature, params, greedy), members in groups.items():
            self.decode_state.temperature.fill_(temperature)
            selected = [batch_indices[i] for i in members]
            graph = self.runner.get_graph(self.runner.select_batch(selected), params, greedy, split_kv)
            self.runner.select_batch(selected)  # capturing a graph resets the selection
            for _ in range(num_steps):
                graph()

    def _process_results(
        self, launch: int, steps: list[tuple[Sequence, int, int]], results: list[Tensor], event: Any
    ) -> None:
        """Remove sequences that had finished after these steps. Suspend those whose environments continue."""
        if event is not None:
            event.synchronize()
        self._deliver_finished()
        finished_lengths, lengths, has_tokens = results[0].tolist(), {}, len(results) > 1
        for i, (seq, start, stop) in enumerate(steps):
            finished = finished_lengths[seq.batch_index]
            is_current = self.scheduler.sequences.get(seq.seq_id) is seq and self.entry_launch[seq.seq_id] < launch
            if (finished or stop >= self.length_limits[seq.seq_id] or has_tokens) and is_current:
                if len(results) > 2:
                    self.generation.logp[seq.seq_id, start:stop] = results[2][i][: stop - start]
                new_tokens = results[1][i] if has_tokens else None
                lengths[seq.seq_id] = self.generation.finished_length(seq.seq_id, start, stop, finished, new_tokens)
        ended = [seq for seq, _, _ in steps if lengths.get(seq.seq_id)]
        self.max_running = None if ended else self.max_running
        if ended and self.generation.turns is not None:
            ended = self._submit_turns(ended, lengths)
        if ended:
            index = self.runner.to_device([seq.batch_index for seq in ended])
            outputs = [buffer[index, : self.max_tokens] for buffer in self.output_buffers]
            seq_ids = [seq.seq_id for seq in ended]
            self.finished_outputs.append((seq_ids, [lengths[seq_id] for seq_id in seq_ids], outputs))
            if self.generation.on_finished is not None:
                self._copy_finished(*self.finished_outputs[-1])
        for seq in ended:
            self._finish(seq.seq_id)

    def _copy_finished(self, seq_ids: list[int], lengths: list[int], outputs: list[Tensor]) -> None:
        """Start to copy the tokens of finished sequences to the host, behind the steps in flight."""
        tokens, event = outputs[0][:, : max(lengths)], None
        if self.runner.on_gpu:
            (tokens,), event = _copy_to_host([tokens])
        self.host_copies.append((seq_ids, lengths, tokens, event))

    def _deliver_finished(self) -> None:
        """Call `on_finished` for the sequences whose tokens have arrived, so that they can be scored early."""
        while self.host_copies and (self.host_copies[0][3] is None or self.host_copies[0][3].query()):
            seq_ids, lengths, tokens, _ = self.host_copies.pop(0)
            before = [self.generation.tokens_of(seq_id, 0, self.entry_length[seq_id]) for seq_id in seq_ids]
            rows = zip(before, tokens.tolist(), lengths, strict=True)
            assert self.generation.on_finished is not None
            self.generation.on_finished(seq_ids, [old + row[len(old) : length] for old, row, length in rows])

    def _finish(self, seq_id: int) -> None:
        prompt_id = self.scheduler.prompt_of(seq_id)
        self.scheduler.finish(seq_id)
        self.generation.unfinished.discard(seq_id)
        self.suspended_lengths.pop(seq_id, None), self.forced_lengths.pop(seq_id, None)
        if prompt_id not in self.scheduler.prompt_lengths:
            del self.prompts[prompt_id]

    def _submit_turns(self, ended: list[Sequence], lengths: dict[int, int]) -> list[Sequence]:
        """Return the sequences that are finished. Suspend the others, whose turns go to their environments."""
        generation, seq_ids = self.generation, [seq.seq_id for seq in ended]
        self._save_sequences(ended, [lengths[seq_id] for seq_id in seq_ids])
        generation.update_stopped(seq_ids)
        finished = set(generation.finish_turns(seq_ids))
        for seq in ended:
            if seq.seq_id not in finished:
                seq.num_tokens = self.suspended_lengths[seq.seq_id] = lengths[seq.seq_id]
                self.entry_launch[seq.seq_id] = self.num_launches  # results of steps in flight are ignored
                self.scheduler.suspend(seq.seq_id)
        return [seq for seq in ended if seq.seq_id in finished]

    def _save_sequences(self, seqs: list[Sequence], lengths: list[int]) -> None:
        """Copy the outputs of running sequences to `generation`."""
        if seqs:
            index = self.runner.to_device([seq.batch_index for seq in seqs])
            outputs = [buffer[index, : max(lengths)] for buffer in self.output_buffers]
            self._write_outputs([seq.seq_id for seq in seqs], lengths, outputs)

    def _write_outputs(self, seq_ids: list[int], lengths: list[int], outputs: list[Tensor]) -> None:
        """Write the outputs since `entry_length` to `generation`; it has the earlier tokens already."""
        generation, entry = self.generation, [self.entry_length[seq_id] for seq_id in seq_ids]
        low, high, ends = min(entry), max(lengths), np.array(lengths)
        position = np.arange(low, high)
        is_new = (position >= np.array(entry)[:, None]) & (position < ends[:, None])
        kept_mass = None if generation.seeds is None else generation.kept_mass  # greedy sampling has none
        for target, output in zip((generation.tokens, generation.logp, kept_mass), outputs, strict=True):
            if target is not None:  # numpy is faster here: sleeping threads of torch are slow to wake up
                array, new = target.numpy(), output[:, low:high].cpu().numpy()
                array[seq_ids, low:high] = np.where(is_new, new, array[seq_ids, low:high])
        generation.lengths.numpy()[seq_ids] = ends

    def _write_decode_state(self, seqs: list[tuple[Sequence, int]]) -> None:
        """Write the state of sequences that enter the batch, each with the token that it feeds next."""
        lengths, to_device = self.scheduler.prompt_lengths, self.runner.to_device
        states = [
            [
                lengths[seq.prompt_id],
                seq.num_tokens,
                last_token,
                self.seeds[seq.seq_id],
                0,
                self.forced_lengths.get(seq.seq_id, 0),
            ]
            for seq, last_token in seqs
        ]
        self.decode_state.state[:, to_device([seq.batch_index for seq, _ in seqs])] = to_device(states).t()

    def _collect(self) -> None:
        """Copy all finished sequences to `generation`, and the progress of those that a later call continues."""
        generation, running = self.generation, self.scheduler.running
        self._save_sequences(running, [self._total_length(seq) for seq in running])
        seq_ids = [seq_id for part in self.finished_outputs for seq_id in part[0]]
        if seq_ids:
            lengths = [length for part in self.finished_outputs for length in part[1]]
            outputs = [torch.cat([part[2][k][:, : max(lengths)] for part in self.finished_outputs]) for k in range(3)]
            self._write_outputs(seq_ids, lengths, outputs)
        generation.update_stopped(seq_ids + [seq.seq_id for seq in running])
        if generation.turns is not None:
            terminated = generation.turns.terminated
            generation.stopped = torch.tensor([seq_id in terminated for seq_id in range(len(generation.stopped))])


def _copy_to_host(tensors: list[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
    """Start copies to pinned memory. Return them with the event that tells when they have arrived."""
    copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in tensors]
    event = torch.cuda.Event()
    event.record()
    return copies, event
