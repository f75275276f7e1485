"""Answer questions from an index: search, decide whether the documents answer, read, and check the sources."""

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from tunewell.core.errors import UserError
from tunewell.core.units import count
from tunewell.data.reading_prompt import NOT_FOUND, Passage, fit, is_refusal, reading_prompt
from tunewell.data.rows.conversation import Message
from tunewell.features.retrieval.reading import best_sentence, check_claims, unsupported
from tunewell.features.retrieval.search import Found, Retriever, find_names, open_retriever
from tunewell.inference.passages import IndexAnswer, SourcePassage

_FOLLOW_UP_WORDS = 4
_CONJUNCTION = re.compile(r"(?:and|or|but|und|oder|aber|et|ou|y|e|och|og|en|и|а)\b", re.IGNORECASE)
_PRONOUN = re.compile(
    r"\b(?:it|its|they|them|their|there|he|him|his|she|her|this|that|these|those|es|sie|ihr\w*|dort|ils?|elles?|leurs?)\b",
    re.IGNORECASE,
)
_TOO_FAR = "no passage is close enough to the question"


class Reader(Protocol):
    """A conversation with a model: `inference.chat.Chat`, or a server."""

    messages: list[Message]

    def prompt_for(self, text: str) -> Sequence[int]:
        """Raise UserError if a message does not fit in the context."""
        ...

    def reply(self, text: str, *, sent: str | None = None) -> Generator[str, None, None]:
        """Yield the answer to a message; `sent` is the message with its passages."""
        ...


class RetrievalChat:
    """Answers questions from an index with a model, one after the other, with follow-up questions."""

    def __init__(self, retriever: Retriever, reader: Reader, *, num_passages: int | None = None) -> None:
        self.finder = PassageFinder(retriever, num_passages)
        self.reader = reader
        self.answer = IndexAnswer("")

    @property
    def summary(self) -> str:
        """The size of the index, for the first lines of `chat`."""
        return self.finder.summary

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the answer as it is generated. `answer` is complete when the generator has ended."""
        if not question.strip():
            raise UserError("the question is empty", fix="write a question in quotes")
        earlier = [turn["content"] for turn in self.reader.messages if turn["role"] == "user"]
        found, is_answerable = self.finder.find(question, earlier)
        self.answer = answer = IndexAnswer(question, warnings=[*self.finder.retriever.notes])
        if not is_answerable:
            answer.refused, answer.answer, answer.because = True, NOT_FOUND, _TOO_FAR
            answer.sources = _sources(found, answer)
            yield NOT_FOUND
            return
        fitting = found[: len(fit(question, [one.passage for one in found], self._fits))]
        answer.num_left_out = len(found) - len(fitting)
        answer.prompt = reading_prompt(question, [one.passage for one in fitting])
        try:
            for part in self.reader.reply(question, sent=answer.prompt):
                answer.answer += part
                yield part
        finally:
            answer.refused = is_refusal(answer.answer)
            answer.because = "the model found no answer in the passages" if answer.refused else ""
            answer.sources = _sources(fitting, answer)

    def _fits(self, message: str) -> bool:
        try:
            self.reader.prompt_for(message)
        except UserError:
            return False
        return True


def open_chat(index: str, chat: Reader) -> RetrievalChat:
    """Return a chat that answers from an index."""
    return RetrievalChat(open_retriever(index), chat)


def open_finder(index: str) -> "PassageFinder":
    """Return the finder of an index, for a server."""
    return PassageFinder(open_retriever(index))


class PassageFinder:
    """Finds the passages for the questions of a conversation."""

    def __init__(self, retriever: Retriever, num_passages: int | None = None) -> None:
        self.retriever = retriever
        self.num_passages = num_passages or retriever.store.manifest.settings.num_passages.value

    @property
    def summary(self) -> str:
        """The size of the index, for the first lines of `chat` and `serve`."""
        counts = self.retriever.store.manifest.counts
        return f"{count(counts.passages, 'passage')} of {count(counts.indexed, 'document')}"

    def find(self, question: str, earlier: Sequence[str] = ()) -> tuple[list[Found], bool]:
        """Return the passages for a question, and whether they seem to answer it.

        A follow-up ("And the fee?") is searched together with the earlier question that it refers to. Other questions
        are not: with an earlier question, an unrelated one would seem to be answered.
        """
        if earlier and is_follow_up(question):
            subject = next((one for one in reversed(earlier) if find_names(one) or not is_follow_up(one)), earlier[-1])
            found, is_answerable = self.retriever.find(f"{subject} {question}", self.num_passages)
            if is_answerable:
                return found, True
        return self.retriever.find(question, self.num_passages)

    def add_passages(
        self, messages: list[dict[str, str]], fits: Callable[[list[dict[str, str]]], bool]
    ) -> tuple[list[dict[str, str]], list[dict[str, Any]], str | None]:
        """Return a conversation with passages in its last question, the sources, and the answer if it is refused."""
        asked = [turn["content"] for turn in messages if turn["role"] == "user"]
        if not asked or messages[-1]["role"] != "user":
            raise UserError("the last message is not from the user", fix="end `messages` with the role `user`")
        found, is_answerable = self.find(asked[-1], asked[:-1])
        if not is_answerable:
            return messages, source_rows(found), NOT_FOUND

        def with_passages(message: str) -> list[dict[str, str]]:
            return [*messages[:-1], {"role": "user", "content": message}]

        passages = [one.passage for one in found]
        fitting = found[: len(fit(asked[-1], passages, lambda message: fits(with_passages(message))))]
        prompt = reading_prompt(asked[-1], [one.passage for one in fitting])
        return with_passages(prompt), source_rows(fitting), None


def is_follow_up(question: str) -> bool:
    """Return True if a question seems to refer to an earlier one: "And the fee?", "How much does it cost per year?"."""
    if len(question.split()) <= _FOLLOW_UP_WORDS or _CONJUNCTION.match(question.strip()):
        return True
    return _PRONOUN.search(question) is not None and not find_names(question)


def source_rows(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the sources for JSON, before the answer is known."""
    return [
        {
            "number": number,
            "file": one.passage.file,
            "heading": one.passage.path,
            "lines": one.passage.where,
            "text": one.passage.text,
            "score": round(one.score, 4),
        }
        for number, one in enumerate(found, 1)
    ]


def _sources(found: Sequence[Found], answer: IndexAnswer) -> list[SourcePassage]:
    passages: list[Passage] = [one.passage for one in found]
    claims = check_claims(answer.answer, passages)
    answer.warnings += [f"[{number}] is not one of the {count(len(found))} sources" for number in claims.unknown]
    answer.warnings += [f"the quote “{quote}” is in no source" for quote in claims.false_quotes]
    answer.warnings += [
        f"{citation} does not say {', '.join(f'“{word}”' for word in words)}: check this answer"
        for citation, words in unsupported(answer.answer, answer.question, passages)
    ]
    return [
        SourcePassage(
            **row,
            is_cited=row["number"] in claims.cited,
            quote=best_sentence(passage, answer.answer, answer.question),
        )
        for row, passage in zip(source_rows(found), passages, strict=True)
    ]
