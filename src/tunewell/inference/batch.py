"""Answer many messages, each in a conversation of its own: with a loaded model in batches, or with a server."""

import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tunewell.core.errors import UserError
from tunewell.core.progress import Progress, ProgressListener, silent
from tunewell.core.text import shorten_line
from tunewell.core.units import count
from tunewell.inference.chat import Chat, ChatOptions
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.remote import RemoteChat
from tunewell.inference.runtime import Runtime
from tunewell.records.answers import RecordedAnswers, question_id

Message = str | Sequence[int]
"""The text of the user's message, or the token ids of the whole prompt."""


@dataclass(frozen=True)
class Replies:
    """The answers to some messages."""

    texts: list[str]
    num_tokens: list[int]
    """Tokens of each answer; empty if they are unknown."""
    num_prompt_tokens: list[int]
    seconds: float


class Answerer(ABC):
    """A model that answers many messages."""

    _chat: Chat | RemoteChat

    def fits(self, message: str) -> bool:
        """Return whether a message fits in the context with an answer."""
        try:
            self._chat.prompt_for(message)
        except UserError:
            return False
        return True

    @abstractmethod
    def answer(self, messages: Sequence[Message], progress: ProgressListener = silent) -> Replies:
        """Return greedy answers, in the order of the messages."""


class ModelAnswerer(Answerer):
    """A loaded model, or its base model, with one system prompt for all messages."""

    def __init__(self, model: ChatModel, runtime: Runtime, *, length: int, system: str | None = None) -> None:
        if model.masker is None:
            raise UserError(
                f"`{model.ref.name}` has no chat template, so it cannot answer questions",
                fix="use a chat model, or train this one first",
            )
        self._model, self._runtime, self._length = model, runtime, length
        self._chat = Chat(model, system, ChatOptions(length=length))

    def answer(self, messages: Sequence[Message], progress: ProgressListener = silent) -> Replies:
        prompts = [self._chat.prompt_for(one) if isinstance(one, str) else list(one) for one in messages]
        began = time.perf_counter()
        found = self._runtime.generate(
            prompts, max_new_tokens=self._length, stop_ids=self._model.stop_ids, progress=progress
        )
        seconds = time.perf_counter() - began
        return Replies(
            [self._model.decode(one.ids).strip() for one in found],
            [len(one.ids) for one in found],
            [len(prompt) for prompt in prompts],
            seconds,
        )


class ServerAnswerer(Answerer):
    """A model behind an OpenAI-compatible address. It answers one message at a time."""

    def __init__(self, address: str, *, length: int) -> None:
        self._address, self._options = address, ChatOptions(length=length)
        self._chat = RemoteChat(address, self._options)

    def answer(self, messages: Sequence[Message], progress: ProgressListener = silent) -> Replies:
        began, texts = time.perf_counter(), list[str]()
        for number, message in enumerate(messages):
            progress(Progress("answers", number, len(messages), "questions"))
            assert isinstance(message, str)
            texts.append("".join(RemoteChat(self._address, self._options).reply(message)).strip())
        return Replies(texts, [], [], time.perf_counter() - began)


class RecordedAnswerer(Answerer):
    """A file of recorded answers in place of a server."""

    def __init__(self, file: RecordedAnswers) -> None:
        self._file = file

    def fits(self, message: str) -> bool:
        return True

    def answer(self, messages: Sequence[Message], progress: ProgressListener = silent) -> Replies:
        """Return the recorded answers; raise UserError if one of the messages was not asked."""
        ids = [question_id(str(message)) for message in messages]
        known = self._file.answers
        if missing := [str(message) for own, message in zip(ids, messages, strict=True) if own not in known]:
            raise UserError(
                f"`{self._file.path}` has no answer to {count(len(missing))} of {count(len(ids), 'question')}",
                where=f"the first is: {shorten_line(missing[0], 80)}",
                fix="record them while the model lives: `tunewell compare --record "
                f"{shlex.quote(str(self._file.path))} {self._file.url}#{self._file.model} --data ROWS`",
            )
        return Replies([known[own][0] for own in ids], [], [], sum(known[own][1] for own in ids))
