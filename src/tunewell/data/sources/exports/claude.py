"""The data export of Claude: `conversations.json` with `chat_messages` of `sender` and typed content blocks."""

from collections.abc import Iterator
from typing import Any

from tunewell.data.rows.conversation import ConversationRow, Rejected, attempt, is_list, is_object, objects_in
from tunewell.data.sources.base import SourceFile
from tunewell.data.sources.blocks import ReadOptions, read_parsed
from tunewell.data.sources.exports.turns import Turns, walk_up


def read(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yield the conversations of the export, numbered from 1."""
    for number, row in read_parsed(file, options):
        messages = row.get("chat_messages") if is_object(row) else None
        if is_list(messages):
            yield number, attempt(_conversation, objects_in(messages))
        else:
            yield number, row if isinstance(row, Rejected) else Rejected("not_a_conversation", "no `chat_messages`")


def _conversation(messages: list[dict[str, Any]]) -> ConversationRow:
    """Convert the branch of the last message; edited messages and retries start others."""
    turns = Turns()
    if messages and all("parent_message_uuid" in message for message in messages):
        by_id = {str(message.get("uuid")): message for message in messages}
        branch = walk_up(by_id, str(messages[-1].get("uuid")), "parent_message_uuid")
        messages = [by_id[key] for key in branch]
    for message in messages:
        _add(turns, message)
    return turns.row("claude")


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
