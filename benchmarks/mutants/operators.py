"""Mutation operators: every small change of a source file that should change what it does.

A change replaces the text of one syntax node. Strings are never changed, so neither are docstrings, messages and names
of files. Annotations, decorators, assertions and the arguments of exceptions are left alone as well.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

COMPARED: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,), ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}  # fmt: skip
COMPUTED: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
RENAMED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum", "amin": "amax",
    "amax": "amin", "floor": "ceil", "ceil": "floor", "argmin": "argmax", "argmax": "argmin", "cumsum": "cumprod",
    "zeros_like": "ones_like", "ones_like": "zeros_like", "zeros": "ones", "ones": "zeros", "logical_and": "logical_or",
    "startswith": "endswith", "endswith": "startswith", "append": "insert", "mean": "sum", "sum": "mean",
}  # fmt: skip
AXES = {"dim", "axis"}
TEXTUAL = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp, ast.Set, ast.Dict)


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    function: str
    """Qualified name, as `code.co_qualname` says it; empty: module or class level."""
    line: int
    operator: str
    start: int
    """Characters of the file that are replaced: from here to `end`."""
    end: int
    old: str
    new: str
    context: str
    """The line that the change begins in."""
    number: int = 0
    """Which one it is of several with the same texts."""

    @property
    def key(self) -> str:
        """Names a mutant across changes elsewhere in the file."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        where = "" if self.context in (self.old, old) else f" in `{self.context}`"
        return f"{self.path}::{self.function}: {old} -> {new}{where}" + (f" #{self.number}" if self.number else "")

    def apply(self, source: str) -> str:
        return source[: self.start] + self.new + source[self.end :]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Every mutant of a file. Some cannot be compiled (`compiles`)."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    found = {(m.start, m.end, m.new): m for m in finder.found if m.new != m.old}
    counts, named = Counter[str](), list[Mutant]()
    for mutant in found.values():
        named.append(replace(mutant, number=counts[mutant.key]))
        counts[mutant.key] += 1
    return named


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: str):
        self.path, self.source, self.found = path, source, list[Mutant]()
        self.scope: list[tuple[str, str]] = []
        lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        self.lines = lines

    # ---- where a node is

    def span(self, node: ast.AST) -> tuple[int, int]:
        place: Any = node

        def at(line: int, column: int) -> int:
            """Columns count bytes."""
            return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

        return at(place.lineno, place.col_offset), at(place.end_lineno, place.end_col_offset)

    @property
    def function(self) -> str:
        """The innermost function, as Python qualifies it."""
        names = self.scope
        while names and names[-1][0] == "class":
            names = names[:-1]
        parts = [
            name + (".<locals>" if kind == "function" and i + 1 < len(names) else "")
            for i, (kind, name) in enumerate(names)
        ]
        return ".".join(parts)

    def add(self, operator: str, node: ast.AST, new: str) -> None:
        start, end = self.span(node)
        line = node.lineno  # type: ignore[attr-defined]
        old, context = self.source[start:end], self.lines[line - 1].strip()
        self.found.append(Mutant(self.path, self.function, line, operator, start, end, old, new, context))

    def changed(self, operator: str, node: ast.expr, change: Callable[[Any], None]) -> None:
        """The node with one change, in brackets."""
        other = copy.deepcopy(node)
        change(other)
        self.add(operator, node, f"({ast.unparse(other)})")

    # ---- what is left alone

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__") or any("overload" in ast.unparse(d) for d in node.decorator_list):
            return
        self.scope.append(("function", node.name))
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if any(ast.unparse(base).split("[")[0].endswith("Protocol") for base in node.bases):
            return
        self.scope.append(("class", node.name))
        for statement in node.body:
            self.visit(statement)
        self.scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_Import(self, node: ast.Import) -> None: ...

    visit_ImportFrom = visit_Import  # type: ignore[assignment]

    # ---- statements

    def visit_Raise(self, node: ast.Raise) -> None:
        self.add("drop statement", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring, or `...`
            return
        if isinstance(node.value, ast.Call | ast.Await):
            self.add("drop statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("drop statement", node, "pass")
        if type(node.op) in COMPUTED and not isinstance(node.value, TEXTUAL[1:]):
            other = copy.deepcopy(node)
            other.op = COMPUTED[type(node.op)]()
            self.add("arithmetic", node, ast.unparse(other))
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break | ast.Continue) -> None:
        self.add("drop statement", node, "pass")

    visit_Continue = visit_Break  # type: ignore[assignment]

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add("return None", node, "return None")
        if isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2 and not _starred(node.value.elts):
            first, second = map(ast.unparse, node.value.elts)
            self.add("swap results", node, f"return {second}, {first}")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self.add("negate condition", node.test, f"(not ({ast.unparse(node.test)}))")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit_If(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.add("negate condition", condition, f"(not ({ast.unparse(condition)}))")
        self.generic_visit(node)

    # ---- expressions

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            for new in COMPARED.get(type(op), ()):
                self.changed("comparison", node, lambda other, i=i, new=new: other.ops.__setitem__(i, new()))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        words = any(isinstance(side, TEXTUAL) and not _is_number(side) for side in (node.left, node.right))
        if type(node.op) in COMPUTED and not words:
            self.changed("arithmetic", node, lambda other: setattr(other, "op", COMPUTED[type(node.op)]()))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = ast.Or if isinstance(node.op, ast.And) else ast.And
        self.changed("and, or", node, lambda other: setattr(other, "op", new()))
        for i in range(len(node.values)):
            rest = [ast.unparse(value) for j, value in enumerate(node.values) if j != i]
            word = " and " if isinstance(node.op, ast.And) else " or "
            self.add("drop condition", node, f"({word.join(f'({one})' for one in rest)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            self.add("drop sign or not", node, f"({ast.unparse(node.operand)})")
        if isinstance(node.op, ast.USub) and _is_number(node.operand):
            value = node.operand.value  # type: ignore[attr-defined]
            if isinstance(value, int):
                self.add("constant", node, f"({-value - 1})")
            return
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            for new in (node.value + 1, node.value - 1)[: 1 + (node.value > 0)]:
                self.add("constant", node, f"({new})")
        elif isinstance(node.value, float):
            self.add("constant", node, repr(1.0 if node.value == 0 else 0.0 if node.value == 1 else node.value * 2))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Slice):
            for side in ("lower", "upper", "step"):
                if getattr(node.slice, side) is not None:
                    self.changed("drop bound", node, lambda other, side=side: setattr(other.slice, side, None))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in RENAMED:
            part = "attr" if isinstance(node.func, ast.Attribute) else "id"
            self.changed("other function", node, lambda other: setattr(other.func, part, RENAMED[name]))
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                self.changed("drop argument", node, lambda other, i=i: other.keywords.pop(i))
            if keyword.arg in AXES:
                self.changed(
                    "other axis", node, lambda other, i=i: setattr(other.keywords[i], "value", ast.Constant(0))
                )
        for i in range(len(node.args) - 1):
            pair = node.args[i : i + 2]
            if not _starred(pair) and ast.dump(pair[0]) != ast.dump(pair[1]):
                self.changed("swap arguments", node, lambda other, i=i: _swap(other.args, i))
        self.generic_visit(node)


def _swap(values: list[Any], i: int) -> None:
    values[i], values[i + 1] = values[i + 1], values[i]


def _starred(nodes: list[ast.expr]) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def by_line(mutants: list[Mutant]) -> Iterator[tuple[tuple[str, int], list[Mutant]]]:
    """Mutants of each line of code, in the order of files and lines."""
    lines: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in mutants:
        lines.setdefault((mutant.path, mutant.line), []).append(mutant)
    yield from sorted(lines.items())
