"""A Python session: runs code and returns its output and last value. Names are kept until the session ends."""

import ast
import contextlib
import io
import traceback
from collections.abc import Callable
from typing import Any

from ascent.processes.channel import Channel, ChannelClosedError

MAX_OUTPUT_CHARS = 20_000
"""Characters of the output of a call that are returned."""
FILE_NAME = "<python>"


def serve_session(settings: dict[str, Any]) -> Callable[[Channel], None]:
    """The entry point: jobs answer {"code": …} with {"text": …}. The modules of `imports` are loaded beforehand."""
    for name in settings.get("imports", ()):
        __import__(name)
    return answer_calls


def answer_calls(channel: Channel) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    while True:
        try:
            code = channel.read()["code"]
        except ChannelClosedError:
            return
        channel.write({"text": run_and_show(code, scope)})


def run_and_show(code: str, scope: dict[str, Any]) -> str:
    """Return what the code printed, the value of its last expression, and its error."""
    output = Output()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            value = run_code(code, scope)
            if value is not None:
                print(repr(value))
        except SystemExit:
            pass
        except BaseException as error:
            output.write(error_text(error))
    return output.text()


def run_code(code: str, scope: dict[str, Any]) -> Any:
    """Run the code and return the value of its last statement if that is an expression."""
    tree = ast.parse(code, FILE_NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, FILE_NAME, "exec"), scope)
    return eval(compile(ast.Expression(last.value), FILE_NAME, "eval"), scope) if isinstance(last, ast.Expr) else None


def error_text(error: BaseException) -> str:
    """Format an error as Python prints it, without our stack frames."""
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != FILE_NAME:
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace, limit=-5))
    except BaseException as worse:  # its __str__ raises
        return f"{type(error).__name__}, and {type(worse).__name__} in its message\n"


class Output(io.TextIOBase):
    """A stream that keeps the first characters and counts the others."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.num_kept = self.left_out = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        part = text[: MAX_OUTPUT_CHARS - self.num_kept]
        if part:
            self.parts.append(part)
        self.num_kept += len(part)
        self.left_out += len(text) - len(part)
        return len(text)

    def text(self) -> str:
        more = f"… ({self.left_out:,} more characters)" if self.left_out else ""
        return "".join(self.parts) + more
