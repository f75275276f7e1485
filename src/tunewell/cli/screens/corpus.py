"""The corpus table of `prepare` and `inspect`: rows, tokens, sequences, lengths, dropped rows."""

from pathlib import PurePath
from typing import TYPE_CHECKING

from tunewell.core.files import read_data
from tunewell.core.units import count, percent

if TYPE_CHECKING:
    from tunewell.records.manifest import Manifest


_NOTES: dict[str, str] = read_data(__file__, "texts.toml")["notes"]
"""Explanations of notes whose name is not clear by itself."""


def corpus_rows(manifest: "Manifest", *, folder: str | None, has_details: bool = False) -> list[list[str]]:
    """Return the rows of the table: label, number, remark. `folder` is the corpus on disk, or None."""
    tokens, packing, lengths = manifest.tokens, manifest.packing, manifest.lengths
    num_tokens = tokens.supervised + tokens.context
    formats = ", ".join(sorted({name for source in manifest.sources for name in source.formats}))
    templates = ", ".join(dict.fromkeys(record.name for record in manifest.templates)) or "none (plain text)"
    if formats == "text":
        templates = "not used for plain text"
    rows = [
        ["rows", count(manifest.rows_in), f"format: {formats}; chat template: {templates}"],
        ["for training", count(manifest.documents), ""],
        *([["for choosing", count(manifest.selected), manifest.selected_because]] if manifest.selected_because else []),
        ["for testing", count(manifest.held_out), manifest.too_few_to_judge or "held out: never trained on"],
        [
            "dropped",
            count(sum(manifest.dropped.values())),
            dropped_reasons(manifest.dropped) + _listed(folder, "dropped.jsonl", bool(manifest.dropped)),
        ],
        ["tokens", count(num_tokens), f"{percent(tokens.supervised / num_tokens)} of them are trained on"],
        [
            "sequences",
            count(packing.sequences),
            f"{packing.documents_per_sequence:.1f} rows in each, {percent(packing.efficiency, 2)} full",
        ],
        ["sequence length", count(packing.context_length), packing.because],
        [
            "row length",
            f"{lengths.mean:.0f}",
            f"tokens on average; median {lengths.median:.0f}, p95 {lengths.p95:.0f}, p99 {lengths.p99:.0f}, "
            f"longest {count(lengths.max)}",
        ],
    ]
    if has_details:
        unpacked = f"without packing, {percent(lengths.padding_waste)} of all positions would be padding"
        rows.append(["padding", count(tokens.padding), f"unused positions at the ends of sequences; {unpacked}"])
    if manifest.pieces:
        rows.append(["pieces", count(manifest.pieces), "added by splitting long rows"])
    if manifest.repeats:
        rows.append(["repeats", count(manifest.repeats), "extra uses of rows, so that each source gets its share"])
    rows += [["mix", "", line] for line in manifest.mix]
    if manifest.boundary_tokens:
        remark = "tokens that hold both template and reply text; not trained on"
        rows.append(["boundary", count(manifest.boundary_tokens), remark])
    rows += [["note", "", remark] for remark in manifest.remarks]
    rows += [["warning", "", message] for message in manifest.warnings]
    if number := manifest.notes.get("unknown_tokens"):
        rows.append(["warning", count(number), f"unknown tokens: {manifest.unknown_remark}"])
    rows += _near_rows(manifest, is_complete=has_details)
    if manifest.secrets and manifest.secrets.rows:
        kinds = ", ".join(f"{count(number)} {kind}" for kind, number in manifest.secrets.kinds.items())
        done = {"warn": "to replace them, set `data.clean.secrets: redact`", "redact": "replaced", "drop": "dropped"}
        remark = f"rows with {kinds}; {done[manifest.secrets.action]}"
        rows.append(["secrets", count(manifest.secrets.rows), remark + _listed(folder, "secrets.jsonl")])
    for note, number in manifest.notes.items():
        term = note.replace("_", " ")
        rows.append(["note", count(number), f"{_NOTES.get(note, term)}; see `tunewell glossary '{term}'`"])
    return rows


def _near_rows(manifest: "Manifest", *, is_complete: bool) -> list[list[str]]:
    """Return the rows on near duplicates; rows with the number 0 only if `is_complete`."""
    near = manifest.near_duplicates
    if near is None:
        return []
    similar = f"at least {percent(near.threshold, 0)} similar to"
    kinds = [
        ("near_held_out", near.near_held_out, near.num_near_held_out, "a test row"),
        ("near_duplicate", near.near_duplicate, near.num_near_duplicates, "an earlier training row"),
    ]
    return [
        [
            "near test rows" if kind == "near_held_out" else "near duplicates",
            count(number),
            f"training rows {similar} {what}" + (_near_advice(kind, action) if number else ""),
        ]
        for kind, action, number, what in kinds
        if number or (is_complete and number is not None)
    ]


def _near_advice(kind: str, action: str) -> str:
    if action == "drop":
        return "; dropped"
    effect = ", which makes scores too good" if kind == "near_held_out" else ""
    return f"{effect}; to drop them, set `data.clean.{kind}: drop`"


def _listed(folder: str | None, name: str, is_written: bool = True) -> str:
    return f"; listed in `{PurePath(folder) / name}`" if folder is not None and is_written else ""


def dropped_reasons(dropped: dict[str, int]) -> str:
    """Return the reasons for dropped rows with their counts, most frequent first."""
    if not dropped:
        return "every row is used"
    ordered = sorted(dropped.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{count(number)} {reason}" for reason, number in ordered)
