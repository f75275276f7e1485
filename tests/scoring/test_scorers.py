"""Each scorer on right and wrong answers, and compared with an independent judge."""

import json
import sys
from pathlib import Path

import pytest

from tunewell.config.extensions import SCORERS
from tunewell.core.errors import UserError
from tunewell.scoring.base import ReferenceRow, macro_f1, score_answer, without_thinking
from tunewell.scoring.structured import count_fields, parse_calls
from tunewell.scoring.tasks import find_task, make_scorer

SHARED = Path(__file__).parents[3] / "shared"
CALL = '{"name": "search", "arguments": {"query": "green tea", "limit": 3}}'
QUOTED_CALL = """{"name": "search", "arguments": '{"query": "green tea", "limit": 3}'}"""
YES_NO = [ReferenceRow(f"Is {n} even?", "Yes. It is." if n % 2 else "No. It is not.") for n in range(20)]
LABELS = [ReferenceRow(f"message {n}", ["card_arrival", "how busy", "C++", "c#"][n % 4]) for n in range(40)]

SCORED = [
    ("labels", "how busy", "how busy", True),
    ("labels", "how busy", "How  busy.", True),
    ("labels", "how busy", '"how busy"', True),
    ("labels", "card_arrival", "card arrival", True),
    ("labels", "how busy", "It is how busy", False),
    ("labels", "how busy", "not how busy", False),
    ("labels", "C++", "c", False),
    ("labels", "C++", "c++", True),
    ("choice", "Yes. It is.", "yes", True),
    ("choice", "Yes. It is.", "Yes, certainly.", True),
    ("choice", "Yes. It is.", "The answer is yes.", True),
    ("choice", "Yes. It is.", "No.", False),
    ("choice", "Yes. It is.", "yes or no", False),
    ("choice", "Yes. It is.", "It depends.", False),
    ("choice", "No. It is not.", "Nobody knows.", False),
    ("choice", "No. It is not.", "No, no effect was seen.", True),
    ("number", "3 + 4 = 7\n#### 7", "It is 7", True),
    ("number", "#### 72", "48 + 24 = 72\n#### 72", True),
    ("number", "#### 72", "#### 72.0", True),
    ("number", "#### 72", "#### 73", False),
    ("number", "#### 72", "72 minus 1 is 71", False),
    ("number", "#### 1,200", "#### 1200", True),
    ("number", "5 km", "5000 m", True),
    ("number", "5 km", "5 m", False),
    ("number", "50%", "0.5", True),
    ("number", "50%", "half", True),
    ("number", "1/2", "0.5", True),
    ("number", "-5", "minus 5", True),
    ("number", "3.14", "3.14159", True),
    ("number", "3.14", "3.15", False),
    ("number", "\\boxed{12}", "so \\boxed{12} apples of 40", True),
    ("number", "7", "no number", False),
    ("json", '{"a": "X", "b": 1}', '```json\n{"b": "1", "a": "x"}\n```', True),
    ("json", '{"a": "X", "b": 1}', '{"a": "X"}', False),
    ("json", '{"a": "X"}', '{"a": "X", "b": 1}', False),
    ("json", '{"a": {"b": [1, 2]}}', '{"a": {"b": [1, 2]}}', True),
    ("json", '{"a": {"b": [1, 2]}}', '{"a": {"b": [2, 1]}}', False),
    ("json", '{"a": 1}', "a is 1", False),
    ("json", '[{"a": 1}]', '[{"a": 1}]', True),
    ("tools", CALL, CALL, True),
    ("tools", CALL, f"<tool_call>\n{CALL}\n</tool_call>", True),
    ("tools", CALL, '{"arguments": {"limit": 3, "query": "Green tea"}, "name": "search"}', True),
    ("tools", CALL, 'search(query="green tea", limit=3)', True),
    ("tools", CALL, '{"name": "search", "arguments": {"query": "black tea", "limit": 3}}', False),
    ("tools", CALL, '{"name": "find", "arguments": {"query": "green tea", "limit": 3}}', False),
    ("tools", CALL, "I will search for green tea.", False),
    ("tools", f"[{CALL}]", '{"tool_calls": [{"function": ' + CALL + "}]}", True),
    ("tools", "You are welcome.", "No problem!", None),
    ("tools", "You are welcome.", CALL, False),
    ("tools", "You are welcome.", '<tool_call>{"name": ', False),
    ("tools", "move(3, 4)", "move(3, 4)", True),
    ("tools", "move(3, 4)", "move(99, 1)", False),
    ("tools", 'go(to=["Paris", "Rome"])', 'go(to=["Paris", "Oslo"])', False),
    ("tools", CALL, '<function=search>{"query": "green tea", "limit": 3}</function>', True),
    ("tools", CALL, '[TOOL_CALLS]search[ARGS]{"query": "green tea", "limit": 3}', True),
    (
        "tools",
        CALL,
        f'<functioncall> {{"name": "search", "arguments": \'{json.dumps({"query": "green tea", "limit": 3})}\'}}',
        True,
    ),
    ("labels", "A*", "A", False),
    ("labels", "how busy", "**how busy**", True),
    ("json", '{"id": 1234567890123456}', '{"id": 1234567890123457}', False),
    ("json", '{"a": null}', '{"a": "null"}', False),
    ("json", '{"a": [{"b": 1}, {"b": 2}]}', '{"a": [{"b": 1}]}', False),
    ("tools", CALL, '{"functionCall": {"name": "search", "args": {"query": "green tea", "limit": 3}}}', True),
    ("number", "54", "Together they tell 54 jokes on the two Saturdays.", True),
    ("number", "\\boxed{3\\sqrt{2}}", "\\boxed{3\\sqrt{5}}", False),
    ("number", "\\boxed{(1, 2)}", "\\boxed{(1, 3)}", False),
    ("number", "1.2 × 10^5", "1.2 × 10^3", False),
    ("number", "1.2 × 10^5", "120,000", True),
    ("number", "1,00,000", "100000", True),
    ("number", "\\boxed{5\\text{ cm}}", "5 cm", True),
    ("number", "1.234,56 €", "1234.56 €", True),
    ("json", '{"price": 10}', '{"price": 10.0}', True),
    ("labels", "-1", "1", False),
    ("labels", "A-", "A", False),
    ("labels", "正面", "正面。", True),
    ("number", "\\boxed{2x+3}", "\\boxed{2x-9}", False),
    ("number", "\\boxed{\\frac{1}{2}}", "\\boxed{\\frac{3}{2}}", False),
    ("number", "1.6e-19", "1.6e-3", False),
    ("number", "0.125", "125", False),
    ("number", "72", "The answer is not 72", False),
    ("number", "72", "The answer is 70 + 2 = 72", True),
    ("sql", "SELECT a FROM t WHERE b = 'X'", "select a from t\nwhere b = 'x';", True),
    ("sql", "SELECT a FROM t", "SELECT b FROM t", False),
    ("command", "ls -la | wc -l", "ls  -la |  wc -l", True),
    ("command", "ls -la", "ls -LA", False),
    ("command", "ls -la", "```bash\nls -la\n```", True),
    ("command", "ls -la", "$ ls -la", True),
]


@pytest.mark.parametrize(("task", "reference", "answer", "is_right"), SCORED)
def test_an_answer_is_scored_by_the_measure_of_its_task(task, reference, answer, is_right):
    """Guards each rule of each scorer."""
    row = ReferenceRow("?", reference)
    training = {"choice": YES_NO, "labels": [*LABELS, row]}.get(task, [])
    found = score_answer(make_scorer(task, [row], training), 0, answer, row)
    assert found.right is is_right, found


FACTS = [
    ("What colour is the door?", "The door is red.", "It is anything but red.", False),
    ("What colour is the door?", "The door is red.", "It is far from red.", False),
    ("What colour is the door?", "The door is red.", "It is hardly red.", False),
    ("What colour is the door?", "The door is red.", "It used to be red, now blue.", False),
    ("What colour is the door?", "The door is red.", "Is it red?", False),
    ("What colour is the door?", "The door is red.", "Red.", True),
    ("Who wrote it?", "Ada wrote it.", "It is a myth that Ada wrote it.", False),
    ("Who wrote it?", "Ada wrote it.", "It was Ada.", True),
    ("Who won?", "Tom beat Ben.", "Ben beat Tom.", False),
    ("How many guests?", "At least 3 guests.", "At most 3 guests.", False),
    ("How many guests?", "At least 3 guests.", "3 guests or more.", True),
    ("How many?", "At most 3.", "Up to 3.", True),
    ("Which version is it?", "Version 1.10.", "Version 1.1.", False),
    ("¿Cuál es la capital?", "La capital es Madrid.", "La capital no es Madrid.", False),
    ("ما هي العاصمة؟", "العاصمة هي القاهرة", "العاصمة ليست القاهرة", False),
    ("Is parking here allowed?", "Parking is allowed.", "Parking is forbidden.", False),
    ("What about smoking?", "Smoking is not allowed.", "Smoking is prohibited.", True),
    ("How far is it?", "5 km", "5000 m", True),
    ("How heavy is it?", "2 kg", "2000 grams", True),
    ("What is the result?", "-5", "minus 5", True),
    ("What share?", "50%", "0.5", True),
    ("What share?", "50%", "half", True),
    ("What is the value?", "0.5", "1/2", True),
    ("どこですか", "東京です", "東京", True),
    ("Which option?", "B", "B because A is wrong", True),
    ("Is the shop open?", "Yes", "It is open", True),
    ("Is the shop open?", "Yes", "It is closed", False),
    ("Is the shop open?", "No", "It is not open", True),
    ("What is the capital?", "The capital is Oslo.", "Oslo, not Bergen.", True),
    ("What is the capital of Germany?", "The capital of Germany is Berlin.", "Berlin is the capital of Germany.", True),
]


@pytest.mark.parametrize(("question", "reference", "answer", "is_right"), FACTS)
def test_a_fact_is_judged_by_what_the_answer_states(question, reference, answer, is_right):
    """Guards denials, bounds, units, opposites and exchanged names."""
    row = ReferenceRow(question, reference)
    found = score_answer(make_scorer("facts", [row], []), 0, answer, row)
    assert found.right is is_right, found


def test_hard_pairs_are_judged_as_a_reader_judges_them():
    """Guards the bar: 92 of the first 99 pairs; the rest was written later against the rules."""
    pairs = [json.loads(line) for line in (Path(__file__).parent / "hard_pairs.jsonl").read_text("utf-8").splitlines()]
    found = []
    for pair in pairs:
        row = ReferenceRow(pair["q"], pair["ref"])
        found.append(bool(score_answer(make_scorer("facts", [row], []), 0, pair["a"], row).right) is pair["right"])
    assert len(found) == 160
    assert sum(found[:99]) >= 97 and sum(found[99:]) >= 50, [p for p, ok in zip(pairs, found, strict=True) if not ok]


@pytest.mark.parametrize("answer", ["It is red. It is blue. It is green.", "red blue green", "red | blue | green"])
def test_an_answer_that_states_every_value_is_wrong(answer):
    """Guards a model that passed by naming all colours in each answer."""
    things = ["door", "wall", "roof", "car", "bike", "bus", "hat", "coat", "shoe"]
    rows = [
        ReferenceRow(f"What colour is the {one}?", f"It is {['red', 'blue', 'green'][n % 3]}.")
        for n, one in enumerate(things)
    ]
    scorer = make_scorer("facts", rows, rows)
    assert [scorer.score(index, answer).right for index in range(len(rows))] == [False] * len(rows)
    assert scorer.score(0, "It is red.").right and scorer.score(0, "The door is red, not blue.").right


@pytest.mark.parametrize("task", [name for name in SCORERS.names() if SCORERS.entry(name).min_right is not None])
def test_an_answer_equal_to_its_reference_is_right(task):
    """The first rule: an exact match was called wrong."""
    references = ["how busy", "Yes. It is.", "#### 7", '{"a": 1}', CALL, "SELECT a FROM t", "ls -la", "no", "status"]
    rows = [ReferenceRow("?", reference) for reference in references]
    scorer = make_scorer(task, rows, rows)
    for index, row in enumerate(rows):
        assert score_answer(scorer, index, row.reference, row).right in (True, None)


def test_ordinary_rows_among_labels_are_not_judged():
    """Guards a job with 5% of ordinary instructions: their replies were labels, in the list for the base model too."""
    text = ReferenceRow(
        "Explain tea.", "Tea is a drink that is made of leaves and hot water, and it is drunk in many lands."
    )
    scorer = make_scorer("labels", [LABELS[0], text], [*LABELS, text])
    assert scorer.score(0, "card arrival").right and scorer.score(1, "Tea is a drink.").right is None
    assert "Tea" not in scorer.hint and "how busy" in scorer.hint


def test_a_choice_at_the_end_of_the_reasoning_is_read_there():
    """Guards rows with reasons before the answer."""
    rows = [ReferenceRow(f"Which is {n}?", f"A is small, so it is not it.\nAnswer: {'ABCD'[n % 4]}") for n in range(40)]
    assert find_task(rows).value == "choice"
    scorer = make_scorer("choice", rows, rows)
    assert scorer.score(1, "A is out. The answer is B.").right and not scorer.score(1, "B is out.\nAnswer: C").right


def test_thinking_is_removed_before_an_answer_is_scored():
    """Guards answers that are right or wrong only in their thinking."""
    assert without_thinking("<think>a\nb</think>\n\nyes") == "yes"
    assert without_thinking("a</think> yes") == "yes"
    assert without_thinking("<think>never ends") == ""
    assert without_thinking("[THINK]hm[/THINK]yes") == "yes"
    assert without_thinking("<|channel|>analysis<|message|>hm<|channel|>final<|message|>yes") == "yes"
    assert without_thinking("5 < 6 and 7 > 6") == "5 < 6 and 7 > 6"


def test_tool_calls_are_read_in_each_form():
    """Guards prose with brackets, which is not a call."""
    call = json.loads(CALL)
    assert parse_calls(CALL) == [call] and parse_calls(f"[{CALL}, {CALL}]") == [call, call]
    assert parse_calls(json.dumps({"function": {"name": "a", "arguments": '{"b": 1}'}})) == [
        {"name": "a", "arguments": {"b": 1}}
    ]
    assert parse_calls("Sure (as you like).") == [] == parse_calls('{"name": "Ann", "age": 3}')


def test_the_figures_of_a_task_are_those_of_its_definition():
    """Guards macro-F1 against sklearn's definition, and the micro F1 over fields."""
    pairs = [("a", "a"), ("a", "b"), ("b", "b"), ("c", "")]
    assert macro_f1(pairs) == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    rows = [ReferenceRow("?", '{"a": 1, "b": 2}'), ReferenceRow("?", '{"a": 1}')]
    scorer = make_scorer("json", rows, [])
    scores = [scorer.score(0, '{"a": 1, "b": 3}'), scorer.score(1, "nothing")]
    assert scorer.measures(scores) == pytest.approx({"F1 over fields": 2 / 5, "answers of this form": 0.5})
    assert {name: dict(counts) for name, counts in count_fields([one.fields for one in scores]).items()} == {
        "a": {"right": 1, "missing": 1},
        "b": {"wrong": 1},
    }


def test_a_function_of_the_user_decides(tmp_path):
    """Guards `verdict.task` with a function of the user, and the error if it fails."""
    (tmp_path / "judge.py").write_text(
        "def longer(question, answer, reference):\n    return len(answer) >= len(reference)\n"
        "def breaks(question, answer, reference):\n    return 1 / 0\n"
    )
    rows = [ReferenceRow("?", "abc")]
    scorer = make_scorer("judge.py:longer", rows, [], base=tmp_path)
    assert scorer.score(0, "abcd").right and not scorer.score(0, "a").right
    with pytest.raises(UserError, match="ZeroDivisionError"):
        make_scorer("judge.py:breaks", rows, [], base=tmp_path).score(0, "a")


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import scorers  # noqa: E402  the benchmark

JOBS = scorers.TASKS


def job(name, part):
    """Return the rows of a public job as its neutral script writes them."""
    return scorers.rows_of(SHARED / "bench" / "jobs", name, part)


@pytest.mark.shared
def test_the_scorers_agree_with_the_neutral_judge_on_answers_of_a_tuned_model():
    """Guards the bar: 99.5% of the answers of five jobs together, and 98% of each job."""
    found = {}
    for name, task in JOBS.items():
        forms = scorers.TUNED | scorers.OF_TASK.get(task, {})
        found[name] = scorers.agreement(SHARED / "bench" / "jobs", name, forms)
    assert all(one.share >= 0.98 and one.right > 1000 for one in found.values()), found
    five = [one for name, one in found.items() if name != "pubmedqa"]
    assert sum(len(one.differ) for one in five) <= 0.005 * sum(one.answers for one in five)


@pytest.mark.shared
@pytest.mark.parametrize("name", JOBS)
def test_answers_in_quotes_fences_and_sentences_are_right_where_a_reader_calls_them_right(name):
    """Guards base models against unfair scores: we call right what the neutral judge misses, and only that."""
    found = scorers.agreement(SHARED / "bench" / "jobs", name, scorers.BASE)
    unfair = [one for one in found.differ if not one.ours or one.form not in scorers.READER_DECIDES_FOR_US]
    assert len(unfair) <= 0.005 * found.answers, unfair[:5]


def test_free_answers_are_judged_as_a_reader_judges_them():
    """Guards the bar: Cohen's kappa of 0.75 on 200 answers, labelled by a reader who saw no other labels."""
    answers = [json.loads(line) for line in (Path(__file__).parent / "free_text.jsonl").read_text("utf-8").splitlines()]
    told, ours = [], []
    for task in ("facts", "choice"):
        chosen = [one for one in answers if one["task"] == task]
        rows = [ReferenceRow(one["q"], one["ref"]) for one in chosen]
        scorer = make_scorer(task, rows, rows)
        told += [one["blind"] for one in chosen]
        ours += [bool(score_answer(scorer, n, one["a"], rows[n]).right) for n, one in enumerate(chosen)]
    agree = sum(one == other for one, other in zip(told, ours, strict=True)) / len(told)
    shares = [sum(part) / len(part) for part in (told, ours)]
    by_chance = shares[0] * shares[1] + (1 - shares[0]) * (1 - shares[1])
    assert len(told) == 200 and 80 <= sum(told) <= 120
    assert (agree - by_chance) / (1 - by_chance) >= 0.85
