"""Rollouts of equal lengths on one GPU: a paged KV cache against a cache that reserves each sequence's limit.

    python -m benchmarks.pages_gpu --before FOLDER [--shape 135m 1.5b] [--tokens 256 2048] [--turns 2] [--repeats 3]

FOLDER is a checkout of commit f23e6f8, the last one with contiguous caches. Each side runs `benchmarks.rollouts_gpu` of
this checkout with its own library, in its own process. They alternate, and the best of each side counts. `value`
is the smallest ratio of tokens per second, paged over contiguous, and the target is 0.95. Without --before only the
paged cache is measured. `--smoke` runs tiny models on the CPU, both times with this library.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import rollouts_gpu
from benchmarks.common import ROOT, close, options_with_gpu, show

KEPT = 0.95


def measured(library: Path, shape: str, tokens: int, repeats: int) -> dict[str, Any]:
    """What `rollouts_gpu` finds with the library of this checkout."""
    script = ROOT / "benchmarks" / "rollouts_gpu.py"
    call = [sys.executable, str(script), "--shape", shape, "--tokens", str(tokens), "--repeats", str(repeats)]
    done = subprocess.run(call, env=os.environ | {"PYTHONPATH": str(library)}, capture_output=True, text=True)
    if not done.stdout.strip():
        raise RuntimeError(f"{library}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["shapes"][shape]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout with contiguous caches")
    parser.add_argument("--shape", nargs="+", choices=sorted(rollouts_gpu.SHAPES), default=list(rollouts_gpu.SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 2048], help="new tokens of every response")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="measurements of one turn, of which the median counts")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, only to see that it runs")
    options = options_with_gpu(parser, argv)
    sides = {"paged": ROOT} | ({"contiguous": options.before.resolve()} if options.before else {})
    if options.smoke:
        sides, options.tokens, options.turns = {"contiguous": ROOT, "paged": ROOT}, [8], 1
    small = argparse.Namespace(smoke=True, repeats=1, profile=False)
    rows, found = [], []
    for shape in options.shape:
        for tokens in options.tokens:
            rates: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(options.turns):
                for side, library in sides.items():
                    one = (
                        rollouts_gpu.measure(shape, small)
                        if options.smoke
                        else measured(library, shape, tokens, options.repeats)
                    )
                    rates[side].append(one["tokens_per_second"])
            best = {side: max(each) for side, each in rates.items()}
            ratio = best["paged"] / best.get("contiguous", float("nan"))
            rows.append([shape, str(tokens), *(f"{rate:,.0f}" for rate in best.values()), f"{ratio:.3f}"])
            found.append({"shape": shape, "tokens": tokens, "tokens_per_second": rates, "ratio": ratio})
    show(["shape", "tokens", *sides, "paged / contiguous"], rows)
    if options.smoke or "contiguous" not in sides:
        return close("pages_gpu", None, None, KEPT, True, smoke=options.smoke, found=found)[1]
    least = min(each["ratio"] for each in found)
    return close("pages_gpu", least, 1.0, KEPT, least >= KEPT, found=found)[1]


if __name__ == "__main__":
    sys.exit(main())
