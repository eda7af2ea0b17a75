"""Parquet files that anyone may have written: what they would become in memory is bounded before it is read.

A few kilobytes can stand for billions of equal values, or for one long text a million times. The footer says how many
values there are; how long repeated texts are together is counted while they are still numbers of a dictionary. A footer
may lie, so the header of every page is read first, which the reader goes by when it unpacks the page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import IO, Any, NamedTuple

from ascent.core.errors import ConfigError
from ascent.runs.untrusted_files import READ_ERRORS, naming_file, open_regular
from ascent.tasks.base import error_line

LEAST_BOUND, EXPANSION = 1 << 25, 64
"""A file may become this many bytes in memory, or this many times its size, whichever is more."""
MOST_PAGES, LONGEST_HEADER, DEEPEST_HEADER = 50_000, 1 << 16, 8
"""Pages that are read at once; the bytes of a page's header, and its structures within one another."""
DELTA_BYTE_ARRAY = 7
"""The encoding in which every text begins like the one before it."""


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
        widths = [max(8, self.metadata.schema.column(i).length) for i in range(self.metadata.num_columns)]
        pages = 0
        for part, i in product(parts, wanted):
            chunk, name = self.metadata.row_group(part).column(i), names[i]
            size += widths[i] * chunk.num_values
            if size > bound:
                break
            packed = 0
            for page in self._pages(chunk):
                pages, packed = pages + 1, packed + page.size
                size += page.size if page.encoding != DELTA_BYTE_ARRAY else page.values * page.size
                if size > bound or pages > MOST_PAGES:
                    raise self._too_large(bound)
            if "BYTE_ARRAY" in chunk.physical_type:
                longest[name] = longest.get(name, 0) + chunk.num_values * packed
        repeated = [name for name, most in longest.items() if most > bound] if size <= bound else []
        if repeated:
            coded = pq.ParquetFile(self.handle, read_dictionary=repeated)
            for batch in coded.iter_batches(row_groups=list(parts), columns=repeated):
                size += sum(_text_bytes(column) for column in batch.columns)
                if size > bound:
                    break
        if size > bound:
            raise self._too_large(bound)

    def _too_large(self, bound: int) -> ConfigError:
        return ConfigError(
            f"{self.path.name} would take more than {bound >> 20} MiB of memory, far more than its size: "
            "it is not one that a trainer wrote"
        )

    def _pages(self, chunk: Any) -> Iterator[ParquetPage]:
        """The headers of the pages of a column, as the reader comes to them; ValueError if they hold more than it says.

        Fields of a header: 2 bytes, 3 bytes in the file, and what it holds: 5 values, 7 a dictionary, 8 values (v2).
        """
        at, values = chunk.data_page_offset, 0
        if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < at:
            at = chunk.dictionary_page_offset
        end = at + chunk.total_compressed_size
        while at < end and values < chunk.num_values:
            head = os.pread(self.handle.fileno(), LONGEST_HEADER, at)
            fields, length = thrift_struct(head)
            held, v2, words = fields.get(5, {}), fields.get(8, {}), fields.get(7, {})
            page = ParquetPage(fields[2], held.get(1, v2.get(1, words.get(1, 0))), held.get(2, v2.get(4, 0)))
            values += page.values if held or v2 else 0
            if min(*page, fields[3]) < 0 or values > chunk.num_values:
                raise ValueError("its pages hold more than its footer says")
            at += length + fields[3]
            yield page


class ParquetPage(NamedTuple):
    """What a page's header says of it."""

    size: int
    """Bytes when it is unpacked."""
    values: int
    encoding: int


def thrift_struct(data: bytes, at: int = 0, deep: int = 0) -> tuple[dict[int, Any], int]:
    """The fields of a structure in Thrift's compact protocol, by their numbers, and where it ends; no lists."""

    def whole() -> int:
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value
            if shift > 63:
                raise ValueError("a number in the header of a page is too long")

    def read(kind: int) -> Any:
        nonlocal at
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return (value := whole()) >> 1 ^ -(value & 1)
        if kind == 12:
            inside, at = thrift_struct(data, at, deep + 1)
            return inside
        if kind in (9, 10):
            count, of = data[at] >> 4, data[at] & 15
            at += 1
            for _ in range(whole() if count == 15 else count):
                at += of in (1, 2)
                read(of)
            return None
        length = whole() if kind == 8 else {3: 1, 7: 8}[kind]
        at += length
        return None

    if deep > DEEPEST_HEADER:
        raise ValueError("the header of a page is nested too deeply")
    fields, number = dict[int, Any](), 0
    while kind := data[at]:
        at += 1
        number = number + (kind >> 4) if kind >> 4 else (value := whole()) >> 1 ^ -(value & 1)
        fields[number] = read(kind & 15)
    return fields, at + 1


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
    with naming_file(path), open_regular(path, within) as handle:
        try:
            file = Parquet(path, handle)
        except READ_ERRORS as error:
            words = error_line(error)[:160]
            raise ConfigError(f"{path.name} is not a whole Parquet file, torn or still being copied: {words}") from None
        yield file


def is_plain(kind: Any) -> bool:
    """Are these numbers, truth values or texts, or lists of them?"""
    from pyarrow import types

    while types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    text = types.is_string(kind) or types.is_large_string(kind)
    return text or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
