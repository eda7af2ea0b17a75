"""The entry points of the two sandboxes of a trial: the program that is judged, and the tests that judge it.

Tests have one of the usual forms: assertions, `check(candidate)` as in HumanEval, functions `test_…`, and `unittest`
classes. Each assertion of the file or of `check`, each such function and each method of such a class is one test. A
loop with assertions is one test too. A file without any of these is one test.
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
from ascent.sandbox.object_proxies import CALLED_BACK, ObjectProxy, ProxyEndpoint, classes_of, define, exception_words
from ascent.sandbox.plain_values import NO_DATA

TO_PROGRAM, PROGRESS, VERDICT = b"P", b"S", b"V"
"""First byte of a message of the tests: a question for the program, progress, or the final verdict."""
PROBLEM = "problem"
"""Name of the problem's module in both sandboxes."""
PRELOADED_MODULES = (
    "typing math re collections itertools functools heapq bisect string random copy hashlib datetime operator"
)
PRELOADED_MODULES += " dataclasses enum decimal fractions statistics textwrap"
"""Modules of the standard library that most programs import."""
_PASSED, _FAILED = "__test_passed__", "__test_failed__"


def _load(names: list[str]) -> None:
    for name in names:
        with suppress(ImportError):
            importlib.import_module(name)


# ---- the program --------------------------------------------------------------------------------------------


def serve_program(settings: dict[str, Any]) -> Callable[[Channel], None]:
    _load([*PRELOADED_MODULES.split(), *settings.get("imports", ())])
    return run_program


def run_program(channel: Channel) -> None:
    """Load the program and answer calls of its entry point until the channel is closed."""
    request = channel.read()
    try:
        scope = define(request["prelude"], PROBLEM)
        scope.pop(request["entry"], None)
        shared = classes_of(scope)
        exec(choose_program(request["programs"], request["entry"]), scope)
        entry = scope.get(request["entry"])
        if not callable(entry):
            raise NameError(f"it does not define {request['entry']}")
    except BaseException as error:
        channel.write({"error": exception_words(error)})
        return
    endpoint = ProxyEndpoint(channel)
    endpoint.exported.append(entry)
    NO_DATA.extend([entry] if request["class"] and isinstance(entry, type) else [])
    endpoint.classes = {name: cls for name in shared if isinstance(cls := scope.get(name), type)}
    channel.write({"loaded": True})
    while True:
        try:
            question = channel.read()
        except ChannelClosedError:
            return
        endpoint.answer(question)


def choose_program(programs: list[str], entry: str) -> CodeType:
    """Return the first of these programs that is Python and defines the entry point, else the first that is Python."""
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
    _load([*PRELOADED_MODULES.split(), "unittest", *settings.get("imports", ())])
    return run_tests


def run_tests(channel: Channel) -> None:
    """Run the tests on a stub. Send their result as the verdict, or `broken` if they do not run."""
    request = channel.read()
    trial = Trial(channel)
    try:
        scope = define(request["prelude"], PROBLEM)
        trial.endpoint.classes = classes_of(scope)
        trial.endpoint.comparison_class = trial.endpoint.classes.pop(request["entry"], object)
        scope[request["entry"]] = scope["candidate"] = trial.stub(request["entry"], request["class"])
        sources = [ast.parse(source, "<tests>") for source in request["tests"]]
        units = [split_tests(tree) for tree in sources]
    except ChannelClosedError:
        return
    except BaseException as error:
        return channel.write({"broken": exception_words(error)}, VERDICT)
    trial.total = max(1, sum(units))
    trial.send(PROGRESS)
    scope |= {_PASSED: trial.passed, _FAILED: trial.failed}
    for tree, count in zip(sources, units, strict=True):
        try:
            trial.run(tree, count, scope, request["entry"])
        except ChannelClosedError:
            return
        except BaseException as error:
            if not trial.endpoint.num_asked:  # the program was not called
                return channel.write({"broken": exception_words(error)}, VERDICT)
            trial.failed(error, "the tests")
    trial.send(VERDICT)


class Trial:
    """The stub of a program, and the results of its tests so far."""

    def __init__(self, channel: Channel):
        self.channel, self.endpoint = channel, ProxyEndpoint(channel, TO_PROGRAM, CALLED_BACK)
        self.num_passed, self.total = 0, 0
        self.why = ""
        """The message of the first test that failed."""

    def stub(self, name: str, is_class: bool) -> Any:
        """Return what the tests call in place of the entry point."""
        if is_class:
            self.endpoint.accepts_objects = True
            return ObjectProxy(self.endpoint, 0)

        def stub(*args: Any, **named: Any) -> Any:
            return self.endpoint.ask("call", 0, *args, **named)

        stub.__name__ = stub.__qualname__ = name
        return stub

    def passed(self) -> None:
        self.num_passed += 1
        self.send(PROGRESS)

    def failed(self, error: BaseException, what: str) -> None:
        if isinstance(error, ChannelClosedError):
            raise error
        words = exception_words(error)
        self.why = self.why or (f"{what} fails" + ("" if words == "AssertionError" else f": {words}"))

    def send(self, prefix: bytes) -> None:
        self.channel.write({"passed": self.num_passed, "total": self.total, "why": self.why}, prefix)

    def run(self, tree: ast.Module, count: int, scope: dict[str, Any], entry: str) -> None:
        """Run one file of `count` tests; 0: the file itself is one test."""
        file_scope = dict(scope)
        exec(compile(tree, "<tests>", "exec"), file_scope)
        for name, test in test_functions(file_scope, tree):
            try:
                test()
            except BaseException as error:
                self.failed(error, name)
            else:
                self.passed()
        check = file_scope.get("check")
        if callable(check) and not _calls(tree, "check"):
            check(file_scope[entry])
        if count == 0:
            self.passed()


def split_tests(tree: ast.Module) -> int:
    """Make each test of this file report its own result, so that the next ones run too. Return their number."""
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
    """Yield the functions `test_…` and the methods of test cases that this file defines."""
    for node in tree.body:
        value = scope.get(getattr(node, "name", ""))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and callable(value):
            takes = len(inspect.signature(value).parameters)
            yield node.name, functools.partial(value, *[scope["candidate"]] * takes)
        elif isinstance(value, type) and issubclass(value, unittest.TestCase):
            for case in unittest.defaultTestLoader.loadTestsFromTestCase(value):
                yield str(case), case.debug


def _calls(tree: ast.Module, name: str) -> bool:
    """Whether the file itself calls this function."""
    calls = [node.value for node in tree.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == name for call in calls)
