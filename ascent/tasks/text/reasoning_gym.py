"""Any task of reasoning-gym, by its name: generated from an index without end, scored by the data set's own function.

    reasoning-gym:chain_sum      --options '{"max_terms": 2, "max_digits": 1}'

The prompt asks to end with the answer, which even models can do that are too small for marks and tags. A response
that does is strictly right; leniently its last number, word or line counts (see `answers`). The data sets' own scores
pay many wrong answers a little: 0.5 for 17 instead of 7, because it contains it, and 0.01 for an empty one. So a score
below 1 counts as 0 unless `--partial` is set.

Stojanovski et al., Reasoning Gym: Reasoning Environments for Reinforcement Learning with Verifiable Rewards, 2025.
"""

import ast
import functools
import inspect
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

from ascent.core.errors import ConfigError
from ascent.core.menu import nearest
from ascent.tasks.base import error_line
from ascent.tasks.text.answer_checking import final_answer, lenient_answer, sole_number, strip_decoration
from ascent.tasks.text.table_tasks import import_optional
from ascent.tasks.text.text_task import INDICES, Generated, Graded, Problem

RIGHT = 1 - 1e-9
FUNCTIONS = frozenset(
    ["Abs", "Integral", "acos", "asin", "atan", "cos", "cosh", "exp", "ln", "log", "sin", "sinh", "sqrt", "tan", "tanh"]
)
"""Functions that an expression in an answer may call."""
PLAIN_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Call, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop),
    *(ast.List, ast.Tuple, ast.Dict),
)
"""What such an expression may consist of."""


@dataclass(frozen=True)
class ReasoningGym(Generated):
    """reasoning-gym:NAME: any of its tasks, generated without end."""

    instruction: str = "End with the answer."
    """Text appended to every prompt that says how to give the answer."""
    source: str = ""
    """Name of the data set. Short form: reasoning-gym:NAME."""
    options: str = ""
    """Parameters of the data set, as JSON: {"max_terms": 2}."""
    partial: bool = False
    """Use the data set's own score for answers that are not right; many pay for containing the right one."""

    @property
    def loophole(self) -> str | None:
        if not self.partial:
            return None
        return "the data set's own score pays for answers that are not right, many for merely containing the right one"

    def verify(self) -> None:
        gym = import_optional("reasoning_gym.factory", f"reasoning-gym:{self.source}", "gym")
        if not self.source:
            raise ConfigError("reasoning-gym needs a name: ascent train reasoning-gym:chain_sum")
        if self.source not in gym.DATASETS:
            raise ConfigError(
                (f"reasoning-gym:{self.source}: there is no such data set.") + nearest(self.source, gym.DATASETS)
            )
        try:
            options = json.loads(self.options or "{}")
        except ValueError as error:
            raise ConfigError(f"--options {self.options}: not valid JSON: {error}") from None
        if not isinstance(options, dict) or {"seed", "size"} & options.keys():
            raise ConfigError(
                f"--options {self.options}: an object of the data set's parameters, without seed and size"
            )
        try:
            self.make(0)
        except Exception as error:
            known = ", ".join(k for k in gym.DATASETS[self.source][1].__dataclass_fields__ if k not in ("seed", "size"))
            raise ConfigError(
                f"reasoning-gym:{self.source} cannot be made with --options {self.options or '{}'}: {error_line(error)}"
                f". Its options: {known}"
            ) from None
        super().verify()

    def make(self, index: int) -> Problem:
        entry = _entry(self.source, self.options, index)
        answer = entry["answer"]
        columns = {"metadata": entry["metadata"], "question": entry["question"]}
        return Problem(entry["question"], answer if answer is None else str(answer), columns)

    def prepare(self) -> None:
        _dataset(self.source, self.options)

    def grade(self, problem: Problem, response: str) -> Graded:
        stated = final_answer(response, problem.answer)
        strict = self._score(problem, stated)
        loosest = lenient_answer(response, problem.answer)
        loose = max(strict, self._score(problem, loosest))
        reason = f"answered {stated or loosest}"[:80]
        if self.partial:
            return Graded(max(strict, self.lenient * loose), strict >= RIGHT, loose >= RIGHT, reason)
        return self.graded(strict >= RIGHT, loose >= RIGHT, reason)

    def _score(self, problem: Problem, stated: str | None) -> float:
        """The data set's score of an answer: as it is, tidied, or as a plainly spelled number."""
        if not stated:
            return 0.0
        entry = {"question": problem.prompt, "answer": problem.answer, "metadata": problem.columns["metadata"]}
        spelled = dict.fromkeys(s for s in (stated, strip_decoration(stated), sole_number(stated)) if s)
        return max(_scored(_dataset(self.source, self.options)[0], s, entry) for s in spelled)

    def gold(self, problem: Problem) -> str | None:
        return None if problem.answer is None else f"Answer: {problem.answer}"


def _scored(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    """The data set's own score; an answer that makes it raise is wrong, because most parse before they compare."""
    how = _evaluates(type(dataset).__module__)
    if how and not is_plain_expression(answer, parsed=how == "sympy"):
        return 0.0
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:
        if entry["answer"] is not None:  # if the right answer passes, this answer is at fault
            dataset.score_answer(entry["answer"], entry)
        return 0.0


@functools.cache
def _evaluates(module: str) -> str:
    """Return how the data set of a module evaluates answers as code ("eval", "sympy"), or ""."""
    source = inspect.getsource(sys.modules[module])
    return "sympy" if "sympy" in source and "parse_expr(" in source else "eval" if "eval(" in source else ""


def is_plain_expression(answer: str, parsed: bool) -> bool:
    """Can this answer be evaluated without running code of the model? `parsed`: by SymPy, which rewrites it first."""
    try:
        nodes = list(ast.walk(ast.parse(answer.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return not parsed  # eval() fails on it as well
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    named = all(isinstance(call.func, ast.Name) and call.func.id in FUNCTIONS for call in calls)
    text = any(isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) for node in nodes)
    return named and not (text and (calls or parsed)) and all(isinstance(node, PLAIN_NODES) for node in nodes)


@functools.lru_cache(maxsize=8)
def _dataset(source: str, options: str) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """A data set, and what makes the problem of an index: itself, or one with that seed where its indices end early."""
    from reasoning_gym.factory import create_dataset

    create = functools.partial(create_dataset, source, **json.loads(options or "{}"))
    dataset = create(seed=0)
    try:
        dataset[INDICES - 1]
    except Exception:
        return dataset, lambda index: create(seed=index, size=1)[0]
    return dataset, dataset.__getitem__


@functools.lru_cache(maxsize=4096)
def _entry(source: str, options: str, index: int) -> dict[str, Any]:
    with redirect_stdout(StringIO()):  # some generators print
        return _dataset(source, options)[1](index)
