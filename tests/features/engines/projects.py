"""A project with a small model in a folder, and rows to train it on, for tests of engines."""

from pathlib import Path
from typing import Any

import torch
from tiny import write_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from corpora import row, write_rows

SETTINGS: dict[str, Any] = {
    "engine": "trl",
    "device": "cpu",
    "method.rank": 4,
    "train.batch_documents": 4,
    "train.learning_rate": 5e-3,
    "train.threads": 1,
    "data.held_out": 0.2,
    "data.selection": 0.2,
    "verdict.after_training": False,
}
RARE = "東京"
"""A word that only one row has; the tokenizer has ids of its own for it."""


def write_model(folder: Path) -> Path:
    """Write a Llama of 60 thousand weights, whose embedding and head are not tied, with its tokenizer."""
    write_tiny_model(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_project(folder: Path, *, num_rows: int = 60) -> Path:
    """Write a model and rows, one of which has the rare word."""
    rows = [row(number) for number in range(num_rows)]
    rows[7]["answer"] = f"{RARE} {rows[7]['answer']}"
    write_rows(folder / "rows.jsonl", rows)
    write_model(folder / "model")
    return folder


def rare_ids(model: Path) -> list[int]:
    """Return the ids of the rare word."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    common = {number for index in range(200) for number in tokenizer(str(row(index)))["input_ids"]}
    return sorted(set(tokenizer(RARE)["input_ids"]) - common)
