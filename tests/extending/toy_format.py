"""Toy formats: a row format that reads a riddle, and a file format of questions and answers on alternate lines."""

from collections.abc import Iterator
from typing import Any

from tunewell.data.rows.conversation import Conversation, ConversationRow
from tunewell.data.rows.formats import FormatOptions
from tunewell.data.sources.base import SourceFile
from tunewell.data.sources.blocks import ReadOptions


def convert_riddle(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert a riddle and its answer."""
    return Conversation(
        [{"role": "user", "content": row["riddle"]}, {"role": "assistant", "content": row["unriddled"]}]
    )


def read_quiz(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yield a conversation for each pair of lines after the first."""
    with file.open() as stream:
        lines = stream.read().decode().splitlines()
    for number in range(1, len(lines) - 1, 2):
        turns = [{"role": "user", "content": lines[number]}, {"role": "assistant", "content": lines[number + 1]}]
        yield number + 1, ConversationRow(turns, "quiz")
