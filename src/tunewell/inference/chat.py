"""A conversation with a model: what was said, what is said next, and what is kept of it."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tunewell.core.errors import UserError
from tunewell.core.files import write_atomic
from tunewell.core.units import count
from tunewell.data.rows.conversation import Message
from tunewell.inference.chat_model import ChatModel
from tunewell.inference.generate import Decoding
from tunewell.inference.prompt import prompt_ids, text_ids
from tunewell.inference.runtime import Runtime
from tunewell.inference.stream import Speller

_MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class ChatOptions:
    """How answers are given; raises UserError for what makes no sense."""

    temperature: float = 0.0
    """0 takes the likeliest token every time."""
    length: int = 512
    """Tokens of an answer at most."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise UserError(f"the temperature cannot be {self.temperature}", fix="0 is greedy, 1 is as learned")
        if self.length < 1:
            raise UserError(f"an answer cannot have {self.length} tokens", fix="give at least 1")
        if not 0 <= self.seed <= _MAX_SEED:
            raise UserError(f"the seed cannot be {self.seed}", fix="give a whole number from 0 on")


@dataclass
class Answer:
    """What the model said, and how it came about."""

    text: str = ""
    ended: Literal["end", "length", "context", "stopped"] = "stopped"
    """By itself, at the length asked for, at the end of the context, or because somebody stopped it."""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_forgotten: int = 0
    """Messages that no longer fit the context and were not shown to the model."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Give the speed, the reading of the prompt included."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Chat:
    """A conversation under way; one answer at a time."""

    voice: ChatModel
    system: str | None = None
    manner: ChatOptions = field(default_factory=ChatOptions)
    messages: list[Message] = field(default_factory=list)
    """Without the system prompt."""
    answer: Answer = field(default_factory=Answer)
    """The last one, complete when its text has come to an end."""
    base_answer: Answer | None = None
    _prompt: list[int] = field(default_factory=list)
    _unfinished: set[int] = field(default_factory=set)
    _saved: tuple[Path, bytes] | None = None

    def __post_init__(self) -> None:
        self.set_system(self.system)

    @property
    def context(self) -> int:
        """Say how many tokens the model can have before it, its answer included."""
        return self.voice.runtime.context_length

    def set_system(self, text: str | None) -> None:
        """Set the system prompt from the next answer on; None or nothing takes it away."""
        if text and self.voice.masker is None:
            raise UserError("the model has no chat template, so there is no place for a system prompt")
        self.system = text or None

    def set_manner(self, **changes: Any) -> None:
        """Change how the next answers are given; raise UserError, and change nothing, for what makes no sense."""
        self.manner = replace(self.manner, **changes)

    def say(self, text: str) -> Iterator[str]:
        """Say something; give the answer's text as it comes, and keep both. Closing it early keeps what came so far.

        Raises UserError, and keeps nothing, where it cannot be said.
        """
        asked = {"role": "user", "content": text}
        self._prompt, num_forgotten = self._fitting([*self.messages, asked])
        self.answer, self.base_answer = Answer(num_forgotten=num_forgotten), None
        return self._kept(asked)

    def base_says(self) -> Iterator[str]:
        """Give what the model it was made from answers to the same prompt; it is not kept."""
        if not self.voice.has_base:
            raise UserError("what this model was made from is not known", fix="name it with `--base MODEL`")
        self.base_answer = Answer(num_forgotten=self.answer.num_forgotten)
        return self._by_base(self.base_answer)

    def undo(self) -> bool:
        """Take the last question and its answer back; False where nothing was said."""
        if not self.messages:
            return False
        self._unfinished.discard(len(self.messages) - 1)
        del self.messages[-2:]
        self._clear_answer()
        return True

    def reset(self) -> None:
        """Begin anew, with the same system prompt."""
        self.messages.clear()
        self._unfinished.clear()
        self._clear_answer()
        self._saved = None

    def save(self, path: Path) -> int:
        """Append the conversation to a file of rows that `prepare` reads; give the number of its answers.

        A conversation saved before is saved in its place. Answers that did not come to their end get weight 0, so that
        nobody learns to stop in the middle; empty ones are left out with their questions.
        """
        row, num_answers = self._row()
        if not num_answers:
            raise UserError("nothing was said yet that could be saved")
        try:
            old = path.read_bytes() if path.exists() else b""
            if self._saved is not None and self._saved[0] == path.resolve():
                # Only what was saved from here: others may have added to the file since.
                old = old.replace(self._saved[1], b"", 1)
            old += b"\n" if old and not old.endswith(b"\n") else b""
            line = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
            write_atomic(path, old + line)
        except OSError as error:
            raise UserError(f"`{path}` cannot be written: {error.strerror or error}") from error
        self._saved = (path.resolve(), line)
        return num_answers

    def _clear_answer(self) -> None:
        self.answer, self.base_answer, self._prompt = Answer(), None, []

    def _row(self) -> tuple[dict[str, Any], int]:
        if self.voice.masker is None:
            return {"text": "".join(message["content"] for message in self.messages)}, len(self.messages) // 2
        kept: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        num_answers = 0
        for at in range(0, len(self.messages), 2):
            question, reply = self.messages[at : at + 2]
            if reply["content"].strip():
                kept += [question, {**reply, "weight": 0} if at + 1 in self._unfinished else reply]
                num_answers += 1
        return {"messages": kept}, num_answers

    def _fitting(self, messages: list[Message]) -> tuple[list[int], int]:
        """Give the prompt, without the oldest questions and answers where it would leave the answer no room."""
        room = self.context - min(self.manner.length, self.context // 4)
        ids: list[int] = []
        for first in range(0, len(messages), 2):
            ids = self._ids(messages[first:])
            if len(ids) <= room:
                return ids, first
        raise UserError(
            f"this is {count(len(ids), 'token')} with all that belongs to it, too long for the model's context of "
            f"{count(self.context)}",
            fix="say it shorter",
        )

    def _ids(self, messages: list[Message]) -> list[int]:
        if self.voice.masker is None:
            return text_ids(self.voice.encoder, "".join(message["content"] for message in messages))
        system = [{"role": "system", "content": self.system}] if self.system else []
        return prompt_ids(self.voice.masker, self.voice.encoder, [*system, *messages])

    def _kept(self, asked: Message) -> Iterator[str]:
        answer = self.answer
        try:
            yield from self._spoken(self.voice.runtime, answer)
        finally:
            if answer.num_tokens or answer.ended == "end":
                if answer.ended != "end":
                    self._unfinished.add(len(self.messages) + 1)
                self.messages += [asked, {"role": "assistant", "content": answer.text}]

    def _by_base(self, answer: Answer) -> Iterator[str]:
        with self.voice.as_base() as runtime:
            yield from self._spoken(runtime, answer)

    def _spoken(self, runtime: Runtime, answer: Answer) -> Iterator[str]:
        decoding = Decoding(temperature=self.manner.temperature, seed=self.manner.seed)
        answer.num_prompt_tokens = len(self._prompt)
        tokens = runtime.stream(
            self._prompt, max_new_tokens=self.manner.length, stop_ids=self.voice.stop_ids, decoding=decoding
        )
        begun = time.monotonic()
        try:
            for more in self._spelled(tokens, answer):
                answer.text += more
                yield more
            answer.ended = tokens.ended or "stopped"
        finally:
            tokens.close()
            answer.seconds = time.monotonic() - begun

    def _spelled(self, tokens: Iterator[int], answer: Answer) -> Iterator[str]:
        speller = Speller(self.voice.tokenizer.backend)
        # What the template puts before a reply but leaves to the model to write: the template will put it there again.
        lead = self.voice.masker.frame.leading_space if self.voice.masker else ""
        for token in tokens:
            answer.num_tokens += 1
            if more := speller.add(token):
                yield more.removeprefix(lead)
                lead = ""
        if more := speller.finish():
            yield more.removeprefix(lead)
