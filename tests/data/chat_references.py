"""References for the tests of masks: conversations of every kind, tokenizers, and templates written out by hand."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizer_references import random_texts
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tunewell.data.encoding.encoder import EncodedDocuments, Encoder, PlannedDocument
from tunewell.data.masking.masker import ASSISTANT_REPLIES, Masker, SupervisionRule
from tunewell.data.rows.conversation import Conversation, Message
from tunewell.data.templates.chat_template import ChatTemplate
from tunewell.data.tokenizers.load import LoadedTokenizer

CHATML_MARKERS = ["<|im_start|>", "<|im_end|>"]
MARKERS = [
    *CHATML_MARKERS,
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<s>", "</s>"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city — now.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]

# Conversations.


@dataclass(frozen=True)
class Features:
    """What the conversations for a template may hold."""

    system: bool = True
    tools: bool = False
    thinking: bool = False
    call_ids: bool = False
    """Whether calls and results carry ids of nine letters."""


@cache
def conversations(count: int, seed: int, features: Features) -> list[Conversation]:
    """Make conversations of one to four questions, with awkward spaces, scripts and emoji in them."""
    draw = random.Random(seed)
    texts = _texts(seed)
    return [_conversation(draw, texts, features) for _ in range(count)]


def _texts(seed: int) -> Iterator[str]:
    plain = [
        "Yes.",
        "no",
        "The capital of France is Paris.",
        "5",
        "a",
        "été\u0301 e\u0301",
        "你好，世界",
        "👩‍👩‍👧 👍🏽!",
        "x = 1;\n\n\ty",
    ]
    forbidden = (*MARKERS, "think>", "\U000f0000")
    draw = random.Random(seed + 1)
    pool = [*plain * 8, *random_texts(1500, seed=seed + 2)]
    while True:
        text = draw.choice(pool)
        lead = draw.choice(["", "", "", " ", "  ", "\n", "\n\n ", "\t"])
        trail = draw.choice(["", "", "", " ", "  ", "\n", " \n"])
        if text.strip() and not any(spelled in text for spelled in forbidden):
            yield lead + text + trail


def _conversation(draw: random.Random, texts: Iterator[str], features: Features) -> Conversation:
    messages: list[Message] = []
    if features.system and draw.random() < 0.5:
        messages.append({"role": "system", "content": next(texts)})
    tools = TOOLS if features.tools and draw.random() < 0.5 else None
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": next(texts)})
        if tools and draw.random() < 0.5:
            messages += _tool_round(draw, texts, features)
        reply: Message = {"role": "assistant", "content": next(texts)}
        if features.thinking and draw.random() < 0.4:
            reply["reasoning_content"] = next(texts)
        messages.append(reply)
    return Conversation(messages, tools=tools)


def _tool_round(draw: random.Random, texts: Iterator[str], features: Features) -> list[Message]:
    arguments = {"city": next(texts), "days": draw.randint(1, 9), "exact": True}
    call: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    ids = {"id": "abcdef123"} if features.call_ids else {}
    content = next(texts) if draw.random() < 0.5 and not features.call_ids else ""
    thinking = {"reasoning_content": next(texts)} if features.thinking and draw.random() < 0.4 else {}
    result: Message = {"role": "tool", "content": next(texts), "name": "get_weather"}
    if features.call_ids:
        result["tool_call_id"] = "abcdef123"
    return [{"role": "assistant", "content": content, "tool_calls": [{**call, **ids}], **thinking}, result]


# Templates, written out: each gives the text in pieces, with a mark on those that are learned.

Pieces = list[tuple[str, bool]]
Reference = Callable[[Conversation], Pieces]


def tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _smollm2(conversation: Conversation) -> Pieces:
    pieces: Pieces = []
    if conversation.messages[0]["role"] != "system":
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for message in conversation.messages:
        is_reply = message["role"] == "assistant"
        pieces += [
            (f"<|im_start|>{message['role']}\n", False),
            (message["content"] + "<|im_end|>", is_reply),
            ("\n", False),
        ]
    return pieces


def _chatml(conversation: Conversation) -> Pieces:
    pieces: Pieces = []
    messages = conversation.messages
    if conversation.tools:
        system = ""
        if messages[0]["role"] == "system":
            system, messages = messages[0]["content"] + "\n\n", messages[1:]
        listed = "".join(tojson(tool) + "\n" for tool in conversation.tools)
        frame = (
            "To call one, answer with its name and arguments:\n"
            '<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>'
        )
        text = f"<|im_start|>system\n{system}You can call these tools:\n<tools>\n{listed}</tools>\n{frame}<|im_end|>\n"
        pieces.append((text, False))
    for message in messages:
        is_reply = message["role"] == "assistant"
        pieces += [
            (f"<|im_start|>{message['role']}\n", False),
            (_with_calls(message) + "<|im_end|>", is_reply),
            ("\n", False),
        ]
    return pieces


def _with_calls(message: Message) -> str:
    thinking = message.get("reasoning_content")
    calls = [
        f'<tool_call>\n{{"name": {tojson(call["name"])}, "arguments": {tojson(call["arguments"])}}}\n</tool_call>'
        for call in (call["function"] for call in message.get("tool_calls", []))
    ]
    words = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return (f"<think>\n{thinking}\n</think>\n\n" if thinking else "") + words


def _zephyr(conversation: Conversation) -> Pieces:
    pieces: Pieces = []
    for message in conversation.messages:
        is_reply = message["role"] == "assistant"
        pieces += [(f"<|{message['role']}|>\n", False), (message["content"] + "</s>", is_reply), ("\n", False)]
    return pieces


def _llama3(conversation: Conversation) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    for message in conversation.messages:
        header = f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n"
        pieces += [(header, False), (message["content"].strip() + "<|eot_id|>", message["role"] == "assistant")]
    return pieces


def _gemma(conversation: Conversation) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    messages, system = conversation.messages, ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"].strip() + "\n\n", messages[1:]
    for message in messages:
        is_reply = message["role"] == "assistant"
        pieces += [(f"<start_of_turn>{'model' if is_reply else 'user'}\n{system}", False)]
        pieces += [(message["content"].strip() + "<end_of_turn>", is_reply), ("\n", False)]
        system = ""
    return pieces


def _alpaca(conversation: Conversation) -> Pieces:
    intro = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    )
    return _in_words(conversation, "### Instruction:\n", "### Response:\n", intro)


def _human_assistant(conversation: Conversation) -> Pieces:
    return _in_words(conversation, "Human: ", "Assistant:\n", "")


def _in_words(conversation: Conversation, question: str, reply: str, intro: str) -> Pieces:
    pieces: Pieces = []
    messages = conversation.messages
    if messages[0]["role"] == "system":
        intro, messages = messages[0]["content"] + "\n\n", messages[1:]
    pieces.append((intro, False))
    for index, message in enumerate(messages):
        if message["role"] == "user":
            pieces.append((question + message["content"] + "\n\n", False))
        else:
            after = "\n\n" if index + 1 < len(messages) else ""
            pieces += [(reply, False), (message["content"] + "</s>", True), (after, False)]
    return pieces


def _instruct(conversation: Conversation) -> Pieces:
    pieces: Pieces = [("<s>", False)]
    messages, system = conversation.messages, ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    for message in messages:
        if message["role"] == "user":
            pieces.append((f"[INST] {system}{message['content']} [/INST]\n", False))
            system = ""
        else:
            pieces.append((message["content"] + "</s>", True))
    return pieces


REFERENCES: dict[str, Reference] = {
    "smollm2": _smollm2,
    "chatml": _chatml,
    "zephyr": _zephyr,
    "llama3": _llama3,
    "gemma": _gemma,
    "alpaca": _alpaca,
    "instruct": _instruct,
    "human-assistant": _human_assistant,
}
FEATURES = {"chatml": Features(tools=True, thinking=True)}

# Tokenizers.


def train_bpe(folder: Path, *, normalizer: str | None = None, markers: list[AddedToken] | None = None) -> Path:
    """Train a small byte-level BPE tokenizer whose tokens reach across spaces and line ends, and save it."""
    backend = Tokenizer.from_str(_trained_bpe())
    if normalizer:
        backend.normalizer = getattr(normalizers, normalizer)()
    backend.add_tokens(markers or [AddedToken(text, special=True, normalized=False) for text in MARKERS])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"} if not markers else {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def _trained_bpe() -> str:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    words = [
        "\n  x\n\n  y",
        "assistant\n\n",
        "user\n",
        "  \n  \n",
        "### Response:\n",
        "[/INST] the",
        " [INST] the",
    ] * 30
    backend.train_from_iterator([*random_texts(1000, seed=5), *words], trainer)
    return backend.to_str()


def train_sentencepiece(folder: Path, **options: Any) -> Path:
    """Train a small SentencePiece model and give its file."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.txt"
    lines = [text.replace("\n", " ") for text in random_texts(1500, seed=7)]
    corpus.write_text("\n".join([*lines, *["user assistant system Human: the weather"] * 50]))
    settings = {
        "vocab_size": 700,
        "hard_vocab_limit": False,
        "character_coverage": 0.99,
        "pad_id": 3,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "tokenizer"), **(settings | options)
    )
    return folder / "tokenizer.model"


# Our side, and what is to be expected of it.


@dataclass
class Ours:
    """Masker and encoder for one tokenizer and template."""

    tokenizer: LoadedTokenizer
    source: str
    rule: SupervisionRule = ASSISTANT_REPLIES
    arguments: dict[str, Any] = field(default_factory=dict)
    date: str = "2025-01-01"

    def __post_init__(self) -> None:
        template = ChatTemplate(
            self.source, special_tokens=self.tokenizer.special_tokens, arguments=self.arguments, date=self.date
        )
        self.masker = Masker(template, self.tokenizer.added, self.rule)
        self.encoder = Encoder(self.tokenizer, self.masker.frame.turn_markers)

    def encode(self, *some: Conversation) -> EncodedDocuments:
        return self.encoder.encode([PlannedDocument(*self.masker.plan(one)) for one in some])

    def documents(self, some: list[Conversation]) -> list[tuple[list[int], list[bool], int]]:
        """Give ids, mask and the number of boundary tokens of each conversation, encoded together."""
        encoded = self.encode(*some)
        ends = encoded.lengths.cumsum().tolist()
        begins = [0, *ends[:-1]]
        return [
            (encoded.tokens[a:b].tolist(), encoded.supervised[a:b].tolist(), int(count))
            for a, b, count in zip(begins, ends, encoded.boundary, strict=True)
        ]

    def supervised_text(self, conversation: Conversation) -> str:
        [(ids, learned, _)] = self.documents([conversation])
        chosen = [token for token, is_supervised in zip(ids, learned, strict=True) if is_supervised]
        return self.tokenizer.backend.decode(chosen, skip_special_tokens=False)


def messages_of(*turns: tuple[str, str]) -> Conversation:
    """Write a conversation as (role, content) pairs."""
    return Conversation([{"role": role, "content": content} for role, content in turns])


def bare_backend(backend: Tokenizer) -> Tokenizer:
    """Copy a tokenizer with offsets that cover all of each token."""
    config = json.loads(backend.to_str())
    return Tokenizer.from_str(json.dumps(config | {"post_processor": None}))


def expected_mask(backend: Tokenizer, pieces: Pieces) -> tuple[list[int], list[bool], int]:
    """Encode the whole text and mark the tokens of learned pieces, the first of which follows the prompt's last token.

    Count the tokens that lie across an end.
    """
    text = "".join(piece for piece, _ in pieces)
    spans: list[tuple[int, int]] = []
    at = 0
    for piece, is_supervised in pieces:
        if is_supervised and piece:
            spans.append((at, at + len(piece)))
        at += len(piece)
    encoding = backend.encode(text, add_special_tokens=False)
    offsets = _by_byte(encoding.tokens, encoding.offsets, text)
    learned = [False] * len(offsets)
    for a, b in spans:
        first = len(backend.encode(text[:a], add_special_tokens=False).ids)
        last = max((at for at, (_, y) in enumerate(offsets) if y <= b), default=-1)
        learned[first : last + 1] = [True] * (last + 1 - first)
    num_boundary = sum(any(x < b < y for _, b in spans) for x, y in offsets)
    learned[0] = False
    if sum(learned) <= len(spans):  # ends only: a document that teaches nothing else is dropped
        learned = [False] * len(learned)
    return encoding.ids, learned, num_boundary


def _by_byte(tokens: list[str], offsets: list[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Tell the letter of each byte token, for tokenizers that give only the place of the run it stands in."""
    exact: list[tuple[int, int]] = []
    for (x, y), run in groupby(range(len(tokens)), key=offsets.__getitem__):
        places = [(place, place + 1) for place in range(x, y) for _ in text[place].encode()]
        own = [tokens[index] for index in run]
        spelled = [f"<0x{byte:02X}>" for byte in text[x:y].encode()]
        exact += places if own == spelled else [(x, y)] * len(own)
    return exact
