"""The words of a text for the word search: lower case, stemmed, without stop words. The same in every store."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from tunewell.core.optional import import_optional
from tunewell.inference.degeneration import SPACELESS_LETTER

# Frequent short words, enough to recognise a language with a stemmer. `none` keeps words as they are.
_FREQUENT = {
    "english": "the of and to is are was that for with this from you have",
    "german": "der die das und ist nicht ein eine mit für auf von den dem sich werden",
    "french": "le la les des et est dans une pour que qui sur avec pas",
    "spanish": "el la los las de que en una es por con para del se",
    "italian": "il lo la gli di che è una per non con sono della del",
    "portuguese": "os as de que em uma é para com não do da no na",
    "dutch": "de het een en van is dat op te zijn voor met niet aan",
    "swedish": "och att det som en är på för med av den till inte har",
    "danish": "og at det som en er på for med af den til ikke har",
    "norwegian": "og at det som en er på for med av den til ikke har",
    "finnish": "ja on ei se että oli mutta ovat kun tai niin kuin myös joka",
    "russian": "и в не на что он с как это по но из для от",
}
_WITHOUT_STOP_WORDS = ("turkish", "romanian", "greek", "arabic", "tamil")
LANGUAGES = (*sorted((*_FREQUENT, "hungarian", *_WITHOUT_STOP_WORDS)), "none")
"""Languages with a stemmer, and `none`."""
_MIN_SHARE = 0.08
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
    return _analyzer(language).analyze(SPACELESS_LETTER.sub(r" \g<0> ", text))


def detect_language(texts: Iterable[str]) -> str:
    """Return the language of most texts, or `none` if it has no stemmer or cannot be told."""
    found, total = Counter[str](), 0
    known = {language: frozenset(line.split()) for language, line in _FREQUENT.items()}
    for text in texts:
        letters = re.findall(r"\w+", text.lower())
        total += len(letters)
        for language, frequent in known.items():
            found[language] += sum(word in frequent for word in letters)
    if not total or not found:
        return "none"
    language, number = found.most_common(1)[0]
    return language if number / total >= _MIN_SHARE else "none"
