"""The process that computes rewards, seen from inside."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ascent.processes.call_loop import answer_calls
from ascent.processes.channel import Channel, ChannelClosedError, unpickle_line
from ascent.processes.reward_calls import (
    MAX_REASON_CHARS,
    RewardCallError,
    RewardJob,
    compute_rewards,
    describe_error,
    new_event_loop,
    parse_reward,
    parse_reward_signature,
    read_number,
)
from ascent.processes.user_code import CODE, load_code
from ascent.sandbox.sandboxed_reward import SandboxedReward, SandboxSettings
from ascent.tasks.text.text_task import Problem

ComputeAnswers = Callable[[Sequence[RewardJob], float], list[dict[str, Any]]]
"""From jobs of one call, and the seconds that it may take, to an answer for each."""


class RewardSpec(NamedTuple):
    """What a process needs to compute a reward: where the code is, and a task's fields (None: a plain function)."""

    source: str
    """python:FILE:NAME, or MODULE:NAME for what can be imported."""
    settings: Mapping[str, Any] | None = None
    numbers: bool = False
    """A function of a small task: f(prompt, response) on lists of numbers."""
    sent: bytes | None = None
    """The code itself, where it is an object of the parent's and lies in no file: pickled there, for this process
    alone. It never comes from a run folder."""
    sandbox: tuple[Any, ...] | None = None
    """Of sandbox:FILE:NAME: its `SandboxSettings`."""


def serve_rewards(channel: Channel) -> None:
    """Load the graders, and compute one call after the other."""
    try:
        graders, code = unpickle_line(channel.read_bytes())
        CODE.update(code)
        calls = [_load(RewardSpec(*grader)) for grader in graders]
    except ChannelClosedError:
        return
    except BaseException as error:
        return channel.write({"error": describe_error(error)})
    channel.write({"ready": True})

    def compute_answers(call: tuple[float, Sequence[Sequence[Any]]]) -> dict[str, Any]:
        seconds, jobs = call
        return {"answers": calls[jobs[0][0]]([RewardJob(*job) for job in jobs], seconds)}

    answer_calls(channel, compute_answers)


def _load(grader: RewardSpec) -> ComputeAnswers:
    """The reward of python:FILE:NAME or MODULE:NAME, or what was sent: a function, or a task with these settings."""
    if grader.sandbox is not None:
        return SandboxedReward(grader.source, SandboxSettings(*grader.sandbox))
    code = load_code(grader.source, grader.sent)
    if grader.settings is not None:
        task = object.__new__(code)  # its settings were checked by the parent: nothing is read or checked again
        vars(task).update(grader.settings)
        task.prepare()
        return functools.partial(_grade, task)
    if grader.numbers:
        return functools.partial(_numbers, code)
    call = parse_reward_signature(code)
    loop = new_event_loop(call)
    return lambda jobs, seconds: compute_rewards(call, jobs, loop, seconds)


def _numbers(function: Callable[..., Any], jobs: Sequence[RewardJob], _: float) -> list[dict[str, Any]]:
    """A reward function of a small task: f(prompt, response) on lists of numbers."""
    answers = [parse_reward(function(job.prompt, job.response)) for job in jobs]
    if any("skipped" in answer for answer in answers):
        raise RewardCallError("returned NoneType: a reward returns one number, or (number, reason)")
    return answers


def _grade(task: Any, jobs: Sequence[RewardJob], _: float) -> list[dict[str, Any]]:
    """The task's own check."""
    (job,) = jobs
    problem = Problem(job.prompt, job.answer, dict(job.columns))
    value, strict, lenient, reason = task.grade(problem, job.response)
    number = read_number(value)
    return [
        {"value": number, "strict": bool(strict), "lenient": bool(lenient), "reason": str(reason)[:MAX_REASON_CHARS]}
    ]
