"""Measure the structure of the package: the order of imports, cycles, duplicate names, lines of code.

    python -m benchmarks.house

`FOLDERS` is the order of imports: each folder may import only those before it. tests/test_structure.py checks every
import of the package against it, imports inside functions included. `value` is the number of lines of Python in the
package, `peer` that before its reorganization.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path

from benchmarks.common import ROOT, close, show

PACKAGE = ROOT / "ascent"


FOLDERS: dict[str, str] = {
    "core": "the algorithms and the training loop; imports nothing else of Ascent",
    "processes": "supervised processes, the user's code and state folder",
    "sandbox": "isolated execution of untrusted code",
    "ops": "operators: references in PyTorch, kernels in Triton and C",
    "models": "trainable models: small policies, causal LMs, LoRA, quantization, attention layouts, heads",
    "distributed": "torchrun ranks, replicas on a Ray cluster, weight transfer",
    "inference": "the generation engine: requests, scheduler, blocks, runners, remote engines",
    "training": "the learner: packing, micro-batches, optimizer state, captured updates, FSDP2",
    "tasks": "prompts and answer checking",
    "settings": "flags, files and keywords become a Config",
    "rewards": "reward functions on batches, judges",
    "environments": "environments, tools, tool-call formats, chat templates, agents",
    "server": "the OpenAI-compatible endpoint, sessions, the guard of routes, the relay",
    "rollout": "sends requests and returns Rollouts: conversations, agents, replicas",
    "oracle": "exact gradients, and bias and variance of any estimator, by enumeration",
    "runs": "the run folder: writer, reader, checkpoints, journal, alerts, trackers, display",
    "explain": "what each choice computes, in words and formulas",
    "build": "a config becomes a run: backends, pre-flight, trial timings, precision, model verification",
    "api": "train, resume, load",
    "workflows": "evaluate, sample, serve, export, pairs, labels, rounds, compare, plan, cluster, hub",
    "lab": "the local web application",
    "cli": "one file per command",
    "": "the names that users import",
    "__main__": "python -m ascent",
}
"""The folders and top-level modules of the package, in the order of imports: each may import only those before it."""

ADDING = {
    "an advantage": ("ascent/core/advantages.py", "ascent/explain/choices.py", "tests/core/test_advantages.py"),
    "a task": ("ascent/tasks/text/NAME.py", "ascent/tasks/__init__.py", "tests/tasks/test_text_tasks.py"),
    "a backend": ("ascent/build/NAME_backend.py", "ascent/build/backends.py"),
    "a figure": ("ascent/lab/figures/NAME/",),
    "a command": ("ascent/cli/NAME.py",),
}
"""The files that are touched to add a thing. tests/test_adding.py and tests/build/test_backends.py add one of each."""

BEFORE = 53_255
"""Lines of the package before it was reorganized in November 2026."""
LINES, CODE_LINES = 56_250, 39_900
"""A ratchet, of all lines and of lines of code (no docstrings, comments, blank lines): lower it when lines go."""
TOP, HOMES, TOUCHED, FUNCTION, CORE = 26, 30, 3, 60, 3_400
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


def folder_of(module: str) -> str:
    """The first part of a module's name."""
    return module.split(".")[0]


def wrong_imports(module: str, names: Iterable[str]) -> set[str]:
    """Those of the imported modules whose folder does not come before the module's own."""
    order, own = list(FOLDERS), folder_of(module)
    if own not in order:
        return set(names)
    allowed = {*order[: order.index(own)], own}
    return {name for name in names if folder_of(name) not in allowed}


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


def folders_graph() -> dict[str, set[str]]:
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
        if module.split(".")[0] not in ("models", "tasks", "rewards"):
            continue
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                if module in ("models.small_policies", "models.causal_lm") or methods & {
                    "draw",
                    "grade",
                    "held_out",
                    "train",
                }:
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
        if not module.endswith("_backend")
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


def code_lines_of(module: str) -> int:
    """Lines of code: without docstrings (attribute docstrings included), comments and blank lines."""
    source = modules()[module].read_text()
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


_NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def lines_by_folder(count: Callable[[str], int] = lines_of) -> Counter[str]:
    """Lines of Python by the first part of a module's name."""
    total: Counter[str] = Counter()
    for module in modules():
        total[folder_of(module)] += count(module)
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
    sizes, code = lines_by_folder(), lines_by_folder(code_lines_of)
    files = Counter(folder_of(name) for name in modules())
    show(
        ["folder", "files", "lines", "code", "holds"],
        [
            [name or "ascent", str(files[name]), f"{sizes[name]:,}", f"{code[name]:,}", holds]
            for name, holds in FOLDERS.items()
        ],
    )
    wrong = {m: bad for m, others in edges().items() if (bad := wrong_imports(m, others))}
    cycles, folder_cycles = circles(edges()), circles(folders_graph())
    unlisted = sorted({folder_of(name) for name in modules()} - set(FOLDERS))
    asked, doubled = kinds_asked(), homes()
    length, longest = max(pair for path in modules().values() for pair in functions(path))
    total, total_code = sum(sizes.values()), sum(code.values())
    touched = {what: len(where) for what, where in ADDING.items()}
    for what, where in ADDING.items():
        print(f"to add {what}: {', '.join(where)}")
    for label, rows in (
        ("imports against the order", [f"{m} -> {', '.join(sorted(bad))}" for m, bad in wrong.items()]),
        ("import cycles between modules", [" ".join(cycle) for cycle in cycles]),
        ("import cycles between folders", [" ".join(cycle) for cycle in folder_cycles]),
        ("isinstance tests of policies and tasks outside the backends", asked),
        ("public names with two definitions", [f"{name}: {', '.join(where)}" for name, where in doubled.items()]),
        (f"files over {LONG_FILE} lines", [f"{m}: {lines_of(m)}" for m in modules() if lines_of(m) > LONG_FILE]),
    ):
        print(f"\n{label}: {len(rows)}", *rows, sep="\n  ")
    measures = {
        "code_lines": total_code,
        "core_lines": sizes["core"],
        "top_level": len(top_level()),
        "wrong_imports": len(wrong),
        "cycles": len(cycles) + len(folder_cycles),
        "unlisted_folders": len(unlisted),
        "kinds_asked": len(asked),
        "names_with_two_definitions": len(doubled),
        "longest_function": length,
        "longest_is": longest,
        "config_fields": config_fields(),
        "touched": touched,
    }
    ok = (
        total <= LINES
        and total_code <= CODE_LINES
        and sizes["core"] <= CORE
        and len(top_level()) <= TOP
        and not (wrong or cycles or folder_cycles or unlisted or asked)
        and len(doubled) <= HOMES
        and length <= FUNCTION
        and max(touched.values()) <= TOUCHED
    )
    return close("house", total, BEFORE, LINES, ok, **measures)[1]


if __name__ == "__main__":
    sys.exit(main())
