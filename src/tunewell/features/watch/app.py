"""The routes of the page: static files, JSON under `/api/v1`, streams, uploads and downloads, and who may use them."""

import asyncio
import mimetypes
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tunewell.core.errors import UserError
from tunewell.core.files import explain_os_error, is_disk_full
from tunewell.core.progress import Progress
from tunewell.features.watch import actions, chat, exports, new, views
from tunewell.features.watch.errors import STATUS, WatchError, error_json
from tunewell.features.watch.stream import Stream, json_bytes, sse
from tunewell.features.watch.watched import Watched
from tunewell.web.access import BrowserGuard, TokenGuard

_MAX_BODY_BYTES = 1 << 20
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = Headers(
    {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }
).raw
Worker = Callable[[Watched, dict[str, Any], Callable[[Any], None]], Any]

_VIEWS = "session runs run curve samples log report answers"
_READERS = {
    **{name: getattr(views, name) for name in _VIEWS.split()},
    "job": lambda watched, query: watched.jobs.job(query.get("id", "")),
    "files": lambda watched, query: watched.folder.entries(query.get("folder", "")),
    "export": exports.view,
    "chat": chat.state,
}
_WRITERS = {
    "act": actions.act,
    "downloads": lambda watched, body: watched.folder.ticket(str(body.get("path", ""))),
    "chat/open": chat.open_sides,
    "chat/close": chat.close,
}
_WORKERS: dict[str, Worker] = {
    **{f"new/{name}": getattr(new, name) for name in ("read", "models", "draft", "start", "index")},
    "chat/say": chat.say,
}
"""Their answers are streams: progress, then a result or an error."""


class _Headers:
    """Middleware that adds the security headers to each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await self._app(scope, receive, send_with)


def build_app(watched: Watched, *, token: str, host: str, is_loopback: bool) -> Starlette:
    """Return the app that shows a folder. Everything but the static page needs the token."""
    mimetypes.add_type("text/javascript", ".js")
    api = "/api/v1/"
    routes = [
        *(Route(api + name, _endpoint(watched, name, read)) for name, read in _READERS.items()),
        *(Route(api + name, _endpoint(watched, name, write), methods=["POST"]) for name, write in _WRITERS.items()),
        *(Route(api + name, _worker(watched, name, work), methods=["POST"]) for name, work in _WORKERS.items()),
        Route(api + "uploads", partial(_upload, watched), methods=["POST"]),
        Route(api + "stream", partial(_stream, watched)),
        Route("/download/{ticket}/{name}", partial(_download, watched)),
        Mount(
            "/",
            StaticFiles(directory=Path(__file__).with_name("static"), packages=[("tunewell.core", "pages")], html=True),
        ),
    ]
    middleware = [
        Middleware(_Headers),
        Middleware(BrowserGuard, host=host, checks_host=is_loopback, has_pages=True),
        Middleware(TokenGuard, token=token, path="/api/"),
    ]
    handlers = {HTTPException: _http_error, Exception: _failure, UserError: _failure, OSError: _failure}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def _endpoint(watched: Watched, name: str, act: Callable[[Watched, Any], Any]) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        given = await _body(watched, name, request) if request.method == "POST" else dict(request.query_params)
        return _json(await run_in_threadpool(_guarded, act, watched, given))

    return respond


def _worker(watched: Watched, name: str, work: Worker) -> Callable[[Request], Any]:
    async def respond(request: Request) -> Response:
        body, loop = await _body(watched, name, request), asyncio.get_running_loop()
        events: asyncio.Queue[tuple[str, Any] | None] = asyncio.Queue()
        has_left = threading.Event()

        def send(kind: str, content: Any) -> None:
            if has_left.is_set():
                raise ClientDisconnect
            loop.call_soon_threadsafe(events.put_nowait, (kind, content))

        def emit(now: Progress | chat.Delta) -> None:
            send("delta" if isinstance(now, chat.Delta) else "progress", vars(now))

        def act() -> None:
            try:
                send("result", work(watched, body, emit))
            except ClientDisconnect:
                pass
            except Exception as error:  # noqa: BLE001  each error is sent to the page
                if not has_left.is_set():
                    send("error", error_json(as_known(error)))
            finally:
                loop.call_soon_threadsafe(events.put_nowait, None)

        async def lines() -> AsyncIterator[bytes]:
            try:
                while (event := await events.get()) is not None:
                    yield sse(*event)
            finally:
                has_left.set()

        threading.Thread(target=act, daemon=True).start()
        return StreamingResponse(lines(), media_type="text/event-stream")

    return respond


async def _stream(watched: Watched, request: Request) -> Response:
    query = dict(request.query_params)
    after = request.headers.get("last-event-id") or query.get("after", "")
    stream = await run_in_threadpool(_guarded, Stream, watched, query, after)
    return StreamingResponse(stream.events(), media_type="text/event-stream")


async def _upload(watched: Watched, request: Request) -> Response:
    _require_allowed(watched, "uploads", request, "application/octet-stream")
    query, size = request.query_params, int(request.headers.get("content-length", 0))
    return _json(await watched.folder.upload(query.get("name", ""), query.get("into"), size, request.stream()))


async def _download(watched: Watched, request: Request) -> Response:
    path = watched.folder.redeem(request.path_params["ticket"])
    headers = {"content-disposition": "attachment"}
    return FileResponse(path, media_type="application/octet-stream", headers=headers)


def as_known(error: Exception) -> UserError:
    """Return an error for the page. A bug is also written to the terminal."""
    if isinstance(error, OSError) and is_disk_full(error):
        return WatchError("disk_full", "the disk is full", where=str(error.filename or ""), fix="free some space")
    known = explain_os_error(error) if isinstance(error, OSError) else error
    if isinstance(known, UserError):
        return known
    traceback.print_exception(error)
    fix = "the terminal of `tunewell watch` shows where; please report it"
    return WatchError("failed", f"this part of the page failed ({type(error).__name__})", where=str(error), fix=fix)


def _guarded(act: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; a file that vanished or was damaged meanwhile is an error for the page."""
    try:
        return act(*arguments)
    except Exception as error:
        raise as_known(error) from error


def _require_allowed(watched: Watched, name: str, request: Request, wanted: str) -> None:
    """Raise WatchError if the page only shows, and for the types of content that a form can send."""
    if watched.is_read_only and name != "downloads":
        raise WatchError(
            "read_only", "this page was started with `--read-only`", fix="start `tunewell watch` without `--read-only`"
        )
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
        raise WatchError("media_type", f"the content type must be `{wanted}`")


async def _body(watched: Watched, name: str, request: Request) -> dict[str, Any]:
    _require_allowed(watched, name, request, "application/json")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > _MAX_BODY_BYTES:
            raise WatchError("too_large", "the request is larger than 1 MiB")
    try:
        if isinstance(body := orjson.loads(data), dict):
            return body
    except ValueError:
        pass
    raise WatchError("refused", "the request is not a JSON object")


def _json(content: Any, status: int = 200) -> Response:
    return Response(json_bytes(content), status, media_type="application/json")


async def _failure(_: Request, error: Exception) -> Response:
    known = as_known(error)
    return _json(error_json(known), STATUS[getattr(known, "code", "refused")])


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method"}.get(error.status_code, "refused")
    what = WatchError(code, f"there is no `{request.method} {request.url.path[:200]}`")
    return _json(error_json(what), error.status_code)
