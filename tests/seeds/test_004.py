"""Seed 004: the author's own 23M model with a SentencePiece tokenizer, packed shards 3.0, WSL, a batch too large."""

import json
from pathlib import Path

import pytest
import sentencepiece
from authors import COLLEGES, FEES, findings, outcome, questions, run, write_jsonl

# `config/sft_training/lora_optimal_tiny_23m.json`, with the author's own names of sections and keys.
FOREIGN_CONFIG = {
    "training_params": {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "dataloader_num_workers": 0,
        "bf16": True,
        "group_by_length": True,
        "max_steps": 2000,
        "learning_rate": 8e-5,
        "warmup_ratio": 0.03,
    },
    "dataset_config": {"packing": True},
}
OURS = """\
model: preset:{preset}
tokenizer: spm.model
data: {data}
template: {{name: chatml, add_missing_tokens: true}}
train: {{precision: bf16, learning_rate: 2e-3, max_steps: {steps}, batch_documents: 8, threads: 1}}
evaluate: {{samples: 2, sample_tokens: 8}}
method: {{kind: lora, rank: 8}}
"""
LENGTH = 256


def conversation(question: str, answer: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


@pytest.fixture(scope="module")
def spm(tmp_path_factory) -> Path:
    """The author's tokenizer: SentencePiece with its default normalisation, which turns line ends into spaces."""
    folder = tmp_path_factory.mktemp("spm")
    texts = [f"{question} {answer}" for question, answer in questions()]
    texts += [f"{name} {fee} <|im_start|> user assistant <|im_end|>" for name, fee in FEES.items()]
    (folder / "corpus.txt").write_text("\n".join([*texts, *COLLEGES] * 3), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "spm"),
        vocab_size=180,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=3,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
    )
    return folder / "spm.model"


@pytest.fixture
def project(tmp_path: Path, spm: Path) -> Path:
    """The author's tokenizer, rows, and shards of these rows."""
    (tmp_path / "spm.model").write_bytes(spm.read_bytes())
    write_jsonl(tmp_path / "rows.jsonl", [{"question": question, "answer": answer} for question, answer in questions()])
    write_shards(tmp_path / "v3", spm)
    configure(tmp_path, "rows.jsonl")
    return tmp_path


def configure(project: Path, data: str, *, preset: str = "tiny-1m", steps: int = 4) -> None:
    text = OURS.format(preset=preset, data=data, steps=steps)
    (project / "tunewell.yaml").write_text(text, encoding="utf-8")


def write_shards(folder: Path, spm: Path) -> None:
    """Pack as the author's script: an end token after each conversation, everything supervised, padded with 0."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    packed: list[list[int]] = [[]]
    for pair in questions():
        ids = [*processor.encode(conversation(*pair)), processor.eos_id()]
        if len(packed[-1]) + len(ids) > LENGTH:
            packed.append([])
        packed[-1] += ids
    rows = [
        {
            "input_ids": ids + [0] * (LENGTH - len(ids)),
            "attention_mask": [1] * len(ids) + [0] * (LENGTH - len(ids)),
            "labels": ids + [-100] * (LENGTH - len(ids)),
        }
        for ids in packed
    ]
    (folder / "train").mkdir(parents=True)
    write_jsonl(folder / "train" / "shard_00000.jsonl", rows)
    manifest = {
        "format_version": "3.0",
        "packing_metadata": {"enabled": True, "packing_efficiency": 82.37, "avg_conversations_per_sequence": 4.53},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


@pytest.mark.parametrize("given", ["v3", "v3/train", "v3/train/shard_00000.jsonl"])
def test_the_packed_shards_are_read_and_what_is_assumed_is_shown(project, given):
    """Only the author's script could read the 136,951 conversations."""
    configure(project, given)
    told = run(project, "prepare")
    assert "for training" in told and "shard" in told
    assert "unknown chat template" not in told


def test_shards_without_their_manifest_are_read_or_the_manifest_is_asked_for(project):
    configure(project, "v3")
    (project / "v3" / "manifest.json").unlink()
    told = run(project, "prepare", code={0, 2})
    assert "manifest" in told and "columns" not in told


def test_a_version_that_is_not_known_is_read_as_packed_rows_and_noted(project):
    configure(project, "v3")
    manifest = project / "v3" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"3.0"', '"4.0"'), encoding="utf-8")
    told = run(project, "prepare")
    assert "shards without manifest" in told and "for training" in told


def test_the_config_is_answered_key_by_key(project):
    """`training_params` is a section of the author's script; a guess such as `train.learning_rate` would mislead."""
    (project / "foreign.json").write_text(json.dumps(FOREIGN_CONFIG, indent=2), encoding="utf-8")
    told = run(project, "prepare", "--config", "foreign.json", code=2)
    assert "training_params" in told and "dataset_config" in told
    assert "did you mean `train.learning_rate`" not in told


SLOW = """\
Loading model from checkpoints/chinchilla_23m_15k_v2/tiny/final on cpu...
Model loaded: 23,072,000 parameters on cpu
"""
CYCLES = "\n".join(
    f"{step}/2000 [{'00:10' if step % 100 < 50 else '06:40'}<?, {'30.1it/s' if step % 100 < 50 else '8.03s/it'}]"
    for step in range(0, 500, 10)
)
BATCH = """\
Issue: BATCH SIZE TOO LARGE. A batch size of 32 was causing massive computation per step, saturating the GPU.
batch_size=32: 32 sequences x 1024 tokens = 32,768 tokens per forward pass of a 23M model, 1.2 it/s on an RTX 4090
With batch 8 and gradient_accumulation_steps 2: 6.74 it/s
"""


@pytest.mark.parametrize(
    ("log", "failure"),
    [
        (SLOW, "device-cpu-placement"),
        ("`--mixed_precision` was set to a value of `'no'`\nconfig: \"bf16\": true\n", "precision-not-applied"),
        (BATCH, "batch-too-large-slow"),
    ],
)
@pytest.mark.uses("diagnose")
def test_diagnose_names_the_failures(log, failure):
    assert findings(log)[0] == failure


@pytest.mark.uses("diagnose")
def test_the_speeds_are_compared_in_rows_and_not_in_iterations():
    """1.2 it/s with 32 rows and 6.74 it/s with 8 are 38 and 54 rows a second: 1.4 times, not 5.6 times."""
    log = "per_device_train_batch_size: 32\n1.20it/s\nper_device_train_batch_size: 8\n6.74it/s\n"
    assert findings(log)[0] != "unknown"


@pytest.mark.slow
@pytest.mark.parametrize("sets", [(), ("method.modules_to_save=[embed_tokens,lm_head]",), ("train.precision=fp16",)])
def test_the_stack_trains_answers_and_chats(project, sets):
    """LoRA in 16 bits with added markers crashed at the evaluation before the first step."""
    more = [part for setting in sets for part in ("--set", setting)]
    run(project, "train", *more, code={0, 3, 4})
    assert outcome(project / "run")["status"] == "finished"
    run(project, "chat", "run", "--prompt", "What is the fee of Elm College?", "--length", "8")


@pytest.mark.slow
def test_the_model_of_23m_goes_from_shards_to_a_verdict(project):
    """The author's whole pipeline, in one command."""
    configure(project, "v3", preset="tiny-23m", steps=20)
    told = run(project, "train", code={0, 3, 4})
    ended = outcome(project / "run")
    assert ended["status"] == "finished" and ended["last_loss"] < ended["first_loss"]
    assert "checked before step 1" in told
    run(project, "export", "run", "--to", "merged")
