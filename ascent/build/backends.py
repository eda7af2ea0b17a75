"""Every backend: a new engine is one folder and one line here."""

from ascent.build.backend import Backend
from ascent.build.language_backend import LanguageBackend
from ascent.build.small_backend import SmallBackend
from ascent.core.config import Config
from ascent.core.errors import ConfigError

BACKENDS: list[Backend] = [SmallBackend(), LanguageBackend()]


def backend_of(config: Config) -> Backend:
    """The backend of a config's policy. ConfigError: a task of a kind that it does not read."""
    name = getattr(config.policy, "backend", "small")
    backend = next((backend for backend in BACKENDS if backend.name == name), None)
    if backend is None:
        there = ", ".join(backend.name for backend in BACKENDS)
        raise ConfigError(f"--policy: it names the backend {name!r}, which is not there. There are: {there}")
    if config.task.kind != backend.task_kind:
        raise ConfigError(backend.mismatch(config))
    return backend
