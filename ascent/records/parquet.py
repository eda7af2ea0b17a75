"""Parquet files that anyone may have written: what they would become in memory is bounded before it is read.

A few kilobytes can stand for billions of equal values, or for one long text a million times. The footer says how many
values there are; how long repeated texts are together is counted while they are still numbers of a dictionary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ascent.core.types import Refused
from ascent.records.folder import UNREADABLE, naming, open_regular
from ascent.tasks.base import error_line

LEAST_BOUND, EXPANSION = 1 << 25, 64
"""A file may become this many bytes in memory, or this many times its size, whichever is more."""


class Parquet:
    """An open file, of which columns and row groups are read as far as they are not too large."""

    def __init__(self, path: Path, handle: IO[bytes]):
        import pyarrow.parquet as pq

        self.path, self.handle, self.file = path, handle, pq.ParquetFile(handle)
        self.schema, self.metadata = self.file.schema_arrow, self.file.metadata

    def read(self, columns: Sequence[str]) -> Any:
        """These columns, as a table."""
        self.refuse_large(columns, range(self.metadata.num_row_groups))
        return self.file.read(list(columns))

    def batches(self, columns: Sequence[str], parts: Sequence[int], rows: int) -> Iterator[Any]:
        """These columns of some row groups, a few rows at a time."""
        self.refuse_large(columns, parts)
        return self.file.iter_batches(rows, row_groups=list(parts), columns=list(columns))

    def refuse_large(self, columns: Sequence[str], parts: Sequence[int]) -> None:
        import pyarrow.parquet as pq

        bound = max(LEAST_BOUND, EXPANSION * os.fstat(self.handle.fileno()).st_size)
        names = [self.metadata.schema.column(i).path for i in range(self.metadata.num_columns)]
        wanted = [i for i, name in enumerate(names) if name in columns or name.partition(".")[0] in columns]
        size, longest = 8 * sum(self.metadata.row_group(part).num_rows for part in parts), dict[str, int]()
        for part in parts:
            chunks = [self.metadata.row_group(part).column(i) for i in wanted]
            for name, chunk in zip((names[i] for i in wanted), chunks, strict=True):
                size += max(8 * chunk.num_values, chunk.total_uncompressed_size)
                if "BYTE_ARRAY" in chunk.physical_type:
                    longest[name] = longest.get(name, 0) + chunk.num_values * chunk.total_uncompressed_size
        repeated = [name for name, most in longest.items() if most > bound] if size <= bound else []
        if repeated:
            coded = pq.ParquetFile(self.handle, read_dictionary=repeated)
            for batch in coded.iter_batches(row_groups=list(parts), columns=repeated):
                size += sum(_text_bytes(column) for column in batch.columns)
                if size > bound:
                    break
        if size > bound:
            raise Refused(
                f"{self.path.name} would take more than {bound >> 20} MiB of memory, far more than its size: "
                "it is not one that a trainer wrote"
            )


def _text_bytes(array: Any) -> int:
    """How long all texts of a column are together, each as often as it is there."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(_text_bytes(array.field(i)) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return sum(
            _text_bytes(part) for part in ([array.keys, array.items] if pa.types.is_map(kind) else [array.values])
        )
    return array.nbytes


@contextmanager
def open_parquet(path: Path, within: Path | None = None) -> Iterator[Parquet]:
    """A Parquet file, to be read; refused, with its name, if it is gone, torn, or holds what cannot be read."""
    with naming(path), open_regular(path, within) as handle:
        try:
            file = Parquet(path, handle)
        except UNREADABLE as error:
            words = error_line(error)[:160]
            raise Refused(f"{path.name} is not a whole Parquet file, torn or still being copied: {words}") from None
        yield file


def is_plain(kind: Any) -> bool:
    """Are these numbers, truth values or texts, or lists of them?"""
    from pyarrow import types

    while types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    text = types.is_string(kind) or types.is_large_string(kind)
    return text or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
