"""The sandbox: escape tests, forged verdicts, HumanEval's own solutions, the time of a job, leftovers of jobs.

    python -m benchmarks.sandbox
    python -m benchmarks.sandbox --trial

Every escape test runs with bubblewrap and with Landlock alone; as root, if this process is root, and as another user. A
cheat is a program that passes if tests run in its process (that is tested too, in the sandbox) and must not pass here.
`value` is the median time of a job in milliseconds, with the isolation of `--sandbox auto`. `ok` requires all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from ascent.sandbox.escape_tests import ESCAPE_TESTS, run_escape_tests
from ascent.sandbox.isolation import IsolationError, choose_isolation
from ascent.sandbox.program_judge import CodeProblem, ProgramJudge
from ascent.sandbox.sandbox import JobEndedError, Sandbox, SandboxLimits
from ascent.tasks.text.code_problems import read_humaneval
from benchmarks.common import ROOT, close, show

KINDS = ("bubblewrap", "landlock")
NOBODY = 65534
MILLISECONDS = 6.0
SESSION = "ascent.sandbox.python_session:serve_session"
PATIENT = SandboxLimits(seconds=60.0)
TESTS = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n"
SAYS = "V{\"passed\": 2, \"total\": 2, \"why\": \"\"}"  # fmt: skip
WRITES = "    for n in range(3, 64):\n        try: os.write(n, {words!r})\n        except OSError: pass\n"
CHEATS = {
    "os._exit(0)": "import os\ndef f(x): os._exit(0)",
    "__eq__": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "__eq__ of a number": "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "frame walking": "import sys\ndef f(x):\n    frame = sys._getframe(1)\n    frame.f_globals['check'] = print\n"
    "    while frame:\n        for value in frame.f_locals.values():\n"
    "            if hasattr(value, 'passed'): value.passed()\n        frame = frame.f_back\n    sys.exit(0)",
    "patched builtins": "import builtins, json\nbuiltins.AssertionError = type('E', (Exception,), {})\n"
    "json.dumps = lambda *a, **k: '{\"is\": 4}'\nclass A:\n    __eq__ = lambda *a: True\ndef f(x): return A()",
    "a printed verdict": f"import os\ndef f(x): print({SAYS!r}, flush=True); os._exit(0)",
    "a verdict on the line": "import os\ndef f(x):\n" + WRITES.format(words=f"{SAYS}\n".encode()) + "    os._exit(0)",
    "an answer before the question": "import os\nif 1:\n"
    + WRITES.format(words=b'{"loaded": true}\n{"is": 4}\n')
    + "def f(x): os._exit(0)",
    "exit in an import": "import sys\nsys.exit(0)\ndef f(x): return 0",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "an object of objects": "class L(list):\n    def __eq__(self, other): return True\nclass A:\n"
    "    def __getattr__(self, name): return L()\n    def __eq__(self, other): return True\ndef f(x): return A()",
}
"""Programs that pass by some check that trusts them."""


def escape_tests_as(user: int | None, kind: str) -> dict[str, Any] | None:
    """Run the escape tests as this user, or as another one in a new process. None: that is not possible here."""
    if user is None:
        description, results = run_escape_tests(kind)
        return {
            "isolation": description,
            "results": [[r.test.kind, r.test.name, r.is_contained, r.how] for r in results],
        }
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        package = Path(folder, "ascent")  # a copy that the user can read, of modules that need no other package
        for name in ("sandbox", "processes"):
            shutil.copytree(ROOT / "ascent" / name, package / name)
        shutil.copy(ROOT / "ascent" / "__init__.py", package)
        code = (
            f"import json, sys; sys.path.insert(0, {folder!r}); "
            "from ascent.sandbox.escape_tests import run_escape_tests; "
            f"w, rs = run_escape_tests({kind!r}); "
            "rows = [[r.test.kind, r.test.name, r.is_contained, r.how] for r in rs]; "
            "print(json.dumps({'isolation': w, 'results': rows}))"
        )  # fmt: skip
        for python in dict.fromkeys((os.path.realpath(sys.executable), "/usr/bin/python3")):
            try:
                done = subprocess.run(
                    [python, "-P", "-B", "-c", code], user=user, group=user, extra_groups=[],
                    env={"PATH": "/usr/bin:/bin"}, cwd="/", capture_output=True, text=True, check=False, timeout=600,
                )  # fmt: skip
            except OSError:
                continue
            if done.returncode == 0:
                return json.loads(done.stdout)
            print(done.stderr[-2000:], file=sys.stderr)
    return None


def run_all_escape_tests(kinds: list[str]) -> tuple[int, int, list[str]]:
    """Return the number of escape tests, how many were contained, and what could not be run."""
    users: list[tuple[str, int | None]] = (
        [("root", None), ("nobody", NOBODY)] if os.getuid() == 0 else [("a user", None)]
    )
    rows, tried, held, missing = [], 0, 0, []
    for kind in kinds:
        for name, user in users:
            found = escape_tests_as(user, kind)
            if found is None:
                missing.append(f"{kind} as {name}")
                continue
            good = Counter(kind for kind, _, held, _ in found["results"] if held)
            every = Counter(kind for kind, *_ in found["results"])
            rows.append([found["isolation"], name, *(f"{good[kind]}/{every[kind]}" for kind in every)])
            tried, held = tried + sum(every.values()), held + sum(good.values())
            for _, test, ok, how in found["results"]:
                if not ok:
                    print(f"GOT OUT: {kind} as {name}: {test}: {how}")
    show(["isolation", "as", *dict.fromkeys(each.kind for each in ESCAPE_TESTS)], rows)
    return tried, held, missing


def passes_beside(sandbox: Sandbox, program: str) -> bool:
    """Does it pass where tests run beside it, by the exit status or by what is raised?"""
    try:
        with sandbox.job() as job:
            answer = job.ask({"code": f"{program}\n{TESTS}\ncheck(f)\n"})
            return not (isinstance(answer, dict) and "Error" in str(answer.get("text")))
    except JobEndedError as ended:
        return "exit status 0" in str(ended)


def try_cheats(kind: str) -> tuple[int, int]:
    """How many cheats were held, and how many of them are real."""
    held = real = 0
    with Sandbox(SESSION, PATIENT, kind=kind) as sandbox, closing(ProgramJudge(PATIENT, kind)) as judge:
        assert judge(CodeProblem("f", (TESTS,)), ["def f(x): return 2 * x"]).right
        for name, program in CHEATS.items():
            verdict, naive = judge(CodeProblem("f", (TESTS,)), [program]), passes_beside(sandbox, program)
            held, real = held + (not verdict.right), real + naive
            print(f"cheat {name}: {'PASSED' if verdict.right else 'held'} ({verdict.why or 'passes'}); beside: {naive}")
    return held, real


def solve_humaneval(kind: str, every: int) -> tuple[int, int, int]:
    """Of HumanEval's own solutions those that pass, how many there are, and how many pass that do nothing or exit."""
    rows = [row for _, row in read_humaneval()][::every]
    right = wrong = 0
    with closing(ProgramJudge(PATIENT, kind)) as judge:
        for row in rows:
            problem = CodeProblem(row["entry_point"], (row["test"],), (row["prompt"],))
            verdict = judge(problem, [row["prompt"] + row["canonical_solution"]])
            right += verdict.right
            if not verdict.right:
                print(f"{row['task_id']}: {verdict.why}")
            for body in ("    return None\n", "    import os; os._exit(0)\n"):
                wrong += judge(problem, [row["prompt"] + body]).right
    return right, len(rows), wrong


def time_jobs(kind: str, jobs: int) -> tuple[float, int]:
    """The median time of a job in milliseconds, and how many processes, files and descriptors all of them left."""
    times = []
    with tempfile.TemporaryDirectory() as folder, Sandbox(SESSION, PATIENT, kind=kind) as sandbox:
        sandbox.start()
        before = _left(folder)
        for number in range(jobs):
            began = time.perf_counter()
            with sandbox.job() as job:
                job.ask({"code": f"x = {number}\nx + 1"})
            times.append(1000 * (time.perf_counter() - began))
        return median(times), sum(abs(a - b) for a, b in zip(_left(folder), before, strict=True))


def _left(folder: str) -> tuple[int, int, int]:
    """Processes that this one has started, files that it holds, and files of the temporary folder."""
    parents = [
        path.read_text().rpartition(")")[2].split()[1] for path in Path("/proc").glob("[0-9]*/stat") if path.exists()
    ]
    mine = sum(parent == str(os.getpid()) for parent in parents)
    return mine, len(os.listdir("/proc/self/fd")), len(os.listdir(folder))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", action="store_true", help="a twentieth of HumanEval, 50 jobs, one kind of isolation")
    trial = parser.parse_args(argv).trial
    kinds, absent = [], []
    for kind in KINDS:
        try:
            choose_isolation(kind)
            kinds.append(kind)
        except IsolationError as error:
            absent.append(f"{kind}: {error}")
    kinds = kinds[:1] if trial else kinds
    tried, held, missing = run_all_escape_tests(kinds)
    results: dict[str, Any] = {"escape_tests": tried, "contained": held, "not_tried": [*absent, *missing]}
    ok = held == tried and not missing and (trial or not absent)
    for kind in kinds:
        cheats, real = try_cheats(kind)
        right, total, wrong = solve_humaneval(kind, 20 if trial else 1)
        milliseconds, left = time_jobs(kind, 50 if trial else 1000)
        ok = ok and cheats == len(CHEATS) and real >= 6 and right == total and not wrong and not left
        results[kind] = {
            "cheats_held": f"{cheats} of {len(CHEATS)}",
            "cheats_real": real,
            "humaneval": f"{right} of {total}",
            "wrong_programs_passed": wrong,
            "milliseconds": round(milliseconds, 2),
            "left_behind": left,
        }
        print(f"{kind}: {results[kind]}", flush=True)
    value = results[kinds[0]]["milliseconds"] if kinds else None
    ok = ok and value is not None and (trial or value <= MILLISECONDS)
    return close("sandbox", value, None, MILLISECONDS, ok, load=round(os.getloadavg()[0], 1), **results)[1]


if __name__ == "__main__":
    sys.exit(main())
