"""Serve one model with OpenAI's chat completions API, using Starlette."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.features.serve.queue import Finish, QueuedAnswer, ServedModel
from tunewell.features.serve.requests import ChatRequest, read_request, shortened
from tunewell.web.access import BrowserGuard, TokenGuard
from tunewell.web.connections import max_files
from tunewell.web.errors import ApiError

MAX_BODY_BYTES = 4 << 20
"""Maximum size of a request: about a million tokens of text, more than usual context lengths."""
MAX_CHARS_PER_TOKEN = 16
"""Maximum number of characters per token of context, checked before tokenizing. English has about four per token."""
MAX_MESSAGES = 4096
"""Maximum number of messages; the chat template needs about 70 microseconds for each."""
MAX_REQUESTS = 1536
"""Maximum number of requests in the queue, the one being answered included, but at most a quarter of the file handles
of the process."""
MAX_REQUESTS_PER_CLIENT = 1024
"""Maximum per address, so that one client cannot fill the queue: two thirds, if the queue is smaller. OpenAI's client
sends 1,000 requests at once and waits 10 minutes for an answer, but tries only twice more after a 429."""


class ReplyObjects:
    """A factory for the JSON objects of one reply: a complete completion, or the chunks of a stream."""

    def __init__(self, model: str) -> None:
        self._shared = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def completion(self, generation: QueuedAnswer, text: str) -> dict[str, Any]:
        """Return the reply as one object, with the passages that the model could read, a field of tunewell's own."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": generation.finish_reason, "logprobs": None}
        sources = {} if generation.sources is None else {"sources": generation.sources}
        usage = {"usage": _usage(generation)}
        return {**self._shared, "object": "chat.completion", "choices": [choice], **usage, **sources}

    def event(self, *, finish: Finish | None = None, **delta: Any) -> bytes:
        """Return the event of a stream with a part of the message or the finish reason."""
        return self.other_event(choices=[{"index": 0, "delta": delta, "finish_reason": finish}])

    def other_event(self, **fields: Any) -> bytes:
        """Return the event of a stream with other fields: the token counts, or the passages."""
        return _event({**self._shared, "object": "chat.completion.chunk", "choices": [], **fields})


@dataclass(frozen=True)
class AccessRules:
    """The rules for accepting requests."""

    host: str = "127.0.0.1"
    """Host name of the server, in addition to `localhost`."""
    token: str | None = None
    origins: Sequence[str] = ()
    """Web origins that may send requests."""


def build_app(model: ServedModel, *, access: AccessRules) -> Starlette:
    """Return the Starlette app that serves one model and enforces the access rules."""
    server = _Handlers(model)
    routes = [
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/health", server.health),
    ]
    # The host is not checked if there is a token: DNS rebinding is then harmless, and a proxy sends its own host name.
    guards = [Middleware(BrowserGuard, host=access.host, origins=access.origins, checks_host=access.token is None)]
    if access.origins:
        origins = list(access.origins)
        guards.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        )
    if access.token is not None:
        guards.append(Middleware(TokenGuard, token=access.token))
    handlers = {
        ApiError: _api_error_response,
        HTTPException: _http_error_response,
        ClientDisconnect: _disconnect_response,
        Exception: _failure_response,
    }
    app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers, lifespan=server.lifespan)
    app.router.redirect_slashes = False
    app.state.idle_seconds = server.idle_seconds
    return app


class _Handlers:
    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._entry = {"id": model.name, "created": int(time.time()), "object": "model", "owned_by": "tunewell"}
        # Two pools with one thread each: the encoder is not thread-safe, and prompts must not wait for running answers.
        self._encoding_thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._generation_thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._generations: WeakSet[QueuedAnswer] = WeakSet()
        self._requests: Counter[str] = Counter()
        self._used_at = time.monotonic()
        # A chat template adds at least two tokens to a message.
        self._max_messages = min(MAX_MESSAGES, model.context_length // 2)

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        with self._encoding_thread, self._generation_thread:
            yield
            # Leaving the `with` block waits for the threads, so running generations are cancelled first.
            for generation in list(self._generations):
                generation.cancel()

    def idle_seconds(self) -> float:
        """Return how long no request was answered."""
        if self._requests:
            self._used_at = time.monotonic()
        return time.monotonic() - self._used_at

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._entry]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._entry)

    async def chat(self, request: Request) -> Response:
        max_chars = self._model.context_length * MAX_CHARS_PER_TOKEN
        body = read_request(await _read_body(request), max_messages=self._max_messages, max_chars=max_chars)
        self._check_name(body.model)
        with ExitStack() as undo:
            undo.callback(self._enter_queue(request.client.host if request.client else ""))
            generation = await self._generation(body)
            reply = ReplyObjects(self._model.name)
            self._generations.add(generation)
            generation.start(self._model, self._generation_thread)
            if not body.stream:
                return await _complete(request, generation, reply)
            events = _events(generation, reply, with_usage=body.stream_options.include_usage)
            return _Stream(generation, events, on_end=undo.pop_all().close)

    def _enter_queue(self, client: str) -> Callable[[], None]:
        """Count a request, and return the function that ends it; raise ApiError if there are too many."""
        max_requests = min(MAX_REQUESTS, max_files() // 4)
        max_per_client = min(MAX_REQUESTS_PER_CLIENT, max_requests * 2 // 3)
        if self._requests[client] >= max_per_client:
            message = f"{count(max_per_client)} requests of this client are waiting; wait for an answer"
            raise ApiError(429, message, code="too_many_requests")
        if self._requests.total() >= max_requests:
            raise ApiError(503, f"{count(max_requests)} requests are waiting; try again later", code="queue_full")
        self._requests[client] += 1

        def leave() -> None:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]

        return leave

    def _check_name(self, name: str) -> None:
        if name != self._model.name:
            message = f"unknown model `{shortened(name)}`; this server has `{self._model.name}`"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _generation(self, body: ChatRequest) -> QueuedAnswer:
        encoding = asyncio.get_running_loop().run_in_executor(
            self._encoding_thread, self._model.encode, body.conversation(), body.max_new_tokens
        )
        try:
            prompt = await encoding
        except UserError as error:
            message = f"{error.what}; {error.fix}" if error.fix else error.what
            raise ApiError(400, message, code="invalid_value", param="messages") from error
        num_free = self._model.context_length - len(prompt.ids)
        if num_free <= 0:
            message = (
                f"the messages have {count(len(prompt.ids))} tokens, which leaves no space for an answer: "
                f"the model's context length is {count(self._model.context_length)} tokens"
            )
            raise ApiError(400, message, code="context_length_exceeded", param="messages")
        limit = min(body.max_new_tokens, num_free)
        return QueuedAnswer(prompt, max_new_tokens=limit, decoding=body.decoding, stops=body.stop)


class _Stream(StreamingResponse):
    """A streaming response that cancels the generation when the client disconnects."""

    def __init__(self, generation: QueuedAnswer, events: AsyncIterator[bytes], *, on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._generation, self._on_end = generation, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()
            self._on_end()


async def _events(generation: QueuedAnswer, reply: ReplyObjects, *, with_usage: bool) -> AsyncIterator[bytes]:
    yield reply.event(role="assistant", content="")
    async for text in generation.chunks():
        yield reply.event(content=text)
    if generation.failure is not None:
        yield _event(_failed(generation.failure).body)
        raise generation.failure
    yield reply.event(finish=generation.finish_reason)
    if generation.sources is not None:
        yield reply.other_event(sources=generation.sources)
    if with_usage:
        yield reply.other_event(usage=_usage(generation))
    yield b"data: [DONE]\n\n"


async def _complete(request: Request, generation: QueuedAnswer, reply: ReplyObjects) -> Response:
    """Return the complete answer, unless the client disconnects first."""
    text = asyncio.ensure_future(_collect(generation))
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({text, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not text.done():
            raise ClientDisconnect
        return JSONResponse(reply.completion(generation, text.result()))
    finally:
        generation.cancel()
        text.cancel()
        disconnect.cancel()


async def _collect(generation: QueuedAnswer) -> str:
    text = "".join([chunk async for chunk in generation.chunks()])
    if generation.failure is not None:
        raise generation.failure
    return text


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _usage(generation: QueuedAnswer) -> dict[str, int]:
    asked, answered = len(generation.prompt_ids), generation.num_tokens
    return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}


def _event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def _read_body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the content type must be `application/json`", code="unsupported_media_type")
    too_large = f"the request is larger than {count(MAX_BODY_BYTES)} bytes"
    # h11 has checked that the length is a number.
    if int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        raise ApiError(413, too_large, code="request_too_large")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, too_large, code="request_too_large")
    return bytes(body)


def _failed(error: BaseException) -> ApiError:
    # Details may contain text from other clients, so they are only in the server's log.
    return ApiError(500, f"generation failed ({type(error).__name__})", code="internal_error")


async def _api_error_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"unknown URL `{shortened(f'{request.method} {request.url.path}')}`; the base URL ends with `/v1`"
    if error.status_code == 405:
        methods = (error.headers or {}).get("Allow", "another method")
        message = f"`{request.url.path}` accepts {methods}, not {shortened(request.method)}"
    response = ApiError(error.status_code, message, code="unknown_url").response()
    response.headers.update(error.headers or {})
    return response


async def _disconnect_response(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _failure_response(_: Request, error: Exception) -> Response:
    return _failed(error).response()
