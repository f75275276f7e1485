"""The words of a text for the word search: lower case, stemmed, without stop words. The same in every store."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from tunewell.core.optional import import_optional
from tunewell.core.text import likely_language, space_out

_STEMMERS = {
    **{"en": "english", "de": "german", "fr": "french", "es": "spanish", "it": "italian", "pt": "portuguese"},
    **{"nl": "dutch", "sv": "swedish", "fi": "finnish", "hu": "hungarian", "ru": "russian"},
    **{"tr": "turkish", "ro": "romanian", "el": "greek", "ar": "arabic", "TAMIL": "tamil"},
}
"""The stemmer of a language that `likely_language` knows, besides Danish and Norwegian."""
_WITHOUT_STOP_WORDS = ("turkish", "romanian", "greek", "arabic", "tamil")
LANGUAGES = (*sorted((*_STEMMERS.values(), "danish", "norwegian")), "none")
"""Languages with a stemmer, and `none`, which keeps words as they are."""
_DANISH, _NORWEGIAN = re.compile(r"\b(?:af|efter|ud|meget|uden|mod)\b"), re.compile(r"\b(?:av|etter|ut|mye|uten|mot)\b")
_MAX_BYTES = 80
"""Longer words are codes or noise."""


@cache
def _analyzer(language: str) -> Any:
    tantivy = import_optional("tantivy", extra="retrieval", purpose="an index")
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(_MAX_BYTES)).filter(tantivy.Filter.lowercase())
    if language != "none":
        if language not in _WITHOUT_STOP_WORDS:
            builder = builder.filter(tantivy.Filter.stopword(language))
        builder = builder.filter(tantivy.Filter.stemmer(language))
    return builder.build()


def words(text: str, language: str) -> list[str]:
    """Return the searchable words of a text in order. A letter of Chinese, Japanese or Thai is a word of its own."""
    return _analyzer(language).analyze(space_out(text))


def index_language(texts: Iterable[str]) -> str:
    """Return the language of most texts, or `none` if it has no stemmer or cannot be told."""
    text = "\n".join(texts)
    language = likely_language(text)
    if language == "da/no":
        return "danish" if len(_DANISH.findall(text)) >= len(_NORWEGIAN.findall(text)) else "norwegian"
    return _STEMMERS.get(language or "", "none")
