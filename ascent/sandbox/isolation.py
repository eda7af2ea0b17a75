"""Which walls this machine has: bubblewrap, else Landlock with seccomp, else none, and then nothing is run.

bubblewrap   namespaces of its own: other processes, the network and the host's files are not there at all; each job
             has a small file system in memory. Landlock is put on top, where the kernel has it.
landlock     Python and the packages that are allowed can be read, and nothing written; other processes cannot be
             signalled. Where user namespaces are forbidden: in most containers, for example.
none         limits of time and memory only. Never chosen by itself.

Both have the filter of system calls (`filter.py`).
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
PACKAGE = str(Path(__file__).resolve().parents[1])
MOUNTED_SOURCES = ("__init__.py", "sandbox", "processes", "core/__init__.py", "core/errors.py", "core/menu.py")
"""Files and folders of this package that code in a sandbox imports; no others are visible there."""
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
"""All that code in a sandbox sees of an environment."""
FOLDER = "/sandbox"
"""Where the folders of jobs are mounted."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
TRIAL = 20.0
"""Seconds that bubblewrap may take to show that it works here."""


class IsolationError(Exception):
    """Nothing here can hold code: what was tried, and what to do about it."""


@dataclass(frozen=True)
class Walls:
    """What a sandbox is made of."""

    kind: str
    landlock: int = 0
    """The version of Landlock's interface that is put on top; 0: none."""
    why: str = ""
    """Why it is not a better one."""

    @property
    def folder(self) -> str:
        """Where the folders of jobs are; empty: there is nothing to write in.

        In bubblewrap each is a file system in memory, with limits, and closed to other jobs by Landlock.
        """
        if self.kind == "none":
            return tempfile.gettempdir()
        return FOLDER if self.kind == "bubblewrap" and self.landlock else ""

    def words(self) -> str:
        if self.kind == "none":
            return "no sandbox: limits of time and memory only"
        parts = ["bubblewrap"] * (self.kind == "bubblewrap") + [f"Landlock {self.landlock}"] * (self.landlock > 0)
        return f"{', '.join(parts)} and seccomp"


def choose(kind: str = "auto") -> Walls:
    """The best walls that work here, or those that were asked for; `IsolationError` if there are none."""
    if sys.platform != "linux":
        raise IsolationError(f"such code runs on Linux only, and this is {sys.platform}")
    if kind == "none":
        return Walls("none")
    version, machine = kernel_isolation.landlock_version(), platform.machine()
    if machine not in MACHINES:
        raise IsolationError(f"the sandbox needs {' or '.join(MACHINES)}, and this is {machine}")
    wrong = bubblewrap_trouble() if kind != "landlock" else "not asked for"
    if not wrong:
        return Walls("bubblewrap", version)
    if kind != "bubblewrap" and version:
        return Walls("landlock", version, f"bubblewrap: {wrong}")
    raise IsolationError(f"bubblewrap: {wrong}" + ("" if kind == "bubblewrap" else "; Landlock: this kernel has none"))


@functools.cache
def bubblewrap_trouble() -> str:
    """Why bubblewrap does not work here; empty: it does."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (Debian: apt-get install bubblewrap)"
    code = f"import ctypes, sys; ctypes.CDLL(None).mount(b'', b'{FOLDER}', b'tmpfs', 0, 0) and sys.exit('mount fails')"
    command = [*bubblewrap((), (), True), "--", os.path.realpath(sys.executable), *FLAGS, "-c", code]
    try:
        tried = subprocess.run(command, env={}, capture_output=True, stdin=subprocess.DEVNULL, timeout=TRIAL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    words = tried.stderr.decode(errors="replace").strip().splitlines()
    return (words[-1] if words else f"exit status {tried.returncode}") if tried.returncode else ""


FLAGS = ("-P", "-s", "-S", "-B")
"""Of Python: no path and no start-up file that somebody could have changed, and no bytecode written."""
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")
LIBRARIES = ("/usr/local/lib", os.path.join(sys.base_prefix, "lib"))
"""Folders whose shared libraries can be read, and nothing else in them."""
STANDARD = os.path.realpath(sysconfig.get_path("stdlib"))
"""The standard library."""


@functools.cache
def system_paths() -> tuple[list[str], list[str]]:
    """What Python itself needs; and below it the folders of installed packages, which are hidden."""
    folders = [os.path.realpath(path) for path in (*SYSTEM, STANDARD) if os.path.exists(path)]
    folders = [path for path in dict.fromkeys(folders) if not any(path.startswith(f"{other}/") for other in folders)]
    packages = [f"{folder}{part}" for folder in (*folders, STANDARD) for part in ("", "/*")]
    hidden = [path for name in ("site", "dist") for at in packages for path in glob.glob(f"{at}/{name}-packages")]
    shared = [path for folder in LIBRARIES for path in glob.glob(f"{glob.escape(folder)}/*.so*")]
    return [*folders, *filter_existing(shared)], list(dict.fromkeys(hidden))


def paths_around(path: str, hidden: Sequence[str]) -> Iterator[str]:
    """What covers this folder but for the hidden folders in it."""
    if not any(other.startswith(f"{path}/") for other in hidden):
        yield path
    elif path not in hidden:
        for entry in os.scandir(path):
            if entry.path not in hidden and not entry.is_symlink():
                yield from paths_around(entry.path, hidden)


def bubblewrap(entries: Sequence[str], named: Sequence[str], folders: bool) -> list[str]:
    """The command up to `--`. Everything that is mounted is read-only, but for what the folders of jobs are made in."""
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
    own = [os.path.join(PACKAGE, name) for name in MOUNTED_SOURCES]
    for path in filter_existing([os.path.realpath(sys.executable), *own, *entries, *named]):
        args += ["--ro-bind", path, path]
    for path in filter_existing(DEVICES):
        args += ["--dev-bind", path, path]
    if folders:  # the fork server mounts each of them, with limits of its own
        args += ["--cap-add", "CAP_SYS_ADMIN", "--size", str(1 << 20), "--tmpfs", FOLDER]
    for path in (*hidden, "/"):
        args += ["--remount-ro", path]
    for name, value in ENVIRONMENT.items():
        args += ["--setenv", name, value]
    return args


def filter_existing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if os.path.exists(path)]


def start_warm(
    walls: Walls, control: socket.socket, entries: Sequence[str], named: Sequence[str]
) -> subprocess.Popen[bytes]:
    """The warm process of a sandbox, which reads its settings from `control` and walls itself in."""
    code = (
        f"import sys; sys.path.append({os.path.dirname(PACKAGE)!r}); "
        f"from ascent.sandbox.sandbox_server import be_warm; be_warm({control.fileno()})"
    )
    command = [os.path.realpath(sys.executable), *FLAGS, "-c", code]
    if walls.kind == "bubblewrap":
        command = [*bubblewrap(entries, named, bool(walls.folder)), "--", *command]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={} if walls.kind == "bubblewrap" else ENVIRONMENT,
        cwd="/",
        pass_fds=(control.fileno(),),
        start_new_session=True,
    )
