"""Tokenizers in our GGUF files: llama.cpp, asked itself, gives the ids that the model was trained with."""

import json
import shutil
import unicodedata
from pathlib import Path

import gguf
import pytest
from gguf_tiny import save, tiny, write_gguf, write_pieces
from tiny import CHATML, write_tiny_model
from tokenizer_references import LlamaCpp, random_texts, train_byte_level
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tunewell.core.errors import UserError
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export.gguf.tokenizer import read_vocabulary

TEXTS = random_texts(300, seed=11)
ASCII = [text for text in random_texts(2000, seed=12) if text.isascii()]
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)
CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(*cuts, use_regex=False):
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*cuts, last]) if cuts else last


def split(pattern, behaviour="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behaviour, invert=invert)


# As the files of real models spell it -> llama.cpp's name for it, and whether words in the vocabulary come first.
SPELLINGS = {
    "GPT-2, Phi 2": (byte_level(use_regex=True), False, "gpt-2"),
    "SmolLM2": (byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True), False, "smollm"),
    "Qwen 2": (byte_level(split(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}")), False, "qwen2"),
    "Llama 3": (byte_level(split(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}")), True, "llama-bpe"),
    "Phi 4": (byte_level(split(rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}", "removed", True)), False, "dbrx"),
    "possessive": (
        byte_level(split(rf"'(?i:[sdmt]|ll|ve|re)|{WORDS.replace('?', '?+')}|\p{{N}}|{REST.replace(']+[', ']++[')}")),
        False,
        "qwen2",
    ),
    "Mistral Nemo": (byte_level(split(rf"{CASED}|\p{{N}}|{CASED_REST}")), True, "tekken"),
    "GPT-4o": (
        byte_level(split(rf"{CASED.replace('+|', f'+{CONTRACTIONS}?|')}{CONTRACTIONS}?|\p{{N}}{{1,3}}|{CASED_REST}")),
        False,
        "gpt-4o",
    ),
}


@pytest.fixture(scope="module")
def vocabulary():
    """Merges that reach across every boundary, so that only the cuts keep them apart."""
    return train_byte_level(1500)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A model with rows for every vocabulary of this file."""
    return save(tiny("llama-tied", num_hidden_layers=1, vocab_size=1510), tmp_path_factory.mktemp("weights"))


def with_tokenizer(folder: Path, weights: Path, backend: Tokenizer, **config: object) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((weights / name).read_bytes())
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return folder


def bpe(vocabulary, pre_tokenizer, *, whole_first=False, markers=("<|im_start|>", "<|im_end|>")) -> Tokenizer:
    tokens, merges = vocabulary
    numbers = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(numbers, [tuple(m.split(" ")) for m in merges], ignore_merges=whole_first))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in markers])
    return backend


def different(path: Path, folder: Path, texts: list[str], **how: bool) -> list[str]:
    """List the texts that llama.cpp reads otherwise than the tokenizer of the folder."""
    backend = load_tokenizer(folder).backend
    with LlamaCpp(path) as llama:
        ours = [backend.encode(text, add_special_tokens=how.get("with_bos", False)).ids for text in texts]
        return [text for text, ids in zip(texts, ours, strict=True) if ids != llama.encode(text, **how)]


@pytest.mark.parametrize("name", SPELLINGS)
def test_cuts_are_recognised_as_real_files_spell_them(tmp_path, weights, vocabulary, name):
    pre_tokenizer, whole_first, expected = SPELLINGS[name]
    backend = bpe(vocabulary, pre_tokenizer, whole_first=whole_first)
    folder = with_tokenizer(tmp_path / "model", weights, backend)
    facts = write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    assert facts.vocabulary.fields["tokenizer.ggml.pre"] == expected
    is_near = expected in ("tekken", "gpt-4o")
    assert bool(facts.notes) == is_near
    assert different(tmp_path / "m.gguf", folder, ASCII if is_near else TEXTS) == []
    chat = ["<|im_start|>user\n hi 1234<|im_end|>\n", " <|im_end|>  x"]
    assert different(tmp_path / "m.gguf", folder, chat, with_markers=True) == []


@pytest.mark.parametrize(
    "pre", ["smollm", "llama-bpe", "qwen2", "tekken", "default", "falcon", "deepseek-v3", "gpt-4o"]
)
def test_a_tokenizer_that_came_from_a_gguf_file_goes_back_into_one(tmp_path, weights, vocabulary, pre):
    """`prepare` writes such tokenizers as tokenizer.json, with patterns spelled as llama.cpp spells them."""
    from tokenizer_references import byte_level_metadata
    from tokenizer_references import write_gguf as write_words

    source = write_words(tmp_path / "words.gguf", byte_level_metadata(*vocabulary, pre))
    folder = with_tokenizer(tmp_path / "model", weights, bpe(vocabulary, byte_level()))
    load_tokenizer(source).save(folder, CHATML)
    facts = write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    assert facts.vocabulary.fields["tokenizer.ggml.pre"] == pre
    with LlamaCpp(source) as old, LlamaCpp(tmp_path / "m.gguf") as new:
        assert [text for text in TEXTS[:100] if old.encode(text) != new.encode(text)] == []
        assert old.encode("a", with_bos=True) == new.encode("a", with_bos=True)


def test_the_form_of_unicode_is_noted(tmp_path, weights, vocabulary):
    """Qwen's tokenizer composes letters first; llama.cpp does not, and no field tells it to."""
    backend = bpe(vocabulary, SPELLINGS["Qwen 2"][0])
    backend.normalizer = normalizers.NFC()
    folder = with_tokenizer(tmp_path / "model", weights, backend)
    facts = write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    assert "NFC" in facts.notes[0]
    composed = [text for text in TEXTS if unicodedata.is_normalized("NFC", text)]
    assert len(composed) > 50 and different(tmp_path / "m.gguf", folder, composed) == []
    assert different(tmp_path / "m.gguf", folder, ["e\u0301"]) == ["e\u0301"]


def test_a_bos_of_the_tokenizer_is_said_and_a_missing_one_too(tmp_path, weights, vocabulary):
    for adds in (True, False):
        backend = bpe(vocabulary, SPELLINGS["Llama 3"][0], whole_first=True)
        if adds:
            number = backend.token_to_id("<|im_start|>")
            backend.post_processor = processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", number)]
            )
        folder = with_tokenizer(tmp_path / f"model{adds}", weights, backend, bos_token="<|im_start|>")
        write_gguf(folder, tmp_path / "m.gguf", kind="f32")
        assert different(tmp_path / "m.gguf", folder, TEXTS[:20], with_bos=True) == []


def test_a_token_that_ends_turns_is_named_where_it_is_not_the_eos(tmp_path, weights, vocabulary):
    """llama.cpp knows some by their spelling; one it has never seen has to be named, or a reply never ends."""
    backend = bpe(vocabulary, SPELLINGS["SmolLM2"][0], markers=("<|im_start|>", "[over]", "<|endoftext|>"))
    template = CHATML.replace("<|im_end|>", "[over]")
    more = {"eos_token": "<|endoftext|>", "chat_template": template}
    folder = with_tokenizer(tmp_path / "model", weights, backend, **more)
    write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.eot_token_id"].contents() == backend.token_to_id("[over]")
    assert fields["tokenizer.ggml.eos_token_id"].contents() == backend.token_to_id("<|endoftext|>")


def test_tokens_added_for_a_template_are_there_as_markers(tmp_path):
    """A token that was added and lost again is read as its letters, and a reply never ends."""
    folder = save(tiny("llama-tied"), tmp_path / "model")
    loaded = load_tokenizer(folder).with_tokens(["<|new|>", "[INST]"])
    loaded.save(folder, CHATML)
    write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    with LlamaCpp(tmp_path / "m.gguf") as llama:
        assert llama.encode("<|new|>", with_markers=True) == [loaded.added["<|new|>"].id]
        assert llama.encode("a[INST]", with_markers=True)[-1] == loaded.added["[INST]"].id
        assert len(llama.encode("<|new|>")) > 1
    found = load_tokenizer(tmp_path / "m.gguf")
    assert {token: facts.id for token, facts in found.added.items()} == {
        token: facts.id for token, facts in loaded.added.items()
    }


def test_symbols_that_are_text_stay_text(tmp_path, weights, vocabulary):
    backend = bpe(vocabulary, SPELLINGS["SmolLM2"][0])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("<|looks|>", special=False)])
    folder = with_tokenizer(tmp_path / "model", weights, backend)
    write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    types = dict(
        zip(fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents(), strict=True)
    )
    assert (types["<think>"], types["<|looks|>"], types["<|im_end|>"]) == (4, 3, 3)
    assert different(tmp_path / "m.gguf", folder, ["so <think> 12", "a<think>b"]) == []


GREEDY = ("<|user|>", "<|end|>", "</s>")


@pytest.mark.parametrize(("is_greedy", "name"), [(True, "anything"), (True, "Phi-3-mini"), (False, "phi-3-tuned")])
def test_spaces_behind_phi_3s_markers_are_swallowed_whatever_the_name(tmp_path, weights, vocabulary, is_greedy, name):
    """llama.cpp reads it from the model's name: a tune that is called otherwise would get other ids."""
    backend = bpe(vocabulary, SPELLINGS["GPT-2, Phi 2"][0], markers=("<unk>", "<s>", "<|endoftext|>"))
    backend.add_special_tokens([AddedToken(text, rstrip=is_greedy, normalized=False, special=True) for text in GREEDY])
    folder = with_tokenizer(tmp_path / "model", weights, backend, eos_token="<|end|>", chat_template=None)
    write_gguf(folder, tmp_path / "m.gguf", kind="f32", name=name)
    chat = ["<|user|>\n hi<|end|>\n <|user|> x", "<s> a<|endoftext|>\n b</s>  c"]
    assert different(tmp_path / "m.gguf", folder, chat, with_markers=True) == []


@pytest.fixture(scope="module", params=[True, False], ids=["dummy space", "no dummy space"])
def pieces(request, tmp_path_factory):
    """A model with a SentencePiece `tokenizer.model`, as Llama 2 and Gemma have it."""
    folder = tmp_path_factory.mktemp("pieces")
    tiny("llama-tied", num_hidden_layers=1, vocab_size=1510).save_pretrained(folder)
    symbols = ["\n\n", "▁▁", "▁▁▁"] if not request.param else []
    return write_pieces(folder, num_pieces=900, dummy_prefix=request.param, user_defined_symbols=symbols)


def test_a_sentencepiece_model_gives_its_own_ids_in_llama_cpp(tmp_path, pieces):
    import sentencepiece

    folder = Path(shutil.copytree(pieces, tmp_path / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    facts = write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "tokenizer.model"))
    with LlamaCpp(tmp_path / "m.gguf") as llama:
        assert [text for text in TEXTS if theirs.encode(text) != llama.encode(text)] == []
    assert different(tmp_path / "m.gguf", folder, TEXTS, with_bos=True) == []
    starts_with_space = theirs.encode_as_pieces("a")[0].startswith("▁")
    assert any("to the first text only" in note for note in facts.notes) == starts_with_space


def test_a_conversation_behind_markers_has_the_ids_of_training_in_llama_cpp(tmp_path, pieces):
    """llama.cpp added a space behind each marker, so no export of a chat model with such a tokenizer was proven."""
    facts = write_gguf(pieces, tmp_path / "m.gguf", kind="f32")
    assert facts.vocabulary.fields["tokenizer.ggml.add_space_prefix"] is False
    chat = [f"<s><|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in ("hi there", " 12", "")]
    assert different(tmp_path / "m.gguf", pieces, chat, with_markers=True) == []


def test_scores_made_from_merges_join_pieces_in_the_same_order(tmp_path, pieces):
    """What `prepare` and a merge write has no `.model` file any more, only merges."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((pieces / name).read_bytes())
    load_tokenizer(pieces).save(folder, CHATML)
    assert not (folder / "tokenizer.model").exists()
    write_gguf(pieces, tmp_path / "own.gguf", kind="f32")
    write_gguf(folder, tmp_path / "made.gguf", kind="f32")
    with LlamaCpp(tmp_path / "own.gguf") as own, LlamaCpp(tmp_path / "made.gguf") as made:
        texts = [*TEXTS, *random_texts(1500, seed=5)]
        assert [text for text in texts if own.encode(text) != made.encode(text)] == []
        chat = "<|im_start|>user\nhi there<|im_end|>\n"
        assert own.encode(chat, with_markers=True) == made.encode(chat, with_markers=True)


@pytest.mark.parametrize("pieces", [False], indirect=True)
def test_merges_that_build_on_an_authors_own_symbols_are_passed_over(tmp_path, pieces):
    """Gemma's tokenizer.json has runs of spaces as added tokens and in its merges; its `.model` file is the judge."""
    import sentencepiece

    theirs = sentencepiece.SentencePieceProcessor(model_file=str(pieces / "tokenizer.model"))
    vocabulary = {theirs.id_to_piece(number): number for number in range(theirs.vocab_size())}
    ways = [
        (theirs.get_score(number), piece[:cut], piece[cut:])
        for piece, number in vocabulary.items()
        for cut in range(1, len(piece))
    ]
    known = [way for way in ways if way[1] in vocabulary and way[2] in vocabulary]
    merges = [(left, right) for _, left, right in sorted(known, key=lambda way: -way[0])]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("\n\n", "▁▁", "▁▁▁")])
    assert ("▁", "▁▁") in merges
    more = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "chat_template": None}
    write_gguf(with_tokenizer(tmp_path / "model", pieces, backend, **more), tmp_path / "m.gguf", kind="f32")
    with LlamaCpp(tmp_path / "m.gguf") as llama:
        assert [text for text in TEXTS if theirs.encode(text) != llama.encode(text)] == []


@pytest.mark.parametrize("pieces", [True], indirect=True)
def test_a_tokenizer_json_as_transformers_makes_it_of_a_sentencepiece_model(tmp_path, pieces):
    """Its pipelines are spelled in many ways; all are known, and a chat that begins with a marker can be exact."""
    source = load_tokenizer(pieces)
    model = json.loads(source.backend.to_str())["model"]
    replace_spaces = normalizers.Replace(" ", "▁")
    for number, (normalizer, pre_tokenizer, prefix) in enumerate(
        [
            (normalizers.Sequence([normalizers.Prepend("▁"), replace_spaces]), None, True),
            (None, pre_tokenizers.Metaspace("▁", "always", split=False), True),
            (None, pre_tokenizers.Metaspace("▁", "first", split=False), True),
            (None, pre_tokenizers.Metaspace("▁", "never", split=False), False),
            (replace_spaces, pre_tokenizers.Split(" ", "merged_with_previous"), False),
        ]
    ):
        raw = {"version": "1.0", "model": model, "added_tokens": []}
        backend = Tokenizer.from_str(json.dumps(raw))
        if normalizer is not None:
            backend.normalizer = normalizer
        if pre_tokenizer is not None:
            backend.pre_tokenizer = pre_tokenizer
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
        more = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "chat_template": None}
        folder = with_tokenizer(tmp_path / f"model{number}", pieces, backend, **more)
        vocabulary = read_vocabulary(load_tokenizer(folder), num_rows=1510, config={})
        assert vocabulary.fields["tokenizer.ggml.add_space_prefix"] is prefix
        write_gguf(folder, tmp_path / "m.gguf", kind="f32")
        texts = [text for text in TEXTS if not text.startswith((" ", "\u3000"))]
        assert different(tmp_path / "m.gguf", folder, texts) == [], number


def refused(folder: Path, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_vocabulary(load_tokenizer(folder), num_rows=5000, config={})


@pytest.mark.parametrize(
    ("pre_tokenizer", "words"),
    [
        (byte_level(split(r"\w+|\s+")), r"the split pattern is `\\w\+"),
        (byte_level(pre_tokenizers.Punctuation()), "`Punctuation` is not supported"),
        (byte_level(split(r"\p{N}{1,3}", "removed", True)), "`Split` is not supported"),
        (byte_level(), "the split pattern is empty"),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), "space is added before the text"),
        (pre_tokenizers.Sequence([byte_level(), pre_tokenizers.Whitespace()]), "last step is `Whitespace`"),
    ],
)
def test_cuts_that_llama_cpp_does_not_know_are_refused(tmp_path, weights, vocabulary, pre_tokenizer, words):
    """A guess would open and answer, a little worse than it could."""
    refused(with_tokenizer(tmp_path / "model", weights, bpe(vocabulary, pre_tokenizer)), words)


def test_text_that_is_changed_first_is_refused(tmp_path, weights, vocabulary):
    backend = bpe(vocabulary, SPELLINGS["SmolLM2"][0])
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    refused(with_tokenizer(tmp_path / "model", weights, backend), "`Lowercase`")


def test_whole_words_before_merges_are_refused_only_where_it_matters(tmp_path, weights):
    """Qwen's cuts have no such rule in llama.cpp; merges that make every word give the same without it."""
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "ab", "abc"]
    for merges, is_refused in (([("a", "b"), ("ab", "c")], False), ([("a", "b")], True)):
        vocabulary = (tokens, [" ".join(pair) for pair in merges])
        backend = bpe(vocabulary, SPELLINGS["Qwen 2"][0], whole_first=True)
        folder = with_tokenizer(tmp_path / f"model{is_refused}", weights, backend)
        if is_refused:
            refused(folder, "`ignore_merges` is true")
        else:
            assert (
                read_vocabulary(load_tokenizer(folder), num_rows=5000, config={}).fields["tokenizer.ggml.pre"]
                == "qwen2"
            )


def test_vocabularies_of_other_kinds_are_refused(tmp_path, weights, pieces):
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    refused(with_tokenizer(tmp_path / "words", weights, word_piece), "type `WordPiece`")
    unigram = Tokenizer(models.Unigram([("a", 0.0)], 0))
    refused(with_tokenizer(tmp_path / "unigram", weights, unigram), "type `Unigram`")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=900, show_progress=False))
    refused(with_tokenizer(tmp_path / "trained", weights, trained), "not those of a SentencePiece model")


def test_a_sentencepiece_model_that_rewrites_text_is_refused(tmp_path):
    folder = write_pieces(tmp_path / "model", num_pieces=700, normalization_rule_name="nmt_nfkc")
    refused(folder, "treat spaces differently")


def test_a_tokenizer_without_a_template_has_none_in_the_file(tmp_path):
    folder = save(tiny("llama-tied", num_hidden_layers=1), tmp_path / "model")
    write_tiny_model(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    write_gguf(folder, tmp_path / "m.gguf", kind="f32")
    assert "tokenizer.chat_template" not in gguf.GGUFReader(tmp_path / "m.gguf").fields
