"""Sample answers are judged at every evaluation: a model that stops answering is named while it trains."""

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import tunewell
from corpora import write_sums
from forked import run_command
from parrots import write_parrot
from tunewell.inference.decoder import Generated
from tunewell.records.events import read_events
from tunewell.records.healing import HealingEntry, read_healing
from tunewell.runs.result import TrainResult
from tunewell.training import build

Speaker = Callable[[list[str], int], list[str]]
"""Takes the questions and the number of the evaluation, and returns the answers."""
SETTINGS: dict[str, Any] = {
    "train": {"max_steps": 6, "batch_documents": 4, "threads": 1, "learning_rate": 1e-7},
    "evaluate": {"every_steps": 2, "samples": 2, "sample_tokens": 48},
    "data": {"sources": "rows.jsonl", "held_out": 0.2},
    "method": {"kind": "full"},  # an adapter of a model whose other weights are 0 has no gradient
    "verdict": {"after_training": False},
}


def say(text: str) -> Speaker:
    return lambda questions, evaluation: [text] * len(questions)


def echo(questions: list[str], evaluation: int) -> list[str]:
    return questions


def fall_silent(questions: list[str], evaluation: int) -> list[str]:
    return ["It is 4." if evaluation < 2 else ""] * len(questions)


def loop_once(questions: list[str], evaluation: int) -> list[str]:
    return ["blue " * 30 if evaluation == 1 else "It is 4."] * len(questions)


def loop_at_every_second(questions: list[str], evaluation: int) -> list[str]:
    return ["It is 4." if number % 2 else "blue " * 30 for number in range(len(questions))]


def say_in_turn(*texts: str, after: int = 0) -> Speaker:
    """Answer each question with its own text, and every question rightly before evaluation `after`."""
    return lambda questions, evaluation: [
        texts[number % len(texts)] if evaluation >= after else "It is 4." for number in range(len(questions))
    ]


@pytest.fixture
def train(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainResult]:
    """Train a model whose samples are written by a function."""
    model = write_parrot(tmp_path / "model", tiny_model, "Yes")
    rows = [{"instruction": f"{n} plus {n} makes how much, my friend {n}?", "output": "A sum."} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)

    def run(speaker: Speaker, *, model: str = str(model), **options: Any) -> TrainResult:
        backend = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
        evaluations = count()

        def generate(_: Any, prompts: list[list[int]], **__: Any) -> list[Generated]:
            questions = [backend.decode(ids).removeprefix("user\n").partition("\n")[0] for ids in prompts]
            texts = speaker(questions, next(evaluations))
            return [Generated(backend.encode(text, add_special_tokens=False).ids, ended=True) for text in texts]

        monkeypatch.setattr(build, "generate", generate)
        return tunewell.train({**SETTINGS, "model": model, "tokenizer": str(tiny_model), **options}, progress=False)

    return run


def findings(folder: Path = Path("run")) -> list[HealingEntry]:
    return [entry for entry in read_healing(folder) if entry.name == "degenerate-answers"]


@pytest.mark.parametrize(
    ("speaker", "fault", "words"),
    [
        (say(""), "ends_at_once", "are empty"),
        (say("\n \n"), "empty", "are empty"),
        (say("blue " * 30), "loops", "loop"),
        (echo, "echo", "repeat the question"),
    ],
)
def test_a_fault_in_all_answers_warns_after_the_second_evaluation(
    train: Callable[..., TrainResult], speaker: Speaker, fault: str, words: str
) -> None:
    """Step 0 shows the base model, and one evaluation may be bad luck: neither must warn alone."""
    result = train(speaker)
    assert result.status == "finished" and result.exit_code == 0
    [entry] = findings()
    assert (entry.step, entry.severity, entry.action) == (4, "warning", "none")
    assert entry.words.startswith(f"all 2 sample answers {words} at steps 2 and 4: ")
    samples = read_events(Path("run/samples.jsonl"))
    assert {sample["fault"] for sample in samples} == {fault}
    assert entry.numbers["answers"] == [sample["answer"] for sample in samples if sample["step"] == 4]


def test_answers_that_become_empty_are_named_at_the_next_evaluation_too(
    train: Callable[..., TrainResult],
) -> None:
    train(fall_silent)
    assert [(entry.step, entry.numbers["steps"]) for entry in findings()] == [(6, [4, 6])]


@pytest.mark.parametrize("speaker", [loop_once, loop_at_every_second, say("It is 4.")])
def test_mixed_or_passing_faults_do_not_warn(train: Callable[..., TrainResult], speaker: Speaker) -> None:
    train(speaker, healing={"behaviour": "stop"})
    assert findings() == []
    samples = read_events(Path("run/samples.jsonl"))
    assert any(sample["fault"] is None for sample in samples if sample["step"] == 4)


LOOPS = [
    ("fine fine fine", "sett sett sett"),
    ("aa bb aa bb", "fine fine fine sett sett sett"),
    ("item 1 item 2 item 3", "I like red. I like blue. I like green. I like pink."),
    ("finefinefine", "aaaa"),
    ("好好好", "是的是的是的"),
]


@pytest.mark.parametrize("texts", LOOPS)
def test_short_loops_that_differ_between_samples_stop_the_run(train: Callable[..., TrainResult], texts: Any) -> None:
    """A ruined model said "fine fine fine" to one question and "sett sett sett" to the next: both ended in time."""
    result = train(say_in_turn(*texts), healing={"behaviour": "stop"})
    assert result.exit_code == 4 and [entry.action for entry in findings()] == ["stop"]


def test_half_of_the_samples_decide_if_the_base_model_did_better(train: Callable[..., TrainResult]) -> None:
    """With four samples, two loops in each evaluation went unnoticed."""
    more = {**SETTINGS["evaluate"], "samples": 4}
    half = ("It is 4.", "fine fine fine", "It is 5.", "sett sett sett")
    train(say_in_turn(*half, after=1), evaluate=more)
    [entry] = findings()
    assert entry.words.startswith('2 of 4 sample answers loop at steps 2 and 4: "fine fine fine", "sett sett sett"')
    held_out = [event for event in read_events(Path("run/events.jsonl")) if event["kind"] == "held_out"]
    assert [event["are_degenerate"] for event in held_out] == [False, True, True, True]
    Path("run").rename("first")
    train(say_in_turn(*half), evaluate=more)
    assert findings() == [], "the base model loops as often"


RIGHT = [
    ("no no no", "It is 4.", "It is 5.", "It is 6."),
    (
        "- pears\n- plums",
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |",
        "1 2 3 4 5 6",
        "2 x 1 = 2\n2 x 2 = 4\n2 x 3 = 6",
    ),
    ("banana", "Mississippi", "bye bye", "好"),
    (
        "def f(x):\n    return x\n\ndef g(x):\n    return x",
        "Row, row, row your boat",
        "yes",
        "Monday: closed\nTuesday: closed",
    ),
]


@pytest.mark.parametrize("texts", RIGHT)
def test_lists_tables_code_and_short_answers_are_no_loops(train: Callable[..., TrainResult], texts: Any) -> None:
    """With `healing.behaviour: stop`, a false alarm ends a good run."""
    more = {**SETTINGS["evaluate"], "samples": 4}
    assert train(say_in_turn(*texts), evaluate=more, healing={"behaviour": "stop"}).status == "finished"
    assert findings() == []


def test_healing_that_is_off_does_not_stop_a_run(train: Callable[..., TrainResult]) -> None:
    result = train(say(""), healing={"behaviour": "stop", "on": False})
    assert result.status == "finished" and [entry.action for entry in findings()] == ["none"]


def test_a_model_with_random_weights_may_loop_until_it_has_answered_once(
    train: Callable[..., TrainResult],
) -> None:
    result = train(say("blue " * 30), model="preset:tiny-1m", healing={"behaviour": "stop"})
    assert result.status == "finished" and [entry.severity for entry in findings()] == ["note"]
    Path("run").rename("first")
    result = train(fall_silent, model="preset:tiny-1m", healing={"behaviour": "stop"})
    assert result.exit_code == 4 and [entry.severity for entry in findings()] == ["warning"]


@pytest.mark.parametrize(("says", "then", "words"), [("", "<|im_end|>", "are empty"), ("Yes", "!", "loop")])
@pytest.mark.uses("diagnose")
def test_the_run_stops_with_the_evidence(tmp_path: Path, tiny_model: Path, says: str, then: str, words: str) -> None:
    """Without any patch: a model that always ends at once, and one that never stops repeating a token."""
    write_sums(
        tmp_path, tiny_model, model=str(write_parrot(tmp_path / "model", tiny_model, says, then=then)), num_rows=40
    )
    sets = [f"{section}.{key}={value}" for section, keys in SETTINGS.items() for key, value in keys.items()]
    sets = [line for line in sets if "sources" not in line] + ["healing.behaviour=stop"]
    done = run_command("train", *(part for line in sets for part in ("--set", line)), cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    evidence = f"all 2 sample answers {words} at steps 2 and 4: "
    assert f"stopped: step 4: {evidence}" in done.stderr
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["status"] == "stopped" and outcome["reason"].startswith(evidence) and outcome["steps"] == 4
    shown = [sample["answer"][:20] for sample in read_events(tmp_path / "run" / "samples.jsonl") if sample["step"] == 4]
    assert all(answer in outcome["reason"] for answer in shown)
    assert "samples.jsonl" in outcome["advice"][0]
    assert evidence in outcome["healing"][-1] and evidence in " ".join(done.stdout.split()) + " "
    [entry] = findings(tmp_path / "run")
    assert (entry.step, entry.action) == (4, "stop")
    assert done.stdout.rstrip().endswith("next: `tunewell diagnose run`")
    assert "`tunewell diagnose .`" in (tmp_path / "run" / "README.md").read_text()
    from tunewell.features.diagnose.diagnose import diagnose_paths

    [named, *_] = diagnose_paths([tmp_path / "run"]).findings
    assert named.id == "degenerate-answers" and named.evidence[0].file == "healing.jsonl"
    assert (tmp_path / "run" / "checkpoints" / "step-000004").is_dir(), "the model can be examined"
