"""Check configs of Axolotl, LLaMA-Factory, TRL, transformers, torchtune, LitGPT, DeepSpeed and accelerate before a run.

Keys are read line by line (YAML, JSON, keyword arguments of Python calls, command-line flags), so that half a file or a
pasted part of one is checked too. Each rule adds a fact `config:ID` with its lines; contradictions that one pattern can
express are signatures instead.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, cast

from tunewell.core.errors import UserError
from tunewell.core.files import open_file, parse_json, read_text
from tunewell.core.units import count, percent
from tunewell.features.diagnose.config_versions import Versions, version_hints, wrong_keys
from tunewell.features.diagnose.findings import Evidence
from tunewell.features.diagnose.reading import Reading

_KEYS_FILE = Path(__file__).with_name("config_keys.txt")
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

    @property
    def is_true(self) -> bool:
        return self.text.lower() in _TRUE

    @property
    def number(self) -> float | None:
        try:
            return float(self.text)
        except ValueError:
            return None


Keys = dict[str, ConfigValue]


@lru_cache(maxsize=1)
def known_keys() -> frozenset[str]:
    """Return the keys by which a config of a trainer is recognised."""
    return frozenset(read_text(_KEYS_FILE).split())


def lint(text: str, reading: Reading, versions: Versions) -> list[str]:
    """Add the facts about a config to a reading, and return notes. Text that is not a config is left alone.

    `versions` are the releases of libraries for which keys are checked.
    """
    lines = text.split("\n")
    for wrong in wrong_keys(text, versions):
        if wrong.is_certain or not wrong.is_known:
            name = wrong.fact
            line = " ".join(lines[wrong.line - 1].split())
            start = max(0, line.find(wrong.key) - _BEFORE_KEY)
            shown = Evidence(
                wrong.line, f"{'... ' if start else ''}{line[start : start + 300]}", reading.name, wrong.note
            )
            reading.facts.setdefault(f"config:{name}", []).append(shown)
    keys = read_keys(lines)
    known = sorted(keys.keys() & known_keys())
    is_call = re.search(r"\b(?:SFTConfig|TrainingArguments|LoraConfig|DPOConfig|GRPOConfig)\(", text) is not None
    if len(known) < (1 if is_call else _LEAST_KEYS):
        return []
    for name, rule in _RULES.items():
        for value in rule(keys):
            shown = " ".join(lines[value.line - 1].split())[:300]
            reading.facts.setdefault(f"config:{name}", []).append(Evidence(value.line, shown, reading.name))
    if not reading.errors:
        reading.config = known
    return version_hints(text, versions)


def lint_lengths(text: str, rows: Path, reading: Reading) -> None:
    """Add a fact if the length limit of a config cuts rows. Raises UserError if the rows cannot be read."""
    lines = text.split("\n")
    keys = read_keys(lines)
    limit = next((keys[name] for name in _LIMITS if name in keys and keys[name].number), None)
    if limit is None or limit.number is None:
        raise UserError("the config has no length limit", fix=f"`--rows` compares rows with {', '.join(_LIMITS)}")
    lengths = _row_lengths(rows)
    num_cut = sum(1 for length in lengths if length > limit.number)
    if num_cut:
        words = (
            f"about {percent(num_cut / len(lengths))} of {count(len(lengths))} rows are longer than {limit.text} tokens"
        )
        words += f"; the longest has about {count(max(lengths))} (estimated, {_CHARS_PER_TOKEN} characters per token)"
        shown = " ".join(lines[limit.line - 1].split())[:100]
        reading.facts["config:silent-truncation"] = [Evidence(limit.line, shown, reading.name, words)]


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


def read_keys(lines: list[str]) -> Keys:
    """Return the keys of a config with their first value that is not empty."""
    found: Keys = {}
    for number, line in enumerate(lines[:20_000], start=1):
        if _METRICS.search(line):
            continue  # newer trainers print their metrics as quoted numbers
        for match in _PAIR.finditer(line[:4000]):
            key, _, quoted, plain = match.groups()
            value = quoted if quoted is not None else plain or ""
            if key not in found or (value and not found[key].text):
                found[key] = ConfigValue(value, quoted is not None, number)
    return found


def _zero3_device_map(keys: Keys) -> list[ConfigValue]:
    stage = keys.get("zero_stage") or keys.get("stage")
    place = keys.get("device_map")
    is_zero3 = (stage is not None and stage.text == "3") or "z3" in getattr(keys.get("deepspeed"), "text", "")
    if not is_zero3 or place is None or place.text.lower() in ("", "null", "none"):
        return []
    return [value for value in (stage, place) if value is not None]


def _quoted_numbers(keys: Keys) -> list[ConfigValue]:
    values = [keys[name] for name in _NUMERIC if name in keys]
    return [value for value in values if value.is_quoted and _QUOTED_NUMBER.fullmatch(value.text)]


def _quantized_without_adapter(keys: Keys) -> list[ConfigValue]:
    bits = [keys[name] for name in ("load_in_4bit", "load_in_8bit") if name in keys and keys[name].is_true]
    bits += [keys["quantization_bit"]] if keys.get("quantization_bit") and keys["quantization_bit"].number else []
    method = keys.get("finetuning_type") or keys.get("train_type") or keys.get("tuner_type")
    is_full = method is not None and method.text == "full"
    is_axolotl = "micro_batch_size" in keys and "base_model" in keys
    has_no_adapter = is_axolotl and keys.get("adapter", ConfigValue("", False, 0)).text in ("", "null")
    return [*bits, *([method] if method and is_full else [])] if bits and (is_full or has_no_adapter) else []


def _rate_too_high(keys: Keys) -> list[ConfigValue]:
    rate = keys.get("learning_rate") or keys.get("lr")
    number = rate.number if rate is not None else None
    is_lora = bool(keys.keys() & {"lora_r", "lora_rank", "lora_alpha", "adapter", "lora_target"})
    is_lora = is_lora or keys.get("kind", ConfigValue("", False, 0)).text in ("lora", "dora")  # tunewell's own config
    limit = 3e-3 if is_lora else 1e-3
    if "muon" in getattr(keys.get("optimizer") or keys.get("optim"), "text", ""):
        return []  # its rates are not those of AdamW
    return [rate] if rate is not None and number is not None and number >= limit else []


def _fp16_on_bf16(keys: Keys) -> list[ConfigValue]:
    fp16 = keys.get("fp16")
    dtype = keys.get("torch_dtype") or keys.get("dtype")
    if fp16 is None or not fp16.is_true or dtype is None or dtype.text not in ("bfloat16", "float16", "torch.bfloat16"):
        return []
    return [fp16, dtype]


_RULES: dict[str, Callable[[Keys], list[ConfigValue]]] = {
    "zero3-device-map": _zero3_device_map,
    "yaml-float-string": _quoted_numbers,
    "quantized-full-finetune": _quantized_without_adapter,
    "lr-too-high": _rate_too_high,
    "fp16-unscale-gradients": _fp16_on_bf16,
}
