"""Classification sets: a text and its label become a question that names all labels, and the label as the answer."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from tunewell.config.schema import SourceConfig
from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.core.units import count
from tunewell.data.rows.column_names import LABELS, TEXTS, first_present, is_labelled_text
from tunewell.data.rows.conversation import Conversation, Rejected, is_object
from tunewell.data.rows.formats import FormatOptions, read_text

_MAX_LABELS = 200
"""Every question lists all labels. With more labels, the list would be longer than most texts."""
_SAMPLE_ROWS = 1000
"""First rows of a source that show whether they are texts with labels."""


def convert_classification(row: dict[str, Any], options: FormatOptions) -> Conversation:
    """Convert a text and its label; raise Rejected if a column is missing or the label is not one of the labels."""
    text_column, label_column = first_present(TEXTS, row), first_present(LABELS, row)
    if text_column is None or label_column is None:
        raise Rejected("not_a_conversation", f"no text with a label; its columns: {', '.join(map(str, row))}")
    label = _label(row[label_column], options.labels)
    if label not in options.labels:
        raise Rejected("not_a_conversation", f"the label {label!r} is not one of the {len(options.labels)} labels")
    question = f"Which label fits this text? Labels: {', '.join(options.labels)}."
    text = read_text(row[text_column], text_column)
    unused = tuple(key for key in row if key not in (text_column, label_column) and row[key] not in (None, "", []))
    messages = [{"role": "user", "content": f"{question}\n\n{text}"}, {"role": "assistant", "content": label}]
    return Conversation(messages if text.strip() else [{"role": "user", "content": ""}, messages[1]], unused=unused)


def collect_labels(rows: Iterable[Any], columns: Mapping[str, str], source: str) -> tuple[str, ...]:
    """Return the labels of all rows, sorted; raise UserError if they are numbers or there are too many."""
    labels = _distinct_labels(rows, columns, source)
    if is_numeric(labels):
        numbers = sorted(labels, key=int)
        own = "[negative, positive]" if numbers == ["0", "1"] else json.dumps(numbers)
        raise UserError(
            f"the {count(len(labels), 'label')} of `{source}` are numbers; their names are not known",
            fix=f"list their names, that of 0 first, or the numbers themselves: set `labels: {own}` on the source",
        )
    return tuple(sorted(labels))


def is_numeric(labels: Collection[str]) -> bool:
    """Return True if all labels are whole numbers, which say nothing about their meaning."""
    return all(label.lstrip("-").isdigit() for label in labels)


def _distinct_labels(rows: Iterable[Any], columns: Mapping[str, str], source: str) -> set[str]:
    labels: set[str] = set()
    for row in rows:
        if not is_object(row):
            continue
        column = columns.get("label") or first_present(LABELS, row)
        if column in row and row[column] is not None:
            labels.add(_label(row[column], ()))
        if len(labels) > _MAX_LABELS:
            raise UserError(
                f"column `{column}` of `{source}` has more than {_MAX_LABELS} different values: it is not a label",
                fix="name the label column: `columns: {label: YOURS}`, or use another `format`",
            )
    labels.discard("")
    if not labels:
        raise UserError(
            f"`{source}` has no label column", fix=f"name it: `columns: {{label: YOURS}}` (known: {', '.join(LABELS)})"
        )
    return labels


def labels_of(source: SourceConfig, rows: Callable[[], Iterable[Any]]) -> tuple[str, ...]:
    """Return the labels of a source: those of its config, or of all its rows; empty for other formats."""
    if source.format != "classification" or source.labels:
        return source.labels
    return collect_labels(rows(), source.columns, source.path)


def with_found_labels(source: SourceConfig, rows: Callable[[], Iterable[Any]]) -> SourceConfig:
    """Return a source of texts with labels with the format `classification`, as `init` writes it; others unchanged.

    Remote rows are left as they are: looking at them would download them once more.
    """
    if source.format != "auto" or source.map or source.columns or is_url(source.path):
        return source
    found = iter(rows())
    first = list(islice(found, _SAMPLE_ROWS))
    if not (labels := find_labels(first, chain(first, found))):
        return source
    named = {"labels": labels} if is_numeric(labels) else {}
    return source.model_copy(update=named | {"format": "classification"})


def find_labels(first: Sequence[Any], rows: Iterable[Any]) -> tuple[str, ...]:
    """Return the labels of all rows if the first ones have texts and labels, names or numbers; empty for other rows."""
    if not first or not all(is_object(row) and is_labelled_text(row) for row in first):
        return ()
    try:
        found = _distinct_labels(rows, {}, "")
    except UserError:
        return ()
    labels = tuple(sorted(found, key=int if is_numeric(found) else str))
    return labels if 1 < len(labels) <= len(first) / 2 else ()  # labels occur again and again; titles do not


def _label(value: Any, names: tuple[str, ...]) -> str:
    """Return the label as text. A number is the index of a label, unless it is a label itself: `1, 2, unrated`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column with empty cells
    text = str(value).strip() if isinstance(value, (str, int)) else ""
    is_index = text not in names and text.isascii() and text.isdigit() and int(text) < len(names)
    return names[int(text)] if is_index else text
