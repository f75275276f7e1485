"""Replay: everyday prompts with the base model's own answers, drawn among the training rows so that it forgets less.

    documents   0 ... rows of the corpus ... n-1 | n ... everyday prompts ... n+199

The order of the data is fixed before the answers are known, with the largest size that a replayed document may have.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunewell.core.arrays import Ints, SmallInts
from tunewell.core.files import read_text
from tunewell.data.batches import TokenizedDocuments

MAX_TOKENS, ANSWER_TOKENS = 128, 64
"""Most tokens of a replayed document, and of the answer in it."""
NUM_PROMPTS = 200
_MEAN_TOKENS = 96
"""Usual size of a replayed document: a short prompt with the template, and an answer of up to 64 tokens."""

Replayed = tuple[list[int], list[int]]
"""A prompt and the base model's answer, as token ids; the answer has its stop token, if it ended."""


@cache
def replay_prompts() -> list[str]:
    """Return the everyday prompts. They share no question with those by which forgetting is measured."""
    return read_text(Path(__file__).with_name("replay_prompts.txt")).splitlines()


def with_replayed(lengths: Ints, share: float) -> tuple[Ints, int]:
    """Return the lengths of all documents with the replayed ones, and how many of these an epoch has."""
    number = max(1, round(share / (1 - share) * int(lengths.sum()) / _MEAN_TOKENS))
    return np.append(lengths, np.full(NUM_PROMPTS, MAX_TOKENS)), number


class WithReplay:
    """The documents of a corpus, followed by `NUM_PROMPTS` replayed ones, some of them twice if there are fewer."""

    def __init__(self, documents: TokenizedDocuments, replay: Sequence[Replayed]) -> None:
        self._documents, self._num_rows = documents, len(documents)
        self._replay = [replay[index % len(replay)] for index in range(NUM_PROMPTS)]
        answers = [len(answer) for _, answer in self._replay]
        more = {"supervised": answers, "length": [len(prompt) + len(answer) for prompt, answer in self._replay]}
        self.index: Any = {name: np.append(documents.index[name], values) for name, values in more.items()}

    def __len__(self) -> int:
        return self._num_rows + NUM_PROMPTS

    def arrays(self, index: int) -> tuple[SmallInts, SmallInts]:
        """Return the ids and labels of a document. Only the answer of a replayed one is supervised."""
        if index < self._num_rows:
            return self._documents.arrays(index)
        prompt, answer = self._replay[index - self._num_rows]
        return np.array(prompt + answer, dtype=np.int32), np.array([-100] * len(prompt) + answer, dtype=np.int32)
