"""Split turns with Anthropic's content blocks (`tool_use`, `tool_result`, `thinking`) into messages."""

from typing import Any

from tunewell.data.rows.conversation import is_object


def expand_blocks(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a turn with Anthropic's content blocks: tool results are messages of their own."""
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thinking: list[str] = []
    rest: list[Any] = []
    for block in turn["content"]:
        kind = block.get("type") if is_object(block) else None
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append({"role": "tool", "content": block.get("content"), "tool_call_id": block.get("tool_use_id")})
        elif kind in ("thinking", "reasoning"):
            thinking.append(str(block.get(kind) or block.get("text") or ""))
        else:
            rest.append(block)
    message = {**turn, "content": rest}
    if calls:
        message["tool_calls"] = calls
    if any(thinking):
        message["reasoning_content"] = "\n\n".join(filter(None, thinking))
    return [*results, *([message] if rest or calls or not results else [])]
