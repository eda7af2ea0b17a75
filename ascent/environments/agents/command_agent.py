"""An agent that is a program, started in the process of its episode.

Environment variables describe the episode:

    ASCENT_BASE_URL, ASCENT_API_KEY     the endpoint and the session's key; also as OPENAI_BASE_URL, OPENAI_API_KEY
    ASCENT_PROBLEM                      JSON: prompt, answer, messages, columns
    ASCENT_PROBLEM_FILE                 a file with the same, in place of it, if it is too long for a variable
    ASCENT_SEED, ASCENT_SECONDS         the episode's seed and deadline

and its last line on stdout may set the reward: {"reward": 1.0, "metrics": {"turns": 3}}. Without such a line the task
scores the last answer. A nonzero exit status makes the episode invalid.
"""

import json
import os
import random
import select
import shlex
import subprocess
import tempfile
from contextlib import suppress
from typing import IO, Any

from ascent.environments.agents.agent import Assignment
from ascent.environments.agents.agent_pool import format_outcome
from ascent.processes.channel import describe_exit
from ascent.processes.reward_calls import RewardCallError
from ascent.tasks.environment import Environment

MAX_VARIABLE_BYTES = 100_000
"""Bytes of a problem that fit into an environment variable."""
MAX_OUTPUT_BYTES = 1 << 16
"""Bytes at the end of its output that are kept."""
POLL_MILLISECONDS = 50
"""Time between two checks of whether the program has ended."""
MAX_ERROR_CHARS = 200
"""Characters of the last line of its output in an error."""


class CommandAgent(Environment):
    """One episode of a program; it is over when `begin` returns."""

    def __init__(self, command: str):
        self.words = shlex.split(command)

    def begin(self, problem: Any, rng: random.Random) -> str:
        assignment: Assignment = problem
        with tempfile.TemporaryFile() as file:
            variables = os.environ | _variables(assignment, file)
            process = subprocess.Popen(
                self.words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=variables,
                pass_fds=(file.fileno(),),
            )
            code, output, errors = _wait_for(process)
        if code != 0:
            last = (errors.split("\n")[-1] or output.split("\n")[-1])[-MAX_ERROR_CHARS:]
            raise RewardCallError(f"the program ended with {describe_exit(code)}" + (f": {last}" if last else ""))
        return format_outcome(_reward(output.split("\n")[-1]))


def _variables(assignment: Assignment, file: IO[bytes]) -> dict[str, str]:
    problem = assignment.problem
    content = problem.columns | {"prompt": problem.prompt, "answer": problem.answer, "messages": [*assignment.messages]}
    written = json.dumps(content, default=str)
    if len(written) > MAX_VARIABLE_BYTES:  # the file has no name, so it disappears with its readers
        file.write(written.encode())
        file.seek(0)
        variable = {"ASCENT_PROBLEM_FILE": f"/dev/fd/{file.fileno()}"}
    else:
        variable = {"ASCENT_PROBLEM": written}
    urls = {f"{name}_BASE_URL": assignment.url for name in ("ASCENT", "OPENAI")}
    keys = {f"{name}_API_KEY": assignment.key for name in ("ASCENT", "OPENAI")}
    return {
        **urls,
        **keys,
        **variable,
        "ASCENT_SEED": str(assignment.seed),
        "ASCENT_SECONDS": f"{assignment.seconds:g}",
    }


def _wait_for(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    """Wait for the program. Return its exit status and the end of its stdout and stderr, however long they are."""
    assert process.stdout is not None and process.stderr is not None
    kept = {stream.fileno(): b"" for stream in (process.stdout, process.stderr)}
    poll = select.poll()
    for file in kept:
        os.set_blocking(file, False)
        poll.register(file, select.POLLIN)
    alive, reading = True, set(kept)
    while alive and reading:  # what it leaves running may hold the pipes, so its end is looked for too
        poll.poll(POLL_MILLISECONDS)
        alive = process.poll() is None  # looked at first: what it wrote before is in the pipe
        for file in list(reading):
            with suppress(BlockingIOError):
                while part := os.read(file, MAX_OUTPUT_BYTES):
                    kept[file] = (kept[file] + part)[-MAX_OUTPUT_BYTES:]
                reading.remove(file)
                poll.unregister(file)
    output, errors = (part.decode(errors="replace").rstrip() for part in kept.values())
    return process.wait(), output, errors


def _reward(line: str) -> Any:
    """What the last line says; nothing, if it is not an object with a reward or metrics."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or not said.keys() & {"reward", "metrics"}:
        return None
    return {name: said[name] for name in ("reward", "metrics") if name in said}
