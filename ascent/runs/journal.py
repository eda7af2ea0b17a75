"""The journal: each step's batch with its rewards, written before its update, where no seed would give it again.

journal/step_000007    the batch, and what was measured of all that was sampled for it
journal/eval_000007    the evaluation after that step: its metrics and its answers

An entry is a folder as a checkpoint is: written aside, flushed and renamed, with checksums, and without code. A resumed
run goes back to a checkpoint and replays the entries behind it, to the same bits. Those before the newest
checkpoint are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor

from ascent.core.errors import ConfigError
from ascent.core.types import Batch, Metrics
from ascent.runs.batch_files import split, together
from ascent.runs.checkpoint import READ_ERRORS, clear_unfinished, drop, read_whole, write_whole
from ascent.runs.untrusted_files import numbered_files

STEP, EVALUATION = "step", "eval"


class Journal:
    """The journal of a run, in its folder."""

    def __init__(self, run: Path):
        self.folder, self.at = run / "journal", 0

    def read(self, step: int) -> tuple[Batch, Metrics] | None:
        self.at = step
        entry = self._read(STEP, step)
        assert entry is None or entry[0] is not None
        return entry  # type: ignore[return-value]

    def write(self, step: int, batch: Batch, metrics: Metrics) -> Batch:
        batch = batch.add(**{name: one.contiguous() for name, one in vars(batch).items() if isinstance(one, Tensor)})
        self._write(STEP, step, batch, metrics)
        return batch

    def evaluation(
        self, evaluate: Callable[[], Metrics], answers: Callable[[], Batch | None], keep: Callable[[Batch], None]
    ) -> Metrics:
        """That of the present step, journalled or replayed. `answers` were kept by `evaluate`, or are by `keep`."""
        entry = self._read(EVALUATION, self.at)
        if entry is None:
            metrics = evaluate()
            self._write(EVALUATION, self.at, answers(), metrics)
            return metrics
        if entry[0] is not None:
            keep(entry[0])
        return entry[1]

    def check(self, first: int) -> int:
        """Read all that a resume from this step will replay; returned is the first step that it will draw."""
        clear_unfinished(self.folder)
        step = first
        while self._read(STEP, step) is not None:
            self._read(EVALUATION, step)
            step += 1
        return step

    def keep(self, first: int, behind: float = inf) -> None:
        """Drop the entries of all steps but those from `first` to before `behind`."""
        for kind in (STEP, EVALUATION):
            for step, path in numbered_files(self.folder, rf"{kind}_(\d+)").items():
                if not first <= step < behind:
                    drop(path)
        with suppress(OSError):  # it is there, and empty
            self.folder.rmdir()

    def _path(self, kind: str, step: int) -> Path:
        return self.folder / f"{kind}_{step:06d}"

    def _write(self, kind: str, step: int, batch: Batch | None, metrics: Metrics) -> None:
        tensors: dict[str, Tensor] = {}
        plain = None if batch is None else split(batch, "", tensors)
        write_whole(self._path(kind, step), {"batch": tensors}, {"metrics": metrics, "batch": plain}, {"step": step})

    def _read(self, kind: str, step: int) -> tuple[Batch | None, Metrics] | None:
        path = self._path(kind, step)
        if not path.exists():
            return None
        try:
            groups, saved = read_whole(path)
            plain: dict[str, Any] | None = saved["batch"]
            batch = None if plain is None else Batch(**together(plain, "", groups["batch"]))
            if (batch is None and kind == STEP) or not all(
                isinstance(x, int | float) for x in saved["metrics"].values()
            ):
                raise ValueError("state.json is not a step's")
            return batch, saved["metrics"]
        except READ_ERRORS as error:
            raise ConfigError(
                f"{path} is damaged: {error}. To draw this step anew and all that follow, remove it: then resume again"
            ) from None
