"""Parse a chat completion request; unsupported parameters are rejected, never ignored."""

import secrets
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from tunewell.core.text import shorten
from tunewell.core.units import count
from tunewell.inference.decoder import Decoding
from tunewell.web.errors import ApiError

_MAX_SHOWN_CHARS = 200
"""Maximum length of a client's text in an error message."""
DEFAULT_NEW_TOKENS = 1024
"""Default limit on generated tokens: enough for an answer, but bounded if the model never stops."""
_MAX_STOPS = 4
"""Maximum number of stop strings, as in OpenAI's API."""
_MIN_TEMPERATURE = 1e-4
"""Lower temperatures are replaced by greedy decoding, because dividing logits by them would overflow."""

_NEUTRAL_VALUES: dict[str, list[Any]] = orjson.loads(Path(__file__).with_name("neutral_values.json").read_bytes())
"""Unsupported parameters that clients send anyway, with the values that have no effect."""
_CALLER_PARAMETERS = {"user", "safety_identifier", "prompt_cache_key"}
"""Parameters that describe the caller and do not affect the answer."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _join_parts(content: Any) -> Any:
    """Join text content parts to one text, as `prepare` does."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content part of type {shortened(repr(kind))}; only text is supported")
    return "".join(part["text"] for part in content)


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class RequestMessage(_Strict):
    """One message of a request."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_join_parts)]


class StreamOptions(_Strict):
    """Options of a streamed reply."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class ChatRequest(_Strict):
    """A chat completion request with the supported parameters."""

    model: str
    messages: list[RequestMessage] = Field(min_length=1)
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
            raise ValueError("`max_tokens` and `max_completion_tokens` are the same limit, but their values differ")
        return self

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens or DEFAULT_NEW_TOKENS

    @property
    def decoding(self) -> Decoding:
        """Decoding settings, with a random seed if the request has none."""
        is_greedy = self.temperature < _MIN_TEMPERATURE
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Decoding(temperature=0.0 if is_greedy else self.temperature, top_p=self.top_p, seed=seed)

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages for the chat template; `developer` is OpenAI's newer name for `system`."""
        return [
            {"role": "system" if turn.role == "developer" else turn.role, "content": turn.content}
            for turn in self.messages
        ]


def read_request(body: bytes, *, max_messages: int, max_chars: int) -> ChatRequest:
    """Parse the body of a request. Raise ApiError for an invalid parameter, which it names, or too long messages.

    The limits bound the time of a request: many messages take long to validate, and long texts take long to tokenize.
    """
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(tree, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_type")
    messages = tree.get("messages")
    if isinstance(messages, list) and len(messages) > max_messages:
        raise _too_long(
            f"there are {count(len(messages), 'message')}; the server accepts at most {count(max_messages)}"
        )
    try:
        request = ChatRequest.model_validate(_effective_parameters(tree))
    except ValidationError as error:
        # The values are left out: they would be copied for every error.
        raise _api_error(error.errors(include_url=False, include_input=False)[0]) from error
    num_chars = sum(len(turn.content) for turn in request.messages)
    if num_chars > max_chars:
        raise _too_long(f"they have {count(num_chars, 'character')}; the server accepts at most {count(max_chars)}")
    return request


def _too_long(why: str) -> ApiError:
    return ApiError(400, f"the messages are too long: {why}", code="context_length_exceeded", param="messages")


def _effective_parameters(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that have an effect; raise ApiError for unsupported parameters."""
    parameters = {key: value for key, value in tree.items() if value is not None and key not in _CALLER_PARAMETERS}
    for key in parameters.keys() & _NEUTRAL_VALUES.keys():
        if parameters.pop(key) not in _NEUTRAL_VALUES[key]:
            values = " or ".join(orjson.dumps(value).decode() for value in _NEUTRAL_VALUES[key])
            message = f"`{key}` is not supported by this server; leave it out, or send {values}"
            raise ApiError(400, message, code="unsupported_parameter", param=key)
    messages = parameters.get("messages")
    if isinstance(messages, list):
        # Clients return received messages with empty `refusal`, `annotations` and `tool_calls`.
        parameters["messages"] = [
            {key: value for key, value in turn.items() if value is not None and value != []}
            if isinstance(turn, dict)
            else turn
            for turn in messages
        ]
    return parameters


def _api_error(fault: ErrorDetails) -> ApiError:
    param = _path(fault["loc"])
    if fault["type"] == "extra_forbidden":
        return ApiError(400, f"`{param}` is not supported by this server", code="unsupported_parameter", param=param)
    if fault["type"] == "missing":
        return ApiError(400, f"`{param}` is missing", code="missing_required_parameter", param=param)
    message = fault["msg"].removeprefix("Value error, ")
    return ApiError(400, f"`{param}`: {message}" if param else message, code="invalid_value", param=param)


def _path(location: tuple[int | str, ...]) -> str | None:
    """Format a location as OpenAI does: `messages[0].content`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return shortened(text.removeprefix(".")) or None


def shortened(text: str) -> str:
    """Return a client's text for an error message, which must not be as long as the request."""
    return shorten(text, _MAX_SHOWN_CHARS)
