"""Shared parts of the benchmarks: the closing JSON line, tables for the terminal and for Markdown, and plots."""

from __future__ import annotations

import json
import re
import time
from argparse import ArgumentParser, Namespace
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ascent.runs.display.plots import COLORS, DASHES, figure
from ascent.runs.display.terminal import table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GIVEN_BACK = {"MIMALLOC_PURGE_DECOMMITS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Variables of a process whose peak counts: its allocator (mimalloc on Arm, glibc's on x86) gives tensors back at once.

By itself it keeps them for the next ones, and what it keeps would count as resident.
"""


def close(
    name: str, value: float | None, peer: float | None, target: float, ok: bool, **more: Any
) -> tuple[dict[str, Any], int]:
    """Print the one JSON object that ends a benchmark; return it, and the exit status.

    `value` is what was measured here, `peer` what it is compared with, `ratio` the first over the second,
    `target` the figure to reach.
    """
    ratio = value / peer if value is not None and peer else None
    line = {"name": name, "value": value, "peer": peer, "ratio": ratio, "target": target, "ok": bool(ok), **more}
    print(json.dumps(line), flush=True)
    return line, 0 if ok else 1


def options_with_gpu(parser: ArgumentParser, argv: list[str] | None, *without: str) -> Namespace:
    """The options of a benchmark for a GPU. Where there is none, `--smoke` or one of `without` must be among them."""
    import torch

    options = parser.parse_args(argv)
    if not torch.cuda.is_available() and not any(vars(options).get(name) for name in ("smoke", *without)):
        elsewhere = "; --smoke tries it on the CPU, with a tiny model" if hasattr(options, "smoke") else ""
        parser.error(f"this measures a GPU of NVIDIA's, and there is none here{elsewhere}")
    return options


class NoRecords:
    """Records that write nothing. A benchmark adds `step`, and keeps there what it needs."""

    def checkpoint(self, *_: Any) -> None: ...

    def dump(self, step: int, batch: Any) -> str:
        return "no file: benchmarks keep nothing"

    def should_stop(self) -> bool:
        return False

    def is_best(self) -> bool:
        return False


def random_batch(vocab: int, prompts: int, samples: int, prompt_tokens: int, tokens: int) -> Any:
    """A batch of random tokens and rewards, all prompts as long as each other and all responses too."""
    import torch

    from ascent.core.types import Batch

    rng, shape = torch.Generator().manual_seed(0), (prompts, samples, tokens)
    return Batch(
        prompt=torch.randint(vocab, (prompts, prompt_tokens), generator=rng),
        response=torch.randint(vocab, shape, generator=rng),
        mask=torch.ones(shape, dtype=torch.bool),
        logp_sampler=torch.full(shape, -10.0),
        limit=tokens,
        truncated=torch.zeros(shape[:2], dtype=torch.bool),
        reward=torch.randn(*shape[:2], 1, generator=rng),
        valid=torch.ones(shape[:2], dtype=torch.bool),
    )


def workers(jobs: int) -> Executor:
    """A pool of this many processes; a single job runs in this process."""
    return ThreadPoolExecutor(1) if jobs == 1 else ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def show(head: list[str], rows: list[list[str]]) -> None:
    print("\n".join(table(head, rows)), flush=True)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def pair(mean: float, half: float, digits: int = 2) -> str:
    """A mean and half of its 95 % interval."""
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def write_page(name: str, text: str) -> Path:
    """benchmarks/results/NAME.md, with the day it was made."""
    path = RESULTS / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    path.write_text(f"{text}\n\nMeasured on {time.strftime('%Y-%m-%d')}.\n")
    return path


def save_picture(fig: Any, name: str) -> Path:
    """benchmarks/results/NAME.png."""
    from matplotlib import pyplot

    path = RESULTS / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=130)
    pyplot.close(fig)
    return path


__all__ = ["COLORS", "DASHES", "RESULTS", "ROOT", "close", "figure", "markdown", "pair", "save_picture", "show"]
