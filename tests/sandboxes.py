"""The kinds of isolation that the tests can try here. Debian's bubblewrap is installed by `make sandbox`."""

from __future__ import annotations

import os
import shutil

import pytest

from ascent.sandbox import isolation, kernel_isolation

KINDS = ("bubblewrap", "landlock")
NO_BUBBLEWRAP = "bubblewrap is not installed: `make sandbox` installs it, or says how"
FORBIDDEN, NO_LANDLOCK = "bubblewrap does not work here", "this kernel has no Landlock"
MISSING_WALLS = (NO_BUBBLEWRAP, FORBIDDEN, NO_LANDLOCK)


def need_isolation(kind: str) -> str:
    """Skip the test if this isolation does not work here. If CI=true, bubblewrap has to be installed."""
    if kind == "bubblewrap" and shutil.which("bwrap") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(NO_BUBBLEWRAP)
    if kind == "bubblewrap" and (trouble := isolation.bubblewrap_error()):
        pytest.skip(f"{FORBIDDEN}: {trouble}")
    if kind == "landlock" and not kernel_isolation.landlock_version():
        pytest.skip(NO_LANDLOCK)
    return kind
