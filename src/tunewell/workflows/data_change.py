"""Tell which rows of a corpus differ from those that a run began with."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.units import count
from tunewell.data.corpus.reader import Corpus
from tunewell.records.rundir import DOCUMENTS

_SHOWN = 3
_Key = tuple[str, int, int]


def remember(folder: Path, corpus: Corpus) -> None:
    """Write down a short hash of every document: source, row, piece, hash."""
    lines = ("\t".join(map(str, (*key, digest))) for key, digest in _digests(corpus))
    write_atomic(folder / DOCUMENTS, "\n".join(lines) + "\n")


def refuse_change(folder: Path, corpus: Corpus) -> None:
    """Raise UserError that says how many rows were added, are gone and were changed, and names some."""
    before, now = _read(folder), dict(_digests(corpus))
    added = [key for key in now if key not in before]
    gone = [key for key in before if key not in now]
    changed = [key for key, digest in now.items() if key in before and before[key] != digest]
    what = "the documents are not those the run began with"
    if before:
        what += f": {count(len(added))} added, {count(len(gone))} gone, {count(len(changed))} changed"
    named = [
        f"{kind} {_name(key)}"
        for kind, keys in (("new:", added), ("gone:", gone), ("changed:", changed))
        for key in keys
    ]
    raise UserError(
        what,
        where="; ".join(named[:_SHOWN]) or "their order or the settings they were made with",
        fix="put the rows back, begin a new run with `--out`, or go on with `--allow-change data`",
    )


def _digests(corpus: Corpus) -> Iterator[tuple[_Key, str]]:
    index, sources = corpus.index, [source.name for source in corpus.manifest.sources]
    seen: dict[tuple[str, int], int] = {}
    for document in range(len(corpus)):
        ids, labels = corpus.arrays(document)
        place = (sources[int(index["source"][document])], int(index["row"][document]))
        seen[place] = seen.get(place, -1) + 1
        yield (*place, seen[place]), hashlib.blake2b(ids.tobytes() + labels.tobytes(), digest_size=8).hexdigest()


def _read(folder: Path) -> dict[_Key, str]:
    try:
        lines = (folder / DOCUMENTS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = [line.rsplit("\t", 3) for line in lines]
    return {(name, int(row), int(piece)): digest for name, row, piece, digest in fields}


def _name(key: _Key) -> str:
    source, row, _ = key
    return f"{source} row {row}"
