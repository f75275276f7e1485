"""Describe a finished corpus: its manifest and its data card (`README.md`)."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tunewell.config.glossary import entries
from tunewell.core.html import render
from tunewell.core.units import count, listed
from tunewell.data.corpus.assembly import Assembly, SourceLedger
from tunewell.data.corpus.packing import Mix, PackedSequences, Units, padding_waste
from tunewell.data.corpus.spec import BuildSpec, Job
from tunewell.data.corpus.tokenized_block import PIPELINE_VERSION
from tunewell.data.rows.column_names import LABELS, first_present, nearest_column
from tunewell.data.sources.archive import open_archive
from tunewell.data.sources.base import TOKENIZED
from tunewell.data.sources.lines import detect_encoding
from tunewell.records.manifest import (
    LengthRecord,
    Manifest,
    NearDuplicateRecord,
    PackingRecord,
    RowsRecord,
    SecretRecord,
    SplitRecord,
    TokenCounts,
)
from tunewell.records.plan import Chosen

_NUM_BARS = 12
_NUM_NAMED = 5
_NUM_COLUMNS = 12
_NUM_CHARACTERS = 20

WrittenSplit = tuple[Units, PackedSequences, SplitRecord]


def _rows(spec: BuildSpec, assembly: Assembly) -> RowsRecord:
    documents, tokens, supervised = assembly.sampled.tolist()
    task = spec.find_task([name for source in assembly.sources for name in source.formats], documents)
    means = {"mean_tokens": tokens / max(1, documents), "mean_supervised": supervised / max(1, documents)}
    return RowsRecord(num_rows=assembly.num_rows, task=task.value, because=task.because, **means)


def make_manifest(
    spec: BuildSpec,
    assembly: Assembly,
    *,
    splits: dict[str, WrittenSplit],
    context: Chosen[int],
    mix: Mix | None,
    near_duplicates: NearDuplicateRecord | None,
) -> Manifest:
    """Return the manifest without the other files; raise RuntimeError if a row or a token is not accounted for."""
    units, packing, train = splits["train"]
    sources, ledger = assembly.sources, Counter[str]()
    for source in sources:
        ledger.update(rows=source.rows, documents=source.documents, held_out=source.held_out, selected=source.selected)
    pieces = sum(written.num_pieces for written, _, _ in splits.values())
    in_splits = sum(record.documents for _, _, record in splits.values())
    in_ledger = ledger["documents"] + ledger["selected"] + ledger["held_out"]
    is_complete = in_ledger + pieces + units.num_repeats == in_splits
    if not is_complete or not all(source.is_balanced() for source in sources):
        raise RuntimeError("the ledger is not balanced: rows in and rows out differ")
    documents = assembly.documents
    boundary = np.where(documents.is_trained, documents.boundary, 0) * (mix.copies if mix else 1)
    return Manifest(
        made_by=spec.made_by,
        inputs_sha256=spec.inputs_sha256,
        corpus_sha256="",
        rows_read=ledger["rows"],
        rows_in=ledger["rows"],
        documents=ledger["documents"],
        held_out=ledger["held_out"],
        rows=_rows(spec, assembly),
        questions=assembly.num_questions,
        pieces=pieces,
        repeats=units.num_repeats,
        dropped=dict(sorted(assembly.dropped.items())),
        notes=dict(sorted(assembly.notes.items())),
        near_duplicates=near_duplicates,
        secrets=SecretRecord(
            action=spec.data.clean.secrets,
            rows=assembly.num_secret_rows,
            kinds=dict(sorted(assembly.secrets.items())),
        ),
        boundary_tokens=int(boundary.sum(dtype=np.int64)),
        unknown_characters=dict(assembly.unknown_characters.most_common(_NUM_CHARACTERS)),
        encoding_version=PIPELINE_VERSION,
        tokens=TokenCounts(
            total=packing.num_sequences * packing.context_length,
            supervised=train.supervised,
            context=packing.num_tokens - train.supervised,
            padding=packing.num_padding,
        ),
        packing=PackingRecord(
            context_length=context.value,
            because=context.because,
            sequences=packing.num_sequences,
            efficiency=packing.efficiency,
            documents_per_sequence=len(units) / packing.num_sequences,
        ),
        lengths=_lengths(documents.lengths[documents.is_trained], context.value),
        sources=[source.record() for source in sources],
        remarks=[
            *spec.remarks,
            *(
                f"`{job.file.name}`: read as cp1252 (Windows, Excel); save it as UTF-8 if letters look wrong"
                for job, source in zip(spec.jobs, sources, strict=True)
                if source.rows and _is_guessed_as_cp1252(job)
            ),
            *(remark for source in sources for remark in _drop_remarks(source)),
            *_text_remarks(spec, sources),
            *(remark for source in sources for remark in _column_remarks(source)),
        ],
        mix=[f"{spec.source_label(index)}: {because}" for index, because in mix.because.items()] if mix else [],
        tokenizer=spec.tokenizer,
        templates=spec.templates,
        warnings=spec.warnings,
        config=spec.config,
        splits={name: record for name, (_, _, record) in splits.items()},
        files={},
    )


def _is_guessed_as_cp1252(job: Job) -> bool:
    file = open_archive(job.file) if job.file.format == "zip" else job.file
    is_guessed = file.format != TOKENIZED and job.pipeline.read.encoding == "auto"
    return is_guessed and detect_encoding(file, "auto") == "cp1252"


_DROP_FIXES = {
    "bad_text": "save the file as UTF-8, or set its `encoding` on the source, like `encoding: cp1252`",
    "unparsable": "correct these rows",
    "not_a_conversation": "`tunewell glossary not_a_conversation` explains this reason",
}
_COLUMNS_FIX = "if these are questions and answers, set `columns: {question: YOURS, answer: YOURS}`"


def _drop_remarks(source: SourceLedger) -> Iterator[str]:
    """Yield a sentence about a reason that drops at least half of a source: the cause is the file, not its rows."""
    for reason, fix in _DROP_FIXES.items():
        number = source.dropped[reason]
        if number and 2 * number >= source.rows:
            row, detail = source.examples[reason]
            lost = f"{count(number)} of {count(source.rows, 'row')} dropped as `{reason}`"
            if reason == "unparsable" and _OTHER_NUMBER in detail:
                fix = _HEADER_FIX
            if "its columns:" in detail:  # it may end in the setting for this source
                fix = "" if "; set `" in detail else _COLUMNS_FIX
            yield "; ".join(filter(None, [f"`{source.name}`: {lost}", f"first: row {row}: {detail}", fix]))


_OTHER_NUMBER = " values for "
"""Part of the detail of a record that has more or fewer values than the table has columns."""
_HEADER_FIX = (
    "the first line must name the columns: delete the rows above the header; put quotes around values that contain the "
    "delimiter"
)


def suggest_rows(spec: BuildSpec) -> str:
    """Return what to do if no file has a row."""
    tables = [job.file.name for job in spec.jobs if job.file.format in ("csv", "tsv", "excel")]
    if len(tables) < len(spec.jobs):
        return "the files are empty or contain only blank lines"
    return f"there are no rows below the header of {', '.join(f'`{name}`' for name in tables[:_NUM_NAMED])}: add rows"


def suggest_fix(first: dict[str, str]) -> str:
    """Return how to make rows usable, from the first line of `dropped.jsonl`."""
    reason, detail = first.get("reason"), first.get("detail", "")
    if reason == "bad_text" and "UTF-8" in detail:
        return "the file is not UTF-8: save it as `CSV UTF-8` in Excel, or set `encoding: cp1252` on the source"
    if reason == "unparsable" and _OTHER_NUMBER in detail:
        return _HEADER_FIX
    if reason == "has_media":
        return "images, audio and video cannot be trained on: use rows of text, or remove the column with `map`"
    if reason == "not_a_conversation" and "its columns:" in detail:
        found = detail.rpartition("; set `")[2].removesuffix("`") if "; set `" in detail else None
        if first["source"].endswith((".csv", ".tsv")) and "," not in detail:
            return _HEADER_FIX  # a title above the header looks like a single column
        setting = found or "columns: {question: YOURS, answer: YOURS}"
        return f"describe the source in tunewell.yaml: `data: {{sources: [{{path: {first['source']}, {setting}}}]}}`"
    if reason is None:
        return "set a lower `data.held_out`, or add rows"
    remedy = "convert the rows with `map: rows.py:to_messages` on the source, or name other `columns`"
    return f"{remedy if reason == 'not_a_conversation' else 'correct the rows'}; see `tunewell glossary {reason}`"


_SPLITS = {"paragraph": "split into paragraphs at blank lines", "line": "split into lines", "file": "not split"}


def _text_remarks(spec: BuildSpec, sources: list[SourceLedger]) -> Iterator[str]:
    """Yield a sentence about how text files are split into rows."""
    for split, how in _SPLITS.items():
        texts = [
            source
            for job, source in zip(spec.jobs, sources, strict=True)
            if job.file.format in ("txt", "md") and job.pipeline.read.text_rows == split and "text" in source.formats
        ]
        if texts:
            shown = listed([f"`{source.name}` ({count(source.rows, 'row')})" for source in texts], noun="file")
            others = " or ".join(f"`text_rows: {other}`" for other in _SPLITS if other != split)
            yield f"text files are {how}: {shown}; to change this, set {others} on the source"


def _column_remarks(source: SourceLedger) -> Iterator[str]:
    """Yield a sentence about the columns of a source that are not used."""
    label = first_present(LABELS, source.unused) if source.formats["text"] else None
    if label is not None:
        yield (
            f"`{source.name}` looks like a classification set: `text` is trained on as plain text, and `{label}` "
            "is not used; to train the model to answer with the label, set `format: classification` on the source"
        )
    columns = [
        f"`{name}`" + (f" (did you mean `{known}`?)" if (known := nearest_column(name)) not in (None, name) else "")
        for name in sorted(source.unused)
        if name != label
    ]
    if columns:
        yield f"`{source.name}`: unused columns: {listed(columns, _NUM_COLUMNS)}"


def _lengths(lengths: npt.NDArray[np.integer], context_length: int) -> LengthRecord:
    shortest, longest = int(lengths.min()), int(lengths.max())
    # The width of a bar is 1, 2 or 5 times a power of ten.
    widths = (step * 10**power for power in range(12) for step in (1, 2, 5))
    width = next(each for each in widths if each >= (longest - shortest) / _NUM_BARS)
    edges: list[int] = list(range(shortest // width * width, (longest // width + 2) * width, width))
    counts, _ = np.histogram(lengths, bins=edges)
    bars = zip(edges[:-1], edges[1:], counts.tolist(), strict=True)
    return LengthRecord(
        mean=round(float(lengths.mean()), 2),
        median=float(np.median(lengths)),
        p95=round(float(np.percentile(lengths, 95)), 1),
        p99=round(float(np.percentile(lengths, 99)), 1),
        max=longest,
        padding_waste=padding_waste(lengths, context_length),
        histogram=[(a, b, number) for a, b, number in bars if number or a < longest],
    )


def data_card(manifest: Manifest) -> str:
    """Return the data card as Markdown; equal manifests give equal cards."""
    page = render("tunewell.data.corpus", "card.md", manifest=manifest, glossary=entries())
    return page.rstrip() + "\n"
