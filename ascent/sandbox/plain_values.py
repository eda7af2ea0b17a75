"""Encode Python values as JSON and decode them: plain data only, so that no code of a program runs elsewhere.

A list is a JSON list; other types have a tag, {"~": "t", "v": …}. A decoded value has Python's built-in types, so its
comparison, length and representation are Python's, whatever class the program used.
"""

import collections
import datetime
import decimal
import fractions
import importlib
import math
from collections.abc import Callable
from typing import Any

MAX_DEPTH, MAX_ITEMS = 150, 500_000
"""How deep a value may be nested, and how many items each container may have."""
MIN_HEX_BITS = 1 << 12
"""Bits from which an integer is written in hexadecimal: Python refuses to write very long ones in decimal."""
Other = Callable[[Any], Any]

_CLASSES: dict[str, tuple[type, Callable[[Any], list[Any]]]] = {
    "complex": (complex, lambda v: [v.real, v.imag]),
    "range": (range, lambda v: [v.start, v.stop, v.step]),
    "bytearray": (bytearray, lambda v: [bytes(v)]),
    "Decimal": (decimal.Decimal, lambda v: [str(v)]),
    "Fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator]),
    "deque": (collections.deque, lambda v: [list(v), v.maxlen]),
    "Counter": (collections.Counter, lambda v: [dict(v)]),
    "OrderedDict": (collections.OrderedDict, lambda v: [list(v.items())]),
    "datetime": (datetime.datetime, lambda v: [*v.timetuple()[:6], v.microsecond]),
    "date": (datetime.date, lambda v: [v.year, v.month, v.day]),
    "timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds]),
}
"""Classes of the standard library that are data, with the arguments that make each object again."""
NO_DATA: list[type] = []
"""Classes whose objects are not data even if they derive from it: the class that a program was asked to write."""
_SIZED = (list, tuple, set, frozenset, dict, str, bytes)
_TAGS: dict[type, str] = {tuple: "t", set: "s", frozenset: "f"}
_KINDS: dict[type, str] = {cls: name for name, (cls, _) in _CLASSES.items()}


class NotPlainDataError(Exception):
    """A value is not plain data, or is not valid tagged JSON."""


def encode(value: Any, convert_other: Other | None = None, depth: int = 0) -> Any:
    """Return the value as tagged JSON. `other` encodes what is not data."""
    if depth > MAX_DEPTH:
        raise NotPlainDataError(f"it is nested deeper than {MAX_DEPTH}, or contains itself")
    kind = type(value)
    if value is None or kind is bool or (kind is str and len(value) <= MAX_ITEMS):
        return value
    if kind is int:
        return value if value.bit_length() < MIN_HEX_BITS else {"~": "i", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"~": "x", "v": repr(value)}
    if kind in _SIZED and len(value) > MAX_ITEMS:
        raise NotPlainDataError(f"it has {len(value):,} items, and at most {MAX_ITEMS:,} are read")
    if kind is list:
        return [encode(item, convert_other, depth + 1) for item in value]
    if kind in _TAGS:
        return {"~": _TAGS[kind], "v": [encode(item, convert_other, depth + 1) for item in value]}
    if kind is dict:
        pairs = [[encode(k, convert_other, depth + 1), encode(v, convert_other, depth + 1)] for k, v in value.items()]
        return {"~": "d", "v": pairs}
    if kind is bytes:
        return {"~": "b", "v": value.decode("latin-1")}
    if kind in _KINDS:
        name = _KINDS[kind]
        return {"~": "c", "c": name, "v": encode(_CLASSES[name][1](value), convert_other, depth + 1)}
    return _encode_derived(value, convert_other, depth)


def _encode_derived(value: Any, convert_other: Other | None, depth: int) -> Any:
    """Encode what derives from data as that data: a named tuple, a defaultdict, an enum or NumPy number."""
    for cls, plain in _PLAIN.items():
        if isinstance(value, cls) and not isinstance(value, tuple(NO_DATA)):
            return encode(plain(value), convert_other, depth)
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        content = encode(value.tolist(), convert_other, depth + 1)
        return {"~": "a", "v": content} if isinstance(content, list) else content
    if convert_other is None:
        raise NotPlainDataError(f"it has a {type(value).__name__}, which is not plain data")
    return convert_other(value)


_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: lambda v: int.__add__(v, 0),
    float: lambda v: float.__add__(v, 0.0),
    str: lambda v: str.__add__(v, ""),
    bytes: lambda v: bytes.__add__(v, b""),
    list: lambda v: list(list.__iter__(v)),
    tuple: lambda v: tuple(tuple.__iter__(v)),
    set: lambda v: set(set.__iter__(v)),
    frozenset: lambda v: frozenset(frozenset.__iter__(v)),
    dict: lambda v: dict(dict.items(v)),
}
"""Make a copy of the base class without calling anything that a derived class defines."""


def decode(tagged: Any, convert_other: Other | None = None, depth: int = 0) -> Any:
    """Return the value of tagged JSON. `other` decodes unknown tags. Raises NotPlainDataError for wrong JSON."""
    if depth > 3 * MAX_DEPTH:
        raise NotPlainDataError(f"it is nested deeper than {MAX_DEPTH}")
    if isinstance(tagged, list):
        return [decode(item, convert_other, depth + 1) for item in tagged]
    if not isinstance(tagged, dict):
        return tagged
    tag, content = tagged.get("~"), tagged.get("v")
    try:
        if tag in ("t", "s", "f"):
            cls = {"t": tuple, "s": set, "f": frozenset}[tag]
            return cls(decode(item, convert_other, depth + 1) for item in content)  # type: ignore[union-attr]
        if tag == "d":
            return {decode(k, convert_other, depth + 1): decode(v, convert_other, depth + 1) for k, v in content}  # type: ignore[union-attr]
        if tag == "i":
            return int(str(content), 16)
        if tag == "x":
            return float(str(content))
        if tag == "b":
            return str(content).encode("latin-1")
        if tag == "a":
            return importlib.import_module("numpy").array(decode(content, convert_other, depth + 1))
        if tag == "c":
            return _CLASSES[tagged["c"]][0](*decode(content, convert_other, depth + 1))
    except NotPlainDataError:
        raise
    except Exception as error:
        raise NotPlainDataError(f"it sent what is not a value: {type(error).__name__}") from None
    if convert_other is None:
        raise NotPlainDataError(f"it sent what is not a value: a tag {tag!r:.20}")
    return convert_other(tagged)
