"""Recognising rows by their content and making conversations of them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import prepare, write_jsonl

from examples_limit import examples
from tunewell.config.extensions import FORMATS
from tunewell.config.schema import Clean
from tunewell.core.errors import UserError
from tunewell.data.rows.cleaning import clean
from tunewell.data.rows.conversation import Conversation, Rejected
from tunewell.data.rows.formats import Converter, FormatOptions
from tunewell.data.sources.base import find_files
from tunewell.data.sources.blocks import ReadOptions, parse_item, read_blocks


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def said(name, text):
    return {"from": name, "value": text}


def part(text):
    return {"type": "text", "text": text}


def convert(row, **options) -> Conversation:
    return Converter(**options).convert(row)[0]


def refusal(row, **options) -> str:
    with pytest.raises(Rejected) as caught:
        convert(row, **options)
    assert caught.value.reason == "not_a_conversation"
    return caught.value.detail


@pytest.mark.parametrize(
    ("row", "name", "messages"),
    [
        ({"instruction": "Add", "input": "1 2", "output": "3"}, "alpaca", [user("Add\n\n1 2"), assistant("3")]),
        ({"instruction": "Add", "input": " ", "output": "3"}, "alpaca", [user("Add"), assistant("3")]),
        ({"instruction": "", "input": "1 + 2?", "output": "3"}, "alpaca", [user("1 + 2?"), assistant("3")]),
        ({"instruction": "Hi", "output": "Ho", "text": "### Hi"}, "alpaca", [user("Hi"), assistant("Ho")]),
        ({"instruction": "Sum", "context": "abc", "response": "a"}, "dolly", [user("Sum\n\nabc"), assistant("a")]),
        ({"instruction": "Sum", "input": "abc", "response": "a"}, "dolly", [user("Sum\n\nabc"), assistant("a")]),
        ({"question": "q", "answer": "a"}, "question_answer", [user("q"), assistant("a")]),
        ({"question": "q", "solution": "a", "id": 7}, "question_answer", [user("q"), assistant("a")]),
        ({"problem": "q", "solution": "a"}, "question_answer", [user("q"), assistant("a")]),
        ({"question": "q", "context": "c", "answer": "a"}, "question_answer", [user("q\n\nc"), assistant("a")]),
        ({"user": "q", "assistant": "a", "system": "s"}, "question_answer", [system("s"), user("q"), assistant("a")]),
        ({"input": "q", "output": "a"}, "question_answer", [user("q"), assistant("a")]),
        ({"prompt": "q", "response": "a"}, "question_answer", [user("q"), assistant("a")]),
        ({"prompt": "p", "completion": "c"}, "prompt_completion", [user("p"), assistant("c")]),
        ({"prompt": [user("p")], "completion": "c"}, "prompt_completion", [user("p"), assistant("c")]),
        ({"messages": [user("q"), assistant("a")]}, "messages", [user("q"), assistant("a")]),
        (
            {"conversations": [said("system", "s"), said("Human", "q"), said("gpt", "a")]},
            "sharegpt",
            [system("s"), user("q"), assistant("a")],
        ),
        (
            {"conversations": [user("q"), assistant("a")], "system": "s"},
            "sharegpt",
            [system("s"), user("q"), assistant("a")],
        ),
        ([user("q"), assistant("a")], "messages", [user("q"), assistant("a")]),
        (
            {"messages": [user([part("a"), {"text": "b"}, "c"]), assistant([part("d")])]},
            "messages",
            [user("abc"), assistant("d")],
        ),
        ({"question": [{"type": "text", "text": "q"}], "answer": "a"}, "question_answer", [user("q"), assistant("a")]),
    ],
)
def test_a_row_is_recognised_by_its_content(row, name, messages):
    """Nobody should have to say what a file holds when the file says it."""
    conversation, found = Converter().convert(row)
    assert found == name
    assert conversation.messages == messages
    assert conversation.text is None
    if isinstance(row, dict):
        assert Converter(format_name=name).convert(row)[0] == conversation


def test_plain_text_is_learned_whole():
    """A row of text, or a text alone, is a document without turns."""
    assert convert({"text": "Once.", "meta": {"a": 1}}) == Conversation(text="Once.")
    assert Converter(format_name="text").convert("Once.")[0] == Conversation(text="Once.")
    assert refusal("Once.") == "the row is text, not an object"  # in a file of conversations it is a broken row


def test_every_format_can_be_named():
    """A name in the config that no converter knows would fail on the first row."""
    assert all(refusal({"x": 1}, format_name=name) for name in FORMATS.names() if name != "auto")


def test_a_file_may_change_its_format_from_row_to_row():
    """Files are put together from others; the format is told row by row, also with equal keys."""
    converter = Converter()
    rows = [
        {"instruction": "a", "output": "b"},
        {"question": "a", "answer": "b"},
        {"messages": [user("a"), assistant("b")]},
        {"text": "a"},
        {"instruction": "a", "output": "b"},
    ]
    assert [converter.convert(row)[1] for row in rows] == ["alpaca", "question_answer", "messages", "text", "alpaca"]


@pytest.mark.parametrize("nothing", [None, ""])
def test_columns_of_other_formats_may_be_there_and_empty(nothing):
    """A table has the columns of all its rows; those of the others say nothing about this one."""
    keys = ("messages", "conversations", "prompt", "completion", "question", "answer", "text")
    empty = dict.fromkeys(keys, nothing)
    converter = Converter()
    assert converter.convert(empty | {"question": "q", "answer": "a"})[0].messages == [user("q"), assistant("a")]
    assert converter.convert(empty | {"prompt": "q", "completion": "a"})[1] == "prompt_completion"
    assert converter.convert(empty | {"messages": [user("q"), assistant("a")]})[1] == "messages"
    assert converter.convert(empty | {"text": "t"})[0].text == "t"


def test_a_row_with_half_its_format_is_not_taken_for_another():
    """Alpaca's own file has a column `text`; a row without a reply must not be learned from that."""
    conversation, name = Converter().convert({"instruction": "q", "output": None, "text": "### q"})
    assert name == "alpaca"
    assert conversation.messages == [user("q"), assistant("")]


INTRODUCTION = "Below is an instruction that describes a task"
REQUEST = "Write a response that appropriately completes the request.\n\n### Instruction:\n"


@pytest.mark.parametrize(
    ("row", "question"),
    [
        (
            {"instruction": "Add {a}", "input": "1 {2}", "output": "3"},
            f"{INTRODUCTION}, paired with an input that provides further context. {REQUEST}Add {{a}}\n\n"
            "### Input:\n1 {2}\n\n### Response:",
        ),
        (
            {"instruction": "Add", "input": " ", "output": "3", "system": "s"},
            f"{INTRODUCTION}. {REQUEST}Add\n\n### Response:",
        ),
        ({"instruction": "Add", "output": "3", "context": "c"}, f"{INTRODUCTION}. {REQUEST}Add\n\n### Response:"),
        ({"instruction": "", "input": "1 + 2?", "output": "3"}, "1 + 2?"),
    ],
)
def test_the_public_alpaca_prompt_is_a_format(row, question):
    """Models of the Alpaca family were trained with exactly this text; by default the input is appended."""
    conversation, name = Converter(format_name="alpaca_prompt").convert(row)
    assert name == "alpaca_prompt"
    assert conversation.messages[-2:] == [user(question), assistant("3")]
    assert (conversation.messages[0]["role"] == "system") == ("system" in row)


def test_the_alpaca_prompt_is_written_once():
    """The template `alpaca` writes the prompt itself, and knows the form of an input."""
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    options = FormatOptions(marks_input=True)
    written = [Converter(format_name=name, options=options).convert(row)[0] for name in ("alpaca", "alpaca_prompt")]
    assert written[0] == written[1]


# --- turns


def test_what_a_turn_carries_is_kept():
    """Tool calls without any words have two keys like a plain turn, and are none."""
    call = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    turns = [
        user("q"),
        {"role": "assistant", "tool_calls": call},
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
        assistant("a", reasoning_content="hm", tool_calls=[], weight=None),
    ]
    conversation = convert({"messages": turns, "tools": [{"name": "f"}]})
    assert conversation.messages == [
        user("q"),
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
        assistant("a", reasoning_content="hm"),
    ]
    assert conversation.tools == [{"name": "f"}]
    assert conversation.learn is None


def test_lists_written_as_text_are_opened():
    """Tools and turns stand as JSON text in many a dataset."""
    row = {"messages": json.dumps([user("q"), assistant("a")]), "tools": '[{"name": "f"}]'}
    assert convert(row) == Conversation([user("q"), assistant("a")], tools=[{"name": "f"}])
    assert convert({"messages": [user("q"), assistant("a")], "tools": ""}).tools is None
    assert convert({"prompt": json.dumps([user("q")]), "completion": json.dumps([assistant("a")])}).messages == [
        user("q"),
        assistant("a"),
    ]


def test_a_prompt_that_is_json_itself_stays_text():
    """`[{"a": 1}]` may be just what somebody asks about."""
    for prompt in ('[{"a": 1}]', "[]", "[1, 2", '["user"]'):
        assert convert({"prompt": prompt, "completion": "c"}).messages[0] == user(prompt)


def test_only_the_completion_is_learned():
    """Replies inside a prompt are given."""
    row = {"prompt": [user("q"), assistant("a"), user("q2")], "completion": [assistant("a2")], "system": "s"}
    conversation = convert(row)
    assert conversation.messages == [system("s"), user("q"), assistant("a"), user("q2"), assistant("a2")]
    assert conversation.learn == [None, False, False, False, None]
    unlearned = convert({"prompt": [user("q")], "completion": [assistant("a", weight=0)]})
    assert unlearned.learn == [False, False]


def test_weights_say_what_is_learned():
    """They move with their turns when a system message is put before them."""
    turns = [user("q"), assistant("a", weight=0), user("q2"), assistant("a2", weight=1)]
    assert convert({"messages": turns}).learn == [None, False, None, True]
    assert convert({"messages": turns, "system": "s"}).learn == [None, None, False, None, True]
    assert convert({"messages": turns}, system="s").learn == [None, None, False, None, True]
    assert convert({"messages": turns}).messages[1] == assistant("a")


def test_a_system_message_is_added_where_there_is_none():
    """The source's own never overrides what a row says."""
    assert convert({"question": "q", "answer": "a"}, system="s").messages[0] == system("s")
    assert convert({"question": "q", "answer": "a", "system": "own"}, system="s").messages[0] == system("own")
    turns = [system("own"), user("q"), assistant("a")]
    assert convert({"messages": turns, "system": "row"}).messages == turns
    assert convert({"question": "q", "answer": "a", "system": " "}).messages[0] == user("q")
    assert convert({"text": "t"}, system="s").text == "t"


# --- columns


def test_columns_can_be_mapped():
    """Rows in another language have other names."""
    row = {"Frage": "q", "Antwort": "a", "question": "not this", "text": "nor this", "messages": []}
    columns = {"question": "Frage", "answer": "Antwort"}
    assert convert(row, columns=columns).messages == [user("q"), assistant("a")]
    assert convert({"Frage": "q", "answer": "a"}, columns={"question": "Frage"}).messages == [user("q"), assistant("a")]
    assert convert({"chat": [user("q"), assistant("a")]}, columns={"messages": "chat"}).messages[0] == user("q")
    assert "column 'Antwort' is missing" in refusal({"Frage": "q"}, columns=columns)


def test_columns_may_be_swapped():
    """Taking one name must not lose the other."""
    columns = {"question": "answer", "answer": "question"}
    assert convert({"question": "a", "answer": "q"}, columns=columns).messages == [user("q"), assistant("a")]


def test_a_mapping_the_wrong_way_round_is_refused_at_once():
    """`Frage: question` would drop every row for a column that is not there."""
    with pytest.raises(UserError, match="is not a tunewell field") as caught:
        Converter(columns={"Frage": "question"})
    assert "question: Frage" in str(caught.value.fix)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (3.5, "3.5"), (True, "true"), (False, "false"), (-7, "-7")])
def test_a_number_as_question_or_answer_is_its_json_text(value, text):
    """A CSV file with the same cells gave text, and the same rows as JSON were dropped."""
    rows = [
        {"question": "q", "answer": value},
        {"prompt": "q", "completion": value},
        {"instruction": "q", "output": value},
    ]
    rows += [{"question": "q", "answer": value, "solution": "other"}, {"prompt": "q", "chosen": value, "rejected": "r"}]
    for row in rows:
        conversation, _ = Converter().convert(row)
        assert conversation.messages == [user("q"), assistant(text)]
        assert conversation.notes["numbers_as_text"] == 1
        assert value in row.values()
    assert Converter().convert({"question": "q", "answer": "3", "id": 5})[0].notes is None


# --- refusals


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (5, "a number"),
        (None, "null"),
        (True, "true or false"),
        ({}, "its columns: none"),
        ({"foo": 1, "bar": 2}, "its columns: bar, foo"),
        ({"text": 5}, "text is a number"),
        ({"question": "q", "answer": float("nan")}, "answer is a number"),
        ({"question": {"a": 1}, "answer": "a"}, "question is an object"),
        ({"question": "q", "answer": "a", "context": {"a": 1}}, "context is an object"),
        ({"question": "q", "answer": "a", "system": 5}, "system is a number"),
        ({"messages": "hello"}, "text, not a list"),
        ({"messages": []}, "empty"),
        ({"messages": {"role": "user"}}, "an object, not a list"),
        ({"messages": ["hello"]}, "a turn is text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"messages": [{"content": "x"}]}, "no role"),
        ({"messages": [{"role": 5, "content": "x"}]}, "unknown role 5"),
        ({"messages": [{"role": "user", "content": 5}]}, "a number, not text"),
        ({"messages": [user([5])]}, "only text"),
        ({"messages": [user("q"), assistant("a", weight=0.5)]}, "weight 0.5"),
        ({"messages": [user("q"), assistant("a", weight="1")]}, "weight '1'"),
        ({"messages": [{**user("q"), "weight": 1}, assistant("a")]}, "weight 1 on a user turn"),
        ({"messages": [user("q"), assistant("a")], "tools": {"a": 1}}, "tools must be"),
        ({"messages": [user("q"), assistant("a")], "tools": [1]}, "tools must be"),
        ({"messages": [user("q"), assistant("a", tool_calls="f()")]}, "tool_calls must be"),
        ({"messages": [user("q"), assistant("a", name=5)]}, "name is a number"),
        ({"text": "How?", "role": "prompter", "replies": []}, "no known column names"),
    ],
)
def test_what_is_no_conversation_says_why(row, words):
    """The reason is all a person has to mend a row by."""
    assert words in refusal(row)


turn_keys = st.sampled_from(["role", "from", "content", "value", "type", "text", "weight", "tool_calls", "name"])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(turn_keys, inner, max_size=4),
    max_leaves=10,
)
row_keys = st.sampled_from(
    [
        *("messages", "conversations", "prompt", "completion", "instruction", "input", "context", "output"),
        *("response", "question", "answer", "text", "system", "tools", "other"),
    ]
)


@given(row=st.dictionaries(row_keys, anything, max_size=6) | anything)
@settings(max_examples=examples(250))
def test_no_row_raises_anything_but_rejected(row):
    """Schema drift comes in every shape; each row of it is one dropped row."""
    for name in ("auto", "messages", "alpaca", "prompt_completion", "text"):
        try:
            conversation = Converter(format_name=name, system="s").convert(row)[0]
            clean(conversation, Clean(bad_text="replace"))
        except Rejected:
            continue
        for message in conversation.messages:
            assert isinstance(message["content"], str)
        assert conversation.learn is None or len(conversation.learn) == len(conversation.messages)


def test_rows_of_ever_new_shapes_need_no_memory():
    """What is remembered of shapes is bounded."""
    converter = Converter()
    for index in range(5000):
        converter.convert({"question": "q", "answer": "a", f"key{index}": 1})
    assert converter._match.cache_info().currsize <= 4096


# --- real data


def read_rows(path: Path) -> list:
    chosen = ReadOptions(1 << 22, 64)
    (file,) = find_files(path.name, base=path.parent)
    return [parse_item(item, chosen) for block in read_blocks(file, chosen) for item in block.items]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "num_rows", "expected"),
    [("gsm8k/train.jsonl", 7473, "question_answer"), ("wikisql_mlx/train.jsonl", 1000, "text")],
)
def test_real_files_are_recognised(name, num_rows, expected, shared_data):
    """Every row of them, since one that is not would be lost."""
    rows = read_rows(shared_data / name)
    assert len(rows) == num_rows
    assert {Converter().convert(row)[1] for row in rows} == {expected}


MAPS = """
def banking(row):
    return {"question": row["text"], "answer": row["category"].replace("_", " ")}

def seeds(row):
    first = row["instances"][0]
    return {"instruction": row["instruction"], "input": first["input"], "output": first["output"]}

def pubmed(rows):
    return [
        {"question": " ".join(row["CONTEXTS"]) + " " + row["QUESTION"], "answer": row["LONG_ANSWER"]}
        if row["final_decision"] != "maybe" else None
        for row in rows
    ]

def first_reply(row):
    replies = [reply for reply in row["replies"] if reply["role"] == "assistant"]
    if row["role"] != "prompter" or not replies:
        return None
    return {"messages": [row | {"content": row["text"]}, replies[0] | {"content": replies[0]["text"]}]}
"""


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "function", "batch", "num_rows", "expected"),
    [
        ("banking77/train.csv", "banking", None, 10003, {"question_answer"}),
        ("self_instruct/seed_tasks.jsonl", "seeds", None, 175, {"alpaca"}),
        ("self_instruct/user_oriented_instructions.jsonl", "seeds", None, 252, {"alpaca"}),
        ("pubmedqa/ori_pqal.json", "pubmed", 64, 1000, {"question_answer"}),
        ("oasst_en_100/en_100_message.jsonl", "first_reply", None, None, {"messages"}),
    ],
)
def test_real_files_of_other_shapes_go_through_a_function(
    name, function, batch, num_rows, expected, shared_data, tiny_model, tmp_path
):
    """The ledger closes on data nobody made for us."""
    (tmp_path / "rows.py").write_text(MAPS)
    batch_set = [f"data.sources[0].map_batch={batch}"] if batch else []
    sets = [f"data.sources[0].map=rows.py:{function}", *batch_set, "packing.long_documents=split"]
    result = SimpleNamespace(**prepare(tmp_path, tiny_model, shared_data / name, sets=sets))
    assert num_rows in (None, result.rows_in)
    assert result.rows_in == result.documents + result.selected + result.held_out + sum(result.dropped.values())
    assert set(result.sources[0]["formats"]) == expected
    assert set(result.dropped) <= {"dropped_by_map", "exact_duplicate", "empty_reply"}
    assert result.documents > 50


@pytest.mark.shared
def test_a_tree_of_messages_is_not_taken_for_text(shared_data, tiny_model, tmp_path):
    """Its rows have a `text`, which is one person's question and not a document."""
    sets = ["packing.long_documents=split"]
    result = prepare(tmp_path, tiny_model, shared_data / "oasst_en_100/en_100_message.jsonl", sets=sets)
    assert (result["rows_in"], list(result["sources"][0]["formats"])) == (100, ["openassistant"])


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(("cut", "num_rows"), [("line", 32_777), ("paragraph", 7_099), ("file", 1)])
def test_shakespeare_is_cut_as_asked(cut, num_rows, shared_data, tiny_model, tmp_path):
    """Lines, speeches or the whole: equal lines are duplicates, and nothing is lost."""
    sets = [f"data.sources[0].text_rows={cut}", "packing.long_documents=split", "data.held_out=0.0"]
    result = prepare(tmp_path, tiny_model, shared_data / "tinyshakespeare/input.txt", sets=sets)
    assert result["rows_in"] == num_rows
    assert result["rows_in"] == result["documents"] + result["selected"] + sum(result["dropped"].values())
    assert set(result["dropped"]) <= {"exact_duplicate"}


def test_mixed_formats_in_one_file_become_documents(tiny_model, tmp_path):
    """Told row by row, counted by format."""
    rows = [
        {"instruction": "one", "output": "1"},
        {"question": "two", "solution": "2"},
        {"prompt": "three", "completion": "3"},
        {"messages": [user("four"), assistant("4")]},
        {"conversations": [{"from": "human", "value": "five"}, {"from": "gpt", "value": "5"}]},
        {"text": "six"},
        {"instruction": "seven", "context": "s", "response": "7"},
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    result = prepare(tmp_path, tiny_model, "rows.jsonl", sets=["data.held_out=0.0"])
    assert result["documents"] == 7
    names = ["alpaca", "dolly", "messages", "prompt_completion", "question_answer", "sharegpt", "text"]
    assert result["sources"][0]["formats"] == dict.fromkeys(names, 1)
