"""GGUF headers: every type comes back, and a damaged file is a sentence, not a crash."""

import contextlib
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.core.errors import UserError
from tunewell.model_files.gguf import _BLOCKS, read_metadata, read_tensor_table, tensor_count


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def header(*pairs: bytes, version: int = 3, tensors: int = 0, count: int | None = None) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(pairs) if count is None else count) + b"".join(pairs)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


EVERY_TYPE: list[tuple[str, int, bytes, Any]] = [
    ("u8", 0, b"\xff", 255),
    ("i8", 1, b"\xff", -1),
    ("u16", 2, struct.pack("<H", 65535), 65535),
    ("i16", 3, struct.pack("<h", -2), -2),
    ("u32", 4, struct.pack("<I", 4_000_000_000), 4_000_000_000),
    ("i32", 5, struct.pack("<i", -3), -3),
    ("f32", 6, struct.pack("<f", 0.5), 0.5),
    ("flag", 7, b"\x01", True),
    ("words", 8, text("grüße"), "grüße"),
    ("names", 9, struct.pack("<IQ", 8, 2) + text("a") + text(""), ["a", ""]),
    ("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3), [1, -2, 3]),
    ("lists", 9, struct.pack("<IQ", 9, 2) + struct.pack("<IQ2B", 0, 2, 7, 8) + struct.pack("<IQ", 8, 0), [[7, 8], []]),
    ("u64", 10, struct.pack("<Q", 2**63), 2**63),
    ("i64", 11, struct.pack("<q", -(2**62)), -(2**62)),
    ("f64", 12, struct.pack("<d", 1e300), 1e300),
]
WHOLE = header(*(pair(key, kind, value) for key, kind, value, _ in EVERY_TYPE), tensors=7)


@pytest.fixture
def written(tmp_path: Path):
    def write(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_comes_back_as_it_was_written(written, version):
    path = written(WHOLE[:4] + struct.pack("<I", version) + WHOLE[8:] + b"tensors follow")
    assert read_metadata(path) == {key: expected for key, _, _, expected in EVERY_TYPE}
    assert tensor_count(path) == 7


def test_a_file_cut_at_any_byte_is_refused(written):
    """A half-finished download must never look like a smaller vocabulary."""
    for end in range(len(WHOLE)):
        with pytest.raises(UserError):
            read_metadata(written(WHOLE[:end]))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 not a model at all", "is not a GGUF file"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(count=2**60), "damaged"),
        (header(tensors=2**60), "damaged"),
        (header(pair("a", 9, struct.pack("<IQ", 0, 2**62))), "damaged"),
        (header(pair("a", 8, struct.pack("<Q", 2**63))), "longer than the file"),
        (header(pair("a", 99, b"")), "unknown type 99"),
        (header(pair("a", 0, b"1"), pair("a", 0, b"2")), "twice"),
        (header(pair("a", 9, struct.pack("<IQ", 9, 1) * 9)), "unknown type"),
    ],
)
def test_what_is_wrong_with_the_file_is_said(written, data, says):
    with pytest.raises(UserError, match=says):
        read_metadata(written(data))


def test_a_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_metadata(tmp_path / "none.gguf")


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_crash_the_reader(tmp_path_factory, data, has_header):
    path = tmp_path_factory.mktemp("fuzz") / "fuzz.gguf"
    path.write_bytes(header(count=2) + data if has_header else b"GGUF" + data)
    with contextlib.suppress(UserError):
        read_metadata(path)


def test_a_vocabulary_of_150_000_tokens_is_read_in_a_moment(written):
    tokens = [f"token{i}" for i in range(150_000)]
    path = written(header(pair("t", 9, struct.pack("<IQ", 8, len(tokens)) + b"".join(map(text, tokens)))))
    start = time.perf_counter()
    assert read_metadata(path)["t"] == tokens
    assert time.perf_counter() - start < 1.0


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def table(*tensors: bytes) -> bytes:
    return header(tensors=len(tensors)) + b"".join(tensors) + bytes(4096)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (table(tensor("a", 8), tensor("a", 8, offset=32)), "two tensors have the name `a`"),
        (table(tensor("a", 8), tensor("b", 8, offset=16)), "`a` and `b` overlap"),
        (table(tensor("b", 8, offset=16), tensor("a", 8)), "`a` and `b` overlap"),
        (table(tensor("a", 8), tensor("b", 8)), "`a` and `b` overlap"),
        (table(tensor("a", 32, kind=8), tensor("b", 8, offset=32)), "`a` and `b` overlap"),
        (table(tensor("a", 8, kind=250), tensor("b", 8)), "`a` and `b` overlap"),
        (table(tensor("a", 8, 0)), "`a` has a dimension of 0"),
        (table(tensor("a", 2**32, 2**32)), "`a` has 18,446,744,073,709,551,616 values"),
    ],
)
def test_tensors_that_share_a_name_or_bytes_or_are_empty_are_errors(written, data, says):
    """Overlapping tensors and equal names were accepted; a dimension of 0 ended in a ValueError."""
    with pytest.raises(UserError, match=says):
        read_tensor_table(written(data))


def test_tensors_side_by_side_are_read(written):
    path = written(table(tensor("b", 8, offset=96), tensor("a", 32, 2, kind=8), tensor("c", offset=128)))
    assert [(entry.name, entry.shape) for entry in read_tensor_table(path)] == [("b", (8,)), ("a", (2, 32)), ("c", ())]


def test_the_sizes_of_all_number_formats_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    assert {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()} == _BLOCKS
