"""Shards of earlier pipelines (2.0 and 3.0), made from their description, against the same rows prepared from text."""

import json
import shutil
from pathlib import Path

import pytest
from tiny import write_tiny_model
from tokenizers import Tokenizer

from corpora import prepare_in, row, write_rows
from tunewell import open_corpus
from tunewell.cli.screens.corpus import corpus_rows
from tunewell.config.glossary import find_entry
from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.workflows.prepare import prepare

LENGTH = 512
ROWS = [row(number) for number in range(60)]
HELD_OUT = "data.held_out=0.0"
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The tiny tokenizer with an end token of its own, as a tokenizer made for a model from scratch has."""
    folder = write_tiny_model(tmp_path_factory.mktemp("old") / "tiny-model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|endoftext|>"}))
    return folder


def conversation(entry: dict[str, str]) -> str:
    turns = (("user", entry["question"]), ("assistant", entry["answer"]))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


def write_packed(folder: Path, model: Path, rows=ROWS, *, masked: bool = False, manifest=None, shift: int = 0) -> Path:
    """Pack conversations with an end token between them, pad to one length; every token is supervised."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    end, packed, ids, labels = tokenizer.token_to_id("<|endoftext|>"), [], [], []

    def flush() -> None:
        rest = LENGTH - len(ids)
        packed.append(
            {
                "input_ids": ids + [0] * rest,
                "attention_mask": [1] * len(ids) + [0] * rest,
                "labels": labels + [-100] * rest,
            }
        )

    for entry in rows:
        text = conversation(entry)
        prompt = text[: text.index("assistant\n") + len("assistant\n")]
        own = [min(number + shift, 500) if shift else number for number in tokenizer.encode(text).ids] + [end]
        hidden = len(tokenizer.encode(prompt).ids) if masked else 0
        if len(ids) + len(own) > LENGTH:
            flush()
            ids, labels = [], []
        ids, labels = ids + own, labels + [-100] * hidden + own[hidden:]
    flush()
    half = len(packed) // 2
    for name, part in (("shard_00000.jsonl", packed[:half]), ("shard_00001.jsonl", packed[half:])):
        write_rows(folder / "train" / name, part)
    described = {
        "format_version": "3.0",
        "packing_metadata": {"enabled": True, "packing_efficiency": 82.37, "avg_conversations_per_sequence": 4.53},
        "shards": [{"file": "shard_00000.jsonl", "num_examples": half}],
    }
    (folder / "manifest.json").write_text(json.dumps(described | (manifest or {})))
    return folder


def labels_of(folder: Path) -> list[tuple[list[int], list[int]]]:
    return [(document.input_ids, document.labels) for document in open_corpus(folder)]


def test_packed_shards_give_the_documents_of_their_rows(model, tmp_path):
    """Ids and masks are those of the rows: only the replies are supervised, which the old labels did not do."""
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    expected = prepare_in(tmp_path / "text", model, rows, HELD_OUT).corpus
    shards = write_packed(tmp_path / "shards", model)
    converted = prepare_in(tmp_path / "old", model, shards, HELD_OUT)
    assert labels_of(converted.corpus) == labels_of(expected)
    assert converted.manifest.notes["converted_from_shards"] == 60


def test_rows_of_version_2_are_read_without_the_validation_shards(model, tmp_path):
    folder = tmp_path / "shards"
    write_rows(folder / "train" / "shard_00000.jsonl", [{"text": conversation(entry)} for entry in ROWS[:40]])
    write_rows(folder / "val" / "shard_00000.jsonl", [{"text": conversation(entry)} for entry in ROWS[40:]])
    (folder / "manifest.json").write_text(json.dumps({"format_version": "2.0"}))
    expected = prepare_in(tmp_path / "text", model, write_rows(tmp_path / "rows.jsonl", ROWS[:40]), HELD_OUT).corpus
    assert labels_of(prepare_in(tmp_path / "old", model, folder, HELD_OUT).corpus) == labels_of(expected)


def test_masks_that_are_there_are_kept(model, tmp_path):
    shards = write_packed(tmp_path / "shards", model, masked=True)
    stored = labels_of(prepare_in(tmp_path / "old", model, shards, HELD_OUT).corpus)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    text = labels_of(prepare_in(tmp_path / "text", model, rows, HELD_OUT).corpus)
    assert [ids for ids, _ in stored] == [ids for ids, _ in text]
    for (_, own), (_, other) in zip(stored, text, strict=True):
        assert own.count(-100) <= other.count(-100) < len(own)


@pytest.mark.parametrize("size", [7, 1024])
def test_one_conversation_without_a_mask_leaves_the_others_masks(size, model, tmp_path, monkeypatch):
    """It replaced the stored masks of its whole block of 1,024 conversations, so the block size decided."""
    monkeypatch.setattr("tunewell.data.corpus.old_shards._BLOCK_DOCUMENTS", size)
    shards = write_packed(tmp_path / "shards", model, masked=True)
    for number, shard in enumerate(sorted((shards / "train").glob("*.jsonl"))):
        packed = [json.loads(line) for line in shard.read_text().splitlines()]
        start = packed[0]["labels"].index(-100)  # one token less in every other mask, which no template gives
        for entry in packed:
            last = next(at for at in range(start, LENGTH) if entry["labels"][at] != -100)
            entry["labels"][last] = -100
        if number == 0:
            end = packed[0]["input_ids"].index(Tokenizer.from_file(str(model / "tokenizer.json")).token_to_id(END))
            packed[0]["labels"][:end] = packed[0]["input_ids"][:end]
        write_rows(shard, packed)
    converted = prepare_in(tmp_path / "old", model, shards, HELD_OUT)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    text = labels_of(prepare_in(tmp_path / "text", model, rows, HELD_OUT).corpus)
    stored = labels_of(converted.corpus)
    changed = [own for own, other in zip(stored, text, strict=True) if own != other]
    assert [ids for ids, _ in stored] == [ids for ids, _ in text]
    assert stored[0] == text[0] and len(changed) > 1
    assert converted.manifest.notes["masks_as_stored"] == len(ROWS) - 1


@pytest.mark.parametrize("name", ["a.jsonl", "z.jsonl"])
def test_a_folder_with_packed_rows_and_rows_of_text_is_read_by_file(name, model, tmp_path):
    """The first file decided for all: the others lost their rows or were refused."""
    shards = write_packed(tmp_path / "shards", model, ROWS[:40])
    (shards / "manifest.json").unlink()
    write_rows(shards / "train" / name, ROWS[40:])
    converted = prepare_in(tmp_path / "old", model, shards, HELD_OUT)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    expected = labels_of(prepare_in(tmp_path / "text", model, rows, HELD_OUT).corpus)
    assert sorted(labels_of(converted.corpus)) == sorted(expected)
    assert converted.manifest.notes["converted_from_shards"] == 40


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"manifest": {"format_version": "2.0"}}, "it says 2.0, but"),
        ({"manifest": {"shards": [{"file": "shard_00009.jsonl"}]}}, "lists `shard_00009.jsonl`, which is missing"),
        ({"manifest": {"shards": [{"file": "shard_00000.jsonl", "num_examples": 99}]}}, "and it lists 99"),
        ({"manifest": {"shards": [{"file": "shard_00000.jsonl", "sha256": "0" * 64}]}}, "another hash"),
        ({"manifest": {"packing_metadata": {"enabled": False}}}, "`packing_metadata.enabled` says otherwise"),
    ],
)
def test_a_manifest_that_lies_is_refused(change, what, model, tmp_path):
    with pytest.raises(UserError, match=what):
        prepare_in(tmp_path, model, write_packed(tmp_path / "shards", model, **change), HELD_OUT)


def test_ids_of_another_tokenizer_are_refused(model, tmp_path):
    """The ids would stand for other text, and training would seem to work."""
    with pytest.raises(UserError, match=r"are not those of the tokenizer|have no roles"):
        prepare_in(tmp_path, model, write_packed(tmp_path / "shards", model, shift=3), HELD_OUT)


def test_text_without_roles_is_refused(model, tmp_path, monkeypatch):
    """Questions would be learned like answers."""
    monkeypatch.setattr(f"{__name__}.conversation", lambda entry: f"{entry['question']} assistant\n {entry['answer']}")
    with pytest.raises(UserError, match=r"the labels mask nothing, and .* have no role markers"):
        prepare_in(tmp_path, model, write_packed(tmp_path / "shards", model), HELD_OUT)


def test_the_first_loss_is_that_of_the_rows(model, tmp_path):
    """Converted shards train like the rows: the loss of the first step is the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import tunewell

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=1024, **sizes))
    llama.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path / "model" / name)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    text = tmp_path / "v2" / "train" / "shard.jsonl"
    write_rows(text, [{"text": conversation(entry)} for entry in ROWS])
    (tmp_path / "v2" / "manifest.json").write_text(json.dumps({"format_version": "2.0"}))
    losses: dict[str, list[float]] = {}
    for name, data in (("rows", rows), ("v3", write_packed(tmp_path / "shards", model)), ("v2", tmp_path / "v2")):
        losses[name] = []
        config = {
            "model": str(tmp_path / "model"),
            "corpus": str(tmp_path / name / "corpus"),
            "data": {"sources": [str(data)], "held_out": 0.0},
            "train": {"max_steps": 2, "batch_documents": len(ROWS), "precision": "fp32"},
            "verdict": {"after_training": False},
            "device": "cpu",
        }
        keep, run = losses[name], tmp_path / f"run-{name}"
        tunewell.train(config, out=run, progress=False, on_step=lambda step, keep=keep: keep.append(step.loss))
    assert losses["v3"][0] == pytest.approx(losses["rows"][0], abs=1e-6)
    assert losses["v2"][0] == pytest.approx(losses["rows"][0], abs=1e-6)
    assert len(losses["v3"]) == 2 and losses["v3"][1] < losses["v3"][0]


@pytest.fixture(scope="module")
def spaces(tmp_path_factory) -> tuple[Path, Path]:
    """Return SentencePiece models whose normaliser turns line ends into spaces, with and without ChatML's markers."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    sentences = [text.replace("\n", " ") for entry in ROWS for text in (entry["question"], entry["answer"])]
    sentences += ["<|im_start|> user assistant system <|im_end|>"] * 9
    (folder / "text.txt").write_text("\n".join(sentences * 5))
    sizes = {
        "vocab_size": 200,
        "model_type": "bpe",
        "hard_vocab_limit": False,
        "minloglevel": 9,
        "character_coverage": 1.0,
    }
    found = []
    for name, symbols in (("symbols", ["<|im_start|>", "<|im_end|>"]), ("pieces", [])):
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text.txt"), model_prefix=str(folder / name), user_defined_symbols=symbols, **sizes
        )
        found.append(folder / f"{name}.model")
    return found[0], found[1]


def pack_pieces(folder: Path, model: Path, *, manifest: dict | None, is_all_ones: bool = False, columns=()) -> Path:
    """Pack conversations as SentencePiece itself encodes them; line ends become spaces."""
    import sentencepiece

    encoder = sentencepiece.SentencePieceProcessor(model_file=str(model))
    packed, ids = [], []
    for entry in [*ROWS, None]:
        own = [*encoder.encode(conversation(entry)), encoder.eos_id()] if entry else []
        if len(ids) + len(own) > LENGTH or entry is None:
            rest = LENGTH - len(ids)
            mask = [1] * LENGTH if is_all_ones else [1] * len(ids) + [0] * rest
            whole = {"input_ids": ids + [0] * rest, "attention_mask": mask, "labels": ids + [-100] * rest}
            packed.append({name: value for name, value in whole.items() if name not in columns})
            ids = []
        ids = ids + own
    write_rows(folder / "train" / "shard_00000.jsonl", packed[:-1])
    write_rows(folder / "val" / "shard_00000.jsonl", packed[-1:])
    if manifest is not None:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


V3 = {"format_version": "3.0", "packing_metadata": {"enabled": True}}


def prepare_pieces(folder: Path, data: Path, tokenizer: Path, *sets: str):
    loaded = load_config(
        {},
        [f"tokenizer={tokenizer}", f"corpus={folder / 'corpus'}", HELD_OUT, *sets],
        model="preset:tiny-1m",
        data=str(data),
    )
    return prepare(loaded)


def supervised_text(corpus: Path, tokenizer: Path) -> list[str]:
    import sentencepiece

    decoder = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    return [
        decoder.decode([number for number in document.labels if number != -100]) for document in open_corpus(corpus)
    ]


def replies(encoder_path: Path, number: int) -> list[str]:
    import sentencepiece

    encoder = sentencepiece.SentencePieceProcessor(model_file=str(encoder_path))
    return [encoder.decode(encoder.encode(f"{entry['answer']}<|im_end|>")) for entry in ROWS[:number]]


@pytest.mark.parametrize("sets", [["template.name=chatml"], []])
def test_line_ends_that_became_spaces_are_understood(sets, spaces, tmp_path):
    """SentencePiece's usual normaliser writes spaces; the rows were "rendered by an unknown chat template"."""
    symbols, _ = spaces
    data = pack_pieces(tmp_path / "shards", symbols, manifest=V3)
    result = prepare_pieces(tmp_path, data, symbols, *sets)
    found = supervised_text(result.corpus, symbols)
    assert found == replies(symbols, len(found)) and len(found) > 30
    assert result.manifest.notes.get("masked_by_marker", 0) == (0 if sets else len(found))
    [remark] = [remark for remark in result.manifest.remarks if "validation split" in remark]
    assert remark.startswith("1 shard ") and "shard_00000.jsonl" in remark


@pytest.mark.parametrize(
    ("sets", "note"), [([], "masked_by_marker"), (["data.sources[0].format=text"], "trained_as_a_whole")]
)
def test_markers_in_pieces_are_found_in_the_text(sets, note, spaces, tmp_path):
    """A tokenizer without the markers splits them; the mask is assumed, and screen, manifest and card say so."""
    _, pieces = spaces
    data = pack_pieces(tmp_path / "shards", pieces, manifest=V3)
    result = prepare_pieces(tmp_path, data, pieces, *sets)
    found = supervised_text(result.corpus, pieces)
    assert result.manifest.notes[note] == len(found) > 30
    assert note.replace("_", " ") in (result.corpus / "README.md").read_text()
    assert any("conversations without a mask" in row[2] for row in corpus_rows(result.manifest, folder=None))
    if not sets:
        assert found == replies(pieces, len(found))
    else:
        assert all("assistant" in text for text in found)


def test_added_markers_replace_those_in_pieces(spaces, tmp_path):
    """With `add_missing_tokens` the ids differ by the markers, and the shards are still those of the tokenizer."""
    _, pieces = spaces
    data = pack_pieces(tmp_path / "shards", pieces, manifest=V3)
    sets = ["template.name=chatml", "template.add_missing_tokens=true"]
    result = prepare_pieces(tmp_path, data, pieces, *sets)
    assert result.manifest.notes["converted_from_shards"] > 30 and not result.manifest.dropped


@pytest.mark.parametrize(
    ("part", "manifest", "is_assumed"),
    [
        ("train", V3, False),
        ("train/shard_00000.jsonl", V3, False),
        ("train/*.jsonl", V3, False),
        ("", None, True),
        ("", {"format_version": "4.0"}, True),
        ("", {"num_shards": 1}, True),
    ],
)
def test_packed_rows_are_recognised_by_their_columns(part, manifest, is_assumed, spaces, tmp_path):
    """A shard, a folder below the manifest, no manifest or another version ended in advice about column names."""
    symbols, _ = spaces
    data = pack_pieces(tmp_path / "shards", symbols, manifest=manifest)
    result = prepare_pieces(tmp_path, data / part, symbols, "template.name=chatml")
    found = supervised_text(result.corpus, symbols)
    assert found == replies(symbols, len(found)) and len(found) > 30
    assert ("shards_without_manifest" in result.manifest.notes) == is_assumed


@pytest.mark.parametrize("given", [{"is_all_ones": True}, {"columns": ("attention_mask",)}, {"columns": ("labels",)}])
def test_padding_and_missing_columns_are_found(given, spaces, tmp_path):
    """An attention mask of ones, or none at all, made padding part of the last conversation."""
    symbols, _ = spaces
    data = pack_pieces(tmp_path / "shards", symbols, manifest=V3, **given)
    result = prepare_pieces(tmp_path, data, symbols, "template.name=chatml")
    found = supervised_text(result.corpus, symbols)
    assert found == replies(symbols, len(found)) and len(found) > 30


def test_the_shards_of_the_validation_split_can_be_held_out(spaces, tmp_path):
    symbols, _ = spaces
    data = pack_pieces(tmp_path / "shards", symbols, manifest=V3)
    result = prepare_pieces(tmp_path, data, symbols, "template.name=chatml", f"data.held_out={data / 'val'}")
    assert result.manifest.documents + result.manifest.held_out == len(ROWS)


def test_every_note_of_shards_is_in_the_glossary():
    """The screen advised `tunewell glossary 'converted from shards'`, which had no such entry."""
    notes = (
        "converted_from_shards",
        "masks_as_stored",
        "masked_by_marker",
        "trained_as_a_whole",
        "shards_without_manifest",
    )
    assert all(len(find_entry(note)[1]) > 20 for note in notes)


def test_the_missing_end_token_is_named_with_what_helps(spaces, tmp_path):
    """The id in the manifest is enough; without it, the message names the tokenizer and the key."""
    symbols, _ = spaces
    data = pack_pieces(tmp_path / "shards", symbols, manifest={"format_version": "3.0"})
    shard = data / "train" / "shard_00000.jsonl"
    shard.write_text(shard.read_text().replace(" 2,", " 1,"))
    with pytest.raises(UserError, match="cannot be told apart") as caught:
        prepare_pieces(tmp_path, shard, symbols, "template.name=chatml")
    assert "`tokenizer`" in str(caught.value.fix) and '"eos_token_id": 2' in str(caught.value.fix)
    (data / "manifest.json").write_text(json.dumps({"format_version": "3.0", "eos_token_id": 1}))
    assert prepare_pieces(tmp_path, shard, symbols, "template.name=chatml").manifest.documents > 30
