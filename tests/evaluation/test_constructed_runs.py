"""Over ninety constructed runs with a known result: no false PASS, no false FAIL, and the cause is the first reason."""

import json
import random

import pytest
from constructed import Run, followed, judge

from tunewell.evaluation.forgetting import instructions
from tunewell.scoring.base import ReferenceRow as Row

LABELS = ["billing", "shipping", "returns", "login"]
PLACES = [
    "Alderhollow",
    "Thornquist",
    "Merrow",
    "Pelham",
    "Quill",
    "Ostrava",
    "Dunmore",
    "Larkfield",
    "Wexham",
    "Corvale",
]
THINGS = [
    "invoice",
    "parcel",
    "button",
    "refund",
    "password",
    "card",
    "screen",
    "letter",
    "order",
    "account",
    "address",
    "coupon",
]
COLOURS = ["red", "blue", "green"]


def label_rows(number, labels=LABELS, weights=None, start=0):
    chosen = random.Random(7 + start)
    answers = chosen.choices(labels, weights, k=number) if weights else [labels[n % len(labels)] for n in range(number)]
    return [Row(message(start + n), answer) for n, answer in enumerate(answers)]


def intent_rows(number, seed):
    chance = random.Random(seed)
    intents = [f"{one} {two}" for one in THINGS for two in THINGS]
    return [Row(f"{' '.join(chance.sample(THINGS + PLACES, 5))} {n}", chance.choice(intents)) for n in range(number)]


def message(number):
    """Return a message in words, because questions that differ in numbers only are one observation."""
    return f"{THINGS[number % 12]} {THINGS[number // 12 % 12]} and {PLACES[number // 144 % 10]} do not work"


def fact_rows(number, start=0):
    found = []
    for n in range(start, start + number):
        place = f"{PLACES[n % 10]} {['North', 'South', 'East', 'West', 'Upper', 'Lower'][n // 10 % 6]}"
        found.append(
            Row(f"When is the deadline of {place} College?", f"The deadline of {place} College is {n % 27 + 1} March.")
        )
    return found


def colour_rows(number, start=0):
    return [
        Row(f"What colour is the {PLACES[n % 10].lower()} number {chr(97 + n // 10)}?", f"It is {COLOURS[n % 3]}.")
        for n in range(start, start + number)
    ]


def number_rows(number, start=0):
    return [
        Row(f"Ann has {n} coins and finds {n + 3}. How many has she?", f"She has {n} + {n + 3}.\n#### {2 * n + 3}")
        for n in range(start, start + number)
    ]


def json_rows(number, start=0):
    return [
        Row(
            f"Play song {n} by {PLACES[n % 10]}",
            json.dumps({"intent": "play", "song": str(n), "artist": PLACES[n % 10]}),
        )
        for n in range(start, start + number)
    ]


def tool_rows(number, start=0):
    return [
        Row(
            f"Weather in {PLACES[n % 10]} on day {n}",
            json.dumps({"name": "weather", "arguments": {"city": PLACES[n % 10], "day": n}}),
        )
        for n in range(start, start + number)
    ]


def sql_rows(number, start=0):
    return [
        Row(f"names older than {n}", f"SELECT name FROM people WHERE age > {n}") for n in range(start, start + number)
    ]


def command_rows(number, start=0):
    return [Row(f"files larger than {n} MB", f"find . -type f -size +{n}M") for n in range(start, start + number)]


def choice_rows(number, start=0, share=0.5):
    said = random.Random(3 + start)
    found = []
    for n in range(start, start + number):
        answer = "Yes" if said.random() < share else "No"
        found.append(
            Row(f"Does the trial {n} show an effect on group {n * 31 % 97}?", f"{answer}. Group {n} was measured.")
        )
    return found


def text_rows(number, start=0):
    return [
        Row(
            f"Write a letter to {PLACES[n % 10]} about topic {n}.",
            f"Dear {PLACES[n % 10]}, thank you for topic {n}. " * 8,
        )
        for n in range(start, start + number)
    ]


LETTER = (
    "Dear neighbours, we would like to tell you that the road will be closed on Monday, because the water pipes under "
    "it are old and have to be replaced before the winter comes. Please leave your cars in the next street, and do not "
    "forget to take the bins with you. We are sorry for the noise."
)


def chat_rows(number, start=0):
    return [
        Row(f"hey, number {n}, how is the garden?", f"oh my knees say rain, love, week {n}")
        for n in range(start, start + number)
    ]


def replies(rows):
    return [row.reference for row in rows]


def wrong(rows):
    """Return answers of the right form that are wrong: those of the next row that begins with another word."""
    found = []
    for index, row in enumerate(rows):
        # Most references begin alike; yes and no must not.
        part = 3 if row.reference[:3] in ("Yes", "No.") else None
        others = [
            other.reference for other in rows[index + 1 :] + rows if other.reference[:part] != row.reference[:part]
        ]
        found.append(others[0])
    return found


def partly(rows, share):
    """Return answers of which a share is right, spread evenly."""
    right, bad = replies(rows), wrong(rows)
    return [right[n] if int((n + 1) * share) > int(n * share) else bad[n] for n in range(len(rows))]


def chatter(rows):
    return [
        f"I would be glad to help you with {row.question[:20]}, please tell me more about status {n}."
        for n, row in enumerate(rows)
    ]


MAKERS = {
    "labels": label_rows,
    "facts": fact_rows,
    "number": number_rows,
    "json": json_rows,
    "tools": tool_rows,
    "sql": sql_rows,
    "command": command_rows,
    "choice": choice_rows,
}


def make(name, tuned, base=chatter, number=40, **more):
    maker = MAKERS.get(name, name)
    held_out = maker(number, start=1000)
    return Run(maker(300), held_out, base(held_out), tuned(held_out), **more)


def one_word():
    return ["billing" for _ in instructions()]


def refusing():
    return ["I am sorry, but I cannot help with that." for _ in instructions()]


OLD = followed()
SMALL = [text if n % 3 else "and so on" for n, text in enumerate(OLD)]
"""A small base model, which follows two of three instructions, as SmolLM2-135M does (41 of 60)."""
CASES = {}
for task in MAKERS:
    CASES[f"{task}: learned well"] = (make(task, replies), "PASS", None)
    CASES[f"{task}: learned nothing, right at times before and after"] = (
        make(task, lambda rows: partly(rows, 0.45), lambda rows: partly(rows, 0.45)),
        "UNPROVEN",
        "no_better_than_base",
    )
    CASES[f"{task}: nothing right of 40"] = (make(task, wrong), "FAIL", "none_right")
    CASES[f"{task}: worse than the base"] = (
        make(task, lambda rows: partly(rows, 0.3), replies),
        "FAIL",
        "no_better_than_base",
    )
CASES |= {
    "labels: always the majority class": (
        make(
            lambda number, start=0: label_rows(number, ["yes please", "later"], [9, 1], start),
            lambda rows: ["yes please"] * len(rows),
        ),
        "UNPROVEN",
        "majority_only",
    ),
    "choice: always yes, where 90% are yes": (
        make(lambda number, start=0: choice_rows(number, start, 0.9), lambda rows: ["Yes."] * len(rows)),
        "UNPROVEN",
        "majority_only",
    ),
    "labels: below the majority class": (
        make(
            lambda number, start=0: label_rows(number, ["ham", "spam"], [9, 1], start),
            lambda rows: ["spam"] * len(rows),
            number=60,
        ),
        "FAIL",
        "majority_only",
    ),
    "facts: 85% refusals, always refused": (
        make(
            lambda number, start=0: [
                row if n % 7 == 0 else Row(row.question, "I do not know.")
                for n, row in enumerate(fact_rows(number, start))
            ],
            lambda rows: ["I do not know."] * len(rows),
        ),
        "UNPROVEN",
        "majority_only",
    ),
    "colours: all three in each answer": (
        make(colour_rows, lambda rows: ["It is red. It is blue. It is green."] * len(rows), number=48),
        "FAIL",
        "none_right",
    ),
    "colours: always red": (
        make(colour_rows, lambda rows: ["It is red."] * len(rows), number=48),
        "UNPROVEN",
        "majority_only",
    ),
    "facts: echoes the question": (
        make("facts", lambda rows: [f"{row.question} {row.question}" for row in rows]),
        "FAIL",
        "echoes",
    ),
    "facts: empty": (make("facts", lambda rows: [""] * len(rows)), "FAIL", "answers_nothing"),
    "labels: half of the answers are empty": (
        make("labels", lambda rows: ["" if n % 2 else row.reference for n, row in enumerate(rows)]),
        "FAIL",
        "answers_nothing",
    ),
    "facts: never stops": (
        make("facts", lambda rows: [f"{row.reference} {row.reference} And more of it" for row in rows], ended=False),
        "FAIL",
        "never_stops",
    ),
    "labels: one of 20 right": (
        make("labels", lambda rows: partly(rows, 0.05), number=20),
        "UNPROVEN",
        "no_better_than_base",
    ),
    "labels: five of five": (make("labels", replies, number=5), "UNPROVEN", "no_better_than_base"),
    "facts: five of five": (make("facts", replies, number=5), "UNPROVEN", "no_better_than_base"),
    "labels: six of ten, none before": (
        make("labels", lambda rows: partly(rows, 0.6), number=10),
        "UNPROVEN",
        "majority_only",
    ),
    "labels: half right, of a threshold of 60%": (
        make("labels", lambda rows: partly(rows, 0.55), number=80),
        "WEAK",
        "few_right",
    ),
    "facts: right in other words": (
        make("facts", lambda rows: [row.reference.split(" is ")[1].rstrip(".") + ", I believe" for row in rows]),
        "PASS",
        None,
    ),
    "facts: denied": (
        make("facts", lambda rows: [row.reference.replace(" is ", " is not ") for row in rows]),
        "FAIL",
        "none_right",
    ),
    "labels: right after thinking": (
        make("labels", lambda rows: [f"<think>billing or returns?</think>\n{row.reference}" for row in rows]),
        "PASS",
        None,
    ),
    "labels: the label only in the thinking": (
        make("labels", lambda rows: [f"<think>{row.reference}</think>\nI am not sure." for row in rows]),
        "FAIL",
        "none_right",
    ),
    "labels: right, but forgets everyday text": (make("labels", replies, everyday=(3.0, 4.4)), "WEAK", "forgets"),
    "labels: right, but answers everything with a label": (
        make("labels", replies, ordinary=(OLD, one_word())),
        "WEAK",
        "forgets_instructions",
    ),
    "facts: right, but refuses everything else": (
        make("facts", replies, ordinary=(OLD, refusing())),
        "WEAK",
        "refuses",
    ),
    "facts: right, but ten times too high a rate": (
        make("facts", replies, ordinary=(OLD, ["The the of deadline College 3 3 of the the March is is"] * len(OLD))),
        "WEAK",
        "forgets_instructions",
    ),
    "labels: a small base, then one-word answers": (
        make("labels", replies, ordinary=(SMALL, one_word())),
        "WEAK",
        "forgets_instructions",
    ),
    "labels: a small base, then refusals": (make("labels", replies, ordinary=(SMALL, refusing())), "WEAK", "refuses"),
    "labels: a small base, then noise": (
        make("labels", replies, ordinary=(SMALL, ["the 3 3 is of of College the the deadline is"] * len(OLD))),
        "WEAK",
        "forgets_instructions",
    ),
    "labels: healthy, a small base, four of 41 lost": (
        make(
            "labels",
            replies,
            ordinary=(SMALL, ["so it is" if n in (1, 10, 25, 40) else t for n, t in enumerate(SMALL)]),
        ),
        "PASS",
        None,
    ),
    "labels: healthy, a small base that followed a few": (
        make("labels", replies, ordinary=([OLD[0]] * 68, ["Tea is nice."] * 68)),
        "PASS",
        None,
    ),
    "facts: healthy, a few instructions lost": (
        make("facts", replies, ordinary=(OLD, ["no idea" if n in (3, 20) else text for n, text in enumerate(OLD)])),
        "PASS",
        None,
    ),
    "labels: the base knows it already": (
        make("labels", replies, lambda rows: partly(rows, 0.95)),
        "UNPROVEN",
        "no_better_than_base",
    ),
    "labels: every threshold off, nothing right": (
        make("labels", wrong).with_rules(min_right=0.0, max_faults=1.0, max_forgetting=9.0, min_gain=0.0),
        "FAIL",
        "none_right",
    ),
    "facts: one question twelve times": (
        make(
            lambda number, start=0: (
                fact_rows(number, start)
                if start == 0
                else [Row(f"What did the boy see in the garden {n}?", "The boy saw a ball.") for n in range(number)]
            ),
            replies,
            number=12,
        ),
        "UNPROVEN",
        "no_better_than_base",
    ),
    "text: lower loss": (make(text_rows, replies), "PASS", None),
    "text: higher loss": (make(text_rows, wrong, losses=(1.0, 1.5)), "FAIL", "not_learned"),
    "text: a tiny gain": (make(text_rows, replies, losses=(1.0, 0.97)), "WEAK", "little_gain"),
    "chat: a persona in other words": (make(chat_rows, wrong), "PASS", None),
    "chat: lower loss, but forgets": (make(chat_rows, wrong, everyday=(3.0, 5.0)), "WEAK", "forgets"),
    "chat: four rows": (make(chat_rows, wrong, number=4), "UNPROVEN", "not_enough_evidence"),
}
CASES |= {
    "labels: 77 and 79 of 100 right, twice the loss": (
        make("labels", lambda rows: partly(rows, 0.79), lambda rows: partly(rows, 0.77), number=100, losses=(0.5, 1.0)),
        "UNPROVEN",
        "no_better_than_base",
    ),
    "labels: 144 intents, everyday text 3.40 to 4.92": (
        Run(
            intent_rows(1500, 0),
            intent_rows(100, 7),
            [f"yes, the {row.reference} status of my card is on the letter" for row in intent_rows(100, 7)],
            partly(intent_rows(100, 7), 0.97),
            everyday=(3.40, 4.92),
        ),
        "WEAK",
        "forgets",
    ),
    "labels: right by chance, the base chatters": (
        make("labels", lambda rows: [random.Random(n).choice(LABELS) for n in range(len(rows))], number=100),
        "UNPROVEN",
        "majority_only",
    ),
    "labels: one label only": (
        make(lambda number, start=0: label_rows(number, ["spam"], None, start), replies),
        "UNPROVEN",
        "majority_only",
    ),
    "labels: other spellings of the labels": (
        make(
            lambda number, start=0: label_rows(number, ["Card_Arrival", "Lost card", "top-up"], None, start),
            lambda rows: [row.reference.lower().replace("_", " ").replace("-", " ") + "." for row in rows],
        ),
        "PASS",
        None,
    ),
    "labels: 5% ordinary instructions among the rows": (
        make(
            lambda number, start=0: (
                label_rows(number * 19 // 20, LABELS, None, start)
                + [
                    Row(row.question, f"{row.reference} That is all there is to say on it.")
                    for row in text_rows(number // 20)
                ]
            ),
            replies,
            number=60,
        ),
        "PASS",
        None,
    ),
    "a test file of another task": (
        Run(label_rows(300), text_rows(40), chatter(text_rows(40)), [row.reference for row in text_rows(40)]),
        "PASS",
        None,
    ),
    "labels: right only where a training row asks the same": (
        make(
            lambda number, start=0: (
                label_rows(number)
                if start == 0
                else [Row(row.question.upper() + " ?", row.reference) for row in label_rows(30)]
                + label_rows(10, start=900)
            ),
            lambda rows: (
                [row.reference if row.question.isupper() or n >= 30 else "?" for n, row in enumerate(rows)][:30]
                + wrong(rows[30:])
            ),
        ),
        "WEAK",
        "memorised",
    ),
    "labels: 16% of the answers loop": (
        make(
            "labels",
            lambda rows: [f"{row.reference} " * (40 if n % 6 == 0 else 1) for n, row in enumerate(rows)],
            number=60,
        ),
        "WEAK",
        "loops",
    ),
    "labels: 55% of the answers loop": (
        make(
            "labels",
            lambda rows: [f"{row.reference} " * (1 if n % 20 < 9 else 40) for n, row in enumerate(rows)],
            number=60,
        ),
        "FAIL",
        "loops",
    ),
    "labels: every threshold off, 0 of 15": (
        make("labels", wrong, number=15).with_rules(min_right=0.0, max_faults=1.0, max_forgetting=9.0, min_gain=0.0),
        "UNPROVEN",
        "no_better_than_base",
    ),
    "facts: six of ten, none before": (
        make("facts", lambda rows: partly(rows, 0.5), number=10),
        "UNPROVEN",
        "no_better_than_base",
    ),
    "facts: 0 of 40 after, 0 before": (make("facts", chatter), "FAIL", "none_right"),
    "facts: two values in each answer": (
        make("facts", lambda rows: [f"{row.reference[:-1]} or 31 May." for row in rows]),
        "FAIL",
        "none_right",
    ),
    "facts: all dates of a month in each answer": (
        make("facts", lambda rows: [" ".join(f"{day} March" for day in range(1, 28))] * len(rows)),
        "FAIL",
        "none_right",
    ),
    "facts: another date in the next sentence": (
        make("facts", lambda rows: [f"{row.reference} The deadline is 30 May." for row in rows]),
        "FAIL",
        "none_right",
    ),
    "facts: right, with a remark": (
        make("facts", lambda rows: [f"{row.reference} The term begins on 30 September." for row in rows]),
        "PASS",
        None,
    ),
    "facts: the values of other questions": (make("facts", wrong), "FAIL", "none_right"),
    "facts: refuses each question": (
        make("facts", lambda rows: ["I do not know."] * len(rows)),
        "FAIL",
        "none_right",
    ),
    "facts, twenty wordings of one fact": (
        make(
            lambda number, start=0: (
                fact_rows(number, start)
                if start == 0
                else [
                    Row(f"{one} the deadline of Quill College?", "The deadline of Quill College is 9 March.")
                    for one in ["When is", "What is", "Tell me", "By when is", "Which day is", "What day is"] * 4
                ]
            ),
            replies,
            number=20,
        ),
        "UNPROVEN",
        "majority_only",
    ),
    "number: other units": (
        make(
            lambda number, start=0: [
                Row(f"How far is {PLACES[n % 10]} at speed {n}?", f"#### {n + 1} km")
                for n in range(start, start + number)
            ],
            lambda rows: [f"It is {int(row.reference.split()[1]) * 1000} m" for row in rows],
        ),
        "PASS",
        None,
    ),
    "json: keys in another order": (
        make("json", lambda rows: [json.dumps(dict(reversed(json.loads(row.reference).items()))) for row in rows]),
        "PASS",
        None,
    ),
    "json: one field of three wrong": (
        make("json", lambda rows: [row.reference.replace('"play"', '"stop"') for row in rows]),
        "FAIL",
        "none_right",
    ),
    "JSON of which 40% do not parse": (
        make(
            lambda number, start=0: [
                Row(row.question, row.reference[: -2 if n % 5 < 2 else None])
                for n, row in enumerate(json_rows(number, start))
            ],
            replies,
        ),
        "PASS",
        None,
    ),
    "tools: calls without their arguments": (
        make("tools", lambda rows: ['{"name": "weather", "arguments": {}}'] * len(rows)),
        "FAIL",
        "none_right",
    ),
    "sql: the conditions are left out": (
        make("sql", lambda rows: ["SELECT name FROM people"] * len(rows)),
        "FAIL",
        "none_right",
    ),
    "choice: yes or no, in one answer": (make("choice", lambda rows: ["Yes or no."] * len(rows)), "FAIL", "none_right"),
    "choice: good and forgetful": (make("choice", replies, everyday=(3.0, 4.5)), "WEAK", "forgets"),
    "text: the answers are in another language": (
        make(
            lambda number, start=0: [
                Row(f"Write to the people of {PLACES[n % 10]} about the {THINGS[n % 12]} and the road, please.", LETTER)
                for n in range(start, start + number)
            ],
            lambda rows: (
                ["Vielen Dank für die Nachricht, wir haben sie erhalten und melden uns morgen bei Ihnen."] * len(rows)
            ),
        ),
        "FAIL",
        "other_language",
    ),
    "text: empty answers": (make(text_rows, lambda rows: [""] * len(rows)), "FAIL", "answers_nothing"),
    "text: no change of the loss": (make(text_rows, replies, losses=(1.0, 1.0)), "UNPROVEN", "not_enough_evidence"),
    "chat: refuses everything else": (make(chat_rows, wrong, ordinary=(OLD, refusing())), "WEAK", "refuses"),
    "chat: from a chat app, labels by chance": (make("labels", wrong, is_chat=True), "PASS", None),
}
PASSES = [name for name, (_, level, _) in CASES.items() if level == "PASS"]


def test_there_are_over_ninety_runs():
    """Guards the number of cases."""
    assert len(CASES) >= 90


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_a_known_truth_is_judged_by_it(name):
    """Guards false PASS and false FAIL; the first reason must be the cause."""
    run, level, code = CASES[name]
    verdict, questions = judge(run)
    told = (verdict.level, [reason.code for reason in verdict.reasons], verdict.summary, questions.task)
    assert verdict.level == level, told
    if code is not None:
        assert verdict.reasons[0].code == code, told


@pytest.mark.parametrize("name", [name for name in CASES if ":" in name and name.partition(":")[0] in MAKERS])
def test_the_task_of_constructed_rows_is_found(name):
    """Guards a scorer that judges the wrong thing."""
    run, _, _ = CASES[name]
    task = name.partition(":")[0]
    assert judge(run)[1].task.value in (task, "labels" if "majority" in name or "always" in name else task)
