"""Preference sets as data for supervised fine-tuning: the preferred reply is trained, the other one is not used."""

import re
from typing import Any

from tunewell.data.rows.column_names import first_present
from tunewell.data.rows.conversation import Conversation, Message, Rejected, is_list, is_object
from tunewell.data.rows.formats import (
    FormatOptions,
    convert_messages,
    convert_prompt_completion,
    from_json,
    read_text,
    require_columns,
)

_PROMPTS = ("prompt", "question", "instruction", "query", "input")
_TURN = re.compile(r"\n\n(Human|Assistant):[ \n]?")
"""The turns of Anthropic's HH-RLHF, where `chosen` is a whole conversation in one text."""


def convert_preference(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert `chosen`: a reply to `prompt`, a list of messages, or a text with `Human:` and `Assistant:` turns."""
    require_columns(row, "chosen")
    chosen = from_json(row["chosen"])
    key = first_present(_PROMPTS, row)
    prompt = from_json(row[key]) if key else None
    if isinstance(chosen, str) and not prompt:
        turns = _split_turns(chosen)
    elif is_list(chosen) and any(_role(turn) in ("user", "human") for turn in chosen):
        turns = chosen  # the whole conversation, with the prompt
    else:
        asked = prompt if is_list(prompt) else [{"role": "user", "content": read_text(prompt, str(key))}]
        turns = [*asked, *(chosen if is_list(chosen) else [{"role": "assistant", "content": chosen}])]
    kept = {name: row[name] for name in ("system", "system_prompt", "tools") if name in row}
    conversation = convert_messages({"messages": turns, **kept}, options)
    conversation.learn = _only_last_reply(conversation.messages, conversation.learn)
    conversation.note("chosen_replies")
    return conversation


def convert_unpaired(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert `prompt` and `completion` with a verdict in `label`; raise Rejected for a completion that is not good."""
    require_columns(row, "label")
    label = row["label"]
    if label is False:
        raise Rejected("not_preferred", "`label` is false")
    conversation = convert_prompt_completion(row, options)
    if label is True:
        conversation.note("chosen_replies")
    elif label not in (None, ""):
        conversation.unused = ("label",)
    return conversation


def _only_last_reply(messages: list[Message], learn: list[bool | None] | None) -> list[bool | None] | None:
    """Supervise the last reply only: it is the one that was preferred."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(replies) < 2:
        return learn
    return [False if index in replies[:-1] else None for index in range(len(messages))]


def _role(turn: Any) -> Any:
    return (turn.get("role") or turn.get("from")) if is_object(turn) else None


def _split_turns(text: str) -> list[Message]:
    _, *parts = _TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if not parts:
        raise Rejected("not_a_conversation", "`chosen` has no prompt and no `Human:` and `Assistant:` turns")
    roles = {"Human": "user", "Assistant": "assistant"}
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": roles[name], "content": content.strip()} for name, content in pairs]
