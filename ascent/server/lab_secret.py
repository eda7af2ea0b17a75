"""The secret from which a lab derives its prefix and cookie. It is stored, so that open pages survive a restart.

It is in the user's state folder (XDG_STATE_HOME, ~/.local/state), one per folder of runs, readable by its owner only.
It is not in the folder of runs, because the author of a copied folder would know it.
"""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ascent.processes.user_state import lock_file, state_folder

SECRET_BYTES = 32


def load_secret(runs: Path) -> tuple[bytes, str]:
    """Return the secret of the lab of these runs, made on the first start, and why it could not be stored, or ""."""
    try:
        folder = state_folder("lab")
        with open(folder / "lock", "w", opener=_private) as lock:
            lock_file(lock)  # held until the file is closed: two concurrent first starts make one secret
            return _read_or_make(folder / hashlib.sha256(os.fsencode(runs.resolve())).hexdigest()[:32]), ""
    except (OSError, RuntimeError) as error:  # RuntimeError: the home folder is unknown
        return secrets.token_bytes(SECRET_BYTES), str(error)


def _read_or_make(path: Path) -> bytes:
    """Return the secret in a file. Replace it if other users could have read or written it."""
    with suppress(FileNotFoundError), open(path, "rb", opener=_private) as file:
        status = os.fstat(file.fileno())
        secret = file.read(SECRET_BYTES + 1)
        is_private = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        if is_private and len(secret) == SECRET_BYTES:
            return secret
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(fresh, "xb", opener=_private) as file:
        file.write(secret := secrets.token_bytes(SECRET_BYTES))
        os.fsync(file.fileno())
    fresh.replace(path)
    return secret


def _private(path: str, flags: int) -> int:
    """Open a file for its owner only, without following links or blocking on pipes."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
