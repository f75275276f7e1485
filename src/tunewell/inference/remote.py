"""A conversation with a model behind an OpenAI-compatible address: `http://HOST/v1#MODEL`. Used only if it is named."""

from collections.abc import Generator, Iterator
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.remote_api import RemoteApi
from tunewell.core.units import count
from tunewell.data.rows.conversation import Message
from tunewell.inference.chat_options import ChatOptions

_KEY = "TUNEWELL_MODEL_KEY"
_CONTEXT_TOKENS = 4096
"""Assumed, because the API does not report it."""
_BYTES_PER_TOKEN = 3


class RemoteChat:
    """A conversation with a model on a server, one streamed answer at a time."""

    def __init__(self, address: str, options: ChatOptions) -> None:
        """Split the address. Nothing is sent before the first message."""
        self.name = address
        self._api = RemoteApi(address, what="the server", key_variable=_KEY)
        self.options = options
        self.messages: list[Message] = []

    def prompt_for(self, text: str) -> list[int]:
        """Raise UserError if a message is certainly too long. The server's tokenizer is unknown, so this is a guess."""
        if len(text.encode()) > _BYTES_PER_TOKEN * _CONTEXT_TOKENS:
            raise UserError(f"the message is too long: more than about {count(_CONTEXT_TOKENS)} tokens")
        return []

    def reply(self, text: str, *, sent: str | None = None) -> Generator[str, None, None]:
        """Send a message and yield the answer as it arrives. `sent` is what the model gets instead of `text`."""
        question = {"role": "user", "content": text}
        body = self._body(text if sent is None else sent, is_streamed=True)
        parts: list[str] = []
        try:
            for part in self._streamed(body):
                parts.append(part)
                yield part
        finally:
            if parts:
                self.messages += [question, {"role": "assistant", "content": "".join(parts)}]

    def whole_reply(self, text: str) -> tuple[str, str | None]:
        """Return the complete answer to a single message, and why it ended.

        Unlike a stream, an answer that is cut off on the way is an error.
        """
        found = self._api.answer("chat/completions", self._body(text, is_streamed=False))
        try:
            [choice, *_] = found["choices"]
            if isinstance(said := choice["message"].get("content") or "", str):
                return said, choice.get("finish_reason")
        except (AttributeError, KeyError, TypeError, ValueError):
            pass
        raise self._api.invalid_format()

    def _body(self, sent: str, *, is_streamed: bool) -> dict[str, Any]:
        return {
            "model": self._api.model,
            "messages": [*self.messages, {"role": "user", "content": sent}],
            "stream": is_streamed,
            "temperature": self.options.temperature,
            "max_tokens": self.options.length,
            "seed": self.options.seed,
        }

    def _streamed(self, body: dict[str, Any]) -> Iterator[str]:
        for line in self._api.lines("chat/completions", body):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            try:
                choices = self._api.parse(data).get("choices") or [{}]
                text = (choices[0].get("delta") or {}).get("content") or ""
            except (AttributeError, IndexError, KeyError, TypeError):
                raise self._api.invalid_format() from None
            if not isinstance(text, str):
                raise self._api.invalid_format()
            if text:
                yield text
