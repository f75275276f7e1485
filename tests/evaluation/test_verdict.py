"""From what was measured to a verdict: tables of sick and healthy models, and rules that hold for all."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.config.keys import all_keys
from tunewell.config.rules import VerdictRules
from tunewell.evaluation.measurements import FEW_QUESTIONS, Measurements, count_answers
from tunewell.evaluation.verdict import REASON_CODES, decide_verdict, thresholds
from tunewell.records.report import Answer, AnsweredQuestion, LogitChange, LossPair

RULES = VerdictRules()
GOOD = Answer(text="It is 15 January.", num_tokens=6, ended=True, contains=True, f1=0.7, right=True)
WRONG = Answer(text="It is 1 March.", num_tokens=6, ended=True, f1=0.3)
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


HEALTHY = Measurements(
    change=LogitChange(largest=9.0, prompts=8, same_first_token=1),
    held_out=loss(2.09, 0.03),
    everyday=LossPair(name="everyday", documents=40, tokens=2600, base=3.10, tuned=3.35),
    vocab_size=49_152,
    train_curve=curve(2.1, 1.0, 0.4, 0.1, 0.05, 0.04, 0.03, 0.03, 0.02, 0.02),
    held_out_curve=curve(1.9, 1.0, 0.3, 0.1, 0.05, 0.04, 0.03, 0.03, 0.03, 0.03),
    evaluated_step=100,
    questions=[asked(GOOD)] * 40,
    is_adapter=True,
    learning_rate=1e-3,
    epochs=5.0,
)


KNOWN_BEFORE = [asked(GOOD, base=GOOD)] * 40


def with_answers(*saids, **others):
    return replace(HEALTHY, questions=[asked(said) for said in saids], **others)


def codes(facts, rules=RULES):
    return [reason.code for reason in decide_verdict(facts, rules).reasons]


def test_a_healthy_model_passes_with_its_figures_in_one_sentence():
    """Guards the best case, which must be free of complaints."""
    verdict = decide_verdict(HEALTHY, RULES)
    assert (verdict.level, verdict.reasons) == ("PASS", [])
    assert verdict.summary == (
        "40 of 40 held-out questions answered right (base: 0), held-out loss 2.09 -> 0.03, everyday text 3.10 -> 3.35"
    )


OVER_FITTED = replace(
    HEALTHY,
    held_out=loss(2.0, 0.6),
    train_curve=curve(2.0, 0.9, 0.3, 0.1, 0.04, 0.02, 0.01, 0.01, 0.01, 0.01),
    held_out_curve=curve(1.4, 0.8, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3),
    evaluated_step=30,
)
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
    "over-fitted, best judged": (OVER_FITTED, "WEAK", "over_fitted"),
    "over-fitted, above the base": (
        replace(OVER_FITTED, held_out=loss(1.0, 1.3), evaluated_step=100, questions=KNOWN_BEFORE),
        "FAIL",
        "over_fitted",
    ),
    "forgets": (replace(HEALTHY, everyday=loss(3.1, 6.4)), "FAIL", "forgets"),
    "forgets a little": (replace(HEALTHY, everyday=loss(3.1, 5.0)), "WEAK", "forgets"),
    "learns nothing": (replace(HEALTHY, held_out=loss(2.0, 2.0), questions=KNOWN_BEFORE), "FAIL", "not_learned"),
    "gets worse": (replace(HEALTHY, held_out=loss(2.0, 2.6), questions=KNOWN_BEFORE), "FAIL", "not_learned"),
    "gets worse in words, better in answers": (replace(HEALTHY, held_out=loss(2.0, 2.6)), "WEAK", "not_learned"),
    "one source gets worse": (
        replace(HEALTHY, by_source=[loss(2.0, 0.1), loss(2.0, 2.4)]),
        "WEAK",
        "little_gain",
    ),
    "gains little": (replace(HEALTHY, held_out=loss(2.0, 1.95)), "WEAK", "little_gain"),
    "few right": (with_answers(*[WRONG] * 25, *[GOOD] * 15), "WEAK", "few_right"),
    "base is better": (
        replace(HEALTHY, questions=[asked(WRONG, base=GOOD)] * 15 + [asked(GOOD, base=GOOD)] * 25),
        "WEAK",
        "no_better_than_base",
    ),
    "one document": (replace(HEALTHY, held_out=loss(2.0, 0.1, 1), questions=[]), "UNPROVEN", "not_enough_evidence"),
    "nothing at all": (Measurements(), "UNPROVEN", "not_enough_evidence"),
    "no base and no short reference": (
        Measurements(held_out=loss(None, 0.5), questions=[asked(GOOD, base=None, reference="word " * 50)] * 9),
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
    assert verdict.summary.lower().startswith(REASON_CODES[code])


@pytest.mark.parametrize("name", SICK)
def test_a_reason_has_numbers_and_something_to_do(name):
    """Guards the promise of a verdict one can act on: figures, and keys that exist."""
    facts, _, _ = SICK[name]
    for reason in decide_verdict(facts, RULES).reasons:
        assert re.search(r"\d", reason.what) and reason.what.endswith(".")
        keys = re.findall(r"`((?:train|method|data|template|evaluate|verdict)\.\w+)", reason.next)
        assert keys or "`tunewell " in reason.next
        assert [key for key in keys if key not in all_keys()] == []


def test_every_code_can_come_first():
    """Guards against a code that no model can ever get."""
    assert {code for _, _, code in SICK.values()} == set(REASON_CODES)


FINE = {
    "one slip in ten": with_answers(faulty("loops"), *[GOOD] * 9),
    "one slip in five": with_answers(faulty("no_stop", right=True), *[GOOD] * 4),
    "trained from nothing, everyday text is strange": replace(
        HEALTHY, everyday=loss(10.6, 30.0), held_out=loss(10.8, 2.0)
    ),
    "the base was already good": replace(HEALTHY, held_out=loss(0.05, 0.052), questions=[asked(GOOD, base=GOOD)] * 40),
    "one question lost by chance": replace(
        HEALTHY, questions=[asked(WRONG, base=GOOD)] * 3 + [asked(GOOD, base=GOOD)] * 37
    ),
    "long references are not right or wrong": replace(
        HEALTHY, questions=[asked(WRONG, base=WRONG, reference="word " * 50)] * 40
    ),
    "held-out loss wavers": replace(HEALTHY, held_out_curve=curve(1.9, 0.5, 0.20, 0.21, 0.25, 0.20, 0.22)),
    "held-out loss rises by next to nothing": replace(HEALTHY, held_out_curve=curve(1.9, 0.5, 0.10, 0.12, 0.15, 0.18)),
    "more right, in other words than the references": replace(
        HEALTHY,
        questions=[asked(GOOD.model_copy(update={"f1": 0.2}), base=WRONG)] * 10
        + [asked(GOOD.model_copy(update={"f1": 0.2}), base=GOOD)] * 10,
    ),
    "held-out loss rises while the training loss is far from nothing": replace(
        HEALTHY, train_curve=curve(2.0, 1.5, 1.2, 1.1), held_out_curve=curve(1.8, 1.5, 1.9), held_out=loss(2.5, 1.5)
    ),
    "a noisy last step": replace(
        HEALTHY, train_curve=[(1, 2.0), *[(step, math.nan) for step in range(2, 9)], (9, 0.1)]
    ),
    "no curves, no everyday text, no change": Measurements(held_out=loss(2.0, 1.0)),
    "no base, but right answers": Measurements(held_out=loss(None, 0.5), questions=[asked(GOOD, base=None)] * 9),
    "the base's loss is not finite": replace(HEALTHY, held_out=loss(math.nan, 0.5)),
}


@pytest.mark.parametrize("name", FINE)
def test_a_healthy_model_is_not_accused(name):
    """Guards against false alarms, which are as bad as misses."""
    assert codes(FINE[name]) == []


def test_what_a_cause_explains_is_left_out():
    """Guards against a list of ten reasons for one mistake."""
    everything = replace(
        OVER_FITTED,
        held_out=loss(1.0, 1.3),
        everyday=loss(3.0, 9.0),
        questions=[asked(faulty("loops", "no_stop"), base=GOOD)] * 40,
    )
    assert codes(everything) == ["loops", "never_stops", "over_fitted", "forgets"]
    assert codes(replace(everything, bad_weights={"x": 1, "y": 2})) == ["weights_not_finite"]
    broken = replace(everything, bad_weights={"x": 1}, held_out=loss(1.0, math.nan))
    assert codes(broken) == ["weights_not_finite"]
    assert codes(replace(everything, change=LogitChange(largest=0.0, prompts=3, same_first_token=3))) == [
        "nothing_changed"
    ]


def test_over_fitting_says_which_step_was_best_and_which_is_judged():
    """Guards the sentence a person decides by."""
    best = decide_verdict(OVER_FITTED, RULES).reasons[0]
    assert "0.60 at step 30 to 1.30 at step 100 (this is step 30, the best)" in best.what
    assert "`evaluate.patience: 2` or `train.epochs: 1.5`" in best.next
    last = decide_verdict(replace(OVER_FITTED, held_out=loss(1.0, 1.3), evaluated_step=100), RULES).reasons[0]
    assert "(this is step 100; step 30 was the best)" in last.what
    assert "1.30 is above the base model's 1.00" in last.what


def test_very_few_questions_or_documents_never_fail_a_model():
    """Guards against a FAIL from one answer in two."""
    few = with_answers(*[faulty("ends_at_once")] * (FEW_QUESTIONS - 1))
    assert decide_verdict(few, RULES).level == "WEAK" and "fewer than 5" in decide_verdict(few, RULES).reasons[0].what
    assert decide_verdict(with_answers(*[faulty("ends_at_once")] * FEW_QUESTIONS), RULES).level == "FAIL"
    worse = loss(1.0, 2.0, FEW_QUESTIONS - 1)
    assert decide_verdict(Measurements(held_out=worse), RULES).level == "UNPROVEN"
    assert decide_verdict(replace(OVER_FITTED, held_out=worse), RULES).level == "WEAK", "40 questions were answered"


def test_the_rules_of_the_config_are_followed():
    """Guards against thresholds that are shown and not used."""
    slips = with_answers(faulty("loops"), *[GOOD] * 39)
    assert codes(slips, VerdictRules(max_faults=0.0)) == ["loops"]
    assert codes(with_answers(*[faulty("echo", right=True)] * 8, *[GOOD] * 32), VerdictRules(max_faults=0.2)) == []
    assert codes(SICK["few right"][0], VerdictRules(min_right=0.0)) == []
    assert codes(SICK["gains little"][0], VerdictRules(min_gain=0.0)) == []
    assert codes(SICK["forgets"][0], VerdictRules(max_forgetting=1.5)) == []
    assert codes(OVER_FITTED, VerdictRules(max_rise=2.0)) == []


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
    assert "`train.learning_rate: 0.00033`" in decide_verdict(SICK["forgets"][0], RULES).reasons[0].next
    unknown = replace(SICK["forgets"][0], learning_rate=None)
    assert "`train.learning_rate` to a third of its value" in decide_verdict(unknown, RULES).reasons[0].next


def test_too_few_rows_say_how_many_to_hold_out():
    """`data.held_out: 0.1` of 40 rows gave three: the advice must name a share that helps."""
    one = replace(HEALTHY, held_out=loss(2.0, 0.1, 1), questions=[asked(GOOD)], num_rows=40, model_path="run")
    verdict = decide_verdict(one, RULES)
    assert verdict.level == "UNPROVEN" and verdict.summary == (
        "Cannot tell: only 1 question was held out; at least 5 are needed."
    )
    assert verdict.reasons[0].next == (
        "Test this model on 5 or more other questions: `tunewell validate run --data FILE`. Or set `data.held_out: "
        "auto` in tunewell.yaml, which holds out 10 of your 40 rows, and run `tunewell train --out run2`."
    )
    few = decide_verdict(replace(one, num_rows=12), RULES).reasons[0].next
    assert few.endswith("Or add 8 rows to your 12, and run `tunewell train --out run2`.")
    assert decide_verdict(replace(one, num_rows=None), RULES).reasons[0].next == (
        "Test this model on 5 or more other questions: `tunewell validate run --data FILE`."
    )
    large = decide_verdict(replace(one, num_rows=4000), RULES).reasons[0].next
    assert "`data.held_out: auto` in tunewell.yaml, which holds out 200 of your 4,000 rows" in large
    file = decide_verdict(replace(one, test_file="held.jsonl"), RULES).reasons[0].next
    assert file == "Use a test file with more rows: `tunewell validate run --data FILE`."


def test_four_rows_prove_nothing_and_five_may():
    """A model that is no better than its base is better on all of four rows in 1 of 16 cases."""
    four, five = (replace(HEALTHY, held_out=loss(2.0, 0.1, number), questions=[]) for number in (4, 5))
    assert [decide_verdict(facts, RULES).level for facts in (four, five)] == ["UNPROVEN", "PASS"]
    broken = replace(four, bad_weights={"layer": 3})
    assert decide_verdict(broken, RULES).level == "FAIL", "weights that are NaN need no rows"


def test_answers_further_from_long_references_than_the_bases_are_seen():
    """Guards data without short references, where only F1 can tell."""
    page = "word " * 50
    questions = [asked(WRONG, base=GOOD.model_copy(update={"right": False}), reference=page)] * 20
    assert codes(replace(HEALTHY, questions=questions)) == ["no_better_than_base"]


def test_wordings_of_three_facts_do_not_show_that_the_base_is_better():
    """Guards the test of answers: twelve questions on three facts are three observations."""
    lost = [asked(WRONG, base=GOOD)] * 12
    facts = [each.model_copy(update={"cluster": index // 4}) for index, each in enumerate(lost)]
    kept = replace(HEALTHY, questions=[*lost, *KNOWN_BEFORE])
    assert "no_better_than_base" in codes(kept)
    assert "no_better_than_base" not in codes(replace(HEALTHY, questions=[*facts, *KNOWN_BEFORE]))


def test_a_tally_counts_every_answer_once():
    """Guards the figures of the report."""
    counted = count_answers([GOOD, faulty("loops", "echo"), faulty("echo"), GOOD.model_copy(update={"exact": True})])
    assert (counted.asked, counted.right, counted.contains, counted.exact) == (4, 2, 2, 1)
    assert counted.f1 == pytest.approx(0.5) and counted.faults == {"loops": 1, "echo": 2}
    assert count_answers([]).f1 == 0.0


def test_every_threshold_comes_with_the_reason_its_key_gives():
    """Guards the promise that no number comes without a reason."""
    shown = thresholds(VerdictRules(min_right=0.7))
    assert set(shown) == {"min_gain", "min_right", "max_faults", "max_rise", "max_forgetting"}
    assert shown["min_right"].value == 0.7
    assert shown["min_right"].because == all_keys()["verdict.min_right"].doc


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
    vocab_size=st.sampled_from([None, 256, 50_000]),
    train_curve=st.lists(LOSSES, max_size=12).map(lambda losses: curve(*losses)),
    held_out_curve=st.lists(LOSSES, max_size=12).map(lambda losses: curve(*losses)),
    evaluated_step=st.none() | st.integers(0, 120),
    questions=st.lists(st.builds(asked, SAIDS, st.none() | SAIDS), max_size=12),
    is_adapter=st.booleans(),
    learning_rate=st.none() | st.floats(1e-6, 1),
    epochs=st.none() | st.floats(0.1, 10),
)
RANK = {"PASS": 0, "UNPROVEN": 1, "WEAK": 1, "FAIL": 2}


@given(FACTS)
def test_a_verdict_is_as_bad_as_its_worst_reason(facts):
    """Guards the level, the order and the codes: no PASS with a reason, and none without evidence."""
    verdict = decide_verdict(facts, RULES)
    levels = [reason.level for reason in verdict.reasons]
    order = ["FAIL", "UNPROVEN", "WEAK"]
    assert verdict.level == min(levels, key=order.index, default="PASS")
    ranks = [(order.index(reason.level), list(REASON_CODES).index(reason.code)) for reason in verdict.reasons]
    assert ranks == sorted(set(ranks))
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


@given(FACTS, st.floats(1.0, 5.0))
def test_a_higher_held_out_loss_never_improves_a_verdict(facts, times):
    """Guards the rules for losses against a gap between two of them."""
    if facts.held_out is None:
        return
    higher = facts.held_out.model_copy(update={"tuned": facts.held_out.tuned * times})
    after = decide_verdict(replace(facts, held_out=higher), RULES).level
    assert RANK[after] >= RANK[decide_verdict(facts, RULES).level]


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({}, "twice the `train.epochs`"),
        ({"epochs": 1.5}, "`train.epochs: 3`"),
        ({"epochs": 0.35, "max_steps": 3}, "`train.max_steps: 6`"),
    ],
)
def test_advice_to_train_longer_names_the_setting_that_limits_the_run(settings, advice):
    assert Measurements(**settings).longer_training == advice
