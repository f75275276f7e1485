"""`tunewell migrate` reads configs, scripts and jobs of other tools, and accounts for every key."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from examples_limit import examples
from tunewell.cli.main import main
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.features.migrate.ledger import Migration
from tunewell.features.migrate.workflow import migrate

AXOLOTL = """\
base_model: acme/small-1b
load_in_4bit: true
datasets:
  - path: rows.jsonl
    type: chat_template
    field_messages: turns
    split: train
  - path: acme/talks
    type: alpaca
    revision: v2
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_target_modules: 'model.layers.[\\d]+.(mlp|self_attn).(up|down|q)_proj'
sequence_len: 512
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 2e-4
optimizer: paged_adamw_8bit
warmup_steps:
val_set_size: 0.1
logging_steps: 1
fsdp:
neftune_noise_alpha: 5
frobnicate: 3
"""
FACTORY = """\
model_name_or_path: acme/small-1b-instruct
stage: sft
finetuning_type: lora
lora_rank: 4
dataset: own,talks
dataset_dir: data
template: qwen3
cutoff_len: 1024
max_samples: 50
per_device_train_batch_size: 2
gradient_accumulation_steps: 3
lr_scheduler_type: cosine
bf16: true
plot_loss: true
"""
INFO = {
    "own": {"file_name": "own.json", "columns": {"prompt": "ask", "response": "tell"}},
    "talks": {"hf_hub_url": "acme/talks", "formatting": "sharegpt", "split": "train", "num_samples": 20},
}
SCRIPT = """\
import os
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer
open("executed.txt", "w").write("a script was run")
SCALE = 2
NAME = "acme/small-1b"
common = dict(weight_decay=0.1, lr_scheduler_type="cosine")
def words(row): return {"text": row["a"]}
data = load_dataset("acme/talks", "en", split="train[:200]").map(words)
lora = LoraConfig(r=8 * SCALE, lora_alpha=32, target_modules=["q_proj"], init_lora_weights="pissa")
args = SFTConfig(output_dir=f"out-{SCALE}", learning_rate=1e-4 / SCALE, per_device_train_batch_size=4,
                 gradient_accumulation_steps=2, num_train_epochs=SCALE + 1, report_to="none",
                 seed=int(os.environ.get("SEED", "3")), max_length=unknown(3), packing=True, **common)
trainer = SFTTrainer(model=NAME, args=args, train_dataset=data, peft_config=lora)
"""
JOB = {
    "object": "fine_tuning.job",
    "id": "ftjob-1",
    "model": "gpt-4o-mini",
    "training_file": "file-1",
    "validation_file": "file-2",
    "seed": 7,
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": "auto"}}},
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(text: str, name: str = "source.yaml", *others: str, **options: Any) -> Migration:
    Path(name).write_text(text, encoding="utf-8")
    return migrate([Path(name), *map(Path, others)], is_overwriting=True, **options)


def fate(found: Migration, key: str) -> tuple[str, str]:
    [one] = [one for one in found.entries if one.key == key]
    return one.status, one.ours or one.why


def test_the_ledger_of_a_yaml_closes() -> None:
    """Each key at the top, and each key of each data set, has one entry with its line."""
    found = run(AXOLOTL)
    tree = yaml.safe_load(AXOLOTL)
    keys = [key for key in tree if key != "datasets"]
    keys += [f"datasets[{number}].{key}" for number, one in enumerate(tree["datasets"]) for key in one]
    assert sorted(one.key for one in found.entries) == sorted(keys)
    lines = AXOLOTL.splitlines()
    for one in found.entries:
        assert one.key.rpartition(".")[2] in lines[one.line - 1]
        assert one.ours or one.why


def test_a_batch_of_packed_sequences_is_counted_in_tokens_times_the_processes() -> None:
    """2 x 4 with `sample_packing` are 8 packed sequences. It became 8 documents: 17 times as many updates."""
    assert load_config(run(AXOLOTL).path).config.train.batch_tokens == 8 * 512
    found = run(AXOLOTL, processes=4)
    assert load_config(found.path).config.train.batch_tokens == 32 * 512
    assert "32 packed sequences of 512 tokens" in found.batch
    plain = run(AXOLOTL.replace("sample_packing: true", "sample_packing: false"))
    assert load_config(plain.path).config.train.batch_documents == 8


def test_all_data_sets_are_read_with_splits_and_columns() -> None:
    """Other tools' importers took the first data set, and dropped the rest without a word."""
    first, second = load_config(run(AXOLOTL).path).config.data.sources
    assert (first.path, first.columns) == ("rows.jsonl", {"messages": "turns"})
    assert (second.path, second.format, second.template) == ("hf://datasets/acme/talks@v2", "alpaca", "alpaca")


def test_values_and_defaults_of_the_source_are_in_the_config() -> None:
    """A key that the source leaves out has the source's default, not ours."""
    config = load_config(run(AXOLOTL).path).config
    assert (config.method.kind, config.method.quantize, config.method.rank) == ("lora", "nf4", 8)
    assert config.method.targets == ("up_proj", "down_proj", "q_proj")
    assert (config.train.epochs, config.train.schedule, config.seed) == (1, "cosine", 42)
    assert (config.packing.long_documents, config.data.held_out, config.data.selection) == ("drop", 0.1, 0)


def test_what_is_lost_is_said_with_what_it_means() -> None:
    found = run(AXOLOTL)
    assert {one.key for one in found.of("lost")} == {"neftune_noise_alpha", "frobnicate"}
    assert "no noise" in fate(found, "neftune_noise_alpha")[1]
    assert fate(found, "logging_steps")[0] == "not needed" and fate(found, "fsdp") == ("not needed", "not set")
    assert fate(found, "learning_rate") == ("kept", "train.learning_rate: 0.0002")


def test_llama_factory_is_read_with_its_data_sets() -> None:
    Path("dataset_info.json").write_text(json.dumps(INFO))
    found = run(FACTORY, "sft.yaml", "dataset_info.json")
    config = load_config(found.path).config
    own, talks = config.data.sources
    assert (own.path, own.columns, own.limit) == ("data/own.json", {"instruction": "ask", "output": "tell"}, 50)
    assert (talks.path, talks.limit) == ("hf://datasets/acme/talks", 20)
    assert (config.method.rank, config.method.alpha, config.train.recompute) == (4, 8, "on")
    assert (config.train.batch_documents, config.train.epochs, config.template.learn_from) == (6, 3, "responses")
    assert not found.of("lost")


def test_a_script_is_followed_and_not_run() -> None:
    """Constants, arithmetic, f-strings, `dict(...)` and `**` are followed; a call stays unknown, and is lost."""
    found = run(SCRIPT, "train.py")
    assert not Path("executed.txt").exists()
    config = load_config(found.path).config
    assert (config.model, config.run, config.seed) == ("acme/small-1b", "out-2", 3)
    assert (config.method.rank, config.train.learning_rate, config.train.epochs) == (16, 5e-5, 3)
    assert (config.train.weight_decay, config.train.schedule) == (0.1, "cosine")
    [source] = config.data.sources
    assert (source.path, source.config, source.split, source.limit) == ("hf://datasets/acme/talks", "en", "train", 200)
    assert {one.key for one in found.of("lost")} == {"map", "LoraConfig.init_lora_weights", "SFTConfig.max_length"}


def test_defaults_follow_the_release_that_a_script_states() -> None:
    """TRL's rate was 5e-5 before 0.12, and recomputation is its default since 0.22."""
    text = SCRIPT.replace("learning_rate=1e-4 / SCALE,", "").replace("max_length=unknown(3), packing=True, ", "")
    old = load_config(run(f"# trl==0.11.0\n{text}", "train.py").path).config.train
    new = load_config(run(f"# trl==0.24.0\n{text}", "train.py").path).config.train
    assert (old.learning_rate, old.recompute) == (5e-5, "off")
    assert (new.learning_rate, new.recompute) == (2e-5, "on")


def test_texts_with_labels_stay_texts_and_updates_are_counted() -> None:
    """TRL trains on the column `text`. Here, a text with a label is a classification unless the format is set."""
    Path("rows.jsonl").write_text('{"text": "a", "label": 1}\n' * 21)
    found = run(
        SCRIPT.replace('"acme/talks", "en", split="train[:200]"', '"json", data_files="rows.jsonl"'), "train.py"
    )
    assert load_config(found.path).config.data.sources[0].format == "text"
    plain = run(
        SCRIPT.replace('"acme/talks", "en"', '"json", data_files="rows.jsonl"').replace("packing=True, ", ""), "b.py"
    )
    assert "9 updates there, 9 here" in plain.batch


def test_a_notebook_is_read_without_its_commands() -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# SFTConfig(learning_rate=9)"]},
        {"cell_type": "code", "source": ["%%bash\n", "rm -rf everything $(x"]},
        {
            "cell_type": "code",
            "source": ["!pip install unsloth\n", "from unsloth import FastLanguageModel\n", "L = 256"],
        },
        {
            "cell_type": "code",
            "source": "model, tok = FastLanguageModel.from_pretrained('acme/a', max_seq_length=L)\n"
            "model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing='unsloth')\n"
            "if False:\n    model, tok = FastLanguageModel.from_pretrained('acme/other', max_seq_length=1)\n",
        },
        {"cell_type": "code", "source": "t = SFTTrainer(model=model, args=SFTConfig(fp16=not is_bf16_supported()))"},
        {"cell_type": "code", "source": "t = train_on_responses_only(t)"},
    ]
    found = run(json.dumps({"cells": cells}), "unsloth.ipynb")
    config = load_config(found.path).config
    assert (config.model, config.packing.context_length, config.method.rank) == ("acme/a", 256, 8)
    assert (config.method.quantize, config.method.alpha, config.train.recompute) == ("nf4", 16, "offload")
    assert (config.template.learn_from, config.train.precision) == ("responses", "auto")
    assert found.tool == "Unsloth"


def test_a_job_takes_its_rows_from_files_and_its_model_from_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("rows.jsonl", "held-out.jsonl"):
        Path(name).write_text('{"messages": []}\n')
    Path("job.json").write_text(json.dumps(JOB))
    code = main(["migrate", "job.json", "rows.jsonl", "held-out.jsonl", "--model", "acme/open", "--json"])
    told = json.loads(capsys.readouterr().out)
    config = load_config(Path("tunewell.yaml")).config
    assert (config.model, config.train.epochs, config.seed) == ("acme/open", 3, 7)
    assert (config.data.sources[0].path, config.data.held_out) == ("rows.jsonl", "held-out.jsonl")
    assert code == 3 and [one["key"] for one in told["entries"] if one["status"] == "lost"] == ["model"]


def test_a_command_line_is_read_with_its_launcher_and_its_config() -> None:
    text = """\
OUT=runs/a
torchrun --nproc_per_node 4 sft.py --model_name_or_path acme/a --dataset_name acme/talks \\
    --learning_rate 1e-4 --per_device_train_batch_size 2 --use_peft --lora_r 4 --output_dir $OUT
"""
    found = run(text, "run.sh")
    config = load_config(found.path).config
    assert (config.model, config.run, config.method.rank) == ("acme/a", "runs/a", 4)
    assert config.train.batch_documents == 8 and "4" in found.batch
    assert config.data.sources[0].path == "hf://datasets/acme/talks"


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("a.yaml", AXOLOTL + "rl: dpo\n", "`rl: dpo`"),
        ("a.yaml", AXOLOTL + "reward_model: true\n", "reward model"),
        ("a.yaml", AXOLOTL + "processor_type: P\nskip_prepare_dataset: true\n", "images"),
        ("a.yaml", FACTORY.replace("stage: sft", "stage: kto"), "`stage: kto`"),
        ("a.yaml", FACTORY + "image_max_pixels: 9\n", "images"),
        ("a.py", "from trl import *\nt = GRPOTrainer(model='m', reward_funcs=f)\n", "`GRPOTrainer`"),
        ("a.py", "m = FastVisionModel.from_pretrained('m')\nx = {'images': 1}\n", "images"),
        ("a.json", json.dumps({**JOB, "method": {"type": "dpo"}}), "`method.type: dpo`"),
    ],
)
def test_preference_and_vision_training_is_refused_by_name(name: str, text: str, named: str) -> None:
    """A config that trains something else would be worse than none."""
    with pytest.raises(UserError) as caught:
        run(text, name)
    assert named in str(caught.value) and not Path("tunewell.yaml").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "def ("),
        ("a.yaml", "a: [1"),
        ("a.json", "{"),
        ("a.sh", "ls\n"),
        ("a.ipynb", "{}"),
        ("a.yaml", "x: 1\n"),
    ],
)
def test_a_file_that_is_no_training_is_a_user_error(name: str, text: str) -> None:
    with pytest.raises(UserError):
        run(text, name)


def test_an_existing_config_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("tunewell.yaml").write_text("seed: 1\n")
    Path("source.yaml").write_text(AXOLOTL)
    assert main(["migrate", "source.yaml"]) == 2 and Path("tunewell.yaml").read_text() == "seed: 1\n"
    assert main(["migrate", "tunewell.yaml", "--force"]) == 2
    assert main(["migrate", "source.yaml", "--out", "sub/own.yaml"]) == 3
    assert load_config(Path("sub/own.yaml")).config.data.sources[0].path == "../rows.jsonl"
    assert "next: " in capsys.readouterr().out


TEXTS = [("a.yaml", AXOLOTL), ("a.yaml", FACTORY), ("a.py", SCRIPT), ("a.json", json.dumps(JOB, indent=1))]


@given(st.sampled_from(TEXTS), st.integers(0, 3000), st.integers(0, 40), st.text(max_size=12))
@hypothesis_settings(max_examples=examples(60))
def test_damaged_sources_give_a_config_or_a_user_error(source: tuple[str, str], at: int, cut: int, put: str) -> None:
    """Pasted and half-edited files are common. Nothing else may leave the reader, and nothing may be run."""
    name, text = source
    damaged = text[: at % len(text)] + put + text[at % len(text) + cut :]
    try:
        found = run(damaged.encode("utf-8", "replace").decode(), name)
    except UserError:
        return
    assert load_config(found.path).config
    assert not Path("executed.txt").exists()
