"""The journal: the batches of a run whose engine is not reproducible, each with its rewards, written before its update.

journal/step_000007    the batch, and the metrics over everything that was sampled for it
journal/eval_000007    the evaluation after that step: its metrics and answers

An entry is a folder like a checkpoint: written aside, flushed and renamed, with checksums, and without code. A resumed
run starts from a checkpoint and replays the entries after it, bit for bit. Entries before the newest checkpoint are
removed.
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
from ascent.runs.batch_serialization import from_json_and_tensors, to_json_and_tensors
from ascent.runs.checkpoint import READ_ERRORS, read_verified, remove_atomically, remove_unfinished, write_atomically
from ascent.runs.untrusted_files import numbered_files

STEP, EVALUATION = "step", "eval"


class Journal:
    """The journal of a run, in its folder."""

    def __init__(self, run: Path):
        self.folder, self.step = run / "journal", 0

    def read(self, step: int) -> tuple[Batch, Metrics] | None:
        self.step = step
        entry = self._read(STEP, step)
        assert entry is None or entry[0] is not None
        return entry  # type: ignore[return-value]

    def write(self, step: int, batch: Batch, metrics: Metrics) -> Batch:
        batch = batch.add(
            **{name: value.contiguous() for name, value in vars(batch).items() if isinstance(value, Tensor)}
        )
        self._write(STEP, step, batch, metrics)
        return batch

    def evaluation(
        self, evaluate: Callable[[], Metrics], answers: Callable[[], Batch | None], keep: Callable[[Batch], None]
    ) -> Metrics:
        """Evaluate and write an entry, or replay the entry of the current step.

        `answers` returns the answers that `evaluate` kept; replayed answers are passed to `keep`.
        """
        entry = self._read(EVALUATION, self.step)
        if entry is None:
            metrics = evaluate()
            self._write(EVALUATION, self.step, answers(), metrics)
            return metrics
        if entry[0] is not None:
            keep(entry[0])
        return entry[1]

    def first_new_step(self, first: int) -> int:
        """Read the entries that a resume from step `first` replays; return the first step that it samples."""
        remove_unfinished(self.folder)
        step = first
        while self._read(STEP, step) is not None:
            self._read(EVALUATION, step)
            step += 1
        return step

    def keep(self, first: int, stop: float = inf) -> None:
        """Remove all entries but those of the steps from `first` to `stop` − 1."""
        for kind in (STEP, EVALUATION):
            for step, path in numbered_files(self.folder, rf"{kind}_(\d+)").items():
                if not first <= step < stop:
                    remove_atomically(path)
        with suppress(OSError):  # the folder is missing or not empty
            self.folder.rmdir()

    def _path(self, kind: str, step: int) -> Path:
        return self.folder / f"{kind}_{step:06d}"

    def _write(self, kind: str, step: int, batch: Batch | None, metrics: Metrics) -> None:
        tensors: dict[str, Tensor] = {}
        plain = None if batch is None else to_json_and_tensors(batch, "", tensors)
        write_atomically(
            self._path(kind, step), {"batch": tensors}, {"metrics": metrics, "batch": plain}, {"step": step}
        )

    def _read(self, kind: str, step: int) -> tuple[Batch | None, Metrics] | None:
        path = self._path(kind, step)
        if not path.exists():
            return None
        try:
            groups, saved = read_verified(path)
            plain: dict[str, Any] | None = saved["batch"]
            batch = None if plain is None else Batch(**from_json_and_tensors(plain, "", groups["batch"]))
            if (batch is None and kind == STEP) or not all(
                isinstance(x, int | float) for x in saved["metrics"].values()
            ):
                raise ValueError("state.json is not that of a step")
            return batch, saved["metrics"]
        except READ_ERRORS as error:
            raise ConfigError(
                f"{path} is damaged: {error}. To sample this step and the following ones again, remove it and resume"
            ) from None
