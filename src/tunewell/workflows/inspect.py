"""`tunewell inspect`: show the documents of a corpus or of a row file, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunewell.config.load import LoadedConfig
from tunewell.core.errors import UserError
from tunewell.core.progress import ProgressListener, silent
from tunewell.data.corpus.reader import Corpus, open_corpus
from tunewell.data.tokenizers.load import load_tokenizer, token_texts
from tunewell.records.manifest import MANIFEST, Manifest, NearPair
from tunewell.workflows.prepare import temporary_corpus

_SHOWN_PAIRS = 3
_TOKENS_BEFORE, _TOKENS_AFTER = 8, 16
"""Tokens of a pair that are shown around the first difference."""


@dataclass(frozen=True)
class TokenView:
    """One token: its id, its text, and whether it is supervised."""

    id: int
    text: str
    is_supervised: bool


@dataclass(frozen=True)
class DocumentView:
    """One document, token by token."""

    index: int
    source: str
    row: int
    tokens: list[TokenView]

    @property
    def num_supervised(self) -> int:
        return sum(token.is_supervised for token in self.tokens)


@dataclass(frozen=True)
class PairView:
    """Two near-duplicate rows, with their texts from shortly before the first difference."""

    pair: NearPair
    texts: tuple[str, str] | None
    """None if the row was dropped."""


@dataclass(frozen=True)
class Inspection:
    """The result of `inspect`: the manifest of the corpus, some documents and some near-duplicate pairs."""

    path: str
    is_corpus: bool
    manifest: Manifest
    documents: list[DocumentView]
    pairs: list[PairView]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `inspect --json` prints."""
        manifest = self.manifest.model_dump(mode="json", exclude={"files", "splits", "config"})
        documents = [
            {
                "document": view.index,
                "source": view.source,
                "row": view.row,
                "tokens": [
                    {"id": token.id, "text": token.text, "learned": token.is_supervised} for token in view.tokens
                ],
            }
            for view in self.documents
        ]
        pairs = [view.pair.model_dump() for view in self.pairs]
        return {"path": self.path, "corpus": self.is_corpus, **manifest, "shown": documents, "near_pairs": pairs}


def inspect(
    path: str | None,
    loaded: LoadedConfig,
    *,
    wanted: Sequence[int] = (0, 1),
    is_held_out: bool = False,
    progress: ProgressListener = silent,
) -> Inspection:
    """Return documents of a corpus or row file (default: from the config). Raise UserError if there is neither."""
    target = loaded.base / path if path else loaded.path(loaded.config.corpus)
    if (target / MANIFEST).is_file():
        corpus = open_corpus(target, verify=True)
        return _inspect_corpus(corpus, str(path or loaded.config.corpus), True, wanted, is_held_out)
    if path is None and not loaded.config.data.sources:
        raise UserError(
            f"there is no corpus `{loaded.config.corpus}` and no data is set",
            fix="name a corpus or a file: `tunewell inspect chats.jsonl --model MODEL`",
        )
    sources, changes = loaded.config.data.sources, {}
    if path is not None:
        first = (sources[0].model_dump() if sources else {}) | {"path": path, "share": None}
        changes = {"data": loaded.config.data.model_dump() | {"sources": [first]}}
    with temporary_corpus(loaded, changes, progress) as corpus:
        shown = path or ", ".join(source.path for source in sources)
        return _inspect_corpus(corpus, shown, False, wanted, is_held_out)


def _inspect_corpus(corpus: Corpus, path: str, is_corpus: bool, wanted: Sequence[int], is_held_out: bool) -> Inspection:
    split = corpus.held_out if is_held_out else corpus
    tokenizer = load_tokenizer(corpus.path / "tokenizer") if wanted and len(split) else None
    views = []
    for index in wanted:
        if index >= len(split):
            if index > 1:
                raise UserError(f"document {index} does not exist; the last is {len(split) - 1}")
            continue
        document = split[index]
        assert tokenizer is not None
        texts = token_texts(tokenizer, document.input_ids)
        tokens = [
            TokenView(token, text, label != -100)
            for token, text, label in zip(document.input_ids, texts, document.labels, strict=True)
        ]
        views.append(DocumentView(index, document.source, document.row, tokens))
    return Inspection(path, is_corpus, corpus.manifest, views, _pair_views(corpus))


def _pair_views(corpus: Corpus) -> list[PairView]:
    """Return the most similar pairs of each kind."""
    by_similarity = sorted(corpus.near_pairs(), key=lambda pair: -pair.similarity)
    kinds = ("near_held_out", "near_duplicate")
    shown = [pair for kind in kinds for pair in [p for p in by_similarity if p.kind == kind][:_SHOWN_PAIRS]]
    tokenizer = load_tokenizer(corpus.path / "tokenizer") if shown else None
    views: list[PairView] = []
    for pair in shown:
        assert tokenizer is not None
        similar_split = corpus.held_out if pair.kind == "near_held_out" else corpus
        index, similar = corpus.find(pair.source, pair.row), similar_split.find(pair.similar_source, pair.similar_row)
        texts = None
        if index is not None and similar is not None:
            first, second = (split[i].input_ids for split, i in ((corpus, index), (similar_split, similar)))
            start = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
            part = slice(max(start - _TOKENS_BEFORE, 0), start + _TOKENS_AFTER)
            texts = ("".join(token_texts(tokenizer, first[part])), "".join(token_texts(tokenizer, second[part])))
        views.append(PairView(pair, texts))
    return views
