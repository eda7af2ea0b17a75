"""The house: rooms, which way imports point, circles, names with two homes, and what adding a thing touches.

    python -m benchmarks.house

`MAY_IMPORT` is the one table of allowed imports: each room, what it holds, and the rooms that it may import.
tests/test_structure.py walks every import of the package against it, imports inside functions included.
`value` is the number of lines of Python in the package, `peer` that of the package before it had rooms.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import ROOT, close, show

PACKAGE = ROOT / "ascent"


class Room(NamedTuple):
    """A room of the package: what is in it, and which rooms it may import."""

    holds: str
    may_import: tuple[str, ...] = ()


_NUMBERS = ("core", "policies", "tasks", "settings")
_PLAYED = ("core", "policies", "tasks", "environments")
_MADE = (*_NUMBERS, "environments", "engines", "oracle", "explain")
_RUN = (*_MADE, "records", "rewards")
MAY_IMPORT: dict[str, Room] = {
    "core": Room("the menu and the loop: everything that decides the numbers"),
    "sandbox": Room("where code that nobody trusts runs: walls, jobs, verdicts"),
    "policies": Room("what is trained", ("core",)),
    "tasks": Room("prompts and verifiable rewards", ("core", "sandbox")),
    "settings": Room("flags, files and keywords into a Config", ("core", "policies", "tasks")),
    "environments": Room("what plays episodes: turns, tools, processes", ("core", "tasks", "sandbox")),
    "engines": Room("samplers and learners, one folder per kind of policy", ("core", "policies")),
    "engines.backends": Room("the list of backends", ("core", "policies", "tasks", "engines")),
    "engines.small.backend": Room("the backend of small policies", (*_PLAYED, "engines")),
    "engines.language.backend": Room("the backend of language models", (*_PLAYED, "engines")),
    "oracle": Room("exact gradients by enumeration", ("core", "policies", "tasks", "engines")),
    "explain": Room("what a choice computes: one About for each", _NUMBERS),
    "records": Room("the run folder, its metrics, the flags of a run, evaluation", _MADE),
    "web": Room("what listens: the guard of every route", ("core",)),
    "web.secret": Room("the secret of a lab, in the user's state folder", ("core", "records")),
    "web.relay": Room("a relay beside a serving engine", ("core", "engines", "web")),
    "web.wire": Room("the wire format of OpenAI's API", ("environments", "engines")),
    "web.open_sessions": Room("whose request it is", ("environments", "engines", "web")),
    "web.streams": Room("a turn as events", ("environments", "engines", "web")),
    "web.endpoint": Room("the endpoint: a policy that is asked over HTTP", ("core", "environments", "engines", "web")),
    "web.agents": Room("agents in training", (*_PLAYED, "engines", "web")),
    "rewards": Room("reward models, process rewards, judges", (*_MADE, "records", "web")),
    "assemble": Room("a config comes to life", _RUN),
    "launch": Room("a config comes to life on every rank", (*_RUN, "assemble")),
    "api": Room("train, resume, load", (*_RUN, "assemble", "launch")),
    "workflows": Room("what is done with runs: evaluate, sample, serve, pairs", (*_RUN, "web", "assemble", "api")),
    "lab": Room("the local web page", (*_RUN, "web", "assemble", "api", "workflows")),
    "cli": Room("one class per command", (*_RUN, "sandbox", "web", "assemble", "api", "workflows", "lab")),
    "__main__": Room("python -m ascent", ("cli",)),
    "": Room("the names that users import", ("core", "policies", "tasks", "records", "rewards", "api", "workflows")),
}
"""Each room, in order. A longer name is a narrower rule for that module; what a room holds may always import itself."""

ADDING = {
    "a credit": ("ascent/core/advantages.py", "ascent/explain/choices.py", "tests/test_advantages.py"),
    "a task": ("ascent/tasks/text/NAME.py", "ascent/tasks/__init__.py", "tests/test_text_tasks.py"),
    "an engine": ("ascent/engines/NAME/backend.py", "ascent/engines/backends.py"),
    "a figure": ("ascent/lab/figures/NAME/",),
    "a command": ("ascent/cli/NAME.py",),
}
"""The files that are touched to add a thing. tests/test_adding.py and tests/test_backends.py add one of each."""

BEFORE = 27_901
LINES = 53_720
"""A ratchet: lower it when lines go. It was 24,400 when the rooms were made; what came since raised it, knowingly: the
repairs of November 2026 and the hardening that followed (2,050), stop strings and limits per row (300), objects of
Python where names were (1,250), runs that are driven and notebooks (400), micro-batches by memory (150), environments,
tools and games (3,000), conversations that are seen, flagged and played by a person (900), mathematics and the hub
(600), the tail and predicted seconds (400), sampling ahead and its journal (490), serving engines and a relay to them
(2,170), the sandbox with its attempts to get out, verdicts on programs and the task of them (2,650), agents and their
bridges (1,170), ranks (1,200), `ascent plan` and `ascent cluster` (2,600), one GPU's second round: adapters, critics
and small updates in captured graphs, products of our own, optimizer state in bfloat16, precisions, 4 bits (3,150),
fewer passes on a CPU and kernels in C for it (560), streams and `ascent serve` with an engine (700), and their repairs;
repairs of turns, state, precision, verdicts, trust, limits and signals, and choices on the menu (1,050, less a matmul
in CUDA, 305, compatibility with earlier formats, known filters of templates, wrappers and BLAS on Arm, 295).
The core was 3,000; credit by turn and what prompts bring for it are 57, sampling ahead with its journal, the loop's own
matter, 95, the settings of ranks 15, and choices that TRL and verl have 93."""
TOP, HOMES, TOUCHED, FUNCTION, CORE = 20, 30, 3, 60, 3_265
LONG_FILE = 500


# ---- modules and imports ------------------------------------------------------------------------


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name below `ascent`; the package itself is the empty name."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(part for part in parts if part != "__init__")] = path
    return names


def imported(source: str) -> set[str]:
    """The package's modules that a source imports, at its head or inside a function."""
    known, names = modules(), set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            if path.split(".")[0] == "ascent":
                name = path.removeprefix("ascent").removeprefix(".")
                while name and name not in known:  # `from ascent.core.types import Batch` names a module and a class
                    name = name.rpartition(".")[0]
                names.add(name)
    return names


@cache
def edges() -> dict[str, frozenset[str]]:
    """Which modules each module imports."""
    return {name: frozenset(imported(path.read_text()) - {name}) for name, path in modules().items()}


def room_of(module: str) -> str | None:
    """The narrowest line of the table that covers a module."""
    name = module
    while name and name not in MAY_IMPORT:
        name = name.rpartition(".")[0]
    return name if name or not module else None


def wrong_imports(module: str, names: Iterable[str]) -> set[str]:
    """Those of the imported modules that the table does not allow."""
    room = room_of(module)
    if room is None:
        return set(names)
    own = module.split(".")[0]
    allowed = (room, *MAY_IMPORT[room].may_import) if room != own else (own, *MAY_IMPORT[room].may_import)
    return {n for n in names if not any(n == a or (a and n.startswith(f"{a}.")) for a in allowed)}


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The groups of nodes that reach one another (Tarjan's strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    loops: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            loop = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(loop) > 1:
                loops.append(sorted(loop))

    for node in graph:
        if node not in index:
            visit(node)
    return loops


def rooms_graph() -> dict[str, set[str]]:
    """Which rooms import which, by the first part of their names."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module, others in edges().items():
        room = module.split(".")[0]
        graph[room] |= {other.split(".")[0] for other in others} - {room}
    return graph


# ---- names, kinds, functions --------------------------------------------------------------------


def public_names(source: str) -> set[str]:
    """The public classes and functions that a module defines at its top level."""
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in parsed(source).body if isinstance(node, definitions)}
    return {name for name in names if not name.startswith("_")}


def homes() -> dict[str, list[str]]:
    """Public names that are defined in two or more modules, with those modules."""
    where: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for name in public_names(path.read_text()):
            where[name].append(module)
    return {name: sorted(places) for name, places in sorted(where.items()) if len(places) > 1}


def kinds() -> set[str]:
    """The classes that are kinds of policy or task: all of policies/, and what gives prompts or grades in tasks/."""
    bases: dict[str, set[str]] = {}
    classes: set[str] = set()
    for module, path in modules().items():
        if module.split(".")[0] not in ("policies", "tasks"):
            continue
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                if module.startswith("policies") or methods & {"draw", "grade", "held_out", "train"}:
                    classes.add(node.name)
    while True:
        more = {name for name, its in bases.items() if its & classes} - classes
        if not more:
            return classes
        classes |= more


def kind_tests(source: str, names: set[str]) -> Iterator[int]:
    """The lines of a source that ask what kind of policy or task something is."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            parts = [part for part in ast.walk(node.args[1]) if isinstance(part, ast.Name | ast.Attribute)]
            if names & {_last(part) for part in parts}:
                yield node.lineno


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def kinds_asked() -> list[str]:
    """Where kinds are asked for outside the backends, as module:line."""
    names = kinds()
    return [
        f"{module}:{line}"
        for module, path in modules().items()
        if not module.endswith(".backend")
        for line in kind_tests(path.read_text(), names)
    ]


def functions(path: Path) -> list[tuple[int, str]]:
    """Length in lines and name of every function of a file, decorators included."""
    lengths = [(0, "none")]
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lengths.append(((node.end_lineno or 0) - first + 1, f"{path.name}:{node.name}"))
    return lengths


def lines_of(module: str) -> int:
    return len(modules()[module].read_text().splitlines())


def lines_by_room() -> Counter[str]:
    """Lines of Python by the first part of a module's name."""
    total: Counter[str] = Counter()
    for module in modules():
        total[module.split(".")[0]] += lines_of(module)
    return total


def top_level() -> list[str]:
    """The files and the folders with Python that lie directly in the package."""
    return sorted(path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("**/*.py")))


def config_fields() -> int:
    from ascent.core.algorithms import Algorithm
    from ascent.core.config import Config

    return len(fields(Config)) - 1 + len(fields(Algorithm))


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    sizes, rooms = lines_by_room(), {name.split(".")[0] for name in modules()}
    files = Counter(name.split(".")[0] for name in modules())
    order = [name for name in MAY_IMPORT if "." not in name and name in rooms]
    show(
        ["room", "files", "lines", "holds"],
        [[name or "ascent", str(files[name]), f"{sizes[name]:,}", MAY_IMPORT[name].holds] for name in order],
    )
    wrong = {m: bad for m, others in edges().items() if (bad := wrong_imports(m, others))}
    loops, room_loops = circles(edges()), circles(rooms_graph())
    unchecked = sorted(name for name in rooms if name not in MAY_IMPORT)
    asked, doubled = kinds_asked(), homes()
    length, longest = max(pair for path in modules().values() for pair in functions(path))
    total, touched = sum(sizes.values()), {what: len(where) for what, where in ADDING.items()}
    for what, where in ADDING.items():
        print(f"to add {what}: {', '.join(where)}")
    for label, rows in (
        ("imports against the table", [f"{m} -> {', '.join(sorted(bad))}" for m, bad in wrong.items()]),
        ("circles between modules", [" ".join(loop) for loop in loops]),
        ("circles between rooms", [" ".join(loop) for loop in room_loops]),
        ("kinds asked for outside the backends", asked),
        ("public names with two homes", [f"{name}: {', '.join(where)}" for name, where in doubled.items()]),
        (f"files over {LONG_FILE} lines", [f"{m}: {lines_of(m)}" for m in modules() if lines_of(m) > LONG_FILE]),
    ):
        print(f"\n{label}: {len(rows)}", *rows, sep="\n  ")
    measures = {
        "rooms": len(order),
        "core_lines": sizes["core"],
        "top_level": len(top_level()),
        "wrong_imports": len(wrong),
        "circles": len(loops) + len(room_loops),
        "unchecked_rooms": len(unchecked),
        "kinds_asked": len(asked),
        "names_with_two_homes": len(doubled),
        "longest_function": length,
        "longest_is": longest,
        "config_fields": config_fields(),
        "touched": touched,
    }
    ok = (
        total <= LINES
        and sizes["core"] <= CORE
        and len(top_level()) <= TOP
        and not (wrong or loops or room_loops or unchecked or asked)
        and len(doubled) <= HOMES
        and length <= FUNCTION
        and max(touched.values()) <= TOUCHED
    )
    return close("house", total, BEFORE, LINES, ok, **measures)[1]


if __name__ == "__main__":
    sys.exit(main())
