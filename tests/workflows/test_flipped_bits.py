"""Damage to a corpus: a flipped bit in any file is noticed wherever results are judged."""

import random

import pytest
from tests.corpora import prepare_in, rows_file

from tunewell.config.load import load_config
from tunewell.core.errors import UserError
from tunewell.data.corpus.reader import open_corpus
from tunewell.evaluation.rows import rows_of_corpus
from tunewell.records.manifest import MANIFEST, read_manifest
from tunewell.workflows.inspect import inspect


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("flipped")
    prepare_in(folder, tiny_model, rows_file(folder / "rows.jsonl", 60), "data.held_out=0.2")
    return folder / "corpus"


def flip(path, position: int, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    "judge", [rows_of_corpus, lambda path: inspect(str(path), load_config(None, ()))], ids=["validate", "inspect"]
)
def test_a_flipped_bit_in_any_file_is_noticed(corpus, judge):
    """Guards verdicts on held-out rows that nobody wrote: only sizes were compared."""
    chance = random.Random(0)
    files = [path for path in sorted(corpus.rglob("*")) if path.is_file() and path.stat().st_size]
    assert len(files) > 8
    judge(corpus)
    missed = []
    for path in files:
        position, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        flip(path, position, bit)
        try:
            judge(corpus)
            missed.append(path.name)
        except UserError:
            pass
        finally:
            flip(path, position, bit)
    assert missed == []
    judge(corpus)


def test_a_flipped_bit_in_the_manifest_is_noticed(corpus):
    """Guards the file that has the hashes of all others: it had none itself."""
    path, chance = corpus / MANIFEST, random.Random(1)
    text = path.read_text(encoding="utf-8")
    positions = [at for at, character in enumerate(text) if not character.isspace()]
    for position in chance.sample(positions, 150):
        flip(path, position, chance.randrange(7))
        with pytest.raises(UserError):
            read_manifest(corpus)
        path.write_text(text, encoding="utf-8")
    read_manifest(corpus)


def test_hashes_are_computed_once_per_file(corpus, monkeypatch):
    """Guards the time of a verdict: a corpus may have hundreds of gigabytes."""
    from tunewell.core import cache

    open_corpus(corpus, verify=True)
    monkeypatch.setattr(cache, "sha256_file", lambda path: pytest.fail(f"{path} is hashed again"))
    open_corpus(corpus, verify=True)
