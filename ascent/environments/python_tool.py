"""A tool that runs Python in a sandbox. Variables are kept during an episode.

Each episode has a session: a job in a sandbox that all episodes share, forked from a running process. Code that crashes
or takes too long ends its session. The model reads this as the result, and its next call starts a new session.
"""

import functools
import time

from ascent.sandbox.sandbox import JobEndedError, Sandbox, SandboxError, SandboxJob, SandboxLimits
from ascent.sandbox.sandboxed_reward import JOB_TIME_FRACTION, SandboxSettings

ENTRY_POINT = "ascent.sandbox.python_session:serve_session"
PRELOADED_MODULES = "math random re collections itertools functools statistics fractions datetime json"
CPU_BUDGET_CALLS = 20
"""CPU time of a session, as a multiple of the time limit of one call."""


def python(code: str) -> str:  # noqa: ARG001 (only its schema is used)
    """Runs Python code and shows what it prints and the value of its last line. Names are kept between calls.

    Args:
        code: Python code, for example: x = 12 * 7; print(x)
    """
    raise AssertionError("PythonSession.run runs this tool")


@functools.cache
def shared_sandbox(settings: SandboxSettings) -> Sandbox:
    """Return the sandbox of all sessions. Episodes are forks of the process that has started it."""
    seconds = settings.seconds * JOB_TIME_FRACTION
    limits = SandboxLimits(seconds, settings.memory, cpu=CPU_BUDGET_CALLS * seconds)
    return Sandbox(
        ENTRY_POINT, limits, {"imports": PRELOADED_MODULES.split()}, settings.kind, settings.readable, settings.packages
    )


class PythonSession:
    """The session of one episode. It starts with the first call."""

    def __init__(self, settings: SandboxSettings):
        self.settings = settings
        self.job: SandboxJob | None = None
        self.deadline = 0.0

    def begin_turn(self) -> None:
        """Start the time limit that all calls of a turn share."""
        self.deadline = time.monotonic() + self.settings.seconds * JOB_TIME_FRACTION

    def run(self, code: str) -> str:
        if self.job is None:
            self.job = shared_sandbox(self.settings).job()
        try:
            reply = self.job.ask({"code": code}, max(0.0, self.deadline - time.monotonic()))
            return str(reply["text"]) or "(nothing was printed)"
        except (JobEndedError, SandboxError, KeyError, TypeError) as error:
            self.close()
            is_known = isinstance(error, JobEndedError | SandboxError)
            reason = str(error) if is_known else "it sent an invalid reply"
            return f"error: {reason}. The session is over: names are gone, and the next call begins a new one"

    def close(self) -> None:
        if self.job is not None:
            self.job.close()
            self.job = None
