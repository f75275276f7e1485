"""Ask models the same questions, with and without documents, compare the answers, and recommend one."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from tunewell.config.schema import SourceConfig
from tunewell.core.errors import UserError
from tunewell.core.features import find_hook, require_hook
from tunewell.core.files import is_url
from tunewell.core.progress import Progress, ProgressListener, with_stage
from tunewell.core.text import fold, shorten_line
from tunewell.core.units import count
from tunewell.data.question_rows import read_questions
from tunewell.evaluation.comparison import ColumnComparison, UsedKey, compare_columns
from tunewell.evaluation.passages import Shown, key_finder
from tunewell.evaluation.rows import EvaluationSet
from tunewell.features.compare.measure import Exam, read_exam
from tunewell.features.compare.model_judge import ModelJudge, read_labels
from tunewell.features.compare.options import CompareOptions
from tunewell.features.compare.recommendation import MIN_QUESTIONS, recommend
from tunewell.features.compare.subjects import ColumnSession, SearchedIndex, Subject
from tunewell.inference.chat_model import open_without_weights
from tunewell.inference.model_ref import ModelRef
from tunewell.records.answers import is_answers_file, read_answers
from tunewell.runs.resolve import resolve_model

_NUM_KEYS = 5

OpenRows = Callable[[ModelRef], AbstractContextManager[EvaluationSet]]
"""Open the rows to test on: the held-out rows of a run, or those of a file, in the tokens of the model."""


def compare_answers(
    names: Sequence[str | Path], options: CompareOptions, open_rows: OpenRows, progress: ProgressListener
) -> ColumnComparison:
    """Ask every model every question, alone and with each index, and compare the answers."""
    judge, judge_notes = _judge(options)
    subjects = _subjects(names)
    addresses = dict.fromkeys(options.indexes)
    opened = [require_hook("retrieval", "open_index", needed_by="an index")(address) for address in addresses]
    exam, notes = _exam(subjects, options, open_rows, progress)
    questions, finder, indexes = [key.question for key in exam.keys], key_finder(exam.keys), list[SearchedIndex]()
    for name, index in zip(_index_names([index.address for index in opened]), opened, strict=True):
        listen = with_stage(progress, f"searching {name}: {count(len(questions), 'question')}")
        found = index.search_all(questions, finder, num_passages=options.num_passages, progress=listen)
        indexes.append(SearchedIndex(name, index, found))
        notes += [*index.notes, *_index_notes(indexes[-1], exam)]
    notes += [note for subject in subjects for note in _book_notes(subject, indexes)]
    session = ColumnSession(exam, indexes, device=options.device, progress=progress)
    columns = [column for subject in subjects for column in session.columns(subject)]
    if judge is not None:
        columns = [judge.judged(column, progress) for column in columns]
    comparison = compare_columns(columns, [*notes, *judge_notes, *session.notes], has_all_pairs=True)
    keys = [UsedKey(key.question, key.text, key.because) for key in exam.keys[:_NUM_KEYS]]
    return replace(comparison, recommendation=recommend(comparison), keys=keys, rows=exam.rows)


def _index_names(addresses: list[str]) -> list[str]:
    """Return the names of the indexes in columns: their folders, or their addresses if two have the same name."""
    if len(addresses) == 1:
        return ["retrieval"]
    names = [Path(address.rpartition("#")[2] or address).name for address in addresses]
    return [name if names.count(name) == 1 else address for name, address in zip(names, addresses, strict=True)]


def _index_notes(index: SearchedIndex, exam: Exam) -> list[str]:
    """Return a note if the search settings were chosen on questions of the test, and if these are in the documents."""
    notes, number, path = list[str](), count(len(exam.keys), "question"), index.index.tuned_on
    if known := 0 if path is None else _num_known([path], Path(), exam):
        notes.append(
            f"{count(known)} of {number} also chose the search settings of {index.name} (`index --questions`), so its "
            "results are too optimistic"
        )
    if known := sum(_is_in(key.question, one) for key, one in zip(exam.keys, index.searched.found, strict=True)):
        notes.append(
            f"{count(known)} of {number} are in the documents word for word; if the index contains the test rows, its "
            "results are too optimistic"
        )
    return notes


def _is_in(question: str, shown: Shown) -> bool:
    return any(fold(question).strip() in fold(passage.text) for passage in shown.passages)


def _judge(options: CompareOptions) -> tuple[ModelJudge | None, list[str]]:
    """Return the judge model and its agreement with labelled answers, measured before any other model is asked."""
    if options.judge is None:
        return None, []
    if options.labels is None:
        raise UserError(
            "a judge model needs answers that a person has judged, to measure it by",
            fix='add `--labels FILE` with lines like {"question", "reference", "answer", "right": true}',
        )
    judge = ModelJudge(options.judge)
    return judge, [judge.agreement(read_labels(options.labels))]


def _subjects(names: Sequence[str | Path]) -> list[Subject]:
    if len(set(map(str, names))) < len(names):
        raise UserError("a run or model is named twice", fix="name each once")
    subjects = []
    for name in names or [None]:
        label, ref, recorded = str(name).rpartition("#")[2] or str(name), None, None
        if name is not None and is_answers_file(Path(name)):
            recorded = read_answers(Path(name))
            label = recorded.model
        elif name is None or not is_url(str(name)):
            ref = resolve_model(name)
            label = ref.path.resolve().name if ref.path is not None else ref.name
        subjects.append(Subject(label, ref, str(name), recorded))
    labels = [subject.name for subject in subjects]
    return [one if labels.count(one.name) == 1 else replace(one, name=one.address) for one in subjects]


def _exam(
    subjects: list[Subject], options: CompareOptions, open_rows: OpenRows, progress: ProgressListener
) -> tuple[Exam, list[str]]:
    """Return the questions: those of the file, or the held-out rows of the first run."""
    # A run comes first, because it has held-out rows.
    refs = sorted((one.ref for one in subjects if one.ref is not None), key=lambda ref: ref.kind != "run")
    ref = refs[0] if refs else None
    if ref is None or (ref.kind != "run" and options.data is None):
        raise UserError(
            "there are no questions to compare on: none of the models is a run with held-out rows",
            fix="add `--data rows.jsonl`, a file of questions with answers that no model was trained on"
            + ("; name at least one local model, whose tokenizer reads it" if ref is None else ""),
        )
    progress(Progress("reading the questions"))
    with open_rows(ref) as rows:
        model = open_without_weights(ref, device=options.device)
        exam = read_exam(model, rows, number=options.num_questions, needs_keys=options.judge is None)
    notes = list(rows.notes)
    shown = ", ".join(f'"{shorten_line(key.text, 40)}"' for key in exam.keys[:3] if key.text)
    few = f" (a recommendation needs {MIN_QUESTIONS})" if len(exam.keys) < MIN_QUESTIONS else ""
    progress(Progress(f"judging {count(len(exam.keys), 'answer')}{few} by keys such as {shown}"))
    for subject in subjects if options.data is not None else []:
        run = subject.ref.loaded if subject.ref is not None and subject.ref.kind == "run" else None
        if run is not None and (known := _num_known(run.config.data.sources, run.base, exam)):
            notes.append(
                f"{count(known)} of {count(len(exam.keys), 'question')} are in the training rows of {subject.name}, "
                "so its results are too optimistic"
            )
    return exam, notes


def _num_known(sources: Sequence[str | SourceConfig], base: Path, exam: Exam) -> int:
    """Return the number of questions that are in some files of rows. Files that no longer exist are skipped."""
    known = set[str]()
    for source in sources:
        with suppress(UserError):  # the rows were moved or deleted
            known |= {fold(one.text).strip() for one in read_questions(source, base=base)}
    return sum(fold(key.question).strip() in known for key in exam.keys)


def _book_notes(subject: Subject, indexes: list[SearchedIndex]) -> list[str]:
    """Return a note on the questions about documents that an open-book run was trained on."""
    ref = subject.ref
    held_out_documents = find_hook("retrieval", "held_out_documents")
    if held_out_documents is None or ref is None or not ref.is_open_book or not indexes:
        return []
    if (unseen := held_out_documents(ref.loaded)) is None:
        return []
    found = indexes[0].searched.found
    shown = [list(zip(one.passages, one.right, strict=True)) for one in found if one.right is not None]
    seen = sum(any(is_right and passage.file not in unseen for passage, is_right in pairs) for pairs in shown)
    if not seen:
        return []
    return [
        f"{count(seen)} of {count(len(shown), 'question')} are about documents that {subject.name} was trained on; "
        "only the others measure reading"
    ]
