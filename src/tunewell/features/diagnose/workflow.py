"""`tunewell diagnose`: name the failure in a log, a run, a notebook, a config or a typed sentence."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

from tunewell.config.releases import Release, load_tables, parse_release
from tunewell.core.errors import UserError
from tunewell.features.diagnose.diagnose import diagnose_config, diagnose_paths, diagnose_stream
from tunewell.features.diagnose.findings import Diagnosis
from tunewell.records.report import read_report

_RELEASE = re.compile(r"v?(\d+\.\d+)")


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
    libraries = sorted({table.library for table in load_tables().values()})
    stated: list[tuple[str, str]] = []
    for release in releases:
        name, _, number = release.replace(" ", "").partition("==")
        if release == "installed":
            for name in libraries:
                with suppress(PackageNotFoundError):
                    stated.append((name, version(name)))
        elif name in libraries and _RELEASE.match(number):
            stated.append((name, number))
        else:
            fix = f"`--with trl==0.24`, or `--with installed`; known are {', '.join(libraries)}"
            raise UserError(f"`--with {release}` is not a release of a known library", fix=fix)
    return {name: parse_release(found[1]) for name, number in stated if (found := _RELEASE.match(number))}
