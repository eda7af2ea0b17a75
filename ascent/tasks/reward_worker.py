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
"""Maps the jobs of one call and its time limit to an answer for each job."""


class RewardSpec(NamedTuple):
    """What a worker needs to compute a reward: where the code is, and the fields of a task (None: a function)."""

    source: str
    """python:FILE:NAME, or MODULE:NAME for what can be imported."""
    settings: Mapping[str, Any] | None = None
    numbers: bool = False
    """A function of a small task: f(prompt, response) on lists of numbers."""
    sent: bytes | None = None
    """The pickled code, if it is an object of the owner without a file. It never comes from a run folder."""
    sandbox: tuple[Any, ...] | None = None
    """For sandbox:FILE:NAME: the fields of its `SandboxSettings`."""


def serve_rewards(channel: Channel) -> None:
    """Load the rewards, and compute one call after the other."""
    try:
        specs, code = unpickle_line(channel.read_bytes())
        CODE.update(code)
        calls = [_load(RewardSpec(*spec)) for spec in specs]
    except ChannelClosedError:
        return
    except BaseException as error:
        return channel.write({"error": describe_error(error)})
    channel.write({"ready": True})

    def compute_answers(call: tuple[float, Sequence[Sequence[Any]]]) -> dict[str, Any]:
        seconds, jobs = call
        return {"answers": calls[jobs[0][0]]([RewardJob(*job) for job in jobs], seconds)}

    answer_calls(channel, compute_answers)


def _load(spec: RewardSpec) -> ComputeAnswers:
    """Load the reward of python:FILE:NAME or MODULE:NAME, or the code that was sent: a function or a task."""
    if spec.sandbox is not None:
        return SandboxedReward(spec.source, SandboxSettings(*spec.sandbox))
    code = load_code(spec.source, spec.sent)
    if spec.settings is not None:
        task = object.__new__(code)  # the owner has checked its settings
        vars(task).update(spec.settings)
        task.prepare()
        return functools.partial(_grade, task)
    if spec.numbers:
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
    """Grade a response by the task itself."""
    (job,) = jobs
    problem = Problem(job.prompt, job.answer, dict(job.columns))
    value, strict, lenient, reason = task.grade(problem, job.response)
    number = read_number(value)
    return [
        {"value": number, "strict": bool(strict), "lenient": bool(lenient), "reason": str(reason)[:MAX_REASON_CHARS]}
    ]
