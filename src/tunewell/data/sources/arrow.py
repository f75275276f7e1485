"""All code that uses pyarrow: rows of Parquet and Arrow files, zstd streams, and the numpy arrays of a corpus."""

# pyright: basic
# pyarrow has no type stubs. The functions of this module return numpy arrays and plain Python values.

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tunewell.core.arrays import SmallInts
from tunewell.core.errors import UserError
from tunewell.core.files import read_bytes
from tunewell.data.rows.conversation import Rejected, map_leaves
from tunewell.data.rows.json_rows import text_of
from tunewell.data.sources.base import SourceFile, require_unique_columns

Lists = tuple[SmallInts, SmallInts]
"""Lists of numbers as (offsets, values): one offset per list, and a final offset at the end."""
_BATCH_ROWS = 1024
_MAX_EMPTY_ROWS = 10_000
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def table_rows(file: SourceFile) -> Iterator[Any]:
    """Yield the rows of a Parquet or Arrow file; raise UserError if the file is damaged."""
    kind, read_batches = _TABLES[file.format]
    try:
        with file.open() as stream:
            for batch in _not_empty(read_batches(stream)):
                require_unique_columns(batch.schema.names, f"`{file.name}`")
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    yield from _batch_rows(batch.slice(start, _BATCH_ROWS))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one: a column name
        if isinstance(error, OSError) and error.errno is not None:
            raise
        text = str(error).partition("\n")[0].rstrip(". ")
        what = f"`{file.name}` is not a complete {kind} file: {text}"
        raise UserError(what, fix="copy or download the file again") from error


def count_parquet_rows(file: SourceFile) -> int:
    """Return the number of rows according to the footer of a Parquet file."""
    with file.open() as stream:
        return pq.read_metadata(stream).num_rows


def _not_empty(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches; raise ArrowInvalid for many rows without data. A few bytes can claim any number of them."""
    num_empty = 0
    for batch in batches:
        num_empty += batch.num_rows if batch.num_rows > 8 * batch.nbytes else 0
        if num_empty > _MAX_EMPTY_ROWS:
            raise pa.ArrowInvalid(f"{num_empty:,} of its rows contain no data")
        yield batch


def _parquet_batches(stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(stream) as parquet:
        yield from parquet.iter_batches(batch_size=_BATCH_ROWS)


def _arrow_batches(stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    if stream.read(6) == b"ARROW1":
        whole = pa.ipc.open_file(stream)
        yield from (whole.get_batch(index) for index in range(whole.num_record_batches))
        return
    # A stream that was truncated between two batches looks like a shorter one; only its last bytes show the truncation.
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - len(_STREAM_END)))
    if stream.read() != _STREAM_END:
        raise pa.ArrowInvalid("the end of the file is missing")
    stream.seek(0)
    yield from pa.ipc.open_stream(stream)


_TABLES = {"parquet": ("Parquet", _parquet_batches), "arrow": ("Arrow", _arrow_batches)}


def _batch_rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """Yield rows as they would be in JSON: nested fields that Arrow filled with null are removed."""
    nested = [field.name for field in batch.schema if pa.types.is_nested(field.type)]
    try:
        # Wrong lengths in a damaged file would otherwise cause reads beyond its end, which crash the process.
        batch.validate(full=True)
        rows: list[Any] = batch.to_pylist()
    except (ValueError, OverflowError):  # invalid UTF-8, or a date outside the calendar
        rows = list(_rows_one_by_one(batch))
    for row in rows:
        if isinstance(row, dict):
            for name in nested:
                row[name] = _without_nulls(row[name])
        yield row


def _rows_one_by_one(batch: pa.RecordBatch) -> Iterator[Any]:
    """Read texts as bytes, so that an invalid text drops only its row and not the whole file."""
    columns = [column.view(_as_bytes(column.type)) for column in batch.columns]
    bare = pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
    bare.validate(full=True)
    for index in range(bare.num_rows):
        try:
            (row,) = bare.slice(index, 1).to_pylist()
        except (ValueError, OverflowError) as error:
            yield Rejected("unparsable", str(error))
        else:
            yield map_leaves(row, lambda value: text_of(value) if isinstance(value, bytes) else value)


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bytes(field.type)) for field in kind.fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bytes(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_as_bytes(kind.value_type)))
    return kind


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def decompress_zstd(stored: BinaryIO) -> IO[bytes]:
    """Return a stream of the decompressed bytes. Reading raises an error if the file is truncated."""
    # The zstandard package is not used, because its reader accepts a truncated file as complete.
    return cast(IO[bytes], pa.input_stream(stored, compression="zstd"))


def write_lists(path: Path, batches: Iterable[Mapping[str, Lists]], names: Iterable[str]) -> None:
    """Write batches of list columns as an Arrow stream, as `datasets` does."""
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in names])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        for batch in batches:
            columns = [pa.ListArray.from_arrays(*map(_to_arrow, batch[name])) for name in schema.names]
            stream.write_batch(pa.record_batch(columns, schema=schema))


def read_lists(path: Path, *, in_memory: bool) -> list[dict[str, Lists]]:
    """Return the batches of an Arrow stream of lists; raise OSError or ValueError if it is damaged."""
    batches = pa.ipc.open_stream(_source(path, in_memory)).read_all().to_batches()
    return [
        {name: (_to_numpy(batch[name].offsets), _to_numpy(batch[name].values)) for name in batch.schema.names}
        for batch in batches
    ]


def write_columns(path: Path, columns: Mapping[str, npt.NDArray[np.integer[Any]]]) -> None:
    """Write arrays as an Arrow file with one batch, so that a reader can memory-map each column."""
    batch = pa.record_batch([_to_arrow(column) for column in columns.values()], names=list(columns))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)


def read_columns(path: Path, *, in_memory: bool) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an Arrow file; raise OSError or ValueError if it is damaged."""
    table = pa.ipc.open_file(_source(path, in_memory)).read_all()
    columns = {name: [_to_numpy(chunk) for chunk in table[name].chunks] for name in table.column_names}
    return {name: chunks[0] if len(chunks) == 1 else np.concatenate(chunks) for name, chunks in columns.items()}


def _source(path: Path, in_memory: bool) -> Any:
    """Open a file. If it is memory-mapped, pages are read on access and evicted when memory is low."""
    return pa.BufferReader(read_bytes(path)) if in_memory else pa.memory_map(str(path))


# Convert without a copy. pyarrow's own conversions import pandas, which takes half a second.


def _to_arrow(values: npt.NDArray[np.integer[Any]]) -> pa.Array:
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _to_numpy(values: pa.Array) -> npt.NDArray[Any]:
    buffer = values.buffers()[1]
    numbers = np.frombuffer(buffer, dtype=values.type.to_pandas_dtype()) if buffer else np.zeros(0, dtype=np.int32)
    return numbers[values.offset : values.offset + len(values)]
