"""Chat templates in the forms of today's families: channels, thinking that the prompt opens, tools, open turns.

They are written for these tests. Each has the markers and the order of its family, and few of its words.
"""

_TOOL_LIST = "{% if tools %}{{ START }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ STOP }}{% endif %}"


def _tools(start: str, stop: str) -> str:
    return _TOOL_LIST.replace("START", repr(start)).replace("STOP", repr(stop))


CHANNELS = (
    "<|start|>system<|message|>Channels: analysis, commentary, final." + _tools("# Tools ", "") + "<|end|>"
    "{% set last = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% if m.thinking and (m.tool_calls or loop.last) %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{% set last.name = m.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson }}{{ '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""gpt-oss: several parts in one reply; the name of a call is repeated in the header of its result."""

_XML_CALL = (
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<parameter=' + k + '>\n' ~ v ~ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}"
)
OPEN_THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    + _tools("<|im_start|>system\n<tools>", "</tools><|im_end|>\n")
    + "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    + _XML_CALL
    + "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Qwen3.5: the prompt opens the thinking; only replies after the last question have it."""

CLOSED_THINKING = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '</think>' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}"
    "{{ '<arg_key>' + k + '</arg_key><arg_value>' ~ v ~ '</arg_value>' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{{ '<|observation|>' + m.content }}{% else %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|></think>' }}{% endif %}"
)
"""GLM 4.7 without thinking: the prompt closes it, a row may open it; calls end with the next header."""

OPEN_TURNS = (
    "{% for m in messages %}{% set before = loop.previtem.role if loop.index0 else '' %}{% if m.role == 'assistant' %}"
    "{{ '<|turn>model\n' if before != 'tool' else '' }}"
    "{{ '<|channel>thought\n' + m.reasoning_content + '<channel|>' if m.reasoning_content else '' }}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + '{' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k ~ ':<|q|>' ~ v ~ '<|q|>' }}{% endfor %}"
    "{{ '}<tool_call|>' }}{% endfor %}{{ m.content }}{{ '' if m.tool_calls else '<turn|>\n' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|tool_response>response:' + m.name + '{value:<|q|>' + m.content + '<|q|>}<tool_response|>' }}"
    "{% else %}{{ '<|turn>' + m.role + '\n' + m.content + '<turn|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
"""Gemma 4: results of tools lie within the turn of the model, which has no end before them."""

SECTIONS = (
    "{% for m in messages %}{{ '<|open|>message role=\"' + m.role + '\"<|sep|>' }}{% if m.role == 'assistant' %}"
    "{{ '<|open|>think<|sep|>' + (m.reasoning_content or '') + '<|close|>think<|sep|>' }}"
    "{{ '<|open|>response<|sep|>' + m.content + '<|close|>response<|sep|>' }}"
    "{% for c in m.tool_calls or [] %}{{ '<|open|>call tool=\"' + c.function.name + '\"<|sep|>' }}"
    "{{ c.function.arguments | tojson }}{{ '<|close|>call<|sep|>' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|close|>message<|sep|><|end_of_msg|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|open|>message role=\"assistant\"<|sep|><|open|>think<|sep|>' }}{% endif %}"
)
"""Kimi K3: turns and their sections begin with the same marker."""

PLAIN_TOOLS = (
    "<|startoftext|>" + _tools("<|im_start|>system\nList of tools: ", "<|im_end|>\n") + "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""LFM2: it lists tools, and renders no calls."""

FAMILIES = {
    "channels": (CHANNELS, ("<|return|>", "<|end|>", "<|call|>")),
    "open thinking": (OPEN_THINKING, ("<|im_end|>",)),
    "closed thinking": (CLOSED_THINKING, ("<|user|>", "<|observation|>")),
    "open turns": (OPEN_TURNS, ("<turn|>", "<tool_call|>")),
    "sections": (SECTIONS, ("<|end_of_msg|>",)),
    "plain tools": (PLAIN_TOOLS, ("<|im_end|>",)),
}
"""The template of each form, and the tokens that end its replies."""
MARKERS = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|im_start|>", "<|im_end|>"),
    *("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<|turn>", "<turn|>", "<|q|>"),
    *("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "<|startoftext|>"),
)
TAGS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|tool_call>"),
    *("<tool_call|>", "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>"),
)
"""Added tokens that are not special."""
