"""The base class of records, and a function that reads a record from its JSON file."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from tunewell.core.errors import UserError
from tunewell.core.files import parse_json, read_bytes


class Record(BaseModel):
    """The base class of records. Records are immutable; unknown keys, written by a later version, are ignored."""

    # The validator of a record is built when it is first used: a command imports many records and uses few.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class FileRecord(Record):
    """Expected size and hash of a file."""

    bytes: int
    sha256: str


class DamagedRecord(UserError):
    """Raised for a record that cannot be parsed."""


R = TypeVar("R", bound=Record)


def require_known_version(raw: dict[str, Any], kind: type[Record], name: str) -> None:
    """Raise UserError if a record was written by a newer version of this program."""
    if raw.get("format_version", 0) > kind.model_fields["format_version"].default:
        what = f"`{name}` was created by a newer version of tunewell"
        raise UserError(what, fix="pip install --upgrade tunewell")


def read_record(path: Path, kind: type[R], *, missing: str = "", fix: str | None = None) -> R:
    """Read a record with a `format_version`; raise UserError if it is damaged or has a newer version.

    With `missing`, that is the error if there is no file.
    """
    if missing and not path.is_file():
        raise UserError(missing, where=f"expected `{path}`", fix=fix)
    return parse_record(read_bytes(path), kind, str(path))


def parse_record(data: bytes | str, kind: type[R], name: str) -> R:
    """Parse a record with a `format_version`; raise UserError if it is damaged or has a newer version."""
    try:
        raw = parse_json(data)
        require_known_version(raw, kind, name)
        return kind.model_validate(raw)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedRecord(
            f"`{name}` is damaged",
            where=str(error).splitlines()[0],
            fix="restore it from a backup, or go on without its folder",
        ) from error
