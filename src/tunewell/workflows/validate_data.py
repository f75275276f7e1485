"""Rows of a file as documents to judge a model on, in a corpus that is gone when the judgement is made."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.workflows.prepare import prepare


@contextmanager
def prepared(loaded: LoadedConfig, data: str) -> Iterator[Corpus]:
    """Prepare a file with the tokenizer and the template of a config; every row of it is to be judged on."""
    path, _, limit = data.rpartition("#") if data.rpartition("#")[2].isdecimal() else (data, "", "")
    sources = loaded.config.data.sources
    # Read as the rows of the run are: the same columns, the same system prompt.
    source = sources[0].model_dump(exclude_unset=True, exclude={"path", "limit", "share"}) if sources else {}
    source |= {"path": str(Path(path).absolute()), **({"limit": int(limit)} if limit else {})}
    with tempfile.TemporaryDirectory(prefix="tunewell-validate-") as folder:
        tree = loaded.config.model_dump() | {"corpus": str(Path(folder) / "corpus")}
        tree["data"] = loaded.config.data.model_dump() | {"sources": [source], "held_out": 0.0}
        config = Config.model_validate(tree)
        try:
            made = prepare(replace(loaded, config=config))
        except UserError as error:
            raise UserError(f"`{data}` cannot be judged on: {error.what}", where=error.where, fix=error.fix) from error
        yield open_corpus(made.corpus)
