"""The secret behind a lab's prefix and cookie, kept for its owner alone: an open page survives a restart.

It lies in the user's state folder (XDG_STATE_HOME, ~/.local/state), by the folder of runs that the lab shows. It
does not lie in that folder: what came with a folder from elsewhere is known to others.
"""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ascent.processes.user_state import lock_file, state_folder

LENGTH = 32


def kept_secret(runs: Path) -> tuple[bytes, str]:
    """The secret of a lab over that folder, made on the first start; and why it holds for this start alone, or ""."""
    try:
        folder = state_folder("lab")
        with open(folder / "lock", "w", opener=_private) as lock:
            lock_file(lock)  # until it is closed: two first starts at once make one secret
            return _read_or_make(folder / hashlib.sha256(os.fsencode(runs.resolve())).hexdigest()[:32]), ""
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody knows where home is
        return secrets.token_bytes(LENGTH), str(error)


def _read_or_make(path: Path) -> bytes:
    """What the file holds. One that others could have read or written is made anew."""
    with suppress(FileNotFoundError), open(path, "rb", opener=_private) as file:
        about = os.fstat(file.fileno())
        kept = file.read(LENGTH + 1)
        mine = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077
        if mine and len(kept) == LENGTH:
            return kept
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(fresh, "xb", opener=_private) as file:
        file.write(secret := secrets.token_bytes(LENGTH))
        os.fsync(file.fileno())
    fresh.replace(path)
    return secret


def _private(path: str, flags: int) -> int:
    """Opens a file for its owner alone; neither through a link nor a pipe that nobody fills."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
