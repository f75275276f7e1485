"""Tool calls and thinking in the forms of other tools: they reach the model's template in the form that it renders."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
from tiny import prepare, write_jsonl

from tunewell import open_corpus
from tunewell.data.rows.formats import Converter
from tunewell.data.templates.chat_template import ChatTemplate
from tunewell.data.templates.tool_calls import fit_template
from tunewell.data.tokenizers.load import load_tokenizer

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}%s<|im_end|>\n"
LOOP = (
    "{%% if tools %%}<|im_start|>system\nTOOLS {{ tools | tojson }}<|im_end|>\n{%% endif %%}{%% for m in messages %%}%s"
)
CALLS = "{%% for c in m.tool_calls or [] %%}<call>{{ c.function.name }} %s</call>{%% endfor %%}"
END = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OBJECT_TEMPLATE = LOOP % (TURN % (CALLS % "{{ c.function.arguments | tojson }}")) + END
TEXT_TEMPLATE = LOOP % (TURN % (CALLS % "{{ '' + c.function.arguments }}")) + END
BOTH = [("object.jinja", OBJECT_TEMPLATE), ("text.jinja", TEXT_TEMPLATE)]

ARGUMENTS = {"city": "Köln"}
JSON_ARGUMENTS = '{"city": "Köln"}'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
HERMES_SYSTEM = (
    "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. "
    f"Here are the available tools: <tools> {json.dumps(TOOLS)} </tools> For each function call return a json object "
    "with function name and arguments within <tool_call></tool_call> XML tags as follows:\n<tool_call>\n"
    '{"arguments": <args-dict>, "name": <function-name>}\n</tool_call>'
)
QWEN_SYSTEM = (
    "Be brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ASKED = {"role": "user", "content": "Weather?"}
RESULT = {"role": "tool", "content": "sunny"}
ANSWER = {"role": "assistant", "content": "It is sunny."}


def called(**message) -> dict:
    return {"role": "assistant", "content": None, **message}


FORMS = {
    "openai": {
        "messages": [
            ASKED,
            called(
                tool_calls=[
                    {
                        "type": "function",
                        "function": {"name": "weather", "arguments": JSON_ARGUMENTS},
                    }
                ]
            ),
            RESULT,
            ANSWER,
        ],
        "tools": TOOLS,
    },
    "openai, before 2024": {
        "messages": [
            ASKED,
            called(function_call={"name": "weather", "arguments": JSON_ARGUMENTS}),
            {"role": "function", "name": "weather", "content": "sunny"},
            ANSWER,
        ],
        "functions": TOOLS,
    },
    "hermes": {
        "conversations": [
            {"from": "system", "value": HERMES_SYSTEM},
            {"from": "human", "value": "Weather?"},
            {"from": "gpt", "value": CALL_TEXT},
            {"from": "tool", "value": "<tool_response>\nsunny\n</tool_response>"},
            {"from": "gpt", "value": "It is sunny."},
        ]
    },
    "qwen": {
        "messages": [
            {"role": "system", "content": QWEN_SYSTEM},
            ASKED,
            {"role": "assistant", "content": CALL_TEXT},
            {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"},
            ANSWER,
        ]
    },
    "llama-factory": {
        "conversations": [
            {"from": "human", "value": "Weather?"},
            {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": ARGUMENTS})},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "It is sunny."},
        ],
        "tools": json.dumps(TOOLS),
    },
    "anthropic": {
        "messages": [
            ASKED,
            called(content=[{"type": "tool_use", "id": "1", "name": "weather", "input": ARGUMENTS}]),
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "sunny"}]},
            ANSWER,
        ],
        "tools": TOOLS,
    },
}


def documents(folder: Path) -> list[tuple[str, str]]:
    tokenizer = load_tokenizer(folder / "corpus" / "tokenizer").backend
    return [
        (
            tokenizer.decode(document.input_ids, skip_special_tokens=False),
            tokenizer.decode([label for label in document.labels if label != -100], skip_special_tokens=False),
        )
        for document in open_corpus(folder / "corpus")
    ]


def prepared(folder: Path, model: Path, row: dict, *sets: str) -> tuple[dict, list[tuple[str, str]]]:
    write_jsonl(folder / "rows.jsonl", [row])
    report = prepare(folder, model, "rows.jsonl", sets=["data.held_out=0.0", *sets])
    assert report["rows_in"] == report["documents"] + sum(report["dropped"].values())
    return report, documents(folder)


@pytest.mark.parametrize(("template", "text"), BOTH)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_tool_call_gives_the_same_document(tiny_model, tmp_path, form, template, text):
    """Escaped JSON in JSON, or another model's tags as text, teach a call that no program can parse."""
    (tmp_path / template).write_text(text, encoding="utf-8")
    report, [(document, supervised)] = prepared(tmp_path, tiny_model, FORMS[form], f"template.name={template}")
    call = '<call>weather {"city": "Köln"}</call><|im_end|>'
    system = "<|im_start|>system\nBe brief.<|im_end|>\n" if form == "qwen" else ""
    assert document.rstrip("\n") == (
        f"<|im_start|>system\nTOOLS {json.dumps(TOOLS)}<|im_end|>\n{system}<|im_start|>user\nWeather?<|im_end|>\n"
        f"<|im_start|>assistant\n{call}\n<|im_start|>tool\nsunny<|im_end|>\n"
        "<|im_start|>assistant\nIt is sunny.<|im_end|>"
    )
    assert supervised == f"{call}It is sunny.<|im_end|>"
    assert not report["notes"]


def test_a_template_without_tool_calls_keeps_them_as_text(tiny_model, tmp_path):
    """What the template cannot render must not vanish from the text."""
    _, [(_, supervised)] = prepared(tmp_path, tiny_model, FORMS["hermes"])
    assert supervised == f"{CALL_TEXT}<|im_end|>It is sunny.<|im_end|>"


def test_a_template_that_mentions_tool_calls_and_writes_none_is_noticed(tiny_model, tmp_path):
    """DeepSeek's R1 renders a call only if the content is null, so the reply was empty without a word."""
    text = OBJECT_TEMPLATE.replace("m.tool_calls or []", "(m.tool_calls if m.content is none else [])")
    (tmp_path / "t.jinja").write_text(text, encoding="utf-8")
    openai = {"messages": [{**turn, "content": turn["content"] or "Wait."} for turn in FORMS["openai"]["messages"]]}
    report, _ = prepared(tmp_path, tiny_model, openai, "template.name=t.jinja")
    assert report["notes"] == {"tool_calls_not_rendered": 1}
    _, [(_, supervised)] = prepared(tmp_path, tiny_model, FORMS["hermes"], "template.name=t.jinja")
    assert supervised == f"{CALL_TEXT}<|im_end|>It is sunny.<|im_end|>"


def test_a_call_that_is_no_json_stays_text(tiny_model, tmp_path):
    """Nothing is guessed."""
    (tmp_path / "t.jinja").write_text(OBJECT_TEMPLATE, encoding="utf-8")
    broken = "<tool_call>\n{weather}\n</tool_call>"
    row = {"messages": [ASKED, {"role": "assistant", "content": broken}]}
    assert prepared(tmp_path, tiny_model, row, "template.name=t.jinja")[1][0][1] == f"{broken}<|im_end|>"


THOUGHTS = {
    "tags": {"content": "<think>\nhm\n</think>\n\nYes."},
    "without the opening tag": {"content": "hm\n</think>\nYes."},
    "other tags": {"content": "<thinking>hm</thinking> Yes."},
    "a field": {"content": "Yes.", "reasoning_content": "hm"},
    "blocks": {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yes."}]},
}


@pytest.mark.parametrize("form", THOUGHTS)
def test_thinking_is_kept_or_stripped_as_configured(tiny_model, tmp_path, form):
    """Whether a model should think aloud is the user's choice, and what is removed is counted."""
    row = {"messages": [{"role": "user", "content": "Ok?"}, {"role": "assistant", **THOUGHTS[form]}]}
    report, [(_, supervised)] = prepared(tmp_path, tiny_model, row, "template.name=chatml", "data.clean.thinking=strip")
    assert supervised == "Yes.<|im_end|>"
    assert report["notes"] == {"thinking_stripped": 1}
    report, [(_, supervised)] = prepared(tmp_path, tiny_model, row, "template.name=chatml")
    assert "hm" in supervised and "Yes." in supervised
    assert not report["notes"]


@pytest.mark.parametrize("form", ["a field", "blocks"])
def test_thinking_that_the_template_does_not_render_is_counted(tiny_model, tmp_path, form):
    """`thinking: keep` promises to supervise it, and it vanished without a word."""
    row = {"messages": [{"role": "user", "content": "Ok?"}, {"role": "assistant", **THOUGHTS[form]}]}
    report, [(_, supervised)] = prepared(tmp_path, tiny_model, row)
    assert (supervised, report["notes"]) == ("Yes.<|im_end|>", {"thinking_not_rendered": 1})


def test_a_reply_of_thinking_only_is_empty_without_it(tiny_model, tmp_path):
    """It would teach the model to say nothing."""
    rows = [
        {"messages": [{"role": "user", "content": "Ok?"}, {"role": "assistant", "content": text}]}
        for text in ("<think>hm</think>", "Yes.", "I <think> so.")
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    sets = ["data.held_out=0.0", "data.clean.thinking=strip"]
    report = prepare(tmp_path, tiny_model, "rows.jsonl", sets=sets)
    assert (report["documents"], report["dropped"]) == (2, {"empty_reply": 1})


REAL = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"  # found without importing it
CALLS_IN = {
    "qwen2_5": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    "llama3_2": '{"name": "weather", "parameters": {"city": "Köln"}}',
    "deepseekv3": 'weather\n```json\n{"city": "Köln"}\n```',
}


@pytest.mark.parametrize("name", CALLS_IN)
def test_real_templates_render_every_form_in_their_own(name):
    """Templates of models, as TRL ships them: some take objects, some take text, and each has its own tags."""
    template = ChatTemplate((REAL / f"{name}.jinja").read_text(encoding="utf-8"), special_tokens={"bos_token": "<s>"})
    texts = {}
    for form in ("openai", "openai, before 2024", "hermes", "llama-factory", "anthropic"):
        conversation, _ = Converter().convert(copy.deepcopy(FORMS[form]))
        fit_template(conversation, template)
        texts[form] = template.render(conversation.messages, conversation.tools)
        assert CALLS_IN[name] in texts[form], form
    if "tools" in template.variables:
        assert len(set(texts.values())) == 1
