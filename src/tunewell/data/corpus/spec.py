"""What is to be built: the files and how their rows become documents, and all that decides what becomes of those."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewell.core.progress import ProgressListener, silent
from tunewell.data.corpus.parts import Recipe
from tunewell.data.sources.files import SourceFile
from tunewell.records.manifest import TemplateRecord, TokenizerRecord

NO_SHARE = -2
"""Stands for all sources without a share of their own."""


@dataclass
class Job:
    """One file to read, how its rows become documents, and which source of the config it belongs to."""

    file: SourceFile
    recipe: Recipe
    sha256: str
    source_index: int
    is_held_out: bool = False
    stamp: str | None = None
    """`Source.stamp()` when the file was hashed: a file that changes during the build is an error."""


@dataclass
class BuildSpec:
    """What to build."""

    jobs: list[Job]
    held_out_share: float
    drop_duplicates: bool
    drop_answers_held_out: bool
    context_length: int | str
    context_limit: int | None
    long_documents: str
    shares: dict[int, float]
    max_repeats: int
    made_by: str
    inputs_sha256: str
    config: dict[str, Any]
    tokenizer: TokenizerRecord
    templates: list[TemplateRecord]
    save_tokenizer: Callable[[Path], None]
    progress: ProgressListener = silent

    def source_label(self, index: int) -> str:
        """Name a source of the config, or all those without a share."""
        return "the other sources" if index == NO_SHARE else f"`{self.config['data']['sources'][index]['path']}`"
