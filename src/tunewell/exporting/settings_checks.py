"""Hold the settings beside a folder's weights against the model's: its shape, where it stops, its special tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunewell.records.parity import Check, ModelFacts

_SHOWN = 3
# What a library writes about itself, or about the numbers of one file.
_PASSING = frozenset(
    {"transformers_version", "dtype", "torch_dtype", "_name_or_path", "name_or_path", "architectures"}
    | {"_from_model_config", "_attn_implementation", "_attn_implementation_autoset", "_commit_hash"}
)
_NAMED = ("bos", "eos", "unk", "sep", "pad", "mask", "cls")
_TOKENIZER, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Give settings as a JSON file has them, without what changes from one file to the next."""
    kept = {key: value for key, value in settings.items() if key not in _PASSING}
    return json.loads(json.dumps(kept, sort_keys=True, default=str))


def check_settings(path: Path, tokenizer: Any, facts: ModelFacts, *, config: Any, generation: Any) -> Check:
    """Compare what a folder says besides its weights, as transformers understands it; an adapter has no `config`."""
    wrong = _differences("generation_config.json", plain_settings(generation.to_dict()), facts.generation)
    if config is not None:
        wrong += _differences("config.json", plain_settings(config.to_dict()), facts.config)
    written = json.loads((path / _TOKENIZER).read_text(encoding="utf-8"))
    for name in (f"{own}_token" for own in _NAMED):
        # Where a model has none, the classes of some tokenizers bring one of their own.
        wanted = facts.special_tokens.get(name)
        found = written.get(name) if wanted is None else getattr(tokenizer, name, None)
        if found != wanted:
            wrong.append(f"the tokenizer's `{name}` is {found!r} and not {wanted!r}")
    if written.get("model_max_length") != facts.max_length:
        wrong.append(f"`model_max_length` is {written.get('model_max_length')} and not {facts.max_length}")
    if (path / _TEMPLATE).is_file() and "chat_template" in written:
        wrong.append(
            f"`{_TOKENIZER}` has a chat template besides `{_TEMPLATE}`, and programs differ in which they take"
        )
    words = "; ".join(wrong[:_SHOWN]) or "settings, stops and special tokens as the model has them"
    return Check(name="settings", is_ok=not wrong, words=words, figures={"wrong": len(wrong)})


def _differences(name: str, found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    keys = sorted({*found, *wanted})
    return [
        f"`{key}` in `{name}` is {_short(found.get(key))} and not {_short(wanted.get(key))}"
        for key in keys
        if found.get(key) != wanted.get(key)
    ]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
