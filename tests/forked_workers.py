"""The workers of pytest-xdist as forks of one process that has the libraries loaded: each would load them again."""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import re
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import Any

from _pytest.assertion import rewrite
from _pytest.outcomes import Skipped
from execnet import gateway_io
from execnet.gateway_base import Popen2IO

import ascent

LIBRARIES = ("torch._dynamo", "peft", "matplotlib.figure", "datasets", "scipy.stats")
"""What most workers would come to load besides Ascent."""


class ForkedWorker(gateway_io.Popen2IOMaster):
    """A fork that waits for what execnet sends to a new Python, as far as execnet knows of its process."""

    def __init__(self) -> None:
        (stdin, self.written), (self.read_from, stdout) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for other in (self, *WAITING):  # else no worker would see that the others' pipes were closed
                os.close(other.written)
                os.close(other.read_from)
            os._exit(live(stdin, stdout))
        os.close(stdin)
        os.close(stdout)

    def connect(self, execmodel: Any) -> ForkedWorker:
        Popen2IO.__init__(self, os.fdopen(self.written, "wb"), os.fdopen(self.read_from, "rb"), execmodel)
        return self

    def wait(self) -> int | None:
        with contextlib.suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)


WAITING: list[ForkedWorker] = []


def live(stdin: int, stdout: int) -> int:
    """What `python -c` does with execnet's line, from these pipes: run the line, then end as Python ends."""
    for number, end in enumerate((stdin, stdout)):
        os.dup2(end, number)
        os.close(end)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    main = types.ModuleType("__main__")
    main.__spec__ = None
    sys.modules["__main__"], sys.argv = main, ["-c"]
    try:
        exec(eval(sys.stdin.readline()), vars(main))
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def load_everything() -> None:
    """Ascent and the libraries, without doing anything with them: a process with threads cannot be forked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*LIBRARIES, *(module.name for module in pkgutil.walk_packages(ascent.__path__, "ascent."))):
            if not name.endswith("__main__"):
                with contextlib.suppress(ImportError):  # a GPU's
                    importlib.import_module(name)


def load_tests(config: Any) -> None:
    """Every module of tests: each worker would rewrite its assertions anew, which takes longer than loading the rest.

    Meanwhile a fork rewrites them on another core, and leaves them where pytest looks. What cannot be loaded here is
    left to the workers, which say why; so is a module whose constants name its process.
    """
    paths = sorted(Path(__file__).parent.glob("test_*.py"))
    helper = os.fork()
    if helper == 0:
        with contextlib.suppress(BaseException):
            rewrite_tests(paths, config)
        os._exit(0)
    load_everything()
    os.waitpid(helper, 0)
    for path in paths:
        with contextlib.suppress(Exception, Skipped):
            if not re.search(r"^\w+ = .*getpid", path.read_text(), re.MULTILINE):
                importlib.import_module(path.stem)


def rewrite_tests(paths: list[Path], config: Any) -> None:
    """What pytest's import hook does with a module that has no bytecode yet."""
    for path in paths:
        kept = rewrite.get_cache_dir(path) / (path.name[:-3] + rewrite.PYC_TAIL)
        if not sys.dont_write_bytecode and rewrite._read_pyc(path, kept) is None:
            kept.parent.mkdir(exist_ok=True)
            stat, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, kept)


def fork_workers(count: int) -> None:
    """Fork all of them now, before execnet starts threads. One that replaces a crashed worker starts afresh."""
    start_afresh = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        if spec.popen and not spec.python and WAITING:
            return WAITING.pop(0).connect(execmodel)
        return start_afresh(spec, execmodel)

    gc.collect()
    gc.freeze()
    gateway_io.create_io = create_io
    for _ in range(count):
        WAITING.append(ForkedWorker())


LONGEST = {
    **{"lab_browser": 31, "viewer_browser": 30, "viewer_completions_browser": 28, "viewer_compare_browser": 27},
    **{"language_engines": 25, "language_cli": 22, "rewards": 21, "pages": 21, "objects": 19, "ahead": 18, "watch": 18},
    **{"viewer_hostile": 18, "cuda_decoder": 16, "resume": 15, "cli": 15, "oracle": 15, "serving_ahead": 15},
    **{"serving": 14, "stops": 14, "lab": 13, "requests": 13, "endpoint": 13, "viewer_report": 13, "architectures": 12},
    **{"serve_engine": 12, "cluster": 12, "rounding": 12, "oracle_itself": 12, "split": 11, "compact": 11},
    **{"values": 11, "structure": 11, "play": 11, "judge": 11, "turns": 11, "agent_training": 10, "pairs": 9},
}
"""The modules of tests that take longest, and roughly how many seconds of a core. It matters for nothing but time."""


def in_shares(items: list[Any], workers: int) -> list[Any]:
    """The tests in an order that pytest-xdist cuts into equal shares: each share begins with modules that take long.

    So their fixtures are made by one worker, and what is left in the end, to be taken from others, is short. Every
    worker has to find the same order.
    """
    modules: dict[str, list[Any]] = {}
    for item in items:
        modules.setdefault(item.path.stem.removeprefix("test_"), []).append(item)
    shares: list[list[Any]] = [[] for _ in range(workers)]
    seconds = [0] * workers
    for name in sorted(modules.keys() & LONGEST, key=lambda name: (-LONGEST[name], name)):
        least = min(range(workers), key=seconds.__getitem__)
        if len(shares[least]) + len(modules[name]) <= len(items) // workers:
            shares[least] += modules.pop(name)
            seconds[least] += LONGEST[name]
    short = [item for of_module in modules.values() for item in of_module]
    for i, share in enumerate(shares):
        missing = (len(items) - sum(map(len, shares[:i]))) // (workers - i) - len(share)
        share += short[:missing]
        short = short[missing:]
    return [item for share in shares for item in share]
