"""Which functions of the package each test calls, as `python -m benchmarks.mutants --map` has recorded it.

Functions are kept by name and not by line, so that the record outlives changes of the package. startup/record_calls.py
writes it: processes that a test starts are recorded, too, as far as they inherit the environment.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NEAR = 8
"""Files of tests to run for a function that no test was seen to call."""


@dataclass
class Calls:
    """What was recorded: functions of each test, and seconds."""

    of: dict[str, set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Calls:
        calls = cls()
        for line in path.read_text().splitlines() if path.exists() else ():
            one = json.loads(line)
            calls.of.setdefault(one["test"], set()).update(one["calls"])
            if "seconds" in one:
                calls.seconds[one["test"]] = one["seconds"]
        calls.of = {test: called for test, called in calls.of.items() if test in calls.seconds}
        return calls

    def callers(self, path: str, function: str) -> list[str]:
        """Tests that call a function, the most specific first; outside of functions: those that use the file."""
        name, prefix = f"{path}::{function}", f"{path}::"
        if function:
            found = [test for test, called in self.of.items() if name in called]
        else:
            found = [test for test, called in self.of.items() if any(one.startswith(prefix) for one in called)]
        return sorted(found, key=lambda test: (len(self.of[test]), self.seconds[test], test))

    def near(self, path: str) -> list[str]:
        """Files of tests that call functions of the same folder most often."""
        folder = f"{path.rpartition('/')[0]}/"
        counts = Counter(
            test.partition("::")[0] for test, called in self.of.items() if any(one.startswith(folder) for one in called)
        )
        return [file for file, _ in counts.most_common(NEAR)]

    def some(self, tests: list[str], seconds: float, most: int) -> list[str]:
        """The first of these, and no more than take this long together; at least one."""
        chosen, total = list[str](), 0.0
        for test in tests:
            total += self.seconds[test]
            if chosen and (total > seconds or len(chosen) >= most):
                break
            chosen.append(test)
        return chosen


def spread(tests: list[str]) -> Iterator[str]:
    """One test of every file in turn, so that the first ones differ."""
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    queues = list(files.values())
    while queues:
        for queue in queues:
            yield queue.pop(0)
        queues = [queue for queue in queues if queue]
