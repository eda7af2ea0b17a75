# ruff: noqa: E501 (a program is one line, so that it can be named)
"""A program does not decide its own verdict: cheats that are generated, and programs that are right beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from ascent.sandbox.program_judge import CodeProblem, ProgramJudge, Verdict
from ascent.sandbox.sandbox import SandboxLimits
from ascent.tasks.text.code_problems import Code
from benchmarks.attacks.cheats import FAMILIES, STYLES, generate_cheats
from tests.sandboxes import KINDS, need_isolation

AGREES = "    def __init__(self, *a, **k): pass\n    def __eq__(self, o): return True\n    def __lt__(self, o): return True\n"
AGREES += "    def __sub__(self, o): return 0\n    def __add__(self, o): return 0\n    __hash__ = lambda self: 0\n"
DRAWN = 8
"""Cheats of each family; `python -m benchmarks.attacks` draws 200."""


@pytest.fixture(scope="module")
def judge() -> Iterator[ProgramJudge]:
    with closing(ProgramJudge(SandboxLimits(seconds=60.0))) as made:
        made.start()
        yield made


def verdict(judge: ProgramJudge, program: str, tests: str, prelude: str = "", entry: str = "f") -> Verdict:
    return judge(CodeProblem(entry, (tests,), (prelude,)), [program])


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_right_programs_pass_and_wrong_ones_do_not(judge: ProgramJudge, style: object) -> None:
    for program in style.right:  # type: ignore[attr-defined]
        assert judge(style.problem, [program]).why == "", program  # type: ignore[attr-defined]
    for program in style.wrong:  # type: ignore[attr-defined]
        assert not judge(style.problem, [program]).right, program  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_no_generated_cheat_passes_a_test(judge: ProgramJudge, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cheat that iterates for ever has not passed either, and is not waited for."""
    monkeypatch.setattr(judge, "limits", SandboxLimits(seconds=2.0))
    for cheat in islice(generate_cheats(40, family), DRAWN):
        found = judge(cheat.style.problem, [cheat.program])
        assert not found.right and found.passed <= cheat.style.free, (cheat.style.name, cheat.program)


def test_a_class_in_place_of_a_function_is_no_answer(judge: ProgramJudge) -> None:
    tests = "assert add(1, 2) == 3\nassert abs(add(2, 2) - 4) < 1e-6\nassert add(1, 1) in [2] and add(0, 1) < 2"
    assert verdict(judge, "def add(a, b): return a + b", tests, entry="add").right
    found = verdict(judge, f"class add:\n{AGREES}", tests, entry="add")
    assert (found.passed, found.total) == (0, 3) and "which is not plain data" in found.why


@pytest.mark.parametrize("kind", KINDS)
def test_with_either_isolation_the_entry_point_comes_from_the_problem(kind: str) -> None:
    with closing(ProgramJudge(SandboxLimits(seconds=60.0), need_isolation(kind))) as made:
        assert verdict(made, f"class add:\n{AGREES}", "assert add(1, 2) == 3", entry="add").passed == 0


NODE = "class Node:\n    def __init__(self, v): self.v = v\n    def same(self, other): return self.v == other.v\n"


def test_an_attribute_hides_no_method_of_the_problems_class(judge: ProgramJudge) -> None:
    tests = "assert f(3).same(Node(3))\nassert f(9).same(Node(9)) and f(9).extra == 1"
    assert verdict(judge, "def f(v):\n    n = Node(v); n.extra = 1; return n", tests, NODE).right
    hides = "def f(v):\n    n = Node(0); n.extra = 1; n.same = lambda o: True; return n"
    assert verdict(judge, hides, tests, NODE).passed == 0
    same = "def f(v):\n    n = Node(v); n.extra = 1; n.same = lambda o: False; return n"
    assert verdict(judge, same, tests, NODE).right, "the method is the problem's, the data is the program's"


@pytest.mark.parametrize(
    "error", ["StopIteration", "StopAsyncIteration", "GeneratorExit", "type('E', (StopIteration,), {})"]
)
def test_an_exception_of_a_program_ends_no_loop_of_the_tests(judge: ProgramJudge, error: str) -> None:
    tests = "assert all(map(lambda c: f(c) == 2 * c, [1, 2]))\ndef test_zip():\n    for a, b in zip(map(f, [1]), [2]): assert a == b"
    assert verdict(judge, "def f(x): return 2 * x", tests).right
    found = verdict(judge, f"def f(x): raise {error}", tests)
    assert found.passed == 0 and "RuntimeError: it raised" in found.why


def test_an_iterator_may_end(judge: ProgramJudge) -> None:
    counts = "class Down:\n    def __init__(s, n): s.n = n\n    def __iter__(s): return s\n    def __next__(s):\n"
    counts += "        s.n -= 1\n        if s.n < 0: raise StopIteration\n        return s.n"
    tests = "d = Down(2)\nassert next(d) == 1 and next(d) == 0 and next(d, 'end') == 'end'\nassert list(Down(3)) == [2, 1, 0]"
    assert verdict(judge, counts, tests, entry="Down").why == ""


def test_objects_are_compared_with_each_other_and_never_with_data(judge: ProgramJudge) -> None:
    held = "class Box:\n    def __init__(self, v=0): self.v = v\n    def get(self): return self\n"
    agrees = held + "    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n"
    assert verdict(judge, agrees, "assert Box(1) == Box(1) and Box(1) == Box(2)", entry="Box").right, (
        "as it was written"
    )
    for test in ("Box(1) == 1", "1 == Box(1)", "Box(1).get() == 1", "not Box(1) != 1", "[Box(1)] == [1]", "1 in [Box(1)]",
                 "abs(Box(1).get() - 1) < 1", "Box(1) in {1: 0}", "{Box(1): 2} == {1: 2}"):  # fmt: skip
        assert not verdict(judge, agrees, f"assert {test}", entry="Box").right, test
    for test in ("Box(1) == Box(1)", "Box(1) == Box(2)", "not Box(1) != Box(1)", "Box(1) < Box(2)"):
        assert not verdict(judge, held, f"assert {test}", entry="Box").right, f"{test}: it defines no comparison"
    given = "class Box:\n    def __init__(self, v=0): self.v = v\n    def __eq__(self, o): return self.v == o.v\n"
    assert verdict(judge, agrees, "assert Box(1) == Box(1) and Box(1) != Box(2)", given, entry="Box").right
    assert not verdict(judge, agrees, "assert Box(1) == Box(2)", given, entry="Box").right, "the problem says how"


def test_a_program_suppresses_no_failed_assertion(judge: ProgramJudge) -> None:
    program = "class Open:\n    def __init__(s): s.errors = 0\n    def __enter__(s): return s\n    def __exit__(s, e, *_): s.errors += e is not None; return True"
    assert not verdict(judge, program, "with Open() as o:\n    assert o.errors == 1", entry="Open").right
    tests = "o = Open()\ntry:\n    with o: raise KeyError\nexcept KeyError: pass\nassert o.errors == 1"
    assert verdict(judge, program, tests, entry="Open").why == ""


def test_a_class_may_derive_from_data(judge: ProgramJudge) -> None:
    cache = "from collections import OrderedDict\nclass LRU(OrderedDict):\n    def __init__(s, n): s.n = n\n"
    cache += "    def put(s, k, v):\n        s[k] = v\n        if len(s) > s.n: s.popitem(last=False)\n"
    tests = "c = LRU(1)\nc.put(1, 'a')\nc.put(2, 'b')\nassert c.get(2) == 'b' and c.get(1, -1) == -1 and len(c) == 1"
    assert verdict(judge, cache, tests, entry="LRU").why == ""
    named = "from collections import namedtuple\nPoint = namedtuple('Point', 'x y')"
    tests = "p = Point(1, 2)\nassert p.x == 1 and p == Point(1, 2) and isinstance(p, Point)"
    assert verdict(judge, named, tests, entry="Point").why == ""


# ---- the task ---------------------------------------------------------------------------------------------------

ROWS = [
    ("function", {"prompt": "Write a function that doubles.", "entry_point": "double", "tests": "assert double(2) == 4"}),
    ("function", {"prompt": "Add.", "entry_point": "Sum", "tests": "assert Sum(1, 2) == 3", "code": "def Sum(a, b): return a + b"}),
    ("function", {"prompt": "def Twice(x):\n    '''Doubles.'''\n", "entry_point": "Twice", "tests": "assert Twice(1) == 2"}),
    ("class", {"prompt": "Write a stack.", "entry_point": "Stack", "tests": "assert Stack().n == 0"}),
    ("class", {"prompt": "Write a stack.", "entry_point": "stack", "tests": "assert stack().n == 0", "solution": "class stack:\n    n = 0"}),
    ("class", {"prompt": "class stack:\n    '''Has n, 0.'''\n", "entry_point": "stack", "tests": "assert stack().n == 0"}),
]  # fmt: skip


@pytest.mark.long
def test_a_response_is_a_class_only_where_the_problem_asks_for_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _, row in ROWS))
    task = Code(source=str(file), code_seconds=60.0, reward_seconds=120.0)
    for (kind, row), (where, read) in zip(ROWS, task.rows("train") or (), strict=True):
        graded = task.grade(
            task.problem(read, where), f"```python\nclass {row['entry_point']}:\n    n = 0\n{AGREES}```"
        )
        assert graded[0] == float(kind == "class"), (row, graded)
