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
"""Time limit of waiting for a file that another process has locked."""


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
    """Return the folder for the state of a part of Ascent. OSError unless it belongs to this user only."""
    configured = Path(os.environ.get("XDG_STATE_HOME", ""))
    folder = (configured if configured.is_absolute() else Path.home() / ".local" / "state") / "ascent" / name
    folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
        if not (stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()):
            raise PermissionError(f"{path} is not a folder of yours")
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
    return folder
