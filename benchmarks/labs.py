"""Shared parts of the lab's benchmarks: a lab with synthetic runs of any size, and a browser that opens it."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ascent
from ascent.runs.metrics import ALWAYS_WRITTEN
from benchmarks.common import ROOT

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""What Chromium may be called. The first never opens a window, and does the same with a fifth less work."""
EVERY = 50
"""Steps between evaluations."""


class Lab:
    """`ascent lab` on a free port. Its address opens one browser, or gives one cookie."""

    def __init__(self, runs: Path):
        call = [sys.executable, "-m", "ascent", "lab", "--no-open", "--port", "0", "--runs", str(runs)]
        env = os.environ | {"XDG_STATE_HOME": str(runs / ".lab" / "state")}
        self.process = subprocess.Popen(call, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        found = re.search(r"http://\S+?:(\d+)/\?token=(\S+)", self.process.stdout.readline())
        assert found is not None
        self.address, self.port, self.token = found[0], int(found[1]), found[2]

    def bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return 1024 * int(found[1])


@contextmanager
def lab(runs: Path) -> Iterator[Lab]:
    found = Lab(runs)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()


@contextmanager
def page(found: Lab) -> Iterator[Any]:
    """A page of Chromium that has the lab's cookie, at the lab's first page."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit("this benchmark needs Chromium: make browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 1280, "height": 900})
        shown.goto(found.address)
        shown.wait_for_url(re.compile(r"/[0-9a-f]{32}/$"))
        yield shown
        browser.close()


def lines(count: int, start: int = 0, seed: int = 0) -> Iterator[str]:
    """Lines of metrics.jsonl in the trainer's own form, with curves that rise, fall and shake."""
    draw = random.Random(f"{seed} {start}")
    phases = {f"time/{name}": 0.1 for name in ("generate", "reward", "score", "update", "sync", "step")}
    for step in range(start, start + count):
        risen = 1 - math.exp(-(step + 200 * seed) / 20_000)
        line: dict[str, Any] = {name: draw.gauss(risen, 0.1) for name in ALWAYS_WRITTEN} | {"step": step}
        if step % EVERY:
            line |= {"eval/accuracy": None, "eval/reward": None, "exact/reward": None}
        line |= {name: mean * draw.random() for name, mean in phases.items()}
        yield json.dumps(line | {"time/tokens_per_second": 1e5 * draw.random(), "loss": draw.gauss(0, 0.01)}) + "\n"


def furnish(root: Path, name: str, steps: int, seed: int = 0, **settings: Any) -> Path:
    """A run's folder: that of a real, short run, with the metrics of a long one."""
    folder = root / name
    ascent.train("lecture", steps=2, seed=seed, show=False, out=folder, record_every=1, **settings)
    with open(folder / "metrics.jsonl", "w") as file:
        file.writelines(lines(steps, seed=seed))
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(run | {"step": steps, "steps": steps}))
    return folder
