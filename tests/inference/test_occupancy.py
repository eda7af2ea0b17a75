"""Occupancy of the running batch: tail and slices computed by hand, and what runners record."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from language import model_of, prompts_of, sampler_of

from ascent.core.protocols import RolloutRequest
from ascent.core.types import Prompts
from ascent.inference import occupancy
from ascent.inference.occupancy import OccupancyTimeline
from ascent.inference.runners.cuda_graph import cuda_graph_runner
from ascent.inference.runners.eager import EagerRunner
from ascent.inference.runners.paged import PagedRunner


def test_the_tail_is_the_time_with_less_than_half_of_the_capacity_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 10.0, 10.0, 12.0, 12.0, 16.0])
    monkeypatch.setattr(occupancy.time, "perf_counter", lambda: next(times))
    seen = OccupancyTimeline(capacity=8)
    for rows in (8, 8, 4, 4, 3):
        seen.record(rows)
    seen.stop()
    assert seen.spans == [(10.0, 8, 8), (2.0, 4, 8), (4.0, 3, 8)]
    assert (seen.seconds, seen.tail_seconds) == (16.0, 4.0), "4 of 8 is not fewer than half"
    assert seen.mean_running(4) == [8.0, 8.0, 6.0, 3.0]
    whole = OccupancyTimeline()
    whole.merge(seen)
    whole.merge(OccupancyTimeline(2, [(1.0, 1, 2)]))
    assert (whole.capacity, whole.tail_seconds) == (8, 4.0), "each call has its own capacity"
    assert whole.drain().seconds == 17.0
    assert whole == OccupancyTimeline() and whole.mean_running() == []


@given(st.lists(st.tuples(st.floats(1e-6, 100), st.integers(0, 600)), min_size=1, max_size=60))
def test_the_slices_hold_all_rows(spans: list[tuple[float, int]]) -> None:
    seen = OccupancyTimeline(600, [(seconds, rows, 600) for seconds, rows in spans])
    running, area = seen.mean_running(), sum(seconds * rows for seconds, rows in spans)
    assert len(running) == occupancy.NUM_SLICES and max(running) <= max(rows for _, rows in spans) + 0.01
    assert sum(running) * seen.seconds / occupancy.NUM_SLICES == pytest.approx(area, abs=0.005 * seen.seconds + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("decoder", [PagedRunner, EagerRunner, "graphs"])
def test_every_runner_records_the_rollouts_of_a_step_and_not_those_of_an_evaluation(
    decoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(occupancy.time, "perf_counter", lambda: float(next(ticks)))
    lm = model_of()
    sampler = sampler_of(lm, rows=5)
    sampler.runner = cuda_graph_runner(lm)[0] if decoder == "graphs" else decoder
    prompts = Prompts.of(prompts_of())
    sampler.generate(prompts, 1, greedy=True)
    assert sampler.timeline == OccupancyTimeline()
    sampler.submit([RolloutRequest(0, prompts, 4)])
    (done,) = sampler.iter_finished(0, 1.0)
    spans = sampler.timeline.spans
    assert sampler.timeline.capacity == 5 and {capacity for _, _, capacity in spans} == {5}
    rows = [rows for _, rows, _ in spans if rows]
    assert rows[0] == 5 == max(rows) and rows[-1] < 5, "they end at different times"
    assert sampler.timeline.seconds > 0 and done.rollouts.mask.shape[:2] == (3, 4)
    sampler.generate(prompts, 1)
    assert sampler.timeline.spans == spans
