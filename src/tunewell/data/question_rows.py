"""Read questions with their answers from rows, and find the answers in passages."""

import json
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from tunewell.config.rules import Storage
from tunewell.config.schema import SourceConfig
from tunewell.core.errors import UserError
from tunewell.data.rows.classification import labels_of, with_found_labels
from tunewell.data.rows.conversation import Message, Rejected
from tunewell.data.rows.formats import Converter, FormatOptions
from tunewell.data.rows.functions import load_row_function
from tunewell.data.sources.base import SourceOptions, find_files
from tunewell.data.sources.blocks import ReadOptions, parsed_rows

_HERE = Path()


@dataclass(frozen=True)
class Question:
    """A question and its reference answer."""

    text: str
    reference: str
    answers: tuple[str, ...] = ()
    """Accepted answers of the row, if it has some."""
    num_replies: int = 1
    """Number of replies in the conversation."""


def read_questions(rows: str | SourceConfig, *, base: Path = _HERE, storage: Storage | None = None) -> list[Question]:
    """Return the first question of each row with its answer; raise UserError if no row has one.

    `rows` is a path, or a source of a config with its column names; paths are relative to `base`.
    """
    source = SourceConfig.model_validate(rows) if isinstance(rows, str) else rows
    path, found = source.path, list[Question]()
    read = ReadOptions.of(source, max_row_bytes=1 << 20, max_nesting=64)
    if source.map is not None and source.format == "auto":
        read = replace(read, format="messages")
    options = SourceOptions(storage or Storage(), source.config, source.split, has_limit=source.limit is not None)
    files = find_files(path, base=base, options=options)
    source = with_found_labels(source, partial(parsed_rows, files, read))
    converter = Converter.of(source, FormatOptions(labels_of(source, partial(parsed_rows, files, read))))
    items = islice(parsed_rows(files, read), source.limit)
    if source.map is not None:
        function, raw = load_row_function(source.map, batch=source.map_batch, base=base), list(items)
        items = iter(function.apply(raw, range(1, len(raw) + 1), path))
    for row in items:
        try:
            conversation = converter.convert(row)[0]
        except Rejected:
            continue
        pairs = pairwise(conversation.messages)
        asked = next((pair for pair in pairs if [one["role"] for one in pair] == ["user", "assistant"]), None)
        if asked is not None and all(isinstance(one["content"], str) for one in asked):
            num_replies = sum(one["role"] == "assistant" for one in conversation.messages)
            found.append(Question(asked[0]["content"], _reply(asked[1]), conversation.answers, num_replies))
    if not found:
        raise UserError(
            f"`{path}` has no questions with answers",
            fix="use a file with rows as for training, each with a question and its answer",
        )
    return found


def _reply(message: Message) -> str:
    """Return the text of a reply with its tool calls, which may be a part of the message beside the text."""
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    parts = [message["content"], *(f"<tool_call>{json.dumps(call.get('function'))}</tool_call>" for call in calls)]
    return "\n".join(filter(None, parts))
