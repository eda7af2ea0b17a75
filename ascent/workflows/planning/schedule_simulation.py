"""Cards that sample and train, simulated: who decodes what when, and who waits for whom.

A ticket is one step's responses. Those of step s may begin once the weights of update s − K are there (`--ahead K`). A
step is trained when all of its responses have ended, on every card. Cards that do both stop decoding while they train;
cards that only sample go on with the tickets that they have.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ascent.workflows.planning.cost_model import OneCard

Draw = Callable[[int, int], list[list[int]]]
"""The lengths of the responses that a card samples in a step, by prompt: called with the card and the step."""


class Decoder:
    """One card that decodes: its clock, the responses that run, and those that wait for a lane."""

    def __init__(self, one: OneCard, rows: int, prompt: int):
        self.one, self.rows, self.prompt = one, rows, prompt
        self.clock = self.busy = self.begun = 0.0
        self.left: Counter[int] = Counter()
        """Responses of each step that have not ended."""
        self._waiting: deque[tuple[int, int, float]] = deque()
        self._running: list[tuple[float, int, int, float]] = []
        """The step at which each ends, its length, its ticket, and what it holds of its prompt."""
        self._at = 0.0
        """Decoding steps so far."""
        self._live = 0.0

    def add(self, step: int, groups: Iterable[list[int]]) -> None:
        """A ticket: its prompts are encoded now. A group's prompt is held once: each response holds its share."""
        prompts = 0
        for own in groups:
            prompts += 1
            self._waiting.extend((step, length, self.prompt / len(own)) for length in own)
            self.left[step] += len(own)
        self._spend(self.one.encoding(prompts, prompts * self.prompt))

    def encode_again(self, sync: float) -> None:
        """New weights, which take so long to arrive: what the running responses hold is computed anew."""
        self.clock += sync
        self._spend(self.one.encoding(len(self._running), self._live))

    def _spend(self, seconds: float) -> None:
        self.clock += seconds
        self.busy += seconds

    def run(self, step: int | None, until: float) -> None:
        """Decode until a step's responses have ended (None: as long as there is anything), or until a time."""
        while (step is None or self.left[step]) and self.clock < until and (self._running or self._waiting):
            while self._waiting and len(self._running) < self.rows:
                number, length, shared = self._waiting.popleft()
                heapq.heappush(self._running, (self._at + length, length, number, shared))
                self._live += shared
            rows, stride = len(self._running), self._running[0][0] - self._at
            seconds = self.one.decoding(rows, self._live + rows * stride / 2)
            if self.clock + stride * seconds > until:
                stride = (until - self.clock) / seconds
            self._spend(stride * seconds)
            self._at += stride
            self._live += rows * stride
            while self._running and self._running[0][0] <= self._at + 1e-6:
                _, length, number, shared = heapq.heappop(self._running)
                self.left[number] -= 1
                self._live -= length + shared


@dataclass(frozen=True)
class Timing:
    """Seconds of a step, in the long run."""

    step: float
    """From one update to the next."""
    sample: float
    """Of that, for which no card trains: all wait for the last response of the step."""
    busy: float
    """For which a card that samples decodes, on average."""


def simulate(
    cards: list[Decoder],
    draw: Draw,
    ahead: int,
    learn: float,
    sync: float,
    together: bool,
    span: tuple[int, int] | None = None,
) -> Timing:
    """The steps after those that fill the pipe. `learn`: seconds from the last response to the new weights.

    `span`: the steps before those that count, and the number of those.
    """
    warm, steps = span or (2 * ahead, 4 + 3 * ahead)
    ready = [0.0] * (ahead + 1)
    """When the ticket of a step may begin."""
    given, learned, waits, ends = [0] * len(cards), 0.0, [0.0], [0.0]
    for step in range(warm + steps):
        for number, card in enumerate(cards):
            while card.left[step] or given[number] <= step:
                following = ready[given[number]] if given[number] < len(ready) else float("inf")
                if following <= card.clock or not card.left[step]:
                    card.clock = max(card.clock, following)
                    card.add(given[number], draw(number, given[number]))
                    given[number] += 1
                card.run(step, ready[given[number]] if given[number] < len(ready) else float("inf"))
        sampled = max(card.clock for card in cards)
        waits.append(max(0.0, sampled - (ends[-1] if together else learned)))
        learned = max(sampled, learned) + learn
        for card in cards:
            if together:
                card.run(None, sampled)
                card.clock = learned + sync
            card.encode_again(0.0 if together else sync)
        ready.append(learned + sync)
        ends.append(learned + sync)
        if step + 1 == warm:
            for card in cards:
                card.begun = card.busy
    count = len(ends) - 1 - warm
    busy = sum(card.busy - card.begun for card in cards) / len(cards)
    return Timing((ends[-1] - ends[warm]) / count, sum(waits[warm + 1 :]) / count, busy / count)
