"""Objects as arguments: models, tokenizers, data sets with splits, formatting functions and trainer settings."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from trl import SFTConfig

import tunewell
from corpora import row, write_rows
from parrots import write_random
from tunewell.core.errors import UserError
from tunewell.library.functions import load_inputs
from tunewell.library.objects import formatted, splits_of

ROWS = [row(number) for number in range(40)]
QUICK: dict[str, Any] = {
    "progress": False,
    "settings": {
        **{"train.max_steps": 1, "verdict.after_training": False, "evaluate.samples": 0, "device": "cpu"},
        **{"data.held_out": 0, "data.selection": 0},
    },
}


@pytest.fixture
def model(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_random(tmp_path / "model", tiny_model)


def texts(rows: list[Any]) -> list[str]:
    return [one["text"] for one in rows]


def test_a_model_and_a_tokenizer_in_memory_are_trained(model):
    """Their weights are those of the moment, which a name would not give."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.lm_head.weight.data.zero_()
    tokenizer = AutoTokenizer.from_pretrained(model)
    result = tunewell.train(model=loaded, tokenizer=tokenizer, data=ROWS, **QUICK)
    events = [json.loads(line) for line in (Path(result) / "events.jsonl").read_text().splitlines()]
    first = next(event for event in events if event["kind"] == "step")
    assert first["loss"] == pytest.approx(math.log(len(tokenizer)), abs=0.01)  # a head of zeros knows nothing
    saved = sorted(Path(".tunewell/models").iterdir())
    tunewell.train(model=loaded, tokenizer=tokenizer, data=ROWS, out="again", **QUICK)
    assert sorted(Path(".tunewell/models").iterdir()) == saved and len(saved) == 2


def test_the_tokenizer_of_a_model_in_memory_is_found_or_asked_for(model):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert tunewell.prepare(model=loaded, data=ROWS, progress=False).manifest.splits["train"].documents
    loaded.name_or_path = ""
    with pytest.raises(UserError) as caught:
        tunewell.prepare(model=loaded, data=ROWS, progress=False)
    assert caught.value.fix == "pass `tokenizer=` too"


def test_a_model_that_its_library_cannot_save_is_an_error_with_its_reason(model):
    """The generation settings of some public models are invalid, and transformers refuses to save them."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.generation_config.temperature, loaded.generation_config.do_sample = 0.6, False
    with pytest.raises(UserError, match="cannot be saved: GenerationConfig is invalid"):
        tunewell.prepare(model=loaded, data=ROWS, progress=False)
    assert not list(Path(".tunewell/models").iterdir())


def test_splits_are_training_and_held_out_rows(model):
    """A test split that is trained on makes every score too good."""
    with pytest.warns(UserWarning, match="not used: `validation`"):
        train, test = splits_of({"validation": 1, "test": 2, "train": 3})
    assert (train, test) == (3, 2)
    assert splits_of({"default": 1}) == (1, None)
    with pytest.raises(UserError, match="no split `train`"):
        splits_of({"a": 1, "b": 2})
    data = DatasetDict(train=Dataset.from_list(ROWS[:30]), test=Dataset.from_list(ROWS[30:]))
    manifest = tunewell.prepare(model=model, data=data, progress=False).manifest
    assert manifest.splits["held_out"].documents == 10
    assert manifest.splits["train"].documents == 30


def test_a_formatting_function_has_the_single_or_the_batched_form():
    """TRL has had both; on one row, a function for batches returns a text for each letter."""

    def single(one: dict[str, str]) -> str:
        return f"Q: {one['question']} A: {one['answer']}"

    def batched(columns: dict[str, list[str]]) -> list[str]:
        return [f"Q: {q} A: {a}" for q, a in zip(columns["question"], columns["answer"], strict=False)]

    def indexed(columns: dict[str, list[str]]) -> list[str]:
        return [f"Q: {columns['question'][i]} A: {columns['answer'][i]}" for i in range(len(columns["question"]))]

    expected = [single(one) for one in ROWS]
    for function in (single, batched, indexed, lambda columns: {"text": batched(columns)}):
        assert texts(formatted(ROWS, function)) == expected
    assert formatted(ROWS, lambda one: {"prompt": one["question"], "completion": one["answer"]})[0].keys() == {
        "prompt",
        "completion",
    }
    dropped = formatted(ROWS, lambda one: None if one == ROWS[0] else single(one))
    assert texts(dropped) == expected[1:]
    with pytest.raises(UserError, match="KeyError: 'nope'"):
        formatted(ROWS, lambda one: one["nope"])
    with pytest.raises(UserError, match="returned 3 rows"):
        formatted(ROWS, lambda columns: ["a", "b", "c"])


def test_settings_of_a_trainer_are_translated_or_refused(model):
    """A setting that is silently ignored is found out after the run."""
    given = SFTConfig("o", bf16=False, num_train_epochs=2, per_device_train_batch_size=3, learning_rate=1e-3)
    config = load_inputs(given, (), model=model, data=ROWS).config
    assert (config.train.epochs, config.train.batch_documents, config.train.learning_rate) == (2, 3, 1e-3)
    assert config.train.precision == "fp32" and config.train.schedule == "linear" and config.seed == 42
    plain = load_inputs(TrainingArguments("o", max_steps=7), (), model=model, data=ROWS).config
    assert (plain.train.max_steps, plain.train.learning_rate, plain.train.batch_documents) == (7, 5e-5, 8)
    changed = load_inputs(given, ["train.epochs=1"], model=model, data=ROWS).config
    assert changed.train.epochs == 1
    with pytest.raises(UserError, match="neftune_noise_alpha"):
        load_inputs(SFTConfig("o", bf16=False, neftune_noise_alpha=5.0), (), model=model, data=ROWS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": "question,answer\n" * 400}, "`data` cannot be a text of 6,400 characters"),
        ({"data": ["x" * 300]}, "`data` cannot be a text of 300 characters"),
        ({"data": "a\0b"}, "`data` cannot be a text of 3 characters"),
        ({"data": {"question": ["a"], "answer": ["b"]}}, "`data` has no split `train`: `question`, `answer`"),
        ({"model": "x" * 300}, "a path cannot be a text of 300 characters"),
        ({"model": 3}, "a int is not a path or a name"),
        ({"config": SFTConfig}, "a config is a file or a mapping, not type"),
        ({"config": 3}, "a config is a file or a mapping, not int"),
        ({"data": "rows.jsonl", "formatting_func": str}, "needs rows in memory"),
        ({"model": type("Adapter", (), dict.fromkeys(["save_pretrained", "config", "peft_config"]))()}, "PEFT adapter"),
    ],
)
def test_errors_name_what_to_pass_instead(model, given, words):
    with pytest.raises(UserError) as caught:
        tunewell.train(**{"model": model, "data": ROWS, **given}, **QUICK)
    assert words in caught.value.what and caught.value.fix


def test_texts_with_labels_are_questions_at_every_door(model):
    """`train FILE` trained on the labels, and `train --data FILE` and the library on the texts."""
    rows = [{"text": f"{row(n)['question']}", "label": ("billing", "refund", "other")[n % 3]} for n in range(40)]
    write_rows(Path("few.jsonl"), rows)
    corpus = tunewell.prepare(model=model, data="few.jsonl", progress=False)
    assert corpus.manifest.sources[0].formats == {"classification": 40} and corpus.manifest.rows.task == "labels"
    tunewell.train(model=model, data=rows, out="labelled", **QUICK)
    assert "format: classification" in Path("labelled/config.yaml").read_text()
    texts_only = [{"text": one["text"]} for one in rows]
    assert tunewell.prepare(model=model, data=texts_only, out="t", progress=False).manifest.rows.task == "documents"


def test_rows_that_a_function_makes_have_their_task(model):
    """Without the function, the rows had no question, and the run was planned as plain texts."""
    rows = [{"a": f"What is {n} plus {n}?", "b": str(2 * n)} for n in range(40)]
    write_rows(Path("odd.jsonl"), rows)
    Path("f.py").write_text("def convert(row):\n    return {'question': row['a'], 'answer': row['b']}\n")
    config = {"model": str(model), "data": {"sources": [{"path": "odd.jsonl", "map": "f.py:convert"}]}}
    assert tunewell.prepare(config, progress=False).manifest.rows.task == "number"
