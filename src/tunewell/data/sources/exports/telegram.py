"""The JSON export of Telegram Desktop (`result.json`): one chat, or all chats of an account."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from tunewell.core.errors import UserError
from tunewell.data.rows.conversation import is_list, is_object, objects_in
from tunewell.data.sources.base import SourceFile
from tunewell.data.sources.blocks import ReadOptions
from tunewell.data.sources.exports.turns import ChatMessage, chat_rows
from tunewell.data.sources.records import read_json_value

_MEDIA = ("photo", "file", "media_type", "sticker_emoji", "poll", "location_information", "contact_information")


def read(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yield the parts of each chat, numbered by the id of their first message."""
    export = read_json_value(file, encoding=options.encoding)
    found = export.get("chats") if is_object(export) else None
    chats = [
        [message for entry in objects_in(chat.get("messages")) if (message := _message(entry))]
        for chat in objects_in(found.get("list") if is_object(found) else [export])
    ]
    # In an export of all chats, those in which the user wrote nothing are left out.
    replied = [chat for chat in chats if any(message.sender == options.assistant for message in chat)]
    for messages in replied or [[message for chat in chats for message in chat]]:
        yield from chat_rows(messages, "telegram", file.name, options=options)


def _message(entry: dict[str, Any]) -> ChatMessage | None:
    if entry.get("type") != "message":
        return None  # a service message: someone joined, a call
    text = _text(entry.get("text"))
    try:
        time = datetime.fromisoformat(str(entry.get("date")))
    except ValueError as error:
        raise UserError(
            f"a Telegram message has no valid date: {entry.get('date')!r}", fix="export the chat again as JSON"
        ) from error
    left_out = "media_left_out" if not text.strip() and any(key in entry for key in _MEDIA) else ""
    return ChatMessage(int(entry.get("id") or 0), time, str(entry.get("from") or entry.get("from_id")), text, left_out)


def _text(value: Any) -> str:
    parts: list[Any] = value if is_list(value) else [value]
    return "".join(str(part.get("text", "")) if is_object(part) else str(part or "") for part in parts)
