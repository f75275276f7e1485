"""`tunewell diagnose`: name the failure in a log, a run, a notebook, a config or a typed sentence."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from tunewell.core.errors import UserError
from tunewell.features.diagnose.config_versions import Release, load_tables, parse_release
from tunewell.features.diagnose.diagnose import diagnose_config, diagnose_paths, diagnose_stream
from tunewell.features.diagnose.findings import Diagnosis
from tunewell.records.report import read_report


def diagnose(
    sources: Sequence[str], stdin: BinaryIO, *, rows: Path | None = None, releases: Sequence[str] = ()
) -> Diagnosis:
    """Return the diagnosis of files and folders, or of stdin if the source is `-`.

    `rows` is compared with the length limit of a config; its keys are checked for the `releases` of libraries. Raises
    UserError if a source cannot be read.
    """
    versions = _versions(releases)
    if rows is not None:
        if len(sources) != 1 or not Path(sources[0]).is_file():
            raise UserError("`--rows` needs one config file", fix="`tunewell diagnose config.yaml --rows train.jsonl`")
        return diagnose_config(Path(sources[0]), rows, versions=versions)
    if list(sources) == ["-"]:
        return diagnose_stream(stdin, versions=versions)
    paths = [Path(source) for source in sources]
    found = diagnose_paths(paths, versions=versions)
    return replace(found, notes=(*found.notes, *_verdicts(paths)))


def _verdicts(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the verdict of each run of ours that did not pass: a log without a failure says nothing about answers."""
    for path in paths:
        with suppress(UserError):
            report = read_report(path)
            if report.verdict != "PASS":
                yield f"the verdict of `{path}` is {report.verdict}: {report.summary}. {report.next}"


def _versions(releases: Sequence[str]) -> dict[str, Release]:
    """Return the releases of `--with NAME==VERSION`. `installed` means those of this environment."""
    libraries = {table.library for table in load_tables().values()}
    found: dict[str, Release] = {}
    for release in releases:
        if release == "installed":
            found |= {name: number for name in libraries if (number := _installed(name)) is not None}
            continue
        name, _, version = release.replace(" ", "").partition("==")
        number = _release(version)
        if name not in libraries or number is None:
            known = ", ".join(sorted(libraries))
            fix = f"`--with trl==0.24`, or `--with installed`; known are {known}"
            raise UserError(f"`--with {release}` is not a release of a known library", fix=fix)
        found[name] = number
    return found


def _installed(name: str) -> Release | None:
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return _release(version(name))
    return None


def _release(version: str) -> Release | None:
    match = re.match(r"v?(\d+\.\d+)", version)
    return parse_release(match[1]) if match else None
