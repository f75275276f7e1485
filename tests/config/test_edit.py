"""Changing keys of a config file: comments, order and other values stay."""

import pytest

from tunewell.config.edit import edit_config, set_key
from tunewell.config.load import load_config
from tunewell.core.errors import UserError

TEXT = """\
# my config
model: tiny   # small

train:
  # how long
  epochs: 2   # enough
  learning_rate: 1e-3

seed: 0
"""


def test_a_value_is_replaced_and_its_comment_stays():
    """A config that loses its reasons is worth less than before."""
    text = set_key(TEXT, "train.epochs", 3)
    assert "  epochs: 3   # enough\n" in text
    assert text.replace("epochs: 3", "epochs: 2") == TEXT


def test_new_keys_go_into_their_section_and_new_sections_to_the_end():
    """Appending `recompute` at the end would put it at the top level."""
    text = set_key(set_key(TEXT, "train.recompute", "on"), "method.rank", 8)
    assert "train:\n  recompute: on\n" in text
    assert text.endswith("\nmethod:\n  rank: 8\n")


def test_the_changed_file_is_loaded_again_before_it_counts(tmp_path):
    """A file in another style must stay as it is, not half changed."""
    path = tmp_path / "tunewell.yaml"
    path.write_text("train: {epochs: 2}\n", encoding="utf-8")
    loaded = load_config(path)
    with pytest.raises(UserError, match="one line"):
        edit_config(loaded, {"train.recompute": "on"})
    assert path.read_text(encoding="utf-8") == "train: {epochs: 2}\n"
    path.write_text(TEXT, encoding="utf-8")
    edit_config(load_config(path), {"train.recompute": "offload", "train.micro_batch_tokens": 512, "method.rank": 8})
    config = load_config(path).config
    assert (config.train.recompute, config.train.micro_batch_tokens, config.method.rank) == ("offload", 512, 8)


def test_without_a_file_the_settings_are_named():
    """A user of flags alone gets the flags to add."""
    with pytest.raises(UserError) as error:
        edit_config(load_config(has_file=False), {"method.rank": 8})
    assert "--set method.rank=8" in (error.value.fix or "")
