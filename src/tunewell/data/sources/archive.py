"""A `.zip` file as a source: the row file inside an export of ChatGPT, Claude, Telegram or WhatsApp."""

import re
import zipfile
from dataclasses import replace

from tunewell.core.errors import UserError
from tunewell.data.sources.base import SourceFile, detect_format
from tunewell.data.sources.zip_member import DAMAGE

_CHATS = re.compile(r"(.*/)?(conversations\.json|result\.json|_chat\.txt|WhatsApp[^/]*\.txt)", re.DOTALL)
"""The file with the conversations in an export; everything else is pictures, accounts and settings."""
_NUM_NAMED = 6


def open_archive(file: SourceFile) -> SourceFile:
    """Return the row file inside a `.zip` file; raise UserError if there is none or more than one."""
    try:
        with file.open() as stored, zipfile.ZipFile(stored) as archive:
            names = [info.filename for info in archive.infolist() if not info.is_dir()]
    except DAMAGE as error:
        raise UserError(
            f"`{file.name}` is not a complete `.zip` file", fix="copy or download the file again"
        ) from error
    names = [name for name in names if not name.startswith("__MACOSX/")]
    chats = [name for name in names if _CHATS.fullmatch(name)]
    rows = chats or [name for name in names if detect_format(name)[0] not in (None, "zip")]
    if len(rows) != 1:
        shown = ", ".join(rows[:_NUM_NAMED] or names[:_NUM_NAMED])
        raise UserError(
            f"`{file.name}` contains {'several row files' if rows else 'no row file'}: {shown}",
            fix="unpack it, and name the files in `data.sources`",
        )
    file_format, compression = detect_format(rows[0])
    return replace(file, member=rows[0], format=str(file_format), compression=compression)
