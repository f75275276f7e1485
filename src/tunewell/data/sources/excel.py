"""Rows of Excel and OpenDocument workbooks, read with `python-calamine`: every sheet, its first row as column names."""

# pyright: basic
# python-calamine is optional and may be missing when types are checked.

from collections.abc import Iterator
from datetime import date, datetime, time
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.optional import import_optional
from tunewell.data.sources.base import SourceFile, require_unique_columns


def excel_rows(file: SourceFile) -> Iterator[dict[str, str]]:
    """Yield the rows of all sheets; raise UserError for a damaged file or a sheet without column names."""
    calamine = import_optional("python_calamine", extra="excel", purpose=f"reading `{file.name}`")
    with file.open() as stream:
        try:
            workbook = calamine.CalamineWorkbook.from_filelike(stream)
            sheets = [(name, workbook.get_sheet_by_name(name).to_python()) for name in workbook.sheet_names]
        except calamine.CalamineError as error:
            raise UserError(
                f"`{file.name}` cannot be read: {error}", fix="open it in Excel, remove any password, and save it again"
            ) from error
    for name, cells in sheets:
        rows = [[_text(cell) for cell in row] for row in cells]
        filled = [row for row in rows if any(cell != "" for cell in row)]
        if filled:
            yield from _sheet_rows(filled, f"sheet `{name}` of `{file.name}`")


def _sheet_rows(rows: list[list[str]], where: str) -> Iterator[dict[str, str]]:
    names = [cell.strip() for cell in rows[0]]
    used = [index for index, column in enumerate(names) if column]
    if any(row[index] != "" for row in rows[1:] for index in range(len(names)) if not names[index]):
        raise UserError(
            f"{where} has a column without a name",
            where=f"the first row is {', '.join(name or '(empty)' for name in names)[:80]}",
            fix="if this row is a title, delete the rows above the header; else write a name above the column",
        )
    require_unique_columns(names, where)
    yield from ({names[index]: row[index] for index in used} for row in rows[1:])


def _text(cell: Any) -> str:
    """Return a cell as text, as in a CSV file: whole numbers without a fraction, dates in ISO form."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return cell.isoformat() if isinstance(cell, (datetime, date, time)) else str(cell)
