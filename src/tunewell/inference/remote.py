"""A conversation with a model behind an OpenAI-compatible address: `http://HOST/v1#MODEL`. Used only if it is named."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.data.rows.conversation import Message
from tunewell.inference.chat import ChatOptions

_KEY = "TUNEWELL_MODEL_KEY"
_TIMEOUT_SECONDS = 300
_CONTEXT_TOKENS = 4096
"""Assumed, because the API does not tell it."""
_BYTES_PER_TOKEN = 3


class RemoteChat:
    """A conversation with a model on a server, one streamed answer at a time."""

    def __init__(self, address: str, options: ChatOptions) -> None:
        """Split the address. Nothing is sent before the first message."""
        self.name = address
        self._url, _, self._model = address.partition("#")
        if not self._model:
            raise UserError(f"`{address}` does not name a model", fix=f"add it to the address: `{address}#MODEL`")
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
        body = {
            "model": self._model,
            "messages": [*self.messages, {"role": "user", "content": text if sent is None else sent}],
            "stream": True,
            "temperature": self.options.temperature,
            "max_tokens": self.options.length,
            "seed": self.options.seed,
        }
        parts: list[str] = []
        try:
            for part in self._streamed(body):
                parts.append(part)
                yield part
        finally:
            if parts:
                self.messages += [question, {"role": "assistant", "content": "".join(parts)}]

    def _streamed(self, body: dict[str, Any]) -> Iterator[str]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(_KEY):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            f"{self._url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
                for line in response:
                    data = line.decode("utf-8", "replace").removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if line.startswith(b"data:"):
                        choices = json.loads(data).get("choices") or [{}]
                        if text := (choices[0].get("delta") or {}).get("content"):
                            yield text
        except urllib.error.HTTPError as error:
            detail = error.read(500).decode("utf-8", "replace")
            raise UserError(
                f"the server refuses the request: {error.code}",
                where=detail or self._url,
                fix=f"check the name of the model after `#`; a key is read from {_KEY}",
            ) from None
        except (urllib.error.URLError, OSError) as error:
            fix = f"check the address; a key is read from {_KEY}"
            what = f"the server does not answer: {getattr(error, 'reason', error)}"
            raise UserError(what, where=self._url, fix=fix) from None
        except (ValueError, AttributeError, IndexError) as error:
            raise UserError(
                "the server's answer is not in the format of OpenAI's API",
                where=self._url,
                fix="use the address of the API, such as `http://localhost:8080/v1#MODEL`",
            ) from error
