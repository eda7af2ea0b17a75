"""What it takes to add something: a copy of the package gets one in at most three files, and everything finds it.

An `Addition` says which files are edited, and which function of this file looks for the new thing in the copy. All
additions are made in one copy and looked for in one process. To prove another kind, add one to `ADDITIONS`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import Forked

HOUSE = Path(__file__).parents[1]
FILES = 3
"""The most that may be touched."""


@dataclass(frozen=True)
class Addition:
    """One more of something."""

    edits: dict[str, list[tuple[str, str]] | str]
    """For each file: where it is edited, a piece of text that is there once, and what stands in its place; or a new
    file's whole text."""
    check: Callable[[], None]
    """Run in the copy."""


def printed(*args: str) -> str:
    """What `ascent …` prints."""
    from ascent.cli.main import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*args]) == 0
    return out.getvalue()


def passed(files: list[str], keyword: str) -> dict[str, int]:
    """How many tests of each file are about this keyword, all of which must pass."""

    class Counts:
        calls: dict[str, int] = dict.fromkeys(files, 0)

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call":
                self.calls[report.location[0]] += 1

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", keyword, *files], plugins=[Counts()])
    assert code == 0, out.getvalue()
    return Counts.calls


# ---- a credit -------------------------------------------------------------------------------------------


def check_credit() -> None:
    """Its class with its bias, its About and its golden: the rest reads these."""
    from ascent.lab.figures import all_figures
    from ascent.settings import configure
    from tools.menu import with_menu

    assert configure("sort", {"advantage": "halved", "advantage.share": 0.25}).algorithm.advantage.share == 0.25
    page = printed("explain", "halved")
    assert "The reward minus a share of its group's mean." in page and "Bias: in length only, by the share" in page
    assert "\n  halved " in printed("list")
    page = Path("docs/menu.md").read_text()
    assert "halved (share)" in with_menu(page) and "halved (share)" not in page
    for name, control in (("trajectory", "advantage"), ("variance", "baseline"), ("training", "a.advantage")):
        controls = {c.name: c for c in all_figures()[name].controls}
        assert ("halved", "half of the mean") in controls[control].options  # type: ignore[union-attr]
    tests = ["tests/core/test_advantages.py", "tests/explain/test_explain.py", "tests/oracle/test_oracle.py"]
    tests += ["tests/test_settings.py"]
    counts = passed(tests, "halved")
    assert all(counts.values()), counts  # golden and properties; evaluated formula; exact gradient; settings


CREDIT = '''@dataclass(frozen=True)
class Halved(Advantage):
    """The reward minus a share of its group's mean.

    δ_i = R_i − share · mean
    Bias: in length only, by the share of the mean that is a response's own.
    """

    share: float = 0.5
    """How much of the mean is taken off."""

    def __call__(self, batch: Batch, state: State) -> Advantages:
        R, keep, n = _group(batch)
        return torch.where(keep & (n > 1), R - self.share * R.sum(1, keepdim=True) / n.clamp(min=1), 0.0)


ADVANTAGES = (Halved, '''
ABOUT = """ABOUTS: dict[type, About] = {
    advantages.Halved: About(
        formula="R_i − {share:g}·mean",
        statistics=f"mean is {GROUP}",
        words="the reward minus {share:g} of its group's mean",
        label="half of the mean",
        gradient="scaled",
        trl="none.",
        verl="none.",
    ),
"""
GOLDEN = """GOLDENS: dict[type, Any] = {
    advantages.Halved: (advantages.Halved(), {}, {}, [[-0.5, 0.5, 4.5], [2, 2, 2]]),  # half of 3 and of 4 less
"""

ADDITIONS = {
    "an advantage": Addition(
        {
            "ascent/core/advantages.py": [("ADVANTAGES = (", CREDIT)],
            "ascent/explain/choices.py": [("ABOUTS: dict[type, About] = {\n", ABOUT)],
            "tests/core/test_advantages.py": [
                ("GOLDENS: dict[type, Any] = {\n", GOLDEN),
                (
                    "from ascent.core.types import Batch\n",
                    "from ascent.core import advantages\nfrom ascent.core.types import Batch\n",
                ),
            ],
        },
        check_credit,
    ),
}


# ---- all of them, in one copy ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of each addition: "found", or what went wrong."""
    copy = tmp_path_factory.mktemp("house")
    for folder in ("ascent", "tests", "benchmarks", "tools"):
        shutil.copytree(HOUSE / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "docs").mkdir()
    for name in ("docs/menu.md", "pyproject.toml"):
        shutil.copy(HOUSE / name, copy / name)
    for addition in ADDITIONS.values():
        for name, edits in addition.edits.items():
            path = copy / name
            if isinstance(edits, str):
                assert not path.exists()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(edits)
                continue
            text = path.read_text()
            for place, instead in edits:
                assert text.count(place) == 1, f"{name} has {place!r} {text.count(place)} times"
                text = text.replace(place, instead)
            path.write_text(text)
    process = Forked(lambda: look_in(copy), tmp_path_factory.mktemp("output"), copy)
    assert process.wait(600) == 0, process.stderr
    result: dict[str, str] = json.loads(process.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("what", ADDITIONS)
def test_what_is_added_in_three_files_is_found(what: str, outcomes: dict[str, str]) -> None:
    assert len(ADDITIONS[what].edits) <= FILES
    assert outcomes[what] == "found", outcomes[what]


def look_in(copy: Path) -> None:
    """Look for all of them in a process that has torch loaded, and of this house only the copy."""
    libraries = Path(sys.prefix).resolve()

    def ours(path: str) -> bool:
        return Path(path).resolve().is_relative_to(HOUSE) and not Path(path).resolve().is_relative_to(libraries)

    here = [name for name, module in sys.modules.items() if ours(getattr(module, "__file__", None) or "/")]
    rooms = ("ascent", "benchmarks", "tests", "tools")
    for name in [*here, *(name for name in sys.modules if name.split(".")[0] in rooms)]:
        sys.modules.pop(name, None)
    sys.meta_path = [finder for finder in sys.meta_path if "jaxtyping" not in type(finder).__module__]
    others = [path for path in sys.path if path and not ours(path)]
    sys.path, os.environ["PYTHONPATH"] = [str(copy / "tests"), str(copy), *others], str(copy)
    sys.path_importer_cache.clear()
    runpy.run_path("tests/test_adding.py", run_name="__main__")
    assert Path(sys.modules["ascent"].__file__ or "").is_relative_to(copy)


def main() -> None:
    """Run in the copy: look for each addition."""
    found = {}
    for what, addition in ADDITIONS.items():
        try:
            addition.check()
            found[what] = "found"
        except Exception:
            found[what] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
