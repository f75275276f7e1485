"""A `tokenizer.json` that was made to crash or to fill the memory ends in an error with a fix."""

import json
import subprocess

import pytest

from tunewell.core.errors import UserError
from tunewell.data import trial
from tunewell.data.tokenizers import probe
from tunewell.data.tokenizers.load import load_tokenizer

BOMBS = {
    "a regular expression that backtracks": {
        "pre_tokenizer": {
            "type": "Split", "pattern": {"Regex": "(a+)+$|(.*.*.*.*)*x"}, "behavior": "Isolated", "invert": False,
        }
    },
    "replacements that grow": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 300}] * 4,
        }
    },
}  # fmt: skip
ORDINARY = {
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"},
        "behavior": "Isolated",
        "invert": False,
    }
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNEWELL_CACHE", str(tmp_path / "cache"))


def spoiled(tiny_model, folder, parts):
    folder.mkdir()
    content = json.loads((tiny_model / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(content | parts), encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_an_error(tiny_model, tmp_path, name):
    """Guards the process: both ended it, one with a raw PanicException and one with 3 GB of memory."""
    with pytest.raises(UserError, match=r"`tokenizer\.json` cannot be used") as caught:
        load_tokenizer(spoiled(tiny_model, tmp_path / "model", BOMBS[name]))
    assert caught.value.fix


def test_an_ordinary_pattern_is_tried_once(tiny_model, tmp_path, monkeypatch):
    """Guards the time of each start: the result is cached."""
    model = spoiled(tiny_model, tmp_path / "model", ORDINARY)
    load_tokenizer(model)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("tried again"))
    load_tokenizer(model)


def waits_too_long(*_: object, **__: object) -> None:
    raise TimeoutError


def test_a_busy_machine_does_not_condemn_a_tokenizer(tiny_model, tmp_path, monkeypatch):
    """Guards a later start: a child that had to wait was remembered as a bomb for ever."""
    model = spoiled(tiny_model, tmp_path / "model", ORDINARY)
    monkeypatch.setattr(trial, "call", waits_too_long)
    with pytest.raises(UserError):
        load_tokenizer(model)
    monkeypatch.undo()
    load_tokenizer(model)


def test_a_tokenizer_without_patterns_is_not_tried(tiny_model, monkeypatch):
    """Guards the time of the first start with common tokenizers."""
    monkeypatch.setattr(probe, "require_safe", lambda *_: pytest.fail("tried"))
    load_tokenizer(tiny_model)
