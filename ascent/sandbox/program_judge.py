"""Judge programs by tests that run in another sandbox than the program.

Neither the exit status nor the output of a program decides anything. A program that dies or is too slow fails the
remaining tests.
"""

import json
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ascent.processes.channel import poll_channels
from ascent.sandbox.program_trial import PROGRESS, TO_PROGRAM, VERDICT
from ascent.sandbox.sandbox import JobEndedError, Sandbox, SandboxJob, SandboxLimits


class Verdict(NamedTuple):
    """The result of the tests of a program."""

    passed: int
    total: int
    """0: the tests did not start."""
    why: str
    """What is wrong with the program; empty: nothing."""

    @property
    def right(self) -> bool:
        return not self.why and 0 < self.total == self.passed

    @property
    def share(self) -> float:
        return self.passed / self.total if self.total else 0.0


class BrokenTestsError(Exception):
    """The tests themselves do not run, whatever the program does."""


@dataclass(frozen=True)
class CodeProblem:
    """A problem and the tests of its programs."""

    entry: str
    """The function or class that the tests call."""
    tests: tuple[str, ...]
    prelude: tuple[str, ...] = ()
    """Code that runs before both the program and the tests: imports, helpers, classes."""
    is_class: bool | None = None
    """Whether the entry point is a class. None: decided by the prelude (`entry_is_class`)."""


def entry_is_class(entry: str, codes: Iterable[str]) -> bool:
    """Whether the entry point is a class: by its first definition in these codes, otherwise by its name (PEP 8).

    The program itself does not decide: a class in place of a function could claim to equal whatever is expected.
    """
    matches = (re.search(rf"^(async def|def|class)\s+{entry}\b", code, re.MULTILINE) for code in codes)
    first = next(filter(None, matches), None)
    return first[1] == "class" if first else re.fullmatch("_*[A-Z][A-Za-z0-9]*", entry) is not None


class ProgramJudge:
    """Two sandboxes, one for programs and one for tests."""

    def __init__(
        self, limits: SandboxLimits, kind: str = "auto", readable: Sequence[str] = (), packages: Sequence[str] = ()
    ):
        """`limits.seconds` is the time limit of all tests of a program together."""
        self.limits = limits
        self.programs = Sandbox("ascent.sandbox.program_trial:serve_program", limits, None, kind, readable, packages)
        self.tests = Sandbox("ascent.sandbox.program_trial:serve_tests", limits, None, kind, readable, packages)

    def start(self) -> None:
        self.programs.start()
        self.tests.start()

    def close(self) -> None:
        self.programs.close()
        self.tests.close()

    def __call__(self, problem: CodeProblem, programs: Sequence[str]) -> Verdict:
        """Judge the first of these programs that is Python and defines the entry point."""
        until = time.monotonic() + self.limits.seconds
        with self.programs.job() as program, self.tests.job() as tests:
            is_class = problem.is_class
            if is_class is None:
                is_class = entry_is_class(problem.entry, problem.prelude)
            shared = {"prelude": problem.prelude, "entry": problem.entry, "class": is_class}
            request = json.dumps(shared | {"tests": problem.tests}).encode()
            try:
                loaded = program.ask(shared | {"programs": list(programs)}, until - time.monotonic())
                if isinstance(loaded, dict) and "loaded" in loaded:
                    return _Relay(program, tests, until)(request)
                why = str(loaded.get("error", ""))[:300] if isinstance(loaded, dict) else ""
                why = f"the program does not run: {why or 'it reported no error'}"
            except JobEndedError as ended:
                why = f"the program {ended}"
            return Verdict(0, self._count(tests, request), why)

    def _count(self, tests: SandboxJob, request: bytes) -> int:
        """Return the number of tests without running a program; raises BrokenTestsError if they cannot run."""
        try:
            report = json.loads(tests.ask_bytes(request)[1:])
        except JobEndedError as ended:
            raise BrokenTestsError(f"the tests {ended}") from None
        if "broken" in report:
            raise BrokenTestsError(f"the tests do not run: {report['broken']}")
        return int(report["total"])


class _Relay:
    """Pass questions of the tests to the program, and its answers back, until there is a verdict."""

    def __init__(self, program: SandboxJob, tests: SandboxJob, until: float):
        self.program, self.tests, self.until = program, tests, until
        self.report: dict[str, Any] = {}

    def __call__(self, first: bytes) -> Verdict:
        try:
            self.tests.send(first, self.until)
            while self._relay_tests() or self._relay_program() or self._wait():
                if "broken" in self.report:
                    raise BrokenTestsError(f"the tests do not run: {self.report['broken']}")
                if "done" in self.report:
                    return self._verdict("")
        except JobEndedError as ended:
            return self._verdict(str(ended))
        raise AssertionError

    def _relay_tests(self) -> bool:
        try:
            line = self.tests.receive()
        except JobEndedError as ended:
            raise JobEndedError(f"the tests did not end: {ended}") from None
        if line is None:
            return False
        kind, body = line[:1], line[1:]
        if kind == TO_PROGRAM:
            self.program.send(body, self.until)
        elif kind in (PROGRESS, VERDICT):
            self.report = json.loads(body) | ({"done": True} if kind == VERDICT else {})
        return True

    def _relay_program(self) -> bool:
        try:
            line = self.program.receive()
        except JobEndedError as ended:
            raise JobEndedError(f"the program {ended}") from None
        if line is None:
            return False
        self.tests.send(line, self.until)
        return True

    def _wait(self) -> bool:
        if not poll_channels([self.program.channel, self.tests.channel], self.until - time.monotonic()):
            raise JobEndedError(f"the program took longer than {self.program.limits.seconds:g} s")
        return True

    def _verdict(self, ended: str) -> Verdict:
        passed, total = int(self.report.get("passed", 0)), int(self.report.get("total", 0))
        why = ended or str(self.report.get("why", ""))
        if not why and passed != total:
            why = f"{total - passed} of {total} tests did not run"
        with suppress(OSError):
            self.program.channel.socket.shutdown(2)
        return Verdict(passed, total, why)
