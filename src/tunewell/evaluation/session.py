"""One judgement: the tuned model and its base, measured side by side on the same documents and questions."""

import gc
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunewell.config.rules import VerdictRules
from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, with_stage
from tunewell.core.units import count
from tunewell.data.corpus.reader import Split
from tunewell.evaluation.everyday import everyday_texts
from tunewell.evaluation.lm_eval import run_tasks
from tunewell.evaluation.measurements import Measurements, count_answers
from tunewell.evaluation.provenance import Provenance, make_report
from tunewell.evaluation.side_by_side import (
    ModelMeasurements,
    answered_questions,
    logits_change,
    loss_pair,
    losses_by_source,
)
from tunewell.evaluation.verdict import decide_verdict
from tunewell.hardware.threads import torch_threads
from tunewell.inference.chat_model import Backend, ChatModel, open_chat_model, open_without_weights
from tunewell.inference.model_ref import ModelRef
from tunewell.inference.runtime import Runtime, TextDocuments, nonfinite_weights_in
from tunewell.records.plan import Chosen
from tunewell.records.report import AnsweredQuestion, Report
from tunewell.training.held_out import Question, questions_of

_NUM_COMPARED = 8
"""Prompts whose logits are compared with the base model's: a change that shows in none of them changes nothing."""
_LEAST_ANSWER, _MOST_ANSWER = 32, 512


@dataclass(frozen=True)
class EvaluationSet:
    """What a model is judged on."""

    split: Split | None
    name: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class ValidateOptions:
    """What is to be judged, and how; everything has a default."""

    data: str | Path | None = None
    """Rows to judge on; by default the held-out rows of a run."""
    corpus: Path | None = None
    """A corpus whose held-out rows are judged on, in place of the run's own."""
    checkpoint: str = "best"
    base: str | None = None
    template: str | None = None
    device: str = "auto"
    out: Path | None = None
    """Where the report goes; by default into the run's folder."""
    sets: Sequence[str] = ()
    allow_pickle: bool = False
    lm_eval: Sequence[str] = ()


class EvaluationSession:
    """One judgement, from loading to the report."""

    def __init__(
        self, subject: ModelRef, order: ValidateOptions, material: EvaluationSet, progress: ProgressListener
    ) -> None:
        self.subject, self.order, self.material, self.progress = subject, order, material, progress
        self.rules: VerdictRules = subject.loaded.config.verdict
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = list(material.notes)
        self.lm_eval: dict[str, Any] = {}
        self.questions: list[Question] = []
        self.answer_tokens = _answer_tokens(self.rules, 0)

    def judge(self) -> Report:
        """Measure the tuned model and its base, and make the report of it."""
        base = ModelMeasurements()
        with self._timed("load"):
            voice, bad = self._open_and_check()
        if bad:
            self.notes.append("nothing else was measured: with such weights every number is noise")
            return self._report(voice, base, None, bad)
        self._prepare_questions(voice)
        tuned = self._measure(voice, voice.runtime, "tuned")
        if self.order.lm_eval:
            with self._timed("lm-eval"):
                self._run_tasks(voice)
        if voice.can_disable_adapter:
            with voice.base_runtime() as runtime:
                base = self._measure(voice, runtime, "base")
        elif self.subject.base is not None:
            base = self._measure_apart(voice)
        return self._report(voice, base, tuned, bad)

    def _run_tasks(self, voice: ChatModel) -> None:
        self.progress(Progress(f"lm-eval: {', '.join(self.order.lm_eval)}"))
        with tempfile.TemporaryDirectory(prefix="tunewell-lm-eval-") as folder:
            # Without a chat template: the tasks are plain text.
            voice.tokenizer.save(Path(folder), None)
            with torch_threads(voice.num_threads):
                self.lm_eval = run_tasks(voice.model, Path(folder), self.order.lm_eval)

    def _open(self, subject: ModelRef) -> ChatModel:
        self.progress(Progress(f"loading {subject.name}"))
        # The tasks of lm-eval are run by transformers.
        backend: Backend = "packed" if self.order.lm_eval else "llama_cpp"
        return open_chat_model(subject, device=self.order.device, allow_pickle=self.order.allow_pickle, backend=backend)

    def _open_and_check(self) -> tuple[ChatModel, dict[str, int]]:
        """Load what is judged; where that is refused because of values that are not finite, do without."""
        try:
            voice = self._open(self.subject)
        except UserError:
            bad = nonfinite_weights_in(Path(self.subject.model))
            if not bad:
                raise
            return open_without_weights(self.subject, device=self.order.device), bad
        return voice, voice.runtime.nonfinite_weights()

    def _measure_apart(self, voice: ChatModel) -> ModelMeasurements:
        """Measure a base that is another model, once the tuned one has made room for it."""
        voice.unload()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            with self._timed("load"):
                other = self._open(self.subject.base_ref())
        except UserError as error:
            if self.order.base is not None:
                raise  # it was asked for by name
            self.notes.append(f"the base model could not be loaded, so there is nothing to compare with: {error.what}")
            return ModelMeasurements()
        return self._measure(other, other.runtime, "base")

    def _prepare_questions(self, voice: ChatModel) -> None:
        split = self.material.split
        most = self.rules.max_documents
        if split is not None and most is not None and len(split) > most:
            self.notes.append(f"{count(most)} of {count(len(split))} held-out documents were measured, spread evenly")
        if split is not None and self.rules.questions and voice.masker is not None:
            self.questions = questions_of(split, number=self.rules.questions, spell=voice.decode)
        longest = max((len(question.reference_ids) for question in self.questions), default=0)
        self.answer_tokens = _answer_tokens(self.rules, longest)
        front = _bos(voice)
        rows = [front + voice.tokenizer.backend.encode(text, add_special_tokens=False).ids for text in everyday_texts()]
        self.everyday = TextDocuments(rows, longest=voice.runtime.context_length)

    def _measure(self, voice: ChatModel, runtime: Runtime, who: str) -> ModelMeasurements:
        side = ModelMeasurements()
        split = self.material.split
        with self._timed("losses"):
            self.progress(Progress(f"{who}: everyday text"))
            side.everyday = runtime.losses(self.everyday, most=None)
            if split is not None:
                losses = runtime.losses(
                    split,
                    most=self.rules.max_documents,
                    progress=with_stage(self.progress, f"{who}: held-out loss"),
                )
                side.held_out = losses
        prompts = [question.ids for question in self.questions]
        with self._timed("answers"):
            if prompts:
                self.progress(Progress(f"{who}: answering {len(prompts)} questions"))
                side.logits = runtime.next_logits(prompts[:_NUM_COMPARED])
                side.answers = runtime.generate(
                    prompts,
                    max_new_tokens=self.answer_tokens.value,
                    stop_ids=voice.stop_ids,
                    batch_size=None if self.rules.batch_size == "auto" else self.rules.batch_size,
                )
            elif len(self.everyday):
                side.logits = runtime.next_logits([self.everyday.arrays(index)[0].tolist() for index in range(4)])
        return side

    def _report(
        self, voice: ChatModel, base: ModelMeasurements, tuned: ModelMeasurements | None, bad: dict[str, int]
    ) -> Report:
        held_out, by_source, everyday = None, [], None
        exchanges: list[AnsweredQuestion] = []
        if tuned is not None:
            held_out = loss_pair("held-out rows", base.held_out, tuned.held_out)
            by_source = losses_by_source(self.material.split, base.held_out, tuned.held_out)
            everyday = loss_pair("everyday text", base.everyday, tuned.everyday)
            exchanges = answered_questions(self.questions, self.material.split, voice=voice, base=base, tuned=tuned)
        asked = [exchange.tuned for exchange in exchanges]
        asked_base = [exchange.base for exchange in exchanges if exchange.base is not None]
        background = Provenance.of(self.subject, voice)
        facts = Measurements(
            bad_weights=bad,
            change=logits_change(base.logits, None if tuned is None else tuned.logits),
            held_out=held_out,
            by_source=by_source,
            everyday=everyday,
            vocab_size=voice.tokenizer.vocab_size,
            train_curve=background.curve.train,
            held_out_curve=background.curve.held_out,
            judged_step=self.subject.step,
            best_step=background.curve.best_step,
            base_tally=count_answers(asked_base) if asked_base else None,
            tuned_tally=count_answers(asked) if asked else None,
            exchanges=exchanges,
            is_adapter=self.subject.adapter is not None,
            **_how_trained(self.subject),
        )
        verdict = decide_verdict(facts, self.rules)
        return make_report(
            background,
            facts,
            verdict,
            rules=self.rules,
            data=self.material.name,
            answer_tokens=self.answer_tokens if self.questions else None,
            seconds=self.seconds,
            notes=self.notes,
            lm_eval=self.lm_eval,
        )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began


def _how_trained(subject: ModelRef) -> dict[str, Any]:
    """Give what advice is made of."""
    if subject.plan is None:
        return {}
    plan = subject.plan
    corpus = str(subject.corpus or plan.corpus)
    return {"learning_rate": plan.learning_rate.value, "epochs": plan.epochs.value, "corpus": corpus}


def _answer_tokens(rules: VerdictRules, longest: int) -> Chosen[int]:
    if rules.answer_tokens != "auto":
        return Chosen[int](value=rules.answer_tokens, because="`verdict.answer_tokens` says so")
    wanted = math.ceil(1.5 * longest / 8) * 8
    value = min(max(wanted, _LEAST_ANSWER), _MOST_ANSWER)
    return Chosen[int](value=value, because=f"one and a half times the longest reference, {longest} tokens")


def _bos(voice: ChatModel) -> list[int]:
    token = voice.tokenizer.special_tokens.get("bos_token")
    found = voice.tokenizer.backend.token_to_id(token) if token and voice.tokenizer.adds_bos else None
    return [] if found is None else [found]
