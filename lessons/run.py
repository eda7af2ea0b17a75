"""Run lessons from top to bottom, as a reader would: python lessons/run.py 03 (or several, or all).

A page's Python blocks share one namespace, its commands one empty folder. The output of a block must equal the
text or table right below it; the lines shown below a command must be part of its output.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascent.cli.main import main as command

HERE = Path(__file__).parent
PAGES = sorted(path for path in HERE.glob("*.md") if path.stem != "README")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its kind, its text, and the output that the page shows right below it."""

    kind: str
    text: str
    line: int
    shown: str


def blocks(page: str) -> list[Block]:
    return [Block(m[1], m[2], page[: m.start()].count("\n") + 1, _shown(page[m.end() :])) for m in FENCE.finditer(page)]


def _shown(below: str) -> str:
    """Return the text block or the table that follows directly."""
    text = re.match(r"\n\n```text\n(.*?)^```$", below, re.MULTILINE | re.DOTALL)
    table = re.match(r"\n\n((?:\|.*\n)+)", below)
    return text[1] if text else table[1] if table else ""


def words(text: str) -> str:
    return " ".join(text.split())


def run_block(block: Block, names: dict[str, Any], file: str) -> str:
    """Run a block, compare its output with the page, and return it; a command has to succeed."""
    out = io.StringIO()
    where = f"{file}, line {block.line}"
    with contextlib.redirect_stdout(out):
        if block.kind == "python":
            exec(compile("\n" * block.line + block.text, file, "exec"), names)
        for line in block.text.splitlines() if block.kind == "console" else ():
            program, *args = shlex.split(line)
            if program != "ascent" or command(args) != 0:
                raise AssertionError(f"{where}: this command failed: {line}")
    printed = out.getvalue()
    if block.kind == "python" and printed and printed != block.shown:
        raise AssertionError(f"{where}: the page shows\n{block.shown}\nbut the code prints\n{printed}")
    for line in block.shown.splitlines() if block.kind == "console" else ():
        if words(line) not in words(printed):
            raise AssertionError(f"{where}: the command does not print: {line}")
    return printed


def run_page(path: Path, folder: Path) -> None:
    """Run every block of a page in this folder."""
    names: dict[str, Any] = {"__name__": "lesson"}
    with contextlib.chdir(folder):
        for block in blocks(path.read_text()):
            run_block(block, names, str(path))


def main(wanted: list[str]) -> int:
    chosen = [path for path in PAGES if not wanted or any(path.name.startswith(w) for w in wanted)]
    for path in chosen:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
            run_page(path, Path(folder))
        print(f"{path.stem}: passed, {time.perf_counter() - begin:.1f} s")
    return 0 if chosen else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
