"""Countdown: reach a target with given numbers, each used exactly once, by + − × ÷ and brackets.

The value of an expression is computed exactly, by a walk over its syntax tree that knows numbers and four
operations and nothing else: a response is never run.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ascent.tasks.text.answers import MINUS, stated, tidy
from ascent.tasks.text.base import Graded, Problem, refuse
from ascent.tasks.text.generated import Generated

OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST = 200
SIGNS = MINUS | str.maketrans({"×": "*", "·": "*", "÷": "/", "∕": "/", "⁄": "/", "[": "(", "]": ")"})
LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": ""}


@dataclass(frozen=True)
class Countdown(Generated):
    """Reach a target with the numbers given, each used once."""

    instruction: str = "End with a line that has only Answer: and the expression, for example Answer: (1 + 2) * 3"
    """Stands below every prompt: how the answer has to be given."""
    numbers: int = 3
    """How many numbers there are."""
    largest: int = 20
    """The numbers are 1 to this."""
    largest_target: int = 100
    """The target is 1 to this."""
    partial: float = 0.1
    """What an expression of the right numbers and of another value earns: a start for small models. 0: nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.numbers <= 8:
            refuse(f"--numbers is {self.numbers}: Countdown takes from 2 to 8 numbers")
        if self.largest < 2 or self.largest_target < 2:
            refuse("--largest and --largest-target have to be at least 2")
        if not 0 <= self.partial <= self.lenient:
            refuse(
                f"--partial is {self.partial:g}: a wrong value earns from 0 to what a right one in the wrong form does "
                f"(--lenient {self.lenient:g})"
            )

    def make(self, index: int) -> Problem:
        """Numbers, combined at random two by two: so there is a solution."""
        rng = random.Random(f"countdown {index}")
        while True:
            numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
            parts = [(Fraction(n), str(n)) for n in numbers]
            while len(parts) > 1:
                (x, left), (y, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
                sign = rng.choice("+-*/" if y else "+-*")
                parts.append((OPERATIONS[_SIGN[sign]](x, y), f"({left} {sign} {right})"))
            value, made = parts[0]
            if value.denominator == 1 and 1 <= value <= self.largest_target:
                break
        words = (
            f"Use the numbers {', '.join(map(str, numbers))}, each exactly once, with +, -, *, / and brackets, to make "
            f"{value}."
        )
        solution = made[1:-1] if made.startswith("(") else made
        return Problem(words, solution, {"numbers": numbers, "target": int(value)})

    def gold(self, problem: Problem) -> str | None:
        return f"Answer: {problem.answer}"

    def wrong(self, problem: Problem, other: str | None) -> list[str]:
        """As elsewhere, and the target alone: no expression of the numbers."""
        return [*super().wrong(problem, other), f"Answer: {problem.columns['target']}"]

    def grade(self, problem: Problem, response: str) -> Graded:
        numbers, target = Counter(problem.columns["numbers"]), problem.columns["target"]
        found = stated(response)
        marked = evaluate(tidy(response if found is None else found))
        loose = marked if marked is not None else _last_expression(response if found is None else found)
        if loose is None:
            return Graded(0.0, False, False, "no expression")
        value, used = loose
        if Counter(used) != numbers:
            return Graded(0.0, False, False, f"used {sorted(used)} and not {sorted(numbers.elements())}"[:200])
        if value == target:
            return self.graded(marked is not None, True, "right")
        return Graded(self.partial, False, False, f"comes to {value} and not {target}"[:200])


_SIGN: dict[str, type] = {"+": ast.Add, "-": ast.Sub, "*": ast.Mult, "/": ast.Div}


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None for anything else, a division by 0 too.

    What follows an equals sign is left out: (1 + 2) * 3 = 9.
    """
    text = text.translate(SIGNS)
    for name, sign in LATEX.items():
        text = text.replace(name, sign)
    text = text.partition("=")[0].strip().strip("$").strip()
    if not text or len(text) > LONGEST or not re.fullmatch(r"[0-9+\-*/() \t]+", text):
        return None
    try:
        used: list[int] = []
        return _value(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"{type(node).__name__} is no part of an expression")


def _last_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """The last stretch of a text that is an expression of at least two numbers."""
    plain = text.translate(SIGNS)
    for name, sign in LATEX.items():
        plain = plain.replace(name, sign)
    for stretch in reversed(re.findall(r"[(0-9][0-9+\-*/() \t]*[)0-9]", plain)):
        found = evaluate(stretch.strip())
        if found is not None and len(found[1]) > 1:
            return found
    return None
