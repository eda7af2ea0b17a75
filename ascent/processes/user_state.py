"""The user's state folder, and locks on files."""

import errno
import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LOCK_SECONDS = 60.0
"""How long to wait for a file that another process has locked."""


def lock_file(file: IO[Any]) -> None:
    """Lock a file exclusively until it is closed; OSError if another process keeps it locked."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise BlockingIOError(errno.EAGAIN, f"another process has locked it for {LOCK_SECONDS:g} s") from None
        time.sleep(0.02)


def state_folder(name: str) -> Path:
    """Where a part of Ascent keeps its state. OSError unless it belongs to this user, and nobody else can enter it."""
    told = Path(os.environ.get("XDG_STATE_HOME", ""))
    folder = (told if told.is_absolute() else Path.home() / ".local" / "state") / "ascent" / name
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in (folder.parent, folder):
        with suppress(FileExistsError):
            made.mkdir(mode=0o700)
        about = made.lstat()
        if not (stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid()):
            raise PermissionError(f"{made} is not a folder of yours")
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
    return folder
