"""Check configs of Axolotl, LLaMA-Factory, TRL, transformers, torchtune, LitGPT, DeepSpeed and accelerate before a run.

Keys are read line by line (YAML, JSON, keyword arguments of Python calls, command-line flags), so that half a file or a
pasted part of one is checked too. Each rule adds a fact `config:ID` with its lines; contradictions that one pattern can
express are signatures instead.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tunewell.config.foreign import table
from tunewell.config.releases import Versions
from tunewell.config.schema import ALIASES
from tunewell.core.errors import UserError
from tunewell.core.files import open_file, parse_json
from tunewell.core.units import count, percent
from tunewell.features.diagnose.config_versions import check_keys
from tunewell.features.diagnose.reading import Reading

_SHARED = ("model", "packing", "seed", "template", "tokenizer")
"""Keys that tunewell's own config has too."""
_LEAST_KEYS = 3
_BEFORE_KEY = 24
_LIMITS = ("max_length", "max_seq_length", "cutoff_len", "sequence_len", "max_seq_len", "model_max_length")
_CHARS_PER_TOKEN = 4
"""Usual for English. The result is called an estimate; `tunewell prepare` counts."""
_MAX_ROWS = 100_000
_PAIR = re.compile(
    r"(?:^|[\s{(,])-{0,2}['\"]?([A-Za-z_]\w{0,60})['\"]?(?:\s{0,4}[:=]\s{0,4}|(?<=\w)\s)"
    r"(?:(['\"])([^'\"\n]{0,200})\2|([^\s,()'\"{}#]{1,200}))?"
)
_METRICS = re.compile(r"['\"](?:loss|eval_loss|grad_norm|train_runtime|train_loss)['\"]\s*:")
_TRUE = ("true", "yes", "on", "1")
_QUOTED_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:e[-+]?\d+)?", re.I)
_NUMERIC = ("learning_rate", "lr", "weight_decay", "warmup_ratio", "gradient_accumulation_steps", "max_grad_norm")


@dataclass(frozen=True)
class ConfigValue:
    """A value of a config: its text, whether it is quoted, and its line."""

    text: str
    is_quoted: bool
    line: int


class ConfigKeys(dict[str, ConfigValue]):
    """The keys of a config with their values."""

    def first(self, *names: str) -> str | None:
        """Return the first of these keys that the config has."""
        return next((name for name in names if name in self), None)

    def text(self, *names: str) -> str:
        """Return the value of the first of these keys in lower case; an empty text if there is none, or it is null."""
        name = self.first(*names)
        text = self[name].text.lower() if name else ""
        return "" if text in ("null", "none") else text

    def number(self, *names: str) -> float:
        """Return the value of the first of these keys; NaN if there is none, or it is not a number."""
        try:
            return float(self.text(*names))
        except ValueError:
            return math.nan


def lint(text: str, reading: Reading, versions: Versions) -> list[str]:
    """Add the facts about a config to a reading, and return notes. Text that is not a config is left alone.

    `versions` are the releases of libraries for which keys are checked.
    """
    lines = text.split("\n")
    remarks = list(check_keys(text, versions))
    for wrong in remarks:
        line = " ".join(lines[wrong.line - 1].split())
        start = max(0, line.find(wrong.key) - _BEFORE_KEY)
        shown = f"{'... ' if start else ''}{line[start : start + 300]}"
        if wrong.fact:
            reading.add_fact(f"config:{wrong.fact}", wrong.line, shown, wrong.note)
    keys = read_keys(lines)
    known = sorted(keys.keys() & {*table(), *ALIASES, *_SHARED})
    is_call = re.search(r"\b(?:SFTConfig|TrainingArguments|LoraConfig|DPOConfig|GRPOConfig)\(", text) is not None
    if len(known) < (1 if is_call else _LEAST_KEYS):
        return []
    for fact, rule in _RULES.items():
        for name in filter(None, rule(keys)):
            line = keys[name].line
            reading.add_fact(f"config:{fact}", line, " ".join(lines[line - 1].split())[:300])
    if not reading.errors:
        reading.config = known
    return list(dict.fromkeys(remark.note for remark in remarks if not remark.fact))


def lint_lengths(text: str, rows: Path, reading: Reading) -> None:
    """Add a fact if the length limit of a config cuts rows. Raises UserError if the rows cannot be read."""
    lines = text.split("\n")
    keys = read_keys(lines)
    name = next((name for name in _LIMITS if keys.number(name) > 0), None)
    if name is None:
        raise UserError("the config has no length limit", fix=f"`--rows` compares rows with {', '.join(_LIMITS)}")
    limit, lengths = keys[name], _row_lengths(rows)
    if num_cut := sum(length > keys.number(name) for length in lengths):
        share = f"about {percent(num_cut / len(lengths))} of {count(len(lengths))} rows"
        longest = f"about {count(max(lengths))} (estimated, {_CHARS_PER_TOKEN} characters per token)"
        note = f"{share} are longer than {limit.text} tokens; the longest has {longest}"
        reading.add_fact("config:silent-truncation", limit.line, " ".join(lines[limit.line - 1].split())[:100], note)


def _row_lengths(rows: Path) -> list[int]:
    """Return the estimated number of tokens of each row of a JSONL file: the characters of its texts, divided."""
    try:
        with open_file(rows, "r", encoding="utf-8", errors="replace") as file:
            texts = [line for line in islice(file, _MAX_ROWS) if line.strip()]
        lengths = [_text_length(parse_json(line)) // _CHARS_PER_TOKEN for line in texts]
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the rows in `{rows}` cannot be read: {error}", fix="give a JSONL file") from None
    if not lengths:
        raise UserError(f"`{rows}` has no rows", fix="give a JSONL file with one object per line")
    return lengths


def _text_length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_text_length(part) for part in cast(dict[str, Any], value).values())
    return sum(_text_length(part) for part in cast(list[Any], value)) if isinstance(value, list) else 0


def read_keys(lines: list[str]) -> ConfigKeys:
    """Return the keys of a config with their first value that is not empty."""
    found = ConfigKeys()
    for number, line in enumerate(lines[:20_000], start=1):
        if _METRICS.search(line):
            continue  # newer trainers print their metrics as quoted numbers
        for key, _, quoted, plain in _PAIR.findall(line[:4000]):
            if key not in found or ((quoted or plain) and not found[key].text):
                found[key] = ConfigValue(quoted or plain, bool(quoted), number)
    return found


# Each rule returns the keys that are wrong together.


def _zero3_device_map(keys: ConfigKeys) -> list[str | None]:
    is_zero3 = keys.text("zero_stage", "stage") == "3" or "z3" in keys.text("deepspeed")
    return [keys.first("zero_stage", "stage"), "device_map"] if is_zero3 and keys.text("device_map") else []


def _quoted_numbers(keys: ConfigKeys) -> list[str | None]:
    quoted = [name for name in _NUMERIC if name in keys and keys[name].is_quoted]
    return [name for name in quoted if _QUOTED_NUMBER.fullmatch(keys[name].text)]


def _quantized_without_adapter(keys: ConfigKeys) -> list[str | None]:
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if keys.text(name) in _TRUE]
    bits += ["quantization_bit"] if abs(keys.number("quantization_bit")) > 0 else []
    method = keys.first("finetuning_type", "train_type", "tuner_type")
    is_full = method is not None and keys[method].text == "full"
    has_no_adapter = keys.keys() >= {"micro_batch_size", "base_model"} and not keys.text("adapter")
    return [*bits, method if is_full else None] if bits and (is_full or has_no_adapter) else []


def _rate_too_high(keys: ConfigKeys) -> list[str | None]:
    is_lora = bool(keys.keys() & {"lora_r", "lora_rank", "lora_alpha", "adapter", "lora_target"})
    limit = 3e-3 if is_lora or keys.text("kind") in ("lora", "dora") else 1e-3  # `kind` is in tunewell's own config
    if "muon" in keys.text("optimizer", "optim"):
        return []  # its rates are not those of AdamW
    return [keys.first("learning_rate", "lr")] if keys.number("learning_rate", "lr") >= limit else []


def _fp16_on_bf16(keys: ConfigKeys) -> list[str | None]:
    is_16_bit = keys.text("torch_dtype", "dtype") in ("bfloat16", "float16", "torch.bfloat16")
    return ["fp16", keys.first("torch_dtype", "dtype")] if keys.text("fp16") in _TRUE and is_16_bit else []


_RULES: dict[str, Callable[[ConfigKeys], list[str | None]]] = {
    "zero3-device-map": _zero3_device_map,
    "yaml-float-string": _quoted_numbers,
    "quantized-full-finetune": _quantized_without_adapter,
    "lr-too-high": _rate_too_high,
    "fp16-unscale-gradients": _fp16_on_bf16,
}
