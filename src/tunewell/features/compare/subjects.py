"""Measure the columns of a comparison: each model, its base model, and both with the passages of each index."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunewell.core.progress import Progress, ProgressListener
from tunewell.evaluation.comparison import Column
from tunewell.evaluation.passages import PassageIndex, SearchedQuestions
from tunewell.features.compare.measure import Exam, measure_alone, measure_with_passages
from tunewell.inference.batch import Answerer, ModelAnswerer, RecordedAnswerer, ServerAnswerer
from tunewell.inference.chat_model import ChatModel, open_chat_model
from tunewell.inference.model_ref import ModelRef
from tunewell.records.answers import RecordedAnswers
from tunewell.runs.state import StoredRun

TRAINING, INDEX = "training", "index"


@dataclass(frozen=True)
class Subject:
    """A run, an adapter, a model or a server that is compared."""

    name: str
    ref: ModelRef | None
    """None for a server, and for its recorded answers."""
    address: str
    recorded: RecordedAnswers | None = None


@dataclass
class SearchedIndex:
    """An index, and the passages it finds for the questions."""

    name: str
    index: PassageIndex
    searched: SearchedQuestions

    @property
    def seconds(self) -> float | None:
        return self.index.seconds


class ColumnSession:
    """Measures the columns of each subject. The base model of several runs is measured once."""

    def __init__(self, exam: Exam, indexes: list[SearchedIndex], *, device: str, progress: ProgressListener) -> None:
        self.exam, self.indexes, self.progress = exam, indexes, progress
        self.device, self.notes, self._bases = device, list[str](), dict[str, str]()
        self._price = exam.ref.loaded.config.plan.prices.get("here") if exam.ref is not None else None

    def columns(self, subject: Subject) -> Iterator[Column]:
        """Yield the columns of a subject: its base model, unless it is measured already, and itself."""
        ref = subject.ref
        if ref is None:
            kept, length = subject.recorded, self.exam.answer_tokens
            other = ServerAnswerer(subject.address, length=length) if kept is None else RecordedAnswerer(kept)
            yield from self._asked(subject.name, other, is_own=False)
            return
        self.progress(Progress(f"loading {subject.name}"))
        is_trained, is_own = ref.kind != "model", self._has_tokens_of_exam(ref)
        base = ref.started_from if is_trained else None
        is_new = base is not None and base not in self._bases
        model = open_chat_model(ref, device=self.device, with_base=is_new, backend="llama_cpp")
        self.notes += [f"{subject.name}: {note}" for note in model.notes]
        if is_new and base is not None and model.has_base:
            self._bases[base] = "base" if not self._bases else f"base {Path(base).name}"
            with model.base_runtime() as runtime:
                yield from self._asked(self._bases[base], self._answerer(model, runtime), is_own=is_own)
        yield from self._asked(
            subject.name,
            self._answerer(model, model.runtime),
            is_own=is_own,
            needs=frozenset({TRAINING} if is_trained else ()),
            seconds=StoredRun(ref.path).seconds if ref.kind == "run" and ref.path else None if is_trained else 0.0,
            is_open_book=ref.is_open_book,
        )
        model.unload()

    def _has_tokens_of_exam(self, ref: ModelRef) -> bool:
        own, other = ref.plan, self.exam.ref.plan if self.exam.ref is not None else None
        if own is None or other is None:
            return self.exam.ref is ref
        return (own.tokenizer_sha256, own.template_sha256s) == (other.tokenizer_sha256, other.template_sha256s)

    def _answerer(self, model: ChatModel, runtime: Any) -> Answerer:
        sources = model.ref.loaded.config.data.sources
        system = sources[0].system if sources else None
        return ModelAnswerer(model, runtime, length=self.exam.answer_tokens, system=system)

    def _asked(
        self,
        name: str,
        model: Answerer,
        *,
        is_own: bool,
        needs: frozenset[str] = frozenset(),
        seconds: float | None = 0.0,
        is_open_book: bool = False,
    ) -> Iterator[Column]:
        """Yield the columns of a model alone and with each index; `seconds` is the time of its preparation."""
        if not (is_open_book and self.indexes):
            column = measure_alone(name, model, self.exam, is_own=is_own, needs=needs, progress=self.progress)
            yield self._with_cost(column, seconds)
        if self.indexes and isinstance(model, RecordedAnswerer):
            self.notes.append(f"{name}: its answers were recorded without passages")
            return
        for index in self.indexes:
            total = None if seconds is None or index.seconds is None else seconds + index.seconds
            column = measure_with_passages(
                f"{name} + {index.name}",
                model,
                self.exam,
                index.searched,
                needs=needs | {INDEX},
                progress=self.progress,
            )
            yield self._with_cost(column, total)

    def _with_cost(self, column: Column, seconds: float | None) -> Column:
        answer, price = column.resources["seconds per answer"], self._price
        resources = {**column.resources, "preparation, seconds": seconds}
        if price is not None:
            resources["preparation, cost"] = None if seconds is None else price * seconds / 3600
            resources["1,000 answers, cost"] = None if answer is None else price * 1000 * answer / 3600
        return replace(column, resources=resources)
