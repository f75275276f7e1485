"""Clean conversations: reject empty or invalid ones, and compute digests for finding duplicates.

A rejection is a `Rejected` with a reason from the glossary. Duplicates and held-out rows are determined later from the
digests, over all sources together.
"""

import hashlib
import importlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunewell.config.schema import Clean
from tunewell.core.redact import hide_secrets, possible_secrets
from tunewell.data.rows.conversation import REASONING_KEYS, Conversation, Rejected, is_list, is_object, map_leaves

_URL = re.compile(r"https?://|\bwww\.", re.IGNORECASE)
# Some sets leave out the opening tag, because the generation prompt of the model contains it.
_THINKING = re.compile(
    r"\A\s*(?:<(think|thinking|thought|reasoning)>.*?</\1>|(?:(?!<think>).)*?</think>)\s*", re.DOTALL
)
DIGEST_BYTES = 16


class Digests(NamedTuple):
    """The digests of a conversation: `whole` for the exact content, `question` for all text before the last reply."""

    whole: bytes
    question: bytes
    turns: list[bytes]
    """The other questions of a conversation with several turns."""


def clean(conversation: Conversation, options: Clean) -> Digests:
    """Return the digests of a conversation; raise Rejected to drop it. Invalid text is replaced if configured."""
    if options.thinking == "strip":
        _strip_thinking(conversation)
    try:
        whole = digest_whole(conversation)
    except Rejected:
        if options.bad_text != "replace":
            raise
        _replace_bad_text(conversation)
        whole = digest_whole(conversation)
    if conversation.text is not None:
        _check_text(conversation.text, options)
    else:
        _check_turns(conversation, options)
    return Digests(whole, *digest_questions(conversation))


def _strip_thinking(conversation: Conversation) -> None:
    """Remove the thinking of replies: its own fields, and tags at the start of the text."""
    num_stripped = 0
    for message in conversation.messages:
        if message["role"] == "assistant":
            fields = [key for key in REASONING_KEYS if message.pop(key, None)]
            text = _THINKING.sub("", message["content"], count=1)
            num_stripped += bool(fields) or text != message["content"]
            message["content"] = text
    if num_stripped:
        conversation.note("thinking_stripped", num_stripped)


def find_possible_secrets(rows: Sequence[bytes]) -> list[bool]:
    """Return whether each row may contain a secret. One call for many rows takes about 2 µs per row."""
    # `pyarrow.compute` takes 30 ms to import; converting with `pa.array` or `to_numpy` would import pandas.
    compute: Any = importlib.import_module("pyarrow._compute")
    pyarrow: Any = importlib.import_module("pyarrow")
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"".join(rows))]
    texts = pyarrow.Array.from_buffers(pyarrow.large_binary(), len(rows), buffers)
    is_possible = np.zeros(len(rows), dtype=np.uint8)
    for pattern in possible_secrets():
        found = compute.call_function("match_substring_regex", [texts], compute.MatchSubstringOptions(pattern))
        bits = np.frombuffer(found.buffers()[1], dtype=np.uint8)
        is_possible |= np.unpackbits(bits, count=len(rows), bitorder="little")
    return is_possible.astype(bool).tolist()


def find_secrets(conversation: Conversation, options: Clean) -> Counter[str]:
    """Count the secrets of a conversation by kind, and replace them if configured."""
    found: Counter[str] = Counter()

    def hide(value: Any) -> Any:
        return hide_secrets(value, found) if isinstance(value, str) else value

    messages = map_leaves(conversation.messages, hide)
    text, tools = hide(conversation.text), map_leaves(conversation.tools, hide)
    if found and options.secrets == "redact":
        conversation.messages, conversation.text, conversation.tools = messages, text, tools
        conversation.answers = tuple(hide_secrets(text, Counter()) for text in conversation.answers)
    return found


def _check_text(text: str, options: Clean) -> None:
    if not text.strip():
        raise Rejected("empty_reply", "the text is empty")
    if len(text.strip()) < options.min_reply_chars:
        raise Rejected("too_short", f"{len(text.strip())} characters")
    if options.drop_urls and _URL.search(text):
        raise Rejected("has_url")


def _check_turns(conversation: Conversation, options: Clean) -> None:
    messages = conversation.messages
    for message in messages:
        if not message["content"].strip():
            if message["role"] == "user":
                raise Rejected("empty_question")
            if message["role"] == "assistant" and not message.get("tool_calls"):
                raise Rejected("empty_reply")
    replies = [message["content"].strip() for message in messages if message["role"] == "assistant"]
    if not replies:
        raise Rejected("not_a_conversation", "no reply")
    if all(message["role"] != "user" for message in messages):
        raise Rejected("not_a_conversation", "no question")
    if messages[0]["role"] == "assistant":
        raise Rejected("not_a_conversation", "the first message is a reply")
    if (reply_chars := sum(map(len, replies))) < options.min_reply_chars:
        raise Rejected("too_short", f"{reply_chars} characters of reply")
    if options.drop_urls and any(_URL.search(message["content"]) for message in messages):
        raise Rejected("has_url")


def digest_whole(conversation: Conversation) -> bytes:
    """Return a digest of everything that the model reads. Only equal conversations have equal digests.

    Raises Rejected for text that is not valid.
    """
    pieces: list[bytes] = []
    for text in _texts(conversation):
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            character = text[error.start]
            what = "a byte that is not UTF-8" if "\udc80" <= character <= "\udcff" else "a lone surrogate"
            raise Rejected("bad_text", f"{what} at position {error.start}") from error
        pieces += (b"%d:" % len(data), data)
    whole = b"".join(pieces)
    if b"\0" in whole:
        position = next(text.index("\0") for text in _texts(conversation) if "\0" in text)
        raise Rejected("bad_text", f"a NUL character at position {position}")
    return hashlib.blake2b(whole, digest_size=DIGEST_BYTES).digest()


def _texts(conversation: Conversation) -> Iterator[str]:
    if conversation.text is not None:
        yield conversation.text
        return
    for message in conversation.messages:
        yield message["role"]
        yield message["content"]
        if len(message) > 2:
            for key, value in message.items():
                if key not in ("role", "content"):
                    yield from _leaves({key: value})
    if conversation.tools:
        yield from _leaves(conversation.tools)


def _leaves(value: Any) -> Iterator[str]:
    """Yield a value as texts, with container sizes and leaf types, so that different values give different texts."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, str):
            yield "text"
            yield node
        elif is_object(node):
            yield f"{{{len(node)}"
            for key, inner in reversed(node.items()):
                waiting += (inner, str(key))
        elif is_list(node):
            yield f"[{len(node)}"
            waiting += reversed(node)
        else:
            yield f"{type(node).__name__} {node!r}"


def digest_questions(conversation: Conversation) -> tuple[bytes, list[bytes]]:
    """Return a digest of the question (everything before the last reply, or a plain text), and those of its turns.

    Turns are what comes before each earlier reply, and each later user message as if it had been asked first. Case and
    spacing are ignored.

    system S, user A, assistant B, user C, assistant D    question: S A B C    turns: S A, S C
    """
    if conversation.text is not None:
        return _digest([_folded(conversation.text)]), []
    messages = conversation.messages
    last = len(messages) - 1
    while messages[last]["role"] != "assistant":
        last -= 1
    pieces: list[bytes] = []
    system: list[bytes] = []
    turns: list[bytes] = []
    for message in messages[:last]:
        role, data = message["role"], _folded(message["content"])
        piece = role.encode() + b"%d:" % len(data) + data
        if role == "system" and len(system) == len(pieces):
            system.append(piece)
        elif role == "assistant":
            turns.append(_digest(pieces))
        elif role == "user" and turns:
            turns.append(_digest([*system, piece]))
        pieces.append(piece)
    return _digest(pieces), list(dict.fromkeys(turns))  # a row that repeats a question counts once


def _digest(pieces: list[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(pieces), digest_size=DIGEST_BYTES).digest()


def _folded(text: str) -> bytes:
    return " ".join(text.split()).casefold().encode("utf-8", "replace")


def _replace_bad_text(conversation: Conversation) -> None:
    conversation.text = _repair(conversation.text)
    for message in conversation.messages:
        for key, value in message.items():
            message[key] = map_leaves(value, _repair, with_keys=True)
    conversation.tools = map_leaves(conversation.tools, _repair, with_keys=True)


def _repair(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd")
