"""Parsing one row of JSON: as strict as JSON is, and never louder than `Rejected`."""

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples_limit import examples
from tunewell.data.rows.conversation import Rejected
from tunewell.data.rows.json_rows import check_nesting, parse_row, text_of


def parse(line: bytes | str, max_nesting: int = 64):
    return parse_row(line.encode() if isinstance(line, str) else line, max_nesting=max_nesting)


def refusal(line: bytes | str, max_nesting: int = 64) -> tuple[str, str]:
    with pytest.raises(Rejected) as caught:
        parse(line, max_nesting)
    return caught.value.reason, caught.value.detail


texts = st.text(max_size=20) | st.sampled_from(['"', "\\", "\\u0022", "\0", "\x1f", "\u2028", "{[", "ü🙂"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=15,
)


@given(value=values, is_ascii=st.booleans(), indent=st.sampled_from([None, 1]))
@example(value={"id": 2**64, "other": [-(2**70), 10**25, 1e300]}, is_ascii=True, indent=None)
@example(value=[-(2**63) - 1, -(2**63)], is_ascii=True, indent=None)
@example(value={'say "hi"': 1, "say": 2}, is_ascii=True, indent=None)
@settings(max_examples=examples(150))
def test_what_is_json_is_read_as_the_standard_library_reads_it(value, is_ascii, indent):
    """orjson rounds whole numbers beyond 64 bits; nothing else may differ either."""
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    found = parse(text, 100)
    assert found == json.loads(text)
    assert repr(found) == repr(json.loads(text))


@given(line=st.binary(max_size=60))
@settings(max_examples=examples(150))
def test_no_bytes_raise_anything_but_rejected(line):
    """A traceback in row 3,000,000 is a night lost."""
    try:
        parse(line)
    except Rejected as rejected:
        assert rejected.reason in ("unparsable", "bad_text", "too_large")


@given(text=st.text(alphabet='{}[]",:\\u002 dD8a1e9.-NaIfnity\0\x01é', max_size=60))
@settings(max_examples=examples(300))
def test_no_text_near_json_raises_anything_but_rejected(text):
    """Random bytes hardly ever look like JSON; these do."""
    try:
        value = parse(text)
    except Rejected as rejected:
        assert rejected.reason in ("unparsable", "bad_text", "too_large")
        assert len(rejected.detail) < 300
    else:
        assert value == json.loads(text, strict=False)


@given(value=st.dictionaries(texts, values, min_size=1, max_size=4), data=st.data())
@settings(max_examples=examples(80))
def test_a_key_that_stands_twice_is_always_refused(value, data):
    """One of its values would vanish, and nobody would know which."""
    twice = data.draw(st.sampled_from(sorted(value)))
    pairs = [*value.items(), (twice, data.draw(values))]
    text = "{" + ",".join(f"{json.dumps(key)}:{json.dumps(inner)}" for key, inner in pairs) + "}"
    for line in (text, f"[{text}]", f'{{"in": {{"side": {text}}}}}'):
        reason, detail = refusal(line, 100)
        assert reason == "unparsable"
        assert "duplicate key" in detail


@pytest.mark.parametrize(
    "line",
    [
        '{"a": 1, "a": 1}',
        '{"a": "x", "b": {"c": 1, "c": 2}}',
        '{"a": [{"b": 1}, {"c": 1, "d": 2, "c": 3}]}',
        '{"\\u0061": 1, "a": 2}',
        # The value left over has as many quotes as the one that went, written in another way.
        '{"a": 1, "a": "\\u0022"}',
        '{"a": "", "a": "\\u0022\\u0022"}',
        '{"\\u0022": 1, "\\"": 2}',
    ],
)
def test_duplicate_keys_are_found_however_they_are_written(line):
    """Quotes are counted to find them; escaped quotes must not upset the count."""
    assert refusal(line)[0] == "unparsable"


def test_escaped_quotes_alone_are_no_duplicates():
    """A row must not be lost for how its quotes are written."""
    assert parse('{"a": "say \\u0022hi\\u0022", "b": "\\"", "c": "\\\\u0022"}') == {
        "a": 'say "hi"',
        "b": '"',
        "c": "\\u0022",
    }


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none_are_refused(name):
    """They are not JSON, and would be rendered into tool calls as if they were."""
    assert refusal(f'{{"a": [1, {name}]}}')[0] == "unparsable"


def test_huge_whole_numbers_are_exact_up_to_a_limit():
    """Ids of 20 digits and more must not be rounded; a million digits would take minutes to read."""
    assert parse('{"id": 123456789012345678901234567890}') == {"id": 123456789012345678901234567890}
    assert parse(f'{{"id": -{"9" * 4000}}}')["id"] == -int("9" * 4000)
    reason, detail = refusal('{"id": ' + "1" * 1_000_000 + "}")
    assert reason == "unparsable"
    assert "1,000,000 digits" in detail


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("closing", ["", "1]", "1}"])
def test_bottomless_nesting_is_refused_at_once(opening, closing):
    """The standard library's parser would raise RecursionError."""
    line = opening * 100_000 + closing[:1] + closing[1:] * 100_000
    started = time.perf_counter()
    assert refusal(line)[0] == "too_large"
    assert time.perf_counter() - started < 1


def test_nesting_is_counted_exactly():
    """The limit says how many lists and objects may stand inside one another."""
    line = "[" * 10 + '"]["' + "]" * 10
    assert parse(line, 10)
    assert refusal(line, 9)[0] == "too_large"
    slow = "[" * 10 + '"]\\ud800["' + "]" * 10  # half a character sends it the slow way
    assert parse(slow, 10)
    assert refusal(slow, 9)[0] == "too_large"
    assert parse('{"a": "' + "[{" * 500 + '"}', 1)
    assert parse("5", 1) == 5
    check_nesting([[[1]]], 3)
    with pytest.raises(Rejected):
        check_nesting([[[1]]], 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": "caf\xe9', "bad_text"),
        (b"\xff\xfe{", "bad_text"),
        (b'\0{"a": 1}', "bad_text"),
        (b"\0\0\0\0", "bad_text"),
        ('{"a": "b"}'.encode("utf-16-le"), "bad_text"),
        (b'{"a": "tab\there"}', "unparsable"),
        (b'{"a": "bell\x07"}', "unparsable"),
        (b'{"a": "b"', "unparsable"),
        (b'{"a": "b"} {"c": 1}', "unparsable"),
        (b"{'a': 'b'}", "unparsable"),
        (b"nonsense", "unparsable"),
        (b'{"a": "caf\xe9", "a": 1}', "unparsable"),
    ],
)
def test_each_kind_of_damage_has_its_reason(line, reason):
    """What is no text and what is no JSON are mended in different ways."""
    assert refusal(line)[0] == reason


def test_broken_text_in_whole_json_comes_through():
    """Whether it is dropped or replaced is for the text policy to say."""
    assert parse(b'{"a": "caf\xe9"}') == {"a": "caf\udce9"}
    assert parse(b'{"a": "x\0y"}') == {"a": "x\0y"}
    assert parse('{"a": "\\ud800", "b": "\\u0000"}') == {"a": "\ud800", "b": "\0"}
    assert parse('{"a": "\\ud83d\\ude42"}') == {"a": "🙂"}
    assert parse(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_a_duplicate_among_very_many_keys_is_found_in_linear_time():
    """Counting each key among all others would take hours."""
    line = "{" + ",".join(f'"{index}":0' for index in range(200_000)) + ',"199999":1}'
    started = time.perf_counter()
    assert "duplicate key '199999'" in refusal(line)[1]
    assert time.perf_counter() - started < 5


@given(text=st.text(alphabet=st.characters(), max_size=20))
def test_decoding_gives_text_back_and_marks_what_is_none(text):
    """Also for halves of surrogate pairs, which some programs write as UTF-8."""
    assert text_of(text.encode("utf-8", "surrogatepass")) == text
    assert text_of(b"\xff" + text.encode("utf-8", "surrogatepass")).startswith("\udcff")
