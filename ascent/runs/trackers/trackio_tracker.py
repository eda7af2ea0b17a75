"""Trackio tracker."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ascent.runs.trackers.tracker import StepMetrics, Tracker, flatten_config


class Trackio(Tracker):
    """Trackio, in its default local folder unless TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set.

    Trackio has one folder per process, so it cannot be the run's folder.
    """

    package = "trackio"

    def start(self) -> None:
        import trackio

        with _silence_trackio():
            self.run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", "ascent"),
                name=self.name,
                config=flatten_config(self.config),
                resume="allow" if self.resume_step else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, steps: list[StepMetrics]) -> None:
        with _silence_trackio():
            for step, metrics in steps:
                self.run.log(metrics, step=step)

    def end(self, status: str) -> None:
        with _silence_trackio():
            self.run.finish()


@contextmanager
def _silence_trackio() -> Iterator[None]:
    """Silence `print` in Trackio's modules: it has no quiet mode, and stdout may be piped to another program."""
    import trackio
    import trackio.run
    import trackio.utils

    namespaces = [vars(module) for module in (trackio, trackio.run, trackio.utils)]
    try:
        for namespace in namespaces:
            namespace["print"] = lambda *_, **__: None
        yield
    finally:
        for namespace in namespaces:
            namespace.pop("print", None)
