"""Read rows of a corpus again from their source files, for examples of dropped rows."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from tunewell.config.rules import Storage
from tunewell.config.schema import Data
from tunewell.core.errors import UserError
from tunewell.core.redact import hide_secrets
from tunewell.data.corpus.spec import HELD_OUT_FILE, read_options
from tunewell.data.rows.conversation import Rejected, map_leaves
from tunewell.data.rows.json_rows import text_of
from tunewell.data.sources.base import SourceFile, SourceOptions, find_files
from tunewell.data.sources.blocks import ReadOptions, read_blocks
from tunewell.records.manifest import Manifest

RowKey = tuple[str, int]
"""The name of a source file in the manifest, and the number of the row."""


class SourceRows:
    """The rows of the source files that have not changed since the corpus was built."""

    def __init__(self, manifest: Manifest, data: Data, bases: Sequence[Path]) -> None:
        """Search for the files at the paths of `data`, the current config, and at those of the manifest."""
        self._records = {record.name: record for record in manifest.sources}
        self._candidates = list(_find_candidates(manifest, data, bases))
        self._found: dict[str, tuple[SourceFile, ReadOptions] | None] = {}

    def read(self, wanted: Iterable[RowKey]) -> dict[RowKey, str]:
        """Return the wanted rows as text, without secrets; rows that cannot be read again are left out."""
        by_source: defaultdict[str, set[int]] = defaultdict(set)
        for name, row in wanted:
            by_source[name].add(row)
        texts: dict[RowKey, str] = {}
        for name, rows in by_source.items():
            found = self._find(name)
            with suppress(UserError, OSError):
                for block in read_blocks(*found) if found else ():
                    items = zip(block.numbers, block.items, strict=True)
                    texts |= {(name, row): _as_text(item) for row, item in items if row in rows}
                    rows.difference_update(block.numbers)
                    if not rows:
                        break
        return texts

    def problem(self, name: str) -> str:
        """Return why rows of a source cannot be read again."""
        if self._find(name):
            return f"`{name}` cannot be read again"
        is_there = any(file.name == name for file, _ in self._candidates)
        return f"`{name}` has changed since it was read" if is_there else f"`{name}` was not found"

    def _find(self, name: str) -> tuple[SourceFile, ReadOptions] | None:
        if name not in self._found:
            record = self._records[name]
            same = (
                (file, options)
                for file, options in self._candidates
                if file.source.size() == record.bytes and file.sha256() == record.sha256
            )
            self._found[name] = next(same, None)
        return self._found[name]


def _find_candidates(manifest: Manifest, data: Data, bases: Sequence[Path]) -> Iterator[tuple[SourceFile, ReadOptions]]:
    """Yield files that may be the sources. They are read with the settings of the corpus, not of the current config."""
    try:
        made_with = Data.model_validate(manifest.config["data"])
    except (KeyError, ValidationError):
        return
    same_sources = len(made_with.sources) == len(data.sources)
    for index in range(HELD_OUT_FILE, len(made_with.sources)):
        known = [made_with, data] if same_sources else [made_with]
        paths = [each.held_out_file if index == HELD_OUT_FILE else each.sources[index].path for each in known]
        for path in dict.fromkeys(path for path in paths if isinstance(path, str)):
            for base in dict.fromkeys(bases):
                try:
                    # Remote files are read from the cache only: examples are not worth a request.
                    source = made_with.sources[max(index, 0)]
                    options = SourceOptions(Storage(offline=True), source.config, source.split)
                    files = find_files(path, base=base, options=options)
                except (UserError, OSError):
                    continue
                yield from ((file, read_options(made_with, index)) for file in files)


def _as_text(item: Any) -> str:
    """Return a row as it is in the file, or as JSON, with `[kind]` instead of each secret."""
    found: Counter[str] = Counter()
    if isinstance(item, Rejected):
        return hide_secrets(f"(not readable: {item})", found)

    def hide(value: Any) -> Any:
        return hide_secrets(value, found) if isinstance(value, str) else value

    try:
        value = orjson.loads(item) if isinstance(item, bytes) else item
        text = json.dumps(map_leaves(value, hide, with_keys=True), ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        text = text_of(item) if isinstance(item, bytes) else repr(item)
    return hide(text)
