"""`tunewell migrate` reads configs, scripts and jobs of other tools, and accounts for every key."""

import ast
import json
import re
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


COMMAND = """\
# a run
accelerate launch --num_processes 2 sft.py --model_name_or_path acme/a --dataset_name acme/talks \\
    --learning_rate=1e-4 --use_peft > log.txt 2>&1 &
"""
SECTIONS = {"training": {"learning_rate": 1e-4, "odd": {"depth": 1, "seed": 3}}, "data": {"dataset_name": "acme/talks"}}
NOTEBOOK = {"cells": [{"cell_type": "code", "source": ["!pip install trl\n", "%cd x\n", *SCRIPT.splitlines(True)]}]}


def keys_of_tree(tree: Any) -> list[str]:
    """Return the last part of every key that has a value of its own."""
    if isinstance(tree, list):
        return [key for one in tree for key in keys_of_tree(one)]
    inner = {key: keys_of_tree(value) for key, value in tree.items() if isinstance(value, dict | list) and value}
    return [name for key in tree for name in (inner[key] if inner.get(key) else [key])]


def keys_of_code(code: str) -> list[str]:
    """Return the arguments of the calls that set something, and the methods of the rows."""
    known = {"LoraConfig", "SFTConfig", "SFTTrainer"}
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    words = [
        word for call in calls if isinstance(call.func, ast.Name) and call.func.id in known for word in call.keywords
    ]
    return [word.arg for word in words if word.arg] + [
        "weight_decay",
        "lr_scheduler_type",
        "path",
        "name",
        "split",
        "map",
    ]


KINDS = {
    "an Axolotl YAML": ("a.yaml", AXOLOTL, keys_of_tree(yaml.safe_load(AXOLOTL))),
    "a LLaMA-Factory YAML": ("a.yaml", FACTORY, [*keys_of_tree(yaml.safe_load(FACTORY)), "dataset"]),
    "a script": ("a.py", SCRIPT, keys_of_code(SCRIPT)),
    "a notebook": ("a.ipynb", json.dumps(NOTEBOOK), keys_of_code(SCRIPT)),
    "a command": ("a.sh", COMMAND, re.findall(r"--(\w+)", COMMAND)),
    "a job": ("a.json", json.dumps(JOB, indent=1), keys_of_tree(JOB)),
    "a JSON with sections": ("a.json", json.dumps(SECTIONS, indent=1), keys_of_tree(SECTIONS)),
    "a TRL YAML": (
        "a.yaml",
        "model_name_or_path: acme/a\ndatasets:\n- path: b/c\n  odd: 1\n",
        ["model_name_or_path", "path", "odd"],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_ledger_closes(kind: str) -> None:
    """Each key has an entry with its line, and no entry is without a reason. A missing key is a silent loss."""
    name, text, keys = KINDS[kind]
    found = run(text, name)
    assert sorted(one.key.rpartition(".")[2] for one in found.entries) == sorted(keys)
    lines = text.splitlines() if kind != "a notebook" else ["", "", *SCRIPT.splitlines()]
    for one in found.entries:
        assert one.ours or one.why
        last = one.key.rpartition(".")[2]
        is_implied = last in ("weight_decay", "lr_scheduler_type", "path", "name", "model") or not one.line
        assert is_implied or last in "\n".join(lines[one.line - 1 : one.line + 1]) or one.value in lines[one.line - 1]


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
    steps = run(SCRIPT.replace("packing=True, ", "max_steps=9, "), "b.py")
    assert "9 updates there, 9 here" in steps.batch


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


def test_what_a_script_changes_after_a_call_counts() -> None:
    """`args.x = 1`, `d["x"] = 1`, `{**d}`, `d.update(x=1)`, imports with another name, arguments without a name."""
    text = """
from transformers import TrainingArguments as TA
base = dict(weight_decay=0.1)
more = {**base, "num_train_epochs": 2}
more["per_device_train_batch_size"] = 3
more.update(max_grad_norm=0.5)
args = TA("out", learning_rate=1e-4, **more)
args.seed = 9
trainer = SFTTrainer("acme/a", args, None, load_dataset("acme/talks", split="train"))
"""
    config = load_config(run(text, "a.py").path).config
    assert (config.run, config.model, config.seed) == ("out", "acme/a", 9)
    assert (config.train.weight_decay, config.train.epochs, config.train.max_grad_norm) == (0.1, 2, 0.5)
    assert config.train.batch_documents == 3 and config.data.sources[0].path == "hf://datasets/acme/talks"


def test_a_value_that_depends_on_a_branch_is_lost_and_not_guessed() -> None:
    """The last branch won without a word. Of two trainings in one script, the settings were mixed."""
    branch = "if x():\n    rate = 1e-4\nelse:\n    rate = 2e-4\nargs = SFTConfig(learning_rate=rate, seed=1)\n"
    assert fate(run(branch, "a.py"), "SFTConfig.learning_rate")[0] == "lost"
    two = run("a = SFTConfig(max_steps=10)\nb = SFTConfig(num_train_epochs=2)\n", "b.py")
    assert fate(two, "SFTConfig.max_steps")[0] == "lost" and load_config(two.path).config.train.max_steps is None


@pytest.mark.parametrize("line", ['x = {"a": x, "b": x}', "x = [x, x, x]", 'x = f"{x}{x}{x}"', "x = x + x"])
def test_a_value_that_doubles_in_each_line_is_not_followed(line: str) -> None:
    """Sixty lines made a value of 2**60 parts, whose text never ended."""
    found = run(f'x = ["a"]\n{(line + chr(10)) * 60}args = SFTConfig(learning_rate=x, seed=1)\n', "a.py")
    assert fate(found, "SFTConfig.learning_rate")[0] == "lost"


def test_yaml_of_version_1_is_read_as_its_tools_do() -> None:
    """Merge keys, `yes`, `1_000` and a quoted number were lost; their tools use a reader of YAML 1.1."""
    text = (
        "base_model: acme/a\nx: &own {path: rows.jsonl, type: alpaca}\ndatasets: [{<<: *own, split: train}]\n"
        "adapter: lora\nload_in_4bit: yes\nwarmup_steps: 1_000\nmicro_batch_size: '2'\ngroup_by_length: no\n"
    )
    config = load_config(run(text).path).config
    assert (config.method.quantize, config.train.warmup, config.train.batch_documents) == ("nf4", 1000, 2)
    assert (config.data.sources[0].path, config.data.sources[0].format) == ("rows.jsonl", "alpaca")


def test_a_command_is_read_up_to_its_redirection() -> None:
    """`> log 2>&1 &` became five data sets, and a line end of Windows the second model."""
    found = run(COMMAND.replace("\n", "\r\n"), "a.sh")
    config = load_config(found.path).config
    assert config.model == "acme/a" and [one.path for one in config.data.sources] == ["hf://datasets/acme/talks"]
    variable = run("python sft.py --model_name_or_path $1 --learning_rate 1e-4\n", "b.sh")
    assert fate(variable, "model_name_or_path")[0] == "lost"
    with pytest.raises(UserError, match="trl dpo"):
        run("trl dpo --model_name_or_path acme/a\n", "c.sh")


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "-rf", "a b\n- path: /etc/passwd", "\x1b[31m"])
def test_a_hostile_path_is_a_text_like_any_other(path: str) -> None:
    """A path of 5,000 characters was a crash."""
    tree = {"base_model": path, "datasets": [{"path": path}], "test_datasets": [{"path": path}], "learning_rate": 1e-4}
    try:
        found = run(json.dumps(tree), "a.json")
    except UserError:
        return
    assert len(load_config(found.path).config.data.sources) == 1
