"""Write the page of `inspect --html`: a corpus as one self-contained HTML file that loads nothing.

Secrets are masked in every text of the page. The number of rows and their lengths are limited, so the page of a large
corpus stays small.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from tunewell.config.glossary import entries
from tunewell.core.html import page_environment, visible
from tunewell.core.redact import hide_secrets, secret_spans
from tunewell.core.units import count
from tunewell.data.corpus.source_rows import RowKey, SourceRows
from tunewell.data.corpus.views import CorpusViews, DocumentView, PairView
from tunewell.records.manifest import DroppedRow, SourceRecord

MAX_ROWS = 200
"""Sampled documents on a page."""
_HELD_OUT_SHARE = 0.25
_MAX_EXAMPLES = 3
_MAX_PAIRS = 20
_MAX_SECRET_ROWS = 20
_MAX_SOURCES = 100
_TOKENS_AT_START, _TOKENS_AT_END = 400, 200
_EXAMPLE_CHARS = 1200
_CONTEXT_CHARS = 80
_WORDS_BEFORE, _WORDS_SHOWN = 30, 160
_NOT_SHOWN = "(not shown: its secrets cannot be located in its tokens)"
_WORD = re.compile(r"\w+|\s+|[^\w\s]")


Span = tuple[int, int, str]
"""Start, end and kind of a secret in a text."""


@dataclass(frozen=True)
class ShownDocument:
    """One document with its mask as HTML."""

    view: DocumentView
    mask: Markup | None
    """None if the row has secrets that were not found again in its text."""


@dataclass(frozen=True)
class DropReason:
    """One reason for dropped rows, with examples: the row, its text, and a remark if there is no text."""

    name: str
    meaning: str
    num_rows: int
    examples: list[tuple[DroppedRow, str, str]]


class CorpusPage:
    """The content of the page."""

    def __init__(self, views: CorpusViews, rows: SourceRows, *, name: str, is_corpus: bool = True) -> None:
        """If `is_corpus` is False, the corpus is temporary, and the page names none of its files."""
        self.name, self.is_corpus = name, is_corpus
        self.manifest = views.corpus.manifest
        self._views, self._rows = views, rows

    def render(self, wanted: Sequence[int] = (), *, num_rows: int = MAX_ROWS, is_held_out: bool = False) -> str:
        """Return the page with the wanted documents and a sample; the output is deterministic."""
        template = page_environment("tunewell.data.corpus").get_template("corpus.html")
        manifest = self.manifest
        in_bins = [number for _, _, number in manifest.lengths.histogram]
        return template.render(
            page=self,
            manifest=manifest,
            documents=self._documents(wanted, num_rows, is_held_out=is_held_out),
            reasons=self._drop_reasons(),
            sources=self._sources(),
            pairs=self._pairs(),
            secrets=self._secrets(),
            most_in_bin=max(in_bins, default=0) or 1,
            num_in_bins=sum(in_bins) or 1,
            num_documents=sum(split.documents for split in manifest.splits.values()),
            num_tokens=sum(split.tokens for split in manifest.splits.values()),
            notes=[(name.replace("_", " "), number, _meaning(name)) for name, number in manifest.notes.items()],
        )

    @property
    def findings(self) -> list[tuple[str, str]]:
        """What to look at first: a sentence, and the section of the page that shows it."""
        manifest, near, secrets = self.manifest, self.manifest.near_duplicates, self.manifest.secrets
        found = [(warning, "") for warning in manifest.warnings]
        if number := manifest.notes.get("unknown_tokens"):
            found.append((f"{count(number, 'unknown token')}: {manifest.unknown_remark}.", "tokenizer"))
        if near and near.num_near_held_out and near.near_held_out != "drop":
            rows = count(near.num_near_held_out, "training row")
            found.append((f"{rows} nearly equal to a held-out row: the verdict may be too good.", "near"))
        if secrets and secrets.rows and secrets.action == "warn":
            found.append((f"Secrets or personal data in {count(secrets.rows, 'row')}.", "secrets"))
        return found

    def _documents(self, wanted: Sequence[int], num_rows: int, *, is_held_out: bool) -> list[ShownDocument]:
        corpus = self._views.corpus
        num_held_out = 0 if wanted else min(len(corpus.held_out), round(num_rows * _HELD_OUT_SHARE))
        if wanted:
            chosen = [(index, is_held_out) for index in wanted]
        elif is_held_out:
            chosen = [(index, True) for index in self._views.sample(num_rows, is_held_out=True)]
        else:
            chosen = [(index, False) for index in self._views.sample(num_rows - num_held_out)]
            chosen += [(index, True) for index in self._views.sample(num_held_out, is_held_out=True)]
        views = (self._views.document(index, is_held_out=held_out) for index, held_out in chosen)
        return [ShownDocument(view, self._mask(view)) for view in views]

    def _mask(self, view: DocumentView) -> Markup | None:
        spans = self._find_secrets(view)
        return None if spans is None else Markup("").join(_mask_parts(view, spans, self._control_ids))

    def _find_secrets(self, view: DocumentView) -> list[Span] | None:
        """Return the secrets in the text; None if `prepare` found more, as where the tokenizer changes letters."""
        # Control tokens end a text. They are no part of a secret.
        ends = (token.text if token.id not in self._control_ids else "\n" * len(token.text) for token in view.tokens)
        spans = secret_spans("".join(ends))
        found = Counter(kind for _, _, kind in spans)
        listed = self._secret_kinds.get((view.source, view.row), {})
        return _merged(spans) if all(found[kind] >= number for kind, number in listed.items()) else None

    @property
    def _control_ids(self) -> frozenset[int]:
        return self._views.tokenizer.control_ids

    @cached_property
    def _secret_kinds(self) -> dict[RowKey, dict[str, int]]:
        if self.manifest.secrets is None or self.manifest.secrets.action != "warn":
            return {}
        return {(secret.source, secret.row): secret.kinds for secret in self._views.corpus.secret_rows()}

    def _drop_reasons(self) -> list[DropReason]:
        """Return the reasons, the most frequent first, with the first rows of each as examples."""
        counts, chosen = self.manifest.dropped, {reason: list[DroppedRow]() for reason in self.manifest.dropped}
        left = sum(min(number, _MAX_EXAMPLES) for number in counts.values())
        rows = self._views.corpus.dropped_rows()
        while left and (row := next(rows, None)) is not None:
            if len(chosen.setdefault(row.reason, [])) < _MAX_EXAMPLES:
                chosen[row.reason].append(row)
                left -= 1
        texts = self._rows.read((row.source, row.row) for examples in chosen.values() for row in examples)
        return [
            DropReason(reason, _meaning(reason), counts[reason], [self._example(row, texts) for row in chosen[reason]])
            for reason in sorted(counts, key=lambda reason: (-counts[reason], reason))
        ]

    def _example(self, row: DroppedRow, texts: dict[RowKey, str]) -> tuple[DroppedRow, str, str]:
        text = texts.get((row.source, row.row))
        shown = row.model_copy(update={"detail": _hidden(row.detail)})
        return shown, _cut(text or ""), "" if text is not None else self._rows.problem(row.source)

    def _sources(self) -> dict[str, Any]:
        """Return the sources with their shares of the training documents and of the supervised tokens."""
        corpus, records = self._views.corpus, self.manifest.sources
        of_document = corpus.index.get("source", np.zeros(0, dtype=np.int64))
        documents = np.bincount(of_document, minlength=len(records))
        weights = corpus.index.get("supervised", np.zeros(0))
        supervised = np.bincount(of_document, weights=weights, minlength=len(records))
        shares: list[tuple[SourceRecord, float, float]] = [
            (record, float(number) / max(1, len(of_document)), float(tokens) / max(1.0, float(weights.sum())))
            for record, number, tokens in zip(records, documents.tolist(), supervised.tolist(), strict=True)
        ]
        shown = sorted(shares, key=lambda entry: -entry[1]) if len(shares) > _MAX_SOURCES else shares
        return {"shown": shown[:_MAX_SOURCES], "num_more": max(0, len(shown) - _MAX_SOURCES)}

    def _pairs(self) -> list[tuple[PairView, tuple[Markup, Markup] | None, str]]:
        """Return the most similar pairs with their texts, in which the differences are marked, or a remark."""
        views = self._views.pairs(_MAX_PAIRS)
        keys = {(view.pair.kind, *_keys(view)): _keys(view) for view in views if view.documents is None}
        texts = self._rows.read(key for pair in keys.values() for key in pair)
        shown: list[tuple[PairView, tuple[Markup, Markup] | None, str]] = []
        for view in views:
            first, second = _keys(view)
            if view.documents is not None:
                shown.append((view, _differences(*(self._safe_text(document) for document in view.documents)), ""))
            elif first in texts and second in texts:
                shown.append((view, _differences(texts[first], texts[second]), ""))
            else:
                missing = first if first not in texts else second
                shown.append((view, None, self._rows.problem(missing[0])))
        return shown

    def _safe_text(self, view: DocumentView) -> str:
        """Return the text of a document with `[kind]` instead of each secret."""
        spans, text = self._find_secrets(view), view.text
        if spans is None:
            return _NOT_SHOWN
        for start, end, kind in reversed(spans):
            text = f"{text[:start]}[{kind}]{text[end:]}"
        return text

    def _secrets(self) -> list[tuple[RowKey, dict[str, int], str]]:
        """Return the first rows with secrets, and the text around the first secret that is in a document."""
        shown: list[tuple[RowKey, dict[str, int], str]] = []
        for secret in self._views.corpus.secret_rows()[:_MAX_SECRET_ROWS]:
            view = self._views.find(secret.source, secret.row)
            text = self._safe_text(view) if view else "(dropped)"
            places = [at for kind in secret.kinds if (at := text.find(f"[{kind}]")) >= 0]
            if places:
                start = max(0, min(places) - _CONTEXT_CHARS)
                part = text[start : min(places) + 2 * _CONTEXT_CHARS]
                text = f"... {part.split(maxsplit=1)[-1] if start else part} ..."
            shown.append(((secret.source, secret.row), secret.kinds, text if places or not view else _NOT_SHOWN))
        return shown


def _keys(view: PairView) -> tuple[RowKey, RowKey]:
    pair = view.pair
    return (pair.source, pair.row), (pair.similar_source, pair.similar_row)


def _meaning(name: str) -> str:
    return entries().get(name) or entries().get(name.replace("_", " "), "")


def _hidden(text: str) -> str:
    return hide_secrets(text, Counter())


def _cut(text: str) -> str:
    """Return a text without its middle if it is long."""
    left = len(text) - _EXAMPLE_CHARS
    half = _EXAMPLE_CHARS // 2
    return text if left <= 0 else f"{text[:half]}\n[... {count(left, 'character')} not shown ...]\n{text[-half:]}"


def _merged(spans: list[Span]) -> list[Span]:
    """Return the spans in order, with overlapping ones joined; the first kind is kept."""
    merged: list[Span] = []
    for start, end, kind in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]), merged[-1][2])
        else:
            merged.append((start, end, kind))
    return merged


def _mask_parts(view: DocumentView, spans: list[Span], control: frozenset[int]) -> Iterator[Markup]:
    """Yield the HTML of a document. Supervised tokens are in `mark`, every second token in `i`, control tokens in `b`.

    <mark>It<i> is</i> 4<i>.</i><b>&lt;|im_end|&gt;</b></mark>
    """
    first, last = _TOKENS_AT_START, len(view.tokens) - _TOKENS_AT_END
    position, is_open = 0, False
    waiting = list(reversed(spans))
    for number, token in enumerate(view.tokens):
        start, position = position, position + len(token.text)
        if first <= number < last:
            if number == first:
                yield Markup("</mark>" if is_open else "") + _gap(last - first)
                is_open = False
            continue
        if token.is_supervised != is_open:
            yield Markup("<mark>" if token.is_supervised else "</mark>")
            is_open = token.is_supervised
        text = _token_html(token.text, start, waiting)
        tag = "b" if token.id in control else "i" if number % 2 else ""
        yield Markup(f"<{tag}>{text}</{tag}>") if tag and text else text
    if is_open:
        yield Markup("</mark>")


def _gap(num_tokens: int) -> Markup:
    return Markup('<small class="gap">{} not shown</small>').format(count(num_tokens, "token"))


def _token_html(text: str, start: int, waiting: list[Span]) -> Markup:
    """Return the text of a token that begins at `start`, with secrets replaced. Removes finished spans from the end."""
    end, at, parts = start + len(text), start, Markup("")
    while at < end:
        while waiting and waiting[-1][1] <= at:
            waiting.pop()
        if not waiting or waiting[-1][0] >= end:
            return parts + _text_html(text[at - start :])
        secret_start, secret_end, kind = waiting[-1]
        if kind and at < secret_start:
            parts += _text_html(text[at - start : secret_start - start])
        if kind:
            parts += Markup("<u>{}</u>").format(kind)
            waiting[-1] = (secret_start, secret_end, "")  # the rest of the secret is left out
        at = min(end, secret_end)
    return parts


def _text_html(text: str) -> Markup:
    return Markup(str(escape(visible(text))).replace("\n", "<em>\u21b5</em>\n"))


def _differences(first: str, second: str) -> tuple[Markup, Markup]:
    """Return two texts from shortly before the first difference, with the words that differ marked."""
    words = [_WORD.findall(text) for text in (first, second)]
    begin = next((n for n, (a, b) in enumerate(zip(*words, strict=False)) if a != b), min(map(len, words)))
    spaces = (n for n in range(max(0, begin - _WORDS_BEFORE), begin) if words[0][n].isspace())
    start = next(spaces, begin) if begin > _WORDS_BEFORE else 0
    parts = [each[start : start + _WORDS_SHOWN] for each in words]
    shown = [Markup("..." if start else ""), Markup("..." if start else "")]
    for kind, a, b, c, d in SequenceMatcher(None, *parts, autojunk=False).get_opcodes():
        for side, piece in enumerate(("".join(parts[0][a:b]), "".join(parts[1][c:d]))):
            text = escape(visible(piece))
            shown[side] += text if kind == "equal" or not piece else Markup("<ins>{}</ins>").format(text)
    return (
        shown[0] + ("..." if len(words[0]) > start + _WORDS_SHOWN else ""),
        shown[1] + ("..." if len(words[1]) > start + _WORDS_SHOWN else ""),
    )
