"""Base class of the experiment trackers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ascent.runs.run_folder import unlinked
from ascent.runs.untrusted_files import read_regular

StepMetrics = tuple[int, dict[str, float]]
"""A step and its metrics."""


@dataclass
class Tracker:
    """One tracker of a run. All of its methods are called from one thread, and any of them may raise."""

    package: ClassVar[str]
    """The package that has to be importable."""
    folder: Path
    """The run's folder."""
    config: dict[str, Any]
    name: str
    """The name of the run."""
    resume_step: int
    """The first step of a resumed run; 0 for a new run."""

    def start(self) -> str | None:
        """Open the tracker. Return a message for the user, or None."""

    def log(self, steps: list[StepMetrics]) -> None:
        """Send the metrics of some steps."""

    def end(self, status: str) -> None:
        """Flush and close; `status` is finished, interrupted or failed."""

    def run_id(self, new: Callable[[], str]) -> str:
        """Return the tracker's id of this run. It is kept in the run's folder, so that a resumed run continues it."""
        path = self.folder / type(self).__name__.lower() / "id"
        if self.resume_step and path.exists():
            return read_regular(path).decode().strip()
        path.parent.mkdir(parents=True, exist_ok=True)
        unlinked(path).write_text(id := new())
        return id


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings: {"loss": {"high": 0.2}} becomes {"loss.high": 0.2}."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten_config(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
