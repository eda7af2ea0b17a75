"""Calls between a program and its tests, which run in two sandboxes.

The tests call a stub in place of the entry point. Its arguments are sent to the program as plain data, and the result
comes back as plain data. So the assertions of the tests run in a process without any code of the program, and the
program never sees a test. Iterators and functions are not data: they stay where they are, and the other side uses
proxies. If the problem asks for a class, its objects stay too: the tests call their methods and compare them with each
other, but not with data. In other problems an object is refused, because it could claim to equal anything.

Functions that tests pass are called back. Objects of classes that the problem itself defines are copied: the data comes
from the program, the methods from the problem. What the program changes in its arguments is changed in the tests too.
Exceptions are raised again, by the name of their class; `StopIteration` only if the tests asked for the next item.
Nothing in the program's process is trusted, including this module: the tests' side refuses what is not allowed.
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

MAX_ERROR_CHARS = 300
"""Characters of an error that are kept."""
PAIRS = (("lt", "gt"), ("gt", "lt"), ("le", "ge"), ("ge", "le"), ("eq", "ne"), ("ne", "eq"))
COMPARISONS = {f"__{name}__": f"__{other}__" for name, other in PAIRS}
"""Comparisons between two objects of the program, never with data, and the reflected one of each."""
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
BINARY = [f"__{name}__" for name in OPERATORS]
"""With data, allowed only for objects that a test has made by calling the entry point, which is a class."""
SPECIAL: dict[str, tuple[Callable[..., Any], type]] = {
    **{"__len__": (len, int), "__bool__": (bool, bool), "__hash__": (hash, int), "__str__": (str, str)},
    **{"__repr__": (repr, str), "__iter__": (iter, object), "__next__": (next, object)},
    "__enter__": (lambda target: type(target).__enter__(target), object),
    **{name: (getattr(operator, name), object) for name in ("__getitem__", "__setitem__", "__neg__", "__abs__")},
}
"""Questions that any object answers, and the required type of the answer."""
QUESTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
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
"""The only questions that a program may ask of what a test passes."""
_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType),
    *(types.MethodWrapperType, functools.partial, type(functools.lru_cache(len)), operator.itemgetter),
)


class ProxyEndpoint:
    """One side of the calls. Each side asks, and answers questions while it waits for its own answer."""

    def __init__(self, channel: Channel, prefix: bytes = b"", allowed: tuple[str, ...] = tuple(QUESTIONS)):
        self.channel, self.prefix, self.allowed = channel, prefix, allowed
        self.accepts_objects = not prefix
        """Whether objects of the other side are accepted, and not only its iterators and functions."""
        self.num_asked = 0
        """Number of questions so far."""
        self.exported: list[Any] = []
        """Objects that the other side refers to by index. The first is the entry point."""
        self.classes: dict[str, type] = {}
        """Classes that the problem defines, by name. Both sides have them."""
        self.comparison_class: type = object
        """The problem's own definition of the entry point, if that is a class: it may define how objects compare."""

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
        self.exported.append(value)
        kind = "iterator" if isinstance(value, Iterator) else "function" if isinstance(value, _FUNCTIONS) else "object"
        return {"~": kind, "v": len(self.exported) - 1, "n": type(value).__name__[:60]}

    def unpack(self, tagged: Any) -> Any:
        return decode(tagged, self._unpack_other)

    def _unpack_other(self, tagged: Mapping[str, Any]) -> Any:
        match tagged:
            case {"~": "function", "v": int(number)}:
                return FunctionProxy(self, number)
            case {"~": "iterator", "v": int(number)}:
                return IteratorProxy(self, number)
            case {"~": "object", "v": int(number)} if self.accepts_objects:
                return ObjectProxy(self, number)
            case {"~": "object", "v": int(), "n": name}:
                raise NotPlainDataError(f"it has a {name!s:.60}, which is not plain data")
            case {"~": "yours", "v": int(number)} if 0 <= number < len(self.exported):
                return self.exported[number]
            case {"~": "builtin", "v": str(name)} if not self.prefix or isinstance(getattr(builtins, name, 0), type):
                return getattr(builtins, name)
            case {"~": "copy", "c": str(name), "v": content} if name in self.classes:
                return _copy(self.classes[name], self.unpack(content))
        raise NotPlainDataError(f"it sent what is not a value: a tag {tagged.get('~')!r:.20}")

    # ---- questions and answers

    def ask(self, verb: str, number: int, *args: Any, **kwargs: Any) -> Any:
        """Ask a question about an object of the other side, and return the answer."""
        self.num_asked += 1
        packed = [self.pack(value) for value in args]
        self.channel.write({"ask": verb, "of": number, "args": packed, "named": self.pack(kwargs)}, self.prefix)
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
                raise self._error(reply, verb)
            else:
                for value, changed in zip(args, reply.get("changed", ()), strict=False):
                    _change(value, self.unpack(changed))
                return self.unpack(reply["is"])

    def answer(self, question: Mapping[str, Any]) -> None:
        """Answer a question of the other side."""
        try:
            target, verb = self.exported[question["of"]], question["ask"]
            if verb not in self.allowed or (verb == "call" and self.prefix and not isinstance(target, _FUNCTIONS)):
                raise NotPlainDataError("it asked for what it may not")
            args = [self.unpack(value) for value in question["args"]]
            if verb in ("get", "set") and str(args[0]).startswith("_"):
                raise AttributeError(f"{args[0]} is not public")
            result = self.pack(QUESTIONS[verb](target, *args, **self.unpack(question["named"])))
            kinds = (list, dict, set, bytearray, deque, *self.classes.values())
            changed = [self.pack(value) if isinstance(value, kinds) else None for value in args]
            other = any(c is not None and c != q for c, q in zip(changed, question["args"], strict=True))
            reply: dict[str, Any] = {"is": result, "changed": changed} if other else {"is": result}
        except ChannelClosedError:
            raise
        except BaseException as error:
            reply = _raised(error)
        self.channel.write(reply, self.prefix)

    def _error(self, reply: Mapping[str, Any], verb: str) -> Exception:
        """Return the exception of the other side, as a built-in one or one of the problem.

        A `StopIteration` of the program would end an iteration in the tests early, as in `all(map(f, cases))`.
        """
        try:
            arguments = self.unpack(reply.get("args"))
            for name in reply["raises"]:
                cls = self.classes.get(name, getattr(builtins, name, None))
                if isinstance(cls, type) and issubclass(cls, Exception):
                    ends = issubclass(cls, StopIteration | StopAsyncIteration) and self.prefix and verb != "__next__"
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
        return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS] if str(error) else type(error).__name__
    except BaseException:
        return type(error).__name__


def _change(value: Any, changed: Any) -> None:
    """Apply to the original argument what the program changed."""
    if changed is None or value is changed or type(value) is not type(changed):
        return
    if not isinstance(value, list | dict | set | bytearray | deque):
        vars(value).update(vars(changed))
    elif value != changed:
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(changed)


def _copy(cls: type, data: dict[str, Any]) -> Any:
    """Return an object of a class of the problem with this data. No attribute hides a method or a special name."""
    made: Any = object.__new__(cls)
    for name, value in data.items():
        of_class = inspect.getattr_static(cls, name, None)
        if not (name.startswith("__") or callable(of_class) or hasattr(of_class, "__get__")):
            vars(made)[name] = value
    return made


# ---- an object that stays on the other side --------------------------------------------------------------------


class Proxy:
    """An object on the other side. It equals only itself."""

    _endpoint: ProxyEndpoint
    _number: int
    _made: bool

    def __init__(self, endpoint: ProxyEndpoint, number: int, made: bool = False):
        """`made`: a test made it by calling the entry point."""
        vars(self).update(_endpoint=endpoint, _number=number, _made=made)


class FunctionProxy(Proxy):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", *args, **kwargs)


class IteratorProxy(Proxy):
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return _ask(self, "__next__")


class ObjectProxy(Proxy):
    """The entry point, if it is a class, or an object of the program."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = _ask(self, "call", *args, **kwargs)
        made = self._number == 0 and type(result) is ObjectProxy  # 0 is the entry point
        return ObjectProxy(self._endpoint, result._number, made=True) if made else result

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
        """Tell the program whether there was an error. The error is raised in any case."""
        _ask(self, "__exit__", Exception if cls else None, None, None)

    def __instancecheck__(self, value: Any) -> bool:
        mine = type(value) is ObjectProxy
        return mine and (value._made or _of_type(bool, _ask(self, "__instancecheck__", value)))


def _ask(proxy: Proxy, verb: str, *args: Any, **kwargs: Any) -> Any:
    return proxy._endpoint.ask(verb, proxy._number, *args, **kwargs)


def _of_type(cls: type, value: Any) -> Any:
    """Return the answer of the program if it has the required type."""
    if cls is not object and type(value) is not cls:
        raise TypeError(f"the program returned no {cls.__name__}")
    return value


def _compare(name: str, left: ObjectProxy, right: Any) -> Any:
    """Compare copies by the class of the problem if it defines how; a method that reads no name is only a stub."""
    if type(right) is not ObjectProxy:
        return NotImplemented
    cls = left._endpoint.comparison_class
    definitions = [getattr(getattr(cls, each), "__code__", None) for each in (name, COMPARISONS[name])]
    if any(code and set(code.co_names) - {"NotImplementedError"} for code in definitions):
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
    """Return the names that these parts of the problem define. Parts that are not Python are ignored."""
    scope: dict[str, Any] = {"__name__": name}
    for code in codes:
        try:
            compiled = compile(code, "<problem>", "exec")
        except (SyntaxError, ValueError):
            continue
        exec(compiled, scope)
    return scope


def classes_of(scope: Mapping[str, Any]) -> dict[str, type]:
    """Return the classes that the problem itself defines."""
    module = scope["__name__"]
    return {name: cls for name, cls in scope.items() if isinstance(cls, type) and cls.__module__ == module}
