"""Evaluate one model: load it, measure it and its base model on the same rows and questions, and return the report."""

import gc
import math
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from tunewell.config.extensions import SCORERS, TaskEntry
from tunewell.config.rules import VerdictRules
from tunewell.core.errors import UserError
from tunewell.core.files import short_path
from tunewell.core.options import WeightsOptions
from tunewell.core.progress import Progress, ProgressListener, with_stage
from tunewell.core.units import count
from tunewell.data.corpus.reader import Split
from tunewell.data.rows.conversation import Message
from tunewell.evaluation.base_cache import BaseCache, BaseQuestions
from tunewell.evaluation.forgetting import (
    MAX_TOKENS,
    EverydayOutcome,
    everyday_texts,
    instructions,
    measure_forgetting,
    ordinary_answers,
)
from tunewell.evaluation.intervals import difference_record
from tunewell.evaluation.measurements import Measurements, cluster_numbers, count_answers
from tunewell.evaluation.metrics import Metric, compute_metrics
from tunewell.evaluation.provenance import collect_provenance
from tunewell.evaluation.questions import Questions, find_questions
from tunewell.evaluation.reasons import loss_notes
from tunewell.evaluation.rows import EvaluationSet
from tunewell.evaluation.scores import (
    ModelOutputs,
    answered_questions,
    confusions,
    constant_answer,
    logits_change,
    loss_pair,
    losses_by_source,
    losses_difference,
    measure_pairs,
)
from tunewell.evaluation.verdict import changed_rules, decide_verdict, thresholds
from tunewell.inference.chat_model import Backend, ChatModel, open_chat_model, open_without_weights
from tunewell.inference.decoder import Generated
from tunewell.inference.model_ref import ModelRef
from tunewell.inference.prompt import prompt_ids
from tunewell.inference.runtime import Runtime, TextDocuments, nonfinite_weights_in
from tunewell.machine.device import torch_threads
from tunewell.models.attention import stock_attention
from tunewell.models.support import quiet
from tunewell.records.plan import Chosen
from tunewell.records.report import AnsweredQuestion, OrdinaryAnswer, Report, RowCounts
from tunewell.scoring.facts import Facts
from tunewell.scoring.judge import contains_key
from tunewell.scoring.structured import count_fields
from tunewell.training.evaluate import Question, questions_of


def run_tasks(model: PreTrainedModel, tokenizer_folder: Path, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return lm-eval's scores by task and metric; raise UserError for an unknown task or missing task data."""
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]  an extra
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with quiet(), stock_attention(model):
        try:
            wrapped = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=8)
            found: Any = simple_evaluate(wrapped, tasks=list(tasks), log_samples=False, bootstrap_iters=0)
        except (KeyError, ValueError, OSError, ConnectionError) as error:
            raise UserError(
                f"lm-eval could not run {', '.join(tasks)}: {type(error).__name__}: {str(error).strip()[:200]}",
                fix="`lm-eval ls tasks` lists the tasks; most need a connection to download their data",
            ) from error
    return {
        task: {name: float(value) for name, value in scores.items() if isinstance(value, int | float)}
        for task, scores in found["results"].items()
    }


_LOOK_UP = (
    "if the answers are facts in documents, the model can look them up instead: run `tunewell index DOCUMENTS`, then "
    "`tunewell compare {run} --index index` to measure which is better"
)
_NUM_COMPARED = 8
"""Number of prompts whose logits are compared with the base model's, to detect a training without effect."""
_MIN_ANSWER_TOKENS, _MAX_ANSWER_TOKENS = 32, 512


@dataclass(frozen=True)
class ValidateOptions(WeightsOptions):
    """The options of an evaluation."""

    data: str | Path | Sequence[str | Path] | None = None
    """File of rows, or several; by default the held-out rows of the run."""
    corpus: Path | None = None
    """Corpus whose held-out rows replace those of the run."""
    checkpoint: str = "best"
    base: str | None = None
    template: str | None = None
    device: str = "auto"
    out: str | Path | None = None
    """Folder of the report; by default the run's."""
    sets: Sequence[str] = ()
    lm_eval: Sequence[str] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metric functions by name, `fn(question, answer, reference) -> number`, in addition to `verdict.metrics`."""


class EvaluationSession:
    """One evaluation, from loading the model to the report."""

    def __init__(
        self,
        ref: ModelRef,
        options: ValidateOptions,
        evaluation_set: EvaluationSet,
        *,
        metrics: Mapping[str, Metric],
        progress: ProgressListener,
    ) -> None:
        self.ref, self.options, self.rows = ref, options, evaluation_set
        self.metrics, self.progress = metrics, progress
        self.rules: VerdictRules = ref.loaded.config.verdict
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = list(evaluation_set.notes)
        quantized = ref.plan.quantized if ref.plan else None
        if quantized is not None and quantized.price:
            self.notes.append(f"the base model is in {quantized.kind}: before training, {quantized.price}")
        self.lm_eval: dict[str, Any] = {}
        self.questions: Questions | None = None
        self.hinted: list[list[int]] = []
        """The prompts of the questions with the list of the labels, fields or tools."""
        self.ordinary: list[list[int]] = []
        """The prompts of the everyday instructions."""
        self.answer_tokens = _answer_tokens(self.rules, 0)
        self.base_measured_at: str | None = None

    def evaluate(self) -> Report:
        """Measure the tuned model and its base, and return the report."""
        base = ModelOutputs()
        with self._timed("load"):
            model, bad_weights = self._open_and_check()
        if bad_weights:
            self.notes.append("nothing else was measured, because the weights are not finite")
            return self._report(model, base, None, bad_weights)
        self._prepare_questions(model)
        tuned = self._measure(model, model.runtime, "tuned")
        if self.options.lm_eval:
            with self._timed("lm-eval"):
                self._run_tasks(model)
        return self._report(model, self._base_outputs(model), tuned, bad_weights)

    def _base_outputs(self, model: ChatModel) -> ModelOutputs:
        """Measure the base model, or return its outputs of an earlier evaluation with the same questions."""
        if not model.can_disable_adapter and self.ref.base is None:
            return ModelOutputs()
        batch_size = None if self.rules.batch_size == "auto" else self.rules.batch_size
        questions = BaseQuestions(
            split=self.rows.split,
            max_documents=self.rules.max_documents,
            everyday=self.everyday,
            prompts=self._prompts,
            hinted=self.hinted,
            ordinary=self.ordinary,
            num_compared=_NUM_COMPARED,
            stop_ids=model.stop_ids,
            answer_tokens=self.answer_tokens.value,
            batch_size=batch_size,
        )
        cache = BaseCache.of(model, questions) if self.rules.reuse_base else BaseCache(None)
        if (known := cache.read()) is not None:
            base, self.base_measured_at = known
            return base
        if model.can_disable_adapter:
            with model.base_runtime() as runtime:
                base = self._measure(model, runtime, "base")
        else:
            base = self._measure_separate_base(model)
        cache.write(base)
        return base

    def _run_tasks(self, model: ChatModel) -> None:
        self.progress(Progress(f"lm-eval: {', '.join(self.options.lm_eval)}"))
        with tempfile.TemporaryDirectory(prefix="tunewell-lm-eval-") as folder:
            # The tokenizer is saved without a chat template, because the tasks are plain text.
            model.tokenizer.save(Path(folder), None)
            with torch_threads(model.batch_threads):
                self.lm_eval = run_tasks(model.model, Path(folder), self.options.lm_eval)

    def _open(self, ref: ModelRef) -> ChatModel:
        self.progress(Progress(f"loading {ref.name}"))
        # lm-eval needs a transformers model.
        backend: Backend = "packed" if self.options.lm_eval else "llama_cpp"
        return open_chat_model(ref, device=self.options.device, weights=self.options, backend=backend)

    def _open_and_check(self) -> tuple[ChatModel, dict[str, int]]:
        """Load the model and find weights that are not finite; if these prevent loading, continue without weights."""
        try:
            model = self._open(self.ref)
        except UserError:
            bad_weights = nonfinite_weights_in(Path(self.ref.model))
            if not bad_weights:
                raise
            return open_without_weights(self.ref, device=self.options.device), bad_weights
        return model, model.runtime.nonfinite_weights()

    def _measure_separate_base(self, tuned: ChatModel) -> ModelOutputs:
        """Unload the tuned model, then load and measure a base model that has its own weights."""
        tuned.unload()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            with self._timed("load"):
                base = self._open(self.ref.base_ref())
        except UserError as error:
            if self.options.base is not None:
                raise  # the user passed --base
            self.notes.append(f"not compared with the base model, because it could not be loaded ({error.what})")
            return ModelOutputs()
        return self._measure(base, base.runtime, "base")

    @property
    def _prompts(self) -> list[list[int]]:
        return [question.ids for question in self.questions.asked] if self.questions is not None else []

    def _prepare_questions(self, model: ChatModel) -> None:
        split, limit = self.rows.split, self.rules.max_documents
        if split is not None and limit is not None and len(split) > limit:
            self.notes.append(f"{count(limit)} of {count(len(split))} held-out rows were measured, evenly spaced")
        longest = 0
        if split is not None and self.rules.questions and model.masker is not None:
            find = model.masker.template.question_in
            asked = questions_of(split, number=self.rules.questions, spell=model.decode, question_in=find)
            longest = max((len(question.reference_ids) for question in asked), default=0)
            if asked:
                self._find_task(model, split, asked)
                self.hinted, self.ordinary = self._more_prompts(model)
        self.answer_tokens = _answer_tokens(self.rules, longest)
        tokenizer = model.tokenizer
        token = tokenizer.special_tokens.get("bos_token")
        bos_id = tokenizer.backend.token_to_id(token) if token and tokenizer.adds_bos else None
        bos = [] if bos_id is None else [bos_id]
        rows = [bos + tokenizer.backend.encode(text, add_special_tokens=False).ids for text in everyday_texts()]
        self.everyday = TextDocuments(rows, longest=model.runtime.context_length)

    def _find_task(self, model: ChatModel, split: Split, asked: list[Question]) -> None:
        """Find the task of the rows and how answers are scored, and show it before it is used."""
        with self._timed("answers"):
            self.questions = questions = find_questions(
                asked,
                split,
                corpus=self.rows.corpus,
                training=self.rows.training,
                model=model,
                rules=self.rules,
                base=self.ref.loaded.base,
            )
        self.notes += questions.notes
        self.progress(Progress(f"task `{questions.task.value}`: {questions.task.because}"))
        if isinstance(questions.scorer, Facts):
            given = [key for key in questions.scorer.keys if key.origin in ("answers", "value")]
            num_other = sum(not contains_key(key.reference, key) for key in given if not key.is_polar)
            if num_other > len(given) / 2:
                self.notes.append(
                    f"{count(num_other)} of {count(len(given), 'row')} with `{given[0].origin}` do not contain it in "
                    "their reply; rename the column if it is not the answer to the question"
                )
            num_given_away = sum(contains_key(key.question, key) for key in questions.scorer.keys if not key.is_polar)
            if num_given_away:
                self.notes.append(f"{count(num_given_away, 'question')} contain their answer, so they show little")

    def _more_prompts(self, model: ChatModel) -> tuple[list[list[int]], list[list[int]]]:
        """Return the prompts with which a base model is asked again, and those of the everyday instructions."""
        assert self.questions is not None and model.masker is not None
        sources = self.ref.loaded.config.data.sources
        system = sources[0].system if sources else None
        lead: list[Message] = [{"role": "system", "content": system}] if system else []
        hint, limit = self.questions.scorer.hint, model.runtime.context_length - _MAX_ANSWER_TOKENS
        asked = [f"{hint}\n\n{row.question}" for row in self.questions.rows] if hint else []
        found: list[list[list[int]]] = []
        for texts, messages in ((asked, lead), ([one.ask for one in instructions()], [])):
            try:
                prompts = [
                    prompt_ids(model.masker, model.encoder, [*messages, {"role": "user", "content": text}])
                    for text in texts
                ]
            except UserError as error:
                self.notes.append(f"fewer questions were asked, because a prompt cannot be rendered: {error.what}")
                prompts = []
            found.append(prompts if max(map(len, prompts), default=0) <= limit else [])
        return found[0], found[1]

    def _measure(self, model: ChatModel, runtime: Runtime, name: str) -> ModelOutputs:
        outputs = ModelOutputs()
        split, stage = self.rows.split, f"testing the {name} model"
        with self._timed("losses"):
            part = f"{stage}: everyday text"
            self.progress(Progress(part))
            outputs.everyday = runtime.losses(self.everyday, most=None, progress=with_stage(self.progress, part))
            if split is not None:
                outputs.held_out = runtime.losses(
                    split,
                    most=self.rules.max_documents,
                    progress=with_stage(self.progress, f"{stage}: held-out loss"),
                )
        prompts = self._prompts
        with self._timed("answers"):
            if prompts:
                outputs.logits = runtime.next_logits(prompts[:_NUM_COMPARED])
                part = f"{stage}: {count(len(prompts), 'question')}"
                outputs.answers = self._generate(model, runtime, prompts, self.answer_tokens.value, part)
                if name == "base" and self.hinted:
                    part = f"{stage}: the same questions with {self._hinted_by} in the prompt"
                    outputs.hinted = self._generate(model, runtime, self.hinted, self.answer_tokens.value, part)
                if self.ordinary:
                    part = f"{stage}: {count(len(self.ordinary), 'everyday instruction')}"
                    outputs.ordinary = self._generate(model, runtime, self.ordinary, MAX_TOKENS, part)
            elif len(self.everyday):
                outputs.logits = runtime.next_logits([self.everyday.arrays(index)[0].tolist() for index in range(4)])
        return outputs

    @property
    def _hinted_by(self) -> str:
        task = self.questions.task.value if self.questions is not None else ""
        return {"json": "the fields", "tools": "the tools", "choice": "the options"}.get(task, "the labels")

    def _generate(
        self, model: ChatModel, runtime: Runtime, prompts: list[list[int]], length: int, part: str
    ) -> list[Generated]:
        self.progress(Progress(part))
        return runtime.generate(
            prompts,
            max_new_tokens=length,
            stop_ids=model.stop_ids,
            batch_size=None if self.rules.batch_size == "auto" else self.rules.batch_size,
            progress=with_stage(self.progress, part),
        )

    def _report(
        self, model: ChatModel, base: ModelOutputs, tuned: ModelOutputs | None, bad_weights: dict[str, int]
    ) -> Report:
        provenance = collect_provenance(self.ref, model)
        questions, asked = list[AnsweredQuestion](), dict[str, Any]()
        if tuned is not None and self.questions is not None:
            questions, asked = self._answered(model, base, tuned)
        clusters = cluster_numbers(questions)
        everyday = loss_pair("everyday text", base.everyday, tuned.everyday) if tuned else None
        ordinary = self._ordinary(model, base, tuned) if tuned is not None else []
        entry = self.questions.entry if self.questions is not None else SCORERS.entry("documents")
        measured = Measurements(
            bad_weights=bad_weights,
            change=logits_change(base.logits, tuned.logits) if tuned else None,
            held_out=loss_pair("held-out rows", base.held_out, tuned.held_out) if tuned else None,
            by_source=losses_by_source(self.rows.split, base.held_out, tuned.held_out) if tuned else [],
            everyday=everyday,
            loss_difference=losses_difference(base.held_out, tuned.held_out) if tuned else None,
            task=entry.name,
            noun=entry.noun,
            min_right=self._min_right(entry),
            constant=asked.get("constant"),
            forgotten=measure_forgetting(EverydayOutcome(everyday, ordinary, model.tokenizer.vocab_size), self.rules),
            train_curve=provenance["curve"].train,
            held_out_curve=provenance["curve"].held_out,
            evaluated_step=self.ref.step,
            questions=questions,
            num_held_out=len(self.rows.split) if self.rows.split is not None else 0,
            test_file=self.rows.test_file,
            **_training_settings(self.ref, provenance["ledger"]),
        )
        verdict = decide_verdict(measured, self.rules)
        if verdict.level == "FAIL" and questions:
            self.notes.append(_LOOK_UP.format(run=shlex.quote(measured.model_path)))
        metrics, failures = compute_metrics(self.metrics, questions)
        base_answers = [question.base for question in questions if question.base is not None]
        apart = [(one.tuned, cluster) for one, cluster in zip(questions, clusters, strict=True) if not one.is_near]
        return Report(
            **provenance,
            **asked,
            verdict=verdict.level,
            summary=verdict.summary,
            reasons=verdict.reasons,
            data=self.rows.name,
            held_out=measured.held_out,
            by_source=list(measured.by_source),
            everyday=measured.everyday,
            base_tally=count_answers(base_answers, clusters) if base_answers else None,
            tuned_tally=count_answers([question.tuned for question in questions], clusters) if questions else None,
            without_near=count_answers(*zip(*apart, strict=True)) if 0 < len(apart) < len(questions) else None,
            exchanges=questions,
            task=self.questions.task if self.questions is not None else None,
            loss_difference=difference_record(measured.loss_difference) if measured.loss_difference else None,
            ordinary=ordinary,
            forgotten=list(measured.forgotten),
            trained_on=self.rows.trained_on,
            changed_rules=changed_rules(self.rules),
            change=measured.change,
            bad_weights=bad_weights,
            thresholds=thresholds(self.rules, measured),
            answer_tokens=self.answer_tokens if self.questions is not None else None,
            metrics=metrics,
            seconds=self.seconds,
            base_measured_at=self.base_measured_at,
            notes=[*model.notes, *self.notes, *loss_notes(measured, self.rules), *failures],
            lm_eval=self.lm_eval,
            next=verdict.reasons[0].next if verdict.reasons else f"`tunewell chat {shlex.quote(measured.model_path)}`",
        )

    def _answered(
        self, model: ChatModel, base: ModelOutputs, tuned: ModelOutputs
    ) -> tuple[list[AnsweredQuestion], dict[str, Any]]:
        """Return the scored answers, with the better of the base model's two, and the fields of the report for them."""
        assert self.questions is not None
        found = answered_questions(self.questions, model=model, base=base.answers, tuned=tuned.answers)
        fields: dict[str, Any] = {}
        if base.hinted:
            hinted = answered_questions(self.questions, model=model, base=base.hinted, tuned=tuned.answers)
            tallies = [count_answers([one.base for one in part if one.base is not None]) for part in (found, hinted)]
            is_better = tallies[1].right > tallies[0].right
            found = hinted if is_better else found
            fields = {"asked_tally": tallies[0], "hinted_tally": tallies[1], "is_base_hinted": is_better}
        entry, judge = self.questions.entry, self.questions.judge_record()
        if entry.min_right is not None:
            fields["constant"] = constant_answer(self.questions, found)
            difference = Measurements(questions=found).difference
            judge = judge.model_copy(update={"difference": difference_record(difference) if difference else None})
        if self.questions.task.value in ("labels", "choice"):
            fields["confusions"] = confusions(found)
        if marks := [one.tuned.fields for one in found if one.tuned.fields]:
            fields["fields"] = {name: dict(counts) for name, counts in count_fields(marks).items()}
        return found, {**fields, "judge": judge, "measures": measure_pairs(self.questions, found)}

    def _ordinary(self, model: ChatModel, base: ModelOutputs, tuned: ModelOutputs) -> list[OrdinaryAnswer]:
        texts = [[model.decode(one.ids).strip() for one in outputs.ordinary] for outputs in (base, tuned)]
        return ordinary_answers(texts[0], texts[1]) if texts[1] else []

    def _min_right(self, entry: TaskEntry) -> float | None:
        if entry.min_right is None or self.questions is None:
            return None
        return entry.min_right if self.rules.min_right == "auto" else self.rules.min_right

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began


def _training_settings(ref: ModelRef, counts: RowCounts | None) -> dict[str, Any]:
    """Return the fields of Measurements that describe the training, for advice."""
    found: dict[str, Any] = {"is_adapter": ref.adapter is not None, "model_path": str(ref.path or ref.name)}
    if ref.plan is not None:
        found |= {"learning_rate": ref.plan.learning_rate.value, "epochs": ref.plan.epochs.value}
        found["max_steps"] = ref.plan.config.get("train", {}).get("max_steps")
        found["corpus"] = str(short_path(Path(ref.corpus or ref.plan.corpus)))
    if counts is not None:
        found["num_rows"] = counts.documents + counts.held_out
    return found


def _answer_tokens(rules: VerdictRules, longest: int) -> Chosen[int]:
    if rules.answer_tokens != "auto":
        return Chosen[int](value=rules.answer_tokens, because="set by `verdict.answer_tokens`")
    rounded = math.ceil(1.5 * longest / 8) * 8
    value = min(max(rounded, _MIN_ANSWER_TOKENS), _MAX_ANSWER_TOKENS)
    return Chosen[int](value=value, because=f"1.5 times the longest expected answer ({count(longest, 'token')})")
