"""Evaluate one model: load it, measure it and its base model on the same rows and questions, and return the report."""

import gc
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

from tunewell.config.extensions import SCORERS
from tunewell.config.rules import VerdictRules
from tunewell.core.errors import UserError
from tunewell.core.files import short_path
from tunewell.core.options import WeightsOptions
from tunewell.core.progress import Progress, ProgressListener, with_stage
from tunewell.core.units import count
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
from tunewell.evaluation.measurements import Measurements, bases_of, cluster_numbers, count_answers
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
from tunewell.model_files.presets import is_preset
from tunewell.models.attention import stock_attention
from tunewell.models.support import quiet
from tunewell.records.plan import Chosen
from tunewell.records.report import Report, RowCounts
from tunewell.records.rundir import free_name
from tunewell.scoring.judge import contains_key
from tunewell.scoring.questions import Question, answer_length, questions_of
from tunewell.scoring.structured import count_fields


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
    "are the answers facts in documents? Then the model can look them up instead: `tunewell index FOLDER`, then "
    "`tunewell compare {run} --index index` to measure which is better"
)
_NUM_COMPARED = 8
"""Number of prompts whose logits are compared with the base model's, to detect a training without effect."""
_MIN_ANSWER_TOKENS = 32
_HINTS = {"json": "fields", "tools": "tools", "choice": "options"}
"""What a base model is told when it is asked again; labels in other tasks."""


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
        self.batch_size = None if self.rules.batch_size == "auto" else self.rules.batch_size
        self.seconds: dict[str, float] = {}
        self.notes: list[str] = list(evaluation_set.notes)
        quantized = ref.plan.quantized if ref.plan else None
        if quantized is not None and quantized.price:
            self.notes.append(f"the base model is in {quantized.kind}: before training, {quantized.price}")
        self.lm_eval: dict[str, Any] = {}
        self.questions: Questions | None = None
        self.prompts: list[list[int]] = []
        self.hinted: list[list[int]] = []
        """The prompts of the questions with the list of the labels, fields or tools."""
        self.ordinary: list[list[int]] = []
        """The prompts of the everyday instructions."""
        self.base_measured_at: str | None = None

    def evaluate(self) -> Report:
        """Measure the tuned model and its base, and return the report."""
        base = tuned = ModelOutputs()
        with self._timed("load"):
            model, bad_weights = self._open_and_check()
        if bad_weights:
            self.notes.append("nothing else was measured, because the weights are not finite")
        else:
            self._prepare_questions(model)
            tuned = self._measure(model, model.runtime, "tuned")
            if self.options.lm_eval:
                with self._timed("lm-eval"):
                    self._run_tasks(model)
            base = self._base_outputs(model)
        return self._report(model, base, tuned, bad_weights)

    def _base_outputs(self, model: ChatModel) -> ModelOutputs:
        """Measure the base model, or return its outputs of an earlier evaluation with the same questions."""
        if not model.can_disable_adapter and self.ref.base is None:
            return ModelOutputs()
        questions = BaseQuestions(
            self.rows.split,
            self.rules.max_documents,
            self.everyday,
            self.prompts,
            self.hinted,
            self.ordinary,
            num_compared=_NUM_COMPARED,
            stop_ids=model.stop_ids,
            answer_tokens=self.answer_tokens.value,
            batch_size=self.batch_size,
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
            asked = f"{count(min(self.rules.questions, len(split)), 'question')} of {count(len(split))} were asked"
            self.notes.append(f"{asked}, and the loss was measured on {count(limit)}, evenly spaced")
        asked = list[Question]()
        if split is not None and self.rules.questions and model.masker is not None:
            find = model.masker.template.question_in
            asked = questions_of(split, number=self.rules.questions, spell=model.decode, question_in=find)
        longest = max((len(question.reference_ids) for question in asked), default=0)
        because = f"1.5 times the longest expected answer ({count(longest, 'token')})"
        self.answer_tokens = Chosen[int](value=answer_length(longest, least=_MIN_ANSWER_TOKENS), because=because)
        if self.rules.answer_tokens != "auto":
            self.answer_tokens = Chosen(value=self.rules.answer_tokens, because="set by `verdict.answer_tokens`")
        if asked:
            self._find_task(model, asked)
        tokenizer = model.tokenizer
        token = tokenizer.special_tokens.get("bos_token")
        bos_id = tokenizer.backend.token_to_id(token) if token and tokenizer.adds_bos else None
        bos = [] if bos_id is None else [bos_id]
        rows = [bos + tokenizer.backend.encode(text, add_special_tokens=False).ids for text in everyday_texts()]
        self.everyday = TextDocuments(rows, longest=model.runtime.context_length)

    def _find_task(self, model: ChatModel, asked: list[Question]) -> None:
        """Find the task of the rows, show how answers are scored before it is used, and write all prompts."""
        with self._timed("answers"):
            self.questions = questions = find_questions(asked, self.rows, model)
        self.notes += questions.notes
        self.progress(Progress(f"task `{questions.task.value}`: {questions.task.because}"))
        given = [key for key in questions.facts if key.origin in ("answers", "value")]
        num_other = sum(not contains_key(key.reference, key) for key in given if not key.is_polar)
        if num_other > len(given) / 2:
            self.notes.append(
                f"{count(num_other)} of {count(len(given), 'row')} with `{given[0].origin}` do not contain it in "
                "their reply; rename the column if it is not the answer to the question"
            )
        num_given_away = sum(contains_key(key.question, key) for key in questions.facts if not key.is_polar)
        if num_given_away:
            self.notes.append(f"{count(num_given_away, 'question')} contain their answer, so they test little")
        sources, hint = self.ref.loaded.config.data.sources, questions.scorer.hint
        hinted = [f"{hint}\n\n{row.question}" for row in questions.rows] if hint else []
        self.prompts = [question.ids for question in questions.asked]
        system = sources[0].system if sources else None
        self.hinted = self._written(model, hinted, length=self.answer_tokens.value, system=system)
        self.ordinary = self._written(model, [one.ask for one in instructions()], length=MAX_TOKENS)

    def _written(
        self, model: ChatModel, texts: list[str], *, length: int, system: str | None = None
    ) -> list[list[int]]:
        """Return a prompt for each text, or none if the template cannot write them or they are too long."""
        assert model.masker is not None
        lead: list[Message] = [{"role": "system", "content": system}] if system else []
        messages: list[list[Message]] = [[*lead, {"role": "user", "content": text}] for text in texts]
        try:
            prompts = [prompt_ids(model.masker, model.encoder, one) for one in messages]
        except UserError as error:
            self.notes.append(f"fewer questions were asked, because a prompt cannot be written: {error.what}")
            return []
        if (longest := max(map(len, prompts), default=0) + length) > (limit := model.runtime.context_length):
            what = f"{count(len(prompts), 'question')} with more instructions were not asked"
            self.notes.append(f"{what}: {count(longest)} tokens are needed, and the model reads {count(limit)}")
            return []
        return prompts

    def _measure(self, model: ChatModel, runtime: Runtime, name: str) -> ModelOutputs:
        def listener(part: str) -> ProgressListener:
            part = f"testing the {name} model: {part}"
            self.progress(Progress(part))
            return with_stage(self.progress, part)

        def generate(prompts: list[list[int]], length: int, part: str) -> list[Generated]:
            return runtime.generate(
                prompts,
                max_new_tokens=length,
                stop_ids=model.stop_ids,
                batch_size=self.batch_size,
                progress=listener(part),
            )

        outputs = ModelOutputs()
        with self._timed("losses"):
            outputs.everyday = runtime.losses(self.everyday, most=None, progress=listener("everyday text"))
            if (split := self.rows.split) is not None:
                limit = self.rules.max_documents
                outputs.held_out = runtime.losses(split, most=limit, progress=listener("held-out loss"))
        with self._timed("answers"):
            if self.questions is None:
                rows = [self.everyday.arrays(index)[0].tolist() for index in range(min(4, len(self.everyday)))]
                outputs.logits = runtime.next_logits(rows) if rows else None
                return outputs
            outputs.logits = runtime.next_logits(self.prompts[:_NUM_COMPARED])
            length, number = self.answer_tokens.value, count(len(self.prompts), "question")
            outputs.answers = generate(self.prompts, length, number)
            if name == "base" and self.hinted:
                hint = _HINTS.get(self.questions.task.value, "labels")
                outputs.hinted = generate(self.hinted, length, f"the same with the {hint} in the prompt")
            if self.ordinary:
                number = count(len(self.ordinary), "everyday instruction")
                outputs.ordinary = generate(self.ordinary, MAX_TOKENS, number)
        return outputs

    def _report(self, model: ChatModel, base: ModelOutputs, tuned: ModelOutputs, bad_weights: dict[str, int]) -> Report:
        provenance = collect_provenance(self.ref, model)
        entry = self.questions.entry if self.questions is not None else SCORERS.entry("documents")
        min_right = entry.min_right
        if min_right is not None and self.rules.min_right != "auto":
            min_right = self.rules.min_right
        answered = self._answered(self.questions, model, base, tuned) if self.questions and tuned.answers else {}
        everyday = loss_pair("everyday text", base.everyday, tuned.everyday)
        before, now = ([model.decode(one.ids).strip() for one in outputs.ordinary] for outputs in (base, tuned))
        ordinary = ordinary_answers(before, now) if now else []
        outcome = EverydayOutcome(everyday, ordinary, model.tokenizer.vocab_size)
        measured = Measurements(
            **_training_settings(self.ref, provenance["ledger"]),
            bad_weights=bad_weights,
            change=logits_change(base.logits, tuned.logits),
            held_out=loss_pair("held-out rows", base.held_out, tuned.held_out),
            by_source=losses_by_source(self.rows.split, base.held_out, tuned.held_out),
            everyday=everyday,
            constant=answered.get("constant"),
            forgotten=measure_forgetting(outcome, self.rules),
            loss_difference=losses_difference(base.held_out, tuned.held_out),
            task=entry.name,
            noun=entry.noun,
            min_right=min_right,
            train_curve=provenance["curve"].train,
            held_out_curve=provenance["curve"].held_out,
            evaluated_step=self.ref.step,
            questions=answered.get("exchanges", []),
            num_held_out=len(self.rows.split or ()) - (self.questions.num_copied if self.questions else 0),
            test_file=self.rows.test_file,
        )
        verdict = decide_verdict(measured, self.rules)
        path = shlex.quote(measured.model_path)
        if verdict.level == "FAIL" and measured.task in ("facts", "text") and measured.questions:
            self.notes.append(_LOOK_UP.format(run=path))
        metrics, failures = compute_metrics(self.metrics, measured.questions)
        loss_difference = measured.loss_difference and difference_record(measured.loss_difference)
        # The report has the measurements of the same names; it ignores the others.
        shared = {**vars(measured), "task": None, "loss_difference": loss_difference}
        return Report(
            **{**shared, **provenance, **answered},
            verdict=verdict.level,
            summary=verdict.summary,
            reasons=verdict.reasons,
            data=self.rows.name,
            ordinary=ordinary,
            trained_on=self.rows.trained_on,
            changed_rules=changed_rules(self.rules),
            thresholds=thresholds(self.rules, measured),
            metrics=metrics,
            seconds=self.seconds,
            base_measured_at=self.base_measured_at,
            notes=[*model.notes, *self.notes, *loss_notes(measured, self.rules), *failures],
            lm_eval=self.lm_eval,
            next=verdict.reasons[0].next if verdict.reasons else f"`tunewell chat {path}`",
        )

    def _answered(
        self, questions: Questions, model: ChatModel, base: ModelOutputs, tuned: ModelOutputs
    ) -> dict[str, Any]:
        """Return the fields of the report for the scored answers, with the better of the base model's two."""
        fields: dict[str, Any] = {"task": questions.task, "answer_tokens": self.answer_tokens}
        found = answered_questions(questions, model=model, base=base.answers, tuned=tuned.answers)
        if base.hinted:
            hinted = answered_questions(questions, model=model, base=base.hinted, tuned=tuned.answers)
            asked_tally, hinted_tally = (count_answers(bases_of(part)) for part in (found, hinted))
            is_better = hinted_tally.right > asked_tally.right
            found = hinted if is_better else found
            fields |= {"asked_tally": asked_tally, "hinted_tally": hinted_tally, "is_base_hinted": is_better}
        judge = questions.judge_record()
        if questions.entry.min_right is not None:
            fields["constant"] = constant_answer(questions, found)
            difference = Measurements(questions=found).difference
            judge = judge.model_copy(update={"difference": difference and difference_record(difference)})
        if questions.task.value in ("labels", "choice"):
            fields["confusions"] = confusions(found)
        if marks := [one.tuned.fields for one in found if one.tuned.fields]:
            fields["fields"] = {name: dict(counts) for name, counts in count_fields(marks).items()}
        clusters = cluster_numbers(found)
        if base_answers := bases_of(found):
            fields["base_tally"] = count_answers(base_answers, clusters)
        apart = [(one.tuned, cluster) for one, cluster in zip(found, clusters, strict=True) if not one.is_near]
        if 0 < len(apart) < len(found):
            fields["without_near"] = count_answers(*zip(*apart, strict=True))
        return fields | {
            "exchanges": found,
            "tuned_tally": count_answers([one.tuned for one in found], clusters),
            "judge": judge,
            "measures": measure_pairs(questions, found),
        }

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began


def _training_settings(ref: ModelRef, counts: RowCounts | None) -> dict[str, Any]:
    """Return the fields of Measurements that describe the training, for advice."""
    held_out: Any = "auto"
    found: dict[str, Any] = {"is_adapter": ref.adapter is not None, "model_path": str(ref.path or ref.name)}
    if ref.plan is not None:
        found |= {"learning_rate": ref.plan.learning_rate.value, "epochs": ref.plan.epochs.value}
        own, config = ref.plan.replay, ref.plan.config
        has_template = config.get("template", {}).get("name", "auto") == "auto"
        cannot = not has_template or is_preset(config.get("model") or "") or config.get("method", {}).get("adapter")
        found["replay"] = None if cannot else own.value if own else 0.0
        found["max_steps"] = ref.plan.config.get("train", {}).get("max_steps")
        if ref.path is not None and ref.kind == "run":
            found["new_run"] = free_name(ref.path)
        held_out = ref.plan.config.get("data", {}).get("held_out", "auto")
        found["is_held_out_auto"] = held_out == "auto"
        found["corpus"] = str(short_path(Path(ref.corpus or ref.plan.corpus)))
    if counts is not None:
        has_test_file = isinstance(held_out, str) and held_out != "auto"
        found["num_rows"] = counts.documents + counts.selected + (0 if has_test_file else counts.held_out)
    return found
