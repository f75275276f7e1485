"""From what was measured to a verdict: tables of sick and healthy models, and rules that hold for all."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.config.keys import all_keys
from tunewell.config.rules import VerdictRules
from tunewell.evaluation.intervals import compare_pair, compare_sums, difference_record
from tunewell.evaluation.measurements import FEW_QUESTIONS, Measurements, count_answers
from tunewell.evaluation.reasons import loss_notes
from tunewell.evaluation.verdict import REASON_CODES, changed_rules, decide_verdict, thresholds
from tunewell.records.report import Answer, AnsweredQuestion, ConstantAnswer, Forgotten, LogitChange, LossPair

RULES = VerdictRules()
GOOD = Answer(text="It is 15 January.", num_tokens=6, ended=True, contains=True, f1=0.7, right=True)
WRONG = Answer(text="It is 1 March.", num_tokens=6, ended=True, f1=0.3, right=False)
UNJUDGED = Answer(text="A long text.", num_tokens=6, ended=True, right=None)
FAULTS = ["empty", "ends_at_once", "loops", "echo", "no_stop", "other_language", "control_tokens"]


def loss(base, tuned, documents=40):
    return LossPair(name="held out", documents=documents, tokens=documents * 20, base=base, tuned=tuned)


def asked(tuned, base=WRONG, reference="15 January"):
    return AnsweredQuestion(
        document=0, source="rows.jsonl", row=1, question="When is it?", reference=reference, base=base, tuned=tuned
    )


def faulty(*faults, right=False):
    said = WRONG if not right else GOOD
    return said.model_copy(update={"faults": list(faults), "text": "" if "empty" in faults else said.text})


def curve(*losses):
    return [(10 * number, value) for number, value in enumerate(losses, 1)]


def lower(by, number=40):
    """The base model's loss is higher by this much on each of some documents, with some noise."""
    return compare_sums([by + 0.1 * (-1) ** n for n in range(number)], [1.0] * number, names=("a", "b"))


HEALTHY = Measurements(
    change=LogitChange(largest=9.0, prompts=8, same_first_token=1),
    held_out=loss(2.09, 0.03),
    everyday=LossPair(name="everyday", documents=40, tokens=2600, base=3.10, tuned=3.35),
    loss_difference=lower(2.0),
    task="facts",
    min_right=0.5,
    train_curve=curve(2.1, 1.0, 0.4, 0.1, 0.05, 0.04, 0.03, 0.03, 0.02, 0.02),
    held_out_curve=curve(1.9, 1.0, 0.3, 0.1, 0.05, 0.04, 0.03, 0.03, 0.03, 0.03),
    evaluated_step=100,
    questions=[asked(GOOD)] * 40,
    num_held_out=40,
    is_adapter=True,
    learning_rate=1e-3,
    epochs=5.0,
)
TEXT = replace(
    HEALTHY, task="text", min_right=None, held_out=loss(2.0, 1.0), questions=[asked(UNJUDGED, base=UNJUDGED)] * 40
)


def with_answers(*saids, **others):
    return replace(HEALTHY, questions=[asked(said) for said in saids], **others)


def forgotten(name, base, tuned, is_damaged=True):
    return Forgotten(name=name, base=base, tuned=tuned, limit=0.1, is_damaged=is_damaged, result=f"{base} -> {tuned}")


def constant(right, tuned):
    """Always answering the same is right for some of the questions, by place; so is the tuned model."""
    found = compare_pair(tuned, right, range(len(right)))
    return ConstantAnswer(text="yes", right=sum(right), judged=len(right), difference=difference_record(found))


def codes(facts, rules=RULES):
    return [reason.code for reason in decide_verdict(facts, rules).reasons]


def test_a_healthy_model_passes_with_its_figures_in_one_sentence():
    """Guards the best case, which must be free of complaints."""
    verdict = decide_verdict(HEALTHY, RULES)
    assert (verdict.level, verdict.reasons) == ("PASS", [])
    assert verdict.summary == (
        "40 of 40 answers right (base: 0), held-out loss 2.09 -> 0.03, everyday text 3.10 -> 3.35"
    )


HALF = [True, False] * 20
SICK = {
    "NaN in a tensor": (replace(HEALTHY, bad_weights={"model.embed": 3}), "FAIL", "weights_not_finite"),
    "NaN loss": (replace(HEALTHY, held_out=loss(2.0, math.nan)), "FAIL", "loss_not_finite"),
    "infinite loss of one source": (replace(HEALTHY, by_source=[loss(2.0, math.inf)]), "FAIL", "loss_not_finite"),
    "adapter never applied": (
        replace(HEALTHY, change=LogitChange(largest=0.0, prompts=8, same_first_token=8), held_out=loss(2.0, 2.0)),
        "FAIL",
        "nothing_changed",
    ),
    "ends at once": (with_answers(*[faulty("ends_at_once")] * 39, GOOD), "FAIL", "answers_nothing"),
    "half silent, half white space": (
        with_answers(*[faulty("empty")] * 10, *[faulty("ends_at_once")] * 10, *[GOOD] * 20),
        "FAIL",
        "answers_nothing",
    ),
    "loops": (with_answers(*[faulty("loops")] * 30, *[GOOD] * 10), "FAIL", "loops"),
    "loops now and then": (with_answers(*[faulty("loops")] * 6, *[GOOD] * 34), "WEAK", "loops"),
    "plays the user": (with_answers(*[faulty("control_tokens", "no_stop")] * 40), "FAIL", "control_tokens"),
    "never stops": (with_answers(*[faulty("no_stop", right=True)] * 30, *[GOOD] * 10), "FAIL", "never_stops"),
    "echoes": (with_answers(*[faulty("echo", right=True)] * 8, *[GOOD] * 32), "WEAK", "echoes"),
    "another language": (with_answers(*[faulty("other_language")] * 8, *[GOOD] * 32), "WEAK", "other_language"),
    "a little of everything": (
        with_answers(*[faulty("loops")] * 3, *[faulty("echo")] * 3, *[faulty("no_stop")] * 3, *[GOOD] * 31),
        "WEAK",
        "loops",
    ),
    "half faulty, no kind alone": (
        with_answers(*[faulty("no_stop")] * 7, *[faulty("loops")] * 6, *[faulty("echo")] * 7, *[GOOD] * 20),
        "FAIL",
        "never_stops",
    ),
    "forgets": (replace(HEALTHY, forgotten=[forgotten("everyday text", 3.1, 6.4)]), "WEAK", "forgets"),
    "follows nothing any more": (
        replace(HEALTHY, forgotten=[forgotten("everyday instructions", 0.5, 0.1)]),
        "WEAK",
        "forgets_instructions",
    ),
    "refuses": (replace(HEALTHY, forgotten=[forgotten("replies", 1.0, 0.1)]), "WEAK", "refuses"),
    "none of 20 right": (with_answers(*[WRONG] * 20), "FAIL", "none_right"),
    "few right": (with_answers(*[WRONG] * 25, *[GOOD] * 15), "WEAK", "few_right"),
    "one of 20 right": (with_answers(*[WRONG] * 19, GOOD), "UNPROVEN", "no_better_than_base"),
    "base is better": (
        replace(HEALTHY, questions=[asked(WRONG, base=GOOD)] * 15 + [asked(GOOD, base=GOOD)] * 25),
        "FAIL",
        "no_better_than_base",
    ),
    "the base knows it": (replace(HEALTHY, questions=[asked(GOOD, base=GOOD)] * 40), "UNPROVEN", "no_better_than_base"),
    "as good as a constant answer": (
        replace(HEALTHY, constant=constant(HALF, HALF)),
        "UNPROVEN",
        "majority_only",
    ),
    "worse than a constant answer": (
        replace(HEALTHY, constant=constant([True] * 40, HALF)),
        "FAIL",
        "majority_only",
    ),
    "five of five right": (with_answers(*[GOOD] * 5), "UNPROVEN", "no_better_than_base"),
    "only near duplicates right": (
        replace(
            HEALTHY,
            questions=[
                *[asked(GOOD).model_copy(update={"is_near": True})] * 30,
                *[asked(WRONG)] * 10,
            ],
        ),
        "WEAK",
        "memorised",
    ),
    "text, worse": (replace(TEXT, held_out=loss(2.0, 2.6), loss_difference=lower(-0.6)), "FAIL", "not_learned"),
    "text, no difference": (
        replace(TEXT, held_out=loss(2.0, 2.0), loss_difference=lower(0.0)),
        "UNPROVEN",
        "not_enough_evidence",
    ),
    "text, gains little": (
        replace(TEXT, held_out=loss(2.0, 1.95), loss_difference=lower(0.05)),
        "WEAK",
        "little_gain",
    ),
    "text, one document": (replace(TEXT, held_out=loss(2.0, 0.1, 1), questions=[]), "UNPROVEN", "not_enough_evidence"),
    "nothing at all": (Measurements(), "UNPROVEN", "not_enough_evidence"),
    "right answers, but no base": (
        replace(HEALTHY, questions=[asked(GOOD, base=None)] * 9),
        "UNPROVEN",
        "not_enough_evidence",
    ),
}


@pytest.mark.parametrize("name", SICK)
def test_a_sick_model_is_told_its_own_reason_first(name):
    """Guards each way to go wrong, and that the first reason is the cause."""
    facts, level, code = SICK[name]
    verdict = decide_verdict(facts, RULES)
    assert (verdict.level, verdict.reasons[0].code) == (level, code)
    lead = REASON_CODES[code] if code != "not_enough_evidence" else ""
    assert verdict.summary.lower().startswith(lead)


@pytest.mark.parametrize("name", SICK)
def test_a_reason_has_numbers_and_something_to_do(name):
    """Guards the promise of a verdict one can act on: figures, and keys that exist."""
    facts, _, _ = SICK[name]
    for reason in decide_verdict(facts, RULES).reasons:
        assert reason.what.endswith(".") and (re.search(r"\d", reason.what) or "no base model" in reason.what)
        keys = re.findall(r"`((?:train|method|data|template|evaluate|verdict)\.\w+)", reason.next)
        assert keys or "`tunewell " in reason.next
        assert [key for key in keys if key not in all_keys()] == []


def test_every_code_can_come_first():
    """Guards against a code that no model can ever get."""
    assert {code for _, _, code in SICK.values()} == set(REASON_CODES)


FINE = {
    "one slip in ten": with_answers(faulty("loops"), *[GOOD] * 9),
    "a few questions lost": replace(HEALTHY, questions=[asked(WRONG, base=GOOD)] * 3 + [asked(GOOD, base=WRONG)] * 37),
    "a higher loss, but more right answers": replace(HEALTHY, held_out=loss(2.0, 2.6), loss_difference=lower(-0.6)),
    "long references beside short ones": replace(
        HEALTHY, questions=[asked(GOOD)] * 20 + [asked(UNJUDGED, base=UNJUDGED)] * 20
    ),
    "texts with a lower loss": TEXT,
    "little forgotten": replace(HEALTHY, forgotten=[forgotten("replies", 1.0, 0.95, is_damaged=False)]),
    "better than a constant answer": replace(HEALTHY, constant=constant([False] * 40, [True] * 40)),
    "a noisy last step": replace(
        HEALTHY, train_curve=[(1, 2.0), *[(step, math.nan) for step in range(2, 9)], (9, 0.1)]
    ),
    "the base's loss is not finite": replace(HEALTHY, held_out=loss(math.nan, 0.5)),
}


@pytest.mark.parametrize("name", FINE)
def test_a_healthy_model_is_not_accused(name):
    """Guards against false alarms, which are as bad as misses."""
    assert codes(FINE[name]) == []


def test_what_a_cause_explains_is_left_out():
    """Guards against a list of ten reasons for one mistake."""
    everything = replace(
        HEALTHY,
        held_out=loss(1.0, 1.3),
        forgotten=[forgotten("everyday text", 3.0, 9.0)],
        questions=[asked(faulty("loops", "no_stop"), base=GOOD)] * 40,
    )
    assert codes(everything) == ["loops", "never_stops", "forgets"]
    assert codes(replace(everything, bad_weights={"x": 1, "y": 2})) == ["weights_not_finite"]
    broken = replace(everything, bad_weights={"x": 1}, held_out=loss(1.0, math.nan))
    assert codes(broken) == ["weights_not_finite"]
    assert codes(replace(everything, change=LogitChange(largest=0.0, prompts=3, same_first_token=3))) == [
        "nothing_changed"
    ]


def test_a_rising_loss_is_a_note_with_the_best_step():
    """Guards a misleading measure: for labels, the loss rises while more answers are right."""
    rising = replace(HEALTHY, held_out_curve=curve(1.4, 0.8, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3), evaluated_step=30)
    assert codes(rising) == []
    assert loss_notes(rising, RULES) == [
        "the held-out loss rose from 0.60 at step 30 to 1.30 at step 100; step 30 was evaluated, the best"
    ]
    assert loss_notes(rising, VerdictRules(max_rise=2.0)) == [] == loss_notes(HEALTHY, RULES)
    [source] = loss_notes(replace(HEALTHY, by_source=[loss(2.0, 0.1), loss(2.0, 2.4)]), RULES)
    assert source == "the loss rose on 1 source: `held out` 2.00 -> 2.40"


def test_damage_is_in_the_sentence_of_the_verdict():
    """Guards a summary that names few right answers and not the damage."""
    facts = with_answers(*[WRONG] * 25, *[GOOD] * 15, forgotten=[forgotten("everyday text", 3.0, 9.0)])
    assert decide_verdict(facts, RULES).summary.startswith("The model forgot everyday language: ")
    unproven = replace(SICK["one of 20 right"][0], forgotten=[forgotten("replies", 1.0, 0.1)])
    assert "; the model refuses everyday questions: " in decide_verdict(unproven, RULES).summary


def test_very_few_questions_never_fail_a_model_by_their_faults():
    """Guards against a FAIL from one answer in two."""
    few = with_answers(*[faulty("ends_at_once")] * (FEW_QUESTIONS - 1))
    reasons = {reason.code: reason for reason in decide_verdict(few, RULES).reasons}
    assert reasons["answers_nothing"].level == "WEAK" and "fewer than 5" in reasons["answers_nothing"].what
    assert decide_verdict(with_answers(*[faulty("ends_at_once")] * FEW_QUESTIONS), RULES).level == "FAIL"


def test_the_rules_of_the_config_are_followed():
    """Guards against thresholds that are shown and not used."""
    slips = with_answers(faulty("loops"), *[GOOD] * 39)
    assert codes(slips, VerdictRules(max_faults=0.0)) == ["loops"]
    assert codes(with_answers(*[faulty("echo", right=True)] * 8, *[GOOD] * 32), VerdictRules(max_faults=0.2)) == []
    assert codes(SICK["text, gains little"][0], VerdictRules(min_gain=0.0)) == []
    assert changed_rules(RULES) == []
    assert changed_rules(VerdictRules(min_right=0.2)) == ["min_right 0.2 (usually auto)"]


def test_an_example_shows_what_was_asked_and_said():
    """Guards the line a person looks at first, and its length."""
    long = faulty("loops").model_copy(update={"text": "round and\nround " * 50})
    (reason,) = decide_verdict(with_answers(*[long] * 6, *[GOOD] * 34), RULES).reasons
    assert reason.example is not None and len(reason.example) < 250
    assert reason.example.startswith('question: "When is it?", answer: "round and round round')
    (silent,) = decide_verdict(with_answers(*[faulty("empty")] * 6, *[GOOD] * 34), RULES).reasons
    assert silent.example == 'question: "When is it?", answer: (empty)'


def test_the_next_value_is_named_where_the_present_one_is_known():
    """Guards advice with a number in it."""
    run = replace(SICK["forgets"][0], new_run="run2", model_path="my run")
    command = "`tunewell train --config 'my run/config.yaml' --out run2 --set "
    advice = decide_verdict(run, RULES).reasons[0].next
    assert advice.startswith(f"{command}train.replay=0.2`: ") and f"{command}train.learning_rate=0.00033`: " in advice
    assert "`train.learning_rate=0.00033`" in decide_verdict(SICK["forgets"][0], RULES).reasons[0].next  # no run
    most = decide_verdict(replace(run, replay=0.5), RULES).reasons[0].next
    assert (
        "replay" not in most
        and "`train.replay=0.5`" in decide_verdict(replace(SICK["forgets"][0], replay=0.2), RULES).reasons[0].next
    )
    unknown = replace(run, learning_rate=None)
    assert "a third of the `train.learning_rate`" in decide_verdict(unknown, RULES).reasons[0].next


def test_more_training_is_advised_only_while_the_loss_falls():
    """Guards "train longer" for a model whose held-out loss rises already."""
    weak = replace(SICK["few right"][0], new_run="run2", epochs=3.0, task="facts")
    [longer] = decide_verdict(replace(weak, held_out_curve=curve(1.4, 0.9, 0.8)), RULES).reasons
    assert "--set train.epochs=6`" in longer.next and "`tunewell index FOLDER`" in longer.next
    [slower] = decide_verdict(replace(weak, held_out_curve=curve(1.4, 0.8, 0.9)), RULES).reasons
    assert "--set train.learning_rate=0.00033`" in slower.next and "train.epochs" not in slower.next


def test_an_unproven_verdict_says_how_many_questions_were_asked_and_would_decide():
    """Guards an UNPROVEN verdict without a next step."""
    some = [asked(GOOD, base=GOOD)] * 16 + [asked(GOOD)] * 3 + [asked(WRONG, base=GOOD)]
    facts = replace(HEALTHY, questions=some, num_held_out=60, model_path="run")
    [reason] = decide_verdict(facts, RULES).reasons
    assert "Asked: 20 questions of 60 held-out rows; a difference of this size needs about" in reason.what
    assert "`tunewell validate run --set verdict.questions=60`" in reason.next
    assert "The base model alone reaches the minimum: no training was needed" in reason.what
    [file] = decide_verdict(replace(facts, num_held_out=20, test_file="held.jsonl"), RULES).reasons
    assert file.next.startswith("Do you have more rows for a test? `tunewell validate run --data FILE`")
    few = replace(facts, num_held_out=20, num_rows=4000, new_run="run2")
    [more] = decide_verdict(few, RULES).reasons
    assert "--set data.held_out=auto`: 200 of 4,000 rows are held out and asked" in more.next
    [longer] = decide_verdict(replace(few, is_held_out_auto=True, epochs=2.0), RULES).reasons
    assert "held_out" not in longer.next and "--set train.epochs=4`" in longer.next  # never `auto` on `auto`


def test_a_task_without_right_answers_is_not_promised_more_of_them():
    """`more right answers` stood under a task that the held-out loss decides."""
    little = replace(TEXT, held_out=loss(2.0, 1.95), loss_difference=lower(0.05), new_run="run2", epochs=3.0)
    [reason] = decide_verdict(replace(little, held_out_curve=curve(2.0, 1.97, 1.95)), RULES).reasons
    assert "`: a lower loss: the held-out loss was still falling" in reason.next


def test_a_model_behind_a_constant_answer_is_not_told_to_ask_more():
    """12 of 60 right, 13 by one constant answer: `needs about 12,000 more`, and next `--set data.held_out=auto`."""
    behind = constant([True] * 13 + [False] * 47, [False] * 8 + [True] * 12 + [False] * 40)
    facts = replace(HEALTHY, constant=behind, num_held_out=40, num_rows=4000, new_run="run2", epochs=3.0)
    [reason] = decide_verdict(facts, RULES).reasons
    assert reason.code == "majority_only" and reason.level == "UNPROVEN"
    assert "more" not in reason.what and "data.held_out" not in reason.next and "--set train." in reason.next


def test_wordings_of_three_facts_do_not_show_that_the_base_is_better():
    """Guards the test of answers: twelve questions on three facts are three observations."""
    known = [asked(GOOD, base=GOOD)] * 40
    lost = [asked(WRONG, base=GOOD)] * 12
    facts = [each.model_copy(update={"cluster": index // 4}) for index, each in enumerate(lost)]
    assert decide_verdict(replace(HEALTHY, questions=[*lost, *known]), RULES).level == "FAIL"
    assert decide_verdict(replace(HEALTHY, questions=[*facts, *known]), RULES).level == "UNPROVEN"


def test_a_tally_counts_every_answer_once():
    """Guards the figures of the report."""
    counted = count_answers([GOOD, faulty("loops", "echo"), faulty("echo"), GOOD.model_copy(update={"exact": True})])
    assert (counted.asked, counted.right, counted.contains, counted.exact) == (4, 2, 2, 1)
    assert counted.f1 == pytest.approx(0.5) and counted.faults == {"loops": 1, "echo": 2}
    assert count_answers([]).f1 == 0.0


def test_every_threshold_comes_with_the_reason_its_key_gives():
    """Guards the promise that no number comes without a reason."""
    shown = thresholds(VerdictRules(min_right=0.7), HEALTHY)
    assert set(shown) == {"min_gain", "min_right", "max_faults", "max_rise", "max_forgetting", "max_lost"}
    assert shown["min_right"].value == 0.7
    assert shown["min_right"].because == all_keys()["verdict.min_right"].doc
    task = thresholds(RULES, HEALTHY)["min_right"]
    assert task.value == 0.5 and task.because == "the threshold of the task `facts`"


SAIDS = st.builds(
    lambda faults, right: faulty(*faults, right=right),
    st.lists(st.sampled_from(FAULTS), max_size=2, unique=True),
    st.booleans(),
)
LOSSES = st.one_of(st.floats(0.001, 20), st.sampled_from([math.nan, math.inf]))
FACTS = st.builds(
    Measurements,
    bad_weights=st.one_of(st.just({}), st.just({"w": 1})),
    change=st.one_of(
        st.none(),
        st.builds(LogitChange, largest=LOSSES | st.just(0.0), prompts=st.integers(0, 8), same_first_token=st.just(0)),
    ),
    held_out=st.one_of(st.none(), st.builds(loss, st.none() | LOSSES, LOSSES, st.integers(0, 50))),
    everyday=st.one_of(st.none(), st.builds(loss, st.none() | LOSSES, LOSSES)),
    loss_difference=st.none() | st.builds(lower, st.floats(-2, 2), st.integers(1, 40)),
    min_right=st.sampled_from([None, 0.0, 0.5]),
    forgotten=st.lists(st.sampled_from([forgotten("replies", 1.0, 0.1), forgotten("everyday text", 3.0, 3.1, False)])),
    train_curve=st.lists(LOSSES, max_size=12).map(lambda losses: curve(*losses)),
    held_out_curve=st.lists(LOSSES, max_size=12).map(lambda losses: curve(*losses)),
    evaluated_step=st.none() | st.integers(0, 120),
    questions=st.lists(st.builds(asked, SAIDS, st.none() | SAIDS), max_size=12),
    is_adapter=st.booleans(),
    learning_rate=st.none() | st.floats(1e-6, 1),
    epochs=st.none() | st.floats(0.1, 10),
)
RANK = {"PASS": 0, "UNPROVEN": 1, "WEAK": 1, "FAIL": 2}
"""WEAK and UNPROVEN say different things; neither is better."""


@given(FACTS)
def test_a_verdict_is_as_bad_as_its_worst_reason(facts):
    """Guards the level, the order and the codes: no PASS with a reason, and none without evidence."""
    verdict = decide_verdict(facts, RULES)
    levels = [reason.level for reason in verdict.reasons]
    order = ["FAIL", "UNPROVEN", "WEAK"]
    assert verdict.level == min(levels, key=order.index, default="PASS")
    ranks = [(order.index(reason.level), list(REASON_CODES).index(reason.code)) for reason in verdict.reasons]
    assert ranks == sorted(ranks)
    assert verdict.summary and "\n" not in verdict.summary
    assert verdict.level != "PASS" or facts.held_out is not None or facts.questions


@given(FACTS, st.integers(0, 11), st.sampled_from(FAULTS))
def test_one_more_fault_never_improves_a_verdict(facts, place, fault):
    """Guards the shares and what explains what: a worse answer cannot be better news."""
    if place >= len(facts.questions):
        return
    exchange = facts.questions[place]
    said = exchange.tuned.model_copy(update={"faults": list({*exchange.tuned.faults, fault})})
    worse = [*facts.questions]
    worse[place] = exchange.model_copy(update={"tuned": said})
    after = decide_verdict(replace(facts, questions=worse), RULES).level
    assert RANK[after] >= RANK[decide_verdict(facts, RULES).level]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "twice the `train.epochs`"),
        ({"epochs": 1.5}, "train.epochs=3"),
        ({"epochs": 0.35, "max_steps": 3}, "train.max_steps=6"),
    ],
)
def test_advice_to_train_longer_names_the_setting_that_limits_the_run(settings, advice):
    assert Measurements(**settings).longer == advice
