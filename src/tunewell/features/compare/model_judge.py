"""A model on a server that judges answers, used only if it is named, and measured on labelled answers."""

import json
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

from tunewell.core.errors import UserError
from tunewell.core.files import read_text
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.units import count, percent
from tunewell.evaluation.comparison import Column, ColumnAnswer
from tunewell.inference.chat import ChatOptions
from tunewell.inference.remote import RemoteChat
from tunewell.scoring.answer_keys import polarity

_MIN_LABELS = 10
_TASK = (
    "Is the answer to the question right? Compare it with the reference: other words are fine, other facts are not. "
    "Reply with one word: yes or no."
)


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer that a person has judged."""

    question: str
    reference: str
    answer: str
    right: bool


def read_labels(path: str | Path) -> list[LabelledAnswer]:
    """Read JSON lines with `question`, `reference`, `answer` and `right`; raise UserError if there are too few."""
    found: list[LabelledAnswer] = []
    try:
        lines = read_text(Path(path).expanduser()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"`{path}` cannot be read: {error}", fix="give a file of labelled answers") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            texts = [str(row[name]) for name in ("question", "reference", "answer")]
            if not isinstance(row["right"], bool):
                raise TypeError
            found.append(LabelledAnswer(*texts, right=row["right"]))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"`{path}` line {number} is not a labelled answer",
                fix='write lines like {"question": "...", "reference": "...", "answer": "...", "right": true}',
            ) from None
    if len(found) < _MIN_LABELS:
        raise UserError(
            f"`{path}` has {count(len(found), 'labelled answer')}, too few to measure a judge by",
            fix=f"label at least {_MIN_LABELS} answers",
        )
    return found


class ModelJudge:
    """Asks a server whether answers are right."""

    def __init__(self, address: str) -> None:
        self.name = address
        self._options = ChatOptions(length=8)
        RemoteChat(address, self._options)  # raises UserError for an address without a model

    def is_right(self, question: str, reference: str, answer: str) -> bool | None:
        """Return the model's judgement; None if it says neither yes nor no."""
        message = f"{_TASK}\n\nQuestion: {question}\nReference: {reference}\nAnswer: {answer}"
        reply = "".join(RemoteChat(self.name, self._options).reply(message)).split()
        said = polarity(reply[0]) if reply else None
        return None if said is None else said == "yes"

    def agreement(self, labels: list[LabelledAnswer]) -> str:
        """Return how often the judge agrees with a person, in one sentence."""
        found = [self.is_right(one.question, one.reference, one.answer) for one in labels]
        agree = sum(own == one.right for own, one in zip(found, labels, strict=True))
        shown = f"{count(agree)} of {count(len(labels), 'labelled answer')} ({percent(agree / len(labels), 0)})"
        return f"judged by `{self.name}`, which agrees with a person on {shown}"

    def judged(self, column: Column, progress: ProgressListener = silent) -> Column:
        """Return a column with the model's judgements. Refusals stay as they are."""
        answers: dict[Hashable, ColumnAnswer] = {}
        for number, (key, answer) in enumerate(column.answers.items()):
            progress(Progress(f"judging {column.name}", number, len(column.answers), "answers"))
            question, reference = column.questions[key]
            is_kept = answer.refused and not answer.right
            right = answer.right if is_kept else self.is_right(question, reference, answer.text)
            answers[key] = replace(answer, right=right)
        return replace(column, answers=answers)
