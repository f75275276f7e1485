"""`tunewell watch`: open a local page on a folder."""

import html
import os
import secrets
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Any

from tunewell.core.errors import UserError
from tunewell.core.files import make_private, write_atomic
from tunewell.core.optional import import_optional
from tunewell.training.signals import Signals

DEFAULT_PORT = 8765
_UNENCRYPTED = "connections are not encrypted: use `ssh -L`, a tunnel or a TLS proxy"


@dataclass(frozen=True)
class WatchOptions:
    """The address of the page, and what it may do."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    token_file: Path | None = None
    is_read_only: bool = False


@dataclass(frozen=True)
class PageInfo:
    """The address of the page; the object that `watch --json` prints."""

    url: str
    """With the token after `#`, which no server and no log sees."""
    folder: str
    listens_on: str
    is_read_only: bool
    notes: list[str]
    pid: int


@dataclass(frozen=True)
class PageServer:
    """A server with an open port."""

    info: PageInfo
    _server: Any
    _listener: socket

    def run(self) -> int:
        """Serve until a signal arrives, and return its exit code."""
        with self._listener, Signals() as signals:
            self._server.run(sockets=[self._listener])
        return signals.exit_code or 0


def open_page(folder: Path, options: WatchOptions) -> PageServer:
    """Open a port for the page of a folder; raise UserError for a public address without a token."""
    for module in ("starlette", "uvicorn"):
        import_optional(module, extra="watch", purpose="the page")
    from tunewell.features.watch.app import build_app
    from tunewell.features.watch.watched import Watched
    from tunewell.web.access import listen, make_server, read_token
    from tunewell.web.connections import raise_max_files

    if not folder.is_dir():
        raise UserError(f"there is no folder `{folder}`", fix="name the folder with your runs, or an empty one")
    raise_max_files()
    given = read_token(options.token_file)
    what = "read your rows and start runs"
    address = listen(options.host, options.port, has_token=given is not None, what=what)
    token = given or secrets.token_urlsafe(32)
    watched = Watched(folder.resolve(), options.is_read_only)
    app = build_app(watched, token=token, host=options.host, is_loopback=address.is_loopback)
    info = PageInfo(
        url=f"{address.url}/" + ("" if given else f"#token={token}"),
        folder=str(folder),
        listens_on=f"{address.host} port {address.port}",
        is_read_only=options.is_read_only,
        notes=[] if address.is_loopback else [_UNENCRYPTED],
        pid=os.getpid(),
    )
    server = make_server(app)
    watched.is_over = lambda: server.should_exit
    return PageServer(info, server, address.listener)


def open_browser(info: PageInfo, folder: Path) -> bool:
    """Open the page in a browser where there is a desktop, and return whether that was tried.

    The address goes through a private file: every user of this machine can read the arguments of a program.
    """
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    place = folder / ".tunewell"
    make_private(place)
    page = place / "open.html"
    write_atomic(page, f'<meta http-equiv="refresh" content="0;url={html.escape(info.url)}">', is_private=True)
    return webbrowser.open(page.resolve().as_uri())
