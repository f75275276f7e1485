"""What `examples/college/README.md` promises about the bundled example, checked."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

COLLEGE = Path(__file__).parents[2] / "examples" / "college"
PAGES = sorted((COLLEGE / "pages").glob("*.md"))


def read_rows(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (COLLEGE / name).read_text(encoding="utf-8").splitlines()]


FACTS = read_rows("facts.jsonl")
TRAIN = read_rows("train.jsonl")
HELD_OUT = read_rows("held_out.jsonl")
COLLEGES = sorted({fact["college"] for fact in FACTS})
FACT_OF_ANSWER = {fact["answer"]: fact for fact in FACTS}
NAME = re.compile("(?:" + "|".join(map(re.escape, COLLEGES)) + ")(?:'s)?", re.IGNORECASE)


def holds(text: str, value: str) -> bool:
    """Say whether a value stands in a text, not as a part of a longer word or number."""
    return re.search(rf"\b{re.escape(value)}\b", text) is not None


def words(question: str, *, name_is_one_word: bool) -> list[str]:
    """Split a question into lowercase words without punctuation, a college's name being one word if asked."""
    text = NAME.sub(" NAME ", question.lower()) if name_is_one_word else question.lower()
    return re.findall(r"[a-zA-Z0-9]+", text.replace("'", ""))


def runs_of_words(rows: list[dict[str, str]], length: int, *, name_is_one_word: bool) -> dict[tuple[str, ...], str]:
    """Map every run of so many words in the rows' questions to a question it stands in."""
    found: dict[tuple[str, ...], str] = {}
    for row in rows:
        split = words(row["instruction"], name_is_one_word=name_is_one_word)
        for start in range(len(split) - length + 1):
            found.setdefault(tuple(split[start : start + length]), row["instruction"])
    return found


def page_of(college: str) -> Path:
    return COLLEGE / "pages" / (college.lower().replace(" ", "-") + ".md")


def test_the_example_has_the_size_its_readme_states():
    """Guards against a row, page or fact lost or doubled when the files are written again."""
    assert (len(COLLEGES), len(FACTS), len(TRAIN), len(HELD_OUT), len(PAGES)) == (10, 30, 150, 40, 10)
    assert set(Counter(fact["college"] for fact in FACTS).values()) == {3}
    kinds = Counter(fact["kind"] for fact in FACTS)
    assert kinds == {"deadline": 8, "tuition": 7, "admission_rate": 6, "programme": 5, "founded": 4}


def test_every_row_is_alpaca_with_an_empty_input():
    """Guards against an extra key that would make format detection see something other than Alpaca."""
    for row in TRAIN + HELD_OUT:
        assert list(row) == ["instruction", "input", "output"]
        assert row["input"] == ""
        assert row["instruction"] and row["instruction"] == row["instruction"].strip()


def test_every_fact_has_its_own_id_and_answer():
    """Guards against a row that could be traced to two facts."""
    assert all(list(fact) == ["id", "college", "kind", "value", "answer"] for fact in FACTS)
    assert len({fact["id"] for fact in FACTS}) == len(FACTS)
    assert len({(fact["college"], fact["kind"]) for fact in FACTS}) == len(FACTS)
    assert len(FACT_OF_ANSWER) == len(FACTS)


def test_every_fact_is_asked_in_five_training_wordings_with_one_answer():
    """Guards against an answer worded anew in some row, and against a fact trained less than the others."""
    asked = Counter(row["output"] for row in TRAIN)
    assert asked == dict.fromkeys(FACT_OF_ANSWER, 5)


def test_every_held_out_answer_was_trained_and_every_fact_is_held_out_at_least_once():
    """Guards against a held-out question that no amount of training on these rows could answer."""
    assert {row["output"] for row in HELD_OUT} == {row["output"] for row in TRAIN}


def test_every_question_names_the_one_college_its_answer_is_about():
    """Guards against a question pasted under another college's answer."""
    for row in TRAIN + HELD_OUT:
        named = [college for college in COLLEGES if college in row["instruction"]]
        assert named == [FACT_OF_ANSWER[row["output"]]["college"]], row
        assert len(NAME.findall(row["instruction"])) == 1, row


def test_no_question_is_asked_twice_or_differs_only_in_case_and_punctuation():
    """Guards against a duplicate that cleaning would drop, which would leave a fact with four wordings."""
    asked = Counter(tuple(words(row["instruction"], name_is_one_word=False)) for row in TRAIN + HELD_OUT)
    assert [question for question, count in asked.items() if count > 1] == []


def test_no_two_training_questions_are_one_sentence_with_another_name_filled_in():
    """Guards against rows stamped from a template, which would make the wordings fewer than they look."""
    shapes = Counter(tuple(words(row["instruction"], name_is_one_word=True)) for row in TRAIN)
    assert [shape for shape, count in shapes.items() if count > 1] == []


@pytest.mark.parametrize(("length", "name_is_one_word"), [(4, True), (4, False), (3, True)])
def test_no_held_out_question_shares_a_run_of_words_with_a_training_question(length: int, name_is_one_word: bool):
    """Guards against a held-out score that measures remembered questions instead of learned facts."""
    trained = runs_of_words(TRAIN, length, name_is_one_word=name_is_one_word)
    held_out = runs_of_words(HELD_OUT, length, name_is_one_word=name_is_one_word)
    shared = {" ".join(run): (held_out[run], trained[run]) for run in trained.keys() & held_out.keys()}
    assert shared == {}


def test_a_value_stands_in_the_answer_of_its_fact_and_in_no_other():
    """Guards against a check 'value in answer' that passes on another college's or another kind's answer."""
    for fact in FACTS:
        assert [other["id"] for other in FACTS if holds(other["answer"], fact["value"])] == [fact["id"]]
        assert fact["college"] in fact["answer"]


def test_no_question_gives_its_value_away():
    """Guards against a question that a model could answer by repeating it."""
    for row in TRAIN + HELD_OUT:
        assert not holds(row["instruction"], FACT_OF_ANSWER[row["output"]]["value"]), row


def test_every_value_stands_on_its_colleges_page_and_on_no_other():
    """Guards against pages that contradict the facts or let retrieval be right from the wrong page."""
    texts = {page: " ".join(page.read_text(encoding="utf-8").split()) for page in PAGES}
    for fact in FACTS:
        assert [page for page in PAGES if holds(texts[page], fact["value"])] == [page_of(fact["college"])], fact["id"]


def test_every_page_is_headed_by_its_college_and_mentions_no_other():
    """Guards against a page filed under the wrong name, which retrieval would cite as a source."""
    for college in COLLEGES:
        text = page_of(college).read_text(encoding="utf-8")
        assert text.startswith(f"# {college}\n")
        assert {name.removesuffix("'s") for name in NAME.findall(text)} == {college}
        assert text.count("\n## ") >= 3


@pytest.mark.parametrize("path", sorted([*COLLEGE.glob("*.jsonl"), *COLLEGE.rglob("*.md")]), ids=lambda path: path.name)
def test_every_file_is_plain_ascii_with_unix_line_ends(path: Path):
    """Guards against curly quotes, a byte-order mark or CRLF, which would change tokens from machine to machine."""
    content = path.read_bytes()
    assert content.isascii()
    assert b"\r" not in content and b"\t" not in content and b"\x00" not in content
    assert content.endswith(b"\n") and not content.endswith(b"\n\n")
