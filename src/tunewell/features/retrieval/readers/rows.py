"""Read tables and JSON lines as documents: one block per row, with the names of its columns."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from tunewell.core.files import parse_json
from tunewell.features.retrieval.readers.blocks import ParsedDocument, TextBlock, Unreadable, decode, split_lines

_TITLE_KEYS = ("title", "heading", "name", "subject", "question")


def read_csv(data: bytes) -> ParsedDocument:
    """Return one block per row of a CSV or TSV file, as `column: value` lines. The first row is the header."""
    text, notes = decode(data)
    sample = text[:65536]
    try:
        dialect: Any = csv.Sniffer().sniff(sample.partition("\n")[0] or sample, ",;\t|")
    except csv.Error:
        dialect = csv.excel
    reader = csv.reader(io.StringIO(text, newline=""), dialect)
    document, header = ParsedDocument(notes=notes), list[str]()
    try:
        previous = 0
        for row in reader:
            first, previous = previous + 1, reader.line_num
            if not header:
                header = [cell.strip() or f"column {number}" for number, cell in enumerate(row, 1)]
                continue
            pairs = zip([*header, *(f"column {n}" for n in range(len(header) + 1, len(row) + 1))], row, strict=False)
            body = "\n".join(f"{name}: {value.strip()}" for name, value in pairs if value.strip())
            if body:
                document.blocks.append(TextBlock("row", body, lines=(first, previous)))
    except csv.Error as error:
        raise Unreadable("broken", str(error)) from None
    return document


def read_json_lines(data: bytes) -> ParsedDocument:
    """Return one block per JSON object of a `.jsonl` or `.json` file: its text, its messages or its fields."""
    text, notes = decode(data)
    document, num_broken = ParsedDocument(notes=notes), 0
    for number, row in _rows(text):
        body = _row_text(row) if row is not None else ""
        num_broken += row is None
        if body:
            document.blocks.append(TextBlock("row", body, lines=(number, number) if number else None))
    if num_broken and not document.blocks:
        raise Unreadable("broken", "no line is valid JSON")
    if num_broken:
        document.notes.append(f"{num_broken} lines are not valid JSON and were left out")
    return document


def _rows(text: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows with their line; 0 if the whole file is one value. A row that is not JSON is None."""
    lines = split_lines(text)
    first = next((line for line in lines if line.strip()), "")
    if _load(first) is None or first.lstrip().startswith("["):
        whole = _load(text)
        if whole is not None:
            yield from ((0, row) for row in (whole if isinstance(whole, list) else [whole]))
            return
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, _load(line)


def _load(line: str) -> Any:
    try:
        return parse_json(line)
    except (ValueError, RecursionError):
        return None


def _row_text(row: Any) -> str:
    if isinstance(row, str):
        return row.strip()
    if not isinstance(row, dict):
        return json.dumps(row, ensure_ascii=False) if row not in (None, [], {}) else ""
    lines = []
    for key, value in sorted(row.items(), key=lambda item: item[0].lower() not in _TITLE_KEYS):
        if isinstance(value, list) and value and all(isinstance(one, dict) and "content" in one for one in value):
            lines += [f"{one.get('role', key)}: {one['content']}" for one in value]
        elif isinstance(value, str) and value.strip():
            lines.append(value.strip() if len(row) == 1 or key in ("text", "body") else f"{key}: {value.strip()}")
        elif value not in (None, "", [], {}) and not isinstance(value, str):
            lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)
