"""`tunewell prepare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewell.cli.options import AsJson, ConfigFile, Sets

if TYPE_CHECKING:
    from tunewell.records.manifest import Manifest
    from tunewell.workflows.prepare import PrepareResult


def command(
    config: ConfigFile = None,
    set_: Sets = None,
    model: Annotated[str | None, typer.Option(help="Model whose tokenizer and template are used.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="File, folder or glob of rows; may be repeated.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the corpus to.")] = None,
    json: AsJson = False,
) -> None:
    """Turn rows into a corpus: cleaned, rendered, masked, tokenised, packed."""
    from tunewell.cli.progress import shown_progress
    from tunewell.cli.render import emit, emit_json
    from tunewell.config.load import load_config
    from tunewell.workflows.prepare import prepare

    loaded = load_config(config, set_ or (), model=model, data=data, out=out)
    with shown_progress() as progress:
        result = prepare(loaded, progress=progress)
    if json:
        emit_json(result.as_json())
    else:
        emit(screen(result))


def screen(result: "PrepareResult") -> str:
    """Say what was made, where every row and token went, and what to do next."""
    from tunewell.cli.render import table
    from tunewell.core.units import duration

    rows = [*corpus_rows(result.manifest)]
    made = f"`{result.corpus}` is up to date" if result.was_up_to_date else f"wrote `{result.corpus}`"
    return "\n".join(
        [
            table(rows),
            f"{made} in {duration(result.seconds)}",
            f"next: `tunewell inspect {result.corpus}`",
        ]
    )


def corpus_rows(manifest: "Manifest") -> list[list[str]]:
    """Tell a corpus in a few lines: what came in, what came out, how full, how much is learned."""
    from tunewell.core.units import count, percent

    tokens, packing, lengths = manifest.tokens, manifest.packing, manifest.lengths
    real = tokens.supervised + tokens.context
    formats = sorted({name for source in manifest.sources for name in source.formats})
    templates = ", ".join(dict.fromkeys(record.name for record in manifest.templates)) or "none (plain text)"
    rows = [
        ["rows", count(manifest.rows_in), f"{', '.join(formats)}; template: {templates}"],
        ["documents", count(manifest.documents), f"and {count(manifest.held_out)} held out"],
        ["dropped", count(sum(manifest.dropped.values())), dropped_words(manifest.dropped)],
        ["tokens", count(real), f"{percent(tokens.supervised / real)} of them learned"],
        [
            "sequences",
            count(packing.sequences),
            f"of {count(packing.context_length)} tokens, {percent(packing.efficiency, 2)} full, "
            f"{packing.documents_per_sequence:.1f} documents in each",
        ],
        ["", "", f"{count(packing.context_length)}: {packing.because}"],
        [
            "lengths",
            f"{lengths.mean:.0f}",
            f"on average; median {lengths.median:.0f}, p95 {lengths.p95:.0f}, p99 {lengths.p99:.0f}, "
            f"longest {count(lengths.max)}",
        ],
        [
            "padding",
            count(tokens.padding),
            f"empty slots at the ends of sequences; padding each document to {count(packing.context_length)} "
            f"would waste {percent(lengths.padding_waste)}",
        ],
    ]
    if manifest.pieces:
        rows.append(["pieces", count(manifest.pieces), "more than documents, from splitting long ones"])
    if manifest.repeats:
        rows.append(["repeats", count(manifest.repeats), "of documents, to give each source its share"])
    rows += [["mix", "", line] for line in manifest.mix]
    if manifest.boundary_tokens:
        rows.append(
            [
                "boundary",
                count(manifest.boundary_tokens),
                "tokens hold template and reply at once; they are not learned",
            ]
        )
    for note, number in manifest.notes.items():
        words = note.replace("_", " ")
        rows.append(["note", count(number), f"{words}; see `tunewell glossary '{words}'`"])
    return rows


def dropped_words(dropped: dict[str, int], where: str = "; see `dropped.jsonl`") -> str:
    """List reasons with their counts, most frequent first."""
    from tunewell.core.units import count

    if not dropped:
        return "every row is accounted for"
    ordered = sorted(dropped.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{count(number)} {reason}" for reason, number in ordered) + where
