"""A tool that computes: + - * / // % ** and brackets on numbers, exactly."""

import ast
import operator
import warnings
from collections.abc import Callable
from decimal import Context, Decimal, Inexact
from fractions import Fraction

LONGEST, DEEPEST, DIGITS = 500, 50, 1000
"""Of an expression: its characters, its nesting, and the digits of any number on the way."""
_LETTERS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "\n": " "})
_SIGNS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and brackets, for example (3 + 4) * 12 / 5
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression):,} characters, and at most {LONGEST} are computed")
    text = expression.translate(_LETTERS).strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # about 1if and the like
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression.strip()[:80]!r} is not an arithmetic expression") from None
    return _written(_value(tree, text, 0))


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > DEEPEST:
        raise ValueError(f"the expression is nested more than {DEEPEST} deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _number(node.value, ast.get_source_segment(text, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text, depth + 1), _value(node.right, text, depth + 1)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _SIGNS:
            if right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
                raise ZeroDivisionError("division by zero")
            return _checked(_SIGNS[type(node.op)](left, right))
    part = ast.get_source_segment(text, node) or text
    raise ValueError(f"{part[:80]!r} is not a number, nor + - * / // % ** of numbers (a power is written **)")


def _number(value: int | float, written: str) -> Fraction:
    """A number as it is written: 0.1 is one tenth."""
    if isinstance(value, int):
        return _checked(Fraction(value))
    if abs(int(written.lower().partition("e")[2] or "0")) > DIGITS:
        raise ValueError(f"{written[:80]} has more than {DIGITS:,} digits")
    return _checked(Fraction(written.replace("_", "")))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent has to be a whole number")
    if base == 0 and exponent < 0:
        raise ZeroDivisionError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > 4 * DIGITS:
        raise ValueError(f"the power has more than {DIGITS:,} digits")
    return _checked(base ** int(exponent))


def _checked(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4 * DIGITS:
        raise ValueError(f"the numbers have more than {DIGITS:,} digits")
    return value


def _written(value: Fraction) -> str:
    """A whole number, or a decimal that ends soon, as it is; otherwise rounded to 12 digits."""
    top, bottom = value.numerator, value.denominator
    if bottom == 1:
        return str(top)
    whole = len(str(abs(top) // bottom))
    long, short = Context(prec=whole + 20), Context(prec=max(whole, 12))
    decimal = long.divide(Decimal(top), Decimal(bottom))
    if long.flags[Inexact]:
        decimal = short.divide(Decimal(top), Decimal(bottom))
    decimal = decimal.normalize(long)
    return format(decimal, "f") if abs(decimal) >= Decimal("1e-6") else str(decimal).lower()
