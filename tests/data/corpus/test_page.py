"""The page of `inspect --html`: its counts are the manifest's, its masks are the corpus's, and it runs nothing."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hostile_texts import PAYLOADS
from parsed_page import Page
from test_row_secrets import PLANTED
from tests.corpora import prepare_in, rows_file, write_rows
from tiny import write_tiny_model

from tunewell.cli.main import main
from tunewell.data.corpus.reader import open_corpus

NUM_ROWS = 40
SECRETS = [text for texts in PLANTED.values() for text in texts]
PARTS = [
    "dE6gH9jK2", "IOSFODNN7", "4567890ABCD", "hunter2", "s3cr3tpw", "def-123", "eyJzdWIi", "MIIE", "ann.smith", "bob+x",
    "c_d@", "7946 0958", "555-2671", "030 1234567", "4111 1111", "0005555555", "822463",
]  # fmt: skip
"""Parts of all planted secrets."""


def chat(question: str, *replies: str) -> dict[str, list[dict[str, str]]]:
    """Return a row with a follow-up question before each further reply."""
    turns = [("user", question)]
    for number, reply in enumerate(replies):
        turns += [("user", f"And then, {number}?")] if number else []
        turns += [("assistant", reply)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def good_row(number: int) -> dict[str, list[dict[str, str]]]:
    """Return a conversation of two replies, unlike those of other numbers."""
    words = " ".join(f"w{number * 7919 % 10007 + place * 31}" for place in range(30))
    return chat(f"Grüße {number} {words}?", f"It is 東京 {number}.\n\nYes: {words}", f"Then {number + 1}.")


def dirty_rows(texts: list[str]) -> list[dict]:
    """Return good rows, near and exact duplicates, rows to drop, and rows with the given texts."""
    rows = [good_row(number) for number in range(NUM_ROWS)]
    near = json.loads(json.dumps(rows[3]).replace("Then 4.", "Then five."))
    rows += [near, rows[5], chat("", "an answer"), chat("a question", ""), {"other": "columns"}]
    rows += [chat(f"about {number}: {text}", f"{text} it is") for number, text in enumerate(texts)]
    rows += [chat("", text) for text in texts]
    return rows


def page_of(folder: Path, *options: str) -> str:
    """Write the page of `folder / "corpus"` and return it."""
    assert main(["inspect", str(folder / "corpus"), "--html", str(folder / "page.html"), *options]) == 0
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_model):
    """A folder with a corpus of `dirty_rows` with hostile texts."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", dirty_rows(PAYLOADS))
    prepare_in(tmp_path, tiny_model, Path("rows.jsonl"), "data.held_out=0.2", "data.clean.near_duplicate=drop")
    return tmp_path


class Masks(HTMLParser):
    """The supervised runs of each row on a page, without line end signs, and each row's whole text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.runs: list[list[str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        if "tokens" in (dict(attrs).get("class") or "").split():
            self.runs.append([])
            self.texts.append("")
        elif tag == "mark" and self.runs:
            self.runs[-1].append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self.runs and "article" in self._open and "h3" not in self._open and "em" not in self._open:
            self.texts[-1] += data
            if "mark" in self._open:
                self.runs[-1][-1] += data


def test_the_counts_on_the_page_are_those_of_the_manifest(folder):
    """Guards the ledger: a page with other numbers than the corpus would be worse than none."""
    manifest, html = open_corpus(folder / "corpus").manifest, page_of(folder)
    text = " ".join(Page(html).text.split())
    dropped = sum(manifest.dropped.values())
    parts = f"{manifest.documents} used for training + {manifest.held_out} held out + {dropped} dropped."
    assert f"{manifest.rows_in} rows = {parts} Every row is accounted for." in text
    assert manifest.held_out > 0 and len(manifest.dropped) >= 5
    for reason, number in manifest.dropped.items():
        assert re.search(rf"\b{number} rows? {reason}\b", text), reason
    assert f"{manifest.tokens.supervised:,} supervised + {manifest.tokens.context:,} context" in text
    bins = re.findall(r"<bdi>(\d+) to (\d+)</bdi></th><td role=\"cell\" class=\"n\">(\d+)</td>", html)
    assert [(int(a), int(b) + 1, int(n)) for a, b, n in bins] == list(map(tuple, manifest.lengths.histogram))
    assert str(folder) not in text


def test_each_reason_names_its_first_row(folder):
    """Guards the rows to look at: a reason without a row says what, and not where."""
    text = " ".join(Page(page_of(folder)).text.split())
    corpus = open_corpus(folder / "corpus")
    firsts = {row.reason: row for row in reversed(list(corpus.dropped_rows()))}
    assert len(firsts) >= 5
    for row in firsts.values():
        assert f"{row.source} row {row.row}" in text, row


def test_supervised_text_on_the_page_is_the_replies(folder):
    """Guards the masks, by which people decide whether the data is right: also replies with split characters."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    corpus, masks = open_corpus(folder / "corpus"), Masks(page_of(folder))
    assert len(masks.runs) == len(corpus) + len(corpus.held_out)
    for document, runs in zip([*corpus, *corpus.held_out], masks.runs, strict=True):
        if document.row <= NUM_ROWS:
            turns = rows[document.row - 1]["messages"]
            replies = [turn["content"] for turn in turns if turn["role"] == "assistant"]
            assert [run.removesuffix("<|im_end|>") for run in runs] == replies


def test_hostile_rows_add_no_element_and_no_attribute(folder, tmp_path_factory, tiny_model, monkeypatch):
    """Guards against rows that become part of the page, in masks and pairs."""
    plain = tmp_path_factory.mktemp("plain")
    monkeypatch.chdir(plain)
    harmless = [f"plain text {number} \0" if number < 3 else f"plain {number}" for number in range(len(PAYLOADS))]
    write_rows(plain / "rows.jsonl", dirty_rows(harmless))
    prepare_in(plain, tiny_model, Path("rows.jsonl"), "data.held_out=0.2", "data.clean.near_duplicate=drop")
    known = {(tag, name) for tag, attributes in Page(page_of(plain)).elements for name, _ in [*attributes, ("", "")]}
    hostile = Page(page_of(folder))
    assert {(tag, name) for tag, attributes in hostile.elements for name, _ in [*attributes, ("", "")]} <= known
    assert "</script><script>alert(1)</script>" in hostile.text.replace("↵", "")
    assert {"script", "style"} <= {tag for tag, _ in hostile.elements}


def test_the_policy_allows_only_the_page_s_own_style_and_script(folder):
    """Guards the second wall: nothing is loaded, and nothing else runs."""
    page = Page(page_of(folder))
    digests = [base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in (page.style, page.script)]
    (policy,) = [value for value in page.attributes("content") if value.startswith("default-src")]
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == tags.count("style") == 1
    places = [place for name in ("src", "href", "action", "data", "srcset") for place in page.attributes(name)]
    assert [place for place in places if not place.startswith(("#", "data:"))] == []
    assert not re.search(r"https?:|url\(|@import|fetch|XMLHttp|import\(", page.style + page.script)
    assert {place[1:] for place in places if place.startswith("#")} <= set(page.attributes("id"))


@pytest.mark.parametrize("action", ["warn", "redact", "drop"])
def test_no_secret_is_in_clear(tmp_path, monkeypatch, tiny_model, action):
    """Guards pages that are mailed around, also details of dropped rows and pairs."""
    monkeypatch.chdir(tmp_path)
    rows = dirty_rows(SECRETS)
    pair = good_row(77)
    pair["messages"][0]["content"] += " " + SECRETS[0]
    rows += [pair, json.loads(json.dumps(pair).replace("Then 78.", "Then seven."))]
    write_rows(tmp_path / "rows.jsonl", rows)
    prepare_in(tmp_path, tiny_model, Path("rows.jsonl"), f"data.clean.secrets={action}", "data.held_out=0")
    html = page_of(tmp_path)
    shown = Page(html).text.replace("↵", "")
    kinds = open_corpus(tmp_path / "corpus").manifest.secrets.kinds
    assert all(any(part in text for part in PARTS) for text in SECRETS)
    assert [part for part in PARTS if part in shown or part in html] == []
    for kind in PLANTED:
        assert re.search(rf"{re.escape(kind)}\s*{kinds[kind]}\b", shown)


def test_a_row_whose_secret_the_tokenizer_changed_is_not_shown(tmp_path, monkeypatch):
    """Guards tokenizers that change letters: the key is no longer recognised, and still can be read."""
    monkeypatch.chdir(tmp_path)
    model = write_tiny_model(tmp_path / "model")
    spec = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(spec | {"normalizer": {"type": "Lowercase"}}))
    rows = [chat(f"key {number}?", f"AKIA1234567890ABC{number}DE") for number in range(3)]
    write_rows(tmp_path / "rows.jsonl", [*rows, chat("plain?", "it is")])
    prepare_in(tmp_path, model, Path("rows.jsonl"), "data.held_out=0")
    html = page_of(tmp_path)
    assert "1234567890" not in Page(html).text
    assert html.count("Not shown: the row contains secrets") == 3 and len(Masks(html).runs) == 1


@pytest.mark.slow
def test_a_large_corpus_gives_a_small_page(tmp_path, monkeypatch, tiny_model):
    """Guards the size: 200 rows, and long ones without their middle. Every source and both splits are there."""
    monkeypatch.chdir(tmp_path)
    rows_file(tmp_path / "many.jsonl", 500)
    words = " ".join(f"word{number}" for number in range(3000))
    write_rows(tmp_path / "long.jsonl", [chat("a long one?", f"first {words} last")])
    prepare_in(tmp_path, tiny_model, [Path("many.jsonl"), Path("long.jsonl")], "data.held_out=0.2")
    html = page_of(tmp_path)
    masks, text = Masks(html), Page(html).text
    assert 190 <= len(masks.runs) <= 200 and "held out" in text and len(html) < 600_000
    (long,) = [each for each in masks.texts if "first word0" in each]
    assert "last<|im_end|>" in long and "word1500" not in long
    assert re.search(r"[\d,]+ tokens not shown", long)
    assert page_of(tmp_path) == html, "equal input gives an equal page"
    assert len(Masks(page_of(tmp_path, "--show", "7")).runs) <= 7
    assert [len(Masks(page_of(tmp_path, "--document", "3")).runs)] == [1]


def test_near_pairs_are_shown_with_their_difference(folder, tiny_model):
    """Guards the pairs: which words differ is what people look for. Of dropped rows only the numbers are left."""
    assert re.search(r"\d\d\.\d% the same.*, dropped", page_of(folder))
    prepare_in(folder, tiny_model, Path("rows.jsonl"), "data.held_out=0.2")
    html = page_of(folder)
    assert "<ins>five</ins>" in html and "<ins>4</ins>" in html


def test_the_page_of_a_row_file_is_all_that_is_written(folder, tiny_model, capsys):
    """Guards the promise that looking changes nothing else."""
    before = {path for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["inspect", "rows.jsonl", "--model", str(tiny_model), "--html", "new.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "format_version": 1,
        "page": "new.html",
        "bytes": (folder / "new.html").stat().st_size,
    }
    assert {path for path in folder.rglob("*") if path.is_file()} - before == {folder / "new.html"}
    assert "Then 4." in Page((folder / "new.html").read_text(encoding="utf-8")).text


@pytest.mark.parametrize("name", ["rows.jsonl", "corpus", "missing/page.html"])
def test_only_an_html_file_in_a_folder_is_written(folder, name, capsys):
    """Guards row files: `--html rows.jsonl` is a likely slip."""
    before = (folder / "rows.jsonl").read_bytes()
    assert main(["inspect", "--html", name]) == 2
    assert "fix:" in capsys.readouterr().err
    assert (folder / "rows.jsonl").read_bytes() == before
