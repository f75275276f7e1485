"""Shards of earlier pipelines as sources: a folder with a manifest of version 2.0 or 3.0, or packed rows anywhere.

2.0   rows of conversations or text in JSONL shards: read like any rows
3.0   packed rows with `input_ids`, `attention_mask` and `labels`: conversations joined by an end token, then padding

Packed rows are recognised by their columns, also in a single shard, in a folder below the manifest, without a manifest
and with another version. A packed row is divided into its conversations. Its mask is, in this order:

- its labels, if they leave out some tokens
- that of the same conversation as a row of text, if the template of the config renders the decoded text
- the replies after a marker like `<|im_start|>assistant`, if no template renders the text
- everything, with `format: text` on the source; otherwise text without roles is refused

The ids of the first documents are decoded and encoded again, and must be the same: otherwise the shards belong to
another tokenizer.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tunewell.core.arrays import Ints
from tunewell.core.errors import UserError
from tunewell.core.files import open_file, read_text, sha256_file
from tunewell.data.corpus.tokenized_block import NumberedBlock, RowPipeline, join_tokens, render_block
from tunewell.data.rows.conversation import Rejected, is_list, is_object
from tunewell.data.rows.formats import Converter
from tunewell.data.sources.base import TOKENIZED, SourceFile, SourceOptions, detect_format, is_url
from tunewell.data.sources.blocks import Block, ReadOptions, read_parsed
from tunewell.data.sources.local import LocalFile

_MANIFEST = "manifest.json"
_ROWS, _PACKED = "2.0", "3.0"
_IDS, _OTHER_COLUMNS = "input_ids", ("attention_mask", "labels")
_PACKED_FILES = ("jsonl", "parquet", "arrow")
_HELD_OUT = ("val", "valid", "validation", "eval", "test", "dev")
_BLOCK_DOCUMENTS = 1024
_NUM_COMPARED = 256
"""Documents whose ids are compared with those of the tokenizer."""
_MIN_SAME = 0.9
"""Share of compared documents that must have the same ids. A few may differ where a reply starts."""
_REPLY = re.compile(
    r"(?:<\|im_start\|>\s*assistant|<\|start_header_id\|>\s*assistant\s*<\|end_header_id\|>|<start_of_turn>\s*model"
    r"|<\|assistant\|>)\s*(.*?(?:<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|</s>|\Z))",
    re.DOTALL,
)
"""A reply and its end marker, after the marker that begins it."""
_LINE_ENDS = (
    (re.compile(r"(<\|im_start\|>|<start_of_turn>)\s*(\w+)\s+"), r"\1\2\n"),
    (re.compile(r"(<\|im_end\|>|<end_of_turn>)\s*"), r"\1\n"),
    (re.compile(r"(<\|end_header_id\|>)\s*"), r"\1\n\n"),
)
"""Where templates write line ends, which many SentencePiece normalisers turn into spaces."""
_END_TOKENS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")


@dataclass(frozen=True)
class PackedShard:
    """One shard of packed rows."""

    file: SourceFile
    end_id: int | None
    """The token between conversations, if the manifest names it."""
    is_assumed: bool = False
    """True if no manifest says that these are packed rows."""

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

    def blocks(self, pipeline: RowPipeline, limit: int | None) -> Iterator[NumberedBlock]:
        """Yield the conversations of the packed rows, in their order."""
        reader, number = _Unpacker(pipeline, self), 0
        rows = (row for _, row in read_parsed(self.file, ReadOptions(1 << 30, 64)))
        documents = islice(chain.from_iterable(map(reader.split, rows)), limit)
        while some := list(islice(documents, _BLOCK_DOCUMENTS)):
            number += len(some)
            yield reader.convert(some, number)


@dataclass
class _Packed:
    ids: Ints
    labels: Ints
    is_whole: bool
    """Whether every token is supervised in the shard."""


@dataclass
class _Unpacker:
    """Turns packed rows into documents."""

    pipeline: RowPipeline
    shard: PackedShard
    end_ids: tuple[int, ...] = ()
    num_compared: int = 0
    num_same: int = 0
    num_rows: int = 0
    is_rendered: bool | None = None
    """Whether the template of the config renders the first document."""

    def split(self, row: Any) -> Iterator[_Packed]:
        """Yield the conversations of a packed row, without padding and end tokens."""
        self.num_rows += 1
        if not is_object(row) or _IDS not in row:
            raise self._lies(f"row {self.num_rows} has no `{_IDS}`")
        try:
            ids = np.asarray(row[_IDS], dtype=np.int64)
            mask, labels = (
                np.asarray(default if row.get(name) is None else row[name], dtype=np.int64)
                for name, default in zip(_OTHER_COLUMNS, (np.ones_like(ids), ids), strict=True)
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
            if len(np.unique(ids[start:end])) > 1:  # a run of one id is padding that the attention mask includes
                yield _Packed(ids[start:end], labels[start:end], not (labels[start + 1 : end] == -100).any())

    def _end_ids(self, ids: Ints) -> tuple[int, ...]:
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
                fix="set `tokenizer` to the tokenizer of the shards; or write the id of the end token into their "
                '`manifest.json`, like `"eos_token_id": 2`; or use the rows from which they were made',
            )
        self.end_ids = (found[0],)
        return self.end_ids

    def convert(self, documents: Sequence[_Packed], number: int) -> NumberedBlock:
        """Return documents as a block; repair the masks of those in which every token is supervised."""
        texts = [self._decode(document.ids) for document in documents]
        numbers = list(range(number - len(documents) + 1, number + 1))
        if self.is_rendered is None:
            self.is_rendered = self._renders(texts[0])
        pipeline, note = self.pipeline, ""
        if not self.is_rendered:
            pipeline, note = replace(pipeline, converter=Converter(format_name="text")), self._mask(documents, texts)
        block = Block(numbers, [{"text": _with_line_ends(text)} for text in texts], digest="", num_bytes=0)
        rendered = render_block(block, pipeline)
        if self.is_rendered and rendered.formats.get("text", 0):
            pairs = zip(documents, texts, strict=True)
            if plain := [text for document, text in pairs if document.is_whole and not self._renders(text)]:
                raise self._no_roles(len(plain), plain)
        tokens = join_tokens(rendered, pipeline.encoder.encode(rendered.layouts))
        kept = [document for document, status in zip(documents, tokens.status, strict=True) if status == 0]
        num_whole = sum(document.is_whole for document in kept)
        is_own = [self.is_rendered and document.is_whole for document in kept]
        ids, supervised = (
            np.split(each, np.cumsum(tokens.lengths)[:-1]) for each in (tokens.tokens, tokens.supervised)
        )
        # Markers that were added to the tokenizer have ids that the shards do not have.
        if self.is_rendered and not pipeline.encoder.tokenizer.added_by_us:
            self._compare(ids, kept)
        for document, has_own, *own in zip(kept, is_own, ids, supervised, strict=False):
            if has_own:
                document.ids = own[0].astype(np.int64)
                document.labels = np.where(own[1], document.ids, -100)
        # The digests of the conversations stay.
        tokens.lengths = np.asarray([len(document.ids) for document in kept], dtype=np.int64)
        tokens.tokens = np.concatenate([*(document.ids for document in kept), np.zeros(0)]).astype(np.uint32)
        tokens.supervised = np.concatenate([*(document.labels for document in kept), np.zeros(0)]) != -100
        tokens.boundary = np.where(is_own, tokens.boundary, 0)
        notes = tokens.notes if any(is_own) else Counter({note: num_whole} if num_whole else {})
        if num_whole < len(kept):
            notes["masks_as_stored"] = len(kept) - num_whole
        notes["converted_from_shards"] = len(kept)
        if self.shard.is_assumed:
            notes["shards_without_manifest"] = len(kept)
        tokens.notes = notes
        return NumberedBlock(numbers, tokens)

    def _renders(self, text: str) -> bool:
        """Return True if the template of the config renders a text that a template has rendered."""
        if self.pipeline.masker is None or self.pipeline.converter.keeps_text:
            return False
        with suppress(UserError, Rejected):
            return self.pipeline.parser.parse(_with_line_ends(text), self.shard.name) is not None
        return False

    def _mask(self, documents: Sequence[_Packed], texts: Sequence[str]) -> str:
        """Mask the documents without a mask by their markers, or not at all with `format: text`; return the note."""
        backend = self.pipeline.encoder.tokenizer.backend
        self._compare((np.asarray(backend.encode(text, add_special_tokens=False).ids) for text in texts), documents)
        found = [document for document in documents if document.is_whole]
        if not found or self.pipeline.converter.keeps_text:
            return "trained_as_a_whole"
        num_plain = 0
        for document in found:
            ids = document.ids
            spans = [match.span(1) for match in _REPLY.finditer(self._decode(ids))]
            num_plain += not spans
            document.labels = np.full_like(ids, -100)
            for start, end in spans:
                first = bisect_right(range(len(ids)), start, key=lambda n: len(self._decode(ids[:n]))) - 1
                last = bisect_left(range(len(ids)), end, key=lambda n: len(self._decode(ids[:n])))
                document.labels[first:last] = ids[first:last]
        if num_plain:
            raise self._no_roles(num_plain, texts)
        return "masked_by_marker"

    def _no_roles(self, number: int, texts: Sequence[str]) -> UserError:
        return UserError(
            f"`{self.shard.name}`: the labels mask nothing, and {number} conversations have no role markers",
            where=f"the first text begins {texts[0][:60]!r}",
            fix="set `template` to the chat template of the shards; or set `format: text` on the source to train on "
            "every token; or use the rows from which they were made",
        )

    def _decode(self, ids: Ints) -> str:
        tokenizer = self.pipeline.encoder.tokenizer
        bos = tokenizer.special_tokens.get("bos_token")
        if bos and len(ids) and ids[0] == tokenizer.backend.token_to_id(bos):
            ids = ids[1:]
        return tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)

    def _compare(self, own: Iterable[npt.NDArray[Any]], documents: Sequence[_Packed]) -> None:
        """Raise UserError if the ids of the first documents differ from those of the tokenizer."""
        if self.num_compared >= _NUM_COMPARED:
            return
        for ids, document in zip(own, documents, strict=False):
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


def _with_line_ends(text: str) -> str:
    """Restore the line ends of a chat template in a text without any."""
    for pattern, line_end in _LINE_ENDS if "\n" not in text else ():
        text = pattern.sub(line_end, text)
    return text


def _same_ids(ids: npt.NDArray[Any], stored: Ints) -> bool:
    """Return True if the ids are equal, or the stored ones lack or add the white space at the end, or a BOS token."""
    short, long = sorted((ids.astype(np.int64), stored), key=len)
    is_same = (long[: len(short)] == short).all() or (long[-len(short) :] == short).all()
    return len(long) - len(short) <= 1 and bool(is_same)


def find_old_shards(path: str, base: Path) -> list[SourceFile] | None:
    """Return the training shards of a path: with an old manifest, checked against it, or packed rows; None for others.

    Shards of a validation split are left out, unless the path has no others.
    """
    if is_url(path):
        return None
    full = base / Path(path).expanduser()
    manifest = _manifest_of(full)
    version = str(manifest.get("format_version"))
    is_listed = version in (_ROWS, _PACKED) and (full / _MANIFEST).is_file()
    if "format" in manifest:  # a corpus of tunewell
        return None
    files = LocalFile.find(path, base=base, options=SourceOptions())
    shards = [file for file in files if not (full.is_dir() and _is_held_out(file.path.relative_to(full)))] or files
    found = [
        SourceFile(shard, shard.name, str(kind), by) for shard in shards for kind, by in [detect_format(shard.name)]
    ]
    if is_listed:
        _check_manifest(path, manifest, version, files)
    packed = [file for file in found if file.format in _PACKED_FILES and _has_ids(file)]
    for file in found if is_listed else ():
        if (file in packed) != (version == _PACKED):
            rows = "packed rows of ids" if file in packed else "rows of text"
            raise _wrong_manifest(file.name, f"it says {version}, but the shard has {rows}")
    if not packed:
        return found if is_listed else None
    packing = manifest.get("packing_metadata")
    end_id = manifest.get("eos_token_id", packing.get("eos_token_id") if is_object(packing) else None)
    own_id = end_id if isinstance(end_id, int) else None
    return [
        SourceFile(PackedShard(file, own_id, version != _PACKED), file.name, TOKENIZED) if file in packed else file
        for file in found
    ]


def _manifest_of(path: Path) -> dict[str, Any]:
    """Return the manifest of a folder, or of the folder or two around a shard, or an empty one."""
    for folder in (path, *path.parents[:2]):
        with suppress(OSError, ValueError):
            manifest = json.loads(read_text(folder / _MANIFEST))
            if is_object(manifest) and "format_version" in manifest:
                return manifest
    return {}


def _is_held_out(path: Path) -> bool:
    """Return True for shards of a validation split, by their folder or the start of their name."""
    return any(part.lower() in _HELD_OUT for part in path.parts[:-1]) or path.name.lower().startswith(_HELD_OUT)


def _has_ids(file: SourceFile) -> bool:
    """Return True if the first row of a file is a packed row."""
    row = next(read_parsed(file, ReadOptions(1 << 30, 64)), (0, None))[1]
    return is_object(row) and _IDS in row


def _check_manifest(path: str, manifest: dict[str, Any], version: str, files: Sequence[LocalFile]) -> None:
    """Compare the shards that the manifest lists with the files: presence, size, hash."""
    packing, listed = manifest.get("packing_metadata"), manifest.get("shards")
    if is_object(packing) and bool(packing.get("enabled")) != (version == _PACKED):
        raise _wrong_manifest(path, f"it says {version}, but `packing_metadata.enabled` says otherwise")
    shards = {file.path.name: file.path for file in files}
    for entry in listed if is_list(listed) else []:
        record = entry if is_object(entry) else {"file": entry}
        name = str(next((record[key] for key in ("file", "filename", "path", "name") if key in record), ""))
        shard = shards.get(Path(name).name)
        if shard is None:
            raise _wrong_manifest(path, f"it lists `{name}`, which is missing")
        if "sha256" in record and record["sha256"] != sha256_file(shard):
            raise _wrong_manifest(path, f"`{name}` has another hash than it lists")
        counts = ("num_examples", "num_sequences", "count", "rows")
        expected = next((record[key] for key in counts if key in record), None)
        if expected is not None and not shard.name.endswith((".gz", ".zst")):
            with open_file(shard) as stream:
                num_rows = sum(1 for line in stream if line.strip())
            if num_rows != expected:
                raise _wrong_manifest(path, f"`{name}` has {num_rows:,} rows, and it lists {expected:,}")


def _wrong_manifest(name: str, what: str) -> UserError:
    return UserError(
        f"the manifest of `{name}` is wrong: {what}", fix="make the shards again, or use the rows they were made from"
    )
