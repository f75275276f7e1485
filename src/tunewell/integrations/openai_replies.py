"""What is sent back: OpenAI's own objects, filled in."""

import time
import uuid
from collections.abc import Iterator
from typing import Any, Literal

from openai.types import CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel

Finish = Literal["stop", "length"]


class Reply:
    """One reply: the parts that all its objects share."""

    def __init__(self, model: str) -> None:
        self._shared: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, finish: Finish, usage: CompletionUsage) -> dict[str, Any]:
        """Give the reply as one object."""
        message = ChatCompletionMessage(role="assistant", content=text, refusal=None)
        choice = Choice(index=0, message=message, finish_reason=finish, logprobs=None)
        return _as_sent(ChatCompletion(**self._shared, object="chat.completion", choices=[choice], usage=usage))

    def first(self) -> dict[str, Any]:
        """Give the chunk that opens a stream."""
        return self._chunk([ChunkChoice(index=0, delta=ChoiceDelta(role="assistant", content=""), finish_reason=None)])

    def piece(self, text: str) -> dict[str, Any]:
        """Give a chunk with more of the text."""
        return self._chunk([ChunkChoice(index=0, delta=ChoiceDelta(content=text), finish_reason=None)])

    def ending(self, finish: Finish, usage: CompletionUsage | None) -> Iterator[dict[str, Any]]:
        """Give the chunks that close a stream: how it ended and, where asked for, what it took."""
        yield self._chunk([ChunkChoice(index=0, delta=ChoiceDelta(), finish_reason=finish)])
        if usage is not None:
            yield self._chunk([], usage=usage)

    def _chunk(self, choices: list[ChunkChoice], **more: Any) -> dict[str, Any]:
        return _as_sent(ChatCompletionChunk(**self._shared, object="chat.completion.chunk", choices=choices, **more))


def usage_of(prompt_tokens: int, completion_tokens: int) -> CompletionUsage:
    """Count what a reply took."""
    return CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def model_entry(name: str, created: int) -> dict[str, Any]:
    """Describe the model."""
    return _as_sent(Model(id=name, created=created, object="model", owned_by="tunewell"))


def _as_sent(value: BaseModel) -> dict[str, Any]:
    # What was not set is not sent; what was set to nothing, such as a `finish_reason` on the way, is sent as null.
    return value.model_dump(mode="json", exclude_unset=True)
