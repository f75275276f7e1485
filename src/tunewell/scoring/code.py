"""SQL queries and shell commands: an answer is right if it equals the reference, apart from spacing.

One request can have many right commands, so this is a lower bound. A function of the user can run them instead:
`verdict.task: file.py:function`.
"""

import re
from collections.abc import Sequence

from tunewell.core.text import fold
from tunewell.scoring.base import ReferenceRow, Score, Scorer, said_pairs, without_fence

_PROMPT = re.compile(r"^\$\s+")


class Command(Scorer):
    """Shell commands: equal apart from spacing; case counts."""

    def __init__(self, asked: Sequence[ReferenceRow], training: Sequence[ReferenceRow]) -> None:
        self._accepted = [[self.normal(text) for text in (row.reference, *row.answers)] for row in asked]
        self.expected = [accepted[0] for accepted in self._accepted]

    def normal(self, text: str) -> str:
        """Return a command on one line without a prompt sign."""
        return " ".join(_PROMPT.sub("", without_fence(text)).split())

    def score(self, index: int, answer: str) -> Score:
        """Compare the normalised answer with the reference."""
        accepted, found = self._accepted[index], self.normal(answer)
        if not accepted[0]:
            return Score(None, "the reference is empty")
        return Score(found in accepted, "equal" if found in accepted else "different", said=found.partition(" ")[0])

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return the share of answers that begin with the program of the reference."""
        pairs = said_pairs([text.partition(" ")[0] for text in self.expected], scores)
        return {"same program": sum(one == other for one, other in pairs) / len(pairs)} if pairs else {}


class Sql(Command):
    """SQL queries: equal apart from case, spacing and a final semicolon."""

    def normal(self, text: str) -> str:
        return " ".join(fold(without_fence(text)).split()).rstrip("; ")

    def measures(self, scores: Sequence[Score]) -> dict[str, float]:
        """Return no further figures."""
        return {}
