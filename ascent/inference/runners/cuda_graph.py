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
from ascent.inference.kv_cache import Segment, extend
from ascent.inference.prefill import WORK, CapturedPasses, Prefill
from ascent.inference.scheduler import Scheduler
from ascent.inference.sequence import NOWHERE, Sequence
from ascent.models.causal_lm import LanguageModel
from ascent.models.decoder_model import MAX_HIDDEN_ERROR, DecoderModel, UnsupportedArchitectureError
from ascent.models.lora import shaken
from ascent.models.packed_attention import Group, Packed, ours, send
from ascent.models.quantization import parameter_count
from ascent.ops import decode_ops as formulas
from ascent.ops import load_kernels
from ascent.ops.cuda_graphs import CudaGraphs, NoGraphs
from ascent.ops.decode_state import (
    BLOCK_SIZE,
    FINISHED_LENGTH,
    LAST_TOKEN,
    MAX_STOP_TOKENS,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    DecodeState,
)

BUCKETS = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Rows that graphs are captured for, besides all rows."""
SHARE = 0.25
"""Of the free memory, what the pages may take: they stay there while the learner works."""
TOGETHER = 16
"""Prompts that are encoded together: a forward pass over one takes as long."""
LONG = 512
"""Keys from which on rows may be shared out."""
FEW, UNEVEN = 256, 1.5
"""They are where there are fewer rows times heads than this, or where the longest is this many times the mean."""
ROUND = 4
"""Steps between two looks at which responses have finished."""
PREFILL = 6
"""Steps that take as long as encoding what rows were given. If feeding it one by one keeps fewer busy, that is done."""
IDLE = 0.2
"""Share of a call's time for which nobody ran, from which on the next one begins with half of its rows."""
APART, LATEST = 0.002, 0.05
"""Seconds: answers that come no further apart are taken together, but none waits longer for others."""
BURST = 0.003
"""The same, of requests: a server reads some of them while the others are on their way."""
SLOW = "rollouts take 20 to 40 times as long as on the fast path, which this model cannot take: {why}"
"""What a run says that decodes without graphs; measured on an H200, with 135 million and 1.5 billion parameters."""


def graph_decoder(lm: LanguageModel) -> tuple[CudaGraphRunner | None, str | None]:
    """The decoder of this model, which all its samplers share; or None and why there is none."""
    if hasattr(lm, "graph_decoder"):
        return lm.graph_decoder, None  # type: ignore[return-value]
    if len(lm.ends) > MAX_STOP_TOKENS:
        return None, f"it has {len(lm.ends)} end tokens, and there is room for {MAX_STOP_TOKENS}"
    try:
        decoder = CudaGraphRunner(lm)
        gap, bound = decoder.gap(), MAX_HIDDEN_ERROR.get(lm.model.dtype, 1e-3)
    except UnsupportedArchitectureError as error:
        return None, str(error)
    if not gap < bound:
        return None, f"its layers compute something that Llama's do not (hidden states would be {gap:.2g} off)"
    lm.graph_decoder = decoder  # type: ignore[assignment]
    return decoder, None


class CudaGraphRunner:
    """Decodes all samples of all prompts, at most `rows` of them at once, for models like Llama.

    Called as PagedRunner is; buffers and graphs outlive the call, and are made anew when a call needs more room or
    the parameters have moved.
    """

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.on_card = lm.device.type == "cuda"
        self.net = DecoderModel.of(lm.model)
        self.parameters = list(lm.model.parameters())
        self.places = self._places()
        """Of the parameters, when the model was looked through last."""
        plain = not self.on_card or lm.model.dtype == torch.float64
        self.ops = formulas if plain else load_kernels("triton_decoding") or formulas
        self.board: DecodeState = None  # type: ignore[assignment]
        """There from the first `prepare` on."""
        self.forget()
        self.lanes_now: list[int] = []
        self.full = False
        """There is no room for more pages."""
        self.idled = False
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
        rows, keys = min(rows, len(drawn.length)), [len(p) - 1 for p in prompts]
        long, longest = -(-drawn.limit // BLOCK_SIZE), -(-max(keys, default=drawn.longest) // BLOCK_SIZE)
        slots = min(len(prompts) or rows, 4 * -(-rows // samples) + TOGETHER)  # prompts whose responses are under way
        pages = self._pages(rows * long + slots * longest, long + longest)
        pages = min(pages, -(-room // BLOCK_SIZE)) if room else pages
        self.prepare(rows, pages, -(-(long + longest) // 8) * 8, drawn.limit)
        self.board.max_tokens.fill_(drawn.limit)
        self.board.stop_tokens.copy_(torch.cat([drawn.ends, torch.full((MAX_STOP_TOKENS - len(drawn.ends),), -1)]))
        drawn.timeline.capacity = rows
        schedule = Scheduler(
            keys,
            samples,
            rows,
            drawn.limit,
            BlockManager(pages, BLOCK_SIZE),
            TOGETHER,
            begun=drawn.begun,
            over=drawn.before,
        )
        return DecodeLoop(self, prompts, schedule, drawn)

    def _pages(self, wanted: int, least: int) -> int:
        """Pages for a call: all that it can need, or as many as fit. Where no more fit, the board stays as it is."""
        have = 0 if self.board is None else self.board.capacity[1]
        if have >= wanted or (self.full and have >= least):
            return min(wanted, have)
        wanted += wanted // 8  # later prompts may be longer
        if self.on_card:
            self.board = None  # type: ignore[assignment]
            self.forget()
            own = torch.cuda.memory_allocated()
            free = min(self.lm.limit, torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()) - own
            net = self.net
            page = 2 * len(net.layers) * net.num_kv_heads * BLOCK_SIZE * net.head_dim * net.embedding.element_size()
            most = int(SHARE * free) // page
            self.full, wanted = most < wanted, max(least, min(wanted, most))
        return wanted

    def forget(self) -> None:
        """What was captured: buffers or parameters lie elsewhere now."""
        self.graphs: dict[Any, Callable[[], None]] = {}
        size = parameter_count(self.lm.model)
        self.passes = CapturedPasses(CudaGraphs() if self.on_card else NoGraphs(), int(WORK / size))

    def prepare(self, rows: int, pages: int, width: int, limit: int) -> None:
        """Buffers with this much room, and parameters where the graphs expect them."""
        if self.places == self._places():  # nothing has moved: the model need not be looked through again
            self.net.copies.make()
        else:
            net = DecoderModel.of(self.lm.model)
            if net.addresses() != self.net.addresses():
                self.forget()
            self.net, self.places = net, self._places()
        net = self.net
        if self.board is not None and self.board.fits(rows, pages, width, limit):
            return
        if self.board is not None:
            rows, pages, width, limit = map(max, self.board.capacity, (rows, pages, width, limit))
        self.board = None  # type: ignore[assignment]
        self.forget()
        like = net.embedding.detach()
        self.board = DecodeState.allocate(
            len(net.layers), net.num_kv_heads, net.head_dim, rows, pages, width, limit, like
        )
        self.tables = net.rotary_cache(width * BLOCK_SIZE)
        self.lanes_now = []

    def _places(self) -> list[int]:
        return [p.data_ptr() for p in self.parameters]

    @property
    def prefill(self) -> Prefill:
        """What encodes tokens that are given."""
        return Prefill(self.net, self.ops, self.tables, self.passes)

    def step(self, rows: int, uneven: bool, support: SamplingParams, greedy: bool) -> None:
        """The next token of the first `rows` rows."""
        hidden = self.net.hidden(self.ops, self.board, self.tables, rows, uneven)
        self.ops.sample_next_tokens(self.net.head.logits(hidden), self.board, support, greedy)

    def graph(self, rows: int, support: SamplingParams, greedy: bool, uneven: bool = False) -> Callable[[], None]:
        """A step as one launch; captured at its first use, with every row on the lane that is nobody's."""
        run = partial(self.step, rows, uneven, support, greedy)
        key = (rows, uneven, support.min_tokens if greedy else support)
        if key not in self.graphs:
            self.board.batch_indices.fill_(self.board.max_num_seqs)
            self.lanes_now = []
            self.passes.graphs.warm(run)
            self.graphs[key] = self.passes.graphs.capture(run)
        return self.graphs[key]

    def choose(self, lanes: list[int]) -> int:
        """Let the next steps work on these lanes; how many rows such a step has."""
        rows = min([self.board.max_num_seqs, *(n for n in BUCKETS if n >= len(lanes))])
        lanes = lanes + [self.board.max_num_seqs] * (rows - len(lanes))
        if lanes != self.lanes_now:
            self.board.batch_indices[:rows].copy_(self.sent(lanes), non_blocking=True)
            self.lanes_now = lanes
        return rows

    def uneven(self, keys: list[int]) -> bool:
        """Would the longest of rows with so many keys keep the others waiting?"""
        longest, few = max(keys), len(keys) * self.net.num_kv_heads < FEW
        return longest > LONG and (few or longest > UNEVEN * sum(keys) / len(keys))

    def sent(self, numbers: list[Any]) -> Tensor:
        return send(torch.tensor(numbers, dtype=torch.long), self.lm.device)

    @torch.no_grad()
    def gap(self) -> float:
        """How far our hidden states are from the model's own on a few random tokens, relative to their size."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.lm.vocab, (2, 12), generator=generator)
        before, own = -(-5 // BLOCK_SIZE), -(-8 // BLOCK_SIZE)
        pages = list(range(before + 2 * own))
        device = self.lm.device
        with shaken(self.lm.model), ours(self.lm.model):
            self.prepare(2, len(pages), before + own, 8)
            board = self.board
            row, positions = Packed([Group(0, 12, ()), Group(12, 12, ())]), torch.arange(12, device=device).repeat(2)
            want = self.lm.hidden(ids.to(device).view(1, -1), positions[None], row).view(2, 12, -1)[:, 5:]
            apart = []
            for i in range(2):
                extend(self.prefill, board.cache, [ids[i, :5].tolist()], [Segment(pages, 5)])
                rows = [pages[: before + own], pages[:before] + pages[before + own :]]
                board.block_tables[:2, : before + own] = torch.tensor(rows, dtype=torch.int32)
                self.choose([0, 1])
                for t in range(7):
                    board.state[PROMPT_LENGTH, :2], board.state[RESPONSE_LENGTH, :2], board.state[LAST_TOKEN, :2] = (
                        5,
                        t,
                        ids[i, 5 + t],
                    )
                    got = self.net.hidden(self.ops, board, self.tables, 2)
                    apart.append((got[1] - want[i, t]).double().norm() / want[i, t].double().norm())
        self.board = None  # type: ignore[assignment]
        return float(torch.stack(apart).max())


class DecodeLoop:
    """One call: what the schedule decides is written to the board, and what the card has drawn is read back."""

    def __init__(self, decoder: CudaGraphRunner, prompts: list[list[int]], schedule: Scheduler, drawn: GenerationState):
        self.decoder, self.board, self.limit = decoder, decoder.board, drawn.limit
        self.limits: list[int] = drawn.limits.tolist()
        self.prompts, self.schedule, self.drawn = dict(enumerate(prompts)), schedule, drawn
        self.seeds = [0] * len(drawn.length) if drawn.seeds is None else drawn.seeds.tolist()
        self.begun: dict[int, int] = {}
        """By response, the launches before it began or was extended."""
        self.launches = 0
        self.flight: Callable[[], None] | None = None
        """What to do when the steps that were launched are over."""
        half = -(-min(len(schedule.free_lanes), len(schedule.waiting)) // 2)
        self.most = max(1, half) if decoder.idled and drawn.turns is not None and not drawn.open else None
        """Rows that may run at once, until some of them are over or asked about; None: as many as there are lanes.

        Where all rows wait for their environments together, the card waits too. So half of them go first.
        """
        self.held_since = math.inf
        """Since when requests wait for those behind them, to be encoded together."""
        self.idle = 0.0
        """Seconds for which nobody ran, because all were waiting for their environments."""
        self.held: dict[int, int] = {}
        """Of parked responses, the tokens that they had when their turn ended."""
        self.fed: dict[int, int] = {}
        """Of responses that are fed an observation step by step, their tokens with it."""
        self.since: dict[int, int] = {}
        """By response, the first token that its lane has drawn; those before are in `drawn`."""
        self.out: list[tuple[list[int], list[int], list[Tensor]]] = []
        """Responses that are over, their lengths, and what their lanes had: tokens, log-probs and masses."""
        self.leaving: list[tuple[list[int], list[int], Tensor, Any]] = []
        """Those of them that nobody was told of yet: their lengths, and their tokens on the way to the host."""

    def __call__(self) -> None:
        begun = time.perf_counter()
        with ours(self.decoder.lm.model):
            while self.drawn.missing:
                if not self._holds(self._hear(wait=False)):
                    self._admit()
                launched = self._launch()
                flight, self.flight = self.flight, launched
                if flight is not None:
                    flight()
                elif launched is None and self.drawn.asked:
                    self._gather()
                    if not self.drawn.open:
                        self.most = max(1, -(-len(self.schedule.rows) // 2))  # those that were evicted have no row
            self._land()
        self.decoder.idled = self.idle > IDLE * (time.perf_counter() - begun)
        self.drawn.timeline.stop()
        self._collect()

    def _holds(self, came: int) -> bool:
        """Let requests wait, while others run, if some came just now: more may be on their way.

        To encode tokens takes the host as long as several rounds, whatever there is to encode.
        """
        now, wanting = time.perf_counter(), bool(self.schedule.ready or self.schedule.waiting)
        since = min(self.held_since, now)
        holds = bool(came) and wanting and self.drawn.open and self.flight is not None and now - since < LATEST
        self.held_since = since if holds else math.inf
        return holds

    def _gather(self) -> None:
        """Wait for answers, and for those that come right behind the first: rows that go on together stay together."""
        begun = time.perf_counter()
        came = self._hear(wait=True)
        until = time.perf_counter() + LATEST
        self.idle += until - LATEST - begun
        while came and self.drawn.asked and not self._all_back and time.perf_counter() < until:
            time.sleep(BURST if self.drawn.open else APART)
            came = self._hear(wait=False)

    @property
    def _all_back(self) -> bool:
        """Has everyone answered whose turn ended together with the turns of those that are ready?"""
        together = {self.begun[response] for response in self.schedule.ready}
        waiting = () if self.drawn.turns is None else self.drawn.turns.pending
        return bool(together) and not self.drawn.open and not any(self.begun[r] in together for r in waiting)

    def _land(self) -> None:
        """Wait for the steps that were launched last, if any were, and see who has finished."""
        flight, self.flight = self.flight, None
        if flight is not None:
            flight()

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.board.tokens, self.board.logp, self.board.kept_mass

    def _admit(self) -> None:
        """Responses into free lanes: their pages, the token that is fed next (a new one's is the prompt's last)."""
        schedule, there = self.schedule, set(self.schedule.rows.values())
        entering = schedule.admit(ROUND, self.most)
        if fresh := [p for p in schedule.fresh if schedule.keys[p]]:
            segments = [Segment(schedule.prompts[p], schedule.keys[p]) for p in fresh]
            extend(self.decoder.prefill, self.board.cache, [self.prompts[p][:-1] for p in fresh], segments)
        schedule.fresh = []
        if not entering:
            return
        # a parked row has idled on the last place of its pages, so that place is written again
        starts = {row.response: self.held.pop(row.response) - 1 if row in there else 0 for row in entering}
        tokens = {row.response: self._fed_from(row, starts[row.response]) for row in entering}
        back = [row for row in entering if row in there]
        steps = sum(row.length - starts[row.response] for row in back)
        if back and steps <= PREFILL * len(schedule.running) and not self.drawn.reads:
            cells = [(r.lane, starts[r.response] + i, t) for r in back for i, t in enumerate(tokens[r.response][1:])]
            lane, place, token = self.decoder.sent(cells).t()
            self.board.tokens[lane, place] = token
            for row in back:
                self.fed[row.response], row.length = row.length, starts[row.response]
        if encoded := [row for row in entering if row.length > starts[row.response]]:
            self._encode(encoded, [starts[r.response] for r in encoded], [tokens[r.response][:-1] for r in encoded])
        self._set([(row, tokens[row.response][row.length - starts[row.response]]) for row in entering])
        for row in entering:
            self.begun[row.response] = self.launches
            self.since[row.response] = self._length(row)
        self._lay_out([(row, 0) for row in entering])

    def _fed_from(self, row: Sequence, start: int) -> list[int]:
        """The tokens that a row is fed, from this place of its pages on up to the next one."""
        before = [] if start else [self.prompts[row.prompt][-1]]
        return before + self.drawn.tokens_of(row.response, max(start - 1, 0), row.length)

    def _length(self, row: Sequence) -> int:
        """How many tokens a response has, counting an observation that it is still being fed."""
        return max(row.length, self.fed.get(row.response, 0))

    def _hear(self, wait: bool) -> int:
        """What environments have answered, and what has come: how many. They want a lane, or are over.

        Requests that leave are not counted: nobody waits for those behind them.
        """
        answers = self.drawn.answers(wait)
        limits = self.drawn.limits[[response for response, _ in answers]].tolist() if answers else []
        for (response, tokens), limit in zip(answers, limits, strict=True):
            self.limits[response] = limit
            if tokens:
                self.seeds[response] = self.drawn.seed(response)
                self.schedule.unpark(response, self.held[response] + len(tokens))
            else:
                self._end(response)
        entering = self.drawn.entering()
        for response, prompt, ids in entering:
            self.prompts[prompt], begun = ids, int(self.drawn.length[response])
            self.limits[response], self.seeds[response] = int(self.drawn.limits[response]), self.drawn.seed(response)
            self.schedule.add(response, prompt, len(ids) - 1, begun)
        return len(entering) + sum(bool(tokens) or not self.drawn.open for _, tokens in answers)

    def _encode(self, rows: list[Sequence], starts: list[int], tokens: list[list[int]]) -> None:
        """Tokens that these rows are given, into their pages."""
        before, keys = self.schedule.prompts, self.schedule.keys
        parts = zip(rows, starts, tokens, strict=True)
        segments = [Segment(r.pages, len(own), at, before[r.prompt], keys[r.prompt]) for r, at, own in parts]
        extend(self.decoder.prefill, self.board.cache, tokens, segments)

    def _lay_out(self, grown: list[tuple[Sequence, int]]) -> None:
        """Write the pages of these rows to the table; of each, those from the given one on are new."""
        cells: list[tuple[int, int, int]] = []
        for row, old in grown:
            before = self.schedule.prompts[row.prompt]
            pages = [*before, *row.pages] if old == 0 else row.pages[old:]
            first = 0 if old == 0 else len(before) + old
            cells += [(row.lane, first + i, page) for i, page in enumerate(pages)]
        if cells:
            lane, column, page = self.decoder.sent(cells).t()
            self.board.block_tables[lane, column] = page.int()

    def _launch(self) -> Callable[[], None] | None:
        """Enqueue the next steps; returned is what to do when they are over. None: there is nothing to run."""
        if not self.schedule.fits(ROUND):
            self._land()  # those that have finished make room
        running = self.schedule.running
        before = {row.response: len(row.pages) for row in running}
        evicted = [row for row in self.schedule.grow(ROUND, running) if row.lane != NOWHERE]
        self.schedule.kept |= {row.response: self._length(row) for row in evicted}
        self._save(evicted, [self._length(row) for row in evicted])
        live = [row for row in self.schedule.running if row.length < self.limits[row.response]]
        self.drawn.timeline.record(len(live))
        if not live:
            return None
        self._lay_out([(row, before[row.response]) for row in live if len(row.pages) > before[row.response]])
        live.sort(key=lambda row: row.lane)
        steps = min(ROUND, max(self.limits[row.response] - row.length for row in live))
        lanes = [row.lane for row in live]
        uneven = self.decoder.uneven([row.length + self.schedule.keys[row.prompt] for row in live])
        for (temperature, support, greedy), some in self.drawn.by_settings([row.response for row in live]).items():
            self.board.temperature.fill_(temperature)
            alike = [lanes[i] for i in some]
            rows = self.decoder.choose(alike)
            graph = self.decoder.graph(rows, support, greedy, uneven)
            self.decoder.choose(alike)
            for _ in range(steps):
                graph()
        ran = [(row, row.length, min(row.length + steps, self.limit)) for row in live]
        for row, _, after in ran:
            row.length = after
        self.launches += 1
        read = [self.board.state[FINISHED_LENGTH]]
        if self.drawn.reads:  # the tokens of these steps
            places = [[min(start + i, self.limit - 1) for i in range(steps)] for _, start, _ in ran]
            where = self.decoder.sent(lanes)[:, None], self.decoder.sent(places)
            read += [self.board.tokens[where], *([self.board.logp[where]] if self.drawn.watched else [])]
        if not self.decoder.on_card:
            return partial(self._settle, self.launches, ran, [tensor.clone() for tensor in read], None)
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in read]
        for copy, tensor in zip(copies, read, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return partial(self._settle, self.launches, ran, copies, event)

    def _settle(self, launch: int, ran: list[tuple[Sequence, int, int]], read: list[Tensor], event: Any) -> None:
        """Responses that had finished when these steps were over leave their lanes, but for those that are extended."""
        if event is not None:
            event.synchronize()
        self._hand_over()
        done, lengths = read[0].tolist(), {}
        for i, (row, start, stop) in enumerate(ran):
            ended = done[row.lane] or stop >= self.limits[row.response] or len(read) > 1
            if ended and self.schedule.rows.get(row.response) is row and self.begun[row.response] < launch:
                fresh = read[1][i] if len(read) > 1 else None
                if len(read) > 2:
                    self.drawn.logp[row.response, start:stop] = read[2][i][: stop - start]
                lengths[row.response] = self.drawn.over(row.response, start, stop, done[row.lane], fresh)
        over = [row for row, _, _ in ran if lengths.get(row.response)]
        self.most = None if over else self.most
        if over and self.drawn.turns is not None:
            over = self._ask(over, lengths)
        if over:
            where = self.decoder.sent([row.lane for row in over])
            found = [buffer[where, : self.limit] for buffer in self.buffers]
            self.out.append(([row.response for row in over], [lengths[row.response] for row in over], found))
            if self.drawn.hand_over is not None:
                self._leave(*self.out[-1])
        for row in over:
            self._end(row.response)

    def _leave(self, responses: list[int], lengths: list[int], lanes: list[Tensor]) -> None:
        """Send the tokens of these to the host, behind the steps that are under way."""
        tokens, event = lanes[0][:, : max(lengths)], None
        if self.decoder.on_card:
            tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.leaving.append((responses, lengths, tokens, event))

    def _hand_over(self) -> None:
        """Tell of responses whose tokens have arrived: whoever scores them begins now."""
        while self.leaving and (self.leaving[0][3] is None or self.leaving[0][3].query()):
            responses, lengths, tokens, _ = self.leaving.pop(0)
            before = [self.drawn.tokens_of(response, 0, self.since[response]) for response in responses]
            rows = zip(before, tokens.tolist(), lengths, strict=True)
            assert self.drawn.hand_over is not None
            self.drawn.hand_over(responses, [old + row[len(old) : length] for old, row, length in rows])

    def _end(self, response: int) -> None:
        prompt = self.schedule.prompt(response)
        self.schedule.end(response)
        self.drawn.missing.discard(response)
        self.held.pop(response, None), self.fed.pop(response, None)
        if prompt not in self.schedule.keys:
            del self.prompts[prompt]

    def _ask(self, ended: list[Sequence], lengths: dict[int, int]) -> list[Sequence]:
        """Who of these, whose turns have ended, is over; the others are parked until their environments answer."""
        drawn, responses = self.drawn, [row.response for row in ended]
        self._save(ended, [lengths[response] for response in responses])
        drawn.end(responses)
        over = set(drawn.ask(responses))
        for row in ended:
            if row.response not in over:
                row.length = self.held[row.response] = lengths[row.response]
                self.begun[row.response] = self.launches  # what is under way for it counts no more
                self.schedule.park(row.response)
        return [row for row in ended if row.response in over]

    def _save(self, rows: list[Sequence], lengths: list[int]) -> None:
        """What the lanes of these rows have drawn, to the host."""
        if rows:
            lanes = self.decoder.sent([row.lane for row in rows])
            self._write([row.response for row in rows], lengths, [b[lanes, : max(lengths)] for b in self.buffers])

    def _write(self, responses: list[int], lengths: list[int], lanes: list[Tensor]) -> None:
        """Responses so far: what they had when they got their lanes, and what is in these from then on."""
        drawn, begun = self.drawn, [self.since[response] for response in responses]
        low, high, length = min(begun), max(lengths), np.array(lengths)
        place = np.arange(low, high)
        new = (place >= np.array(begun)[:, None]) & (place < length[:, None])
        mass = None if drawn.seeds is None else drawn.mass  # a greedy draw has none
        for into, lane in zip((drawn.token, drawn.logp, mass), lanes, strict=True):
            if into is not None:  # by numpy: threads of torch that have slept wake up slowly
                whole, fresh = into.numpy(), lane[:, low:high].cpu().numpy()
                whole[responses, low:high] = np.where(new, fresh, whole[responses, low:high])
        drawn.length.numpy()[responses] = length

    def _set(self, rows: list[tuple[Sequence, int]]) -> None:
        """The state of these rows' lanes: they feed the given token next."""
        keys, sent = self.schedule.keys, self.decoder.sent
        states = [
            [keys[row.prompt], row.length, last, self.seeds[row.response], 0, self.fed.get(row.response, 0)]
            for row, last in rows
        ]
        self.board.state[:, sent([row.lane for row, _ in rows])] = sent(states).t()

    def _collect(self) -> None:
        """Everything that is over to the host at once, and of those that run for a later step what they have so far."""
        drawn, running = self.drawn, self.schedule.running
        self._save(running, [self._length(row) for row in running])
        responses = [response for part in self.out for response in part[0]]
        if responses:
            lengths = [length for part in self.out for length in part[1]]
            lanes = [torch.cat([part[2][k][:, : max(lengths)] for part in self.out]) for k in range(3)]
            self._write(responses, lengths, lanes)
        drawn.end(responses + [row.response for row in running])
        if drawn.turns is not None:
            drawn.ended = torch.tensor([response in drawn.turns.terminated for response in range(len(drawn.ended))])
