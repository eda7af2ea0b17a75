"""A grading process, seen from inside: it reads a job, computes one reward, and answers with a line of JSON.

It never imports torch for its own sake. Whatever a reward does, the answer is small and of a known form, or the
process ends and the parent knows. It ends with its parent: the kernel sends it a signal when the parent's end of
the lifeline closes, however that happened and whatever the reward is doing.
"""

from __future__ import annotations

import fcntl
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from ascent.tasks.text.problems import Problem

LARGEST = 3.4028234663852886e38
"""Of a float32: what is larger would be infinite in the batch."""
REASON = 300
"""Characters of a reason that are kept."""


class Grader(NamedTuple):
    """What a process needs to compute a reward: where the code is, and a task's fields (None: a plain function)."""

    source: str
    """python:FILE:NAME, or MODULE:NAME for what can be imported."""
    settings: Mapping[str, Any] | None = None


class Job(NamedTuple):
    """One reward to compute."""

    grader: int
    prompt: Any
    response: str
    answer: str | None
    columns: Mapping[str, Any]


def serve_jobs(jobs: int, lifeline: int) -> None:
    """The process: `jobs` and `lifeline` are the numbers of its two pipes."""
    _end_with_parent(lifeline)
    pipe = Connection(jobs)
    try:
        graders = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return
    try:
        calls = [_load(Grader(*grader)) for grader in graders]
    except BaseException as error:
        pipe.send_bytes(json.dumps({"error": _words(error)}).encode())
        return
    pipe.send_bytes(b'{"ready": true}')
    while True:
        try:
            sent = pipe.recv_bytes()
        except EOFError:
            return
        try:
            job = Job(*pickle.loads(sent))
            answer = calls[job.grader](job)
        except BaseException as error:  # SystemExit and the rest: a reward has no say over this process
            answer = {"error": _words(error)}
        pipe.send_bytes(json.dumps(answer).encode())


def _end_with_parent(lifeline: int) -> None:
    """Let the kernel end this process group with SIGIO, whose default it is, as soon as the parent is gone."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was gone before
        os._exit(1)


def _load(grader: Grader) -> Callable[[Job], dict[str, Any]]:
    code = _named(grader.source)
    if grader.settings is None:
        return functools.partial(_own, code, _names(code))
    task = object.__new__(code)  # its settings were checked by the parent: nothing is read or checked again
    vars(task).update(grader.settings)
    task.prepare()
    return functools.partial(_grade, task)


def _named(source: str) -> Any:
    """The object of python:FILE:NAME or MODULE:NAME."""
    where, name = source.removeprefix("python:").rsplit(":", 1)
    if source.startswith("python:"):
        module_name = f"ascent_user_{Path(where).stem}"
        spec = importlib.util.spec_from_file_location(module_name, where)
        assert spec is not None and spec.loader is not None
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    return functools.reduce(getattr, name.split("."), module)


def _names(function: Callable[..., Any]) -> frozenset[str] | None:
    """The columns that a function asks for by name; None: all of them, it takes **columns."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _own(function: Callable[..., Any], names: frozenset[str] | None, job: Job) -> dict[str, Any]:
    """A reward function of your own: f(prompt, response, answer, **columns) -> a number, or (number, reason)."""
    columns = {k: v for k, v in job.columns.items() if names is None or k in names}
    returned = function(job.prompt, job.response, job.answer, **columns)
    value, reason = returned, ""
    if isinstance(returned, tuple | list):
        if len(returned) != 2 or isinstance(returned, list):
            raise Wrong(f"returned a {type(returned).__name__} of {len(returned)}: {FORM}")
        value, reason = returned
    return {"value": _number(value), "reason": str(reason)[:REASON]}


FORM = "a reward returns one number, or (number, reason)"


class Wrong(Exception):
    """What was returned is not a reward."""


def _grade(task: Any, job: Job) -> dict[str, Any]:
    """The task's own check."""
    graded = task.grade(Problem(job.prompt, job.answer, dict(job.columns)), job.response)
    value, strict, lenient, reason = graded
    return {
        "value": _number(value),
        "strict": bool(strict),
        "lenient": bool(lenient),
        "reason": str(reason)[:REASON],
    }


def _number(value: Any) -> float:
    """A finite number, or an error that says what it was instead."""
    if not hasattr(type(value), "__float__"):
        raise Wrong(f"returned {type(value).__name__}: {FORM}")
    number = float(value)
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise Wrong(f"returned {number}: a reward is a finite number")
    return number


def _words(error: BaseException) -> str:
    """What went wrong and, for an error in somebody's own code, in which line."""
    try:
        if isinstance(error, Wrong):
            return str(error)[:REASON]
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        files = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        own = [(file.name, line) for file, line in files if file.parent != Path(__file__).parent and file.is_file()]
        return message[:REASON] + (f" ({own[-1][0]}, line {own[-1][1]})" if own else "")
    except BaseException as worse:  # an error whose own words are broken
        return f"{type(error).__name__}, and {type(worse).__name__} when asked for its words"
