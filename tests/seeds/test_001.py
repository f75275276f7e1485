"""Seed 001: QLoRA and GaLore scripts for gemma-3-1b, written on a Mac, run on a T4 with pinned old packages."""

import json
from pathlib import Path

import pytest
from authors import findings, outcome, questions, run, write_gemma, write_jsonl

REQUIREMENTS = "torch\ntransformers>=5.0\ntrl==0.8.6\npeft\nbitsandbytes\ngalore-torch\n"
# The arguments of the author's script for GaLore, with the names before each rename.
GALORE = """\
model: gemma-3-1b
data: rows.jsonl
max_seq_length: 512
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 2e-2
num_train_epochs: 20
bf16: false
method: {kind: full}
optim: galore_adamw_8bit
"""
FORMATTING = """\
def one(instruction, output):
    return {"prompt": instruction, "completion": output}


def format_instruction(sample):
    if isinstance(sample["instruction"], list):
        return [one(*pair) for pair in zip(sample["instruction"], sample["output"])]
    return one(sample["instruction"], sample["output"])
"""
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The author's rows and config, and the sizes of gemma-3-1b without its weights."""
    write_gemma(tmp_path / "gemma-3-1b")
    (tmp_path / "gemma-3-1b" / "model.safetensors").unlink()
    (tmp_path / "gemma-3-1b" / "config.json").write_text(json.dumps(GEMMA_3_1B), encoding="utf-8")
    rows = [{"instruction": question, "input": "", "output": answer} for question, answer in questions()]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "tunewell.yaml").write_text(GALORE, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", ["max_length", "cutoff_len", "sequence_len"])
def test_renamed_arguments_are_understood_under_each_name(project, name):
    """`max_seq_length` was an error in one release of TRL, and worked in another."""
    run(project, "prepare")
    (project / "tunewell.yaml").write_text(GALORE.replace("max_seq_length:", name + ":"), encoding="utf-8")
    assert json.loads(run_json(project))["up_to_date"]


def test_an_argument_without_a_meaning_here_is_named_with_what_to_write(project):
    """`evaluation_strategy` became `eval_strategy` between two releases."""
    for name in ("evaluation_strategy", "eval_strategy"):
        (project / "tunewell.yaml").write_text(GALORE + name + ': "no"\n', encoding="utf-8")
        told = run(project, "prepare", code=2)
        assert "tunewell.yaml line 11" in told and "data.held_out: 0" in told


@pytest.mark.uses("diagnose", "doctor")
def test_packages_that_do_not_work_together_are_named(project):
    """trl was downgraded to 0.8.6, with a transformers that it was not written for."""
    (project / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")
    told = run(project, "diagnose", "requirements.txt", code={3, 4})
    assert "trl" in told and "0.8.6" in told and "transformers" in told
    assert "CUDA version" not in told  # nothing in the file is about that


@pytest.mark.parametrize(
    ("line", "failure"),
    [
        (
            "TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'",
            "renamed-argument",
        ),
        ("TypeError: SFTTrainer.__init__() got an unexpected keyword argument 'max_seq_length'", "renamed-argument"),
        (
            "ValueError: The formatting_func should return a list of processed strings which can lead to silent bugs.",
            "formatting-func-contract",
        ),
        (
            "NotImplementedError: The operator 'bitsandbytes::optimizer_update_8bit_blockwise' is not currently "
            "implemented for the MPS device.",
            "mps-unsupported-op",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.13 GiB. GPU 0 has a total capacity of "
            "14.74 GiB of which 512.00 MiB is free.",
            "oom-cuda",
        ),
    ],
)
@pytest.mark.uses("diagnose")
def test_diagnose_names_the_failures(line, failure):
    assert findings(line)[0] == failure


@pytest.mark.uses("diagnose")
def test_a_quantised_model_on_a_mac_is_named():
    """`device() received an invalid combination of arguments` says nothing about bitsandbytes."""
    log = (
        "loading google/gemma-3-1b-it in 4 bit with bitsandbytes\n  trainer.train()\n"
        "TypeError: device() received an invalid combination of arguments - got (NoneType), but expected one of:\n"
    )
    assert findings(log)[0] not in ("unknown", "mps-unsupported-op")


def test_the_formatting_function_works_on_a_row_and_on_a_batch(project):
    """The function worked on a row, and TRL called it with a batch."""
    (project / "rows.py").write_text(FORMATTING, encoding="utf-8")
    corpora = []
    for source in (
        "{path: rows.jsonl, map: 'rows.py:format_instruction'}",
        "{path: rows.jsonl, format: alpaca}",
    ):
        told = json.loads(run_json(project, "--set", f"data.sources=[{source}]", "--set", "data.held_out=0"))
        corpora.append((told["documents"], told["tokens"]))
    assert corpora[0] == corpora[1]


def run_json(project: Path, *arguments: str) -> str:
    from forked import run_command

    done = run_command("prepare", "--json", *arguments, cwd=project)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plan_for_a_t4_says_no_and_what_fits(project):
    """GaLore with a batch of two ran out of memory on a T4; recomputing made it fit."""
    told = run(project, "plan", "--no-measure", "--gpu", "t4", "--set", "train.batch_documents=8", code={0, 2})
    assert "t4 15.0 GiB" in told


def test_qlora_and_galore_are_understood_as_methods(project):
    """The author's scripts use these names, and neither is a `method.kind`."""
    for kind, shown in (("qlora", "nf4"), ("galore", "galore")):
        (project / "tunewell.yaml").write_text(
            f"model: gemma-3-1b\ndata: rows.jsonl\nmethod: {{kind: {kind}}}\n", encoding="utf-8"
        )
        assert shown in run(project, "plan", "--no-measure", "--gpu", "a100-80", code={0, 2})


@pytest.mark.uses("notebook")
def test_the_notebook_for_a_t4_holds_the_config(project):
    """The scripts that did not run on a Mac were moved to Colab by hand."""
    run(project, "notebook", "--package", "none", "--out", "galore.ipynb")
    notebook = json.loads((project / "galore.ipynb").read_text(encoding="utf-8"))
    assert "galore" in json.dumps(notebook["cells"])


@pytest.mark.slow
def test_galore_on_a_small_gemma_ends_with_a_verdict(project):
    write_gemma(project / "gemma-3-1b")
    run(project, "train", "--set", "train.threads=1", code={0, 3, 4})
    ended = outcome(project / "run")
    assert ended["status"] == "finished" and ended["last_loss"] < ended["first_loss"] / 2
