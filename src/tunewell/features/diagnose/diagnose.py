"""`tunewell.diagnose`: name the failure in a log, a traceback, a config or a few sentences."""

import io
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from tunewell.config.releases import Versions, stated_versions
from tunewell.core.files import read_text
from tunewell.core.redact import redact
from tunewell.features.diagnose.config_lint import lint, lint_lengths
from tunewell.features.diagnose.findings import DiagnosedFailure, Diagnosis
from tunewell.features.diagnose.inputs import open_documents, read_stream
from tunewell.features.diagnose.knowledge import load_tools
from tunewell.features.diagnose.ranking import rank
from tunewell.features.diagnose.reading import Reading
from tunewell.features.diagnose.requirements import version_conflicts

_LONGEST_PATH = 4096
CONFLICT = "incompatible-versions"


def diagnose(source: str | os.PathLike[str]) -> list[DiagnosedFailure]:
    """Return the findings about a text, or about a file, folder or run, best first.

    An empty list means healthy. A first finding with the id `unknown` means that the cause cannot be told from the
    text. A text without a line break that names an existing file is a path. Nothing is executed and no model is loaded.
    """
    return list(diagnose_source(source).findings)


def diagnose_source(source: str | os.PathLike[str]) -> Diagnosis:
    """Return the diagnosis of a text or a path."""
    if isinstance(source, str) and not _is_path(source):
        return diagnose_text(source)
    return diagnose_paths([Path(source)])


def diagnose_text(text: str | bytes) -> Diagnosis:
    """Return the diagnosis of a text in memory."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return diagnose_stream(io.BytesIO(data))


def diagnose_stream(file: BinaryIO, *, versions: Versions | None = None) -> Diagnosis:
    """Return the diagnosis of a stream such as stdin, which may be larger than memory."""
    return _conclude([read_stream(file)], (), versions)


def diagnose_paths(paths: Sequence[Path], *, versions: Versions | None = None) -> Diagnosis:
    """Return the diagnosis of files, folders or runs, read together as one run.

    `versions` are releases of libraries for which the keys of configs are checked, besides those stated in the files.
    Raises UserError if a path does not exist, or if nothing in it can be read.
    """
    notes: list[str] = []
    readings = list(open_documents(paths, notes))
    return _conclude(readings, notes, versions)


def diagnose_config(config: Path, rows: Path, *, versions: Versions | None = None) -> Diagnosis:
    """Return the diagnosis of a config together with the rows that it will train on."""
    notes: list[str] = []
    readings = list(open_documents([config], notes))
    lint_lengths(read_text(config, errors="replace"), rows, readings[0])
    return _conclude(readings, notes, versions)


def _conclude(readings: Sequence[Reading], notes: Sequence[str], versions: Versions | None) -> Diagnosis:
    with_text = [reading for reading in readings if reading.text]
    stated = stated_versions("\n".join(reading.text for reading in with_text)) | dict(versions or {})
    hints = [hint for reading in with_text for hint in lint(reading.text, reading, stated)]
    mend = "; ".join(filter(None, (version_conflicts(reading.text, reading) for reading in with_text)))
    findings, more = rank(readings)
    findings = [
        replace(
            found,
            fix=mend if found.id == CONFLICT else found.fix,
            evidence=tuple(replace(one, text=redact(one.text), note=redact(one.note)) for one in found.evidence),
        )
        for found in findings
    ]
    labels = {tool.name: tool.label for tool in load_tools()}
    tool = next((reading.tool for reading in readings if reading.tool), None)
    return Diagnosis(
        findings=tuple(findings),
        tool=labels.get(tool or ""),
        notes=tuple(redact([*notes, *more, *hints])),
        num_lines=sum(reading.num_lines for reading in readings),
        num_steps=sum(reading.num_steps for reading in readings),
        num_judged=sum(reading.num_judged for reading in readings),
        sources=tuple(reading.name for reading in readings if reading.name),
    )


def _is_path(text: str) -> bool:
    if "\n" in text or len(text) > _LONGEST_PATH or not text.strip() or "\0" in text:
        return False
    try:
        return Path(text).exists()
    except OSError:
        return False
