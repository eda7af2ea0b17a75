"""A session of Python: code is run, and what it prints and its last value come back. Names are kept until it ends."""

import ast
import contextlib
import io
import traceback
from collections.abc import Callable
from typing import Any

from ascent.processes.channel import Channel, ChannelClosedError

PRINTED = 20_000
"""Characters of one call's output that are kept."""
NAME = "<python>"


def serve_session(settings: dict[str, Any]) -> Callable[[Channel], None]:
    """What answers {"code": …} with {"text": …}. The modules of `imports` are loaded beforehand."""
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
        channel.write({"text": run_shown(code, scope)})


def run_shown(code: str, scope: dict[str, Any]) -> str:
    """What it printed, the value of its last expression, and the error that it ended with."""
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
    """Run the code. If its last statement is an expression, its value is returned."""
    tree = ast.parse(code, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NAME, "exec"), scope)
    return eval(compile(ast.Expression(last.value), NAME, "eval"), scope) if isinstance(last, ast.Expr) else None


def error_text(error: BaseException) -> str:
    """An error as Python prints it, without the lines that are ours."""
    try:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != NAME:
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace, limit=-5))
    except BaseException as worse:  # an error whose own words are broken
        return f"{type(error).__name__}, and {type(worse).__name__} when asked for its words\n"


class Output(io.TextIOBase):
    """Keeps the first characters of what is printed, and counts the others."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.kept = self.left_out = 0

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        part = text[: PRINTED - self.kept]
        if part:
            self.parts.append(part)
        self.kept += len(part)
        self.left_out += len(text) - len(part)
        return len(text)

    def text(self) -> str:
        more = f"… ({self.left_out:,} more characters)" if self.left_out else ""
        return "".join(self.parts) + more
