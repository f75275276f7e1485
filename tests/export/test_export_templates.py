"""Templates that depend on more than the conversation: a clock, arguments, a first token, a missing beginning."""

import json
import shutil
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from exports import exported, write_adapter, write_base
from gguf import GGUFReader
from gguf_tiny import ROWS
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from tunewell.core.errors import UserError
from tunewell.data.templates.chat_template import BUILTIN_NAMES, ChatTemplate, builtin_template, required_markers
from tunewell.data.tokenizers.load import load_tokenizer
from tunewell.export.chat_template import another_day, bake, missing_generation_prompt, saved_template
from tunewell.export.gguf.tokenizer import read_vocabulary
from tunewell.export.ollama.modelfile import derive_template
from tunewell.export.proof.transformers import clock_at
from tunewell.records.parity import read_proof

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
DATED = "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + TURNS + ASKS
THINKS = (
    TURNS
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    + "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    + "{% endif %}"
)
EVERYTHING = {"to": ("adapter", "merged", "gguf", "ollama"), "gguf": ("f16",), "precision": "fp32"}
ASKED = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    write_adapter(folder / "adapter", write_base(folder / "base"))
    return folder


def _speaking(tuned: Path, folder: Path, template: str, *, adds_bos: bool = False) -> Path:
    """The adapter on a copy of its base with another template, and a tokenizer that begins plain text with a token."""
    base, adapter = folder / "base", folder / "adapter"
    shutil.copytree(tuned / "base", base)
    shutil.copytree(tuned / "adapter", adapter)
    (base / "chat_template.jinja").unlink(missing_ok=True)
    _change(base / "tokenizer_config.json", chat_template=template, bos_token="<|endoftext|>")
    _change(adapter / "adapter_config.json", base_model_name_or_path=str(base))
    if adds_bos:
        bos = load_tokenizer(base).backend.token_to_id("<|endoftext|>")
        token = {"id": "<|endoftext|>", "ids": [bos], "tokens": ["<|endoftext|>"]}
        first, words = {"SpecialToken": {"id": token["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        pair = [words, {"Sequence": {"id": "B", "type_id": 1}}]
        processor = {"single": [first, words], "pair": pair, "special_tokens": {token["id"]: token}}
        _change(base / "tokenizer.json", post_processor={"type": "TemplateProcessing", **processor})
    return adapter


def _change(path: Path, **more: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def _texts(out: Path, **arguments: Any) -> list[str]:
    """What each of the saved templates asks, as its readers render it."""
    folders = [AutoTokenizer.from_pretrained(out / kind) for kind in ("adapter", "merged")]
    texts = [one.apply_chat_template(ASKED, add_generation_prompt=True, tokenize=False, **arguments) for one in folders]
    file = load_tokenizer(next((out / "gguf").glob("*.gguf")))
    assert file.chat_template is not None
    own = ChatTemplate(file.chat_template, special_tokens=file.special_tokens, arguments=arguments)
    return [*texts, own.render(ASKED, add_generation_prompt=True)]


# The clock.


@pytest.mark.slow
def test_a_template_with_a_clock_is_proven_on_the_day_of_training_and_keeps_its_clock(
    tuned: Path, tmp_path: Path
) -> None:
    """transformers writes today's date, training another: every conversation differed."""
    adapter = _speaking(tuned, tmp_path, DATED)
    done = exported(adapter, tmp_path / "out", **EVERYTHING, sets=("template.date=2024-03-31",))
    assert done.parity.is_ok, done.parity
    assert read_proof(tmp_path / "out").date == "2024-03-31"
    assert any("writes today's date; training and verification used 2024-03-31" in note for note in done.notes)
    assert any("stays at 2024-03-31" in note for note in done.notes)
    text = (tmp_path / "out" / "ollama" / "Modelfile").read_text()
    assert "Today: 31 Mar 2024" in text and "# the date in the text stays at 2024-03-31" in text
    assert (tmp_path / "out" / "merged" / "chat_template.jinja").read_text() == DATED
    today = AutoTokenizer.from_pretrained(tmp_path / "out" / "merged").apply_chat_template(ASKED, tokenize=False)
    assert date.today().strftime("%d %b %Y") in today


def test_the_clock_stands_still_no_longer_than_asked(tuned: Path) -> None:
    before = chat_template_utils.datetime
    with pytest.raises(RuntimeError), clock_at("1999-12-31"):
        assert chat_template_utils.datetime.now().isoformat() == "1999-12-31T00:00:00"
        raise RuntimeError
    with clock_at(None):
        assert chat_template_utils.datetime is before
    assert chat_template_utils.datetime is before


def test_another_day_has_nothing_in_common_with_this_one() -> None:
    for number in range(0, 366 * 12, 3):
        day = date(2000, 1, 1) + timedelta(days=number)
        other = date.fromisoformat(another_day(day.isoformat()))
        pairs = [(one.day, one.month, one.year, one.weekday()) for one in (day, other)]
        assert all(left != right for left, right in zip(*pairs, strict=True))


def test_a_clock_that_never_shows_is_not_spoken_of() -> None:
    given = "{% if not today is defined %}{% set today = strftime_now('%d %b') %}{% endif %}{{ today }}" + TURNS + ASKS
    for arguments, number in (({}, 1), ({"today": "a day"}, 0)):
        template = ChatTemplate(given, special_tokens={}, arguments=arguments)
        saved = saved_template(template, arguments=arguments, special_tokens={})
        assert len([note for note in saved.notes if "today's date" in note]) == number


# Arguments.


@pytest.mark.slow
def test_arguments_of_training_are_in_every_saved_template(tuned: Path, tmp_path: Path) -> None:
    """They were lost: what was trained to answer behind an empty thought was asked without one."""
    adapter = _speaking(tuned, tmp_path, THINKS)
    done = exported(adapter, tmp_path / "out", **EVERYTHING, sets=("template.arguments={enable_thinking: false}",))
    assert done.parity.is_ok, done.parity
    assert any("enable_thinking = false" in note for note in done.notes)
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert set(_texts(tmp_path / "out")) == {expected}
    # llama.cpp's server hands this to every template.
    assert set(_texts(tmp_path / "out", enable_thinking=True)) == {expected}
    assert "<think>" in (tmp_path / "out" / "ollama" / "Modelfile").read_text().split('TEMPLATE """')[1]


ARGUMENTS: dict[str, Any] = {
    "flag": False,
    "nothing": None,
    "number": -3,
    "part": 1.5e-7,
    "words": "a \"b\" 'c' \\ \n\t {% x %} {{ y }} %} 😀 é",
    "rows": [1, "two", {"three": [True]}],
}
SHOWN = "{{ [flag, nothing, number, part, words, rows] | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        SHOWN,
        "\n" + SHOWN,
        "\n\n  " + SHOWN,
        "  {% if flag %}x{% endif %}\n" + SHOWN,
        "  {%- if not flag %}x{% endif %}\n" + SHOWN,
        "{#- markers: <a> -#}\n\n " + SHOWN,
        "{# markers: <a> #}\n\n " + SHOWN,
        "{# markers: <a> #} " + SHOWN,
        "{% macro show(x) %}{{ x }}{{ words }}{% endmacro %}{{ show(1) }}" + SHOWN,
        "{% if flag is not defined %}{% set flag = true %}{% endif %}" + SHOWN,
        "{% for m in messages %}{% set number = number + 1 %}{{ number }}{% endfor %}" + SHOWN,
    ],
)
def test_a_template_with_its_arguments_inside_renders_as_with_them_handed_in(source: str) -> None:
    handed = ChatTemplate(source, special_tokens={}, arguments=ARGUMENTS)
    saved = saved_template(handed, arguments=ARGUMENTS | {"unread": 1, "no name": 2}, special_tokens={})
    inside = ChatTemplate(saved.source, special_tokens={})
    assert inside.render(ASKED) == handed.render(ASKED)
    [text], _ = chat_template_utils.render_jinja_template([ASKED], chat_template=saved.source)
    assert text == handed.render(ASKED)
    assert required_markers(inside) == required_markers(handed)
    assert "unread" not in saved.source


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_built_in_templates_stay_what_they_are_behind_an_argument(name: str) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    source = builtin_template(name)
    own, baked = (ChatTemplate(text, special_tokens=special) for text in (source, bake(source, {"unread": 1})))
    talk = [*ASKED, {"role": "assistant", "content": "Hi"}]
    for asks in (True, False):
        assert own.render(talk, add_generation_prompt=asks) == baked.render(talk, add_generation_prompt=asks)
    assert required_markers(own, special) == required_markers(baked, special)


def test_an_argument_that_is_no_plain_number_is_refused() -> None:
    with pytest.raises(UserError, match="`rate` is inf"):
        bake(SHOWN, {"rate": float("inf")})


# The first token.


def test_a_gguf_begins_texts_as_training_did(tuned: Path, tmp_path: Path) -> None:
    """A tokenizer that begins plain text with a token, under a template that does not: llama.cpp put it there."""
    adapter = _speaking(tuned, tmp_path, TURNS + ASKS, adds_bos=True)
    done = exported(adapter, tmp_path / "out", to=("gguf", "ollama"), gguf=("f16",))
    assert done.parity.is_ok, done.parity
    field = GGUFReader(next((tmp_path / "out" / "gguf").iterdir())).get_field("tokenizer.ggml.add_bos_token")
    assert field is not None and field.contents() is False
    assert any("begins without `<|endoftext|>`" in note for note in done.notes)


@pytest.mark.parametrize("template", ["{{ bos_token }}" + TURNS + ASKS, None])
def test_a_first_token_that_belongs_there_is_still_added(tuned: Path, tmp_path: Path, template: str | None) -> None:
    _speaking(tuned, tmp_path, "", adds_bos=True)
    _change(tmp_path / "base" / "tokenizer_config.json", chat_template=template)
    found = read_vocabulary(load_tokenizer(tmp_path / "base"), num_rows=ROWS, config={})
    assert found.adds_bos and not any("begins without" in note for note in found.notes)


# The beginning of a reply.


def test_a_template_that_does_not_begin_replies_is_no_template_for_ollama(tuned: Path) -> None:
    """The model had to write `<|im_start|>` first, at which Ollama was told to stop."""
    tokenizer = load_tokenizer(tuned / "base")
    with pytest.raises(UserError, match="has no generation prompt") as caught:
        derive_template(TURNS, tokenizer=tokenizer, adds_bos=False, date=None)
    assert "<|im_start|>assistant" in str(caught.value.where)
    template = ChatTemplate(TURNS, special_tokens={})
    [note] = saved_template(template, arguments={}, special_tokens={}).notes
    assert "lacks '<|im_start|>assistant\\n'" in note


@pytest.mark.parametrize(
    ("turns", "missing"),
    [
        ("{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}", ""),
        ("{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}", ""),
        ("{{ m.role }}: {{ m.content }}\n", "assistant: "),
    ],
)
def test_a_question_whose_end_begins_the_reply_is_well(tuned: Path, turns: str, missing: str) -> None:
    template = ChatTemplate("{% for m in messages %}" + turns + "{% endfor %}", special_tokens={})
    render = lambda messages, asks: template.render(messages, add_generation_prompt=asks)  # noqa: E731
    assert missing_generation_prompt(render) == missing
    if not missing:
        tokenizer = load_tokenizer(tuned / "base")
        assert derive_template(template.source, tokenizer=tokenizer, adds_bos=False, date=None).stops
