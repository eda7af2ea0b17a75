"""Packages that servers need in addition to Ascent's dependencies."""

import importlib.util

from ascent.core.errors import ConfigError


def check_packages(flag: str) -> None:
    """Raise a ConfigError if a package of the servers is missing."""
    if missing := [name for name in ("pydantic", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"{flag} needs {' and '.join(missing)}: pip install 'ascent-rl[lab]'")
