"""`ascent sandbox check`: test the isolation of untrusted code on this machine."""

import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ascent.cli.flags import Command
from ascent.core.errors import ConfigError
from ascent.sandbox.escape_tests import LIMITS, run_escape_tests
from ascent.sandbox.isolation import IsolationError, choose_isolation
from ascent.sandbox.sandbox import Sandbox, SandboxError

TIMED_JOBS = 50


@dataclass
class SandboxCommand(Command):
    """Test the isolation of untrusted code on this machine with escape tests.

    Exit status 0: no escape test succeeded. 1: one succeeded. 2: this machine has
    no isolation, so tasks that run code are refused.
    """

    what: Literal["check"]
    """check: run the escape tests."""
    sandbox: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """Kind of isolation to test; auto: all that this machine has."""

    def execute(self) -> int | None:
        kinds = ("bubblewrap", "landlock") if self.sandbox == "auto" else (self.sandbox,)
        missing: list[str] = []
        num_escapes = 0
        for kind in kinds:
            try:
                isolation = choose_isolation(kind)
                words, results = run_escape_tests(kind)
            except (IsolationError, SandboxError) as error:
                missing.append(f"{kind:<12}{error}")
                continue
            print(f"{kind:<12}{words}; one job takes {_milliseconds(kind):.1f} ms")
            if not isolation.folder:
                print(f"{'':<12}no folder to write in")
            tried = Counter(result.test.kind for result in results)
            held = Counter(result.test.kind for result in results if result.is_contained)
            print(f"{'':<12}held: " + ", ".join(f"{each} {held[each]} of {tried[each]}" for each in tried))
            for result in [result for result in results if not result.is_contained]:
                num_escapes += 1
                print(f"{'':<12}ESCAPED: {result.test.kind}, {result.test.name}: {result.how}")
        print(*missing, sep="\n", end="\n" if missing else "")
        if len(missing) == len(kinds):
            raise ConfigError("there is no sandbox here: tasks that run code are refused, unless --sandbox none is set")
        print(f"{'used':<12}{choose_isolation(self.sandbox).describe()}")
        return 1 if num_escapes else None


def _milliseconds(kind: str) -> float:
    """Return the median time of a job, from its start until its processes have ended."""
    times = []
    with Sandbox("ascent.sandbox.python_session:serve_session", LIMITS, kind=kind) as sandbox:
        sandbox.start()
        for _ in range(TIMED_JOBS):
            began = time.perf_counter()
            with sandbox.job() as job:
                job.ask({"code": "1 + 1"}, 30.0)
            times.append(1000 * (time.perf_counter() - began))
    return median(times)


COMMANDS = {"learn": (SandboxCommand,)}
