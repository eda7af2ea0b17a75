"""A program and its tests, each in a sandbox of its own, and the calls that go between them.

The tests have a stub in place of the entry point. What it is called with goes to the program as plain data, and what
the program returns comes back as plain data. So the tests' own assertions judge it, in a process where nothing of the
program runs, and the program never sees a test. Of what is no data, iterators and functions stay where they are: the
tests iterate or call them. Where the problem asks for a class, objects stay too: the tests call their methods, and
compare them with each other, but not with data. Elsewhere an object is refused: it could say yes to any question.

Functions that tests pass are called back. Objects of classes that the problem itself defines are copied: their data is
the program's, their methods the problem's. What the program changed of its arguments is changed in the tests too.
Exceptions are raised again, by the name of their class; `StopIteration` only where the tests asked for the next item.
Nothing at the program's end is trusted, this module included: the tests' end refuses what must not be.
"""

import builtins
import functools
import inspect
import operator
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ascent.processes.channel import Channel, ChannelClosedError
from ascent.sandbox.plain_values import NotPlainDataError, decode, encode

WORDS = 300
"""Characters of an error that are kept."""
PAIRS = (("lt", "gt"), ("gt", "lt"), ("le", "ge"), ("ge", "le"), ("eq", "ne"), ("ne", "eq"))
COMPARISONS = {f"__{name}__": f"__{other}__" for name, other in PAIRS}
"""Asked of the program for two of its objects, never for an object and data. Each has another that can stand for it."""
NAMES = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
BINARY = [f"__{name}__" for name in NAMES]
"""With data they are asked only of objects that a test itself has made by calling the entry point, which is a class."""
SPECIAL: dict[str, tuple[Callable[..., Any], type]] = {
    **{"__len__": (len, int), "__bool__": (bool, bool), "__hash__": (hash, int), "__str__": (str, str)},
    **{"__repr__": (repr, str), "__iter__": (iter, object), "__next__": (next, object)},
    "__enter__": (lambda target: type(target).__enter__(target), object),
    **{name: (getattr(operator, name), object) for name in ("__getitem__", "__setitem__", "__neg__", "__abs__")},
}
"""Asked of any object, and the type that the answer has to have."""
QUESTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **named: target(*args, **named),
    "get": getattr,
    "set": setattr,
    "data": lambda target: dict(vars(target)),
    "__instancecheck__": lambda target, value: isinstance(value, target),
    "__exit__": lambda target, *error: type(target).__exit__(target, *error),
    **{name: function for name, (function, _) in SPECIAL.items()},
    **{name: getattr(operator, name) for name in (*COMPARISONS, *BINARY, "__contains__")},
    **{f"__r{name[2:]}": lambda target, left, name=name: getattr(operator, name)(left, target) for name in BINARY},
}
CALLED_BACK = ("call", "__iter__", "__next__")
"""All that a program may do with what a test passes."""
_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType),
    *(types.MethodWrapperType, functools.partial, type(functools.lru_cache(len)), operator.itemgetter),
)


class Peer:
    """One end of the conversation. Either end asks, and answers while it waits for its own answer."""

    def __init__(self, channel: Channel, prefix: bytes = b"", allowed: tuple[str, ...] = tuple(QUESTIONS)):
        self.channel, self.prefix, self.allowed = channel, prefix, allowed
        self.objects = not prefix
        """Are objects of the other end taken, and not only its iterators and functions?"""
        self.asked = 0
        """Questions so far."""
        self.held: list[Any] = []
        """Objects that the other end knows by their numbers. The first is the entry point."""
        self.classes: dict[str, type] = {}
        """Classes that the problem defines, by name: both ends have them."""
        self.compares: type = object
        """What the problem itself defines of the entry point, if that is a class: it may say how objects compare."""

    # ---- values

    def pack(self, value: Any) -> Any:
        return encode(value, self._pack_other)

    def _pack_other(self, value: Any) -> Any:
        cls = type(value)
        if isinstance(value, Proxy):
            return {"~": "yours", "v": value._number}
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and value is getattr(builtins, name, self):
            return {"~": "builtin", "v": name}
        if cls.__name__ in self.classes and hasattr(value, "__dict__"):
            return {"~": "copy", "c": cls.__name__, "v": self.pack(dict(vars(value)))}
        if self.prefix and not isinstance(value, (*_FUNCTIONS, Iterator)):
            raise NotPlainDataError(f"a {cls.__name__} cannot be given to a program: it is not plain data")
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
                raise NotPlainDataError(f"it has a {name!s:.60}, which is not plain data")
            case {"~": "yours", "v": int(number)} if 0 <= number < len(self.held):
                return self.held[number]
            case {"~": "builtin", "v": str(name)} if not self.prefix or isinstance(getattr(builtins, name, 0), type):
                return getattr(builtins, name)
            case {"~": "copy", "c": str(name), "v": held} if name in self.classes:
                return _copy(self.classes[name], self.unpack(held))
        raise NotPlainDataError(f"it sent what is not a value: a tag {tagged.get('~')!r:.20}")

    # ---- questions and answers

    def ask(self, what: str, number: int, *args: Any, **named: Any) -> Any:
        """Do this with an object of the other end, and get the result."""
        self.asked += 1
        packed = [self.pack(value) for value in args]
        self.channel.write({"ask": what, "of": number, "args": packed, "named": self.pack(named)}, self.prefix)
        while True:
            try:
                reply = self.channel.read()
                if not isinstance(reply, dict) or not reply.keys() & {"ask", "raises", "is"}:
                    raise NotPlainDataError("it sent what is neither a question nor an answer")
            except (ValueError, RecursionError):
                raise RuntimeError("the program sent what is not JSON") from None
            if "ask" in reply:
                self.answer(reply)
            elif "raises" in reply:
                raise self._error(reply, what)
            else:
                for value, changed in zip(args, reply.get("changed", ()), strict=False):
                    _change(value, self.unpack(changed))
                return self.unpack(reply["is"])

    def answer(self, question: Mapping[str, Any]) -> None:
        """Do what the other end asks."""
        try:
            target, what = self.held[question["of"]], question["ask"]
            if what not in self.allowed or (what == "call" and self.prefix and not isinstance(target, _FUNCTIONS)):
                raise NotPlainDataError("it asked for what it may not")
            args = [self.unpack(value) for value in question["args"]]
            if what in ("get", "set") and str(args[0]).startswith("_"):
                raise AttributeError(f"{args[0]} is not public")
            result = self.pack(QUESTIONS[what](target, *args, **self.unpack(question["named"])))
            kinds = (list, dict, set, bytearray, deque, *self.classes.values())
            changed = [self.pack(value) if isinstance(value, kinds) else None for value in args]
            other = any(c is not None and c != q for c, q in zip(changed, question["args"], strict=True))
            reply: dict[str, Any] = {"is": result, "changed": changed} if other else {"is": result}
        except ChannelClosedError:
            raise
        except BaseException as error:
            reply = _raised(error)
        self.channel.write(reply, self.prefix)

    def _error(self, reply: Mapping[str, Any], what: str) -> Exception:
        """The exception of the other end, as one of Python's own or of the problem's.

        `StopIteration` would end what iterates in the tests, `all(map(f, cases))`, as if all were well.
        """
        try:
            arguments = self.unpack(reply.get("args"))
            for name in reply["raises"]:
                cls = self.classes.get(name, getattr(builtins, name, None))
                if isinstance(cls, type) and issubclass(cls, Exception):
                    ends = issubclass(cls, StopIteration | StopAsyncIteration) and self.prefix and what != "__next__"
                    return RuntimeError(f"it raised {name}") if ends else cls(*arguments)
        except Exception:
            pass
        return RuntimeError(f"it raised {reply.get('raises')!s:.100}")


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
    if changed is None or value is changed or type(value) is not type(changed):
        return
    if not isinstance(value, list | dict | set | bytearray | deque):
        vars(value).update(vars(changed))
    elif value != changed:
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(changed)


def _copy(cls: type, data: dict[str, Any]) -> Any:
    """An object of a class that the problem defines, with this data. No attribute hides a method or a special name."""
    made: Any = object.__new__(cls)
    for name, value in data.items():
        of_class = inspect.getattr_static(cls, name, None)
        if not (name.startswith("__") or callable(of_class) or hasattr(of_class, "__get__")):
            vars(made)[name] = value
    return made


# ---- an object that stays at the other end --------------------------------------------------------------------


class Proxy:
    """What is at the other end. It is equal to nothing but itself."""

    _peer: Peer
    _number: int
    _made: bool

    def __init__(self, peer: Peer, number: int, made: bool = False):
        """`made`: by a test, which called the entry point."""
        vars(self).update(_peer=peer, _number=number, _made=made)


class FunctionProxy(Proxy):
    def __call__(self, *args: Any, **named: Any) -> Any:
        return _ask(self, "call", *args, **named)


class IteratorProxy(Proxy):
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _ask(self, "__next__")


class ObjectProxy(Proxy):
    """The entry point, if the problem asks for a class, or an object of the program."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        result = _ask(self, "call", *args, **named)
        made = self._number == 0 and type(result) is ObjectProxy  # 0 is the entry point
        return ObjectProxy(self._peer, result._number, made=True) if made else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __contains__(self, item: Any) -> bool:
        if self._made:
            return _of_type(bool, _ask(self, "__contains__", item))
        return any(item == each for each in iter(self))

    def __exit__(self, cls: type | None, *_: object) -> None:
        """The program hears that there was an error. It has no say in whether that is raised."""
        _ask(self, "__exit__", Exception if cls else None, None, None)

    def __instancecheck__(self, value: Any) -> bool:
        mine = type(value) is ObjectProxy
        return mine and (value._made or _of_type(bool, _ask(self, "__instancecheck__", value)))


def _ask(proxy: Proxy, what: str, *args: Any, **named: Any) -> Any:
    return proxy._peer.ask(what, proxy._number, *args, **named)


def _of_type(cls: type, value: Any) -> Any:
    """What the program answered, if it is what it was asked for."""
    if cls is not object and type(value) is not cls:
        raise TypeError(f"the program returned no {cls.__name__}")
    return value


def _compare(name: str, left: ObjectProxy, right: Any) -> Any:
    """By the problem's own class, on copies, if that says how: a method which reads nothing is yet to be written."""
    if type(right) is not ObjectProxy:
        return NotImplemented
    cls = left._peer.compares
    own = [getattr(getattr(cls, each), "__code__", None) for each in (name, COMPARISONS[name])]
    if any(code and set(code.co_names) - {"NotImplementedError"} for code in own):
        return getattr(operator, name)(_copy(cls, _ask(left, "data")), _copy(cls, _ask(right, "data")))
    return _of_type(bool, _ask(left, name, right))


def _operate(name: str, left: ObjectProxy, right: Any) -> Any:
    return _ask(left, name, right) if left._made or type(right) is ObjectProxy else NotImplemented


for _name in COMPARISONS:
    setattr(ObjectProxy, _name, lambda self, other, name=_name: _compare(name, self, other))
for _name in (*BINARY, *(f"__r{name[2:]}" for name in BINARY)):
    setattr(ObjectProxy, _name, lambda self, other, name=_name: _operate(name, self, other))
for _name, (_, _type) in SPECIAL.items():
    setattr(ObjectProxy, _name, lambda self, *args, name=_name, cls=_type: _of_type(cls, _ask(self, name, *args)))


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


def classes_of(scope: Mapping[str, Any]) -> dict[str, type]:
    """The classes that the problem itself defines."""
    own = scope["__name__"]
    return {name: cls for name, cls in scope.items() if isinstance(cls, type) and cls.__module__ == own}
