"""Passages follow the structure of a document, keep all its text, and are never longer than the embedder reads."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_embedder import ToyEmbedder

from tunewell.data.reading_prompt import Passage
from tunewell.features.retrieval.documents import SourceDocument
from tunewell.features.retrieval.embedders.base import open_embedder
from tunewell.features.retrieval.passages import cut
from tunewell.features.retrieval.readers.blocks import Unreadable
from tunewell.features.retrieval.readers.markdown import read_markdown
from tunewell.features.retrieval.readers.rows import read_csv, read_json_lines

WORDS = st.text("abc漢字é.!? -|\n#*`\t<>", max_size=200)


def passages(data: bytes, *, reader=read_markdown, title: str = "Title", max_tokens: int = 64) -> list[Passage]:
    embedder = ToyEmbedder(max_tokens=max_tokens)
    document = SourceDocument("a.md", "0" * 64, title, reader(data))
    return list(cut(document, count_tokens=embedder.count_tokens, max_tokens=max_tokens))


@given(WORDS, st.text(max_size=200), st.integers(40, 120))
def test_no_passage_is_longer_than_the_embedder_reads(text, title, max_tokens):
    """What is longer is cut off silently by the embedder, and never found."""
    count = ToyEmbedder().count_tokens
    data = text.encode("utf-8", "replace")
    for reader in (read_markdown, read_csv, read_json_lines):
        try:
            found = passages(data, reader=reader, title=title or "T", max_tokens=max_tokens)
        except Unreadable:
            continue
        assert all(size <= max_tokens for size in count([passage.searched for passage in found]))


@given(
    st.text(st.characters(exclude_categories=["C"]), max_size=200),
    st.sampled_from(["# {}\n\n{}", "| a |\n|---|\n| {} |\n| {} |", "- {}\n- {}", "{}\n{}"]),
)
def test_no_passage_is_longer_than_minilm_reads(text, form):
    """A real tokenizer counts other things than words: joined pieces can have more tokens than their sum."""
    embedder = _minilm()
    content = read_markdown(form.format(text * 3, text * 5).encode("utf-8", "replace"))
    document = SourceDocument("a.md", "", text[:100] or "T", content)
    found = list(cut(document, count_tokens=embedder.count_tokens, max_tokens=48))
    assert all(size <= 48 for size in embedder.count_tokens([passage.searched for passage in found]))


def _minilm(opened: list = []):  # noqa: B006  opened once
    if not opened:
        opened.append(open_embedder("minilm"))
    return opened[0]


@given(st.lists(st.text("abcdefg ", min_size=1, max_size=60), min_size=1, max_size=30))
def test_no_word_is_lost(paragraphs):
    """A passage that is left out is an answer that nobody finds."""
    text = "\n\n".join(paragraphs)
    found = passages(text.encode())
    assert re.sub(r"\s", "", "".join(passage.text for passage in found)) == re.sub(r"\s", "", text)


def test_a_passage_carries_the_headings_above_it_and_its_lines():
    """A section does not repeat the name that its page is about."""
    text = "# Hazelquay\n\nintro\n\n## Fees\n\nfee\n\n### Refunds\n\nback\n\n## Dates\n\ndate\n"
    found = passages(text.encode(), title="Hazelquay")
    assert [(one.path, one.text, one.lines) for one in found] == [
        ("Hazelquay", "intro", (3, 3)),
        ("Hazelquay > Fees", "fee", (7, 7)),
        ("Hazelquay > Fees > Refunds", "back", (11, 11)),
        ("Hazelquay > Dates", "date", (15, 15)),
    ]


def test_a_long_table_repeats_its_header():
    """Row 80 of a table says nothing without the names of its columns."""
    rows = "\n".join(f"| item {number} | {number * 7} |" for number in range(80))
    found = passages(f"| item | fee |\n|---|---|\n{rows}\n".encode())
    assert len(found) > 5
    assert all(one.text.startswith("| item | fee |\n|---|---|\n") for one in found)
    shown = [line for one in found for line in one.text.split("\n")[2:]]
    assert shown == rows.split("\n")
    first, last = found[3].lines or (0, 0)
    assert found[3].text.split("\n")[2:] == f"| item | fee |\n|---|---|\n{rows}".split("\n")[first - 1 : last]


def test_rows_of_data_are_passages_of_their_own():
    """Two customers in one passage would be mixed in one answer."""
    assert [one.text for one in passages(b"name,fee\nA,1\nB,2\n", reader=read_csv)] == [
        "name: A\nfee: 1",
        "name: B\nfee: 2",
    ]


def test_rows_are_tokenized_in_parts(monkeypatch):
    """The tokens of all rows of a large table at once do not fit in memory; the passages are the same."""
    data = "".join(f'{{"text": "row {number} has a text"}}\n' for number in range(50)).encode()
    whole = passages(data, reader=read_json_lines)
    most, count = [0], ToyEmbedder.count_tokens
    monkeypatch.setattr("tunewell.features.retrieval.passages._MAX_ROWS", 8)
    monkeypatch.setattr(ToyEmbedder, "count_tokens", lambda self, t: (most.append(len(t)), count(self, t))[1])
    assert passages(data, reader=read_json_lines) == whole and len(whole) == 50
    assert max(most) == 8


@pytest.mark.parametrize(
    "text", ["x" * 5000, "漢" * 3000, "- " + "y" * 3000, "|" + "z" * 2000 + "|\n|---|\n|" + "w" * 2000]
)
def test_text_without_a_place_to_cut_is_cut(text):
    """A line of base64 or a sentence without an end is longer than any limit."""
    found = passages(text.encode())
    assert max(ToyEmbedder().count_tokens([one.searched for one in found])) <= 64
    assert len("".join(one.text for one in found)) >= len(text) - 10


def test_a_title_and_headings_that_fill_the_limit_leave_room_for_text():
    """A page whose title is a paragraph would have passages without text."""
    text = "".join(f"{'#' * level} {'heading ' * 20}\n\n" for level in range(1, 7)) + "the text"
    found = passages(text.encode(), title="title " * 100, max_tokens=64)
    assert found[-1].text == "the text"
    assert max(ToyEmbedder().count_tokens([one.searched for one in found])) <= 64


def test_equal_text_on_two_pages_has_two_keys():
    """The same sentence about two colleges is not a duplicate."""
    assert Passage("a", "A", (), "fee").key != Passage("b", "B", (), "fee").key
    assert Passage("a", "A", (), "fee").key == Passage("b", "A", (), "fee").key
