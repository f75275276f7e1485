"""Read a request for a chat completion: what is not honoured is refused by name, never passed over in silence."""

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from starlette.responses import JSONResponse

from tunewell.inference.generate import Decoding

# Errors in the shape that OpenAI's clients read.

INVALID, SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """A request that is not answered: why, which parameter is at fault, and the code that programs look at."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {
            "error": {
                "message": message,
                "type": INVALID if status < 500 else SERVER,
                "param": param,
                "code": code,
            }
        }

    def response(self) -> JSONResponse:
        """Give the answer that says so."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(self.body, self.status, headers)


DEFAULT_NEW_TOKENS = 1024
"""Where the request names no limit: long enough for an answer, short enough for a model that never ends one."""
_MAX_STOPS = 4
"""As OpenAI has it."""
_COLDEST = 1e-4
"""Below it the likeliest token is as good as certain, and dividing by it would overflow."""

_DO_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
"""Parameters that clients send unasked, and the values with which they ask for nothing."""
_ABOUT_THE_CALLER = {"user", "safety_identifier", "prompt_cache_key"}
"""Parameters that say who asks; they change no answer anywhere."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _joined(content: Any) -> Any:
    """Make one text of parts, as `prepare` does."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"a part of type {kind!r}; only text is read")
    return "".join(part["text"] for part in content)


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class Turn(_Strict):
    """One message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined)]


class StreamOptions(_Strict):
    """What a stream ends with."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatRequest(_Strict):
    """A request for a chat completion, with the parameters that are honoured."""

    model: str
    messages: list[Turn] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(0.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] = Field(
        [], max_length=_MAX_STOPS
    )

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ValueError("`max_tokens` and `max_completion_tokens` are two names of one limit, and differ")
        return self

    @property
    def max_new_tokens(self) -> int:
        """How long the answer may be."""
        return self.max_completion_tokens or self.max_tokens or DEFAULT_NEW_TOKENS

    @property
    def decoding(self) -> Decoding:
        """How tokens are chosen; drawn differently each time where no seed is given."""
        is_cold = self.temperature < _COLDEST
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Decoding(temperature=0.0 if is_cold else self.temperature, top_p=self.top_p, seed=seed)

    def conversation(self) -> list[dict[str, str]]:
        """Give the messages as templates know them: `developer` is OpenAI's later name for `system`."""
        return [
            {"role": "system" if turn.role == "developer" else turn.role, "content": turn.content}
            for turn in self.messages
        ]


def read_request(body: bytes) -> ChatRequest:
    """Read the body of a request; raise ApiError that names the parameter at fault."""
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(tree, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    try:
        return ChatRequest.model_validate(_given(tree))
    except ValidationError as error:
        raise _explain(error.errors()[0]) from error


def _given(tree: dict[str, Any]) -> dict[str, Any]:
    """Leave out what asks for nothing; refuse what asks for something else than it may."""
    given = {key: value for key, value in tree.items() if value is not None and key not in _ABOUT_THE_CALLER}
    for key in given.keys() & _DO_NOTHING.keys():
        if given.pop(key) not in _DO_NOTHING[key]:
            raise _refuse(key, _DO_NOTHING[key])
    messages = given.get("messages")
    if isinstance(messages, list):
        # A client hands back the message it got, `refusal`, `annotations` and `tool_calls` included, all empty.
        given["messages"] = [
            {key: value for key, value in turn.items() if value is not None and value != []}
            if isinstance(turn, dict)
            else turn
            for turn in messages
        ]
    return given


def _refuse(param: str, allowed: Sequence[Any]) -> ApiError:
    values = " or ".join(orjson.dumps(value).decode() for value in allowed)
    message = f"`{param}` is not supported by this server; leave it out, or send {values}"
    return ApiError(400, message, code="unsupported_parameter", param=param)


def _explain(fault: ErrorDetails) -> ApiError:
    param = _path(fault["loc"])
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"`{param}` is not supported by this server", code="unsupported_parameter", param=param)
    if fault["type"] == "missing":
        return ApiError(400, f"`{param}` is missing", code="missing_required_parameter", param=param)
    words = fault["msg"].removeprefix("Value error, ")
    return ApiError(400, f"`{param}`: {words}" if param else words, code="invalid_value", param=param)


def _path(place: tuple[int | str, ...]) -> str | None:
    """Spell a place as OpenAI does: `messages[0].content`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".") or None
