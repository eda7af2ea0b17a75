"""A tool that runs Python in a sandbox. Names are kept over the turns of an episode.

Each episode has a session: a job of a sandbox that all episodes share, forked from a process that is warm. Code that
crashes its session or takes too long ends it; the model reads so, and its next call begins a new one.
"""

import functools
import time

from ascent.sandbox.sandbox import JobEndedError, Sandbox, SandboxError, SandboxJob, SandboxLimits
from ascent.sandbox.sandboxed_reward import JOB_TIME_FRACTION, SandboxSettings

ENTRY_POINT = "ascent.sandbox.python_session:serve_session"
LOADED = "math random re collections itertools functools statistics fractions datetime json"
CALLS = 20
"""Calls of an episode that may take as long as one may: more computing ends its session."""


def python(code: str) -> str:  # noqa: ARG001 (it is what a model is told)
    """Runs Python code and shows what it prints and the value of its last line. Names are kept between calls.

    Args:
        code: Python code, for example: x = 12 * 7; print(x)
    """
    raise AssertionError("a session runs it")


@functools.cache
def shared_sandbox(settings: SandboxSettings) -> Sandbox:
    """The sandbox of all sessions. Episodes are forks of the process that has started it."""
    seconds = settings.seconds * JOB_TIME_FRACTION
    limits = SandboxLimits(seconds, settings.memory, cpu=CALLS * seconds)
    return Sandbox(
        ENTRY_POINT, limits, {"imports": LOADED.split()}, settings.kind, settings.readable, settings.packages
    )


class PythonSession:
    """The session of one episode: it begins with the first call."""

    def __init__(self, settings: SandboxSettings):
        self.settings = settings
        self.job: SandboxJob | None = None
        self.until = 0.0

    def begin_turn(self) -> None:
        """All calls of a turn share its seconds."""
        self.until = time.monotonic() + self.settings.seconds * JOB_TIME_FRACTION

    def run(self, code: str) -> str:
        if self.job is None:
            self.job = shared_sandbox(self.settings).job()
        try:
            answer = self.job.ask({"code": code}, max(0.0, self.until - time.monotonic()))
            return str(answer["text"]) or "(nothing was printed)"
        except (JobEndedError, SandboxError, KeyError, TypeError) as error:
            self.close()
            why = str(error) if isinstance(error, JobEndedError | SandboxError) else "what it sent is no answer"
            return f"error: {why}. The session is over: names are gone, and the next call begins a new one"

    def close(self) -> None:
        if self.job is not None:
            self.job.close()
            self.job = None
