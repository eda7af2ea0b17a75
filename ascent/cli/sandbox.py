"""`ascent sandbox check`: which walls this machine has, and whether they hold."""

import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ascent.cli.flags import Command
from ascent.core.errors import ConfigError
from ascent.sandbox.escape_tests import LIMITS, try_all
from ascent.sandbox.isolation import IsolationError, choose
from ascent.sandbox.sandbox import Sandbox, SandboxError

JOBS = 50
"""Jobs whose time is measured."""


@dataclass
class SandboxCommand(Command):
    """Which walls this machine has for code that is not trusted. Tries to get through each.

    Exit status 0: every attempt was held. 1: one got out. 2: there are no walls
    here, so tasks that run code are refused.
    """

    what: Literal["check"]
    """check."""
    sandbox: Literal["auto", "bubblewrap", "landlock"] = "auto"
    """The walls to try; auto: all that are here."""

    def execute(self) -> int | None:
        kinds = ("bubblewrap", "landlock") if self.sandbox == "auto" else (self.sandbox,)
        missing: list[str] = []
        got_out = 0
        for kind in kinds:
            try:
                walls = choose(kind)
                words, results = try_all(kind)
            except (IsolationError, SandboxError) as error:
                missing.append(f"{kind:<12}{error}")
                continue
            print(f"{kind:<12}{words}; a job takes {_milliseconds(kind):.1f} ms")
            if not walls.folder:
                print(f"{'':<12}no folder to write in")
            tried = Counter(result.attempt.kind for result in results)
            held = Counter(result.attempt.kind for result in results if result.held)
            print(f"{'':<12}held: " + ", ".join(f"{each} {held[each]} of {tried[each]}" for each in tried))
            for result in [result for result in results if not result.held]:
                got_out += 1
                print(f"{'':<12}GOT OUT: {result.attempt.kind}, {result.attempt.name}: {result.how}")
        print(*missing, sep="\n", end="\n" if missing else "")
        if len(missing) == len(kinds):
            raise ConfigError("there is no sandbox here: tasks that run code are refused, unless --sandbox none is set")
        print(f"{'used':<12}{choose(self.sandbox).words()}")
        return 1 if got_out else None


def _milliseconds(kind: str) -> float:
    """The median time of a job, from its beginning until nothing of it is left."""
    times = []
    with Sandbox("ascent.sandbox.python_session:serve_session", LIMITS, kind=kind) as box:
        box.start()
        for _ in range(JOBS):
            began = time.perf_counter()
            with box.job() as job:
                job.ask({"code": "1 + 1"}, 30.0)
            times.append(1000 * (time.perf_counter() - began))
    return median(times)


COMMANDS = {"learn": (SandboxCommand,)}
