"""Put into a GGUF file's header what is known of the model: its name and origin, its settings, its tokenizer."""

import re
from typing import Any

from tunewell.exporting.gguf_fields import FieldValue
from tunewell.exporting.gguf_vocabulary import GgufVocabulary

_TEXTS = {
    "name": "name",
    "author": "author",
    "version": "version",
    "organization": "organization",
    "description": "description",
    "license": "license",
    "license_link": "license.link",
    "url": "url",
}
_PHI_3 = re.compile("phi-?3", re.IGNORECASE)
_LISTS = ("tags", "languages")


def add_card(writer: Any, card: dict[str, Any], *, num_parameters: int, swallows_spaces: bool) -> None:
    """Say what the model is called and where it comes from."""
    writer.add_type("model")
    card = card | {"name": _fitting_name(str(card["name"]), swallows_spaces)}
    for key, field in _TEXTS.items():
        if text := card.get(key):
            writer.add_string(f"general.{field}", str(text))
    writer.add_size_label(_size_label(num_parameters))
    bases = card.get("base_model") or []
    bases = bases if isinstance(bases, list) else [bases]
    if bases:
        writer.add_uint32("general.base_model.count", len(bases))
    for index, base in enumerate(bases):
        writer.add_string(f"general.base_model.{index}.name", str(base))
    for key in _LISTS:
        if values := [str(value) for value in card.get(key) or []]:
            writer.add_array(f"general.{key}", values)


def add_fields(writer: Any, fields: dict[str, FieldValue]) -> None:
    """Write the fields of an architecture, each in the type that llama.cpp expects."""
    for key, value in fields.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def add_vocabulary(writer: Any, vocabulary: GgufVocabulary, *, space_prefix: bool | None) -> None:
    """Write the tokenizer; whether ends are added to plain text is always said, never left to a default."""
    words = vocabulary.words
    writer.add_tokenizer_model(words.model)
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    if words.scores is not None:
        writer.add_token_scores(words.scores)
    if words.merges is not None:
        writer.add_token_merges(words.merges)
    for name, number in vocabulary.special_ids.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if space_prefix is not None:
        writer.add_add_space_prefix(space_prefix)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _fitting_name(name: str, swallows_spaces: bool) -> str:
    """Keep `phi-3` in names of models whose markers swallow spaces, and out of all others.

    By that part of the name alone does llama.cpp know it, and a file without Phi 3's tokens is then not even opened.
    """
    if swallows_spaces:
        return name if _PHI_3.search(name) else f"{name} (phi-3)"
    return _PHI_3.sub("Phi 3", name)


def _size_label(num_parameters: int) -> str:
    """Write a count as model names do: 135M, 1.2B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if num_parameters >= size:
            amount = num_parameters / size
            return f"{amount:.1f}{letter}" if amount < 10 else f"{amount:.0f}{letter}"
    return f"{num_parameters / 1e3:.0f}K"
