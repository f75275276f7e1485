"""Modelfiles, read back by the rules of Ollama's own parser."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from modelfile_reader import Command, read_modelfile

from tunewell.core.errors import UserError
from tunewell.data.templates.chat_template import ChatTemplate, builtin_template
from tunewell.export.ollama.modelfile import modelfile
from tunewell.export.ollama.template import GoTemplate, derive_go_template, stop_texts

READ_BY_OLLAMA = Path(__file__).parent / "go" / "read_by_ollama.json"
"""Files, and the commands that Ollama's parser of August 2026 read from each, or that it read none."""
PLAIN = GoTemplate(
    text="{{ .Prompt }}", closing="<|im_end|>\n", next_question="<|im_end|>\n<|im_start|>user\n", num_checked=0
)


def template_of(name: str) -> GoTemplate:
    template = ChatTemplate(builtin_template(name), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return derive_go_template(lambda messages, asks: template.render(messages, add_generation_prompt=asks))


def values(text: str, name: str) -> list[str]:
    return [command.value for command in read_modelfile(text) if command.name == name]


@pytest.mark.parametrize("case", json.loads(READ_BY_OLLAMA.read_text(encoding="utf-8")), ids=lambda case: case["name"])
def test_the_reader_of_these_tests_reads_as_ollama_does(case):
    """Without this, the other tests would only show that two of our own programs agree."""
    if case["commands"] is None:
        with pytest.raises(ValueError):
            read_modelfile(case["text"])
    else:
        assert read_modelfile(case["text"]) == [Command(*command) for command in case["commands"]]


def test_a_modelfile_says_what_it_was_given():
    text = modelfile(
        "model-q4_k_m.gguf",
        template_of("llama3"),
        stops=["<|eot_id|>", "<|start_header_id|>", "<|eot_id|>"],
        context_length=8192,
        license="Apache-2.0\n\x0cThe licence\n",
    )
    assert read_modelfile(text) == [
        ("from", "./model-q4_k_m.gguf"),
        ("template", template_of("llama3").text),
        ("num_ctx", "8192"),
        ("stop", "<|eot_id|>"),
        ("stop", "<|start_header_id|>"),
        ("temperature", "0.0"),
        ("license", "Apache-2.0\nThe licence\n"),
    ]


def test_notes_become_comments_of_one_line_each():
    noted = replace(PLAIN, notes=("tools are left out", "two\nFROM lines"))
    text = modelfile("m.gguf", noted, stops=[], context_length=1)
    assert "# tools are left out\n# two FROM lines\n" in text
    assert values(text, "from") == ["./m.gguf"]


@given(st.text(alphabet=st.sampled_from("ab \t\n\r\"'{}\\#é世\u00a0\u200b\x0c<|>")))
@example('"')
@example('""')
@example('"""')
@example('a"""\nb')
@example('a"""')
@example('"""a')
@example('""\n')
@example('"\n"')
@example("")
@example(" a ")
def test_any_text_is_read_back_as_it_was_or_refused(text):
    """Quotes at the end of a line end a value early, and what cannot be printed is dropped: neither may happen."""
    try:
        written = modelfile("m.gguf", replace(PLAIN, text=text), stops=[], context_length=1)
    except UserError:
        assert '"""' in text or any(not character.isprintable() for character in text)
    else:
        assert values(written, "template") == [text]
    if text:
        try:
            written = modelfile("m.gguf", PLAIN, stops=[text, "<end>"], context_length=1)
        except UserError:
            return
        assert values(written, "stop") == list(dict.fromkeys([text, "<end>"]))


@pytest.mark.parametrize(("text", "reason"), [("a\u200bb", "drops"), ('end"""\nmore', "three quotes")])
def test_what_a_modelfile_cannot_say_is_refused(text, reason):
    with pytest.raises(UserError, match=reason):
        modelfile("m.gguf", replace(PLAIN, text=text), stops=[], context_length=512)


# Stops.


@pytest.mark.parametrize(
    ("name", "control", "expected"),
    [
        ("chatml", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], ("<|im_end|>", "<|im_start|>")),
        (
            "llama3",
            ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<s>"],
            ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        ),
        ("gemma", ["<end_of_turn>", "<start_of_turn>", "<s>", "<pad>"], ("<end_of_turn>", "<start_of_turn>")),
        ("zephyr", ["<s>", "</s>"], ("</s>",)),
        ("alpaca", ["</s>"], ("</s>",)),
        ("instruct", ["<s>", "</s>", "[INST]", "[/INST]"], ("</s>", "[INST]")),
        ("chatml", [], ("<|im_end|>",)),
    ],
)
def test_stops_are_what_ends_a_reply_or_begins_another_turn(name, control, expected):
    assert stop_texts(template_of(name), control_tokens=control) == expected


def test_without_control_tokens_the_text_of_the_next_turn_stops_a_reply():
    """Stopping at `User:` alone would cut replies that mention it; the line end before it belongs to the stop."""
    bare = replace(PLAIN, closing="\n\n", next_question="\n\nUser: ")
    assert stop_texts(bare, control_tokens=["<s>"]) == ("\n\nUser:",)
    assert stop_texts(replace(bare, next_question=""), control_tokens=[]) == ()
    assert values(modelfile("m.gguf", bare, stops=["\n\nUser:"], context_length=1), "stop") == ["\n\nUser:"]


def test_a_control_token_inside_another_is_not_taken_for_it():
    nested = replace(PLAIN, closing="<|end|><|e|>", next_question="")
    assert stop_texts(nested, control_tokens=["end", "<|e|>", "<|end|>"]) == ("<|end|>", "<|e|>")
