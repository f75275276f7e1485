"""The text that general ability is measured on."""

from collections import Counter

from tunewell.core.text import detect_language
from tunewell.evaluation.forgetting import everyday_texts


def test_there_are_forty_passages_of_ordinary_length():
    """Guards against a set too small to trust or too long to wait for."""
    texts = everyday_texts()
    assert len(texts) == len(set(texts)) == 40
    assert all(150 <= len(text) <= 420 for text in texts)


def test_most_passages_are_english_and_some_are_not():
    """Guards both the mixture and the detector of languages, on text written before it."""
    languages = Counter(detect_language(text) for text in everyday_texts())
    assert languages.pop("en") >= 28
    assert languages.pop(None) <= 4
    assert languages == {"de": 3, "fr": 2, "es": 2}


def test_the_passages_have_nothing_to_do_with_the_example():
    """Guards against measuring what was trained on."""
    assert not any("college" in text.lower() or "tuition" in text.lower() for text in everyday_texts())


def test_a_caller_cannot_spoil_the_set_for_the_next():
    """Guards the list that is kept between calls."""
    everyday_texts().clear()
    assert len(everyday_texts()) == 40
