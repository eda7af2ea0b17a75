# ruff: noqa: E501 (a program is one line, so that it can be named)
"""Programs and their tests: verdicts are made outside of the program, whatever it does."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ascent
from ascent.core.errors import ConfigError
from ascent.rewards import reward_manager as grading
from ascent.rewards.reward_manager import RewardManager, count_cores, self_test
from ascent.sandbox import sandboxed_reward
from ascent.sandbox.plain_values import MAX_DEPTH, MAX_ITEMS, NotPlainDataError, decode, encode
from ascent.sandbox.program_judge import BrokenTestsError, CodeProblem, ProgramJudge, Verdict, _Relay
from ascent.sandbox.sandbox import SandboxLimits
from ascent.settings import configure
from ascent.tasks.text.code_problems import Code, in_form, parses, programs_of, read_humaneval
from benchmarks.sandbox import CHEATS
from benchmarks.sandbox import TESTS as CHECK
from tests.sandboxes import KINDS, need_isolation

LONG = SandboxLimits(seconds=60.0)
Color = IntEnum("Color", "RED GREEN")
Point = namedtuple("Point", "x y")


@pytest.fixture(scope="module")
def judge() -> Iterator[ProgramJudge]:
    with closing(ProgramJudge(LONG)) as made:
        made.start()
        yield made


def verdict(judge: ProgramJudge, program: str, tests: str, *prelude: str, entry: str = "f") -> Verdict:
    return judge(CodeProblem(entry, (tests,), prelude), [program])


# ---- values ---------------------------------------------------------------------------------------------------

PLAIN = [
    None, True, 7, -1.5, "words \ud800", b"\x00\xff", [1, [2]], (1, (2,)), {1, 2}, frozenset({3}), {1: "a", (2, 3): None},
    2**20_000, math.inf, -math.inf, 1 + 2j, range(3), bytearray(b"x"), Decimal("1.10"), Fraction(1, 3), deque([1], 3),
    Counter("aab"), OrderedDict(b=1, a=2), datetime(2026, 1, 2, 3, 4, 5, 6), timedelta(1, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value and type(back) is type(value)


def test_nan_is_nan_and_what_derives_from_data_is_that_data() -> None:
    assert math.isnan(decode(encode(math.nan)))
    pairs: list[tuple[Any, Any]] = [(Color.RED, 1), (Point(1, 2), (1, 2)), (defaultdict(int, a=1), {"a": 1})]
    pairs += [(np.float64(2.5), 2.5), (np.int64(3), 3), (np.bool_(True), True)]
    for value, plain in pairs:
        back = decode(encode(value))
        assert back == plain and type(back) is type(plain)
    assert np.array_equal(decode(encode(np.eye(2))), np.eye(2))


@settings(max_examples=30, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda s: st.lists(s) | st.tuples(s, s)))
def test_any_nested_data_comes_back(value: Any) -> None:
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_a_class_that_says_it_equals_everything_loses_its_say() -> None:
    class Same(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __add__(self, other: int) -> int:
            return 42

        __hash__ = int.__hash__

    assert decode(encode(Same(1))) == 1 and type(decode(encode(Same(1)))) is int


def test_what_is_no_data_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    for value in (deep, loop, object(), len):
        with pytest.raises(NotPlainDataError):
            encode(value)
    for tagged in ({"~": "zz"}, {"~": "s", "v": [[]]}, {"~": "c", "c": "Popen", "v": []}, {"~": "i", "v": "x"}, {}):
        with pytest.raises(NotPlainDataError):
            decode(tagged)


# ---- verdicts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_passes(judge: ProgramJudge, name: str) -> None:
    assert not verdict(judge, CHEATS[name], CHECK).right


YES = "class A:\n    def __getattr__(s, n): return lambda *a, **k: True\n    def __contains__(s, x): return True\n"
YES += "    def __bool__(s): return True\n    def __len__(s): return 3\n    def __str__(s): return 'abc'\ndef f(): return A()"


@pytest.mark.parametrize("test", ["'a' in f()", "f().startswith('a')", "len(f()) == 3", "str(f()) == 'abc'", "f()"])
def test_an_object_that_says_yes_to_everything_is_refused(judge: ProgramJudge, test: str) -> None:
    found = verdict(judge, YES, f"assert {test}")
    assert not found.right and "it has a A, which is not plain data" in found.why


def test_a_dead_program_is_no_exception_that_a_test_expects(judge: ProgramJudge) -> None:
    tests = "try:\n    f(-1)\n    assert False\nexcept Exception:\n    pass\nassert True == True"
    assert verdict(judge, "def f(x): raise ValueError", tests).right
    dead = verdict(judge, "import os\ndef f(x): os._exit(0)", tests)
    assert not dead.right and "exit status 0" in dead.why


SHAPES = {
    "assertions": "assert f(2) == 4\nassert f(3) == 6",
    "check": CHECK,
    "check that is called": CHECK + "check(f)",
    "functions": "def test_two():\n    assert f(2) == 4\ndef test_three():\n    assert f(3) == 6",
    "functions with the candidate": "def test_two(candidate):\n    assert candidate(2) == 4\ndef test_b():\n    assert f(3) == 6",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(2), 4)\n"
    "    def test_b(self):\n        with self.assertRaises(TypeError): f()",
    "a loop": "import random\nfor _ in range(20):\n    x = random.randrange(99)\n    assert f(x) == 2 * x\nassert f(3) == 6",
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_tests_of_any_shape(judge: ProgramJudge, shape: str) -> None:
    assert verdict(judge, "def f(x): return 2 * x", SHAPES[shape]) == Verdict(2, 2, "")
    wrong = verdict(judge, "def f(x): return 5 if x == 3 else x", SHAPES[shape])
    assert not wrong.right and wrong.total == 2 and wrong.why


def test_one_test_that_fails_does_not_hide_the_others(judge: ProgramJudge) -> None:
    tests = "def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(2) == 0\n    assert candidate(3) == 3\n    assert True"
    found = verdict(judge, "def f(x): return x", tests)
    assert (found.passed, found.total) == (2, 3) and found.share == pytest.approx(2 / 3)
    assert found.why == "assert candidate(2) == 0 fails"


WORKS = {
    "in place": ("def f(x): x.append(1); x[0][0] = 9", "a = [[0]]\nf(a)\nassert a == [[9], 1]"),
    "emptied": ("def f(x): x.clear()", "a = {1: 2}\nf(a)\nassert a == {}"),
    "tuples, sets and integer keys": ("def f(): return (1, {2}, {3: 4})", "assert f() == (1, {2}, {3: 4})"),
    "a generator": ("def f(n):\n    i = 0\n    while True:\n        yield i; i += 1", "g = f(3)\nassert [next(g), next(g)] == [0, 1]"),
    "a generator to its end": ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "a function as an argument": ("def f(g, x): return g(g(x))", "assert f(lambda v: v + 1, 1) == 3"),
    "a builtin as an argument": ("def f(g, x): return list(map(g, x))", "assert f(len, ['a', 'bc']) == [1, 2]"),
    "a function as a result": ("def f(n): return lambda x: x + n", "assert f(2)(3) == 5"),
    "an iterator as an argument": ("def f(xs): return sum(xs)", "assert f(iter([1, 2])) == 3"),
    "an error by its class": ("def f(): return {}['a']", "try:\n    f()\n    assert False\nexcept KeyError as e:\n    assert e.args == ('a',)"),
    "an error class of its own": ("class E(ValueError): pass\ndef f(): raise E('no')", "try:\n    f()\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'no'"),
    "an end of file": ("def f(x): return input() if x else 3", "try:\n    f(1)\n    assert False\nexcept EOFError:\n    pass\nassert f(0) == 3"),
    "nan": ("def f(): return float('nan')", "assert f() != f()"),
    "large numbers": ("def f(): return 7 ** 9999", "assert f() == 7 ** 9999"),
    "half surrogates": ("def f(): return '\\ud800'", "assert f() == '\\ud800'"),
    "keyword arguments": ("def f(a, *, b=1): return a - b", "assert f(3, b=2) == 1"),
    "numpy": ("import numpy\ndef f(n): return numpy.arange(n)", "import numpy as np\nassert np.allclose(f(3), [0, 1, 2])"),
    "words that are printed": ("print('x' * 10**7)\ndef f(): print('y' * 10**7); return 1", "assert f() == 1"),
    "recursion": ("def f(n): return n and 1 + f(n - 1)", "assert f(800) == 800\ntry: f(10**6); assert False\nexcept RecursionError: pass"),
    "threads": ("import threading\ndef f():\n    r = []\n    t = threading.Thread(target=r.append, args=(1,)); t.start(); t.join()\n    return r", "assert f() == [1]"),
    "asyncio": ("import asyncio\nasync def g(): return 2\ndef f(): return asyncio.run(g())", "assert f() == 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_values_of_any_kind_go_between_the_two(judge: ProgramJudge, name: str) -> None:
    program, tests = WORKS[name]
    assert verdict(judge, program, tests).why == ""


def test_a_class_as_the_entry_point(judge: ProgramJudge) -> None:
    program = (
        "class S:\n    def __init__(self, *v): self.v = list(v)\n    def push(self, x): self.v.append(x); return self\n"
        "    def pop(self): return self.v.pop()\n    def __len__(self): return len(self.v)\n"
        "    def __eq__(self, o): return self.v == o.v\n    def __add__(self, o): return S(*self.v, *o.v)\n"
        "    def __contains__(self, x): return x in self.v\n    def __iter__(self): return iter(self.v)"
    )
    tests = (
        "s = S(1)\ns.push(2)\nassert len(s) == 2 and s.pop() == 2\nassert s == S(1) and s != S(2)\n"
        "assert isinstance(s, S) and 1 in s and list(s + S(5)) == [1, 5] and s.v == [1]\n"
        "try:\n    S().pop()\n    assert False\nexcept IndexError:\n    pass"
    )
    assert verdict(judge, program, tests, entry="S") == Verdict(4, 4, "")
    same = "class S:\n    def __init__(s, *v): pass\n    def push(s, x): return s\n    def pop(s): return S()\n"
    same += "    def __eq__(s, o): return True\n    def __len__(s): return 2\n"
    assert not verdict(judge, same, "s = S(1)\nassert s.pop() == 2", entry="S").right


def test_helpers_and_classes_of_the_problem_are_there_for_both(judge: ProgramJudge) -> None:
    prelude = "class Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\ndef twice(x):\n    return 2 * x\n"
    prelude += 'def f(node):\n    """Doubles."""\n'
    tests = (
        "node = f(Node(1, Node(2)))\nassert type(node) is Node and (node.v, node.n.v) == (2, 4) == (twice(1), twice(2))"
    )
    good = "def f(node): return node and Node(twice(node.v), f(node.n))"
    assert verdict(judge, good, tests, prelude).why == ""
    cheat = good + "\ndef twice(x): return 0"  # the tests have a helper of their own
    assert not verdict(judge, cheat, tests, prelude).right


def test_a_program_that_takes_too_long_fails_what_is_left(judge: ProgramJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = ProgramJudge(SandboxLimits(seconds=0.1))
    hasty.programs, hasty.tests = judge.programs, judge.tests
    assert verdict(hasty, "while True: pass", "assert f(0) == 0").why == "the program took longer than 60 s"
    wait = _Relay._wait

    def impatient(self: _Relay) -> bool:
        """The time is up when the first test has passed, however fast this machine is."""
        self.until = 0.0 if self.report.get("passed") else self.until
        return wait(self)

    monkeypatch.setattr(_Relay, "_wait", impatient)
    found = verdict(judge, "def f(x):\n    while x: pass\n    return 0", "assert f(0) == 0\nassert f(1) == 0")
    assert (found.passed, found.total) == (1, 2) and "took longer" in found.why


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("def f(", "SyntaxError"),
        ("x = 1", "it does not define f"),
        ("f = 3", "it does not define f"),
        ("1 / 0\ndef f(x): pass", "ZeroDivisionError"),
        ("", "it does not define f"),
        ("f = lambda x: x\n" + "(" * 1000 + ")" * 1000, "SyntaxError|MemoryError|RecursionError"),
        ("\0", "SyntaxError|ValueError"),
        ("def f(x): return [x] * 10**6", "at most 500,000 are read"),
        ("def f(x): return [[x] * 400_000] * 3", "sent more than"),
        ("def f(x):\n    y = []\n    for _ in range(999): y = [y]\n    return y", "nested deeper"),
        ("import os\ndef f(x): os.closerange(0, 99)", "ended its process"),
        ("def f(x): os = __import__('os'); os.fork(); os._exit(0)", "PermissionError"),
        ("class E(Exception):\n    def __str__(s): raise s\n    __repr__ = __str__\ndef f(x): raise E", "RuntimeError|Exception"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_program_is_said(judge: ProgramJudge, program: str, why: str) -> None:
    found = verdict(judge, program, "assert f(2) == 4")
    assert not found.right and any(part in found.why for part in why.split("|")), found.why


def test_tests_that_do_not_run_are_no_programs_fault(judge: ProgramJudge) -> None:
    with pytest.raises(BrokenTestsError, match="SyntaxError"):
        verdict(judge, "def f(x): return x", "assert f(")
    for program in ("def f(x): return x", "def f("):
        with pytest.raises(BrokenTestsError, match="NameError"):
            verdict(judge, program, "assert f(1) == 1", "import math\nno_such_name")
    with pytest.raises(BrokenTestsError, match="ModuleNotFoundError"):
        verdict(judge, "def f(x): return x", "import no_such_module\nassert f(1) == 1")


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_humanevals_own_solutions_pass_and_wrong_ones_do_not(kind: str) -> None:
    """Every tenth; the benchmark takes all 164."""
    rows = [row for _, row in read_humaneval()]
    assert len(rows) == 164
    with closing(ProgramJudge(LONG, need_isolation(kind))) as judge:
        for row in rows[2::10]:
            problem = CodeProblem(row["entry_point"], (row["test"],), (row["prompt"],))
            assert judge(problem, [row["prompt"] + row["canonical_solution"]]).why == "", row["task_id"]
            assert not judge(problem, [row["prompt"] + "    return None\n"]).right
            agrees = "__init__ = lambda *a: None; __eq__ = __lt__ = lambda *a: True; __sub__ = __add__ = lambda *a: 0"
            assert not judge(problem, [f"class {row['entry_point']}:\n    {agrees}"]).passed, row["task_id"]


# ---- the task -------------------------------------------------------------------------------------------------

ROWS = [
    {"prompt": 'def add(a, b):\n    """The sum."""\n', "entry_point": "add", "solution": "    return a + b\n",
     "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]},
    {"prompt": "Write a function that doubles.", "entry_point": "double", "tests": "assert double(2) == 4",
     "solution": "def double(x):\n    return 2 * x\n"},
]  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_programs_are_found_in_responses() -> None:
    block = "Sure:\n```python\ndef f(): pass\n```\nand\n```\nf()\n```"
    assert programs_of(block, "")[:2] == ["def f(): pass\n", "f()\n"]
    assert programs_of("    return 1", "def f():\n") == ["    return 1", "def f():\n    return 1\n"]
    assert parses("reverse") and not parses("reverse", with_names=True) and parses("def f(): ...", with_names=True)
    assert in_form(block, "f") and not in_form("def f(): pass", "f") and not in_form("```python\ndef f(): pass", "f")


@pytest.mark.long
def test_responses_are_graded_by_their_programs(file: Path) -> None:
    task = Code(source=str(file), reward_workers=1, partial=True, code_seconds=60.0, reward_seconds=120.0)
    (sums,) = [problem for problem in (task.train(0), *task.test(1)) if "add" in problem.prompt]
    cases = {
        "```python\ndef add(a, b):\n    return a + b\n```": (1.0, True),
        "def add(a, b):\n    return a + b": (0.5, True),
        "    return a + b": (0.5, True),
        "```python\ndef add(a, b):\n    return 3\n```": (0.5, False),
        "```python\ndef add(a, b):\n    exit(0)\n```": (0.0, False),
        "I do not know. \ud800 ```": (0.0, False),
    }
    with closing(RewardManager(task)) as grading:
        marks = grading([(sums, response) for response in cases])
    assert [(mark.value, mark.lenient, mark.error) for mark in marks] == [(*case, None) for case in cases.values()]
    assert marks[3].reason == "1 of 2 tests pass; assert add(-1, 1) == 0 fails"


@pytest.mark.long
def test_the_pre_flight_tries_solutions_and_wrong_programs(file: Path) -> None:
    task = Code(source=str(file), reward_workers=1, code_seconds=60.0, reward_seconds=120.0)
    task.verify()
    found = self_test(task)
    assert found.ok and found.gold_passed == found.gold == 1 and found.corrupted >= 3


@pytest.mark.smoke
def test_a_run_of_programs_resumes_to_the_same_bits(file: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Its sandboxes are others, and so are their processes."""
    given = {"steps": 4, "prompts": 2, "samples": 3, "max_tokens": 8, "checkpoint_every": 2, "keep": 9, "threads": 1}
    given |= {"model": str(tiny_folder), "eval_prompts": 1, "eval_every": 4, "record_rollouts": "all"}
    run = ascent.train(f"code:{file}", out=tmp_path / "run", show=False, **given)
    lines, kept = numbers(run), (run.checkpoints[-1] / "params.safetensors").read_bytes()
    assert all("tests pass" in row["reason"] for row in run.rollouts(3))
    again = ascent.resume(run, from_step=2)
    assert numbers(again) == lines and (again.checkpoints[-1] / "params.safetensors").read_bytes() == kept


def numbers(run: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in run.metrics]


def test_humaneval_is_a_task_with_held_out_problems() -> None:
    task = Code(source="humaneval")
    assert task.size is not None and task.size + len(task.test(200)) == 164 and len(task.test(200)) >= 10
    assert task.train(0).prompt.startswith("Complete this Python code.\n```python\n")


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "x", "entry_point": "f"}, "no column tests"),
        ({"prompt": "x", "entry_point": "f g", "tests": "assert 1"}, "name of a function"),
        ({"prompt": "x", "entry_point": "f", "tests": "assert ("}, "is not Python"),
        ({"prompt": "x", "entry_point": "f", "tests": [3]}, "a list of pieces"),
        ({"prompt": "", "entry_point": "f", "tests": "assert 1"}, "column prompt"),
        ({"prompt": "x", "entry_point": "f", "tests": "assert 1", "solution": 3}, "column solution"),
    ],
)
def test_rows_that_cannot_be_judged_are_refused(tmp_path: Path, row: dict[str, Any], what: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=what):
        _ = Code(source=str(path)).table


def test_without_isolation_the_task_is_refused_unless_none_is_asked_for(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(kind: str) -> Any:
        if kind == "none":
            return None
        raise sandboxed_reward.IsolationError("bubblewrap: not installed")

    monkeypatch.setattr(sandboxed_reward, "choose_isolation", nothing)
    with pytest.raises(ConfigError, match="--sandbox none"):
        Code(source=str(file)).verify()
    Code(source=str(file), sandbox="none").verify()
    config = configure(f"code:{file}", {"sandbox": "none", "model": "nowhere"})
    assert config.to_dict()["task"]["sandbox"] == "none"


def test_settings_of_a_program_are_checked(file: Path) -> None:
    with pytest.raises(ConfigError, match="--code-seconds"):
        Code(source=str(file), code_seconds=60.0)
    with pytest.raises(ConfigError, match="--sandbox-read"):
        Code(source=str(file), sandbox_read=("no such file",)).verify()


# ---- rewards in the sandbox -----------------------------------------------------------------------------------

REWARDS = """
import os
open("ran-outside", "w") if os.path.exists("/proc/self") else None

def score(response, answer):
    scope = {}
    exec(response, scope)
    return float(scope.get("x", 0)), f"answer {answer}"

async def later(response):
    return len(response)
"""


@pytest.mark.long
def test_a_reward_in_the_sandbox_is_run_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    reward = ["sandbox:rewards.py:score", "0.5*sandbox:rewards.py:later"]
    task = configure(
        f"jsonl:{rows}", {"reward": reward, "reward_workers": 1, "reward_seconds": 120.0, "model": "nowhere"}
    ).task
    task.verify()
    responses = ["x = 3", "import os; os._exit(0)", "x = open('/etc/hostname').read()", "x = float('inf')", "1 / 0"]
    with closing(RewardManager(task)) as grading:
        good, *bad = grading([(task.train(0), response) for response in responses])
    assert (
        good.value == 3 + 0.5 * len("x = 3") and "answer" in good.reason and good.parts == {"score": 3.0, "later": 5.0}
    )
    wanted = ("exit status 0", "No such file|Permission", "finite number", "division by zero")
    for mark, words in zip(bad, wanted, strict=True):
        assert mark.error is not None and any(part in mark.error for part in words.split("|")), mark.error
    assert not (tmp_path / "ran-outside").exists()


def test_a_reward_that_cannot_be_one_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def wrong(a): return 1\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    for name, why in (("rewards.py:wrong", "name its parameters"), ("rewards.py:gone", "gone"), ("no.py:f", "no file")):
        task = configure(f"jsonl:{rows}", {"reward": f"sandbox:{tmp_path}/{name}", "model": "nowhere"}).task
        with pytest.raises(ConfigError, match=why):
            task.verify()
    with pytest.raises(ConfigError, match="for responses in words"):
        configure("sort", {"reward": f"sandbox:{tmp_path}/rewards.py:wrong"}).task.verify()


def test_programs_are_judged_on_every_core_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "f", "entry_point": "f", "tests": "assert f()"}))
    task = Code(source=str(tmp_path / "rows.jsonl"))
    for cores, workers in ((1, 1), (8, 8), (100, 16)):
        monkeypatch.setattr(grading, "count_cores", lambda cores=cores: cores)
        with closing(RewardManager(task)) as made:
            assert made.workers == made.pool.num_workers == workers
    with closing(RewardManager(replace(task, reward_workers=3))) as made:
        assert made.workers == 3
    with pytest.raises(ConfigError, match="--reward-workers is -1"):
        replace(task, reward_workers=-1)
    assert count_cores() >= 1


# ---- values: limits of size and depth -------------------------------------------------------------------------


@pytest.mark.parametrize("make", [list, tuple, set, dict.fromkeys, lambda r: "x" * len(r), lambda r: b"x" * len(r)])
def test_a_value_of_too_many_items_is_refused(make: Any) -> None:
    encode(make(range(4)))
    with pytest.raises(NotPlainDataError, match=r"it has 500,001 items, and at most 500,000 are read"):
        encode(make(range(MAX_ITEMS + 1)))


def test_the_longest_text_and_the_deepest_value_are_read() -> None:
    assert decode(encode("x" * MAX_ITEMS)) == "x" * MAX_ITEMS
    deep: Any = 7
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert decode(encode(deep)) == deep
    with pytest.raises(NotPlainDataError, match="it is nested deeper than 150, or contains itself"):
        encode([deep])


def test_tagged_json_that_is_nested_too_deeply_is_refused() -> None:
    lists: Any = 7
    for _ in range(3 * MAX_DEPTH):
        lists = [lists]
    assert decode(lists) == lists
    for tagged in ([lists], {"~": "t", "v": [lists]}, {"~": "d", "v": [[1, lists]]}):
        with pytest.raises(NotPlainDataError, match=r"^it is nested deeper than 150$"):
            decode(tagged)


def test_what_is_not_data_goes_to_the_caller() -> None:
    assert encode([1, len], lambda value: {"~": "other", "v": value.__name__}) == [1, {"~": "other", "v": "len"}]
    assert decode([1, {"~": "other", "v": "len"}], lambda tagged: tagged["v"].upper()) == [1, "LEN"]
    with pytest.raises(NotPlainDataError, match="it sent what is not a value: a tag 'other'"):
        decode({"~": "other"})
