"""Columns of a comparison with an index: counts of right, refused and invented answers, and misses by their cause."""

import re

import pytest
from toy_index import college_facts, college_index

from tunewell.config.rules import VerdictRules
from tunewell.core.errors import UserError
from tunewell.data.reading_prompt import NOT_FOUND, Passage, question_in
from tunewell.evaluation.comparison import compare_columns
from tunewell.evaluation.passages import SearchedQuestions, Shown, key_finder
from tunewell.evaluation.questions import judge_by_task
from tunewell.features.compare.measure import Exam, measure_alone, measure_with_passages
from tunewell.features.retrieval.shown import search_all
from tunewell.inference.batch import Replies
from tunewell.scoring.base import ReferenceRow

FACTS = college_facts("held_out")
VALUES = {question: value for question, _, value in FACTS}


class Scripted:
    """A model whose answers are a function of the message."""

    def __init__(self, answer, max_letters=10**6):
        self._answer, self._max = answer, max_letters
        self.asked = []

    def fits(self, message):
        return len(message) <= self._max

    def answer(self, messages, progress=None):
        self.asked += messages
        return Replies([self._answer(one) for one in messages], [5] * len(messages), [9] * len(messages), 2.0)


def reads(message):
    """Give the value if it is in the passages, else refuse."""
    value = VALUES[question_in(message)]
    return f"It is {value}. [1]" if value in message.rpartition("Question: ")[0] else NOT_FOUND


def exam_of(rows):
    return Exam(judge_by_task(rows, [], VerdictRules(task="facts")))


@pytest.fixture(scope="module")
def exam():
    return exam_of([ReferenceRow(question, reference) for question, reference, _ in FACTS])


@pytest.fixture(scope="module")
def searched(tmp_path_factory, exam):
    retriever = college_index(tmp_path_factory.mktemp("index"))
    return search_all(retriever, [key.question for key in exam.keys], key_finder(exam.keys), num_passages=5)


def counts(column):
    return compare_columns([column]).counts[0]


def test_a_perfect_reader_misses_only_what_the_search_misses(exam, searched):
    """With the passages removed it refuses, so nothing is invented."""
    own = counts(measure_with_passages("m", Scripted(reads), exam, searched))
    missing = sum(not any(shown.right) for shown in searched.found)
    assert own.right == 40 - missing and own.search_misses == missing == own.refused and own.reading_misses == 0
    assert own.invented == 0 and own.num_removed == sum(one is not None for one in searched.removed) >= 39


def test_a_model_that_does_not_read_invents(exam, searched):
    """A wrong answer with the passage before it is a miss of reading, and one without it is invented."""
    own = counts(measure_with_passages("m", Scripted(lambda _: "It is 3 March 1999. [2]"), exam, searched))
    assert own.right == 0 and own.wrong == 40 and own.reading_misses > 30
    assert own.invented == own.num_removed


def test_memory_is_not_invention(exam, searched):
    """A trained model may know the answer although its passage is gone."""
    model = Scripted(lambda message: f"It is {VALUES[question_in(message)]}.")
    own = counts(measure_with_passages("m", model, exam, searched))
    assert own.right == 40 and own.invented == 0
    alone = measure_alone("m", model, exam, is_own=False)
    assert counts(alone).right == 40 and counts(alone).search_misses is None and counts(alone).invented is None
    assert alone.resources["seconds per answer"] == pytest.approx(2 / 40)


def test_a_question_that_the_search_refuses_is_not_asked(exam):
    shown = Shown([Passage("a", "A", (), "15 January")], [True], is_refused=True)
    model, one = Scripted(lambda _: "15 January"), exam_of([ReferenceRow(*FACTS[0][:2])])
    own = counts(measure_with_passages("m", model, one, SearchedQuestions([shown], [None])))
    assert not model.asked and own.refused == 1 and own.search_misses == 1


def test_passages_that_do_not_fit_are_not_counted_as_read(exam):
    """A miss of the context is not a miss of reading."""
    passages = [Passage("a", "A", (), "nothing " * 20), Passage("b", "B", (), "The deadline is 15 January.")]
    one, searched = exam_of([ReferenceRow(*FACTS[0][:2])]), SearchedQuestions([Shown(passages, [False, True])], [None])
    size = max(len(message) for message in _messages(one, searched))
    own = counts(measure_with_passages("m", Scripted(lambda _: "no idea", size - 1), one, searched))
    assert own.search_misses == 1 and own.reading_misses == 0
    with pytest.raises(UserError, match="no passage fits"):
        measure_with_passages("m", Scripted(lambda _: "", 10), one, searched)


def _messages(exam, searched):
    model = Scripted(lambda _: "")
    measure_with_passages("m", model, exam, searched)
    return model.asked


def test_yes_and_no_cannot_be_found_in_passages(tmp_path):
    """`yes` is in no passage, and `no` in many: neither says whether the passage was there."""
    exam = exam_of([ReferenceRow("Is Alderhollow College old?", "yes"), ReferenceRow("Is it new?", "no")])
    keys = exam.keys
    found = search_all(college_index(tmp_path), [key.question for key in keys], key_finder(keys))
    assert [shown.right for shown in found.found] == [None, None] and found.removed == [None, None]
    own = counts(measure_with_passages("m", Scripted(lambda _: "yes [1]"), exam, found))
    assert (own.right, own.wrong, own.search_misses, own.invented) == (1, 1, None, None)


def test_citations_are_no_part_of_an_answer(exam):
    """`[3]` is a number, and must not make `1874 [3]` an answer with two values."""
    assert not re.search(r"\[", exam.keys[0].text)
    keys = exam_of([ReferenceRow("When?", "In 1874. [3]"), ReferenceRow("When was it?", "In 1901. [2]")]).keys
    assert [key.text for key in keys] == ["1874", "1901"]
