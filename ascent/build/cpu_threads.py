"""Choose the number of CPU threads: two runs that each use every core slow each other down."""

import os
import time
from pathlib import Path

import torch

PROC = Path("/proc")
OBSERVATION_SECONDS = 0.1
"""Seconds for which the CPU use of other processes is measured."""
MIN_BUSY_CORES = 0.5
"""Cores that a process must keep busy to be counted."""


def choose_num_threads(proc: Path = PROC) -> tuple[int, str]:
    """Return a fair share of torch's threads, and a note if it is less than all of them.

    A number set by OMP_NUM_THREADS is not changed; torch's default is the number of cores.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or "OMP_NUM_THREADS" in os.environ:
        return num_threads, ""
    others = busy_cores(proc)
    used_threads = fair_share(num_threads, others)
    if used_threads == num_threads:
        return num_threads, ""
    who = "another process computes" if len(others) == 1 else f"{len(others)} other processes compute"
    return (
        used_threads,
        f"threads: {used_threads} of {num_threads}, because {who} on this machine (--threads {num_threads} takes all)",
    )


def fair_share(num_threads: int, others: list[float]) -> int:
    """Return the number of idle cores, or an equal share of all cores if that is more.

    `others` has the number of cores that each other process keeps busy.
    """
    return max(1, num_threads // (len(others) + 1), num_threads - round(sum(others)))


def busy_cores(proc: Path = PROC, seconds: float = OBSERVATION_SECONDS) -> list[float]:
    """Return the number of cores that each other busy process uses; empty on systems without /proc."""
    before, begun = _cpu_ticks(proc), time.perf_counter()
    time.sleep(seconds if before else 0.0)
    after, passed = _cpu_ticks(proc), max(time.perf_counter() - begun, seconds)
    tick = os.sysconf("SC_CLK_TCK") * passed if before else 1.0
    return [cores for pid in before if pid in after and (cores := (after[pid] - before[pid]) / tick) >= MIN_BUSY_CORES]


def _cpu_ticks(proc: Path) -> dict[int, int]:
    """Return the CPU time of every other process, in clock ticks."""
    used = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            words = stat.read_text(errors="replace").rpartition(")")[2].split()
            used[int(stat.parent.name)] = int(words[11]) + int(words[12])
        except (OSError, ValueError, IndexError):  # the process has ended
            continue
    used.pop(os.getpid(), None)
    return used
