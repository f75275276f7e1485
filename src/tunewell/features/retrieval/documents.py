"""Find the documents of an index, and read them. Every file is indexed or skipped for a reason that is counted."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import open_file
from tunewell.core.registry import Entry, Registry
from tunewell.core.units import count
from tunewell.features.retrieval.readers.blocks import ParsedDocument, Unreadable

_READERS = "tunewell.features.retrieval.readers"
READERS = Registry(
    "document format",
    [
        Entry(".md", "Markdown", f"{_READERS}.markdown:read_markdown"),
        Entry(".markdown", "Markdown", f"{_READERS}.markdown:read_markdown"),
        Entry(".txt", "plain text", f"{_READERS}.markdown:read_text"),
        Entry(".html", "HTML", f"{_READERS}.html:read_html"),
        Entry(".htm", "HTML", f"{_READERS}.html:read_html"),
        Entry(".pdf", "PDF", f"{_READERS}.pdf:read_pdf"),
        Entry(".docx", "Word", f"{_READERS}.docx:read_docx"),
        Entry(".csv", "CSV", f"{_READERS}.rows:read_csv"),
        Entry(".tsv", "TSV", f"{_READERS}.rows:read_csv"),
        Entry(".jsonl", "JSON lines", f"{_READERS}.rows:read_json_lines"),
        Entry(".json", "JSON", f"{_READERS}.rows:read_json_lines"),
    ],
)
READABLE = "`.md .txt .html .pdf .docx .csv .jsonl`"
SKIP_REASONS = {
    "archive": "an archive; unpack it",
    "broken": "damaged, or not what its extension says",
    "empty": "an empty file",
    "encrypted": "encrypted; save it without a password",
    "hidden": "a hidden file or folder",
    "index": "an index of tunewell",
    "link": "a link that leaves the folder, leads nowhere or in a circle",
    "no_text": "no text; a scanned document needs OCR first",
    "questions": "the file of `--questions`, which is not a document",
    "not_text": "binary data, or an unknown encoding",
    "too_large": "larger than 256 MiB; split it",
    "unreadable": "no permission, or not a file",
    "unsupported": f"an unknown format; readable are {READABLE}",
}
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".rar")
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class FoundFile:
    """A file below the paths that the user named."""

    path: Path
    name: str
    """The name in sources and ledgers, with `/` on every system."""


@dataclass
class DocumentLedger:
    """Counts of indexed and skipped files: files = indexed + skipped."""

    num_files: int = 0
    num_indexed: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    examples: dict[str, str] = field(default_factory=dict[str, str])
    """One file for each reason."""
    notes: list[str] = field(default_factory=list[str])

    def skip(self, name: str, reason: str, detail: str = "") -> None:
        """Count a skipped file."""
        assert reason in SKIP_REASONS, reason
        self.skipped[reason] += 1
        self.examples.setdefault(reason, f"{name}: {detail}" if detail else name)


def find_documents(paths: Sequence[str], ledger: DocumentLedger, *, questions: str | None = None) -> list[FoundFile]:
    """Return the files of paths and folders in a stable order; count in the ledger what cannot be a document.

    The file of `questions` is left out: the search would find the questions themselves, with their answers.
    Raises UserError if a path does not exist or if there is no document at all.
    """
    found: dict[Path, FoundFile] = {}
    for given in paths:
        path = Path(given).expanduser()
        if not path.exists():
            raise UserError(f"there is no file or folder `{given}`", fix="check the path")
        files = [path] if not path.is_dir() else _files_in(path, ledger)
        for file in files:
            found.setdefault(file.resolve(), FoundFile(file, file.as_posix()))
    ledger.num_files = len(found) + sum(ledger.skipped.values())
    asked = None if questions is None else Path(questions).expanduser().resolve()
    kept: list[FoundFile] = []
    for resolved, file in sorted(found.items(), key=lambda item: item[1].name):
        suffix = file.path.suffix.lower()
        if resolved == asked:
            ledger.skip(file.name, "questions")
        elif suffix in READERS.names():
            kept.append(file)
        else:
            ledger.skip(file.name, "archive" if suffix in _ARCHIVES else "unsupported")
    if not kept:
        skipped = ", ".join(f"{count(number)} {reason}" for reason, number in ledger.skipped.items())
        raise UserError(
            "there are no documents in " + ", ".join(f"`{path}`" for path in paths),
            where=f"skipped: {skipped}" if skipped else "no files were found",
            fix=f"name files or folders with {READABLE} files",
        )
    return kept


def _files_in(folder: Path, ledger: DocumentLedger) -> Iterator[Path]:
    root = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for name in list(folders):
            path = Path(parent, name)
            is_hidden = name.startswith(".")
            # The passages of an index, complete or not, are copies of documents.
            if is_hidden or path.is_symlink() or any(path.glob("data-*/keys.bin")):
                folders.remove(name)
                ledger.skip(path.as_posix(), "hidden" if is_hidden else "link" if path.is_symlink() else "index")
        folders.sort()
        for name in sorted(files):
            path = Path(parent, name)
            if name.startswith("."):
                ledger.skip(path.as_posix(), "hidden")
            elif path.is_symlink() and not _stays_in(root, path):
                ledger.skip(path.as_posix(), "link")
            else:
                yield path


def _stays_in(root: Path, link: Path) -> bool:
    try:
        return link.resolve(strict=True).is_relative_to(root)
    except (OSError, RuntimeError):  # it leads nowhere, or in a circle
        return False


@dataclass(frozen=True)
class SourceDocument:
    """A document that was read."""

    name: str
    sha256: str
    title: str
    content: ParsedDocument


def read_bytes(file: FoundFile) -> tuple[bytes, str]:
    """Return the bytes of a file and their SHA-256. Raise Unreadable if they cannot be read."""
    try:
        if not file.path.is_file():
            raise Unreadable("unreadable")
        if file.path.stat().st_size > _MAX_BYTES:
            raise Unreadable("too_large")
        with open_file(file.path) as stream:
            data = stream.read()
    except OSError as error:
        raise Unreadable("unreadable", error.strerror or "") from None
    if not data.strip():
        raise Unreadable("empty")
    return data, hashlib.sha256(data).hexdigest()


def parse(file: FoundFile, data: bytes, sha256: str) -> SourceDocument:
    """Parse the bytes of a document by its extension. Raise Unreadable if there is no text in it."""
    content: ParsedDocument = READERS.load(file.path.suffix.lower())(data)
    if not any(block.kind != "heading" and block.text.strip() for block in content.blocks):
        raise Unreadable("no_text")
    title = content.title or file.path.stem.replace("-", " ").replace("_", " ")
    return SourceDocument(file.name, sha256, " ".join(title.split())[:200], content)
