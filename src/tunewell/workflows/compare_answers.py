"""`tunewell compare --index`: ask models the same questions, with and without documents, and recommend one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import is_url
from tunewell.core.progress import Progress, ProgressListener, with_stage
from tunewell.core.units import count
from tunewell.evaluation.columns import Column, ColumnComparison, UsedKey, compare_columns
from tunewell.evaluation.measurements import shorten
from tunewell.evaluation.recommendation import MIN_QUESTIONS, recommend
from tunewell.evaluation.session import ValidateOptions
from tunewell.inference.batch import Answerer, ModelAnswerer, ServerAnswerer
from tunewell.inference.chat_model import ChatModel, open_chat_model, open_without_weights
from tunewell.inference.degeneration import fold
from tunewell.inference.model_ref import ModelRef
from tunewell.retrieval.measure import Exam, measure_alone, measure_with_passages, read_exam
from tunewell.retrieval.questions import read_questions
from tunewell.retrieval.search import Retriever, open_retriever
from tunewell.retrieval.shown import SearchedQuestions, key_finder, search_all
from tunewell.retrieval.stores.base import shown_address
from tunewell.runs.resolve import resolve_model
from tunewell.workflows.compare import CompareOptions, training_seconds
from tunewell.workflows.validate import evaluation_set

_NUM_KEYS = 5
TRAINING, INDEX = "training", "index"


@dataclass(frozen=True)
class _Subject:
    """A run, an adapter, a model or a server that is compared."""

    name: str
    ref: ModelRef | None
    """None for a server."""
    address: str


@dataclass
class _Index:
    """An index, and the passages it finds for the questions."""

    name: str
    retriever: Retriever
    searched: SearchedQuestions

    @property
    def seconds(self) -> float | None:
        return self.retriever.store.manifest.seconds


def compare_answers(
    names: Sequence[str | Path], options: CompareOptions, progress: ProgressListener
) -> ColumnComparison:
    """Ask every model every question, alone and with each index, and compare the answers."""
    subjects = _subjects(names)
    opened = [(shown_address(address), open_retriever(address)) for address in dict.fromkeys(options.indexes)]
    exam, notes = _exam(subjects, options, progress)
    questions = [key.question for key in exam.keys]
    indexes = []
    for address, retriever in opened:
        name = "retrieval" if len(opened) == 1 else Path(address.rpartition("#")[2] or address).name
        listen = with_stage(progress, f"searching {name}: {count(len(questions), 'question')}")
        finder = key_finder(exam.keys)
        found = search_all(retriever, questions, finder, num_passages=options.num_passages, progress=listen)
        indexes.append(_Index(name, retriever, found))
    session = _Session(exam, indexes, options, progress, subjects[0])
    columns = [column for subject in subjects for column in session.columns(subject)]
    notes += session.notes
    comparison = compare_columns(columns, notes, has_all_pairs=True)
    keys = [UsedKey(key.question, key.text, key.because) for key in exam.keys[:_NUM_KEYS]]
    return replace(comparison, recommendation=recommend(comparison), keys=keys)


def _subjects(names: Sequence[str | Path]) -> list[_Subject]:
    if len(set(map(str, names))) < len(names):
        raise UserError("a run or model is named twice", fix="name each once")
    subjects = []
    for name in names or [None]:
        if name is not None and is_url(str(name)):
            subjects.append(_Subject(str(name).rpartition("#")[2] or str(name), None, str(name)))
            continue
        ref = resolve_model(name)
        label = ref.path.resolve().name if ref.path is not None else ref.name
        subjects.append(_Subject(label, ref, str(name)))
    labels = [subject.name for subject in subjects]
    return [
        replace(subject, name=subject.name if labels.count(subject.name) == 1 else subject.address)
        for subject in subjects
    ]


def _exam(subjects: list[_Subject], options: CompareOptions, progress: ProgressListener) -> tuple[Exam, list[str]]:
    """Return the questions: those of the file, or the held-out rows of the first run."""
    refs = [subject.ref for subject in subjects if subject.ref is not None]
    ref = next((one for one in refs if one.kind == "run"), refs[0] if refs else None)
    if ref is None or (ref.kind != "run" and options.data is None):
        raise UserError(
            "there are no questions to compare on: none of the models is a run with held-out rows",
            fix="add `--data rows.jsonl`, a file of questions with answers that no model was trained on"
            + ("; name at least one local model, whose tokenizer reads it" if ref is None else ""),
        )
    progress(Progress("reading the questions"))
    with evaluation_set(ref, ValidateOptions(data=options.data)) as rows:
        exam = read_exam(open_without_weights(ref, device=options.device), rows, number=options.num_questions)
        notes = list(rows.notes)
    shown = ", ".join(f'"{shorten(key.text, 40)}"' for key in exam.keys[:3] if key.text)
    progress(Progress(f"judging {count(len(exam.keys), 'answer')} by keys such as {shown}"))
    if len(exam.keys) < MIN_QUESTIONS:
        notes.append(f"{count(len(exam.keys), 'question')} are few: at least {MIN_QUESTIONS} are needed for a choice")
    for subject in subjects if options.data is not None else []:
        if subject.ref is not None and (known := _num_trained_on(subject.ref, exam)):
            notes.append(
                f"{count(known)} of {count(len(exam.keys), 'question')} are in the training rows of {subject.name}, "
                "which therefore looks too good"
            )
    return exam, notes


def _num_trained_on(ref: ModelRef, exam: Exam) -> int:
    """Return how many questions are in the training rows of a run, as far as its files are still there."""
    sources = ref.loaded.config.data.sources if ref.kind == "run" else ()
    trained: set[str] = set()
    for source in sources:
        try:
            trained |= {fold(one.text).strip() for one in read_questions(source, base=ref.loaded.base)}
        except UserError:
            continue  # the rows were moved or deleted
    return sum(fold(key.question).strip() in trained for key in exam.keys)


class _Session:
    """Measures the columns of each subject. The base model of several runs is measured once."""

    def __init__(
        self, exam: Exam, indexes: list[_Index], options: CompareOptions, progress: ProgressListener, first: _Subject
    ) -> None:
        self.exam, self.indexes, self.options, self.progress = exam, indexes, options, progress
        self.first, self.notes = first, list[str]()
        self._bases: dict[str, str] = {}
        prices = first.ref.loaded.config.plan.prices if first.ref is not None else {}
        self._price = prices.get("here")

    def columns(self, subject: _Subject) -> Iterator[Column]:
        """Yield the columns of a subject: its base model, unless it is measured already, and itself."""
        if subject.ref is None:
            server = ServerAnswerer(subject.address, length=self.exam.answer_tokens)
            yield from self._asked(subject.name, server, is_own=False, needs=frozenset(), seconds=0.0)
            return
        ref = subject.ref
        self.progress(Progress(f"loading {subject.name}"))
        base = None if ref.kind == "model" else ref.started_from
        is_new = base is not None and base not in self._bases
        model = open_chat_model(ref, device=self.options.device, with_base=is_new, backend="llama_cpp")
        self.notes += [f"{subject.name}: {note}" for note in model.notes]
        is_own = self._has_tokens_of_exam(ref)
        if is_new and base is not None and model.has_base:
            self._bases[base] = "base" if not self._bases else f"base {Path(base).name}"
            with model.base_runtime() as runtime:
                answerer = self._answerer(model, runtime)
                yield from self._asked(self._bases[base], answerer, is_own=is_own, needs=frozenset(), seconds=0.0)
        is_trained = ref.kind != "model"
        needs = frozenset({TRAINING} if is_trained else ())
        seconds = training_seconds(ref.path) if ref.kind == "run" and ref.path else None if is_trained else 0.0
        yield from self._asked(
            subject.name,
            self._answerer(model, model.runtime),
            is_own=is_own,
            needs=needs,
            seconds=seconds,
            is_open_book=ref.is_open_book,
        )
        model.unload()

    def _has_tokens_of_exam(self, ref: ModelRef) -> bool:
        first, plan = self.first.ref, ref.plan
        if first is ref:
            return True
        if first is None or first.plan is None or plan is None:
            return False
        own, others = (plan.tokenizer_sha256, plan.template_sha256s), first.plan
        return own == (others.tokenizer_sha256, others.template_sha256s)

    def _answerer(self, model: ChatModel, runtime: Any) -> Answerer:
        sources = model.ref.loaded.config.data.sources
        return ModelAnswerer(
            model, runtime, length=self.exam.answer_tokens, system=sources[0].system if sources else None
        )

    def _asked(
        self,
        name: str,
        model: Answerer,
        *,
        is_own: bool,
        needs: frozenset[str],
        seconds: float | None,
        is_open_book: bool = False,
    ) -> Iterator[Column]:
        if not (is_open_book and self.indexes):
            resources = {"preparation, seconds": seconds}
            column = measure_alone(
                name, model, self.exam, is_own=is_own, needs=needs, resources=resources, progress=self.progress
            )
            yield self._with_cost(column)
        for index in self.indexes:
            total = None if seconds is None or index.seconds is None else seconds + index.seconds
            column = measure_with_passages(
                f"{name} + {index.name}",
                model,
                self.exam,
                index.searched,
                needs=needs | {INDEX},
                resources={"preparation, seconds": total},
                progress=self.progress,
            )
            yield self._with_cost(column)

    def _with_cost(self, column: Column) -> Column:
        if self._price is None:
            return column
        made, answer = (column.resources.get(name) for name in ("preparation, seconds", "seconds per answer"))
        cost = {
            "preparation, cost": None if made is None else self._price * made / 3600,
            "1,000 answers, cost": None if answer is None else self._price * 1000 * answer / 3600,
        }
        return replace(column, resources={**column.resources, **cost})
