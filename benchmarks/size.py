"""The size of the core: lines with docstrings, longest file, longest function, fields of a config.

    python -m benchmarks.size

The core is the menu and the loop: the files below. STYLE's figures: about 2,000 lines in all (`value`; the
limit is 2,300 since critics and the trust region came), no file over 300, no function over 60, at most 40
fields in Config and Algorithm together. The peer is the course's lecture, one file of 562 lines.
"""

from __future__ import annotations

import argparse
import ast
import sys
from dataclasses import fields
from pathlib import Path

import ascent
from ascent.algorithms import Algorithm
from ascent.config import Config
from benchmarks.common import close, show

CORE = "types config advantages values losses kl weights reference correction exploration groups update trust_region"
CORE += " algorithms train"
LINES, FILE, FUNCTION, FIELDS = 2_300, 300, 60, 40
LECTURE = 562


def functions(path: Path) -> list[tuple[int, str]]:
    """Length in lines and name of every function of a file, decorators included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found.append((node.end_lineno - first + 1, f"{path.name}:{node.name}"))
    return found


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    package = Path(ascent.__file__).parent
    paths = [package / f"{name}.py" for name in CORE.split()]
    lengths = {path.name: len(path.read_text().splitlines()) for path in paths}
    longest = {path.name: max(functions(path), default=(0, "none")) for path in paths}
    show(
        ["file", "lines", "longest function", "its lines"],
        [[name, str(lengths[name]), longest[name][1].split(":")[-1], str(longest[name][0])] for name in lengths],
    )
    total, file = sum(lengths.values()), max(lengths.values())
    function, where = max(longest.values())
    count = len(fields(Config)) + len(fields(Algorithm))
    print(f"{total:,} lines; longest file {file}; longest function {function} ({where}); {count} fields")
    ok = total <= LINES and file <= FILE and function <= FUNCTION and count <= FIELDS
    more = {"longest_file": file, "longest_function": function, "fields": count}
    return close("size", total, LECTURE, LINES, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())
