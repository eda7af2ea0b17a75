"""Verdicts on programs, made outside of them: what their tests found, in a sandbox where no program runs.

No exit status and no word that a program prints decides anything. A program that dies, or takes too long, fails the
tests that are left.
"""

import json
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ascent.processes.channel import poll_channels
from ascent.sandbox.program_trial import SO_FAR, TO_PROGRAM, VERDICT
from ascent.sandbox.sandbox import BoxJob, BoxLimits, JobEndedError, Sandbox


class Verdict(NamedTuple):
    """What the tests found."""

    passed: int
    total: int
    """0: they did not begin."""
    why: str
    """What was wrong with the program, in words; empty: nothing."""

    @property
    def right(self) -> bool:
        return not self.why and 0 < self.total == self.passed

    @property
    def share(self) -> float:
        return self.passed / self.total if self.total else 0.0


class BrokenTestsError(Exception):
    """The tests themselves do not run: that is no program's fault."""


@dataclass(frozen=True)
class CodeProblem:
    """What a program is judged by."""

    entry: str
    """The function or class that the tests call."""
    tests: tuple[str, ...]
    prelude: tuple[str, ...] = ()
    """Code that both the program and the tests have: imports, helpers, classes."""
    is_class: bool | None = None
    """Whether the entry point is a class. None: what the prelude says (`entry_is_class`)."""


def entry_is_class(entry: str, codes: Iterable[str]) -> bool:
    """What the first of these pieces of a problem to define it says; otherwise its name, which has capitals (PEP 8).

    The program is never asked: a class in place of a function could say that it equals whatever is expected.
    """
    found = (re.search(rf"^(async def|def|class)\s+{entry}\b", code, re.MULTILINE) for code in codes)
    first = next(filter(None, found), None)
    return first[1] == "class" if first else re.fullmatch("_*[A-Z][A-Za-z0-9]*", entry) is not None


class ProgramJudge:
    """Two sandboxes, for programs and for tests."""

    def __init__(
        self, limits: BoxLimits, kind: str = "auto", readable: Sequence[str] = (), packages: Sequence[str] = ()
    ):
        """`limits.seconds` is the time of all tests of a program together."""
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
        """The verdict on the first of these programs that is Python and defines the entry point."""
        until = time.monotonic() + self.limits.seconds
        with self.programs.job() as program, self.tests.job() as tests:
            known = problem.is_class
            is_class = entry_is_class(problem.entry, problem.prelude) if known is None else known
            both = {"prelude": problem.prelude, "entry": problem.entry, "class": is_class}
            asked = json.dumps(both | {"tests": problem.tests}).encode()
            try:
                loaded = program.ask(both | {"programs": list(programs)}, until - time.monotonic())
                if isinstance(loaded, dict) and "loaded" in loaded:
                    return _Relay(program, tests, until)(asked)
                wrong = str(loaded.get("error", ""))[:300] if isinstance(loaded, dict) else ""
                wrong = f"the program does not run: {wrong or 'it said nothing'}"
            except JobEndedError as ended:
                wrong = f"the program {ended}"
            return Verdict(0, self._count(tests, asked), wrong)

    def _count(self, tests: BoxJob, asked: bytes) -> int:
        """Return the number of tests without running a program; raises BrokenTestsError if they cannot run."""
        try:
            found = json.loads(tests.ask_bytes(asked)[1:])
        except JobEndedError as ended:
            raise BrokenTestsError(f"the tests {ended}") from None
        if "broken" in found:
            raise BrokenTestsError(f"the tests do not run: {found['broken']}")
        return int(found["total"])


class _Relay:
    """Hands questions of the tests to the program, and its answers back, until there is a verdict."""

    def __init__(self, program: BoxJob, tests: BoxJob, until: float):
        self.program, self.tests, self.until = program, tests, until
        self.found: dict[str, Any] = {}

    def __call__(self, first: bytes) -> Verdict:
        try:
            self.tests.send(first, self.until)
            while self._tests_said() or self._program_said() or self._wait():
                if "broken" in self.found:
                    raise BrokenTestsError(f"the tests do not run: {self.found['broken']}")
                if "done" in self.found:
                    return self._verdict("")
        except JobEndedError as ended:
            return self._verdict(str(ended))
        raise AssertionError

    def _tests_said(self) -> bool:
        try:
            line = self.tests.receive()
        except JobEndedError as ended:
            raise JobEndedError(f"the tests did not end: {ended}") from None
        if line is None:
            return False
        kind, body = line[:1], line[1:]
        if kind == TO_PROGRAM:
            self.program.send(body, self.until)
        elif kind in (SO_FAR, VERDICT):
            self.found = json.loads(body) | ({"done": True} if kind == VERDICT else {})
        return True

    def _program_said(self) -> bool:
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
        passed, total = int(self.found.get("passed", 0)), int(self.found.get("total", 0))
        why = ended or str(self.found.get("why", ""))
        if not why and passed != total:
            why = f"{total - passed} of {total} tests did not run"
        with suppress(OSError):
            self.program.channel.socket.shutdown(2)
        return Verdict(passed, total, why)
