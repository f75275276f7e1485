"""Build a corpus: parts from rows, documents from parts, packed sequences from documents, the manifest last."""

import shutil
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import publish_folder, told_when_full
from tunewell.core.progress import Progress
from tunewell.data.corpus.assembly import Assembly
from tunewell.data.corpus.finish import Finish
from tunewell.data.corpus.output import Space
from tunewell.data.corpus.parts import Laid, Part, Recipe, finish_block, lay_out_block, load_part, part_name, save_part
from tunewell.data.corpus.spec import BuildSpec, Job
from tunewell.data.sources.blocks import Block, read_blocks
from tunewell.records.manifest import Manifest

_BLOCKS_AHEAD = 2
_PROOF_ROWS = 48


def build(order: BuildSpec, *, out: Path, work: Path) -> Manifest:
    """Build the corpus in `work` and move it to `out` when it is whole; `out` stays as it was until then.

    Parts of an earlier run that were made from the same rows under the same settings are used again. Raises UserError
    when no document is left, when one is too long and the policy is to stop, or when the disk is full.
    """
    parts, staging = work / "parts", work / "staging"
    space = Space(sum(job.file.source.size() for job in order.jobs))
    with told_when_full(work, space.bytes_for_another_try):
        shutil.rmtree(staging, ignore_errors=True)
        parts.mkdir(parents=True, exist_ok=True)
        (staging / "corpus").mkdir(parents=True)
        try:
            manifest, used = _fill_and_finish(order, parts, staging, space)
            publish_folder(staging / "corpus", out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    for path in parts.iterdir():
        if path.name not in used:
            path.unlink()
    return manifest


def _fill_and_finish(order: BuildSpec, parts: Path, staging: Path, space: Space) -> tuple[Manifest, set[str]]:
    assembly = Assembly(
        staging,
        held_out_share=order.held_out_share,
        drop_duplicates=order.drop_duplicates,
        drop_answers_held_out=order.drop_answers_held_out,
    )
    with closing(assembly):
        used = _fill(assembly, order, parts, space)
        documents = assembly.finish()
        space.is_read = True
        return Finish(order, assembly, documents, space).run(), used


def _fill(assembly: Assembly, order: BuildSpec, parts: Path, space: Space) -> set[str]:
    """Make or find the part of every block, and hand them over in order."""
    used: set[str] = set()
    rows = 0
    taken: Counter[int] = Counter()
    is_known = all(job.file.format == "jsonl" and not job.file.compression for job in order.jobs)
    for job in order.jobs:
        assembly.begin_source(job.file.name, job.sha256, job.file.source.size())
        for block, part, name in _parts(job, parts, taken[job.source_index]):
            assembly.add(part, block.numbers, is_held_out=job.is_held_out)
            used.add(name)
            rows += len(block)
            taken[job.source_index] += len(block)
            space.read_bytes += block.num_bytes
            space.tokens = assembly.num_tokens
            total = space.source_bytes if is_known else 0
            order.progress(Progress("reading", space.read_bytes, total, "bytes", rows))
        if job.stamp and job.file.source.stamp() != job.stamp:
            raise UserError(
                f"`{job.file.name}` was changed while it was read", fix="run it again when nothing writes to the file"
            )
    return used


def _parts(job: Job, folder: Path, num_taken: int) -> Iterator[tuple[Block, Part, str]]:
    """Lay out rows here while the tokenizer works on the block before in its own threads.

    `num_taken` rows of the same source came before: a source's limit counts over all its files.
    """
    key, read = job.recipe.key(), job.recipe.read
    if read.limit is not None:
        read = replace(read, limit=max(0, read.limit - num_taken))
    waiting: deque[tuple[Block, Part | Future[Part], str]] = deque()
    is_proven = False
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            for block in read_blocks(job.file, read):
                name = part_name(block, key)
                part: Part | Future[Part] | None = load_part(folder / name)
                if part is None:
                    laid = lay_out_block(block, job.recipe)
                    if not is_proven:
                        job.recipe.encoder.check_against_whole(laid.layouts[:_PROOF_ROWS])
                        is_proven = True
                    part = pool.submit(_encode, laid, job.recipe, folder / name)
                waiting.append((block, part, name))
                while len(waiting) > _BLOCKS_AHEAD:
                    yield _resolved(waiting.popleft())
            while waiting:
                yield _resolved(waiting.popleft())
        finally:
            for _, left, _ in waiting:
                if isinstance(left, Future):
                    left.cancel()


def _resolved(entry: tuple[Block, Part | Future[Part], str]) -> tuple[Block, Part, str]:
    block, part, name = entry
    return block, part.result() if isinstance(part, Future) else part, name


def _encode(laid: Laid, recipe: Recipe, path: Path) -> Part:
    part = finish_block(laid, recipe.encoder.encode(laid.layouts))
    save_part(path, part)
    return part
