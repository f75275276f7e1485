"""Reading `.json` files: which rows they contain, and what is an error."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.core.errors import UserError
from tunewell.data.rows.conversation import Rejected
from tunewell.data.sources import records as json_files
from tunewell.data.sources.base import find_files
from tunewell.data.sources.blocks import ReadOptions, parse_item, read_blocks

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
        ('{"question": "' + "x" * 20_000 + '"}', "too_large"),
        ("[" * 100 + "]" * 100, "too_large"),
    ],
)
def test_a_row_that_is_too_large_costs_one_row(broken, reason, tmp_path):
    """Whoever has 100,000 rows must not lose the file to one of them."""
    good = [json.dumps(row) for row in ROWS]
    data = "[\n" + ",\n".join([good[0], broken, *good[1:]]) + "\n]"
    assert read(tmp_path, data) == [ROWS[0], reason, *ROWS[1:]]


@pytest.mark.parametrize(
    ("broken", "where"),
    [
        ('{"question": "a" "answer": "b"}', "line 3 column 18"),
        ('{"question": [1, 2}', "line 3 column 19"),
        ('{"question": "a"}}', "line 3 column 18"),
        ('{"question": "never closed,\n"answer": "b"}', "line 3 column 28"),
        ("nonsense", "line 3 column 1"),
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"a": {"b": {"c": 1, "c": 2}}}', "duplicate key 'c'"),
        ('{"a": NaN}', "NaN is not JSON"),
        ("[" * 100_000 + "]" * 100_000, "nested more than"),
        (", ", "line 3 column 1"),
    ],
)
def test_a_syntax_error_is_an_error_with_its_position(broken, where, tmp_path):
    """The file is parsed as a whole: nobody can tell how many rows an error hides."""
    good = [json.dumps(row) for row in ROWS]
    with pytest.raises(UserError, match="is not valid JSON") as caught:
        read(tmp_path, "[\n" + ",\n".join([good[0], broken, *good[1:]]) + "\n]")
    assert where in str(caught.value.where)
    assert ".jsonl" in str(caught.value.fix)


def test_bytes_that_are_no_text_cost_one_row_at_most(tmp_path):
    """They come through as half characters for the text policy to judge."""
    assert read(tmp_path, b'[{"text": "a"}, {"text": "caf\xe9"}, {"text": "b"}]') == [
        {"text": "a"},
        {"text": "caf\udce9"},
        {"text": "b"},
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "is empty"),
        (" \n ", "is empty"),
        ('[{"a": 1}, {"b": 2}', "is not valid JSON"),
        ('[{"a": 1}, {"b": ', "is not valid JSON"),
        ('{"data": [{"a": 1}', "is not valid JSON"),
        ('[{"a": 1}] trailing', "is not valid JSON"),
        ('[{"a": 1}][{"b": 2}]', "continues after the end of its list"),
    ],
)
def test_a_truncated_or_continued_file_is_an_error(data, message, tmp_path):
    """Nobody can say how many rows are missing after the place where a file was cut."""
    with pytest.raises(UserError, match=message):
        read(tmp_path, data)


def test_a_file_over_the_limit_is_an_error_that_names_jsonl(tmp_path, monkeypatch):
    """A file is parsed as a whole, so one of any size would fill the memory."""
    monkeypatch.setattr(json_files, "MAX_JSON_BYTES", 100)
    assert read(tmp_path, json.dumps([{"text": "x" * 50}])) == [{"text": "x" * 50}]
    with pytest.raises(UserError, match="is larger than") as caught:
        read(tmp_path, json.dumps([{"text": "x" * 50}] * 2))
    assert "convert the file to .jsonl" in str(caught.value.fix)


def test_an_empty_list_has_no_rows(tmp_path):
    assert read(tmp_path, "[]") == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(rows=st.lists(json_values, max_size=6), indent=st.sampled_from([None, 1]))
def test_the_elements_of_a_list_are_its_rows(tmp_path_factory, rows, indent):
    """Whatever the rows are, none is lost or changed."""
    assert read(tmp_path_factory.mktemp("json"), json.dumps(rows, indent=indent)) == rows


@given(data=st.text(alphabet='[]{},:"\\ab1 \n', max_size=60))
def test_any_text_gives_rows_or_a_user_error(tmp_path_factory, data):
    """A broken file is the user's to correct; it must never end in a traceback."""
    with suppress(UserError):
        read(tmp_path_factory.mktemp("json"), data)
