"""The public interface: `from ascent import …` gives every name it promises, and importing it stays light."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ascent
from ascent.core.algorithms import MENU
from ascent.rewards.reward_manager import self_test
from ascent.settings import configure


@pytest.mark.parametrize("name", ascent.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(ascent, name)
    assert value is not None and name in dir(ascent)
    assert getattr(value, "__name__", name) == name, "it is public under the name that it was defined with"


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    tree = ast.parse(Path(ascent.__file__).read_text())
    checking = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in checking.body if isinstance(node, ast.ImportFrom)]
    assert {a.name: node.module for node in imports for a in node.names} == {
        name: f"ascent.{module}" for name, module in ascent._HOME.items()
    }


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ascent.no_such_name


def test_every_axis_of_the_menu_has_a_public_base_class() -> None:
    assert len(set(ascent.__all__)) == len(ascent.__all__)
    public = {getattr(ascent, name) for name in ascent.__all__ if isinstance(getattr(ascent, name), type)}
    assert [axis for axis, menu in MENU.items() if not any(set(cls.__mro__) & public for cls in menu)] == []


def test_the_choice_that_the_page_of_the_menu_shows_works(tmp_path: Path) -> None:
    """Its code block, as a file, chosen on the command line with its field set."""
    page = (Path(__file__).parent.parent / "docs" / "menu.md").read_text()
    block = re.search(r"```python\n(# my_advantage\.py.*?)```", page, re.DOTALL)
    assert block is not None
    (tmp_path / "my_advantage.py").write_text(block[1])
    config = configure("sort", {"advantage": f"python:{tmp_path}/my_advantage.py:Scaled", "advantage.factor": 0.1})
    advantage = config.algorithm.advantage
    assert isinstance(advantage, ascent.Advantage) and advantage.factor == 0.1  # type: ignore[attr-defined]


def test_the_task_that_the_page_on_language_models_shows_works(tmp_path: Path) -> None:
    """Right answers pass its check, corrupted ones fail, and its test problems are not among the training problems."""
    page = (Path(__file__).parent.parent / "docs" / "language-models.md").read_text()
    block = re.search(r"```python\n(# my_task\.py.*?)```", page, re.DOTALL)
    assert block is not None
    (tmp_path / "my_task.py").write_text(block[1])
    config = configure(f"python:{tmp_path}/my_task.py:Doubling", {"policy.model": "unused"})
    task = config.task
    assert isinstance(task, ascent.TextTask) and task.grade(task.train(21), "42").strict
    assert task.grade(task.train(21), "It is 42") == ascent.Graded(0.5, False, True)
    assert not {p.prompt for p in task.test(50)} & {task.train(i).prompt for i in range(task.size or 0)}
    tested = self_test(task, 4)
    assert tested.ok, tested


def in_a_fresh_process(code: str) -> str:
    root = Path(ascent.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_ascent_imports_no_torch() -> None:
    heavy = ("torch", "numpy", "transformers", "matplotlib", "pyarrow", "rich")
    code = f"import sys, ascent\nprint(' '.join(name for name in {heavy!r} if name in sys.modules))"
    assert in_a_fresh_process(code) == ""


def test_writing_a_text_task_imports_no_torch() -> None:
    """Grading processes import a user's task file, which imports these names."""
    code = "import sys\nfrom ascent import TextTask, Problem, Graded\nprint('torch' in sys.modules)"
    assert in_a_fresh_process(code) == "False"


AS_THE_COMMAND = "from ascent.processes.torch_variables import *; set_torch_variables(); import os"


def test_importing_ascent_sets_no_environment_variables() -> None:
    code = "import os; before = dict(os.environ); import ascent, ascent.cli.main; print(dict(os.environ) == before)"
    assert in_a_fresh_process(code) == "True"


def test_the_command_sets_the_variables_before_it_imports_torch() -> None:
    code = (
        "import os, sys\nfrom ascent.cli.main import main\n"
        "assert 'torch' not in sys.modules\nmain(['--version'])\n"
        "print('torch' in sys.modules, 'MIMALLOC_PURGE_DECOMMITS' in os.environ)"
    )
    assert in_a_fresh_process(code).splitlines()[-1] == "True True"


def test_memory_that_is_freed_is_taken_back_only_where_it_is_short() -> None:
    """The allocator of torch's wheels for Arm reports its options; that of other wheels reports nothing."""
    code = f"{AS_THE_COMMAND}, torch; print(os.environ['MIMALLOC_PURGE_DECOMMITS'])"
    root, inherited = Path(ascent.__file__).parent.parent, os.environ.items()
    env = {name: value for name, value in inherited if not name.startswith("MIMALLOC_")} | {"MIMALLOC_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=env, check=True)
    assert done.stdout.strip() == "0"
    reported = re.findall(r"option 'purge_decommits': (\d)", done.stderr)
    assert reported == (["0"] if "mimalloc: option" in done.stderr else [])


@pytest.mark.parametrize(
    ("given", "looks"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
    ids=["nothing", "a number", "a policy"],
)
def test_threads_that_wait_soon_sleep_unless_the_user_says_otherwise(given: dict[str, str], looks: str) -> None:
    """Libgomp reports what it has read; torch's wheels for macOS have another library, which reports nothing."""
    root, mine = Path(ascent.__file__).parent.parent, ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if name not in mine}
    env |= {"OMP_DISPLAY_ENV": "verbose", **given}
    code = [sys.executable, "-c", f"{AS_THE_COMMAND}, torch"]
    done = subprocess.run(code, capture_output=True, text=True, cwd=root, env=env, check=True)
    reported = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert bool(reported) == (sys.platform == "linux")
    if given or os.uname().machine == "x86_64":
        assert set(reported) <= {looks}
