"""How a reward function is called: what it asks for by its signature, and what it may return.

    f(prompt, response, answer, **columns) -> number          one response; parameters by name in any order, or these
                                                              three by place
    f(prompts, responses, answers, **columns) -> list         a whole group, marked with @ascent.batch
    f(completions, prompts, **columns) -> list                a whole group, as TRL calls it

Any of them may be `async`. A reward is a number or (number, reason); None means that it is not for this row. The
processes that compute rewards import this file, so it does without torch, and imports asyncio where it is needed.
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
"""Of a float32: what is larger would be infinite in the batch."""
MAX_REASON_CHARS = 300
"""Characters of a reason that are kept."""
REWARD_FORM = "a reward returns one number, (number, reason), or None where it is not for this row"
SINGLE_FORM, GROUP_FORM, TRL_FORM = (
    ("prompt", "response", "answer"),
    ("prompts", "responses", "answers"),
    ("prompts", "completions"),
)
"""The parameters of the three forms, beside columns."""


class RewardJob(NamedTuple):
    """One reward to compute."""

    grader: int
    prompt: Any
    response: Any
    """Words, or numbers."""
    answer: str | None
    columns: Mapping[str, Any]


class RewardCallError(Exception):
    """A function that cannot be a reward, or a value that is none."""


@dataclass(frozen=True)
class Reward:
    """A reward function and how it is to be run. It can still be called like the function."""

    function: Callable[..., Any]
    batch: bool = False
    """It takes a whole group at once: f(prompts, responses, answers, **columns) -> list."""
    in_process: bool = False
    """It runs in the process that trains, for what cannot be sent to another one: a model on a GPU, an open client.
    There it has no limit of memory, only an async function has one of time, and a crash ends the run."""

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
    """A function and the form of its signature."""

    function: Callable[..., Any]
    form: tuple[str, ...]
    """ONE, GROUP or TRL."""
    placed: tuple[str, ...] | None
    """The first three parameters, which take the three of the form by their place; None: all go by name."""
    names: frozenset[str] | None
    """The parameters that it has; None: **columns takes any."""
    required: tuple[str, ...]
    """Columns that it cannot do without."""
    awaited: bool

    @property
    def grouped(self) -> bool:
        return self.form != SINGLE_FORM

    @property
    def takes_answer(self) -> bool:
        return self.placed is not None or self.names is None or bool(self.names & {"answer", "answers"})

    def start(self, jobs: Sequence[RewardJob]) -> Any:
        """What the function returns (to be awaited, if it is async) for one response, or for the group."""
        if self.form == SINGLE_FORM:
            (job,) = jobs
            given: dict[str, Any] = {"prompt": job.prompt, "response": job.response, "answer": job.answer}
            columns = dict(job.columns)
        else:
            shared = [name for name in jobs[0].columns if all(name in job.columns for job in jobs)]
            columns = {name: [job.columns[name] for job in jobs] for name in shared}
            prompts, answers = [job.prompt for job in jobs], [job.answer for job in jobs]
            given = {"prompts": prompts, "responses": [job.response for job in jobs], "answers": answers}
            if self.form == TRL_FORM:
                given = {"prompts": prompts, "completions": [_as_message(job) for job in jobs]}
                columns = {"answer": answers} | columns if any(a is not None for a in answers) else columns
        if self.placed is None:
            return self.function(**self._asked(given | columns))
        return self.function(*given.values(), **self._asked(columns))

    def _asked(self, values: dict[str, Any]) -> dict[str, Any]:
        placed = self.placed or ()
        return {k: v for k, v in values.items() if k not in placed and (self.names is None or k in self.names)}

    def read(self, returned: Any, count: int) -> list[dict[str, Any]]:
        """What was returned, as one answer per response."""
        if not self.grouped:
            return [parse_reward(returned)]
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, list | tuple) or len(values) != count:
            got = f"{len(values)} values" if isinstance(values, list | tuple) else type(returned).__name__
            raise RewardCallError(
                f"returned {got} for a group of {count}: it takes a group, so it returns a list, one for each"
            )
        return [parse_reward(value) for value in values]

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse what the rows do not have, and a name that could be a column or a place."""
        known = {*columns, *(["answer"] if self.form == TRL_FORM else [])}
        missing = [name for name in self.required if name not in known]
        there = ", ".join(sorted(known)) or "none beside the prompt and the answer"
        if missing:
            raise RewardCallError(
                f"it asks for {', '.join(missing)}, and the rows have no such column; there are: {there}"
            )
        for place, name in zip(self.form, self.placed or (), strict=False):
            if name in columns:
                raise RewardCallError(
                    f"its parameter {name} stands where the {place} comes, and the rows have a column {name}: which is "
                    f"meant? Name its parameters {', '.join(self.form)} or as the columns"
                )


def parse_reward_signature(reward: Callable[..., Any]) -> RewardCall:
    """The form of a function by its signature; one that could be several is refused."""
    function, marked = (reward.function, reward.batch) if isinstance(reward, Reward) else (reward, False)
    awaited = any(map(inspect.iscoroutinefunction, (function, vars(type(function)).get("__call__"))))
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
    placed = tuple(places[:3]) if form != TRL_FORM and enough and not moved else None
    if (only_placed - {*places[:3]}) or (placed is None and (only_placed or not named & {*form})):
        raise RewardCallError(
            f"it takes {signature}: name its parameters {', '.join(form)} (those that it needs) or as columns of the "
            "rows, or let the first three stand for these"
        )
    empty, variable = inspect.Parameter.empty, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in signature.parameters.values() if p.default is empty and p.kind not in variable]
    required = tuple(name for name in needed if name not in (placed or form))
    names = None if inspect.Parameter.VAR_KEYWORD in kinds else frozenset(named)
    return RewardCall(function, form, placed, names, required, awaited)


def _as_message(job: RewardJob) -> Any:
    """A response as TRL has it: a message of the assistant where the prompt is a chat."""
    return job.response if isinstance(job.prompt, str) else [{"role": "assistant", "content": job.response}]


def parse_reward(returned: Any) -> dict[str, Any]:
    """A number or (number, reason), or None, as an answer; an error that says what it was instead."""
    if returned is None:
        return {"skipped": True}
    value, reason = returned, ""
    if isinstance(returned, tuple | list):
        if len(returned) != 2 or isinstance(returned, list):
            raise RewardCallError(f"returned a {type(returned).__name__} of {len(returned)}: {REWARD_FORM}")
        value, reason = returned
    return {"value": read_number(value), "reason": str(reason)[:MAX_REASON_CHARS]}


def read_number(value: Any, form: str = REWARD_FORM) -> float:
    """A finite number, or an error that says what it was instead."""
    if not hasattr(type(value), "__float__"):
        raise RewardCallError(f"returned {type(value).__name__}: {form}")
    number = float(value)
    if not math.isfinite(number) or abs(number) > MAX_FLOAT32:
        raise RewardCallError(f"returned {number}: a reward is a finite number")
    return number


def new_event_loop(call: RewardCall) -> "asyncio.AbstractEventLoop | None":
    """What an async function runs in; None for any other."""
    if not call.awaited:
        return None
    import asyncio

    return asyncio.new_event_loop()


def compute_rewards(
    call: RewardCall, jobs: Sequence[RewardJob], loop: "asyncio.AbstractEventLoop | None", seconds: float
) -> list[dict[str, Any]]:
    """The answers of a function to these jobs: one, a group, or, of an async function, many at the same time."""
    if not call.awaited:
        if call.grouped:
            return call.read(call.start(jobs), len(jobs))
        return [answer for job in jobs for answer in call.read(call.start([job]), 1)]
    import asyncio

    assert loop is not None
    parts = [jobs] if call.grouped else [[job] for job in jobs]

    async def one(part: Sequence[RewardJob]) -> list[dict[str, Any]]:
        try:
            return call.read(await asyncio.wait_for(call.start(part), seconds), len(part))
        except TimeoutError:
            return [{"error": f"took longer than {seconds:g} s"}] * len(part)
        except BaseException as error:
            return [{"error": describe_error(error)}] * len(part)

    async def every() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(*(one(part) for part in parts))

    return [answer for answers in loop.run_until_complete(every()) for answer in answers]


def replace_surrogates(words: str) -> str:
    """Words of somebody else's code as text: half a surrogate is none, and no file would take it."""
    return words.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def describe_error(error: BaseException) -> str:
    """What went wrong and, for an error in somebody's own code, in which line."""
    try:
        if isinstance(error, RewardCallError):
            return str(error)[:MAX_REASON_CHARS]
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        files = [(Path(f.filename), f.lineno) for f in traceback.extract_tb(error.__traceback__)]
        ours = Path(__file__).parents[1]
        own = [(file, line) for file, line in files if ours not in file.parents and file.is_file()]
        library = Path(os.__file__).parent
        own = [(file, n) for file, n in own if "site-packages" not in file.parts and library not in file.parents] or own
        return message[:MAX_REASON_CHARS] + (f" ({own[-1][0].name}, line {own[-1][1]})" if own else "")
    except BaseException as worse:  # an error whose own words are broken
        return f"{type(error).__name__}, and {type(worse).__name__} when asked for its words"
