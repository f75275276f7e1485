"""Shards of earlier pipelines as sources: a folder with a manifest of version 2.0 or 3.0.

2.0   rows of conversations or text in JSONL shards: read like any rows
3.0   packed rows with `input_ids`, `attention_mask` and `labels`: conversations joined by an end token, then padding

A packed row is divided into its conversations. If its labels already leave out some tokens, ids and labels are used as
they are. If every token is supervised, the mask is repaired: the text is decoded, its roles are found, and it is masked
as a row of text would be. Text without roles is refused. The ids of the first documents are decoded and encoded again,
and must be the same: otherwise the shards belong to another tokenizer.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from tunewell.core.errors import UserError
from tunewell.core.files import open_file, read_text, sha256_file
from tunewell.data.corpus.prepared import PreparedBlock
from tunewell.data.corpus.tokenized_block import RowPipeline, TokenizedBlock, join_tokens, render_block
from tunewell.data.sources.base import TOKENIZED, SourceFile, SourceOptions, detect_format, is_url
from tunewell.data.sources.blocks import Block, ReadOptions, read_parsed
from tunewell.data.sources.local import LocalFile

_MANIFEST = "manifest.json"
_ROWS, _PACKED = "2.0", "3.0"
_COLUMNS = frozenset({"input_ids", "attention_mask", "labels"})
_HELD_OUT = ("val", "valid", "validation", "eval", "test", "dev")
_BLOCK_DOCUMENTS = 1024
_NUM_COMPARED = 256
"""Documents whose ids are compared with those of the tokenizer."""
_MIN_SAME = 0.9
"""Share of compared documents that must have the same ids. A few may differ where a reply starts."""
_END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")


@dataclass(frozen=True)
class PackedShard:
    """One shard of packed rows."""

    file: SourceFile
    end_id: int | None
    """The token between conversations, if the manifest names it."""

    @property
    def name(self) -> str:
        return self.file.name

    def open(self) -> BinaryIO:
        return self.file.open()

    def size(self) -> int:
        """Return the size in bytes."""
        return self.file.source.size()

    def stamp(self) -> str:
        """Return size and time of the shard."""
        return self.file.source.stamp()

    def blocks(self, pipeline: RowPipeline, limit: int | None = None) -> Iterator[PreparedBlock]:
        """Yield the conversations of the packed rows, in their order."""
        reader, number = _Unpacker(pipeline, self), 0
        waiting: list[_Packed] = []
        for _, row in read_parsed(self.file, ReadOptions(1 << 30, 64)):
            for document in reader.split(row):
                if limit is not None and number >= limit:
                    break
                number += 1
                waiting.append(document)
            if len(waiting) >= _BLOCK_DOCUMENTS:
                yield reader.convert(waiting, number)
                waiting = []
        if waiting:
            yield reader.convert(waiting, number)


@dataclass
class _Packed:
    ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]


@dataclass
class _Unpacker:
    """Turns packed rows into documents."""

    pipeline: RowPipeline
    shard: PackedShard
    end_ids: tuple[int, ...] = ()
    num_compared: int = 0
    num_same: int = 0
    num_rows: int = 0

    def split(self, row: Any) -> Iterator[_Packed]:
        """Yield the conversations of a packed row, without padding and end tokens."""
        self.num_rows += 1
        if not isinstance(row, dict) or not cast(dict[str, Any], row).keys() >= _COLUMNS:
            raise self._lies(f"row {self.num_rows} has no {', '.join(sorted(_COLUMNS))}")
        try:
            ids, mask, labels = (
                np.asarray(row[name], dtype=np.int64) for name in ("input_ids", "attention_mask", "labels")
            )
        except (ValueError, TypeError):
            raise self._lies(f"the ids of row {self.num_rows} are not numbers") from None
        if not len(ids) == len(mask) == len(labels):
            raise self._lies(f"the columns of row {self.num_rows} differ in length")
        is_used = mask.astype(bool)
        ids, labels = ids[is_used], labels[is_used]
        if len(ids) and (ids.min() < 0 or ids.max() >= self.pipeline.encoder.tokenizer.vocab_size):
            raise self._other_tokenizer(f"row {self.num_rows} has id {ids.max():,}")
        if ((labels != -100) & (labels != ids)).any():
            raise self._lies(f"row {self.num_rows} has labels that are neither its ids nor -100")
        ends = np.flatnonzero(np.isin(ids, self._end_ids(ids)))
        for start, end in zip([0, *(ends + 1)], [*ends, len(ids)], strict=True):
            if end > start:
                yield _Packed(ids[start:end], labels[start:end])

    def _end_ids(self, ids: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """Return the tokens between conversations: named in the manifest, or the end token if it does not end turns."""
        if self.end_ids:
            return self.end_ids
        tokenizer, masker = self.pipeline.encoder.tokenizer, self.pipeline.masker
        turn_end = masker.frame.end_marker.strip() if masker else ""
        names = [tokenizer.special_tokens.get("eos_token", ""), *_END_TOKENS]
        known = [tokenizer.backend.token_to_id(name) for name in names if name and name != turn_end]
        found = [number for number in known if number is not None and (ids == number).any()]
        if self.shard.end_id is not None:
            found = [self.shard.end_id]
        if not found:
            raise UserError(
                f"`{self.shard.name}`: the conversations in a packed row cannot be told apart",
                where=f"no end token ({', '.join(dict.fromkeys(names[:3]))}) stands between them",
                fix="use the rows from which the shards were made",
            )
        self.end_ids = (found[0],)
        return self.end_ids

    def convert(self, documents: Sequence[_Packed], number: int) -> PreparedBlock:
        """Return documents as a block; repair the masks of those in which every token is supervised."""
        is_masked = [bool((document.labels[1:] == -100).any()) for document in documents]
        texts = [self._decode(document.ids) for document in documents]
        numbers = list(range(number - len(documents) + 1, number + 1))
        block = Block(numbers, [{"text": text} for text in texts], digest="", num_bytes=0)
        rendered = render_block(block, self.pipeline)
        plain = rendered.formats.get("text", 0)
        if plain and not all(is_masked):
            raise UserError(
                f"`{self.shard.name}`: every token is supervised, and {plain} conversations have no roles",
                where=f"the first text begins {texts[0][:60]!r}",
                fix="set `template` to the chat template of the shards; or use the rows from which they were made",
            )
        tokens = join_tokens(rendered, self.pipeline.encoder.encode(rendered.layouts))
        self._compare(tokens, documents)
        tokens.notes["converted_from_shards"] = len(tokens.lengths)
        if all(is_masked) and not tokens.status.any():
            tokens = _as_stored(tokens, documents)
        return PreparedBlock(numbers, tokens, np.zeros(len(tokens.lengths), dtype=bool))

    def _decode(self, ids: npt.NDArray[np.int64]) -> str:
        tokenizer = self.pipeline.encoder.tokenizer
        bos = tokenizer.special_tokens.get("bos_token")
        if bos and len(ids) and ids[0] == tokenizer.backend.token_to_id(bos):
            ids = ids[1:]
        return tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)

    def _compare(self, tokens: TokenizedBlock, documents: Sequence[_Packed]) -> None:
        """Raise UserError if the ids of the first documents differ from those of the tokenizer."""
        if self.num_compared >= _NUM_COMPARED:
            return
        own = np.split(tokens.tokens, np.cumsum(tokens.lengths)[:-1])
        kept = [document for document, status in zip(documents, tokens.status, strict=True) if status == 0]
        for ids, document in zip(own, kept, strict=False):
            self.num_compared += 1
            self.num_same += _same_ids(ids, document.ids)
        if self.num_compared and self.num_same < _MIN_SAME * self.num_compared:
            raise self._other_tokenizer(f"{self.num_compared - self.num_same} of {self.num_compared} documents differ")

    def _other_tokenizer(self, where: str) -> UserError:
        source = self.pipeline.encoder.tokenizer.source
        return UserError(
            f"the ids in `{self.shard.name}` are not those of the tokenizer of `{source}`",
            where=where,
            fix="set `tokenizer` to the tokenizer of the shards, or use the rows from which they were made",
        )

    def _lies(self, what: str) -> UserError:
        return _wrong_manifest(self.shard.name, f"it says 3.0, but {what}")


def _same_ids(ids: npt.NDArray[Any], stored: npt.NDArray[np.int64]) -> bool:
    """Return True if the ids are equal, or the stored ones lack or add the white space at the end, or a BOS token."""
    short, long = sorted((ids.astype(np.int64), stored), key=len)
    is_same = (long[: len(short)] == short).all() or (long[-len(short) :] == short).all()
    return len(long) - len(short) <= 1 and bool(is_same)


def _as_stored(tokens: TokenizedBlock, documents: Sequence[_Packed]) -> TokenizedBlock:
    """Return a block with the ids and masks of the shard; the digests of the conversations stay."""
    ids = [document.ids for document in documents]
    tokens.lengths = np.asarray([len(own) for own in ids], dtype=np.int64)
    tokens.tokens = np.concatenate(ids).astype(np.uint32)
    tokens.supervised = np.concatenate([document.labels for document in documents]) != -100
    tokens.boundary = np.zeros(len(ids), dtype=np.int64)
    return tokens


def find_old_shards(path: str, base: Path) -> list[SourceFile] | None:
    """Return the training shards of a folder with an old manifest, checked against it; None for other folders."""
    folder = None if is_url(path) else base / Path(path).expanduser()
    if folder is None or not (folder / _MANIFEST).is_file():
        return None
    try:
        manifest = json.loads(read_text(folder / _MANIFEST))
        version = str(manifest["format_version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if version not in (_ROWS, _PACKED) or "format" in manifest:
        return None
    files = LocalFile.find(str(folder), base=base, options=SourceOptions())
    shards = [file for file in files if not _is_held_out(file.path.relative_to(folder))]
    _check_manifest(path, manifest, version, files)
    packing = cast(dict[str, Any], manifest.get("packing_metadata") or {})
    end_id = manifest.get("eos_token_id", packing.get("eos_token_id"))
    found: list[SourceFile] = []
    for shard in shards:
        kind, compression = detect_format(shard.name)
        file = SourceFile(shard, shard.name, str(kind), compression)
        _check_first_row(file, version)
        source = PackedShard(file, end_id if isinstance(end_id, int) else None)
        found.append(file if version == _ROWS else SourceFile(source, shard.name, TOKENIZED))
    return found


def _is_held_out(path: Path) -> bool:
    """Return True for shards of a validation split, by their folder or the start of their name."""
    return any(part.lower() in _HELD_OUT for part in path.parts[:-1]) or path.name.lower().startswith(_HELD_OUT)


def _check_first_row(file: SourceFile, version: str) -> None:
    _, row = next(read_parsed(file, ReadOptions(1 << 30, 64)), (0, None))
    is_packed = isinstance(row, dict) and "input_ids" in row
    if is_packed != (version == _PACKED):
        rows = "packed rows of ids" if is_packed else "rows of text"
        raise _wrong_manifest(file.name, f"it says {version}, but the shard has {rows}")


def _check_manifest(path: str, manifest: dict[str, Any], version: str, files: Sequence[LocalFile]) -> None:
    """Compare the shards that the manifest lists with the files: presence, size, hash."""
    packing = manifest.get("packing_metadata")
    if isinstance(packing, dict) and bool(cast(dict[str, Any], packing).get("enabled")) != (version == _PACKED):
        raise _wrong_manifest(path, f"it says {version}, but `packing_metadata.enabled` says otherwise")
    listed = manifest.get("shards")
    names = {file.path.name for file in files}
    for entry in cast(list[Any], listed) if isinstance(listed, list) else []:
        record = cast(dict[str, Any], entry) if isinstance(entry, dict) else {"file": entry}
        name = str(next((record[key] for key in ("file", "filename", "path", "name") if key in record), ""))
        if Path(name).name not in names:
            raise _wrong_manifest(path, f"it lists `{name}`, which is missing")
        shard = next(file.path for file in files if file.path.name == Path(name).name)
        expected = next(
            (record[key] for key in ("num_examples", "num_sequences", "count", "rows") if key in record), None
        )
        if "sha256" in record and record["sha256"] != sha256_file(shard):
            raise _wrong_manifest(path, f"`{name}` has another hash than it lists")
        if expected is not None and not shard.name.endswith((".gz", ".zst")):
            with open_file(shard) as stream:
                num_rows = sum(1 for line in stream if line.strip())
            if num_rows != expected:
                raise _wrong_manifest(path, f"`{name}` has {num_rows:,} rows, and it lists {expected:,}")


def _wrong_manifest(name: str, what: str) -> UserError:
    return UserError(
        f"the manifest of `{name}` is wrong: {what}", fix="make the shards again, or use the rows they were made from"
    )
