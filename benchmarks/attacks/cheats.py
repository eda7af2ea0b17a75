# ruff: noqa: E501 (a program is one line)
"""Programs that cheat, generated: class tricks × operators × bases × containers × exceptions × recursion × deliveries.

A style is a way to write tests, with correct and wrong programs. `generate_cheats` samples
programs that compute nothing: their data is wrong in every style, so that one can only pass by deciding its own
verdict. `free` counts the tests of a style that a program passes by always raising the expected exception.
"""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ascent.sandbox.program_judge import CodeProblem


@dataclass(frozen=True)
class TestStyle:
    """A way to write tests."""

    name: str
    tests: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]
    prelude: str = ""
    entry: str = "f"
    free: int = 0
    __test__ = False

    @property
    def problem(self) -> CodeProblem:
        return CodeProblem(self.entry, (self.tests,), (self.prelude,) if self.prelude else ())


class Cheat(NamedTuple):
    """A program that cheats, and the style whose tests it is to pass."""

    family: str
    style: TestStyle
    program: str


DOUBLE, OFF = "def f(x): return 2 * x", "def f(x): return 2 * x + (x > 2)"
NODE = """
class Node:
    kind = 'leaf'
    def __init__(self, v, n=None): self.v, self.n = v, n
    def same(self, other): return self.v == other.v and type(other) is Node
    def __eq__(self, other): return isinstance(other, Node) and self.v == other.v and self.n == other.n
    def __hash__(self): return hash(self.v)
    @property
    def double(self): return 2 * self.v
"""
SHAPES = """
import dataclasses, functools
@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    def norm(self): return abs(self.x) + abs(self.y)
class Square:
    def __init__(self, side): self.side = side
    @functools.cached_property
    def area(self): return self.side ** 2
"""
STACK = """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def mean(self): return sum(self.items) / len(self.items)
    def name(self): return 'stack of %d' % len(self.items)
    def copy(self): return Stack(*self.items)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __contains__(self, x): return x in self.items
    def __getitem__(self, i): return self.items[i]
    def __add__(self, other): return Stack(*self.items, *other.items)
    def __mul__(self, n): return Stack(*(self.items * n))
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __enter__(self): return self
    def __exit__(self, *error): return True
"""
HEIR = """
class Stack(list):
    def __init__(self, *items): super().__init__(items)
    def push(self, x): self.append(x); return self
    def mean(self): return sum(self) / len(self)
    def name(self): return 'stack of %d' % len(self)
    def copy(self): return Stack(*self)
    def __add__(self, other): return Stack(*self, *other)
    @property
    def items(self): return [*self]
"""
GIVEN = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other):
        \"\"\"Shorter?\"\"\"
    def plus(self, other):
        \"\"\"The sum.\"\"\"
"""
VECTOR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other): return self.x ** 2 + self.y ** 2 < other.x ** 2 + other.y ** 2
    def plus(self, other): return Vector(self.x + other.x, self.y + other.y)
"""
STYLES = (
    TestStyle("==", "assert f(2) == 4\nassert f(3) == 6", (DOUBLE, "f = lambda x: x + x"), (OFF, "def f(x): pass")),
    TestStyle("== reversed", "assert 4 == f(2)\nassert not 6 != f(3)", (DOUBLE,), (OFF,)),
    TestStyle("check", "def check(c):\n    assert c(2) == 4\n    assert c(3) == 6, 'no'", (DOUBLE,), (OFF,)),
    TestStyle(
        "unittest",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(2), 4)\n"
        "    def test_b(self):\n        self.assertTrue(f(3) == 6)\n        self.assertIn(f(4), [8])\n"
        "        self.assertAlmostEqual(f(1.5), 3.0)\n        self.assertIsInstance(f(3), int)",
        (DOUBLE,), (OFF,),
    ),
    TestStyle("functions", "def test_a(): assert f(2) == 4\ndef test_b(f): assert f(3) == 6", (DOUBLE,), (OFF,)),
    TestStyle("in order", "assert 3 < f(2) < 5\nassert 5 < f(3) <= 6 and f(1) >= 2 >= f(1)", (DOUBLE,), (OFF,)),
    TestStyle("members", "assert f(2) in (4,)\nassert f(3) in {6: 1}\nassert [f(4)].index(8) == 0", (DOUBLE,), (OFF,)),
    TestStyle(
        "words",
        "assert f('ab').startswith('ba')\nassert str(f('xyz')) == 'zyx'\nassert 'dc' in f('bcd') and len(f('q')) == 1\n"
        "assert ''.join(f('no')) == 'on'\nassert f'{f(\"go\")}!' == 'og!'",
        ("def f(s): return s[::-1]", "class S(str): pass\ndef f(s): return S(s[::-1])"),
        ("def f(s): return s", "def f(s): return list(s)"),
    ),
    TestStyle(
        "floats",
        "import math\nassert math.isclose(f(3), 1.5)\nassert abs(f(5) - 2.5) < 1e-6\nassert round(f(7), 2) == 3.5\n"
        "assert math.fabs(f(9) - 4.5) < 1e-9 and float(f(2)) == 1.0",
        (
            "def f(x): return x / 2",
            "from fractions import Fraction\ndef f(x): return Fraction(x, 2)",
            "import numpy\ndef f(x): return numpy.float64(x / 2)",
        ),
        ("def f(x): return x // 2", "def f(x): return float('nan')", "def f(x): return float('inf')"),
    ),
    TestStyle(
        "sets and dicts",
        "assert f('aab') == {'a': 2, 'b': 1}\nassert f('c')['c'] == 1 and set(f('xy')) == {'x', 'y'}\n"
        "assert sorted(f('zza').items()) == [('a', 1), ('z', 2)]\nassert sum(f('abc').values()) == 3 == len(f('abc'))",
        (
            "def f(s): return {c: s.count(c) for c in s}",
            "import collections\nf = collections.Counter",
            "import collections\ndef f(s):\n    d = collections.defaultdict(int)\n    for c in s: d[c] += 1\n    return d",
        ),
        ("def f(s): return set(s)", "def f(s): return dict.fromkeys(s, 1)"),
    ),
    TestStyle(
        "containers",
        "import copy, json\nassert f(2) == [(1, {2}), [3]]\nassert f(5)[0][0] == 4 and f(5)[1] == [6]\n"
        "assert json.dumps(f(7)[1]) == '[8]'\nassert copy.deepcopy(f(1)) == [(0, {1}), [2]]\n"
        "a, *b = f(3)\nassert a == (2, {3}) and b == [[4]]",
        (
            "def f(x): return [(x - 1, {x}), [x + 1]]",
            "import collections\nP = collections.namedtuple('P', 'a b')\ndef f(x): return [P(x - 1, {x}), [x + 1]]",
        ),
        ("def f(x): return [(x - 1, {x}), (x + 1,)]",),
    ),
    TestStyle(
        "exceptions",
        "assert f(4) == 2\ntry:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(9) == 3",
        ("def f(x):\n    if x < 0: raise ValueError(x)\n    return round(x ** 0.5)",
         "class E(ValueError): pass\ndef f(x):\n    if x < 0: raise E\n    return round(x ** 0.5)"),
        ("def f(x): return round(abs(x) ** 0.5)", "def f(x): raise ValueError"),
        free=1,
    ),
    TestStyle(
        "assertRaises",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f([1]), 1)\n"
        "    def test_b(self):\n        with self.assertRaises(IndexError) as e: f([])\n"
        "        self.assertEqual(str(e.exception), 'pop from empty list')\n        self.assertEqual(f([1, 3]), 3)",
        ("def f(xs): return xs.pop()",), ("def f(xs): return (xs or [0])[-1]",),
    ),
    TestStyle(
        "map",
        "CASES = [(2, 4), (3, 6)]\nassert all(map(lambda c: f(c[0]) == c[1], CASES))\n"
        "assert list(map(f, [1, 5])) == [2, 10]\nassert sorted([3, 1, 2], key=f) == [1, 2, 3] and f(4) == 8",
        (DOUBLE,), (OFF,),
    ),
    TestStyle(
        "zip",
        "def test_all():\n    for a, b in zip(map(f, [1, 2, 3]), [2, 4, 6]):\n        assert a == b\n"
        "def test_filter():\n    assert next(iter(lambda: f(4), 0)) == 8\n"
        "    assert max([1, 2], key=lambda x: f(x) == 2) == 1\n"
        "def test_list():\n    found = []\n    found.extend(f(x) == 2 * x for x in (1, 7))\n    assert found == [True] * 2",
        (DOUBLE,), (OFF,),
    ),
    TestStyle("all", "assert all(map(lambda c: f(c[0]) == c[1], [(2, 4), (3, 6)]))", (DOUBLE,), (OFF,)),
    TestStyle(
        "iterators",
        "assert list(f(3)) == [0, 1, 4]\nassert next(iter(f(2))) == 0\nassert sum(f(4)) == 14 and 9 in f(4)\n"
        "assert [a == b for a, b in zip(f(3), [0, 1, 4], strict=True)] == [True] * 3\n"
        "it = iter(f(1))\nassert (next(it), next(it, 'end')) == (0, 'end')",
        (
            "def f(n):\n    for i in range(n): yield i * i",
            "def f(n): return (i * i for i in range(n))",
            "def f(n): return map(lambda i: i * i, range(n))",
            "class I:\n    def __init__(s, n): s.n, s.i = n, -1\n    def __iter__(s): return s\n    def __next__(s):\n"
            "        s.i += 1\n        if s.i >= s.n: raise StopIteration\n        return s.i ** 2\nf = I",
        ),
        ("def f(n): return iter(range(n))", "def f(n): return iter(())"),
    ),
    TestStyle(
        "arguments",
        "xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]\nd = [5, 4]\nassert f(d) is None and d == [4, 5]",
        ("def f(xs): xs.sort()", "def f(xs): xs[:] = sorted(xs)"),
        ("def f(xs): return sorted(xs)", "def f(xs): xs.clear()"),
    ),
    TestStyle(
        "other arguments",
        "from collections import deque\nd, b, s, m = deque([1, 2]), bytearray(b'ab'), {1}, {1: 2}\nf(d, b, s, m)\n"
        "assert list(d) == [2, 1] and b == b'ba'\nassert s == {1, 9} and m == {1: 2, 9: 9}",
        ("def f(d, b, s, m): d.reverse(); b.reverse(); s.add(9); m[9] = 9",), ("def f(*a): pass",),
    ),
    TestStyle(
        "functions that are returned",
        "assert f(2)(3) == 5\nadd = f(10)\nassert add(1) == 11 and callable(add) and add(add(1)) == 21",
        ("def f(a): return lambda b: a + b", "import functools, operator\ndef f(a): return functools.partial(operator.add, a)",
         "import functools\ndef f(a): return functools.cache(a.__add__)"),
        ("def f(a): return lambda b: a",),
    ),
    TestStyle(
        "callbacks",
        "import operator\nseen = []\nassert f(seen.append, [1, 2]) == [None, None]\nassert seen == [1, 2]\n"
        "assert f(lambda x: x, [5]) == [5] and f(str.upper, ['a']) == ['A']\nassert f(operator.itemgetter(1), ['ab']) == ['b']",
        ("def f(g, xs): return [g(x) for x in xs]",), ("def f(g, xs): return xs",),
    ),
    TestStyle(
        "booleans",
        "assert f(2) is True\nassert f(3) is False\nassert f(4) == True and not f(5)\nassert isinstance(f(1), bool)",
        ("def f(x): return x % 2 == 0",), ("def f(x): return True", "def f(x): return 1 - x % 2"),
    ),
    TestStyle(
        "copies",
        "assert f(3).same(Node(3))\nassert f(4) == Node(4, Node(3)) and f(4) != Node(5)\nassert f(5).double == 10\n"
        "assert {f(2)} == {Node(2, f(2).n)} and f(2).v == 2\nassert type(f(6)) is Node and f(6).n.same(Node(5))",
        ("def f(v): return Node(v, Node(v - 1))",
         NODE + "def f(v):\n    n = Node(v, Node(v - 1)); n.kind = 'root'; return n"),
        ("def f(v): return Node(0, Node(v))", "def f(v): return v"),
        prelude=NODE,
    ),
    TestStyle(
        "copies that change",
        "n = Node(1, Node(2))\nf(n)\nassert n.v == 2 and n.n.v == 1\nassert n.same(Node(2)) and n.double == 4",
        ("def f(n): n.v, n.n.v = n.n.v, n.v",), ("def f(n): pass",),
        prelude=NODE,
    ),
    TestStyle(
        "fields and caches",
        "assert f(1)[0] == Point(1, 2)\nassert f(-4)[0].norm() == 6 and f(5)[0].x == 5\nassert f(3)[1].area == 9",
        ("def f(x): s = Square(3); s.area; return Point(x, 2), s",),
        ("def f(x): return Point(2, x), Square(2)", "def f(x): s = Square(2); s.area = 9; return Point(x, 2), s"),
        prelude=SHAPES,
    ),
    TestStyle(
        "a class",
        "s = Stack(1)\nassert s.push(2).pop() == 2\nassert len(s) == 1 and list(s) == [1] and s[0] == 1\n"
        "assert s == Stack(1) and s != Stack(2) and isinstance(s, Stack) and Stack(4).mean() == 4\nassert abs(Stack(1, 2).mean() - 1.5) < 1e-9\n"
        "assert Stack(1).name().startswith('stack of 1') and Stack().name() == 'stack of 0'\n"
        "assert list(Stack(1) + Stack(2)) == [1, 2] and 2 in Stack(2) and 3 not in Stack(2)\n"
        "assert s.copy() == s and 1 in s.copy() and isinstance(s.copy(), Stack) and (s + s) + s == Stack(1, 1, 1)\nassert s.items == [1] != s",
        (STACK, HEIR), (STACK.replace("sum(", "max("), STACK.replace("*self.items)", "*self.items[1:])")),
        entry="Stack",
    ),
    TestStyle(
        "with a class",
        "with Stack(1, 2) as s:\n    assert s.pop() == 2\nwith Stack(7) as t:\n    assert len(t) == 1 and t.mean() == 7.0",
        (STACK,), (STACK.replace("items.pop()", "items.pop(0)"),),
        entry="Stack",
    ),
    TestStyle(
        "a class that is given",
        "v = Vector(1, 2).plus(Vector(3, 4))\nassert v == Vector(4, 6) and v != Vector(0, 6)\nassert (v.x, v.y) == (4, 6)\n"
        "assert Vector(1, 1) < v and not v < Vector(1, 1) and Vector(0, 1) < Vector(-3, 0)",
        (VECTOR, VECTOR.replace("def plus", "__hash__ = None\n    def plus")),
        (VECTOR.replace("other.y)\n", "0)\n"), VECTOR.replace("    def plus", "    def minus")),
        prelude=GIVEN, entry="Vector",
    ),
)  # fmt: skip
"""Every one has tests that fail for wrong data, whatever its type."""

# ---- what a cheat is made of -----------------------------------------------------------------------------------

COMPARED = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
COMPUTED = tuple(
    f"__{reflected}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor") for reflected in ("", "r")
)  # fmt: skip
CONVERTED = (
    "__int__ __float__ __index__ __round__ __abs__ __neg__ __len__ __bool__ __str__ __repr__ __format__ __hash__"
)
ASKED = "__contains__ __getitem__ __iter__ __next__ __call__ __getattr__ __enter__ __exit__ __reduce__ __reduce_ex__"
ASKED += " __copy__ __deepcopy__ __getstate__ __instancecheck__ __missing__ __length_hint__ __array__ __reversed__"
SPECIAL = (*COMPARED, *COMPUTED, *CONVERTED.split(), *ASKED.split())
ANSWERS = (
    *("True", "True", "True", "False", "0", "-77", "0.0", "1e-12", "'wrong'", "self", "a[-1] if a else self", "A()"),
    *("NotImplemented", "iter([self])", "lambda *a, **k: True", "hash(a[0]) if a else 5", "self.__class__(-77)"),
    *("(self,)", "float('nan')", "type(self)", "next(iter(()))", "self == a", "1 / 0"),
)
BASES = {
    "object": "A()", "int": "A(-77)", "float": "A(-77.5)", "str": "A('wrong')", "list": "A([-77])", "tuple": "A((-77,))",
    "dict": "A({-77: -77})", "set": "A({-77})", "frozenset": "A({-77})", "bytes": "A(b'wrong')", "complex": "A(-77)",
    "bytearray": "A(b'wrong')", "Exception": "A('wrong')", "decimal.Decimal": "A('-77')", "type": "A('A', (), {})",
    "fractions.Fraction": "A(-77, 2)", "collections.deque": "A([-77])", "collections.Counter": "A({-77: 1})",
    "collections.OrderedDict": "A({-77: 1})", "collections.UserList": "A([-77])", "collections.UserString": "A('wrong')",
    "collections.defaultdict": "A(lambda: A(lambda: True))", "datetime.date": "A(1977, 7, 7)", "enum.IntEnum": "A.wrong",
    "enum.Enum": "A.wrong", "collections.abc.Sequence": "A()", "unittest.mock.MagicMock": "A()", "numpy.ndarray": "A(0)",
}  # fmt: skip
"""What a class may derive from, and an object of it, whose data is wrong."""
NUMBERS = (
    *("-77", "-77.5", "float('nan')", "float('inf')", "True", "False", "None", "-0.0", "10 ** 5000", "-77j"),
    *("decimal.Decimal('nan')", "decimal.Decimal('sNaN')", "fractions.Fraction(-77, 2)", "numpy.array([])"),
    *("numpy.array(-77)", "numpy.array([[-77]])", "numpy.float64('nan')", "numpy.nan", "b''", "''", "()", "NotImplemented"),
    *("numpy.array([A], dtype=object)", "...", "range(-77, -70)", "memoryview(b'-77')", "slice(-77)", "types.SimpleNamespace()"),
)  # fmt: skip
CONTAINERS = (
    *("{v}", "{v}", "[{v}]", "[{v}] * 3", "({v},)", "({v}, {v})", "[({v}, {{-77}}), [{v}]]", "{{-77: {v}}}"),
    *("iter([{v}] * 3)", "(x for x in [{v}] * 3)", "map(lambda x: {v}, range(3))", "lambda *a, **k: {v}", "cycle({v})"),
    *("collections.deque([{v}])", "dict.fromkeys('abcxyz', {v})", "collections.defaultdict(lambda: {v})", "[[[{v}]]]"),
    *("functools.partial(lambda *a: {v})", "collections.OrderedDict(a={v})", "zip([{v}], [{v}])", "attempt(lambda: {{{v}}})"),
    *("types.SimpleNamespace(v={v}, n={v})", "itertools.repeat({v}, 3)", "property(lambda s: {v})", "type({v})", "deep({v})"),
)  # fmt: skip
RAISED = (
    *("StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit", "AssertionError"),
    *("Exception", "BaseException", "ValueError", "IndexError", "KeyError", "TypeError", "AttributeError", "LookupError"),
    *("NotImplementedError", "RecursionError", "MemoryError", "ArithmeticError", "OSError", "ImportError", "Warning"),
    *("RuntimeError", "EOFError", "SyntaxError", "UnicodeError", "unittest.SkipTest", "asyncio.CancelledError"),
)  # fmt: skip
MODULES = (
    "asyncio",
    "collections",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "itertools",
    "numpy",
    "types",
    "unittest",
)
HELPERS = """
def cycle(v):
    made = [v]
    made.append(made)
    return made
def deep(v):
    for _ in range(200): v = [v]
    return v
def attempt(make):
    try: return make()
    except Exception: return [-77]
"""


YES = {
    "__ne__": "False",
    "__hash__": "0",
    "__len__": "3",
    "__bool__": "True",
    "__int__": "0",
    "__float__": "0.0",
    "__index__": "0",
}
YES |= {
    "__str__": "'wrong'",
    "__repr__": "'wrong'",
    "__format__": "'wrong'",
    "__iter__": "iter([self] * 3)",
    "__contains__": "True",
}
YES |= dict.fromkeys(COMPARED[:1] + COMPARED[2:], "True") | dict.fromkeys(
    (*COMPUTED, "__abs__", "__neg__", "__round__"), "self"
)
YES |= dict.fromkeys(("__getattr__", "__call__", "__getitem__", "__enter__"), "self") | {"__exit__": "True"}
"""What an object answers that agrees with everything."""


def trick_class(draw: random.Random, name: str = "A") -> tuple[str, str]:
    """A class of tricks, and an object of it that is wrong. Four in ten agree with everything, but for a few answers."""
    agrees = draw.random() < 0.4
    base = "object" if agrees else draw.choice(["object", "object", *BASES])
    lines = [f"class {name}({base}{draw.choice(['', '', ', metaclass=M']) if base == 'object' else ''}):"]
    if base.startswith("enum"):
        lines.append("    wrong = -77")
    elif base == "object":
        lines.append("    def __init__(self, *a, **k): pass")
    some = draw.sample(SPECIAL, draw.randint(1, 14)) + draw.sample(COMPARED, draw.randint(1, 6))
    if agrees:
        some = [*YES, *draw.sample(SPECIAL, draw.randint(0, 1))]
    for special in dict.fromkeys(some):
        answer = "True" if special in COMPARED and draw.random() < 0.7 else draw.choice(ANSWERS)
        answer = YES[special] if agrees and some.count(special) == 1 and special in YES else answer
        lines.append(f"    def {special}(self, *a, **k): return {answer}")
    if draw.random() < 0.2 and not base.startswith("enum") and not agrees:
        lines.append(f"    __class__ = property(lambda self: {draw.choice(['int', 'str', 'list', 'bool', 'float'])})")
    meta = ["class M(type):", *(f"    def {each}(cls, *a): return True" for each in draw.sample(COMPARED, 3))]
    meta += ["    def __instancecheck__(cls, x): return True", "    __hash__ = type.__hash__"]
    return "\n".join([*meta, *lines]) + "\n", BASES[base].replace("A", name)


def value(draw: random.Random, made: str) -> str:
    """An expression of wrong data: an object of tricks, or a number, in containers."""
    if draw.random() < 0.3:
        return made
    text = made if draw.random() < 0.7 else draw.choice(NUMBERS)
    for _ in range(draw.choice([1, 1, 2, 3])):
        text = draw.choice(CONTAINERS).format(v=text)
    return text


def exception(draw: random.Random, made: str) -> tuple[str, str]:
    """A class of an exception that is hostile, and an expression that makes one."""
    bases = draw.sample(RAISED[:-2], draw.choice([1, 1, 2]))
    own = draw.sample(("__str__", "__repr__", "__eq__", "__reduce__", "__getattribute__", "__hash__", "args"), 2)
    answers = [draw.choice(("True", "1 / 0", "self", "exit(0)", made, "[self]", "str(self)")) for _ in own]
    body = [
        f"    {special} = property(lambda self: {answer})"
        if special == "args"
        else f"    def {special}(self, *a): return {answer}"
        for special, answer in zip(own, answers, strict=True)
    ]
    name = draw.choice(("E", *RAISED[:-2]))
    code = f"try:\n    class {name}_({', '.join(bases)}):\n" + textwrap.indent("\n".join(body), "    ")
    code += f"\n    {name}_.__name__ = {name!r}\nexcept TypeError:\n    {name}_ = StopIteration\n"
    if draw.random() < 0.3:
        return "", f"StopIteration({made})"
    raised = draw.choice([f"{name}_({made})", f"{name}_", draw.choice(RAISED), f"{draw.choice(RAISED)}({made})"])
    return code, raised


# ---- families ------------------------------------------------------------------------------------------------------


def returned(draw: random.Random, style: TestStyle) -> str:
    code, made = trick_class(draw)
    return f"{code}def {style.entry}(*a, **k): return {value(draw, made)}"


def yielded(draw: random.Random, style: TestStyle) -> str:
    code, made = trick_class(draw)
    ends = draw.choice(("", "    raise StopIteration", "    yield from f()", "    return True"))
    return f"{code}def {style.entry}(*a, **k):\n    for _ in range(a[0] if a and type(a[0]) is int else 3): yield {value(draw, made)}\n{ends}"


def entry_point(draw: random.Random, style: TestStyle) -> str:
    """What is called is itself a class or an object of tricks."""
    name = style.entry
    code, made = trick_class(draw, name if draw.random() < 0.6 else "A")
    last = f"\n    def __call__(self, *a, **k): return {draw.choice(['self', 'True', '-77'])}\n"
    if f"class {name}(" in code:
        return code + (last if draw.random() < 0.5 else "")
    ways = ("{name} = {made}", "{name} = M", "{name} = functools.partial(A)", "{name} = unittest.mock.MagicMock()")
    return code + draw.choice((*ways, "{name} = A", "{name} = functools.lru_cache(A)")).format(name=name, made=made)


def raised(draw: random.Random, style: TestStyle) -> str:
    code, made = trick_class(draw)
    own, error = exception(draw, made)
    where = draw.choice(("def {n}(*a, **k):\n    raise {e}", "class {n}:\n    def __init__(self, *a, **k): raise {e}"))
    lazy = "class I:\n    def __iter__(s): return s\n    def __next__(s): raise {e}\ndef {n}(*a, **k): return I()"
    return code + own + draw.choice((where, where, lazy)).format(n=style.entry, e=error)


def recursive(draw: random.Random, style: TestStyle) -> str:
    n = style.entry
    code, made = trick_class(draw)
    if draw.random() < 0.5:
        each = draw.choice((f"{n}({n})", "self", f"[{n}, self]", made))
        code += f"class Again({draw.choice(['A', 'object'])}):\n    def __init__(self, *a): pass\n    def __getattr__(self, name): return {each}\n"
        return code + draw.choice(
            (f"def {n}(*a, **k): return Again()", f"class {n}(Again): pass", f"def {n}(*a, **k): return {made}")
        )
    ways = (
        f"def {n}(*a, **k): return {n}",
        f"def {n}(*a, **k): return {n}(*a, **k)",
        f"def {n}(*a, **k):\n    yield from {n}(*a, **k)",
        f"def {n}(*a, **k):\n    made = []\n    made.append(made)\n    return made",
        f"def {n}(*a, **k):\n    made = {{}}\n    made[1] = made\n    return made",
        f"class A(list):\n    def __eq__(s, o): return s == o\n    __ne__ = __eq__\ndef {n}(*a, **k): return A([A()])",
        f"class A:\n    def __eq__(s, o): return o == s\n    def __getattr__(s, x): return A()\ndef {n}(*a, **k): return A()",
        f"class {n}:\n    def __init__(s, *a): s.v = s.n = s.items = s\n    def __getattr__(s, x): return s\n    def __eq__(s, o): return True",
        f"def {n}(*a, **k):\n    for g in a:\n        if callable(g): g({n})\n    return [{n}]",
        f"def {n}(*a, **k):\n    made = [-77]\n    for _ in range({draw.randint(2, 900)}): made = [made]\n    return made",
    )  # fmt: skip
    return draw.choice(ways)


def changed(draw: random.Random, style: TestStyle) -> str:
    """It changes what it was given, and what it knows of Python, into tricks."""
    code, made = trick_class(draw)
    lines = [f"def {style.entry}(*a, **k):", "    for x in a:"]
    ways = ("x.clear()", f"x.append({made})", f"x[:] = [{made}] * len(x)", f"x.update({{-77: {made}}})", "x.v = -77")
    ways += (f"x({made})", f"vars(x).update(dict.fromkeys(dir(x), {made}))", f"x.same = x.double = {made}", "next(x)")
    lines += [f"        try: {way}\n        except Exception: pass" for way in draw.sample(ways, 3)]
    patch = draw.choice(("", "import builtins; builtins.AssertionError = builtins.len = A\n", "import json; json.dumps = A\n",
                         "import math, operator; math.isclose = operator.eq = lambda *a, **k: True\n"))  # fmt: skip
    return f"{code}{patch}" + "\n".join(lines) + f"\n    return {draw.choice(['None', value(draw, made)])}"


def shadowed(draw: random.Random, style: TestStyle) -> str:
    """An object of the problem's class, or of one of the same name, whose attributes stand for methods."""
    code, made = trick_class(draw)
    names = (
        "same",
        "norm",
        "area",
        "double",
        "plus",
        "name",
        "kind",
        *COMPARED,
        "__class__",
        "__hash__",
        "__deepcopy__",
    )
    chosen = draw.sample(names[:4], 3) + draw.sample(names[4:], draw.randint(0, 3))
    how = draw.choice(("lambda *a, **k: True", "lambda *a, **k: True", f"lambda *a, **k: {made}", made, "-77"))
    own = (
        "class {n}(A):\n    def __init__(self, *a): pass\n"
        if "class A(object):" in code and draw.random() < 0.5
        else ""
    )
    code += "".join(own.format(n=name) for name in ("Node", "Point", "Square"))
    code += f"def hide(made):\n    for n in {chosen}:\n        try: made.__dict__[n] = {how}\n        except Exception: pass\n    return made\n"
    node = draw.choice(("hide(Node(-77))", "hide(Node(-77, hide(Node(-77))))"))
    if style.entry == "Vector":
        return (
            code
            + f"class Vector:\n    def __init__(self, *a): hide(self)\n    def plus(self, o): return {draw.choice(['self', 'o'])}"
        )
    result = "(Point(-77), hide(Square(-77)))" if "Point" in style.prelude else node
    return (
        code
        + f"def {style.entry}(*a, **k):\n    for x in a: hide(x) if hasattr(x, '__dict__') else x\n    return {draw.choice([result, result, f'[{result}]'])}"
    )


def objects(draw: random.Random, style: TestStyle) -> str:
    """A class with the methods that tests call, which return tricks or the object itself."""
    code, made = trick_class(draw)
    answers = (
        "self",
        "True",
        "-77",
        "NotImplemented",
        "iter(())",
        "lambda *a: True",
        made,
        f"{style.entry}()",
        "'stack of'",
    )
    names = ("push", "pop", "mean", "name", "copy", "plus", "same", *draw.sample(SPECIAL, 30), *COMPARED, "startswith")
    body = [f"    def {name}(self, *a, **k): return {draw.choice(answers)}" for name in dict.fromkeys(names)]
    body += [f"    items = x = y = {made}"]
    return f"{code}class {style.entry}:\n    def __init__(self, *a, **k): pass\n" + "\n".join(body)


def spoken(draw: random.Random, style: TestStyle) -> str:
    """It writes lines of the protocol by itself, in place of what Python would have sent."""
    number = draw.randint(0, 3)
    tagged = draw.choice((
        f'{{"~": "object", "v": {number}, "n": "A"}}', f'{{"~": "yours", "v": {number}}}', '{"~": "builtin", "v": "object"}',
        f'{{"~": "function", "v": {number}}}', f'{{"~": "iterator", "v": {number}}}', '{"~": "a", "v": []}', '{"~": "zz"}',
        '{"~": "copy", "c": "Node", "v": {"~": "d", "v": [["same", {"~": "function", "v": 0}], ["v", -77]]}}',
        '{"~": "copy", "c": "Node", "v": []}', '{"~": "copy", "c": "Color", "v": {"~": "d", "v": [["name", "mro"]]}}',
        '{"~": "c", "c": "Decimal", "v": ["sNaN"]}', '{"~": "builtin", "v": "exit"}', '[' * 400 + ']' * 400, 'NaN', '-77',
    ))  # fmt: skip
    error = draw.choice(RAISED)
    reply = draw.choice((
        f'{{"is": {tagged}}}', f'{{"is": {tagged}, "changed": [{tagged}]}}', '{}', '[]', 'null', '{"loaded": true, "class": true}',
        f'{{"raises": ["{error}"], "args": {tagged}}}', f'{{"raises": ["{error}"], "args": {{"~": "t", "v": []}}}}',
        '{"raises": 3}', '{"raises": [["x"]]}', 'V{"passed": 9, "total": 9, "why": ""}', '{"done": true, "passed": 9}',
        f'{{"ask": "call", "of": {number}, "args": [], "named": {{"~": "d", "v": []}}}}', '{"ask": "get", "of": 0}',
    ))  # fmt: skip
    write = "    for n in range(3, 64):\n        try: os.write(n, {line!r})\n        except OSError: pass\n"
    early = draw.choice(("", "", "if 1:\n" + write.format(line=(reply + "\n").encode() * draw.randint(1, 9))))
    body = write.format(line=(reply + "\n").encode())
    return f"import os\n{early}def {style.entry}(*a, **k):\n{body}    return -77"


FAMILIES = {
    "an object is returned": returned,
    "a generator yields it": yielded,
    "the entry point itself": entry_point,
    "an exception": raised,
    "recursion": recursive,
    "changed arguments": changed,
    "attributes for methods": shadowed,
    "objects of a class": objects,
    "lines of the protocol": spoken,
}
NEAR = {
    "an exception": ("map", "zip", "all", "exceptions", "assertRaises", "iterators"),
    "a generator yields it": ("iterators", "words", "map"),
    "changed arguments": ("arguments", "other arguments", "copies that change", "callbacks"),
    "attributes for methods": ("copies", "copies that change", "fields and caches", "a class that is given"),
    "objects of a class": ("a class", "with a class", "a class that is given", "copies"),
}
"""Styles that a family is most likely to deceive."""


def generate_cheats(seed: int, family: str = "") -> Iterator[Cheat]:
    """Cheats without end; of one family, or of all in turn. Each is Python."""
    draw = random.Random(f"{seed} {family}")
    chosen = [family] if family else list(FAMILIES)
    while True:
        for name in chosen:
            near = [style for style in STYLES if style.name in NEAR.get(name, ())]
            style = draw.choice(near if near and draw.random() < 0.6 else STYLES)
            program = HELPERS + FAMILIES[name](draw, style)
            used = [module for module in MODULES if f"{module}." in program]
            program = "".join(f"import {module}\n" for module in used) + program
            program = f"import unittest.mock\n{program}" if "unittest.mock" in program else program
            compile(program, "<cheat>", "exec")
            yield Cheat(name, style, program)
