"""A calculator tool: exact arithmetic with + - * / // % ** and brackets."""

import ast
import operator
import warnings
from collections.abc import Callable
from decimal import Context, Decimal, Inexact
from fractions import Fraction

MAX_CHARACTERS, MAX_DEPTH, MAX_DIGITS = 500, 50, 1000
"""Limits on an expression: its characters, its nesting, and the digits of intermediate results."""
_REPLACEMENTS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "\n": " "})
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
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
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression):,} characters, and the limit is {MAX_CHARACTERS}")
    text = expression.translate(_REPLACEMENTS).strip()
    try:
        with warnings.catch_warnings(action="ignore"):  # about 1if and the like
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression.strip()[:80]!r} is not an arithmetic expression") from None
    return _format(_value(tree, text, 0))


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ValueError(f"the expression is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _number(node.value, ast.get_source_segment(text, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text, depth + 1), _value(node.right, text, depth + 1)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            if right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
                raise ZeroDivisionError("division by zero")
            return _check_size(_OPERATORS[type(node.op)](left, right))
    part = ast.get_source_segment(text, node) or text
    raise ValueError(f"{part[:80]!r} is not a number, nor + - * / // % ** of numbers (a power is written **)")


def _number(value: int | float, source: str) -> Fraction:
    """Return the exact value of a literal: 0.1 is one tenth."""
    if isinstance(value, int):
        return _check_size(Fraction(value))
    if abs(int(source.lower().partition("e")[2] or "0")) > MAX_DIGITS:
        raise ValueError(f"{source[:80]} has more than {MAX_DIGITS:,} digits")
    return _check_size(Fraction(source.replace("_", "")))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("an exponent has to be a whole number")
    if base == 0 and exponent < 0:
        raise ZeroDivisionError("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > 4 * MAX_DIGITS:
        raise ValueError(f"the power has more than {MAX_DIGITS:,} digits")
    return _check_size(base ** int(exponent))


def _check_size(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4 * MAX_DIGITS:
        raise ValueError(f"the numbers have more than {MAX_DIGITS:,} digits")
    return value


def _format(value: Fraction) -> str:
    """Return integers and short decimals exactly, other numbers with 12 digits."""
    numerator, denominator = value.numerator, value.denominator
    if denominator == 1:
        return str(numerator)
    integer_digits = len(str(abs(numerator) // denominator))
    long, short = Context(prec=integer_digits + 20), Context(prec=max(integer_digits, 12))
    decimal = long.divide(Decimal(numerator), Decimal(denominator))
    if long.flags[Inexact]:
        decimal = short.divide(Decimal(numerator), Decimal(denominator))
    decimal = decimal.normalize(long)
    return format(decimal, "f") if abs(decimal) >= Decimal("1e-6") else str(decimal).lower()
