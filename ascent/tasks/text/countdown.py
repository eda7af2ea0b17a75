"""Countdown: reach a target with some numbers, each used exactly once, by + − × ÷ and brackets.

The value of an expression is computed exactly, by a walk over its syntax tree that knows numbers and four
operations and nothing else: a response is never run.
"""

import ast
import operator
import random
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from ascent.core.errors import ConfigError
from ascent.tasks.text.answer_checking import MINUS_SIGNS, marked_answer, strip_decoration
from ascent.tasks.text.text_task import Generated, Graded, Problem

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
NODES: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
MAX_EXPRESSION_CHARACTERS = 200
SIGNS = MINUS_SIGNS | str.maketrans({"×": "*", "·": "*", "÷": "/", "∕": "/", "⁄": "/", "[": "(", "]": ")"})
LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": ""}


@dataclass(frozen=True)
class Countdown(Generated):
    """Reach a target with some numbers, each used once."""

    instruction: str = "End with a line that has only Answer: and the expression, for example Answer: (1 + 2) * 3"
    """Text appended to every prompt that says how to give the answer."""
    numbers: int = 3
    """How many numbers there are."""
    largest: int = 20
    """The numbers are between 1 and this."""
    largest_target: int = 100
    """The target is between 1 and this."""
    partial: float = 0.1
    """Reward of an expression that has the right numbers but the wrong value: a start for small models. 0: nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.numbers <= 8:
            raise ConfigError(f"--numbers is {self.numbers}: Countdown takes from 2 to 8 numbers")
        if self.largest < 2 or self.largest_target < 2:
            raise ConfigError("--largest and --largest-target have to be at least 2")
        if not 0 <= self.partial <= self.lenient:
            raise ConfigError(
                f"--partial is {self.partial:g}: a wrong value may earn between 0 and --lenient {self.lenient:g}, "
                "which is what a right value in the wrong form earns"
            )

    def make(self, index: int) -> Problem:
        """Random numbers, combined at random two by two, so that there is a solution."""
        rng = random.Random(f"countdown {index}")
        while True:
            numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
            parts = [(Fraction(n), str(n)) for n in numbers]
            while len(parts) > 1:
                (x, left), (y, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
                sign = rng.choice("+-*/" if y else "+-*")
                parts.append((OPERATIONS[sign](x, y), f"({left} {sign} {right})"))
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

    def wrong_responses(self, problem: Problem, other: str | None) -> list[str]:
        """The usual wrong responses, and the target alone, which is not an expression of the numbers."""
        return [*super().wrong_responses(problem, other), f"Answer: {problem.columns['target']}"]

    def grade(self, problem: Problem, response: str) -> Graded:
        numbers, target = Counter(problem.columns["numbers"]), problem.columns["target"]
        stated = marked_answer(response)
        marked = evaluate_expression(strip_decoration(response if stated is None else stated))
        loose = marked if marked is not None else _last_expression(response if stated is None else stated)
        if loose is None:
            return Graded(0.0, False, False, "no expression")
        value, used = loose
        if Counter(used) != numbers:
            return Graded(0.0, False, False, f"used {sorted(used)} and not {sorted(numbers.elements())}"[:200])
        if value == target:
            return self.graded(marked is not None, True, "right")
        return Graded(self.partial, False, False, f"comes to {value} and not {target}"[:200])


def evaluate_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """The value of an expression and the numbers in it; None for anything else, and for a division by 0.

    What follows an equals sign is ignored: (1 + 2) * 3 = 9.
    """
    text = _plain_signs(text).partition("=")[0].strip().strip("$").strip()
    if not text or len(text) > MAX_EXPRESSION_CHARACTERS or not re.fullmatch(r"[0-9+\-*/() \t]+", text):
        return None
    try:
        used: list[int] = []
        return _value(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _plain_signs(text: str) -> str:
    text = text.translate(SIGNS)
    for name, sign in LATEX.items():
        text = text.replace(name, sign)
    return text


def _value(node: ast.AST, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in NODES:
        return OPERATIONS[NODES[type(node.op)]](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"{type(node).__name__} is not allowed in an expression")


def _last_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """The last stretch of a text that is an expression of at least two numbers."""
    for stretch in reversed(re.findall(r"[(0-9][0-9+\-*/() \t]*[)0-9]", _plain_signs(text))):
        value = evaluate_expression(stretch.strip())
        if value is not None and len(value[1]) > 1:
            return value
    return None
