"""The page of a report: it shows everything, runs nothing, loads nothing."""

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
from hostile_texts import PAYLOADS
from hypothesis import given, settings
from hypothesis import strategies as st
from parsed_page import Page
from sample_reports import (
    SAMPLES,
    college_report,
    looping_report,
    minimal_report,
    report_of_everything,
    weak_report,
    with_text,
)

from examples_limit import examples
from tunewell.evaluation.report.page import report_page
from tunewell.evaluation.report.view import kinds_of, title, visible
from tunewell.records.plan import Chosen
from tunewell.records.report import (
    Answer,
    AnsweredQuestion,
    Curve,
    LossPair,
    Report,
    RowCounts,
    read_report,
    write_report,
)
from tunewell.runs.loss_curve import LossPlot

_TEXTS = st.text(st.characters(codec=None, exclude_categories=[]), max_size=80)


@pytest.fixture(params=SAMPLES)
def page(request: pytest.FixtureRequest) -> Page:
    """The page of each sample."""
    return Page(report_page(SAMPLES[request.param]()))


def test_nothing_is_loaded_from_elsewhere(page):
    """A page that is mailed around must not tell anybody that it was opened."""
    places = [
        value
        for name in ("src", "href", "srcset", "xlink:href", "data", "action", "poster")
        for value in page.attributes(name)
    ]
    assert places and [place for place in places if not place.startswith(("#", "data:"))] == []
    assert page.style and not re.search(r"url\(|@import|@font-face|image-set", page.style)


def test_every_link_within_the_page_leads_somewhere(page):
    """A section that is left out must not be linked."""
    assert {place[1:] for place in page.attributes("href") if place.startswith("#")} <= set(page.attributes("id"))


def test_no_element_runs_or_styles_anything(page):
    """The policy would stop it; nothing should try."""
    tags = {tag for tag, _ in page.elements}
    names = {name for _, attributes in page.elements for name, _ in attributes}
    assert not tags & {"script", "iframe", "object", "embed", "form", "img", "base", "foreignobject", "animate"}
    assert not {name for name in names if name.startswith("on")} and "style" not in names


def test_the_policy_allows_this_style_and_nothing_else(page):
    """A hash of other bytes than those in the page would leave it without any style."""
    (policy,) = [
        dict(each)["content"] for tag, each in page.elements if ("http-equiv", "Content-Security-Policy") in each
    ]
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert [tag for tag, _ in page.elements].count("style") == 1


def test_a_screen_reader_finds_its_way(page):
    """Language, title, headings without a jump, headers of tables, names of pictures."""
    assert page.declarations == ["DOCTYPE html"] and page.elements[0] == ("html", (("lang", "en"),))
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert all(dict(attributes).get("scope") for tag, attributes in page.elements if tag == "th")
    for tag, attributes in page.elements:
        if tag == "svg":
            given = dict(attributes)
            assert given.get("aria-hidden") == "true" or (given["role"] == "img" and given["aria-labelledby"])
    assert len(page.attributes("id")) == len(set(page.attributes("id")))


def test_the_verdict_is_said_in_words_and_in_a_shape():
    """Colour alone says nothing to one man in twelve."""
    for name, verdict in (("pass", "PASS"), ("weak", "WEAK"), ("fail", "FAIL")):
        page = Page(report_page(SAMPLES[name]()))
        report = SAMPLES[name]()
        assert verdict in page.text and report.summary.replace("`", "") in page.text
        assert f"#sign-{verdict}" in page.attributes("href")
        for reason in report.reasons:
            assert reason.what.replace("`", "") in page.text and reason.next.replace("`", "") in page.text


@lru_cache(maxsize=1)
def _harmless_elements() -> frozenset[Any]:
    return frozenset(Page(report_page(with_text(report_of_everything(), "a `b` c"))).elements)


def test_the_report_of_everything_leaves_nothing_out():
    """A field that is empty there is a field no payload was tried in."""
    report = report_of_everything()
    assert [name for name in Report.model_fields if getattr(report, name) in (None, "", [], {})] == []


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_payload_in_every_text_is_shown_and_does_nothing(payload):
    """Models say what they have read, and the web is full of this."""
    hostile = report_page(with_text(report_of_everything(), payload))
    page = Page(hostile)
    assert set(page.elements) <= _harmless_elements()
    assert page.text.count(visible(payload)) > 30, "shown as it is, many times"
    hostile.encode("utf-8")


@given(_TEXTS, _TEXTS, _TEXTS)
@settings(max_examples=examples(60))
def test_any_text_of_a_model_is_shown_and_changes_no_element(question, reference, answer):
    """Whatever a tokenizer can decode can come here: halves of pairs, NULs, marks of direction."""
    page = Page(report_page(_asking(question, reference, answer)))
    assert _without_focus(page) == _plain_elements("a" if answer.strip() else answer)
    for text in (question, reference, answer):
        assert (visible(text) if text.strip() else "(empty)") in page.text


@lru_cache(maxsize=99)
def _plain_elements(answer: str) -> list[Any]:
    return _without_focus(Page(report_page(_asking("q", "r", answer))))


def _without_focus(page: Page) -> list[Any]:
    """List the elements as if no text were long."""
    return [(tag, [each for each in attributes if each[0] != "tabindex"]) for tag, attributes in page.elements]


def _asking(question: str, reference: str, answer: str) -> Report:
    said = Answer(text=answer, num_tokens=3, ended=True)
    exchange = AnsweredQuestion(
        document=0, source="rows", row=1, question=question, reference=reference, base=said, tuned=said
    )
    return minimal_report().model_copy(update={"exchanges": [exchange]})


def test_an_empty_answer_is_shown_in_words():
    """An empty box looks like a mistake of the page."""
    assert "(empty)" in Page(report_page(_asking("q", "r", ""))).text
    assert "(empty), 3 blank characters" in Page(report_page(_asking("q", "r", " \n "))).text


def test_white_space_of_an_answer_is_kept():
    """Code and tables are answers too."""
    text = "\n  def f():\n\t\treturn  1\n\n"
    assert f">{text}</div>" in report_page(_asking("q", "r", text))


def test_the_ledger_closes_on_the_page():
    """Every row is somewhere, and the reader can add it up."""
    page = Page(report_page(weak_report()))
    ledger = weak_report().ledger
    assert ledger
    words = " ".join(page.text.split())
    assert "12,480 rows = 12,408 used for training + 41 held out + 31 dropped. Every row is accounted for." in words
    table = words.split("Row counts")[1].split("By source")[0]
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]+", table)]
    assert numbers[-1] == sum(numbers[:-1]) == ledger.rows


@pytest.mark.parametrize(("rows", "words"), [(12, "2 rows unaccounted for"), (9, "1 row too many")])
def test_a_ledger_that_does_not_close_says_so(rows, words):
    """The one thing worse than a lost row is a page that hides it."""
    ledger = RowCounts(rows=rows, documents=7, held_out=2, dropped={"empty": 1}, tokens=0, supervised=0, sources=[])
    page = Page(report_page(minimal_report().model_copy(update={"ledger": ledger})))
    assert f" {words}." in page.text and "Every row is accounted for" not in page.text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e308, 5e-324])
def test_numbers_of_every_kind_are_rendered(value):
    """A broken run is the one that most needs its report."""
    pair = LossPair(name="x", documents=1, tokens=1, base=value, tuned=value)
    curve = Curve(train=[(1, 1.0), (2, value), (3, 2.0)], held_out=[(2, value)], best_step=2)
    chosen = {"min_gain": Chosen(value=value, because="so")}
    update = {"held_out": pair, "by_source": [pair], "everyday": pair, "curve": curve, "thresholds": chosen}
    page = Page(report_page(college_report().model_copy(update={**update, "seconds": {"a": value}})))
    assert not re.search(r"\b(nan|inf)\b", page.text)
    if not math.isfinite(value):
        assert "The training loss was not finite at 1 step (step 2): a gap in the line." in page.text


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("exchanges", [], "No questions were asked."),
        ("curve", Curve(), "No training log was found."),
        ("curve", Curve(train=[(1, math.nan)]), "No loss of this training was finite"),
        ("ledger", None, "No row counts"),
        ("plan", {}, "No plan"),
        ("repeat", [], "No command repeats this evaluation."),
        ("base_tally", None, "not measured"),
    ],
)
def test_what_is_missing_is_said(field, value, words):
    """A section that is silently absent leaves the reader to wonder."""
    assert words in Page(report_page(college_report().model_copy(update={field: value}))).text


def test_a_model_without_a_base_has_no_before():
    """Any folder can be judged, and not all have something to compare with."""
    report = college_report()
    alone = [exchange.model_copy(update={"base": None}) for exchange in report.exchanges]
    subject = report.subject.model_copy(update={"base": None, "kind": "model"})
    update = {"exchanges": alone, "subject": subject, "base_tally": None}
    page = Page(report_page(report.model_copy(update=update)))
    assert page.text.count("Base model") == 1 and "none to compare with" in page.text and "38 of 40" in page.text


def test_a_hundred_exchanges_do_not_drown_the_page():
    """A few are shown, all are there, the wrong ones first."""
    exchanges = [each.model_copy(update={"document": n}) for n, each in enumerate(looping_report().exchanges * 3)]
    html = report_page(college_report().model_copy(update={"exchanges": exchanges}))
    assert html.count('<article class="exchange') == 120
    assert html.split('<details class="more">')[0].count('<article class="exchange') == 6
    assert "more wrong or faulty answers" in html and "more right answers" in html


def test_what_is_too_much_for_a_page_is_counted():
    """A page of 40 MB cannot be sent; what is left out must be known."""
    exchanges = [each.model_copy(update={"question": "x" * 30_000}) for each in college_report().exchanges] * 20
    html = report_page(college_report().model_copy(update={"exchanges": exchanges}))
    assert "294 more answers in <code>report.json</code>" in html and "[10,000 more characters]" in html


def test_equal_reports_give_equal_pages(tmp_path):
    """Also after a round trip through the disk, which sorts the keys."""
    for make in SAMPLES.values():
        write_report(tmp_path, make())
        assert report_page(make()) == report_page(make()) == report_page(read_report(tmp_path))


def test_scores_of_lm_eval_are_shown_whatever_their_shape():
    """Its results have changed their shape before."""
    scores = {"results": {"arc": {"acc,none": 0.51, "alias": "arc"}}, "n": [1, 2], "odd": {"a": None, "b": [{"c": 1}]}}
    text = Page(report_page(minimal_report().model_copy(update={"lm_eval": scores}))).text
    for words in ("results / arc / acc,none", "0.51", "1, 2", json.dumps([{"c": 1}])):
        assert words in text


def test_a_curve_of_thousands_of_steps_is_thinned_and_keeps_its_spikes():
    """A megabyte of path is no picture; a spike that is thinned away is a lie."""
    train = [(step, 1.0 + (15.0 if step == 54_321 else 0.0)) for step in range(100_000)]
    [path] = re.findall(r'<path class="raw" d="(.+?)"', LossPlot(Curve(train=train)).shapes(760, 320))
    assert len(path) < 40_000
    heights = [float(point.split()[1]) for point in re.findall(r"[\d.]+ [\d.]+", path)]
    assert min(heights) < 10 + 20 and max(heights) > 280 - 40


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats()), max_size=60),
    st.lists(st.tuples(st.integers(0, 10**9), st.floats()), max_size=9),
)
def test_a_curve_never_leaves_its_frame(train, held_out):
    """Whatever was logged: not finite, out of order, twice the same step, all the same, far apart."""
    shapes = LossPlot(Curve(train=train, held_out=held_out)).shapes(340, 260)
    if not shapes:
        assert not any(math.isfinite(value) and abs(value) < 1e100 for _, value in (*train, *held_out))
        return
    number = r"([-\d.e+]+)"
    paths = re.findall(r'class="(?:raw|smooth|evaluation)" d="(.+?)"', shapes)
    points = re.findall(f"[ML]{number} {number}", " ".join(paths))
    points += re.findall(f'<circle class="dot" cx="{number}" cy="{number}"', shapes)
    assert points
    for across, down in points:
        assert 52 <= float(across) <= 322 and 10 <= float(down) <= 220
    assert all(10 <= float(y) <= 220 for y in re.findall(f'class="grid" d="M52 {number}H', shapes))


def test_the_title_names_the_model_and_its_rows():
    """`run, step 190` says nothing to the person who gets the page."""
    report = college_report()
    page = Page(report_page(report))
    assert "SmolLM2-135M-Instruct on train.jsonl, held_out.jsonl (tunewell report)" in page.text
    assert f"tunewell report: {report.subject.name}" in page.text
    assert "14 March 2026, 09:26" in page.text and report.made_at not in page.text
    subject = report.subject.model_copy(update={"base": "/models/small", "kind": "model"})
    assert title(report.model_copy(update={"subject": subject, "data": "test.jsonl"})) == "small on test.jsonl"


def test_two_evaluations_are_dots_without_a_line():
    """A dash from the first to the last looks like measurements in between, the more so on a log scale."""
    train = [(step, 4.0 / step) for step in range(1, 60)]
    for held_out, is_line in (([(0, 4.0), (59, 0.5)], False), ([(0, 4.0), (30, 0.7), (59, 0.5)], True)):
        plot = LossPlot(Curve(train=train, held_out=held_out))
        shapes = plot.shapes(760, 320)
        assert shapes.count('class="dot"') == len(held_out)
        assert ('class="evaluation"' in shapes) == ('class="evaluation"' in "".join(key for key, _ in plot.legend))
        assert ('class="evaluation"' in shapes) == is_line


def test_every_colour_of_text_can_be_read():
    """WCAG AA: 4.5 to 1 for text on each of its papers, in both schemes; 3 to 1 for the lines of a curve."""
    style = Page(report_page(minimal_report())).style
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", part))
        for part in style.split("@media print")[0].split("@media screen")
    )
    assert light.keys() <= {*dark, "tone"} and light["paper"] != dark["paper"]
    for colours in (light, dark):
        for paper in ("paper", "card", "sunk"):
            for ink in ("ink", "soft", "pass", "weak", "fail", "link"):
                assert _contrast(colours[ink], colours[paper]) >= 4.5, (ink, paper)
        for tone in ("pass", "weak", "fail"):
            assert min(_contrast(colours[ink], colours[f"{tone}-paper"]) for ink in (tone, "ink")) >= 4.5
        assert min(_contrast(colours[line], colours["paper"]) for line in ("smooth", "evaluation")) >= 3


def _contrast(one: str, other: str) -> float:
    lights = sorted(_luminance(colour) for colour in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_page_needs_no_torch():
    """A report can be made again where nothing can be trained."""
    check = (
        "import sys, tunewell.evaluation.report.page, tunewell.evaluation.report.markdown;"
        "heavy = {'torch', 'transformers', 'rich', 'typer'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_answers_can_be_filtered_by_kind():
    """Guards the list of answers, of which a reader wants the wrong ones."""
    report = college_report()
    kinds = [kinds_of(one) for one in report.exchanges]
    assert any("wrong" in one for one in kinds) and any("right" in one for one in kinds)
    page = report_page(report)
    assert all(f'id="only-{kind}"' in page for kind in ("all", "wrong", "faulty", "right", "changed"))
    assert page.count('<article class="exchange wrong') >= 1
