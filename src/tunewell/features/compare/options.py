"""The options of `compare`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tunewell.core.options import Option


@dataclass(frozen=True)
class CompareOptions:
    """The options of a comparison."""

    indexes: Annotated[
        Sequence[str], Option("Also answer from this index. Can be repeated.", "INDEX", ("--index",), kind=list[str])
    ] = ()
    data: Annotated[
        str | Path | Sequence[str | Path] | None,
        Option("Questions with answers. Default: the run's held-out rows.", "PATH", kind=list[str]),
    ] = None
    num_questions: Annotated[int, Option("Maximum number of questions.", "N", ("--questions",), min=1)] = 100
    num_passages: Annotated[
        int | None,
        Option("Number of passages to read. Default: set by the index.", "N", ("--passages",), min=1, max=50),
    ] = None
    judge: Annotated[str | None, Option("Judge answers by a model instead of by keys.", "URL#MODEL")] = None
    """It needs `labels`."""
    labels: Annotated[
        str | Path | None, Option("Answers judged by a person, to measure `--judge` by.", "FILE", kind=Path)
    ] = None
    out: Annotated[str | Path, Option("Folder to write the HTML page to.", "FOLDER", kind=Path)] = "comparison"
    is_fresh: Annotated[bool, Option("Validate every run again. Only for runs alone.", flags=("--fresh",))] = False
    device: Annotated[str, Option("Device: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`.", "NAME")] = "auto"
