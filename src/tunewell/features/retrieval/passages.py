"""Cut documents into passages along their headings, lists and tables, none longer than the embedder reads.

A passage has the title of its document and the path of headings above it. Both are searched with the text: a page
about one college mentions the college's name in its title, and not in every section.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from tunewell.data.reading_prompt import Passage
from tunewell.features.retrieval.documents import SourceDocument
from tunewell.features.retrieval.readers.blocks import TextBlock

_MAX_CHARS_PER_TOKEN = 32
"""Texts with more characters per token of space are split without counting; English has about four."""
_MAX_ROWS = 1_024
"""Rows of a table that are tokenized together: the tokens of 100,000 rows took 3 GB."""
_MIN_TEXT_TOKENS = 32
"""Space for text that remains below a long heading path."""
_SENTENCE = re.compile(r"(?<=[.!?。！？])[\"'”’)\]]*\s+|(?<=[。！？])")

T = TypeVar("T")
TokenCounter = Callable[[list[str]], list[int]]
"""Return the number of tokens of each text, without special tokens."""


def cut(document: SourceDocument, *, count_tokens: TokenCounter, max_tokens: int) -> Iterator[Passage]:
    """Yield the passages of a document in reading order. Each has at most `max_tokens`, headings included."""
    headings: list[tuple[int, str]] = []
    section: list[TextBlock] = []
    for block in document.content.blocks:
        if _is_row(block) and len(section) >= _MAX_ROWS:  # a row never shares a passage with what is before it
            yield from _section(document, headings, section, count_tokens, max_tokens)
            section = []
        if block.kind != "heading":
            section.append(block)
            continue
        yield from _section(document, headings, section, count_tokens, max_tokens)
        section = []
        headings = [above for above in headings if above[0] < block.level] + [(block.level, block.text)]
    yield from _section(document, headings, section, count_tokens, max_tokens)


def _section(
    document: SourceDocument,
    headings: list[tuple[int, str]],
    blocks: list[TextBlock],
    count_tokens: TokenCounter,
    max_tokens: int,
) -> Iterator[Passage]:
    """Yield the passages of the blocks below one heading."""
    if not blocks:
        return
    above = tuple(text for _, text in headings)
    above = above[1:] if above[:1] == (document.title,) else above
    probe = Passage(document.name, document.title, above, "")
    while (space := max_tokens - count_tokens([probe.searched])[0]) < _MIN_TEXT_TOKENS and probe.headings:
        probe = Passage(document.name, document.title, probe.headings[1:], "")
    while space < _MIN_TEXT_TOKENS and len(probe.title) > 1:
        probe = replace(probe, title=probe.title[: len(probe.title) * 3 // 4].rstrip())
        space = max_tokens - count_tokens([probe.searched])[0]
    found: list[Passage] = []
    for group in _groups(blocks, count_tokens, max(1, space)):
        lines = [line for block in group if block.lines for line in block.lines]
        text = "\n\n".join(block.text for block in group)
        span = (min(lines), max(lines)) if lines else None
        found.append(replace(probe, text=text, lines=span, page=group[0].page))
    for passage, size in zip(found, count_tokens([passage.searched for passage in found]), strict=True):
        yield from _halves(passage, size, count_tokens, max_tokens)


def _halves(passage: Passage, size: int, count_tokens: TokenCounter, max_tokens: int) -> Iterator[Passage]:
    """Yield a passage, or its parts: joined text can have more tokens than its pieces."""
    text = passage.text
    if size <= max_tokens or len(text) < 2:
        yield passage
        return
    middle = max((text.rfind(mark, 1, len(text) // 2 + 1) for mark in ("\n", " ")), default=-1)
    middle = middle if middle > 0 else len(text) // 2
    for part in (text[:middle].rstrip(), text[middle:].strip("\n ")):
        half = replace(passage, text=part)
        if part:
            yield from _halves(half, count_tokens([half.searched])[0], count_tokens, max_tokens)


def _groups(blocks: list[TextBlock], count_tokens: TokenCounter, space: int) -> Iterator[list[TextBlock]]:
    """Yield runs of consecutive blocks that fit together. A block that is too long is split first."""
    pieces = [piece for block in blocks for piece in _pieces(block, count_tokens, space)]
    sizes = count_tokens([piece.text for piece in pieces])
    # Rows of tables and JSON lines are records of their own; pages of a PDF are named in the sources.
    return _packed(pieces, sizes, space, is_apart=lambda one, last: _is_row(one) or one.page != last.page)


def _packed(
    items: Iterable[T], sizes: Iterable[int], space: int, is_apart: Callable[[T, T], bool] = lambda one, last: False
) -> Iterator[list[T]]:
    """Yield runs of consecutive items that fit together. An item that `is_apart` from the one before begins a run."""
    group: list[T] = []
    used = 0
    for item, size in zip(items, sizes, strict=True):
        if group and (used + size > space or is_apart(item, group[-1])):
            yield group
            group, used = [], 0
        group.append(item)
        used += size
    if group:
        yield group


def _is_row(block: TextBlock) -> bool:
    return block.kind == "row"


def _pieces(block: TextBlock, count_tokens: TokenCounter, space: int) -> Iterator[TextBlock]:
    """Yield a block, or its parts if it is too long: lines of lists and tables, sentences, and at last words."""
    if _sizes([block.text], count_tokens, space)[0] <= space:
        yield block
        return
    header = block.header if block.header and count_tokens([block.header])[0] < space // 2 else ""
    units, joint = _units(block, len(header.split("\n")) if header else 0)
    room = space - (count_tokens([header + "\n"])[0] if header else 0)
    sizes = _sizes([unit.text for unit in units], count_tokens, room)
    for group in _packed(zip(units, sizes, strict=True), sizes, room, lambda one, last: last[1] > room):
        lines = [line for unit, _ in group for line in unit.lines or ()]
        texts = [joint.join(unit.text for unit, _ in group)]
        if group[0][1] > room:
            texts = list(_word_groups(texts[0], count_tokens, room))
        for text in texts:
            yield replace(
                block,
                text=f"{header}\n{text}" if header else text,
                lines=(min(lines), max(lines)) if lines else None,
                header=header,
            )


def _sizes(texts: list[str], count_tokens: TokenCounter, space: int) -> list[int]:
    """Return the tokens of texts. A text that is much too long is not tokenized: it is split in any case."""
    is_long = [len(text) > _MAX_CHARS_PER_TOKEN * max(space, 1) for text in texts]
    counted = iter(count_tokens([text for text, too_long in zip(texts, is_long, strict=True) if not too_long]))
    return [space + 1 if too_long else next(counted) for too_long in is_long]


def _units(block: TextBlock, skipped: int) -> tuple[list[TextBlock], str]:
    """Return the lines or sentences of a block after its first lines, and what joins them."""
    lines = block.text.split("\n")
    if block.kind == "text" or len(lines) < 2:
        sentences = [part for part in _SENTENCE.split(block.text) if part and part.strip()]
        return [replace(block, text=sentence) for sentence in sentences], " "
    units = [
        replace(block, text=line, lines=(number, number) if block.lines else None)
        for number, line in enumerate(lines, (block.lines or (0,))[0])
    ]
    return units[skipped:], "\n"


def _word_groups(text: str, count_tokens: TokenCounter, space: int) -> Iterator[str]:
    """Yield parts of a text without sentence ends that fit; a word that is too long is cut."""
    words = [part for word in text.split() for part in (word[i : i + 200] for i in range(0, len(word), 200))]
    start, used = 0, 0
    for index, size in enumerate(count_tokens(words)):
        if index > start and used + size > space:
            yield " ".join(words[start:index])
            start, used = index, 0
        used += size
        while used > space and index == start and len(words[index]) > 1:
            half = len(words[index]) // 2  # 200 characters can be more tokens than fit
            yield words[index][:half]
            words[index] = words[index][half:]
            used = count_tokens([words[index]])[0]
    if start < len(words):
        yield " ".join(words[start:])
