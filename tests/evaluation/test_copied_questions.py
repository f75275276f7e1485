"""Which questions are asked: copies of training rows are left out."""

import pytest

from tunewell.core.errors import UserError
from tunewell.evaluation.questions import _without_copies
from tunewell.evaluation.rows import EvaluationSet
from tunewell.scoring.base import ReferenceRow
from tunewell.scoring.questions import Question, TokenReader

REPLIES = ["delivery", "refund"]
READ = TokenReader(lambda ids: REPLIES[ids[0]], str.strip, stop_ids=())
TRAINING = [ReferenceRow("Where is it?", "Delivery."), ReferenceRow("what is 2+2?", "refund")]


def ask(text: str, reply: int) -> Question:
    return Question(0, [1], [reply], text, text, REPLIES[reply])


def test_training_rows_in_another_spelling_are_left_out_and_counted():
    """Guards the training file in capitals, which was a test."""
    asked = [ask("WHERE IS  IT ?!", 0), ask("Where is it?", 1), ask("what is 2*2?", 1), ask("Who is it?", 0)]
    kept, notes = _without_copies(asked, EvaluationSet(None, "more.jsonl"), TRAINING, READ)
    assert kept == asked[1:]
    assert len(notes) == 1 and notes[0].startswith("1 of 4 questions are training rows apart from case")


def test_a_test_file_of_copies_only_is_refused_but_held_out_rows_are_kept_with_a_note():
    """Guards `train`, whose verdict must not end in an error."""
    asked = [ask("WHERE IS IT", 0)]
    with pytest.raises(UserError, match="1 of 1 question"):
        _without_copies(asked, EvaluationSet(None, "caps.jsonl", test_file="caps.jsonl"), TRAINING, READ)
    kept, notes = _without_copies(asked, EvaluationSet(None, "the held-out rows of the run"), TRAINING, READ)
    assert kept == asked and "memorisation" in notes[0]
