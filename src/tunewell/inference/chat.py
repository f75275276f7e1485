"""A conversation with a loaded model: messages, streamed answers, the context limit, and saving as training rows."""

import json
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tunewell.core.errors import UserError
from tunewell.core.files import read_bytes, write_atomic
from tunewell.core.units import count
from tunewell.data.rows.conversation import Message
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.chat_options import ChatOptions
from tunewell.inference.decoder import Decoding
from tunewell.inference.prompt import prompt_ids, text_ids
from tunewell.inference.runtime import Runtime
from tunewell.inference.stream import StreamDecoder


@dataclass
class ChatAnswer:
    """An answer of the model, with its token counts and its time."""

    text: str = ""
    ended: Literal["end", "length", "context", "stopped"] = "stopped"
    """What ended the answer: a stop token, the maximum length, a full context, or the user."""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_dropped: int = 0
    """Number of old messages left out of the prompt because they no longer fit in the context."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answer per second. The time includes processing the prompt."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Chat:
    """A conversation with one model, one answer at a time."""

    model: ChatModel
    system: str | None = None
    options: ChatOptions = field(default_factory=ChatOptions)
    messages: list[Message] = field(default_factory=list)
    """Alternating questions and answers, without the system prompt."""
    answer: ChatAnswer = field(default_factory=ChatAnswer)
    """The last answer. It is complete when its stream has ended."""
    base_answer: ChatAnswer | None = None
    _prompt: list[int] = field(default_factory=list)
    _unfinished: set[int] = field(default_factory=set)
    _saved: tuple[Path, bytes] | None = None

    def __post_init__(self) -> None:
        self.set_system(self.system)

    @property
    def context(self) -> int:
        """The maximum number of tokens of a prompt and its answer together."""
        return self.model.runtime.context_length

    def set_system(self, text: str | None) -> None:
        """Set the system prompt for the next answers. None or an empty text removes it."""
        if text and self.model.masker is None:
            raise UserError("the model has no chat template, so it cannot take a system prompt")
        self.system = text or None

    def set_options(self, **changes: Any) -> None:
        """Change sampling settings for the next answers. Raise UserError, without a change, if a value is invalid."""
        self.options = replace(self.options, **changes)

    def prompt_for(self, text: str) -> list[int]:
        """Return the prompt of a message in this conversation; raise UserError if it does not fit in the context."""
        return self._fitting_prompt([*self.messages, {"role": "user", "content": text}])[0]

    def reply(self, text: str, *, sent: str | None = None) -> Generator[str, None, None]:
        """Send a message, yield the text of the answer as it is generated, and add both to the conversation.

        `sent` is what the model gets instead of `text`: the message with passages, which later prompts do not repeat.
        Closing the iterator stops the answer and keeps the text so far. Raises UserError, without adding the message,
        if the message does not fit in the context.
        """
        question = {"role": "user", "content": text}
        sent_question = {"role": "user", "content": text if sent is None else sent}
        self._prompt, num_dropped = self._fitting_prompt([*self.messages, sent_question])
        self.answer, self.base_answer = ChatAnswer(num_dropped=num_dropped), None
        return self._recorded(question)

    def base_reply(self) -> Generator[str, None, None]:
        """Yield the base model's answer to the last prompt. The answer is not added to the conversation."""
        if not self.model.has_base:
            raise UserError("the base model is unknown", fix="set it with `--base MODEL`")
        self.base_answer = ChatAnswer(num_dropped=self.answer.num_dropped)
        return self._generated(self.model.base_runtime(), self.base_answer)

    def undo(self) -> bool:
        """Remove the last question and its answer. Return False if the conversation is empty."""
        if not self.messages:
            return False
        self._unfinished.discard(len(self.messages) - 1)
        del self.messages[-2:]
        self.clear_answer()
        return True

    def reset(self) -> None:
        """Start a new conversation with the same system prompt."""
        self.messages.clear()
        self._unfinished.clear()
        self.clear_answer()
        self._saved = None

    def save(self, path: Path) -> int:
        """Append the conversation as a training row to a file that `prepare` reads. Return the number of answers.

        Saving again replaces the row. Answers that did not end with a stop token get weight 0, so that a model trained
        on the row does not learn to stop in the middle. Empty answers are left out with their questions.
        """
        row, num_answers = self._row()
        if not num_answers:
            raise UserError("there is nothing to save yet")
        try:
            old = read_bytes(path) if path.exists() else b""
            if self._saved is not None and self._saved[0] == path.resolve():
                # Remove only our own row, because others may have appended to the file since then.
                old = old.replace(self._saved[1], b"", 1)
            old += b"\n" if old and not old.endswith(b"\n") else b""
            line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
            write_atomic(path, old + line)
        except OSError as error:
            raise UserError(f"cannot write `{path}`: {error.strerror or error}") from error
        self._saved = (path.resolve(), line)
        return num_answers

    def clear_answer(self) -> None:
        """Forget the last answer and its prompt, but not the conversation."""
        self.answer, self.base_answer, self._prompt = ChatAnswer(), None, []

    def _row(self) -> tuple[dict[str, Any], int]:
        if self.model.masker is None:
            return {"text": "".join(message["content"] for message in self.messages)}, len(self.messages) // 2
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        num_answers = 0
        for index in range(0, len(self.messages), 2):
            question, answer = self.messages[index : index + 2]
            if answer["content"].strip():
                messages += [question, {**answer, "weight": 0} if index + 1 in self._unfinished else answer]
                num_answers += 1
        return {"messages": messages}, num_answers

    def _fitting_prompt(self, messages: list[Message]) -> tuple[list[int], int]:
        """Return the prompt and the number of old messages left out so that an answer fits in the context."""
        num_free = self.context - min(self.options.length, self.context // 4)
        ids: list[int] = []
        for first in range(0, len(messages), 2):
            ids = self._prompt_ids(messages[first:])
            if len(ids) <= num_free:
                return ids, first
        raise UserError(
            f"the message is too long: with the chat template it has {count(len(ids), 'token')}, and the model's "
            f"context holds {count(self.context)}",
            fix="shorten the message",
        )

    def _prompt_ids(self, messages: list[Message]) -> list[int]:
        if self.model.masker is None:
            return text_ids(self.model.encoder, "".join(message["content"] for message in messages))
        system = [{"role": "system", "content": self.system}] if self.system else []
        return prompt_ids(self.model.masker, self.model.encoder, [*system, *messages])

    def _recorded(self, question: Message) -> Generator[str, None, None]:
        answer = self.answer
        try:
            yield from self._generated(nullcontext(self.model.runtime), answer)
        finally:
            if answer.num_tokens or answer.ended == "end":
                if answer.ended != "end":
                    self._unfinished.add(len(self.messages) + 1)
                self.messages += [question, {"role": "assistant", "content": answer.text}]

    def _generated(self, opened: AbstractContextManager[Runtime], answer: ChatAnswer) -> Generator[str, None, None]:
        decoding = Decoding(temperature=self.options.temperature, seed=self.options.seed)
        answer.num_prompt_tokens = len(self._prompt)
        with opened as runtime:
            tokens = runtime.stream(
                self._prompt, max_new_tokens=self.options.length, stop_ids=self.model.stop_ids, decoding=decoding
            )
            begun = time.monotonic()
            try:
                for text in self._decoded(tokens, answer):
                    answer.text += text
                    yield text
                answer.ended = tokens.ended or "stopped"
            finally:
                tokens.close()
                answer.seconds = time.monotonic() - begun

    def _decoded(self, tokens: Iterator[int], answer: ChatAnswer) -> Iterator[str]:
        decoder = StreamDecoder(self.model.tokenizer.backend)
        # White space before an answer that the model generates; the template adds it again in the next prompt.
        lead = self.model.masker.frame.leading_space if self.model.masker else ""
        for token in tokens:
            answer.num_tokens += 1
            if text := decoder.add(token):
                yield text.removeprefix(lead)
                lead = ""
        if text := decoder.finish():
            yield text.removeprefix(lead)
