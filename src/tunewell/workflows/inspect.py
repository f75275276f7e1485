"""`tunewell inspect`: show the documents of a corpus or of a row file, on the screen or as an HTML page."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Data
from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.plot import BarChart
from tunewell.core.progress import ProgressListener, silent
from tunewell.data.corpus.page import MAX_ROWS, CorpusPage
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.data.corpus.views import CorpusViews, DocumentView, PairView
from tunewell.records.manifest import MANIFEST, DroppedRow, Manifest, SecretRow
from tunewell.scoring.answer_keys import AnswerKey, ReferenceRow, answer_keys
from tunewell.workflows.prepare import temporary_corpus

_NUM_PAIRS = 3
_MAX_KEYS = 1000
"""Number of rows of each split from which answer keys are derived."""


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`: the manifest of the corpus, and examples of its documents and of other rows."""

    path: str
    is_corpus: bool
    manifest: Manifest
    lengths: BarChart
    documents: list[DocumentView]
    pairs: list[PairView]
    dropped: list[DroppedRow]
    """The first dropped row of each reason."""
    secrets: dict[str, SecretRow]
    """Kind of secret -> the first listed row with one."""
    keys: list[AnswerKey] = field(default_factory=list[AnswerKey])
    """The answer keys of the held-out rows, if these are shown."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that `inspect --json` prints."""
        manifest = self.manifest.model_dump(mode="json", exclude={"files", "splits", "config"})
        documents = [
            {
                "document": view.index,
                "source": view.source,
                "row": view.row,
                "tokens": [
                    {"id": token.id, "text": token.text, "learned": token.is_supervised} for token in view.tokens
                ],
            }
            for view in self.documents
        ]
        pairs = [view.pair.model_dump() for view in self.pairs]
        examples: dict[str, Any] = {
            "first_dropped": [row.model_dump() for row in self.dropped],
            "first_secrets": {kind: {"source": row.source, "row": row.row} for kind, row in self.secrets.items()},
        }
        if self.keys:
            examples["answer_keys"] = [
                {"key": key.text, "origin": key.origin, "because": key.because, "reference": key.reference}
                for key in self.keys
            ]
        named = {"path": self.path, "corpus": self.is_corpus}
        return {**named, **manifest, "shown": documents, "near_pairs": pairs, **examples}


class _Opened(NamedTuple):
    """A corpus, and its name on the screen."""

    corpus: Corpus
    name: str
    is_corpus: bool


def inspect(
    path: str | None,
    loaded: LoadedConfig,
    *,
    wanted: Sequence[int] = range(2),
    is_held_out: bool = False,
    is_joined: bool = False,
    progress: ProgressListener = silent,
) -> Inspection:
    """Return documents of a corpus or row file (default: from the config). Raise UserError if there is neither.

    If `is_joined`, tokens that share a character are shown as this character and not as bytes.
    """
    with _open(path, loaded, progress) as opened:
        views, num_documents = (
            CorpusViews(opened.corpus, is_joined=is_joined),
            _num_documents(opened.corpus, is_held_out),
        )
        if not isinstance(wanted, range):  # `--show N`: a corpus may have fewer rows
            _require_documents(wanted, num_documents)
        documents = [views.document(index, is_held_out=is_held_out) for index in wanted if index < num_documents]
        return Inspection(
            opened.name,
            opened.is_corpus,
            opened.corpus.manifest,
            views.length_chart(),
            documents,
            views.pairs(_NUM_PAIRS),
            [row for rows in views.dropped(1).values() for row in rows],
            dict(sorted({kind: row for row in reversed(opened.corpus.secret_rows()) for kind in row.kinds}.items())),
            _answer_keys(views) if is_held_out else [],
        )


def _answer_keys(views: CorpusViews) -> list[AnswerKey]:
    """Return the answer keys by which `validate` judges answers to the held-out rows."""
    accepted = {(row.source, row.row): row for row in views.corpus.answer_rows()}
    rows: list[ReferenceRow] = []
    for prompt, reply, document in views.replies(_MAX_KEYS, is_held_out=True):
        given = accepted.get((document.source, document.row))
        origin = "value" if given and given.column == "value" else "answers"
        rows.append(ReferenceRow(prompt, reply, tuple(given.answers) if given else (), origin))
    return answer_keys(rows, others=[reply for _, reply, _ in views.replies(_MAX_KEYS)])


def write_page(
    file: Path,
    path: str | None,
    loaded: LoadedConfig,
    *,
    wanted: Sequence[int] = (),
    num_rows: int | None = None,
    is_held_out: bool = False,
    progress: ProgressListener = silent,
) -> int:
    """Write an HTML page about a corpus or row file, with the wanted documents or a sample of at most 200.

    Return its size in bytes.
    """
    if file.suffix.lower() not in (".html", ".htm") or file.is_dir():
        raise UserError(f"`{file}` is not an `.html` file", fix="name a new file, like `--html corpus.html`")
    if not file.absolute().parent.is_dir():
        raise UserError(f"there is no folder `{file.parent}`", fix="create it, or choose another folder")
    with _open(path, loaded, progress) as opened:
        _require_documents(wanted, _num_documents(opened.corpus, is_held_out))
        name = Path(opened.name).name if Path(opened.name).is_absolute() else opened.name
        page = CorpusPage(CorpusViews(opened.corpus, is_joined=True), name=name, is_corpus=opened.is_corpus)
        text = page.render(
            wanted, num_rows=MAX_ROWS if num_rows is None else min(num_rows, MAX_ROWS), is_held_out=is_held_out
        )
    write_atomic(file, text, is_private=True)  # it shows rows
    return file.stat().st_size


@contextmanager
def _open(path: str | None, loaded: LoadedConfig, progress: ProgressListener) -> Iterator[_Opened]:
    """Yield the corpus of a path or of the config, or a temporary corpus of a row file."""
    target = loaded.base / path if path else loaded.path(loaded.config.corpus)
    data = loaded.config.data
    if (target / MANIFEST).is_file():
        yield _Opened(open_corpus(target, verify=True), str(path or loaded.config.corpus), True)
        return
    if path is None and not data.sources:
        raise UserError(
            f"there is no corpus `{loaded.config.corpus}` and no data is set",
            fix="name a corpus or a file: `tunewell inspect chats.jsonl --model MODEL`",
        )
    if path is not None:
        first = (data.sources[0].model_dump() if data.sources else {}) | {"path": path, "share": None}
        data = Data.model_validate(data.model_dump() | {"sources": [first]})
    name = path or ", ".join(source.path for source in data.sources)
    with temporary_corpus(loaded, {"data": data.model_dump()}, progress) as corpus:
        yield _Opened(corpus, name, False)


def _num_documents(corpus: Corpus, is_held_out: bool) -> int:
    return len(corpus.held_out if is_held_out else corpus)


def _require_documents(wanted: Sequence[int], num_documents: int) -> None:
    missing = next((index for index in wanted if index >= num_documents), None)
    if missing is not None:
        raise UserError(f"document {missing} does not exist; the last is {num_documents - 1}")
