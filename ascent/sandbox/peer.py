"""A program and its tests, each in a sandbox of its own, and the calls that go between them.

The tests have a stub in place of the entry point. What it is called with goes to the program as plain data, and what
the program returns comes back as plain data. So the tests' own assertions judge it, in a process where nothing of the
program runs, and the program never sees a test. Of what is no data, iterators and functions stay where they are: the
tests iterate or call them. Where the entry point is a class, its objects stay too, and answer for themselves. Any other
object is refused, for it could say yes to whatever it is asked.

Functions that tests pass are called back. Objects of classes that the problem itself defines are copied. Lists and the
like that the program changed are changed in the tests too. Exceptions are raised again, by the name of their class.
"""

import builtins
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ascent.sandbox.line import Closed, Line
from ascent.sandbox.values import NotData, decode, encode

WORDS = 300
"""Characters of an error that are kept."""
OPERATORS = (
    *("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__add__", "__radd__", "__sub__", "__rsub__"),
    *("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__floordiv__", "__mod__", "__pow__", "__matmul__"),
    *("__and__", "__or__", "__xor__", "__neg__", "__abs__", "__enter__", "__exit__"),
)
"""Asked of the program only for objects that a test itself has made by calling the entry point, which is a class."""
QUESTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **named: target(*args, **named),
    "get": getattr,
    "set": setattr,
    "len": len,
    "bool": bool,
    "iter": iter,
    "next": next,
    "in": lambda target, item: item in target,
    "item": lambda target, key: target[key],
    "set item": lambda target, key, value: target.__setitem__(key, value),
    "str": str,
    "repr": repr,
    "hash": hash,
    **{name: lambda target, *args, name=name: getattr(target, name)(*args) for name in OPERATORS},
}
CALLED_BACK = ("call", "iter", "next")
"""All that a program may do with what a test passes."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class Peer:
    """One end of the conversation. Either end asks, and answers while it waits for its own answer."""

    def __init__(self, line: Line, prefix: bytes = b"", allowed: tuple[str, ...] = tuple(QUESTIONS)):
        self.line, self.prefix, self.allowed = line, prefix, allowed
        self.objects = not prefix
        """Are objects of the other end taken, and not only its iterators and functions?"""
        self.asked = 0
        """Questions so far."""
        self.held: list[Any] = []
        """Objects that the other end knows by their numbers. The first is the entry point."""
        self.classes: dict[str, type] = {}
        """Classes that the problem defines, by name: both ends have them."""

    # ---- values

    def pack(self, value: Any) -> Any:
        return encode(value, self._pack_other)

    def _pack_other(self, value: Any) -> Any:
        cls = type(value)
        if isinstance(value, Proxy):
            return {"~": "yours", "v": _number(value)}
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and value is getattr(builtins, name, self):
            return {"~": "builtin", "v": name}
        if cls.__name__ in self.classes and hasattr(value, "__dict__"):
            return {"~": "copy", "c": cls.__name__, "v": self.pack(dict(vars(value)))}
        if self.prefix and not isinstance(value, (*_FUNCTIONS, Iterator)):
            raise NotData(f"a {cls.__name__} cannot be given to a program: it is not plain data")
        self.held.append(value)
        kind = "iterator" if isinstance(value, Iterator) else "function" if isinstance(value, _FUNCTIONS) else "object"
        return {"~": kind, "v": len(self.held) - 1, "n": type(value).__name__[:60]}

    def unpack(self, tagged: Any) -> Any:
        return decode(tagged, self._unpack_other)

    def _unpack_other(self, tagged: Mapping[str, Any]) -> Any:
        match tagged:
            case {"~": "function", "v": int(number)}:
                return FunctionProxy(self, number)
            case {"~": "iterator", "v": int(number)}:
                return IteratorProxy(self, number)
            case {"~": "object", "v": int(number)} if self.objects:
                return ObjectProxy(self, number)
            case {"~": "object", "v": int(), "n": name}:
                raise NotData(f"it has a {name!s:.60}, which is not plain data")
            case {"~": "yours", "v": int(number)} if 0 <= number < len(self.held):
                return self.held[number]
            case {"~": "builtin", "v": str(name)} if not self.prefix or isinstance(getattr(builtins, name, 0), type):
                return getattr(builtins, name)
            case {"~": "copy", "c": str(name), "v": held} if name in self.classes:
                made: Any = object.__new__(self.classes[name])
                vars(made).update(self.unpack(held))
                return made
        raise NotData(f"it sent what is not a value: a tag {tagged.get('~')!r:.20}")

    # ---- questions and answers

    def ask(self, what: str, number: int, *args: Any, **named: Any) -> Any:
        """Do this with an object of the other end, and get the result."""
        self.asked += 1
        packed = [self.pack(value) for value in args]
        self.line.write({"ask": what, "of": number, "args": packed, "named": self.pack(named)}, self.prefix)
        while True:
            try:
                reply = self.line.read()
                if not isinstance(reply, dict):
                    raise NotData("it sent what is neither a question nor an answer")
            except (ValueError, RecursionError):
                raise RuntimeError("the program sent what is not JSON") from None
            if "ask" in reply:
                self.answer(reply)
            elif "raises" in reply:
                raise self._error(reply)
            else:
                for value, changed in zip(args, reply.get("changed", ()), strict=False):
                    _change(value, self.unpack(changed))
                return self.unpack(reply.get("is"))

    def answer(self, question: Mapping[str, Any]) -> None:
        """Do what the other end asks."""
        try:
            target, what = self.held[question["of"]], question["ask"]
            if what not in self.allowed or (what == "call" and self.prefix and not isinstance(target, _FUNCTIONS)):
                raise NotData("it asked for what it may not")
            args = [self.unpack(value) for value in question["args"]]
            if what in ("get", "set") and str(args[0]).startswith("_"):
                raise AttributeError(f"{args[0]} is not public")
            result = self.pack(QUESTIONS[what](target, *args, **self.unpack(question["named"])))
            changed = [self.pack(value) if isinstance(value, list | dict | set) else None for value in args]
            other = any(c is not None and c != q for c, q in zip(changed, question["args"], strict=True))
            reply: dict[str, Any] = {"is": result, "changed": changed} if other else {"is": result}
        except Closed:
            raise
        except BaseException as error:
            reply = _raised(error)
        self.line.write(reply, self.prefix)

    def _error(self, reply: Mapping[str, Any]) -> Exception:
        """The exception of the other end, as one of Python's own or of the problem's."""
        try:
            arguments = self.unpack(reply.get("args"))
            for name in reply["raises"]:
                cls = self.classes.get(name, getattr(builtins, name, None))
                if isinstance(cls, type) and issubclass(cls, Exception):
                    return cls(*arguments)
        except Exception:
            pass
        return RuntimeError(f"{reply.get('raises')!s:.100}")


def _raised(error: BaseException) -> dict[str, Any]:
    names = [cls.__name__ for cls in type(error).__mro__]
    try:
        return {"raises": names, "args": encode(error.args)}
    except BaseException:
        return {"raises": names, "args": encode((exception_words(error),))}


def exception_words(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:WORDS] if str(error) else type(error).__name__
    except BaseException:
        return type(error).__name__


def _change(value: Any, changed: Any) -> None:
    """What the program did to an argument, done to the original."""
    if changed is None or type(value) is not type(changed) or value == changed:
        return
    if isinstance(value, list):
        value[:] = changed
    elif isinstance(value, dict | set):
        value.clear()
        value.update(changed)


# ---- an object that stays at the other end --------------------------------------------------------------------


class Proxy:
    """What is at the other end. It is equal to nothing but itself."""

    def __init__(self, peer: Peer, number: int, made: bool = False, is_class: bool = False):
        object.__setattr__(self, "_of", (peer, number, made, is_class))


class FunctionProxy(Proxy):
    def __call__(self, *args: Any, **named: Any) -> Any:
        return _ask(self, "call", *args, **named)


class IteratorProxy(Proxy):
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _ask(self, "next")


class ObjectProxy(Proxy):
    """The entry point, if it is a class, or an object of the program. Only one that the test has made is compared."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        peer, number, _, is_class = object.__getattribute__(self, "_of")
        result = peer.ask("call", number, *args, **named)
        return ObjectProxy(peer, _number(result), made=True) if is_class and type(result) is ObjectProxy else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __len__(self) -> int:
        return _of_type(int, _ask(self, "len"))

    def __bool__(self) -> bool:
        return _of_type(bool, _ask(self, "bool"))

    def __iter__(self) -> Iterator[Any]:
        return _ask(self, "iter")

    def __contains__(self, item: Any) -> bool:
        return _of_type(bool, _ask(self, "in", item))

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "set item", key, value)

    def __str__(self) -> str:
        return _of_type(str, _ask(self, "str"))

    def __repr__(self) -> str:
        return _of_type(str, _ask(self, "repr"))

    def __hash__(self) -> int:
        return _of_type(int, _ask(self, "hash"))

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is ObjectProxy and object.__getattribute__(value, "_of")[2]


def _number(proxy: Proxy) -> int:
    return object.__getattribute__(proxy, "_of")[1]


def _ask(proxy: Proxy, what: str, *args: Any, **named: Any) -> Any:
    peer, number, *_ = object.__getattribute__(proxy, "_of")
    return peer.ask(what, number, *args, **named)


def _of_type(cls: type, value: Any) -> Any:
    """What the program answered, if it is what it was asked for."""
    if type(value) is not cls:
        raise TypeError(f"the program returned no {cls.__name__}")
    return value


def _operator(name: str) -> Callable[..., Any]:
    def ask(self: Proxy, *args: Any) -> Any:
        if not object.__getattribute__(self, "_of")[2]:
            return NotImplemented
        return _ask(self, name, *args)

    return ask


for _name in OPERATORS:
    setattr(ObjectProxy, _name, _operator(_name))


def define(codes: list[str], name: str) -> dict[str, Any]:
    """The names that these pieces of the problem define. A piece that is not Python, such as words, is left out."""
    scope: dict[str, Any] = {"__name__": name}
    for code in codes:
        try:
            compiled = compile(code, "<problem>", "exec")
        except (SyntaxError, ValueError):
            continue
        exec(compiled, scope)
    return scope


def classes_of(scope: Mapping[str, Any], entry: str) -> dict[str, type]:
    """The classes that the problem itself defines, but for what is to be judged."""
    found = {name: value for name, value in scope.items() if isinstance(value, type) and name != entry}
    return {name: value for name, value in found.items() if value.__module__ == scope["__name__"]}
