"""Read untrusted Parquet files with a bound on their size in memory, which is checked before any data is decoded.

A few kilobytes can encode billions of equal values, or a long text a million times. The footer has the number of
values; the total length of repeated texts is computed from dictionary indices. The footer may be wrong, so the header
of every page is parsed first: pyarrow relies on the headers when it decompresses the pages.
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

MIN_SIZE_LIMIT, MAX_EXPANSION = 1 << 25, 64
"""Maximum bytes of a file in memory: the larger of this number and this multiple of its size on disk."""
MAX_PAGES, MAX_HEADER_BYTES, MAX_HEADER_DEPTH = 50_000, 1 << 16, 8
"""Maximum number of pages of a read, bytes of a page header, and nesting of structures in it."""
DELTA_BYTE_ARRAY = 7
"""The encoding that stores each text as a prefix of the previous text and a suffix."""


class ParquetReader:
    """An open Parquet file. Reads raise ConfigError if the result would be too large."""

    def __init__(self, path: Path, handle: IO[bytes]):
        import pyarrow.parquet as pq

        self.path, self.handle, self.file = path, handle, pq.ParquetFile(handle)
        self.schema, self.metadata = self.file.schema_arrow, self.file.metadata

    def read(self, columns: Sequence[str]) -> Any:
        """Read columns as a table."""
        self.check_expanded_size(columns, range(self.metadata.num_row_groups))
        return self.file.read(list(columns))

    def batches(self, columns: Sequence[str], parts: Sequence[int], rows: int) -> Iterator[Any]:
        """Yield batches of `rows` rows of the columns of some row groups."""
        self.check_expanded_size(columns, parts)
        return self.file.iter_batches(rows, row_groups=list(parts), columns=list(columns))

    def check_expanded_size(self, columns: Sequence[str], parts: Sequence[int]) -> None:
        """Raise ConfigError if the columns of these row groups would be too large in memory."""
        import pyarrow.parquet as pq

        bound = max(MIN_SIZE_LIMIT, MAX_EXPANSION * os.fstat(self.handle.fileno()).st_size)
        names = [self.metadata.schema.column(i).path for i in range(self.metadata.num_columns)]
        column_indices = [i for i, name in enumerate(names) if name in columns or name.partition(".")[0] in columns]
        size, max_text_bytes = 8 * sum(self.metadata.row_group(part).num_rows for part in parts), dict[str, int]()
        widths = [max(8, self.metadata.schema.column(i).length) for i in range(self.metadata.num_columns)]
        pages = 0
        for part, i in product(parts, column_indices):
            chunk, name = self.metadata.row_group(part).column(i), names[i]
            size += widths[i] * chunk.num_values
            if size > bound:
                break
            page_bytes = 0
            for page in self._page_headers(chunk):
                pages, page_bytes = pages + 1, page_bytes + page.size
                size += page.size if page.encoding != DELTA_BYTE_ARRAY else page.values * page.size
                if size > bound or pages > MAX_PAGES:
                    raise self._too_large(bound)
            if "BYTE_ARRAY" in chunk.physical_type:
                max_text_bytes[name] = max_text_bytes.get(name, 0) + chunk.num_values * page_bytes
        repeated = [name for name, num_bytes in max_text_bytes.items() if num_bytes > bound] if size <= bound else []
        if repeated:
            encoded = pq.ParquetFile(self.handle, read_dictionary=repeated)
            for batch in encoded.iter_batches(row_groups=list(parts), columns=repeated):
                size += sum(_total_text_bytes(column) for column in batch.columns)
                if size > bound:
                    break
        if size > bound:
            raise self._too_large(bound)

    def _too_large(self, bound: int) -> ConfigError:
        return ConfigError(
            f"{self.path.name} would take more than {bound >> 20} MiB of memory, far more than its size: "
            "it was not written by a trainer"
        )

    def _page_headers(self, chunk: Any) -> Iterator[PageHeader]:
        """Yield the page headers of a column; raise ValueError if they have more values than the footer says.

        Fields of a header: 2 uncompressed size, 3 compressed size, 5 data page, 7 dictionary page, 8 data page v2.
        """
        at, values = chunk.data_page_offset, 0
        if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < at:
            at = chunk.dictionary_page_offset
        end = at + chunk.total_compressed_size
        while at < end and values < chunk.num_values:
            head = os.pread(self.handle.fileno(), MAX_HEADER_BYTES, at)
            fields, length = parse_thrift_struct(head)
            data, data_v2, dictionary = fields.get(5, {}), fields.get(8, {}), fields.get(7, {})
            num_values = data.get(1, data_v2.get(1, dictionary.get(1, 0)))
            page = PageHeader(fields[2], num_values, data.get(2, data_v2.get(4, 0)))
            values += page.values if data or data_v2 else 0
            if min(*page, fields[3]) < 0 or values > chunk.num_values:
                raise ValueError("its pages hold more than its footer says")
            at += length + fields[3]
            yield page


class PageHeader(NamedTuple):
    """The size, number of values and encoding of a page."""

    size: int
    """Uncompressed bytes."""
    values: int
    encoding: int


def parse_thrift_struct(data: bytes, at: int = 0, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Parse a structure in Thrift's compact protocol; return its fields by number (no lists) and its end offset."""

    def read_varint() -> int:
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
            return (value := read_varint()) >> 1 ^ -(value & 1)
        if kind == 12:
            nested, at = parse_thrift_struct(data, at, depth + 1)
            return nested
        if kind in (9, 10):
            count, of = data[at] >> 4, data[at] & 15
            at += 1
            for _ in range(read_varint() if count == 15 else count):
                at += of in (1, 2)
                read(of)
            return None
        length = read_varint() if kind == 8 else {3: 1, 7: 8}[kind]
        at += length
        return None

    if depth > MAX_HEADER_DEPTH:
        raise ValueError("the header of a page is nested too deeply")
    fields, number = dict[int, Any](), 0
    while kind := data[at]:
        at += 1
        number = number + (kind >> 4) if kind >> 4 else (value := read_varint()) >> 1 ^ -(value & 1)
        fields[number] = read(kind & 15)
    return fields, at + 1


def _total_text_bytes(array: Any) -> int:
    """Return the total length of all texts of a column, counting repetitions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_dictionary(kind):
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(array.indices)).as_py() or 0
    if pa.types.is_struct(kind):
        return sum(_total_text_bytes(array.field(i)) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return sum(
            _total_text_bytes(part) for part in ([array.keys, array.items] if pa.types.is_map(kind) else [array.values])
        )
    return array.nbytes


@contextmanager
def open_parquet(path: Path, within: Path | None = None) -> Iterator[ParquetReader]:
    """Open a Parquet file; raise ConfigError with its name if it is missing, incomplete or invalid."""
    with naming_file(path), open_regular(path, within) as handle:
        try:
            file = ParquetReader(path, handle)
        except READ_ERRORS as error:
            reason = error_line(error)[:160]
            raise ConfigError(
                f"{path.name} is not a whole Parquet file, torn or still being copied: {reason}"
            ) from None
        yield file


def is_primitive_or_list(kind: Any) -> bool:
    """Return whether a type is a number, a boolean or text, or a list of them."""
    from pyarrow import types

    while types.is_list(kind) or types.is_large_list(kind):
        kind = kind.value_type
    text = types.is_string(kind) or types.is_large_string(kind)
    return text or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_null(kind)
