"""The house: which way imports point, what a bare import brings along, and how large the core may grow."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from ascent.algorithms import ALGORITHMS, MENU, Algorithm
from ascent.config import Config
from ascent.menu import name_of
from ascent.policies import POLICIES
from ascent.tasks import TASKS

PACKAGE = Path(sys.modules["ascent.types"].__file__ or "").parent
AXES = ("advantages", "values", "losses", "kl", "weights", "reference", "correction", "exploration", "groups")
AXES = (*AXES, "update", "trust_region")
CORE = ("types", "config", *AXES, "algorithms", "train")
"""The files that the size budget counts: those of DESIGN's core. Names and settings are plumbing."""
HEAVY = ("transformers", "vllm", "ray", "wandb", "tyro", "rich", "pyarrow", "matplotlib", "datasets", "ascent.lab")

# A file may import what its own line names, and nothing else of the package. Where a line names a folder, all of it.
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "menu": {"types"},
    "own": {"types", "menu"},
    **{axis: {"types", *(other for other in AXES if other != axis)} for axis in AXES},
    "preferences": {"types", "menu", *AXES},
    "algorithms": {"types", "menu", *AXES, "policies.critics", "preferences"},
    "config": {"types", "menu", *AXES, "algorithms", "tasks", "policies"},
    "settings": {"types", "menu", "own", *AXES, "preferences", "algorithms", "config", "tasks", "policies"},
    "train": {"types", "menu", *AXES, "algorithms", "config", "engines.base", "tasks.base"},
    "tasks": {"types", "menu", "own", "tasks", "judge"},
    "judge": {"types", "menu", "judge"},
    "policies": {"types", "menu", "policies"},
    "policies.critics": {"types", "update", "values"},
    "engines": {"types", "update", "policies", "engines"},
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `ascent`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return {name: path for name, path in found.items() if name}


def imports(source: str) -> set[str]:
    """The package's modules that a source names in any import, at the top or inside a function."""
    found = set()
    known = modules()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "ascent" or name.startswith("ascent."):
                name = name.removeprefix("ascent").removeprefix(".")
                while name and name not in known:  # `from ascent.types import Batch` names a module and a thing in it
                    name = name.rpartition(".")[0]
                found.add(name)
    return found


def rule(module: str) -> set[str] | None:
    return MAY_IMPORT.get(module, MAY_IMPORT.get(module.split(".")[0]))


def wrong_imports(module: str, source: str) -> set[str]:
    allowed = rule(module)
    if allowed is None:
        return set()
    return {name for name in imports(source) if not any(name == a or name.startswith(f"{a}.") for a in allowed)}


@pytest.mark.parametrize("module", [name for name in modules() if rule(name) is not None])
def test_imports_point_one_way(module: str) -> None:
    wrong = wrong_imports(module, modules()[module].read_text())
    assert not wrong, f"{module} may not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("types", "from ascent.kl import k1", {"kl"}),
        ("losses", "from ascent.algorithms import GRPO", {"algorithms"}),
        ("algorithms", "def f():\n    import ascent.train", {"train"}),
        ("train", "from ascent.engines.local import LocalSampler", {"engines.local"}),
        (
            "train",
            "from ascent.cli import main" if "cli" in modules() else "from ascent import api",
            {"cli", "api", ""},
        ),
        ("engines.local", "from ascent.algorithms import Algorithm", {"algorithms"}),
        ("engines.local", "from ascent import tasks", {"tasks"}),
        ("policies.transformer", "from ascent.engines.base import Sampler", {"engines.base"}),
        ("tasks.sort", "from ascent.policies import Policy", {"policies"}),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, wrong: set[str]) -> None:
    found = wrong_imports(module, source)
    assert found
    assert found <= wrong


def test_the_axes_import_one_another_without_a_circle() -> None:
    known = modules()
    edges = {axis: imports(known[axis].read_text()) & set(AXES) for axis in AXES if axis in known}
    while edges:
        free = [axis for axis, needs in edges.items() if not needs & set(edges)]
        assert free, f"these import one another in a circle: {sorted(edges)}"
        for axis in free:
            del edges[axis]


def test_no_core_file_names_a_heavy_package_at_its_head() -> None:
    """Inside a function such an import is on use, and fine."""
    for name in CORE:
        path = modules().get(name)
        if path is None:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] in HEAVY], name


def test_importing_ascent_brings_nothing_heavy_along() -> None:
    """A fresh process, for pytest itself has imported much."""
    core = ", ".join(f"ascent.{name}" for name in CORE if name in modules())
    code = f"import sys, ascent, ascent.engines, {core}\nprint(' '.join(n for n in {HEAVY!r} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# ---- size -----------------------------------------------------------------------------------------


def lines(name: str) -> int:
    return len(modules()[name].read_text().splitlines())


def test_the_core_is_read_in_one_sitting() -> None:
    sizes = {name: lines(name) for name in CORE}
    # About 2,000 before critics and the trust region, which came with some 300 more.
    assert sum(sizes.values()) <= 2300, f"{sum(sizes.values())} lines: {sizes}"


@pytest.mark.parametrize("module", modules())
def test_no_file_is_over_300_lines_and_no_function_over_60(module: str) -> None:
    """The whole package keeps to it, not the core alone."""
    assert lines(module) <= 300
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 60, f"{module}.{node.name} has {length} lines"


def test_a_run_is_at_most_40_fields() -> None:
    assert len(dataclasses.fields(Config)) - 1 + len(dataclasses.fields(Algorithm)) <= 40


# ---- choices --------------------------------------------------------------------------------------

CHOICES = [(axis, cls) for axis, menu in MENU.items() for cls in menu] + [("policy", cls) for cls in POLICIES]


@pytest.mark.parametrize(("axis", "cls"), CHOICES, ids=lambda value: getattr(value, "__name__", value))
def test_a_choice_is_a_frozen_documented_dataclass_with_defaults(axis: str, cls: type) -> None:
    choice = cls()
    assert dataclasses.is_dataclass(choice)
    assert choice == cls()
    assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("), "dataclasses write that one themselves"
    for field in dataclasses.fields(choice):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(choice, field.name, None)


def test_names_are_unique_and_every_axis_is_a_field() -> None:
    for menu in (*MENU.values(), POLICIES, TASKS):
        names = [name_of(cls) for cls in menu]
        assert len(set(names)) == len(names)
    assert list(MENU) == [f.name for f in dataclasses.fields(Algorithm)]


def test_every_row_of_the_spec_is_there() -> None:
    assert set(ALGORITHMS) >= {
        *("reinforce", "reinforce-baseline", "best-only", "rloo", "reinforce++"),
        *("grpo", "dr-grpo", "dapo", "gspo", "cispo"),
        *("actor-critic", "ppo", "trpo"),
        *("sft", "dpo", "reward-model", "process-reward"),
    }
