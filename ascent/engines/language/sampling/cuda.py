"""Decoding as captured CUDA graphs: one replay is one token of every running response, drawn and written down.

All state lives on the card (step.py). The host enqueues a few replays, lets waiting responses into lanes that are
free, and only then reads which responses had finished before: the card is never kept waiting for that answer, and a
finished lane idles for at most two such rounds. On a CPU the same steps run without graphs, for the tests.

A prompt's last token is fed as the first of each of its responses. So a response's first token comes out of the same
step as every other, and a prompt is encoded without its last token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ascent.engines.language.attention import ours, send
from ascent.engines.language.kernels import load_kernels
from ascent.engines.language.sampling import step as formulas
from ascent.engines.language.sampling.draw import Drawn, Support
from ascent.engines.language.sampling.step import DONE, ENDS, LAST, LENGTH, Board, Llama, Pair, Unlike
from ascent.policies.causal_lm import LanguageModel

BUCKETS = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Rows that graphs are captured for, besides all rows."""
SHARE = 0.25
"""Of the free memory, what the responses' own caches may take: they stay there while the learner works."""
ENCODED = 16_384
"""Prompt tokens in one forward pass, about."""
ROUND = 4
"""Steps between two looks at which responses have finished."""
GAP = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""How far hidden states may be apart by rounding alone, relative to their size."""


def graph_decoder(lm: LanguageModel) -> tuple[GraphDecoder | None, str | None]:
    """The decoder of this model, which all its samplers share; or None and why there is none."""
    if hasattr(lm, "graph_decoder"):
        return lm.graph_decoder, None  # type: ignore[return-value]
    if len(lm.ends) > ENDS:
        return None, f"it has {len(lm.ends)} end tokens, and there is room for {ENDS}"
    try:
        decoder = GraphDecoder(lm)
        gap, bound = decoder.gap(), GAP.get(lm.model.dtype, 1e-3)
    except Unlike as error:
        return None, str(error)
    if not gap < bound:
        return None, f"its hidden states would be {gap:.2g} off"
    lm.graph_decoder = decoder  # type: ignore[assignment]
    return decoder, None


class GraphDecoder:
    """Decodes all samples of all prompts, at most `rows` of them at once, for models like Llama.

    Called as GroupDecoder is; buffers and graphs outlive the call, and are made anew when a call needs more room or
    the parameters have moved.
    """

    def __init__(self, lm: LanguageModel):
        self.lm = lm
        self.on_card = lm.device.type == "cuda"
        self.net = Llama.of(lm.model)
        plain = not self.on_card or lm.model.dtype == torch.float64 or self.net.channel & (self.net.channel - 1)
        self.ops = formulas if plain else load_kernels("decoding") or formulas
        self.board: Board = None  # type: ignore[assignment]
        """There from the first `prepare` on."""
        self.graphs: dict[Any, Callable[[], None]] = {}
        self.lanes_now: list[int] = []
        self.rooms: dict[tuple[int, int], int] = {}

    def __call__(self, lm: LanguageModel, prompts: list[list[int]], samples: int, rows: int, drawn: Drawn) -> Run:
        rows = self._room(min(rows, len(prompts) * samples), drawn.limit)
        slots = min(len(prompts), 4 * -(-rows // samples) + 1)  # a group keeps its slot until its longest response ends
        self.prepare(rows, slots, max(map(len, prompts)) - 1, drawn.limit)
        self.board.limit.fill_(drawn.limit)
        self.board.temperature.fill_(drawn.temperature)
        self.board.ends.copy_(torch.cat([drawn.ends, torch.full((ENDS - len(drawn.ends),), -1)]))
        return Run(self, prompts, samples, rows, slots, drawn)

    def _room(self, rows: int, limit: int) -> int:
        """Fewer rows where their caches would not fit; the same number for the same question."""
        if not self.on_card or (self.board is not None and self.board.holds(rows, 0, 0, limit)):
            return rows
        if (rows, limit) not in self.rooms:
            self.board, self.graphs = None, {}  # type: ignore[assignment]
            free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            net = self.net
            lane = 2 * len(net.layers) * net.heads * limit * net.channel * net.embedding.element_size()
            self.rooms[rows, limit] = max(1, min(rows, int(SHARE * free) // lane))
        return self.rooms[rows, limit]

    def prepare(self, rows: int, slots: int, width: int, limit: int) -> None:
        """Buffers with this much room, and parameters where the graphs expect them."""
        net = Llama.of(self.lm.model)
        if net.addresses() != self.net.addresses():
            self.graphs = {}
        self.net = net
        if self.board is not None and self.board.holds(rows, slots, width, limit):
            return
        if self.board is not None:
            rows, slots, width, limit = map(max, self.board.room, (rows, slots, width, limit))
        self.board, self.graphs = None, {}  # type: ignore[assignment]
        width = -(-max(width, 1) // 16) * 16
        like = net.embedding.detach()
        self.board = Board.empty(len(net.layers), net.heads, net.channel, rows, slots, width, limit, like)
        self.tables: Pair = net.tables(width + limit)
        self.pool = torch.cuda.graph_pool_handle() if self.on_card else None
        self.lanes_now = []

    def step(self, rows: int, support: Support, greedy: bool) -> None:
        """The next token of the first `rows` rows."""
        hidden = self.net.hidden(self.ops, self.board, self.tables, rows)
        head = self.net.head
        self.ops.draw(F.linear(hidden, head.weight, head.bias), self.board, support, greedy)

    def graph(self, rows: int, support: Support, greedy: bool) -> Callable[[], None]:
        """A step as one launch; captured at its first use, with every row on the lane that is nobody's."""
        run = partial(self.step, rows, support, greedy)
        if not self.on_card:
            return run
        key = (rows, support.min_tokens if greedy else support)
        if key not in self.graphs:
            self.board.lanes.fill_(self.board.rows)
            self.lanes_now = []
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                run(), run()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                run()
            self.graphs[key] = graph.replay
        return self.graphs[key]

    def choose(self, lanes: list[int]) -> int:
        """Let the next steps work on these lanes; how many rows such a step has."""
        rows = min([self.board.rows, *(n for n in BUCKETS if n >= len(lanes))])
        lanes = lanes + [self.board.rows] * (rows - len(lanes))
        if lanes != self.lanes_now:
            self.board.lanes[:rows].copy_(self.sent(lanes), non_blocking=True)
            self.lanes_now = lanes
        return rows

    def sent(self, numbers: list[Any]) -> Tensor:
        return send(torch.tensor(numbers, dtype=torch.long), self.lm.device)

    def encode(self, prompts: list[list[int]], slots: list[int]) -> None:
        """Keys and values of these prompts, without their last tokens, into these slots."""
        self.board.prompt_length[self.sent(slots)] = self.sent([len(p) - 1 for p in prompts])
        order = sorted((len(p) - 1, i) for i, p in enumerate(prompts) if len(p) > 1)
        while order:
            width = order[-1][0]
            count = max(1, ENCODED // width)
            part, order = [i for _, i in order[-count:]], order[:-count]
            ids = self.sent([prompts[i][:-1] + [0] * (width + 1 - len(prompts[i])) for i in part])
            positions = torch.arange(width, device=self.lm.device).expand(len(part), -1)
            self.lm.hidden(ids, positions, Encoding(self.board.prompts, self.sent([slots[i] for i in part])))

    @torch.no_grad()
    def gap(self) -> float:
        """How far our hidden states are from the model's own on a few random tokens, relative to their size."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.lm.vocab, (2, 12), generator=generator)
        self.prepare(2, 1, 5, 8)
        board, device = self.board, self.lm.device
        with ours(self.lm.model):
            positions = torch.arange(12, device=device).expand(2, -1)
            want = self.lm.hidden(ids.to(device), positions, Encoding([], positions))[:, 5:]
            apart = []
            for i in range(2):
                self.encode([ids[i, :6].tolist()], [0])
                self.choose([0, 1])
                for t in range(7):
                    board.state[LENGTH, :2], board.state[LAST, :2] = t, ids[i, 5 + t]
                    got = self.net.hidden(self.ops, board, self.tables, 2)
                    apart.append((got[1] - want[i, t]).double().norm() / want[i, t].double().norm())
        self.board = None  # type: ignore[assignment]
        return float(torch.stack(apart).max())


@dataclass
class Encoding:
    """The layout of a forward pass over whole prompts, padded on the right, that fills these slots."""

    into: list[Pair]
    slots: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if self.into:
            for cache, new in zip(self.into[layer], (k, v), strict=True):
                cache[:, :, : new.shape[2]].index_copy_(0, self.slots, new)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)


class Run:
    """One call: which response is in which lane, which waits, and what has come out."""

    def __init__(
        self, decoder: GraphDecoder, prompts: list[list[int]], samples: int, rows: int, slots: int, drawn: Drawn
    ):
        self.decoder, self.board, self.limit = decoder, decoder.board, drawn.limit
        self.limits: list[int] = drawn.limits.tolist()
        self.prompts, self.samples, self.drawn = prompts, samples, drawn
        self.seeds = [0] * (len(prompts) * samples) if drawn.seeds is None else drawn.seeds.tolist()
        self.waiting = deque(range(len(prompts) * samples))
        self.lane_free, self.slot_free = list(range(rows))[::-1], list(range(slots))[::-1]
        self.slot_of: dict[int, int] = {}
        self.left = [samples] * len(prompts)
        """Samples of each prompt that have not finished."""
        self.at: dict[int, int] = {}
        """By lane, the response in it; then its steps so far, and the launches before it began or was extended."""
        self.age: dict[int, int] = {}
        self.begun: dict[int, int] = {}
        self.launches = 0
        self.ended: dict[int, bool] = {}
        """Of responses that could have been extended: did they end, or was there no room?"""
        self.out: list[tuple[list[int], list[int], list[Tensor]]] = []
        """Responses, their lengths, and their tokens, log-probs and masses."""

    def __call__(self) -> None:
        flight: Callable[[], None] | None = None
        with ours(self.decoder.lm.model):
            while True:
                self._admit()
                launched = self._launch()
                if flight is not None:
                    flight()
                elif launched is None:
                    break
                flight = launched
        self._collect()

    def _admit(self) -> None:
        """Waiting responses into free lanes: slot, nothing in the cache, the prompt's last token, the seed."""
        entering: list[tuple[int, list[int]]] = []
        while self.waiting and self.lane_free:
            response = self.waiting[0]
            prompt = response // self.samples
            if prompt not in self.slot_of and not self._encode(prompt):
                break
            lane = self.lane_free.pop()
            self.at[lane], self.age[lane], self.begun[lane] = self.waiting.popleft(), 0, self.launches
            entering.append((lane, [self.slot_of[prompt], 0, self.prompts[prompt][-1], self.seeds[response], 0]))
        if entering:
            lanes = self.decoder.sent([lane for lane, _ in entering])
            self.board.state[:, lanes] = self.decoder.sent([new for _, new in entering]).t()

    def _encode(self, prompt: int) -> bool:
        """This prompt and those behind it, as many as there are slots: a forward pass for one takes as long."""
        new = list(range(prompt, min(prompt + len(self.slot_free), len(self.prompts))))
        for p in new:
            self.slot_of[p] = self.slot_free.pop()
        if new:
            self.decoder.encode([self.prompts[p] for p in new], [self.slot_of[p] for p in new])
        return bool(new)

    def _launch(self) -> Callable[[], None] | None:
        """Enqueue the next steps; returned is what to do when they are over. None: there is nothing to run."""
        live = sorted(lane for lane, response in self.at.items() if self.age[lane] < self.limits[response])
        if not live:
            return None
        steps = min(ROUND, max(self.limits[self.at[lane]] - self.age[lane] for lane in live))
        rows = self.decoder.choose(live)
        graph = self.decoder.graph(rows, self.drawn.support, self.drawn.seeds is None)
        self.decoder.choose(live)
        for _ in range(steps):
            graph()
        ran = {lane: (self.age[lane], self.age[lane] + steps) for lane in live}
        for lane in live:
            self.age[lane] += steps
        self.launches += 1
        read = [self.board.state[DONE]]
        if self.drawn.stops is not None:  # the tokens of these steps
            places = [[min(t, self.limit - 1) for t in range(*ran[lane])] for lane in live]
            read.append(self.board.token[self.decoder.sent(live)[:, None], self.decoder.sent(places)])
        if not self.decoder.on_card:
            return partial(self._settle, self.launches, ran, [tensor.clone() for tensor in read], None)
        copies = [torch.empty(tensor.shape, dtype=torch.long, pin_memory=True) for tensor in read]
        for copy, tensor in zip(copies, read, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return partial(self._settle, self.launches, ran, copies, event)

    def _settle(self, launch: int, ran: dict[int, tuple[int, int]], read: list[Tensor], event: Any) -> None:
        """Responses that had finished when these steps were over leave their lanes, but for those that are extended."""
        if event is not None:
            event.synchronize()
        done, length = read[0].tolist(), {}
        for i, (lane, steps) in enumerate(ran.items()):
            if lane in self.at and self.begun[lane] < launch:
                fresh = read[1][i] if len(read) > 1 else None
                length[lane] = self.drawn.over(self.at[lane], *steps, done[lane], fresh)
        over = [lane for lane, tokens in length.items() if tokens]
        if self.drawn.observe is not None:
            over = [lane for lane in over if not self._extend(lane, length[lane])]
        if not over:
            return
        where = self.decoder.sent(over)
        found = [buffer[where, : self.limit] for buffer in (self.board.token, self.board.logp, self.board.mass)]
        self.out.append(([self.at[lane] for lane in over], [length[lane] for lane in over], found))
        for lane in over:
            prompt = self.at.pop(lane) // self.samples
            self.lane_free.append(lane)
            self.left[prompt] -= 1
            if self.left[prompt] == 0:
                self.slot_free.append(self.slot_of.pop(prompt))

    def _extend(self, lane: int, length: int) -> bool:
        """Put what follows a turn that has ended behind it, if anything does: in the lane's output and in its cache.

        A finished lane has idled since, on the last place of its cache, so that place is written again.
        """
        response, drawn, board = self.at[lane], self.drawn, self.board
        row = board.token[lane, :length].cpu()
        drawn.token[response, :length], drawn.length[response] = row, length
        drawn.ended[response] = response in drawn.stopped or bool(torch.isin(row[-1], drawn.ends))
        tokens = drawn.extend(response)
        if not tokens:
            self.ended[response] = bool(drawn.ended[response])
            return False
        drawn.stopped.discard(response)
        end = length + len(tokens)
        board.token[lane, length:end] = self.decoder.sent(tokens)
        board.logp[lane, length:end], board.mass[lane, length:end] = 0.0, 1.0
        every = [self.prompts[response // self.samples][-1], *row.tolist(), *tokens]  # what is fed at each place
        rows = self.decoder.choose([lane])
        board.state[DONE, lane] = 0
        for place in range(length - 1, end):
            board.state[LENGTH, lane], board.state[LAST, lane] = place, every[place]
            self.decoder.net.hidden(self.decoder.ops, board, self.decoder.tables, rows)
        board.state[LENGTH, lane], board.state[LAST, lane] = end, every[end]
        self.age[lane], self.begun[lane] = end, self.launches
        return True

    def _collect(self) -> None:
        """Everything to the host at once, in the order in which it was asked for. A greedy draw has no mass."""
        drawn = self.drawn
        responses = torch.tensor([r for part in self.out for r in part[0]])
        length = torch.tensor([n for part in self.out for n in part[1]])
        inside = torch.arange(self.limit) < length[:, None]
        mass = None if drawn.seeds is None else drawn.mass
        for into, k, nothing in ((drawn.token, 0, 0), (drawn.logp, 1, 0.0), (mass, 2, 1.0)):
            if into is not None:
                new = torch.cat([part[2][k] for part in self.out]).cpu().to(into.dtype)
                into[responses] = torch.where(inside, new, nothing)
        drawn.length[responses] = length
        last = drawn.token[responses, length - 1]
        drawn.ended[responses] = torch.isin(last, drawn.ends)
        drawn.ended[list(drawn.stopped)] = True
        drawn.ended[list(self.ended)] = torch.tensor(list(self.ended.values()), dtype=torch.bool)
