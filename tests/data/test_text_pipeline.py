"""Which tokenizer a config means: the model's own, another one, or none at all."""

import json
from pathlib import Path

import pytest
import sentencepiece
import torch
from tiny import CHATML, write_tiny_model

from corpora import rows_file
from tunewell.cli.screens.corpus import corpus_rows
from tunewell.config.load import LoadedConfig
from tunewell.config.schema import Config
from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import open_corpus
from tunewell.data.text_pipeline import TextPipeline
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.models.load import LoadOptions, load_model
from tunewell.workflows.prepare import prepare


def config_in(folder: Path, **keys) -> LoadedConfig:
    return LoadedConfig(Config.model_validate(keys), folder, None, {})


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Path:
    """A SentencePiece file as someone's own pretraining leaves it: no chat markers, no template."""
    folder = tmp_path_factory.mktemp("pieces")
    rows = rows_file(folder / "rows.jsonl", 200).read_text()
    (folder / "text.txt").write_text("\n".join(" ".join(json.loads(row).values()) for row in rows.splitlines()))
    settings = {"model_type": "unigram", "vocab_size": 300, "byte_fallback": True, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "own"), minloglevel=2, num_threads=1, **settings
    )
    return folder / "own.model"


def test_the_tokenizer_named_beside_a_model_is_used(tmp_path, tiny_model):
    (tmp_path / "tok").symlink_to(tiny_model)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    tools = TextPipeline.load(config_in(tmp_path, model="model", tokenizer="tok"))
    assert tools.tokenizer.sha256 == load_tokenizer(tiny_model).sha256
    assert tools.model == str(tmp_path / "model")


def test_a_tokenizer_named_beside_a_model_wins_over_its_own(tmp_path, tiny_model, pieces):
    tools = TextPipeline.load(config_in(tmp_path, model=str(tiny_model), tokenizer=str(pieces)))
    assert tools.tokenizer.kind == "sentencepiece"


def test_a_preset_without_a_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="without a tokenizer") as caught:
        TextPipeline.load(config_in(tmp_path, model="preset:tiny-23m"))
    assert "`tokenizer:`" in str(caught.value.fix)


def test_a_preset_that_is_none_is_noticed_before_anything_is_prepared(tmp_path, tiny_model):
    with pytest.raises(UserError, match="no preset `tiny-24m`"):
        TextPipeline.load(config_in(tmp_path, model="preset:tiny-24m", tokenizer=str(tiny_model)))


def test_a_preset_is_prepared_and_loaded_with_someones_own_sentencepiece_model(tmp_path, pieces):
    """From scratch with a SentencePiece file and ChatML: one config, and the markers are part of the vocabulary."""
    rows_file(tmp_path / "rows.jsonl", 40)
    loaded = config_in(
        tmp_path,
        model="preset:tiny-1m",
        tokenizer=str(pieces),
        data={"sources": ["rows.jsonl"]},
        template={"name": "chatml", "add_missing_tokens": True},
    )
    corpus = open_corpus(prepare(loaded).corpus)
    added = corpus.manifest.tokenizer.added_by_us
    assert set(added) == {"<|im_start|>", "<|im_end|>"}
    assert corpus.manifest.packing.context_length == 1024
    order = LoadOptions(
        "preset:tiny-1m",
        corpus.path / "tokenizer",
        torch.device("cpu"),
        torch.float32,
        attention="sdpa",
        added_tokens=tuple(added),
    )
    found = load_model(order)
    assert found.model.config.vocab_size == corpus.manifest.tokenizer.vocab_size
    assert len(found.new_token_ids) == 2
    ids, _ = corpus.arrays(0)
    assert max(ids) < found.model.config.vocab_size
    with torch.no_grad():
        assert torch.isfinite(found.model(input_ids=torch.from_numpy(ids.astype("int64"))[None]).logits).all()


def test_a_checkpoint_of_other_code_brings_the_tokenizer_beside_it(tmp_path, tiny_model):
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.pt").write_bytes(b"not looked at here")
    (tmp_path / "model.keys.json").write_text('{"model": "preset:tiny-1m"}')
    rows_file(tmp_path / "rows.jsonl", 20)
    corpus = prepare(config_in(tmp_path, model="model.pt", data={"sources": ["rows.jsonl"]}))
    assert corpus.manifest.tokenizer.sha256 == load_tokenizer(tiny_model).sha256
    assert corpus.manifest.packing.context_length == 1024


def test_a_built_in_template_on_a_model_with_its_own_is_a_warning(tmp_path, tiny_model):
    """Guards against a model that has to unlearn its format because of a line in a config."""
    config = {"name": "llama3", "add_missing_tokens": True}
    [warning] = TextPipeline.load(config_in(tmp_path, model=str(tiny_model), template=config)).warnings
    assert "`llama3`" in warning and "template.name: auto" in warning
    assert TextPipeline.load(config_in(tmp_path, model=str(tiny_model))).warnings == []
    same = {"name": "chatml"}  # the same text as the model's own
    assert TextPipeline.load(config_in(tmp_path, model=str(tiny_model), template=same)).warnings == []


def test_a_template_that_writes_two_bos_tokens_is_a_warning(tmp_path):
    """Guards against a start that no model was trained with, and its cause: `bos_token` beside a literal `<s>`."""
    model = write_tiny_model(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["bos_token"] = "<|endoftext|>"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "two.jinja").write_text("{{ bos_token }}<|endoftext|>" + CHATML)
    [warning] = TextPipeline.load(config_in(tmp_path, model=str(model), template={"name": "two.jinja"})).warnings
    assert "twice" in warning
    rows = rows_file(tmp_path / "rows.jsonl", 9)
    loaded = config_in(tmp_path, model=str(model), template={"name": "two.jinja"}, data={"sources": str(rows)})
    manifest = prepare(loaded).manifest
    assert manifest.warnings == [warning]
    assert ["warning", "", warning] in corpus_rows(manifest, folder=None)
