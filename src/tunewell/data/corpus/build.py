"""Build a corpus: read rows in blocks, tokenise new blocks, assemble, find near duplicates, pack and write."""

import hashlib
import json
import shutil
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np

from tunewell.config.schema import Clean
from tunewell.core.arrays import Ints, TokenIds
from tunewell.core.errors import UserError
from tunewell.core.files import disk_full_as_user_error, make_private, publish_folder
from tunewell.core.progress import Progress
from tunewell.data.corpus.assembly import Assembly, Documents, SpaceEstimate
from tunewell.data.corpus.held_out import read_questions
from tunewell.data.corpus.similarity import SHINGLE_TOKENS, NearDuplicateSearch, TokenLists
from tunewell.data.corpus.spec import BuildSpec, Job
from tunewell.data.corpus.tokenized_block import (
    NumberedBlock,
    RenderedBlock,
    RowPipeline,
    TokenizedBlock,
    TokenizedSource,
    join_tokens,
    load_tokenized,
    render_block,
    save_tokenized,
)
from tunewell.data.corpus.writer import CorpusWriter
from tunewell.data.sources.base import TOKENIZED
from tunewell.data.sources.blocks import Block, read_blocks
from tunewell.records.manifest import NEAR_DUPLICATES, Manifest, NearDuplicateRecord, NearPair

_BLOCKS_AHEAD = 2
_CHECKED_ROWS = 48
_MAX_LISTED = 1000
"""Pairs of each kind that are written to `near_duplicates.jsonl`."""
_NUM_SAMPLED = 64


def build(spec: BuildSpec, *, out: Path, work_dir: Path) -> Manifest:
    """Build the corpus in `work_dir` from cached and new blocks, and move it to `out` once it is complete."""
    cache, staging = work_dir / "parts", work_dir / "staging"
    space = SpaceEstimate(sum(job.file.source.size() for job in spec.jobs))
    with disk_full_as_user_error(work_dir, space.bytes_for_retry):
        shutil.rmtree(staging, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        make_private(staging / "corpus")
        try:
            with closing(Assembly(staging, spec.data, read_questions(out))) as assembly:
                used = _assemble(assembly, spec, cache, space)
                assembly.finish()
                space.is_read = True
                near = _check_near_duplicates(assembly, spec.data.clean)
                manifest = CorpusWriter(spec, assembly, space).write(near)
            publish_folder(staging / "corpus", out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    for path in cache.iterdir():
        if path.name not in used:
            path.unlink()
    return manifest


def _assemble(assembly: Assembly, spec: BuildSpec, cache: Path, space: SpaceEstimate) -> set[str]:
    """Add the tokenized blocks of all files in order; return the names of the cache files used."""
    used: set[str] = set()
    rows_of_source: Counter[int] = Counter()
    is_total_known = all(job.file.format == "jsonl" and not job.file.compression for job in spec.jobs)
    for job in spec.jobs:
        version, limit = job.file.version(), job.pipeline.read.limit
        if limit is not None:  # it covers all files of a source
            limit = max(0, limit - rows_of_source[job.source_index])
        sha256 = "" if version and limit == 0 else job.sha256  # not downloaded
        assembly.begin_source(job.file.name, sha256, job.file.source.size(), version=version)
        is_tokenized = job.file.format == TOKENIZED
        source = cast(TokenizedSource, job.file.source)
        blocks = source.blocks(job.pipeline, limit) if is_tokenized else _tokenized_blocks(job, cache, limit)
        for block in blocks:
            assembly.add(block.tokens, block.numbers, is_held_out=job.is_held_out, stays_held_out=block.is_held_out)
            used.add(block.cache_name)
            rows_of_source[job.source_index] += len(block.numbers)
            space.read_bytes += block.num_bytes
            space.tokens = assembly.num_tokens
            num_rows, total = rows_of_source.total(), space.source_bytes if is_total_known else 0
            progress = Progress("reading", space.read_bytes, total, "bytes", num_rows)
            spec.progress(Progress("reading", num_rows, 0, "documents") if is_tokenized else progress)
        if job.stamp and job.file.source.stamp() != job.stamp:
            raise UserError(
                f"`{job.file.name}` changed while it was read",
                fix="run the command again when no other process is writing to the file",
            )
    return used


def _tokenized_blocks(job: Job, cache: Path, limit: int | None) -> Iterator[NumberedBlock]:
    """Yield the tokenized blocks of a file; render each block here while a thread tokenises the previous one."""
    key = job.pipeline.cache_key()
    waiting: deque[tuple[Block, Future[TokenizedBlock], str]] = deque()
    is_checked = False
    pool = ThreadPoolExecutor(max_workers=1)

    def first_finished() -> NumberedBlock:
        block, future, name = waiting.popleft()
        return NumberedBlock(block.numbers, future.result(), None, block.num_bytes, name)

    try:
        for block in read_blocks(job.file, replace(job.pipeline.read, limit=limit)):
            name = hashlib.sha256(f"{block.digest}:{key}".encode()).hexdigest()[:40] + ".npz"
            future: Future[TokenizedBlock] = Future()
            if (cached := load_tokenized(cache / name)) is not None:
                future.set_result(cached)
            else:
                rendered = render_block(block, job.pipeline)
                if not is_checked:
                    job.pipeline.encoder.check_segmentation(rendered.layouts[:_CHECKED_ROWS])
                    is_checked = True
                future = pool.submit(_encode, rendered, job.pipeline, cache / name)
            waiting.append((block, future, name))
            if len(waiting) > _BLOCKS_AHEAD:
                yield first_finished()
        while waiting:
            yield first_finished()
    finally:
        pool.shutdown(cancel_futures=True)


def _encode(rendered: RenderedBlock, pipeline: RowPipeline, path: Path) -> TokenizedBlock:
    tokenized = join_tokens(rendered, pipeline.encoder.encode(rendered.layouts))
    save_tokenized(path, tokenized)
    return tokenized


def _check_near_duplicates(assembly: Assembly, clean: Clean) -> NearDuplicateRecord | None:
    """Search for near duplicates as configured, write the pairs to the corpus folder and return the counts."""
    if clean.near_held_out == clean.near_duplicate == "keep":
        return None
    documents = assembly.documents
    held_out = np.flatnonzero(documents.is_tested)
    order = np.concatenate([held_out, np.flatnonzero(documents.is_trained)])
    search = NearDuplicateSearch(
        _without_shared_prefix(documents, order), clean.near_duplicate_threshold, assembly.folder
    )
    record = NearDuplicateRecord(
        threshold=clean.near_duplicate_threshold,
        shingle_tokens=SHINGLE_TOKENS,
        near_held_out=clean.near_held_out,
        near_duplicate=clean.near_duplicate,
    )
    listed: list[NearPair] = []
    for kind, action, number in (
        ("near_held_out", clean.near_held_out, "num_near_held_out"),
        ("near_duplicate", clean.near_duplicate, "num_near_duplicates"),
    ):
        if action == "keep":
            continue
        if kind == "near_duplicate":
            search.exclude(np.arange(len(held_out)))
            search.exclude(np.flatnonzero(documents.is_dropped[order]))
        pairs = search.find(len(held_out) if kind == "near_held_out" else None)
        record = record.model_copy(update={number: len(pairs)})
        found = zip(order[pairs.document].tolist(), order[pairs.other].tolist(), pairs.similarity.tolist(), strict=True)
        for at, (index, other, similarity) in enumerate(found):
            (source, row), (similar_source, similar_row) = assembly.place(index), assembly.place(other)
            if at < _MAX_LISTED:
                listed.append(
                    NearPair(
                        kind=kind,
                        source=source,
                        row=row,
                        similar_source=similar_source,
                        similar_row=similar_row,
                        similarity=round(similarity, 4),
                    )
                )
            if action == "drop":
                assembly.drop_document(index, kind, f"{similarity:.0%} similar to {similar_source} row {similar_row}")
    if listed:
        lines = (json.dumps(pair.model_dump(), ensure_ascii=False) + "\n" for pair in listed)
        (assembly.folder / "corpus" / NEAR_DUPLICATES).write_text("".join(lines), encoding="utf-8")
    return record


def _without_shared_prefix(documents: Documents, order: Ints) -> TokenLists:
    """Return the documents without the tokens with which most of them begin, such as a system prompt.

    A long shared prompt would make all documents similar.
    """
    begins, lengths = documents.begins[order], documents.lengths[order]
    sample = order[:: max(len(order) // _NUM_SAMPLED, 1)]
    texts = [documents.tokens[documents.begins[i] :][: documents.lengths[i]] for i in sample.tolist()]
    shared = [_num_shared(first, second) for first, second in zip(texts, islice(texts, 1, None), strict=False)]
    size = int(np.median(shared)) if shared else 0
    if size:
        prefix = np.frombuffer(Counter(text[:size].tobytes() for text in texts).most_common(1)[0][0], dtype=np.uint32)
        longer = np.flatnonzero(lengths >= size)
        for position in range(size):  # few documents are left after the first tokens if they differ
            longer = longer[documents.tokens[begins[longer] + position] == prefix[position]]
        begins[longer] += size
        lengths[longer] -= size
    return TokenLists(documents.tokens, begins, lengths)


def _num_shared(first: TokenIds, second: TokenIds) -> int:
    """Return the number of equal tokens at the start of two documents."""
    size = min(len(first), len(second))
    differs = np.flatnonzero(first[:size] != second[:size])
    return int(differs[0]) if len(differs) else size
