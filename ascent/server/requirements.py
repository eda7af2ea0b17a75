"""What a server needs beside Ascent's own packages."""

import importlib.util

from ascent.core.errors import ConfigError


def check_packages(flag: str) -> None:
    """Refuse where the packages of a server are missing."""
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{flag} needs {' and '.join(missing)}: pip install 'ascent-rl[lab]'")
