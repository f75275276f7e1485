"""Finding and reading sources: every container, every compression, every encoding, in bounded memory."""

import csv
import gzip
import io
import itertools
import json
import os
import random
import sys
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import run_limited, write_jsonl

from examples_limit import examples
from tunewell.core.errors import UserError
from tunewell.data.rows.conversation import Rejected
from tunewell.data.rows.formats import Converter
from tunewell.data.sources.base import find_files, split_limit
from tunewell.data.sources.blocks import ReadOptions, parse_item, read_blocks
from tunewell.data.sources.lines import TooLong, detect_encoding, read_lines, split_lines
from tunewell.data.sources.local import outside_links, unread_files

LIMITS = ReadOptions(max_row_bytes=1 << 20, max_nesting=64)
ROWS = [
    {"instruction": "Say hello", "input": "", "output": "Hello."},
    {"instruction": 'Quote "this", please', "input": "a,b;c\td|e", "output": 'It\'s "done".\nIn two lines.'},
    {"instruction": "Grüße, 東京 🙂", "input": "line one\r\nline two", "output": " spaces around "},
    {"instruction": "[1, 2]", "input": "{not json", "output": "\\backslash\\ and \u2028 and \x85 and \x1f"},
]


def options(**changes) -> ReadOptions:
    return ReadOptions(**{**LIMITS.__dict__, **changes})


def read(path: Path, **changes) -> list:
    """Read a file as `prepare` does: parsed rows, or the `Rejected` in place of one."""
    return [value for _, value in read_numbered(path, **changes)]


def read_numbered(path: Path, **changes) -> list:
    chosen = options(**changes)
    rows = []
    for file in find_files(str(path), base=path.parent):
        for block in read_blocks(file, chosen):
            for number, item in zip(block.numbers, block.items, strict=True):
                try:
                    rows.append((number, parse_item(item, chosen)))
                except Rejected as rejected:
                    rows.append((number, rejected))
    return rows


def reasons(rows: list) -> list:
    return [row.reason if isinstance(row, Rejected) else "ok" for row in rows]


def conversations(rows: list) -> list:
    return [Converter().convert(row)[0] for row in rows]


def as_csv(rows: list, delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def with_checksum(data: bytes) -> bytes:
    """Compress as the `zstd` command does; the package leaves the checksum out."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def write_container(name: str, folder: Path, rows: list) -> Path:
    path = folder / name
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    plain = {
        ".jsonl": lines,
        ".ndjson": lines,
        ".json": json.dumps(rows, ensure_ascii=False, indent=2).encode(),
        ".csv": as_csv(rows) if name.endswith((".csv", ".csv.gz", ".csv.zst")) else b"",
        ".tsv": as_csv(rows, "\t") if ".tsv" in name else b"",
    }
    keys = dict.fromkeys(key for row in rows for key in row)
    if name.endswith((".parquet", ".arrow")) or name.startswith("saved"):
        rows = [{key: row.get(key) for key in keys} for row in rows]
    if name.endswith((".parquet", ".arrow")):
        write_table(path, pa.Table.from_pylist(rows))
    elif name == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)
    elif name == "saved_splits":
        splits = {"test": datasets.Dataset.from_list(rows[:1]), "train": datasets.Dataset.from_list(rows)}
        datasets.DatasetDict(splits).save_to_disk(path)
    else:
        data = plain["." + name.split(".")[1]]
        compress = {".gz": gzip.compress, ".zst": with_checksum}.get(path.suffix, bytes)
        path.write_bytes(compress(data))
    return path


TEXT_CONTAINERS = ["rows.jsonl", "rows.ndjson", "rows.json", "rows.csv", "rows.tsv"]
CONTAINERS = [
    *TEXT_CONTAINERS,
    *(name + end for name in TEXT_CONTAINERS for end in (".gz", ".zst")),
    "rows.parquet",
    "rows.arrow",
    "saved",
    "saved_splits",
]


@pytest.mark.parametrize("name", CONTAINERS)
def test_equal_rows_are_equal_in_every_container(name, tmp_path):
    """A row must not become another one because it was saved as a spreadsheet."""
    assert read(write_container(name, tmp_path, ROWS)) == ROWS


CALLS = [
    {
        "messages": [
            {"role": "user", "content": "Weather in Rome?"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
            {"role": "tool", "content": "sunny", "name": "weather"},
            {"role": "assistant", "content": "Sunny.", "weight": 1},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}],
    },
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    {"question": "2 + 2?", "answer": "4"},
    {"text": "Plain words."},
]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "saved", "saved_splits"])
def test_fields_that_a_table_filled_with_null_are_not_there(name, tmp_path):
    """Arrow gives every row the columns of all others; a row must convert as if it stood alone."""
    rows = read(write_container(name, tmp_path, CALLS))
    assert conversations(rows) == conversations(CALLS)


def test_lists_may_stand_in_a_csv_cell_as_json(tmp_path):
    """There is no other way to have a conversation in a table of texts."""
    cells = [{key: json.dumps(row[key]) for key in ("messages", "tools") if key in row} for row in CALLS[:2]]
    cells[1]["tools"] = ""
    path = tmp_path / "rows.csv"
    path.write_bytes(as_csv(cells))
    assert conversations(read(path)) == conversations(CALLS[:2])


# --- finding


def test_a_folder_is_read_in_the_order_of_its_names_without_hidden_files(tmp_path):
    """The order decides which of two duplicates stays, so it must not depend on the disk."""
    for name in ("b.jsonl", "a.csv", "sub/c.jsonl.gz", ".hidden.jsonl", ".git/x.jsonl", "notes.md"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(b"")
    files = find_files("data", base=tmp_path)
    assert [file.name for file in files] == ["data/a.csv", "data/b.jsonl", "data/sub/c.jsonl.gz"]
    assert [(file.format, file.compression) for file in files] == [("csv", None), ("jsonl", None), ("jsonl", "gzip")]


def test_a_glob_finds_files_below_a_folder_with_brackets_in_its_name(tmp_path):
    """`runs [1]/*.jsonl` is a pattern only behind the slash."""
    base = tmp_path / "runs [1]"
    (base / "deep").mkdir(parents=True)
    for name in ("x.jsonl", "deep/y.jsonl", "z.csv"):
        (base / name).write_bytes(b"")
    assert [file.name for file in find_files("*.jsonl", base=base)] == ["x.jsonl"]
    assert [file.name for file in find_files("**/*.jsonl", base=base)] == ["deep/y.jsonl", "x.jsonl"]
    assert [file.name for file in find_files(f"{tmp_path}/*/z.*", base=base)] == ["z.csv"] or sys.platform == "win32"
    (base / "odd[1].jsonl").write_bytes(b"")
    assert [file.name for file in find_files("odd[1].jsonl", base=base)] == ["odd[1].jsonl"]


def test_names_are_relative_and_never_absolute(tmp_path):
    """Names go into the corpus; a path of this machine in it would change its bytes on another."""
    outside = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "project").mkdir()
    (file,) = find_files(str(outside), base=tmp_path / "project")
    assert file.name == "rows.jsonl"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("ftp://host/rows.jsonl", "`ftp://` is not a known data source"),
        ("nothing.jsonl", "no file or folder"),
        ("no/such/folder/x.jsonl", "no file or folder"),
        ("*.parquet", "no file matches"),
        ("empty", "contains no readable file"),
        ("rows.docx", "`.docx` files cannot be read"),
        ("rows.xyz", "no known file extension"),
        ("rows.parquet.gz", "compressed twice"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_with_words(path, words, tmp_path):
    """The message must say what is wrong before anything is tokenised."""
    (tmp_path / "empty").mkdir()
    for name in ("rows.docx", "rows.xyz", "rows.parquet.gz", "rows.jsonl"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=words):
        find_files(path, base=tmp_path)


def test_a_missing_file_names_its_neighbours(tmp_path):
    """Most missing files are misspelt ones."""
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(UserError) as caught:
        find_files("trian.jsonl", base=tmp_path)
    assert "train.jsonl" in str(caught.value.fix)


def test_a_file_that_may_not_be_read_is_refused_at_once(tmp_path, monkeypatch):
    """Permissions are the person's to mend, not a bug with a traceback."""
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="no permission to read"):
        find_files("rows.jsonl", base=tmp_path)


def test_a_limit_behind_the_path_is_split_off(tmp_path):
    """`rows.jsonl#500` asks for 500 rows, unless there is a file of that very name."""
    assert split_limit("rows.jsonl#500") == ("rows.jsonl", 500)
    assert split_limit("rows.jsonl") == ("rows.jsonl", None)
    assert split_limit("folder#2b") == ("folder#2b", None)
    (tmp_path / "rows#5").mkdir()
    assert split_limit(str(tmp_path / "rows#5")) == (str(tmp_path / "rows#5"), None)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet"])
def test_a_limit_takes_the_first_rows(name, tmp_path):
    """A limit is how people try things out; it must not read the rest."""
    assert read(write_container(name, tmp_path, ROWS), limit=2) == ROWS[:2]


# --- saved datasets


def test_a_saved_dataset_is_read_through_its_own_list_of_files(tmp_path):
    """Its folder also holds JSON files that are no rows, and the order of shards is not that of names."""
    rows = [{"text": f"row {index}"} for index in range(25)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved", num_shards=12)
    assert read(tmp_path / "saved") == rows
    (tmp_path / "mixed").mkdir()
    (tmp_path / "saved").rename(tmp_path / "mixed" / "saved")
    write_jsonl(tmp_path / "mixed" / "a.jsonl", [{"text": "alone"}])
    assert read(tmp_path / "mixed") == [{"text": "alone"}, *rows]
    assert find_files("mixed/*", base=tmp_path)[0].name == "mixed/a.jsonl"
    assert len(find_files("mixed/**", base=tmp_path)) == 13


def test_of_several_splits_train_is_read_and_others_by_name(tmp_path):
    """Reading a test split as training rows would spoil every later figure."""
    splits = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved") == [{"text": "train"}]
    assert read(tmp_path / "saved" / "test") == [{"text": "test"}]
    datasets.DatasetDict({"test": splits["test"]}).save_to_disk(tmp_path / "other")
    with pytest.raises(UserError, match="no split named `train`") as caught:
        find_files("other", base=tmp_path)
    assert "other/test" in str(caught.value.fix)


def test_an_empty_saved_dataset_is_refused(tmp_path):
    """Its JSON files must not be taken for rows because there are no others."""
    empty = datasets.Dataset.from_dict({"question": [], "answer": []})
    empty.save_to_disk(tmp_path / "saved")
    with pytest.raises(UserError, match="contains no readable file"):
        find_files("saved", base=tmp_path)


@pytest.mark.parametrize("state", ["", "{}", "[]", '{"_data_files": 5}', '{"_data_files": [5]}'])
def test_a_broken_saved_dataset_is_refused(state, tmp_path):
    """A half-copied folder must not give half its rows."""
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "state.json").write_text(state)
    with pytest.raises(UserError, match=r"looks like a saved dataset"):
        find_files("saved", base=tmp_path)


def test_a_saved_dataset_without_one_of_its_files_is_refused(tmp_path):
    """A missing shard is rows lost silently; a name with folders in it would lead out of the dataset."""
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=2)
    next((tmp_path / "saved").glob("data-00001*")).unlink()
    with pytest.raises(UserError, match="is missing"):
        find_files("saved", base=tmp_path)
    write_jsonl(tmp_path / "secret.arrow", [])
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    with pytest.raises(UserError, match="is missing"):
        find_files("saved", base=tmp_path)


def test_outputs_of_ours_beside_the_rows_are_not_read_as_rows(tmp_path):
    """`prepare --data .` writes its corpus into the folder that it reads; `train` and `export` write there too."""
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "tunewell.yaml").write_text("model: m\n")
    outputs = {
        "corpus": ("manifest.json", "dropped.jsonl", "dataset_dict.json"),
        "runs/first": ("plan.json", "config.yaml", "documents.tsv", "events.jsonl", "samples.jsonl", "README.md"),
        "runs/first/export": ("proof.json", "proof.safetensors", "tokenizer.json"),
    }
    for folder, names in outputs.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / folder / name).write_text('{"splits": ["train"]}')
    assert [file.name for file in find_files(".", base=tmp_path)] == ["rows.jsonl"]
    assert unread_files(".", base=tmp_path) == []


@pytest.mark.parametrize("pattern", ["in", "in/*.txt", "in/**/*.jsonl"])
def test_links_that_leave_the_folder_are_skipped_and_named(tmp_path, pattern):
    """Whoever writes a folder of rows must not choose files of the user who trains on it."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("a password\n")
    write_jsonl(tmp_path / "secret.jsonl", ROWS)
    write_jsonl(tmp_path / "in" / "rows.jsonl", ROWS)
    (tmp_path / "in" / "notes.txt").write_text("a note\n")
    (tmp_path / "in" / "stolen.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "in" / "deep" / "stolen.jsonl").symlink_to("../../secret.jsonl")
    (tmp_path / "in" / "deep" / "same.jsonl").symlink_to("../rows.jsonl")
    found = {file.source.path.name for file in find_files(pattern, base=tmp_path)}
    assert found and not {"stolen.txt", "stolen.jsonl"} & found
    assert "same.jsonl" in found or pattern.endswith("*.txt")
    skipped = outside_links(pattern, base=tmp_path)
    assert len(skipped) == {"in": 2, "in/*.txt": 1, "in/**/*.jsonl": 1}[pattern]
    assert not set(skipped) & set(unread_files(pattern, base=tmp_path))


def test_a_folder_with_nothing_but_such_links_says_so(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.txt").write_text("a password\n")
    (tmp_path / "in" / "stolen.txt").symlink_to(tmp_path / "secret.txt")
    for pattern in ("in", "in/*.txt"):
        with pytest.raises(UserError) as refusal:
            find_files(pattern, base=tmp_path)
        assert "1 link" in str(refusal.value.where)


def test_a_snapshot_in_the_cache_of_the_hub_is_read_through_its_links(tmp_path):
    """There every file is a link to a blob outside the folder of the snapshot."""
    snapshot = tmp_path / "datasets--me--rows" / "snapshots" / "abc"
    blobs = tmp_path / "datasets--me--rows" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_jsonl(blobs / "0123", ROWS)
    (snapshot / "rows.jsonl").symlink_to("../../blobs/0123")
    assert len(find_files(str(snapshot), base=tmp_path)) == 1


@pytest.mark.parametrize("store", [".git/annex/objects", ".dvc/cache"])
def test_a_folder_of_a_git_annex_or_dvc_repository_is_read_through_its_links(tmp_path, store):
    """There every large file is a link to a store at the top of the repository."""
    (tmp_path / "repository" / "data").mkdir(parents=True)
    (tmp_path / "repository" / store).mkdir(parents=True)
    write_jsonl(tmp_path / "repository" / store / "0123", ROWS)
    (tmp_path / "repository" / "data" / "rows.jsonl").symlink_to(f"../{store}/0123")
    for pattern in ("repository/data", "repository/data/*.jsonl"):
        assert len(find_files(pattern, base=tmp_path)) == 1 and not outside_links(pattern, base=tmp_path)


def test_a_store_that_is_a_link_opens_nothing_else(tmp_path):
    """Whoever writes a folder can also put a link named like a store into it."""
    (tmp_path / "in" / ".git" / "annex").mkdir(parents=True)
    (tmp_path / "secrets").mkdir()
    write_jsonl(tmp_path / "secrets" / "secret.jsonl", ROWS)
    (tmp_path / "in" / ".git" / "annex" / "objects").symlink_to(tmp_path / "secrets")
    (tmp_path / "in" / "stolen.jsonl").symlink_to(".git/annex/objects/secret.jsonl")
    assert outside_links("in", base=tmp_path) == ["stolen.jsonl"]


def test_a_file_that_is_named_may_be_a_link(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link.jsonl").symlink_to(tmp_path / "rows.jsonl")
    assert len(find_files("in/link.jsonl", base=tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.csv.gz", "rows.txt.gz", "rows.json.gz"])
@pytest.mark.parametrize("blank", [b"\n", b" \r\n", "\n".encode("utf-16-le")], ids=["LF", "CRLF", "UTF-16"])
def test_megabytes_of_blank_lines_are_refused(tmp_path, name, blank):
    """300 million blank lines are 300 kB of `.gz`, and took more than a minute."""
    (tmp_path / name).write_bytes(gzip.compress(blank * (6_000_000 // len(blank)), 1))
    (file,) = find_files(name, base=tmp_path)
    with pytest.raises(UserError, match=r"blank lines in a row|column names: it has at least"):
        list(read_blocks(file, options()))


# --- damaged containers


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name.endswith((".gz", ".zst"))])
@pytest.mark.parametrize("damage", ["cut", "cut to the head", "flipped"])
def test_compressed_files_that_are_damaged_are_refused(name, damage, tmp_path):
    """zstandard's own reader takes a file cut short for a whole one: rows would be lost without a word."""
    rows = [{"instruction": str(random.Random(index).random()), "output": "x"} for index in range(2000)]
    path = write_container(name, tmp_path, rows)
    whole = path.read_bytes()
    half = len(whole) // 2
    flipped = whole[: half - 20] + bytes(byte ^ 0xFF for byte in whole[half - 20 : half]) + whole[half:]
    path.write_bytes({"cut": whole[:half], "cut to the head": whole[:9], "flipped": flipped}[damage])
    with pytest.raises(UserError, match="cannot be decompressed"):
        read(path)


@pytest.mark.parametrize("end", [".gz", ".zst"])
def test_compressed_parts_one_behind_the_other_are_one_file(end, tmp_path):
    """Parallel compressors and `cat` make such files."""
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}[end]
    parts = [compress((json.dumps(row) + "\n").encode()) for row in ROWS]
    path = tmp_path / f"rows.jsonl{end}"
    path.write_bytes(b"".join(parts))
    assert read(path) == ROWS


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "saved"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.6, 0.95])
def test_tables_that_are_cut_short_are_refused(name, keep, tmp_path):
    """A download that stopped half-way is not a smaller dataset."""
    path = write_container(name, tmp_path, [{"text": f"row {index}" * 20} for index in range(5000)])
    (file,) = find_files(str(path), base=tmp_path)[:1]
    data = file.source.path.read_bytes()
    file.source.path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UserError, match="not a complete"):
        read(path)


def test_a_stream_cut_exactly_between_two_batches_is_refused(tmp_path):
    """Arrow itself reads such a stream without complaint, only shorter."""
    table = pa.Table.from_pylist([{"text": f"row {index}"} for index in range(100)])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=50)
        middle = sink.tell()
    whole = sink.getvalue()
    (tmp_path / "whole.arrow").write_bytes(whole)
    (tmp_path / "cut.arrow").write_bytes(whole[:middle])
    assert len(read(tmp_path / "whole.arrow")) == 100
    with pytest.raises(UserError, match="not a complete Arrow file"):
        read(tmp_path / "cut.arrow")


def write_table(path: Path, table: pa.Table) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return path


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_a_cell_that_is_no_text_costs_one_row(name, tmp_path):
    """Tables are written by programs that do not look; also deep inside a cell."""
    bad = pa.array([b"ok", b"caf\xe9", b"fine"]).view(pa.string())
    turns = pa.StructArray.from_arrays([pa.array(["user"] * 3), bad], ["role", "content"])
    table = pa.table({"text": bad, "messages": pa.ListArray.from_arrays([0, 1, 2, 3], turns)})
    texts = ["ok", "caf\udce9", "fine"]
    expected = [{"text": text, "messages": [{"role": "user", "content": text}]} for text in texts]
    assert read(write_table(tmp_path / name, table)) == expected


def test_a_date_beyond_the_calendar_costs_one_row(tmp_path):
    """Python cannot hold it, and somebody's sensor wrote it."""
    table = pa.table({"text": ["a", "b", "c"], "at": pa.array([0, 2**60, 1], type=pa.timestamp("s"))})
    assert reasons(read(write_table(tmp_path / "rows.arrow", table))) == ["ok", "unparsable", "ok"]


def test_two_columns_of_one_name_are_refused(tmp_path):
    """One of them would vanish."""
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    with pytest.raises(UserError, match="2 columns named `text`"):
        read(write_table(tmp_path / "rows.arrow", table))


def test_no_flipped_byte_of_a_table_is_worse_than_a_refusal(tmp_path):
    """Lengths that damage made wrong used to be read beyond the file, which killed the process."""
    path = write_table(tmp_path / "rows.arrow", pa.Table.from_pylist(CALLS[:2] * 3))
    whole, rng = path.read_bytes(), random.Random(3)
    outcomes = set()
    for _ in range(300):
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
        try:
            outcomes |= {"read" for row in read(path) if row}
        except UserError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}


# --- lines and encodings

line_bytes = st.binary(max_size=40).map(lambda data: data.replace(b"a", b"\n").replace(b"b", b"\r"))


@given(data=line_bytes, cuts=st.lists(st.integers(0, 40)), limit=st.integers(0, 12))
@settings(max_examples=examples(300))
def test_lines_do_not_depend_on_where_blocks_are_cut(data, cuts, limit):
    """A line end that falls on a block's edge is the classic way to lose or split a row."""
    edges = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    blocks = [data[a:b] for a, b in itertools.pairwise(edges)]
    lines = data.split(b"\n")
    expected = lines[:-1] + ([lines[-1]] if lines[-1] else [])
    found = list(split_lines(blocks, max_bytes=limit))
    assert len(found) == len(expected)
    for line, wanted in zip(found, expected, strict=True):
        if len(wanted) > limit:
            assert isinstance(line, TooLong) and line.num_bytes == len(wanted)
        else:
            assert line == wanted.removesuffix(b"\r")
    assert b"".join(split_lines(blocks, max_bytes=100, keep_ends=True)) == data  # type: ignore[arg-type]


ENCODINGS = {
    "utf-8": "utf-8",
    "utf-8-sig": "utf-8",
    "utf-16": "utf-16",
    "utf-16-le": "utf-16-le",
    "utf-16-be": "utf-16-be",
    "utf-32": "utf-32",
    "utf-32-le": "utf-32-le",
    "utf-32-be": "utf-32-be",
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_an_encoding_is_told_by_a_files_first_bytes(encoding, ending, tmp_path):
    """Windows tools write UTF-16, with and without a mark."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + ending for row in ROWS).encode(encoding))
    (file,) = find_files("rows.jsonl", base=tmp_path)
    assert detect_encoding(file, "auto") == ENCODINGS[encoding]
    assert read(path) == ROWS


@pytest.mark.parametrize("name", ["rows.json", "rows.csv", "rows.txt"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_other_text_formats_know_the_same_encodings(name, encoding, tmp_path):
    """Excel saves CSV as UTF-16 or with a mark, which must not become part of the first column's name."""
    rows = [{"text": "Grüße, 東京 🙂"}, {"text": "zwei"}]
    plain = {"rows.json": json.dumps(rows), "rows.csv": as_csv(rows).decode(), "rows.txt": "Grüße, 東京 🙂\nzwei\n"}
    path = tmp_path / name
    is_bare = encoding.startswith("utf-16-")
    path.write_bytes((("\ufeff" if is_bare else "") + plain[name]).encode(encoding))
    assert read(path, text_rows="line") == rows
    assert not is_bare or read(path, text_rows="line", encoding=encoding) == rows


@pytest.mark.parametrize("name", ["rows.csv", "rows.tsv", "rows.txt", "rows.md"])
def test_tables_and_texts_of_windows_are_cp1252(name, tmp_path):
    """A German Excel saves CSV in cp1252, and every row with an umlaut was dropped."""
    path = tmp_path / name
    path.write_bytes("text\nGrüße – “gut” für 5 €\n".encode("cp1252"))
    (file,) = find_files(str(path), base=tmp_path)
    assert detect_encoding(file, "auto") == "cp1252"
    assert "Grüße – “gut”" in str(read(path, text_rows="file"))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("rows.csv", "text\nGrüße aus Köln, schön\n".encode() + b"one damaged \xe9 byte\n"),
        ("rows.csv", b"text\nno character of cp1252: \xe9\x81\n"),
        ("rows.jsonl", b'{"text": "caf\xe9"}\n'),
    ],
)
def test_other_files_stay_utf8(name, data, tmp_path):
    """Read as cp1252, one damaged byte would turn every umlaut of a UTF-8 file into two wrong letters."""
    (tmp_path / name).write_bytes(data)
    (file,) = find_files(name, base=tmp_path)
    assert detect_encoding(file, "auto") == "utf-8"


def test_the_line_with_which_excel_names_the_delimiter_is_no_header(tmp_path):
    """`sep=;` was read as the column names."""
    rows = [{"question": "a, b?", "answer": "c"}]
    assert csv_rows(tmp_path, b"sep=;\r\nquestion;answer\r\na, b?;c\r\n") == rows
    assert csv_rows(tmp_path, b'"sep=,"\nquestion,answer\n"a, b?",c\n') == rows


def test_an_encoding_can_be_named(tmp_path):
    """There is no telling `cp1252` from other encodings of its kind by looking."""
    path = tmp_path / "rows.csv"
    path.write_bytes("text;n\nGrüße – “gut”;1\n".encode("cp1252"))
    assert read(path, encoding="cp1252") == [{"text": "Grüße – “gut”", "n": "1"}]
    with pytest.raises(UserError, match="unknown encoding"):
        read(path, encoding="klingon")


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("utf-8", b'{"text": "caf\xe9"}'),
        ("utf-16-le", '{"text": "a'.encode("utf-16-le") + b"\x00\xd8" + 'b"}'.encode("utf-16-le")),
        ("utf-16-be", '{"text": "a'.encode("utf-16-be") + b"\xdc\x00" + 'b"}'.encode("utf-16-be")),
        ("cp1252", b'{"text": "a\x81b"}'),
        ("ascii", b'{"text": "caf\xe9"}'),
    ],
)
def test_bytes_that_are_no_text_stay_visible(encoding, data, tmp_path):
    """Replaced silently by U+FFFD, they would be learned and counted nowhere."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data + "\n".encode(encoding))
    (row,) = read(path, encoding=encoding)
    (bad,) = [character for character in row["text"] if "\ud800" <= character <= "\udfff"]
    assert len(row["text"]) in (3, 4), bad


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_rows_appended_in_another_encoding_are_not_lost(encoding, tmp_path):
    """Read as UTF-16 to the end, hundreds of rows would count as one."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"text": "first"}'.encode(encoding) + b"\n" + b'{"text": "more"}\n' * 100)
    assert reasons(read(path)) == ["bad_text", *["ok"] * 100]


def test_an_odd_byte_at_the_end_of_utf_16_costs_one_row(tmp_path):
    """The usual sign of a file cut short."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"text": "a"}\n{"text": "b"}'.encode("utf-16")[:-1])
    assert reasons(read(path)) == ["ok", "bad_text"]


# --- blocks


def block_file(folder: Path, rows: list[bytes]) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    return path


def digests_of(path: Path) -> list[str]:
    (file,) = find_files(path.name, base=path.parent)
    return [block.digest for block in read_blocks(file, LIMITS)]


@given(
    rows=st.lists(st.text(max_size=8).map(lambda text: json.dumps(text).encode()), max_size=30), at=st.integers(0, 30)
)
@settings(max_examples=examples(60))
def test_blocks_together_are_the_files_rows(rows, at, tmp_path_factory):
    """Whatever is cut into blocks must be all of it, in order, each row once."""
    folder = tmp_path_factory.mktemp("blocks")
    path = block_file(folder, [*rows[:at], b"", *rows[at:]])
    (file,) = find_files("rows.jsonl", base=folder)
    blocks = list(read_blocks(file, LIMITS))
    assert [item for block in blocks for item in block.items] == rows
    numbers = [number for block in blocks for number in block.numbers]
    assert numbers == [index + 1 + (index >= at) for index in range(len(rows))]
    assert path.read_bytes().split(b"\n")[:-1] == [*rows[:at], b"", *rows[at:]]


def test_a_row_put_in_the_middle_changes_few_blocks(tmp_path):
    """Blocks that all moved by one row would all be tokenised again."""
    rng = random.Random(7)
    rows = [json.dumps({"text": rng.random()}).encode() for _ in range(20_000)]
    before = digests_of(block_file(tmp_path, rows))
    assert len(before) > 8
    for place in (1, 5_000, 10_000, 13_333, 19_999):
        after = digests_of(block_file(tmp_path, [*rows[:place], b'{"text": "new"}', *rows[place:]]))
        assert len(set(after) - set(before)) <= 3, place
        assert len(set(before) - set(after)) <= 3, place


def test_a_row_is_not_known_by_its_refusal(tmp_path):
    """A line that spells the refusal of another must not be taken for it in the cache."""
    long = b'"' + b"x" * 200 + b'"'
    first = digests_of(block_file(tmp_path, [long]))
    (file,) = find_files("rows.jsonl", base=tmp_path)
    (block,) = read_blocks(file, options(max_row_bytes=100))
    told = str(block.items[0]).encode()
    assert block.digest not in (*first, *digests_of(block_file(tmp_path, [told])))


def test_equal_looking_values_of_other_types_are_other_rows(tmp_path):
    """A function of the user's may treat 1 and "1" differently; the cache must too."""
    digests = set()
    for value in ("1", 1, 1.0, None, float("nan"), True):
        pq.write_table(pa.Table.from_pylist([{"id": value}]), tmp_path / "rows.parquet")
        (file,) = find_files("rows.parquet", base=tmp_path)
        digests |= {block.digest for block in read_blocks(file, LIMITS)}
    assert len(digests) == 6


# --- size


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "rows.arrow"])
def test_a_row_over_the_limit_is_passed_over_and_the_next_is_read(name, tmp_path):
    """One giant row must cost one row, in whatever it came."""
    rows = [{"text": "before"}, {"text": "x" * 5000}, {"text": "after"}]
    found = read(write_container(name, tmp_path, rows), max_row_bytes=1000)
    assert reasons(found) == ["ok", "too_large", "ok"]
    assert "5," in found[1].detail


@pytest.mark.parametrize("text_rows", ["line", "paragraph", "file"])
def test_a_text_over_the_limit_is_passed_over(text_rows, tmp_path):
    """Text files have no rows of their own; the cut must not let a large one through."""
    path = tmp_path / "rows.txt"
    path.write_text("Before.\n\n" + "x" * 5000 + "\n" + "y" * 900 + "\n\nafter\n")
    found = reasons(read(path, text_rows=text_rows, max_row_bytes=1000))
    expected = {"line": ["ok", "too_large", "ok", "ok"], "paragraph": ["ok", "too_large", "ok"], "file": ["too_large"]}
    assert found == expected[text_rows]


READ_ONE_LINE = """
import resource, sys
from pathlib import Path
from tunewell.data.sources.blocks import ReadOptions, read_blocks
from tunewell.data.sources.base import find_files
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
items = [item for file in find_files(path.name, base=path.parent)
         for block in read_blocks(file, ReadOptions(4 << 20, 64, text_rows="file")) for item in block.items]
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
print(len(items), getattr(items[0], "reason", "ok") if items else "none", grown)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_file_of_one_endless_line_is_passed_over_in_little_memory(name, tmp_path):
    """A 100 MB line stands for one of any size: what is held is a block, not the line."""
    path = tmp_path / name
    head = b"text\n" if name == "rows.csv" else b'{"text": "'
    compress = {".gz": lambda data: gzip.compress(data, 1), ".zst": with_checksum}.get(path.suffix, bytes)
    path.write_bytes(compress(head + b"abcdefgh" * (100 << 17) + b'"}'))
    done = run_limited(READ_ONE_LINE, str(path), address_space=1 << 30)
    assert done.returncode == 0, done.stderr[-2000:]
    num_items, reason, grown_mib = done.stdout.split()
    assert (num_items, reason) == ("1", "too_large")
    assert int(grown_mib) < 60


# --- CSV


def csv_rows(tmp_path: Path, data: bytes, name: str = "rows.csv", **changes) -> list:
    (tmp_path / name).write_bytes(data)
    return read(tmp_path / name, **changes)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_what_stands_between_values_is_told_by_the_header(delimiter, tmp_path):
    """Half of Europe writes CSV with semicolons; a name in quotes may hold the other mark."""
    data = f'"question, long"{delimiter}answer;x\n'.replace(";x", "") + f"a{delimiter}b\n"
    assert csv_rows(tmp_path, data.encode()) == [{"question, long": "a", "answer": "b"}]


def test_records_with_damage_cost_one_record_each(tmp_path):
    """Bad quoting in one record must not shift the values of the next."""
    data = b'question,answer\nq1,a1\nq2\nq3,a3,extra\n"q4"x,a4\nq5,"a5\nstill a5"\n,\n\n   \nq6,a6\n"q7,never closed'
    found = csv_rows(tmp_path, data)
    assert reasons(found) == ["ok", "unparsable", "unparsable", "unparsable", "ok", "ok", "ok", "unparsable"]
    assert found[4] == {"question": "q5", "answer": "a5\nstill a5"}
    assert found[5] == {"question": "", "answer": ""}  # empty, but there: it is for cleaning to say so
    assert "line 3" in found[1].detail


def test_a_quote_that_is_never_closed_costs_no_more_than_the_limit(tmp_path):
    """Without one, the rest of the file would be one value."""
    rows = b"".join(b"q%d,a%d\n" % (index, index) for index in range(1000))
    found = csv_rows(tmp_path, b'question,answer\n"open,a\n' + rows, max_row_bytes=2000)
    assert found[0].reason == "too_large"
    assert found[-1] == {"question": "q999", "answer": "a999"}
    assert 700 < len(found) < 1000


def test_bare_carriage_returns_end_lines_too(tmp_path):
    """Old spreadsheets on the Mac end lines so."""
    assert csv_rows(tmp_path, b'q,a\r1,"x\ry"\r2,z\r') == [{"q": "1", "a": "x\ry"}, {"q": "2", "a": "z"}]


@pytest.mark.parametrize(
    ("data", "what", "fix"),
    [
        (b"", "is empty", "name the columns in the first line, like `question,answer`"),
        (b"\n\n", "is empty", "name the columns"),
        (b"a,b,a\n1,2,3\n", "has 2 columns named `a`", "rename or delete one of them"),
        (b",\n1,2\n", "names no columns", "name the columns"),
        (b"Our FAQ,,\nq,a,b\n1,2,3\n", "has 2 columns without a name", "delete the rows above the header"),
    ],
)
def test_a_table_without_names_for_its_columns_is_refused(data, what, fix, tmp_path):
    """Without names there is no telling question from answer."""
    with pytest.raises(UserError, match=what) as caught:
        csv_rows(tmp_path, data)
    assert fix in str(caught.value.fix)


def test_a_table_whose_first_line_is_endless_is_refused(tmp_path):
    """It is no table, and must not be held to find out."""
    with pytest.raises(UserError, match="cannot be read as column names"):
        csv_rows(tmp_path, b"a," * 5000, max_row_bytes=1000)


def test_bytes_that_are_no_text_in_a_table_stay_visible(tmp_path):
    """Excel saves in the machine's own encoding; that must show, row by row."""
    rows = csv_rows(tmp_path, b"q,a\ncaf\xe9,b\nc\0d,e\nok,ok\n")
    assert rows == [{"q": "caf\udce9", "a": "b"}, {"q": "c\0d", "a": "e"}, {"q": "ok", "a": "ok"}]


# --- plain text


def test_text_is_cut_at_lines_paragraphs_or_not_at_all(tmp_path):
    """A row of text is known by the line it begins on."""
    path = tmp_path / "rows.txt"
    path.write_bytes(b"\n  first\r\nsecond\n\n \nthird\n\n\n")
    lines = [(2, {"text": "  first"}), (3, {"text": "second"}), (6, {"text": "third"})]
    assert read_numbered(path, text_rows="line") == lines
    assert read_numbered(path) == [(2, {"text": "  first\nsecond"}), (6, {"text": "third"})]
    assert read_numbered(path, text_rows="file") == [(2, {"text": "  first\nsecond\n\n \nthird"})]
    path.write_bytes(b"\n \n")
    assert [read(path, text_rows=cut) for cut in ("line", "paragraph", "file")] == [[], [], []]


def test_blank_lines_have_a_number_and_are_no_rows(tmp_path):
    """A person must find the line that the ledger names."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"text": "a"}\n   \n\t\r\n{"text": "b"}\n\n')
    assert read_numbered(path) == [(2, {"text": "a"}), (5, {"text": "b"})]


def test_lines_of_a_file_that_is_not_there_raise_no_user_error(tmp_path):
    """A file that vanishes between finding and reading is the machine's fault, and says so."""
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (file,) = find_files("rows.jsonl", base=tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(read_lines(file, encoding="utf-8", max_bytes=10))
