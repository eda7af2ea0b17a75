"""Simulation of GPUs that sample and train, to find how long they wait for each other.

The responses of step s may begin once the weights of update s − K are loaded (`--ahead K`). A step is trained when all
of its responses have ended on every GPU. GPUs that sample and train stop decoding while they train; GPUs that only
sample continue with the responses of later steps.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ascent.workflows.planning.cost_model import GpuCostModel

SampleLengths = Callable[[int, int], list[list[int]]]
"""Returns the lengths of the responses of a GPU in a step, by prompt; called with the GPU and the step."""


class SimulatedGpu:
    """One GPU that decodes: its clock, the running responses, and those that wait for a place in the batch."""

    def __init__(self, cost: GpuCostModel, rows: int, prompt: int):
        self.cost, self.rows, self.prompt = cost, rows, prompt
        self.clock = self.busy = self.begun = 0.0
        self.unfinished: Counter[int] = Counter()
        """Number of unfinished responses of each step."""
        self._waiting: deque[tuple[int, int, float]] = deque()
        self._running: list[tuple[float, int, int, float]] = []
        """For each response: its last decode step, its length, its training step, and its share of the prompt."""
        self._decode_step = 0.0
        """Decode steps so far."""
        self._live_tokens = 0.0

    def add(self, step: int, groups: Iterable[list[int]]) -> None:
        """Add the responses of a step and prefill their prompts. A group shares one cached prompt."""
        prompts = 0
        for group in groups:
            prompts += 1
            self._waiting.extend((step, length, self.prompt / len(group)) for length in group)
            self.unfinished[step] += len(group)
        self._spend(self.cost.prefill_seconds(prompts, prompts * self.prompt))

    def load_weights(self, sync: float) -> None:
        """Load new weights in `sync` seconds, and prefill the running responses again."""
        self.clock += sync
        self._spend(self.cost.prefill_seconds(len(self._running), self._live_tokens))

    def _spend(self, seconds: float) -> None:
        self.clock += seconds
        self.busy += seconds

    def run(self, step: int | None, until: float) -> None:
        """Decode until the responses of a step (None: all responses) have ended, or until a time."""
        while (step is None or self.unfinished[step]) and self.clock < until and (self._running or self._waiting):
            while self._waiting and len(self._running) < self.rows:
                number, length, shared = self._waiting.popleft()
                heapq.heappush(self._running, (self._decode_step + length, length, number, shared))
                self._live_tokens += shared
            rows, stride = len(self._running), self._running[0][0] - self._decode_step
            seconds = self.cost.decode_seconds(rows, self._live_tokens + rows * stride / 2)
            if self.clock + stride * seconds > until:
                stride = (until - self.clock) / seconds
            self._spend(stride * seconds)
            self._decode_step += stride
            self._live_tokens += rows * stride
            while self._running and self._running[0][0] <= self._decode_step + 1e-6:
                _, length, number, shared = heapq.heappop(self._running)
                self.unfinished[number] -= 1
                self._live_tokens -= length + shared


@dataclass(frozen=True)
class Timing:
    """Average seconds of a step."""

    step: float
    """From one update to the next."""
    sample: float
    """The part in which no GPU trains, because all wait for the last response of the step."""
    busy: float
    """The part in which a sampling GPU decodes, on average."""


def simulate(
    gpus: list[SimulatedGpu],
    sample_lengths: SampleLengths,
    ahead: int,
    learn: float,
    sync: float,
    together: bool,
    span: tuple[int, int] | None = None,
) -> Timing:
    """Simulate steps and return their average timing.

    `learn`: seconds from the last response of a step to its new weights. `together`: the GPUs sample and train.
    `span`: the number of warm-up steps, and of measured steps.
    """
    warm, steps = span or (2 * ahead, 4 + 3 * ahead)
    ready = [0.0] * (ahead + 1)
    """When the responses of a step may begin."""
    begun, learned, waits, ends = [0] * len(gpus), 0.0, [0.0], [0.0]
    for step in range(warm + steps):
        for number, gpu in enumerate(gpus):
            while gpu.unfinished[step] or begun[number] <= step:
                following = ready[begun[number]] if begun[number] < len(ready) else float("inf")
                if following <= gpu.clock or not gpu.unfinished[step]:
                    gpu.clock = max(gpu.clock, following)
                    gpu.add(begun[number], sample_lengths(number, begun[number]))
                    begun[number] += 1
                gpu.run(step, ready[begun[number]] if begun[number] < len(ready) else float("inf"))
        sampled = max(gpu.clock for gpu in gpus)
        waits.append(max(0.0, sampled - (ends[-1] if together else learned)))
        learned = max(sampled, learned) + learn
        for gpu in gpus:
            if together:
                gpu.run(None, sampled)
                gpu.clock = learned + sync
            gpu.load_weights(0.0 if together else sync)
        ready.append(learned + sync)
        ends.append(learned + sync)
        if step + 1 == warm:
            for gpu in gpus:
                gpu.begun = gpu.busy
    count = len(ends) - 1 - warm
    busy = sum(gpu.busy - gpu.begun for gpu in gpus) / len(gpus)
    return Timing((ends[-1] - ends[warm]) / count, sum(waits[warm + 1 :]) / count, busy / count)
