"""How many threads a run takes on a machine where others compute: two runs that take every core fight over them."""

import os
import time
from pathlib import Path

import torch

PROC = Path("/proc")
OBSERVATION_SECONDS = 0.1
"""Seconds for which the other processes are watched."""
MIN_BUSY_CORES = 0.5
"""Of a core, from which on a process counts as one that computes."""


def choose_num_threads(proc: Path = PROC) -> tuple[int, str]:
    """A fair fair_share of torch's threads, and why it is less than all of them, or nothing.

    A number that was set, such as by OMP_NUM_THREADS, stays: torch's own is the number of cores.
    """
    every = torch.get_num_threads()
    if every == 1 or "OMP_NUM_THREADS" in os.environ:
        return every, ""
    others = busy_cores(proc)
    mine = fair_share(every, others)
    if mine == every:
        return every, ""
    who = "another process computes" if len(others) == 1 else f"{len(others)} other processes compute"
    return mine, f"threads: {mine} of {every}, because {who} on this machine (--threads {every} takes all)"


def fair_share(every: int, others: list[float]) -> int:
    """Cores that nobody uses, or an equal part of all if that is more. `others`: cores that each process keeps busy."""
    return max(1, every // (len(others) + 1), every - round(sum(others)))


def busy_cores(proc: Path = PROC, seconds: float = OBSERVATION_SECONDS) -> list[float]:
    """Cores that other processes keep busy, for each that computes; nothing where there is no /proc."""
    before, begun = _cpu_ticks(proc), time.perf_counter()
    time.sleep(seconds if before else 0.0)
    after, passed = _cpu_ticks(proc), max(time.perf_counter() - begun, seconds)
    tick = os.sysconf("SC_CLK_TCK") * passed if before else 1.0
    return [cores for pid in before if pid in after and (cores := (after[pid] - before[pid]) / tick) >= MIN_BUSY_CORES]


def _cpu_ticks(proc: Path) -> dict[int, int]:
    """Clock ticks that each process but this one has computed for."""
    used = {}
    for stat in proc.glob("[0-9]*/stat"):
        try:
            words = stat.read_text(errors="replace").rpartition(")")[2].split()
            used[int(stat.parent.name)] = int(words[11]) + int(words[12])
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    used.pop(os.getpid(), None)
    return used
