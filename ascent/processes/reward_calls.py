"""How a reward function is called, according to its signature, and what it may return.

    f(prompt, response, answer, **columns) -> number          one response; parameters by name in any order, or these
                                                              three by position
    f(prompts, responses, answers, **columns) -> list         a whole group, marked with @ascent.batch
    f(completions, prompts, **columns) -> list                a whole group, as TRL calls it

Any of them may be `async`. A reward is a number or (number, reason); None means that it does not apply to this row.
Reward workers import this module, so it does not import torch, and imports asyncio lazily.
"""

import functools
import inspect
import math
import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

if TYPE_CHECKING:
    import asyncio

MAX_FLOAT32 = 3.4028234663852886e38
"""Largest finite float32; a larger reward would be infinite in the batch."""
MAX_REASON_CHARS = 300
"""Characters of a reason that are kept."""
REWARD_FORM = "a reward returns one number, (number, reason), or None where it does not apply to this row"
SINGLE_FORM, GROUP_FORM, TRL_FORM = (
    ("prompt", "response", "answer"),
    ("prompts", "responses", "answers"),
    ("prompts", "completions"),
)
"""The parameters of the three forms, without columns."""


class RewardJob(NamedTuple):
    """One reward to compute."""

    reward_index: int
    prompt: Any
    response: Any
    """Text, or a list of numbers."""
    answer: str | None
    columns: Mapping[str, Any]


class RewardCallError(Exception):
    """A function cannot be a reward, or did not return a reward."""


@dataclass(frozen=True)
class Reward:
    """A reward function and how to run it. It can still be called like the function."""

    function: Callable[..., Any]
    batch: bool = False
    """Whether it takes a whole group: f(prompts, responses, answers, **columns) -> list."""
    in_process: bool = False
    """Whether it runs in the training process, for objects that cannot be sent to another: a model on a GPU, a client.
    There it has no memory limit, only async functions have a time limit, and a crash ends the run."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@overload
def batch(function: Callable[..., Any]) -> Reward: ...
@overload
def batch(*, in_process: bool) -> Callable[[Callable[..., Any]], Reward]: ...
def batch(function: Callable[..., Any] | None = None, *, in_process: bool = False) -> Any:
    """Mark a reward function that takes a whole group at once: @ascent.batch, or @ascent.batch(in_process=True)."""
    if function is None:
        return functools.partial(Reward, batch=True, in_process=in_process)
    return Reward(function, batch=True, in_process=in_process)


@dataclass(frozen=True)
class RewardCall:
    """A reward function and the form of its signature."""

    function: Callable[..., Any]
    form: tuple[str, ...]
    """SINGLE_FORM, GROUP_FORM or TRL_FORM."""
    positional: tuple[str, ...] | None
    """The first three parameters, if they take the three of the form by position; None: all are passed by name."""
    names: frozenset[str] | None
    """Its parameter names; None: **columns takes any."""
    required: tuple[str, ...]
    """Columns that it requires."""
    is_async: bool

    @property
    def takes_group(self) -> bool:
        return self.form != SINGLE_FORM

    @property
    def takes_answer(self) -> bool:
        return self.positional is not None or self.names is None or bool(self.names & {"answer", "answers"})

    def call(self, jobs: Sequence[RewardJob]) -> Any:
        """Call the function for one response or for the group. An async function returns an awaitable."""
        if self.form == SINGLE_FORM:
            (job,) = jobs
            arguments: dict[str, Any] = {"prompt": job.prompt, "response": job.response, "answer": job.answer}
            columns = dict(job.columns)
        else:
            shared = [name for name in jobs[0].columns if all(name in job.columns for job in jobs)]
            columns = {name: [job.columns[name] for job in jobs] for name in shared}
            prompts, answers = [job.prompt for job in jobs], [job.answer for job in jobs]
            arguments = {"prompts": prompts, "responses": [job.response for job in jobs], "answers": answers}
            if self.form == TRL_FORM:
                arguments = {"prompts": prompts, "completions": [_as_message(job) for job in jobs]}
                columns = {"answer": answers} | columns if any(a is not None for a in answers) else columns
        if self.positional is None:
            return self.function(**self._select(arguments | columns))
        return self.function(*arguments.values(), **self._select(columns))

    def _select(self, values: dict[str, Any]) -> dict[str, Any]:
        positional = self.positional or ()
        return {k: v for k, v in values.items() if k not in positional and (self.names is None or k in self.names)}

    def parse_result(self, returned: Any, count: int) -> list[dict[str, Any]]:
        """Return one answer per response from what the function returned."""
        if not self.takes_group:
            return [parse_reward(returned)]
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, list | tuple) or len(values) != count:
            got = f"{len(values)} values" if isinstance(values, list | tuple) else type(returned).__name__
            raise RewardCallError(
                f"returned {got} for a group of {count}: it takes a group, so it returns a list, one for each"
            )
        return [parse_reward(value) for value in values]

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise RewardCallError for a missing column, or a parameter that could mean a column or a position."""
        known = {*columns, *(["answer"] if self.form == TRL_FORM else [])}
        missing = [name for name in self.required if name not in known]
        available = ", ".join(sorted(known)) or "none besides the prompt and the answer"
        if missing:
            raise RewardCallError(
                f"it asks for {', '.join(missing)}, and the rows have no such column; their columns: {available}"
            )
        for place, name in zip(self.form, self.positional or (), strict=False):
            if name in columns:
                raise RewardCallError(
                    f"its parameter {name} is at the position of the {place}, and the rows have a column {name}: which "
                    f"is meant? Name its parameters {', '.join(self.form)} or like the columns"
                )


def parse_reward_signature(reward: Callable[..., Any]) -> RewardCall:
    """Parse the signature of a reward function; RewardCallError if it is ambiguous."""
    function, marked = (reward.function, reward.batch) if isinstance(reward, Reward) else (reward, False)
    is_async = any(map(inspect.iscoroutinefunction, (function, vars(type(function)).get("__call__"))))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise RewardCallError(
            "its signature cannot be read: wrap it in a function, f(prompt, response, answer)"
        ) from None
    kinds = {p.kind for p in signature.parameters.values()}
    places = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    only_placed = {p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY}
    named = {p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    form = TRL_FORM if "completions" in named else GROUP_FORM if marked else SINGLE_FORM
    if form == SINGLE_FORM and (plural := sorted(named & {*GROUP_FORM, "completion"})):
        raise RewardCallError(
            f"it has a parameter {plural[0]}: does it take one response or a group? f(prompt, response, answer) takes "
            "one; for a group, f(prompts, responses, answers), mark it with @ascent.batch"
        )
    enough = len(places) >= 3 or inspect.Parameter.VAR_POSITIONAL in kinds
    moved = [name for place, name in enumerate(places) if name in form and form.index(name) != place]
    positional = tuple(places[:3]) if form != TRL_FORM and enough and not moved else None
    if (only_placed - {*places[:3]}) or (positional is None and (only_placed or not named & {*form})):
        raise RewardCallError(
            f"it takes {signature}: name its parameters {', '.join(form)} (those that it needs) or like columns of the "
            "rows, or use the first three for these"
        )
    empty, variable = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in signature.parameters.values() if p.default is empty and p.kind not in variable]
    required = tuple(name for name in needed if name not in (positional or form))
    names = None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(named)
    return RewardCall(function, form, positional, names, required, is_async)


def _as_message(job: RewardJob) -> Any:
    """Return a response in TRL's form: an assistant message if the prompt is a chat."""
    return job.response if isinstance(job.prompt, str) else [{"role": "assistant", "content": job.response}]


def parse_reward(returned: Any) -> dict[str, Any]:
    """Return a number, (number, reason) or None as an answer; RewardCallError for anything else."""
    if returned is None:
        return {"skipped": True}
    value, reason = returned, ""
    if isinstance(returned, tuple | list):
        if len(returned) != 2 or isinstance(returned, list):
            raise RewardCallError(f"returned a {type(returned).__name__} of {len(returned)}: {REWARD_FORM}")
        value, reason = returned
    return {"value": read_number(value), "reason": str(reason)[:MAX_REASON_CHARS]}


def read_number(value: Any, form: str = REWARD_FORM) -> float:
    """Return a finite number; RewardCallError for anything else."""
    if not hasattr(type(value), "__float__"):
        raise RewardCallError(f"returned {type(value).__name__}: {form}")
    number = float(value)
    if not math.isfinite(number) or abs(number) > MAX_FLOAT32:
        raise RewardCallError(f"returned {number}: a reward is a finite number")
    return number


def new_event_loop(call: RewardCall) -> "asyncio.AbstractEventLoop | None":
    """Return an event loop for an async function, None for any other."""
    if not call.is_async:
        return None
    import asyncio

    return asyncio.new_event_loop()


def compute_rewards(
    call: RewardCall, jobs: Sequence[RewardJob], loop: "asyncio.AbstractEventLoop | None", seconds: float
) -> list[dict[str, Any]]:
    """Return the answers of a function to these jobs: one job, a group, or, if it is async, many concurrently."""
    if not call.is_async:
        if call.takes_group:
            return call.parse_result(call.call(jobs), len(jobs))
        return [answer for job in jobs for answer in call.parse_result(call.call([job]), 1)]
    import asyncio

    assert loop is not None
    parts = [jobs] if call.takes_group else [[job] for job in jobs]

    async def one(part: Sequence[RewardJob]) -> list[dict[str, Any]]:
        try:
            return call.parse_result(await asyncio.wait_for(call.call(part), seconds), len(part))
        except TimeoutError:
            return [{"error": f"took longer than {seconds:g} s"}] * len(part)
        except BaseException as error:
            return [{"error": describe_error(error)}] * len(part)

    async def every() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(one(part) for part in parts))

    return [answer for answers in loop.run_until_complete(every()) for answer in answers]


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates in text of user code, which no file encoding accepts."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def describe_error(error: BaseException) -> str:
    """Return the message of an error and, if user code raised it, its file and line."""
    try:
        if isinstance(error, RewardCallError):
            return str(error)[:MAX_REASON_CHARS]
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        files = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        package, library = Path(__file__).parents[1], Path(os.__file__).parent
        lines = [(file, n) for file, n in files if package not in file.parents and file.is_file()]
        user_lines = [line for line in lines if not {"site-packages", library} & {*line[0].parts, *line[0].parents}]
        if not lines:
            return message[:MAX_REASON_CHARS]
        file, number = (user_lines or lines)[-1]
        return f"{message[:MAX_REASON_CHARS]} ({file.name}, line {number})"
    except BaseException as worse:  # its __str__ raises
        return f"{type(error).__name__}, and {type(worse).__name__} in its message"
