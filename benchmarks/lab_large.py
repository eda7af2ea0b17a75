"""How long a very long run takes to open, and whether memory stays constant while it grows.

    python -m benchmarks.lab_large [--steps 100000] [--grow 20]

A run of 100,000 steps is opened in Chromium, in a lab that has not read it before. `value` is the seconds from
opening `/run` until its charts are on the screen (target: 2). `zoom` is the seconds until a part of 400 steps is
drawn exactly. Then the run continues, 5,000 steps at a time, with the page open. `lab` and `page` are the memory of
the lab's process and of the page's scripts after the run has doubled, divided by the memory before. ok: in time, and
neither grew by more than a tenth. There is no peer.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import close, show
from benchmarks.labs import Lab, furnish, lab, lines, page

SECONDS, GROWTH, PART = 2.0, 1.1, 5_000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--grow", type=int, default=20, help="how many times the run grows, by 5,000 steps each")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as kept:
        folder = furnish(Path(kept) / "runs", "long", options.steps)
        run = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(run | {"status": "running", "steps": 10 * options.steps}))
        with open(folder / ".lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # as a trainer holds it: the run is running
            with lab(folder.parent) as running, page(running) as shown:
                time.sleep(3)  # the lab has loaded its libraries by the time a person has seen the list
                opened, zoomed = opening(shown, options.steps)
                sizes = growing(running, shown, folder, options.steps, options.grow)
    grown = {name: sizes[-1][name] / sizes[1][name] for name in ("lab", "page")}
    show(
        ["steps", "lab MiB", "page MiB"], [[f"{s['steps']:,}", *(f"{s[n] / 2**20:.1f}" for n in grown)] for s in sizes]
    )
    print(f"opened in {opened:.2f} s, a part in {zoomed:.2f} s")
    ok = opened <= SECONDS and max(grown.values()) <= GROWTH
    return close("lab_large", opened, None, SECONDS, ok, zoom=zoomed, **grown)[1]


def opening(shown: Any, steps: int) -> tuple[float, float]:
    begin = time.perf_counter()
    shown.goto(f"{shown.url}run?id=long")
    shown.wait_for_selector("body[data-ready]")
    painted(shown)
    opened = time.perf_counter() - begin
    assert shown.evaluate("document.querySelectorAll('canvas').length") > 2, "nothing was drawn"
    middle = steps // 2
    begin = time.perf_counter()
    shown.fill("#to", str(middle + 200))
    shown.press("#to", "Enter")
    with shown.expect_response(
        lambda answer: "/api/view/curves" in answer.url and f"from={middle - 200}" in answer.url
    ):
        shown.fill("#from", str(middle - 200))
        shown.press("#from", "Enter")
    painted(shown)
    zoomed = time.perf_counter() - begin
    shown.click("#out")
    return opened, zoomed


def painted(shown: Any) -> None:
    shown.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def growing(running: Lab, shown: Any, folder: Path, steps: int, parts: int) -> list[dict[str, float]]:
    """Memory after each part, once the page has drawn it."""
    tools = shown.context.new_cdp_session(shown)
    tools.send("Performance.enable")
    found = []
    for part in range(parts + 1):
        if part:
            with open(folder / "metrics.jsonl", "a") as file:
                file.writelines(lines(PART, start=steps + PART * (part - 1)))
            last = str(steps + PART * part - 1)
            end = time.monotonic() + 60
            while shown.input_value("#to") != last:
                assert time.monotonic() < end, f"the page never showed step {last}"
                time.sleep(0.05)
        tools.send("HeapProfiler.collectGarbage")
        measured = {m["name"]: m["value"] for m in tools.send("Performance.getMetrics")["metrics"]}
        found.append({"steps": steps + PART * part, "lab": running.bytes(), "page": measured["JSHeapUsedSize"]})
    return found


if __name__ == "__main__":
    sys.exit(main())
