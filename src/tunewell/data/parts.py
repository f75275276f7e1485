"""What became of one block of rows: documents as tokens, and the reason for every row that is none.

Parts are kept in a cache under the hash of the rows and of everything that decided their tokens, so that a second
`prepare` tokenises only what is new, and one that was killed goes on where it stopped.
"""

import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tunewell.core.files import write_atomic
from tunewell.data.cleaning import DIGEST_BYTES

_ARRAYS = ("status", "whole", "question", "lengths", "boundary", "tokens", "learned")


@dataclass
class Part:
    """The outcome of a block, row by row.

    status   0 0 2 0 1        0: a document; n: dropped for `reasons[n - 1]`
    lengths  5 7   4          of the documents only, like the digests; tokens lie end to end
    """

    status: npt.NDArray[np.uint8]
    whole: npt.NDArray[np.uint8]
    question: npt.NDArray[np.uint8]
    lengths: npt.NDArray[np.int64]
    boundary: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.uint32]
    learned: npt.NDArray[np.bool_]
    reasons: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    """One for each dropped row, in order."""
    formats: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    """Counts worth showing that drop nothing: replies a template leaves out, rows that spell control tokens."""

    def __post_init__(self) -> None:
        num_documents = int((self.status == 0).sum())
        if not num_documents == len(self.lengths) == len(self.whole) or len(self.details) + num_documents != len(
            self.status
        ):
            raise ValueError("a part does not account for every row of its block")
        if int(self.lengths.sum()) != len(self.tokens):
            raise ValueError("a part's tokens do not add up to its documents")


def save_part(path: Path, part: Part) -> None:
    """Write a part whole or not at all."""
    meta = {"reasons": part.reasons, "details": part.details, "formats": part.formats, "notes": part.notes}
    arrays = {name: getattr(part, name) for name in _ARRAYS}
    arrays["learned"] = np.packbits(part.learned)
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode("utf-8", "surrogatepass"), dtype=np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(path, buffer.getvalue())


def load_part(path: Path) -> Part | None:
    """Read a part; None if there is none or if it is damaged, in which case it is made anew."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays: dict[str, Any] = {name: stored[name] for name in _ARRAYS}
            meta = json.loads(stored["meta"].tobytes().decode("utf-8", "surrogatepass"))
        arrays["learned"] = np.unpackbits(arrays["learned"], count=len(arrays["tokens"])).astype(bool)
        return Part(**arrays, **meta)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        path.unlink(missing_ok=True)
        return None


def digest_rows(digests: list[bytes]) -> npt.NDArray[np.uint8]:
    """Stack digests as rows of bytes."""
    return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
