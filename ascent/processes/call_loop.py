"""Numbered calls of a process, answered one after the other.

Nobody can guess the number of a call, so an answer with another number was written by something else: a thread or a
child that an earlier call left behind.
"""

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from ascent.processes.channel import Channel, ChannelClosedError, pickle_line, unpickle_line
from ascent.processes.reward_calls import describe_error

NUMBER_LENGTH = 16


def number_call(call: Any) -> tuple[str, bytes]:
    """Return a new call number and the line that makes this call."""
    number = secrets.token_hex(NUMBER_LENGTH // 2)
    return number, number.encode() + pickle_line(call)


def answer_calls(channel: Channel, compute_answer: Callable[[Any], dict[str, Any]]) -> None:
    """Answer calls until the channel is closed. The answer to a call that raises is {"error": …}."""
    process = os.getpid()
    while True:
        try:
            line = channel.read_bytes()
        except ChannelClosedError:
            return
        start = time.monotonic()
        try:
            answer = compute_answer(unpickle_line(line[NUMBER_LENGTH:]))
        except BaseException as error:  # also SystemExit: user code does not end this process
            answer = {"error": describe_error(error)}
        if os.getpid() != process:  # a child that the user code forked, and that returned from it too
            os._exit(0)
        channel.write({"number": line[:NUMBER_LENGTH].decode(), "seconds": time.monotonic() - start, **answer})
