"""Try a mutant: apply it in a copy of the tree, and run the tests that are most likely to notice first."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.mutants.calls import Calls, spread
from benchmarks.mutants.excluded import TRITON, TRITON_FILES
from benchmarks.mutants.operators import Mutant

STYLE = ("test_structure.py", "test_conventions.py", "test_texts.py")
"""Tests that read the source as text: they would notice how a mutant is written, and not what it does."""
KERNEL_TESTS = ("tests/ops/test_triton_kernels.py", "tests/inference/test_cuda_graph_runner.py")
FIRST_SECONDS, FIRST_TESTS = 20.0, 40
"""What the first tests of a mutant may take by themselves, and how many there are."""
START, SLOWER = 180.0, 6.0
"""A run of tests ends after this many seconds, and this many times those that it takes without a mutant."""
WHOLE_SECONDS = 5400.0
"""The same for the whole suite."""


def copy_tree(root: Path, to: Path) -> None:
    """The files that git knows or would know, in another folder."""
    names = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, check=True, capture_output=True, text=True
    )
    for name in filter(None, names.stdout.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    if (root / TRITON).exists():
        (to / ".engines").mkdir(exist_ok=True)
        (to / TRITON).parent.symlink_to((root / TRITON).parent.resolve())


@dataclass
class Outcome:
    """A run of tests: its exit status (None: it was ended at its limit), the first test that failed, its last lines."""

    status: int | None
    failed: str
    text: str
    seconds: float


def run_tests(tree: Path, tests: Sequence[str], limit: float, *flags: str, **variables: str) -> Outcome:
    """Run these tests until one fails. The processes that are left at the limit are ended."""
    scratch = tree.parent / f"{tree.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--basetemp", f"{scratch}/t"]
    path = os.pathsep.join([str(tree), *filter(None, [variables.pop("PYTHONPATH", "")])])
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, *flags, *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "", **variables},
        stdin=subprocess.DEVNULL,
        stdout=(out := (scratch / "out").open("wb")),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        out.close()
        _end(process)
    text = (scratch / "out").read_text(errors="replace")
    found = re.search(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - |$)", text, re.MULTILINE)
    return Outcome(status, found[1] if found else "", text[-3000:], time.monotonic() - began)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what runs in the session of these tests."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@dataclass
class Verdict:
    """What became of a mutant: `caught` by a test, by a `timeout`, or not (`survived`)."""

    status: str
    test: str = ""
    seconds: float = 0.0
    stages: list[str] = field(default_factory=list)


class Trials:
    """Copies of the tree, one for each mutant that is tried at once and one without a mutant."""

    def __init__(self, root: Path, calls: Calls, jobs: int, tests: Sequence[str] = (), whole: bool = True):
        """`tests`: run these and no others; `whole`: run the whole suite where the tests that call it all pass."""
        self.root, self.calls, self.tests, self.whole = root, calls, tuple(tests), whole
        self.folder = Path(tempfile.mkdtemp(prefix="mutants"))
        self.free = [self.folder / str(i) for i in range(jobs)]
        self.plain = self.folder / "plain"
        for tree in (*self.free, self.plain):
            copy_tree(root, tree)
        self.lock, self.suite, self.control = threading.Lock(), threading.Lock(), threading.Lock()
        self.sound: dict[str, bool] = {}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def try_mutant(self, mutant: Mutant) -> Verdict:
        with self.lock:
            tree = self.free.pop()
        path, began = tree / mutant.path, time.monotonic()
        source = path.read_text()
        try:
            _write(path, mutant.apply(source))
            verdict = self._stages(tree, mutant)
        finally:
            _write(path, source)
            with self.lock:
                self.free.append(tree)
        verdict.seconds = round(time.monotonic() - began, 1)
        return verdict

    def _stages(self, tree: Path, mutant: Mutant) -> Verdict:
        verdict = Verdict("survived")
        for name, tests, limit, flags, variables in self._plan(mutant):
            verdict.stages.append(name)
            with self.suite if name == "whole suite" else threading.Lock():
                outcome = run_tests(tree, tests, limit, *flags, **variables)
            if outcome.status is None:
                verdict.status, verdict.test = "timeout", f"{len(tests)} tests, {limit:.0f} s"
                return verdict
            if outcome.status not in (0, 5) and self._is_sound(outcome, tests, variables):
                verdict.status, verdict.test = "caught", outcome.failed or outcome.text.strip().splitlines()[-1][:200]
                return verdict
        return verdict

    def _plan(self, mutant: Mutant) -> Iterable[tuple[str, list[str], float, list[str], dict[str, str]]]:
        """Stages: a name, tests, seconds, flags and variables."""
        if self.tests:
            yield "named tests", list(self.tests), START * 5, [], {}
            return
        if mutant.path in TRITON_FILES:
            variables = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TRITON.parent.absolute())}
            yield "kernels", list(KERNEL_TESTS), START * 10, ["-m", "not smoke"], variables
        callers = [test for test in self.calls.callers(mutant.path, mutant.function) if self._exists(test)]
        first = self.calls.some(list(spread(callers)), FIRST_SECONDS, FIRST_TESTS) if callers else []
        chosen = set(first)
        for name, tests in (("first callers", first), ("all callers", [t for t in callers if t not in chosen])):
            if tests:
                yield name, _short(tests), START + SLOWER * sum(self.calls.seconds[t] for t in tests), [], {}
        # Other processes may call it where nothing is recorded: ranks, rewards, the sandbox.
        if named := self._by_name(mutant):
            yield "tests that name it", named, START * 10, [], {}
        elif near := [file for file in self.calls.near(mutant.path) if self._exists(file)]:
            yield "tests of its folder", near, START * 10, ["-m", "not smoke"], {}
        if self.whole:
            ignored = [f"--ignore-glob=*/{name}" for name in STYLE]
            yield "whole suite", ["tests"], WHOLE_SECONDS, ["-n", "2", "-m", "not smoke", *ignored], {}

    def _exists(self, test: str) -> bool:
        file = test.partition("::")[0]
        return Path(file).name not in STYLE and (self.root / file).exists()

    def _by_name(self, mutant: Mutant) -> list[str]:
        """Files of tests that import the module, those that name the function first."""
        module, name = mutant.path.removesuffix(".py").replace("/", "."), mutant.function.rpartition(".")[2]
        parent, _, last = module.rpartition(".")
        scores = {}
        for path in (self.root / "tests").rglob("test_*.py"):
            text = path.read_text()
            used = module in text or re.search(rf"from {re.escape(parent)} import .*\b{last}\b", text) is not None
            scores[str(path.relative_to(self.root))] = 2 * used + (1 if name and re.search(rf"\b{name}\b", text) else 0)
        best = sorted((file for file, score in scores.items() if score), key=lambda file: (-scores[file], file))
        return [file for file in best if Path(file).name not in STYLE][:8]

    def _is_sound(self, outcome: Outcome, tests: Sequence[str], variables: dict[str, str]) -> bool:
        """Does what failed pass without the mutant? Else it has noticed nothing."""
        again = [outcome.failed] if outcome.failed else list(tests)
        key = "\n".join(again)
        with self.control:
            if key not in self.sound:
                self.sound[key] = run_tests(self.plain, again, START * 10, **variables).status == 0
            return self.sound[key]


def _short(tests: list[str]) -> list[str]:
    """Names of tests as arguments; many of them become their files."""
    return tests if len(tests) <= 1500 else list(dict.fromkeys(test.partition("::")[0] for test in tests))


def _write(path: Path, source: str) -> None:
    """Write a module; its bytecode is of another source, though its size and second may be the same."""
    path.write_text(source)
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        stale.unlink()


def record_calls(root: Path, to: Path, flags: Sequence[str]) -> Outcome:
    """Run the tests once without a mutant, and write which functions each of them calls."""
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Path(folder) / "plain"
        copy_tree(root, tree)
        raw = Path(folder) / "calls"
        variables = {
            "ASCENT_MUTANTS_CALLS": f"{raw}{os.pathsep}{tree}",
            "PYTHONPATH": str(Path(__file__).parent / "startup"),
        }
        command = ["-p", "record_calls", "--maxfail=1000000", *flags]
        outcome = run_tests(tree, [], WHOLE_SECONDS * 2, *command, **variables)
        if raw.exists():
            shutil.copyfile(raw, to)
        return outcome
