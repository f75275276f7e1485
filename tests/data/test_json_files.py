"""Cutting `.json` files into rows: which rows they hold, and what one broken row costs."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tunewell.core.errors import UserError
from tunewell.data.rows.conversation import Rejected
from tunewell.data.sources.blocks import ReadOptions, parse_item, read_blocks
from tunewell.data.sources.files import find_files
from tunewell.data.sources.json_files import split_members
from tunewell.data.sources.lines import TooLong

ROWS = [{"question": "a]b}", "answer": '"{['}, {"question": "\\", "answer": "x\\\\"}, {"question": "ü", "answer": ","}]


def read(folder: Path, data: str | bytes, name: str = "rows.json", max_row_bytes: int = 10_000) -> list:
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    (file,) = find_files(name, base=folder)
    chosen = ReadOptions(max_row_bytes, 64)
    rows = []
    for block in read_blocks(file, chosen):
        for item in block.items:
            try:
                rows.append(parse_item(item, chosen))
            except Rejected as rejected:
                rows.append(rejected.reason)
    return rows


@pytest.mark.parametrize("indent", [None, 0, 4])
@pytest.mark.parametrize(
    "shape",
    [
        ROWS,
        {"data": ROWS},
        {"version": "1.0", "meta": {"a": [1]}, "tags": ["x"], "data": ROWS, "more": [], "license": {}},
        {"id1": ROWS[0], "id2": ROWS[1], "id3": ROWS[2]},
    ],
    ids=["list", "list inside", "list among others", "by id"],
)
def test_rows_are_found_in_every_usual_shape(shape, indent, tmp_path):
    """People save rows as a list, under a key, or by their ids."""
    assert read(tmp_path, json.dumps(shape, indent=indent)) == ROWS


def test_one_row_may_be_the_whole_file(tmp_path):
    """A conversation is not to be taken apart into its turns because it is the only one."""
    conversation = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    assert read(tmp_path, json.dumps(conversation, indent=1)) == [conversation]
    assert read(tmp_path, json.dumps(ROWS[0])) == [ROWS[0]]
    assert read(tmp_path, '"just text"') == ["just text"]
    assert read(tmp_path, "{}") == [{}]


@pytest.mark.parametrize("between", ["\n", "", "\n\n  "])
@pytest.mark.parametrize("indent", [None, 2])
def test_objects_one_behind_the_other_are_rows(between, indent, tmp_path):
    """Half of the `.json` files in the wild have one object a line."""
    assert read(tmp_path, between.join(json.dumps(row, indent=indent) for row in ROWS)) == ROWS


def test_lines_under_the_name_of_json_are_read_as_lines(tmp_path):
    """Then a broken line costs that line and keeps its number."""
    lines = [json.dumps(row) for row in ROWS]
    assert read(tmp_path, "\n".join([lines[0], '{"question": "[', *lines[1:]])) == [ROWS[0], "unparsable", *ROWS[1:]]


def test_a_list_under_the_name_of_jsonl_is_read_as_a_list(tmp_path):
    """Otherwise each of its lines would be unparsable."""
    assert read(tmp_path, json.dumps(ROWS, indent=2), name="rows.jsonl") == ROWS


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ('{"question": "a" "answer": "b"}', "unparsable"),
        ('{"question": [1, 2}', "unparsable"),
        ('{"question": "a"}}', "unparsable"),
        ('{"question": "never closed,\n"answer": "b"}', "unparsable"),
        ('{"a": 1, "a": 2}', "unparsable"),
        ('{"a": NaN}', "unparsable"),
        ('{"a": {"b": {"c": 1, "c": 2}}}', "unparsable"),
        ("nonsense", "unparsable"),
        ('{"question": "' + "x" * 20_000 + '"}', "too_large"),
        ("[" * 100_000 + "]" * 100_000, "too_large"),
        ("[" * 100 + "]" * 100, "too_large"),
    ],
)
def test_a_broken_row_costs_one_row(broken, reason, tmp_path):
    """Whoever has 100,000 rows must not lose the file to one of them."""
    good = [json.dumps(row) for row in ROWS]
    data = "[\n" + ",\n".join([good[0], broken, *good[1:]]) + "\n]"
    assert read(tmp_path, data) == [ROWS[0], reason, *ROWS[1:]]


def test_bytes_that_are_no_text_cost_one_row_at_most(tmp_path):
    """They come through as half characters for the text policy to judge."""
    assert read(tmp_path, b'[{"text": "a"}, {"text": "caf\xe9"}, {"text": "b"}]') == [
        {"text": "a"},
        {"text": "caf\udce9"},
        {"text": "b"},
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("", "is empty"),
        (" \n ", "is empty"),
        ('[{"a": 1}, {"b": 2}', "ends before its brackets are closed"),
        ('[{"a": 1}, {"b": ', "ends before its brackets are closed"),
        ('{"data": [{"a": 1}', "ends before its brackets are closed"),
        ('[{"a": 1}] trailing', "goes on behind the end"),
        ('[{"a": 1}][{"b": 2}]', "goes on behind the end"),
    ],
)
def test_a_file_that_is_broken_as_a_whole_is_refused(data, words, tmp_path):
    """Nobody can say how many rows are missing behind the place where a file was cut."""
    with pytest.raises(UserError, match=words):
        read(tmp_path, data)


def test_a_row_that_swallows_the_rest_is_named(tmp_path):
    """The person has to find the missing quote."""
    with pytest.raises(UserError) as caught:
        read(tmp_path, '[{"a": 1},\n{"b": "never closed},\n{"c": 3}]')
    assert caught.value.where == "in row 2"


def test_commas_too_many_are_no_rows(tmp_path):
    """A comma behind the last row is the commonest slip in JSON written by hand."""
    assert read(tmp_path, '[{"a": 1},, {"b": 2}, ]') == [{"a": 1}, {"b": 2}]
    assert read(tmp_path, "[]") == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(rows=st.lists(json_values, max_size=6), indent=st.sampled_from([None, 1]), size=st.integers(1, 9))
@settings(max_examples=100)
def test_members_do_not_depend_on_where_blocks_are_cut(rows, indent, size):
    """Quotes, escapes and brackets fall on the edges of blocks sooner or later."""
    data = json.dumps(rows, indent=indent).encode()
    blocks = [data[start : start + size] for start in range(0, len(data), size)]
    members = list(split_members(blocks, level=1, max_bytes=10_000, name="rows.json"))
    assert [json.loads(member.value) for member in members] == rows  # type: ignore[arg-type]
    small = list(split_members(blocks, level=1, max_bytes=5, name="rows.json"))
    assert len(small) == len(rows)
    assert all(isinstance(member.value, TooLong) or len(member.value) <= 5 for member in small)


@given(data=st.text(alphabet='[]{},:"\\ab1 \n', max_size=60), level=st.integers(0, 2), size=st.integers(1, 9))
@example(data='"\\\n[', level=1, size=1)
@settings(max_examples=300)
def test_no_text_breaks_the_splitter(data, level, size):
    """Whatever stands in the file, it gives members or a UserError, the same for every cut into blocks."""
    raw = data.encode()

    def split(blocks):
        try:
            return [(m.value, m.key, m.parent) for m in split_members(blocks, level=level, max_bytes=1000, name="x")]
        except UserError as error:
            return error.what

    assert split([raw]) == split([raw[start : start + size] for start in range(0, len(raw), size)])
