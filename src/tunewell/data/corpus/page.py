"""Write the page of `inspect --html`: a corpus as one self-contained HTML file that loads nothing.

Secrets are masked in every text of the page. The number of rows and their lengths are limited, so the page of a large
corpus stays small.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import cached_property
from itertools import groupby

import numpy as np
from markupsafe import Markup, escape

from tunewell.config.glossary import entries
from tunewell.core.html import page_environment, visible
from tunewell.core.redact import hide_secrets, secret_spans
from tunewell.core.units import count
from tunewell.data.corpus.views import CorpusViews, DocumentView, PairView
from tunewell.records.manifest import DroppedRow, SourceRecord

MAX_ROWS = 200
"""Sampled documents on a page."""
_HELD_OUT_SHARE = 0.25
_MAX_DROPPED = 3
"""Rows of each reason."""
_MAX_PAIRS = 20
_MAX_SECRET_ROWS = 20
_MAX_SOURCES = 100
_TOKENS_AT_START, _TOKENS_AT_END = 400, 200
_CONTEXT_CHARS = 80
_WORDS_BEFORE, _WORDS_SHOWN = 30, 160
_NOT_SHOWN = "(not shown: its secrets cannot be located in its tokens)"
_WORD = re.compile(r"\w+|\s+|[^\w\s]")


RowKey = tuple[str, int]
"""The name of a source file in the manifest, and the number of the row."""


class CorpusPage:
    """The content of the page."""

    def __init__(self, views: CorpusViews, *, name: str, is_corpus: bool = True) -> None:
        """If `is_corpus` is False, the corpus is temporary, and the page names none of its files."""
        self.name, self.is_corpus = name, is_corpus
        self.manifest, self.lengths = views.corpus.manifest, views.length_chart()
        self._views = views

    def render(self, wanted: Sequence[int] = (), *, num_rows: int = MAX_ROWS, is_held_out: bool = False) -> str:
        """Return the page with the wanted documents and a sample; the output is deterministic."""
        template = page_environment("tunewell.data.corpus").get_template("corpus.html")
        return template.render(
            page=self,
            manifest=self.manifest,
            documents=self._documents(wanted, num_rows, is_held_out=is_held_out),
            reasons=self._drop_reasons(),
            sources=self._sources(),
            max_sources=_MAX_SOURCES,
            pairs=self._pairs(),
            secrets=self._secrets(),
            meaning=_meaning,
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

    def _documents(
        self, wanted: Sequence[int], num_rows: int, *, is_held_out: bool
    ) -> list[tuple[DocumentView, Markup | None]]:
        """Return documents with their masks, or None if a row has secrets that were not found again in its text."""
        corpus = self._views.corpus
        num_held_out = num_rows if is_held_out else min(len(corpus.held_out), round(num_rows * _HELD_OUT_SHARE))
        chosen = [(index, is_held_out) for index in wanted]
        if not wanted:
            chosen = [(index, False) for index in self._views.sample(num_rows - num_held_out)]
            chosen += [(index, True) for index in self._views.sample(num_held_out, is_held_out=True)]
        views = [self._views.document(index, is_held_out=held_out) for index, held_out in chosen]
        return [(view, self._mask(view)) for view in views]

    def _mask(self, view: DocumentView) -> Markup | None:
        """Return a document as HTML. Supervised tokens are in `mark`, every second one in `i`, control tokens in `b`.

        <mark>It<i> is</i> 4<i>.</i><b>&lt;|im_end|&gt;</b></mark>
        """
        hidden = self._hidden(view)
        if hidden is None:
            return None
        first, last = _TOKENS_AT_START, len(view.tokens) - _TOKENS_AT_END
        parts, position, is_open = list[Markup](), 0, False
        for number, token in enumerate(view.tokens):
            start, position = position, position + len(token.text)
            is_left_out = first <= number < last
            if (is_marked := token.is_supervised and not is_left_out) != is_open:
                parts.append(Markup("<mark>" if is_marked else "</mark>"))
                is_open = is_marked
            if number == first and is_left_out:
                gap = Markup('<small class="gap">{} not shown</small>')
                parts.append(gap.format(count(last - first, "token")))
            elif not is_left_out:
                shown = _replaced(token.text, hidden, start, show=_text_html, name=Markup("<u>{}</u>").format)
                text, is_control = Markup("").join(shown), token.id in self._views.tokenizer.control_ids
                tag = "b" if is_control else "i" if number % 2 else ""
                parts.append(Markup(f"<{tag}>{text}</{tag}>") if tag and text else text)
        return Markup("").join([*parts, Markup("</mark>" if is_open else "")])

    def _hidden(self, view: DocumentView) -> dict[int, str] | None:
        """Return the positions of secrets: the kind for the first character of each, and nothing for the others.

        The result is None if `prepare` found more secrets, as where the tokenizer changes letters.
        """
        # Control tokens end a text. They are no part of a secret.
        control = self._views.tokenizer.control_ids
        ends = (token.text if token.id not in control else "\n" * len(token.text) for token in view.tokens)
        spans = secret_spans("".join(ends))
        found = Counter(kind for _, _, kind in spans)
        listed = self._secret_kinds.get((view.source, view.row), {})
        if any(found[kind] < number for kind, number in listed.items()):
            return None
        hidden: dict[int, str] = {}
        for start, end, kind in sorted(spans):
            for position in range(start, end):
                hidden.setdefault(position, kind if position == start else "")
        return hidden

    @cached_property
    def _secret_kinds(self) -> dict[RowKey, dict[str, int]]:
        if self.manifest.secrets is None or self.manifest.secrets.action != "warn":
            return {}
        return {(secret.source, secret.row): secret.kinds for secret in self._views.corpus.secret_rows()}

    def _drop_reasons(self) -> list[tuple[str, int, list[DroppedRow]]]:
        """Return the reasons, the most frequent first, with the first rows of each."""
        counts = self.manifest.dropped
        return [
            (reason, counts[reason], [_without_secrets(row) for row in rows])
            for reason, rows in self._views.dropped(_MAX_DROPPED).items()
        ]

    def _sources(self) -> list[tuple[SourceRecord, float, float]]:
        """Return the sources with their shares of the training documents and of the supervised tokens."""
        index, records = self._views.corpus.index, self.manifest.sources
        numbers = (np.bincount(index["source"], some, len(records)) for some in (None, index["supervised"]))
        shares: list[list[float]] = [(number / max(1, number.sum())).tolist() for number in numbers]
        entries = list(zip(records, *shares, strict=True))
        return sorted(entries, key=lambda entry: -entry[1]) if len(entries) > _MAX_SOURCES else entries

    def _pairs(self) -> list[tuple[PairView, tuple[Markup, Markup] | None]]:
        """Return the most similar pairs with their texts, in which the differences are marked; None if dropped."""
        return [
            (view, view.documents and _differences(*map(self._safe_text, view.documents)))
            for view in self._views.pairs(_MAX_PAIRS)
        ]

    def _safe_text(self, view: DocumentView) -> str:
        """Return the text of a document with `[kind]` instead of each secret."""
        hidden = self._hidden(view)
        if hidden is None:
            return _NOT_SHOWN
        return "".join(_replaced(view.text, hidden, 0, show=str, name="[{}]".format))

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


def _without_secrets(row: DroppedRow) -> DroppedRow:
    return row.model_copy(update={"detail": hide_secrets(row.detail, Counter())})


def _meaning(name: str) -> str:
    return entries().get(name) or entries().get(name.replace("_", " "), "")


def _replaced(
    text: str, hidden: dict[int, str], start: int, *, show: Callable[[str], str], name: Callable[[str], str]
) -> Iterator[str]:
    """Yield a text that begins at `start`, with the name of each secret that begins in it instead of the secret."""
    for is_hidden, part in groupby(range(len(text)), key=lambda at: start + at in hidden):
        places = list(part)
        if is_hidden:
            yield from (name(kind) for at in places if (kind := hidden[start + at]))
        else:
            yield show(text[places[0] : places[-1] + 1])


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
