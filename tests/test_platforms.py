"""Elsewhere: without the extras, on macOS as far as it can be tried without one, and on Windows, which is refused."""

from __future__ import annotations

import builtins
import os
import pkgutil
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ascent
from ascent.cli.main import main
from tests.processes import Forked
from tools.empty_environment import EXTRAS, FILES, NEEDS, WORKS

pytestmark = pytest.mark.slow
LINUX = {
    os: "sched_getaffinity sched_setaffinity pidfd_open memfd_create eventfd posix_fadvise getrandom splice",
    select: "epoll",
}
"""What macOS has not."""


class Without:
    """All finders but for these modules, which nobody finds: as if they were not installed."""

    def __init__(self, names: Iterable[str]):
        self.names, self.finders = set(names), list(sys.meta_path)

    def find_spec(self, name: str, *more: Any) -> Any:
        if name.partition(".")[0] in self.names:
            return None
        specs = (finder.find_spec(name, *more) for finder in self.finders)
        return next((spec for spec in specs if spec is not None), None)

    def find_distributions(self, *asked: Any) -> Iterator[Any]:
        for finder in self.finders:
            yield from getattr(finder, "find_distributions", lambda *_: ())(*asked)


def without(*names: str) -> None:
    """In this process these modules are not installed, and Ascent is not loaded yet."""
    sys.meta_path[:] = [Without(names)]
    for name in [name for name in sys.modules if name.partition(".")[0] in {"ascent", *names}]:
        del sys.modules[name]


def ended(program: Callable[[], Any], folder: Path) -> Forked:
    child = Forked(program, folder / "out", folder)
    child.wait()
    return child


def as_installed_without_extras() -> int:
    """Commands, and objects of Python, in a process without the extras; each says how it ended."""
    without(*" ".join(EXTRAS.values()).split())
    run, fresh = import_module("ascent.cli.main").main, import_module("ascent")
    for command in (*WORKS, *(command for _, command in NEEDS)):
        status = run(command.split())
        print(f"\n== {status} {command}", file=sys.stderr, flush=True)
    rows = [{"prompt": f"{i}?", "answer": "b"} for i in range(4)]
    for needing in (
        fresh.Run("run").frame,
        lambda: fresh.train(rows, model="x", show=False),
        lambda: import_module("ascent.workflows.model_card").Hub("me/it"),
    ):
        try:
            needing()
        except fresh.ConfigError as error:
            print("refused:", error, flush=True)
    return 0


@pytest.mark.smoke
def test_without_extras_all_works_or_says_which_it_needs(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    child = ended(as_installed_without_extras, tmp_path)
    assert child.returncode == 0 and "Traceback" not in child.stderr, child.stderr
    assert not [command for command in WORKS if f"\n== 0 {command}\n" not in child.stderr]
    for extra, command in NEEDS:
        said = child.stderr.split(f"\n== 2 {command}\n")[0].split("\n== ")[-1]
        assert f"\n== 2 {command}\n" in child.stderr and f"ascent-rl[{extra}]" in " ".join(said.split()), (
            command,
            said,
        )
    refused = [line for line in child.stdout.splitlines() if line.startswith("refused:")]
    assert len(refused) == 3 and "pip install pandas" in refused[0]
    assert all("ascent-rl[lm]" in line for line in refused[1:]), refused


@pytest.mark.smoke
def test_nothing_that_linux_alone_has_is_needed_to_import(tmp_path: Path) -> None:
    """As on macOS: its platform, without the calls that it has not. Every module is imported anew."""

    def program() -> int:
        without()
        sys.platform = "darwin"
        for module, names in LINUX.items():
            for name in names.split():
                vars(module).pop(name, None)
        here = builtins.open

        def no_proc(file: Any, *args: Any, **more: Any) -> Any:
            if str(file).startswith("/proc"):
                raise FileNotFoundError(file)
            return here(file, *args, **more)

        builtins.open = no_proc
        import ascent as fresh

        for name in fresh.__all__:
            getattr(fresh, name)
        modules = [found.name for found in pkgutil.walk_packages(fresh.__path__, "ascent.")]
        for name in modules:
            if not name.endswith("__main__") and ".triton_" not in name:
                import_module(name)
        print(len(modules))
        return import_module("ascent.cli.main").main(["train", "lecture", "--steps", "2"])

    child = ended(program, tmp_path)
    assert child.returncode == 0 and int(child.stdout.split()[0]) > 150, child.stderr


def test_import_ascent_alone_needs_no_posix(tmp_path: Path) -> None:
    def program() -> int:
        without("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "syslog")
        import ascent as fresh

        fresh.Config, fresh.Normalized, fresh.GAE, fresh.ConfigError, fresh.Problem  # noqa: B018
        return 0

    child = ended(program, tmp_path)
    assert child.returncode == 0, child.stderr


def test_windows_is_refused_in_words(tmp_path: Path) -> None:
    def program() -> int:
        without("fcntl", "resource")
        sys.platform = "win32"
        try:
            import_module("ascent")
        except ImportError as error:
            print(error)
        return 0

    child = ended(program, tmp_path)
    assert "Ascent runs on Linux and macOS" in child.stdout and "WSL" in child.stdout, child.stderr


def test_mps_is_a_device(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_folder: Path) -> None:
    """Where there is none it is refused as a device that is not there, and not as a word that is unknown."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(FILES["rows.jsonl"])
    call = ["train", f"jsonl:{rows}", "--model", str(tiny_folder), "--policy.device"]
    assert main([*call, "mps", "--out", str(tmp_path / "run")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "mps" in said and "no such device" not in said
    assert ascent.CausalLM(model=str(tiny_folder), device="mps").device == "mps"
