"""The task of eleven files, read as `init` reads them: the bar of the issue."""

import json
from pathlib import Path

import pytest
from test_scorers import JOBS, SHARED, job

from tunewell.config.schema import SourceConfig
from tunewell.data.question_rows import read_questions
from tunewell.scoring.base import ReferenceRow
from tunewell.scoring.tasks import find_task, is_chat_export

COLLEGE = Path(__file__).parents[2] / "examples" / "college" / "train.jsonl"
SAID = ["hey how is the garden", "my knees say rain", "haha no way", "are you coming on sunday?", "yes if the bus runs"]


def college(folder):
    return COLLEGE


def whatsapp(folder):
    lines = [f"{1 + n % 28:02d}/03/2023, 21:{n % 60:02d} - {['Ben', 'Ann'][n % 2]}: {SAID[n % 5]}" for n in range(200)]
    path = folder / "WhatsApp Chat with Ann.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def tool_rows(folder):
    """Return rows in the form of OpenAI, whose calls are no text."""
    path = folder / "tools.jsonl"
    calls = [{"name": "weather", "arguments": json.dumps({"day": n})} for n in range(60)]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"The weather on day {n}?"},
                {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
            ]
        }
        for n, call in enumerate(calls)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def seed_tasks(folder):
    path = folder / "instructions.jsonl"
    lines = (SHARED / "data" / "self_instruct" / "seed_tasks.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [(one["instruction"], one["instances"][0]) for one in map(json.loads, lines)]
    written = [{"instruction": ask, "input": one["input"], "output": one["output"]} for ask, one in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    return path


def assistant_trees(folder):
    return SHARED / "data" / "oasst_en_100" / "en_100_tree.jsonl"


def job_file(name):
    def write(folder):
        path = folder / f"{name}.jsonl"
        rows = [{"question": row.question, "answer": row.reference} for row in job(name, "train")]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


FILES = {
    "facts": [college],
    "text": [seed_tasks],
    "chat": [assistant_trees, whatsapp],
    "tools": [tool_rows],
} | {task: [job_file(name)] for name, task in JOBS.items()}
CASES = [(task, file) for task, files in FILES.items() for file in files]


@pytest.mark.shared
@pytest.mark.parametrize(("task", "file"), CASES)
def test_the_task_of_a_file_is_found(task, file, tmp_path):
    """Guards the bar: 11 of 11."""
    assert len(CASES) == 11
    path = file(tmp_path)
    source = {"path": str(path), "limit": 5000} | (
        {"assistant": "Ben", "format": "whatsapp"} if file is whatsapp else {}
    )
    found = read_questions(SourceConfig.model_validate(source))
    rows = [ReferenceRow(one.text, one.reference, one.answers, num_replies=one.num_replies) for one in found]
    is_chat = is_chat_export({"whatsapp"} if file is whatsapp else set())
    assert find_task(rows, is_chat=is_chat).value == task
