"""Build a corpus: read rows in blocks, tokenise or load each block from the cache, assemble, pack and write."""

import shutil
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import disk_full_as_user_error, publish_folder
from tunewell.core.progress import Progress
from tunewell.data.corpus.assembly import Assembly
from tunewell.data.corpus.spec import BuildSpec, Job
from tunewell.data.corpus.tokenized_block import (
    RenderedBlock,
    RowPipeline,
    TokenizedBlock,
    cache_file_name,
    join_tokens,
    load_tokenized,
    render_block,
    save_tokenized,
)
from tunewell.data.corpus.writer import CorpusWriter, SpaceEstimate
from tunewell.data.sources.blocks import Block, read_blocks
from tunewell.records.manifest import Manifest

_BLOCKS_AHEAD = 2
_CHECKED_ROWS = 48


def build(spec: BuildSpec, *, out: Path, work_dir: Path) -> Manifest:
    """Build the corpus in `work_dir` from cached and new blocks, and move it to `out` once it is complete."""
    cache, staging = work_dir / "parts", work_dir / "staging"
    space = SpaceEstimate(sum(job.file.source.size() for job in spec.jobs))
    with disk_full_as_user_error(work_dir, space.bytes_for_retry):
        shutil.rmtree(staging, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        (staging / "corpus").mkdir(parents=True)
        try:
            with closing(Assembly(staging, spec.data)) as assembly:
                used = _assemble(assembly, spec, cache, space)
                documents = assembly.finish()
                space.is_read = True
                manifest = CorpusWriter(spec, assembly, documents, space).write()
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
        assembly.begin_source(job.file.name, job.sha256, job.file.source.size())
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
            name = cache_file_name(block, key)
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
