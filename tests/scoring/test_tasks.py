"""The task of rows is found from their replies, on real rows and on small sets."""

import json
import random

import pytest
from test_scorers import JOBS, SHARED, job

from tunewell.scoring.base import ReferenceRow as Row
from tunewell.scoring.tasks import find_task


def rows(*replies, times=10, ask="Question {n} about it?"):
    return [Row(ask.format(n=n), reply) for n, reply in enumerate(replies * times)]


CALLS = [json.dumps({"name": "search", "arguments": {"query": word}}) for word in ["tea", "milk", "bread", "salt"]]
LISTED = ", ".join(f"topic {n}" for n in range(60))
WORDS = [f"{first}{second}" for first in ("light", "water", "stone", "paper") for second in "abcdefghij"]
FOUND = {
    "labels": rows("positive", "negative", "neutral", times=20),
    "labels, many, few rows of each": rows(*[f"topic {chr(97 + n)}" for n in range(20)], times=4, ask="It is {n}"),
    "labels, each named in every question": [
        Row(f"Which label fits this text? Labels: {LISTED}.\n\n{WORDS[n % 40]} {WORDS[n * 7 % 40]}", f"topic {n % 60}")
        for n in range(240)
    ],
    "labels, one only": rows("spam", times=40),
    "choice": rows("yes", "no", times=20),
    "choice, with reasons": [Row(f"Is {n} so?", f"{['Yes', 'No'][n % 2]}, because of {n * 7}.") for n in range(40)],
    "choice, letters": rows("A) Paris", "B) London", "C) Rome", times=15),
    "number": [Row(f"What is {n} plus {n}?", f"{2 * n}") for n in range(40)],
    "number, marked": [Row(f"What is {n} plus {n}?", f"{n} + {n}\n#### {2 * n}") for n in range(40)],
    "json": [Row(f"Sentence {n}", json.dumps({"intent": "play", "n": n})) for n in range(40)],
    "tools": rows(*CALLS),
    "tools, at times": [*rows(*CALLS), *rows("Hello, how can I help?", times=30)],
    "sql": [Row(f"older than {n}", f"SELECT name FROM people WHERE age > {n}") for n in range(40)],
    "command": [Row(f"larger than {n}", f"find . -size +{n}M -print") for n in range(40)],
    "command, of other programs": [Row(f"resize {n}", f"frobnicate --size {n} -v in{n}.png") for n in range(40)],
    "number, prices": [Row(f"price of {n}", f"${n % 9}.{n % 90 + 10}") for n in range(60)],
    "command, of one program": [Row(f"undo {n}", f"git reset --hard HEAD~{n}") for n in range(40)],
    "text, of a script": [
        Row(f"line {n}", f"{['Guard', 'Mayor'][n % 2]}: Halt, number {n}, and go away") for n in range(60)
    ],
    "labels, with thinking": rows("<think>a</think>\npositive", "<think>b</think>\nnegative", times=30),
    "labels, with signs": rows("-1", "0", "1", times=20, ask="How is the mood of review {n}"),
    "number, stated": [
        Row(f"What is {n} plus {n}?", f"{n} + {n} is {2 * n}. The answer is {2 * n}.") for n in range(40)
    ],
    "labels, ratings": rows("1", "2", "3", "4", "5", times=20),
    "command, of PowerShell": [Row(f"{n}", f"Get-Item -Path C:\\a{n} | Sort-Object -Unique") for n in range(40)],
    "text, of code": [Row(f"{n}", f"def f{n}(x):\n    for i in range(x):\n        print(i)") for n in range(40)],
    "facts": [Row(f"When is the deadline of college {n}?", f"The deadline is {n % 27 + 1} March.") for n in range(40)],
    "chat": [Row(f"How is the garden {n}?", f"Oh, my knees say it will rain, week {n}") for n in range(40)],
    "chat, turns": [Row(f"Tell me about {n}", f"It is a long story, {n}", num_replies=3) for n in range(40)],
    "text": [Row(f"Write about {n}", f"A text on {n} " * 30) for n in range(40)],
}


@pytest.mark.parametrize("name", FOUND)
def test_the_task_of_small_sets_is_found_with_a_reason(name):
    """Guards rules that fit only the data for which they were written."""
    found = find_task(FOUND[name])
    assert found.value == name.partition(",")[0], found
    assert found.because


def test_rows_without_questions_are_documents_and_chats_are_chats():
    assert find_task([], num_documents=30).value == "documents"
    assert find_task(FOUND["labels"], is_chat=True).value == "chat"
    assert find_task([]).value == "text"


def test_a_few_other_rows_do_not_change_the_task():
    """Guards ordinary instructions that are mixed in against forgetting."""
    for name in ("labels", "json", "sql", "number, marked", "choice"):
        mixed = [*FOUND[name], *FOUND["text"][: len(FOUND[name]) // 20]]
        assert find_task(mixed).value == name.partition(",")[0]


def test_a_form_that_only_a_part_of_the_rows_has_is_named():
    """Guards a JSON job with broken rows that is silently scored as text."""
    found = find_task([*FOUND["json"], *FOUND["text"][:20]])
    assert found.value == "text" and "67% of the replies parse as JSON" in found.because


@pytest.mark.shared
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("number", [100, 500, None])
def test_the_task_of_real_rows_is_found(name, number):
    training = job(name, "train")
    chosen = training if number is None else random.Random(number).sample(training, number)
    assert find_task(chosen).value == JOBS[name]


@pytest.mark.shared
def test_instructions_of_many_kinds_are_text():
    lines = (SHARED / "data" / "self_instruct" / "seed_tasks.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    assert find_task([Row(one["instruction"], one["instances"][0]["output"]) for one in found]).value == "text"
