"""The size of the core: lines with docstrings, longest file, longest function, fields of a config.

    python -m benchmarks.size

The core is the folder ascent/core: the menu and the loop. The limits are 3,000 lines (`value`), no function over 60,
and 45 fields in Config and Algorithm together. The peer is the course's lecture, one file of 562 lines.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.common import close, show
from benchmarks.house import CORE, FUNCTION, config_fields, functions, lines_of, modules

FIELDS = 45
LECTURE = 562


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    core = {name: path for name, path in modules().items() if name.startswith("core.")}
    longest = {name: max(functions(path)) for name, path in core.items()}
    show(
        ["file", "lines", "longest function", "its lines"],
        [[name, str(lines_of(name)), longest[name][1].split(":")[-1], str(longest[name][0])] for name in core],
    )
    total, file = sum(map(lines_of, core)), max(map(lines_of, core))
    (function, where), count = max(longest.values()), config_fields()
    print(f"{total:,} lines; longest file {file}; longest function {function} ({where}); {count} fields")
    ok = total <= CORE and function <= FUNCTION and count <= FIELDS
    more = {"longest_file": file, "longest_function": function, "fields": count}
    return close("size", total, LECTURE, CORE, ok, **more)[1]


if __name__ == "__main__":
    sys.exit(main())
