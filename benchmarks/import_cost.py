"""What `import ascent` costs on top of `import torch`.

    python -m benchmarks.import_cost [--repeats 7]

Each measurement is a fresh process that imports torch and then ascent, up to `ascent.train`; the rest of the package
is imported on first use. `value` is the median time of the second import in seconds (target: at most 0.3). The peer
is the median of the first. One more process runs before, to write the bytecode and warm the disk cache; it is not
counted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from statistics import median

from benchmarks.common import ROOT, close

SECONDS = 0.3
PROGRAM = """
import time
begin = time.perf_counter(); import torch
between = time.perf_counter(); import ascent; ascent.train
print(between - begin, time.perf_counter() - between)
"""


def measure() -> tuple[float, float]:
    """Seconds for torch, and for ascent after it, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = map(float, done.stdout.split())
    return first, second


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args(argv).repeats
    if repeats > 1:
        measure()  # reads the files from the disk
    times = [measure() for _ in range(repeats)]
    for torch, ascent in times:
        print(f"torch {torch:.3f} s, ascent on top {ascent:.3f} s")
    value = median(ascent for _, ascent in times)
    return close("import_cost", value, median(torch for torch, _ in times), SECONDS, value <= SECONDS)[1]


if __name__ == "__main__":
    sys.exit(main())
