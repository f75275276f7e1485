"""Facts: an answer is right if it states the key of its question, in any words around it."""

from collections.abc import Sequence

from tunewell.scoring.answer_keys import answer_keys
from tunewell.scoring.base import ReferenceRow, Score, Scorer
from tunewell.scoring.judge import judge


class Facts(Scorer):
    """Answer keys, derived from references of the same form."""

    def __init__(self, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow]) -> None:
        self.keys = answer_keys(asked, others=[row.reference for row in training])
        self.expected = [key.text if key.is_judged else "" for key in self.keys]

    def score(self, index: int, answer: str) -> Score:
        """Judge the answer by the key of the question."""
        return judge(answer, self.keys[index])
