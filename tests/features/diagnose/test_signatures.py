"""Every signature file is valid, names its class on its own text, and cannot make matching slow."""

import re
from collections.abc import Iterator

import pytest

from tunewell.features.diagnose.diagnose import diagnose_text
from tunewell.features.diagnose.findings import UNKNOWN
from tunewell.features.diagnose.knowledge import (
    FOLDER,
    FailureClass,
    Signature,
    load_classes,
    load_phrases,
    load_tools,
    read_class,
)
from tunewell.features.diagnose.patterns import Pattern, compile_pattern, fold

CLASSES = load_classes()
COMMANDS = {"plan", "doctor", "prepare", "train", "validate", "export", "inspect", "notebook", "diagnose"}


def sample_of(pattern: str) -> str:
    """Return a text that matches a pattern."""
    while found := re.search(r"\{([^{}]*)\}", pattern):
        first = re.split(r"(?<!<)\|(?!>)", found[1])[0]
        first = load_phrases()[first[1:]][0] if first.startswith("@") else first
        pattern = pattern[: found.start()] + first + pattern[found.end() :]
    for token, text in (("<**>", " x "), ("<*>", " x "), ("<#>", "12"), ("<w>", "name"), ("<~>", ""), ("<b>", "{")):
        pattern = pattern.replace(token, text)
    return pattern.replace("<%>", "40%|")


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_signature_file_is_complete(name: str) -> None:
    """A class without a cause, a fix or a family shows an empty screen."""
    failure = CLASSES[name]
    assert failure.severity in ("failure", "warning", "harmless")
    assert re.fullmatch(r"[a-z0-9-]+", failure.id) and failure.title and failure.family
    assert failure.signatures, "a class needs a signature"
    for key in ("cause", "fix", "example"):
        assert failure.page[key].strip(), key
    for pattern in (pattern for signature in failure.signatures for pattern in signature.patterns):
        assert compile_pattern(pattern.text, load_phrases()).expression
    assert set(failure.page.get("caught_by", ())) <= COMMANDS
    assert set(failure.page.get("fixes", {})) <= {tool.name for tool in load_tools()}
    assert set(failure.explains) <= CLASSES.keys(), "`explains` names a class that does not exist"
    assert all(0.2 <= signature.confidence <= 0.98 for signature in failure.signatures)
    assert set(failure.page) <= {"cause", "fix", "next", "caught_by", "not", "example", "symptoms", "fixes"}


def test_each_pattern_matches_its_own_text() -> None:
    """A wildcard that takes the text behind it never lets its pattern match."""
    wrong = [p.text for p in _all_patterns() if not p.spans(fold(sample_of(p.text).encode()), 1)]
    assert wrong == []


def _plain_signatures() -> Iterator[tuple[FailureClass, Signature]]:
    for failure in CLASSES.values():
        for signature in failure.signatures:
            if not signature.is_sentence and not signature.facts and failure.severity != "harmless":
                yield failure, signature


def test_each_signature_finds_its_class_in_its_own_text() -> None:
    """A pattern with a typing error, or one that another class takes over, is never found."""
    missing = []
    for failure, signature in _plain_signatures():
        lines = [sample_of(pattern.text) for pattern in (*signature.all, *signature.any[:1])]
        found = [finding.id for finding in diagnose_text("\n".join(lines) + "\n").findings]
        if failure.id not in found and signature.confidence >= 0.45 and failure.id != UNKNOWN:
            missing.append((failure.id, lines, found))
    assert missing == []


def _all_patterns() -> set[Pattern]:
    tools = {pattern for tool in load_tools() for pattern in tool.patterns}
    return tools | {p for failure in CLASSES.values() for s in failure.signatures for p in s.patterns}


def test_no_pattern_has_an_unbounded_repetition() -> None:
    """An unbounded or nested repetition can take quadratic time on a long line."""
    wrong = [
        p.text for p in _all_patterns() if re.search(r"(?<!\\)[*+](?!\+?\))|\{\d+,\}", _outside_classes(p.expression))
    ]
    assert wrong == []


def _outside_classes(expression: str) -> str:
    expression = re.sub(r"\\.", "", expression)
    expression = re.sub(r"\[[^\]]*\]", "", expression)
    return re.sub(r"\}\+", "}", expression)


@pytest.mark.slow
def test_patterns_survive_long_repeats_of_their_own_parts() -> None:
    """Half a match, repeated, is the worst case of a pattern that backtracks."""
    for pattern in _all_patterns():
        text = sample_of(pattern.text)
        for part in (text[:1], text[: len(text) // 2], text[:-1], text.split(" ")[0] + " "):
            pattern.spans(fold((part * 2000).encode()[:20_000]), 20)


@pytest.mark.parametrize(
    ("pattern", "text", "is_found"),
    [
        ("loss scale <*> minimum", "Current LOSS   scale already at minimum -", True),
        ("loss scale <*> minimum", "loss scale\nminimum", False),
        ("size <**> torch", "size mismatch:\n  copying torch", True),
        ("rank <#> is greater", "LoRA rank 64 is greater", True),
        ("No module named '<w>'", 'No module named "flash_attn.ops"', True),
        ("was set to 'no'", "was set to `'no'`", True),
        ("babbl<~>", "it babbles", True),
        ("{bf16|bfloat16} is off", "BFloat16 is off", True),
        ("{<|im_end|>|<s>} is left", "<|im_end|> is left", True),
        ("{<|im_end|>|<s>} is left", "> is left", False),
        ("art", "start", False),
        ("out of mem", "out of memory", False),
        ("== <b><b>", "ds[0] == {}", True),
        ("<%>", " 0%|   |", False),
        ("<%>", " 10%|#  |", True),
    ],
)
def test_a_pattern_matches(pattern: str, text: str, is_found: bool) -> None:
    assert bool(compile_pattern(pattern, load_phrases()).spans(fold(text.encode()), 5)) is is_found


@pytest.mark.parametrize("pattern", ["", "{a|b", "{@no-such-list}"])
def test_a_wrong_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError):
        compile_pattern(pattern, load_phrases())


def test_a_new_class_needs_only_a_file(tmp_path) -> None:
    """A contributor adds knowledge without code."""
    file = tmp_path / "teapot.toml"
    file.write_text(
        'title = "S"\nfamily = "x"\nsignature = [{ any = ["I am a teapot"], confidence = 0.9 }]\n[page]\ncause = "c"\n'
    )
    assert read_class(file).signatures[0].any[0].spans(b"i am a teapot", 1)
    file.write_text('title = "Short"\nfamily = "x"\nsignature = [{ confidence = 0.9 }]\n')
    with pytest.raises(ValueError, match="needs"):
        read_class(file)
    file.write_text('title = "Short"\nfamily = "x"\nsignature = [{ any = ["x"], confidence = 0.9, colour = "red" }]\n')
    with pytest.raises(ValueError, match="colour"):
        read_class(file)


def test_printed_messages_are_in_the_installed_libraries() -> None:
    """`printed_by` names a file, which must exist, so that a reader can check the message."""
    import importlib.util

    lost = []
    for failure, signature in _plain_signatures():
        package = (signature.printed_by or "").partition("/")[0]
        spec = importlib.util.find_spec(package) if package in ("trl", "datasets", "peft") else None
        if spec is None or spec.origin is None:
            continue
        root = FOLDER.__class__(spec.origin).parent
        source = (root.parent / str(signature.printed_by)).with_suffix(".py")
        if not source.is_file():
            lost.append((failure.id, signature.printed_by))
    assert lost == []
