"""Adding a data source is one class and one registry line; every reader opens files through the source."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tunewell.core.errors import UserError
from tunewell.core.registry import Entry
from tunewell.data.sources.base import SOURCES, find_files
from tunewell.data.sources.blocks import ReadOptions, parse_item, read_blocks

ROWS = [{"question": "2+2?", "answer": "4"}, {"question": "3+3?", "answer": "6"}]
STORED: dict[str, bytes] = {}


class MemoryFile:
    """A toy source: bytes in a dictionary."""

    def __init__(self, key: str) -> None:
        self.name = key

    @classmethod
    def find(cls, path, *, base, options):
        keys = [key for key in sorted(STORED) if key.startswith(path.removeprefix("memory://"))]
        if not keys:
            raise UserError(f"there is nothing at `{path}`")
        return [cls(key) for key in keys]

    def open(self):
        return io.BytesIO(STORED[self.name])

    def size(self):
        return len(STORED[self.name])

    def stamp(self):
        return str(hash(STORED[self.name]))


def encoded(kind: str) -> bytes:
    lines = "\n".join(json.dumps(row) for row in ROWS).encode()
    if kind == "json":
        return json.dumps(ROWS).encode()
    if kind == "jsonl.gz":
        return gzip.compress(lines)
    if kind == "csv":
        return b"question,answer\n2+2?,4\n3+3?,6\n"
    if kind in ("parquet", "arrow"):
        table, sink = pa.Table.from_pylist(ROWS), io.BytesIO()
        if kind == "parquet":
            pq.write_table(table, sink)
        else:
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
        return sink.getvalue()
    return lines


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(SOURCES, "_entries", dict(SOURCES._entries))
    SOURCES.add(Entry("memory", "Bytes in a dictionary.", f"{__name__}:MemoryFile"))
    STORED.clear()
    return STORED


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "parquet", "arrow"])
def test_every_format_is_read_through_the_source(kind, memory, tmp_path):
    """A reader that opened a path itself would fail for `s3://`."""
    memory[f"bucket/rows.{kind}"] = encoded(kind)
    (file,) = find_files("memory://bucket", base=tmp_path)
    options = ReadOptions(10_000, 64)
    rows = [parse_item(item, options) for block in read_blocks(file, options) for item in block.items]
    assert [{key: str(value) for key, value in row.items()} for row in rows] == ROWS
    assert file.name == f"bucket/rows.{kind}"
    assert len(file.sha256()) == 64


@pytest.mark.uses("remote")
def test_an_unknown_scheme_is_an_error_with_the_known_ones(memory, tmp_path):
    with pytest.raises(UserError, match="`ftp://` is not a known data source") as caught:
        find_files("ftp://bucket/rows.jsonl", base=tmp_path)
    assert "`file://`, `s3://`" in str(caught.value.fix)


def test_a_path_and_its_file_url_name_the_same_file(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(encoded("jsonl"))
    (by_url,) = find_files(f"file://{tmp_path}/rows.jsonl", base=tmp_path)
    (by_path,) = find_files("rows.jsonl", base=tmp_path)
    assert by_url.source.stamp() == by_path.source.stamp()
    assert by_url.name == by_path.name == "rows.jsonl"
