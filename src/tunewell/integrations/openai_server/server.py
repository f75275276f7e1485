"""One model behind OpenAI's API for chats: Starlette routes it, `openai`'s own types shape it."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakSet

import orjson
from openai.types import CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from pydantic import BaseModel
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
from tunewell.integrations.openai_server.access import BrowserGuard, TokenGuard
from tunewell.integrations.openai_server.queue import Answer, Order, Speaker
from tunewell.integrations.openai_server.requests import ApiError, ChatRequest, read_request

# What is sent back: OpenAI's own objects, filled in.

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


MAX_BODY_BYTES = 4 << 20
"""About a million tokens of text, more than any model's context."""


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    host: str = "127.0.0.1"
    """The name the server is reached by, besides `localhost`."""
    token: str | None = None
    origins: Sequence[str] = ()
    """Web pages that may ask, as browsers name them."""


def build_app(speaker: Speaker, *, access: Access) -> Starlette:
    """Make the application that serves one model; it knows the access rules, uvicorn only moves bytes."""
    server = _Server(speaker)
    routes = [
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/health", server.health),
    ]
    # A page cannot point its name here and know the token too, and behind a proxy the names are the proxy's.
    guards = [Middleware(BrowserGuard, host=access.host, origins=access.origins, checks_host=access.token is None)]
    if access.origins:
        origins = list(access.origins)
        guards.append(
            Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        )
    if access.token is not None:
        guards.append(Middleware(TokenGuard, token=access.token))
    handlers = {
        ApiError: _tell,
        HTTPException: _tell_http,
        ClientDisconnect: _tell_nobody,
        Exception: _tell_failure,
    }
    app = Starlette(routes=routes, middleware=guards, exception_handlers=handlers, lifespan=server.lifespan)
    app.router.redirect_slashes = False
    return app


class _Server:
    def __init__(self, speaker: Speaker) -> None:
        self._speaker = speaker
        self._since = int(time.time())
        # Prompts are made in turn, because encoders are for one thread at a time, but do not wait for answers.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._answers: WeakSet[Answer] = WeakSet()

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        with self._reader, self._writer:
            yield
            # The threads are waited for, and with them what they write.
            for answer in list(self._answers):
                answer.leave()

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_entry(self._speaker.name, self._since)]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(model_entry(self._speaker.name, self._since))

    async def chat(self, request: Request) -> Response:
        wanted = read_request(await _read_body(request))
        self._check_name(wanted.model)
        answer = Answer(await self._order(wanted))
        reply = Reply(self._speaker.name)
        self._answers.add(answer)
        answer.begin(self._speaker, self._writer)
        if wanted.stream:
            return _Stream(answer, _events(answer, reply, with_usage=wanted.stream_options.include_usage))
        return await _whole(request, answer, reply)

    def _check_name(self, name: str) -> None:
        if name != self._speaker.name:
            message = f"there is no model `{name}` here, only `{self._speaker.name}`"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _order(self, wanted: ChatRequest) -> Order:
        reading = asyncio.get_running_loop().run_in_executor(self._reader, self._speaker.read, wanted.conversation())
        try:
            prompt_ids = await reading
        except UserError as error:
            message = f"{error.what}; {error.fix}" if error.fix else error.what
            raise ApiError(400, message, code="invalid_value", param="messages") from error
        room = self._speaker.context_length - len(prompt_ids)
        if room <= 0:
            message = (
                f"the messages take {count(len(prompt_ids))} tokens and leave no room for an answer: "
                f"the model's context is {count(self._speaker.context_length)} tokens"
            )
            raise ApiError(400, message, code="context_length_exceeded", param="messages")
        return Order(prompt_ids, min(wanted.max_new_tokens, room), wanted.decoding, tuple(wanted.stop))


class _Stream(StreamingResponse):
    """A stream of events that frees the model when the client leaves."""

    def __init__(self, answer: Answer, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.leave()


async def _events(answer: Answer, reply: Reply, *, with_usage: bool) -> AsyncIterator[bytes]:
    yield _event(reply.first())
    async for piece in answer.pieces():
        yield _event(reply.piece(piece))
    if answer.failure is not None:
        yield _event(_failed(answer.failure).body)
        raise answer.failure
    for chunk in reply.ending(_finish(answer), _usage(answer) if with_usage else None):
        yield _event(chunk)
    yield b"data: [DONE]\n\n"


async def _whole(request: Request, answer: Answer, reply: Reply) -> Response:
    """Collect the answer, unless the client leaves before it is there."""
    text = asyncio.ensure_future(_collect(answer))
    leaving = asyncio.ensure_future(_wait_for_leaving(request))
    try:
        await asyncio.wait({text, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not text.done():
            raise ClientDisconnect
        return JSONResponse(reply.whole(text.result(), _finish(answer), _usage(answer)))
    finally:
        answer.leave()
        text.cancel()
        leaving.cancel()


async def _collect(answer: Answer) -> str:
    text = "".join([piece async for piece in answer.pieces()])
    if answer.failure is not None:
        raise answer.failure
    return text


async def _wait_for_leaving(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _finish(answer: Answer) -> Any:
    return "stop" if answer.is_whole else "length"


def _usage(answer: Answer) -> Any:
    return usage_of(len(answer.order.prompt_ids), answer.num_tokens)


def _event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


async def _read_body(request: Request) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the content type must be `application/json`", code="unsupported_media_type")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"a request has at most {count(MAX_BODY_BYTES)} bytes", code="request_too_large")
    return bytes(body)


def _failed(error: BaseException) -> ApiError:
    # The particulars may hold what others asked; they are in the server's own log.
    return ApiError(500, f"the answer could not be written ({type(error).__name__})", code="internal_error")


async def _tell(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"there is no `{request.method} {request.url.path}`; the base URL of clients ends with `/v1`"
    response = ApiError(error.status_code, message, code="unknown_url").response()
    response.headers.update(error.headers or {})
    return response


async def _tell_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


async def _tell_failure(_: Request, error: Exception) -> Response:
    return _failed(error).response()
