"""The words of a text: the same for documents and questions, in every language."""

import pytest
from toy_embedder import ToyEmbedder

from tunewell.features.retrieval.indexing import build_index
from tunewell.features.retrieval.stores.base import open_store
from tunewell.features.retrieval.words import LANGUAGES, index_language, words

TEXTS = {
    "english": "The fees of the college are due on the first day of the month, and they have to be paid in full.",
    "german": "Die Gebühren werden am ersten Tag des Monats fällig, und sie sind nicht mit einer Karte zu zahlen.",
    "french": "Les frais de la formation sont à payer le premier jour du mois, et une carte ne suffit pas pour cela.",
    "spanish": "Las tasas de la escuela se pagan el primer día del mes, y no es posible pagar con una tarjeta.",
    "italian": "Le tasse della scuola sono da pagare il primo giorno del mese, e non è possibile pagare con la carta.",
    "portuguese": "As taxas da escola são pagas no primeiro dia do mês, e não é possível pagar com uma carta.",
    "dutch": "De kosten van het onderwijs zijn op de eerste dag van de maand te betalen, en niet met een kaart.",
    "swedish": "Avgiften för utbildningen är att betala på den första dagen och det är inte med kort som den betalas.",
    "finnish": "Maksu on maksettava kuun ensimmäisenä päivänä ja se ei ole sama kuin viime vuonna, mutta myös muut.",
    "russian": "Плата за обучение вносится в первый день месяца, и это не то же, что в школе, но как и для всех.",
    "none": "学费在每月的第一天支付，不能用卡支付。",
}


@pytest.mark.parametrize("language", TEXTS)
def test_the_language_of_documents_is_found(language):
    """A German text with English stems finds nothing by its plural."""
    assert index_language([TEXTS[language]] * 3) == language


@pytest.mark.parametrize("texts", [[], [""], ["1234 5678"], ["x = y + z; return z"]])
def test_text_without_a_language_has_none(texts):
    """Code, numbers and an empty sample."""
    assert index_language(texts) == "none"


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_listed_language_works(language):
    """The search library has a stemmer for more languages than it has stop words."""
    assert words("word 42", language)[-1] == "42"


def test_words_are_stemmed_and_stop_words_left_out():
    """`fees` in a question must find `fee` on a page."""
    assert words("The fees of the College", "english") == words("fee college", "english") == ["fee", "colleg"]
    assert words("The fees", "none") == ["the", "fees"]
    assert words("x" * 100 + " y", "english") == ["y"]


@pytest.mark.parametrize(
    ("question", "answer"),
    [("学费是多少", "学费"), ("図書館は何時に開きますか", "図書館"), ("ค่าเล่าเรียนเท่าไร", "ค่าเล่าเรียน")],
)
def test_a_search_without_spaces_finds_its_page(question, answer, tmp_path):
    """Chinese, Japanese and Thai have no spaces: a whole sentence would be one word."""
    docs = tmp_path / "docs"
    docs.mkdir()
    pages = [
        "学费每年一百二十元。",
        "図書館は九時に開きます。",
        "ค่าเล่าเรียนปีละ 120",
        "The library opens at nine.",
        "食堂在二楼。",
    ]
    for number, text in enumerate(pages):
        (docs / f"{number}.md").write_text(text, encoding="utf-8")
    build_index([str(docs)], str(tmp_path / "index"), ToyEmbedder())
    store = open_store(str(tmp_path / "index"))
    hits = store.search_words(words(question, store.manifest.language.value), 5)
    assert answer in store.passages([hits[0][0]])[0].text
