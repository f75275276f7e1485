"""Facts: an answer is right if it states the key of its question, in any words around it."""

from collections.abc import Sequence

from tunewell.scoring.answer_keys import answer_keys
from tunewell.scoring.base import ReferenceRow, Score
from tunewell.scoring.judge import judge


class Facts:
    """Answer keys, derived from references of the same form."""

    def __init__(self, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow]) -> None:
        self.keys = answer_keys(asked, others=[row.reference for row in training])
        self.expected = [key.text if key.is_judged else "" for key in self.keys]
        self.hint = ""

    def score(self, index: int, answer: str) -> Score:
        """Judge the answer by the key of the question."""
        found = judge(answer, self.keys[index])
        return Score(found.is_right, found.because, is_refusal=found.is_refusal)

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return no further figures."""
        return {}
