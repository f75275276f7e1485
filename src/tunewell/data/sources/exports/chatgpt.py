"""The data export of ChatGPT: `conversations.json`, where each conversation is a tree with edits as branches.

`paths: best` follows the branch that the user saw last; `paths: all` takes every branch.
"""

from collections.abc import Iterator
from typing import Any

from tunewell.data.rows.conversation import ConversationRow, Rejected, attempt, is_list, is_object, objects_in
from tunewell.data.sources.base import SourceFile
from tunewell.data.sources.blocks import ReadOptions, read_parsed
from tunewell.data.sources.exports.turns import Turns, walk_up

_MEDIA = {"image_asset_pointer": "image", "audio_asset_pointer": "audio", "video_container_asset_pointer": "video"}


def read(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yield the conversations of the export, numbered from 1."""
    for number, row in read_parsed(file, options):
        nodes = row.get("mapping") if is_object(row) else None
        if not is_object(nodes):
            yield number, row if isinstance(row, Rejected) else Rejected("not_a_conversation", "it has no `mapping`")
            continue
        supervised: set[str] = set()
        for leaf in _leaves(row, nodes, options.paths):
            yield number, attempt(_conversation, nodes, leaf, supervised)


def _leaves(row: dict[str, Any], nodes: dict[str, Any], paths: str) -> list[str]:
    leaves = [key for key, node in nodes.items() if is_object(node) and not node.get("children")]
    current = row.get("current_node")
    last = current if isinstance(current, str) and current in nodes else leaves[-1] if leaves else ""
    return [last] if paths == "best" else [last, *(leaf for leaf in leaves if leaf != last)]


def _conversation(nodes: dict[str, Any], leaf: str, supervised: set[str]) -> ConversationRow:
    path, turns = walk_up(nodes, leaf, "parent"), Turns()
    for key in path:
        message = nodes[key].get("message")
        if is_object(message):
            _add(turns, message, is_supervised=key not in supervised)
    supervised.update(path)
    return turns.row("chatgpt")


def _add(turns: Turns, message: dict[str, Any], *, is_supervised: bool) -> None:
    author, content = message.get("author"), message.get("content")
    metadata = message.get("metadata")
    role = author.get("role") if is_object(author) else None
    is_hidden = is_object(metadata) and metadata.get("is_visually_hidden_from_conversation")
    if not is_object(content) or is_hidden or message.get("weight") == 0:
        return
    kind = content.get("content_type")
    if kind == "thoughts":
        turns.think("\n\n".join(str(thought.get("content", "")) for thought in objects_in(content.get("thoughts"))))
    elif role == "tool" or (role == "assistant" and message.get("recipient", "all") != "all"):
        turns.notes["tool_messages_left_out"] += 1
    elif kind in ("text", "multimodal_text") and role in ("user", "assistant", "system"):
        parts = content.get("parts")
        text = "".join(map(_part, parts)) if is_list(parts) else ""
        turns.add(role, text, separator="\n\n", is_supervised=is_supervised)


def _part(part: Any) -> str:
    if isinstance(part, str) or part is None:
        return part or ""
    kind = part.get("content_type") if is_object(part) else type(part).__name__
    if kind == "audio_transcription":
        return str(part.get("text", ""))
    raise Rejected("has_media", f"a message has {_MEDIA.get(str(kind), 'a file')} ({kind})")
