"""`tunewell serve`: load a model and serve it with an OpenAI-compatible chat API."""

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any

from tunewell.core.features import require_hook
from tunewell.core.optional import import_optional
from tunewell.core.options import SAFE_WEIGHTS, WeightsOptions
from tunewell.inference.chat_model import open_chat_model
from tunewell.inference.model_ref import ModelRef
from tunewell.training.signals import Signals

_UNENCRYPTED = "connections are not encrypted: use a tunnel or a TLS proxy"


@dataclass(frozen=True)
class ListenOptions:
    """The address on which the server listens, and who may connect."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 chooses a free port."""
    token_file: Path | None = None
    """File with the access token. The default is `TUNEWELL_TOKEN`, if it is set."""
    origins: Sequence[str] = ()
    """Web origins that may send requests."""
    idle_minutes: float | None = None
    """The server ends after this time without a request; None: never."""


LOOPBACK = ListenOptions()


@dataclass(frozen=True)
class ServerInfo:
    """The served model and its address; the object that `serve --json` prints."""

    url: str
    """Base URL for clients."""
    model: str
    """Name of the model in the API."""
    subject: str
    because: str
    """Why this checkpoint was chosen."""
    device: str
    precision: str
    context_length: int
    needs_token: bool
    listens_on: str
    computed_by: str = ""
    """The runtime, if it is not torch."""
    answers_from: str = ""
    """The size of the index, if there is one."""
    pid: int = field(default_factory=os.getpid)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Server:
    """A server with a loaded model and an open port."""

    info: ServerInfo
    _server: Any
    _listener: socket

    def run(self) -> int:
        """Serve until a signal arrives, and return its exit code."""
        # uvicorn handles signals while it runs, and raises them again after the last answer.
        with self._listener, Signals() as signals:
            self._server.run(sockets=[self._listener])
        return signals.exit_code or 0


def open_server(
    subject: ModelRef,
    *,
    options: ListenOptions = LOOPBACK,
    device: str = "auto",
    name: str | None = None,
    index: str | None = None,
    weights: WeightsOptions = SAFE_WEIGHTS,
) -> Server:
    """Open a port and load the model. Raise UserError before that for a public address without a token."""
    for module in ("starlette", "uvicorn"):
        import_optional(module, extra="serve", purpose="serving a model")
    from tunewell.features.serve.queue import ServedModel
    from tunewell.features.serve.server import AccessRules, build_app
    from tunewell.web.access import check_origin, listen, make_server, read_token
    from tunewell.web.connections import raise_max_files

    raise_max_files()
    token = read_token(options.token_file)
    origins = [check_origin(origin) for origin in options.origins]
    address = listen(options.host, options.port, has_token=token is not None)
    with ExitStack() as undo:
        undo.callback(address.listener.close)
        model = open_chat_model(subject, device=device, weights=weights, backend="llama_cpp")
        finder = require_hook("retrieval", "open_finder", needed_by="`--index`")(index) if index is not None else None
        add_passages = finder.add_passages if finder is not None else None
        served = ServedModel(model, name or api_name(subject), add_passages=add_passages)
        undo.pop_all()
    info = ServerInfo(
        url=f"{address.url}/v1",
        model=served.name,
        subject=subject.name,
        because=subject.because,
        device=model.device.name,
        precision=model.precision,
        computed_by=model.computed_by,
        answers_from=finder.summary if finder is not None else "",
        context_length=served.context_length,
        needs_token=token is not None,
        listens_on=f"{address.host} port {address.port}",
        notes=[
            *model.notes,
            *(finder.retriever.notes if finder is not None else []),
            *([] if address.is_loopback else [_UNENCRYPTED]),
        ],
    )
    app = build_app(served, access=AccessRules(options.host, token, origins))
    limit = math.inf if options.idle_minutes is None else 60 * options.idle_minutes
    server = make_server(app, is_over=lambda: app.state.idle_seconds() > limit)
    return Server(info, server, address.listener)


def api_name(subject: ModelRef) -> str:
    """Return the model's name in the API: its folder name, which is the same for every checkpoint of a run."""
    return subject.model if subject.path is None else subject.path.resolve().name
