"""The task `lecture`, solved within the course's budget: what `ascent train lecture` does by default.

    python -m benchmarks.lecture_solve [--seeds 10] [--many 400]

On each seed the run must reach an exact, enumerated E[R] of at least 4.9 of 5 and sort all three prompts greedily,
with at most 3,000 responses and 1,000 updates. The settings are the default preset of ascent/tasks/small/lecture.py:
Dr. GRPO, Adam at 1e-2, and an entropy bonus that falls from 0.4 to 0 over 90 % of the run. `value` is the lowest
E[R] of any seed. The peer is the mean E[R] of the course's settings with its best advantage (centered) on the same
seeds. `--many N` also reports the share of N seeds that are solved, all in one stacked loop (benchmarks/many.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import ascent
from benchmarks.common import close, show
from benchmarks.many import train_many

EXPECTED, RESPONSES, UPDATES = 4.9, 3_000, 1_000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="fewer, to try the benchmark itself")
    parser.add_argument("--many", type=int, default=0, help="how many more seeds to try, in one stacked loop")
    options = parser.parse_args(argv)
    rows, expected, solved = [], [], True
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            run = ascent.train("lecture", out=Path(folder) / str(seed), show=False, seed=seed, steps=options.steps)
            last = run.metrics[-1]
            responses, updates = sum(line["num_responses"] for line in run.metrics), len(run.updates)
            expected.append(last["exact/reward"])
            ok = expected[-1] >= EXPECTED and last["eval/accuracy"] == 1.0
            solved &= ok and responses <= RESPONSES and updates <= UPDATES
            row = [str(seed), f"{expected[-1]:.4f}", f"{3 * last['eval/accuracy']:.0f} of 3", f"{responses:,}"]
            rows.append([*row, f"{updates:,}", "yes" if ok else "no"])
    show(["seed", "E[R] of 5", "sorted", "responses", "updates", "solved"], rows)
    course = train_many(options.seeds, preset="course", advantage="centered", steps=options.steps)
    peer = course.expected.mean().item()
    print(f"The course's settings, centered: E[R] {peer:.3f}, {course.sorted.mean():.0%} of the prompts sorted.")
    more = {}
    if options.many:
        many = train_many(options.many)
        more["solved"] = ((many.expected >= EXPECTED) & (many.sorted == 1)).double().mean().item()
        print(f"Of {options.many} seeds, stacked: {more['solved']:.2%} solved; lowest E[R] {many.expected.min():.3f}.")
    return close("lecture_solve", min(expected), peer, EXPECTED, solved, seeds=options.seeds, **more)[1]


if __name__ == "__main__":
    sys.exit(main())
