"""Choose the isolation that works on this machine: bubblewrap, else Landlock. Without either, no job runs.

bubblewrap   Separate namespaces: a job sees no other process, no network and no file of the host, and has a small file
             system in memory. Landlock is added where the kernel supports it.
landlock     A job can read Python and the allowed packages, write nothing, and signal no other process. For machines
             that forbid user namespaces, such as most containers.
none         Limits of time and memory only. Never chosen automatically.

bubblewrap and landlock also have the seccomp filter of system calls (`seccomp_filter.py`).
"""

import functools
import glob
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ascent.sandbox import kernel_isolation
from ascent.sandbox.seccomp_filter import MACHINES

KINDS = ("auto", "bubblewrap", "landlock", "none")
PACKAGE_FOLDER = str(Path(__file__).resolve().parents[1])
MOUNTED_SOURCES = ("__init__.py", "sandbox", "processes", "core/__init__.py", "core/errors.py", "core/menu.py")
"""Files and folders of this package that code in a sandbox may import; no others are visible there."""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "5000",  # see processes/torch_variables.py
    "MIMALLOC_PURGE_DECOMMITS": "1",  # torch's default: freed memory is returned; see processes/torch_variables.py
}
"""The environment variables of code in a sandbox."""
JOBS_FOLDER = "/sandbox"
"""Mount point of the folders of jobs."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
PROBE_SECONDS = 20.0
"""Time limit for trying whether bubblewrap works here."""


class IsolationError(Exception):
    """No isolation works on this machine; the message says what was tried and what to do."""


@dataclass(frozen=True)
class Isolation:
    """How a sandbox isolates its jobs."""

    kind: str
    landlock: int = 0
    """ABI version of Landlock; 0: not used."""
    why: str = ""
    """Why no better isolation was chosen."""

    @property
    def folder(self) -> str:
        """Parent of the folders of jobs; empty: jobs have no folder to write in.

        In bubblewrap each folder is a file system in memory, with limits, and Landlock hides it from other jobs.
        """
        if self.kind == "none":
            return tempfile.gettempdir()
        return JOBS_FOLDER if self.kind == "bubblewrap" and self.landlock else ""

    def describe(self) -> str:
        if self.kind == "none":
            return "no sandbox: limits of time and memory only"
        parts = ["bubblewrap"] * (self.kind == "bubblewrap") + [f"Landlock {self.landlock}"] * (self.landlock > 0)
        return f"{', '.join(parts)} and seccomp"


def choose_isolation(kind: str = "auto") -> Isolation:
    """Return the best isolation that works here, or check the one asked for. Raises IsolationError."""
    if sys.platform != "linux":
        raise IsolationError(f"the sandbox runs on Linux only, and this is {sys.platform}")
    if kind == "none":
        return Isolation("none")
    version, machine = kernel_isolation.landlock_version(), platform.machine()
    if machine not in MACHINES:
        raise IsolationError(f"the sandbox needs {' or '.join(MACHINES)}, and this is {machine}")
    problem = bubblewrap_error() if kind != "landlock" else "not asked for"
    if not problem:
        return Isolation("bubblewrap", version)
    if kind != "bubblewrap" and version:
        return Isolation("landlock", version, f"bubblewrap: {problem}")
    raise IsolationError(
        f"bubblewrap: {problem}" + ("" if kind == "bubblewrap" else "; Landlock: this kernel has none")
    )


@functools.cache
def bubblewrap_error() -> str:
    """Return why bubblewrap does not work here; empty if it works."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (Debian: apt-get install bubblewrap)"
    mount = f"ctypes.CDLL(None).mount(b'', b'{JOBS_FOLDER}', b'tmpfs', 0, 0)"
    code = f"import ctypes, sys; {mount} and sys.exit('mount fails')"
    command = [*bubblewrap_command((), (), True), "--", os.path.realpath(sys.executable), *PYTHON_FLAGS, "-c", code]
    try:
        tried = subprocess.run(command, env={}, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    words = tried.stderr.decode(errors="replace").strip().splitlines()
    return (words[-1] if words else f"exit status {tried.returncode}") if tried.returncode else ""


PYTHON_FLAGS = ("-P", "-s", "-S", "-B")
"""Python flags: no path and no start-up file that could have been changed, and no bytecode is written."""
SYSTEM_PATHS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
LIBRARY_FOLDERS = ("/usr/local/lib", os.path.join(sys.base_prefix, "lib"))
"""Folders in which only shared libraries can be read."""
STANDARD_LIBRARY = os.path.realpath(sysconfig.get_path("stdlib"))
"""The standard library."""


@functools.cache
def system_paths() -> tuple[list[str], list[str]]:
    """Return the paths that Python needs, and the folders of installed packages in them, which are hidden."""
    folders = [os.path.realpath(path) for path in (*SYSTEM_PATHS, STANDARD_LIBRARY) if os.path.exists(path)]
    folders = [path for path in dict.fromkeys(folders) if not any(path.startswith(f"{other}/") for other in folders)]
    packages = [f"{folder}{part}" for folder in (*folders, STANDARD_LIBRARY) for part in ("", "/*")]
    hidden = [path for name in ("site", "dist") for at in packages for path in glob.glob(f"{at}/{name}-packages")]
    shared = [path for folder in LIBRARY_FOLDERS for path in glob.glob(f"{glob.escape(folder)}/*.so*")]
    return [*folders, *existing_paths(shared)], list(dict.fromkeys(hidden))


def paths_around(path: str, hidden: Sequence[str]) -> Iterator[str]:
    """Yield paths that together cover this folder without the hidden folders in it."""
    if not any(other.startswith(f"{path}/") for other in hidden):
        yield path
    elif path not in hidden:
        for entry in os.scandir(path):
            if entry.path not in hidden and not entry.is_symlink():
                yield from paths_around(entry.path, hidden)


def bubblewrap_command(entries: Sequence[str], named: Sequence[str], folders: bool) -> list[str]:
    """Return the command up to `--`. All mounts are read-only, except the parent of the folders of jobs."""
    args = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"]
    args += ["--as-pid-1", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    args += ["--clearenv", "--chdir", "/"]
    for path in ("/lib", "/lib64"):
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
    system, hidden = system_paths()
    for path in system:
        args += ["--ro-bind", path, path]
    for path in hidden:
        args += ["--tmpfs", path]
    sources = [os.path.join(PACKAGE_FOLDER, name) for name in MOUNTED_SOURCES]
    for path in existing_paths([os.path.realpath(sys.executable), *sources, *entries, *named]):
        args += ["--ro-bind", path, path]
    for path in existing_paths(DEVICES):
        args += ["--dev-bind", path, path]
    if folders:  # the fork server mounts each of them, with limits
        args += ["--cap-add", "CAP_SYS_ADMIN", "--size", str(1 << 20), "--tmpfs", JOBS_FOLDER]
    for path in (*hidden, "/"):
        args += ["--remount-ro", path]
    for name, value in ENVIRONMENT.items():
        args += ["--setenv", name, value]
    return args


def existing_paths(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if os.path.exists(path)]


def start_server(
    isolation: Isolation, control: socket.socket, entries: Sequence[str], named: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start the fork server of a sandbox, which reads its settings from `control` and isolates itself."""
    code = (
        f"import sys; sys.path.append({os.path.dirname(PACKAGE_FOLDER)!r}); "
        f"from ascent.sandbox.sandbox_server import run_server; run_server({control.fileno()})"
    )
    command = [os.path.realpath(sys.executable), *PYTHON_FLAGS, "-c", code]
    if isolation.kind == "bubblewrap":
        command = [*bubblewrap_command(entries, named, bool(isolation.folder)), "--", *command]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={} if isolation.kind == "bubblewrap" else ENVIRONMENT,
        cwd="/",
        pass_fds=(control.fileno(),),
        start_new_session=True,
    )
