"""Answers from documents, as the chat shows them: the answer with its sources, and the protocol of such a chat."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class SourcePassage:
    """A passage that the model could read."""

    number: int
    file: str
    heading: str
    lines: str
    text: str
    score: float
    is_cited: bool
    quote: str
    """The sentence that shares most words with the answer."""


@dataclass
class IndexAnswer:
    """An answer with its sources."""

    question: str
    answer: str = ""
    refused: bool = False
    because: str = ""
    """Why the question was refused."""
    sources: list[SourcePassage] = field(default_factory=list[SourcePassage])
    num_left_out: int = 0
    """Number of passages that were found but did not fit in the context."""
    warnings: list[str] = field(default_factory=list[str])
    prompt: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the answer for `--json` and the server."""
        return {
            "question": self.question,
            "answer": self.answer,
            "refused": self.refused,
            "because": self.because or None,
            "sources": [
                {
                    "number": source.number,
                    "file": source.file,
                    "heading": source.heading,
                    "lines": source.lines,
                    "text": source.text,
                    "quote": source.quote,
                    "cited": source.is_cited,
                    "score": round(source.score, 4),
                }
                for source in self.sources
            ],
            "left_out": self.num_left_out,
            "warnings": self.warnings,
        }


class DocumentChat(Protocol):
    """A conversation that answers from documents; the feature `retrieval` has one."""

    answer: IndexAnswer

    @property
    def summary(self) -> str:
        """The size of the index, for the first lines of `chat`."""
        ...

    def ask(self, question: str) -> Generator[str, None, None]:
        """Yield the answer as it is generated. `answer` is complete when the generator has ended."""
        ...
