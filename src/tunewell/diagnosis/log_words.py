"""The many names that trainers have for a few numbers, and how numbers are written."""

import re
from typing import Any

# Each word with `_` is also found with a space, a slash or nothing in its place.
_WORDS = {
    "held_out_loss": "eval_loss val_loss valid_loss validation_loss dev_loss test_loss held_out_loss val_loss_step"
    " val_loss_epoch val",
    "loss": "loss lm_loss train_loss training_loss train_loss_step train_loss_epoch loss_train loss_step step_loss"
    " batch_loss avr_loss avg_loss average_loss mean_loss running_loss total_loss avg_train_loss",
    "grad_norm": "grad_norm gradient_norm gnorm global_grad_norm total_grad_norm",
    "learning_rate": "learning_rate lr",
    "scale": "loss_scale",
    "step": "step steps global_step current_steps iter iteration",
    "epoch": "epoch",
}
_NAMES = {word.replace("_", ""): key for key, words in _WORDS.items() for word in words.split()}
NAME = "|".join(
    word.replace("_", "[ _/]?") for word in sorted(" ".join(_WORDS.values()).split(), key=len, reverse=True)
)
# Atomic: a number that runs on as something else, such as 12ab, is not the 1 it begins with. 0,52 is a decimal comma.
NUMBER = r"(?>[-+]?(?:nan|inf(?:inity)?|(?!0,\d)\d+(?:,\d{3})*(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?))"


def field_of(name: str) -> str:
    """Give the one name we have for what trainers call by many; what is not known keeps its own."""
    name = name.strip().lower().removeprefix("train/")
    return _NAMES.get(re.sub("[ _/]", "", name), name)


def number_of(value: Any) -> float | None:
    """Read a number that may be written out; None where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value.replace(",", "").strip() if isinstance(value, str) else value)
    except ValueError:
        return None
