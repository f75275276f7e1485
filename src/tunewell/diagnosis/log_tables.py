"""Tables of numbers in a log: a header that names a step and a loss, then rows; also pasted as HTML or cell by cell."""

import re
from dataclasses import dataclass
from typing import Any

from tunewell.diagnosis.log_words import NAME, NUMBER, field_of, number_of

_NO_VALUE = {"", "-", "no log", "none", "n/a"}
_SPACED = re.compile(r"(?:train(?:ing)?|val(?:id(?:ation)?)?|eval|test) loss|learning rate|grad norm|no log|\S+", re.I)
BETWEEN_ROWS = re.compile(r"[\s|:+=.-]*")
_CELL = rf"[ \t]*(?:{NUMBER}|no log|-)[ \t]*"
_UPRIGHT = re.compile(rf"^((?:[ \t]*(?:{NAME})[ \t]*\n+){{2,12}})({_CELL}(?:\n+{_CELL})+)$", re.I | re.M)
_HTML = (
    (re.compile(r"\s{0,99}<t[dh][^>]{0,999}>\s{0,99}", re.I), "\t"),
    (re.compile(r"</?(?:tr|table)[^>]{0,999}>", re.I), "\n"),
    (re.compile(r"</?(?:t[dh]|thead|tbody)[^>]{0,999}>", re.I), ""),
)
_OBJECT = re.compile(r"\{[^{}]{1,2000}\}")


def laid_out(text: str) -> str:
    """Put on one line what belongs together: an object, or a row of a table that was pasted cell by cell."""
    text = _OBJECT.sub(lambda found: " ".join(found[0].split()), text)
    if "<td" in text.lower():
        for pattern, instead in _HTML:
            text = pattern.sub(instead, text)

    def lay_down(found: re.Match[str]) -> str:
        names, cells = ([line.strip() for line in part.splitlines() if line.strip()] for part in found.groups())
        rows = [names, *(cells[at : at + len(names)] for at in range(0, len(cells), len(names)))]
        return "\n".join("\t".join(row) for row in rows)

    return _UPRIGHT.sub(lay_down, text)


@dataclass
class Table:
    """A table whose header was read: what its columns are, and what parts them."""

    columns: list[str]
    mark: str
    shown: str | None = None

    @classmethod
    def headed_by(cls, line: str) -> "Table | None":
        """Take a line for a header where it names a step or an epoch and a loss, each as a whole cell."""
        if "loss" not in line.lower():
            return None
        mark = next((mark for mark in "|\t," if mark in line), " ")
        columns = [field_of(cell) for cell in _cells(line, mark)]
        if any(number_of(cell) is not None for cell in columns):
            return None
        is_header = {"step", "epoch"} & {*columns} and {"loss", "held_out_loss"} & {*columns}
        return cls(columns, mark) if is_header else None

    def row(self, line: str) -> dict[str, Any] | None:
        """Read a row; None where the line is none."""
        cells = _cells(line, self.mark)
        if self.mark == " ":
            cells = cells[len(cells) - len(self.columns) :] if len(cells) == len(self.columns) + 1 else cells
            if len(cells) != len(self.columns):
                return None
        if not 1 < len(cells) <= len(self.columns):
            return None
        found: dict[str, Any] = {}
        for name, cell in zip(self.columns, cells, strict=False):
            if cell.lower() not in _NO_VALUE:
                found.setdefault(name, cell)
        told = [found[name] for name in ("loss", "held_out_loss") if name in found]
        if any(number_of(cell) is None for cell in told) or not any(
            number_of(cell) is not None for cell in found.values()
        ):
            return None
        # Beside a held-out loss stands the last training loss that was logged, for as many rows as it takes.
        if "held_out_loss" in found and found.get("loss") == self.shown:
            found.pop("loss", None)
        self.shown = found.get("loss", self.shown)
        return found


def _cells(line: str, mark: str) -> list[str]:
    if mark == " ":
        return _SPACED.findall(line)
    return [cell.strip() for cell in (line.strip().strip("|") if mark == "|" else line.strip()).split(mark)]
