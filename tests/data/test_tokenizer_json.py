"""A `tokenizer.json` folder opens as transformers 5.22 opens it: same ids, same special tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizer_references import random_texts
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tunewell.core.errors import UserError
from tunewell.data.tokenizers.load import load_tokenizer

MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    *random_texts(60, seed=21),
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|> x",
    "<|new|> a<|new|>b [PAD] <|extra|><unk></s>x",
]


def trained(pre_tokenizer: Any, **more: Any) -> Tokenizer:
    backend = Tokenizer(models.BPE(**more))
    backend.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=MARKERS, show_progress=False
    )
    backend.train_from_iterator(random_texts(800, seed=20), trainer)
    return backend


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    backend = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.fixture(scope="module")
def qwen_like() -> Tokenizer:
    cut = pre_tokenizers.Split(Regex(QWEN_CUTS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend = trained(pre_tokenizers.Sequence([cut, byte_level]))
    backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.fixture(scope="module")
def llama_like() -> Tokenizer:
    """SentencePiece-style BPE as Llama 2's file has it: a space in front of every text, bytes for the unknown."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyzXYZ0123456789,.",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "a"), ("▁", "▁"), ("b", "o")]
    pieces += ["".join(pair) for pair in merges]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


def write(folder: Path, backend: Tokenizer, **files: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def assert_same_as_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in TEXTS:
        assert ours.backend.encode(text, add_special_tokens=False).ids == theirs.encode(
            text, add_special_tokens=False
        ), text
        assert ours.backend.encode(text).ids == theirs(text).input_ids
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    flags = {content: (facts.id, facts.special) for content, facts in ours.added.items()}
    assert flags == {token.content: (number, token.special) for number, token in theirs.added_tokens_decoder.items()}
    with_bos = theirs.bos_token_id is not None and theirs("a").input_ids[:1] == [theirs.bos_token_id]
    assert ours.adds_bos == with_bos
    assert ours.chat_template == theirs.chat_template


PLAIN = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": None}
NEW = {"content": "<|new|>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
CASES: dict[str, dict[str, Any]] = {
    "no companions": {},
    "special tokens as text": {"tokenizer_config": {**PLAIN, "tokenizer_class": "PreTrainedTokenizerFast"}},
    "special tokens as objects": {
        "tokenizer_config": {"eos_token": {"__type": "AddedToken", **NEW, "content": "<|im_end|>"}}
    },
    "a pad token the vocabulary lacks": {"tokenizer_config": {**PLAIN, "pad_token": "[PAD]"}},
    "tokens in added_tokens_decoder": {
        "tokenizer_config": {
            **PLAIN,
            "added_tokens_decoder": {
                "0": {**NEW, "content": "<|endoftext|>", "lstrip": False, "special": True},
                "600": {**NEW, "special": False},
                "601": {**NEW, "content": "<|extra|>", "lstrip": False, "special": True},
            },
        }
    },
    "a named token not marked as special": {
        "tokenizer_config": {
            "eos_token": "<|new|>",
            "added_tokens_decoder": {"600": {**NEW, "lstrip": False, "special": False}},
        }
    },
    "extra tokens in a list": {"tokenizer_config": {**PLAIN, "extra_special_tokens": ["<|extra|>", "<|im_end|>"]}},
    "extra tokens, old name": {"tokenizer_config": {**PLAIN, "additional_special_tokens": ["<|extra|>"]}},
    "named extra tokens": {"tokenizer_config": {**PLAIN, "extra_special_tokens": {"image_token": "<|new|>"}}},
    "a token of its own name": {"tokenizer_config": {**PLAIN, "image_token": "<|extra|>", "add_bos_token": True}},
    "old companions": {
        "tokenizer_config": {"eos_token": "<|endoftext|>"},
        "special_tokens_map": {"eos_token": "<|im_end|>", "pad_token": {**NEW, "lstrip": False}},
        "added_tokens": {"<|new|>": 600, "<|extra|>": 601},
    },
    "a class with tokens of its own": {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}},
}


@pytest.mark.parametrize("case", CASES)
def test_companion_files_are_read_as_transformers_reads_them(tmp_path, byte_level, case):
    assert_same_as_transformers(write(tmp_path / "model", byte_level, **CASES[case]))


def test_a_qwen_folder_opens_as_in_transformers(tmp_path, qwen_like):
    """transformers rebuilds this class from its vocabulary; the file says the same thing."""
    config = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False}
    assert_same_as_transformers(
        write(tmp_path / "model", qwen_like, tokenizer_config=config, config={"model_type": "qwen2"})
    )


@pytest.mark.parametrize(
    ("config", "model_type"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, "llama"),
        ({"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, "llama"),
        ({"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False, "pad_token": "</s>"}, "llama"),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}, "mistral"),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}, "llama"),
    ],
)
def test_a_llama_folder_opens_as_in_transformers(tmp_path, llama_like, config, model_type):
    """transformers 5 replaces this class's pipeline, but not for Mistral, and not when another class is named."""
    folder = write(tmp_path / "model", llama_like, tokenizer_config=config, config={"model_type": model_type})
    assert_same_as_transformers(folder)


def test_truncation_and_padding_saved_in_the_file_are_switched_off(tmp_path, byte_level):
    """A file saved after a training run may cut at 512 tokens: documents would lose their ends without a word."""
    changed = Tokenizer.from_str(byte_level.to_str())
    changed.enable_truncation(4)
    changed.enable_padding(length=8, pad_token="<|im_end|>")
    loaded = load_tokenizer(write(tmp_path / "model", changed))
    assert loaded.backend.truncation is None and loaded.backend.padding is None
    assert len(loaded.backend.encode("the boy has many apples and eats them").ids) > 8
    assert loaded.special_tokens == {"pad_token": "<|im_end|>"}


def test_the_template_file_wins_over_the_config(tmp_path, byte_level):
    folder = write(
        tmp_path / "model",
        byte_level,
        tokenizer_config={"chat_template": "config"},
        chat_template={"chat_template": "old"},
    )
    assert load_tokenizer(folder).chat_template == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(folder).chat_template == "file"
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template == "old"


def test_the_file_alone_opens_like_its_folder(tmp_path, byte_level):
    folder = write(tmp_path / "model", byte_level, tokenizer_config=PLAIN)
    assert load_tokenizer(folder / "tokenizer.json").sha256 == load_tokenizer(folder).sha256
    shutil.copy(folder / "tokenizer.json", folder / "other.json")
    assert load_tokenizer(folder / "other.json").special_tokens == {}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "not json"),
        ("tokenizer.json", '{"model": {"type": "Strange"}}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
        ("special_tokens_map.json", '{"eos_token": {"no": "content"}}'),
    ],
)
def test_broken_files_are_user_errors(tmp_path, byte_level, name, content):
    folder = write(tmp_path / "model", byte_level)
    (folder / name).write_text(content)
    with pytest.raises(UserError):
        load_tokenizer(folder)
