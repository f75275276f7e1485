"""OpenAssistant message trees, nested (`prompt` with `replies`) or flat (one message per row with `parent_id`).

`paths: best` takes the best-ranked reply at each turn. `paths: all` takes every path; a reply that several paths share
is supervised in the first of them only.
"""

from collections.abc import Iterator
from typing import Any

from tunewell.data.rows.conversation import ConversationRow, Rejected, is_list, is_object, objects_in
from tunewell.data.sources.base import SourceFile
from tunewell.data.sources.blocks import ReadOptions, read_parsed

_NAME = "openassistant"
_UNRANKED = 1 << 30
_MAX_TURNS = 400
"""Depth at which a path ends. Python's stack would not hold much deeper trees; real ones have up to twenty turns."""
Node = dict[str, Any]


def read(file: SourceFile, options: ReadOptions) -> Iterator[tuple[int, Any]]:
    """Yield the conversations of each tree, numbered by the row of its first message."""
    flat: dict[str, tuple[int, Node]] = {}
    for number, row in read_parsed(file, options):
        root = row.get("prompt", row) if is_object(row) else None
        if isinstance(row, Rejected):
            yield number, row
        elif not is_object(root) or "role" not in root:
            yield number, Rejected("not_a_conversation", "the row is not a message or a tree of messages")
        elif is_list(root.get("replies")):
            yield from _conversations(number, root, options.paths)
        else:
            flat[str(root.get("message_id"))] = (number, root | {"replies": []})
    yield from _flat_trees(flat, options.paths)


def _flat_trees(messages: dict[str, tuple[int, Node]], paths: str) -> Iterator[tuple[int, Any]]:
    """Connect messages by `parent_id` and yield the conversations of the resulting trees."""
    roots: list[tuple[int, Node]] = []
    for number, message in messages.values():
        parent = message.get("parent_id")
        if parent is None:
            roots.append((number, message))
        elif str(parent) in messages:
            messages[str(parent)][1]["replies"].append(message)
        else:
            yield number, Rejected("not_a_conversation", f"its parent message {parent!r} is not in the file")
    for number, root in roots:
        yield from _conversations(number, root, paths)


def _conversations(number: int, root: Node, paths: str) -> Iterator[tuple[int, Any]]:
    supervised: set[int] = set()
    has_reply = False
    for path in _paths(root, [], is_best=paths == "best"):
        while path and path[-1].get("role") != "assistant":
            path = path[:-1]  # a question that nobody answered
        if not path or id(path[-1]) in supervised:
            continue
        has_reply = True
        messages = [
            {"role": node["role"], "content": node.get("text")} | ({"weight": 0} if id(node) in supervised else {})
            for node in path
        ]
        supervised |= {id(node) for node in path if node["role"] == "assistant"}
        yield number, ConversationRow(messages, _NAME)
    if not has_reply:
        yield number, Rejected("not_a_conversation", "the tree has no reply")


def _paths(node: Node, before: list[Node], *, is_best: bool) -> Iterator[list[Node]]:
    """Yield the paths from a node to the ends of the tree, or the best of them."""
    path = [*before, node]
    replies = _ranked(node) if len(path) < _MAX_TURNS else []
    if not replies:
        yield path
    for reply in replies[:1] if is_best else replies:
        yield from _paths(reply, path, is_best=is_best)


def _ranked(node: Node) -> list[Node]:
    """Return the replies that were not deleted or rejected by reviewers, best first."""
    replies = [reply for reply in objects_in(node.get("replies")) if "role" in reply]
    kept = [reply for reply in replies if not reply.get("deleted") and reply.get("review_result") is not False]
    return sorted(kept, key=lambda reply: rank if isinstance(rank := reply.get("rank"), int) else _UNRANKED)
