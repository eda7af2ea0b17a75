"""Rewards in a sandbox, sandbox:FILE:NAME, for a file that is not trusted.

The file runs only in the sandbox, also to read the signature of its function. Each call is a separate job, which runs
the file first: the limits of a job include that, and nothing is kept from one call to the next. Reward workers import
this module, so it does not import torch.
"""

import base64
import functools
import os
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ascent.core.errors import ConfigError
from ascent.processes.channel import Channel, ChannelClosedError
from ascent.processes.reward_calls import (
    MAX_REASON_CHARS,
    RewardCall,
    RewardCallError,
    RewardJob,
    compute_rewards,
    describe_error,
    new_event_loop,
    parse_reward_signature,
)
from ascent.processes.user_code import load_code
from ascent.sandbox.allowed_packages import PackageError, allowed_packages
from ascent.sandbox.isolation import Isolation, IsolationError, choose_isolation
from ascent.sandbox.sandbox import JobEndedError, Sandbox, SandboxError, SandboxLimits

ENTRY_POINT = "ascent.sandbox.sandboxed_reward:serve_reward"
JOB_TIME_FRACTION = 0.9
"""Fraction of the time limit of a reward that its job has; the rest is for ending the job."""


class SandboxSettings(NamedTuple):
    """The isolation of a sandbox, and what its jobs may use and read."""

    kind: str = "auto"
    seconds: float = 10.0
    memory: float = 4.0
    """GiB; 0: no limit."""
    readable: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def make(self, entry_point: str, settings: dict[str, Any], *readable: str) -> Sandbox:
        limits = SandboxLimits(self.seconds * JOB_TIME_FRACTION, self.memory)
        return Sandbox(entry_point, limits, settings, self.kind, (*self.readable, *readable), self.packages)


def check_isolation(settings: SandboxSettings) -> Isolation:
    """Return the isolation of the code of this task. ConfigError if none works here."""
    try:
        isolation = choose_isolation(settings.kind)
    except IsolationError as error:
        raise ConfigError(
            f"--sandbox {settings.kind}: this machine cannot isolate untrusted code ({error}). Install bubblewrap, or "
            "use a machine with Landlock (Linux 5.13); `ascent sandbox check` says more. --sandbox none runs the code "
            "without isolation: set it only if you trust everything that the policy writes"
        ) from None
    missing = [path for path in settings.readable if not os.path.exists(path)]
    if missing:
        raise ConfigError(f"--sandbox-read {missing[0]}: there is no such file or folder")
    try:
        allowed_packages(settings.packages)
    except PackageError as error:
        raise ConfigError(f"--sandbox-packages: {error}") from None
    return isolation


# ---- outside --------------------------------------------------------------------------------------------------


class SandboxedReward:
    """A reward function in a sandbox, as a grading process calls it."""

    def __init__(self, source: str, settings: SandboxSettings):
        file, name = source.removeprefix("sandbox:").rsplit(":", 1)
        file = os.path.realpath(file)
        self.sandbox = settings.make(ENTRY_POINT, {"file": file, "name": name}, file)
        self.sandbox.start()

    def __call__(self, jobs: Sequence[RewardJob], seconds: float) -> list[dict[str, Any]]:
        sent = base64.b64encode(pickle.dumps([tuple(job) for job in jobs])).decode()
        try:
            with self.sandbox.job() as job:
                answer = job.ask({"jobs": sent, "seconds": seconds * JOB_TIME_FRACTION}, seconds * JOB_TIME_FRACTION)
        except JobEndedError as ended:
            raise RewardCallError(f"in its sandbox: {ended}") from None
        answers = answer.get("answers") if isinstance(answer, dict) else None
        if isinstance(answers, list) and len(answers) == len(jobs):
            return answers
        raise RewardCallError(
            str(answer.get("error"))[:MAX_REASON_CHARS] if isinstance(answer, dict) else "sent what is not a reward"
        )


def describe_sandboxed(source: str, settings: SandboxSettings) -> RewardCall:
    """Return how the function is called, read in the sandbox."""
    file = source.removeprefix("sandbox:").rsplit(":", 1)[0]
    return _describe(source, settings, os.stat(file).st_mtime_ns if os.path.exists(file) else 0)


@functools.lru_cache
def _describe(source: str, settings: SandboxSettings, changed: int) -> RewardCall:  # noqa: ARG001 (part of the cache's key)
    try:
        reward = SandboxedReward(source, settings._replace(seconds=max(settings.seconds, 10.0)))
    except (SandboxError, IsolationError) as error:
        raise RewardCallError(str(error)) from None
    try:
        with reward.sandbox, reward.sandbox.job() as job:
            described = job.ask({"describe": True})
            if "error" in described:
                raise RewardCallError(str(described["error"])[:MAX_REASON_CHARS])
            form, positional, names, required, is_async = described["call"]
    except (JobEndedError, ValueError, KeyError, TypeError) as error:
        raise RewardCallError(f"its signature cannot be read: {error}") from None
    known = None if names is None else frozenset(map(str, names))
    places = None if positional is None else tuple(map(str, positional))
    return RewardCall(_refuse_call, tuple(map(str, form)), places, known, tuple(map(str, required)), bool(is_async))


def _refuse_call(*_: Any, **__: Any) -> Any:
    raise AssertionError("a sandboxed reward runs only in its sandbox")


# ---- inside ---------------------------------------------------------------------------------------------------


def serve_reward(settings: dict[str, Any]) -> Callable[[Channel], None]:
    """The entry point. Packages that the file imports are loaded here, once; the file itself runs in each job."""
    text = Path(settings["file"]).read_text(errors="replace")
    for name in dict.fromkeys(re.findall(r"^[ \t]*(?:from|import)[ \t]+(\w[\w.]*)", text, re.MULTILINE)):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "ascent"}:
            with suppress(BaseException):  # the job that runs the file reports it
                import_module(name)

    def answer(channel: Channel) -> None:
        with suppress(ChannelClosedError):
            while True:
                channel.write(_answer(settings, channel.read()))

    return answer


def _answer(settings: dict[str, Any], question: dict[str, Any]) -> dict[str, Any]:
    try:
        call = parse_reward_signature(load_code(f"python:{settings['file']}:{settings['name']}"))
        if "describe" in question:
            names = None if call.names is None else sorted(call.names)
            return {"call": [call.form, call.positional, names, call.required, call.is_async]}
        jobs = [RewardJob(*job) for job in pickle.loads(base64.b64decode(question["jobs"]))]
        return {"answers": compute_rewards(call, jobs, new_event_loop(call), question["seconds"])}
    except BaseException as error:
        return {"error": describe_error(error)}
