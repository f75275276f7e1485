"""Seed 000: Gemma 3n through Unsloth and TRL. Question and solution as typed parts, a flat YAML, a tensor error."""

import json
from pathlib import Path

import pytest
from authors import findings, outcome, questions, run, write_gemma, write_jsonl

import tunewell
from tunewell.data.tokenizers.load import load_tokenizer

# The author's first config: flat keys of `SFTConfig`, which the script did not read.
FLAT = """\
model: gemma
data: math.jsonl
max_seq_length: 128
packing: false
learning_rate: 2e-4
num_train_epochs: 3
lora_r: 8
optim: adamw_torch_fused
lr_scheduler_type: cosine
"""
# The author's last config: nested, as the code that reads it.
NESTED = """\
model: gemma
data:
  sources: [math.jsonl]
packing:
  context_length: 128
train:
  learning_rate: 2e-2
  epochs: 20
  schedule: cosine
  threads: 1
method:
  kind: lora
  rank: 8
  modules_to_save: [embed_tokens]
"""


def typed(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The author's rows and model: 40 questions as typed parts, and two rows without a solution."""
    write_gemma(tmp_path / "gemma")
    pairs = [*questions(), ("What does nobody know?", ""), ("And what else?", "  ")]
    rows = [{"question": typed(question), "solution": typed(answer), "level": "easy"} for question, answer in pairs]
    write_jsonl(tmp_path / "math.jsonl", rows)
    (tmp_path / "tunewell.yaml").write_text(NESTED, encoding="utf-8")
    return tmp_path


def test_a_flat_config_is_read_or_its_lines_are_named(project):
    """The flat file was read without an error, and none of its values were used."""
    (project / "tunewell.yaml").write_text(FLAT, encoding="utf-8")
    told = run(project, "prepare", code=2)
    assert "`packing` is a section, not false" in told and "tunewell.yaml line 4" in told
    assert "never attend to each other" in told and "has no key" not in told
    (project / "tunewell.yaml").write_text(FLAT.replace("packing: false\n", ""), encoding="utf-8")
    run(project, "prepare")
    told = run(project, "explain", "train.learning_rate")
    assert "0.0002" in told or "2e-4" in told


def test_keys_of_other_tools_are_named_with_their_line(project):
    """`dataset_num_proc`, `dataset_text_field` and `completion_only_loss` must not be dropped silently."""
    (project / "tunewell.yaml").write_text(NESTED + "dataset_num_proc: 4\npacking_strategy: bfd\n", encoding="utf-8")
    assert "ignored, because they change nothing in tunewell: `dataset_num_proc`" in run(project, "prepare")
    (project / "tunewell.yaml").write_text(
        NESTED + "dataset_num_proc: 4\ncompletion_only_loss: true\n", encoding="utf-8"
    )
    told = run(project, "prepare", code=2)
    assert "`completion_only_loss`" in told and "line 16" in told


def test_another_config_file_is_not_overlooked(project):
    """The script read another file than the one that was edited."""
    (project / "tunewell.yaml").rename(project / "gemma3n.yaml")
    assert "gemma3n.yaml" in run(project, "prepare", code=2)


def test_rows_become_documents_with_one_bos_and_a_loss_on_replies_only(project):
    """The second `<bos>` was removed by hand, and rows were dropped without a count."""
    told = json.loads(run(project, "prepare", "--json", code=0))
    assert told["rows_in"] == 42 and told["dropped"] == {"empty_reply": 2}
    corpus = tunewell.open_corpus(project / "corpus")
    tokenizer = load_tokenizer(project / "gemma").backend
    for document in corpus:
        text = tokenizer.decode(document.input_ids, skip_special_tokens=False)
        assert text.count("<bos>") == 1 and text.startswith("<bos><start_of_turn>user\n")
        labels = [label for label in document.labels if label != -100]
        learned = tokenizer.decode(labels, skip_special_tokens=False)
        assert learned.startswith("It is ") and learned.endswith("<end_of_turn>")


def test_all_rows_empty_is_an_error_and_not_an_empty_data_set(project):
    """A filter in four processes left no rows, and the trainer started nevertheless."""
    write_jsonl(project / "math.jsonl", [{"question": typed("Why?"), "solution": typed("")}] * 9)
    assert "empty_reply" in run(project, "prepare", code=2)


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        (
            "ValueError: Unable to create tensor, you should probably activate truncation and/or padding with "
            "'padding=True' 'truncation=True'. Perhaps your features (`labels` in this case) have excessive nesting "
            "(inputs type `list` where type `int` is expected).",
            "collator-ragged-or-nested",
        ),
        (
            "ValueError: completion_only_loss=True conflicts with formatting_func",
            "formatting-func-conflict",
        ),
        (
            "Map (num_proc=4): 100%|#####| 7473/7473\nFilter (num_proc=4): 100%|#####| 7473/7473\n"
            "ValueError: num_samples should be a positive integer value, but got num_samples=0",
            "dataset-empty-at-trainer",
        ),
    ],
)
@pytest.mark.uses("diagnose")
def test_diagnose_names_the_failures(line, failure):
    assert findings(line)[0] == failure


@pytest.mark.slow
def test_the_run_ends_with_a_verdict_an_adapter_and_merged_weights(project):
    """The original run ended with a loss of 1.3 (from 6.0) and saved weights. Nobody tested the model."""
    run(project, "train", code={0, 3, 4})
    ended = outcome(project / "run")
    assert ended["status"] == "finished" and ended["last_loss"] < ended["first_loss"] / 4
    told = run(project, "export", "run", "--to", "adapter,merged")
    assert "PROVEN" in told
