"""Serve one model to programs that speak OpenAI's API."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.optional import import_optional
from tunewell.inference.chat_model import ChatModel, open_chat_model
from tunewell.inference.generate import Decoding
from tunewell.inference.model_ref import ModelRef
from tunewell.inference.prompt import prompt_ids
from tunewell.inference.stream import StreamDecoder, TokenStream
from tunewell.training.signals import Signals

_IN_CLEAR = "what is sent is not encrypted: use a tunnel, or a proxy that speaks TLS"


@dataclass(frozen=True)
class Door:
    """Where the server listens, and whom it lets in."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 for any that is free."""
    token_file: Path | None = None
    """Where the token is; otherwise the variable `TUNEWELL_TOKEN`, if it is set."""
    origins: Sequence[str] = ()
    """Web pages that may ask."""


AT_HOME = Door()


@dataclass(frozen=True)
class Ready:
    """What is served, and where."""

    url: str
    """What clients take as the base URL."""
    model: str
    """What clients take as the model's name."""
    subject: str
    because: str
    """Why this checkpoint."""
    device: str
    precision: str
    context_length: int
    needs_token: bool
    listens_on: str
    computed_by: str = ""
    """What computes it, where that is not torch."""
    pid: int = field(default_factory=os.getpid)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Serving:
    """A server that has its model and its port, and waits to be run."""

    ready: Ready
    _server: Any
    _listener: socket

    def run(self) -> int:
        """Answer requests until a signal comes; give the exit code that it asks for."""
        # uvicorn takes signals while it runs and raises them again when the last answer is given.
        with self._listener, Signals() as signals:
            self._server.run(sockets=[self._listener])
        return signals.exit_code or 0


def open_server(
    subject: ModelRef,
    *,
    door: Door = AT_HOME,
    device: str = "auto",
    name: str | None = None,
    allow_pickle: bool = False,
) -> Serving:
    """Load a model and open a port for it.

    Raises UserError, before anything is loaded, for an address that strangers could reach without a token.
    """
    for module in ("starlette", "uvicorn", "openai"):
        import_optional(module, extra="serve", purpose="serving a model")
    from tunewell.integrations.openai_server.access import check_origin, listen, make_server, read_token
    from tunewell.integrations.openai_server.server import Access, build_app

    token = read_token(door.token_file)
    origins = [check_origin(origin) for origin in door.origins]
    address = listen(door.host, door.port, has_token=token is not None)
    with ExitStack() as undo:
        undo.callback(address.listener.close)
        voice = open_chat_model(subject, device=device, allow_pickle=allow_pickle, backend="llama_cpp")
        speaker = ServedModel(voice, name or name_of(subject))
        undo.pop_all()
    ready = Ready(
        url=address.url,
        model=speaker.name,
        subject=subject.name,
        because=subject.because,
        device=voice.device.name,
        precision=voice.precision,
        computed_by=voice.computed_by,
        context_length=speaker.context_length,
        needs_token=token is not None,
        listens_on=f"{address.host} port {address.port}",
        notes=[*voice.notes, *([] if address.is_loopback else [_IN_CLEAR])],
    )
    app = build_app(speaker, access=Access(door.host, token, origins))
    return Serving(ready, make_server(app), address.listener)


class ServedModel:
    """A voice as the server sees it: prompts as in training, answers that end where turns end."""

    def __init__(self, voice: ChatModel, name: str) -> None:
        """Take a voice; raise UserError for one without a chat template."""
        if voice.masker is None:
            raise UserError(
                f"`{name}` has no chat template, and what is served are chats",
                fix="name one with `--template`, such as `--template chatml`",
            )
        self.name = name
        self.context_length = voice.runtime.context_length
        self._masker = voice.masker
        self._voice = voice

    def read(self, messages: list[dict[str, str]]) -> list[int]:
        """Make a prompt of messages; raise UserError for what the template refuses."""
        return prompt_ids(self._masker, self._voice.encoder, messages)

    def write(self, prompt_ids: Sequence[int], *, max_new_tokens: int, decoding: Decoding) -> TokenStream:
        """Write the answer's tokens, without the one that ends it."""
        voice = self._voice
        return voice.runtime.stream(
            prompt_ids, max_new_tokens=max_new_tokens, stop_ids=voice.stop_ids, decoding=decoding
        )

    def spelling(self) -> StreamDecoder:
        """Begin a new text."""
        return StreamDecoder(self._voice.tokenizer.backend)


def name_of(subject: ModelRef) -> str:
    """Name a model for clients: the folder's name, the same for every checkpoint of a run."""
    return subject.model if subject.path is None else subject.path.resolve().name
