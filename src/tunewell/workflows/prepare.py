"""`tunewell prepare`: tokenise and pack the rows of a config into a corpus that training reads."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tunewell.config.load import ConfigLike, LoadedConfig, to_loaded_config
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.core.features import require_hook
from tunewell.core.html import render
from tunewell.core.progress import ProgressListener, silent
from tunewell.data.corpus.build import build
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.data.corpus.spec import BuildSpec, make_spec, require_model_and_data, with_labels
from tunewell.data.corpus.writer import CorpusOutput
from tunewell.data.sources.base import TOKENIZED
from tunewell.data.text_pipeline import TextPipeline
from tunewell.data.tokenizers.load import LoadedTokenizer
from tunewell.model_files.facts import read_facts
from tunewell.planning.recommendation import task_of_rows
from tunewell.records.manifest import Manifest
from tunewell.runs.config import with_start

_IN_JSON = {
    *("rows_read", "rows_in", "documents", "held_out", "pieces", "repeats", "dropped", "notes", "remarks", "warnings"),
    *("selected", "selected_because"),
    *("near_duplicates", "secrets", "tokens", "boundary_tokens", "packing", "lengths", "sources", "corpus_sha256"),
}
"""What `prepare --json` prints of the manifest."""


@dataclass(frozen=True)
class PrepareResult:
    """The corpus that `prepare` built or found."""

    corpus: Path
    manifest: Manifest
    was_up_to_date: bool
    seconds: float

    def __repr__(self) -> str:
        manifest, dropped = self.manifest, sum(self.manifest.dropped.values())
        counts = f"documents={manifest.documents}, held_out={manifest.held_out}, dropped={dropped}"
        return f"PrepareResult(corpus={str(self.corpus)!r}, {counts})"

    def _repr_html_(self) -> str:
        return render("tunewell.workflows", "prepared.html", corpus=self.corpus, manifest=self.manifest)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `prepare --json` prints."""
        return {
            "corpus": str(self.corpus),
            "up_to_date": self.was_up_to_date,
            **self.manifest.model_dump(include=_IN_JSON, exclude={"lengths": {"histogram"}}),
            "seconds": round(self.seconds, 3),
        }


def prepare(
    config: ConfigLike = None,
    *,
    sets: Sequence[str] = (),
    model: str | None = None,
    data: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    progress: ProgressListener = silent,
) -> PrepareResult:
    """Build the corpus of a config. An up-to-date corpus is reused; an outdated one is replaced atomically."""
    started = time.perf_counter()
    loaded = to_loaded_config(config, sets, model=model, data=data, out=out)
    spec = load_spec(loaded, progress)
    target = loaded.path(loaded.config.corpus)
    output = CorpusOutput(target)
    manifest = None if output.has_leftovers() else output.find_current(spec)
    if manifest is not None:
        return PrepareResult(target, manifest, True, time.perf_counter() - started)
    output.require_replaceable()
    with output.locked():
        # An interrupted publish may have been undone, or another process may have just built the corpus.
        current = output.find_current(spec)
        manifest = current or build(spec, out=output.path, work_dir=output.work_dir)
    return PrepareResult(target, manifest, current is not None, time.perf_counter() - started)


@contextmanager
def temporary_corpus(
    loaded: LoadedConfig, changes: Mapping[str, Any], progress: ProgressListener = silent
) -> Iterator[Corpus]:
    """Yield a temporary corpus of a config with changed top-level values. It is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="tunewell-corpus-") as folder:
        tree = {**loaded.config.model_dump(exclude_unset=True), **changes, "corpus": str(Path(folder) / "corpus")}
        yield open_corpus(prepare(replace(loaded, config=Config.model_validate(tree)), progress=progress).corpus)


def load_spec(loaded: LoadedConfig, progress: ProgressListener = silent) -> BuildSpec:
    """Load the tokenizer and the templates, and return the build spec. With `data.index`, rows get passages first."""
    loaded, _ = with_start(loaded)
    require_model_and_data(loaded)
    loaded = with_labels(loaded, progress)
    remarks: list[str] = []
    if loaded.config.data.index is not None:
        with_open_book = require_hook("retrieval", "open_book", needed_by="`data.index`")
        loaded, remarks = with_open_book(loaded, progress)
    text = TextPipeline.load(loaded)
    facts = read_facts(text.model)
    if loaded.config.method.adapter is not None:
        text.tokenizer = _with_earlier_tokens(text.tokenizer, facts.vocab_size)
    spec = make_spec(loaded, text, context_limit=facts.context_limit, progress=progress)
    spec.remarks += tuple(remarks)
    if not any(job.file.format == TOKENIZED for job in spec.jobs):  # those have no rows
        spec.find_task = partial(task_of_rows, loaded.config, base=loaded.base)
    return spec


def _with_earlier_tokens(tokenizer: LoadedTokenizer, num_rows: int | None) -> LoadedTokenizer:
    """Return the tokenizer of an adapter; tokens without a row in the base model's embedding count as added."""
    if tokenizer.added_by_us:
        named = ", ".join(f"`{token}`" for token in tokenizer.added_by_us)
        raise UserError(
            f"the chat template needs new tokens, {named}, which the adapter has not learned",
            fix="leave out `tokenizer` and `template`, so that those of the earlier run are used; or merge the adapter "
            "first with `tunewell export --to merged`, and train the merged model",
        )
    added = {token.id: text for text, token in tokenizer.added.items() if num_rows and token.id >= num_rows}
    return replace(tokenizer, added_by_us=tuple(added[number] for number in sorted(added)))
