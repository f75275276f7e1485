"""TRL trains on a corpus as it is, and its loss is the one that our own fields give."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from trl import SFTConfig, SFTTrainer

import tunewell
from corpora import prepare_in, row, rows_file, write_rows
from tunewell import open_corpus
from tunewell.data.corpus.reader import Corpus

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning")

NAMED_IN_THE_CARD = {
    "padding_free": True,
    "max_length": None,
    "packing": False,
    "dataset_kwargs": {"skip_prepare_dataset": True},
}


@pytest.fixture(scope="module")
def corpus(tiny_model, tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("trl")
    rows = rows_file(folder / "rows.jsonl", 40)
    return open_corpus(prepare_in(folder, tiny_model, rows, "packing.context_length=256").corpus)


@pytest.fixture
def model(corpus) -> LlamaForCausalLM:
    """51 thousand random weights, large enough that what a token sees changes what it predicts."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=corpus.manifest.tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    assert sum(weights.numel() for weights in model.parameters()) < 200_000
    return model


def loss_from_our_fields(model: LlamaForCausalLM, corpus: Corpus) -> float:
    """Run documents one by one: the negative log likelihood of the supervised tokens over their number."""
    total, num_learned = 0.0, 0
    with torch.no_grad():
        for document in corpus:
            logits_TV = model(torch.tensor([document.input_ids])).logits[0, :-1].double()
            labels_T = torch.tensor(document.labels[1:])
            total += torch.nn.functional.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=-100).item()
            num_learned += int((labels_T != -100).sum())
    assert num_learned == corpus.manifest.tokens.supervised
    return total / num_learned


def trainer_for(model: LlamaForCausalLM, corpus: Corpus, folder: Path, dataset: Dataset, **settings) -> SFTTrainer:
    config = SFTConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=dataset.num_rows,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        bf16=False,
        disable_tqdm=True,
        **settings,
    )
    tokenizer = AutoTokenizer.from_pretrained(corpus.path / "tokenizer")
    return SFTTrainer(model, args=config, train_dataset=dataset, processing_class=tokenizer)


def first_loss(trainer: SFTTrainer) -> float:
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def test_the_first_loss_of_sft_trainer_is_the_one_our_own_fields_give(corpus, model, tmp_path):
    """Packed equals unpacked: the same tokens are learned, each with the same tokens before it."""
    expected = loss_from_our_fields(model, corpus)
    trainer = trainer_for(model, corpus, tmp_path, corpus.as_dataset(), **NAMED_IN_THE_CARD)
    assert trainer.train_dataset.column_names == ["input_ids", "labels", "seq_lengths"]
    assert first_loss(trainer) == pytest.approx(expected, abs=1e-5)


def test_without_the_lengths_documents_would_see_each_other(corpus, model, tmp_path):
    """The proof that the test above can fail."""
    expected = loss_from_our_fields(model, corpus)
    blurred = corpus.as_dataset().remove_columns("seq_lengths")
    trainer = trainer_for(model, corpus, tmp_path, blurred, **NAMED_IN_THE_CARD)
    assert abs(first_loss(trainer) - expected) > 1e-2


def test_with_its_defaults_trl_would_cut_long_sequences(tiny_model, model, tmp_path):
    """What the data card warns of; when this fails, TRL has changed and so must the card."""
    rows = write_rows(tmp_path / "rows.jsonl", [row(1, words=500), row(2)])
    corpus = open_corpus(prepare_in(tmp_path, tiny_model, rows, "data.held_out=0").corpus)
    assert corpus.manifest.packing.context_length > 1024
    cut = trainer_for(model, corpus, tmp_path, corpus.as_dataset())
    assert max(len(ids) for ids in cut.train_dataset["input_ids"]) == 1024
    kept = trainer_for(model, corpus, tmp_path, corpus.as_dataset(), **NAMED_IN_THE_CARD)
    assert max(len(ids) for ids in kept.train_dataset["input_ids"]) > 1024


def test_the_code_in_the_data_card_runs_as_it_stands(corpus, model, monkeypatch):
    """People copy it; what it names are the settings tested here."""
    monkeypatch.chdir(corpus.path.parent)
    blocks = re.findall(r"^```python\n(.*?)^```", (corpus.path / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    names = {"model": model}
    for block in blocks:
        exec(block, names)  # noqa: S102
    assert list(names["corpus"]) == list(corpus)
    assert names["dataset"][:] == corpus.as_dataset()[:]
    trainer = names["trainer"]
    assert {name: getattr(trainer.args, name) for name in NAMED_IN_THE_CARD} == NAMED_IN_THE_CARD
    batch = next(iter(trainer.get_train_dataloader()))
    num_documents = int((batch["position_ids"] == 0).sum())
    assert num_documents > batch["input_ids"].shape[0]
    assert torch.isfinite(model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)


def test_plain_trainer_and_our_engine_have_the_same_loss_on_padded_rows(corpus, model, tiny_model, tmp_path):
    """One document per row with an attention mask: what `Trainer` needs, which knows nothing of packing."""
    expected = loss_from_our_fields(model, corpus)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path / "model" / name)
    losses: list[float] = []
    config = {
        "model": str(tmp_path / "model"),
        "corpus": str(corpus.path),
        "method": {"kind": "full"},
        "train": {"batch_documents": len(corpus), "max_steps": 1, "precision": "fp32", "in_memory": True},
        "device": "cpu",
        "verdict": {"after_training": False},
    }
    tunewell.train(config, out=tmp_path / "run", progress=False, on_step=lambda step: losses.append(step.loss))
    dataset = corpus.as_dataset(padded=True)
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=len(dataset),
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, args=arguments, train_dataset=dataset, data_collator=default_data_collator)
    assert first_loss(trainer) == pytest.approx(expected, abs=1e-5)
    assert losses[0] == pytest.approx(expected, abs=1e-5)
