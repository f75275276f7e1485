"""`tunewell index`: make documents searchable."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tunewell.cli.options import Argument, AsJson, Option
from tunewell.cli.progress import shown_progress
from tunewell.cli.render import emit, folded_table, hanging, json_text, one_line
from tunewell.core.units import count, duration

if TYPE_CHECKING:
    from tunewell.features.retrieval.index_workflow import IndexResult


def command(
    documents: Annotated[list[str], Argument("Files and folders: md txt html pdf docx csv jsonl.", "DOCUMENTS")],
    out: Annotated[
        str,
        Option(
            "Folder of the index, or `postgresql://USER@HOST/DB#NAME`. "
            "An existing index is updated, and keeps only these documents.",
            "INDEX",
            flags=("--out", "--store"),
        ),
    ] = "index",
    questions: Annotated[
        str | None, Option("Training rows, on whose questions the search settings are chosen.", "FILE")
    ] = None,
    open_book: Annotated[
        Path | None, Option("Also write training rows in which the questions have passages.", "FOLDER")
    ] = None,
    embedder: Annotated[
        str, Option("`minilm`, a sentence-transformers folder, a hub name, or `URL#MODEL`.", "NAME")
    ] = "minilm",
    language: Annotated[
        str, Option("Language of the word search: `auto`, `english`, ..., or `none`.", "NAME")
    ] = "auto",
    json: AsJson = False,
) -> None:
    """Make documents searchable, so that a model can answer from them."""
    with shown_progress() as progress:
        from tunewell.features.retrieval.index_workflow import index

        result = index(
            documents,
            out,
            embedder=embedder,
            language=language,
            questions=questions,
            open_book=open_book,
            progress=progress,
        )
    emit(json_text(result.as_json()) if json else screen(result))


def screen(result: "IndexResult") -> str:
    """Return the screen: counts of files and passages, the settings with their reasons, the next command."""
    from tunewell.features.retrieval.documents import SKIP_REASONS

    manifest, built = result.built.manifest, result.built
    counts, settings = manifest.counts, manifest.settings
    skipped = sum(counts.skipped.values())
    files = f"{count(counts.indexed)} of {count(counts.files)} indexed"
    passages = f"{count(counts.passages)} in {result.address}"
    if counts.duplicates:
        passages += f", {count(counts.duplicates, 'duplicate')} left out"
    embedded = f"{count(counts.embedded)} embedded with {manifest.embedder.name}"
    if counts.embedded < counts.passages:
        embedded += f", {count(counts.passages - counts.embedded)} unchanged"
    rows = [["files", files], ["passages", passages], ["vectors", f"{embedded} in {duration(built.seconds)}"]]
    lines = [folded_table(rows)]
    for reason, number in sorted(counts.skipped.items(), key=lambda item: -item[1]):
        lines.append(
            hanging(f"skipped {count(number)}: ", f"{SKIP_REASONS[reason]} (`{one_line(counts.examples[reason])}`)")
        )
    assert counts.files == counts.indexed + skipped
    chosen = [
        ["language", manifest.language.value, manifest.language.because],
        ["weight of vectors", f"{settings.vector_weight.value:g}", settings.vector_weight.because],
        ["passages to read", count(settings.num_passages.value), settings.num_passages.because],
        ["refusal", "on" if settings.refusal.value else "off", settings.refusal.because],
    ]
    lines += ["", folded_table(chosen)]
    lines += [hanging("note: ", one_line(note)) for note in built.notes[:10]]
    if len(built.notes) > 10:
        lines.append(f"and {count(len(built.notes) - 10, 'more note')}: see `--json`")
    ask = f'`tunewell ask --index {result.address} "QUESTION"`'
    if (written := result.open_book) is not None and (folder := result.open_book_folder) is not None:
        held_out = f"{count(len(written.held_out))} about {count(len(written.held_out_documents), 'other document')}"
        lines.append(
            hanging("wrote ", f"`{folder}`: {count(len(written.train), 'row')} with passages for training, {held_out}")
        )
        ask += f"; `tunewell init {folder / 'train.jsonl'}` to train a model to read"
    lines += ["", hanging("next: ", ask)]
    return "\n".join(lines)
