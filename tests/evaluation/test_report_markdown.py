"""The Markdown of a report: short, and nothing in it that a model could have said is more than text."""

import re

import pytest
from hostile_texts import MARKDOWN_PAYLOADS, PAYLOADS
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from sample_reports import SAMPLES, college_report, minimal_report, report_of_everything, weak_report, with_text

from examples_limit import examples
from tunewell.evaluation.report.markdown import escaped, fenced, prose, report_markdown
from tunewell.evaluation.report.view import single_line, visible
from tunewell.records.report import read_report, write_report

# A parser nobody here wrote, with the tables and the strike-through of GitHub's dialect.
PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
LONGEST_COMMENT = 65_536
"""Characters GitHub takes in one comment."""
OUR_HTML = {"<details>", "</details>", "<summary>", "</summary>", "<sub>", "</sub>"}
EXCHANGE = college_report().exchanges[0]
_TEXTS = st.text(st.one_of(st.characters(codec=None, exclude_categories=[]), st.sampled_from("`|\\<>[]()!@#*_~-+.1\n")))


def _tokens(markdown: str) -> list[Token]:
    """List every token, those within lines too."""
    return [each for token in PARSER.parse(markdown) for each in (token, *(token.children or []))]


def _text_of(markdown: str) -> str:
    """Give the text as it is seen, without the marks of no width that keep words from being links."""
    parts = [token.content for token in _tokens(markdown) if token.type in {"text", "code_inline", "fence"}]
    return "".join(parts).replace("\u2060", "")


def _structure(markdown: str) -> list[str]:
    """List the blocks, without those of a line, which may hold code or not."""
    return [token.type for token in PARSER.parse(markdown)]


@pytest.mark.parametrize("name", SAMPLES)
def test_verdict_summary_figures_reasons_and_commands_are_there(name):
    """What a reviewer needs without opening anything."""
    report = SAMPLES[name]()
    text = _text_of(report_markdown(report))
    assert f"{report.verdict}: {report.subject.name}" in text and report.summary in text
    for reason in report.reasons:
        assert reason.what.replace("`", "") in text and reason.next.replace("`", "") in text
    assert all(command in text for command in report.repeat)
    assert "Held-out loss" in text or report.held_out is None


@pytest.mark.parametrize("payload", [*PAYLOADS, *MARKDOWN_PAYLOADS])
def test_a_payload_in_every_text_stays_text(payload):
    """It opens no element and no cell, calls nobody, and links nowhere."""
    markdown = report_markdown(with_text(report_of_everything(), payload))
    plain = report_markdown(with_text(report_of_everything(), "plain"))
    assert _structure(markdown) == _structure(plain)
    tokens = _tokens(markdown)
    assert not {token.type for token in tokens} & {"link_open", "image", "s_open", "em_open", "softbreak", "hardbreak"}
    html = [tag for token in tokens if token.type.startswith("html") for tag in re.findall("<[^>]*>", token.content)]
    assert set(html) <= OUR_HTML and html.count("<details>") == html.count("</details>")
    _is_not_linked(tokens)
    markdown.encode("utf-8")


def _is_not_linked(tokens: list[Token]) -> None:
    """Look for what sites make links of after rendering, everywhere but in code."""
    for token in tokens:
        if token.type == "text":
            assert not re.search(r"@\w|#\d|\w://|www\.|GH-\d|:\w+:|!\d", token.content, re.IGNORECASE), token.content


@given(_TEXTS)
@settings(max_examples=examples(200))
def test_any_text_in_a_cell_leaves_the_table_whole(text):
    """One bar or one line break too many moves every answer below into the wrong column."""
    exchange = EXCHANGE.model_copy(update={"question": text, "reference": text})
    markdown = report_markdown(minimal_report().model_copy(update={"exchanges": [exchange]}))
    tokens = PARSER.parse(markdown)
    assert [token.type for token in tokens].count("td_open") == 4
    lines = [token.content for token in tokens if token.type == "inline"]
    assert len(lines) == 12, "a heading, the summary, a heading, eight cells, the last line"


@given(_TEXTS)
@settings(max_examples=examples(200))
def test_escaped_text_is_one_paragraph_that_reads_as_it_was(text):
    """Escapes must be taken back by the parser, all of them, and nothing else be taken for a mark."""
    for write in (escaped, prose):
        tokens = _tokens(write(text))
        kinds = {token.type for token in tokens} - {"text_special"}
        assert kinds <= {"paragraph_open", "inline", "text", "code_inline", "paragraph_close"}
        _is_not_linked(tokens)
        if write is escaped and len(single_line(text)) < 160:
            assert _text_of(write(text)) == single_line(text)


@given(_TEXTS)
@settings(max_examples=examples(200))
def test_a_fenced_text_cannot_close_its_fence(text):
    """Whatever the model said about fences."""
    (token,) = PARSER.parse(fenced(text))
    assert token.type == "fence" and token.content == visible(text) + "\n"


@pytest.mark.parametrize("text", ["&|", "`&`", "x", "\x00", "```\n"])
def test_a_report_of_any_size_fits_into_a_comment(text):
    """A comment that is too long is refused as a whole; escapes make a text up to six times as long."""
    report = with_text(report_of_everything(), text * 3_000)
    many = {"notes": report.notes * 99, "reasons": report.reasons * 99, "exchanges": report.exchanges * 99}
    large = report.model_copy(update={**many, "by_source": report.by_source * 99, "repeat": report.repeat * 99})
    markdown = report_markdown(large)
    assert len(markdown) < LONGEST_COMMENT
    assert "more reasons in `report.html`" in markdown and "more answers in `report.html`" in markdown


def test_an_empty_answer_is_shown_in_words():
    """An empty cell looks like a mistake."""
    said = weak_report().exchanges[0].tuned.model_copy(update={"text": " ", "right": False, "faults": ["empty"]})
    exchange = weak_report().exchanges[0].model_copy(update={"tuned": said})
    markdown = report_markdown(minimal_report().model_copy(update={"exchanges": [exchange]}))
    assert "wrong (empty): (empty)" in markdown


def test_the_rows_add_up_or_it_is_said():
    """The ledger closes here too."""
    assert "12,480 rows = 12,408 used for training + 41 held out + 31 dropped." in report_markdown(weak_report())
    ledger = weak_report().ledger
    assert ledger
    broken = weak_report().model_copy(update={"ledger": ledger.model_copy(update={"rows": 1})})
    assert "Rows are missing." in report_markdown(broken)


def test_equal_reports_give_equal_texts(tmp_path):
    """Also after a round trip through the disk, which sorts the keys."""
    for make in SAMPLES.values():
        write_report(tmp_path, make())
        assert report_markdown(make()) == report_markdown(make()) == report_markdown(read_report(tmp_path))


def test_a_college_report_is_short():
    """A reviewer reads a screen or two."""
    assert len(report_markdown(college_report()).splitlines()) < 70
