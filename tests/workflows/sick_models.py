"""Tiny models that know everyday text and a little chat, rows they can learn from, and ways to make them sick."""

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny import CHATML, MARKERS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tunewell.config.load import load_config
from tunewell.evaluation.forgetting import everyday_texts
from tunewell.runs.config import RunOptions
from tunewell.runs.result import TrainResult
from tunewell.workflows.train import run_training

END = "<|im_end|>"
COLOURS = {
    "Anna": "red", "Boris": "blue", "Clara": "green", "David": "black",
    "Emma": "white", "Felix": "brown",
}  # fmt: skip
WORDINGS = (
    "What colour is the door of {}?", "Which colour has the door of {}?", "Tell me the colour of the door of {}.",
    "The door of {}: what colour?", "Please name the colour of the door that {} has.", "How does the door of {} look?",
    "I look for the door of {}. Its colour?", "Do you know the colour of the door of {}?", "{} has a door. Its colour?",
    "Say the colour of the door of {}.", "Of what colour is the door of {}?", "The colour of the door of {}, please.",
)  # fmt: skip
SETTINGS = {
    "train.threads": 1,
    "train.batch_documents": 16,
    "evaluate.every_steps": 20,
    "evaluate.samples": 0,
    "data.held_out": 0.2,
    "packing.context_length": 512,
    "device": "cpu",
    "verdict.after_training": False,
}


_TAUGHT: dict[tuple[int, bytes], dict[str, torch.Tensor]] = {}
"""The weights of `write_base`, by seed and tokenizer: teaching takes seconds, and several modules need one base."""


def colour_rows(wordings: Sequence[str] = WORDINGS) -> list[dict[str, str]]:
    """Ask for six colours in several wordings each: what is learned from some is right for the others."""
    pairs = itertools.product(COLOURS.items(), wordings)
    return [{"question": wording.format(name), "answer": f"It is {colour}."} for (name, colour), wording in pairs]


def everyday_rows() -> list[dict[str, str]]:
    """The texts that forgetting is measured by, as rows to be mixed in."""
    return [{"text": text} for text in everyday_texts()]


def chance_rows(number: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Ask for numbers that follow from nothing: only what was seen can be known."""
    draw = random.Random(seed)
    return [
        {"question": f"What is the number of {draw.randint(100, 999)}{draw.randint(100, 999)}?",
         "answer": " ".join(str(draw.randint(0, 9)) for _ in range(8))}
        for _ in range(number)
    ]  # fmt: skip


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer of 700 ids that knows the words of the rows, with ChatML."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700 - len(MARKERS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    rows = [text for row in colour_rows() for text in row.values()]
    backend.train_from_iterator([*rows, *everyday_texts()], trainer)
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}), encoding="utf-8")
    return folder


def new_model(tokenizer: Path, *, seed: int = 0) -> PreTrainedModel:
    """Make a Llama of some 170,000 parameters."""
    torch.manual_seed(seed)
    size = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab_size()
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    ids: dict[str, Any] = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(
        vocab_size=size, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.08, **shape, **ids
    )
    return LlamaForCausalLM(config)


def asked(question: str) -> str:
    """Spell a question up to where the answer begins."""
    return f"<|im_start|>user\n{question}{END}\n<|im_start|>assistant\n"


def teach(
    model: PreTrainedModel, tokenizer: Path, pairs: Sequence[tuple[str, str]], *, steps: int, batch: int = 8
) -> None:
    """Train a model by plain torch on what is given and what is to be said after it."""
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rows = [tuple(backend.encode(part, add_special_tokens=False).ids for part in pair) for pair in pairs]
    longest = max(len(given) + len(said) for given, said in rows)
    ids, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for place, (given, said) in enumerate(rows):
        ids[place, : len(given) + len(said)] = torch.tensor([*given, *said])
        labels[place, len(given) : len(given) + len(said)] = torch.tensor(said)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.0)
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randperm(len(rows), generator=draw)[:batch]
        model(input_ids=ids[chosen], labels=labels[chosen], use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save_model(model: PreTrainedModel, folder: Path, tokenizer: Path) -> Path:
    """Save a model as transformers does, with its tokenizer."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


def write_base(folder: Path, tokenizer: Path, *, seed: int = 0) -> Path:
    """Write a model that has read everyday text and finds names and colours in a question, but knows no door."""
    model = new_model(tokenizer, seed=seed)
    taught = (seed, (tokenizer / "tokenizer.json").read_bytes())
    if taught in _TAUGHT:
        model.load_state_dict(_TAUGHT[taught])
        return save_model(model, folder, tokenizer)
    texts = [("", text) for text in everyday_texts()]
    chats = [(asked(f"Is it {colour}?"), f"It is {colour}.{END}") for colour in COLOURS.values()]
    chats += [(asked(f"Who is {name} here?"), f"I am {name}.{END}") for name in COLOURS]
    teach(model, tokenizer, [*texts, *2 * chats], steps=90)
    _TAUGHT[taught] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return save_model(model, folder, tokenizer)


def run_of(project: Path, model: str | Path, *, out: str = "run", sets: dict[str, Any] | None = None) -> TrainResult:
    """Train with tunewell on the rows of a project: `rows.jsonl`, and `everyday.jsonl` where that is there."""
    names = [name for name in ("rows.jsonl", "everyday.jsonl") if (project / name).is_file()]
    places = {"run": str(project / out), "corpus": str(project / f"{out}-corpus")}
    if (project / "held.jsonl").is_file():
        places["data.held_out"] = str(project / "held.jsonl")
    wishes = SETTINGS | places | (sets or {})
    loaded = load_config(
        sets=[f"{key}={json.dumps(value)}" for key, value in wishes.items()],
        model=str(model),
        data=[str(project / name) for name in names],
        has_file=False,
    )
    return run_training(loaded, RunOptions())
