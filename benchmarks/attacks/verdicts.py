"""Attacks by programs that are judged: generated cheats (`cheats.py`), in batches, beside correct programs.

Without the defense a program and its tests share a process, whose output or exit status is the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from ascent.sandbox.program_judge import ProgramJudge
from ascent.sandbox.sandbox import JobEndedError, Sandbox, SandboxLimits
from benchmarks.attacks.attempt import Attack
from benchmarks.attacks.cheats import FAMILIES, STYLES, Cheat, TestStyle, generate_cheats

KIND = "verdicts"
BATCH = 50
"""Cheats of one attack."""
HASTY, PATIENT = SandboxLimits(seconds=1.0), SandboxLimits(seconds=20.0)
"""A cheat that takes longer has not passed."""
RUNS_TESTS = """
import unittest
for _name, _test in list(globals().items()):
    if _name == "check":
        _test({entry})
    elif _name.startswith("test"):
        _test(*[{entry}] * _test.__code__.co_argcount)
    elif isinstance(_test, type) and issubclass(_test, unittest.TestCase):
        for _case in unittest.defaultTestLoader.loadTestsFromTestCase(_test):
            _case.debug()
"""


def judge_apart(cheats: Iterator[Cheat]) -> str | None:
    """The first cheat that passes a test, by the library's judge; or a right program that does not pass."""
    with closing(ProgramJudge(PATIENT)) as judge:
        for style in STYLES:
            if (words := misjudged(judge, style)) is not None:
                return words
        judge.limits = HASTY
        for cheat in islice(cheats, BATCH):
            verdict = judge(cheat.style.problem, [cheat.program])
            if verdict.right or verdict.passed > cheat.style.free:
                return f"{verdict.passed} of {verdict.total} tests of {cheat.style.name} pass: {cheat.program}"
    return None


def misjudged(judge: ProgramJudge, style: TestStyle) -> str | None:
    for program in style.right:
        if not (verdict := judge(style.problem, [program])).right:
            return f"a right program fails, {style.name}: {verdict.why}"
    for program in style.wrong:
        if judge(style.problem, [program]).right:
            return f"a wrong program passes, {style.name}: {program}"
    return None


def judge_beside(cheats: Iterator[Cheat]) -> str | None:
    """The first cheat that passes where tests run beside it. Many tests are too much for most of them."""
    with Sandbox("ascent.sandbox.python_session:serve_session", HASTY) as sandbox:
        for cheat in islice(cheats, 10 * BATCH):
            style = cheat.style
            code = "\n".join((style.prelude, cheat.program, style.tests, RUNS_TESTS.format(entry=style.entry)))
            try:
                with sandbox.job() as job:
                    answer = job.ask({"code": code})
                    passes = not (isinstance(answer, dict) and "Traceback" in str(answer.get("text")))
            except JobEndedError as ended:
                passes = "exit status 0" in str(ended)
            if passes:
                return f"all tests of {style.name} pass"
    return None


JUDGE = judge_apart


def beside() -> None:
    global JUDGE
    JUDGE = judge_beside


def attempt_of(family: str, seed: int) -> Callable[[Path], str | None]:
    return lambda _: JUDGE(generate_cheats(seed, family))


def attacks(_: Path, seed: int = 0, cheats: int = 1800) -> list[Attack]:
    batches = max(1, cheats // (BATCH * len(FAMILIES)))
    return [
        Attack(KIND, f"{family}, {BATCH} cheats, draw {batch}", attempt_of(family, seed * batches + batch), beside)
        for family in FAMILIES
        for batch in range(batches)
    ]
