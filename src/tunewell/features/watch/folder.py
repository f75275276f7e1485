"""The folder that the page shows: paths below it, runs by their id, uploads and downloads. Nothing else is opened."""

import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tunewell.core.files import require_disk_space
from tunewell.core.units import size_bytes
from tunewell.data.sources.base import detect_format
from tunewell.features.watch.errors import WatchError

MAX_UPLOAD_BYTES = 4 << 30
MAX_UPLOAD_FILES = 10_000
UPLOADS = "uploads"
HIDDEN = ".tunewell"
"""The folder of jobs. Nothing in it is shown as a file."""
_DOCUMENTS = frozenset({".pdf", ".docx", ".html", ".htm", ".md", ".txt"})
_MAX_ENTRIES = 2000
_TICKET_SECONDS = 60


@dataclass(frozen=True)
class WatchedFolder:
    """The folder, and the tickets for downloads, each of which works once."""

    root: Path
    """The real path, without links."""
    tickets: dict[str, tuple[Path, float]] = field(default_factory=dict)

    def below(self, name: str) -> Path:
        """Return a path in the folder; raise WatchError if it is outside, also through a link."""
        try:
            path = (self.root / name).resolve()
            is_inside = "\0" not in name and path.is_relative_to(self.root)
        except (OSError, ValueError, RuntimeError):
            is_inside, path = False, self.root
        if not is_inside or HIDDEN in path.relative_to(self.root).parts:
            fix = "drop the file on the page, or start `tunewell watch` in its folder"
            raise WatchError("outside", f"`{name[:200]}` is not in the folder of this page", fix=fix)
        return path

    def name_of(self, path: Path) -> str:
        """Return the path of a file relative to the folder, with `/`; no command takes it for an option."""
        name = path.resolve().relative_to(self.root).as_posix()
        return f"./{name}" if name.startswith("-") else name

    def entries(self, name: str) -> dict[str, Any]:
        """Return the files and folders in a folder, with what they can be used for."""
        folder, found = self.below(name), list[dict[str, Any]]()
        if not folder.is_dir():
            raise WatchError("not_found", f"there is no folder `{name[:200]}`")
        for entry in sorted(os.scandir(folder), key=lambda own: (not own.is_dir(), own.name)):
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            suffix = Path(entry.name).suffix.lower()
            kind = "folder" if entry.is_dir() else "documents" if suffix in _DOCUMENTS else "other"
            kind = "rows" if kind == "other" and detect_format(entry.name)[0] else kind
            size = None if entry.is_dir() else entry.stat().st_size
            found.append({"name": entry.name, "path": self.name_of(Path(entry.path)), "kind": kind, "bytes": size})
        parent = None if folder == self.root else self.name_of(folder.parent)
        return {"parent": parent, "entries": found[:_MAX_ENTRIES], "is_cut": len(found) > _MAX_ENTRIES}

    async def upload(self, name: str, into: str | None, size: int, parts: AsyncIterator[bytes]) -> dict[str, Any]:
        """Write a file to `uploads` under a safe name, part by part. A file that is not complete is deleted."""
        safe = safe_name(name)
        if not (detect_format(safe)[0] or Path(safe).suffix.lower() in _DOCUMENTS):
            fix = "CSV, Excel, JSON, JSONL, Parquet, exported chats and texts are read; of a ZIP, its files"
            raise WatchError("refused", f"`{safe}` is of a type that cannot be read", fix=fix)
        if size > MAX_UPLOAD_BYTES:
            raise _too_large()
        folder = self._upload_folder(into)
        require_disk_space(folder, size)
        path, number = free_path(folder, safe), 0
        try:
            with path.open("xb") as file:
                async for part in parts:
                    number += len(part)
                    if number > MAX_UPLOAD_BYTES:
                        raise _too_large()
                    file.write(part)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        into = self.name_of(folder) if into else None
        return {"data": into or self.name_of(path), "into": into}

    def _upload_folder(self, into: str | None) -> Path:
        uploads = self.root / UPLOADS
        uploads.mkdir(mode=0o700, exist_ok=True)
        self.below(UPLOADS)
        if not into:
            return uploads
        if into == "new":
            folder = free_path(uploads, "folder")
            folder.mkdir(mode=0o700)
            return folder
        folder = self.below(into)
        if folder.parent != uploads or not folder.is_dir():
            raise WatchError("outside", f"`{into[:200]}` is not a folder of uploads")
        if sum(1 for _ in folder.iterdir()) >= MAX_UPLOAD_FILES:
            raise WatchError("too_large", f"a folder can have {MAX_UPLOAD_FILES:,} files", fix="name its path instead")
        return folder

    def ticket(self, name: str) -> dict[str, str]:
        """Return an address at which a file can be downloaded once, so that no token is in an address."""
        path = self.below(name)
        if not path.is_file():
            raise WatchError("not_found", f"there is no file `{name[:200]}`")
        now = time.monotonic()
        for ticket in [own for own, (_, until) in self.tickets.items() if until < now]:
            del self.tickets[ticket]
        ticket = secrets.token_urlsafe(24)
        self.tickets[ticket] = path, now + _TICKET_SECONDS
        return {"url": f"/download/{ticket}/{safe_name(path.name)}"}

    def redeem(self, ticket: str) -> Path:
        """Return the file of a ticket, which cannot be used again."""
        path, until = self.tickets.pop(ticket, (None, 0.0))
        if path is None or until < time.monotonic():
            raise WatchError("not_found", "this download has expired", fix="click on it again in the page")
        return self.below(str(path))


def safe_name(name: str) -> str:
    """Return a name for a file that every system accepts, with its ending."""
    name = PurePosixPath(name.replace("\\", "/")).name
    text = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII if os.name == "nt" else 0).strip(".-")
    stem, dot, ending = text.partition(".") if text.count(".") < 2 else text.rpartition(".")
    return f"{stem[:60].strip('.-') or 'rows'}{dot}{ending[:12]}"


def free_path(folder: Path, name: str) -> Path:
    """Return a path in a folder that does not exist yet: `rows.csv`, `rows-2.csv`."""
    stem, suffix = Path(name).stem, Path(name).suffix
    path, number = folder / name, 2
    while path.exists() or path.is_symlink():
        path, number = folder / f"{stem}-{number}{suffix}", number + 1
    return path


def _too_large() -> WatchError:
    what = f"the file is larger than {size_bytes(MAX_UPLOAD_BYTES)}"
    return WatchError("too_large", what, fix="copy it into the folder of this page, and name its path")
