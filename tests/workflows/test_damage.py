"""Files as they come out of other people's programs: every damaged row is named, every other one is read."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from tiny import dropped_rows, prepare

GOOD = {"question": "What is damage number {}?", "answer": "It is none, this is a good row: {}."}


def good(number: int) -> bytes:
    return json.dumps({key: value.format(number) for key, value in GOOD.items()}, ensure_ascii=False).encode()


def with_text(text: str) -> bytes:
    """A whole row whose reply holds this, as it would stand in JSON."""
    return f'{{"question": "q", "answer": "an answer with {text} in it"}}'.encode()


DEEP = b'{"question": "q", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
DAMAGE: list[tuple[str, bytes, str]] = [
    ("bytes of latin-1", '{"question": "q", "answer": "café"}'.encode("latin-1"), "bad_text"),
    ("latin-1 in broken JSON", '{"question": "café'.encode("latin-1"), "bad_text"),
    ("a NUL as an escape", with_text("\\u0000"), "bad_text"),
    ("a NUL as a byte", with_text("\0"), "bad_text"),
    ("nothing but NULs", b"\0" * 512, "bad_text"),
    ("half a pair, first", with_text("\\ud83d"), "bad_text"),
    ("half a pair, second", with_text("\\ude00"), "bad_text"),
    ("half a pair as bytes", with_text("").replace(b"with ", b"with \xed\xa0\x80"), "bad_text"),
    ("a line of UTF-16", good(0).decode().encode("utf-16-be"), "bad_text"),
    ("a line of 10 MB", b'{"question": "q", "answer": "' + b"x" * 10_000_000 + b'"}', "too_large"),
    ("nesting of 100,000", DEEP, "too_large"),
    ("nesting that never ends", b"[" * 100_000, "too_large"),
    ("a key twice", b'{"question": "q", "answer": "a", "answer": "b"}', "unparsable"),
    ("a key twice, inside", b'{"question": "q", "answer": "a", "meta": {"id": 1, "id": 2}}', "unparsable"),
    ("a key twice, behind escapes", b'{"question": "q", "answer": "", "answer": "\\u0022\\u0022"}', "unparsable"),
    ("NaN", b'{"question": "q", "answer": "a", "score": NaN}', "unparsable"),
    ("Infinity", b'{"question": "q", "answer": "a", "score": -Infinity}', "unparsable"),
    ("a number of 5,000 digits", b'{"question": "q", "answer": "a", "id": ' + b"7" * 5000 + b"}", "unparsable"),
    ("a raw control character", with_text("\x07"), "unparsable"),
    ("a raw tab", with_text("\t"), "unparsable"),
    ("cut in the middle", good(0)[:25], "unparsable"),
    ("two rows in one line", good(1) + good(2), "unparsable"),
    ("single quotes", b"{'question': 'q', 'answer': 'a'}", "unparsable"),
    ("no JSON", b"question: q, answer: a", "unparsable"),
    ("a number for a row", b"42", "not_a_conversation"),
    ("null for a row", b"null", "not_a_conversation"),
    ("an empty object", b"{}", "not_a_conversation"),
    ("a list of numbers", b"[1, 2, 3]", "not_a_conversation"),
    ("other names", b'{"ask": "q", "reply_text": "a"}', "not_a_conversation"),
    ("another type", b'{"question": "q", "answer": {"a": 5}}', "not_a_conversation"),
    ("an unknown role", b'{"messages": [{"role": "alien", "content": "x"}]}', "not_a_conversation"),
    ("no reply", b'{"messages": [{"role": "user", "content": "x"}]}', "not_a_conversation"),
    ("only a system message", b'{"messages": [{"role": "system", "content": "x"}]}', "not_a_conversation"),
    ("an empty reply", b'{"question": "q", "answer": " "}', "empty_reply"),
    ("an empty question", b'{"question": "\\n", "answer": "a"}', "empty_question"),
]
HARMLESS: list[bytes] = [
    with_text("\\u0007 and \\t and \\u2028"),
    with_text("\u2028 and \x85 and \u202e and \ufffe and \u200b"),
    '{"question": "wide", "answer": "\\ud83d\\ude42 and 🙂"}'.encode(),
    b'{"question": "drift", "answer": "a", "id": 123456789012345678901234567890, "more": {"a": [1.5, null]}}',
    b'\xef\xbb\xbf{"question": "a mark in the middle", "answer": "of joined files"}',
    b'  {"question": "spaces", "answer": "around"}  ',
    b'{"question": "deep enough", "answer": "a", "meta": ' + b"[" * 60 + b"]" * 60 + b"}",
    b'{"question": "brackets", "answer": "' + b"[{" * 5000 + b'"}',
]


def damaged_file(folder: Path, *, seed: int, ending: bytes, mark: bytes = b"") -> tuple[Path, dict[int, str], int]:
    """Write good rows, damaged ones, harmless ones and blank lines in some order; say what is dropped on which line."""
    rng = random.Random(seed)
    lines: list[tuple[bytes, str | None]] = [(good(number), None) for number in range(100)]
    lines += [(line, None) for line in HARMLESS]
    lines += [(line, reason) for _, line, reason in DAMAGE]
    lines += [(blank, "blank") for blank in (b"", b"   ", b"\t", b"") for _ in range(5)]
    rng.shuffle(lines)
    lines.append((b'{"question": "the last line", "answer": "was cut sho', "unparsable"))
    path = folder / "damaged.jsonl"
    path.write_bytes(mark + ending.join(line for line, _ in lines))
    expected = {number: reason for number, (_, reason) in enumerate(lines, start=1) if reason and reason != "blank"}
    return path, expected, sum(reason != "blank" for _, reason in lines)


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize(("seed", "mark"), [(0, b""), (1, b"\xef\xbb\xbf"), (2, b"")])
def test_every_damaged_row_is_named_and_every_other_read(seed, ending, mark, tiny_model, tmp_path):
    """Line by line, the right reason; nothing else lost; no traceback."""
    path, expected, num_rows = damaged_file(tmp_path, seed=seed, ending=ending, mark=mark)
    result = prepare(tmp_path, tiny_model, path, sets=["data.held_out=0.0", "packing.long_documents=split"])
    assert {row["row"]: row["reason"] for row in dropped_rows(tmp_path)} == expected
    assert result["rows_in"] == result["rows_read"] == num_rows
    assert result["documents"] == 100 + len(HARMLESS)
    assert result["dropped"] == Counter(expected.values())
    assert all(len(json.dumps(row)) < 1000 for row in dropped_rows(tmp_path))


def test_the_file_is_read_the_same_through_utf_16(tiny_model, tmp_path):
    """Damage that UTF-16 can express keeps its reason there."""
    kinds = [(line.decode(), reason) for _, line, reason in DAMAGE if line.isascii() and len(line) < 10_000]
    lines = [(good(number).decode(), None) for number in range(20)] + kinds
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        (tmp_path / "rows.jsonl").write_bytes("\r\n".join(line for line, _ in lines).encode(encoding))
        prepare(tmp_path, tiny_model, "rows.jsonl", sets=["data.held_out=0.0"])
        expected = {number: reason for number, (_, reason) in enumerate(lines, start=1) if reason}
        assert {row["row"]: row["reason"] for row in dropped_rows(tmp_path)} == expected


# --- policies


def write(folder: Path, *lines: bytes) -> None:
    (folder / "rows.jsonl").write_bytes(b"\n".join([good(1), good(2), *lines]))


def run(folder: Path, model: Path, *sets: str, code: int = 0) -> dict:
    return prepare(folder, model, "rows.jsonl", sets=["data.held_out=0.0", *sets], code=code)


@pytest.mark.parametrize(("name", "line", "reason"), DAMAGE, ids=[name for name, _, _ in DAMAGE])
def test_a_bad_row_can_stop_the_run_instead(name, line, reason, tiny_model, tmp_path):
    """Whoever wants no row lost is told the first one, with its place and the key that lets it go."""
    write(tmp_path, line)
    key = {"bad_text": "bad_text", "empty_reply": None, "empty_question": None}.get(reason, "bad_rows")
    if key is None:
        assert run(tmp_path, tiny_model, "data.clean.bad_rows=error")["dropped"] == {reason: 1}
        return
    error = run(tmp_path, tiny_model, f"data.clean.{key}=error", code=2)["error"]
    assert error["what"].startswith(reason)
    assert error["where"] == "rows.jsonl row 3"
    assert f"data.clean.{key}: drop" in error["fix"]
    assert not (tmp_path / "corpus").exists()


def test_broken_text_can_be_replaced(tiny_model, tmp_path):
    """Only where the row can be read at all; what is no JSON stays dropped."""
    kinds = [(line, name) for name, line, reason in DAMAGE if reason == "bad_text"]
    write(tmp_path, *(line for line, _ in kinds))
    result = run(tmp_path, tiny_model, "data.clean.bad_text=replace", "data.clean.exact_duplicate=keep")
    beyond = {"latin-1 in broken JSON", "nothing but NULs", "a line of UTF-16"}
    assert result["dropped"] == {"bad_text": len(beyond)}
    assert {kinds[row["row"] - 3][1] for row in dropped_rows(tmp_path)} == beyond
    assert result["documents"] == 2 + len(kinds) - len(beyond)


def test_limits_on_size_and_nesting_are_the_configs(tiny_model, tmp_path):
    """Each row is judged by what the config says, and again when that changes."""
    write(tmp_path, b'{"question": "q", "answer": "' + b"x" * 500 + b'"}', b'{"text": "t and t", "meta": [[[[1]]]]}')
    assert run(tmp_path, tiny_model)["dropped"] == {}
    assert run(tmp_path, tiny_model, "data.clean.max_row_bytes=400")["dropped"] == {"too_large": 1}
    assert run(tmp_path, tiny_model, "data.clean.max_nesting=4")["dropped"] == {"too_large": 1}
    assert run(tmp_path, tiny_model, "data.clean.max_nesting=5")["dropped"] == {}
    both = run(tmp_path, tiny_model, "data.clean.max_nesting=3", "data.clean.max_row_bytes=400")
    assert both["dropped"] == {"too_large": 2}


def test_checks_that_are_off_can_be_switched_on(tiny_model, tmp_path):
    """And leave everything else as it was."""
    write(tmp_path, b'{"question": "q", "answer": "no"}', b'{"question": "q", "answer": "see https://example.org"}')
    assert run(tmp_path, tiny_model)["dropped"] == {}
    assert run(tmp_path, tiny_model, "data.clean.min_reply_chars=3")["dropped"] == {"too_short": 1}
    assert run(tmp_path, tiny_model, "data.clean.drop_urls=true")["dropped"] == {"has_url": 1}


@pytest.mark.parametrize("data", [b"", b"\n\n \n", b"{}\n", b'{"messages": [{"role": "system", "content": "x"}]}\n'])
def test_a_run_without_a_single_document_is_refused(data, tiny_model, tmp_path):
    """An empty corpus would train on nothing and say it went well."""
    (tmp_path / "rows.jsonl").write_bytes(data)
    error = run(tmp_path, tiny_model, code=2)["error"]
    assert error["what"].startswith("no training data: 0 of")
    assert not (tmp_path / "corpus").exists()
