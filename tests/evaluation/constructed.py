"""Build evaluations from rows and answers with a known result, without running a model."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from tunewell.config.rules import VerdictRules
from tunewell.evaluation.forgetting import EverydayOutcome, instructions, measure_forgetting, ordinary_answers
from tunewell.evaluation.measurements import Measurements
from tunewell.evaluation.questions import Questions, judge_by_task
from tunewell.evaluation.scores import answered_questions, constant_answer, losses_difference
from tunewell.evaluation.verdict import Verdict, decide_verdict
from tunewell.inference.decoder import Generated
from tunewell.inference.runtime import DocumentLosses
from tunewell.records.report import LogitChange, LossPair
from tunewell.scoring.base import ReferenceRow
from tunewell.scoring.questions import Question

CHANGED = LogitChange(largest=9.0, prompts=8, same_first_token=1)


@dataclass
class Run:
    """A constructed run: its rows, and what both models answer."""

    training: list[ReferenceRow]
    held_out: list[ReferenceRow]
    base: list[str]
    tuned: list[str]
    losses: tuple[float, float] = (2.0, 1.0)
    everyday: tuple[float, float] = (3.0, 3.1)
    ordinary: tuple[list[str], list[str]] | None = None
    rules: VerdictRules = field(default_factory=VerdictRules)
    is_chat: bool = False
    ended: bool = True

    def with_rules(self, **rules: Any) -> "Run":
        return replace(self, rules=VerdictRules(**rules))


def judge(run: Run) -> tuple[Verdict, Questions]:
    """Return the verdict of a constructed run, by the code of `validate`."""
    questions = judge_by_task(run.held_out, run.training, run.rules, is_chat=run.is_chat)
    questions.asked = [
        Question(index, [1], [1], row.question, row.question, row.reference) for index, row in enumerate(run.held_out)
    ]
    questions.places = [("rows.jsonl", index) for index in range(len(run.held_out))]
    texts = [*run.base, *run.tuned]
    model: Any = SimpleNamespace(
        decode=lambda ids: texts[ids[0]] if ids else "", tokenizer=SimpleNamespace(control_ids=())
    )
    generated = [Generated([index] if text else [], run.ended) for index, text in enumerate(texts)]
    base, tuned = generated[: len(run.base)], generated[len(run.base) :]
    answered = answered_questions(questions, model=model, base=base, tuned=tuned)
    entry = questions.entry
    min_right = entry.min_right if run.rules.min_right == "auto" or entry.min_right is None else run.rules.min_right
    number = len(run.held_out)
    everyday = LossPair(name="everyday", documents=40, tokens=2600, base=run.everyday[0], tuned=run.everyday[1])
    ordinary = ordinary_answers(*run.ordinary) if run.ordinary else []
    measured = Measurements(
        change=CHANGED,
        held_out=LossPair(
            name="held out", documents=number, tokens=20 * number, base=run.losses[0], tuned=run.losses[1]
        ),
        everyday=everyday,
        loss_difference=losses_difference(*(_losses(value, number) for value in run.losses)),
        task=entry.name,
        noun=entry.noun,
        min_right=min_right,
        constant=constant_answer(questions, answered) if min_right is not None else None,
        forgotten=measure_forgetting(EverydayOutcome(everyday, ordinary, 49_152), run.rules),
        questions=answered,
        num_held_out=number,
        num_rows=len(run.training) + number,
        epochs=3.0,
        learning_rate=1e-3,
    )
    return decide_verdict(measured, run.rules), questions


def _losses(mean: float, number: int) -> DocumentLosses:
    noise = np.random.default_rng(0).normal(0, 0.2, number)
    tokens = np.full(number, 20)
    return DocumentLosses(np.arange(number), (mean + 0.1 * mean * noise) * tokens, tokens)


def followed() -> list[str]:
    """Return an answer to each everyday instruction that follows it."""
    return [_follow(one) for one in instructions()]


def _follow(one: Any) -> str:
    if one.is_json:
        return '{"name": "Anna"}'
    for text in (
        " ".join([*one.all, *one.any[:1]]),
        "1 2 3 4 5",
        "HELLO",
        f"{' '.join([*one.any[:1]])}, one, two and three",
        "1. Wash and dress for work.\n2. Eat breakfast.",
        "Hello, it is nice to hear from you. How can I help you today?",
        " ".join(
            [*one.all, *one.any[:1], "is", "something", "that", "many", "people", "know", "well,", "like,", "and"] * 4
        ),
        "Is music nice?",
    ):
        if one.is_followed(text):
            return text
    raise AssertionError(one.ask)
