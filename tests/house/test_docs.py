"""What is written down agrees with what is declared."""

import re
from pathlib import Path

import tunewell
from tunewell.config.glossary import entries, glossary_text
from tunewell.config.keys import all_keys
from tunewell.core.features import features

PACKAGE = Path(tunewell.__file__).parent
DOCS = PACKAGE.parents[1] / "docs"


def test_every_key_has_a_doc():
    """A key nobody explained is a key nobody can set."""
    assert [name for name, key in all_keys().items() if len(key.doc) < 10] == []


def test_docs_are_sentences():
    """The first letter and the last full stop are what makes a list of keys readable."""
    odd = [name for name, key in all_keys().items() if not key.doc.endswith(".") or key.doc[0].islower()]
    assert odd == []


def test_every_entry_of_the_glossary_is_read():
    """A line the parser misses is a word that cannot be looked up."""
    assert glossary_text().count("\n- ") == len(entries())


def test_every_reason_in_the_code_is_in_the_glossary():
    """The ids are a contract: none may be invented on the side."""
    used = set()
    for file in (PACKAGE / "data").rglob("*.py"):
        used |= set(re.findall(r'Rejected\(\s*"(\w+)"', file.read_text(encoding="utf-8")))
    assert used <= set(entries())


def test_every_key_named_in_the_glossary_exists():
    """A renamed key must be renamed in the words too."""
    groups = {name.partition(".")[0] for name in all_keys()}
    files = ("jsonl", "json", "yaml")
    named = [name for name in re.findall(r"`((?:\w+\.)+\w+)", glossary_text()) if name.partition(".")[0] in groups]
    named = [name for name in named if name.rpartition(".")[2] not in files]
    assert named and [name for name in named if name not in all_keys()] == []


def test_every_test_named_beside_a_seed_exists():
    """A table of solved problems is of use only while its tests exist."""
    page = (DOCS / "seeds.md").read_text(encoding="utf-8")
    root = DOCS.parent
    for part in page.split("\n## ")[1:]:
        script = root / "tests" / "seeds" / f"test_{part[:3]}.py"
        tests = {*re.findall(r"^def (test_\w+)", script.read_text(encoding="utf-8"), flags=re.MULTILINE)}
        for row in [line for line in part.split("\n") if line.startswith("|")][2:]:
            named = re.findall(r"`([\w/.]+)` \|$", row)
            feature = re.match(r"tests/features/(\w+)/", named[0]) if named else None
            if feature and feature[1] not in features():
                continue
            assert named and (named[0] in tests or (root / named[0]).is_file()), row
