"""What runs in the two sandboxes of a trial: the program that is judged, and the tests that judge it (`peer.py`).

Tests are Python of the usual shapes: assertions, `check(candidate)` as in HumanEval, functions `test_…`, and classes of
`unittest`. Each assertion of the file or of `check`, each such function and each method of such a class is one test. A
loop with assertions in it is one test too. Where there are none of these, the whole file is one.
"""

import ast
import functools
import importlib
import inspect
import unittest
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType
from typing import Any

from ascent.processes.channel import Channel, ChannelClosedError
from ascent.sandbox.object_proxies import CALLED_BACK, ObjectProxy, Peer, classes_of, define, exception_words
from ascent.sandbox.plain_values import NO_DATA

TO_PROGRAM, SO_FAR, VERDICT = b"P", b"S", b"V"
"""How lines of the tests begin: a question for the program, the count up to now, and the end."""
PROBLEM = "problem"
"""The name of the module that a problem is, for both."""
LOADED = "typing math re collections itertools functools heapq bisect string random copy hashlib datetime operator"
LOADED += " dataclasses enum decimal fractions statistics textwrap"
"""Modules of the library that most programs want."""
_PASSED, _FAILED = "__test_passed__", "__test_failed__"


def _load(names: list[str]) -> None:
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


# ---- the program --------------------------------------------------------------------------------------------


def serve_program(settings: dict[str, Any]) -> Callable[[Channel], None]:
    _load([*LOADED.split(), *settings.get("imports", ())])
    return run_program


def run_program(channel: Channel) -> None:
    """Load the program, and answer calls of its entry point until the channel is closed."""
    given = channel.read()
    try:
        scope = define(given["prelude"], PROBLEM)
        scope.pop(given["entry"], None)
        shared = classes_of(scope)
        exec(choose_program(given["programs"], given["entry"]), scope)
        entry = scope.get(given["entry"])
        if not callable(entry):
            raise NameError(f"it does not define {given['entry']}")
    except BaseException as error:
        channel.write({"error": exception_words(error)})
        return
    peer = Peer(channel)
    peer.held.append(entry)
    NO_DATA.extend([entry] if given["class"] and isinstance(entry, type) else [])
    peer.classes = {name: cls for name in shared if isinstance(cls := scope.get(name), type)}
    channel.write({"loaded": True})
    while True:
        try:
            question = channel.read()
        except ChannelClosedError:
            return
        peer.answer(question)


def choose_program(programs: list[str], entry: str) -> CodeType:
    """The first of these programs that is Python and defines the entry point, else the first that is Python."""
    errors: list[SyntaxError] = []
    chosen = None
    for code in programs:
        try:
            tree = ast.parse(code, "<program>")
        except (ValueError, MemoryError, RecursionError) as error:
            errors.append(SyntaxError(exception_words(error)))
        except SyntaxError as error:
            errors.append(error)
        else:
            chosen = chosen or tree
            if _defines(tree, entry):
                chosen = tree
                break
    if chosen is None:
        raise errors[0] if errors else SyntaxError("there is no program")
    return compile(chosen, "<program>", "exec")


def _defines(tree: ast.Module, name: str) -> bool:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
    return False


# ---- the tests ----------------------------------------------------------------------------------------------


def serve_tests(settings: dict[str, Any]) -> Callable[[Channel], None]:
    _load([*LOADED.split(), "unittest", *settings.get("imports", ())])
    return run_tests


def run_tests(channel: Channel) -> None:
    """Run the tests on a stub. What they find goes out as a verdict; what is wrong with them, as `broken`."""
    given = channel.read()
    trial = Trial(channel)
    try:
        scope = define(given["prelude"], PROBLEM)
        trial.peer.classes = classes_of(scope)
        trial.peer.compares = trial.peer.classes.pop(given["entry"], object)
        scope[given["entry"]] = scope["candidate"] = trial.stub(given["entry"], given["class"])
        sources = [ast.parse(source, "<tests>") for source in given["tests"]]
        units = [split_tests(tree) for tree in sources]
    except ChannelClosedError:
        return
    except BaseException as error:
        return channel.write({"broken": exception_words(error)}, VERDICT)
    trial.total = max(1, sum(units))
    trial.say(SO_FAR)
    scope |= {_PASSED: trial.passed, _FAILED: trial.failed}
    for tree, count in zip(sources, units, strict=True):
        try:
            trial.run(tree, count, scope, given["entry"])
        except ChannelClosedError:
            return
        except BaseException as error:
            if not trial.peer.asked:  # the program had no part in it
                return channel.write({"broken": exception_words(error)}, VERDICT)
            trial.failed(error, "the tests")
    trial.say(VERDICT)


class Trial:
    """The stub of a program, and what the tests have found so far."""

    def __init__(self, channel: Channel):
        self.channel, self.peer = channel, Peer(channel, TO_PROGRAM, CALLED_BACK)
        self.right, self.total = 0, 0
        self.why = ""
        """What the first test that failed says."""

    def stub(self, name: str, is_class: bool) -> Any:
        """What stands for the entry point."""
        if is_class:
            self.peer.objects = True
            return ObjectProxy(self.peer, 0)

        def stub(*args: Any, **named: Any) -> Any:
            return self.peer.ask("call", 0, *args, **named)

        stub.__name__ = stub.__qualname__ = name
        return stub

    def passed(self) -> None:
        self.right += 1
        self.say(SO_FAR)

    def failed(self, error: BaseException, what: str) -> None:
        if isinstance(error, ChannelClosedError):
            raise error
        words = exception_words(error)
        self.why = self.why or (f"{what} fails" + ("" if words == "AssertionError" else f": {words}"))

    def say(self, prefix: bytes) -> None:
        self.channel.write({"passed": self.right, "total": self.total, "why": self.why}, prefix)

    def run(self, tree: ast.Module, count: int, scope: dict[str, Any], entry: str) -> None:
        """One file of tests. `count` says how many there are in it; 0: it is one itself."""
        own = dict(scope)
        exec(compile(tree, "<tests>", "exec"), own)
        for name, test in test_functions(own, tree):
            try:
                test()
            except BaseException as error:
                self.failed(error, name)
            else:
                self.passed()
        check = own.get("check")
        if callable(check) and not _calls(tree, "check"):
            check(own[entry])
        if count == 0:
            self.passed()


def split_tests(tree: ast.Module) -> int:
    """Let each test of this file report by itself, so that those after it run too. How many there are."""
    count = _wrap(tree.body)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            count += _wrap(node.body)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            count += 1
        elif isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
            names = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
            count += sum(name.startswith("test") for name in names)
    ast.fix_missing_locations(tree)
    return count


def _wrap(body: list[ast.stmt]) -> int:
    count = 0
    for place, node in enumerate(body):
        asserts = [part for part in ast.walk(node) if isinstance(part, ast.Assert)]
        definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if definition or all(isinstance(part.test, ast.Constant) and part.test.value for part in asserts):
            continue  # `assert True` tests nothing
        words = ast.Constant(" ".join(ast.unparse(node).split())[:160])
        failed = ast.Call(ast.Name(_FAILED, ast.Load()), [ast.Name("__error__", ast.Load()), words], [])
        handler = ast.ExceptHandler(ast.Name("BaseException", ast.Load()), "__error__", [ast.Expr(failed)])
        passed = ast.Expr(ast.Call(ast.Name(_PASSED, ast.Load()), [], []))
        body[place] = ast.copy_location(ast.Try([node], [handler], [passed], []), node)
        count += 1
    return count


def test_functions(scope: dict[str, Any], tree: ast.Module) -> Iterator[tuple[str, Callable[[], object]]]:
    """The functions `test_…` and the methods of test cases that this file defines."""
    for node in tree.body:
        value = scope.get(getattr(node, "name", ""))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and callable(value):
            takes = len(inspect.signature(value).parameters)
            yield node.name, functools.partial(value, *[scope["candidate"]] * takes)
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            for case in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                yield str(case), case.debug


def _calls(tree: ast.Module, name: str) -> bool:
    """Does the file itself call this function?"""
    calls = [node.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == name for call in calls)
