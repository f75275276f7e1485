"""A SentencePiece model gives the ids of the `sentencepiece` package, and markers as transformers finds them."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import sentencepiece
from tokenizer_references import POOLS, random_texts

from tunewell.core.errors import UserError
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.data.tokenizers.sentencepiece import CONTROL, USER_DEFINED, read_model

MARKERS = ["<|im_start|>", "<|im_end|>"]
# Combining marks and joiners are left out: where a model normalises, the `tokenizers` library does so by grapheme and
# may drop what joins a character that changes, while SentencePiece takes the longest entry of its table.
PLAIN = [pool for pool in POOLS if not any(mark in pool for mark in "\u0301\u0e33\u0915\u200d")]
TEXTS = ["", " ", "   ", "\n", " leading", "trailing  ", "two  spaces", *random_texts(500, seed=3, pools=PLAIN)]


def train(folder: Path, **options) -> Path:
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(text.replace("\n", " ") for text in random_texts(1500, seed=7, pools=PLAIN)))
    settings = {
        "vocab_size": 700,
        "split_digits": True,
        "user_defined_symbols": MARKERS,
        "character_coverage": 0.99,
        "pad_id": 3,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), **(settings | options)
    )
    return folder / "tokenizer.model"


LLAMA_LIKE = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
VARIANTS = [
    {"model_type": kind, "byte_fallback": fallback, **rules}
    for kind in ("unigram", "bpe")
    for fallback in (True, False)
    for rules in (LLAMA_LIKE, {"normalization_rule_name": "nmt_nfkc"}, {"add_dummy_prefix": False})
]


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda options: "-".join(map(str, options.values())))
def trained(request, tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("spm"), **request.param)


@pytest.fixture(scope="module")
def llama_like(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("llama"), model_type="bpe", byte_fallback=True, **LLAMA_LIKE)


def test_plain_text_gets_the_ids_of_sentencepiece(trained):
    backend = load_tokenizer(trained).backend
    reference = sentencepiece.SentencePieceProcessor(str(trained))
    ours = [encoding.ids for encoding in backend.encode_batch(TEXTS, add_special_tokens=False)]
    assert ours == reference.encode(TEXTS)


def test_without_normalisation_combining_marks_agree_too(llama_like):
    backend = load_tokenizer(llama_like).backend
    texts = random_texts(500, seed=8)
    ours = [encoding.ids for encoding in backend.encode_batch(texts, add_special_tokens=False)]
    assert ours == sentencepiece.SentencePieceProcessor(str(llama_like)).encode(texts)


def test_text_between_markers_is_what_sentencepiece_makes_of_it(trained):
    """Spaces next to a marker belong to the text, they are neither doubled nor lost."""
    backend = load_tokenizer(trained).backend
    reference = sentencepiece.SentencePieceProcessor(str(trained))
    for text in random_texts(100, seed=4, pools=PLAIN):
        whole = f"x {MARKERS[0]}{text}{MARKERS[1]} y"
        assert backend.encode(whole, add_special_tokens=False).ids == reference.encode(whole), whole


def test_spelled_markers_never_become_control_ids_when_they_are_to_stay_text(trained):
    """The library's Unigram would otherwise find `<s>` and `<0x41>` in its vocabulary, like any other piece."""
    loaded = load_tokenizer(trained)
    model = read_model(trained)
    reserved = {index for index, kind in enumerate(model.types) if kind in (CONTROL, USER_DEFINED)}
    assert reserved <= loaded.control_ids
    loaded.backend.encode_special_tokens = True
    for text in ["<s>", "a<s>b</s>", "<pad><unk><|im_start|>", "x <|im_end|><s>", "<0x41>", "<<s>>"]:
        encoding = loaded.backend.encode(text, add_special_tokens=False)
        assert not set(encoding.ids) & reserved, encoding.tokens
        assert "<0x41>" not in encoding.tokens


def test_markers_are_found_as_transformers_finds_them(llama_like):
    """Its LlamaTokenizer, built from the same pieces: no space after a marker that the text does not have.

    transformers 5.22 itself differs from SentencePiece in one place: a text that starts with a space loses it.
    """
    from tokenizers import AddedToken
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    model = read_model(llama_like)
    vocabulary = {piece: index for index, piece in enumerate(model.pieces)}
    kinds = zip(model.pieces, model.types, strict=True)
    markers = [AddedToken(piece, normalized=False, special=kind == CONTROL) for piece, kind in kinds if kind in (3, 4)]
    theirs = LlamaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary), extra_special_tokens=markers)
    ours = load_tokenizer(llama_like).backend
    for first, second in zip(TEXTS[::2], TEXTS[1::2], strict=False):
        for text in (
            f"<|im_start|>{first}<|im_end|>\n<|im_start|>{second}</s>",
            f"<s>[INST] {first} [/INST]{second}</s>",
        ):
            assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)


def test_tokens_of_companion_files_join_the_vocabulary(llama_like, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(llama_like.read_bytes())
    (tmp_path / "added_tokens.json").write_text('{"<|tool|>": 700}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"add_bos_token": false, "pad_token": "<pad>", "eos_token": "<|im_end|>", "model_max_length": 2048,'
        ' "chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]}'
    )
    loaded = load_tokenizer(tmp_path)
    assert (loaded.kind, loaded.adds_bos, loaded.chat_template, loaded.vocab_size) == (
        "sentencepiece",
        False,
        "yes",
        701,
    )
    assert loaded.special_tokens["eos_token"] == "<|im_end|>"
    bare = load_tokenizer(llama_like)
    assert bare.adds_bos and bare.chat_template is None
    split = loaded.backend.encode("a<|tool|>b", add_special_tokens=False).tokens
    assert split == ["▁a", "<|tool|>", "b"]


def test_decoding_gives_the_text_back(llama_like):
    backend = load_tokenizer(llama_like).backend
    for text in TEXTS:
        assert backend.decode(backend.encode(text, add_special_tokens=False).ids) == text


def test_a_damaged_model_file_is_refused(llama_like, tmp_path):
    """Protobuf has no end mark: a file cut between two pieces would otherwise be a smaller vocabulary."""
    data = llama_like.read_bytes()
    path = tmp_path / "cut.model"
    for end in range(0, len(data) - 60, 61):
        path.write_bytes(data[:end])
        with pytest.raises(UserError, match="truncated"):
            load_tokenizer(path)


@pytest.mark.parametrize("kind", ["char", "word"])
def test_other_kinds_of_model_are_refused(tmp_path, kind):
    with pytest.raises(UserError, match="Unigram and BPE"):
        load_tokenizer(train(tmp_path, model_type=kind, hard_vocab_limit=False, use_all_vocab=True))


@pytest.mark.slow
def test_real_vocabularies_of_32_000_pieces_agree_with_sentencepiece(tmp_path):
    """Mistral's own files, from the wheel of `mistral-common`."""
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(tmp_path),
        "mistral-common",
    ]
    subprocess.run(download, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = [name for name in wheel.namelist() if ".model" in Path(name).suffixes]
        assert names
        wheel.extractall(tmp_path, names)
    for name in names:
        path = tmp_path / name
        reference = sentencepiece.SentencePieceProcessor(str(path))
        ours = load_tokenizer(path).backend.encode_batch(TEXTS, add_special_tokens=False)
        assert [encoding.ids for encoding in ours] == reference.encode(TEXTS), name
