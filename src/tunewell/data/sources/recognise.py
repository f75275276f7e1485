"""Find out how a source must be read: encoding, separator, speaker, labels and columns. Ask where it cannot be told.

What is certain is written down without a question. Without somebody to ask, what is not certain stays open: `init`
writes `?`, and the sample is read with the likeliest value.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from tunewell.config.schema import OPEN
from tunewell.config.yaml_reader import parse_scalar
from tunewell.core.errors import UserError
from tunewell.core.questions import Asker, MenuQuestion
from tunewell.core.units import count
from tunewell.data.rows.classification import find_labels, is_numeric
from tunewell.data.rows.column_names import find_candidates, is_labelled_text, match_ignoring_case, suggest_columns
from tunewell.data.rows.conversation import ConversationRow, is_object
from tunewell.data.rows.headings import guess_columns
from tunewell.data.sources.base import SourceFile
from tunewell.data.sources.blocks import ReadOptions, parsed_rows, read_blocks
from tunewell.data.sources.exports.turns import CHAT_FORMATS, UnknownSpeaker
from tunewell.data.sources.lines import detect_encoding, likely_encodings
from tunewell.data.sources.local import LocalFile
from tunewell.data.sources.records import likely_separators

_READ = ReadOptions(1 << 22, 64)
_SAMPLE_ROWS = 1000
_HELD_OUT_NAMES = ("held_out", "heldout", "held-out", "validation", "valid", "val", "eval", "dev")
_SHOWN_CHARS = 200
_PAUSES = (1.0, 2.0, 4.0, 8.0, 12.0, 24.0, 48.0, 96.0)
"""Values of `gap_hours` that are compared."""
_ENOUGH = 2 / 3
"""Of the values that keep at least this share of the most conversations, the one that drops the fewest is chosen."""
_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_TEXT = "?text"


@dataclass
class Recognised:
    """The settings of a source that were found, given or chosen, each with its reason."""

    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the source, like `columns` and `encoding`, as the first rows are read with them."""
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    open_points: dict[str, str] = field(default_factory=dict[str, str])
    """Keys that nobody has decided, each with the question."""
    flags: dict[str, str] = field(default_factory=dict[str, str])
    """The option of `init` that decides an open point, with the likeliest value."""
    labels: tuple[str, ...] = ()
    pauses: str = ""
    """How many conversations of a chat each value of `gap_hours` keeps, if the usual one drops many."""

    def set(self, key: str, value: Any, reason: str) -> None:
        self.settings[key], self.reasons[key] = value, reason

    def leave_open(self, key: str, question: str, *, likeliest: Any, flag: str) -> None:
        """Mark a key as open. Until it is decided, rows are read with its likeliest value."""
        self.set(key, likeliest, question)
        self.open_points[key], self.flags[key] = question, flag

    def written(self) -> dict[str, Any]:
        """Return the settings as they are written to the config, with `?` for what is open."""
        return {
            key: value if key not in self.open_points else dict.fromkeys(value, OPEN) if key == "columns" else OPEN
            for key, value in self.settings.items()
        }


def recognise(
    files: Sequence[SourceFile], given: Mapping[str, Any], *, limit: int | None = None, ask: Asker | None = None
) -> Recognised:
    """Return how the files of one source are read. `given` has keys of the source that the user has set."""
    found = Recognised(dict(given), dict.fromkeys(given, "as you said"))
    table = next((file for file in files if file.format in ("csv", "tsv", "txt", "md")), None)
    if table is not None and "encoding" not in given:
        _find_encoding(table, found, ask)
    if table is not None and table.format == "csv" and "separator" not in given:
        _find_separator(table, found, ask)
    rows = _first_rows(files, found, limit, ask)
    if rows and isinstance(rows[0], ConversationRow) and rows[0].format_name in CHAT_FORMATS:
        _find_pause(files, found)
    if "columns" in given:
        _require_columns(given["columns"], rows)
    elif "format" not in given and "map" not in given:
        read = read_options(found, limit)
        found.labels = find_labels(rows, parsed_rows(files, read))
        if found.labels:
            found.set("format", "classification", f"{count(len(found.labels), 'label')}; the answer is the label")
            if is_numeric(found.labels):
                reason = "the labels are numbers; replace them by their names, in this order, if they have some"
                found.set("labels", list(found.labels), reason)
        else:
            _find_columns([row for row in rows if is_object(row)], files[0].name, found, ask)
    return found


def read_options(found: Recognised, limit: int | None = None) -> ReadOptions:
    """Return how the first rows are read with the settings that were found."""
    known = {
        key: found.settings[key]
        for key in ("encoding", "separator", "assistant", "text_rows", "paths", "gap_hours", "format")
        if found.settings.get(key) is not None
    }
    return replace(_READ, limit=limit, **known)


def _find_encoding(file: SourceFile, found: Recognised, ask: Asker | None) -> None:
    encodings = likely_encodings(file)
    if not encodings:
        return
    names, likeliest = dict(encodings), encodings[0][0]
    is_certain = len(encodings) == 1 or likeliest == detect_encoding(file, "auto") == "cp1252"
    answer = None
    if ask is not None and len(encodings) > 1:
        question = MenuQuestion(f"`{file.name}` is not UTF-8. In which line are all letters right?", tuple(encodings))
        answer = ask(question)
    if answer is not None or is_certain:
        line = names[answer or likeliest].strip()
        found.set("encoding", answer or likeliest, f"the file is not UTF-8; read like this, a line is: {line}")
        return
    question = f"which encoding has `{file.name}`? It is not UTF-8; possible: {', '.join(names)}"
    found.leave_open("encoding", question, likeliest=likeliest, flag=f"--encoding {likeliest}")


def _find_separator(file: SourceFile, found: Recognised, ask: Asker | None) -> None:
    encoding = detect_encoding(file, found.settings.get("encoding", "auto"))
    marks = likely_separators(file, encoding)
    if len(marks) < 2 or ask is None:
        return  # the best one is used; a wrong one shows in the names of the columns
    heads = {mark: _columns_with(file, replace(_READ, encoding=encoding, separator=_name(mark))) for mark in marks}
    options = tuple((mark, f"{_SEPARATORS[mark]}: {', '.join(names)}") for mark, names in heads.items() if names)
    answer = ask(MenuQuestion(f"What separates the columns of `{file.name}`?", options)) if len(options) > 1 else None
    if answer is not None:
        found.set("separator", _name(answer), "the character between two columns")


def _name(mark: str) -> str:
    return "tab" if mark == "\t" else mark


def _columns_with(file: SourceFile, read: ReadOptions) -> list[str]:
    try:
        first = next(parsed_rows([file], read), None)
    except UserError:
        return []
    return list(first) if is_object(first) else []


def _first_rows(
    files: Sequence[SourceFile], found: Recognised, limit: int | None, ask: Asker | None
) -> list[dict[str, Any]]:
    number = min(limit or _SAMPLE_ROWS, _SAMPLE_ROWS)
    try:
        return list(islice(parsed_rows(files, read_options(found, number)), number))
    except UnknownSpeaker as unknown:
        senders = [name for name, _ in unknown.senders.most_common()]
        if not senders or found.settings.get("assistant") is not None:
            raise
        options = tuple((name, f"{name} ({count(unknown.senders[name], 'message')})") for name in senders)
        question = MenuQuestion(f"{files[0].name} is a chat. Whose messages shall the model learn to write?", options)
        if (answer := ask(question) if ask else None) is not None:
            found.set("assistant", answer, "the person whose messages the model learns to write")
        else:
            named = ", ".join(label for _, label in options)
            found.leave_open(
                "assistant",
                f"whose messages shall the model learn to write? Senders: {named}",
                likeliest=senders[0],
                flag=set_flag("assistant", senders[0]),
            )
        return _first_rows(files, found, limit, ask)


def _find_pause(files: Sequence[SourceFile], found: Recognised) -> None:
    """Choose the pause that starts a new conversation, if the usual one drops more than a third of them."""
    hours = usual = found.settings.get("gap_hours", _READ.gap_hours)
    kept = {own: _num_kept(files, replace(read_options(found), gap_hours=own)) for own in sorted({*_PAUSES, usual})}
    if kept[usual][0] >= _ENOUGH * kept[usual][1]:
        return
    if "gap_hours" not in found.settings:
        enough = _ENOUGH * max(number for number, _ in kept.values())
        hours = min((own for own in kept if kept[own][0] >= enough), key=lambda own: kept[own][1] - kept[own][0])
        found.set("gap_hours", hours, "hours of a pause that starts a new conversation, chosen for this chat")
    table = ", ".join(f"{own:g} keeps {number} of {total}" for own, (number, total) in kept.items())
    found.pauses = f"`gap_hours: {hours:g}`; of the conversations, those with a reply are kept: {table}"


def _num_kept(files: Sequence[SourceFile], options: ReadOptions) -> tuple[int, int]:
    """Return the number of conversations with a reply, and of all."""
    parts = [item for file in files for block in read_blocks(file, options) for item in block.items]
    kept = [item for item in parts if is_object(item) and len(item["messages"]) > 1]
    return len(kept), len(parts)


def _find_columns(rows: list[dict[str, Any]], name: str, found: Recognised, ask: Asker | None) -> None:
    """Find the columns of question and answer, if no format matches the names in the first row."""
    plain = [row for row in rows if type(row) is dict]  # not conversations that a reader has built
    if not plain or find_candidates(plain[0]) or is_labelled_text(plain[0]):
        return
    certain, guess = suggest_columns(plain[0]), guess_columns(plain)
    if not certain and not guess.columns:
        return
    if ask is not None and not match_ignoring_case(plain[0]):
        likeliest = certain if {"question", "answer"} <= certain.keys() else guess.columns
        if (answer := _ask_columns(plain, name, likeliest, guess.texts, ask)) is not None:
            found.set("columns", answer, "our name: the name in your rows")
            return
    if certain:
        found.set("columns", certain, "our name: the name in your rows")
        return
    names = ", ".join(map(str, plain[0]))
    question = f"which column is the question, which the answer? Your columns: {names}"
    found.leave_open("columns", question, likeliest=guess.columns, flag=columns_flag(guess.columns))


def set_flag(key: str, value: Any) -> str:
    """Return `--set` for a key of the source, as a shell reads it. A name like `123` or `[x]` is quoted as text."""
    is_plain = isinstance(value, str) and parse_scalar(value) == value and not value.startswith(("[", "{", '"', "'"))
    text = value if is_plain else json.dumps(value, ensure_ascii=False)
    return f"--set {shlex.quote(f'data.sources[0].{key}={text}')}"


def columns_flag(columns: Mapping[str, str]) -> str:
    """Return `--columns` for these names; `--set` for names that contain a comma, which separates names."""
    if any("," in name for name in columns.values()):
        return set_flag("columns", dict(columns))
    text = ",".join(f"{ours}={theirs}" for ours, theirs in columns.items())
    return f"--columns {shlex.quote(text)}" if re.search(r'["$`\\!]', text) else f'--columns "{text}"'


def _ask_columns(
    rows: list[dict[str, Any]], name: str, likeliest: Mapping[str, str], texts: Sequence[str], ask: Asker
) -> dict[str, str] | None:
    """Ask for the two columns. None: there is no answer."""
    shown = tuple((str(key), " ".join(str(value).split())[:_SHOWN_CHARS]) for key, value in rows[0].items())
    columns = [str(key) for key in rows[0]]
    if len(texts) < 2:
        return {"text": likeliest["text"]} if "text" in likeliest else None
    first = likeliest.get("question", columns[0])
    question = ask(
        MenuQuestion(
            f"Which column of `{name}` is the question?",
            (*_likeliest_first(columns, first), (_TEXT, "none: learn one column as plain text")),
            (("first row", ""), *shown),
        )
    )
    if question is None:
        return None
    if question == _TEXT:
        text = ask(MenuQuestion("Which column is the text?", _likeliest_first(columns, texts[0])))
        return None if text is None else {"text": text}
    others = [column for column in columns if column != question]
    wanted = [likeliest.get("answer"), *texts]
    answer = ask(
        MenuQuestion(
            "Which column is the answer?",
            _likeliest_first(others, next(column for column in wanted if column in others)),
        )
    )
    return None if answer is None else {"question": question, "answer": answer}


def _likeliest_first(columns: Sequence[str], likeliest: str | None) -> tuple[tuple[str, str], ...]:
    ordered = sorted(columns, key=lambda column: column != likeliest)
    return tuple((column, column) for column in ordered)


def _require_columns(columns: Mapping[str, str], rows: Sequence[Any]) -> None:
    """Raise UserError if a column that the user has named is not in the first rows."""
    names = list(dict.fromkeys(str(key) for row in rows if is_object(row) for key in row))
    for ours, theirs in columns.items():
        if names and theirs not in names:
            raise UserError(
                f"there is no column `{theirs}` for `{ours}`",
                where=f"the columns are {', '.join(names[:12])}",
                fix="name one of them, like `--columns question=YOURS,answer=YOURS`",
            )


def held_out_beside(files: Sequence[SourceFile]) -> str | None:
    """Return a file in the folder of the data with a name such as `validation` or `held_out`, or None."""
    if len(files) != 1 or not isinstance(files[0].source, LocalFile):
        return None
    path = files[0].source.path
    endings = "".join(path.suffixes[-2:]) if files[0].compression else path.suffix
    for name in _HELD_OUT_NAMES:
        found = path.with_name(name + endings)
        if found.is_file() and found != path:
            return found.as_posix()
    return None
