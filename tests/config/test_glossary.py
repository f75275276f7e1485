"""The glossary as data."""

import re

import pytest

from tunewell.config.glossary import entries, find_entry, glossary_text
from tunewell.core.errors import UserError

REASONS = [
    "unparsable", "not_a_conversation", "empty_question", "empty_reply", "exact_duplicate", "near_held_out",
    "near_duplicate", "has_secret", "bad_text", "too_large", "too_long", "nothing_to_learn", "mask_uncertain",
    "has_media", "not_preferred", "answer_in_held_out", "too_short", "has_url", "dropped_by_map", "not_sampled",
]  # fmt: skip
WORDS = [
    "row", "rows read", "rows in", "document", "sequence", "shard", "corpus", "manifest", "ledger", "held out",
    "pieces", "repeats", "template", "marker", "control token", "end of turn", "supervised token", "context token",
    "boundary token", "padding", "packing efficiency", "step", "micro-batch", "run",
]  # fmt: skip


def test_every_reason_has_one_rule():
    """The ids are a contract with everyone who reads `prepare --json`."""
    assert re.findall(r"^- \*\*`(\w+)`\*\*: ", glossary_text(), re.MULTILINE) == REASONS
    assert all(len(entries()[reason]) > 20 and "\n" not in entries()[reason] for reason in REASONS)


@pytest.mark.parametrize("word", WORDS)
def test_every_word_of_the_house_is_there(word):
    """One word per idea works only when the word is written down."""
    assert len(entries()[word]) > 20


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ("Rows", "row"),
        ("micro batches", "micro-batch"),
        ("held_out", "held out"),
        ("Boundary-Tokens", "boundary token"),
        ("too long", "too_long"),
        ("replies", "reply"),
    ],
)
def test_a_word_is_found_however_it_is_written(asked, word):
    """Case, hyphens and plurals are not what a person wants to think about."""
    assert find_entry(asked)[0] == word


def test_an_unknown_word_names_the_nearest():
    """A dead end must show the way."""
    with pytest.raises(UserError, match="no entry") as caught:
        find_entry("shrad")
    assert caught.value.fix == "did you mean `shard` or `share`?"
