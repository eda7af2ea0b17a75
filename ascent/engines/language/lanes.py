"""Who is in which lane: responses enter, leave and wait while graphs are replayed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ascent.engines.language.board import DONE
from ascent.engines.language.pick import Picker

if TYPE_CHECKING:
    from ascent.engines.language.cuda import GraphDecoder
    from ascent.engines.language.sampler import Drawn

ROUND = 4
"""Steps between two looks at which responses have finished."""


class Run:
    """One call: which response is in which lane, which waits, and what has come out."""

    def __init__(
        self,
        decoder: GraphDecoder,
        prompts: list[list[int]],
        samples: int,
        rows: int,
        slots: int,
        limit: int,
        pick: Picker,
    ):
        assert decoder.board is not None
        self.decoder, self.board, self.limit = decoder, decoder.board, limit
        self.prompts, self.samples = prompts, samples
        self.support, self.greedy = pick.support, pick.seeds is None
        self.seeds = [0] * (len(prompts) * samples) if pick.seeds is None else pick.seeds.tolist()
        self.waiting = deque(range(len(prompts) * samples))
        self.lane_free, self.slot_free = list(range(rows))[::-1], list(range(slots))[::-1]
        self.slot_of: dict[int, int] = {}
        self.left = [samples] * len(prompts)
        """Samples of each prompt that have not finished."""
        self.at: dict[int, int] = {}
        """By lane, the response in it; and below, the steps that it was given."""
        self.age: dict[int, int] = {}
        self.out: list[tuple[list[int], list[int], list[Tensor]]] = []
        """Responses, their lengths, and their tokens, log-probs and masses."""

    def __call__(self, drawn: Drawn) -> None:
        flight: Callable[[], None] | None = None
        while True:
            self._admit()
            launched = self._launch()
            if flight is not None:
                flight()
            elif launched is None:
                break
            flight = launched
        self._collect(drawn)

    def _admit(self) -> None:
        """Waiting responses into free lanes: slot, nothing in the cache, the prompt's last token, the seed."""
        entering: list[tuple[int, list[int]]] = []
        while self.waiting and self.lane_free:
            response = self.waiting[0]
            prompt = response // self.samples
            if prompt not in self.slot_of and not self._encode(prompt):
                break
            lane = self.lane_free.pop()
            self.at[lane], self.age[lane] = self.waiting.popleft(), 0
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
        live = sorted(lane for lane in self.at if self.age[lane] < self.limit)
        if not live:
            return None
        steps = min(ROUND, max(self.limit - self.age[lane] for lane in live))
        rows = self.decoder.choose(live)
        graph = self.decoder.graph(rows, self.support, self.greedy)
        self.decoder.choose(live)
        for _ in range(steps):
            graph()
        for lane in live:
            self.age[lane] += steps
        if not self.decoder.on_card:
            return partial(self._settle, dict(self.at), self.board.state[DONE].clone(), None)
        done = torch.empty(self.board.rows + 1, dtype=torch.long, pin_memory=True)
        done.copy_(self.board.state[DONE], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return partial(self._settle, dict(self.at), done, event)

    def _settle(self, then: dict[int, int], done: Tensor, event: Any) -> None:
        """Responses that had finished when these steps were over leave their lanes."""
        if event is not None:
            event.synchronize()
        length = done.tolist()
        over = [lane for lane, response in then.items() if length[lane] and self.at.get(lane) == response]
        if not over:
            return
        where = self.decoder.sent(over)
        found = [buffer[where, : self.limit] for buffer in (self.board.token, self.board.logp, self.board.mass)]
        self.out.append(([then[lane] for lane in over], [length[lane] for lane in over], found))
        for lane in over:
            prompt = self.at.pop(lane) // self.samples
            self.lane_free.append(lane)
            self.left[prompt] -= 1
            if self.left[prompt] == 0:
                self.slot_free.append(self.slot_of.pop(prompt))

    def _collect(self, drawn: Drawn) -> None:
        """Everything to the host at once, in the order in which it was asked for."""
        responses = torch.tensor([r for part in self.out for r in part[0]])
        length = torch.tensor([n for part in self.out for n in part[1]])
        inside = torch.arange(self.limit) < length[:, None]
        for into, k, nothing in ((drawn.token, 0, 0), (drawn.logp, 1, 0.0), (drawn.mass, 2, 1.0)):
            if into is not None:
                new = torch.cat([part[2][k] for part in self.out]).cpu().to(into.dtype)
                into[responses] = torch.where(inside, new, nothing)
        drawn.length[responses] = length
        last = drawn.token[responses, length - 1]
        drawn.ended[responses] = torch.isin(last, drawn.ends)
