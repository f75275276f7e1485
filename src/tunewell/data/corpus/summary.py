"""Sum a finished build up in its manifest."""

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tunewell.core.files import sha256_file, sha256_text
from tunewell.data.corpus.assembly import Assembly, SourceLedger
from tunewell.data.corpus.order import Order
from tunewell.data.corpus.units import Mix, Units
from tunewell.data.corpus.writer import SplitFacts
from tunewell.data.packing import ContextChoice, Packing, padding_waste
from tunewell.records.manifest import (
    FileRecord,
    LengthRecord,
    Manifest,
    PackingRecord,
    ShardRecord,
    SourceRecord,
    SplitRecord,
    TokenCounts,
)

_NUM_BARS = 12

Written = tuple[Units, Packing, SplitFacts]


def summarise(
    order: Order,
    assembly: Assembly,
    *,
    splits: dict[str, Written],
    lengths: npt.NDArray[np.integer],
    boundary_tokens: int,
    context: ContextChoice,
    mix: Mix | None,
    files: dict[str, FileRecord],
) -> Manifest:
    """Make the manifest; raise RuntimeError if a row or a token is not accounted for."""
    units, packing, train = splits["train"]
    sources = assembly.sources
    dropped = all_dropped(assembly)
    rows = sum(source.rows for source in sources)
    documents = sum(source.documents for source in sources)
    held_out = sum(source.held_out for source in sources)
    pieces = sum(written.num_pieces for written, _, _ in splits.values())
    in_splits = sum(facts.documents for _, _, facts in splits.values())
    if not all(source.closes() for source in sources) or documents + held_out + pieces + units.num_repeats != in_splits:
        raise RuntimeError("the ledger does not close")
    return Manifest(
        made_by=order.made_by,
        inputs_sha256=order.inputs_sha256,
        corpus_sha256=sha256_text(
            *(f"{name}:{files[name].sha256}" for name in sorted(files) if name.endswith(".arrow"))
        ),
        rows_read=rows,
        rows_in=rows,
        documents=documents,
        held_out=held_out,
        pieces=pieces,
        repeats=units.num_repeats,
        dropped=dict(sorted(dropped.items())),
        notes=dict(sorted(assembly.notes.items())),
        boundary_tokens=boundary_tokens,
        tokens=TokenCounts(
            total=packing.num_sequences * packing.context_length,
            supervised=train.supervised,
            context=packing.num_tokens - train.supervised,
            padding=packing.room_left,
        ),
        packing=PackingRecord(
            context_length=context.value,
            because=context.because,
            sequences=packing.num_sequences,
            efficiency=packing.efficiency,
            documents_per_sequence=len(units) / packing.num_sequences,
        ),
        lengths=_lengths(lengths, context.value),
        sources=[_source(source) for source in sources],
        mix=[f"{order.source_label(index)}: {because}" for index, because in mix.because.items()] if mix else [],
        tokenizer=order.tokenizer,
        templates=order.templates,
        config=order.config,
        splits={name: _split(facts) for name, (_, _, facts) in splits.items()},
        files=files,
    )


def all_dropped(assembly: Assembly) -> Counter[str]:
    """Count the dropped rows of all sources by reason."""
    return sum((source.dropped for source in assembly.sources), Counter())


def describe_file(path: Path, shard: ShardRecord | None = None) -> FileRecord:
    """Note a file's size and hash; those of a shard are known from writing it."""
    if shard is not None:
        return FileRecord(bytes=shard.bytes, sha256=shard.sha256)
    return FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))


def _source(ledger: SourceLedger) -> SourceRecord:
    return SourceRecord(
        name=ledger.name,
        sha256=ledger.sha256,
        bytes=ledger.num_bytes,
        rows=ledger.rows,
        documents=ledger.documents,
        held_out=ledger.held_out,
        dropped=dict(sorted(ledger.dropped.items())),
        formats=dict(sorted(ledger.formats.items())),
    )


def _split(facts: SplitFacts) -> SplitRecord:
    return SplitRecord(
        documents=facts.documents,
        sequences=facts.sequences,
        tokens=facts.tokens,
        supervised=facts.supervised,
        shards=facts.shards,
    )


def _lengths(lengths: npt.NDArray[np.integer], context_length: int) -> LengthRecord:
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = _round_width((longest - shortest) / _NUM_BARS)
    edges = np.arange(shortest // width * width, longest + width, width)
    if edges[-1] <= longest:
        edges = np.append(edges, edges[-1] + width)
    counts, _ = np.histogram(lengths, bins=edges)
    bars = zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True)
    return LengthRecord(
        mean=round(float(lengths.mean()), 2),
        median=float(np.median(lengths)),
        p95=round(float(np.percentile(lengths, 95)), 1),
        p99=round(float(np.percentile(lengths, 99)), 1),
        max=longest,
        padding_waste=padding_waste(lengths, context_length),
        histogram=[(a, b, number) for a, b, number in bars if number or a < longest],
    )


def _round_width(width: float) -> int:
    """Round the width of a histogram's bars up to one that people count in."""
    steps = (step * 10**power for power in range(12) for step in (1, 2, 5))
    return next(step for step in steps if step >= width)
