"""The data export of Claude: `conversations.json` with `chat_messages` of `sender` and typed content blocks."""

from collections.abc import Iterator
from typing import Any

from tunewell.data.rows.conversation import Rejected, is_list, is_object, objects_in
from tunewell.data.sources.base import SourceFile
from tunewell.data.sources.blocks import ReadOptions, read_parsed
from tunewell.data.sources.exports.turns import Turns

_NAME = "claude"


def read(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yield the conversations of the export, numbered from 1."""
    for number, row in read_parsed(file, options):
        messages = row.get("chat_messages") if is_object(row) else None
        if isinstance(row, Rejected) or not is_list(messages):
            yield number, row if isinstance(row, Rejected) else Rejected("not_a_conversation", "no `chat_messages`")
            continue
        turns = Turns()
        try:
            for message in _last_branch(objects_in(messages)):
                _add(turns, message)
            yield number, turns.row(_NAME)
        except Rejected as rejected:
            yield number, rejected


def _last_branch(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the branch of the last message; edited messages and retries start others."""
    by_id = {str(message.get("uuid")): message for message in messages}
    if not messages or any("parent_message_uuid" not in message for message in messages):
        return messages
    branch: list[dict[str, Any]] = []
    message: dict[str, Any] | None = messages[-1]
    while message is not None and len(branch) < len(messages):
        branch.append(message)
        message = by_id.get(str(message["parent_message_uuid"]))
    return branch[::-1]


def _add(turns: Turns, message: dict[str, Any]) -> None:
    role = {"human": "user", "assistant": "assistant"}.get(str(message.get("sender")))
    if role is None:
        raise Rejected("not_a_conversation", f"unknown sender {message.get('sender')!r}")
    for attached in objects_in(message.get("files")):
        raise Rejected("has_media", f"a message has the file {attached.get('file_name')!r}")
    texts: list[str] = []
    for block in objects_in(message.get("content")) or [{"type": "text", "text": message.get("text")}]:
        kind = block.get("type")
        if kind == "text":
            texts.append(str(block.get("text") or ""))
        elif kind == "thinking":
            turns.think(str(block.get("thinking") or ""))
        elif kind in ("image", "document", "audio"):
            raise Rejected("has_media", f"a message has a block of type {kind!r}")
        else:  # tool_use, tool_result and others
            turns.notes["tool_messages_left_out"] += 1
    for attached in objects_in(message.get("attachments")):
        texts.append(str(attached.get("extracted_content") or ""))
    turns.add(role, "\n\n".join(filter(None, texts)), separator="\n\n")
