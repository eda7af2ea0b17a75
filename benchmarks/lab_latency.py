"""How long a figure of the lab takes to respond, from the request to the last byte.

    python -m benchmarks.lab_latency [--states 60]

A real lab listens on a free port. One connection asks for states as a dragged control does: each figure's first
slider over its range, twice, so that half of the states are new to the figure. `value` is the 95th percentile of the
slowest figure in milliseconds (target: 100, which still feels immediate). There is no peer.
"""

from __future__ import annotations

import argparse
import http.client
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from ascent.lab.figure_base import Slider
from ascent.lab.figures import all_figures
from benchmarks.common import close, show
from benchmarks.labs import lab

MILLISECONDS = 100.0


def states(name: str, count: int) -> list[str]:
    """Queries along the first slider of a figure, from end to end and back."""
    slider = next(c for c in all_figures()[name].controls if isinstance(c, Slider))
    steps = round((slider.high - slider.low) / slider.step)
    there = slider.values or [slider.low + i * slider.step for i in range(steps + 1)]
    values = [*there, *reversed(there)]
    return [f"{slider.name}={round(values[i % len(values)], 6):g}" for i in range(count)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=60)
    count = parser.parse_args(argv).states
    with tempfile.TemporaryDirectory() as runs, lab(Path(runs)) as running:
        times = measure(running.port, running.token, count)
    worst = {name: quantiles(spent, n=20)[-1] for name, spent in times.items()}
    rows = [[name, f"{median(spent):.1f}", f"{worst[name]:.1f}"] for name, spent in times.items()]
    show(["figure", "median ms", "95 % ms"], rows)
    value = max(worst.values())
    return close("lab_latency", value, None, MILLISECONDS, value <= MILLISECONDS, **worst)[1]


def measure(port: int, token: str, count: int) -> dict[str, list[float]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(path: str, cookie: str = "") -> http.client.HTTPResponse:
        connection.request("GET", path, headers={"cookie": cookie} if cookie else {})
        answer = connection.getresponse()
        answer.read()
        return answer

    given = str(ask(f"/?token={token}").getheader("set-cookie"))
    cookie, root = given.split(";")[0], re.findall(r"[Pp]ath=([^;]+)", given)[0]
    for name in all_figures():  # what is computed once is computed when the lab starts
        ask(f"{root}/api/figure/{name}", cookie)
    times: dict[str, list[float]] = {}
    for name in all_figures():
        for query in states(name, count):
            begin = time.perf_counter()
            assert ask(f"{root}/api/figure/{name}?{query}", cookie).status == 200, query
            times.setdefault(name, []).append(1000 * (time.perf_counter() - begin))
    return times


if __name__ == "__main__":
    sys.exit(main())
