"""The column names of known formats: which formats match the columns of a row, and what near misses could mean."""

from collections.abc import Iterable, Mapping
from typing import Any

from tunewell.config.extensions import FORMATS
from tunewell.core.errors import close_names
from tunewell.data.rows.conversation import Rejected, is_list, is_object
from tunewell.data.rows.headings import known_heading

QUESTIONS = ("question", "query", "problem", "prompt", "instruction", "input", "user")
ANSWERS = ("answer", "solution", "response", "completion", "output", "reply", "assistant")
EXTRAS = ("input", "context")
LISTS = {"messages": "messages", "conversations": "sharegpt", "conversation": "sharegpt"}
PAIRS = {
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "dolly": ("instruction", "response"),
}
SYSTEMS = ("system", "system_prompt")
TEXTS = ("text", "sentence", "content", "document", "review", "utterance", "message", "comment", "title", *QUESTIONS)
LABELS = ("label", "labels", "category", "class", "intent", "sentiment", "topic", "target", "tag")
"""Columns of a text and of its label in classification sets, by preference."""
ACCEPTED = ("answers", "value")
"""Columns with the accepted answers to the question, by preference. `validate` judges by them."""
KNOWN = dict.fromkeys([*QUESTIONS, *ANSWERS, *EXTRAS, *LISTS, *SYSTEMS, "text", "tools", "label"])
Candidate = tuple[str, tuple[str, ...]]


def find_candidates(row: Mapping[str, Any]) -> list[Candidate]:
    """Return the formats that match the keys of the row, best first, each with the matching keys."""
    found: list[Candidate] = [(name, (key,)) for key, name in LISTS.items() if key in row]
    entries = [entry for entry in FORMATS.entries() if entry.columns]
    found += [(entry.name, tuple(entry.columns)) for entry in entries if all(key in row for key in entry.columns)]
    found += [(name, keys) for name, keys in PAIRS.items() if all(key in row for key in keys)]
    questions, answers = ([key for key in keys if key in row] for keys in (QUESTIONS, ANSWERS))
    if questions and answers:
        found.append(("question_answer", (*questions, *answers)))
    if "text" in row and "role" not in row:  # with a role, the row is one message of a conversation tree
        found.append(("text", ("text",)))
    return found


def choose_format(candidates: list[Candidate], row: Mapping[str, Any]) -> str:
    """Return the first format with a non-empty value; tables leave the columns of other formats empty."""
    for name, keys in candidates:
        if any(row[key] for key in keys):
            return name
    if candidates:
        return candidates[0][0]
    keys = ", ".join(sorted(map(str, row))[:8]) or "none"
    raise Rejected("not_a_conversation", f"no known column names; its columns: {keys}{_suggest(row)}")


def _suggest(row: Mapping[str, Any]) -> str:
    """Return the setting to add for column names that nearly match a format, or an empty text."""
    if "input_ids" in row:
        return "; these are token ids: `tunewell prepare --data PATH --model MODEL` reads a folder of such shards"
    if is_labelled_text(row):
        return "; it looks like a classification set; set `format: classification`"
    columns = ", ".join(f"{known}: {key}" for known, key in suggest_columns(row).items())
    return f"; set `columns: {{{columns}}}`" if columns else ""


def suggest_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the `columns` that make a known format of names that nearly match one, such as `Questions` or `Frage`."""
    columns: dict[str, str] = {}
    for key in map(str, row):
        if known := known_heading(key) or nearest_column(key):
            columns.setdefault(known, key)
    found = find_candidates(columns)
    if not found or find_candidates(row):
        return {}
    return {known: key for known, key in columns.items() if known != "text" or found[0][0] == "text"}


def match_ignoring_case(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns to rename, such as `Question`, if a format matches only when case is ignored.

    The result is empty if the names would not be unique, or if a format matches without this.
    """
    if find_candidates(row):
        return {}
    known = {*KNOWN, *TEXTS, *LABELS, *(column for entry in FORMATS.entries() for column in entry.columns)}
    folded = {key: name for key in row if (name := str(key).strip().casefold()) in known}
    names = [folded.get(key, key) for key in row]
    is_match = len(set(names)) == len(names) and find_candidates(dict.fromkeys(names))
    return {key: name for key, name in folded.items() if key != name} if is_match else {}


def is_labelled_text(row: Mapping[str, Any]) -> bool:
    """Return True for a row of a classification set: a text and a label, and no question with its answer."""
    known = [name for name, _ in find_candidates(row)]
    return known in ([], ["text"]) and bool(first_present(TEXTS, row) and first_present(LABELS, row))


def nearest_column(name: str) -> str | None:
    """Return the known column name that a name resembles, as `response` for `Respones`, or None."""
    return next(iter(close_names(name.strip().casefold(), KNOWN)), None)


def accepted_answers(row: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return the column with the accepted answers of a row and its texts, or two empty values if it has none.

    The column has a text, a number, a list of them, or SQuAD's `{"text": [...]}`.
    """
    for column in ACCEPTED:
        value: Any = row.get(column)
        if is_object(value):
            value = value.get("text")
        values: list[Any] = value if is_list(value) else [value]
        texts = [text for each in values if (text := _as_text(each)) is not None]
        if texts and len(texts) == len(values):
            return column, tuple(dict.fromkeys(texts))
    return "", ()


def _as_text(value: Any) -> str | None:
    """Return a non-empty text, or a number as text; None for anything else."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value).strip() if isinstance(value, str | int | float) else ""
    return text or None


def first_present(names: Iterable[str], row: Mapping[str, Any]) -> str | None:
    """Return the first name that has a value in the row, else the first that is a key of the row, else None."""
    present = [name for name in names if name in row]
    return next((name for name in present if row[name]), present[0] if present else None)
