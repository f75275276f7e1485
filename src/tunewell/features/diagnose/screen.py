"""The screen of `diagnose`: the first finding with its evidence, cause and fix, then the others in a line each."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from tunewell.cli.render import cell_width, fitting, folded_table, hanging, one_line, table, width
from tunewell.core.units import count

if TYPE_CHECKING:
    from tunewell.features.diagnose.findings import DiagnosedFailure, Diagnosis

_MIN_TEXT = 20
_MAX_NOTES = 4


def diagnosis_screen(diagnosis: "Diagnosis", *, commands: Collection[str], is_full: bool = False) -> str:
    """Return the screen of a diagnosis. `commands` are the commands that exist, of those that a finding names."""
    parts = [_headline(diagnosis)]
    shown = diagnosis.findings if is_full else diagnosis.findings[:1]
    parts += [_finding(finding, commands, has_files=len(diagnosis.sources) > 1) for finding in shown]
    rest = diagnosis.findings[len(shown) :]
    if rest:
        rows = [[finding.id, f"{finding.confidence:.2f}", _reason(finding)] for finding in rest]
        hint = hanging("next: ", "`tunewell diagnose --all ...` shows them in full")
        parts.append(f"also found\n{folded_table(rows)}\n{hint}")
    notes = list(dict.fromkeys(diagnosis.notes))
    if notes:
        parts.append("\n".join(hanging("note: ", note) for note in notes[:_MAX_NOTES]))
    return "\n\n".join(parts)


def _headline(diagnosis: "Diagnosis") -> str:
    read = f"{count(diagnosis.num_lines)} {'line' if diagnosis.num_lines == 1 else 'lines'}"
    if diagnosis.num_judged < diagnosis.num_steps:
        about = int(float(f"{diagnosis.num_steps:.2g}"))
        read += f", about {count(about)} logged steps, {count(diagnosis.num_judged)} of them judged"
    elif diagnosis.num_steps:
        read += f", {count(diagnosis.num_steps, 'logged step')}"
    if len(diagnosis.sources) > 1:
        read += f", {count(len(diagnosis.sources))} files"
    read += f", written by {diagnosis.tool}" if diagnosis.tool else ""
    if diagnosis.status == "healthy":
        return hanging("HEALTHY  ", f"nothing in it points to a failure ({read})")
    word = {"unknown": "UNKNOWN  ", "warning": "WARNING  "}.get(diagnosis.status, "FAILURE  ")
    return hanging(word, f"{diagnosis.findings[0].title} ({read})")


def _finding(finding: "DiagnosedFailure", commands: Collection[str], *, has_files: bool) -> str:
    certainty = f"{finding.certainty} ({finding.confidence:.2f})"
    family = "" if finding.family == finding.id else f"{finding.family}, "
    rows = [["id", f"{finding.id}, {family}{certainty}"], ["why", finding.cause], ["fix", finding.fix]]
    if finding.next:
        rows.append(["next", finding.next])
    caught = [f"`tunewell {name}`" for name in finding.caught_by if name in commands]
    if caught:
        rows.append(["caught by", ", ".join(caught)])
    if finding.because_of:
        rows.append(["because of", finding.because_of])
    return "\n".join([*_evidence(finding, has_files=has_files), folded_table(rows)])


def _evidence(finding: "DiagnosedFailure", *, has_files: bool) -> list[str]:
    if not finding.evidence:
        return []
    rows: list[list[str]] = []
    for shown in finding.evidence:
        place = f"{shown.line:,}" if shown.line else "-"
        rows.append([f"{shown.file}:{place}" if shown.file and has_files else place, "|"])
    places = table(rows, right=(0,), gap=2).splitlines()
    room = max(width() - len(places[0]) - 4, _MIN_TEXT)
    lines: list[str] = []
    for place, shown in zip(places, finding.evidence, strict=True):
        text = one_line(shown.text)
        lines.append(f"  {place} {text if cell_width(text) <= room else fitting(text, room - 4) + ' ...'}")
        lines += [hanging(" " * (len(place) + 1) + "= ", shown.note)] if shown.note else []
    return [*lines, ""]


def _reason(finding: "DiagnosedFailure") -> str:
    lines = ", ".join(f"{shown.line:,}" for shown in finding.evidence[:3] if shown.line)
    because = f"; explained by {finding.because_of}" if finding.because_of else ""
    return f"{finding.title}{f' (line {lines})' if lines else ''}{because}"
