"""Answer keys and the judge: which part of a reference counts, and which answers contain it."""

import json
import os
from pathlib import Path

import pytest

from tunewell.scoring.answer_keys import AnswerKey, ReferenceRow, answer_keys
from tunewell.scoring.answer_values import find_values
from tunewell.scoring.judge import contains_key, judge
from tunewell.scoring.matching import is_refusal

COLLEGE = Path(__file__).parents[2] / "examples" / "college"
SHARED = Path(os.environ.get("TUNEWELL_SHARED", Path(__file__).parents[3] / "shared")) / "data"


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def key(text, question="When is it?", reference="", **fields):
    return AnswerKey(((text,),), "value", "given", question, reference or text, **fields)


# Keys from references.


def test_the_keys_of_the_college_questions_are_the_values_of_its_facts():
    """Guards the derivation on real frames: dates, amounts, shares, years and names of programmes."""
    values = {fact["answer"]: fact["value"] for fact in rows_of(COLLEGE / "facts.jsonl")}
    rows = [ReferenceRow(row["instruction"], row["output"]) for row in rows_of(COLLEGE / "held_out.jsonl")]
    keys = answer_keys(rows)
    assert [found.text.lstrip("$") for found in keys] == [values[row.reference] for row in rows]
    assert {found.origin for found in keys} == {"derived"}
    assert all("references of the same form" in found.because or "1 reference" in found.because for found in keys)


DERIVED = {
    "nothing to compare with": ("What is the capital of France?", "The capital of France is Paris.", "Paris"),
    "the only number": ("How old is the library?", "The library has stood for 140 years.", "140 years"),
    "a name, not a year": ("Who founded it?", "It was founded in 1871 by Mary Hart.", "Mary Hart"),
    "a year, not a name": ("When was it founded?", "It was founded in 1871 by Mary Hart.", "1871"),
    "several parts": (
        "What does tuition cover?",
        "Tuition covers teaching, labs and the library.",
        "teaching + labs + library",
    ),
    "the result of a calculation": ("How many?", "It is 2 + 3 = 5.\n#### 5", "5"),
    "a box": ("Solve it.", r"So $x$ is \boxed{12}.", "12"),
    "yes with a reason": ("Is it open?", "Yes, it is open all year, except in August.", "yes"),
    "a denied statement": (
        "Does the college require an interview?",
        "The college does not require an interview.",
        "no",
    ),
    "a time": ("What time does the library open?", "It opens at 8:30 in the morning.", "8:30 in the morning"),
    "an e-mail address": (
        "What is the e-mail address?",
        "Write to admissions@larkfell.edu.",
        "admissions@larkfell.edu",
    ),
    "a phone number": ("How can I call you?", "Our number is 0171 555 1234.", "0171 555 1234"),
    "the person": ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare.", "William Shakespeare"),
    "the person without a title": ("Who is the dean?", "Our dean is Dr. Mary O'Neil.", "Mary O'Neil"),
    "a word that ends like a number": ("What is limited?", "Only the weight is limited.", "weight"),
    "already short": ("When?", "15 January", "15 January"),
    "Chinese": ("截止日期是什么时候？", "截止日期是1月15日。", "1月15日"),
}


@pytest.mark.parametrize(("question", "reference", "expected"), DERIVED.values(), ids=DERIVED)
def test_a_key_is_derived_from_one_row(question, reference, expected):
    """Guards small sets, in which no reference has the form of another."""
    assert answer_keys([ReferenceRow(question, reference)])[0].text == expected


def test_large_numbers_that_differ_in_the_last_digits_are_different_values():
    """Guards numbers of more than six digits: the rest was ignored, so such a number was not distinctive."""
    assert find_values("12,345,610")[0].token != find_values("12,345,611")[0].token


def test_accepted_answers_of_a_row_come_before_the_reference():
    """Guards rows whose author says what counts."""
    row = ReferenceRow("When?", "The deadline is 15 January.", ("mid-January", "15 January"), "answers")
    found = answer_keys([row])[0]
    assert (found.text, found.origin) == ("mid-January | 15 January", "answers")
    assert judge("In mid-January.", found).right and judge("15 Jan", found).right


def test_a_value_that_many_references_share_is_still_the_key():
    """Guards against references with the same value: their overlap is larger than that of the others."""
    subjects = ["law", "law", "art", "law", "art"] * 4
    rows = [
        ReferenceRow(f"What is N{number} known for?", f"N{number} is known for its programme in {subject} history.")
        for number, subject in enumerate(subjects)
    ]
    assert {found.text for found in answer_keys(rows)} <= {"law", "art", "law history", "art history"}


def test_a_long_reference_has_no_key():
    """Guards free texts, which cannot be right or wrong."""
    found = answer_keys([ReferenceRow("Tell me a story.", "Once upon a time " * 20)])[0]
    assert not found.is_judged and judge("Once upon a time", found).right is None


def test_a_free_sentence_is_compared_as_a_whole():
    """Guards against keys of many words, of which a right answer would have to repeat each."""
    sentence = "Students usually live in old halls beside the northern lake and walk through meadows every morning."
    found = answer_keys([ReferenceRow("How is life there?", sentence)])[0]
    assert found.origin == "whole reference" and "words" in found.because


def test_a_reference_that_refuses_is_answered_right_by_a_refusal():
    """Guards open-book rows whose passage is missing."""
    found = answer_keys([ReferenceRow("When was it founded?", "Not in the documents.")])[0]
    assert found.is_refusal and judge("The documents do not say.", found).right
    assert judge("In 1871.", found).right is False
    fact = answer_keys([ReferenceRow("Are books included?", "Books are not included in the tuition.")])[0]
    assert not fact.is_refusal
    policy = answer_keys([ReferenceRow("Can I get a refund?", "We cannot provide refunds after 30 days.")])[0]
    assert not policy.is_refusal


def test_keys_do_not_depend_on_the_order_of_rows():
    """Guards against keys that differ between two runs on the same questions."""
    rows = [ReferenceRow(row["instruction"], row["output"]) for row in rows_of(COLLEGE / "held_out.jsonl")]
    forwards, backwards = answer_keys(rows), answer_keys(rows[::-1])[::-1]
    assert [found.text for found in forwards] == [found.text for found in backwards]


# Answers.

DATE, MONEY, SHARE = (
    key("15 January"),
    key("$31,400", "What does it cost?"),
    key("23 percent", "How many people get in?"),
)
PROGRAMME = key("food chemistry", "What is it known for?", rivals=("marine biology", "violin making"))
JUDGED = [
    (DATE, "It is 15 January.", True),
    (DATE, "January 15th, 2027", True),
    (DATE, "the 15th of january", True),
    (DATE, "15 Jan.", True),
    (DATE, "Am 15. Januar 2027.", True),
    (DATE, "15/01/2027", True),
    (DATE, "no later than 15 January", True),
    (DATE, "You cannot apply after 15 January.", True),
    (DATE, "From 1 October to 15 January.", True),
    (DATE, "It is not listed, but it is 15 January.", True),
    (DATE, "not 15 January", False),
    (DATE, "It isn't 15 January.", False),
    (DATE, "15 January is not the deadline.", False),
    (DATE, "either 15 January or 3 March", False),
    (DATE, "15 January, 3 March, 1 May", False),
    (DATE, "15 January or maybe later in spring", False),
    (DATE, "25 January", False),
    (DATE, "115 January", False),
    (DATE, "", False),
    (key("15 January 2027"), "15 January 2026", False),
    (MONEY, "31400", True),
    (MONEY, "31,400 dollars a year", True),
    (MONEY, "USD 31,400.00", True),
    (MONEY, "about 31.4k", True),
    (MONEY, "€31,400", False),
    (MONEY, "31,400 students", False),
    (MONEY, "$31,400 or $18,250", False),
    (MONEY, "$131,400", False),
    (MONEY, "$3,140", False),
    (key("31,400"), "It costs $31,400 per year.", True),
    (SHARE, "23%", True),
    (SHARE, "twenty-three per cent", True),
    (SHARE, "It takes 23 people.", True),
    (SHARE, "23 colleges", False),
    (SHARE, "77 percent", False),
    (key("1874"), "It was opened on 3 May 1874.", True),
    (key("1874"), "1847", False),
    (key("1874"), "It was founded in 1874, 23 percent get in, and 600 students live there.", True),
    (key("1874"), "1874, 1921", False),
    (PROGRAMME, "Its programme in Food Chemistry.", True),
    (PROGRAMME, "food chemistry and violin making", False),
    (PROGRAMME, "Not food chemistry but railways.", False),
    (PROGRAMME, "chemistry", False),
    (key("yes", is_polar=True), "Yes, it does.", True),
    (key("yes", is_polar=True), "The answer is **yes**.", True),
    (key("yes", is_polar=True), "Yes and no.", False),
    (key("no", is_polar=True), "There is no doubt.", False),
    (key("maybe", is_polar=True), "Maybe", True),
    (key("B"), "B) Paris", True),
    (key("B"), "A big cat", False),
    (key("72", is_final=True), "48 + 24 = 72, so the answer is 72.", True),
    (key("72", is_final=True), "72 - 24 = 48\n#### 48", False),
    (key("72", is_final=True), "She had $72.00", True),
    (key("北京"), "首都是北京。", True),
    (key("8:30 am"), "at 8:30", True),
    (key("8:30 am"), "8.30 a.m.", True),
    (key("8:30 am"), "8:30 pm", False),
    (key("8:30 pm"), "It closes at 20:30.", True),
    (key("8:30"), "between 8:30 and 9:30", False),
    (key("9 am"), "9 students", False),
    (key("+49 171 5551234"), "Call +49-171-555-1234.", True),
    (key("0171 555 1234"), "0171 555 1235", False),
    (key("admissions@larkfell.edu"), "Admissions@Larkfell.edu.", True),
    (key("admissions@larkfell.edu"), "info@larkfell.edu", False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("expected", "answer", "is_right"), JUDGED, ids=lambda value: str(getattr(value, "text", value))
)
def test_an_answer_is_right_if_it_states_the_key_and_nothing_else(expected, answer, is_right):
    """Guards spellings of values, negation, alternatives, and numbers inside other numbers."""
    assert judge(answer, expected).right is is_right, judge(answer, expected).because


@pytest.mark.parametrize("text", ["Deadlines: 15 January, 3 March and 5 May.", "Apply by 15 January or 3 March."])
def test_a_passage_that_lists_several_values_contains_each_of_them(text):
    """Guards search misses and open-book rows: the rule for answers that do not choose was applied to documents."""
    assert contains_key(text, DATE) and not judge(text, DATE).right
    assert not contains_key(text, key("4 March"))


REFUSALS = [
    "I don't know.", "Not in the documents.", "The text does not mention it.", "Ich weiß es nicht.",
    "Das steht nicht in den Dokumenten.", "Je ne sais pas.", "No lo sé.", "Non lo so.", "Não sei.", "Ik weet het niet.",
    "Nie wiem.", "Я не знаю.", "Bilmiyorum.", "我不知道。", "文档中没有提到。", "わかりません。", "모르겠습니다.",
    "لا أعرف", "मुझे पता नहीं",
]  # fmt: skip


@pytest.mark.parametrize("text", REFUSALS)
def test_a_refusal_is_neither_right_nor_wrong(text):
    """Guards the count of refusals in the commonest languages."""
    found = judge(text, DATE)
    assert is_refusal(text) and found.is_refusal and found.right is False and not found.is_wrong


@pytest.mark.parametrize("text", ["I'm not sure, but I think 3 March.", "It is 3 March.", "No, that is wrong."])
def test_a_guess_is_not_a_refusal(text):
    """Guards answers that hedge and then state a value."""
    assert judge(text, DATE).is_wrong


# Realistic answers.

RIGHT = (
    "{}",
    "It is {}.",
    "{college}: {}",
    "The answer you are looking for is {}, I believe.",
    "As far as the page says, {}.",
)
SPELLED = {
    "deadline": lambda value: [value, " ".join(value.split()[::-1]), f"{value[:6].rstrip()}", f"{value} 2027"],
    "tuition": lambda value: [f"${value}", value.replace(",", ""), f"{value} dollars a year", f"US${value} per year"],
    "admission_rate": lambda value: [
        value,
        value.replace(" percent", "%"),
        f"about {value}",
        f"{value} of all who apply",
    ],
    "founded": lambda value: [value, f"in {value}", f"{value}, according to the page", f"the year {value}"],
    "programme": lambda value: [value, value.title(), f"its {value} programme", f"{value}, above all"],
}


def college_answers():
    """Yield questions of the college with answers and whether these are right, by construction."""
    facts = rows_of(COLLEGE / "facts.jsonl")
    by_answer = {fact["answer"]: fact for fact in facts}
    for index, row in enumerate(rows_of(COLLEGE / "held_out.jsonl")):
        fact = by_answer[row["output"]]
        others = [other for other in facts if other["kind"] == fact["kind"] and other["value"] != fact["value"]]
        other = others[index % len(others)]
        for shape in RIGHT:
            for value in SPELLED[fact["kind"]](fact["value"])[: 2 if fact["kind"] == "deadline" else 4]:
                yield row, fact, shape.format(value, college=fact["college"]), True
            for value in SPELLED[fact["kind"]](other["value"]):
                yield row, fact, shape.format(value, college=fact["college"]), False
        yield row, fact, row["output"], True
        yield row, fact, other["answer"], False
        yield row, fact, other["answer"].replace(other["college"], fact["college"]), False
        yield row, fact, f"Either {fact['value']} or {other['value']}.", False
        yield row, fact, f"It is not {fact['value']}.", False
        for text in ("Not in the documents.", "I do not know.", f"I cannot find this about {fact['college']}.", ""):
            yield row, fact, text, False


def test_derived_keys_judge_realistic_answers_as_the_true_values_do():
    """Guards the bar: at least 97% agreement with the values of the facts, and with what is true by construction."""
    rows = [ReferenceRow(row["instruction"], row["output"]) for row in rows_of(COLLEGE / "held_out.jsonl")]
    values = {fact["answer"]: fact["value"] for fact in rows_of(COLLEGE / "facts.jsonl")}
    given = [ReferenceRow(row.question, row.reference, (values[row.reference],), "value") for row in rows]
    keys = {
        derived.question: (derived, value) for derived, value in zip(answer_keys(rows), answer_keys(given), strict=True)
    }
    found = [
        (*(judge(answer, one).right for one in keys[row["instruction"]]), is_right)
        for row, _, answer, is_right in college_answers()
    ]
    assert len(found) > 1000
    assert sum(derived == value for derived, value, _ in found) >= 0.97 * len(found)
    assert sum(derived == is_right for derived, _, is_right in found) >= 0.97 * len(found)


@pytest.mark.slow
@pytest.mark.shared
def test_the_results_of_gsm8k_are_read_and_judged():
    """Guards final numbers: intermediate results, units, separators and other results."""
    rows = rows_of(SHARED / "gsm8k" / "train.jsonl")[::5]
    keys = answer_keys([ReferenceRow(row["question"], row["answer"]) for row in rows])
    num_wrong = 0
    for row, found in zip(rows, keys, strict=True):
        number = float(row["answer"].rsplit("####")[1].replace(",", ""))
        steps = row["answer"].rsplit("####")[0]
        answers = [(row["answer"], True), (f"{steps}So it is ${number:,.2f}.", True), (f"#### {number:.0f}", True)]
        answers += [
            (f"{steps}#### {number * 2 + 3:g}", False),
            (f"It is {number + 1:g}.", False),
            ("I don't know.", False),
        ]
        num_wrong += sum(judge(text, found).right is not is_right for text, is_right in answers)
    assert num_wrong <= 0.005 * 6 * len(rows)


@pytest.mark.shared
def test_the_decisions_of_pubmedqa_are_judged():
    """Guards yes, no and maybe, as a column and as the first word of a reply."""
    studies = list(json.loads((SHARED / "pubmedqa" / "ori_pqal.json").read_text(encoding="utf-8")).values())
    given = [ReferenceRow(one["QUESTION"], one["LONG_ANSWER"], (one["final_decision"],), "value") for one in studies]
    told = [ReferenceRow(one["QUESTION"], f"{one['final_decision'].title()}. {one['LONG_ANSWER']}") for one in studies]
    shapes = ("{}", "{}, because of the data.", "The answer is {}.", "**{}** - the study says so.")
    for one, *found in zip(studies, answer_keys(given), strict=True):
        for word in ("yes", "no", "maybe"):
            answers = [shape.format(word.title()) for shape in shapes]
            assert {judge(text, found[0]).right for text in answers} == {word == one["final_decision"]}
    agree = [found.text == one["final_decision"] for found, one in zip(answer_keys(told), studies, strict=True)]
    assert sum(agree) >= 0.99 * len(agree)
