"""Evaluate one model: load it, measure it and its base model on the same rows and questions, and return the report."""

import gc
import json
import math
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from tunewell.config.rules import VerdictRules
from tunewell.core.errors import UserError
from tunewell.core.files import short_path
from tunewell.core.options import WeightsOptions
from tunewell.core.progress import Progress, ProgressListener, with_stage
from tunewell.core.text import shorten_line
from tunewell.core.units import count
from tunewell.data.corpus.reader import Split
from tunewell.evaluation.base_cache import BaseCache, BaseQuestions
from tunewell.evaluation.judge import contains_key
from tunewell.evaluation.measurements import Measurements, cluster_numbers, count_answers
from tunewell.evaluation.metrics import Metric, compute_metrics
from tunewell.evaluation.provenance import collect_provenance
from tunewell.evaluation.rows import EvaluationSet
from tunewell.evaluation.scores import (
    JudgedQuestions,
    ModelOutputs,
    answered_questions,
    judged_questions,
    logits_change,
    loss_pair,
    losses_by_source,
)
from tunewell.evaluation.verdict import decide_verdict, thresholds
from tunewell.inference.chat_model import Backend, ChatModel, open_chat_model, open_without_weights
from tunewell.inference.model_ref import ModelRef
from tunewell.inference.runtime import Runtime, TextDocuments, nonfinite_weights_in
from tunewell.machine.device import torch_threads
from tunewell.models.attention import stock_attention
from tunewell.models.support import quiet
from tunewell.records.plan import Chosen
from tunewell.records.report import AnsweredQuestion, Report, RowCounts
from tunewell.training.evaluate import Question, questions_of

# Everyday text: bundled passages whose loss shows how much a model has forgotten.


def everyday_texts() -> list[str]:
    """Return text passages of many kinds, mostly in English, some in German, French and Spanish."""
    lines = files("tunewell.evaluation").joinpath("everyday.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


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
        self.questions: list[Question] = []
        self.judged: JudgedQuestions | None = None
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
            prompts=[question.ids for question in self.questions],
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

    def _prepare_questions(self, model: ChatModel) -> None:
        split, limit = self.rows.split, self.rules.max_documents
        if split is not None and limit is not None and len(split) > limit:
            self.notes.append(f"{count(limit)} of {count(len(split))} held-out rows were measured, evenly spaced")
        if split is not None and self.rules.questions and model.masker is not None:
            find = model.masker.template.question_in
            self.questions = questions_of(split, number=self.rules.questions, spell=model.decode, question_in=find)
            self._find_keys(model, split)
        longest = max((len(question.reference_ids) for question in self.questions), default=0)
        self.answer_tokens = _answer_tokens(self.rules, longest)
        tokenizer = model.tokenizer
        token = tokenizer.special_tokens.get("bos_token")
        bos_id = tokenizer.backend.token_to_id(token) if token and tokenizer.adds_bos else None
        bos = [] if bos_id is None else [bos_id]
        rows = [bos + tokenizer.backend.encode(text, add_special_tokens=False).ids for text in everyday_texts()]
        self.everyday = TextDocuments(rows, longest=model.runtime.context_length)

    def _find_keys(self, model: ChatModel, split: Split) -> None:
        """Find the answer keys of the questions, and show them before they are used."""
        with self._timed("answers"):
            self.judged = judged = judged_questions(self.questions, split, self.rows.corpus, model)
        if judged.keys:
            record = judged.record([])
            shown = ", ".join(f'"{shorten_line(example.key, 40)}"' for example in record.examples)
            self.progress(Progress(f"judging by {record.describe()}: {shown}"))
        given = [key for key in judged.keys if key.origin in ("answers", "value")]
        num_other = sum(not contains_key(key.reference, key) for key in given if not key.is_polar)
        if num_other > len(given) / 2:
            self.notes.append(
                f"{count(num_other)} of {count(len(given), 'row')} with `{given[0].origin}` do not contain it in their "
                "reply; rename the column if it is not the answer to the question"
            )

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
        prompts = [question.ids for question in self.questions]
        with self._timed("answers"):
            if prompts:
                part = f"{stage}: {count(len(prompts), 'question')}"
                self.progress(Progress(part))
                outputs.logits = runtime.next_logits(prompts[:_NUM_COMPARED])
                outputs.answers = runtime.generate(
                    prompts,
                    max_new_tokens=self.answer_tokens.value,
                    stop_ids=model.stop_ids,
                    batch_size=None if self.rules.batch_size == "auto" else self.rules.batch_size,
                    progress=with_stage(self.progress, part),
                )
            elif len(self.everyday):
                outputs.logits = runtime.next_logits([self.everyday.arrays(index)[0].tolist() for index in range(4)])
        return outputs

    def _report(
        self, model: ChatModel, base: ModelOutputs, tuned: ModelOutputs | None, bad_weights: dict[str, int]
    ) -> Report:
        provenance = collect_provenance(self.ref, model)
        questions: list[AnsweredQuestion] = []
        if tuned is not None and self.judged is not None:
            questions = answered_questions(self.judged, model=model, base=base, tuned=tuned)
        clusters = cluster_numbers(questions)
        base_answers = [question.base for question in questions if question.base is not None]
        measured = Measurements(
            bad_weights=bad_weights,
            change=logits_change(base.logits, tuned.logits) if tuned else None,
            held_out=loss_pair("held-out rows", base.held_out, tuned.held_out) if tuned else None,
            by_source=losses_by_source(self.rows.split, base.held_out, tuned.held_out) if tuned else [],
            everyday=loss_pair("everyday text", base.everyday, tuned.everyday) if tuned else None,
            vocab_size=model.tokenizer.vocab_size,
            train_curve=provenance["curve"].train,
            held_out_curve=provenance["curve"].held_out,
            evaluated_step=self.ref.step,
            questions=questions,
            test_file=self.rows.test_file,
            **_training_settings(self.ref, provenance["ledger"]),
        )
        verdict = decide_verdict(measured, self.rules)
        if verdict.level == "FAIL" and questions:
            self.notes.append(_LOOK_UP.format(run=shlex.quote(measured.model_path)))
        metrics, failures = compute_metrics(self.metrics, questions)
        return Report(
            **provenance,
            verdict=verdict.level,
            summary=verdict.summary,
            reasons=verdict.reasons,
            data=self.rows.name,
            held_out=measured.held_out,
            by_source=list(measured.by_source),
            everyday=measured.everyday,
            base_tally=count_answers(base_answers, clusters) if base_answers else None,
            tuned_tally=count_answers([question.tuned for question in questions], clusters) if questions else None,
            exchanges=questions,
            judge=self.judged.record(questions) if self.judged is not None and questions else None,
            change=measured.change,
            bad_weights=bad_weights,
            thresholds=thresholds(self.rules),
            answer_tokens=self.answer_tokens if self.questions else None,
            metrics=metrics,
            seconds=self.seconds,
            base_measured_at=self.base_measured_at,
            notes=[*model.notes, *self.notes, *failures],
            lm_eval=self.lm_eval,
            next=verdict.reasons[0].next if verdict.reasons else f"`tunewell chat {shlex.quote(measured.model_path)}`",
        )

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
