"""The style of a chat: figures of the replies of both models beside those of the expected replies."""

from tunewell.config.extensions import SCORERS
from tunewell.evaluation.report.view import compared_rows
from tunewell.records.report import AnswerCounts, MeasurePair, Report
from tunewell.scoring.base import ReferenceRow
from tunewell.scoring.style import WORDS, ChatStyle
from tunewell.scoring.tasks import make_scorer

ROWS = [
    ReferenceRow("How is the garden?", "ohh sweetheart the tomatoes are red 🍅"),
    ReferenceRow("Are you home?", "yes sweetheart, come by!!"),
    ReferenceRow("Did the postman come?", "No, dear."),
    ReferenceRow("What did you cook?", "soup, dear... the soup of yesterday"),
]


def chat(training: list[ReferenceRow] | None = None) -> ChatStyle:
    found = make_scorer("chat", ROWS[:1], ROWS if training is None else training)
    assert isinstance(found, ChatStyle)
    return found


def test_the_figures_are_counted_by_hand():
    """Guards each trait: one text has it and another has not."""
    figures = chat().figures(["ohh SWEETHEART", "Fine. 🍅", "No, dear.", "well... ok!!", " "])
    assert figures == {
        WORDS: 2.0,
        "with emoji": 0.25,
        "with !!, ?? or ...": 0.25,
        "without a final mark": 0.25,
        "beginning in lower case": 0.5,
        "with a typical word (sweetheart, dear)": 0.5,
        "equal to a training reply": 0.25,
    }


def test_words_that_the_other_person_uses_too_are_not_typical():
    """Guards `the` and `you`, which would make every text one of this person."""
    assert "with a typical word (sweetheart, dear)" in chat().figures(["x"])
    assert "with a typical word" not in str(chat([ReferenceRow("a b", "a b")] * 3).figures(["x"]))


def test_without_training_rows_and_texts_there_are_fewer_figures():
    """Guards a model that is validated without its corpus, and one that answers nothing."""
    assert next(iter(chat([]).figures(["One two three."]))) == WORDS and len(chat([]).figures(["One."])) == 5
    assert chat().figures([]) == chat().figures(["", "  "]) == {}


def test_other_tasks_have_no_style():
    """Guards a style of labels or objects."""
    for name in sorted({*SCORERS.names()} - {"chat"}):
        assert make_scorer(name, ROWS[:1], ROWS).figures(["ohh"]) == {}, name


def test_the_report_shows_which_model_is_closer():
    """Guards against a table that leaves the comparison to the reader, and `0 of 0` near duplicates of a chat."""
    figures = {WORDS: (21.0, 5.0, 6.0), "with emoji": (0.0, 0.4, 0.5), "without a final mark": (0.1, 0.9, 0.2)}
    pairs = {
        name: MeasurePair(base=base, tuned=tuned, expected=own, is_share=name != WORDS)
        for name, (base, tuned, own) in figures.items()
    }
    counts = AnswerCounts(asked=9, judged=0, exact=0, contains=0, right=0, f1=0.1, faults={})
    empty = {"made_by": "", "made_at": "", "verdict": "PASS", "summary": "", "subject": {"name": "", "kind": "run"}}
    report = Report.model_validate(
        {**empty, "data": "", "tuned_tally": counts, "without_near": counts, "measures": pairs}
    )
    assert [(row.name.strip(), row.base, row.tuned, row.hint) for row in compared_rows(report)] == [
        (WORDS, "21", "5", "in the expected replies: 6"),
        ("with emoji", "0%", "40%", "in the expected replies: 50%"),
        ("without a final mark", "10%", "90%", "in the expected replies: 20%"),
        ("closer to that style in", "1", "2", "of 3 figures above; 0 alike"),
    ]
