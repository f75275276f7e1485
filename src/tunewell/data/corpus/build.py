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

import numpy as np

from tunewell.config.schema import Clean
from tunewell.core.arrays import Ints, TokenIds
from tunewell.core.errors import UserError
from tunewell.core.files import disk_full_as_user_error, make_private, publish_folder
from tunewell.core.progress import Progress
from tunewell.data.corpus.assembly import Assembly, Documents, SpaceEstimate
from tunewell.data.corpus.held_out import read_questions
from tunewell.data.corpus.similarity import SHINGLE_TOKENS, NearDuplicateSearch, NearPairs, TokenLists
from tunewell.data.corpus.spec import BuildSpec, Job
from tunewell.data.corpus.tokenized_block import (
    RenderedBlock,
    RowPipeline,
    TokenizedBlock,
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
                documents = assembly.finish()
                space.is_read = True
                near = _check_near_duplicates(assembly, documents, spec.data.clean)
                manifest = CorpusWriter(spec, assembly, documents, space).write(near)
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
    num_rows = 0
    rows_of_source: Counter[int] = Counter()
    is_total_known = all(job.file.format == "jsonl" and not job.file.compression for job in spec.jobs)
    for job in spec.jobs:
        version, limit = job.file.version(), job.pipeline.read.limit
        is_skipped = bool(version) and limit is not None and rows_of_source[job.source_index] >= limit
        sha256 = "" if is_skipped else job.sha256  # not downloaded
        assembly.begin_source(job.file.name, sha256, job.file.source.size(), version=version)
        if job.file.format == TOKENIZED:
            num_rows += _add_tokenized(assembly, job, spec, rows_of_source, num_rows)
            space.tokens = assembly.num_tokens
            continue
        for block, tokenized, name in _tokenized_blocks(job, cache, rows_of_source[job.source_index]):
            assembly.add(tokenized, block.numbers, is_held_out=job.is_held_out)
            used.add(name)
            num_rows += len(block)
            rows_of_source[job.source_index] += len(block)
            space.read_bytes += block.num_bytes
            space.tokens = assembly.num_tokens
            total = space.source_bytes if is_total_known else 0
            spec.progress(Progress("reading", space.read_bytes, total, "bytes", num_rows))
        if job.stamp and job.file.source.stamp() != job.stamp:
            raise UserError(
                f"`{job.file.name}` changed while it was read",
                fix="run the command again when no other process is writing to the file",
            )
    return used


def _add_tokenized(
    assembly: Assembly, job: Job, spec: BuildSpec, rows_of_source: Counter[int], rows_before: int
) -> int:
    """Add the documents of a prepared corpus or of packed shards; return their number."""
    from tunewell.data.corpus.old_shards import PackedShard  # not needed for rows
    from tunewell.data.corpus.prepared import PreparedPart

    part, limit, total = job.file.source, job.pipeline.read.limit, 0
    assert isinstance(part, PackedShard | PreparedPart)
    if limit is not None:
        limit = max(0, limit - rows_of_source[job.source_index])
    for block in part.blocks(job.pipeline, limit) if isinstance(part, PackedShard) else part.blocks(limit):
        assembly.add(block.tokens, block.numbers, is_held_out=job.is_held_out, stays_held_out=block.is_held_out)
        total += len(block.numbers)
        spec.progress(Progress("reading", rows_before + total, 0, "documents"))
    rows_of_source[job.source_index] += total
    return total


def _tokenized_blocks(job: Job, cache: Path, rows_before: int) -> Iterator[tuple[Block, TokenizedBlock, str]]:
    """Yield the tokenized blocks of a file; render each block here while a thread tokenises the previous one.

    `rows_before` is the number of rows in earlier files of the same source, because its limit covers all its files.
    """
    key, read = job.pipeline.cache_key(), job.pipeline.read
    if read.limit is not None:
        read = replace(read, limit=max(0, read.limit - rows_before))
    waiting: deque[tuple[Block, Future[TokenizedBlock], str]] = deque()
    is_checked = False
    pool = ThreadPoolExecutor(max_workers=1)
    try:
        for block in read_blocks(job.file, read):
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
                yield _first_finished(waiting)
        while waiting:
            yield _first_finished(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _first_finished(
    waiting: deque[tuple[Block, Future[TokenizedBlock], str]],
) -> tuple[Block, TokenizedBlock, str]:
    block, future, name = waiting.popleft()
    return block, future.result(), name


def _encode(rendered: RenderedBlock, pipeline: RowPipeline, path: Path) -> TokenizedBlock:
    tokenized = join_tokens(rendered, pipeline.encoder.encode(rendered.layouts))
    save_tokenized(path, tokenized)
    return tokenized


def _check_near_duplicates(assembly: Assembly, documents: Documents, clean: Clean) -> NearDuplicateRecord | None:
    """Search for near duplicates as configured, write the pairs to the corpus folder and return the counts."""
    if clean.near_held_out == clean.near_duplicate == "keep":
        return None
    used = ~documents.is_dropped
    held_out = np.flatnonzero(used & documents.is_held_out)
    order = np.concatenate([held_out, np.flatnonzero(used & ~documents.is_held_out)])
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
    if clean.near_held_out != "keep":
        pairs = search.find(len(held_out)) if len(held_out) else NearPairs.none()
        record = record.model_copy(update={"num_near_held_out": len(pairs)})
        listed += _report("near_held_out", clean.near_held_out, pairs.of(order), assembly, documents)
    if clean.near_duplicate != "keep":
        search.exclude(np.arange(len(held_out)))
        search.exclude(np.flatnonzero(documents.is_dropped[order]))
        pairs = search.find()
        record = record.model_copy(update={"num_near_duplicates": len(pairs)})
        listed += _report("near_duplicate", clean.near_duplicate, pairs.of(order), assembly, documents)
    if listed:
        lines = (json.dumps(pair.model_dump(), ensure_ascii=False) + "\n" for pair in listed)
        (assembly.folder / "corpus" / NEAR_DUPLICATES).write_text("".join(lines), encoding="utf-8")
    return record


def _report(reason: str, action: str, pairs: NearPairs, assembly: Assembly, documents: Documents) -> list[NearPair]:
    """Drop the later document of each pair if configured; return the pairs to list."""

    def name(index: int) -> tuple[str, int]:
        return assembly.sources[int(documents.source[index])].name, int(documents.row[index])

    listed: list[NearPair] = []
    for index, other, similarity in zip(
        pairs.document.tolist(), pairs.other.tolist(), pairs.similarity.tolist(), strict=True
    ):
        (source, row), (similar_source, similar_row) = name(index), name(other)
        if len(listed) < _MAX_LISTED:
            listed.append(
                NearPair(
                    kind=reason,
                    source=source,
                    row=row,
                    similar_source=similar_source,
                    similar_row=similar_row,
                    similarity=round(similarity, 4),
                )
            )
        elif action != "drop":
            break
        if action == "drop":
            detail = f"{similarity:.0%} similar to {similar_source} row {similar_row}"
            assembly.drop_document(documents, index, reason, detail)
    return listed


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
