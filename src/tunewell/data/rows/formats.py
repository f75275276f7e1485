"""Detect the format of a row (Alpaca, ShareGPT, messages, ...) and convert it to a conversation.

The format is detected for each row from its keys, so a file may change its format half-way.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from tunewell.config.extensions import FORMATS
from tunewell.config.schema import SourceConfig
from tunewell.core.errors import UserError
from tunewell.core.files import read_data
from tunewell.data.rows.column_names import (
    ACCEPTED,
    ANSWERS,
    EXTRAS,
    KNOWN,
    LISTS,
    PAIRS,
    QUESTIONS,
    SYSTEMS,
    Candidate,
    accepted_answers,
    choose_format,
    find_candidates,
    first_present,
    match_ignoring_case,
)
from tunewell.data.rows.conversation import (
    REASONING_KEYS,
    Conversation,
    ConversationRow,
    Message,
    Rejected,
    is_list,
    is_object,
)
from tunewell.data.rows.json_rows import numbers_as_text, parse_row

_NAMES = read_data(__file__, "names.toml")
ROLES: dict[str, str] = _NAMES["roles"]
"""Role names in data sets -> standard role names of templates."""

_CALL_ROLES = ("function_call", "tool_call")
_MEDIA = re.compile("image|audio|video", re.IGNORECASE)
_KEPT_TEXT_KEYS = ("name", "tool_call_id", *REASONING_KEYS)
_MAX_NESTING_INSIDE = 64


def read_turns(turns: list[Any]) -> tuple[list[Message], list[bool | None]]:
    """Convert turns to messages and their `weight` to supervision flags; raise Rejected for an invalid turn."""
    read = [_message(part) for turn in turns for part in _expanded(turn)]
    return [message for message, _ in read], [learn for _, learn in read]


_BLOCKS = frozenset(("tool_use", "tool_result", "thinking", "reasoning"))


def _expanded(turn: Any) -> list[Any]:
    content = turn.get("content") if is_object(turn) else None
    has_blocks = is_list(content) and any(is_object(part) and part.get("type") in _BLOCKS for part in content)
    return _expand_blocks(turn) if has_blocks else [turn]


def _expand_blocks(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a turn with Anthropic's content blocks: tool results are messages of their own."""
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thinking: list[str] = []
    rest: list[Any] = []
    for block in turn["content"]:
        kind = block.get("type") if is_object(block) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append({"role": "tool", "content": block.get("content"), "tool_call_id": block.get("tool_use_id")})
        elif kind in ("thinking", "reasoning"):
            thinking.append(str(block.get(kind) or block.get("text") or ""))
        else:
            rest.append(block)
    message = {**turn, "content": rest}
    if calls:
        message["tool_calls"] = calls
    if any(thinking):
        message["reasoning_content"] = "\n\n".join(filter(None, thinking))
    return [*results, *([message] if rest or calls or not results else [])]


def _message(turn: Any) -> tuple[Message, bool | None]:
    if not is_object(turn):
        raise Rejected("not_a_conversation", f"a turn is {kind_of(turn)}, not an object")
    name = turn.get("from") if turn.get("role") is None else turn["role"]
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise Rejected("not_a_conversation", f"unknown role {name!r}" if name is not None else "a turn has no role")
    content = turn.get("value") if turn.get("content") is None else turn["content"]
    message: Message = {"role": role, "content": read_text(content, "a turn")}
    if name in _CALL_ROLES:
        calls = from_json(message["content"], "[{")
        calls = calls if is_list(calls) else [calls]
        if not all(is_object(call) for call in calls):
            raise Rejected("not_a_conversation", f"a {name} turn is not JSON")
        return {"role": role, "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}, None
    if len(turn) == 2 and ("content" in turn or "value" in turn):
        return message, None
    for key in _KEPT_TEXT_KEYS:
        if turn.get(key) is not None:
            message[key] = read_text(turn[key], key)
    if calls := read_objects(turn.get("tool_calls"), "tool_calls"):
        message["tool_calls"] = calls
    elif is_object(call := turn.get("function_call")):
        message["tool_calls"] = [{"type": "function", "function": call}]
    return message, _weight(turn, role)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if is_object(part) and (part.get("type") or "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if is_object(part) else kind_of(part)
    if media := _MEDIA.search(str(kind)):
        raise Rejected("has_media", f"a message has {media[0].lower()} (a part of type {kind!r})")
    raise Rejected("not_a_conversation", f"a part of type {kind!r}; only text is supported")


def _weight(turn: dict[str, Any], role: str) -> bool | None:
    weight = turn.get("weight")
    if weight is None:
        return None
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise Rejected("not_a_conversation", f"weight {weight!r}; it must be 0 or 1")
    if weight and role != "assistant":
        raise Rejected("not_a_conversation", f"weight 1 on a {role} turn; only replies can be supervised")
    return bool(weight) if role == "assistant" else None


def read_objects(value: Any, name: str) -> list[Any] | None:
    """Return a list of objects, parsed from JSON text if necessary, or None if the value is missing or empty."""
    value = from_json(value)
    if value is None or value == [] or value == "":
        return None
    if not is_list(value) or not all(is_object(entry) for entry in value):
        raise Rejected("not_a_conversation", f"{name} must be a list of objects")
    return value


def from_json(value: Any, starts: str = "[") -> Any:
    """Parse a list that is stored as JSON text, as in a table cell; return anything else unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(tuple(starts)):
        return value
    try:
        found = parse_row(value.encode("utf-8", "surrogatepass"), max_nesting=_MAX_NESTING_INSIDE)
    except Rejected:
        return value
    return found if is_list(found) or (is_object(found) and "{" in starts) else value


def read_text(value: Any, name: str) -> str:
    """Return text from a string, a list of text parts or None; raise Rejected for anything else."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if is_list(value):
        return "".join(_part(part) for part in value)
    raise Rejected("not_a_conversation", f"{name} is {kind_of(value)}, not text")


def kind_of(value: object) -> str:
    """Return the type of a JSON value in plain words."""
    names: dict[type[object], str] = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    names[type(None)] = "null"
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


_COLUMN_FORMATS = frozenset((*PAIRS, "question_answer", "preference", "unpaired_preference"))
_TEXT_COLUMNS = frozenset((*QUESTIONS, *ANSWERS, *EXTRAS, "chosen"))
_ACCEPTED = frozenset(ACCEPTED)
_MAX_SHAPES = 4096


@dataclass(frozen=True)
class FormatOptions:
    """The settings of a source that formats use."""

    labels: tuple[str, ...] = ()
    """The labels of a classification set."""
    marks_input: bool = False
    """Whether the template has a form for questions with an input, as Alpaca's `### Input:`."""


_Convert = Callable[[dict[str, Any], FormatOptions], Conversation]


class Converter:
    """A converter for the rows of one source. It caches the candidate formats for each set of keys."""

    def __init__(
        self,
        *,
        format_name: str = "auto",
        columns: Mapping[str, str] | None = None,
        system: str | None = None,
        options: FormatOptions | None = None,
    ):
        # Formats that read whole files give rows of messages.
        self._format = "auto" if FORMATS.entry(format_name).files else format_name
        self._options = options or FormatOptions()
        self._load: Callable[[str], _Convert] = cache(FORMATS.load)
        self._unused = lru_cache(_MAX_SHAPES)(_unused_columns)
        self._match = lru_cache(_MAX_SHAPES)(_match)
        self._columns = dict(columns or {})
        self._system = system
        unknown = next((name for name in self._columns if name not in KNOWN and name not in ACCEPTED), None)
        if unknown is not None:
            fields = ", ".join([*KNOWN, *ACCEPTED])
            raise UserError(
                f"`{unknown}` in `columns` is not a tunewell field",
                fix=f"write `FIELD: YOUR COLUMN`, like `question: Frage`; the fields are {fields}",
            )

    @classmethod
    def of(cls, source: SourceConfig, options: FormatOptions | None = None) -> "Converter":
        """Return the converter of a source."""
        return cls(format_name=source.format, columns=source.columns, system=source.system, options=options)

    @property
    def keeps_text(self) -> bool:
        """Whether the config names the format, so that texts are kept even if they look like a conversation."""
        return self._format != "auto"

    def convert(self, row: Any) -> tuple[Conversation, str]:
        """Return the conversation of a row and the name of its format; raise Rejected if it is not a conversation."""
        if isinstance(row, str) and self._format == "text":
            row = {"text": row}
        if is_list(row) and self._format in ("auto", "messages", "sharegpt"):
            row = {"messages": row}
        if not is_object(row):
            raise Rejected("not_a_conversation", f"the row is {kind_of(row)}, not an object")
        if self._columns:
            row = self._renamed(row)
        if isinstance(row, ConversationRow):
            conversation = _conversation(row, *read_turns(row["messages"]))
            conversation.notes = row.notes
            return self._with_system(conversation), row.format_name
        name, renamed = self._format, dict[str, str]()
        if name == "auto":
            row, name, renamed = self._detected(row)
        texts = numbers_as_text(row, _TEXT_COLUMNS) if name in _COLUMN_FORMATS else row
        conversation = self._load(name)(texts, self._options)
        if texts is not row:
            conversation.note("numbers_as_text")
        unused = self._unused(name, tuple(row))
        if not _ACCEPTED.isdisjoint(unused):
            unused = _read_accepted(conversation, unused, row)
        if unused:
            conversation.unused += _with_values(unused, row)
        if renamed:
            conversation.note("names_in_other_case")
        return self._with_system(conversation), name

    def _with_system(self, conversation: Conversation) -> Conversation:
        if self._system is not None and conversation.messages and conversation.messages[0]["role"] != "system":
            conversation.messages.insert(0, {"role": "system", "content": self._system})
            if conversation.learn:
                conversation.learn.insert(0, None)
        return conversation

    def _detected(self, row: dict[str, Any]) -> tuple[dict[str, Any], str, dict[str, str]]:
        """Return the row with standard column names, its format, and the names that were in other case."""
        # The mapped columns determine the format, whatever other columns exist.
        if self._columns and (mapped := find_candidates(self._columns)):
            return row, choose_format(mapped, row), {}
        candidates, renamed = self._match(tuple(row))
        if renamed:
            row = {renamed.get(key, key): value for key, value in row.items()}
        return row, choose_format(candidates, row), renamed

    def _renamed(self, row: dict[str, Any]) -> dict[str, Any]:
        taken = set(self._columns.values())
        renamed = {key: value for key, value in row.items() if key not in taken and key not in self._columns}
        for ours, theirs in self._columns.items():
            if theirs not in row:
                raise Rejected("not_a_conversation", f"column {theirs!r} is missing")
            renamed[ours] = row[theirs]
        return renamed


def _match(keys: tuple[str, ...]) -> tuple[list[Candidate], dict[str, str]]:
    """Return the formats that match the keys of a row, and the names to change because their case differs."""
    row = dict.fromkeys(keys)
    renamed = match_ignoring_case(row)
    return find_candidates({renamed.get(key, key): None for key in keys}), renamed


def _unused_columns(format_name: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns that a format does not read."""
    entry = FORMATS.entry(format_name)
    read = {*entry.columns, *entry.uses}
    if format_name == "question_answer":
        read |= {*QUESTIONS, *ANSWERS}  # which of several is used depends on the values
    return () if format_name == "classification" else tuple(key for key in keys if key not in read)


def convert_alpaca(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert `instruction`, `input` and `output`."""
    return _asked_and_answered(row, *PAIRS["alpaca"], options)


def convert_alpaca_prompt(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert `instruction`, `input` and `output` to the public Alpaca prompt, unless the template writes it itself."""
    require_columns(row, *PAIRS["alpaca"])
    given = {name: read_text(row.get(name), name) for name in ("instruction", "input")}
    if options.marks_input or not given["instruction"].strip():
        return convert_alpaca(row, options)
    prompt = _NAMES["alpaca_prompt"]["with_input" if given["input"].strip() else "without_input"]
    return convert_alpaca({**row, **dict.fromkeys(EXTRAS, ""), "instruction": prompt.format(**given)}, options)


def convert_dolly(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert `instruction`, `context` and `response`."""
    return _asked_and_answered(row, *PAIRS["dolly"], options)


def convert_question_answer(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert a question and an answer under their usual names; other questions and answers are not used."""
    question, answer = first_present(QUESTIONS, row), first_present(ANSWERS, row)
    if question is None or answer is None:
        raise Rejected("not_a_conversation", "the row has no question and answer")
    conversation = _asked_and_answered(row, question, answer, options)
    if len(row) > 2:
        others = (key for key in (*QUESTIONS, *ANSWERS) if row.get(key) and key not in (question, answer))
        conversation.unused = tuple(key for key in others if key not in EXTRAS)
    return conversation


def _asked_and_answered(row: dict[str, Any], question: str, answer: str, options: FormatOptions) -> Conversation:
    """Return a conversation of one question and one reply; `input` or `context` is appended to the question."""
    require_columns(row, question, answer)
    asked: Message = {"role": "user", "content": read_text(row[question], question)}
    for key in EXTRAS:
        if key in row and key != question and (extra := read_text(row[key], key)).strip():
            if not asked["content"].strip():
                asked["content"] = extra
            elif options.marks_input and "has_input" not in asked:
                asked |= {"content": f"{asked['content']}\n\n### Input:\n{extra}", "has_input": True}
            else:
                asked["content"] += f"\n\n{extra}"
    turns = [asked, {"role": "assistant", "content": read_text(row[answer], answer)}]
    return _conversation(row, turns)


def convert_prompt_completion(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert a prompt and a completion, each as text or a list of messages. Only the completion is supervised."""
    require_columns(row, "prompt", "completion")
    prompt, completion = (_turns_or_text(row[key], key) for key in ("prompt", "completion"))
    asked, _ = read_turns(prompt if is_list(prompt) else [{"role": "user", "content": prompt}])
    replied, learn = read_turns(completion if is_list(completion) else [{"role": "assistant", "content": completion}])
    if is_list(prompt) or is_list(completion):
        learn = [*[False] * len(asked), *learn]
        return _conversation(row, [*asked, *replied], learn, read_objects(row.get("tools"), "tools"))
    return _conversation(row, [*asked, *replied])


def _turns_or_text(value: Any, name: str) -> list[Any] | str:
    turns = from_json(value)
    if is_list(turns) and turns and all(is_object(turn) and {"role", "from"} & turn.keys() for turn in turns):
        return turns
    return read_text(value, name)


def convert_messages(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert a list of turns with `role` and `content`, or with `from` and `value`."""
    key = first_present(LISTS, row)
    turns = from_json(row[key]) if key else None
    if not is_list(turns):
        raise Rejected("not_a_conversation", f"the messages are {kind_of(turns)}, not a list of turns")
    if not turns:
        raise Rejected("not_a_conversation", "the list of messages is empty")
    messages, learn = read_turns(turns)
    return _conversation(row, messages, learn, read_objects(row.get("tools") or row.get("functions"), "tools"))


def _conversation(
    row: dict[str, Any], turns: list[Message], learn: list[bool | None] | None = None, tools: list[Any] | None = None
) -> Conversation:
    """Add the system message of the row, unless the turns already contain one."""
    if learn is not None and learn.count(None) == len(learn):
        learn = None
    key = first_present(SYSTEMS, row)
    system = read_text(row[key], key) if key else ""
    if system.strip() and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
        learn = [None, *learn] if learn else None
    return Conversation(turns, tools, None, learn)


def convert_text(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Return the column `text` as plain text."""
    require_columns(row, "text")
    return Conversation(text=read_text(row["text"], "text"))


def _read_accepted(conversation: Conversation, unused: tuple[str, ...], row: dict[str, Any]) -> tuple[str, ...]:
    """Read the accepted answers of a row, and return the columns that are still not used."""
    column, answers = accepted_answers({name: row[name] for name in unused if name in _ACCEPTED})
    if not answers or conversation.text is not None:
        return unused
    conversation.answers, conversation.answers_column = answers, column
    conversation.note("rows_with_answers")
    return tuple(name for name in unused if name != column)


def _with_values(columns: tuple[str, ...], row: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns that have a value; raise Rejected if one of them contains an image, audio or video."""
    found = tuple(key for key in columns if row[key] not in (None, "", []))
    media = next((key for key in found if key.lower() in _NAMES["media"]), None)
    if media is not None:
        raise Rejected("has_media", f"the column `{media}` has a value; only text can be trained on")
    return found


def require_columns(row: dict[str, Any], *keys: str) -> None:
    """Raise Rejected if a column is missing."""
    for key in keys:
        if key not in row:
            raise Rejected("not_a_conversation", f"column {key!r} is missing")
