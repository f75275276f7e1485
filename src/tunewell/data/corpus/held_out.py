"""Choose the held-out questions of a corpus, and keep them when it is built again.

Questions are ordered by their hash. `auto` holds out those in the lowest 5% of all hashes, which do not depend on other
rows, and tops them up to 20 with the next ones, but holds out at most a quarter:

    hash      0 |-- 5% --|-- up to 20 questions --|------------- trained on -------------| 2**64
                 for good   kept in the corpus, so that rows which are added later do not push them out

Without the second part, few rows could not be judged. If it were not kept, a later model would be trained on questions
on which an earlier one was tested, and their scores could not be compared.
"""

from pathlib import Path

import numpy as np

from tunewell.core.arrays import Hashes
from tunewell.core.errors import UserError
from tunewell.core.files import sha256_file
from tunewell.records.manifest import QUESTIONS, read_manifest

MIN_AUTO = 20
"""Questions that `auto` holds out of 80 to 400: a share of right answers among 20 has a standard error of at most 11
percentage points."""
AUTO_SHARE, MAX_AUTO_SHARE = 0.05, 0.25
_MIN_OF_SHARE = 2
"""Questions that a share holds out of a small data set, if it has at least eight."""
_TWO_64 = float(2**64)


def num_auto(num_questions: int) -> int:
    """Return about how many questions `data.held_out: auto` holds out: 20 or 5%, but at most a quarter."""
    return min(max(MIN_AUTO, round(num_questions * AUTO_SHARE)), int(num_questions * MAX_AUTO_SHARE))


def choose_auto(questions: Hashes, held_out_before: Hashes) -> Hashes:
    """Return the held-out questions: the smallest of these distinct hashes, and those that were held out before.

    If rows were removed until earlier test questions are most of the data, those are not held out again.
    """
    in_share = int((questions / _TWO_64 < AUTO_SHARE).sum())
    number = min(max(MIN_AUTO, in_share), int(len(questions) * MAX_AUTO_SHARE))
    smallest = np.sort(questions)[:number]
    chosen = np.union1d(smallest, np.intersect1d(questions, held_out_before))
    return chosen if len(chosen) <= len(questions) // 2 else smallest


def choose_share(questions: Hashes, share: float) -> Hashes:
    """Return the questions in the lowest `share` of all hashes: at least two of eight, and never most of them."""
    questions = np.sort(questions)
    chosen = int((questions / _TWO_64 < share).sum())
    number = min(max(chosen, min(_MIN_OF_SHARE, len(questions) // 4)), len(questions) // 2)
    return questions[:number]


def write_questions(corpus: Path, questions: Hashes) -> None:
    """Write the hashes of all questions that were ever held out to the corpus, for the next build."""
    if len(questions):
        (corpus / QUESTIONS).parent.mkdir(exist_ok=True)
        (corpus / QUESTIONS).write_bytes(np.sort(questions).astype("<u8").tobytes())


def read_questions(corpus: Path) -> Hashes:
    """Return the questions that were held out of the corpora in this folder; none if it is missing or damaged."""
    nothing = np.zeros(0, dtype=np.uint64)
    try:
        record = read_manifest(corpus).files.get(QUESTIONS)
        if record is None or sha256_file(corpus / QUESTIONS) != record.sha256:
            return nothing
        return np.fromfile(corpus / QUESTIONS, dtype="<u8").astype(np.uint64)
    except (UserError, OSError):
        return nothing
