"""Mutants (benchmarks/mutants): what is changed, what is left out, and which tests are run; on a tree of two files."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import mutants
from benchmarks.mutants import excluded, trials
from benchmarks.mutants.calls import Calls
from benchmarks.mutants.operators import Mutant, by_line, compiles, mutants_of
from benchmarks.mutants.trials import Trials
from tests.test_benchmarks import run

SOURCE = '''"""A file."""
LIMIT: int = 3


def most(values: list[int], least: int = 0) -> int:
    """The largest."""
    found = least
    for value in values:
        if value > found and not value == LIMIT:
            found = value
    return min(found, 100 - 1)


class One:
    def add(self, x):
        self.rows.append(x, key="a")
        assert x > 1
        raise ValueError(f"{x + 1} is no number")
'''


def changes(source: str) -> set[tuple[str, str]]:
    return {(m.old, m.new) for m in mutants_of("a.py", source)}


def test_operators_change_what_is_computed_and_never_words_annotations_or_assertions() -> None:
    made = mutants_of("ascent/a.py", SOURCE)
    assert all(compiles(mutant.apply(SOURCE)) and mutant.apply(SOURCE) != SOURCE for mutant in made)
    found = {(m.old, m.new) for m in made}
    assert found >= {
        ("value > found", "(value >= found)"),
        ("not value == LIMIT", "(value == LIMIT)"),
        ("value == LIMIT", "(value != LIMIT)"),
        ("100 - 1", "(100 + 1)"),
        ("3", "(2)"),
        ("0", "(1)"),
        ("min(found, 100 - 1)", "(max(found, 100 - 1))"),
        ("return min(found, 100 - 1)", "return None"),
        ('self.rows.append(x, key="a")', "pass"),
        ('self.rows.append(x, key="a")', "(self.rows.append(x))"),
    }
    assert not [m for m in made if "assert" in m.old or m.old == "x + 1" or "list[int]" in m.old or "largest" in m.old]
    assert {m.function for m in made} == {"", "most", "One.add"}
    assert changes("def f():\n    def g():\n        return not 1\n    return g\n") >= {("not 1", "(1)")}
    (inner,) = {m.function for m in mutants_of("a.py", "class A:\n  def f(self):\n    def g(): return x < y\n")}
    assert inner == "A.f.<locals>.g"


def test_every_mutant_of_a_real_file_replaces_the_node_that_it_names() -> None:
    """Bytes and characters are told apart: this file has signs that take several bytes."""
    path = Path(mutants.ROOT / "ascent/core/values.py")
    source = path.read_text()
    made = mutants_of("ascent/core/values.py", source)
    assert len(made) > 50 and len(dict(by_line(made))) > 20
    assert len({mutant.key for mutant in made}) == len(made)
    for mutant in made[::7]:
        assert source[mutant.start : mutant.end] == mutant.old
        ast.parse(mutant.apply(source))


def test_what_is_left_out_has_a_reason() -> None:
    kept, why = mutants.draw(5, 10, ["ascent/ops/__init__.py", "ascent/core/kl.py"])
    assert len({(m.path, m.line) for m in kept}) == 10 and "runs on a GPU alone" in why
    assert mutants.draw(5, 10, ["ascent/core/kl.py"])[0] == mutants.draw(5, 10, ["ascent/core/kl.py"])[0]
    for key in excluded.EQUIVALENT:
        path = key.partition("::")[0]
        known = {mutant.key for mutant in mutants_of(path, (mutants.ROOT / path).read_text())}
        assert key in known, "it is there no more"
    one = mutants_of("ascent/a.py", "CHUNK = 3\n")[0]
    assert excluded.reason_to_exclude(one, "CHUNK = 3") == "a constant that decides time or memory alone"
    abstract = mutants_of("ascent/a.py", "def f():\n    raise NotImplementedError\n")[0]
    assert excluded.reason_to_exclude(abstract, "") == "a method that every subclass replaces"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, text in {
        "ascent/__init__.py": "",
        "ascent/a.py": "def add(x, y):\n    while x < 0:\n        x += 1\n    return x + y\n\n\n"
        "def unused(x):\n    return x + 1\n",
        "tests/__init__.py": "",
        "tests/test_a.py": "from ascent.a import add\n\n\ndef test_add():\n    assert add(2, 1) == 3\n\n\n"
        "def test_negative():\n    assert add(-2, 1) == 1\n",
        "tests/test_broken.py": "def test_broken():\n    assert False\n",
        "conftest.py": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def mutant_of(root: Path, old: str, new: str) -> Mutant:
    (found,) = [
        m for m in mutants_of("ascent/a.py", (root / "ascent/a.py").read_text()) if (m.old, m.new) == (old, new)
    ]
    return found


@pytest.mark.slow
def test_a_mutant_is_caught_survives_or_never_ends(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that call its function run first; one that fails anyway notices nothing; the checkout stays as it is."""
    before = (tree / "ascent/a.py").read_bytes()
    calls = Calls(
        {
            "tests/test_a.py::test_add": {"ascent/a.py::add"},
            "tests/test_broken.py::test_broken": {"ascent/a.py::unused"},
        },
        {"tests/test_a.py::test_add": 0.1, "tests/test_broken.py::test_broken": 0.1},
    )
    made = Trials(tree, calls, 1, whole=False)
    try:
        caught = made.try_mutant(mutant_of(tree, "x + y", "(x - y)"))
        assert (caught.status, caught.test) == ("caught", "tests/test_a.py::test_add")
        other = made.try_mutant(mutant_of(tree, "x < 0", "(x <= 0)"))
        assert (other.status, other.test) == ("caught", "tests/test_a.py::test_negative"), "no call of it was recorded"
        assert other.stages == ["first callers", "tests that name it"]
        broken = made.try_mutant(mutant_of(tree, "x + 1", "(x - 1)"))
        assert broken.status == "survived" and broken.stages == ["first callers", "tests that name it"]
        assert not made.sound["tests/test_broken.py::test_broken"]
        monkeypatch.setattr(trials, "START", 8.0)
        calls.of["tests/test_a.py::test_negative"], calls.seconds["tests/test_a.py::test_negative"] = (
            {"ascent/a.py::add"},
            0.1,
        )
        assert made.try_mutant(mutant_of(tree, "x += 1", "pass")).status == "timeout"
        assert (made.folder / "0" / "ascent/a.py").read_bytes() == before
    finally:
        made.close()
    assert (tree / "ascent/a.py").read_bytes() == before and not made.folder.exists()


@pytest.mark.slow
def test_calls_are_recorded_by_test_and_in_processes_that_it_starts(tree: Path, tmp_path: Path) -> None:
    (tree / "tests/test_b.py").write_text(
        "import subprocess, sys\nfrom ascent.a import add\n\n\ndef test_one():\n    add(1, 2)\n\n\n"
        "def test_other():\n    code = 'from ascent.a import unused; unused(1)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    outcome = trials.record_calls(tree, tmp_path / "calls", ["tests/test_b.py"])
    assert outcome.status == 0, outcome.text
    calls = Calls.read(tmp_path / "calls")
    assert calls.of == {
        "tests/test_b.py::test_one": {"ascent/a.py::add"},
        "tests/test_b.py::test_other": {"ascent/a.py::unused"},
    }
    assert calls.callers("ascent/a.py", "unused") == ["tests/test_b.py::test_other"]
    assert len(calls.callers("ascent/a.py", "")) == 2


@pytest.mark.smoke
def test_two_mutants_are_tried_and_a_draw_goes_on_where_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    closing, _ = run("mutants", capsys, "--smoke", "--seed", "3")
    assert closing["drawn"] == 2 and closing["caught"] >= 1
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    tried: list[str] = []

    def try_mutant(_: Any, mutant: Mutant) -> trials.Verdict:
        tried.append(mutant.key)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return trials.Verdict("caught", "a test")

    monkeypatch.setattr(Trials, "try_mutant", try_mutant)
    flags = ["--seed", "1", "--count", "5", "--paths", "ascent/core/*.py", "--jobs", "1"]
    with pytest.raises(KeyboardInterrupt):
        mutants.main(flags)
    known = json.loads((tmp_path / "mutants_1.json").read_text())["mutants"]
    capsys.readouterr()
    tried[:] = ["", "", ""]
    closing, _ = run("mutants", capsys, *flags)
    assert closing["ok"] and len(known) == 2 and len(set(tried[3:])) == 3
    assert not {one["key"] for one in known} & set(tried)
    assert "| 1 | 5 | 5 | 100% |" in (tmp_path / "mutants.md").read_text()
