"""Prepared corpora as sources: their documents are mixed again without tokenising them.

The result equals a corpus that was prepared from all rows at once, under these rules:

- Documents keep their order: corpus by corpus, in each by source file and row.
- Duplicates are dropped across corpora, and shares are reached as usual, by the digests that each corpus stores.
- A document that a corpus holds out stays held out. The others are divided by `data.held_out`, by their question.
- Copies that an earlier mix made count once. Pieces of long documents stay pieces.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tunewell.config.schema import SourceConfig
from tunewell.core.arrays import Bytes, Hashes
from tunewell.core.errors import UserError
from tunewell.core.files import read_bytes, sha256_text
from tunewell.data.corpus.reader import Corpus, Split, open_corpus
from tunewell.data.corpus.tokenized_block import NumberedBlock, RowPipeline, TokenizedBlock
from tunewell.data.masking.masker import Masker
from tunewell.data.rows.cleaning import DIGEST_BYTES
from tunewell.data.sources.base import TOKENIZED, SourceFile, is_url
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.records.manifest import FORMAT, MANIFEST

_BLOCK_DOCUMENTS = 4096
_PIECE = 0x9E3779B97F4A7C15
"""An odd number: multiplied by the start of a piece, it makes the digests of the pieces of a document distinct."""
_NOT_APPLIED = ("format", "columns", "map", "system", "labels", "learn_from", "learn_roles")


@dataclass(frozen=True)
class PreparedPart:
    """The documents of a prepared corpus that come from one of its source files."""

    corpus: Corpus
    number: int
    name: str

    def open(self) -> BinaryIO:
        raise UserError(f"`{self.name}` is part of a corpus, not a file of rows")

    def size(self) -> int:
        """Return the size of the rows from which the documents were made."""
        return self.corpus.manifest.sources[self.number].bytes

    def stamp(self) -> str:
        """Return the hash of the corpus."""
        return self.corpus.manifest.corpus_sha256

    def sha256(self) -> str:
        """Return a hash of the documents."""
        return sha256_text(self.corpus.manifest.corpus_sha256, str(self.number))

    def version(self) -> str:
        """Return the hash of the corpus."""
        return self.corpus.manifest.corpus_sha256

    def blocks(self, pipeline: RowPipeline, limit: int | None) -> Iterator[NumberedBlock]:
        """Yield the documents in the order of their rows."""
        places = islice(self._places(), limit)
        answers = {
            row.row: (row.column, row.answers)
            for row in self.corpus.answer_rows()
            if row.source == self.corpus.manifest.sources[self.number].name
        }
        while chosen := list(islice(places, _BLOCK_DOCUMENTS)):
            yield self._block(chosen, answers)

    def _places(self) -> Iterator[tuple[Split, int]]:
        """Yield the split and the index of every document, sorted by row; of copies only the first."""
        corpus = self.corpus
        splits = [split for split in (corpus, corpus.selection, corpus.held_out) if len(split)]
        own = [np.flatnonzero(split.index["source"] == self.number) for split in splits]
        row, piece = (
            np.concatenate([split.index[name][some] for split, some in zip(splits, own, strict=True)])
            for name in ("row", "piece_start")
        )
        of_split, index = np.repeat(np.arange(len(splits)), [len(some) for some in own]), np.concatenate(own)
        order = np.lexsort((index, piece, row))
        is_copy = (np.diff(row[order]) == 0) & (np.diff(piece[order]) == 0)
        for place in order[~np.append(False, is_copy)[: len(order)]].tolist():
            yield splits[int(of_split[place])], int(index[place])

    def _block(self, places: list[tuple[Split, int]], answers: dict[int, tuple[str, list[str]]]) -> NumberedBlock:
        arrays = [split.arrays(index) for split, index in places]
        rows = [int(split.index["row"][index]) for split, index in places]
        digests = np.stack([split.digests[index] for split, index in places]).astype(np.uint64)
        pieces = np.asarray([split.index["piece_start"][index] for split, index in places], dtype=np.uint64)
        digests[:, 0] ^= pieces * np.uint64(_PIECE)
        status = np.zeros(len(places), dtype=np.uint8)
        block = TokenizedBlock(
            status=status,
            whole=_as_bytes(digests[:, 0:2]),
            question=_as_bytes(digests[:, 2:4]),
            lengths=np.asarray([len(ids) for ids, _ in arrays], dtype=np.int64),
            boundary=digests[:, 4].astype(np.int64),
            tokens=np.concatenate([ids for ids, _ in arrays]).astype(np.uint32),
            supervised=np.concatenate([labels for _, labels in arrays]) != -100,
            formats=Counter(prepared=len(places)),
            answers=[(at, *answers[row]) for at, row in enumerate(rows) if row in answers],
        )
        held_out = np.asarray([split is self.corpus.held_out for split, _ in places], dtype=bool)
        return NumberedBlock(rows, block, held_out)


def _as_bytes(digests: Hashes) -> Bytes:
    return np.ascontiguousarray(digests, dtype="<u8").view(np.uint8).reshape(-1, DIGEST_BYTES)


def find_prepared(path: str, base: Path) -> list[SourceFile] | None:
    """Return the parts of a prepared corpus, or None if the path is not the folder of a corpus."""
    folder = None if is_url(path) else base / Path(path).expanduser()
    if folder is None or not (folder / MANIFEST).is_file() or FORMAT.encode() not in read_bytes(folder / MANIFEST):
        return None
    corpus = open_corpus(folder, verify=True)
    sources = corpus.manifest.sources
    own = Path(path).name if Path(path).is_absolute() else path
    names = [f"{own}: {source.name}" for source in sources] if len(sources) > 1 else [own]
    return [SourceFile(PreparedPart(corpus, number, name), name, TOKENIZED) for number, name in enumerate(names)]


def require_same_text(
    files: list[SourceFile], source: SourceConfig, tokenizer: LoadedTokenizer, masker: Masker | None
) -> None:
    """Raise UserError if a corpus has another tokenizer or chat template, or its source has settings for rows."""
    for part in (file.source for file in files if isinstance(file.source, PreparedPart)):
        manifest, name = part.corpus.manifest, source.path
        unused = [key for key in _NOT_APPLIED if getattr(source, key) != SourceConfig(path="x").__dict__[key]]
        if unused:
            raise UserError(
                f"`{unused[0]}` cannot apply to `{name}`, which is a prepared corpus",
                fix="remove the key, or name the rows instead of the corpus",
            )
        if manifest.tokenizer.sha256 != tokenizer.sha256:
            raise UserError(
                f"the corpus `{name}` was prepared with another tokenizer (`{manifest.tokenizer.source}`)",
                where=f"this config uses that of `{tokenizer.source}`; equal ids stand for other text",
                fix="prepare it again with the tokenizer of this model: name its rows instead of the corpus",
            )
        others = {record.name for record in manifest.templates if masker and record.sha256 != masker.template.sha256}
        if others:
            raise UserError(
                f"the corpus `{name}` was prepared with the chat template `{sorted(others)[0]}`",
                where=f"this config uses `{masker.template.name if masker else 'none'}`",
                fix="set `template` on this source, or prepare it again",
            )
