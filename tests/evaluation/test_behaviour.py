"""What is wrong with how an answer behaves, in both directions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.evaluation.behaviour import JudgedAnswer, find_faults

ASKED = "When is the application deadline for Alderhollow College?"
DUE = "The application deadline of Alderhollow College is 15 January."


def judged(text, *, ended=True, question=ASKED, reference=DUE, control=(), ids=None):
    """Judge an answer whose tokens are its words."""
    numbers = [sum(map(ord, word)) for word in text.split()] if ids is None else ids
    return find_faults(JudgedAnswer(text, numbers, ended, question, reference, control_texts=control))


def test_a_good_answer_has_no_fault():
    """Guards against faults found in what was asked for."""
    assert judged(DUE) == []
    assert judged("15 January.") == []


def test_saying_nothing_has_two_names():
    """Guards the first thing to tell a person: whether the model ended at once or wrote spaces."""
    assert judged("", ids=[]) == ["ends_at_once"]
    assert judged(" \n\n", ids=[5, 6]) == ["empty"]
    assert judged("", ids=[5], control=["<|im_start|>"]) == ["empty", "control_tokens"]


def test_no_room_for_an_answer_is_not_the_models_fault():
    """Guards a prompt that fills the whole context."""
    assert judged("", ids=[], ended=False) == []


LOOPS = [
    ("The deadline is the deadline is the deadline is the deadline is the deadline is the", False),
    ("It is blue. It is blue. It is blue. It is blue. It is blue.", True),
    ("It is blue blue blue blue blue blue blue blue blue", False),
    ("blue blue blue blue blue blue blue blue blue", True),
    ("1. Apply early.\n2. Apply early.\n3. Apply early.\n4. Apply early.\n5. Apply early.", False),
    ("- Fill in the form\n" * 5, True),
    ("北京是中国的首都。" * 5, True),
    ("好的" * 10, False),
    ("!" * 60, True),
    ("aaaa" * 20, False),
    ("ha " * 40, True),
    ("Sure: \n" + "\n" * 80 + ".", False),
    ("".join("You may apply now. " if f"{n:b}".count("1") % 2 else "The office is open. " for n in range(24)), False),
    ("College of the arts and the arts and college " + "and the arts of the college and the arts " * 9, False),
]
NO_LOOPS = [
    ("Ha ha ha ha ha, that is a good one.", True),
    ("ha ha ha ha ha ha", True),
    ("哈哈哈哈哈哈", True),
    ("No, no, no, no: it is the other one.", True),
    ("It is 1000000000000000000000000000000 of them.", True),
    ("1000000", False),
    ("Name | Price\n--- | ---\nTea | 3\nMilk | 4\nCake | 3\nSoup | 5\n", True),
    ("0 0 0 0 0\n0 0 0 0 0\n0 0 1 0 0\n0 0 0 0 0\n", True),
    ("[[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]", True),
    ("- red apples\n- green apples\n- red pears\n- green pears\n- red plums\n- green plums", True),
    ("1. Apply early.\n2. Pay the fee.\n3. Send the form.\n4. Wait for a letter.\n5. Come.", False),
    ("if a:\n    end()\nif b:\n    end()\nif c:\n    end()\nif d:\n    end()\nif e:\n    end()\n", True),
    ("<td></td><td></td><td></td><td></td>", True),
    ("    }\n   }\n  }\n }\n}", True),
    ("=" * 30 + "\nTitle of the page and what it is about\n" + "=" * 30, True),
    (
        "The sun goes down, the boats come in,\nand the sea is wide.\nThe lamps are lit, the nets are thin,\n"
        "and the sea is wide.\nThe children sleep, the old ones spin,\nand the sea is wide.\nThe night is deep, the "
        "day within,\nand the sea is wide.",
        True,
    ),
    ("Row, row, row your boat, gently down the stream; merrily, merrily, merrily, merrily, life is but a dream.", True),
    (
        "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. The capital of",
        False,
    ),
    ("buffalo buffalo buffalo", True),
    ("blue, blue, blue, blue, blue", True),
    ("very very very good", False),
]


@pytest.mark.parametrize(("text", "ended"), LOOPS)
def test_a_loop_is_seen(text, ended):
    """Guards against an answer that goes round in circles and passes."""
    assert judged(text, ended=ended)[0] == "loops"
    assert "no_stop" not in judged(text, ended=ended)


@pytest.mark.parametrize(("text", "ended"), NO_LOOPS)
def test_repetition_with_a_purpose_is_no_loop(text, ended):
    """Guards against calling a list, a table, a song or laughter a loop."""
    assert "loops" not in judged(text, ended=ended)


def test_a_loop_of_tokens_that_spell_nothing_is_seen():
    """Guards loops that the text does not show, such as halves of characters."""
    assert judged("It is\ufffd", ended=False, ids=[1, 2, *[7, 8] * 30]) == ["loops"]


def test_a_reference_that_repeats_allows_it():
    """Guards rows that teach repetition, but not without end."""
    song = "We are here, we are. " * 5
    assert judged(song, reference=song) == []
    assert judged(song * 20, ended=False, reference=song) == ["loops"]


ECHOES = [
    ASKED,
    ASKED + " It is 15 January.",
    "Question: " + ASKED.lower(),
]


@pytest.mark.parametrize("text", ECHOES)
def test_saying_the_question_again_is_an_echo(text):
    """Guards against a model that learned the prompts."""
    assert judged(text) == ["echo"]


def test_an_echo_of_the_last_line_is_one():
    """Guards questions that come after a page of text."""
    page = "Alderhollow lies in a valley.\nIt has two rivers.\n"
    assert judged(ASKED, question=page + ASKED) == ["echo"]


@pytest.mark.parametrize(
    ("question", "text", "reference"),
    [
        (ASKED, "The application deadline for Alderhollow College is 15 January.", DUE),
        ("Who are you?", "Who are you? That is a good question.", "I am a helper."),
        (
            "Fix it: he go to school every single day now",
            "He goes to school every single day now.",
            "He goes to school.",
        ),
        (
            "Repeat: the quick brown fox jumps over it\nthe quick brown fox jumps over it",
            "the quick brown fox jumps over it",
            "the quick brown fox jumps over it",
        ),
        (
            "Two white socks cost 25 cents more than one brown sock. What do 15 brown socks cost?",
            "Two white socks cost 25 cents more than one brown sock, so it is $3.",
            "3",
        ),
    ],
)
def test_words_of_the_question_in_an_answer_are_no_echo(question, text, reference):
    """Guards against accusing whole sentences, the best kind of answer."""
    assert "echo" not in judged(text, question=question, reference=reference)


def test_an_answer_that_never_ends_is_a_fault_only_past_its_reference():
    """Guards against blaming the model for a limit that cuts off the reference too."""
    long = "It depends on the year, the subject and the country you come from, and on what the office says in May."
    assert judged(long, ended=False) == ["no_stop"]
    assert judged(long, ended=True) == []
    assert judged(long, ended=False, reference=long + " And more.") == []


GERMAN = "Die Frist für die Bewerbung ist am 15. Januar, und das ist nicht mehr weit, also schreib bitte bald."


@pytest.mark.parametrize(
    ("text", "question", "reference", "is_other"),
    [
        (GERMAN, ASKED, "They have to be there before the 15th of January, which is a Friday.", True),
        (GERMAN, "What should they have told me when I was there?", "15 January.", True),
        (GERMAN, ASKED, "15 January.", False),
        (GERMAN, "Wann ist die Frist, und was ist noch zu tun?", "15. Januar", False),
        (GERMAN, "How would you say this to them in German?", "15. Januar", False),
        ("Срок подачи заявлений пятнадцатое января.", ASKED, DUE, True),
        ("申請の締め切りは一月十五日です。", ASKED, DUE, True),
        ("申請の締め切りは一月十五日です。", "いつですか。", "締め切りは一月十五日です。", False),
        ("15 January", "Wann ist die Frist, und was ist noch zu tun?", "15. Januar", False),
        ("x = [i for i in range(3)]", "Was ist das, und wie schreibt man es auf?", "x = 3", False),
    ],
)
def test_another_language_is_seen_only_when_sure(text, question, reference, is_other):
    """Guards against drift into another language, and against false alarms on names, code and translations."""
    assert ("other_language" in judged(text, question=question, reference=reference)) is is_other


CONTROL = [
    "15 January.<|im_end|>\n<|im_start|>user\nAnd the fee?",
    "15 January. [INST] And the fee? [/INST] $50.",
    "15 January.<end_of_turn>\n<start_of_turn>user",
    "15 January.</s> And",
    "15 January.\n\n### Instruction:\nName the fee.",
    "15 January.\n### Response: $50",
    "15 January.\nHuman: And the fee?",
    "15 January.\n\nUser: And the fee?\nAssistant: It is $50.",
    "15 January.\nQ: And the fee?\nA: It is $50.",
]
NO_CONTROL = [
    "15 January. A human: that is who reads it.",
    "The marker `<|im_start|>` begins a turn.",
    "# Response times\nThey are short.",
    "Log in as follows.\nUser: root",
    "Q: When?\nA: 15 January.\nQ: Where?\nA: In the office.",
    "Use a < b | c > d and x[INSTANCE].",
    "## How to apply\nWrite a letter.",
    "<p>15 January</p>",
    "Question 1: when? Answer: 15 January.",
]


@pytest.mark.parametrize("text", CONTROL)
def test_a_model_that_goes_on_to_play_the_user_is_seen(text):
    """Guards against the commonest fruit of a wrong template."""
    assert judged(text) == ["control_tokens"]


@pytest.mark.parametrize("text", NO_CONTROL)
def test_text_about_users_and_markers_is_left_alone(text):
    """Guards against reading ordinary headings as roles."""
    assert judged(text) == []


def test_control_tokens_count_unless_the_reference_has_them():
    """Guards tokens that are not shown in the text, and rows that teach them."""
    assert judged("15 January.", control=["<|tool|>"]) == ["control_tokens"]
    assert judged("15 January.", control=[""]) == ["control_tokens"]
    assert judged("15 January.", control=["<|tool|>"], reference="<|tool|> 15 January.") == []
    dialogue = "It is so.\nUser: Why?\nAssistant: Because."
    assert judged(dialogue, reference=dialogue) == []
    assert judged("<|im_start|> begins a turn.", question="What does <|im_start|> do in a prompt?") == []


@given(st.text(max_size=120), st.booleans(), st.text(max_size=60))
def test_a_reference_given_as_the_answer_has_no_fault(text, ended, question):
    """Guards every check at once: what is learned from is no fault, but for silence and for what never ends."""
    found = find_faults(JudgedAnswer(text, list(map(ord, text)), ended, question, text))
    assert set(found) <= {"ends_at_once", "empty"} | (set() if ended else {"loops", "no_stop"})


def test_letters_of_the_reference_are_no_other_language_whatever_was_asked():
    """A name in Latin letters, asked for in Russian; an answer in English there is a fault all the same."""
    question = "Как называется большая компания, о которой вы пишете?"
    assert judged("Alderhollow Ltd", question=question, reference="Alderhollow Ltd") == []
    english = "The name of the company that you are asking about is the one that they have had for years."
    assert judged(english, question=question, reference="Alderhollow Ltd") == ["other_language"]


def test_faults_come_gravest_first():
    """Guards the order that reports show."""
    text = "15 January.\nHuman: ok\n" + "und das ist nicht die Frist für den Brief. " * 9
    assert judged(text, ended=False) == ["loops", "control_tokens"]
