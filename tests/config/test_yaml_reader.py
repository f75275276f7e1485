"""The strict YAML reader: what it reads differently from PyYAML, what it refuses, and that bombs stay cold."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewell.config.yaml_reader import MAX_BYTES, MAX_VALUES, YamlDocument, parse_scalar, read_value, read_yaml
from tunewell.core.errors import UserError


def read(text: str) -> object:
    reading = read_yaml(text, "c.yaml")
    assert reading.problems == []
    assert reading.is_complete
    return reading.value


def complaints(text: str) -> list[str]:
    return [f"{problem.where}: {problem.what}" for problem in read_yaml(text, "c.yaml").problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("1E5", 1e5), ("2.5e+3", 2500.0), (".5", 0.5), ("5.", 5.0), ("-3", -3), ("+3", 3),
        ("017", 17), ("0o17", 15), ("0x1F", 31), (".inf", float("inf")), ("-.INF", float("-inf")),
        ("true", True), ("FALSE", False), ("~", None), ("null", None), ("", None),
        ("yes", "yes"), ("no", "no"), ("on", "on"), ("Off", "Off"), ("y", "y"), ("nUll", "nUll"), ("tRue", "tRue"),
        ("2025-01-01", "2025-01-01"), ("1:30", "1:30"), ("1_000", "1_000"), ("1.2.3", "1.2.3"), ("e5", "e5"),
        ("٣", "٣"),
    ],
)  # fmt: skip
def test_plain_words_are_read_as_yaml_1_2_does(text, value):
    """PyYAML reads `1e-4` as text, `no` as false, `017` as 15, `1:30` as 90 and `2025-01-01` as a date."""
    assert parse_scalar(text) == value and type(parse_scalar(text)) is type(value)
    assert read(f"key: {text}\n") == {"key": value}


def test_quoted_words_stay_text():
    """A quoted number must not become a number behind the person's back."""
    assert read("a: '5'\nb: \"true\"\nc: |\n  1e-4\n") == {"a": "5", "b": "true", "c": "1e-4\n"}


def test_keys_are_always_text():
    """`null:` or `1:` as a key would otherwise become a key nobody can name."""
    assert read("1: a\nnull: b\nyes: c\n") == {"1": "a", "null": "b", "yes": "c"}


def test_every_value_knows_its_line():
    """Messages without a line number send people searching."""
    reading = read_yaml("a: 1\nb:\n  - x\n  - c: 2\n\nd: {e: 3,\n    f: 4}\n", "c.yaml")
    assert reading.lines == {
        (): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4,
        ("d",): 6, ("d", "e"): 6, ("d", "f"): 7,
    }  # fmt: skip


def test_a_key_given_twice_is_refused_with_both_lines():
    """PyYAML keeps the last silently: half of a config is then not what it seems."""
    assert complaints("a: 1\nb:\n  c: 2\n  c: 3\na: 4\n") == [
        "c.yaml line 4: `c` is set twice, in lines 3 and 4",
        "c.yaml line 5: `a` is set twice, in lines 1 and 5",
    ]


@pytest.mark.parametrize(
    "text",
    ["a: !!python/object/apply:os.system [echo]", "a: !x 5", "!!map {a: 1}", "a: !!str 5", "a: ! 5", "- !!binary aGk="],
)
def test_tags_are_refused(text):
    """Tags are how YAML runs code."""
    assert any("tag" in complaint for complaint in complaints(text))


def test_values_can_be_shared_by_an_alias():
    """Plain aliases are ordinary YAML; each use is a value of its own, so that changing one leaves the other."""
    value = read("a: &x {k: [1]}\nb: *x\n")
    assert value == {"a": {"k": [1]}, "b": {"k": [1]}}
    assert value["a"]["k"] is not value["b"]["k"]  # type: ignore[index]


def bomb() -> str:
    lines = ["a: &a [l,o,l,l,o,l,l,o,l]"]
    for previous, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{','.join([f'*{previous}'] * 9)}]")
    return "\n".join(lines)


def test_an_alias_bomb_is_refused_at_once():
    """294 bytes of it make 10^8 values when they are walked."""
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20));"
        "resource.setrlimit(resource.RLIMIT_CPU, (5, 5));"
        "from tunewell.config.yaml_reader import read_yaml;"
        "print(read_yaml(sys.stdin.read(), 'c.yaml').problems[-1].what)"
    )
    done = subprocess.run([sys.executable, "-c", limited], input=bomb(), capture_output=True, text=True, timeout=30)
    assert "once its aliases are expanded" in done.stdout, done.stderr


def test_the_number_of_values_is_limited():
    """Many uses of one alias are as large as nested ones."""
    assert read("a: &a 1\nb: [" + "*a, " * 1000 + "]\n")
    text = "a: &a 1\nb: [" + "*a, " * MAX_VALUES + "]\n"
    assert any("once its aliases are expanded" in complaint for complaint in complaints(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "contains an alias of itself"),
        ("a: *b", "undefined alias"),
        ("base: &b {x: 1}\na:\n  <<: *b\n", "merge keys"),
        ("a: 1\n---\nb: 2\n", "another document"),
        ("a: [\n", "invalid YAML"),
        ("a: b: c\n", "invalid YAML"),
        ("a:\n\t- b\n", "invalid YAML"),
        ("? [a]\n: b\n", "used as a key"),
        ("[" * 100_000, "nested more than"),
        ("- " * 100_000, "nested more than"),
        ("a: b\x07\n", "U+0007"),
        ("x" * (MAX_BYTES + 1), "characters"),
        ("a: *.jsonl", "invalid YAML"),
    ],
)
def test_what_cannot_be_meant_is_refused(text, message):
    """Each of these is either silently something else in PyYAML, or a crash."""
    assert any(message in complaint for complaint in complaints(text)), complaints(text)


def test_a_star_gets_the_advice_to_quote_it():
    """`sources: *.jsonl` is what people write."""
    assert "quotes" in (read_yaml("a: *.jsonl", "c.yaml").problems[0].fix or "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("512", 512), ("1e-4", 1e-4), ("", None), ("a.jsonl#500", "a.jsonl#500"), ("my file #5", "my file #5"),
        ("*.jsonl", "*.jsonl"), ("C:\\rows: a.jsonl", "C:\\rows: a.jsonl"), ("!x", "!x"), ("'5'", "5"),
        ("[a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]), ("{a: 1, b: [x]}", {"a": 1, "b": ["x"]}), (" true ", True),
    ],
)  # fmt: skip
def test_a_value_on_the_command_line_needs_no_quotes_of_its_own(text, value):
    """The shell has taken its quotes already; a `#` or `*` inside is no comment and no alias."""
    assert read_value(text, "--set k=v") == value


def test_a_broken_list_on_the_command_line_is_the_persons_error():
    """It must not be read as text."""
    with pytest.raises(UserError, match="invalid YAML") as caught:
        read_value("[a, b", "--set k=[a, b")
    assert caught.value.where == "--set k=[a, b"


@given(st.text(max_size=40) | st.text(alphabet=st.sampled_from(list("ab:-[]{}&*!#\"'\n \t?|>%@`,<0e.")), max_size=60))
def test_any_text_gives_a_value_or_problems(text):
    """The reader must never raise, whatever the file holds."""
    reading = read_yaml(text, "c.yaml")
    assert isinstance(reading, YamlDocument)
    assert reading.is_complete or reading.problems


_text = st.text(st.characters(codec="utf-8"), max_size=8)
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)


@given(_values)
def test_json_is_read_as_what_it_says(value):
    """A config written by another program as JSON, which is YAML too, must mean the same here."""
    assert read(json.dumps(value)) == value


@given(st.text(max_size=20))
def test_a_word_on_the_command_line_is_never_half_read(text):
    """What is no list, no group and no quoted text is taken whole."""
    if not text.strip().startswith(("[", "{", '"', "'")):
        value = read_value(text, "--set k=v")
        assert value is None or isinstance(value, bool | int | float) or value == text.strip()
