"""One judgement: the tuned model and its base, measured side by side on the same documents and questions."""

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunewell.config.rules import VerdictRules
from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.data.corpus.reader import Split
from tunewell.evaluation.behaviour import Answer, faults_of
from tunewell.evaluation.everyday import everyday_texts
from tunewell.evaluation.matching import is_short, match
from tunewell.evaluation.measuring import (
    Measured,
    Texts,
    bad_weights_in,
)
from tunewell.evaluation.runtime import Runtime
from tunewell.evaluation.verdict import Facts, judge, tally
from tunewell.integrations.lm_eval_tasks import run_tasks
from tunewell.models.generate import Generated
from tunewell.records.plan import Chosen
from tunewell.records.report import Change, Exchange, LossPair, Report, Said
from tunewell.training.held_out import Question, questions_of
from tunewell.workflows.report_parts import Background, make_report
from tunewell.workflows.subject import FoundSubject
from tunewell.workflows.voice import Voice, open_voice, open_without_model

_NUM_COMPARED = 8
"""Prompts whose logits are compared with the base model's: a change that shows in none of them changes nothing."""
_LEAST_ANSWER, _MOST_ANSWER = 32, 512


@dataclass(frozen=True)
class Material:
    """What a model is judged on."""

    split: Split | None
    name: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class ValidateOrder:
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


Progress = Callable[[str, int, int], None]


@dataclass
class _Side:
    """What was measured of one model."""

    held_out: Measured | None = None
    everyday: Measured | None = None
    answers: list[Generated] = field(default_factory=list)
    logits: Any = None


class Sitting:
    """One judgement, from loading to the report."""

    def __init__(self, subject: FoundSubject, order: ValidateOrder, material: Material, progress: Progress) -> None:
        self.subject, self.order, self.material, self.progress = subject, order, material, progress
        self.rules: VerdictRules = subject.loaded.config.verdict
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = list(material.notes)
        self.lm_eval: dict[str, Any] = {}
        self.questions: list[Question] = []
        self.answer_tokens = _answer_tokens(self.rules, 0)

    def judge(self) -> Report:
        """Measure the tuned model and its base, and make the report of it."""
        base = _Side()
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
        if voice.can_switch:
            with voice.as_base() as runtime:
                base = self._measure(voice, runtime, "base")
        elif self.subject.base is not None:
            base = self._measure_apart(voice)
        return self._report(voice, base, tuned, bad)

    def _run_tasks(self, voice: Voice) -> None:
        self.progress(f"lm-eval: {', '.join(self.order.lm_eval)}", 0, 0)
        with tempfile.TemporaryDirectory(prefix="tunewell-lm-eval-") as folder:
            # Without a chat template: the tasks are plain text.
            voice.tokenizer.save(Path(folder), None)
            self.lm_eval = run_tasks(voice.model, Path(folder), self.order.lm_eval)

    def _open(self, subject: FoundSubject) -> Voice:
        self.progress(f"loading {subject.name}", 0, 0)
        # The tasks of lm-eval are run by transformers.
        in_llama_cpp = not self.order.lm_eval
        return open_voice(
            subject, device=self.order.device, allow_pickle=self.order.allow_pickle, in_llama_cpp=in_llama_cpp
        )

    def _open_and_check(self) -> tuple[Voice, dict[str, int]]:
        """Load what is judged; where that is refused because of values that are not finite, do without."""
        try:
            voice = self._open(self.subject)
        except UserError:
            bad = bad_weights_in(Path(self.subject.model))
            if not bad:
                raise
            return open_without_model(self.subject, device=self.order.device), bad
        return voice, voice.runtime.bad_weights()

    def _measure_apart(self, voice: Voice) -> _Side:
        """Measure a base that is another model, once the tuned one has made room for it."""
        voice.release()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            with self._timed("load"):
                other = self._open(self.subject.as_base())
        except UserError as error:
            if self.order.base is not None:
                raise  # it was asked for by name
            self.notes.append(f"the base model could not be loaded, so there is nothing to compare with: {error.what}")
            return _Side()
        return self._measure(other, other.runtime, "base")

    def _prepare_questions(self, voice: Voice) -> None:
        split = self.material.split
        most = self.rules.max_documents
        if split is not None and most is not None and len(split) > most:
            self.notes.append(f"{count(most)} of {count(len(split))} held-out documents were measured, spread evenly")
        if split is not None and self.rules.questions and voice.masker is not None:
            self.questions = questions_of(split, number=self.rules.questions, spell=voice.spell)
        longest = max((len(question.reference_ids) for question in self.questions), default=0)
        self.answer_tokens = _answer_tokens(self.rules, longest)
        front = _bos(voice)
        rows = [front + voice.tokenizer.backend.encode(text, add_special_tokens=False).ids for text in everyday_texts()]
        self.everyday = Texts(rows, longest=voice.runtime.context_length)

    def _measure(self, voice: Voice, runtime: Runtime, who: str) -> _Side:
        side = _Side()
        split = self.material.split
        with self._timed("losses"):
            self.progress(f"{who}: everyday text", 0, 0)
            side.everyday = Measured(*runtime.losses(self.everyday, most=None))
            if split is not None:
                losses = runtime.losses(
                    split,
                    most=self.rules.max_documents,
                    progress=lambda done, of: self.progress(f"{who}: held-out loss", done, of),
                )
                side.held_out = Measured(*losses)
        prompts = [question.ids for question in self.questions]
        with self._timed("answers"):
            if prompts:
                self.progress(f"{who}: answering {len(prompts)} questions", 0, 0)
                side.logits = runtime.next_logits(prompts[:_NUM_COMPARED])
                side.answers = runtime.answer_all(
                    prompts,
                    max_new_tokens=self.answer_tokens.value,
                    stop_ids=voice.stop_ids,
                    pad_id=voice.pad_id,
                    batch_size=None if self.rules.batch_size == "auto" else self.rules.batch_size,
                )
            elif len(self.everyday):
                side.logits = runtime.next_logits([self.everyday.arrays(index)[0].tolist() for index in range(4)])
        return side

    def _report(self, voice: Voice, base: _Side, tuned: _Side | None, bad: dict[str, int]) -> Report:
        held_out, by_source, everyday = None, [], None
        exchanges: list[Exchange] = []
        if tuned is not None:
            held_out = _pair("held-out rows", base.held_out, tuned.held_out)
            by_source = self._by_source(base.held_out, tuned.held_out)
            everyday = _pair("everyday text", base.everyday, tuned.everyday)
            exchanges = self._exchanges(voice, base, tuned)
        asked = [exchange.tuned for exchange in exchanges]
        asked_base = [exchange.base for exchange in exchanges if exchange.base is not None]
        background = Background.of(self.subject, voice)
        facts = Facts(
            bad_weights=bad,
            change=_change(base.logits, None if tuned is None else tuned.logits),
            held_out=held_out,
            by_source=by_source,
            everyday=everyday,
            vocab_size=voice.tokenizer.vocab_size,
            train_curve=background.curve.train,
            held_out_curve=background.curve.held_out,
            judged_step=self.subject.step,
            best_step=background.curve.best_step,
            base_tally=tally(asked_base) if asked_base else None,
            tuned_tally=tally(asked) if asked else None,
            exchanges=exchanges,
            is_adapter=self.subject.adapter is not None,
            **_how_trained(self.subject),
        )
        verdict = judge(facts, self.rules)
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

    def _by_source(self, base: Measured | None, tuned: Measured | None) -> list[LossPair]:
        split = self.material.split
        if split is None or tuned is None:
            return []
        names = np.array([split[int(index)].source for index in tuned.documents])
        if len(set(names.tolist())) < 2:
            return []
        return [
            pair
            for name in sorted(set(names.tolist()))
            if (pair := _pair(name, base, tuned, names == name)) is not None
        ]

    def _exchanges(self, voice: Voice, base: _Side, tuned: _Side) -> list[Exchange]:
        split = self.material.split
        found = []
        for place, question in enumerate(self.questions):
            assert split is not None
            document = split[question.document]
            reference = _words(voice, question.reference_ids)
            found.append(
                Exchange(
                    document=question.document,
                    source=document.source,
                    row=document.row,
                    question=question.text,
                    reference=reference,
                    base=_said(voice, base.answers[place], question, reference) if base.answers else None,
                    tuned=_said(voice, tuned.answers[place], question, reference),
                )
            )
        return found

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began


def _how_trained(subject: FoundSubject) -> dict[str, Any]:
    """Give what advice is made of."""
    if subject.plan is None:
        return {}
    plan = subject.plan
    corpus = str(subject.corpus or plan.corpus)
    return {"learning_rate": plan.learning_rate.value, "epochs": plan.epochs.value, "corpus": corpus}


def _pair(name: str, base: Measured | None, tuned: Measured | None, chosen: Any = None) -> LossPair | None:
    if tuned is None or not len(tuned.documents):
        return None
    number = len(tuned.documents) if chosen is None else int(chosen.sum())
    tokens = int(tuned.tokens.sum() if chosen is None else tuned.tokens[chosen].sum())
    before = None if base is None else base.mean(chosen)
    return LossPair(name=name, documents=number, tokens=tokens, base=before, tuned=tuned.mean(chosen))


def _change(base: Any, tuned: Any) -> Change | None:
    if base is None or tuned is None:
        return None
    # Of tokens that only one of the two knows nothing can be compared.
    both = min(base.shape[-1], tuned.shape[-1])
    base, tuned = base[:, :both], tuned[:, :both]
    same = int((base.argmax(-1) == tuned.argmax(-1)).sum())
    # Some models give words they never say a logit of minus infinity; a base that is broken says nothing of the tuned.
    known = np.isfinite(base) & np.isfinite(tuned)
    is_broken = bool(np.isnan(tuned).any()) or not known.any()
    largest = math.nan if is_broken else float(np.abs(base[known] - tuned[known]).max())
    return Change(largest=largest, prompts=len(base), same_first_token=same)


def _words(voice: Voice, ids: list[int]) -> str:
    """Spell an answer without what ends it."""
    end = next((at for at, token in enumerate(ids) if token in voice.stop_ids), len(ids))
    return voice.spell(ids[:end]).strip()


def _said(voice: Voice, answer: Generated, question: Question, reference: str) -> Said:
    text = voice.spell(answer.ids).strip()
    found = match(text, reference)
    control = [voice.spell([token]) for token in answer.ids if token in voice.tokenizer.control_ids]
    faults = faults_of(
        Answer(
            text=text,
            ids=answer.ids,
            ended=answer.ended,
            question=question.text,
            reference=reference,
            control_texts=control,
        )
    )
    return Said(
        text=text,
        num_tokens=len(answer.ids),
        ended=answer.ended,
        exact=found.exact,
        contains=found.contains,
        f1=found.f1,
        right=found.right if is_short(reference) else None,
        faults=faults,
    )


def _answer_tokens(rules: VerdictRules, longest: int) -> Chosen[int]:
    if rules.answer_tokens != "auto":
        return Chosen[int](value=rules.answer_tokens, because="`verdict.answer_tokens` says so")
    wanted = math.ceil(1.5 * longest / 8) * 8
    value = min(max(wanted, _LEAST_ANSWER), _MOST_ANSWER)
    return Chosen[int](value=value, because=f"one and a half times the longest reference, {longest} tokens")


def _bos(voice: Voice) -> list[int]:
    token = voice.tokenizer.special_tokens.get("bos_token")
    found = voice.tokenizer.backend.token_to_id(token) if token and voice.tokenizer.adds_bos else None
    return [] if found is None else [found]
