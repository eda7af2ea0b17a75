"""The structure of the package: the order of imports, what a bare import loads, and how large it may grow.

The order of imports and everything that is measured come from `python -m benchmarks.house`.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import warnings

import pytest

from ascent.core.algorithms import ALGORITHMS, MENU, Algorithm
from ascent.core.menu import name_of
from ascent.models import POLICIES
from ascent.tasks import TASKS
from benchmarks import house

HEAVY = ("transformers", "vllm", "ray", "wandb", "rich", "pyarrow", "matplotlib", "datasets", "ascent.lab")
CORE = [name for name in house.modules() if name.startswith("core.")]


@pytest.mark.long
@pytest.mark.parametrize("module", house.modules())
def test_imports_point_one_way(module: str) -> None:
    wrong = house.wrong_imports(module, house.edges()[module])
    assert not wrong, f"{module or 'ascent'} may not import {', '.join(sorted(wrong))}"


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("core.types", "from ascent.models import Policy", {"models"}),
        (
            "core.loop",
            "def run():\n    from ascent.training.small_learner import SmallLearner",
            {"training.small_learner"},
        ),
        ("core.loop", "from ascent import api", {"api"}),
        ("inference.engine", "from ascent import tasks", {"tasks"}),
        ("training.small_learner", "from ascent.runs import run_reader", {"runs.run_reader"}),
        ("models.small_policies", "from ascent.training.small_learner import SmallLearner", {"training.small_learner"}),
        ("tasks.small.sorting", "from ascent.rewards.judge import Judge", {"rewards.judge"}),
        ("tasks.small.sorting", "from ascent.models import Policy", set()),
        ("runs.run", "from ascent.build.assemble import assemble", {"build.assemble"}),
        ("workflows.rounds", "import ascent.cli.main", {"cli.main"}),
        ("server.guard", "from ascent.lab import server", {"lab.server"}),
        ("a_new_folder", "from ascent.core import types", {"core.types"}),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str, wrong: set[str]) -> None:
    assert house.wrong_imports(module, house.imported(source)) == wrong


def test_nothing_imports_in_a_circle() -> None:
    assert house.circles(house.edges()) == []
    assert house.circles(house.folders_graph()) == []


def test_a_circle_is_seen() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"], "e": ["f"], "f": ["e"]}
    assert house.circles(graph) == [["a", "b", "c"], ["e", "f"]]


def test_every_folder_is_in_the_order_and_the_top_level_is_small() -> None:
    assert {house.folder_of(name) for name in house.modules()} <= set(house.FOLDERS)
    assert len(house.top_level()) <= house.TOP


def test_nobody_asks_what_kind_of_policy_or_task_it_is() -> None:
    assert house.kinds() >= {"CausalLM", "PerPosition", "TextTask", "Sort", "Policy", "Demonstrations"}
    assert list(house.kind_tests("isinstance(x, (int, TextTask))\nisinstance(x, int)", {"TextTask"})) == [1]
    assert house.kinds_asked() == []


def test_a_public_name_has_one_home() -> None:
    assert house.public_names("def read(): ...\nclass _Own: ...\nclass Table: ...\nX = 1") == {"read", "Table"}
    assert len(house.homes()) <= house.HOMES, house.homes()


def test_no_private_name_is_imported_from_another_module() -> None:
    for module, path in house.modules().items():
        for node in ast.walk(house.parsed(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ascent"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{module} imports {', '.join(private)} from {node.module}"


def test_no_core_file_names_a_heavy_package_at_its_head() -> None:
    """Inside a function such an import is on use, and fine."""
    for name in CORE:
        for node in house.parsed(house.modules()[name].read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] in HEAVY], name


IMPORTS = f"""
import sys, ascent, {", ".join(f"ascent.{name}" for name in CORE)}
print(*(name for name in {HEAVY!r} if name in sys.modules))
def first(*modules):  # imports these before the package itself, as if it were not there yet
    for name in [name for name in sys.modules if name.split(".")[0] == "ascent"]:
        del sys.modules[name]
    for name in modules:
        __import__(name)
    import ascent
    return ascent
ascent = first("ascent.api", "ascent.core.loop")
print(ascent.train.__module__, ascent.Run.__name__)
import ascent.lab.figures.training.trainings  # the lab starts it as a program
ascent = first("ascent.workflows.evaluate", "ascent.runs.held_out_evaluation")
print(ascent.evaluate.__module__, ascent.sample.__module__, ascent.export.__module__)
"""


@pytest.mark.long
def test_importing_ascent_brings_nothing_heavy_along_and_its_functions_are_there_whatever_came_first() -> None:
    """A fresh process, for pytest itself has imported much."""
    call = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(call, capture_output=True, text=True, cwd=house.ROOT, check=False)
    assert done.returncode == 0, done.stderr
    heavy, train, others = done.stdout.splitlines()
    assert heavy.split() == []
    assert train.split() == ["ascent.api", "Run"]
    assert others.split() == [
        "ascent.workflows.evaluate",
        "ascent.workflows.loaded_policy",
        "ascent.workflows.loaded_policy",
    ]


# ---- size -----------------------------------------------------------------------------------------


def test_the_core_is_read_in_one_sitting() -> None:
    assert house.lines_by_folder()["core"] <= house.CORE


@pytest.mark.long
def test_no_function_is_over_60_lines_and_a_file_over_500_is_worth_a_look() -> None:
    long = []
    for module, path in house.modules().items():
        length, name = max(house.functions(path))
        assert length <= house.FUNCTION, f"{module}: {name} has {length} lines"
        if house.lines_of(module) > house.LONG_FILE:
            long.append(module)
    if long:
        warnings.warn(f"over {house.LONG_FILE} lines, is each one idea? {', '.join(long)}", stacklevel=1)


def test_the_package_does_not_grow() -> None:
    """A ratchet: a new feature that needs more lines says so there."""
    assert sum(house.lines_by_folder().values()) <= house.LINES
    assert sum(house.lines_by_folder(house.code_lines_of).values()) <= house.CODE_LINES


def test_a_run_is_at_most_45_fields() -> None:
    assert house.config_fields() <= 45


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
