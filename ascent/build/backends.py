"""All backends, and the choice of the backend of a config."""

from ascent.build.backend import Backend
from ascent.build.language_backend import LanguageBackend
from ascent.build.small_backend import SmallBackend
from ascent.core.config import Config
from ascent.core.errors import ConfigError

BACKENDS: list[Backend] = [SmallBackend(), LanguageBackend()]


def backend_of(config: Config) -> Backend:
    """Return the backend of a config's policy; raise ConfigError if it does not support the task."""
    name = getattr(config.policy, "backend", "small")
    backend = next((backend for backend in BACKENDS if backend.name == name), None)
    if backend is None:
        there = ", ".join(backend.name for backend in BACKENDS)
        raise ConfigError(f"--policy: it names the backend {name!r}, which is not there. There are: {there}")
    if config.task.kind != backend.task_kind:
        raise ConfigError(backend.mismatch(config))
    return backend
