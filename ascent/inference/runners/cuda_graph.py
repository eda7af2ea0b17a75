"""Decoding as captured CUDA graphs: one replay is one token of every running response, drawn and written down.

All state lives on the card (step.py). The host enqueues a few replays, lets waiting responses into lanes that are
free, and only then reads which responses had finished before: the card is never kept waiting for that answer, and a
finished lane idles for at most two such rounds. On a CPU the same steps run without graphs, for the tests.

A prompt's last token is fed as the first of each of its responses. So a response's first token comes out of the same
step as every other, and a prompt is encoded without its last token.
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

from ascent.core.sampling_params import SamplingParams
from ascent.inference.block_manager import BlockManager
from ascent.inference.generation_state import GenerationState
from ascent.inference.kv_cache import PrefillSegment, extend
from ascent.inference.prefill import MAX_GRAPH_WORK, PrefillGraphs, PrefillModel
from ascent.inference.scheduler import Scheduler
from ascent.inference.sequence import NOT_RUNNING, Sequence
from ascent.models.causal_lm import LanguageModel
from ascent.models.decoder_model import MAX_HIDDEN_ERROR, DecoderModel, UnsupportedArchitectureError
from ascent.models.lora import randomized_adapters
from ascent.models.packed_attention import PackedGroup, PackedLayout, packed_attention_enabled, to_device_async
from ascent.models.quantization import parameter_count
from ascent.ops import decode_ops as formulas
from ascent.ops import load_kernels
from ascent.ops.cuda_graphs import CudaGraphs, EagerGraphs
from ascent.ops.decode_state import (
    BLOCK_SIZE,
    FINISHED_LENGTH,
    LAST_TOKEN,
    MAX_STOP_TOKENS,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    DecodeState,
)

GRAPH_BATCH_SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Rows that graphs are captured for, besides all rows."""
KV_CACHE_MEMORY_FRACTION = 0.25
"""Of the free memory, what the pages may take: they stay there while the learner works."""
MAX_PREFILL_PROMPTS = 16
"""Prompts that are encoded together: a forward pass over one takes as long."""
MIN_SPLIT_KV_LENGTH = 512
"""Keys from which on rows may be shared out."""
MAX_SPLIT_KV_ROWS, MIN_LENGTH_RATIO = 256, 1.5
"""They are where there are fewer rows times heads than this, or where the longest is this many times the mean."""
STEPS_PER_LAUNCH = 4
"""Steps between two looks at which responses have finished."""
PREFILL_BREAK_EVEN_STEPS = 6
"""Steps that take as long as encoding what rows were given. If feeding it one by one keeps fewer busy, that is done."""
MAX_IDLE_FRACTION = 0.2
"""Share of a call's time for which nobody ran, from which on the next one begins with half of its rows."""
OBSERVATION_POLL_SECONDS, MAX_DELAY_SECONDS = 0.002, 0.05
"""Seconds: answers that come no further apart are taken together, but none waits longer for others."""
REQUEST_POLL_SECONDS = 0.003
"""The same, of requests: a server reads some of them while the others are on their way."""
SLOW_RUNNER_NOTE = "rollouts take 20 to 40 times as long as on the fast path, which this model cannot take: {why}"
"""What a run says that decodes without graphs; measured on an H200, with 135 million and 1.5 billion parameters."""


def cuda_graph_runner(lm: LanguageModel) -> tuple[CudaGraphRunner | None, str | None]:
    """The decoder of this model, which all its samplers share; or None and why there is none."""
    if hasattr(lm, "cuda_graph_runner"):
        return lm.cuda_graph_runner, None  # type: ignore[return-value]
    if len(lm.ends) > MAX_STOP_TOKENS:
        return None, f"it has {len(lm.ends)} end tokens, and there is room for {MAX_STOP_TOKENS}"
    try:
        decoder = CudaGraphRunner(lm)
        gap, bound = decoder.hidden_error(), MAX_HIDDEN_ERROR.get(lm.model.dtype, 1e-3)
    except UnsupportedArchitectureError as error:
        return None, str(error)
    if not gap < bound:
        return None, f"its layers compute something that Llama's do not (hidden states would be {gap:.2g} off)"
    lm.cuda_graph_runner = decoder  # type: ignore[assignment]
    return decoder, None


class CudaGraphRunner:
    """Decodes all samples of all prompts, at most `rows` of them at once, for models like Llama.

    Called as PagedRunner is; buffers and graphs outlive the call, and are made anew when a call needs more room or
    the parameters have moved.
    """

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.on_gpu = lm.device.type == "cuda"
        self.model = DecoderModel.of(lm.model)
        self.parameters = list(lm.model.parameters())
        self.addresses = self._parameter_addresses()
        """Of the parameters, when the model was looked through last."""
        plain = not self.on_gpu or lm.model.dtype == torch.float64
        self.ops = formulas if plain else load_kernels("triton_decoding") or formulas
        self.decode_state: DecodeState = None  # type: ignore[assignment]
        """There from the first `prepare` on."""
        self.drop_graphs()
        self.current_batch_indices: list[int] = []
        self.memory_full = False
        """There is no room for more pages."""
        self.was_idle = False
        """Did the latest call wait for environments with nothing to run?"""

    def __call__(
        self,
        lm: LanguageModel,
        prompts: list[list[int]],
        samples: int,
        rows: int,
        drawn: GenerationState,
        room: int = 0,
    ) -> DecodeLoop:
        rows, keys = min(rows, len(drawn.lengths)), [len(p) - 1 for p in prompts]
        long, longest = -(-drawn.max_tokens // BLOCK_SIZE), -(-max(keys, default=drawn.max_prompt_tokens) // BLOCK_SIZE)
        slots = min(
            len(prompts) or rows, 4 * -(-rows // samples) + MAX_PREFILL_PROMPTS
        )  # prompts whose responses are under way
        pages = self._num_blocks(rows * long + slots * longest, long + longest)
        pages = min(pages, -(-room // BLOCK_SIZE)) if room else pages
        self.prepare(rows, pages, -(-(long + longest) // 8) * 8, drawn.max_tokens)
        self.decode_state.max_tokens.fill_(drawn.max_tokens)
        self.decode_state.stop_tokens.copy_(
            torch.cat([drawn.stop_tokens, torch.full((MAX_STOP_TOKENS - len(drawn.stop_tokens),), -1)])
        )
        drawn.timeline.capacity = rows
        schedule = Scheduler(
            keys,
            samples,
            rows,
            drawn.max_tokens,
            BlockManager(pages, BLOCK_SIZE),
            MAX_PREFILL_PROMPTS,
            started_lengths=drawn.started_lengths,
            finished=drawn.already_finished,
        )
        return DecodeLoop(self, prompts, schedule, drawn)

    def _num_blocks(self, wanted: int, least: int) -> int:
        """Pages for a call: all that it can need, or as many as fit. Where no more fit, the board stays as it is."""
        have = 0 if self.decode_state is None else self.decode_state.capacity[1]
        if have >= wanted or (self.memory_full and have >= least):
            return min(wanted, have)
        wanted += wanted // 8  # later prompts may be longer
        if self.on_gpu:
            self.decode_state = None  # type: ignore[assignment]
            self.drop_graphs()
            own = torch.cuda.memory_allocated()
            free = min(self.lm.limit, torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()) - own
            net = self.model
            page = 2 * len(net.layers) * net.num_kv_heads * BLOCK_SIZE * net.head_dim * net.embedding.element_size()
            most = int(KV_CACHE_MEMORY_FRACTION * free) // page
            self.memory_full, wanted = most < wanted, max(least, min(wanted, most))
        return wanted

    def drop_graphs(self) -> None:
        """What was captured: buffers or parameters lie elsewhere now."""
        self.graphs: dict[Any, Callable[[], None]] = {}
        size = parameter_count(self.lm.model)
        self.prefill_graphs = PrefillGraphs(CudaGraphs() if self.on_gpu else EagerGraphs(), int(MAX_GRAPH_WORK / size))

    def prepare(self, rows: int, pages: int, width: int, limit: int) -> None:
        """Buffers with this much room, and parameters where the graphs expect them."""
        if (
            self.addresses == self._parameter_addresses()
        ):  # nothing has moved: the model need not be looked through again
            self.model.copies.refresh()
        else:
            net = DecoderModel.of(self.lm.model)
            if net.addresses() != self.model.addresses():
                self.drop_graphs()
            self.model, self.addresses = net, self._parameter_addresses()
        net = self.model
        if self.decode_state is not None and self.decode_state.fits(rows, pages, width, limit):
            return
        if self.decode_state is not None:
            rows, pages, width, limit = map(max, self.decode_state.capacity, (rows, pages, width, limit))
        self.decode_state = None  # type: ignore[assignment]
        self.drop_graphs()
        like = net.embedding.detach()
        self.decode_state = DecodeState.allocate(
            len(net.layers), net.num_kv_heads, net.head_dim, rows, pages, width, limit, like
        )
        self.tables = net.rotary_cache(width * BLOCK_SIZE)
        self.current_batch_indices = []

    def _parameter_addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.parameters]

    @property
    def prefill(self) -> PrefillModel:
        """What encodes tokens that are given."""
        return PrefillModel(self.model, self.ops, self.tables, self.prefill_graphs)

    def decode_step(self, rows: int, uneven: bool, support: SamplingParams, greedy: bool) -> None:
        """The next token of the first `rows` rows."""
        hidden = self.model.hidden(self.ops, self.decode_state, self.tables, rows, uneven)
        self.ops.sample_next_tokens(self.model.head.logits(hidden), self.decode_state, support, greedy)

    def get_graph(self, rows: int, support: SamplingParams, greedy: bool, uneven: bool = False) -> Callable[[], None]:
        """A step as one launch; captured at its first use, with every row on the lane that is nobody's."""
        run = partial(self.decode_step, rows, uneven, support, greedy)
        key = (rows, uneven, support.min_tokens if greedy else support)
        if key not in self.graphs:
            self.decode_state.batch_indices.fill_(self.decode_state.max_num_seqs)
            self.current_batch_indices = []
            self.prefill_graphs.graphs.warm_up(run)
            self.graphs[key] = self.prefill_graphs.graphs.capture(run)
        return self.graphs[key]

    def select_batch(self, lanes: list[int]) -> int:
        """Let the next steps work on these lanes; how many rows such a step has."""
        rows = min([self.decode_state.max_num_seqs, *(n for n in GRAPH_BATCH_SIZES if n >= len(lanes))])
        lanes = lanes + [self.decode_state.max_num_seqs] * (rows - len(lanes))
        if lanes != self.current_batch_indices:
            self.decode_state.batch_indices[:rows].copy_(self.to_device(lanes), non_blocking=True)
            self.current_batch_indices = lanes
        return rows

    def should_split_kv(self, keys: list[int]) -> bool:
        """Would the longest of rows with so many keys keep the others waiting?"""
        longest, few = max(keys), len(keys) * self.model.num_kv_heads < MAX_SPLIT_KV_ROWS
        return longest > MIN_SPLIT_KV_LENGTH and (few or longest > MIN_LENGTH_RATIO * sum(keys) / len(keys))

    def to_device(self, numbers: list[Any]) -> Tensor:
        return to_device_async(torch.tensor(numbers, dtype=torch.long), self.lm.device)

    @torch.no_grad()
    def hidden_error(self) -> float:
        """How far our hidden states are from the model's own on a few random tokens, relative to their size."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.lm.vocab, (2, 12), generator=generator)
        before, own = -(-5 // BLOCK_SIZE), -(-8 // BLOCK_SIZE)
        pages = list(range(before + 2 * own))
        device = self.lm.device
        with randomized_adapters(self.lm.model), packed_attention_enabled(self.lm.model):
            self.prepare(2, len(pages), before + own, 8)
            board = self.decode_state
            row, positions = (
                PackedLayout([PackedGroup(0, 12, ()), PackedGroup(12, 12, ())]),
                torch.arange(12, device=device).repeat(2),
            )
            want = self.lm.hidden(ids.to(device).view(1, -1), positions[None], row).view(2, 12, -1)[:, 5:]
            apart = []
            for i in range(2):
                extend(self.prefill, board.cache, [ids[i, :5].tolist()], [PrefillSegment(pages, 5)])
                rows = [pages[: before + own], pages[:before] + pages[before + own :]]
                board.block_tables[:2, : before + own] = torch.tensor(rows, dtype=torch.int32)
                self.select_batch([0, 1])
                for t in range(7):
                    board.state[PROMPT_LENGTH, :2], board.state[RESPONSE_LENGTH, :2], board.state[LAST_TOKEN, :2] = (
                        5,
                        t,
                        ids[i, 5 + t],
                    )
                    got = self.model.hidden(self.ops, board, self.tables, 2)
                    apart.append((got[1] - want[i, t]).double().norm() / want[i, t].double().norm())
        self.decode_state = None  # type: ignore[assignment]
        return float(torch.stack(apart).max())


class DecodeLoop:
    """One call: what the schedule decides is written to the board, and what the card has drawn is read back."""

    def __init__(self, decoder: CudaGraphRunner, prompts: list[list[int]], schedule: Scheduler, drawn: GenerationState):
        self.runner, self.decode_state, self.max_tokens = decoder, decoder.decode_state, drawn.max_tokens
        self.length_limits: list[int] = drawn.length_limits.tolist()
        self.prompts, self.scheduler, self.generation = dict(enumerate(prompts)), schedule, drawn
        self.seeds = [0] * len(drawn.lengths) if drawn.seeds is None else drawn.seeds.tolist()
        self.entry_launch: dict[int, int] = {}
        """By response, the launches before it began or was extended."""
        self.num_launches = 0
        self.in_flight: Callable[[], None] | None = None
        """What to do when the steps that were launched are over."""
        half = -(-min(len(schedule.free_batch_indices), len(schedule.waiting)) // 2)
        self.max_running = (
            max(1, half) if decoder.was_idle and drawn.turns is not None and not drawn.accepts_requests else None
        )
        """Rows that may run at once, until some of them are over or asked about; None: as many as there are lanes.

        Where all rows wait for their environments together, the card waits too. So half of them go first.
        """
        self.delay_start = math.inf
        """Since when requests wait for those behind them, to be encoded together."""
        self.idle_seconds = 0.0
        """Seconds for which nobody ran, because all were waiting for their environments."""
        self.suspended_lengths: dict[int, int] = {}
        """Of parked responses, the tokens that they had when their turn ended."""
        self.forced_lengths: dict[int, int] = {}
        """Of responses that are fed an observation step by step, their tokens with it."""
        self.entry_length: dict[int, int] = {}
        """By response, the first token that its lane has drawn; those before are in `drawn`."""
        self.finished_outputs: list[tuple[list[int], list[int], list[Tensor]]] = []
        """Responses that are over, their lengths, and what their lanes had: tokens, log-probs and masses."""
        self.host_copies: list[tuple[list[int], list[int], Tensor, Any]] = []
        """Those of them that nobody was told of yet: their lengths, and their tokens on the way to the host."""

    def __call__(self) -> None:
        begun = time.perf_counter()
        with packed_attention_enabled(self.runner.lm.model):
            while self.generation.unfinished:
                if not self._should_delay(self._poll(wait=False)):
                    self._start_sequences()
                launched = self._launch()
                flight, self.in_flight = self.in_flight, launched
                if flight is not None:
                    flight()
                elif launched is None and self.generation.waits_for_input:
                    self._wait_for_input()
                    if not self.generation.accepts_requests:
                        self.max_running = max(
                            1, -(-len(self.scheduler.sequences) // 2)
                        )  # those that were evicted have no row
            self._synchronize()
        self.runner.was_idle = self.idle_seconds > MAX_IDLE_FRACTION * (time.perf_counter() - begun)
        self.generation.timeline.stop()
        self._collect()

    def _should_delay(self, came: int) -> bool:
        """Let requests wait, while others run, if some came just now: more may be on their way.

        To encode tokens takes the host as long as several rounds, whatever there is to encode.
        """
        now, wanting = time.perf_counter(), bool(self.scheduler.resuming or self.scheduler.waiting)
        since = min(self.delay_start, now)
        holds = (
            bool(came)
            and wanting
            and self.generation.accepts_requests
            and self.in_flight is not None
            and now - since < MAX_DELAY_SECONDS
        )
        self.delay_start = since if holds else math.inf
        return holds

    def _wait_for_input(self) -> None:
        """Wait for answers, and for those that come right behind the first: rows that go on together stay together."""
        begun = time.perf_counter()
        came = self._poll(wait=True)
        until = time.perf_counter() + MAX_DELAY_SECONDS
        self.idle_seconds += until - MAX_DELAY_SECONDS - begun
        while (
            came and self.generation.waits_for_input and not self._turn_group_complete and time.perf_counter() < until
        ):
            time.sleep(REQUEST_POLL_SECONDS if self.generation.accepts_requests else OBSERVATION_POLL_SECONDS)
            came = self._poll(wait=False)

    @property
    def _turn_group_complete(self) -> bool:
        """Has everyone answered whose turn ended together with the turns of those that are ready?"""
        together = {self.entry_launch[response] for response in self.scheduler.resuming}
        waiting = () if self.generation.turns is None else self.generation.turns.pending
        return (
            bool(together)
            and not self.generation.accepts_requests
            and not any(self.entry_launch[r] in together for r in waiting)
        )

    def _synchronize(self) -> None:
        """Wait for the steps that were launched last, if any were, and see who has finished."""
        flight, self.in_flight = self.in_flight, None
        if flight is not None:
            flight()

    @property
    def output_buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.decode_state.tokens, self.decode_state.logp, self.decode_state.kept_mass

    def _start_sequences(self) -> None:
        """Responses into free lanes: their pages, the token that is fed next (a new one's is the prompt's last)."""
        schedule, there = self.scheduler, set(self.scheduler.sequences.values())
        entering = schedule.schedule(STEPS_PER_LAUNCH, self.max_running)
        if fresh := [p for p in schedule.prompts_to_prefill if schedule.prompt_lengths[p]]:
            segments = [PrefillSegment(schedule.prompt_blocks[p], schedule.prompt_lengths[p]) for p in fresh]
            extend(self.runner.prefill, self.decode_state.cache, [self.prompts[p][:-1] for p in fresh], segments)
        schedule.prompts_to_prefill = []
        if not entering:
            return
        # a parked row has idled on the last place of its pages, so that place is written again
        starts = {row.seq_id: self.suspended_lengths.pop(row.seq_id) - 1 if row in there else 0 for row in entering}
        tokens = {row.seq_id: self._input_tokens(row, starts[row.seq_id]) for row in entering}
        back = [row for row in entering if row in there]
        steps = sum(row.num_tokens - starts[row.seq_id] for row in back)
        if back and steps <= PREFILL_BREAK_EVEN_STEPS * len(schedule.running) and not self.generation.needs_tokens:
            cells = [(r.batch_index, starts[r.seq_id] + i, t) for r in back for i, t in enumerate(tokens[r.seq_id][1:])]
            lane, place, token = self.runner.to_device(cells).t()
            self.decode_state.tokens[lane, place] = token
            for row in back:
                self.forced_lengths[row.seq_id], row.num_tokens = row.num_tokens, starts[row.seq_id]
        if encoded := [row for row in entering if row.num_tokens > starts[row.seq_id]]:
            self._prefill(encoded, [starts[r.seq_id] for r in encoded], [tokens[r.seq_id][:-1] for r in encoded])
        self._write_decode_state([(row, tokens[row.seq_id][row.num_tokens - starts[row.seq_id]]) for row in entering])
        for row in entering:
            self.entry_launch[row.seq_id] = self.num_launches
            self.entry_length[row.seq_id] = self._total_length(row)
        self._write_block_tables([(row, 0) for row in entering])

    def _input_tokens(self, row: Sequence, start: int) -> list[int]:
        """The tokens that a row is fed, from this place of its pages on up to the next one."""
        before = [] if start else [self.prompts[row.prompt_id][-1]]
        return before + self.generation.tokens_of(row.seq_id, max(start - 1, 0), row.num_tokens)

    def _total_length(self, row: Sequence) -> int:
        """How many tokens a response has, counting an observation that it is still being fed."""
        return max(row.num_tokens, self.forced_lengths.get(row.seq_id, 0))

    def _poll(self, wait: bool) -> int:
        """What environments have answered, and what has come: how many. They want a lane, or are over.

        Requests that leave are not counted: nobody waits for those behind them.
        """
        answers = self.generation.poll_observations(wait)
        limits = self.generation.length_limits[[response for response, _ in answers]].tolist() if answers else []
        for (response, tokens), limit in zip(answers, limits, strict=True):
            self.length_limits[response] = limit
            if tokens:
                self.seeds[response] = self.generation.seed_of(response)
                self.scheduler.resume(response, self.suspended_lengths[response] + len(tokens))
            else:
                self._finish(response)
        entering = self.generation.new_requests()
        for response, prompt, ids in entering:
            self.prompts[prompt], begun = ids, int(self.generation.lengths[response])
            self.length_limits[response], self.seeds[response] = (
                int(self.generation.length_limits[response]),
                self.generation.seed_of(response),
            )
            self.scheduler.add(response, prompt, len(ids) - 1, begun)
        return len(entering) + sum(bool(tokens) or not self.generation.accepts_requests for _, tokens in answers)

    def _prefill(self, rows: list[Sequence], starts: list[int], tokens: list[list[int]]) -> None:
        """Tokens that these rows are given, into their pages."""
        before, keys = self.scheduler.prompt_blocks, self.scheduler.prompt_lengths
        parts = zip(rows, starts, tokens, strict=True)
        segments = [
            PrefillSegment(r.block_table, len(own), at, before[r.prompt_id], keys[r.prompt_id]) for r, at, own in parts
        ]
        extend(self.runner.prefill, self.decode_state.cache, tokens, segments)

    def _write_block_tables(self, grown: list[tuple[Sequence, int]]) -> None:
        """Write the pages of these rows to the table; of each, those from the given one on are new."""
        cells: list[tuple[int, int, int]] = []
        for row, old in grown:
            before = self.scheduler.prompt_blocks[row.prompt_id]
            pages = [*before, *row.block_table] if old == 0 else row.block_table[old:]
            first = 0 if old == 0 else len(before) + old
            cells += [(row.batch_index, first + i, page) for i, page in enumerate(pages)]
        if cells:
            lane, column, page = self.runner.to_device(cells).t()
            self.decode_state.block_tables[lane, column] = page.int()

    def _launch(self) -> Callable[[], None] | None:
        """Enqueue the next steps; returned is what to do when they are over. None: there is nothing to run."""
        if not self.scheduler.can_append(STEPS_PER_LAUNCH):
            self._synchronize()  # those that have finished make room
        running = self.scheduler.running
        before = {row.seq_id: len(row.block_table) for row in running}
        evicted = [row for row in self.scheduler.reserve(STEPS_PER_LAUNCH, running) if row.batch_index != NOT_RUNNING]
        self.scheduler.recompute_lengths |= {row.seq_id: self._total_length(row) for row in evicted}
        self._save_sequences(evicted, [self._total_length(row) for row in evicted])
        live = [row for row in self.scheduler.running if row.num_tokens < self.length_limits[row.seq_id]]
        self.generation.timeline.record(len(live))
        if not live:
            return None
        self._write_block_tables(
            [(row, before[row.seq_id]) for row in live if len(row.block_table) > before[row.seq_id]]
        )
        live.sort(key=lambda row: row.batch_index)
        steps = min(STEPS_PER_LAUNCH, max(self.length_limits[row.seq_id] - row.num_tokens for row in live))
        lanes = [row.batch_index for row in live]
        uneven = self.runner.should_split_kv(
            [row.num_tokens + self.scheduler.prompt_lengths[row.prompt_id] for row in live]
        )
        for (temperature, support, greedy), some in self.generation.group_by_sampling(
            [row.seq_id for row in live]
        ).items():
            self.decode_state.temperature.fill_(temperature)
            alike = [lanes[i] for i in some]
            rows = self.runner.select_batch(alike)
            graph = self.runner.get_graph(rows, support, greedy, uneven)
            self.runner.select_batch(alike)
            for _ in range(steps):
                graph()
        ran = [(row, row.num_tokens, min(row.num_tokens + steps, self.max_tokens)) for row in live]
        for row, _, after in ran:
            row.num_tokens = after
        self.num_launches += 1
        read = [self.decode_state.state[FINISHED_LENGTH]]
        if self.generation.needs_tokens:  # the tokens of these steps
            places = [[min(start + i, self.max_tokens - 1) for i in range(steps)] for _, start, _ in ran]
            where = self.runner.to_device(lanes)[:, None], self.runner.to_device(places)
            read += [
                self.decode_state.tokens[where],
                *([self.decode_state.logp[where]] if self.generation.needs_logprobs else []),
            ]
        if not self.runner.on_gpu:
            return partial(self._process_finished, self.num_launches, ran, [tensor.clone() for tensor in read], None)
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in read]
        for copy, tensor in zip(copies, read, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return partial(self._process_finished, self.num_launches, ran, copies, event)

    def _process_finished(
        self, launch: int, ran: list[tuple[Sequence, int, int]], read: list[Tensor], event: Any
    ) -> None:
        """Responses that had finished when these steps were over leave their lanes, but for those that are extended."""
        if event is not None:
            event.synchronize()
        self._deliver_finished()
        done, lengths = read[0].tolist(), {}
        for i, (row, start, stop) in enumerate(ran):
            ended = done[row.batch_index] or stop >= self.length_limits[row.seq_id] or len(read) > 1
            if ended and self.scheduler.sequences.get(row.seq_id) is row and self.entry_launch[row.seq_id] < launch:
                fresh = read[1][i] if len(read) > 1 else None
                if len(read) > 2:
                    self.generation.logp[row.seq_id, start:stop] = read[2][i][: stop - start]
                lengths[row.seq_id] = self.generation.finished_length(
                    row.seq_id, start, stop, done[row.batch_index], fresh
                )
        over = [row for row, _, _ in ran if lengths.get(row.seq_id)]
        self.max_running = None if over else self.max_running
        if over and self.generation.turns is not None:
            over = self._submit_turns(over, lengths)
        if over:
            where = self.runner.to_device([row.batch_index for row in over])
            found = [buffer[where, : self.max_tokens] for buffer in self.output_buffers]
            self.finished_outputs.append(([row.seq_id for row in over], [lengths[row.seq_id] for row in over], found))
            if self.generation.on_finished is not None:
                self._copy_to_host(*self.finished_outputs[-1])
        for row in over:
            self._finish(row.seq_id)

    def _copy_to_host(self, responses: list[int], lengths: list[int], lanes: list[Tensor]) -> None:
        """Send the tokens of these to the host, behind the steps that are under way."""
        tokens, event = lanes[0][:, : max(lengths)], None
        if self.runner.on_gpu:
            tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.host_copies.append((responses, lengths, tokens, event))

    def _deliver_finished(self) -> None:
        """Tell of responses whose tokens have arrived: whoever scores them begins now."""
        while self.host_copies and (self.host_copies[0][3] is None or self.host_copies[0][3].query()):
            responses, lengths, tokens, _ = self.host_copies.pop(0)
            before = [self.generation.tokens_of(response, 0, self.entry_length[response]) for response in responses]
            rows = zip(before, tokens.tolist(), lengths, strict=True)
            assert self.generation.on_finished is not None
            self.generation.on_finished(responses, [old + row[len(old) : length] for old, row, length in rows])

    def _finish(self, response: int) -> None:
        prompt = self.scheduler.prompt_of(response)
        self.scheduler.finish(response)
        self.generation.unfinished.discard(response)
        self.suspended_lengths.pop(response, None), self.forced_lengths.pop(response, None)
        if prompt not in self.scheduler.prompt_lengths:
            del self.prompts[prompt]

    def _submit_turns(self, ended: list[Sequence], lengths: dict[int, int]) -> list[Sequence]:
        """Who of these, whose turns have ended, is over; the others are parked until their environments answer."""
        drawn, responses = self.generation, [row.seq_id for row in ended]
        self._save_sequences(ended, [lengths[response] for response in responses])
        drawn.update_stopped(responses)
        over = set(drawn.finish_turns(responses))
        for row in ended:
            if row.seq_id not in over:
                row.num_tokens = self.suspended_lengths[row.seq_id] = lengths[row.seq_id]
                self.entry_launch[row.seq_id] = self.num_launches  # what is under way for it counts no more
                self.scheduler.suspend(row.seq_id)
        return [row for row in ended if row.seq_id in over]

    def _save_sequences(self, rows: list[Sequence], lengths: list[int]) -> None:
        """What the lanes of these rows have drawn, to the host."""
        if rows:
            lanes = self.runner.to_device([row.batch_index for row in rows])
            self._write_outputs(
                [row.seq_id for row in rows], lengths, [b[lanes, : max(lengths)] for b in self.output_buffers]
            )

    def _write_outputs(self, responses: list[int], lengths: list[int], lanes: list[Tensor]) -> None:
        """Responses so far: what they had when they got their lanes, and what is in these from then on."""
        drawn, begun = self.generation, [self.entry_length[response] for response in responses]
        low, high, length = min(begun), max(lengths), np.array(lengths)
        place = np.arange(low, high)
        new = (place >= np.array(begun)[:, None]) & (place < length[:, None])
        mass = None if drawn.seeds is None else drawn.kept_mass  # a greedy draw has none
        for into, lane in zip((drawn.tokens, drawn.logp, mass), lanes, strict=True):
            if into is not None:  # by numpy: threads of torch that have slept wake up slowly
                whole, fresh = into.numpy(), lane[:, low:high].cpu().numpy()
                whole[responses, low:high] = np.where(new, fresh, whole[responses, low:high])
        drawn.lengths.numpy()[responses] = length

    def _write_decode_state(self, rows: list[tuple[Sequence, int]]) -> None:
        """The state of these rows' lanes: they feed the given token next."""
        keys, sent = self.scheduler.prompt_lengths, self.runner.to_device
        states = [
            [
                keys[row.prompt_id],
                row.num_tokens,
                last,
                self.seeds[row.seq_id],
                0,
                self.forced_lengths.get(row.seq_id, 0),
            ]
            for row, last in rows
        ]
        self.decode_state.state[:, sent([row.batch_index for row, _ in rows])] = sent(states).t()

    def _collect(self) -> None:
        """Everything that is over to the host at once, and of those that run for a later step what they have so far."""
        drawn, running = self.generation, self.scheduler.running
        self._save_sequences(running, [self._total_length(row) for row in running])
        responses = [response for part in self.finished_outputs for response in part[0]]
        if responses:
            lengths = [length for part in self.finished_outputs for length in part[1]]
            lanes = [torch.cat([part[2][k][:, : max(lengths)] for part in self.finished_outputs]) for k in range(3)]
            self._write_outputs(responses, lengths, lanes)
        drawn.update_stopped(responses + [row.seq_id for row in running])
        if drawn.turns is not None:
            drawn.stopped = torch.tensor([response in drawn.turns.terminated for response in range(len(drawn.stopped))])
