"""Tokens shown one by one."""

from tunewell.data.tokenizers.load import joined_texts, load_tokenizer, token_texts


def test_the_texts_of_a_text_s_tokens_join_to_the_text(tiny_model):
    """Guards the byte alphabet: a wrong map shows wrong letters."""
    tokenizer = load_tokenizer(tiny_model)
    text = "Hello,  world\n\tnaïve"
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    whole = [part for part in token_texts(tokenizer, ids) if not part.startswith("<")]
    assert "".join(whole).startswith("Hello,  world\n\tna")


def test_a_part_of_a_character_is_shown_by_its_bytes(tiny_model):
    """Guards against replacement characters that hide what a token is."""
    tokenizer = load_tokenizer(tiny_model)
    ids = tokenizer.backend.encode("𝔘", add_special_tokens=False).ids
    shown = "".join(token_texts(tokenizer, ids))
    assert "\ufffd" not in shown
    assert "F0" in shown


def test_markers_are_shown_as_they_are(tiny_model):
    """Guards the preview's frame."""
    tokenizer = load_tokenizer(tiny_model)
    assert token_texts(tokenizer, [tokenizer.added["<|im_end|>"].id]) == ["<|im_end|>"]


def test_a_character_of_several_tokens_is_shown_once(tiny_model):
    """Guards pages on other scripts: bytes can neither be read nor searched for."""
    tokenizer = load_tokenizer(tiny_model)
    text = "a 𝔘𝔙 Łódź 東京"
    ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
    shown = joined_texts(tokenizer, ids)
    assert len(shown) == len(ids) and "" in shown
    assert "".join(shown) == text
    assert "F0" in "".join(joined_texts(tokenizer, ids[: shown.index("𝔘") + 1])), "an incomplete one is shown as bytes"
