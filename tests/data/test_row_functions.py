"""A function of the user's that maps rows: loaded exactly, called right, never trusted with the count."""

import os
import sys

import pytest
from tiny import dropped_rows, prepare, write_jsonl

from tunewell.core.errors import UserError
from tunewell.data.rows.functions import load_row_function

ROWS = [{"q": f"question {index}", "a": f"answer {index}"} for index in range(10)]


@pytest.fixture
def function(tmp_path):
    """Write a file of functions and load one of them."""

    def load(source: str, name: str = "convert", batch: int | None = None):
        (tmp_path / "rows.py").write_text(source)
        return load_row_function(f"rows.py:{name}", batch=batch, base=tmp_path)

    return load


def apply(loaded, rows=ROWS):
    return loaded.apply(list(rows), list(range(1, len(rows) + 1)), "rows.jsonl")


def test_rows_are_mapped_one_at_a_time(function):
    """The plainest function there is."""
    loaded = function("def convert(row): return {'question': row['q'], 'answer': row['a']}")
    assert apply(loaded)[3] == {"question": "question 3", "answer": "answer 3"}
    assert len(apply(loaded)) == 10


def test_rows_are_mapped_in_batches_of_the_size_asked_for(function):
    """The last batch holds what is left."""
    loaded = function("def convert(rows): return [len(rows)] * len(rows)", batch=4)
    assert apply(loaded) == [4, 4, 4, 4, 4, 4, 4, 4, 2, 2]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("rows[:-1]", "3 rows"),
        ("[*rows, {}]", "5 rows"),
        ("[]", "0 rows"),
        ("None", "a NoneType"),
        ("(row for row in rows)", "a generator"),
        ("rows[0]", "a dict"),
    ],
)
def test_a_batch_that_comes_back_with_another_count_is_an_error(body, found, function):
    """Rows would be lost, or get each other's numbers."""
    with pytest.raises(UserError, match=f"got 4 rows and returned {found}") as caught:
        apply(function(f"def convert(rows): return {body}", batch=4))
    assert caught.value.where == "rows.jsonl row 1 to 4"


def test_a_function_that_empties_its_argument_is_found_out(function):
    """The count is taken before it is called."""
    with pytest.raises(UserError, match="got 4 rows and returned 0 rows"):
        apply(function("def convert(rows):\n    rows.clear()\n    return rows", batch=4))


@pytest.mark.parametrize("body", ["1 / 0", "row['nothing']", "exit()", "(_ for _ in ()).throw(RecursionError())"])
def test_a_function_that_fails_names_the_row(body, function):
    """The traceback of somebody's own code is not a bug of ours."""
    with pytest.raises(UserError, match=r"`rows.py:convert` failed: ") as caught:
        apply(function(f"def convert(row): return {body} if row['q'] == 'question 4' else row"))
    assert caught.value.where == "rows.jsonl row 5"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def convert(row) return row", "SyntaxError"),
        ("import nothing_of_that_name", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("\0", "cannot be loaded"),
        ("convert = 5", "has no function `convert`"),
        ("def other(row): return row", "has no function `convert`"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_words(source, words, function):
    """Before a single row is read."""
    with pytest.raises(UserError, match=words):
        function(source)


def test_a_function_that_is_not_there_is_refused(tmp_path):
    """A path without a function, or a function without a path."""
    for reference in ("nothing.py:convert", "convert", ":convert"):
        with pytest.raises(UserError, match="there is no"):
            load_row_function(reference, batch=None, base=tmp_path)


def test_a_file_may_hold_what_python_files_hold(function):
    """Dataclasses look up their own module; annotations may be text."""
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass, asdict\n"
        "@dataclass\nclass Pair:\n    question: str\n    answer: str\n"
        "def convert(row): return asdict(Pair(row['q'], row['a']))\n"
    )
    assert apply(function(source))[0] == {"question": "question 0", "answer": "answer 0"}


def test_the_text_that_is_hashed_is_the_text_that_runs(function, tmp_path):
    """Python's own loader runs a compiled copy when size and second of the file have not changed."""
    first = function("def convert(row): return 1")
    stamp = (tmp_path / "rows.py").stat()
    (tmp_path / "rows.py").write_text("def convert(row): return 2")
    os.utime(tmp_path / "rows.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = load_row_function("rows.py:convert", batch=None, base=tmp_path)
    assert (apply(first)[0], apply(second)[0]) == (1, 2)
    assert first.sha256 != second.sha256
    assert not (tmp_path / "__pycache__").exists()


def test_two_functions_of_one_file_are_not_the_same(function):
    """The hash decides which rows are taken from the cache."""
    source = "def one(row): return 1\ndef two(row): return 2"
    assert function(source, "one").sha256 != function(source, "two").sha256


def test_files_of_one_name_in_two_folders_stay_apart(tmp_path):
    """Two sources may each have their `rows.py`."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.py").write_text(f"NAME = '{name}'\ndef convert(row): return NAME")
    loaded = [load_row_function("rows.py:convert", batch=None, base=tmp_path / name) for name in ("a", "b")]
    assert [apply(one)[0] for one in loaded] == [{"text": "a"}, {"text": "b"}]
    assert len([name for name in sys.modules if name.startswith("tunewell_user_rows_")]) >= 2


# --- inside `prepare`

FUNCTIONS = """
def plain(row):
    return {"question": row["q"], "answer": row["a"]} if row["q"] != "question 3" else None

def loud(row):
    return {"question": row["q"].upper(), "answer": row["a"]}

def batched(rows):
    return [plain(row) for row in rows]

def short(rows):
    return [plain(row) for row in rows][1:]
"""


def run(folder, model, name, *more, code=0):
    sets = [f"data.sources[0].map=rows.py:{name}", "data.held_out=0.0", *more]
    return prepare(folder, model, "rows.jsonl", sets=sets, code=code)


def test_a_row_the_function_leaves_out_is_counted(tiny_model, tmp_path):
    """Also one that could not be read, which the function never sees."""
    (tmp_path / "rows.py").write_text(FUNCTIONS)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("not json\n")
    for name, more in (("plain", ()), ("batched", ("data.sources[0].map_batch=3",))):
        result = run(tmp_path, tiny_model, name, *more)
        assert result["dropped"] == {"dropped_by_map": 1, "unparsable": 1}
        assert result["documents"] == 9
        found = {row["row"]: row["reason"] for row in dropped_rows(tmp_path)}
        assert found == {4: "dropped_by_map", 11: "unparsable"}


def test_a_short_batch_stops_prepare(tiny_model, tmp_path):
    """A smaller corpus must never be the answer."""
    (tmp_path / "rows.py").write_text(FUNCTIONS)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    answer = run(tmp_path, tiny_model, "short", "data.sources[0].map_batch=5", code=2)
    assert "returned 4 rows" in answer["error"]["what"]
    assert not (tmp_path / "corpus").exists()


def test_another_function_of_the_same_file_makes_another_corpus(tiny_model, tmp_path):
    """Rows mapped by the one must not be found in the cache for the other."""
    (tmp_path / "rows.py").write_text(FUNCTIONS)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    first = run(tmp_path, tiny_model, "plain")
    second = run(tmp_path, tiny_model, "loud")
    assert second["documents"] == 10
    assert first["corpus_sha256"] != second["corpus_sha256"]
    assert run(tmp_path, tiny_model, "plain")["corpus_sha256"] == first["corpus_sha256"]


@pytest.mark.parametrize(
    "body",
    [
        'return {"text": [f"{q} {a}" for q, a in zip(rows["q"], rows["a"])]}',
        'return [f"{q} {a}" for q, a in zip(rows["q"], rows["a"])]',
        'return {"text": [rows["q"][i] + " " + rows["a"][i] for i in range(len(rows["q"]))]}',
        "return {\"text\": [f\"{row['q']} {row['a']}\" for row in rows]}",
        'return {"text": [" ".join(pair) for pair in zip(*rows.values())], "other": [1] * len(rows.get("q"))}',
    ],
)
def test_hugging_faces_batched_form_is_understood(function, body):
    """Most formatting functions in notebooks take columns, and give texts or columns back."""
    mapped = apply(function(f"def convert(rows):\n    {body}", batch=4))
    assert [row["text"] for row in mapped] == [f"question {index} answer {index}" for index in range(10)]


def test_columns_of_a_batch_are_those_of_all_its_rows(function):
    """A row without a column has None there, as in a table."""
    rows = [{"q": "1"}, {"q": "2", "extra": 5}, "no object"]
    loaded = function("def convert(rows): return [[list(rows.keys()), rows['extra'], 'q' in rows]] * 3", batch=3)
    assert apply(loaded, rows)[0] == [["q", "extra"], [None, 5, None], True]
    with pytest.raises(UserError, match="KeyError: 'missing'"):
        apply(function("def convert(rows): return rows['missing']", batch=3), rows)


@pytest.mark.parametrize("result", ['{"text": ["a", "b", "c"]}', '{"a": [1, 2, 3, 4], "b": [1]}', '{"a": 4}'])
def test_columns_of_another_length_are_an_error(function, result):
    """Rows would be lost, or get each other's values."""
    with pytest.raises(UserError, match="got 4 rows and returned"):
        apply(function(f"def convert(rows): return {result}", batch=4))


def test_a_text_is_a_row_and_a_batched_function_without_batches_is_named(function):
    """A batched function that gets one row sees the letters of its texts as rows."""
    assert apply(function("def convert(row): return row['q']"))[0] == {"text": "question 0"}
    for body in ('[q + a for q, a in zip(row["q"], row["a"])]', '{"text": [letter for letter in row["q"]]}'):
        with pytest.raises(UserError, match="batched function of Hugging Face") as caught:
            apply(function(f"def convert(row): return {body}"))
        assert "map_batch" in str(caught.value.fix)
    messages = {"messages": [{"role": "user", "content": "q"}]}
    assert apply(function(f"def convert(row): return {messages}"))[0] == messages
