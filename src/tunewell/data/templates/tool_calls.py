"""Tool calls in the forms of other tools, converted to what the model's chat template expects.

OpenAI      `tool_calls` with arguments as JSON text; the older `function_call`
Hermes      `<tool_call>{...}</tool_call>` in replies, `<tool_response>` in tool turns, `<tools>` in the system message
Qwen        the same tags, with tool responses in turns of the user
"""

import json
import re
from functools import lru_cache
from typing import Any

from tunewell.data.rows.conversation import Conversation, Message, is_list, is_object, objects_in
from tunewell.data.templates.chat_template import ChatTemplate

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>\s*([\[{].*?)\s*</tools>", re.DOTALL)
_SYSTEM = re.compile(
    r"\s*You are a function calling AI model\b|(?P<own>.*?)\s*# Tools\n\nYou may call one or more functions\b",
    re.DOTALL,
)
"""The system messages of Hermes and of Qwen, which begins with the user's own text."""


def renders_tool_calls(template: ChatTemplate) -> bool:
    """Return True if the template writes tool calls. Some mention them and render only calls without any content."""
    return _argument_form(template) is not None


def fit_template(conversation: Conversation, template: ChatTemplate) -> None:
    """Convert tool calls in texts to `tool_calls`, and arguments to objects or text, as the template renders them."""
    form = _argument_form(template)
    if form is None:
        return
    if any("<tool" in message["content"] for message in conversation.messages):
        _convert_texts(conversation, has_tools="tools" in template.variables)
    for message in conversation.messages:
        for call in objects_in(message.get("tool_calls")):
            function = inner if is_object(inner := call.get("function")) else call
            arguments = function.get("arguments")
            if form is dict and isinstance(arguments, str) and (parsed := _object(arguments)) is not None:
                function["arguments"] = parsed
            elif form is str and is_object(arguments):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)


def _convert_texts(conversation: Conversation, *, has_tools: bool) -> None:
    messages: list[Message] = []
    learn: list[bool | None] = []
    weights = conversation.learn or [None] * len(conversation.messages)
    for message, weight in zip(conversation.messages, weights, strict=True):
        converted = _converted(message, conversation, has_tools=has_tools)
        messages += converted
        learn += [weight] * len(converted)
    conversation.messages = messages
    conversation.learn = learn if conversation.learn else None


def _converted(message: Message, conversation: Conversation, *, has_tools: bool) -> list[Message]:
    content, role = message["content"], message["role"]
    if role == "assistant" and (found := _CALL.findall(content)):
        calls = [_object(text) for text in found]
        if all(call is not None and isinstance(call.get("name"), str) for call in calls):
            text = _CALL.sub("", content).strip()
            return [{**message, "content": text, "tool_calls": [{"type": "function", "function": c} for c in calls]}]
    elif role in ("tool", "user") and (found := _RESPONSE.findall(content)) and not _RESPONSE.sub("", content).strip():
        return [{**message, "role": "tool", "content": text} for text in found]
    elif role == "system" and has_tools and conversation.tools is None and (known := _SYSTEM.match(content)):
        conversation.tools = _listed_tools(content)
        if conversation.tools is not None:
            return [{**message, "content": known["own"]}] if known["own"] else []
    return [message]


def _listed_tools(content: str) -> list[Any] | None:
    listed = _TOOLS.search(content)
    if listed is None:
        return None
    try:
        found: Any = json.loads(listed[1])
    except ValueError:
        found = [_object(line) for line in listed[1].splitlines() if line.strip()]
    tools: list[Any] = found if is_list(found) else [found]
    return tools if tools and all(is_object(tool) for tool in tools) else None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    return value if is_object(value) else None


@lru_cache(maxsize=64)
def _argument_form(template: ChatTemplate) -> type | None:
    """Return dict or str, the form of arguments that the template renders as JSON, or None if neither works."""
    if "tool_calls" not in template.source:
        return None
    arguments = {"probe": "value"}
    for form, given in ((dict, arguments), (str, json.dumps(arguments))):
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": given}}
        turns = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": "call00001", "name": "f"},
        ]
        for messages in (turns, turns[:2]):
            text = template.try_render(messages) or ""
            if "probe" in text and '\\"probe' not in text and "'probe'" not in text:
                return form
    return None
