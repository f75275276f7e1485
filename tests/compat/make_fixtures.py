"""Write the fixtures of `written_by_0_1_0` and their golden files.

This was run once with commit 30baead, the last of 0.1.0, and is kept for the record. It is not to be run again with a
later version: what matters about the files is that 30baead wrote them. From its checkout, with the test folders:

    PYTHONPATH=src:tests:... python tests/compat/make_fixtures.py

Everything is made below `/tmp/written_by_0_1_0`, with relative paths, and moved beside this script at the end. That one
absolute path stays in the export: 0.1.0 writes the place of the base model into `adapter_config.json`, and the hash of
that file into `proof.json`. The tests name the base with `--base` instead.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import test_written_by_0_1_0 as tests
import torch
import typer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

import tunewell
from tunewell.cli.main import COMMANDS, _function

WORK = Path("/tmp/written_by_0_1_0")
HERE = Path(__file__).resolve().parent / WORK.name
MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
COLOURS = ("red", "blue", "green", "black")
THINGS = ("door", "gate", "roof", "wall", "lamp", "boat", "coat", "kite", "bell", "cart")
SETTINGS = """\
device: cpu
seed: 3
train:
  max_steps: {steps}
  batch_documents: 4
  learning_rate: {rate}
  threads: 1
  precision: fp32
  compile: "off"
evaluate:
  every_steps: {every}
  samples: 2
  sample_tokens: 8
checkpoints:
  every_steps: {every}
verdict:
  questions: 6
  answer_tokens: 12
  after_training: {judged}
"""
ROWS = "data:\n  sources: rows.jsonl\n  held_out: 0.2\n"
METHODS = {
    "lora": "method:\n  rank: 2\n  alpha: 4\n  targets: [q_proj, v_proj, down_proj]\n",
    "full": "method:\n  kind: full\n",
}
EVERY_KEY = """\
model: base
tokenizer: base
corpus: other-corpus
run: other-run
device: cpu
seed: 7
data:
  sources:
    - path: rows.jsonl
      format: question_answer
      columns: {question: q, answer: a}
      map: rows.py:convert
      map_batch: 8
      limit: 20
      share: 0.75
      template: chatml
      learn_from: last_response
      learn_roles: [assistant, tool]
      system: Be brief.
      text_rows: paragraph
      encoding: utf-8
    - more.jsonl#500
  held_out: 0.25
  max_repeats: 3
  clean:
    exact_duplicate: keep
    answer_in_held_out: keep
    bad_rows: error
    bad_text: replace
    max_row_bytes: 1000
    max_nesting: 8
    min_reply_chars: 2
    drop_urls: true
template:
  name: chatml
  learn_from: everything
  learn_roles: [user, assistant]
  add_missing_tokens: true
  date: "2026-02-03"
  arguments: {enable_thinking: false}
packing:
  context_length: 512
  long_documents: split
method:
  kind: full
  rank: 4
  alpha: 8
  dropout: 0.1
  rslora: true
  targets: [q_proj, v_proj]
  layers: [0, 1]
  modules_to_save: [lm_head]
train:
  epochs: 1.5
  max_steps: 11
  learning_rate: 0.001
  schedule: linear
  min_rate_share: 0.1
  warmup: 2
  weight_decay: 0.01
  adam_beta1: 0.8
  adam_beta2: 0.95
  adam_epsilon: 1.0e-6
  max_grad_norm: 0.5
  batch_tokens: 400
  batch_documents: 5
  micro_batch_tokens: 300
  precision: bf16
  attention: sdpa
  compile: "off"
  recompute: true
  threads: 2
evaluate:
  every_steps: 6
  max_documents: 9
  patience: 3
  samples: 1
  sample_tokens: 16
checkpoints:
  every_steps: 7
  keep: 3
healing:
  "on": false
  quiet_steps: 8
  max_rewinds: 2
  max_left_out: 0.1
  spike_factor: 12.0
  change_precision: false
  restarts: 1
  hang_seconds: 30.0
verdict:
  after_training: false
  questions: 12
  answer_tokens: 24
  max_documents: 30
  batch_size: 2
  min_gain: 0.1
  min_right: 0.25
  max_faults: 0.2
  max_rise: 0.3
  max_forgetting: 0.75
export:
  to: [adapter, gguf]
  precision: fp16
  gguf: [f16, q4_k_m]
"""


def main() -> None:
    """Make everything from nothing."""
    if not tunewell.__version__.startswith("0.1.0"):
        raise SystemExit(f"this is {tunewell.__version__}, not 0.1.0")
    for folder in (WORK, HERE):
        shutil.rmtree(folder, ignore_errors=True)
    WORK.mkdir()
    os.chdir(WORK)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    write_base(Path("base"))
    write_inputs()
    command("prepare")
    command("train", "--no-supervisor", "--config", "finished.yaml", "--out", "run_finished", codes=(0, 3, 4))
    kinds = ["--to", "adapter,merged,gguf,ollama", "--gguf", "f16", "--no-create"]
    command("export", "run_finished", "--out", "export", *kinds)
    kill_before_step(7, "train", "--out", "run_lora")
    stop_after_step(4, "run_full", "train", "--config", "full.yaml", "--out", "run_full")
    # Caches, and in the lock of the killed run who held it: of no use to anyone elsewhere.
    shutil.rmtree(".tunewell", ignore_errors=True)
    Path("run_lora/.lock").write_text("", encoding="utf-8")
    shutil.copytree(WORK, HERE)
    os.chdir(HERE)
    shutil.rmtree(WORK)
    golden = dict(record())
    (HERE / "golden").mkdir()
    for name, told in golden.items():
        text = json.dumps(told, indent=1, ensure_ascii=False) + "\n"
        (HERE / "golden" / f"{name}.json").write_text(text, encoding="utf-8")


def write_base(folder: Path) -> None:
    """Write a llama of a few thousand parameters with a byte-level tokenizer of 260 ids."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=260 - len(MARKERS), initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text for row in rows() for text in row.values()], trainer)
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    config = LlamaConfig(
        vocab_size=backend.get_vocab_size(),
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=backend.token_to_id("<|im_end|>"),
        pad_token_id=backend.token_to_id("<|endoftext|>"),
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.3 if parameter.dim() > 1 else parameter + drawn * 0.1)
    model.tie_weights()
    model.save_pretrained(folder)


def rows() -> list[dict[str, str]]:
    """Give forty questions, and one that comes twice."""
    pairs = [(colour, thing) for thing in THINGS for colour in COLOURS]
    made = [{"question": f"Is the {thing} {colour}?", "answer": f"Yes, {colour}."} for colour, thing in pairs]
    return [*made, made[0]]


def write_inputs() -> None:
    """Write the rows and the configs."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
    Path("every_key.yaml").write_text(EVERY_KEY, encoding="utf-8")
    lora = SETTINGS.format(steps=10, rate="2.0e-2", every=4, judged="false") + METHODS["lora"]
    full = SETTINGS.format(steps=40, rate="3.0e-3", every=20, judged="false") + METHODS["full"]
    finished = SETTINGS.format(steps=60, rate="3.0e-2", every=30, judged="true") + METHODS["lora"]
    Path("tunewell.yaml").write_text("model: base\n" + ROWS + lora, encoding="utf-8")
    Path("finished.yaml").write_text("model: base\n" + ROWS + finished, encoding="utf-8")
    Path("full.yaml").write_text("model: base\n" + full, encoding="utf-8")


def command(*arguments: str, codes: Sequence[int] = (0,)) -> None:
    """Run a command in a process of its own; stop where it fails."""
    done = subprocess.run(line(arguments), check=False, env=os.environ | {"CI": "1"})
    if done.returncode not in codes:
        raise SystemExit(f"{arguments} ended with {done.returncode}")


def line(arguments: Sequence[str]) -> list[str]:
    """Spell a command."""
    return [sys.executable, "-m", "tunewell", *arguments]


def kill_before_step(step: int, *arguments: str) -> None:
    """Train until a step, then end the process as a power cut would."""
    extra = ["--no-supervisor", "--enable-fault-injection"]
    env = os.environ | {"CI": "1", "TUNEWELL_FAULTS": f"kill@step:step={step}"}
    done = subprocess.run(line([*arguments, *extra]), check=False, env=env)
    if done.returncode != -signal.SIGKILL:
        raise SystemExit(f"{arguments} ended with {done.returncode}")


def stop_after_step(step: int, folder: str, *arguments: str) -> None:
    """Train until some step after this one, then ask the process to stop, as a scheduler would."""
    process = subprocess.Popen(line([*arguments, "--no-supervisor"]), env=os.environ | {"CI": "1"})
    log = Path(folder) / "events.jsonl"
    while process.poll() is None and not (log.is_file() and f'"step": {step},' in log.read_text(encoding="utf-8")):
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    if process.wait() != 143:
        raise SystemExit(f"{arguments} ended with {process.returncode}")


def record() -> Iterator[tuple[str, Any]]:
    """Give the golden files: what 0.1.0 itself makes of these files, each command in a copy of its own."""
    corpus = tunewell.open_corpus("corpus")
    splits = {"train": corpus, "held_out": corpus.held_out}
    first = {name: {key: split[0][key] for key in split[0].keys()} for name, split in splits.items()}  # noqa: SIM118
    yield "corpus", {name: {"documents": len(split), "first": first[name]} for name, split in splits.items()}
    with tempfile.TemporaryDirectory() as work, tests.one_core():
        ran = {name: tests.run_json_command(name, Path(work) / name.replace(" ", "-")) for name in tests.JSON_COMMANDS}
        for name, one in ran.items():
            if one.code not in (0, 3, 4):
                raise SystemExit(f"{name} ended with {one.code}\n{one.err}")
        yield (
            "json",
            {name: {"code": one.code, "keys": sorted(tests.key_paths(one.told()))} for name, one in ran.items()},
        )
        losses = {}
        for name, run in (("train", "run_lora"), ("train by its own settings", "run_full")):
            steps, saved = tests.steps_of(ran[name].folder / run), tests.newest_checkpoint(Path(run))
            losses[run] = [[step["step"], step["loss"]] for step in steps if step["step"] > saved]
        yield "losses", losses
        links = ran["verify"].told()["links"]
        yield "checks", {link["artefact"]: sorted(check["name"] for check in link["checks"]) for link in links}
    yield "flags", {name: flags_of(name) for name, _ in COMMANDS}
    schema = tests.run_in(Path(), ["schema"]).told()
    yield "config", config_of(schema)


def flags_of(name: str) -> dict[str, bool]:
    """List the options of a command, hidden ones too, and whether each takes a value."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name)(_function(name))
    options = [one for one in typer.main.get_command(app).params if one.param_type_name == "option"]
    return {flag: not one.is_flag for one in options for flag in (*one.opts, *one.secondary_opts)}


def config_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Record every key with its value in `every_key.yaml`, its default and its choices; and every alias."""
    found, aliases = {}, {}
    for name, described in tests.schema_keys(schema):
        if not described.get("deprecated"):
            told = tests.run_in(Path(), ["explain", name, "--config", "every_key.yaml", "--json"]).told()
            if told["origin"] == "default":
                continue
            found[name] = {part: told[part] for part in ("value", "default", "allowed")}
    for name, described in tests.schema_keys(schema):
        if described.get("deprecated"):
            key = described["description"].split("`")[1]
            if key not in found:
                continue
            aliases[name] = {"key": key, "value": found[key]["value"]}
    return {"keys": found, "aliases": aliases}


if __name__ == "__main__":
    main()
