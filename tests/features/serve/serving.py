"""A real server on a free port, and models to put behind it, for the tests of this folder."""

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from openai import OpenAI

from tunewell.core.errors import UserError
from tunewell.features.serve.queue import Prompt, ServedModel
from tunewell.features.serve.server import AccessRules, build_app
from tunewell.inference.decoder import Decoding
from tunewell.web.access import listen, make_server

NAME = "tiny"
HELLO = [{"role": "user", "content": "Hello"}]


@contextmanager
def served(speaker: ServedModel, access: AccessRules | None = None) -> Iterator[str]:
    """Serve a model for a while, by uvicorn in a thread; give the base URL."""
    address = listen("127.0.0.1", 0, has_token=False)
    server = make_server(build_app(speaker, access=access or AccessRules()))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.listener]})
    thread.start()
    try:
        yield f"{address.url}/v1"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive(), "the server did not end"


def client_of(url: str, key: str = "none") -> OpenAI:
    """Make the official client; it does not try again, so that every refusal is seen."""
    return OpenAI(base_url=url, api_key=key, max_retries=0, timeout=20)


def send(
    url: str, body: Any, path: str = "/v1/chat/completions", *, method: str = "POST", **headers: str
) -> tuple[int, Any]:
    """Send a request by hand; give the status and the JSON that came back. A header `x_y` is sent as `x-y`."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.request(method, path, data if method == "POST" else None, sent)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    finally:
        connection.close()


def chat(**more: Any) -> dict[str, Any]:
    """Give the body of a good request, changed as told."""
    return {"model": NAME, "messages": HELLO} | more


class Letters(ServedModel):
    """A model without end whose tokens are letters, each written when the test lets it be."""

    name = NAME
    context_length = 10_000

    def __init__(self) -> None:
        self.may_write = threading.Semaphore(0)
        self.num_written = 0
        self.num_begun = 0
        self.is_closed = threading.Event()

    def encode(self, messages: list[dict[str, str]], max_new_tokens: int) -> Prompt:
        """Take the number of letters as the prompt."""
        text = "".join(message["content"] for message in messages)
        if "refuse" in text:
            raise UserError("the template refuses this", fix="say something else")
        return Prompt([1] * len(text))

    def generate(self, prompt_ids: Sequence[int], *, max_new_tokens: int, decoding: Decoding) -> Any:
        """Write the letters of the alphabet, again and again."""
        self.num_begun += 1
        try:
            for number in range(max_new_tokens):
                assert self.may_write.acquire(timeout=20), "nobody let it write"
                self.num_written += 1
                yield number % 26
        finally:
            self.is_closed.set()

    def decoder(self) -> Any:
        """Spell a token by its letter."""
        return _Alphabet()


class _Alphabet:
    def add(self, token: int) -> str:
        return chr(ord("a") + token)

    def finish(self) -> str:
        return ""
