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
    text = "train: {epochs: 2,\n  weight_decay: 0.1}\n"
    path.write_text(text, encoding="utf-8")
    loaded = load_config(path)
    with pytest.raises(UserError, match="cannot be changed") as caught:
        edit_config(loaded, {"train.recompute": "on"})
    assert "add to the command: `--set train.recompute=on`" in str(caught.value)
    assert path.read_text(encoding="utf-8") == text
    path.write_text(TEXT, encoding="utf-8")
    edit_config(load_config(path), {"train.recompute": "offload", "train.micro_batch_tokens": 512, "method.rank": 8})
    config = load_config(path).config
    assert (config.train.recompute, config.train.micro_batch_tokens, config.method.rank) == ("offload", 512, 8)


def test_without_a_file_the_settings_are_named():
    """A user of flags alone gets the flags to add."""
    with pytest.raises(UserError) as error:
        edit_config(load_config(has_file=False), {"method.rank": 8})
    assert "--set method.rank=8" in (error.value.fix or "")


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (
            "method: galore  # mine\nseed: 1\n",
            {"method.kind": "lora"},
            "method:  # mine\n  kind: lora\nseed: 1\n\ntrain:\n  optimizer: adamw\n",
        ),
        ("method: dora\n", {"method.quantize": "nf4"}, "method:\n  quantize: nf4\n  kind: dora\n"),
        (
            "method: {kind: full}\noptim: galore_adamw\n",
            {"train.optimizer": "adamw8bit"},
            "method: {kind: full}\n\ntrain:\n  optimizer: adamw8bit\n",
        ),
        (
            "method: {kind: full, rank: 8}\n",
            {"method.kind": "lora", "train.galore_8bit": True},
            "method:\n  rank: 8\n  kind: lora\n\ntrain:\n  galore_8bit: true\n",
        ),
        (
            "max_seq_length: 512\nseed: 1\n",
            {"packing.context_length": 256},
            "seed: 1\n\npacking:\n  context_length: 256\n",
        ),
    ],
)
def test_a_line_that_sets_the_key_in_another_form_is_replaced(text, changes, expected, tmp_path):
    """`method: galore` was "written on one line", and a second name beside `optim` was refused."""
    path = tmp_path / "tunewell.yaml"
    path.write_text(text, encoding="utf-8")
    edit_config(load_config(path), changes)
    assert path.read_text(encoding="utf-8") == expected
