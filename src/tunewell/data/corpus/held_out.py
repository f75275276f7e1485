"""Choose the held-out questions of a corpus, and keep them when it is built again.

Questions are ordered by their hash. `auto` holds out those in the lowest 5% of all hashes, which do not depend on other
rows, and tops them up to 20 with the next ones, but holds out at most a quarter:

    hash      0 |-- 5% --|-- up to 20 questions --|------------- trained on -------------| 2**64
                 for good   kept in the corpus, so that rows which are added later do not push them out

Without the second part, few rows could not be judged. If it were not kept, a later model would be trained on questions
on which an earlier one was tested, and their scores could not be compared.

The *selection slice* is taken out of the other rows: checkpoints are chosen on it, and never on held-out questions. Its
questions have the highest hashes, so that rows which are added later do not move it into the held-out questions.
"""

from pathlib import Path

import numpy as np

from tunewell.core.arrays import Bools, Hashes
from tunewell.core.errors import UserError
from tunewell.core.files import sha256_file
from tunewell.core.units import count, percent
from tunewell.records.manifest import QUESTIONS, read_manifest
from tunewell.records.plan import Chosen

MIN_AUTO = 20
"""Questions that `auto` holds out of 80 to 400: a share of right answers among 20 has a standard error of at most 11
percentage points."""
AUTO_SHARE, MAX_AUTO_SHARE = 0.05, 0.25
_MIN_OF_SHARE = 2
"""Questions that a share holds out of a small data set, if it has at least eight."""
MIN_SELECTION, MAX_SELECTION, SELECTION_SHARE = 20, 200, 0.05
"""Rows that `data.selection: auto` takes. With fewer than 20, the standard error of a share is over 11 percentage
points, so that checkpoints cannot be compared. With 200 it is 3 points, and an evaluation reads no more rows."""
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


def num_selected(setting: float | str, num_rows: int) -> Chosen[int]:
    """Return how many of the training rows `data.selection` takes, with the reason."""
    if isinstance(setting, str):
        number, share = round(num_rows * SELECTION_SHARE), f"{percent(SELECTION_SHARE, 0)} of {count(num_rows, 'row')}"
        if number < MIN_SELECTION:
            because = f"{share} are fewer than {MIN_SELECTION}, too few to compare checkpoints: the last one is used"
            return Chosen(0, because=because)
        return Chosen(min(number, MAX_SELECTION), because=f"{share}, at most {MAX_SELECTION}, to compare checkpoints")
    number = min(round(num_rows * setting if setting < 1 else setting), num_rows // 2)
    return Chosen(number, because="set by `data.selection`" + ("" if number else ": the last checkpoint is used"))


def choose_selected(questions: Hashes, replies: Hashes, number: int) -> Bools:
    """Return which rows are selected: about `number`, with all rows of a question, and each reply with its share.

    The rows of a reply are ordered by the hashes of their questions, and one of every N is taken, from a start that
    depends on the hash of the reply.
    """
    asked, first, sizes = np.unique(questions, return_index=True, return_counts=True)
    said = replies[first]
    order = np.lexsort((~asked, said))
    begins = np.flatnonzero(np.diff(said[order], prepend=~said[order[:1]]))
    in_group = np.diff(np.append(begins, len(order)))
    rank = np.arange(len(order)) - np.repeat(begins, in_group)
    place = (rank + said[order] / _TWO_64) / np.repeat(in_group, in_group)
    order = order[np.argsort(place, kind="stable")]
    order = order[sizes[order] <= max(1, number // 4)]  # no question fills the slice
    chosen = order[np.cumsum(sizes[order]) <= number]
    return np.isin(questions, asked[chosen])


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
